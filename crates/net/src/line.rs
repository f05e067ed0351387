//! The line rate of this host, corrected while data flows by what gets through. No socket and no clock: it is told.
//!
//! The rate that is measured at the start may be wrong: the link was busy then, or changes later. Only what connections hold
//! in the kernel ([`crate::flight`]) follows the correction. How books are cut, their lanes, and choices by cost stay as
//! they were: all ranks agreed on those, and frames, the order of additions and so the bits depend on them.
//!
//! All lanes are measured over the same rounds of 100 ms, and what counts is the sum: books on slow links use one lane of
//! several, so a lane by itself says nothing about the line. Ranks of one host each know their own share.
//!
//! It only goes up: what was delivered, the line can deliver. That less gets through says nothing of the line: programs have
//! less to send, and processors are busy. A rate that is too high costs little: connections hold as many milliseconds more
//! in the kernel as the line is slower.

use std::time::Duration;

/// The time between two looks at what was delivered.
pub(crate) const ROUND: Duration = Duration::from_millis(100);
/// A lane that looked earlier or later than this, in rounds, was kept from running: that round is not weighed. The sum of
/// lanes that were measured at different times might be more than the line ever carried.
const ROUND_LENGTHS: std::ops::RangeInclusive<f64> = 0.75..=1.25;
/// More than this times the known rate raises it.
const FASTER: f64 = 1.25;
/// What one lane saw in one round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Number of the round; the same on all lanes at the same time.
    pub(crate) round: u64,
    /// Since the lane's last look.
    pub(crate) elapsed: Duration,
    /// What all its connections together got through to the peers since then.
    pub(crate) delivered_bytes: u64,
}

/// What is known of the line. One per engine; lanes come to it once per round.
pub(crate) struct Line {
    lanes: u32,
    bytes_per_s: Option<f64>,
    /// The round that is being summed up, and by how many lanes it has been seen.
    round: u64,
    seen: u32,
    round_bytes_per_s: f64,
}

impl Line {
    pub(crate) fn new(lanes: u32) -> Self {
        Self { lanes, bytes_per_s: None, round: 0, seen: 0, round_bytes_per_s: 0.0 }
    }

    /// Each direction, in bytes per second; `None` until somebody has said.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// The rate is known from elsewhere.
    pub(crate) fn set(&mut self, bytes_per_s: f64) {
        self.bytes_per_s = Some(bytes_per_s);
    }

    /// A lane tells of a round. Returns whether the rate is another one now.
    pub(crate) fn look(&mut self, seen: Seen) -> bool {
        if seen.round > self.round {
            // Whoever has not told of the last one comes too late for it.
            (self.round, self.seen, self.round_bytes_per_s) = (seen.round, 0, 0.0);
        }
        let rounds = seen.elapsed.as_secs_f64() / ROUND.as_secs_f64();
        if seen.round < self.round || !ROUND_LENGTHS.contains(&rounds) {
            return false;
        }
        self.seen += 1;
        self.round_bytes_per_s += seen.delivered_bytes as f64 / seen.elapsed.as_secs_f64();
        let Some(known) = self.bytes_per_s else { return false };
        let faster = self.seen == self.lanes && self.round_bytes_per_s > FASTER * known;
        if faster {
            self.bytes_per_s = Some(self.round_bytes_per_s);
        }
        faster
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KNOWN: f64 = 75e6;

    /// A round that took as long as it should.
    fn seen(round: u64, bytes_per_s: f64) -> Seen {
        Seen { round, elapsed: ROUND, delivered_bytes: (bytes_per_s / 10.0) as u64 }
    }

    fn line(lanes: u32) -> Line {
        let mut line = Line::new(lanes);
        line.set(KNOWN);
        line
    }

    #[test]
    fn what_was_delivered_raises_the_rate_at_once() {
        let mut line = line(1);
        assert!(!line.look(seen(1, 1.2 * KNOWN)), "within what measuring is off by");
        assert!(line.look(seen(2, 1.3 * KNOWN)));
        assert_eq!(line.bytes_per_s(), Some(1.3 * KNOWN));
    }

    #[test]
    fn nothing_happens_before_a_rate_is_known() {
        let mut line = Line::new(1);
        assert!((1..1000).all(|round| !line.look(seen(round, 1e9))));
        assert_eq!(line.bytes_per_s(), None);
    }

    #[test]
    fn lanes_are_summed_and_only_over_the_same_round() {
        let mut line = line(2);
        assert!(!line.look(seen(1, KNOWN)), "the other has not told");
        assert!(!line.look(seen(2, KNOWN)), "the other has not told of this one");
        assert!(!line.look(seen(1, KNOWN)), "too late");
        assert!(line.look(seen(2, 0.5 * KNOWN)));
        assert_eq!(line.bytes_per_s(), Some(1.5 * KNOWN));
    }

    #[test]
    fn rounds_that_were_too_short_or_too_long_are_not_weighed() {
        for length in [0.0, 0.2, 0.7, 1.3, 100.0] {
            let mut line = line(2);
            let elapsed = ROUND.mul_f64(length);
            for round in 1..1000 {
                let odd = Seen { elapsed, ..seen(round, 5.0 * KNOWN) };
                assert!(!line.look(odd) && !line.look(seen(round, KNOWN)), "{length} of a round");
            }
        }
    }

    proptest! {
        /// Whatever is told, the rate is the most that was set or seen, up to the quarter that measuring may be off by.
        #[test]
        fn the_rate_is_the_most_that_got_through(told in prop::collection::vec(0.0f64..5.0, 1..100)) {
            let mut line = line(1);
            let mut most = KNOWN;
            for (round, level) in (1..).zip(told) {
                let look = seen(round, level * KNOWN);
                most = most.max(look.delivered_bytes as f64 * 10.0);
                let before = line.bytes_per_s().unwrap();
                let changed = line.look(look);
                let after = line.bytes_per_s().unwrap();
                prop_assert_eq!(changed, after > before);
                prop_assert!(after <= most * (1.0 + 1e-9) && after >= most / 1.2501, "{} of {}", after, most);
            }
        }
    }
}

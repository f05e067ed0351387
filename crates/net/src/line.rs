//! The line rate of this host, corrected while data flows by what gets through. No socket and no clock: it is told.
//!
//! The rate that is measured at the start may be wrong: the link was busy then, or changes later. Only what connections hold
//! in the kernel ([`crate::flight`]) follows the correction. How books are cut, their lanes, and choices by cost stay as
//! they were: all ranks agreed on those, and frames, the order of additions and so the bits depend on them.
//!
//! All lanes are measured over the same rounds of 100 ms, and what counts is the sum: books on slow links use one lane of
//! several, so a lane by itself says nothing about the line. Ranks of one host each know their own share.
//!
//! Up goes quickly: what was delivered, the line can deliver. Down goes slowly: a busy machine makes single rounds slow,
//! and connections shall not become slower because their processes were.

use std::time::Duration;

/// The time between two looks at what was delivered.
pub(crate) const ROUND: Duration = Duration::from_millis(100);
/// A lane that looked earlier or later than this, in rounds, was kept from running: that round is not weighed. The sum of
/// lanes that were measured at different times might be more than the line ever carried.
const ROUND_LENGTHS: std::ops::RangeInclusive<f64> = 0.75..=1.25;
/// More than this times the known rate raises it.
const FASTER: f64 = 1.25;
/// Less than this times the known rate is slow.
const SLOWER: f64 = 0.75;
/// As many saturated rounds one after the other must be slow before the rate is lowered: 6.4 s of sending.
const SLOW_ROUNDS: u32 = 64;

/// What one lane saw in one round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    /// Number of the round; the same on all lanes at the same time.
    pub(crate) round: u64,
    /// Since the lane's last look.
    pub(crate) elapsed: Duration,
    /// What all its connections together got through to the peers since then.
    pub(crate) delivered_bytes: u64,
    /// Its connections could take no more, at the last look and at this one.
    pub(crate) saturated: bool,
}

/// What is known of the line. One per engine; lanes come to it once per round.
pub(crate) struct Line {
    lanes: u32,
    bytes_per_s: Option<f64>,
    /// The round that is being summed up, and by how many lanes it has been seen.
    round: u64,
    seen: u32,
    round_bytes_per_s: f64,
    round_saturated: bool,
    /// Saturated rounds since the last one that was not slow, and the fastest of them.
    slow_rounds: u32,
    slow_max_bytes_per_s: f64,
}

impl Line {
    pub(crate) fn new(lanes: u32) -> Self {
        Self {
            lanes,
            bytes_per_s: None,
            round: 0,
            seen: 0,
            round_bytes_per_s: 0.0,
            round_saturated: false,
            slow_rounds: 0,
            slow_max_bytes_per_s: 0.0,
        }
    }

    /// Each direction, in bytes per second; `None` until somebody has said.
    pub(crate) fn bytes_per_s(&self) -> Option<f64> {
        self.bytes_per_s
    }

    /// The rate is known from elsewhere; what was seen before says nothing about it.
    pub(crate) fn set(&mut self, bytes_per_s: f64) {
        self.bytes_per_s = Some(bytes_per_s);
        (self.slow_rounds, self.slow_max_bytes_per_s) = (0, 0.0);
    }

    /// A lane tells of a round. Returns whether the rate is another one now.
    pub(crate) fn look(&mut self, seen: Seen) -> bool {
        if seen.round > self.round {
            // Whoever has not told of the last one comes too late for it.
            (self.round, self.seen) = (seen.round, 0);
            (self.round_bytes_per_s, self.round_saturated) = (0.0, false);
        }
        let rounds = seen.elapsed.as_secs_f64() / ROUND.as_secs_f64();
        if seen.round < self.round || !ROUND_LENGTHS.contains(&rounds) {
            return false;
        }
        self.seen += 1;
        self.round_bytes_per_s += seen.delivered_bytes as f64 / seen.elapsed.as_secs_f64();
        // One lane that always has something for everybody fills the line, whatever the others do.
        self.round_saturated |= seen.saturated;
        self.seen == self.lanes && self.weigh(self.round_bytes_per_s, self.round_saturated)
    }

    /// All lanes have told.
    fn weigh(&mut self, seen_bytes_per_s: f64, saturated: bool) -> bool {
        let Some(known) = self.bytes_per_s else { return false };
        if seen_bytes_per_s > FASTER * known {
            self.set(seen_bytes_per_s);
            return true;
        }
        // Where nothing at all gets through, peers are stopped or the network is cut, and the line may be what it was.
        if !saturated || seen_bytes_per_s == 0.0 {
            return false;
        }
        if seen_bytes_per_s >= SLOWER * known {
            (self.slow_rounds, self.slow_max_bytes_per_s) = (0, 0.0);
            return false;
        }
        self.slow_rounds += 1;
        self.slow_max_bytes_per_s = self.slow_max_bytes_per_s.max(seen_bytes_per_s);
        if self.slow_rounds < SLOW_ROUNDS {
            return false;
        }
        self.set(self.slow_max_bytes_per_s);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const KNOWN: f64 = 75e6;

    /// A round that took as long as it should.
    fn seen(round: u64, bytes_per_s: f64, saturated: bool) -> Seen {
        Seen { round, elapsed: ROUND, delivered_bytes: (bytes_per_s / 10.0) as u64, saturated }
    }

    fn line(lanes: u32) -> Line {
        let mut line = Line::new(lanes);
        line.set(KNOWN);
        line
    }

    #[test]
    fn what_was_delivered_raises_the_rate_at_once() {
        let mut line = line(1);
        assert!(!line.look(seen(1, 1.2 * KNOWN, false)), "within what measuring is off by");
        assert!(line.look(seen(2, 1.3 * KNOWN, false)));
        assert_eq!(line.bytes_per_s(), Some(1.3 * KNOWN));
    }

    #[test]
    fn nothing_happens_before_a_rate_is_known() {
        let mut line = Line::new(1);
        assert!((1..1000).all(|round| !line.look(seen(round, 1e9, true))));
        assert_eq!(line.bytes_per_s(), None);
    }

    #[test]
    fn stalls_do_not_lower_the_rate() {
        let mut line = line(1);
        for round in 1..10_000 {
            let got_through = if round % 64 == 0 { 0.8 } else { 0.1 };
            assert!(!line.look(seen(round, got_through * KNOWN, true)), "in round {round}");
        }
    }

    #[test]
    fn a_link_that_has_become_slower_lowers_the_rate_to_the_most_it_carried() {
        let mut line = line(1);
        let carried = |round: u64| if round == 20 { 0.6 * KNOWN } else { 0.5 * KNOWN };
        assert!((1..64).all(|round| !line.look(seen(round, carried(round), true))));
        assert!(line.look(seen(64, carried(64), true)));
        assert_eq!(line.bytes_per_s(), Some(0.6 * KNOWN));
        // 0.5 is not slow for 0.6.
        assert!((65..1000).all(|round| !line.look(seen(round, carried(round), true))));
    }

    #[test]
    fn rounds_without_enough_to_send_and_rounds_in_which_nothing_gets_through_change_nothing() {
        let mut line = line(1);
        for round in 1..1000 {
            let idle = seen(2 * round, 0.1 * KNOWN, false);
            assert!(!line.look(idle) && !line.look(seen(2 * round + 1, 0.0, true)));
        }
        // Nor do they break a series of slow ones.
        for round in 1000..1063 {
            assert!(!line.look(seen(2 * round, 0.1 * KNOWN, false)));
            assert!(!line.look(seen(2 * round + 1, 0.5 * KNOWN, true)));
        }
        assert!(line.look(seen(4000, 0.5 * KNOWN, true)));
    }

    #[test]
    fn lanes_are_summed_and_only_over_the_same_round() {
        let mut line = line(2);
        assert!(!line.look(seen(1, KNOWN, true)), "the other has not told");
        assert!(!line.look(seen(2, KNOWN, true)), "the other has not told of this one");
        assert!(!line.look(seen(1, KNOWN, true)), "too late");
        assert!(line.look(seen(2, 0.5 * KNOWN, true)));
        assert_eq!(line.bytes_per_s(), Some(1.5 * KNOWN));
        // A lane that carries nothing does not keep the other from showing what the line does.
        for round in 3..66 {
            assert!(!line.look(seen(round, 0.0, false)) && !line.look(seen(round, KNOWN, true)));
        }
        assert!(!line.look(seen(66, 0.0, false)) && line.look(seen(66, KNOWN, true)));
    }

    #[test]
    fn rounds_that_were_too_short_or_too_long_are_not_weighed() {
        for length in [0.0, 0.2, 0.7, 1.3, 100.0] {
            let mut line = line(2);
            let elapsed = ROUND.mul_f64(length);
            for round in 1..1000 {
                let odd = Seen { elapsed, ..seen(round, 5.0 * KNOWN, true) };
                assert!(!line.look(odd) && !line.look(seen(round, KNOWN, true)), "{length} of a round");
            }
        }
    }

    proptest! {
        /// The rate is only lowered below 3/4, after 64 saturated rounds in which something got through and none of which
        /// carried more than it is then; and it is never more than was set or seen.
        #[test]
        fn the_rate_follows_the_fastest_of_the_last_saturated_rounds(
            phases in prop::collection::vec((0.0f64..3.0, 0.0f64..0.5, 1usize..200, prop::bool::weighted(0.8)), 1..12),
        ) {
            let mut line = line(1);
            let mut recent = VecDeque::new();
            let mut most = KNOWN;
            let mut round = 0;
            for (level, spread, rounds, saturated) in phases {
                for at in 0..rounds {
                    round += 1;
                    let wave = 1.0 + spread * ((at * 37 % 11) as f64 / 5.0 - 1.0);
                    let told = seen(round, level * wave * KNOWN, saturated);
                    let bytes_per_s = told.delivered_bytes as f64 * 10.0;
                    let before = line.bytes_per_s().unwrap();
                    let changed = line.look(told);
                    let after = line.bytes_per_s().unwrap();
                    most = most.max(bytes_per_s);
                    prop_assert_eq!(changed, before != after);
                    if bytes_per_s > 1.25 * before {
                        prop_assert!((after - bytes_per_s).abs() <= 1.0);
                        recent.clear();
                        continue;
                    }
                    if saturated && bytes_per_s > 0.0 {
                        recent.push_back(bytes_per_s);
                        if recent.len() > 64 {
                            recent.pop_front();
                        }
                    }
                    let fastest = recent.iter().copied().fold(0.0, f64::max);
                    let slow = saturated && recent.len() == 64 && fastest < 0.75 * before;
                    if bytes_per_s > 0.0 {
                        prop_assert_eq!(changed, slow, "{} for {}", fastest, before);
                    }
                    if changed {
                        prop_assert!((after - fastest).abs() <= 1.0);
                        recent.clear();
                    }
                    prop_assert!(after <= most * (1.0 + 1e-9) && after >= fastest / 1.2501);
                }
            }
        }
    }
}

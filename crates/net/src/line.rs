//! How fast a connection is taken to be, corrected by what gets through it. No socket and no clock: it is told.
//!
//! All connections begin with the line rate that is measured at the start, that of the slowest link, or given. It may be
//! wrong: the link was busy then, or changes later, or this connection is between two hosts that are faster than others.
//! Only what the connection holds in the kernel ([`crate::send_buffer`]) follows the correction. How books are cut, their
//! lanes, and choices by cost stay as they were: all ranks agreed on those, and frames, the order of additions and so
//! the bits depend on them.
//!
//! Each connection by itself: what a host sends altogether says nothing of the way to a slow one. When all connections
//! followed their host's rate, fast hosts filled the queue of a slow one: ResNet-50 with one of 4 hosts at a quarter of
//! the others' rate took 1.21 of T*, and 1.00 where the way to that host kept the bound of its rate.
//!
//! It only goes up: what was delivered, the way can deliver. That less gets through says nothing: programs have less to
//! send, peers take turns, and processors are busy. With a rate that is too high the connection holds as many milliseconds
//! more in the kernel as the way is slower.

use std::time::Duration;

/// At least so much time lies between two looks at what was delivered: less than a lane's usual tick, at which it looks.
pub(crate) const LOOK: Duration = Duration::from_millis(75);
/// More than this times the known rate raises it.
const FASTER: f64 = 1.25;

/// The connection's rate if what was delivered in `elapsed` shows that it is more than `known`; bytes per second.
pub(crate) fn corrected(known: f64, delivered_bytes: u64, elapsed: Duration) -> Option<f64> {
    let seen = delivered_bytes as f64 / elapsed.as_secs_f64();
    (elapsed >= LOOK && seen > FASTER * known).then_some(seen)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KNOWN: f64 = 75e6;
    const TENTH: Duration = Duration::from_millis(100);

    #[test]
    fn what_was_delivered_raises_the_rate_at_once() {
        assert_eq!(corrected(KNOWN, 9_000_000, TENTH), None, "within what measuring is off by");
        assert_eq!(corrected(KNOWN, 10_000_000, TENTH), Some(1e8));
        assert_eq!(corrected(KNOWN, 10_000_000, 2 * TENTH), None);
        assert_eq!(corrected(KNOWN, 10_000_000, LOOK / 2), None, "too short a look: a burst");
        assert_eq!(corrected(KNOWN, 10_000_000, Duration::ZERO), None);
    }

    proptest! {
        /// Whatever is told, the rate is the most that was known or seen, up to the quarter that measuring may be off by.
        #[test]
        fn the_rate_is_the_most_that_got_through(told in prop::collection::vec((0u64..40_000_000, 100u64..1000), 1..100)) {
            let (mut rate, mut most) = (KNOWN, KNOWN);
            for (bytes, millis) in told {
                let elapsed = Duration::from_millis(millis);
                most = most.max(bytes as f64 / elapsed.as_secs_f64());
                rate = corrected(rate, bytes, elapsed).unwrap_or(rate);
                prop_assert!(rate <= most * (1.0 + 1e-9) && rate >= most / 1.2501, "{} of {}", rate, most);
            }
        }
    }
}

//! How many bytes a connection may have in flight: as many as the link needs, and no more.
//!
//! What is in flight has been decided, and an urgent slice waits behind it at every switch on the way, twice: as a push and as
//! an answer. Loss-based congestion control fills the narrowest link's queue until it overflows; with 50 ms of queue (the lab's
//! emulated clusters) an urgent slice took 60 to 80 ms. So where round trips are much longer than the shortest one that was
//! seen, the connection's send buffer is bound so that the queue settles at [`QUEUE_US`]. If the queue does not get
//! shorter, it is somebody else's, and a bound would only give our share of the link away: then the connection is left alone.
//!
//! [`Flight`] decides and knows no socket; [`sample`] and [`apply`] are the socket's side.

use std::time::{Duration, Instant};

/// Queueing that is accepted, in microseconds: processes on a busy machine pause for some milliseconds, and the link shall not.
const QUEUE_US: u64 = 5_000;
/// A bound starts where there is this much of it.
const QUEUE_BAD_US: u64 = 10_000;
/// The least a connection is bound to.
const BOUND_MIN_BYTES: u64 = 64 << 10;
/// The most: Linux gives no more to a program that asks for a size (net.core.wmem_max, by default 208 KiB, doubled), less what
/// may lie there unsent. A link that needs more is fast enough to do without.
const BOUND_MAX_BYTES: u64 = (2 * 208 - 128) << 10;
/// How often one is looked at.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_millis(10);
/// A queue that stays for so long in spite of the bound is not ours.
const PATIENCE: Duration = Duration::from_millis(300);
/// How long it is left alone then.
const LEFT_ALONE: Duration = Duration::from_secs(10);

/// What the kernel says of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Bytes sent and not acknowledged.
    pub(crate) in_flight: u64,
    /// The round trip now, smoothed, in microseconds.
    pub(crate) rtt_us: u64,
    /// The shortest one of the last minutes.
    pub(crate) shortest_us: u64,
}

/// What to do with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Let no more bytes than this be in flight.
    Bind(u64),
    /// Leave it to the system.
    Free,
}

/// The bound of one connection.
#[derive(Debug, Default)]
pub(crate) struct Flight {
    bound: Option<u64>,
    /// When the queue was last as short as it should be, or the bound began.
    good: Option<Instant>,
    left_alone_until: Option<Instant>,
}

impl Flight {
    /// Takes a sample of a connection that has more to send than it can; what to change.
    pub(crate) fn observe(&mut self, sample: Sample, now: Instant) -> Option<Change> {
        let Sample { in_flight, rtt_us, shortest_us } = sample;
        if rtt_us == 0 || shortest_us == 0 {
            return None;
        }
        let goal_us = shortest_us + QUEUE_US;
        let bad = rtt_us > shortest_us + QUEUE_BAD_US;
        let Some(bound) = self.bound else {
            let begins = in_flight * goal_us / rtt_us;
            if !bad || begins > BOUND_MAX_BYTES || self.left_alone_until.is_some_and(|until| now < until) {
                return None;
            }
            self.good = Some(now);
            return Some(self.bind(begins));
        };
        if !bad {
            self.good = Some(now);
        } else if self.good.is_none_or(|good| now.saturating_duration_since(good) >= PATIENCE) {
            *self = Self { left_alone_until: now.checked_add(LEFT_ALONE), ..Self::default() };
            return Some(Change::Free);
        }
        // Between the two it stays. Round trips are also long where processes pause, which no bound can help: one that
        // followed them would take the link's rate.
        if !bad && rtt_us >= goal_us {
            return None;
        }
        // In steps: the round trip answers to a change only a round trip later.
        let next = (bound * goal_us / rtt_us).clamp(bound * 4 / 5, bound * 5 / 4);
        let next = next.clamp(BOUND_MIN_BYTES, BOUND_MAX_BYTES);
        (next.abs_diff(bound) * 16 > bound).then(|| self.bind(next))
    }

    fn bind(&mut self, bytes: u64) -> Change {
        let bytes = bytes.clamp(BOUND_MIN_BYTES, BOUND_MAX_BYTES);
        self.bound = Some(bytes);
        Change::Bind(bytes)
    }
}

#[cfg(target_os = "linux")]
pub(crate) use linux::{apply, sample};

#[cfg(not(target_os = "linux"))]
pub(crate) fn sample(_: std::os::fd::BorrowedFd<'_>) -> std::io::Result<Sample> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn apply(_: std::os::fd::BorrowedFd<'_>, _: Change, _: u32) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

#[cfg(target_os = "linux")]
mod linux {
    use super::{Change, Sample};
    use std::io;
    use std::mem::size_of;
    use std::os::fd::{AsRawFd, BorrowedFd};

    /// Linux 5.16 and later: which buffer sizes are fixed by the program; 0 gives them back to the system.
    const SO_BUF_LOCK: libc::c_int = 72;
    /// `struct tcp_info`, as far as it is needed: 32-bit words behind 8 bytes of flags.
    const WORDS: usize = 38;
    const SEGMENT_BYTES: usize = 4;
    const UNACKNOWLEDGED: usize = 6;
    const RTT_US: usize = 17;
    const SHORTEST_US: usize = 37;

    /// What the kernel knows of a connection.
    pub(crate) fn sample(socket: BorrowedFd<'_>) -> io::Result<Sample> {
        let mut words = [0u32; WORDS];
        let mut len = size_of::<[u32; WORDS]>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to memory that we own.
        let status = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                words.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if status != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Sample {
            in_flight: u64::from(words[UNACKNOWLEDGED]) * u64::from(words[SEGMENT_BYTES]),
            rtt_us: words[RTT_US].into(),
            shortest_us: words[SHORTEST_US].into(),
        })
    }

    /// Bounds the send buffer, which holds what is in flight and `unsent` bytes, or gives it back to the system.
    pub(crate) fn apply(socket: BorrowedFd<'_>, change: Change, unsent: u32) -> io::Result<()> {
        // First the way back: a kernel that does not know it is not asked for a bound.
        set(socket, SO_BUF_LOCK, 0)?;
        match change {
            Change::Free => Ok(()),
            // The kernel doubles what it is given, for its own structures; here both halves are meant.
            Change::Bind(bytes) => {
                let size = bytes.saturating_add(unsent.into()) / 2;
                set(socket, libc::SO_SNDBUF, libc::c_int::try_from(size).unwrap_or(libc::c_int::MAX))
            }
        }
    }

    fn set(socket: BorrowedFd<'_>, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the kernel reads one integer of ours.
        let status = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST_US: u64 = 200;

    /// A link of `rate` bytes per second shared by `senders` like this one, with `others` bytes of somebody else's in its queue.
    /// Each sender has what its bound allows in flight, and `unbound` without one. Returns the round trips, one each 10 ms.
    fn run(rate: u64, senders: u64, others: u64, unbound: u64, samples: u64) -> (Vec<u64>, Vec<Change>) {
        let mut flight = Flight::default();
        let (mut trips, mut changes) = (Vec::new(), Vec::new());
        let begin = Instant::now();
        for at in 0..samples {
            let in_flight = flight.bound.unwrap_or(unbound);
            let queue_us = (in_flight * senders + others) * 1_000_000 / rate;
            let sample = Sample { in_flight, rtt_us: SHORTEST_US.max(queue_us), shortest_us: SHORTEST_US };
            trips.push(sample.rtt_us);
            changes.extend(flight.observe(sample, begin + SAMPLE_EVERY * at as u32));
        }
        (trips, changes)
    }

    #[test]
    fn a_queue_of_our_own_shrinks_to_what_is_accepted() {
        for senders in [3, 7] {
            let (trips, changes) = run(125_000_000, senders, 0, 6_000_000 / senders, 100);
            let goal_us = (SHORTEST_US + QUEUE_US) as f64;
            let end = *trips.last().unwrap() as f64 / goal_us;
            assert!(trips[0] > 40_000 && (0.9..1.1).contains(&end), "{senders}: {trips:?}");
            assert!(changes.iter().all(|change| matches!(change, Change::Bind(_))));
        }
    }

    #[test]
    fn a_short_queue_is_left_alone() {
        let (_, changes) = run(125_000_000, 3, 0, 300_000, 100);
        assert_eq!(changes, []);
    }

    #[test]
    fn a_connection_that_needs_more_than_can_be_asked_for_is_left_alone() {
        for (rate, senders) in [(12_500_000_000, 3), (125_000_000, 1)] {
            let (_, changes) = run(rate, senders, 0, rate / senders / 20, 100);
            assert_eq!(changes, []);
        }
    }

    #[test]
    fn a_queue_of_others_ends_the_bound_for_a_while() {
        let (trips, changes) = run(125_000_000, 1, 5_000_000, 500_000, 2_400);
        assert!(trips.iter().all(|trip| *trip > 40_000));
        let freed = changes.iter().filter(|change| **change == Change::Free).count();
        assert!((2..=3).contains(&freed), "24 s, 1 s bound and 10 s not: {changes:?}");
    }
}

//! When a wait of the program has lasted too long.

/// A sleep that lasts so much longer than asked for was a stop of the whole process.
const STOPPED_NS: u64 = 1_000_000_000;

/// What a program waits for, and so how long, and what follows when it has not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitKind {
    /// A result, to which others contribute. When it does not come, the ranks find out who is late ([`Life::expired`]).
    Result,
    /// That all others leave, too (join). They may rightly train for hours, but not stand still: time counts since data last moved
    /// at any rank. Then as for a result.
    Leavers,
    /// What no other rank can be late for. The others' goodbyes above all: who has not said one by then is busy with something that
    /// does not need this rank, and the program goes on without it. Or that the program's own calls are done at its end, which is its
    /// own fault if they are not.
    Optional,
}

/// A wait of the program. Time in which its process was stopped does not count.
#[derive(Debug, Clone)]
pub struct Wait {
    kind: WaitKind,
    timeout_ns: u64,
    until_ns: u64,
}

impl Wait {
    /// One that begins now and lasts `timeout_ns` at most.
    #[must_use]
    pub fn new(kind: WaitKind, now_ns: u64, timeout_ns: u64) -> Self {
        Self { kind, timeout_ns, until_ns: now_ns.saturating_add(timeout_ns) }
    }

    /// It is not over before.
    #[must_use]
    pub fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// Whether everybody is asked who is late when it is over; otherwise what follows is up to whoever waited.
    #[must_use]
    pub fn asks(&self) -> bool {
        self.kind != WaitKind::Optional
    }

    /// Whether it has lasted too long. `moved_ns` is when data last moved at any rank, as far as this one knows. If not,
    /// [`Wait::until_ns`] says when to look again.
    pub(super) fn is_over(&mut self, now_ns: u64, moved_ns: u64) -> bool {
        if self.kind == WaitKind::Leavers {
            self.until_ns = self.until_ns.max(moved_ns.saturating_add(self.timeout_ns));
        }
        now_ns >= self.until_ns
    }

    /// Its thread slept for `slept_ns` where it had asked for `asked_ns`.
    pub fn slept(&mut self, asked_ns: u64, slept_ns: u64) {
        let stopped_ns = slept_ns.saturating_sub(asked_ns);
        if stopped_ns >= STOPPED_NS {
            self.until_ns = self.until_ns.saturating_add(stopped_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_result_is_over_when_its_time_is_up_whatever_moves() {
        for kind in [WaitKind::Result, WaitKind::Optional] {
            let mut wait = Wait::new(kind, 5, 100);
            assert!(!wait.is_over(104, 60));
            assert_eq!(wait.until_ns(), 105);
            assert!(wait.is_over(105, 60));
            assert_eq!(wait.asks(), kind == WaitKind::Result);
        }
        let mut for_ever = Wait::new(WaitKind::Result, 5, u64::MAX);
        assert!(!for_ever.is_over(u64::MAX - 1, 0));
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let mut wait = Wait::new(WaitKind::Result, 0, 100);
        wait.slept(7, STOPPED_NS + 6);
        assert_eq!(wait.until_ns(), 100, "a busy machine");
        wait.slept(7, STOPPED_NS + 7);
        assert_eq!(wait.until_ns(), 100 + STOPPED_NS);
    }
}

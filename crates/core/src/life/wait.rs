//! When a wait of the program has lasted too long.

use super::inquiry::{DOUBT_NS, INQUIRY_NS};
use super::times::SETTLE_NS;

/// How long a wait that took too long stays for the verdict at most. It comes sooner, unless the lanes of this process themselves have
/// ended, or stand still.
pub(super) const VERDICT_NS: u64 = INQUIRY_NS + DOUBT_NS + SETTLE_NS + 10_000_000_000;
/// A sleep that lasts so much longer than asked for was a stop of the whole process.
const STOPPED_NS: u64 = 1_000_000_000;

/// What a program waits for, and so how long, and what follows when it has not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitKind {
    /// A result, to which others contribute. When it does not come, the ranks find out who is late ([`super::Life::expired`]).
    Result,
    /// That all others leave, too (join). They may rightly train for hours, but not stand still: time counts since data last moved
    /// at any rank. Then as for a result.
    Leavers,
    /// The others' goodbyes: who has not said one by then is busy with something that does not need this rank.
    Goodbyes,
    /// That what the program has called and waits for no more is done at its end: nobody else can be late for that.
    OwnCalls,
    /// Whatever comes first; the program only looks whether it has.
    Look,
    /// A verdict, or what an earlier wait was for, which took too long ([`super::Life::expired`]). If neither comes, this process's own lanes do
    /// nothing: whom else that is due to they would have found out.
    Verdict,
}

/// What follows when a wait has lasted too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Everybody is asked who is late ([`super::Life::expired`]).
    Ask,
    /// The program goes on without what it waited for.
    GoOn,
    /// The job ends, and it is this rank's own fault ([`super::Expired::fault`]).
    Fail,
}

impl WaitKind {
    fn over(self) -> Over {
        match self {
            Self::Result | Self::Leavers => Over::Ask,
            Self::Goodbyes | Self::Look => Over::GoOn,
            Self::OwnCalls | Self::Verdict => Over::Fail,
        }
    }
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

    /// It has all its time again from now on.
    pub fn again(&mut self, now_ns: u64) {
        self.until_ns = now_ns.saturating_add(self.timeout_ns);
    }

    /// It is not over before.
    #[must_use]
    pub fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// What it waited for has come; in the time that is left it waits for something else.
    #[must_use]
    pub fn then(self, kind: WaitKind) -> Self {
        Self { kind, ..self }
    }

    /// Its time begins no earlier than this. What only looks, or goes on without, has the time that it was given.
    pub(super) fn not_before(&mut self, began_ns: u64) {
        if !matches!(self.kind, WaitKind::Look | WaitKind::Goodbyes) {
            self.until_ns = self.until_ns.max(began_ns.saturating_add(self.timeout_ns));
        }
    }

    /// What follows if it has lasted too long. `moved_ns` is when data last moved at any rank, as far as this one knows. If it has
    /// not, [`Wait::until_ns`] says when to look again.
    pub(super) fn over(&mut self, now_ns: u64, moved_ns: u64) -> Option<Over> {
        if self.kind == WaitKind::Leavers {
            self.until_ns = self.until_ns.max(moved_ns.saturating_add(self.timeout_ns));
        }
        (now_ns >= self.until_ns).then(|| self.kind.over())
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
        let follows = [
            (WaitKind::Result, Over::Ask),
            (WaitKind::Goodbyes, Over::GoOn),
            (WaitKind::Look, Over::GoOn),
            (WaitKind::OwnCalls, Over::Fail),
            (WaitKind::Verdict, Over::Fail),
        ];
        for (kind, over) in follows {
            let mut wait = Wait::new(kind, 5, 100);
            assert_eq!(wait.over(104, 60), None);
            assert_eq!(wait.until_ns(), 105);
            assert_eq!(wait.over(105, 60), Some(over));
        }
        let mut for_ever = Wait::new(WaitKind::Result, 5, u64::MAX);
        assert_eq!(for_ever.over(u64::MAX - 1, 0), None);
    }

    #[test]
    fn who_waits_for_all_to_leave_is_patient_as_long_as_data_moves() {
        let mut wait = Wait::new(WaitKind::Leavers, 5, 100);
        assert_eq!(wait.over(105, 60), None);
        assert_eq!(wait.over(159, 60), None);
        assert_eq!(wait.over(160, 60), Some(Over::Ask));
    }

    #[test]
    fn what_follows_in_the_same_wait_has_the_time_that_is_left() {
        let mut wait = Wait::new(WaitKind::OwnCalls, 5, 100).then(WaitKind::Goodbyes);
        assert_eq!((wait.over(104, 0), wait.over(105, 0)), (None, Some(Over::GoOn)));
    }

    #[test]
    fn time_before_the_epoch_does_not_count_for_what_others_have_to_do() {
        for (kind, until_ns) in [(WaitKind::Result, 130), (WaitKind::Verdict, 130), (WaitKind::Look, 105)] {
            let mut wait = Wait::new(kind, 5, 100);
            wait.not_before(30);
            assert_eq!(wait.until_ns(), until_ns);
            wait.not_before(0);
            assert_eq!(wait.until_ns(), until_ns);
        }
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

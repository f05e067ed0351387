//! Carries out what the state machine of life decides ([`penstock_core::life`]): tells the lanes, and lets calls raise what is
//! settled. No decision is made here.

use super::{JointWait, Shared};
use crate::failure::{Failure, naming_servers};
use crate::mailbox::Command;
use parking_lot::MutexGuard;
use penstock_core::life::{Effect, Expired, Life, Over, Reply, Verdict, Wait, WaitKind};
use penstock_core::{Header, Kind, Members, Rank};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Under a lock of its own, which is taken before that of the state.
pub(super) struct Fate {
    life: Life,
    /// What this rank has reported last, and as what its own calls raise it if it becomes the verdict.
    own: Option<(Verdict, Failure)>,
}

impl Fate {
    pub(super) fn new(life: Life) -> Self {
        Self { life, own: None }
    }
}

impl Shared {
    /// The state machine, which knows what has landed by now.
    fn fate(&self) -> MutexGuard<'_, Fate> {
        let mut fate = self.fate.lock();
        if self.landed.swap(false, Ordering::Relaxed) || self.lock().accounting.is_idle() {
            fate.life.landed();
        }
        fate
    }

    /// A time as the state machine knows it.
    pub(crate) fn ns_of(&self, time: Instant) -> u64 {
        ns(time.saturating_duration_since(self.started))
    }

    /// When data last moved here, as the state machine knows it.
    pub(crate) fn moved_ns(&self) -> u64 {
        self.progress_ms.load(Ordering::Relaxed) * 1_000_000
    }

    /// What heartbeats say of it: it changes whenever data has moved.
    pub(crate) fn progress(&self) -> u32 {
        self.progress_ms.load(Ordering::Relaxed) as u32
    }

    /// Tells the state machine something, and does what it wants.
    pub(crate) fn live<T>(&self, tell: impl FnOnce(&mut Life, u64) -> T) -> T {
        let mut fate = self.fate();
        let result = tell(&mut fate.life, self.ns_of(Instant::now()));
        self.carry_out(&mut fate);
        result
    }

    /// The life of another epoch begins.
    pub(super) fn renew_life(&self, members: &Members) {
        let mut fate = self.fate();
        self.failed.store(false, Ordering::Release);
        let life = fate.life.next_epoch(self.ns_of(Instant::now()), members.clone());
        *fate = Fate::new(life);
        self.carry_out(&mut fate);
    }

    /// Under the lock, so that lanes are told of verdicts in the order in which they were held, and of each before any call
    /// raises it: whoever sees a failure may stop the lanes.
    fn carry_out(&self, fate: &mut Fate) {
        for effect in fate.life.take_effects() {
            match effect {
                Effect::Ask(question) => {
                    self.mailboxes().iter().for_each(|mailbox| mailbox.send(Command::Ask(question)));
                }
                Effect::EndEpoch { out, why } => {
                    if let Some(council) = self.council.get() {
                        council.end_epoch(self.epoch(), out, why);
                    }
                }
                Effect::Tell(verdict) => {
                    self.failed.store(true, Ordering::Release);
                    let reason = self.pool.copy_of(&verdict.encode());
                    let (argument, payload_bytes) = (verdict.culprit().0, reason.len() as u32);
                    let header = Header { argument, payload_bytes, ..Header::control(Kind::Abort) };
                    for mailbox in self.mailboxes().iter() {
                        mailbox.send(Command::Failed { header, reason: reason.clone() });
                    }
                }
                Effect::Settled(verdict) => {
                    let failure = self.failure_of(&verdict, fate.own.take());
                    self.update(|state| _ = state.failure.get_or_insert(failure));
                }
            }
        }
    }

    fn failure_of(&self, verdict: &Verdict, own: Option<(Verdict, Failure)>) -> Failure {
        // What was reported may have been a suspicion only, and the verdict another one.
        let own = own.filter(|(reported, _)| reported == verdict).map(|(_, failure)| failure);
        let mut failure = own.unwrap_or_else(|| verdict.raised_by(self.me).into());
        failure.peer = failure.peer.or_else(|| self.address_of(failure.rank?));
        let text = naming_servers(failure.text(), self.workers, |rank| self.address_of(rank));
        *failure.text() = text;
        failure
    }

    /// Ends the job, unless it has failed already: the peers are told, and once the verdict is settled every call raises it.
    pub(crate) fn fail(&self, failure: impl Into<Failure>) {
        self.report(failure.into(), Life::accuse);
    }

    /// A peer cannot be connected to.
    pub(crate) fn unreachable(&self, failure: Failure) {
        self.report(failure, Life::unreachable);
    }

    fn report(&self, failure: Failure, tell: impl FnOnce(&mut Life, u64, Verdict)) {
        let verdict = Verdict::of_error(&failure.error, failure.rank, failure.step, self.me);
        let mut fate = self.fate();
        let is_first = fate.life.verdict().is_none();
        tell(&mut fate.life, self.ns_of(Instant::now()), verdict.clone());
        if is_first || fate.life.verdict() == Some(&verdict) {
            fate.own = Some((verdict, failure));
        }
        self.carry_out(&mut fate);
    }

    /// Every call raises this from now on. Where members may be lost: the others go on, and are told nothing.
    pub(crate) fn fail_alone(&self, failure: Failure) {
        self.update(|state| _ = state.failure.get_or_insert(failure));
        self.failed.store(true, Ordering::Release);
    }

    /// Every call raises from now on. The lanes are gone: nobody is told.
    pub(crate) fn shut(&self) {
        self.update(|state| _ = state.failure.get_or_insert(Failure::config("the engine was shut down")));
        self.failed.store(true, Ordering::Release);
    }

    /// Whether a verdict is held, settled or not.
    pub(crate) fn is_failing(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The job's failure, once it is settled. It counts as raised from now on.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if !self.is_failing() {
            return Ok(());
        }
        self.settle();
        let mut state = self.lock();
        state.failure_raised |= state.failure.is_some();
        state.failure.clone().map_or(Ok(()), Err)
    }

    /// Whether a verdict that is held is settled by now: whoever waits looks, too, for lanes may have ended.
    pub(super) fn settle(&self) {
        if self.is_failing() {
            self.live(|life, now_ns| life.look(now_ns, 0, |_| false));
        }
    }

    /// What only time shows. Called by the lanes every now and then; `needs`: whether what is under way in the lane takes the
    /// part of a rank.
    pub(crate) fn look(&self, needs: impl Fn(Rank) -> bool) {
        let gathers = |rank: Rank| self.late_in_gather().contains(&rank);
        self.live(|life, now_ns| life.look(now_ns, self.moved_ns(), |rank| needs(rank) || gathers(rank)));
    }

    /// Of the all-gather that this rank is in: who has not come.
    fn late_in_gather(&self) -> Vec<Rank> {
        let state = self.lock();
        if !matches!(state.joint, Some(JointWait::AllGather(_))) {
            return Vec::new();
        }
        state.all_gather.late()
    }

    /// What this process as a whole says to a question, to which each lane adds its own.
    pub(crate) fn reply(&self) -> Reply {
        let late = self.late_in_gather();
        let state = self.lock();
        let what = match &state.joint {
            Some(JointWait::AllGather(what)) => what.clone(),
            Some(JointWait::Leave) => "the wait for all to leave (join)".into(),
            None => String::new(),
        };
        let blocked = state.joint.is_some() || state.accounting.is_waiting();
        Reply { blocked, late, what, ..Reply::default() }
    }

    /// A wait of the program that begins now.
    pub(crate) fn begin_wait(&self, kind: WaitKind, timeout: Duration) -> Wait {
        Wait::new(kind, self.ns_of(Instant::now()), ns(timeout))
    }

    /// What follows if a wait has lasted too long.
    pub(super) fn over(&self, wait: &mut Wait) -> Option<Over> {
        self.live(|life, now_ns| life.over(wait, now_ns, self.moved_ns()))
    }

    /// A wait has lasted too long: asks who is late. What follows is to be waited for.
    pub(crate) fn expired(&self, expired: &Expired) -> Wait {
        self.live(|life, now_ns| life.expired(now_ns, expired))
    }

    /// What it was for has come after all, or the program does not wait for it any more.
    pub(crate) fn came(&self, expired: &Expired) {
        self.live(|life, now_ns| life.came(now_ns, expired));
    }
}

/// As the state machine counts time.
pub(crate) fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

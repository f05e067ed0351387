//! What goes wrong with a rank: it is killed, stopped, fails or hangs; and how everybody must end then.

use super::worker::WorkerPhase;
use super::{Happening, World};
use crate::check::{Checker, Violation, check};
use crate::memory::SimMemory;
use crate::program::{Fault, Mishap, OPERATION_TIMEOUT_NS, PEER_TIMEOUT_NS};
use penstock_core::Error;
use penstock_core::life::{DOUBT_NS, Evidence, SETTLE_NS, SUSPICION_NS, Verdict};
use penstock_core::types::Rank;

/// How long anything takes that depends on links and programs alone.
const SLACK_NS: u64 = 5_000_000_000;

impl<M: SimMemory> World<M> {
    /// Whether the process that this happens to is stopped: then it happens later.
    pub(super) fn postpone(&mut self, happening: Happening) -> bool {
        let whose = match happening {
            Happening::Resume(rank) | Happening::Tick(rank, _) | Happening::Look(rank) => rank,
            Happening::Told(rank) | Happening::Exit(rank) | Happening::Close(rank) => rank,
            Happening::Fill(id) => self.network.connection(id).from,
            Happening::Read(id, _) | Happening::Cut(id) => self.network.connection(id).to,
            Happening::Moved(_) | Happening::Fault | Happening::GoOn(..) => return false,
        };
        let fate = &mut self.fates[whose.index()];
        if fate.stopped {
            fate.postponed.push(happening);
        }
        fate.stopped
    }

    /// Something goes wrong.
    pub(super) fn befall(&mut self) -> Result<(), Violation> {
        let Some(Fault { rank, what, .. }) = self.setup.fault else { return Ok(()) };
        let phase = self.workers[rank.index()].phase;
        let in_program = !matches!(phase, WorkerPhase::Finishing | WorkerPhase::Done);
        if phase == WorkerPhase::Done || (!in_program && matches!(what, Mishap::Raise | Mishap::Hang)) {
            return Ok(());
        }
        self.trace(|| format!("rank {rank}: {what:?}"));
        self.struck_in = Some(phase);
        match what {
            Mishap::Kill => {
                self.workers[rank.index()].phase = WorkerPhase::Dead;
                self.network.kill(rank);
                for id in self.network.from(rank) {
                    // The others learn it one after the other, some of them first from each other.
                    let delay_ns = self.setup.links.delay_ns + self.random.below(1_000_000);
                    self.agenda.after(delay_ns, Happening::Cut(id));
                }
                Ok(())
            }
            Mishap::Stop(for_ns) => {
                self.fates[rank.index()].stopped = true;
                self.agenda.after(for_ns, Happening::GoOn(rank, for_ns));
                Ok(())
            }
            Mishap::Hang => {
                self.workers[rank.index()].hangs = true;
                self.fates[rank.index()].wait = None;
                Ok(())
            }
            Mishap::Raise => {
                let own = Verdict::of_error(&Error::Config("a bad batch".into()), None, None, rank);
                self.fates[rank.index()].life.accuse(self.agenda.now_ns(), own);
                self.follow(rank)
            }
        }
    }

    /// A stopped rank goes on with what it has not done, in order; but whether it reads or looks at the clock first is open.
    pub(super) fn resume(&mut self, rank: Rank, stopped_ns: u64) {
        self.trace(|| format!("rank {rank} goes on"));
        let fate = &mut self.fates[rank.index()];
        fate.stopped = false;
        fate.wait.iter_mut().for_each(|wait| wait.slept(0, stopped_ns));
        let mut postponed = std::mem::take(&mut fate.postponed);
        if self.random.chance(500) {
            postponed.sort_by_key(|what| !matches!(what, Happening::Tick(..)));
        }
        postponed.into_iter().for_each(|what| self.agenda.at(self.agenda.now_ns(), what));
    }

    /// At the end: every rank has ended in time, and those that could not have come through name the right one, for the right
    /// reason.
    pub(super) fn check_ends(&self) -> Result<(), Violation> {
        let fault = self.setup.fault.filter(|_| self.struck_in.is_some());
        let survivors = |rank: usize| fault.is_none_or(|fault| fault.rank.index() != rank);
        for (rank, worker) in self.workers.iter().enumerate() {
            let without_end = worker.hangs || self.serves_for_ever(Rank(rank as u32));
            let ended = worker.is_over() || (without_end && !self.fates[rank].fails());
            check(ended, Checker::NoDeadlock, || {
                format!("nothing more happens, but rank {rank} has not ended: {}", self.standing())
            })?;
            if let Some(failed) = &self.fates[rank].failed {
                self.check_failure(rank, failed)?;
            }
        }
        let Some(Fault { what, .. }) = fault else { return Ok(()) };
        // Before its goodbye nobody can be through without it.
        let needed = self.struck_in != Some(WorkerPhase::Finishing);
        let others = || self.workers.iter().enumerate().filter(|(rank, _)| survivors(*rank));
        let failed = others().filter(|(_, worker)| worker.phase == WorkerPhase::Failed).count();
        let must = match what {
            Mishap::Kill | Mishap::Raise => needed,
            Mishap::Stop(for_ns) => needed && for_ns > PEER_TIMEOUT_NS + 1_000_000_000,
            // Perhaps it has done all that anybody needs.
            Mishap::Hang => false,
        };
        let some = failed > 0 && failed < others().count();
        let holds = if must { failed == others().count() } else { !(needed && some) };
        check(holds, Checker::LossNamed, || {
            let ends: Vec<WorkerPhase> = self.workers.iter().map(|worker| worker.phase).collect();
            format!("{what:?} in {:?}, but they end as {ends:?}", self.struck_in)
        })
    }

    fn check_failure(&self, rank: usize, (verdict, at_ns): &(Verdict, u64)) -> Result<(), Violation> {
        let Some(Fault { rank: struck, at_ns: struck_ns, what }) = self.setup.fault else { return Ok(()) };
        let (evidence, limit_ns) = match what {
            Mishap::Kill => (Evidence::Ended, SUSPICION_NS),
            Mishap::Stop(_) => (Evidence::Silent, PEER_TIMEOUT_NS),
            Mishap::Raise => (Evidence::Own, 0),
            Mishap::Hang => (Evidence::Absent, OPERATION_TIMEOUT_NS + DOUBT_NS),
        };
        let stopped_ns = match what {
            Mishap::Stop(for_ns) if rank == struck.index() => for_ns,
            _ => 0,
        };
        let by_ns = struck_ns + stopped_ns + limit_ns + SETTLE_NS + SLACK_NS;
        let right = verdict.culprits == [struck] && verdict.evidence == evidence && *at_ns <= by_ns;
        check(right, Checker::LossNamed, || {
            format!(
                "rank {struck}: {what:?}; rank {rank} ends at {at_ns} ns, and should by {by_ns} ns, with {verdict:?}"
            )
        })
    }

    /// The rank that errors name, and on what evidence.
    pub(super) fn named(&self) -> Option<(u32, Evidence)> {
        let failed = self.fates.iter().find_map(|fate| fate.failed.as_ref());
        failed.map(|(verdict, _)| (verdict.culprit().0, verdict.evidence))
    }
}

//! Lost ranks: who notices, who is told, and how everybody ends.

use super::worker::{Phase, Worker};
use super::{Happening, World};
use crate::check::{Checker, Violation, check};
use crate::memory::SimMemory;
use crate::program::{Loss, PEER_TIMEOUT_NS, Sabotage};
use penstock_core::layout::Rank;
use penstock_core::wire::{Header, Kind};

/// Between two heartbeats.
const HEARTBEAT_NS: u64 = PEER_TIMEOUT_NS / 5;

impl<M: SimMemory> World<M> {
    pub(super) fn plan_loss(&mut self) {
        let Some(Loss { at_ns, silent, .. }) = self.setup.loss else { return };
        self.agenda.at(at_ns, Happening::Die);
        if silent {
            for rank in 0..self.setup.ranks {
                self.agenda.at(HEARTBEAT_NS, Happening::Tick(Rank(rank)));
            }
        }
    }

    /// The lost rank is gone. If it was not through, everybody must notice.
    pub(super) fn die(&mut self) {
        let Some(Loss { rank, silent, .. }) = self.setup.loss else { return };
        self.trace(|| format!("rank {rank} is lost"));
        let worker = &mut self.workers[rank.index()];
        if worker.has_ended() {
            return;
        }
        self.lost_in = Some(worker.phase);
        worker.phase = Phase::Dead;
        self.network.kill(rank);
        if !silent {
            for id in self.network.from(rank) {
                // The others learn it one after the other, some of them first from each other.
                let delay_ns = self.setup.links.delay_ns + self.random.below(1_000_000);
                self.agenda.after(delay_ns, Happening::Cut(id));
            }
        }
    }

    /// A connection has ended: unless the peer has said goodbye, it is lost.
    pub(super) fn ended(&mut self, from: Rank, to: Rank) -> Result<(), Violation> {
        let goodbyes = self.workers[to.index()].goodbyes[from.index()];
        if goodbyes == self.setup.lanes || self.setup.sabotaged(Sabotage::Deaf) {
            return Ok(());
        }
        self.lose(to, from)
    }

    /// A rank ends with an error that names `lost`, and tells the others before it closes its connections.
    pub(super) fn lose(&mut self, rank: Rank, lost: Rank) -> Result<(), Violation> {
        check(self.setup.loss.is_some(), Checker::LossNamed, || {
            format!("rank {rank} believes rank {lost} lost, but nobody is")
        })?;
        if self.workers[rank.index()].has_ended() {
            return Ok(());
        }
        let lost = if self.sabotage(Sabotage::BlameAnother) { rank } else { lost };
        self.trace(|| format!("rank {rank} ends: rank {lost} is lost"));
        self.workers[rank.index()].phase = Phase::Lost(lost);
        for lane in 0..self.setup.lanes {
            let header = Header { argument: lost.0, ..Header::control(Kind::Abort) };
            self.control(rank, lane, header, None)?;
        }
        Ok(())
    }

    pub(super) fn tick(&mut self, rank: Rank) -> Result<(), Violation> {
        let worker = &self.workers[rank.index()];
        if worker.has_ended() {
            return Ok(());
        }
        let silent_since = |worker: &Worker, peer: usize| worker.heard_ns[peer] + PEER_TIMEOUT_NS;
        let silent = (0..self.setup.ranks).find(|&peer| {
            peer != rank.0
                && worker.goodbyes[peer as usize] < self.setup.lanes
                && silent_since(worker, peer as usize) < self.agenda.now_ns()
        });
        if let Some(peer) = silent.filter(|_| !self.setup.sabotaged(Sabotage::Deaf)) {
            return self.lose(rank, Rank(peer));
        }
        if self.agenda.now_ns() > 20 * PEER_TIMEOUT_NS {
            // Nobody ends any more; let time run out, so that the checker says so.
            return Ok(());
        }
        for lane in 0..self.setup.lanes {
            self.control(rank, lane, Header::control(Kind::Heartbeat), None)?;
        }
        self.agenda.after(HEARTBEAT_NS, Happening::Tick(rank));
        Ok(())
    }

    /// At the end: every rank has ended, and those that could not have come through without the lost one name it.
    pub(super) fn check_ends(&self) -> Result<(), Violation> {
        for (rank, worker) in self.workers.iter().enumerate() {
            check(worker.has_ended(), Checker::NoDeadlock, || {
                format!("nothing more happens, but rank {rank} has not ended: {}", self.standing())
            })?;
            let lost = self.setup.loss.map(|loss| loss.rank);
            // Before its goodbye nobody can be through without it.
            let needed = !matches!(self.lost_in, None | Some(Phase::Finishing | Phase::Done));
            let holds = match worker.phase {
                Phase::Lost(named) => Some(named) == lost,
                Phase::Dead => Some(Rank(rank as u32)) == lost,
                _ => !needed,
            };
            check(holds, Checker::LossNamed, || {
                format!(
                    "rank {rank} ended as {:?}, but {lost:?} was lost in {:?}",
                    worker.phase, self.lost_in
                )
            })?;
        }
        Ok(())
    }
}

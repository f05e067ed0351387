//! How far contributors have come at an owner that takes each contribution by itself, and who is too far ahead to be answered
//! (stale synchronous parallel; [`crate::roles::Staleness`]).

use super::context::Site;
use crate::roles::{Answered, Staleness};
use crate::types::{Rank, Step};
use crate::wire::Header;

/// Of one slice. Without a bound nobody is ahead.
#[derive(Debug, Default)]
pub(super) struct Clocks {
    /// By member its clock.
    of: Vec<u32>,
    /// Who waits for an answer until the slowest has come after: each member once, since none goes on before it has that.
    waiting: Vec<(Rank, Header)>,
}

impl Clocks {
    /// A member has contributed, or asks.
    ///
    /// Where whoever contributes is answered, whoever asks in its place has nothing for a step that it has come to all the same: a layer
    /// that only some use. Its clock is that of its steps, and nobody waits for a contribution that will never be. A question that belongs
    /// to no step is of the last one.
    pub(super) fn advance(&mut self, rank: Rank, step: Step, asks: bool, site: &Site<'_>) {
        let by_steps = site.rules.answered == Answered::All;
        if site.rules.staleness.is_none() || asks && !by_steps {
            return;
        }
        let Some(index) = site.members.index_of(rank) else { return };
        self.of.resize(site.members.count() as usize, 0);
        let clock = &mut self.of[index];
        *clock = if by_steps { step.wrapping_add(1).max(*clock) } else { *clock + 1 };
    }

    /// Whether whoever is to be answered must wait.
    pub(super) fn is_ahead(&self, rank: Rank, site: &Site<'_>) -> bool {
        let most = site.rules.staleness.as_ref().map(|rule| rule.most);
        let bound = most.zip(self.slowest(site)).map(|(most, slowest)| slowest.saturating_add(most));
        bound.is_some_and(|bound| self.of(rank, site) > bound)
    }

    /// Who is ahead waits for the answer to this.
    pub(super) fn wait(&mut self, rank: Rank, header: Header) {
        self.waiting.push((rank, header));
    }

    /// Whether it waits for an answer.
    pub(super) fn is_waiting(&self, rank: Rank) -> bool {
        self.waiting.iter().any(|(other, _)| *other == rank)
    }

    /// Who waits, but is not ahead any more; it waits no longer.
    pub(super) fn next(&mut self, site: &Site<'_>) -> Option<(Rank, Header)> {
        let place = self.waiting.iter().position(|(rank, _)| !self.is_ahead(*rank, site))?;
        Some(self.waiting.remove(place))
    }

    /// Those for whom somebody waits, but this one.
    pub(super) fn missing(&self, except: Option<Rank>, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        let slowest = self.slowest(site).filter(|_| !self.waiting.is_empty());
        if let Some((slowest, Staleness { of, .. })) = slowest.zip(site.rules.staleness.as_ref()) {
            let slow = |rank: &Rank| self.of(*rank, site) == slowest && Some(*rank) != except;
            ranks.extend(of.iter().filter(slow));
        }
    }

    fn of(&self, rank: Rank, site: &Site<'_>) -> u32 {
        site.members.index_of(rank).and_then(|index| self.of.get(index)).copied().unwrap_or(0)
    }

    /// The lowest clock that counts.
    fn slowest(&self, site: &Site<'_>) -> Option<u32> {
        let of = &site.rules.staleness.as_ref()?.of;
        of.iter().filter(|rank| site.active.contains(*rank)).map(|rank| self.of(rank, site)).min()
    }
}

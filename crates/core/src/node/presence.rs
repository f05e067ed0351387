//! Which workers have left (join), and when all have: then all are back.

use crate::error::Error;
use crate::members::Members;
use crate::roles::Roles;
use crate::types::Rank;
use std::collections::BTreeMap;

/// Workers of the job that have not left, as one node knows.
pub(super) struct Presence {
    /// Those of the job.
    workers: Members,
    me: Rank,
    active: Members,
    /// At a server: workers that have left again before it knew that all had left, and how often. Workers agree on that among
    /// themselves, and a server hears of it when it does.
    ahead: BTreeMap<Rank, u32>,
}

/// What a worker's leaving means.
pub(super) enum Left {
    /// It leaves the next time already; nothing yet.
    Ahead,
    /// The others go on without it.
    One,
    /// It was the last. All are back, but for those that have left again since.
    All {
        /// These, as often as they have.
        again: Vec<Rank>,
    },
}

impl Presence {
    pub(super) fn of_all(workers: Members, me: Rank) -> Self {
        Self { me, active: workers.clone(), workers, ahead: BTreeMap::new() }
    }

    /// A worker has left.
    ///
    /// # Errors
    /// [`Error::Protocol`] if it cannot.
    pub(super) fn leave(&mut self, rank: Rank) -> Result<Left, Error> {
        if !self.active.remove(rank) {
            if self.is_worker(self.me) || !self.is_worker(rank) {
                return Err(Error::protocol(rank, "it left twice, or is a server"));
            }
            *self.ahead.entry(rank).or_default() += 1;
            return Ok(Left::Ahead);
        }
        if !self.active.is_empty() {
            return Ok(Left::One);
        }
        self.active = self.workers.clone().in_epoch(self.active.epoch() + 1);
        let ahead = std::mem::take(&mut self.ahead).into_iter();
        let again = ahead.flat_map(|(rank, times)| std::iter::repeat_n(rank, times as usize));
        Ok(Left::All { again: again.collect() })
    }

    fn is_worker(&self, rank: Rank) -> bool {
        self.workers.contains(rank)
    }

    /// Servers always do.
    fn stays(&self, rank: Rank) -> bool {
        !self.is_worker(rank) || self.active.contains(rank)
    }

    /// If this worker has left: those that have not.
    pub(super) fn late_to_leave(&self) -> Vec<Rank> {
        if self.stays(self.me) { Vec::new() } else { self.active.iter().collect() }
    }

    /// Those of a book that have not left.
    pub(super) fn of_book(&self, roles: &Roles) -> Active {
        let those = |members: &Members| {
            let staying: Members = members.iter().filter(|rank| self.stays(*rank)).collect();
            staying.in_epoch(self.active.epoch())
        };
        Active { members: those(&roles.members), contributors: those(roles.contributors()) }
    }
}

/// Of a book's members those that have not left; of them, those who contribute.
pub(super) struct Active {
    pub(super) members: Members,
    pub(super) contributors: Members,
}

impl Active {
    /// One has left; whether it was a member.
    pub(super) fn leave(&mut self, rank: Rank) -> bool {
        self.contributors.remove(rank);
        self.members.remove(rank)
    }
}

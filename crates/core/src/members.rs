//! Who takes part, as a value: the whole job, those of it that have not left, or any other ranks.

use crate::types::Rank;

/// Ranks in ascending order, and their epoch. Who leaves (join) does so within one, and when all are back the next one begins; so it does
/// when members are lost and the others go on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members {
    ranks: Vec<Rank>,
    epoch: u32,
}

impl Members {
    /// The ranks `0..ranks`: all of a job.
    #[must_use]
    pub fn all(ranks: u32) -> Self {
        (0..ranks).map(Rank).collect()
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// How long a table by rank must be, in which each has its place.
    #[must_use]
    pub fn end(&self) -> usize {
        self.ranks.last().map_or(0, |last| last.index() + 1)
    }

    /// Whether there is nobody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// How often all have come back, or members were lost and the others went on.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// In ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Rank> + Clone + '_ {
        self.ranks.iter().copied()
    }

    /// The index of a rank among them.
    #[must_use]
    pub fn index_of(&self, rank: Rank) -> Option<usize> {
        // While nobody below is missing: of the whole job always.
        let at_its_own = self.ranks.get(rank.index()) == Some(&rank);
        if at_its_own { Some(rank.index()) } else { self.ranks.binary_search(&rank).ok() }
    }

    /// Whether this rank is one of them.
    #[must_use]
    pub fn contains(&self, rank: Rank) -> bool {
        self.index_of(rank).is_some()
    }

    /// The rank with this index among them; indices go round.
    ///
    /// # Panics
    /// If there is nobody.
    #[must_use]
    pub fn at(&self, index: u32) -> Rank {
        self.ranks[(index % self.count()) as usize]
    }

    /// All but `rank`, which need not be one of them: those above it, and then those below. So each rank begins with another
    /// one, and what all send does not converge on the same receiver.
    pub fn after(&self, rank: Rank) -> impl Iterator<Item = Rank> + '_ {
        let (below, others) = self.ranks.split_at(self.ranks.partition_point(|member| *member < rank));
        let above = if others.first() == Some(&rank) { &others[1..] } else { others };
        above.iter().chain(below).copied()
    }

    /// Takes a rank out; says whether it was one of them.
    pub fn remove(&mut self, rank: Rank) -> bool {
        let Some(at) = self.index_of(rank) else { return false };
        self.ranks.remove(at);
        true
    }

    /// The same ranks, of this epoch.
    #[must_use]
    pub fn in_epoch(self, epoch: u32) -> Self {
        Self { epoch, ..self }
    }
}

impl FromIterator<Rank> for Members {
    /// In any order, and each perhaps more than once.
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut ranks: Vec<Rank> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        Self { ranks, epoch: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn any_subset_is_counted_alike(given in proptest::collection::vec(0u32..40, 1..60), probe in 0u32..50) {
            let members: Members = given.iter().copied().map(Rank).collect();
            let model: Vec<Rank> = given.iter().copied().map(Rank).collect::<BTreeSet<_>>().into_iter().collect();
            prop_assert_eq!(members.iter().collect::<Vec<_>>(), &model[..]);
            prop_assert_eq!((members.count() as usize, members.is_empty()), (model.len(), false));
            prop_assert_eq!(Some(members.end()), model.last().map(|last| last.index() + 1));
            for rank in (0..50).map(Rank) {
                prop_assert_eq!(members.index_of(rank), model.iter().position(|one| *one == rank));
            }
            for at in 0..2 * model.len() {
                prop_assert_eq!(members.at(at as u32), model[at % model.len()]);
            }
            // After a rank: each other member once, cyclically ascending.
            let rank = Rank(probe);
            let mut want: Vec<Rank> = model.iter().copied().filter(|one| *one != rank).collect();
            want.sort_by_key(|one| (one.0 + 50 - probe) % 50);
            prop_assert_eq!(members.after(rank).collect::<Vec<_>>(), want);
            let mut fewer = members.clone();
            prop_assert_eq!(fewer.remove(rank), members.contains(rank));
            prop_assert!(!fewer.contains(rank) && fewer.epoch() == members.epoch());
            prop_assert!(fewer.iter().eq(members.iter().filter(|one| *one != rank)));
            prop_assert_eq!(fewer.in_epoch(probe).epoch(), probe);
        }
    }
}

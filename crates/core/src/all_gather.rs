//! What all workers agree on: each gives a few bytes, and gets those of all. One at a time, in the same order on all ranks.

use crate::error::Error;
use crate::members::Members;
use crate::types::{Rank, Seq};
use std::collections::BTreeMap;

/// One rank's side. Its driver sends and receives the bytes, under their number.
#[derive(Debug)]
pub struct AllGather {
    me: Rank,
    members: Members,
    /// The number of the one that this rank is in, or comes to next.
    seq: Seq,
    /// What this rank gives to the one that it is in.
    own: Option<Vec<u8>>,
    arrived: BTreeMap<(Seq, Rank), Vec<u8>>,
}

impl AllGather {
    /// Of these members, `me` one of them or not.
    #[must_use]
    pub fn new(me: Rank, members: Members) -> Self {
        Self { me, members, seq: 1, own: None, arrived: BTreeMap::new() }
    }

    /// This rank comes to the next one, and gives these bytes: to be sent to all others under this number.
    pub fn give(&mut self, bytes: Vec<u8>) -> Seq {
        self.own = Some(bytes);
        self.seq
    }

    /// Another rank has come, perhaps before this one.
    ///
    /// # Errors
    /// [`Error::Protocol`] if it is no member, has come before, or is where it cannot be.
    pub fn arrived(&mut self, from: Rank, seq: Seq, bytes: Vec<u8>) -> Result<(), Error> {
        let wrong = |why: String| Err(Error::protocol(from, why));
        // It can be one ahead: it has everything of this one, and this rank does not.
        if seq != self.seq && seq != self.seq + 1 {
            return wrong(format!("a blob of all-gather {seq}, expected {}", self.seq));
        }
        if !self.members.contains(from) {
            return wrong("a blob of an all-gather from a rank that takes no part, such as a server".into());
        }
        if self.arrived.insert((seq, from), bytes).is_some() {
            return wrong(format!("a second blob of all-gather {seq}"));
        }
        Ok(())
    }

    /// Of the one that this rank is in, if it is in one: who has not come.
    #[must_use]
    pub fn late(&self) -> Vec<Rank> {
        let is_late = |rank: &Rank| *rank != self.me && !self.arrived.contains_key(&(self.seq, *rank));
        self.members.iter().filter(|rank| self.own.is_some() && is_late(rank)).collect()
    }

    /// What all have given, in rank order, once all have come. That ends it.
    pub fn take(&mut self) -> Option<Vec<Vec<u8>>> {
        if !self.late().is_empty() {
            return None;
        }
        let mut own = Some(self.own.take()?);
        let seq = self.seq;
        self.seq += 1;
        let given = self.members.iter().map(|rank| match rank == self.me {
            true => own.take(),
            false => self.arrived.remove(&(seq, rank)),
        });
        Some(given.map(Option::unwrap_or_default).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_get_what_all_have_given_in_rank_order() {
        let mut all_gather = AllGather::new(Rank(1), Members::all(3));
        all_gather.arrived(Rank(2), 1, vec![2]).unwrap();
        assert_eq!((all_gather.late(), all_gather.take()), (vec![], None), "it has not come itself");
        assert_eq!(all_gather.give(vec![1]), 1);
        assert_eq!((all_gather.late(), all_gather.take()), (vec![Rank(0)], None));
        // Rank 2 has everything already, and comes to the next one.
        all_gather.arrived(Rank(2), 2, vec![22]).unwrap();
        all_gather.arrived(Rank(0), 1, vec![0]).unwrap();
        assert_eq!(all_gather.take(), Some(vec![vec![0], vec![1], vec![2]]));
        assert_eq!((all_gather.late(), all_gather.take()), (vec![], None));
        assert_eq!(all_gather.give(vec![11]), 2);
        assert_eq!(all_gather.late(), [Rank(0)]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut all_gather = AllGather::new(Rank(0), Members::all(2));
        all_gather.arrived(Rank(1), 1, vec![]).unwrap();
        for (from, seq) in [(1, 1), (1, 3), (1, 0), (2, 1)] {
            let error = all_gather.arrived(Rank(from), seq, vec![]).unwrap_err();
            assert!(matches!(error, Error::Protocol { peer, .. } if peer == Rank(from)), "{error}");
        }
    }
}

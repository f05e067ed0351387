//! The sharded key-value store, bulk-synchronous: every rank pushes its slice to the owner, the owner sums in rank order
//! when the last contribution is in and answers all at once (P3 §4.2: no notify-and-pull).
//!
//! Cost for n ranks and S bytes spread evenly over n co-located shards: 2 (n-1)/n S bytes per link and direction, two
//! latencies (Poseidon Table 1 with P1 = P2 = n).

use crate::layout::{Rank, Seq, Step};
use crate::wire::Op;

/// What one rank brings to a slice.
#[derive(Debug, Clone)]
pub enum Contribution<C> {
    /// Numbers.
    Data(C),
    /// Nothing: the parameter was not used on this rank in this step.
    Absent,
}

/// The owner's side of one slice.
#[derive(Debug)]
pub struct Gathering<C> {
    seq: Seq,
    op: Op,
    step: Step,
    contributions: Vec<Option<Contribution<C>>>,
    arrived: u32,
}

impl<C> Default for Gathering<C> {
    fn default() -> Self {
        Self { seq: 0, op: Op::Average, step: 0, contributions: Vec::new(), arrived: 0 }
    }
}

/// How a slice ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nobody contributed.
    Absent,
    /// One rank's contribution is the result as it is.
    Copy(Rank),
    /// The sum of the contributions, divided by this.
    Sum(u32),
}

impl<C: Clone> Gathering<C> {
    /// Takes a contribution.
    ///
    /// # Errors
    /// A sentence, if it belongs to another round or operation than those already here, or is the second of its rank.
    pub fn add(
        &mut self,
        from: Rank,
        ranks: u32,
        seq: Seq,
        op: Op,
        step: Step,
        what: Contribution<C>,
    ) -> Result<(), String> {
        if self.contributions.is_empty() {
            self.contributions.resize_with(ranks as usize, || None);
        }
        if self.arrived == 0 {
            if seq <= self.seq {
                return Err(format!("round {seq} again; round {} has ended", self.seq));
            }
            (self.seq, self.op, self.step) = (seq, op, step);
        }
        if seq != self.seq || op != self.op {
            return Err(format!(
                "round {seq} {op:?}, but the others are at round {} {:?} (step {})",
                self.seq, self.op, self.step
            ));
        }
        let place = &mut self.contributions[from.index()];
        if place.is_some() {
            return Err(format!("a second contribution to round {seq}"));
        }
        *place = Some(what);
        self.arrived += 1;
        Ok(())
    }

    /// Whether a round is open, and its seq and step.
    #[must_use]
    pub fn open(&self) -> Option<(Seq, Step)> {
        (self.arrived > 0).then_some((self.seq, self.step))
    }

    /// The active ranks that have not contributed to the open round.
    pub fn missing<'a>(&'a self, left: &'a [bool]) -> impl Iterator<Item = Rank> + 'a {
        (0..self.contributions.len())
            .filter(|&r| !left[r] && self.contributions[r].is_none())
            .map(|r| Rank(r as u32))
    }

    /// Whether every active rank has contributed to an open round.
    #[must_use]
    pub fn complete(&self, left: &[bool]) -> bool {
        // A rank leaves only after all its exchanges are answered. So the contribution of one that has left is for the time
        // after all have left: it knows already that they have, this rank does not, and the round waits for everybody.
        self.arrived > 0 && self.contributions.iter().zip(left).all(|(c, left)| c.is_some() != *left)
    }

    /// How the round ends; the data in rank order goes to `inputs`.
    ///
    /// # Errors
    /// A sentence, if two ranks contributed to a copy.
    pub fn outcome(&self, left: &[bool], inputs: &mut Vec<C>) -> Result<Outcome, String> {
        let mut last = None;
        for (rank, contribution) in self.contributions.iter().enumerate() {
            if let Some(Contribution::Data(chunk)) = contribution {
                inputs.push(chunk.clone());
                last = Some(Rank(rank as u32));
            }
        }
        match (last, self.op) {
            (None, _) => Ok(Outcome::Absent),
            (Some(rank), Op::Copy) if inputs.len() == 1 => Ok(Outcome::Copy(rank)),
            (Some(rank), Op::Copy) => {
                Err(format!("{} ranks contribute to a copy, one of them rank {rank}", inputs.len()))
            }
            (Some(_), Op::Sum) => Ok(Outcome::Sum(1)),
            (Some(_), Op::Average) => Ok(Outcome::Sum(left.iter().filter(|l| !**l).count() as u32)),
        }
    }

    /// Ends the round and drops its contributions.
    pub fn clear(&mut self) {
        self.contributions.iter_mut().for_each(|c| *c = None);
        self.arrived = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_when_the_last_active_rank_is_in_and_keeps_rank_order() {
        let mut gathering = Gathering::default();
        let left = [false, true, false, false];
        for (rank, data) in [(3, Some("d")), (0, None), (2, Some("c"))] {
            assert!(!gathering.complete(&left));
            let what = data.map_or(Contribution::Absent, Contribution::Data);
            gathering.add(Rank(rank), 4, 1, Op::Average, 1, what).unwrap();
        }
        assert!(gathering.complete(&left));
        let mut inputs = Vec::new();
        assert_eq!(gathering.outcome(&left, &mut inputs), Ok(Outcome::Sum(3)));
        assert_eq!(inputs, ["c", "d"]);
        gathering.clear();
        assert!(gathering.open().is_none());
        assert!(
            gathering.add(Rank(0), 4, 1, Op::Average, 1, Contribution::Absent).is_err(),
            "round 1 has ended"
        );
    }

    #[test]
    fn who_knows_first_that_all_have_left_does_not_end_a_round_alone() {
        let mut gathering = Gathering::default();
        // Rank 2's leave has reached rank 0 but not this rank, which believes that rank 2 goes on.
        gathering.add(Rank(0), 3, 1, Op::Average, 1, Contribution::Data("a")).unwrap();
        assert!(!gathering.complete(&[true, true, false]));
        assert!(!gathering.complete(&[false; 3]), "nor when this rank knows too");
    }

    #[test]
    fn refuses_what_does_not_fit_the_open_round() {
        let mut gathering = Gathering::default();
        gathering.add(Rank(0), 2, 5, Op::Copy, 1, Contribution::Data("a")).unwrap();
        assert!(
            gathering.add(Rank(0), 2, 5, Op::Copy, 1, Contribution::Absent).unwrap_err().contains("second")
        );
        assert!(gathering.add(Rank(1), 2, 6, Op::Copy, 1, Contribution::Absent).is_err());
        assert!(gathering.add(Rank(1), 2, 5, Op::Sum, 1, Contribution::Absent).is_err());
        gathering.add(Rank(1), 2, 5, Op::Copy, 1, Contribution::Data("b")).unwrap();
        assert!(gathering.outcome(&[false; 2], &mut Vec::new()).unwrap_err().contains("copy"));
    }
}

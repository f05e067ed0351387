//! What each position does in each step of a collective, as pure functions.
//!
//! A *position* is a rank counted from the slice's first rank: `(rank - owner) mod p`. Steps are numbered alike at sender
//! and receiver, so (slice, seq, step) names a frame. In a step a position sends at most one part and takes in at most
//! one; what it sends depends on earlier steps only. The first half of the steps adds partial sums up, the second half
//! spreads the result.

use super::{butterfly, central, ring, tree};
use crate::cost::dense::Algorithm;
use crate::cost::part_start;
use std::ops::Range;

/// A collective: who sends which part to whom in which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Plan {
    /// See [`super::central`].
    Central,
    /// See [`super::tree`].
    Tree,
    /// See [`super::ring`].
    Ring,
    /// See [`super::butterfly`].
    Butterfly,
}

/// What a position does in one step. Parts without elements are left out, at both ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// What it sends; before it waits for what it receives.
    pub send: Option<Send>,
    /// What it receives.
    pub receive: Option<Receive>,
}

/// A part that leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The receiver's position.
    pub to: u32,
    /// Which elements of the slice.
    pub elems: Range<u64>,
}

/// A part that comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// The sender's position.
    pub from: u32,
    /// Which elements of the slice.
    pub elems: Range<u64>,
    /// What becomes of it.
    pub then: Then,
}

/// What becomes of a part that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It is added to what this position has, which is the sum of all that came before.
    Add,
    /// As `Add`, but in one pass, rounded once, with the others of this kind that come before the next send.
    AddTogether,
    /// It is added to this position's own contribution: no earlier part touched these elements.
    AddToOwn,
    /// It is the result.
    Replace,
}

impl Step {
    pub(super) fn sends(to: u32, elems: Range<u64>) -> Self {
        Self { send: Some(Send { to, elems }), receive: None }
    }

    pub(super) fn receives(from: u32, elems: Range<u64>, then: Then) -> Self {
        Self { send: None, receive: Some(Receive { from, elems, then }) }
    }

    /// The step that brings back what was summed: partners and parts as before, directions exchanged.
    fn mirrored(self) -> Self {
        let send = self.receive.map(|Receive { from, elems, .. }| Send { to: from, elems });
        let receive = self.send.map(|Send { to, elems }| Receive { from: to, elems, then: Then::Replace });
        Self { send, receive }
    }
}

impl Plan {
    /// The steps of an algorithm for one slice. In the store each slice has a central server of its own: its owner.
    #[must_use]
    pub fn of(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Store | Algorithm::Central => Self::Central,
            Algorithm::Tree => Self::Tree,
            Algorithm::Ring => Self::Ring,
            Algorithm::Butterfly => Self::Butterfly,
        }
    }

    /// Steps that add up; as many spread the result.
    #[must_use]
    pub fn reduce_steps(self, positions: u32) -> u32 {
        match self {
            Self::Central => central::reduce_steps(positions),
            Self::Tree => tree::reduce_steps(positions),
            Self::Ring => ring::reduce_steps(positions),
            Self::Butterfly => butterfly::reduce_steps(positions),
        }
    }

    /// Steps of the whole collective; none for one position.
    #[must_use]
    pub fn steps(self, positions: u32) -> u32 {
        2 * self.reduce_steps(positions)
    }

    /// What `position` does in step `number` of a slice of `elems` elements; nothing beyond the last step.
    #[must_use]
    pub fn step(self, positions: u32, position: u32, elems: u64, number: u32) -> Step {
        let (half, all) = (self.reduce_steps(positions), self.steps(positions));
        let mut step = if number >= all {
            Step::default()
        } else if number < half {
            self.reduce_step(positions, position, elems, number)
        } else if self == Self::Ring {
            ring::gather_step(positions, position, elems, number - half)
        } else {
            self.reduce_step(positions, position, elems, all - 1 - number).mirrored()
        };
        step.send = step.send.filter(|send| !send.elems.is_empty());
        step.receive = step.receive.filter(|receive| !receive.elems.is_empty());
        step
    }

    fn reduce_step(self, positions: u32, position: u32, elems: u64, number: u32) -> Step {
        match self {
            Self::Central => central::reduce_step(position, elems, number),
            Self::Tree => tree::reduce_step(positions, position, elems, number),
            Self::Ring => ring::reduce_step(positions, position, elems, number),
            Self::Butterfly => butterfly::reduce_step(positions, position, elems, number),
        }
    }
}

/// The elements of parts `from..to` of `parts`.
pub(super) fn parts(elems: u64, parts: u32, from: u32, to: u32) -> Range<u64> {
    let start = |index: u32| part_start(elems, u64::from(parts), u64::from(index));
    start(from)..start(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Plan; 4] = [Plan::Central, Plan::Tree, Plan::Ring, Plan::Butterfly];

    #[test]
    fn in_each_step_what_one_sends_the_other_expects() {
        for plan in ALL {
            for (positions, elems) in (1..18).flat_map(|p| [0u64, 1, 2, 13, 1000].map(|n| (p, n))) {
                for number in 0..=plan.steps(positions) {
                    let step = |position| plan.step(positions, position, elems, number);
                    for position in 0..positions {
                        if let Some(Send { to, elems }) = step(position).send {
                            let receive = step(to).receive.unwrap_or_else(|| panic!("{plan:?} {number}"));
                            assert_eq!((receive.from, receive.elems), (position, elems), "{plan:?} {number}");
                        }
                        if let Some(Receive { from, .. }) = step(position).receive {
                            assert_eq!(step(from).send.map(|send| send.to), Some(position), "{plan:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_contribution_is_in_every_result_once() {
        for plan in ALL {
            for (p, elems) in (1..18u32).flat_map(|p| [1u64, 5, 16, 40].map(|n| (p, n))) {
                // By position and element: whose contributions are in, as bits.
                let own = |v: u32| vec![1u32 << v; elems as usize];
                let mut held: Vec<Vec<u32>> = (0..p).map(own).collect();
                for number in 0..plan.steps(p) {
                    let before = held.clone();
                    for position in 0..p {
                        let step = plan.step(p, position, elems, number);
                        let Some(Receive { from, elems, then }) = step.receive else { continue };
                        for i in elems.start as usize..elems.end as usize {
                            let (mine, came) = (before[position as usize][i], before[from as usize][i]);
                            held[position as usize][i] = match then {
                                Then::Replace => came,
                                Then::AddToOwn => {
                                    assert_eq!(mine, 1 << position, "{plan:?}: not its own any more");
                                    mine | came
                                }
                                Then::Add | Then::AddTogether => mine | came,
                            };
                            assert!(then == Then::Replace || mine & came == 0, "{plan:?}: added twice");
                        }
                    }
                }
                let all = u32::MAX >> (32 - p);
                assert!(held.iter().flatten().all(|bits| *bits == all), "{plan:?} {p} {elems}: {held:?}");
            }
        }
    }
}

//! What each position does in each step of an algorithm, as pure functions.
//!
//! A *position* is a rank counted from the slice's first rank: `(rank - owner) mod p`. Steps are numbered alike at sender
//! and receiver, so (slice, seq, step) names a frame. In a step a position sends at most one part and takes in at most
//! one; what it sends depends on earlier steps only. The first half of the steps adds partial sums up, the second half
//! spreads the result. In the store each slice has a central server of its own, its owner, so it has the steps of one.

mod butterfly;
mod central;
mod ring;
mod step;
mod tree;
mod walk;

pub use step::{Combine, Receive, Send, SendReceive};
pub use walk::{Adding, Move, Post, Walk};

use crate::way::Algorithm;

impl Algorithm {
    /// Steps that add up; as many spread the result.
    #[must_use]
    pub fn reduce_steps(self, positions: u32) -> u32 {
        match self {
            Self::Store | Self::Central => central::reduce_steps(positions),
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
    pub fn step(self, positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
        let half = self.reduce_steps(positions);
        let all = 2 * half;
        let mut step = if number >= all {
            SendReceive::default()
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

    fn reduce_step(self, positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
        match self {
            Self::Store | Self::Central => central::reduce_step(position, elems, number),
            Self::Tree => tree::reduce_step(positions, position, elems, number),
            Self::Ring => ring::reduce_step(positions, position, elems, number),
            Self::Butterfly => butterfly::reduce_step(positions, position, elems, number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_each_step_what_one_sends_the_other_expects() {
        for algorithm in Algorithm::ALL {
            for (positions, elems) in (1..18).flat_map(|p| [0u64, 1, 2, 13, 1000].map(|n| (p, n))) {
                for number in 0..=algorithm.steps(positions) {
                    let step = |position| algorithm.step(positions, position, elems, number);
                    for position in 0..positions {
                        if let Some(Send { to, elems }) = step(position).send {
                            let receive =
                                step(to).receive.unwrap_or_else(|| panic!("{algorithm:?} {number}"));
                            assert_eq!(
                                (receive.from, receive.elems),
                                (position, elems),
                                "{algorithm:?} {number}"
                            );
                        }
                        if let Some(Receive { from, .. }) = step(position).receive {
                            assert_eq!(step(from).send.map(|send| send.to), Some(position), "{algorithm:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_contribution_is_in_every_result_once() {
        for algorithm in Algorithm::ALL {
            for (p, elems) in (1..18u32).flat_map(|p| [1u64, 5, 16, 40].map(|n| (p, n))) {
                // By position and element: whose contributions are in, as bits.
                let own = |v: u32| vec![1u32 << v; elems as usize];
                let mut held: Vec<Vec<u32>> = (0..p).map(own).collect();
                for number in 0..algorithm.steps(p) {
                    let before = held.clone();
                    for position in 0..p {
                        let step = algorithm.step(p, position, elems, number);
                        let Some(Receive { from, elems, combine }) = step.receive else { continue };
                        for i in elems.start as usize..elems.end as usize {
                            let (mine, came) = (before[position as usize][i], before[from as usize][i]);
                            held[position as usize][i] = match combine {
                                Combine::Replace => came,
                                Combine::AddToOwn => {
                                    assert_eq!(mine, 1 << position, "{algorithm:?}: not its own any more");
                                    mine | came
                                }
                                Combine::Add | Combine::AddTogether => mine | came,
                            };
                            assert!(
                                combine == Combine::Replace || mine & came == 0,
                                "{algorithm:?}: added twice"
                            );
                        }
                    }
                }
                let all = u32::MAX >> (32 - p);
                assert!(
                    held.iter().flatten().all(|bits| *bits == all),
                    "{algorithm:?} {p} {elems}: {held:?}"
                );
            }
        }
    }
}

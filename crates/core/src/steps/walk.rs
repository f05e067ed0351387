//! Going through the steps of an algorithm: in which order a position sends, waits and adds up. Exchanges do it as parts come
//! in, calls beforehand, to make a plan of it.
//!
//! What came is not added at once: parts that are to be added together wait until the elements are next sent, or other
//! elements come to be added, or the walk ends. Then all are added in one pass.

use super::step::{Combine, Receive, Send, SendReceive};
use crate::way::Algorithm;
use std::ops::Range;

/// One position among others, and the slice.
#[derive(Debug, Clone, Copy)]
pub struct Post {
    /// How the sum is made.
    pub algorithm: Algorithm,
    /// Positions.
    pub positions: u32,
    /// This one.
    pub position: u32,
    /// Elements of the slice.
    pub elems: u64,
}

impl Post {
    /// What it sends and receives in a step.
    #[must_use]
    #[inline]
    pub fn step(&self, number: u32) -> SendReceive {
        self.algorithm.step(self.positions, self.position, self.elems, number)
    }

    /// Steps that add up; as many spread the result.
    #[must_use]
    pub fn reduce_steps(&self) -> u32 {
        self.algorithm.reduce_steps(self.positions)
    }

    /// All steps.
    #[must_use]
    pub fn steps(&self) -> u32 {
        self.algorithm.steps(self.positions)
    }
}

/// What a position does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    /// It sends a part of what it has, in this step.
    Send(u32, Send),
    /// It waits for the part of this step.
    Receive(u32, Receive),
    /// It adds what has come to what it has.
    Add(Adding),
}

/// An addition that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adding {
    /// Of these elements.
    pub elems: Range<u64>,
    /// To this position's own contribution; otherwise to what it has by now.
    pub to_own: bool,
    /// Nothing is added to them any more, at any position.
    pub last: bool,
}

/// How far a position has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    number: u32,
    end: u32,
    /// What is left of the step; worked out once, when the walk comes to it.
    step: Option<SendReceive>,
    adding: Option<(Range<u64>, bool)>,
}

impl Walk {
    /// Before these steps.
    #[must_use]
    pub fn through(steps: Range<u32>) -> Self {
        Self { number: steps.start, end: steps.end, step: None, adding: None }
    }

    /// The step that it is in.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// What is to be done now; nothing after the end. The same until [`Walk::done`].
    #[must_use]
    #[inline]
    pub fn next(&mut self, post: &Post) -> Option<Move> {
        while self.number < self.end {
            let step = self.step.get_or_insert_with(|| post.step(self.number));
            if let Some(send) = &step.send {
                let what = Move::Send(self.number, send.clone());
                return Some(self.due(self.number >= post.reduce_steps()).unwrap_or(what));
            }
            if let Some(receive) = &step.receive {
                let joins = matches!(receive.combine, Combine::Replace | Combine::AddTogether);
                let what = Move::Receive(self.number, receive.clone());
                return Some(if joins { what } else { self.due(false).unwrap_or(what) });
            }
            self.step_is_over();
        }
        self.due(true)
    }

    fn step_is_over(&mut self) {
        (self.number, self.step) = (self.number + 1, None);
    }

    fn due(&self, last: bool) -> Option<Move> {
        let (elems, to_own) = self.adding.clone()?;
        Some(Move::Add(Adding { elems, to_own, last }))
    }

    /// It has been done.
    #[inline]
    pub fn done(&mut self, what: Move) {
        match what {
            Move::Send(..) => {
                if let Some(step) = &mut self.step {
                    step.send = None;
                }
            }
            Move::Receive(_, Receive { elems, combine, .. }) => {
                if combine != Combine::Replace {
                    self.adding.get_or_insert((elems, combine == Combine::AddToOwn));
                }
                self.step_is_over();
            }
            Move::Add(_) => self.adding = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position walks as far as what others have sent allows, in any order: all end, with all contributions once.
    #[test]
    fn all_walk_to_the_end_and_have_everything_added_once() {
        for algorithm in Algorithm::ALL {
            for (positions, elems) in (1..18u32).flat_map(|p| [1u64, 5, 40].map(|n| (p, n))) {
                let post = |position| Post { algorithm, positions, position, elems };
                let steps = algorithm.steps(positions);
                let mut walks = vec![Walk::through(0..steps); positions as usize];
                // By position and element: whose contributions are in, as bits.
                let mut held: Vec<Vec<u32>> = (0..positions).map(|v| vec![1 << v; elems as usize]).collect();
                let mut came: Vec<Vec<Vec<u32>>> = vec![Vec::new(); positions as usize];
                let mut under_way = std::collections::BTreeMap::new();
                let (mut ended, mut divided) = (0, vec![0; elems as usize]);
                while ended < positions {
                    ended = 0;
                    for position in (0..positions).rev() {
                        let (me, walk) = (position as usize, &mut walks[position as usize]);
                        loop {
                            let Some(what) = walk.next(&post(position)) else {
                                ended += 1;
                                break;
                            };
                            assert_eq!(
                                walk.next(&post(position)).as_ref(),
                                Some(&what),
                                "the same until it is done"
                            );
                            match &what {
                                Move::Send(number, Send { to, elems }) => {
                                    let part = held[me][elems.start as usize..elems.end as usize].to_vec();
                                    under_way.insert((*to, *number), part);
                                }
                                Move::Receive(number, Receive { elems, combine, .. }) => {
                                    let Some(part) = under_way.remove(&(position, *number)) else { break };
                                    if *combine == Combine::Replace {
                                        held[me][elems.start as usize..elems.end as usize]
                                            .copy_from_slice(&part);
                                    } else {
                                        came[me].push(part);
                                    }
                                }
                                Move::Add(Adding { elems, to_own, last }) => {
                                    for part in came[me].drain(..) {
                                        for (at, bits) in (elems.start as usize..).zip(part) {
                                            assert!(held[me][at] & bits == 0, "{algorithm:?}: added twice");
                                            assert!(!to_own || bits & 1 << position == 0);
                                            held[me][at] |= bits;
                                        }
                                    }
                                    for at in elems.start as usize..elems.end as usize {
                                        let all = u32::MAX >> (32 - positions);
                                        assert_eq!(*last, held[me][at] == all, "{algorithm:?} {positions}");
                                        divided[at] += u32::from(*last);
                                    }
                                }
                            }
                            walk.done(what);
                        }
                    }
                }
                let all = u32::MAX >> (32 - positions);
                assert!(held.iter().flatten().all(|bits| *bits == all), "{algorithm:?} {positions} {elems}");
                assert!(
                    positions == 1 || divided.iter().all(|times| *times == 1),
                    "{algorithm:?}: {divided:?}"
                );
                assert!(under_way.is_empty() && came.iter().all(Vec::is_empty));
            }
        }
    }
}

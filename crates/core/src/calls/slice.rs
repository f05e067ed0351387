//! A slice of a sum as rounds: the steps that [`crate::steps`] lists for one position, on a call's buffers.
//!
//! Contributions are read where the caller has them; partial sums, and in the end the result, are made in the result's
//! memory, which may be the same. What comes to be added goes to scratch, and what is the result goes into place. A round
//! ends where a send needs what was received before it; what needs nothing of a round is part of it.

use super::round::{Buffer, Bytes, Local, Plan, Round, Transfer};
use crate::steps::{Receive, Send, Then};
use crate::way::Algorithm;
use std::ops::Range;

/// Which of the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Half {
    /// Those that add up.
    Reduce,
    /// Those that spread the result.
    Spread,
    /// All.
    Both,
}

/// One slice as one rank sees it.
#[derive(Debug, Clone)]
pub(super) struct Slice {
    pub(super) algorithm: Algorithm,
    pub(super) half: Half,
    /// Ranks of the group.
    pub(super) ranks: u32,
    /// This rank's index in it.
    pub(super) me: u32,
    /// The index of position 0.
    pub(super) owner: u32,
    /// Bytes of the tensor.
    pub(super) range: Range<u64>,
    pub(super) elem_bytes: u64,
    /// What this rank contributes.
    pub(super) own: Buffer,
    /// Where sums are made and results go, on ranks where there are any.
    pub(super) result: Buffer,
}

/// What waits to be added: ranks and their parts, the first of which is this rank's own.
struct Adding {
    elems: Range<u64>,
    inputs: Vec<(u32, Bytes)>,
}

/// A plan in the making.
struct Draft {
    plan: Plan,
    round: Round,
    adding: Option<Adding>,
    /// Elements that are summed to some extent, and so are in the result's memory.
    summed: Range<u64>,
}

impl Slice {
    /// The rounds, which use scratch buffers after those that `scratch` has.
    pub(super) fn plan(&self, scratch: Vec<usize>) -> Plan {
        let whole = 0..(self.range.end - self.range.start) / self.elem_bytes;
        let plan = Plan { scratch, rounds: Vec::new() };
        let mut draft = Draft { plan, round: Round::default(), adding: None, summed: 0..0 };
        let (half, all) = (self.algorithm.reduce_steps(self.ranks), self.algorithm.steps(self.ranks));
        let numbers = match self.half {
            Half::Reduce => 0..half,
            Half::Spread => half..all,
            Half::Both => 0..all,
        };
        if self.ranks == 1 && self.half != Half::Spread {
            let copy = Local::Copy(self.bytes(self.own, &whole), self.bytes(self.result, &whole));
            draft.round.then.push(copy);
        }
        let position = (self.me + self.ranks - self.owner) % self.ranks;
        for number in numbers {
            let step = self.algorithm.step(self.ranks, position, whole.end, number);
            if let Some(Send { to, elems }) = step.send {
                if !draft.round.receives.is_empty() {
                    self.end_round(&mut draft, number >= half);
                }
                let bytes = if number < half {
                    self.held(&draft.summed, &elems)
                } else {
                    self.bytes(self.result, &elems)
                };
                draft.round.sends.push(Transfer { peer: self.rank(to), stage: number, bytes });
            }
            if let Some(receive) = step.receive {
                self.receive(&mut draft, number, receive);
            }
        }
        self.end_round(&mut draft, true);
        draft.plan
    }

    fn receive(&self, draft: &mut Draft, number: u32, receive: Receive) {
        let Receive { from, elems, then } = receive;
        let peer = self.rank(from);
        let bytes = if then == Then::Replace {
            self.bytes(self.result, &elems)
        } else {
            if then != Then::AddTogether && draft.adding.is_some() {
                self.end_round(draft, false);
            }
            let of = Buffer::Scratch(draft.plan.scratch.len() as u32);
            let bytes = Bytes { of, range: 0..((elems.end - elems.start) * self.elem_bytes) as usize };
            draft.plan.scratch.push(bytes.range.len());
            let own = self.held(&draft.summed, &elems);
            let adding = draft.adding.get_or_insert(Adding { elems, inputs: vec![(self.me, own)] });
            adding.inputs.push((peer, bytes.clone()));
            bytes
        };
        draft.round.receives.push(Transfer { peer, stage: number, bytes });
    }

    /// Ends the round with the addition that is due, which is the `last` for its elements if nothing is added after it.
    fn end_round(&self, draft: &mut Draft, last: bool) {
        if let Some(Adding { elems, mut inputs }) = draft.adding.take() {
            // All others add in the order of positions.
            if self.algorithm == Algorithm::Store {
                inputs.sort_by_key(|(rank, _)| *rank);
            }
            let inputs = inputs.into_iter().map(|(_, bytes)| bytes).collect();
            let output = self.bytes(self.result, &elems);
            draft.round.then.push(Local::Reduce { inputs, output, last });
            draft.summed = elems;
        }
        let round = std::mem::take(&mut draft.round);
        if round != Round::default() {
            draft.plan.rounds.push(round);
        }
    }

    /// Where this rank has what it has of these elements, which lie within `summed` or beside it: a step adds to all that
    /// a later one sends or adds to, or to nothing of it.
    fn held(&self, summed: &Range<u64>, elems: &Range<u64>) -> Bytes {
        let is_summed = summed.start <= elems.start && elems.end <= summed.end;
        self.bytes(if is_summed { self.result } else { self.own }, elems)
    }

    fn bytes(&self, of: Buffer, elems: &Range<u64>) -> Bytes {
        // A scratch buffer has the length of the slice.
        let start = if matches!(of, Buffer::Scratch(_)) { 0 } else { self.range.start };
        let at = |elem: u64| (start + elem * self.elem_bytes) as usize;
        Bytes { of, range: at(elems.start)..at(elems.end) }
    }

    fn rank(&self, position: u32) -> u32 {
        (position + self.owner) % self.ranks
    }
}

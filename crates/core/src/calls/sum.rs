//! A piece of a sum as stages: the steps that [`crate::steps`] lists for one position, on a call's buffers.
//!
//! Contributions are read where the caller has them; partial sums, and in the end the result, are made in the result's
//! memory, which may be the same. What comes to be added goes to scratch, and what is the result goes into place. A stage
//! ends where a send needs what was received before it; what needs nothing of a stage is part of it.
//!
//! A rank may contribute several vectors of its own (MXNET-MPI, section 6). What it adds to they are added to one after the
//! other, in one pass over memory; of what it sends without adding to it, their sum is made first.

use super::stage::{Buffer, Local, Plan, Span, Stage, Transfer};
use crate::steps::{Adding, Combine, Move, Post, Receive, Send, Walk};
use crate::way::Algorithm;
use std::ops::Range;

/// Which of the steps: those of the reduce-scatter, those of the all-gather.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phases {
    /// Those that add up.
    Reduce,
    /// Those that spread the result.
    Gather,
    /// All.
    Both,
}

/// One piece of a sum as one rank sees it.
#[derive(Debug, Clone)]
pub(super) struct PieceSum {
    pub(super) algorithm: Algorithm,
    pub(super) phases: Phases,
    /// Ranks of the group.
    pub(super) ranks: u32,
    /// This rank's index in it.
    pub(super) me: u32,
    /// The index of position 0.
    pub(super) owner: u32,
    /// Bytes of the tensor.
    pub(super) range: Range<u64>,
    pub(super) elem_bytes: u64,
    /// What this rank contributes: one vector, or several.
    pub(super) own: Vec<Buffer>,
    /// Where sums are made and results go, on ranks where there are any.
    pub(super) result: Buffer,
}

/// A plan in the making.
struct Draft {
    plan: Plan,
    stage: Stage,
    /// What has come to be added: ranks and their parts.
    came: Vec<(u32, Span)>,
    /// Elements that are summed to some extent, and so are in the result's memory.
    summed: Range<u64>,
}

impl Draft {
    fn end_stage(&mut self) {
        let stage = std::mem::take(&mut self.stage);
        if stage != Stage::default() {
            self.plan.stages.push(stage);
        }
    }
}

impl PieceSum {
    /// The stages, which use scratch buffers after those that `scratch` has.
    pub(super) fn plan(&self, scratch: Vec<usize>) -> Plan {
        let whole = 0..(self.range.end - self.range.start) / self.elem_bytes;
        let plan = Plan { scratch, stages: Vec::new() };
        let mut draft = Draft { plan, stage: Stage::default(), came: Vec::new(), summed: 0..0 };
        let position = (self.me + self.ranks - self.owner) % self.ranks;
        let post = Post { algorithm: self.algorithm, positions: self.ranks, position, elems: whole.end };
        let (half, all) = (post.reduce_steps(), post.steps());
        let mut walk = Walk::through(match self.phases {
            Phases::Reduce => 0..half,
            Phases::Gather => half..all,
            Phases::Both => 0..all,
        });
        if self.ranks == 1 && self.phases != Phases::Gather {
            let output = self.bytes(self.result, &whole);
            draft.stage.then.push(match &self.own[..] {
                [own] => Local::Copy(self.bytes(*own, &whole), output),
                _ => Local::Reduce { inputs: self.held(&(0..0), &whole), output, last: true },
            });
        }
        while let Some(what) = walk.next(&post) {
            match &what {
                Move::Send(number, Send { to, elems }) => {
                    if !draft.stage.receives.is_empty() {
                        draft.end_stage();
                    }
                    let has_result = *number >= half;
                    let bytes = if has_result {
                        self.bytes(self.result, elems)
                    } else {
                        self.held_as_one(&mut draft, elems)
                    };
                    draft.stage.sends.push(Transfer { peer: self.rank(*to), tag: *number, bytes });
                }
                Move::Receive(number, Receive { from, elems, combine }) => {
                    let peer = self.rank(*from);
                    let bytes = if *combine == Combine::Replace {
                        self.bytes(self.result, elems)
                    } else {
                        let of = Buffer::Scratch(draft.plan.scratch.len() as u32);
                        let len = ((elems.end - elems.start) * self.elem_bytes) as usize;
                        draft.plan.scratch.push(len);
                        let bytes = Span { of, range: 0..len };
                        draft.came.push((peer, bytes.clone()));
                        bytes
                    };
                    draft.stage.receives.push(Transfer { peer, tag: *number, bytes });
                }
                Move::Add(adding) => self.add(&mut draft, adding),
            }
            walk.done(what);
        }
        draft.end_stage();
        draft.plan
    }

    /// Ends the stage with an addition: to what this rank has come the parts of others.
    fn add(&self, draft: &mut Draft, Adding { elems, last, .. }: &Adding) {
        let held = self.held(&draft.summed, elems);
        let mut inputs: Vec<(u32, Span)> = held.into_iter().map(|bytes| (self.me, bytes)).collect();
        inputs.append(&mut draft.came);
        // All others add in the order of positions.
        if self.algorithm == Algorithm::Store {
            inputs.sort_by_key(|(rank, _)| *rank);
        }
        let inputs = inputs.into_iter().map(|(_, bytes)| bytes).collect();
        let output = self.bytes(self.result, elems);
        draft.stage.then.push(Local::Reduce { inputs, output, last: *last });
        draft.summed = elems.clone();
        draft.end_stage();
    }

    /// Where this rank has what it has of these elements, which lie within `summed` or beside it: a step adds to all that
    /// a later one sends or adds to, or to nothing of it.
    fn held(&self, summed: &Range<u64>, elems: &Range<u64>) -> Vec<Span> {
        let is_summed = summed.start <= elems.start && elems.end <= summed.end;
        let of = if is_summed { std::slice::from_ref(&self.result) } else { &self.own[..] };
        of.iter().map(|of| self.bytes(*of, elems)).collect()
    }

    /// The same to be sent: of several vectors their sum. It may be made where one of them is, as what a rank has sent it never
    /// adds to again.
    fn held_as_one(&self, draft: &mut Draft, elems: &Range<u64>) -> Span {
        let mut held = self.held(&draft.summed, elems);
        if held.len() == 1 {
            return held.remove(0);
        }
        draft.end_stage();
        let output = self.bytes(self.result, elems);
        draft.stage.then.push(Local::Reduce { inputs: held, output: output.clone(), last: false });
        draft.end_stage();
        output
    }

    fn bytes(&self, of: Buffer, elems: &Range<u64>) -> Span {
        // A scratch buffer has the length of the slice.
        let start = if matches!(of, Buffer::Scratch(_)) { 0 } else { self.range.start };
        let at = |elem: u64| (start + elem * self.elem_bytes) as usize;
        Span { of, range: at(elems.start)..at(elems.end) }
    }

    fn rank(&self, position: u32) -> u32 {
        (position + self.owner) % self.ranks
    }
}

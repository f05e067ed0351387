//! What one rank does in a call, as data: stages of messages, and what is computed between them.
//!
//! A call cuts its tensor into pieces, each with a plan of its own, so that one piece is on the wire while another is
//! summed. Sums follow the steps of [`crate::steps`], in the orders of `docs/summation.md`, the pieces of an allreduce
//! being slices; half types accumulate in single precision ([`crate::reduce`]).
//!
//! Cost for p ranks, without the time to sum, S bytes being received by the busiest rank:
//!
//! | kind | plan | stages | bytes |
//! |---|---|---|---|
//! | barrier | dissemination | ⌈log2 p⌉ | 0 |
//! | broadcast | the second half of a tree, up to [`CHAIN_BYTES_MIN`] | ⌈log2 p⌉ | S (the root sends ⌈log2 p⌉ S) |
//! | | chain of pieces | p - 1 for the first piece | S |
//! | allreduce | by the algorithm: [`crate::cost::dense`] | | |
//! | reduce | the first half of central at the root, for one piece | 1 | (p-1) S |
//! | | that of the store, and from the owners to the root | 2 | 2 (p-1)/p S |
//! | reduce_scatter | the first half of the store, whose slices are the blocks | 1 | (p-1)/p S, S being all blocks together |
//! | gather, scatter, all_gather, all_to_all | everybody to everybody, or to or from the root | 1 | (p-1)/p S, likewise |
//!
//! Why memory may be overwritten while a message from it may still be waiting to be written to a socket: it never is. A
//! plan writes to what it has sent only with what follows from the arrival of that very message: a result, which has this
//! rank's contribution in it. For the same reason a receive of any stage may be posted, and filled, from the beginning.
//! Several vectors of one rank are no exception: what is sent of them is their sum, in the result's memory.

use super::blocks::{piece, pieces};
use super::shape::Shape;
use super::signature::CallKind;
use super::stage::{Buffer, Local, Plan, Span, Stage, Transfer};
use super::sum::{Phases, PieceSum};
use crate::way::Algorithm;
use std::ops::Range;

/// From this size on a broadcast goes from rank to rank.
pub const CHAIN_BYTES_MIN: u64 = 256 << 10;

impl Shape {
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        // Each rank begins with another one, so that not all send to the same at once.
        let (me, ranks) = (self.me, self.ranks);
        (1..ranks).map(move |step| (me + step) % ranks)
    }

    /// The plan for a piece of the tensor, or of each block, by its number.
    #[must_use]
    pub fn plan(&self, number: u32) -> Plan {
        let range = piece(self, number);
        let mut plan = match self.kind {
            // The caller knows the peer: see `super::run`.
            CallKind::Message => Plan::default(),
            CallKind::Barrier => self.barrier(),
            CallKind::Broadcast { root } => self.broadcast(root, range.clone()),
            CallKind::Reduce { root } => self.reduce(root, number, range.clone()),
            CallKind::Gather { root } => self.gather(root, &range),
            CallKind::Scatter { root } => self.scatter(root, &range),
            CallKind::Allreduce { algorithm } => {
                let owner = if algorithm == Algorithm::Central { 0 } else { number % self.ranks };
                let own = (0..self.vectors()).map(Buffer::Input).collect();
                let sum = self.sum(owner, range.clone());
                PieceSum { algorithm, phases: Phases::Both, own, ..sum }.plan(Vec::new())
            }
            CallKind::AllGather => self.all_gather(&range),
            CallKind::ReduceScatter => self.reduce_scatter(&range),
            CallKind::AllToAll => self.all_to_all(&range),
        };
        if self.vectors() > 1 {
            let copies =
                (1..self.vectors()).filter_map(|to| self.copy(Buffer::Output(0), Buffer::Output(to), &range));
            plan.stages.push(Stage { then: copies.collect(), ..Stage::default() });
        }
        debug_assert!(plan.stages.iter().all(|stage| {
            stage.sends.iter().chain(&stage.receives).all(|transfer| transfer.peer != self.me)
        }));
        plan
    }

    /// Everybody's part of the first input, summed as in the store at this owner.
    fn sum(&self, owner: u32, range: Range<u64>) -> PieceSum {
        PieceSum {
            algorithm: Algorithm::Store,
            phases: Phases::Reduce,
            ranks: self.ranks,
            me: self.me,
            owner,
            range,
            elem_bytes: self.elem_bytes as u64,
            own: vec![Buffer::Input(0)],
            result: Buffer::Output(0),
        }
    }

    /// The part of a block that lies in `piece`; the first piece has a part, if an empty one, of every block.
    fn part(&self, of: Buffer, piece: &Range<u64>) -> Option<Span> {
        let len = match of {
            Buffer::Input(block) => self.inputs[block as usize],
            Buffer::Output(block) => self.outputs[block as usize],
            Buffer::Scratch(_) => return None,
        };
        let range = piece.start.min(len) as usize..piece.end.min(len) as usize;
        (piece.start == 0 || !range.is_empty()).then_some(Span { of, range })
    }

    fn transfer(&self, peer: u32, of: Buffer, piece: &Range<u64>) -> Option<Transfer> {
        Some(Transfer { peer, tag: 0, bytes: self.part(of, piece)? })
    }

    fn copy(&self, from: Buffer, to: Buffer, piece: &Range<u64>) -> Option<Local> {
        Some(Local::Copy(self.part(from, piece)?, self.part(to, piece)?))
    }

    /// Hensgen, Finkel, Manber 1988: in stage k everybody hears of the 2^k before it.
    fn barrier(&self) -> Plan {
        let empty = Span { of: Buffer::Scratch(0), range: 0..0 };
        let stages = (0..).map(|k| (k, 1 << k)).take_while(|(_, distance)| *distance < self.ranks);
        let stages = stages.map(|(tag, distance)| Stage {
            sends: vec![Transfer { peer: (self.me + distance) % self.ranks, tag, bytes: empty.clone() }],
            receives: vec![Transfer {
                peer: (self.me + self.ranks - distance) % self.ranks,
                tag,
                bytes: empty.clone(),
            }],
            then: Vec::new(),
        });
        Plan { scratch: vec![0], stages: stages.collect() }
    }

    /// In place, in output block 0, from where others of this rank are filled.
    fn broadcast(&self, root: u32, range: Range<u64>) -> Plan {
        if self.len_bytes() < CHAIN_BYTES_MIN {
            let sum =
                PieceSum { algorithm: Algorithm::Tree, phases: Phases::Gather, ..self.sum(root, range) };
            return sum.plan(Vec::new());
        }
        let place = (self.me + self.ranks - root) % self.ranks;
        let rank = |place: u32| (place + root) % self.ranks;
        let transfer = |place| self.transfer(rank(place), Buffer::Output(0), &range);
        let before = place.checked_sub(1).and_then(transfer);
        let after = Some(place + 1).filter(|place| *place < self.ranks).and_then(transfer);
        let received = Stage { receives: before.into_iter().collect(), ..Stage::default() };
        let sent = Stage { sends: after.into_iter().collect(), ..Stage::default() };
        Plan { scratch: Vec::new(), stages: vec![received, sent] }
    }

    /// A piece alone is summed at the root; of several each has an owner, which sends the root what it has summed.
    fn reduce(&self, root: u32, number: u32, range: Range<u64>) -> Plan {
        let owner = if pieces(self) == 1 { root } else { number % self.ranks };
        let (sum, len) = (self.sum(owner, range.clone()), (range.end - range.start) as usize);
        if owner == root {
            return sum.plan(Vec::new());
        }
        let tag = Algorithm::Central.reduce_steps(self.ranks);
        if self.me == owner {
            let of = Buffer::Scratch(0);
            let mut plan = PieceSum { result: of, ..sum }.plan(vec![len]);
            let sends = vec![Transfer { peer: root, tag, bytes: Span { of, range: 0..len } }];
            plan.stages.push(Stage { sends, ..Stage::default() });
            return plan;
        }
        let mut plan = sum.plan(Vec::new());
        if self.me == root {
            let bytes = self.whole(Buffer::Output(0), &range);
            let receives = vec![Transfer { peer: owner, tag, bytes }];
            plan.stages.push(Stage { receives, ..Stage::default() });
        }
        plan
    }

    fn whole(&self, of: Buffer, range: &Range<u64>) -> Span {
        Span { of, range: range.start as usize..range.end as usize }
    }

    fn gather(&self, root: u32, piece: &Range<u64>) -> Plan {
        let stage = if self.me == root {
            Stage {
                sends: Vec::new(),
                receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
                then: self.copy(Buffer::Input(0), Buffer::Output(root), piece).into_iter().collect(),
            }
        } else {
            let sends = self.transfer(root, Buffer::Input(0), piece).into_iter().collect();
            Stage { sends, ..Stage::default() }
        };
        Plan { scratch: Vec::new(), stages: vec![stage] }
    }

    fn scatter(&self, root: u32, piece: &Range<u64>) -> Plan {
        let stage = if self.me == root {
            Stage {
                sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(k), piece)).collect(),
                receives: Vec::new(),
                then: self.copy(Buffer::Input(root), Buffer::Output(0), piece).into_iter().collect(),
            }
        } else {
            let receives = self.transfer(root, Buffer::Output(0), piece).into_iter().collect();
            Stage { receives, ..Stage::default() }
        };
        Plan { scratch: Vec::new(), stages: vec![stage] }
    }

    fn all_gather(&self, piece: &Range<u64>) -> Plan {
        let stage = Stage {
            sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(0), piece)).collect(),
            receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
            then: self.copy(Buffer::Input(0), Buffer::Output(self.me), piece).into_iter().collect(),
        };
        Plan { scratch: Vec::new(), stages: vec![stage] }
    }

    fn all_to_all(&self, piece: &Range<u64>) -> Plan {
        let stage = Stage {
            sends: self.others().filter_map(|k| self.transfer(k, Buffer::Input(k), piece)).collect(),
            receives: self.others().filter_map(|k| self.transfer(k, Buffer::Output(k), piece)).collect(),
            then: self.copy(Buffer::Input(self.me), Buffer::Output(self.me), piece).into_iter().collect(),
        };
        Plan { scratch: Vec::new(), stages: vec![stage] }
    }

    /// Block k is a slice whose owner is rank k; all go in one stage.
    fn reduce_scatter(&self, range: &Range<u64>) -> Plan {
        let mut all = Plan::default();
        let mut together = Stage::default();
        for block in self.others().chain([self.me]) {
            let own = vec![Buffer::Input(block)];
            let plan =
                PieceSum { own, ..self.sum(block, range.clone()) }.plan(std::mem::take(&mut all.scratch));
            all.scratch = plan.scratch;
            for stage in plan.stages {
                together.sends.extend(stage.sends);
                together.receives.extend(stage.receives);
                together.then.extend(stage.then);
            }
        }
        all.stages.push(together);
        all
    }
}

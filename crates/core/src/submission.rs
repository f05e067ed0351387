//! This rank's part in the next round of a tensor: one struct from the program to the headers of its frames.

use crate::types::{BookId, Seq, SliceId, Step, TensorId};
use crate::wire::{Header, Kind, Op};

/// A rank's part in a round of one tensor. `C` is what it calls memory: an address in the program, a chunk from the lanes on.
#[derive(Debug, Clone, Copy)]
pub struct Submission<C> {
    /// The book.
    pub book: BookId,
    /// The tensor.
    pub tensor: TensorId,
    /// The submission's number, one more than the last. The engine counts: what a program says here is nothing to it.
    pub seq: Seq,
    /// The user's iteration.
    pub step: Step,
    /// The contribution; of a sum the whole tensor, and where the result goes.
    pub memory: C,
    /// What is in it.
    pub gives: Gives,
}

/// What a rank gives to a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gives {
    /// The tensor, to be combined so with those of the others.
    Whole(Op),
    /// Nothing; the memory only receives what the others' become.
    Nothing(Op),
    /// So many bytes, for a gather; 0 for none.
    Gathered(u32),
}

impl Gives {
    /// A tensor to be combined, or its absence.
    #[must_use]
    pub fn unless_absent(op: Op, absent: bool) -> Self {
        if absent { Self::Nothing(op) } else { Self::Whole(op) }
    }

    /// What is done with the contributions; nothing in a gather.
    #[must_use]
    pub fn op(self) -> Option<Op> {
        match self {
            Self::Whole(op) | Self::Nothing(op) => Some(op),
            Self::Gathered(_) => None,
        }
    }
}

impl<C> Submission<C> {
    /// The same with other memory, under another number.
    pub fn with<D>(self, seq: Seq, memory: D) -> Submission<D> {
        let Self { book, tensor, step, gives, .. } = self;
        Submission { book, tensor, seq, step, memory, gives }
    }

    /// What the frames of a slice have in common.
    #[must_use]
    pub fn header(&self, slice: SliceId) -> Header {
        let Self { book, seq, step, .. } = *self;
        let (kind, argument) = match self.gives {
            Gives::Gathered(len_bytes) => (Kind::Gather, len_bytes),
            Gives::Whole(_) => (Kind::Push, 0),
            Gives::Nothing(_) => (Kind::PushAbsent, 0),
        };
        let op = self.gives.op().unwrap_or_default();
        Header { op, book, slice, seq, step, argument, ..Header::control(kind) }
    }
}

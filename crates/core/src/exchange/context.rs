//! What an exchange is told and what it answers: where it is, what it works with, what it wants done.

use crate::layout::Slice;
use crate::members::Members;
use crate::memory::Memory;
use crate::roles::{Groups, Rules};
use crate::types::{Dtype, Rank, Seq, Step};
use crate::wire::Outgoing;

/// What is known about a slice on this rank, the same in every round.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// This rank.
    pub rank: Rank,
    /// Who takes part: all whom the book is for, or those of them who contribute where it is not the store's.
    pub members: &'a Members,
    /// Those of them that have not left (join), in the epoch that this rank knows of.
    pub active: &'a Members,
    /// How the store's rounds go.
    pub rules: &'a Rules,
    /// Who sums with whom before the owner does.
    pub groups: &'a Groups,
    /// Of a gather: the only rank that gets the contributions; none: all do.
    pub only_to: Option<Rank>,
    /// The slice.
    pub slice: &'a Slice,
    /// Its layer's name.
    pub layer: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its wire type; if it is another, what travels is rounded.
    pub wire: Dtype,
    /// Length of the whole tensor, in bytes.
    pub tensor_bytes: u64,
}

impl Site<'_> {
    /// Whether contributions and results are rounded to the wire type.
    #[must_use]
    pub fn is_rounded(&self) -> bool {
        self.wire != self.dtype
    }

    /// As what this slice travels between this rank and another, and with how many bytes.
    pub fn wire_with(&self, peer: Rank) -> (Dtype, u32) {
        if self.wire != self.dtype && self.groups.together(self.rank, peer) {
            (self.dtype, self.slice.len_bytes)
        } else {
            (self.wire, self.slice.wire_bytes)
        }
    }
}

/// What an exchange works with while it handles an event.
pub struct Context<'a, M: Memory> {
    /// Where it is.
    pub site: Site<'a>,
    /// The node's memory.
    pub memory: &'a mut M,
    /// Empty, and left empty: for the inputs of a sum, reused so that a sum allocates nothing.
    pub inputs: &'a mut Vec<M::Chunk>,
    /// What is to be done, in this order.
    pub effects: &'a mut Vec<Effect<M::Chunk>>,
}

/// What an exchange wants done.
#[derive(Debug)]
pub enum Effect<C> {
    /// Queue a frame, at the place of the slice's layer.
    Send {
        /// The receiver.
        to: Rank,
        /// The frame: the event's header with another kind, argument and length, and a view of the payload.
        frame: Outgoing<C>,
        /// What may hold it back.
        flow: Flow,
    },
    /// Something will be sent to this rank under the window in this round, when it can be.
    Opens {
        /// The rank.
        to: Rank,
    },
    /// What was sent to this rank under the window in this round occupies no scratch there any more.
    Consumed {
        /// The rank.
        by: Rank,
    },
    /// All contributions are here; goes before [`Effect::Complete`].
    Gathered {
        /// By member the payloads of its contribution, in order; `None` for this rank and those that took no part. Empty if
        /// there are no other ranks.
        parts: Vec<Option<Vec<C>>>,
    },
    /// Nothing to do: contributions have become one here.
    Summed {
        /// The round.
        seq: Seq,
    },
    /// A sum waits here for the word of this rank's program.
    Waits,
    /// Enough are in a round that this rank owns: after so long it may end without the others.
    Enough {
        /// The round.
        seq: Seq,
        /// From now.
        after_ns: u64,
    },
    /// A contribution to a round that this rank owns came too late, and was discarded.
    Late {
        /// Whose.
        of: Rank,
    },
    /// The result is in this rank's memory.
    Complete {
        /// The round.
        seq: Seq,
        /// Whether anybody contributed; if not, the memory is as it was.
        present: bool,
        /// Of a result that the owner keeps: how often it has been replaced. The round's step of others.
        version: Step,
        /// See [`crate::node::Action::Complete`].
        kept: Option<C>,
    },
}

/// What may hold a frame back besides its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The window: the receiver may have to keep the payload in scratch until its own contribution exists.
    Window,
    /// Nothing: the receiver waits for it with its memory ready, or there is no payload.
    Free,
}

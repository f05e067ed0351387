//! A call in lengths alone.

use super::signature::CallKind;

/// A call as one rank sees it, in lengths alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// What is done.
    pub kind: CallKind,
    /// Ranks of the group.
    pub ranks: u32,
    /// This rank's index in it.
    pub me: u32,
    /// Bytes of an element.
    pub elem_bytes: usize,
    /// Lengths of the blocks that are given.
    pub inputs: Vec<u64>,
    /// Lengths of the blocks that are to be filled.
    pub outputs: Vec<u64>,
}

/// Vectors of one rank that an allreduce can sum.
pub const VECTORS_MAX: usize = 256;

impl Shape {
    /// How many vectors of this rank take part as one member: of an allreduce and of a broadcast; 1 of all others.
    #[must_use]
    pub fn vectors(&self) -> u32 {
        match self.kind {
            CallKind::Allreduce { .. } | CallKind::Broadcast { .. } => self.outputs.len() as u32,
            _ => 1,
        }
    }

    /// Bytes that the call cuts into pieces: of the whole tensor, or of the largest block.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.inputs.iter().chain(&self.outputs).copied().max().unwrap_or(0)
    }
}

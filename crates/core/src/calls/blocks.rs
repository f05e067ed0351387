//! How many blocks a call takes, and into which pieces it is cut.

use super::{Action, Request, Shape};
use crate::error::Error;
use crate::limits;

/// Bytes that each rank sums of a piece.
const BLOCK_BYTES: u64 = 128 << 10;
/// Largest piece that is cut into blocks.
const PIECE_BYTES_MAX: u64 = 8 << 20;
/// Piece of a tensor that is passed on from rank to rank.
const CHAIN_PIECE_BYTES: u64 = 256 << 10;

/// The length of pieces, from what all ranks know alike.
pub(super) fn piece_bytes(shape: &Shape) -> u64 {
    let least = match shape.action {
        Action::Allreduce | Action::Reduce { .. } => {
            (BLOCK_BYTES * u64::from(shape.ranks)).min(PIECE_BYTES_MAX)
        }
        Action::ReduceScatter => BLOCK_BYTES,
        Action::Broadcast { .. } => CHAIN_PIECE_BYTES,
        _ => return limits::MESSAGE_BYTES_MAX as u64,
    };
    let few = shape.len_bytes().div_ceil(limits::CALL_PIECES_MAX as u64).next_multiple_of(64);
    least.max(few)
}

/// Whether there are as many blocks as the action takes, of fitting lengths.
pub(super) fn check_blocks(shape: &Shape, request: Request) -> Result<(), Error> {
    let Shape { action, ranks, me, inputs, outputs, elem_bytes } = shape;
    let ranks = *ranks as usize;
    let (given, wanted) = (inputs.len(), outputs.len());
    let at_root = |count| if action.root() == Some(*me) { count } else { 0 };
    let expected = match action {
        Action::Message if matches!(request, Request::Send { .. }) => (1, 0),
        Action::Message => (0, 1),
        Action::Barrier => (0, 0),
        Action::Broadcast { .. } => (0, 1),
        Action::Reduce { .. } => (1, at_root(1)),
        Action::Gather { .. } => (1, at_root(ranks)),
        Action::Scatter { .. } => (at_root(ranks), 1),
        Action::Allreduce => (1, 1),
        Action::AllGather => (1, ranks),
        Action::ReduceScatter => (ranks, 1),
        Action::AllToAll => (ranks, ranks),
    };
    let root_fits = action.root().is_none_or(|root| (root as usize) < ranks);
    let mut lens = inputs.iter().chain(outputs);
    let first = lens.clone().next().copied().unwrap_or(0);
    let equal = *action == Action::AllToAll || lens.all(|len| *len == first);
    let whole = !action.computes() || first.is_multiple_of(*elem_bytes as u64);
    if (given, wanted) == expected && root_fits && equal && whole {
        return Ok(());
    }
    Err(Error::Config(format!(
        "{}: {given} blocks given and {wanted} to be filled, of {first} bytes and others, by {me} of {ranks} ranks; \
         expected {} and {} blocks of equal length in whole elements, and a root in the group",
        action.name(),
        expected.0,
        expected.1
    )))
}

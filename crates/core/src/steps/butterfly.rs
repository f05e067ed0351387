//! A butterfly: recursive halving, then recursive doubling (Thakur, Rabenseifner and Gropp; FireCaffe, equation 4).
//!
//! The first q = 2^floor(lg p) positions are the core; the slice has q parts. At level j = 1..lg q a position exchanges
//! halves of what it still has with the partner whose j-th bit, from the top, differs: q/2 away first, neighbours last.
//! It keeps the half in which its own part lies, and ends with that part summed. Doubling is the mirror image.
//!
//! Any number of ranks: if p is no power of two, position q + i hands its whole contribution to position i before the
//! first level and is given the whole result after the last (a fold).
//!
//! Sums: `own + came` at every level (the fold first), rounded each time.
//!
//! Cost for p ranks and n bytes: 2 lg q steps, 2 more with a fold; 2 (q-1)/q n bytes per direction, n more where a fold
//! ends ([`crate::cost::dense::butterfly`]).

use super::step::{Combine, Receive, Send, SendReceive, parts};
use crate::parts::floor_log2;

fn core(positions: u32) -> u32 {
    1 << floor_log2(positions)
}

fn fold_steps(positions: u32) -> u32 {
    u32::from(!positions.is_power_of_two())
}

pub(super) fn reduce_steps(positions: u32) -> u32 {
    if positions == 0 { 0 } else { fold_steps(positions) + floor_log2(positions) }
}

pub(super) fn reduce_step(positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
    let core = core(positions);
    if number < fold_steps(positions) {
        return if position >= core {
            SendReceive::sends(position - core, 0..elems)
        } else if position < positions - core {
            SendReceive::receives(position + core, 0..elems, Combine::Add)
        } else {
            SendReceive::default()
        };
    }
    if position >= core {
        return SendReceive::default();
    }
    let width = core >> (number - fold_steps(positions) + 1);
    let first = position & !(2 * width - 1);
    let (lower, upper) =
        (parts(elems, core, first, first + width), parts(elems, core, first + width, first + 2 * width));
    let (kept, given) = if position & width == 0 { (lower, upper) } else { (upper, lower) };
    let partner = position ^ width;
    SendReceive {
        send: Some(Send { to: partner, elems: given }),
        receive: Some(Receive { from: partner, elems: kept, combine: Combine::Add }),
    }
}

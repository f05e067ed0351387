//! A binomial tree: partial sums up to the root, the result down (FireCaffe, equation 2).
//!
//! Position v, whose lowest set bit is 2^j, has the children v + 2^i for i < j (as far as they exist) and the parent
//! v - 2^j; the root is position 0, the slice's first rank. Step j of the way up is that of the edges of length 2^j.
//! Sums: own + child v+1 + child v+2 + child v+4 ..., one pass, rounded once per position.
//!
//! Cost for p ranks and n bytes: 2 floor(lg p) steps that wait for each other; ceil(lg p) n bytes per direction at the root
//! ([`crate::cost::dense::tree`]).

use super::step::{Combine, SendReceive};
use crate::parts::ceil_log2;

pub(super) fn reduce_steps(positions: u32) -> u32 {
    ceil_log2(positions)
}

pub(super) fn reduce_step(positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
    let length = 1u32 << number;
    if position & (length - 1) != 0 {
        // It has sent its sum to its parent already.
        SendReceive::default()
    } else if position & length != 0 {
        SendReceive::sends(position - length, 0..elems)
    } else if positions - position > length {
        SendReceive::receives(position + length, 0..elems, Combine::AddTogether)
    } else {
        SendReceive::default()
    }
}

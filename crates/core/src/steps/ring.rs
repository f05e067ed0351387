//! A ring: reduce-scatter, then all-gather, each p - 1 steps of len/p (Patarasuk and Yuan; FireCaffe, equation 3).
//!
//! The slice is cut into p parts. Part c starts at position c + 1 and travels once around, each position adding its own;
//! it ends summed at position c. Then each part travels around once more. Sums of part c: the contribution of each
//! position, in the order c + 2, ..., c - 1, c, is added to what came, `own + came`, rounded at every position.
//!
//! Cost for p ranks and n bytes: 2 (p-1) steps; 2 (p-1)/p n bytes per direction ([`crate::cost::dense::ring`]).

use super::step::{Combine, SendReceive, parts};
use super::step::{Receive, Send};
use std::ops::Range;

pub(super) fn reduce_steps(positions: u32) -> u32 {
    positions.saturating_sub(1)
}

pub(super) fn reduce_step(positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
    step(positions, position, elems, number + 1, Combine::AddToOwn)
}

/// Step `number` of the all-gather.
pub(super) fn gather_step(positions: u32, position: u32, elems: u64, number: u32) -> SendReceive {
    step(positions, position, elems, number, Combine::Replace)
}

/// Sends the part `behind` positions behind to the next position; the one before that comes.
fn step(positions: u32, position: u32, elems: u64, behind: u32, combine: Combine) -> SendReceive {
    let part = |behind: u32| -> Range<u64> {
        let part = (position + 2 * positions - behind) % positions;
        parts(elems, positions, part, part + 1)
    };
    let (next, before) = ((position + 1) % positions, (position + positions - 1) % positions);
    SendReceive {
        send: Some(Send { to: next, elems: part(behind) }),
        receive: Some(Receive { from: before, elems: part(behind + 1), combine }),
    }
}

//! The central parameter server: all contributions to one rank, the result back (FireCaffe, equation 1).
//!
//! All slices have the same server, rank 0, at position 0. Position i sends in step i - 1 and gets the result in the mirror
//! image of that step; nobody waits for another's turn, so two latencies pass. Sums: one pass in the order of positions,
//! rounded once, as at a shard of the store.
//!
//! Cost for p ranks and n bytes: 2 steps that wait for each other; (p-1) n bytes per direction at the server, n elsewhere
//! ([`crate::cost::dense::rooted`]).

use super::step::{Combine, SendReceive};

pub(super) fn reduce_steps(positions: u32) -> u32 {
    positions.saturating_sub(1)
}

pub(super) fn reduce_step(position: u32, elems: u64, number: u32) -> SendReceive {
    let worker = number + 1;
    match position {
        0 => SendReceive::receives(worker, 0..elems, Combine::AddTogether),
        _ if position == worker => SendReceive::sends(0, 0..elems),
        _ => SendReceive::default(),
    }
}

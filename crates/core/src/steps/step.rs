//! One step of one position, as data.

use crate::parts::part_start;
use std::ops::Range;

/// What a position does in one step. Parts without elements are left out, at both ends.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SendReceive {
    /// What it sends; before it waits for what it receives.
    pub send: Option<Send>,
    /// What it receives.
    pub receive: Option<Receive>,
}

/// A part that leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Send {
    /// The receiver's position.
    pub to: u32,
    /// Which elements of the slice.
    pub elems: Range<u64>,
}

/// A part that comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// The sender's position.
    pub from: u32,
    /// Which elements of the slice.
    pub elems: Range<u64>,
    /// What becomes of it.
    pub combine: Combine,
}

/// What becomes of a part that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Combine {
    /// It is added to what this position has, which is the sum of all that came before.
    Add,
    /// As `Add`, but in one pass, rounded once, with the others of this kind that come before the next send.
    AddTogether,
    /// It is added to this position's own contribution: no earlier part touched these elements.
    AddToOwn,
    /// It is the result.
    Replace,
}

impl SendReceive {
    pub(super) fn sends(to: u32, elems: Range<u64>) -> Self {
        Self { send: Some(Send { to, elems }), receive: None }
    }

    pub(super) fn receives(from: u32, elems: Range<u64>, combine: Combine) -> Self {
        Self { send: None, receive: Some(Receive { from, elems, combine }) }
    }

    /// The step that brings back what was summed: partners and parts as before, directions exchanged.
    pub(super) fn mirrored(self) -> Self {
        let send = self.receive.map(|Receive { from, elems, .. }| Send { to: from, elems });
        let receive =
            self.send.map(|Send { to, elems }| Receive { from: to, elems, combine: Combine::Replace });
        Self { send, receive }
    }
}

/// The elements of parts `from..to` of `parts`.
pub(super) fn parts(elems: u64, parts: u32, from: u32, to: u32) -> Range<u64> {
    let start = |index: u32| part_start(elems, u64::from(parts), u64::from(index));
    start(from)..start(to)
}

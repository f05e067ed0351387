//! Checkers: what must hold in every run. Each is a name in [`Checker`]; `tests/canaries.rs` shows that each can fail.
//!
//! They recompute what they check in the plainest way and share no code with the nodes beyond the layout and the headers.

pub mod journey;
pub mod ledger;
pub mod link;
pub mod order;
pub mod rest;
mod update;

/// What was violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Checker {
    /// Every slice completes exactly once per submission.
    ExactlyOnce,
    /// A round ends only when every active rank has taken part.
    NobodyForgotten,
    /// Results equal the sum in the scheme's order, recomputed, bit by bit; so they are bit-equal on all ranks.
    Exact,
    /// If nobody contributed, the memory is as it was, and that is what the rank is told.
    AbsentUntouched,
    /// A result is still in memory when the program reads it.
    ResultStays,
    /// Memory does not change while it is being written to a link.
    PayloadStays,
    /// At every link the frame with the best place goes first.
    Priority,
    /// Frames of the same place go in the order in which they were queued.
    FirstInFirstOut,
    /// No more is pushed than the window allows, and a link never idles while a frame may go.
    Window,
    /// An owner holds no more for its peers than their windows allow.
    OwnerMemory,
    /// At the end nothing is queued, on the way, or held.
    NothingLeft,
    /// The bytes on each link are those of the formula.
    Bytes,
    /// What nodes let others see of a slice comes in the order of its journey, on each rank and from rank to rank, and all of it.
    Journey,
    /// The run ends with every program at its end.
    NoDeadlock,
    /// When a rank is lost, every other rank ends and names it; otherwise nobody is lost.
    LossNamed,
    /// Headers survive encoding, and no node reports an error.
    Protocol,
}

/// What was violated, and how.
#[derive(Debug, Clone)]
pub struct Violation {
    /// The checker.
    pub checker: Checker,
    /// What it saw.
    pub message: String,
}

impl Violation {
    /// A violation.
    pub fn new(checker: Checker, message: impl Into<String>) -> Self {
        Self { checker, message: message.into() }
    }
}

/// `Ok` if `holds`.
pub(crate) fn check(
    holds: bool,
    checker: Checker,
    message: impl FnOnce() -> String,
) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation::new(checker, message())) }
}

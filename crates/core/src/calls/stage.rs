//! A plan as data: stages of messages, and what is computed between them. Ranks are indexes in the group.

use std::ops::Range;

/// Memory that a plan speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Buffer {
    /// A block of what the caller gave.
    Input(u32),
    /// A block of where the result goes.
    Output(u32),
    /// A buffer of the plan.
    Scratch(u32),
}

/// Bytes of a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub of: Buffer,
    /// Which bytes.
    pub range: Range<usize>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// The other rank, as an index in the group.
    pub peer: u32,
    /// Tells messages of one piece between the same two ranks apart.
    pub tag: u32,
    /// From or to where.
    pub bytes: Span,
}

/// What is computed once a stage's messages are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Local {
    /// Byte for byte.
    Copy(Span, Span),
    /// The call's operation.
    Reduce {
        /// Over these, in this order.
        inputs: Vec<Span>,
        /// The outcome, which may be one of the inputs.
        output: Span,
        /// Nothing is added any more, so that an average is divided.
        last: bool,
    },
}

/// Messages that need not wait for each other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stage {
    /// To be sent.
    pub sends: Vec<Transfer>,
    /// To be received; the stage ends when all are there.
    pub receives: Vec<Transfer>,
    /// To be done then, in order.
    pub then: Vec<Local>,
}

/// One piece of one rank's part in a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Lengths of scratch buffers in bytes.
    pub scratch: Vec<usize>,
    /// One after the other.
    pub stages: Vec<Stage>,
}

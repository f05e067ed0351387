//! Frames: a fixed little-endian header and a payload. The protocol's version is agreed when a connection opens.
//!
//! ```text
//!  0      1      2      4       8       12      16       20           24
//!  | kind | op   | book | slice | seq   | step  | argument | payload_bytes |
//! ```
//! The sender is known from the connection; tensor and offset follow from the slice.

use crate::error::Error;
use crate::limits;
use crate::reduce::Reduction;
use crate::types::{BookId, Dtype, Rank, Seq, SliceId, Step};

/// Version of frames and handshake; peers with another version are refused at the handshake.
pub const VERSION: u16 = 7;
/// Length of a header.
pub const HEADER_BYTES: usize = 24;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Worker to owner: this rank's contribution to a slice; `argument` is its wire type, and from the head of a group of which
    /// ranks it is ([`Party`]).
    Push = 1,
    /// Worker to owner: this rank, or group, has no contribution to this slice; `argument` as of a push.
    PushAbsent = 2,
    /// Owner to worker: the result; `argument` is its wire type.
    Answer = 3,
    /// Owner to worker: nobody had a contribution.
    AnswerAbsent = 4,
    /// Owner to worker, for `Copy`: the result equals what this worker pushed.
    AnswerSame = 5,
    /// To all: this rank contributes no more until all ranks have left (join).
    Leave = 6,
    /// To all: this rank's part of an all-gather of small blobs; `seq` counts the all-gathers.
    Blob = 7,
    /// To all: this process is alive; `argument` changes whenever data has moved there.
    Heartbeat = 8,
    /// To all: the job has failed; the payload is a [`crate::life::Verdict`].
    Abort = 9,
    /// To all, after everything else: this rank is done, needs nobody any more, and owes this peer nothing.
    Goodbye = 10,
    /// Collectives: a partial sum, to be added; `argument` is the step. Without payload: of nobody so far.
    Part = 11,
    /// Collectives: a part of the result; `argument` is the step. Without payload: nobody had a contribution.
    Result = 12,
    /// To all: whom do you wait for? See [`crate::life::Question`].
    Ask = 13,
    /// The answer of one lane, a [`crate::life::Reply`]; `seq` is the question's.
    Reply = 14,
    /// To all: a piece of this rank's contribution to a gather; `argument` is the length of the whole contribution.
    Gather = 16,
    /// Owner to worker, where the result is made later: this worker's contribution is in the sum.
    Summed = 17,
    /// Gathers, head to head: its group is in, and what its ranks have given follows; `argument` is of whom ([`Party`]).
    GroupIn = 18,
    /// Gathers, from a head: a piece of what the next rank has given of those it speaks for; `argument` as of a gather.
    Passed = 19,
    /// Gathers, from a head: the next rank of those takes no part.
    NotIn = 20,
    /// Between members: a [`crate::agreement::MemberMessage`] on who is in the next epoch.
    Members = 21,
    /// Owner to the slice's replica: what the contributions to a round come to, which the owner has updated with, and before anybody else
    /// gets its result. Without payload: nobody had a contribution.
    Replicated = 22,
    /// Between two epochs, to who is to keep what an owner keeps: one of an optimizer's states; `step` is how many updates they have had,
    /// `argument` which state it is (the lower 16 bits), and of how many. Without payload: there are none.
    State = 23,
    /// A whole message of a call; `book`, `slice` and `step` are group, call and tag, `seq` is the call's signature.
    Message = 32,
    /// A message of `argument` bytes is there to be asked for.
    Offer = 33,
    /// There is memory for a message of `argument` bytes: send its parts.
    Ready = 34,
    /// A part of a message that was asked for; `argument` is where it starts.
    MessagePart = 35,
    /// `argument` more bytes of whole messages may be sent.
    Credit = 36,
}

impl Kind {
    const ALL: [Self; 27] = [
        Self::Push,
        Self::PushAbsent,
        Self::Answer,
        Self::AnswerAbsent,
        Self::AnswerSame,
        Self::Leave,
        Self::Blob,
        Self::Heartbeat,
        Self::Abort,
        Self::Goodbye,
        Self::Part,
        Self::Result,
        Self::Ask,
        Self::Reply,
        Self::Gather,
        Self::Summed,
        Self::GroupIn,
        Self::Passed,
        Self::NotIn,
        Self::Members,
        Self::Replicated,
        Self::State,
        Self::Message,
        Self::Offer,
        Self::Ready,
        Self::MessagePart,
        Self::Credit,
    ];

    /// Whether the frame is part of a slice's exchange.
    #[must_use]
    pub fn is_exchange(self) -> bool {
        matches!(
            self,
            Self::Push
                | Self::PushAbsent
                | Self::Answer
                | Self::AnswerAbsent
                | Self::AnswerSame
                | Self::Part
                | Self::Result
                | Self::Summed
                | Self::Replicated
                | Self::State
        ) || self.is_gathers()
    }

    /// Whether the frame may begin a round, and so come before this rank has opened its book.
    #[must_use]
    pub fn takes_part(self) -> bool {
        self.is_gathers() || matches!(self, Self::Push | Self::PushAbsent | Self::Part)
    }

    /// Whether the frame is part of a gather.
    #[must_use]
    pub fn is_gathers(self) -> bool {
        matches!(self, Self::Gather | Self::GroupIn | Self::Passed | Self::NotIn)
    }

    /// Whether the frame is part of a call; see [`crate::calls`].
    #[must_use]
    pub fn is_call(self) -> bool {
        matches!(self, Self::Message | Self::Offer | Self::Ready | Self::MessagePart | Self::Credit)
    }

    /// Whether the frame is a sign of life alone: it does not show that data moves.
    #[must_use]
    pub fn is_idle(self) -> bool {
        matches!(self, Self::Heartbeat | Self::Ask | Self::Reply)
    }

    fn payload_bytes_max(self) -> usize {
        match self {
            Self::Push
            | Self::Answer
            | Self::Part
            | Self::Result
            | Self::Gather
            | Self::Passed
            | Self::Replicated
            | Self::State => limits::SLICE_BYTES_MAX,
            Self::Message => limits::EAGER_BYTES_MAX,
            Self::MessagePart => limits::PART_BYTES_MAX,
            Self::Blob | Self::Members => limits::BLOB_BYTES_MAX,
            Self::Abort => limits::ABORT_BYTES_MAX,
            Self::Reply => limits::REPLY_BYTES_MAX,
            _ => 0,
        }
    }
}

/// Whether data has moved with what was read of a connection: so many bytes, of which so many frames are complete now, some of them
/// idle ([`Kind::is_idle`]). More bytes than the headers of these frames and of the next hold are part of a payload.
#[must_use]
pub fn data_has_moved(bytes: u64, frames: u64, idle_frames: u64) -> bool {
    frames > idle_frames || bytes > (frames + 1) * HEADER_BYTES as u64
}

/// What is done with the contributions to a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Op {
    /// The sum over the contributors divided by the number of active ranks (an absent contribution counts as zero).
    #[default]
    Average = 0,
    /// The sum.
    Sum = 1,
    /// The one contribution there is, bit by bit: a broadcast.
    Copy = 2,
    /// The smallest, element by element; see [`crate::reduce::Reduction::Min`].
    Min = 3,
    /// The largest, element by element.
    Max = 4,
}

impl Op {
    const ALL: [Self; 5] = [Self::Average, Self::Sum, Self::Copy, Self::Min, Self::Max];

    /// What is wrong with this operation on elements of this type that travel as `wire`, if anything.
    #[must_use]
    pub fn refused_on_wire(self, dtype: Dtype, wire: Dtype) -> Option<&'static str> {
        match self {
            Self::Copy if wire != dtype => {
                Some("a copy keeps every bit, but this tensor is rounded on the wire")
            }
            _ => self.refused(dtype),
        }
    }

    /// What is wrong with this operation on elements of this type, if anything.
    #[must_use]
    pub fn refused(self, dtype: Dtype) -> Option<&'static str> {
        match self {
            Self::Copy => None,
            _ if dtype == Dtype::Bytes => Some("bytes can only be copied"),
            Self::Average if dtype.is_integer() => Some(
                "integers have no average here, for it would have to be rounded: take the sum and divide it",
            ),
            _ => None,
        }
    }

    /// How inputs are combined; `divisor` ranks take part, which is for the last combination of an average alone.
    #[must_use]
    pub fn reduction(self, divisor: u32) -> Reduction {
        match self {
            Self::Average => Reduction::Sum { divisor },
            Self::Sum | Self::Copy => Reduction::Sum { divisor: 1 },
            Self::Min => Reduction::Min,
            Self::Max => Reduction::Max,
        }
    }
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is.
    pub kind: Kind,
    /// For pushes: what to do with it.
    pub op: Op,
    /// The book of the slice.
    pub book: BookId,
    /// The slice.
    pub slice: SliceId,
    /// Which submission of the slice.
    pub seq: Seq,
    /// The user's iteration: the same for all contributions to one round.
    pub step: Step,
    /// See [`Kind`], and [`wire_argument`]; 0 where unused.
    pub argument: u32,
    /// Length of the payload that follows.
    pub payload_bytes: u32,
}

impl Header {
    /// A control frame without payload.
    #[must_use]
    pub fn control(kind: Kind) -> Self {
        Self { kind, op: Op::Average, book: 0, slice: 0, seq: 0, step: 0, argument: 0, payload_bytes: 0 }
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.op as u8;
        bytes[2..4].copy_from_slice(&self.book.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.slice.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.seq.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.step.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.argument.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes
    }

    /// Reads a header, checking every field that can be checked without a book.
    ///
    /// # Errors
    /// A sentence that says which field is wrong.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, String> {
        let u32_at = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let kind = *(Kind::ALL.iter().find(|k| **k as u8 == bytes[0]))
            .ok_or_else(|| format!("a frame of unknown kind {}", bytes[0]))?;
        let op = *(Op::ALL.iter().find(|op| **op as u8 == bytes[1]))
            .ok_or_else(|| format!("a {kind:?} frame with unknown operation {}", bytes[1]))?;
        let header = Self {
            kind,
            op,
            book: u16::from_le_bytes([bytes[2], bytes[3]]),
            slice: u32_at(4),
            seq: u32_at(8),
            step: u32_at(12),
            argument: u32_at(16),
            payload_bytes: u32_at(20),
        };
        let (len, max) = (header.payload_bytes as usize, kind.payload_bytes_max());
        if len > max {
            return Err(format!("a {kind:?} frame of {len} bytes; at most {max} are allowed"));
        }
        Ok(header)
    }
}

/// Where the lane puts the payload of an arriving frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination<C> {
    /// There is no payload.
    None,
    /// Straight into this memory, which has the payload's length.
    Chunk(C),
}

/// A frame that is to be sent.
#[derive(Debug, Clone)]
pub struct Outgoing<C> {
    /// Its header; `payload_bytes` is the length of `payload`.
    pub header: Header,
    /// Its payload, which must not change until the frame is written.
    pub payload: Option<C>,
}

/// Who sent a frame, and which: for messages.
#[must_use]
pub fn describe(from: Rank, header: &Header) -> String {
    let Header { kind, book, slice, seq, step, argument, .. } = header;
    let part = match kind {
        Kind::Part | Kind::Result => format!(" {argument}"),
        _ => String::new(),
    };
    format!("{kind:?}{part} of book {book}, slice {slice}, seq {seq} (step {step}) from rank {from}")
}

/// Of which ranks a group's contribution is: how many of it take part, and the epoch of the members when it was made, modulo
/// 256. What an owner knows of who has left may be older or newer, for it comes another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Party(u32);

impl Party {
    const SHIFT: u32 = 8;
    /// Of frames that are not a group's.
    pub(crate) const NOBODY: Self = Self(0);

    pub(crate) fn new(ranks: usize, epoch: u32) -> Self {
        Self(ranks as u32 & 0xffff | (epoch & 0xff) << 16)
    }

    /// What a frame says; of who is no head's, nobody.
    pub(crate) fn of(argument: u32) -> Self {
        Self(argument >> Self::SHIFT)
    }

    pub(crate) fn argument(self) -> u32 {
        self.0 << Self::SHIFT
    }

    pub(crate) fn ranks(self) -> u32 {
        self.0 & 0xffff
    }

    pub(crate) fn epoch(self) -> u32 {
        self.0 >> 16 & 0xff
    }
}

/// What the argument of a push or an answer says of its wire type.
pub(crate) fn wire_part(argument: u32) -> u32 {
    argument & ((1 << Party::SHIFT) - 1)
}

/// The argument of a state: which it is, and of how many.
#[must_use]
pub(crate) fn states_argument(at: usize, count: usize) -> u32 {
    at as u32 | (count as u32) << 16
}

/// What [`states_argument`] was made of.
pub(crate) fn states_of(argument: u32) -> (usize, usize) {
    ((argument & 0xFFFF) as usize, (argument >> 16) as usize)
}

/// The argument of a push or an answer: 0 if the elements travel as they are, otherwise which wire type they have.
#[must_use]
pub fn wire_argument(dtype: Dtype, wire: Dtype) -> u32 {
    match wire {
        _ if wire == dtype => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
        _ => unreachable!("the book has checked the wire type"),
    }
}

/// The error about a slice that comes in another wire type than this rank's book says. Lengths would not tell: both halves
/// have two bytes.
pub(crate) fn other_wire_type(from: Rank, header: &Header, tensor: &str, wire: Dtype) -> Error {
    let theirs = match wire_part(header.argument) {
        0 => "unrounded",
        1 => "as bf16",
        2 => "as f16",
        _ => "in an unknown type",
    };
    let (what, ours) = (describe(from, header), wire.name());
    Error::protocol(
        from,
        format!(
            "{what}: tensor {tensor:?} comes {theirs}, but here it travels as {ours}; give all ranks the same book"
        ),
    )
}

/// The error about a frame that this rank does not wait for.
pub(crate) fn unexpected(from: Rank, header: &Header) -> Error {
    Error::protocol(from, format!("unexpected {}, {} bytes", describe(from, header), header.payload_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_inverts_encode(
            kind in 0..Kind::ALL.len(), op in 0..Op::ALL.len(), book: u16, slice: u32, seq: u32, step: u32, argument: u32
        ) {
            let op = Op::ALL[op];
            let header = Header { kind: Kind::ALL[kind], op, book, slice, seq, step, argument, payload_bytes: 0 };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert!(header.payload_bytes as usize <= header.kind.payload_bytes_max());
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }

    #[test]
    fn data_moves_with_a_frame_that_is_not_idle_and_with_a_part_of_a_payload() {
        let header = HEADER_BYTES as u64;
        for (bytes, frames, idle_frames, moved) in [
            (0, 0, 0, false),
            (header, 0, 0, false),
            (header + 1, 0, 0, true),
            (2 * header, 1, 1, false),
            (2 * header + 1, 1, 1, true),
            // The end of a frame that was read before, but for that.
            (1, 1, 0, true),
            (2 * header, 2, 1, true),
        ] {
            assert_eq!(data_has_moved(bytes, frames, idle_frames), moved, "{bytes}, {frames}, {idle_frames}");
        }
    }

    #[test]
    fn a_length_of_all_ones_is_refused() {
        let mut header = Header::control(Kind::Push);
        header.payload_bytes = u32::MAX;
        assert!(Header::decode(&header.encode()).unwrap_err().contains("4294967295"));
    }
}

//! What the simulated ranks do, and over which links: all that a simulation is given.

use penstock_core::layout::Book;
use penstock_core::optimizer::Update;
use penstock_core::types::{BookId, Rank, Seq, TensorId};
use penstock_core::wire::Op;
use std::sync::Arc;

/// One thing a rank's program does. A program ends with an implied wait for everything and a goodbye.
#[derive(Debug, Clone)]
pub enum Instruction {
    /// Computes for so many nanoseconds.
    Compute(u64),
    /// Opens a book on this rank; until then frames of faster ranks come early.
    Open(BookId),
    /// Hands a tensor over, once its previous round is complete and its memory released, as the front end does.
    Submit(Submission),
    /// Waits until the results of the last submissions of these tensors are in memory.
    Wait {
        /// The book.
        book: BookId,
        /// The tensors.
        tensors: Vec<TensorId>,
    },
    /// Gives the owners of a book whose values they update what these begin with.
    Load(BookId),
    /// Comes to the end of a step: tells what this rank owns of a book to go on with the rounds of its last submissions.
    Proceed {
        /// The book.
        book: BookId,
        /// What is done with the gradients, the same on all ranks; nothing if the step is not made.
        update: Option<Update>,
    },
    /// Of a server: waits until worker 0 has come to the end of a step, and tells what this rank owns of a book to go on with it.
    Heed {
        /// The book.
        book: BookId,
        /// The round of each of its tensors that the step is for.
        seq: Seq,
        /// What worker 0 says is done with the gradients.
        update: Option<Update>,
    },
    /// Waits for everything, leaves (join) until all have left, and then agrree with the others on sequence numbers.
    Leave {
        /// Whether the ranks agree on sequence numbers by an all-gather; only needless if all have submitted the same.
        agree: bool,
    },
    /// Of a server: waits until all workers have said goodbye.
    Serve,
    /// Notes the time in [`crate::Report::marks_ns`].
    Mark,
}

/// One submission of one tensor by one rank.
#[derive(Debug, Clone, Copy)]
pub struct Submission {
    /// The book.
    pub book: BookId,
    /// The tensor.
    pub tensor: TensorId,
    /// What is done with the contributions.
    pub op: Op,
    /// Whether this rank has nothing to contribute.
    pub absent: bool,
    /// For a tensor that is gathered: the length of this rank's contribution.
    pub gather_bytes: Option<u32>,
    /// How many ranks take part in this round, for the checkers: by their programs, not by what the nodes believe.
    pub active: u32,
}

/// The network: full-duplex network cards, a byte stream in order per connection.
#[derive(Debug, Clone)]
pub struct Links {
    /// Bytes per second of each card, per direction.
    pub bytes_per_s: u64,
    /// From card to card.
    pub delay_ns: u64,
    /// Each segment takes up to so much longer.
    pub jitter_ns: u64,
    /// Bytes per connection that were taken from the scheduler and have not arrived.
    pub committed_bytes_max: u64,
    /// Bytes that a card sends for one connection before it turns to the next.
    pub segment_bytes: u64,
    /// How often, in a thousand segments, a card stalls before it.
    pub stall_permille: u64,
    /// How long it stalls at most.
    pub stall_ns_max: u64,
    /// A lane looks for frames so long after it was woken, at most.
    pub wake_ns_max: u64,
}

/// Something goes wrong with a rank.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// Which.
    pub rank: Rank,
    /// When.
    pub at_ns: u64,
    /// What.
    pub what: Mishap,
}

/// What may go wrong with a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mishap {
    /// Its process ends without a word.
    Kill,
    /// Its process is stopped for so long: its connections stay open, and only time tells.
    Stop(u64),
    /// Its program raises.
    Raise,
    /// Its program hangs; its lanes live.
    Hang,
}

/// How long the drivers hear nothing before they give a peer up.
pub const PEER_TIMEOUT_NS: u64 = 5_000_000_000;
/// How long a program waits.
pub const OPERATION_TIMEOUT_NS: u64 = 20_000_000_000;

/// A fault that is built in on purpose, so that tests can show that a checker finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sabotage {
    /// One bit of a payload changes on the way.
    FlipBit,
    /// A frame never arrives.
    DropFrame,
    /// The driver passes a completion on twice.
    CompleteTwice,
    /// The driver says the opposite about whether anybody contributed.
    FlipPresent,
    /// The memory of a tensor is written to though nobody contributed.
    TouchAbsent,
    /// A result changes between its completion and its use.
    TouchResult,
    /// The driver says that a slice is complete when it has been submitted.
    ForgetRank,
    /// Something panics.
    Panic,
    /// The driver keeps a scratch buffer for ever.
    KeepScratch,
    /// The driver keeps a piece of a tensor for ever.
    KeepTensor,
    /// The nodes serve first in, first out, where they should go by priority.
    IgnorePriority,
    /// The nodes go by priority where they should serve first in, first out.
    IgnoreOrder,
    /// The nodes have a larger window than they should.
    WideWindow,
    /// So has the model of what they should send, so that only the count of bytes can tell.
    WideWindowUnseen,
    /// The driver says that there was nothing to send.
    Idle,
    /// Memory changes while it is being written to the wire.
    ChangeWhileWriting,
    /// What a node lets others see is not passed on, once.
    Overlook,
    /// The count of bytes on a link is wrong.
    Miscount,
    /// A rank says another step than the others for one submission.
    OtherStep,
    /// An owner updates by another learning rate.
    OtherUpdate,
    /// A lost rank is confused with another.
    BlameAnother,
    /// Nobody notices that a connection has ended.
    Deaf,
    /// Nobody listens to what others say of a failure.
    DropAborts,
    /// Who is asked whom he waits for does not say who has not contributed to what he sums.
    HideLacking,
    /// Heads of groups that are asked so do not say which owners owe them an answer.
    HideOwners,
}

/// What the checkers may demand of this setup beyond what always holds.
#[derive(Debug, Clone, Copy)]
pub struct Demands {
    /// Every rank contributes to every round, so the bytes on each link are known: rounds per book.
    pub full_rounds: Option<u64>,
    /// Slices beyond the window that a rank may have under way to one owner, per book.
    pub exceptions: u64,
    /// Whether to model what each link should carry: time quadratic in the frames that wait.
    pub links: bool,
}

/// All that a simulation is given.
#[derive(Debug, Clone)]
pub struct Setup {
    /// For stalls, jitter and the numbers in the tensors.
    pub seed: u64,
    /// Ranks.
    pub ranks: u32,
    /// How many of them, the first ones, are workers; the others are servers.
    pub workers: u32,
    /// Lanes per rank.
    pub lanes: u32,
    /// The books, by number.
    pub books: Vec<Arc<Book>>,
    /// By book: each layer's place in the forward pass, if it is not the registration order.
    pub places: Vec<Option<Vec<u32>>>,
    /// See [`penstock_core::node::Config::window_bytes`].
    pub window_bytes: u64,
    /// See [`penstock_core::node::Config::priority`].
    pub priority: bool,
    /// The network.
    pub links: Links,
    /// By rank.
    pub programs: Vec<Vec<Instruction>>,
    /// What goes wrong.
    pub fault: Option<Fault>,
    /// A fault built in on purpose.
    pub sabotage: Option<Sabotage>,
    /// What else must hold.
    pub demands: Demands,
}

impl Setup {
    /// The place of a tensor's layer in the forward pass.
    #[must_use]
    pub fn place_of(&self, book: BookId, tensor: TensorId) -> u32 {
        let layer = self.books[usize::from(book)].tensors[tensor as usize].layer;
        self.places[usize::from(book)].as_ref().map_or(layer, |places| places[layer as usize])
    }

    /// Whether this setup has the fault `sabotage`.
    #[must_use]
    pub fn sabotaged(&self, sabotage: Sabotage) -> bool {
        self.sabotage == Some(sabotage)
    }
}

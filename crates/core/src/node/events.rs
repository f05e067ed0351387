//! What a driver says to a node, and what the node answers.

use crate::calls::Call;
use crate::members::Members;
use crate::optimizer::Update;
use crate::submission::Submission;
use crate::types::{BookId, GroupId, Rank, Seq, SliceId, Step};
use crate::wire::Header;

/// Who this node is, and its options.
#[derive(Debug, Clone)]
pub struct Config {
    /// This rank.
    pub rank: Rank,
    /// All processes of the job, or of its epoch.
    pub members: Members,
    /// Those of them that are workers, who leave and come back (join). The others are servers.
    pub workers: Members,
    /// This lane.
    pub lane: u32,
    /// Lanes per rank.
    pub lanes: u32,
    /// Bytes that may be pushed to one owner for one book and not be answered yet. Bounds what an owner must hold for a
    /// slow rank; `node/outbox.rs` has the exception that keeps it free of deadlock.
    pub window_bytes: u64,
    /// Whether the place in the forward pass decides (otherwise: first in, first out).
    pub priority: bool,
}

/// What happened.
#[derive(Debug)]
pub enum Event<C> {
    /// This rank takes part in the next round of a tensor.
    Submit(Submission<C>),
    /// A frame arrived; its payload lies where [`crate::node::Node::destination`] said.
    Frame {
        /// The sender.
        from: Rank,
        /// Its header.
        header: Header,
        /// Its payload, if it has one.
        payload: Option<C>,
    },
    /// A control frame (a blob, a question) is to be sent, before all data.
    Control {
        /// The receiver; if `None` all other ranks, of a blob all other workers.
        to: Option<Rank>,
        /// Its header.
        header: Header,
        /// Its payload, if it has one.
        payload: Option<C>,
    },
    /// This rank's program has come to the end of a step, as far as a slice goes that it owns and an optimizer is applied to
    /// ([`crate::roles::Fold::Updated`]). Said once for every round, before the next one: the answer waits for it.
    Proceed {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// Which step, as its contributions say.
        step: Step,
        /// What is to be done; nothing if the step is not made.
        update: Option<Update>,
    },
    /// From now on, until the next order, a slice that this rank owns is updated so whenever a round is complete, without a word.
    Order {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// What is to be done.
        update: Update,
    },
    /// The time of [`Action::Enough`] is over.
    Close {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// The round.
        seq: Seq,
    },
    /// This worker contributes no more until every worker has left (join). Everything it submitted must be complete, and released:
    /// a contribution to a gather may be complete here and still be queued for a slower rank, and this word overtakes it.
    Leave,
    /// A group for calls, whose members are all in this order; see [`crate::calls`].
    Group(GroupId, Vec<Rank>),
    /// This rank's part in a call.
    Call(Box<Call<C>>),
}

/// What the driver must do or pass on.
#[derive(Debug)]
pub enum Action<C> {
    /// There may be something to send to this peer.
    Wake(Rank),
    /// The result of a slice of this rank's submission is in its memory.
    Complete {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// Which submission.
        seq: Seq,
        /// Whether anybody contributed; if not, the memory is as it was.
        present: bool,
        /// Where each contribution is a round of its own: how often the value that came has been changed.
        version: Step,
        /// Where members may be lost: the result once more, if anybody contributed. It stays as it is, whatever the program does with its
        /// memory, for those that may lack it when an epoch ends ([`crate::recovery`]): until the slice's next one is here.
        kept: Option<C>,
    },
    /// Enough are in a round of a slice that this rank owns: [`Event::Close`] is due so long from now.
    Enough {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// The round.
        seq: Seq,
        /// In nanoseconds.
        after_ns: u64,
    },
    /// A contribution to a slice that this rank owns came too late for its round, and was discarded.
    Late {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// Whose.
        of: Rank,
    },
    /// The sum of a slice that this rank owns waits for [`Event::Proceed`].
    Waits {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
    },
    /// All contributions to a tensor that is gathered are here; [`Action::Complete`] follows.
    Gathered {
        /// The book.
        book: BookId,
        /// The tensor's slice.
        slice: SliceId,
        /// By rank the payloads of its contribution, in order; `None` for this rank and those that took no part.
        parts: Vec<Option<Vec<C>>>,
    },
    /// Every worker has left; from now on all take part again.
    AllLeft,
    /// The call with this id, which receives from anybody, receives from this member of its group.
    CallSource {
        /// The call.
        id: u64,
        /// An index in the group.
        from: u32,
    },
    /// The results of the call with this id are in memory; its messages may still be waiting to be sent.
    CallComplete(u64),
    /// A control frame arrived.
    Control {
        /// The sender.
        from: Rank,
        /// Its header.
        header: Header,
        /// Its payload.
        payload: Option<C>,
    },
}

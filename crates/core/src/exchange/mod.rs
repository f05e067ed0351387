//! Exchanges: how the contributions to one slice become one result on every rank.
//!
//! Each slice is its own exchange, named by (book, slice, seq), so ranks need not agree on an order and a slice may
//! overtake any other. One file per scheme. An exchange decides and sums, and no more: it is told what was submitted, what
//! arrived and who left, and says what to send to whom and when the slice is complete ([`Effect`]). Queues, windows,
//! priorities and counts are the node's.
//!
//! To add a scheme: a file with a state machine that has the methods of [`Exchange`], a variant of [`Scheme`] and of
//! [`Exchange`], and an arm in each `match` below. A collective whose steps are known beforehand needs less: a file with
//! its steps, a variant of [`Plan`] and one of [`Algorithm`].

mod butterfly;
mod central;
pub mod collective;
pub mod gather;
pub mod plan;
mod ring;
mod steps;
pub mod store;
mod tree;

use crate::cost::dense::Algorithm;
use crate::error::Error;
use crate::layout::{Dtype, Rank, Seq, Slice};
use crate::memory::Memory;
use crate::wire::{Header, Outgoing};
use plan::Plan;

/// What becomes of the contributions to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// They become one result, by this algorithm.
    Dense(Algorithm),
    /// Every rank's bytes, of any length up to the tensor's, to every other rank; nothing is summed.
    Gather,
}

impl Scheme {
    /// The sharded store.
    pub const STORE: Self = Self::Dense(Algorithm::Store);

    /// Its word in the glossary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense(algorithm) => algorithm.name(),
            Self::Gather => "gather",
        }
    }

    /// The steps of the schemes that are collectives among all ranks.
    #[must_use]
    pub fn plan(self) -> Option<Plan> {
        match self {
            Self::STORE | Self::Gather => None,
            Self::Dense(algorithm) => Some(Plan::of(algorithm)),
        }
    }
}

impl std::str::FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let all = || Algorithm::ALL.map(Self::Dense).into_iter().chain([Self::Gather]);
        all().find(|scheme| scheme.name() == name).ok_or_else(|| {
            let names: Vec<&str> = all().map(Self::name).collect();
            Error::Config(format!("unknown scheme {name:?}: expected one of {}", names.join(", ")))
        })
    }
}

/// What is known about a slice on this rank, the same in every round.
#[derive(Debug, Clone, Copy)]
pub struct Site<'a> {
    /// This rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub ranks: u32,
    /// By rank: whether it has left (join).
    pub left: &'a [bool],
    /// The slice.
    pub slice: &'a Slice,
    /// Its layer's name.
    pub layer: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its wire type; if it is another, the exchange rounds.
    pub wire: Dtype,
    /// Length of the whole tensor, in bytes.
    pub tensor_bytes: u64,
}

impl Site<'_> {
    /// Whether contributions and results are rounded to the wire type.
    #[must_use]
    pub fn rounds(&self) -> bool {
        self.wire != self.dtype
    }
}

/// What an exchange works with while it handles an event.
pub struct Context<'a, M: Memory> {
    /// Where it is.
    pub site: Site<'a>,
    /// The node's memory.
    pub memory: &'a mut M,
    /// Empty, and left empty: for the inputs of a sum, reused so that a sum allocates nothing.
    pub inputs: &'a mut Vec<M::Chunk>,
    /// What is to be done, in this order.
    pub effects: &'a mut Vec<Effect<M::Chunk>>,
}

/// What an exchange wants done.
#[derive(Debug)]
pub enum Effect<C> {
    /// Queue a frame, at the place of the slice's layer.
    Send {
        /// The receiver.
        to: Rank,
        /// The frame: the event's header with another kind, argument and length, and a view of the payload.
        frame: Outgoing<C>,
        /// What may hold it back.
        flow: Flow,
    },
    /// Something will be sent to this rank under the window in this round, when it can be.
    Opens {
        /// The rank.
        to: Rank,
    },
    /// What was sent to this rank under the window in this round occupies no scratch there any more.
    Consumed {
        /// The rank.
        by: Rank,
    },
    /// All contributions are here; goes before [`Effect::Complete`].
    Gathered {
        /// By rank the payloads of its contribution, in order; `None` for this rank and those that took no part. Empty if there
        /// are no other ranks.
        parts: Vec<Option<Vec<C>>>,
    },
    /// The result is in this rank's memory.
    Complete {
        /// The round.
        seq: Seq,
        /// Whether anybody contributed; if not, the memory is as it was.
        present: bool,
    },
}

/// What may hold a frame back besides its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// The window: the receiver may have to keep the payload in scratch until its own contribution exists.
    Window,
    /// Nothing: the receiver waits for it with its memory ready, or there is no payload.
    Free,
}

/// The state machine of one slice on one rank.
#[derive(Debug)]
pub enum Exchange<C> {
    /// See [`store`].
    Store(store::Store<C>),
    /// See [`collective`].
    Collective(collective::Collective<C>),
    /// See [`gather`].
    Gather(gather::Gather<C>),
}

impl<C: Clone> Exchange<C> {
    /// The state before the first round.
    #[must_use]
    pub fn new(scheme: Scheme) -> Self {
        match scheme.plan() {
            Some(plan) => Self::Collective(collective::Collective::new(plan)),
            None if scheme == Scheme::Gather => Self::Gather(gather::Gather::default()),
            None => Self::Store(store::Store::default()),
        }
    }

    /// This rank takes part in round `header.seq`: `memory` holds its contribution, unless that is `absent`, and gets the result.
    /// In a gather it holds `header.argument` bytes, and gets nothing.
    ///
    /// # Errors
    /// [`Error::Config`] if the last round is not complete here; [`Error::Protocol`] if others are at another round.
    pub fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: C,
        absent: bool,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.submit(header, memory, absent, context),
            Self::Collective(collective) => collective.submit(header, memory, absent, context),
            Self::Gather(gather) => gather.submit(header, &memory, None, context),
        }
    }

    /// This rank takes part in a gather: `memory` holds `header.argument` bytes, for all others or only for one.
    ///
    /// # Errors
    /// [`Error::Config`] if this is no gather, or the last round is not complete here.
    pub fn gather<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: &C,
        only_to: Option<Rank>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Gather(gather) => gather.submit(header, memory, only_to, context),
            Self::Store(_) | Self::Collective(_) => {
                Err(Error::Config(format!("slice {} of book {} is not gathered", header.slice, header.book)))
            }
        }
    }

    /// Whether a frame of this slice has a kind, sender, part and length that this rank may get now.
    #[must_use]
    pub fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        match self {
            Self::Store(store) => store.expects(from, header, site),
            Self::Collective(collective) => collective.expects(from, header, site),
            Self::Gather(gather) => gather.expects(from, header, site),
        }
    }

    /// Where the payload of an expected frame goes; to scratch if `None`.
    #[must_use]
    pub fn place<M: Memory<Chunk = C>>(&self, header: &Header, site: &Site<'_>, memory: &M) -> Option<C> {
        match self {
            Self::Store(store) => store.place(header, site),
            Self::Collective(collective) => collective.place(header, site, memory),
            Self::Gather(_) => None,
        }
    }

    /// An expected frame is here, its payload where [`Exchange::place`] said.
    ///
    /// # Errors
    /// [`Error::Protocol`] if it does not fit what came before.
    pub fn frame<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.frame(from, header, payload, context),
            Self::Collective(collective) => collective.frame(from, header, payload, context),
            Self::Gather(gather) => gather.frame(from, header, payload, context),
        }
    }

    /// A rank has left, as `context.site.left` says; `header` names the slice.
    ///
    /// # Errors
    /// [`Error::Protocol`] as for a frame that ends the round; [`Error::Config`] if the scheme needs every rank.
    pub fn left<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.left(header, context),
            Self::Collective(collective) => collective.left(header, context.site.left),
            Self::Gather(gather) => gather.left(context),
        }
    }

    /// The ranks that have not contributed to the round that waits here.
    pub fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        match self {
            Self::Store(store) => store.missing(site.left, ranks),
            Self::Collective(collective) => collective.missing(site, ranks),
            Self::Gather(gather) => gather.missing(site, ranks),
        }
    }
}

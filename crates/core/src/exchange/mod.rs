//! Exchanges: how the contributions to one slice become one result on every rank.
//!
//! Each slice has an exchange of its own, a state machine for all its rounds. A round is named by (book, slice, seq): so ranks
//! need not agree on an order, and a slice may overtake any other. One file per route. An exchange decides and sums, and no more: it is told what was submitted, what
//! arrived and who left, and says what to send to whom and when the slice is complete ([`Effect`]). Queues, windows,
//! priorities and counts are the node's.
//!
//! To add a route: a file with a state machine that has the methods of [`Exchange`], a variant of [`Route`] and of
//! [`Exchange`], and an arm in each `match` below. A collective whose steps are known beforehand needs less: a file with
//! its steps in [`crate::steps`], and a variant of [`crate::way::Algorithm`].

mod clocks;
pub mod collective;
mod context;
mod contributions;
mod entry;
mod frames;
pub mod gather;
mod group;
mod out_of_step;
mod relay;
mod round;
pub mod store;

pub use context::{Context, Effect, Flow, Site};
pub use entry::{Field, SliceEntry};
pub(crate) use frames::tell;

use crate::error::Error;
use crate::memory::Memory;
use crate::optimizer::Update;
use crate::submission::Gives;
use crate::types::Rank;
use crate::way::Route;
use crate::wire::Header;

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
    pub fn new(route: Route) -> Self {
        match route {
            Route::STORE => Self::Store(store::Store::default()),
            Route::Sum(algorithm) => Self::Collective(collective::Collective::new(algorithm)),
            // No book has tensors of the latter: what goes to an owner is gathered, for one rank (`way.rs`).
            Route::Gather | Route::Owner => Self::Gather(gather::Gather::default()),
        }
    }

    /// This rank takes part in round `header.seq`: `memory` holds what it gives, and of a sum gets the result.
    ///
    /// # Errors
    /// [`Error::Config`] if this is not what the slice's route takes, or the last round is not complete here;
    /// [`Error::Protocol`] if others are at another round.
    pub fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: C,
        gives: Gives,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let absent = matches!(gives, Gives::Nothing(_));
        match (self, gives) {
            (Self::Store(store), Gives::Whole(_) | Gives::Nothing(_)) => {
                store.submit(header, memory, absent, context)
            }
            (Self::Collective(collective), Gives::Whole(_) | Gives::Nothing(_)) => {
                collective.submit(header, memory, absent, context)
            }
            (Self::Gather(gather), Gives::Gathered(_)) => gather.submit(header, &memory, context),
            (Self::Gather(_), _) => {
                Err(Error::Config(format!("slice {} of book {} is gathered", header.slice, header.book)))
            }
            (_, Gives::Gathered(_)) => {
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
    pub fn destination<M: Memory<Chunk = C>>(
        &self,
        header: &Header,
        site: &Site<'_>,
        memory: &M,
    ) -> Option<C> {
        match self {
            Self::Store(store) => store.destination(header, site),
            Self::Collective(collective) => collective.destination(header, site, memory),
            Self::Gather(_) => None,
        }
    }

    /// An expected frame is here, its payload where [`Exchange::destination`] said.
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

    /// A rank has left, as `context.site.active` says; `header` names the slice.
    ///
    /// # Errors
    /// [`Error::Protocol`] as for a frame that ends the round; [`Error::Config`] if the algorithm needs every rank.
    pub fn left<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.left(header, context),
            Self::Collective(collective) => collective.left(header, &context.site),
            Self::Gather(gather) => gather.left(header, context),
        }
    }

    /// This rank's program has come to the end of step `header.step`: with an update, or without one.
    ///
    /// # Errors
    /// [`Error::Config`] if there is nothing to be updated here, or not in this step.
    pub fn proceed<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        update: Option<Update>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.proceed(header, update, context),
            Self::Collective(_) | Self::Gather(_) => Err(not_kept(context)),
        }
    }

    /// From now on rounds that are complete are updated so, at once.
    ///
    /// # Errors
    /// As of [`Exchange::proceed`].
    pub fn order<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        update: Update,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.order(header, update, context),
            Self::Collective(_) | Self::Gather(_) => Err(not_kept(context)),
        }
    }

    /// The round `header.seq` has waited long enough for those that are late.
    ///
    /// # Errors
    /// As for a frame that ends the round.
    pub fn close<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        if let Self::Store(store) = self { store.close(header, context) } else { Ok(()) }
    }

    /// See [`crate::node::Node::squares`].
    pub fn squares<M: Memory<Chunk = C>>(&self, context: &mut Context<'_, M>) -> Option<f64> {
        if let Self::Store(store) = self { store.squares(context) } else { None }
    }

    /// Takes what is kept of the slice from `from`.
    ///
    /// # Errors
    /// [`Error::Config`] if nothing is kept here, or states come out of order.
    pub fn load<M: Memory<Chunk = C>>(
        &mut self,
        field: Field,
        updates: u64,
        from: &C,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store
                .load(field, updates, from, context)
                .map_err(|why| Error::Config(format!("layer {}: {why}", context.site.layer))),
            Self::Collective(_) | Self::Gather(_) => Err(not_kept(context)),
        }
    }

    /// Copies what is kept of the slice to `to`, if it is. How often the value was updated.
    pub fn save<M: Memory<Chunk = C>>(
        &self,
        field: Field,
        to: &C,
        context: &mut Context<'_, M>,
    ) -> Option<u64> {
        if let Self::Store(store) = self { store.save(field, to, context) } else { None }
    }

    /// Of the head of a group all of which is in: the owner that owes it the answer, or the heads that owe it what they pass on.
    pub fn owners_that_owe(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        match self {
            Self::Store(store) => ranks.extend(store.owner_that_owes(site)),
            Self::Gather(gather) => gather.owners_that_owe(site, ranks),
            Self::Collective(_) => {}
        }
    }

    /// Between two epochs: this rank has contributed to round `header.seq`, which has ended, and `by` gives the result.
    pub fn lacks(&mut self, header: &Header, memory: C, by: Rank) {
        if let Self::Store(store) = self {
            store.lacks(header, memory, by);
        }
    }

    /// Between two epochs: this rank is to keep what an owner keeps, and `by` gives the states.
    pub fn lacks_states(&mut self, by: Rank) {
        if let Self::Store(store) = self {
            store.lacks_states(by);
        }
    }

    /// Between two epochs: gives the states to those that lack them.
    ///
    /// # Errors
    /// [`Error::Config`] if they are not here.
    pub fn give_states<M: Memory<Chunk = C>>(
        &self,
        header: &Header,
        to: &[Rank],
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self {
            Self::Store(store) => store.give_states(header, to, context),
            Self::Collective(_) | Self::Gather(_) => Err(not_kept(context)),
        }
    }

    /// What is kept of the slice, for the next epoch; here it is not kept any more.
    pub fn take_entry(&mut self) -> Option<SliceEntry<C>> {
        if let Self::Store(store) = self { store.take_entry() } else { None }
    }

    /// Whether all is here that an owner keeps, as of the last round whose result is.
    #[must_use]
    pub fn has_states(&self) -> bool {
        if let Self::Store(store) = self { store.is_whole() } else { false }
    }

    /// What was kept of the slice in the last epoch.
    pub fn put_entry(&mut self, entry: SliceEntry<C>) {
        if let Self::Store(store) = self {
            store.put_entry(entry);
        }
    }

    /// The ranks that have not contributed to the round that waits here.
    pub fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        match self {
            Self::Store(store) => store.missing(site, ranks),
            Self::Collective(collective) => collective.missing(site, ranks),
            Self::Gather(gather) => gather.missing(site, ranks),
        }
    }
}

fn not_kept<M: Memory>(context: &Context<'_, M>) -> Error {
    Error::Config(format!("layer {}: nothing is kept of it, only the store does that", context.site.layer))
}

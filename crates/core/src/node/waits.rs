//! Whom this rank waits for: what is under way here, and who has not done their part. Replies to questions are made
//! of that ([`Reply`]), and so it decides who is blamed.

use super::{BookState, Node, site};
use crate::layout::Book;
use crate::life::{Question, Reply};
use crate::memory::Memory;
use crate::observe::Observe;
use crate::types::{BookId, Rank, SliceId, TensorId};
use crate::way::Route;
use std::collections::BTreeSet;

/// Whom what is under way in a lane waits for; never the rank itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Waits {
    /// The ranks that have not come to it.
    pub late: BTreeSet<Rank>,
    /// Those that owe an answer, and know better who is late.
    pub owners: BTreeSet<Rank>,
}

impl<M: Memory, O: Observe> Node<M, O> {
    /// Whom it waits for, in this lane.
    ///
    /// * `open`: the tensors that are under way, each with its slices in this lane of which no result is in memory.
    /// * `calls`: those that are under way, by id.
    pub fn waits<S: IntoIterator<Item = SliceId>>(
        &self,
        open: impl IntoIterator<Item = (BookId, TensorId, S)>,
        calls: impl IntoIterator<Item = u64>,
    ) -> Waits {
        let (me, mut waits) = (self.config.rank, Waits::default());
        for (id, tensor, slices) in open {
            waits.late.extend(self.missing(id, tensor));
            let Some(Some(BookState { book, .. })) = self.books.get(usize::from(id)) else { continue };
            // What a head is owed, its exchanges know.
            let is_member = book.roles.groups.led_by(me).is_none();
            let answered = match book.tensors[tensor as usize].route {
                Route::Gather => !book.roles.groups.is_empty(),
                route => route == Route::STORE,
            };
            if is_member && answered {
                let owners = slices.into_iter().map(|slice| {
                    let at = &book.slices[slice as usize];
                    let to = book.roles.groups.answered_by(me, at.owner);
                    (slice, to, at.answers(me).unwrap_or(to))
                });
                let owe = owners.filter(|(slice, to, _)| !self.holds_back(id, book, *slice, *to));
                waits.owners.extend(owe.map(|(_, _, answers)| answers));
            }
        }
        waits.late.extend(calls.into_iter().flat_map(|id| self.call_missing(id)));
        waits.late.extend(self.presence.late_to_leave());
        waits.owners.extend(self.owners_that_owe());
        waits.late.remove(&me);
        waits.owners.remove(&me);
        waits
    }

    /// The ranks without which something in this lane never ends: those it waits for, and those that rounds of slices which it owns
    /// wait for, whoever has begun these; a server's program begins none. A round that may end without who is late can do without all.
    ///
    /// * `waits`: as [`Node::waits`] has it.
    #[must_use]
    pub fn needed(&self, waits: Waits) -> BTreeSet<Rank> {
        let Waits { late, owners } = waits;
        let books = self.books.iter().flatten();
        let wait = books.filter(|state| state.book.roles.rules.stragglers.is_none());
        let rounds = wait.flat_map(|state| self.missing_of(state, 0..state.slices.len() as SliceId));
        late.into_iter().chain(owners).chain(rounds).filter(|rank| *rank != self.config.rank).collect()
    }

    /// What this lane says to a question.
    ///
    /// * `waits`: as [`Node::waits`] has it.
    /// * `program`: whether the rank's program stands in a call, in which, and who is late for what all agree on there. One lane
    ///   speaks of those.
    pub fn reply(&self, question: Question, waits: Waits, program: Reply) -> Reply {
        let Waits { mut late, owners } = waits;
        if self.config.lane == 0 {
            late.extend(program.late);
            late.remove(&self.config.rank);
        }
        let missing = question.about.map_or_else(Vec::new, |(book, tensor)| self.missing(book, tensor));
        let (late, owners) = (late.into_iter().collect(), owners.into_iter().collect());
        Reply { late, owners, missing, lacking: self.missing_anywhere(), ..program }
    }

    /// Of the slices of `tensor` that wait here: the ranks they wait for. This one, if it has not opened the book.
    pub fn missing(&self, book: BookId, tensor: TensorId) -> Vec<Rank> {
        let Some(Some(state)) = self.books.get(usize::from(book)) else { return vec![self.config.rank] };
        if tensor as usize >= state.book.tensors.len() {
            return Vec::new();
        }
        self.missing_of(state, state.book.slices_of(tensor))
    }

    /// Of all slices of all books that wait here: the ranks they wait for. This one, if it has not opened a book of which it has
    /// frames already.
    pub fn missing_anywhere(&self) -> Vec<Rank> {
        let of_book = |state| self.missing_of(state, 0..state.slices.len() as SliceId);
        let late_to_open = (!self.early.is_empty()).then_some(self.config.rank);
        distinct(self.books.iter().flatten().flat_map(of_book).chain(late_to_open).collect())
    }

    fn missing_of(&self, state: &BookState<M::Chunk>, slices: impl Iterator<Item = SliceId>) -> Vec<Rank> {
        let mut ranks = Vec::new();
        for slice in slices {
            let site = site(self.config.rank, &state.book, &state.active, slice);
            state.slices[slice as usize].missing(&site, &mut ranks);
        }
        distinct(ranks)
    }

    /// Of the groups that this rank is the head of and that are in: the owners that owe them an answer. Also if its own program has
    /// left, and it relays for others.
    fn owners_that_owe(&self) -> Vec<Rank> {
        let led = |state: &BookState<_>| state.book.roles.groups.led_by(self.config.rank).is_some();
        let books = (0..).zip(&self.books).filter_map(|(id, state)| Some((id, state.as_ref()?)));
        let mut owners = Vec::new();
        for (id, state) in books.filter(|(_, state)| led(state)) {
            for (slice, exchange) in (0..).zip(&state.slices) {
                let owner = state.book.slices[slice as usize].owner;
                if self.holds_back(id, &state.book, slice, owner) {
                    continue;
                }
                let site = site(self.config.rank, &state.book, &state.active, slice);
                exchange.owners_that_owe(&site, &mut owners);
            }
        }
        distinct(owners)
    }

    /// Whether what an owner would owe an answer to has not been sent, and not for its sake: [`outbox::Outbox::holds_back`].
    fn holds_back(&self, id: BookId, book: &Book, slice: SliceId, owner: Rank) -> bool {
        let outbox = &self.outboxes[owner.index()];
        book.tensor_of(slice).route == Route::STORE && outbox.holds_back(id, book.number_at_peer(slice))
    }

    /// The ranks that a call of this rank waits for.
    #[must_use]
    pub fn call_missing(&self, id: u64) -> Vec<Rank> {
        self.calls.missing(id)
    }

    /// Whether a call of this rank waits for `peer`.
    #[must_use]
    pub fn a_call_waits_for(&self, peer: Rank) -> bool {
        self.calls.waits_for(peer)
    }
}

fn distinct(mut ranks: Vec<Rank>) -> Vec<Rank> {
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

//! Whom this rank waits for: what is under way here, and who has not done their part. Replies to questions are made
//! of that ([`Reply`]), and so it decides who is blamed.

use super::{BookState, Node, site};
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
                let owners = slices.into_iter().map(|slice| book.slices[slice as usize].owner);
                waits.owners.extend(owners.map(|owner| book.roles.groups.answered_by(me, owner)));
            }
        }
        waits.late.extend(calls.into_iter().flat_map(|id| self.call_missing(id)));
        waits.late.extend(self.presence.late_to_leave());
        waits.owners.extend(self.owners_that_owe());
        waits.late.remove(&me);
        waits.owners.remove(&me);
        waits
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

    /// Of the slices of `tensor` that wait here: the ranks they wait for.
    pub fn missing(&self, book: BookId, tensor: TensorId) -> Vec<Rank> {
        let Some(Some(state)) = self.books.get(usize::from(book)) else { return Vec::new() };
        if tensor as usize >= state.book.tensors.len() {
            return Vec::new();
        }
        self.missing_of(state, state.book.slices_of(tensor))
    }

    /// Of all slices of all books that wait here: the ranks they wait for.
    pub fn missing_anywhere(&self) -> Vec<Rank> {
        let of_book = |state| self.missing_of(state, 0..state.slices.len() as SliceId);
        distinct(self.books.iter().flatten().flat_map(of_book).collect())
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
        let led = |state: &&BookState<_>| state.book.roles.groups.led_by(self.config.rank).is_some();
        let grouped = self.books.iter().flatten().filter(led);
        let mut owners = Vec::new();
        for state in grouped {
            for (slice, exchange) in (0..).zip(&state.slices) {
                let site = site(self.config.rank, &state.book, &state.active, slice);
                exchange.owners_that_owe(&site, &mut owners);
            }
        }
        distinct(owners)
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

//! Which frames of gathers wait: from everybody to everybody, and in groups from head to head.

use super::{LinkModel, What};
use penstock_core::roles::ClientGroup;
use penstock_core::types::{BookId, Rank, Seq, SliceId};
use penstock_core::wire::{Header, Kind};
use std::collections::{BTreeMap, BTreeSet};

/// A round of a gather at the head of a group.
#[derive(Debug, Default)]
pub(super) struct RelayedRound {
    /// By rank: the bytes of its contribution and those of them that are here; nothing if it takes no part.
    given: BTreeMap<Rank, Option<(u32, u32)>>,
    /// Epochs of the other heads' words.
    epochs: BTreeSet<u32>,
    passed_on: bool,
}

impl RelayedRound {
    fn is_in(&self, rank: Rank) -> bool {
        self.given.get(&rank).is_some_and(|given| given.is_none_or(|(all, here)| all == here))
    }
}

impl LinkModel {
    /// The rank contributes `argument` bytes to a gather: frames to all others, or to the head of its group, which nothing holds back.
    pub(super) fn gather(&mut self, header: &Header) {
        let Header { book: id, slice: slice_id, seq, argument: len_bytes, .. } = *header;
        let (me, book) = (self.me.rank, self.books[&id].book.clone());
        match book.roles.groups.of(me).map(ClientGroup::head) {
            Some(head) if head == me => {
                self.take_given(me, &Header { payload_bytes: len_bytes, ..*header });
            }
            Some(head) => self.pieces(head, (id, slice_id, seq), len_bytes),
            None => {
                for peer in book.roles.contributors().iter() {
                    if peer != me && !self.left.contains(&peer) {
                        self.pieces(peer, (id, slice_id, seq), len_bytes);
                    }
                }
            }
        }
    }

    /// A contribution to a gather, in frames.
    fn pieces(&mut self, to: Rank, (id, slice, seq): (BookId, SliceId, Seq), len_bytes: u32) {
        let owner = self.books[&id].book.tensor_of(slice).owner;
        let is_on_the_way = owner.is_none_or(|owner| self.next_towards(id, owner) == to);
        let len_bytes = if is_on_the_way { len_bytes } else { 0 };
        let frames = len_bytes.div_ceil(self.books[&id].book.slices[slice as usize].len_bytes).max(1);
        (0..frames).for_each(|_| self.queue(to, What::Ready(id, slice, seq, len_bytes)));
    }

    /// To whom this rank sends what another is to get.
    fn next_towards(&self, id: BookId, rank: Rank) -> Rank {
        let (me, groups) = (self.me.rank, &self.books[&id].book.roles.groups);
        match groups.of(me) {
            Some(own) if own.head() != me && rank != me => own.head(),
            Some(own) if !own.members.contains(rank) => groups.of(rank).map_or(rank, ClientGroup::head),
            _ => rank,
        }
    }

    /// Something of a gather has come to the head of a group.
    pub(super) fn take_given(&mut self, from: Rank, header: &Header) {
        let Header { book: id, slice, seq, argument, payload_bytes, .. } = *header;
        let Some(state) = self.books.get_mut(&id) else { return };
        let groups = &state.book.roles.groups;
        if groups.led_by(self.me.rank).is_none() || state.over.get(&slice).is_some_and(|over| seq <= *over) {
            return;
        }
        let round = state.relayed.entry((slice, seq)).or_default();
        if header.kind == Kind::GroupIn {
            round.epochs.insert(argument >> 24);
        } else {
            let next =
                groups.of(from).and_then(|group| group.members.iter().find(|rank| !round.is_in(*rank)));
            let whose = if header.kind == Kind::Gather { Some(from) } else { next };
            let Some(whose) = whose else { return };
            if header.kind == Kind::NotIn {
                round.given.insert(whose, None);
            } else if let Some((_, here)) = round.given.entry(whose).or_insert(Some((argument, 0))) {
                *here += payload_bytes;
            }
        }
        self.relay(id, slice);
    }

    /// The head of a group passes on what it can of a gather.
    pub(super) fn relay(&mut self, id: BookId, slice: SliceId) {
        let me = self.me.rank;
        let book = self.books[&id].book.clone();
        let Some(group) = book.roles.groups.led_by(me) else { return };
        let of_slice = self.books[&id].relayed.keys().filter(|(of, _)| *of == slice);
        for seq in of_slice.map(|(_, seq)| *seq).collect::<Vec<_>>() {
            let Some(state) = self.books.get_mut(&id) else { return };
            let Some(mut round) = state.relayed.remove(&(slice, seq)) else { return };
            let gives = |round: &RelayedRound, rank: Rank| matches!(round.given.get(&rank), Some(Some(_)));
            let is_in = |rank: Rank| {
                let gives = gives(&round, rank);
                gives != self.left.contains(&rank) && (!gives || round.is_in(rank))
            };
            if !round.passed_on
                && round.epochs.iter().all(|epoch| *epoch == self.epoch & 0xff)
                && group.members.iter().all(is_in)
            {
                round.passed_on = true;
                for rank in group.members.iter() {
                    round.given.entry(rank).or_insert(None);
                }
                for head in book.roles.groups.iter().map(ClientGroup::head).filter(|head| *head != me) {
                    let argument = (self.epoch & 0xff) << 24;
                    self.queue(head, What::Ready(id, slice, seq, argument));
                    group
                        .members
                        .iter()
                        .for_each(|rank| self.told(head, (id, slice, seq), round.given[&rank]));
                }
            }
            let contributors: Vec<Rank> = book.roles.contributors().iter().collect();
            let complete = round.passed_on && contributors.iter().all(|rank| round.is_in(*rank));
            let waiting: Vec<Rank> = group.members.iter().filter(|rank| gives(&round, *rank)).collect();
            if complete {
                for member in waiting.iter().filter(|rank| **rank != me) {
                    for of in contributors.iter().filter(|of| *of != member) {
                        self.told(*member, (id, slice, seq), round.given[of]);
                    }
                }
            }
            let Some(state) = self.books.get_mut(&id) else { return };
            if complete || round.passed_on && waiting.is_empty() {
                state.over.insert(slice, seq);
            } else {
                state.relayed.insert((slice, seq), round);
            }
        }
    }

    /// What one rank gave, or that it gave nothing.
    fn told(&mut self, to: Rank, name: (BookId, SliceId, Seq), given: Option<(u32, u32)>) {
        match given {
            Some((len_bytes, _)) => self.pieces(to, name, len_bytes),
            None => self.queue(to, What::Ready(name.0, name.1, name.2, 0)),
        }
    }
}

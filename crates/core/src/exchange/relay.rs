//! Gathers in groups: members give to their head, heads pass on to heads what their groups have given, and each gives its
//! members what all others gave. So between hosts each contribution goes once to every other host and not to every rank of it.
//!
//! Contributions stay those of single ranks, with their steps: what a rank is told, and so the bits of what it makes of it, are
//! as without groups. A head begins with the word that its group is in, and then says of each of its members, in rank order, what
//! it has given, or that it takes no part; to a member it says so of all others. So frames need not say whose they are.
//!
//! For S bytes of each of n ranks in groups of m: a head sends m S to each other head, and (n-1) S to each member. If the tensor has
//! an owner, m S to its head alone, which sends (n-1) S to it alone; the rest are empty contributions.
//!
//! **Who takes part when ranks leave (join)** a head decides for its members. A member leaves when its rounds are complete, so its
//! contribution to a round comes to its head before the word that it has left, or never. The word may reach other heads earlier than
//! what its head passes on, and counts for nothing there. A head whose program has left goes on relaying; one whose members
//! all have says so for every round that others begin.
//!
//! A contribution of a rank that seems to have left is for the time after all have: it has heard already that they have. So is the word
//! of a head of a later epoch. Such rounds wait until this rank has heard it too.

use super::context::{Context, Flow, Site};
use super::contributions::{OfMember, OfRound};
use super::frames::send;
use crate::memory::Memory;
use crate::roles::ClientGroup;
use crate::types::Rank;
use crate::wire::{Header, Kind, Party};

/// Whether contributions that this rank sends to another are for that one, or for one that gets them from there.
pub(super) fn is_for(to: Rank, site: &Site<'_>) -> bool {
    let Some(owner) = site.only_to else { return true };
    match site.groups.led_by(to) {
        Some(group) if group.members.contains(site.rank) => owner != site.rank,
        Some(group) => group.members.contains(owner),
        None => owner == to,
    }
}

/// Between whom a frame of a gather goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Passage {
    /// A rank's own, without groups or to its head.
    Own,
    /// Between heads.
    Between,
    /// From a head to a member.
    Down,
}

/// Which one a frame takes that comes to this rank, if it may.
pub(super) fn passage(from: Rank, header: &Header, site: &Site<'_>) -> Option<Passage> {
    let passed_on = match header.kind {
        Kind::Gather => false,
        Kind::GroupIn | Kind::Passed | Kind::NotIn => true,
        _ => return None,
    };
    let Some(group) = site.groups.of(site.rank) else { return (!passed_on).then_some(Passage::Own) };
    let leads = group.head() == site.rank;
    match (passed_on, group.members.contains(from)) {
        (false, true) if leads => Some(Passage::Own),
        (true, false) if leads && site.groups.led_by(from).is_some() => Some(Passage::Between),
        (true, true) if group.head() == from && header.kind != Kind::GroupIn => Some(Passage::Down),
        _ => None,
    }
}

impl Passage {
    /// Whether a frame is what comes next in a round.
    pub(super) fn fits<C>(
        self,
        round: Option<&OfRound<C>>,
        from: Rank,
        header: &Header,
        site: &Site<'_>,
    ) -> bool {
        let told = round.is_some_and(|round| round.told.iter().any(|(head, _)| *head == from));
        let empty = header.payload_bytes == 0;
        match (self, header.kind) {
            (Self::Between, Kind::GroupIn) => !told && empty,
            (Self::Between, _) if !told => false,
            (_, Kind::NotIn) => {
                let has_begun = |index| round.is_some_and(|round| round.has_begun(index));
                empty && self.next_of(round, from, site).is_some_and(|index| !has_begun(index))
            }
            _ => {
                self.next_of(round, from, site).is_some_and(|index| OfRound::fits(round, index, header, site))
            }
        }
    }

    /// Takes a frame that fits; nothing if it does not.
    pub(super) fn take<C>(
        self,
        round: &mut OfRound<C>,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        site: &Site<'_>,
    ) -> Option<()> {
        if header.kind == Kind::GroupIn {
            round.told.push((from, Party::of(header.argument).epoch()));
            return Some(());
        }
        let index = self.next_of(Some(round), from, site)?;
        match header.kind {
            Kind::NotIn => round.set_absent(index),
            _ => round.add(index, header, payload),
        }
        Some(())
    }

    /// Of which member the next frame is: its index among all.
    fn next_of<C>(self, round: Option<&OfRound<C>>, from: Rank, site: &Site<'_>) -> Option<usize> {
        let not_in = |index: &usize| !round.is_some_and(|round| round.is_in(*index));
        let own = site.members.index_of(site.rank);
        match self {
            Self::Own => site.members.index_of(from),
            Self::Between => indices(site.groups.of(from)?, site).find(not_in),
            Self::Down => (0..site.members.count() as usize).filter(|index| Some(*index) != own).find(not_in),
        }
    }
}

/// The indices of a group's ranks among all members.
fn indices<'a>(group: &'a ClientGroup, site: &Site<'a>) -> impl Iterator<Item = usize> + use<'a> {
    let members = site.members;
    group.members.iter().filter_map(|rank| members.index_of(rank))
}

impl<C: Clone> OfRound<C> {
    /// At the head of a group: passes on to other heads what its members gave, once all are in; and to its members what all gave,
    /// once that is here.
    pub(super) fn pass_on<M: Memory<Chunk = C>>(&mut self, header: &Header, context: &mut Context<'_, M>) {
        let site = context.site;
        let Some(group) = site.led() else { return };
        if !self.passed_on && self.group_is_in(group, &site) {
            self.passed_on = true;
            let ranks = group.members.iter().zip(indices(group, &site));
            let ranks: Vec<(Rank, usize)> = ranks.collect();
            let argument = Party::new(0, site.active.epoch()).argument();
            for head in site.groups.iter().map(ClientGroup::head).filter(|head| *head != site.rank) {
                let said = Header { kind: Kind::GroupIn, argument, ..self.header(header) };
                send(head, &said, None, Flow::Free, context);
                ranks.iter().for_each(|(_, index)| self.send(*index, head, header, context));
            }
            for (_, index) in ranks {
                if !self.has_begun(index) {
                    self.set_absent(index);
                }
            }
        }
        if self.passed_on && !self.served && self.all_are_in(&site) {
            self.served = true;
            for (rank, own) in group.members.iter().zip(indices(group, &site)) {
                let waits = rank != site.rank && matches!(self.of(own), Some(OfMember::Pieces { .. }));
                for index in (0..site.members.count() as usize).filter(|index| waits && *index != own) {
                    self.send(index, rank, header, context);
                }
            }
        }
    }

    /// Sends what one rank gave, or that it gave nothing.
    fn send<M: Memory<Chunk = C>>(
        &self,
        index: usize,
        to: Rank,
        header: &Header,
        context: &mut Context<'_, M>,
    ) {
        let said = self.header(header);
        let Some(OfMember::Pieces { step, total_bytes, chunks, .. }) = self.of(index) else {
            return send(to, &Header { kind: Kind::NotIn, ..said }, None, Flow::Free, context);
        };
        let (total_bytes, chunks) =
            if is_for(to, &context.site) { (*total_bytes, chunks.as_slice()) } else { (0, &[] as &[_]) };
        let said = Header { kind: Kind::Passed, step: *step, argument: total_bytes, ..said };
        for (payload_bytes, chunk) in chunks {
            let said = Header { payload_bytes: *payload_bytes, ..said };
            send(to, &said, Some(chunk.clone()), Flow::Free, context);
        }
        if chunks.is_empty() {
            send(to, &said, None, Flow::Free, context);
        }
    }

    /// Of a frame of this round, of the same slice as this one.
    fn header(&self, of: &Header) -> Header {
        let &Header { book, slice, .. } = of;
        Header { book, slice, seq: self.seq, step: self.step, ..Header::control(Kind::Gather) }
    }

    /// Whether each member has given all of what it gives, or has left.
    fn group_is_in(&self, group: &ClientGroup, site: &Site<'_>) -> bool {
        let mut members = group.members.iter().zip(indices(group, site));
        self.told.iter().all(|(_, epoch)| *epoch == Party::new(0, site.active.epoch()).epoch())
            && members.all(|(rank, index)| {
                site.active.contains(rank) == self.has_begun(index) && {
                    !self.has_begun(index) || self.is_in(index)
                }
            })
    }

    fn all_are_in(&self, site: &Site<'_>) -> bool {
        (0..site.members.count() as usize).all(|index| self.is_in(index))
    }

    /// Whether this head has done its part: its members have all, or none of them takes part.
    pub(super) fn is_over(&self, site: &Site<'_>) -> bool {
        let nobody = || {
            let given = |index| matches!(self.of(index), Some(OfMember::Pieces { .. }));
            site.led().is_some_and(|group| !indices(group, site).any(given))
        };
        self.served || self.passed_on && nobody()
    }

    /// At a head: members for whom the round waits.
    pub(super) fn missing_inside<'a>(&'a self, site: &'a Site<'_>) -> impl Iterator<Item = Rank> + 'a {
        let group = site.led().filter(|_| !self.passed_on);
        let members = group.into_iter().flat_map(|group| group.members.iter().zip(indices(group, site)));
        let late = members.filter(|(rank, index)| site.active.contains(*rank) && !self.is_in(*index));
        late.map(|(rank, _)| rank).filter(|rank| *rank != site.rank)
    }

    /// At a head that has passed on: heads of groups from which not all is here.
    pub(super) fn missing_heads<'a>(&'a self, site: &'a Site<'_>) -> impl Iterator<Item = Rank> + 'a {
        let others = site.groups.iter().filter(|group| self.passed_on && group.head() != site.rank);
        others.filter(|group| indices(group, site).any(|index| !self.is_in(index))).map(ClientGroup::head)
    }
}

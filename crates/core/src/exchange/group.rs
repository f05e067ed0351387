//! A group at its head, and where its members stand: the store's rounds with one more sum on the way.
//!
//! Members push to their head, which sums them in rank order, passes the sum on to the owner as a worker does its contribution, and
//! gives them the answer when it comes. Every slice goes by itself, so one is passed on while others are still being summed.
//! The sum is made in the head's own memory, or in scratch if its program has left: its node relays for the others.
//!
//! Where nobody must be in, a group's sum is a round of its own at the owner, and a question of all members is one question.
//!
//! Inside a group nothing is rounded to a wire type, neither contributions nor results: on one host that costs more than
//! the bytes it saves. What goes on to the owner is rounded, once for each group.
//!
//! For n bytes, and groups of m: a member sends n to its head and gets n back; the head sends to the owners, and gets from them,
//! what a worker does in a job with as many workers as there are groups.

use super::context::{Context, Effect, Flow, Site};
use super::frames::{copied, send, tell};
use super::out_of_step::out_of_step;
use super::round::{Contribution, Outcome, Round};
use crate::error::Error;
use crate::memory::Memory;
use crate::roles::{Answered, ClientGroup, Fold, MustBeIn, NO_GROUPS};
use crate::types::{Rank, Seq, Step};
use crate::wire::{Header, Kind, Party, describe, wire_argument};

/// A round inside a group, at its head.
#[derive(Debug)]
pub(super) struct Inside<C> {
    round: Round<C>,
    /// What was passed on, until it is answered, and who gave it if that is one rank's copy.
    passed_on: Option<(Contribution<C>, Option<Rank>)>,
}

impl<C> Default for Inside<C> {
    fn default() -> Self {
        Self { round: Round::default(), passed_on: None }
    }
}

impl<'a> Site<'a> {
    /// This rank's group, if it is the head.
    pub(super) fn led(&self) -> Option<&'a ClientGroup> {
        self.groups.led_by(self.rank)
    }

    /// To whom this rank pushes.
    pub(super) fn pushes_to(&self) -> Rank {
        self.groups.answered_by(self.rank, self.slice.owner)
    }

    /// Whose scratch is free of what this rank has pushed, once `from` has answered.
    pub(super) fn consumed_with(&self, from: Rank) -> Rank {
        if self.slice.replica.is_some() { self.slice.owner } else { from }
    }

    /// Who gives this rank its result: who takes its contribution, or the replica.
    pub(super) fn answered_by(&self) -> Rank {
        self.slice.answers(self.rank).unwrap_or_else(|| self.pushes_to())
    }

    /// Whether `from` may push to this rank, and says of whom.
    pub(super) fn takes_pushes(&self, from: Rank, header: &Header) -> bool {
        let party = Party::of(header.argument);
        if self.groups.together(self.rank, from) {
            return self.led().is_some() && party == Party::NOBODY;
        }
        let of_group = match self.groups.of(from) {
            Some(group) => group.head() == from && (1..=group.members.count()).contains(&party.ranks()),
            None => party == Party::NOBODY,
        };
        of_group && self.slice.owner == self.rank
    }

    /// The same slice inside a group of this rank's.
    fn inside(&self, group: &'a ClientGroup) -> Self {
        let ClientGroup { members, rules } = group;
        Self { members, rules, groups: &NO_GROUPS, wire: self.dtype, ..*self }
    }
}

impl<C: Clone> Inside<C> {
    /// Takes a member's contribution.
    pub(super) fn add<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        what: Contribution<C>,
        context: &Context<'_, M>,
    ) -> Result<(), Error> {
        let members = context.site.led().map(|group| &group.members);
        let Some((members, index)) = members.and_then(|members| Some((members, members.index_of(from)?)))
        else {
            return Err(crate::wire::unexpected(from, header));
        };
        self.round.add(index, members.count(), header, what).map_err(|why| {
            Error::protocol(from, format!("{}, inside its group: {why}", describe(from, header)))
        })
    }

    /// If all contributions are in and were not passed on: to which round, and of which step.
    pub(super) fn due(&self, site: &Site<'_>) -> Option<(Seq, Step)> {
        let group = site.led().filter(|_| self.passed_on.is_none())?;
        self.round.open().filter(|_| self.round.is_complete(&site.inside(group)))
    }

    /// Sums what is in, to `mine` if this rank has memory for the result. Returns what is to be passed on, and its header.
    pub(super) fn sum<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        mine: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(Header, Contribution<C>), Error> {
        let site = context.site;
        let Some(group) = site.led() else { return Err(crate::wire::unexpected(site.rank, header)) };
        let inside = site.inside(group);
        let one_by_one = site.rules.must_be_in == MustBeIn::Nobody;
        if one_by_one && let Some(error) = self.split(header, &inside) {
            return Err(error);
        }
        if self.round.steps_differ() {
            return Err(out_of_step(&inside, self.round.steps(&group.members)));
        }
        let outcome = self.round.outcome(&inside, context.inputs).map_err(|why| {
            Error::protocol(site.rank, format!("slice {} of book {}: {why}", header.slice, header.book))
        })?;
        let op = self.round.op();
        let (what, given_by) = match outcome {
            Outcome::Absent => (Contribution::Absent, None),
            Outcome::Copy(source) => (Contribution::Data(copied(source, mine, context)), Some(source)),
            Outcome::Reduced(_) => {
                // Who contributes and is not answered has what it gave.
                let mine = mine.filter(|_| site.rules.answered != Answered::WhoAsks);
                let sum = mine.unwrap_or_else(|| context.memory.scratch(site.slice.len_bytes as usize));
                // An average is divided by its owner, once.
                context.memory.reduce(site.dtype, op.reduction(1), context.inputs, &sum);
                (Contribution::Data(sum), None)
            }
        };
        context.inputs.clear();
        self.round.let_go();
        if !what.is_absent() {
            context.effects.push(Effect::Summed { seq: header.seq });
        }
        if site.rules.fold == Fold::Updated {
            // The answer may be long in coming.
            self.round.tell_summed(header, &inside, context);
        }
        self.passed_on = Some((what.clone(), given_by));
        let party = Party::new(self.round.arrived(), site.active.epoch());
        let (kind, wire, payload_bytes) = match what {
            Contribution::Absent => (Kind::PushAbsent, 0, 0),
            _ => (Kind::Push, wire_argument(site.dtype, site.wire), site.slice.wire_bytes),
        };
        Ok((Header { kind, op, argument: wire | party.argument(), payload_bytes, ..*header }, what))
    }

    /// What is wrong if some members contribute and others ask.
    fn split(&self, header: &Header, inside: &Site<'_>) -> Option<Error> {
        let which = |asks: bool| {
            let of = move |rank: &Rank| {
                let what = inside.members.index_of(*rank).and_then(|index| self.round.of(index));
                what.is_some_and(|what| what.is_absent() == asks)
            };
            inside.members.iter().filter(of).collect::<Vec<_>>()
        };
        let (gives, asks) = (which(false), which(true));
        let (giver, asker) = (gives.first()?, asks.first()?);
        let layer = inside.layer;
        let reason = format!(
            "of one group rank {giver} contributes to layer {layer} and rank {asker} asks for it: the members of a group make the \
             same calls in the same order"
        );
        let odd = if asks.len() > gives.len() { *giver } else { *asker };
        Some(Error::Mismatch { rank: odd, layer: layer.into(), step: header.step, reason })
    }

    /// Whether the owner is to answer this round.
    pub(super) fn waits_for_answer(&self, seq: Seq) -> bool {
        self.passed_on.is_some() && self.round.open().is_some_and(|(open, _)| open == seq)
    }

    /// What was passed on, where it is the result.
    pub(super) fn given(&self) -> Option<C> {
        match &self.passed_on {
            Some((Contribution::Data(chunk), _)) => Some(chunk.clone()),
            _ => None,
        }
    }

    /// The round has ended: gives the result to the members that took part.
    pub(super) fn spread<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        result: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        let Some(group) = context.site.led() else { return };
        let given_by = self.passed_on.take().and_then(|(_, given_by)| given_by);
        for to in group.members.after(context.site.rank) {
            let index = group.members.index_of(to);
            if index.and_then(|index| self.round.of(index)).is_some() {
                tell(to, header, result, given_by == Some(to), context);
            }
        }
        self.round.clear();
    }

    /// Whether some are in, and not all.
    pub(super) fn waits_for_members(&self) -> bool {
        self.passed_on.is_none() && self.round.open().is_some()
    }

    /// Members for whom this slice waits here.
    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        if let Some(group) = site.led().filter(|_| self.waits_for_members()) {
            ranks.extend(self.round.missing(&site.inside(group)));
        }
    }

    /// The owner, if its answer to the group is waited for.
    pub(super) fn owner_that_owes(&self, site: &Site<'_>) -> Option<Rank> {
        (self.passed_on.is_some() && site.slice.owner != site.rank).then_some(site.slice.owner)
    }
}

/// A head's push to the owner, as an effect.
pub(super) fn pass_on<M: Memory>(
    header: &Header,
    what: Contribution<M::Chunk>,
    context: &mut Context<'_, M>,
) {
    let (payload, flow) = match what {
        Contribution::Data(chunk) => (Some(chunk), Flow::Window),
        Contribution::Summed | Contribution::Absent => (None, Flow::Free),
    };
    send(context.site.slice.owner, header, payload, flow, context);
}

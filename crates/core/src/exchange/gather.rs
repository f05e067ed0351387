//! Every rank's bytes to every other rank: for what each rank can make of all contributions by itself, such as the rows
//! that a gradient consists of (Poseidon section 3.2: sufficient factor broadcasting).
//!
//! A contribution has a length of its own, up to that of the tensor, which receivers learn from its first frame. It is cut
//! into frames of at most `slice.len_bytes`; each carries the whole length as its argument. Frames of one contribution are
//! queued together, at one place, to one connection, so they arrive in order and need not say where they belong.
//!
//! Cost for n ranks and S bytes each: (n-1) S per link and direction, one latency (Poseidon Table 1, SFB).
//!
//! A tensor may have an owner, for whom alone its contributions are, which is how Project Adam's scheme sends factors (Poseidon
//! Table 1, Adam). To the others they are then empty ones: the round is the same on all ranks, whoever gets what in it.
//!
//! Where workers sum in groups ([`crate::roles::Groups`]), heads pass contributions on ([`super::relay`]): then each goes once to a
//! host, and not to every rank of it.
//!
//! **Why nothing waits for ever.** A contribution is sent without asking anybody, and is taken whenever it comes: no window
//! holds it back. So once all active ranks have submitted a round, it ends.
//!
//! **Why the ranks agree on who takes part** when one leaves (join): it leaves when all that it has submitted is complete and
//! its memory released, which is when it is written to every connection. So its contribution to a round comes before the word
//! that it has left, on every rank, or never.
//!
//! **Why memory is bounded.** A rank submits round s + 1 when its round s is complete, which takes this rank's contribution to
//! s. So of each other rank there are contributions to at most two rounds here, each no longer than the tensor: together with
//! the complete round that the program reads, 2 (n-1) times the tensor, and with rows of usual numbers far less.

use super::context::{Context, Effect, Flow, Site};
use super::contributions::{OfRound, cut};
use super::frames::send;
use super::out_of_step::out_of_step;
use super::relay::{Passage, is_for, passage};
use crate::error::Error;
use crate::memory::Memory;
use crate::types::{Rank, Seq, Step};
use crate::wire::{Header, Kind, describe, unexpected};

/// A peer is at most one round ahead.
const OPEN_ROUNDS_MAX: usize = 2;

/// One tensor's exchange on one rank.
#[derive(Debug)]
pub struct Gather<C> {
    /// The round this rank has last submitted.
    submitted: Seq,
    /// Its step.
    step: Step,
    /// The last one that was complete here.
    done: Seq,
    /// By seq.
    rounds: Vec<OfRound<C>>,
    /// Of the head of a group: the last one that was over here, for its members or because it has none.
    over: Seq,
}

impl<C> Default for Gather<C> {
    fn default() -> Self {
        Self { submitted: 0, step: 0, done: 0, rounds: Vec::new(), over: 0 }
    }
}

impl<C: Clone> Gather<C> {
    /// `memory` holds `header.argument` bytes, for all others or for the owner.
    pub(super) fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: &C,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { rank, active, slice, tensor_bytes, groups, .. } = context.site;
        let total_bytes = header.argument;
        if self.submitted > self.done || header.seq <= self.done || u64::from(total_bytes) > tensor_bytes {
            return Err(Error::Config(format!(
                "slice {} of book {} is submitted twice, or {total_bytes} bytes are more than its {tensor_bytes}",
                header.slice, header.book
            )));
        }
        (self.submitted, self.step) = (header.seq, header.step);
        let receivers: Vec<Rank> = match groups.of(rank) {
            None => active.after(rank).collect(),
            Some(group) if group.head() != rank => vec![group.head()],
            Some(_) => Vec::new(),
        };
        for to in &receivers {
            let total_bytes = if is_for(*to, &context.site) { total_bytes } else { 0 };
            // Even if it is empty: that the memory is released says that the frame is written.
            for (payload_bytes, payload) in cut(memory, total_bytes, slice.len_bytes, context.memory) {
                let header = Header { kind: Kind::Gather, payload_bytes, argument: total_bytes, ..*header };
                send(*to, &header, Some(payload), Flow::Free, context);
            }
        }
        if groups.led_by(rank).is_some() {
            let chunks = cut(memory, total_bytes, slice.len_bytes, context.memory);
            let index = context.site.members.index_of(rank).ok_or_else(|| unexpected(rank, header))?;
            self.round(header, &context.site).set_whole(index, header.step, total_bytes, chunks);
        }
        self.advance(header, context)
    }

    /// Whether a frame continues, or begins, its rank's contribution to a round that may be open here.
    pub(super) fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        let fits = header.payload_bytes <= site.slice.len_bytes && from != site.rank;
        if !fits || is_for_others(from, site) {
            return fits && header.kind == Kind::Gather;
        }
        let round = self.rounds.iter().find(|round| round.seq == header.seq);
        let known =
            round.is_some() || header.seq > self.done.max(self.over) && self.rounds.len() < OPEN_ROUNDS_MAX;
        match passage(from, header, site) {
            // What comes from ranks whose groups go on when nobody is left in this one.
            Some(Passage::Between) if round.is_none() && header.seq <= self.over => true,
            Some(Passage::Down) if self.submitted == self.done || header.seq != self.submitted => false,
            Some(way) => known && way.fits(round, from, header, site),
            None => false,
        }
    }

    pub(super) fn frame<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let site = context.site;
        if is_for_others(from, &site)
            || header.seq <= self.over && passage(from, header, &site) == Some(Passage::Between)
        {
            return Ok(());
        }
        if payload.is_some() != (header.payload_bytes > 0) {
            return Err(unexpected(from, header));
        }
        let way = passage(from, header, &site).ok_or_else(|| unexpected(from, header))?;
        let round = self.round(header, &site);
        way.take(round, from, header, payload, &site).ok_or_else(|| unexpected(from, header))?;
        if self.submitted > self.done && header.seq < self.submitted {
            let why = format!("{}: this rank is at round {}", describe(from, header), self.submitted);
            return Err(Error::protocol(from, why));
        }
        self.advance(header, context)
    }

    /// A round that only waited for the rank that has left ends now. What others still send to this rank after it has left
    /// itself is none of its business, unless it is the head of a group.
    pub(super) fn left<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { rank, members, active, groups, .. } = context.site;
        if !active.contains(rank) && groups.is_empty() {
            for round in &mut self.rounds {
                round.forget(members.iter().map(|member| active.contains(member)));
            }
            self.rounds.retain(|round| !round.is_empty());
        }
        self.advance(header, context)
    }

    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        let Site { rank: me, members, active, .. } = *site;
        if site.led().is_some() {
            ranks.extend(self.rounds.iter().flat_map(|round| round.missing_inside(site)));
        }
        if self.submitted == self.done || !site.groups.is_empty() {
            return;
        }
        let round = self.rounds.iter().find(|round| round.seq == self.submitted);
        let is_in = |index: usize| round.is_some_and(|round| round.is_in(index));
        let all = members.iter().enumerate();
        let late = all.filter(|&(index, rank)| rank != me && active.contains(rank) && !is_in(index));
        ranks.extend(late.map(|(_, rank)| rank));
    }

    /// Of the head of a group that is in: the heads of those that are not.
    pub(super) fn owners_that_owe(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        if site.led().is_some() {
            ranks.extend(self.rounds.iter().flat_map(|round| round.missing_heads(site)));
        }
    }

    fn round(&mut self, header: &Header, site: &Site<'_>) -> &mut OfRound<C> {
        let at = self.rounds.partition_point(|round| round.seq < header.seq);
        if self.rounds.get(at).is_none_or(|round| round.seq != header.seq) {
            self.rounds.insert(at, OfRound::begun_by(header, site.members));
        }
        &mut self.rounds[at]
    }

    /// Passes on what can be, and ends what is complete.
    fn advance<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        if context.site.led().is_some() {
            for round in &mut self.rounds {
                round.pass_on(header, context);
            }
            let (own, site) = (self.submitted > self.done, context.site);
            let is_own = |round: &OfRound<C>| own && round.seq == self.submitted;
            for round in self.rounds.iter().filter(|round| round.is_over(&site)) {
                self.over = self.over.max(round.seq);
            }
            self.rounds.retain(|round| is_own(round) || !round.is_over(&site));
        }
        self.end_if_complete(context)
    }

    fn end_if_complete<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) -> Result<(), Error> {
        let Site { rank, members, active, groups, .. } = context.site;
        if self.submitted == self.done {
            return Ok(());
        }
        let at = self.rounds.iter().position(|round| round.seq == self.submitted);
        // A rank may have left since it contributed; its contribution counts all the same, as it does on ranks that were faster.
        // Of groups heads say who takes part.
        let is_in = |index: usize, other| match at {
            Some(at) if self.rounds[at].has_begun(index) => self.rounds[at].is_in(index),
            _ => groups.is_empty() && !active.contains(other),
        };
        let passed_on = at.is_none_or(|at| self.rounds[at].served || context.site.led().is_none());
        if !passed_on
            || members.iter().enumerate().any(|(index, other)| other != rank && !is_in(index, other))
        {
            return Ok(());
        }
        self.done = self.submitted;
        let round = at.map(|at| self.rounds.remove(at));
        if let Some(round) = &round {
            let steps = round.steps(members).filter(|(other, _)| *other != rank);
            if steps.clone().any(|(_, step)| step != self.step) {
                return Err(out_of_step(&context.site, steps.chain([(rank, self.step)])));
            }
        }
        // The head of a group has what it has passed on to the owner, too.
        let for_me = context.site.only_to.is_none_or(|owner| owner == rank);
        let parts = round.map(|round| round.into_parts(members.index_of(rank), for_me)).unwrap_or_default();
        context.effects.push(Effect::Gathered { parts });
        context.effects.push(Effect::Complete { seq: self.done, present: true, version: 0, kept: None });
        Ok(())
    }
}

/// Whether this rank has left and `from` has not: it goes on with the others, and did not know yet when it sent this.
fn is_for_others(from: Rank, site: &Site<'_>) -> bool {
    site.groups.is_empty() && !site.active.contains(site.rank) && site.active.contains(from)
}

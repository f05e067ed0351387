//! Every rank's bytes to every other rank: for what each rank can make of all contributions by itself, such as the rows
//! that a gradient consists of (Poseidon section 3.2: sufficient factor broadcasting).
//!
//! A contribution has a length of its own, up to that of the tensor, which receivers learn from its first frame. It is cut
//! into frames of at most `slice.len_bytes`; each carries the whole length as its argument. Frames of one contribution are
//! queued together, at one place, to one connection, so they arrive in order and need not say where they belong.
//!
//! Cost for n ranks and S bytes each: (n-1) S per link and direction, one latency (Poseidon Table 1, SFB).
//!
//! A contribution may be meant for one rank alone, which is how Project Adam's scheme sends factors to a layer's owner (Poseidon
//! Table 1, Adam). To the others it is then an empty one: the round is the same on all ranks, whoever gets what in it.
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
use super::out_of_step::out_of_step;
use crate::error::Error;
use crate::memory::Memory;
use crate::types::{Rank, Seq, Step};
use crate::wire::{Header, Kind, Outgoing, describe, unexpected};

/// A peer is at most one round ahead.
const OPEN_ROUNDS_MAX: usize = 2;

/// What has come from one rank.
#[derive(Debug)]
struct Contribution<C> {
    step: Step,
    total_bytes: u32,
    filled_bytes: u32,
    /// The payloads, in order.
    chunks: Vec<C>,
}

impl<C> Contribution<C> {
    fn is_whole(&self) -> bool {
        self.filled_bytes == self.total_bytes
    }
}

/// A round that some rank has begun and that is not complete here.
#[derive(Debug)]
struct Round<C> {
    seq: Seq,
    /// By member; this one's own is never here.
    contributions: Vec<Option<Contribution<C>>>,
}

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
    rounds: Vec<Round<C>>,
}

impl<C> Default for Gather<C> {
    fn default() -> Self {
        Self { submitted: 0, step: 0, done: 0, rounds: Vec::new() }
    }
}

impl<C: Clone> Gather<C> {
    /// `memory` holds `header.argument` bytes, for all others or for one.
    pub(super) fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: &C,
        only_to: Option<Rank>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { rank, active, slice, tensor_bytes, .. } = context.site;
        let total_bytes = header.argument;
        if self.submitted > self.done || header.seq <= self.done || u64::from(total_bytes) > tensor_bytes {
            return Err(Error::Config(format!(
                "slice {} of book {} is submitted twice, or {total_bytes} bytes are more than its {tensor_bytes}",
                header.slice, header.book
            )));
        }
        (self.submitted, self.step) = (header.seq, header.step);
        for to in active.after(rank) {
            let total_bytes = if only_to.is_none_or(|one| one == to) { total_bytes } else { 0 };
            let mut start = 0;
            loop {
                let payload_bytes = slice.len_bytes.min(total_bytes - start);
                // Even if it is empty: that the memory is released says that the frame is written.
                let payload = Some(context.memory.part(memory, start as usize, payload_bytes as usize));
                let header = Header { kind: Kind::Gather, payload_bytes, argument: total_bytes, ..*header };
                let frame = Outgoing { header, payload };
                context.effects.push(Effect::Send { to, frame, flow: Flow::Free });
                start += payload_bytes;
                if start == total_bytes {
                    break;
                }
            }
        }
        self.end_if_complete(context)
    }

    /// Whether a frame continues, or begins, its rank's contribution to a round that may be open here.
    pub(super) fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        let (total_bytes, len_bytes) = (header.argument, header.payload_bytes);
        let fits = header.kind == Kind::Gather
            && from != site.rank
            && u64::from(total_bytes) <= site.tensor_bytes
            && (len_bytes > 0) == (total_bytes > 0);
        if !fits || is_for_others(from, site) {
            return fits && len_bytes <= site.slice.len_bytes;
        }
        let Some(place) = site.members.position(from) else { return false };
        let round = self.rounds.iter().find(|round| round.seq == header.seq);
        let (known_bytes, filled_bytes) = match round.map(|round| &round.contributions[place]) {
            Some(Some(contribution)) if contribution.is_whole() => return false,
            Some(Some(contribution)) => (contribution.total_bytes, contribution.filled_bytes),
            Some(None) => (total_bytes, 0),
            None if header.seq > self.done && self.rounds.len() < OPEN_ROUNDS_MAX => (total_bytes, 0),
            None => return false,
        };
        known_bytes == total_bytes && len_bytes == site.slice.len_bytes.min(total_bytes - filled_bytes)
    }

    pub(super) fn frame<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        if is_for_others(from, &context.site) {
            return Ok(());
        }
        let members = context.site.members;
        let Some(place) = members.position(from) else { return Err(unexpected(from, header)) };
        let at = self.rounds.partition_point(|round| round.seq < header.seq);
        if self.rounds.get(at).is_none_or(|round| round.seq != header.seq) {
            let contributions = members.iter().map(|_| None).collect();
            self.rounds.insert(at, Round { seq: header.seq, contributions });
        }
        let contribution = self.rounds[at].contributions[place].get_or_insert_with(|| Contribution {
            step: header.step,
            total_bytes: header.argument,
            filled_bytes: 0,
            chunks: Vec::with_capacity(header.argument.div_ceil(header.payload_bytes.max(1)) as usize),
        });
        if payload.is_some() != (header.payload_bytes > 0) {
            return Err(unexpected(from, header));
        }
        contribution.chunks.extend(payload);
        contribution.filled_bytes += header.payload_bytes;
        if self.submitted > self.done && header.seq < self.submitted {
            let why = format!("{}: this rank is at round {}", describe(from, header), self.submitted);
            return Err(Error::protocol(from, why));
        }
        self.end_if_complete(context)
    }

    /// A round that only waited for the rank that has left ends now. What others still send to this rank after it has left
    /// itself is none of its business.
    pub(super) fn left<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) -> Result<(), Error> {
        let Site { rank, members, active, .. } = context.site;
        if !active.contains(rank) {
            for round in &mut self.rounds {
                let contributions = round.contributions.iter_mut().zip(members.iter());
                let others = contributions.filter(|(_, member)| active.contains(*member));
                others.for_each(|(contribution, _)| *contribution = None);
            }
            self.rounds.retain(|round| round.contributions.iter().any(Option::is_some));
        }
        self.end_if_complete(context)
    }

    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        let Site { rank: me, members, active, .. } = *site;
        if self.submitted == self.done {
            return;
        }
        let round = self.rounds.iter().find(|round| round.seq == self.submitted);
        let is_whole = |place: usize| {
            round.and_then(|round| round.contributions[place].as_ref()).is_some_and(Contribution::is_whole)
        };
        let late = members
            .iter()
            .enumerate()
            .filter(|&(place, rank)| rank != me && active.contains(rank) && !is_whole(place));
        ranks.extend(late.map(|(_, rank)| rank));
    }

    fn end_if_complete<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) -> Result<(), Error> {
        let Site { rank, members, active, .. } = context.site;
        if self.submitted == self.done {
            return Ok(());
        }
        let at = self.rounds.iter().position(|round| round.seq == self.submitted);
        // A rank may have left since it contributed; its contribution counts all the same, as it does on ranks that were faster.
        let is_in = |place: usize, other| {
            let contribution = at.and_then(|at| self.rounds[at].contributions[place].as_ref());
            contribution.map_or(!active.contains(other), Contribution::is_whole)
        };
        if members.iter().enumerate().any(|(place, other)| other != rank && !is_in(place, other)) {
            return Ok(());
        }
        self.done = self.submitted;
        let contributions = at.map(|at| self.rounds.remove(at).contributions).unwrap_or_default();
        let others = members.iter().zip(&contributions);
        let steps = others.filter_map(|(other, contribution)| Some((other, contribution.as_ref()?.step)));
        if steps.clone().any(|(_, step)| step != self.step) {
            return Err(out_of_step(&context.site, steps.chain([(rank, self.step)])));
        }
        let parts = contributions.into_iter().map(|contribution| contribution.map(|c| c.chunks)).collect();
        context.effects.push(Effect::Gathered { parts });
        context.effects.push(Effect::Complete { seq: self.done, present: true, version: 0 });
        Ok(())
    }
}

/// Whether this rank has left and `from` has not: it goes on with the others, and did not know yet when it sent this.
fn is_for_others(from: Rank, site: &Site<'_>) -> bool {
    !site.active.contains(site.rank) && site.active.contains(from)
}

//! A collective among all ranks, step by step as its [`Algorithm`] says: one state machine for all of them, which walks ([`Walk`]) as parts come in.
//!
//! A rank goes through its steps in order. It sends a step's part as soon as the steps before are through, and then waits
//! for the part that the step receives; a part that comes before its step is kept. So each rank needs to hear nothing but
//! the parts themselves, and every slice proceeds by itself.
//!
//! **Where payloads go.** A part of the result ([`Kind::Result`]) is read straight into this rank's memory: it contains
//! what this rank contributed to these elements, so that is no longer needed there, and has been written to the wire if it
//! was sent. A partial sum ([`Kind::Part`]) goes to scratch and is added into this rank's memory when the elements are next
//! sent, or the adding is over: several parts for the same elements are summed in one pass.
//!
//! **Absence.** A rank without a contribution sends on what it has got, and a part without payload if that is nothing. So
//! nobody adds zeros, and if nobody contributes every memory stays as it was.
//!
//! **Memory and deadlock.** Partial sums may come before this rank has submitted, so they count under the sender's window
//! ([`Flow::Window`]) until the round is complete there: then everybody has added everything. Results need no window: who
//! is sent one has contributed, so it waits for it with its memory. `node/outbox.rs` lets one round pass the window, the
//! first in an order that is the same on all ranks. Among the rounds that every rank has submitted and that are not
//! complete everywhere, the first in that order is first on every rank where it is not complete; so all of its parts may
//! be sent, all of its results may be sent, every rank takes in whatever comes, and it completes. Then the next is first.
//!
//! At most two rounds of a slice are under way at a rank: a peer that has completed round k may begin the next one, which
//! cannot end without this rank.
//!
//! What is left out: ranks that leave (join). An algorithm needs every rank; a rank that has left would have to go on
//! forwarding. It is refused with an error.

use super::context::{Context, Effect, Flow, Site};
use super::out_of_step::out_of_step;
use crate::error::Error;
use crate::members::Members;
use crate::memory::Memory;
use crate::steps::{Adding, Combine, Move, Post, Receive, Send, SendReceive, Walk};
use crate::types::{Rank, Seq};
use crate::way::Algorithm;
use crate::wire::{Header, Kind, Op, Outgoing, describe, unexpected};
use std::ops::Range;

/// One slice of a collective on one rank.
#[derive(Debug)]
pub struct Collective<C> {
    algorithm: Algorithm,
    /// The last round that this rank has submitted.
    seq: Seq,
    /// The open round.
    round: Option<OpenRound<C>>,
    /// What has come and whose step has not, of this round and the next. No more than the steps that receive, twice.
    arrived: Vec<Arrived<C>>,
    /// What has come to be added, when its addition is due.
    parts: Vec<C>,
    /// To whom this rank sends partial sums: the same in every round.
    receivers: Vec<Rank>,
}

/// This rank's part in the open round.
#[derive(Debug)]
struct OpenRound<C> {
    /// The submission's.
    header: Header,
    /// The contribution, the partial sums, and in the end the result.
    memory: C,
    /// Whether this rank has a contribution.
    contributes: bool,
    /// Whether anybody has contributed to the elements that this rank last worked on.
    present: bool,
    /// How far this rank has come.
    walk: Walk,
}

#[derive(Debug)]
struct Arrived<C> {
    from: Rank,
    header: Header,
    payload: Option<C>,
}

/// Both numberings of the ranks, and this one's post.
#[derive(Clone, Copy)]
struct Places<'a> {
    post: Post,
    members: &'a Members,
    /// The index of position 0 among the members.
    owner: u32,
    elem_bytes: u64,
}

impl<'a> Places<'a> {
    fn new(algorithm: Algorithm, site: &Site<'a>) -> Self {
        let Site { members, slice, .. } = *site;
        let (positions, elem_bytes) = (members.count(), site.dtype.size_bytes() as u64);
        let index = |rank| members.index_of(rank).unwrap_or(0) as u32;
        let (owner, elems) = (index(slice.owner), u64::from(slice.len_bytes) / elem_bytes);
        let position = (index(site.rank) + positions - owner) % positions;
        Self { post: Post { algorithm, positions, position, elems }, members, owner, elem_bytes }
    }

    fn step(&self, number: u32) -> SendReceive {
        self.post.step(number)
    }

    fn rank(&self, position: u32) -> Rank {
        self.members.at(position + self.owner)
    }

    /// Bytes from the start of the slice.
    fn bytes(&self, elems: &Range<u64>) -> Range<usize> {
        (elems.start * self.elem_bytes) as usize..(elems.end * self.elem_bytes) as usize
    }
}

impl<C: Clone> Collective<C> {
    pub(super) fn new(algorithm: Algorithm) -> Self {
        let (arrived, parts, receivers) = (Vec::new(), Vec::new(), Vec::new());
        Self { algorithm, seq: 0, round: None, arrived, parts, receivers }
    }

    pub(super) fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: C,
        absent: bool,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Header { book, slice, seq, .. } = *header;
        if self.round.is_some() {
            return Err(Error::Config(format!("slice {slice} of book {book} is submitted twice")));
        }
        if seq <= self.seq {
            return Err(Error::Config(format!("round {seq} of slice {slice} of book {book} has ended")));
        }
        if let Some(other) = self.arrived.iter().find(|arrived| arrived.header.seq != seq) {
            let what = describe(other.from, &other.header);
            return Err(Error::protocol(other.from, format!("{what}, but this rank is at round {seq}")));
        }
        self.seq = seq;
        let places = Places::new(self.algorithm, &context.site);
        if self.receivers.is_empty() {
            self.receivers = receivers(&places);
        }
        context.effects.extend(self.receivers.iter().map(|to| Effect::Opens { to: *to }));
        self.round = Some(OpenRound {
            header: *header,
            memory,
            contributes: !absent,
            present: !absent,
            walk: Walk::through(0..places.post.steps()),
        });
        self.advance(context)
    }

    /// A frame of a step that receives it, from the right side, for the first time, and of a round that may be under way.
    pub(super) fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        let places = Places::new(self.algorithm, site);
        let Some(Receive { from: sender, elems, combine }) = places.step(header.argument).receive else {
            return false;
        };
        let kind = if combine == Combine::Replace { Kind::Result } else { Kind::Part };
        let len = places.bytes(&elems).len();
        let open = self.round.as_ref().filter(|round| round.header.seq == header.seq);
        let in_time = match open {
            Some(round) => header.argument >= round.walk.number(),
            None => kind == Kind::Part && header.seq > self.seq,
        };
        // Of rounds that this rank has not begun there is one.
        let of_one_round =
            |other: &Arrived<C>| other.header.seq <= self.seq || other.header.seq == header.seq;
        header.kind == kind
            && places.rank(sender) == from
            && (header.payload_bytes == 0 || header.payload_bytes as usize == len)
            && in_time
            && (open.is_some() || self.arrived.iter().all(of_one_round))
            && self.position_of(header.seq, header.argument).is_none()
    }

    /// Results go straight into this rank's memory.
    pub(super) fn destination<M: Memory<Chunk = C>>(
        &self,
        header: &Header,
        site: &Site<'_>,
        memory: &M,
    ) -> Option<C> {
        let round =
            self.round.as_ref().filter(|_| header.kind == Kind::Result && header.payload_bytes > 0)?;
        let places = Places::new(self.algorithm, site);
        let range = places.bytes(&places.step(header.argument).receive?.elems);
        Some(memory.part(&round.memory, range.start, range.len()))
    }

    pub(super) fn frame<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        if header.kind == Kind::Result && self.round.is_none() {
            return Err(unexpected(from, header));
        }
        self.arrived.push(Arrived { from, header: *header, payload });
        self.advance(context)
    }

    pub(super) fn left(&self, header: &Header, site: &Site<'_>) -> Result<(), Error> {
        let gone = site.members.iter().filter(|rank| !site.active.contains(*rank));
        let ranks: Vec<String> = gone.map(|rank| rank.to_string()).collect();
        Err(Error::Config(format!(
            "rank {} has left (join), but slice {} of book {} is synchronised by {:?}, which needs every rank: use the \
             store for what is trained with different numbers of batches",
            ranks.join(" and "),
            header.slice,
            header.book,
            self.algorithm
        )))
    }

    /// The rank whose part comes next and is not here: it has not submitted, or waits itself.
    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        let Some(round) = &self.round else { return };
        let places = Places::new(self.algorithm, site);
        let late = |number: &u32| self.position_of(round.header.seq, *number).is_none();
        let mut senders = (round.walk.number()..places.post.steps())
            .filter(late)
            .filter_map(|number| places.step(number).receive);
        ranks.extend(senders.next().map(|Receive { from, .. }| places.rank(from)));
    }

    fn position_of(&self, seq: Seq, number: u32) -> Option<usize> {
        self.arrived.iter().position(|a| (a.header.seq, a.header.argument) == (seq, number))
    }

    /// Goes on as far as what has come allows.
    fn advance<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) -> Result<(), Error> {
        let places = Places::new(self.algorithm, &context.site);
        while let Some(round) = &mut self.round
            && let Some(what) = round.walk.next(&places.post)
        {
            match &what {
                Move::Send(number, send) => send_part(round, &places, *number, send, context),
                Move::Add(adding) => add_up(round, &mut self.parts, &places, adding, context)?,
                Move::Receive(number, receive) => {
                    let seq = round.header.seq;
                    let is_it = |a: &Arrived<C>| (a.header.seq, a.header.argument) == (seq, *number);
                    let Some(at) = self.arrived.iter().position(is_it) else { return Ok(()) };
                    let arrived = self.arrived.swap_remove(at);
                    take_in(round, &mut self.parts, receive.combine, arrived, &context.site)?;
                }
            }
            round.walk.done(what);
        }
        self.complete(context);
        Ok(())
    }

    fn complete<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) {
        let Some(round) = self.round.take() else { return };
        context.effects.extend(self.receivers.iter().map(|by| Effect::Consumed { by: *by }));
        let version = round.header.step;
        let (seq, present) = (round.header.seq, round.present);
        context.effects.push(Effect::Complete { seq, present, version, kept: None });
    }
}

fn send_part<M: Memory>(
    round: &OpenRound<M::Chunk>,
    places: &Places<'_>,
    number: u32,
    Send { to, elems }: &Send,
    context: &mut Context<'_, M>,
) {
    let range = places.bytes(elems);
    let kind = if number < places.post.reduce_steps() { Kind::Part } else { Kind::Result };
    let payload = round.present.then(|| context.memory.part(&round.memory, range.start, range.len()));
    let payload_bytes = if round.present { range.len() as u32 } else { 0 };
    let flow = if kind == Kind::Part && round.present { Flow::Window } else { Flow::Free };
    let header = Header { kind, argument: number, payload_bytes, ..round.header };
    let frame = Outgoing { header, payload };
    context.effects.push(Effect::Send { to: places.rank(*to), frame, flow });
}

/// The step's part is here.
fn take_in<C>(
    round: &mut OpenRound<C>,
    parts: &mut Vec<C>,
    combine: Combine,
    Arrived { from, header, payload }: Arrived<C>,
    site: &Site<'_>,
) -> Result<(), Error> {
    if header.op != round.header.op {
        let what = describe(from, &header);
        let (theirs, ours) = (header.op, round.header.op);
        let why = format!("{what} is for {theirs:?}, but this rank's is {ours:?}");
        return Err(Error::protocol(from, why));
    }
    if header.step != round.header.step {
        // Only neighbours in the plan hear each other's step.
        let steps = [(site.rank, round.header.step), (from, header.step)];
        return Err(out_of_step(site, steps.into_iter()));
    }
    if combine == Combine::Replace {
        round.present = payload.is_some();
    } else {
        parts.extend(payload);
    }
    Ok(())
}

/// Adds what has come, in one pass: what this rank has first, then the parts in the order of their steps.
fn add_up<M: Memory>(
    round: &mut OpenRound<M::Chunk>,
    parts: &mut Vec<M::Chunk>,
    places: &Places<'_>,
    Adding { elems, to_own, last }: &Adding,
    context: &mut Context<'_, M>,
) -> Result<(), Error> {
    let Context { site, memory, inputs, effects } = context;
    let range = places.bytes(elems);
    let output = memory.part(&round.memory, range.start, range.len());
    let has_some = if *to_own { round.contributes } else { round.present };
    inputs.extend(has_some.then(|| output.clone()));
    inputs.append(parts);
    round.present = !inputs.is_empty();
    if round.header.op == Op::Copy && inputs.len() > 1 {
        let what = describe(site.rank, &Header { kind: Kind::Part, ..round.header });
        inputs.clear();
        return Err(Error::protocol(site.rank, format!("{what}: several ranks contribute to a copy")));
    }
    // Divided once, where the last contribution is added.
    let how = round.header.op.reduction(if *last { places.post.positions } else { 1 });
    if !inputs.is_empty() {
        memory.reduce(site.dtype, how, inputs, &output);
        effects.push(Effect::Summed { seq: round.header.seq });
    }
    inputs.clear();
    Ok(())
}

/// The ranks to which this one sends partial sums.
fn receivers(places: &Places<'_>) -> Vec<Rank> {
    let steps = (0..places.post.reduce_steps()).filter_map(|number| places.step(number).send);
    let mut receivers: Vec<Rank> = steps.map(|send| places.rank(send.to)).collect();
    receivers.dedup();
    receivers
}

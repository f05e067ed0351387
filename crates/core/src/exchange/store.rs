//! The sharded key-value store, bulk-synchronous: every rank pushes its slice to the owner, the owner sums in rank order
//! when the last contribution is in and answers all at once (P3 §4.2: no notify-and-pull).
//!
//! So it is on equal ranks. A book may have other rules ([`crate::roles`]): who must be in, what becomes of contributions, who is
//! answered; or who sums among themselves before (`exchange/group.rs`). What is said below of all ranks then holds of those that take
//! part.
//!
//! Cost for n ranks and S bytes spread evenly over n co-located shards: 2 (n-1)/n S bytes per link and direction, two
//! latencies (Poseidon Table 1 with P1 = P2 = n).
//!
//! **Wire types.** Of a tensor that travels as another type than it has, a worker's contribution is rounded when it is sent
//! ([`crate::node::Node::next_frame`]). The owner adds in fp32, in rank order. Its own contribution is *not* rounded: it need not
//! travel, and the error is smaller. The result is rounded once, and all keep the rounded one, the owner included. So all ranks
//! have the same bits; but they depend on which rank owns the slice. A value that is kept is never rounded, only what comes and what is
//! answered. A payload cannot be read into the tensor: answers, too, go
//! to scratch, and are expanded from there.
//!
//! **Updates.** Where the owner applies an optimizer ([`Fold::Updated`]), the answer is the slice of the parameter. The optimizer is
//! applied when this rank's program says so, which may be before or after the last contribution. If it has not said so yet, the
//! sum is made all the same when the last contribution is in, during backward as a rule, and whoever contributed hears that it
//! is: its window is free again. What has no contribution is not updated. The owner's value is never rounded; with a wire type all ranks, the owner included,
//! get the rounded one. With a standing order the owner needs no word: a round ends with its last contribution.
//!
//! **Replicas.** Where the owner updates and members may be lost, the member after it keeps all that it keeps ([`crate::layout::Slice::replica`]),
//! and *the replica answers*: the owner updates and passes the sum on, the replica updates by that and by the word of its own program, and
//! all others get the result from the replica. So where anybody else has the result of a round, the states that follow from it are at each of
//! the two that is left. As many bytes travel as without: the owner sends one sum in the place of n - 1 answers, and the replica n - 2 answers;
//! it is one trip more. A keeper that has no states yet ([`crate::recovery`]) takes part as if its program had not said the word: until it has
//! them, the last ones count.
//!
//! **Rounds of one.** Where nobody must be in, each contribution changes the value when it comes, one after the other, and whoever
//! asks gets it as it is then, with its version: how often it was changed. By its rules whoever contributes gets it, too, as it is
//! after its contribution or was before. With a bound of staleness whoever is too far ahead waits for its answer (`exchange/clocks.rs`).
//!
//! **Stragglers.** A round may end without those that are late ([`crate::roles::Stragglers`]). The owner has no clock: it says when
//! enough are in, and is told when time is up.

use super::clocks::Clocks;
use super::context::{Context, Effect, Flow, Site};
use super::entry::{Field, SliceEntry, copy};
use super::frames::{copied, is_unrounded, send, tell};
use super::group::{Inside, pass_on};
use super::out_of_step::out_of_step;
use super::round::{Contribution, Outcome, Round};
use crate::error::Error;
use crate::layout::Slice;
use crate::memory::Memory;
use crate::optimizer::Update;
use crate::reduce::Reduction;
use crate::roles::{Answered, Fold, MustBeIn, Rules, Stragglers};
use crate::types::{Rank, Seq, Step};
use crate::wire::{Header, Kind, Op, describe, states_argument, states_of, unexpected, wire_argument};

/// This rank's own part in a slice, from submission to completion.
#[derive(Debug)]
struct Mine<C> {
    memory: C,
    op: Op,
    seq: Seq,
    /// Who gives the result, if it is not the owner, and of which step: of a round of the last epoch.
    given: Option<(Rank, Step)>,
}

/// One slice in the store: this rank as a worker, and as the owner if it is.
#[derive(Debug)]
pub struct Store<C> {
    mine: Option<Mine<C>>,
    round: Round<C>,
    /// Of the head of a group.
    inside: Option<Box<Inside<C>>>,
    /// Of an owner whose rules keep results; where members may be lost, of all.
    entry: Option<SliceEntry<C>>,
    pending: SumAndWord<C>,
    /// The states that this keeper lacks.
    coming: Option<Coming<C>>,
    /// Of an owner: what it does with sums without being told each time.
    order: Option<Update>,
    /// Of an owner whose rules bound staleness.
    clocks: Clocks,
}

/// Of an owner that applies an optimizer, and its replica: what it has of a sum and the word to go on.
#[derive(Debug)]
struct SumAndWord<C> {
    sum: Option<WaitingSum<C>>,
    /// The word, for this step: to update, or not to.
    word: Option<(Step, Option<Update>)>,
}

/// States on their way from another keeper. What is here of the round before stays until they and its result have come: nobody
/// else may have it.
#[derive(Debug)]
struct Coming<C> {
    from: Rank,
    states: Vec<C>,
    /// How many updates they have had, once all are here.
    updates: Option<u64>,
}

/// What the contributions to a round come to, if anybody contributed.
#[derive(Debug)]
struct WaitingSum<C> {
    seq: Seq,
    step: Step,
    of: Option<C>,
}

impl<C> Default for Store<C> {
    fn default() -> Self {
        let (round, clocks) = (Round::default(), Clocks::default());
        let pending = SumAndWord { sum: None, word: None };
        Self { mine: None, round, inside: None, entry: None, pending, coming: None, order: None, clocks }
    }
}

impl<C: Clone> Store<C> {
    pub(super) fn submit<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        memory: C,
        absent: bool,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        if self.mine.is_some() {
            return Err(Error::Config(format!(
                "slice {} of book {} is submitted twice",
                header.slice, header.book
            )));
        }
        let Site { rank, dtype, rules, .. } = context.site;
        if !absent && !rules.takes_from(rank) {
            let (book, layer) = (header.book, context.site.layer);
            return Err(Error::Config(format!(
                "rank {rank} contributes to layer {layer} of book {book}, in whose rounds it need not be: it can only ask"
            )));
        }
        if let Some(why) = rules.refused(header.op) {
            let (book, layer, op) = (header.book, context.site.layer, header.op);
            return Err(Error::Config(format!("{op:?} of layer {layer} of book {book}: {why}")));
        }
        self.mine = Some(Mine { memory: memory.clone(), op: header.op, seq: header.seq, given: None });
        let to = context.site.pushes_to();
        if to == rank || context.site.led().is_some() {
            if to != rank {
                context.effects.push(Effect::Opens { to });
            }
            let what = if absent { Contribution::Absent } else { Contribution::Data(memory) };
            return self.take(rank, header, what, context);
        }
        if absent {
            send(to, &Header { kind: Kind::PushAbsent, ..*header }, None, Flow::Free, context);
        } else {
            let (wire, payload_bytes) = context.site.wire_with(to);
            let argument = wire_argument(dtype, wire);
            let header = Header { kind: Kind::Push, argument, payload_bytes, ..*header };
            send(to, &header, Some(memory), Flow::Window, context);
        }
        Ok(())
    }

    /// Pushes come to the owner, answers from it and for the round that is open here.
    pub(super) fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        let payload_bytes = match header.kind {
            Kind::Push if site.rules.takes_from(from) => site.wire_with(from).1,
            Kind::Answer => site.wire_with(from).1,
            Kind::PushAbsent | Kind::AnswerAbsent | Kind::AnswerSame => 0,
            Kind::Summed if site.rules.fold == Fold::Updated => 0,
            Kind::Replicated | Kind::State if header.payload_bytes == 0 => 0,
            Kind::Replicated | Kind::State => site.slice.len_bytes,
            _ => return false,
        };
        if header.payload_bytes != payload_bytes {
            return false;
        }
        if header.kind.takes_part() {
            return site.takes_pushes(from, header) && site.rules.refused(header.op).is_none();
        }
        let Slice { owner, replica, .. } = *site.slice;
        let is_replica = replica == Some(site.rank);
        match header.kind {
            Kind::State => return self.next_state(from, header),
            Kind::Replicated if !is_replica || self.pending.sum.is_some() => return false,
            Kind::Summed if replica.is_some() && !self.is_at(header.seq) => return from == owner, // the answer was faster
            _ => {}
        }
        let waits = match (&self.mine, &self.inside) {
            (Some(mine), None) => mine.seq == header.seq,
            (_, Some(inside)) => inside.waits_for_answer(header.seq),
            (None, None) => false,
        };
        let given_by = self.mine.as_ref().and_then(|mine| mine.given).map(|(by, _)| by);
        let answers = if matches!(header.kind, Kind::Replicated | Kind::Summed) {
            Some(site.pushes_to())
        } else {
            given_by.or_else(|| (!is_replica).then(|| site.answered_by()))
        };
        waits && answers == Some(from)
    }

    /// Whether this rank waits for the result of a round.
    fn is_at(&self, seq: Seq) -> bool {
        self.mine.as_ref().is_some_and(|mine| mine.seq == seq)
    }

    /// Whether this frame has the state that comes next.
    fn next_state(&self, from: Rank, header: &Header) -> bool {
        let (at, count) = states_of(header.argument);
        let is_one = at < count && header.payload_bytes > 0 || count == 0 && header.payload_bytes == 0;
        let waits =
            |coming: &Coming<C>| coming.from == from && coming.states.len() == at && coming.updates.is_none();
        is_one && self.coming.as_ref().is_some_and(waits)
    }

    /// Answers go straight into this rank's memory, unless they have to be expanded, or this rank's contribution must stay until
    /// they are whole.
    pub(super) fn destination(&self, header: &Header, site: &Site<'_>) -> Option<C> {
        let straight = header.kind == Kind::Answer && is_unrounded(header) && !site.rules.recoverable;
        self.mine.as_ref().filter(|_| straight).map(|mine| mine.memory.clone())
    }

    pub(super) fn frame<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match (header.kind, payload) {
            (Kind::Push, Some(chunk)) => self.take(from, header, Contribution::Data(chunk), context),
            (Kind::PushAbsent, None) => self.take(from, header, Contribution::Absent, context),
            (Kind::Answer, Some(chunk)) => {
                let Context { site, memory, .. } = context;
                let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
                let result = if is_unrounded(header) {
                    chunk
                } else {
                    let place = mine.clone().filter(|_| !site.rules.recoverable);
                    let place = place.unwrap_or_else(|| memory.scratch(site.slice.len_bytes as usize));
                    memory.expand(site.wire, &chunk, &place);
                    place
                };
                if let Some(mine) = mine.filter(|_| site.rules.recoverable) {
                    copy(*memory, &result, &mine);
                }
                let by = context.site.consumed_with(from);
                context.effects.push(Effect::Consumed { by });
                self.spread(header, Some(&result), context);
                self.done(header, Some(&result), context);
                Ok(())
            }
            (Kind::AnswerAbsent | Kind::AnswerSame, None) => {
                let by = context.site.consumed_with(from);
                context.effects.push(Effect::Consumed { by });
                let given = self.inside.as_ref().filter(|_| header.kind == Kind::AnswerSame);
                let result = given.and_then(|inside| inside.given());
                self.spread(header, result.as_ref(), context);
                // The same as what this rank has given: the result is in its memory.
                let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
                let there = mine.filter(|_| header.kind == Kind::AnswerSame);
                let there = there.map(|there| as_kept(there, context));
                self.done(header, there.as_ref(), context);
                Ok(())
            }
            (Kind::Summed, None) => {
                let is_late = context.site.slice.replica.is_some() && !self.is_at(header.seq);
                context.effects.extend((!is_late).then_some(Effect::Consumed { by: from }));
                Ok(())
            }
            (Kind::Replicated, sum) => {
                let (seq, step) = (header.seq, header.step);
                context.effects.push(Effect::Consumed { by: from });
                self.pending.sum = Some(WaitingSum { seq, step, of: sum });
                self.update_when_ready(header, context)
            }
            (Kind::State, state) => {
                if let Some(coming) = &mut self.coming {
                    coming.states.extend(state);
                    let all_are_here = coming.states.len() == states_of(header.argument).1;
                    coming.updates = all_are_here.then_some(u64::from(header.step));
                }
                self.take_states();
                self.update_when_ready(header, context)
            }
            _ => Err(unexpected(from, header)),
        }
    }

    pub(super) fn lacks(&mut self, header: &Header, memory: C, by: Rank) {
        let given = Some((by, header.step));
        self.mine = Some(Mine { memory, op: header.op, seq: header.seq, given });
    }

    pub(super) fn lacks_states(&mut self, by: Rank) {
        self.coming = Some(Coming { from: by, states: Vec::new(), updates: None });
        if let Some(entry) = self.entry.as_mut().filter(|_| self.mine.is_none()) {
            entry.empty(); // whatever it is of: the result is here that the states belong to
        }
    }

    /// Whether a result of the last epoch is on its way here.
    fn is_given(&self) -> bool {
        self.mine.as_ref().is_some_and(|mine| mine.given.is_some())
    }

    /// The states that have come take the place of those before them, if the result is here that they belong to.
    fn take_states(&mut self) {
        if !self.is_given()
            && let Some(entry) = &mut self.entry
            && let Some(Coming { states, updates: Some(updates), .. }) =
                self.coming.take_if(|coming| coming.updates.is_some())
        {
            entry.receive(states, updates);
        }
    }

    /// Gives the states to others that are to keep them from now on.
    pub(super) fn give_states<M: Memory<Chunk = C>>(
        &self,
        header: &Header,
        to: &[Rank],
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let whole = self.entry.as_ref().filter(|entry| entry.is_whole());
        let of_states = whole.and_then(|entry| {
            let (states, updates) = entry.states();
            Some((states, Step::try_from(updates).ok()?))
        });
        let Some((states, step)) = of_states else {
            let (slice, book, layer) = (header.slice, header.book, context.site.layer);
            return Err(Error::Config(format!(
                "slice {slice} of book {book}, layer {layer}: this rank is to give what an owner keeps, and does not have it"
            )));
        };
        let (kind, count) = (Kind::State, states.len());
        for to in to {
            if states.is_empty() {
                let header = Header { kind, step, argument: states_argument(0, 0), ..*header };
                send(*to, &header, None, Flow::Free, context);
            }
            for (at, state) in states.iter().enumerate() {
                let (argument, payload_bytes) = (states_argument(at, count), context.site.slice.len_bytes);
                let header = Header { kind, step, argument, payload_bytes, ..*header };
                send(*to, &header, Some(state.clone()), Flow::Free, context);
            }
        }
        Ok(())
    }

    /// What is kept of the slice, for the next epoch.
    pub(super) fn take_entry(&mut self) -> Option<SliceEntry<C>> {
        self.entry.take()
    }

    pub(super) fn put_entry(&mut self, entry: SliceEntry<C>) {
        self.entry = Some(entry);
    }

    /// Whether all is here that an owner keeps, as of the last round whose result is.
    pub(super) fn is_whole(&self) -> bool {
        self.entry.as_ref().is_some_and(SliceEntry::is_whole)
    }

    /// A round that only waited for the rank that has left ends now.
    pub(super) fn left<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        self.answer_who_waits(context);
        self.sum_inside(header, context)?;
        match self.round.open().filter(|_| self.is_due(&context.site)) {
            Some((seq, step)) => self.finish(&Header { seq, step, ..*header }, context),
            None => Ok(()),
        }
    }

    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        let coming = self.coming.as_ref().filter(|_| self.pending.sum.is_some());
        ranks.extend(coming.map(|coming| coming.from));
        if self.round.open().is_some() {
            ranks.extend(self.round.missing(site));
        }
        // Of this rank's own group those are named below for whom it waits.
        let is_named = self.inside.as_ref().is_some_and(|inside| inside.waits_for_members());
        self.clocks.missing(is_named.then_some(site.rank), site, ranks);
        if let Some(inside) = &self.inside {
            inside.missing(site, ranks);
        }
    }

    /// Owner: those who are not too far ahead any more get the value.
    fn answer_who_waits<M: Memory<Chunk = C>>(&mut self, context: &mut Context<'_, M>) {
        while let Some((rank, header)) = self.clocks.next(&context.site) {
            self.tell_late(rank, &header, context);
        }
    }

    /// Of a head: the owner that owes its group the answer.
    pub(super) fn owner_that_owes(&self, site: &Site<'_>) -> Option<Rank> {
        self.inside.as_ref()?.owner_that_owes(site)
    }

    /// A contribution comes to this rank: inside its group, or as to the owner.
    fn take<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        what: Contribution<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { rank, groups, .. } = context.site;
        if !groups.together(rank, from) {
            return self.contribute(from, header, what, context);
        }
        self.inside.get_or_insert_default().add(from, header, what, context)?;
        self.sum_inside(header, context)
    }

    /// Head: once all of its group are in, passes on what they have.
    fn sum_inside<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Some(inside) = &mut self.inside else { return Ok(()) };
        let Some((seq, step)) = inside.due(&context.site) else { return Ok(()) };
        let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
        let (header, what) = inside.sum(&Header { seq, step, ..*header }, mine, context)?;
        let Site { rank, slice, .. } = context.site;
        if slice.owner == rank {
            return self.contribute(rank, &header, what, context);
        }
        pass_on(&header, what, context);
        Ok(())
    }

    /// Head: gives its group the result, which is in this rank's memory if it has some for it.
    fn spread<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        result: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        if let Some(inside) = &mut self.inside {
            inside.spread(header, result, context);
        }
    }

    /// Owner: takes a contribution, and ends the round if it was the last.
    fn contribute<M: Memory<Chunk = C>>(
        &mut self,
        from: Rank,
        header: &Header,
        what: Contribution<C>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { members, rules, .. } = context.site;
        let Some(index) = members.index_of(from) else { return Err(unexpected(from, header)) };
        let one_by_one = rules.must_be_in == MustBeIn::Nobody;
        let (asks, over) = (what.is_absent() && !rules.needs(from), self.round.has_ended(header.seq));
        if one_by_one {
            if self.clocks.is_waiting(from) {
                return Err(Error::protocol(
                    from,
                    format!("{}: its last one is not answered", describe(from, header)),
                ));
            }
            self.clocks.advance(from, header.step, asks, &context.site);
        }
        if asks && one_by_one && self.clocks.is_ahead(from, &context.site) {
            self.clocks.wait(from, *header);
            self.answer_who_waits(context);
            return Ok(());
        }
        if asks && (one_by_one || over) || over && rules.stragglers.is_some() {
            if !what.is_absent() {
                context.effects.push(Effect::Late { of: from });
            }
            self.tell_late(from, header, context);
            self.answer_who_waits(context);
            return Ok(());
        }
        if one_by_one {
            self.round.forget_round();
        }
        self.round
            .add(index, members.count(), header, what)
            .map_err(|why| Error::protocol(from, format!("{}: {why}", describe(from, header))))?;
        if self.is_due(&context.site) {
            self.finish(header, context)?;
        } else if let Some(Stragglers { enough, after_ns }) = rules.stragglers
            && self.round.has(enough)
        {
            context.effects.push(Effect::Enough { seq: header.seq, after_ns });
        }
        self.answer_who_waits(context);
        Ok(())
    }

    /// Owner: enough were in this round, and the time for the others is over. If it has ended meanwhile nothing happens.
    pub(super) fn close<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let open = self.round.open().filter(|(seq, _)| *seq == header.seq);
        match open.filter(|_| self.pending.sum.is_none()) {
            Some((seq, step)) => self.finish(&Header { seq, step, ..*header }, context),
            None => Ok(()),
        }
    }

    /// Whether the last contribution to a round is in and nothing was made of them yet.
    fn is_due(&self, site: &Site<'_>) -> bool {
        self.pending.sum.is_none() && self.round.is_complete(site)
    }

    /// Owner: sums in rank order and answers everybody at once.
    fn finish<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Context { site, inputs, .. } = context;
        if self.round.steps_differ() {
            return Err(out_of_step(site, self.round.steps(site.members)));
        }
        let outcome = self.round.outcome(site, inputs).map_err(|why| {
            Error::protocol(site.rank, format!("slice {} of book {}: {why}", header.slice, header.book))
        })?;
        let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
        if site.rules.fold == Fold::Updated {
            return self.wait_for_word(header, &outcome, context);
        }
        let result = if site.rules.keep_results() {
            self.keep(&outcome, header.step, context).map(|value| as_answered(value, context))
        } else {
            // What is kept of a result is none of the program's memory.
            let mine = mine.filter(|_| !site.rules.recoverable);
            match outcome {
                Outcome::Absent => None,
                Outcome::Copy(source) => {
                    let result = copied(source, mine, context);
                    Some(if source == context.site.rank { as_kept(result, context) } else { result })
                }
                Outcome::Reduced(how) => {
                    let len_bytes = context.site.slice.len_bytes as usize;
                    let output = mine.unwrap_or_else(|| context.memory.scratch(len_bytes));
                    self.round.reduce(how, &output, context);
                    Some(output)
                }
            }
        };
        context.inputs.clear();
        context.effects.extend(result.is_some().then_some(Effect::Summed { seq: header.seq }));
        let same = if let Outcome::Copy(source) = outcome { Some(source) } else { None };
        self.answer(header, same, result.as_ref(), context);
        self.round.clear();
        Ok(())
    }

    /// Owner with an optimizer: makes the sum, in this rank's own memory if it has some here. Unless the word is here already, who
    /// contributed hears that its contribution is in.
    fn wait_for_word<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        outcome: &Outcome,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let sum = match *outcome {
            Outcome::Reduced(how) => {
                let len_bytes = context.site.slice.len_bytes as usize;
                // Where this rank is in the round and gets its result: it may be in no round and ask, or be late for this one.
                let Site { rank, members, rules, .. } = context.site;
                let is_in = members.index_of(rank).and_then(|index| self.round.of(index)).is_some();
                // Where members may be lost a contribution stays where it is.
                let is_answered = is_in && rules.answered != Answered::WhoAsks && !rules.recoverable;
                let mine = self.mine.as_ref().filter(|_| is_answered).map(|mine| mine.memory.clone());
                let sum = mine.unwrap_or_else(|| context.memory.scratch(len_bytes));
                self.round.reduce(how, &sum, context);
                context.effects.push(Effect::Summed { seq: header.seq });
                Some(sum)
            }
            Outcome::Absent | Outcome::Copy(_) => None,
        };
        context.inputs.clear();
        self.round.let_go();
        let (seq, step) = self.round.open().unwrap_or((header.seq, header.step));
        self.pending.sum = Some(WaitingSum { seq, step, of: sum });
        if self.pending.word.is_some() {
            return self.update_when_ready(header, context);
        }
        if self.order.is_some() {
            return self.proceed(header, self.order, context);
        }
        let site = context.site;
        let Site { rank, rules, layer, .. } = site;
        if rules.must_be_in == MustBeIn::Nobody {
            let book = header.book;
            return Err(Error::Config(format!(
                "rank {rank} was not told how to update layer {layer} of book {book}, but contributions come"
            )));
        }
        self.round.tell_summed(header, &site, context);
        context.effects.push(Effect::Waits);
        Ok(())
    }

    /// Owner with an optimizer, or its replica: its program has come to the end of step `header.step`. With an update it is applied to
    /// the sum, and all get the value; without one the round ends as if nobody had contributed, and what is in this rank's own memory is the
    /// sum.
    pub(super) fn proceed<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        update: Option<Update>,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Site { slice, rank, rules, .. } = context.site;
        if rules.fold != Fold::Updated || !slice.is_kept_by(rank) {
            let what = "this rank is told to update what it does not keep";
            return Err(wrong_word(header, what, &context.site));
        }
        // By a program that had said nothing when the last epoch ended.
        let given = self.mine.as_ref().and_then(|mine| mine.given);
        let is_given = given.is_some_and(|(_, step)| header.step <= step);
        if is_given || self.entry.as_ref().is_some_and(|entry| entry.is_late(header.step)) {
            return Ok(());
        }
        let what = match (&self.pending.sum, &self.pending.word) {
            _ if rules.recoverable && self.entry.is_none() => {
                "there is no value to update: load the parameters first".into()
            }
            (_, Some((before, _))) => {
                format!("it is told to go on, but waits for contributions to step {before} yet")
            }
            (Some(WaitingSum { step, .. }), None) if *step != header.step => {
                format!("it is told to go on, but the contributions here are those to step {step}")
            }
            _ => {
                self.pending.word = Some((header.step, update));
                return self.update_when_ready(header, context);
            }
        };
        Err(wrong_word(header, &what, &context.site))
    }

    /// Owner with an optimizer, or its replica: does what can be done of a sum, the word, and what is kept.
    fn update_when_ready<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let keeps = self.is_whole() && self.coming.is_none() || !context.site.rules.recoverable;
        if !keeps || self.pending.word.is_none() {
            return Ok(());
        }
        let Some(WaitingSum { seq, step: summed, of: sum }) = self.pending.sum.take() else { return Ok(()) };
        let Some((step, update)) = self.pending.word.take() else { return Ok(()) };
        let header = &Header { seq, step, ..*header };
        if summed != step {
            let what = format!("it is told to go on, but the contributions here are those to step {summed}");
            return Err(wrong_word(header, &what, &context.site));
        }
        if let Some(replica) = context.site.slice.replica.filter(|replica| *replica != context.site.rank) {
            let payload_bytes = sum.as_ref().map_or(0, |_| context.site.slice.len_bytes);
            let header = Header { kind: Kind::Replicated, argument: 0, payload_bytes, ..*header };
            send(replica, &header, sum.clone(), Flow::Free, context);
        }
        let result = match (sum, update) {
            (Some(sum), Some(update)) => {
                let Some(entry) = &mut self.entry else {
                    let what = "there is no value to update: load the parameters first";
                    return Err(wrong_word(header, what, &context.site));
                };
                let site = context.site;
                let before = (site.rules.answered == Answered::Before).then(|| entry.value().0.clone());
                match entry.update(&update, step, &sum, &site, context.memory) {
                    Ok(value) => Some(as_answered(before.unwrap_or(value), context)),
                    Err(why) => return Err(wrong_word(header, &why, &context.site)),
                }
            }
            _ => None,
        };
        let op = self.round.op();
        self.answer(&Header { op, ..*header }, None, result.as_ref(), context);
        self.round.clear();
        Ok(())
    }

    /// Owner with an optimizer: from now on sums are updated with at once. One that waits is, too.
    pub(super) fn order<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        update: Update,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        self.order = Some(update);
        match self.pending.sum {
            Some(WaitingSum { step, .. }) => self.proceed(&Header { step, ..*header }, Some(update), context),
            None => Ok(()),
        }
    }

    /// The sum of the squares of what waits for its program's word here: nothing before it is complete, 0 if nobody contributed.
    pub(super) fn squares<M: Memory<Chunk = C>>(&self, context: &mut Context<'_, M>) -> Option<f64> {
        let WaitingSum { of, .. } = self.pending.sum.as_ref()?;
        Some(of.as_ref().map_or(0.0, |sum| context.memory.squares(context.site.dtype, sum)))
    }

    /// Owner: takes what it keeps of the slice from `from`; see [`SliceEntry`].
    pub(super) fn load<M: Memory<Chunk = C>>(
        &mut self,
        field: Field,
        updates: u64,
        from: &C,
        context: &mut Context<'_, M>,
    ) -> Result<(), String> {
        SliceEntry::load(&mut self.entry, field, updates, from, context)
    }

    /// Owner: copies what it keeps of the slice to `to`, if it does. How often the value was updated.
    pub(super) fn save<M: Memory<Chunk = C>>(
        &self,
        field: Field,
        to: &C,
        context: &mut Context<'_, M>,
    ) -> Option<u64> {
        let entry = self.entry.as_ref()?;
        entry.save(field, to, context.memory).then(|| entry.updates())
    }

    /// Owner: makes the result and keeps it. In other memory than the last one, which may still be waiting to be sent.
    fn keep<M: Memory<Chunk = C>>(
        &mut self,
        outcome: &Outcome,
        step: Step,
        context: &mut Context<'_, M>,
    ) -> Option<C> {
        let fold = context.site.rules.fold;
        let how = match *outcome {
            Outcome::Absent if fold == Fold::Kept => {
                return self.entry.as_ref().map(|entry| entry.value().0.clone());
            }
            Outcome::Absent => {
                self.entry = None;
                return None;
            }
            Outcome::Copy(_) => Reduction::Sum { divisor: 1 },
            Outcome::Reduced(how) => how,
        };
        let result = context.memory.scratch(context.site.slice.len_bytes as usize);
        self.round.reduce(how, &result, context);
        let last = self.entry.take();
        let before = last.as_ref().filter(|_| fold == Fold::Kept && matches!(outcome, Outcome::Reduced(_)));
        if let Some(before) = before {
            let Context { site, memory, inputs, .. } = context;
            inputs.clear();
            inputs.extend([before.value().0.clone(), result.clone()]);
            memory.reduce(site.dtype, self.round.op().reduction(1), inputs, &result);
        }
        self.entry = Some(SliceEntry::after(last.as_ref(), result.clone(), step));
        Some(result)
    }

    /// Owner: the round has ended; tells all who took part, with the result if they are to have it. One of them may have given it.
    fn answer<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        given_by: Option<Rank>,
        result: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        let Site { rank, members, active, rules, groups, slice, .. } = context.site;
        if slice.replica.is_some() {
            let told = active.after(rank).filter(|to| *to != slice.owner && slice.replica == Some(rank));
            told.for_each(|to| tell(to, header, result, false, context));
            return self.complete(header, result, context);
        }
        let everybody = !rules.keep_results() && groups.is_empty();
        let header = &self.versioned(header, &context.site);
        // A head that has left takes part for the others of its group.
        let told = if groups.is_empty() { active } else { members };
        // Whether it gets the result; nothing if it takes no part.
        let answered = |to: Rank| {
            if everybody {
                return Some(true);
            }
            let what = self.round.of(members.index_of(to)?)?;
            Some(rules.answered != Answered::WhoAsks || what.is_absent())
        };
        let site = context.site;
        for to in told.after(rank) {
            let Some(gets_it) = answered(to) else { continue };
            if gets_it && rules.answered == Answered::All && self.clocks.is_ahead(to, &site) {
                self.clocks.wait(to, *header);
                if rules.fold == Fold::Updated {
                    self.round.tell_summed(header, &site, context);
                }
                continue;
            }
            let same = gets_it && given_by == Some(to);
            tell(to, header, result.filter(|_| gets_it), same, context);
        }
        let Some(gets_it) = answered(rank) else { return };
        if gets_it && rules.answered == Answered::All && self.clocks.is_ahead(rank, &site) {
            self.clocks.wait(rank, *header);
        } else {
            self.complete(header, result.filter(|_| gets_it), context);
        }
    }

    /// An answer says of which step its round is; where there are no rounds it says how often the value was changed.
    fn versioned(&self, header: &Header, site: &Site<'_>) -> Header {
        let one_by_one = site.rules.must_be_in == MustBeIn::Nobody;
        let changes = self.entry.as_ref().filter(|_| one_by_one).map(SliceEntry::updates);
        #[allow(clippy::cast_possible_truncation)] // as on the wire; who compares subtracts
        Header { step: changes.map_or(header.step, |changes| changes as Step), ..*header }
    }

    /// Owner: who need not be in asks when the round has ended, or who is late.
    fn tell_late<M: Memory<Chunk = C>>(&mut self, to: Rank, header: &Header, context: &mut Context<'_, M>) {
        let (result, step) = match &self.entry {
            Some(entry) => {
                let (value, step) = entry.value();
                (Some(as_answered(value.clone(), context)), step)
            }
            None => (None, header.step),
        };
        let header = self.versioned(&Header { step, ..*header }, &context.site);
        if to == context.site.rank {
            self.complete(&header, result.as_ref(), context);
        } else {
            tell(to, &header, result.as_ref(), false, context);
        }
    }

    /// Owner: its own part is through; of what it shall have and made elsewhere it gets a copy.
    fn complete<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        result: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
        let Rules { recoverable, .. } = context.site.rules;
        let elsewhere = context.site.rules.keep_results() || *recoverable;
        if let Some((result, mine)) = result.zip(mine.as_ref()).filter(|_| elsewhere) {
            copy(context.memory, result, mine);
        }
        let there = result.map(|result| mine.as_ref().filter(|_| !recoverable).unwrap_or(result));
        self.spread(header, there, context);
        self.done(header, there, context);
    }

    /// This rank's own part is through: the result is in its memory, and `there`, unless nobody contributed. Where one rank alone
    /// contributed and is lost or late it may have been in the rounds of other slices, and the tensor counts as there: of a sum or an
    /// average this slice is 0 then, and of a copy what was there before.
    fn done<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        there: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        if let Some(mine) = self.mine.take() {
            let Rules { fold, recoverable, stragglers, .. } = &context.site.rules;
            let changes = *fold == Fold::Fresh && mine.op != Op::Copy;
            if there.is_none() && changes && (*recoverable || stragglers.is_some()) {
                context.memory.clear(&mine.memory);
            }
            if let Some(entry) = self.entry.as_mut().filter(|_| *recoverable && *fold == Fold::Updated) {
                if there.is_none() {
                    copy(context.memory, entry.value().0, &mine.memory);
                }
                // Who gives a result may be at the next step already.
                entry.is_over(mine.given.map_or(header.step, |(_, step)| step));
                let keeps = context.site.slice.is_kept_by(context.site.rank);
                if !keeps || self.coming.is_some() {
                    entry.empty(); // the keepers had all when this round ended
                }
                self.take_states();
            }
            let kept = there.filter(|_| context.site.rules.recoverable).cloned();
            let (seq, present, version) = (header.seq, there.is_some(), header.step);
            context.effects.push(Effect::Complete { seq, present, version, kept });
        }
    }
}

/// That a program's word does not fit what its rank has.
fn wrong_word(header: &Header, what: &str, site: &Site<'_>) -> Error {
    let (Site { rank, layer, .. }, Header { book, step, .. }) = (site, header);
    Error::Config(format!("rank {rank}: layer {layer} of book {book}, step {step}: {what}"))
}

/// A result in this rank's memory, which the program may change: where it has to be kept, a copy of it.
fn as_kept<M: Memory>(result: M::Chunk, context: &mut Context<'_, M>) -> M::Chunk {
    if !context.site.rules.recoverable {
        return result;
    }
    let kept = context.memory.scratch(context.site.slice.len_bytes as usize);
    copy(context.memory, &result, &kept);
    kept
}

/// What an owner keeps, as all get it: a value that goes into the next round is rounded for those who get it only. Other results are
/// when they are made.
fn as_answered<M: Memory>(value: M::Chunk, context: &mut Context<'_, M>) -> M::Chunk {
    let Context { site, memory, .. } = context;
    if !site.is_rounded() || site.rules.fold == Fold::Fresh {
        return value;
    }
    let [rounded, expanded] =
        [site.slice.wire_bytes, site.slice.len_bytes].map(|len| memory.scratch(len as usize));
    memory.round(site.wire, &value, &rounded);
    memory.expand(site.wire, &rounded, &expanded);
    expanded
}

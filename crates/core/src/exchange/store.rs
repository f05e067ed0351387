//! The sharded key-value store, bulk-synchronous: every rank pushes its slice to the owner, the owner sums in rank order
//! when the last contribution is in and answers all at once (P3 §4.2: no notify-and-pull).
//!
//! So it is on equal ranks. A book may have other rules ([`crate::roles`]): who must be in, what becomes of contributions, who is
//! answered. What is said below of all ranks then holds of those that take part.
//!
//! Cost for n ranks and S bytes spread evenly over n co-located shards: 2 (n-1)/n S bytes per link and direction, two
//! latencies (Poseidon Table 1 with P1 = P2 = n).
//!
//! **Wire types.** Of a tensor that travels as another type than it has, a worker's contribution is rounded when it is sent
//! ([`crate::node::Node::next_frame`]). The owner adds in fp32, in rank order. Its own contribution is *not* rounded: it need not
//! travel, and the error is smaller. The result is rounded once, and all keep the rounded one, the owner included. So all ranks
//! have the same bits; but they depend on which rank owns the slice. A payload cannot be read into the tensor: answers, too, go
//! to scratch, and are expanded from there.

use super::context::{Context, Effect, Flow, Site};
use super::out_of_step::out_of_step;
use crate::error::Error;
use crate::members::Members;
use crate::memory::Memory;
use crate::reduce::Reduction;
use crate::roles::{Answered, Fold, MustBeIn};
use crate::types::{Dtype, Rank, Seq, Step};
use crate::wire::{Header, Kind, Op, Outgoing, describe, unexpected, wire_argument};

/// This rank's own part in a slice, from submission to completion.
#[derive(Debug)]
struct Mine<C> {
    memory: C,
    seq: Seq,
}

/// One slice in the store: this rank as a worker, and as the owner if it is.
#[derive(Debug)]
pub struct Store<C> {
    mine: Option<Mine<C>>,
    gathering: Gathering<C>,
    /// Of an owner whose rules keep results: the last one, and the step of its round.
    kept: Option<(C, Step)>,
}

impl<C> Default for Store<C> {
    fn default() -> Self {
        Self { mine: None, gathering: Gathering::default(), kept: None }
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
        let Site { rank, slice, dtype, wire, rules, .. } = context.site;
        if !absent && !rules.takes_from(rank) {
            let (book, layer) = (header.book, context.site.layer);
            return Err(Error::Config(format!(
                "rank {rank} contributes to layer {layer} of book {book}, in whose rounds it need not be: it can only ask"
            )));
        }
        self.mine = Some(Mine { memory: memory.clone(), seq: header.seq });
        if slice.owner == rank {
            let what = if absent { Contribution::Absent } else { Contribution::Data(memory) };
            return self.contribute(rank, header, what, context);
        }
        let (frame, flow) = if absent {
            let header = Header { kind: Kind::PushAbsent, ..*header };
            (Outgoing { header, payload: None }, Flow::Free)
        } else {
            let argument = wire_argument(dtype, wire);
            let header = Header { kind: Kind::Push, argument, payload_bytes: slice.wire_bytes, ..*header };
            (Outgoing { header, payload: Some(memory) }, Flow::Window)
        };
        context.effects.push(Effect::Send { to: slice.owner, frame, flow });
        Ok(())
    }

    /// Pushes come to the owner, answers from it and for the round that is open here.
    pub(super) fn expects(&self, from: Rank, header: &Header, site: &Site<'_>) -> bool {
        let wire_bytes = site.slice.wire_bytes;
        let (owner, payload_bytes) = match header.kind {
            Kind::Push if site.rules.takes_from(from) => (site.rank, wire_bytes),
            Kind::PushAbsent => (site.rank, 0),
            Kind::Answer => (from, wire_bytes),
            Kind::AnswerAbsent | Kind::AnswerSame => (from, 0),
            _ => return false,
        };
        site.slice.owner == owner
            && header.payload_bytes == payload_bytes
            && (header.kind.takes_part() || self.mine.as_ref().is_some_and(|mine| mine.seq == header.seq))
    }

    /// Answers go straight into this rank's memory, unless they have to be expanded.
    pub(super) fn destination(&self, header: &Header, site: &Site<'_>) -> Option<C> {
        let straight = header.kind == Kind::Answer && !site.rounds();
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
            (Kind::Push, Some(chunk)) => self.contribute(from, header, Contribution::Data(chunk), context),
            (Kind::PushAbsent, None) => self.contribute(from, header, Contribution::Absent, context),
            (Kind::Answer, Some(chunk)) => {
                if let Some(mine) = self.mine.as_ref().filter(|_| context.site.rounds()) {
                    context.memory.expand(context.site.wire, &chunk, &mine.memory);
                }
                context.effects.push(Effect::Consumed { by: from });
                self.done(header, true, context);
                Ok(())
            }
            (Kind::AnswerAbsent | Kind::AnswerSame, None) => {
                context.effects.push(Effect::Consumed { by: from });
                self.done(header, header.kind != Kind::AnswerAbsent, context);
                Ok(())
            }
            _ => Err(unexpected(from, header)),
        }
    }

    /// A round that only waited for the rank that has left ends now.
    pub(super) fn left<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        match self.gathering.open().filter(|_| self.gathering.complete(&context.site)) {
            Some((seq, step)) => self.finish(&Header { seq, step, ..*header }, context),
            None => Ok(()),
        }
    }

    pub(super) fn missing(&self, site: &Site<'_>, ranks: &mut Vec<Rank>) {
        if self.gathering.open().is_some() {
            ranks.extend(self.gathering.missing(site));
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
        let Some(place) = members.position(from) else { return Err(unexpected(from, header)) };
        let alone = rules.must_be_in == MustBeIn::Nobody;
        if !what.is_data() && !rules.needs(from) && (alone || self.gathering.has_ended(header.seq)) {
            self.tell_late(from, header, context);
            return Ok(());
        }
        if alone {
            self.gathering.forget_round();
        }
        self.gathering
            .add(place, members.count(), header, what)
            .map_err(|why| Error::protocol(from, format!("{}: {why}", describe(from, header))))?;
        if self.gathering.complete(&context.site) { self.finish(header, context) } else { Ok(()) }
    }

    /// Owner: sums in rank order and answers everybody at once.
    fn finish<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        context: &mut Context<'_, M>,
    ) -> Result<(), Error> {
        let Context { site, memory, inputs, .. } = context;
        if self.gathering.steps_differ {
            return Err(out_of_step(site, self.gathering.steps(site.members)));
        }
        let outcome = self.gathering.outcome(site, inputs).map_err(|why| {
            Error::protocol(site.rank, format!("slice {} of book {}: {why}", header.slice, header.book))
        })?;
        let mine = self.mine.as_ref().map(|mine| mine.memory.clone());
        let result = if site.rules.keep_results() {
            self.keep(&outcome, header.step, context)
        } else {
            match outcome {
                Outcome::Absent => None,
                Outcome::Copy(source) => Some(match mine {
                    Some(mine) if source != site.rank => {
                        memory.reduce(site.dtype, Reduction::Sum { divisor: 1 }, inputs, &mine);
                        // Answered from here, so that the source's buffer is free when its window is.
                        mine
                    }
                    _ => inputs[0].clone(),
                }),
                Outcome::Reduced(how) => {
                    let output = mine.unwrap_or_else(|| memory.scratch(site.slice.len_bytes as usize));
                    self.gathering.reduce(how, &output, context);
                    Some(output)
                }
            }
        };
        context.inputs.clear();
        context.effects.extend(result.is_some().then_some(Effect::Summed { seq: header.seq }));
        self.answer(header, &outcome, result.as_ref(), context);
        self.gathering.clear();
        Ok(())
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
            Outcome::Absent if fold == Fold::Kept => return self.kept.as_ref().map(|(kept, _)| kept.clone()),
            Outcome::Absent => {
                self.kept = None;
                return None;
            }
            Outcome::Copy(_) => Reduction::Sum { divisor: 1 },
            Outcome::Reduced(how) => how,
        };
        let result = context.memory.scratch(context.site.slice.len_bytes as usize);
        self.gathering.reduce(how, &result, context);
        let before =
            self.kept.take().filter(|_| fold == Fold::Kept && matches!(outcome, Outcome::Reduced(_)));
        if let Some((before, _)) = before {
            let Context { site, memory, inputs, .. } = context;
            inputs.clear();
            inputs.extend([before, result.clone()]);
            memory.reduce(site.dtype, self.gathering.op.reduction(1), inputs, &result);
        }
        self.kept = Some((result.clone(), step));
        Some(result)
    }

    /// Owner: the round has ended; tells all who took part, with the result if they are to have it.
    fn answer<M: Memory<Chunk = C>>(
        &mut self,
        header: &Header,
        outcome: &Outcome,
        result: Option<&C>,
        context: &mut Context<'_, M>,
    ) {
        let Site { rank, members, active, rules, .. } = context.site;
        let everybody = !rules.keep_results();
        // Whether it gets the result; nothing if it takes no part.
        let answered = |to: Rank| {
            if everybody {
                return Some(true);
            }
            let (what, _) = self.gathering.contributions[members.position(to)?].as_ref()?;
            Some(rules.answered == Answered::All || !what.is_data())
        };
        for to in active.after(rank) {
            let Some(gets_it) = answered(to) else { continue };
            let same = gets_it && matches!(outcome, Outcome::Copy(source) if *source == to);
            tell(to, header, result.filter(|_| gets_it), same, context);
        }
        if let Some(gets_it) = answered(rank) {
            self.complete(header, result.filter(|_| gets_it), context);
        }
    }

    /// Owner: who need not be in asks when the round has ended.
    fn tell_late<M: Memory<Chunk = C>>(&mut self, to: Rank, header: &Header, context: &mut Context<'_, M>) {
        let (result, step) = self.kept.clone().map_or((None, header.step), |(kept, step)| (Some(kept), step));
        let header = Header { step, ..*header };
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
        if let Some(mine) = &self.mine {
            if let Some(result) = result.filter(|_| context.site.rules.keep_results()) {
                let Context { memory, inputs, .. } = context;
                inputs.push(result.clone());
                memory.reduce(Dtype::Bytes, Reduction::Sum { divisor: 1 }, inputs, &mine.memory);
                inputs.clear();
            }
            self.done(header, result.is_some(), context);
        }
    }

    fn done<M: Memory<Chunk = C>>(&mut self, header: &Header, present: bool, context: &mut Context<'_, M>) {
        if self.mine.take().is_some() {
            context.effects.push(Effect::Complete { seq: header.seq, present });
        }
    }
}

/// Sends word that a round has ended: with the result, without one, or that it is what the receiver gave.
fn tell<M: Memory>(
    to: Rank,
    header: &Header,
    result: Option<&M::Chunk>,
    same: bool,
    context: &mut Context<'_, M>,
) {
    let Site { slice, dtype, wire, .. } = context.site;
    let payload = result.filter(|_| !same).cloned();
    let (kind, argument, payload_bytes) = match payload {
        Some(_) => (Kind::Answer, wire_argument(dtype, wire), slice.wire_bytes),
        None if same => (Kind::AnswerSame, 0, 0),
        None => (Kind::AnswerAbsent, 0, 0),
    };
    let frame = Outgoing { header: Header { kind, argument, payload_bytes, ..*header }, payload };
    context.effects.push(Effect::Send { to, frame, flow: Flow::Free });
}

/// What one rank brings to a slice.
#[derive(Debug, Clone)]
enum Contribution<C> {
    /// Numbers.
    Data(C),
    /// Nothing: the parameter was not used on this rank in this step.
    Absent,
}

impl<C> Contribution<C> {
    fn is_data(&self) -> bool {
        matches!(self, Self::Data(_))
    }
}

/// The owner's side of one slice.
#[derive(Debug)]
struct Gathering<C> {
    seq: Seq,
    op: Op,
    step: Step,
    /// By member its contribution, and the step of it.
    contributions: Vec<Option<(Contribution<C>, Step)>>,
    /// Whether two of them differ.
    steps_differ: bool,
    arrived: u32,
}

impl<C> Default for Gathering<C> {
    fn default() -> Self {
        Self { seq: 0, op: Op::Average, step: 0, contributions: Vec::new(), steps_differ: false, arrived: 0 }
    }
}

/// How a slice ended.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// Nobody contributed.
    Absent,
    /// One rank's contribution is the result as it is.
    Copy(Rank),
    /// The contributions, combined.
    Reduced(Reduction),
}

impl<C: Clone> Gathering<C> {
    /// Takes a contribution.
    ///
    /// # Errors
    /// A sentence, if it belongs to another round or operation than those already here, or is the second of its rank.
    fn add(
        &mut self,
        place: usize,
        members: u32,
        &Header { seq, op, step, .. }: &Header,
        what: Contribution<C>,
    ) -> Result<(), String> {
        if self.contributions.is_empty() {
            self.contributions.resize_with(members as usize, || None);
        }
        if self.arrived == 0 {
            if seq <= self.seq {
                return Err(format!("round {seq} again; round {} has ended", self.seq));
            }
            (self.seq, self.op, self.step) = (seq, op, step);
        }
        if seq != self.seq || op != self.op {
            return Err(format!(
                "round {seq} {op:?}, but the others are at round {} {:?} (step {})",
                self.seq, self.op, self.step
            ));
        }
        let contribution = &mut self.contributions[place];
        if contribution.is_some() {
            return Err(format!("a second contribution to round {seq}"));
        }
        *contribution = Some((what, step));
        // Who differs is said when all are in: most ranks are right.
        self.steps_differ |= step != self.step;
        self.arrived += 1;
        Ok(())
    }

    /// Whether a round is open, and its seq and step.
    fn open(&self) -> Option<(Seq, Step)> {
        (self.arrived > 0).then_some((self.seq, self.step))
    }

    /// Whether the round with this number is over.
    fn has_ended(&self, seq: Seq) -> bool {
        seq < self.seq || seq == self.seq && self.arrived == 0
    }

    /// Rounds are not told apart by their numbers.
    fn forget_round(&mut self) {
        self.seq = 0;
    }

    /// Of those that must be in, who has not contributed to the open round.
    fn missing<'a>(&'a self, site: &'a Site<'_>) -> impl Iterator<Item = Rank> + 'a {
        let late = |rank: Rank| site.active.contains(rank) && site.rules.needs(rank);
        let by_member = site.members.iter().zip(&self.contributions);
        by_member.filter(move |(rank, c)| c.is_none() && late(*rank)).map(|(rank, _)| rank)
    }

    /// Whether all that must be in have contributed to an open round.
    fn complete(&self, &Site { members, active, rules, .. }: &Site<'_>) -> bool {
        let everybody = rules.must_be_in == MustBeIn::Everybody;
        if self.arrived == 0 || everybody && self.arrived != active.count() {
            return false;
        }
        // A rank leaves only after all its exchanges are answered. So the contribution of one that has left is for the time
        // after all have left: it knows already that they have, this rank does not, and the round waits for everybody.
        self.contributions.iter().zip(members.iter()).all(|(c, rank)| {
            let goes_on = active.contains(rank);
            c.is_some() == goes_on || goes_on && !rules.needs(rank)
        })
    }

    /// The step of each rank that has contributed.
    fn steps(&self, members: &Members) -> impl Iterator<Item = (Rank, Step)> {
        let steps =
            self.contributions.iter().map(|contribution| contribution.as_ref().map(|(_, step)| *step));
        members.iter().zip(steps).filter_map(|(rank, step)| Some((rank, step?)))
    }

    /// Which of the inputs of [`Gathering::outcome`] is this rank's own, if it has one.
    fn own_input(&self, me: usize) -> Option<usize> {
        let has_data = |c: &Option<(Contribution<C>, Step)>| matches!(c, Some((Contribution::Data(_), _)));
        let before = self.contributions[..me].iter().filter(|c| has_data(c)).count();
        has_data(&self.contributions[me]).then_some(before)
    }

    /// How the round ends; the data in rank order goes to `inputs`.
    ///
    /// # Errors
    /// A sentence, if two ranks contributed to a copy.
    fn outcome(&self, site: &Site<'_>, inputs: &mut Vec<C>) -> Result<Outcome, String> {
        let mut last = None;
        for (rank, contribution) in site.members.iter().zip(&self.contributions) {
            if let Some((Contribution::Data(chunk), _)) = contribution {
                inputs.push(chunk.clone());
                last = Some(rank);
            }
        }
        match (last, self.op) {
            (None, _) => Ok(Outcome::Absent),
            (Some(rank), Op::Copy) if inputs.len() == 1 => Ok(Outcome::Copy(rank)),
            (Some(rank), Op::Copy) => {
                Err(format!("{} ranks contribute to a copy, one of them rank {rank}", inputs.len()))
            }
            (Some(_), op) => Ok(Outcome::Reduced(op.reduction(self.divisor(site)))),
        }
    }

    /// Over how many an average is: those that had to be in.
    fn divisor(&self, site: &Site<'_>) -> u32 {
        match &site.rules.must_be_in {
            MustBeIn::Everybody => site.active.count(),
            MustBeIn::These(these) => these.iter().filter(|rank| site.active.contains(*rank)).count() as u32,
            MustBeIn::Nobody => 1,
        }
    }

    /// Combines the inputs.
    fn reduce<M: Memory<Chunk = C>>(&self, how: Reduction, output: &C, context: &mut Context<'_, M>) {
        let Context { site, memory, inputs, .. } = context;
        if site.rounds() {
            let own = site.members.position(site.rank).and_then(|me| self.own_input(me));
            memory.reduce_rounded(site.wire, how, inputs, own, output);
        } else {
            memory.reduce(site.dtype, how, inputs, output);
        }
    }

    /// Ends the round and drops its contributions.
    fn clear(&mut self) {
        self.contributions.iter_mut().for_each(|c| *c = None);
        (self.arrived, self.steps_differ) = (0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Slice;
    use crate::roles::Rules;
    use proptest::prelude::*;

    fn header(seq: Seq, op: Op) -> Header {
        Header { seq, op, step: 1, ..Header::control(Kind::Push) }
    }

    fn some(ranks: &[u32]) -> Members {
        ranks.iter().copied().map(Rank).collect()
    }

    /// A slice of a book for `members`, of whom `active` have not left.
    fn site<'a>(members: &'a Members, active: &'a Members, rules: &'a Rules, slice: &'a Slice) -> Site<'a> {
        let (rank, dtype) = (slice.owner, Dtype::F32);
        Site { rank, members, active, rules, slice, layer: "layer", dtype, wire: dtype, tensor_bytes: 4 }
    }

    fn slice() -> Slice {
        Slice {
            tensor: 0,
            offset_bytes: 0,
            len_bytes: 4,
            wire_bytes: 4,
            owner: Rank(0),
            at_owner: 0,
            lane: 0,
        }
    }

    #[test]
    fn ends_when_the_last_active_rank_is_in_and_keeps_rank_order() {
        let mut gathering = Gathering::default();
        let (members, active, rules, slice) = (Members::all(4), some(&[0, 2, 3]), Rules::default(), slice());
        let site = site(&members, &active, &rules, &slice);
        for (rank, data) in [(3, Some("d")), (0, None), (2, Some("c"))] {
            assert!(!gathering.complete(&site));
            let what = data.map_or(Contribution::Absent, Contribution::Data);
            gathering.add(rank, 4, &header(1, Op::Average), what).unwrap();
        }
        assert!(gathering.complete(&site));
        let mut inputs = Vec::new();
        let outcome = gathering.outcome(&site, &mut inputs);
        assert_eq!(outcome, Ok(Outcome::Reduced(Reduction::Sum { divisor: 3 })));
        assert_eq!(inputs, ["c", "d"]);
        assert_eq!([0, 2, 3].map(|rank| gathering.own_input(rank)), [None, Some(0), Some(1)]);
        gathering.clear();
        assert!(gathering.open().is_none());
        let again = gathering.add(0, 4, &header(1, Op::Average), Contribution::Absent);
        assert!(again.is_err(), "round 1 has ended");
    }

    #[test]
    fn who_knows_first_that_all_have_left_does_not_end_a_round_alone() {
        let mut gathering = Gathering::default();
        let (everybody, rules, slice) = (Members::all(3), Rules::default(), slice());
        // Rank 2's leave has reached rank 0 but not this rank, which believes that rank 2 goes on.
        gathering.add(0, 3, &header(1, Op::Average), Contribution::Data("a")).unwrap();
        assert!(!gathering.complete(&site(&everybody, &some(&[2]), &rules, &slice)));
        assert!(
            !gathering.complete(&site(&everybody, &everybody, &rules, &slice)),
            "nor when this rank knows too"
        );
    }

    #[test]
    fn refuses_what_does_not_fit_the_open_round() {
        let mut gathering = Gathering::default();
        let mut add = |place, seq, op, what| gathering.add(place, 2, &header(seq, op), what);
        add(0, 5, Op::Copy, Contribution::Data("a")).unwrap();
        assert!(add(0, 5, Op::Copy, Contribution::Absent).unwrap_err().contains("second"));
        assert!(add(1, 6, Op::Copy, Contribution::Absent).is_err());
        assert!(add(1, 5, Op::Sum, Contribution::Absent).is_err());
        add(1, 5, Op::Copy, Contribution::Data("b")).unwrap();
        let (members, rules, slice) = (Members::all(2), Rules::default(), slice());
        let outcome = gathering.outcome(&site(&members, &members, &rules, &slice), &mut Vec::new());
        assert!(outcome.unwrap_err().contains("copy"));
    }

    proptest! {
        /// Any members, any of them that must be in, some of those having left, in any order.
        #[test]
        fn any_subset_may_have_to_be_in(
            places in proptest::collection::btree_map(0u32..40, (any::<bool>(), any::<bool>()), 1..12), rotation in 0usize..12
        ) {
            let members: Members = places.keys().copied().map(Rank).collect();
            let of = |which: fn(&(bool, bool)) -> bool| -> Members {
                places.iter().filter(|(_, is)| which(is)).map(|(rank, _)| Rank(*rank)).collect()
            };
            let (active, must_be_in) = (of(|is| is.0), of(|is| is.0 && is.1));
            let (rules, slice) = (Rules { must_be_in: MustBeIn::These(of(|is| is.1)), ..Rules::default() }, slice());
            let site = site(&members, &active, &rules, &slice);
            let mut gathering = Gathering::default();
            let mut order: Vec<Rank> = must_be_in.iter().collect();
            let len = order.len().max(1);
            order.rotate_left(rotation % len);
            for (i, rank) in order.iter().enumerate() {
                prop_assert!(!gathering.complete(&site));
                if i > 0 {
                    let missing: Members = gathering.missing(&site).collect();
                    let late: Members = order[i..].iter().copied().collect();
                    prop_assert_eq!(missing, late);
                }
                let place = members.position(*rank).unwrap();
                gathering.add(place, members.count(), &header(1, Op::Sum), Contribution::Data(*rank)).unwrap();
            }
            prop_assert_eq!(gathering.complete(&site), !order.is_empty());
            prop_assert_eq!(gathering.divisor(&site), must_be_in.count());
            let mut inputs = Vec::new();
            let outcome = gathering.outcome(&site, &mut inputs);
            prop_assert!(inputs.iter().copied().eq(must_be_in.iter()), "in rank order");
            prop_assert_eq!(outcome == Ok(Outcome::Absent), order.is_empty());
        }
    }
}

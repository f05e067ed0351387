//! A round at its owner, from the first contribution to the last: who is in, who is missing, what it comes to.
//!
//! It knows nothing of answers; those are the store's.

use super::context::{Context, Flow, Site};
use super::frames::send;
use crate::members::Members;
use crate::memory::Memory;
use crate::reduce::Reduction;
use crate::roles::{ClientGroup, MustBeIn};
use crate::types::{Rank, Seq, Step};
use crate::wire::{Header, Kind, Op, Party};

/// What one rank brings to a slice.
#[derive(Debug, Clone)]
pub(super) enum Contribution<C> {
    /// Numbers.
    Data(C),
    /// Numbers that are in the sum.
    Summed,
    /// Nothing: the parameter was not used on this rank in this step.
    Absent,
}

impl<C> Contribution<C> {
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Absent)
    }
}

/// A contribution, its step, and if it is a group's of whom it is.
#[derive(Debug)]
struct Received<C> {
    what: Contribution<C>,
    step: Step,
    party: Party,
}

/// The owner's side of one slice.
#[derive(Debug)]
pub(super) struct Round<C> {
    seq: Seq,
    op: Op,
    step: Step,
    /// By member what it brings.
    contributions: Vec<Option<Received<C>>>,
    /// Whether two of them differ.
    steps_differ: bool,
    arrived: u32,
}

impl<C> Default for Round<C> {
    fn default() -> Self {
        Self { seq: 0, op: Op::Average, step: 0, contributions: Vec::new(), steps_differ: false, arrived: 0 }
    }
}

/// How a round ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Nobody contributed.
    Absent,
    /// One rank's contribution is the result as it is.
    Copy(Rank),
    /// The contributions, combined.
    Reduced(Reduction),
}

impl<C: Clone> Round<C> {
    /// Takes a contribution.
    ///
    /// # Errors
    /// A sentence, if it belongs to another round or operation than those already here, or is the second of its rank.
    pub(super) fn add(
        &mut self,
        index: usize,
        members: u32,
        &Header { seq, op, step, argument, .. }: &Header,
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
        let contribution = &mut self.contributions[index];
        if contribution.is_some() {
            return Err(format!("a second contribution to round {seq}"));
        }
        *contribution = Some(Received { what, step, party: Party::of(argument) });
        // Who differs is said when all are in: most ranks are right.
        self.steps_differ |= step != self.step;
        self.arrived += 1;
        Ok(())
    }

    /// Whether a round is open, and its seq and step.
    pub(super) fn open(&self) -> Option<(Seq, Step)> {
        (self.arrived > 0).then_some((self.seq, self.step))
    }

    /// Of how many ranks there are contributions to the open round, or word that they have none.
    pub(super) fn arrived(&self) -> usize {
        self.arrived as usize
    }

    /// Whether the round with this number is over.
    pub(super) fn has_ended(&self, seq: Seq) -> bool {
        seq < self.seq || seq == self.seq && self.arrived == 0
    }

    /// Rounds are not told apart by their numbers.
    pub(super) fn forget_round(&mut self) {
        self.seq = 0;
    }

    /// Of those that must be in, who has not contributed to the open round.
    pub(super) fn missing<'a>(&'a self, site: &'a Site<'_>) -> impl Iterator<Item = Rank> + 'a {
        let late = |rank: Rank| match site.groups.of(rank) {
            // A head speaks for those of its group that have not left.
            Some(group) => {
                group.head() == rank && group.members.iter().any(|member| site.active.contains(member))
            }
            None => site.active.contains(rank) && site.rules.needs(rank),
        };
        let by_member = site.members.iter().zip(&self.contributions);
        by_member.filter(move |(rank, c)| c.is_none() && late(*rank)).map(|(rank, _)| rank)
    }

    /// Whether all that must be in have contributed to an open round.
    pub(super) fn is_complete(&self, site: &Site<'_>) -> bool {
        let &Site { members, active, rules, .. } = site;
        if !site.groups.is_empty() {
            let nobody = rules.must_be_in == MustBeIn::Nobody;
            return if nobody { self.arrived > 0 } else { self.groups_complete(site) };
        }
        let everybody = rules.must_be_in == MustBeIn::Everybody;
        if self.arrived == 0 || everybody && self.arrived != active.count() {
            return false;
        }
        // A rank leaves only after all its rounds are answered. So the contribution of one that has left is for the time
        // after all have left: it knows already that they have, this rank does not, and the round waits for everybody.
        self.contributions.iter().zip(members.iter()).all(|(c, rank)| {
            let goes_on = active.contains(rank);
            c.is_some() == goes_on || goes_on && !rules.needs(rank)
        })
    }

    /// Whether just so many are in an open round, and not all.
    pub(super) fn has(&self, count: u32) -> bool {
        self.arrived == count
    }

    /// Who leaves tells everybody, but a head and an owner hear of it at different times. So a group is in when it counts as many
    /// ranks as this rank believes are there: else an average would be over those that this rank happens to know of.
    fn groups_complete(&self, &Site { members, active, groups, .. }: &Site<'_>) -> bool {
        let is_in = |group: &ClientGroup| {
            let ranks = group.members.iter().filter(|rank| active.contains(*rank)).count();
            let part = members.index_of(group.head()).and_then(|index| self.contributions[index].as_ref());
            part.map_or(ranks == 0, |part| part.party == Party::new(ranks, active.epoch()))
        };
        self.arrived > 0 && groups.iter().all(is_in)
    }

    /// What is done with the contributions to the open round.
    pub(super) fn op(&self) -> Op {
        self.op
    }

    /// Whether contributions to the open round are of different steps.
    pub(super) fn steps_differ(&self) -> bool {
        self.steps_differ
    }

    /// What this member brought to the open round; nothing if it takes no part.
    pub(super) fn of(&self, index: usize) -> Option<&Contribution<C>> {
        self.contributions.get(index)?.as_ref().map(|part| &part.what)
    }

    /// The step of each rank that has contributed.
    pub(super) fn steps(&self, members: &Members) -> impl Iterator<Item = (Rank, Step)> {
        let steps = self.contributions.iter().map(|part| part.as_ref().map(|part| part.step));
        members.iter().zip(steps).filter_map(|(rank, step)| Some((rank, step?)))
    }

    /// The index of this rank's own contribution among the inputs of [`Round::outcome`], if it has one.
    fn own_input(&self, me: usize) -> Option<usize> {
        let has_data =
            |c: &Option<Received<C>>| matches!(c, Some(Received { what: Contribution::Data(_), .. }));
        let before = self.contributions[..me].iter().filter(|c| has_data(c)).count();
        has_data(&self.contributions[me]).then_some(before)
    }

    /// How the round ends; the data in rank order goes to `inputs`.
    ///
    /// # Errors
    /// A sentence, if two ranks contributed to a copy.
    pub(super) fn outcome(&self, site: &Site<'_>, inputs: &mut Vec<C>) -> Result<Outcome, String> {
        let mut last = None;
        for (rank, contribution) in site.members.iter().zip(&self.contributions) {
            if let Some(Received { what: Contribution::Data(chunk), .. }) = contribution {
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

    /// Over how many an average is: those that had to be in; of a round that did not wait for all, those that are.
    fn divisor(&self, site: &Site<'_>) -> u32 {
        if site.rules.stragglers.is_some() {
            return self.arrived;
        }
        match &site.rules.must_be_in {
            MustBeIn::Everybody => site.active.count(),
            MustBeIn::These(these) => these.iter().filter(|rank| site.active.contains(*rank)).count() as u32,
            // Of one rank, or all of a group.
            MustBeIn::Nobody => {
                self.contributions.iter().flatten().map(|part| part.party.ranks().max(1)).sum()
            }
        }
    }

    /// Combines the inputs.
    pub(super) fn reduce<M: Memory<Chunk = C>>(
        &self,
        how: Reduction,
        output: &C,
        context: &mut Context<'_, M>,
    ) {
        let Context { site, memory, inputs, .. } = context;
        if site.is_rounded() {
            let own = site.members.index_of(site.rank).and_then(|me| self.own_input(me));
            memory.reduce_rounded(site.wire, how, inputs, own, output);
        } else {
            memory.reduce(site.dtype, how, inputs, output);
        }
    }

    /// The sum is made: the round stays open, but its contributions occupy no memory any more.
    pub(super) fn let_go(&mut self) {
        for part in self.contributions.iter_mut().flatten() {
            if let Contribution::Data(_) = part.what {
                part.what = Contribution::Summed;
            }
        }
    }

    /// Tells those whose contributions are in the sum, of the members of `site`: their windows are free again.
    pub(super) fn tell_summed<M: Memory<Chunk = C>>(
        &self,
        header: &Header,
        site: &Site<'_>,
        context: &mut Context<'_, M>,
    ) {
        let header = Header { kind: Kind::Summed, argument: 0, payload_bytes: 0, ..*header };
        for (index, to) in site.members.iter().enumerate() {
            if to != site.rank && matches!(self.of(index), Some(Contribution::Summed)) {
                send(to, &header, None, Flow::Free, context);
            }
        }
    }

    /// Ends the round and drops its contributions.
    pub(super) fn clear(&mut self) {
        self.contributions.iter_mut().for_each(|c| *c = None);
        (self.arrived, self.steps_differ) = (0, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Slice;
    use crate::roles::{Groups, NO_GROUPS, Rules};
    use crate::types::Dtype;
    use crate::wire::Kind;
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
        let (layer, wire, tensor_bytes) = ("layer", dtype, 4);
        let groups = &NO_GROUPS;
        let only_to = None;
        Site { rank, members, active, rules, groups, only_to, slice, layer, dtype, wire, tensor_bytes }
    }

    fn slice() -> Slice {
        Slice {
            tensor: 0,
            offset_bytes: 0,
            len_bytes: 4,
            wire_bytes: 4,
            owner: Rank(0),
            replica: None,
            at_owner: 0,
            lane: 0,
        }
    }

    #[test]
    fn ends_when_the_last_active_rank_is_in_and_keeps_rank_order() {
        let mut round = Round::default();
        let (members, active, rules, slice) = (Members::all(4), some(&[0, 2, 3]), Rules::default(), slice());
        let site = site(&members, &active, &rules, &slice);
        for (rank, data) in [(3, Some("d")), (0, None), (2, Some("c"))] {
            assert!(!round.is_complete(&site));
            let what = data.map_or(Contribution::Absent, Contribution::Data);
            round.add(rank, 4, &header(1, Op::Average), what).unwrap();
        }
        assert!(round.is_complete(&site));
        let mut inputs = Vec::new();
        let outcome = round.outcome(&site, &mut inputs);
        assert_eq!(outcome, Ok(Outcome::Reduced(Reduction::Sum { divisor: 3 })));
        assert_eq!(inputs, ["c", "d"]);
        assert_eq!([0, 2, 3].map(|rank| round.own_input(rank)), [None, Some(0), Some(1)]);
        round.clear();
        assert!(round.open().is_none());
        let again = round.add(0, 4, &header(1, Op::Average), Contribution::Absent);
        assert!(again.is_err(), "round 1 has ended");
    }

    #[test]
    fn who_knows_first_that_all_have_left_does_not_end_a_round_alone() {
        let mut round = Round::default();
        let (everybody, rules, slice) = (Members::all(3), Rules::default(), slice());
        // Rank 2's leave has reached rank 0 but not this rank, which believes that rank 2 goes on.
        round.add(0, 3, &header(1, Op::Average), Contribution::Data("a")).unwrap();
        assert!(!round.is_complete(&site(&everybody, &some(&[2]), &rules, &slice)));
        assert!(
            !round.is_complete(&site(&everybody, &everybody, &rules, &slice)),
            "nor when this rank knows too"
        );
    }

    #[test]
    fn a_group_is_in_when_it_counts_the_ranks_that_are_believed_to_be_there() {
        let (members, rules, slice) = (Members::all(4), Rules::default(), slice());
        let groups = Groups::of_members([some(&[2, 3]), some(&[0, 1])]);
        let pushed = |ranks, epoch| {
            let mut round = Round::default();
            for (head, argument) in
                [(0, Party::new(2, epoch).argument()), (2, Party::new(ranks, epoch).argument())]
            {
                let header = Header { argument, ..header(1, Op::Average) };
                round.add(head, 4, &header, Contribution::Data(head)).unwrap();
            }
            round
        };
        let complete = |round: &Round<usize>, active: &Members, epoch| {
            let active = active.clone().in_epoch(epoch);
            let site = Site { groups: &groups, ..site(&members, &active, &rules, &slice) };
            let divides = round.is_complete(&site).then(|| round.divisor(&site));
            assert_eq!(round.missing(&site).count(), 0, "both heads have pushed");
            divides
        };
        let (everybody, without_3) = (Members::all(4), some(&[0, 1, 2]));
        assert_eq!(complete(&pushed(2, 0), &everybody, 0), Some(4));
        // Rank 3 has left. Its head has heard of it and this rank has not, and the other way round.
        assert_eq!(complete(&pushed(1, 0), &everybody, 0), None);
        assert_eq!(complete(&pushed(1, 0), &without_3, 0), Some(3));
        // Of the time after all have left, which this rank does not know yet.
        assert_eq!(complete(&pushed(2, 1), &everybody, 0), None);
        assert_eq!(complete(&pushed(2, 1), &everybody, 1), Some(4));
        // Without the one that is not in, its head is missed, for the others of its group.
        let mut round = Round::default();
        let header = Header { argument: Party::new(2, 0).argument(), ..header(1, Op::Average) };
        round.add(0, 4, &header, Contribution::Data(0)).unwrap();
        for (active, late) in [(some(&[0, 1, 3]), vec![Rank(2)]), (some(&[0, 1]), vec![])] {
            let site = Site { groups: &groups, ..site(&members, &active, &rules, &slice) };
            assert_eq!(round.missing(&site).collect::<Vec<_>>(), late);
            assert_eq!(round.is_complete(&site), late.is_empty());
        }
    }

    #[test]
    fn refuses_what_does_not_fit_the_open_round() {
        let mut round = Round::default();
        let mut add = |index, seq, op, what| round.add(index, 2, &header(seq, op), what);
        add(0, 5, Op::Copy, Contribution::Data("a")).unwrap();
        assert!(add(0, 5, Op::Copy, Contribution::Absent).unwrap_err().contains("second"));
        assert!(add(1, 6, Op::Copy, Contribution::Absent).is_err());
        assert!(add(1, 5, Op::Sum, Contribution::Absent).is_err());
        add(1, 5, Op::Copy, Contribution::Data("b")).unwrap();
        let (members, rules, slice) = (Members::all(2), Rules::default(), slice());
        let outcome = round.outcome(&site(&members, &members, &rules, &slice), &mut Vec::new());
        assert!(outcome.unwrap_err().contains("copy"));
    }

    proptest! {
        /// Any members, any of them that must be in, some of those having left, in any order.
        #[test]
        fn any_subset_may_have_to_be_in(
            drawn in proptest::collection::btree_map(0u32..40, (any::<bool>(), any::<bool>()), 1..12), rotation in 0usize..12
        ) {
            let members: Members = drawn.keys().copied().map(Rank).collect();
            let of = |which: fn(&(bool, bool)) -> bool| -> Members {
                drawn.iter().filter(|(_, is)| which(is)).map(|(rank, _)| Rank(*rank)).collect()
            };
            let (active, must_be_in) = (of(|is| is.0), of(|is| is.0 && is.1));
            let (rules, slice) = (Rules { must_be_in: MustBeIn::These(of(|is| is.1)), ..Rules::default() }, slice());
            let site = site(&members, &active, &rules, &slice);
            let mut round = Round::default();
            let mut order: Vec<Rank> = must_be_in.iter().collect();
            let len = order.len().max(1);
            order.rotate_left(rotation % len);
            for (i, rank) in order.iter().enumerate() {
                prop_assert!(!round.is_complete(&site));
                if i > 0 {
                    let missing: Members = round.missing(&site).collect();
                    let late: Members = order[i..].iter().copied().collect();
                    prop_assert_eq!(missing, late);
                }
                let index = members.index_of(*rank).unwrap();
                round.add(index, members.count(), &header(1, Op::Sum), Contribution::Data(*rank)).unwrap();
            }
            prop_assert_eq!(round.is_complete(&site), !order.is_empty());
            prop_assert_eq!(round.divisor(&site), must_be_in.count());
            let mut inputs = Vec::new();
            let outcome = round.outcome(&site, &mut inputs);
            prop_assert!(inputs.iter().copied().eq(must_be_in.iter()), "in rank order");
            prop_assert_eq!(outcome == Ok(Outcome::Absent), order.is_empty());
        }
    }
}

//! Results: who contributed what to which round, and what must come out of it.

use super::update::Values;
use super::{Checker, Violation, check, order};
use penstock_core::Route;
use penstock_core::layout::{Book, Tensor};
use penstock_core::optimizer::Update;
use penstock_core::roles::Fold;
use penstock_core::types::{BookId, Rank, Seq, SliceId, TensorId};
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What must come out of a round: bytes, or nothing because nobody contributed. Bytes are `None` in virtual memory.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Expected {
    Absent,
    /// Somebody contributed, but the step was not made. Owners, and heads of groups, may have summed in their memory.
    NotMade,
    Present(Option<Vec<u8>>),
}

#[derive(Debug)]
struct RankRecord {
    absent: bool,
    /// What the memory held at the submission.
    bytes: Option<Box<[u8]>>,
    /// By slice of the tensor: completions.
    completed: Vec<u32>,
}

#[derive(Debug)]
struct RoundRecord {
    op: Op,
    active: u32,
    parts: Vec<Option<RankRecord>>,
    /// Where owners update values: the ranks that have told theirs to go on, and what they said.
    told: BTreeSet<Rank>,
    update: Option<Update>,
    expected: Option<Expected>,
}

/// The independent record of all rounds.
#[derive(Debug)]
pub struct Ledger {
    books: Vec<Arc<Book>>,
    ranks: u32,
    rounds: BTreeMap<(BookId, TensorId, Seq), RoundRecord>,
    /// Of books whose owners update them: each tensor, as it is after the rounds so far.
    values: BTreeMap<(BookId, TensorId), Values>,
    /// And who has lent the memory of its own.
    lent: BTreeSet<(Rank, BookId, TensorId)>,
}

/// What a rank says about a slice.
#[derive(Debug, Clone, Copy)]
pub struct Completion<'a> {
    /// The rank.
    pub rank: Rank,
    /// The book.
    pub book: BookId,
    /// The slice.
    pub slice: SliceId,
    /// The round.
    pub seq: Seq,
    /// Whether anybody contributed.
    pub present: bool,
    /// What is in the slice's memory, unless that is virtual.
    pub bytes: Option<&'a [u8]>,
}

impl Ledger {
    /// An empty record.
    #[must_use]
    pub fn new(books: Vec<Arc<Book>>, ranks: u32) -> Self {
        Self { books, ranks, rounds: BTreeMap::new(), values: BTreeMap::new(), lent: BTreeSet::new() }
    }

    /// A rank takes part in a round with what its memory holds; `active` ranks will.
    ///
    /// # Errors
    /// [`Checker::Protocol`] if the simulated programs themselves disagree.
    pub fn submit(
        &mut self,
        rank: Rank,
        submission: &crate::program::Submission,
        seq: Seq,
        bytes: Option<Box<[u8]>>,
    ) -> Result<(), Violation> {
        let (book, tensor) = (submission.book, submission.tensor);
        let slices = self.books[usize::from(book)].slices_of(tensor).len();
        let round = self.rounds.entry((book, tensor, seq)).or_insert_with(|| RoundRecord {
            op: submission.op,
            active: submission.active,
            parts: (0..self.ranks).map(|_| None).collect(),
            told: BTreeSet::new(),
            update: None,
            expected: None,
        });
        let same = (round.op, round.active) == (submission.op, submission.active);
        let part = &mut round.parts[rank.index()];
        check(same && part.is_none(), Checker::Protocol, || {
            format!("the programs disagree about round {seq} of tensor {tensor} of book {book}, rank {rank}")
        })?;
        *part = Some(RankRecord { absent: submission.absent, bytes, completed: vec![0; slices] });
        Ok(())
    }

    /// What a tensor begins with, on every rank.
    pub fn load(&mut self, book: BookId, tensor: TensorId, bytes: Option<Box<[u8]>>, lent_by: Option<Rank>) {
        self.lent.extend(lent_by.map(|rank| (rank, book, tensor)));
        self.values
            .entry((book, tensor))
            .or_insert_with(|| Values::new(bytes.unwrap_or_default().into_vec()));
    }

    /// A rank tells what it owns of a tensor to go on.
    ///
    /// # Errors
    /// [`Checker::Protocol`] if the simulated programs themselves disagree.
    pub fn proceed(
        &mut self,
        rank: Rank,
        name: (BookId, TensorId, Seq),
        update: Option<Update>,
    ) -> Result<(), Violation> {
        let round = self.rounds.get_mut(&name);
        let agree = round.is_some_and(|round| {
            let first = round.told.is_empty();
            round.update = if first { update } else { round.update };
            round.told.insert(rank) && round.update == update
        });
        check(agree, Checker::Protocol, || format!("the programs disagree about the update of {name:?}"))
    }

    /// Whether this rank has told all that it owns of a book to go on with a round.
    #[must_use]
    pub fn has_told(&self, rank: Rank, book: BookId, seq: Seq) -> bool {
        let count = self.books[usize::from(book)].tensors.len() as TensorId;
        let told =
            |tensor| self.rounds.get(&(book, tensor, seq)).is_some_and(|round| round.told.contains(&rank));
        (0..count).all(told)
    }

    /// A slice is complete on a rank: exactly once, not before all took part, and exact.
    ///
    /// # Errors
    /// What was violated.
    pub fn complete(&mut self, completion: &Completion<'_>) -> Result<(), Violation> {
        let Completion { rank, book, slice, seq, .. } = *completion;
        let name = || format!("slice {slice} of book {book}, round {seq}, rank {rank}");
        let (tensor, ids) = self.tensor_of(book, slice);
        let layout = &self.books[usize::from(book)];
        let round = self.rounds.get_mut(&(book, tensor, seq));
        let Some((round, part)) = round.and_then(|round| {
            let part = round.parts[rank.index()].as_mut()?;
            part.completed[(slice - ids.start) as usize] += 1;
            let completed = part.completed[(slice - ids.start) as usize];
            Some((round, completed))
        }) else {
            return Err(Violation::new(Checker::ExactlyOnce, format!("{} was not submitted", name())));
        };
        check(part == 1, Checker::ExactlyOnce, || format!("{} completes {part} times", name()))?;
        let arrived = round.parts.iter().flatten().count();
        check(arrived == round.active as usize, Checker::NobodyForgotten, || {
            format!("{} is complete when {arrived} of {} ranks took part", name(), round.active)
        })?;
        if layout.roles.rules.fold == Fold::Updated {
            let owner = layout.slices[slice as usize].owner;
            check(round.told.contains(&owner), Checker::NobodyForgotten, || {
                format!("{} is complete before its owner {owner} was told to go on", name())
            })?;
        }
        if round.expected.is_none() {
            let sum = expected(layout, tensor, round);
            round.expected = Some(match self.values.get_mut(&(book, tensor)) {
                None => sum,
                Some(values) => updated(&layout.tensors[tensor as usize], values, sum, round.update),
            });
        }
        self.check_exact(completion, Checker::Exact)
    }

    /// The program reads a result, slice by slice, some time after it was complete.
    ///
    /// # Errors
    /// What was violated.
    pub fn read(&self, completion: &Completion<'_>) -> Result<(), Violation> {
        self.check_exact(completion, Checker::ResultStays)
    }

    /// A rank reads what all ranks contributed to a gather: by rank the bytes, `None` where nothing is said to have come.
    ///
    /// # Errors
    /// `exact` if it is not what they submitted, or comes from others than those who took part.
    pub fn gathered(
        &self,
        rank: Rank,
        (book, tensor, seq): (BookId, TensorId, Seq),
        parts: &[Option<Option<Vec<u8>>>],
        exact: Checker,
    ) -> Result<(), Violation> {
        let name = || format!("gather {seq} of tensor {tensor} of book {book}, rank {rank}");
        let Some(round) = self.rounds.get(&(book, tensor, seq)) else {
            return Err(Violation::new(Checker::ExactlyOnce, format!("{} was not submitted", name())));
        };
        let owner = self.books[usize::from(book)].tensors[tensor as usize].owner;
        for (other, part) in round.parts.iter().enumerate().filter(|(other, _)| *other != rank.index()) {
            let got = parts.get(other).and_then(Option::as_ref);
            check(part.is_some() == got.is_some(), Checker::NobodyForgotten, || {
                format!("{}: rank {other} took part: {}", name(), part.is_some())
            })?;
            if let (Some(RankRecord { bytes: Some(want), .. }), Some(Some(got))) = (part, got) {
                // To others than the tensor's owner, if it has one, contributions are empty.
                let want = if owner.is_none_or(|owner| owner == rank) { &**want } else { &[] };
                check_bytes(want, got, exact, || format!("{}, from rank {other}", name()))?;
            }
        }
        Ok(())
    }

    /// Bytes and presence are as expected; `exact` is to blame if bytes differ.
    fn check_exact(&self, completion: &Completion<'_>, exact: Checker) -> Result<(), Violation> {
        let Completion { rank, book, slice, seq, present, bytes } = *completion;
        let (tensor, _) = self.tensor_of(book, slice);
        let layout = &self.books[usize::from(book)].slices[slice as usize];
        let range =
            layout.offset_bytes as usize..(layout.offset_bytes + u64::from(layout.len_bytes)) as usize;
        let round = &self.rounds[&(book, tensor, seq)];
        let group = self.books[usize::from(book)].roles.groups.of(rank);
        let is_head = group.is_some_and(|group| group.head() == rank);
        let name = || {
            format!(
                "slice {slice} of book {book} ({:?} of tensor {tensor}), round {seq}, rank {rank}",
                round.op
            )
        };
        let Some(expected) = &round.expected else {
            return Err(Violation::new(Checker::ExactlyOnce, format!("{} is read but not complete", name())));
        };
        let wanted = !matches!(expected, Expected::Absent | Expected::NotMade);
        check(present == wanted, Checker::AbsentUntouched, || {
            format!("{}: the rank is told present={present}", name())
        })?;
        let Some(bytes) = bytes else { return Ok(()) };
        match expected {
            Expected::Present(Some(want)) => check_bytes(&want[range], bytes, exact, name),
            Expected::NotMade if layout.owner == rank || is_head => Ok(()),
            Expected::Absent | Expected::NotMade => {
                let before = round.parts[rank.index()].as_ref().and_then(|part| part.bytes.as_deref());
                check_bytes(before.map_or(&[], |all| &all[range]), bytes, Checker::AbsentUntouched, name)
            }
            Expected::Present(None) => Ok(()),
        }
    }

    fn tensor_of(&self, book: BookId, slice: SliceId) -> (TensorId, std::ops::Range<SliceId>) {
        let book = &self.books[usize::from(book)];
        let tensor = book.slices[slice as usize].tensor;
        (tensor, book.slices_of(tensor))
    }

    /// What an owner keeps in a lane, where the rules of a book say so: the last results, or values and their states.
    #[must_use]
    pub fn kept_bytes(&self, owner: Rank, lane: u32) -> u64 {
        let of_tensor = |book: BookId, layout: &Book, tensor: TensorId| {
            let mut rounds = self.rounds.range((book, tensor, 0)..=(book, tensor, Seq::MAX));
            let last = rounds.next_back().and_then(|(_, round)| round.expected.as_ref());
            let here = layout.slices_of(tensor).map(|slice| &layout.slices[slice as usize]);
            let here = here.filter(|slice| slice.owner == owner && slice.lane == lane);
            let bytes: u64 = here.map(|slice| u64::from(slice.len_bytes)).sum();
            if let Some(values) = self.values.get(&(book, tensor)) {
                let lent = layout.may_lend(tensor) && self.lent.contains(&(owner, book, tensor));
                return bytes * (u64::from(!lent) + values.states());
            }
            if last.is_some_and(|last| *last != Expected::Absent) { bytes } else { 0 }
        };
        let books = (0..).zip(&self.books).filter(|(_, book)| book.roles.rules.keep_results());
        let of_store = |book: &Book, tensor| book.tensors[tensor as usize].route == Route::STORE;
        books
            .flat_map(|(id, book)| {
                let tensors = (0..book.tensors.len() as u32).filter(|tensor| of_store(book, *tensor));
                tensors.map(move |tensor| of_tensor(id, book, tensor))
            })
            .sum()
    }

    /// At the end: every slice of every submission is complete.
    ///
    /// # Errors
    /// [`Checker::ExactlyOnce`].
    pub fn finish(&self) -> Result<(), Violation> {
        for ((book, tensor, seq), round) in &self.rounds {
            for (rank, part) in round.parts.iter().enumerate() {
                let all = part.as_ref().is_none_or(|part| part.completed.iter().all(|count| *count == 1));
                check(all, Checker::ExactlyOnce, || {
                    format!(
                        "tensor {tensor} of book {book}, round {seq}, rank {rank} is not complete at the end"
                    )
                })?;
            }
        }
        Ok(())
    }
}

fn check_bytes(
    want: &[u8],
    got: &[u8],
    checker: Checker,
    name: impl FnOnce() -> String,
) -> Result<(), Violation> {
    check(want == got, checker, || {
        let at = want.iter().zip(got).position(|(a, b)| a != b).unwrap_or(want.len().min(got.len()));
        format!("{}: byte {at} of {} differs from what was expected", name(), want.len())
    })
}

/// What a rank gets of a tensor that its owners update, and the values as they are from now on.
fn updated(layout: &Tensor, values: &mut Values, sum: Expected, update: Option<Update>) -> Expected {
    match (sum, update) {
        (Expected::Absent, _) => Expected::Absent,
        (_, None) => Expected::NotMade,
        (Expected::Present(Some(gradient)), Some(update)) => {
            values.update(&update, layout.dtype, &gradient);
            let rounds = layout.wire != layout.dtype;
            let value = values.value();
            Expected::Present(Some(if rounds { order::through(layout.wire, value) } else { value.to_vec() }))
        }
        (sum, Some(_)) => sum,
    }
}

/// The result, recomputed element by element, slice by slice.
fn expected(book: &Book, tensor: TensorId, round: &RoundRecord) -> Expected {
    let layout = &book.tensors[tensor as usize];
    let contributions = || round.parts.iter().map(|part| part.as_ref().filter(|part| !part.absent));
    if contributions().flatten().next().is_none() {
        return Expected::Absent;
    }
    // A gather has no result in the ranks' own memory; what came is checked by [`Ledger::gathered`].
    let Route::Sum(algorithm) = layout.route else { return Expected::Present(None) };
    if contributions().flatten().any(|part| part.bytes.is_none()) {
        return Expected::Present(None);
    }
    let active = round.parts.iter().flatten().count() as u32;
    let Tensor { dtype, wire, .. } = *layout;
    let how = order::Summation { algorithm, dtype, wire, op: round.op, active };
    let mut result = Vec::with_capacity(layout.len_bytes() as usize);
    for slice in &book.slices[layout.first_slice as usize..][..layout.slice_count as usize] {
        let range = slice.offset_bytes as usize..(slice.offset_bytes + u64::from(slice.len_bytes)) as usize;
        let rows: Vec<Option<&[u8]>> =
            contributions().map(|part| part?.bytes.as_deref().map(|bytes| &bytes[range.clone()])).collect();
        let groups = &book.roles.groups;
        let sum = if algorithm == Algorithm::Store && !groups.is_empty() {
            order::reduce_in_groups(how, slice.owner, &rows, groups.iter().map(|group| &group.members))
        } else {
            order::reduce(how, slice.owner, &rows)
        };
        result.extend(sum.unwrap_or_default());
    }
    Expected::Present(Some(result))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Submission;
    use penstock_core::types::Dtype;

    fn ledger() -> Ledger {
        let tensors = vec![Tensor::new("w", 0, Dtype::F32, 2)];
        let book = Book::new("model", vec!["fc".into()], tensors, 2, 1024, 1).unwrap();
        Ledger::new(vec![Arc::new(book)], 2)
    }

    fn bytes(values: [f32; 2]) -> Box<[u8]> {
        values.iter().flat_map(|x| x.to_le_bytes()).collect()
    }

    fn submit(ledger: &mut Ledger, rank: u32, absent: bool, values: [f32; 2]) {
        let (op, gather_bytes) = (Op::Average, None);
        let submission = Submission { book: 0, tensor: 0, op, absent, gather_bytes, active: 2 };
        ledger.submit(Rank(rank), &submission, 1, Some(bytes(values))).unwrap();
    }

    fn complete(ledger: &mut Ledger, present: bool, values: [f32; 2]) -> Option<Checker> {
        let bytes = bytes(values);
        let completion =
            Completion { rank: Rank(1), book: 0, slice: 0, seq: 1, present, bytes: Some(&bytes) };
        ledger.complete(&completion).err().map(|violation| violation.checker)
    }

    #[test]
    fn a_result_is_the_average_of_the_ranks_exactly_once() {
        let mut ledger = ledger();
        assert_eq!(complete(&mut ledger, true, [0.0; 2]), Some(Checker::ExactlyOnce), "never submitted");
        submit(&mut ledger, 1, false, [1.0, 2.0]);
        submit(&mut ledger, 0, false, [3.0, 5.0]);
        assert_eq!(ledger.finish().map_err(|v| v.checker), Err(Checker::ExactlyOnce), "not complete");
        assert_eq!(complete(&mut ledger, true, [2.0, 3.5]), None);
        assert_eq!(complete(&mut ledger, true, [2.0, 3.5]), Some(Checker::ExactlyOnce), "twice");
    }

    #[test]
    fn wrong_bits_and_early_ends_are_found() {
        let mut ledger = ledger();
        submit(&mut ledger, 1, true, [1.0, 2.0]);
        assert_eq!(complete(&mut ledger, true, [1.0, 2.0]), Some(Checker::NobodyForgotten));
        let mut ledger = self::ledger();
        submit(&mut ledger, 1, true, [1.0, 2.0]);
        submit(&mut ledger, 0, false, [3.0, 5.0]);
        assert_eq!(complete(&mut ledger, true, [1.5, 2.500_000_2]), Some(Checker::Exact));
    }

    #[test]
    fn what_nobody_contributed_to_stays_as_it_was() {
        for (present, values, want) in [
            (false, [1.0, 2.0], None),
            (true, [1.0, 2.0], Some(Checker::AbsentUntouched)),
            (false, [0.0, 2.0], Some(Checker::AbsentUntouched)),
        ] {
            let mut ledger = ledger();
            submit(&mut ledger, 0, true, [7.0, 7.0]);
            submit(&mut ledger, 1, true, [1.0, 2.0]);
            assert_eq!(complete(&mut ledger, present, values), want);
        }
    }
}

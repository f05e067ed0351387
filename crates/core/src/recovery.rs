//! What the members of the next epoch do about rounds that the last one has not finished: the same on all, from what each reports.
//!
//! Rounds of a slice in the store are at most one apart: nobody is answered in round s + 1 before all have pushed to it, and who
//! pushes has the answer of s. So of each slice the last answered round decides. Who lacks its result gets it from a member that
//! *holds* it: its program has not used it yet. Contributions to a later round are where they were, and are pushed anew.
//!
//! If nobody holds it, those that have had it have applied it. Then whoever lacks it gets what the result was for: the *state* of the whole tensor,
//! its value and what an optimizer has of it. Nobody can have applied a later round, to which who lacks this one has not
//! contributed.

use crate::limits::SLICES_MAX;
use crate::types::{BookId, Rank, Seq, SliceId, TensorId};

/// Where a slice of a book is on one member when the epoch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct SliceProgress {
    /// The round that it has last submitted.
    pub submitted: Seq,
    /// Whether it has that round's result; else its contribution is where it was.
    pub done: bool,
    /// Whether that result is still where it came to: the program has not used it yet.
    pub held: bool,
}

impl SliceProgress {
    /// The last round whose result it has.
    #[must_use]
    pub fn done_seq(self) -> Seq {
        if self.done { self.submitted } else { self.submitted.saturating_sub(1) }
    }
}

/// What one member has: of each book, in order of their numbers, all slices.
pub type Report = Vec<(BookId, Vec<SliceProgress>)>;

/// The result of a slice's round that some lack, and who gives it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResultGiven {
    /// The book.
    pub book: BookId,
    /// The slice.
    pub slice: SliceId,
    /// The round.
    pub seq: Seq,
    /// Who holds it.
    pub by: Rank,
    /// Who lacks it, in ascending order.
    pub to: Vec<Rank>,
}

/// The state of a tensor after a round that all have applied who have its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateGiven {
    /// The book.
    pub book: BookId,
    /// The tensor.
    pub tensor: TensorId,
    /// Who lacks the result.
    pub to: Rank,
    /// The round.
    pub seq: Seq,
    /// Who has applied it.
    pub by: Rank,
}

/// What is to be done before the next epoch's rounds begin.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct Recovery {
    /// Results that are held, in order of books and slices.
    pub given: Vec<ResultGiven>,
    /// In order of books, tensors and receivers. Who gets a tensor's state gets no result of it.
    pub states: Vec<StateGiven>,
}

/// Makes it of the reports of all members of the next epoch, in ascending order of ranks; `tensor_of` says of which tensor a slice is.
///
/// # Errors
/// A sentence, if members differ in their books, or a slice's rounds are further apart than the protocol allows.
pub fn recovery(
    reports: &[(Rank, Report)],
    tensor_of: impl Fn(BookId, SliceId) -> TensorId,
) -> Result<Recovery, String> {
    let mut found = Recovery::default();
    let Some(((first, shape), others)) = reports.split_first() else { return Ok(found) };
    for (rank, report) in others {
        let alike = report.len() == shape.len()
            && report.iter().zip(shape).all(|(one, other)| one.0 == other.0 && one.1.len() == other.1.len());
        if !alike {
            return Err(format!("rank {rank} has other books open than rank {first}"));
        }
    }
    for (at, (book, slices)) in shape.iter().enumerate() {
        for slice in 0..slices.len() {
            let progress = reports.iter().map(|(rank, report)| (*rank, report[at].1[slice]));
            let at = (*book, slice as SliceId, tensor_of(*book, slice as SliceId));
            of_slice(at, &progress, &mut found)?;
        }
    }
    found.states.sort_unstable();
    found.states.dedup_by_key(|state| (state.book, state.tensor, state.to));
    for given in &mut found.given {
        let tensor = tensor_of(given.book, given.slice);
        let gets_state = |to: &Rank| {
            let states = &found.states;
            states
                .binary_search_by_key(&(given.book, tensor, *to), |state| {
                    (state.book, state.tensor, state.to)
                })
                .is_ok()
        };
        given.to.retain(|to| !gets_state(to));
    }
    found.given.retain(|given| !given.to.is_empty());
    Ok(found)
}

fn of_slice(
    (book, slice, tensor): (BookId, SliceId, TensorId),
    members: &(impl Iterator<Item = (Rank, SliceProgress)> + Clone),
    found: &mut Recovery,
) -> Result<(), String> {
    let seq = members.clone().map(|(_, progress)| progress.done_seq()).max().unwrap_or(0);
    let lacking = members.clone().filter(|(_, progress)| progress.done_seq() < seq);
    for (rank, progress) in lacking.clone() {
        if progress.submitted != seq {
            let at = progress.submitted;
            return Err(format!(
                "rank {rank} is at round {at} of slice {slice} of book {book}, and others have ended {seq}"
            ));
        }
    }
    if lacking.clone().next().is_none() {
        return Ok(());
    }
    let those = |which: &dyn Fn(SliceProgress) -> bool| -> Vec<Rank> {
        members.clone().filter(|(_, progress)| which(*progress)).map(|(rank, _)| rank).collect()
    };
    let holders = those(&|progress| progress.held && progress.submitted == seq);
    let to: Vec<Rank> = lacking.map(|(rank, _)| rank).collect();
    // Whose turn it is goes round with the slices, so that one does not give all. A tensor's state comes whole, so from one.
    if holders.is_empty() {
        let by = those(&|progress| progress.done_seq() == seq)[0];
        found.states.extend(to.into_iter().map(|to| StateGiven { book, tensor, to, seq, by }));
    } else {
        found.given.push(ResultGiven { book, slice, seq, by: holders[slice as usize % holders.len()], to });
    }
    Ok(())
}

/// The bytes of a report: of each book its number, how many slices it has, and runs of slices that are at the same place.
#[must_use]
pub fn encode(report: &Report) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (book, slices) in report {
        bytes.extend(book.to_le_bytes());
        bytes.extend((slices.len() as u32).to_le_bytes());
        for run in slices.chunk_by(|one, next| one == next) {
            let SliceProgress { submitted, done, held } = run[0];
            bytes.extend((run.len() as u32).to_le_bytes());
            bytes.extend(submitted.to_le_bytes());
            bytes.push(u8::from(done) + 2 * u8::from(held));
        }
    }
    bytes
}

/// Reads what [`encode`] wrote.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn decode(bytes: &[u8]) -> Result<Report, String> {
    let mut rest = bytes;
    let mut take = |len: usize| -> Result<&[u8], String> {
        let (first, behind) = rest.split_at_checked(len).ok_or("a report of slices that breaks off")?;
        rest = behind;
        Ok(first)
    };
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
    let mut report = Report::new();
    while let Ok(book) = take(2) {
        let book = number(book) as BookId;
        let count = u64::from(number(take(4)?));
        if count > SLICES_MAX || report.last().is_some_and(|(last, _)| *last >= book) {
            return Err(format!("a report of {count} slices of book {book}, in a wrong place or too many"));
        }
        let mut slices: Vec<SliceProgress> = Vec::new();
        while (slices.len() as u64) < count {
            let run = take(9)?;
            let (len, submitted, flags) = (number(&run[..4]), number(&run[4..8]), run[8]);
            let progress = SliceProgress { submitted, done: flags & 1 == 1, held: flags & 2 == 2 };
            let last = slices.last() == Some(&progress);
            if len == 0 || !matches!(flags, 0 | 1 | 3) || last || slices.len() as u64 + u64::from(len) > count
            {
                return Err(format!("a report of book {book} with a run of {len} slices that cannot be"));
            }
            slices.extend(std::iter::repeat_n(progress, len as usize));
        }
        report.push((book, slices));
    }
    if rest.is_empty() { Ok(report) } else { Err("a report of slices that breaks off".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    fn reports() -> impl Strategy<Value = Report> {
        let progress = (0..4u32, 0..3u8).prop_map(|(seq, which)| at(seq, which > 0, which > 1));
        btree_map(any::<BookId>(), vec(progress, 0..20), 0..4).prop_map(|books| books.into_iter().collect())
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(report in reports()) {
            prop_assert_eq!(decode(&encode(&report)), Ok(report));
        }

        #[test]
        fn any_bytes_decode_to_what_encodes_to_them_or_are_refused(bytes: Vec<u8>) {
            if let Ok(report) = decode(&bytes) {
                prop_assert_eq!(encode(&report), bytes);
            }
        }

        #[test]
        fn what_breaks_off_is_refused(report in reports(), cut in 1..40usize) {
            let bytes = encode(&report);
            let cut = bytes.len().saturating_sub(cut);
            if let Ok(shorter) = decode(&bytes[..cut]) {
                prop_assert!(shorter.len() < report.len() || bytes.is_empty(), "whole books are left");
            }
        }
    }

    fn at(submitted: Seq, done: bool, held: bool) -> SliceProgress {
        SliceProgress { submitted, done, held }
    }

    fn of(ranks: &[(u32, &[SliceProgress])]) -> Result<Recovery, String> {
        let reports: Vec<_> =
            ranks.iter().map(|(rank, slices)| (Rank(*rank), vec![(3, slices.to_vec())])).collect();
        recovery(&reports, |_, slice| slice / 2)
    }

    #[test]
    fn what_some_lack_comes_from_who_holds_it() {
        let (lacks, holds, has) = (at(5, false, false), at(5, true, true), at(6, false, false));
        // Slice 0: rank 1 holds round 5. Slice 1: rank 4, in turn. Slice 2: all have it.
        let found = of(&[(0, &[has, holds, has]), (1, &[holds, lacks, has]), (4, &[lacks, holds, has])]);
        let given = |slice, by, to: &[u32]| ResultGiven {
            book: 3,
            slice,
            seq: 5,
            by: Rank(by),
            to: to.iter().copied().map(Rank).collect(),
        };
        assert_eq!(found, Ok(Recovery { given: vec![given(0, 1, &[4]), given(1, 4, &[1])], states: vec![] }));
    }

    #[test]
    fn what_nobody_holds_comes_as_the_state_of_the_whole_tensor() {
        let (lacks, holds, applied) = (at(5, false, false), at(5, true, true), at(5, true, false));
        // Rank 2 lacks both slices of tensor 0. Rank 1 has slice 1 and lacks slice 0; rank 0 has applied both.
        let found = of(&[(0, &[applied, applied]), (1, &[lacks, holds]), (2, &[lacks, lacks])]);
        let state = |to| StateGiven { book: 3, tensor: 0, to: Rank(to), seq: 5, by: Rank(0) };
        assert_eq!(found, Ok(Recovery { given: vec![], states: vec![state(1), state(2)] }));
    }

    #[test]
    fn members_that_differ_in_their_books_or_are_two_rounds_apart_are_refused() {
        let (here, behind) = (at(5, true, true), at(3, true, true));
        assert!(of(&[(0, &[here]), (1, &[here, here])]).is_err_and(|why| why.contains("other books")));
        assert!(of(&[(0, &[here]), (1, &[behind])]).is_err_and(|why| why.contains("round 3")));
    }
}

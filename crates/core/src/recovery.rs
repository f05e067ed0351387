//! What the members of the next epoch do about rounds that the last one has not finished: the same on all, from what each reports.
//!
//! Rounds of a slice in the store are at most one apart: nobody is answered in round s + 1 before all have pushed to it, and who
//! pushes has the answer of s. So of each slice the last answered round decides. Everybody keeps the last result that it had of each slice
//! ([`crate::node::Action::Complete`]), and gives it to who lacks it, whatever its program has done with it. Contributions to a later round
//! are where they were, and are pushed anew.

use crate::limits::SLICES_MAX;
use crate::types::{BookId, Rank, Seq, SliceId};

/// Where a slice of a book is on one member when the epoch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct SliceProgress {
    /// The round that it has last submitted.
    pub submitted: Seq,
    /// Whether it has that round's result; else its contribution is where it was, and it has the result of the round before.
    pub done: bool,
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
    /// Who has it.
    pub by: Rank,
    /// Who lacks it, in ascending order.
    pub to: Vec<Rank>,
}

/// Which results are given before the next epoch's rounds begin, in order of books and slices. Of the reports of all its members, in
/// ascending order of ranks.
///
/// # Errors
/// A sentence, if members differ in their books, or a slice's rounds are further apart than the protocol allows.
pub fn recovery(reports: &[(Rank, Report)]) -> Result<Vec<ResultGiven>, String> {
    let mut found = Vec::new();
    // Who opens a book later than others has nothing of it yet.
    let Some((first, most)) = reports.iter().max_by_key(|(_, report)| report.len()) else { return Ok(found) };
    for (rank, report) in reports {
        let mut pairs = report.iter().zip(most);
        if !pairs.all(|(one, other)| one.0 == other.0 && one.1.len() == other.1.len()) {
            return Err(format!("rank {rank} has other books open than rank {first}"));
        }
    }
    for (at, (book, slices)) in most.iter().enumerate() {
        for slice in 0..slices.len() {
            let of_report =
                |report: &Report| report.get(at).map(|(_, slices)| slices[slice]).unwrap_or_default();
            let progress = reports.iter().map(|(rank, report)| (*rank, of_report(report)));
            found.extend(of_slice(*book, slice as SliceId, &progress)?);
        }
    }
    Ok(found)
}

fn of_slice(
    book: BookId,
    slice: SliceId,
    members: &(impl Iterator<Item = (Rank, SliceProgress)> + Clone),
) -> Result<Option<ResultGiven>, String> {
    let seq = members.clone().map(|(_, progress)| progress.done_seq()).max().unwrap_or(0);
    let mut to = Vec::new();
    let mut givers = Vec::new();
    for (rank, progress) in members.clone() {
        if progress.done_seq() == seq {
            givers.push(rank);
            continue;
        }
        if progress.submitted != seq {
            let at = progress.submitted;
            return Err(format!(
                "rank {rank} is at round {at} of slice {slice} of book {book}, and others have ended {seq}"
            ));
        }
        to.push(rank);
    }
    // Whose turn it is goes round with the slices, so that one does not give all.
    let by = givers.get(slice as usize % givers.len().max(1)).filter(|_| !to.is_empty());
    Ok(by.map(|by| ResultGiven { book, slice, seq, by: *by, to }))
}

/// The bytes of a report: of each book its number, how many slices it has, and runs of slices that are at the same place.
#[must_use]
pub fn encode(report: &Report) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (book, slices) in report {
        bytes.extend(book.to_le_bytes());
        bytes.extend((slices.len() as u32).to_le_bytes());
        for run in slices.chunk_by(|one, next| one == next) {
            let SliceProgress { submitted, done } = run[0];
            bytes.extend((run.len() as u32).to_le_bytes());
            bytes.extend(submitted.to_le_bytes());
            bytes.push(u8::from(done));
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
            let (len, submitted, done) = (number(&run[..4]), number(&run[4..8]), run[8]);
            let progress = SliceProgress { submitted, done: done == 1 };
            let last = slices.last() == Some(&progress);
            if len == 0 || done > 1 || last || slices.len() as u64 + u64::from(len) > count {
                return Err(format!("a report of book {book} with a run of {len} slices that cannot be"));
            }
            slices.extend(std::iter::repeat_n(progress, len as usize));
        }
        report.push((book, slices));
    }
    if rest.is_empty() { Ok(report) } else { Err("a report of slices that breaks off".into()) }
}

/// The bytes of a plan for the next epoch: what those who stay have reported. Each works out the same from it.
#[must_use]
pub fn encode_plan(reports: &[(Rank, Vec<u8>)]) -> Vec<u8> {
    let mut plan = Vec::new();
    for (rank, report) in reports {
        plan.extend(rank.0.to_le_bytes());
        plan.extend((report.len() as u32).to_le_bytes());
        plan.extend(report);
    }
    plan
}

/// Reads what [`encode_plan`] wrote.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub fn decode_plan(mut plan: &[u8]) -> Result<Vec<(Rank, &[u8])>, String> {
    let broken = || "a plan for the next epoch that breaks off".to_owned();
    let mut reports = Vec::new();
    while !plan.is_empty() {
        let (head, rest) = plan.split_first_chunk::<8>().ok_or_else(broken)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (report, rest) = rest.split_at_checked(number(4) as usize).ok_or_else(broken)?;
        reports.push((Rank(number(0)), report));
        plan = rest;
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    fn reports() -> impl Strategy<Value = Report> {
        let progress = (0..4u32, any::<bool>()).prop_map(|(seq, done)| at(seq, done));
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
        fn a_plan_is_read_as_it_was_written(reports in vec((0..9u32, vec(any::<u8>(), 0..20)), 0..5)) {
            let reports: Vec<(Rank, Vec<u8>)> =
                reports.into_iter().map(|(rank, report)| (Rank(rank), report)).collect();
            let plan = encode_plan(&reports);
            let found = decode_plan(&plan).unwrap();
            prop_assert_eq!(found, reports.iter().map(|(rank, report)| (*rank, report.as_slice())).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_a_plan_or_refused(bytes: Vec<u8>) {
            if let Ok(reports) = decode_plan(&bytes) {
                let reports: Vec<_> = reports.into_iter().map(|(rank, report)| (rank, report.to_vec())).collect();
                prop_assert_eq!(encode_plan(&reports), bytes);
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

    fn at(submitted: Seq, done: bool) -> SliceProgress {
        SliceProgress { submitted, done }
    }

    fn of(ranks: &[(u32, &[SliceProgress])]) -> Result<Vec<ResultGiven>, String> {
        let reports: Vec<_> =
            ranks.iter().map(|(rank, slices)| (Rank(*rank), vec![(3, slices.to_vec())])).collect();
        recovery(&reports)
    }

    #[test]
    fn what_some_lack_comes_from_who_has_it() {
        let (lacks, has, is_ahead) = (at(5, false), at(5, true), at(6, false));
        let given = |slice, by, to: &[u32]| ResultGiven {
            book: 3,
            slice,
            seq: 5,
            by: Rank(by),
            to: to.iter().copied().map(Rank).collect(),
        };
        // Slice 0: rank 1 alone has round 5. Slice 1: rank 4, in turn, which has pushed to the next one. Slice 2: all have it.
        let found =
            of(&[(0, &[lacks, has, is_ahead]), (1, &[has, lacks, has]), (4, &[lacks, is_ahead, has])]);
        assert_eq!(found, Ok(vec![given(0, 1, &[0, 4]), given(1, 4, &[1])]));
    }

    #[test]
    fn rounds_that_nobody_has_ended_are_pushed_anew_and_nothing_is_given() {
        assert_eq!(of(&[(0, &[at(5, false)]), (1, &[at(4, true)])]), Ok(vec![]));
        assert_eq!(of(&[(0, &[at(0, false)]), (1, &[at(1, false)])]), Ok(vec![]));
        // Rank 1 has not opened the book.
        assert_eq!(recovery(&[(Rank(0), vec![(3, vec![at(1, false)])]), (Rank(1), vec![])]), Ok(vec![]));
    }

    #[test]
    fn members_that_differ_in_their_books_or_are_two_rounds_apart_are_refused() {
        let (here, behind) = (at(5, true), at(3, true));
        assert!(of(&[(0, &[here]), (1, &[here, here])]).is_err_and(|why| why.contains("other books")));
        assert!(of(&[(0, &[here]), (1, &[behind])]).is_err_and(|why| why.contains("round 3")));
    }
}

//! What the members of the next epoch do about rounds that the last one has not finished: the same on all, from what each reports.
//!
//! Rounds of a slice in the store are at most one apart: nobody is answered in round s + 1 before all have pushed to it, and who
//! pushes has the answer of s. So of each slice the last answered round decides. Everybody keeps the last result that it had of each slice
//! ([`crate::node::Action::Complete`]), and gives it to who lacks it, whatever its program has done with it. Contributions to a later round
//! are where they were, and are pushed anew.
//!
//! Where owners update what they keep, the states of an optimizer that follow from the last answered round are at the owner and at its replica,
//! unless one of them is lost (`exchange/store.rs`). They are given to who is to keep them next. Until these have them nobody has a
//! later result, and who has given them keeps them: a member that is lost meanwhile does no harm unless it was the last that had them.

use crate::error::Error;
use crate::limits::SLICES_MAX;
use crate::types::{BookId, Rank, Seq, SliceId};

/// Where a slice of a book is on one member when the epoch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct SliceProgress {
    /// The round that it has last submitted.
    pub submitted: Seq,
    /// Whether it has that round's result; else its contribution is where it was, and it has the result of the round before.
    pub done: bool,
    /// Whether it has what an owner keeps as well, as of the last round whose result it has.
    pub keeps: bool,
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

/// What some lack of a slice after a round, and who gives it: the round's result, or the states that follow from it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GivenToOthers {
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
pub fn recovery(reports: &[(Rank, Report)]) -> Result<Vec<GivenToOthers>, String> {
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
            found.extend(of_slice(*book, slice as SliceId, &at_slice(reports, at, slice))?);
        }
    }
    Ok(found)
}

/// Where each member is with one slice of the book that is so many behind the first.
fn at_slice(
    reports: &[(Rank, Report)],
    at: usize,
    slice: usize,
) -> impl Iterator<Item = (Rank, SliceProgress)> + Clone {
    reports.iter().map(move |(rank, report)| {
        let progress = report.get(at).and_then(|(_, slices)| slices.get(slice));
        (*rank, progress.copied().unwrap_or_default())
    })
}

/// Which states are given before the next epoch's rounds end, in order of books and slices, to those who keep them from now on and lack
/// them; or the slices of which nobody has them any more. Of reports that [`recovery`] takes.
///
/// * `keepers`: by slice who keeps it in the next epoch; nobody where owners keep nothing.
///
/// # Errors
/// These slices, each with its book.
pub fn states_given(
    reports: &[(Rank, Report)],
    keepers: impl Fn(BookId, SliceId) -> Option<Vec<Rank>>,
) -> Result<Vec<GivenToOthers>, Vec<(BookId, SliceId)>> {
    let (mut found, mut lost) = (Vec::new(), Vec::new());
    let Some((_, most)) = reports.iter().max_by_key(|(_, report)| report.len()) else { return Ok(found) };
    for (at, (book, slices)) in most.iter().enumerate() {
        for slice in 0..slices.len() {
            let (book, slice) = (*book, slice as SliceId);
            let Some(mut to) = keepers(book, slice) else { continue };
            let members = at_slice(reports, at, slice as usize);
            let seq = members.clone().map(|(_, progress)| progress.done_seq()).max().unwrap_or(0);
            let has = |(_, progress): &(Rank, SliceProgress)| progress.keeps && progress.done_seq() == seq;
            let givers: Vec<Rank> = members.filter(has).map(|(rank, _)| rank).collect();
            to.retain(|rank| !givers.contains(rank));
            to.sort_unstable();
            match givers.get(slice as usize % givers.len().max(1)) {
                Some(by) if !to.is_empty() => found.push(GivenToOthers { book, slice, seq, by: *by, to }),
                Some(_) => {}
                None => lost.push((book, slice)),
            }
        }
    }
    if lost.is_empty() { Ok(found) } else { Err(lost) }
}

fn of_slice(
    book: BookId,
    slice: SliceId,
    members: &(impl Iterator<Item = (Rank, SliceProgress)> + Clone),
) -> Result<Option<GivenToOthers>, String> {
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
    Ok(by.map(|by| GivenToOthers { book, slice, seq, by: *by, to }))
}

/// That nobody is left who has what owners kept of so many slices of a book: these members had it.
#[must_use]
pub fn states_lost(book: &str, slices: usize, gone: &[Rank]) -> Error {
    let named = gone.iter().map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(" and ");
    let reason = format!(
        "{named} were lost together, and with them what only they kept of {book}: the optimizer's states of {slices} slices, which are at \
         an owner and at the next member (update=\"servers\"). The others cannot go on: begin the job anew from a checkpoint \
         (penstock.checkpoint, penstock.resume)"
    );
    Error::PeerLost { rank: gone.first().copied().unwrap_or(Rank(0)), reason }
}

/// The bytes of a report: of each book its number, how many slices it has, and runs of slices that are at the same place.
#[must_use]
pub fn encode(report: &Report) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (book, slices) in report {
        bytes.extend(book.to_le_bytes());
        bytes.extend((slices.len() as u32).to_le_bytes());
        for run in slices.chunk_by(|one, next| one == next) {
            let SliceProgress { submitted, done, keeps } = run[0];
            bytes.extend((run.len() as u32).to_le_bytes());
            bytes.extend(submitted.to_le_bytes());
            bytes.push(u8::from(done) | u8::from(keeps) << 1);
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
            let progress = SliceProgress { submitted, done: flags & 1 != 0, keeps: flags & 2 != 0 };
            let last = slices.last() == Some(&progress);
            if len == 0 || flags > 3 || last || slices.len() as u64 + u64::from(len) > count {
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
        let progress = (0..4u32, any::<bool>(), any::<bool>())
            .prop_map(|(submitted, done, keeps)| SliceProgress { submitted, done, keeps });
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
        SliceProgress { submitted, done, keeps: false }
    }

    fn keeps(submitted: Seq, done: bool) -> SliceProgress {
        SliceProgress { keeps: true, ..at(submitted, done) }
    }

    fn of(ranks: &[(u32, &[SliceProgress])]) -> Result<Vec<GivenToOthers>, String> {
        let reports: Vec<_> =
            ranks.iter().map(|(rank, slices)| (Rank(*rank), vec![(3, slices.to_vec())])).collect();
        recovery(&reports)
    }

    #[test]
    fn what_some_lack_comes_from_who_has_it() {
        let (lacks, has, is_ahead) = (at(5, false), at(5, true), at(6, false));
        let given = |slice, by, to: &[u32]| GivenToOthers {
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
    fn states_come_from_who_has_those_of_the_last_round() {
        let slice = |owner: u32, replica: Option<u32>| -> Vec<Rank> {
            [Some(owner), replica].into_iter().flatten().map(Rank).collect()
        };
        let states = |ranks: &[(u32, SliceProgress)], next: &Vec<Rank>| {
            let reports: Vec<_> =
                ranks.iter().map(|(rank, progress)| (Rank(*rank), vec![(3, vec![*progress])])).collect();
            states_given(&reports, |_, _| Some(next.clone()))
        };
        let given = |by, to: &[u32]| {
            Ok(vec![GivenToOthers {
                book: 3,
                slice: 0,
                seq: 5,
                by: Rank(by),
                to: to.iter().copied().map(Rank).collect(),
            }])
        };
        // Rank 2 was the owner and is lost; its replica 3 has them. What rank 1 has is of the round before.
        let found =
            states(&[(0, at(5, true)), (1, keeps(5, false)), (3, keeps(6, false))], &slice(1, Some(3)));
        assert_eq!(found, given(3, &[1]));
        let found = states(&[(0, at(5, true)), (1, at(5, false)), (3, keeps(5, true))], &slice(0, Some(1)));
        assert_eq!(found, given(3, &[0, 1]));
        assert_eq!(states(&[(0, keeps(5, true)), (1, keeps(6, false))], &slice(1, Some(0))), Ok(vec![]));
        // Nobody has those of round 5 any more.
        let lost = states(&[(0, at(5, true)), (1, keeps(5, false))], &slice(1, Some(0)));
        assert_eq!(lost, Err(vec![(3, 0)]));
        let report = vec![(Rank(0), vec![(3, vec![at(5, true)])])];
        assert_eq!(states_given(&report, |_, _| None), Ok(vec![]), "nothing is kept");
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

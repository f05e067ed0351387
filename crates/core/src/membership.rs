//! Who took part in a job from which step on, and what of its steps was whole by then: a log that is the same on all that are left.
//!
//! Rounds of slices go on under new members wherever they are when an epoch ends. A *program* counts steps: it deals samples, scales learning
//! rates, divides by the number of ranks. For it new members count from a step that no rank has begun when they are chosen, so
//! that all begin it alike ([`MembershipEntry::step`]). Whoever begins a step says so beforehand, and what it has begun is in its report.
//!
//! Of steps before that some were averaged over the last members whole, and of others some slices or all were averaged without those that
//! are lost ([`MembershipEntry::whole`]): what these had of such a step, their samples for instance, does not count as seen. A later epoch may
//! have fewer whole rounds: if only a member that is lost by then had the result of one, the others make it anew. So a member has been in
//! all rounds up to the least that any epoch since its loss says. Entries stay as they are: who reads one early and who reads it late read
//! the same.

use crate::recovery::Report;
use crate::types::{BookId, Rank, Seq};

/// One epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipEntry {
    /// Its members, in ascending order.
    pub members: Vec<Rank>,
    /// The first of the program's steps, from 1, that counts with them.
    pub step: u64,
    /// By book, in order of their numbers: so many rounds of each of its slices were over before this epoch began, and somebody who is left
    /// had the result.
    pub whole: Vec<(BookId, Seq)>,
}

/// All epochs so far, the present one last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipLog(Vec<MembershipEntry>);

impl MembershipLog {
    /// Of a job that begins with these.
    #[must_use]
    pub fn new(members: Vec<Rank>) -> Self {
        Self(vec![MembershipEntry { members, step: 1, whole: Vec::new() }])
    }

    /// The next epoch begins: of each of its members the last step that its program has begun, and where its slices are.
    pub fn begin(&mut self, members: &[(Rank, u64, Report)]) {
        let begun = members.iter().map(|(_, begun, _)| *begun).max().unwrap_or(0);
        let last = self.0.last().map_or(1, |entry| entry.step);
        let ranks = members.iter().map(|(rank, ..)| *rank).collect();
        self.0.push(MembershipEntry { members: ranks, step: last.max(begun + 1), whole: whole(members) });
    }

    /// By epoch.
    #[must_use]
    pub fn entries(&self) -> &[MembershipEntry] {
        &self.0
    }
}

/// By book, of each slice the last round whose result somebody has; of all slices the least.
fn whole(members: &[(Rank, u64, Report)]) -> Vec<(BookId, Seq)> {
    let Some((.., most)) = members.iter().max_by_key(|(.., report)| report.len()) else { return Vec::new() };
    let of_book = |(at, (book, slices)): (usize, &(BookId, Vec<_>))| {
        let reported = |slice: usize| {
            members
                .iter()
                .filter_map(move |(.., report)| report.get(at)?.1.get(slice))
                .map(|one| one.done_seq())
        };
        let rounds = (0..slices.len()).map(|slice| reported(slice).max().unwrap_or(0)).min();
        (*book, rounds.unwrap_or(0))
    };
    most.iter().enumerate().map(of_book).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::SliceProgress;

    fn report(slices: &[(Seq, bool)]) -> Report {
        vec![(
            0,
            slices
                .iter()
                .map(|(submitted, done)| SliceProgress { submitted: *submitted, done: *done })
                .collect(),
        )]
    }

    fn log() -> MembershipLog {
        MembershipLog::new([0, 1, 2].map(Rank).to_vec())
    }

    #[test]
    fn new_members_count_from_a_step_that_nobody_has_begun() {
        let mut log = log();
        log.begin(&[(Rank(0), 6, report(&[(6, false)])), (Rank(2), 7, report(&[(6, true)]))]);
        let last = &log.entries()[1];
        assert_eq!((last.members.as_slice(), last.step), ([Rank(0), Rank(2)].as_slice(), 8));
        // Another loss before anybody has come there.
        log.begin(&[(Rank(0), 6, report(&[(7, false)]))]);
        assert_eq!(log.entries()[2].step, 8);
    }

    #[test]
    fn a_round_is_whole_once_somebody_has_each_of_its_slices() {
        let mut log = log();
        log.begin(&[
            (Rank(0), 1, report(&[(6, true), (6, false), (6, false)])),
            (Rank(2), 1, report(&[(6, false), (6, true), (7, false)])),
        ]);
        assert_eq!(log.entries()[1].whole, [(0, 6)]);
        let mut log = self::log();
        log.begin(&[
            (Rank(0), 1, report(&[(6, true), (6, false)])),
            (Rank(2), 1, report(&[(6, false), (6, false)])),
        ]);
        assert_eq!(log.entries()[1].whole, [(0, 5)]);
    }

    #[test]
    fn a_later_epoch_has_not_what_only_one_that_is_lost_had() {
        let mut log = log();
        log.begin(&[(Rank(0), 1, report(&[(6, true)])), (Rank(2), 1, report(&[(6, false)]))]);
        log.begin(&[(Rank(2), 1, report(&[(6, false)]))]);
        let whole = |epoch: usize| log.entries()[epoch].whole.as_slice();
        assert_eq!((whole(0), whole(1), whole(2)), (&[][..], &[(0, 6)][..], &[(0, 5)][..]));
    }

    #[test]
    fn a_book_that_some_have_not_opened_has_no_whole_rounds_of_theirs() {
        let mut log = log();
        log.begin(&[(Rank(0), 1, report(&[(1, false)])), (Rank(2), 0, Report::new())]);
        assert_eq!(log.entries()[1].whole, [(0, 0)]);
        assert_eq!(log.entries()[1].step, 2);
    }
}

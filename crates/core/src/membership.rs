//! Who took part in a job from which step on, and what of its steps was whole by then: a log that is the same on all that are left.
//!
//! Rounds of slices go on under new members wherever they are when an epoch ends. A *program* counts steps: it deals samples, scales learning
//! rates, divides by the number of ranks. For it new members count from a step that no rank has begun when they are chosen, so
//! that all begin it alike ([`MembershipEntry::step`]). Whoever begins a step says so beforehand, and what it has begun is in its report.
//!
//! Of steps before that some were averaged over the last members whole, and of others some slices or all were averaged without those that
//! are lost ([`MembershipEntry::rounds`], and [`MembershipEntry::whole`]): what these had of such a step, their samples for instance, does not count as seen. A later epoch may
//! have fewer whole rounds: if only a member that is lost by then had the result of one, the others make it anew. So a member has been in
//! all rounds up to the least that any epoch since its loss says. Entries stay as they are: who reads one early and who reads it late read
//! the same.
//!
//! A newcomer gets a rank when the epoch ends in which it has asked, whoever was asked. Once it is prepared and all members hear it, another
//! epoch ends, and says from which step on it counts: one that nobody has begun. Samples of that step are dealt to it before it has come. So
//! all programs wait for it there, and the epoch ends once more: the newcomer is a member from then on. If it does not come it counts as lost, and
//! has been whole in nothing. Where a job may have so many members and no more, a newcomer that is prepared waits until there is a place.

use crate::limits::{NEWCOMERS_MAX, RANKS_MAX};
use crate::members::Members;
use crate::recovery::{self, Report};
use crate::types::{BookId, Rank, Seq};
use std::collections::BTreeSet;

/// A newcomer that has asked to take part, by a number that it has drawn.
pub type Knock = u64;

/// What a member says of itself when an epoch ends; of a newcomer only where its lanes are to be reached.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MemberReport {
    /// Where it is to be reached.
    pub host: String,
    /// At which port its lanes of the next epoch listen.
    pub port: u16,
    /// At which port its council listens.
    pub council_port: u16,
    /// The last of the program's steps that it has begun, or dealt samples for.
    pub begun: u64,
    /// Who has asked it to take part, and has no rank yet, in ascending order.
    pub knocks: Vec<Knock>,
    /// Where its slices are.
    pub slices: Report,
}

impl MemberReport {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_text(&mut bytes, &self.host);
        bytes.extend(self.port.to_le_bytes());
        bytes.extend(self.council_port.to_le_bytes());
        bytes.extend(self.begun.to_le_bytes());
        bytes.extend((self.knocks.len() as u16).to_le_bytes());
        self.knocks.iter().for_each(|knock| bytes.extend(knock.to_le_bytes()));
        bytes.extend(recovery::encode(&self.slices));
        bytes
    }

    /// Reads what [`MemberReport::encode`] wrote.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut from = StateReader(bytes);
        let host = from.text()?;
        let (port, council_port) = (from.u16()?, from.u16()?);
        let begun = from.u64()?;
        let knocks = (0..from.u16()?).map(|_| from.u64()).collect::<Result<Vec<Knock>, String>>()?;
        if !knocks.is_sorted_by(|one, next| one < next) {
            return Err("a report of a member with newcomers out of order".into());
        }
        let slices = recovery::decode(from.0)?;
        Ok(Self { host, port, council_port, begun, knocks, slices })
    }
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u16).to_le_bytes());
    to.extend(text.as_bytes());
}

fn put_ranks(to: &mut Vec<u8>, ranks: &[Rank]) {
    to.extend((ranks.len() as u16).to_le_bytes());
    ranks.iter().for_each(|rank| to.extend(rank.0.to_le_bytes()));
}

/// What is left to read.
struct StateReader<'a>(&'a [u8]);

impl StateReader<'_> {
    fn chunk<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (first, rest) =
            self.0.split_first_chunk::<N>().ok_or("what a member says of its job breaks off")?;
        self.0 = rest;
        Ok(*first)
    }

    fn u16(&mut self) -> Result<u16, String> {
        Ok(u16::from_le_bytes(self.chunk()?))
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.chunk()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.chunk()?))
    }

    fn text(&mut self) -> Result<String, String> {
        let len = usize::from(self.u16()?);
        let (text, rest) = self.0.split_at_checked(len).ok_or("what a member says of its job breaks off")?;
        self.0 = rest;
        String::from_utf8(text.to_vec()).map_err(|_| "a member's host that is no text".to_owned())
    }

    fn ranks(&mut self) -> Result<Vec<Rank>, String> {
        let ranks = (0..self.u16()?).map(|_| Ok(Rank(self.u32()?))).collect::<Result<Vec<_>, String>>()?;
        let fit =
            ranks.is_sorted_by(|one, next| one < next) && ranks.last().is_none_or(|last| last.0 < RANKS_MAX);
        if fit { Ok(ranks) } else { Err("ranks out of order in what a member says of its job".into()) }
    }
}

/// A newcomer that has a rank, and is no member yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// The number by which it has asked.
    pub knock: Knock,
    /// Its rank.
    pub rank: Rank,
    /// The first of the program's steps that counts with it, once all members have heard it. All programs wait for it before they begin that.
    pub step: Option<u64>,
}

/// By book, in order of their numbers: runs of slices of which equally many rounds are over, each with how many slices and how many rounds.
pub type RoundsOver = Vec<(BookId, Vec<(u32, Seq)>)>;

/// One epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipEntry {
    /// Whom the program counts, in ascending order: the epoch's members, and the newcomers that are announced by then.
    pub members: Vec<Rank>,
    /// The first of the program's steps, from 1, that counts with them.
    pub step: u64,
    /// The epoch's members, in ascending order: its rounds are over them.
    pub among: Vec<Rank>,
    /// So many rounds of each slice were over before this epoch began, and somebody who is left had the result.
    pub rounds: RoundsOver,
}

impl MembershipEntry {
    /// By book, so many rounds of each of its slices were over.
    #[must_use]
    pub fn whole(&self) -> Vec<(BookId, Seq)> {
        let least = |runs: &[(u32, Seq)]| runs.iter().map(|(_, seq)| *seq).min().unwrap_or(0);
        self.rounds.iter().map(|(book, runs)| (*book, least(runs))).collect()
    }
}

/// All epochs so far, the present one last, and who is to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MembershipLog {
    entries: Vec<MembershipEntry>,
    announced: Vec<Announced>,
    /// The rank of the next newcomer: none is given twice.
    next: Rank,
    /// So many members there may be; 0: any number.
    most: u32,
}

impl MembershipLog {
    /// Of a job that begins with these.
    #[must_use]
    pub fn new(members: Vec<Rank>) -> Self {
        let next = Rank(members.last().map_or(0, |last| last.0 + 1));
        let among = members.clone();
        let entry = MembershipEntry { members, step: 1, among, rounds: Vec::new() };
        Self { entries: vec![entry], announced: Vec::new(), next, most: 0 }
    }

    /// So many members there may be from now on; those that are there stay.
    #[must_use]
    pub fn limited_to(mut self, most: Option<u32>) -> Self {
        self.most = most.unwrap_or(0);
        self
    }

    /// The next epoch begins: what each member of the last one that stays has reported, and newcomers that all of these hear have said; all
    /// members of the next; and whether newcomers were waited for, so that those who are not among them do not come.
    pub fn begin(&mut self, reports: &[(Rank, MemberReport)], members: &[Rank], admits: bool) {
        let is_newcomer = |rank: &Rank| self.announced.iter().any(|one| one.rank == *rank);
        let (heard, mut stay): (Vec<_>, Vec<_>) =
            reports.iter().cloned().partition(|(rank, _)| is_newcomer(rank));
        // One that did not come when it was waited for may be there still.
        stay.retain(|(rank, _)| self.entries.last().is_some_and(|entry| entry.members.contains(rank)));
        let begun = stay.iter().map(|(_, report)| report.begun).max().unwrap_or(0);
        let last = self.entries.last().map_or(1, |entry| entry.step);
        let step = last.max(begun + 1);
        if admits {
            self.announced.retain(|one| one.step.is_none());
        }
        let knocks: BTreeSet<Knock> =
            stay.iter().flat_map(|(_, report)| report.knocks.iter().copied()).collect();
        for knock in knocks {
            if self.announced.iter().all(|one| one.knock != knock) && !self.is_full() {
                self.announced.push(Announced { knock, rank: self.next, step: None });
                self.next = Rank(self.next.0 + 1);
            }
        }
        // Programs wait for all at one step: who is heard while others are to come waits until they have.
        if self.announced.iter().all(|one| one.step.is_none()) {
            let is_heard = |one: &&mut Announced| heard.iter().any(|(rank, _)| *rank == one.rank);
            let places = self.places(members.len());
            self.announced.iter_mut().filter(is_heard).take(places).for_each(|one| one.step = Some(step));
        }
        let among: BTreeSet<Rank> = members.iter().copied().collect();
        let mut counted = among.clone();
        counted.extend(self.announced.iter().filter(|one| one.step.is_some()).map(|one| one.rank));
        let members: Vec<Rank> = counted.into_iter().collect();
        // Who was counted already, and has come, changes nothing.
        let same = self.entries.last().is_some_and(|entry| entry.members == members);
        let step = if same { last } else { step };
        let among = among.into_iter().collect();
        self.entries.push(MembershipEntry { members, step, among, rounds: rounds_over(&stay) });
    }

    /// Whether no newcomer gets a rank any more.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let began = self.entries.first().and_then(|entry| entry.members.last()).map_or(0, |last| last.0 + 1);
        self.next.0 >= (began + NEWCOMERS_MAX).min(RANKS_MAX)
    }

    /// How many more may count where so many do.
    fn places(&self, members: usize) -> usize {
        if self.most == 0 { usize::MAX } else { (self.most as usize).saturating_sub(members) }
    }

    /// Whether another newcomer may count, beside all that count already, those that are to come included.
    #[must_use]
    pub fn has_place(&self) -> bool {
        self.entries.last().is_none_or(|entry| self.places(entry.members.len()) > 0)
    }

    /// By epoch.
    #[must_use]
    pub fn entries(&self) -> &[MembershipEntry] {
        &self.entries
    }

    /// Newcomers that have a rank, and are no members yet.
    #[must_use]
    pub fn announced(&self) -> &[Announced] {
        &self.announced
    }

    /// Those whom programs wait for before they begin this step.
    #[must_use]
    pub fn awaited(&self, step: u64) -> Vec<Rank> {
        let from_there = |one: &&Announced| one.step.is_some_and(|first| first <= step);
        self.announced.iter().filter(from_there).map(|one| one.rank).collect()
    }

    fn put(&self, to: &mut Vec<u8>) {
        to.extend(self.next.0.to_le_bytes());
        to.extend(self.most.to_le_bytes());
        to.extend((self.entries.len() as u32).to_le_bytes());
        for MembershipEntry { members, step, among, rounds } in &self.entries {
            put_ranks(to, members);
            to.extend(step.to_le_bytes());
            put_ranks(to, among);
            to.extend((rounds.len() as u16).to_le_bytes());
            for (book, runs) in rounds {
                to.extend(book.to_le_bytes());
                to.extend((runs.len() as u32).to_le_bytes());
                for (slices, seq) in runs {
                    to.extend(slices.to_le_bytes());
                    to.extend(seq.to_le_bytes());
                }
            }
        }
        to.extend((self.announced.len() as u16).to_le_bytes());
        for Announced { knock, rank, step } in &self.announced {
            to.extend(knock.to_le_bytes());
            to.extend(rank.0.to_le_bytes());
            to.extend(step.unwrap_or(0).to_le_bytes());
        }
    }

    fn read(from: &mut StateReader<'_>) -> Result<Self, String> {
        let (next, most) = (Rank(from.u32()?), from.u32()?);
        let mut entries = Vec::new();
        for _ in 0..from.u32()? {
            let (members, step, among) = (from.ranks()?, from.u64()?, from.ranks()?);
            let mut rounds = RoundsOver::new();
            for _ in 0..from.u16()? {
                let book = from.u16()?;
                let mut runs = Vec::new();
                for _ in 0..from.u32()? {
                    runs.push((from.u32()?, from.u32()?));
                }
                rounds.push((book, runs));
            }
            entries.push(MembershipEntry { members, step, among, rounds });
        }
        let mut announced = Vec::new();
        for _ in 0..from.u16()? {
            let (knock, rank, step) = (from.u64()?, Rank(from.u32()?), from.u64()?);
            announced.push(Announced { knock, rank, step: Some(step).filter(|step| *step > 0) });
        }
        Ok(Self { entries, announced, next, most })
    }
}

/// What a newcomer must know of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobState {
    /// The members of the present epoch.
    pub members: Members,
    /// All epochs so far.
    pub log: MembershipLog,
    /// By rank, where each council is to be reached.
    pub councils: Vec<(String, u16)>,
}

impl JobState {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.members.epoch().to_le_bytes().to_vec();
        put_ranks(&mut bytes, &self.members.iter().collect::<Vec<_>>());
        self.log.put(&mut bytes);
        for (host, port) in &self.councils {
            put_text(&mut bytes, host);
            bytes.extend(port.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`JobState::encode`] wrote.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut from = StateReader(bytes);
        let epoch = from.u32()?;
        let members = from.ranks()?.into_iter().collect::<Members>().in_epoch(epoch);
        let log = MembershipLog::read(&mut from)?;
        let mut councils = Vec::new();
        while !from.0.is_empty() {
            councils.push((from.text()?, from.u16()?));
        }
        if councils.len() < members.end() || log.entries.is_empty() {
            return Err(format!("a job of {} members, and {} addresses", members.count(), councils.len()));
        }
        Ok(Self { members, log, councils })
    }
}

/// By book, of each slice the last round whose result somebody has.
fn rounds_over(members: &[(Rank, MemberReport)]) -> RoundsOver {
    let Some((_, most)) = members.iter().max_by_key(|(_, report)| report.slices.len()) else {
        return RoundsOver::new();
    };
    let of_book = |(at, (book, slices)): (usize, &(BookId, Vec<_>))| {
        let reported = |slice: usize| {
            members
                .iter()
                .filter_map(move |(_, report)| report.slices.get(at)?.1.get(slice))
                .map(|one| one.done_seq())
        };
        let last: Vec<Seq> = (0..slices.len()).map(|slice| reported(slice).max().unwrap_or(0)).collect();
        let runs = last.chunk_by(|one, next| one == next).map(|run| (run.len() as u32, run[0]));
        (*book, runs.collect::<Vec<(u32, Seq)>>())
    };
    most.slices.iter().enumerate().map(of_book).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::SliceProgress;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    fn report(begun: u64, slices: &[(Seq, bool)]) -> MemberReport {
        let slices = slices.iter().map(|(submitted, done)| SliceProgress {
            submitted: *submitted,
            done: *done,
            keeps: false,
        });
        MemberReport { begun, slices: vec![(0, slices.collect())], ..MemberReport::default() }
    }

    fn log() -> MembershipLog {
        MembershipLog::new([0, 1, 2].map(Rank).to_vec())
    }

    /// Of an epoch whose members are those that stay.
    fn begin(log: &mut MembershipLog, stay: &[(Rank, MemberReport)]) {
        let members: Vec<Rank> = stay.iter().map(|(rank, _)| *rank).collect();
        log.begin(stay, &members, false);
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(
            host in "[a-z.]{0,9}",
            [port, council_port] in any::<[u16; 2]>(),
            begun: u64,
            knocks in btree_set(any::<Knock>(), 0..4),
            submitted in vec(0..9u32, 0..9),
        ) {
            let slices = submitted.into_iter().map(|submitted| SliceProgress { submitted, done: true, keeps: false }).collect();
            let knocks = knocks.into_iter().collect();
            let report = MemberReport { host, port, council_port, begun, knocks, slices: vec![(3, slices)] };
            prop_assert_eq!(MemberReport::decode(&report.encode()), Ok(report));
        }

        #[test]
        fn any_bytes_decode_to_what_encodes_to_them_or_are_refused(bytes: Vec<u8>) {
            if let Ok(report) = MemberReport::decode(&bytes) {
                prop_assert_eq!(report.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_newcomer_reads_what_a_member_knows() {
        let mut log = log().limited_to(Some(5));
        let ask = |begun| MemberReport { knocks: vec![9], ..report(begun, &[(3, true)]) };
        begin(&mut log, &[(Rank(0), ask(2)), (Rank(2), ask(4))]);
        let members = [0, 2].map(Rank).into_iter().collect::<Members>().in_epoch(1);
        let councils = vec![("a".to_owned(), 1), (String::new(), 0), ("c.d".to_owned(), 3)];
        let state = JobState { members, log, councils };
        let bytes = state.encode();
        assert_eq!(JobState::decode(&bytes), Ok(state));
        for cut in 0..bytes.len() {
            assert!(JobState::decode(&bytes[..cut]).is_err(), "{cut} of {} bytes", bytes.len());
        }
    }

    #[test]
    fn new_members_count_from_a_step_that_nobody_has_begun() {
        let mut log = log();
        begin(&mut log, &[(Rank(0), report(6, &[(6, false)])), (Rank(2), report(7, &[(6, true)]))]);
        let last = &log.entries()[1];
        assert_eq!((last.members.as_slice(), last.step), ([Rank(0), Rank(2)].as_slice(), 8));
        // Another loss before anybody has come there.
        begin(&mut log, &[(Rank(0), report(6, &[(7, false)]))]);
        assert_eq!(log.entries()[2].step, 8);
    }

    #[test]
    fn newcomers_count_from_a_step_that_nobody_has_begun_and_come_then_or_never() {
        let ranks = |numbers: &[u32]| -> Vec<Rank> { numbers.iter().copied().map(Rank).collect() };
        let with =
            |begun, knocks: &[Knock]| MemberReport { begun, knocks: knocks.to_vec(), ..report(begun, &[]) };
        let announced = |knock, rank, step| Announced { knock, rank: Rank(rank), step };
        let counts = |log: &MembershipLog| {
            let last = log.entries().last().unwrap();
            (last.members.iter().map(|rank| rank.0).collect::<Vec<u32>>(), last.step)
        };
        let (none, mut log) = (MemberReport::default(), log());
        let asked = [(Rank(0), with(4, &[70])), (Rank(1), with(6, &[20, 70])), (Rank(2), with(5, &[]))];
        log.begin(&asked, &ranks(&[0, 1, 2]), false);
        assert_eq!(log.announced(), [announced(20, 3, None), announced(70, 4, None)]);
        assert_eq!(counts(&log), (vec![0, 1, 2], 1), "nothing has changed yet");
        // All hear one of them.
        let heard = |three: &MemberReport| {
            [
                (Rank(0), with(7, &[])),
                (Rank(1), with(7, &[])),
                (Rank(2), with(7, &[])),
                (Rank(3), three.clone()),
            ]
        };
        log.begin(&heard(&none), &ranks(&[0, 1, 2]), false);
        assert_eq!(log.announced(), [announced(20, 3, Some(8)), announced(70, 4, None)]);
        assert_eq!(counts(&log), (vec![0, 1, 2, 3], 8));
        // A loss before it has come; the other is heard now, and waits for its turn. Samples for steps up to 9 are dealt.
        let stay = [(Rank(0), with(9, &[])), (Rank(2), with(8, &[])), (Rank(4), none.clone())];
        log.begin(&stay, &ranks(&[0, 2]), false);
        assert_eq!(log.announced().len(), 2);
        assert_eq!(counts(&log), (vec![0, 2, 3], 10));
        // It has come: that changes nothing. The other is next.
        let stay = [
            (Rank(0), with(11, &[])),
            (Rank(2), with(10, &[])),
            (Rank(3), none.clone()),
            (Rank(4), none.clone()),
        ];
        log.begin(&stay, &ranks(&[0, 2, 3]), true);
        assert_eq!(log.announced(), [announced(70, 4, Some(12))]);
        assert_eq!(counts(&log), (vec![0, 2, 3, 4], 12));
        // It does not come: it counts as lost.
        let stay = [(Rank(0), with(13, &[])), (Rank(2), with(13, &[])), (Rank(3), with(12, &[]))];
        log.begin(&stay, &ranks(&[0, 2, 3]), true);
        assert!(log.announced().is_empty());
        assert_eq!(counts(&log), (vec![0, 2, 3], 14));
    }

    #[test]
    fn a_newcomer_waits_until_there_is_a_place() {
        let ranks = |numbers: &[u32]| -> Vec<Rank> { numbers.iter().copied().map(Rank).collect() };
        let says = |numbers: &[u32], begun| -> Vec<(Rank, MemberReport)> {
            numbers
                .iter()
                .map(|number| (Rank(*number), report(if *number < 3 { begun } else { 0 }, &[])))
                .collect()
        };
        let steps = |log: &MembershipLog| log.announced().iter().map(|one| one.step).collect::<Vec<_>>();
        let mut log = log().limited_to(Some(4));
        assert!(log.has_place());
        let mut asked = says(&[0, 1, 2], 4);
        asked[0].1.knocks = vec![20, 70];
        log.begin(&asked, &ranks(&[0, 1, 2]), false);
        // All hear both: one has a place.
        log.begin(&says(&[0, 1, 2, 3, 4], 7), &ranks(&[0, 1, 2]), false);
        assert_eq!((steps(&log), log.has_place()), (vec![Some(8), None], false));
        log.begin(&says(&[0, 1, 2, 3, 4], 9), &ranks(&[0, 1, 2, 3]), true);
        assert_eq!((steps(&log), log.has_place()), (vec![None], false));
        // A loss: its place is the other one's.
        log.begin(&says(&[0, 2, 3, 4], 11), &ranks(&[0, 2, 3]), false);
        assert_eq!((steps(&log), log.has_place()), (vec![Some(12)], false));
        // Who never comes leaves the place to others.
        log.begin(&says(&[0, 2, 3], 13), &ranks(&[0, 2, 3]), true);
        assert_eq!((steps(&log), log.has_place()), (vec![], true));
    }

    #[test]
    fn a_round_is_whole_once_somebody_has_each_of_its_slices() {
        let mut log = log();
        let all = [
            (Rank(0), &[(6, true), (6, false), (6, false)]),
            (Rank(2), &[(6, false), (6, true), (7, false)]),
        ];
        begin(&mut log, &all.map(|(rank, slices)| (rank, report(1, slices))));
        assert_eq!(log.entries()[1].whole(), [(0, 6)]);
        assert_eq!(log.entries()[1].rounds, [(0, vec![(3, 6)])]);
        let mut log = self::log();
        let all = [(Rank(0), &[(6, true), (6, false)]), (Rank(2), &[(6, false), (6, false)])];
        begin(&mut log, &all.map(|(rank, slices)| (rank, report(1, slices))));
        assert_eq!(log.entries()[1].whole(), [(0, 5)]);
        assert_eq!(log.entries()[1].rounds, [(0, vec![(1, 6), (1, 5)])]);
    }

    #[test]
    fn a_later_epoch_has_not_what_only_one_that_is_lost_had() {
        let mut log = log();
        begin(&mut log, &[(Rank(0), report(1, &[(6, true)])), (Rank(2), report(1, &[(6, false)]))]);
        begin(&mut log, &[(Rank(2), report(1, &[(6, false)]))]);
        let whole = |epoch: usize| log.entries()[epoch].whole();
        assert_eq!((whole(0), whole(1), whole(2)), (vec![], vec![(0, 6)], vec![(0, 5)]));
    }

    #[test]
    fn a_book_that_some_have_not_opened_has_no_whole_rounds_of_theirs() {
        let mut log = log();
        begin(&mut log, &[(Rank(0), report(1, &[(1, false)])), (Rank(2), MemberReport::default())]);
        assert_eq!(log.entries()[1].whole(), [(0, 0)]);
        assert_eq!(log.entries()[1].step, 2);
    }
}

//! Who is late: the question that a rank asks all others when its time is up, and what follows from the replies.
//!
//! A rank that waits sees only whom it waits for, and that one may wait itself. So everybody is asked whom he waits for, and the
//! edges are followed: a rank that is waited for and waits for nobody has not come to where the others are. If there is none,
//! some ranks wait for each other.

use super::verdict::{Evidence, Fault};
use crate::error::Error;
use crate::limits::{RANKS_MAX, REPLY_BYTES_MAX};
use crate::members::Members;
use crate::types::{BookId, Rank, Step, TensorId};
use crate::wire::{Header, Kind};
use std::collections::BTreeSet;

/// How long replies to a question may take: ample for a busy machine's lanes, and a small part of any timeout.
pub const INQUIRY_NS: u64 = 2_000_000_000;
/// How long what all replies show is held back, in case what is waited for is on its way.
pub const DOUBT_NS: u64 = 300_000_000;

/// Longest description of what a rank is in, in bytes.
const WHAT_BYTES_MAX: usize = 200;

/// Whom do you wait for?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Counts the questions of a rank.
    pub number: u32,
    /// The tensor that the asking rank waits for, if it is one: owners say who lacks.
    pub about: Option<(BookId, TensorId)>,
}

impl Question {
    /// The frame that asks it.
    #[must_use]
    pub fn header(&self) -> Header {
        let (book, slice) = self.about.unwrap_or_default();
        let argument = u32::from(self.about.is_some());
        Header { book, slice, seq: self.number, argument, ..Header::control(Kind::Ask) }
    }

    /// What such a frame asks.
    #[must_use]
    pub fn of(header: &Header) -> Self {
        let about = (header.argument == 1).then_some((header.book, header.slice));
        Self { number: header.seq, about }
    }
}

/// What one lane of a rank says to a [`Question`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    /// A thread of its program stands in a call.
    pub blocked: bool,
    /// The ranks that have not come to what this rank takes part in.
    pub late: Vec<Rank>,
    /// The ranks that owe it an answer, and know better who is late.
    pub owners: Vec<Rank>,
    /// Of the tensor that was asked about: who has not contributed here.
    pub missing: Vec<Rank>,
    /// The same of everything that is open here: what others than the asking rank wait for may be anything.
    pub lacking: Vec<Rank>,
    /// What it takes part in, for messages; empty if in nothing.
    pub what: String,
}

impl Reply {
    /// Adds what another lane of the same rank says.
    fn merge(&mut self, other: Self) {
        self.blocked |= other.blocked;
        self.late.extend(other.late);
        self.owners.extend(other.owners);
        self.missing.extend(other.missing);
        self.lacking.extend(other.lacking);
        if self.what.is_empty() {
            self.what = other.what;
        }
    }

    /// The payload.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![u8::from(self.blocked)];
        for list in [&self.late, &self.owners, &self.missing, &self.lacking] {
            bytes.extend((list.len() as u16).to_le_bytes());
            list.iter().for_each(|rank| bytes.extend((rank.0 as u16).to_le_bytes()));
        }
        let end =
            (0..=self.what.len().min(WHAT_BYTES_MAX)).rev().find(|&end| self.what.is_char_boundary(end));
        bytes.extend(&self.what.as_bytes()[..end.unwrap_or(0)]);
        debug_assert!(bytes.len() <= REPLY_BYTES_MAX);
        bytes
    }

    /// Reads what [`Reply::encode`] wrote, in a job of these `members`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn decode(bytes: &[u8], members: &Members) -> Result<Self, String> {
        let wrong = || format!("a word of {} bytes on whom it waits for that makes no sense", bytes.len());
        let (blocked, mut rest) = bytes.split_first().ok_or_else(wrong)?;
        let mut next = |limit: u16| {
            let (pair, after) = rest.split_first_chunk::<2>().ok_or_else(wrong)?;
            rest = after;
            Ok(u16::from_le_bytes(*pair)).and_then(|n| if n < limit { Ok(n) } else { Err(wrong()) })
        };
        let mut list = || {
            let count = next(RANKS_MAX as u16 + 1)?;
            let mut member = || {
                let rank = Rank(u32::from(next(u16::MAX)?));
                if members.contains(rank) { Ok(rank) } else { Err(wrong()) }
            };
            (0..count).map(|_| member()).collect::<Result<Vec<_>, _>>()
        };
        let (late, owners, missing, lacking) = (list()?, list()?, list()?, list()?);
        let what = String::from_utf8_lossy(rest).into_owned();
        Ok(Self { blocked: *blocked == 1, late, owners, missing, lacking, what })
    }
}

/// Whose time is up, and with what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expired {
    /// The tensor that is waited for, if it is one.
    pub about: Option<(BookId, TensorId)>,
    /// The user's iteration, if the wait belongs to one.
    pub step: Option<Step>,
    /// What was waited for and for how long: the beginning of the message.
    pub what: String,
    /// What to do if it is only slow: its end.
    pub hint: String,
}

impl Expired {
    /// Of rank `me`: nobody else can be late for that, or this process cannot find out who ([`super::Over::Fail`]).
    #[must_use]
    pub fn fault(self, me: Rank) -> Fault {
        Fault::own(me, Error::Timeout(self.what))
    }
}

/// A question to which replies come.
#[derive(Debug)]
pub(super) struct Inquiry {
    me: Rank,
    pub(super) expired: Expired,
    pub(super) number: u32,
    since_ns: u64,
    /// Since when all have replied.
    pub(super) all_ns: Option<u64>,
    /// By rank: lanes that have replied, and what they say together.
    told: Vec<(u32, Reply)>,
}

/// What the replies show.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) evidence: Evidence,
    pub(super) culprits: Vec<Rank>,
    /// Who is waited for, and whom they wait for.
    pub(super) text: String,
}

impl Inquiry {
    pub(super) fn new(me: Rank, expired: Expired, number: u32, since_ns: u64, members: &Members) -> Self {
        let told = vec![(0, Reply::default()); members.end()];
        Self { me, expired, number, since_ns, all_ns: None, told }
    }

    /// When it ends.
    pub(super) fn until_ns(&self) -> u64 {
        self.all_ns.map_or(self.since_ns + INQUIRY_NS, |all_ns| all_ns + DOUBT_NS)
    }

    pub(super) fn replied(&mut self, from: Rank, reply: Reply) {
        let (lanes, told) = &mut self.told[from.index()];
        *lanes += 1;
        told.merge(reply);
    }

    pub(super) fn has_replied(&self, rank: Rank, lanes: u32) -> bool {
        self.told[rank.index()].0 >= lanes
    }

    fn reply(&self, rank: Rank) -> Option<&Reply> {
        let (lanes, reply) = &self.told[rank.index()];
        (*lanes > 0).then_some(reply)
    }

    /// Whom a rank waits for, as far as anybody has said.
    fn waits_for(&self, rank: Rank) -> BTreeSet<Rank> {
        let Some(reply) = self.reply(rank) else { return BTreeSet::new() };
        let mut ranks: BTreeSet<Rank> = reply.late.iter().copied().collect();
        for &owner in &reply.owners {
            let others = |lacking: &[Rank]| -> Vec<Rank> {
                lacking.iter().copied().filter(|late| *late != rank).collect()
            };
            let lacking = self.reply(owner).map_or_else(Vec::new, |at_owner| {
                // What it lacks of the tensor may be this rank's own part, held back by a window until something else is answered.
                let missing = if rank == self.me { others(&at_owner.missing) } else { Vec::new() };
                if missing.is_empty() { others(&at_owner.lacking) } else { missing }
            });
            // It lacks nobody: then what it has to send itself has not come.
            ranks.extend(if lacking.is_empty() { vec![owner] } else { lacking });
        }
        ranks.remove(&rank);
        ranks
    }

    /// All ranks that these wait for, directly or through others, themselves included.
    ///
    /// * `heads`: and for owners that are owed an answer themselves, though they lack others.
    fn reached(&self, from: &BTreeSet<Rank>, heads: bool) -> BTreeSet<Rank> {
        let is_owed = |rank: &Rank| self.reply(*rank).is_some_and(|reply| !reply.owners.is_empty());
        let mut reached = from.clone();
        let mut next: Vec<Rank> = from.iter().copied().collect();
        while let Some(rank) = next.pop() {
            let owners = self.reply(rank).filter(|_| heads).map_or(&[][..], |reply| &reply.owners);
            let owners = owners.iter().copied().filter(is_owed);
            next.extend(self.waits_for(rank).into_iter().chain(owners).filter(|late| reached.insert(*late)));
        }
        reached
    }

    /// Who is at fault, as the asking rank must see it.
    pub(super) fn finding(&self) -> Finding {
        let me = self.me;
        let direct = self.waits_for(me);
        let mut reached = self.reached(&direct, false);
        let those = |reached: &BTreeSet<Rank>, which: &dyn Fn(Rank) -> bool| -> Vec<Rank> {
            reached.iter().copied().filter(|rank| *rank != me && which(*rank)).collect()
        };
        let is_absent = |rank| self.reply(rank).is_some() && self.waits_for(rank).is_empty();
        let absent = those(&reached, &is_absent);
        let unanswered = those(&reached, &|rank| self.reply(rank).is_none());
        let (mut evidence, mut culprits) = if !absent.is_empty() {
            (Evidence::Absent, absent)
        } else if !unanswered.is_empty() {
            (Evidence::Unanswered, unanswered)
        } else if reached.is_empty() {
            (Evidence::Unanswered, vec![me])
        } else {
            self.circle(&reached, false)
        };
        if evidence == Evidence::Circle {
            // What the head of a group lacks may be held back by a window until its own owner answers.
            let further = self.reached(&direct, true);
            let absent = those(&further, &is_absent);
            let behind =
                if absent.is_empty() { self.circle(&further, true) } else { (Evidence::Absent, absent) };
            if behind.0 == Evidence::Absent {
                ((evidence, culprits), reached) = (behind, further);
            }
        }
        let text = self.text(&direct, &reached, evidence, &culprits);
        Finding { evidence, culprits, text }
    }

    /// Everybody waits: of those from whom there is no way out, the ones whose programs do not stand in a call, or all.
    ///
    /// * `heads`: as in [`Inquiry::reached`].
    fn circle(&self, reached: &BTreeSet<Rank>, heads: bool) -> (Evidence, Vec<Rank>) {
        let ways: Vec<(Rank, BTreeSet<Rank>)> =
            reached.iter().map(|rank| (*rank, self.reached(&self.waits_for(*rank), heads))).collect();
        let way = |rank: Rank| ways.iter().find(|(of, _)| *of == rank).map(|(_, way)| way);
        let comes_back = |(rank, onward): &&(Rank, BTreeSet<Rank>)| {
            onward.iter().all(|next| way(*next).is_some_and(|way| way.contains(rank)))
        };
        let circle: Vec<Rank> = ways.iter().filter(comes_back).map(|(rank, _)| *rank).collect();
        let away: Vec<Rank> = circle
            .iter()
            .copied()
            .filter(|rank| self.reply(*rank).is_some_and(|reply| !reply.blocked))
            .collect();
        if away.is_empty() { (Evidence::Circle, circle) } else { (Evidence::Absent, away) }
    }

    fn text(
        &self,
        direct: &BTreeSet<Rank>,
        reached: &BTreeSet<Rank>,
        evidence: Evidence,
        culprits: &[Rank],
    ) -> String {
        if direct.is_empty() {
            let me = self.me;
            return format!("what rank {me} has to send is not written yet, and nobody is known to be late");
        }
        let mut parts = vec![format!("it waits for {}", listed(direct.iter()))];
        for rank in reached.iter().filter(|rank| !culprits.contains(rank) || evidence == Evidence::Circle) {
            let (onward, reply) = (self.waits_for(*rank), self.reply(*rank));
            let what = reply.map(|reply| &reply.what[..]).filter(|what| !what.is_empty());
            if !onward.is_empty() {
                let what = what.map_or_else(String::new, |what| format!(" in {what}"));
                parts.push(format!("rank {rank} itself waits for {}{what}", listed(onward.iter())));
            }
        }
        let (listed, one) = (listed(culprits.iter()), culprits.len() == 1);
        parts.push(match evidence {
            Evidence::Circle => {
                format!("so {listed} wait for each other: they make different calls, or in another order")
            }
            Evidence::Unanswered if one => format!("{listed} did not answer when asked whom it waits for"),
            Evidence::Unanswered => format!("{listed} did not answer when asked whom they wait for"),
            _ if one => {
                format!("{listed} did not contribute and waits for nobody: its program computes, or hangs, elsewhere")
            }
            _ => format!("{listed} did not contribute and wait for nobody: their programs compute, or hang, elsewhere"),
        });
        parts.join("; ")
    }
}

fn listed<'a>(ranks: impl ExactSizeIterator<Item = &'a Rank>) -> String {
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", ranks.map(Rank::to_string).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(numbers: &[u32]) -> Vec<Rank> {
        numbers.iter().copied().map(Rank).collect()
    }

    /// Whom it waits for directly, of which owners it waits for answers, and who lacks there; `None`: no answer.
    type Said<'a> = Option<(&'a [u32], &'a [u32], &'a [u32])>;

    /// What each rank has said.
    fn inquiry(answers: &[Said], me: u32) -> Inquiry {
        let expired = Expired { about: None, step: None, what: String::new(), hint: String::new() };
        let mut inquiry = Inquiry::new(Rank(me), expired, 1, 0, &Members::all(answers.len() as u32));
        for (rank, answer) in answers.iter().enumerate() {
            if let Some((late, owners, missing)) = answer {
                let (late, owners, missing) = (ranks(late), ranks(owners), ranks(missing));
                let answer = Reply {
                    blocked: true,
                    late,
                    owners,
                    lacking: missing.clone(),
                    missing,
                    what: "a call".into(),
                };
                inquiry
                    .replied(Rank(rank as u32), Reply::decode(&answer.encode(), &Members::all(9)).unwrap());
            }
        }
        inquiry
    }

    fn found(answers: &[Said], me: u32) -> (Evidence, Vec<u32>) {
        let Finding { evidence, culprits, .. } = inquiry(answers, me).finding();
        (evidence, culprits.iter().map(|rank| rank.0).collect())
    }

    #[test]
    fn an_owner_that_lacks_the_asking_rank_alone_is_asked_whom_else_it_lacks() {
        let mut inquiry = inquiry(&[Some((&[], &[2], &[])), Some((&[], &[], &[])), None], 0);
        let (missing, lacking) = (ranks(&[0]), ranks(&[0, 1]));
        inquiry.replied(Rank(2), Reply { missing, lacking, ..Reply::default() });
        assert_eq!(inquiry.finding().culprits, [Rank(1)]);
    }

    #[test]
    fn who_waits_for_nobody_is_found_behind_those_who_wait() {
        let chain = [Some((&[1][..], &[][..], &[][..])), Some((&[2], &[], &[])), Some((&[], &[], &[]))];
        assert_eq!(found(&chain, 0), (Evidence::Absent, vec![2]));
        let text = inquiry(&chain, 0).finding().text;
        assert!(text.contains("rank 1 itself waits for rank 2 in a call"), "{text}");
    }

    #[test]
    fn an_owner_knows_who_lacks_and_is_not_at_fault_for_computing_itself() {
        // Rank 1 owns what rank 0 waits for, and waits for nobody itself; rank 2 has not contributed there.
        let answers = [Some((&[][..], &[1][..], &[][..])), Some((&[], &[], &[2])), Some((&[], &[], &[]))];
        assert_eq!(found(&answers, 0), (Evidence::Absent, vec![2]));
        // It lacks nobody but the asking rank: then it is what it has not sent.
        let answers = [Some((&[][..], &[1][..], &[][..])), Some((&[], &[], &[0]))];
        assert_eq!(found(&answers, 0), (Evidence::Absent, vec![1]));
    }

    #[test]
    fn what_an_owner_lacks_counts_by_tensor_for_the_asking_rank_alone() {
        // Rank 0 is ahead of the others, who wait for what it has left out and owns.
        let mut inquiry = inquiry(&[None, Some((&[], &[0], &[])), Some((&[], &[0], &[]))], 0);
        let (late, lacking) = (ranks(&[1, 2]), ranks(&[0, 1, 2]));
        let answer = Reply { blocked: true, late: late.clone(), missing: late, lacking, ..Reply::default() };
        inquiry.replied(Rank(0), answer);
        assert_eq!(inquiry.finding().culprits, ranks(&[0, 1, 2]));
    }

    #[test]
    fn who_does_not_answer_is_named_if_nobody_explains_more() {
        let answers = [Some((&[1, 2][..], &[][..], &[][..])), Some((&[2], &[], &[])), None];
        assert_eq!(found(&answers, 0), (Evidence::Unanswered, vec![2]));
        let answers = [Some((&[1, 2][..], &[][..], &[][..])), Some((&[], &[], &[])), None];
        assert_eq!(found(&answers, 0), (Evidence::Absent, vec![1]));
    }

    #[test]
    fn those_who_wait_for_each_other_are_all_named() {
        let circle = [Some((&[1][..], &[][..], &[][..])), Some((&[2], &[], &[])), Some((&[1], &[], &[]))];
        assert_eq!(found(&circle, 0), (Evidence::Circle, vec![1, 2]), "rank 0 only waits for them");
        let everybody =
            [Some((&[1, 2][..], &[][..], &[][..])), Some((&[0, 2], &[], &[])), Some((&[0, 1], &[], &[]))];
        assert_eq!(found(&everybody, 0), (Evidence::Circle, vec![0, 1, 2]));
    }

    #[test]
    fn who_a_head_itself_waits_for_counts_before_those_whom_it_lacks_are_said_to_wait_for_each_other() {
        // Rank 0 is the head of ranks 1 and 2, whose contributions to the next slices windows hold back; rank 3 owns the slice.
        let answers = [
            Some((&[][..], &[3][..], &[1, 2][..])),
            Some((&[], &[0], &[])),
            Some((&[], &[0], &[])),
            Some((&[], &[], &[])),
        ];
        for asking in [0, 1, 2] {
            assert_eq!(found(&answers, asking), (Evidence::Absent, vec![3]), "rank {asking}");
        }
    }

    #[test]
    fn who_computes_behind_a_head_is_named_though_it_is_owed_an_answer_too() {
        // Rank 3 owns what rank 0, the head of ranks 1 and 2, waits for, has not come to it, and has contributed to what windows hold back
        // at ranks 1 and 2.
        let answers = [
            Some((&[1, 2][..], &[3][..], &[1, 2][..])),
            Some((&[], &[0], &[])),
            Some((&[], &[0], &[])),
            None,
        ];
        for asking in [0, 1, 2] {
            let mut inquiry = inquiry(&answers, asking);
            let (owners, lacking) = (ranks(&[0]), ranks(&[3]));
            inquiry.replied(Rank(3), Reply { owners, lacking, ..Reply::default() });
            assert_eq!(inquiry.finding().culprits, [Rank(3)], "rank {asking}");
        }
    }

    #[test]
    fn of_those_who_wait_for_each_other_the_one_is_named_that_does_not_stand_in_a_call() {
        let mut inquiry = inquiry(&[Some((&[1], &[], &[])), None], 0);
        let late = ranks(&[0]);
        inquiry.replied(Rank(1), Reply { blocked: false, late, ..Reply::default() });
        assert_eq!(inquiry.finding().culprits, ranks(&[1]));
    }

    #[test]
    fn lanes_speak_for_their_rank_together() {
        let mut inquiry = inquiry(&[Some((&[1], &[], &[])), None, Some((&[], &[], &[]))], 0);
        inquiry.replied(Rank(1), Reply::default());
        assert!(!inquiry.has_replied(Rank(1), 2));
        inquiry.replied(Rank(1), Reply { late: ranks(&[2]), ..Reply::default() });
        assert!(inquiry.has_replied(Rank(1), 2));
        assert_eq!(inquiry.finding().culprits, ranks(&[2]));
    }

    #[test]
    fn ranks_that_do_not_exist_are_refused() {
        let answer = Reply { late: ranks(&[3]), ..Reply::default() };
        assert!(Reply::decode(&answer.encode(), &Members::all(3)).is_err());
        assert!(
            Reply::decode(&[], &Members::all(3)).is_err()
                && Reply::decode(&[1, 255, 255], &Members::all(3)).is_err()
        );
    }
}

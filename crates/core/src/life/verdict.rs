//! Why a job has failed, and who is at fault: one value, the same on every rank once they have agreed.

use crate::error::Error;
use crate::limits::{CULPRITS_MAX, REASON_BYTES_MAX};
use crate::members::Members;
use crate::types::{Rank, Step};

/// What shows that a rank is at fault. The strongest first: of two verdicts the one with the stronger evidence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Evidence {
    /// The rank says so itself.
    Own = 0,
    /// It sent what the protocol does not allow.
    Frame = 1,
    /// Its connection ended without a goodbye.
    Ended = 2,
    /// Nothing is heard from it, or it cannot be reached.
    Silent = 3,
    /// It has left the job, and is needed.
    Departed = 4,
    /// A wait took too long, and everybody who waits does so for it; it waits for nobody.
    Absent = 5,
    /// A wait took too long, and these ranks wait for each other.
    Circle = 6,
    /// A wait took too long, and the rank that is waited for did not answer when it was asked.
    Unanswered = 7,
}

impl Evidence {
    const ALL: [Self; 8] = [
        Self::Own,
        Self::Frame,
        Self::Ended,
        Self::Silent,
        Self::Departed,
        Self::Absent,
        Self::Circle,
        Self::Unanswered,
    ];

    /// Whether it is that somebody's time was up.
    #[must_use]
    pub fn is_timeout(self) -> bool {
        matches!(self, Self::Absent | Self::Circle | Self::Unanswered)
    }
}

/// An error that this rank has found, and whose fault it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The rank at fault: another one, or this one.
    pub culprit: Rank,
    /// What happened.
    pub error: Error,
}

impl Fault {
    /// Rank `me` has found this, and nobody else is at fault.
    #[must_use]
    pub fn own(me: Rank, error: Error) -> Self {
        Self { culprit: me, error }
    }

    /// The program of rank `me` has failed, and says so.
    #[must_use]
    pub fn of_program(me: Rank, reason: &str) -> Self {
        Self::own(me, Error::PeerLost { rank: me, reason: format!("rank {me} failed: {reason}") })
    }
}

/// Length of a verdict's fields before the culprits.
const FIXED_BYTES: usize = 12;

/// Who is at fault, who says so, and why. Passed on unchanged, so that it is the same wherever it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// What it rests on.
    pub evidence: Evidence,
    /// The user's iteration that was waited for; the largest number if the evidence belongs to none.
    pub step: Step,
    /// Who has found it.
    pub accuser: Rank,
    /// The ranks at fault, at least one, in order, of very many the first [`CULPRITS_MAX`].
    pub culprits: Vec<Rank>,
    /// What happened, for whoever reads the error.
    pub reason: String,
}

/// What decides between verdicts: the lower holds.
pub(super) type Standing = (Evidence, Step, Rank);

impl Verdict {
    /// A verdict whose text and list of culprits fit into a frame.
    #[must_use]
    pub fn new(
        evidence: Evidence,
        step: Option<Step>,
        accuser: Rank,
        mut culprits: Vec<Rank>,
        mut reason: String,
    ) -> Self {
        culprits.truncate(CULPRITS_MAX);
        let end = (0..=reason.len().min(REASON_BYTES_MAX))
            .rev()
            .find(|&end| reason.is_char_boundary(end))
            .unwrap_or(0);
        reason.truncate(end);
        Self { evidence, step: step.unwrap_or(Step::MAX), accuser, culprits, reason }
    }

    /// What rank `me` tells the others of an error that it has found. `at_fault` is whose fault it is, where the error itself does
    /// not say.
    #[must_use]
    pub fn of_error(error: &Error, at_fault: Option<Rank>, step: Option<Step>, me: Rank) -> Self {
        let (evidence, culprit, text) = match error {
            Error::PeerLost { rank, reason } if *rank == me => (Evidence::Own, me, reason.clone()),
            Error::PeerLost { rank, reason } => (Evidence::Silent, *rank, reason.clone()),
            Error::Mismatch { rank, reason, .. } => (Evidence::Frame, *rank, reason.clone()),
            Error::Protocol { peer, .. } => {
                (Evidence::Frame, *peer, format!("rank {me} ended the job: {error}"))
            }
            Error::Timeout(text) => {
                (Evidence::Unanswered, at_fault.unwrap_or(me), format!("rank {me} gave up waiting: {text}"))
            }
            Error::Config(text) | Error::MembersChanged(text) | Error::Authentication(text) => {
                match at_fault.filter(|rank| *rank != me) {
                    Some(peer) => (Evidence::Frame, peer, format!("rank {me} ended the job: {text}")),
                    None => (Evidence::Own, me, format!("rank {me} failed: {text}")),
                }
            }
        };
        Self::new(evidence, step, me, vec![culprit], text)
    }

    /// Whom the next epoch must be without because of this verdict. `None`: rank `me` is at fault itself, and cannot go on. Where a process is
    /// gone, or cannot be heard, nobody: the members see for themselves who is, and a connection that broke leaves nobody out, as long as this
    /// rank `spares` its peer. Who has ended in order has given all that it owed.
    #[must_use]
    pub fn leaves_out(&self, me: Rank, spares: bool) -> Option<&[Rank]> {
        let seen = matches!(self.evidence, Evidence::Ended | Evidence::Silent);
        let spares = spares || self.culprits.contains(&me);
        let out: &[Rank] = if seen && spares { &[] } else { &self.culprits };
        (!out.contains(&me)).then_some(out)
    }

    pub(super) fn standing(&self) -> Standing {
        (self.evidence, self.step, self.accuser)
    }

    /// The rank that errors name: the first of those at fault.
    #[must_use]
    pub fn culprit(&self) -> Rank {
        self.culprits.first().copied().unwrap_or(self.accuser)
    }

    /// What calls of rank `me` raise for it.
    #[must_use]
    pub fn raised_by(&self, me: Rank) -> Fault {
        let (culprit, accuser) = (self.culprit(), self.accuser);
        let reason = if self.culprits.contains(&me) && accuser != me {
            format!("rank {accuser} ended the job and blames this rank, {me}: {}", self.reason)
        } else {
            self.reason.clone()
        };
        let error = if self.evidence.is_timeout() {
            Error::Timeout(reason)
        } else {
            Error::PeerLost { rank: culprit, reason }
        };
        Fault { culprit, error }
    }

    /// The payload of an abort.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.evidence as u8, 0];
        bytes.extend((self.culprits.len() as u16).to_le_bytes());
        bytes.extend(self.step.to_le_bytes());
        bytes.extend(self.accuser.0.to_le_bytes());
        self.culprits.iter().for_each(|rank| bytes.extend(rank.0.to_le_bytes()));
        bytes.extend(self.reason.as_bytes());
        bytes
    }

    /// Reads what [`Verdict::encode`] wrote, in a job of these `members`.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn decode(bytes: &[u8], members: &Members) -> Result<Self, String> {
        let short = || format!("an abort of {} bytes", bytes.len());
        let (fixed, rest) = bytes.split_first_chunk::<FIXED_BYTES>().ok_or_else(short)?;
        let u32_at = |bytes: &[u8], at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let evidence = *Evidence::ALL
            .get(usize::from(fixed[0]))
            .ok_or_else(|| format!("an abort with unknown evidence {}", fixed[0]))?;
        let count = usize::from(u16::from_le_bytes([fixed[2], fixed[3]]));
        if count == 0 || count > CULPRITS_MAX || rest.len() < 4 * count {
            return Err(format!("an abort that blames {count} ranks"));
        }
        let culprits: Vec<Rank> = (0..count).map(|at| Rank(u32_at(rest, 4 * at))).collect();
        let (step, accuser) = (u32_at(fixed, 4), Rank(u32_at(fixed, 8)));
        if let Some(rank) = culprits.iter().chain([&accuser]).find(|rank| !members.contains(**rank)) {
            return Err(format!("an abort that names rank {rank}, which does not exist"));
        }
        let reason = String::from_utf8_lossy(&rest[4 * count..]).into_owned();
        Ok(Self { evidence, step, accuser, culprits, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_inverts_encode(
            evidence in 0..8usize, step: u32, accuser in 0..9u32,
            culprits in proptest::collection::vec(0..9u32, 1..5), reason: String,
        ) {
            let culprits = culprits.into_iter().map(Rank).collect();
            let verdict = Verdict::new(Evidence::ALL[evidence], Some(step), Rank(accuser), culprits, reason);
            prop_assert_eq!(Verdict::decode(&verdict.encode(), &Members::all(9)), Ok(verdict));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes: Vec<u8>) {
            if let Ok(verdict) = Verdict::decode(&bytes, &Members::all(4)) {
                prop_assert!(!verdict.culprits.is_empty() && verdict.culprits.iter().all(|rank| rank.0 < 4));
            }
        }
    }

    #[test]
    fn all_ranks_blame_whom_this_rank_blames() {
        let found = |error: Error, at_fault| {
            let verdict = Verdict::of_error(&error, at_fault, None, Rank(1));
            (verdict.evidence, verdict.culprit())
        };
        let refused = || Error::Authentication("another secret".into());
        assert_eq!(found(refused(), Some(Rank(2))), (Evidence::Frame, Rank(2)), "whose dial was refused");
        for (error, at_fault) in
            [(refused(), Some(Rank(1))), (refused(), None), (Error::Config("no".into()), None)]
        {
            assert_eq!(found(error, at_fault), (Evidence::Own, Rank(1)));
        }
        let lost = |rank| Error::PeerLost { rank, reason: "it is gone".into() };
        assert_eq!(found(lost(Rank(3)), None), (Evidence::Silent, Rank(3)));
        assert_eq!(found(lost(Rank(1)), None).0, Evidence::Own);
        let Fault { culprit, error } = Fault::of_program(Rank(1), "a bad batch");
        assert_eq!(found(error, Some(culprit)), (Evidence::Own, Rank(1)));
    }

    #[test]
    fn a_verdict_reads_the_same_wherever_it_is_raised() {
        let raised = |evidence, me| {
            let reason = "late".into();
            let Fault { culprit, error } =
                Verdict::new(evidence, Some(7), Rank(1), vec![Rank(2)], reason).raised_by(Rank(me));
            assert_eq!(culprit, Rank(2));
            error
        };
        for me in 0..4 {
            let blamed = if me == 2 { "rank 1 ended the job and blames this rank, 2: " } else { "" };
            let reason = format!("{blamed}late");
            assert_eq!(raised(Evidence::Absent, me), Error::Timeout(reason.clone()));
            assert_eq!(raised(Evidence::Ended, me), Error::PeerLost { rank: Rank(2), reason });
        }
    }

    #[test]
    fn who_is_gone_is_seen_and_who_is_wrong_is_left_out() {
        let out = |evidence, me, spares| {
            let verdict = Verdict::new(evidence, None, Rank(0), vec![Rank(1), Rank(2)], "why".into());
            verdict.leaves_out(Rank(me), spares).map(<[Rank]>::to_vec)
        };
        let (nobody, both) = (Some(vec![]), Some(vec![Rank(1), Rank(2)]));
        for evidence in [Evidence::Ended, Evidence::Silent] {
            assert_eq!((out(evidence, 0, true), out(evidence, 1, true)), (nobody.clone(), nobody.clone()));
            assert_eq!((out(evidence, 0, false), out(evidence, 1, false)), (both.clone(), nobody.clone()));
        }
        for evidence in
            [Evidence::Own, Evidence::Frame, Evidence::Departed, Evidence::Absent, Evidence::Circle]
        {
            assert_eq!((out(evidence, 0, true), out(evidence, 2, true)), (both.clone(), None));
        }
    }

    #[test]
    fn a_verdict_fits_into_a_frame() {
        let everybody = (0..4096).map(Rank).collect();
        let verdict = Verdict::new(Evidence::Circle, None, Rank(1), everybody, "ä".repeat(REASON_BYTES_MAX));
        assert!(verdict.encode().len() <= crate::limits::ABORT_BYTES_MAX && verdict.reason.starts_with('ä'));
        assert_eq!(verdict.culprits.len(), CULPRITS_MAX);
    }
}

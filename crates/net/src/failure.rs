//! Why a call, or the whole job, has failed: an error and what it was about.

use penstock_core::life::{Evidence, Verdict};
use penstock_core::{Error, Rank, Step};

/// An error of the engine with its circumstances.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// What happened; its text is complete.
    pub error: Error,
    /// The rank at fault, if one is.
    pub rank: Option<Rank>,
    /// The layer whose synchronisation failed, if one did.
    pub layer: Option<String>,
    /// The user's iteration, if the failure belongs to one.
    pub step: Option<Step>,
    /// The address of the rank at fault.
    pub peer: Option<String>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let rank = match &error {
            Error::PeerLost { rank, .. } | Error::Protocol { peer: rank, .. } => Some(*rank),
            Error::Mismatch { rank, layer, step, .. } => {
                let (rank, layer, step) = (Some(*rank), Some(layer.clone()), Some(*step));
                return Self { error, rank, layer, step, peer: None };
            }
            Error::Config(_) | Error::Timeout(_) | Error::Authentication(_) => None,
        };
        Self { error, rank, layer: None, step: None, peer: None }
    }
}

impl Failure {
    pub(crate) fn config(text: impl Into<String>) -> Self {
        Error::Config(text.into()).into()
    }

    pub(crate) fn lost(rank: Rank, reason: impl Into<String>) -> Self {
        Error::PeerLost { rank, reason: reason.into() }.into()
    }

    /// Adds to the text of the error.
    pub(crate) fn add(mut self, more: &str) -> Self {
        match &mut self.error {
            Error::Config(text)
            | Error::Timeout(text)
            | Error::Authentication(text)
            | Error::PeerLost { reason: text, .. }
            | Error::Mismatch { reason: text, .. }
            | Error::Protocol { reason: text, .. } => text.push_str(more),
        }
        self
    }

    /// What the other ranks are told of a failure that rank `me` has found.
    pub(crate) fn verdict(&self, me: Rank) -> Verdict {
        let (evidence, culprit, text) = match &self.error {
            Error::PeerLost { rank, reason } if *rank == me => (Evidence::Own, me, reason.clone()),
            Error::PeerLost { rank, reason } => (Evidence::Silent, *rank, reason.clone()),
            Error::Mismatch { rank, reason, .. } => (Evidence::Frame, *rank, reason.clone()),
            Error::Protocol { peer, .. } => {
                (Evidence::Frame, *peer, format!("rank {me} ended the job: {}", self.error))
            }
            Error::Timeout(text) => {
                (Evidence::Unanswered, self.rank.unwrap_or(me), format!("rank {me} gave up waiting: {text}"))
            }
            Error::Config(text) | Error::Authentication(text) => {
                (Evidence::Own, me, format!("rank {me} failed: {text}"))
            }
        };
        Verdict::new(evidence, self.step, me, vec![culprit], text)
    }

    /// What calls of rank `me` raise for a verdict.
    pub(crate) fn of(verdict: &Verdict, me: Rank) -> Self {
        let Verdict { evidence, accuser, culprits, reason, .. } = verdict;
        let reason = if culprits.contains(&me) && *accuser != me {
            format!("rank {accuser} ended the job and blames this rank, {me}: {reason}")
        } else {
            reason.clone()
        };
        let rank = verdict.culprit();
        if evidence.is_timeout() {
            return Self { rank: Some(rank), ..Error::Timeout(reason).into() };
        }
        Self::lost(rank, reason)
    }
}

/// How a call that waits may end without a result.
#[derive(Debug)]
pub enum Stop {
    /// It failed.
    Failed(Box<Failure>),
    /// The caller's own check asked it to stop.
    Interrupted,
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(Box::new(failure))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_names_the_culprit_and_reads_the_same_wherever_it_is_raised() {
        let lost = Failure::lost(Rank(3), "it is gone").verdict(Rank(1));
        assert_eq!((lost.culprit(), lost.evidence), (Rank(3), Evidence::Silent));
        assert_eq!(Failure::config("no").verdict(Rank(1)).culprit(), Rank(1));
        assert_eq!(Failure::lost(Rank(1), "mine").verdict(Rank(1)).evidence, Evidence::Own);
        let late = Verdict::new(Evidence::Absent, Some(7), Rank(1), vec![Rank(2)], "late".into());
        for me in 0..4 {
            let failure = Failure::of(&late, Rank(me));
            assert!(matches!(&failure.error, Error::Timeout(text) if text.contains("late")), "{failure}");
            assert_eq!(failure.rank, Some(Rank(2)));
        }
    }
}

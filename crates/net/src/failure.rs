//! Why a call, or the whole job, has failed: an error and what it was about.

use penstock_core::limits::REASON_BYTES_MAX;
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

    /// Whom the other ranks should blame, and what they are told.
    pub(crate) fn verdict(&self, me: Rank) -> (Rank, String) {
        let (culprit, mut text) = match &self.error {
            Error::PeerLost { rank, reason } | Error::Mismatch { rank, reason, .. } => {
                (*rank, reason.clone())
            }
            Error::Protocol { peer, .. } => (*peer, format!("rank {me} ended the job: {}", self.error)),
            Error::Timeout(text) => (self.rank.unwrap_or(me), format!("rank {me} gave up waiting: {text}")),
            Error::Config(text) | Error::Authentication(text) => (me, format!("rank {me} failed: {text}")),
        };
        let end =
            (0..=text.len().min(REASON_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
        (culprit, text)
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
    fn a_verdict_names_the_culprit_and_fits_into_a_frame() {
        let long = "ä".repeat(REASON_BYTES_MAX);
        let (culprit, text) = Failure::lost(Rank(3), long).verdict(Rank(1));
        assert!(culprit == Rank(3) && text.len() <= REASON_BYTES_MAX && text.starts_with('ä'));
        assert_eq!(Failure::config("no").verdict(Rank(1)).0, Rank(1));
    }
}

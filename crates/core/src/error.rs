//! Errors, typed by what the caller can do about them; the Python package raises one exception class for each.

use crate::types::{Rank, Step, Unknown};

/// Anything that Penstock reports to its user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An argument or an option is wrong: correct it and call again.
    #[error("{0}")]
    Config(String),
    /// A rank left or died: restart the job, or find out why on that rank.
    #[error("{reason}")]
    PeerLost {
        /// The rank that is gone.
        rank: Rank,
        /// How this was noticed, and what that rank said of it, if anything.
        reason: String,
    },
    /// Something that was waited for did not happen in time.
    #[error("{0}")]
    Timeout(String),
    /// A peer sent what the protocol does not allow: versions differ, or there is a bug.
    #[error("protocol error from rank {peer}: {reason}")]
    Protocol {
        /// Who sent it.
        peer: Rank,
        /// What was wrong with it.
        reason: String,
    },
    /// The ranks do not train alike: this one is not where the others are.
    #[error("{reason}")]
    Mismatch {
        /// The rank that differs from most others.
        rank: Rank,
        /// The layer in which that shows.
        layer: String,
        /// The step of most ranks.
        step: Step,
        /// Who is where, and what it means.
        reason: String,
    },
    /// The members of the job have changed while a call was under way that some of them may have finished: make it again, on all.
    #[error("{0}")]
    MembersChanged(String),
    /// A peer could not prove that it knows the job's secret.
    #[error("{0}")]
    Authentication(String),
}

impl From<Unknown> for Error {
    fn from(unknown: Unknown) -> Self {
        Self::Config(unknown.to_string())
    }
}

impl Error {
    /// A [`Error::Protocol`] about a frame of `peer`.
    pub fn protocol(peer: Rank, reason: impl Into<String>) -> Self {
        Self::Protocol { peer, reason: reason.into() }
    }
}

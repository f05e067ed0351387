//! Why a call, or the whole job, has failed: an error and what it was about.

use penstock_core::life::Fault;
use penstock_core::{Error, Rank, Step};
use std::collections::BTreeSet;

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
            Error::Config(_) | Error::Timeout(_) | Error::MembersChanged(_) | Error::Authentication(_) => {
                None
            }
        };
        Self { error, rank, layer: None, step: None, peer: None }
    }
}

impl From<Fault> for Failure {
    fn from(Fault { culprit, error }: Fault) -> Self {
        Self { rank: Some(culprit), ..error.into() }
    }
}

impl Failure {
    pub(crate) fn config(text: impl Into<String>) -> Self {
        Error::Config(text.into()).into()
    }

    /// Adds to the text of the error.
    pub(crate) fn add(mut self, more: &str) -> Self {
        self.text().push_str(more);
        self
    }

    /// The text of the error.
    pub(crate) fn text(&mut self) -> &mut String {
        match &mut self.error {
            Error::Config(text)
            | Error::Timeout(text)
            | Error::MembersChanged(text)
            | Error::Authentication(text)
            | Error::PeerLost { reason: text, .. }
            | Error::Mismatch { reason: text, .. }
            | Error::Protocol { reason: text, .. } => text,
        }
    }
}

/// A text in which ranks from `workers` on are called by the names that users know them by: servers, by numbers of their own, each
/// with its address where it is named first.
pub(crate) fn naming_servers(text: &str, workers: u32, address: impl Fn(Rank) -> Option<String>) -> String {
    let mut named = BTreeSet::new();
    let mut name = |rank: u32| {
        let Some(number) = rank.checked_sub(workers) else { return format!("rank {rank}") };
        let address = address(Rank(rank)).filter(|_| named.insert(rank));
        format!("server {number}{}", address.map_or_else(String::new, |address| format!(" ({address})")))
    };
    let (mut said, mut rest) = (String::new(), text);
    while let Some(at) = rest.find("rank") {
        let (before, word) = rest.split_at(at);
        let begins = !before.ends_with(char::is_alphanumeric);
        let many = word.starts_with("ranks ");
        let numbers = word.strip_prefix(if many { "ranks " } else { "rank " }).filter(|_| begins);
        let list = numbers.map_or("", |numbers| {
            let of_list = |c: char| c.is_ascii_digit() || many && (c == ',' || c == ' ');
            let end = numbers.find(|c| !of_list(c)).unwrap_or(numbers.len());
            numbers[..end].trim_end_matches([',', ' '])
        });
        let ranks: Option<Vec<u32>> = list.split(", ").map(|number| number.parse().ok()).collect();
        said.push_str(before);
        match ranks.filter(|ranks| ranks.iter().any(|rank| *rank >= workers)) {
            Some(ranks) => {
                said.push_str(&ranks.into_iter().map(&mut name).collect::<Vec<_>>().join(", "));
                rest = &word[word.len() - numbers.unwrap_or_default().len() + list.len()..];
            }
            None => {
                said.push_str("rank");
                rest = &word["rank".len()..];
            }
        }
    }
    said + rest
}

/// How a call that waits may end without a result.
#[derive(Debug)]
pub enum Stop {
    /// It failed.
    Failed(Box<Failure>),
    /// The caller's own check asked it to stop.
    Interrupted,
}

impl Stop {
    /// The same with more said of the failure.
    pub(crate) fn map(self, more: impl FnOnce(Failure) -> Failure) -> Self {
        match self {
            Self::Failed(failure) => more(*failure).into(),
            Self::Interrupted => Self::Interrupted,
        }
    }
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
    fn servers_have_numbers_of_their_own_and_an_address() {
        let address = |rank: Rank| Some(format!("host{rank}:1"));
        let said = |text| naming_servers(text, 3, address);
        assert_eq!(
            said("rank 4 is lost (found by rank 1); rank 4 was"),
            "server 1 (host4:1) is lost (found by rank 1); server 1 was"
        );
        assert_eq!(said("ranks 1, 3, 4: all"), "rank 1, server 0 (host3:1), server 1 (host4:1): all");
        assert_eq!(said("rank 3"), "server 0 (host3:1)");
        for same in ["ranks 0, 1, 2", "rank of 4", "Frank 4", "ranks count from 0", "rank", "", "rank 2, 9"] {
            assert_eq!(said(same), same);
        }
    }
}

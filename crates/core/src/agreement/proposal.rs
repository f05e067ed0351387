//! What a leader knows of its own ballot.

use super::message::{Ballot, MemberMessage, NextMembers, Promise};
use crate::types::Rank;
use std::collections::{BTreeMap, BTreeSet};

/// What a leader has heard of its ballot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Proposal {
    pub(super) ballot: Ballot,
    pub(super) promises: BTreeMap<Rank, Promise>,
    /// Who is in the next epoch, while a plan is made, and whether all programs wait.
    pub(super) planned: Option<(Vec<Rank>, bool)>,
    pub(super) choice: Option<NextMembers>,
    pub(super) agreed: BTreeSet<Rank>,
}

impl Proposal {
    pub(super) fn new(ballot: Ballot) -> Self {
        Self { ballot, promises: BTreeMap::new(), planned: None, choice: None, agreed: BTreeSet::new() }
    }

    /// What is asked of a peer that has not answered yet.
    pub(super) fn asks(&self, peer: Rank) -> Option<MemberMessage> {
        match &self.choice {
            Some(choice) if !self.agreed.contains(&peer) => {
                Some(MemberMessage::Propose(self.ballot, choice.clone()))
            }
            None if !self.promises.contains_key(&peer) => Some(MemberMessage::Prepare(self.ballot)),
            _ => None,
        }
    }

    /// What may be chosen already: what was accepted last.
    pub(super) fn accepted_before(&self) -> Option<NextMembers> {
        let accepted = self.promises.values().filter_map(|promise| promise.accepted.as_ref());
        accepted.max_by_key(|(ballot, _)| *ballot).map(|(_, choice)| choice.clone())
    }

    /// How many have promised that leave.
    pub(super) fn leaving(&self) -> usize {
        self.promises.values().filter(|promise| promise.leaves).count()
    }

    /// Newcomers that all of those who stay hear, with what each has said of itself; and whether the programs of all wait for newcomers.
    pub(super) fn newcomers(&self, staying: &[Rank]) -> (BTreeMap<Rank, Vec<u8>>, bool) {
        let mut promises = staying.iter().map(|rank| &self.promises[rank]);
        let all_wait = promises.clone().all(|promise| promise.ready);
        let Some(first) = promises.next() else { return (BTreeMap::new(), false) };
        let mut heard = first.newcomers.clone();
        promises.for_each(|promise| heard.retain(|rank, _| promise.newcomers.contains_key(rank)));
        (heard, all_wait)
    }

    /// Of those that have promised: those that hear each other, do not leave, and are not lost since.
    pub(super) fn staying(&self, lost: &BTreeSet<Rank>) -> Vec<Rank> {
        let stays =
            |(rank, promise): (&Rank, &Promise)| (!promise.leaves && !lost.contains(rank)).then_some(*rank);
        let mut staying: BTreeSet<Rank> = self.promises.iter().filter_map(stays).collect();
        let deaf = |one: Rank, other: Rank| {
            self.promises[&one].suspects.contains(&other) || self.promises[&other].suspects.contains(&one)
        };
        let accused =
            |rank: Rank| self.promises.values().filter(|promise| promise.accuses.contains(&rank)).count();
        loop {
            let unheard = |rank: Rank| staying.iter().filter(|other| deaf(rank, **other)).count();
            // Of two of whom one accuses the other, the accused goes, and not who has found it out.
            let worst = staying.iter().copied().max_by_key(|rank| (unheard(*rank), accused(*rank), *rank));
            match worst.filter(|rank| unheard(*rank) > 0) {
                Some(rank) => staying.remove(&rank),
                None => return staying.into_iter().collect(),
            };
        }
    }
}

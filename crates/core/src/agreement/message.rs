//! What members say to each other when an epoch ends, and its bytes.
//!
//! A message is its epoch, a number for its kind, and its fields, all little-endian; a list is its length and its members. Whatever
//! else comes is refused with a sentence, before anything is allocated for it.

use crate::error::Error;
use crate::limits::RANKS_MAX;
use crate::types::Rank;
use std::collections::BTreeMap;

/// Of two ballots the one with the higher attempt counts, then that of the higher rank. No two are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ballot {
    /// Counts from 1; 0 is before all ballots.
    pub attempt: u32,
    /// Who leads it.
    pub leader: Rank,
}

impl Default for Ballot {
    fn default() -> Self {
        Self { attempt: 0, leader: Rank(0) }
    }
}

impl Ballot {
    /// One of `leader` that counts more than this.
    #[must_use]
    pub fn next(self, leader: Rank) -> Self {
        Self { attempt: self.attempt + 1, leader }
    }
}

/// What an epoch ends with.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NextMembers {
    /// The epoch that it ends.
    pub epoch: u32,
    /// The members of the next one, in ascending order.
    pub ranks: Vec<Rank>,
    /// Whether all programs waited for newcomers: whoever is not among the ranks now does not come.
    pub admits: bool,
    /// How what is unfinished goes on, as the leader's driver made it.
    pub plan: Vec<u8>,
}

impl NextMembers {
    /// What a member of the last epoch raises that is not among them.
    #[must_use]
    pub fn without(&self, me: Rank) -> Error {
        let (count, epoch) = (self.ranks.len(), self.epoch + 1);
        let reason = format!(
            "the others go on without rank {me}: {count} members have agreed on epoch {epoch}, and either did not hear this rank or hold \
             it to blame; restart it"
        );
        Error::PeerLost { rank: me, reason }
    }
}

/// What a member has promised with, besides its word.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Promise {
    /// What it has accepted last, if anything.
    pub accepted: Option<(Ballot, NextMembers)>,
    /// Whom it does not hear, in ascending order.
    pub suspects: Vec<Rank>,
    /// Of these, whom a verdict of its own finds wrong.
    pub accuses: Vec<Rank>,
    /// It wants to leave.
    pub leaves: bool,
    /// Its program waits at the gate, with nothing under way.
    pub ready: bool,
    /// What it has of the epoch's exchanges.
    pub report: Vec<u8>,
    /// The newcomers that it hears, and what each has said of itself.
    pub newcomers: BTreeMap<Rank, Vec<u8>>,
}

/// One message. Each travels with the epoch that it is of.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum MemberMessage {
    /// This epoch is to end: begin, whoever leads.
    Ends,
    /// Its sender hears too few to lead: somebody else must.
    Yields,
    /// Promise not to accept anything of an earlier ballot.
    Prepare(Ballot),
    /// So promised.
    Promised(Ballot, Promise),
    /// Not that: a later one, which this is, was promised.
    Refused(Ballot),
    /// Accept this.
    Propose(Ballot, NextMembers),
    /// So accepted.
    Accepted(Ballot),
    /// A quorum has accepted this.
    Chosen(NextMembers),
    /// Its sender's program waits at the gate for newcomers.
    Ready,
    /// Its sender is a newcomer: what is to be known of it.
    Present(Vec<u8>),
}

impl MemberMessage {
    /// The payload of a frame.
    #[must_use]
    pub fn encode(&self, epoch: u32) -> Vec<u8> {
        let mut bytes = epoch.to_le_bytes().to_vec();
        let to = &mut bytes;
        match self {
            Self::Ends => to.push(0),
            Self::Yields => to.push(1),
            Self::Prepare(ballot) => put_ballot(to, 2, *ballot),
            Self::Refused(ballot) => put_ballot(to, 3, *ballot),
            Self::Accepted(ballot) => put_ballot(to, 4, *ballot),
            Self::Promised(ballot, promise) => {
                put_ballot(to, 5, *ballot);
                to.extend([u8::from(promise.leaves), u8::from(promise.ready)]);
                put_ranks(to, &promise.suspects);
                put_ranks(to, &promise.accuses);
                put_bytes(to, &promise.report);
                let newcomers: Vec<Rank> = promise.newcomers.keys().copied().collect();
                put_ranks(to, &newcomers);
                promise.newcomers.values().for_each(|said| put_bytes(to, said));
                match &promise.accepted {
                    Some((ballot, choice)) => {
                        put_ballot(to, 1, *ballot);
                        put_choice(to, choice);
                    }
                    None => to.push(0),
                }
            }
            Self::Propose(ballot, choice) => {
                put_ballot(to, 6, *ballot);
                put_choice(to, choice);
            }
            Self::Chosen(choice) => {
                to.push(7);
                put_choice(to, choice);
            }
            Self::Ready => to.push(8),
            Self::Present(said) => {
                to.push(9);
                put_bytes(to, said);
            }
        }
        bytes
    }

    /// Reads what [`MemberMessage::encode`] wrote: the epoch and the message.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self), String> {
        let mut from = MessageReader(bytes);
        let epoch = from.u32()?;
        let message = match from.u8()? {
            0 => Self::Ends,
            1 => Self::Yields,
            2 => Self::Prepare(from.ballot()?),
            3 => Self::Refused(from.ballot()?),
            4 => Self::Accepted(from.ballot()?),
            5 => {
                let (ballot, leaves, ready) = (from.ballot()?, from.flag()?, from.flag()?);
                let (suspects, accuses, report) = (from.ranks()?, from.ranks()?, from.bytes()?);
                let newcomers = from.ranks()?.into_iter().map(|rank| Ok((rank, from.bytes()?)));
                let newcomers = newcomers.collect::<Result<_, String>>()?;
                let accepted = if from.flag()? { Some((from.ballot()?, from.choice()?)) } else { None };
                Self::Promised(
                    ballot,
                    Promise { accepted, suspects, accuses, leaves, ready, report, newcomers },
                )
            }
            6 => Self::Propose(from.ballot()?, from.choice()?),
            7 => Self::Chosen(from.choice()?),
            8 => Self::Ready,
            9 => Self::Present(from.bytes()?),
            kind => return Err(format!("a message of unknown kind {kind} on the next members")),
        };
        match from.0.len() {
            0 => Ok((epoch, message)),
            more => Err(format!("{more} bytes behind a message on the next members")),
        }
    }
}

fn put_ballot(to: &mut Vec<u8>, kind: u8, ballot: Ballot) {
    to.push(kind);
    to.extend(ballot.attempt.to_le_bytes());
    to.extend(ballot.leader.0.to_le_bytes());
}

fn put_ranks(to: &mut Vec<u8>, ranks: &[Rank]) {
    to.extend((ranks.len() as u32).to_le_bytes());
    ranks.iter().for_each(|rank| to.extend(rank.0.to_le_bytes()));
}

fn put_bytes(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend(bytes);
}

fn put_choice(to: &mut Vec<u8>, choice: &NextMembers) {
    to.extend(choice.epoch.to_le_bytes());
    to.push(u8::from(choice.admits));
    put_ranks(to, &choice.ranks);
    put_bytes(to, &choice.plan);
}

/// What is left to read.
struct MessageReader<'a>(&'a [u8]);

impl MessageReader<'_> {
    fn take(&mut self, len: usize) -> Result<&[u8], String> {
        let (first, rest) =
            self.0.split_at_checked(len).ok_or("a message on the next members that breaks off")?;
        self.0 = rest;
        Ok(first)
    }

    fn u8(&mut self) -> Result<u8, String> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, String> {
        let bytes = self.take(4)?;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    fn flag(&mut self) -> Result<bool, String> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("{other} in a message on the next members, where 0 or 1 must be")),
        }
    }

    fn ballot(&mut self) -> Result<Ballot, String> {
        Ok(Ballot { attempt: self.u32()?, leader: self.rank()? })
    }

    fn rank(&mut self) -> Result<Rank, String> {
        match self.u32()? {
            rank if rank < RANKS_MAX => Ok(Rank(rank)),
            rank => Err(format!("rank {rank} in a message on the next members")),
        }
    }

    fn ranks(&mut self) -> Result<Vec<Rank>, String> {
        let count = self.u32()?;
        if count > RANKS_MAX {
            return Err(format!("{count} ranks in a message on the next members"));
        }
        let ranks = (0..count).map(|_| self.rank()).collect::<Result<Vec<_>, _>>()?;
        if ranks.is_sorted_by(|one, next| one < next) {
            Ok(ranks)
        } else {
            Err("ranks out of order in a message on the next members".into())
        }
    }

    fn bytes(&mut self) -> Result<Vec<u8>, String> {
        let len = self.u32()? as usize;
        Ok(self.take(len)?.to_vec())
    }

    fn choice(&mut self) -> Result<NextMembers, String> {
        let (epoch, admits) = (self.u32()?, self.flag()?);
        Ok(NextMembers { epoch, ranks: self.ranks()?, admits, plan: self.bytes()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, btree_set, vec};
    use proptest::option;
    use proptest::prelude::*;

    fn ballots() -> impl Strategy<Value = Ballot> {
        (any::<u32>(), 0..RANKS_MAX).prop_map(|(attempt, leader)| Ballot { attempt, leader: Rank(leader) })
    }

    fn ranks() -> impl Strategy<Value = Vec<Rank>> {
        btree_set(0..RANKS_MAX, 0..9).prop_map(|ranks| ranks.into_iter().map(Rank).collect())
    }

    fn choices() -> impl Strategy<Value = NextMembers> {
        (any::<u32>(), ranks(), any::<bool>(), vec(any::<u8>(), 0..40))
            .prop_map(|(epoch, ranks, admits, plan)| NextMembers { epoch, ranks, admits, plan })
    }

    fn promises() -> impl Strategy<Value = Promise> {
        let newcomers = btree_map((0..RANKS_MAX).prop_map(Rank), vec(any::<u8>(), 0..9), 0..4);
        let accepted = option::of((ballots(), choices()));
        (accepted, [ranks(), ranks()], any::<[bool; 2]>(), vec(any::<u8>(), 0..40), newcomers).prop_map(
            |(accepted, [suspects, accuses], [leaves, ready], report, newcomers)| Promise {
                accepted,
                suspects,
                accuses,
                leaves,
                ready,
                report,
                newcomers,
            },
        )
    }

    fn messages() -> impl Strategy<Value = MemberMessage> {
        prop_oneof![
            Just(MemberMessage::Ends),
            Just(MemberMessage::Yields),
            ballots().prop_map(MemberMessage::Prepare),
            ballots().prop_map(MemberMessage::Refused),
            ballots().prop_map(MemberMessage::Accepted),
            (ballots(), promises()).prop_map(|(ballot, promise)| MemberMessage::Promised(ballot, promise)),
            (ballots(), choices()).prop_map(|(ballot, choice)| MemberMessage::Propose(ballot, choice)),
            choices().prop_map(MemberMessage::Chosen),
            Just(MemberMessage::Ready),
            vec(any::<u8>(), 0..40).prop_map(MemberMessage::Present),
        ]
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(epoch: u32, message in messages()) {
            prop_assert_eq!(MemberMessage::decode(&message.encode(epoch)), Ok((epoch, message)));
        }

        #[test]
        fn what_breaks_off_or_goes_on_is_refused(message in messages(), cut in 0..200usize, more: u8) {
            let mut bytes = message.encode(3);
            prop_assert!(MemberMessage::decode(&bytes[..cut.min(bytes.len() - 1)]).is_err());
            bytes.push(more);
            prop_assert!(MemberMessage::decode(&bytes).is_err());
        }

        #[test]
        fn any_bytes_decode_to_what_encodes_to_them_or_are_refused(bytes: Vec<u8>) {
            if let Ok((epoch, message)) = MemberMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(epoch), bytes);
            }
        }
    }
}

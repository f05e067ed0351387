//! How a rank reaches others when it matters: how often it dials one that does not answer, what follows when one refuses, whom a
//! verdict has still to reach, and how long a lane whose job is over stays for its last words to arrive.
//!
//! A rank that ends too early looks lost itself: whoever is still starting finds its listener closed, and blames it.

use super::pulse::Contact;
use super::verdict::Fault;
use crate::error::Error;
use crate::types::Rank;
use crate::wire::VERSION;
use std::ops::RangeInclusive;

const MS: u64 = 1_000_000;
/// Pauses between attempts to connect grow from the first to the second: a peer that starts at the same time is found at once, and
/// one that is away costs nothing.
const PAUSE_MIN_NS: u64 = 10 * MS;
const PAUSE_MAX_NS: u64 = 1000 * MS;
/// How long the end of a lane waits for its last frames to reach the peers.
pub const FLUSH_NS: u64 = 1000 * MS;
/// How long after a failure it waits for connections to peers that have none yet: they may still be starting.
pub const REACH_NS: u64 = 2000 * MS;

/// What an attempt to connect has failed of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The peer did not take it: it is not there, not there yet, or behind something that lets nothing through.
    There,
    /// This process could not even try: it has no file descriptor left.
    Here,
}

/// The attempts to connect to one peer.
#[derive(Debug, Clone, Copy)]
pub struct Attempts {
    give_up_ns: u64,
    pause_ns: u64,
    last: Obstacle,
}

impl Attempts {
    /// None so far. A rank that cannot be reached is as lost as one that is silent: it is tried for `peer_timeout_ns`.
    #[must_use]
    pub fn new(now_ns: u64, peer_timeout_ns: u64) -> Self {
        let give_up_ns = now_ns.saturating_add(peer_timeout_ns);
        Self { give_up_ns, pause_ns: PAUSE_MIN_NS, last: Obstacle::There }
    }

    /// When no more are made.
    #[must_use]
    pub fn give_up_ns(&self) -> u64 {
        self.give_up_ns
    }

    /// One has failed. The pause before the next, or before giving up, is to be drawn from this range, so that the ranks of a large
    /// job do not all come back at the same moment; in nanoseconds.
    #[must_use]
    pub fn failed(&mut self, obstacle: Obstacle) -> RangeInclusive<u64> {
        let pause_ns = self.pause_ns;
        self.pause_ns = (2 * pause_ns).min(PAUSE_MAX_NS);
        self.last = obstacle;
        pause_ns / 2..=pause_ns
    }

    /// No more are made: it is the fault of the rank `me` that has tried, or of the peer. `reason` says it of either.
    #[must_use]
    pub fn given_up(&self, me: Rank, peer: Rank, reason: impl FnOnce(Rank) -> String) -> Fault {
        match self.last {
            Obstacle::Here => Fault::own(me, Error::Config(reason(me))),
            Obstacle::There => {
                Fault { culprit: peer, error: Error::PeerLost { rank: peer, reason: reason(peer) } }
            }
        }
    }
}

/// What the listener says of a handshake, the first byte of everything it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Go on.
    Ok = 0,
    /// The first bytes are not Penstock's.
    WrongMagic = 1,
    /// Another version of the protocol.
    WrongVersion = 2,
    /// Another job.
    WrongJob = 3,
    /// Not the rank that was dialled, or a rank or a lane that the job does not have.
    UnknownRankOrLane = 4,
    /// The proof is wrong: another secret.
    AuthenticationFailed = 5,
    /// The listener is completing a connection of its own for the same lane and peer: wait for that one.
    Superseded = 6,
    /// There is such a connection already.
    Busy = 7,
}

impl Status {
    /// All of them, by their byte.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::WrongMagic,
        Self::WrongVersion,
        Self::WrongJob,
        Self::UnknownRankOrLane,
        Self::AuthenticationFailed,
        Self::Superseded,
        Self::Busy,
    ];

    /// The one of this byte.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte)).copied()
    }
}

/// Why a handshake has failed, as the rank sees it that dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DialFailure {
    /// The listener said why, and which version it is.
    Refused {
        /// What it said.
        status: Status,
        /// Its version.
        version: u16,
    },
    /// The listener does not know the job's secret.
    ListenerUnproven,
    /// What listens there does not speak this protocol.
    NotPenstock,
}

/// What follows when a handshake has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AfterFailure {
    /// The peer is there, and is dialled again ([`Attempts::failed`]). What stands against the connection until then.
    Retry(&'static str),
    /// It will be the same every time: the job ends.
    Fail(Fault),
}

impl DialFailure {
    /// What follows for the rank `me` that has dialled `peer`. Who could not prove itself is at fault; where the two only differ,
    /// nobody here knows which of them is wrong, and it is the peer.
    #[must_use]
    pub fn follows(self, me: Rank, peer: Rank) -> AfterFailure {
        let refused = format!("rank {peer} refused the connection");
        let (culprit, error) = match self {
            Self::Refused { status: Status::Superseded, .. } => {
                return AfterFailure::Retry("it was opening a connection of its own, which has not come");
            }
            Self::Refused { status: Status::Busy, .. } => {
                return AfterFailure::Retry(
                    "it has such a connection already, perhaps with another process of this rank",
                );
            }
            Self::Refused { status: Status::WrongVersion, version } => {
                let reason = format!(
                    "it speaks version {version} and this process version {VERSION}; install the same Penstock on \
                     all ranks"
                );
                (peer, Error::protocol(peer, reason))
            }
            Self::Refused { status: Status::WrongJob, .. } => {
                // All have agreed on the job: who is there is not this peer.
                let reason = format!(
                    "rank {peer} is not there: a process of another job has its address. It has ended, and its port is \
                     another's now, or the ranks were not started together, with the same job id and rendezvous"
                );
                (peer, Error::PeerLost { rank: peer, reason })
            }
            Self::Refused { status: Status::UnknownRankOrLane, .. } => {
                let text = format!(
                    "{refused}: it has another rank, or its job has no such rank or lane; check that all ranks have the \
                     same world size and number of lanes, and that no two processes have the same rank"
                );
                (peer, Error::Config(text))
            }
            Self::Refused { status: Status::AuthenticationFailed, .. } => {
                let text = format!(
                    "{refused}: this process, rank {me}, could not prove that it knows the job's secret; give all ranks the \
                     same secret"
                );
                (me, Error::Authentication(text))
            }
            Self::ListenerUnproven => {
                let text = format!(
                    "rank {peer} could not prove that it knows the job's secret; give all ranks the same secret, and check \
                     that no other program has taken that rank's address"
                );
                (peer, Error::Authentication(text))
            }
            Self::Refused { status: Status::WrongMagic | Status::Ok, .. } | Self::NotPenstock => {
                let reason = "what listens at its address does not speak Penstock's protocol";
                (peer, Error::protocol(peer, reason))
            }
        };
        AfterFailure::Fail(Fault { culprit, error })
    }
}

/// Of a lane whose rank holds a verdict: the peers that it must connect to, to tell them. Who is still starting must hear it, too, and
/// would otherwise find this rank gone and blame it. One lane is enough.
pub fn unreached(lane: u32, contacts: impl Iterator<Item = (Rank, Contact)>) -> impl Iterator<Item = Rank> {
    contacts.filter(move |(_, contact)| lane == 0 && *contact == Contact::Never).map(|(rank, _)| rank)
}

/// Whether a lane whose job is over may end: closing a connection may take back what the peer has not got.
///
/// * `waited_ns`: since it has nothing else to do.
/// * `arrived`: everything that was written is at the peers.
/// * `reached`: there is no verdict, or nobody whom it has yet to reach ([`unreached`]).
#[must_use]
pub fn may_end(waited_ns: u64, arrived: bool, reached: bool) -> bool {
    arrived && reached || waited_ns >= if reached { FLUSH_NS } else { REACH_NS }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_second_and_are_drawn_from_their_upper_half() {
        let mut attempts = Attempts::new(7, 100);
        let mut pause = || attempts.failed(Obstacle::There);
        let longest: Vec<u64> = (0..9).map(|_| *pause().end() / MS).collect();
        assert_eq!(longest, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(pause(), 500 * MS..=1000 * MS);
        assert_eq!(attempts.give_up_ns(), 107);
    }

    #[test]
    fn what_stood_in_the_way_last_says_whose_fault_it_is() {
        let mut attempts = Attempts::new(0, 1);
        let mut fault = |obstacle| {
            let _ = attempts.failed(obstacle);
            attempts.given_up(Rank(1), Rank(2), |culprit| format!("by rank {culprit}"))
        };
        let lost = Error::PeerLost { rank: Rank(2), reason: "by rank 2".into() };
        let there = Fault { culprit: Rank(2), error: lost };
        let here = Fault { culprit: Rank(1), error: Error::Config("by rank 1".into()) };
        assert_eq!(
            [Obstacle::There, Obstacle::Here, Obstacle::There].map(&mut fault),
            [there.clone(), here, there]
        );
    }

    #[test]
    fn each_refusal_is_tried_again_or_names_who_is_at_fault_and_what_to_check() {
        type Kind = fn(String) -> Error;
        const SECRET: &str = "give all ranks the same secret";
        let (me, peer) = (Rank(1), Rank(2));
        let authentication: Kind = Error::Authentication;
        let protocol: Kind = |reason| Error::protocol(Rank(2), reason);
        let lost: Kind = |reason| Error::PeerLost { rank: Rank(2), reason };
        let strange = "does not speak Penstock's protocol";
        let failures = Status::ALL.map(|status| DialFailure::Refused { status, version: 7 });
        for failure in failures.into_iter().chain([DialFailure::ListenerUnproven, DialFailure::NotPenstock]) {
            let expected: Option<(Rank, Kind, &str)> = match failure {
                DialFailure::Refused { status, .. } => match status {
                    Status::Superseded | Status::Busy => None,
                    Status::WrongVersion => Some((peer, protocol, "version 7 and this process")),
                    Status::WrongJob => Some((peer, lost, "a process of another job has its address")),
                    Status::UnknownRankOrLane => Some((peer, Error::Config, "rank 2 refused")),
                    Status::AuthenticationFailed => Some((me, authentication, SECRET)),
                    Status::WrongMagic | Status::Ok => Some((peer, protocol, strange)),
                },
                DialFailure::ListenerUnproven => Some((peer, authentication, SECRET)),
                DialFailure::NotPenstock => Some((peer, protocol, strange)),
            };
            match (failure.follows(me, peer), expected) {
                (AfterFailure::Retry(_), None) => {}
                (AfterFailure::Fail(Fault { culprit, error }), Some((named, kind, says))) => {
                    let text = error.to_string();
                    let alike =
                        std::mem::discriminant(&error) == std::mem::discriminant(&kind(String::new()));
                    assert!(
                        culprit == named && alike && text.contains(says),
                        "{failure:?}: {culprit}, {error:?}"
                    );
                    assert!(text.contains(&format!("rank {named}")), "{failure:?}: {text}");
                }
                (follows, expected) => panic!("{failure:?}: {follows:?}, not {}", expected.is_some()),
            }
        }
    }

    #[test]
    fn one_lane_reaches_those_who_have_never_been_connected() {
        let contacts = [
            (Rank(0), Contact::Never),
            (Rank(1), Contact::Open { written: false }),
            (Rank(2), Contact::Gone),
            (Rank(4), Contact::Never),
        ];
        assert_eq!(unreached(0, contacts.into_iter()).collect::<Vec<_>>(), [Rank(0), Rank(4)]);
        assert_eq!(unreached(1, contacts.into_iter()).count(), 0);
    }

    #[test]
    fn a_lane_stays_for_its_last_words_and_longer_for_peers_that_are_still_starting() {
        assert!(may_end(0, true, true));
        assert!(!may_end(FLUSH_NS - 1, false, true) && may_end(FLUSH_NS, false, true));
        assert!(!may_end(FLUSH_NS, true, false) && !may_end(REACH_NS - 1, true, false));
        assert!(may_end(REACH_NS, false, false));
    }
}

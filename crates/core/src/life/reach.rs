//! How a rank reaches others when it matters: how often it dials one that does not answer, whom a verdict has still to reach, and
//! how long a lane whose job is over stays for its last words to arrive.
//!
//! A rank that ends too early looks lost itself: whoever is still starting finds its listener closed, and blames it.

use super::inquiry::{DOUBT_NS, INQUIRY_NS};
use super::pulse::Contact;
use super::times::SETTLE_NS;
use crate::types::Rank;
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
/// How long a call whose wait took too long stays for the verdict at most. It comes sooner, unless the lanes themselves have ended.
pub const VERDICT_NS: u64 = INQUIRY_NS + DOUBT_NS + SETTLE_NS + 10_000 * MS;

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

    /// Whose fault it is if no more are made: of the rank `me` that has tried, or of the peer.
    #[must_use]
    pub fn culprit(&self, me: Rank, peer: Rank) -> Rank {
        if self.last == Obstacle::Here { me } else { peer }
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
        let mut culprit = |obstacle| {
            let _ = attempts.failed(obstacle);
            attempts.culprit(Rank(1), Rank(2))
        };
        assert_eq!([Obstacle::There, Obstacle::Here, Obstacle::There].map(&mut culprit), [2, 1, 2].map(Rank));
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

//! Whom a member hears: what its connections to the others, and the clock, mean to the agreement.
//!
//! That a connection has ended and is not made anew at once, cannot be made, or brings nothing, is a suspicion; that it is made anew, or
//! brings something again, takes that back. One that has ended is dialled again, first at once: both ends may live, and somebody in
//! between have ended it. Whoever has said goodbye ends no epoch: its connection may end, and it is not in the next one, whenever that
//! begins. But a program that waits for newcomers together with all others does not wait for one that has ended. Whoever has sent what
//! cannot be is not heard any more.
//!
//! What this leaves out: what a suspicion leads to, which is [`Succession`]'s, and the connections.

use super::Succession;
use crate::life::{Fault, PeerTimes, Pulse, Sign};
use crate::members::Members;
use crate::types::Rank;

/// A connection that has ended, or could not be made, is tried again so much later.
const AGAIN_NS: u64 = 500_000_000;
/// So long a connection that has ended may take to be made anew before its peer is suspected. A process that is gone is missed so much later.
pub const PATIENCE_NS: u64 = 200_000_000;

#[derive(Debug, Clone, Default)]
struct Link {
    open: bool,
    /// It has said goodbye.
    departed: bool,
    /// It has sent what cannot be.
    misspoke: bool,
    /// Since when it counts as silent: until something comes from it.
    silent_ns: Option<u64>,
    /// When its connection is to be tried again.
    again_ns: Option<u64>,
    /// Since when it has no connection, until that is a suspicion.
    ended_ns: Option<u64>,
}

/// What is to be done after a look.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Errands {
    /// Send these a heartbeat.
    pub beats: Vec<Rank>,
    /// Dial these: they are to be connected with, and are not.
    pub dials: Vec<Rank>,
}

/// See the module's documentation. Every call is given the agreement that it bears on.
#[derive(Debug)]
pub struct Hearing {
    me: Rank,
    pulse: Pulse,
    /// By rank.
    links: Vec<Link>,
    signs: Vec<Sign>,
}

impl Hearing {
    /// Of rank `me`, which has to connect to all other members yet. Silence of `timeout_ns` is a suspicion.
    #[must_use]
    pub fn new(me: Rank, members: &Members, timeout_ns: u64, now_ns: u64) -> Self {
        let pulse = Pulse::new(members, timeout_ns, timeout_ns, now_ns);
        let link = Link { again_ns: Some(now_ns), ..Link::default() };
        Self { me, pulse, links: vec![link; members.end()], signs: Vec::new() }
    }

    /// Newcomers have higher ranks than all before. Two that have come together are to be connected, too.
    fn link(&mut self, peer: Rank) -> &mut Link {
        if peer.index() >= self.links.len() {
            self.links.resize(peer.index() + 1, Link { again_ns: Some(0), ..Link::default() });
            self.pulse.grow(self.links.len());
        }
        &mut self.links[peer.index()]
    }

    /// A connection is there. Whether it is to be kept.
    #[must_use]
    pub fn connected(&mut self, now_ns: u64, peer: Rank, agreement: &mut Succession) -> bool {
        let link = self.link(peer);
        if link.misspoke {
            return false;
        }
        *link = Link { open: true, ..Link::default() };
        agreement.heard_again(now_ns, peer);
        true
    }

    /// The connection has ended. [`Hearing::look`] is to follow.
    pub fn closed(&mut self, now_ns: u64, peer: Rank) {
        let link = self.link(peer);
        (link.open, link.silent_ns) = (false, None);
        if link.departed {
            return;
        }
        (link.again_ns, link.ended_ns) = (Some(now_ns), Some(now_ns));
    }

    /// It has sent what does not fit: its connection is to be closed.
    pub fn misspoke(&mut self, now_ns: u64, peer: Rank, agreement: &mut Succession) {
        *self.link(peer) = Link { misspoke: true, ..Link::default() };
        agreement.suspect(now_ns, peer);
    }

    /// A connection could not be made, by this fault. If that is this rank's own, it says nothing of the peer.
    pub fn unreachable(&mut self, now_ns: u64, peer: Rank, fault: &Fault, agreement: &mut Succession) {
        let own = fault.culprit == self.me;
        let link = self.link(peer);
        if link.open || link.departed || link.misspoke {
            return;
        }
        link.again_ns = Some(now_ns + AGAIN_NS);
        if !own {
            link.ended_ns = None;
            agreement.suspect(now_ns, peer);
        }
    }

    /// It has said goodbye.
    pub fn departed(&mut self, peer: Rank) {
        self.link(peer).departed = true;
        self.pulse.goodbye_heard(peer);
    }

    /// Looks at the clock, and at when each connected peer was heard.
    pub fn look(
        &mut self,
        now_ns: u64,
        times: impl Iterator<Item = PeerTimes> + Clone,
        agreement: &mut Succession,
    ) -> Errands {
        let mut errands = Errands::default();
        for PeerTimes { peer, heard_ns, .. } in times.clone() {
            let link = &mut self.links[peer.index()];
            if link.silent_ns.take_if(|since_ns| heard_ns > *since_ns).is_some() {
                agreement.heard_again(now_ns, peer);
            }
        }
        // That this process was away itself, the pulse knows: what others have said meanwhile is read first.
        let _ = self.pulse.look(now_ns, times, &mut self.signs);
        for sign in self.signs.drain(..) {
            match sign {
                Sign::Heartbeat(peer) => errands.beats.push(peer),
                Sign::Silent(peer, _) => {
                    let link = &mut self.links[peer.index()];
                    if link.silent_ns.is_none() {
                        link.silent_ns = Some(now_ns);
                        agreement.suspect(now_ns, peer);
                    }
                }
            }
        }
        let newcomers: Vec<Rank> = agreement.newcomers().collect();
        for rank in newcomers {
            // It dials again by itself, and says so.
            if self.link(rank).ended_ns.take().is_some() {
                agreement.suspect(now_ns, rank);
            }
        }
        let (me, members) = (self.me, agreement.members());
        for rank in members.iter().filter(|rank| *rank != me) {
            let link = self.link(rank);
            if !link.open && link.again_ns.take_if(|again_ns| *again_ns <= now_ns).is_some() {
                errands.dials.push(rank);
            }
            if link.ended_ns.take_if(|since_ns| now_ns.saturating_sub(*since_ns) >= PATIENCE_NS).is_some() {
                agreement.suspect(now_ns, rank);
            }
            if link.departed && (agreement.is_ending() || agreement.waits_for(rank)) {
                agreement.suspect(now_ns, rank);
            }
        }
        errands
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agreement::MemberMessage;
    use crate::error::Error;

    const TIMEOUT_NS: u64 = 10_000_000_000;

    fn of_three() -> (Hearing, Succession) {
        let members = Members::all(3);
        (Hearing::new(Rank(0), &members, TIMEOUT_NS, 0), Succession::new(Rank(0), &members, None))
    }

    /// A peer that was heard then, and has been told enough.
    fn heard(peer: u32, heard_ns: u64, now_ns: u64) -> PeerTimes {
        PeerTimes { peer: Rank(peer), heard_ns, spoke_ns: now_ns, written: true }
    }

    #[test]
    fn who_is_not_connected_is_dialled_at_once_and_again_after_each_end() {
        let (mut hearing, mut agreement) = of_three();
        let dials = |hearing: &mut Hearing, agreement: &mut Succession, now_ns| {
            hearing.look(now_ns, std::iter::empty(), agreement).dials
        };
        assert_eq!(dials(&mut hearing, &mut agreement, 0), [Rank(1), Rank(2)]);
        assert_eq!(dials(&mut hearing, &mut agreement, 1), []);
        assert!(hearing.connected(2, Rank(1), &mut agreement) && !agreement.is_ending());
        hearing.closed(5, Rank(1));
        assert_eq!(dials(&mut hearing, &mut agreement, 5), [Rank(1)]);
        let lost =
            Fault { culprit: Rank(1), error: Error::PeerLost { rank: Rank(1), reason: "gone".into() } };
        hearing.unreachable(6, Rank(1), &lost, &mut agreement);
        assert!(agreement.suspects(Rank(1)) && agreement.is_ending());
        assert_eq!(dials(&mut hearing, &mut agreement, 5 + AGAIN_NS), []);
        assert_eq!(dials(&mut hearing, &mut agreement, 6 + AGAIN_NS), [Rank(1)]);
        assert!(hearing.connected(7 + AGAIN_NS, Rank(1), &mut agreement) && !agreement.suspects(Rank(1)));
    }

    #[test]
    fn who_is_connected_again_at_once_was_never_lost() {
        let (mut hearing, mut agreement) = of_three();
        let look = |hearing: &mut Hearing, agreement: &mut Succession, now_ns| {
            hearing.look(now_ns, std::iter::empty(), agreement);
        };
        assert!(hearing.connected(0, Rank(1), &mut agreement));
        hearing.closed(5, Rank(1));
        look(&mut hearing, &mut agreement, 4 + PATIENCE_NS);
        assert!(hearing.connected(4 + PATIENCE_NS, Rank(1), &mut agreement));
        look(&mut hearing, &mut agreement, 6 + PATIENCE_NS);
        assert!(!agreement.is_ending());
        hearing.closed(7, Rank(1));
        look(&mut hearing, &mut agreement, 6 + PATIENCE_NS);
        assert!(!agreement.is_ending());
        look(&mut hearing, &mut agreement, 7 + PATIENCE_NS);
        assert!(agreement.suspects(Rank(1)) && agreement.is_ending());
    }

    #[test]
    fn a_goodbye_ends_no_epoch_and_is_gone_when_another_reason_does() {
        let (mut hearing, mut agreement) = of_three();
        for peer in [1, 2] {
            assert!(hearing.connected(0, Rank(peer), &mut agreement));
        }
        hearing.departed(Rank(1));
        let late_ns = 3 * TIMEOUT_NS;
        let times = [heard(1, 0, late_ns), heard(2, late_ns, late_ns)];
        hearing.look(late_ns - 1, times.into_iter(), &mut agreement);
        hearing.look(late_ns, times.into_iter(), &mut agreement);
        hearing.closed(late_ns, Rank(1));
        let again = hearing.look(late_ns + AGAIN_NS, times[1..].iter().copied(), &mut agreement);
        assert!(!agreement.is_ending() && again.dials.is_empty());
        agreement.end(late_ns);
        hearing.look(late_ns, times[1..].iter().copied(), &mut agreement);
        assert!(agreement.suspects(Rank(1)) && !agreement.suspects(Rank(2)));
    }

    #[test]
    fn who_has_said_goodbye_is_not_waited_for_where_newcomers_come() {
        let newcomer = [Rank(3)];
        let look = |hearing: &mut Hearing, agreement: &mut Succession, now_ns| {
            hearing.look(now_ns, std::iter::empty(), agreement);
        };
        for is_ready in [false, true] {
            let (mut hearing, mut agreement) = of_three();
            for peer in [1, 2] {
                assert!(hearing.connected(0, Rank(peer), &mut agreement));
            }
            if is_ready {
                agreement.heard_from(1, Rank(1), 0, MemberMessage::Ready);
            }
            agreement.ready(2, &newcomer);
            look(&mut hearing, &mut agreement, 3);
            assert!(!agreement.is_ending());
            hearing.departed(Rank(1));
            look(&mut hearing, &mut agreement, 4);
            assert_eq!((agreement.is_ending(), agreement.suspects(Rank(1))), (!is_ready, !is_ready));
            assert!(!agreement.suspects(Rank(2)));
        }
    }

    #[test]
    fn a_newcomer_that_hears_nobody_any_more_gives_up() {
        let members = Members::all(2);
        let mut hearing = Hearing::new(Rank(2), &members, TIMEOUT_NS, 0);
        let mut agreement = Succession::newcomer(Rank(2), &members, None, Vec::new());
        let look = |hearing: &mut Hearing, agreement: &mut Succession, now_ns| {
            hearing.look(now_ns, std::iter::empty(), agreement);
            agreement.given_up(now_ns, TIMEOUT_NS, "").map(|error| error.to_string())
        };
        // It is up to whoever waits how long it tries to reach them.
        assert_eq!(look(&mut hearing, &mut agreement, 9 * TIMEOUT_NS), None);
        let now_ns = 10 * TIMEOUT_NS;
        assert!(hearing.connected(now_ns, Rank(0), &mut agreement));
        assert!(hearing.connected(now_ns, Rank(1), &mut agreement));
        assert_eq!(look(&mut hearing, &mut agreement, now_ns), None);
        hearing.closed(11 * TIMEOUT_NS, Rank(0));
        assert_eq!(look(&mut hearing, &mut agreement, 11 * TIMEOUT_NS + PATIENCE_NS), None);
        assert_eq!(look(&mut hearing, &mut agreement, 12 * TIMEOUT_NS + PATIENCE_NS), None, "one is there");
        hearing.closed(13 * TIMEOUT_NS, Rank(1));
        assert_eq!(look(&mut hearing, &mut agreement, 13 * TIMEOUT_NS + PATIENCE_NS), None);
        assert_eq!(look(&mut hearing, &mut agreement, 14 * TIMEOUT_NS), None, "for so long it may come back");
        let why = look(&mut hearing, &mut agreement, 14 * TIMEOUT_NS + PATIENCE_NS).unwrap_or_default();
        assert!(why.contains("rank 2, a newcomer, hears no member of the job any more"), "{why}");
    }

    #[test]
    fn silence_is_a_suspicion_until_something_comes() {
        let (mut hearing, mut agreement) = of_three();
        assert!(hearing.connected(0, Rank(2), &mut agreement));
        let at = |now_ns, heard_ns| std::iter::once(heard(2, heard_ns, now_ns));
        for now_ns in (0..TIMEOUT_NS).step_by(TIMEOUT_NS as usize / 10) {
            hearing.look(now_ns, at(now_ns, 0), &mut agreement);
        }
        assert!(!agreement.suspects(Rank(2)));
        hearing.look(TIMEOUT_NS, at(TIMEOUT_NS, 0), &mut agreement);
        assert!(agreement.suspects(Rank(2)));
        hearing.look(TIMEOUT_NS + 2, at(TIMEOUT_NS + 2, TIMEOUT_NS + 1), &mut agreement);
        assert!(!agreement.suspects(Rank(2)));
    }

    #[test]
    fn what_stands_in_this_ranks_own_way_is_no_suspicion() {
        let (mut hearing, mut agreement) = of_three();
        hearing.look(0, std::iter::empty(), &mut agreement);
        let own = Fault { culprit: Rank(0), error: Error::Config("no descriptors".into()) };
        hearing.unreachable(1, Rank(1), &own, &mut agreement);
        assert!(!agreement.suspects(Rank(1)));
        assert_eq!(hearing.look(1 + AGAIN_NS, std::iter::empty(), &mut agreement).dials, [Rank(1)]);
        let lost =
            Fault { culprit: Rank(1), error: Error::PeerLost { rank: Rank(1), reason: "gone".into() } };
        hearing.unreachable(2, Rank(1), &lost, &mut agreement);
        assert!(agreement.suspects(Rank(1)));
    }

    #[test]
    fn who_has_sent_what_cannot_be_is_not_heard_again() {
        let (mut hearing, mut agreement) = of_three();
        assert!(hearing.connected(0, Rank(1), &mut agreement));
        hearing.misspoke(1, Rank(1), &mut agreement);
        assert!(agreement.suspects(Rank(1)));
        assert!(!hearing.connected(2, Rank(1), &mut agreement) && agreement.suspects(Rank(1)));
        assert!(!hearing.look(2 + AGAIN_NS, std::iter::empty(), &mut agreement).dials.contains(&Rank(1)));
    }
}

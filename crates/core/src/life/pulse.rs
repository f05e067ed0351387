//! One lane's side of life: heartbeats, silence, whether this process itself was away, and goodbyes.

use super::times::DEPARTURE_GRACE_NS;
use crate::members::Members;
use crate::types::Rank;

/// A connected peer hears something this many times within the shortest time after which silence, or that nothing moves, means
/// something.
const HEARTBEATS_PER_TIMEOUT: u64 = 5;

/// A peer as its connection sees it, at a look.
#[derive(Debug, Clone, Copy)]
pub struct PeerTimes {
    /// The peer.
    pub peer: Rank,
    /// When something was last read.
    pub heard_ns: u64,
    /// When something was last written.
    pub spoke_ns: u64,
    /// Everything that was given out is written.
    pub written: bool,
}

/// What follows from a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sign {
    /// Send this peer a heartbeat.
    Heartbeat(Rank),
    /// Nothing was heard from this peer for so long, in nanoseconds: it counts as lost.
    Silent(Rank, u64),
}

/// This process was not there: a signal stopped it, or the machine slept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeAway {
    /// For how long, in nanoseconds.
    pub ns: u64,
    /// So long that others may rightly have given it up.
    pub noticed: bool,
}

/// What is to be done about a peer while leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Farewell {
    /// Say goodbye now.
    Say,
    /// Wait: something is owed, unwritten, or unheard.
    Wait,
    /// All is said and heard.
    Done,
}

/// A peer's connection, for [`Pulse::farewell`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contact {
    /// There has been none.
    Never,
    /// It is open; `written` as in [`PeerTimes`].
    Open {
        /// Everything that was given out is written.
        written: bool,
    },
    /// It has ended. There is no second one.
    Gone,
}

#[derive(Debug, Clone, Copy, Default)]
struct Goodbyes {
    said: bool,
    heard: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Pulse {
    timeout_ns: u64,
    /// Between two heartbeats.
    beat_ns: u64,
    looked_ns: u64,
    /// Silence before this was this process's own.
    back_ns: u64,
    peers: Vec<Goodbyes>,
    /// Who has had no connection must hear goodbye, too.
    parts_with_all: bool,
}

impl Pulse {
    /// Of a lane that begins now, in a job of these `members`. `timeout_ns` of silence mean loss; heartbeats also say whether data
    /// moves, for peers that wait at most `operation_ns` for that.
    #[must_use]
    pub fn new(members: &Members, timeout_ns: u64, operation_ns: u64, now_ns: u64) -> Self {
        let peers = vec![Goodbyes::default(); members.end()];
        let beat_ns = timeout_ns.min(operation_ns) / HEARTBEATS_PER_TIMEOUT;
        // In a later epoch all connections are new: that there was none yet does not mean that none is needed.
        let parts_with_all = members.epoch() > 0;
        Self { timeout_ns, beat_ns, looked_ns: now_ns, back_ns: now_ns, peers, parts_with_all }
    }

    /// Takes in peers with ranks up to this one, without.
    pub fn grow(&mut self, end: usize) {
        self.peers.resize(self.peers.len().max(end), Goodbyes::default());
    }

    /// Looks at the clock; appends what follows to `signs`. Says if this process was away since the last look: what others
    /// sent meanwhile waits to be read, and nobody was silent but this rank.
    pub fn look(
        &mut self,
        now_ns: u64,
        links: impl Iterator<Item = PeerTimes>,
        signs: &mut Vec<Sign>,
    ) -> Option<TimeAway> {
        let gap_ns = now_ns.saturating_sub(self.looked_ns);
        self.looked_ns = now_ns;
        if gap_ns > self.timeout_ns / 2 {
            self.back_ns = now_ns;
        }
        for PeerTimes { peer, heard_ns, spoke_ns, written } in links {
            let Goodbyes { said, heard } = self.peers[peer.index()];
            let silence_ns = now_ns.saturating_sub(heard_ns.max(self.back_ns));
            if silence_ns >= self.timeout_ns && !heard {
                signs.push(Sign::Silent(peer, silence_ns));
            }
            let quiet = now_ns.saturating_sub(spoke_ns) >= self.beat_ns;
            if quiet && written && !said {
                signs.push(Sign::Heartbeat(peer));
            }
        }
        // A peer may have heard the last heartbeat one interval before.
        let noticed = gap_ns >= self.beat_ns * (HEARTBEATS_PER_TIMEOUT - 1);
        let away = noticed || gap_ns > (self.timeout_ns / 2).min(DEPARTURE_GRACE_NS / 2);
        away.then_some(TimeAway { ns: gap_ns, noticed })
    }

    /// This peer has said goodbye on this lane.
    pub fn goodbye_heard(&mut self, peer: Rank) {
        self.peers[peer.index()].heard = true;
    }

    /// Why the end of this peer's connection on this lane is a loss; none if it has said goodbye, for then it may end.
    #[must_use]
    pub fn loss(&self, peer: Rank, why: String) -> Option<String> {
        (!self.has_heard_goodbye(peer)).then_some(why)
    }

    /// A peer that has said goodbye on this lane and is `needed`: it will not come, for a goodbye comes after everything else.
    #[must_use]
    pub fn parted(&self, needed: impl Fn(Rank) -> bool) -> Option<Rank> {
        let mut ranks = (0..).map(Rank).zip(&self.peers).filter(|(_, goodbyes)| goodbyes.heard);
        ranks.find(|(rank, _)| needed(*rank)).map(|(rank, _)| rank)
    }

    /// Whether this peer has said goodbye on this lane.
    #[must_use]
    pub fn has_heard_goodbye(&self, peer: Rank) -> bool {
        self.peers[peer.index()].heard
    }

    /// While leaving: what is to be done about this peer, to which something may be `owed`. Who is waited for and has had no connection is to
    /// be connected with.
    pub fn farewell(&mut self, peer: Rank, contact: Contact, owed: bool) -> Farewell {
        let goodbyes = &mut self.peers[peer.index()];
        let done = match contact {
            Contact::Never => !owed && !self.parts_with_all,
            // Gone without a goodbye: whether it was lost is about to be known.
            Contact::Gone => goodbyes.heard,
            Contact::Open { written: true } if !goodbyes.said && !owed => {
                goodbyes.said = true;
                return Farewell::Say;
            }
            Contact::Open { written } => goodbyes.said && goodbyes.heard && written,
        };
        if done { Farewell::Done } else { Farewell::Wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(pulse: &mut Pulse, now_ns: u64, heard_ns: u64, spoke_ns: u64) -> (Option<TimeAway>, Vec<Sign>) {
        let mut signs = Vec::new();
        let link = PeerTimes { peer: Rank(1), heard_ns, spoke_ns, written: true };
        (pulse.look(now_ns, [link].into_iter(), &mut signs), signs)
    }

    #[test]
    fn silence_counts_from_the_limit_on_and_heartbeats_come_five_times_as_often() {
        let mut pulse = Pulse::new(&Members::all(2), 1000, 5000, 0);
        assert_eq!(look(&mut pulse, 199, 199, 0).1, []);
        assert_eq!(look(&mut pulse, 200, 0, 0).1, [Sign::Heartbeat(Rank(1))]);
        assert_eq!(look(&mut pulse, 600, 0, 600).1, []);
        assert_eq!(look(&mut pulse, 999, 0, 999).1, []);
        assert_eq!(look(&mut pulse, 1000, 0, 1000).1, [Sign::Silent(Rank(1), 1000)]);
        pulse.goodbye_heard(Rank(1));
        assert_eq!(look(&mut pulse, 1001, 0, 1001).1, []);
    }

    #[test]
    fn heartbeats_come_more_often_where_waits_are_short() {
        let mut pulse = Pulse::new(&Members::all(2), 1000, 500, 0);
        assert_eq!(look(&mut pulse, 99, 0, 0).1, []);
        assert_eq!(look(&mut pulse, 100, 0, 0).1, [Sign::Heartbeat(Rank(1))]);
    }

    #[test]
    fn a_process_that_was_away_blames_nobody_for_the_silence() {
        let mut pulse = Pulse::new(&Members::all(2), 1000, 5000, 0);
        assert_eq!(look(&mut pulse, 400, 0, 400), (None, vec![]));
        assert_eq!(look(&mut pulse, 1500, 0, 1500), (Some(TimeAway { ns: 1100, noticed: true }), vec![]));
        assert_eq!(look(&mut pulse, 2000, 0, 2000), (None, vec![]));
        assert_eq!(look(&mut pulse, 2499, 0, 2499), (None, vec![]));
        assert_eq!(look(&mut pulse, 2500, 0, 2500), (None, vec![Sign::Silent(Rank(1), 1000)]));
    }

    #[test]
    fn an_absence_may_be_noticed_from_four_heartbeats_on() {
        let mut pulse = Pulse::new(&Members::all(2), 1000, 5000, 0);
        assert_eq!(look(&mut pulse, 799, 0, 799).0, Some(TimeAway { ns: 799, noticed: false }));
        assert_eq!(look(&mut pulse, 1599, 0, 1599).0, Some(TimeAway { ns: 800, noticed: true }));
    }

    #[test]
    fn goodbyes_come_last_and_are_said_once() {
        let mut pulse = Pulse::new(&Members::all(2), 1000, 5000, 0);
        let open = Contact::Open { written: true };
        assert_eq!(pulse.farewell(Rank(1), open, true), Farewell::Wait);
        assert_eq!(pulse.farewell(Rank(1), Contact::Open { written: false }, false), Farewell::Wait);
        assert_eq!(pulse.farewell(Rank(1), open, false), Farewell::Say);
        assert_eq!(pulse.farewell(Rank(1), open, false), Farewell::Wait);
        assert_eq!(pulse.farewell(Rank(1), Contact::Gone, false), Farewell::Wait);
        pulse.goodbye_heard(Rank(1));
        assert_eq!(pulse.farewell(Rank(1), open, false), Farewell::Done);
        assert_eq!(pulse.farewell(Rank(1), Contact::Gone, false), Farewell::Done);
        for (epoch, follows) in [(0, Farewell::Done), (1, Farewell::Wait)] {
            let mut pulse = Pulse::new(&Members::all(2).in_epoch(epoch), 1, 1, 0);
            assert_eq!(pulse.farewell(Rank(1), Contact::Never, false), follows);
            assert_eq!(pulse.farewell(Rank(1), open, false), Farewell::Say);
        }
    }
}

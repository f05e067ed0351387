//! Which (lane, peer) has a connection, and who may open one.
//!
//! Both ends of a pair may dial at the same moment, and exactly one connection must come of it, the same one in the
//! eyes of both. A listener can only have taken a dialer that has sent its proof. So the rule is:
//!
//! - the higher rank takes the lower rank's connection whatever its own attempt has come to, and forgets the attempt;
//! - the lower rank takes the higher rank's connection too, unless it has sent its own proof: then it says
//!   "superseded", and the higher rank waits for the connection that this proof is about to open.
//!
//! An attempt that is dropped has therefore either not reached its proof, or is refused by a lower rank whose own proof
//! the higher rank will accept. A pair that has a connection takes no second one.

use penstock_core::Rank;
use std::sync::atomic::{AtomicU8, Ordering};

const IDLE: u8 = 0;
const DIALING: u8 = 1;
const CONNECTED: u8 = 2;

/// What the listener does with a dialer that is who it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PairDecision {
    /// Take it. The token undoes this if the acceptance cannot be sent.
    Take(Before),
    /// This process's own attempt will win.
    Superseded,
    /// There is a connection already.
    Busy,
}

/// The state that [`PairDecision::Take`] replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Before(u8);

/// A state for every (lane, peer). Lanes only ever set idle to dialing, without a lock and without waking anybody when
/// nothing changes; the admission thread decides everything else.
pub(super) struct Pairs {
    rank: Rank,
    ranks: u32,
    cells: Box<[AtomicU8]>,
}

impl Pairs {
    pub(super) fn new(rank: Rank, ranks: u32, lanes: u32) -> Self {
        let count = ranks as usize * lanes as usize;
        Self { rank, ranks, cells: (0..count).map(|_| AtomicU8::new(IDLE)).collect() }
    }

    fn cell(&self, lane: u32, peer: Rank) -> &AtomicU8 {
        assert!(
            peer.0 < self.ranks && peer != self.rank,
            "rank {} has no connection to rank {peer}",
            self.rank
        );
        &self.cells[lane as usize * self.ranks as usize + peer.index()]
    }

    fn change(&self, lane: u32, peer: Rank, from: u8, to: u8) -> bool {
        self.cell(lane, peer).compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// A lane asks for a connection. True if nobody has yet.
    pub(super) fn ask(&self, lane: u32, peer: Rank) -> bool {
        self.change(lane, peer, IDLE, DIALING)
    }

    /// Whether a connection has been asked for and does not exist.
    pub(super) fn is_dialing(&self, lane: u32, peer: Rank) -> bool {
        self.cell(lane, peer).load(Ordering::Acquire) == DIALING
    }

    /// This process's attempt has succeeded. False if another connection was taken meanwhile.
    pub(super) fn dialed(&self, lane: u32, peer: Rank) -> bool {
        self.change(lane, peer, DIALING, CONNECTED)
    }

    /// This process's attempt has failed for good.
    pub(super) fn give_up(&self, lane: u32, peer: Rank) {
        self.change(lane, peer, DIALING, IDLE);
    }

    /// The connection is gone.
    pub(super) fn disconnected(&self, lane: u32, peer: Rank) {
        self.change(lane, peer, CONNECTED, IDLE);
    }

    /// The decision on an authenticated dialer. `proof_sent`: this process's own attempt may have been taken already.
    pub(super) fn judge(&self, lane: u32, from: Rank, proof_sent: bool) -> PairDecision {
        loop {
            let before = self.cell(lane, from).load(Ordering::Acquire);
            match before {
                CONNECTED => return PairDecision::Busy,
                DIALING if proof_sent && self.rank < from => return PairDecision::Superseded,
                // Fails only if a lane has asked this very moment: judge again.
                _ if self.change(lane, from, before, CONNECTED) => return PairDecision::Take(Before(before)),
                _ => {}
            }
        }
    }

    /// A dialer that was taken is gone before it was told.
    pub(super) fn undo(&self, lane: u32, from: Rank, before: Before) {
        self.change(lane, from, CONNECTED, before.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(rank: u32) -> Pairs {
        Pairs::new(Rank(rank), 3, 2)
    }

    #[test]
    fn only_the_first_to_ask_dials() {
        let pairs = pairs(0);
        assert!(pairs.ask(1, Rank(2)) && !pairs.ask(1, Rank(2)));
        assert!(pairs.ask(0, Rank(2)), "lanes are independent");
        assert!(pairs.dialed(1, Rank(2)) && !pairs.ask(1, Rank(2)));
        pairs.disconnected(1, Rank(2));
        assert!(pairs.ask(1, Rank(2)));
    }

    #[test]
    fn the_lower_rank_wins_once_it_has_sent_its_proof() {
        let (low, high) = (pairs(0), pairs(1));
        assert!(low.ask(0, Rank(1)) && high.ask(0, Rank(0)));
        assert_eq!(low.judge(0, Rank(1), true), PairDecision::Superseded);
        assert_eq!(high.judge(0, Rank(0), true), PairDecision::Take(Before(DIALING)));
        assert!(low.dialed(0, Rank(1)));
        assert_eq!(low.judge(0, Rank(1), true), PairDecision::Busy);
        assert!(!high.dialed(0, Rank(0)), "the attempt of the higher rank is void");
    }

    #[test]
    fn the_lower_rank_takes_what_comes_before_its_proof() {
        let low = pairs(0);
        assert!(low.ask(0, Rank(1)));
        assert_eq!(low.judge(0, Rank(1), false), PairDecision::Take(Before(DIALING)));
        assert!(!low.dialed(0, Rank(1)));
    }

    #[test]
    fn what_could_not_be_told_is_undone() {
        let low = pairs(0);
        let PairDecision::Take(before) = low.judge(0, Rank(1), false) else {
            panic!("idle pairs take anybody")
        };
        low.undo(0, Rank(1), before);
        assert!(low.ask(0, Rank(1)));
    }
}

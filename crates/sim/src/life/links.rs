//! How ranks reach each other: connections that are dialled when they are needed, frames in order, and what becomes of them
//! when a process ends.
//!
//! As in the real driver a lane dials the peer for which it has its first frame, and tries again until a limit; a process
//! that has ended refuses, and one that is stopped or has not begun answers later. What a receiver does not read fills its
//! buffers; then the sender's frames wait, and are lost if its process ends first.

use super::scenario::{MS, PEER_TIMEOUT_NS};
use super::{Happening, Omission, World};
use penstock_core::life::{Attempts, Contact, Fault, Obstacle, Question, Verdict, may_end, unreached};
use penstock_core::{Kind, Rank};
use std::collections::VecDeque;

/// How often a process that has given up looks whether it may end.
const FLUSH_LOOK_NS: u64 = 20 * MS;

/// What is on a link.
#[derive(Debug, Clone)]
pub(super) enum Frame {
    /// The dialled end has taken the connection.
    Accepted,
    /// A contribution to a round.
    Part(u32),
    /// Its result.
    Result(u32),
    Left,
    Heartbeat(u32),
    Goodbye,
    Abort(Vec<u8>),
    Ask(Question),
    Reply(u32, Vec<u8>),
    /// The connection has ended.
    End,
}

impl Frame {
    /// What travels so on the wire; what only a connection shows does not.
    pub(super) fn kind(&self) -> Option<Kind> {
        Some(match self {
            Self::Accepted | Self::End => return None,
            Self::Part(_) => Kind::Part,
            Self::Result(_) => Kind::Result,
            Self::Left => Kind::Leave,
            Self::Heartbeat(_) => Kind::Heartbeat,
            Self::Goodbye => Kind::Goodbye,
            Self::Abort(_) => Kind::Abort,
            Self::Ask(_) => Kind::Ask,
            Self::Reply(..) => Kind::Reply,
        })
    }
}

/// What a lane has of a peer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ConnectionState {
    #[default]
    Never,
    /// The dial of this number is under way.
    Dialling(u32),
    Open,
    /// There is no second one.
    Gone,
}

/// One direction of a lane's connection, with the sender's view of it.
#[derive(Debug, Default)]
pub(super) struct Link {
    pub(super) state: ConnectionState,
    /// Written, in order.
    transit: VecDeque<Frame>,
    /// Given out and not written: there is no connection yet, or no room.
    unwritten: VecDeque<Frame>,
    /// Frames of exchanges, not given out yet.
    pub(super) owed: VecDeque<Frame>,
    attempts: Option<Attempts>,
    last_ns: u64,
    pub(super) cut: bool,
}

impl Link {
    pub(super) fn is_open(&self) -> bool {
        self.state == ConnectionState::Open
    }

    /// Whether everything that was given out is written.
    pub(super) fn is_written(&self) -> bool {
        self.unwritten.is_empty()
    }

    /// Drops what was given out and not written.
    pub(super) fn cancel(&mut self) {
        self.unwritten.clear();
    }

    pub(super) fn contact(&self) -> Contact {
        match self.state {
            ConnectionState::Never | ConnectionState::Dialling(_) => Contact::Never,
            ConnectionState::Open => Contact::Open { written: self.is_written() },
            ConnectionState::Gone => Contact::Gone,
        }
    }

    /// Whether something waits for the peer that no connection has taken.
    pub(super) fn owes(&self) -> bool {
        !self.owed.is_empty() || matches!(self.contact(), Contact::Never) && !self.unwritten.is_empty()
    }
}

impl World {
    /// Sends, over a new connection if there was none.
    pub(super) fn send(&mut self, from: u32, to: u32, lane: u32, frame: Frame) {
        let link = self.link(from, to, lane);
        match self.links[link].state {
            ConnectionState::Open => self.write(link, frame),
            ConnectionState::Dialling(_) => self.links[link].unwritten.push_back(frame),
            ConnectionState::Never => {
                self.links[link].unwritten.push_back(frame);
                self.dial(link);
            }
            ConnectionState::Gone => {}
        }
    }

    /// Writes behind what is written, if there is room.
    fn write(&mut self, link: usize, frame: Frame) {
        let room = self.scenario.room;
        let place = &mut self.links[link];
        if place.transit.len() >= room || !place.unwritten.is_empty() {
            return place.unwritten.push_back(frame);
        }
        self.transmit(link, frame);
    }

    pub(super) fn transmit(&mut self, link: usize, frame: Frame) {
        if self.links[link].cut {
            return;
        }
        let (from, to, lane) = self.ends_of(link);
        self.ranks[from as usize].spoke(to, lane, self.agenda.now_ns());
        let at_ns = self.agenda.now_ns() + self.crossing_ns(from, to);
        let place = &mut self.links[link];
        place.last_ns = place.last_ns.max(at_ns);
        place.transit.push_back(frame);
        self.agenda.at(place.last_ns, Happening::Arrive(link));
    }

    fn crossing_ns(&mut self, from: u32, to: u32) -> u64 {
        let jitter_ns = self.random.below(self.scenario.jitter_ns + 1);
        self.scenario.delay_ns[from as usize][to as usize] + jitter_ns
    }

    /// The first frame of a link is at its receiver, who reads it.
    pub(super) fn read(&mut self, link: usize) -> Option<Frame> {
        let frame = self.links[link].transit.pop_front();
        if let Some(next) = self.links[link].unwritten.pop_front() {
            self.transmit(link, next);
        }
        frame
    }

    /// Asks for a connection, unless there is or was one.
    pub(super) fn dial(&mut self, link: usize) {
        if self.links[link].state != ConnectionState::Never {
            return;
        }
        self.dials += 1;
        self.links[link].state = ConnectionState::Dialling(self.dials);
        let attempts = Attempts::new(self.agenda.now_ns(), PEER_TIMEOUT_NS);
        self.links[link].attempts = Some(attempts);
        self.agenda.at(attempts.give_up_ns(), Happening::GiveUp(link, self.dials));
        self.attempt(link, self.dials);
    }

    pub(super) fn attempt(&mut self, link: usize, dial: u32) {
        let (from, to, _) = self.ends_of(link);
        if self.links[link].state == ConnectionState::Dialling(dial) && self.ranks[from as usize].lives() {
            let crossing_ns = self.crossing_ns(from, to);
            self.agenda.after(crossing_ns, Happening::Knock(link, dial));
        }
    }

    /// A dial is at the peer's listener.
    pub(super) fn knock(&mut self, link: usize, dial: u32) {
        let (from, to, lane) = self.ends_of(link);
        let back = self.link(to, from, lane);
        if self.links[link].state != ConnectionState::Dialling(dial) || self.links[link].cut {
            return;
        }
        if !self.ranks[to as usize].lives() {
            // Refused: it has ended, and its listener with it.
            let Some(attempts) = &mut self.links[link].attempts else { return };
            let (least_ns, most_ns) = attempts.failed(Obstacle::There).into_inner();
            let again_ns = self.crossing_ns(to, from) + self.random.between(least_ns, most_ns);
            return self.agenda.after(again_ns, Happening::Redial(link, dial));
        }
        if matches!(self.links[back].state, ConnectionState::Open | ConnectionState::Gone) {
            return;
        }
        self.note(&format!("rank {to} takes the connection of rank {from}, lane {lane}"));
        // Both may have dialled: one connection comes of it.
        self.links[back].state = ConnectionState::Open;
        self.transmit(back, Frame::Accepted);
        self.opened(back);
    }

    /// The peer has taken this rank's connection.
    pub(super) fn accepted(&mut self, link: usize) {
        if matches!(self.links[link].state, ConnectionState::Dialling(_)) {
            self.links[link].state = ConnectionState::Open;
            self.opened(link);
        } else if self.links[link].state == ConnectionState::Never {
            // It has given up meanwhile, and closed its end.
            self.transmit(link, Frame::End);
        }
    }

    /// A connection is open at this end. Whoever holds a verdict tells it, and nothing else.
    fn opened(&mut self, link: usize) {
        let (from, to, lane) = self.ends_of(link);
        self.ranks[from as usize].opened(to, lane, self.agenda.now_ns());
        let mut waiting = std::mem::take(&mut self.links[link].unwritten);
        if let Some(verdict) = self.ranks[from as usize].life.verdict() {
            waiting.clear();
            // A lane that only waits for its last frames to be written takes up connections all the same.
            if !(self.ranks[from as usize].flushes.is_some() && self.omits(Omission::DeafFlush)) {
                waiting.push_back(Frame::Abort(verdict.encode()));
            }
        }
        waiting.into_iter().for_each(|frame| self.write(link, frame));
    }

    /// A dial has taken too long.
    pub(super) fn give_up(&mut self, link: usize, dial: u32) {
        let (from, to, _) = self.ends_of(link);
        if self.links[link].state != ConnectionState::Dialling(dial) || !self.ranks[from as usize].lives() {
            return;
        }
        // What it has for the peer waits on: the peer may yet be there, and connect by itself.
        self.links[link].state = ConnectionState::Never;
        self.note(&format!("rank {from} cannot connect to rank {to}"));
        if self.omits(Omission::DeafToTheUnreachable) {
            return;
        }
        let Some(attempts) = self.links[link].attempts else { return };
        let reason = |_| format!("not connected to by rank {from}");
        let Fault { culprit, error } = attempts.given_up(Rank(from), Rank(to), reason);
        let verdict = Verdict::of_error(&error, Some(culprit), None, Rank(from));
        self.ranks[from as usize].life.unreachable(self.agenda.now_ns(), verdict);
        self.follow(from);
    }

    /// Whoever takes up its first verdict connects to all who may not hear of it otherwise.
    pub(super) fn dial_strangers(&mut self, rank: u32) {
        if self.omits(Omission::DialNobody) {
            return;
        }
        self.unreached(rank).collect::<Vec<_>>().into_iter().for_each(|link| self.dial(link));
    }

    /// To peers that have yet to hear of a verdict.
    fn unreached(&self, rank: u32) -> impl Iterator<Item = usize> + '_ {
        let contacts = move |lane| {
            let links = self.others(rank).map(move |other| (Rank(other), self.link(rank, other, lane)));
            links.map(|(other, link)| (other, self.links[link].contact()))
        };
        let lanes = (0..self.scenario.lanes)
            .flat_map(move |lane| unreached(lane, contacts(lane)).map(move |peer| (lane, peer)));
        lanes.map(move |(lane, peer)| self.link(rank, peer.0, lane))
    }

    /// Ends a process that has given up: once its last frames are written, or after a bounded time.
    pub(super) fn exit(&mut self, rank: u32) {
        self.ranks[rank as usize].flushes = Some(self.agenda.now_ns());
        self.flush(rank);
    }

    pub(super) fn flush(&mut self, rank: u32) {
        let Some(since_ns) = self.ranks[rank as usize].flushes else { return };
        let now_ns = self.agenda.now_ns();
        let lanes = self.scenario.lanes;
        let links = self.others(rank).flat_map(|other| (0..lanes).map(move |lane| (other, lane)));
        let links = links.map(|(other, lane)| &self.links[self.link(rank, other, lane)]);
        let written = links.into_iter().all(|link| !link.is_open() || link.is_written());
        // What is written is acknowledged a round trip later.
        let delays_ns = self.scenario.delay_ns[rank as usize].iter();
        let arrived = written && now_ns >= since_ns + 2 * delays_ns.max().copied().unwrap_or(0);
        let reached = self.omits(Omission::ReachNobody) || self.unreached(rank).next().is_none();
        if may_end(now_ns - since_ns, arrived, reached) {
            return self.close(rank);
        }
        self.agenda.after(FLUSH_LOOK_NS, Happening::Flush(rank));
    }

    /// The process is gone: its connections end behind what is written.
    pub(super) fn close(&mut self, rank: u32) {
        self.ranks[rank as usize].gone = true;
        for other in self.others(rank) {
            for lane in 0..self.scenario.lanes {
                let link = self.link(rank, other, lane);
                self.links[link].owed.clear();
                self.links[link].unwritten.clear();
                if self.links[link].is_open() {
                    self.transmit(link, Frame::End);
                }
                self.links[link].state = ConnectionState::Gone;
            }
        }
    }
}

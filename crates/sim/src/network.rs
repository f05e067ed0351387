//! The network in virtual time: a full-duplex card per rank, and a byte stream in order per connection.
//!
//! A connection takes a bounded number of bytes from the scheduler; a card sends segments of its connections in turn, each
//! crosses the link, and the receiving card takes in one after the other. Left out on purpose: loss and retransmission,
//! acknowledgements (a connection has room again when bytes arrive), and switches (the cards are the bottleneck).

use crate::agenda::Agenda;
use crate::memory::Chunk;
use crate::program::Links;
use crate::random::Random;
use penstock_core::types::Rank;
use penstock_core::wire::HEADER_BYTES;
use std::collections::VecDeque;

/// A connection's number.
pub type ConnectionId = usize;

/// What happens on the network.
#[derive(Debug, Clone, Copy)]
pub enum Moved {
    /// A segment has left the sender's card.
    Sent(ConnectionId, u64),
    /// It has reached the receiver's card.
    Arrived(ConnectionId, u64),
    /// It is in the receiver's hands.
    Received(ConnectionId, u64),
}

/// A thing in a byte stream.
#[derive(Debug)]
pub enum Item {
    /// A frame: its header as bytes, and the bytes of its payload as they were when it was written.
    Frame {
        /// The header.
        header: [u8; HEADER_BYTES],
        /// The payload's length.
        len_bytes: u64,
        /// The payload; `None` if there is none or memory is virtual.
        payload: Option<Box<[u8]>>,
    },
    /// The sender has closed the connection.
    End,
}

impl Item {
    /// Its length in the stream.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        match self {
            Self::Frame { len_bytes, .. } => HEADER_BYTES as u64 + len_bytes,
            Self::End => 1,
        }
    }
}

/// A frame that is being written: its memory must not change until it is through.
#[derive(Debug)]
pub struct Writing {
    remaining_bytes: u64,
    /// The memory that is written, and what it held at the start.
    pub payload: Option<(Chunk, Option<Box<[u8]>>)>,
}

/// A connection, one direction of it.
#[derive(Debug)]
pub struct Connection {
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// The lane.
    pub lane: u32,
    /// What was written and has not been received completely.
    pub transit: VecDeque<Item>,
    /// Bytes of the first item of `transit` that were received.
    pub received_bytes: u64,
    /// Where the first item's payload goes, once its header was received.
    pub placed: Option<Option<Chunk>>,
    /// Whether a look for frames is planned.
    pub woken: bool,
    /// Whether the sender has written [`Item::End`], died, or seen the other direction end.
    pub closed: bool,
    /// Whether the receiver has seen its end.
    pub ended: bool,
    /// When something was last written.
    pub spoke_ns: u64,
    /// When something was last read.
    pub heard_ns: u64,
    writing: Option<Writing>,
    /// Written, not yet sent by the card.
    buffered_bytes: u64,
    /// Written, not yet received.
    committed_bytes: u64,
    last_arrival_ns: u64,
}

#[derive(Debug, Default)]
struct Card {
    sending: bool,
    receiving: bool,
    turn: usize,
    arrived: VecDeque<(ConnectionId, u64)>,
    dead: bool,
}

/// Cards and connections.
#[derive(Debug)]
pub struct Fabric {
    links: Links,
    random: Random,
    per_rank: usize,
    lanes: usize,
    connections: Vec<Connection>,
    cards: Vec<Card>,
}

impl Fabric {
    /// A network that has carried nothing yet.
    #[must_use]
    pub fn new(links: Links, ranks: u32, lanes: u32, random: Random) -> Self {
        let mut connections = Vec::new();
        for from in 0..ranks {
            for to in 0..ranks {
                connections.extend((0..lanes).map(|lane| Connection::new(Rank(from), Rank(to), lane)));
            }
        }
        let cards = (0..ranks).map(|_| Card::default()).collect();
        let (per_rank, lanes) = ((ranks * lanes) as usize, lanes as usize);
        Self { links, random, per_rank, lanes, connections, cards }
    }

    /// The number of a connection.
    #[must_use]
    pub fn id(&self, from: Rank, to: Rank, lane: u32) -> ConnectionId {
        from.index() * self.per_rank + to.index() * self.lanes + lane as usize
    }

    /// A connection.
    pub fn connection(&mut self, id: ConnectionId) -> &mut Connection {
        &mut self.connections[id]
    }

    /// How long a lane takes to look for frames after it was woken.
    pub fn wake_ns(&mut self) -> u64 {
        self.random.below(self.links.wake_ns_max + 1)
    }

    /// Whether the connection would take another frame.
    #[must_use]
    pub fn has_room(&self, id: ConnectionId) -> bool {
        let connection = &self.connections[id];
        connection.writing.is_none()
            && !connection.closed
            && connection.committed_bytes < self.links.committed_bytes_max
    }

    /// Begins to write an item.
    pub fn begin(&mut self, id: ConnectionId, item: Item, payload: Option<(Chunk, Option<Box<[u8]>>)>) {
        let connection = &mut self.connections[id];
        assert!(connection.writing.is_none(), "two frames at once on a connection");
        connection.writing = Some(Writing { remaining_bytes: item.len_bytes(), payload });
        connection.transit.push_back(item);
    }

    /// Closes a connection after what is being written.
    pub fn close(&mut self, id: ConnectionId) {
        let connection = &mut self.connections[id];
        connection.closed = true;
        connection.transit.push_back(Item::End);
        match &mut connection.writing {
            Some(writing) => writing.remaining_bytes += Item::End.len_bytes(),
            None => {
                connection.writing = Some(Writing { remaining_bytes: Item::End.len_bytes(), payload: None });
            }
        }
    }

    /// Writes as much as there is room for; returns what was written completely.
    pub fn write<E: From<Moved>>(&mut self, id: ConnectionId, agenda: &mut Agenda<E>) -> Option<Writing> {
        let connection = &mut self.connections[id];
        let room = self.links.committed_bytes_max.saturating_sub(connection.committed_bytes);
        let writing = connection.writing.as_mut()?;
        let bytes = writing.remaining_bytes.min(room);
        writing.remaining_bytes -= bytes;
        connection.buffered_bytes += bytes;
        connection.committed_bytes += bytes;
        if bytes > 0 {
            connection.spoke_ns = agenda.now_ns();
        }
        let done = if writing.remaining_bytes == 0 { self.connections[id].writing.take() } else { None };
        self.send(self.connections[id].from, agenda);
        done
    }

    /// The card sends the next segment, if it is idle and there is one.
    fn send<E: From<Moved>>(&mut self, rank: Rank, agenda: &mut Agenda<E>) {
        let card = &mut self.cards[rank.index()];
        if card.sending || card.dead {
            return;
        }
        let first = rank.index() * self.per_rank;
        let turns = (0..self.per_rank).map(|i| first + (card.turn + i) % self.per_rank);
        let Some(id) = turns.into_iter().find(|id| self.connections[*id].buffered_bytes > 0) else { return };
        card.turn = id - first + 1;
        card.sending = true;
        let bytes = self.connections[id].buffered_bytes.min(self.links.segment_bytes);
        self.connections[id].buffered_bytes -= bytes;
        let duration_ns = self.duration_ns(bytes);
        agenda.after(duration_ns, Moved::Sent(id, bytes).into());
    }

    fn duration_ns(&mut self, bytes: u64) -> u64 {
        let stalls = self.random.chance(self.links.stall_permille);
        let stall_ns = if stalls { self.random.below(self.links.stall_ns_max + 1) } else { 0 };
        (bytes * 1_000_000_000).div_ceil(self.links.bytes_per_s) + stall_ns
    }

    /// Goes on after something has moved; returns the connection and bytes that the receiver may read.
    pub fn moved<E: From<Moved>>(
        &mut self,
        moved: Moved,
        agenda: &mut Agenda<E>,
    ) -> Option<(ConnectionId, u64)> {
        match moved {
            Moved::Sent(id, bytes) => {
                let from = self.connections[id].from;
                self.cards[from.index()].sending = false;
                let jitter_ns = self.random.below(self.links.jitter_ns + 1);
                let connection = &mut self.connections[id];
                let at_ns = agenda.now_ns() + self.links.delay_ns + jitter_ns;
                // In order within a connection, whatever the jitter.
                connection.last_arrival_ns = connection.last_arrival_ns.max(at_ns);
                agenda.at(connection.last_arrival_ns, Moved::Arrived(id, bytes).into());
                self.send(from, agenda);
                None
            }
            Moved::Arrived(id, bytes) => {
                let to = self.connections[id].to;
                self.cards[to.index()].arrived.push_back((id, bytes));
                self.receive(to, agenda);
                None
            }
            Moved::Received(id, bytes) => {
                let to = self.connections[id].to;
                self.cards[to.index()].receiving = false;
                self.receive(to, agenda);
                (!self.cards[to.index()].dead).then_some((id, bytes))
            }
        }
    }

    /// The receiver reads: there is room again.
    pub fn read(&mut self, id: ConnectionId, bytes: u64, now_ns: u64) {
        let connection = &mut self.connections[id];
        connection.committed_bytes -= bytes;
        connection.heard_ns = now_ns;
    }

    /// Whether all that was begun is written.
    #[must_use]
    pub fn is_written(&self, id: ConnectionId) -> bool {
        self.connections[id].writing.is_none()
    }

    /// Nothing more is written: what is half written stays so.
    pub fn sever(&mut self, id: ConnectionId) {
        let connection = &mut self.connections[id];
        (connection.closed, connection.writing) = (true, None);
    }

    /// The card takes in the next segment, if it is idle and there is one.
    fn receive<E: From<Moved>>(&mut self, rank: Rank, agenda: &mut Agenda<E>) {
        let card = &mut self.cards[rank.index()];
        if card.receiving {
            return;
        }
        let Some((id, bytes)) = card.arrived.pop_front() else { return };
        card.receiving = true;
        let duration_ns = self.duration_ns(bytes);
        agenda.after(duration_ns, Moved::Received(id, bytes).into());
    }

    /// A rank is gone: it sends nothing more and takes nothing in.
    pub fn kill(&mut self, rank: Rank) {
        self.cards[rank.index()].dead = true;
        for connection in self.connections.iter_mut().filter(|c| c.from == rank) {
            connection.closed = true;
        }
    }

    /// Connections from this rank to others.
    pub fn from(&self, rank: Rank) -> impl Iterator<Item = ConnectionId> + use<> {
        let (first, count, lanes) = (rank.index() * self.per_rank, self.per_rank, self.lanes);
        (first..first + count).filter(move |id| (id - first) / lanes != rank.index())
    }

    /// What has not arrived: a connection's number and what is on it.
    #[must_use]
    pub fn left(&self) -> Option<&Connection> {
        self.connections.iter().find(|connection| {
            !connection.transit.is_empty() || connection.committed_bytes > 0 || connection.writing.is_some()
        })
    }
}

impl Connection {
    fn new(from: Rank, to: Rank, lane: u32) -> Self {
        Self {
            from,
            to,
            lane,
            transit: VecDeque::new(),
            received_bytes: 0,
            placed: None,
            woken: false,
            closed: false,
            ended: false,
            spoke_ns: 0,
            heard_ns: 0,
            writing: None,
            buffered_bytes: 0,
            committed_bytes: 0,
            last_arrival_ns: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links() -> Links {
        Links {
            bytes_per_s: 1_000_000_000,
            delay_ns: 1000,
            jitter_ns: 0,
            committed_bytes_max: 500,
            segment_bytes: 100,
            stall_permille: 0,
            stall_ns_max: 0,
            wake_ns_max: 0,
        }
    }

    /// Sends one frame from each of `senders` to rank 0 and returns when the last byte is received.
    fn send(senders: &[u32], payload_bytes: u64) -> u64 {
        let mut network = Fabric::new(links(), 3, 1, Random::new(1));
        let mut agenda = Agenda::<Moved>::default();
        for &from in senders {
            let id = network.id(Rank(from), Rank(0), 0);
            assert!(network.has_room(id));
            let item = Item::Frame { header: [0; HEADER_BYTES], len_bytes: payload_bytes, payload: None };
            network.begin(id, item, None);
            network.write(id, &mut agenda);
        }
        while let Some(moved) = agenda.advance() {
            if let Some((id, bytes)) = network.moved(moved, &mut agenda) {
                network.read(id, bytes, agenda.now_ns());
                network.connection(id).received_bytes += bytes;
                network.write(id, &mut agenda);
                assert!(network.connection(id).committed_bytes <= 500);
            }
        }
        for &from in senders {
            let id = network.id(Rank(from), Rank(0), 0);
            assert_eq!(network.connection(id).received_bytes, HEADER_BYTES as u64 + payload_bytes);
        }
        agenda.now_ns()
    }

    #[test]
    fn a_frame_takes_its_length_over_the_rate_and_the_delay() {
        // A byte per ns; the receiving card begins when the first segment of 100 bytes is there.
        assert_eq!(send(&[1], 276), 300 + 1000 + 100);
    }

    #[test]
    fn senders_to_one_rank_share_its_card() {
        assert_eq!(send(&[1, 2], 276), 100 + 1000 + 600);
    }
}

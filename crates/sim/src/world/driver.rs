//! Between a node and the network: what a lane of the real library does with a socket.

use super::worker::WorkerPhase;
use super::{Happening, World};
use crate::check::rest::check_owner_memory;
use crate::check::{Checker, Violation, check};
use crate::memory::{Chunk, SimMemory};
use crate::network::{ConnectionId, Item, Writing};
use crate::program::Sabotage;
use penstock_core::node::{Action, Event};
use penstock_core::types::Rank;
use penstock_core::wire::{Destination, HEADER_BYTES, Header, Kind, Outgoing, data_has_moved};

fn protocol(rank: Rank, error: impl std::fmt::Display) -> Violation {
    Violation::new(Checker::Protocol, format!("rank {rank}: {error}"))
}

impl<M: SimMemory> World<M> {
    /// Plans a look for frames, as a lane does that was woken or whose socket became writable.
    pub(super) fn wake(&mut self, id: ConnectionId) {
        if !std::mem::replace(&mut self.network.connection(id).woken, true) {
            let delay_ns = self.network.wake_ns();
            self.agenda.after(delay_ns, Happening::Fill(id));
        }
    }

    pub(super) fn step(&mut self, rank: Rank, lane: u32, event: Event<Chunk>) -> Result<(), Violation> {
        let at = self.at(rank, lane);
        self.nodes[at].step(event, &mut self.actions).map_err(|error| protocol(rank, error))?;
        self.watch(rank, lane)?;
        self.act(rank, lane)
    }

    /// Sends a control frame to all others.
    pub(super) fn control(
        &mut self,
        rank: Rank,
        lane: u32,
        header: Header,
        payload: Option<Chunk>,
    ) -> Result<(), Violation> {
        if let Some(model) = self.model(rank, lane) {
            model.control(header.kind);
        }
        self.step(rank, lane, Event::Control { to: None, header, payload })
    }

    /// Does what a node has asked for.
    pub(super) fn act(&mut self, rank: Rank, lane: u32) -> Result<(), Violation> {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Wake(peer) => {
                    let id = self.network.id(rank, peer, lane);
                    self.wake(id);
                }
                Action::Complete { book, slice, seq, present, .. } => {
                    self.completed(rank, book, slice, seq, present)?;
                    if self.sabotage(Sabotage::CompleteTwice) {
                        self.completed(rank, book, slice, seq, present)?;
                    }
                }
                Action::Gathered { book, slice, parts } => self.gathered(rank, book, slice, parts)?,
                Action::AllLeft => self.workers[rank.index()].lanes_left += 1,
                // Its program says the word whether it waits or not.
                Action::Waits { .. } => {}
                // Rounds that end early have a test of their own: tests/collectives/unordered.rs.
                Action::Enough { .. } | Action::Late { .. } => {}
                // Calls have a world of their own: `crate::calls`.
                Action::CallComplete(_) | Action::CallSource { .. } => {}
                Action::Control { from, header, payload } if header.kind == Kind::Blob => {
                    self.blob(rank, from, &header, payload.as_ref())?;
                }
                Action::Control { from, header, payload } => {
                    let payload = payload.as_ref().and_then(Chunk::to_bytes).unwrap_or_default();
                    self.heed(rank, lane, from, &header, &payload)?;
                }
            }
        }
        self.actions = actions;
        Ok(())
    }

    fn blob(
        &mut self,
        rank: Rank,
        from: Rank,
        header: &Header,
        payload: Option<&Chunk>,
    ) -> Result<(), Violation> {
        let bytes = payload.and_then(Chunk::to_bytes).unwrap_or_default().into_vec();
        let taken = self.workers[rank.index()].all_gather.arrived(from, header.seq, bytes);
        taken.map_err(|error| protocol(rank, error))
    }

    /// Takes frames, decided now, until the connection has no room or there is nothing to send.
    pub(super) fn fill(&mut self, id: ConnectionId) -> Result<(), Violation> {
        self.network.connection(id).woken = false;
        let (from, to, lane) = {
            let connection = self.network.connection(id);
            (connection.from, connection.to, connection.lane)
        };
        loop {
            if let Some(written) = self.network.write(id, &mut self.agenda) {
                check_unchanged(from, &written)?;
            }
            if !self.network.has_room(id) {
                return Ok(());
            }
            // What lanes say themselves goes behind what the node has given out.
            let frame = match self.said[id].pop_front() {
                None if self.fates[from.index()].fails() || self.workers[from.index()].exits => None,
                None => self.next_frame(from, lane, to)?,
                said => {
                    self.said_frames += 1;
                    said
                }
            };
            if let Some(frame) = frame {
                self.begin(id, from, frame);
            } else if self.workers[from.index()].exits {
                self.network.close(id);
            } else {
                return Ok(());
            }
        }
    }

    /// What the node would send next.
    fn next_frame(&mut self, from: Rank, lane: u32, to: Rank) -> Result<Option<Outgoing<Chunk>>, Violation> {
        let at = self.at(from, lane);
        let idle = self.nodes[at].has_frame(to) && self.sabotage(Sabotage::Idle);
        let frame = if idle { None } else { self.nodes[at].next_frame(to) };
        if let Some(model) = self.model(from, lane) {
            model.chosen(to, frame.as_ref().map(|frame| &frame.header))?;
        }
        if let Some(frame) = &frame {
            // There was room for it, so it is begun at once.
            self.nodes[at].first_byte_out(to, &frame.header);
            self.watch(from, lane)?;
        }
        Ok(frame)
    }

    /// Begins to write a frame: its header is encoded, and its payload is what the memory holds now.
    fn begin(&mut self, id: ConnectionId, from: Rank, frame: Outgoing<Chunk>) {
        let Outgoing { header, payload } = frame;
        if header.kind.is_exchange() {
            let miscounted = self.sabotage(Sabotage::Miscount);
            self.report.sent_bytes[from.index()] += u64::from(header.payload_bytes) + u64::from(miscounted);
        }
        let mut sent = payload.as_ref().and_then(Chunk::to_bytes);
        let written = payload.map(|chunk| (chunk, sent.clone()));
        if let Some((chunk, _)) = &written
            && chunk.len_bytes() > 0
            && self.sabotage(Sabotage::ChangeWhileWriting)
        {
            chunk.write(|bytes| bytes[0] ^= 1);
        }
        if let Some(bytes) = &mut sent
            && header.kind == Kind::Push
            && self.sabotage(Sabotage::FlipBit)
        {
            bytes[0] ^= 1;
        }
        if header.kind == Kind::Answer && self.sabotage(Sabotage::DropFrame) {
            return;
        }
        let len_bytes = u64::from(header.payload_bytes);
        self.network.begin(id, Item::Frame { header: header.encode(), len_bytes, payload: sent }, written);
    }

    /// Bytes are here: reads as many frames as they complete.
    pub(super) fn received(&mut self, id: ConnectionId, bytes: u64) -> Result<(), Violation> {
        let connection = self.network.connection(id);
        connection.received_bytes += bytes;
        let to = connection.to;
        if connection.ended {
            return Ok(());
        }
        let (mut frames, mut idle_frames) = (0, 0);
        while let Some(kind) = self.read_frame(id)? {
            frames += 1;
            idle_frames += u64::from(kind.is_idle());
        }
        if data_has_moved(bytes, frames, idle_frames) {
            self.fates[to.index()].moved_ns = self.agenda.now_ns();
        }
        Ok(())
    }

    /// Reads a frame, if all of it is here.
    fn read_frame(&mut self, id: ConnectionId) -> Result<Option<Kind>, Violation> {
        let connection = self.network.connection(id);
        let (from, to, lane) = (connection.from, connection.to, connection.lane);
        let Some(item) = connection.transit.front() else { return Ok(None) };
        let (received, total) = (connection.received_bytes, item.len_bytes());
        let Item::Frame { header, .. } = item else {
            if received >= total {
                connection.transit.pop_front();
                connection.received_bytes = 0;
                self.ended(id)?;
            }
            return Ok(None);
        };
        let (bytes, to_place) = (*header, connection.placed.is_none());
        if received < HEADER_BYTES as u64 {
            return Ok(None);
        }
        let header = Header::decode(&bytes).map_err(|error| protocol(to, error))?;
        if to_place && !self.fates[to.index()].fails() {
            let placed = self.destination(from, to, lane, &header)?;
            self.network.connection(id).placed = Some(placed);
        }
        if received < total {
            return Ok(None);
        }
        self.frame(id, from, to, lane, header)?;
        Ok(Some(header.kind))
    }

    /// Asks the node where a payload goes, which is when an owner's memory grows.
    fn destination(
        &mut self,
        from: Rank,
        to: Rank,
        lane: u32,
        header: &Header,
    ) -> Result<Option<Chunk>, Violation> {
        let at = self.at(to, lane);
        let place = self.nodes[at].destination(from, header).map_err(|error| protocol(to, error))?;
        let Destination::Chunk(chunk) = place else { return Ok(None) };
        if header.kind == Kind::Push && self.sabotage(Sabotage::KeepScratch) {
            self.hoard.push(chunk.clone());
        }
        // From now on and until all is here the memory holds a part of the payload: nobody may read it.
        chunk.write(|bytes| bytes.fill(0xEE));
        // A rank that has left sums into scratch, and a blob is the driver's: neither is under a window.
        let held = matches!(header.kind, Kind::Push | Kind::Part | Kind::Gather | Kind::Passed);
        if self.workers[to.index()].phase == WorkerPhase::Running && held {
            let held_bytes = self.nodes[at].memory().held_bytes();
            let setup = &self.setup;
            let exceptions = setup.demands.exceptions;
            check_owner_memory(to, held_bytes, &setup.books, setup.ranks, setup.window_bytes, exceptions)?;
        }
        Ok(Some(chunk))
    }

    /// A frame is complete.
    fn frame(
        &mut self,
        id: ConnectionId,
        from: Rank,
        to: Rank,
        lane: u32,
        header: Header,
    ) -> Result<(), Violation> {
        let connection = self.network.connection(id);
        let placed = connection.placed.take().flatten();
        let Some(item) = connection.transit.pop_front() else { return Ok(()) };
        connection.received_bytes -= item.len_bytes();
        if self.fates[to.index()].fails() {
            // Only what others say of the failure is heard any more.
            let Item::Frame { payload: Some(bytes), .. } = item else { return Ok(()) };
            let over = self.workers[to.index()].is_over() || header.kind != Kind::Abort;
            return if over { Ok(()) } else { self.heed(to, lane, from, &header, &bytes) };
        }
        if let (Item::Frame { payload: Some(bytes), .. }, Some(chunk)) = (item, &placed) {
            chunk.write(|memory| memory.copy_from_slice(&bytes));
        }
        self.step(to, lane, Event::Frame { from, header, payload: placed })
    }
}

/// What was written to the link is what the memory still holds.
fn check_unchanged(rank: Rank, written: &Writing) -> Result<(), Violation> {
    let Some((chunk, Some(before))) = &written.payload else { return Ok(()) };
    let same = chunk.read(|bytes| bytes == &before[..]).unwrap_or(true);
    check(same, Checker::PayloadStays, || {
        format!("rank {rank}: {} bytes changed while they were being written", chunk.len_bytes())
    })
}

//! One connection of one lane to one peer: frames in, frames out, never blocking.
//!
//! Reading puts payloads straight where the node wants them: one `readv` fills the rest of the payload under way and, behind
//! it, a staging buffer with the headers (and short payloads) that follow. What is staged of a payload is copied once more, so
//! where payloads are long little is staged ([`AHEAD_BYTES`]). Writing asks the node for a frame only
//! when the transport can take it, so that the choice is made at the last moment; below it waits no more than one frame,
//! [`BATCH_BYTES`], and what the transport holds, which is bounded ([`crate::transport`]).
//!
//! Readiness is told only on change (edge-triggered), so it is remembered until a call would block.

use crate::line;
use crate::memory::Chunk;
use crate::observed::LaneNode;
use crate::transport::Transport;
use mio::{Interest, Registry, Token};
use penstock_core::node::{Action, Event};
use penstock_core::wire::{Destination, HEADER_BYTES, Outgoing};
use penstock_core::{Error, Header, Kind, Rank};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::time::Instant;

/// Frames are taken from the node until this much waits to be written, so that small frames share a system call.
const BATCH_BYTES: usize = 64 << 10;
/// Frames of one `writev`, each a header and a payload.
const BATCH_FRAMES: usize = 32;
/// Room behind a payload for what follows it.
const STAGING_BYTES: usize = 16 << 10;
/// As much of that is used behind a payload that is as long as all of it: what follows are a few headers, and then another.
const AHEAD_BYTES: usize = 256;
/// Bytes read, and written, before other connections get their turn.
const TURN_BYTES: usize = 1 << 20;

/// What a turn of reading or writing came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// There is no more for now; readiness will tell.
    Idle,
    /// There may be more: come back after the others.
    Again,
    /// The other end is gone, and this is how it was noticed.
    Closed(String),
}

/// A frame whose payload is arriving.
struct Arriving {
    header: Header,
    chunk: Chunk,
    filled: usize,
}

/// A frame that is given out.
struct Departing {
    head: [u8; HEADER_BYTES],
    payload: Option<Chunk>,
    /// Of the node's, until it is begun.
    unbegun: Option<Header>,
}

impl Departing {
    fn new(Outgoing { header, payload }: Outgoing<Chunk>, of_node: bool) -> Self {
        Self { head: header.encode(), payload, unbegun: of_node.then_some(header) }
    }

    fn len(&self) -> usize {
        HEADER_BYTES + self.payload.as_ref().map_or(0, Chunk::len)
    }
}

/// Where a connection's frames come from, but for those that the lane itself adds.
pub(crate) struct Source<'a> {
    pub(crate) node: &'a mut LaneNode,
    /// The other end.
    pub(crate) peer: Rank,
    /// Whether the node may have a frame for it.
    pub(crate) wanted: &'a mut bool,
}

impl Source<'_> {
    fn next(&mut self) -> Option<Outgoing<Chunk>> {
        let frame = if *self.wanted { self.node.next_frame(self.peer) } else { None };
        *self.wanted = frame.is_some();
        frame
    }
}

/// The connection. Readiness flags are public to the lane, which learns of readiness.
pub(crate) struct Connection {
    transport: Transport,
    /// A read may give something.
    pub(crate) may_read: bool,
    /// A write may take something.
    pub(crate) may_write: bool,
    /// The system has said that the other end has closed: read to the end even after a short read.
    pub(crate) hung_up: bool,
    /// The rate for which it is bound.
    bytes_per_s: Option<f64>,
    staging: Box<[u8; STAGING_BYTES]>,
    /// The part of `staging` that is read and not understood yet.
    staged: std::ops::Range<usize>,
    /// How much is staged at a time, by what came last.
    ahead_bytes: usize,
    arriving: Option<Arriving>,
    /// After a failure: bytes of payload that are to come, and an abort to which they belong.
    skip: usize,
    abort: Option<Vec<u8>>,
    departing: VecDeque<Departing>,
    /// Bytes in `departing` that are not written yet.
    departing_bytes: usize,
    /// Bytes of the first of `departing` that are written.
    written: usize,
    /// Bytes written so far.
    sent_bytes: u64,
    /// Those of them that had arrived when that was last asked.
    delivered_bytes: u64,
    /// Bytes read so far.
    pub(crate) received_bytes: u64,
    /// Frames handed to the node so far.
    pub(crate) received_frames: u64,
    /// When something was last read.
    pub(crate) heard: Instant,
    /// When something was last written.
    pub(crate) spoke: Instant,
}

impl Connection {
    /// Takes over what leads to an authenticated peer; `registry` tells under `token` when it is ready.
    pub(crate) fn new(
        mut transport: Transport,
        (registry, token): (&Registry, Token),
        now: Instant,
    ) -> io::Result<Self> {
        transport.set_up()?;
        registry.register(&mut transport, token, Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self {
            transport,
            may_read: true,
            may_write: true,
            hung_up: false,
            bytes_per_s: None,
            staging: Box::new([0; STAGING_BYTES]),
            staged: 0..0,
            ahead_bytes: STAGING_BYTES,
            arriving: None,
            skip: 0,
            abort: None,
            departing: VecDeque::new(),
            departing_bytes: 0,
            written: 0,
            sent_bytes: 0,
            delivered_bytes: 0,
            received_bytes: 0,
            received_frames: 0,
            heard: now,
            spoke: now,
        })
    }

    /// For ending that.
    pub(crate) fn watched(&mut self) -> &mut Transport {
        &mut self.transport
    }

    /// Notes what an event says.
    pub(crate) fn ready(&mut self, event: &mio::event::Event) {
        let ready = self.transport.ready(event);
        self.may_read |= ready.read;
        self.may_write |= ready.write;
        self.hung_up |= ready.hung_up;
    }

    /// Reads for one turn and steps the node with every frame that is complete.
    ///
    /// # Errors
    /// What the node or the header's decoder found wrong.
    pub(crate) fn read(
        &mut self,
        from: Rank,
        node: &mut LaneNode,
        actions: &mut Vec<Action<Chunk>>,
        now: Instant,
    ) -> Result<Progress, Error> {
        let mut turn_bytes = 0;
        while self.may_read {
            if turn_bytes >= TURN_BYTES {
                return Ok(Progress::Again);
            }
            let count = match self.receive() {
                Ok(0) => {
                    return Ok(Progress::Closed(
                        "its connection was closed without a goodbye, so its process has ended".into(),
                    ));
                }
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.may_read = false;
                    break;
                }
                Err(error) if error.kind() == ErrorKind::InvalidData => {
                    return Err(Error::protocol(from, error.to_string()));
                }
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {
                    return Ok(Progress::Closed(error.to_string()));
                }
                Err(error) => {
                    return Ok(Progress::Closed(format!(
                        "its connection broke, so its process has ended or the network has failed ({error})"
                    )));
                }
            };
            self.heard = now;
            self.received_bytes += count as u64;
            turn_bytes += count;
            self.understand(from, node, actions)?;
        }
        Ok(Progress::Idle)
    }

    /// One system call. Only part of a header may be staged, so what is staged moves to the front.
    fn receive(&mut self) -> io::Result<usize> {
        let kept = self.staged.len();
        self.staging.copy_within(self.staged.clone(), 0);
        self.staged = 0..kept;
        let room = &mut self.staging[kept..self.ahead_bytes];
        let staging_room = room.len();
        let (count, wanted) = match &mut self.arriving {
            None => (self.transport.read(&mut [IoSliceMut::new(room)])?, staging_room),
            Some(arriving) => {
                let rest = arriving.chunk.len() - arriving.filled;
                let mut places = [arriving.chunk.to_read(arriving.filled), IoSliceMut::new(room)];
                let count = self.transport.read(&mut places)?;
                arriving.filled += count.min(rest);
                self.staged.end += count.saturating_sub(rest);
                if count < rest + staging_room && !self.hung_up {
                    self.may_read = false;
                }
                return Ok(count);
            }
        };
        self.staged.end += count;
        // A short read has emptied the transport; what comes later, an end of stream included, is told again.
        if count < wanted && count > 0 && !self.hung_up {
            self.may_read = false;
        }
        Ok(count)
    }

    /// Hands every complete frame to the node, until only part of a frame is left.
    fn understand(
        &mut self,
        from: Rank,
        node: &mut LaneNode,
        actions: &mut Vec<Action<Chunk>>,
    ) -> Result<(), Error> {
        loop {
            if let Some(arriving) = &mut self.arriving {
                let count = (arriving.chunk.len() - arriving.filled).min(self.staged.len());
                arriving.chunk.fill(arriving.filled, &self.staging[self.staged.start..][..count]);
                arriving.filled += count;
                self.staged.start += count;
                if arriving.filled < arriving.chunk.len() {
                    return Ok(());
                }
                if let Some(Arriving { header, chunk, .. }) = self.arriving.take() {
                    self.received_frames += 1;
                    node.step(Event::Frame { from, header, payload: Some(chunk) }, actions)?;
                }
            }
            let Some(head) = self.staging[self.staged.clone()].first_chunk::<HEADER_BYTES>() else {
                self.ahead_bytes = (2 * self.ahead_bytes).min(STAGING_BYTES);
                return Ok(());
            };
            let header = Header::decode(head).map_err(|why| Error::protocol(from, why))?;
            self.staged.start += HEADER_BYTES;
            // If it does not fit, its payload is still to be passed over.
            let destination =
                node.destination(from, &header).inspect_err(|_| self.skip = header.payload_bytes as usize)?;
            match destination {
                Destination::Chunk(chunk) => {
                    let long = chunk.len() >= STAGING_BYTES;
                    self.ahead_bytes = if long { AHEAD_BYTES } else { STAGING_BYTES };
                    self.arriving = Some(Arriving { header, chunk, filled: 0 });
                }
                Destination::None => {
                    self.received_frames += 1;
                    node.step(Event::Frame { from, header, payload: None }, actions)?;
                }
            }
        }
    }

    /// Reads for one turn and drops everything but aborts, whose payloads it appends. Nothing else that still comes matters, but a
    /// socket that is closed with unread bytes would take back what was sent last.
    pub(crate) fn heed(&mut self, aborts: &mut Vec<Vec<u8>>) -> Progress {
        if let Some(Arriving { header, chunk, filled }) = self.arriving.take() {
            self.skip = chunk.len() - filled;
            if header.kind == Kind::Abort {
                self.abort = Some(chunk.to_vec()[..filled].to_vec());
            }
        }
        self.ahead_bytes = STAGING_BYTES;
        for _ in 0..TURN_BYTES / STAGING_BYTES {
            self.pick_aborts(aborts);
            match self.receive() {
                Ok(0) => return Progress::Closed("its connection was closed".into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.may_read = false;
                    return Progress::Idle;
                }
                Err(error) => return Progress::Closed(format!("its connection broke: {error}")),
            }
            self.pick_aborts(aborts);
            if !self.may_read {
                return Progress::Idle;
            }
        }
        Progress::Again
    }

    /// Takes aborts from what is staged, and drops the rest, until only part of a header is left.
    fn pick_aborts(&mut self, aborts: &mut Vec<Vec<u8>>) {
        loop {
            let count = self.skip.min(self.staged.len());
            if let Some(abort) = &mut self.abort {
                abort.extend(&self.staging[self.staged.start..][..count]);
            }
            self.staged.start += count;
            self.skip -= count;
            if self.skip > 0 {
                return;
            }
            aborts.extend(self.abort.take());
            let Some(head) = self.staging[self.staged.clone()].first_chunk::<HEADER_BYTES>() else { return };
            // What makes no sense ends all understanding.
            let Ok(header) = Header::decode(head) else {
                self.skip = usize::MAX;
                continue;
            };
            self.staged.start += HEADER_BYTES;
            self.skip = header.payload_bytes as usize;
            self.abort = (header.kind == Kind::Abort).then(Vec::new);
        }
    }

    /// Writes for one turn, asking for frames at the last moment, and tells the node when one is begun.
    pub(crate) fn write(&mut self, mut source: Source<'_>, now: Instant) -> Progress {
        let mut turn_bytes = 0;
        while self.may_write {
            while self.departing_bytes < BATCH_BYTES && self.departing.len() < BATCH_FRAMES {
                let Some(frame) = source.next() else { break };
                self.queue(Departing::new(frame, true));
            }
            if self.all_written() {
                break;
            }
            if turn_bytes >= TURN_BYTES {
                return Progress::Again;
            }
            let sent = if self.departing.is_empty() {
                self.transport.flush().map(|()| 0)
            } else {
                self.send(&mut source)
            };
            match sent {
                Ok(count) => {
                    self.spoke = now;
                    turn_bytes += count;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.may_write = false,
                Err(error) => return Progress::Closed(format!("its connection broke: {error}")),
            }
        }
        Progress::Idle
    }

    /// Bounds what the transport holds for this connection by a line rate, if it is on a line.
    pub(crate) fn bind_send_buffer(&mut self, bytes_per_s: f64) {
        self.bytes_per_s = self.transport.bind_send_buffer(bytes_per_s).then_some(bytes_per_s);
    }

    /// Queues a frame behind those that the node has given out.
    pub(crate) fn depart(&mut self, frame: Outgoing<Chunk>) {
        self.queue(Departing::new(frame, false));
    }

    fn queue(&mut self, departing: Departing) {
        self.departing_bytes += departing.len();
        self.departing.push_back(departing);
    }

    /// One system call.
    fn send(&mut self, source: &mut Source<'_>) -> io::Result<usize> {
        let mut slices = [IoSlice::new(&[]); 2 * BATCH_FRAMES];
        let mut used = 0;
        let mut skip = self.written;
        for frame in self.departing.iter().take(BATCH_FRAMES) {
            if skip < HEADER_BYTES {
                slices[used] = IoSlice::new(&frame.head[skip..]);
                used += 1;
            }
            if let Some(payload) = &frame.payload {
                slices[used] = payload.to_write(skip.saturating_sub(HEADER_BYTES));
                used += 1;
            }
            skip = 0;
        }
        let offered: usize = slices[..used].iter().map(|slice| slice.len()).sum();
        // The peer may have it before this process goes on.
        source.node.observer().mark();
        let count = self.transport.write(&slices[..used])?;
        if count < offered {
            // The transport is full and will tell when it is not.
            self.may_write = false;
        }
        self.sent_bytes += count as u64;
        self.departing_bytes -= count;
        self.written += count;
        while let Some(first) = self.departing.front_mut()
            && self.written > 0
        {
            if let Some(header) = first.unbegun.take() {
                source.node.first_byte_out(source.peer, &header);
            }
            if self.written < first.len() {
                break;
            }
            self.written -= first.len();
            self.departing.pop_front();
        }
        Ok(count)
    }

    /// Whether everything that was given out is written.
    pub(crate) fn all_written(&self) -> bool {
        self.departing.is_empty() && self.transport.held_bytes() == 0
    }

    /// Forgets the frames of which nothing is written yet.
    pub(crate) fn cancel_unstarted(&mut self) {
        self.departing.truncate(usize::from(self.written > 0));
        self.departing_bytes = self.departing.iter().map(Departing::len).sum::<usize>() - self.written;
    }

    /// Binds it to a higher rate if it has carried more since the last call, which was after `last`. The new rate.
    pub(crate) fn correct_rate(&mut self, last: Instant) -> Option<f64> {
        let known = self.bytes_per_s?;
        let bytes_per_s = line::corrected(known, self.take_delivered_bytes(), last.elapsed())?;
        self.bind_send_buffer(bytes_per_s);
        Some(bytes_per_s)
    }

    /// Bytes that have arrived since the last call, as far as the other end has acknowledged them.
    fn take_delivered_bytes(&mut self) -> u64 {
        let delivered_bytes = self.sent_bytes.saturating_sub(self.undelivered_bytes() as u64);
        let before = std::mem::replace(&mut self.delivered_bytes, delivered_bytes);
        delivered_bytes.saturating_sub(before)
    }

    /// Segments that TCP has sent again so far.
    pub(crate) fn retransmitted_segments(&self) -> u64 {
        self.transport.retransmitted_segments()
    }

    /// Bytes that are written and would be lost if this end closed now.
    pub(crate) fn undelivered_bytes(&self) -> usize {
        self.transport.undelivered_bytes()
    }
}

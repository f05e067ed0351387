//! One lane of one rank: a worker and its shard of the store. Events in, actions and frames out.

mod outbox;

use crate::error::Error;
use crate::exchange::store::{Contribution, Gathering, Outcome};
use crate::layout::{Book, BookId, Rank, Seq, Slice, SliceId, Step, TensorId};
use crate::limits;
use crate::memory::Memory;
use crate::wire::{Header, Kind, Op, Outgoing, Place, describe};
use outbox::Outbox;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who this node is, and its options.
#[derive(Debug, Clone)]
pub struct Config {
    /// This rank.
    pub rank: Rank,
    /// Ranks in the job.
    pub ranks: u32,
    /// This lane.
    pub lane: u32,
    /// Lanes per rank.
    pub lanes: u32,
    /// Bytes that may be pushed to one owner for one book and not be answered yet. Bounds what an owner must hold for a
    /// slow rank; `node/outbox.rs` has the exception that keeps it free of deadlock.
    pub window_bytes: u64,
    /// Whether the place in the forward pass decides (otherwise: first in, first out).
    pub priority: bool,
}

/// What happened.
#[derive(Debug)]
pub enum Event<C> {
    /// This rank takes part in the next exchange of a tensor.
    Submit {
        /// The book.
        book: BookId,
        /// The tensor.
        tensor: TensorId,
        /// The submission's number, one more than the last.
        seq: Seq,
        /// The user's iteration.
        step: Step,
        /// What to do with the contributions.
        op: Op,
        /// The whole tensor: the contribution, and where the result goes.
        memory: C,
        /// Nothing to contribute; `memory` only receives.
        absent: bool,
    },
    /// A frame arrived; its payload lies where [`Node::place`] said.
    Frame {
        /// The sender.
        from: Rank,
        /// Its header.
        header: Header,
        /// Its payload, if it has one.
        payload: Option<C>,
    },
    /// A control frame (blob, heartbeat, abort, goodbye) is to be sent, before all data; a goodbye after all data.
    Control {
        /// The receiver; all other ranks if `None`.
        to: Option<Rank>,
        /// Its header.
        header: Header,
        /// Its payload, if it has one.
        payload: Option<C>,
    },
    /// This rank contributes no more until every rank has left (join). Everything it submitted must be complete.
    Leave,
}

/// What the driver must do or pass on.
#[derive(Debug)]
pub enum Action<C> {
    /// There may be something to send to this peer.
    Wake(Rank),
    /// The result of a slice of this rank's submission is in its memory.
    Complete {
        /// The book.
        book: BookId,
        /// The slice.
        slice: SliceId,
        /// Which submission.
        seq: Seq,
        /// Whether anybody contributed; if not, the memory is as it was.
        present: bool,
    },
    /// Every rank has left; from now on all take part again.
    AllLeft,
    /// A control frame arrived.
    Control {
        /// The sender.
        from: Rank,
        /// Its header.
        header: Header,
        /// Its payload.
        payload: Option<C>,
    },
}

/// Payload bytes by direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes handed to the driver for sending.
    pub sent_bytes: u64,
    /// Bytes that arrived.
    pub received_bytes: u64,
}

/// What a node counted.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    /// Slices of this rank's submissions that completed.
    pub slices: u64,
    /// Frames that were queued ahead of frames that were there before.
    pub preemptions: u64,
    /// Frames handed to the driver.
    pub frames_sent: u64,
    /// Frames that arrived.
    pub frames_received: u64,
    /// By book and layer.
    pub traffic: Vec<Vec<Traffic>>,
}

/// This rank's own part in a slice, from submission to completion.
struct Mine<C> {
    memory: C,
    seq: Seq,
}

struct SliceState<C> {
    mine: Option<Mine<C>>,
    gathering: Gathering<C>,
}

struct BookState<C> {
    book: Arc<Book>,
    slices: Vec<SliceState<C>>,
    /// Place in the forward pass by layer.
    places: Vec<u32>,
}

struct EarlyFrame<C> {
    from: Rank,
    header: Header,
    payload: Option<C>,
}

/// The state machine. See the crate's documentation.
pub struct Node<M: Memory> {
    config: Config,
    memory: M,
    books: Vec<Option<BookState<M::Chunk>>>,
    outboxes: Vec<Outbox<M::Chunk>>,
    left: Vec<bool>,
    /// Frames for books that peers have opened before this rank did.
    early: BTreeMap<BookId, Vec<EarlyFrame<M::Chunk>>>,
    early_bytes: usize,
    /// Decides between frames of equal place: first in, first out.
    order: u64,
    counters: Counters,
    /// Reused between rounds, so that a sum allocates nothing.
    inputs: Vec<M::Chunk>,
}

impl<M: Memory> Node<M> {
    /// A node without books.
    pub fn new(config: Config, memory: M) -> Self {
        let ranks = config.ranks as usize;
        Self {
            outboxes: (0..ranks).map(|_| Outbox::new(config.window_bytes)).collect(),
            config,
            memory,
            books: Vec::new(),
            left: vec![false; ranks],
            early: BTreeMap::new(),
            early_bytes: 0,
            order: 0,
            counters: Counters::default(),
            inputs: Vec::new(),
        }
    }

    /// The memory this node runs over.
    pub fn memory(&mut self) -> &mut M {
        &mut self.memory
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Opens a book; frames of it that came early are processed now.
    ///
    /// # Errors
    /// [`Error::Config`] if the number is taken or too large; [`Error::Protocol`] for an early frame that does not fit.
    pub fn open_book(
        &mut self,
        id: BookId,
        book: Arc<Book>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let at = usize::from(id);
        if at >= limits::BOOKS_MAX || self.books.get(at).is_some_and(Option::is_some) {
            return Err(Error::Config(format!(
                "book {id} ({}) is open already or beyond the limit of {}",
                book.name,
                limits::BOOKS_MAX
            )));
        }
        if at >= self.books.len() {
            self.books.resize_with(at + 1, || None);
            self.counters.traffic.resize_with(at + 1, Vec::new);
        }
        self.counters.traffic[at] = vec![Traffic::default(); book.layers.len()];
        for (peer, outbox) in self.outboxes.iter_mut().enumerate() {
            outbox.open_book(id, &book, Rank(peer as u32));
        }
        let slices =
            book.slices.iter().map(|_| SliceState { mine: None, gathering: Gathering::default() }).collect();
        let places = (0..book.layers.len() as u32).collect();
        self.books[at] = Some(BookState { book, slices, places });
        for EarlyFrame { from, header, payload } in self.early.remove(&id).unwrap_or_default() {
            self.early_bytes -= header.payload_bytes as usize;
            self.slice_checked(from, &header)?;
            self.frame(from, &header, payload, actions)?;
        }
        Ok(())
    }

    /// Sets each layer's place in the forward pass, from 0. Frames queued already keep theirs.
    pub fn set_priorities(&mut self, book: BookId, places: &[u32]) {
        if let Some(Some(state)) = self.books.get_mut(usize::from(book)) {
            let most = state.places.len().saturating_sub(1) as u32;
            for (place, &new) in state.places.iter_mut().zip(places) {
                *place = new.min(most);
            }
        }
    }

    /// Takes an event and appends what follows from it to `actions`.
    ///
    /// # Errors
    /// [`Error::Protocol`] if a peer broke the protocol, [`Error::Config`] if the caller did. The node must not be used after.
    pub fn step(&mut self, event: Event<M::Chunk>, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        match event {
            Event::Submit { book, tensor, seq, step, op, memory, absent } => {
                let Some(Some(state)) = self.books.get(usize::from(book)) else {
                    return Err(Error::Config(format!("book {book} is not open")));
                };
                let ids = state.book.clone();
                for id in ids.slices_of(tensor) {
                    let slice = &ids.slices[id as usize];
                    if slice.lane == self.config.lane {
                        let chunk =
                            self.memory.part(&memory, slice.offset_bytes as usize, slice.len_bytes as usize);
                        let header = Header { op, book, slice: id, seq, step, ..Header::control(Kind::Push) };
                        self.submit(slice, header, chunk, absent, actions)?;
                    }
                }
                Ok(())
            }
            Event::Frame { from, header, payload } => self.arrived(from, &header, payload, actions),
            Event::Control { to, header, payload } => {
                self.control(to, header, payload.as_ref(), actions);
                Ok(())
            }
            Event::Leave => {
                self.control(None, Header::control(Kind::Leave), None, actions);
                self.leave(self.config.rank, actions)
            }
        }
    }

    fn submit(
        &mut self,
        slice: &Slice,
        header: Header,
        memory: M::Chunk,
        absent: bool,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let place = self.place_of(header.book, slice);
        let state = slice_state(&mut self.books, &header);
        if state.mine.is_some() {
            return Err(Error::Config(format!(
                "slice {} of book {} is submitted twice",
                header.slice, header.book
            )));
        }
        state.mine = Some(Mine { memory: memory.clone(), seq: header.seq });
        if slice.owner == self.config.rank {
            let what = if absent { Contribution::Absent } else { Contribution::Data(memory) };
            return self.contribute(self.config.rank, &header, what, actions);
        }
        self.order += 1;
        let outbox = &mut self.outboxes[slice.owner.index()];
        let overtakes = if absent {
            let header = Header { kind: Kind::PushAbsent, ..header };
            outbox.queue_ready(place, self.order, Outgoing { header, payload: None })
        } else {
            let header = Header { payload_bytes: slice.len_bytes, ..header };
            outbox.queue_push(place, self.order, slice.at_owner, Outgoing { header, payload: Some(memory) })
        };
        self.counters.preemptions += u64::from(overtakes);
        actions.push(Action::Wake(slice.owner));
        Ok(())
    }

    /// Checks an arriving frame and says where its payload goes.
    ///
    /// # Errors
    /// [`Error::Protocol`] if the frame does not fit this rank's books or what it waits for.
    pub fn place(&mut self, from: Rank, header: &Header) -> Result<Place<M::Chunk>, Error> {
        let len = header.payload_bytes as usize;
        let known = matches!(self.books.get(usize::from(header.book)), Some(Some(_)));
        if header.kind.is_exchange() && known {
            self.slice_checked(from, header)?;
            if header.kind == Kind::Answer {
                let mine = slice_state(&mut self.books, header).mine.as_ref();
                return mine.map(|m| Place::Chunk(m.memory.clone())).ok_or_else(|| unexpected(from, header));
            }
        } else if header.kind.is_exchange() {
            let takes_part = matches!(header.kind, Kind::Push | Kind::PushAbsent);
            if !takes_part
                || usize::from(header.book) >= limits::BOOKS_MAX
                || self.early_bytes + len > limits::EARLY_BYTES_MAX
            {
                return Err(unexpected(from, header));
            }
        }
        Ok(if len == 0 { Place::None } else { Place::Chunk(self.memory.scratch(len)) })
    }

    /// Checks that `header` names a slice of this lane, comes from the right side, and has the right length.
    fn slice_checked(&mut self, from: Rank, header: &Header) -> Result<(), Error> {
        let book = self.books[usize::from(header.book)].as_ref().map(|state| state.book.clone());
        let slice = book.as_ref().and_then(|book| book.slices.get(header.slice as usize));
        let Some(slice) = slice.filter(|slice| slice.lane == self.config.lane) else {
            return Err(unexpected(from, header));
        };
        let (owner, len_bytes) = (slice.owner, slice.len_bytes);
        let (side, expected_bytes) = match header.kind {
            Kind::Push => (self.config.rank, len_bytes),
            Kind::Answer => (from, len_bytes),
            Kind::PushAbsent => (self.config.rank, 0),
            _ => (from, 0),
        };
        if owner != side || header.payload_bytes != expected_bytes {
            return Err(unexpected(from, header));
        }
        if matches!(header.kind, Kind::Answer | Kind::AnswerAbsent | Kind::AnswerSame) {
            let mine = slice_state(&mut self.books, header).mine.as_ref();
            if mine.is_none_or(|mine| mine.seq != header.seq) {
                return Err(unexpected(from, header));
            }
        }
        Ok(())
    }

    /// A frame is here completely.
    fn arrived(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        self.counters.frames_received += 1;
        if header.kind == Kind::Leave {
            return self.leave(from, actions);
        }
        if !header.kind.is_exchange() {
            actions.push(Action::Control { from, header: *header, payload });
            return Ok(());
        }
        if !matches!(self.books.get(usize::from(header.book)), Some(Some(_))) {
            self.early_bytes += header.payload_bytes as usize;
            self.early.entry(header.book).or_default().push(EarlyFrame { from, header: *header, payload });
            return Ok(());
        }
        if matches!(header.kind, Kind::Push | Kind::PushAbsent) {
            // Again: the book may have been opened after the header came and before the payload was complete.
            self.slice_checked(from, header)?;
        }
        self.frame(from, header, payload, actions)
    }

    /// A frame of an open book, whose header was checked.
    fn frame(
        &mut self,
        from: Rank,
        header: &Header,
        payload: Option<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let Some(Some(state)) = self.books.get(usize::from(header.book)) else { return Ok(()) };
        let layer = state.book.tensor_of(header.slice).layer as usize;
        self.counters.traffic[usize::from(header.book)][layer].received_bytes +=
            u64::from(header.payload_bytes);
        match (header.kind, payload) {
            (Kind::Push, Some(chunk)) => self.contribute(from, header, Contribution::Data(chunk), actions),
            (Kind::PushAbsent, None) => self.contribute(from, header, Contribution::Absent, actions),
            (Kind::Answer, Some(_)) | (Kind::AnswerAbsent | Kind::AnswerSame, None) => {
                let slice = &state.book.slices[header.slice as usize];
                if self.outboxes[from.index()].answered(header.book, slice.at_owner, slice.len_bytes) {
                    actions.push(Action::Wake(from));
                }
                self.complete(header, header.kind != Kind::AnswerAbsent, actions);
                Ok(())
            }
            _ => Err(unexpected(from, header)),
        }
    }

    /// Owner: takes a contribution, and ends the round if it was the last.
    fn contribute(
        &mut self,
        from: Rank,
        header: &Header,
        what: Contribution<M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let gathering = &mut slice_state(&mut self.books, header).gathering;
        gathering
            .add(from, self.config.ranks, header.seq, header.op, header.step, what)
            .map_err(|why| Error::protocol(from, format!("{}: {why}", describe(from, header))))?;
        if gathering.complete(&self.left) { self.finish(header, actions) } else { Ok(()) }
    }

    /// Owner: sums in rank order and answers everybody at once.
    fn finish(&mut self, header: &Header, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        let Some(Some(book_state)) = self.books.get_mut(usize::from(header.book)) else { return Ok(()) };
        let book = book_state.book.clone();
        let slice = &book.slices[header.slice as usize];
        let dtype = book.tensor_of(header.slice).dtype;
        let state = &mut book_state.slices[header.slice as usize];
        let outcome = state.gathering.outcome(&self.left, &mut self.inputs).map_err(|why| {
            Error::protocol(
                self.config.rank,
                format!("slice {} of {} ({}): {why}", header.slice, book.name, book.layer_name(slice.tensor)),
            )
        })?;
        let mine = state.mine.as_ref().map(|mine| mine.memory.clone());
        let result = match outcome {
            Outcome::Absent => None,
            Outcome::Copy(source) => Some(match mine {
                Some(mine) if source != self.config.rank => {
                    self.memory.reduce(dtype, &self.inputs, 1, &mine);
                    // Answered from here, so that the source's buffer is free when its window is.
                    mine
                }
                _ => self.inputs[0].clone(),
            }),
            Outcome::Sum(divisor) => {
                let output = mine.unwrap_or_else(|| self.memory.scratch(slice.len_bytes as usize));
                self.memory.reduce(dtype, &self.inputs, divisor, &output);
                Some(output)
            }
        };
        state.gathering.clear();
        self.inputs.clear();
        self.answer(slice, header, &outcome, result.as_ref(), actions);
        self.complete(header, outcome != Outcome::Absent, actions);
        Ok(())
    }

    fn answer(
        &mut self,
        slice: &Slice,
        header: &Header,
        outcome: &Outcome,
        result: Option<&M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) {
        let (me, ranks) = (self.config.rank.0, self.config.ranks);
        let place = self.place_of(header.book, slice);
        // Each owner starts with another rank, so that answers do not all converge on the same receiver.
        for peer in (1..ranks).map(|i| Rank((me + i) % ranks)).filter(|peer| !self.left[peer.index()]) {
            let (kind, payload) = match (outcome, result) {
                (Outcome::Copy(source), _) if *source == peer => (Kind::AnswerSame, None),
                (_, Some(chunk)) => (Kind::Answer, Some(chunk.clone())),
                (_, None) => (Kind::AnswerAbsent, None),
            };
            let payload_bytes = if payload.is_some() { slice.len_bytes } else { 0 };
            let header = Header { kind, payload_bytes, ..*header };
            self.order += 1;
            let overtakes =
                self.outboxes[peer.index()].queue_ready(place, self.order, Outgoing { header, payload });
            self.counters.preemptions += u64::from(overtakes);
            actions.push(Action::Wake(peer));
        }
    }

    fn complete(&mut self, header: &Header, present: bool, actions: &mut Vec<Action<M::Chunk>>) {
        if slice_state(&mut self.books, header).mine.take().is_some() {
            self.counters.slices += 1;
            actions.push(Action::Complete {
                book: header.book,
                slice: header.slice,
                seq: header.seq,
                present,
            });
        }
    }

    fn control(
        &mut self,
        to: Option<Rank>,
        header: Header,
        payload: Option<&M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) {
        for peer in (0..self.config.ranks).map(Rank).filter(|peer| *peer != self.config.rank) {
            if to.is_none_or(|to| to == peer) {
                self.outboxes[peer.index()].queue_control(Outgoing { header, payload: payload.cloned() });
                actions.push(Action::Wake(peer));
            }
        }
    }

    /// A rank has left: rounds that only waited for it end now.
    fn leave(&mut self, rank: Rank, actions: &mut Vec<Action<M::Chunk>>) -> Result<(), Error> {
        if std::mem::replace(&mut self.left[rank.index()], true) {
            return Err(Error::protocol(rank, "it left twice"));
        }
        if self.left.iter().all(|left| *left) {
            // At once, in the same event: a peer that has seen all leave may push again before this rank's user knows.
            // No round can end here: what is open was pushed by such peers, and this rank has not submitted yet.
            self.left.iter_mut().for_each(|left| *left = false);
            actions.push(Action::AllLeft);
            return Ok(());
        }
        for id in 0..self.books.len() {
            let slices = self.books[id].as_ref().map_or(0, |state| state.slices.len());
            for slice in 0..slices as u32 {
                let header = Header { book: id as BookId, slice, ..Header::control(Kind::Push) };
                let gathering = &slice_state(&mut self.books, &header).gathering;
                if let Some((seq, step)) = gathering.open().filter(|_| gathering.complete(&self.left)) {
                    self.finish(&Header { seq, step, ..header }, actions)?;
                }
            }
        }
        Ok(())
    }

    /// The frame to send to `peer` next, decided now. Its payload must stay unchanged until it is written.
    pub fn next_frame(&mut self, peer: Rank) -> Option<Outgoing<M::Chunk>> {
        let frame = self.outboxes[peer.index()].pop()?;
        self.counters.frames_sent += 1;
        if frame.header.kind.is_exchange() {
            let at = usize::from(frame.header.book);
            if let Some(Some(state)) = self.books.get(at) {
                let layer = state.book.tensor_of(frame.header.slice).layer as usize;
                self.counters.traffic[at][layer].sent_bytes += u64::from(frame.header.payload_bytes);
            }
        }
        Some(frame)
    }

    /// Whether [`Node::next_frame`] would give a frame.
    pub fn has_frame(&self, peer: Rank) -> bool {
        self.outboxes[peer.index()].has_frame()
    }

    /// Of the slices of `tensor` that this node owns and that wait: the ranks they wait for.
    pub fn missing(&self, book: BookId, tensor: TensorId) -> Vec<Rank> {
        let Some(Some(state)) = self.books.get(usize::from(book)) else { return Vec::new() };
        let slices = state.book.slices_of(tensor).map(|slice| &state.slices[slice as usize].gathering);
        let mut ranks: Vec<Rank> =
            slices.filter(|g| g.open().is_some()).flat_map(|g| g.missing(&self.left)).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn place_of(&self, book: BookId, slice: &Slice) -> usize {
        match self.books.get(usize::from(book)) {
            Some(Some(state)) if self.config.priority => {
                state.places[state.book.tensors[slice.tensor as usize].layer as usize] as usize
            }
            _ => 0,
        }
    }
}

/// The state of a slice whose header was checked.
fn slice_state<'a, C>(books: &'a mut [Option<BookState<C>>], header: &Header) -> &'a mut SliceState<C> {
    let state = books[usize::from(header.book)].as_mut().expect("the book was checked to be open");
    &mut state.slices[header.slice as usize]
}

fn unexpected(from: Rank, header: &Header) -> Error {
    Error::protocol(from, format!("unexpected {}, {} bytes", describe(from, header), header.payload_bytes))
}

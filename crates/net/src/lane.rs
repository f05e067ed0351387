//! A lane: one thread with one connection per peer and a node of its own.
//!
//! Every turn: take commands, read where something may be read, write where something may be written, and now and then
//! look at the clock. All decisions about slices are the node's; all knowledge about sockets is the connection's. What is
//! here is how connections are asked for and served; `life.rs` has what the lane does for the life of the job.
//!
//! After a failure the node is not used any more: the lane tells its peers why, hears what they say of it, drops all else that
//! still comes, and waits for the end.

mod life;
mod line;

use crate::admission::Admission;
use crate::call::Handle;
use crate::connection::{Connection, Progress, Source};
use crate::descriptors::{self, Registration};
use crate::failure::Failure;
use crate::mailbox::{Command, Mailbox, Recovering, Word};
use crate::memory::{Chunk, RealMemory};
use crate::observed::{LaneCounts, LaneNode, Recorder, Rings};
use crate::shared::{OpenBook, Shared, ns};
use crate::transport::Transport;
use mio::{Events, Poll, Token};
use penstock_core::life::{Pulse, Sign, may_end};
use penstock_core::node::{self, Action, Event, Node};
use penstock_core::wire::{Outgoing, data_has_moved};
use penstock_core::{BookId, Error, Rank, Seq, SliceId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) const WAKER: Token = Token(usize::MAX);
/// Longest sleep between two looks at the clock; why there is a tick says docs/decisions/0020-lanes-look-at-a-tick.md.
const TICK_MAX: Duration = Duration::from_millis(100);
/// What a lane updates per turn, in bytes: some tenths of a millisecond, in which nothing is sent or read.
const UPDATE_BYTES: usize = 256 << 10;
/// Readiness events per turn; the rest waits in the kernel.
const EVENTS: usize = 256;

#[derive(Default)]
struct Peer {
    connection: Option<Connection>,
    /// In `Lane::work`.
    queued: bool,
    /// The node may have a frame for it.
    wanted: bool,
    /// Its connection has ended. There is no second one.
    gone: bool,
    /// By then TCP had sent so many segments again.
    retransmitted: u64,
}

impl Peer {
    /// Segments that TCP has sent again so far.
    fn retransmitted_segments(&self) -> u64 {
        self.connection.as_ref().map_or(self.retransmitted, Connection::retransmitted_segments)
    }
}

/// The state of the thread.
pub(crate) struct Lane {
    index: u32,
    me: Rank,
    peer_timeout: Duration,
    shared: Arc<Shared>,
    mailbox: Arc<Mailbox>,
    /// Set before the lane runs: admission delivers to lanes, and lanes ask admission.
    admission: Arc<OnceLock<Admission>>,
    // Before the poll, so that it is dropped first.
    _noted: Registration,
    poll: Poll,
    node: LaneNode,
    books: Vec<Option<Arc<OpenBook>>>,
    /// Calls that are not complete, by id.
    calls: BTreeMap<u64, Arc<Handle>>,
    /// What is to be updated, and the slices of it that are left.
    words: VecDeque<(Arc<Word>, VecDeque<SliceId>)>,
    /// Rounds in which enough are, and until when they wait for the others.
    closing: BTreeSet<(Instant, BookId, SliceId, Seq)>,
    peers: Vec<Peer>,
    /// A moment before the connections were last asked what got through.
    looked: Instant,
    /// Peers whose connection may have something to do.
    work: VecDeque<usize>,
    /// Reused from turn to turn.
    actions: Vec<Action<Chunk>>,
    pulse: Pulse,
    signs: Vec<Sign>,
    /// Heartbeats, questions and answers that have arrived.
    idle_frames: u64,
    leaving: bool,
    done: bool,
    failed: Option<Outgoing<Chunk>>,
    told: bool,
    stopping: bool,
    /// And without a word.
    halted: bool,
    now: Instant,
    ticked: Instant,
}

impl Lane {
    pub(crate) fn new(
        config: node::Config,
        recorder: Recorder,
        (peer_timeout, operation_timeout): (Duration, Duration),
        shared: Arc<Shared>,
        poll: Poll,
        mailbox: Arc<Mailbox>,
        admission: Arc<OnceLock<Admission>>,
    ) -> Self {
        let now = Instant::now();
        Self {
            index: config.lane,
            me: config.rank,
            peer_timeout,
            mailbox,
            admission,
            _noted: descriptors::register(&poll),
            poll,
            books: Vec::new(),
            calls: BTreeMap::new(),
            words: VecDeque::new(),
            closing: BTreeSet::new(),
            pulse: Pulse::new(&config.members, ns(peer_timeout), ns(operation_timeout), shared.ns_of(now)),
            signs: Vec::new(),
            idle_frames: 0,
            peers: (0..config.members.end()).map(|_| Peer::default()).collect(),
            node: Node::watched(config, RealMemory::new(Arc::clone(&shared.pool)), recorder),
            shared,
            looked: now,
            work: VecDeque::new(),
            actions: Vec::new(),
            leaving: false,
            done: false,
            failed: None,
            told: false,
            stopping: false,
            halted: false,
            now,
            ticked: now,
        }
    }

    /// Runs until told to stop. A panic becomes the job's failure, so that nobody waits for a thread that is gone.
    pub(crate) fn run(mut self) {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.turns()));
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                self.shared.fail(Failure::config(format!("a lane cannot wait for its sockets: {error}")));
            }
            Err(_) => {
                self.shared.fail(Failure::config(
                    "a lane has panicked, which is a bug in Penstock; its message is above",
                ));
            }
        }
        self.mailbox.close();
        if self.halted {
            for (book, slice, entry) in self.node.take_entries() {
                if let Some(Some(book)) = self.books.get(usize::from(book)) {
                    book.put_aside(slice, entry);
                }
            }
        }
        let counts = self.counts();
        self.shared.update(|state| {
            state.final_counters.push(counts);
            state.lanes_done += u32::from(!self.done);
            state.lanes_told += u32::from(!self.told);
            state.lanes_quiet += u32::from(self.failed.is_none());
        });
    }

    fn turns(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS);
        let mut commands = Vec::new();
        let tick = TICK_MAX.min(self.peer_timeout / 10).max(Duration::from_millis(5));
        while !self.stopping {
            self.poll_once(&mut events, tick)?;
            self.mailbox.take(&mut commands);
            for command in commands.drain(..) {
                self.command(command);
            }
            self.work_off_words();
            self.serve_all();
            self.close_rounds();
            if self.now.saturating_duration_since(self.ticked) >= tick {
                self.tick();
            }
            self.say_goodbyes();
        }
        if self.halted { Ok(()) } else { self.flush(&mut events) }
    }

    fn poll_once(&mut self, events: &mut Events, sleep: Duration) -> io::Result<()> {
        let busy = !self.work.is_empty() || !self.words.is_empty();
        if !busy && self.has_books() && self.all_written() {
            // In training, what it waits for comes from others, and maybe they wait for this processor: whoever then sends to a
            // lane that still stands in line need not wake it, and what has come meanwhile is read at once. Not before: where
            // other programs keep the processors busy, the line's rate would be read too low.
            std::thread::yield_now();
        }
        let closing = self.closing.first().map(|(at, ..)| at.saturating_duration_since(self.now));
        let sleep = closing.map_or(sleep, |closing| sleep.min(closing));
        let patience = if !busy && self.mailbox.try_sleep() { sleep } else { Duration::ZERO };
        match self.poll.poll(events, Some(patience)) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        }
        self.now = Instant::now();
        for event in events.iter() {
            let Token(peer) = event.token();
            let Some(Peer { connection: Some(connection), .. }) = self.peers.get_mut(peer) else { continue };
            connection.ready(event);
            self.enqueue(peer);
        }
        Ok(())
    }

    /// Whether nothing waits for a socket to take it. Otherwise the lane must be there the moment one does, or the line idles.
    fn all_written(&self) -> bool {
        self.peers.iter().filter_map(|peer| peer.connection.as_ref()).all(Connection::all_written)
    }

    fn has_books(&self) -> bool {
        self.books.iter().any(Option::is_some)
    }

    fn enqueue(&mut self, peer: usize) {
        if !std::mem::replace(&mut self.peers[peer].queued, true) {
            self.work.push_back(peer);
        }
    }

    fn command(&mut self, command: Command) {
        if self.failed.is_some() {
            return self.command_after_failure(command);
        }
        let event = match command {
            Command::Submit { submission, at_ns } => {
                self.node.observer().submitted_ns = at_ns;
                Event::Submit(submission)
            }
            Command::Control { header, payload } => Event::Control { to: None, header, payload },
            Command::Ask(question) => {
                let (me, reply) = (self.me, self.reply(question));
                self.shared.live(|life, now_ns| life.replied(now_ns, me, question.number, reply));
                Event::Control { to: None, header: question.header(), payload: None }
            }
            Command::Leave => Event::Leave,
            Command::Group { id, members } => Event::Group(id, members),
            Command::Call { call, handle } => {
                self.calls.insert(call.id, handle);
                Event::Call(call)
            }
            Command::Open(book) => return self.open(&book),
            Command::Places { book, places } => return self.node.set_priorities(book, &places),
            Command::Connected { peer, transport } => return self.connected(peer, transport),
            Command::LineRate => return self.bind_connections(),
            Command::Proceed(word) => {
                let slices = self.node.kept(word.book).into();
                return self.words.push_back((word, slices));
            }
            Command::Order { word, reply } => {
                self.order(&word);
                let _ = reply.send(());
                return;
            }
            Command::Load { book, tensor, field, updates, whole, reply } => {
                let _ = reply.send(self.node.load(book, tensor, (field, updates), &whole));
                return;
            }
            Command::Save { book, tensor, field, whole, reply } => {
                let _ = reply.send(self.node.save(book, tensor, field, &whole));
                return;
            }
            Command::Squares { book, reply } => {
                let _ = reply.send(self.node.squares(book));
                return;
            }
            Command::Goodbye => {
                self.leaving = true;
                return;
            }
            Command::Failed { header, reason } => return self.fail_all(header, reason),
            Command::Count { reply } => {
                let _ = reply.send(self.counts());
                return;
            }
            Command::Recover(recovering) => return self.recover(*recovering),
            Command::Halt => {
                (self.stopping, self.halted) = (true, true);
                return;
            }
            Command::Observe { rings, reply } => {
                let _ = reply.send(self.observe(rings.as_deref()));
                return;
            }
            Command::Stop => {
                self.stopping = true;
                return;
            }
        };
        self.node.observer().mark();
        let outcome = self.node.step(event, &mut self.actions);
        self.act(outcome);
    }

    /// Updates some of what this lane keeps and the program has said the word for, the most urgent first. Not all at once: what is
    /// updated is sent meanwhile.
    fn work_off_words(&mut self) {
        if self.failed.is_some() {
            self.words.clear();
        }
        let mut updated_bytes = 0;
        while updated_bytes < UPDATE_BYTES
            && let Some((word, slices)) = self.words.front_mut()
        {
            let Some(slice) = slices.pop_front() else {
                self.words.pop_front();
                continue;
            };
            let word = Arc::clone(word);
            let Some(Some(book)) = self.books.get(usize::from(word.book)) else { continue };
            let at = &book.book.slices[slice as usize];
            updated_bytes += at.len_bytes as usize;
            book.sum_goes_on(slice);
            let update = word.updates.as_ref().map(|updates| updates[at.tensor as usize]);
            self.node.observer().mark();
            let event = Event::Proceed { book: word.book, slice, step: word.step, update };
            let outcome = self.node.step(event, &mut self.actions);
            if outcome.is_err() {
                self.words.clear();
            }
            self.act(outcome);
        }
    }

    /// What this lane keeps of a book is updated so from now on.
    fn order(&mut self, word: &Word) {
        let Some(Some(book)) = self.books.get(usize::from(word.book)).cloned() else { return };
        for slice in self.node.kept(word.book) {
            let tensor = book.book.slices[slice as usize].tensor as usize;
            let Some(update) = word.updates.as_ref().map(|updates| updates[tensor]) else { return };
            self.node.observer().mark();
            let event = Event::Order { book: word.book, slice, update };
            let outcome = self.node.step(event, &mut self.actions);
            self.act(outcome);
        }
    }

    /// Ends the rounds that have waited long enough for those who are late.
    fn close_rounds(&mut self) {
        while let Some((_, book, slice, seq)) =
            self.closing.first().copied().filter(|(at, ..)| *at <= self.now && self.failed.is_none())
        {
            self.closing.pop_first();
            self.node.observer().mark();
            let outcome = self.node.step(Event::Close { book, slice, seq }, &mut self.actions);
            self.act(outcome);
        }
    }

    /// The rounds of the last epoch go on.
    fn recover(&mut self, recovering: Recovering) {
        let Recovering { gives, lacks, again, entries, states, words } = recovering;
        self.node.observer().mark();
        let mut outcome = Ok(());
        entries.into_iter().for_each(|(book, slice, entry)| self.node.put_entry(book, slice, entry));
        for (given, submission) in &lacks {
            outcome = outcome.and_then(|()| self.node.lacks(given, submission));
        }
        for given in &states {
            outcome = outcome.and_then(|()| {
                if given.by == self.me {
                    self.node.give_states(given, &mut self.actions)
                } else {
                    self.node.lacks_states(given)
                }
            });
        }
        for (given, step, result) in &gives {
            outcome = outcome.and_then(|()| self.node.give(given, *step, result.as_ref(), &mut self.actions));
        }
        for (submission, slices) in &again {
            outcome = outcome.and_then(|()| self.node.submit_again(submission, slices, &mut self.actions));
        }
        self.words.extend(words);
        self.act(outcome);
    }

    fn command_after_failure(&mut self, command: Command) {
        match command {
            Command::Connected { peer, transport } => self.connected(peer, transport),
            Command::Failed { header, reason } => self.fail_all(header, reason),
            Command::Count { reply } => {
                let _ = reply.send(self.counts());
            }
            Command::Halt => (self.stopping, self.halted) = (true, true),
            Command::Observe { rings, reply } => {
                let _ = reply.send(self.observe(rings.as_deref()));
            }
            Command::Stop => self.stopping = true,
            // The caller finds the failure.
            _ => {}
        }
    }

    /// What it has counted so far.
    fn counts(&mut self) -> LaneCounts {
        let retransmitted = self.peers.iter().map(Peer::retransmitted_segments).collect();
        LaneCounts { seen: self.node.observer().counters.clone(), retransmitted }
    }

    /// How many slices have landed when it begins, or ends.
    fn observe(&mut self, rings: Option<&Rings>) -> u64 {
        let recorder = self.node.observer();
        recorder.keep_in(rings, self.index);
        recorder.counters.slices
    }

    fn open(&mut self, book: &Arc<OpenBook>) {
        let at = usize::from(book.id);
        if at >= self.books.len() {
            self.books.resize_with(at + 1, || None);
        }
        let first = !self.has_books();
        self.books[at] = Some(Arc::clone(book));
        if first {
            self.bind_connections();
        }
        let outcome = self.node.open_book(book.id, Arc::clone(&book.book), &mut self.actions);
        self.act(outcome);
    }

    fn connected(&mut self, peer: Rank, transport: Transport) {
        if transport.is_memory() {
            self.shared.update(|state| state.through_memory.insert(peer));
        }
        let place = (self.poll.registry(), Token(peer.index()));
        match Connection::new(transport, place, self.now) {
            Ok(mut connection) => {
                if let Some(abort) = &self.failed {
                    connection.depart(abort.clone());
                    self.told = false;
                }
                if let Some(bytes_per_s) = self.bound_bytes_per_s() {
                    connection.bind_send_buffer(bytes_per_s);
                }
                // A rank that is no member of this epoch has none here.
                let Some(place) = self.peers.get_mut(peer.index()) else { return };
                place.connection = Some(connection);
                self.shared.live(|life, _| life.connected(peer));
                self.enqueue(peer.index());
            }
            Err(error) => {
                self.shared.fail(Failure::config(format!("a connection cannot be set up: {error}")));
            }
        }
    }

    /// Carries out what the node wants, and notes how it ended.
    fn act(&mut self, outcome: Result<(), Error>) {
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            match action {
                Action::Wake(peer) => self.wake(peer),
                Action::Complete { book, slice, present, version, kept, .. } => {
                    if let Some(Some(book)) = self.books.get(usize::from(book)) {
                        book.got_version(slice, version);
                        book.keep(slice, kept);
                        book.slice_complete(slice, present);
                    }
                }
                Action::Enough { book, slice, seq, after_ns } => {
                    let at = Instant::now() + Duration::from_nanos(after_ns);
                    self.closing.insert((at, book, slice, seq));
                }
                Action::Late { book, of, .. } => {
                    if let Some(Some(book)) = self.books.get(usize::from(book)) {
                        *book.late.lock().entry(of).or_default() += 1;
                    }
                }
                Action::Gathered { book, slice, parts } => {
                    if let Some(Some(book)) = self.books.get(usize::from(book)) {
                        book.gathered(slice, parts);
                    }
                }
                Action::Waits { book, slice } => {
                    if let Some(Some(book)) = self.books.get(usize::from(book)) {
                        book.sum_waits(slice);
                    }
                }
                Action::CallSource { id, from } => {
                    if let Some(handle) = self.calls.get(&id) {
                        handle.received_from(from);
                    }
                }
                Action::CallComplete(id) => {
                    if let Some(handle) = self.calls.remove(&id) {
                        handle.completed();
                    }
                }
                Action::AllLeft => self.shared.update(|state| state.lanes_left += 1),
                Action::Control { from, header, payload } => self.control(from, &header, payload.as_ref()),
            }
        }
        self.actions = actions;
        if let Err(error) = outcome {
            self.shared.fail(error);
        }
    }

    fn wake(&mut self, rank: Rank) {
        let peer = &mut self.peers[rank.index()];
        peer.wanted = true;
        if peer.connection.is_some() {
            self.enqueue(rank.index());
        } else if !peer.gone
            && let Some(admission) = self.admission.get()
        {
            admission.dial(self.index, rank);
        }
    }

    /// One turn for every connection that may have something to do.
    fn serve_all(&mut self) {
        for _ in 0..self.work.len() {
            let Some(peer) = self.work.pop_front() else { return };
            self.peers[peer].queued = false;
            if self.failed.is_some() { self.serve_after_failure(peer) } else { self.serve(peer) }
        }
    }

    fn serve(&mut self, peer: usize) {
        let rank = Rank(peer as u32);
        let Some(connection) = &mut self.peers[peer].connection else { return };
        if connection.may_read {
            let (bytes, frames) = (connection.received_bytes, connection.received_frames);
            let turn = connection.read(rank, &mut self.node, &mut self.actions, self.now);
            let (bytes, frames) = (connection.received_bytes - bytes, connection.received_frames - frames);
            let idle = self.idle_frames;
            match turn {
                Ok(Progress::Idle) => self.act(Ok(())),
                Ok(Progress::Again) => {
                    self.act(Ok(()));
                    self.enqueue(peer);
                }
                Ok(Progress::Closed(why)) => {
                    // First whatever it said before, which may be why.
                    self.act(Ok(()));
                    return self.closed(peer, why);
                }
                Err(error) => return self.act(Err(error)),
            }
            if data_has_moved(bytes, frames, self.idle_frames - idle) {
                self.shared.progressed();
            }
        }
        let Peer { connection: Some(connection), wanted, .. } = &mut self.peers[peer] else { return };
        match connection.write(Source { node: &mut self.node, peer: rank, wanted }, self.now) {
            Progress::Idle => {}
            Progress::Again => self.enqueue(peer),
            Progress::Closed(_) => {
                // Its last words may still be there to read; they end with the reason.
                (connection.may_write, connection.may_read, connection.hung_up) = (false, true, true);
                self.enqueue(peer);
            }
        }
    }

    fn serve_after_failure(&mut self, peer: usize) {
        let Some(connection) = &mut self.peers[peer].connection else { return };
        let mut aborts = Vec::new();
        let read = if connection.may_read { connection.heed(&mut aborts) } else { Progress::Idle };
        let last = Source { node: &mut self.node, peer: Rank(peer as u32), wanted: &mut false };
        let written = connection.write(last, self.now);
        for abort in aborts {
            self.shared.live(|life, now_ns| life.aborted(now_ns, Rank(peer as u32), &abort));
        }
        match (read, written) {
            (Progress::Closed(_), _) | (_, Progress::Closed(_)) => self.drop_connection(peer, None),
            (Progress::Idle, Progress::Idle) => {}
            _ => self.enqueue(peer),
        }
        self.note_told();
    }

    /// Once the peers are told of the failure, whoever called `abort` may go on.
    fn note_told(&mut self) {
        if !self.told && self.all_written() && self.unreached().next().is_none() {
            self.told = true;
            self.shared.update(|state| state.lanes_told += 1);
        }
    }

    /// Gives what was written a bounded time to arrive: closing a socket may take back what the peer has not got. After a failure
    /// also peers that are only just being connected.
    fn flush(&mut self, events: &mut Events) -> io::Result<()> {
        let started = self.now;
        let mut commands = Vec::new();
        loop {
            self.mailbox.take(&mut commands);
            commands.drain(..).for_each(|command| self.command_after_failure(command));
            for peer in 0..self.peers.len() {
                self.serve_after_failure(peer);
            }
            let mut connections = self.peers.iter().filter_map(|peer| peer.connection.as_ref());
            let arrived = connections.all(|c| c.all_written() && c.undelivered_bytes() == 0);
            let reached = self.failed.is_none() || self.unreached().next().is_none();
            if may_end(ns(self.now.saturating_duration_since(started)), arrived, reached) {
                return Ok(());
            }
            self.poll_once(events, Duration::from_millis(5))?;
        }
    }
}

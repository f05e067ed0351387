//! Where the members of a job find out who is in the next epoch: a thread that carries out [`penstock_core::agreement`] over
//! connections of its own, which stay when an epoch's lanes end.
//!
//! It is there where members may be lost. It shows the agreement what its connections show ([`Hearing`]), and sends what that says. No
//! decision is made here. Freezing and beginning anew is the engine's (`engine/epochs.rs`).

use crate::admission::{Admission, AdmissionConfig, Delivery, Listeners};
use crate::connection::{Connection, Progress, Source};
use crate::descriptors::{self, Registration};
use crate::failure::Failure;
use crate::lane::WAKER;
use crate::memory::{Chunk, RealMemory};
use crate::observed::{LaneNode, Recorder};
use crate::shared::{Shared, ns};
use crate::transport::Transport;
use mio::{Events, Poll, Token, Waker};
use parking_lot::Mutex;
use penstock_core::agreement::{Effect, Hearing, MemberMessage, NextMembers, Succession};
use penstock_core::life::{Fault, PeerTimes, may_end};
use penstock_core::node::{self, Action, Node};
use penstock_core::recovery::encode_plan;
use penstock_core::wire::Outgoing;
use penstock_core::{Header, Kind, Members, Rank};
use std::io;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest sleep between two looks at the clock.
const TICK_MAX: Duration = Duration::from_millis(100);
/// Readiness events per turn.
const EVENTS: usize = 64;

/// What the council has for the engine.
pub(crate) enum CouncilWord {
    /// Take nothing of this epoch in any more, and say where this rank is.
    Freeze,
    /// The epoch has ended with this.
    Chosen(NextMembers),
    /// It hears these newcomers.
    Heard(Vec<Rank>),
    /// This rank cannot go on.
    Failed(Failure),
}

/// What the council is told.
enum Said {
    EndEpoch {
        epoch: u32,
        out: Vec<Rank>,
        why: String,
    },
    Frozen(Vec<u8>),
    /// This rank's program waits for these.
    Ready(u32, Vec<Rank>),
    /// It has waited too long for others to do so.
    Overdue(u32),
    /// Where a newcomer is to be reached.
    Moved(Rank, SocketAddr),
    Connected(Rank, Transport),
    Unreachable(Rank, Fault),
    Goodbye,
    Stop,
}

struct CouncilInbox {
    said: Mutex<Vec<Said>>,
    waker: Waker,
}

impl CouncilInbox {
    fn put(&self, said: Said) {
        self.said.lock().push(said);
        // Fails only if the event counter cannot be written; then it is found at the next tick.
        let _ = self.waker.wake();
    }
}

/// The council as the rest of the engine sees it.
pub(crate) struct CouncilHandle {
    inbox: Arc<CouncilInbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What a council is made of.
pub(crate) struct CouncilConfig {
    pub(crate) members: Members,
    /// How many must agree; none: a majority.
    pub(crate) enough: Option<u32>,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) admission: AdmissionConfig,
    /// Of a newcomer: what it says of itself.
    pub(crate) newcomer: Option<Vec<u8>>,
}

impl CouncilHandle {
    /// Starts the thread; `driver` hears what the engine has to do.
    ///
    /// # Errors
    /// `Config` if the system has no descriptors or threads left.
    pub(crate) fn start(
        listeners: Listeners,
        config: CouncilConfig,
        shared: Arc<Shared>,
        driver: Sender<CouncilWord>,
    ) -> Result<Self, Failure> {
        let broken = |error: io::Error| Failure::config(format!("members cannot meet: {error}"));
        let poll = Poll::new().map_err(broken)?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(broken)?;
        let inbox = Arc::new(CouncilInbox { said: Mutex::default(), waker });
        let admission = Arc::new(OnceLock::new());
        let council = Council::new(&config, shared, poll, Arc::clone(&inbox), Arc::clone(&admission), driver);
        let to = Arc::clone(&inbox);
        let deliver = Box::new(move |delivery| match delivery {
            Delivery::Connected { peer, transport, .. } => to.put(Said::Connected(peer, transport)),
            Delivery::Failed { peer, fault, .. } => to.put(Said::Unreachable(peer, fault)),
        });
        let gate = Admission::start(listeners, config.addresses, config.admission, deliver)?;
        // Set once, before the thread runs.
        let _ = admission.set(gate);
        let builder = std::thread::Builder::new().name("penstock-council".into());
        let thread = builder.spawn(move || council.run()).map_err(broken)?;
        Ok(Self { inbox, thread: Mutex::new(Some(thread)) })
    }

    /// A verdict ends this epoch, unless it has ended already.
    pub(crate) fn end_epoch(&self, epoch: u32, out: Vec<Rank>, why: String) {
        self.inbox.put(Said::EndEpoch { epoch, out, why });
    }

    /// Where this rank is: nothing of that changes until the next epoch begins.
    pub(crate) fn frozen(&self, report: Vec<u8>) {
        self.inbox.put(Said::Frozen(report));
    }

    /// In this epoch this rank's program waits for these newcomers, with nothing under way.
    pub(crate) fn ready(&self, epoch: u32, awaited: Vec<Rank>) {
        self.inbox.put(Said::Ready(epoch, awaited));
    }

    /// It has waited too long: whoever does not wait yet is left out.
    pub(crate) fn overdue(&self, epoch: u32) {
        self.inbox.put(Said::Overdue(epoch));
    }

    /// Where a newcomer's council is to be reached.
    pub(crate) fn moved(&self, peer: Rank, address: SocketAddr) {
        self.inbox.put(Said::Moved(peer, address));
    }

    /// This rank ends in order.
    pub(crate) fn goodbye(&self) {
        self.inbox.put(Said::Goodbye);
    }

    /// Ends the thread; bounded.
    pub(crate) fn stop(&self) {
        self.inbox.put(Said::Stop);
        if let Some(thread) = self.thread.lock().take() {
            // A panic was reported by its hook, and has ended the driver's channel.
            let _ = thread.join();
        }
    }
}

struct Council {
    peer_timeout: Duration,
    shared: Arc<Shared>,
    inbox: Arc<CouncilInbox>,
    admission: Arc<OnceLock<Admission>>,
    driver: Sender<CouncilWord>,
    // Before the poll, so that it is dropped first.
    _noted: Registration,
    poll: Poll,
    /// Without books: it checks frames, and says where payloads go.
    node: LaneNode,
    actions: Vec<Action<Chunk>>,
    /// By rank.
    connections: Vec<Option<Connection>>,
    hearing: Hearing,
    succession: Succession,
    /// The newcomers that the engine was told of, and those that were there at the last look.
    told_of: Vec<Rank>,
    seen: Vec<Rank>,
    /// What has ended it, as far as this rank knows.
    why: String,
    /// The engine was told that this rank cannot go on.
    failed: bool,
    stopping: bool,
    now: Instant,
}

impl Council {
    fn new(
        config: &CouncilConfig,
        shared: Arc<Shared>,
        poll: Poll,
        inbox: Arc<CouncilInbox>,
        admission: Arc<OnceLock<Admission>>,
        driver: Sender<CouncilWord>,
    ) -> Self {
        let CouncilConfig {
            members,
            enough,
            newcomer,
            admission: AdmissionConfig { rank: me, ranks, peer_timeout, .. },
            ..
        } = config;
        let now = Instant::now();
        // Newcomers may say something, too.
        let everybody = Members::all(*ranks);
        let of_node = node::Config {
            rank: *me,
            members: everybody.clone(),
            workers: everybody,
            lane: 0,
            lanes: 1,
            window_bytes: 0,
            priority: true,
        };
        Self {
            peer_timeout: *peer_timeout,
            _noted: descriptors::register(&poll),
            poll,
            inbox,
            admission,
            driver,
            node: Node::watched(of_node, RealMemory::new(Arc::clone(&shared.pool)), Recorder::default()),
            actions: Vec::new(),
            connections: (0..*ranks).map(|_| None).collect(),
            hearing: Hearing::new(*me, members, ns(*peer_timeout), shared.ns_of(now)),
            succession: match newcomer {
                Some(said) => Succession::newcomer(*me, members, *enough, said.clone()),
                None => Succession::new(*me, members, *enough),
            },
            told_of: Vec::new(),
            seen: Vec::new(),
            shared,
            why: String::new(),
            failed: false,
            stopping: false,
            now,
        }
    }

    fn run(mut self) {
        // All are dialled by all: one that is gone before it comes here is missed.
        self.look();
        let mut events = Events::with_capacity(EVENTS);
        let tick = TICK_MAX.min(self.peer_timeout / 10).max(Duration::from_millis(5));
        let mut ticked = self.now;
        while !self.stopping {
            if let Err(error) = self.turn(&mut events, tick) {
                return self.fail(Failure::config(format!("members cannot be heard: {error}")));
            }
            if self.now.saturating_duration_since(ticked) >= tick {
                ticked = self.now;
                self.look();
            }
        }
        self.flush(&mut events);
    }

    fn turn(&mut self, events: &mut Events, sleep: Duration) -> io::Result<()> {
        match self.poll.poll(events, Some(sleep)) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        self.now = Instant::now();
        for event in events.iter() {
            let Token(peer) = event.token();
            if let Some(Some(connection)) = self.connections.get_mut(peer) {
                connection.ready(event);
            }
        }
        let said = std::mem::take(&mut *self.inbox.said.lock());
        said.into_iter().for_each(|said| self.hear(said));
        for peer in 0..self.connections.len() {
            self.serve(peer);
        }
        Ok(())
    }

    fn now_ns(&self) -> u64 {
        self.shared.ns_of(self.now)
    }

    fn hear(&mut self, said: Said) {
        let now_ns = self.now_ns();
        match said {
            Said::EndEpoch { epoch, out, why } if epoch == self.succession.epoch() => {
                if self.why.is_empty() {
                    self.why = why;
                }
                self.succession.end_without(now_ns, &out);
            }
            Said::EndEpoch { .. } => {}
            Said::Frozen(report) => self.succession.frozen(now_ns, report),
            Said::Ready(epoch, awaited) if epoch == self.succession.epoch() => {
                self.succession.ready(now_ns, &awaited);
            }
            Said::Overdue(epoch) if epoch == self.succession.epoch() => self.succession.overdue(now_ns),
            Said::Ready(..) | Said::Overdue(_) => {}
            Said::Moved(peer, address) => {
                if let Some(admission) = self.admission.get() {
                    admission.moved(peer, address);
                }
            }
            Said::Connected(peer, transport) => self.connected(peer, transport),
            Said::Unreachable(peer, fault) => {
                self.hearing.unreachable(now_ns, peer, &fault, &mut self.succession);
            }
            Said::Goodbye => {
                let peers: Vec<Rank> = self.succession.members().iter().collect();
                peers.into_iter().for_each(|peer| self.say(peer, Header::control(Kind::Goodbye), None));
            }
            Said::Stop => self.stopping = true,
        }
        self.follow();
    }

    fn connected(&mut self, peer: Rank, transport: Transport) {
        if !self.hearing.connected(self.now_ns(), peer, &mut self.succession) {
            return;
        }
        let place = (self.poll.registry(), Token(peer.index()));
        match Connection::new(transport, place, self.now) {
            Ok(connection) => self.connections[peer.index()] = Some(connection),
            Err(error) => self.fail(Failure::config(format!("a connection cannot be set up: {error}"))),
        }
    }

    fn serve(&mut self, peer: usize) {
        let rank = Rank(peer as u32);
        let Some(connection) = &mut self.connections[peer] else { return };
        let (mut open, mut fits) = (true, true);
        let mut progress = Progress::Again;
        while connection.may_read && progress == Progress::Again {
            match connection.read(rank, &mut self.node, &mut self.actions, self.now) {
                Ok(Progress::Closed(_)) => (open, progress) = (false, Progress::Idle),
                Err(_) => (fits, progress) = (false, Progress::Idle),
                Ok(next) => progress = next,
            }
        }
        let source = Source { node: &mut self.node, peer: rank, wanted: &mut false };
        open &= !matches!(connection.write(source, self.now), Progress::Closed(_));
        let actions = std::mem::take(&mut self.actions);
        for action in actions {
            if let Action::Control { header, payload, .. } = action {
                fits &= self.frame(rank, &header, payload.as_ref());
            }
        }
        if !fits {
            self.hearing.misspoke(self.now_ns(), rank, &mut self.succession);
        } else if !open {
            self.hearing.closed(self.now_ns(), rank);
        }
        if !(fits && open) {
            self.close(rank);
            self.look();
        }
        self.follow();
    }

    /// A frame has come; whether it makes sense.
    fn frame(&mut self, from: Rank, header: &Header, payload: Option<&Chunk>) -> bool {
        match header.kind {
            Kind::Heartbeat => true,
            Kind::Goodbye => {
                self.hearing.departed(from);
                true
            }
            Kind::Members => {
                let bytes = payload.map(Chunk::to_vec).unwrap_or_default();
                let Ok((epoch, message)) = MemberMessage::decode(&bytes) else { return false };
                self.succession.heard_from(self.now_ns(), from, epoch, message);
                self.follow();
                true
            }
            _ => false,
        }
    }

    fn close(&mut self, peer: Rank) {
        let Some(mut connection) = self.connections[peer.index()].take() else { return };
        // Fails only if it is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(connection.watched());
        if let Some(admission) = self.admission.get() {
            admission.disconnected(0, peer);
        }
    }

    fn say(&mut self, to: Rank, header: Header, payload: Option<&[u8]>) {
        let Some(Some(connection)) = self.connections.get_mut(to.index()) else { return };
        let payload = payload.map(|bytes| self.shared.pool.copy_of(bytes));
        let payload_bytes = payload.as_ref().map_or(0, Chunk::len) as u32;
        connection.depart(Outgoing { header: Header { payload_bytes, ..header }, payload });
        let source = Source { node: &mut self.node, peer: to, wanted: &mut false };
        // That it is closed shows when it is read.
        if let Progress::Closed(_) = connection.write(source, self.now) {
            (connection.may_write, connection.may_read, connection.hung_up) = (false, true, true);
        }
    }

    /// Does what the agreement wants.
    fn follow(&mut self) {
        loop {
            let effects = self.succession.take_effects();
            if effects.is_empty() {
                return;
            }
            for effect in effects {
                match effect {
                    Effect::Send(to, epoch, message) => {
                        self.say(to, Header::control(Kind::Members), Some(&message.encode(epoch)));
                    }
                    Effect::Freeze => self.tell(CouncilWord::Freeze),
                    Effect::Plan(ballot, reports) => {
                        self.succession.planned(self.now_ns(), ballot, encode_plan(&reports));
                    }
                    Effect::Chosen(choice) => {
                        self.why.clear();
                        self.told_of.clear();
                        self.seen.clear();
                        self.tell(CouncilWord::Chosen(choice));
                    }
                }
            }
        }
    }

    fn tell(&self, word: CouncilWord) {
        // Who does not listen any more has ended.
        let _ = self.driver.send(word);
    }

    fn fail(&mut self, failure: Failure) {
        if !std::mem::replace(&mut self.failed, true) {
            self.tell(CouncilWord::Failed(failure));
        }
    }

    /// What only the clock tells.
    fn look(&mut self) {
        let now_ns = self.now_ns();
        self.succession.look(now_ns);
        let shared = Arc::clone(&self.shared);
        let times = self.connections.iter().enumerate().filter_map(|(peer, connection)| {
            let connection = connection.as_ref()?;
            let (heard_ns, spoke_ns) = (shared.ns_of(connection.heard), shared.ns_of(connection.spoke));
            let (peer, written) = (Rank(peer as u32), connection.all_written());
            Some(PeerTimes { peer, heard_ns, spoke_ns, written })
        });
        let errands = self.hearing.look(now_ns, times, &mut self.succession);
        errands.beats.into_iter().for_each(|peer| self.say(peer, Header::control(Kind::Heartbeat), None));
        if let Some(admission) = self.admission.get() {
            errands.dials.into_iter().for_each(|peer| admission.dial(0, peer));
        }
        self.follow();
        // Not at once: a newcomer connects with all, and one is first.
        let present: Vec<Rank> = self.succession.newcomers().collect();
        if present == self.seen && present != self.told_of {
            self.told_of.clone_from(&present);
            self.tell(CouncilWord::Heard(present.clone()));
        }
        self.seen = present;
        if let Some(error) = self.succession.given_up(now_ns, ns(self.peer_timeout), &self.why) {
            self.fail(error.into());
        }
    }

    /// Gives what was said a bounded time to arrive.
    fn flush(&mut self, events: &mut Events) {
        let started = self.now;
        loop {
            let mut open = self.connections.iter().flatten();
            let arrived = open.all(|c| c.all_written() && c.undelivered_bytes() == 0);
            let since_ns = ns(self.now.saturating_duration_since(started));
            if may_end(since_ns, arrived, true) || self.turn(events, Duration::from_millis(5)).is_err() {
                return;
            }
        }
    }
}

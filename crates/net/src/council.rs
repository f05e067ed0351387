//! Where the members of a job find out who is in the next epoch: a thread that carries out [`penstock_core::agreement`] over
//! connections of its own, which stay when an epoch's lanes end.
//!
//! It is there where members may be lost. What ends an epoch is a verdict of the life of the job, or that a connection of the council ends, is
//! silent, or cannot be opened. Who says goodbye here ends no epoch; the next one is without it.
//!
//! What it leaves out: freezing and beginning anew, which the engine does (`engine/epochs.rs`).

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
use penstock_core::agreement::{Effect, MemberMessage, NextMembers, Succession};
use penstock_core::life::{PeerTimes, Pulse, Sign, may_end};
use penstock_core::node::{self, Action, Node};
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
/// A connection that is gone is tried again so much later.
const AGAIN: Duration = Duration::from_millis(500);
/// Readiness events per turn.
const EVENTS: usize = 64;

/// What the council has for the engine.
pub(crate) enum CouncilWord {
    /// Take nothing of this epoch in any more, and say where this rank is.
    Freeze,
    /// The epoch has ended with this.
    Chosen(NextMembers),
    /// This rank cannot go on.
    Failed(Failure),
}

/// What the council is told.
enum Said {
    EndEpoch { epoch: u32, out: Vec<Rank>, why: String },
    Frozen(Vec<u8>),
    Connected(Rank, Transport),
    Unreachable(Rank),
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
            Delivery::Failed { peer, .. } => to.put(Said::Unreachable(peer)),
        });
        let gate = Admission::start(listeners, config.addresses, config.admission, deliver)?;
        // Set once, before the thread runs.
        let _ = admission.set(gate);
        let builder = std::thread::Builder::new().name("penstock-council".into());
        let thread = builder.spawn(move || council.run()).map_err(broken)?;
        Ok(Self { inbox, thread: Mutex::new(Some(thread)) })
    }

    /// A verdict ends this epoch, unless it has ended already.
    pub(crate) fn end_epoch(&self, epoch: u32, out: Vec<Rank>, why: &str) {
        self.inbox.put(Said::EndEpoch { epoch, out, why: why.into() });
    }

    /// Where this rank is: nothing of that changes until the next epoch begins.
    pub(crate) fn frozen(&self, report: Vec<u8>) {
        self.inbox.put(Said::Frozen(report));
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

#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    /// It has said goodbye.
    departed: bool,
    /// Since when it counts as silent: until something comes from it.
    silent: Option<Instant>,
    /// When its connection is to be tried again.
    again: Option<Instant>,
}

struct Council {
    me: Rank,
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
    links: Vec<Link>,
    pulse: Pulse,
    signs: Vec<Sign>,
    succession: Succession,
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
            members, enough, admission: AdmissionConfig { rank: me, peer_timeout, .. }, ..
        } = config;
        let now = Instant::now();
        let of_node = node::Config {
            rank: *me,
            members: members.clone(),
            workers: members.clone(),
            lane: 0,
            lanes: 1,
            window_bytes: 0,
            priority: true,
        };
        Self {
            me: *me,
            peer_timeout: *peer_timeout,
            _noted: descriptors::register(&poll),
            poll,
            inbox,
            admission,
            driver,
            node: Node::watched(of_node, RealMemory::new(Arc::clone(&shared.pool)), Recorder::default()),
            actions: Vec::new(),
            links: (0..members.end()).map(|_| Link::default()).collect(),
            pulse: Pulse::new(members, ns(*peer_timeout), ns(*peer_timeout), shared.ns_of(now)),
            signs: Vec::new(),
            succession: Succession::new(*me, members, *enough),
            shared,
            why: String::new(),
            failed: false,
            stopping: false,
            now,
        }
    }

    fn run(mut self) {
        // By both: one that is gone before it comes here is missed.
        let others: Vec<Rank> = self.succession.members().iter().filter(|rank| *rank != self.me).collect();
        others.into_iter().for_each(|rank| self.dial(rank));
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
            if let Some(Link { connection: Some(connection), .. }) = self.links.get_mut(peer) {
                connection.ready(event);
            }
        }
        let said = std::mem::take(&mut *self.inbox.said.lock());
        said.into_iter().for_each(|said| self.hear(said));
        for peer in 0..self.links.len() {
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
                out.iter().for_each(|rank| self.succession.suspect(now_ns, *rank));
                self.succession.end(now_ns);
            }
            Said::EndEpoch { .. } => {}
            Said::Frozen(report) => self.succession.frozen(now_ns, report),
            Said::Connected(peer, transport) => self.connected(peer, transport),
            Said::Unreachable(peer) => {
                self.links[peer.index()].again = Some(self.now + AGAIN);
                if self.links[peer.index()].connection.is_none() {
                    self.succession.suspect(now_ns, peer);
                }
            }
            Said::Goodbye => {
                let peers: Vec<Rank> = self.succession.members().iter().collect();
                peers.into_iter().for_each(|peer| self.say(peer, Header::control(Kind::Goodbye), None));
            }
            Said::Stop => self.stopping = true,
        }
        self.follow();
    }

    fn dial(&self, peer: Rank) {
        if let Some(admission) = self.admission.get() {
            admission.dial(0, peer);
        }
    }

    fn connected(&mut self, peer: Rank, transport: Transport) {
        let place = (self.poll.registry(), Token(peer.index()));
        match Connection::new(transport, place, self.now) {
            Ok(connection) => {
                self.links[peer.index()] = Link { connection: Some(connection), ..Link::default() };
                self.succession.heard_again(self.now_ns(), peer);
            }
            Err(error) => self.fail(Failure::config(format!("a connection cannot be set up: {error}"))),
        }
    }

    fn serve(&mut self, peer: usize) {
        let (rank, link) = (Rank(peer as u32), &mut self.links[peer]);
        let Some(connection) = &mut link.connection else { return };
        let mut open = true;
        let mut progress = Progress::Again;
        while connection.may_read && progress == Progress::Again {
            match connection.read(rank, &mut self.node, &mut self.actions, self.now) {
                Ok(Progress::Closed(_)) | Err(_) => {
                    open = false;
                    break;
                }
                Ok(next) => progress = next,
            }
        }
        let source = Source { node: &mut self.node, peer: rank, wanted: &mut false };
        open &= !matches!(connection.write(source, self.now), Progress::Closed(_));
        let back = link.silent.is_some_and(|since| connection.heard > since);
        if back {
            link.silent = None;
            self.succession.heard_again(self.now_ns(), rank);
        }
        let actions = std::mem::take(&mut self.actions);
        for action in actions {
            if let Action::Control { header, payload, .. } = action {
                open &= self.frame(rank, &header, payload.as_ref());
            }
        }
        if !open {
            self.closed(rank);
        }
        self.follow();
    }

    /// A frame has come; whether it makes sense.
    fn frame(&mut self, from: Rank, header: &Header, payload: Option<&Chunk>) -> bool {
        match header.kind {
            Kind::Heartbeat => true,
            Kind::Goodbye => {
                self.links[from.index()].departed = true;
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

    fn closed(&mut self, peer: Rank) {
        let link = &mut self.links[peer.index()];
        let Some(mut connection) = link.connection.take() else { return };
        // Fails only if it is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(connection.watched());
        (link.silent, link.again) = (None, Some(self.now + AGAIN));
        if let Some(admission) = self.admission.get() {
            admission.disconnected(0, peer);
        }
        if !link.departed {
            self.succession.suspect(self.now_ns(), peer);
        }
    }

    fn say(&mut self, to: Rank, header: Header, payload: Option<&[u8]>) {
        let Some(connection) = self.links.get_mut(to.index()).and_then(|link| link.connection.as_mut())
        else {
            return;
        };
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
        let mut signs = std::mem::take(&mut self.signs);
        let shared = Arc::clone(&self.shared);
        let times = self.links.iter().enumerate().filter_map(|(peer, link)| {
            let connection = link.connection.as_ref()?;
            let (heard_ns, spoke_ns) = (shared.ns_of(connection.heard), shared.ns_of(connection.spoke));
            let (peer, written) = (Rank(peer as u32), connection.all_written());
            Some(PeerTimes { peer, heard_ns, spoke_ns, written })
        });
        self.pulse.look(now_ns, times, &mut signs);
        for sign in signs.drain(..) {
            match sign {
                Sign::Heartbeat(peer) => self.say(peer, Header::control(Kind::Heartbeat), None),
                Sign::Silent(peer, _) => {
                    if self.links[peer.index()].silent.is_none() {
                        self.links[peer.index()].silent = Some(self.now);
                        self.succession.suspect(now_ns, peer);
                    }
                }
            }
        }
        self.signs = signs;
        self.look_at_members(now_ns);
        self.follow();
    }

    fn look_at_members(&mut self, now_ns: u64) {
        let members = self.succession.members();
        for rank in members.iter().filter(|rank| *rank != self.me) {
            let link = &mut self.links[rank.index()];
            if link.connection.is_none() && link.again.take_if(|again| *again <= self.now).is_some() {
                self.dial(rank);
            }
            // Who has said goodbye ends no epoch, and is not in the next.
            if self.links[rank.index()].departed && self.succession.is_ending() {
                self.succession.suspect(now_ns, rank);
            }
        }
        if let Some(error) = self.succession.given_up(now_ns, ns(self.peer_timeout), &self.why) {
            self.fail(error.into());
        }
    }

    /// Gives what was said a bounded time to arrive.
    fn flush(&mut self, events: &mut Events) {
        let started = self.now;
        loop {
            let mut open = self.links.iter().filter_map(|link| link.connection.as_ref());
            let arrived = open.all(|c| c.all_written() && c.undelivered_bytes() == 0);
            let since_ns = ns(self.now.saturating_duration_since(started));
            if may_end(since_ns, arrived, true) || self.turn(events, Duration::from_millis(5)).is_err() {
                return;
            }
        }
    }
}

/// A plan is what those who stay have reported: each works out the same from it.
fn encode_plan(reports: &[(Rank, Vec<u8>)]) -> Vec<u8> {
    let mut plan = Vec::new();
    for (rank, report) in reports {
        plan.extend(rank.0.to_le_bytes());
        plan.extend((report.len() as u32).to_le_bytes());
        plan.extend(report);
    }
    plan
}

/// Reads what `encode_plan` wrote.
///
/// # Errors
/// A sentence that says what is wrong with it.
pub(crate) fn decode_plan(mut plan: &[u8]) -> Result<Vec<(Rank, &[u8])>, String> {
    let broken = || "a plan for the next epoch that breaks off".to_owned();
    let mut reports = Vec::new();
    while !plan.is_empty() {
        let (head, rest) = plan.split_first_chunk::<8>().ok_or_else(broken)?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (report, rest) = rest.split_at_checked(number(4) as usize).ok_or_else(broken)?;
        reports.push((Rank(number(0)), report));
        plan = rest;
    }
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decode_inverts_encode(reports in vec((0..9u32, vec(any::<u8>(), 0..20)), 0..5)) {
            let reports: Vec<(Rank, Vec<u8>)> = reports.into_iter().map(|(rank, report)| (Rank(rank), report)).collect();
            let plan = encode_plan(&reports);
            let found = decode_plan(&plan).unwrap();
            prop_assert_eq!(found, reports.iter().map(|(rank, report)| (*rank, report.as_slice())).collect::<Vec<_>>());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            if let Ok(reports) = decode_plan(&bytes) {
                let reports: Vec<_> = reports.into_iter().map(|(rank, report)| (rank, report.to_vec())).collect();
                prop_assert_eq!(encode_plan(&reports), bytes);
            }
        }
    }
}

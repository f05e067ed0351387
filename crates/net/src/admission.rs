//! How connections come to be: one thread that owns the listener and every unfinished handshake, in both directions.
//!
//! There is one connection per (lane, peer), opened by whichever end needs it first: through memory that both share if they
//! are on one host, else by TCP. A lane asks for it when it has
//! its first frame for a peer ([`Admission::dial`]); both lanes are handed the authenticated stream and own it from
//! then on. What happens when both ends dial at once is decided in `pairs.rs`.
//!
//! Nothing from the network reaches a lane before its sender has proved that it belongs to the job. Strangers get a
//! place among [`STRANGERS_MAX`], a fixed buffer and until the handshake's deadline, and compete only with each other:
//! data already flows on other threads. A peer that loses its place in a flood of strangers redials.
//!
//! What this module omits: a lane's connection is never restored. If one is lost, its rank is lost, and the lane says so. The council's is
//! dialled again ([`Admission::disconnected`]).

mod dials;
mod listeners;
mod pairs;
mod strangers;

use crate::descriptors::{self, Registration};
use crate::handshake::{self, HandshakeMessage, Member, Nonce};
use crate::seal::Seal;
use crate::socket::Socket;
use crate::transport::{SharedMemory, Transport};
use dials::{Dial, DialKey};
use mio::{Events, Interest, Poll, Token, Waker};
use pairs::Pairs;
use parking_lot::Mutex;
use penstock_core::life::Fault;
use penstock_core::{Error, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use strangers::Stranger;

pub use listeners::Listeners;
pub use strangers::STRANGERS_MAX;

const LISTENER: Token = Token(0);
const WAKER: Token = Token(1);
const FIRST_SOCKET: usize = 2;
/// Read buffer of the thread: what a stranger sends after it was refused goes through it and is dropped.
const SCRATCH_BYTES: usize = 16 << 10;

/// What the admission thread must know of the job.
#[derive(Clone)]
pub struct AdmissionConfig {
    /// This process.
    pub rank: Rank,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of lanes of every rank.
    pub lanes: u32,
    /// Tells the jobs of a cluster apart.
    pub job_id: [u8; handshake::JOB_ID_BYTES],
    /// The job's secret.
    pub secret: Vec<u8>,
    /// Whether what leaves this host is encrypted. All ranks of a job agree on it.
    pub encrypt: bool,
    /// Whether peers on this host are connected to through shared memory, where both ends can.
    pub shared_memory: bool,
    /// What connections by TCP use, if not the system's; those that are accepted have the listener's.
    pub congestion_control: Option<String>,
    /// How long one attempt, from connecting to acceptance, and one stranger may take.
    pub handshake_timeout: Duration,
    /// How long a peer that cannot be reached, or that prefers a connection of its own, is tried again.
    pub peer_timeout: Duration,
}

/// What the admission thread has for a lane.
#[derive(Debug)]
pub enum Delivery {
    /// The connection of this lane to this peer: authenticated. It is the only one, and the next bytes on it are frames.
    Connected {
        /// The lane at both ends.
        lane: u32,
        /// Who is at the other end.
        peer: Rank,
        /// The connection.
        transport: Transport,
    },
    /// [`Admission::dial`] has failed for good.
    Failed {
        /// The lane that asked.
        lane: u32,
        /// Who was dialled.
        peer: Rank,
        /// Why, and whose fault it is: the peer's, or this rank's own.
        fault: Fault,
    },
}

/// Called on the admission thread; must not block.
pub type Deliver = Box<dyn Fn(Delivery) + Send>;

/// What lanes and the admission thread share.
struct SharedWithLanes {
    pairs: Pairs,
    asked: Mutex<Vec<DialKey>>,
    /// Where peers are that have come since.
    moved: Mutex<Vec<(Rank, SocketAddr)>>,
    stop: AtomicBool,
    waker: Waker,
}

impl SharedWithLanes {
    fn wake(&self) {
        // Fails only if the event counter cannot be written, and then the thread wakes at its next deadline.
        let _ = self.waker.wake();
    }
}

/// The admission thread of this process. Dropping it closes the listener and every unfinished handshake.
pub struct Admission {
    shared: Arc<SharedWithLanes>,
    thread: Option<JoinHandle<()>>,
    process_id: u32,
}

impl Admission {
    /// Starts to answer on `listeners`. `addresses` says by rank where each peer's listener is.
    ///
    /// # Errors
    /// [`Error::Config`] if the system has no descriptors or threads left.
    pub fn start(
        listeners: Listeners,
        addresses: Vec<SocketAddr>,
        config: AdmissionConfig,
        deliver: Deliver,
    ) -> Result<Self, Error> {
        assert_eq!(addresses.len(), config.ranks as usize, "one address per rank");
        Self::try_start(listeners, addresses, config, deliver)
            .map_err(|error| Error::Config(format!("connections cannot be accepted: {error}")))
    }

    fn try_start(
        listeners: Listeners,
        addresses: Vec<SocketAddr>,
        config: AdmissionConfig,
        deliver: Deliver,
    ) -> io::Result<Self> {
        let poll = Poll::new()?;
        let shared = Arc::new(SharedWithLanes {
            pairs: Pairs::new(config.rank, config.ranks, config.lanes),
            asked: Mutex::new(Vec::new()),
            moved: Mutex::new(Vec::new()),
            stop: AtomicBool::new(false),
            waker: Waker::new(poll.registry(), WAKER)?,
        });
        let mut gate = Gate::new(poll, listeners, addresses, config, deliver, Arc::clone(&shared))?;
        let thread =
            std::thread::Builder::new().name("penstock-admission".into()).spawn(move || gate.run())?;
        Ok(Self { shared, thread: Some(thread), process_id: std::process::id() })
    }

    /// Asks for the connection of `lane` to `peer`. It, or a failure, is delivered later. Nothing happens if it exists
    /// or has been asked for: that costs one atomic operation, so a lane may call this whenever it has a frame.
    ///
    /// # Panics
    /// If `peer` is this rank or not a rank of the job.
    pub fn dial(&self, lane: u32, peer: Rank) {
        if self.shared.pairs.ask(lane, peer) && !self.is_forked() {
            self.shared.asked.lock().push((lane, peer));
            self.shared.wake();
        }
    }

    /// A newcomer's listener is here, from the next dial on.
    pub fn moved(&self, peer: Rank, address: SocketAddr) {
        self.shared.moved.lock().push((peer, address));
    }

    /// Tells that the connection of `lane` to `peer` is gone, so that it may be dialled again.
    ///
    /// # Panics
    /// As [`Admission::dial`].
    pub fn disconnected(&self, lane: u32, peer: Rank) {
        self.shared.pairs.disconnected(lane, peer);
    }

    /// In a forked child the thread does not exist and the descriptors may have been closed and given to others.
    fn is_forked(&self) -> bool {
        std::process::id() != self.process_id
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.is_forked() {
            mem::forget((thread, Arc::clone(&self.shared)));
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // A delivery may hold the last reference to its engine; a thread cannot wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            // Bounded: the thread never waits for anything but its poll. A panic in `deliver` was reported by its hook.
            let _ = thread.join();
        }
    }
}

/// What happens at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    /// Accepting is tried again.
    Accept,
    /// A stranger has had its time.
    Stranger(usize),
    /// An attempt has had its time, or the next one is due.
    Dial(DialKey),
}

/// The state of the admission thread. Its parts are in `strangers.rs` (who connected to us) and `dials.rs` (whom we
/// connect to).
struct Gate {
    // Before what it notes, so that it is dropped first.
    _noted: Registration,
    listeners: Listeners,
    poll: Poll,
    addresses: Vec<SocketAddr>,
    member: Member,
    shared_memory: bool,
    congestion_control: Option<String>,
    handshake_timeout: Duration,
    peer_timeout: Duration,
    deliver: Deliver,
    shared: Arc<SharedWithLanes>,
    /// By token, so the oldest first.
    strangers: BTreeMap<usize, Stranger>,
    dials: BTreeMap<DialKey, Dial>,
    /// The dials that have a socket, by its token.
    dialing: BTreeMap<usize, DialKey>,
    timers: BTreeSet<(Instant, Timer)>,
    /// The listeners may have more connections. Readiness is told only once, so it must be remembered.
    may_accept: bool,
    /// Tokens are never used twice, so an event for a socket that is closed finds nothing.
    next_token: usize,
    scratch: Box<[u8; SCRATCH_BYTES]>,
}

impl Gate {
    fn new(
        poll: Poll,
        mut listeners: Listeners,
        addresses: Vec<SocketAddr>,
        config: AdmissionConfig,
        deliver: Deliver,
        shared: Arc<SharedWithLanes>,
    ) -> io::Result<Self> {
        listeners.listen()?;
        for socket in &mut listeners.0 {
            poll.registry().register(socket, LISTENER, Interest::READABLE)?;
        }
        let AdmissionConfig { rank, ranks, lanes, job_id, secret, encrypt, .. } = config;
        let AdmissionConfig { shared_memory, congestion_control, handshake_timeout, peer_timeout, .. } =
            config;
        Ok(Self {
            _noted: descriptors::register(&poll),
            listeners,
            poll,
            addresses,
            member: Member { rank, ranks, lanes, job_id, secret, encrypt },
            shared_memory,
            congestion_control,
            handshake_timeout,
            peer_timeout,
            deliver,
            shared,
            strangers: BTreeMap::new(),
            dials: BTreeMap::new(),
            dialing: BTreeMap::new(),
            timers: BTreeSet::new(),
            may_accept: true,
            next_token: FIRST_SOCKET,
            scratch: Box::new([0; SCRATCH_BYTES]),
        })
    }

    fn run(&mut self) {
        let mut events = Events::with_capacity(256);
        while !self.shared.stop.load(Ordering::Acquire) {
            match self.poll.poll(&mut events, self.wait()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return self.fail_all(&error),
            }
            for event in &events {
                match event.token() {
                    LISTENER => self.may_accept = true,
                    WAKER => {}
                    Token(token) => self.ready(token),
                }
            }
            self.start_asked();
            self.expire();
            // Last, so that a flood of strangers only ever delays strangers.
            self.accept_some();
        }
    }

    /// How long nothing needs to be done unless something arrives.
    fn wait(&self) -> Option<Duration> {
        if self.may_accept {
            return Some(Duration::ZERO);
        }
        self.timers.first().map(|(when, _)| when.saturating_duration_since(Instant::now()))
    }

    fn ready(&mut self, token: usize) {
        if let Some(&key) = self.dialing.get(&token) {
            self.dial_ready(key);
        } else if let Some(stranger) = self.strangers.remove(&token) {
            self.stranger_ready(token, stranger);
        }
    }

    fn start_asked(&mut self) {
        for (peer, address) in mem::take(&mut *self.shared.moved.lock()) {
            self.addresses[peer.index()] = address;
        }
        let asked = mem::take(&mut *self.shared.asked.lock());
        for key in asked {
            self.start_dial(key);
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        while let Some(&(when, timer)) = self.timers.first() {
            if when > now {
                return;
            }
            self.timers.pop_first();
            match timer {
                Timer::Accept => self.may_accept = true,
                Timer::Stranger(token) => {
                    if let Some(stranger) = self.strangers.remove(&token) {
                        self.drop_stranger(token, stranger);
                    }
                }
                Timer::Dial(key) => self.dial_due(key),
            }
        }
    }

    /// The poll itself is broken: no connection can come about any more.
    fn fail_all(&mut self, error: &io::Error) {
        self.start_asked();
        for key in self.dials.keys().copied().collect::<Vec<_>>() {
            let text = format!("connections cannot be awaited: {error}");
            self.fail(key, Fault::own(self.member.rank, Error::Config(text)));
        }
    }

    fn watch(&mut self, socket: &mut Socket) -> io::Result<usize> {
        let token = self.next_token;
        self.next_token += 1;
        self.poll.registry().register(socket, Token(token), Interest::READABLE | Interest::WRITABLE)?;
        Ok(token)
    }

    /// Hands what leads to an authenticated peer to its lane. What has arrived on it already stays there, and the lane's own
    /// poll reports it when it is registered there.
    fn hand_over(
        &self,
        (lane, peer): DialKey,
        mut socket: Socket,
        memory: Option<SharedMemory>,
        seal: Option<Seal>,
    ) {
        // Fails only if it is not registered, which is what is wanted.
        let _ = self.poll.registry().deregister(&mut socket);
        (self.deliver)(Delivery::Connected { lane, peer, transport: Transport::new(socket, memory, seal) });
    }

    /// Explicit, because a forked child that has not closed its copy yet would keep the registration alive.
    fn close(&self, mut socket: Socket) {
        let _ = self.poll.registry().deregister(&mut socket);
    }
}

/// Sends a message of the handshake in one piece. It is far smaller than an empty send buffer, and each is answered
/// before the next, so a socket that does not take all of it is broken.
fn send(socket: &Socket, message: &HandshakeMessage, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = message.as_bytes();
    match socket.send(bytes, descriptor)? {
        count if count == bytes.len() => Ok(()),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}

fn fresh_nonce() -> io::Result<Nonce> {
    let mut nonce = [0; handshake::NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(nonce)
}

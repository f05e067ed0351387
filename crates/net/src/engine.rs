//! The engine: what a program talks to. Every call checks its arguments, tells the lanes, and waits for what they bring about.

mod call;
mod epochs;
mod gather;
mod replay;
mod start_end;
mod updates;
mod wait;

use crate::accounting::Phase;
use crate::admission::{Admission, Listeners};
use crate::congestion;
use crate::failure::Failure;
use crate::mailbox::Command;
use crate::memory::{Chunk, Lender, Pool, RealMemory};
use crate::observed::{LaneCounts, Observations, Record, Rings, now_ns};
use crate::report::{self, Report};
use crate::shared::{OpenBook, Shared};
pub use call::{AddressRange, CallPart};
use epochs::Epochs;
use gather::check_bytes;
use parking_lot::{Mutex, RwLock};
use penstock_core::calls::Calls;
use penstock_core::cost::Rates;
use penstock_core::layout::Tensor;
use penstock_core::limits::{NEWCOMERS_MAX, RANKS_MAX};
use penstock_core::observe::Point;
use penstock_core::roles::{MustBeIn, Roles};
use penstock_core::{
    Book, BookId, Gives, Members, Op, Rank, Route, Seq, Slicing, Submission, TensorId, slicing,
};
use replay::Withheld;
use std::net::{TcpListener, ToSocketAddrs};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
pub use wait::{Landed, Until};

/// Scratch buffers that are kept for reuse, in bytes.
const POOL_KEEP_BYTES: usize = 20 << 20;
/// What all windows of a process may hold together, if the engine decides. Ranks that are out of step by a few milliseconds
/// push different slices of their backlog first, and those stay unanswered until the others come to them. A small
/// window then holds back what could be sent.
const WINDOWS_BYTES: u64 = 20 << 20;
/// Bounds of one window, if the engine decides; it takes at least two slices in any case.
const WINDOW_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=8 << 20;
/// What a server may hold for all workers together. It trains nothing and has memory to spare, and is one of few, so that much of
/// a step's backlog is its own: what workers have pushed of it before something more urgent overtook it stays unanswered to the
/// end of the step. Windows of 5 MiB were filled by that, and ResNet-50 over one server sent at 0.7 of the line for half of each
/// step.
const SERVER_BYTES: u64 = 256 << 20;
/// How long a lane may take to answer a question: it answers in its next turn, if the machine lets it have one.
const ANSWER: Duration = Duration::from_secs(5);

/// Who this process is in its job, and how it communicates. The same on every rank except `rank`, `bind_host` and `port`.
#[derive(Clone)]
pub struct EngineConfig {
    /// This process.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// How many of them, the last ones, are servers: they own slices of books whose roles say so, and are in nothing else.
    pub servers: u32,
    /// Where to listen.
    pub bind_host: String,
    /// The port to listen on; 0 for any.
    pub port: u16,
    /// What proves membership of the job.
    pub secret: Vec<u8>,
    /// Whether what leaves this host is encrypted: all ranks alike.
    pub encrypt: bool,
    /// Tells jobs apart.
    pub job_id: [u8; 16],
    /// Largest slice in bytes; 0: the engine decides by the line rate ([`Engine::set_rates`]).
    pub slice_bytes: usize,
    /// Lanes of every rank.
    pub lanes: u32,
    /// Whether books use all lanes, or only as many as the line rate needs.
    pub all_lanes: bool,
    /// Bytes that may be pushed to one rank for one book on one lane and be unanswered; 0: the engine decides.
    pub window_bytes: u64,
    /// Whether the place in the forward pass decides what goes first.
    pub priority: bool,
    /// Congestion control of the connections: a name, `system`, or `auto`, which only avoids BBR.
    pub congestion_control: String,
    /// Whether ranks of one host exchange bytes through memory that both map, where both ends can.
    pub shared_memory: bool,
    /// Longest wait for one synchronisation.
    pub operation_timeout: Duration,
    /// Longest silence of a peer.
    pub peer_timeout: Duration,
    /// Longest time that a new connection may take to prove itself.
    pub handshake_timeout: Duration,
    /// Whether the others go on when members are lost ([`Engine::go_on_after_losses`]). All tensors of all books travel by the store then, and
    /// answers are read to scratch memory first.
    pub elastic: bool,
    /// Of what was observed, how many records are kept per lane, and as many of the program; 0: none.
    pub observations: usize,
}

impl EngineConfig {
    /// How many of the ranks are workers.
    pub(crate) fn workers(&self) -> u32 {
        self.size - self.servers
    }

    /// How many ranks there may ever be, newcomers included.
    pub(crate) fn ranks_most(&self) -> u32 {
        if self.elastic { (self.size + NEWCOMERS_MAX).min(RANKS_MAX) } else { self.size }
    }
}

/// Memory of the program, as it hands it over with a [`Submission`].
#[derive(Debug, Clone, Copy)]
pub struct Lent {
    /// Where it starts.
    pub address: usize,
    /// Its length.
    pub len_bytes: usize,
}

/// One process's end of a job. All calls may be made from any thread.
pub struct Engine {
    /// Counted, so that a forked child can leak it.
    inner: Arc<Inner>,
}

struct Inner {
    config: EngineConfig,
    port: u16,
    process_id: u32,
    forked: AtomicBool,
    /// The end of the process closes it, not the last handle.
    outlives_handles: AtomicBool,
    shared: Arc<Shared>,
    books: RwLock<Vec<Arc<OpenBook>>>,
    next_token: AtomicU64,
    /// What calls are made of.
    agreed: Mutex<call::Agreed>,
    /// Calls of a job of one rank.
    laneless: Mutex<(Calls<RealMemory>, RealMemory)>,
    /// Slices that completed without a lane.
    own_slices: AtomicU64,
    /// Until `connect`.
    listeners: Mutex<Option<Listeners>>,
    /// What connections use, if not the system's; see [`crate::congestion`].
    congestion_control: Option<String>,
    /// Who takes part at present.
    members: RwLock<Arc<Members>>,
    /// Held while something is submitted; nothing is while an epoch ends.
    gate: RwLock<()>,
    epochs: Mutex<Epochs>,
    /// In a replay: rounds that this rank is not in any more.
    withheld: OnceLock<Withheld>,
    /// Where there are lanes: what is kept, or was until it was taken.
    rings: Mutex<Option<Arc<Rings>>>,
    /// Whether anything is kept.
    observed: AtomicBool,
    threads: Mutex<Threads>,
    /// Held while the engine ends: whoever ends it, too, returns once it has.
    closing: Mutex<()>,
    /// One all-gather, leave or shutdown at a time.
    joint: Mutex<()>,
}

#[derive(Default)]
struct Threads {
    lanes: Vec<JoinHandle<()>>,
    admission: Option<Arc<OnceLock<Admission>>>,
    /// The engine has ended: it touches no memory of the program any more.
    shut_down: bool,
    /// No epoch begins any more.
    closed: bool,
}

impl Engine {
    /// Binds the listener. Nothing runs yet.
    ///
    /// # Errors
    /// `Config` if an option is out of bounds or the address cannot be bound.
    pub fn bind(mut config: EngineConfig) -> Result<Self, Failure> {
        if config.rank >= config.ranks_most() {
            return Err(Failure::config(format!(
                "rank {} of {} ranks: ranks count from 0",
                config.rank, config.size
            )));
        }
        if config.servers >= config.size {
            let (servers, size) = (config.servers, config.size);
            return Err(Failure::config(format!(
                "{servers} servers of {size} ranks: one at least is a worker"
            )));
        }
        // Checks the bounds of slices, lanes and ranks once, for every book to come.
        let slicing = chosen_slicing(&config, &Rates::default());
        Book::cut("options", Vec::new(), Vec::new(), &Members::all(config.size), slicing)?;
        if config.window_bytes == 0 {
            config.window_bytes = window_bytes(&config);
        }
        let (host, port) = (config.bind_host.as_str(), config.port);
        let unusable = |why: String| Failure::config(format!("cannot listen on {host}, port {port}: {why}"));
        let addresses = (host, port).to_socket_addrs().map_err(|error| unusable(error.to_string()))?;
        let addresses: Vec<_> = addresses.collect();
        let listener = TcpListener::bind(&addresses[..]).map_err(|error| unusable(error.to_string()))?;
        let port = listener.local_addr().map_err(|error| unusable(error.to_string()))?.port();
        let congestion_control = congestion::choose(&config.congestion_control)?;
        let listeners = Listeners::new(listener, congestion_control.as_deref());
        let mut listeners = listeners.map_err(|error| unusable(error.to_string()))?;
        if config.shared_memory && config.size > 1 {
            listeners = listeners.and_on_host(&config.secret, &config.job_id, Rank(config.rank));
        }
        let members = Members::all(config.size);
        let epochs = Epochs::bind(&config, congestion_control.as_deref());
        let epochs = epochs.map_err(|error| unusable(error.to_string()))?;
        let pool = Pool::new(POOL_KEEP_BYTES);
        let laneless = Mutex::new((call::laneless(), RealMemory::new(Arc::clone(&pool))));
        let (me, workers) = (Rank(config.rank), config.workers());
        let mut shared = Shared::new(me, config.size, workers, config.lanes, pool);
        if config.elastic {
            shared.workers = RANKS_MAX; // whoever may come is none of a server
        }
        let rings = new_rings(&config, config.observations);
        Ok(Self {
            inner: Arc::new(Inner {
                port,
                process_id: std::process::id(),
                forked: AtomicBool::new(false),
                outlives_handles: AtomicBool::new(false),
                shared: Arc::new(shared),
                config,
                books: RwLock::default(),
                next_token: AtomicU64::new(1),
                agreed: Mutex::default(),
                laneless,
                own_slices: AtomicU64::new(0),
                listeners: Mutex::new(Some(listeners)),
                congestion_control,
                members: RwLock::new(Arc::new(members)),
                gate: RwLock::default(),
                epochs: Mutex::new(epochs),
                withheld: OnceLock::new(),
                observed: AtomicBool::new(rings.is_some()),
                rings: Mutex::new(rings),
                threads: Mutex::default(),
                closing: Mutex::default(),
                joint: Mutex::default(),
            }),
        })
    }

    /// The port that is listened on.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.inner.port
    }

    /// Opens a book, numbered in the order of calls. Every rank must open the same; without `roles` it is for all
    /// workers alike. A rank that is none of its members opens it for its number.
    ///
    /// # Errors
    /// `Config` if a bound is exceeded, or roles are not what the job, or the tensors, can have; the job's failure.
    pub fn open_book(
        &self,
        name: &str,
        layers: Vec<String>,
        tensors: Vec<Tensor>,
        roles: Option<Roles>,
    ) -> Result<BookId, Failure> {
        self.alive("open_book")?;
        self.inner.shared.check()?;
        let _no_epoch_ends = self.enter_epoch()?;
        let EngineConfig { size, elastic, .. } = self.inner.config;
        // Where members change, tensors are cut as for those who began, whoever opens the book when.
        let alike = || Roles::alike(if elastic { Members::all(size) } else { self.inner.workers() });
        let mut roles = roles.unwrap_or_else(alike);
        if elastic {
            check_elastic(name, &tensors)?;
            roles.rules.recoverable = true;
            if roles.rules.must_be_in == MustBeIn::These(roles.members.clone()) {
                roles.rules.must_be_in = MustBeIn::Everybody; // whoever that is in later epochs
            }
        }
        let size = size.max(self.inner.members().end() as u32);
        if let Some(rank) = roles.members.iter().find(|rank| rank.0 >= size) {
            return Err(Failure::config(format!(
                "{name}: rank {rank} is a member, but there are {size} ranks"
            )));
        }
        let mut book = Book::deal(name, layers, tensors, &roles, self.slicing())?;
        if elastic {
            book = book.among(&self.inner.workers());
        }
        let mut books = self.inner.books.write();
        let id = BookId::try_from(books.len())
            .ok()
            .filter(|id| usize::from(*id) < penstock_core::limits::BOOKS_MAX);
        let id = id.ok_or_else(|| Failure::config(format!("{name}: no more than {} books (a distribute takes two); start the job anew with shutdown() and init()", books.len())))?;
        let open = Arc::new(OpenBook::new(id, book, Arc::clone(&self.inner.shared)));
        self.inner.go_on_from_others(&open)?;
        for mailbox in self.inner.shared.mailboxes().iter() {
            mailbox.send(Command::Open(Arc::clone(&open)));
        }
        books.push(open);
        Ok(id)
    }

    /// How many books are open: the number of the next one.
    #[must_use]
    pub fn books(&self) -> usize {
        self.inner.books.read().len()
    }

    /// How tensors of the next book are cut: as configured, and where that leaves it open as the rates suggest.
    #[must_use]
    pub fn slicing(&self) -> Slicing {
        let agreed = self.inner.agreed.lock();
        agreed.slicing.unwrap_or_else(|| chosen_slicing(&self.inner.config, &agreed.rates))
    }

    /// How the tensors of an open book are cut, and who owns which slice: what all rounds of that book follow.
    ///
    /// # Errors
    /// `Config` if there is no such book.
    pub fn layout(&self, book: BookId) -> Result<Arc<Book>, Failure> {
        self.alive("layout")?;
        Ok(Arc::clone(&self.book(book)?.book))
    }

    /// Sets each layer's place in the forward pass, from 0. What is queued already keeps its place.
    ///
    /// # Errors
    /// `Config` if there is not one place per layer.
    pub fn set_priorities(&self, book: BookId, places: &[u32]) -> Result<(), Failure> {
        self.alive("set_priorities")?;
        let open = self.book(book)?;
        let layers = open.book.layers.len();
        if places.len() != layers {
            return Err(Failure::config(format!(
                "{}: {} places for {layers} layers",
                open.book.name,
                places.len()
            )));
        }
        let places: Arc<[u32]> = places.into();
        *open.places.lock() = Some(Arc::clone(&places));
        for mailbox in self.inner.shared.mailboxes().iter() {
            mailbox.send(Command::Places { book, places: Arc::clone(&places) });
        }
        Ok(())
    }

    /// Takes part in the next round of a tensor. Returns a token: once [`Engine::landed`] gives it back, the
    /// memory is not touched any more. Of a gather what came of the last one is dropped.
    ///
    /// * `more`: others follow at once, or a call that waits, or [`Engine::phase`]: a small submission may be held back until
    ///   then and travel with its neighbours.
    ///
    /// # Errors
    /// `Config` if it does not fit the book or the tensor's last round is not complete; the job's failure.
    ///
    /// # Safety
    /// The memory must stay allocated until the token is released. Until the round is complete nobody else may read
    /// or write it, and from then until the token is released nobody may write it. What is gathered may be read all the time.
    pub unsafe fn submit(&self, submission: Submission<Lent>, more: bool) -> Result<u64, Failure> {
        self.alive("submit")?;
        let _no_epoch_ends = self.enter_epoch()?;
        let open = self.book(submission.book)?;
        self.may_submit(&open, &submission)?;
        // SAFETY: as the caller vouches.
        let (token, handed) = unsafe { self.hand(&open, submission) }?;
        if let Some(handed) = handed {
            self.note_submitted(1);
            let at_ns = self.observed_ns();
            for (lane, mailbox) in self.inner.shared.mailboxes().iter().enumerate() {
                if open.lanes[handed.tensor as usize] & (1 << lane) != 0 {
                    let command = self.inner.submit_to(lane as u32, &open, &handed, at_ns);
                    if more {
                        mailbox.send_held(command, submission.memory.len_bytes);
                    } else {
                        mailbox.send(command);
                    }
                }
            }
        }
        Ok(token)
    }

    /// As [`Engine::submit`] for several tensors of one book, of which more may follow, at the cost of little more than one. The
    /// tokens, in their order.
    ///
    /// # Errors
    /// As there. If one of them is wrong none is submitted.
    ///
    /// # Safety
    /// As there, of all of them.
    pub unsafe fn submit_together(&self, submissions: &[Submission<Lent>]) -> Result<Vec<u64>, Failure> {
        self.alive("submit")?;
        let Some(first) = submissions.first() else { return Ok(Vec::new()) };
        let _no_epoch_ends = self.enter_epoch()?;
        let open = self.book(first.book)?;
        let mut ids = Vec::with_capacity(submissions.len());
        for submission in submissions {
            self.may_submit(&open, submission)?;
            ids.push(submission.tensor);
        }
        ids.sort_unstable();
        if let Some(twice) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(submitted_again(&open, twice[0]));
        }
        let lanes = self.inner.shared.mailboxes();
        let at_ns = self.observed_ns();
        let mut commands: Vec<Vec<Command>> = lanes.iter().map(|_| Vec::new()).collect();
        let mut held_bytes = vec![0; lanes.len()];
        let mut tokens = Vec::with_capacity(submissions.len());
        let mut in_flight = 0;
        for submission in submissions {
            // SAFETY: as the caller vouches.
            let (token, handed) = unsafe { self.hand(&open, *submission) }?;
            tokens.push(token);
            let Some(handed) = handed else { continue };
            in_flight += 1;
            for lane in 0..lanes.len() {
                if open.lanes[handed.tensor as usize] & (1 << lane) != 0 {
                    commands[lane].push(self.inner.submit_to(lane as u32, &open, &handed, at_ns));
                    held_bytes[lane] += submission.memory.len_bytes;
                }
            }
        }
        if in_flight > 0 {
            self.note_submitted(in_flight);
        }
        for (mailbox, (commands, bytes)) in lanes.iter().zip(commands.into_iter().zip(held_bytes)) {
            mailbox.send_all_held(commands, bytes);
        }
        Ok(tokens)
    }

    /// Whether this may be submitted now.
    fn may_submit(&self, open: &OpenBook, submission: &Submission<Lent>) -> Result<(), Failure> {
        let tensor = self.check_submission(open, submission)?;
        let Submission { tensor: id, step, .. } = *submission;
        self.inner.shared.check().map_err(|failure| wait::blame(failure, "submitting", open, id, step))?;
        if !self.is_alone(open, tensor) && self.inner.shared.mailboxes().is_empty() {
            return Err(Failure::config("submit() was called before connect()"));
        }
        let under_way = open.tensors[id as usize].remaining.load(Ordering::Acquire) > 0;
        if under_way { Err(submitted_again(open, id)) } else { Ok(()) }
    }

    /// Whether a tensor is exchanged with nobody.
    fn is_alone(&self, open: &OpenBook, tensor: &Tensor) -> bool {
        let Roles { members, rules, .. } = &open.book.roles;
        // Where members may be lost the last one goes on as the others did: its rounds may have begun with them.
        let alone = members.count() == 1 && !rules.keep_results() && !rules.recoverable;
        self.inner.config.size == 1 || alone || tensor.slice_count == 0
    }

    /// Takes a submission that was checked over from the program: its token, and what its lanes are to be told.
    ///
    /// # Safety
    /// As of [`Engine::submit`].
    unsafe fn hand(
        &self,
        open: &Arc<OpenBook>,
        submission: Submission<Lent>,
    ) -> Result<(u64, Option<Submission<Chunk>>), Failure> {
        let Submission { tensor: id, step, memory: Lent { address, len_bytes }, gives, .. } = submission;
        let (tensor, state) = (&open.book.tensors[id as usize], &open.tensors[id as usize]);
        let alone = self.is_alone(open, tensor);
        let slices = if alone { 0 } else { tensor.slice_count };
        if state.remaining.compare_exchange(0, slices, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return Err(submitted_again(open, id));
        }
        open.submitted(id);
        let present = match gives {
            Gives::Whole(_) => alone,
            Gives::Nothing(_) => false,
            Gives::Gathered(_) => {
                gather::begin(open, id, len_bytes);
                true
            }
        };
        let seq = state.seq.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        state.step.store(step, Ordering::Relaxed);
        state.present.store(present, Ordering::Relaxed);
        let token = self.inner.next_token.fetch_add(1, Ordering::Relaxed);
        state.unreleased.fetch_add(1, Ordering::AcqRel);
        if alone {
            let summed = if gives.op().is_some() { tensor.slice_count } else { 0 };
            self.inner.own_slices.fetch_add(u64::from(summed), Ordering::Relaxed);
            open.released(id, token);
            return Ok((token, None));
        }
        let start = NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: the caller vouches for the memory; its length was checked against the book.
        let memory = unsafe { Chunk::handed(start, len_bytes, Arc::clone(&open.state) as _, id, token) };
        let handed = submission.with(seq, memory);
        open.handed(&handed);
        Ok((token, Some(handed)))
    }

    fn note_submitted(&self, count: u64) {
        self.inner.shared.progressed();
        self.inner.shared.lock().accounting.submitted(count, Instant::now());
    }

    /// When it is, if the records are to tell.
    fn observed_ns(&self) -> u64 {
        if self.is_observed() { now_ns() } else { 0 }
    }

    fn check_submission<'a>(
        &self,
        open: &'a OpenBook,
        submission: &Submission<Lent>,
    ) -> Result<&'a Tensor, Failure> {
        let tensor = self.tensor(open, submission.tensor)?;
        let roles = &open.book.roles;
        let fits =
            self.check_role(roles, tensor, submission.gives).and_then(|()| match submission.gives.op() {
                Some(op) => check_whole(tensor, submission.memory, op),
                None => check_bytes(tensor, submission),
            });
        fits.map_err(|why| Failure::config(format!("{}: {why}", open.book.name))).map(|()| tensor)
    }

    /// Whether this rank may give that to a tensor, as the book's roles say.
    fn check_role(&self, roles: &Roles, tensor: &Tensor, gives: Gives) -> Result<(), String> {
        let (me, name) = (Rank(self.inner.config.rank), &tensor.name);
        let members = if tensor.route == Route::STORE { &roles.members } else { roles.contributors() };
        if !members.contains(me) {
            return Err(format!("{name}: rank {me} is none of those that the book is for"));
        }
        if matches!(gives, Gives::Nothing(_)) || roles.rules.takes_from(me) {
            return Ok(());
        }
        Err(format!("rank {me} contributes to {name}, in whose rounds it need not be: it can only ask"))
    }

    /// How often each tensor was submitted.
    ///
    /// # Errors
    /// `Config` if there is no such book.
    pub fn sequence(&self, book: BookId) -> Result<Vec<Seq>, Failure> {
        self.alive("sequence")?;
        Ok(self.book(book)?.tensors.iter().map(|tensor| tensor.seq.load(Ordering::Acquire)).collect())
    }

    /// Sets how often each tensor was submitted. All ranks must agree before they go on.
    ///
    /// # Errors
    /// `Config` if there is not one number per tensor, or one would go back.
    pub fn set_sequence(&self, book: BookId, seqs: &[Seq]) -> Result<(), Failure> {
        self.alive("set_sequence")?;
        let open = self.book(book)?;
        let back =
            open.tensors.iter().zip(seqs).any(|(tensor, seq)| *seq < tensor.seq.load(Ordering::Acquire));
        if seqs.len() != open.tensors.len() || back {
            return Err(Failure::config(format!(
                "{}: sequence numbers are per tensor and only grow",
                open.book.name
            )));
        }
        open.tensors.iter().zip(seqs).for_each(|(tensor, seq)| tensor.seq.store(*seq, Ordering::Release));
        Ok(())
    }

    /// Says what the program does now, for the accounts.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn phase(&self, phase: Phase) -> Result<(), Failure> {
        self.alive("phase")?;
        self.flush();
        self.inner.shared.lock().accounting.set_phase(phase, Instant::now());
        Ok(())
    }

    /// The program has made use of the last results of these tensors. Unless that is observed, nothing happens.
    ///
    /// # Errors
    /// `Config` if there is no such tensor.
    pub fn applied(&self, book: BookId, tensors: &[TensorId]) -> Result<(), Failure> {
        self.alive("applied")?;
        let Some(rings) = self.is_observed().then(|| self.inner.rings()).flatten() else { return Ok(()) };
        let open = self.book(book)?;
        for tensor in tensors {
            self.tensor(&open, *tensor)?;
        }
        let time_ns = now_ns();
        let of_tensor = |id: &TensorId| {
            let (seq, layer) = (
                open.tensors[*id as usize].seq.load(Ordering::Acquire),
                open.book.tensors[*id as usize].layer,
            );
            let (payload_bytes, peer, point, kind) = (0, None, Point::Applied, 0);
            let slices = open.book.slices_of(*id);
            slices.map(move |slice| Record {
                time_ns,
                seq,
                layer,
                slice,
                payload_bytes,
                peer,
                book,
                point,
                kind,
            })
        };
        rings.of_program(tensors.iter().flat_map(of_tensor));
        Ok(())
    }

    /// Whether what happens to slices is kept for [`Engine::observations`].
    #[must_use]
    pub fn is_observed(&self) -> bool {
        self.inner.observed.load(Ordering::Relaxed)
    }

    /// What was observed since the last call, as far as it was kept. Also after the end of the job.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn observations(&self) -> Result<Observations, Failure> {
        self.alive("observations")?;
        let found = self.inner.rings().map(|rings| rings.take()).unwrap_or_default();
        if !self.is_observed() {
            *self.inner.rings.lock() = None;
        }
        Ok(found)
    }

    /// From now on keeps so many records per lane, and as many of the program, or none: then what was kept until now can be taken once
    /// more. Otherwise it is gone. Nothing is kept in a job of one rank.
    ///
    /// Returns how many slices of this rank's submissions had landed when the lanes began, or ended: as many records of landing lie
    /// between two calls as their results differ by.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn observe(&self, records: usize) -> Result<u64, Failure> {
        self.alive("observe")?;
        let rings = new_rings(&self.inner.config, records);
        self.inner.observed.store(rings.is_some(), Ordering::Relaxed);
        if let Some(rings) = &rings {
            *self.inner.rings.lock() = Some(Arc::clone(rings));
        }
        let counts = self.ask(|reply| Command::Observe { rings: rings.clone(), reply });
        let shared = &self.inner.shared;
        let sum = |lanes: &[LaneCounts]| lanes.iter().map(|lane| lane.seen.slices).sum::<u64>();
        let state = shared.lock();
        let have_ended = state.final_counters.len() == shared.mailboxes().len();
        let of_lanes = if have_ended { sum(&state.final_counters) } else { counts.iter().sum() };
        Ok(sum(&state.past_counters) + of_lanes + self.inner.own_slices.load(Ordering::Relaxed))
    }

    /// What was counted so far.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn report(&self) -> Result<Report, Failure> {
        self.alive("report")?;
        let shared = &self.inner.shared;
        let mut running = self.ask(|reply| Command::Count { reply });
        let (busy, tensors_in_flight, mut ended, past, through_memory) = {
            let mut state = shared.lock();
            let through_memory = state.through_memory.iter().map(|rank| rank.0).collect();
            let (finals, past) = (state.final_counters.clone(), state.past_counters.clone());
            let in_flight = state.accounting.in_flight();
            (state.accounting.busy(Instant::now()), in_flight, finals, past, through_memory)
        };
        if ended.len() == shared.mailboxes().len() {
            running.clear();
        } else {
            ended.clear();
        }
        ended.extend(past);
        let books = self.inner.books.read();
        let EngineConfig { size, lanes, .. } = self.inner.config;
        let size = size.max(self.inner.members().end() as u32);
        let counted = report::count(shared.me, size, lanes, (&running[..], &ended[..]), &books);
        let slices = counted.slices + self.inner.own_slices.load(Ordering::Relaxed);
        let (pool_bytes, line_bytes_per_s) = (shared.pool.bytes() as u64, shared.highest_bytes_per_s());
        Ok(Report {
            slices,
            busy,
            tensors_in_flight,
            pool_bytes,
            line_bytes_per_s,
            through_memory,
            ..counted
        })
    }

    /// Asks every lane; those that do not answer in time are left out.
    fn ask<T>(&self, question: impl Fn(mpsc::Sender<T>) -> Command) -> Vec<T> {
        let (reply, answers) = mpsc::channel();
        let mailboxes = self.inner.shared.mailboxes();
        for mailbox in mailboxes.iter() {
            mailbox.send(question(reply.clone()));
        }
        drop(reply);
        let deadline = Instant::now() + ANSWER;
        let next = || answers.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
        std::iter::from_fn(next).take(mailboxes.len()).collect()
    }

    /// Wakes the lanes for submissions that were held back.
    fn flush(&self) {
        self.inner.shared.mailboxes().iter().for_each(|mailbox| mailbox.flush());
    }

    fn book(&self, id: BookId) -> Result<Arc<OpenBook>, Failure> {
        let books = self.inner.books.read();
        books.get(usize::from(id)).cloned().ok_or_else(|| Failure::config(format!("book {id} is not open")))
    }

    fn tensor<'a>(&self, open: &'a OpenBook, id: TensorId) -> Result<&'a Tensor, Failure> {
        let tensor = open.book.tensors.get(id as usize);
        tensor.ok_or_else(|| Failure::config(format!("{}: there is no tensor {id}", open.book.name)))
    }

    /// Every call begins with this: in a forked child there are no lanes, and locks may be held by nobody.
    fn alive(&self, call: &str) -> Result<(), Failure> {
        if self.is_forked() {
            let rank = self.inner.config.rank;
            return Err(Failure::config(format!(
                "{call}() was called in a process forked from rank {rank} (a DataLoader worker?), which is no rank itself"
            )));
        }
        Ok(())
    }

    fn is_forked(&self) -> bool {
        self.inner.forked.load(Ordering::Relaxed) || self.inner.process_id != std::process::id()
    }
}

/// Whether all of a book travels as it must where members may be lost.
fn check_elastic(book: &str, tensors: &[Tensor]) -> Result<(), Failure> {
    let other = tensors.iter().find(|tensor| tensor.route != Route::STORE);
    other.map_or(Ok(()), |Tensor { name, route, .. }| {
        Err(Failure::config(format!(
            "{book}: {name} travels by {}; where members may be lost (elastic) all tensors travel by the store",
            route.name()
        )))
    })
}

/// For so many records, where there are lanes.
fn new_rings(config: &EngineConfig, records: usize) -> Option<Arc<Rings>> {
    if config.size > 1 { Rings::new(config.lanes, records).map(Arc::new) } else { None }
}

fn submitted_again(open: &OpenBook, id: TensorId) -> Failure {
    let (book, name) = (&open.book.name, &open.book.tensors[id as usize].name);
    Failure::config(format!("{book}: {name} was submitted again before its result was in"))
}

fn window_bytes(config: &EngineConfig) -> u64 {
    let slice_bytes = if config.slice_bytes == 0 { slicing::SLICE_BYTES } else { config.slice_bytes };
    window_share(config.workers(), config.servers, config.lanes).max(2 * slice_bytes as u64)
}

/// A window's part of what all of a worker's may hold, and, if servers own, of what a server may hold.
fn window_share(workers: u32, servers: u32, lanes: u32) -> u64 {
    let (least, most) = WINDOW_BYTES.into_inner();
    let (owners, most) = match servers {
        0 => (workers.saturating_sub(1).max(1), most),
        _ => (servers, (SERVER_BYTES / (u64::from(workers) * u64::from(lanes))).max(least)),
    };
    (WINDOWS_BYTES / (u64::from(owners) * u64::from(lanes))).clamp(least, most)
}

/// Whether this memory may be a tensor to be combined; if not, why.
fn check_whole(tensor: &Tensor, Lent { address, len_bytes }: Lent, op: Op) -> Result<(), String> {
    let (name, dtype) = (&tensor.name, tensor.dtype);
    if tensor.route == Route::Gather {
        return Err(format!("{name} is gathered, not summed; use submit_gather()"));
    }
    if len_bytes as u64 != tensor.len_bytes() {
        let expected = tensor.len_bytes();
        return Err(format!("{name} has {expected} bytes, but {len_bytes} were submitted"));
    }
    if len_bytes > 0 && (address == 0 || !address.is_multiple_of(dtype.size_bytes())) {
        return Err(format!("the memory of {name} is not aligned to its elements"));
    }
    let refused = op.refused_on_wire(dtype, tensor.wire);
    refused.map_or(Ok(()), |why| Err(format!("{op:?} of {name} ({dtype:?}): {why}")))
}

fn chosen_slicing(config: &EngineConfig, rates: &Rates) -> Slicing {
    // Workers own about as much each, so that what they send to each other is spread over all links.
    let sharers = if config.servers == 0 { 1 } else { config.workers() };
    let chosen = Slicing::for_link(rates.bytes_per_s, config.window_bytes, sharers);
    let lanes = if config.all_lanes { config.lanes } else { chosen.lanes.min(config.lanes) };
    if config.slice_bytes == 0 {
        Slicing { lanes, ..chosen }
    } else {
        Slicing::fixed(config.slice_bytes, lanes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_share_what_workers_may_hold_and_what_servers_may() {
        const MIB: u64 = 1 << 20;
        let share = |workers, servers, lanes| window_share(workers, servers, lanes) / MIB;
        assert_eq!([share(2, 0, 1), share(4, 0, 1), share(4, 0, 2), share(100, 0, 1)], [8, 6, 3, 1]);
        assert_eq!([share(4, 1, 1), share(4, 2, 1), share(4, 4, 1)], [20, 10, 5], "among servers");
        assert_eq!([share(64, 1, 1), share(64, 2, 2), share(500, 1, 1)], [4, 2, 1], "a server holds 256 MiB");
    }
}

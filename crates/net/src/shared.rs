//! What the engine and its lanes share: the state of tensors, and everything that somebody may wait for.
//!
//! Completion is counted per tensor with one atomic decrement per slice; the lock is taken per tensor.

mod life;

use crate::accounting::Accounting;
use crate::failure::{Failure, Stop};
use crate::mailbox::{Command, Mailbox};
use crate::memory::{Chunk, Lender, Pool};
use life::Fate;
pub(crate) use life::ns;
use parking_lot::{Condvar, Mutex, MutexGuard};
use penstock_core::Members;
use penstock_core::all_gather::AllGather;
use penstock_core::life::{Life, Over, Wait};
use penstock_core::observe::Counters;
use penstock_core::roles::{Fold, MustBeIn};
use penstock_core::{Book, BookId, Error, Rank, Seq, SliceId, Step, TensorId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often a call that waits asks whether the program was interrupted.
const INTERRUPT_CHECK: Duration = Duration::from_millis(100);

/// How a wait has ended.
pub(crate) enum Waited<T> {
    /// With what it was for.
    Came(T),
    /// It has lasted too long, and this is what follows.
    Over(Over),
}

impl<T> Waited<T> {
    /// What it was for, if it has come.
    pub(crate) fn came(self) -> Option<T> {
        if let Self::Came(result) = self { Some(result) } else { None }
    }
}

/// Bytes per second.
#[derive(Default)]
struct LineRate {
    /// As measured at the start, or given.
    known: Option<f64>,
    /// Of all connections.
    highest: Option<f64>,
}

/// One tensor of an open book.
#[derive(Default)]
pub(crate) struct TensorState {
    /// Slices of the last submission that are not complete.
    pub(crate) remaining: AtomicU32,
    /// Whether anybody contributed to the last submission that completed.
    pub(crate) present: AtomicBool,
    /// Submissions so far.
    pub(crate) seq: AtomicU32,
    /// The user's iteration of the last one.
    pub(crate) step: AtomicU32,
    /// Submissions whose memory may still be touched.
    pub(crate) unreleased: AtomicU32,
    /// Threads that wait for this tensor now. Changed before they look under the lock, read under it: nobody is missed.
    pub(crate) awaited: AtomicU32,
    /// Threads that wait for a leading part of it. This and `part_bytes` are changed under the lock.
    parts_awaited: AtomicU32,
    /// Of these parts the shortest, or one that was shorter.
    part_bytes: AtomicU64,
    /// Of a tensor that is gathered: what has come of the last submission. Held by one thread at a time: the lane before it
    /// is complete, after that the program's, or one that works beside it.
    pub(crate) gathered: Mutex<Gathered>,
}

/// What a gather has brought.
#[derive(Default)]
pub(crate) struct Gathered {
    /// Length of this rank's own contribution.
    pub(crate) own_bytes: u64,
    /// By rank; `None` for this one and those that took no part.
    pub(crate) parts: Vec<Option<Vec<Chunk>>>,
}

/// A book and the state of its tensors.
pub(crate) struct OpenBook {
    pub(crate) id: BookId,
    pub(crate) book: Arc<Book>,
    pub(crate) tensors: Vec<TensorState>,
    /// By slice: whether its result of the last submission is in memory.
    in_memory: Vec<AtomicBool>,
    /// By slice, where each contribution is a round of its own: how often the value that came last was changed.
    versions: Vec<AtomicU32>,
    /// Of contributions to slices that are owned here: by rank how many came too late for their round.
    pub(crate) late: Mutex<BTreeMap<Rank, u64>>,
    /// By slice that is owned here and updated: whether the sum waits for the program's word.
    sum_waits: Vec<AtomicBool>,
    /// Threads that wait for all of these.
    pub(crate) sums_awaited: AtomicU32,
    /// One more than the step that was told to go on last; 0 before.
    pub(crate) said: AtomicU64,
    /// By tensor: the lanes that carry its slices, as bits.
    pub(crate) lanes: Vec<u64>,
    /// By layer: time that the program spent waiting for it.
    pub(crate) stall_ns: Vec<AtomicU64>,
    shared: Arc<Shared>,
}

impl OpenBook {
    pub(crate) fn new(id: BookId, book: Book, shared: Arc<Shared>) -> Self {
        let tensors = book.tensors.iter().map(|_| TensorState::default()).collect();
        let stall_ns = book.layers.iter().map(|_| AtomicU64::new(0)).collect();
        let mut lanes = vec![0; book.tensors.len()];
        book.slices.iter().for_each(|slice| lanes[slice.tensor as usize] |= 1 << slice.lane);
        let in_memory = book.slices.iter().map(|_| AtomicBool::new(false)).collect();
        let updated = if book.roles.rules.fold == Fold::Updated { book.slices.len() } else { 0 };
        let versioned = if book.roles.rules.must_be_in == MustBeIn::Nobody { book.slices.len() } else { 0 };
        Self {
            id,
            tensors,
            in_memory,
            versions: (0..versioned).map(|_| AtomicU32::new(0)).collect(),
            late: Mutex::default(),
            sum_waits: (0..updated).map(|_| AtomicBool::new(false)).collect(),
            sums_awaited: AtomicU32::new(0),
            said: AtomicU64::new(0),
            lanes,
            stall_ns,
            shared,
            book: Arc::new(book),
        }
    }

    /// A lane has a version of a slice, whose completion follows.
    pub(crate) fn got_version(&self, slice: u32, version: Step) {
        if let Some(last) = self.versions.get(slice as usize) {
            last.store(version, Ordering::Release);
        }
    }

    /// The versions of a tensor's slices that came last; none where rounds are counted.
    pub(crate) fn versions(&self, tensor: TensorId) -> Vec<u32> {
        let versions = self.book.slices_of(tensor).filter_map(|slice| self.versions.get(slice as usize));
        versions.map(|version| version.load(Ordering::Acquire)).collect()
    }

    /// The sum of a slice that is owned here waits for the program's word.
    pub(crate) fn sum_waits(&self, slice: u32) {
        self.sum_waits[slice as usize].store(true, Ordering::Release);
        // With that of who waits: this lane sees him, or he sees the sum.
        fence(Ordering::SeqCst);
        if self.sums_awaited.load(Ordering::Acquire) > 0 {
            self.shared.notify(&self.shared.lock());
        }
    }

    /// And now it does not any more.
    pub(crate) fn sum_goes_on(&self, slice: u32) {
        self.sum_waits[slice as usize].store(false, Ordering::Release);
    }

    /// The tensor of the first slice owned by this rank whose sum is not complete.
    pub(crate) fn late_sum(&self, owner: Rank) -> Option<TensorId> {
        let mut owned =
            self.book.slices.iter().zip(&self.sum_waits).filter(|(slice, _)| slice.owner == owner);
        owned.find(|(_, waits)| !waits.load(Ordering::Acquire)).map(|(slice, _)| slice.tensor)
    }

    /// A tensor is about to be handed to the lanes: nothing of its result is in memory.
    pub(crate) fn submitted(&self, tensor: TensorId) {
        for slice in self.book.slices_of(tensor) {
            self.in_memory[slice as usize].store(false, Ordering::Relaxed);
        }
    }

    /// The length in bytes of the leading part of a tensor whose result is in memory.
    pub(crate) fn arrived_bytes(&self, tensor: TensorId) -> u64 {
        if self.tensors[tensor as usize].remaining.load(Ordering::Acquire) == 0 {
            return self.book.tensors[tensor as usize].len_bytes();
        }
        let late = self
            .book
            .slices_of(tensor)
            .find(|&slice| !self.in_memory[slice as usize].load(Ordering::Acquire));
        late.map_or_else(
            || self.book.tensors[tensor as usize].len_bytes(),
            |slice| self.book.slices[slice as usize].offset_bytes,
        )
    }

    /// As `arrived_bytes`; 0 of what is complete if nobody contributed.
    pub(crate) fn landed_bytes(&self, tensor: TensorId) -> u64 {
        let state = &self.tensors[tensor as usize];
        let is_complete = state.remaining.load(Ordering::Acquire) == 0;
        if is_complete && !state.present.load(Ordering::Acquire) { 0 } else { self.arrived_bytes(tensor) }
    }

    /// A lane's slices of a tensor whose results are not in memory.
    pub(crate) fn open_slices(&self, tensor: TensorId, lane: u32) -> impl Iterator<Item = SliceId> {
        let in_lane = move |slice: &SliceId| self.book.slices[*slice as usize].lane == lane;
        let is_open = |slice: &SliceId| !self.in_memory[*slice as usize].load(Ordering::Acquire);
        self.book.slices_of(tensor).filter(in_lane).filter(is_open)
    }

    /// A lane has all contributions to a gather.
    pub(crate) fn gathered(&self, slice: u32, parts: Vec<Option<Vec<Chunk>>>) {
        let tensor = &self.tensors[self.book.slices[slice as usize].tensor as usize];
        tensor.gathered.lock().parts = parts;
    }

    /// A lane has brought a slice into memory.
    pub(crate) fn slice_complete(&self, slice: u32, present: bool) {
        let id = self.book.slices[slice as usize].tensor;
        let tensor = &self.tensors[id as usize];
        if present {
            tensor.present.store(true, Ordering::Relaxed);
        }
        // Release: who sees it sees the slice's result.
        self.in_memory[slice as usize].store(true, Ordering::Release);
        // Release: who sees 0 sees the result. The decrements of other lanes are in the same release sequence.
        if tensor.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.tensor_complete(tensor);
            return;
        }
        // With the fence of `await_parts`: this lane sees who waits, or he sees the slice. And of two lanes that bring the
        // last slices of a part, one sees both.
        fence(Ordering::SeqCst);
        if self.part_has_come(id) {
            self.shared.notify(&self.shared.lock());
        }
    }

    /// Whether a thread may have what it waits for, as far as it waits for a part of this tensor.
    fn part_has_come(&self, id: TensorId) -> bool {
        let tensor = &self.tensors[id as usize];
        tensor.parts_awaited.load(Ordering::Acquire) > 0
            && self.arrived_bytes(id) >= tensor.part_bytes.load(Ordering::Acquire)
    }

    /// This thread is about to look whether so many leading bytes of any of these tensors are in memory, and to wait if not:
    /// slices that bring none so far shall not wake it. Undone by `no_longer_await_parts`.
    pub(crate) fn await_parts(&self, parts: &[(TensorId, u64)]) {
        let _guard = self.shared.lock();
        for &(tensor, bytes) in parts {
            let tensor = &self.tensors[tensor as usize];
            let others = tensor.parts_awaited.load(Ordering::Relaxed) > 0;
            let shortest = if others { tensor.part_bytes.load(Ordering::Relaxed).min(bytes) } else { bytes };
            tensor.part_bytes.store(shortest, Ordering::Relaxed);
            tensor.parts_awaited.fetch_add(1, Ordering::Release);
        }
        fence(Ordering::SeqCst);
    }

    /// See `await_parts`.
    pub(crate) fn no_longer_await_parts(&self, parts: &[(TensorId, u64)]) {
        let _guard = self.shared.lock();
        for (tensor, _) in parts {
            self.tensors[*tensor as usize].parts_awaited.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Lender for OpenBook {
    fn released(&self, tensor: u32, token: u64) {
        let tensor = &self.tensors[tensor as usize];
        let mut state = self.shared.lock();
        // First of all: who sees that nothing is unreleased any more, without the lock, takes the tokens next.
        state.released.push(token);
        tensor.unreleased.fetch_sub(1, Ordering::AcqRel);
        if tensor.awaited.load(Ordering::Acquire) > 0 {
            self.shared.notify(&state);
        }
    }
}

/// What a rank waits for together with all others.
pub(crate) enum JointWait {
    /// An all-gather of blobs, and what for.
    AllGather(String),
    /// That all have left.
    Leave,
}

/// Everything under the one lock.
pub(crate) struct State {
    /// Once it is settled.
    pub(crate) failure: Option<Failure>,
    /// The failure has reached the program.
    pub(crate) failure_raised: bool,
    pub(crate) accounting: Accounting,
    pub(crate) released: Vec<u64>,
    /// Watched calls that are done.
    pub(crate) done_calls: Vec<u64>,
    /// The workers' all-gathers of blobs.
    pub(crate) all_gather: AllGather,
    /// What is being waited for together with all, besides tensors and calls.
    pub(crate) joint: Option<JointWait>,
    /// Lanes on which every rank has left.
    pub(crate) lanes_left: u32,
    /// Lanes on which all goodbyes are said and heard.
    pub(crate) lanes_done: u32,
    /// Lanes that have told their peers of the failure.
    pub(crate) lanes_told: u32,
    /// Lanes that know of the failure: they write no memory of the program any more.
    pub(crate) lanes_quiet: u32,
    /// Final counts of lanes that have ended.
    pub(crate) final_counters: Vec<Counters>,
    /// Peers with whom bytes are exchanged through shared memory.
    pub(crate) through_memory: BTreeSet<Rank>,
    waiters: u32,
}

impl State {
    /// There is a verdict, and it is settled: calls raise it.
    pub(crate) fn is_settled(&self) -> bool {
        self.failure.is_some()
    }
}

/// See the module's documentation.
pub(crate) struct Shared {
    pub(crate) me: Rank,
    /// How many ranks, the first ones, are workers: whom all-gathers are of.
    pub(crate) workers: u32,
    pub(crate) pool: Arc<Pool>,
    line: Mutex<LineRate>,
    /// Taken before `state`, if both are.
    fate: Mutex<Fate>,
    state: Mutex<State>,
    changed: Condvar,
    /// A verdict is held, settled or not.
    failed: AtomicBool,
    /// Calls of this rank that are not done.
    pub(crate) calls_open: AtomicU64,
    mailboxes: OnceLock<Vec<Arc<Mailbox>>>,
    /// `host:port` by rank, for messages.
    addresses: OnceLock<Vec<String>>,
    started: Instant,
    /// When data last moved, in milliseconds since `started`.
    progress_ms: AtomicU64,
}

impl Shared {
    pub(crate) fn new(me: Rank, ranks: u32, workers: u32, lanes: u32, pool: Arc<Pool>) -> Self {
        let now = Instant::now();
        let state = State {
            failure: None,
            failure_raised: false,
            accounting: Accounting::new(now),
            released: Vec::new(),
            done_calls: Vec::new(),
            all_gather: AllGather::new(me, Members::all(workers)),
            joint: None,
            lanes_left: 0,
            lanes_done: 0,
            lanes_told: 0,
            lanes_quiet: 0,
            final_counters: Vec::new(),
            through_memory: BTreeSet::new(),
            waiters: 0,
        };
        Self {
            me,
            workers,
            pool,
            line: Mutex::new(LineRate::default()),
            fate: Mutex::new(Fate::new(Life::new(me, Members::all(ranks), lanes))),
            state: Mutex::new(state),
            changed: Condvar::new(),
            failed: AtomicBool::new(false),
            calls_open: AtomicU64::new(0),
            mailboxes: OnceLock::new(),
            addresses: OnceLock::new(),
            started: now,
            progress_ms: AtomicU64::new(0),
        }
    }

    /// Called once, before any lane runs.
    pub(crate) fn start(&self, mailboxes: Vec<Arc<Mailbox>>, addresses: Vec<String>) -> Result<(), Failure> {
        let again = |_| Failure::config("connect() was called twice");
        self.mailboxes.set(mailboxes).map_err(|m| again(m.len()))?;
        self.addresses.set(addresses).map_err(|a| again(a.len()))
    }

    /// The lanes' mailboxes; none before `connect`, nor in a job of one rank.
    pub(crate) fn mailboxes(&self) -> &[Arc<Mailbox>] {
        self.mailboxes.get().map_or(&[], Vec::as_slice)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Wakes whoever waits. `_state` shows that the lock is held.
    fn notify(&self, state: &State) {
        if state.waiters > 0 {
            self.changed.notify_all();
        }
    }

    /// Changes the state and wakes whoever waits.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let result = change(&mut state);
        self.notify(&state);
        result
    }

    fn tensor_complete(&self, tensor: &TensorState) {
        self.progressed();
        let mut state = self.lock();
        state.accounting.completed(Instant::now());
        // The many others that complete meanwhile wake nobody.
        let awaited = [&tensor.awaited, &tensor.parts_awaited];
        if awaited.iter().any(|waiting| waiting.load(Ordering::Acquire) > 0) {
            self.notify(&state);
        }
    }

    fn line(&self) -> MutexGuard<'_, LineRate> {
        self.line.lock()
    }

    /// What the line does in each direction, in bytes per second, as measured or given; `None` before that.
    pub(crate) fn line_bytes_per_s(&self) -> Option<f64> {
        self.line().known
    }

    /// The highest rate for which a connection is bound.
    pub(crate) fn highest_bytes_per_s(&self) -> Option<f64> {
        self.line().highest
    }

    /// The line rate was measured or given: all lanes bind their connections to it.
    pub(crate) fn set_line(&self, bytes_per_s: f64) {
        *self.line() = LineRate { known: Some(bytes_per_s), highest: Some(bytes_per_s) };
        let mailboxes = self.mailboxes();
        for mailbox in mailboxes {
            mailbox.set_rate(bytes_per_s / mailboxes.len() as f64);
            mailbox.send(Command::LineRate);
        }
    }

    /// A connection has shown that it carries so much.
    pub(crate) fn note_rate(&self, bytes_per_s: f64) {
        let mut line = self.line();
        line.highest = Some(line.highest.map_or(bytes_per_s, |highest| highest.max(bytes_per_s)));
    }

    /// Data has moved.
    pub(crate) fn progressed(&self) {
        let ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.progress_ms.store(ms, Ordering::Relaxed);
    }

    fn address_of(&self, rank: Rank) -> Option<String> {
        self.addresses.get()?.get(rank.index()).cloned()
    }

    /// A blob of an all-gather has arrived.
    pub(crate) fn blob(&self, from: Rank, seq: Seq, blob: Vec<u8>) -> Result<(), Error> {
        self.progressed();
        self.update(|state| state.all_gather.arrived(from, seq, blob))
    }

    /// Waits until `done` gives something, the wait is over, the job fails, or `interrupted` says so.
    pub(crate) fn wait<T>(
        &self,
        wait: &mut Wait,
        interrupted: &mut dyn FnMut() -> bool,
        mut done: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Waited<T>, Stop> {
        let mut state = self.lock();
        let mut checked = Instant::now();
        loop {
            if let Some(result) = done(&mut state) {
                return Ok(Waited::Came(result));
            }
            if let Some(failure) = state.failure.clone() {
                state.failure_raised = true;
                return Err(failure.into());
            }
            let now = Instant::now();
            let left = Duration::from_nanos(wait.until_ns().saturating_sub(self.ns_of(now)));
            let check = INTERRUPT_CHECK.saturating_sub(now.saturating_duration_since(checked));
            // Without the lock, which comes after that of life.
            if left.is_zero() {
                drop(state);
                if let Some(over) = self.over(wait) {
                    return Ok(Waited::Over(over));
                }
                state = self.lock();
                continue;
            }
            if check.is_zero() {
                drop(state);
                if interrupted() {
                    return Err(Stop::Interrupted);
                }
                self.settle();
                checked = Instant::now();
                state = self.lock();
                continue;
            }
            let patience = check.min(left);
            state.waiters += 1;
            self.changed.wait_for(&mut state, patience);
            state.waiters -= 1;
            wait.slept(ns(patience), ns(now.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests;

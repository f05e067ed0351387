//! What the engine and its lanes share: everything that somebody may wait for, and with `shared/book.rs` the state of tensors.

mod book;
mod life;

use crate::accounting::Accounting;
use crate::council::CouncilHandle;
use crate::failure::{Failure, Stop};
use crate::mailbox::{Command, Mailbox};
use crate::memory::Pool;
use crate::observed::LaneCounts;
use book::TensorState;
pub(crate) use book::{Gathered, OpenBook};
use life::Fate;
pub(crate) use life::ns;
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use penstock_core::Members;
use penstock_core::all_gather::AllGather;
use penstock_core::life::{Life, Over, Wait};
use penstock_core::{Error, Rank, Seq};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often a call that waits asks whether the program was interrupted.
const INTERRUPT_CHECK: Duration = Duration::from_millis(100);

/// One for each lane.
pub(crate) type Mailboxes = Arc<[Arc<Mailbox>]>;

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
    /// Final counts of lanes that have ended, in this epoch.
    pub(crate) final_counters: Vec<LaneCounts>,
    /// The same of those before it.
    pub(crate) past_counters: Vec<LaneCounts>,
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
    /// Results have come of which the state machine of life has not heard.
    landed: AtomicBool,
    /// The members of the next epoch are being agreed on: no result is given to the program.
    frozen: AtomicBool,
    /// Epochs that have ended.
    epoch: AtomicU32,
    /// Where members may be lost: who agrees on the next ones.
    council: OnceLock<CouncilHandle>,
    /// Calls of this rank that are not done.
    pub(crate) calls_open: AtomicU64,
    mailboxes: RwLock<Mailboxes>,
    /// `host:port` by rank, for messages.
    addresses: RwLock<Vec<String>>,
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
            past_counters: Vec::new(),
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
            landed: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            council: OnceLock::new(),
            calls_open: AtomicU64::new(0),
            mailboxes: RwLock::new(Arc::new([])),
            addresses: RwLock::default(),
            started: now,
            progress_ms: AtomicU64::new(0),
        }
    }

    /// Lanes begin, which have these mailboxes.
    pub(crate) fn start(&self, mailboxes: &[Arc<Mailbox>], addresses: Vec<String>) {
        *self.addresses.write() = addresses;
        *self.mailboxes.write() = mailboxes.into();
    }

    /// The lanes' mailboxes; none before `connect`, nor in a job of one rank.
    pub(crate) fn mailboxes(&self) -> Mailboxes {
        Arc::clone(&self.mailboxes.read())
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

    /// The members of the next epoch are being agreed on: nothing begins until then.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::SeqCst);
        self.live(|life, _| life.epoch_ends());
    }

    /// Nothing begins until the first epoch of a newcomer does.
    pub(crate) fn hold(&self) {
        self.frozen.store(true, Ordering::SeqCst);
    }

    /// See `freeze`.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::SeqCst)
    }

    /// The tokens that the program has not got, which now gets them.
    pub(crate) fn take_released(&self) -> Vec<u64> {
        std::mem::take(&mut self.lock().released)
    }

    /// Where members may be lost: who agrees on the next ones.
    pub(crate) fn council(&self) -> Option<&CouncilHandle> {
        self.council.get()
    }

    /// From now on members may be lost.
    pub(crate) fn with_council(&self, council: CouncilHandle) {
        // The engine makes one.
        let _ = self.council.set(council);
        self.live(Life::goes_on_after_losses);
    }

    /// Epochs that have ended.
    pub(crate) fn epoch(&self) -> u32 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The next epoch begins, of which no lane runs yet. Everything that waits for what was of the last one finds that it is over.
    pub(crate) fn begin_epoch(&self, members: &Members) {
        self.renew_life(members);
        self.epoch.store(members.epoch(), Ordering::Release);
        self.calls_open.store(0, Ordering::Release);
        self.progressed();
        let mut state = self.lock();
        state.all_gather = AllGather::new(self.me, members.clone());
        (state.lanes_left, state.lanes_done, state.lanes_told, state.lanes_quiet) = (0, 0, 0, 0);
        let ended = std::mem::take(&mut state.final_counters);
        state.past_counters.extend(ended);
        state.through_memory.clear();
        self.notify(&state);
    }

    /// The next epoch has begun.
    pub(crate) fn thaw(&self) {
        let state = self.lock();
        self.frozen.store(false, Ordering::SeqCst);
        self.notify(&state);
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
        for mailbox in mailboxes.iter() {
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
        self.addresses.read().get(rank.index()).cloned()
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
        let (mut checked, mut asked) = (Instant::now(), false);
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
            // Without the lock, which comes after that of life. No wait is over while members agree: it is asked again after a rest.
            if left.is_zero() && !std::mem::replace(&mut asked, true) {
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
            let patience = if left.is_zero() { check } else { check.min(left) };
            asked = false;
            state.waiters += 1;
            self.changed.wait_for(&mut state, patience);
            state.waiters -= 1;
            wait.slept(ns(patience), ns(now.elapsed()));
        }
    }
}

#[cfg(test)]
mod tests;

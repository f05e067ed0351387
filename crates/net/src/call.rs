//! A call between the program, which waits for it, and the lane, which runs it.

use crate::memory::Lender;
use crate::shared::Shared;
use parking_lot::Mutex;
use penstock_core::calls::Request;
use penstock_core::types::GroupId;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// One call of this rank: done when its results are in memory and all of its memory is the program's again.
pub struct Handle {
    pub(crate) id: u64,
    pub(crate) group: GroupId,
    pub(crate) request: Request,
    /// Whose message a receive from anybody takes, plus 1.
    source: AtomicU32,
    /// Lanes whose share is not complete.
    incomplete: AtomicU32,
    /// Regions that a lane may still touch.
    unreleased: AtomicU32,
    /// Threads that wait for it now.
    awaited: AtomicU32,
    /// Whether [`crate::Engine::take_done`] shall tell of it, and has been told.
    watched: AtomicBool,
    reported: AtomicBool,
    /// What keeps the memory allocated, until it is released.
    keep: Mutex<Option<Box<dyn Any + Send + Sync>>>,
    /// The epoch in which it was begun: it does not outlive that.
    epoch: u32,
    shared: Arc<Shared>,
}

// Sequential consistency, below: whoever finishes a call changes one number and looks at another, and so does whoever
// waits, the other way round. One of the two must see the other.
impl Handle {
    pub(crate) fn new(
        id: u64,
        group: GroupId,
        request: Request,
        lanes: u32,
        regions: u32,
        keep: Box<dyn Any + Send + Sync>,
        shared: Arc<Shared>,
    ) -> Arc<Self> {
        shared.calls_open.fetch_add(1, Ordering::AcqRel);
        Arc::new(Self {
            id,
            group,
            request,
            source: AtomicU32::new(0),
            incomplete: AtomicU32::new(lanes),
            unreleased: AtomicU32::new(regions),
            awaited: AtomicU32::new(0),
            watched: AtomicBool::new(false),
            reported: AtomicBool::new(false),
            keep: Mutex::new(Some(keep)),
            epoch: shared.epoch(),
            shared,
        })
    }

    /// What [`crate::Engine::take_done`] calls it.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Whether the results are in memory and the memory is the program's again.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.incomplete.load(Ordering::SeqCst) == 0 && self.unreleased.load(Ordering::SeqCst) == 0
    }

    /// Whether its epoch is over: if it is not done, it will never be.
    pub(crate) fn is_over(&self) -> bool {
        self.shared.epoch() != self.epoch
    }

    pub(crate) fn received_from(&self, from: u32) {
        self.source.store(from + 1, Ordering::SeqCst);
    }

    /// Of a receive from anybody that is done: who has sent the message, as an index in the group.
    #[must_use]
    pub fn source(&self) -> Option<u32> {
        self.source.load(Ordering::SeqCst).checked_sub(1)
    }

    /// A lane has brought the results of its share into memory.
    pub(crate) fn completed(&self) {
        self.incomplete.fetch_sub(1, Ordering::SeqCst);
        self.tell();
    }

    /// It was refused: nobody will complete it.
    pub(crate) fn abandoned(&self) {
        self.let_go();
    }

    /// Once: what is kept is there once.
    fn let_go(&self) {
        let kept = self.keep.lock().take();
        if kept.is_some() && !self.is_over() {
            self.shared.calls_open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn tell(&self) {
        if !self.is_done() {
            return;
        }
        // Both who completes and who releases may find it done.
        self.let_go();
        self.report();
        if self.awaited.load(Ordering::SeqCst) > 0 {
            self.shared.update(|_| ());
        }
    }

    /// From now on [`crate::Engine::take_done`] tells when it is done, or that it is.
    pub fn watch(&self) {
        self.watched.store(true, Ordering::SeqCst);
        if self.is_done() {
            self.report();
        }
    }

    fn report(&self) {
        if self.watched.load(Ordering::SeqCst) && !self.reported.swap(true, Ordering::SeqCst) {
            self.shared.update(|state| state.done_calls.push(self.id));
        }
    }

    /// Whether a thread waits for it now.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::SeqCst) > 0
    }

    /// Counts this thread among those that wait, for as long as `wait` runs.
    pub(crate) fn awaited<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.awaited.fetch_add(1, Ordering::SeqCst);
        let outcome = wait();
        self.awaited.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

impl Lender for Handle {
    fn released(&self, _: u32, _: u64) {
        self.unreleased.fetch_sub(1, Ordering::SeqCst);
        self.tell();
    }
}

impl std::fmt::Display for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.request {
            Request::Send { to, tag } => write!(f, "send to rank {to} of group {}, tag {tag}", self.group),
            Request::Receive { from, tag } => {
                write!(f, "recv from rank {from} of group {}, tag {tag}", self.group)
            }
            Request::ReceiveAny { tag } => write!(f, "recv from anybody in group {}, tag {tag}", self.group),
            Request::Collective(kind) => write!(f, "{} in group {}", kind.name(), self.group),
        }
    }
}

//! The state of an open book's tensors, as the engine and its lanes share it.
//!
//! Completion is counted per tensor with one atomic decrement per slice; the lock is taken per tensor.

use super::Shared;
use crate::mailbox::Word;
use crate::memory::{Chunk, Lender};
use parking_lot::Mutex;
use penstock_core::exchange::SliceEntry;
use penstock_core::layout::Slice;
use penstock_core::recovery::SliceProgress;
use penstock_core::roles::{Fold, MustBeIn};
use penstock_core::{Book, BookId, Members, Rank, Route, SliceId, Step, Submission, TensorId};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

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
    pub(super) parts_awaited: AtomicU32,
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

/// A book as it is dealt at present, and the state of its tensors.
pub(crate) struct OpenBook {
    pub(crate) book: Arc<Book>,
    /// By tensor: the lanes that carry its slices, as bits.
    pub(crate) lanes: Vec<u64>,
    pub(crate) state: Arc<BookProgress>,
}

/// What stays of a book that is dealt anew, to other members.
pub(crate) struct BookProgress {
    pub(crate) id: BookId,
    pub(crate) tensors: Vec<TensorState>,
    /// By slice: whether its result of the last submission is in memory.
    in_memory: Vec<AtomicBool>,
    /// By tensor, where members may be lost, none otherwise: the last submission until its result is in memory, so that its rounds can go on
    /// among other members. It keeps that memory from being released.
    unfinished: Vec<Mutex<Option<Submission<Chunk>>>>,
    /// By slice, likewise: its last result.
    kept: Vec<Mutex<Option<Chunk>>>,
    /// By slice, where its owner updates it, too: what this rank keeps, between two epochs.
    entries: Vec<Mutex<Option<SliceEntry<Chunk>>>>,
    /// Likewise: what the program has said last.
    word: Mutex<Option<Arc<Word>>>,
    /// Each layer's place in the forward pass, once it is said.
    pub(crate) places: Mutex<Option<Arc<[u32]>>>,
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
    /// By layer: time that the program spent waiting for it.
    pub(crate) stall_ns: Vec<AtomicU64>,
    pub(super) shared: Arc<Shared>,
}

impl Deref for OpenBook {
    type Target = BookProgress;

    fn deref(&self) -> &BookProgress {
        &self.state
    }
}

impl BookProgress {
    fn new(id: BookId, book: &Book, shared: Arc<Shared>) -> Self {
        let tensors = book.tensors.iter().map(|_| TensorState::default()).collect();
        let stall_ns = book.layers.iter().map(|_| AtomicU64::new(0)).collect();
        let in_memory = book.slices.iter().map(|_| AtomicBool::new(false)).collect();
        let updated = if book.roles.rules.fold == Fold::Updated { book.slices.len() } else { 0 };
        let versioned = if book.roles.rules.must_be_in == MustBeIn::Nobody { book.slices.len() } else { 0 };
        let recoverable = usize::from(book.roles.rules.recoverable);
        Self {
            id,
            tensors,
            in_memory,
            unfinished: (0..recoverable * book.tensors.len()).map(|_| Mutex::default()).collect(),
            kept: (0..recoverable * book.slices.len()).map(|_| Mutex::default()).collect(),
            entries: (0..recoverable * updated).map(|_| Mutex::default()).collect(),
            word: Mutex::default(),
            places: Mutex::default(),
            versions: (0..versioned).map(|_| AtomicU32::new(0)).collect(),
            late: Mutex::default(),
            sum_waits: (0..updated).map(|_| AtomicBool::new(false)).collect(),
            sums_awaited: AtomicU32::new(0),
            said: AtomicU64::new(0),
            stall_ns,
            shared,
        }
    }
}

impl OpenBook {
    pub(crate) fn new(id: BookId, book: Book, shared: Arc<Shared>) -> Self {
        if book.roles.rules.recoverable {
            let results: u64 = book.slices.iter().map(|slice| u64::from(slice.len_bytes)).sum();
            shared.pool.keep_more(results as usize);
        }
        let state = BookProgress::new(id, &book, shared);
        Self::dealt(book, Arc::new(state))
    }

    fn dealt(book: Book, state: Arc<BookProgress>) -> Self {
        let mut lanes = vec![0; book.tensors.len()];
        book.slices.iter().for_each(|slice| lanes[slice.tensor as usize] |= 1 << slice.lane);
        Self { book: Arc::new(book), lanes, state }
    }

    /// This rank.
    pub(crate) fn me(&self) -> Rank {
        self.shared.me
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
        let in_store = |slice: &Slice| self.book.tensors[slice.tensor as usize].route == Route::STORE;
        let is_owned = |slice: &Slice| slice.owner == owner && in_store(slice);
        let mut owned = self.book.slices.iter().zip(&self.sum_waits).filter(|(slice, _)| is_owned(slice));
        owned.find(|(_, waits)| !waits.load(Ordering::Acquire)).map(|(slice, _)| slice.tensor)
    }

    /// Where the slices of a tensor are.
    pub(crate) fn progress(&self, tensor: TensorId) -> impl Iterator<Item = SliceProgress> {
        let submitted = self.tensors[tensor as usize].seq.load(Ordering::Acquire);
        let is_done = |slice: SliceId| self.in_memory[slice as usize].load(Ordering::Acquire);
        let keeps = |slice: SliceId| {
            let entry = self.entries.get(slice as usize).map(|entry| entry.lock());
            entry.is_some_and(|entry| entry.as_ref().is_some_and(SliceEntry::is_whole))
        };
        let progress = move |slice| SliceProgress { submitted, done: is_done(slice), keeps: keeps(slice) };
        self.book.slices_of(tensor).map(progress)
    }

    /// A lane ends: what it kept of a slice.
    pub(crate) fn put_aside(&self, slice: SliceId, entry: SliceEntry<Chunk>) {
        if let Some(place) = self.entries.get(slice as usize) {
            *place.lock() = Some(entry);
        }
    }

    /// What was put aside of a lane's slices.
    pub(crate) fn take_entries(&self, lane: u32) -> Vec<(SliceId, SliceEntry<Chunk>)> {
        let in_lane = (0..).zip(&self.book.slices).filter(|(_, slice)| slice.lane == lane);
        let entry = |slice: SliceId| Some((slice, self.entries.get(slice as usize)?.lock().take()?));
        in_lane.filter_map(|(slice, _)| entry(slice)).collect()
    }

    /// The program says it for a step: where members may be lost it must stay known.
    pub(crate) fn note_word(&self, word: &Arc<Word>) {
        if !self.entries.is_empty() {
            *self.word.lock() = Some(Arc::clone(word));
        }
    }

    /// What the program has said last, and of a lane's slices that this rank keeps those whose results have yet to come of it, and are not
    /// given by others.
    pub(crate) fn word_again(
        &self,
        lane: u32,
        given: impl Fn(SliceId) -> bool,
    ) -> Option<(Arc<Word>, VecDeque<SliceId>)> {
        let word = self.word.lock().clone()?;
        let waits = |(slice, at): &(SliceId, &Slice)| {
            let step = self.tensors[at.tensor as usize].step.load(Ordering::Relaxed);
            let is_here = self.in_memory[*slice as usize].load(Ordering::Acquire) || given(*slice);
            step < word.step || step == word.step && !is_here
        };
        let kept = (0..).zip(&self.book.slices).filter(|(_, at)| at.lane == lane && at.is_kept_by(self.me()));
        let slices = kept.filter(waits).map(|(slice, _)| slice).collect();
        Some((word, slices))
    }

    /// A newcomer's slice goes on from where those of the others were: it has the parameters that came of their rounds.
    pub(crate) fn go_on_from(&self, slice: SliceId, progress: SliceProgress) {
        let tensor = self.book.slices[slice as usize].tensor;
        self.tensors[tensor as usize].seq.store(progress.done_seq(), Ordering::Release);
        self.in_memory[slice as usize].store(progress.done_seq() > 0, Ordering::Release);
    }

    /// A lane has the result of a slice, whose completion follows: for members that may lack it when an epoch ends.
    pub(crate) fn keep(&self, slice: SliceId, result: Option<Chunk>) {
        if let Some(kept) = self.kept.get(slice as usize) {
            *kept.lock() = result;
        }
    }

    /// The last result of a slice that was here; nothing if nobody contributed.
    pub(crate) fn kept(&self, slice: SliceId) -> Option<Chunk> {
        self.kept.get(slice as usize)?.lock().clone()
    }

    /// The submission of a tensor that is not complete, where members may be lost.
    pub(crate) fn unfinished(&self, tensor: TensorId) -> Option<Submission<Chunk>> {
        self.unfinished.get(tensor as usize)?.lock().clone()
    }

    /// A tensor is about to be handed to the lanes: nothing of its result is in memory.
    pub(crate) fn submitted(&self, tensor: TensorId) {
        for slice in self.book.slices_of(tensor) {
            self.in_memory[slice as usize].store(false, Ordering::Relaxed);
        }
    }

    /// It is handed to the lanes. Where members may be lost it must stay known until it is complete.
    pub(crate) fn handed(&self, submission: &Submission<Chunk>) {
        if let Some(unfinished) = self.unfinished.get(submission.tensor as usize) {
            *unfinished.lock() = Some(submission.clone());
        }
    }

    /// The same book among other members.
    pub(crate) fn among(&self, members: &Members) -> Self {
        Self::dealt(self.book.among(members), Arc::clone(&self.state))
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
        self.shared.landed.store(true, Ordering::Relaxed);
        // Release: who sees 0 sees the result. The decrements of other lanes are in the same release sequence.
        if tensor.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            if let Some(unfinished) = self.unfinished.get(id as usize) {
                *unfinished.lock() = None;
            }
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
    pub(super) fn part_has_come(&self, id: TensorId) -> bool {
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

impl Lender for BookProgress {
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

//! Real memory: the tensors that the program handed over, and pooled scratch buffers. All raw memory of this crate is
//! here, but that which other processes map ([`crate::transport`]).
//!
//! A [`Chunk`] is a view of a region. The last chunk of a region that the program handed over tells its [`Lender`] that
//! the program may change the memory again; the last chunk of a pooled region gives it back to the [`Pool`]. Both are
//! only counted, so nothing is allocated per slice in steady state.
//!
//! Why sharing raw pointers between threads is sound here: the slices of a tensor are disjoint and each belongs to one
//! lane, a lane is one thread, and the program promises not to touch the memory between its submission and the moment
//! it is told otherwise. So for every byte there is one thread at a time that may touch it.

use parking_lot::Mutex;
use penstock_core::Dtype;
use penstock_core::memory::Memory;
use penstock_core::optimizer::{self, STATES_MAX, Update};
use penstock_core::reduce::{self, Accumulator, Reduction, blocks, in_f32};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io::{IoSlice, IoSliceMut};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whoever handed over memory.
pub trait Lender: Send + Sync {
    /// The memory of `tensor` that was handed over under `token` will never be touched again.
    fn released(&self, tensor: u32, token: u64);
}

enum Origin {
    Handed { lender: Arc<dyn Lender>, tensor: u32, token: u64 },
    Pooled { pool: Arc<Pool>, layout: Layout },
}

struct Region {
    start: NonNull<u8>,
    len: usize,
    origin: Origin,
}

// SAFETY: the pointer is plain memory; the module's documentation says why no two threads use the same bytes at a time.
unsafe impl Send for Region {}
// SAFETY: as above; a shared region gives out views of disjoint pieces.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.origin {
            Origin::Handed { lender, tensor, token } => lender.released(*tensor, *token),
            Origin::Pooled { pool, layout } => {
                pool.bytes.fetch_sub(layout.size(), Ordering::Relaxed);
                // SAFETY: obtained with this layout from `obtain`, and this was the last reference.
                unsafe { give_back(self.start, *layout) };
            }
        }
    }
}

/// A piece of a region. Clones share the bytes.
pub struct Chunk {
    /// `None` only while being dropped.
    region: Option<Arc<Region>>,
    offset: usize,
    len: usize,
}

impl Chunk {
    /// Takes over `len` bytes at `start` until `lender` is told that they are released.
    ///
    /// # Safety
    /// The memory must stay allocated, and nobody else may write to it (or read what is being written), until `lender`
    /// is told.
    pub unsafe fn handed(
        start: NonNull<u8>,
        len: usize,
        lender: Arc<dyn Lender>,
        tensor: u32,
        token: u64,
    ) -> Self {
        let region = Region { start, len, origin: Origin::Handed { lender, tensor, token } };
        Self { region: Some(Arc::new(region)), offset: 0, len }
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte. Valid for `self.len` bytes.
    fn start(&self) -> *mut u8 {
        let region = self.region.as_ref().expect("a chunk has its region until it is dropped");
        // SAFETY: `part` and the constructors keep offset + len within the region.
        unsafe { region.start.as_ptr().add(self.offset) }
    }

    /// The bytes from `from` on, for reading. Only for the duration of one call: see [`Chunk::bytes_mut`].
    fn bytes(&self, from: usize) -> &[u8] {
        assert!(from <= self.len);
        // SAFETY: valid and initialised (handed over by the program, or zeroed); the lane that holds this chunk is the
        // only thread that touches these bytes, and it makes no mutable view while this one lives, as both live only
        // within single statements of this crate.
        unsafe { std::slice::from_raw_parts(self.start().add(from), self.len - from) }
    }

    /// The bytes from `from` on, for writing.
    #[allow(clippy::mut_from_ref)] // Chunks are handles; the module's documentation says who may write.
    fn bytes_mut(&self, from: usize) -> &mut [u8] {
        assert!(from <= self.len);
        // SAFETY: as in `bytes`; no other view lives at the same time.
        unsafe { std::slice::from_raw_parts_mut(self.start().add(from), self.len - from) }
    }

    /// The bytes from `from` on, for one vectored write.
    pub(crate) fn to_write(&self, from: usize) -> IoSlice<'_> {
        IoSlice::new(self.bytes(from))
    }

    /// The bytes from `from` on, for one vectored read.
    pub(crate) fn to_read(&self, from: usize) -> IoSliceMut<'_> {
        IoSliceMut::new(self.bytes_mut(from))
    }

    /// Copies the bytes from `from` on to `target`, as many as it takes and there are; returns how many.
    pub(crate) fn copy_to(&self, from: usize, target: &mut [u8]) -> usize {
        let source = self.bytes(from);
        let count = source.len().min(target.len());
        target[..count].copy_from_slice(&source[..count]);
        count
    }

    /// Copies `source` to the bytes from `from` on.
    pub(crate) fn fill(&self, from: usize, source: &[u8]) {
        self.bytes_mut(from)[..source.len()].copy_from_slice(source);
    }

    /// A piece of it.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Self {
        assert!(offset + len <= self.len, "a part lies within its chunk");
        Self { region: self.region.clone(), offset: self.offset + offset, len }
    }

    /// A copy of the bytes.
    pub(crate) fn to_vec(&self) -> Vec<u8> {
        self.bytes(0).to_vec()
    }
}

impl Clone for Chunk {
    fn clone(&self) -> Self {
        Self { region: self.region.clone(), offset: self.offset, len: self.len }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        let Some(mut region) = self.region.take() else { return };
        // The last view of a pooled region takes the region back with its count, so that reuse allocates nothing. If two
        // views are dropped at the same moment neither sees itself as the last, and the memory is freed instead.
        if let Some(last) = Arc::get_mut(&mut region)
            && let Origin::Pooled { pool, .. } = &last.origin
        {
            Arc::clone(pool).put_back(region);
        }
    }
}

impl std::fmt::Debug for Chunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chunk({} bytes)", self.len)
    }
}

/// Buffers from this size on are mappings of their own: what is freed leaves the process, and makes no holes in the heap
/// in which the program's tensors lie.
const MAPPED_BYTES_MIN: usize = 64 << 10;
/// Smallest pooled buffer.
const BUFFER_BYTES_MIN: usize = 4096;
/// Buffers start on cache lines.
const ALIGN_BYTES: usize = 64;

/// Reusable buffers in classes of size. Keeps what comes back as long as all of its buffers together, in use or not, stay
/// within `keep_bytes`; beyond that it lets go of the class that was not taken from for longest. If it let go of what comes
/// back, buffers of lengths that nobody takes any more would fill it, and every other one would be mapped anew.
pub struct Pool {
    free: Mutex<Free>,
    /// Allocated, in use or not.
    bytes: AtomicUsize,
    keep_bytes: AtomicUsize,
}

#[derive(Default)]
struct Free {
    /// By class; see [`class_of`].
    classes: Vec<Class>,
    takes: u64,
}

#[derive(Default)]
struct Class {
    regions: Vec<Arc<Region>>,
    /// The number of the last take from it.
    taken: u64,
}

impl Free {
    fn class(&mut self, class: usize) -> &mut Class {
        if class >= self.classes.len() {
            self.classes.resize_with(class + 1, Class::default);
        }
        &mut self.classes[class]
    }

    fn take(&mut self, class: usize) -> Option<Arc<Region>> {
        self.takes += 1;
        let taken = self.takes;
        let of = self.class(class);
        of.taken = taken;
        of.regions.pop()
    }

    /// One of those that are needed least.
    fn oldest(&mut self) -> Option<Arc<Region>> {
        let some = self.classes.iter_mut().filter(|class| !class.regions.is_empty());
        some.min_by_key(|class| class.taken)?.regions.pop()
    }
}

impl Pool {
    /// An empty pool.
    #[must_use]
    pub fn new(keep_bytes: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::default(), bytes: AtomicUsize::new(0), keep_bytes: keep_bytes.into() })
    }

    /// Bytes allocated now, in use or waiting to be used.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// A buffer with undefined (but initialised) contents.
    pub fn take(self: &Arc<Self>, len: usize) -> Chunk {
        let (class, capacity) = class_of(len);
        let kept = self.free.lock().take(class);
        let region = kept.unwrap_or_else(|| self.allocate(capacity));
        debug_assert!(region.len >= len);
        Chunk { region: Some(region), offset: 0, len }
    }

    /// A buffer with a copy of `source`.
    pub fn copy_of(self: &Arc<Self>, source: &[u8]) -> Chunk {
        let chunk = self.take(source.len());
        chunk.fill(0, source);
        chunk
    }

    fn allocate(self: &Arc<Self>, capacity: usize) -> Arc<Region> {
        let layout =
            Layout::from_size_align(capacity, ALIGN_BYTES).expect("a class is far below the address space");
        self.bytes.fetch_add(capacity, Ordering::Relaxed);
        let Some(start) = obtain(layout) else { handle_alloc_error(layout) };
        Arc::new(Region { start, len: capacity, origin: Origin::Pooled { pool: Arc::clone(self), layout } })
    }

    fn put_back(&self, region: Arc<Region>) {
        let (class, _) = class_of(region.len);
        self.free.lock().class(class).regions.push(region);
        while self.bytes() > self.keep_bytes.load(Ordering::Relaxed) {
            // Dropped when the lock is free again: the system takes its time to unmap it.
            let oldest = self.free.lock().oldest();
            if oldest.is_none() {
                return;
            }
        }
    }

    /// So many bytes, as lengths and not as capacities, will be in use all the time: kept is as much as before beside them. Otherwise each
    /// buffer that takes the place of one of these would be mapped, and its pages made, anew.
    pub fn keep_more(&self, len_bytes: usize) {
        self.keep_bytes.fetch_add(len_bytes + len_bytes / 4, Ordering::Relaxed);
    }

    /// Frees all buffers, those in use as soon as they come back. Buffers hold their pool, so without it an unused pool
    /// would keep itself alive.
    pub fn close(&self) {
        self.keep_bytes.store(0, Ordering::Relaxed);
        let kept = mem::take(&mut *self.free.lock());
        drop(kept);
    }
}

/// Memory of zeros, so that views are initialised; for large buffers that costs nothing, as the system hands out zeroed
/// pages. The layout has a size above 0.
pub(crate) fn obtain(layout: Layout) -> Option<NonNull<u8>> {
    if layout.size() < MAPPED_BYTES_MIN {
        // SAFETY: the size is above 0.
        return NonNull::new(unsafe { alloc_zeroed(layout) });
    }
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new private mapping at an address of the kernel's choice overlaps nothing.
    let start = unsafe { libc::mmap(ptr::null_mut(), layout.size(), access, kind, -1, 0) };
    if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) }
}

/// Ends what `obtain` began.
///
/// # Safety
/// `start` came from `obtain` with this layout, and nothing refers to it any more.
pub(crate) unsafe fn give_back(start: NonNull<u8>, layout: Layout) {
    if layout.size() < MAPPED_BYTES_MIN {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(start.as_ptr(), layout) };
    } else {
        // SAFETY: a whole mapping of this size. It can only fail if it were none.
        unsafe { libc::munmap(start.as_ptr().cast(), layout.size()) };
    }
}

/// Class and capacity for `len` bytes: four classes per doubling, so at most a fifth is unused.
fn class_of(len: usize) -> (usize, usize) {
    if len <= BUFFER_BYTES_MIN {
        return (0, BUFFER_BYTES_MIN);
    }
    let power = (len - 1).ilog2() as usize;
    let quarter = 1 << (power - 2);
    let quarters = len.div_ceil(quarter); // 5 to 8
    let first_power = BUFFER_BYTES_MIN.ilog2() as usize;
    ((power - first_power) * 4 + quarters - 4, quarters * quarter)
}

/// The memory of one lane.
pub struct RealMemory {
    pool: Arc<Pool>,
    accumulator: Accumulator,
}

impl RealMemory {
    /// Memory that takes its scratch buffers from `pool`.
    #[must_use]
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool, accumulator: Accumulator::default() }
    }
}

impl Memory for RealMemory {
    type Chunk = Chunk;

    fn part(&self, chunk: &Chunk, offset_bytes: usize, len_bytes: usize) -> Chunk {
        chunk.part(offset_bytes, len_bytes)
    }

    fn scratch(&mut self, len_bytes: usize) -> Chunk {
        self.pool.take(len_bytes)
    }

    fn reduce(&mut self, dtype: Dtype, how: Reduction, inputs: &[Chunk], output: &Chunk) {
        let [first, rest @ ..] = inputs else { return };
        if rest.is_empty() && how.keeps_one() {
            assert_eq!(first.len, output.len);
            if first.start() == output.start() {
                return;
            }
            // SAFETY: both are valid for this length; `copy` allows them to be the same memory. Bit by bit, whatever the
            // element type.
            unsafe { ptr::copy(first.start(), output.start(), output.len) };
            return;
        }
        // One view at a time: `output` may be one of the inputs.
        for block in blocks(dtype, output.len) {
            self.accumulator.start(dtype, &first.bytes(0)[block.clone()]);
            for input in rest {
                self.accumulator.add(dtype, how, &input.bytes(0)[block.clone()]);
            }
            self.accumulator.finish(dtype, how, &mut output.bytes_mut(0)[block]);
        }
    }

    fn reduce_rounded(
        &mut self,
        wire: Dtype,
        how: Reduction,
        inputs: &[Chunk],
        own: Option<usize>,
        output: &Chunk,
    ) {
        for block in blocks(wire, output.len / 2) {
            for (i, input) in inputs.iter().enumerate() {
                let (dtype, range) =
                    if own == Some(i) { (Dtype::F32, in_f32(&block)) } else { (wire, block.clone()) };
                match i {
                    0 => self.accumulator.start(dtype, &input.bytes(0)[range]),
                    _ => self.accumulator.add(dtype, how, &input.bytes(0)[range]),
                }
            }
            self.accumulator.finish_rounded(wire, how, &mut output.bytes_mut(0)[in_f32(&block)]);
        }
    }

    fn round(&mut self, wire: Dtype, input: &Chunk, output: &Chunk) {
        reduce::round(wire, input.bytes(0), output.bytes_mut(0));
    }

    fn expand(&mut self, wire: Dtype, input: &Chunk, output: &Chunk) {
        reduce::expand(wire, input.bytes(0), output.bytes_mut(0));
    }

    fn is_shared(&self, chunk: &Chunk) -> bool {
        chunk.region.as_ref().is_some_and(|region| Arc::strong_count(region) > 1)
    }

    fn update(
        &mut self,
        dtype: Dtype,
        update: &Update,
        number: u64,
        value: &Chunk,
        gradient: &Chunk,
        states: &[Chunk],
        output: &Chunk,
    ) {
        let mut views: [&mut [u8]; STATES_MAX] = Default::default();
        for (view, state) in views.iter_mut().zip(states) {
            *view = state.bytes_mut(0);
        }
        let views = &mut views[..states.len()];
        let made = if output.start() == value.start() {
            update.apply(dtype, number, value.bytes_mut(0), gradient.bytes(0), views)
        } else {
            update.apply_elsewhere(dtype, number, value.bytes(0), output.bytes_mut(0), views)
        };
        made.expect("the book has checked the type, and the entry the states");
    }

    fn clear(&mut self, output: &Chunk) {
        output.bytes_mut(0).fill(0);
    }

    fn fill(&mut self, dtype: Dtype, number: f64, output: &Chunk) {
        optimizer::fill(dtype, number, output.bytes_mut(0)).expect("the book has checked the type");
    }

    fn squares(&mut self, dtype: Dtype, input: &Chunk) -> f64 {
        optimizer::squares(dtype, input.bytes(0)).expect("the book has checked the type")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Noted(Mutex<Vec<(u32, u64)>>);

    impl Lender for Noted {
        fn released(&self, tensor: u32, token: u64) {
            self.0.lock().push((tensor, token));
        }
    }

    #[test]
    fn classes_waste_at_most_a_fifth_and_do_not_overlap() {
        let mut before = (0, BUFFER_BYTES_MIN);
        for len in (1..20 * BUFFER_BYTES_MIN).chain([512 << 10, (512 << 10) + 1, 64 << 20]) {
            let (class, capacity) = class_of(len);
            assert!(capacity >= len && (capacity - len) * 5 <= capacity.max(5 * BUFFER_BYTES_MIN));
            assert!((class, capacity) >= before, "{len}: {class} {capacity} after {before:?}");
            assert_eq!(class_of(capacity), (class, capacity), "a buffer returns to the class it came from");
            before = (class, capacity);
        }
    }

    #[test]
    fn buffers_are_reused_and_the_surplus_is_freed() {
        let pool = Pool::new(3 * BUFFER_BYTES_MIN);
        let start = pool.take(100).start();
        assert_eq!(pool.bytes(), BUFFER_BYTES_MIN);
        assert_eq!(pool.take(4000).start(), start);
        drop((0..5).map(|_| pool.take(1)).collect::<Vec<_>>());
        assert_eq!(pool.bytes(), 3 * BUFFER_BYTES_MIN);
        pool.close();
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn what_takes_the_place_of_buffers_in_use_is_kept_beside_them() {
        let pool = Pool::new(2 * BUFFER_BYTES_MIN);
        let take = |pool: &Arc<Pool>| -> Vec<Chunk> { (0..4).map(|_| pool.take(BUFFER_BYTES_MIN)).collect() };
        let in_use = take(&pool);
        drop(take(&pool));
        assert_eq!(pool.bytes(), 4 * BUFFER_BYTES_MIN, "nothing is kept");
        pool.keep_more(4 * BUFFER_BYTES_MIN);
        drop(take(&pool));
        assert_eq!(pool.bytes(), 7 * BUFFER_BYTES_MIN);
        drop(in_use);
    }

    #[test]
    fn lengths_that_nobody_takes_any_more_make_room_for_others() {
        let (old, new) = (16 * BUFFER_BYTES_MIN, 2 * BUFFER_BYTES_MIN);
        let pool = Pool::new(4 * old);
        drop((0..4).map(|_| pool.take(old)).collect::<Vec<_>>());
        assert_eq!(pool.bytes(), 4 * old);
        drop((0..8).map(|_| pool.take(new)).collect::<Vec<_>>());
        let again: Vec<Chunk> = (0..8).map(|_| pool.take(new)).collect();
        assert_eq!(pool.bytes(), 4 * old, "all eight were kept, in the place of one of the others");
        drop(again);
        assert_eq!(pool.bytes(), 4 * old);
    }

    #[test]
    fn the_owner_is_told_once_by_the_last_part() {
        let noted = Arc::new(Noted(Mutex::default()));
        let mut tensor = [1f32, 2.0, 3.0, 4.0];
        let start = NonNull::from(&mut tensor).cast();
        // SAFETY: `tensor` outlives the chunks and is not touched meanwhile.
        let chunk = unsafe { Chunk::handed(start, 16, noted.clone(), 7, 42) };
        let memory = RealMemory::new(Pool::new(0));
        let (low, high) = (memory.part(&chunk, 0, 8), memory.part(&chunk, 8, 8));
        drop(chunk);
        drop(low);
        assert!(noted.0.lock().is_empty());
        drop(high);
        assert_eq!(*noted.0.lock(), [(7, 42)]);
    }

    #[test]
    fn sums_may_land_in_one_of_their_inputs() {
        let pool = Pool::new(0);
        let mut memory = RealMemory::new(pool.clone());
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let inputs = [pool.copy_of(&bytes(&[1.0, 2.0])), pool.copy_of(&bytes(&[3.0, 6.0]))];
        memory.reduce(Dtype::F32, Reduction::Sum { divisor: 2 }, &inputs, &inputs[1]);
        assert_eq!(inputs[1].to_vec(), bytes(&[2.0, 4.0]));
        memory.reduce(Dtype::Bytes, Reduction::Sum { divisor: 1 }, &inputs[1..], &inputs[0]);
        assert_eq!(inputs[0].to_vec(), bytes(&[2.0, 4.0]));
    }
}

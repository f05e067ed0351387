//! In steady state nothing is allocated per slice, and scratch buffers stay within the window whatever the tensor's size.

mod support;

use penstock_core::layout::Tensor;
use penstock_core::way::Algorithm;
use penstock_core::{Dtype, Gives, Op, Route, Submission};
use penstock_net::{Engine, EngineConfig, Lent};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: u32 = 3;
const SLICE_BYTES: usize = 8192;
const SLICES: usize = 1000;
const WINDOW_BYTES: u64 = 1 << 20;
const WARM_UP_ROUNDS: u32 = 5;
/// Per round of all ranks: a region per tensor, blocks of the answers' channels, and the like.
const ALLOCATIONS_MAX: usize = 100;

fn configure(config: &mut EngineConfig) {
    (config.slice_bytes, config.window_bytes, config.lanes) = (SLICE_BYTES, WINDOW_BYTES, 1);
    config.operation_timeout = Duration::from_secs(30);
}

#[test]
fn nothing_is_allocated_per_slice() {
    // One after the other: the count is of the whole process.
    for route in Algorithm::ALL.map(Route::Sum) {
        allocate_nothing_per_slice(route, Dtype::F32);
    }
    allocate_nothing_per_slice(Route::STORE, Dtype::Bf16);
}

fn allocate_nothing_per_slice(route: Route, wire: Dtype) {
    let engines = support::job_with(RANKS, configure);
    let meeting = support::Meeting::of(engines.len());
    let counts: Vec<usize> = std::thread::scope(|scope| {
        let run = |engine: &Engine| {
            let mut values = vec![1f32; SLICES * SLICE_BYTES / 4];
            let tensor =
                Tensor::new("tensor", 0, Dtype::F32, values.len() as u64).with_route(route).with_wire(wire);
            let book = engine.open_book("book", vec!["layer".into()], vec![tensor], None).unwrap();
            let mut fewest = usize::MAX;
            for round in 0..WARM_UP_ROUNDS + 3 {
                meeting.wait();
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                meeting.wait();
                let (address, len_bytes) = (values.as_mut_ptr() as usize, SLICES * SLICE_BYTES);
                let part = Submission {
                    book,
                    tensor: 0,
                    seq: 0,
                    step: round,
                    memory: Lent { address, len_bytes },
                    gives: Gives::Whole(Op::Average),
                };
                // SAFETY: `values` stays until it is released.
                unsafe { engine.submit(part, false) }.unwrap();
                engine.wait(book, &[0], true, &mut || false).unwrap();
                meeting.wait();
                if round >= WARM_UP_ROUNDS {
                    fewest = fewest.min(ALLOCATIONS.load(Ordering::Relaxed) - before);
                }
            }
            let pool_bytes = engine.report().unwrap().pool_bytes;
            // An overtaking slice may use a second window per peer.
            assert!(
                pool_bytes <= 2 * u64::from(RANKS - 1) * (WINDOW_BYTES + 2 * SLICE_BYTES as u64),
                "{route:?} {wire:?}: {pool_bytes}"
            );
            engine.shutdown(&mut || false).unwrap();
            fewest
        };
        let threads: Vec<_> = engines.iter().map(|engine| scope.spawn(move || run(engine))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(
        counts.iter().all(|count| *count <= ALLOCATIONS_MAX),
        "{route:?} {wire:?}: {counts:?} allocations for {SLICES} slices"
    );
}

//! Ten thousand random schedules, all checkers on. A failure prints its seed and how to replay it.

use penstock_core::Route;
use penstock_core::layout::Tensor;
use penstock_core::life::Evidence;
use penstock_core::way::Algorithm;
use penstock_sim::program::Mishap;

/// Scenarios per test run.
const SCENARIOS: u64 = 12_000;

#[test]
fn random_schedules_violate_nothing() {
    // Another base seed explores other schedules; the default makes a test run repeatable.
    let base: u64 = std::env::var("PENSTOCK_SIM_SEED")
        .ok()
        .map_or(0, |seed| seed.parse().expect("PENSTOCK_SIM_SEED is a number"));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let parts = std::thread::scope(|scope| {
        let explore =
            |first| (base + first..base + SCENARIOS).step_by(cores).map(counts).fold([0; COUNTS], sum);
        let threads: Vec<_> = (0..cores as u64).map(|first| scope.spawn(move || explore(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let all = parts.into_iter().fold([0; COUNTS], sum);
    let [slices, preempted, lost, through] = [0, 1, 2, 3].map(|at| all[at]);
    let (by_scheme, by_fault) = all[4..].split_at(Algorithm::ALL.len());
    // The scenarios would prove nothing if they never did what they are there for.
    assert!(slices > 10 * SCENARIOS, "{slices} slices");
    assert!(preempted > SCENARIOS / 10, "{preempted} runs with preemptions");
    assert!(lost > SCENARIOS / 50 && through > SCENARIOS / 2, "{lost} lost, {through} came through");
    assert!(
        by_scheme.iter().all(|lost| *lost > SCENARIOS / 400),
        "lost in books with each of {:?}: {by_scheme:?}",
        Algorithm::ALL
    );
    assert!(
        by_fault.iter().all(|count| *count > SCENARIOS / 400),
        "ended on {EVIDENCE:?}, or not in spite of a stop: {by_fault:?}"
    );
}

/// What the verdicts on killed, failed, stopped and hanging ranks rest on.
const EVIDENCE: [Evidence; 4] = [Evidence::Ended, Evidence::Own, Evidence::Silent, Evidence::Absent];
const COUNTS: usize = 4 + Algorithm::ALL.len() + EVIDENCE.len() + 1;

/// Slices, and whether there were preemptions, whether a rank was lost, whether all came through; by algorithm whether a rank
/// was lost where a tensor goes by it; by evidence whether it was; and whether all came through though a rank was stopped.
fn counts(seed: u64) -> [u64; COUNTS] {
    let report = penstock_sim::run(seed).unwrap_or_else(|failure| panic!("{failure}"));
    let lost = report.lost.is_some();
    let mut counts = [0; COUNTS];
    let flags = [report.preemptions > 0, lost, !lost].map(u64::from);
    counts[0] = report.slices;
    counts[1..4].copy_from_slice(&flags);
    let (by_scheme, by_fault) = counts[4..].split_at_mut(Algorithm::ALL.len());
    for (count, evidence) in by_fault.iter_mut().zip(EVIDENCE) {
        *count = u64::from(report.lost.is_some_and(|(_, on)| on == evidence));
    }
    let setup = penstock_sim::scenario::draw(seed);
    let stopped = setup.fault.is_some_and(|fault| matches!(fault.what, Mishap::Stop(_)));
    by_fault[EVIDENCE.len()] = u64::from(stopped && !lost);
    for (count, algorithm) in by_scheme.iter_mut().zip(Algorithm::ALL) {
        let goes_by_it = |tensor: &Tensor| tensor.route == Route::Sum(algorithm);
        *count = u64::from(lost && setup.books.iter().flat_map(|book| &book.tensors).any(goes_by_it));
    }
    counts
}

fn sum(a: [u64; COUNTS], b: [u64; COUNTS]) -> [u64; COUNTS] {
    std::array::from_fn(|i| a[i] + b[i])
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..50 {
        let (a, b) = (penstock_sim::run_with(seed, None, true), penstock_sim::run_with(seed, None, true));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.events, a.virtual_ns, a.trace), (b.events, b.virtual_ns, b.trace), "seed {seed}");
    }
}

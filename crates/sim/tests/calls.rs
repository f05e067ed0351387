//! Random calls in random order. A failure prints its seed: `penstock_sim::calls::run(seed)` plays it again.

/// Jobs per test run.
const JOBS: u64 = 300;

#[test]
fn random_calls_in_random_order_all_end_with_the_expected_bits() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let parts = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..cores as u64).map(|first| scope.spawn(move || run((first..JOBS).step_by(cores)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let [calls, early, offers] = [0, 1, 2].map(|i| parts.iter().map(|part| part[i]).sum::<u64>());
    // They would prove nothing if they never did what they are there for.
    assert!(
        calls > 20 * JOBS && early > JOBS && offers > JOBS,
        "{calls} calls, {early} early, {offers} offers"
    );
}

/// Calls, and how many of them came early or were offers, in the jobs of these seeds.
fn run(seeds: impl Iterator<Item = u64>) -> [u64; 3] {
    let mut counts = [0; 3];
    for seed in seeds {
        let report = penstock_sim::calls::run(seed).unwrap_or_else(|error| panic!("{error}"));
        for (count, more) in counts.iter_mut().zip([report.calls, report.early, report.offers]) {
            *count += more;
        }
    }
    counts
}

//! Ten thousand random schedules, all checkers on. A failure prints its seed and how to replay it.

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
        let explore = |first| (base + first..base + SCENARIOS).step_by(cores).map(counts).fold([0; 4], sum);
        let threads: Vec<_> = (0..cores as u64).map(|first| scope.spawn(move || explore(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let [slices, preempted, lost, through] = parts.into_iter().fold([0; 4], sum);
    // The scenarios would prove nothing if they never did what they are there for.
    assert!(slices > 10 * SCENARIOS, "{slices} slices");
    assert!(preempted > SCENARIOS / 10, "{preempted} runs with preemptions");
    assert!(lost > SCENARIOS / 50 && through > SCENARIOS / 2, "{lost} lost, {through} came through");
}

/// Slices, and whether there were preemptions, whether a rank was lost, whether all came through.
fn counts(seed: u64) -> [u64; 4] {
    let report = penstock_sim::run(seed).unwrap_or_else(|failure| panic!("{failure}"));
    let lost = report.lost.is_some();
    [report.slices, u64::from(report.preemptions > 0), u64::from(lost), u64::from(!lost)]
}

fn sum(a: [u64; 4], b: [u64; 4]) -> [u64; 4] {
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

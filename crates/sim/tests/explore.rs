//! Ten thousand random schedules, all checkers on. A failure prints its seed and how to replay it.

/// Scenarios per test run.
const SCENARIOS: u64 = 12_000;

#[test]
fn random_schedules_violate_nothing() {
    // Another base seed explores other schedules; the default makes a test run repeatable.
    let base: u64 = std::env::var("PENSTOCK_SIM_SEED")
        .ok()
        .map_or(0, |seed| seed.parse().expect("PENSTOCK_SIM_SEED is a number"));
    let (mut slices, mut preempted, mut lost, mut through) = (0, 0, 0, 0);
    for seed in base..base + SCENARIOS {
        match penstock_sim::run(seed) {
            Ok(report) => {
                slices += report.slices;
                preempted += u64::from(report.preemptions > 0);
                lost += u64::from(report.lost.is_some());
                through += u64::from(report.lost.is_none());
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    // The scenarios would prove nothing if they never did what they are there for.
    assert!(slices > 10 * SCENARIOS, "{slices} slices");
    assert!(preempted > SCENARIOS / 10, "{preempted} runs with preemptions");
    assert!(lost > SCENARIOS / 50 && through > SCENARIOS / 2, "{lost} lost, {through} came through");
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..50 {
        let (a, b) = (penstock_sim::run_with(seed, None, true), penstock_sim::run_with(seed, None, true));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.events, a.virtual_ns, a.trace), (b.events, b.virtual_ns, b.trace), "seed {seed}");
    }
}

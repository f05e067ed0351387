//! Random calls in random order. A failure prints its seed: `penstock_sim::calls::run(seed)` plays it again.

/// Jobs per test run.
const JOBS: u64 = 300;

#[test]
fn random_calls_in_random_order_all_end_with_the_expected_bits() {
    let (mut calls, mut early, mut offers) = (0, 0, 0);
    for seed in 0..JOBS {
        let report = penstock_sim::calls::run(seed).unwrap_or_else(|error| panic!("{error}"));
        calls += report.calls;
        early += report.early;
        offers += report.offers;
    }
    // They would prove nothing if they never did what they are there for.
    assert!(
        calls > 20 * JOBS && early > JOBS && offers > JOBS,
        "{calls} calls, {early} early, {offers} offers"
    );
}

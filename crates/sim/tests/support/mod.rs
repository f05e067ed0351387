//! How many seeds a test run goes through, and all processors at it.

use std::ops::Range;

/// The number that an environment variable says, or `otherwise`.
fn number_in(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |number| number.parse().expect("a number"))
}

/// The seeds of a test run: as many as `variable` says, or `otherwise`. From 0 on, which makes a run repeatable, unless PENSTOCK_SIM_SEED
/// says from which one.
pub(crate) fn seeds(variable: &str, otherwise: u64) -> Range<u64> {
    let base = number_in("PENSTOCK_SIM_SEED", 0);
    base..base + number_in(variable, otherwise)
}

/// The sums of what `of` counts of each of the seeds.
pub(crate) fn count<const N: usize>(seeds: &Range<u64>, of: impl Fn(u64) -> [u64; N] + Sync) -> [u64; N] {
    let add = |a: [u64; N], b: [u64; N]| std::array::from_fn(|i| a[i] + b[i]);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let of_one = |first: usize| seeds.clone().skip(first).step_by(processors).map(&of).fold([0; N], add);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..processors).map(|first| scope.spawn(move || of_one(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).fold([0; N], add)
    })
}

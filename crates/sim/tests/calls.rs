//! Calls in random order. A failure prints its seed: `penstock_sim::calls::run(seed)` plays it again.

use penstock_core::calls::slices;
use penstock_core::cost::dense::Algorithm;
use penstock_core::layout::Dtype;
use penstock_core::wire::Op;

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

#[test]
fn of_a_rank_lost_in_the_middle_of_calls_everybody_who_needs_it_hears() {
    let mut all = penstock_sim::calls::Loss::default();
    for seed in 0..JOBS {
        let loss = penstock_sim::calls::run_with_a_loss(seed).unwrap_or_else(|error| panic!("{error}"));
        all.complete += loss.complete;
        all.direct += loss.direct;
        all.indirect += loss.indirect;
    }
    assert!(all.complete > JOBS && all.direct > JOBS && all.indirect > JOBS / 10, "{all:?}");
}

const OPS: [Op; 4] = [Op::Sum, Op::Average, Op::Min, Op::Max];
const DTYPES: [Dtype; 9] = [
    Dtype::F32,
    Dtype::F64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::I64,
    Dtype::I32,
    Dtype::I16,
    Dtype::I8,
    Dtype::U8,
];
/// Elements: none, fewer than ranks, primes.
const LENGTHS: [usize; 7] = [0, 1, 2, 7, 31, 257, 1009];

#[test]
fn every_algorithm_operation_dtype_and_number_of_ranks_gives_the_bits_of_the_documented_order() {
    let mut seed = 0;
    for algorithm in Algorithm::ALL {
        for ranks in 1..=17 {
            for (op, dtype) in OPS.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
                if op.refused(dtype).is_none() {
                    seed += 1;
                    let elems = LENGTHS[(seed * 5 % 7) as usize];
                    let outcome = penstock_sim::calls::allreduce(algorithm, (op, dtype), ranks, elems, seed);
                    outcome.unwrap_or_else(|error| panic!("{error}"));
                }
            }
        }
    }
}

#[test]
fn longer_tensors_go_in_slices_of_several_owners() {
    let mut seed = 0;
    for algorithm in Algorithm::ALL {
        // Where each rank sums a part, slices are longer.
        let parted = matches!(algorithm, Algorithm::Ring | Algorithm::Butterfly);
        let (all_ranks, elems) =
            if parted { ([2, 3].as_slice(), 110_017) } else { ([2, 3, 4, 5, 8].as_slice(), 9001) };
        for &ranks in all_ranks {
            seed += 1;
            assert!(slices(algorithm, elems, 4, ranks) > 1 || algorithm == Algorithm::Central);
            let what = (Op::Sum, Dtype::F32);
            let outcome = penstock_sim::calls::allreduce(algorithm, what, ranks, elems as usize, seed);
            outcome.unwrap_or_else(|error| panic!("{error}"));
        }
    }
}

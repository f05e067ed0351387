//! Calls in random order. A failure prints its seed: `penstock_sim::calls::run(seed)` plays it again.

use penstock_core::calls::{CallKind, Plan, Shape, slices};
use penstock_core::cost::Rates;
use penstock_core::types::Dtype;
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;
use penstock_sim::random::Random;
use std::collections::BTreeMap;

/// Jobs per test run.
const JOBS: u64 = 120;

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
/// Elements: none, fewer than ranks, primes; and any.
const LENGTHS: [usize; 7] = [0, 1, 2, 7, 31, 257, 1009];
const LENGTH_MAX: u64 = 1500;

#[test]
fn every_algorithm_operation_dtype_and_number_of_ranks_gives_the_bits_of_the_documented_order() {
    let mut seed = 0;
    for algorithm in Algorithm::ALL {
        for ranks in 1..=17 {
            for (op, dtype) in OPS.into_iter().flat_map(|op| DTYPES.map(|dtype| (op, dtype))) {
                if op.refused(dtype).is_none() {
                    seed += 1;
                    let any = Random::new(seed).below(LENGTH_MAX) as usize;
                    let elems = *LENGTHS.get((seed * 5 % 14) as usize).unwrap_or(&any);
                    let outcome = penstock_sim::calls::allreduce(algorithm, (op, dtype), ranks, elems, seed);
                    outcome.unwrap_or_else(|error| panic!("{error}"));
                }
            }
        }
    }
}

/// By docs/protocol.md a call moves what its slices move, and its steps are those of a slice.
#[test]
fn bytes_and_steps_of_calls_are_what_the_cost_functions_say() {
    let mut seed = 0;
    for algorithm in Algorithm::ALL {
        for (ranks, elems) in
            (1..=17).flat_map(|ranks| [0, 1, 7, 61, 1009, 40_009].map(|elems| (ranks, elems)))
        {
            seed += 1;
            let case = format!("{algorithm:?}, {ranks} ranks, {elems} elements, seed {seed}");
            let count = u64::from(slices(algorithm, elems, 4, ranks));
            let (want, _) = algorithm.message(elems, 4, ranks, count, &Rates::default());
            let outcome =
                penstock_sim::calls::allreduce(algorithm, (Op::Min, Dtype::I32), ranks, elems as usize, seed);
            let report = outcome.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((report.sent, report.received), (want.sent, want.received), "{case}");
            // Parts without elements are not sent, so a chain may be shorter where there are fewer than parts.
            let steps = steps(algorithm, ranks, elems, count as u32);
            assert!(
                steps == want.steps || (elems / count < ranks.into() && steps < want.steps),
                "{steps} steps: {case}"
            );
        }
    }
}

/// The longest chain of messages that wait for each other, in any of a call's pieces.
fn steps(algorithm: Algorithm, ranks: u32, elems: u64, pieces: u32) -> u32 {
    let kind = CallKind::Allreduce { algorithm };
    let shape =
        |me| Shape { kind, ranks, me, elem_bytes: 4, inputs: vec![4 * elems], outputs: vec![4 * elems] };
    let chain = |piece| {
        let plans: Vec<Plan> = (0..ranks).map(|me| shape(me).plan(piece)).collect();
        // By sender, receiver and tag: how many messages come before it, and itself.
        let mut sent = BTreeMap::new();
        let mut at = vec![(0, 0); ranks as usize];
        let done =
            |at: &[(usize, u32)]| at.iter().zip(&plans).all(|((round, _), plan)| *round == plan.stages.len());
        while !done(&at) {
            for (me, plan) in (0..).zip(&plans) {
                let (round, depth) = at[me as usize];
                let Some(doing) = plan.stages.get(round) else { continue };
                for transfer in &doing.sends {
                    sent.insert((me, transfer.peer, transfer.tag), depth + 1);
                }
                let came = doing
                    .receives
                    .iter()
                    .map(|transfer| sent.get(&(transfer.peer, me, transfer.tag)).copied());
                if let Some(came) = came.collect::<Option<Vec<u32>>>() {
                    at[me as usize] = (round + 1, came.into_iter().fold(depth, u32::max));
                }
            }
        }
        sent.into_values().max().unwrap_or(0)
    };
    (0..pieces).map(chain).max().unwrap_or(0)
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

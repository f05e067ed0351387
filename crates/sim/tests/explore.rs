//! Thousands of random schedules, all checkers on. A failure prints its seed and how to replay it.

// How many had losses is worth reading: `cargo test -p penstock-sim --test explore -- --nocapture`.
#![allow(clippy::print_stdout)]

mod support;

use penstock_core::Route;
use penstock_core::layout::Tensor;
use penstock_core::life::Evidence;
use penstock_core::roles::Fold;
use penstock_core::types::Rank;
use penstock_core::way::Algorithm;
use penstock_sim::program::{Instruction, Mishap, Setup};

/// Scenarios per test run, unless PENSTOCK_SIM_SCENARIOS says how many.
const SCENARIOS: u64 = 3_000;

#[test]
fn random_schedules_violate_nothing() {
    let seeds = support::seeds("PENSTOCK_SIM_SCENARIOS", SCENARIOS);
    let (base, scenarios) = (seeds.start, seeds.end - seeds.start);
    let all = support::count(&seeds, counts);
    let [slices, preempted, lost, through] = [0, 1, 2, 3].map(|at| all[at]);
    let (by_scheme, rest) = all[4..].split_at(Algorithm::ALL.len());
    let (by_fault, rest) = rest.split_at(FAULTS);
    let (by_topology, rest) = rest.split_at(APART.len() + 1);
    let (by_groups, by_clients) = rest.split_at(GROUPED.len());
    println!(
        "{scenarios} runs of the seeds from {base} on, {lost} with a loss: {by_fault:?} of each fault, {through} came through"
    );
    // The scenarios would prove nothing if they never did what they are there for.
    assert!(slices > 10 * scenarios, "{slices} slices");
    assert!(preempted > scenarios / 10, "{preempted} runs with preemptions");
    assert!(lost > scenarios / 50 && through > scenarios / 2, "{lost} lost, {through} came through");
    assert!(
        by_scheme.iter().all(|lost| *lost > scenarios / 400),
        "lost in books with each of {:?}: {by_scheme:?}",
        Algorithm::ALL
    );
    assert!(
        by_fault.iter().all(|count| *count > scenarios / 400),
        "ended on {EVIDENCE:?}, or not in spite of a stop: {by_fault:?}"
    );
    assert!(
        by_topology.iter().all(|count| *count > scenarios / 400),
        "workers and servers {APART:?}, one of which was lost: {by_topology:?}"
    );
    assert!(by_groups.iter().all(|count| *count > scenarios / 400), "groups with {GROUPED:?}: {by_groups:?}");
    let (fresh, updated) = by_clients.split_at(CLIENTS.len());
    assert!(
        fresh.iter().all(|count| *count > scenarios / 1000),
        "workers, servers, clients {CLIENTS:?}: {fresh:?}"
    );
    assert!(updated.iter().all(|count| *count > scenarios / 4000), "{CLIENTS:?} that update: {updated:?}");
}

/// What the verdicts on killed, failed, stopped and hanging ranks rest on.
const EVIDENCE: [Evidence; 4] = [Evidence::Ended, Evidence::Own, Evidence::Silent, Evidence::Absent];
/// Each of them, and a stop that all survive.
const FAULTS: usize = EVIDENCE.len() + 1;
/// Workers, and servers apart from them.
const APART: [(u32, u32); 5] = [(4, 4), (4, 2), (4, 1), (3, 2), (1, 1)];
/// Workers, servers apart and clients: workers that sum by themselves, and groups of them. Counted once where owners sum, and once where they
/// update as well. Without servers apart workers own slices: all of them, or the heads of groups.
const CLIENTS: [(u32, u32, u32); 7] =
    [(4, 0, 4), (4, 4, 4), (4, 2, 4), (4, 1, 2), (4, 2, 2), (3, 2, 3), (4, 0, 1)];
/// What befalls scenarios with groups of several ranks; see [`counts_of_groups`].
const GROUPED: [&str; 11] = [
    "equal sizes",
    "uneven sizes",
    "servers apart",
    "ranks that leave",
    "updates",
    "updates and servers apart",
    "a lost head",
    "a lost member",
    "gathers",
    "gathers and ranks that leave",
    "gathers and servers apart",
];
/// The last of the topologies: a server was lost.
const COUNTS: usize = 4 + Algorithm::ALL.len() + FAULTS + APART.len() + 1 + GROUPED.len() + 2 * CLIENTS.len();

/// Slices, and whether there were preemptions, whether a rank was lost, whether all came through; by algorithm whether a rank
/// was lost where a tensor goes by it; by evidence whether it was; and whether all came through though a rank was stopped; by
/// numbers of workers and servers apart whether it has these; whether a server was lost; by what groups do; by [`CLIENTS`].
fn counts(seed: u64) -> [u64; COUNTS] {
    let report = penstock_sim::run(seed).unwrap_or_else(|failure| panic!("{failure}"));
    let lost = report.lost.is_some();
    let mut counts = [0; COUNTS];
    let flags = [report.preemptions > 0, lost, !lost].map(u64::from);
    counts[0] = report.slices;
    counts[1..4].copy_from_slice(&flags);
    let (by_scheme, rest) = counts[4..].split_at_mut(Algorithm::ALL.len());
    let (by_fault, rest) = rest.split_at_mut(FAULTS);
    let (by_topology, rest) = rest.split_at_mut(APART.len() + 1);
    let (by_groups, by_clients) = rest.split_at_mut(GROUPED.len());
    for (count, evidence) in by_fault.iter_mut().zip(EVIDENCE) {
        *count = u64::from(report.lost.is_some_and(|(_, on)| on == evidence));
    }
    let setup = penstock_sim::scenario::draw(seed);
    let stopped = setup.fault.is_some_and(|fault| matches!(fault.what, Mishap::Stop(_)));
    by_fault[EVIDENCE.len()] = u64::from(stopped && !lost);
    let apart = (setup.workers, setup.ranks - setup.workers);
    for (count, topology) in by_topology.iter_mut().zip(APART) {
        *count = u64::from(apart == topology);
    }
    by_topology[APART.len()] = u64::from(report.lost.is_some_and(|(rank, _)| rank >= setup.workers));
    by_groups.copy_from_slice(&counts_of_groups(&setup, report.lost.map(|(rank, _)| Rank(rank))));
    let roles = &setup.books[0].roles;
    let clients = if roles.groups.is_empty() { setup.workers } else { roles.groups.iter().len() as u32 };
    let by_store = setup.books[0].tensors.iter().any(|tensor| tensor.route == Route::STORE);
    let (fresh, updated) = by_clients.split_at_mut(CLIENTS.len());
    let of_its_fold = if roles.rules.fold == Fold::Updated { updated } else { fresh };
    for (count, topology) in of_its_fold.iter_mut().zip(CLIENTS) {
        *count = u64::from(by_store && (apart.0, apart.1, clients) == topology);
    }
    for (count, algorithm) in by_scheme.iter_mut().zip(Algorithm::ALL) {
        let goes_by_it = |tensor: &Tensor| tensor.route == Route::Sum(algorithm);
        *count = u64::from(lost && setup.books.iter().flat_map(|book| &book.tensors).any(goes_by_it));
    }
    counts
}

/// By what there is in [`GROUPED`].
fn counts_of_groups(setup: &Setup, lost: Option<Rank>) -> [u64; GROUPED.len()] {
    let roles = &setup.books[0].roles;
    let sizes: Vec<u32> = roles.groups.iter().map(|group| group.members.count()).collect();
    if sizes.iter().all(|size| *size == 1) {
        return [0; GROUPED.len()];
    }
    let even = sizes.iter().all(|size| *size == sizes[0]);
    let leaves = setup.programs.iter().flatten().any(|i| matches!(i, Instruction::Leave { .. }));
    let updates = roles.rules.fold == Fold::Updated;
    let is_head = |rank| roles.groups.of(rank).map(|group| group.head() == rank);
    let of = |head: bool| lost.and_then(is_head) == Some(head);
    let gathers =
        setup.books.iter().flat_map(|book| &book.tensors).any(|tensor| tensor.route == Route::Gather);
    let apart = setup.ranks > setup.workers;
    let of_gathers = [gathers, gathers && leaves, gathers && apart];
    let [all, leaving, with_servers] = of_gathers;
    let at_servers = updates && apart;
    [even, !even, apart, leaves, updates, at_servers, of(true), of(false), all, leaving, with_servers]
        .map(u64::from)
}

#[test]
fn the_same_seed_is_the_same_run() {
    for seed in 0..50 {
        let (a, b) = (penstock_sim::run_with(seed, None, true), penstock_sim::run_with(seed, None, true));
        let (a, b) = (a.unwrap(), b.unwrap());
        assert_eq!((a.events, a.virtual_ns, a.trace), (b.events, b.virtual_ns, b.trace), "seed {seed}");
    }
}

//! Agreements on the next members: one choice for each epoch, by whom it concerns, and nobody is held up.

// The counts and seeds are worth reading: `cargo test -p penstock-sim --test agreement -- --nocapture`.
#![allow(clippy::print_stdout)]

mod support;

use penstock_sim::agreement::{Omission, every_order, run};

/// Jobs per test run, unless PENSTOCK_SIM_AGREEMENTS says how many.
const JOBS: u64 = 4_000;
/// Seeds to look through for a job in which an omission matters.
const SEEDS: u64 = 20_000;

#[test]
fn every_order_of_three_with_a_loss() {
    // Where one is enough those who do not hear each other may go on apart.
    for enough in [None, Some(1)] {
        every_order_of(3, 0, false, enough);
    }
}

#[test]
#[ignore = "takes long: make explore"]
fn every_order_of_three_with_a_connection_that_breaks() {
    every_order_of(3, 0, true, None);
}

fn every_order_of(members: usize, newcomers: usize, breaks: bool, enough: Option<u32>) {
    let orders = every_order(members, newcomers, breaks, enough, None)
        .unwrap_or_else(|violation| panic!("{violation}"));
    println!("{members} members, {newcomers} newcomers, breaks: {breaks}, enough: {enough:?}: {orders:?}");
}

#[test]
fn one_that_chooses_alone_is_missed() {
    let violation = every_order(3, 0, false, Some(1), Some(Omission::ProposedIsAccepted)).unwrap_err();
    println!("{}", violation.lines().next().unwrap_or_default());
}

#[test]
fn every_order_of_two_and_a_newcomer_with_a_loss() {
    every_order_of(2, 1, false, None);
}

#[test]
#[ignore = "takes long: make explore"]
fn every_order_of_two_and_a_newcomer_with_a_connection_that_breaks() {
    every_order_of(2, 1, true, None);
}

#[test]
fn many_jobs() {
    let seeds = support::seeds("PENSTOCK_SIM_AGREEMENTS", JOBS);
    let jobs = seeds.end - seeds.start;
    let [epochs, lacks, out, admitted] = support::count(&seeds, |seed| {
        let outcome = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        let [lacks, out] = [outcome.lacks, outcome.out].map(u64::from);
        [outcome.epochs as u64, lacks, out, outcome.admitted as u64]
    });
    println!(
        "{jobs} jobs of the seeds from {} on: {epochs} epochs, {lacks} without a quorum, {out} with somebody left out, {admitted} newcomers admitted",
        seeds.start
    );
    assert!(epochs > jobs && lacks > jobs / 20 && out > jobs / 20 && admitted > jobs / 20);
}

#[test]
fn every_rule_is_missed() {
    for omission in [
        Omission::TwoAreEnough,
        Omission::ForgetWhatWasAccepted,
        Omission::AcceptAnything,
        Omission::ReportAnew,
        Omission::GiveUp,
        Omission::PassNothingOn,
        Omission::SayNothingAgain,
        Omission::PassNoEndOn,
        Omission::ProposedIsAccepted,
        Omission::OneHearsIt,
        Omission::AllCountAsWaiting,
    ] {
        let violation = (0..SEEDS).find_map(|seed| run(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {SEEDS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
    }
}

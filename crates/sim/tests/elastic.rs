//! Jobs that lose members and go on: no step is lost, none is applied twice, all that are left have the same bits.

// The counts and seeds are worth reading: `cargo test -p penstock-sim --test elastic -- --nocapture`.
#![allow(clippy::print_stdout)]

mod support;

use penstock_sim::elastic::{Omission, run, run_updates};

/// Jobs per test run, unless PENSTOCK_SIM_ELASTIC says how many.
const JOBS: u64 = 400;
/// Seeds to look through for a job in which an omission matters.
const SEEDS: u64 = 1_000;

#[test]
fn survivors_finish_their_steps_with_the_same_bits() {
    let seeds = support::seeds("PENSTOCK_SIM_ELASTIC", JOBS);
    let jobs = seeds.end - seeds.start;
    let [epochs, given, went_on, admitted] = support::count(&seeds, |seed| {
        let outcome = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        let went_on = u64::from(outcome.went_on && outcome.epochs > 0);
        [outcome.epochs.into(), outcome.given, went_on, outcome.admitted]
    });
    println!(
        "{jobs} jobs of the seeds from {} on: {epochs} epochs, {given} results given, {went_on} went on in another epoch, {admitted} newcomers admitted",
        seeds.start
    );
    assert!(epochs > jobs / 2 && given > jobs / 10 && went_on > jobs / 4 && admitted > jobs / 10);
}

#[test]
fn every_rule_is_missed() {
    for omission in [
        Omission::AnswersInPlace,
        Omission::TakeInAfterTheReport,
        Omission::KeepNothing,
        Omission::GiveNothing,
        Omission::WaitInTheMiddle,
    ] {
        let violation = (0..SEEDS).find_map(|seed| run(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {SEEDS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
    }
}

#[test]
fn what_owners_keep_outlives_the_loss_of_any_one() {
    let seeds = support::seeds("PENSTOCK_SIM_ELASTIC", JOBS);
    let jobs = seeds.end - seeds.start;
    let [epochs, given, states, went_on, admitted, lost] = support::count(&seeds, |seed| {
        let outcome = run_updates(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        let went_on = u64::from(outcome.went_on && outcome.epochs > 0);
        let lost = u64::from(outcome.lost_states);
        [outcome.epochs.into(), outcome.given, outcome.states_given, went_on, outcome.admitted, lost]
    });
    println!(
        "{jobs} jobs of the seeds from {} on: {epochs} epochs, {given} results given, {states} slices given to other keepers, {went_on} \
         went on in another epoch, {admitted} newcomers admitted, {lost} ended with both keepers of something",
        seeds.start
    );
    assert!(
        epochs > jobs / 2 && given > jobs / 10 && states > jobs && went_on > jobs / 4 && admitted > jobs / 10
    );
    assert!(0 < lost && lost < jobs / 4);
}

#[test]
fn every_rule_of_updates_is_missed() {
    for omission in [
        Omission::OwnersAnswer,
        Omission::GiveOldStates,
        Omission::GiveNoStates,
        Omission::SayTheWordOnce,
        Omission::GiveNothing,
    ] {
        let violation = (0..SEEDS).find_map(|seed| run_updates(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {SEEDS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
    }
}

//! Agreements on the next members: one choice for each epoch, by whom it concerns, and nobody is held up.

// The counts and seeds are worth reading: `cargo test -p penstock-sim --test agreement -- --nocapture`.
#![allow(clippy::print_stdout)]

use penstock_sim::agreement::{Omission, every_order, run};

/// Jobs per test run.
const JOBS: u64 = 20_000;

#[test]
fn every_order_of_three_with_a_loss() {
    // Where one is enough those who do not hear each other may go on apart.
    for (breaks, enough) in [(false, None), (true, None), (false, Some(1))] {
        let orders =
            every_order(3, 0, breaks, enough, None).unwrap_or_else(|violation| panic!("{violation}"));
        println!("3 members, breaks: {breaks}, enough: {enough:?}: {orders:?}");
    }
}

#[test]
fn one_that_chooses_alone_is_missed() {
    let violation = every_order(3, 0, false, Some(1), Some(Omission::ProposedIsAccepted)).unwrap_err();
    println!("{}", violation.lines().next().unwrap_or_default());
}

#[test]
fn every_order_of_two_and_a_newcomer_with_a_loss() {
    for breaks in [false, true] {
        let orders = every_order(2, 1, breaks, None, None).unwrap_or_else(|violation| panic!("{violation}"));
        println!("2 members and a newcomer, breaks: {breaks}: {orders:?}");
    }
}

#[test]
fn many_jobs() {
    let (mut epochs, mut lacks, mut out, mut admitted) = (0, 0, 0, 0);
    for seed in 0..JOBS {
        let outcome = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        epochs += outcome.epochs;
        lacks += u64::from(outcome.lacks);
        out += u64::from(outcome.out);
        admitted += outcome.admitted;
    }
    println!(
        "{JOBS} jobs: {epochs} epochs, {lacks} without a quorum, {out} with somebody left out, {admitted} newcomers admitted"
    );
    assert!(epochs as u64 > JOBS && lacks > JOBS / 20 && out > JOBS / 20 && admitted as u64 > JOBS / 20);
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
        let violation = (0..JOBS).find_map(|seed| run(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {JOBS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
    }
}

//! Jobs that lose members and go on: no step is lost, none is applied twice, all that are left have the same bits.

// The counts and seeds are worth reading: `cargo test -p penstock-sim --test elastic -- --nocapture`.
#![allow(clippy::print_stdout)]

use penstock_sim::elastic::{Omission, run};

const JOBS: u64 = 1_000;

#[test]
fn survivors_finish_their_steps_with_the_same_bits() {
    let (mut epochs, mut given, mut went_on, mut admitted) = (0, 0, 0, 0);
    for seed in 0..JOBS {
        let outcome = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        epochs += u64::from(outcome.epochs);
        given += outcome.given;
        went_on += u64::from(outcome.went_on && outcome.epochs > 0);
        admitted += outcome.admitted;
    }
    println!(
        "{JOBS} jobs: {epochs} epochs, {given} results given, {went_on} went on in another epoch, {admitted} newcomers admitted"
    );
    assert!(epochs > JOBS / 2 && given > 100 && went_on > JOBS / 4 && admitted > JOBS / 10);
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
        let violation = (0..JOBS).find_map(|seed| run(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {JOBS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
    }
}

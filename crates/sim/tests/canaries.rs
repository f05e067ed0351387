//! Every checker can fail: with a fault built in, the checker that is there for it finds it.

use penstock_sim::check::Checker;
use penstock_sim::program::{Mishap, Sabotage, Setup};

/// Seeds to look through for a scenario in which the fault matters.
const SEEDS: u64 = 400;

/// And to draw from, for one in which a rank hangs.
const SEEDS_OF_HANGS: u64 = 20_000;

/// What is broken, and who finds it first.
const CANARIES: [(Sabotage, &[Checker]); 19] = [
    (Sabotage::FlipBit, &[Checker::Exact]),
    (Sabotage::DropFrame, &[Checker::NoDeadlock, Checker::Protocol]),
    (Sabotage::CompleteTwice, &[Checker::ExactlyOnce]),
    (Sabotage::FlipPresent, &[Checker::AbsentUntouched]),
    (Sabotage::TouchAbsent, &[Checker::AbsentUntouched]),
    (Sabotage::TouchResult, &[Checker::ResultStays]),
    (Sabotage::ForgetRank, &[Checker::NobodyForgotten]),
    (Sabotage::KeepScratch, &[Checker::NothingLeft]),
    (Sabotage::KeepTensor, &[Checker::NothingLeft]),
    (Sabotage::IgnorePriority, &[Checker::Priority]),
    (Sabotage::IgnoreOrder, &[Checker::FirstInFirstOut]),
    (Sabotage::WideWindow, &[Checker::Window]),
    (Sabotage::WideWindowUnseen, &[Checker::OwnerMemory]),
    (Sabotage::Idle, &[Checker::Window]),
    (Sabotage::ChangeWhileWriting, &[Checker::PayloadStays]),
    (Sabotage::Overlook, &[Checker::Journey]),
    (Sabotage::Miscount, &[Checker::Bytes]),
    (Sabotage::OtherStep, &[Checker::Protocol]),
    (Sabotage::OtherUpdate, &[Checker::Exact]),
];

fn first_failure(sabotage: Sabotage) -> (u64, Checker, String) {
    first_failure_of(0..SEEDS, sabotage)
}

fn first_failure_of(seeds: impl IntoIterator<Item = u64>, sabotage: Sabotage) -> (u64, Checker, String) {
    for seed in seeds {
        if let Err(failure) = penstock_sim::run_with(seed, Some(sabotage), false) {
            return (seed, failure.violation.checker, failure.to_string());
        }
    }
    panic!("{sabotage:?} goes unnoticed");
}

#[test]
fn every_fault_is_found_by_its_checker() {
    for (sabotage, checkers) in CANARIES {
        let (seed, checker, message) = first_failure(sabotage);
        assert!(checkers.contains(&checker), "{sabotage:?} is found by {checker:?}: {message}");
        assert!(message.contains(&format!("replay {seed}")), "a failure says how to replay it: {message}");
    }
}

#[test]
fn a_lost_rank_must_be_named_and_noticed() {
    assert_eq!(first_failure(Sabotage::BlameAnother).1, Checker::LossNamed);
    assert_eq!(first_failure(Sabotage::Deaf).1, Checker::NoDeadlock);
    assert_eq!(first_failure(Sabotage::DropAborts).1, Checker::LossNamed);
}

#[test]
fn who_is_late_must_be_told_by_those_who_know() {
    for (sabotage, in_groups) in [(Sabotage::HideLacking, false), (Sabotage::HideOwners, true)] {
        let matters = |setup: &Setup| {
            let hangs = setup.fault.is_some_and(|fault| fault.what == Mishap::Hang);
            hangs && !(in_groups && setup.books[0].roles.groups.is_empty())
        };
        let seeds = (0..SEEDS_OF_HANGS).filter(|seed| matters(&penstock_sim::scenario::draw(*seed)));
        let (seed, checker, message) = first_failure_of(seeds, sabotage);
        assert_eq!(checker, Checker::LossNamed, "{message}");
        assert!(message.contains(&format!("replay {seed}")), "a failure says how to replay it: {message}");
    }
}

#[test]
fn a_panic_in_a_node_is_a_violation_with_its_seed() {
    let (seed, checker, message) = first_failure(Sabotage::Panic);
    assert_eq!(checker, Checker::Protocol);
    assert!(message.contains(&format!("seed {seed}")) && message.contains("panic"), "{message}");
}

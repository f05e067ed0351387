//! Jobs in which something goes wrong: all end in time, with the right rank named by all. And every rule of
//! life is needed: with one left out, the checkers find it.

// The seeds are worth reading: `cargo test -p penstock-sim --test life -- --nocapture`.
#![allow(clippy::print_stdout)]

mod support;

use penstock_core::life::Evidence;
use penstock_sim::life::{Fault, Omission, run};

/// Jobs per test run, unless PENSTOCK_SIM_LIVES says how many.
const JOBS: u64 = 3_000;
/// Seeds to look through for a job in which an omission matters.
const SEEDS: u64 = 20_000;

/// Kinds of faults.
const FAULTS: usize = 11;

fn number(fault: Fault) -> usize {
    match fault {
        Fault::None => 0,
        Fault::Kill(..) => 1,
        Fault::Raise(..) => 2,
        Fault::Stop(..) => 3,
        Fault::Hang(..) => 4,
        Fault::Skip(..) => 5,
        Fault::Depart(..) => 6,
        Fault::Cut(..) => 7,
        Fault::Reset(..) => 8,
        Fault::Garble(..) => 9,
        Fault::Sleep(..) => 10,
    }
}

#[test]
fn all_ranks_end_in_time_and_name_the_same_rank_and_the_right_one() {
    let seeds = support::seeds("PENSTOCK_SIM_LIVES", JOBS);
    let count = seeds.end - seeds.start;
    println!("{count} jobs, of the seeds from {} on", seeds.start);
    let counts = support::count(&seeds, |seed| {
        let (fault, evidence) = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
        let mut counts = [0; FAULTS + 8];
        counts[number(fault)] += 1;
        evidence.into_iter().for_each(|evidence| counts[FAULTS + evidence as usize] += 1);
        counts
    });
    let (by_fault, by_evidence) = counts.split_at(FAULTS);
    for (fault, jobs) in by_fault.iter().enumerate() {
        assert!(*jobs > count / 50, "{jobs} jobs with fault {fault}");
    }
    for evidence in [
        Evidence::Own,
        Evidence::Frame,
        Evidence::Ended,
        Evidence::Silent,
        Evidence::Departed,
        Evidence::Absent,
        Evidence::Circle,
        Evidence::Unanswered,
    ] {
        let jobs = by_evidence[evidence as usize];
        assert!(jobs > count / 100, "{jobs} jobs ended for {evidence:?}");
    }
}

#[test]
fn every_rule_is_missed() {
    for omission in [
        Omission::SettleAtOnce,
        Omission::KeepTheFirst,
        Omission::PassNothingOn,
        Omission::AskNobody,
        Omission::DoubtNothing,
        Omission::NeverWithdraw,
        Omission::OwnersSayNothing,
        Omission::AllAreBlocked,
        Omission::DeafToEnds,
        Omission::DeafToGoodbyes,
        Omission::NoHeartbeats,
        Omission::NeverAway,
        Omission::NeedEverybody,
        Omission::DeafToProgress,
        Omission::AnythingIsProgress,
        Omission::SlowHeartbeats,
        Omission::BlameAtOnce,
        Omission::WaitForEverybody,
        Omission::AskWhetherItFailed,
        Omission::DeafToNonsense,
        Omission::OneLaneAnswers,
        Omission::HastyGoodbye,
        Omission::NeverItself,
        Omission::DialNobody,
        Omission::DeafFlush,
        Omission::ReachNobody,
        Omission::DeafToSilence,
        Omission::DeafToTheUnreachable,
        Omission::NeedNobody,
        Omission::MissNobody,
        Omission::SettleWithoutStrangers,
        Omission::AskForGoodbyes,
        Omission::CountStops,
        Omission::HeadsSayNothing,
    ] {
        let violation = (0..SEEDS).find_map(|seed| run(seed, Some(omission)).err());
        let violation = violation.unwrap_or_else(|| panic!("{omission:?} goes unnoticed in {SEEDS} jobs"));
        println!("{omission:?}: {}", violation.lines().next().unwrap_or_default());
        assert!(violation.contains("replay with"), "a violation says how to replay it: {violation}");
    }
}

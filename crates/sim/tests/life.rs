//! Jobs in which something goes wrong: all end in time, with the right rank named by all. And every rule of
//! life is needed: with one left out, the checkers find it.

// The seeds are worth reading: `cargo test -p penstock-sim --test life -- --nocapture`.
#![allow(clippy::print_stdout)]

use penstock_core::life::Evidence;
use penstock_sim::life::{Fault, Omission, run};

/// Jobs per test run, unless PENSTOCK_SIM_LIVES says how many.
const JOBS: u64 = 6_000;
/// Seeds to look through for a job in which an omission matters.
const SEEDS: u64 = 20_000;

/// How many jobs had each fault, and ended for each kind of evidence.
type Counts = ([u64; 11], [u64; 8]);

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

fn number_in(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |number| number.parse().expect("a number"))
}

#[test]
fn all_ranks_end_in_time_and_name_the_same_rank_and_the_right_one() {
    // Another base seed explores other jobs; the default makes a test run repeatable.
    let (base, count) = (number_in("PENSTOCK_SIM_SEED", 0), number_in("PENSTOCK_SIM_LIVES", JOBS));
    println!("{count} jobs, of the seeds from {base} on");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let explore = |first: u64| {
        let mut counts: Counts = Default::default();
        for seed in (base + first..base + count).step_by(cores) {
            let (fault, evidence) = run(seed, None).unwrap_or_else(|violation| panic!("{violation}"));
            counts.0[number(fault)] += 1;
            evidence.into_iter().for_each(|evidence| counts.1[evidence as usize] += 1);
        }
        counts
    };
    let parts: Vec<Counts> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores as u64).map(|first| scope.spawn(move || explore(first))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for fault in 0..11 {
        let jobs: u64 = parts.iter().map(|counts| counts.0[fault]).sum();
        assert!(jobs > count / 50, "{jobs} jobs with fault {fault}");
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
        let jobs: u64 = parts.iter().map(|counts| counts.1[evidence as usize]).sum();
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

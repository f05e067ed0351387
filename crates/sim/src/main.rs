//! `penstock-sim`: explores seeds, and replays one with a trace.

// A command's output is its purpose.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::collections::BTreeMap;
use std::process::ExitCode;

const USAGE: &str = "usage: penstock-sim explore [--count N] [--from SEED]
       penstock-sim replay SEED
       penstock-sim lives [--count N] [--from SEED]
       penstock-sim life SEED

explore plays N scenarios (10000), with the seeds from SEED (0) on, and prints the first violation that each checker finds.
replay plays one and prints what happens.
lives plays N jobs in which something goes wrong, and prints what does not hold; life plays one.";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.split_first() {
        Some((&"explore", options)) => parse_options(options).map(|(count, from)| explore(count, from)),
        Some((&"replay", [seed])) => seed.parse().map(replay).map_err(|_| format!("{seed:?} is not a seed")),
        Some((&"lives", options)) => parse_options(options).map(|(count, from)| lives(count, from)),
        Some((&"life", [seed])) => seed.parse().map(life).map_err(|_| format!("{seed:?} is not a seed")),
        _ => Err(USAGE.into()),
    };
    done.unwrap_or_else(|message| {
        eprintln!("{message}");
        ExitCode::from(2)
    })
}

fn parse_options(options: &[&str]) -> Result<(u64, u64), String> {
    let (mut count, mut from) = (10_000, 0);
    for pair in options.chunks(2) {
        let value = pair.get(1).and_then(|value| value.parse().ok());
        match (pair[0], value) {
            ("--count", Some(value)) => count = value,
            ("--from", Some(value)) => from = value,
            _ => return Err(USAGE.into()),
        }
    }
    Ok((count, from))
}

fn explore(count: u64, from: u64) -> ExitCode {
    let (mut slices, mut preemptions, mut losses) = (0, 0, 0);
    let mut violations = BTreeMap::<String, u64>::new();
    for seed in from..from.saturating_add(count) {
        match penstock_sim::run(seed) {
            Ok(report) => {
                slices += report.slices;
                preemptions += report.preemptions;
                losses += u64::from(report.lost.is_some());
            }
            Err(failure) => {
                let seen = violations.entry(format!("{:?}", failure.violation.checker)).or_default();
                *seen += 1;
                if *seen == 1 {
                    println!("{failure}\n");
                }
            }
        }
    }
    println!(
        "{count} scenarios from seed {from}: {slices} slices, {preemptions} preemptions, {losses} lost ranks"
    );
    println!("violations by checker: {violations:?}");
    if violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn replay(seed: u64) -> ExitCode {
    match penstock_sim::run_with(seed, None, true) {
        Ok(report) => {
            report.trace.iter().for_each(|line| println!("{line}"));
            println!("seed {seed}: no violation in {} events, {} ns", report.events, report.virtual_ns);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            failure.trace.iter().for_each(|line| println!("{line}"));
            println!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn lives(count: u64, from: u64) -> ExitCode {
    let mut violations = 0;
    for seed in from..from.saturating_add(count) {
        if let Err(violation) = penstock_sim::life::run(seed, None) {
            violations += 1;
            println!("{}", violation.lines().take(2).collect::<Vec<_>>().join(" "));
        }
    }
    println!("{count} jobs from seed {from}: {violations} violations");
    if violations == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn life(seed: u64) -> ExitCode {
    match penstock_sim::life::run(seed, None) {
        Ok((fault, evidence)) => {
            println!("seed {seed}: {fault:?}; errors rest on {evidence:?}; no violation");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("{violation}");
            ExitCode::FAILURE
        }
    }
}

//! Ranks of one host share memory, say so, and do not trust what is in it.

#![cfg(target_os = "linux")]

mod support;

use parking_lot::Mutex;
use std::fs::{File, OpenOptions, read_to_string};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use support::{job_with, never, on_all};

/// The nonsense of one test would reach the ranks of another.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_report_says_with_whom() {
    let _guard = ONE_AT_A_TIME.lock();
    let engines = job_with(3, |config| config.shared_memory = config.rank != 1);
    let found = on_all(engines, |engine, _| {
        engine.all_gather("meet", b"", &mut never).unwrap();
        let found = engine.report().unwrap().through_memory;
        engine.shutdown(&mut never).unwrap();
        found
    });
    assert_eq!(found, [vec![2], vec![], vec![0]]);
}

/// Where this process has mapped what its ranks share.
fn mappings() -> Vec<u64> {
    let maps = read_to_string("/proc/self/maps").unwrap();
    let shared = maps.lines().filter(|line| line.contains("memfd:penstock"));
    shared.map(|line| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap()).collect()
}

fn write_nonsense(memory: &File) {
    for start in mappings() {
        // What is written and read so far, of both pipes.
        for place in [0, 128, 4096, 4096 + 128] {
            // Nothing is there any more: the engine has closed it.
            let _ = memory.write_at(&(u64::MAX / 3).to_le_bytes(), start + place);
        }
    }
}

#[test]
fn a_peer_that_writes_nonsense_has_broken_the_protocol() {
    let _guard = ONE_AT_A_TIME.lock();
    let memory = OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    let over = AtomicBool::new(false);
    let engines = job_with(2, |config| config.lanes = 1);
    let failures = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                write_nonsense(&memory);
            }
        });
        let failures = on_all(engines, |engine, _| {
            let mut meet = || engine.all_gather("meet", &[0; 5000], &mut never);
            let failure = std::iter::repeat_with(&mut meet).take(1_000_000).find_map(Result::err);
            over.store(true, Ordering::Relaxed);
            format!("{:?}", failure.expect("nonsense is found"))
        });
        over.store(true, Ordering::Relaxed);
        failures
    });
    let finds = |failure: &String| failure.contains("in shared memory cannot be");
    assert!(failures.iter().any(finds), "{failures:?}");
    for failure in failures {
        // Who has found none by then sees that the other has closed the connection: nothing can be said over it any more.
        assert!(finds(&failure) || failure.contains("closed without a goodbye"), "{failure}");
    }
}

//! What lanes cost while nothing happens. One test alone in its process: it counts the processor time of all lanes there.

#![cfg(target_os = "linux")]

mod support;

use penstock_core::cost::Rates;
use std::time::Duration;
use support::{Meeting, job, never, on_all};

/// While lanes are watched.
const WATCHED: Duration = Duration::from_millis(600);
/// The kernel's unit of processor time in /proc (USER_HZ): 10 ms.
const TICK: Duration = Duration::from_millis(10);

/// Processor time that this process's lanes have used.
fn lanes_busy() -> Duration {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        // A thread may end meanwhile.
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else { continue };
        // The name is in brackets, cut to 15 letters; user and system time are the 12th and 13th fields behind it.
        let (name, fields) = stat.rsplit_once(')').unwrap();
        if name.contains("penstock-lane") {
            let times = fields.split_whitespace().skip(11).take(2);
            ticks += times.map(|time| time.parse::<u32>().unwrap()).sum::<u32>();
        }
    }
    TICK * ticks
}

#[test]
fn lanes_sleep_while_nothing_happens_and_after_a_failure() {
    let engines = job(2);
    let meeting = Meeting::of(2);
    on_all(engines, |engine, rank| {
        engine.set_rates(Rates { bytes_per_s: 1e8, ..Rates::default() }).unwrap();
        engine.all_gather("all are connected", b"", &mut never).unwrap();
        meeting.wait();
        let watch = |what: &str| {
            let before = lanes_busy();
            std::thread::sleep(WATCHED);
            let busy = lanes_busy().saturating_sub(before);
            assert!(busy < WATCHED / 4, "lanes were busy for {busy:?} of {WATCHED:?} {what}");
        };
        if rank == 0 {
            watch("with nothing to do");
            engine.abort("ValueError: a bad batch").unwrap();
            watch("after a failure");
        } else {
            let told = engine.all_gather("never comes", b"", &mut never).unwrap_err();
            assert!(format!("{told:?}").contains("a bad batch"), "{told:?}");
        }
        meeting.wait(); // The lanes of both have been watched.
    });
}

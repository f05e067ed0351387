//! Penstock's nodes in virtual time.
//!
//! [`run`] draws a scenario from a seed and plays it: ranks with programs, the nodes that ship, links with bandwidth, delay and
//! stalls, perhaps a rank that is killed, stopped, fails or hangs. Checkers watch all along ([`check::Checker`]). The same seed is the same run, event by event, so a
//! failure's message is all that is needed to replay it.
//!
//! What is simulated: the scheduler, the wire's headers, the sums, the windows. What is not: authentication, system calls, the
//! cost of computing (nodes and sums take no virtual time), loss and retransmission below the byte streams.

pub mod agenda;
pub mod agreement;
pub mod calls;
pub mod chain;
pub mod check;
pub mod elastic;
pub mod life;
pub mod memory;
pub mod network;
pub mod program;
pub mod random;
pub mod scenario;
pub mod world;

use check::Violation;
use memory::{RealMemory, SimMemory};
use penstock_core::life::Evidence;
use program::{Sabotage, Setup};
use world::World;

/// What a run was like.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// How long it took, in virtual time.
    pub virtual_ns: u64,
    /// Events handled.
    pub events: u64,
    /// Slices that ranks submitted and that completed.
    pub slices: u64,
    /// Frames that were queued ahead of others.
    pub preemptions: u64,
    /// Frames sent.
    pub frames: u64,
    /// Payload bytes of exchanges sent, by rank.
    pub sent_bytes: Vec<u64>,
    /// When each rank's program came to its marks.
    pub marks_ns: Vec<Vec<u64>>,
    /// The rank that errors named, if there were any, and on what evidence.
    pub lost: Option<(u32, Evidence)>,
    /// What happened, line by line, if a trace was asked for.
    pub trace: Vec<String>,
}

/// A run that violated what must hold.
#[derive(Debug, Clone)]
pub struct FailedRun {
    /// The seed it was drawn from.
    pub seed: u64,
    /// What was drawn.
    pub scenario: String,
    /// What was violated.
    pub violation: Violation,
    /// When, in virtual time.
    pub at_ns: u64,
    /// What happened until then, if a trace was asked for.
    pub trace: Vec<String>,
}

impl std::fmt::Display for FailedRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Violation { checker, message } = &self.violation;
        writeln!(f, "seed {}: {checker:?} is violated after {} ns: {message}", self.seed, self.at_ns)?;
        writeln!(f, "scenario: {}", self.scenario)?;
        write!(f, "replay with: cargo run -p penstock-sim --release -- replay {}", self.seed)
    }
}

impl std::error::Error for FailedRun {}

/// Draws a scenario from `seed` and plays it over real memory.
///
/// # Errors
/// What was violated, and how to replay it.
pub fn run(seed: u64) -> Result<Report, Box<FailedRun>> {
    run_with(seed, None, false)
}

/// As [`run`], with a fault built in, or with a trace.
///
/// # Errors
/// As [`run`].
pub fn run_with(seed: u64, sabotage: Option<Sabotage>, trace: bool) -> Result<Report, Box<FailedRun>> {
    let mut setup = scenario::draw(seed);
    setup.sabotage = sabotage;
    play::<RealMemory>(setup, trace)
}

/// Plays a setup over a memory of choice. A panic in a node is a violation too.
///
/// # Errors
/// As [`run`].
pub fn play<M: SimMemory>(setup: Setup, trace: bool) -> Result<Report, Box<FailedRun>> {
    let (seed, scenario) = (setup.seed, scenario::describe(&setup));
    let mut world = World::<M>::new(setup, trace);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
    let violation = match result {
        Ok(Ok(())) => return Ok(world.report()),
        Ok(Err(violation)) => violation,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Violation::new(check::Checker::Protocol, format!("panic: {}", text.unwrap_or_default()))
        }
    };
    let Report { virtual_ns, trace, .. } = world.report();
    Err(Box::new(FailedRun { seed, scenario, violation, at_ns: virtual_ns, trace }))
}

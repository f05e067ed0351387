//! A job of engines in one process, over loopback.

// Every test program uses a part of it.
#![allow(dead_code)]

pub(crate) mod meddler;

use parking_lot::{Condvar, Mutex};
use penstock_net::{Engine, EngineConfig};
use std::time::Duration;

/// How long ranks wait for one another outside the job: longer than anything here takes on a busy machine.
const MEETING_MAX: Duration = Duration::from_secs(60);

/// Where the ranks of a test meet without a word over the network, as often as they like.
///
/// A collective does not do for that: who has returned from it knows that the others have come to it, not that they have
/// returned. A rank that then fails or vanishes may be heard of in the middle of it, for a failure beats a result that nobody
/// has looked at.
pub(crate) struct Meeting {
    size: usize,
    /// Ranks that are here, and how often all have met.
    state: Mutex<(usize, u64)>,
    all_here: Condvar,
}

impl Meeting {
    /// Of so many ranks.
    pub(crate) fn of(size: usize) -> Self {
        Self { size, state: Mutex::new((0, 0)), all_here: Condvar::new() }
    }

    /// Returns when all are here.
    ///
    /// # Panics
    /// If one does not come, because it has panicked for instance: a test must not hang.
    pub(crate) fn wait(&self) {
        let mut state = self.state.lock();
        state.0 += 1;
        let round = state.1;
        if state.0 == self.size {
            *state = (0, round + 1);
            self.all_here.notify_all();
            return;
        }
        let late = self.all_here.wait_while_for(&mut state, |state| state.1 == round, MEETING_MAX);
        let here = state.0;
        drop(state);
        assert!(!late.timed_out(), "only {here} of {} ranks came within {MEETING_MAX:?}", self.size);
    }
}

/// Of one rank. A test waits for its timeouts only if it fails.
pub(crate) fn config(rank: u32, size: u32) -> EngineConfig {
    EngineConfig {
        rank,
        size,
        servers: 0,
        bind_host: "127.0.0.1".into(),
        port: 0,
        secret: vec![7; 32],
        job_id: [1; 16],
        slice_bytes: 4096,
        lanes: 2,
        all_lanes: true,
        window_bytes: 0,
        priority: true,
        operation_timeout: Duration::from_secs(20),
        peer_timeout: Duration::from_secs(10),
        congestion_control: "auto".into(),
        encrypt: false,
        shared_memory: true,
        elastic: false,
        handshake_timeout: Duration::from_secs(5),
        observations: 1 << 16,
    }
}

/// Engines that know each other, by rank; `change` is asked about each one's configuration.
pub(crate) fn job_with(size: u32, change: impl Fn(&mut EngineConfig)) -> Vec<Engine> {
    let engines: Vec<Engine> = (0..size)
        .map(|rank| {
            let mut config = config(rank, size);
            change(&mut config);
            Engine::bind(config).unwrap()
        })
        .collect();
    let table: Vec<_> = engines.iter().map(|engine| ("127.0.0.1".to_owned(), engine.port())).collect();
    engines.iter().for_each(|engine| engine.connect(&table).unwrap());
    engines
}

/// The same as `config` says.
pub(crate) fn job(size: u32) -> Vec<Engine> {
    job_with(size, |_| {})
}

/// Runs `rank` on a thread per engine and gives the results by rank. An engine is dropped when its rank returns.
pub(crate) fn on_all<T: Send>(
    engines: Vec<Engine>,
    rank: impl Fn(&Engine, u32) -> T + Send + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0u32..)
            .zip(engines)
            .map(|(number, engine)| scope.spawn(move || rank(&engine, number)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// For waits that nothing interrupts.
pub(crate) fn never() -> bool {
    false
}

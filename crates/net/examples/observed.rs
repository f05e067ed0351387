//! What it costs that observations are kept: two jobs of two ranks in this process, over loopback, one with rings and one without,
//! in turn.
//!
//! ```text
//! cargo run --release -p penstock-net --example observed -- [ROUNDS [SLICE_BYTES]]
//! ```
//! Prints the process's processor time and the wall's per slice and rank, of the fastest round of each job: what other processes do
//! meanwhile only makes rounds slower.
#![allow(clippy::print_stdout)]

use penstock_core::layout::Tensor;
use penstock_core::{BookId, Dtype, Gives, Op, Submission};
use penstock_net::{Engine, EngineConfig, Lent};
use std::time::{Duration, Instant};

const RANKS: u32 = 2;
const SLICES: usize = 1000;

struct Job {
    engines: Vec<(Engine, BookId)>,
    values: Vec<Vec<f32>>,
    step: u32,
    /// Least processor time and wall time of a round, in nanoseconds per slice and rank.
    fastest_ns: [f64; 2],
}

fn cpu_ns() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the system fills the structure that it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

impl Job {
    fn new(slice_bytes: usize, observations: usize) -> Result<Self, Box<dyn std::error::Error>> {
        let config = |rank| EngineConfig {
            rank,
            size: RANKS,
            servers: 0,
            bind_host: "127.0.0.1".into(),
            port: 0,
            secret: vec![0; 32],
            job_id: [0; 16],
            slice_bytes,
            lanes: 1,
            all_lanes: true,
            window_bytes: 0,
            priority: true,
            operation_timeout: Duration::from_secs(120),
            peer_timeout: Duration::from_secs(30),
            congestion_control: "auto".into(),
            elastic: false,
            encrypt: false,
            shared_memory: true,
            handshake_timeout: Duration::from_secs(10),
            observations,
        };
        let bound: Vec<Engine> =
            (0..RANKS).map(|rank| Engine::bind(config(rank))).collect::<Result<_, _>>()?;
        let table: Vec<_> = bound.iter().map(|engine| ("127.0.0.1".to_owned(), engine.port())).collect();
        let values = vec![vec![1f32; SLICES * slice_bytes / 4]; RANKS as usize];
        let mut engines = Vec::new();
        for engine in bound {
            engine.connect(&table)?;
            let tensor = Tensor::new("tensor", 0, Dtype::F32, values[0].len() as u64);
            let book = engine.open_book("book", vec!["layer".into()], vec![tensor], None)?;
            engines.push((engine, book));
        }
        Ok(Self { engines, values, step: 0, fastest_ns: [f64::INFINITY; 2] })
    }

    fn round(&mut self) -> Result<(), Box<dyn std::error::Error>> {
        let (begin, cpu) = (Instant::now(), cpu_ns());
        self.step += 1;
        for ((engine, book), values) in self.engines.iter().zip(&mut self.values) {
            let memory = Lent { address: values.as_mut_ptr() as usize, len_bytes: size_of_val(&values[..]) };
            let (book, step, gives) = (*book, self.step, Gives::Whole(Op::Average));
            let submission = Submission { book, tensor: 0, seq: 0, step, memory, gives };
            // SAFETY: `values` stays, and is left alone, until it is released.
            unsafe { engine.submit(submission, false) }?;
        }
        for (engine, book) in &self.engines {
            engine.wait(*book, &[0], true, &mut || false).map_err(|stop| format!("{stop:?}"))?;
            engine.landed(*book, &[], None, false, &mut || false).map_err(|stop| format!("{stop:?}"))?;
        }
        let slices = f64::from(RANKS) * SLICES as f64;
        let took_ns = [cpu_ns() - cpu, begin.elapsed().as_secs_f64() * 1e9];
        self.fastest_ns = [0, 1].map(|at| self.fastest_ns[at].min(took_ns[at] / slices));
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.first().map_or(Ok(200), |rounds| rounds.parse())?;
    let slice_bytes = arguments.get(1).map_or(Ok(4096), |bytes| bytes.parse())?;
    let mut jobs = [Job::new(slice_bytes, 0)?, Job::new(slice_bytes, 1 << 16)?];
    for round in 0..rounds {
        // Neither is always the first.
        for job in 0..2 {
            jobs[(round + job) % 2].round()?;
        }
    }
    let [without, with] = &jobs;
    for (at, what) in ["processor", "wall"].into_iter().enumerate() {
        let (without, with) = (without.fastest_ns[at], with.fastest_ns[at]);
        println!("{what}: {without:.0} ns per slice and rank without, {with:.0} with");
    }
    for (engine, _) in jobs.iter().flat_map(|job| &job.engines) {
        engine.abort("done")?;
    }
    Ok(())
}

//! How fast slices move between two or more processes, without Python and without computation.
//!
//! ```text
//! cargo run --release -p penstock-net --example throughput -- RANK HOST:PORT,HOST:PORT[,..] copy|average MIB [LANES]
//! ```
//! Run it once per rank. Rank 0 prints one JSON line per round: seconds, bytes of tensor per second, and what the process's
//! CPUs spent per byte. `copy` moves MIB from rank 0 to the others; `average` moves 2 (n-1)/n MIB out of and into each rank.

use penstock_core::layout::Tensor;
use penstock_core::{Dtype, Gives, Op, Submission};
use penstock_net::{Engine, EngineConfig, Lent};
use std::time::{Duration, Instant};

const ROUNDS: u32 = 8;

fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: `getrusage` fills the structure that it is given.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

#[allow(clippy::print_stdout)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, hosts, mode, mib, rest @ ..] = &arguments[..] else {
        return Err("RANK HOST:PORT,HOST:PORT copy|average MIB [LANES]".into());
    };
    let rank: u32 = rank.parse()?;
    let split =
        |address: &str| address.rsplit_once(':').and_then(|(h, p)| Some((h.to_owned(), p.parse().ok()?)));
    let table: Vec<(String, u16)> = hosts.split(',').map(split).collect::<Option<_>>().ok_or("HOST:PORT")?;
    let lanes = rest.first().map_or(Ok(1), |lanes| lanes.parse())?;
    let (bind_host, port) = table[rank as usize].clone();
    let engine = Engine::bind(EngineConfig {
        rank,
        size: u32::try_from(table.len())?,
        servers: 0,
        bind_host,
        port,
        secret: vec![0; 32],
        job_id: [0; 16],
        slice_bytes: rest.get(1).map_or(Ok(512 << 10), |bytes| bytes.parse())?,
        lanes,
        all_lanes: true,
        window_bytes: rest.get(2).map_or(Ok(0), |bytes| bytes.parse())?,
        priority: true,
        operation_timeout: Duration::from_secs(120),
        peer_timeout: Duration::from_secs(30),
        congestion_control: "auto".into(),
        encrypt: false,
        shared_memory: true,
        elastic: false,
        handshake_timeout: Duration::from_secs(10),
        observations: 1 << 16,
    })?;
    engine.connect(&table)?;
    let mut values = vec![rank as f32 + 1.0; mib.parse::<usize>()? << 18];
    let tensors = vec![Tensor::new("tensor", 0, Dtype::F32, values.len() as u64)];
    let book = engine.open_book("throughput", vec!["layer".into()], tensors, None)?;
    let (op, absent) = if mode == "copy" { (Op::Copy, rank != 0) } else { (Op::Average, false) };
    let address = values.as_mut_ptr() as usize;
    let len_bytes = std::mem::size_of_val(&values[..]);
    let stop = |stop| format!("{stop:?}");
    for round in 0..ROUNDS {
        engine.all_gather("begin", b"", &mut || false).map_err(stop)?;
        let (begin, cpu) = (Instant::now(), cpu_seconds());
        // SAFETY: `values` lives until the end of `main` and is not touched before it is released.
        unsafe {
            engine.submit(
                Submission {
                    book,
                    tensor: 0,
                    seq: 0,
                    step: round,
                    memory: Lent { address, len_bytes },
                    gives: Gives::unless_absent(op, absent),
                },
                false,
            )
        }?;
        engine.wait(book, &[0], true, &mut || false).map_err(stop)?;
        let cpus =
            engine.all_gather("end", &(cpu_seconds() - cpu).to_le_bytes(), &mut || false).map_err(stop)?;
        let seconds = begin.elapsed().as_secs_f64();
        let cpus: Vec<f64> =
            cpus.iter().map(|b| f64::from_le_bytes(b[..].try_into().unwrap_or_default())).collect();
        if rank == 0 {
            let bytes = len_bytes as f64;
            println!(
                r#"{{"mode": "{mode}", "bytes": {len_bytes}, "seconds": {seconds:.4}, "bytes_per_s": {:.0}, "cpu_s_per_gib": {:.3?}}}"#,
                bytes / seconds,
                cpus.iter().map(|cpu| cpu / bytes * f64::from(1 << 30)).collect::<Vec<_>>()
            );
        }
    }
    engine.shutdown(&mut || false).map_err(stop)?;
    Ok(())
}

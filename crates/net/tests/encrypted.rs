//! Encrypted jobs over loopback: the same results, and whatever somebody in between does to a record is noticed.

mod support;

use penstock_core::layout::Tensor;
use penstock_core::{Dtype, Gives, Op, Submission};
use penstock_net::{Engine, Lent, Stop};
use std::time::Duration;
use support::meddler::{Meddler, Meddling};
use support::{Meeting, config, job_with, never, on_all};

const ELEMS: usize = 20_000;

fn open(engine: &Engine) {
    let tensor = Tensor::new("t", 0, Dtype::F32, ELEMS as u64);
    assert_eq!(engine.open_book("gradients", vec!["layer".into()], vec![tensor], None).unwrap(), 0);
}

/// One step: small whole numbers, whose average is exact.
fn step(engine: &Engine, (rank, size): (u32, u32), step: u32, memory: &mut [f32]) -> Result<(), Stop> {
    let one = |rank: u32, at: usize| ((at as u32 * 31 + step * 7 + rank * 5) % 1024) as f32;
    memory.iter_mut().enumerate().for_each(|(at, number)| *number = one(rank, at));
    let lent = Lent { address: memory.as_mut_ptr() as usize, len_bytes: size_of_val(memory) };
    let submission =
        Submission { book: 0, tensor: 0, seq: 0, step, memory: lent, gives: Gives::Whole(Op::Average) };
    // SAFETY: the memory is the rank's, which waits for its token, or for the end of its engine.
    unsafe { engine.submit(submission, false) }.map_err(|failure| Stop::Failed(Box::new(failure)))?;
    engine.wait(0, &[0], true, &mut never)?;
    for (at, number) in memory.iter().enumerate() {
        let sum: f32 = (0..size).map(|rank| one(rank, at)).sum();
        assert_eq!(*number, sum / size as f32, "step {step}, rank {rank}, element {at}");
    }
    Ok(())
}

#[test]
fn sums_are_what_they_are_without() {
    for shared_memory in [false, true] {
        let engines = job_with(3, |config| (config.encrypt, config.shared_memory) = (true, shared_memory));
        on_all(engines, |engine, rank| {
            open(engine);
            let mut memory = vec![0.0; ELEMS];
            (1..20).for_each(|number| step(engine, (rank, 3), number, &mut memory).unwrap());
            engine.shutdown(&mut never).unwrap();
        });
    }
}

/// What both ranks say in the end of a job in which record `number` is meddled with.
fn meddled(kind: Meddling, number: u64) -> Vec<String> {
    let bind = |rank| {
        let config = config(rank, 2);
        let timeout = Duration::from_secs(4);
        let config = penstock_net::EngineConfig {
            encrypt: true,
            shared_memory: false,
            lanes: 1,
            peer_timeout: timeout,
            ..config
        };
        Engine::bind(config).unwrap()
    };
    let engines: Vec<Engine> = (0..2).map(bind).collect();
    let ports: Vec<u16> = engines.iter().map(Engine::port).collect();
    let meddler = Meddler::before(&ports, kind, vec![number]);
    let table: Vec<_> = meddler.doors().iter().map(|port| ("127.0.0.1".to_owned(), *port)).collect();
    engines.iter().for_each(|engine| engine.connect(&table).unwrap());
    let over = Meeting::of(2);
    on_all(engines, |engine, rank| {
        let mut memory = vec![0.0; ELEMS];
        open(engine);
        let end = (1..100_000).find_map(|number| step(engine, (rank, 2), number, &mut memory).err());
        // Nobody is gone before both have noticed.
        over.wait();
        match end.expect("it is noticed") {
            Stop::Failed(failure) => failure.to_string(),
            Stop::Interrupted => unreachable!("nothing interrupts"),
        }
    })
}

/// Of each kind; more by hand: `ENCRYPTED_RUNS=250 cargo test --release -p penstock-net --test encrypted`.
fn runs() -> u64 {
    std::env::var("ENCRYPTED_RUNS").map_or(2, |runs| runs.parse().expect("a number"))
}

#[test]
fn whatever_is_done_to_a_record_is_noticed_and_said() {
    let mut noticed = 0;
    for kind in [Meddling::Flip, Meddling::Drop, Meddling::Repeat, Meddling::Swap] {
        for run in 0..runs() {
            // From the first record on; by then books have been opened.
            let said = meddled(kind, 5 + run * 13 % 400);
            assert!(
                said.iter().any(|text| text.contains("is not what it sent")),
                "{kind:?}, run {run}: {said:?}"
            );
            noticed += 1;
        }
    }
    assert_eq!(noticed, 4 * runs());
}

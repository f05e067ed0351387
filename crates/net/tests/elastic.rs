//! Real sockets, engines in one process: members are lost at any moment, and the others go on with the same bits.
//!
//! Each rank submits its tensors in an order of its own, and applies each result when it comes. Gradients are whole numbers, so that
//! every average is exact, and shows over whom it is.

mod support;

use parking_lot::Mutex;
use penstock_core::layout::Tensor;
use penstock_core::membership::RoundsOver;
use penstock_core::{BookId, Dtype, Gives, Op, Rank, Submission, TensorId};
use penstock_net::{Engine, EngineConfig, Failure, Lent, Stop, Until};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use support::meddler::{Meddler, Meddling};
use support::{config, never, on_all};

const STEPS: u32 = 12;
const ELEMS: [usize; 3] = [9_000, 700, 5_000];
/// Of a wait within which everything must have come on a busy machine, two losses on the way: each may take twice the peer timeout.
const PATIENCE: Duration = Duration::from_secs(30);

/// Deterministic, and different for all.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

fn gradient(rank: u32, tensor: usize, step: u32) -> Vec<f32> {
    let mut draw = Draw(u64::from(rank) << 40 | (tensor as u64) << 20 | u64::from(step));
    draw.below(2);
    (0..ELEMS[tensor]).map(|_| draw.below(1 << 16) as f32).collect()
}

fn average(members: &[u32], tensor: usize, step: u32) -> Vec<f32> {
    let mut sum = vec![0.0; ELEMS[tensor]];
    for rank in members {
        sum.iter_mut().zip(gradient(*rank, tensor, step)).for_each(|(sum, one)| *sum += one);
    }
    let count = members.len() as f32;
    sum.into_iter().map(|sum| sum / count).collect()
}

/// A parameter and the step that it has come to.
#[derive(Clone, PartialEq, Debug)]
struct Param {
    values: Vec<f32>,
    step: u32,
}

struct Job {
    seed: u64,
    /// The members of each epoch that anybody has seen.
    epochs: Mutex<BTreeSet<Vec<u32>>>,
}

/// What somebody between the ranks does, with the records that this is done to.
type Between = Option<(Meddling, Vec<u64>)>;

/// By rank; `change` is asked about each one's configuration.
fn elastic(size: u32, change: impl Fn(&mut EngineConfig)) -> Vec<Engine> {
    let job_id = new_job_id();
    let bind = |rank| {
        let peer_timeout = Duration::from_secs(4);
        let mut config = EngineConfig { elastic: true, peer_timeout, job_id, ..config(rank, size) };
        change(&mut config);
        Engine::bind(config).unwrap()
    };
    (0..size).map(bind).collect()
}

/// Of one job alone: who is lost is dialled again, and its port may have become that of another job, in another process.
fn new_job_id() -> [u8; 16] {
    static JOBS: AtomicU32 = AtomicU32::new(0);
    let (process, job) = (std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    (u128::from(process) << 32 | u128::from(job)).to_le_bytes()
}

fn table(ports: &[u16]) -> Vec<(String, u16)> {
    ports.iter().map(|port| ("127.0.0.1".to_owned(), *port)).collect()
}

/// Where all lanes, and then all councils, are to be reached.
fn ports(engines: &[Engine]) -> Vec<u16> {
    let councils = engines.iter().map(|engine| engine.council_port().unwrap());
    engines.iter().map(Engine::port).chain(councils).collect()
}

/// What a rank does first.
fn begin(engine: &Engine, lanes: &[(String, u16)], councils: &[(String, u16)], enough: Option<u32>) {
    engine.connect(lanes).unwrap();
    engine.go_on_after_losses(councils, enough, None).unwrap();
    let tensors = ELEMS
        .iter()
        .enumerate()
        .map(|(at, elems)| Tensor::new(format!("t{at}"), at as u32, Dtype::F32, *elems as u64));
    let layers = (0..ELEMS.len()).map(|at| format!("layer {at}")).collect();
    assert_eq!(engine.open_book("gradients", layers, tensors.collect(), None).unwrap(), 0);
}

fn job(size: u32, enough: Option<u32>, between: &Between) -> (Vec<Engine>, Option<Meddler>) {
    let engines = elastic(size, |config| {
        // Records are for who can tell them apart; connections may be ended by anybody.
        config.encrypt = between.as_ref().is_some_and(|(kind, _)| *kind != Meddling::Reset);
        config.shared_memory = between.is_none();
    });
    let mut ports = ports(&engines);
    let meddler = between.clone().map(|(kind, at)| Meddler::before(&ports, kind, at));
    if let Some(meddler) = &meddler {
        ports = meddler.doors().to_vec();
    }
    let (lanes, councils) = ports.split_at(size as usize);
    let (lanes, councils) = (table(lanes), table(councils));
    engines.iter().for_each(|engine| begin(engine, &lanes, &councils, enough));
    (engines, meddler)
}

fn submit(engine: &Engine, tensor: usize, step: u32, memory: &mut [f32]) -> Result<u64, Failure> {
    let memory = Lent { address: memory.as_mut_ptr() as usize, len_bytes: size_of_val(memory) };
    let gives = Gives::Whole(Op::Average);
    let submission =
        Submission { book: 0 as BookId, tensor: tensor as TensorId, seq: 0, step, memory, gives };
    // SAFETY: the memory is the rank's, which waits for its token, or for the end of its engine.
    unsafe { engine.submit(submission, false) }
}

/// Waits for a result.
fn land(engine: &Engine, tensor: usize) -> Result<(), Stop> {
    let ids = [tensor as TensorId];
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < PATIENCE, "tensor {tensor} does not come: {:?}", engine.members());
        let patience = Duration::from_millis(500);
        let until = Until { least_bytes: &[4 * ELEMS[tensor] as u64], patience };
        let landed = engine.landed(0, &ids, Some(until), true, &mut never)?;
        if landed.complete == ids {
            assert_eq!(landed.bytes, [4 * ELEMS[tensor] as u64], "all contribute");
            return Ok(());
        }
    }
}

/// The tensors of a step, one after the other.
fn make_step(engine: &Engine, rank: u32, step: u32, memory: &mut [Vec<f32>]) -> Result<(), Stop> {
    for (tensor, memory) in memory.iter_mut().enumerate() {
        *memory = gradient(rank, tensor, step);
        submit(engine, tensor, step, memory)?;
        land(engine, tensor)?;
        engine.wait(0, &[tensor as TensorId], true, &mut never)?;
    }
    Ok(())
}

impl Job {
    fn note(&self, engine: &Engine) {
        let log = engine.membership_log().into_iter();
        self.epochs.lock().extend(log.map(|entry| entry.members.iter().map(|rank| rank.0).collect()));
    }

    /// Each slice is the average over the members of an epoch.
    fn check(&self, engine: &Engine, rank: u32, tensor: usize, step: u32, values: &[f32]) {
        self.note(engine);
        let epochs = self.epochs.lock().clone();
        let averages: Vec<_> = epochs.iter().map(|members| average(members, tensor, step)).collect();
        let book = engine.layout(0).unwrap();
        for slice in book.slices_of(tensor as TensorId) {
            let at = &book.slices[slice as usize];
            let first = at.offset_bytes as usize / 4;
            let range = first..first + at.len_bytes as usize / 4;
            assert!(
                averages.iter().any(|all| all[range.clone()] == values[range.clone()]),
                "seed {}: rank {rank}, slice {slice} of step {step} is the average over none of {epochs:?}",
                self.seed
            );
        }
    }

    /// What a rank trains until it has made all steps, or `dies` after so many submissions.
    fn train(
        &self,
        engine: &Engine,
        params: &mut [Param],
        rank: u32,
        dies: Option<u32>,
        memory: &mut [Vec<f32>],
    ) -> Result<(), Stop> {
        let mut draw = Draw(self.seed << 8 | u64::from(rank));
        let mut submitted = 0;
        for step in 1..=STEPS {
            let mut order: Vec<usize> = (0..ELEMS.len()).collect();
            order.swap(0, draw.below(3) as usize);
            for tensor in order.iter().copied() {
                memory[tensor] = gradient(rank, tensor, step);
                submit(engine, tensor, step, &mut memory[tensor])?;
                submitted += 1;
                if dies == Some(submitted) {
                    std::thread::sleep(Duration::from_micros(draw.below(2000)));
                    return Ok(());
                }
            }
            for tensor in order {
                land(engine, tensor)?;
                self.check(engine, rank, tensor, step, &memory[tensor]);
                let param = &mut params[tensor];
                param.values.iter_mut().zip(&memory[tensor]).for_each(|(p, g)| *p = *p * 0.5 + g);
                param.step = step;
                engine.wait(0, &[tensor as TensorId], true, &mut never)?;
                // What the program does with its memory from here on harms nobody.
                memory[tensor].fill(-1.0);
            }
        }
        Ok(())
    }
}

/// Plays a job in which `deaths` ranks are lost; what the others have in the end.
fn play(seed: u64, size: u32, deaths: u32, enough: Option<u32>) -> Vec<Result<Vec<Param>, Failure>> {
    play_behind(seed, size, deaths, enough, &None)
}

/// The same with somebody between the ranks.
fn play_behind(
    seed: u64,
    size: u32,
    deaths: u32,
    enough: Option<u32>,
    between: &Between,
) -> Vec<Result<Vec<Param>, Failure>> {
    let mut draw = Draw(seed);
    draw.below(2);
    let mut dies = vec![None; size as usize];
    while dies.iter().flatten().count() < deaths as usize {
        let most = STEPS * ELEMS.len() as u32;
        dies[draw.below(u64::from(size)) as usize] = Some(1 + draw.below(u64::from(most)) as u32);
    }
    let job = Job { seed, epochs: Mutex::new(BTreeSet::from([(0..size).collect()])) };
    let run = |engine: Engine, rank: u32| {
        let mut params: Vec<Param> =
            ELEMS.iter().map(|elems| Param { values: vec![0.0; *elems], step: 0 }).collect();
        // Until the engine has ended: it may be written to.
        let mut memory: Vec<Vec<f32>> = ELEMS.iter().map(|elems| vec![0.0; *elems]).collect();
        let death = dies[rank as usize];
        let outcome = job.train(&engine, &mut params, rank, death, &mut memory);
        if death.is_some() {
            // As a process that is gone: nobody is told anything.
            drop(engine);
            return None;
        }
        let ended = outcome.and_then(|()| engine.shutdown(&mut never));
        Some(ended.map(|()| params).map_err(|stop| match stop {
            Stop::Failed(failure) => *failure,
            Stop::Interrupted => unreachable!("nothing interrupts"),
        }))
    };
    let (engines, _meddler) = self::job(size, enough, between);
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            (0..).zip(engines).map(|(rank, engine)| scope.spawn(move || run(engine, rank))).collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    })
}

fn all_alike(seed: u64, outcomes: &[Result<Vec<Param>, Failure>]) {
    let params: Vec<_> = outcomes
        .iter()
        .map(|outcome| outcome.as_ref().unwrap_or_else(|failure| panic!("seed {seed}: {failure}")))
        .collect();
    for (rank, of) in params.iter().enumerate() {
        assert!(of.iter().all(|param| param.step == STEPS), "seed {seed}: survivor {rank} has lost a step");
        assert_eq!(of, &params[0], "seed {seed}: survivors differ");
    }
}

#[test]
fn nobody_is_lost() {
    let outcomes = play(0, 3, 0, None);
    assert_eq!(outcomes.len(), 3);
    all_alike(0, &outcomes);
}

/// Of each kind; more by hand: `ELASTIC_JOBS=500 cargo test --release -p penstock-net --test elastic`.
fn jobs() -> u64 {
    std::env::var("ELASTIC_JOBS").map_or(10, |jobs| jobs.parse().expect("a number"))
}

#[test]
fn survivors_of_a_loss_go_on_with_the_same_bits() {
    for seed in 1..=jobs() {
        let outcomes = play(seed, 4, 1, None);
        assert_eq!(outcomes.len(), 3);
        all_alike(seed, &outcomes);
    }
}

#[test]
fn survivors_of_several_losses_go_on_with_the_same_bits() {
    for seed in 1..=jobs() {
        let outcomes = play(seed << 20, 6, 2, None);
        assert_eq!(outcomes.len(), 4);
        all_alike(seed << 20, &outcomes);
    }
}

#[test]
fn one_that_may_go_on_alone_does() {
    for seed in 1..=jobs() / 2 {
        let outcomes = play(seed << 40, 3, 2, Some(1));
        assert_eq!(outcomes.len(), 1);
        all_alike(seed << 40, &outcomes);
    }
}

#[test]
fn too_few_end_and_say_so() {
    let outcomes = play(7 << 50, 2, 1, None);
    let text = outcomes[0].as_ref().map_or_else(Failure::to_string, |_| "it went on".into());
    assert!(text.contains("too few members are left") && text.contains("must agree (ranks_min)"), "{text}");
}

/// Frames and records that are meddled with: anywhere from the first steps on, among some thousands.
fn drawn(seed: u64, count: u64) -> Vec<u64> {
    let mut draw = Draw(seed);
    draw.below(2);
    (0..count).map(|_| 40 + draw.below(900)).collect()
}

#[test]
fn connections_that_end_while_both_ends_live_lose_nobody_and_nothing() {
    for seed in 1..=jobs() / 2 {
        let between = Some((Meddling::Reset, drawn(seed << 8, 2)));
        let outcomes = play_behind(seed << 8, 3, 0, None, &between);
        assert_eq!(outcomes.len(), 3, "seed {seed}");
        all_alike(seed << 8, &outcomes);
    }
}

#[test]
fn records_that_were_changed_on_the_way_lose_nobody_and_nothing() {
    for seed in 1..=jobs() / 2 {
        let kinds = [Meddling::Flip, Meddling::Drop, Meddling::Repeat, Meddling::Swap];
        let between = Some((kinds[seed as usize % kinds.len()], drawn(seed << 9, 2)));
        let outcomes = play_behind(seed << 9, 3, 0, None, &between);
        assert_eq!(outcomes.len(), 3, "seed {seed}");
        all_alike(seed << 9, &outcomes);
    }
}

#[test]
fn one_whose_program_ends_gives_what_others_lack_and_is_waited_for_by_nobody() {
    for size in [3, 4] {
        // Far longer than anybody waits here.
        let engines = elastic(size, |config| config.peer_timeout = 2 * PATIENCE);
        let ports = table(&ports(&engines));
        let (lanes, councils) = ports.split_at(size as usize);
        engines.iter().for_each(|engine| begin(engine, lanes, councils, None));
        let logs = on_all(engines, |engine, rank| {
            let mut memory = vec![Vec::new(); ELEMS.len()];
            let steps = if [1, 2].contains(&rank) { 4 } else { 2 };
            for step in 1..=steps {
                make_step(engine, rank, step, &mut memory).unwrap();
            }
            if rank == 3 {
                return Vec::new(); // it is lost
            }
            engine.shutdown(&mut never).unwrap();
            engine.membership_log().into_iter().map(|entry| entry.members).collect()
        });
        for log in &logs[1..3] {
            assert_eq!(log.last(), Some(&vec![Rank(1), Rank(2)]), "{logs:?}");
            assert!(log.len() < size as usize, "{logs:?}");
        }
    }
}

#[test]
fn a_connection_that_can_never_be_made_holds_nobody_up_for_ever() {
    let engines = elastic(2, |config| {
        (config.peer_timeout, config.shared_memory) = (Duration::from_secs(1), false);
    });
    let ports = table(&ports(&engines));
    let (lanes, councils) = ports.split_at(2);
    for (rank, engine) in engines.iter().enumerate() {
        // Where nobody listens, by its own word: there its lanes of later epochs are looked for.
        let mut councils = councils.to_vec();
        councils[rank].0 = "127.0.0.9".into();
        begin(engine, lanes, &councils, None);
    }
    let texts = on_all(engines, |engine, rank| {
        if rank == 0 {
            engine.knock(7).unwrap(); // which ends an epoch
        }
        let mut memory = vec![Vec::new(); ELEMS.len()];
        let stop = (1..).find_map(|step| make_step(engine, rank, step, &mut memory).err());
        let _ = engine.shutdown(&mut never);
        match stop {
            Some(Stop::Failed(failure)) => failure.to_string(),
            stop => panic!("{stop:?}"),
        }
    });
    assert!(texts.iter().all(|text| text.contains("too few members are left")), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("could not be connected to")), "{texts:?}");
}

/// As a replay has it: of the second step every other slice of the first tensor was over before the loss, nothing else.
#[test]
fn a_rank_that_withholds_rounds_is_lost_at_these_slices() {
    let size = 3;
    let (engines, _) = job(size, None, &None);
    let book = engines[0].layout(0).unwrap();
    let first = book.slices_of(0);
    assert!(first.len() > 2);
    let of_slice = |slice: u32| if first.contains(&slice) { 2 - slice % 2 } else { 1 };
    let over: Vec<u32> = (0..book.slices.len() as u32).map(of_slice).collect();
    let rounds: RoundsOver = vec![(0, over.iter().map(|seq| (1, *seq)).collect())];
    engines[2].withhold(&rounds).unwrap();
    assert!(engines[2].withhold(&rounds).is_err(), "said before");
    let ready = AtomicU32::new(0);
    let run = |engine: Engine, rank: u32| {
        let began = Instant::now();
        let mut memory = vec![Vec::new(); ELEMS.len()];
        make_step(&engine, rank, 1, &mut memory).unwrap();
        for (tensor, memory) in memory.iter_mut().enumerate() {
            *memory = gradient(rank, tensor, 2);
            submit(&engine, tensor, 2, memory).unwrap();
        }
        let pause = || {
            assert!(began.elapsed() < PATIENCE, "rank {rank} waits for ever");
            std::thread::sleep(Duration::from_millis(1));
        };
        if rank == 2 {
            while ready.load(Ordering::SeqCst) < 2 {
                pause();
            }
            drop(engine); // as a process that is gone
            return None;
        }
        while !engine.has_come_to(&rounds).unwrap() {
            pause();
        }
        ready.fetch_add(1, Ordering::SeqCst);
        for tensor in 0..ELEMS.len() {
            land(&engine, tensor).unwrap();
            engine.wait(0, &[tensor as TensorId], true, &mut never).unwrap();
        }
        let log = engine.membership_log();
        engine.shutdown(&mut never).unwrap();
        Some((memory, log))
    };
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> =
            (0..size).zip(engines).map(|(rank, engine)| scope.spawn(move || run(engine, rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (memory, log) in outcomes.into_iter().flatten() {
        let last = log.last().unwrap();
        assert_eq!((&last.among, &last.members), (&vec![Rank(0), Rank(1)], &vec![Rank(0), Rank(1)]));
        let of_slices = |(slices, seq): &(u32, u32)| vec![*seq; *slices as usize];
        assert_eq!(last.rounds[0].1.iter().flat_map(of_slices).collect::<Vec<u32>>(), over);
        for (tensor, values) in memory.iter().enumerate() {
            let (all, left) = (average(&[0, 1, 2], tensor, 2), average(&[0, 1], tensor, 2));
            for slice in book.slices_of(tensor as TensorId) {
                let at = &book.slices[slice as usize];
                let begin = at.offset_bytes as usize / 4;
                let range = begin..begin + at.len_bytes as usize / 4;
                let expected = if over[slice as usize] == 2 { &all } else { &left };
                assert_eq!(values[range.clone()], expected[range], "slice {slice}");
            }
        }
    }
}

//! What does not wait for everybody: contributions one by one, perhaps with bounded staleness, and rounds that leave out who is late.
//!
//! A rank contributes 1 where its own elements are and 0 elsewhere. So a value says of each rank how often it is in it.

use super::Bench;
use penstock_core::exchange::Field;
use penstock_core::layout::{Book, Tensor};
use penstock_core::node::{Action, Event};
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::roles::{
    Answered, ClientGroup, Fold, Groups, MustBeIn, Roles, Rules, Staleness, Stragglers,
};
use penstock_core::types::{Dtype, Rank, Seq, SliceId};
use penstock_core::wire::Op;
use penstock_core::{Members, Slicing};
use penstock_sim::memory::{RealMemory, SimMemory};
use penstock_sim::random::Random;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Two slices and a little more.
const ELEMS: usize = 600;
/// More than there are workers; divides a slice's elements.
const PERIOD: usize = 16;
/// Adds what is contributed: the sum is the gradient of a value that goes up.
const ADD: Update = Update {
    optimizer: Optimizer {
        lr: 1.0,
        weight_decay: 0.0,
        maximize: true,
        rule: Rule::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false },
    },
    factor: 1.0,
};

fn one_of(rank: u32) -> Vec<u8> {
    let number = |at: usize| if at % PERIOD == rank as usize { 1f32 } else { 0.0 };
    (0..ELEMS).flat_map(|at| number(at).to_le_bytes()).collect()
}

/// Of each slice in a rank's memory, what it says of each worker; the same all over the slice.
fn by_worker(bench: &Bench, rank: u32, book: &Book, slice: SliceId) -> Vec<f32> {
    let bytes = bench.memories[rank as usize].to_bytes().unwrap();
    let at = &book.slices[slice as usize];
    let range = at.offset_bytes as usize..at.offset_bytes as usize + at.len_bytes as usize;
    let numbers: Vec<f32> =
        bytes[range].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    for period in numbers.chunks(PERIOD) {
        assert_eq!(period, &numbers[..period.len()], "rank {rank}: slice {slice} is torn");
    }
    numbers[..PERIOD].to_vec()
}

/// Of any sizes, and any ranks together.
fn groups_of(workers: u32, random: &mut Random) -> Groups {
    let count = random.between(1, u64::from(workers) + 1);
    let places: Vec<u64> = (0..workers).map(|_| random.below(count)).collect();
    let group =
        |number: u64| (0..workers).filter(|rank| places[*rank as usize] == number).map(Rank).collect();
    Groups::of_members((0..count).map(group).collect::<Vec<Members>>())
}

/// A job of workers that are alike or have servers apart, in groups or not; its book, and how many are workers. Those who keep something
/// begin with 0. Rules are for the clients: all workers, or the heads of groups.
fn job(
    random: &mut Random,
    in_groups: bool,
    rules: impl Fn(Members) -> Rules,
) -> (Bench, Arc<Book>, u32, String) {
    let workers = random.between(1, 6) as u32;
    let servers = random.pick(&[0, 0, 1, 3]);
    let members = Members::all(workers + servers);
    let groups = if in_groups { groups_of(workers, random) } else { Groups::default() };
    let clients: Members =
        if in_groups { groups.iter().map(ClientGroup::head).collect() } else { Members::all(workers) };
    let owners =
        if servers == 0 { clients.clone() } else { (workers..workers + servers).map(Rank).collect() };
    let roles = Roles { members, owners, rules: rules(clients), groups };
    let tensor = Tensor::new("w", 0, Dtype::F32, ELEMS as u64);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::deal("model", vec!["layer".into()], vec![tensor], &roles, slicing).unwrap());
    let mut bench = Bench::new(&book, workers + servers);
    let name = format!("{:?}", book.roles);
    if book.roles.rules.fold == Fold::Fresh {
        return (bench, book, workers, name);
    }
    let zeros = RealMemory::tensor(4 * ELEMS);
    zeros.write(|bytes| bytes.fill(0));
    for rank in 0..workers + servers {
        bench.nodes[rank as usize].load(0, 0, (Field::Value, 0), &zeros).unwrap();
        for slice in bench.nodes[rank as usize].kept(0) {
            if book.roles.rules.fold == Fold::Updated {
                bench.step(rank, Event::Order { book: 0, slice, update: ADD }).unwrap();
            }
        }
    }
    (bench, book, workers, name)
}

/// Where a worker's program is.
#[derive(Default)]
struct Worker {
    seq: Seq,
    pushes: u32,
    /// Pushes, and questions in the place of one.
    steps: u32,
    /// What it waits for is a value.
    asks: bool,
    /// What it last got, by slice.
    last: BTreeMap<SliceId, Vec<f32>>,
}

/// Pushes and questions in turn, as fast as chance says; one worker rests before its last push until nothing moves any more. A group
/// goes from call to call together, and has one clock. Where pushes are answered, a question may stand for a push of a step.
fn one_by_one(seed: u64) {
    let random = &mut Random::new(seed);
    let fold = random.pick(&[Fold::Kept, Fold::Updated]);
    let most = random.pick(&[None, Some(0), Some(1), Some(3)]);
    let steps = random.between(1, 7) as u32;
    let answers = [Answered::WhoAsks, Answered::All, Answered::Before];
    let answered = random.pick(if fold == Fold::Updated { &answers } else { &answers[..2] });
    let rules = |workers: Members| Rules {
        must_be_in: MustBeIn::Nobody,
        fold,
        answered,
        staleness: most.map(|most| Staleness { of: workers, most }),
        ..Rules::default()
    };
    let in_groups = random.chance(500);
    let (mut bench, book, workers, name) = job(random, in_groups, rules);
    let name = format!("seed {seed}, {name}");
    let slow = random.below(u64::from(workers)) as u32;
    let groups = &book.roles.groups;
    // Of each client the rank whose calls count.
    let clients: Vec<u32> =
        if in_groups { groups.iter().map(|group| group.head().0).collect() } else { (0..workers).collect() };
    let client_of = |rank: u32| groups.of(Rank(rank)).map_or(Rank(rank), ClientGroup::head);
    let slow_client = client_of(slow);
    // Alike in a group.
    let has_nothing = |rank: u32, step: u32| {
        let mut of_step = Random::new(seed ^ u64::from((client_of(rank).0 << 16) | (step + 1)));
        answered == Answered::All && of_step.chance(250)
    };
    let mut resting = true;
    let mut programs: Vec<Worker> = (0..workers).map(|_| Worker::default()).collect();
    loop {
        let mut moved = false;
        for rank in 0..workers {
            let come_to = clients.iter().map(|rank| programs[*rank as usize].steps).min().unwrap();
            let worker = &mut programs[rank as usize];
            let told = &mut bench.versions[rank as usize];
            // A head's memory goes on to its group.
            if worker.seq > 0 && (told.len() < book.slices.len() || bench.memories[rank as usize].is_shared())
            {
                continue;
            }
            let rests = rank == slow && resting && worker.steps + 1 == steps && worker.asks;
            let over = worker.steps == steps && worker.asks;
            if over || rests || random.chance(300) {
                moved |= !(over || rests);
                continue;
            }
            for (slice, version) in std::mem::take(told) {
                if worker.asks || answered != Answered::WhoAsks {
                    let value = by_worker(&bench, rank, &book, slice);
                    let clocks = &value[..workers as usize];
                    let slowest = clocks.iter().copied().fold(f32::INFINITY, f32::min);
                    // Of a value as it was before the push, all but that.
                    let before = !worker.asks && answered == Answered::Before;
                    let own = worker.pushes - u32::from(before);
                    assert_eq!(clocks[rank as usize], own as f32, "{name}: its own");
                    let pushed: f32 = clients.iter().map(|rank| clocks[*rank as usize]).sum();
                    assert_eq!(
                        pushed,
                        (version - u32::from(before)) as f32,
                        "{name}: a version for each push"
                    );
                    if let Some(most) = most.filter(|_| !before) {
                        // What others have come to since is more.
                        let slowest = if answered == Answered::All { come_to as f32 } else { slowest };
                        assert!(worker.steps as f32 - slowest <= most as f32, "{name}: {clocks:?} at {rank}");
                    }
                    if let Some(last) = worker.last.insert(slice, value.clone()) {
                        assert!(last.iter().zip(&value).all(|(last, now)| last <= now), "{name}: back");
                    }
                }
            }
            if !worker.asks && worker.seq > 0 && answered == Answered::WhoAsks {
                let bytes = bench.memories[rank as usize].to_bytes().unwrap();
                assert_eq!(bytes[..], one_of(rank)[..], "{name}: a push leaves its memory alone");
            }
            let asked = worker.asks || worker.seq == 0;
            let pushes = asked && !has_nothing(rank, worker.steps);
            let step = if asked { worker.steps } else { worker.steps.wrapping_sub(1) };
            worker.asks = !pushes;
            worker.pushes += u32::from(pushes);
            worker.steps += u32::from(asked);
            worker.seq += 1;
            let (seq, contribution) = (worker.seq, pushes.then(|| one_of(rank)));
            bench.submit_of(step, rank, seq, Op::Sum, contribution.as_deref()).unwrap();
            moved = true;
        }
        for _ in 0..random.below(4).min(bench.under_way.len() as u64) {
            bench.deliver_any(random).unwrap();
            moved = true;
        }
        if !moved && bench.under_way.is_empty() {
            // Whoever still waits asks, and is too far ahead of the one that rests; owners say so.
            let least = programs.iter().map(|worker| worker.steps).min().unwrap();
            for (rank, worker) in programs.iter().enumerate() {
                if worker.seq > 0 && bench.versions[rank].len() < book.slices.len() {
                    if groups.together(Rank(rank as u32), Rank(slow)) {
                        let head = &bench.nodes[slow_client.index()];
                        assert_eq!(head.missing(0, 0), [Rank(slow)], "{name}: its group waits for it");
                        continue;
                    }
                    let may_wait = worker.asks || answered == Answered::All;
                    assert!(may_wait && worker.steps > least.saturating_add(most.unwrap()), "{name}: {rank}");
                    let owner = book.slices[0].owner;
                    // An owner knows clients, and of its own group the members.
                    let missing = bench.nodes[owner.index()].missing(0, 0);
                    let its_own = owner == slow_client && missing.contains(&Rank(slow));
                    assert!(missing.contains(&slow_client) || its_own, "{name}");
                }
            }
            if !std::mem::replace(&mut resting, false) {
                break;
            }
        }
    }
    for (rank, worker) in programs.iter().enumerate() {
        assert_eq!((worker.steps, worker.asks), (steps, true), "{name}: rank {rank} has not come to its end");
    }
    // Whoever asks now gets all of it.
    for rank in (0..workers).filter(|rank| *rank == 0 || groups.together(Rank(0), Rank(*rank))) {
        bench.submit_of(steps - 1, rank, programs[rank as usize].seq + 1, Op::Sum, None).unwrap();
    }
    bench.run_at_random(random);
    for slice in 0..book.slices.len() as SliceId {
        let clocks = by_worker(&bench, 0, &book, slice);
        let pushes: Vec<f32> = programs.iter().map(|worker| worker.pushes as f32).collect();
        assert_eq!(clocks[..workers as usize], pushes, "{name}");
    }
}

#[test]
fn contributions_one_by_one_are_each_in_the_value_once_and_nobody_runs_too_far_ahead() {
    (0..6000).for_each(one_by_one);
}

#[test]
fn a_group_of_which_some_contribute_and_others_ask_is_told_who() {
    let members = Members::all(3);
    let groups = Groups::of_members([members.clone()]);
    let rules = Rules { must_be_in: MustBeIn::Nobody, fold: Fold::Kept, ..Rules::default() };
    let roles = Roles { owners: [Rank(0)].into_iter().collect(), members, rules, groups };
    let tensor = Tensor::new("w", 0, Dtype::F32, 1);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::deal("model", vec!["fc".into()], vec![tensor], &roles, slicing).unwrap());
    let mut bench = Bench::new(&book, 3);
    for rank in 0..3 {
        bench.submit(rank, 1, Op::Sum, (rank != 1).then_some(&[0; 4][..])).unwrap();
    }
    bench.deliver(0).unwrap();
    let error = bench.deliver(0).unwrap_err().to_string();
    for word in ["rank 0 contributes to layer fc and rank 1 asks", "the same calls in the same order"] {
        assert!(error.contains(word), "{error}");
    }
}

/// Rounds of averages; time is over for one when chance says so, perhaps never.
fn stragglers(seed: u64) {
    let random = &mut Random::new(seed);
    let fold = random.pick(&[Fold::Fresh, Fold::Updated]);
    let rounds = random.between(1, 6) as u32;
    let share = random.below(100);
    let rules = |workers: Members| Rules {
        fold,
        stragglers: Some(Stragglers { enough: 1 + share as u32 * workers.count() / 100, after_ns: 1 }),
        must_be_in: MustBeIn::These(workers),
        ..Rules::default()
    };
    let (mut bench, book, workers, name) = job(random, false, rules);
    let name = format!("seed {seed}, {name}");
    let enough = book.roles.rules.stragglers.unwrap().enough;
    let slow = random.below(u64::from(workers)) as u32;
    let (mut seqs, mut late) = (vec![0; workers as usize], 0);
    // By slice and round what came of it.
    let mut results = BTreeMap::<(SliceId, u32), Vec<f32>>::new();
    let mut closing: Vec<(u32, Event<_>)> = Vec::new();
    while seqs.iter().any(|seq| *seq <= rounds) {
        for rank in 0..workers {
            let told = &mut bench.versions[rank as usize];
            let seq = &mut seqs[rank as usize];
            if *seq > rounds
                || *seq > 0 && told.len() < book.slices.len()
                || random.chance(if rank == slow { 900 } else { 300 })
            {
                continue;
            }
            let mine = *seq;
            *seq += 1;
            for (slice, round) in std::mem::take(told) {
                let value = by_worker(&bench, rank, &book, slice);
                assert!(round >= mine, "{name}: rank {rank} gets round {round} for {mine}");
                let known = results.entry((slice, round)).or_insert_with(|| value.clone());
                assert_eq!(*known, value, "{name}: rank {rank} has other bits of round {round}");
                if fold == Fold::Fresh {
                    let count = value.iter().filter(|number| **number > 0.0).count();
                    assert!(count >= enough as usize, "{name}: {count} were in round {round}");
                    let fair = 1.0 / count as f32;
                    assert!(
                        value.iter().all(|number| *number == 0.0 || *number == fair),
                        "{name}: {value:?}"
                    );
                    let was_in = value[rank as usize] > 0.0 && round == mine;
                    late += u32::from(!was_in);
                }
            }
            if *seq <= rounds {
                let seq = *seq;
                bench.submit(rank, seq, Op::Average, Some(&one_of(rank))).unwrap();
            }
        }
        for _ in 0..random.below(6).min(bench.under_way.len() as u64) {
            bench.deliver_any(random).unwrap();
        }
        for (rank, action) in std::mem::take(&mut bench.others) {
            if let Action::Enough { book, slice, seq, .. } = action {
                closing.push((rank, Event::Close { book, slice, seq }));
            } else {
                assert!(matches!(action, Action::Late { .. }), "{name}: {action:?}");
                bench.late += 1;
            }
        }
        if !closing.is_empty() && random.chance(300) {
            let any = random.below(closing.len() as u64) as usize;
            let (owner, event) = closing.swap_remove(any);
            bench.step(owner, event).unwrap();
        }
    }
    if fold == Fold::Fresh {
        assert_eq!(bench.late, late, "{name}: those who were late, as their owners count");
    }
    for (owner, event) in closing {
        bench.step(owner, event).unwrap();
    }
    assert!(bench.under_way.is_empty(), "{name}: time that is over for a round that has ended ends nothing");
}

#[test]
fn a_round_ends_without_those_who_are_late_and_all_have_the_bits_of_those_who_were_in() {
    (0..3000).for_each(stragglers);
}

//! Owners that apply an optimizer: whatever comes first, contributions or the word to go on, all get the bits of the optimizer
//! applied to the sum in rank order, and so they do by a standing order, which needs no word; and every slice that is kept can be saved, and loaded by other owners.

use super::{Bench, draw};
use penstock_core::exchange::Field;
use penstock_core::layout::{Book, Tensor};
use penstock_core::node::Event;
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::roles::{Answered, ClientGroup, Fold, Groups, MustBeIn, Roles, Rules};
use penstock_core::types::{Dtype, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;
use penstock_core::{Members, Slicing};
use penstock_sim::check::order::{self, Summation};
use penstock_sim::memory::{Chunk, RealMemory, SimMemory};
use penstock_sim::random::Random;
use std::sync::Arc;

const ROUNDS: u32 = 5;

/// Workers, servers apart and clients. Without servers apart workers own slices: all of them, or the heads of groups.
const TOPOLOGIES: [(u32, u32, u32); 7] =
    [(4, 0, 4), (4, 4, 4), (4, 2, 4), (4, 1, 2), (4, 2, 2), (3, 2, 3), (4, 0, 1)];

/// Any of a job's ranks own slices, any must be in: alike, or servers apart from workers, which may sum in groups of any ranks.
fn roles(random: &mut Random) -> Roles {
    let rules = Rules { fold: Fold::Updated, ..Rules::default() };
    let count = random.between(1, 6) as u32;
    let groups = groups(random, count);
    if random.chance(500) {
        let heads: Members = groups.iter().map(ClientGroup::head).collect();
        let owners = if groups.is_empty() { Members::all(count) } else { heads };
        return Roles { rules, owners, groups, ..Roles::alike(Members::all(count)) };
    }
    let servers = random.between(1, 4) as u32;
    let [workers, owners]: [Members; 2] =
        [0..count, count..count + servers].map(|ranks| ranks.map(Rank).collect());
    let rules = Rules { must_be_in: MustBeIn::These(workers), answered: Answered::All, ..rules };
    Roles { members: Members::all(count + servers), owners, rules, groups }
}

fn groups(random: &mut Random, workers: u32) -> Groups {
    if random.chance(500) {
        return Groups::default();
    }
    let count = random.between(1, u64::from(workers)) as usize;
    let mut ranks = vec![Vec::new(); count];
    (0..workers).for_each(|rank| ranks[random.below(count as u64) as usize].push(Rank(rank)));
    Groups::of_members(ranks.into_iter().map(Members::from_iter))
}

fn rule(random: &mut Random) -> Rule {
    random.pick(&[
        Rule::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false },
        Rule::Sgd { momentum: 0.9, dampening: 0.0, nesterov: true },
        Rule::Adam { betas: [0.9, 0.999], eps: 1e-8, amsgrad: true, decoupled: true },
        Rule::Adagrad { lr_decay: 0.1, eps: 1e-10, initial: 0.5 },
        Rule::RmsProp { alpha: 0.9, eps: 1e-8, momentum: 0.9, centered: true },
    ])
}

/// The tensor as it must be on all ranks, and as its owners have it.
struct Whole {
    value: Vec<u8>,
    states: Vec<Vec<u8>>,
    updates: u64,
}

impl Whole {
    fn update(&mut self, update: &Update, dtype: Dtype, gradient: &[u8]) {
        let initial = match dtype {
            Dtype::F32 => (update.optimizer.initial() as f32).to_le_bytes().to_vec(),
            _ => update.optimizer.initial().to_le_bytes().to_vec(),
        };
        let elems = self.value.len() / dtype.size_bytes();
        self.states.resize(update.optimizer.states().len(), initial.repeat(elems));
        self.updates += 1;
        let mut states: Vec<&mut [u8]> = self.states.iter_mut().map(Vec::as_mut_slice).collect();
        update.apply(dtype, self.updates, &mut self.value, gradient, &mut states).unwrap();
    }
}

fn whole_of(len_bytes: usize, bytes: Option<&[u8]>) -> Chunk {
    let chunk = RealMemory::tensor(len_bytes);
    let bytes = bytes.map_or_else(|| vec![0; len_bytes], <[u8]>::to_vec);
    chunk.write(|memory| memory.copy_from_slice(&bytes));
    chunk
}

/// What all owners keep, put together; `None` if they keep no such thing.
fn saved(bench: &mut Bench, book: &Book, field: Field) -> Option<(Vec<u8>, u64)> {
    let whole = whole_of(book.tensors[0].len_bytes() as usize, None);
    let mut all = Vec::new();
    for owner in book.roles.owners.iter().filter(|owner| book.owned_slices[owner.index()] > 0) {
        all.push(bench.nodes[owner.index()].save(0, 0, field, &whole).unwrap());
    }
    all.dedup();
    assert_eq!(all.len(), 1, "owners agree");
    all[0].map(|updates| (whole.to_bytes().unwrap().into_vec(), updates))
}

fn load(bench: &mut Bench, book: &Book, whole: &Whole) {
    let fields = (0..whole.states.len()).map(|at| Field::State(at as u8));
    let all = [Field::Value].into_iter().chain(fields).zip([&whole.value].into_iter().chain(&whole.states));
    for (field, bytes) in all {
        let chunk = whole_of(book.tensors[0].len_bytes() as usize, Some(bytes));
        for node in &mut bench.nodes {
            node.load(0, 0, (field, whole.updates), &chunk).unwrap();
        }
    }
}

/// Which of [`TOPOLOGIES`] it had, perhaps.
fn rounds(seed: u64) -> (u32, u32, u32) {
    let random = &mut Random::new(seed);
    let roles = roles(random);
    let (dtype, wire) = random.pick(&[
        (Dtype::F32, Dtype::F32),
        (Dtype::F64, Dtype::F64),
        (Dtype::F32, Dtype::Bf16),
        (Dtype::F32, Dtype::F16),
    ]);
    let (elems, rule) = (random.between(1, 900), rule(random));
    let tensor = Tensor::new("w", 0, dtype, elems).with_wire(wire);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::deal("model", vec!["layer".into()], vec![tensor], &roles, slicing).unwrap());
    let name = format!("seed {seed}, {elems} of {dtype:?} as {wire:?}, {rule:?}, {roles:?}");
    let mut bench = Bench::new(&book, roles.members.count());
    let mut whole = Whole { value: draw(dtype, elems, random), states: Vec::new(), updates: 0 };
    load(&mut bench, &book, &whole);
    let workers = match &roles.rules.must_be_in {
        MustBeIn::These(these) => these.clone(),
        _ => roles.members.clone(),
    };
    // Told now and then, between rounds, and not in each.
    let stands = random.chance(400);
    let mut order = None;
    for seq in 1..=ROUNDS {
        let op = random.pick(&[Op::Average, Op::Sum]);
        let nobody = random.chance(100);
        let rows: Vec<Option<Vec<u8>>> = (roles.members.iter())
            .map(|rank| {
                (workers.contains(rank) && !nobody && random.chance(800)).then(|| draw(dtype, elems, random))
            })
            .collect();
        let optimizer = Optimizer {
            lr: random.pick(&[0.5, 0.01]),
            weight_decay: 0.1,
            maximize: random.chance(200),
            rule,
        };
        let update = Update { optimizer, factor: random.pick(&[1.0, 0.25]) };
        let mut update = random.chance(850).then_some(update);
        let before = order;
        if stands {
            update = update.filter(|_| random.chance(500)).or(before);
            update = update.or(Some(Update { optimizer, factor: 1.0 }));
            order = update;
        }
        let is_new = order != before;
        let made = update.is_some() && rows.iter().any(Option::is_some);
        // Each owner hears it by itself, at any time in the round.
        let mut words: Vec<(Rank, u32)> =
            book.slices.iter().enumerate().map(|(slice, at)| (at.owner, slice as u32)).collect();
        random.shuffle(&mut words);
        for (owner, slice) in words.extract_if(.., |_| stands) {
            if let Some(update) = order.filter(|_| is_new) {
                bench.step(owner.0, Event::Order { book: 0, slice, update }).unwrap();
            }
        }
        let mut late: Vec<Rank> = workers.iter().collect();
        random.shuffle(&mut late);
        while !late.is_empty() || !words.is_empty() || !bench.under_way.is_empty() {
            match random.below(3) {
                0 if !late.is_empty() => {
                    let rank = late.remove(0);
                    bench.submit(rank.0, seq, op, rows[rank.index()].as_deref()).unwrap();
                }
                1 if !words.is_empty() => {
                    let (owner, slice) = words.remove(0);
                    bench.step(owner.0, Event::Proceed { book: 0, slice, step: seq, update }).unwrap();
                }
                _ if !bench.under_way.is_empty() => bench.deliver(0).unwrap(),
                _ => {}
            }
        }
        let before = whole.value.clone();
        if let Some(update) = update.filter(|_| made) {
            let mut gradient = Vec::new();
            for slice in &book.slices {
                let range =
                    slice.offset_bytes as usize..(slice.offset_bytes + u64::from(slice.len_bytes)) as usize;
                let parts: Vec<Option<&[u8]>> =
                    rows.iter().map(|row| row.as_deref().map(|row| &row[range.clone()])).collect();
                let how = Summation { algorithm: Algorithm::Store, dtype, wire, op, active: workers.count() };
                let sum = if roles.groups.is_empty() {
                    order::reduce(how, slice.owner, &parts)
                } else {
                    let groups = roles.groups.iter().map(|group| &group.members);
                    order::reduce_in_groups(how, slice.owner, &parts, groups)
                };
                gradient.extend(sum.unwrap());
            }
            whole.update(&update, dtype, &gradient);
        }
        assert_eq!(before != whole.value, made, "{name}: the round is one that shows");
        for rank in workers.iter() {
            let told = std::mem::take(&mut bench.complete[rank.index()]);
            assert_eq!(told, vec![made; book.slices.len()], "{name}: rank {rank} in round {seq}");
            if made {
                let got = bench.memories[rank.index()].to_bytes().unwrap();
                let want =
                    if wire == dtype { whole.value.clone() } else { order::through(wire, &whole.value) };
                assert_eq!(got[..], want[..], "{name}: rank {rank} in round {seq}");
            }
        }
        assert_eq!(
            saved(&mut bench, &book, Field::Value),
            Some((whole.value.clone(), whole.updates)),
            "{name}"
        );
        for (at, state) in whole.states.iter().enumerate() {
            let kept = saved(&mut bench, &book, Field::State(at as u8));
            assert_eq!(kept, Some((state.clone(), whole.updates)), "{name}: state {at}");
        }
        if random.chance(300) {
            // As a run that begins again from what was saved.
            load(&mut bench, &book, &whole);
        }
    }
    for (rank, node) in bench.nodes.iter_mut().enumerate() {
        let owned: u64 =
            book.slices.iter().filter(|s| s.owner.index() == rank).map(|s| u64::from(s.len_bytes)).sum();
        let fields = 1 + whole.states.len() as u64;
        assert_eq!(node.memory().held_bytes(), owned * fields, "{name}: rank {rank} keeps more than it owns");
    }
    let clients = if roles.groups.is_empty() { workers.count() } else { roles.groups.iter().len() as u32 };
    (workers.count(), roles.members.count() - workers.count(), clients)
}

#[test]
fn any_order_of_contributions_and_words_gives_the_bits_of_the_optimizer_on_the_ordered_sum() {
    let found: Vec<(u32, u32, u32)> = (0..3000).map(rounds).collect();
    for topology in TOPOLOGIES {
        let count = found.iter().filter(|one| **one == topology).count();
        assert!(count > 5, "{topology:?} occurred {count} times");
    }
}

#[test]
fn squares_are_those_of_the_sum_and_of_no_part_of_it() {
    let roles =
        Roles { rules: Rules { fold: Fold::Updated, ..Rules::default() }, ..Roles::alike(Members::all(3)) };
    let tensor = Tensor::new("w", 0, Dtype::F32, 700);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::deal("model", vec!["layer".into()], vec![tensor], &roles, slicing).unwrap());
    let mut bench = Bench::new(&book, 3);
    for rank in 0..3 {
        assert!(bench.nodes.iter_mut().all(|node| node.squares(0).is_none()), "rank {rank} is missing");
        let numbers: Vec<u8> = (0..700).flat_map(|at| (((at + rank) % 7) as f32).to_le_bytes()).collect();
        bench.submit(rank, 1, Op::Sum, Some(&numbers)).unwrap();
        bench.run_in_rounds();
    }
    let squares: f64 =
        bench.nodes.iter_mut().flat_map(|node| node.squares(0).unwrap()).map(|(_, sum)| sum).sum();
    let one = |at: u32| f64::from((at % 7) + (at + 1) % 7 + (at + 2) % 7).powi(2);
    assert_eq!(squares, (0..700).map(one).sum::<f64>());
}

//! Books whose members are not alike: any of them own slices, any must be in, results are fresh or kept, for all or for who asks.

use super::Bench;
use penstock_core::layout::{Book, Tensor};
use penstock_core::roles::{Answered, Fold, Groups, MustBeIn, Roles, Rules};
use penstock_core::types::{Dtype, Rank};
use penstock_core::wire::Op;
use penstock_core::{Members, Slicing};
use penstock_sim::memory::SimMemory;
use penstock_sim::random::Random;
use std::sync::Arc;

const ROUNDS: u32 = 4;
/// Two slices and a little more.
const ELEMS: u64 = 600;

fn bytes_of(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(ELEMS as usize)
}

/// The number that is everywhere in this rank's memory, slice by slice; `None` is what is there before.
fn held(bench: &Bench, rank: Rank, book: &Book) -> Vec<Option<f32>> {
    let bytes = bench.memories[rank.index()].to_bytes().unwrap();
    let number = |at: u64| f32::from_le_bytes(bytes[at as usize..][..4].try_into().unwrap());
    let untouched = f32::from_le_bytes([0x5A; 4]);
    let of_slice = |slice: &penstock_core::layout::Slice| {
        let range = slice.offset_bytes..slice.offset_bytes + u64::from(slice.len_bytes);
        let first = number(range.start);
        assert!(range.step_by(4).all(|at| number(at) == first), "rank {rank}: a torn slice");
        (first != untouched).then_some(first)
    };
    book.slices.iter().map(of_slice).collect()
}

fn some_of(members: &Members, random: &mut Random) -> Members {
    let one = members.at(random.below(u64::from(members.count())) as u32);
    members.iter().filter(|_| random.chance(400)).chain([one]).collect()
}

fn book(roles: &Roles, wire: Dtype) -> Arc<Book> {
    let tensor = Tensor::new("w", 0, Dtype::F32, ELEMS).with_wire(wire);
    let slicing = Slicing::fixed(1024, 1);
    Arc::new(Book::deal("model", vec!["layer".into()], vec![tensor], roles, slicing).unwrap())
}

fn members(random: &mut Random) -> Members {
    (0..random.between(1, 7)).map(|_| Rank(random.below(12) as u32)).collect()
}

fn bench(book: &Arc<Book>) -> Bench {
    Bench::new(book, book.roles.members.iter().last().unwrap().0 + 1)
}

/// Rounds of one tensor in which some must be in, one after the other; who need not be asks whenever chance says so, and is
/// perhaps rounds behind. Numbers are small integers, whose sums are exact in any order.
fn rounds(seed: u64) {
    let random = &mut Random::new(seed);
    let members = members(random);
    let owners = some_of(&members, random);
    let these = some_of(&members, random);
    let must_be_in = if random.chance(300) { MustBeIn::Everybody } else { MustBeIn::These(these.clone()) };
    let contributors = if must_be_in == MustBeIn::Everybody { members.clone() } else { these };
    let fold = random.pick(&[Fold::Fresh, Fold::Kept]);
    let answered = random.pick(&[Answered::All, Answered::WhoAsks]);
    let op = random.pick(&[Op::Sum, Op::Average, Op::Copy]);
    let rules = Rules { must_be_in, fold, answered, ..Rules::default() };
    // A half has these numbers without rounding. A copy keeps every bit, so it is not for tensors with a wire type.
    let wire = if op == Op::Copy { Dtype::F32 } else { random.pick(&[Dtype::F32, Dtype::F16]) };
    let book = book(&Roles { members: members.clone(), owners, rules, groups: Groups::default() }, wire);
    let mut bench = bench(&book);
    let name = format!("seed {seed}, {op:?}, {wire:?}, {:?}", book.roles);
    // By round what was the result; nothing before the first.
    let mut results = vec![None];
    let mut asked = vec![0; bench.nodes.len()];
    for seq in 1..=ROUNDS {
        let root = contributors.at(random.below(u64::from(contributors.count())) as u32);
        let part = |rank: Rank, random: &mut Random| {
            let gives = if op == Op::Copy { rank == root } else { random.chance(800) };
            gives.then(|| (contributors.count() * (1 + random.below(9) as u32)) as f32)
        };
        let parts: Vec<(Rank, Option<f32>)> =
            contributors.iter().map(|rank| (rank, part(rank, random))).collect();
        let sum: Option<f32> = parts.iter().filter_map(|(_, part)| *part).reduce(|one, other| one + other);
        let fresh = sum.map(|sum| if op == Op::Average { sum / contributors.count() as f32 } else { sum });
        let before = results[seq as usize - 1].filter(|_| fold == Fold::Kept);
        results.push(match (before, fresh) {
            (Some(before), Some(fresh)) if op != Op::Copy => Some(before + fresh),
            (before, fresh) => fresh.or(before),
        });
        let mut order: Vec<Rank> = members.iter().collect();
        random.shuffle(&mut order);
        for rank in order {
            if let Some((_, part)) = parts.iter().find(|(one, _)| *one == rank) {
                bench.submit(rank.0, seq, op, part.map(bytes_of).as_deref()).unwrap();
            } else if !bench.memories[rank.index()].is_shared() && random.chance(600) {
                // It asks, perhaps for a round that was over long ago: its last question has been answered.
                bench.complete[rank.index()].clear();
                asked[rank.index()] += 1;
                bench.submit(rank.0, asked[rank.index()], op, None).unwrap();
            }
            for _ in 0..random.below(3).min(bench.under_way.len() as u64) {
                bench.deliver(0).unwrap();
            }
        }
        bench.run_at_random(random);
        for (rank, part) in parts {
            let told = std::mem::take(&mut bench.complete[rank.index()]);
            let gets_it = answered == Answered::All || part.is_none();
            let want = if gets_it { results[seq as usize] } else { None };
            assert_eq!(told, vec![want.is_some(); book.slices.len()], "{name}: rank {rank} in round {seq}");
            // Who is not answered has what it gave, who gets nothing what it had.
            let want = want.or(part);
            assert_eq!(held(&bench, rank, &book), vec![want; book.slices.len()], "{name}: rank {rank}");
        }
        for rank in members.iter().filter(|rank| !contributors.contains(*rank) && asked[rank.index()] > 0) {
            assert_eq!(bench.complete[rank.index()].len(), book.slices.len(), "{name}: rank {rank} waits");
            // Of the round it has asked for, or a later one; not of an earlier one.
            let possible = &results[asked[rank.index()] as usize..];
            let fits = |held: &Option<f32>| possible.contains(held);
            assert!(held(&bench, rank, &book).iter().all(fits), "{name}: rank {rank} holds {results:?}");
        }
    }
    let kept = book.roles.rules.keep_results() && results[ROUNDS as usize].is_some();
    for (rank, node) in bench.nodes.iter_mut().enumerate() {
        let owned = book.slices.iter().filter(|slice| slice.owner.index() == rank);
        let owned = owned.map(|slice| u64::from(slice.len_bytes)).sum();
        assert_eq!(node.memory().held_bytes(), if kept { owned } else { 0 }, "{name}: rank {rank}");
    }
}

#[test]
fn any_may_own_any_must_be_in_and_results_are_fresh_or_kept() {
    (0..3000).for_each(rounds);
}

/// Each contribution at once: nobody waits for another, and in the end the owners have the sum of all.
#[test]
fn where_nobody_must_be_in_each_contribution_is_folded_in_as_it_comes() {
    for seed in 0..500 {
        let random = &mut Random::new(seed);
        let members = members(random);
        let owners = some_of(&members, random);
        let must_be_in = MustBeIn::Nobody;
        let rules = Rules { must_be_in, fold: Fold::Kept, answered: Answered::All, ..Rules::default() };
        let wire = random.pick(&[Dtype::F32, Dtype::Bf16]);
        let book = book(&Roles { members: members.clone(), owners, rules, groups: Groups::default() }, wire);
        let (mut bench, name) = (bench(&book), format!("seed {seed}, {:?}", book.roles));
        let mut sums = 0.0;
        let mut seqs = vec![0; bench.nodes.len()];
        for _ in 0..20 {
            // Any rank that waits for nothing, however often the others have contributed.
            let rank = members.at(random.below(u64::from(members.count())) as u32);
            if !bench.memories[rank.index()].is_shared() {
                let value = 1.0 + random.below(9) as f32;
                sums += value;
                seqs[rank.index()] += 1;
                bench.submit(rank.0, seqs[rank.index()], Op::Sum, Some(&bytes_of(value))).unwrap();
            }
            for _ in 0..random.below(4).min(bench.under_way.len() as u64) {
                let link = |at: usize| (bench.under_way[at].from, bench.under_way[at].to);
                let any = random.below(bench.under_way.len() as u64) as usize;
                let first = (0..=any).find(|at| link(*at) == link(any)).unwrap();
                bench.deliver(first).unwrap();
            }
        }
        bench.run_at_random(random);
        // Whoever asks now gets all of it.
        for rank in members.iter() {
            seqs[rank.index()] += 1;
            bench.submit(rank.0, seqs[rank.index()], Op::Sum, None).unwrap();
            bench.run_at_random(random);
            let want = (sums > 0.0).then_some(sums);
            assert_eq!(held(&bench, rank, &book), vec![want; book.slices.len()], "{name}: rank {rank}");
        }
    }
}

#[test]
fn who_need_not_be_in_cannot_contribute() {
    let [members, heads]: [Members; 2] =
        [&[0, 1, 2][..], &[0, 1]].map(|ranks| ranks.iter().copied().map(Rank).collect());
    let rules = Rules { must_be_in: MustBeIn::These(heads), ..Rules::default() };
    let book = book(&Roles { rules, ..Roles::alike(members) }, Dtype::F32);
    let mut bench = bench(&book);
    let error = bench.submit(2, 1, Op::Sum, Some(&bytes_of(1.0))).unwrap_err().to_string();
    assert!(error.contains("rank 2 contributes to layer layer") && error.contains("only ask"), "{error}");
}

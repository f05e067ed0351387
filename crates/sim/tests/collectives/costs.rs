//! Bytes and steps, as counted, against the functions of [`penstock_core::cost`], exactly, for 1 to 17 ranks.
//!
//! Neither counts headers of frames. What is not one exchange (a message in parts, Project Adam's scheme) is counted as the
//! exchanges that it is made of.

use super::*;
use penstock_core::cost::{Clients, Hosts, Rates, Traffic, dense, sparse};
use penstock_core::exchange::Field;
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::parts::part_start;
use penstock_core::roles::{Fold, Groups, MustBeIn, Roles, Rules};

/// Algorithms that cut a slice into a part for each rank.
const CUTS: [Algorithm; 2] = [Algorithm::Ring, Algorithm::Butterfly];

/// The steps and bytes of a cost function.
fn expected(traffic: Traffic) -> Counted {
    let Traffic { steps, sent, received, .. } = traffic;
    Counted { steps, sent, received }
}

impl Bench {
    /// A rank contributes to all tensors of the book; none of them is gathered.
    fn contribute(&mut self, book: &Book, rank: u32) {
        for (tensor, layout) in (0..).zip(&book.tensors) {
            self.give(rank, tensor, layout.len_bytes(), Gives::Whole(Op::Sum));
        }
    }

    /// A rank contributes so many bytes to a tensor that is gathered.
    fn gather(&mut self, rank: u32, tensor: u32, len_bytes: u64) {
        self.give(rank, tensor, len_bytes, Gives::Gathered(len_bytes as u32));
    }

    /// A rank takes part in the round of a tensor, with so much memory.
    fn give(&mut self, rank: u32, tensor: u32, len_bytes: u64, gives: Gives) {
        let memory = RealMemory::tensor(len_bytes as usize);
        let event = Event::Submit(Submission { book: 0, tensor, seq: 1, step: 1, memory, gives });
        self.step(rank, event).unwrap();
    }

    /// What was counted, by host: bytes sent to others and received from others; and what the rank moved inside its own, in one
    /// direction, that moved most.
    fn on(&self, hosts: &Hosts) -> (Vec<u64>, Vec<u64>, u64) {
        let (mut sent, mut received) = (vec![0; hosts.count()], vec![0; hosts.count()]);
        let mut inside = vec![[0; 2]; self.nodes.len()];
        for (&(from, to), bytes) in &self.moved {
            if hosts.of(from.index()) == hosts.of(to.index()) {
                inside[from.index()][0] += bytes;
                inside[to.index()][1] += bytes;
            } else {
                sent[hosts.of(from.index())] += bytes;
                received[hosts.of(to.index())] += bytes;
            }
        }
        (sent, received, inside.into_iter().flatten().max().unwrap_or(0))
    }

    /// What was counted when these ranks have everything, for what is counted before that is no whole exchange.
    fn count(mut self, book: &Book, ranks: std::ops::Range<u32>) -> Counted {
        self.run_in_rounds();
        for rank in ranks {
            assert_eq!(self.complete[rank as usize].len(), book.slices.len(), "rank {rank} is not done");
        }
        self.counted
    }
}

fn count(book: &Arc<Book>, ranks: u32) -> Counted {
    let mut bench = Bench::new(book, ranks);
    (0..ranks).for_each(|rank| bench.contribute(book, rank));
    bench.count(book, 0..ranks)
}

#[test]
fn bytes_and_steps_of_a_slice_are_what_the_cost_functions_say() {
    for algorithm in Algorithm::ALL {
        let route = Route::Sum(algorithm);
        for ranks in RANKS {
            for elems in [0, 1, 2, 3, 7, 16, 17, 61, 97, 256] {
                let book = book(route, Dtype::F32, elems, ranks, 1024);
                assert!(book.slices.len() <= 1);
                let counted = count(&book, ranks);
                let want = algorithm.slice(elems, 4, ranks);
                // The first slice belongs to rank 0: positions are ranks.
                let bytes = (want.sent, want.received);
                assert_eq!(
                    (counted.sent, counted.received),
                    bytes,
                    "{route:?}, {ranks} ranks, {elems} elements"
                );
                // Parts without elements are not sent, so a chain may be shorter where there are fewer than parts.
                let parts = if CUTS.contains(&algorithm) { u64::from(ranks) } else { 1 };
                let steps = if elems < parts { 0..=want.steps } else { want.steps..=want.steps };
                assert!(
                    steps.contains(&counted.steps),
                    "{} steps: {route:?}, {ranks} ranks, {elems} elements",
                    counted.steps
                );
            }
        }
    }
}

#[test]
fn owners_take_turns_and_the_bytes_of_a_message_are_the_sum_of_its_slices() {
    for algorithm in Algorithm::ALL {
        let route = Route::Sum(algorithm);
        for ranks in RANKS {
            // Nineteen slices of 256 elements and one of 100.
            let book = book(route, Dtype::F32, 256 * 19 + 100, ranks, 1024);
            let counted = count(&book, ranks);
            let mut want = Traffic::none(ranks as usize);
            for slice in &book.slices {
                let traffic = algorithm.slice(u64::from(slice.len_bytes) / 4, 4, ranks);
                want.join(&traffic, slice.owner.index());
            }
            assert_eq!((counted.sent, counted.received), (want.sent, want.received), "{route:?}, {ranks}");
            assert_eq!(counted.steps, want.steps, "{route:?}, {ranks} ranks: slices travel at the same time");
            let owners = book.slices.iter().map(|slice| slice.owner.0).max();
            let turns = if route == Route::Sum(Algorithm::Central) { 0 } else { (ranks - 1).min(19) };
            assert_eq!(owners, Some(turns), "{route:?}, {ranks} ranks");
        }
    }
}

#[test]
fn a_message_in_even_slices_is_what_the_cost_functions_say_as_a_whole() {
    for algorithm in Algorithm::ALL {
        for ranks in RANKS {
            let elems = 256 * u64::from(ranks);
            let book = book(Route::Sum(algorithm), Dtype::F32, elems, ranks, 1024);
            assert!(book.slices.len() == ranks as usize && book.slices.iter().all(|s| s.len_bytes == 1024));
            let (want, _) = algorithm.message(elems, 4, ranks, u64::from(ranks), &Rates::default());
            assert_eq!(count(&book, ranks), expected(want), "{algorithm:?}, {ranks} ranks");
        }
    }
}

/// A message in the store, of which the first `servers` ranks have a near-equal part each, in one slice.
fn parts(elems: u64, ranks: u32, servers: u32) -> Arc<Book> {
    let start = |part: u32| part_start(elems, u64::from(servers), u64::from(part));
    let part = |i: u32| Tensor::new(format!("part{i}"), 0, Dtype::F32, start(i + 1) - start(i));
    let tensors = (0..servers).map(part).collect();
    let book = Book::new("model", vec!["layer".into()], tensors, ranks, 4096, 1).unwrap();
    // Each goes to the rank that owns least so far.
    assert!(book.slices.iter().enumerate().all(|(i, slice)| slice.owner.index() == i));
    assert_eq!(book.slices.len() as u64, elems.min(u64::from(servers)));
    Arc::new(book)
}

#[test]
fn the_store_over_some_or_all_ranks_moves_what_its_cost_function_says() {
    for ranks in RANKS {
        for servers in [1, 2, 5, ranks].into_iter().filter(|servers| *servers <= ranks) {
            for elems in [1, 3, 97, 1000] {
                let want = expected(dense::store(elems, 4, ranks, servers));
                let counted = count(&parts(elems, ranks, servers), ranks);
                assert_eq!(counted, want, "{ranks} ranks, {servers} shards, {elems} elements");
            }
        }
    }
}

/// The store where ranks that have left (join) contribute nothing, are answered nothing, and sum what they own.
fn count_dedicated(elems: u64, workers: u32, servers: u32) -> Counted {
    let ranks = workers + servers;
    let book = parts(elems, ranks, servers);
    let mut bench = Bench::new(&book, ranks);
    for server in 0..servers {
        bench.step(server, Event::Leave).unwrap();
    }
    bench.run_in_rounds();
    // That they left is not part of the exchange.
    bench.counted.steps = 0;
    (servers..ranks).for_each(|worker| bench.contribute(&book, worker));
    let mut counted = bench.count(&book, servers..ranks);
    // Workers are at the first positions.
    counted.sent.rotate_left(servers as usize);
    counted.received.rotate_left(servers as usize);
    counted
}

#[test]
fn a_store_on_ranks_of_its_own_moves_what_its_cost_function_says() {
    for workers in RANKS {
        for servers in [1, 2, 5, 17] {
            for elems in [1, 97] {
                let want = expected(dense::store_dedicated(elems, 4, workers, servers));
                let counted = count_dedicated(elems, workers, servers);
                assert_eq!(counted, want, "{workers} workers, {servers} servers, {elems} elements");
            }
        }
    }
}

/// A message in the store, in one slice for each owner, of workers in groups and of servers apart, if there are some.
fn grouped(elems: u64, workers: u32, servers: u32, groups: &[Vec<u32>]) -> Arc<Book> {
    let members = |ranks: &[u32]| ranks.iter().copied().map(Rank).collect::<Members>();
    let heads: Vec<u32> = groups.iter().map(|group| group[0]).collect();
    let apart: Vec<u32> = (workers..workers + servers).collect();
    let (owners, must_be_in) = match servers {
        0 => (members(&heads), MustBeIn::Everybody),
        _ => (members(&apart), MustBeIn::These(Members::all(workers))),
    };
    let count = u64::from(owners.count());
    let roles = Roles {
        members: Members::all(workers + servers),
        owners,
        rules: Rules { must_be_in, ..Rules::default() },
        groups: Groups::of_members(groups.iter().map(|group| members(group))),
    };
    let part = |i: u64| part_start(elems, count, i + 1) - part_start(elems, count, i);
    let tensors = (0..count).map(|i| Tensor::new(format!("part{i}"), 0, Dtype::F32, part(i))).collect();
    let slicing = Slicing::fixed(4096, 1);
    let book = Book::deal("model", vec!["layer".into()], tensors, &roles, slicing).unwrap();
    assert_eq!(book.slices.len() as u64, elems.min(count));
    Arc::new(book)
}

/// Of so many workers: groups of one size, of neighbours and dealt in turn, and an uneven pair.
fn groupings(workers: u32) -> Vec<Vec<Vec<u32>>> {
    let mut found: Vec<Vec<Vec<u32>>> = Vec::new();
    for size in (1..=workers).filter(|size| workers.is_multiple_of(*size)) {
        let count = workers / size;
        found.push((0..count).map(|group| (group * size..(group + 1) * size).collect()).collect());
        found.push((0..count).map(|group| (group..workers).step_by(count as usize).collect()).collect());
    }
    if workers > 2 {
        found.push(vec![vec![0], (1..workers).collect()]);
    }
    found
}

/// Of so many ranks: each its own host, all one, neighbours by two and by three, and two hosts in turn.
fn hosts_of(ranks: u32) -> [Vec<u32>; 5] {
    let by = |host: fn(u32) -> u32| (0..ranks).map(host).collect();
    [by(|rank| rank), by(|_| 0), by(|rank| rank / 2), by(|rank| rank / 3), by(|rank| rank % 2)]
}

#[test]
fn groups_and_hosts_move_what_their_cost_function_says() {
    for (workers, servers) in (1..=9).flat_map(|workers| [0, 1, 2, 5].map(|servers| (workers, servers))) {
        for (groups, elems) in
            groupings(workers).iter().flat_map(|groups| [1, 97].map(|elems| (groups, elems)))
        {
            let clients = if servers > 0 {
                Clients::with_servers(workers, servers)
            } else {
                Clients::workers(workers, workers)
            };
            let clients = clients.in_groups(groups);
            let book = grouped(elems, workers, servers, groups);
            let mut bench = Bench::new(&book, workers + servers);
            (0..workers).for_each(|worker| bench.contribute(&book, worker));
            bench.run_in_rounds();
            let name = format!("{groups:?}, {servers} servers, {elems} elements");
            for worker in 0..workers as usize {
                assert_eq!(
                    bench.complete[worker].len(),
                    book.slices.len(),
                    "{name}: worker {worker} is not done"
                );
            }
            for hosts in hosts_of(workers + servers).map(|numbers| Hosts::numbered(&numbers)) {
                let want = clients.clone().on(hosts.clone()).store(elems, 4, clients.owners());
                assert_eq!(bench.counted.steps, want.steps, "{name}");
                let (sent, received, inside) = bench.on(&hosts);
                assert_eq!((sent, received), (want.sent, want.received), "{name}, {hosts:?}");
                assert_eq!(inside, want.inside_bytes, "{name}, {hosts:?}");
            }
        }
    }
}

#[test]
fn rows_of_ranks_that_share_hosts_move_what_their_cost_functions_say() {
    const ROW: u64 = ROW_BYTES[0];
    for (ranks, rows) in (1..=9).flat_map(|ranks| rows(ranks).map(|rows| (ranks, rows))) {
        let book = dealt(vec![gathered(61 * ROW)], &Roles::alike(Members::all(ranks)));
        let mut bench = Bench::new(&book, ranks);
        for (rank, own_rows) in (0..).zip(&rows) {
            bench.gather(rank, 0, own_rows * ROW);
        }
        bench.run_in_rounds();
        for hosts in hosts_of(ranks).map(|numbers| Hosts::numbered(&numbers)) {
            let want = sparse::broadcast(&rows, ROW, &hosts);
            assert_eq!(
                bench.on(&hosts),
                (want.sent, want.received, want.inside_bytes),
                "{rows:?} on {hosts:?}"
            );
        }
    }
}

/// A tensor that is gathered, of at most so many bytes.
fn gathered(longest_bytes: u64) -> Tensor {
    Tensor::new("rows", 0, Dtype::Bytes, longest_bytes).with_route(Route::Gather)
}

/// A book of one layer, in frames of at most 1 KiB.
fn dealt(tensors: Vec<Tensor>, roles: &Roles) -> Arc<Book> {
    let slicing = Slicing::fixed(1024, 1);
    Arc::new(Book::deal("model", vec!["layer".into()], tensors, roles, slicing).unwrap())
}

/// Each rank by itself.
fn each(ranks: u32) -> Vec<Vec<u32>> {
    (0..ranks).map(|rank| vec![rank]).collect()
}

/// Rows by rank: all alike, uneven with some that have none, one rank's alone, none at all.
fn rows(ranks: u32) -> [Vec<u64>; 4] {
    let by_rank = |rows: fn(u64) -> u64| (0..u64::from(ranks)).map(rows).collect::<Vec<_>>();
    [
        by_rank(|_| 32),
        by_rank(|rank| (rank + 1) * 7 % 5 * 13),
        by_rank(|rank| if rank == 1 { 61 } else { 0 }),
        by_rank(|_| 0),
    ]
}

/// Bytes of the factors of a row of a layer of 30 x 19 with a bias; of a 64-bit index and its row of 5.
const ROW_BYTES: [u64; 2] = [(30 + 19) * 4, 8 + 5 * 4];

#[test]
fn factors_and_pairs_move_what_their_cost_function_says_whatever_rows_each_rank_has() {
    for ranks in RANKS {
        for (rows, row_bytes) in rows(ranks).iter().flat_map(|rows| ROW_BYTES.map(|bytes| (rows, bytes))) {
            let book = dealt(vec![gathered(61 * row_bytes)], &Roles::alike(Members::all(ranks)));
            let mut bench = Bench::new(&book, ranks);
            for (rank, own_rows) in (0..).zip(rows) {
                bench.gather(rank, 0, own_rows * row_bytes);
            }
            let counted = bench.count(&book, 0..ranks);
            assert_eq!(
                counted,
                expected(sparse::broadcast(rows, row_bytes, &Hosts::apart(ranks))),
                "{rows:?} of {row_bytes} bytes"
            );
        }
    }
}

#[test]
fn factors_to_an_owner_and_its_matrix_move_what_their_cost_function_says() {
    const UP: u32 = 0;
    const DOWN: u32 = 1;
    let dense_bytes = (30 * 19 + 30) * 4;
    for ranks in RANKS {
        for (rows, row_bytes) in rows(ranks).iter().flat_map(|rows| ROW_BYTES.map(|bytes| (rows, bytes))) {
            let tensors = vec![gathered(61 * row_bytes).owned_by(Rank(0)), gathered(dense_bytes)];
            let book = dealt(tensors, &Roles::alike(Members::all(ranks)));
            let mut bench = Bench::new(&book, ranks);
            for (rank, own_rows) in (0..).zip(rows) {
                bench.gather(rank, UP, own_rows * row_bytes);
            }
            (1..ranks).for_each(|rank| bench.gather(rank, DOWN, 0));
            bench.run_in_rounds();
            // The owner has all factors now, and can rebuild.
            assert_eq!(bench.complete[0].len(), 1);
            bench.gather(0, DOWN, dense_bytes);
            let counted = bench.count(&book, 0..ranks);
            let want = sparse::adam(rows, row_bytes, dense_bytes, &each(ranks), &Hosts::apart(ranks));
            let want = expected(want);
            assert_eq!(counted, want, "{rows:?} of {row_bytes} bytes");
        }
    }
}

#[test]
fn factors_to_an_owner_of_workers_in_groups_move_what_their_cost_function_says() {
    const UP: u32 = 0;
    const DOWN: u32 = 1;
    const ROW: u64 = ROW_BYTES[0];
    let dense_bytes = (30 * 19 + 30) * 4;
    for (workers, rows) in (1..=9).flat_map(|workers| rows(workers).map(|rows| (workers, rows))) {
        for (groups, at) in groupings(workers)
            .into_iter()
            .flat_map(|groups| (0..groups.len()).map(move |at| (groups.clone(), at)))
        {
            let owner = groups[at][0];
            let members = groups.iter().map(|group| group.iter().copied().map(Rank).collect());
            let groups_of_members = Groups::of_members(members);
            let roles = Roles {
                owners: groups.iter().map(|group| Rank(group[0])).collect(),
                groups: groups_of_members,
                ..Roles::alike(Members::all(workers))
            };
            let tensors = vec![gathered(61 * ROW).owned_by(Rank(owner)), gathered(dense_bytes)];
            let book = dealt(tensors, &roles);
            let mut bench = Bench::new(&book, workers);
            for (rank, own_rows) in (0..).zip(&rows) {
                bench.gather(rank, UP, own_rows * ROW);
            }
            (0..workers).filter(|rank| *rank != owner).for_each(|rank| bench.gather(rank, DOWN, 0));
            bench.run_in_rounds();
            let name = format!("{rows:?}, {groups:?}, by rank {owner}");
            assert_eq!(bench.complete[owner as usize].len(), 1, "{name}: the owner has not all factors");
            bench.gather(owner, DOWN, dense_bytes);
            bench.run_in_rounds();
            assert!(bench.complete.iter().all(|done| done.len() == 2), "{name}: a worker is not done");
            let mut groups_from_the_owner = groups.clone();
            groups_from_the_owner.rotate_left(at);
            for hosts in hosts_of(workers).map(|numbers| Hosts::numbered(&numbers)) {
                let want = sparse::adam(&rows, ROW, dense_bytes, &groups_from_the_owner, &hosts);
                let (sent, received, inside) = bench.on(&hosts);
                assert_eq!((sent, received), (want.sent, want.received), "{name}, {hosts:?}");
                assert_eq!(inside, want.inside_bytes, "{name}, {hosts:?}");
            }
        }
    }
}

#[test]
fn factors_to_an_owner_that_updates_move_what_the_same_cost_function_says() {
    const UP: u32 = 0;
    const LAYER: u32 = 1;
    let elems = 30 * 19 + 30;
    let rule = Rule::Sgd { momentum: 0.0, dampening: 0.0, nesterov: false };
    let optimizer = Optimizer { lr: 1.0, weight_decay: 0.0, maximize: false, rule };
    for ranks in RANKS {
        for (rows, row_bytes) in rows(ranks).iter().flat_map(|rows| ROW_BYTES.map(|bytes| (rows, bytes))) {
            for owner in [0, ranks - 1] {
                let rules = Rules { fold: Fold::Updated, ..Rules::default() };
                let roles = Roles { rules, ..Roles::alike(Members::all(ranks)) };
                let factors = gathered(61 * row_bytes).owned_by(Rank(owner));
                let layer = Tensor::new("layer", 0, Dtype::F32, elems).owned_by(Rank(owner));
                let book = dealt(vec![factors, layer], &roles);
                let mut bench = Bench::new(&book, ranks);
                let value = RealMemory::tensor(elems as usize * 4);
                let node = &mut bench.nodes[owner as usize];
                node.load(0, LAYER, (Field::Value, 0), &value).unwrap();
                // Position 0 is the owner: what ranks have is turned by as much.
                for (position, own_rows) in (0..).zip(rows) {
                    let rank = (owner + position) % ranks;
                    bench.gather(rank, UP, own_rows * row_bytes);
                    if position > 0 {
                        bench.give(rank, LAYER, elems * 4, Gives::Nothing(Op::Average));
                    }
                }
                bench.run_in_rounds();
                let complete = |bench: &Bench, rank: u32| bench.complete[rank as usize].len();
                assert_eq!(complete(&bench, owner), 1, "it has all factors now, and can rebuild");
                bench.give(owner, LAYER, elems * 4, Gives::Whole(Op::Average));
                let update = Update { optimizer, factor: 1.0 };
                for slice in bench.nodes[owner as usize].kept(0) {
                    bench
                        .step(owner, Event::Proceed { book: 0, slice, step: 1, update: Some(update) })
                        .unwrap();
                }
                bench.run_in_rounds();
                let is_done = |rank| complete(&bench, rank) == book.slices.len();
                assert!((0..ranks).all(is_done), "{rows:?}: a rank is not done");
                let hosts = Hosts::apart(ranks);
                let mut want = expected(sparse::adam(rows, row_bytes, elems * 4, &each(ranks), &hosts));
                want.sent.rotate_right(owner as usize);
                want.received.rotate_right(owner as usize);
                assert_eq!(bench.counted, want, "{rows:?} of {row_bytes} bytes to rank {owner}");
            }
        }
    }
}

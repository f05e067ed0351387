//! Bytes and steps, as counted, against the functions of [`penstock_core::cost`], exactly, for 1 to 17 ranks.
//!
//! Neither counts headers of frames. What is not one exchange (a message in parts, groups, Project Adam's scheme) is counted as
//! the exchanges that it is made of.

use super::*;
use penstock_core::cost::{Rates, Traffic, dense, sparse};
use penstock_core::parts::part_start;

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
            let memory = RealMemory::tensor(layout.len_bytes() as usize);
            let event = Event::Submit(Submission {
                book: 0,
                tensor,
                seq: 1,
                step: 1,
                memory,
                gives: Gives::Whole(Op::Sum),
            });
            self.step(rank, event).unwrap();
        }
    }

    /// A rank contributes so many bytes to a tensor that is gathered.
    fn gather(&mut self, rank: u32, tensor: u32, len_bytes: u64, only_to: Option<Rank>) {
        let (memory, len_bytes) = (RealMemory::tensor(len_bytes as usize), len_bytes as u32);
        let event = Event::Submit(Submission {
            book: 0,
            tensor,
            seq: 1,
            step: 1,
            memory,
            gives: Gives::Gathered { len_bytes, only_to },
        });
        self.step(rank, event).unwrap();
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

/// There is no exchange of groups yet, but there are those it is made of: a tree in each group, and a store whose ranks are
/// the first ones of the groups, with a part of the message each. Sums go up the trees, through the store, and down the trees.
fn count_groups(elems: u64, ranks: u32, groups: u32) -> Counted {
    let start = |group: u32| part_start(u64::from(ranks), u64::from(groups), u64::from(group)) as usize;
    let heads = count(&parts(elems, groups, groups), groups);
    let mut all = Counted { steps: 0, sent: vec![0; ranks as usize], received: vec![0; ranks as usize] };
    for group in 0..groups {
        let size = (start(group + 1) - start(group)) as u32;
        let tree = book(Route::Sum(Algorithm::Tree), Dtype::F32, elems, size, 1024);
        assert_eq!(tree.slices.len(), 1);
        let members = count(&tree, size);
        // The store begins when the slowest group has its sum, and the slowest group is the last to have the result.
        all.steps = all.steps.max(members.steps + heads.steps);
        for position in 0..size as usize {
            let head = if position == 0 { group as usize } else { usize::MAX };
            let between = |bytes: &[u64]| bytes.get(head).copied().unwrap_or(0);
            all.sent[start(group) + position] = members.sent[position] + between(&heads.sent);
            all.received[start(group) + position] = members.received[position] + between(&heads.received);
        }
    }
    all
}

#[test]
fn groups_in_front_of_a_store_move_what_their_trees_and_their_store_do() {
    for ranks in RANKS {
        for groups in 1..=ranks {
            for elems in [1, 97] {
                let want = expected(dense::groups(elems, 4, ranks, groups));
                let counted = count_groups(elems, ranks, groups);
                assert_eq!(counted, want, "{ranks} ranks in {groups} groups, {elems} elements");
            }
        }
    }
}

/// Tensors that are gathered, in frames of at most 1 KiB.
fn gathers(longest_bytes: &[u64], ranks: u32) -> Arc<Book> {
    let tensor = |bytes: &u64| Tensor::new("rows", 0, Dtype::Bytes, *bytes).with_route(Route::Gather);
    let tensors = longest_bytes.iter().map(tensor).collect();
    Arc::new(Book::new("model", vec!["layer".into()], tensors, ranks, 1024, 1).unwrap())
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
            let book = gathers(&[61 * row_bytes], ranks);
            let mut bench = Bench::new(&book, ranks);
            for (rank, own_rows) in (0..).zip(rows) {
                bench.gather(rank, 0, own_rows * row_bytes, None);
            }
            let counted = bench.count(&book, 0..ranks);
            assert_eq!(
                counted,
                expected(sparse::broadcast(rows, row_bytes)),
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
            let book = gathers(&[61 * row_bytes, dense_bytes], ranks);
            let mut bench = Bench::new(&book, ranks);
            for (rank, own_rows) in (0..).zip(rows) {
                bench.gather(rank, UP, own_rows * row_bytes, Some(Rank(0)));
            }
            (1..ranks).for_each(|rank| bench.gather(rank, DOWN, 0, None));
            bench.run_in_rounds();
            // The owner has all factors now, and can rebuild.
            assert_eq!(bench.complete[0].len(), 1);
            bench.gather(0, DOWN, dense_bytes, None);
            let counted = bench.count(&book, 0..ranks);
            let want = expected(sparse::adam(rows, row_bytes, dense_bytes));
            assert_eq!(counted, want, "{rows:?} of {row_bytes} bytes");
        }
    }
}

//! Contributions of different steps to one round are an error that names who is where.

use super::*;
use penstock_core::Error;

/// Submits tensor 0 at step 7 on rank 0, its owner or first, and lets the others come with these steps.
fn mismatch(scheme: Route, others: &[(u32, u32)]) -> Option<Error> {
    let ranks = others.len() as u32 + 1;
    let mut bench = Bench::new(0, ranks, 1 << 20);
    bench.node.open_book(0, book_of(8, ranks, &[(scheme, Dtype::F32)]), &mut bench.actions).unwrap();
    let memory = user_memory(4096);
    let event = Event::Submit(Submission {
        book: 0,
        tensor: 0,
        seq: 1,
        step: 7,
        memory,
        gives: Gives::Whole(Op::Average),
    });
    bench.node.step(event, &mut bench.actions).unwrap();
    let come = |&(from, step): &(u32, u32)| {
        // The first of a central server hears rank r in step r - 1 of the plan.
        let central = Header { argument: from - 1, ..exchange(Kind::Part, 0, 1, Op::Average) };
        let store = exchange(Kind::PushAbsent, 0, 1, Op::Average);
        bench.frame(from, Header { step, ..if scheme == Route::STORE { store } else { central } }).err()
    };
    others.iter().find_map(come)
}

fn named(error: Option<Error>) -> (u32, String, u32, String) {
    let Some(Error::Mismatch { rank, layer, step, reason }) = error else { panic!("no mismatch: {error:?}") };
    (rank.0, layer, step, reason)
}

#[test]
fn the_store_names_the_rank_that_differs_from_most() {
    assert_eq!(mismatch(Route::STORE, &[(1, 7), (2, 7), (3, 7)]), None);
    for (others, odd, usual, said) in [
        ([(1, 7), (2, 6), (3, 7)], 2, 7, "rank 2 is at step 6, ranks 0, 1, 3 are at step 7"),
        ([(3, 8), (1, 8), (2, 8)], 0, 8, "rank 0 is at step 7, ranks 1, 2, 3 are at step 8"),
        (
            [(3, 9), (2, 8), (1, 7)],
            2,
            7,
            "ranks 0, 1 are at step 7, rank 2 is at step 8, rank 3 is at step 9",
        ),
    ] {
        let (rank, layer, step, reason) = named(mismatch(Route::STORE, &others));
        assert_eq!((rank, layer.as_str(), step), (odd, "layer0", usual), "{reason}");
        assert!(reason.contains(said), "{reason}");
    }
}

#[test]
fn of_two_ranks_the_one_behind_is_named_and_both_are_told() {
    for (other, behind) in [(6, 1), (8, 0)] {
        let (rank, _, _, reason) = named(mismatch(Route::STORE, &[(1, other)]));
        assert_eq!(rank, behind);
        assert!(
            reason.contains("rank 0 is at step 7") && reason.contains(&format!("rank 1 is at step {other}"))
        );
    }
}

#[test]
fn a_collective_compares_with_whom_it_hears() {
    let (rank, layer, _, reason) = named(mismatch(Route::Sum(Algorithm::Central), &[(1, 6), (2, 7)]));
    assert_eq!((rank, layer.as_str()), (1, "layer0"));
    assert!(reason.contains("rank 1 is at step 6, rank 0 is at step 7"), "{reason}");
    assert_eq!(mismatch(Route::Sum(Algorithm::Central), &[(1, 7), (2, 7)]), None);
}

#[test]
fn a_gather_compares_all() {
    let mut bench = Bench::with_book(0, 4, 1);
    bench.gather(1, 100).unwrap();
    bench.contribution(3, 1, 0);
    bench.frame(1, Header { step: 2, ..piece_of(1, 10, 10) }).unwrap();
    let (rank, _, step, reason) = named(bench.frame(2, piece_of(1, 10, 10)).err());
    assert_eq!((rank, step), (1, 1), "{reason}");
    assert!(reason.contains("ranks 0, 2, 3 are at step 1, rank 1 is at step 2"), "{reason}");
}

#[test]
fn ranks_that_have_left_may_have_been_anywhere() {
    let mut bench = Bench::with_book(0, 3, 1 << 20);
    for (seq, step) in [(1, 1), (2, 2)] {
        let memory = user_memory(4096);
        let event = Event::Submit(Submission {
            book: 0,
            tensor: 0,
            seq,
            step,
            memory,
            gives: Gives::Whole(Op::Average),
        });
        bench.node.step(event, &mut bench.actions).unwrap();
        bench.frame(2, Header { step, ..exchange(Kind::PushAbsent, 0, seq, Op::Average) }).unwrap();
        if seq == 1 {
            bench.frame(1, exchange(Kind::PushAbsent, 0, seq, Op::Average)).unwrap();
            bench.frame(1, Header::control(Kind::Leave)).unwrap();
        }
        assert_eq!(bench.completed(), seq as usize);
    }
}

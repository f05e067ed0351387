//! Gathers: every rank's bytes at every other rank, or at one.

use super::*;

pub(crate) fn piece_of(seq: Seq, total_bytes: u32, payload_bytes: u32) -> Header {
    let header = Header { slice: GATHERED, seq, step: seq, ..Header::control(Kind::Gather) };
    Header { argument: total_bytes, payload_bytes, ..header }
}

pub(crate) fn pieces(seq: Seq, len_bytes: u32) -> Vec<Header> {
    let starts = (0..len_bytes.max(1)).step_by(4096);
    starts.map(|start| piece_of(seq, len_bytes, 4096.min(len_bytes - start))).collect()
}

#[test]
fn a_gather_brings_every_ranks_bytes_whatever_their_length() {
    let mut bench = Bench::with_book(0, 4, 1);
    bench.contribution(2, 1, 10_000);
    bench.gather(1, 5000).unwrap();
    for peer in [1, 2, 3] {
        let sent = bench.frames(peer);
        assert_eq!(sent.iter().map(|frame| frame.header).collect::<Vec<_>>(), pieces(1, 5000));
    }
    bench.contribution(1, 1, 0);
    // Rank 2 is ahead by a round, and not by two.
    bench.contribution(2, 2, 1);
    assert!(bench.node.destination(Rank(2), &piece_of(3, 1, 1)).is_err());
    assert_eq!(bench.completed(), 0);
    assert_eq!(bench.node.missing(0, GATHERED), [Rank(3)]);
    bench.contribution(3, 1, 4096);
    assert_eq!(bench.completed(), 1);
    assert_eq!(bench.gathered(), [None, Some(0), Some(10_000), Some(4096)]);
    assert_eq!(bench.node.memory().scratch.get(), 1, "the piece of round 2");
    assert!(bench.gather(1, 0).is_err(), "round 1 has ended");
}

#[test]
fn a_contribution_for_one_rank_is_empty_to_the_others() {
    let owned = |rank| {
        let mut bench = Bench::new(0, 4, 1);
        let mut book = Book::clone(&book(8, 4));
        book.tensors[GATHERED as usize].owner = Some(Rank(rank));
        bench.node.open_book(0, Arc::new(book), &mut bench.actions).unwrap();
        bench
    };
    let mut bench = owned(2);
    bench.gather(1, 5000).unwrap();
    for (peer, len_bytes) in [(1, 0), (2, 5000), (3, 0)] {
        let sent: Vec<_> = bench.frames(peer).iter().map(|frame| frame.header).collect();
        assert_eq!(sent, pieces(1, len_bytes), "to rank {peer}");
    }
    for peer in [1, 2, 3] {
        bench.contribution(peer, 1, 0);
    }
    assert_eq!((bench.completed(), bench.gathered()), (1, vec![None, Some(0), Some(0), Some(0)]));
    // The owner sends nothing but that it is there.
    let mut owner = owned(0);
    owner.gather(1, 100).unwrap();
    assert_eq!(owner.frames(3).iter().map(|frame| frame.header).collect::<Vec<_>>(), pieces(1, 0));
}

#[test]
fn a_gather_takes_nothing_that_does_not_fit() {
    let mut bench = Bench::with_book(0, 3, 1);
    for (from, header) in [
        (1, piece_of(1, GATHER_BYTES + 1, 4096)),
        (1, piece_of(1, 5000, 4097)),
        (1, piece_of(1, 5000, 100)),
        (1, piece_of(1, 5000, 0)),
        (1, piece_of(1, 0, 1)),
        (0, piece_of(1, 100, 100)),
        (1, Header { slice: 0, ..piece_of(1, 4096, 4096) }),
        (1, Header { slice: GATHERED, ..exchange(Kind::Push, 0, 1, Op::Average) }),
    ] {
        assert!(bench.node.destination(Rank(from), &header).is_err(), "{header:?}");
    }
    bench.frame(1, piece_of(1, 5000, 4096)).unwrap();
    assert!(bench.node.destination(Rank(1), &piece_of(1, 5001, 905)).is_err(), "its length has changed");
    bench.frame(1, piece_of(1, 5000, 904)).unwrap();
    assert!(bench.node.destination(Rank(1), &piece_of(1, 5000, 4096)).is_err(), "a second contribution");
}

#[test]
fn pieces_of_a_gather_wait_their_turn_one_by_one() {
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    bench.node.set_priorities(0, &(0..64).rev().collect::<Vec<_>>());
    bench.gather(1, 9000).unwrap();
    assert_eq!(bench.node.next_frame(Rank(1)).map(|frame| frame.header.kind), Some(Kind::Gather));
    bench.submit(7, 1, Op::Average, false);
    let kinds: Vec<Kind> = bench.frames(1).iter().map(|frame| frame.header.kind).collect();
    assert_eq!(kinds, [Kind::Push, Kind::Gather, Kind::Gather], "layer 7 is at place 56, layer 0 at 63");
}

#[test]
fn a_rank_that_leaves_counts_in_the_gathers_it_contributed_to_and_in_no_other() {
    let mut bench = Bench::with_book(0, 3, 1);
    bench.gather(1, 10).unwrap();
    bench.contribution(1, 1, 5);
    bench.frame(1, Header::control(Kind::Leave)).unwrap();
    assert_eq!(bench.completed(), 0, "rank 2 is missing");
    bench.contribution(2, 1, 7);
    assert_eq!(bench.gathered(), [None, Some(5), Some(7)]);
    bench.contribution(2, 2, 8);
    bench.gather(2, 10).unwrap();
    assert_eq!(bench.gathered(), [None, None, Some(8)]);
    assert!(bench.frames(1).iter().all(|frame| frame.header.seq == 1), "nothing more for rank 1");
    // Now this rank leaves; rank 2 goes on, has not heard of it yet, and its contribution is dropped.
    bench.actions.clear();
    bench.node.step(Event::Leave, &mut bench.actions).unwrap();
    bench.contribution(2, 3, 9000);
    assert_eq!(bench.node.memory().scratch.get(), 0);
    bench.frame(2, Header::control(Kind::Leave)).unwrap();
    // All have left. Rank 1 knew it first, and is at the round that the ranks have agreed on.
    bench.contribution(1, 4, 3);
    bench.gather(4, 10).unwrap();
    bench.contribution(2, 4, 0);
    assert_eq!(bench.gathered(), [None, Some(3), Some(0)]);
}

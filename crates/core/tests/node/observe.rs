//! What a node lets others see of a slice's journey, in which order.

use super::*;
use Point::{Answered, Arrived, FirstByteOut, Landed, Queued, Submitted, Summed};
use penstock_core::observe::{PayloadBytes, PeerCounts};

impl Bench {
    /// What was observed since the last call.
    fn seen(&mut self) -> Vec<Seen> {
        std::mem::take(&mut self.node.observer().seen)
    }
}

#[test]
fn a_workers_slice_is_submitted_queued_sent_answered_and_lands() {
    let mut bench = Bench::with_book(1, 3, 1 << 20);
    bench.submit(0, 1, Op::Average, false);
    assert_eq!(bench.seen(), [(Submitted, Kind::Push, None), (Queued, Kind::Push, Some(0))]);
    let taken = bench.node.next_frame(Rank(0)).unwrap();
    assert_eq!(bench.seen(), [], "the driver has it, the network has not");
    bench.node.first_byte_out(Rank(0), &taken.header);
    assert_eq!(bench.seen(), [(FirstByteOut, Kind::Push, Some(0))]);
    bench.frame(0, exchange(Kind::Answer, 0, 1, Op::Average)).unwrap();
    assert_eq!(bench.seen(), [(Arrived, Kind::Answer, Some(0)), (Landed, Kind::Answer, None)]);
}

#[test]
fn an_owner_sums_before_it_answers_and_answers_before_its_own_result_lands() {
    let mut bench = Bench::with_book(0, 3, 1 << 20);
    bench.frame(2, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    bench.submit(0, 1, Op::Average, true);
    let before = [(Arrived, Kind::Push, Some(2)), (Submitted, Kind::PushAbsent, None)];
    assert_eq!(bench.seen(), before);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    let answers = [1, 2].map(|peer| (Answered, Kind::Answer, Some(peer)));
    let summed = [(Arrived, Kind::Push, Some(1)), (Summed, Kind::Push, None)];
    assert_eq!(bench.seen(), [&summed[..], &answers, &[(Landed, Kind::Push, None)]].concat());
    bench.frames(2);
    assert_eq!(bench.seen(), [(FirstByteOut, Kind::Answer, Some(2))]);
}

#[test]
fn where_nobody_contributes_nothing_is_summed() {
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    bench.submit(0, 1, Op::Average, true);
    bench.frame(1, exchange(Kind::PushAbsent, 0, 1, Op::Average)).unwrap();
    assert_eq!(
        bench.seen(),
        [
            (Submitted, Kind::PushAbsent, None),
            (Arrived, Kind::PushAbsent, Some(1)),
            (Answered, Kind::AnswerAbsent, Some(1)),
            (Landed, Kind::PushAbsent, None)
        ]
    );
}

#[test]
fn each_piece_of_a_gather_is_queued_sent_and_arrives() {
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    bench.gather(1, 5000).unwrap();
    bench.frames(1);
    bench.contribution(1, 1, 100);
    let of = |point, peer| (point, Kind::Gather, peer);
    let twice = |point| [of(point, Some(1)); 2];
    let ways = [&[of(Submitted, None)], &twice(Queued)[..], &twice(FirstByteOut)].concat();
    assert_eq!(bench.seen(), [&ways[..], &[of(Arrived, Some(1)), of(Landed, None)]].concat());
}

#[test]
fn a_collective_queues_what_is_to_be_summed_and_answers_what_is() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let ring = [(Route::Sum(Algorithm::Ring), Dtype::F32)];
    bench.node.open_book(0, book_of(1, 2, &ring), &mut bench.actions).unwrap();
    bench.submit(0, 1, Op::Average, false);
    bench.frames(1);
    let half = |kind, argument| Header { argument, payload_bytes: 2048, ..exchange(kind, 0, 1, Op::Average) };
    bench.frame(1, half(Kind::Part, 0)).unwrap();
    bench.frames(1);
    bench.frame(1, half(Kind::Result, 1)).unwrap();
    let there = [
        (Submitted, Kind::Push, None),
        (Queued, Kind::Part, Some(1)),
        (FirstByteOut, Kind::Part, Some(1)),
        (Arrived, Kind::Part, Some(1)),
        (Summed, Kind::Part, None),
    ];
    let back = [
        (Answered, Kind::Result, Some(1)),
        (FirstByteOut, Kind::Result, Some(1)),
        (Arrived, Kind::Result, Some(1)),
        (Landed, Kind::Result, None),
    ];
    assert_eq!(bench.seen(), [&there[..], &back].concat());
}

#[test]
fn frames_that_are_no_slices_have_no_layer_and_count_no_traffic() {
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    bench.frame(1, Header { payload_bytes: 100, ..Header::control(Kind::Blob) }).unwrap();
    bench.node.step(Event::Leave, &mut bench.actions).unwrap();
    bench.frames(1);
    assert_eq!(bench.seen(), [(Arrived, Kind::Blob, Some(1)), (FirstByteOut, Kind::Leave, Some(1))]);
    let Counters { frames_sent, frames_received, traffic, .. } = &bench.node.observer().counters;
    assert_eq!((*frames_sent, *frames_received, traffic.len()), (1, 1, 0));
}

#[test]
fn what_overtakes_is_counted() {
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    for tensor in [5, 3, 7] {
        bench.submit(tensor, 1, Op::Average, false);
    }
    assert_eq!(
        bench.node.observer().counters.preemptions,
        1,
        "tensor 3 goes before tensor 5, and 7 behind both"
    );
}

#[test]
fn what_waits_for_a_peer_is_counted_until_its_first_byte_is_out() {
    let mut bench = Bench::with_book(1, 3, 1 << 20);
    bench.submit(0, 1, Op::Average, false);
    let waits = PeerCounts { queued_frames: 1, queued_bytes: 4096, ..PeerCounts::default() };
    assert_eq!(bench.node.observer().counters.peers, [waits]);
    let taken = bench.node.next_frame(Rank(0)).unwrap();
    assert_eq!(bench.node.observer().counters.peers, [waits], "the driver has it, the network has not");
    bench.node.first_byte_out(Rank(0), &taken.header);
    bench.frame(0, exchange(Kind::Answer, 0, 1, Op::Average)).unwrap();
    let payload = PayloadBytes { sent_bytes: 4096, received_bytes: 4096 };
    let done = PeerCounts { payload, ..PeerCounts::default() };
    assert_eq!(bench.node.observer().counters.peers, [done]);
    // What is no slice's counts for no peer: nobody sees it queued.
    bench.node.step(Event::Leave, &mut bench.actions).unwrap();
    bench.frame(2, Header { payload_bytes: 100, ..Header::control(Kind::Blob) }).unwrap();
    bench.frames(0);
    bench.frames(2);
    assert_eq!(bench.node.observer().counters.peers, [done]);
}

//! What is observed of slices on real sockets: in the order of their journeys, and no more of it kept than was asked for.

mod support;

use penstock_core::layout::Tensor;
use penstock_core::observe::Point::{
    self, Answered, Applied, Arrived, FirstByteOut, Landed, Queued, Submitted, Summed,
};
use penstock_core::{Dtype, Gives, Op, Rank, Submission};
use penstock_net::{Engine, Lent, Observations, Record};
use std::collections::BTreeMap;
use support::{job_with, never, on_all};

const RANKS: u32 = 2;
const SLICES: usize = 40;
const ROUNDS: u32 = 3;

/// Averages a tensor of `SLICES` slices `ROUNDS` times, and applies it.
fn train(engine: &Engine) -> Observations {
    let mut values = vec![1f32; SLICES * 1024];
    let tensor = Tensor::new("tensor", 1, Dtype::F32, values.len() as u64);
    let book = engine.open_book("book", vec!["a".into(), "b".into()], vec![tensor], None).unwrap();
    for step in 0..ROUNDS {
        let (address, len_bytes) = (values.as_mut_ptr() as usize, size_of_val(&values[..]));
        let (memory, gives) = (Lent { address, len_bytes }, Gives::Whole(Op::Average));
        let submission = Submission { book, tensor: 0, seq: 0, step, memory, gives };
        // SAFETY: `values` stays, and is left alone, until it is released.
        unsafe { engine.submit(submission, false) }.unwrap();
        engine.wait(book, &[0], true, &mut never).unwrap();
        engine.applied(book, &[0]).unwrap();
    }
    engine.shutdown(&mut never).unwrap();
    engine.observations().unwrap()
}

#[test]
fn every_slice_is_seen_at_each_point_of_its_journey_in_order() {
    let seen = on_all(job_with(RANKS, |_| {}), |engine, _| train(engine));
    let mut journeys: BTreeMap<_, Vec<(u32, Record)>> = BTreeMap::new();
    for (rank, seen) in seen.into_iter().enumerate() {
        assert_eq!(seen.lost, 0);
        let records: Vec<Record> = seen.in_order().records().collect();
        assert!(records.is_sorted_by_key(|record| record.time_ns));
        for record in records {
            journeys.entry((record.slice, record.seq)).or_default().push((rank as u32, record));
        }
    }
    assert_eq!(journeys.len(), SLICES * ROUNDS as usize);
    for ((slice, seq), records) in journeys {
        // Both ranks are of one process and have one clock.
        let at = |rank: u32, point: Point, peer: Option<u32>| {
            let peer = peer.map(Rank);
            let mut found = records.iter().filter(|(of, r)| (*of, r.point, r.peer) == (rank, point, peer));
            let (_, record) = found.next().unwrap_or_else(|| {
                panic!("slice {slice}, round {seq}: rank {rank} has no {point:?}, {peer:?}: {records:?}")
            });
            assert!(found.next().is_none(), "slice {slice}, round {seq}: {point:?} twice");
            assert_eq!((record.book, record.layer), (0, 1));
            assert_eq!(record.payload_bytes, if peer.is_some() { 4096 } else { 0 });
            record.time_ns
        };
        let owner = records.iter().find(|(_, record)| record.point == Summed).unwrap().0;
        let (worker, o, w) = (1 - owner, Some(owner), Some(1 - owner));
        let of_worker = [at(worker, Submitted, None), at(worker, Queued, o), at(worker, FirstByteOut, o)];
        let of_owner = [at(owner, Arrived, w), at(owner, Summed, None), at(owner, Answered, w)];
        let back = [at(owner, FirstByteOut, w), at(worker, Arrived, o), at(worker, Landed, None)];
        let there_and_back = [&of_worker[..], &of_owner, &back, &[at(worker, Applied, None)]].concat();
        assert!(there_and_back.is_sorted(), "slice {slice}, round {seq}: {there_and_back:?}");
        let own =
            [at(owner, Submitted, None), of_owner[1], at(owner, Landed, None), at(owner, Applied, None)];
        assert!(own.is_sorted(), "slice {slice}, round {seq}: {own:?}");
        assert_eq!(records.len(), 13);
    }
}

#[test]
fn no_more_is_kept_than_was_asked_for_and_the_rest_is_counted() {
    let few = on_all(job_with(RANKS, |config| (config.lanes, config.observations) = (2, 16)), |engine, _| {
        train(engine)
    });
    let total: u64 = few.iter().map(|seen| seen.records().count() as u64 + seen.lost).sum();
    assert_eq!(total, SLICES as u64 * u64::from(ROUNDS) * 13);
    for seen in few {
        let records: Vec<Record> = seen.records().collect();
        // Of two lanes and the program; one of a ring may be being written.
        assert_eq!(records.len(), 3 * 15);
        assert!(records.iter().all(|record| record.seq == ROUNDS), "the newest: {records:?}");
    }
}

#[test]
fn where_nothing_is_kept_nothing_is_seen() {
    let none = on_all(job_with(RANKS, |config| config.observations = 0), |engine, _| {
        assert!(!engine.is_observed());
        train(engine)
    });
    assert!(none.iter().all(|seen| seen.records().count() == 0 && seen.lost == 0));
}

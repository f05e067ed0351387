//! Engines of one job in one process, over loopback: what comes out of an exchange, and what is said when it fails.

mod support;

use penstock_core::cost::Rates;
use penstock_core::layout::{Book, Tensor};
use penstock_core::way::Algorithm;
use penstock_core::{BookId, Dtype, Error, Gives, Op, Rank, Route, Submission, TensorId};
use penstock_net::{Engine, EngineConfig, Failure, Landed, Lent, Phase, Stop, Until};
use std::time::{Duration, Instant};
use support::{Meeting, config, job, job_with, never, on_all};

/// 10,000 fp32 in layer `a`, 3 in layer `b`.
fn open(engine: &Engine) -> BookId {
    let tensors =
        vec![Tensor::new("a.weight", 0, Dtype::F32, 10_000), Tensor::new("b.weight", 1, Dtype::F32, 3)];
    engine.open_book("gradients", vec!["a".into(), "b".into()], tensors, None).unwrap()
}

fn submit(
    engine: &Engine,
    book: BookId,
    tensor: TensorId,
    values: &mut [f32],
    op: Op,
    absent: bool,
) -> Result<u64, Failure> {
    let (address, len_bytes) = (values.as_mut_ptr() as usize, std::mem::size_of_val(values));
    // SAFETY: the callers below keep `values` until it is released, or leak it.
    unsafe {
        engine.submit(
            Submission {
                book,
                tensor,
                seq: 0,
                step: 5,
                memory: Lent { address, len_bytes },
                gives: Gives::unless_absent(op, absent),
            },
            false,
        )
    }
}

/// One round of a tensor from start to release.
fn exchange(
    engine: &Engine,
    book: BookId,
    tensor: TensorId,
    values: &mut [f32],
    op: Op,
    absent: bool,
) -> Result<(), Stop> {
    submit(engine, book, tensor, values, op, absent)?;
    engine.wait(book, &[tensor], true, &mut never)
}

fn look(engine: &Engine, book: BookId, tensors: &[TensorId]) -> Landed {
    engine.landed(book, tensors, None, false, &mut never).unwrap()
}

fn failed<T: std::fmt::Debug>(outcome: Result<T, Stop>) -> Failure {
    match outcome {
        Err(Stop::Failed(failure)) => *failure,
        other => panic!("{other:?}"),
    }
}

fn lost(stop: &Stop) -> (Rank, String) {
    let Stop::Failed(failure) = stop else { panic!("interrupted") };
    let Error::PeerLost { rank, reason } = &failure.error else { panic!("{failure:?}") };
    assert_eq!(failure.rank, Some(*rank));
    (*rank, reason.clone())
}

#[test]
fn known_values_are_averaged_summed_copied_and_absences_count_as_zero() {
    for size in 1..=4 {
        let engines = job(size);
        let reports = on_all(engines, move |engine, rank| {
            let book = open(engine);
            engine.set_priorities(book, &[1, 0]).unwrap();
            engine.phase(Phase::Backward).unwrap();
            let (mut a, mut b) = (vec![0.0; 10_000], vec![0.0; 3]);
            for round in 0..3 {
                a.fill((rank + round) as f32);
                exchange(engine, book, 0, &mut a, Op::Average, false).unwrap();
                let mean = (0..size).map(|r| (r + round) as f32).sum::<f32>() / size as f32;
                assert!(a.iter().all(|x| *x == mean), "{} instead of {mean}", a[0]);
            }
            b.fill(2.0);
            exchange(engine, book, 1, &mut b, Op::Sum, false).unwrap();
            assert_eq!(b, [2.0 * size as f32; 3]);
            // Only the last rank contributes: an average over all, then a broadcast.
            let absent = rank + 1 != size;
            a.fill(if absent { 9.0 } else { 8.0 });
            exchange(engine, book, 0, &mut a, Op::Average, absent).unwrap();
            assert!(a.iter().all(|x| *x == 8.0 / size as f32));
            assert_eq!(look(engine, book, &[0]).bytes, [40_000]);
            b.copy_from_slice(if absent { &[9.0; 3] } else { &[1.0, f32::NAN, -0.0] });
            exchange(engine, book, 1, &mut b, Op::Copy, absent).unwrap();
            assert_eq!(
                b.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                [1.0, f32::NAN, -0.0].map(f32::to_bits)
            );
            // Nobody does: the memory stays as it is.
            a.fill(3.0);
            exchange(engine, book, 0, &mut a, Op::Average, true).unwrap();
            assert!(a.iter().all(|x| *x == 3.0));
            let landed = look(engine, book, &[0, 1]);
            assert_eq!((landed.complete, landed.bytes), (vec![0, 1], vec![0, 12]));
            assert_eq!(landed.released.len(), 2);
            assert!(look(engine, book, &[]).released.is_empty());
            assert_eq!(engine.sequence(book).unwrap(), [5, 2]);
            engine.shutdown(&mut never).unwrap();
            engine.report().unwrap()
        });
        let sent: u64 = reports.iter().map(|report| report.bytes_sent).sum();
        assert_eq!(sent, reports.iter().map(|report| report.bytes_received).sum::<u64>());
        assert!(
            reports.iter().all(|report| report.slices == reports[0].slices && report.pool_bytes == 0),
            "{reports:?}"
        );
        for (rank, report) in reports.iter().enumerate() {
            assert_eq!(report.tensors_in_flight, 0);
            assert_eq!(report.peers.iter().map(|peer| peer.bytes_sent).sum::<u64>(), report.bytes_sent);
            for peer in &report.peers {
                assert_eq!((peer.queued_frames, peer.queued_bytes), (0, 0), "{reports:?}");
                let back = reports[peer.rank as usize].peers.iter().find(|back| back.rank as usize == rank);
                assert_eq!(back.map_or(0, |back| back.bytes_received), peer.bytes_sent, "{reports:?}");
            }
        }
    }
}

#[test]
fn blobs_come_back_in_rank_order() {
    let engines = job(3);
    on_all(engines, |engine, rank| {
        for round in 0..20usize {
            let blob = vec![rank as u8; round * 1000 * rank as usize];
            let blobs = engine.all_gather("sizes", &blob, &mut never).unwrap();
            let expected: Vec<_> = (0..3u8).map(|r| vec![r; round * 1000 * usize::from(r)]).collect();
            assert_eq!(blobs, expected);
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_rank_that_has_left_counts_no_more_until_all_have() {
    let engines = job(3);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        let mut b = vec![0.0; 3];
        for round in 0..3 {
            if rank == 2 && round == 1 {
                break;
            }
            b.fill(rank as f32);
            exchange(engine, book, 1, &mut b, Op::Average, false).unwrap();
            assert_eq!(b[0], if round == 0 { 1.0 } else { 0.5 });
        }
        engine.leave(&mut never).unwrap();
        let seq = engine.sequence(book).unwrap()[1];
        let seqs = engine.all_gather("sequence", &seq.to_le_bytes(), &mut never).unwrap();
        let most = seqs.iter().map(|s| u32::from_le_bytes(s[..].try_into().unwrap())).max().unwrap();
        engine.set_sequence(book, &[0, most]).unwrap();
        b.fill(rank as f32);
        exchange(engine, book, 1, &mut b, Op::Average, false).unwrap();
        assert_eq!(b[0], 1.0);
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn who_vanishes_is_named_by_all_with_layer_and_step() {
    // Seen by the connection's end: long before any timeout.
    let patience = Duration::from_secs(60);
    let engines =
        job_with(4, |config| (config.operation_timeout, config.peer_timeout) = (patience, patience));
    let all_have_returned = Meeting::of(4);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        let mut b = vec![1.0; 3];
        exchange(engine, book, 1, &mut b, Op::Sum, false).unwrap();
        engine.all_gather("all are connected", b"", &mut never).unwrap();
        all_have_returned.wait();
        if rank == 3 {
            return; // Dropped without a goodbye.
        }
        let a = vec![1.0; 10_000].leak();
        let begin = Instant::now();
        let stop = loop {
            if let Err(stop) = exchange(engine, book, 0, a, Op::Sum, false) {
                break stop;
            }
        };
        let (culprit, reason) = lost(&stop);
        let Stop::Failed(failure) = stop else { unreachable!() };
        assert_eq!(
            (culprit, failure.layer.as_deref(), failure.step),
            (Rank(3), Some("a"), Some(5)),
            "{reason}"
        );
        assert!(
            reason.contains("rank 3") && reason.contains("layer a") && failure.peer.is_some(),
            "{reason}"
        );
        assert!(begin.elapsed() < patience / 2);
        // It was raised; closing is quick and quiet.
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn who_vanishes_in_the_middle_of_a_gather_is_named_by_all_with_layer_and_step() {
    const LEN_BYTES: usize = 32 << 20; // more than sockets hold: it dies with frames half written
    let engines = job_with(4, |config| config.slice_bytes = 512 << 10);
    let all_have_returned = Meeting::of(4);
    on_all(engines, |engine, rank| {
        let rows = Tensor::new("rows", 1, Dtype::Bytes, LEN_BYTES as u64).with_route(Route::Gather);
        let book = engine.open_book("gradients", vec!["a".into(), "b".into()], vec![rows], None).unwrap();
        engine.all_gather("all are connected", b"", &mut never).unwrap();
        all_have_returned.wait();
        let len_bytes = if rank == 2 { LEN_BYTES } else { 1000 };
        let address = vec![rank as u8; len_bytes].leak().as_ptr() as usize;
        let bytes = Submission {
            book,
            tensor: 0,
            seq: 0,
            step: 5,
            memory: Lent { address, len_bytes },
            gives: Gives::Gathered(len_bytes as u32),
        };
        // SAFETY: leaked.
        let submit = || unsafe { engine.submit(bytes, false) };
        if rank == 2 {
            submit().unwrap();
            return; // Dropped without a goodbye.
        }
        // Where rank 2 is held up, it may get all of it out before it ends: then it lacks in the next gather.
        let stop = loop {
            let outcome = submit().map_err(Stop::from);
            if let Err(stop) = outcome.and_then(|_| engine.wait(book, &[0], true, &mut never)) {
                break stop;
            }
        };
        let (culprit, reason) = lost(&stop);
        let Stop::Failed(failure) = stop else { unreachable!() };
        assert_eq!(
            (culprit, failure.layer.as_deref(), failure.step),
            (Rank(2), Some("b"), Some(5)),
            "{reason}"
        );
        assert!(reason.contains("rank 2") && reason.contains("layer b"), "{reason}");
        assert!(engine.gathered(book, 0).is_err(), "half a contribution is none");
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn an_abort_reaches_everybody_with_its_reason() {
    let engines = job(3);
    on_all(engines, |engine, rank| {
        let connected = engine.all_gather("all are connected", b"", &mut never);
        if rank == 1 {
            connected.unwrap();
            return engine.abort("ValueError: no such file").unwrap();
        }
        // Rank 1 may have everything, and fail, before the other two have heard of each other.
        let stop = connected.and_then(|_| engine.all_gather("never", b"", &mut never)).unwrap_err();
        let (culprit, reason) = lost(&stop);
        assert!(culprit == Rank(1) && reason.contains("no such file"), "{reason}");
    });
}

#[test]
fn what_is_left_open_follows_from_the_line_rate() {
    let engines = job_with(2, |config| {
        config.slice_bytes = 0;
        config.all_lanes = false;
    });
    on_all(engines, |engine, _| {
        let rates = |bytes_per_s| Rates { bytes_per_s, ..Rates::default() };
        engine.set_rates(rates(1e6)).unwrap();
        assert_eq!((engine.slicing().store_bytes, engine.slicing().lanes), (64 << 10, 1));
        let slow = open(engine);
        engine.set_rates(rates(1e10)).unwrap();
        assert_eq!((engine.slicing().store_bytes, engine.slicing().lanes), (512 << 10, 2));
        let fast = open(engine);
        for book in [slow, fast] {
            let mut values = vec![1.0; 10_000];
            exchange(engine, book, 0, &mut values, Op::Sum, false).unwrap();
            assert_eq!(values, vec![2.0; 10_000]);
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_look_at_results_that_are_in_names_layer_and_step_of_a_failure() {
    let engines = job(2);
    let both_have_it = Meeting::of(2);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        exchange(engine, book, 1, vec![1.0; 3].leak(), Op::Sum, false).unwrap();
        both_have_it.wait();
        if rank == 1 {
            return engine.abort("ValueError: a bad batch").unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        let failure = loop {
            assert!(Instant::now() < deadline, "rank 0 never hears of it");
            match engine.landed(book, &[1], None, true, &mut never) {
                Ok(landed) => assert_eq!(landed.complete, [1]),
                outcome => break failed(outcome),
            }
        };
        let text = failure.to_string();
        assert_eq!((failure.layer.as_deref(), failure.step), (Some("b"), Some(5)), "{text}");
        assert!(text.contains("layer b") && text.contains("step 5"), "{text}");
    });
}

#[test]
fn the_beginning_of_a_tensor_is_in_memory_when_it_is_said_to_be() {
    let engines = job(2);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        let a = vec![0.0; 10_000].leak();
        for round in 1..=20 {
            a.fill((rank + round) as f32);
            let address = a.as_ptr();
            submit(engine, book, 0, a, Op::Sum, false).unwrap();
            let mut seen = 0;
            while seen < 40_000 {
                let next = (seen as u64 + 1000).min(40_000);
                let until = Until { least_bytes: &[next], patience: Duration::from_secs(10) };
                let Landed { complete, bytes, .. } =
                    engine.landed(book, &[0], Some(until), false, &mut never).unwrap();
                assert!(bytes[0] >= next, "{bytes:?} instead of {next:?}");
                assert!(complete.is_empty() || bytes == [40_000]);
                seen = bytes[0] as usize;
                for at in 0..seen / 4 {
                    // SAFETY: within the tensor; what is in memory is not written again.
                    let value = unsafe { address.add(at).read_volatile() };
                    assert_eq!(
                        value,
                        (2 * round + 1) as f32,
                        "element {at} of {seen} bytes in round {round}"
                    );
                }
            }
            engine.wait(book, &[0], true, &mut never).unwrap();
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_wait_for_a_part_ends_when_its_time_is_up_or_the_job_has_failed() {
    let engines = job(2);
    let rank_0_has_waited = Meeting::of(2);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        engine.all_gather("both are connected", b"", &mut never).unwrap();
        if rank == 1 {
            rank_0_has_waited.wait();
            return engine.abort("ValueError: a bad batch").unwrap();
        }
        submit(engine, book, 1, vec![1.0; 3].leak(), Op::Sum, false).unwrap();
        let wait = |patience, needed| {
            let until = Some(Until { least_bytes: &[12], patience });
            engine.landed(book, &[1], until, needed, &mut never)
        };
        assert_eq!(
            wait(Duration::from_millis(20), true).unwrap(),
            Landed { bytes: vec![0], ..Landed::default() }
        );
        rank_0_has_waited.wait();
        let begin = Instant::now();
        assert_eq!(wait(Duration::from_secs(20), false).unwrap().complete, []);
        assert!(engine.has_failed() && begin.elapsed() < Duration::from_secs(20));
        assert!(lost(&wait(Duration::from_secs(20), true).unwrap_err()).1.contains("layer b"));
        let (culprit, reason) = lost(&engine.wait(book, &[1], false, &mut never).unwrap_err());
        assert!(culprit == Rank(1) && reason.contains("a bad batch"), "{reason}");
    });
}

/// Of who sees first that somebody does not come: ample for the others to be there, on however busy a machine.
const FIRST_UP: Duration = Duration::from_secs(2);

/// The last of `size` engines does not come: it is there until the others have said what `others` finds wrong with that.
fn on_all_but_the_last(
    size: u32,
    change: impl Fn(&mut EngineConfig),
    others: impl Fn(&Engine, u32) -> Failure + Send + Sync,
) -> Vec<Failure> {
    let meeting = Meeting::of(size as usize);
    let failures = on_all(job_with(size, change), |engine, rank| {
        engine.all_gather("all are connected", b"", &mut never).unwrap();
        // Or who is back from the gather late is still on its way when the time of the first is up.
        meeting.wait();
        let failure = (rank != size - 1).then(|| others(engine, rank));
        meeting.wait(); // All have seen it.
        failure
    });
    failures.into_iter().flatten().collect()
}

#[test]
fn who_does_not_come_is_named_when_time_is_up() {
    let change = |config: &mut EngineConfig| config.operation_timeout = FIRST_UP;
    let failures = on_all_but_the_last(2, change, |engine, _| {
        let book = open(engine);
        failed(exchange(engine, book, 0, vec![1.0; 10_000].leak(), Op::Sum, false))
    });
    let [failure] = &failures[..] else { panic!("{failures:?}") };
    let text = failure.to_string();
    assert!(matches!(failure.error, Error::Timeout(_)) && text.contains("rank 1"), "{text}");
    assert_eq!((failure.layer.as_deref(), failure.step), (Some("a"), Some(5)));
}

/// Rank 1's time is up first, but by less than it waits for the word of the others.
fn in_turn(config: &mut EngineConfig) {
    config.operation_timeout = FIRST_UP + Duration::from_millis(if config.rank == 1 { 0 } else { 100 });
}

/// Contributes, and waits once all who do have done so: the time that is up runs from there.
fn waited(engine: &Engine, book: BookId, tensor: TensorId, come: &Meeting) -> Failure {
    submit(engine, book, tensor, vec![1.0; 3].leak(), Op::Sum, false).unwrap();
    come.wait();
    failed(engine.wait(book, &[tensor], true, &mut never))
}

fn assert_rank_2_is_named(failures: &[Failure], what: &str) {
    assert_eq!(failures.len(), 2);
    for failure in failures {
        assert_eq!(failure.rank, Some(Rank(2)), "{what}: {failure}");
        assert!(failure.to_string().contains("rank 2 did not contribute"), "{what}: {failure}");
    }
}

#[test]
fn who_does_not_come_to_a_collective_is_named_by_all() {
    std::thread::scope(|scope| {
        for scheme in Algorithm::COLLECTIVES.map(Route::Sum) {
            scope.spawn(move || {
                let come = Meeting::of(2);
                // Rank 1 does not hear rank 2 directly; rank 0 does.
                let failures = on_all_but_the_last(3, in_turn, move |engine, _| {
                    let tensor = Tensor::new("t", 0, Dtype::F32, 3).with_route(scheme);
                    let book = engine.open_book("late", vec!["a".into()], vec![tensor], None).unwrap();
                    waited(engine, book, 0, &come)
                });
                assert_rank_2_is_named(&failures, &format!("{scheme:?}"));
            });
        }
    });
}

#[test]
fn who_does_not_come_is_named_also_by_those_who_wait_for_another_owner() {
    let come = Meeting::of(2);
    // All that rank 1 sees is that rank 0, the owner, does not answer.
    let failures = on_all_but_the_last(3, in_turn, |engine, _| {
        let tensors: Vec<_> = (0..3).map(|at| Tensor::new(format!("t{at}"), 0, Dtype::F32, 3)).collect();
        let book = Book::new("owners", vec!["a".into()], tensors.clone(), 3, 4096, 2).unwrap();
        let owned = book.slices.iter().find(|slice| slice.owner == Rank(0)).unwrap().tensor;
        let id = engine.open_book("owners", vec!["a".into()], tensors, None).unwrap();
        waited(engine, id, owned, &come)
    });
    assert_rank_2_is_named(&failures, "store");
}

#[test]
fn who_goes_on_alone_is_told_of_the_goodbye() {
    let engines = job(2);
    on_all(engines, |engine, rank| {
        let book = open(engine);
        exchange(engine, book, 1, &mut [1.0; 3], Op::Sum, false).unwrap();
        if rank == 0 {
            // The job did not end in order, and the other says why.
            let (culprit, reason) = lost(&engine.shutdown(&mut never).unwrap_err());
            return assert!(culprit == Rank(0) && reason.contains("blames this rank"), "{reason}");
        }
        let (culprit, reason) =
            lost(&exchange(engine, book, 1, vec![1.0; 3].leak(), Op::Sum, false).unwrap_err());
        assert!(culprit == Rank(0) && reason.contains("ps.join()"), "{reason}");
    });
}

#[test]
fn a_wait_can_be_interrupted() {
    let engines = job(2);
    let book = open(&engines[0]);
    submit(&engines[0], book, 1, vec![1.0; 3].leak(), Op::Sum, false).unwrap();
    let begin = Instant::now();
    let stop = engines[0].wait(book, &[1], false, &mut || true).unwrap_err();
    assert!(matches!(stop, Stop::Interrupted) && begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_shutdown_within_another_returns_no_earlier_than_the_engine_has_ended() {
    let within = Meeting::of(2);
    on_all(job(2), |engine, rank| {
        let (book, values) = (open(engine), vec![1.0; 3].leak());
        if rank == 1 {
            within.wait();
            submit(engine, book, 1, values, Op::Sum, false).unwrap();
            return engine.shutdown(&mut never).unwrap();
        }
        let token = submit(engine, book, 1, values, Op::Sum, false).unwrap();
        let mut calls = 0;
        let mut handler = || {
            calls += 1;
            if calls == 1 {
                within.wait();
                engine.shutdown(&mut never).unwrap();
                assert!(engine.check().is_err(), "the engine has not ended");
                assert_eq!(look(engine, book, &[1]).released, [token]);
            }
            false
        };
        engine.shutdown(&mut handler).unwrap();
        assert!(calls > 0);
    });
}

#[test]
fn who_stops_waiting_while_all_are_asked_ends_nothing() {
    let engines = job_with(2, |config| config.operation_timeout = Duration::from_millis(200));
    let books = [open(&engines[0]), open(&engines[1])];
    let mut mine = [1.0; 3];
    submit(&engines[0], books[0], 1, &mut mine, Op::Sum, false).unwrap();
    let begin = Instant::now();
    let mut soon = || begin.elapsed() > Duration::from_millis(300);
    let stop = engines[0].wait(books[0], &[1], false, &mut soon).unwrap_err();
    assert!(matches!(stop, Stop::Interrupted), "{stop:?}");
    // What the answers show would be held back for less.
    std::thread::sleep(Duration::from_secs(1));
    exchange(&engines[1], books[1], 1, &mut [1.0; 3], Op::Sum, false).unwrap();
    engines[0].wait(books[0], &[1], false, &mut never).unwrap();
    assert_eq!(mine, [2.0; 3]);
}

#[test]
fn what_does_not_fit_is_refused_and_harms_nothing() {
    let engines = job(1);
    let engine = &engines[0];
    let book = open(engine);
    let refused = |tensor, len: usize, what: &str| {
        let mut values = vec![0.0; len];
        let error = submit(engine, book, tensor, &mut values, Op::Sum, false).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(0, 3, "40000 bytes");
    refused(2, 3, "no tensor 2");
    assert!(engine.set_priorities(book, &[0]).is_err() && engine.set_sequence(book, &[1]).is_err());
    assert!(engine.wait(book, &[9], false, &mut never).is_err());
    exchange(engine, book, 1, &mut [1.0; 3], Op::Sum, false).unwrap();
    assert!(Engine::bind(EngineConfig { rank: 2, ..config(0, 2) }).is_err());
    assert!(Engine::bind(EngineConfig { slice_bytes: 1, ..config(0, 2) }).is_err());
}

#[test]
fn a_contribution_for_one_rank_reaches_that_one_alone() {
    let engines = job(3);
    on_all(engines, |engine, rank| {
        let rows = |owner| {
            Tensor::new("rows", 0, Dtype::Bytes, 20_000).with_route(Route::Gather).owned_by(Rank(owner))
        };
        let tensors = (0..3).map(rows).collect();
        let book = engine.open_book("gradients", vec!["a".into()], tensors, None).unwrap();
        for round in 0..5u32 {
            let owner = round % 3;
            let mine = vec![rank as u8; 9000 + rank as usize];
            let (address, len_bytes) = (mine.as_ptr() as usize, mine.len());
            let bytes = Submission {
                book,
                tensor: owner,
                seq: 0,
                step: round,
                memory: Lent { address, len_bytes },
                gives: Gives::Gathered(len_bytes as u32),
            };
            // SAFETY: `mine` stays until the wait for its release.
            unsafe { engine.submit(bytes, false) }.unwrap();
            engine.wait(book, &[owner], true, &mut never).unwrap();
            let length =
                |other: u32| if rank == owner || other == rank { 9000 + u64::from(other) } else { 0 };
            let lengths: Vec<_> = (0..3).map(|other| Some(length(other))).collect();
            assert_eq!(engine.gathered(book, owner).unwrap(), lengths, "rank {rank}, round {round}");
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn gathers_bring_every_ranks_bytes_and_refuse_what_does_not_fit() {
    for size in 1..=4u32 {
        let engines = job(size);
        let reports = on_all(engines, move |engine, rank| {
            let rows = Tensor::new("rows", 0, Dtype::Bytes, 20_000).with_route(Route::Gather);
            let tensors = vec![Tensor::new("a.weight", 0, Dtype::F32, 10_000), rows];
            let book = engine.open_book("gradients", vec!["a".into()], tensors, None).unwrap();
            let length = |other: u32, round: u32| ((other * 7919 + round * 5003) % 20_001) as usize;
            for round in 0..4 {
                let mine = vec![rank as u8 + round as u8; length(rank, round)];
                let gives = Gives::Gathered(mine.len() as u32);
                let memory = Lent { address: mine.as_ptr() as usize, len_bytes: mine.len() };
                let bytes = Submission { book, tensor: 1, seq: 0, step: round, memory, gives };
                // SAFETY: `mine` stays until the wait for its release.
                unsafe { engine.submit(bytes, true) }.unwrap();
                engine.wait(book, &[1], true, &mut never).unwrap();
                let lengths: Vec<_> = (0..size).map(|other| Some(length(other, round) as u64)).collect();
                assert_eq!(engine.gathered(book, 1).unwrap(), lengths);
                for other in (0..size).filter(|other| *other != rank) {
                    let mut got = vec![0xFF; length(other, round) / 2];
                    let from = length(other, round) - got.len();
                    engine.read_gathered(book, 1, Rank(other), from, &mut got).unwrap();
                    assert!(got.iter().all(|byte| u32::from(*byte) == other + round));
                    let beyond = engine.read_gathered(book, 1, Rank(other), from + 1, &mut got);
                    assert_eq!(beyond.is_err(), !got.is_empty());
                }
            }
            engine.drop_gathered(book, 1).unwrap();
            let too_long = Submission {
                book,
                tensor: 1,
                seq: 0,
                step: 0,
                memory: Lent { address: 8, len_bytes: 20_001 },
                gives: Gives::Gathered(20_001),
            };
            // SAFETY: refused before the memory is looked at, both times.
            let refused = unsafe { engine.submit(too_long, false) }.unwrap_err().to_string();
            assert!(refused.contains("rows has at most 20000 bytes"), "{refused}");
            let summed = Submission { tensor: 0, ..too_long };
            // SAFETY: as above.
            let refused = unsafe { engine.submit(summed, false) }.unwrap_err().to_string();
            assert!(refused.contains("summed, not gathered"), "{refused}");
            let part = Submission {
                book,
                tensor: 1,
                seq: 0,
                step: 0,
                memory: Lent { address: 8, len_bytes: 20_000 },
                gives: Gives::Whole(Op::Copy),
            };
            // SAFETY: as above.
            let refused = unsafe { engine.submit(part, false) }.unwrap_err().to_string();
            assert!(refused.contains("gathered, not summed"), "{refused}");
            let report = engine.report().unwrap();
            engine.shutdown(&mut never).unwrap();
            report.books[0].layers[0].bytes_sent
        });
        for (rank, sent_bytes) in (0u64..).zip(reports) {
            let mine: u64 = (0..4).map(|round| (rank * 7919 + round * 5003) % 20_001).sum();
            assert_eq!(sent_bytes, mine * u64::from(size - 1));
        }
    }
}

//! Real sockets, one link slow: who is at fault is the same on all ranks, and the right one.

mod support;

use penstock_core::calls::{CallKind, Request};
use penstock_core::layout::Tensor;
use penstock_core::way::Algorithm;
use penstock_core::{BookId, Dtype, Error, Gives, Op, Rank, Submission};
use penstock_net::{CallPart, Engine, Failure, Lent, Stop};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::{Meeting, config, job_with, on_all};

/// One way.
const SLOW: Duration = Duration::from_millis(50);
/// Ample for everybody to be there, on however busy a machine.
const TIME_UP: Duration = Duration::from_secs(3);
/// A test that fails waits for so long.
const HANGS: Duration = Duration::from_secs(60);

/// Everything that comes is passed on after `SLOW`; an end, too.
fn pass_on(mut from: TcpStream, mut to: TcpStream) {
    let (pieces, due) = mpsc::channel::<(Instant, Vec<u8>)>();
    std::thread::spawn(move || {
        for (at, piece) in due {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if pieces.send((Instant::now() + SLOW, buffer[..count].to_vec())).is_err() {
                break;
            }
        }
    });
}

/// A port behind which everything is slow.
fn slow_port_to(port: u16) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    // Ends with the process: it holds nothing but its port.
    std::thread::spawn(move || {
        for here in listener.incoming().flatten() {
            let Ok(there) = TcpStream::connect(("127.0.0.1", port)) else { continue };
            here.set_nodelay(true).unwrap();
            there.set_nodelay(true).unwrap();
            pass_on(here.try_clone().unwrap(), there.try_clone().unwrap());
            pass_on(there, here);
        }
    });
    own
}

/// A job in which the link between these two ranks is slow.
fn job(size: u32, slow: (u32, u32)) -> Vec<Engine> {
    let bind = |rank| {
        let mut config = config(rank, size);
        (config.operation_timeout, config.peer_timeout) = (TIME_UP, HANGS);
        Engine::bind(config).unwrap()
    };
    let engines: Vec<Engine> = (0..size).map(bind).collect();
    let ports: Vec<u16> = engines.iter().map(Engine::port).collect();
    for (rank, engine) in (0u32..).zip(&engines) {
        let port = |peer: u32| {
            let port = ports[peer as usize];
            if (rank, peer) == slow || (peer, rank) == slow { slow_port_to(port) } else { port }
        };
        let table: Vec<_> = (0..size).map(|peer| ("127.0.0.1".to_owned(), port(peer))).collect();
        engine.connect(&table).unwrap();
    }
    engines
}

/// For a test that must not hang.
fn give_up() -> impl FnMut() -> bool {
    let begin = Instant::now();
    move || begin.elapsed() > HANGS
}

fn call(engine: &Engine, request: Request) -> Result<(), Stop> {
    let values = vec![1.0_f32; 3000].leak();
    let block = (values.as_ptr() as usize, std::mem::size_of_val(values));
    let inputs = if matches!(request, Request::Receive { .. }) { vec![] } else { vec![block] };
    let outputs = if matches!(request, Request::Send { .. }) { vec![] } else { vec![block] };
    let part = CallPart {
        group: 0,
        epoch: None,
        request,
        op: Op::Sum,
        dtype: Dtype::F32,
        inputs,
        outputs,
        keep: Box::new(()),
    };
    // SAFETY: leaked.
    let handle = unsafe { engine.call(part) }?;
    engine.wait_call(&handle, None, &mut give_up())
}

fn failed(outcome: Result<(), Stop>) -> Failure {
    match outcome {
        Err(Stop::Failed(failure)) => *failure,
        other => panic!("{other:?}"),
    }
}

/// The same rank on all, and it says so.
fn assert_all_name(failures: &[Failure], rank: u32, what: &str) {
    for failure in failures {
        assert_eq!(failure.rank, Some(Rank(rank)), "{what}: {failure}");
        assert!(matches!(failure.error, Error::Timeout(_)), "{what}: {failure:?}");
        assert!(
            failure.to_string().contains(&format!("rank {rank} did not contribute")),
            "{what}: {failure}"
        );
    }
}

#[test]
fn who_hangs_before_an_allreduce_is_named_by_all_and_hears_it_himself() {
    let link = [(0, 1), (1, 2), (0, 3), (2, 3), (0, 2)];
    std::thread::scope(|scope| {
        for (algorithm, slow) in Algorithm::ALL.into_iter().zip(link) {
            scope.spawn(move || {
                let meeting = Meeting::of(4);
                let failures = on_all(job(4, slow), |engine, rank| {
                    engine.all_gather("all are connected", b"", &mut give_up()).unwrap();
                    if rank < 3 {
                        let failure =
                            failed(call(engine, Request::Collective(CallKind::Allreduce { algorithm })));
                        meeting.wait();
                        return failure;
                    }
                    meeting.wait(); // It hangs until all others have said so.
                    let Err(Stop::Failed(failure)) = engine.all_gather("late", b"", &mut give_up()) else {
                        panic!("it is not told")
                    };
                    assert!(failure.to_string().contains("blames this rank"), "{failure}");
                    *failure
                });
                assert_all_name(&failures, 3, &format!("{algorithm:?}, slow between {slow:?}"));
            });
        }
    });
}

#[test]
fn ranks_that_wait_for_each_other_are_all_named() {
    let failures = on_all(job(4, (0, 3)), |engine, rank| {
        engine.all_gather("all are connected", b"", &mut give_up()).unwrap();
        // 1 and 2 wait for each other, 0 and 3 for them.
        let from = [1, 2, 1, 2][rank as usize];
        failed(call(engine, Request::Receive { from, tag: 0 }))
    });
    for failure in failures {
        assert_eq!(failure.rank, Some(Rank(1)), "{failure}");
        assert!(failure.to_string().contains("ranks 1, 2 wait for each other"), "{failure}");
    }
}

fn open(engine: &Engine) -> BookId {
    engine
        .open_book("gradients", vec!["a".into()], vec![Tensor::new("a.weight", 0, Dtype::F32, 3)], None)
        .unwrap()
}

fn step(engine: &Engine, book: BookId) {
    let values = vec![1.0_f32; 3].leak();
    let (address, len_bytes) = (values.as_ptr() as usize, 12);
    let part = Submission {
        book,
        tensor: 0,
        seq: 0,
        step: 5,
        memory: Lent { address, len_bytes },
        gives: Gives::Whole(Op::Sum),
    };
    // SAFETY: leaked.
    unsafe { engine.submit(part, false) }.unwrap();
    engine.wait(book, &[0], true, &mut give_up()).unwrap();
}

#[test]
fn who_hangs_while_the_others_have_left_is_named_by_all() {
    let meeting = Meeting::of(3);
    let failures = on_all(job(3, (0, 2)), |engine, rank| {
        let book = open(engine);
        step(engine, book);
        if rank == 2 {
            meeting.wait(); // It hangs until all others have said so.
        }
        let failure = failed(engine.leave(&mut give_up()));
        if rank < 2 {
            meeting.wait();
        }
        failure
    });
    assert_all_name(&failures, 2, "join");
}

#[test]
fn who_has_left_waits_for_a_rank_that_trains_on_for_longer_than_any_wait_may_take() {
    on_all(job(3, (0, 2)), |engine, rank| {
        let book = open(engine);
        step(engine, book);
        let begin = Instant::now();
        // The one tensor has one owner: the third rank hears of these steps by heartbeats alone.
        while rank == 2 && begin.elapsed() < 2 * TIME_UP {
            step(engine, book);
            std::thread::sleep(TIME_UP / 20);
        }
        engine.leave(&mut give_up()).unwrap();
        engine.shutdown(&mut give_up()).unwrap();
    });
}

#[test]
fn who_fails_before_anybody_is_connected_is_heard_with_its_reason() {
    let gone = Meeting::of(3);
    on_all(job_with(3, |_| {}), |engine, rank| {
        if rank == 2 {
            engine.abort("ValueError: no such file").unwrap();
            engine.shutdown(&mut give_up()).unwrap();
        }
        gone.wait();
        if rank != 2 {
            // Which nobody sends: what is sent could be gone before the news is here.
            let failure = failed(call(engine, Request::Receive { from: 1 - rank, tag: 0 }));
            assert_eq!(failure.rank, Some(Rank(2)), "{failure}");
            assert!(failure.to_string().contains("no such file"), "{failure}");
        }
    });
}

#[test]
fn who_cannot_say_that_it_has_failed_is_named_where_another_says_it() {
    on_all(job_with(3, |_| {}), |engine, rank| {
        if rank == 0 {
            engine.abort_for(Rank(2), "ValueError: no such file").unwrap();
            engine.shutdown(&mut give_up()).unwrap();
            return;
        }
        let failure = failed(call(engine, Request::Receive { from: 0, tag: 0 }));
        assert_eq!(failure.rank, Some(Rank(2)), "{failure}");
        assert!(failure.to_string().contains("rank 2 failed: ValueError: no such file"), "{failure}");
        assert_eq!(engine.check().unwrap_err().rank, Some(Rank(2)));
    });
}

#[test]
fn who_has_given_up_is_not_blamed_by_who_starts_late() {
    let mut engines = job_with(3, |config| config.peer_timeout = Duration::from_millis(500));
    drop(engines.pop());
    let gone = Meeting::of(2);
    on_all(engines, |engine, rank| {
        // Rank 0 has to do with rank 2 alone, and rank 1 with rank 0.
        if rank == 1 {
            gone.wait();
        }
        let to = if rank == 0 { 2 } else { 0 };
        let failure = failed(call(engine, Request::Send { to, tag: 0 }));
        assert_eq!(failure.rank, Some(Rank(2)), "{failure}");
        engine.shutdown(&mut give_up()).unwrap();
        if rank == 0 {
            gone.wait();
        }
    });
}

//! The line rate, at the connections: they are bound to what is set, and what gets through corrects it.

#![cfg(target_os = "linux")]

mod support;

use penstock_core::calls::{CallKind, Request};
use penstock_core::cost::Rates;
use penstock_core::layout::Tensor;
use penstock_core::way::Algorithm;
use penstock_core::{BookId, Dtype, Gives, Op, Submission};
use penstock_net::{CallPart, Engine, Lent};
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};
use support::{job_with, never, on_all};

/// A test waits for so long only if it fails.
const PATIENCE: Duration = Duration::from_secs(30);

/// Engines that are on a line. Whoever waits for another waits longer than a test that fails, so that the test says why.
fn on_a_line(size: u32) -> Vec<Engine> {
    job_with(size, |config| {
        config.operation_timeout = 2 * PATIENCE;
        config.shared_memory = false;
    })
}

fn pair() -> Vec<Engine> {
    on_a_line(2)
}

/// One tensor of several slices, so that both lanes have some.
fn open(engine: &Engine) -> BookId {
    engine.open_book("g", vec!["a".into()], vec![Tensor::new("a", 0, Dtype::F32, 10_000)], None).unwrap()
}

fn exchange(engine: &Engine, book: BookId) {
    let values = vec![1.0f32; 10_000];
    let (address, len_bytes) = (values.as_ptr() as usize, 40_000);
    let part = Submission {
        book,
        tensor: 0,
        seq: 0,
        step: 0,
        memory: Lent { address, len_bytes },
        gives: Gives::Whole(Op::Sum),
    };
    let values = std::mem::ManuallyDrop::new(values);
    // SAFETY: released below, or leaked if that fails.
    unsafe { engine.submit(part, false) }.unwrap();
    engine.wait(book, &[0], true, &mut never).unwrap();
    drop(std::mem::ManuallyDrop::into_inner(values));
}

fn set_line(engine: &Engine, bytes_per_s: f64) {
    engine.set_rates(Rates { bytes_per_s, ..Rates::default() }).unwrap();
}

/// The send buffers of this process's ends of the connections to `ports`.
fn send_buffers(ports: &[u16]) -> Vec<usize> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(descriptor) = entry.file_name().to_string_lossy().parse::<RawFd>() else { continue };
        // SAFETY: only asked; one that was closed meanwhile is an error, and one that was opened anew is as good.
        let socket = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let socket = socket2::SockRef::from(&socket);
        let port =
            |address: std::io::Result<socket2::SockAddr>| address.ok()?.as_socket().map(|at| at.port());
        // A listener has no peer.
        let (Some(here), Some(there)) = (port(socket.local_addr()), port(socket.peer_addr())) else {
            continue;
        };
        if (ports.contains(&here) || ports.contains(&there))
            && let Ok(bytes) = socket.send_buffer_size()
        {
            found.push(bytes);
        }
    }
    found
}

fn await_send_buffers(ports: &[u16], expected: &[usize]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let found = send_buffers(ports);
        if found == expected {
            return;
        }
        assert!(Instant::now() < deadline, "{found:?} instead of {expected:?}");
        std::thread::yield_now();
    }
}

#[test]
fn every_connection_is_bound_to_the_rate_that_is_set() {
    let engines = pair();
    let ports: Vec<u16> = engines.iter().map(Engine::port).collect();
    on_all(engines, |engine, rank| {
        let book = open(engine);
        exchange(engine, book);
        // 3 ms each; each of the 2 connections has both its ends here.
        for (bytes_per_s, bound) in [(75e6, 225_000), (50e6, 150_000)] {
            engine.all_gather("nobody sends any more", b"", &mut never).unwrap();
            set_line(engine, bytes_per_s);
            if rank == 0 {
                await_send_buffers(&ports, &[bound; 4]);
            }
            engine.all_gather("they are bound", b"", &mut never).unwrap();
        }
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn connections_are_bound_from_the_first_book_on() {
    let engines = pair();
    let ports: Vec<u16> = engines.iter().map(Engine::port).collect();
    on_all(engines, |engine, rank| {
        engine.all_gather("all are connected", b"", &mut never).unwrap();
        set_line(engine, 75e6);
        // Lanes take commands one after the other, and this one through all of them.
        engine.form_group(1, &[0, 1]).unwrap();
        sum_in_group_1(engine);
        engine.all_gather("nobody sends any more", b"", &mut never).unwrap();
        if rank == 0 {
            assert!(!send_buffers(&ports).contains(&225_000), "{:?}", send_buffers(&ports));
        }
        engine.all_gather("rank 0 has looked", b"", &mut never).unwrap();
        open(engine);
        if rank == 0 {
            await_send_buffers(&ports, &[225_000; 4]);
        }
        engine.all_gather("they are bound", b"", &mut never).unwrap();
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_rate_that_is_far_too_low_is_corrected_by_what_gets_through() {
    const TOO_LOW_BYTES_PER_S: f64 = 1e5;
    on_all(pair(), |engine, _| {
        let rate = || engine.report().unwrap().line_bytes_per_s;
        let book = open(engine);
        exchange(engine, book);
        assert_eq!(rate(), None);
        set_line(engine, TOO_LOW_BYTES_PER_S);
        let slicing = engine.slicing();
        let deadline = Instant::now() + PATIENCE;
        loop {
            exchange(engine, book);
            let risen = rate().unwrap() > 1.25 * TOO_LOW_BYTES_PER_S;
            let all = engine.all_gather("has it risen?", &[u8::from(risen)], &mut never).unwrap();
            if all.concat() == [1, 1] {
                break;
            }
            assert!(Instant::now() < deadline, "still {:?} bytes/s", rate());
        }
        assert_eq!(engine.slicing(), slicing, "what all ranks agreed on stays");
        engine.shutdown(&mut never).unwrap();
    });
}

/// Sums 2 MB in the group that the test has formed, over all lanes.
fn sum_in_group_1(engine: &Engine) {
    let mut values = vec![1.0f32; 500_000];
    let memory = vec![(values.as_mut_ptr() as usize, std::mem::size_of_val(&values[..]))];
    let request = Request::Collective(CallKind::Allreduce { algorithm: Algorithm::Store });
    let (inputs, outputs) = (memory.clone(), memory);
    let part = CallPart {
        group: 1,
        epoch: None,
        request,
        op: Op::Sum,
        dtype: Dtype::F32,
        inputs,
        outputs,
        keep: Box::new(()),
    };
    let values = std::mem::ManuallyDrop::new(values);
    // SAFETY: released below, or leaked if that fails.
    let handle = unsafe { engine.call(part) }.unwrap();
    engine.wait_call(&handle, None, &mut never).unwrap();
    drop(std::mem::ManuallyDrop::into_inner(values));
}

#[test]
fn a_connection_learns_nothing_from_what_others_carry() {
    const RATE: f64 = 5e6;
    const BOUND: usize = 15_000;
    let engines = on_a_line(3);
    let ports: Vec<u16> = engines.iter().map(Engine::port).collect();
    on_all(engines, |engine, rank| {
        let book = open(engine);
        exchange(engine, book);
        if rank < 2 {
            engine.form_group(1, &[0, 1]).unwrap();
        }
        engine.all_gather("nobody sends any more", b"", &mut never).unwrap();
        set_line(engine, RATE);
        if rank == 0 {
            // Two lanes, three pairs, both ends.
            await_send_buffers(&ports, &[BOUND; 12]);
        }
        engine.all_gather("they are bound", b"", &mut never).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let mut since: Option<Instant> = None;
        loop {
            if rank < 2 {
                sum_in_group_1(engine);
            }
            if engine.report().unwrap().line_bytes_per_s.unwrap() > RATE {
                since.get_or_insert_with(Instant::now);
            }
            // So long that the other connections would have been looked at, too.
            let risen = since.is_some_and(|at| at.elapsed() > Duration::from_millis(400));
            let all = engine.all_gather("has it risen?", &[u8::from(risen)], &mut never).unwrap();
            if all.concat() == [1, 1, 0] {
                break;
            }
            assert!(Instant::now() < deadline, "{all:?}");
        }
        if rank == 0 {
            let bound = send_buffers(&ports).into_iter().filter(|bytes| *bytes == BOUND).count();
            assert!(
                (8..12).contains(&bound),
                "only connections of ranks 0 and 1 may change: {bound} did not"
            );
        }
        engine.all_gather("rank 0 has looked", b"", &mut never).unwrap();
        engine.shutdown(&mut never).unwrap();
    });
}

use super::pipe::PIPE_BYTES;
use super::*;
use mio::{Events, Poll};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// A test waits for so long only if it fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// Where the counts and words of the first pipe lie in memory, and how far behind them those of the second.
const PLACES: [u64; 4] = [0, 128, 256, 384];
const SECOND: u64 = 4096;

/// Both ends, and the memory itself, as a process without manners sees it.
fn pair() -> (Transport, Transport, File) {
    let (near, far) = socket2::Socket::pair(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    let (memory, here) = SharedMemory::create().unwrap();
    let there = SharedMemory::open(&memory).unwrap();
    let end = |socket, memory| Transport::new(Socket::new(socket).unwrap(), Some(memory), None);
    (end(near, here), end(far, there), memory.into())
}

fn read(transport: &mut Transport, room: &mut [u8]) -> io::Result<usize> {
    transport.read(&mut [IoSliceMut::new(room)])
}

/// The byte at this place of a stream.
fn byte(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

fn is(error: &io::Error, kind: ErrorKind) -> bool {
    error.kind() == kind
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// As a queue that holds so much, whatever is written and read, in as many pieces.
    #[test]
    fn bytes_come_out_as_they_went_in(steps in prop::collection::vec((any::<bool>(), 1usize..300_000, 1usize..4), 1..40)) {
        let (mut near, mut far, _) = pair();
        let (mut held, mut at) = (VecDeque::<u8>::new(), 0u64);
        for (writes, bytes, pieces) in steps {
            if writes {
                let given: Vec<u8> = (at..at + bytes as u64).map(byte).collect();
                let slices: Vec<_> = given.chunks(bytes.div_ceil(pieces)).map(IoSlice::new).collect();
                let count = near.write(&slices).unwrap();
                prop_assert_eq!(count, bytes.min(PIPE_BYTES - held.len()));
                held.extend(&given[..count]);
                at += count as u64;
            } else {
                let mut room = vec![0; bytes];
                let mut places: Vec<_> = room.chunks_mut(bytes.div_ceil(pieces)).map(IoSliceMut::new).collect();
                match far.read(&mut places) {
                    Ok(count) => {
                        prop_assert_eq!(count, bytes.min(held.len()));
                        prop_assert!(held.drain(..count).eq(room[..count].iter().copied()));
                    }
                    Err(error) => prop_assert!(is(&error, ErrorKind::WouldBlock) && held.is_empty()),
                }
            }
        }
    }

    /// Whatever the other process writes there, calls return, and say so if it cannot be.
    #[test]
    fn nothing_in_shared_memory_is_trusted(
        words in prop::collection::vec((0..4usize, any::<bool>(), prop_oneof![any::<u64>(), 0..(2 * PIPE_BYTES as u64)]), 1..30),
    ) {
        let (mut near, _far, memory) = pair();
        let mut room = vec![0; 3 * PIPE_BYTES];
        for (place, second, word) in words {
            memory.write_all_at(&word.to_le_bytes(), PLACES[place] + if second { SECOND } else { 0 }).unwrap();
            let given = vec![7; PIPE_BYTES + 1];
            for outcome in [near.write(&[IoSlice::new(&given)]), read(&mut near, &mut room)] {
                match outcome {
                    Ok(count) => prop_assert!(count <= PIPE_BYTES + 1),
                    Err(error) => prop_assert!(is(&error, ErrorKind::WouldBlock) || is(&error, ErrorKind::InvalidData)),
                }
            }
        }
    }
}

#[test]
fn counts_that_cannot_be_are_an_error_that_stays() {
    for (of_reader, word) in [
        (false, PIPE_BYTES as u64 + 1),
        (false, u64::MAX),
        (true, 3 * PIPE_BYTES as u64),
        (true, u64::MAX / 2),
    ] {
        let (mut near, _far, memory) = pair();
        // `near` reads the first pipe, and writes the second.
        let place = if of_reader { SECOND + PLACES[1] } else { PLACES[0] };
        memory.write_all_at(&word.to_le_bytes(), place).unwrap();
        if of_reader {
            let given = vec![0; PIPE_BYTES];
            let error = near.write(&[IoSlice::new(&given)]).and_then(|_| near.write(&[IoSlice::new(&given)]));
            assert!(is(&error.unwrap_err(), ErrorKind::InvalidData));
        }
        let error = read(&mut near, &mut [0; 8]).unwrap_err();
        assert!(is(&error, ErrorKind::InvalidData) && error.to_string().contains("shared memory"), "{error}");
    }
}

#[test]
fn what_was_written_before_the_end_is_read_and_then_the_end() {
    for rings in [1, 700] {
        let (near, mut far, _) = pair();
        let mut near = near;
        for _ in 0..rings {
            assert!(is(&read(&mut far, &mut [0; 4]).unwrap_err(), ErrorKind::WouldBlock), "and it sleeps");
            near.write(&[IoSlice::new(b"last")]).unwrap();
            assert_eq!(read(&mut far, &mut [0; 4]).unwrap(), 4);
        }
        near.write(&[IoSlice::new(b"word")]).unwrap();
        let poll = Poll::new().unwrap();
        poll.registry().register(&mut far, Token(0), Interest::READABLE | Interest::WRITABLE).unwrap();
        drop(near);
        let mut hung_up = false;
        wait(poll, &mut far, |ready| hung_up |= ready.hung_up);
        assert!(hung_up);
        let mut room = [0; 16];
        assert_eq!(read(&mut far, &mut room).unwrap(), 4);
        assert_eq!(&room[..4], b"word");
        assert_eq!(read(&mut far, &mut room).unwrap(), 0);
    }
}

#[test]
fn a_bell_that_nobody_heard_is_no_broken_connection() {
    let (mut near, mut far, _) = pair();
    let more = vec![1; PIPE_BYTES + 1];
    assert_eq!(near.write(&[IoSlice::new(&more)]).unwrap(), PIPE_BYTES, "and it sleeps");
    assert_eq!(read(&mut far, &mut vec![0; PIPE_BYTES]).unwrap(), PIPE_BYTES, "and it rings");
    let poll = Poll::new().unwrap();
    poll.registry().register(&mut far, Token(0), Interest::READABLE | Interest::WRITABLE).unwrap();
    drop(near);
    wait(poll, &mut far, |_| {});
    assert_eq!(read(&mut far, &mut [0; 4]).unwrap(), 0);
}

/// What the next events say.
fn wait(mut poll: Poll, transport: &mut Transport, mut told: impl FnMut(Readiness)) {
    let mut events = Events::with_capacity(8);
    poll.poll(&mut events, Some(PATIENCE)).unwrap();
    assert!(!events.is_empty(), "nothing within {PATIENCE:?}");
    events.iter().for_each(|event| told(transport.ready(event)));
}

/// One end in a loop as a lane has it: it sends `bytes` and receives as many, and never looks without being told.
fn both_ways(mut transport: Transport, bytes: u64, mut draw: u64) {
    let mut poll = Poll::new().unwrap();
    let interest = Interest::READABLE | Interest::WRITABLE;
    poll.registry().register(&mut transport, Token(0), interest).unwrap();
    let mut events = Events::with_capacity(8);
    let (mut sent, mut got) = (0, 0);
    let (mut may_read, mut may_write) = (true, true);
    let started = Instant::now();
    while sent < bytes || got < bytes {
        assert!(
            started.elapsed() < PATIENCE,
            "{sent} sent and {got} received of {bytes}: a bell was not heard"
        );
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let piece = 1 + (draw >> 33) % [100, 5000, 400_000][(draw >> 60) as usize % 3];
        if may_read && got < bytes {
            let mut room = vec![0; piece as usize];
            match read(&mut transport, &mut room) {
                Ok(count) => {
                    assert!(room[..count].iter().zip(got..).all(|(found, at)| *found == byte(at)));
                    got += count as u64;
                    may_read = count == room.len();
                }
                Err(error) => {
                    assert!(is(&error, ErrorKind::WouldBlock), "{error}");
                    may_read = false;
                }
            }
        }
        if may_write && sent < bytes {
            let given: Vec<u8> = (sent..bytes.min(sent + piece)).map(byte).collect();
            let count = transport.write(&[IoSlice::new(&given)]).unwrap();
            sent += count as u64;
            may_write = count == given.len();
        }
        if (may_read && got < bytes) || (may_write && sent < bytes) {
            continue;
        }
        poll.poll(&mut events, Some(Duration::from_secs(1))).unwrap();
        for event in &events {
            let ready = transport.ready(event);
            (may_read, may_write) = (may_read || ready.read, may_write || ready.write);
        }
    }
}

#[test]
fn who_sleeps_is_woken() {
    for seed in 0..4 {
        let (near, far, _) = pair();
        std::thread::scope(|scope| {
            scope.spawn(|| both_ways(near, 6 << 20, seed));
            scope.spawn(|| both_ways(far, 6 << 20, seed + 1000));
        });
    }
}

#[test]
fn memory_that_could_be_cut_short_is_refused() {
    let (memory, _here) = SharedMemory::create().unwrap();
    // SAFETY: only numbers.
    assert_eq!(unsafe { libc::ftruncate(memory.as_raw_fd(), 0) }, -1, "its size is sealed");
    let file = File::open("/proc/self/exe").unwrap();
    assert!(SharedMemory::open(&file.into()).is_err());
}

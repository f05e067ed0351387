//! What was sealed comes out as it went in, in pieces of any size; whatever was done to it on the way is noticed.

use super::*;
use proptest::collection::vec;
use proptest::prelude::*;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};

fn keys() -> [Seal; 2] {
    let mut sides = [true, false].map(|dials| KeyExchange::new(b"a secret", b"hello", dials));
    let [near, far] = &mut sides;
    assert!(far.hear(&near.say()) && near.hear(&far.say()));
    sides.map(|side| side.seal().unwrap())
}

fn sockets() -> [Socket; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    [near, far].map(|stream| Socket::new(stream.into()).unwrap())
}

/// Writes all of `data` in slices of these lengths, and reads at the other end into places of these.
fn carry(data: &[u8], slices: &[usize], places: &[usize]) -> Vec<u8> {
    let ([mut near, mut far], [here, there]) = (keys(), sockets());
    let (mut written, mut read) = (0, Vec::new());
    let cut = |lengths: &[usize], mut rest: usize| {
        let mut found = Vec::new();
        for len in lengths.iter().cycle().take(9) {
            found.push((*len).min(rest));
            rest -= (*len).min(rest);
        }
        found
    };
    while read.len() < data.len() {
        let mut rest = &data[written..];
        let mut given = Vec::new();
        for len in cut(slices, rest.len()) {
            let (first, behind) = rest.split_at(len);
            given.push(IoSlice::new(first));
            rest = behind;
        }
        match near.write(&here, &given) {
            Ok(count) => written += count,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        let _ = near.flush(&here);
        let mut rooms: Vec<Vec<u8>> = cut(places, usize::MAX).into_iter().map(|len| vec![0; len]).collect();
        let mut rooms_given: Vec<IoSliceMut<'_>> =
            rooms.iter_mut().map(|room| IoSliceMut::new(room)).collect();
        match far.read(&there, &mut rooms_given) {
            Ok(count) => read.extend(rooms.concat().into_iter().take(count)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    }
    read
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]

    #[test]
    fn what_goes_in_comes_out(
        len in 0..400_000usize,
        slices in vec(1..100_000usize, 1..9),
        places in vec(1..100_000usize, 1..9),
    ) {
        let data: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251) as u8).collect();
        prop_assert_eq!(carry(&data, &slices, &places), data);
    }
}

/// Five records, as they are on the wire.
fn records() -> (Seal, Vec<Vec<u8>>) {
    let ([mut near, far], [here, there]) = (keys(), sockets());
    let mut sealed = Vec::new();
    for number in 0..5u8 {
        let data = vec![number; 100];
        assert_eq!(near.write(&here, &[IoSlice::new(&data)]).unwrap(), 100);
        let mut bytes = vec![0; LENGTH_BYTES + 100 + TAG_BYTES];
        // SAFETY: a copy of the descriptor, which is its own.
        let mut stream = unsafe { TcpStream::from_raw_fd(libc::dup(there.as_raw_fd())) };
        stream.set_nonblocking(false).unwrap();
        stream.read_exact(&mut bytes).unwrap();
        sealed.push(bytes);
    }
    (far, sealed)
}

/// How many bytes come out before it is noticed, if it is.
fn opened(mut far: Seal, bytes: &[u8]) -> (usize, bool) {
    let [here, there] = sockets();
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[here.send(rest, None).unwrap()..];
    }
    drop(here);
    let mut count = 0;
    loop {
        match far.read(&there, &mut [IoSliceMut::new(&mut [0; 10])]) {
            Ok(0) => return (count, false),
            Ok(more) => count += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionAborted);
                return (count, true);
            }
        }
    }
}

#[test]
fn what_is_dropped_repeated_or_moved_is_noticed() {
    let played = |order: &[usize]| {
        let (far, sealed) = records();
        opened(far, &order.iter().flat_map(|at| sealed[*at].clone()).collect::<Vec<_>>())
    };
    assert_eq!(played(&[0, 1, 2, 3, 4]), (500, false));
    assert_eq!(played(&[0, 2, 3, 4]), (100, true));
    assert_eq!(played(&[0, 1, 1, 2, 3, 4]), (200, true));
    assert_eq!(played(&[0, 1, 3, 2, 4]), (200, true));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_changed_bit_anywhere_is_noticed(at: prop::sample::Index, bit in 0u8..8) {
        let (far, sealed) = records();
        let mut bytes = sealed.concat();
        // With the last record's length changed to more, it is the end that comes too early.
        let at = at.index(bytes.len() - sealed[4].len());
        bytes[at] ^= 1 << bit;
        let (count, noticed) = opened(far, &bytes);
        prop_assert!(noticed || count < 500, "{count} bytes");
        prop_assert!(count <= at / sealed[0].len() * 100);
    }
}

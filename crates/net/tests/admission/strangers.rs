//! Wrong-doers are told what is wrong, and no stranger disturbs the job.

use crate::support::*;
use penstock_core::life::Status;
use penstock_core::wire::VERSION;
use penstock_core::{Error, Rank};
use penstock_net::admission::{AdmissionConfig, STRANGERS_MAX};
use penstock_net::handshake::{Dialer, DialerStep, HELLO_BYTES, HandshakeMessage, REFUSAL_BYTES};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{self};
use std::time::{Duration, Instant};

#[test]
fn the_wrong_doer_is_told_what_is_wrong() {
    type Change = fn(&mut AdmissionConfig);
    type Expected = fn(&Error) -> bool;
    let mistakes: [(Change, Expected); 4] = [
        (|c| c.secret.push(0), |e| matches!(e, Error::Authentication(text) if text.contains("secret"))),
        (
            |c| c.job_id[3] ^= 1,
            |e| matches!(e, Error::PeerLost { rank: Rank(0), reason } if reason.contains("another job")),
        ),
        (|c| (c.rank, c.ranks) = (Rank(2), 3), |e| matches!(e, Error::Config(text) if text.contains("rank"))),
        (|c| c.lanes = 17, |e| matches!(e, Error::Config(text) if text.contains("lanes"))),
    ];
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    for (change, expected) in mistakes {
        let mut config = config(1);
        change(&mut config);
        let lane = config.lanes - 1;
        let addresses = vec![address; config.ranks as usize];
        let wrong = Process::start(bind().0, &addresses, config);
        wrong.admission.dial(lane, Rank(0));
        let error = wrong.failed();
        assert!(expected(&error), "{error}");
        wrong.stop();
    }
    right.stop();
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    let (_, hello) = Dialer::new(&member(&config(1)), Rank(0), 0, &fresh());
    let mut hello = hello.as_bytes().to_vec();
    hello[8..10].copy_from_slice(&(VERSION + 1).to_le_bytes());
    let mut stranger = connect(address);
    stranger.write_all(&hello).unwrap();
    assert_eq!(rest_of(&mut stranger), HandshakeMessage::refusal(Status::WrongVersion).as_bytes());
    right.stop();

    let (listener, address) = bind();
    let dialer = Process::start(bind().0, &[address; 2], config(0));
    dialer.admission.dial(0, Rank(1));
    let (mut newer, _) = listener.accept().unwrap();
    newer.write_all(&[Status::WrongVersion as u8, 9, 0]).unwrap();
    let error = dialer.failed();
    assert!(matches!(&error, Error::Protocol { peer: Rank(1), .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("version 9") && text.contains(&format!("version {VERSION}")), "{text}");
    dialer.stop();
}

#[test]
fn who_could_not_prove_itself_is_at_fault_and_who_refuses_for_now_is_dialled_again() {
    let (listener, address) = bind();
    let dialer = Process::start(bind().0, &[address; 2], config(0));
    dialer.admission.dial(0, Rank(1));
    let refuse = |status| {
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(HandshakeMessage::refusal(status).as_bytes()).unwrap();
        peer
    };
    // Kept, for what is closed too early may take back what was said.
    let _peers = [Status::Superseded, Status::Busy, Status::AuthenticationFailed].map(refuse);
    let fault = dialer.fault();
    assert_eq!(fault.culprit, Rank(0));
    assert!(matches!(&fault.error, Error::Authentication(text) if text.contains("this process, rank 0")));
    dialer.stop();
}

#[test]
fn another_program_at_the_address_is_a_protocol_error() {
    let (listener, address) = bind();
    let dialer = Process::start(bind().0, &[address; 2], config(0));
    dialer.admission.dial(0, Rank(1));
    let (mut program, _) = listener.accept().unwrap();
    program.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    assert!(matches!(dialer.failed(), Error::Protocol { peer: Rank(1), .. }));
    dialer.stop();
}

#[test]
fn a_recorded_handshake_cannot_be_replayed() {
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    let peer = member(&config(1));
    let (mut machine, hello) = Dialer::new(&peer, Rank(0), 0, &fresh());
    let mut recorded = hello.as_bytes().to_vec();
    let mut honest = connect(address);
    honest.write_all(&recorded).unwrap();
    let proof = loop {
        let mut bytes = vec![0; machine.wanted()];
        honest.read_exact(&mut bytes).unwrap();
        if let DialerStep::Prove(proof) = machine.receive(&peer, &bytes) {
            break proof;
        }
    };
    recorded.extend(proof.as_bytes());
    honest.write_all(proof.as_bytes()).unwrap();
    right.connected();
    right.admission.disconnected(0, Rank(1));
    let mut replay = connect(address);
    replay.write_all(&recorded).unwrap();
    let heard = rest_of(&mut replay);
    assert!(heard.ends_with(HandshakeMessage::refusal(Status::AuthenticationFailed).as_bytes()), "{heard:?}");
    right.stop();
}

#[test]
fn a_dialer_that_speaks_out_of_turn_is_dropped() {
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    let peer = member(&config(1));
    let (mut machine, hello) = Dialer::new(&peer, Rank(0), 0, &fresh());
    let mut hasty = connect(address);
    hasty.write_all(hello.as_bytes()).unwrap();
    let proof = loop {
        let mut bytes = vec![0; machine.wanted()];
        hasty.read_exact(&mut bytes).unwrap();
        if let DialerStep::Prove(proof) = machine.receive(&peer, &bytes) {
            break proof;
        }
    };
    hasty.write_all(&[proof.as_bytes(), b"a frame"].concat()).unwrap();
    assert!(rest_of(&mut hasty).is_empty());
    right.stop();
}

#[test]
fn a_silent_stranger_is_dropped_at_the_deadline() {
    let limit = Duration::from_millis(200);
    let (listener, address) = bind();
    let mut config = config(0);
    config.handshake_timeout = limit;
    let right = Process::start(listener, &[address; 2], config.clone());
    let (_, hello) = Dialer::new(&member(&self::config(1)), Rank(0), 0, &fresh());
    for said in [&hello.as_bytes()[..0], &hello.as_bytes()[..9], &hello.as_bytes()[..HELLO_BYTES - 1]] {
        let start = Instant::now();
        let mut stranger = connect(address);
        stranger.write_all(said).unwrap();
        assert!(rest_of(&mut stranger).is_empty());
        assert!(start.elapsed() >= limit, "dropped after {:?}", start.elapsed());
    }
    // One that was challenged and then says nothing. On a busy machine its hello may come after the deadline, too.
    let end = Instant::now() + PATIENCE;
    let heard = loop {
        let mut stranger = connect(address);
        let said = stranger.write_all(hello.as_bytes());
        let heard = rest_of(&mut stranger);
        if !heard.is_empty() {
            break heard;
        }
        assert!(Instant::now() < end, "never challenged; the last hello: {said:?}");
    };
    assert_eq!(heard[0], Status::Ok as u8);
    right.stop();
}

#[test]
fn the_newest_strangers_keep_their_places() {
    const TOO_MANY: usize = 40;
    open_files_wanted();
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    // One that has said hello is older than all, and is not the one to go.
    let (_, hello) = Dialer::new(&member(&config(1)), Rank(0), 0, &fresh());
    let mut challenged = connect(address);
    challenged.write_all(hello.as_bytes()).unwrap();
    challenged.read_exact(&mut [0; 1]).unwrap();
    let mut strangers: Vec<_> = (0..STRANGERS_MAX - 1 + TOO_MANY).map(|_| connect(address)).collect();
    for dropped in &mut strangers[..TOO_MANY] {
        assert!(rest_of(dropped).is_empty());
    }
    for kept in strangers[TOO_MANY..].iter_mut().chain([&mut challenged]) {
        kept.set_nonblocking(true).unwrap();
        let mut bytes = [0; 100];
        let heard = std::iter::repeat_with(|| kept.read(&mut bytes)).find(|heard| !matches!(heard, Ok(1..)));
        assert_eq!(heard.unwrap().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
    right.stop();
}

#[test]
fn stopping_closes_everything_at_once() {
    let (listener, address) = bind();
    let (_silent, away) = bind();
    let process = Process::start(listener, &[address, away], config(0));
    process.admission.dial(0, Rank(1));
    let mut stranger = connect(address);
    stranger.write_all(b"PNST").unwrap();
    let start = Instant::now();
    process.stop();
    assert!(start.elapsed() < PATIENCE / 2, "stopping took {:?}", start.elapsed());
    assert!(rest_of(&mut stranger).is_empty());
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
}

/// A shell may allow only 1,024 open files, and both ends of every connection are in this process.
fn open_files_wanted() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writing and reading; only this process's own soft limit is raised.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max.min(limit.rlim_cur.max(8192));
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

/// Every kind of stranger; returns the connection, still open unless the listener has closed it.
fn misbehave(address: SocketAddr, kind: usize) -> TcpStream {
    let mut stream = connect(address);
    let (_, hello) = Dialer::new(&member(&config(1)), Rank(0), 0, &fresh());
    let said: Vec<u8> = match kind % 5 {
        0 => Vec::new(),
        1 => hello.as_bytes()[..HELLO_BYTES / 2].to_vec(),
        2 => u32::MAX.to_le_bytes().to_vec(),
        3 => (0..1000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect(),
        _ => [hello.as_bytes(), &[0xff; 500]].concat(),
    };
    // The listener may have closed by then, and that is right.
    let _ = stream.write_all(&said);
    stream
}

#[test]
fn a_thousand_strangers_disturb_nobody() {
    open_files_wanted();
    let (processes, addresses) = two(|_| {});
    processes[1].admission.dial(0, Rank(0));
    let (_, _, mut near) = processes[1].connected();
    let (_, _, mut far) = processes[0].connected();
    let (hurry, started) = mpsc::channel();
    let crowds: Vec<_> = (0..4)
        .map(|crowd| {
            let hurry = hurry.clone();
            std::thread::spawn(move || {
                let strangers: Vec<_> = (0..250)
                    .map(|i| {
                        let stranger = misbehave(addresses[i % 2], crowd + i / 2);
                        if i == 50 {
                            hurry.send(()).unwrap();
                        }
                        stranger
                    })
                    .collect();
                strangers
            })
        })
        .collect();
    started.recv_timeout(PATIENCE).unwrap();
    // In the middle of it: data flows, peers connect, and each wrong-doer is told what is wrong with it.
    for lane in 1..16 {
        talk(&mut near, &mut far, b"data");
        processes[lane % 2].admission.dial(lane as u32, Rank(1 - lane as u32 % 2));
    }
    let mut wrong = config(1);
    wrong.secret.push(0);
    let wrong = Process::start(bind().0, &addresses, wrong);
    wrong.admission.dial(0, Rank(0));
    let mut streams = processes.each_ref().map(|process| {
        let mut streams: Vec<_> = (1..16).map(|_| process.connected()).collect();
        streams.sort_by_key(|(lane, ..)| *lane);
        streams
    });
    let [low, high] = &mut streams;
    for ((_, _, near), (_, _, far)) in low.iter_mut().zip(high) {
        assert_same_connection(near, far);
    }
    assert!(matches!(wrong.failed(), Error::Authentication(_)));
    let strangers: Vec<_> = crowds.into_iter().flat_map(|crowd| crowd.join().unwrap()).collect();
    assert_eq!(strangers.len(), 1000);
    talk(&mut near, &mut far, b"data");
    processes.into_iter().for_each(Process::stop);
    wrong.stop();
}

#[test]
fn a_megabyte_of_noise_is_refused_in_three_bytes() {
    let (processes, addresses) = two(|_| {});
    let noise: Vec<u8> = (0..1u32 << 18).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let mut stranger = connect(addresses[0]);
    stranger.write_all(&noise).unwrap();
    let heard = rest_of(&mut stranger);
    assert_eq!(heard, HandshakeMessage::refusal(Status::WrongMagic).as_bytes());
    assert_eq!(heard.len(), REFUSAL_BYTES);
    processes[0].admission.dial(0, Rank(1));
    processes[0].connected();
    processes[1].connected();
    processes.into_iter().for_each(Process::stop);
}

#[test]
fn a_refused_stranger_may_finish_its_sentence_but_not_talk_for_ever() {
    let (listener, address) = bind();
    let right = Process::start(listener, &[address; 2], config(0));
    let mut stranger = connect(address);
    stranger.write_all(b"GET / HTTP/1.1").unwrap();
    assert_eq!(rest_of(&mut stranger), HandshakeMessage::refusal(Status::WrongMagic).as_bytes());
    // A connection that is closed with unread bytes is reset, and on a real network a reset may overtake the refusal.
    let noise = [0; 1 << 16];
    for _ in 0..16 {
        stranger.write_all(&noise).expect("what is sent is still taken");
    }
    let cut = (0..10_000).find_map(|_| stranger.write_all(&noise).err()).expect("it is cut off");
    assert!(matches!(cut.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{cut}");
    right.stop();
}

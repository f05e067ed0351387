//! Both ends agree on one connection, whoever dials, and a peer that cannot be had is lost in time.

use crate::support::*;
use penstock_core::life::Status;
use penstock_core::{Error, Rank};
use penstock_net::handshake::HandshakeMessage;
use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

#[test]
fn either_end_may_dial_and_frames_may_follow_at_once() {
    for dialer in [0, 1] {
        let (processes, _) = two(|_| {});
        let listener = 1 - dialer;
        processes[dialer].admission.dial(3, Rank(listener as u32));
        let (lane, peer, mut far) = processes[listener].connected();
        assert_eq!((lane, peer), (3, Rank(dialer as u32)));
        // Before the dialer knows that it was accepted, perhaps.
        far.write_all(b"first frame").unwrap();
        let (lane, peer, mut near) = processes[dialer].connected();
        assert_eq!((lane, peer), (3, Rank(listener as u32)));
        let mut heard = [0; 11];
        near.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"first frame");
        assert_same_connection(&mut near, &mut far);
        // Asking again changes nothing, on either side.
        processes[dialer].admission.dial(3, Rank(listener as u32));
        processes[listener].admission.dial(3, Rank(dialer as u32));
        processes.into_iter().for_each(Process::stop);
    }
}

#[test]
fn a_delivered_stream_does_not_block() {
    let (processes, _) = two(|_| {});
    processes[0].admission.dial(0, Rank(1));
    let sockets = processes.each_ref().map(|process| process.opened().2.into_socket());
    for mut socket in &sockets {
        assert_eq!(socket.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

/// Nothing sets it after that, and before it would be too late: see `congestion.rs`.
#[test]
#[cfg(target_os = "linux")]
fn a_connection_comes_with_its_congestion_control_at_both_ends() {
    let (processes, _) = two(|config| config.congestion_control = Some("reno".into())); // nobody's default, and everybody's
    processes[0].admission.dial(0, Rank(1));
    for process in &processes {
        let used = process.opened().2.into_socket().tcp_congestion().unwrap();
        assert_eq!(String::from_utf8_lossy(&used).trim_end_matches('\0'), "reno");
    }
}

#[test]
fn both_ends_may_dial_at_once() {
    const ROUNDS: usize = 60;
    const LANES: u32 = 16;
    let (processes, _) = two(|_| {});
    for _ in 0..ROUNDS {
        std::thread::scope(|scope| {
            for (process, peer) in processes.iter().zip([Rank(1), Rank(0)]) {
                let admission = &process.admission;
                scope.spawn(move || (0..LANES).for_each(|lane| admission.dial(lane, peer)));
            }
        });
        let mut streams = processes.each_ref().map(|process| {
            let mut streams: Vec<_> = (0..LANES).map(|_| process.connected()).collect();
            streams.sort_by_key(|(lane, ..)| *lane);
            streams
        });
        let [near, far] = &mut streams;
        for lane in 0..LANES {
            let ((near_lane, _, near), (far_lane, _, far)) =
                (&mut near[lane as usize], &mut far[lane as usize]);
            assert_eq!([*near_lane, *far_lane], [lane; 2], "one connection for each lane");
            assert_same_connection(near, far);
        }
        for lane in 0..LANES {
            processes[0].admission.disconnected(lane, Rank(1));
            processes[1].admission.disconnected(lane, Rank(0));
        }
    }
    processes.into_iter().for_each(Process::stop);
}

#[test]
fn a_superseded_dialer_waits_for_the_other_connection() {
    let (listener, low_address) = bind();
    let (high_listener, high_address) = bind();
    let high = Process::start(high_listener, &[low_address, high_address], config(1));
    high.admission.dial(5, Rank(0));
    let mut attempt = listen_by_hand(&listener, &member(&config(0)));
    attempt.write_all(HandshakeMessage::refusal(Status::Superseded).as_bytes()).unwrap();
    assert!(rest_of(&mut attempt).is_empty());
    let (mut near, verdict) = dial_by_hand(high_address, &member(&config(0)), Rank(1), 5);
    assert_eq!(verdict, Ok(()));
    let (lane, _, mut far) = high.connected();
    assert_eq!(lane, 5);
    assert_same_connection(&mut near, &mut far);
    high.stop();
}

#[test]
fn a_lower_rank_that_has_sent_its_proof_supersedes() {
    let (listener, high_address) = bind();
    let (low_listener, low_address) = bind();
    let low = Process::start(low_listener, &[low_address, high_address], config(0));
    low.admission.dial(5, Rank(1));
    // Its proof has arrived and is not answered yet.
    let mut far = listen_by_hand(&listener, &member(&config(1)));
    let (_, verdict) = dial_by_hand(low_address, &member(&config(1)), Rank(0), 5);
    assert_eq!(verdict, Err(refused(Status::Superseded)));
    far.write_all(HandshakeMessage::accept().as_bytes()).unwrap();
    let (_, _, mut near) = low.connected();
    assert_same_connection(&mut near, &mut far);
    let (_, verdict) = dial_by_hand(low_address, &member(&config(1)), Rank(0), 5);
    assert_eq!(verdict, Err(refused(Status::Busy)));
    low.stop();
}

#[test]
fn a_lower_rank_takes_a_connection_while_its_own_gets_nowhere() {
    // The backlog of this listener takes the dial, and nobody ever answers it.
    let (_silent, high_address) = bind();
    let (low_listener, low_address) = bind();
    let low = Process::start(low_listener, &[low_address, high_address], config(0));
    low.admission.dial(5, Rank(1));
    let (mut far, verdict) = dial_by_hand(low_address, &member(&config(1)), Rank(0), 5);
    assert_eq!(verdict, Ok(()));
    let (_, _, mut near) = low.connected();
    assert_same_connection(&mut near, &mut far);
    low.stop();
}

#[test]
fn a_second_connection_is_refused_and_the_first_goes_on() {
    let (processes, addresses) = two(|_| {});
    processes[1].admission.dial(0, Rank(0));
    let (_, _, mut near) = processes[1].connected();
    let (_, _, mut far) = processes[0].connected();
    for _ in 0..3 {
        let (mut second, verdict) = dial_by_hand(addresses[0], &member(&config(1)), Rank(0), 0);
        assert_eq!(verdict, Err(refused(Status::Busy)));
        assert!(rest_of(&mut second).is_empty());
        talk(&mut near, &mut far, b"more");
    }
    processes[0].admission.disconnected(0, Rank(1));
    let (_, verdict) = dial_by_hand(addresses[0], &member(&config(1)), Rank(0), 0);
    assert_eq!(verdict, Ok(()), "a pair whose connection is gone takes another");
    processes[0].connected();
    processes.into_iter().for_each(Process::stop);
}

#[test]
fn a_peer_that_is_away_is_lost_after_the_peer_timeout() {
    // The port of a connection's near end: nobody listens there, and nobody else gets it while that lives.
    let (listener, _) = bind();
    let taken = connect(listener.local_addr().unwrap());
    let address = taken.local_addr().unwrap();
    let mut config = config(0);
    config.peer_timeout = Duration::from_millis(300);
    let process = Process::start(bind().0, &[address; 2], config.clone());
    let start = Instant::now();
    process.admission.dial(0, Rank(1));
    let error = process.failed();
    assert!(start.elapsed() >= config.peer_timeout);
    assert!(matches!(&error, Error::PeerLost { rank: Rank(1), .. }), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    process.stop();
}

#[test]
fn a_silent_peer_is_lost_after_the_peer_timeout() {
    let (_silent, address) = bind();
    let mut config = config(0);
    config.handshake_timeout = Duration::from_millis(100);
    config.peer_timeout = Duration::from_millis(300);
    let process = Process::start(bind().0, &[address; 2], config);
    process.admission.dial(0, Rank(1));
    let error = process.failed();
    assert!(error.to_string().contains("did not answer"), "{error}");
    process.admission.dial(0, Rank(1));
    assert!(matches!(process.failed(), Error::PeerLost { rank: Rank(1), .. }), "it may be dialled again");
    process.stop();
}

#[test]
fn a_dial_that_is_cut_off_is_tried_again() {
    let (listener, address) = bind();
    let process = Process::start(bind().0, &[address; 2], config(0));
    process.admission.dial(0, Rank(1));
    for _ in 0..3 {
        drop(listener.accept().unwrap());
    }
    let late = Process::start(listener, &[address; 2], config(1));
    let (_, _, mut near) = process.connected();
    let (_, _, mut far) = late.connected();
    assert_same_connection(&mut near, &mut far);
    process.stop();
    late.stop();
}

//! Processes of one host find each other at their Unix sockets, and fall back to TCP where something stands against that.

use crate::support::{bind, config, connect, fresh, member, rest_of, two};
use penstock_core::Rank;
use penstock_net::admission::Listeners;
use penstock_net::handshake::{Dialer, DialerStep, name_on_host};
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;

fn dial(address: SocketAddr, rank: u32) -> UnixStream {
    let config = config(rank);
    let name = name_on_host(&config.secret, &config.job_id, config.rank, address.port());
    let name = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let stream = UnixStream::connect_addr(&name).unwrap();
    stream.set_read_timeout(Some(crate::support::PATIENCE)).unwrap();
    stream
}

/// Sends the proof, with this descriptor beside it.
fn prove(stream: &mut UnixStream, proof: &[u8], beside: Option<&OwnedFd>) {
    let Some(beside) = beside else { return stream.write_all(proof).unwrap() };
    let mut control = [0u8; 24];
    control[..8].copy_from_slice(&20u64.to_ne_bytes());
    control[8..12].copy_from_slice(&libc::SOL_SOCKET.to_ne_bytes());
    control[12..16].copy_from_slice(&libc::SCM_RIGHTS.to_ne_bytes());
    control[16..20].copy_from_slice(&beside.as_raw_fd().to_ne_bytes());
    let socket = socket2::SockRef::from(&*stream);
    let parts = [IoSlice::new(proof)];
    let message = socket2::MsgHdr::new().with_buffers(&parts).with_control(&control);
    assert_eq!(socket.sendmsg(&message, 0).unwrap(), proof.len());
}

/// A dialer that knows the secret, up to what comes of its proof.
fn dial_by_hand(address: SocketAddr, beside: Option<&OwnedFd>) -> Vec<u8> {
    let member = member(&config(1));
    let mut stream = dial(address, 0);
    let (mut machine, hello) = Dialer::new(&member, Rank(0), 3, &fresh());
    stream.write_all(hello.as_bytes()).unwrap();
    let mut bytes = [0; 1];
    loop {
        stream.read_exact(&mut bytes).unwrap();
        if let DialerStep::Prove(proof) = machine.receive(&member, &bytes) {
            prove(&mut stream, proof.as_bytes(), beside);
            let mut rest = Vec::new();
            // It is closed, perhaps with what was sent unread.
            let _ = stream.read_to_end(&mut rest);
            return rest;
        }
    }
}

#[test]
fn processes_of_one_host_share_memory_and_each_way_round() {
    let (processes, _) = two(|config| config.shared_memory = true);
    for (dialer, lane) in [(0, 0), (1, 1)] {
        processes[dialer].admission.dial(lane, Rank(1 - dialer as u32));
        for process in &processes {
            let (found, _, transport) = process.opened();
            assert!(found == lane && transport.is_memory());
        }
    }
    processes.into_iter().for_each(crate::support::Process::stop);
}

#[test]
fn one_that_does_not_share_is_reached_by_tcp_and_reaches_others() {
    for off in 0..2 {
        let (processes, _) = two(|config| config.shared_memory = config.rank.0 != off);
        for (dialer, lane) in [(0, 0), (1, 1)] {
            processes[dialer].admission.dial(lane, Rank(1 - dialer as u32));
            processes.iter().for_each(|process| assert_eq!(process.connected().0, lane));
        }
    }
}

#[test]
fn who_is_reached_through_another_port_is_no_neighbour() {
    // As a process of another host, or behind a relay: at its name nobody listens.
    let (processes, addresses) = two(|config| config.shared_memory = true);
    let (relay, there) = bind();
    let listeners = Listeners::new(TcpListener::bind("127.0.0.1:0").unwrap(), None).unwrap();
    let sharing = |rank| penstock_net::admission::AdmissionConfig { shared_memory: true, ..config(rank) };
    let (deliver, _deliveries) = std::sync::mpsc::channel();
    let deliver = Box::new(move |delivery| drop(deliver.send(delivery)));
    let table = vec![addresses[0], there];
    let near = penstock_net::admission::Admission::start(listeners, table, sharing(0), deliver).unwrap();
    near.dial(0, Rank(1));
    relay.accept().unwrap();
    drop((near, processes));
}

#[test]
fn strangers_get_nothing_there_either() {
    let ([listener, other], addresses) = two(|config| config.shared_memory = true);
    let mut nobody = dial(addresses[0], 0);
    nobody.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut refusal = [0; 3];
    nobody.read_exact(&mut refusal).unwrap();
    assert_eq!(refusal[0], 1, "not Penstock's");

    // Who knows the secret must hand over memory that cannot be cut short, of the right size, and nothing else.
    let file = |bytes: u64, seals: libc::c_int| {
        // SAFETY: the name is a string that ends.
        let fd = unsafe { libc::memfd_create(c"short".as_ptr(), libc::MFD_ALLOW_SEALING) };
        // SAFETY: just made.
        let fd: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
        let file = std::fs::File::from(fd);
        file.set_len(bytes).unwrap();
        // SAFETY: only numbers.
        assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
        OwnedFd::from(file)
    };
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    let right = penstock_net::transport::MAPPING_BYTES as u64;
    let tcp = OwnedFd::from(connect(addresses[1]));
    let wrong = [file(right, libc::F_SEAL_GROW), file(right - 4096, seals), file(0, seals), tcp];
    for beside in [None].into_iter().chain(wrong.iter().map(Some)) {
        assert_eq!(dial_by_hand(addresses[0], beside), b"", "closed without a word, so that it comes by TCP");
    }
    // None of them has taken the pair's place.
    other.admission.dial(3, Rank(0));
    assert!(listener.opened().2.is_memory() && other.opened().2.is_memory());
    // And by TCP there is no memory to be handed over.
    drop(rest_of(&mut connect_and_say(addresses[0])));
}

fn connect_and_say(address: SocketAddr) -> std::net::TcpStream {
    let mut stream = connect(address);
    stream.write_all(b"no magic").unwrap();
    stream
}

#[test]
fn the_name_says_nothing_to_who_does_not_know_the_secret() {
    let config = config(0);
    let name = |secret: &[u8], rank, port| name_on_host(secret, &config.job_id, Rank(rank), port);
    let one = name(&config.secret, 0, 7);
    assert!(one.starts_with("penstock-") && one.len() == 9 + 32);
    for other in [name(b"another secret", 0, 7), name(&config.secret, 1, 7), name(&config.secret, 0, 8)] {
        assert_ne!(one, other);
    }
}

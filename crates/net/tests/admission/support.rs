//! Processes on loopback, and hands that drive one end of a handshake.

use penstock_core::life::{DialFailure, Fault, Status};
use penstock_core::wire::VERSION;
use penstock_core::{Error, Rank};
use penstock_net::admission::{Admission, AdmissionConfig, Delivery, Listeners};
use penstock_net::handshake::{Dialer, DialerStep, HELLO_BYTES, Listener, ListenerStep, Member, PROOF_BYTES};
use penstock_net::transport::Transport;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn config(rank: u32) -> AdmissionConfig {
    AdmissionConfig {
        rank: Rank(rank),
        ranks: 2,
        lanes: 16,
        job_id: *b"0123456789abcdef",
        secret: b"a secret of this job".to_vec(),
        encrypt: false,
        shared_memory: false,
        congestion_control: None,
        handshake_timeout: PATIENCE,
        peer_timeout: PATIENCE,
    }
}

pub(crate) fn member(config: &AdmissionConfig) -> Member {
    let AdmissionConfig { rank, ranks, lanes, job_id, secret, encrypt, .. } = config.clone();
    Member { rank, ranks, lanes, job_id, secret, encrypt }
}

pub(crate) fn bind() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

pub(crate) struct Process {
    pub(crate) admission: Admission,
    pub(crate) deliveries: Receiver<Delivery>,
}

impl Process {
    pub(crate) fn start(listener: TcpListener, addresses: &[SocketAddr], config: AdmissionConfig) -> Self {
        let (deliver, deliveries) = mpsc::channel();
        // The receiver is gone when a test ends before its processes do.
        let deliver = Box::new(move |delivery| drop(deliver.send(delivery)));
        let mut listeners = Listeners::new(listener, config.congestion_control.as_deref()).unwrap();
        if config.shared_memory {
            listeners = listeners.and_on_host(&config.secret, &config.job_id, config.rank);
        }
        let admission = Admission::start(listeners, addresses.to_vec(), config, deliver).unwrap();
        Self { admission, deliveries }
    }

    /// By TCP.
    pub(crate) fn connected(&self) -> (u32, Rank, TcpStream) {
        let (lane, peer, transport) = self.opened();
        assert!(!transport.is_memory());
        let stream = TcpStream::from(transport.into_socket());
        assert!(stream.nodelay().unwrap());
        (lane, peer, usable(stream))
    }

    pub(crate) fn opened(&self) -> (u32, Rank, Transport) {
        match self.deliveries.recv_timeout(PATIENCE).expect("a delivery in time") {
            Delivery::Connected { lane, peer, transport } => (lane, peer, transport),
            Delivery::Failed { fault, .. } => panic!("dialling failed: {}", fault.error),
        }
    }

    pub(crate) fn failed(&self) -> Error {
        self.fault().error
    }

    pub(crate) fn fault(&self) -> Fault {
        match self.deliveries.recv_timeout(PATIENCE).expect("a delivery in time") {
            Delivery::Connected { lane, peer, .. } => panic!("lane {lane} was connected to rank {peer}"),
            Delivery::Failed { fault, .. } => fault,
        }
    }

    /// Stops the thread and checks that nothing more was delivered.
    pub(crate) fn stop(self) {
        drop(self.admission);
        let rest: Vec<_> = self.deliveries.try_iter().collect();
        assert!(rest.is_empty(), "delivered unasked: {rest:?}");
    }
}

/// Two processes with the configurations of rank 0 and rank 1, perhaps changed.
pub(crate) fn two(change: impl Fn(&mut AdmissionConfig)) -> ([Process; 2], [SocketAddr; 2]) {
    let (listeners, addresses): (Vec<_>, Vec<_>) = (0..2).map(|_| bind()).unzip();
    let mut processes = listeners.into_iter().zip(0..).map(|(listener, rank)| {
        let mut config = config(rank);
        change(&mut config);
        Process::start(listener, &addresses, config)
    });
    let pair = [processes.next().unwrap(), processes.next().unwrap()];
    (pair, [addresses[0], addresses[1]])
}

/// As a test uses it: blocking, but never for ever.
pub(crate) fn usable(stream: TcpStream) -> TcpStream {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    usable(TcpStream::connect(address).unwrap())
}

/// Everything until the other end closes; a reset ends it too.
pub(crate) fn rest_of(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => bytes,
        Err(error) => panic!("still open: {error}"),
    }
}

pub(crate) fn talk(near: &mut TcpStream, far: &mut TcpStream, text: &[u8; 4]) {
    let mut heard = [0; 4];
    near.write_all(text).unwrap();
    far.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, text);
    far.write_all(text).unwrap();
    near.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, text);
}

pub(crate) fn assert_same_connection(near: &mut TcpStream, far: &mut TcpStream) {
    assert_eq!(near.local_addr().unwrap(), far.peer_addr().unwrap());
    assert_eq!(far.local_addr().unwrap(), near.peer_addr().unwrap());
    talk(near, far, b"ping");
}

/// A dialer that is driven by the test: up to the verdict.
pub(crate) fn dial_by_hand(
    address: SocketAddr,
    member: &Member,
    to: Rank,
    lane: u32,
) -> (TcpStream, Result<(), DialFailure>) {
    let mut stream = connect(address);
    let (mut machine, hello) = Dialer::new(member, to, lane, &fresh());
    stream.write_all(hello.as_bytes()).unwrap();
    loop {
        let mut bytes = vec![0; machine.wanted()];
        stream.read_exact(&mut bytes).unwrap();
        match machine.receive(member, &bytes) {
            DialerStep::Wait => {}
            DialerStep::Prove(proof) => stream.write_all(proof.as_bytes()).unwrap(),
            DialerStep::Accepted => return (stream, Ok(())),
            DialerStep::Failed(failure) => return (stream, Err(failure)),
        }
    }
}

/// A listener that is driven by the test: up to its verdict.
pub(crate) fn listen_by_hand(listener: &TcpListener, member: &Member) -> TcpStream {
    let mut stream = usable(listener.accept().unwrap().0);
    let mut machine = Listener::new(fresh());
    for length in [HELLO_BYTES, PROOF_BYTES] {
        let mut bytes = vec![0; length];
        stream.read_exact(&mut bytes).unwrap();
        match machine.receive(member, &bytes) {
            ListenerStep::Challenge(challenge) => stream.write_all(challenge.as_bytes()).unwrap(),
            ListenerStep::Authenticated { .. } => return stream,
            step => panic!("{step:?}"),
        }
    }
    unreachable!("authenticated or panicked");
}

pub(crate) fn fresh() -> [u8; 32] {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).unwrap();
    nonce
}

pub(crate) fn refused(status: Status) -> DialFailure {
    DialFailure::Refused { status, version: VERSION }
}

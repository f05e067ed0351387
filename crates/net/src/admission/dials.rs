//! The connections that this process's lanes have asked for and do not have yet.

use super::listeners::on_host;
use super::{Gate, Timer, fresh_nonce, send};
use crate::descriptors;
use crate::handshake::{Dialer, DialerStep};
use crate::shared::ns;
use crate::socket::Socket;
use crate::transport::SharedMemory;
use penstock_core::Rank;
use penstock_core::life::{AfterFailure, Attempts, DialFailure, Fault, Obstacle};
use std::io::{self, ErrorKind};
use std::ops::RangeInclusive;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// A lane and a peer.
pub(super) type DialKey = (u32, Rank);

/// Everything about one connection that is wanted.
pub(super) struct Dial {
    started: Instant,
    /// When the timer of this dial rings: the deadline of the attempt, or the start of the next.
    due: Instant,
    attempts: Attempts,
    attempt: Option<Attempt>,
    /// The next attempt may be made on this host. One only: what stands against shared memory stands against no TCP.
    on_host: bool,
    /// What went wrong last, for the message.
    problem: String,
    /// The peer may have taken a connection of this dial without this process knowing yet. Stays true if an attempt's
    /// deadline passed in that state.
    pub(super) proof_unanswered: bool,
}

impl Dial {
    /// When no more attempts are made.
    fn give_up(&self) -> Instant {
        self.started + Duration::from_nanos(self.attempts.give_up_ns())
    }
}

struct Attempt {
    socket: Socket,
    /// What is handed over on it.
    memory: Option<SharedMemory>,
    token: usize,
    /// `None` while the connection is being made.
    machine: Option<Dialer>,
}

/// Why an attempt goes no further.
enum AttemptEnd {
    /// Nothing more to read now.
    Wait,
    Accepted,
    /// The peer said so.
    Failed(DialFailure),
    /// The connection cannot be made or has been closed.
    Lost(io::Error),
}

impl From<io::Error> for AttemptEnd {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock => Self::Wait,
            _ => Self::Lost(error),
        }
    }
}

impl Gate {
    pub(super) fn start_dial(&mut self, key: DialKey) {
        // The peer's own connection may have come since the lane asked.
        if !self.shared.pairs.is_dialing(key.0, key.1) || self.dials.contains_key(&key) {
            return;
        }
        let now = Instant::now();
        let dial = Dial {
            started: now,
            due: now,
            attempts: Attempts::new(0, ns(self.peer_timeout)),
            attempt: None,
            on_host: self.shared_memory,
            problem: "not tried yet".into(),
            proof_unanswered: false,
        };
        self.dials.insert(key, dial);
        self.attempt(key);
    }

    /// The timer of a dial rings.
    pub(super) fn dial_due(&mut self, key: DialKey) {
        let Some(dial) = self.dials.get(&key) else { return };
        if dial.attempt.is_some() {
            self.try_later(key, Obstacle::There, "it did not answer in time".into());
        } else if Instant::now() >= dial.give_up() {
            let fault = self.unreachable(dial, key.1);
            self.fail(key, fault);
        } else {
            self.attempt(key);
        }
    }

    fn attempt(&mut self, key: DialKey) {
        match self.connect(key) {
            Ok(attempt) => {
                let deadline = Instant::now() + self.handshake_timeout;
                self.dialing.insert(attempt.token, key);
                let Some(dial) = self.dials.get_mut(&key) else { return };
                dial.attempt = Some(attempt);
                let due = deadline.min(dial.give_up());
                self.set_due(key, due);
            }
            Err(error) => {
                let starved = descriptors::are_exhausted(&error);
                let obstacle = if starved { Obstacle::Here } else { Obstacle::There };
                self.try_later(key, obstacle, error.to_string());
            }
        }
    }

    fn connect(&mut self, key: DialKey) -> io::Result<Attempt> {
        let address = self.addresses[key.1.index()];
        let on_host = self.dials.get_mut(&key).is_some_and(|dial| std::mem::take(&mut dial.on_host));
        let mut socket = match on_host.then(|| self.connect_on_host(key.1, address.port())) {
            Some(Ok(socket)) => socket,
            _ => Socket::connect(&address.into(), self.congestion_control.as_deref())?,
        };
        let token = self.watch(&mut socket)?;
        Ok(Attempt { socket, memory: None, token, machine: None })
    }

    /// An error at once if that rank is not on this host, or shares no memory.
    fn connect_on_host(&self, peer: Rank, port: u16) -> io::Result<Socket> {
        Socket::connect(&on_host(&self.member.secret, &self.member.job_id, peer, port)?, None)
    }

    /// Something has happened on the socket of a dial.
    pub(super) fn dial_ready(&mut self, key: DialKey) {
        match self.advance(key).unwrap_or_else(AttemptEnd::from) {
            AttemptEnd::Wait => {}
            AttemptEnd::Accepted => self.dial_succeeded(key),
            AttemptEnd::Lost(error) => {
                self.proof_answered(key);
                let problem = match error.kind() {
                    ErrorKind::UnexpectedEof => "it closed the connection during the handshake".into(),
                    _ => error.to_string(),
                };
                self.try_later(key, Obstacle::There, problem);
            }
            AttemptEnd::Failed(failure) => {
                self.proof_answered(key);
                match failure.follows(self.member.rank, key.1) {
                    AfterFailure::Fail(fault) => self.fail(key, fault),
                    AfterFailure::Retry(problem) => self.try_later(key, Obstacle::There, problem.into()),
                }
            }
        }
    }

    /// Takes an attempt as far as it gets.
    fn advance(&mut self, key: DialKey) -> io::Result<AttemptEnd> {
        let Some(dial) = self.dials.get_mut(&key) else { return Ok(AttemptEnd::Wait) };
        let Some(attempt) = &mut dial.attempt else { return Ok(AttemptEnd::Wait) };
        let machine = match &mut attempt.machine {
            Some(machine) => machine,
            connecting => {
                attempt.socket.finish_connect()?;
                let (machine, hello) = Dialer::new(&self.member, key.1, key.0, &fresh_nonce()?);
                send(&attempt.socket, &hello, None)?;
                connecting.insert(machine)
            }
        };
        loop {
            // Never more: after the last status come frames, which are the lane's.
            let wanted = machine.wanted();
            let count = match attempt.socket.receive(&mut self.scratch[..wanted]) {
                Ok((0, _)) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok((count, _)) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            match machine.receive(&self.member, &self.scratch[..count]) {
                DialerStep::Wait => {}
                DialerStep::Prove(message) => {
                    let handed = (!attempt.socket.is_tcp()).then(SharedMemory::create).transpose()?;
                    let (descriptor, memory) = handed.unzip();
                    attempt.memory = memory;
                    dial.proof_unanswered = true;
                    send(&attempt.socket, &message, descriptor.as_ref().map(AsFd::as_fd))?;
                }
                DialerStep::Accepted => return Ok(AttemptEnd::Accepted),
                DialerStep::Failed(failure) => return Ok(AttemptEnd::Failed(failure)),
            }
        }
    }

    fn dial_succeeded(&mut self, key: DialKey) {
        let attempt = self.dials.get_mut(&key).and_then(|dial| dial.attempt.take());
        self.forget_dial(key);
        let Some(Attempt { socket, memory, token, machine }) = attempt else { return };
        self.dialing.remove(&token);
        if self.shared.pairs.dialed(key.0, key.1) {
            self.hand_over(key, socket, memory, machine.and_then(Dialer::into_seal));
        } else {
            self.close(socket);
        }
    }

    fn proof_answered(&mut self, key: DialKey) {
        if let Some(dial) = self.dials.get_mut(&key) {
            dial.proof_unanswered = false;
        }
    }

    /// Ends the attempt and sets the time of the next.
    fn try_later(&mut self, key: DialKey, obstacle: Obstacle, problem: String) {
        self.end_attempt(key);
        let Some(dial) = self.dials.get_mut(&key) else { return };
        dial.problem = problem;
        let pause = drawn(dial.attempts.failed(obstacle));
        let due = (Instant::now() + pause).min(dial.give_up());
        self.set_due(key, due);
    }

    fn set_due(&mut self, key: DialKey, due: Instant) {
        if let Some(dial) = self.dials.get_mut(&key) {
            self.timers.remove(&(dial.due, Timer::Dial(key)));
            dial.due = due;
            self.timers.insert((due, Timer::Dial(key)));
        }
    }

    fn end_attempt(&mut self, key: DialKey) {
        if let Some(attempt) = self.dials.get_mut(&key).and_then(|dial| dial.attempt.take()) {
            self.dialing.remove(&attempt.token);
            self.close(attempt.socket);
        }
    }

    /// Drops everything about a dial without a word: the connection exists, or the lane is told by the caller.
    pub(super) fn forget_dial(&mut self, key: DialKey) {
        self.end_attempt(key);
        if let Some(dial) = self.dials.remove(&key) {
            self.timers.remove(&(dial.due, Timer::Dial(key)));
        }
    }

    pub(super) fn fail(&mut self, key: DialKey, fault: Fault) {
        self.forget_dial(key);
        let (lane, peer) = key;
        self.shared.pairs.give_up(lane, peer);
        (self.deliver)(super::Delivery::Failed { lane, peer, fault });
    }

    /// Why a peer cannot be connected to after all that time.
    fn unreachable(&self, dial: &Dial, peer: Rank) -> Fault {
        let (me, address) = (self.member.rank, self.addresses[peer.index()]);
        let (problem, waited_s) = (&dial.problem, dial.started.elapsed().as_secs_f64());
        dial.attempts.given_up(me, peer, |culprit| {
            if culprit == me {
                let limit = descriptors::limit().map_or_else(|| "all".into(), |limit| limit.to_string());
                return format!(
                    "rank {me} has no file descriptor left for its connection to rank {peer}, for {waited_s:.1} s now \
                     ({problem}): its process may have {limit} files open; raise that limit (ulimit -n) where it is \
                     started, or open fewer"
                );
            }
            format!(
                "rank {peer} at {address} could not be connected to within {waited_s:.1} s: {problem}; check that its \
                 process is running and that no firewall is between"
            )
        })
    }
}

/// One of these, in nanoseconds.
fn drawn(range_ns: RangeInclusive<u64>) -> Duration {
    let mut byte = [0; 1];
    // Without randomness the longest is right too.
    let _ = getrandom::fill(&mut byte);
    let (start_ns, end_ns) = range_ns.into_inner();
    Duration::from_nanos(end_ns - (end_ns - start_ns) / 255 * u64::from(byte[0]))
}

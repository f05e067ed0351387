//! Whoever has connected to this process and has not proved yet that it belongs to the job.

use super::dials::DialKey;
use super::pairs::PairDecision;
use super::{Gate, SCRATCH_BYTES, Timer, fresh_nonce, send};
use crate::descriptors;
use crate::handshake::{HandshakeMessage, Listener, ListenerStep};
use crate::socket::Socket;
use crate::transport::SharedMemory;
use penstock_core::Rank;
use penstock_core::life::Status;
use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

/// Unauthenticated connections at a time, where the limit of open files allows. When one more comes, the oldest one is
/// dropped that has not even said a correct hello, or else the oldest.
pub const STRANGERS_MAX: usize = 256;

/// As many of them there may be always: those that connect may be peers.
const STRANGERS_MIN: usize = 8;

/// Of the descriptors that this process may have, the part that strangers may hold.
const STRANGERS_SHARE: usize = 8;

/// Connections accepted before the others get their turn again.
const ACCEPTS_PER_TURN: usize = 64;

/// How long accepting rests when the system has no descriptors or memory left.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// How much of what a refused stranger still sends is read and dropped. Closing a socket with unread bytes resets the
/// connection, and the refusal might be lost with it.
const DRAIN_BYTES_MAX: usize = 2 << 20;

/// An unauthenticated connection.
pub(super) struct Stranger {
    socket: Socket,
    deadline: Instant,
    phase: StrangerState,
}

enum StrangerState {
    Shaking(Box<Listener>),
    /// It was refused; this much more is read.
    Draining {
        left_bytes: usize,
    },
}

impl Stranger {
    fn has_challenged(&self) -> bool {
        matches!(&self.phase, StrangerState::Shaking(machine) if machine.has_challenged())
    }
}

/// How many strangers may be here when the newest has been given this descriptor. The lowest free number is given, so
/// one in the upper half says that the program has opened many files: what is left is for it and for peers.
fn places(newest: RawFd) -> usize {
    let Some(limit) = descriptors::limit() else { return STRANGERS_MAX };
    let crowded = usize::try_from(newest).is_ok_and(|newest| newest >= limit / 2);
    let share = if crowded { 0 } else { limit / STRANGERS_SHARE };
    share.clamp(STRANGERS_MIN, STRANGERS_MAX)
}

impl Gate {
    pub(super) fn accept_some(&mut self) {
        if !self.may_accept {
            return;
        }
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listeners.accept() {
                Ok(socket) => self.admit_stranger(socket),
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => {
                        self.may_accept = false;
                        return;
                    }
                    // One that has gone again, or a signal: the next may be there.
                    ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::Interrupted => {}
                    _ => {
                        // Who waits to be accepted may be a peer, and needs the descriptor more.
                        if descriptors::are_exhausted(&error) {
                            self.drop_oldest();
                        }
                        self.may_accept = false;
                        self.timers.insert((Instant::now() + ACCEPT_REST, Timer::Accept));
                        return;
                    }
                },
            }
        }
    }

    fn admit_stranger(&mut self, mut socket: Socket) {
        let places = places(socket.as_raw_fd());
        while self.strangers.len() >= places {
            self.drop_oldest();
        }
        // Any failure here is the stranger's loss; a peer dials again.
        let Ok(nonce) = fresh_nonce() else { return };
        if socket.without_delay().is_err() {
            return;
        }
        let Ok(token) = self.watch(&mut socket) else { return };
        let deadline = Instant::now() + self.handshake_timeout;
        self.timers.insert((deadline, Timer::Stranger(token)));
        let phase = StrangerState::Shaking(Box::new(Listener::new(nonce)));
        self.strangers.insert(token, Stranger { socket, deadline, phase });
    }

    fn drop_oldest(&mut self) {
        let oldest =
            self.strangers.iter().find(|(_, s)| !s.has_challenged()).or_else(|| self.strangers.iter().next());
        if let Some(token) = oldest.map(|(&token, _)| token)
            && let Some(stranger) = self.strangers.remove(&token)
        {
            self.drop_stranger(token, stranger);
        }
    }

    /// Forgets a stranger that has been taken from the table.
    pub(super) fn drop_stranger(&mut self, token: usize, stranger: Stranger) {
        self.timers.remove(&(stranger.deadline, Timer::Stranger(token)));
        self.close(stranger.socket);
    }

    /// Reads what a stranger has sent. It has been taken from the table, and goes back if there is more to come.
    pub(super) fn stranger_ready(&mut self, token: usize, mut stranger: Stranger) {
        loop {
            let wanted = match &stranger.phase {
                StrangerState::Shaking(machine) => machine.wanted(),
                StrangerState::Draining { left_bytes } => SCRATCH_BYTES.min(*left_bytes),
            };
            // 0 bytes read are an end of stream, or all that a refused stranger may send.
            match stranger.socket.receive(&mut self.scratch[..wanted]) {
                Ok((0, _)) => return self.drop_stranger(token, stranger),
                // A descriptor that comes with anything but the last of a proof is closed at once.
                Ok((count, descriptor)) => match &mut stranger.phase {
                    StrangerState::Draining { left_bytes } => *left_bytes -= count,
                    StrangerState::Shaking(machine) => {
                        let sent = match machine.receive(&self.member, &self.scratch[..count]) {
                            ListenerStep::Wait => Ok(()),
                            ListenerStep::Challenge(message) => send(&stranger.socket, &message, None),
                            ListenerStep::Refused(status) => refuse(&mut stranger, status),
                            ListenerStep::Authenticated { from, lane } => {
                                let memory = memory_of(&stranger.socket, descriptor);
                                match memory
                                    .and_then(|memory| Ok((memory, self.judge(&stranger, from, lane)?)))
                                {
                                    Ok((memory, None)) => {
                                        return self.take(token, stranger, memory, (lane, from));
                                    }
                                    Ok((_, Some(status))) => refuse(&mut stranger, status),
                                    Err(error) => Err(error),
                                }
                            }
                        };
                        if sent.is_err() {
                            return self.drop_stranger(token, stranger);
                        }
                    }
                },
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.strangers.insert(token, stranger);
                    return;
                }
                Err(_) => return self.drop_stranger(token, stranger),
            }
        }
    }

    /// Decides on an authenticated dialer and tells it if it is taken: `None`, or why it is not.
    fn judge(&mut self, stranger: &Stranger, from: Rank, lane: u32) -> io::Result<Option<Status>> {
        // A dialer that gave up in the meantime has another attempt under way, which this one must not keep out.
        match stranger.socket.peek(&mut [MaybeUninit::new(0)]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            // It has gone, or speaks out of turn.
            _ => return Err(ErrorKind::ConnectionAborted.into()),
        }
        let proof_sent = self.dials.get(&(lane, from)).is_some_and(|dial| dial.proof_unanswered);
        match self.shared.pairs.judge(lane, from, proof_sent) {
            PairDecision::Superseded => Ok(Some(Status::Superseded)),
            PairDecision::Busy => Ok(Some(Status::Busy)),
            PairDecision::Take(before) => {
                let told = send(&stranger.socket, &HandshakeMessage::accept(), None);
                if told.is_err() {
                    self.shared.pairs.undo(lane, from, before);
                }
                told.map(|()| None)
            }
        }
    }

    fn take(&mut self, token: usize, stranger: Stranger, memory: Option<SharedMemory>, key: DialKey) {
        self.timers.remove(&(stranger.deadline, Timer::Stranger(token)));
        self.forget_dial(key);
        let seal = match stranger.phase {
            StrangerState::Shaking(machine) => machine.into_seal(),
            StrangerState::Draining { .. } => None,
        };
        self.hand_over(key, stranger.socket, memory, seal);
    }
}

/// What an authenticated dialer has handed over. On a Unix socket it must: otherwise it is let go, and comes back by TCP.
fn memory_of(socket: &Socket, descriptor: Option<OwnedFd>) -> io::Result<Option<SharedMemory>> {
    match descriptor {
        None if socket.is_tcp() => Ok(None),
        None => Err(ErrorKind::InvalidData.into()),
        Some(descriptor) => SharedMemory::open(&descriptor).map(Some),
    }
}

/// Says why and closes in order: everything is sent, and the rest of what comes is read until the other end closes.
fn refuse(stranger: &mut Stranger, status: Status) -> io::Result<()> {
    send(&stranger.socket, &HandshakeMessage::refusal(status), None)?;
    stranger.socket.shutdown(Shutdown::Write)?;
    stranger.phase = StrangerState::Draining { left_bytes: DRAIN_BYTES_MAX };
    Ok(())
}

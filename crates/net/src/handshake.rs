//! How two ranks come to trust a new connection: versions, job and secret are checked before any frame. Pure: bytes in,
//! bytes out; sockets and deadlines are the [admission](crate::admission) thread's.
//!
//! ```text
//! dialer                                                          listener
//!   HELLO     magic 8 | version 2 | job 16 | from 4 | to 4 | lane 2 | nonce 32 | keys 48   ->
//!   <-        CHALLENGE  status 1 (0) | nonce 32 | keys 48 | mac 32
//!   PROOF     mac 32   ->
//!   <-        ACCEPT     status 1 (0)
//! ```
//!
//! In place of `CHALLENGE` or `ACCEPT` the listener may send `REFUSAL: status 1 | version 2` and close. All lengths are
//! fixed, so a stranger has no length to lie about; integers are little-endian. The first 10 bytes of `HELLO` and the
//! layout of `REFUSAL` never change, so that any two versions can at least refuse each other by name.
//!
//! Each mac is HMAC-SHA256, with the job's secret, over a label ("listener" or "dialer") and everything that both have
//! said: who dials whom for which lane of which job, both nonces, and what keys come of. The label stops a mac from being
//! reflected, a fresh nonce on each side stops a replay of either side, and the ranks in it stop a relay to another rank.
//!
//! With [`Member::encrypt`] both sides agree on keys meanwhile ([`crate::seal`]), by two messages of Noise in the places of
//! `keys`, which are zeros otherwise. Without, what follows is neither encrypted nor authenticated: who can change packets
//! between two ranks can do so after the handshake, too.
//!
//! The listener's mac is given to anybody who knows the job's id, so a secret must be random and long: a guessable one could be
//! searched offline.

use crate::seal::{EXCHANGE_BYTES, KeyExchange, Seal};
use hmac::{Hmac, KeyInit, Mac};
use penstock_core::Rank;
use penstock_core::life::{DialFailure, Status};
use penstock_core::wire::VERSION;
use sha2::{Digest, Sha256};

/// What every connection starts with.
pub const MAGIC: [u8; 8] = *b"PNSTOCK1";
/// Length of a nonce.
pub const NONCE_BYTES: usize = 32;
/// Length of a job's id.
pub const JOB_ID_BYTES: usize = 16;
/// Length of the dialer's first message.
pub const HELLO_BYTES: usize = KEYS_AT + EXCHANGE_BYTES;
/// Length of the listener's answer to it.
pub const CHALLENGE_BYTES: usize = 1 + NONCE_BYTES + EXCHANGE_BYTES + MAC_BYTES;
/// Length of the dialer's second message.
pub const PROOF_BYTES: usize = MAC_BYTES;
/// Length of a refusal.
pub const REFUSAL_BYTES: usize = 3;

const MAC_BYTES: usize = 32;
/// Of a mac, as much as makes a name that cannot be guessed.
const NAME_BYTES: usize = 16;
// Where the fields of `HELLO` are.
const VERSION_AT: usize = MAGIC.len();
const JOB_AT: usize = VERSION_AT + 2;
const FROM_AT: usize = JOB_AT + JOB_ID_BYTES;
const TO_AT: usize = FROM_AT + 4;
const LANE_AT: usize = TO_AT + 4;
const KEYS_AT: usize = LANE_AT + 2 + NONCE_BYTES;

/// In the place of what keys come of, where nothing is encrypted.
const NO_KEYS: [u8; EXCHANGE_BYTES] = [0; EXCHANGE_BYTES];

/// Random bytes that no one has used before.
pub type Nonce = [u8; NONCE_BYTES];

/// This process as a member of its job: what both sides of a handshake must know.
#[derive(Clone)]
pub struct Member {
    /// This process.
    pub rank: Rank,
    /// Number of ranks of the job.
    pub ranks: u32,
    /// Number of lanes of every rank.
    pub lanes: u32,
    /// Tells the jobs of a cluster apart. Not a secret.
    pub job_id: [u8; JOB_ID_BYTES],
    /// What proves membership. At least 128 random bits, or it can be guessed.
    pub secret: Vec<u8>,
    /// Whether what follows is encrypted, where it leaves the host. All of a job agree on it.
    pub encrypt: bool,
}

/// Bytes to send: at most a `HELLO`, so nothing is allocated for a stranger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandshakeMessage {
    bytes: [u8; HELLO_BYTES],
    len_bytes: usize,
}

impl HandshakeMessage {
    fn new(parts: &[&[u8]]) -> Self {
        let mut message = Self { bytes: [0; HELLO_BYTES], len_bytes: 0 };
        for part in parts {
            message.bytes[message.len_bytes..message.len_bytes + part.len()].copy_from_slice(part);
            message.len_bytes += part.len();
        }
        message
    }

    /// What the listener says last to a dialer that it takes.
    #[must_use]
    pub fn accept() -> Self {
        Self::new(&[&[Status::Ok as u8]])
    }

    /// What the listener says to a dialer that it does not take.
    #[must_use]
    pub fn refusal(status: Status) -> Self {
        Self::new(&[&[status as u8], &VERSION.to_le_bytes()])
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len_bytes]
    }
}

/// The mac of one side over what both have said; `answered` is the listener's part, its own mac aside.
fn mac(secret: &[u8], label: &[u8], hello: &[u8; HELLO_BYTES], answered: &[u8]) -> Hmac<Sha256> {
    // Hashed first, because HMAC pads a short key with zeros: "secret" and "secret\0" would be the same key.
    let key = Sha256::digest(secret);
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("any length is a key");
    for part in [label, hello, answered] {
        mac.update(part);
    }
    mac
}

/// What a process calls its Unix socket, at which processes of its host reach it: a name that only who knows the secret can
/// work out. `port` is that of its TCP listener, which tells processes of one host apart.
#[must_use]
pub fn name_on_host(secret: &[u8], job_id: &[u8; JOB_ID_BYTES], rank: Rank, port: u16) -> String {
    let key = Sha256::digest(secret);
    let mut mac = Hmac::<Sha256>::new_from_slice(&key).expect("any length is a key");
    for part in [&b"on this host"[..], job_id, &rank.0.to_le_bytes(), &port.to_le_bytes()] {
        mac.update(part);
    }
    let name = mac.finalize().into_bytes();
    name[..NAME_BYTES].iter().fold("penstock-".into(), |text, byte| format!("{text}{byte:02x}"))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A fixed amount of bytes that arrive in pieces.
struct Inbox<const N: usize> {
    bytes: [u8; N],
    have: usize,
}

impl<const N: usize> Inbox<N> {
    fn new() -> Self {
        Self { bytes: [0; N], have: 0 }
    }

    /// Takes what fits up to `wanted` bytes in total.
    fn take(&mut self, bytes: &[u8], wanted: usize) {
        let count = bytes.len().min(wanted - self.have);
        self.bytes[self.have..self.have + count].copy_from_slice(&bytes[..count]);
        self.have += count;
    }
}

/// What the driver of a [`Dialer`] does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DialerStep {
    /// Read more.
    Wait,
    /// Send this, then read more.
    Prove(HandshakeMessage),
    /// The connection is open; whatever follows is frames.
    Accepted,
    /// Close.
    Failed(DialFailure),
}

/// The side that connected.
pub struct Dialer {
    hello: [u8; HELLO_BYTES],
    inbox: Inbox<CHALLENGE_BYTES>,
    state: DialerState,
    exchange: Option<Box<KeyExchange>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DialerState {
    AwaitsChallenge,
    AwaitsVerdict,
    Over,
}

impl Dialer {
    /// Starts a handshake with the process at the address of rank `to`. The message is to be sent first.
    #[must_use]
    pub fn new(member: &Member, to: Rank, lane: u32, nonce: &Nonce) -> (Self, HandshakeMessage) {
        let mut hello = HandshakeMessage::new(&[
            &MAGIC,
            &VERSION.to_le_bytes(),
            &member.job_id,
            &member.rank.0.to_le_bytes(),
            &to.0.to_le_bytes(),
            // Lanes are bounded far below 2^16 (limits::LANES_MAX).
            &(lane as u16).to_le_bytes(),
            nonce,
            &NO_KEYS,
        ]);
        let new = || Box::new(KeyExchange::new(&member.secret, &hello.bytes[..KEYS_AT], true));
        let mut exchange = member.encrypt.then(new);
        if let Some(exchange) = &mut exchange {
            hello.bytes[KEYS_AT..].copy_from_slice(&exchange.say());
        }
        let state = DialerState::AwaitsChallenge;
        (Self { hello: hello.bytes, inbox: Inbox::new(), state, exchange }, hello)
    }

    /// The keys of what follows, once the connection is open, if it is encrypted.
    pub(crate) fn into_seal(self) -> Option<Seal> {
        self.exchange.and_then(|exchange| exchange.seal())
    }

    /// How many bytes [`Dialer::receive`] looks at. The driver must not read more from the socket: after the last
    /// status come frames. 0 when the handshake is over.
    #[must_use]
    pub fn wanted(&self) -> usize {
        if self.state == DialerState::Over {
            return 0;
        }
        // The first byte says how much follows.
        let total = match (self.inbox.have, self.inbox.bytes[0]) {
            (0, _) => 1,
            (_, 0) => CHALLENGE_BYTES,
            _ => REFUSAL_BYTES,
        };
        total - self.inbox.have
    }

    /// Takes at most [`Dialer::wanted`] bytes from the listener.
    pub fn receive(&mut self, member: &Member, bytes: &[u8]) -> DialerStep {
        let wanted = self.wanted();
        if wanted == 0 || bytes.is_empty() {
            return DialerStep::Wait;
        }
        self.inbox.take(bytes, self.inbox.have + wanted);
        let step = match Status::from_byte(self.inbox.bytes[0]) {
            None => DialerStep::Failed(DialFailure::NotPenstock),
            Some(Status::Ok) if self.state == DialerState::AwaitsVerdict => DialerStep::Accepted,
            Some(_) if self.wanted() > 0 => return self.receive(member, &bytes[wanted.min(bytes.len())..]),
            Some(Status::Ok) => self.check_challenge(member),
            Some(status) => {
                DialerStep::Failed(DialFailure::Refused { status, version: u16_at(&self.inbox.bytes, 1) })
            }
        };
        self.inbox.have = 0;
        self.state = match step {
            DialerStep::Prove(_) => DialerState::AwaitsVerdict,
            _ => DialerState::Over,
        };
        step
    }

    fn check_challenge(&mut self, member: &Member) -> DialerStep {
        let (answered, proof) = self.inbox.bytes[1..].split_at(NONCE_BYTES + EXCHANGE_BYTES);
        let proven = mac(&member.secret, b"listener", &self.hello, answered).verify_slice(proof).is_ok();
        let agreed = |exchange: &mut Box<KeyExchange>| exchange.hear(&answered[NONCE_BYTES..]);
        if !(proven && self.exchange.as_mut().is_none_or(agreed)) {
            return DialerStep::Failed(DialFailure::ListenerUnproven);
        }
        let proof = mac(&member.secret, b"dialer", &self.hello, answered).finalize().into_bytes();
        DialerStep::Prove(HandshakeMessage::new(&[&proof]))
    }
}

/// What the driver of a [`Listener`] does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenerStep {
    /// Read more.
    Wait,
    /// Send this, then read more.
    Challenge(HandshakeMessage),
    /// The dialer is who it says. Send [`HandshakeMessage::accept`], or [`HandshakeMessage::refusal`] and close.
    Authenticated {
        /// Who dialled.
        from: Rank,
        /// For which lane.
        lane: u32,
    },
    /// Send the refusal and close.
    Refused(Status),
}

/// The side that was connected to.
pub struct Listener {
    /// Its part of what both say: a nonce, and what keys come of.
    answered: [u8; NONCE_BYTES + EXCHANGE_BYTES],
    hello: Inbox<HELLO_BYTES>,
    proof: Inbox<PROOF_BYTES>,
    exchange: Option<Box<KeyExchange>>,
    over: bool,
}

impl Listener {
    /// Starts a handshake with whoever has connected.
    #[must_use]
    pub fn new(nonce: Nonce) -> Self {
        let mut answered = [0; NONCE_BYTES + EXCHANGE_BYTES];
        answered[..NONCE_BYTES].copy_from_slice(&nonce);
        Self { answered, hello: Inbox::new(), proof: Inbox::new(), exchange: None, over: false }
    }

    /// As [`Dialer::into_seal`].
    pub(crate) fn into_seal(self) -> Option<Seal> {
        self.exchange.and_then(|exchange| exchange.seal())
    }

    /// How many bytes [`Listener::receive`] looks at; 0 when the handshake is over. More than that is a dialer that
    /// speaks out of turn.
    #[must_use]
    pub fn wanted(&self) -> usize {
        match (self.over, HELLO_BYTES - self.hello.have) {
            (true, _) => 0,
            (false, 0) => PROOF_BYTES - self.proof.have,
            (false, missing) => missing,
        }
    }

    /// Whether the dialer's first message was in order.
    #[must_use]
    pub fn has_challenged(&self) -> bool {
        self.hello.have == HELLO_BYTES
    }

    /// Takes at most [`Listener::wanted`] bytes from the dialer.
    pub fn receive(&mut self, member: &Member, bytes: &[u8]) -> ListenerStep {
        if self.over || bytes.is_empty() {
            return ListenerStep::Wait;
        }
        let step = if self.has_challenged() {
            self.proof.take(bytes, PROOF_BYTES);
            if self.proof.have < PROOF_BYTES {
                return ListenerStep::Wait;
            }
            self.check_proof(member)
        } else {
            self.hello.take(bytes, HELLO_BYTES);
            match self.check_hello(member) {
                Err(status) => ListenerStep::Refused(status),
                Ok(()) if self.hello.have < HELLO_BYTES => return ListenerStep::Wait,
                Ok(()) => match self.challenge(member) {
                    Some(challenge) => return ListenerStep::Challenge(challenge),
                    None => ListenerStep::Refused(Status::AuthenticationFailed),
                },
            }
        };
        self.over = true;
        step
    }

    /// Checks as much as has arrived, so that a stranger is refused by its first bytes and another version, whose
    /// message may be shorter, is not waited for.
    fn check_hello(&self, member: &Member) -> Result<(), Status> {
        let (bytes, have) = (&self.hello.bytes, self.hello.have);
        let magic_bytes = have.min(MAGIC.len());
        if bytes[..magic_bytes] != MAGIC[..magic_bytes] {
            return Err(Status::WrongMagic);
        }
        if have >= JOB_AT && u16_at(bytes, VERSION_AT) != VERSION {
            return Err(Status::WrongVersion);
        }
        if have < HELLO_BYTES {
            return Ok(());
        }
        if bytes[JOB_AT..FROM_AT] != member.job_id {
            return Err(Status::WrongJob);
        }
        let (from, lane) = self.dialer();
        let to = Rank(u32_at(bytes, TO_AT));
        if to != member.rank || from == member.rank || from.0 >= member.ranks || lane >= member.lanes {
            return Err(Status::UnknownRankOrLane);
        }
        Ok(())
    }

    fn dialer(&self) -> (Rank, u32) {
        (Rank(u32_at(&self.hello.bytes, FROM_AT)), u32::from(u16_at(&self.hello.bytes, LANE_AT)))
    }

    /// Nothing to a dialer that agrees on keys, and does not know the secret.
    fn challenge(&mut self, member: &Member) -> Option<HandshakeMessage> {
        if member.encrypt {
            let (hello, keys) = self.hello.bytes.split_at(KEYS_AT);
            let mut exchange = Box::new(KeyExchange::new(&member.secret, hello, false));
            if !exchange.hear(keys) {
                return None;
            }
            self.answered[NONCE_BYTES..].copy_from_slice(&exchange.say());
            self.exchange = Some(exchange);
        }
        let proof =
            mac(&member.secret, b"listener", &self.hello.bytes, &self.answered).finalize().into_bytes();
        Some(HandshakeMessage::new(&[&[Status::Ok as u8], &self.answered, &proof]))
    }

    fn check_proof(&self, member: &Member) -> ListenerStep {
        let expected = mac(&member.secret, b"dialer", &self.hello.bytes, &self.answered);
        if expected.verify_slice(&self.proof.bytes).is_err() {
            return ListenerStep::Refused(Status::AuthenticationFailed);
        }
        let (from, lane) = self.dialer();
        ListenerStep::Authenticated { from, lane }
    }
}

#[cfg(test)]
mod tests;

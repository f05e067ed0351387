//! What goes over TCP, encrypted and authenticated: records of the Noise protocol below the frames, which know nothing of them.
//!
//! Keys come of the handshake ([`crate::handshake`]): `Noise_NNpsk0_25519_AESGCM_SHA256`, with a key made of the job's secret. Each connection
//! has keys of its own that no later one and no secret gives away, and each direction counts its records. A record that was changed, left
//! out, repeated or moved does not open, and ends the connection: nothing of it reaches a frame.
//!
//! A record is the length of what follows (two bytes, little-endian), and a Noise message of up to [`RECORD_BYTES`]. A length that was changed
//! makes the record another one, which does not open either. Why Noise, and why so: docs/decisions/0024-encryption.md.

use crate::socket::Socket;
use sha2::{Digest, Sha256};
use snow::{Builder, HandshakeState, TransportState};
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::ops::Range;

/// What each side says in the handshake: a key that is used once, and the tag of nothing.
pub(crate) const EXCHANGE_BYTES: usize = 32 + TAG_BYTES;

/// The longest record, open.
const RECORD_BYTES: usize = 32 << 10;
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 2;
/// The longest record, sealed, with its length.
const SEALED_BYTES: usize = LENGTH_BYTES + RECORD_BYTES + TAG_BYTES;
/// Read at a time.
const ARRIVED_BYTES: usize = 4 * SEALED_BYTES;
/// Records after which a direction's key is replaced: 32 GiB, far below what AES-GCM allows.
const REKEY_RECORDS: u64 = 1 << 20;

const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
const LABEL: &[u8] = b"penstock: encryption of connections";
const SPOILED: &str = "what came over its connection is not what it sent: a record was changed, left out, repeated or moved \
                       on the way";

/// One side of a handshake that agrees on keys.
pub(crate) struct KeyExchange(HandshakeState);

impl KeyExchange {
    /// Of the side that dials, or of the other. `hello` is what the dialer has said first.
    pub(crate) fn new(secret: &[u8], hello: &[u8], dials: bool) -> Self {
        let key: [u8; 32] =
            Sha256::new().chain_update(LABEL).chain_update(Sha256::digest(secret)).finalize().into();
        let params = PATTERN.parse().expect("a pattern of Noise");
        let builder = Builder::new(params).prologue(hello).and_then(|builder| builder.psk(0, &key));
        let made = builder
            .and_then(|builder| if dials { builder.build_initiator() } else { builder.build_responder() });
        Self(made.expect("all that the pattern needs is given"))
    }

    /// What is said to the other side.
    pub(crate) fn say(&mut self) -> [u8; EXCHANGE_BYTES] {
        let mut said = [0; EXCHANGE_BYTES];
        let len = self.0.write_message(&[], &mut said).expect("its turn, and room");
        assert_eq!(len, EXCHANGE_BYTES, "the pattern's messages have one length");
        said
    }

    /// What the other side has said; whether it knows the secret.
    pub(crate) fn hear(&mut self, said: &[u8]) -> bool {
        self.0.read_message(said, &mut [0; EXCHANGE_BYTES]).is_ok()
    }

    /// The keys that both now have.
    pub(crate) fn seal(self) -> Option<Seal> {
        self.0.into_transport_mode().ok().map(Seal::new)
    }
}

/// Of one connection: what is sealed and not sent yet, and what has come and is not opened or not read yet.
pub(crate) struct Seal {
    keys: TransportState,
    sealed: Box<[u8; SEALED_BYTES]>,
    /// The part of `sealed` that is to be sent.
    unsent: Range<usize>,
    gathered: Box<[u8; RECORD_BYTES]>,
    arrived: Box<[u8; ARRIVED_BYTES]>,
    /// The part of `arrived` that is not opened.
    closed: Range<usize>,
    opened: Box<[u8; RECORD_BYTES + TAG_BYTES]>,
    /// The part of `opened` that is not read.
    unread: Range<usize>,
}

impl fmt::Debug for Seal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Seal").finish_non_exhaustive()
    }
}

impl Seal {
    fn new(keys: TransportState) -> Self {
        Self {
            keys,
            sealed: Box::new([0; SEALED_BYTES]),
            unsent: 0..0,
            gathered: Box::new([0; RECORD_BYTES]),
            arrived: Box::new([0; ARRIVED_BYTES]),
            closed: 0..0,
            opened: Box::new([0; RECORD_BYTES + TAG_BYTES]),
            unread: 0..0,
        }
    }

    /// Bytes that were taken and are not sent: less than a record.
    pub(crate) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Takes bytes and sends them, sealed. Less than was given: there is no more room for now. Of the last record some may wait
    /// for [`Seal::flush`].
    pub(crate) fn write(&mut self, socket: &Socket, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.flush(socket)?;
        let mut at = Place::default();
        let mut taken = 0;
        loop {
            let piece = at.next(slices, &mut self.gathered);
            if piece.is_empty() {
                return Ok(taken);
            }
            taken += piece.len();
            let len =
                self.keys.write_message(piece, &mut self.sealed[LENGTH_BYTES..]).map_err(io::Error::other)?;
            self.sealed[..LENGTH_BYTES].copy_from_slice(&(len as u16).to_le_bytes());
            self.unsent = 0..LENGTH_BYTES + len;
            if self.keys.sending_nonce().is_multiple_of(REKEY_RECORDS) {
                self.keys.rekey_outgoing();
            }
            match self.flush(socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(taken),
                outcome => outcome?,
            }
        }
    }

    /// Sends what was taken. `WouldBlock`: not all of it.
    pub(crate) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match socket.send(&self.sealed[self.unsent.clone()], None) {
                Ok(count) => self.unsent.start += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what has come, opened. Less than was asked for: there is no more for now, or it is the end.
    pub(crate) fn read(&mut self, socket: &Socket, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut count = 0;
        for place in places {
            let mut filled = 0;
            while filled < place.len() {
                let room = &mut place[filled..];
                if !self.unread.is_empty() {
                    let len = room.len().min(self.unread.len());
                    room[..len].copy_from_slice(&self.opened[self.unread.start..][..len]);
                    self.unread.start += len;
                    filled += len;
                    continue;
                }
                if let Some(len) = self.open(room)? {
                    filled += len;
                    continue;
                }
                match self.receive(socket) {
                    Ok(0) => return Ok(count + filled),
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock && count + filled > 0 => {
                        return Ok(count + filled);
                    }
                    Err(error) => return Err(error),
                }
            }
            count += filled;
        }
        Ok(count)
    }

    /// Opens the next record if it is here: into `room`, of which it fills so much, if it fits there with its tag, or else for
    /// the next read.
    fn open(&mut self, room: &mut [u8]) -> io::Result<Option<usize>> {
        let here = &self.arrived[self.closed.clone()];
        let Some((head, rest)) = here.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let len = usize::from(u16::from_le_bytes(*head));
        if !(TAG_BYTES + 1..=RECORD_BYTES + TAG_BYTES).contains(&len) {
            return Err(spoiled());
        }
        let Some(record) = rest.get(..len) else { return Ok(None) };
        let straight = room.len() >= len;
        let to = if straight { room } else { &mut self.opened[..] };
        let count = self.keys.read_message(record, to).map_err(|_| spoiled())?;
        self.closed.start += LENGTH_BYTES + len;
        if self.keys.receiving_nonce().is_multiple_of(REKEY_RECORDS) {
            self.keys.rekey_incoming();
        }
        if straight {
            return Ok(Some(count));
        }
        self.unread = 0..count;
        Ok(Some(0))
    }

    /// One system call. Only part of a record may be here, so it moves to the front.
    fn receive(&mut self, mut socket: &socket2::Socket) -> io::Result<usize> {
        let kept = self.closed.len();
        self.arrived.copy_within(self.closed.clone(), 0);
        self.closed = 0..kept;
        let count = socket.read(&mut self.arrived[kept..])?;
        self.closed.end += count;
        Ok(count)
    }
}

fn spoiled() -> io::Error {
    io::Error::new(ErrorKind::ConnectionAborted, SPOILED)
}

/// Where in a list of slices the next record begins.
#[derive(Default)]
struct Place {
    slice: usize,
    offset: usize,
}

impl Place {
    /// The next bytes, a record's at most: where they are, if they are in one place, or else gathered. None: there are no more.
    fn next<'a>(&mut self, slices: &'a [IoSlice<'_>], room: &'a mut [u8; RECORD_BYTES]) -> &'a [u8] {
        let mut filled = 0;
        while filled < RECORD_BYTES
            && let Some(slice) = slices.get(self.slice)
        {
            let rest = &slice[self.offset..];
            let len = rest.len().min(RECORD_BYTES - filled);
            let is_last = slices[self.slice + 1..].iter().all(|slice| slice.is_empty());
            self.offset += len;
            if filled == 0 && len > 0 && (len == RECORD_BYTES || is_last) {
                return &rest[..len];
            }
            room[filled..filled + len].copy_from_slice(&rest[..len]);
            filled += len;
            if self.offset == slice.len() {
                (self.slice, self.offset) = (self.slice + 1, 0);
            }
        }
        &room[..filled]
    }
}

#[cfg(test)]
mod tests;

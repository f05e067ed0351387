//! What a connection reads from and writes to: a TCP socket, or memory shared with another process of this host.
//!
//! Both take bytes, take part of them, or would block, and say by readiness events when that is over. Of shared memory the
//! Unix socket over which it was handed is the bell: a byte that arrives there says that there may be more to read, or room to
//! write. It is the sign of life, too: it ends with the process at its other end.
//!
//! Why memory, and not the Unix socket itself: docs/decisions/0019-shared-memory-on-a-host.md.
//!
//! What goes over a socket may be sealed ([`crate::seal`]); what goes through memory does not leave the host.

mod mapping;
mod pipe;

use crate::seal::Seal;
use crate::send_buffer;
use crate::socket::Socket;
use crate::tcp_info;
pub use mapping::MAPPING_BYTES;
use mio::event::{Event, Source};
use mio::{Interest, Registry, Token};
use pipe::{Reader, Writer};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::os::fd::{AsFd, OwnedFd};

/// What the kernel may hold unsent before it calls a socket full. Everything below this mark has been decided.
const NOT_SENT_BYTES: u32 = 128 << 10;
/// Rings of the bell that are heard at a time: more than the kernel keeps.
const BELLS: usize = 1024;

/// What a readiness event says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Readiness {
    pub(crate) read: bool,
    pub(crate) write: bool,
    pub(crate) hung_up: bool,
}

/// This process's end of memory that both map.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    reader: Reader,
    writer: Writer,
    /// The bell may have been rung.
    rung: bool,
    /// The other end has closed, as an event said.
    hung_up: bool,
    /// And nothing of it is left to be heard.
    ended: bool,
    /// What the other end shows cannot be.
    broken: bool,
}

impl SharedMemory {
    fn new((reader, writer): (Reader, Writer)) -> Self {
        Self { reader, writer, rung: false, hung_up: false, ended: false, broken: false }
    }

    /// Makes it, and what is to be handed over.
    ///
    /// # Errors
    /// What the system said; `Unsupported` where there is none.
    pub(crate) fn create() -> io::Result<(OwnedFd, Self)> {
        let (memory, reader, writer) = mapping::create()?;
        Ok((memory, Self::new((reader, writer))))
    }

    /// What was handed over.
    ///
    /// # Errors
    /// `InvalidData` if it is not of the kind that is made; what the system said.
    pub(crate) fn open(memory: &OwnedFd) -> io::Result<Self> {
        mapping::open(memory).map(Self::new)
    }

    /// As [`Read::read_vectored`].
    fn read(&mut self, socket: &Socket, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        // What was written before a sign of the end is in memory by now.
        if std::mem::take(&mut self.rung) {
            self.hear(socket)?;
        }
        // Who is gone needs no room.
        let count = self.reader.read(places, || drop(ring_bell(socket)))?;
        if count == 0 && !self.ended && !places.iter().all(|place| place.is_empty()) {
            return Err(ErrorKind::WouldBlock.into());
        }
        Ok(count)
    }

    /// Takes what has come of the bell. Each ring brings about an event, so what comes meanwhile may stay; the end does not.
    fn hear(&mut self, socket: &Socket) -> io::Result<()> {
        loop {
            match (&**socket).read(&mut [0; BELLS]) {
                Ok(0) => self.ended = true,
                Ok(_) if self.hung_up => continue,
                Ok(_) => {}
                // There were rings that nobody will hear any more.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => self.ended = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            return Ok(());
        }
    }
}

/// An error only if nobody is there to hear it.
fn ring_bell(socket: &Socket) -> io::Result<()> {
    match socket.send(&[0], None) {
        Ok(_) => Ok(()),
        // So many rings wait to be heard that one more changes nothing.
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
        Err(error) => Err(error),
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Transport {
    socket: Socket,
    memory: Option<SharedMemory>,
    seal: Option<Box<Seal>>,
}

impl Transport {
    /// Of an authenticated socket, the memory that was handed over on it, and the keys that both ends have agreed on.
    pub(crate) fn new(socket: Socket, memory: Option<SharedMemory>, seal: Option<Seal>) -> Self {
        Self { socket, seal: seal.filter(|_| memory.is_none()).map(Box::new), memory }
    }

    /// Whether bytes go through shared memory.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        self.memory.is_some()
    }

    /// The socket alone.
    #[must_use]
    pub fn into_socket(self) -> socket2::Socket {
        self.socket.into_inner()
    }

    /// Before the first use.
    ///
    /// # Errors
    /// What the system said to an option of TCP.
    pub(crate) fn set_up(&self) -> io::Result<()> {
        if !self.socket.is_tcp() {
            return Ok(());
        }
        self.socket.without_delay()?;
        #[cfg(target_os = "linux")]
        self.socket.set_tcp_notsent_lowat(NOT_SENT_BYTES)?;
        Ok(())
    }

    /// What an event says of it.
    pub(crate) fn ready(&mut self, event: &Event) -> Readiness {
        let hung_up = event.is_read_closed() || event.is_write_closed() || event.is_error();
        let readable = event.is_readable() || event.is_read_closed() || event.is_error();
        let writable = event.is_writable() || event.is_write_closed() || event.is_error();
        let Some(memory) = &mut self.memory else {
            return Readiness { read: readable, write: writable, hung_up };
        };
        memory.rung |= readable;
        memory.hung_up |= hung_up;
        Readiness { read: readable, write: readable, hung_up }
    }

    /// As [`Read::read_vectored`]. Less than was asked for: there is no more for now, and an event will tell.
    ///
    /// # Errors
    /// What the system said; `InvalidData` if the other end of shared memory makes no sense, `ConnectionAborted` with a sentence if
    /// what was sealed was changed on the way.
    pub(crate) fn read(&mut self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match (&mut self.memory, &mut self.seal) {
            (None, None) => (&*self.socket).read_vectored(places),
            (None, Some(seal)) => seal.read(&self.socket, places),
            (Some(memory), _) if memory.broken => Err(pipe::nonsense()),
            (Some(memory), _) => memory.read(&self.socket, places),
        }
    }

    /// As [`std::io::Write::write_vectored`]. Less than was given: there is no more room for now, and an event will tell.
    ///
    /// # Errors
    /// What the system said; `InvalidData` as in `read`, which says so from then on.
    pub(crate) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        if let Some(seal) = &mut self.seal {
            return seal.write(&self.socket, slices);
        }
        let Some(memory) = &mut self.memory else {
            // A peer that is gone must not end this process by a signal, whatever the program does with SIGPIPE.
            return self.socket.send_vectored_with_flags(slices, libc::MSG_NOSIGNAL);
        };
        let socket = &self.socket;
        let outcome = memory.writer.write(slices, || ring_bell(socket));
        memory.broken |= outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::InvalidData);
        outcome
    }

    /// Hands on what it has taken and holds itself. `WouldBlock`: not all of it.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        self.seal.as_mut().map_or(Ok(()), |seal| seal.flush(&self.socket))
    }

    /// Bytes that [`Transport::flush`] would hand on.
    pub(crate) fn held_bytes(&self) -> usize {
        self.seal.as_ref().map_or(0, |seal| seal.unsent_bytes())
    }

    /// Bounds what the kernel holds by a line rate; see [`crate::send_buffer`]. False: it is on no line.
    pub(crate) fn bind_send_buffer(&self, bytes_per_s: f64) -> bool {
        if self.socket.is_tcp() {
            // An older kernel: the connection works as it is.
            let _ = send_buffer::bind(self.socket.as_fd(), bytes_per_s);
        }
        self.socket.is_tcp()
    }

    /// Segments that TCP has sent again so far: none through memory, nor where the system does not tell.
    pub(crate) fn retransmitted_segments(&self) -> u64 {
        if self.socket.is_tcp() {
            tcp_info::retransmitted_segments(self.socket.as_fd()).unwrap_or(0)
        } else {
            0
        }
    }

    /// Bytes that would be lost if this end closed now. What is in memory the other end can read after that.
    pub(crate) fn undelivered_bytes(&self) -> usize {
        if self.is_memory() { 0 } else { self.socket.unacknowledged_bytes() + self.held_bytes() }
    }
}

impl Source for Transport {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        self.socket.reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        self.socket.deregister(registry)
    }
}

#[cfg(test)]
mod tests;

//! A stream socket of this process: TCP, or Unix between two processes of one host. Both are used alike; what a Unix socket
//! can do beside it is hand over a descriptor.

use crate::congestion;
use crate::descriptors::{self, Registration};
use mio::event::Source;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use socket2::{SockAddr, Type};
use std::io::{self, ErrorKind};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Room for one descriptor in a message, with its header; what does not fit the kernel closes.
#[repr(C, align(8))]
struct Ancillary([u8; ANCILLARY_BYTES]);

// SAFETY: only computes.
const ONE_BYTES: usize = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as libc::c_uint) } as usize;
// SAFETY: only computes.
const ANCILLARY_BYTES: usize = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as libc::c_uint) } as usize;

/// Nonblocking, and noted for forked children as long as it lives.
#[derive(Debug)]
pub(crate) struct Socket {
    // Before the socket, so that it is dropped first.
    _noted: Registration,
    socket: socket2::Socket,
    is_tcp: bool,
}

impl Socket {
    /// Takes over a socket that is connected, or listens.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn new(socket: socket2::Socket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let is_tcp = !socket.local_addr()?.is_unix();
        Ok(Self { _noted: descriptors::register(&socket), socket, is_tcp })
    }

    /// Begins to connect; TCP with this congestion control, if not with the system's.
    ///
    /// # Errors
    /// What the system said at once.
    pub(crate) fn connect(address: &SockAddr, congestion_control: Option<&str>) -> io::Result<Self> {
        let socket = Self::new(socket2::Socket::new(address.domain(), Type::STREAM, None)?)?;
        if socket.is_tcp {
            congestion::set(&socket, congestion_control)?;
        }
        match socket.socket.connect(address) {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            other => other?,
        }
        Ok(socket)
    }

    /// Whether the connection has been made: an error if it cannot be, "would block" if that is not known yet.
    pub(crate) fn finish_connect(&self) -> io::Result<()> {
        if let Some(error) = self.socket.take_error()? {
            return Err(error);
        }
        let peer = match self.socket.peer_addr() {
            Err(error) if error.kind() == ErrorKind::NotConnected => {
                return Err(ErrorKind::WouldBlock.into());
            }
            other => other?,
        };
        // A dial to a local port where nobody listens may be given that very port as its own, and then TCP connects the
        // socket to itself.
        if self.is_tcp && self.socket.local_addr()?.as_socket() == peer.as_socket() {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        self.without_delay()
    }

    /// What is written is sent at once.
    pub(crate) fn without_delay(&self) -> io::Result<()> {
        if self.is_tcp { self.socket.set_tcp_nodelay(true) } else { Ok(()) }
    }

    /// Whether it is TCP; else it is Unix.
    pub(crate) fn is_tcp(&self) -> bool {
        self.is_tcp
    }

    /// Whether the process at the other end of a Unix socket is of this user.
    #[cfg(target_os = "linux")]
    pub(crate) fn is_of_user(&self, user: libc::uid_t) -> bool {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: `peer` has room for what the option writes, of which `len` tells the kernel.
        let result = unsafe {
            libc::getsockopt(self.socket.as_raw_fd(), level, name, (&raw mut peer).cast(), &raw mut len)
        };
        result == 0 && peer.uid == user
    }

    /// There is no such socket.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn is_of_user(&self, _: libc::uid_t) -> bool {
        false
    }

    /// One `sendmsg`, with a descriptor beside the bytes if there is one: the other end may have it with the first of them.
    pub(crate) fn send(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut ancillary = Ancillary([0; ANCILLARY_BYTES]);
        // SAFETY: a message of zeros is one without parts.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if let Some(descriptor) = descriptor {
            message.msg_control = ancillary.0.as_mut_ptr().cast();
            message.msg_controllen = ANCILLARY_BYTES as _;
            // SAFETY: the buffer is aligned, and has room for a header and one descriptor.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = ONE_BYTES as _;
                libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
            }
        }
        // SAFETY: the message refers to `bytes`, which are only read, and to `ancillary`; both outlive the call.
        let count = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// One `recvmsg`, with the descriptor that came beside the bytes, if one did.
    pub(crate) fn receive(&self, room: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
        let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
        let mut ancillary = Ancillary([0; ANCILLARY_BYTES]);
        // SAFETY: a message of zeros is one without parts.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = ancillary.0.as_mut_ptr().cast();
        // Not `ANCILLARY_BYTES`, whose padding has room for a second one.
        message.msg_controllen = ONE_BYTES as _;
        // SAFETY: the message refers to `room` and `ancillary`, which outlive the call, with their lengths.
        let count = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, CLOSE_ON_EXEC) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the kernel has filled the buffer as the message says; a descriptor in it is this process's own, and
        // nobody else's.
        let descriptor = unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            let is_one = !header.is_null()
                && (*header).cmsg_level == libc::SOL_SOCKET
                && (*header).cmsg_type == libc::SCM_RIGHTS;
            is_one.then(|| OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()))
        };
        Ok((count, descriptor))
    }

    /// Bytes that the kernel has taken and the other end has not acknowledged (TCP), or not read (Unix).
    pub(crate) fn unacknowledged_bytes(&self) -> usize {
        let mut count: libc::c_int = 0;
        // SAFETY: the descriptor is open, and TIOCOUTQ (SIOCOUTQ) writes one int.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
        if result == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
    }

    /// Lets go of it: it is not noted any more.
    #[must_use]
    pub(crate) fn into_inner(self) -> socket2::Socket {
        self.socket
    }
}

#[cfg(target_os = "linux")]
const CLOSE_ON_EXEC: libc::c_int = libc::MSG_CMSG_CLOEXEC;
/// Nobody hands over descriptors there.
#[cfg(not(target_os = "linux"))]
const CLOSE_ON_EXEC: libc::c_int = 0;

impl Deref for Socket {
    type Target = socket2::Socket;

    fn deref(&self) -> &socket2::Socket {
        &self.socket
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Source for Socket {
    fn register(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        SourceFd(&self.socket.as_raw_fd()).register(registry, token, interests)
    }

    fn reregister(&mut self, registry: &Registry, token: Token, interests: Interest) -> io::Result<()> {
        SourceFd(&self.socket.as_raw_fd()).reregister(registry, token, interests)
    }

    fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        SourceFd(&self.socket.as_raw_fd()).deregister(registry)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_user_at_the_other_end_is_known() {
        let (one, _other) = socket2::Socket::pair(socket2::Domain::UNIX, Type::STREAM, None).unwrap();
        let socket = Socket::new(one).unwrap();
        // SAFETY: asks for a number.
        let mine = unsafe { libc::geteuid() };
        assert!(socket.is_of_user(mine) && !socket.is_of_user(mine + 1));
    }
}

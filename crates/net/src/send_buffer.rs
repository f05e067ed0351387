//! How many bytes a connection may hold in the kernel: as many as the link needs, and no more.
//!
//! What the kernel has been given is decided, and an urgent slice waits behind it, twice: as a push and as an answer.
//! Left alone, TCP fills the narrowest link's queue until it overflows; with 50 ms of queue (the lab's emulated clusters) an
//! urgent slice took 60 to 80 ms. So once the line rate is known and there is a book, whose slices are urgent, a connection's
//! send buffer holds what the link sends in [`QUEUE_S`].
//!
//! All connections begin with the same, however many there are: at times one alone carries all that a host sends (the end of a
//! step, a tree, the first level of a butterfly), and a receiver must have something in its queue while its other peers
//! send elsewhere.
//!
//! The rate of each is corrected while data flows ([`crate::line`]), rarely and upwards. A bound that followed each connection's
//! round trips made them unequal, and with them the peers' shares of the link: ResNet-50 at 600 Mbit/s took 1.13 to 1.24
//! of T* that way, and 1.01 without any bound.

use crate::tcp_info;
use std::io;
use std::os::fd::BorrowedFd;

/// What a buffer holds, as time on the link. Processes on a busy machine pause for some milliseconds, and the link
/// shall not.
const QUEUE_S: f64 = 3e-3;
/// What it must be able to hold, or it is left alone.
const QUEUE_MIN_S: f64 = 2e-3;
/// The largest buffer that Linux gives to a program that asks for a size (net.core.wmem_max, by default 208 KiB, doubled).
/// A link that needs more is fast enough to do without.
const BOUND_MAX_BYTES: f64 = ((2 * 208) << 10) as f64;

/// Bounds what the socket holds, if that serves a link of `bytes_per_s`; or gives the choice back to the system.
///
/// # Errors
/// What the system said. A kernel that cannot tell or be told leaves the connection as it is.
pub(crate) fn bind(socket: BorrowedFd<'_>, bytes_per_s: f64) -> io::Result<()> {
    system::apply(socket, bound(bytes_per_s, tcp_info::shortest_round_trip_s(socket)?))
}

/// Bytes for a connection; `None`: it is left alone.
fn bound(bytes_per_s: f64, round_trip_s: f64) -> Option<u32> {
    let bytes = (bytes_per_s * QUEUE_S).min(BOUND_MAX_BYTES);
    // Alone on the link, it must be able to fill it.
    let needed = bytes_per_s * round_trip_s.max(QUEUE_MIN_S);
    (needed < bytes).then_some(bytes as u32)
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;
    use std::os::fd::BorrowedFd;

    pub(super) fn apply(_: BorrowedFd<'_>, _: Option<u32>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::io;
    use std::mem::size_of;
    use std::os::fd::{AsRawFd, BorrowedFd};

    /// Linux 5.16 and later: which buffer sizes are fixed by the program; 0 gives them back to the system.
    const SO_BUF_LOCK: libc::c_int = 72;

    /// Bounds the send buffer, or gives it back to the system.
    pub(super) fn apply(socket: BorrowedFd<'_>, bytes: Option<u32>) -> io::Result<()> {
        // First the way back: a kernel that does not know it is not asked for a bound.
        set(socket, SO_BUF_LOCK, 0)?;
        let Some(bytes) = bytes else { return Ok(()) };
        // The kernel doubles what it is given, for its own structures; here both halves are meant.
        set(socket, libc::SO_SNDBUF, libc::c_int::try_from(bytes / 2).unwrap_or(libc::c_int::MAX))
    }

    fn set(socket: BorrowedFd<'_>, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the kernel reads one integer of ours.
        let status = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(target_os = "linux")]
    use std::os::fd::AsFd;

    const LAN_S: f64 = 200e-6;

    #[test]
    fn slow_links_in_one_place_are_bound_and_others_are_not() {
        assert_eq!(bound(75e6, LAN_S), Some(225_000));
        assert_eq!(bound(150e6, LAN_S), Some(425_984), "1.2 Gbit/s: what can be asked for");
        assert_eq!(bound(1.25e9, LAN_S), None, "10 Gbit/s: more than can be asked for");
        assert_eq!(bound(75e6, 20e-3), None, "far away: one connection could not fill the link");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_socket_takes_the_bound_and_gives_it_back() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let size = || socket2::SockRef::from(&stream).send_buffer_size().unwrap();
        let before = size();
        system::apply(stream.as_fd(), Some(75_000)).unwrap();
        assert_eq!(size(), 75_000);
        bind(stream.as_fd(), 1e12).unwrap();
        assert!(size() >= 75_000 && before > 0);
    }
}

//! What the kernel tells of a TCP connection, as far as it is needed.

use std::io;
use std::os::fd::BorrowedFd;

/// Of `struct tcp_info`, in 32-bit words, with the 8 bytes of flags in front: segments that were sent again.
const SENT_AGAIN: usize = 25;
/// The shortest round trip of the last minutes, in microseconds.
const SHORTEST_US: usize = 37;
const WORDS: usize = 38;

/// The shortest round trip of the last minutes, in seconds.
///
/// # Errors
/// What the system said; `Unsupported` where it tells nothing.
pub(crate) fn shortest_round_trip_s(socket: BorrowedFd<'_>) -> io::Result<f64> {
    Ok(f64::from(system::words(socket)?[SHORTEST_US]) * 1e-6)
}

/// How many segments were sent again so far, because they were lost or seemed to be.
///
/// # Errors
/// What the system said; `Unsupported` where it tells nothing.
pub(crate) fn retransmitted_segments(socket: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::from(system::words(socket)?[SENT_AGAIN]))
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;
    use std::os::fd::BorrowedFd;

    pub(super) fn words(_: BorrowedFd<'_>) -> io::Result<[u32; super::WORDS]> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::WORDS;
    use std::io;
    use std::mem::size_of;
    use std::os::fd::{AsRawFd, BorrowedFd};

    /// An older kernel leaves out the last ones, which are 0 then.
    pub(super) fn words(socket: BorrowedFd<'_>) -> io::Result<[u32; WORDS]> {
        let mut words = [0u32; WORDS];
        let mut len = size_of::<[u32; WORDS]>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to memory that we own.
        let status = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                words.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if status == 0 { Ok(words) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;
    use std::mem::offset_of;
    use std::os::fd::AsFd;

    #[test]
    fn words_are_where_the_system_s_headers_have_them() {
        assert_eq!(4 * SENT_AGAIN, offset_of!(libc::tcp_info, tcpi_total_retrans));
    }

    #[test]
    fn a_connection_of_this_machine_has_a_round_trip_and_sends_nothing_again() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(retransmitted_segments(stream.as_fd()).unwrap(), 0);
        let round_trip_s = shortest_round_trip_s(stream.as_fd()).unwrap();
        assert!((0.0..1.0).contains(&round_trip_s), "{round_trip_s}");
    }

    #[test]
    fn what_is_no_tcp_says_so() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(retransmitted_segments(one.as_fd()).is_err());
    }
}

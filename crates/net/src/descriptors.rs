//! Which descriptors of this process lead to other ranks, so that a forked child can let go of them.
//!
//! A `DataLoader` worker is a fork of a training process and inherits its connections and its listener. When the parent
//! then dies, the kernel keeps them open for as long as the child lives: no peer would see an end of stream, and the
//! loss would be noticed only by a missing heartbeat. So every descriptor is noted here while it is open, and the
//! child closes them all, which leaves the parent's untouched.
//!
//! The child of a process with threads may only do what is safe in a signal handler: no locks, no allocation. Hence a
//! fixed table of atomics. Threads of the parent do not exist in the child; structures that own the closed descriptors
//! must be leaked there and never dropped, because their numbers may be reused.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Descriptors that can be noted at once. Beyond it they work as ever, and a forked child keeps them open.
pub const DESCRIPTORS_MAX: usize = 4096;

const EMPTY: RawFd = -1;

static TABLE: [AtomicI32; DESCRIPTORS_MAX] = [const { AtomicI32::new(EMPTY) }; DESCRIPTORS_MAX];

/// Where the search for an empty place starts: behind the last one taken, so that it is usually found at once.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Keeps a descriptor noted. Drop it *before* the descriptor is closed (declare it before the socket in a struct), or a
/// fork in between would close whatever has been given the number since.
#[derive(Debug)]
#[must_use = "the descriptor is forgotten when this is dropped"]
pub struct Registration {
    place: Option<(usize, RawFd)>,
}

/// Notes an open descriptor.
pub fn register(descriptor: &impl AsRawFd) -> Registration {
    let fd = descriptor.as_raw_fd();
    let start = NEXT.load(Ordering::Relaxed);
    for place in (0..DESCRIPTORS_MAX).map(|i| (start + i) % DESCRIPTORS_MAX) {
        if TABLE[place].compare_exchange(EMPTY, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            NEXT.store(place + 1, Ordering::Relaxed);
            return Registration { place: Some((place, fd)) };
        }
    }
    Registration { place: None }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some((place, fd)) = self.place {
            // Fails in a forked child that has closed everything: then there is nothing to forget.
            let _ = TABLE[place].compare_exchange(fd, EMPTY, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// Closes every noted descriptor. Only for a child right after `fork`, where nothing else uses them; it takes no lock
/// and allocates nothing. Returns how many were closed.
pub fn close_all_in_forked_child() -> usize {
    let mut closed_count = 0;
    for place in &TABLE {
        let fd = place.swap(EMPTY, Ordering::AcqRel);
        if fd != EMPTY {
            // SAFETY: `fd` is a descriptor that this process inherited open; its owner lived in a thread of the parent
            // or is leaked by the engine, so nobody here uses or closes it again.
            unsafe { libc::close(fd) };
            closed_count += 1;
        }
    }
    closed_count
}

/// How many files this process may have open at a time (`ulimit -n`), or `None` if that cannot be told.
pub(crate) fn limit() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for writing.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    known.then(|| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

/// Whether an error says that this process, or the system, has no descriptors left.
pub(crate) fn are_exhausted(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// Runs `child` in a fork and returns its exit status. `child` must not allocate, lock or panic.
    fn in_fork(child: impl FnOnce() -> i32) -> i32 {
        // SAFETY: the child only makes async-signal-safe calls and leaves with `_exit`.
        match unsafe { libc::fork() } {
            // SAFETY: `_exit` runs no destructors of this process's structures.
            0 => unsafe { libc::_exit(child()) },
            pid => {
                let mut status = 0;
                // SAFETY: `status` is valid for writing, `pid` is our child.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert!(libc::WIFEXITED(status), "the child crashed: {status}");
                libc::WEXITSTATUS(status)
            }
        }
    }

    fn noted(fd: RawFd) -> bool {
        TABLE.iter().any(|place| place.load(Ordering::Relaxed) == fd)
    }

    /// Other tests may register descriptors of their own meanwhile, so this one looks only at its own.
    #[test]
    fn a_child_closes_what_is_noted_and_the_parent_keeps_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let forgotten = TcpListener::bind("127.0.0.1:0").unwrap();
        let (near_noted, far_noted) = (register(&near), register(&far));
        drop(register(&forgotten));
        assert!(noted(near.as_raw_fd()) && !noted(forgotten.as_raw_fd()));

        let fds = [near.as_raw_fd(), far.as_raw_fd(), forgotten.as_raw_fd()];
        let status = in_fork(|| {
            close_all_in_forked_child();
            // SAFETY: `fcntl` with F_GETFD only asks whether the descriptor is open.
            let open = fds.map(|fd| i32::from(unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0));
            open[0] + 2 * open[1] + 4 * open[2]
        });
        assert_eq!(status, 4, "only the descriptor that was forgotten stays open in the child");

        drop((far_noted, far));
        near.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(
            near.read(&mut [0; 1]).unwrap(),
            0,
            "the parent's end still works and sees the end of stream"
        );
        drop(near_noted);
        assert!(!noted(near.as_raw_fd()));
    }
}

//! Memory that two processes map: two pipes, one for each direction.
//!
//! Whoever dials makes it and hands over its descriptor. Nobody else can name it: it has no place in a file system. Its
//! size is sealed, for memory that is cut short under a process that maps it would end that process by a signal; who is
//! handed memory that could be cut short, or is of another size, refuses it.

use super::pipe::{Control, PIPE_BYTES, Pipe, Reader, Writer};
use std::io::{self, ErrorKind};
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Of a pipe's counts: a page of their own.
const CONTROL_BYTES: usize = 4096;
/// What is handed over: both pipes' counts, and both pipes' bytes.
pub const MAPPING_BYTES: usize = 2 * (CONTROL_BYTES + PIPE_BYTES);
const _: () = assert!(size_of::<Control>() <= CONTROL_BYTES);

/// Mapped as long as a pipe of it is in use.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
}

// SAFETY: plain memory at an address that does not change; `pipe.rs` says how it is read and written.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: a whole mapping of this size, and its last user is gone. It can only fail if it were none.
        unsafe { libc::munmap(self.start.as_ptr().cast(), MAPPING_BYTES) };
    }
}

/// The memory as it is handed over, and this process's ends of its pipes.
pub(crate) fn create() -> io::Result<(OwnedFd, Reader, Writer)> {
    let memory = system::sealed(MAPPING_BYTES)?;
    let mapping = map(&memory)?;
    Ok((memory, Reader::new(pipe(&mapping, 0)), Writer::new(pipe(&mapping, 1))))
}

/// The other ends, in the process that it was handed to.
pub(crate) fn open(memory: &OwnedFd) -> io::Result<(Reader, Writer)> {
    system::check(memory, MAPPING_BYTES)?;
    let mapping = map(memory)?;
    Ok((Reader::new(pipe(&mapping, 1)), Writer::new(pipe(&mapping, 0))))
}

fn map(memory: &impl AsFd) -> io::Result<Arc<Mapping>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let fd = memory.as_fd().as_raw_fd();
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let start = unsafe { libc::mmap(ptr::null_mut(), MAPPING_BYTES, access, libc::MAP_SHARED, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = NonNull::new(start.cast()).ok_or(ErrorKind::OutOfMemory)?;
    system::keep_from_children(start, MAPPING_BYTES);
    Ok(Arc::new(Mapping { start }))
}

fn pipe(mapping: &Arc<Mapping>, number: usize) -> Pipe {
    // SAFETY: both lie within the mapping: `number` is 0 or 1, and MAPPING_BYTES is the sum of what is skipped and used.
    let (control, bytes) = unsafe {
        let data = mapping.start.add(2 * CONTROL_BYTES + number * PIPE_BYTES);
        (mapping.start.add(number * CONTROL_BYTES), data)
    };
    // Pages are aligned for it.
    Pipe::new(Arc::clone(mapping), control.cast(), bytes)
}

#[cfg(target_os = "linux")]
mod system {
    use super::*;

    const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    /// Linux 6.3 and later: not to be run as a program, which some systems insist on.
    const NOEXEC_SEAL: libc::c_uint = 8;

    fn done(result: libc::c_int) -> io::Result<libc::c_int> {
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
    }

    /// Memory of so many zeros.
    pub(super) fn sealed(bytes: usize) -> io::Result<OwnedFd> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a string that ends.
        let create = |flags| done(unsafe { libc::memfd_create(c"penstock".as_ptr(), flags) });
        let fd = create(flags | NOEXEC_SEAL).or_else(|_| create(flags))?;
        // SAFETY: just made, and nobody else's.
        let memory = unsafe { OwnedFd::from_raw_fd(fd) };
        let len = libc::off_t::try_from(bytes).map_err(|_| ErrorKind::InvalidInput)?;
        // With its pages, so that a lack of memory is an error here and no signal later.
        // SAFETY: only numbers.
        done(unsafe { libc::fallocate(fd, 0, 0, len) })?;
        // SAFETY: only numbers.
        done(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, SEALS) })?;
        Ok(memory)
    }

    /// Whether it is memory of this size, and will be.
    pub(super) fn check(memory: &OwnedFd, bytes: usize) -> io::Result<()> {
        // SAFETY: only numbers. What is no such memory has no seals, which is an error.
        let seals = done(unsafe { libc::fcntl(memory.as_raw_fd(), libc::F_GET_SEALS) })?;
        // SAFETY: `libc::stat` is numbers, and any are valid.
        let mut status: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `status` is valid for writing.
        done(unsafe { libc::fstat(memory.as_raw_fd(), &raw mut status) })?;
        if seals & SEALS != SEALS || usize::try_from(status.st_size) != Ok(bytes) {
            return Err(ErrorKind::InvalidData.into());
        }
        Ok(())
    }

    /// A forked child has nothing to do with it.
    pub(super) fn keep_from_children(start: NonNull<u8>, bytes: usize) {
        // SAFETY: a mapping of this process. Without it a child keeps pages that it does not touch.
        unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::*;

    pub(super) fn sealed(_: usize) -> io::Result<OwnedFd> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn check(_: &OwnedFd, _: usize) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    pub(super) fn keep_from_children(_: NonNull<u8>, _: usize) {}
}

//! A pipe in memory that two processes map: one writes bytes, the other reads them. Their place goes round in a circle.
//!
//! Each counts what it has written or read, keeps the count to itself, and shows it to the other in shared memory; a count's
//! place in the pipe is its remainder. What the other shows is never trusted: more bytes than the pipe holds are an error,
//! and anything less only says which bytes of the pipe are taken for written. Bytes are copied out before anybody looks at
//! them, for the other process can change them at any time.
//!
//! **Sleep.** Who finds nothing to read, or little room to write, says so in shared memory, and looks once more before it
//! goes to sleep; the other, once it has shown its count, looks whether somebody sleeps, and if so rings the bell, which
//! is not of memory ([`super::Transport`]). Between showing and looking lies a fence on both sides, so one of the two sees the
//! other. A writer is woken only when half of the pipe is free, and goes to sleep only when less is: each time costs
//! both processes a system call.

use super::mapping::Mapping;
use penstock_core::limits::PIPE_BYTES_MAX;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// What a pipe holds. Everything in it has been decided, so it is small; and it shall stay in a core's cache.
pub(super) const PIPE_BYTES: usize = 512 << 10;
const _: () = assert!(PIPE_BYTES.is_power_of_two() && PIPE_BYTES <= PIPE_BYTES_MAX);
/// Room that is worth waking a writer for.
const WORTH_BYTES: usize = PIPE_BYTES / 2;
/// What is shown to the other side at a time, so that it may begin before all is copied.
const SHOWN_BYTES: usize = 32 << 10;

/// Alone on its cache line, and on the one that is fetched with it.
#[derive(Debug)]
#[repr(C, align(128))]
struct Apart<T>(T);

/// What the two show each other. All zeros is an empty pipe with nobody asleep.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Control {
    /// Bytes written so far.
    written: Apart<AtomicU64>,
    /// Bytes read so far.
    read: Apart<AtomicU64>,
    /// Not 0: the reader waits for bytes.
    reader_sleeps: Apart<AtomicU32>,
    /// Not 0: the writer waits for room.
    writer_sleeps: Apart<AtomicU32>,
}

/// Where a pipe is.
#[derive(Debug)]
pub(super) struct Pipe {
    control: NonNull<Control>,
    bytes: NonNull<u8>,
    /// Keeps both there.
    _mapping: Arc<Mapping>,
}

// SAFETY: as the mapping, which it keeps.
unsafe impl Send for Pipe {}

impl Pipe {
    /// `control` and PIPE_BYTES at `bytes` lie in the mapping.
    pub(super) fn new(mapping: Arc<Mapping>, control: NonNull<Control>, bytes: NonNull<u8>) -> Self {
        Self { control, bytes, _mapping: mapping }
    }

    fn control(&self) -> &Control {
        // SAFETY: in the mapping, aligned to a page, and nothing but atomics, which another process may change.
        unsafe { self.control.as_ref() }
    }

    /// Bytes that are in the pipe, by one side's own count and what the other shows.
    fn held(written: u64, read: u64) -> io::Result<usize> {
        let held = usize::try_from(written.wrapping_sub(read)).unwrap_or(usize::MAX);
        if held > PIPE_BYTES {
            return Err(nonsense());
        }
        Ok(held)
    }

    /// Where the byte of this count is, and how many follow it before the circle begins anew.
    fn place(&self, count: u64) -> (NonNull<u8>, usize) {
        let at = (count % PIPE_BYTES as u64) as usize;
        // SAFETY: less than PIPE_BYTES.
        (unsafe { self.bytes.add(at) }, PIPE_BYTES - at)
    }
}

/// The end that writes.
#[derive(Debug)]
pub(crate) struct Writer {
    pipe: Pipe,
    /// Own counts: what is copied into the pipe, and what of it is shown.
    written: u64,
    shown: u64,
    /// What the reader showed last.
    read: u64,
}

impl Writer {
    pub(super) fn new(pipe: Pipe) -> Self {
        Self { pipe, written: 0, shown: 0, read: 0 }
    }

    /// Writes as much of `slices` as there is room for: less only if the reader will ring once there is more. `wake` rings for
    /// the reader.
    ///
    /// # Errors
    /// `InvalidData`: what the reader shows cannot be. Those of `wake`.
    pub(crate) fn write(
        &mut self,
        slices: &[IoSlice<'_>],
        mut wake: impl FnMut() -> io::Result<()>,
    ) -> io::Result<usize> {
        let mut total = 0;
        for slice in slices {
            let mut rest = &slice[..];
            while !rest.is_empty() {
                let mut room = PIPE_BYTES - Pipe::held(self.written, self.read)?;
                if room < rest.len().min(WORTH_BYTES) {
                    room = self.look()?;
                }
                if room == 0 {
                    self.wake_reader(&mut wake)?;
                    if self.sleeps()? {
                        return Ok(total);
                    }
                    continue;
                }
                let unshown = (self.written - self.shown) as usize;
                let (now, later) = rest.split_at(rest.len().min(room).min(SHOWN_BYTES - unshown));
                self.copy(now);
                total += now.len();
                rest = later;
                if (self.written - self.shown) as usize >= SHOWN_BYTES {
                    self.show();
                }
            }
        }
        self.wake_reader(&mut wake)?;
        Ok(total)
    }

    /// The room that there is now.
    fn look(&mut self) -> io::Result<usize> {
        // Acquire: the reader is done with what is overwritten.
        self.read = self.pipe.control().read.0.load(Ordering::Acquire);
        Ok(PIPE_BYTES - Pipe::held(self.written, self.read)?)
    }

    fn copy(&mut self, bytes: &[u8]) {
        let (place, before_end) = self.pipe.place(self.written);
        let first = bytes.len().min(before_end);
        // SAFETY: `bytes` is no longer than the room, so at most PIPE_BYTES: its first part ends within the pipe, and the
        // rest begins at its start. `bytes` is this process's own memory, which the mapping does not overlap. That the other
        // process may read or write there at the same time concerns no reference of this one.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), place.as_ptr(), first);
            ptr::copy_nonoverlapping(bytes[first..].as_ptr(), self.pipe.bytes.as_ptr(), bytes.len() - first);
        }
        self.written += bytes.len() as u64;
    }

    fn show(&mut self) {
        self.shown = self.written;
        // Release: who sees the count sees the bytes.
        self.pipe.control().written.0.store(self.written, Ordering::Release);
    }

    /// Once all is written that there was room for: a reader that does not sleep reads meanwhile, and one that does is woken
    /// for more than a piece.
    fn wake_reader(&mut self, wake: &mut impl FnMut() -> io::Result<()>) -> io::Result<()> {
        self.show();
        fence(Ordering::SeqCst);
        if takes(&self.pipe.control().reader_sleeps.0) { wake() } else { Ok(()) }
    }

    /// Whether the writer may sleep now.
    fn sleeps(&mut self) -> io::Result<bool> {
        self.pipe.control().writer_sleeps.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.look()? < WORTH_BYTES {
            return Ok(true);
        }
        self.pipe.control().writer_sleeps.0.store(0, Ordering::Relaxed);
        Ok(false)
    }
}

/// The end that reads.
#[derive(Debug)]
pub(crate) struct Reader {
    pipe: Pipe,
    /// Own counts: what is copied out of the pipe, and what of it is shown.
    read: u64,
    shown: u64,
    /// What the writer showed last.
    written: u64,
}

impl Reader {
    pub(super) fn new(pipe: Pipe) -> Self {
        Self { pipe, read: 0, shown: 0, written: 0 }
    }

    /// Reads as much into `places` as there is: less only if the writer will ring once there is more. `wake` rings for the writer.
    ///
    /// # Errors
    /// `InvalidData`: what the writer shows cannot be.
    pub(crate) fn read(
        &mut self,
        places: &mut [IoSliceMut<'_>],
        mut wake: impl FnMut(),
    ) -> io::Result<usize> {
        let mut total = 0;
        for place in places {
            let mut rest = &mut place[..];
            while !rest.is_empty() {
                let mut held = Pipe::held(self.written, self.read)?;
                if held == 0 {
                    held = self.look()?;
                }
                if held == 0 {
                    self.show(&mut wake);
                    if self.sleeps()? {
                        return Ok(total);
                    }
                    continue;
                }
                let (now, later) = rest.split_at_mut(rest.len().min(held).min(SHOWN_BYTES));
                self.copy(now);
                total += now.len();
                rest = later;
                if self.read - self.shown >= SHOWN_BYTES as u64 {
                    self.show(&mut wake);
                }
            }
        }
        self.show(&mut wake);
        Ok(total)
    }

    /// The bytes that there are now.
    fn look(&mut self) -> io::Result<usize> {
        // Acquire: with the count come the bytes.
        self.written = self.pipe.control().written.0.load(Ordering::Acquire);
        Pipe::held(self.written, self.read)
    }

    fn copy(&mut self, room: &mut [u8]) {
        let (place, before_end) = self.pipe.place(self.read);
        let first = room.len().min(before_end);
        let (head, tail) = room.split_at_mut(first);
        // SAFETY: `room` is no longer than what the pipe holds: as in `Writer::copy`.
        unsafe {
            ptr::copy_nonoverlapping(place.as_ptr(), head.as_mut_ptr(), head.len());
            ptr::copy_nonoverlapping(self.pipe.bytes.as_ptr(), tail.as_mut_ptr(), tail.len());
        }
        self.read += room.len() as u64;
    }

    fn show(&mut self, wake: &mut impl FnMut()) {
        if self.shown == self.read {
            return;
        }
        self.shown = self.read;
        let control = self.pipe.control();
        // Release: what is overwritten from here on has been read.
        control.read.0.store(self.read, Ordering::Release);
        fence(Ordering::SeqCst);
        // By the last count that was seen of the writer, which has not written since if it sleeps.
        let written = control.written.0.load(Ordering::Relaxed);
        let is_worth = Pipe::held(written, self.read).is_ok_and(|held| PIPE_BYTES - held >= WORTH_BYTES);
        if is_worth && takes(&control.writer_sleeps.0) {
            wake();
        }
    }

    /// Whether the reader may sleep now.
    fn sleeps(&mut self) -> io::Result<bool> {
        self.pipe.control().reader_sleeps.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.look()? == 0 {
            return Ok(true);
        }
        self.pipe.control().reader_sleeps.0.store(0, Ordering::Relaxed);
        Ok(false)
    }
}

/// The other side's counts cannot be.
pub(super) fn nonsense() -> io::Error {
    let text = "what it shows of how much it has written and read in shared memory cannot be";
    io::Error::new(ErrorKind::InvalidData, text)
}

/// Whether the other side sleeps; who takes that rings.
fn takes(sleeps: &AtomicU32) -> bool {
    sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::AcqRel) != 0
}

//! Gathers: this rank's bytes to all others, and theirs.

use super::{Engine, wait};
use crate::failure::Failure;
use crate::mailbox::Command;
use crate::memory::{Chunk, Owner};
use crate::shared::{Gathered, OpenBook};
use penstock_core::way::Route;
use penstock_core::{BookId, Rank, Step, TensorId};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

/// This rank's contribution to a gather.
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    /// The book.
    pub book: BookId,
    /// The tensor, whose scheme is the gather.
    pub tensor: TensorId,
    /// Where the contribution starts.
    pub address: usize,
    /// Its length, at most the tensor's; 0 for nothing.
    pub len_bytes: usize,
    /// The user's iteration.
    pub step: Step,
    /// As in [`super::Part`].
    pub more: bool,
    /// The only rank that gets it, if it is not for all. To the others it is an empty contribution.
    pub only_to: Option<Rank>,
}

impl Engine {
    /// Takes part in the next gather of a tensor. Returns a token, as [`Engine::submit`] does. What came of the last one is
    /// dropped.
    ///
    /// # Errors
    /// `Config` if the tensor is not gathered, shorter than the contribution, or its last gather is not complete; the job's
    /// failure.
    ///
    /// # Safety
    /// The memory must stay allocated and unchanged until the token is released.
    pub unsafe fn submit_gather(&self, bytes: Bytes) -> Result<u64, Failure> {
        let Bytes { book, tensor, address, len_bytes, step, more, only_to } = bytes;
        self.alive("submit_gather")?;
        let open = self.gathered_book(book, tensor)?;
        let (entry, state) = (&open.book.tensors[tensor as usize], &open.tensors[tensor as usize]);
        if len_bytes as u64 > entry.elems || (len_bytes > 0 && address == 0) {
            let (book, name, most) = (&open.book.name, &entry.name, entry.elems);
            return Err(Failure::config(format!(
                "{book}: {name} has at most {most} bytes, but {len_bytes} were submitted"
            )));
        }
        if let Some(Rank(rank)) = only_to.filter(|rank| rank.0 >= self.inner.config.size) {
            let (book, name, size) = (&open.book.name, &entry.name, self.inner.config.size);
            return Err(Failure::config(format!("{book}: {name} for rank {rank}, but there are {size}")));
        }
        let shared = &self.inner.shared;
        shared.check().map_err(|failure| wait::blame(failure, "submitting", &open, tensor, step))?;
        let alone = self.inner.config.size == 1;
        let lane = open.book.slices[entry.first_slice as usize].lane as usize;
        let mailbox = shared.mailboxes().get(lane);
        if !alone && mailbox.is_none() {
            return Err(Failure::config("submit_gather() was called before connect()"));
        }
        let slices = u32::from(!alone);
        if state.remaining.load(Ordering::Acquire) != 0 {
            let (book, name) = (&open.book.name, &entry.name);
            return Err(Failure::config(format!(
                "{book}: {name} was submitted again before its result was in"
            )));
        }
        *lock(&open, tensor) = Gathered { own_bytes: len_bytes as u64, parts: Vec::new() };
        open.submitted(tensor);
        state.remaining.store(slices, Ordering::Release);
        let seq = state.seq.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        state.step.store(step, Ordering::Relaxed);
        state.present.store(true, Ordering::Relaxed);
        let token = self.inner.next_token.fetch_add(1, Ordering::Relaxed);
        state.unreleased.fetch_add(1, Ordering::AcqRel);
        let Some(mailbox) = mailbox.filter(|_| !alone) else {
            open.released(tensor, token);
            return Ok(token);
        };
        shared.progressed();
        shared.lock().accounting.submitted(Instant::now());
        let start = NonNull::new(address as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: the caller vouches for the memory.
        let memory = unsafe { Chunk::handed(start, len_bytes, Arc::clone(&open) as _, tensor, token) };
        let len_bytes_32 = len_bytes as u32; // The book's bounds keep tensors below.
        let command = Command::Gather { book, tensor, seq, step, memory, len_bytes: len_bytes_32, only_to };
        if more {
            mailbox.send_held(command, len_bytes);
        } else {
            mailbox.send(command);
        }
        Ok(token)
    }

    /// By rank the length of what it contributed to the last gather of a tensor, which must be complete; `None` for those that
    /// took no part (they had left).
    ///
    /// # Errors
    /// `Config` if there is no such tensor, it is not complete, or it was dropped.
    pub fn gathered(&self, book: BookId, tensor: TensorId) -> Result<Vec<Option<u64>>, Failure> {
        self.alive("gathered")?;
        let open = self.gathered_book(book, tensor)?;
        self.complete(&open, tensor)?;
        let gathered = lock(&open, tensor);
        let me = self.inner.config.rank as usize;
        let length = |rank: usize| match gathered.parts.get(rank) {
            _ if rank == me => Some(gathered.own_bytes),
            Some(Some(chunks)) => Some(chunks.iter().map(|chunk| chunk.len() as u64).sum()),
            _ => None,
        };
        Ok((0..self.inner.config.size as usize).map(length).collect())
    }

    /// Copies a range of what another rank contributed to the last gather of a tensor.
    ///
    /// # Errors
    /// `Config` if it is not complete, was dropped, or is shorter.
    pub fn read_gathered(
        &self,
        book: BookId,
        tensor: TensorId,
        rank: Rank,
        offset_bytes: usize,
        mut target: &mut [u8],
    ) -> Result<(), Failure> {
        self.alive("read_gathered")?;
        let open = self.gathered_book(book, tensor)?;
        self.complete(&open, tensor)?;
        let gathered = lock(&open, tensor);
        let wanted = target.len();
        let mut skip = offset_bytes;
        for chunk in gathered.parts.get(rank.index()).iter().flat_map(|part| part.iter().flatten()) {
            let from = skip.min(chunk.len());
            let count = chunk.copy_to(from, target);
            target = &mut target[count..];
            skip -= from;
        }
        if target.is_empty() {
            return Ok(());
        }
        let (book, name) = (&open.book.name, &open.book.tensors[tensor as usize].name);
        Err(Failure::config(format!(
            "{book}: rank {rank} has sent fewer bytes for {name} than {offset_bytes} + {wanted}"
        )))
    }

    /// Lets go of what came of the last gather of a tensor.
    ///
    /// # Errors
    /// `Config` if there is no such tensor or it is not complete.
    pub fn drop_gathered(&self, book: BookId, tensor: TensorId) -> Result<(), Failure> {
        self.alive("drop_gathered")?;
        let open = self.gathered_book(book, tensor)?;
        self.complete(&open, tensor)?;
        lock(&open, tensor).parts = Vec::new();
        Ok(())
    }

    fn gathered_book(&self, book: BookId, tensor: TensorId) -> Result<Arc<OpenBook>, Failure> {
        let open = self.book(book)?;
        let entry = self.tensor(&open, tensor)?;
        if entry.route == Route::Gather {
            return Ok(open);
        }
        let (book, name) = (&open.book.name, &entry.name);
        Err(Failure::config(format!("{book}: {name} is summed, not gathered; use submit()")))
    }

    fn complete(&self, open: &OpenBook, tensor: TensorId) -> Result<(), Failure> {
        if open.tensors[tensor as usize].remaining.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let (book, name) = (&open.book.name, &open.book.tensors[tensor as usize].name);
        Err(Failure::config(format!("{book}: the contributions to {name} are not in yet; wait() for it")))
    }
}

fn lock(open: &OpenBook, tensor: TensorId) -> MutexGuard<'_, Gathered> {
    open.tensors[tensor as usize].gathered.lock().unwrap_or_else(PoisonError::into_inner)
}

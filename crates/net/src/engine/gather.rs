//! Gathers: this rank's bytes to all others, and theirs.

use super::{Engine, Lent};
use crate::failure::Failure;
use crate::shared::{Gathered, OpenBook};
use parking_lot::MutexGuard;
use penstock_core::layout::Tensor;
use penstock_core::{BookId, Gives, Rank, Route, Submission, TensorId};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What came of the tensor's last gather is dropped, and this rank gives so many bytes to the next.
pub(super) fn begin(open: &OpenBook, tensor: TensorId, own_bytes: usize) {
    *lock(open, tensor) = Gathered { own_bytes: own_bytes as u64, parts: Vec::new() };
}

/// Whether a contribution to a gather fits the tensor; if not, in what.
pub(super) fn check_bytes(tensor: &Tensor, submission: &Submission<Lent>) -> Result<(), String> {
    let Submission { memory: Lent { address, len_bytes }, gives, .. } = *submission;
    let name = &tensor.name;
    let Gives::Gathered(given_bytes) = gives else { return Ok(()) };
    if tensor.route != Route::Gather {
        return Err(not_gathered(name));
    }
    let differ = given_bytes as usize != len_bytes || (len_bytes > 0 && address == 0);
    if len_bytes as u64 > tensor.elems || differ {
        let most = tensor.elems;
        return Err(format!("{name} has at most {most} bytes, but {len_bytes} were submitted"));
    }
    Ok(())
}

impl Engine {
    /// By member the length of what it contributed to the last gather of a tensor, which must be complete; `None` for those that
    /// took no part (they had left).
    ///
    /// # Errors
    /// `Config` if there is no such tensor, it is not complete, or it was dropped.
    pub fn gathered(&self, book: BookId, tensor: TensorId) -> Result<Vec<Option<u64>>, Failure> {
        self.alive("gathered")?;
        let open = self.gathered_book(book, tensor)?;
        self.complete(&open, tensor)?;
        let gathered = lock(&open, tensor);
        let (members, me) = (open.book.roles.contributors(), Rank(self.inner.config.rank));
        let length = |(place, rank): (usize, Rank)| match gathered.parts.get(place) {
            _ if rank == me => Some(gathered.own_bytes),
            Some(Some(chunks)) => Some(chunks.iter().map(|chunk| chunk.len() as u64).sum()),
            _ => None,
        };
        Ok(members.iter().enumerate().map(length).collect())
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
        let part = open
            .book
            .roles
            .contributors()
            .index_of(rank)
            .and_then(|index| gathered.parts.get(index)?.as_ref());
        for chunk in part.into_iter().flatten() {
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
        Err(Failure::config(format!("{}: {}", open.book.name, not_gathered(&entry.name))))
    }

    fn complete(&self, open: &OpenBook, tensor: TensorId) -> Result<(), Failure> {
        if open.tensors[tensor as usize].remaining.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let (book, name) = (&open.book.name, &open.book.tensors[tensor as usize].name);
        Err(Failure::config(format!("{book}: the contributions to {name} are not in yet; wait() for it")))
    }
}

fn not_gathered(name: &str) -> String {
    format!("{name} is summed, not gathered; use submit()")
}

fn lock(open: &OpenBook, tensor: TensorId) -> MutexGuard<'_, Gathered> {
    open.tensors[tensor as usize].gathered.lock()
}

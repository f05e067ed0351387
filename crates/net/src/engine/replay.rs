//! What a replay asks of the engine: to cut tensors as they were cut, to stay out of rounds that this rank was lost before, and how far
//! rounds have come.
//!
//! All else is a job as any other: who is lost in it is killed, and the others go on. Omits who is to be lost when, which is Python's
//! (`python/penstock/replaying.py`).

use super::{Engine, Inner};
use crate::failure::Failure;
use crate::mailbox::{Command, Recovering};
use crate::memory::Chunk;
use crate::shared::OpenBook;
use penstock_core::limits::SLICES_MAX;
use penstock_core::membership::RoundsOver;
use penstock_core::{Book, BookId, Members, Seq, SliceId, Slicing, Submission, TensorId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// By book and slice, the last round that this rank is in. In all of a book that is not named.
pub(super) struct Withheld(BTreeMap<BookId, Vec<Seq>>);

impl Withheld {
    fn gives(&self, book: BookId, slice: SliceId, seq: Seq) -> bool {
        let last = self.0.get(&book).and_then(|slices| slices.get(slice as usize));
        last.is_none_or(|last| seq <= *last)
    }
}

/// One number for each slice.
fn of_slices(runs: &[(u32, Seq)]) -> Result<Vec<Seq>, Failure> {
    let count: u64 = runs.iter().map(|(slices, _)| u64::from(*slices)).sum();
    if count > SLICES_MAX {
        return Err(Failure::config(format!("{count} slices of a book: there are at most {SLICES_MAX}")));
    }
    Ok(runs.iter().flat_map(|(slices, seq)| std::iter::repeat_n(*seq, *slices as usize)).collect())
}

impl Engine {
    /// Tensors of books that are opened from now on are cut so, whatever the line's rate is.
    ///
    /// # Errors
    /// `Config` if they cannot be.
    pub fn cut_as(&self, slicing: Slicing) -> Result<(), Failure> {
        self.alive("cut_as")?;
        Book::cut("replay", Vec::new(), Vec::new(), &Members::all(self.inner.config.size), slicing)?;
        if slicing.lanes > self.inner.config.lanes {
            let (lanes, here) = (slicing.lanes, self.inner.config.lanes);
            return Err(Failure::config(format!("cut_as: for {lanes} lanes, and there are {here}")));
        }
        self.inner.agreed.lock().slicing = Some(slicing);
        Ok(())
    }

    /// Of each slice this rank is in so many rounds and no more: what it submits to later ones goes nowhere, and they do not end as long as
    /// it is a member. Once, before anything is submitted.
    ///
    /// # Errors
    /// `Config` if it was said before, or of more slices than there can be.
    pub fn withhold(&self, rounds: &RoundsOver) -> Result<(), Failure> {
        self.alive("withhold")?;
        let mut books = BTreeMap::new();
        for (book, runs) in rounds {
            books.insert(*book, of_slices(runs)?);
        }
        let first = self.inner.withheld.set(Withheld(books)).is_ok();
        first.then_some(()).ok_or_else(|| Failure::config("withhold: it was said before"))
    }

    /// Whether this rank has the results of so many rounds of each slice.
    ///
    /// # Errors
    /// `Config` if a book has another number of slices.
    pub fn has_come_to(&self, rounds: &RoundsOver) -> Result<bool, Failure> {
        self.alive("has_come_to")?;
        let books = self.inner.books.read();
        for (book, runs) in rounds {
            let Some(open) = books.get(usize::from(*book)) else { return Ok(false) };
            let last = of_slices(runs)?;
            if last.len() != open.book.slices.len() {
                let (there, here) = (last.len(), open.book.slices.len());
                return Err(Failure::config(format!(
                    "{}: it had {there} slices in the run that is replayed, and has {here} now: another program or model?",
                    open.book.name
                )));
            }
            let tensors = 0..open.tensors.len() as TensorId;
            let done = tensors.flat_map(|tensor| open.progress(tensor)).map(|slice| slice.done_seq());
            if done.zip(last).any(|(done, last)| done < last) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Inner {
    /// Whether this rank is in that round.
    pub(super) fn gives(&self, book: BookId, slice: SliceId, seq: Seq) -> bool {
        self.withheld.get().is_none_or(|withheld| withheld.gives(book, slice, seq))
    }

    /// What a lane is told of a submission.
    pub(super) fn submit_to(
        &self,
        lane: u32,
        open: &OpenBook,
        submission: &Submission<Chunk>,
        at_ns: u64,
    ) -> Command {
        if self.withheld.get().is_none() {
            return Command::Submit { submission: submission.clone(), at_ns };
        }
        let slices = open.open_slices(submission.tensor, lane);
        let slices: Arc<[SliceId]> =
            slices.filter(|slice| self.gives(open.id, *slice, submission.seq)).collect();
        let again = vec![(submission.clone(), slices)];
        Command::Recover(Box::new(Recovering { again, ..Recovering::default() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_in_rounds_up_to_the_last_one_of_each_slice() {
        let books = [(3, of_slices(&[(2, 7), (1, 6)]).unwrap())];
        let withheld = Withheld(books.into());
        let is_in = |slice, seq| withheld.gives(3, slice, seq);
        assert_eq!([(0, 7), (1, 7), (2, 6)].map(|(slice, seq)| is_in(slice, seq)), [true; 3]);
        assert_eq!([(0, 8), (1, 8), (2, 7)].map(|(slice, seq)| is_in(slice, seq)), [false; 3]);
        assert!(withheld.gives(4, 0, 100), "a book that is not named");
    }

    #[test]
    fn more_slices_than_there_can_be_are_refused() {
        assert!(of_slices(&[(u32::MAX, 1)]).is_err());
        assert_eq!(of_slices(&[]).unwrap(), [] as [Seq; 0]);
    }
}

//! The beginning of an epoch, as one lane sees it: which results of the last one are given to whom, and what is pushed anew.

use super::{Action, Node};
use crate::error::Error;
use crate::exchange::{Context, Exchange, SliceEntry, tell};
use crate::memory::Memory;
use crate::observe::Observe;
use crate::recovery::GivenToOthers;
use crate::submission::Submission;
use crate::types::{BookId, SliceId, Step};
use crate::wire::{Header, Kind};

impl<M: Memory, O: Observe> Node<M, O> {
    /// Gives a result of the last epoch to those that lack it: nothing if nobody contributed.
    ///
    /// # Errors
    /// As of every event of a slice; of its own it has none.
    pub fn give(
        &mut self,
        given: &GivenToOthers,
        step: Step,
        result: Option<&M::Chunk>,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let header = header_of(given, step);
        self.exchange(
            &header,
            |_, context| {
                given.to.iter().for_each(|to| tell(*to, &header, result, false, context));
                Ok(())
            },
            actions,
        )
    }

    /// This rank has taken part in a round of the last epoch by this submission, and lacks its result: it comes to the slice's place there.
    ///
    /// # Errors
    /// As of every event of a slice; of its own it has none.
    pub fn lacks(&mut self, given: &GivenToOthers, submission: &Submission<M::Chunk>) -> Result<(), Error> {
        let op = submission.header(given.slice).op;
        let header = Header { op, ..header_of(given, submission.step) };
        let Some(Some(state)) = self.books.get(usize::from(given.book)) else { return Ok(()) };
        let at = &state.book.slices[given.slice as usize];
        let chunk = self.memory.part(&submission.memory, at.offset_bytes as usize, at.len_bytes as usize);
        let lacks = |exchange: &mut Exchange<_>, _: &mut Context<'_, M>| {
            exchange.lacks(&header, chunk, given.by);
            Ok(())
        };
        self.exchange(&header, lacks, &mut Vec::new())
    }

    /// What this lane keeps of all slices, for the next epoch. The node is not used any more.
    pub fn take_entries(&mut self) -> Vec<(BookId, SliceId, SliceEntry<M::Chunk>)> {
        let mut all = Vec::new();
        for (book, state) in (0..).zip(&mut self.books) {
            let Some(state) = state else { continue };
            for (slice, exchange) in (0..).zip(&mut state.slices) {
                all.extend(exchange.take_entry().map(|entry| (book, slice, entry)));
            }
        }
        all
    }

    /// Whether this lane has all that an owner keeps of a slice, as of the last round whose result it has.
    pub fn has_states(&self, book: BookId, slice: SliceId) -> bool {
        let state = self.books.get(usize::from(book)).and_then(Option::as_ref);
        state.is_some_and(|state| state.slices[slice as usize].has_states())
    }

    /// What was kept of a slice in the last epoch.
    pub fn put_entry(&mut self, book: BookId, slice: SliceId, entry: SliceEntry<M::Chunk>) {
        if let Some(Some(state)) = self.books.get_mut(usize::from(book)) {
            state.slices[slice as usize].put_entry(entry);
        }
    }

    /// Gives what an owner keeps of a slice, as of the last epoch's last round, to those that are to keep it from now on and lack it.
    ///
    /// # Errors
    /// [`Error::Config`] if this rank does not have it.
    pub fn give_states(
        &mut self,
        given: &GivenToOthers,
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        let header = header_of(given, 0);
        self.exchange(&header, |exchange, context| exchange.give_states(&header, &given.to, context), actions)
    }

    /// This rank is to keep what an owner keeps of a slice, and lacks it. After [`Node::lacks`].
    ///
    /// # Errors
    /// As of every event of a slice; of its own it has none.
    pub fn lacks_states(&mut self, given: &GivenToOthers) -> Result<(), Error> {
        let lacks = |exchange: &mut Exchange<_>, _: &mut Context<'_, M>| {
            exchange.lacks_states(given.by);
            Ok(())
        };
        self.exchange(&header_of(given, 0), lacks, &mut Vec::new())
    }

    /// Takes part again in a round of the last epoch, with those slices that had no result.
    ///
    /// # Errors
    /// As of a submission.
    pub fn submit_again(
        &mut self,
        submission: &Submission<M::Chunk>,
        slices: &[SliceId],
        actions: &mut Vec<Action<M::Chunk>>,
    ) -> Result<(), Error> {
        self.submit_those(submission, |slice| slices.contains(&slice), actions)
    }
}

fn header_of(given: &GivenToOthers, step: Step) -> Header {
    Header { book: given.book, slice: given.slice, seq: given.seq, step, ..Header::control(Kind::Answer) }
}

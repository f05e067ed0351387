//! The beginning of an epoch, as one lane sees it: which results of the last one are given to whom, and what is pushed anew.

use super::{Action, Node};
use crate::error::Error;
use crate::exchange::tell;
use crate::memory::Memory;
use crate::observe::Observe;
use crate::recovery::ResultGiven;
use crate::submission::Submission;
use crate::types::{SliceId, Step};
use crate::wire::{Header, Kind};

impl<M: Memory, O: Observe> Node<M, O> {
    /// Gives a result of the last epoch to those that lack it: nothing if nobody contributed.
    ///
    /// # Errors
    /// As of every event of a slice; of its own it has none.
    pub fn give(
        &mut self,
        given: &ResultGiven,
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
    pub fn lacks(&mut self, given: &ResultGiven, submission: &Submission<M::Chunk>) -> Result<(), Error> {
        let op = submission.header(given.slice).op;
        let header = Header { op, ..header_of(given, submission.step) };
        let Some(Some(state)) = self.books.get(usize::from(given.book)) else { return Ok(()) };
        let at = &state.book.slices[given.slice as usize];
        let chunk = self.memory.part(&submission.memory, at.offset_bytes as usize, at.len_bytes as usize);
        let lacks = |exchange: &mut crate::exchange::Exchange<_>, _: &mut crate::exchange::Context<'_, M>| {
            exchange.lacks(&header, chunk, given.by);
            Ok(())
        };
        self.exchange(&header, lacks, &mut Vec::new())
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

fn header_of(given: &ResultGiven, step: Step) -> Header {
    Header { book: given.book, slice: given.slice, seq: given.seq, step, ..Header::control(Kind::Answer) }
}

//! Books whose owners update what they keep: the word to go on, what is kept, and how large gradients are.

use super::{Engine, Lent, wait};
use crate::failure::{Failure, Stop};
use crate::mailbox::{Command, Word};
use crate::memory::{Chunk, Lender};
use crate::shared::{OpenBook, State};
use penstock_core::exchange::Field;
use penstock_core::layout::Tensor;
use penstock_core::optimizer::{Optimizer, Update};
use penstock_core::roles::Fold;
use penstock_core::{BookId, Error, Rank, Route, Step, TensorId};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

impl Engine {
    /// This rank's program has come to the end of a step: what it owns of a book is updated, and all get it. Where this rank
    /// contributes, it must have submitted all tensors of the book for that step, or this is said in advance: before it submits the
    /// first, when all of the step before is through. Said once for each.
    ///
    /// * `optimizers`, `groups`: by parameter group the optimizer with its options of this step, and by tensor its group.
    /// * `factor`: what gradients are multiplied by before.
    ///
    /// # Errors
    /// `Config` if it does not fit the book or the step; the job's failure.
    pub fn proceed(
        &self,
        book: BookId,
        step: Step,
        (optimizers, groups): (&[Optimizer], &[u32]),
        factor: f64,
        in_advance: bool,
    ) -> Result<(), Failure> {
        self.alive("proceed")?;
        let open = self.updated_book(book)?;
        let updates = updates_of(&open, (optimizers, groups), factor)?;
        if !in_advance {
            self.all_are_submitted(&open, step)?;
        }
        self.say(&open, step, Some(updates))
    }

    /// From now on what this rank owns of a book is updated so whenever a round is complete, and no word is needed. It is told at
    /// the same point of their programs by all who contribute and own something, once what they submitted before is complete.
    ///
    /// # Errors
    /// As of [`Engine::proceed`].
    pub fn order(
        &self,
        book: BookId,
        optimizers: (&[Optimizer], &[u32]),
        factor: f64,
    ) -> Result<(), Failure> {
        self.alive("order")?;
        let open = self.updated_book(book)?;
        self.inner.shared.check()?;
        let updates = Some(updates_of(&open, optimizers, factor)?);
        let word = Arc::new(Word { book: open.id, step: 0, updates });
        // Whoever hears that this rank is through may push at once.
        let answers = self.ask(|reply| Command::Order { word: Arc::clone(&word), reply });
        self.all_answered(answers.len())
    }

    /// Where each contribution is a round of its own: by slice of a tensor how often the value was changed that came with the last
    /// answer, or that the last contribution made.
    ///
    /// # Errors
    /// `Config` if there is no such tensor.
    pub fn versions(&self, book: BookId, tensor: TensorId) -> Result<Vec<u32>, Failure> {
        self.alive("versions")?;
        let open = self.book(book)?;
        self.tensor(&open, tensor)?;
        Ok(open.versions(tensor))
    }

    /// By rank, how many of its contributions to slices that this rank owns came too late for their round.
    ///
    /// # Errors
    /// `Config` if there is no such book.
    pub fn late(&self, book: BookId) -> Result<Vec<(Rank, u64)>, Failure> {
        self.alive("late")?;
        let open = self.book(book)?;
        let late = open.late.lock().iter().map(|(rank, count)| (*rank, *count)).collect();
        Ok(late)
    }

    /// As [`Engine::proceed`], but nothing is done with the gradients: who contributed is told that there is no result.
    ///
    /// # Errors
    /// As there.
    pub fn discard(&self, book: BookId, step: Step) -> Result<(), Failure> {
        self.alive("discard")?;
        let open = self.updated_book(book)?;
        self.all_are_submitted(&open, step)?;
        self.say(&open, step, None)
    }

    fn say(&self, open: &Arc<OpenBook>, step: Step, updates: Option<Box<[Update]>>) -> Result<(), Failure> {
        self.inner.shared.check()?;
        let _no_epoch_ends = self.enter_epoch()?;
        let said = u64::from(step) + 1;
        if open.said.swap(said, Ordering::AcqRel) == said {
            let name = &open.book.name;
            return Err(Failure::config(format!("{name}: step {step} was told to go on already")));
        }
        let word = Arc::new(Word { book: open.id, step, updates });
        open.note_word(&word);
        for mailbox in self.inner.shared.mailboxes().iter() {
            mailbox.send(Command::Proceed(Arc::clone(&word)));
        }
        Ok(())
    }

    /// Whether this rank has submitted all that it has to for this step.
    fn all_are_submitted(&self, open: &OpenBook, step: Step) -> Result<(), Failure> {
        if !open.book.roles.rules.needs(Rank(self.inner.config.rank)) {
            return Ok(());
        }
        let in_store = |t: &Tensor| t.route == Route::STORE && t.slice_count > 0;
        for (tensor, state) in open.book.tensors.iter().zip(&open.tensors).filter(|(t, _)| in_store(t)) {
            let (book, name, last) = (&open.book.name, &tensor.name, state.step.load(Ordering::Acquire));
            // It may be through already: other owners were told before.
            if state.seq.load(Ordering::Acquire) == 0 || last != step {
                return Err(Failure::config(format!(
                    "{book}: {name} is not submitted for step {step}: all tensors are before they are updated"
                )));
            }
        }
        Ok(())
    }

    /// Waits until all contributions to what this rank owns of a book are in, and gives the sum of the squares of what they come
    /// to, in fp64, slice by slice in their order. Before [`Engine::proceed`]. `interrupted` is asked every 100 ms.
    ///
    /// # Errors
    /// `Config` if this rank has not submitted all of the book for the step; the job's failure; `Timeout`, which ends the job;
    /// [`Stop::Interrupted`].
    pub fn squares(
        &self,
        book: BookId,
        step: Step,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<f64, Stop> {
        self.alive("squares")?;
        let open = self.updated_book(book)?;
        self.inner.shared.check()?;
        if open.book.roles.rules.recoverable {
            let name = &open.book.name;
            return Err(Failure::config(format!(
                "{name}: the norm of gradients at their owners cannot be asked for yet where members may be lost (elastic): leave out \
                 penstock.clip_grad_norm_ and penstock.GradScaler, or let the workers update"
            ))
            .into());
        }
        self.all_are_submitted(&open, step)?;
        self.flush();
        let me = Rank(self.inner.config.rank);
        let shared = &self.inner.shared;
        shared.lock().accounting.wait_began(Instant::now());
        // Before the first look: whoever brings the last sum sees this and wakes the waiting thread.
        open.sums_awaited.fetch_add(1, Ordering::AcqRel);
        let late = || open.late_sum(me).unwrap_or(0);
        let done = |_: &mut State| open.late_sum(me).is_none().then_some(());
        let expired = || self.late_tensor(&open, late(), step);
        let outcome = self.await_result(&mut self.begin_wait(), interrupted, done, expired);
        open.sums_awaited.fetch_sub(1, Ordering::AcqRel);
        shared.lock().accounting.wait_ended(Instant::now());
        outcome
            .map_err(|stop| stop.map(|failure| wait::blame(failure, "waiting for", &open, late(), step)))?;
        let answers = self.ask(|reply| Command::Squares { book, reply });
        self.all_answered(answers.len())?;
        let Some(mut all) = answers.into_iter().collect::<Option<Vec<_>>>().map(|all| all.concat()) else {
            let name = &open.book.name;
            return Err(
                Failure::config(format!("{name}: step {step} goes on already, its sums are gone")).into()
            );
        };
        all.sort_unstable_by_key(|(slice, _)| *slice);
        Ok(all.iter().map(|(_, squares)| squares).sum())
    }

    /// Gives what this rank owns of a tensor, and updates, from memory with all of it: its value, with the number of updates that it
    /// has had, and then, if there were any, the optimizer's states in order. Between steps.
    ///
    /// # Errors
    /// `Config` if it does not fit the book; the job's failure.
    pub fn load(
        &self,
        book: BookId,
        tensor: TensorId,
        (field, updates): (Field, u64),
        whole: &[u8],
    ) -> Result<(), Failure> {
        self.alive("load")?;
        let open = self.kept_book(book)?;
        self.check_whole_of(&open, tensor, whole.len())?;
        self.load_from((book, tensor), (field, updates), &self.inner.shared.pool.copy_of(whole))
    }

    /// As [`Engine::load`] of a value, but memory is read in place whenever the value is updated, and none is kept here
    /// ([`Field::Lent`]). Between the end of a step and the arrival of its result the program leaves it alone. Says whether it is so:
    /// not of every tensor it can be. Without a number of updates it was lent before, and only its memory is another.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// The memory is there whenever an update is under way or the value is saved, until another value is loaded.
    pub unsafe fn lend(
        &self,
        book: BookId,
        tensor: TensorId,
        updates: Option<u64>,
        memory: Lent,
    ) -> Result<bool, Failure> {
        self.alive("lend")?;
        let open = self.kept_book(book)?;
        self.check_whole_of(&open, tensor, memory.len_bytes)?;
        let of = &open.book.tensors[tensor as usize];
        let nowhere = memory.len_bytes > 0 && memory.address == 0;
        if nowhere || !memory.address.is_multiple_of(of.dtype.size_bytes()) {
            return Err(Failure::config(format!("the memory of {} is not aligned to its elements", of.name)));
        }
        let start = NonNull::new(memory.address as *mut u8).unwrap_or(NonNull::dangling());
        // SAFETY: the caller vouches for the memory; its length was checked against the book.
        let whole = unsafe { Chunk::handed(start, memory.len_bytes, Arc::new(NobodyAsks), tensor, 0) };
        let may_lend = open.book.may_lend(tensor);
        if may_lend || updates.is_some() {
            let field = updates.map_or(Field::Moved, |_| Field::Lent);
            self.load_from((book, tensor), (field, updates.unwrap_or(0)), &whole)?;
        }
        Ok(may_lend)
    }

    fn load_from(
        &self,
        (book, tensor): (BookId, TensorId),
        (field, updates): (Field, u64),
        whole: &Chunk,
    ) -> Result<(), Failure> {
        let _no_epoch_ends = self.enter_epoch()?;
        let answers =
            self.ask(|reply| Command::Load { book, tensor, field, updates, whole: whole.clone(), reply });
        self.all_answered(answers.len())?;
        answers.into_iter().collect::<Result<(), _>>().map_err(Failure::from)
    }

    /// Copies what this rank owns of a tensor, and updates, to its places in memory for all of it. Says how often that was
    /// updated; `None` if this rank keeps no such thing, and nothing was copied. Between steps. Where members were lost just now it waits until
    /// what this rank owns from then on is here.
    ///
    /// # Errors
    /// `Config` if it does not fit the book, or a step is under way; the job's failure.
    pub fn save(
        &self,
        book: BookId,
        tensor: TensorId,
        field: Field,
        whole: &mut [u8],
    ) -> Result<Option<u64>, Failure> {
        self.alive("save")?;
        let open = self.kept_book(book)?;
        self.check_whole_of(&open, tensor, whole.len())?;
        let copy = self.inner.shared.pool.copy_of(whole);
        let deadline = Instant::now() + self.inner.config.operation_timeout;
        loop {
            let no_epoch_ends = self.enter_epoch()?;
            let answers = self.ask(|reply| Command::Save { book, tensor, field, whole: copy.clone(), reply });
            self.all_answered(answers.len())?;
            match answers.into_iter().collect::<Result<Vec<_>, _>>() {
                // It comes without the program.
                Err(Error::MembersChanged(_)) if Instant::now() < deadline => {}
                answers => {
                    let counts = answers?.into_iter().flatten();
                    copy.copy_to(0, whole);
                    return Ok(counts.max());
                }
            }
            drop(no_epoch_ends);
            std::thread::sleep(STATES_COME);
        }
    }

    fn check_whole_of(&self, open: &OpenBook, tensor: TensorId, given: usize) -> Result<(), Failure> {
        let of = self.tensor(open, tensor)?;
        let (book, name, needed) = (&open.book.name, &of.name, of.len_bytes());
        if given as u64 == needed {
            return Ok(());
        }
        Err(Failure::config(format!("{book}: {name} has {needed} bytes, but {given} are given")))
    }

    /// All lanes must have answered.
    fn all_answered(&self, answers: usize) -> Result<(), Failure> {
        self.inner.shared.check()?;
        let lanes = self.inner.shared.mailboxes().len();
        if answers == lanes && lanes > 0 {
            return Ok(());
        }
        Err(Failure::config(format!(
            "{answers} of {lanes} lanes have answered: there are none before connect()"
        )))
    }

    fn kept_book(&self, id: BookId) -> Result<Arc<OpenBook>, Failure> {
        let open = self.book(id)?;
        if open.book.roles.rules.fold != Fold::Fresh {
            return Ok(open);
        }
        Err(Failure::config(format!("{}: its owners keep nothing", open.book.name)))
    }

    fn updated_book(&self, id: BookId) -> Result<Arc<OpenBook>, Failure> {
        let open = self.book(id)?;
        if open.book.roles.rules.fold == Fold::Updated {
            return Ok(open);
        }
        Err(Failure::config(format!("{}: its owners update nothing", open.book.name)))
    }
}

/// How long to wait before looking again whether states have come from another member.
const STATES_COME: Duration = Duration::from_millis(2);

/// Of memory that is lent for good: whoever lent it keeps it as long as the engine lives.
struct NobodyAsks;

impl Lender for NobodyAsks {
    fn released(&self, _: u32, _: u64) {}
}

/// By tensor of a book what is done with its gradients.
fn updates_of(
    open: &OpenBook,
    (optimizers, groups): (&[Optimizer], &[u32]),
    factor: f64,
) -> Result<Box<[Update]>, Failure> {
    let (name, tensors) = (&open.book.name, open.book.tensors.len());
    if groups.len() != tensors || groups.iter().any(|group| *group as usize >= optimizers.len()) {
        let (given, count) = (groups.len(), optimizers.len());
        return Err(Failure::config(format!(
            "{name}: the groups of {given} tensors, each below {count}, are given for {tensors} tensors"
        )));
    }
    Ok(groups.iter().map(|group| Update { optimizer: optimizers[*group as usize], factor }).collect())
}

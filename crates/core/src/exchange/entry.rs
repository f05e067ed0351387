//! What an owner keeps of a slice from round to round: its value, and what an optimizer keeps beside it.
//!
//! Where members may be lost all have an entry, with the value that is lent; the states are at the owner and its replica, and
//! between two epochs on their way to the next ones ([`crate::recovery`]).

use super::context::{Context, Site};
use crate::memory::Memory;
use crate::optimizer::Update;
use crate::reduce::Reduction;
use crate::types::{Dtype, Step};

/// One of the things that are kept, each as long as the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// The value.
    Value,
    /// The value, in memory of this rank's program that stays: the program puts every answer there, and it is only read here. Of
    /// tensors that do not allow it ([`Book::may_lend`](crate::layout::Book::may_lend)) this is as [`Field::Value`].
    Lent,
    /// A value that is lent, and is in other memory now; all else stays as it is.
    Moved,
    /// One of the optimizer's states, in the order of [`crate::optimizer::Optimizer::states`].
    State(u8),
}

/// See the module's documentation.
#[derive(Debug)]
pub struct SliceEntry<C> {
    value: C,
    /// The value is in the program's memory.
    lent: bool,
    /// Of the round that it comes from.
    step: Step,
    /// None before the first update.
    states: Vec<C>,
    /// Updates so far, or contributions to a value that is kept; those before it was loaded included.
    updates: u64,
    /// The states are those that follow from the last round whose result is here.
    whole: bool,
    /// Where members may be lost: the last step whose result is here.
    over: Option<Step>,
}

impl<C: Clone> SliceEntry<C> {
    /// A value that nothing was done to yet.
    pub(super) fn new(value: C, step: Step) -> Self {
        Self { value, lent: false, step, states: Vec::new(), updates: 0, whole: true, over: None }
    }

    /// The same, after one more change of `before`.
    pub(super) fn after(before: Option<&Self>, value: C, step: Step) -> Self {
        Self { updates: before.map_or(1, |before| before.updates + 1), ..Self::new(value, step) }
    }

    /// The value, and the step of the round that it comes from.
    pub(super) fn value(&self) -> (&C, Step) {
        (&self.value, self.step)
    }

    /// How often the value was updated.
    pub(super) fn updates(&self) -> u64 {
        self.updates
    }

    /// Whether it has all that an owner keeps.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.whole
    }

    /// The result of a step is here.
    pub(super) fn is_over(&mut self, step: Step) {
        self.over = Some(step);
    }

    /// Whether a word for this step comes too late: it was another member's to hear.
    pub(super) fn is_late(&self, step: Step) -> bool {
        self.over.is_some_and(|over| step <= over)
    }

    /// The states are not here, or not any more.
    pub(super) fn empty(&mut self) {
        self.states.clear();
        self.whole = false;
    }

    /// The states, and how many updates they have had: to be given to another keeper.
    pub(super) fn states(&self) -> (&[C], u64) {
        (&self.states, self.updates)
    }

    /// The states come from another keeper.
    pub(super) fn receive(&mut self, states: Vec<C>, updates: u64) {
        (self.states, self.updates, self.whole) = (states, updates, true);
    }

    /// Applies an optimizer to the value, and gives the new one: of a value that is lent, in the memory of the gradient.
    ///
    /// # Errors
    /// A sentence, if what is kept is not what it needs.
    pub(super) fn update<M: Memory<Chunk = C>>(
        &mut self,
        update: &Update,
        step: Step,
        gradient: &C,
        site: &Site<'_>,
        memory: &mut M,
    ) -> Result<C, String> {
        let (needed, len_bytes) = (update.optimizer.states(), site.slice.len_bytes as usize);
        if self.states.len() != needed.len() {
            if self.updates > 0 || !self.states.is_empty() {
                let (updates, kept, needed) = (self.updates, self.states.len(), needed.join(", "));
                return Err(format!(
                    "after {updates} updates {kept} states are kept, but the optimizer has others ({needed}): options that say \
                     which states there are cannot change while training"
                ));
            }
            for _ in needed {
                let state = memory.scratch(len_bytes);
                memory.fill(site.dtype, update.optimizer.initial(), &state);
                self.states.push(state);
            }
        }
        if !self.lent && memory.is_shared(&self.value) {
            // The last answer still waits for somebody who need not be in.
            let value = memory.scratch(len_bytes);
            copy(memory, &self.value, &value);
            self.value = value;
        }
        // What waits to be sent stays as it is: states to another keeper, the gradient to the replica.
        for state in &mut self.states {
            *state = unshared(memory, state, len_bytes);
        }
        let waits = site.rules.recoverable.then(|| unshared(memory, gradient, len_bytes));
        let gradient = waits.as_ref().unwrap_or(gradient);
        self.updates += 1;
        self.step = step;
        let output = if self.lent { gradient } else { &self.value };
        memory.update(site.dtype, update, self.updates, &self.value, gradient, &self.states, output);
        Ok(output.clone())
    }

    /// Takes what is kept from `from`. A value begins an entry anew; states follow in their order.
    ///
    /// # Errors
    /// A sentence, if a state does not follow those that are there.
    pub(super) fn load<M: Memory<Chunk = C>>(
        entry: &mut Option<Self>,
        field: Field,
        updates: u64,
        from: &C,
        context: &mut Context<'_, M>,
    ) -> Result<(), String> {
        let lent = matches!(field, Field::Lent | Field::Moved);
        let Site { slice, rank, rules, .. } = context.site;
        let keeps = slice.is_kept_by(rank);
        if field == Field::Value && rules.recoverable {
            return Err("where members may be lost a value is read in the model: its memory must be laid out as when the model was \
                        distributed"
                .into());
        }
        if !keeps && !lent {
            return Ok(()); // a member that keeps no more than a value that is lent
        }
        let kept =
            if lent { from.clone() } else { context.memory.scratch(context.site.slice.len_bytes as usize) };
        if !lent {
            copy(context.memory, from, &kept);
        }
        match (field, entry) {
            (Field::Moved, Some(entry)) if entry.lent => entry.value = kept,
            (Field::Moved, _) => return Err("a value has moved that was not lent".into()),
            (Field::Value | Field::Lent, entry) => {
                let over = entry.as_ref().and_then(|entry| entry.over);
                *entry = Some(Self { updates, lent, whole: keeps, over, ..Self::new(kept, 0) });
            }
            (Field::State(at), Some(entry)) if usize::from(at) == entry.states.len() => {
                entry.states.push(kept);
            }
            (Field::State(at), entry) => {
                let states = entry.as_ref().map_or(0, |entry| entry.states.len());
                return Err(format!(
                    "state {at} comes after a value and {states} states: load them in order"
                ));
            }
        }
        Ok(())
    }

    /// Copies what is kept to `to`, if there is such a thing.
    pub(super) fn save<M: Memory<Chunk = C>>(&self, field: Field, to: &C, memory: &mut M) -> bool {
        let kept = match field {
            Field::Value | Field::Lent | Field::Moved => Some(&self.value),
            Field::State(at) => self.states.get(usize::from(at)),
        };
        if let Some(kept) = kept {
            copy(memory, kept, to);
        }
        kept.is_some()
    }
}

/// The same memory, or a copy if there is another piece of it.
fn unshared<M: Memory>(memory: &mut M, chunk: &M::Chunk, len_bytes: usize) -> M::Chunk {
    if !memory.is_shared(chunk) {
        return chunk.clone();
    }
    let copied = memory.scratch(len_bytes);
    copy(memory, chunk, &copied);
    copied
}

/// Bit by bit.
pub(super) fn copy<M: Memory>(memory: &mut M, from: &M::Chunk, to: &M::Chunk) {
    memory.reduce(Dtype::Bytes, Reduction::Sum { divisor: 1 }, std::slice::from_ref(from), to);
}

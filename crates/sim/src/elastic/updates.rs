//! Where owners update what they keep: what each result must be, by an account of the states that every rank keeps for itself, and of
//! which losses the states cannot come back.

use super::{Log, average};
use crate::random::Random;
use penstock_core::layout::{Book, Slice};
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::types::{Dtype, Rank, Seq, SliceId};
use std::collections::BTreeMap;

/// With an eps of about the gradients' size: else the first update is the same over whatever members the average is.
const ADAM: Optimizer = Optimizer {
    lr: 0.5,
    weight_decay: 0.01,
    maximize: false,
    rule: Rule::Adam { betas: [0.5, 0.75], eps: 1e5, amsgrad: false, decoupled: false },
};

/// What a program says of a step of a tensor, the same on all ranks; now and then it does not make it.
pub(super) fn word(tensor: usize, step: Seq) -> Option<Update> {
    let mut random = Random::new(0x0DD << 40 ^ (tensor as u64) << 20 ^ u64::from(step));
    let optimizer = Optimizer { lr: 0.5 / f64::from(step), ..ADAM };
    (!random.chance(100)).then_some(Update { optimizer, factor: 1.0 })
}

/// An optimizer's states, and how many updates they have had.
type States = (Vec<Vec<u8>>, u64);

/// The states of each slice.
#[derive(Debug, Clone, Default)]
pub(super) struct Account(BTreeMap<SliceId, States>);

impl Account {
    /// A slice's value after a round over these members, and its states; nothing if it stays as it is.
    fn after(
        &self,
        book: &Book,
        (slice, seq): (SliceId, Seq),
        members: &[Rank],
        value: &[u8],
    ) -> Option<(Vec<u8>, States)> {
        let at = &book.slices[slice as usize];
        let tensor = at.tensor as usize;
        let row = average(members, tensor, seq, book.tensors[tensor].elems as usize)?;
        let update = word(tensor, seq)?;
        let first = at.offset_bytes as usize;
        let gradient = &bytemuck::cast_slice::<f32, u8>(&row)[first..first + at.len_bytes as usize];
        let count = update.optimizer.states().len();
        let fresh = || (vec![vec![0; value.len()]; count], 0);
        let (mut states, updates) = self.0.get(&slice).cloned().unwrap_or_else(fresh);
        let mut value = value.to_vec();
        let mut views: Vec<&mut [u8]> = states.iter_mut().map(|state| &mut state[..]).collect();
        let made = update.apply(Dtype::F32, updates + 1, &mut value, gradient, &mut views);
        made.expect("a model of fp32");
        Some((value, (states, updates + 1)))
    }

    /// Whether a result is that of a round over these members. Then it is taken into the account.
    pub(super) fn is_after(
        &mut self,
        book: &Book,
        round: (SliceId, Seq),
        members: &[Rank],
        (before, after, present): (&[u8], &[u8], bool),
    ) -> bool {
        match self.after(book, round, members, before) {
            // Where another slice of the tensor was updated this one must be as it was.
            None => !present && before == after,
            Some((value, states)) => {
                let is_it = present && value == after;
                if is_it {
                    self.0.insert(round.0, states);
                }
                is_it
            }
        }
    }

    /// A parameter as it must be by the log.
    pub(super) fn replayed(book: &Book, tensor: usize, steps: Seq, log: &Log) -> Vec<f32> {
        let mut param = vec![0.0_f32; book.tensors[tensor].elems as usize];
        let mut account = Self::default();
        for seq in 1..=steps {
            for slice in book.slices_of(tensor as u32) {
                let Some(members) = log.get(&(slice, seq)) else { continue };
                let Slice { offset_bytes, len_bytes, .. } = book.slices[slice as usize];
                let range = offset_bytes as usize..offset_bytes as usize + len_bytes as usize;
                let value = &mut bytemuck::cast_slice_mut::<f32, u8>(&mut param)[range];
                if let Some((after, states)) = account.after(book, (slice, seq), members, value) {
                    value.copy_from_slice(&after);
                    account.0.insert(slice, states);
                }
            }
        }
        param
    }
}

/// Whether what was kept of a slice may be lost with those who are not among the members any more: both that kept it, or somebody while
/// it was on its way to others.
pub(super) fn may_be_lost(slice: &Slice, moved: bool, members: &[Rank]) -> bool {
    let keepers = [Some(slice.owner), slice.replica];
    moved || keepers.into_iter().flatten().all(|rank| !members.contains(&rank))
}

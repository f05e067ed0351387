//! Messages and collectives: begun by any thread, waited for by any.

use super::Engine;
use crate::call::Handle;
use crate::failure::{Failure, Stop};
use crate::mailbox::{Command, Mailbox};
use crate::memory::{Chunk, Lender, RealMemory};
use crate::shared::State;
use penstock_core::calls::{self, Call, Calls, Request, Shape, Share};
use penstock_core::cost::Rates;
use penstock_core::life::{Expired, WaitKind};
use penstock_core::types::GroupId;
use penstock_core::way::Algorithm;
use penstock_core::{Dtype, Error, Members, Op, Rank, Slicing, limits};
use std::any::Any;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Memory of the program: its address, and its length in bytes.
pub type AddressRange = (usize, usize);

/// This rank's part in a call; see [`penstock_core::calls`].
pub struct CallPart {
    /// The group, which this rank is a member of; 0 is all workers.
    pub group: GroupId,
    /// The epoch of the job in which it is made, if it is of no use in another one.
    pub epoch: Option<u32>,
    /// What is to be done.
    pub request: Request,
    /// For sums.
    pub op: Op,
    /// For sums.
    pub dtype: Dtype,
    /// What this rank gives: the tensor, or a block for each member.
    pub inputs: Vec<AddressRange>,
    /// Where results go, likewise.
    pub outputs: Vec<AddressRange>,
    /// What keeps the memory allocated; dropped once nobody touches it any more.
    pub keep: Box<dyn Any + Send + Sync>,
}

/// Lengths for which the chosen algorithm is remembered.
const CHOICES_MAX: usize = 1024;

/// What calls are made of, as all ranks know it.
#[derive(Default)]
pub(super) struct Agreed {
    /// This rank's index in a group, and how many members it has.
    pub(super) places: BTreeMap<GroupId, (u32, u32)>,
    /// The members of each group, in their order.
    pub(super) groups: BTreeMap<GroupId, Vec<Rank>>,
    /// What a choice assumes.
    pub(super) rates: Rates,
    /// In a replay: how tensors were cut.
    pub(super) slicing: Option<Slicing>,
    /// Choices that were made under these rates, by elements, bytes of an element and ranks.
    choices: BTreeMap<(u64, u64, u32), Algorithm>,
}

impl Agreed {
    fn place(&self, group: GroupId) -> Result<(u32, u32), Failure> {
        let place = self.places.get(&group).copied();
        place.ok_or_else(|| {
            Failure::config(format!("group {group} does not exist, or connect() was not called"))
        })
    }

    /// There are other members.
    pub(super) fn forget_choices(&mut self) {
        self.choices.clear();
    }

    fn choose(&mut self, elems: u64, elem_bytes: u64, ranks: u32) -> Algorithm {
        if self.choices.len() >= CHOICES_MAX {
            self.choices.clear();
        }
        let rates = &self.rates;
        let choose = || calls::choose(elems, elem_bytes, ranks, rates);
        *self.choices.entry((elems, elem_bytes, ranks)).or_insert_with(choose)
    }
}

/// The calls of a job of one rank, which has no lanes.
pub(super) fn laneless() -> Calls<RealMemory> {
    Calls::new(Rank(0), Members::all(1))
}

impl Engine {
    /// Forms a group of ranks for calls. All members must form it with the same number and the same order of members.
    ///
    /// # Errors
    /// `Config` if the number is 0, or members are not distinct ranks with this one among them; the job's failure.
    pub fn form_group(&self, id: GroupId, members: &[u32]) -> Result<(), Failure> {
        self.alive("new_group")?;
        self.inner.shared.check()?;
        let members_now = self.inner.members();
        let size = self.inner.config.size;
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        let distinct = sorted.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = sorted.iter().all(|rank| members_now.contains(Rank(*rank)));
        if id == 0 || !distinct || !inside || !members.contains(&self.inner.config.rank) {
            return Err(Failure::config(format!(
                "new_group: group {id} of ranks {members:?}; a group has distinct ranks below {size}, and rank {} among them",
                self.inner.config.rank
            )));
        }
        self.tell_group(id, members)
    }

    /// The group of all workers, and later ones.
    pub(super) fn tell_group(&self, id: GroupId, members: &[u32]) -> Result<(), Failure> {
        let size = members.len() as u32;
        let me =
            members.iter().position(|rank| *rank == self.inner.config.rank).unwrap_or(members.len()) as u32;
        let members: Vec<Rank> = members.iter().copied().map(Rank).collect();
        for mailbox in self.inner.shared.mailboxes().iter() {
            mailbox.send(Command::Group { id, members: members.clone() });
        }
        self.inner.agreed.lock().groups.insert(id, members.clone());
        if self.inner.shared.mailboxes().is_empty() {
            self.inner.laneless.lock().0.form(id, members)?;
        }
        self.inner.agreed.lock().places.insert(id, (me, size));
        Ok(())
    }

    /// Sets what the choice of an algorithm assumes, from the next call on, how the tensors of later books are cut, and how
    /// much the connections hold, until another line rate is seen. All ranks set the same between the same calls.
    ///
    /// # Errors
    /// `Config` if a rate makes no sense.
    pub fn set_rates(&self, rates: Rates) -> Result<(), Failure> {
        self.alive("set_rates")?;
        if let Some(name) = rates.wrong() {
            return Err(Failure::config(format!("set_rates: {name} must be a positive number")));
        }
        let mut agreed = self.inner.agreed.lock();
        agreed.choices.clear();
        agreed.rates = rates;
        drop(agreed);
        self.inner.shared.set_line(rates.bytes_per_s);
        Ok(())
    }

    /// The algorithm that is best for an allreduce of so many bytes in a group, by the cost model: the same on all ranks.
    ///
    /// # Errors
    /// `Config` if there is no such group.
    pub fn choose(&self, group: GroupId, len_bytes: u64, dtype: Dtype) -> Result<Algorithm, Failure> {
        let elem_bytes = dtype.size_bytes() as u64;
        let mut agreed = self.inner.agreed.lock();
        let (_, ranks) = agreed.place(group)?;
        Ok(agreed.choose(len_bytes / elem_bytes, elem_bytes, ranks))
    }

    /// The algorithm of an allreduce (`None`: the best one) of so many elements by so many ranks, its slices, and whether its sum
    /// has the same bits wherever the tensor is cut into calls of their own, if each rank gives so many vectors.
    ///
    /// # Errors
    /// `Config` if a number is out of bounds.
    pub fn allreduce_plan(
        &self,
        elems: u64,
        dtype: Dtype,
        ranks: u32,
        algorithm: Option<Algorithm>,
        vectors: usize,
    ) -> Result<(Algorithm, u32, bool), Failure> {
        let elem_bytes = dtype.size_bytes() as u64;
        if elems > limits::COST_ELEMS_MAX || !(1..=limits::RANKS_MAX).contains(&ranks) {
            return Err(Failure::config(format!(
                "allreduce_plan: {elems} elements on {ranks} ranks is out of bounds"
            )));
        }
        let mut choose = || self.inner.agreed.lock().choose(elems, elem_bytes, ranks);
        let algorithm = algorithm.unwrap_or_else(&mut choose);
        let slices = calls::slices(algorithm, elems, elem_bytes, ranks);
        Ok((algorithm, slices, calls::any_cut_keeps_bits(algorithm, vectors)))
    }

    /// The lanes among which a call is dealt, the group's own first; none in a job of one rank.
    fn call_lanes(&self, group: GroupId, shape: &Shape) -> Vec<Arc<Mailbox>> {
        let mailboxes = self.inner.shared.mailboxes();
        let count = calls::lanes(shape, mailboxes.len() as u32).min(mailboxes.len() as u32) as usize;
        let first = usize::from(group);
        (first..first + count).map(|lane| Arc::clone(&mailboxes[lane % mailboxes.len()])).collect()
    }

    /// Begins a call. It is done when its handle says so, or [`Engine::wait_call`] returns.
    ///
    /// # Errors
    /// `Config` if memory is not aligned to its elements, or the call does not fit the group; the job's failure. What does
    /// not fit the calls of other ranks is noticed later and fails the job.
    ///
    /// # Safety
    /// All memory must stay allocated until `keep` is dropped, which must not depend on this thread. Until then nobody
    /// may write to it, nor read what is to be filled.
    pub unsafe fn call(&self, part: CallPart) -> Result<Arc<Handle>, Failure> {
        self.alive("a call")?;
        self.inner.shared.check()?;
        let _no_epoch_ends = self.enter_epoch()?;
        let CallPart { group, epoch, request, op, dtype, inputs, outputs, keep } = part;
        if epoch.is_some_and(|epoch| epoch != self.epoch()) {
            return Err(self.members_changed(format_args!("a call of epoch {}", epoch.unwrap_or_default())));
        }
        let (me, ranks) = self.inner.agreed.lock().place(group)?;
        let lens = |blocks: &[AddressRange]| blocks.iter().map(|(_, len)| *len as u64).collect();
        let shape = Shape {
            kind: request.kind(),
            ranks,
            me,
            elem_bytes: dtype.size_bytes(),
            inputs: lens(&inputs),
            outputs: lens(&outputs),
        };
        // Here, so that a call that cannot be made harms neither the others nor the next call.
        calls::check(&shape, request)?;
        let lanes = self.call_lanes(group, &shape);
        let usable = |(address, len): &AddressRange| {
            *len == 0 || *address != 0 && address.is_multiple_of(dtype.size_bytes())
        };
        if !inputs.iter().chain(&outputs).all(usable) {
            return Err(Failure::config("memory that is nowhere, or not aligned to its elements"));
        }
        if let Some(why) = op.refused(dtype) {
            return Err(Failure::config(format!("a call on {dtype:?}: {why}")));
        }
        let id = self.inner.next_token.fetch_add(1, Ordering::Relaxed);
        let of = lanes.len().max(1) as u32;
        let regions = (inputs.len() + outputs.len()) as u32 * of;
        let handle = Handle::new(id, group, request, of, regions, keep, Arc::clone(&self.inner.shared));
        let chunks = |memory: &[AddressRange]| {
            let chunk = |(address, len): &AddressRange| {
                let start = NonNull::new(*address as *mut u8).unwrap_or(NonNull::dangling());
                // SAFETY: the caller vouches for the memory; shares of different lanes are different pieces of it.
                let chunk =
                    unsafe { Chunk::handed(start, *len, Arc::clone(&handle) as Arc<dyn Lender>, 0, 0) };
                (chunk, *len as u64)
            };
            memory.iter().map(chunk).collect()
        };
        let call = |index| {
            let share = Share { index, of };
            Call { id, group, request, op, dtype, share, inputs: chunks(&inputs), outputs: chunks(&outputs) }
        };
        if lanes.is_empty() {
            self.call_laneless(call(0), &handle).inspect_err(|_| handle.abandoned())?;
        }
        self.inner.shared.progressed();
        for (index, lane) in (0..).zip(lanes) {
            lane.send(Command::Call { call: Box::new(call(index)), handle: Arc::clone(&handle) });
        }
        Ok(handle)
    }

    fn call_laneless(&self, call: Call<Chunk>, handle: &Handle) -> Result<(), Failure> {
        let mut laneless = self.inner.laneless.lock();
        let (calls, memory) = &mut *laneless;
        calls.begin(call, memory)?;
        calls.effects.complete.clear();
        handle.completed();
        Ok(())
    }

    /// Waits for a call, at most `timeout` or the operation timeout. `interrupted` is asked every 100 ms.
    ///
    /// # Errors
    /// The job's failure; `Timeout` naming the ranks that are waited for, which ends the job; [`Stop::Interrupted`].
    pub fn wait_call(
        &self,
        handle: &Handle,
        timeout: Option<Duration>,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), Stop> {
        if handle.is_done() {
            return Ok(());
        }
        self.alive("wait")?;
        let timeout = timeout.unwrap_or(self.inner.config.operation_timeout);
        let shared = &self.inner.shared;
        let mut wait = shared.begin_wait(WaitKind::Result, timeout);
        let done = |_: &mut State| (handle.is_done() || handle.is_over()).then_some(());
        // Still awaited while the ranks find out who is late.
        let outcome = handle
            .awaited(|| self.await_result(&mut wait, interrupted, done, || self.late_call(handle, timeout)));
        let noticed = format!(" (noticed by rank {} in {handle})", shared.me);
        outcome.map_err(|stop| stop.map(|failure| failure.add(&noticed)))?;
        if handle.is_done() { Ok(()) } else { Err(self.members_changed(handle).into()) }
    }

    /// What was under way when the members changed is over.
    pub(super) fn members_changed(&self, what: impl std::fmt::Display) -> Failure {
        let (me, epoch) = (self.inner.shared.me, self.inner.shared.epoch());
        Error::MembersChanged(format!(
            "rank {me}: the members of the job changed (epoch {epoch} has begun) while this was under way: {what}. Some may have \
             finished it; make it again on all ranks"
        ))
        .into()
    }

    /// Whether a call is done.
    ///
    /// # Errors
    /// The job's failure, if it is not.
    pub fn poll_call(&self, handle: &Handle) -> Result<bool, Failure> {
        if handle.is_done() {
            return Ok(true);
        }
        self.alive("done")?;
        let shared = &self.inner.shared;
        shared
            .check()
            .map_err(|failure| failure.add(&format!(" (noticed by rank {} in {handle})", shared.me)))?;
        let over = handle.is_over();
        match handle.is_done() {
            false if over => Err(self.members_changed(handle)),
            done => Ok(done),
        }
    }

    /// The watched calls that are done since the last time; waits up to `patience` for one.
    ///
    /// # Errors
    /// The job's failure: calls that are not done will never be.
    pub fn take_done(&self, patience: Duration) -> Result<Vec<u64>, Failure> {
        self.alive("take_done")?;
        let shared = &self.inner.shared;
        let take =
            |state: &mut State| (!state.done_calls.is_empty()).then(|| std::mem::take(&mut state.done_calls));
        match shared.wait(&mut shared.begin_wait(WaitKind::Look, patience), &mut || false, take) {
            Ok(waited) => Ok(waited.came().unwrap_or_default()),
            Err(Stop::Failed(failure)) => Err(*failure),
            Err(Stop::Interrupted) => Ok(Vec::new()),
        }
    }

    fn late_call(&self, handle: &Handle, timeout: Duration) -> Expired {
        let (me, seconds) = (self.inner.shared.me, timeout.as_secs_f64());
        let what = format!(
            "timeout: rank {me}, {handle}: not done within {seconds:.1} s (operation_timeout_s, or the timeout of the call)"
        );
        let hint = "Every rank of the group must make the same calls in the same order; if one is only slow, raise the limit";
        Expired { about: None, step: None, what, hint: hint.into() }
    }
}

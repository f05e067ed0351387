//! Waiting for results, and what is said when they do not come.

use super::Engine;
use crate::failure::{Failure, Stop};
use crate::mailbox::Command;
use crate::shared::{JointWait, OpenBook, State, Waited};
use penstock_core::life::{Expired, Over, Wait, WaitKind};
use penstock_core::{BookId, Error, Header, Kind, Step, TensorId};
use std::cell::LazyCell;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What has come back of what was submitted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Landed {
    /// Of the tensors that were asked about, those whose last round is complete.
    pub complete: Vec<TensorId>,
    /// For each tensor that was asked about the length of the leading part of its result that is in memory: all of it if it is complete, 0 if it
    /// is and nobody contributed.
    pub bytes: Vec<u64>,
    /// Tokens whose memory will never be touched again, since the last look at whatever tensors.
    pub released: Vec<u64>,
}

/// What ends a wait.
#[derive(Debug, Clone, Copy)]
pub struct Until<'a> {
    /// For each tensor so many leading bytes of its result.
    pub least_bytes: &'a [u64],
    /// The end of patience.
    pub patience: Duration,
}

impl Engine {
    /// Waits until the results of the last submissions are in memory; with `released`, until the memory may be changed,
    /// too. `interrupted` is asked every 100 ms.
    ///
    /// # Errors
    /// The job's failure; `Timeout` after the operation timeout, which ends the job; [`Stop::Interrupted`].
    pub fn wait(
        &self,
        book: BookId,
        tensors: &[TensorId],
        released: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), Stop> {
        self.alive("wait")?;
        let open = self.book(book)?;
        for tensor in tensors {
            self.tensor(&open, *tensor)?;
        }
        if tensors.iter().all(|tensor| is_in(&open, *tensor, released)) {
            return Ok(());
        }
        self.flush();
        let shared = &self.inner.shared;
        let begin = Instant::now();
        shared.lock().accounting.wait_began(begin);
        let outcome = self.wait_for_each(&open, tensors, released, begin, interrupted);
        shared.lock().accounting.wait_ended(Instant::now());
        outcome
    }

    fn wait_for_each(
        &self,
        open: &OpenBook,
        tensors: &[TensorId],
        released: bool,
        begin: Instant,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), Stop> {
        let mut wait = self.begin_wait();
        let mut since = begin;
        for &tensor in tensors {
            if is_in(open, tensor, released) {
                continue;
            }
            // Before the first look: whoever completes it later sees this and wakes the waiting thread.
            let awaited = &open.tensors[tensor as usize].awaited;
            awaited.fetch_add(1, Ordering::AcqRel);
            let step = open.tensors[tensor as usize].step.load(Ordering::Relaxed);
            let expired = || self.late_tensor(open, tensor, step);
            let done = |_: &mut State| is_in(open, tensor, released).then_some(());
            let outcome = self.await_result(&mut wait, interrupted, done, expired);
            awaited.fetch_sub(1, Ordering::AcqRel);
            let now = Instant::now();
            note_stall(open, tensor, since, now);
            since = now;
            outcome.map_err(|stop| stop.map(|failure| blame(failure, "waiting for", open, tensor, step)))?;
        }
        Ok(())
    }

    /// A wait for results that begins now.
    pub(super) fn begin_wait(&self) -> Wait {
        self.inner.shared.begin_wait(WaitKind::Result, self.inner.config.operation_timeout)
    }

    /// Waits until `done` gives something. What follows if that takes too long is up to the kind of the wait: nothing comes, or the
    /// job ends, or the ranks find out together who is late, which ends it, too, unless it comes meanwhile.
    pub(super) fn await_result<T>(
        &self,
        wait: &mut Wait,
        interrupted: &mut dyn FnMut() -> bool,
        mut done: impl FnMut(&mut State) -> Option<T>,
        expired: impl FnOnce() -> Expired,
    ) -> Result<Option<T>, Stop> {
        let shared = &self.inner.shared;
        let expired = LazyCell::new(expired);
        loop {
            let epoch = shared.epoch();
            match shared.wait(wait, interrupted, &mut done)? {
                Waited::Came(result) => return Ok(Some(result)),
                Waited::Over(Over::GoOn) => return Ok(None),
                Waited::Over(Over::Fail) => return Err(self.end_at_fault(&expired)),
                Waited::Over(Over::Ask) => {}
            }
            let waited = shared.wait(&mut shared.expired(&expired), interrupted, &mut done);
            // Also if the program waits no more.
            shared.came(&expired);
            match waited? {
                Waited::Came(result) => return Ok(Some(result)),
                Waited::Over(_) if shared.epoch() == epoch => return Err(self.end_at_fault(&expired)),
                // Who was late is not among the members any more.
                Waited::Over(_) => wait.again(shared.ns_of(Instant::now())),
            }
        }
    }

    /// The wait is over, and it is this rank's own fault.
    fn end_at_fault(&self, expired: &Expired) -> Stop {
        self.end_with(expired.clone().fault(self.inner.shared.me).into()).into()
    }

    /// What has landed of these tensors, and what is released. With `until` it waits, but no longer than that says, until any of
    /// them is complete or so many leading bytes of it are in memory, or the job has failed. `interrupted` is asked every
    /// 100 ms of a wait.
    ///
    /// * `needed`: the program cannot go on without them. Then the job's failure is raised, what is held back is sent, and the
    ///   wait counts as a stall of the first tensor's layer. Otherwise a failure is left to the calls that raise it.
    ///
    /// # Errors
    /// `Config` if there is no such tensor, or not a length for each; the job's failure; [`Stop::Interrupted`].
    pub fn landed(
        &self,
        book: BookId,
        tensors: &[TensorId],
        until: Option<Until<'_>>,
        needed: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Landed, Stop> {
        self.alive("landed")?;
        let mut landed = Landed::default();
        if needed {
            self.flush();
        }
        if needed || !tensors.is_empty() {
            let open = self.book(book)?;
            for tensor in tensors {
                self.tensor(&open, *tensor)?;
            }
            if let Some(until) = until.filter(|_| !tensors.is_empty()) {
                self.wait_for_any(&open, tensors, until, needed, interrupted)?;
            }
            if needed {
                self.inner.shared.check().map_err(|failure| blame_first(failure, &open, tensors))?;
            }
            landed.complete = tensors.iter().copied().filter(|tensor| is_in(&open, *tensor, false)).collect();
            landed.bytes = tensors.iter().map(|tensor| open.landed_bytes(*tensor)).collect();
        }
        landed.released = self.inner.shared.take_released();
        Ok(landed)
    }

    /// Until a part of any of these tensors is in memory, time is up, or the job has failed.
    fn wait_for_any(
        &self,
        open: &OpenBook,
        tensors: &[TensorId],
        Until { least_bytes, patience }: Until<'_>,
        stalls: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), Stop> {
        if least_bytes.len() != tensors.len() {
            let (lengths, count) = (least_bytes.len(), tensors.len());
            return Err(Failure::config(format!("{lengths} lengths to wait for, of {count} tensors")).into());
        }
        let parts: Vec<_> = tensors.iter().copied().zip(least_bytes.iter().copied()).collect();
        let any = || parts.iter().any(|(tensor, bytes)| open.arrived_bytes(*tensor) >= *bytes);
        if any() {
            return Ok(());
        }
        self.flush();
        let shared = &self.inner.shared;
        let begin = Instant::now();
        if stalls {
            shared.lock().accounting.wait_began(begin);
        }
        open.await_parts(&parts);
        let over = |state: &mut State| (any() || state.is_settled()).then_some(());
        let outcome = shared.wait(&mut shared.begin_wait(WaitKind::Look, patience), interrupted, over);
        open.no_longer_await_parts(&parts);
        if stalls {
            let now = Instant::now();
            shared.lock().accounting.wait_ended(now);
            note_stall(open, tensors[0], begin, now);
        }
        outcome.map(|_| ())
    }

    /// A tensor's result did not come in time.
    pub(super) fn late_tensor(&self, open: &OpenBook, tensor: TensorId, step: Step) -> Expired {
        let (book, me) = (&open.book, self.inner.shared.me);
        let (name, layer) = (&book.tensors[tensor as usize].name, book.layer_name(tensor));
        let seconds = self.inner.config.operation_timeout.as_secs_f64();
        let what = format!(
            "timeout: rank {me}: layer {layer} (tensor {name} of {}) of step {step} was not synchronised within {seconds:.1} s \
             (operation_timeout_s)",
            book.name
        );
        let hint = "If that is slow and not stuck, raise operation_timeout_s".into();
        Expired { about: Some((open.id, tensor)), step: Some(step), what, hint }
    }

    /// Fails the job, unless it has failed already, and gives its failure.
    pub(super) fn end_with(&self, failure: Failure) -> Failure {
        self.inner.shared.fail(failure.clone());
        self.inner.shared.check().err().unwrap_or(failure)
    }

    /// Gives every worker's blob to every worker, in rank order. All workers must call it in the same order. `what` is for
    /// messages.
    ///
    /// # Errors
    /// The job's failure; `Timeout` naming the ranks that did not come, which ends the job; [`Stop::Interrupted`].
    pub fn all_gather(
        &self,
        what: &str,
        blob: &[u8],
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Vec<u8>>, Stop> {
        self.alive("all_gather")?;
        self.check_that_this_is_a_worker("all_gather")?;
        let size = self.inner.workers().count() as usize;
        if blob.len() > penstock_core::limits::BLOB_BYTES_MAX {
            let max = penstock_core::limits::BLOB_BYTES_MAX;
            return Err(Failure::config(format!(
                "{what}: {} bytes; at most {max} can be gathered",
                blob.len()
            ))
            .into());
        }
        let shared = &self.inner.shared;
        self.wait_for_members().map_err(|failure| failure.add(&format!(" ({what})")))?;
        let epoch = shared.epoch();
        if size == 1 {
            return Ok(vec![blob.to_vec()]);
        }
        let Some(lane) = shared.mailboxes().first().cloned() else {
            return Err(Failure::config(format!("{what}: all_gather() was called before connect()")).into());
        };
        let _one_at_a_time = self.inner.joint.lock();
        let payload = (!blob.is_empty()).then(|| shared.pool.copy_of(blob));
        let seq = shared.update(|state| {
            state.joint = Some(JointWait::AllGather(what.into()));
            state.all_gather.give(blob.to_vec())
        });
        shared.progressed();
        let header = Header { seq, payload_bytes: blob.len() as u32, ..Header::control(Kind::Blob) };
        lane.send(Command::Control { header, payload });
        let mut is_late = false;
        let expired = || {
            is_late = true;
            self.late_gather(what)
        };
        let done = |state: &mut State| {
            let over = (shared.epoch() != epoch).then_some(None);
            over.or_else(|| state.all_gather.take().map(Some))
        };
        let outcome = self.await_result(&mut self.begin_wait(), interrupted, done, expired);
        if !matches!(outcome, Err(Stop::Interrupted)) {
            shared.update(|state| state.joint = None);
        }
        let blobs = outcome.map_err(|stop| match is_late {
            true => stop,
            false => {
                stop.map(|failure| failure.add(&format!(" (this rank was waiting for the others: {what})")))
            }
        })?;
        match blobs {
            Some(None) => Err(self.members_changed(what).into()),
            blobs => Ok(blobs.flatten().unwrap_or_default()),
        }
    }

    fn late_gather(&self, what: &str) -> Expired {
        let me = self.inner.shared.me;
        let seconds = self.inner.config.operation_timeout.as_secs_f64();
        let what =
            format!("timeout: rank {me}: {what}: not done within {seconds:.1} s (operation_timeout_s)");
        let hint = "Every rank must come here; if one is only slow, raise operation_timeout_s".into();
        Expired { about: None, step: None, what, hint }
    }
}

/// The program has waited for this tensor.
fn note_stall(open: &OpenBook, tensor: TensorId, since: Instant, now: Instant) {
    let layer = open.book.tensors[tensor as usize].layer as usize;
    let stall_ns = u64::try_from(now.saturating_duration_since(since).as_nanos()).unwrap_or(u64::MAX);
    open.stall_ns[layer].fetch_add(stall_ns, Ordering::Relaxed);
}

/// Whether the last result is in memory, and released if that is asked for.
fn is_in(open: &OpenBook, tensor: TensorId, released: bool) -> bool {
    let state = &open.tensors[tensor as usize];
    state.remaining.load(Ordering::Acquire) == 0
        && (!released || state.unreleased.load(Ordering::Acquire) == 0)
}

/// The job's failure as it looks from a layer.
pub(super) fn blame(failure: Failure, doing: &str, open: &OpenBook, tensor: TensorId, step: Step) -> Failure {
    if failure.layer.is_some() {
        return failure;
    }
    let layer = open.book.layer_name(tensor);
    let restart = match failure.error {
        // Who is at fault itself, or was left out, has been told what to do.
        Error::PeerLost { rank, .. } if rank != open.me() => {
            format!(". Restart all ranks; what rank {rank} printed last may say why")
        }
        _ => String::new(),
    };
    let more = format!(" (noticed when {doing} layer {layer} of {}, step {step}){restart}", open.book.name);
    Failure { layer: Some(layer.into()), step: Some(step), ..failure.add(&more) }
}

/// The failure as it looks from the first of these tensors that is not in; from the first if all are, for an error always
/// says where the program was.
fn blame_first(failure: Failure, open: &OpenBook, tensors: &[TensorId]) -> Failure {
    let late = tensors.iter().find(|tensor| !is_in(open, **tensor, false)).or(tensors.first());
    let Some(&late) = late else { return failure };
    let step = open.tensors[late as usize].step.load(Ordering::Relaxed);
    blame(failure, "waiting for", open, late, step)
}

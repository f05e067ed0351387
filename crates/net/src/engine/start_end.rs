//! From `connect` to the end: in order, after a failure, and in a forked child.

use super::{Engine, EngineConfig, Inner};
use crate::admission::{Admission, AdmissionConfig, Deliver, Delivery, Listeners};
use crate::descriptors;
use crate::exit;
use crate::failure::{Failure, Stop};
use crate::lane::{Lane, WAKER};
use crate::mailbox::{Command, Mailbox};
use crate::observed::{Recorder, Rings};
use crate::shared::{JointWait, State};
use mio::{Poll, Waker};
use penstock_core::Members;
use penstock_core::life::{Expired, FLUSH_NS, Fault, WaitKind};
use penstock_core::{Rank, node};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lanes that have yet to run.
pub(super) struct IdleLanes {
    polls: Vec<Poll>,
    pub(super) mailboxes: Vec<Arc<Mailbox>>,
}

/// How long `quiet` waits for the lanes' next turns before it ends them.
const QUIET: Duration = Duration::from_secs(5);

impl Engine {
    /// Starts the threads. `addresses` is every rank's host and port; connections come about when they are needed.
    ///
    /// # Errors
    /// `Config` if the table does not fit the job, a host is unknown, or it was called before.
    pub fn connect(&self, addresses: &[(String, u16)]) -> Result<(), Failure> {
        self.alive("connect")?;
        let EngineConfig { size, .. } = self.inner.config;
        if addresses.len() != size as usize {
            return Err(Failure::config(format!("{} addresses for {size} ranks", addresses.len())));
        }
        let Some(listeners) = self.inner.listeners.lock().take() else {
            return Err(Failure::config("connect() was called twice, or after shutdown()"));
        };
        let names = addresses.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        if size == 1 {
            self.inner.shared.start(&[], names);
            return self.tell_group(0, &[0]);
        }
        let resolved: Vec<SocketAddr> = addresses.iter().map(resolve).collect::<Result<_, _>>()?;
        self.inner.epochs.lock().addresses = addresses.to_vec();
        let members = self.inner.members();
        let begun = self.inner.lanes()?;
        self.inner.shared.start(&begun.mailboxes, names);
        for book in self.inner.books.read().iter() {
            begun.mailboxes.iter().for_each(|mailbox| mailbox.send(Command::Open(Arc::clone(book))));
        }
        let workers: Vec<u32> = self.inner.workers().iter().map(|rank| rank.0).collect();
        if workers.contains(&self.inner.config.rank) {
            self.tell_group(0, &workers)?;
        }
        self.inner.run(begun, listeners, resolved, &members)
    }

    /// Join: this worker contributes no more until every worker has called this; returns when all have, and then all take
    /// part again. Waits for the others as long as data moves at any rank.
    ///
    /// # Errors
    /// The job's failure; `Timeout` if nothing has moved anywhere for the operation timeout, which ends the job;
    /// [`Stop::Interrupted`].
    pub fn leave(&self, interrupted: &mut dyn FnMut() -> bool) -> Result<(), Stop> {
        self.alive("leave")?;
        // Released, too: what is not written yet must not come after the word that this rank has left.
        self.wait_idle("leave", true, interrupted)?;
        self.check_that_this_is_a_worker("leave")?;
        let shared = &self.inner.shared;
        if self.inner.config.workers() == 1 {
            return Ok(());
        }
        if self.inner.config.elastic {
            return Err(Failure::config(
                "join: an elastic job cannot let ranks wait for others with more batches yet; give all the same number",
            )
            .into());
        }
        self.check_that_ranks_may_leave()?;
        let _one_at_a_time = self.inner.joint.lock();
        shared.update(|state| (state.lanes_left, state.joint) = (0, Some(JointWait::Leave)));
        shared.progressed();
        for mailbox in shared.mailboxes().iter() {
            mailbox.send(Command::Leave);
        }
        let EngineConfig { lanes, operation_timeout, .. } = self.inner.config;
        let expired = || {
            let (me, seconds) = (shared.me, operation_timeout.as_secs_f64());
            let what = format!(
                "timeout: rank {me} has left (join) and waits for the others, but nothing has moved at any rank for {seconds:.1} s \
                 (operation_timeout_s)"
            );
            let hint = "If a rank only computes for so long, raise operation_timeout_s".into();
            Expired { about: None, step: None, what, hint }
        };
        let mut wait = shared.begin_wait(WaitKind::Leavers, operation_timeout);
        let all = |state: &mut State| (state.lanes_left == lanes).then_some(());
        let outcome = self.await_result(&mut wait, interrupted, all, expired);
        shared.update(|state| state.joint = None);
        let waiting = " (this rank was waiting for the others to finish: join)";
        outcome.map(|_| ()).map_err(|stop| stop.map(|failure| failure.add(waiting)))
    }

    /// What workers do together is no concern of a server.
    pub(super) fn check_that_this_is_a_worker(&self, call: &str) -> Result<(), Failure> {
        let (rank, workers) = (self.inner.config.rank, self.inner.shared.workers);
        if rank < workers {
            return Ok(());
        }
        Err(Failure::config(format!("{call}() is for workers, and rank {rank} is server {}", rank - workers)))
    }

    /// Before anybody is told: collectives need every rank.
    fn check_that_ranks_may_leave(&self) -> Result<(), Failure> {
        let books = self.inner.books.read();
        let tensors =
            books.iter().flat_map(|open| open.book.tensors.iter().map(move |tensor| (open, tensor)));
        let collective = tensors.into_iter().find(|(_, tensor)| tensor.route.collective().is_some());
        collective.map_or(Ok(()), |(open, tensor)| {
            let (book, name, route) = (&open.book.name, &tensor.name, tensor.route.name());
            Err(Failure::config(format!(
                "join: {name} of {book} is synchronised by {route}, which needs every rank in every step; use the store for \
                 what is trained with different numbers of batches"
            )))
        })
    }

    /// Waits until nothing of this rank is in flight; with `released`, until all of it is written.
    fn wait_idle(
        &self,
        call: &str,
        released: bool,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<(), Stop> {
        let books = self.inner.books.read().clone();
        for book in books {
            let tensors: Vec<u32> = (0..book.tensors.len() as u32).collect();
            self.wait(book.id, &tensors, released, interrupted)?;
        }
        self.inner.shared.check().map_err(|failure| failure.add(&format!(" (noticed in {call}())")))?;
        Ok(())
    }

    /// Ends the job for all ranks: this one has failed. Returns when they are told, or after a second.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn abort(&self, reason: &str) -> Result<(), Failure> {
        self.abort_for(Rank(self.inner.config.rank), reason)
    }

    /// As [`Engine::abort`], where another rank's program has failed, which cannot say so itself.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn abort_for(&self, culprit: Rank, reason: &str) -> Result<(), Failure> {
        self.alive("abort")?;
        let shared = &self.inner.shared;
        let known = self.inner.members().contains(culprit);
        shared.fail(Fault::of_program(if known { culprit } else { shared.me }, reason));
        let lanes = shared.mailboxes().len() as u32;
        let deadline = Instant::now() + Duration::from_nanos(FLUSH_NS);
        // Not `wait`, which would give up at once on a failure. While an epoch ends there are no lanes: those of the next one tell it.
        let mut told = false;
        while !told && Instant::now() < deadline {
            told = !shared.is_frozen() && shared.lock().lanes_told >= lanes;
            if !told {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        shared.lock().failure_raised = true;
        Ok(())
    }

    /// Whether the job goes on.
    ///
    /// # Errors
    /// The job's failure; `Config` in a forked child.
    pub fn check(&self) -> Result<(), Failure> {
        self.alive("check")?;
        self.inner.shared.check()
    }

    /// Whether the job is over: there is a verdict, settled or not, or this engine is shut down.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.inner.shared.is_failing()
    }

    /// After a failure: returns when nothing writes memory that was handed over any more. What is released only at
    /// [`Engine::shutdown`] may still be read, where a frame is half sent.
    ///
    /// # Errors
    /// `Config` if the job has not failed, or in a forked child.
    pub fn quiet(&self) -> Result<(), Failure> {
        self.alive("quiet")?;
        let shared = &self.inner.shared;
        if !shared.is_failing() {
            return Err(Failure::config("quiet() was called while the job runs"));
        }
        let lanes = shared.mailboxes().len() as u32;
        let deadline = Instant::now() + QUIET;
        while shared.lock().lanes_quiet < lanes {
            if Instant::now() >= deadline {
                self.close();
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// For a program that ends and of which only the exit status will tell how: shuts down when that is known, in order
    /// if it is 0, and otherwise telling the other ranks the reason. The engine lives until then, whoever drops it.
    ///
    /// # Errors
    /// `Config` in a forked child.
    pub fn shutdown_by_status(&self, reason: String) -> Result<(), Failure> {
        self.alive("shutdown_by_status")?;
        let engine = Self { inner: Arc::clone(&self.inner) };
        #[allow(clippy::print_stderr)] // There is nobody left who could raise it.
        let end = move |status: i32| {
            if status != 0 {
                // Only a forked child is refused, which has left the job to its parent.
                let _ = engine.abort(&format!("{reason} (exit status {status})"));
            }
            if let Err(Stop::Failed(failure)) = engine.shutdown(&mut || false) {
                eprintln!("penstock: the job did not end in order: {failure}");
            }
        };
        self.inner.outlives_handles.store(true, Ordering::Release);
        exit::with_status(Box::new(end));
        Ok(())
    }

    /// Leaves the job in order: waits for what is in flight, says goodbye, waits a bounded time for the others' goodbyes,
    /// and closes everything. Again: does nothing. After a failure it only closes.
    ///
    /// A call that comes while another one runs, from `interrupted` or another thread, does the same: when it returns no memory that was
    /// handed over is touched any more.
    ///
    /// # Errors
    /// The job's failure, if no call has raised it yet; `Timeout` if what is in flight does not come;
    /// [`Stop::Interrupted`]. Everything is closed in any case.
    pub fn shutdown(&self, interrupted: &mut dyn FnMut() -> bool) -> Result<(), Stop> {
        self.alive("shutdown")?;
        if self.inner.threads.lock().shut_down {
            return Ok(());
        }
        let raised = self.inner.shared.lock().failure_raised;
        let outcome = self.end_in_order(interrupted);
        // Whoever has closed it meanwhile has raised what there was.
        let closed = self.close();
        match outcome {
            Err(Stop::Failed(_)) if raised || !closed => Ok(()),
            outcome => outcome,
        }
    }

    /// The orderly part of a shutdown.
    fn end_in_order(&self, interrupted: &mut dyn FnMut() -> bool) -> Result<(), Stop> {
        self.wait_idle("shutdown", false, interrupted)?;
        let shared = &self.inner.shared;
        let lanes = shared.mailboxes().len() as u32;
        let mut wait = shared.begin_wait(WaitKind::OwnCalls, self.inner.config.operation_timeout);
        // Calls that nobody waits for: messages that were sent and not received yet, above all.
        let calls = || shared.calls_open.load(Ordering::Acquire);
        let expired = || {
            let what = format!("timeout: {} calls of rank {} are not done at shutdown()", calls(), shared.me);
            Expired { about: None, step: None, what, hint: String::new() }
        };
        self.await_result(&mut wait, interrupted, |_| (calls() == 0).then_some(()), expired)?;
        let mut wait = wait.then(WaitKind::Goodbyes);
        self.inner.epochs.lock().ended = true;
        loop {
            // Another epoch may begin meanwhile, with members that have yet to hear it.
            self.wait_for_members()?;
            let epoch = shared.epoch();
            shared.mailboxes().iter().for_each(|mailbox| mailbox.send(Command::Goodbye));
            let parted = |state: &mut State| {
                let ends = shared.is_frozen() || shared.epoch() != epoch;
                (ends || state.lanes_done >= lanes).then_some(ends)
            };
            if self.await_result(&mut wait, interrupted, parted, expired)? != Some(true) {
                break;
            }
        }
        if let Some(council) = shared.council() {
            council.goodbye();
        }
        Ok(())
    }

    /// Stops the threads and closes everything. Bounded: lanes flush for at most a second or two. Says whether this call has done it, and
    /// not another one before.
    fn close(&self) -> bool {
        let _one_at_a_time = self.inner.closing.lock();
        {
            let mut threads = self.inner.threads.lock();
            if threads.shut_down {
                return false;
            }
            // First: whatever is being agreed on, no epoch begins any more.
            threads.closed = true;
        }
        self.inner.end_council();
        let (lanes, admission) = self.inner.take_threads();
        for mailbox in self.inner.shared.mailboxes().iter() {
            mailbox.send(Command::Stop);
        }
        for lane in lanes {
            // A panic in a lane has been reported as the job's failure.
            let _ = lane.join();
        }
        drop(admission);
        drop(self.inner.listeners.lock().take());
        // The lanes are gone, so this is told to nobody; calls from now on raise it.
        self.inner.shared.shut();
        self.inner.shared.pool.close();
        self.inner.threads.lock().shut_down = true;
        true
    }

    /// To be called in a child right after a fork: lets go of the parent's connections. Every later call raises.
    pub fn after_fork_in_child(&self) {
        self.inner.forked.store(true, Ordering::Relaxed);
        descriptors::close_all_in_forked_child();
    }
}

impl Inner {
    /// What lanes need before they run.
    pub(super) fn lanes(&self) -> Result<IdleLanes, Failure> {
        let mut begun = IdleLanes { polls: Vec::new(), mailboxes: Vec::new() };
        for _ in 0..self.config.lanes {
            let poll = Poll::new().map_err(broken)?;
            let waker = Waker::new(poll.registry(), WAKER).map_err(broken)?;
            begun.mailboxes.push(Arc::new(Mailbox::new(waker)));
            begun.polls.push(poll);
        }
        Ok(begun)
    }

    /// Starts the threads of an epoch; `addresses` by rank.
    pub(super) fn run(
        &self,
        IdleLanes { polls, mailboxes }: IdleLanes,
        listeners: Listeners,
        addresses: Vec<SocketAddr>,
        members: &Members,
    ) -> Result<(), Failure> {
        let admission = Arc::new(OnceLock::new());
        let mut threads = self.threads.lock();
        threads.admission = Some(Arc::clone(&admission));
        let config = self.admission_config(members.epoch(), members.end() as u32);
        let gate = Admission::start(listeners, addresses, config, self.deliver(mailboxes.clone()))?;
        // Set once, before a lane runs.
        let _ = admission.set(gate);
        for (lane, (poll, mailbox)) in (0..).zip(polls.into_iter().zip(mailboxes)) {
            let EngineConfig { peer_timeout, operation_timeout, .. } = self.config;
            let timeouts = (peer_timeout, operation_timeout);
            let shared = Arc::clone(&self.shared);
            let lane_config = self.lane_config(lane, members);
            let recorder = Recorder::of(self.rings().as_deref(), lane);
            let admission = Arc::clone(&admission);
            let lane_thread = Lane::new(lane_config, recorder, timeouts, shared, poll, mailbox, admission);
            let builder = std::thread::Builder::new().name(format!("penstock-lane-{lane}"));
            threads.lanes.push(builder.spawn(move || lane_thread.run()).map_err(broken)?);
        }
        Ok(())
    }

    /// The threads that run, and what takes connections for them: whoever takes them ends them.
    pub(super) fn take_threads(&self) -> (Vec<JoinHandle<()>>, Option<Arc<OnceLock<Admission>>>) {
        let mut threads = self.threads.lock();
        (std::mem::take(&mut threads.lanes), threads.admission.take())
    }

    /// Where observations are kept, if they are.
    pub(super) fn rings(&self) -> Option<Arc<Rings>> {
        self.rings.lock().clone()
    }

    /// Who takes part at present.
    pub(super) fn members(&self) -> Arc<Members> {
        Arc::clone(&self.members.read())
    }

    /// Those of them that are workers.
    pub(super) fn workers(&self) -> Members {
        // Where members may be lost there are no servers, and newcomers have higher ranks.
        let workers = if self.config.elastic { u32::MAX } else { self.config.workers() };
        let members = self.members();
        members.iter().filter(|rank| rank.0 < workers).collect::<Members>().in_epoch(members.epoch())
    }

    fn lane_config(&self, lane: u32, members: &Members) -> node::Config {
        let EngineConfig { rank, lanes, window_bytes, priority, .. } = self.config;
        // Who leaves (join) does so in epochs of its own.
        let (members, workers) = (members.clone(), self.workers().in_epoch(0));
        node::Config { rank: Rank(rank), members, workers, lane, lanes, window_bytes, priority }
    }

    /// Of the lanes of an epoch, which connect to those of no other, of ranks below `ranks`.
    pub(super) fn admission_config(&self, epoch: u32, ranks: u32) -> AdmissionConfig {
        let config = &self.config;
        let mut job_id = config.job_id;
        job_id.iter_mut().rev().zip(epoch.to_le_bytes()).for_each(|(byte, of_epoch)| *byte ^= of_epoch);
        AdmissionConfig {
            rank: Rank(config.rank),
            ranks,
            lanes: config.lanes,
            job_id,
            secret: config.secret.clone(),
            encrypt: config.encrypt,
            shared_memory: config.shared_memory,
            congestion_control: self.congestion_control.clone(),
            handshake_timeout: config.handshake_timeout,
            peer_timeout: config.peer_timeout,
        }
    }

    fn deliver(&self, mailboxes: Vec<Arc<Mailbox>>) -> Deliver {
        let shared = Arc::clone(&self.shared);
        Box::new(move |delivery| match delivery {
            Delivery::Connected { lane, peer, transport } => {
                mailboxes[lane as usize].send(Command::Connected { peer, transport });
            }
            Delivery::Failed { fault, .. } => shared.unreachable(fault.into()),
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.is_forked() {
            // The threads do not exist here, descriptors may have been reused, locks may be held: leave all as it is.
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        if !self.inner.outlives_handles.load(Ordering::Acquire) {
            self.close();
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // For `map_err(broken)`.
fn broken(error: io::Error) -> Failure {
    Failure::config(format!("a lane cannot be started: {error}"))
}

pub(super) fn resolve((host, port): &(String, u16)) -> Result<SocketAddr, Failure> {
    let unknown = |why: String| Failure::config(format!("the address {host}:{port} cannot be used: {why}"));
    let mut found = (host.as_str(), *port).to_socket_addrs().map_err(|error| unknown(error.to_string()))?;
    found.next().ok_or_else(|| unknown("no such host".into()))
}

//! From one epoch to the next, where members may be lost: what this rank reports, what its lanes are told, what its program sees.
//!
//! An epoch has lanes, connections and a life of its own; books, tokens and waits stay. Between two epochs no lane runs, and nothing
//! begins. Why so: docs/decisions/0022-an-epoch-is-a-new-engine.md.

use super::start_end::resolve;
use super::{Engine, EngineConfig, Inner};
use crate::admission::Listeners;
use crate::council::{CouncilConfig, CouncilHandle, CouncilWord};
use crate::failure::{Failure, Stop};
use crate::mailbox::{Command, Recovering};
use crate::shared::{OpenBook, Shared, State, ns};
use parking_lot::RwLockReadGuard;
use penstock_core::agreement::{self, NextMembers};
use penstock_core::life::WaitKind;
use penstock_core::limits::NEWCOMERS_MAX;
use penstock_core::membership::{Announced, JobState, Knock, MemberReport, MembershipEntry, MembershipLog};
use penstock_core::recovery::{GivenToOthers, Report, decode_plan, recovery, states_given, states_lost};
use penstock_core::roles::Fold;
use penstock_core::{BookId, Members, Rank, SliceId, TensorId};
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long programs that stand where a newcomer is to come wait for its word that it is there.
const NEWCOMER_SAYS: Duration = Duration::from_secs(1);
/// Tells the connections of the council from those of lanes.
const COUNCIL: u32 = u32::MAX;

/// What an engine needs to get from epoch to epoch.
#[derive(Default)]
pub(super) struct Epochs {
    /// Of each epoch, where members may be lost.
    log: Option<MembershipLog>,
    /// The last step that this rank's program has begun.
    begun: u64,
    /// It has come to its end: this rank waits for goodbyes, and the others may go on without it.
    pub(super) ended: bool,
    /// Who has asked this rank to take part, and has no rank yet.
    knocks: BTreeSet<Knock>,
    /// Newcomers that this rank hears.
    heard: Vec<Rank>,
    /// This rank is one.
    newcomer: bool,
    /// Where slices were when it came.
    first: Report,
    /// By rank, of councils.
    councils: Vec<(String, u16)>,
    /// By rank, of the present lanes.
    pub(super) addresses: Vec<(String, u16)>,
    /// Until the council begins.
    council: Option<Listeners>,
    council_port: Option<u16>,
    /// Of the lanes to come.
    next: Option<Listeners>,
    driver: Option<JoinHandle<()>>,
}

impl Epochs {
    /// With a listener for the council, where members may be lost.
    pub(super) fn bind(config: &EngineConfig, congestion_control: Option<&str>) -> io::Result<Self> {
        if !config.elastic || config.size == 1 {
            return Ok(Self::default());
        }
        let (council, port) = listen(config, congestion_control)?;
        let log = Some(MembershipLog::new((0..config.size).map(Rank).collect()));
        Ok(Self { council: Some(council), council_port: Some(port), log, ..Self::default() })
    }
}

/// Where that is; nowhere if there is no such host, or nobody has come yet: whoever dials it finds out.
fn somewhere(address: &(String, u16)) -> SocketAddr {
    let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
    if address.0.is_empty() { nowhere } else { resolve(address).unwrap_or(nowhere) }
}

/// Of each slice the progress of whoever has come furthest.
fn furthest(reports: &[(Rank, Report)]) -> Report {
    let Some((_, most)) = reports.iter().max_by_key(|(_, report)| report.len()) else { return Report::new() };
    let of_slice = |at: usize, slice: usize| {
        let reported = reports.iter().filter_map(|(_, report)| report.get(at)?.1.get(slice)).copied();
        reported.max_by_key(|progress| progress.done_seq()).unwrap_or_default()
    };
    let of_book = |(at, (book, slices)): (usize, &(_, Vec<_>))| {
        (*book, (0..slices.len()).map(|slice| of_slice(at, slice)).collect())
    };
    most.iter().enumerate().map(of_book).collect()
}

/// Listens at any port of the configured host.
fn listen(config: &EngineConfig, congestion_control: Option<&str>) -> io::Result<(Listeners, u16)> {
    let addresses: Vec<SocketAddr> = (config.bind_host.as_str(), 0).to_socket_addrs()?.collect();
    let listener = TcpListener::bind(&addresses[..])?;
    let port = listener.local_addr()?.port();
    Ok((Listeners::new(listener, congestion_control)?, port))
}

impl Engine {
    /// Where this rank's council is to be reached; none where members may not be lost.
    #[must_use]
    pub fn council_port(&self) -> Option<u16> {
        self.inner.epochs.lock().council_port
    }

    /// From now on the others go on when members are lost: they agree on who is left, and finish what they have begun. `addresses` is by rank where the
    /// councils are; `enough` members must agree, or more than half of the last ones. With `most` members no newcomer comes until one is lost.
    ///
    /// # Errors
    /// `Config` if the engine is not elastic, or it was called before.
    pub fn go_on_after_losses(
        &self,
        addresses: &[(String, u16)],
        enough: Option<u32>,
        most: Option<u32>,
    ) -> Result<(), Failure> {
        self.alive("go_on_after_losses")?;
        let (size, members) = (self.inner.config.size, self.inner.members());
        let Some(listeners) =
            self.inner.epochs.lock().council.take().filter(|_| addresses.len() == size as usize)
        else {
            return Err(Failure::config(format!(
                "go_on_after_losses: the engine is not elastic, has a council already, or {} addresses were given for {size} ranks",
                addresses.len()
            )));
        };
        {
            let mut epochs = self.inner.epochs.lock();
            epochs.log = epochs.log.take().map(|log| log.limited_to(most));
        }
        self.begin_council(listeners, (*members).clone(), addresses, enough, None)
    }

    /// Starts the council, and what carries out what it wants.
    fn begin_council(
        &self,
        listeners: Listeners,
        members: Members,
        councils: &[(String, u16)],
        enough: Option<u32>,
        newcomer: Option<Vec<u8>>,
    ) -> Result<(), Failure> {
        let ranks = self.inner.config.ranks_most();
        let mut addresses: Vec<SocketAddr> = councils.iter().map(somewhere).collect();
        addresses.resize(ranks as usize, somewhere(&(String::new(), 0)));
        let mut admission = self.inner.admission_config(COUNCIL, ranks);
        (admission.lanes, admission.shared_memory) = (1, false);
        let config = CouncilConfig { members, enough, addresses, admission, newcomer };
        self.inner.epochs.lock().councils = councils.to_vec();
        let (to_driver, words) = mpsc::channel();
        let council = CouncilHandle::start(listeners, config, Arc::clone(&self.inner.shared), to_driver)?;
        self.inner.shared.with_council(council);
        let inner = Arc::clone(&self.inner);
        let drive = move || words.into_iter().for_each(|word| inner.carry_out(word));
        let driver = std::thread::Builder::new().name("penstock-epochs".into()).spawn(drive);
        let driver = driver.map_err(|error| Failure::config(format!("epochs cannot begin: {error}")))?;
        self.inner.epochs.lock().driver = Some(driver);
        Ok(())
    }

    /// A newcomer has asked this rank to take part, by a number that it has drawn: the members agree on its rank ([`Engine::announced`]).
    ///
    /// # Errors
    /// `Config` if members may not be lost.
    pub fn knock(&self, knock: Knock) -> Result<(), Failure> {
        self.alive("knock")?;
        let Some(council) = self.inner.shared.council() else {
            return Err(Failure::config("knock: nobody can come to a job that is not elastic"));
        };
        let mut epochs = self.inner.epochs.lock();
        if epochs.log.as_ref().is_some_and(|log| log.announced().iter().any(|one| one.knock == knock)) {
            return Ok(()); // it has a rank
        }
        if epochs.log.as_ref().is_some_and(MembershipLog::is_full) {
            return Err(Failure::config(format!(
                "knock: {NEWCOMERS_MAX} newcomers have had ranks, and there are no more; begin the job anew"
            )));
        }
        epochs.knocks.insert(knock);
        drop(epochs);
        council.end_epoch(self.epoch(), Vec::new(), "a newcomer has asked".into());
        Ok(())
    }

    /// Newcomers that have a rank, and are no members yet.
    #[must_use]
    pub fn announced(&self) -> Vec<Announced> {
        self.inner.epochs.lock().log.as_ref().map_or_else(Vec::new, |log| log.announced().to_vec())
    }

    /// What a newcomer must know of the job.
    ///
    /// # Errors
    /// `Config` if members may not be lost.
    pub fn job_state(&self) -> Result<JobState, Failure> {
        self.alive("job_state")?;
        let _epoch = self.enter_epoch()?;
        let epochs = self.inner.epochs.lock();
        let Some(log) = epochs.log.clone() else {
            return Err(Failure::config("job_state: nobody can come to a job that is not elastic"));
        };
        Ok(JobState { members: (*self.inner.members()).clone(), log, councils: epochs.councils.clone() })
    }

    /// As a newcomer, whose rank is announced: takes part in the job that is in this state. Returns once this rank is a member, or after `limit`,
    /// and whether it is one; others are to reach it at `host`.
    ///
    /// # Errors
    /// `Config` if this rank is none that is announced; `PeerLost` if the others go on without it; [`Stop::Interrupted`].
    pub fn come(
        &self,
        state: JobState,
        host: &str,
        enough: Option<u32>,
        limit: Duration,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<bool, Stop> {
        self.alive("come")?;
        let me = Rank(self.inner.config.rank);
        let JobState { members, log, mut councils } = state;
        if members.contains(me) || !log.announced().iter().any(|one| one.rank == me) {
            return Err(
                Failure::config(format!("come: rank {me} is none that has asked to take part")).into()
            );
        }
        let broken = |error: io::Error| Failure::config(format!("lanes cannot be listened for: {error}"));
        let (lanes, port) =
            listen(&self.inner.config, self.inner.congestion_control.as_deref()).map_err(broken)?;
        let (council, report) = {
            let mut epochs = self.inner.epochs.lock();
            let (council, council_port) = (epochs.council.take(), epochs.council_port.unwrap_or(0));
            (epochs.next, epochs.newcomer, epochs.log) = (Some(lanes), true, Some(log));
            let report = MemberReport { host: host.into(), port, council_port, ..MemberReport::default() };
            let end = councils.len().max(me.index() + 1);
            councils.resize(end, (String::new(), 0));
            councils[me.index()] = (host.into(), council_port);
            epochs.addresses = vec![(String::new(), 0); end];
            epochs.addresses[me.index()] = (host.into(), port);
            (council, report)
        };
        let Some(council) = council else {
            return Err(Failure::config(
                "come: this rank has a council already, or is not of an elastic job",
            )
            .into());
        };
        *self.inner.members.write() = Arc::new(members.clone());
        self.inner.shared.hold();
        self.begin_council(council, members, &councils, enough, Some(report.encode()))?;
        self.await_epoch(limit, interrupted, |shared| !shared.is_frozen())
    }

    /// The program is about to begin this step, with nothing under way: waits for newcomers that count from it, until they have come, or it is
    /// agreed that they do not.
    ///
    /// # Errors
    /// As of every wait for the next epoch; [`Stop::Interrupted`].
    pub fn await_newcomers(&self, step: u64, interrupted: &mut dyn FnMut() -> bool) -> Result<(), Stop> {
        loop {
            let guard = self.enter_epoch()?;
            let epoch = self.epoch();
            let awaited = {
                let mut epochs = self.inner.epochs.lock();
                // Nobody is to come for this step from now on who is not expected yet.
                epochs.begun = epochs.begun.max(step);
                epochs.log.as_ref().map_or_else(Vec::new, |log| log.awaited(step))
            };
            drop(guard);
            let Some(council) = self.inner.shared.council().filter(|_| !awaited.is_empty()) else {
                return Ok(());
            };
            let over = |shared: &Shared| shared.epoch() != epoch;
            // They say in each epoch anew that they are there, and hear of it later than this rank.
            let heard = |shared: &Shared| {
                over(shared) || awaited.iter().all(|rank| self.inner.epochs.lock().heard.contains(rank))
            };
            if self.await_epoch(NEWCOMER_SAYS, interrupted, heard)? && over(&self.inner.shared) {
                continue;
            }
            council.ready(epoch, awaited);
            if !self.await_epoch(self.inner.config.operation_timeout, interrupted, over)? {
                council.overdue(epoch);
                self.await_epoch(self.longest(), interrupted, over)?;
            }
        }
    }

    /// Waits so long; whether it came. By a clock of its own: of the engine's waits none is over while members agree.
    fn await_epoch(
        &self,
        limit: Duration,
        interrupted: &mut dyn FnMut() -> bool,
        came: impl Fn(&Shared) -> bool,
    ) -> Result<bool, Stop> {
        let shared = &self.inner.shared;
        let deadline = Instant::now() + limit;
        let mut wait = shared.begin_wait(WaitKind::Look, limit);
        let over = |_: &mut State| {
            let came = came(shared);
            (came || Instant::now() >= deadline).then_some(came)
        };
        Ok(shared.wait(&mut wait, interrupted, over)?.came().unwrap_or(false))
    }

    fn longest(&self) -> Duration {
        Duration::from_nanos(agreement::longest_ns(ns(self.inner.config.peer_timeout)))
    }

    /// Who takes part at present.
    #[must_use]
    pub fn members(&self) -> Vec<u32> {
        self.inner.members().iter().map(|rank| rank.0).collect()
    }

    /// How many epochs have ended.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.inner.shared.epoch()
    }

    /// Who took part in each epoch so far, this one included, and from which of the program's steps on; nothing where members may not be
    /// lost.
    #[must_use]
    pub fn membership_log(&self) -> Vec<MembershipEntry> {
        self.inner.epochs.lock().log.as_ref().map_or_else(Vec::new, |log| log.entries().to_vec())
    }

    /// The program begins this step, from 1, or deals samples for it: members that are chosen later count from a later one. Waits
    /// while members agree.
    ///
    /// # Errors
    /// As of every wait for the next epoch.
    pub fn begin_step(&self, step: u64) -> Result<(), Failure> {
        let _epoch = self.enter_epoch()?;
        let mut epochs = self.inner.epochs.lock();
        epochs.begun = epochs.begun.max(step);
        Ok(())
    }

    /// Waits for an epoch that is not about to end. It does not end while the guard lives.
    pub(super) fn enter_epoch(&self) -> Result<RwLockReadGuard<'_, ()>, Failure> {
        loop {
            let guard = self.inner.gate.read();
            if !self.inner.shared.is_frozen() {
                return Ok(guard);
            }
            drop(guard);
            self.wait_for_members()?;
        }
    }

    /// Returns when no epoch is about to end: nothing can be begun then.
    pub(super) fn wait_for_members(&self) -> Result<(), Failure> {
        let shared = &self.inner.shared;
        shared.check()?;
        if !shared.is_frozen() {
            return Ok(());
        }
        // The council gives up earlier.
        let came = self.await_epoch(self.longest(), &mut || false, |shared| !shared.is_frozen());
        let came = came.map_err(|stop| match stop {
            Stop::Failed(failure) => *failure,
            Stop::Interrupted => Failure::config("interrupted"),
        })?;
        came.then_some(())
            .ok_or_else(|| Failure::config("an epoch neither ends nor fails, which is a bug in Penstock"))
    }
}

impl Inner {
    /// Does what the council wants. On a thread of its own: lanes end and begin meanwhile.
    fn carry_out(&self, word: CouncilWord) {
        let outcome = match word {
            CouncilWord::Freeze => self.freeze(),
            CouncilWord::Chosen(choice) => self.begin(&choice),
            CouncilWord::Heard(newcomers) => {
                self.epochs.lock().heard = newcomers;
                self.shared.update(|_| ());
                self.let_newcomers_in();
                Ok(())
            }
            CouncilWord::Failed(failure) => Err(failure),
        };
        if let Err(failure) = outcome {
            self.end_lanes();
            self.shared.fail_alone(failure);
        }
    }

    /// This epoch ends: its lanes end, and the council is told what there is.
    fn freeze(&self) -> Result<(), Failure> {
        {
            let _nobody_submits = self.gate.write();
            self.shared.freeze();
        }
        self.end_lanes();
        let broken =
            |error: io::Error| Failure::config(format!("the next epoch cannot be listened for: {error}"));
        let (mut listeners, port) =
            listen(&self.config, self.congestion_control.as_deref()).map_err(broken)?;
        if self.config.shared_memory {
            let job_id = self.admission_config(self.shared.epoch() + 1, 0).job_id;
            listeners = listeners.and_on_host(&self.config.secret, &job_id, Rank(self.config.rank));
        }
        let books = self.books.read();
        let of_book = |open: &Arc<OpenBook>| {
            let tensors = 0..open.tensors.len() as TensorId;
            (open.id, tensors.flat_map(|tensor| open.progress(tensor)).collect())
        };
        let mut report: Report = books.iter().map(of_book).collect();
        let mut epochs = self.epochs.lock();
        epochs.next = Some(listeners);
        // What a newcomer has yet to open is where it was.
        report.extend(epochs.first.iter().filter(|(book, _)| usize::from(*book) >= books.len()).cloned());
        let me = self.config.rank as usize;
        let report = MemberReport {
            host: epochs.councils[me].0.clone(),
            port,
            council_port: epochs.council_port.unwrap_or(0),
            begun: epochs.begun,
            knocks: epochs.knocks.iter().copied().collect(),
            slices: report,
        };
        drop(epochs);
        if let Some(council) = self.shared.council() {
            council.frozen(report.encode());
        }
        Ok(())
    }

    /// Another epoch is to end if there is a newcomer whom all may wait for, a place for it, and nobody is waited for yet; or one without a rank.
    fn let_newcomers_in(&self) {
        let epochs = self.epochs.lock();
        let Some(log) = epochs.log.as_ref().filter(|_| !epochs.newcomer) else { return };
        let waits = log.announced().iter().any(|one| one.step.is_some());
        let comes = |one: &Announced| !waits && log.has_place() && epochs.heard.contains(&one.rank);
        let why = if log.announced().iter().any(comes) {
            "a newcomer is prepared"
        } else if epochs.knocks.is_empty() {
            return;
        } else {
            "a newcomer has asked"
        };
        drop(epochs);
        if let Some(council) = self.shared.council() {
            council.end_epoch(self.shared.epoch(), Vec::new(), why.into());
        }
    }

    /// Ends the lanes at once, and with them all connections.
    fn end_lanes(&self) {
        let (lanes, admission) = self.take_threads();
        self.shared.mailboxes().iter().for_each(|mailbox| mailbox.send(Command::Halt));
        for lane in lanes {
            // A panic in a lane has been reported.
            let _ = lane.join();
        }
        drop(admission);
    }

    /// The next epoch begins, with these members.
    fn begin(&self, choice: &NextMembers) -> Result<(), Failure> {
        let me = Rank(self.config.rank);
        let members: Members = choice.ranks.iter().copied().collect();
        let members = members.in_epoch(choice.epoch + 1);
        let before = self.members();
        let reports = self.read_plan(&choice.plan)?;
        let addresses = self.take_up(&reports, choice);
        *self.members.write() = Arc::new(members.clone());
        if !members.contains(me) {
            let epochs = self.epochs.lock();
            if epochs.ended {
                drop(epochs);
                // There is nobody left to say goodbye to.
                self.end_lanes();
                self.shared.thaw();
                return Ok(());
            }
            let is_announced = |log: &MembershipLog| log.announced().iter().any(|one| one.rank == me);
            let still_comes = epochs.newcomer && epochs.log.as_ref().is_some_and(is_announced);
            return if still_comes { Ok(()) } else { Err(choice.without(me).into()) };
        }
        let resolved: Vec<SocketAddr> = addresses.iter().take(members.end()).map(somewhere).collect();
        let of_slices: Vec<(Rank, Report)> = reports
            .into_iter()
            .filter(|(rank, _)| before.contains(*rank))
            .map(|(rank, report)| (rank, report.slices))
            .collect();
        let results = recovery(&of_slices).map_err(Failure::config)?;
        if self.threads.lock().closed {
            return Ok(());
        }
        let books: Vec<Arc<OpenBook>> =
            self.books.read().iter().map(|open| Arc::new(open.among(&members))).collect();
        let keepers = |book: BookId, slice: SliceId| {
            let open =
                books.get(usize::from(book)).filter(|open| open.book.roles.rules.fold == Fold::Updated);
            open.map(|open| open.book.slices[slice as usize].keepers().collect())
        };
        let states = states_given(&of_slices, keepers).map_err(|lost| self.states_lost(&lost, &members))?;
        self.shared.begin_epoch(&members);
        let begun = self.lanes()?;
        *self.books.write() = books.clone();
        let names = addresses.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        let next = {
            let mut epochs = self.epochs.lock();
            if std::mem::take(&mut epochs.newcomer) {
                epochs.first = furthest(&of_slices);
            }
            epochs.next.take()
        };
        let Some(listeners) = next else {
            return Err(Failure::config("an epoch began that none has ended before"));
        };
        let _nobody_submits = self.gate.write();
        self.shared.start(&begun.mailboxes, names);
        self.tell_lanes(&books, &members);
        for (lane, mailbox) in (0..).zip(&begun.mailboxes) {
            let recovering = self.recovering(lane, &books, &results, &states);
            mailbox.send(Command::Recover(Box::new(recovering)));
        }
        self.run(begun, listeners, resolved, &members)?;
        if let Some(bytes_per_s) = self.shared.line_bytes_per_s() {
            self.shared.set_line(bytes_per_s);
        }
        self.shared.live(|life, _| life.lanes_begin());
        self.shared.thaw();
        self.let_newcomers_in();
        Ok(())
    }

    /// What members and newcomers have said of themselves.
    fn read_plan(&self, plan: &[u8]) -> Result<Vec<(Rank, MemberReport)>, Failure> {
        let ranks = self.config.ranks_most();
        let reports = decode_plan(plan).map_err(Failure::config)?.into_iter().map(|(rank, bytes)| {
            if rank.0 >= ranks {
                return Err(Failure::config(format!(
                    "a plan for the next epoch with a report of rank {rank}"
                )));
            }
            Ok((rank, MemberReport::decode(bytes).map_err(Failure::config)?))
        });
        reports.collect()
    }

    /// Keeps where everybody is, and who takes part from which step on; by rank where the next lanes are.
    fn take_up(&self, reports: &[(Rank, MemberReport)], choice: &NextMembers) -> Vec<(String, u16)> {
        let mut epochs = self.epochs.lock();
        let epochs = &mut *epochs;
        for (rank, report) in reports {
            let end = epochs.addresses.len().max(rank.index() + 1);
            epochs.addresses.resize(end, (String::new(), 0));
            epochs.addresses[rank.index()] = (report.host.clone(), report.port);
            epochs.councils.resize(epochs.councils.len().max(end), (String::new(), 0));
            let council = (report.host.clone(), report.council_port);
            let known = std::mem::replace(&mut epochs.councils[rank.index()], council.clone());
            if let Some(handle) = self.shared.council().filter(|_| known != council) {
                handle.moved(*rank, somewhere(&council));
            }
        }
        if let Some(log) = &mut epochs.log {
            log.begin(reports, &choice.ranks, choice.admits);
            epochs.heard.clear(); // they say so again
            let full = log.is_full();
            epochs.knocks.retain(|knock| !full && !log.announced().iter().any(|one| one.knock == *knock));
        }
        epochs.addresses.clone()
    }

    /// A newcomer's book goes on where those of the others were when it came.
    pub(super) fn go_on_from_others(&self, open: &OpenBook) -> Result<(), Failure> {
        let epochs = self.epochs.lock();
        let Some((_, slices)) = epochs.first.iter().find(|(book, _)| *book == open.id) else { return Ok(()) };
        let name = &open.book.name;
        if slices.len() != open.book.slices.len() {
            let (theirs, ours) = (slices.len(), open.book.slices.len());
            return Err(Failure::config(format!(
                "{name}: it has {theirs} slices in the job, and {ours} here: another model?"
            )));
        }
        (0..).zip(slices).for_each(|(slice, progress)| open.go_on_from(slice, *progress));
        Ok(())
    }

    /// What lanes must know before they take anything up.
    fn tell_lanes(&self, books: &[Arc<OpenBook>], members: &Members) {
        let mut agreed = self.agreed.lock();
        // Of groups those stay that are whole.
        agreed.groups.retain(|id, ranks| *id == 0 || ranks.iter().all(|rank| members.contains(*rank)));
        let workers: Vec<Rank> = self.workers().iter().collect();
        agreed.groups.insert(0, workers);
        let me = Rank(self.config.rank);
        let place = |ranks: &Vec<Rank>| {
            let me = ranks.iter().position(|rank| *rank == me).unwrap_or(ranks.len());
            (me as u32, ranks.len() as u32)
        };
        agreed.places = agreed.groups.iter().map(|(id, ranks)| (*id, place(ranks))).collect();
        agreed.forget_choices();
        for mailbox in self.shared.mailboxes().iter() {
            for book in books {
                mailbox.send(Command::Open(Arc::clone(book)));
                if let Some(places) = book.places.lock().clone() {
                    mailbox.send(Command::Places { book: book.id, places });
                }
            }
            for (id, members) in &agreed.groups {
                mailbox.send(Command::Group { id: *id, members: members.clone() });
            }
        }
    }

    /// What goes on of the last epoch's rounds, as far as one lane goes.
    fn recovering(
        &self,
        lane: u32,
        books: &[Arc<OpenBook>],
        results: &[GivenToOthers],
        states: &[GivenToOthers],
    ) -> Recovering {
        let me = Rank(self.config.rank);
        // A newcomer has no books yet, and lacks nothing.
        let in_lane = |given: &GivenToOthers| {
            let open = books.get(usize::from(given.book))?;
            Some(open).filter(|open| open.book.slices[given.slice as usize].lane == lane)
        };
        let is_mine = |given: &&GivenToOthers| given.by == me || given.to.contains(&me);
        let states = states.iter().filter(|given| in_lane(given).is_some()).filter(is_mine).cloned();
        let (gives, lacks, again) = (Vec::new(), Vec::new(), Vec::new());
        let (entries, words) = (Vec::new(), Vec::new());
        let mut all = Recovering { gives, lacks, again, entries, states: states.collect(), words };
        let mut lacking = BTreeSet::new();
        for given in results {
            let Some(open) = in_lane(given) else { continue };
            let slice = &open.book.slices[given.slice as usize];
            let step = open.tensors[slice.tensor as usize].step.load(Ordering::Relaxed);
            if given.by == me {
                all.gives.push((given.clone(), step, open.kept(given.slice)));
            } else if given.to.contains(&me)
                && let Some(submission) = open.unfinished(slice.tensor)
            {
                lacking.insert((given.book, given.slice));
                all.lacks.push((given.clone(), submission));
            }
        }
        for open in books {
            for tensor in 0..open.tensors.len() as TensorId {
                let Some(submission) = open.unfinished(tensor) else { continue };
                let seq = submission.seq;
                let slices =
                    open.open_slices(tensor, lane).filter(|slice| !lacking.contains(&(open.id, *slice)));
                let slices = slices.filter(|slice| self.gives(open.id, *slice, seq)).collect();
                all.again.push((submission, slices));
            }
            all.entries
                .extend(open.take_entries(lane).into_iter().map(|(slice, entry)| (open.id, slice, entry)));
            all.words.extend(open.word_again(lane, |slice| lacking.contains(&(open.id, slice))));
        }
        all
    }

    /// Nobody of the next members has what owners kept of these slices: the job cannot go on.
    fn states_lost(&self, lost: &[(BookId, SliceId)], members: &Members) -> Failure {
        let books = self.books.read();
        let kept_by = |(book, slice): &(BookId, SliceId)| {
            let at = books.get(usize::from(*book)).map(|open| open.book.slices[*slice as usize].clone());
            at.map_or_else(Vec::new, |at| [Some(at.owner), at.replica].into_iter().flatten().collect())
        };
        let gone: BTreeSet<Rank> =
            lost.iter().flat_map(kept_by).filter(|rank| !members.contains(*rank)).collect();
        let names: BTreeSet<_> =
            lost.iter().filter_map(|(book, _)| Some(&books.get(usize::from(*book))?.book.name)).collect();
        let names = names.into_iter().cloned().collect::<Vec<_>>().join(", ");
        let gone: Vec<Rank> = gone.into_iter().collect();
        states_lost(&names, lost.len(), &gone).into()
    }

    /// No epoch begins any more.
    pub(super) fn end_council(&self) {
        if let Some(council) = self.shared.council() {
            council.stop();
        }
        let driver = self.epochs.lock().driver.take();
        if let Some(driver) = driver.filter(|driver| driver.thread().id() != std::thread::current().id()) {
            // It ends with the council's channel.
            let _ = driver.join();
        }
    }
}

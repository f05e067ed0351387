//! From one epoch to the next, where members may be lost: what this rank reports, what its lanes are told, what its program sees.
//!
//! An epoch has lanes, connections and a life of its own; books, tokens and waits stay. Between two epochs no lane runs, and nothing
//! begins. Why so: docs/decisions/0022-an-epoch-is-a-new-engine.md.

use super::start_end::resolve;
use super::{Engine, EngineConfig, Inner};
use crate::admission::Listeners;
use crate::council::{CouncilConfig, CouncilHandle, CouncilWord};
use crate::failure::Failure;
use crate::mailbox::{Command, Recovering};
use crate::shared::{OpenBook, State, ns};
use parking_lot::RwLockReadGuard;
use penstock_core::agreement::{self, NextMembers};
use penstock_core::life::WaitKind;
use penstock_core::membership::{MembershipEntry, MembershipLog};
use penstock_core::recovery::{self, Report, ResultGiven, decode_plan, recovery};
use penstock_core::{Members, Rank, TensorId};
use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Tells the connections of the council from those of lanes.
const COUNCIL: u32 = u32::MAX;

/// What an engine needs to get from epoch to epoch.
#[derive(Default)]
pub(super) struct Epochs {
    /// Of each epoch, where members may be lost.
    log: Option<MembershipLog>,
    /// The last step that this rank's program has begun.
    begun: u64,
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
    /// councils are; `enough` members must agree, or more than half of the last ones.
    ///
    /// # Errors
    /// `Config` if the engine is not elastic, or it was called before.
    pub fn go_on_after_losses(
        &self,
        addresses: &[(String, u16)],
        enough: Option<u32>,
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
        let addresses: Vec<SocketAddr> = addresses.iter().map(resolve).collect::<Result<_, _>>()?;
        let mut admission = self.inner.admission_config(COUNCIL);
        (admission.lanes, admission.shared_memory) = (1, false);
        let config = CouncilConfig { members: (*members).clone(), enough, addresses, admission };
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
        let longest = Duration::from_nanos(agreement::longest_ns(ns(self.inner.config.peer_timeout)));
        let mut wait = shared.begin_wait(WaitKind::Look, longest);
        let over = |_: &mut State| (!shared.is_frozen()).then_some(());
        let waited = shared.wait(&mut wait, &mut || false, over).map_err(|stop| match stop {
            crate::failure::Stop::Failed(failure) => *failure,
            crate::failure::Stop::Interrupted => Failure::config("interrupted"),
        })?;
        // The council gives up earlier.
        waited
            .came()
            .ok_or_else(|| Failure::config("an epoch neither ends nor fails, which is a bug in Penstock"))
    }
}

impl Inner {
    /// Does what the council wants. On a thread of its own: lanes end and begin meanwhile.
    fn carry_out(&self, word: CouncilWord) {
        let outcome = match word {
            CouncilWord::Freeze => self.freeze(),
            CouncilWord::Chosen(choice) => self.begin(&choice),
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
        let (listeners, port) = listen(&self.config, self.congestion_control.as_deref()).map_err(broken)?;
        let books = self.books.read();
        let of_book = |open: &Arc<OpenBook>| {
            let tensors = 0..open.tensors.len() as TensorId;
            (open.id, tensors.flat_map(|tensor| open.progress(tensor)).collect())
        };
        let report: Report = books.iter().map(of_book).collect();
        let mut epochs = self.epochs.lock();
        epochs.next = Some(listeners);
        let bytes =
            [&port.to_le_bytes()[..], &epochs.begun.to_le_bytes(), &recovery::encode(&report)].concat();
        drop(epochs);
        if let Some(council) = self.shared.council() {
            council.frozen(bytes);
        }
        Ok(())
    }

    /// Ends the lanes at once, and with them all connections.
    fn end_lanes(&self) {
        let (lanes, admission) = {
            let mut threads = self.threads.lock();
            (std::mem::take(&mut threads.lanes), threads.admission.take())
        };
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
        if !members.contains(me) {
            return Err(choice.without(me).into());
        }
        let (addresses, reports) = self.read_plan(&members, &choice.plan)?;
        let resolved: Vec<SocketAddr> = addresses.iter().map(resolve).collect::<Result<_, _>>()?;
        let of_slices: Vec<(Rank, Report)> =
            reports.iter().map(|(rank, _, report)| (*rank, report.clone())).collect();
        let found = recovery(&of_slices).map_err(Failure::config)?;
        if self.threads.lock().closed {
            return Ok(());
        }
        *self.members.write() = Arc::new(members.clone());
        self.shared.begin_epoch(&members, self.config.lanes);
        let begun = self.lanes()?;
        let books: Vec<Arc<OpenBook>> =
            self.books.read().iter().map(|open| Arc::new(open.among(&members))).collect();
        *self.books.write() = books.clone();
        let names = addresses.iter().map(|(host, port)| format!("{host}:{port}")).collect();
        let next = {
            let mut epochs = self.epochs.lock();
            if let Some(log) = &mut epochs.log {
                log.begin(&reports);
            }
            epochs.addresses = addresses;
            epochs.next.take()
        };
        let Some(listeners) = next else {
            return Err(Failure::config("an epoch began that none has ended before"));
        };
        let _nobody_submits = self.gate.write();
        self.shared.start(&begun.mailboxes, names);
        self.tell_lanes(&books, &members);
        for (lane, mailbox) in (0..).zip(&begun.mailboxes) {
            let recovering = self.recovering(lane, &books, &found);
            mailbox.send(Command::Recover(Box::new(recovering)));
        }
        self.run(begun, listeners, resolved, &members)?;
        if let Some(bytes_per_s) = self.shared.line_bytes_per_s() {
            self.shared.set_line(bytes_per_s);
        }
        self.shared.thaw();
        Ok(())
    }

    /// Where the lanes of the next members are, and how far each has come: its program, and its slices.
    #[allow(clippy::type_complexity)] // Two tables that belong together.
    fn read_plan(
        &self,
        members: &Members,
        plan: &[u8],
    ) -> Result<(Vec<(String, u16)>, Vec<(Rank, u64, Report)>), Failure> {
        let mut addresses = self.epochs.lock().addresses.clone();
        let mut reports = Vec::new();
        for (rank, bytes) in decode_plan(plan).map_err(Failure::config)? {
            let head = bytes.split_first_chunk::<2>().filter(|_| members.contains(rank));
            let head = head.and_then(|(port, rest)| Some((port, rest.split_first_chunk::<8>()?)));
            let Some((port, (begun, report))) = head else {
                return Err(Failure::config(format!(
                    "a plan for the next epoch with a report of rank {rank}"
                )));
            };
            addresses[rank.index()].1 = u16::from_le_bytes(*port);
            let report = recovery::decode(report).map_err(Failure::config)?;
            reports.push((rank, u64::from_le_bytes(*begun), report));
        }
        Ok((addresses, reports))
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
    fn recovering(&self, lane: u32, books: &[Arc<OpenBook>], found: &[ResultGiven]) -> Recovering {
        let me = Rank(self.config.rank);
        let mut all = Recovering { gives: Vec::new(), lacks: Vec::new(), again: Vec::new() };
        let mut lacking = BTreeSet::new();
        for given in found {
            let open = &books[usize::from(given.book)];
            let slice = &open.book.slices[given.slice as usize];
            if slice.lane != lane {
                continue;
            }
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
                let slices =
                    open.open_slices(tensor, lane).filter(|slice| !lacking.contains(&(open.id, *slice)));
                let slices = slices.collect();
                all.again.push((submission, slices));
            }
        }
        all
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

//! A simulation: nodes, network and programs, bound together by an agenda and watched by the checkers.

mod driver;
mod faults;
mod life;
mod watch;
mod worker;

use crate::Report;
use crate::agenda::Agenda;
use crate::check::journey::Journeys;
use crate::check::ledger::Ledger;
use crate::check::link::{Identity, LinkModel};
use crate::check::rest::check_bytes;
use crate::check::{Checker, Violation, check};
use crate::memory::{Chunk, SimMemory};
use crate::network::{ConnectionId, Fabric, Moved};
use crate::program::{Sabotage, Setup};
use crate::random::Random;
use life::Fate;
use penstock_core::Members;
use penstock_core::node::{Action, Config, Node};
use penstock_core::observe::Counters;
use penstock_core::types::Rank;
use penstock_core::wire::Outgoing;
use std::collections::VecDeque;
use std::rc::Rc;
use watch::Watcher;
use worker::{Worker, WorkerPhase};

/// Events after which a run counts as going round in circles.
const EVENTS_MAX: u64 = 50_000_000;

/// What happens.
#[derive(Debug, Clone, Copy)]
enum Happening {
    /// A rank has computed what it was computing.
    Resume(Rank),
    /// A server is told by worker 0 that a step has come to its end.
    Told(Rank),
    /// A lane looks for frames for a connection.
    Fill(ConnectionId),
    Moved(Moved),
    /// A rank reads what has come.
    Read(ConnectionId, u64),
    /// What goes wrong in the scenario does.
    Fault,
    /// A rank goes on that was stopped for so long.
    GoOn(Rank, u64),
    /// A connection ends, behind all that has come.
    Cut(ConnectionId),
    /// A lane looks at the clock.
    Tick(Rank, u32),
    /// A rank's life may have something to say.
    Look(Rank),
    /// A rank's process begins to end; what is not written by then is lost.
    Exit(Rank),
    Close(Rank),
}

impl From<Moved> for Happening {
    fn from(moved: Moved) -> Self {
        Self::Moved(moved)
    }
}

/// A simulation. See the crate's documentation.
pub struct World<M: SimMemory> {
    setup: Rc<Setup>,
    agenda: Agenda<Happening>,
    network: Fabric,
    /// By rank and lane.
    nodes: Vec<Node<M, Watcher>>,
    models: Vec<LinkModel>,
    workers: Vec<Worker>,
    fates: Vec<Fate>,
    /// By connection: frames that are not the node's, given out and not begun.
    said: Vec<VecDeque<Outgoing<Chunk>>>,
    ledger: Ledger,
    journeys: Journeys,
    random: Random,
    /// Reused from step to step.
    actions: Vec<Action<Chunk>>,
    /// Whether the fault that is built in has been committed.
    sabotaged: bool,
    /// What the built-in faults keep.
    hoard: Vec<Chunk>,
    /// Where the rank was with which something went wrong.
    struck_in: Option<WorkerPhase>,
    /// Frames sent that are not the nodes'.
    said_frames: u64,
    report: Report,
    tracing: bool,
}

impl<M: SimMemory> World<M> {
    /// A simulation that has not begun.
    #[must_use]
    pub fn new(setup: Setup, tracing: bool) -> Self {
        let mut random = Random::new(setup.seed);
        let network = Fabric::new(setup.links.clone(), setup.ranks, setup.lanes, random.fork());
        let mut world = Self {
            agenda: Agenda::default(),
            network,
            nodes: Vec::new(),
            models: Vec::new(),
            workers: (0..setup.ranks).map(|rank| Worker::new(Rank(rank), &setup)).collect(),
            fates: (0..setup.ranks).map(|rank| Fate::new(&setup, Rank(rank))).collect(),
            said: (0..setup.ranks * setup.ranks * setup.lanes).map(|_| VecDeque::new()).collect(),
            ledger: Ledger::new(setup.books.clone(), setup.ranks),
            journeys: Journeys::default(),
            random,
            actions: Vec::new(),
            sabotaged: false,
            hoard: Vec::new(),
            struck_in: None,
            said_frames: 0,
            report: Report { sent_bytes: vec![0; setup.ranks as usize], ..Report::default() },
            tracing,
            setup: Rc::new(setup),
        };
        for rank in 0..world.setup.ranks {
            for lane in 0..world.setup.lanes {
                world.add_node(Rank(rank), lane);
            }
            world.agenda.at(0, Happening::Resume(Rank(rank)));
        }
        world.plan_life();
        world
    }

    fn add_node(&mut self, rank: Rank, lane: u32) {
        let Setup { ranks, workers, lanes, window_bytes, priority, .. } = *self.setup;
        let wide = |yes: bool| if yes { u64::MAX / 4 } else { window_bytes };
        let (mut node_priority, mut model_priority) = (priority, priority);
        if self.setup.sabotaged(Sabotage::IgnorePriority) {
            (node_priority, model_priority) = (false, true);
        }
        if self.setup.sabotaged(Sabotage::IgnoreOrder) {
            (node_priority, model_priority) = (true, false);
        }
        let unseen = self.setup.sabotaged(Sabotage::WideWindowUnseen);
        let window = wide(unseen || self.setup.sabotaged(Sabotage::WideWindow));
        let config = Config {
            rank,
            members: Members::all(ranks),
            workers: Members::all(workers),
            lane,
            lanes,
            window_bytes: window,
            priority: node_priority,
        };
        self.nodes.push(Node::watched(config, M::default(), Watcher::default()));
        let window_bytes = wide(unseen);
        self.models.push(LinkModel::new(Identity {
            rank,
            ranks,
            workers,
            lane,
            window_bytes,
            priority: model_priority,
        }));
    }

    fn at(&self, rank: Rank, lane: u32) -> usize {
        rank.index() * self.setup.lanes as usize + lane as usize
    }

    /// The model of a node's links, if there is to be one.
    fn model(&mut self, rank: Rank, lane: u32) -> Option<&mut LinkModel> {
        let at = self.at(rank, lane);
        self.setup.demands.links.then(|| &mut self.models[at])
    }

    fn trace(&mut self, line: impl FnOnce() -> String) {
        if self.tracing {
            let line = format!("{:>12} ns  {}", self.agenda.now_ns(), line());
            self.report.trace.push(line);
        }
    }

    /// Commits the built-in fault `sabotage`, once.
    fn sabotage(&mut self, sabotage: Sabotage) -> bool {
        let now = self.setup.sabotaged(sabotage) && !self.sabotaged;
        self.sabotaged |= now;
        now
    }

    /// Plays until nothing more happens, and then looks at what is left.
    ///
    /// # Errors
    /// What was violated.
    pub fn run(&mut self) -> Result<(), Violation> {
        while let Some(happening) = self.agenda.advance() {
            self.report.events += 1;
            check(self.report.events < EVENTS_MAX, Checker::NoDeadlock, || {
                format!("{EVENTS_MAX} events and no end: {}", self.standing())
            })?;
            self.happen(happening)?;
        }
        self.check_ends()?;
        if self.setup.fault.is_none() {
            self.check_nothing_left()?;
        }
        Ok(())
    }

    fn happen(&mut self, happening: Happening) -> Result<(), Violation> {
        if self.postpone(happening) {
            return Ok(());
        }
        match happening {
            Happening::Resume(rank) => {
                self.workers[rank.index()].computing = false;
                self.advance(rank)
            }
            Happening::Told(rank) => self.advance(rank),
            Happening::Fill(id) => {
                self.fill(id)?;
                let from = self.network.connection(id).from;
                self.advance(from)
            }
            Happening::Moved(moved) => match self.network.moved(moved, &mut self.agenda) {
                Some((id, bytes)) => self.happen(Happening::Read(id, bytes)),
                None => Ok(()),
            },
            Happening::Read(id, bytes) => {
                self.network.read(id, bytes, self.agenda.now_ns());
                self.wake(id);
                let to = self.network.connection(id).to;
                self.received(id, bytes)?;
                self.advance(to)
            }
            Happening::Fault => self.befall(),
            Happening::GoOn(rank, stopped_ns) => {
                self.resume(rank, stopped_ns);
                Ok(())
            }
            Happening::Cut(id) => self.ended(id),
            Happening::Tick(rank, lane) => self.tick(rank, lane),
            Happening::Look(rank) => self.look(rank),
            Happening::Exit(rank) => {
                self.exit(rank);
                Ok(())
            }
            Happening::Close(rank) => {
                self.close(rank);
                Ok(())
            }
        }
    }

    /// Who is where, for messages.
    fn standing(&self) -> String {
        let mut text = String::new();
        for (rank, worker) in self.workers.iter().enumerate().filter(|(_, w)| !w.is_over()) {
            let instruction = self.setup.programs[rank].get(worker.instruction);
            text +=
                &format!("rank {rank} is {:?} at {} ({instruction:?}); ", worker.phase, worker.instruction);
        }
        for (at, node) in self.nodes.iter().enumerate() {
            for (book, layout) in self.setup.books.iter().enumerate() {
                for tensor in 0..layout.tensors.len() as u32 {
                    let missing = node.missing(book as u16, tensor);
                    if !missing.is_empty() {
                        let rank = at / self.setup.lanes as usize;
                        text +=
                            &format!("rank {rank} waits for {missing:?}: tensor {tensor} of book {book}; ");
                    }
                }
            }
        }
        text
    }

    fn check_nothing_left(&mut self) -> Result<(), Violation> {
        let left = |what: String| Err(Violation::new(Checker::NothingLeft, what));
        self.ledger.finish()?;
        self.journeys.finish()?;
        if let Some(connection) = self.network.left() {
            return left(format!("{connection:?} still carries something"));
        }
        for (at, node) in self.nodes.iter_mut().enumerate() {
            let (rank, lane) = (at / self.setup.lanes as usize, at % self.setup.lanes as usize);
            if let Some(peer) = (0..self.setup.ranks).map(Rank).find(|peer| node.has_frame(*peer)) {
                return left(format!("rank {rank}, lane {lane} still has a frame for {peer}"));
            }
            let (held, kept) =
                (node.memory().held_bytes(), self.ledger.kept_bytes(Rank(rank as u32), lane as u32));
            if held != kept {
                return left(format!(
                    "rank {rank}, lane {lane} still holds {held} bytes of scratch, not {kept}"
                ));
            }
            if self.setup.demands.links {
                self.models[at].finish()?;
            }
        }
        if self.workers.iter().any(Worker::has_shared_memory) {
            return left("memory of a submission was never released".into());
        }
        self.check_counters()
    }

    /// What the nodes counted is what went over the links, and that is what the formula says.
    fn check_counters(&mut self) -> Result<(), Violation> {
        let counters = self.counters();
        let (mut sent, mut received) = (0, 0);
        for rank in 0..self.setup.ranks {
            let lanes = self.setup.lanes as usize;
            let counters = &counters[rank as usize * lanes..][..lanes];
            let traffic = || counters.iter().flat_map(|counters| counters.traffic.iter().flatten());
            let rank_sent: u64 = traffic().map(|traffic| traffic.sent_bytes).sum();
            sent += rank_sent;
            received += traffic().map(|traffic| traffic.received_bytes).sum::<u64>();
            let on_links = self.report.sent_bytes[rank as usize];
            check(rank_sent == on_links, Checker::Bytes, || {
                format!("rank {rank} counted {rank_sent} bytes sent; its links carried {on_links}")
            })?;
            if let Some(rounds) = self.setup.demands.full_rounds {
                check_bytes(Rank(rank), on_links, &self.setup.books, self.setup.ranks, rounds)?;
            }
        }
        let waits = |counters: &Counters| {
            counters.peers.iter().any(|peer| peer.queued_frames + peer.queued_bytes > 0)
        };
        check(!counters.iter().any(waits), Checker::Bytes, || "sent frames count as queued".into())?;
        let out = counters.iter().map(|counters| counters.frames_sent).sum::<u64>() + self.said_frames;
        let into = counters.iter().map(|counters| counters.frames_received).sum();
        check((sent, out) == (received, into), Checker::Bytes, || {
            format!("{out} frames with {sent} bytes were sent, {into} with {received} received")
        })
    }

    fn counters(&mut self) -> Vec<Counters> {
        self.nodes.iter_mut().map(|node| node.observer().counters.clone()).collect()
    }

    /// What the run was like so far.
    pub fn report(&mut self) -> Report {
        let mut report = std::mem::take(&mut self.report);
        report.virtual_ns = self.agenda.now_ns();
        for counters in self.counters() {
            report.slices += counters.slices;
            report.preemptions += counters.preemptions;
            report.frames += counters.frames_sent;
        }
        report.marks_ns =
            self.workers.iter_mut().map(|worker| std::mem::take(&mut worker.marks_ns)).collect();
        report.lost = self.named();
        report
    }
}

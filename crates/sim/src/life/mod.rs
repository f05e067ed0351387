//! The life of jobs in virtual time: the state machine that ships ([`penstock_core::life`]), and nothing else of the protocol.
//!
//! Ranks begin, one later than the other, connect to those whom they need, compute, wait for each other and part; one of them
//! hangs, dies, is stopped, fails, leaves or talks nonsense, or a link between two breaks. All must end in time and blame the
//! right one, all the same.

mod check;
mod links;
mod rank;
mod scenario;

use crate::agenda::Agenda;
use crate::random::Random;
use check::End;
use links::{ConnectionState, Frame, Link};
use penstock_core::life::{Contact, Effect, Evidence, Farewell, Question, Sign, Verdict};
use penstock_core::{Error, Rank};
use rank::{Process, ProcessPhase};
pub use scenario::{Fault, Omission};
use scenario::{MS, Scenario, Style};

/// How often a lane looks at the clock.
const TICK_NS: u64 = 100 * MS;
/// By how much processes of a machine that has slept go on one after the other.
const WAKE_NS: u64 = 10 * MS;
/// Events after which a job counts as going round in circles.
const EVENTS_MAX: u64 = 1_000_000;
/// Virtual time after which nobody who has not ended ever will.
const END_NS: u64 = 1_000_000 * MS;

#[derive(Debug, Clone, Copy)]
enum Happening {
    Tick(u32, u32),
    Arrive(usize),
    Write(usize),
    /// A dial comes to the peer's listener, is tried again, or has taken too long.
    Knock(usize, u32),
    Redial(usize, u32),
    GiveUp(usize, u32),
    /// A rank's lanes begin.
    Begin(u32),
    /// A rank has computed.
    Computed(u32),
    /// A rank's wait of this number has taken too long.
    Expire(u32, u32),
    Fault,
    Resume(u32),
    /// A rank's process begins to end, and looks whether it can.
    Exit(u32),
    Flush(u32),
}

struct World {
    scenario: Scenario,
    omission: Option<Omission>,
    agenda: Agenda<Happening>,
    random: Random,
    ranks: Vec<Process>,
    links: Vec<Link>,
    /// How many there were.
    dials: u32,
    fault_ns: Option<u64>,
    trace: Vec<String>,
}

/// Draws a job from `seed` and plays it; gives what went wrong and whom errors named, if there were any.
///
/// # Errors
/// What does not hold, the job, and what happened in it.
pub fn run(seed: u64, omission: Option<Omission>) -> Result<(Fault, Option<Evidence>), String> {
    let scenario = scenario::draw(seed);
    let mut world = World::new(seed, scenario.clone(), omission);
    let ended = world.play();
    let ends: Vec<End> = world.ranks.iter().map(Process::end).collect();
    let held = ended.and_then(|()| check::check(&scenario, &ends, world.fault_ns));
    let evidence = ends
        .iter()
        .find_map(|end| if let End::Failed(verdict, _) = end { Some(verdict.evidence) } else { None });
    held.map(|()| (scenario.fault, evidence)).map_err(|what| {
        let trace = world.trace.join("\n");
        format!("seed {seed}: {what}\n{scenario:?}\n{trace}\nreplay with: cargo run -p penstock-sim --release -- life {seed}")
    })
}

impl World {
    fn new(seed: u64, scenario: Scenario, omission: Option<Omission>) -> Self {
        let Scenario { ranks, lanes, .. } = scenario;
        let mut random = Random::new(seed ^ 0x11FE);
        let mut world = Self {
            agenda: Agenda::default(),
            ranks: (0..ranks).map(|rank| Process::new(rank, &scenario, omission)).collect(),
            links: (0..ranks * ranks * lanes).map(|_| Link::default()).collect(),
            dials: 0,
            fault_ns: None,
            trace: Vec::new(),
            random: random.fork(),
            scenario,
            omission,
        };
        for rank in 0..ranks {
            let hub = world.scenario.style == Style::Hub;
            let meshed = world.scenario.meshed;
            for other in (0..rank).filter(|other| meshed && (!hub || *other == 0)) {
                world.connect(rank, other);
            }
            world.agenda.at(world.scenario.begin_ns[rank as usize], Happening::Begin(rank));
        }
        let at_ns = match world.scenario.fault {
            Fault::Kill(_, at) | Fault::Raise(_, at) | Fault::Stop(_, at, _) => Some(at),
            Fault::Cut(_, _, at) | Fault::Reset(_, _, at) | Fault::Garble(_, _, at) => Some(at),
            Fault::Sleep(at, _) => Some(at),
            _ => None,
        };
        if let Some(at_ns) = at_ns {
            world.agenda.at(at_ns, Happening::Fault);
        }
        world
    }

    fn omits(&self, omission: Omission) -> bool {
        self.omission == Some(omission)
    }

    fn note(&mut self, line: &str) {
        self.trace.push(format!("{:>9.1} ms  {line}", self.agenda.now_ns() as f64 / 1e6));
    }

    fn play(&mut self) -> Result<(), String> {
        for _ in 0..EVENTS_MAX {
            let Some(happening) = self.agenda.advance() else { return Ok(()) };
            if self.agenda.now_ns() > END_NS {
                return Ok(());
            }
            self.happen(happening);
        }
        Err(format!("{EVENTS_MAX} events and no end"))
    }

    fn link(&self, from: u32, to: u32, lane: u32) -> usize {
        ((from * self.scenario.ranks + to) * self.scenario.lanes + lane) as usize
    }

    /// Sender, receiver and lane.
    fn ends_of(&self, link: usize) -> (u32, u32, u32) {
        let Scenario { ranks, lanes, .. } = self.scenario;
        let (link, lane) = (link as u32 / lanes, link as u32 % lanes);
        (link / ranks, link % ranks, lane)
    }

    /// Connects two ranks before anything happens.
    fn connect(&mut self, one: u32, other: u32) {
        for (from, to) in [(one, other), (other, one)] {
            for lane in 0..self.scenario.lanes {
                let link = self.link(from, to, lane);
                self.links[link].state = ConnectionState::Open;
                self.ranks[from as usize].opened(to, lane, 0);
            }
        }
    }

    /// Gives out a frame of an exchange, which may wait to be written.
    fn give(&mut self, from: u32, to: u32, round: u32, frame: Frame) {
        let link = self.link(from, to, round % self.scenario.lanes);
        self.links[link].owed.push_back(frame);
        let delay_ns = self.random.below(self.scenario.owed_ns + 1);
        self.agenda.after(delay_ns, Happening::Write(link));
    }

    fn others(&self, rank: u32) -> impl Iterator<Item = u32> + use<> {
        (0..self.scenario.ranks).filter(move |other| *other != rank)
    }

    fn happen(&mut self, happening: Happening) {
        let whose = match happening {
            Happening::Tick(rank, _) | Happening::Computed(rank) | Happening::Expire(rank, _) => Some(rank),
            Happening::Arrive(link) | Happening::Knock(link, _) => Some(self.ends_of(link).1),
            Happening::Write(link) | Happening::Redial(link, _) | Happening::GiveUp(link, _) => {
                Some(self.ends_of(link).0)
            }
            Happening::Exit(rank) | Happening::Flush(rank) => Some(rank),
            Happening::Fault | Happening::Resume(_) | Happening::Begin(_) => None,
        };
        if let Some(stopped) = whose.map(|rank| &mut self.ranks[rank as usize]).filter(|rank| rank.stopped) {
            return stopped.postponed.push(happening);
        }
        match happening {
            Happening::Tick(rank, lane) => self.tick(rank, lane),
            Happening::Arrive(link) => self.arrive(link),
            Happening::Write(link) => {
                let (from, to, lane) = self.ends_of(link);
                let holds = self.ranks[from as usize].life.verdict().is_some();
                if let Some(frame) = self.links[link].owed.pop_front().filter(|_| !holds) {
                    self.send(from, to, lane, frame);
                }
            }
            Happening::Knock(link, dial) => self.knock(link, dial),
            Happening::Redial(link, dial) => self.attempt(link, dial),
            Happening::GiveUp(link, dial) => self.give_up(link, dial),
            Happening::Begin(rank) => self.begin(rank),
            Happening::Computed(rank) => self.enter(rank),
            Happening::Expire(rank, wait) => self.expire(rank, wait),
            Happening::Fault => self.fault(),
            Happening::Resume(rank) => self.resume(rank),
            Happening::Exit(rank) => self.exit(rank),
            Happening::Flush(rank) => self.flush(rank),
        }
    }

    fn fault(&mut self) {
        if !matches!(self.scenario.fault, Fault::Garble(..)) {
            self.fault_ns = Some(self.agenda.now_ns());
        }
        match self.scenario.fault {
            Fault::Kill(rank, _) if self.ranks[rank as usize].lives() => {
                self.note(&format!("rank {rank} is killed"));
                self.ranks[rank as usize].phase = ProcessPhase::Dead;
                self.close(rank);
            }
            Fault::Raise(rank, _) if self.ranks[rank as usize].is_in_program() => {
                self.note(&format!("rank {rank} raises"));
                let own = Verdict::of_error(&Error::Config("a bad batch".into()), None, None, Rank(rank));
                let now_ns = self.agenda.now_ns();
                let life = &mut self.ranks[rank as usize].life;
                if self.omission == Some(Omission::AskWhetherItFailed) {
                    life.aborted(now_ns, Rank(rank), &own.encode());
                } else {
                    life.accuse(now_ns, own);
                }
                self.follow(rank);
            }
            Fault::Stop(rank, _, for_ns) if self.ranks[rank as usize].lives() => {
                self.stop(rank, for_ns);
            }
            Fault::Sleep(_, for_ns) => {
                for rank in 0..self.scenario.ranks {
                    if self.ranks[rank as usize].lives() {
                        let later_ns = self.random.below(WAKE_NS);
                        self.stop(rank, for_ns + later_ns);
                    }
                }
            }
            Fault::Cut(one, other, _) | Fault::Reset(one, other, _) => self.break_links(one, other),
            Fault::Garble(rank, to, _) if self.ranks[rank as usize].is_in_program() => {
                self.note(&format!("rank {rank} sends rank {to} what makes no sense"));
                self.send(rank, to, 0, Frame::Abort(vec![u8::MAX; 20]));
            }
            _ => {}
        }
    }

    fn stop(&mut self, rank: u32, for_ns: u64) {
        self.note(&format!("rank {rank} is stopped for {} ms", for_ns / MS));
        let process = &mut self.ranks[rank as usize];
        (process.stopped, process.stopped_ns) = (true, self.agenda.now_ns());
        self.agenda.after(for_ns, Happening::Resume(rank));
    }

    fn break_links(&mut self, one: u32, other: u32) {
        self.note(&format!("{:?}", self.scenario.fault));
        for (from, to) in [(one, other), (other, one)] {
            for lane in 0..self.scenario.lanes {
                let link = self.link(from, to, lane);
                if matches!(self.scenario.fault, Fault::Reset(..)) {
                    if !self.links[link].is_open() {
                        continue;
                    }
                    self.transmit(link, Frame::End);
                }
                self.links[link].cut = true;
            }
        }
    }

    /// Its lanes begin, and its program. What has come before waits in the kernel.
    fn begin(&mut self, rank: u32) {
        let (operation_ns, now_ns) = (self.scenario.operation_ns, self.agenda.now_ns());
        let process = &mut self.ranks[rank as usize];
        let slow = self.omission == Some(Omission::SlowHeartbeats);
        process.begin(if slow { u64::MAX } else { operation_ns }, now_ns);
        let postponed = std::mem::take(&mut process.postponed);
        for lane in 0..self.scenario.lanes {
            let first_ns = self.agenda.now_ns() + self.random.below(TICK_NS);
            self.agenda.at(first_ns, Happening::Tick(rank, lane));
        }
        self.compute(rank);
        postponed.into_iter().for_each(|what| self.agenda.at(self.agenda.now_ns(), what));
    }

    /// What it has not done meanwhile, in order; but whether it reads or looks at the clock first is open.
    fn resume(&mut self, rank: u32) {
        self.note(&format!("rank {rank} goes on"));
        let process = &mut self.ranks[rank as usize];
        process.stopped = false;
        let stopped_ns = self.agenda.now_ns() - process.stopped_ns;
        if self.omission != Some(Omission::CountStops) {
            process.wait.iter_mut().for_each(|wait| wait.slept(0, stopped_ns));
        }
        let mut postponed = std::mem::take(&mut process.postponed);
        if self.random.chance(500) {
            postponed.sort_by_key(|what| !matches!(what, Happening::Tick(..)));
        }
        if self.omits(Omission::NeverAway) {
            self.look_late(rank);
        }
        postponed.into_iter().for_each(|what| self.agenda.at(self.agenda.now_ns(), what));
    }

    fn tick(&mut self, rank: u32, lane: u32) {
        if !self.ranks[rank as usize].lives() || self.ranks[rank as usize].has_failed() {
            return;
        }
        self.look(rank, lane, self.agenda.now_ns());
        if self.ranks[rank as usize].is_leaving() {
            self.part(rank, lane);
        }
        self.agenda.after(TICK_NS, Happening::Tick(rank, lane));
    }

    /// With the rule left out that a process which was stopped was not there: it looks at what it has not read as if it had been.
    fn look_late(&mut self, rank: u32) {
        let mut at_ns = self.ranks[rank as usize].looked_ns;
        while at_ns + TICK_NS < self.agenda.now_ns() && self.ranks[rank as usize].life.verdict().is_none() {
            at_ns += TICK_NS;
            (0..self.scenario.lanes).for_each(|lane| self.look(rank, lane, at_ns));
        }
    }

    fn look(&mut self, rank: u32, lane: u32, now_ns: u64) {
        let links: Vec<Contact> =
            (0..self.scenario.ranks).map(|peer| self.links[self.link(rank, peer, lane)].contact()).collect();
        let process = &mut self.ranks[rank as usize];
        let signs = process.look(lane, now_ns, &links, self.omission);
        let progress = process.progress;
        for sign in signs {
            match sign {
                Sign::Heartbeat(_) if self.omits(Omission::NoHeartbeats) => {}
                Sign::Heartbeat(peer) => self.send(rank, peer.0, lane, Frame::Heartbeat(progress)),
                Sign::Silent(..) if self.omits(Omission::DeafToSilence) => {}
                Sign::Silent(peer, silence_ns) => {
                    self.ranks[rank as usize].life.silent(now_ns, peer, silence_ns);
                }
            }
        }
        self.follow(rank);
    }

    /// Says goodbye where it can, and ends when all is said and heard.
    fn part(&mut self, rank: u32, lane: u32) {
        for other in self.others(rank) {
            let link = &self.links[self.link(rank, other, lane)];
            let (mut owed, mut contact) = (link.owes(), link.contact());
            if let (true, Contact::Open { .. }) = (self.omits(Omission::HastyGoodbye), contact) {
                (owed, contact) = (false, Contact::Open { written: true });
            }
            let farewell =
                self.ranks[rank as usize].pulses[lane as usize].farewell(Rank(other), contact, owed);
            if farewell == Farewell::Say {
                self.send(rank, other, lane, Frame::Goodbye);
            }
            let at = (other * self.scenario.lanes + lane) as usize;
            self.ranks[rank as usize].parted[at] = farewell == Farewell::Done;
        }
        if self.ranks[rank as usize].has_parted() {
            self.note(&format!("rank {rank} is through"));
            self.ranks[rank as usize].phase = ProcessPhase::Through;
            self.close(rank);
        }
    }

    /// Carries out what the state machine wants.
    fn follow(&mut self, rank: u32) {
        for effect in self.ranks[rank as usize].life.take_effects() {
            match effect {
                Effect::Ask(question) => self.ask(rank, question),
                Effect::Tell(verdict) => self.tell(rank, &verdict),
                Effect::Settled(verdict) => self.settled(rank, verdict),
                Effect::EndEpoch { .. } => unreachable!("nobody may be lost here"),
            }
        }
    }

    fn ask(&mut self, rank: u32, question: Question) {
        self.note(&format!("rank {rank} asks: {question:?}"));
        let nobody = self.omits(Omission::AskNobody);
        let now_ns = self.agenda.now_ns();
        for lane in 0..self.scenario.lanes {
            let process = &mut self.ranks[rank as usize];
            let reply = process.reply(lane, question, self.omission);
            process.life.replied(now_ns, Rank(rank), question.number, reply);
            for other in self.others(rank).filter(|_| !nobody) {
                self.send(rank, other, lane, Frame::Ask(question));
            }
        }
    }

    fn tell(&mut self, rank: u32, verdict: &Verdict) {
        self.note(&format!("rank {rank} holds {verdict:?}"));
        let first = !std::mem::replace(&mut self.ranks[rank as usize].tells, true);
        if verdict.accuser.0 != rank && self.omits(Omission::PassNothingOn) {
            return;
        }
        for other in self.others(rank) {
            for lane in 0..self.scenario.lanes {
                let link = self.link(rank, other, lane);
                if self.links[link].is_open() {
                    if first {
                        self.links[link].cancel();
                    }
                    self.send(rank, other, lane, Frame::Abort(verdict.encode()));
                }
            }
        }
        if first {
            self.dial_strangers(rank);
        }
        if self.omits(Omission::SettleAtOnce) {
            self.settled(rank, verdict.clone());
        }
    }

    fn settled(&mut self, rank: u32, verdict: Verdict) {
        if !self.ranks[rank as usize].lives() || self.ranks[rank as usize].has_failed() {
            return;
        }
        self.note(&format!("rank {rank} raises what rank {} found", verdict.accuser));
        // A program that hangs would raise it where it goes on: its process stays.
        if self.ranks[rank as usize].phase != ProcessPhase::Hung {
            let delay_ns = self.random.below(self.scenario.exit_ns + 1);
            self.agenda.after(delay_ns, Happening::Exit(rank));
        }
        self.ranks[rank as usize].failed = Some((verdict, self.agenda.now_ns()));
    }
}

//! The life of the job over real traffic: carries out the state machine that ships ([`penstock_core::life`]), as a lane of the
//! real library does. No decision is made here.

use super::worker::{Worker, WorkerPhase};
use super::{Happening, World};
use crate::check::{Checker, Violation, check};
use crate::memory::{Chunk, RealMemory, SimMemory};
use crate::network::ConnectionId;
use crate::program::{Instruction, Mishap, OPERATION_TIMEOUT_NS, PEER_TIMEOUT_NS, Sabotage, Setup};
use penstock_core::Members;
use penstock_core::life::{
    Contact, Effect, Expired, FLUSH_NS, Farewell, Life, Over, PeerTimes, Pulse, Question, Reply, Sign,
    Verdict, Wait, WaitKind,
};
use penstock_core::node::Waits;
use penstock_core::types::{BookId, Rank, Seq, TensorId};
use penstock_core::wire::{Header, Kind, Outgoing};
use std::collections::BTreeSet;

const SECOND: u64 = 1_000_000_000;
/// How often a lane looks at the clock.
const TICK_NS: u64 = SECOND / 10;
/// How long a process takes to end after its error, at most.
const EXIT_NS: u64 = SECOND / 2;
/// Nobody who has not ended by then ever will; time runs out, so that the checker says so.
const END_NS: u64 = 1000 * SECOND;

/// One rank's life, and what only its driver knows.
#[derive(Debug)]
pub(super) struct Fate {
    pub(super) life: Life,
    /// By lane.
    pulses: Vec<Pulse>,
    /// When data last moved here.
    pub(super) moved_ns: u64,
    /// The program stands in a call.
    pub(super) wait: Option<Wait>,
    /// Its time is up, and it has asked who is late.
    pub(super) asked: Option<Expired>,
    /// The next look that is planned.
    look_ns: Option<u64>,
    /// Its process is stopped; what happens to it meanwhile.
    pub(super) stopped: bool,
    pub(super) postponed: Vec<Happening>,
    /// What calls raise, and since when.
    pub(super) failed: Option<(Verdict, u64)>,
}

impl Fate {
    pub(super) fn new(setup: &Setup, rank: Rank) -> Self {
        let Setup { ranks, lanes, .. } = *setup;
        let members = Members::all(ranks);
        let mut life = Life::new(rank, members.clone(), lanes);
        for peer in (0..ranks).map(Rank).filter(|peer| *peer != rank) {
            (0..lanes).for_each(|_| life.connected(peer));
        }
        let pulse = |_| Pulse::new(&members, PEER_TIMEOUT_NS, OPERATION_TIMEOUT_NS, 0);
        Self {
            life,
            pulses: (0..lanes).map(pulse).collect(),
            moved_ns: 0,
            wait: None,
            asked: None,
            look_ns: None,
            stopped: false,
            postponed: Vec::new(),
            failed: None,
        }
    }

    /// It holds a verdict: its node is not used any more.
    pub(super) fn fails(&self) -> bool {
        self.life.verdict().is_some()
    }
}

impl<M: SimMemory> World<M> {
    pub(super) fn plan_life(&mut self) {
        for rank in (0..self.setup.ranks).map(Rank).filter(|_| self.setup.ranks > 1) {
            for lane in 0..self.setup.lanes {
                let first_ns = self.random.below(TICK_NS);
                self.agenda.at(first_ns, Happening::Tick(rank, lane));
            }
        }
        if let Some(fault) = self.setup.fault {
            self.agenda.at(fault.at_ns, Happening::Fault);
        }
    }

    /// A connection has ended, in this lane's eyes: also in the other direction.
    pub(super) fn ended(&mut self, id: ConnectionId) -> Result<(), Violation> {
        let connection = self.network.connection(id);
        if std::mem::replace(&mut connection.ended, true) {
            return Ok(());
        }
        let (from, to, lane) = (connection.from, connection.to, connection.lane);
        let back = self.network.id(to, from, lane);
        self.network.sever(back);
        self.said[back].clear();
        if self.workers[to.index()].is_over() || self.setup.sabotaged(Sabotage::Deaf) {
            return Ok(());
        }
        let fate = &mut self.fates[to.index()];
        let why = fate.pulses[lane as usize].loss(from, "its connection was closed".into());
        fate.life.ended(self.agenda.now_ns(), from, why);
        self.follow(to)
    }

    /// Gives out a frame that is not the node's.
    fn say(&mut self, id: ConnectionId, frame: Outgoing<Chunk>) {
        self.said[id].push_back(frame);
        self.wake(id);
    }

    fn connections(&self, rank: Rank, lane: u32) -> impl Iterator<Item = (Rank, ConnectionId)> + use<M> {
        let peers = (0..self.setup.ranks).map(Rank).filter(move |peer| *peer != rank);
        let ids: Vec<_> = peers.map(|peer| (peer, self.network.id(rank, peer, lane))).collect();
        ids.into_iter()
    }

    /// A control frame has arrived.
    pub(super) fn heed(
        &mut self,
        rank: Rank,
        lane: u32,
        from: Rank,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Violation> {
        let now_ns = self.agenda.now_ns();
        let fate = &mut self.fates[rank.index()];
        match header.kind {
            Kind::Abort if self.setup.sabotaged(Sabotage::DropAborts) => {}
            Kind::Abort => fate.life.aborted(now_ns, from, payload),
            Kind::Heartbeat => fate.life.heartbeat(now_ns, from, header.argument),
            Kind::Goodbye => {
                fate.pulses[lane as usize].goodbye_heard(from);
                fate.life.departed(now_ns, from);
            }
            Kind::Ask => {
                let question = Question::of(header);
                let word = self.reply(rank, lane, question).encode();
                let frame = said(Header { seq: question.number, ..Header::control(Kind::Reply) }, &word);
                self.say(self.network.id(rank, from, lane), frame);
            }
            Kind::Reply => {
                let reply = Reply::decode(payload, &Members::all(self.setup.ranks))
                    .map_err(|why| Violation::new(Checker::Protocol, format!("rank {from} sent {why}")))?;
                fate.life.replied(now_ns, from, header.seq, reply);
            }
            _ => {}
        }
        self.follow(rank)
    }

    /// Does what the state machine wants, and plans its next look.
    pub(super) fn follow(&mut self, rank: Rank) -> Result<(), Violation> {
        loop {
            let effects = self.fates[rank.index()].life.take_effects();
            if effects.is_empty() {
                break;
            }
            for effect in effects {
                match effect {
                    Effect::Ask(question) => self.ask(rank, question)?,
                    Effect::Tell(verdict) => self.tell(rank, &verdict),
                    Effect::Settled(verdict) => self.settled(rank, verdict)?,
                    Effect::EndEpoch { .. } => unreachable!("nobody may be lost here"),
                }
            }
        }
        let rests = self.rests(rank);
        let fate = &mut self.fates[rank.index()];
        let now_ns = self.agenda.now_ns();
        if let Some(at_ns) = fate.life.deadline_ns(fate.moved_ns)
            && !rests
        {
            // What has been looked at and is still open may change with every tick.
            let at_ns = if at_ns > now_ns { at_ns } else { now_ns + TICK_NS };
            if fate.look_ns.is_none_or(|planned_ns| planned_ns <= now_ns || at_ns < planned_ns) {
                fate.look_ns = Some(at_ns);
                self.agenda.at(at_ns, Happening::Look(rank));
            }
        }
        Ok(())
    }

    fn ask(&mut self, rank: Rank, question: Question) -> Result<(), Violation> {
        self.trace(|| format!("rank {rank} asks: {question:?}"));
        for lane in 0..self.setup.lanes {
            let reply = self.reply(rank, lane, question);
            let now_ns = self.agenda.now_ns();
            self.fates[rank.index()].life.replied(now_ns, rank, question.number, reply);
            self.control(rank, lane, question.header(), None)?;
        }
        Ok(())
    }

    /// Tells every peer of the verdict. The node is not used any more.
    fn tell(&mut self, rank: Rank, verdict: &Verdict) {
        self.trace(|| format!("rank {rank} holds {verdict:?}"));
        for lane in 0..self.setup.lanes {
            for (_, id) in self.connections(rank, lane) {
                if !self.network.connection(id).closed {
                    self.said[id].clear();
                    let header = Header { argument: verdict.culprit().0, ..Header::control(Kind::Abort) };
                    self.say(id, said(header, &verdict.encode()));
                }
            }
        }
    }

    /// Calls raise it: the program ends.
    fn settled(&mut self, rank: Rank, mut verdict: Verdict) -> Result<(), Violation> {
        check(self.setup.fault.is_some(), Checker::LossNamed, || {
            format!("rank {rank} ends with {verdict:?}, but nothing is wrong")
        })?;
        if self.sabotage(Sabotage::BlameAnother) {
            verdict.culprits = vec![Rank((verdict.culprit().0 + 1) % self.setup.ranks)];
        }
        self.trace(|| format!("rank {rank} raises what rank {} found", verdict.accuser));
        self.workers[rank.index()].phase = WorkerPhase::Failed;
        self.fates[rank.index()].failed = Some((verdict, self.agenda.now_ns()));
        let delay_ns = self.random.below(EXIT_NS);
        self.agenda.after(delay_ns, Happening::Exit(rank));
        Ok(())
    }

    /// A process ends: its connections close once everything is written, or after a bounded time.
    pub(super) fn exit(&mut self, rank: Rank) {
        self.workers[rank.index()].exits = true;
        self.network.from(rank).for_each(|id| self.wake(id));
        self.agenda.after(FLUSH_NS, Happening::Close(rank));
    }

    /// What is not written by now is lost.
    pub(super) fn close(&mut self, rank: Rank) {
        for id in self.network.from(rank) {
            if !self.network.connection(id).closed {
                self.network.sever(id);
                self.agenda.after(self.setup.links.delay_ns, Happening::Cut(id));
            }
        }
    }

    /// Whether this is a server that waits for the word or the goodbye of a worker that hangs, and that nobody else needs.
    pub(super) fn serves_for_ever(&self, rank: Rank) -> bool {
        let instruction = self.setup.programs[rank.index()].get(self.workers[rank.index()].instruction);
        let serves = matches!(instruction, Some(Instruction::Serve | Instruction::Heed { .. }));
        serves && self.workers.iter().any(|worker| worker.hangs)
    }

    /// Whether there is nothing to look at any more.
    fn rests(&self, rank: Rank) -> bool {
        let through = |rank: u32| {
            let worker = &self.workers[rank as usize];
            worker.is_over() || worker.hangs || self.serves_for_ever(Rank(rank))
        };
        self.workers[rank.index()].is_over()
            || (0..self.setup.ranks).all(through)
            || self.agenda.now_ns() > END_NS
    }

    pub(super) fn tick(&mut self, rank: Rank, lane: u32) -> Result<(), Violation> {
        if self.rests(rank) {
            return Ok(());
        }
        if !self.fates[rank.index()].fails() {
            self.look_at_peers(rank, lane);
            if lane == 0 {
                self.expire(rank)?;
            }
        }
        self.follow(rank)?;
        self.agenda.after(TICK_NS, Happening::Tick(rank, lane));
        self.advance(rank)
    }

    fn look_at_peers(&mut self, rank: Rank, lane: u32) {
        let now_ns = self.agenda.now_ns();
        let mut links = Vec::new();
        for (peer, id) in self.connections(rank, lane) {
            let (there, back) = (id, self.network.id(peer, rank, lane));
            let heard_ns = self.network.connection(back).heard_ns;
            let written = self.is_written(there);
            let there = self.network.connection(there);
            if !there.closed {
                links.push(PeerTimes { peer, heard_ns, spoke_ns: there.spoke_ns, written });
            }
        }
        let mut signs = Vec::new();
        let fate = &mut self.fates[rank.index()];
        if let Some(away) = fate.pulses[lane as usize].look(now_ns, links.into_iter(), &mut signs) {
            fate.life.was_away(now_ns, away);
        }
        for sign in signs {
            match sign {
                Sign::Heartbeat(peer) => {
                    let argument = (self.fates[rank.index()].moved_ns / 1_000_000) as u32;
                    let header = Header { argument, ..Header::control(Kind::Heartbeat) };
                    self.say(self.network.id(rank, peer, lane), Outgoing { header, payload: None });
                }
                Sign::Silent(..) if self.setup.sabotaged(Sabotage::Deaf) => {}
                Sign::Silent(peer, silence_ns) => {
                    self.fates[rank.index()].life.silent(now_ns, peer, silence_ns);
                }
            }
        }
    }

    /// What only time shows.
    pub(super) fn look(&mut self, rank: Rank) -> Result<(), Violation> {
        if self.rests(rank) {
            return Ok(());
        }
        let mut needed: BTreeSet<Rank> = self.late_to_agree(rank).into_iter().collect();
        for lane in 0..self.setup.lanes {
            needed.extend(self.nodes[self.at(rank, lane)].needed(self.waits_for(rank, lane)));
        }
        let now_ns = self.agenda.now_ns();
        let fate = &mut self.fates[rank.index()];
        fate.life.look(now_ns, fate.moved_ns, |rank| needed.contains(&rank));
        self.follow(rank)
    }

    /// Whether the program waits for too long: then everybody is asked, or it goes on without what it waits for.
    fn expire(&mut self, rank: Rank) -> Result<(), Violation> {
        let now_ns = self.agenda.now_ns();
        let fate = &mut self.fates[rank.index()];
        let Some(wait) = &mut fate.wait else { return Ok(()) };
        let Some(over) = fate.life.over(wait, now_ns, fate.moved_ns) else { return Ok(()) };
        // All else is noticed earlier.
        let hangs = self.setup.fault.is_some_and(|fault| fault.what == Mishap::Hang);
        check(hangs, Checker::NoDeadlock, || format!("rank {rank} waits for ever: {}", self.standing()))?;
        match over {
            Over::Ask => {}
            Over::GoOn => {
                self.done(rank);
                return Ok(());
            }
            // Programs here have no calls of their own: it has asked, and heard nothing.
            Over::Fail => {
                let message = format!("rank {rank} comes to no verdict: {}", self.standing());
                return Err(Violation::new(Checker::NoDeadlock, message));
            }
        }
        let worker = &self.workers[rank.index()];
        let about = worker.first_open();
        let what = format!("timeout: rank {rank}, instruction {}", worker.instruction);
        let (about, step) = (about.map(|(book, tensor, _)| (book, tensor)), about.map(|(.., seq)| seq));
        let expired = Expired { about, step, what, hint: String::new() };
        let fate = &mut self.fates[rank.index()];
        fate.wait = Some(fate.life.expired(now_ns, &expired));
        fate.asked = Some(expired);
        Ok(())
    }

    /// The program waits, if it does not already, or goes on.
    pub(super) fn waits(&mut self, rank: Rank, awaited: Option<WaitKind>) {
        let fate = &mut self.fates[rank.index()];
        match awaited {
            Some(awaited) if fate.wait.is_none() => {
                fate.wait = Some(Wait::new(awaited, self.agenda.now_ns(), OPERATION_TIMEOUT_NS));
            }
            Some(_) => {}
            None => {
                fate.wait = None;
                fate.asked.take().iter().for_each(|asked| fate.life.came(self.agenda.now_ns(), asked));
            }
        }
    }

    /// What a lane says to a question.
    fn reply(&self, rank: Rank, lane: u32, question: Question) -> Reply {
        let heeds = self.heeds(rank);
        let blocked = self.fates[rank.index()].wait.is_some() || heeds.is_some();
        let mut late = self.late_to_agree(rank);
        late.extend(heeds);
        let what = format!("instruction {}", self.workers[rank.index()].instruction);
        let program = Reply { blocked, late, what, ..Reply::default() };
        let mut reply = self.nodes[self.at(rank, lane)].reply(question, self.waits_for(rank, lane), program);
        if self.setup.sabotaged(Sabotage::HideLacking) {
            (reply.missing, reply.lacking) = (Vec::new(), Vec::new());
        }
        let mut groups = self.setup.books.iter().map(|book| &book.roles.groups);
        if self.setup.sabotaged(Sabotage::HideOwners) && groups.any(|groups| groups.led_by(rank).is_some()) {
            reply.owners = Vec::new();
        }
        reply
    }

    /// For whose word this rank stands there, if it is a server: worker 0 has a message for it after each step.
    fn heeds(&self, rank: Rank) -> Option<Rank> {
        let instruction = self.setup.programs[rank.index()].get(self.workers[rank.index()].instruction);
        let heeds = matches!(instruction, Some(Instruction::Heed { .. }));
        (heeds && !self.workers[rank.index()].hangs).then_some(Rank(0))
    }

    /// Who has not come to what the program agrees on with all others.
    fn late_to_agree(&self, rank: Rank) -> Vec<Rank> {
        self.workers[rank.index()].all_gather.late()
    }

    /// Whom what is under way in this lane waits for.
    fn waits_for(&self, rank: Rank, lane: u32) -> Waits {
        let (node, worker) = (&self.nodes[self.at(rank, lane)], &self.workers[rank.index()]);
        let open = worker.open_tensors().map(|(id, tensor)| {
            let book = &self.setup.books[usize::from(id)];
            let slices = worker.open_slices(id, tensor, book.slices_of(tensor));
            (id, tensor, slices.filter(move |slice| book.slices[*slice as usize].lane == lane))
        });
        node.waits(open, [])
    }

    fn is_written(&mut self, id: ConnectionId) -> bool {
        self.said[id].is_empty() && self.network.is_written(id)
    }

    /// Whether every worker has said goodbye to this server, on every lane.
    pub(super) fn workers_have_parted(&self, rank: Rank) -> bool {
        let mut workers = (0..self.setup.workers).map(Rank);
        let pulses = &self.fates[rank.index()].pulses;
        workers.all(|worker| pulses.iter().all(|pulse| pulse.has_heard_goodbye(worker)))
    }

    /// Says goodbye where it can; true when all is said and heard.
    pub(super) fn farewell(&mut self, rank: Rank) -> bool {
        let mut parted = true;
        for lane in 0..self.setup.lanes {
            for (peer, id) in self.connections(rank, lane) {
                let written = self.is_written(id);
                let contact = match self.network.connection(id).closed {
                    true => Contact::Gone,
                    false => Contact::Open { written },
                };
                let owed = self.nodes[self.at(rank, lane)].has_frame(peer);
                let pulse = &mut self.fates[rank.index()].pulses[lane as usize];
                match pulse.farewell(peer, contact, owed) {
                    Farewell::Done => {}
                    Farewell::Wait => parted = false,
                    Farewell::Say => {
                        let header = Header::control(Kind::Goodbye);
                        self.say(id, Outgoing { header, payload: None });
                        parted = false;
                    }
                }
            }
        }
        parted
    }

    /// A rank is through, and its process ends.
    pub(super) fn done(&mut self, rank: Rank) {
        self.trace(|| format!("rank {rank} is done"));
        self.workers[rank.index()].phase = WorkerPhase::Done;
        self.exit(rank);
    }
}

/// A frame that is not the node's, with its payload.
fn said(header: Header, payload: &[u8]) -> Outgoing<Chunk> {
    let chunk = RealMemory::tensor(payload.len());
    chunk.write(|bytes| bytes.copy_from_slice(payload));
    let header = Header { payload_bytes: payload.len() as u32, ..header };
    Outgoing { header, payload: Some(chunk) }
}

impl Worker {
    /// Tensors whose results are not all in memory.
    fn open_tensors(&self) -> impl Iterator<Item = (BookId, TensorId)> + '_ {
        let books = (0..).zip(&self.tensors);
        books.flat_map(|(book, tensors)| {
            let tensors = (0..).zip(tensors.iter().flatten());
            tensors.filter(|(_, tensor)| tensor.remaining > 0).map(move |(id, _)| (book, id))
        })
    }

    fn first_open(&self) -> Option<(BookId, TensorId, Seq)> {
        let (book, id) = self.open_tensors().next()?;
        let tensor = self.tensors[usize::from(book)].as_ref()?.get(id as usize)?;
        Some((book, id, tensor.seq))
    }

    fn open_slices(
        &self,
        book: BookId,
        tensor: TensorId,
        slices: impl Iterator<Item = u32>,
    ) -> impl Iterator<Item = u32> {
        let tensor = self.tensors[usize::from(book)].as_ref().map(|tensors| &tensors[tensor as usize]);
        slices.filter(move |slice| tensor.is_some_and(|tensor| !tensor.complete.contains(slice)))
    }
}

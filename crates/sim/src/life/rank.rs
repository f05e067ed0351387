//! One rank of a job: its program, what it waits for, and how it reads.

use super::check::End;
use super::links::{ConnectionState, Frame};
use super::scenario::{Fault, MS, PEER_TIMEOUT_NS, Scenario, Style};
use super::{Happening, Omission, World};
use penstock_core::life::{
    Contact, DOUBT_NS, Expired, Life, Over, PeerTimes, Pulse, Question, Reply, SETTLE_INDIRECT_NS, Sign,
    TimeAway, Verdict, Wait, WaitKind,
};
use penstock_core::{Members, Rank};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessPhase {
    Computing,
    /// For the first of its open rounds, or, after the last, for all to leave.
    Waiting,
    Hung,
    /// Its program is through; it says goodbye.
    Leaving,
    Through,
    Dead,
}

#[derive(Debug)]
pub(super) struct Process {
    me: u32,
    ranks: u32,
    pub(super) life: Life,
    pub(super) pulses: Vec<Pulse>,
    pub(super) phase: ProcessPhase,
    /// It does not run, or not yet.
    pub(super) stopped: bool,
    pub(super) stopped_ns: u64,
    pub(super) postponed: Vec<Happening>,
    pub(super) failed: Option<(Verdict, u64)>,
    /// It has held a verdict.
    pub(super) tells: bool,
    /// Since when it only waits for its last frames to be written.
    pub(super) flushes: Option<u64>,
    /// Its process has ended.
    pub(super) gone: bool,
    pub(super) looked_ns: u64,
    pub(super) progress: u32,
    /// By peer and lane.
    pub(super) parted: Vec<bool>,
    heard_ns: Vec<u64>,
    spoke_ns: Vec<u64>,
    moved_ns: u64,
    style: Style,
    lanes: u32,
    /// The rounds, as its program begins them.
    order: Vec<u32>,
    /// How many of these it has begun.
    begun: usize,
    /// Begun, and not complete.
    open: Vec<u32>,
    /// So many open rounds it waits with.
    window: usize,
    /// Counts waits, so that nothing is taken for news of a later one.
    waits: u32,
    pub(super) wait: Option<Wait>,
    /// Its time is up, and it has asked who is late.
    asked: Option<Expired>,
    /// Who has replied to which of its questions.
    replied: BTreeSet<(u32, u32)>,
    /// Who has contributed, by round.
    parts: BTreeMap<u32, BTreeSet<u32>>,
    /// The rounds that its group has come to and its head has given to their owners.
    passed_on: BTreeSet<u32>,
    results: BTreeSet<u32>,
    left: BTreeSet<u32>,
}

impl Process {
    pub(super) fn new(me: u32, scenario: &Scenario, omission: Option<Omission>) -> Self {
        let Scenario { ranks, lanes, style, .. } = *scenario;
        let connections = (ranks * lanes) as usize;
        let answering = if omission == Some(Omission::OneLaneAnswers) { 1 } else { lanes };
        let mut parted = vec![false; connections];
        parted[(me * lanes) as usize..((me + 1) * lanes) as usize].fill(true);
        Self {
            me,
            ranks,
            life: Life::new(Rank(me), Members::all(ranks), answering),
            pulses: Vec::new(),
            phase: ProcessPhase::Computing,
            stopped: true,
            stopped_ns: 0,
            postponed: Vec::new(),
            failed: None,
            tells: false,
            flushes: None,
            gone: false,
            looked_ns: 0,
            progress: 0,
            parted,
            heard_ns: vec![0; connections],
            spoke_ns: vec![0; connections],
            moved_ns: 0,
            style,
            lanes,
            order: scenario.order[me as usize].clone(),
            begun: 0,
            open: Vec::new(),
            window: scenario.window[me as usize],
            waits: 0,
            wait: None,
            asked: None,
            replied: BTreeSet::new(),
            parts: BTreeMap::new(),
            passed_on: BTreeSet::new(),
            results: BTreeSet::new(),
            left: BTreeSet::new(),
        }
    }

    /// Its lanes begin.
    pub(super) fn begin(&mut self, operation_ns: u64, now_ns: u64) {
        let members = Members::all(self.ranks);
        let pulse = |_| Pulse::new(&members, PEER_TIMEOUT_NS, operation_ns, now_ns);
        self.pulses = (0..self.lanes).map(pulse).collect();
        self.stopped = false;
    }

    fn at(&self, peer: u32, lane: u32) -> usize {
        (peer * self.lanes + lane) as usize
    }

    pub(super) fn lives(&self) -> bool {
        !self.gone && !matches!(self.phase, ProcessPhase::Dead | ProcessPhase::Through)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Its program runs, and can raise.
    pub(super) fn is_in_program(&self) -> bool {
        matches!(self.phase, ProcessPhase::Computing | ProcessPhase::Waiting) && self.life.verdict().is_none()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.phase == ProcessPhase::Leaving && self.life.verdict().is_none()
    }

    pub(super) fn has_parted(&self) -> bool {
        self.parted.iter().all(|parted| *parted)
    }

    pub(super) fn end(&self) -> End {
        match (&self.failed, self.phase) {
            (_, ProcessPhase::Dead) => End::Dead,
            (_, ProcessPhase::Through) => End::Through,
            (Some((verdict, at_ns)), _) => End::Failed(verdict.clone(), *at_ns),
            (None, phase) => End::Stuck(format!("{phase:?} with {:?} open, {:?}", self.open, self.life)),
        }
    }

    pub(super) fn opened(&mut self, peer: u32, lane: u32, now_ns: u64) {
        let at = self.at(peer, lane);
        (self.heard_ns[at], self.spoke_ns[at]) = (now_ns, now_ns);
        self.life.connected(Rank(peer));
    }

    pub(super) fn spoke(&mut self, peer: u32, lane: u32, now_ns: u64) {
        let at = self.at(peer, lane);
        self.spoke_ns[at] = now_ns;
    }

    fn owner(&self, round: u32) -> u32 {
        match self.style {
            Style::Hub => 0,
            Style::Groups(second) => [0, second][round as usize % 2],
            _ => round % self.ranks,
        }
    }

    /// The first of a rank's group, or the rank itself.
    fn head(&self, rank: u32) -> u32 {
        match self.style {
            Style::Groups(second) if rank >= second => second,
            Style::Groups(_) => 0,
            _ => rank,
        }
    }

    /// To whom its part of a round goes, and who answers it.
    fn answered_by(&self, round: u32) -> u32 {
        let head = self.head(self.me);
        if head == self.me { self.owner(round) } else { head }
    }

    /// Whether the parts of others come here, and go on from here all at once.
    fn collects(&self, round: u32) -> bool {
        match self.style {
            Style::Direct | Style::Join => false,
            Style::Owners | Style::Hub => self.owner(round) == self.me,
            Style::Groups(_) => self.head(self.me) == self.me,
        }
    }

    /// Whose parts come here: as an owner those of everybody, or of its own group and of other heads; as a head those of its group.
    fn expects(&self, round: u32, rank: u32) -> bool {
        let Style::Groups(_) = self.style else { return true };
        let (head, owns) = (self.head(rank), self.owner(round) == self.me);
        head == self.me || owns && head == rank
    }

    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.me;
        (0..self.ranks).filter(move |rank| *rank != me)
    }

    /// Who has not come to a round, as far as this rank can know.
    fn missing(&self, round: u32) -> Vec<Rank> {
        let came = self.parts.get(&round);
        let lacks = |rank: &u32| !came.is_some_and(|came| came.contains(rank));
        (0..self.ranks).filter(|rank| self.expects(round, *rank)).filter(lacks).map(Rank).collect()
    }

    /// Whom it waits for directly, and which owners owe it an answer: also while its program computes.
    fn waits_for(&self) -> (Vec<Rank>, Vec<Rank>) {
        if self.style == Style::Join && self.phase == ProcessPhase::Waiting {
            return (self.others().filter(|rank| !self.left.contains(rank)).map(Rank).collect(), vec![]);
        }
        let own = |round: &u32| {
            self.style == Style::Direct || self.collects(*round) && !self.passed_on.contains(round)
        };
        let (own, others): (Vec<u32>, Vec<u32>) = self.open.iter().partition(|round| own(round));
        let late = own.into_iter().flat_map(|round| self.missing(round)).collect();
        (late, others.into_iter().map(|round| Rank(self.answered_by(round))).collect())
    }

    /// The round that its program waits for.
    fn awaited(&self) -> Option<u32> {
        self.open.first().copied().filter(|_| self.phase == ProcessPhase::Waiting)
    }

    fn is_complete(&self, round: u32) -> bool {
        match self.style {
            Style::Direct => self.missing(round).is_empty(),
            _ => self.results.contains(&round),
        }
    }

    /// Takes the complete ones out of the open rounds.
    fn complete(&mut self) {
        let (complete, open): (Vec<u32>, Vec<u32>) =
            self.open.iter().partition(|round| self.is_complete(**round));
        self.open = open;
        for round in complete {
            self.parts.remove(&round);
        }
    }

    pub(super) fn reply(&self, lane: u32, question: Question, omission: Option<Omission>) -> Reply {
        let blocked = self.phase == ProcessPhase::Waiting;
        if lane > 0 {
            return Reply { blocked, ..Reply::default() };
        }
        let silent = omission == Some(Omission::OwnersSayNothing);
        let blocked = blocked || omission == Some(Omission::AllAreBlocked);
        let (late, mut owners) = self.waits_for();
        let owned = |round: &u32| {
            let begun = self.parts.get(round).is_some_and(|came| !came.is_empty());
            begun && !silent && self.collects(*round)
        };
        let open = |round: &u32| self.missing(*round);
        let missing = question
            .about
            .iter()
            .map(|(_, round)| round)
            .filter(|round| owned(round))
            .flat_map(open)
            .collect();
        let lacking: Vec<Rank> = self.parts.keys().filter(|round| owned(round)).flat_map(open).collect();
        let heads = matches!(self.style, Style::Groups(_));
        if heads && omission == Some(Omission::HeadsSayNothing) && !lacking.is_empty() {
            owners.clear();
        }
        let what = self.awaited().map_or_else(String::new, |round| format!("round {round}"));
        Reply { blocked, late, owners, missing, lacking, what }
    }

    pub(super) fn look(
        &mut self,
        lane: u32,
        now_ns: u64,
        links: &[Contact],
        omission: Option<Omission>,
    ) -> Vec<Sign> {
        let mut signs = Vec::new();
        if self.life.verdict().is_none() {
            let facts = |(peer, contact): (u32, &Contact)| {
                let at = self.at(peer, lane);
                let (heard_ns, spoke_ns) = (self.heard_ns[at], self.spoke_ns[at]);
                match *contact {
                    Contact::Open { written } => {
                        Some(PeerTimes { peer: Rank(peer), heard_ns, spoke_ns, written })
                    }
                    _ => None,
                }
            };
            let links: Vec<PeerTimes> = (0..).zip(links).filter_map(facts).collect();
            if let Some(away) = self.pulses[lane as usize].look(now_ns, links.into_iter(), &mut signs) {
                let noticed = away.noticed && omission != Some(Omission::NeverItself);
                self.life.was_away(now_ns, TimeAway { noticed, ..away });
            }
            if let Some(peer) = self.parted_with(lane).filter(|_| omission != Some(Omission::NeedNobody)) {
                self.life.needed(now_ns, peer);
            }
        }
        self.looked_ns = now_ns;
        if self.life.verdict().is_some() && omission == Some(Omission::WaitForEverybody) {
            return signs;
        }
        let (late, owners) = self.waits_for();
        let everybody = omission == Some(Omission::NeedEverybody);
        let nobody = omission == Some(Omission::MissNobody);
        let needs = |rank: Rank| !nobody && (everybody || late.contains(&rank) || owners.contains(&rank));
        self.life.look(now_ns, self.moved_ns, needs);
        signs
    }

    /// A rank that has said goodbye on the lane on which its part is waited for.
    fn parted_with(&self, lane: u32) -> Option<Rank> {
        let direct = self.style == Style::Direct;
        let rounds = self.open.iter().filter(|round| direct && *round % self.lanes == lane);
        let late: Vec<Rank> = rounds.flat_map(|round| self.missing(*round)).collect();
        self.pulses[lane as usize].parted(|rank| late.contains(&rank))
    }

    fn progressed(&mut self, now_ns: u64) {
        self.moved_ns = now_ns;
        self.progress += 1;
    }
}

impl World {
    /// Begins to compute before the next round, or leaves.
    pub(super) fn compute(&mut self, rank: u32) {
        let process = &mut self.ranks[rank as usize];
        let Some(&round) = process.order.get(process.begun) else { return self.finish(rank) };
        process.phase = ProcessPhase::Computing;
        match self.scenario.fault {
            Fault::Hang(who, before) if (who, before) == (rank, round) => {
                process.phase = ProcessPhase::Hung;
                self.fault_ns = Some(self.agenda.now_ns());
                return self.note(&format!("rank {rank} hangs before round {round}"));
            }
            Fault::Skip(who, which) if (who, which) == (rank, round) => {
                process.begun += 1;
                self.fault_ns = Some(self.agenda.now_ns());
            }
            Fault::Depart(who, before)
                if (who, before) == (rank, round) && self.scenario.style != Style::Join =>
            {
                process.begun = process.order.len();
                self.fault_ns = Some(self.agenda.now_ns());
            }
            _ => {}
        }
        let process = &self.ranks[rank as usize];
        let Some(&round) = process.order.get(process.begun) else { return self.finish(rank) };
        let compute_ns = self.scenario.compute_ns[rank as usize][round as usize];
        self.agenda.after(compute_ns, Happening::Computed(rank));
    }

    /// All rounds are begun: waits for those that are open, or for the others, and leaves.
    fn finish(&mut self, rank: u32) {
        if !self.ranks[rank as usize].open.is_empty() {
            return self.wait(rank);
        }
        if self.scenario.style == Style::Join {
            self.wait(rank);
            self.others(rank).for_each(|other| self.give(rank, other, 0, Frame::Left));
            return self.came(rank);
        }
        self.leave(rank);
    }

    fn leave(&mut self, rank: u32) {
        self.ranks[rank as usize].phase = ProcessPhase::Leaving;
        self.begin_wait(rank, WaitKind::Goodbyes);
    }

    fn wait(&mut self, rank: u32) {
        let process = &mut self.ranks[rank as usize];
        process.phase = ProcessPhase::Waiting;
        process.progressed(self.agenda.now_ns());
        let awaited = if process.style == Style::Join { WaitKind::Leavers } else { WaitKind::Result };
        self.begin_wait(rank, awaited);
    }

    fn begin_wait(&mut self, rank: u32, kind: WaitKind) {
        let process = &mut self.ranks[rank as usize];
        process.waits += 1;
        let wait = Wait::new(kind, self.agenda.now_ns(), self.scenario.operation_ns);
        self.agenda.at(wait.until_ns(), Happening::Expire(rank, process.waits));
        process.wait = Some(wait);
    }

    /// Takes part in a round.
    pub(super) fn enter(&mut self, rank: u32) {
        let process = &mut self.ranks[rank as usize];
        if process.life.verdict().is_some() || process.phase != ProcessPhase::Computing {
            return;
        }
        let round = process.order[process.begun];
        process.begun += 1;
        process.progressed(self.agenda.now_ns());
        if process.style == Style::Join {
            return self.compute(rank);
        }
        process.open.push(round);
        match process.style {
            Style::Join => {}
            Style::Direct => {
                process.parts.entry(round).or_default().insert(rank);
                self.others(rank).for_each(|other| self.give(rank, other, round, Frame::Part(round)));
            }
            _ if process.collects(round) => self.contributed(rank, rank, round),
            _ => {
                let to = process.answered_by(round);
                self.give(rank, to, round, Frame::Part(round));
            }
        }
        self.ranks[rank as usize].complete();
        self.wait_or_compute(rank);
    }

    /// Waits if as many rounds are open as may be, or computes before the next.
    fn wait_or_compute(&mut self, rank: u32) {
        let process = &self.ranks[rank as usize];
        if process.open.len() >= process.window { self.wait(rank) } else { self.compute(rank) }
    }

    /// At `rank`, a contribution is here.
    fn contributed(&mut self, rank: u32, from: u32, round: u32) {
        let process = &mut self.ranks[rank as usize];
        process.parts.entry(round).or_default().insert(from);
        if process.style != Style::Direct && process.missing(round).is_empty() {
            process.parts.remove(&round);
            let owner = process.owner(round);
            if owner == rank {
                return self.answer(rank, round);
            }
            process.passed_on.insert(round);
            self.give(rank, owner, round, Frame::Part(round));
        }
    }

    /// The result of a round is here, and goes to those whose parts came here.
    fn answer(&mut self, rank: u32, round: u32) {
        let process = &mut self.ranks[rank as usize];
        process.results.insert(round);
        if process.collects(round) {
            let to: Vec<u32> = process.others().filter(|other| process.expects(round, *other)).collect();
            to.into_iter().for_each(|other| self.give(rank, other, round, Frame::Result(round)));
        }
    }

    /// Whether what it waits for has come: then it goes on.
    fn came(&mut self, rank: u32) {
        let process = &mut self.ranks[rank as usize];
        if process.life.verdict().is_some() {
            return;
        }
        let awaited = process.awaited();
        process.complete();
        let here = match process.style {
            Style::Join => process.left.len() as u32 == process.ranks - 1,
            _ => process.open.first().copied() != awaited,
        };
        if process.phase != ProcessPhase::Waiting || !here {
            return;
        }
        process.progressed(self.agenda.now_ns());
        process.waits += 1;
        process.wait = None;
        if let Some(asked) = process.asked.take().filter(|_| self.omission != Some(Omission::NeverWithdraw)) {
            process.life.came(self.agenda.now_ns(), &asked);
        }
        if process.style == Style::Join { self.leave(rank) } else { self.wait_or_compute(rank) }
    }

    pub(super) fn expire(&mut self, rank: u32, number: u32) {
        let now_ns = self.agenda.now_ns();
        let process = &mut self.ranks[rank as usize];
        if process.waits != number || process.life.verdict().is_some() {
            return;
        }
        let Some(wait) = &mut process.wait else { return };
        let Some(over) = process.life.over(wait, now_ns, process.moved_ns) else {
            return self.agenda.at(wait.until_ns(), Happening::Expire(rank, number));
        };
        if over == Over::Fail {
            // It has asked, and heard nothing: it stays, and the check says so.
            return self.note(&format!("rank {rank} comes to no verdict"));
        }
        if over != Over::Ask && self.omission != Some(Omission::AskForGoodbyes) {
            // A connection may just have come about: goodbyes are said in every turn, not only at looks at the clock.
            (0..self.scenario.lanes).for_each(|lane| self.part(rank, lane));
            self.ranks[rank as usize].phase = ProcessPhase::Through;
            return self.close(rank);
        }
        let owned = !matches!(process.style, Style::Direct | Style::Join);
        let awaited = process.awaited();
        let what = format!("timeout: rank {rank}, round {awaited:?}, after {} ms", now_ns / MS);
        let about = awaited.filter(|_| owned).map(|round| (0, round));
        let expired = Expired { about, step: awaited, what, hint: String::new() };
        let verdict = process.life.expired(now_ns, &expired);
        self.agenda.at(verdict.until_ns(), Happening::Expire(rank, number));
        (process.wait, process.asked) = (Some(verdict), Some(expired));
        self.follow(rank);
    }

    /// A frame is at its receiver.
    pub(super) fn arrive(&mut self, link: usize) {
        let now_ns = self.agenda.now_ns();
        let (from, to, lane) = self.ends_of(link);
        let Some(frame) = self.read(link) else { return };
        if !self.ranks[to as usize].lives() {
            if matches!(frame, Frame::Accepted) {
                self.transmit(self.link(to, from, lane), Frame::End);
            }
            return;
        }
        let at = self.ranks[to as usize].at(from, lane);
        self.ranks[to as usize].heard_ns[at] = now_ns;
        let holds = self.ranks[to as usize].life.verdict().is_some();
        if !holds && frame.kind().is_some_and(|kind| !kind.is_idle()) {
            self.ranks[to as usize].progressed(now_ns);
        }
        match frame {
            Frame::Abort(_) if holds && self.omits(Omission::KeepTheFirst) => {}
            Frame::Abort(payload) => self.aborted(to, from, &payload),
            Frame::Accepted => self.accepted(self.link(to, from, lane)),
            Frame::End => self.link_ended(from, to, lane),
            // Whoever holds a verdict takes nothing else in.
            _ if holds => {}
            Frame::Part(_) | Frame::Result(_) | Frame::Left => self.data(from, to, &frame),
            Frame::Heartbeat(_) if self.omits(Omission::DeafToProgress) => {}
            Frame::Heartbeat(mut progress) => {
                if self.omits(Omission::AnythingIsProgress) {
                    progress = (now_ns / MS) as u32;
                }
                self.ranks[to as usize].life.heartbeat(now_ns, Rank(from), progress);
            }
            Frame::Goodbye if self.omits(Omission::DeafToGoodbyes) => {}
            Frame::Goodbye => {
                self.ranks[to as usize].pulses[lane as usize].goodbye_heard(Rank(from));
                self.ranks[to as usize].life.departed(now_ns, Rank(from));
            }
            Frame::Ask(question) => {
                let reply = self.ranks[to as usize].reply(lane, question, self.omission);
                self.send(to, from, lane, Frame::Reply(question.number, reply.encode()));
            }
            Frame::Reply(number, _)
                if !self.ranks[to as usize].replied.insert((number, from))
                    && self.omits(Omission::OneLaneAnswers) => {}
            Frame::Reply(number, payload) => {
                if let Ok(reply) = Reply::decode(&payload, &Members::all(self.scenario.ranks)) {
                    let life = &mut self.ranks[to as usize].life;
                    life.replied(now_ns, Rank(from), number, reply);
                    if self.omission == Some(Omission::DoubtNothing) {
                        life.look(now_ns + DOUBT_NS, u64::MAX, |_| false);
                    }
                }
            }
        }
        self.follow(to);
    }

    fn aborted(&mut self, rank: u32, from: u32, payload: &[u8]) {
        let now_ns = self.agenda.now_ns();
        let nonsense = Verdict::decode(payload, &Members::all(self.scenario.ranks)).is_err();
        let deaf = nonsense && self.omits(Omission::DeafToNonsense);
        let life = &mut self.ranks[rank as usize].life;
        if nonsense && life.verdict().is_none() {
            self.fault_ns = Some(now_ns);
        }
        if !deaf {
            life.aborted(now_ns, Rank(from), payload);
        }
        if self.omission == Some(Omission::SettleWithoutStrangers) {
            life.look(now_ns + SETTLE_INDIRECT_NS, u64::MAX, |_| false);
        }
    }

    fn data(&mut self, from: u32, to: u32, frame: &Frame) {
        match frame {
            Frame::Part(round) => self.contributed(to, from, *round),
            Frame::Result(round) => self.answer(to, *round),
            Frame::Left => {
                self.ranks[to as usize].left.insert(from);
            }
            _ => {}
        }
        self.came(to);
    }

    fn link_ended(&mut self, from: u32, to: u32, lane: u32) {
        let back = self.link(to, from, lane);
        self.links[back].state = ConnectionState::Gone;
        let process = &mut self.ranks[to as usize];
        let why = process.pulses[lane as usize].loss(Rank(from), "its connection was closed".into());
        if self.omits(Omission::DeafToEnds) {
            return;
        }
        let now_ns = self.agenda.now_ns();
        let at_once = self.omission == Some(Omission::BlameAtOnce) && why.is_some();
        let life = &mut self.ranks[to as usize].life;
        life.ended(now_ns, Rank(from), why);
        if at_once {
            life.silent(now_ns, Rank(from), 0);
        }
    }
}

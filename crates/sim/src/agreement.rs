//! Agreements on the next members, with [`penstock_core::agreement`] as it ships and nothing else of the protocol: every order of
//! messages for few members ([`every_order`]), and many members, losses and partitions by chance ([`run`]).
//!
//! A connection keeps its frames in order; when it breaks, what is on its way is lost, and both ends see that, each when it comes to
//! it. A connection may be made anew.

use crate::random::Random;
use penstock_core::agreement::{Ballot, Effect, MemberMessage, NextMembers, Succession};
use penstock_core::{Members, Rank};
use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Attempts after which a clock is looked at only when nothing else is left to happen, or leaders would outbid each other for ever.
const HASTY_ATTEMPTS: u64 = 3;
/// Events after which a job counts as going round in circles.
const EVENTS_MAX: u64 = 200_000;

/// A rule that is left out, to see that it is missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Omission {
    /// Two are a quorum, of however many.
    TwoAreEnough,
    /// What was accepted before is forgotten when another asks for a promise.
    ForgetWhatWasAccepted,
    /// A ballot that another was promised instead of is accepted all the same.
    AcceptAnything,
    /// What was reported may change until the choice is known.
    ReportAnew,
    /// Who is told of a choice tells nobody.
    PassNothingOn,
    /// A new connection begins with nothing.
    SayNothingAgain,
    /// A leader that was outbid never tries again.
    GiveUp,
    /// Who is told that an epoch ends, and does not lead, does nothing.
    PassNoEndOn,
    /// What was proposed to a member counts as accepted by it.
    ProposedIsAccepted,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Sent {
    Said(u32, MemberMessage),
    /// The connection has ended.
    End,
    /// It is open again.
    Open,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Voter {
    agreement: Succession,
    lives: bool,
    /// Asked for a report, and has not given it yet.
    freezing: bool,
    /// How often it has frozen; with its rank and epoch what it reports.
    frozen: u8,
    /// The choices that it knows, one for each epoch that has ended.
    choices: Vec<NextMembers>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    members: Vec<Voter>,
    /// By sender and receiver.
    links: Vec<VecDeque<Sent>>,
    /// Of each pair, whether there is a connection.
    open: Vec<bool>,
    /// The ballot whose proposal has arrived last, if that arrived last.
    asked: Option<Ballot>,
    /// How often a clock was looked at.
    looks: u64,
    omission: Option<Omission>,
}

/// What can happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happening {
    /// The oldest frame from one to the other arrives.
    Arrive(usize, usize),
    Report(usize),
    /// It looks at the clock when it wanted to.
    Look(usize),
    Kill(usize),
    /// What one that is dead has sent last to another does not arrive.
    Lose(usize, usize),
    Break(usize, usize),
    Mend(usize, usize),
    /// Their connection ends and is made anew at once: neither suspects the other, and what was on its way is lost.
    Renew(usize, usize),
    Leave(usize),
    /// It wants the epoch to end, and hears everybody.
    Finish(usize),
}

fn report_of(rank: usize, epoch: u32, frozen: u8) -> Vec<u8> {
    vec![rank as u8, epoch as u8, frozen]
}

impl World {
    fn new(count: usize, enough: Option<u32>, omission: Option<Omission>) -> Self {
        let members = Members::all(count as u32);
        let enough = if omission == Some(Omission::TwoAreEnough) { Some(2) } else { enough };
        let member = |rank: u32| Voter {
            agreement: Succession::new(Rank(rank), &members, enough),
            lives: true,
            freezing: false,
            frozen: 0,
            choices: Vec::new(),
        };
        Self {
            members: (0..count as u32).map(member).collect(),
            links: vec![VecDeque::new(); count * count],
            open: vec![true; count * count],
            asked: None,
            looks: 0,
            omission,
        }
    }

    fn count(&self) -> usize {
        self.members.len()
    }

    fn at(&self, from: usize, to: usize) -> usize {
        from * self.count() + to
    }

    /// What must or may happen, losses aside.
    fn next(&self) -> Vec<Happening> {
        let (mut next, mut looks) = (Vec::new(), Vec::new());
        for from in 0..self.count() {
            for to in 0..self.count() {
                let link = &self.links[self.at(from, to)];
                if !link.is_empty() && self.members[to].lives {
                    next.push(Happening::Arrive(from, to));
                    let said = |frame: &Sent| matches!(frame, Sent::Said(..));
                    if !self.members[from].lives && link.iter().any(said) {
                        next.push(Happening::Lose(from, to));
                    }
                }
            }
            let member = &self.members[from];
            if member.lives && member.freezing {
                next.push(Happening::Report(from));
            }
            let due = member.agreement.deadline_ns().is_some() && self.omission != Some(Omission::GiveUp);
            if member.lives && due {
                looks.push(Happening::Look(from));
            }
        }
        if next.is_empty() || self.looks < HASTY_ATTEMPTS {
            next.extend(looks);
        }
        next
    }

    /// Whether this can happen to who lives, and what is connected or is not.
    fn can(&self, what: Happening) -> bool {
        let lives = |rank: usize| self.members[rank].lives;
        match what {
            Happening::Kill(rank) | Happening::Leave(rank) | Happening::Finish(rank) => lives(rank),
            Happening::Break(one, other) | Happening::Renew(one, other) => self.open[self.at(one, other)],
            Happening::Mend(one, other) => lives(one) && lives(other) && !self.open[self.at(one, other)],
            _ => true,
        }
    }

    fn happen(&mut self, what: Happening) -> Result<(), String> {
        // Time stands still: the order of everything is what is explored.
        let now_ns = 0;
        match what {
            Happening::Arrive(from, to) => {
                let at = self.at(from, to);
                let Some(frame) = self.links[at].pop_front() else { return Ok(()) };
                self.arrive(now_ns, from, to, frame);
                self.follow(now_ns, to)
            }
            Happening::Report(rank) => {
                let member = &mut self.members[rank];
                member.freezing = false;
                let report = report_of(rank, member.agreement.epoch(), member.frozen);
                member.agreement.frozen(now_ns, report);
                self.follow(now_ns, rank)
            }
            Happening::Look(rank) => {
                self.looks += 1;
                let agreement = &mut self.members[rank].agreement;
                let due_ns = agreement.deadline_ns().unwrap_or(0);
                agreement.look(due_ns);
                self.follow(due_ns, rank)
            }
            Happening::Leave(rank) => {
                self.members[rank].agreement.leave(now_ns);
                self.follow(now_ns, rank)
            }
            Happening::Finish(rank) => {
                self.members[rank].agreement.end(now_ns);
                self.follow(now_ns, rank)
            }
            Happening::Kill(rank) => {
                self.members[rank].lives = false;
                (0..self.count())
                    .filter(|other| *other != rank)
                    .for_each(|other| self.end(rank, other, false));
                Ok(())
            }
            Happening::Lose(from, to) => {
                let at = self.at(from, to);
                let last = self.links[at].iter().rposition(|frame| matches!(frame, Sent::Said(..)));
                last.and_then(|last| self.links[at].remove(last));
                Ok(())
            }
            Happening::Break(one, other) => {
                self.end(one, other, true);
                self.end(other, one, true);
                Ok(())
            }
            Happening::Mend(one, other) | Happening::Renew(one, other) => {
                for (from, to) in [(one, other), (other, one)] {
                    let at = self.at(from, to);
                    if std::mem::replace(&mut self.open[at], true) {
                        self.links[at].retain(|frame| !matches!(frame, Sent::Said(..)));
                    }
                    self.links[at].push_back(Sent::Open);
                }
                Ok(())
            }
        }
    }

    /// Nothing more comes from `from` to `to`. Of a process that has died, what it had sent may still arrive.
    fn end(&mut self, from: usize, to: usize, lost: bool) {
        let at = self.at(from, to);
        if std::mem::take(&mut self.open[at]) {
            if lost {
                self.links[at].retain(|frame| !matches!(frame, Sent::Said(..)));
            }
            self.links[at].push_back(Sent::End);
        }
        let back = self.at(to, from);
        if !lost {
            (self.open[back], self.links[back]) = (false, VecDeque::new());
        }
    }

    fn arrive(&mut self, now_ns: u64, from: usize, to: usize, frame: Sent) {
        let member = &mut self.members[to];
        let peer = Rank(from as u32);
        match frame {
            Sent::End => member.agreement.suspect(now_ns, peer),
            Sent::Open if self.omission == Some(Omission::SayNothingAgain) => {
                member.agreement.heard_again(now_ns, peer);
                member.agreement.take_effects();
            }
            Sent::Open => member.agreement.heard_again(now_ns, peer),
            Sent::Said(epoch, message) => {
                let leads = member.agreement.members().iter().next() == Some(Rank(to as u32));
                if message == MemberMessage::Ends && !leads && self.omission == Some(Omission::PassNoEndOn) {
                    return;
                }
                self.asked =
                    if let MemberMessage::Propose(ballot, _) = &message { Some(*ballot) } else { None };
                member.agreement.heard_from(now_ns, peer, epoch, message);
            }
        }
    }

    /// Carries out what a member wants done, and looks at what it says.
    fn follow(&mut self, now_ns: u64, rank: usize) -> Result<(), String> {
        loop {
            let epoch = self.members[rank].agreement.epoch();
            let effects = self.members[rank].agreement.take_effects();
            if effects.is_empty() {
                return Ok(());
            }
            let told = effects.iter().any(|effect| matches!(effect, Effect::Chosen(_)));
            for effect in effects {
                match effect {
                    // What was said before an epoch ended is of that epoch.
                    Effect::Send(to, epoch, message) => {
                        let passes_on = matches!(message, MemberMessage::Chosen(_)) && told;
                        let leads = matches!(&message, MemberMessage::Chosen(choice) if choice.ranks.first() == Some(&Rank(rank as u32)));
                        if passes_on && !leads && self.omission == Some(Omission::PassNothingOn) {
                            continue;
                        }
                        let at = self.at(rank, to.index());
                        if self.open[at] {
                            let bytes = self.altered(rank, message).encode(epoch);
                            let (epoch, message) = MemberMessage::decode(&bytes)?;
                            if let (MemberMessage::Propose(ballot, _), Some(Omission::ProposedIsAccepted)) =
                                (&message, self.omission)
                            {
                                let accepted = MemberMessage::Accepted(*ballot);
                                self.members[rank].agreement.heard_from(now_ns, to, epoch, accepted);
                            }
                            let frame = Sent::Said(epoch, message);
                            self.links[at].push_back(frame);
                        }
                    }
                    Effect::Freeze => {
                        let member = &mut self.members[rank];
                        (member.freezing, member.frozen) = (true, member.frozen + 1);
                    }
                    Effect::Plan(ballot, reports) => {
                        let mut plan = Vec::new();
                        for (of, report) in reports {
                            self.check_report(of, epoch, &report)?;
                            plan.extend(report);
                        }
                        self.members[rank].agreement.planned(now_ns, ballot, plan);
                    }
                    Effect::Chosen(choice) => self.chosen(rank, choice)?,
                }
            }
        }
    }

    /// What is said with a rule left out.
    fn altered(&mut self, rank: usize, mut message: MemberMessage) -> MemberMessage {
        match (&mut message, self.omission) {
            (MemberMessage::Promised(_, promise), Some(Omission::ForgetWhatWasAccepted)) => {
                promise.accepted = None;
            }
            (MemberMessage::Promised(_, promise), Some(Omission::ReportAnew)) => {
                let member = &mut self.members[rank];
                member.frozen += 1;
                promise.report = report_of(rank, member.agreement.epoch(), member.frozen);
            }
            (MemberMessage::Refused(_), Some(Omission::AcceptAnything)) => {
                return self.asked.map_or(message, MemberMessage::Accepted);
            }
            _ => {}
        }
        message
    }

    fn check_report(&self, of: Rank, epoch: u32, report: &[u8]) -> Result<(), String> {
        let member = &self.members[of.index()];
        let now = report_of(of.index(), epoch, member.frozen);
        if member.agreement.epoch() == epoch && report != now {
            return Err(format!("rank {of} has reported {report:?}, and has {now:?}"));
        }
        Ok(())
    }

    fn chosen(&mut self, rank: usize, choice: NextMembers) -> Result<(), String> {
        let epoch = choice.epoch as usize;
        if self.members[rank].choices.len() != epoch {
            return Err(format!("rank {rank} ends epoch {epoch} after {}", self.members[rank].choices.len()));
        }
        for (other, member) in self.members.iter().enumerate() {
            if let Some(theirs) = member.choices.get(epoch).filter(|theirs| **theirs != choice) {
                return Err(format!(
                    "epoch {epoch} ends with {choice:?} at rank {rank}, with {theirs:?} at rank {other}"
                ));
            }
        }
        let member = &mut self.members[rank];
        member.freezing = false;
        member.choices.push(choice);
        Ok(())
    }

    /// Nothing is left to happen: those who live, hear exactly each other and are enough have gone on together, and with nobody else.
    fn check_rest(&self) -> Result<(), String> {
        let last =
            self.members.iter().filter(|member| member.lives).map(|member| member.agreement.epoch()).max();
        let present = |member: &Voter| {
            member.lives && !member.agreement.is_out() && Some(member.agreement.epoch()) == last
        };
        for (rank, member) in self.members.iter().enumerate().filter(|(_, member)| present(member)) {
            let (agreement, members) = (&member.agreement, member.agreement.members());
            let hears = |one: usize| -> Vec<usize> {
                let heard = |other: &usize| {
                    *other == one || self.members[*other].lives && self.open[self.at(one, *other)]
                };
                members.iter().map(Rank::index).filter(heard).collect()
            };
            let near = hears(rank);
            let apart = near.iter().all(|other| hears(*other) == near);
            let whole = near.len() == members.count() as usize;
            if apart && near.len() >= agreement.quorum() {
                if agreement.is_ending() || agreement.is_frozen() || !whole {
                    return Err(format!(
                        "rank {rank} is held up in epoch {last:?} of {members:?}, and need not be"
                    ));
                }
            } else if !whole && !agreement.is_ending() {
                return Err(format!("rank {rank} goes on with {members:?}, and hears only {near:?}"));
            }
        }
        Ok(())
    }
}

/// What was found by going through every order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Orders {
    /// Different states that a job can be in.
    pub states: u64,
    /// Of these, the ones in which nothing is left to happen.
    pub ends: u64,
}

/// Plays every order in which messages of `count` members can arrive when the last one leaves, or not, and one of them dies,
/// whoever and whenever, with or without what it has sent last, or with `breaks` a connection breaks, for good or to be made anew at
/// once. `enough` must agree.
///
/// # Errors
/// What does not hold, and where.
pub fn every_order(
    count: usize,
    breaks: bool,
    enough: Option<u32>,
    omission: Option<Omission>,
) -> Result<Orders, String> {
    let mut seen = HashSet::new();
    let mut found = Orders::default();
    let mut open = vec![(World::new(count, enough, omission), false, false)];
    while let Some((world, lost, left)) = open.pop() {
        if !seen.insert(fingerprint(&(&world, lost, left))) {
            continue;
        }
        found.states += 1;
        let mut next = world.next();
        if next.is_empty() {
            found.ends += 1;
            world.check_rest().map_err(|what| format!("{what}\n{world:#?}"))?;
        }
        if !lost {
            next.extend((0..count).map(Happening::Kill));
            let pairs = (0..count).flat_map(|one| (0..one).map(move |other| (one, other)));
            for (one, other) in pairs.filter(|_| breaks) {
                next.extend([Happening::Break(one, other), Happening::Renew(one, other)]);
            }
        }
        if !left && world.members[count - 1].lives {
            next.push(Happening::Leave(count - 1));
        }
        for what in next {
            let mut after = world.clone();
            after.happen(what).map_err(|violation| format!("{violation}, by {what:?}\n{world:#?}"))?;
            let losing = matches!(what, Happening::Kill(_) | Happening::Break(..) | Happening::Renew(..));
            open.push((after, lost || losing, left || matches!(what, Happening::Leave(_))));
        }
    }
    Ok(found)
}

/// States are told apart by 128 bits of them: whole, they would take gigabytes.
fn fingerprint(state: &impl Hash) -> (u64, u64) {
    let hash = |salt: u64| {
        let mut hasher = DefaultHasher::new();
        (salt, state).hash(&mut hasher);
        hasher.finish()
    };
    (hash(0), hash(1))
}

/// What became of a job.
#[derive(Debug, Clone, Copy, Default)]
pub struct EpochCounts {
    /// Epochs that have ended.
    pub epochs: usize,
    /// Some rank lives and has no quorum.
    pub lacks: bool,
    /// Some rank lives and was left out.
    pub out: bool,
}

/// Draws a job of 2 to 9 members from `seed`, in which some die, leave, or lose connections, which may be made anew; plays it until
/// nothing is left to happen.
///
/// # Errors
/// What does not hold.
pub fn run(seed: u64, omission: Option<Omission>) -> Result<EpochCounts, String> {
    let mut random = Random::new(seed);
    let count = random.between(2, 9) as usize;
    let mut world = World::new(count, None, omission);
    let mut faults = drawn(&mut random, count);
    let mut trace = Vec::new();
    let failed = |what: String, trace: &[String]| {
        format!("seed {seed}, {count} members: {what}\n{}", trace.join("\n"))
    };
    for _ in 0..EVENTS_MAX {
        let next = world.next();
        let what = match faults.last() {
            Some(_) if next.is_empty() || random.chance(60) => faults.pop(),
            _ if next.is_empty() => break,
            _ => Some(random.pick(&next)),
        };
        let Some(what) = what.filter(|what| world.can(*what)) else { continue };
        trace.push(format!("{what:?}"));
        world.happen(what).map_err(|what| failed(what, &trace))?;
    }
    if !world.next().is_empty() {
        return Err(failed(format!("{EVENTS_MAX} events and no end"), &trace));
    }
    world.check_rest().map_err(|what| {
        let states = world.members.iter().map(|member| format!("{member:?}"));
        trace.extend(states);
        failed(what, &trace)
    })?;
    let living = || world.members.iter().filter(|member| member.lives);
    Ok(EpochCounts {
        epochs: world.members.iter().map(|member| member.choices.len()).max().unwrap_or(0),
        lacks: living().any(|member| member.agreement.lacks_quorum() && !member.agreement.is_out()),
        out: living().any(|member| member.agreement.is_out()),
    })
}

/// What goes wrong, the last first.
fn drawn(random: &mut Random, count: usize) -> Vec<Happening> {
    let mut faults = Vec::new();
    for _ in 0..random.between(1, 4) {
        let (one, other) = (random.below(count as u64) as usize, random.below(count as u64) as usize);
        match random.below(7) {
            0 | 1 => faults.push(Happening::Kill(one)),
            2 => faults.push(Happening::Leave(one)),
            5 => faults.push(Happening::Finish(one)),
            6 if one != other => faults.push(Happening::Renew(one, other)),
            3 if one != other => {
                faults.push(Happening::Break(one, other));
                if random.chance(600) {
                    faults.push(Happening::Mend(one, other));
                }
            }
            _ => {
                // A partition: all connections between two parts.
                let mut ranks: Vec<usize> = (0..count).collect();
                random.shuffle(&mut ranks);
                let (part, rest) = ranks.split_at(1 + random.below(count as u64 - 1) as usize);
                let pairs: Vec<_> =
                    part.iter().flat_map(|one| rest.iter().map(move |other| (*one, *other))).collect();
                faults.extend(pairs.iter().map(|(one, other)| Happening::Break(*one, *other)));
                if random.chance(500) {
                    faults.extend(pairs.iter().map(|(one, other)| Happening::Mend(*one, *other)));
                }
            }
        }
    }
    faults.reverse();
    faults
}

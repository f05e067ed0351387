//! Agreements on the next members, with [`penstock_core::agreement`] as it ships and nothing else of the protocol: every order of
//! messages for few members ([`every_order`]), and many members, losses and partitions by chance ([`run`]).
//!
//! A connection keeps its frames in order; when it breaks, what is on its way is lost, and both ends see that, each when it comes to
//! it. A connection may be made anew.

use crate::random::Random;
use penstock_core::agreement::{Ballot, Effect, MemberMessage, NextMembers, Succession};
use penstock_core::{Members, Rank};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
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
    /// A newcomer that one member hears is in the next epoch.
    OneHearsIt,
    /// Programs that do not wait for newcomers count as waiting.
    AllCountAsWaiting,
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
    /// The choices that it knows, one for each epoch that has ended since it came.
    choices: BTreeMap<u32, NextMembers>,
    /// Its program waits for newcomers.
    waits: bool,
    /// By epoch, the newcomers that it has promised with.
    promised: BTreeMap<u32, BTreeSet<Rank>>,
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
    /// How many were members from the beginning; the others are newcomers.
    founders: usize,
    /// Newcomers that have connected.
    came: BTreeSet<usize>,
    /// Who accuses whom, and has not heard it anew.
    accused: BTreeSet<(usize, usize)>,
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
    /// A verdict of one finds the other wrong, which lives and hears everybody.
    Accuse(usize, usize),
    /// A newcomer connects with all that live.
    Come(usize),
    /// A program waits for newcomers.
    Wait(usize),
}

fn report_of(rank: usize, epoch: u32, frozen: u8) -> Vec<u8> {
    vec![rank as u8, epoch as u8, frozen]
}

impl World {
    /// Of `count` members and so many newcomers.
    fn new(count: usize, newcomers: usize, enough: Option<u32>, omission: Option<Omission>) -> Self {
        let members = Members::all(count as u32);
        let everybody = count + newcomers;
        let enough = if omission == Some(Omission::TwoAreEnough) { Some(2) } else { enough };
        let member = |rank: u32| Voter {
            agreement: if (rank as usize) < count {
                Succession::new(Rank(rank), &members, enough)
            } else {
                Succession::newcomer(Rank(rank), &members, enough, report_of(rank as usize, 0, 0))
            },
            lives: true,
            freezing: false,
            frozen: 0,
            choices: BTreeMap::new(),
            waits: false,
            promised: BTreeMap::new(),
        };
        let pairs = (0..everybody * everybody).map(|at| (at / everybody, at % everybody));
        Self {
            members: (0..everybody as u32).map(member).collect(),
            links: vec![VecDeque::new(); everybody * everybody],
            open: pairs.map(|(one, other)| one.max(other) < count).collect(),
            asked: None,
            founders: count,
            came: BTreeSet::new(),
            accused: BTreeSet::new(),
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

    /// All newcomers but the last if there are several: that one must not come in with the others.
    fn awaited(&self) -> Vec<Rank> {
        let last = if self.count() > self.founders + 1 { self.count() - 1 } else { self.count() };
        (self.founders..last).map(|rank| Rank(rank as u32)).collect()
    }

    /// Who has found others wrong, and is left with too few: it ends after a while, and the others see that.
    fn gives_up(&self) -> Option<usize> {
        let lacks = |rank: &usize| {
            let Voter { lives, agreement, .. } = &self.members[*rank];
            *lives && !agreement.is_out() && agreement.is_ending() && agreement.lacks_quorum()
        };
        self.accused.iter().map(|(accuser, _)| *accuser).find(lacks)
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
            Happening::Kill(rank)
            | Happening::Leave(rank)
            | Happening::Finish(rank)
            | Happening::Come(rank) => lives(rank),
            Happening::Wait(rank) | Happening::Accuse(rank, _) => {
                lives(rank) && !self.members[rank].agreement.is_out()
            }
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
            Happening::Accuse(one, other) => {
                if self.members[one].agreement.members().contains(Rank(other as u32)) {
                    self.accused.insert((one, other));
                }
                self.members[one].agreement.end_without(now_ns, &[Rank(other as u32)]);
                self.follow(now_ns, one)
            }
            Happening::Wait(rank) => {
                self.members[rank].waits = true;
                let awaited = self.awaited();
                self.members[rank].agreement.ready(now_ns, &awaited);
                self.follow(now_ns, rank)
            }
            Happening::Come(rank) => {
                self.came.insert(rank);
                let others = (0..self.count()).filter(|other| *other != rank && self.members[*other].lives);
                let others: Vec<usize> = others.filter(|other| !self.open[self.at(rank, *other)]).collect();
                others.into_iter().try_for_each(|other| self.happen(Happening::Mend(rank, other)))
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
        if frame == Sent::Open {
            self.accused.remove(&(to, from));
        }
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
                            if of.index() >= self.founders && report == report_of(of.index(), 0, 0) {
                                continue; // a newcomer's word
                            }
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
        if let MemberMessage::Promised(_, promise) = &message {
            let member = &mut self.members[rank];
            let promised = member.promised.entry(member.agreement.epoch()).or_default();
            promised.extend(promise.newcomers.keys());
        }
        match (&mut message, self.omission) {
            (MemberMessage::Promised(_, promise), Some(Omission::ForgetWhatWasAccepted)) => {
                promise.accepted = None;
            }
            (MemberMessage::Promised(_, promise), Some(Omission::ReportAnew)) => {
                let member = &mut self.members[rank];
                member.frozen += 1;
                promise.report = report_of(rank, member.agreement.epoch(), member.frozen);
            }
            (MemberMessage::Promised(_, promise), Some(Omission::AllCountAsWaiting)) => promise.ready = true,
            (MemberMessage::Promised(_, promise), Some(Omission::OneHearsIt)) => {
                let all = self.members.iter().flat_map(|member| member.agreement.newcomers());
                promise.newcomers = all.map(|rank| (rank, report_of(rank.index(), 0, 0))).collect();
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
        let epoch = choice.epoch;
        let last = self.members[rank].choices.last_key_value().map(|(last, _)| *last);
        if last.map_or(0, |last| last + 1) != epoch {
            return Err(format!("rank {rank} ends epoch {epoch} after {last:?}"));
        }
        for (other, member) in self.members.iter().enumerate() {
            if let Some(theirs) = member.choices.get(&epoch).filter(|theirs| **theirs != choice) {
                return Err(format!(
                    "epoch {epoch} ends with {choice:?} at rank {rank}, with {theirs:?} at rank {other}"
                ));
            }
        }
        // Whose programs go on now have all waited.
        let waited = |one: &&Rank| {
            let Voter { choices, waits, lives, .. } = &self.members[one.index()];
            *waits || !lives || choices.contains_key(&epoch) || one.index() >= self.founders
        };
        let awaited = self.awaited();
        let before = self.members[rank].choices.get(&epoch.wrapping_sub(1));
        let was =
            |one: &Rank| before.map_or(one.index() < self.founders, |before| before.ranks.contains(one));
        if let Some(other) = choice.ranks.iter().find(|one| !was(one) && !awaited.contains(one)) {
            return Err(format!("rank {other} is in {choice:?}, and nobody has waited for it"));
        }
        // Whoever leads promises to itself, and says nothing: of one it is not known.
        for newcomer in choice.ranks.iter().filter(|one| !was(one)) {
            let deaf = |one: &&Rank| {
                let promised = self.members[one.index()].promised.get(&epoch);
                was(one) && promised.is_some_and(|promised| !promised.contains(newcomer))
            };
            let deaf: Vec<&Rank> = choice.ranks.iter().filter(deaf).collect();
            if deaf.len() > 1 {
                return Err(format!("ranks {deaf:?} do not hear rank {newcomer}, which is in {choice:?}"));
            }
        }
        if let Some(early) = choice.ranks.iter().find(|one| choice.admits && !waited(one)) {
            return Err(format!("rank {early} does not wait, and {choice:?} admits newcomers"));
        }
        let awaited = self.awaited();
        let member = &mut self.members[rank];
        member.freezing = false;
        if choice.admits {
            member.waits = false;
        } else if member.waits {
            member.agreement.ready(0, &awaited);
        }
        member.choices.insert(epoch, choice);
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
                let accused = |other: usize| {
                    self.accused.contains(&(one, other)) || self.accused.contains(&(other, one))
                };
                let heard = |other: &usize| {
                    let open = self.members[*other].lives && self.open[self.at(one, *other)];
                    *other == one || open && !accused(*other)
                };
                members.iter().map(Rank::index).filter(heard).collect()
            };
            let near = hears(rank);
            let apart = near.iter().all(|other| hears(*other) == near);
            let whole = near.len() == members.count() as usize;
            if apart && near.len() >= agreement.quorum() {
                let waits = near.iter().all(|other| self.members[*other].waits);
                if agreement.is_ending() || agreement.is_frozen() || !whole || waits {
                    return Err(format!(
                        "rank {rank} is held up in epoch {last:?} of {members:?}, and need not be"
                    ));
                }
            } else if !whole && !agreement.is_ending() && !self.accused.iter().any(|pair| pair.1 == rank) {
                return Err(format!("rank {rank} goes on with {members:?}, and hears only {near:?}"));
            }
        }
        let goes_on = |rank: usize| present(&self.members[rank]) && !self.members[rank].agreement.is_ending();
        let both = |pair: &&(usize, usize)| goes_on(pair.0) && goes_on(pair.1);
        if let Some((one, other)) = self.accused.iter().find(both) {
            return Err(format!("rank {one} has found rank {other} wrong, and both go on"));
        }
        // A newcomer knows of all epochs as long as it hears all members that live.
        let living: Vec<usize> = (0..self.count()).filter(|rank| present(&self.members[*rank])).collect();
        for rank in self.came.iter().filter(|rank| self.members[**rank].lives) {
            let agreement = &self.members[*rank].agreement;
            let hears = living.iter().all(|other| self.open[self.at(*rank, *other)]);
            if agreement.is_newcomer() && hears && !living.is_empty() && Some(agreement.epoch()) != last {
                return Err(format!(
                    "rank {rank} is a newcomer of epoch {}, not {last:?}",
                    agreement.epoch()
                ));
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
/// once. `enough` must agree. With newcomers nobody leaves, and all programs wait for them once, each whenever it comes to that.
///
/// # Errors
/// What does not hold, and where.
pub fn every_order(
    count: usize,
    newcomers: usize,
    breaks: bool,
    enough: Option<u32>,
    omission: Option<Omission>,
) -> Result<Orders, String> {
    let everybody = count + newcomers;
    let mut seen = HashSet::new();
    let mut found = Orders::default();
    let mut open = vec![(World::new(count, newcomers, enough, omission), false, newcomers > 0)];
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
            next.extend((0..everybody).map(Happening::Kill));
            let pairs = (0..everybody).flat_map(|one| (0..one).map(move |other| (one, other)));
            for (one, other) in pairs.filter(|(one, other)| breaks && world.open[world.at(*one, *other)]) {
                next.extend([Happening::Break(one, other), Happening::Renew(one, other)]);
            }
        }
        let comes = |rank: &usize| world.members[*rank].lives && !world.came.contains(rank);
        next.extend((count..everybody).filter(comes).map(Happening::Come));
        let admitted = |rank: usize| world.members[rank].choices.values().any(|choice| choice.admits);
        let may_wait = |rank: &usize| !world.members[*rank].waits && !admitted(*rank) && newcomers > 0;
        let waits = (0..count).filter(may_wait).map(Happening::Wait);
        next.extend(waits.filter(|what| world.can(*what)));
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
    /// Newcomers that have become members.
    pub admitted: usize,
}

/// Draws a job of 2 to 9 members from `seed`, in which some die, leave, or lose connections, which may be made anew; plays it until
/// nothing is left to happen.
///
/// # Errors
/// What does not hold.
pub fn run(seed: u64, omission: Option<Omission>) -> Result<EpochCounts, String> {
    let mut random = Random::new(seed);
    let count = random.between(2, 9) as usize;
    let newcomers = if random.chance(500) { random.between(1, 2) as usize } else { 0 };
    let mut world = World::new(count, newcomers, None, omission);
    let mut faults = drawn(&mut random, count, newcomers);
    let wait = (0..count).map(Happening::Wait).filter(|_| newcomers > 0);
    for what in wait.chain((count..count + newcomers).map(Happening::Come)) {
        faults.insert(random.below(faults.len() as u64 + 1) as usize, what);
    }
    let mut trace = Vec::new();
    let failed = |what: String, trace: &[String]| {
        format!("seed {seed}, {count} members, {newcomers} newcomers: {what}\n{}", trace.join("\n"))
    };
    for _ in 0..EVENTS_MAX {
        let next = world.next();
        let what = match faults.last() {
            Some(_) if next.is_empty() || random.chance(60) => faults.pop(),
            _ if next.is_empty() => match world.gives_up() {
                Some(rank) => Some(Happening::Kill(rank)),
                None => break,
            },
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
        admitted: world.members[count..].iter().filter(|member| !member.agreement.is_newcomer()).count(),
        lacks: living().any(|member| member.agreement.lacks_quorum() && !member.agreement.is_out()),
        out: living().any(|member| member.agreement.is_out() && !member.agreement.is_newcomer()),
    })
}

/// What goes wrong, the last first.
fn drawn(random: &mut Random, count: usize, newcomers: usize) -> Vec<Happening> {
    let mut faults = Vec::new();
    let everybody = (count + newcomers) as u64;
    for _ in 0..random.between(1, 4) {
        let (one, other) = (random.below(everybody) as usize, random.below(everybody) as usize);
        match random.below(8) {
            0 | 1 => faults.push(Happening::Kill(one)),
            2 if one < count => faults.push(Happening::Leave(one)),
            5 if one < count => faults.push(Happening::Finish(one)),
            6 if one != other => faults.push(Happening::Renew(one, other)),
            7 if one != other && one.max(other) < count => faults.push(Happening::Accuse(one, other)),
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

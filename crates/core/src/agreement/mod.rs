//! How the members of a job agree on the next ones when one of them is lost or leaves.
//!
//! Each *epoch* has its members, and one [`NextMembers`]: the members of the next epoch, and a plan that says how what is unfinished goes on.
//! The members of an epoch choose by ballots, as in Paxos (Lamport, 1998): whoever leads asks all for a promise, makes a plan of what
//! they report, and proposes it; what a quorum has accepted is chosen, whoever else says what.
//!
//! **Why there is one choice.** Any two quorums have a member in common, as long as a quorum is a majority, which it is unless the
//! user says otherwise. Who has promised a ballot accepts nothing of an earlier one, and says what it has accepted before; a
//! later ballot proposes that again. So two halves of a job cannot both go on: at most one of them has a quorum.
//! With fewer than a majority two halves may. Then whoever leads waits until all that it hears have accepted: as long as the members that
//! live hear each other there is one choice, whoever dies when.
//!
//! **Why reports stay true.** Before it promises, a member *freezes*: it takes in nothing more of this epoch's exchanges, and sends
//! nothing. What it reports is what it has until the choice is known. So whoever leads, and however often, the plan is made of the
//! same reports.
//!
//! **Who leads.** Each member takes for the leader the lowest rank that it hears and that has not yielded, and tells it that the epoch
//! ends. A rank that is told, and takes another for the leader, tells that one. A rank that hears fewer than a quorum yields. Two may lead
//! for a while: the ballots decide. Who is outbid waits before it asks again, the longer the higher its rank.
//!
//! **Who stays.** Those that have promised, that hear each other, and that do not leave; of two that do not hear each other, the one that more
//! others do not hear goes; else the one whom a verdict finds wrong, or the higher rank. Who is left out and lives is told so by those that it is still connected with.
//!
//! **Who comes.** A *newcomer* is no member: it is not asked, and counts for no quorum. It is connected with members, and says what is to be
//! known of it ([`MemberMessage::Present`]). Members whose programs all wait for newcomers, at a step that they have agreed on, say so to each
//! other ([`Succession::ready`]) and end the epoch. Those of these newcomers that all members hear are in the next one. Whom all hear, and do
//! not wait for, the plan has, too: so they agree for whom to wait, and where. A newcomer hears what is chosen as everybody does.
//!
//! What this leaves out: what a suspicion rests on ([`Hearing`]), what reports and plans say ([`crate::recovery`]), connections.

mod hearing;
mod message;
mod proposal;

pub use hearing::{Errands, Hearing, PATIENCE_NS};
pub use message::{Ballot, MemberMessage, NextMembers, Promise};

use crate::error::Error;
use crate::members::Members;
use crate::types::Rank;
use proposal::Proposal;
use std::collections::{BTreeMap, BTreeSet};

/// How long a leader whose first ballot was outbid waits before its next, for each rank from the lowest to its own. Twice as long after
/// each further attempt: two that lead at the same time do not outbid each other for ever, however slow their network is.
pub const BACKOFF_NS: u64 = 50_000_000;
/// The wait does not double more often than this.
const DOUBLINGS_MAX: u32 = 8;
/// Choices of past epochs that are kept, for members that have not heard of them.
const PAST_MAX: usize = 64;

/// So often the timeout of a peer may pass until members have agreed, each loss on the way included.
const TIMEOUTS_MAX: u64 = 5;

/// How long a program may have to wait for the next epoch: until members have agreed or [`Succession::given_up`] says that they will not,
/// and what they have chosen is carried out.
#[must_use]
pub fn longest_ns(peer_timeout_ns: u64) -> u64 {
    (TIMEOUTS_MAX + 3).saturating_mul(peer_timeout_ns)
}

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Send this to a peer, as of this epoch. Frames to one peer stay in order.
    Send(Rank, u32, MemberMessage),
    /// Take in and send nothing more of this epoch's exchanges; then tell [`Succession::frozen`] what there is.
    Freeze,
    /// This member leads: make a plan of what those who stay have reported, and newcomers have said, and tell [`Succession::planned`]. The
    /// ballot says of which.
    Plan(Ballot, Vec<(Rank, Vec<u8>)>),
    /// The next epoch has begun. Who is not among its members ends.
    Chosen(NextMembers),
}

/// One member's part in it, from epoch to epoch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Succession {
    me: Rank,
    epoch: u32,
    ranks: Vec<Rank>,
    /// How many must agree; none: a majority.
    enough: Option<u32>,
    /// Whom this member does not hear.
    suspects: BTreeSet<Rank>,
    /// Of these, whom a verdict of this member's finds wrong.
    accused: BTreeSet<Rank>,
    /// Who hears too few to lead.
    yielded: BTreeSet<Rank>,
    leaves: bool,
    /// Newcomers that this member hears, and what each has said of itself.
    newcomers: BTreeMap<Rank, Vec<u8>>,
    /// Who is connected and no member, newcomers among them: they are told what is chosen.
    guests: BTreeSet<Rank>,
    /// Whose programs wait for newcomers, and for which: the same for all.
    ready: BTreeSet<Rank>,
    awaited: Vec<Rank>,
    /// What this rank says of itself as long as it is a newcomer, with whom it is connected, and whether it has been with anybody.
    presents: Option<Vec<u8>>,
    met: BTreeSet<Rank>,
    has_met: bool,
    /// This epoch is to end: somebody is lost, leaves, or comes.
    ends: bool,
    /// Asked for a report, and the report.
    asked: bool,
    report: Option<Vec<u8>>,
    promised: Ballot,
    /// The latest ballot that this member's own have been refused for.
    seen: Ballot,
    /// A promise that waits for the report.
    owed: bool,
    accepted: Option<(Ballot, NextMembers)>,
    proposal: Option<Proposal>,
    /// Not before then another ballot.
    again_ns: Option<u64>,
    /// As the leader: too few hear each other.
    too_few: bool,
    /// As the leader: since the ballot began somebody may hear more than it has promised with.
    outdated: bool,
    /// Who was told last that this epoch is to end.
    urged: Option<Rank>,
    /// Since when it is to end, and since when there are too few for that, as far as somebody has looked.
    ending_ns: Option<u64>,
    lacking_ns: Option<u64>,
    past: BTreeMap<u32, NextMembers>,
    effects: Vec<Effect>,
}

impl Succession {
    /// Of member `me` of a job that begins with these. `enough` members must agree if that is given; otherwise more than half.
    #[must_use]
    pub fn new(me: Rank, members: &Members, enough: Option<u32>) -> Self {
        Self {
            me,
            epoch: members.epoch(),
            ranks: members.iter().collect(),
            enough,
            suspects: BTreeSet::new(),
            accused: BTreeSet::new(),
            yielded: BTreeSet::new(),
            leaves: false,
            newcomers: BTreeMap::new(),
            guests: BTreeSet::new(),
            ready: BTreeSet::new(),
            awaited: Vec::new(),
            presents: None,
            met: BTreeSet::new(),
            has_met: false,
            ends: false,
            asked: false,
            report: None,
            promised: Ballot::default(),
            seen: Ballot::default(),
            owed: false,
            accepted: None,
            proposal: None,
            again_ns: None,
            too_few: false,
            outdated: false,
            urged: None,
            ending_ns: None,
            lacking_ns: None,
            past: BTreeMap::new(),
            effects: Vec::new(),
        }
    }

    /// Of a rank that is to be a member, and is connected with none yet; it says this of itself.
    #[must_use]
    pub fn newcomer(me: Rank, members: &Members, enough: Option<u32>, said: Vec<u8>) -> Self {
        Self { presents: Some(said), ..Self::new(me, members, enough) }
    }

    /// What is to be done, in this order. To be called after every other call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// The present epoch.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Its members.
    #[must_use]
    pub fn members(&self) -> Members {
        self.ranks.iter().copied().collect::<Members>().in_epoch(self.epoch)
    }

    /// Whether this member takes part in exchanges at present: not once it was asked for a report.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.asked
    }

    /// Whether this epoch is to end, and what follows is not chosen yet. Where too few hear each other that lasts, until
    /// [`Succession::given_up`].
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ends
    }

    /// Whether this member does not hear that one.
    #[must_use]
    pub fn suspects(&self, rank: Rank) -> bool {
        self.suspects.contains(&rank)
    }

    /// How many members must agree on what follows this epoch.
    #[must_use]
    pub fn quorum(&self) -> usize {
        self.enough.map_or(self.majority(), |enough| (enough as usize).clamp(1, self.ranks.len()))
    }

    fn majority(&self) -> usize {
        self.ranks.len() / 2 + 1
    }

    /// Whether too few members are heard, or hear each other, as far as this one knows: why an epoch that is to end does not.
    #[must_use]
    pub fn lacks_quorum(&self) -> bool {
        self.too_few || self.heard().count() < self.quorum()
    }

    /// Why this member cannot go on, to be asked every now and then: too few are heard for as long as a peer may be silent, or those who
    /// are heard do not come to an agreement; or why a newcomer cannot come: nobody is heard any more. `why` says what has ended the epoch, if
    /// that is known.
    pub fn given_up(&mut self, now_ns: u64, peer_timeout_ns: u64, why: &str) -> Option<Error> {
        if self.is_newcomer() {
            return self.nobody_is_left(now_ns, peer_timeout_ns);
        }
        if !self.ends || self.is_out() {
            return None;
        }
        let ending_ns = *self.ending_ns.get_or_insert(now_ns);
        self.lacking_ns = self.lacks_quorum().then(|| self.lacking_ns.unwrap_or(now_ns));
        let (me, epoch, heard) = (self.me, self.epoch, self.heard().count());
        let because = if why.is_empty() { String::new() } else { format!(". What ended it: {why}") };
        let since = |since_ns: u64| now_ns.saturating_sub(since_ns);
        let reason = if self.lacking_ns.is_some_and(|lacking_ns| since(lacking_ns) >= peer_timeout_ns) {
            format!(
                "too few members are left to go on: rank {me} hears {heard} of the {} of epoch {epoch}, itself included, and {} \
                 must agree (ranks_min){because}",
                self.ranks.len(),
                self.quorum()
            )
        } else if since(ending_ns) >= TIMEOUTS_MAX * peer_timeout_ns {
            format!(
                "the {heard} members of epoch {epoch} that rank {me} hears have not agreed on the next ones within {TIMEOUTS_MAX} \
                 times peer_timeout_s{because}"
            )
        } else {
            return None;
        };
        Some(Error::PeerLost { rank: me, reason })
    }

    fn nobody_is_left(&mut self, now_ns: u64, peer_timeout_ns: u64) -> Option<Error> {
        let alone = self.has_met && self.met.is_empty();
        self.lacking_ns = alone.then(|| self.lacking_ns.unwrap_or(now_ns));
        let since_ns = self.lacking_ns?;
        let (rank, is_over) = (self.me, now_ns.saturating_sub(since_ns) >= peer_timeout_ns);
        let reason = format!(
            "rank {rank}, a newcomer, hears no member of the job any more: all have ended, or cannot be reached from here. If some are \
             left start it again, with the door of one of them"
        );
        is_over.then_some(Error::PeerLost { rank, reason })
    }

    /// Whether this rank is no member any more, because the others have chosen to go on without it, or none yet.
    #[must_use]
    pub fn is_out(&self) -> bool {
        !self.ranks.contains(&self.me)
    }

    /// Whether it waits to be a member.
    #[must_use]
    pub fn is_newcomer(&self) -> bool {
        self.presents.is_some()
    }

    /// The newcomers that this member hears.
    pub fn newcomers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.newcomers.keys().copied()
    }

    /// This member's program waits for these newcomers, at a step that all have agreed on, with nothing under way, and has waited enough:
    /// once all do the epoch ends. To be said in each epoch anew.
    pub fn ready(&mut self, now_ns: u64, awaited: &[Rank]) {
        if self.is_out() || !self.ready.insert(self.me) {
            return;
        }
        self.awaited = awaited.to_vec();
        let others: Vec<Rank> = self.heard().filter(|rank| *rank != self.me).collect();
        self.effects
            .extend(others.into_iter().map(|rank| Effect::Send(rank, self.epoch, MemberMessage::Ready)));
        self.end_if_ready(now_ns);
    }

    /// Whether this member's program waits for newcomers, and that one's does not yet.
    #[must_use]
    pub fn waits_for(&self, rank: Rank) -> bool {
        self.ready.contains(&self.me) && !self.ready.contains(&rank)
    }

    /// Programs have waited too long for those that do not come to where newcomers are waited for.
    pub fn overdue(&mut self, now_ns: u64) {
        let late: Vec<Rank> = self.heard().filter(|rank| !self.ready.contains(rank)).collect();
        self.end_without(now_ns, &late);
    }

    fn end_if_ready(&mut self, now_ns: u64) {
        if !self.ends && self.heard().all(|rank| self.ready.contains(&rank)) {
            self.end(now_ns);
        }
    }

    /// The connection to a peer has ended, or nothing comes from it.
    pub fn suspect(&mut self, now_ns: u64, peer: Rank) {
        self.met.remove(&peer);
        self.guests.remove(&peer);
        if self.newcomers.remove(&peer).is_some() && !self.is_out() && !self.ranks.contains(&peer) {
            // It may be a member already, by a choice that this one does not know yet.
            self.suspects.insert(peer);
            return;
        }
        if peer == self.me || self.is_out() || !self.ranks.contains(&peer) || !self.suspects.insert(peer) {
            return;
        }
        self.ends = true;
        self.urge(now_ns);
        self.conclude(now_ns);
        self.count_agreed(now_ns);
    }

    /// It is heard again, by a new connection. What was under way on the old one is said again.
    pub fn heard_again(&mut self, now_ns: u64, peer: Rank) {
        self.suspects.remove(&peer);
        self.accused.remove(&peer);
        self.met.insert(peer);
        self.has_met = true;
        if !self.ranks.contains(&peer) {
            self.guests.insert(peer);
        }
        self.yielded.clear();
        // One that has missed several asks for the others.
        let missed = self.past.last_key_value().map(|(_, choice)| MemberMessage::Chosen(choice.clone()));
        self.effects.extend(missed.map(|message| Effect::Send(peer, self.epoch, message)));
        self.say_again(peer);
        if self.ends && !self.is_out() {
            self.urge(now_ns);
        }
    }

    /// What is under way, to a peer that may have heard nothing of it.
    fn say_again(&mut self, peer: Rank) {
        let asks = self.proposal.as_ref().and_then(|proposal| proposal.asks(peer));
        let ready = self.ready.contains(&self.me).then_some(MemberMessage::Ready);
        let again = asks.into_iter().chain(ready).map(|message| Effect::Send(peer, self.epoch, message));
        self.effects.extend(again);
        self.present();
    }

    /// As a newcomer: says so, once it is connected with all. Members need not agree on one that some of them will never hear.
    fn present(&mut self) {
        let Some(said) =
            self.presents.clone().filter(|_| self.ranks.iter().all(|rank| self.met.contains(rank)))
        else {
            return;
        };
        let said = |rank: &Rank| Effect::Send(*rank, self.epoch, MemberMessage::Present(said.clone()));
        self.effects.extend(self.ranks.iter().map(said));
    }

    /// This epoch is to end, whoever is in the next one: all may be.
    pub fn end(&mut self, now_ns: u64) {
        if !self.is_out() {
            self.ends = true;
            self.urge(now_ns);
        }
    }

    /// As [`Succession::end`], because of these: they are in the next one only if they are heard anew.
    pub fn end_without(&mut self, now_ns: u64, out: &[Rank]) {
        self.accused.extend(out);
        out.iter().for_each(|rank| self.suspect(now_ns, *rank));
        self.end(now_ns);
    }

    /// This member wants to leave: it takes part until the next epoch begins without it. Nobody but the simulator asks for that yet: a
    /// program that ends says goodbye, which ends no epoch ([`Hearing::departed`]).
    pub fn leave(&mut self, now_ns: u64) {
        (self.leaves, self.ends) = (true, true);
        self.urge(now_ns);
    }

    /// What this member has of this epoch's exchanges, in which it takes part no more.
    pub fn frozen(&mut self, now_ns: u64, report: Vec<u8>) {
        self.report = Some(report);
        if std::mem::take(&mut self.owed) {
            self.promise(now_ns, self.promised);
        }
    }

    /// The plan that was asked for, unless another ballot has begun meanwhile.
    pub fn planned(&mut self, now_ns: u64, ballot: Ballot, plan: Vec<u8>) {
        let Some(proposal) = self.proposal.as_mut().filter(|proposal| proposal.ballot == ballot) else {
            return;
        };
        let Some((ranks, admits)) = proposal.planned.take() else { return };
        self.propose(now_ns, NextMembers { epoch: self.epoch, ranks, admits, plan });
    }

    /// A member, or one of an earlier epoch, has said this.
    pub fn heard_from(&mut self, now_ns: u64, from: Rank, epoch: u32, message: MemberMessage) {
        if let MemberMessage::Chosen(choice) = message {
            if choice.epoch > self.epoch {
                self.effects.push(Effect::Send(from, self.epoch, MemberMessage::Ends)); // of this epoch, which it answers by its choice
            }
            return self.choose(now_ns, choice);
        }
        if epoch < self.epoch {
            let missed: Vec<NextMembers> =
                self.past.range(epoch..).map(|(_, choice)| choice.clone()).collect();
            let told = missed
                .into_iter()
                .map(|choice| Effect::Send(from, self.epoch, MemberMessage::Chosen(choice)));
            self.effects.extend(told);
            return self.say_again(from);
        }
        if epoch > self.epoch {
            return self.effects.push(Effect::Send(from, self.epoch, MemberMessage::Ends));
        }
        if self.is_out() {
            return;
        }
        if let MemberMessage::Present(said) = message {
            if !self.ranks.contains(&from) {
                self.newcomers.insert(from, said);
            }
            return;
        }
        if !self.ranks.contains(&from) {
            return;
        }
        match message {
            MemberMessage::Chosen(_) | MemberMessage::Present(_) => {}
            MemberMessage::Ready => {
                self.ready.insert(from);
                self.end_if_ready(now_ns);
            }
            MemberMessage::Ends => {
                self.ends = true;
                // Who has told this member takes it for the leader; whoever this one takes for it should know.
                let leader = self.leader();
                if self.yielded.contains(&self.me) {
                    self.effects.push(Effect::Send(from, self.epoch, MemberMessage::Yields));
                } else if leader == self.me || (leader != from && self.urged != Some(leader)) {
                    self.urge(now_ns);
                }
            }
            MemberMessage::Yields => {
                self.ends = true;
                self.yielded.insert(from);
                self.urge(now_ns);
            }
            MemberMessage::Prepare(ballot) if ballot < self.promised => self.refuse(from),
            MemberMessage::Prepare(ballot) => {
                self.ends = true;
                self.outbid(now_ns, ballot);
                self.promise(now_ns, ballot);
            }
            MemberMessage::Promised(ballot, promise) => {
                if let Some(proposal) = self.proposal.as_mut().filter(|proposal| proposal.ballot == ballot) {
                    proposal.promises.insert(from, promise);
                    self.conclude(now_ns);
                }
            }
            MemberMessage::Propose(ballot, _) if ballot < self.promised => self.refuse(from),
            MemberMessage::Propose(ballot, choice) => {
                self.ends = true;
                self.outbid(now_ns, ballot);
                self.turn_to(now_ns, ballot);
                self.owed = false;
                self.accepted = Some((ballot, choice));
                self.tell(now_ns, from, MemberMessage::Accepted(ballot));
            }
            MemberMessage::Accepted(ballot) => self.agreed(now_ns, from, ballot),
            MemberMessage::Refused(promised) => self.outbid(now_ns, promised),
        }
    }

    /// What time alone shows.
    pub fn look(&mut self, now_ns: u64) {
        if self.again_ns.is_some_and(|again_ns| now_ns >= again_ns) {
            self.again_ns = None;
            self.urge(now_ns);
        }
    }

    /// When [`Succession::look`] may have something to do.
    #[must_use]
    pub fn deadline_ns(&self) -> Option<u64> {
        self.again_ns
    }

    fn heard(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks.iter().copied().filter(|rank| !self.suspects.contains(rank))
    }

    fn leader(&self) -> Rank {
        self.heard().find(|rank| !self.yielded.contains(rank)).unwrap_or(self.me)
    }

    fn tell(&mut self, now_ns: u64, to: Rank, message: MemberMessage) {
        if to == self.me {
            self.heard_from(now_ns, to, self.epoch, message);
        } else {
            self.effects.push(Effect::Send(to, self.epoch, message));
        }
    }

    fn tell_all(&mut self, now_ns: u64, message: &MemberMessage) {
        // Itself last: what it answers must not overtake what the others are told.
        let others: Vec<Rank> = self.heard().filter(|rank| *rank != self.me).collect();
        others.into_iter().for_each(|rank| self.tell(now_ns, rank, message.clone()));
        self.tell(now_ns, self.me, message.clone());
    }

    /// See to it that whoever leads begins.
    fn urge(&mut self, now_ns: u64) {
        if self.heard().count() < self.quorum() && self.yielded.insert(self.me) {
            self.proposal = None;
            let others: Vec<Rank> = self.heard().filter(|rank| *rank != self.me).collect();
            self.effects
                .extend(others.into_iter().map(|rank| Effect::Send(rank, self.epoch, MemberMessage::Yields)));
        }
        let leader = self.leader();
        if leader == self.me {
            return self.begin(now_ns);
        }
        self.urged = Some(leader);
        self.tell(now_ns, leader, MemberMessage::Ends);
    }

    fn begin(&mut self, now_ns: u64) {
        if self.proposal.is_some() || self.again_ns.is_some() {
            self.outdated = true;
            return;
        }
        if self.heard().count() < self.quorum() {
            return;
        }
        (self.too_few, self.outdated) = (false, false);
        let ballot = self.promised.max(self.seen).next(self.me);
        self.proposal = Some(Proposal::new(ballot));
        self.tell_all(now_ns, &MemberMessage::Prepare(ballot));
    }

    /// Nothing of an earlier ballot counts any more: who waits for a promise of this member must know that none will come.
    fn turn_to(&mut self, now_ns: u64, ballot: Ballot) {
        let before = std::mem::replace(&mut self.promised, ballot);
        if self.owed && before < ballot {
            self.tell(now_ns, before.leader, MemberMessage::Refused(ballot));
        }
    }

    fn promise(&mut self, now_ns: u64, ballot: Ballot) {
        self.turn_to(now_ns, ballot);
        if !std::mem::replace(&mut self.asked, true) {
            self.effects.push(Effect::Freeze);
        }
        let Some(report) = self.report.clone() else {
            self.owed = true;
            return;
        };
        let promise = Promise {
            accepted: self.accepted.clone(),
            suspects: self.suspects.iter().copied().collect(),
            accuses: self.accused.iter().copied().collect(),
            leaves: self.leaves,
            ready: self.ready.contains(&self.me),
            report,
            newcomers: self.newcomers.clone(),
        };
        self.tell(now_ns, ballot.leader, MemberMessage::Promised(ballot, promise));
    }

    fn refuse(&mut self, from: Rank) {
        self.effects.push(Effect::Send(from, self.epoch, MemberMessage::Refused(self.promised)));
    }

    /// As the leader: proposes once all that are heard have promised, and they are enough.
    fn conclude(&mut self, now_ns: u64) {
        let Some(proposal) = &self.proposal else { return };
        let all = self.heard().all(|rank| proposal.promises.contains_key(&rank));
        if !all
            || proposal.choice.is_some()
            || proposal.planned.is_some()
            || proposal.promises.len() < self.quorum()
        {
            return;
        }
        if let Some(choice) = proposal.accepted_before() {
            return self.propose(now_ns, choice);
        }
        let ranks = proposal.staying(&self.suspects);
        // Those who leave agree, too; if all do, nobody is left, and the job is over.
        if ranks.len() + proposal.leaving() < self.quorum() {
            // When a connection comes back there is another ballot.
            (self.too_few, self.proposal) = (true, None);
            if self.outdated {
                self.begin(now_ns);
            }
            return;
        }
        let of_member = |rank: &Rank| (*rank, proposal.promises[rank].report.clone());
        let mut reports: BTreeMap<Rank, Vec<u8>> = ranks.iter().map(of_member).collect();
        let (newcomers, all_wait) = proposal.newcomers(&ranks);
        let ballot = proposal.ballot;
        // Who leads and does not wait itself knows nobody who is waited for.
        let admits = all_wait && self.ready.contains(&self.me);
        let admitted = self.awaited.iter().filter(|rank| admits && newcomers.contains_key(rank));
        let members: BTreeSet<Rank> = ranks.iter().chain(admitted).copied().collect();
        reports.extend(newcomers);
        if let Some(proposal) = &mut self.proposal {
            proposal.planned = Some((members.into_iter().collect(), admits));
        }
        self.effects.push(Effect::Plan(ballot, reports.into_iter().collect()));
    }

    fn propose(&mut self, now_ns: u64, choice: NextMembers) {
        let Some(proposal) = &mut self.proposal else { return };
        proposal.choice = Some(choice.clone());
        let message = MemberMessage::Propose(proposal.ballot, choice);
        self.tell_all(now_ns, &message);
    }

    fn agreed(&mut self, now_ns: u64, from: Rank, ballot: Ballot) {
        let Some(proposal) = self.proposal.as_mut().filter(|proposal| proposal.ballot == ballot) else {
            return;
        };
        proposal.agreed.insert(from);
        self.count_agreed(now_ns);
    }

    /// As the leader: chooses what enough have accepted. Where fewer than a majority are, two such quorums need have no member in
    /// common: then all that are heard must have accepted, so that whoever of them leads next knows of it.
    fn count_agreed(&mut self, now_ns: u64) {
        let Some(proposal) = &self.proposal else { return };
        let of_all = proposal.agreed.len();
        let all_heard = || self.heard().all(|rank| proposal.agreed.contains(&rank));
        if of_all >= self.quorum()
            && (of_all >= self.majority() || all_heard())
            && let Some(choice) = proposal.choice.clone()
        {
            self.choose(now_ns, choice);
        }
    }

    /// There is a later ballot than this member's own, if it has one.
    fn outbid(&mut self, now_ns: u64, by: Ballot) {
        if self.proposal.take_if(|proposal| proposal.ballot < by).is_none() {
            return;
        }
        // So that its next is later.
        self.seen = self.seen.max(by);
        let place = self.ranks.iter().position(|rank| *rank == self.me).unwrap_or(0) as u64;
        let wait_ns = ((place + 1) * BACKOFF_NS) << by.attempt.saturating_sub(1).min(DOUBLINGS_MAX);
        self.again_ns = Some(now_ns + wait_ns);
    }

    /// The choice of an epoch is known: once, whoever says so.
    fn choose(&mut self, now_ns: u64, choice: NextMembers) {
        if choice.epoch != self.epoch {
            return;
        }
        let told = MemberMessage::Chosen(choice.clone());
        // Whoever is suspected, too: whom a verdict accuses lives, and hears of it if its connection is there.
        let others = self.ranks.iter().chain(&self.guests).chain(&choice.ranks).copied();
        let others: BTreeSet<Rank> = others.filter(|rank| *rank != self.me).collect();
        self.effects.extend(others.into_iter().map(|rank| Effect::Send(rank, self.epoch, told.clone())));
        self.past.insert(self.epoch, choice.clone());
        while self.past.len() > PAST_MAX {
            self.past.pop_first();
        }
        self.epoch += 1;
        let before = std::mem::replace(&mut self.ranks, choice.ranks.clone());
        self.suspects.retain(|rank| choice.ranks.contains(rank));
        self.accused.retain(|rank| choice.ranks.contains(rank));
        self.guests.retain(|rank| !choice.ranks.contains(rank));
        (self.newcomers, self.ready, self.awaited) = (BTreeMap::new(), BTreeSet::new(), Vec::new());
        self.yielded.clear();
        (self.ends, self.asked, self.report, self.owed) = (false, false, None, false);
        (self.promised, self.seen) = (Ballot::default(), Ballot::default());
        (self.accepted, self.proposal, self.again_ns) = (None, None, None);
        (self.too_few, self.outdated, self.urged) = (false, false, None);
        (self.ending_ns, self.lacking_ns) = (None, None);
        self.effects.push(Effect::Chosen(choice));
        if self.is_out() {
            return self.present();
        }
        if self.presents.take().is_some() {
            // It has met all; whom it does not hear any more is lost since.
            let lost =
                before.into_iter().filter(|rank| self.ranks.contains(rank) && !self.met.contains(rank));
            self.suspects.extend(lost.collect::<Vec<_>>());
        }
        // Of those who stay, some may be lost since.
        if !self.suspects.is_empty() {
            self.ends = true;
            self.urge(now_ns);
        }
    }
}

//! Who is alive, who has gone, and whose fault it is: decided purely, with time as a number.
//!
//! A driver tells one [`Life`] per process and epoch what its connections show, asks it now and then what follows, and carries that out.
//! What belongs to a lane alone (heartbeats, silence, goodbyes) is a [`Pulse`].
//!
//! **One verdict.** Whoever finds something wrong makes a [`Verdict`] and tells all peers; whoever hears of one makes none of his
//! own any more. Of two that cross, the one with the stronger [`Evidence`] holds, then the one of the earlier step, then that of
//! the lower accuser. A rank passes the one that it holds on to all peers, unchanged, whenever it takes up a better one. So
//! once every living peer has told this rank the verdict that it holds itself, no better one can come, and the verdict is
//! settled: only then do calls raise it. That takes a round trip, half a second where a rank has no connection (it is
//! dead, or others speak for it), and [`SETTLE_NS`] at most.
//!
//! **Where the evidence is.** The end of a connection is held back for [`SUSPICION_NS`], because the rank itself, or who ended the
//! job, may say more. So is that a peer cannot be connected to. A rank whose [`Wait`] takes too long knows only whom it waits for; it
//! asks everybody ([`Question`]) and follows the replies to those who wait for nobody. Replies are of different moments, and more may
//! be on its way: what they show is held back for [`DOUBT_NS`], and forgotten if what it waits for comes.
//!
//! **Where members may be lost** a verdict ends the epoch and not the job, unless it leaves this rank out (`Verdict::leaves_out`):
//! nobody is told, and no call raises it. The members agree on who goes on ([`crate::agreement`]), and the next epoch has a life of its own
//! ([`Life::next_epoch`]). A connection that was lost leaves nobody out, for both of its ends may live. But of one that is lost in epoch after
//! epoch, while nothing comes to this rank, the peer is out: else epochs would follow each other without end.
//!
//! **Who was away.** A process that was stopped for so long that others may have given it up, and that then finds them gone
//! without a word, is itself the reason: their word may not have reached it.

mod inquiry;
mod pulse;
mod reach;
mod times;
mod verdict;
mod wait;

pub use inquiry::{DOUBT_NS, Expired, INQUIRY_NS, Question, Reply};
pub use pulse::{Contact, Farewell, PeerTimes, Pulse, Sign, TimeAway};
pub use reach::{
    AfterFailure, Attempts, DialFailure, FLUSH_NS, Obstacle, REACH_NS, Status, may_end, unreached,
};
pub use times::{DEPARTURE_GRACE_NS, SETTLE_INDIRECT_NS, SETTLE_NS, SUSPICION_NS};
pub use verdict::{Evidence, Fault, Verdict};
pub use wait::{Over, Wait, WaitKind};

use crate::members::Members;
use crate::types::Rank;
use inquiry::Inquiry;
use verdict::Standing;
use wait::VERDICT_NS;

/// So many epochs in a row a rank may end because of connections that were lost, and leave nobody out, while nothing comes to it.
const SPARED_MAX: u32 = 3;

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Ask every rank, this one included, on every lane; what they say goes to [`Life::replied`].
    Ask(Question),
    /// Send this verdict to every peer, on every lane; to those that connect later, too. Nothing else is sent any more.
    Tell(Verdict),
    /// The verdict that every call raises from now on.
    Settled(Verdict),
    /// The members shall agree on the next epoch.
    EndEpoch {
        /// Without these, whoever hears them.
        out: Vec<Rank>,
        /// The verdict's reason.
        why: String,
    },
}

#[derive(Debug, Clone, Default)]
struct Peer {
    /// Connections that are open, and how many there have been.
    links: u32,
    opened: u32,
    /// Lanes on which it has said goodbye.
    goodbyes: u32,
    /// One has ended.
    ended: bool,
    /// Since when it has said goodbye on all of them. Before, it may have been stopped in the middle of that.
    departed_ns: Option<u64>,
    /// The verdict that it last told.
    standing: Option<Standing>,
    /// Its progress, as its heartbeats say.
    progress: u32,
}

#[derive(Debug)]
struct Suspect {
    since_ns: u64,
    evidence: Evidence,
    rank: Rank,
    text: String,
}

#[derive(Debug)]
struct Case {
    verdict: Verdict,
    since_ns: u64,
    settled: bool,
}

/// The life of a job as one rank sees it. See the module's documentation.
#[derive(Debug)]
pub struct Life {
    me: Rank,
    /// All processes of this epoch, this one included.
    members: Members,
    lanes: u32,
    /// Whether the others go on when members are lost.
    goes_on: bool,
    /// When this epoch began, and whether it is ending: the members agree on the next one.
    began_ns: u64,
    ending: bool,
    /// Epochs of these members that this rank has ended and left nobody out, since anything has come to it.
    spared: u32,
    /// By rank.
    peers: Vec<Peer>,
    suspect: Option<Suspect>,
    /// The waits of this rank that have lasted too long, the oldest first: the first one is asked about.
    overdue: Vec<Expired>,
    inquiry: Option<Inquiry>,
    /// How many questions this rank has asked.
    questions: u32,
    case: Option<Case>,
    /// When a peer's heartbeat last said that data has moved there.
    others_moved_ns: u64,
    /// This process was away until then: what has not come before that is nobody's fault.
    back_ns: u64,
    /// How long it was away, if others may have given it up for that; until it hears that they have not.
    away_ns: Option<u64>,
    effects: Vec<Effect>,
}

impl Life {
    /// Of a rank whose peers, all other `members` of the job, are connected by up to `lanes` connections each.
    #[must_use]
    pub fn new(me: Rank, members: Members, lanes: u32) -> Self {
        Self {
            me,
            lanes,
            goes_on: false,
            began_ns: 0,
            ending: false,
            spared: 0,
            peers: vec![Peer::default(); members.end()],
            members,
            suspect: None,
            overdue: Vec::new(),
            inquiry: None,
            questions: 0,
            case: None,
            others_moved_ns: 0,
            back_ns: 0,
            away_ns: None,
            effects: Vec::new(),
        }
    }

    /// From now on the others go on when members are lost. This epoch began then: no wait counts time before it.
    pub fn goes_on_after_losses(&mut self, began_ns: u64) {
        (self.goes_on, self.began_ns) = (true, began_ns);
    }

    /// The members agree on the next epoch, which is bounded ([`crate::agreement::longest_ns`]): no wait is over before that.
    pub fn epoch_ends(&mut self) {
        self.ending = true;
    }

    /// The life of the next epoch, which begins now among these members. What this rank has found of itself since the last one began to end
    /// nobody has heard: it is told in this one ([`Life::lanes_begin`]).
    #[must_use]
    pub fn next_epoch(&self, now_ns: u64, members: Members) -> Self {
        let mut next = Self::new(self.me, members, self.lanes);
        next.goes_on_after_losses(now_ns);
        if next.members.iter().eq(self.members.iter()) {
            next.spared = self.spared;
        }
        if let Some(own) = self.job_ends_by() {
            next.accuse(now_ns, own.clone());
        }
        next
    }

    /// The lanes of this epoch begin, which have told nobody anything yet.
    pub fn lanes_begin(&mut self) {
        let told = self.job_ends_by().cloned();
        self.effects.extend(told.map(Effect::Tell));
    }

    /// A result has come to this rank, or it waits for none.
    pub fn landed(&mut self) {
        self.spared = 0;
    }

    /// The verdict that is held, if this rank does not go on after it.
    fn job_ends_by(&self) -> Option<&Verdict> {
        self.verdict().filter(|verdict| self.ends_epoch(verdict).is_none())
    }

    /// Whom the members leave out because of this verdict if it ends the epoch only.
    fn ends_epoch<'a>(&self, verdict: &'a Verdict) -> Option<&'a [Rank]> {
        verdict.leaves_out(self.me, self.spared < SPARED_MAX).filter(|_| self.goes_on)
    }

    /// What is to be done, in this order. To be called after every other call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// The verdict that this rank holds, settled or not.
    #[must_use]
    pub fn verdict(&self) -> Option<&Verdict> {
        self.case.as_ref().map(|case| &case.verdict)
    }

    /// Whether calls raise the verdict.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.case.as_ref().is_some_and(|case| case.settled)
    }

    /// A connection to this peer is open.
    pub fn connected(&mut self, peer: Rank) {
        let peer = &mut self.peers[peer.index()];
        peer.links += 1;
        peer.opened += 1;
    }

    /// A connection has ended, and without a goodbye if `why` says how. The first such rank is blamed if nobody knows better in
    /// time.
    pub fn ended(&mut self, now_ns: u64, peer: Rank, why: Option<String>) {
        let known = &mut self.peers[peer.index()];
        known.links = known.links.saturating_sub(1);
        known.ended = true;
        if let Some(why) = why {
            let text = format!("rank {peer} is lost: {why} (found by rank {})", self.me);
            self.suspect(now_ns, Evidence::Ended, peer, text);
        }
        self.settle(now_ns);
    }

    /// A peer cannot be connected to: it has said why not, or this rank cannot open a connection, or there was no answer in all
    /// the time there is ([`Attempts`]). The last is held back: somebody may know better.
    pub fn unreachable(&mut self, now_ns: u64, verdict: Verdict) {
        match verdict.evidence {
            Evidence::Silent => self.suspect(now_ns, Evidence::Silent, verdict.culprit(), verdict.reason),
            _ => self.accuse(now_ns, verdict),
        }
    }

    fn suspect(&mut self, since_ns: u64, evidence: Evidence, rank: Rank, text: String) {
        if self.case.is_none() && self.suspect.is_none() {
            self.suspect = Some(Suspect { since_ns, evidence, rank, text });
        }
    }

    /// A peer has said goodbye on one more lane.
    pub fn departed(&mut self, now_ns: u64, peer: Rank) {
        let peer = &mut self.peers[peer.index()];
        peer.goodbyes += 1;
        if peer.goodbyes >= peer.opened {
            peer.departed_ns.get_or_insert(now_ns);
        }
        self.settle(now_ns);
    }

    /// A heartbeat: `progress` changes whenever data has moved at that peer.
    pub fn heartbeat(&mut self, now_ns: u64, peer: Rank, progress: u32) {
        let known = &mut self.peers[peer.index()].progress;
        // Lanes overtake each other: an older number is no news.
        if progress.wrapping_sub(*known) as i32 > 0 {
            *known = progress;
            self.others_moved_ns = now_ns;
        }
        // What was said while it was away has been read by then.
        if now_ns > self.back_ns + SUSPICION_NS {
            self.away_ns = None;
        }
    }

    /// What follows if a wait of the program has lasted too long. `moved_ns` is when data last moved here. If it has not,
    /// [`Wait::until_ns`] says when to look again.
    #[must_use]
    pub fn over(&self, wait: &mut Wait, now_ns: u64, moved_ns: u64) -> Option<Over> {
        if self.ending {
            return None;
        }
        wait.not_before(self.began_ns);
        wait.over(now_ns, self.others_moved_ns.max(moved_ns).max(self.back_ns))
    }

    /// This process was away: it has read nothing of what others sent meanwhile.
    pub fn was_away(&mut self, now_ns: u64, away: TimeAway) {
        self.back_ns = now_ns;
        self.away_ns = self.away_ns.max(away.noticed.then_some(away.ns));
        self.suspect.iter_mut().for_each(|suspect| suspect.since_ns = now_ns);
        if let Some(case) = self.case.as_mut().filter(|case| !case.settled) {
            case.since_ns = now_ns;
        }
        self.inquiry = None;
        self.inquire(now_ns);
    }

    /// Nothing was heard from a peer for so long.
    pub fn silent(&mut self, now_ns: u64, peer: Rank, silence_ns: u64) {
        let seconds = silence_ns as f64 / 1e9;
        let text = format!(
            "rank {peer} is lost: rank {} had no sign of life from it for {seconds:.1} s (peer_timeout_s); its process is stopped, \
             or the network between is cut",
            self.me
        );
        self.found(now_ns, Evidence::Silent, peer, text);
    }

    /// A call of this rank takes the part of a peer that has said goodbye: a goodbye comes after everything else.
    pub fn needed(&mut self, now_ns: u64, peer: Rank) {
        let text = format!(
            "rank {peer} has left the job by shutdown() (or the end of its program), but a call of rank {} needs it",
            self.me
        );
        self.found(now_ns, Evidence::Departed, peer, text);
    }

    /// Peers are gone without a word. If they may have given this rank up, that is why.
    fn accuse_unless_away(&mut self, now_ns: u64, otherwise: Verdict) {
        let Some(away_ns) = self.away_ns else { return self.accuse(now_ns, otherwise) };
        let (me, seconds) = (self.me, away_ns as f64 / 1e9);
        let text = format!(
            "rank {me} was stopped, or its machine slept, for {seconds:.1} s, and the others have gone on without it or ended the job"
        );
        self.found(now_ns, Evidence::Silent, me, text);
    }

    fn found(&mut self, now_ns: u64, evidence: Evidence, culprit: Rank, reason: String) {
        self.accuse(now_ns, Verdict::new(evidence, None, self.me, vec![culprit], reason));
    }

    /// This rank has found something out, its own failure for instance. Nothing, if there is a verdict already. Its own failure
    /// is settled at once here: its program knows it; and what has only ended the epoch does not make it go on.
    pub fn accuse(&mut self, now_ns: u64, verdict: Verdict) {
        let own = verdict.evidence == Evidence::Own && verdict.culprits == [self.me];
        if self.case.is_some() && !(own && self.job_ends_by().is_none()) {
            return;
        }
        self.hold(now_ns, verdict);
        if own {
            self.end_case();
        }
        self.settle(now_ns);
    }

    /// Takes up a verdict and passes it on.
    fn hold(&mut self, now_ns: u64, verdict: Verdict) {
        self.inquiry = None;
        let effect = match self.ends_epoch(&verdict) {
            Some(out) => {
                self.spared += u32::from(out.is_empty());
                Effect::EndEpoch { out: out.to_vec(), why: verdict.reason.clone() }
            }
            None => Effect::Tell(verdict.clone()),
        };
        self.effects.push(effect);
        let since_ns = self.case.as_ref().map_or(now_ns, |case| case.since_ns);
        self.case = Some(Case { verdict, since_ns, settled: false });
    }

    /// A peer has told its verdict, as the payload of an abort.
    pub fn aborted(&mut self, now_ns: u64, from: Rank, payload: &[u8]) {
        let verdict = match Verdict::decode(payload, &self.members) {
            Ok(verdict) => verdict,
            Err(why) => return self.found(now_ns, Evidence::Frame, from, format!("rank {from} sent {why}")),
        };
        self.peers[from.index()].standing = Some(verdict.standing());
        let better = self
            .case
            .as_ref()
            .is_none_or(|case| !case.settled && verdict.standing() < case.verdict.standing());
        if better {
            self.hold(now_ns, verdict);
        }
        self.settle(now_ns);
    }

    /// A wait of this rank has lasted too long: to be called once for each. Either a verdict is settled in bounded time, or what it
    /// waits for comes meanwhile ([`Life::came`]). The result is the wait for that.
    #[must_use]
    pub fn expired(&mut self, now_ns: u64, expired: &Expired) -> Wait {
        self.overdue.push(expired.clone());
        self.inquire(now_ns);
        Wait::new(WaitKind::Verdict, now_ns, VERDICT_NS)
    }

    /// What this wait was for has come after all, or the program does not wait for it any more.
    pub fn came(&mut self, now_ns: u64, expired: &Expired) {
        if let Some(at) = self.overdue.iter().position(|overdue| overdue == expired) {
            self.overdue.remove(at);
        }
        self.inquiry.take_if(|inquiry| inquiry.expired == *expired);
        self.inquire(now_ns);
    }

    /// Asks everybody about the wait that has lasted too long, unless something is asked already.
    fn inquire(&mut self, now_ns: u64) {
        let Some(expired) = self.overdue.first() else { return };
        if self.case.is_some() || self.inquiry.is_some() {
            return;
        }
        self.questions += 1;
        let question = Question { number: self.questions, about: expired.about };
        self.inquiry = Some(Inquiry::new(self.me, expired.clone(), self.questions, now_ns, &self.members));
        self.effects.push(Effect::Ask(question));
    }

    /// One lane of a rank, perhaps of this one, has replied to the question of this number.
    pub fn replied(&mut self, now_ns: u64, from: Rank, number: u32, reply: Reply) {
        if let Some(inquiry) = self.inquiry.as_mut().filter(|inquiry| inquiry.number == number) {
            inquiry.replied(from, reply);
            self.conclude(now_ns);
        }
    }

    /// Ends the inquiry some time after everybody has replied, or when time is up.
    fn conclude(&mut self, now_ns: u64) {
        let Some(inquiry) = &mut self.inquiry else { return };
        let is_heard = |rank: Rank| {
            let peer = &self.peers[rank.index()];
            (peer.ended && peer.links == 0) || inquiry.has_replied(rank, self.lanes)
        };
        if self.members.iter().all(is_heard) {
            inquiry.all_ns.get_or_insert(now_ns);
        }
        if now_ns < inquiry.until_ns() {
            return;
        }
        let finding = inquiry.finding();
        let reason = format!("{}: {}. {}", inquiry.expired.what, finding.text, inquiry.expired.hint);
        let step = inquiry.expired.step;
        let verdict = Verdict::new(finding.evidence, step, self.me, finding.culprits, reason);
        if finding.evidence == Evidence::Unanswered {
            self.accuse_unless_away(now_ns, verdict);
        } else {
            self.accuse(now_ns, verdict);
        }
    }

    /// What time alone shows. `moved_ns` is when data last moved here; `needs` says whether something that this rank takes part
    /// in needs the part of a rank.
    pub fn look(&mut self, now_ns: u64, moved_ns: u64, needs: impl Fn(Rank) -> bool) {
        if self.case.is_some() {
            return self.settle(now_ns);
        }
        if let Some(Suspect { evidence, rank, text, .. }) =
            self.suspect.take_if(|suspect| now_ns.saturating_sub(suspect.since_ns) >= SUSPICION_NS)
        {
            return self.accuse_unless_away(now_ns, Verdict::new(evidence, None, self.me, vec![rank], text));
        }
        if let Some(rank) = self.missed(now_ns, moved_ns, needs) {
            let text = format!(
                "rank {rank} has left the job by shutdown() (or the end of its program) while others go on; if the ranks have \
                 different numbers of batches, wrap the loop in ps.join()"
            );
            return self.found(now_ns, Evidence::Departed, rank, text);
        }
        self.conclude(now_ns);
    }

    /// A rank that has said goodbye has answered everything by then. So if nothing moves any more, this rank has begun something
    /// that the other will never take part in.
    fn missed(&self, now_ns: u64, moved_ns: u64, needs: impl Fn(Rank) -> bool) -> Option<Rank> {
        let moved_ns = moved_ns.max(self.back_ns);
        let long_ago = |since_ns: u64| now_ns.saturating_sub(since_ns.max(moved_ns)) >= DEPARTURE_GRACE_NS;
        let mut ranks = self.members.iter();
        ranks.find(|rank| self.peers[rank.index()].departed_ns.is_some_and(long_ago) && needs(*rank))
    }

    /// Settles the verdict once no better one can come, or it has taken too long.
    fn settle(&mut self, now_ns: u64) {
        let Some(Case { verdict, since_ns, settled: false }) = &self.case else { return };
        let age_ns = now_ns.saturating_sub(*since_ns);
        // Who is silent, or has no connection any more, tells nothing; but it may live, and tell others.
        let silent = matches!(verdict.evidence, Evidence::Silent | Evidence::Unanswered);
        let mut indirect = false;
        let mut agreed = true;
        for rank in self.members.iter() {
            let peer = &self.peers[rank.index()];
            if rank == self.me || (peer.departed_ns.is_some() && peer.links == 0) {
                continue;
            }
            let told = peer.standing == Some(verdict.standing());
            if peer.links > 0 && !(silent && verdict.culprits.contains(&rank)) {
                agreed &= told;
            } else {
                indirect |= !told;
            }
        }
        if agreed && (!indirect || age_ns >= SETTLE_INDIRECT_NS) || age_ns >= SETTLE_NS {
            self.end_case();
        }
    }

    fn end_case(&mut self) {
        let Some(verdict) = self.case.as_ref().filter(|case| !case.settled).map(|case| case.verdict.clone())
        else {
            return;
        };
        self.case.iter_mut().for_each(|case| case.settled = true);
        if self.ends_epoch(&verdict).is_none() {
            self.effects.push(Effect::Settled(verdict));
        }
    }

    /// When [`Life::look`] may have something to say next, if nothing happens before: for a driver whose time jumps. Real lanes look
    /// at a tick: docs/decisions/0020-lanes-look-at-a-tick.md.
    #[must_use]
    pub fn deadline_ns(&self, moved_ns: u64) -> Option<u64> {
        if let Some(case) = &self.case {
            let marks = [SETTLE_INDIRECT_NS, SETTLE_NS].map(|wait_ns| case.since_ns + wait_ns);
            return marks.into_iter().find(|_| !case.settled);
        }
        let moved_ns = moved_ns.max(self.back_ns);
        let departed = self.peers.iter().filter_map(|peer| peer.departed_ns);
        let departed = departed.map(|since_ns| since_ns.max(moved_ns) + DEPARTURE_GRACE_NS);
        let suspect = self.suspect.as_ref().map(|suspect| suspect.since_ns + SUSPICION_NS);
        let inquiry = self.inquiry.as_ref().map(Inquiry::until_ns);
        departed.chain(suspect).chain(inquiry).min()
    }
}

#[cfg(test)]
mod tests;

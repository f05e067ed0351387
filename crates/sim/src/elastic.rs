//! Jobs that go on without members that they have lost, and with newcomers: agreement, nodes of each epoch, recovery, as they ship; small
//! models, every order of frames that chance finds. Programs wait for newcomers before one round, the same of all tensors. What a newcomer
//! gets of the others then, it has at once.
//!
//! Each rank submits its tensors in an order of its own, and applies a result some time after it is there, by which it is gone.
//! In the end all that are left have the same parameters, to the bit, and those are what the log of members says: each result is the
//! average over the members of the epoch in which its round ended. Or what an optimizer makes of it, where owners update what they keep
//! (`elastic/updates.rs`); there programs say the word for a step when it is submitted, or in advance.

mod updates;

use crate::memory::{Chunk, RealMemory, SimMemory};
use crate::random::Random;
use penstock_core::agreement::{Effect, Hearing, MemberMessage, NextMembers, PATIENCE_NS, Succession};
use penstock_core::exchange::Field;
use penstock_core::layout::{Book, Tensor};
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::recovery::{
    GivenToOthers, Report, SliceProgress, decode, decode_plan, encode, encode_plan, recovery, states_given,
};
use penstock_core::roles::{Fold, Roles, Rules};
use penstock_core::types::{Dtype, Rank, Seq, SliceId};
use penstock_core::wire::{Destination, Header, Kind, Op};
use penstock_core::{Gives, Members, Slicing, Submission};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use updates::{Account, may_be_lost};

/// Events after which a job counts as going round in circles.
const EVENTS_MAX: u64 = 400_000;

/// A rule that is left out, to see that it is missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Omission {
    /// Answers are read straight into the gradient.
    AnswersInPlace,
    /// A rank takes in answers after it has reported.
    TakeInAfterTheReport,
    /// Of a result nothing is kept but what the program has of it.
    KeepNothing,
    /// A result that one has is not given to the others: all push anew.
    GiveNothing,
    /// Programs say that they wait for newcomers while rounds are under way.
    WaitInTheMiddle,
    /// Of owners that update: the owner answers, and not its replica once that has the sum.
    OwnersAnswer,
    /// States come from whoever has some, of whatever round.
    GiveOldStates,
    /// Who is to keep them is given none.
    GiveNoStates,
    /// The word to update is not said again in the next epoch.
    SayTheWordOnce,
}

/// Of each slice's round over whose contributions its result is the average.
type Log = BTreeMap<(SliceId, Seq), Vec<Rank>>;

/// How slices are dealt, and those whose states have moved.
type Dealt = (Arc<Book>, BTreeSet<SliceId>);

/// How slices are dealt in the next epoch, and which states are given to whom.
type DealtAndGiven = (Arc<Book>, Vec<GivenToOthers>);

#[derive(Debug)]
enum Passing {
    Data {
        epoch: u32,
        header: Header,
        bytes: Option<Box<[u8]>>,
    },
    Said(Vec<u8>),
    /// A frame that broke off.
    Torn {
        epoch: u32,
        header: Header,
        bytes: Box<[u8]>,
    },
    End,
    /// A newcomer's connection.
    Open,
}

/// One tensor on one rank.
#[derive(Debug, Clone)]
struct Own {
    memory: Chunk,
    /// The round that was submitted last, and whether with a contribution.
    seq: Seq,
    gave: bool,
    /// By slice, whether its result is here, and whether anybody contributed.
    landed: BTreeMap<SliceId, bool>,
    /// By slice, the last result that was here.
    kept: BTreeMap<SliceId, Option<Chunk>>,
    applied: bool,
    param: Chunk,
    log: Log,
    /// The last step whose word was said, and what the owners must have by now.
    said: Seq,
    account: Account,
}

struct ElasticRank {
    agreement: Succession,
    hearing: Hearing,
    node: Node<RealMemory>,
    lives: bool,
    /// It has reported: it sends nothing and takes nothing in until the next epoch.
    reported: bool,
    /// The gate is behind it.
    passed: bool,
    /// In which epoch it has said last that it waits.
    ready: Option<u32>,
    /// As a newcomer: it has connected.
    came: bool,
    tensors: Vec<Own>,
}

impl Own {
    fn is_complete(&self, slices: usize) -> bool {
        self.landed.len() == slices
    }
}

/// What a rank contributes: small whole numbers, so that averages over any members differ.
fn contribution(rank: usize, tensor: usize, seq: Seq, elems: usize) -> Option<Vec<f32>> {
    let mut random = Random::new((rank as u64) << 40 ^ (tensor as u64) << 20 ^ u64::from(seq));
    // Now and then a rank has nothing.
    (!random.chance(100)).then(|| (0..elems).map(|_| random.below(1 << 20) as f32).collect())
}

fn average(members: &[Rank], tensor: usize, seq: Seq, elems: usize) -> Option<Vec<f32>> {
    let rows: Vec<Vec<f32>> =
        members.iter().filter_map(|rank| contribution(rank.index(), tensor, seq, elems)).collect();
    let (first, others) = rows.split_first()?;
    let mut sum = first.clone();
    others.iter().for_each(|row| sum.iter_mut().zip(row).for_each(|(sum, one)| *sum += one));
    let scale = members.len() as f32;
    Some(sum.into_iter().map(|sum| sum / scale).collect())
}

struct World {
    workers: Vec<ElasticRank>,
    /// By sender and receiver.
    links: Vec<VecDeque<Passing>>,
    open: Vec<bool>,
    book: Book,
    steps: Seq,
    /// Programs wait for newcomers once they have come so far.
    gate: Seq,
    /// How many are members from the beginning.
    founders: usize,
    /// What somebody had as the gate opened.
    at_gate: Option<Vec<Own>>,
    admitted: u64,
    omission: Option<Omission>,
    random: Random,
    /// The members of each epoch.
    epochs: BTreeSet<Vec<Rank>>,
    /// Owners update what they keep.
    updates: bool,
    slow: Option<usize>,
    /// By epoch and its members: how slices are dealt, and those whose states have moved.
    books: BTreeMap<(u32, Vec<Rank>), Dealt>,
    /// Answers that came from an owner and not from its replica.
    answered: BTreeSet<(usize, SliceId, Seq)>,
    /// What was kept of something is lost: the job is over.
    lost: bool,
    given: u64,
    states_given: u64,
    trace: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    Arrive(usize, usize),
    Write(usize, usize),
    Submit(usize, usize),
    Say(usize, usize),
    Apply(usize, usize),
    Look(usize),
    /// A newcomer connects with all that live.
    Come(usize),
    /// A program waits at the gate.
    Wait(usize),
}

/// What became of a job.
#[derive(Debug, Clone, Copy, Default)]
pub struct Survived {
    /// Epochs that ended.
    pub epochs: u32,
    /// Results that were given to those that lacked them.
    pub given: u64,
    /// Whether anybody was left to go on.
    pub went_on: bool,
    /// Newcomers that were there in the end.
    pub admitted: u64,
    /// What an owner keeps of a slice, given to another member that is to keep it.
    pub states_given: u64,
    /// Whether both were lost that kept something: nobody could go on.
    pub lost_states: bool,
}

fn zeros(len_bytes: usize) -> Chunk {
    let memory = RealMemory::tensor(len_bytes);
    memory.write(|bytes| bytes.fill(0));
    memory
}

fn copy_of(chunk: &Chunk) -> Chunk {
    let (copy, bytes) = (RealMemory::tensor(chunk.len_bytes()), chunk.to_bytes().unwrap_or_default());
    copy.write(|memory| memory.copy_from_slice(&bytes));
    copy
}

/// Owners may read the parameters where they are, and whoever is to be one.
fn lend(node: &mut Node<RealMemory>, tensors: &[Own]) {
    for (tensor, own) in (0..).zip(tensors) {
        node.load(0, tensor, (Field::Lent, 0), &own.param).expect("a model of fp32");
    }
}

fn config(rank: usize, members: &Members) -> Config {
    Config {
        rank: Rank(rank as u32),
        members: members.clone(),
        workers: members.clone(),
        lane: 0,
        lanes: 1,
        window_bytes: 4096,
        priority: true,
    }
}

impl World {
    fn new(seed: u64, omission: Option<Omission>, updates: bool) -> Self {
        let mut random = Random::new(seed);
        let count = random.between(2, 6) as usize;
        let tensors = (0..random.between(1, 4))
            .map(|at| Tensor::new(format!("t{at}"), at as u32, Dtype::F32, random.between(100, 2000)));
        let tensors: Vec<Tensor> = tensors.collect();
        let layers = (0..tensors.len()).map(|at| format!("layer {at}")).collect();
        let members = Members::all(count as u32);
        let fold = if updates { Fold::Updated } else { Fold::Fresh };
        let recoverable = omission != Some(Omission::AnswersInPlace);
        let rules = Rules { recoverable, fold, ..Rules::default() };
        let roles = Roles { rules, ..Roles::alike(members.clone()) };
        let book = Book::deal("model", layers, tensors, &roles, Slicing::fixed(1024, 1)).expect("a book");
        let enough = random.chance(500).then_some(1);
        let newcomers = if random.chance(500) { random.between(1, 2) as usize } else { 0 };
        let everybody = count + newcomers;
        let steps = random.between(2, 5) as Seq;
        let slow =
            if updates && random.chance(500) { Some(random.below(count as u64) as usize) } else { None };
        let gate = if newcomers > 0 { random.between(0, u64::from(steps) - 1) as Seq } else { Seq::MAX };
        let worker = |rank: usize| {
            let own = |tensor: &Tensor| Own {
                memory: RealMemory::tensor(tensor.len_bytes() as usize),
                seq: 0,
                gave: false,
                landed: BTreeMap::new(),
                kept: BTreeMap::new(),
                applied: true,
                log: Log::new(),
                param: zeros(tensor.len_bytes() as usize),
                said: 0,
                account: Account::default(),
            };
            let me = Rank(rank as u32);
            let with_me: Members = members.iter().chain([me]).collect();
            let mut node = Node::new(config(rank, &with_me), RealMemory::default());
            node.open_book(0, Arc::new(book.among(&with_me)), &mut Vec::new()).expect("a first book");
            let tensors: Vec<Own> = book.tensors.iter().map(own).collect();
            if updates {
                lend(&mut node, &tensors);
            }
            ElasticRank {
                agreement: if rank < count {
                    Succession::new(me, &members, enough)
                } else {
                    Succession::newcomer(me, &members, enough, Vec::new())
                },
                hearing: Hearing::new(me, &members, u64::MAX, 0),
                node,
                lives: true,
                reported: false,
                passed: false,
                ready: None,
                came: false,
                tensors,
            }
        };
        Self {
            workers: (0..everybody).map(worker).collect(),
            links: (0..everybody * everybody).map(|_| VecDeque::new()).collect(),
            open: (0..everybody * everybody).map(|at| (at / everybody).max(at % everybody) < count).collect(),
            steps,
            gate,
            founders: count,
            at_gate: None,
            admitted: 0,
            book: book.clone(),
            omission,
            random,
            epochs: BTreeSet::from([members.iter().collect()]),
            updates,
            slow,
            books: BTreeMap::from([(
                (0, members.iter().collect()),
                (Arc::new(book.among(&members)), BTreeSet::new()),
            )]),
            answered: BTreeSet::new(),
            lost: false,
            given: 0,
            states_given: 0,
            trace: Vec::new(),
        }
    }

    fn at(&self, from: usize, to: usize) -> usize {
        from * self.workers.len() + to
    }

    /// Whether it is for a program to do that takes long for everything.
    fn is_slow(&self, what: Happening) -> bool {
        let (Happening::Submit(rank, _) | Happening::Say(rank, _) | Happening::Apply(rank, _)) = what else {
            return false;
        };
        self.slow == Some(rank)
    }

    fn omits(&self, omission: Omission) -> bool {
        self.omission == Some(omission)
    }

    fn is_in(&self, rank: usize) -> bool {
        self.workers[rank].lives && !self.workers[rank].agreement.is_out()
    }

    fn next(&mut self) -> Vec<Happening> {
        let (mut next, mut looks) = (Vec::new(), Vec::new());
        let count = self.workers.len();
        for rank in 0..count {
            for from in 0..count {
                if !self.links[self.at(from, rank)].is_empty() && self.workers[rank].lives {
                    next.push(Happening::Arrive(from, rank));
                }
            }
            if rank >= self.founders && self.workers[rank].lives && !self.has_come(rank) {
                next.push(Happening::Come(rank));
            }
            if !self.is_in(rank) {
                continue;
            }
            let waits = self.workers[rank].ready == Some(self.workers[rank].agreement.epoch());
            if !self.workers[rank].passed && !waits && !self.workers[rank].reported && self.is_at_gate(rank) {
                next.push(Happening::Wait(rank));
            }
            let (reported, slices) = (self.workers[rank].reported, self.slice_counts());
            for to in
                self.workers[rank].agreement.members().iter().filter(|to| to.index() != rank && !reported)
            {
                if self.workers[rank].node.has_frame(to) {
                    next.push(Happening::Write(rank, to.index()));
                }
            }
            for (tensor, own) in self.workers[rank].tensors.iter().enumerate() {
                let last = if self.workers[rank].passed { self.steps } else { self.steps.min(self.gate) };
                if own.applied && own.seq < last && !reported {
                    next.push(Happening::Submit(rank, tensor));
                }
                if !own.applied && own.is_complete(slices[tensor]) {
                    next.push(Happening::Apply(rank, tensor));
                }
                let may_say = own.said < own.seq || own.applied && own.said == own.seq && own.seq < last;
                if self.updates && may_say && !reported {
                    next.push(Happening::Say(rank, tensor));
                }
            }
            if self.workers[rank].agreement.deadline_ns().is_some() {
                looks.push(Happening::Look(rank));
            }
        }
        if next.is_empty() { looks } else { next }
    }

    fn has_come(&self, rank: usize) -> bool {
        self.workers[rank].came
    }

    /// Its program has nothing under way, and goes no further without newcomers.
    fn is_at_gate(&self, rank: usize) -> bool {
        let there = |own: &Own| own.seq == self.gate && own.applied;
        self.gate < Seq::MAX
            && (self.omits(Omission::WaitInTheMiddle) || self.workers[rank].tensors.iter().all(there))
    }

    fn slice_counts(&self) -> Vec<usize> {
        self.book.tensors.iter().map(|tensor| tensor.slice_count as usize).collect()
    }

    fn happen(&mut self, what: Happening) -> Result<(), String> {
        match what {
            Happening::Arrive(from, to) => {
                let at = self.at(from, to);
                let Some(item) = self.links[at].pop_front() else { return Ok(()) };
                self.arrive(from, to, item)
            }
            Happening::Write(from, to) => {
                let epoch = self.workers[from].agreement.epoch();
                let Some(frame) = self.workers[from].node.next_frame(Rank(to as u32)) else { return Ok(()) };
                let bytes = frame.payload.as_ref().and_then(Chunk::to_bytes);
                self.send(from, to, Passing::Data { epoch, header: frame.header, bytes });
                Ok(())
            }
            Happening::Submit(rank, tensor) => self.submit(rank, tensor),
            Happening::Say(rank, tensor) => self.say(rank, tensor),
            Happening::Apply(rank, tensor) => {
                self.apply(rank, tensor);
                Ok(())
            }
            Happening::Look(rank) => {
                let agreement = &mut self.workers[rank].agreement;
                let due_ns = agreement.deadline_ns().unwrap_or(0);
                agreement.look(due_ns);
                self.follow(rank)
            }
            Happening::Come(rank) => {
                self.workers[rank].came = true;
                for other in 0..self.workers.len() {
                    if other != rank
                        && self.workers[other].lives
                        && (other < self.founders || self.has_come(other))
                    {
                        for (from, to) in [(rank, other), (other, rank)] {
                            let at = self.at(from, to);
                            self.open[at] = true;
                            self.links[at].push_back(Passing::Open);
                        }
                    }
                }
                Ok(())
            }
            Happening::Wait(rank) => {
                let awaited: Vec<Rank> =
                    (self.founders..self.workers.len()).map(|rank| Rank(rank as u32)).collect();
                let ElasticRank { agreement, ready, .. } = &mut self.workers[rank];
                *ready = Some(agreement.epoch());
                agreement.ready(0, &awaited);
                self.follow(rank)
            }
        }
    }

    fn send(&mut self, from: usize, to: usize, item: Passing) {
        let at = self.at(from, to);
        if self.open[at] {
            self.links[at].push_back(item);
        }
    }

    fn kill(&mut self, rank: usize) {
        self.workers[rank].lives = false;
        for other in (0..self.workers.len()).filter(|other| *other != rank) {
            // Some of what it had sent is lost with it, one frame perhaps in the middle.
            let at = self.at(rank, other);
            let keep = self.random.below(self.links[at].len() as u64 + 1) as usize;
            let torn = self.links[at].drain(keep..).next();
            if let Some(Passing::Data { epoch, header, bytes: Some(bytes) }) = torn {
                let half = bytes[..bytes.len() / 2].into();
                self.links[at].push_back(Passing::Torn { epoch, header, bytes: half });
            }
            self.links[at].push_back(Passing::End);
            let back = self.at(other, rank);
            self.open[at] = false;
            self.open[back] = false;
            self.links[back].clear();
        }
    }

    fn submit(&mut self, rank: usize, tensor: usize) -> Result<(), String> {
        let elems = self.book.tensors[tensor].elems as usize;
        let own = &mut self.workers[rank].tensors[tensor];
        if own.memory.is_shared() {
            return Ok(()); // its lender has not got it back
        }
        own.seq += 1;
        let gives = contribution(rank, tensor, own.seq, elems);
        own.gave = gives.is_some();
        let row = gives.unwrap_or_else(|| vec![-1.0; elems]);
        own.memory.write(|bytes| bytes.copy_from_slice(bytemuck::cast_slice(&row)));
        own.landed.clear();
        own.applied = false;
        let event = Event::Submit(self.submission(rank, tensor));
        self.step(rank, event)
    }

    /// A program says the word for the step that it has submitted, or for the next one.
    fn say(&mut self, rank: usize, tensor: usize) -> Result<(), String> {
        let own = &mut self.workers[rank].tensors[tensor];
        own.said += 1;
        let step = own.said;
        self.say_of(rank, tensor, step, |_| true)
    }

    fn say_of(
        &mut self,
        rank: usize,
        tensor: usize,
        step: Seq,
        those: impl Fn(SliceId) -> bool,
    ) -> Result<(), String> {
        let slices = self.book.slices_of(tensor as u32);
        for slice in self.workers[rank].node.kept(0) {
            if slices.contains(&slice) && those(slice) {
                let update = updates::word(tensor, step);
                self.step(rank, Event::Proceed { book: 0, slice, step, update })?;
            }
        }
        Ok(())
    }

    fn submission(&self, rank: usize, tensor: usize) -> Submission<Chunk> {
        let own = &self.workers[rank].tensors[tensor];
        Submission {
            book: 0,
            tensor: tensor as u32,
            seq: own.seq,
            step: own.seq,
            memory: own.memory.clone(),
            gives: Gives::unless_absent(Op::Average, !own.gave),
        }
    }

    fn step(&mut self, rank: usize, event: Event<Chunk>) -> Result<(), String> {
        let mut actions = Vec::new();
        let outcome = self.workers[rank].node.step(event, &mut actions);
        self.note(rank, actions)?;
        outcome.map_err(|error| format!("rank {rank}: {error}"))
    }

    fn note(&mut self, rank: usize, actions: Vec<Action<Chunk>>) -> Result<(), String> {
        for action in actions {
            let Action::Complete { slice, seq, present, kept, .. } = action else { continue };
            let tensor = self.book.slices[slice as usize].tensor as usize;
            let own = &mut self.workers[rank].tensors[tensor];
            if own.seq != seq || own.landed.insert(slice, present).is_some() {
                return Err(format!("rank {rank}: slice {slice} ends round {seq} again, or not in turn"));
            }
            let members = self.averaged_over(rank, slice, seq, present)?;
            let kept =
                if present && self.omits(Omission::AnswersInPlace) { self.copied(rank, slice) } else { kept };
            let own = &mut self.workers[rank].tensors[tensor];
            own.kept.insert(slice, kept);
            own.log.insert((slice, seq), members);
            if self.omits(Omission::OwnersAnswer) {
                self.answer_at_once(rank, slice, seq)?;
            }
        }
        Ok(())
    }

    /// The result of an owner comes to somebody who waits for the replica.
    fn answer_at_once(&mut self, rank: usize, slice: SliceId, seq: Seq) -> Result<(), String> {
        let book = self.book_of(rank);
        let at = &book.slices[slice as usize];
        let (tensor, me) = (at.tensor as usize, Rank(rank as u32));
        let Some(replica) = at.replica.filter(|_| at.owner == me) else { return Ok(()) };
        let epoch = self.workers[rank].agreement.epoch();
        let waits = |other: usize| {
            let own = &self.workers[other].tensors[tensor];
            let here = self.is_in(other)
                && !self.workers[other].reported
                && self.workers[other].agreement.epoch() == epoch;
            here && own.seq == seq && !own.landed.contains_key(&slice)
        };
        let told = book.roles.members.after(me).find(|to| *to != replica && waits(to.index()));
        let own = &self.workers[rank].tensors[tensor];
        let Some((to, result)) = told.zip(own.kept.get(&slice).cloned()) else { return Ok(()) };
        let (kind, payload_bytes) =
            result.as_ref().map_or((Kind::AnswerAbsent, 0), |_| (Kind::Answer, at.len_bytes));
        let header = Header { kind, slice, seq, step: seq, payload_bytes, ..Header::control(kind) };
        self.answered.insert((to.index(), slice, seq));
        self.step(to.index(), Event::Frame { from: replica, header, payload: result })
    }

    /// How slices are dealt in the epoch in which a rank is.
    fn book_of(&self, rank: usize) -> Arc<Book> {
        let agreement = &self.workers[rank].agreement;
        let key = (agreement.epoch(), agreement.members().iter().collect());
        self.books.get(&key).map_or_else(|| Arc::new(self.book.clone()), |(book, _)| Arc::clone(book))
    }

    /// What a slice of a rank's memory holds now.
    fn copied(&self, rank: usize, slice: SliceId) -> Option<Chunk> {
        let at = &self.book.slices[slice as usize];
        let own = &self.workers[rank].tensors[at.tensor as usize];
        let bytes = own.memory.part(at.offset_bytes as usize, at.len_bytes as usize).to_bytes()?;
        let copy = RealMemory::tensor(bytes.len());
        copy.write(|memory| memory.copy_from_slice(&bytes));
        Some(copy)
    }

    /// The members of an epoch over whom what has landed is the average, to the bit.
    fn averaged_over(
        &mut self,
        rank: usize,
        slice: SliceId,
        seq: Seq,
        present: bool,
    ) -> Result<Vec<Rank>, String> {
        let at = &self.book.slices[slice as usize];
        let tensor = at.tensor as usize;
        let range = at.offset_bytes as usize..at.offset_bytes as usize + at.len_bytes as usize;
        let here = self.workers[rank].tensors[tensor].memory.part(range.start, range.len()).to_bytes();
        if self.updates {
            let own = &mut self.workers[rank].tensors[tensor];
            let before = own.param.part(range.start, range.len()).to_bytes().unwrap_or_default();
            let after = here.unwrap_or_default();
            let (book, account) = (&self.book, &mut own.account);
            let mut is_it = |members: &&Vec<Rank>| {
                account.is_after(book, (slice, seq), members, (&before, &after, present))
            };
            let found = self.epochs.iter().find(&mut is_it).cloned();
            // A step that is not made is none of any members.
            return found.map(|members| if present { members } else { Vec::new() }).ok_or_else(|| {
                format!(
                    "rank {rank}: slice {slice}, round {seq} is no update by an epoch's average ({present})"
                )
            });
        }
        // Of a tensor that counts as there another slice may have had a contribution.
        let is_zero = self.omits(Omission::AnswersInPlace)
            || here.as_deref().is_none_or(|bytes| bytes.iter().all(|byte| *byte == 0));
        let is_it = |members: &&Vec<Rank>| {
            let want = average(members, tensor, seq, self.book.tensors[tensor].elems as usize);
            let same = |want: Vec<f32>| {
                Some(&bytemuck::cast_slice::<f32, u8>(&want)[range.clone()]) == here.as_deref()
            };
            want.map_or_else(|| !present && is_zero, |want| present && same(want))
        };
        let found = self.epochs.iter().find(is_it).cloned();
        found.ok_or_else(|| {
            format!("rank {rank}: slice {slice}, round {seq} is no epoch's average ({present})")
        })
    }

    /// The program uses a result, and has other use for its memory.
    fn apply(&mut self, rank: usize, tensor: usize) {
        let updates = self.updates;
        let own = &mut self.workers[rank].tensors[tensor];
        let row: Vec<f32> = own.memory.read(|bytes| bytemuck::cast_slice(bytes).to_vec()).unwrap_or_default();
        for (slice, present) in &own.landed {
            let at = &self.book.slices[*slice as usize];
            let first = at.offset_bytes as usize / 4;
            let range = first..first + at.len_bytes as usize / 4;
            if *present {
                own.param.write(|bytes| {
                    let param = &mut bytemuck::cast_slice_mut::<u8, f32>(bytes)[range.clone()];
                    let pairs = param.iter_mut().zip(&row[range]);
                    pairs.for_each(|(param, one)| *param = if updates { *one } else { *param * 0.5 + one });
                });
            }
        }
        own.applied = true;
        if !own.memory.is_shared() {
            own.memory.write(|bytes| bytes.fill(0xEE));
        }
    }

    fn arrive(&mut self, from: usize, to: usize, item: Passing) -> Result<(), String> {
        let peer = Rank(from as u32);
        let mine = self.workers[to].agreement.epoch();
        match item {
            Passing::Torn { epoch, header, bytes } if epoch == mine && self.takes(to, &header) => {
                let place =
                    self.workers[to].node.destination(peer, &header).map_err(|error| error.to_string())?;
                if let Destination::Chunk(chunk) = place {
                    chunk.write(|memory| memory[..bytes.len()].copy_from_slice(&bytes));
                }
                Ok(())
            }
            Passing::Data { epoch, .. } if epoch > mine => {
                Err(format!("rank {to}, epoch {mine}: a frame of rank {from} of epoch {epoch}"))
            }
            Passing::Data { header, .. }
                if matches!(header.kind, Kind::Answer | Kind::AnswerAbsent)
                    && self.answered.remove(&(to, header.slice, header.seq)) =>
            {
                Ok(())
            }
            Passing::Data { epoch, header, bytes } if epoch == mine && self.takes(to, &header) => {
                let place =
                    self.workers[to].node.destination(peer, &header).map_err(|error| error.to_string())?;
                let payload = if let Destination::Chunk(chunk) = place { Some(chunk) } else { None };
                if let (Some(chunk), Some(bytes)) = (&payload, bytes) {
                    chunk.write(|memory| memory.copy_from_slice(&bytes));
                }
                self.step(to, Event::Frame { from: peer, header, payload })
            }
            Passing::Torn { .. } | Passing::Data { .. } => Ok(()),
            Passing::Said(bytes) => {
                let (epoch, message) = MemberMessage::decode(&bytes)?;
                self.workers[to].agreement.heard_from(0, peer, epoch, message);
                self.follow(to)
            }
            Passing::Open => {
                let ElasticRank { agreement, hearing, .. } = &mut self.workers[to];
                let _ = hearing.connected(0, peer, agreement);
                self.follow(to)
            }
            Passing::End => {
                let ElasticRank { agreement, hearing, .. } = &mut self.workers[to];
                hearing.closed(0, peer);
                // It is not made anew.
                hearing.look(PATIENCE_NS, std::iter::empty(), agreement);
                self.follow(to)
            }
        }
    }

    /// Who has reported takes nothing in.
    fn takes(&self, rank: usize, header: &Header) -> bool {
        let late = self.omits(Omission::TakeInAfterTheReport) && !header.kind.takes_part();
        self.is_in(rank) && (!self.workers[rank].reported || late)
    }

    fn report_of(&self, rank: usize) -> Report {
        let worker = &self.workers[rank];
        let progress = |(slice, at): (SliceId, &penstock_core::layout::Slice)| {
            let own = &worker.tensors[at.tensor as usize];
            let keeps = self.updates && worker.node.has_states(0, slice);
            SliceProgress { submitted: own.seq, done: own.landed.contains_key(&slice), keeps }
        };
        vec![(0, (0..).zip(&self.book.slices).map(progress).collect())]
    }

    fn follow(&mut self, rank: usize) -> Result<(), String> {
        loop {
            let effects = self.workers[rank].agreement.take_effects();
            if effects.is_empty() {
                return Ok(());
            }
            for effect in effects {
                match effect {
                    Effect::Send(to, epoch, message) => {
                        self.send(rank, to.index(), Passing::Said(message.encode(epoch)));
                    }
                    Effect::Freeze => {
                        self.workers[rank].reported = true;
                        let report = self.report_of(rank);
                        self.workers[rank].agreement.frozen(0, encode(&report));
                    }
                    Effect::Plan(ballot, reports) => {
                        self.workers[rank].agreement.planned(0, ballot, encode_plan(&reports));
                    }
                    Effect::Chosen(choice) => self.begin(rank, &choice)?,
                }
            }
        }
    }

    /// The next epoch, at one of its members or at one that is left out.
    fn begin(&mut self, rank: usize, choice: &NextMembers) -> Result<(), String> {
        self.trace.push(format!("rank {rank}: epoch {} with {:?}", choice.epoch + 1, choice.ranks));
        if self.workers[rank].agreement.is_out() {
            return Ok(());
        }
        let members: Members = choice.ranks.iter().copied().collect();
        self.epochs.insert(choice.ranks.clone());
        // Newcomers have nothing to report.
        let plan = decode_plan(&choice.plan)?.into_iter().filter(|(_, report)| !report.is_empty());
        let reports: Result<Vec<(Rank, Report)>, String> =
            plan.map(|(rank, report)| Ok((rank, decode(report)?))).collect();
        let reports = reports?;
        let found = recovery(&reports)?;
        let given = if self.omits(Omission::GiveNothing) { Vec::new() } else { found };
        let Some((book, states)) = self.dealt(choice, &members, &reports)? else { return Ok(()) };
        let mut entries = self.workers[rank].node.take_entries();
        let mut node = Node::new(config(rank, &members), RealMemory::default());
        node.open_book(0, book, &mut Vec::new()).map_err(|error| error.to_string())?;
        self.workers[rank].reported = false;
        if choice.admits && self.pass(rank) && self.updates {
            lend(&mut node, &self.workers[rank].tensors);
            entries.clear();
        }
        entries.into_iter().for_each(|(book, slice, entry)| node.put_entry(book, slice, entry));
        self.workers[rank].node = node;
        self.recover(rank, &given, &states)
    }

    /// How slices are dealt in the next epoch, and which states are given to whom; nothing if some are lost.
    fn dealt(
        &mut self,
        choice: &NextMembers,
        members: &Members,
        reports: &[(Rank, Report)],
    ) -> Result<Option<DealtAndGiven>, String> {
        // A member that has never begun an epoch knows how slices were dealt from the others.
        let before =
            self.books.range(..(choice.epoch + 1, Vec::new())).next_back().map(|(_, last)| last.clone());
        let (last, moved) = before.unwrap_or_else(|| (Arc::new(self.book.clone()), BTreeSet::new()));
        let next = Arc::new(last.among(members));
        let keepers =
            |_, slice: SliceId| self.updates.then(|| next.slices[slice as usize].keepers().collect());
        let mut states = match states_given(reports, keepers) {
            Ok(states) => states,
            Err(slices) => {
                let slices = slices.into_iter().map(|(_, slice)| slice);
                let unlikely = |slice: &SliceId| {
                    !may_be_lost(&last.slices[*slice as usize], moved.contains(slice), &choice.ranks)
                };
                if let Some(slice) = slices.into_iter().find(unlikely) {
                    let at = &last.slices[slice as usize];
                    let progress = reports.iter().map(|(rank, report)| (*rank, report[0].1[slice as usize]));
                    let progress: Vec<_> = progress.collect();
                    return Err(format!(
                        "what was kept of slice {slice} is lost, and one that kept it is left: {at:?}, {progress:?}"
                    ));
                }
                self.lost = true;
                return Ok(None);
            }
        };
        if self.omits(Omission::GiveOldStates) {
            let has = |slice: SliceId| {
                reports.iter().find(|(_, report)| report[0].1[slice as usize].keeps).map(|(rank, _)| *rank)
            };
            states.iter_mut().for_each(|given| given.by = has(given.slice).unwrap_or(given.by));
        }
        let moved = states.iter().map(|given| given.slice).collect();
        self.books.insert((choice.epoch + 1, choice.ranks.clone()), (Arc::clone(&next), moved));
        Ok(Some((next, states)))
    }

    /// The gate opens: a newcomer gets what the others have.
    fn pass(&mut self, rank: usize) -> bool {
        if std::mem::replace(&mut self.workers[rank].passed, true) {
            return false;
        }
        let fresh = |own: &Own| Own {
            memory: RealMemory::tensor(own.param.len_bytes()),
            kept: BTreeMap::new(),
            param: copy_of(&own.param),
            said: own.said.max(own.seq), // a newcomer begins with the next step
            ..own.clone()
        };
        let given = self.at_gate.as_ref().unwrap_or(&self.workers[rank].tensors);
        let given: Vec<Own> = given.iter().map(fresh).collect();
        if rank >= self.founders {
            self.workers[rank].tensors = given;
            self.admitted += 1;
            return true;
        }
        if self.at_gate.is_none() {
            self.at_gate = Some(given);
        }
        false
    }

    fn recover(
        &mut self,
        rank: usize,
        given: &[GivenToOthers],
        states: &[GivenToOthers],
    ) -> Result<(), String> {
        let me = Rank(rank as u32);
        let mut lacking = BTreeSet::new();
        for given in given {
            if given.by == me {
                let kept = self.kept(rank, given)?;
                let mut actions = Vec::new();
                // As a program that is at the next step already has it.
                let tensor = self.book.slices[given.slice as usize].tensor as usize;
                let step = self.workers[rank].tensors[tensor].seq;
                let node = &mut self.workers[rank].node;
                node.give(given, step, kept.as_ref(), &mut actions).map_err(|error| error.to_string())?;
                self.given += given.to.len() as u64;
                self.note(rank, actions)?;
            }
            if given.to.contains(&me) {
                lacking.insert(given.slice);
                let tensor = self.book.slices[given.slice as usize].tensor as usize;
                let submission = self.submission(rank, tensor);
                self.workers[rank].node.lacks(given, &submission).map_err(|error| error.to_string())?;
            }
        }
        let states: &[GivenToOthers] = if self.omits(Omission::GiveNoStates) { &[] } else { states };
        for given in states {
            self.trace.push(format!("rank {rank}: {given:?}"));
            let mut actions = Vec::new();
            let node = &mut self.workers[rank].node;
            if given.by == me {
                node.give_states(given, &mut actions).map_err(|error| error.to_string())?;
                self.states_given += given.to.len() as u64;
            }
            if given.to.contains(&me) && given.by != me {
                self.workers[rank].node.lacks_states(given).map_err(|error| error.to_string())?;
            }
            self.note(rank, actions)?;
        }
        for tensor in 0..self.book.tensors.len() {
            let own = &self.workers[rank].tensors[tensor];
            if own.applied {
                continue;
            }
            let open = |slice: &SliceId| !own.landed.contains_key(slice) && !lacking.contains(slice);
            let slices: Vec<SliceId> = self.book.slices_of(tensor as u32).filter(open).collect();
            let submission = self.submission(rank, tensor);
            let mut actions = Vec::new();
            let node = &mut self.workers[rank].node;
            node.submit_again(&submission, &slices, &mut actions).map_err(|error| error.to_string())?;
            self.note(rank, actions)?;
        }
        for tensor in 0..self.book.tensors.len() {
            let own = &self.workers[rank].tensors[tensor];
            let (said, seq, landed) = (own.said, own.seq, own.landed.clone());
            if self.updates && said >= seq && said > 0 && !self.omits(Omission::SayTheWordOnce) {
                let waits = |slice| said > seq || !landed.contains_key(&slice) && !lacking.contains(&slice);
                self.say_of(rank, tensor, said, waits)?;
            }
        }
        Ok(())
    }

    /// The result that this rank is to give; nothing if nobody contributed.
    fn kept(&self, rank: usize, given: &GivenToOthers) -> Result<Option<Chunk>, String> {
        let at = &self.book.slices[given.slice as usize];
        let own = &self.workers[rank].tensors[at.tensor as usize];
        let kept = own.kept.get(&given.slice).cloned().ok_or_else(|| {
            format!("rank {rank} is to give round {} of slice {}, and has none of it", given.seq, given.slice)
        })?;
        let in_place = kept.is_some() && self.omits(Omission::KeepNothing);
        Ok(if in_place { self.copied(rank, given.slice) } else { kept })
    }

    /// Nothing is left to happen: all that are left and are enough have come to the end, with the same parameters.
    fn check_rest(&self) -> Result<bool, String> {
        let last = (0..self.workers.len())
            .filter(|rank| self.is_in(*rank))
            .map(|rank| self.workers[rank].agreement.epoch())
            .max();
        let Some(last) = last else { return Ok(false) };
        let there: Vec<usize> = (0..self.workers.len())
            .filter(|rank| self.is_in(*rank) && self.workers[*rank].agreement.epoch() == last)
            .collect();
        if there.len() < self.workers[there[0]].agreement.quorum() {
            return Ok(false);
        }
        for rank in &there {
            for (tensor, own) in self.workers[*rank].tensors.iter().enumerate() {
                if own.seq != self.steps || !own.applied {
                    return Err(format!("rank {rank} stands still at round {} of tensor {tensor}", own.seq));
                }
                let first = &self.workers[there[0]].tensors[tensor].log;
                if own.log != *first {
                    return Err(format!("rank {rank} and rank {} have averaged over others", there[0]));
                }
                let want = if self.updates {
                    Account::replayed(&self.book, tensor, self.steps, &own.log)
                } else {
                    self.replayed(tensor, &own.log)
                };
                let param = own.param.read(|bytes| bytemuck::cast_slice::<u8, f32>(bytes) == want);
                if param != Some(true) {
                    return Err(format!(
                        "rank {rank} has another parameter of tensor {tensor} than the log of members says"
                    ));
                }
            }
        }
        Ok(true)
    }

    /// A parameter as it must be by the log.
    fn replayed(&self, tensor: usize, log: &Log) -> Vec<f32> {
        let elems = self.book.tensors[tensor].elems as usize;
        let mut param = vec![0.0; elems];
        for seq in 1..=self.steps {
            for slice in self.book.slices_of(tensor as u32) {
                let Some(members) = log.get(&(slice, seq)) else { continue };
                let at = &self.book.slices[slice as usize];
                let first = at.offset_bytes as usize / 4;
                let range = first..first + at.len_bytes as usize / 4;
                if let Some(row) = average(members, tensor, seq, elems) {
                    param[range.clone()]
                        .iter_mut()
                        .zip(&row[range])
                        .for_each(|(param, one)| *param = *param * 0.5 + one);
                }
            }
        }
        param
    }
}

/// Draws a job from `seed` in which up to three members are lost and up to two newcomers come, and plays it until nothing is left to happen.
///
/// # Errors
/// What does not hold.
pub fn run(seed: u64, omission: Option<Omission>) -> Result<Survived, String> {
    play(seed, World::new(seed, omission, false))
}

/// As [`run`], of a job whose owners update what they keep.
///
/// # Errors
/// What does not hold.
pub fn run_updates(seed: u64, omission: Option<Omission>) -> Result<Survived, String> {
    play(seed, World::new(seed, omission, true))
}

fn play(seed: u64, mut world: World) -> Result<Survived, String> {
    let mut losses = world.random.below(4);
    let failed = |what: String, world: &World| format!("seed {seed}: {what}\n{}", world.trace.join("\n"));
    let hurry = world.random.between(3, 60);
    for _ in 0..EVENTS_MAX {
        let next = world.next();
        if next.is_empty() {
            break;
        }
        if losses > 0 && world.random.below(1000) < hurry {
            losses -= 1;
            let rank = world.random.below(world.workers.len() as u64) as usize;
            if world.workers[rank].lives {
                world.trace.push(format!("rank {rank} is lost"));
                world.kill(rank);
                continue;
            }
        }
        let what = world.random.pick(&next);
        if world.is_slow(what) && next.len() > 1 && !world.random.chance(20) {
            continue;
        }
        world.trace.push(format!("{what:?}"));
        world.happen(what).map_err(|what| failed(what, &world))?;
        if world.lost {
            break;
        }
    }
    if world.lost {
        return Ok(Survived { states_given: world.states_given, lost_states: true, ..Survived::default() });
    }
    if !world.next().is_empty() {
        return Err(failed(format!("{EVENTS_MAX} events and no end"), &world));
    }
    let went_on = world.check_rest().map_err(|what| {
        let states = world.workers.iter().map(|worker| {
            let ElasticRank { agreement, lives, reported, .. } = worker;
            format!("lives {lives} reported {reported} {agreement:?}")
        });
        world.trace.extend(states);
        failed(what, &world)
    })?;
    let epochs = world.workers.iter().map(|worker| worker.agreement.epoch()).max().unwrap_or(0);
    let admitted = world.admitted;
    let (given, states_given) = (world.given, world.states_given);
    Ok(Survived { epochs, given, went_on, admitted, states_given, lost_states: false })
}

//! Calls in random order: ranks and groups, messages and collectives on real numbers, over links that keep the order of
//! frames and nothing else.
//!
//! [`run`] draws a job from a seed: calls of every kind in several groups at once. Every rank begins its calls in the order
//! of each group but otherwise when chance says so, without waiting for any; frames are written, and arrive, when chance
//! says so. In the end every call must be complete with the expected bits, all memory released and nothing left to send.
//! A payload must not change between its choice and the moment when it is written.
//!
//! What it omits: time. `crate::world` has that, for exchanges.

use crate::memory::{Chunk, RealMemory, SimMemory};
use crate::random::Random;
use bits::{ORDERED_ELEMS_MAX, draw_elems, is_plain, numbers, sum, sum_in_any_order, tensor, whole_numbers};
use penstock_core::Members;
use penstock_core::calls::{Call, CallKind, Request, Shape, Share, lanes};
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::types::{Dtype, GroupId, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::{Destination, Header, Kind, Op, Outgoing};
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

mod bits;
mod lost;

pub use lost::{Loss, run_with_a_loss};

/// What a run was like.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Calls, counted once for each rank.
    pub calls: u64,
    /// Frames.
    pub frames: u64,
    /// Messages that arrived whole before they were asked for.
    pub early: u64,
    /// Messages that were offered.
    pub offers: u64,
    /// Bytes of messages sent, by rank.
    pub sent: Vec<u64>,
    /// Bytes of messages received, by rank.
    pub received: Vec<u64>,
}

/// One rank's part in a call, and what must come out of it.
struct RankCall {
    rank: Rank,
    call: Call<Chunk>,
    /// By output block.
    expected: Vec<Vec<u8>>,
    /// Shares of the call that are not complete; the outputs are looked at after the last.
    shares: Rc<Cell<u32>>,
    /// Of a receive from anybody: what each member of the group sends.
    by_source: Vec<Vec<u8>>,
    complete: bool,
}

/// Calls that one rank begins in order.
type Program = VecDeque<usize>;

/// A frame between being chosen and being written: nobody may change its payload.
struct Writing {
    header: Header,
    payload: Option<Chunk>,
    before: Option<Box<[u8]>>,
}

#[derive(Default)]
struct Link {
    writing: VecDeque<Writing>,
    arriving: VecDeque<(Header, Option<Box<[u8]>>)>,
    /// The memory for the payload of the first of `arriving`, once its header was read.
    placed: Option<Option<Chunk>>,
}

struct World {
    random: Random,
    ranks: u32,
    groups: Vec<Vec<Rank>>,
    nodes: Vec<Node<RealMemory>>,
    links: Vec<Link>,
    parts: Vec<RankCall>,
    /// By rank.
    programs: Vec<Vec<Program>>,
    /// It does nothing more, and nothing reaches it.
    lost: Option<Rank>,
    report: Report,
}

const OPS: [Op; 4] = [Op::Sum, Op::Average, Op::Min, Op::Max];
const DTYPES: [Dtype; 6] = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16, Dtype::I32, Dtype::U8];

/// Draws a job from `seed` and plays it.
///
/// # Errors
/// What went wrong, with the seed.
pub fn run(seed: u64) -> Result<Report, String> {
    let mut random = Random::new(seed);
    let ranks = random.pick(&[1, 2, 2, 3, 4, 5, 7, 8, 17]);
    let count = random.between(1, if ranks > 8 { 6 } else { 25 });
    World::new(random, ranks)
        .and_then(|mut world| {
            for _ in 0..count {
                world.draw_call();
            }
            world.play()
        })
        .map_err(|error| format!("seed {seed}, {ranks} ranks: {error}"))
}

/// One allreduce of every rank, in an order drawn from `seed`.
///
/// # Errors
/// What went wrong, with all there is to play it again.
pub fn allreduce(
    algorithm: Algorithm,
    (op, dtype): (Op, Dtype),
    ranks: u32,
    elems: usize,
    seed: u64,
) -> Result<Report, String> {
    World::new(Random::new(seed), ranks)
        .and_then(|mut world| {
            world.add_collective(0, CallKind::Allreduce { algorithm }, (op, dtype), elems, 1);
            world.play()
        })
        .map_err(|error| {
            format!(
                "{algorithm:?}, {op:?} of {dtype:?}, {elems} elements, {ranks} ranks, seed {seed}: {error}"
            )
        })
}

impl World {
    fn new(mut random: Random, ranks: u32) -> Result<Self, String> {
        let mut groups = vec![(0..ranks).map(Rank).collect::<Vec<_>>()];
        for _ in 0..random.below(3) {
            let mut members: Vec<Rank> = groups[0].clone();
            random.shuffle(&mut members);
            members.truncate(random.between(1, u64::from(ranks)) as usize);
            groups.push(members);
        }
        let config = |rank| Config {
            rank: Rank(rank),
            members: Members::all(ranks),
            workers: Members::all(ranks),
            lane: 0,
            lanes: 1,
            window_bytes: 1 << 20,
            priority: true,
        };
        let mut nodes: Vec<_> =
            (0..ranks).map(|rank| Node::new(config(rank), RealMemory::default())).collect();
        let mut actions = Vec::new();
        for (id, members) in groups.iter().enumerate() {
            for rank in members {
                let event = Event::Group(id as GroupId, members.clone());
                nodes[rank.index()].step(event, &mut actions).map_err(|error| error.to_string())?;
            }
        }
        let links = (0..ranks * ranks).map(|_| Link::default()).collect();
        let programs = (0..ranks).map(|_| Vec::new()).collect();
        Ok(Self {
            random,
            ranks,
            groups,
            nodes,
            links,
            parts: Vec::new(),
            programs,
            lost: None,
            report: Report {
                sent: vec![0; ranks as usize],
                received: vec![0; ranks as usize],
                ..Report::default()
            },
        })
    }

    fn draw_call(&mut self) {
        let group = self.random.below(self.groups.len() as u64) as usize;
        let size = self.groups[group].len() as u32;
        if size > 1 && self.random.chance(400) {
            return self.draw_message(group, size);
        }
        let root = self.random.below(u64::from(size)) as u32;
        let algorithm = self.random.pick(&Algorithm::ALL);
        let what = self.random.pick(&[
            CallKind::Barrier,
            CallKind::Broadcast { root },
            CallKind::Reduce { root },
            CallKind::Gather { root },
            CallKind::Scatter { root },
            CallKind::Allreduce { algorithm },
            CallKind::AllGather,
            CallKind::ReduceScatter,
            CallKind::AllToAll,
        ]);
        let dtype = if what.computes() { self.random.pick(&DTYPES) } else { Dtype::Bytes };
        let op = self.random.pick(&OPS);
        let op = if op.refused(dtype).is_some() { Op::Sum } else { op };
        let mut elems = draw_elems(&mut self.random, dtype.size_bytes());
        if matches!(what, CallKind::Allreduce { .. }) && !is_plain(algorithm, dtype) {
            elems = elems.min(ORDERED_ELEMS_MAX);
        }
        let vectors = match what {
            CallKind::Allreduce { .. } | CallKind::Broadcast { .. } => self.random.pick(&[1, 1, 1, 2, 3]),
            _ => 1,
        };
        self.add_collective(group, what, (op, dtype), elems, vectors);
    }

    /// Adds a call on random numbers to every member's program; where ranks have several vectors each, on whole numbers, of which
    /// every order gives the same sum.
    fn add_collective(
        &mut self,
        group: usize,
        what: CallKind,
        (op, dtype): (Op, Dtype),
        elems: usize,
        vectors: usize,
    ) {
        let size = self.groups[group].len() as u32;
        // Every rank's blocks. Blocks of an all-to-all differ in length.
        let n = size as usize;
        let mut rows: Vec<Vec<Vec<u8>>> = Vec::new();
        for _ in 0..n {
            let lens: Vec<usize> = match what {
                CallKind::AllToAll => (0..n).map(|_| self.random.below(elems as u64 + 1) as usize).collect(),
                _ => vec![elems; n.max(vectors)],
            };
            let draw = if vectors > 1 { whole_numbers } else { numbers };
            rows.push(lens.iter().map(|len| draw(&mut self.random, dtype, *len)).collect());
        }
        let lens = |count: usize| vec![(elems * dtype.size_bytes()) as u64; count];
        let shape = Shape {
            kind: what,
            ranks: size,
            me: 0,
            elem_bytes: dtype.size_bytes(),
            inputs: lens(vectors),
            outputs: lens(vectors),
        };
        let of = lanes(&shape, self.random.between(1, 3) as u32);
        let column = |block: usize| rows.iter().map(|row| row[block].clone()).collect::<Vec<_>>();
        let total = match what {
            CallKind::Reduce { .. } => sum(Algorithm::Store, dtype, op, &column(0)),
            CallKind::Allreduce { algorithm } if vectors == 1 => sum(algorithm, dtype, op, &column(0)),
            CallKind::Allreduce { .. } => sum_in_any_order(dtype, op, (0..vectors).flat_map(column)),
            _ => Vec::new(),
        };
        for me in 0..n {
            let is_root = what.root() == Some(me as u32);
            let (inputs, expected): (Vec<Vec<u8>>, Vec<Vec<u8>>) = match what {
                CallKind::Message | CallKind::Barrier => (Vec::new(), Vec::new()),
                CallKind::Broadcast { root } => (Vec::new(), vec![rows[root as usize][0].clone(); vectors]),
                CallKind::Reduce { .. } | CallKind::Gather { .. } if !is_root => {
                    (vec![rows[me][0].clone()], Vec::new())
                }
                CallKind::Reduce { .. } | CallKind::Allreduce { .. } => {
                    (rows[me][..vectors].to_vec(), vec![total.clone(); vectors])
                }
                CallKind::Gather { .. } | CallKind::AllGather => (vec![rows[me][0].clone()], column(0)),
                CallKind::Scatter { root } => (
                    if is_root { rows[me].clone() } else { Vec::new() },
                    vec![rows[root as usize][me].clone()],
                ),
                CallKind::ReduceScatter => {
                    (rows[me].clone(), vec![sum(Algorithm::Store, dtype, op, &column(me))])
                }
                CallKind::AllToAll => (rows[me].clone(), column(me)),
            };
            let blocks = |blocks: &[Vec<u8>]| blocks.iter().map(|b| (tensor(b), b.len() as u64)).collect();
            let inputs: Vec<(Chunk, u64)> = blocks(&inputs);
            let empty = |b: &Vec<u8>| (RealMemory::tensor(b.len()), b.len() as u64);
            let mut outputs: Vec<(Chunk, u64)> = expected.iter().map(empty).collect();
            if matches!(what, CallKind::Broadcast { .. }) && is_root {
                outputs = blocks(&expected);
            }
            if matches!(what, CallKind::Allreduce { .. }) && self.random.chance(500) {
                outputs.clone_from(&inputs); // in place
            }
            let (rank, request) = (self.groups[group][me], Request::Collective(what));
            // As if by lanes, the shares being calls of their own.
            let shares = Rc::new(Cell::new(of));
            for index in 0..of {
                let share = Share { index, of };
                let (inputs, outputs, expected) = (inputs.clone(), outputs.clone(), expected.clone());
                let call =
                    Call { id: 0, group: group as GroupId, request, op, dtype, share, inputs, outputs };
                self.add(rank, group, call, expected, &shares);
            }
        }
    }

    fn draw_message(&mut self, group: usize, size: u32) {
        if self.random.chance(200) {
            return self.draw_messages_to_anybody(group, size);
        }
        let from = self.random.below(u64::from(size)) as u32;
        let to = (from + 1 + self.random.below(u64::from(size) - 1) as u32) % size;
        let tag = self.random.below(2) as u32;
        let elems = draw_elems(&mut self.random, 1);
        let bytes = numbers(&mut self.random, Dtype::Bytes, elems);
        let len = bytes.len() as u64;
        let members = self.groups[group].clone();
        let call = |request, inputs, outputs| Call {
            id: 0,
            group: group as GroupId,
            request,
            op: Op::Copy,
            dtype: Dtype::Bytes,
            share: Share::ALL,
            inputs,
            outputs,
        };
        let sent = call(Request::Send { to, tag }, vec![(tensor(&bytes), len)], Vec::new());
        let got =
            call(Request::Receive { from, tag }, Vec::new(), vec![(RealMemory::tensor(bytes.len()), len)]);
        // Messages of one group, pair, direction and tag are in order; so they share a program.
        let queue = 16 + (((from * size + to) * 2 + tag) as usize) * 16 + group;
        self.add(members[from as usize], queue, sent, Vec::new(), &Rc::new(Cell::new(1)));
        self.add(members[to as usize], queue, got, vec![bytes], &Rc::new(Cell::new(1)));
    }

    /// Several members send to one, who receives as many from anybody. Each sender's are alike: any of its may come.
    fn draw_messages_to_anybody(&mut self, group: usize, size: u32) {
        let to = self.random.below(u64::from(size)) as u32;
        let elems = draw_elems(&mut self.random, 1);
        let by_source: Vec<Vec<u8>> =
            (0..size).map(|_| numbers(&mut self.random, Dtype::Bytes, elems)).collect();
        let (members, len) = (self.groups[group].clone(), elems as u64);
        // A tag of its own, since lengths must fit.
        let tag = 2 + self.parts.len() as u32;
        let call = |request, inputs, outputs| {
            let (group, op, dtype, share) = (group as GroupId, Op::Copy, Dtype::Bytes, Share::ALL);
            Call { id: 0, group, request, op, dtype, share, inputs, outputs }
        };
        for _ in 0..self.random.between(1, 5) {
            let from = (to + 1 + self.random.below(u64::from(size) - 1) as u32) % size;
            let sent = tensor(&by_source[from as usize]);
            let sent = call(Request::Send { to, tag }, vec![(sent, len)], Vec::new());
            let got = call(Request::ReceiveAny { tag }, Vec::new(), vec![(RealMemory::tensor(elems), len)]);
            // Programs whose calls nobody's messages follow: in any order among themselves.
            let queue = self.random.below(16) as usize;
            self.add(members[from as usize], queue, sent, Vec::new(), &Rc::new(Cell::new(1)));
            self.add(members[to as usize], queue, got, vec![Vec::new()], &Rc::new(Cell::new(1)));
            if let Some(part) = self.parts.last_mut() {
                part.by_source.clone_from(&by_source);
            }
        }
    }

    /// Adds a call to a rank's program of this number; calls of different programs begin in any order.
    fn add(
        &mut self,
        rank: Rank,
        program: usize,
        mut call: Call<Chunk>,
        expected: Vec<Vec<u8>>,
        shares: &Rc<Cell<u32>>,
    ) {
        call.id = self.parts.len() as u64;
        self.parts.push(RankCall {
            rank,
            call,
            expected,
            shares: Rc::clone(shares),
            by_source: Vec::new(),
            complete: false,
        });
        let programs = &mut self.programs[rank.index()];
        if program >= programs.len() {
            programs.resize_with(program + 1, VecDeque::new);
        }
        programs[program].push_back(self.parts.len() - 1);
        self.report.calls += 1;
    }

    fn play(&mut self) -> Result<Report, String> {
        self.advance(u64::MAX)?;
        self.check_end()?;
        Ok(std::mem::take(&mut self.report))
    }

    /// Lets this much happen, or all there is.
    fn advance(&mut self, mut moves: u64) -> Result<(), String> {
        // How eagerly each thing happens, so that some runs are mostly early and others mostly late.
        let weights: Vec<u64> = (0..3).map(|_| self.random.magnitude(1, 64)).collect();
        let mut idle = 0;
        while idle < 2000 && moves > 0 {
            let draw = self.random.below(weights.iter().sum());
            let moved = if draw < weights[0] {
                self.begin_something()?
            } else if draw < weights[0] + weights[1] {
                self.write_something()?
            } else {
                self.deliver_something()?
            };
            moves -= u64::from(moved);
            // Chance finds nothing to do now and then; at last everything is looked at.
            idle = if moved { 0 } else { idle + 1 };
            if idle == 1000 && self.do_anything()? {
                idle = 0;
            }
        }
        Ok(())
    }

    fn is_lost(&self, rank: usize) -> bool {
        self.lost.is_some_and(|lost| lost.index() == rank)
    }

    fn do_anything(&mut self) -> Result<bool, String> {
        for rank in 0..self.ranks as usize {
            for program in 0..self.programs[rank].len() {
                if self.begin(rank, program)? {
                    return Ok(true);
                }
            }
        }
        for link in 0..self.links.len() {
            if self.write(link)? || self.deliver(link)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn begin_something(&mut self) -> Result<bool, String> {
        let rank = self.random.below(u64::from(self.ranks)) as usize;
        let program = self.random.below(self.programs[rank].len() as u64) as usize;
        self.begin(rank, program)
    }

    fn begin(&mut self, rank: usize, program: usize) -> Result<bool, String> {
        if self.is_lost(rank) {
            return Ok(false);
        }
        let next = self.programs[rank].get_mut(program).and_then(VecDeque::pop_front);
        let Some(part) = next else { return Ok(false) };
        let call = self.parts[part].call.clone();
        self.step(rank, Event::Call(Box::new(call)))?;
        Ok(true)
    }

    fn step(&mut self, rank: usize, event: Event<Chunk>) -> Result<(), String> {
        let mut actions = Vec::new();
        self.nodes[rank].step(event, &mut actions).map_err(|error| format!("rank {rank}: {error}"))?;
        for action in actions {
            match action {
                Action::CallComplete(id) => self.complete(rank, id)?,
                Action::CallSource { id, from } => {
                    let part = &mut self.parts[id as usize];
                    part.expected = vec![part.by_source[from as usize].clone()];
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn complete(&mut self, rank: usize, id: u64) -> Result<(), String> {
        let part = &mut self.parts[id as usize];
        if std::mem::replace(&mut part.complete, true) {
            return Err(format!("rank {rank}: call {id} is complete twice"));
        }
        part.shares.set(part.shares.get() - 1);
        if part.shares.get() > 0 {
            return Ok(());
        }
        for (block, ((chunk, _), expected)) in part.call.outputs.iter().zip(&part.expected).enumerate() {
            if chunk.to_bytes().as_deref() != Some(expected) {
                let (request, dtype) = (part.call.request, part.call.dtype);
                return Err(format!("rank {rank}: {request:?} of {dtype:?}, block {block} is wrong"));
            }
        }
        Ok(())
    }

    fn write_something(&mut self) -> Result<bool, String> {
        let link = self.random.below(self.links.len() as u64) as usize;
        self.write(link)
    }

    /// Takes a frame from a node, or writes one that was taken.
    fn write(&mut self, link: usize) -> Result<bool, String> {
        let (from, to) = (link / self.ranks as usize, link % self.ranks as usize);
        if from == to || self.is_lost(from) {
            return Ok(false);
        }
        let waits = self.links[link].writing.len() as u64;
        if waits < 3
            && self.random.chance(500)
            && let Some(Outgoing { header, payload }) = self.nodes[from].next_frame(Rank(to as u32))
        {
            self.report.frames += 1;
            self.report.offers += u64::from(header.kind == Kind::Offer);
            let before = payload.as_ref().and_then(Chunk::to_bytes);
            self.links[link].writing.push_back(Writing { header, payload, before });
            return Ok(true);
        }
        let Some(Writing { header, payload, before }) = self.links[link].writing.pop_front() else {
            return Ok(self.nodes[from].has_frame(Rank(to as u32)) && waits < 3);
        };
        let bytes = payload.as_ref().and_then(Chunk::to_bytes);
        if bytes != before {
            return Err(format!("rank {from}: the payload of {header:?} changed before it was written"));
        }
        let header = Header::decode(&header.encode())?;
        self.links[link].arriving.push_back((header, bytes));
        Ok(true)
    }

    fn deliver_something(&mut self) -> Result<bool, String> {
        let link = self.random.below(self.links.len() as u64) as usize;
        self.deliver(link)
    }

    /// Brings the next header, or its payload.
    fn deliver(&mut self, link: usize) -> Result<bool, String> {
        let (from, to) = (Rank((link / self.ranks as usize) as u32), link % self.ranks as usize);
        let is_lost = self.is_lost(to);
        let Link { arriving, placed, .. } = &mut self.links[link];
        if is_lost {
            return Ok(arriving.pop_front().is_some());
        }
        let Some((header, _)) = arriving.front() else { return Ok(false) };
        let Some(chunk) = placed.take() else {
            let place =
                self.nodes[to].destination(from, header).map_err(|error| format!("rank {to}: {error}"))?;
            *placed = Some(match place {
                Destination::None => None,
                Destination::Chunk(chunk) => Some(chunk),
            });
            return Ok(true);
        };
        let Some((header, bytes)) = arriving.pop_front() else { return Ok(false) };
        match (&chunk, &bytes) {
            (Some(chunk), Some(bytes)) => {
                chunk.write(|memory| memory.copy_from_slice(bytes));
                self.report.sent[from.index()] += bytes.len() as u64;
                self.report.received[to] += bytes.len() as u64;
                self.report.early += u64::from(header.kind == Kind::Message && !chunk.is_shared());
            }
            (None, None) => {}
            _ => return Err(format!("rank {to}: no memory for the payload of {header:?}")),
        }
        self.step(to, Event::Frame { from, header, payload: chunk })?;
        Ok(true)
    }

    fn check_end(&mut self) -> Result<(), String> {
        for (id, part) in self.parts.iter().enumerate() {
            if !part.complete {
                return Err(format!(
                    "call {id} ({:?} in group {}) never ends",
                    part.call.request, part.call.group
                ));
            }
        }
        for link in &self.links {
            if !link.writing.is_empty() || !link.arriving.is_empty() {
                return Err("frames are left on a link".into());
            }
        }
        for (rank, node) in self.nodes.iter_mut().enumerate() {
            let idle =
                (0..self.ranks).all(|peer| !node.has_frame(Rank(peer)) && !node.a_call_waits_for(Rank(peer)));
            if !idle || node.memory().held_bytes() > 0 {
                return Err(format!(
                    "rank {rank}: {} bytes of scratch, or frames, are left",
                    node.memory().held_bytes()
                ));
            }
        }
        Ok(())
    }
}

//! Every route, operation, element type and number of ranks against independent references: results bit by bit, and bytes and
//! steps against the cost functions, exactly.
//!
//! A small harness over nodes alone: frames are delivered in rounds, all that were sent in one round in the next, so that the
//! number of rounds is the longest chain of frames that wait for each other; or in an order drawn at random.

use penstock_core::layout::{Book, Tensor};
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::types::{Dtype, Rank, SliceId};
use penstock_core::way::Algorithm;
use penstock_core::wire::{Destination, Kind, Op, Outgoing};
use penstock_core::{Error, Gives, Header, Members, Route, Slicing, Submission};
use penstock_sim::check::order::{self, Summation};
use penstock_sim::memory::{Chunk, RealMemory, SimMemory};
use penstock_sim::random::Random;
use std::collections::BTreeMap;
use std::sync::Arc;

#[path = "collectives/costs.rs"]
mod costs;
#[path = "collectives/roles.rs"]
mod roles;
#[path = "collectives/unordered.rs"]
mod unordered;
#[path = "collectives/updates.rs"]
mod updates;

const FLOATS: [Dtype; 4] = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16];
const INTEGERS: [Dtype; 5] = [Dtype::I64, Dtype::I32, Dtype::I16, Dtype::I8, Dtype::U8];
const OPS: [Op; 5] = [Op::Average, Op::Sum, Op::Min, Op::Max, Op::Copy];
const RANKS: std::ops::RangeInclusive<u32> = 1..=17;

/// What went over the links.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counted {
    /// Rounds of delivery until nothing more was sent.
    steps: u32,
    sent: Vec<u64>,
    received: Vec<u64>,
}

/// A frame that was sent and not delivered, with its payload as it was.
struct UnderWay {
    from: Rank,
    to: Rank,
    frame: Outgoing<Chunk>,
    bytes: Option<Box<[u8]>>,
}

/// Nodes of one job, memory for the first tensor of their book, and what lies between them.
struct Bench {
    nodes: Vec<Node<RealMemory>>,
    memories: Vec<Chunk>,
    /// In the order of sending.
    under_way: Vec<UnderWay>,
    actions: Vec<Action<Chunk>>,
    /// By rank: for each slice that completed whether anybody contributed.
    complete: Vec<Vec<bool>>,
    /// And the version that it has.
    versions: Vec<Vec<(SliceId, u32)>>,
    /// What nodes said of rounds that do not wait for everybody.
    others: Vec<(u32, Action<Chunk>)>,
    /// Contributions that were late, as far as a test has counted them.
    late: u32,
    counted: Counted,
    /// Bytes from one rank to another.
    moved: BTreeMap<(Rank, Rank), u64>,
}

impl Bench {
    fn new(book: &Arc<Book>, ranks: u32) -> Self {
        let config = |rank| Config {
            rank: Rank(rank),
            members: Members::all(ranks),
            workers: Members::all(ranks),
            lane: 0,
            lanes: 1,
            window_bytes: 1 << 20,
            priority: true,
        };
        let mut bench = Self {
            nodes: (0..ranks).map(|rank| Node::new(config(rank), RealMemory::default())).collect(),
            memories: (0..ranks).map(|_| RealMemory::tensor(book.tensors[0].len_bytes() as usize)).collect(),
            under_way: Vec::new(),
            actions: Vec::new(),
            complete: vec![Vec::new(); ranks as usize],
            versions: vec![Vec::new(); ranks as usize],
            others: Vec::new(),
            late: 0,
            counted: Counted { steps: 0, sent: vec![0; ranks as usize], received: vec![0; ranks as usize] },
            moved: BTreeMap::new(),
        };
        for node in &mut bench.nodes {
            node.open_book(0, book.clone(), &mut bench.actions).unwrap();
        }
        bench
    }

    fn submit(&mut self, rank: u32, seq: u32, op: Op, contribution: Option<&[u8]>) -> Result<(), Error> {
        self.submit_of(seq, rank, seq, op, contribution)
    }

    fn submit_of(
        &mut self,
        step: u32,
        rank: u32,
        seq: u32,
        op: Op,
        contribution: Option<&[u8]>,
    ) -> Result<(), Error> {
        let memory = self.memories[rank as usize].clone();
        memory.write(|bytes| match contribution {
            Some(contribution) => bytes.copy_from_slice(contribution),
            None => bytes.fill(0x5A),
        });
        let absent = contribution.is_none();
        let event = Event::Submit(Submission {
            book: 0,
            tensor: 0,
            seq,
            step,
            memory,
            gives: Gives::unless_absent(op, absent),
        });
        self.step(rank, event)
    }

    fn step(&mut self, rank: u32, event: Event<Chunk>) -> Result<(), Error> {
        let outcome = self.nodes[rank as usize].step(event, &mut self.actions);
        for action in self.actions.drain(..) {
            match action {
                Action::Complete { present, slice, version, .. } => {
                    self.complete[rank as usize].push(present);
                    self.versions[rank as usize].push((slice, version));
                }
                Action::Enough { .. } | Action::Late { .. } => self.others.push((rank, action)),
                _ => {}
            }
        }
        let ranks = self.nodes.len() as u32;
        for to in (0..ranks).map(Rank) {
            while let Some(frame) = self.nodes[rank as usize].next_frame(to) {
                self.counted.sent[rank as usize] += u64::from(frame.header.payload_bytes);
                let bytes = frame.payload.as_ref().and_then(Chunk::to_bytes);
                self.under_way.push(UnderWay { from: Rank(rank), to, frame, bytes });
            }
        }
        outcome
    }

    fn deliver(&mut self, at: usize) -> Result<(), Error> {
        let UnderWay { from, to, frame: Outgoing { header, payload }, bytes } = self.under_way.remove(at);
        self.counted.received[to.index()] += u64::from(header.payload_bytes);
        *self.moved.entry((from, to)).or_default() += u64::from(header.payload_bytes);
        // The sender's memory may change from now on.
        assert_eq!(payload.as_ref().and_then(Chunk::to_bytes), bytes, "changed before it was written");
        drop(payload);
        let placed = match self.nodes[to.index()].destination(from, &header)? {
            Destination::Chunk(chunk) => Some(chunk),
            Destination::None => None,
        };
        if let (Some(chunk), Some(bytes)) = (&placed, bytes) {
            chunk.write(|memory| memory.copy_from_slice(&bytes));
        }
        self.step(to.0, Event::Frame { from, header, payload: placed })
    }

    /// Delivers in rounds until nothing more is sent.
    fn run_in_rounds(&mut self) {
        while !self.under_way.is_empty() {
            self.counted.steps += 1;
            for _ in 0..self.under_way.len() {
                self.deliver(0).unwrap();
            }
        }
    }

    /// Delivers in any order that keeps each link's own.
    fn run_at_random(&mut self, random: &mut Random) {
        while !self.under_way.is_empty() {
            self.deliver_any(random).unwrap();
        }
    }

    /// Delivers the first frame of any link.
    fn deliver_any(&mut self, random: &mut Random) -> Result<(), Error> {
        let any = random.below(self.under_way.len() as u64) as usize;
        let link = |frame: &UnderWay| (frame.from, frame.to);
        let first = self.under_way.iter().position(|frame| link(frame) == link(&self.under_way[any]));
        self.deliver(first.unwrap_or(any))
    }
}

fn book(route: Route, dtype: Dtype, elems: u64, ranks: u32, slice_bytes: usize) -> Arc<Book> {
    let tensor = Tensor::new("w", 0, dtype, elems).with_route(route);
    Arc::new(Book::new("model", vec!["layer".into()], vec![tensor], ranks, slice_bytes, 1).unwrap())
}

/// Any bits for integers; for floats numbers of both signs over a few orders of magnitude, so that order shows.
fn draw(dtype: Dtype, elems: u64, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..elems {
        let bits = random.bits();
        let float = ((bits >> 40) as f64 / f64::from(1 << 23) - 1.0) * f64::from(1 << (bits & 7)) / 16.0;
        match dtype {
            Dtype::F32 => bytes.extend((float as f32).to_le_bytes()),
            Dtype::F64 => bytes.extend(float.to_le_bytes()),
            Dtype::F16 => bytes.extend(half::f16::from_f64(float).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(half::bf16::from_f64(float).to_le_bytes()),
            _ => bytes.extend(&bits.to_le_bytes()[..dtype.size_bytes()]),
        }
    }
    bytes
}

fn lengths(random: &mut Random, ranks: u32) -> u64 {
    match random.below(6) {
        0 => 1,
        1 => u64::from(ranks),
        2 => random.below(u64::from(ranks) + 1),
        3 => random.pick(&[2, 3, 5, 7, 13, 31, 61, 127]),
        _ => random.between(1, 300),
    }
}

/// As [`check_members`], by all of a job.
fn check_results(algorithm: Algorithm, types: (Dtype, Dtype), op: Op, ranks: u32, seed: u64) {
    check_members(algorithm, types, op, &Members::all(ranks), seed);
}

/// Two rounds of one tensor by some ranks of a job, some of them perhaps absent, in a random schedule; all members must have the
/// reference's bits, which are those of a job of that many ranks.
fn check_members(algorithm: Algorithm, (dtype, wire): (Dtype, Dtype), op: Op, members: &Members, seed: u64) {
    let random = &mut Random::new(seed);
    let ranks = members.count();
    let elems = lengths(random, ranks);
    let tensor = Tensor::new("w", 0, dtype, elems).with_route(Route::Sum(algorithm)).with_wire(wire);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::cut("model", vec!["layer".into()], vec![tensor], members, slicing).unwrap());
    let job = members.iter().last().map_or(0, |rank| rank.0 + 1);
    let mut bench = Bench::new(&book, job);
    let index = |rank| members.index_of(rank).unwrap();
    for seq in 1..=2 {
        let nobody = random.chance(50);
        let root = random.below(u64::from(ranks)) as u32;
        let absent_permille = random.pick(&[0, 0, 300]);
        let rows: Vec<Option<Vec<u8>>> = (0..ranks)
            .map(|rank| {
                let absent = if op == Op::Copy { rank != root } else { random.chance(absent_permille) };
                (!absent && !nobody).then(|| draw(dtype, elems, random))
            })
            .collect();
        let mut order: Vec<Rank> = members.iter().collect();
        random.shuffle(&mut order);
        for rank in order {
            bench.submit(rank.0, seq, op, rows[index(rank)].as_deref()).unwrap();
            if random.chance(500) && !bench.under_way.is_empty() {
                bench.deliver(0).unwrap();
            }
        }
        bench.run_at_random(random);
        let name = || {
            format!("{algorithm:?} {op:?} {dtype:?} as {wire:?}, {members:?}, {elems} elements, seed {seed}")
        };
        let present = rows.iter().any(Option::is_some);
        for rank in members.iter().map(Rank::index) {
            assert!(bench.complete[rank].iter().all(|told| *told == present), "{}", name());
            assert_eq!(bench.complete[rank].len(), book.slices.len(), "{}", name());
            bench.complete[rank].clear();
            let got = bench.memories[rank].to_bytes().unwrap();
            for slice in &book.slices {
                let range =
                    slice.offset_bytes as usize..(slice.offset_bytes as usize + slice.len_bytes as usize);
                let parts: Vec<Option<&[u8]>> =
                    rows.iter().map(|row| row.as_deref().map(|row| &row[range.clone()])).collect();
                let owner = Rank(index(slice.owner) as u32);
                let want =
                    order::reduce(Summation { algorithm, dtype, wire, op, active: ranks }, owner, &parts);
                let want = want.unwrap_or_else(|| vec![0x5A; range.len()]);
                assert_eq!(got[range], want[..], "{}, rank {rank}", name());
            }
        }
        assert!(bench.nodes.iter_mut().all(|node| node.memory().held_bytes() == 0), "{}", name());
        assert!(bench.memories.iter().all(|memory| !memory.is_shared()), "{}", name());
    }
}

#[test]
fn every_algorithm_operation_and_type_gives_the_references_bits() {
    // A thread for each algorithm.
    std::thread::scope(|scope| {
        for algorithm in Algorithm::ALL {
            scope.spawn(move || RANKS.for_each(|ranks| check_all_results(algorithm, ranks)));
        }
    });
}

#[test]
fn any_members_of_a_job_get_the_bits_of_a_job_of_that_many() {
    for seed in 0..400 {
        let random = &mut Random::new(seed);
        let most = random.between(1, 12);
        let members: Members = (0..most).map(|_| Rank(random.below(20) as u32)).collect();
        let algorithm = random.pick(&Algorithm::ALL);
        let op = random.pick(&OPS);
        let halves = algorithm == Algorithm::Store && op != Op::Copy && random.chance(300);
        let wire = if halves { Dtype::Bf16 } else { Dtype::F32 };
        check_members(algorithm, (Dtype::F32, wire), op, &members, seed);
    }
}

#[test]
fn who_is_no_member_of_a_book_takes_no_part_in_it() {
    let members: Members = [1, 3].into_iter().map(Rank).collect();
    let tensor = Tensor::new("w", 0, Dtype::F32, 100);
    let slicing = Slicing::fixed(1024, 1);
    let book = Arc::new(Book::cut("model", vec!["layer".into()], vec![tensor], &members, slicing).unwrap());
    let mut bench = Bench::new(&book, 4);
    let error = bench.submit(2, 1, Op::Sum, None).unwrap_err().to_string();
    assert!(error.contains("rank 2 is none of those that the book is for"), "{error}");
    // Rank 1 owns the slice; a push from rank 2 is none of its business.
    let owner = book.slices[0].owner;
    let push = |from| (Rank(from), Header { seq: 1, step: 1, ..Header::control(Kind::PushAbsent) });
    let (from, header) = push(2);
    assert!(bench.nodes[owner.index()].destination(from, &header).is_err());
    let (from, header) = push(4 - owner.0);
    assert!(bench.nodes[owner.index()].destination(from, &header).is_ok());
}

fn check_all_results(algorithm: Algorithm, ranks: u32) {
    for op in OPS {
        let dtypes = FLOATS.iter().chain(INTEGERS.iter().filter(|_| op != Op::Average));
        for (i, dtype) in dtypes.enumerate() {
            for draw in 0..3 {
                let seed = u64::from(ranks) << 32 | (op as u64) << 16 | (i as u64) << 8 | draw;
                check_results(algorithm, (*dtype, *dtype), op, ranks, seed);
            }
        }
    }
}

#[test]
fn what_is_rounded_on_the_wire_has_the_references_bits_on_all_ranks() {
    for wire in [Dtype::Bf16, Dtype::F16] {
        for ranks in RANKS {
            for op in [Op::Average, Op::Sum, Op::Min, Op::Max] {
                for draw in 0..3 {
                    let seed =
                        1 << 40 | u64::from(ranks) << 32 | (op as u64) << 16 | (wire as u64) << 8 | draw;
                    check_results(Algorithm::Store, (Dtype::F32, wire), op, ranks, seed);
                }
            }
        }
    }
}

/// For integers, smallest and largest, the order does not matter: the reference is a fold over the ranks.
#[test]
fn exact_operations_do_not_depend_on_the_algorithm() {
    let random = &mut Random::new(7);
    for ranks in RANKS {
        let elems = 53;
        let rows: Vec<Vec<u8>> = (0..ranks).map(|_| draw(Dtype::I32, elems, random)).collect();
        let number = |row: &[u8], i: usize| i32::from_le_bytes(row[4 * i..4 * i + 4].try_into().unwrap());
        for (op, fold) in [
            (Op::Sum, i32::wrapping_add as fn(i32, i32) -> i32),
            (Op::Min, |a, b| a.min(b)),
            (Op::Max, |a, b| a.max(b)),
        ] {
            let want: Vec<i32> = (0..elems as usize)
                .map(|i| rows.iter().map(|row| number(row, i)).reduce(fold).unwrap())
                .collect();
            for route in Algorithm::ALL.map(Route::Sum) {
                let mut bench = Bench::new(&book(route, Dtype::I32, elems, ranks, 1024), ranks);
                for rank in 0..ranks {
                    bench.submit(rank, 1, op, Some(&rows[rank as usize])).unwrap();
                }
                bench.run_in_rounds();
                for memory in &bench.memories {
                    let got = memory.to_bytes().unwrap();
                    let got: Vec<i32> = (0..elems as usize).map(|i| number(&got, i)).collect();
                    assert_eq!(got, want, "{route:?} {op:?}, {ranks} ranks");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_has_not_submitted_holds_no_more_than_the_windows_of_its_peers() {
    for route in Algorithm::COLLECTIVES.map(Route::Sum) {
        for ranks in 2..=9 {
            let window_bytes = 5000;
            let book = book(route, Dtype::F32, 256 * 64, ranks, 1024);
            let mut bench = Bench::new(&book, ranks);
            for rank in 0..ranks {
                let config = Config {
                    rank: Rank(rank),
                    members: Members::all(ranks),
                    workers: Members::all(ranks),
                    lane: 0,
                    lanes: 1,
                    window_bytes,
                    priority: true,
                };
                bench.nodes[rank as usize] = Node::new(config, RealMemory::default());
                bench.nodes[rank as usize].open_book(0, book.clone(), &mut bench.actions).unwrap();
            }
            let row = vec![1; book.tensors[0].len_bytes() as usize];
            for rank in 1..ranks {
                bench.submit(rank, 1, Op::Sum, Some(&row)).unwrap();
            }
            bench.run_in_rounds();
            let held = bench.nodes[0].memory().held_bytes();
            // A window each, and the slice whose turn it is.
            assert!(held <= u64::from(ranks - 1) * (window_bytes + 1024), "{route:?} {ranks}: {held}");
            assert!(held > 0, "{route:?} {ranks}: nothing is sent ahead");
            bench.submit(0, 1, Op::Sum, Some(&row)).unwrap();
            bench.run_in_rounds();
            assert!(bench.complete.iter().all(|complete| complete.len() == 64), "{route:?} {ranks}");
        }
    }
}

#[test]
fn what_a_collective_cannot_do_is_refused_with_the_reason() {
    let error = |outcome: Result<(), Error>| outcome.unwrap_err().to_string();
    let row = [0; 4 * 8];
    for route in Algorithm::COLLECTIVES.map(Route::Sum) {
        let mut bench = Bench::new(&book(route, Dtype::I32, 8, 3, 1024), 3);
        assert!(error(bench.submit(0, 1, Op::Average, Some(&row))).contains("integers"));
        let mut bench = Bench::new(&book(route, Dtype::Bytes, 32, 3, 1024), 3);
        assert!(error(bench.submit(0, 1, Op::Max, Some(&row))).contains("copied"));
        let mut bench = Bench::new(&book(route, Dtype::F32, 8, 3, 1024), 3);
        assert!(error(bench.step(1, Event::Leave)).contains("join"));
        assert!(
            (0..bench.under_way.len())
                .any(|_| bench.deliver(0).is_err_and(|e| e.to_string().contains("join"))),
            "and on the ranks that hear of it"
        );
        // Two ranks contribute to a copy, two ranks want different things.
        for (ops, word) in [([Op::Copy, Op::Copy], "copy"), ([Op::Sum, Op::Max], "Max")] {
            let mut bench = Bench::new(&book(route, Dtype::F32, 8, 2, 1024), 2);
            for rank in 0..2 {
                bench.submit(rank, 1, ops[rank as usize], Some(&row)).unwrap();
            }
            let refused = std::iter::from_fn(|| (!bench.under_way.is_empty()).then(|| bench.deliver(0)));
            let refused: Vec<Error> = refused.filter_map(Result::err).collect();
            assert!(
                refused.iter().any(|e| matches!(e, Error::Protocol { .. }) && e.to_string().contains(word)),
                "{route:?} {ops:?}: {refused:?}"
            );
        }
    }
}

#[test]
fn who_is_late_is_found_behind_those_who_wait() {
    let row = [0; 4 * 8];
    for route in Algorithm::COLLECTIVES.map(Route::Sum) {
        for late in 0..4 {
            let mut bench = Bench::new(&book(route, Dtype::F32, 8, 4, 1024), 4);
            for rank in (0..4).filter(|rank| *rank != late) {
                bench.submit(rank, 1, Op::Sum, Some(&row)).unwrap();
            }
            bench.run_in_rounds();
            // A rank knows whom it waits for; that one may wait itself, but the way ends at the one that is late.
            let waits_for = |rank: u32| bench.nodes[rank as usize].missing(0, 0).first().map(|rank| rank.0);
            for rank in (0..4).filter(|rank| *rank != late) {
                let way: Vec<u32> =
                    std::iter::successors(waits_for(rank), |at| waits_for(*at)).take(5).collect();
                assert_eq!(way.last(), Some(&late), "{route:?}, {late} is late: {rank} waits for {way:?}");
            }
        }
    }
}

#[test]
fn a_part_twice_or_from_nowhere_is_a_protocol_error() {
    let row = [0; 4 * 8];
    for route in Algorithm::COLLECTIVES.map(Route::Sum) {
        let mut bench = Bench::new(&book(route, Dtype::F32, 8, 4, 1024), 4);
        for rank in 1..4 {
            bench.submit(rank, 1, Op::Sum, Some(&row)).unwrap();
        }
        let at = bench.under_way.iter().position(|frame| frame.to.0 == 0).expect("rank 0 is sent something");
        let UnderWay { from, frame: Outgoing { header, .. }, .. } = bench.under_way[at];
        assert_eq!(header.kind, Kind::Part);
        let node = &mut bench.nodes[0];
        let other = Rank(if from.0 == 1 { 2 } else { 1 });
        for (from, header) in [
            (other, header),
            (from, penstock_core::Header { argument: header.argument + 3, ..header }),
            (from, penstock_core::Header { argument: u32::MAX, ..header }),
            (from, penstock_core::Header { payload_bytes: header.payload_bytes - 4, ..header }),
            (from, penstock_core::Header { kind: Kind::Result, ..header }),
            (from, penstock_core::Header { seq: 0, ..header }),
        ] {
            assert!(
                matches!(node.destination(from, &header), Err(Error::Protocol { .. })),
                "{header:?} from {from}"
            );
        }
        bench.deliver(at).unwrap();
        assert!(
            matches!(bench.nodes[0].destination(from, &header), Err(Error::Protocol { .. })),
            "a second time"
        );
    }
}

//! The node, event by event: what the simulator has found, each as its smallest story, and events drawn at random.

use penstock_core::calls::{Call, CallKind, Request, Share, Signature};
use penstock_core::layout::{Book, Tensor};
use penstock_core::limits::{EARLY_BYTES_MAX, EARLY_COST_BYTES};
use penstock_core::memory::Memory;
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::observe::{Counters, Observation, Observe, Point};
use penstock_core::optimizer::Update;
use penstock_core::reduce::Reduction;
use penstock_core::types::{Dtype, Rank, Seq};
use penstock_core::way::Algorithm;
use penstock_core::wire::{Destination, Header, Kind, Op, Outgoing};
use penstock_core::{Gives, Members, Route, Submission};
use proptest::prelude::*;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

#[path = "node/gathers.rs"]
mod gathers;
#[path = "node/observe.rs"]
mod observe;
#[path = "node/steps.rs"]
mod steps;
#[path = "node/updates.rs"]
mod updates;
#[path = "node/waits.rs"]
mod waits;
#[path = "node/wire_types.rs"]
mod wire_types;

use gathers::{piece_of, pieces};

/// Lengths alone, how many scratch buffers are in use, and how often one was cleared.
#[derive(Default)]
struct Lengths {
    scratch: Rc<Cell<usize>>,
    cleared: Rc<Cell<usize>>,
}

#[derive(Debug)]
struct Buffer {
    scratch: Option<Rc<Cell<usize>>>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(count) = &self.scratch {
            count.set(count.get() - 1);
        }
    }
}

type Chunk = (Rc<Buffer>, usize);

fn user_memory(len_bytes: usize) -> Chunk {
    (Rc::new(Buffer { scratch: None }), len_bytes)
}

impl Memory for Lengths {
    type Chunk = Chunk;

    fn part(&self, chunk: &Chunk, offset_bytes: usize, len_bytes: usize) -> Chunk {
        assert!(offset_bytes + len_bytes <= chunk.1);
        (chunk.0.clone(), len_bytes)
    }

    fn scratch(&mut self, len_bytes: usize) -> Chunk {
        self.scratch.set(self.scratch.get() + 1);
        (Rc::new(Buffer { scratch: Some(self.scratch.clone()) }), len_bytes)
    }

    fn reduce(&mut self, _: Dtype, _: Reduction, inputs: &[Chunk], output: &Chunk) {
        assert!(inputs.iter().all(|input| input.1 == output.1));
    }

    fn reduce_rounded(&mut self, _: Dtype, _: Reduction, inputs: &[Chunk], own: Option<usize>, all: &Chunk) {
        let fits = |(i, input): (usize, &Chunk)| input.1 == if own == Some(i) { all.1 } else { all.1 / 2 };
        assert!(inputs.iter().enumerate().all(fits));
    }

    fn round(&mut self, _: Dtype, input: &Chunk, output: &Chunk) {
        assert_eq!(input.1, 2 * output.1);
    }

    fn expand(&mut self, _: Dtype, input: &Chunk, output: &Chunk) {
        assert_eq!(2 * input.1, output.1);
    }

    fn is_shared(&self, chunk: &Chunk) -> bool {
        Rc::strong_count(&chunk.0) > 1
    }

    fn update(
        &mut self,
        _: Dtype,
        _: &Update,
        _: u64,
        value: &Chunk,
        gradient: &Chunk,
        states: &[Chunk],
        output: &Chunk,
    ) {
        assert!(states.iter().chain([gradient, output]).all(|other| other.1 == value.1));
    }

    fn clear(&mut self, _: &Chunk) {
        self.cleared.set(self.cleared.get() + 1);
    }

    fn fill(&mut self, _: Dtype, _: f64, _: &Chunk) {}

    fn squares(&mut self, _: Dtype, input: &Chunk) -> f64 {
        input.1 as f64
    }
}

/// The tensor, and the slice, that is gathered.
const GATHERED: u32 = 8;
/// Its longest contribution.
const GATHER_BYTES: u32 = 10_000;

/// `tensors` tensors of one slice of 4 KiB each; slice i belongs to rank i modulo the ranks. One more is gathered.
fn book(tensors: u32, ranks: u32) -> Arc<Book> {
    book_of(tensors, ranks, &[(Route::STORE, Dtype::F32)])
}

/// The same with these schemes in turn; the store's slices travel as the type beside it. Collective slices have their first ranks
/// in turn, but those of a central server.
fn book_of(tensors: u32, ranks: u32, schemes: &[(Route, Dtype)]) -> Arc<Book> {
    let reduced = (0..tensors).map(|i| {
        let (scheme, wire) = schemes[i as usize % schemes.len()];
        let wire = if scheme == Route::STORE { wire } else { Dtype::F32 };
        Tensor::new(format!("t{i}"), i, Dtype::F32, 1024).with_route(scheme).with_wire(wire)
    });
    let gathered = Tensor::new("rows", 0, Dtype::Bytes, GATHER_BYTES.into()).with_route(Route::Gather);
    let tensors = reduced.chain([gathered]).collect();
    let layers = (0..64).map(|i| format!("layer{i}")).collect();
    Arc::new(Book::new("model", layers, tensors, ranks, 4096, 1).unwrap())
}

/// What was observed, in order: where, of which kind, to or from whom.
#[derive(Default)]
struct Watcher {
    counters: Counters,
    seen: Vec<Seen>,
}

type Seen = (Point, Kind, Option<u32>);

impl Observe for Watcher {
    fn observe(&mut self, seen: Observation<'_>) {
        self.counters.observe(seen);
        self.seen.push((seen.point, seen.header.kind, seen.peer.map(|rank| rank.0)));
    }
}

struct Bench {
    node: Node<Lengths, Watcher>,
    ranks: u32,
    actions: Vec<Action<Chunk>>,
}

impl Bench {
    fn new(rank: u32, ranks: u32, window_bytes: u64) -> Self {
        let config = Config {
            rank: Rank(rank),
            members: Members::all(ranks),
            workers: Members::all(ranks),
            lane: 0,
            lanes: 1,
            window_bytes,
            priority: true,
        };
        let node = Node::watched(config, Lengths::default(), Watcher::default());
        Self { node, ranks, actions: Vec::new() }
    }

    fn with_book(rank: u32, ranks: u32, window_bytes: u64) -> Self {
        let mut bench = Self::new(rank, ranks, window_bytes);
        bench.open();
        bench
    }

    fn open(&mut self) {
        self.node.open_book(0, book(8, self.ranks), &mut self.actions).unwrap();
    }

    fn submit(&mut self, tensor: u32, seq: Seq, op: Op, absent: bool) {
        let memory = user_memory(4096);
        let event = Event::Submit(Submission {
            book: 0,
            tensor,
            seq,
            step: seq,
            memory,
            gives: Gives::unless_absent(op, absent),
        });
        self.node.step(event, &mut self.actions).unwrap();
    }

    fn gather(&mut self, seq: Seq, len_bytes: u32) -> Result<(), penstock_core::Error> {
        let memory = user_memory(len_bytes as usize);
        let event = Event::Submit(Submission {
            book: 0,
            tensor: GATHERED,
            seq,
            step: seq,
            memory,
            gives: Gives::Gathered(len_bytes),
        });
        self.node.step(event, &mut self.actions)
    }

    /// The whole contribution of another rank to a gather.
    fn contribution(&mut self, from: u32, seq: Seq, len_bytes: u32) {
        for header in pieces(seq, len_bytes) {
            self.frame(from, header).unwrap();
        }
    }

    /// By rank the bytes of the last gather that was complete.
    fn gathered(&mut self) -> Vec<Option<usize>> {
        let at = self.actions.iter().rposition(|action| matches!(action, Action::Gathered { .. }));
        let Action::Gathered { parts, .. } = self.actions.remove(at.unwrap()) else { unreachable!() };
        parts.into_iter().map(|part| part.map(|part| part.iter().map(|chunk| chunk.1).sum())).collect()
    }

    /// A frame arrives: first its header, then its payload.
    fn frame(&mut self, from: u32, header: Header) -> Result<(), penstock_core::Error> {
        let payload = match self.node.destination(Rank(from), &header)? {
            Destination::None => None,
            Destination::Chunk(chunk) => Some(chunk),
        };
        self.node.step(Event::Frame { from: Rank(from), header, payload }, &mut self.actions)
    }

    /// All that may be sent to a peer now, and is.
    fn frames(&mut self, peer: u32) -> Vec<Outgoing<Chunk>> {
        std::iter::from_fn(|| {
            let frame = self.node.next_frame(Rank(peer))?;
            self.node.first_byte_out(Rank(peer), &frame.header);
            Some(frame)
        })
        .collect()
    }

    fn completed(&self) -> usize {
        self.actions.iter().filter(|action| matches!(action, Action::Complete { .. })).count()
    }
}

fn exchange(kind: Kind, slice: u32, seq: Seq, op: Op) -> Header {
    let payload_bytes = if matches!(kind, Kind::Push | Kind::Answer) { 4096 } else { 0 };
    Header { op, slice, seq, step: seq, payload_bytes, ..Header::control(kind) }
}

#[test]
fn frames_of_a_book_that_is_opened_later_are_counted_once() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Average)).unwrap();
    bench.frame(1, exchange(Kind::PushAbsent, 2, 1, Op::Average)).unwrap();
    bench.contribution(1, 1, 5000);
    bench.open();
    assert_eq!(bench.node.observer().counters.frames_received, 4);
    assert_eq!(bench.node.observer().counters.traffic[0][0].received_bytes, 4096 + 5000);
    bench.gather(1, 0).unwrap();
    assert_eq!(bench.gathered(), [None, Some(5000)]);
    bench.actions.clear();
    bench.submit(0, 1, Op::Average, false);
    bench.submit(2, 1, Op::Average, true);
    assert_eq!(bench.completed(), 2);
}

#[test]
fn frames_of_a_book_that_is_never_opened_are_bounded_whether_they_have_payloads_or_not() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let room = 3 * EARLY_COST_BYTES;
    let parts = 8;
    for part in 1..=parts {
        let least = if part == parts { room + parts * EARLY_COST_BYTES } else { 0 };
        let payload_bytes = (EARLY_BYTES_MAX / parts - least) as u32;
        let header = Header { payload_bytes, ..exchange(Kind::Push, 0, 1, Op::Average) };
        bench.frame(1, header).unwrap();
    }
    for slice in 0..3 {
        bench.frame(1, exchange(Kind::PushAbsent, slice, 1, Op::Average)).unwrap();
    }
    assert!(bench.frame(1, exchange(Kind::PushAbsent, 3, 1, Op::Average)).is_err());
}

#[test]
fn a_book_opened_between_a_header_and_its_payload_does_not_spare_the_frame_its_check() {
    let mut bench = Bench::new(0, 2, 1 << 20);
    let header = exchange(Kind::Push, 999, 1, Op::Average);
    let Ok(Destination::Chunk(chunk)) = bench.node.destination(Rank(1), &header) else {
        panic!("kept for later")
    };
    bench.open();
    let event = Event::Frame { from: Rank(1), header, payload: Some(chunk) };
    assert!(bench.node.step(event, &mut bench.actions).is_err(), "there is no slice 999");
}

#[test]
fn a_rank_that_knows_first_that_all_have_left_does_not_end_a_round_alone() {
    let mut bench = Bench::with_book(1, 3, 1 << 20);
    bench.node.step(Event::Leave, &mut bench.actions).unwrap();
    bench.frame(0, Header::control(Kind::Leave)).unwrap();
    // Rank 2 has left too; rank 0 knows it and goes on, this rank does not know it yet.
    bench.frame(0, exchange(Kind::Push, 1, 1, Op::Average)).unwrap();
    bench.frame(2, Header::control(Kind::Leave)).unwrap();
    assert!(bench.actions.iter().any(|action| matches!(action, Action::AllLeft)));
    bench.frame(2, exchange(Kind::Push, 1, 1, Op::Average)).unwrap();
    assert!(bench.frames(0).iter().all(|frame| frame.header.kind == Kind::Leave), "no answer yet");
    bench.submit(1, 1, Op::Average, false);
    assert_eq!(bench.completed(), 1);
    assert_eq!(bench.frames(0)[0].header.kind, Kind::Answer);
}

#[test]
fn a_backward_pass_ahead_of_the_others_stays_within_its_window() {
    let mut bench = Bench::with_book(0, 2, 4096);
    let mut pushed = Vec::new();
    for tensor in [7, 5, 3, 1] {
        bench.submit(tensor, 1, Op::Average, false);
        pushed.extend(bench.frames(1));
    }
    // The window, and the second one for what overtakes: the next slice of the pass is no exception.
    assert_eq!(pushed.iter().map(|frame| frame.header.slice).collect::<Vec<_>>(), [7, 5]);
    let mut answered = 0;
    while answered < pushed.len() {
        bench.frame(1, exchange(Kind::Answer, pushed[answered].header.slice, 1, Op::Average)).unwrap();
        answered += 1;
        pushed.extend(bench.frames(1));
        assert!(pushed.len() - answered <= 3);
    }
    assert_eq!(bench.completed(), 4);
}

#[test]
fn ranks_that_fill_their_windows_with_different_slices_do_not_wait_for_one_another_for_ever() {
    let mut benches: Vec<Bench> = (0..3).map(|rank| Bench::with_book(rank, 3, 1)).collect();
    for round in 1..=2 {
        for (rank, bench) in benches.iter_mut().enumerate() {
            for i in 0..8 {
                bench.submit([i, 7 - i, (i + 4) % 8][rank], round, Op::Average, false);
            }
        }
        let mut moved = true;
        while std::mem::take(&mut moved) {
            for (from, to) in [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)] {
                while let Some(Outgoing { header, .. }) = benches[from].node.next_frame(Rank(to as u32)) {
                    benches[to].frame(from as u32, header).unwrap();
                    moved = true;
                }
            }
        }
        assert!(benches.iter().all(|bench| bench.completed() == 8 * round as usize));
    }
}

#[test]
fn an_older_round_goes_before_a_newer_one_when_the_window_is_full() {
    // Tensor 1 of round 1 waits behind round 2 of tensor 7. Others may wait for it before they submit round 2.
    let mut bench = Bench::with_book(0, 2, 4096);
    for tensor in [7, 5, 3, 1] {
        bench.submit(tensor, 1, Op::Average, false);
    }
    // With room for one of 4 KiB, the best place goes first: 1; its turn has 7.
    assert_eq!(bench.node.next_frame(Rank(1)).map(|frame| frame.header.slice), Some(1));
    assert_eq!(bench.node.next_frame(Rank(1)).map(|frame| frame.header.slice), Some(7));
    assert!(!bench.node.has_frame(Rank(1)));
    bench.frame(1, exchange(Kind::Answer, 7, 1, Op::Average)).unwrap();
    bench.submit(7, 2, Op::Average, false);
    let next = bench.node.next_frame(Rank(1)).map(|frame| (frame.header.slice, frame.header.seq));
    assert_eq!(next, Some((5, 1)), "round 1 before round 2");
}

#[test]
fn what_a_peer_stands_still_for_goes_before_the_next_step() {
    // Rank 0 owns tensors 0, 2, 4 and 6, its peer the others. It has all results, and answers of round 1 wait for the peer.
    let mut bench = Bench::with_book(0, 2, 1 << 20);
    for tensor in [6, 5, 4] {
        bench.submit(tensor, 1, Op::Average, false);
    }
    assert_eq!(bench.frames(1).len(), 1, "the push of 5");
    for header in [exchange(Kind::Push, 6, 1, Op::Average), exchange(Kind::Push, 4, 1, Op::Average)] {
        bench.frame(1, header).unwrap();
    }
    bench.frame(1, exchange(Kind::Answer, 5, 1, Op::Average)).unwrap();
    assert_eq!(bench.completed(), 3);
    // The next step begins, its absences and pushes are more urgent by their place.
    bench.submit(3, 2, Op::Average, false);
    bench.submit(1, 2, Op::Average, true);
    let sent =
        bench.frames(1).into_iter().map(|frame| (frame.header.kind, frame.header.slice, frame.header.seq));
    let (answers, next) =
        ([(Kind::Answer, 4, 1), (Kind::Answer, 6, 1)], [(Kind::PushAbsent, 1, 2), (Kind::Push, 3, 2)]);
    assert_eq!(sent.collect::<Vec<_>>(), [answers, next].concat());
}

#[test]
fn slices_that_are_forwarded_one_after_the_other_are_no_exceptions_to_the_window() {
    // In the trees with root 0 (slices 0, 4, 8, 12) rank 2 has the child 3. All is submitted; what the child sends comes in
    // the order of slices, and each sum would be the last slice so far. But the turn has been slice 12's from the start.
    let mut bench = Bench::new(2, 4, 4096);
    bench
        .node
        .open_book(0, book_of(16, 4, &[(Route::Sum(Algorithm::Tree), Dtype::F32)]), &mut bench.actions)
        .unwrap();
    for tensor in (0..16).rev() {
        bench.submit(tensor, 1, Op::Average, false);
    }
    let mut sent = Vec::new();
    for slice in [0, 4, 8, 12] {
        let header = Header { payload_bytes: 4096, ..exchange(Kind::Part, slice, 1, Op::Average) };
        bench.frame(3, header).unwrap();
        sent.extend(bench.frames(0).iter().map(|frame| frame.header.slice));
    }
    assert_eq!(sent, [0, 12], "a window's worth, and the one whose turn it is");
}

#[test]
fn a_result_is_read_straight_into_the_ranks_memory() {
    let mut bench = Bench::new(1, 2, 1 << 20);
    bench
        .node
        .open_book(0, book_of(8, 2, &[(Route::Sum(Algorithm::Ring), Dtype::F32)]), &mut bench.actions)
        .unwrap();
    bench.submit(0, 1, Op::Average, false);
    // Two ranks: the partial sum of half a slice comes in step 0, the other half of the result in step 1.
    let part = |kind, argument| Header { argument, payload_bytes: 2048, ..exchange(kind, 0, 1, Op::Average) };
    let Ok(Destination::Chunk(_)) = bench.node.destination(Rank(0), &part(Kind::Result, 1)) else {
        panic!("expected")
    };
    assert_eq!(bench.node.memory().scratch.get(), 0);
    bench.frame(0, part(Kind::Part, 0)).unwrap();
    assert_eq!(bench.node.memory().scratch.get(), 0, "added and given back at once");
    bench.frame(0, part(Kind::Result, 1)).unwrap();
    assert_eq!(bench.completed(), 1);
}

#[test]
fn a_copy_is_answered_from_the_owners_own_memory() {
    let mut bench = Bench::with_book(0, 3, 1 << 20);
    bench.submit(0, 1, Op::Copy, true);
    bench.frame(2, exchange(Kind::PushAbsent, 0, 1, Op::Copy)).unwrap();
    bench.frame(1, exchange(Kind::Push, 0, 1, Op::Copy)).unwrap();
    assert_eq!(bench.completed(), 1);
    // Rank 1 may push again when it has its answer, so its buffer must not wait for the answer to rank 2.
    assert_eq!(bench.node.memory().scratch.get(), 0);
    assert_eq!(bench.frames(1)[0].header.kind, Kind::AnswerSame);
    assert_eq!(bench.frames(2)[0].header.kind, Kind::Answer);
}

#[derive(Debug, Clone)]
enum Draw {
    Open,
    Submit { tensor: u32, seq: Seq, op: Op, absent: bool },
    Gather { seq: Seq, len_bytes: u32 },
    Frame { from: u32, header: Header },
    Leave,
    Call { request: Request, elems: u64 },
    Send(u32),
}

/// Frames of calls; most are what an orderly peer might send, about calls that this rank has or has not made.
fn call_frame() -> impl Strategy<Value = Draw> {
    let kinds = vec![Kind::Message, Kind::Message, Kind::Offer, Kind::Ready, Kind::MessagePart, Kind::Credit];
    let lens = vec![0u32, 64, 68, 1 << 16, 1 << 17, u32::MAX];
    let signature =
        prop_oneof![Just(Signature::new(CallKind::Message, Op::Copy, Dtype::F32, 64, 1).0), any::<u32>()];
    (1u32..3, prop::sample::select(kinds), 0u16..2, 0u32..3, 0u32..3, signature, prop::sample::select(lens))
        .prop_map(|(from, kind, book, slice, step, seq, len)| {
            let carries = matches!(kind, Kind::Message | Kind::MessagePart);
            let (argument, payload_bytes) = if carries { (0, len.min(1 << 16)) } else { (len, 0) };
            let header = Header { book, slice, step, seq, argument, payload_bytes, ..Header::control(kind) };
            Draw::Frame { from, header }
        })
}

fn call() -> impl Strategy<Value = Draw> {
    let root = 0u32..4;
    let requests = prop_oneof![
        (root.clone(), 0u32..3).prop_map(|(to, tag)| Request::Send { to, tag }),
        (root.clone(), 0u32..3).prop_map(|(from, tag)| Request::Receive { from, tag }),
        (0u32..3).prop_map(|tag| Request::ReceiveAny { tag }),
        root.clone().prop_map(|root| Request::Collective(CallKind::Broadcast { root })),
        root.prop_map(|root| Request::Collective(CallKind::Gather { root })),
        prop::sample::select(vec![
            CallKind::Barrier,
            CallKind::Allreduce { algorithm: Algorithm::Store },
            CallKind::Allreduce { algorithm: Algorithm::Tree },
            CallKind::Allreduce { algorithm: Algorithm::Butterfly },
            CallKind::AllGather,
            CallKind::ReduceScatter,
            CallKind::AllToAll
        ])
        .prop_map(Request::Collective),
    ];
    (requests, prop::sample::select(vec![0u64, 16, 17, 1 << 14, 1 << 15]))
        .prop_map(|(request, elems)| Draw::Call { request, elems })
}

/// As many blocks as rank 0 of 3 has for a call.
fn make_call(request: Request, elems: u64) -> Call<Chunk> {
    let blocks = |count| (0..count).map(|_| (user_memory(elems as usize * 4), elems * 4)).collect();
    let (inputs, outputs) = match request {
        Request::Send { .. } => (1, 0),
        Request::Receive { .. }
        | Request::ReceiveAny { .. }
        | Request::Collective(CallKind::Broadcast { .. }) => (0, 1),
        Request::Collective(CallKind::Gather { root: 0 } | CallKind::AllGather) => (1, 3),
        Request::Collective(CallKind::Gather { .. }) => (1, 0),
        Request::Collective(CallKind::ReduceScatter) => (3, 1),
        Request::Collective(CallKind::AllToAll) => (3, 3),
        Request::Collective(CallKind::Barrier) => (0, 0),
        Request::Collective(_) => (1, 1),
    };
    let (op, dtype, share) = (Op::Sum, Dtype::F32, Share::ALL);
    Call { id: 0, group: 0, request, op, dtype, share, inputs: blocks(inputs), outputs: blocks(outputs) }
}

fn draw() -> impl Strategy<Value = Draw> {
    let op = || prop::sample::select(vec![Op::Average, Op::Average, Op::Sum, Op::Copy, Op::Min, Op::Max]);
    let kinds = [
        Kind::Push,
        Kind::Push,
        Kind::PushAbsent,
        Kind::Answer,
        Kind::AnswerAbsent,
        Kind::AnswerSame,
        Kind::Leave,
        Kind::Blob,
        Kind::Heartbeat,
        Kind::Abort,
        Kind::Goodbye,
        Kind::Part,
        Kind::Part,
        Kind::Part,
        Kind::Result,
        Kind::Result,
    ];
    // Of three ranks: the whole slice, parts of a ring, halves of a butterfly, and none.
    let lengths = prop::sample::select(vec![4096u32, 1368, 1364, 2048, 0]);
    let kinds = prop::sample::select(kinds.to_vec());
    let frame = (1u32..3, kinds, op(), 0u16..2, 0u32..12, 0u32..3, any::<u8>(), 0u32..6, lengths);
    let frame = frame.prop_map(|(from, kind, op, book, slice, seq, wild, step, len)| {
        let mut header = Header { book, ..exchange(kind, slice, seq, op) };
        if matches!(kind, Kind::Part | Kind::Result) {
            (header.argument, header.payload_bytes) = (step, len);
        }
        if matches!(kind, Kind::Push | Kind::Answer) && step < 3 {
            (header.argument, header.payload_bytes) = (step, if step == 0 { 4096 } else { 2048 });
        }
        // Now and then a length or a step that does not fit.
        header.payload_bytes += u32::from(wild < 8);
        header.argument |= if wild == 255 { u32::MAX } else { 0 };
        Draw::Frame { from, header }
    });
    let piece =
        (1u32..3, 1u32..4, prop::sample::select(vec![0, 1, 4096, 5000, GATHER_BYTES, u32::MAX]), 0u16..2);
    let piece = (piece, prop::sample::select(vec![0, 1, 904, 1808, 4096, 4096])).prop_map(
        |((from, seq, total_bytes, book), payload_bytes)| Draw::Frame {
            from,
            header: Header { book, ..piece_of(seq, total_bytes, payload_bytes) },
        },
    );
    let submit = (0u32..8, 1u32..3, op(), any::<bool>());
    prop_oneof![
        1 => Just(Draw::Open),
        6 => submit.prop_map(|(tensor, seq, op, absent)| Draw::Submit { tensor, seq, op, absent }),
        3 => (1u32..4, 0..GATHER_BYTES + 2).prop_map(|(seq, len_bytes)| Draw::Gather { seq, len_bytes }),
        12 => frame,
        8 => piece,
        1 => Just(Draw::Leave),
        4 => call(),
        6 => call_frame(),
        4 => (1u32..3).prop_map(Draw::Send),
    ]
}

proptest! {
    // More on request: `make fuzz` sets PROPTEST_CASES, which is where the default comes from.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(2000)))]

    /// Whatever peers send and whatever the caller does: an error or not, never a panic, and all scratch comes back.
    #[test]
    fn any_events_are_taken_or_refused(
        draws in prop::collection::vec(draw(), 1..60),
        schemes in prop::collection::vec(
            (
                prop::sample::select(Algorithm::ALL.map(Route::Sum).to_vec()),
                prop::sample::select(vec![Dtype::F32, Dtype::F32, Dtype::Bf16, Dtype::F16]),
            ),
            1..9,
        ),
    ) {
        let mut bench = Bench::new(0, 3, 5000);
        let (mut opened, scratch) = (false, bench.node.memory().scratch.clone());
        let mut calls = 0;
        bench.node.step(Event::Group(0, (0..3).map(Rank).collect()), &mut bench.actions).unwrap();
        for draw in draws {
            let result = match draw {
                Draw::Open if std::mem::replace(&mut opened, true) => Ok(()),
                Draw::Open => bench.node.open_book(0, book_of(8, 3, &schemes), &mut bench.actions),
                Draw::Submit { tensor, seq, op, absent } => {
                    let memory = user_memory(4096);
                    let event = Event::Submit(Submission { book: 0, tensor, seq, step: seq, memory, gives: Gives::unless_absent(op, absent) });
                    bench.node.step(event, &mut bench.actions)
                }
                Draw::Gather { seq, len_bytes } => bench.gather(seq, len_bytes),
                Draw::Frame { from, header } => bench.frame(from, header),
                Draw::Call { request, elems } => {
                    calls += 1;
                    let call = Call { id: calls, ..make_call(request, elems) };
                    bench.node.step(Event::Call(Box::new(call)), &mut bench.actions)
                }
                Draw::Leave => bench.node.step(Event::Leave, &mut bench.actions),
                Draw::Send(peer) => {
                    let could = bench.node.has_frame(Rank(peer));
                    prop_assert_eq!(could, bench.node.next_frame(Rank(peer)).is_some());
                    Ok(())
                }
            };
            // A node that has reported an error is not used again.
            if result.is_err() {
                break;
            }
        }
        drop(bench);
        prop_assert_eq!(scratch.get(), 0);
    }
}

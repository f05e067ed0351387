//! What deciding costs, per slice and rank: nodes that exchange slices over memory that moves nothing, without sockets.
//!
//! ```text
//! cargo run --release -p penstock-core --example bookkeeping [RANKS [ROUNDS]]
//! ```
//! One line for each algorithm, of a book's slices and of a call's pieces: nanoseconds in the fastest round and in the median.
#![allow(clippy::print_stdout, clippy::disallowed_types, clippy::disallowed_methods)]

mod lengths;

use lengths::Lengths;
use penstock_core::calls::{Call, CallKind, Request, Share, slices};
use penstock_core::layout::{Book, Tensor};
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::types::{Dtype, Rank};
use penstock_core::way::Algorithm;
use penstock_core::wire::{Destination, Op};
use penstock_core::{Gives, Members, Route, Submission};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLICES: u32 = 256;
const SLICE_BYTES: usize = 64 << 10;

struct Job {
    nodes: Vec<Node<Lengths>>,
    actions: Vec<Action<usize>>,
    complete: usize,
}

impl Job {
    fn new(ranks: u32) -> Self {
        let config = |rank| Config {
            rank: Rank(rank),
            members: Members::all(ranks),
            workers: Members::all(ranks),
            lane: 0,
            lanes: 1,
            window_bytes: 8 << 20,
            priority: true,
        };
        let nodes = (0..ranks).map(|rank| Node::new(config(rank), Lengths)).collect();
        Self { nodes, actions: Vec::new(), complete: 0 }
    }

    fn step(&mut self, rank: usize, event: Event<usize>) {
        self.nodes[rank].step(event, &mut self.actions).expect("events fit");
        let done =
            |action: &Action<usize>| matches!(action, Action::Complete { .. } | Action::CallComplete(_));
        self.complete += self.actions.drain(..).filter(done).count();
    }

    /// Carries frames, some of each link in turn, until so many slices or calls are complete.
    fn until(&mut self, complete: usize) {
        let ranks = self.nodes.len();
        while self.complete < complete {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                for _ in 0..8 {
                    let Some(frame) = self.nodes[from].next_frame(Rank(to as u32)) else { break };
                    let (from, header) = (Rank(from as u32), frame.header);
                    let payload = match self.nodes[to].destination(from, &header).expect("frames fit") {
                        Destination::None => None,
                        Destination::Chunk(chunk) => Some(chunk),
                    };
                    self.step(to, Event::Frame { from, header, payload });
                }
            }
        }
        self.complete = 0;
    }
}

fn measure(rounds: u32, ranks: u32, pieces: u32, mut round: impl FnMut(u32)) -> String {
    round(0);
    let mut times: Vec<Duration> = (1..=rounds)
        .map(|number| {
            let began = Instant::now();
            round(number);
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    let ns = |time: Duration| time.as_nanos() as f64 / f64::from(pieces * ranks);
    format!("{:6.0} ns, median {:6.0}", ns(times[0]), ns(times[times.len() / 2]))
}

fn of_slices(algorithm: Algorithm, ranks: u32, rounds: u32) -> String {
    let elems = u64::from(SLICES) * SLICE_BYTES as u64 / 4;
    let tensor = Tensor::new("tensor", 0, Dtype::F32, elems).with_route(Route::Sum(algorithm));
    let book = Book::new("book", vec!["layer".into()], vec![tensor], ranks, SLICE_BYTES, 1).expect("a book");
    let (book, slices) = (Arc::new(book), SLICES.next_multiple_of(ranks).max(SLICES));
    let slices = slices.min(book.slices.len() as u32);
    let mut job = Job::new(ranks);
    for node in &mut job.nodes {
        node.open_book(0, Arc::clone(&book), &mut Vec::new()).expect("opens");
    }
    measure(rounds, ranks, slices, |number| {
        for rank in 0..ranks as usize {
            let part = Submission {
                book: 0,
                tensor: 0,
                seq: number + 1,
                step: number,
                memory: elems as usize * 4,
                gives: Gives::Whole(Op::Average),
            };
            job.step(rank, Event::Submit(part));
        }
        job.until((slices * ranks) as usize);
    })
}

fn of_calls(algorithm: Algorithm, ranks: u32, rounds: u32) -> String {
    let elems = u64::from(SLICES) * SLICE_BYTES as u64 / 4;
    let (pieces, len) = (slices(algorithm, elems, 4, ranks), elems as usize * 4);
    let mut job = Job::new(ranks);
    for node in &mut job.nodes {
        node.step(Event::Group(0, (0..ranks).map(Rank).collect()), &mut Vec::new()).expect("a group");
    }
    let line = measure(rounds, ranks, pieces, |number| {
        for rank in 0..ranks as usize {
            let call = Call {
                id: u64::from(number),
                group: 0,
                request: Request::Collective(CallKind::Allreduce { algorithm }),
                op: Op::Average,
                dtype: Dtype::F32,
                share: Share::ALL,
                inputs: vec![(len, len as u64)],
                outputs: vec![(len, len as u64)],
            };
            job.step(rank, Event::Call(Box::new(call)));
        }
        job.until(ranks as usize);
    });
    format!("{line} ({pieces} pieces)")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |at: usize| arguments.get(at).map(|text| text.parse::<u32>()).transpose();
    let rounds = given(1)?.unwrap_or(150);
    let several = given(0)?.map_or(vec![2, 4, 6], |ranks| vec![ranks]);
    for ranks in several {
        for algorithm in Algorithm::ALL {
            let name = algorithm.name();
            println!("{ranks} ranks, {name:9} slice {}", of_slices(algorithm, ranks, rounds));
            println!("{ranks} ranks, {name:9} call  {}", of_calls(algorithm, ranks, rounds));
        }
    }
    Ok(())
}

//! What a slice costs a node, without sockets and without sums: two ranks in one process, over memory that moves nothing. Nobody
//! watches, or all is counted, in turn.
//!
//! ```text
//! cargo run --release -p penstock-core --example per_slice -- [ROUNDS [nobody|counters]]
//! ```
#![allow(clippy::print_stdout, clippy::disallowed_types, clippy::disallowed_methods)]

mod lengths;

use lengths::Lengths;
use penstock_core::layout::{Book, Tensor};
use penstock_core::node::{Action, Config, Event, Node};
use penstock_core::observe::{Counters, Observe};
use penstock_core::types::{Dtype, Rank, Seq};
use penstock_core::wire::{Destination, Op, Outgoing};
use penstock_core::{Gives, Members, Submission};
use std::sync::Arc;
use std::time::Instant;

const RANKS: u32 = 2;
const SLICES: u32 = 256;

struct Job<O: Observe> {
    nodes: Vec<Node<Lengths, O>>,
    actions: Vec<Action<usize>>,
    seq: Seq,
    fastest_s: f64,
}

impl<O: Observe + Default> Job<O> {
    fn new(book: &Arc<Book>) -> Self {
        let mut actions = Vec::new();
        let node = |rank| {
            let (rank, window_bytes) = (Rank(rank), 8 << 20);
            let config = Config {
                rank,
                members: Members::all(RANKS),
                workers: Members::all(RANKS),
                lane: 0,
                lanes: 1,
                window_bytes,
                priority: true,
            };
            let mut node = Node::watched(config, Lengths, O::default());
            node.open_book(0, book.clone(), &mut actions).expect("it opens");
            node
        };
        Self { nodes: (0..RANKS).map(node).collect(), actions: Vec::new(), seq: 0, fastest_s: f64::INFINITY }
    }

    /// Every slice once around.
    fn round(&mut self) {
        let begin = Instant::now();
        let Self { nodes, actions, seq, .. } = self;
        *seq += 1;
        for node in nodes.iter_mut() {
            for tensor in 0..SLICES {
                let (seq, step, gives) = (*seq, *seq, Gives::Whole(Op::Average));
                let submission = Submission { book: 0, tensor, seq, step, memory: 4096, gives };
                node.step(Event::Submit(submission), actions).expect("it fits");
            }
        }
        for turn in 0..4 * RANKS {
            let (from, to) = (Rank(turn % RANKS), Rank((turn + 1) % RANKS));
            while let Some(Outgoing { header, .. }) = nodes[from.index()].next_frame(to) {
                nodes[from.index()].first_byte_out(to, &header);
                let node = &mut nodes[to.index()];
                let payload = match node.destination(from, &header).expect("it fits") {
                    Destination::None => None,
                    Destination::Chunk(chunk) => Some(chunk),
                };
                node.step(Event::Frame { from, header, payload }, actions).expect("it fits");
            }
        }
        let complete = actions.drain(..).filter(|action| matches!(action, Action::Complete { .. })).count();
        assert_eq!(complete, (RANKS * SLICES) as usize);
        self.fastest_s = self.fastest_s.min(begin.elapsed().as_secs_f64());
    }

    fn ns_per_slice(&self) -> f64 {
        self.fastest_s * 1e9 / f64::from(RANKS * SLICES)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds: Seq = arguments.first().map_or(2000, |rounds| rounds.parse().expect("ROUNDS is a number"));
    let wanted = |who: &str| arguments.get(1).is_none_or(|only| only == who);
    let tensors = (0..SLICES).map(|i| Tensor::new(format!("t{i}"), i / 4, Dtype::F32, 1024)).collect();
    let layers = (0..SLICES / 4).map(|i| format!("layer{i}")).collect();
    let book = Arc::new(Book::new("model", layers, tensors, RANKS, 4096, 1).expect("it is a book"));
    let (mut nobody, mut counters) = (Job::<()>::new(&book), Job::<Counters>::new(&book));
    for _ in 0..rounds {
        wanted("nobody").then(|| nobody.round());
        wanted("counters").then(|| counters.round());
    }
    println!("nobody watches: {:.1} ns per slice and rank", nobody.ns_per_slice());
    println!("all is counted: {:.1} ns per slice and rank", counters.ns_per_slice());
}

//! Scenarios drawn from a seed: everything that users, models and networks may do to the nodes, kept small.

use crate::program::{Demands, Fault, Instruction, Links, Mishap, PEER_TIMEOUT_NS, Setup, Submission};
use crate::random::Random;
use penstock_core::layout::{Book, Tensor};
use penstock_core::optimizer::{Optimizer, Rule, Update};
use penstock_core::roles::{ClientGroup, Fold, Groups, MustBeIn, Rules};
use penstock_core::types::{BookId, Dtype, Rank, TensorId};
use penstock_core::way::Algorithm;
use penstock_core::wire::Op;
use penstock_core::{Members, Roles, Route, Slicing};
use std::sync::Arc;

/// In which order the ranks submit the tensors of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Last registered first, as backward does for a chain.
    Reverse,
    /// Any order, the same on all ranks.
    Shuffled,
    /// Any order, another on each rank.
    ShuffledPerRank,
}

/// How a program waits for the results of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitOrder {
    /// Layer by layer in the order of the forward pass.
    Forward,
    /// For everything at once.
    AtOnce,
    /// Only before a tensor is submitted again.
    Late,
}

/// What is the same on all ranks.
struct JobPlan {
    /// Workers.
    ranks: u32,
    books: Vec<Arc<Book>>,
    places: Vec<Option<Vec<u32>>>,
    order: Order,
    waiting: WaitOrder,
    absent_permille: u64,
    copy_permille: u64,
    compute_ns_max: u64,
    interleaved: bool,
    /// Of some tensors, not even a rank contributes.
    nobody_permille: u64,
    epochs: Vec<Epoch>,
    /// For orders that are the same on all ranks.
    order_seed: u64,
    /// How the owners of all books update values, if they do.
    rule: Option<Rule>,
}

/// Rounds up to a join.
struct Epoch {
    /// How many rounds each rank takes part in; one at least takes part in all.
    rounds: Vec<u32>,
    /// By round and book: what each tensor's round is.
    plans: Vec<Vec<Vec<TensorRound>>>,
    leave: bool,
    agree: bool,
}

impl Epoch {
    fn is_uneven(&self) -> bool {
        self.rounds.iter().any(|rounds| *rounds as usize != self.plans.len())
    }
}

#[derive(Clone, Copy)]
struct TensorRound {
    op: Op,
    /// For copies: who contributes.
    root: Option<u32>,
    nobody: bool,
}

const LAYERS_MAX: u64 = 6;
const DTYPES: [Dtype; 9] = [
    Dtype::F32,
    Dtype::F32,
    Dtype::F32,
    Dtype::F64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::I32,
    Dtype::I64,
    Dtype::Bytes,
];

/// Of a few scenarios: owners keep values, and apply this to them. Drawn apart from everything else.
fn draw_rule(seed: u64) -> Option<Rule> {
    let random = &mut Random::new(seed ^ 0x0D_A7E5);
    if !random.chance(150) {
        return None;
    }
    let sgd = Rule::Sgd {
        momentum: random.pick(&[0.5, 0.9]),
        dampening: random.pick(&[0.0, 0.25]),
        nesterov: random.chance(500),
    };
    let adam = Rule::Adam { betas: [0.9, 0.99], eps: 1e-8, amsgrad: false, decoupled: true };
    let adagrad = Rule::Adagrad { lr_decay: 0.1, eps: 1e-10, initial: random.pick(&[0.0, 0.5]) };
    let rms_prop = Rule::RmsProp {
        alpha: 0.9,
        eps: 1e-8,
        momentum: random.pick(&[0.0, 0.5]),
        centered: random.chance(500),
    };
    Some(random.pick(&[sgd, adam, adagrad, rms_prop]))
}

/// Draws a scenario.
#[must_use]
pub fn draw(seed: u64) -> Setup {
    let mut random = Random::new(seed);
    let random = &mut random;
    let rule = draw_rule(seed);
    let (ranks, lanes) = (random.pick(&[1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6]), random.pick(&[1, 1, 1, 2, 3]));
    let slice_bytes = random.between(1024, 3000) as usize;
    let book_count = random.pick(&[1, 1, 2]);
    let mut routes = draw_routes(random);
    if rule.is_some() {
        routes = vec![Route::STORE];
    }
    let servers = draw_servers(seed, &routes);
    let mut roles = roles(ranks, servers, draw_groups(seed, ranks, &routes));
    if rule.is_some() {
        roles.rules.fold = Fold::Updated;
    }
    let slicing = Slicing::fixed(slice_bytes, lanes);
    let books: Vec<Arc<Book>> =
        (0..book_count).map(|id| Arc::new(draw_book(random, id, &roles, slicing, &routes))).collect();
    let places = books.iter().map(|book| draw_places(random, book.layers.len())).collect();
    let order = random.pick(&[Order::Reverse, Order::Reverse, Order::Shuffled, Order::ShuffledPerRank]);
    let waiting = random.pick(&[WaitOrder::Forward, WaitOrder::Forward, WaitOrder::AtOnce, WaitOrder::Late]);
    let mut plan = JobPlan {
        ranks,
        books,
        places,
        order,
        waiting,
        absent_permille: random.pick(&[0, 0, 100, 500]),
        copy_permille: random.pick(&[0, 0, 200, 1000]),
        compute_ns_max: random.magnitude(1, 200_000),
        interleaved: random.chance(500),
        nobody_permille: random.pick(&[0, 0, 200]),
        epochs: Vec::new(),
        order_seed: random.bits() >> 1,
        rule,
    };
    if rule.is_some() {
        plan.copy_permille = 0;
    }
    for _ in 0..random.pick(&[1, 1, 1, 2, 2, 3]) {
        let epoch = plan.draw_epoch(random);
        plan.epochs.push(epoch);
    }
    let last = plan.epochs.len() - 1;
    // Who takes part in fewer rounds must leave; the others may just end.
    plan.epochs[last].leave &= plan.epochs[last].is_uneven() || random.chance(300);
    plan.keep_agreement_where_needed();
    let fault = (ranks > 1 && random.chance(120)).then(|| draw_fault(random, ranks + servers));
    let links = draw_links(random);
    let workers = (0..ranks).map(|rank| plan.program(rank, &mut random.fork()));
    let mut programs: Vec<Vec<Instruction>> = workers.collect();
    programs.extend((0..servers).map(|_| plan.server(&mut random.fork())));
    Setup {
        seed,
        ranks: ranks + servers,
        workers: ranks,
        lanes,
        window_bytes: random.pick(&[1, 700, 3000, 6000, 20_000, 1 << 20]),
        priority: random.chance(850),
        links,
        programs,
        fault,
        sabotage: None,
        demands: plan.demands(),
        places: plan.places,
        books: plan.books,
    }
}

fn draw_fault(random: &mut Random, ranks: u32) -> Fault {
    let what = match random.below(7) {
        0 | 1 => Mishap::Kill,
        2 => Mishap::Raise,
        3 => Mishap::Hang,
        4 => Mishap::Stop(random.magnitude(1_000_000, PEER_TIMEOUT_NS / 2)),
        // Just before the limit, and just after; and as good as for ever.
        5 => Mishap::Stop(random.between(PEER_TIMEOUT_NS * 7 / 10, PEER_TIMEOUT_NS * 14 / 10)),
        _ => Mishap::Stop(random.between(2 * PEER_TIMEOUT_NS, 20 * PEER_TIMEOUT_NS)),
    };
    let rank = Rank(random.below(u64::from(ranks)) as u32);
    Fault { rank, at_ns: random.magnitude(1, 20_000_000), what }
}

/// The schemes that tensors are drawn from: often the store alone, or one collective, or all together.
fn draw_routes(random: &mut Random) -> Vec<Route> {
    match random.below(8) as usize {
        0..=2 => vec![Route::STORE],
        drawn @ 3..=6 => vec![Route::Sum(Algorithm::COLLECTIVES[drawn - 3])],
        _ => Algorithm::ALL.map(Route::Sum).to_vec(),
    }
}

/// How many servers there are apart from the workers: where the store is alone, often some. Drawn by themselves, so that
/// nothing else of a scenario depends on them.
fn draw_servers(seed: u64, routes: &[Route]) -> u32 {
    let mut random = Random::new(seed ^ 0x5e7e_75a9);
    if routes == [Route::STORE] { random.pick(&[0, 0, 1, 2, 4]) } else { 0 }
}

/// Which workers sum among themselves: where there is a store, often some; of any sizes, and any ranks together. Drawn by themselves,
/// too.
fn draw_groups(seed: u64, ranks: u32, routes: &[Route]) -> Groups {
    let mut random = Random::new(seed ^ 0x6e0_0b5);
    if ranks < 2 || !routes.contains(&Route::STORE) || random.chance(600) {
        return Groups::default();
    }
    let count = random.between(1, u64::from(ranks));
    let places: Vec<u64> = (0..ranks).map(|_| random.below(count)).collect();
    Groups::of_members((0..count).map(|group| -> Members {
        let of_group = places.iter().zip(0..).filter(|(place, _)| **place == group);
        of_group.map(|(_, rank)| Rank(rank)).collect()
    }))
}

/// Of so many workers and servers apart; all alike without servers and groups.
fn roles(workers: u32, servers: u32, groups: Groups) -> Roles {
    let members = Members::all(workers + servers);
    if servers == 0 {
        let alike = Roles::alike(members);
        let heads: Members = groups.iter().map(ClientGroup::head).collect();
        let owners = if groups.is_empty() { alike.owners.clone() } else { heads };
        return Roles { owners, groups, ..alike };
    }
    let rules = Rules { must_be_in: MustBeIn::These(Members::all(workers)), ..Rules::default() };
    let owners = (workers..workers + servers).map(Rank).collect();
    Roles { members, owners, rules, groups }
}

fn draw_book(random: &mut Random, id: u32, roles: &Roles, slicing: Slicing, routes: &[Route]) -> Book {
    let updated = roles.rules.fold == Fold::Updated;
    let dtypes = if updated { &DTYPES[..4] } else { &DTYPES[..] };
    let layers = random.between(1, LAYERS_MAX);
    let mut layer = 0;
    let tensors = (0..random.between(1, 10)).map(|i| {
        // Mostly registered layer by layer, sometimes with a tensor of another layer between.
        layer = (layer + random.below(2)).min(layers - 1);
        let layer = if random.chance(100) { random.below(layers) } else { layer };
        let elems = match random.below(10) {
            0 => 0,
            1 => 1,
            2..=5 => random.between(2, 60),
            6..=8 => random.between(60, 700),
            _ => random.between(700, 2500),
        };
        let tensor = Tensor::new(format!("b{id}.t{i}"), layer as u32, random.pick(dtypes), elems);
        let tensor = tensor.with_route(random.pick(routes));
        if tensor.dtype == Dtype::F32 && tensor.route == Route::STORE && random.chance(300) {
            return tensor.with_wire(random.pick(&[Dtype::Bf16, Dtype::F16]));
        }
        tensor
    });
    let mut tensors: Vec<Tensor> = tensors.collect();
    if random.chance(300) && !updated {
        for i in 0..random.between(1, 3) {
            let (layer, most) = (random.below(layers) as u32, random.magnitude(1, 12_000));
            let tensor = Tensor::new(format!("b{id}.gather{i}"), layer, Dtype::Bytes, most);
            let at = random.below(tensors.len() as u64 + 1) as usize;
            let contributors = roles.contributors();
            let owner = Some(contributors.at(random.below(u64::from(contributors.count())) as u32));
            let owner = owner.filter(|_| random.chance(400));
            tensors.insert(at, Tensor { owner, ..tensor.with_route(Route::Gather) });
        }
    }
    if roles.rules != Rules::default() {
        tensors.retain(|tensor| [Route::STORE, Route::Gather].contains(&tensor.route));
    }
    let layers = (0..layers).map(|layer| format!("b{id}.layer{layer}")).collect();
    Book::deal(format!("book{id}"), layers, tensors, roles, slicing).expect("within all limits")
}

fn draw_places(random: &mut Random, layers: usize) -> Option<Vec<u32>> {
    let mut places: Vec<u32> = (0..layers as u32).collect();
    random.shuffle(&mut places);
    random.chance(300).then_some(places)
}

fn draw_links(random: &mut Random) -> Links {
    Links {
        bytes_per_s: random.magnitude(1_000_000, 10_000_000_000),
        delay_ns: random.magnitude(1, 1_000_000),
        jitter_ns: random.magnitude(1, 500_000),
        committed_bytes_max: random.magnitude(200, 100_000),
        segment_bytes: random.magnitude(400, 20_000),
        stall_permille: random.pick(&[0, 0, 20, 200]),
        stall_ns_max: random.magnitude(1000, 5_000_000),
        wake_ns_max: random.magnitude(1, 20_000) - 1,
    }
}

impl JobPlan {
    fn draw_epoch(&self, random: &mut Random) -> Epoch {
        let most = random.between(1, 3) as u32;
        // Collectives need every rank in every round.
        let collective = self.books.iter().any(|book| book.collective_slices > 0);
        // Who has left tells nobody to go on.
        let leave = random.chance(700) && (!collective || self.ranks == 1) && self.rule.is_none();
        let mut rounds = vec![most; self.ranks as usize];
        if leave {
            let longest = random.below(u64::from(self.ranks)) as usize;
            for (rank, rounds) in rounds.iter_mut().enumerate().filter(|(rank, _)| *rank != longest) {
                if rank != longest && random.chance(600) {
                    *rounds = random.below(u64::from(most) + 1) as u32;
                }
            }
        }
        let plans = (0..most).map(|round| {
            let active: Vec<u32> = (0..self.ranks).filter(|rank| rounds[*rank as usize] > round).collect();
            let tensor = |tensor: &Tensor, random: &mut Random| {
                let exact = tensor.wire == tensor.dtype;
                let copied = tensor.dtype == Dtype::Bytes || exact && random.chance(self.copy_permille);
                let op = match random.pick(&[Op::Average, Op::Average, Op::Sum, Op::Min, Op::Max]) {
                    _ if copied => Op::Copy,
                    Op::Average if tensor.dtype.is_integer() => Op::Sum,
                    Op::Min | Op::Max if self.rule.is_some() => Op::Sum,
                    op => op,
                };
                let root = copied.then(|| random.pick(&active));
                TensorRound { op, root, nobody: random.chance(self.nobody_permille) }
            };
            let book = |book: &Arc<Book>, random: &mut Random| {
                book.tensors.iter().map(|t| tensor(t, random)).collect()
            };
            self.books.iter().map(|b| book(b, random)).collect()
        });
        let plans = plans.collect();
        let mut epoch = Epoch { rounds, plans, leave, agree: true };
        epoch.agree = epoch.is_uneven() || random.chance(500);
        epoch
    }

    /// Without agreement a rank may go on before another knows that all have left. It must not leave again before that.
    fn keep_agreement_where_needed(&mut self) {
        let mut leaves_later = false;
        for epoch in self.epochs.iter_mut().rev() {
            epoch.agree |= leaves_later;
            leaves_later |= epoch.leave;
        }
    }

    fn demands(&self) -> Demands {
        let rounds = self.epochs.iter().map(|epoch| epoch.plans.len() as u64).sum();
        let equal = !self.epochs.iter().any(Epoch::is_uneven);
        let summed = self.copy_permille == 0
            && self.books.iter().all(|b| b.tensors.iter().all(|t| t.dtype != Dtype::Bytes));
        let full = equal && summed && self.absent_permille == 0 && self.nobody_permille == 0;
        let full = full && self.rule.is_none();
        let tensors = self.books.iter().map(|book| book.tensors.len()).max().unwrap_or(0) as u64;
        let in_turn = self.order == Order::Reverse && self.waiting != WaitOrder::Late;
        Demands {
            full_rounds: full.then_some(rounds),
            // Each tensor that comes after all that are open may send one slice out of turn.
            exceptions: if in_turn { 1 } else { tensors + 1 },
            links: true,
        }
    }

    fn program(&self, rank: u32, random: &mut Random) -> Vec<Instruction> {
        let mut program = Vec::new();
        // Some ranks are much slower than others.
        let compute_ns_max = self.compute_ns_max * random.pick(&[1, 1, 1, 3, 50]);
        let late = random.chance(200);
        for book in 0..self.books.len() as BookId {
            if late {
                program.push(Instruction::Compute(random.below(20 * compute_ns_max + 1)));
            }
            program.push(Instruction::Open(book));
            if self.rule.is_some() {
                program.push(Instruction::Load(book));
            }
        }
        for (number, epoch) in self.epochs.iter().enumerate() {
            for round in 0..epoch.rounds[rank as usize] {
                // Drawn from the plan, not from this rank's own generator: the same for all.
                let shared = Random::new(self.order_seed + u64::from(round) + 1000 * number as u64);
                let mut slow = Slow { random, compute_ns_max };
                self.backward(rank, epoch, round as usize, shared, &mut slow, &mut program);
                self.step(number as u64, round, &mut slow, &mut program);
                self.forward(&mut slow, &mut program);
            }
            if epoch.leave {
                program.push(Instruction::Leave { agree: epoch.agree });
            }
        }
        program
    }

    /// A server opens the books, some of them late, hears after each step what becomes of it, if values are updated, and is there
    /// until the workers have gone.
    fn server(&self, random: &mut Random) -> Vec<Instruction> {
        let late_ns_max = 20 * self.compute_ns_max * u64::from(random.chance(300));
        let mut program = Vec::new();
        for book in 0..self.books.len() as BookId {
            program.extend([Instruction::Compute(random.below(late_ns_max + 1)), Instruction::Open(book)]);
            program.extend(self.rule.map(|_| Instruction::Load(book)));
        }
        let mut seq = 0;
        for (number, epoch) in self.epochs.iter().enumerate().filter(|_| self.rule.is_some()) {
            for round in 0..epoch.plans.len() as u32 {
                seq += 1;
                for book in 0..self.books.len() as BookId {
                    let update = self.update(number as u64, round, book);
                    program.push(Instruction::Heed { book, seq, update });
                }
            }
        }
        program.push(Instruction::Serve);
        program
    }

    /// The submissions of one round, with computing between them.
    fn backward(
        &self,
        rank: u32,
        epoch: &Epoch,
        round: usize,
        shared: Random,
        slow: &mut Slow<'_>,
        program: &mut Vec<Instruction>,
    ) {
        let active = epoch.rounds.iter().filter(|n| **n as usize > round).count() as u32;
        let mut order = shared;
        if self.order == Order::ShuffledPerRank {
            order = slow.random.fork();
        }
        let mut submissions = Vec::new();
        for (book, plans) in epoch.plans[round].iter().enumerate() {
            let mut tensors: Vec<TensorId> = (0..plans.len() as u32).rev().collect();
            if self.order != Order::Reverse {
                order.shuffle(&mut tensors);
            }
            submissions.push(tensors.into_iter().map(move |tensor| (book, tensor)).collect::<Vec<_>>());
        }
        // Two models at once: their submissions in one sequence, another on each rank.
        for (book, tensor) in merged(submissions, self.interleaved, slow.random) {
            let plan = epoch.plans[round][book][tensor as usize];
            let absent = match plan.root {
                _ if plan.nobody => true,
                Some(root) => root != rank,
                None => slow.random.chance(self.absent_permille),
            };
            let layout = &self.books[book].tensors[tensor as usize];
            // Another length on every rank and in every round; often none, or the most there may be.
            let lengths =
                [0, slow.random.below(layout.elems + 1), slow.random.below(layout.elems + 1), layout.elems];
            let gathered = layout.route == Route::Gather;
            let gather_bytes = gathered.then(|| slow.random.pick(&lengths) as u32);
            let (book, op, absent) = (book as BookId, plan.op, absent && !gathered);
            let submission = Submission { book, tensor, op, absent, gather_bytes, active };
            program.push(slow.compute());
            program.push(Instruction::Submit(submission));
        }
    }

    /// The end of a step, if values are updated.
    fn step(&self, epoch: u64, round: u32, slow: &mut Slow<'_>, program: &mut Vec<Instruction>) {
        if self.rule.is_none() {
            return;
        }
        for book in 0..self.books.len() as BookId {
            program.push(slow.compute());
            program.push(Instruction::Proceed { book, update: self.update(epoch, round, book) });
        }
    }

    /// What becomes of the gradients of a step: other numbers in each, and now and then nothing at all.
    fn update(&self, epoch: u64, round: u32, book: BookId) -> Option<Update> {
        let rule = self.rule?;
        let name = [epoch, u64::from(round), u64::from(book)];
        let mix = name.iter().fold(self.order_seed, |mix, part| Random::new(mix ^ (part + 1)).bits());
        let shared = &mut Random::new(mix);
        let (lr, weight_decay) = (shared.pick(&[0.5, 0.01]), shared.pick(&[0.0, 0.1]));
        let optimizer = Optimizer { lr, weight_decay, maximize: false, rule };
        let update = Update { optimizer, factor: shared.pick(&[1.0, 1.0, 0.3]) };
        (!shared.chance(150)).then_some(update)
    }

    fn forward(&self, slow: &mut Slow<'_>, program: &mut Vec<Instruction>) {
        for (id, book) in self.books.iter().enumerate() {
            let all = 0..book.tensors.len() as TensorId;
            let book_id = id as BookId;
            match self.waiting {
                WaitOrder::Late => {}
                WaitOrder::AtOnce => {
                    program.push(Instruction::Wait { book: book_id, tensors: all.collect() });
                }
                WaitOrder::Forward => {
                    let mut layers: Vec<u32> = (0..book.layers.len() as u32).collect();
                    if let Some(places) = &self.places[id] {
                        layers.sort_by_key(|layer| places[*layer as usize]);
                    }
                    for layer in layers {
                        let of_layer = |t: &TensorId| book.tensors[*t as usize].layer == layer;
                        let tensors = all.clone().filter(of_layer).collect();
                        program.push(Instruction::Wait { book: book_id, tensors });
                        program.push(slow.compute());
                    }
                }
            }
        }
    }
}

/// How fast a rank computes.
struct Slow<'a> {
    random: &'a mut Random,
    compute_ns_max: u64,
}

impl Slow<'_> {
    fn compute(&mut self) -> Instruction {
        Instruction::Compute(self.random.below(self.compute_ns_max + 1))
    }
}

/// All lists one after the other, or mixed, each keeping its own order.
fn merged<T>(lists: Vec<Vec<T>>, mixed: bool, random: &mut Random) -> Vec<T> {
    if !mixed {
        return lists.into_iter().flatten().collect();
    }
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    while !lists.is_empty() {
        let at = random.below(lists.len() as u64) as usize;
        match lists[at].next() {
            Some(item) => all.push(item),
            None => drop(lists.remove(at)),
        }
    }
    all
}

/// A scenario in one line.
#[must_use]
pub fn describe(setup: &Setup) -> String {
    let Setup {
        ranks,
        workers,
        lanes,
        books,
        places,
        window_bytes,
        priority,
        links,
        fault,
        sabotage,
        demands,
        ..
    } = setup;
    let books = books.iter().map(|book| {
        let (tensors, slices) = (book.tensors.len(), book.slices.len());
        let bytes: u64 = book.tensors.iter().map(Tensor::len_bytes).sum();
        let mut routes: Vec<&str> = book.tensors.iter().map(|tensor| tensor.route.name()).collect();
        routes.dedup();
        let (layers, fold) = (book.layers.len(), book.roles.rules.fold);
        let groups = book.roles.groups.iter().map(|group| group.members.iter().map(|rank| rank.0).collect());
        let groups: Vec<Vec<u32>> = groups.collect();
        format!(
            "{tensors} tensors in {layers} layers, {slices} slices, {bytes} bytes, routes {routes:?}, {fold:?}, groups {groups:?}"
        )
    });
    let books: Vec<String> = books.collect();
    let submissions = setup.programs.iter().flatten().filter(|i| matches!(i, Instruction::Submit(_))).count();
    format!(
        "{ranks} ranks ({workers} workers) x {lanes} lanes, window {window_bytes} bytes, priority {priority}, places {places:?}, \
         books {books:?}, {submissions} submissions, {links:?}, {fault:?}, sabotage {sabotage:?}, {demands:?}"
    )
}

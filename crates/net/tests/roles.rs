//! Servers apart from workers, over loopback: what they sum, who leaves, who dies, and what is refused.

mod support;

use penstock_core::layout::Tensor;
use penstock_core::roles::{ClientGroup, Groups, MustBeIn, Rules};
use penstock_core::{Algorithm, BookId, Dtype, Error, Gives, Members, Op, Rank, Roles, Route, Submission};
use penstock_net::{Engine, Failure, Lent, Stop};
use std::time::Duration;
use support::{Meeting, job_with, never, on_all};

const ELEMS: usize = 10_000;

fn some(ranks: std::ops::Range<u32>) -> Members {
    ranks.map(Rank).collect()
}

/// Of so many workers, and servers behind them that own everything.
fn apart(workers: u32, servers: u32) -> Roles {
    let must_be_in = MustBeIn::These(some(0..workers));
    let rules = Rules { must_be_in, ..Rules::default() };
    let (members, owners) = (some(0..workers + servers), some(workers..workers + servers));
    Roles { members, owners, rules, groups: Groups::default() }
}

fn job(workers: u32, servers: u32) -> Vec<Engine> {
    job_with(workers + servers, |config| config.servers = servers)
}

fn open(engine: &Engine, roles: Option<Roles>) -> BookId {
    let tensors = vec![Tensor::new("w", 0, Dtype::F32, ELEMS as u64)];
    engine.open_book("gradients", vec!["fc".into()], tensors, roles).unwrap()
}

fn exchange(engine: &Engine, book: BookId, values: &mut [f32], gives: Gives) -> Result<(), Stop> {
    let memory = Lent { address: values.as_mut_ptr() as usize, len_bytes: std::mem::size_of_val(values) };
    let submission = Submission { book, tensor: 0, seq: 0, step: 1, memory, gives };
    // SAFETY: waited for until it is released, and leaked by those who expect a failure.
    unsafe { engine.submit(submission, false) }?;
    engine.wait(book, &[0], true, &mut never)
}

fn refusal(outcome: Result<(), Stop>) -> String {
    match outcome {
        Err(Stop::Failed(failure)) => match *failure {
            Failure { error: Error::Config(text), .. } => text,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// What worker `rank` gives in a round: not a power of two, so that another order of the sum has other bits.
fn part(rank: u32, round: u32) -> f32 {
    1.0 / (3.0 + rank as f32 + 10.0 * round as f32)
}

#[test]
fn the_sum_of_workers_is_the_same_wherever_it_is_made() {
    const ROUNDS: u32 = 3;
    for (workers, servers) in [(1, 1), (2, 1), (3, 2), (4, 4), (4, 2), (4, 1), (2, 4)] {
        let over = Meeting::of((workers + servers) as usize);
        let reports = on_all(job(workers, servers), |engine, rank| {
            let book = open(engine, Some(apart(workers, servers)));
            assert!(engine.layout(book).unwrap().slices.iter().all(|slice| slice.owner.0 >= workers));
            let mut values = vec![0.0; ELEMS];
            for round in (0..ROUNDS).filter(|_| rank < workers) {
                values.fill(part(rank, round));
                exchange(engine, book, &mut values, Gives::Whole(Op::Average)).unwrap();
                let sum = (1..workers).fold(part(0, round), |sum, rank| sum + part(rank, round));
                let mean = if workers > 1 { sum / workers as f32 } else { sum };
                assert!(values.iter().all(|x| x.to_bits() == mean.to_bits()), "{} is not {mean}", values[0]);
                // Among the workers alone: what they gather, and messages, are none of the servers' business.
                let blobs = engine.all_gather("ranks", &[rank as u8], &mut never).unwrap();
                assert_eq!(blobs, (0..workers as u8).map(|rank| vec![rank]).collect::<Vec<_>>());
            }
            over.wait();
            engine.shutdown(&mut never).unwrap();
            engine.report().unwrap()
        });
        // Poseidon's table 1 with P1 workers and P2 servers: a worker sends and receives all, a server P1 times what it owns.
        let all = u64::from(ROUNDS) * ELEMS as u64 * 4;
        for (rank, report) in (0u32..).zip(&reports) {
            let owned = report.owned_bytes[rank as usize] * u64::from(ROUNDS);
            let want = if rank < workers { all } else { owned * u64::from(workers) };
            assert_eq!(
                (report.bytes_sent, report.bytes_received),
                (want, want),
                "rank {rank} of {workers} + {servers}"
            );
        }
    }
}

/// Of the workers in these groups, with so many servers apart or with their heads as owners.
fn grouped(groups: &[&[u32]], servers: u32) -> Roles {
    let workers = groups.iter().map(|group| group.len() as u32).sum();
    let members = |ranks: &&[u32]| ranks.iter().copied().map(Rank).collect::<Members>();
    let groups = Groups::of_members(groups.iter().map(members));
    match servers {
        0 => {
            let owners = groups.iter().map(ClientGroup::head).collect();
            Roles { owners, groups, ..Roles::alike(some(0..workers)) }
        }
        _ => Roles { groups, ..apart(workers, servers) },
    }
}

#[test]
fn groups_sum_inside_and_their_heads_meet_in_the_store() {
    const ROUNDS: u32 = 3;
    type Case = (&'static [&'static [u32]], u32);
    let cases: [Case; 5] = [
        (&[&[0, 1], &[2, 3]], 0),
        (&[&[0], &[1, 2, 3]], 0),
        (&[&[0, 3], &[1, 2]], 2),
        (&[&[0, 1, 2]], 0),
        (&[&[0, 1, 2, 3]], 1),
    ];
    for (groups, servers) in cases {
        let workers: u32 = groups.iter().map(|group| group.len() as u32).sum();
        let over = Meeting::of((workers + servers) as usize);
        let reports = on_all(job(workers, servers), |engine, rank| {
            let book = open(engine, Some(grouped(groups, servers)));
            let mut values = vec![0.0; ELEMS];
            for round in (0..ROUNDS).filter(|_| rank < workers) {
                values.fill(part(rank, round));
                exchange(engine, book, &mut values, Gives::Whole(Op::Average)).unwrap();
                let sum =
                    |ranks: &[u32]| ranks.iter().map(|rank| part(*rank, round)).reduce(|a, b| a + b).unwrap();
                let mean =
                    groups.iter().map(|group| sum(group)).reduce(|a, b| a + b).unwrap() / workers as f32;
                assert!(values.iter().all(|x| x.to_bits() == mean.to_bits()), "{} is not {mean}", values[0]);
            }
            over.wait();
            engine.shutdown(&mut never).unwrap();
            engine.report().unwrap()
        });
        // For n bytes: members n to their heads; heads n to each member, and as C workers with the owners.
        let all = u64::from(ROUNDS) * ELEMS as u64 * 4;
        for (rank, report) in (0u32..).zip(&reports) {
            let owned = report.owned_bytes[rank as usize] * u64::from(ROUNDS);
            let of = groups.iter().find(|group| group.contains(&rank));
            let clients = groups.len() as u64;
            let want = match of {
                Some(group) if group[0] == rank && servers > 0 => group.len() as u64 * all,
                Some(group) if group[0] == rank => {
                    (group.len() as u64 - 1) * all + (all - owned) + (clients - 1) * owned
                }
                Some(_) => all,
                None => clients * owned,
            };
            let (sent, received) = (report.bytes_sent, report.bytes_received);
            assert_eq!((sent, received), (want, want), "rank {rank} of {groups:?} + {servers}");
        }
    }
}

#[test]
fn a_head_that_has_left_relays_for_its_group() {
    let over = Meeting::of(4);
    on_all(job(4, 0), |engine, rank| {
        let book = open(engine, Some(grouped(&[&[0, 1], &[2, 3]], 0)));
        let mut values = vec![0.0; ELEMS];
        for epoch in 0..10 {
            // Rank 2 leads 3, and leaves after one round; and all of the first group after two.
            let rounds = [2, 2, 1, 3][rank as usize];
            for round in 0..rounds {
                values.fill(rank as f32);
                exchange(engine, book, &mut values, Gives::Whole(Op::Average)).unwrap();
                let mean = [1.5, 4.0 / 3.0, 3.0][round];
                assert_eq!(values[0], mean, "rank {rank}, epoch {epoch}, round {round}");
            }
            engine.leave(&mut never).unwrap();
            let seq = engine.sequence(book).unwrap()[0];
            let seqs = engine.all_gather("sequence", &seq.to_le_bytes(), &mut never).unwrap();
            let most = seqs.iter().map(|s| u32::from_le_bytes(s[..].try_into().unwrap())).max().unwrap();
            engine.set_sequence(book, &[most]).unwrap();
        }
        over.wait();
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn who_has_left_counts_no_more_at_the_servers_until_all_workers_have() {
    let over = Meeting::of(5);
    on_all(job(3, 2), |engine, rank| {
        let book = open(engine, Some(apart(3, 2)));
        let mut values = vec![0.0; ELEMS];
        if rank >= 3 {
            over.wait();
            let said = refusal(engine.leave(&mut never));
            assert!(said.contains("leave() is for workers") && said.contains("server"), "{said}");
            return engine.shutdown(&mut never).unwrap();
        }
        for epoch in 0..20 {
            for round in 0..3 {
                if rank == 2 && round == 1 {
                    break;
                }
                values.fill(rank as f32);
                exchange(engine, book, &mut values, Gives::Whole(Op::Average)).unwrap();
                assert_eq!(values[0], if round == 0 { 1.0 } else { 0.5 }, "epoch {epoch}");
            }
            engine.leave(&mut never).unwrap();
            let seq = engine.sequence(book).unwrap()[0];
            let seqs = engine.all_gather("sequence", &seq.to_le_bytes(), &mut never).unwrap();
            let most = seqs.iter().map(|s| u32::from_le_bytes(s[..].try_into().unwrap())).max().unwrap();
            engine.set_sequence(book, &[most]).unwrap();
        }
        over.wait();
        engine.shutdown(&mut never).unwrap();
    });
}

#[test]
fn a_server_that_dies_ends_all_with_its_name_and_so_does_a_worker() {
    let patience = Duration::from_secs(60);
    for (victim, name) in [(3, "server 1 (127.0.0.1:"), (1, "rank 1 is lost")] {
        let engines = job_with(4, |config| {
            config.servers = 2;
            (config.operation_timeout, config.peer_timeout) = (patience, patience);
        });
        let connected = Meeting::of(4);
        on_all(engines, |engine, rank| {
            let book = open(engine, Some(apart(2, 2)));
            let values = vec![1.0; ELEMS].leak();
            if rank < 2 {
                exchange(engine, book, values, Gives::Whole(Op::Sum)).unwrap();
            }
            connected.wait();
            if rank == victim {
                return; // Dropped without a goodbye.
            }
            let stop = loop {
                let outcome = if rank < 2 {
                    exchange(engine, book, values, Gives::Whole(Op::Sum))
                } else {
                    engine.take_done(Duration::from_millis(50)).map(drop).map_err(Stop::from)
                };
                if let Err(stop) = outcome {
                    break stop;
                }
            };
            let Stop::Failed(failure) = stop else { panic!("{stop:?}") };
            assert_eq!(failure.rank, Some(Rank(victim)), "{failure}");
            assert!(failure.to_string().contains(name), "{failure}");
            engine.shutdown(&mut never).unwrap();
        });
    }
}

#[test]
fn what_roles_do_not_allow_is_refused_at_the_call_and_the_job_goes_on() {
    let over = Meeting::of(3);
    on_all(job(2, 1), |engine, rank| {
        let book = open(engine, Some(apart(2, 1)));
        let alone = open(engine, None);
        let mut values = vec![1.0; ELEMS];
        if rank == 2 {
            let said = refusal(exchange(engine, book, &mut values, Gives::Whole(Op::Sum)));
            assert!(said.contains("rank 2 contributes to w") && said.contains("only ask"), "{said}");
            let said = refusal(exchange(engine, alone, &mut values, Gives::Nothing(Op::Sum)));
            assert!(said.contains("rank 2 is none of those that the book is for"), "{said}");
            let gather = engine.all_gather("x", b"", &mut never).map(drop);
            assert!(refusal(gather).contains("all_gather() is for workers, and rank 2 is server 0"));
            let stranger = Roles::alike(some(0..4));
            let tensors = vec![Tensor::new("w", 0, Dtype::F32, 1)];
            let error = engine.open_book("b", vec!["a".into()], tensors, Some(stranger)).unwrap_err();
            assert!(error.to_string().contains("rank 3 is a member, but there are 3 ranks"), "{error}");
        }
        over.wait();
        for book in [book, alone].into_iter().filter(|_| rank < 2) {
            values.fill(1.0);
            exchange(engine, book, &mut values, Gives::Whole(Op::Sum)).unwrap();
            assert_eq!(values[0], 2.0);
        }
        over.wait();
        engine.shutdown(&mut never).unwrap();
    });
    assert!(Engine::bind(penstock_net::EngineConfig { servers: 2, ..support::config(0, 2) }).is_err());
}

#[test]
fn what_is_not_the_stores_goes_among_the_workers() {
    let over = Meeting::of(5);
    on_all(job(3, 2), |engine, rank| {
        let tensors = vec![
            Tensor::new("w", 0, Dtype::F32, 3000),
            Tensor::new("ring", 0, Dtype::F32, 3000).with_route(Route::Sum(Algorithm::Ring)),
            Tensor::new("rows", 0, Dtype::Bytes, 10).with_route(Route::Gather),
        ];
        let book = engine.open_book("mixed", vec!["fc".into()], tensors, Some(apart(3, 2))).unwrap();
        let (mut values, rows) = (vec![0.0f32; 3000], [rank as u8; 3]);
        let given = |values: &mut [f32], tensor, gives| {
            let memory =
                Lent { address: values.as_mut_ptr() as usize, len_bytes: std::mem::size_of_val(values) };
            // SAFETY: waited for until it is released.
            unsafe { engine.submit(Submission { book, tensor, seq: 0, step: 1, memory, gives }, false) }
        };
        let gathers = || {
            let (memory, gives) =
                (Lent { address: rows.as_ptr() as usize, len_bytes: 3 }, Gives::Gathered(3));
            // SAFETY: as above; what is gathered is only read.
            unsafe { engine.submit(Submission { book, tensor: 2, seq: 0, step: 1, memory, gives }, false) }
        };
        if rank >= 3 {
            let refused = [given(&mut values, 1, Gives::Nothing(Op::Sum)), gathers()];
            for said in refused.map(|outcome| outcome.unwrap_err().to_string()) {
                assert!(said.contains("is none of those that the book is for"), "{said}");
            }
        } else {
            for tensor in [0, 1] {
                values.fill(rank as f32 + 1.0);
                given(&mut values, tensor, Gives::Whole(Op::Sum)).unwrap();
                engine.wait(book, &[tensor], true, &mut never).unwrap();
                assert!(values.iter().all(|x| *x == 6.0), "tensor {tensor}: {}", values[0]);
            }
            gathers().unwrap();
            engine.wait(book, &[2], true, &mut never).unwrap();
            assert_eq!(engine.gathered(book, 2).unwrap(), [Some(3); 3]);
            let other = (rank + 1) % 3;
            let mut got = [0; 3];
            engine.read_gathered(book, 2, Rank(other), 0, &mut got).unwrap();
            assert_eq!(got, [other as u8; 3]);
        }
        over.wait();
        engine.shutdown(&mut never).unwrap();
    });
}

//! Step times of a chain of layers against the limit that physics sets, and what priority is good for.

// The ratios are worth reading: `cargo test -p penstock-sim --test chain -- --nocapture`.
#![allow(clippy::print_stdout)]

use penstock_sim::chain::{Chain, Layer};
use penstock_sim::memory::VirtualMemory;
use penstock_sim::play;
use penstock_sim::program::Links;

const MS: u64 = 1_000_000;

fn links(bytes_per_s: u64) -> Links {
    Links {
        bytes_per_s,
        delay_ns: 50_000,
        jitter_ns: 0,
        committed_bytes_max: 256 << 10,
        segment_bytes: 16 << 10,
        stall_permille: 0,
        stall_ns_max: 0,
        wake_ns_max: 0,
    }
}

/// A chain as vision models have it: the later a layer, the more parameters; computing is in the early ones.
fn chain(ranks: u32, bytes_per_s: u64, priority: bool) -> Chain {
    let layers = (0..12).map(|i| Layer {
        forward_ns: (14 - i) * MS,
        backward_ns: 2 * (14 - i) * MS,
        parameters: 60_000 * (i + 1),
    });
    Chain {
        layers: layers.collect(),
        ranks,
        slice_bytes: 64 << 10,
        window_bytes: 8 << 20,
        priority,
        links: links(bytes_per_s),
    }
}

/// The time of a step: the mean over the last of a few, on the slowest rank.
fn step_ns(chain: &Chain) -> f64 {
    let steps = 4;
    let report = play::<VirtualMemory>(chain.setup(steps).unwrap(), false).unwrap_or_else(|f| panic!("{f}"));
    let last_two = report.marks_ns.iter().map(|marks| marks[marks.len() - 1] - marks[marks.len() - 3]);
    last_two.max().unwrap() as f64 / 2.0
}

#[test]
fn with_priority_a_step_takes_its_limit_and_what_is_committed() {
    for ranks in [2, 4, 8] {
        for megabits_per_s in [200, 600, 1000, 10_000] {
            let bytes_per_s = megabits_per_s * 125_000;
            let chain = chain(ranks, bytes_per_s, true);
            let (limit_ns, step_ns) = (chain.limit_ns(), step_ns(&chain));
            let ratio = limit_ns / step_ns;
            println!(
                "{ranks} ranks, {megabits_per_s} Mbit/s: limit {:.1} ms, simulated {:.1} ms, ratio {ratio:.3}",
                limit_ns / 1e6,
                step_ns / 1e6
            );
            // Below the scheduler lie the committed bytes of each connection, there and back.
            let committed =
                f64::from(ranks - 1) * (chain.links.committed_bytes_max as f64 + chain.slice_bytes as f64);
            let allowed_ns = 2.0 * committed / bytes_per_s as f64 * 1e9 + 2.0 * chain.links.delay_ns as f64;
            assert!(step_ns <= limit_ns * 1.02 + allowed_ns, "{ranks} ranks at {megabits_per_s} Mbit/s");
            // Shards differ by up to a slice, so a layer may cross the busiest card a little faster than the formula says.
            assert!(
                step_ns >= limit_ns * 0.97,
                "faster than physics: {ranks} ranks at {megabits_per_s} Mbit/s"
            );
        }
    }
}

#[test]
fn priority_is_faster_where_transfers_hide_under_the_forward_pass() {
    let (with, without) = (step_ns(&chain(4, 75_000_000, true)), step_ns(&chain(4, 75_000_000, false)));
    println!("with priority {:.1} ms, first in first out {:.1} ms", with / 1e6, without / 1e6);
    assert!(with < without * 0.97);
}

/// A backlog of 200 MB of the last layer at 1 Gbit/s, then one slice of the first: when is it back?
fn answer_ns(priority: bool) -> u64 {
    let layer = |parameters, backward_ns| Layer { forward_ns: 0, backward_ns, parameters };
    let chain = Chain {
        // The first layer's gradient exists 100 ms after the last one's.
        layers: vec![layer(50_000, 100 * MS), layer(50_000_000, 0)],
        ranks: 2,
        slice_bytes: 256 << 10,
        window_bytes: 16 << 20,
        priority,
        links: links(125_000_000),
    };
    let mut setup = chain.setup(1).unwrap();
    for program in &mut setup.programs {
        // A mark after the wait for the first layer.
        let wait = program.iter().position(|i| matches!(i, penstock_sim::program::Instruction::Wait { .. }));
        program.insert(wait.unwrap() + 1, penstock_sim::program::Instruction::Mark);
    }
    let report = play::<VirtualMemory>(setup, false).unwrap_or_else(|f| panic!("{f}"));
    report.marks_ns[0][1] - report.marks_ns[0][0] - 100 * MS
}

#[test]
fn with_priority_a_slice_overtakes_a_backlog() {
    let (with, without) = (answer_ns(true), answer_ns(false));
    println!(
        "behind 200 MB: {:.1} ms with priority, {:.1} ms first in first out",
        with as f64 / 1e6,
        without as f64 / 1e6
    );
    assert!(with < 25 * MS);
    assert!(without > 1000 * MS);
}

#[test]
fn large_models_on_many_nodes_cost_no_memory() {
    // VGG19-22K's 229M parameters on 32 nodes.
    let layers = (0..19).map(|i| Layer {
        forward_ns: 10 * MS,
        backward_ns: 20 * MS,
        parameters: if i < 16 { 1_250_000 } else { 69_700_000 },
    });
    let chain = Chain {
        layers: layers.collect(),
        ranks: 32,
        slice_bytes: 4 << 20,
        window_bytes: 64 << 20,
        priority: true,
        links: Links { segment_bytes: 256 << 10, committed_bytes_max: 1 << 20, ..links(5_000_000_000) },
    };
    let parameters: u64 = chain.layers.iter().map(|layer| layer.parameters).sum();
    assert!(parameters >= 229_000_000);
    let report = play::<VirtualMemory>(chain.setup(1).unwrap(), false).unwrap_or_else(|f| panic!("{f}"));
    let sent: u64 = report.sent_bytes.iter().sum();
    // Together the ranks send 2 (n-1) S, however the slices are dealt.
    assert_eq!(sent, 2 * 31 * 4 * parameters);
}

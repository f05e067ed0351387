//! Allreduce of one message that every rank holds whole: exact traffic of each algorithm, for any number of ranks.
//!
//! `elems` elements of `elem_bytes` each, `p` ranks. Where a message is cut, [`part_start`] says where.

use super::{Clients, Rates, Traffic};
use crate::parts::{ceil_log2, floor_log2, part_start};
use crate::way::Algorithm;

impl Algorithm {
    /// Traffic of one slice; its root or owner is at position 0.
    #[must_use]
    pub fn slice(self, elems: u64, elem_bytes: u64, p: u32) -> Traffic {
        match self {
            Self::Store | Self::Central => rooted(elems, elem_bytes, p),
            Self::Tree => tree(elems, elem_bytes, p),
            Self::Ring => ring(elems, elem_bytes, p),
            Self::Butterfly => butterfly(elems, elem_bytes, p),
        }
    }

    /// Traffic of a message in `slices` near-equal slices, and its seconds if it has the wire for itself.
    ///
    /// Slices have their owners in turn; all slices of [`Algorithm::Central`] have rank 0.
    #[must_use]
    pub fn message(self, elems: u64, elem_bytes: u64, p: u32, slices: u64, rates: &Rates) -> (Traffic, f64) {
        let slices = slices.clamp(1, elems.max(1));
        let largest = self.slice(part_start(elems, slices, 1), elem_bytes, p);
        let in_turn = if self == Self::Central { 1 } else { u64::from(p.max(1)) };
        let mut round = Traffic::none(p as usize);
        for root in 0..in_turn.min(slices) {
            round.join(&largest, root as usize);
        }
        // Slices of one size are alike: whole turns are counted at once.
        let mut all = Traffic::none(p as usize);
        let longer = elems % slices;
        for (count, first, slice_elems) in
            [(longer, 0, elems / slices + 1), (slices - longer, longer, elems / slices)]
        {
            self.join_many(&mut all, count, first, in_turn, slice_elems, elem_bytes);
        }
        (all.steps, all.path_bytes) = (largest.steps, largest.path_bytes);
        let seconds = rates.pipelined_s(&largest, &round, &all);
        (all, seconds)
    }

    /// Joins `count` slices of `elems`, the first of which has the root `first % in_turn`.
    fn join_many(self, all: &mut Traffic, count: u64, first: u64, in_turn: u64, elems: u64, elem_bytes: u64) {
        if count == 0 {
            return;
        }
        let slice = self.slice(elems, elem_bytes, all.sent.len() as u32);
        let summed_before = all.summed_bytes;
        for turn in 0..in_turn.min(count) {
            let times = (count - turn).div_ceil(in_turn);
            let mut slices_of_root = slice.clone();
            for bytes in slices_of_root.sent.iter_mut().chain(&mut slices_of_root.received) {
                *bytes *= times;
            }
            all.join(&slices_of_root, ((first + turn) % in_turn) as usize);
        }
        // Roots take turns at summing, too: the busiest has the ceiling of an even share, where shares are even.
        let total_summed = self.total_summed(&slice, elems * elem_bytes, all.sent.len() as u64) * count;
        all.summed_bytes = summed_before + total_summed.div_ceil(in_turn);
    }

    /// Bytes that all positions together add for one slice, or those of the busiest where a slice loads all alike.
    fn total_summed(self, slice: &Traffic, bytes: u64, p: u64) -> u64 {
        match self {
            Self::Central => slice.summed_bytes,
            // p contributions make one sum whoever adds: p - 1 additions of the whole slice.
            Self::Store | Self::Tree | Self::Ring | Self::Butterfly => bytes * p.saturating_sub(1),
        }
    }
}

/// A slice of the store, or a message of a central server, which is a rank like the others: all send theirs to the root,
/// the root answers all (P3, section 4.2; FireCaffe, equation 1 with one worker fewer, for the server is one).
///
/// Steps are two: the study's 2p latencies are those of messages that wait for each other, and ours do not.
#[must_use]
pub fn rooted(elems: u64, elem_bytes: u64, p: u32) -> Traffic {
    let (bytes, others) = (elems * elem_bytes, u64::from(p.saturating_sub(1)));
    let mut traffic = Traffic::none(p as usize);
    if p < 2 {
        return traffic;
    }
    for position in 0..p as usize {
        let messages = if position == 0 { others } else { 1 };
        traffic.sent[position] = messages * bytes;
        traffic.received[position] = messages * bytes;
    }
    traffic.steps = 2;
    traffic.path_bytes = 2 * others * bytes;
    traffic.path_summed_bytes = others * bytes;
    traffic.summed_bytes = others * bytes;
    traffic
}

/// The store, the message in one near-equal part per shard (Poseidon, Table 1 with P1 = P2, per direction).
///
/// * `servers`: ranks with a shard, the first ones; at least 1, at most `p`.
#[must_use]
pub fn store(elems: u64, elem_bytes: u64, p: u32, servers: u32) -> Traffic {
    Clients::workers(p, servers).store(elems, elem_bytes, servers)
}

/// The store on machines of its own: positions are `p` workers, then `servers` (Poseidon, Table 1, columns 1 and 2).
#[must_use]
pub fn store_dedicated(elems: u64, elem_bytes: u64, p: u32, servers: u32) -> Traffic {
    Clients::with_servers(p, servers).store(elems, elem_bytes, servers)
}

/// A binomial tree (FireCaffe, equation 2): position v, whose lowest set bit is 2^j, sends its sum to v - 2^j when it has
/// those of its children v + 2^i, i < j; the root is position 0. The result goes down the same way.
///
/// The longest chain of messages is that of the position with the most bits set, floor(lg p) each way. The root's
/// interface takes ceil(lg p) messages each way, one after the other. Both are the study's lg p for powers of two.
#[must_use]
pub fn tree(elems: u64, elem_bytes: u64, p: u32) -> Traffic {
    let bytes = elems * elem_bytes;
    let mut traffic = Traffic::none(p as usize);
    for position in 0..p {
        let messages = u64::from(children(position, p) + u32::from(position > 0));
        traffic.sent[position as usize] = messages * bytes;
        traffic.received[position as usize] = messages * bytes;
    }
    traffic.steps = 2 * floor_log2(p);
    traffic.path_bytes = 2 * u64::from(ceil_log2(p)) * bytes;
    traffic.path_summed_bytes = u64::from(ceil_log2(p)) * bytes;
    traffic.summed_bytes = u64::from(ceil_log2(p)) * bytes;
    traffic
}

/// How many children a position has in a binomial tree of `p`: positions v + 2^i below `p`, 2^i below v's lowest set bit.
fn children(position: u32, p: u32) -> u32 {
    let bits = if position == 0 { 32 } else { position.trailing_zeros() };
    (0..bits).take_while(|&bit| u64::from(position) + (1 << bit) < u64::from(p)).count() as u32
}

/// A ring (Patarasuk and Yuan; FireCaffe, equation 3): the message in p parts. In the reduce-scatter position r sends all
/// parts but its own, which ends summed at r; in the all-gather it passes on all parts but its successor's.
#[must_use]
pub fn ring(elems: u64, elem_bytes: u64, p: u32) -> Traffic {
    let (bytes, ranks) = (elems * elem_bytes, u64::from(p));
    if p < 2 {
        return Traffic::none(p as usize);
    }
    let part_bytes = |index: u64| {
        let index = index % ranks;
        (part_start(elems, ranks, index + 1) - part_start(elems, ranks, index)) * elem_bytes
    };
    let mut traffic = Traffic::none(p as usize);
    for position in 0..ranks {
        traffic.sent[position as usize] = 2 * bytes - part_bytes(position) - part_bytes(position + 1);
        traffic.received[position as usize] =
            2 * bytes - part_bytes(position + ranks - 1) - part_bytes(position);
    }
    traffic.steps = 2 * (p - 1);
    // In every step somebody sends the longest part.
    traffic.path_bytes = 2 * (ranks - 1) * part_bytes(0);
    traffic.path_summed_bytes = (ranks - 1) * part_bytes(0);
    traffic.summed_bytes = (0..ranks).map(|r| bytes - part_bytes(r + ranks - 1)).max().unwrap_or(0);
    traffic
}

/// A butterfly (Thakur, Rabenseifner, Gropp; FireCaffe, equation 4): recursive halving, then recursive doubling, among
/// the first q = 2^floor(lg p) positions, the message in q parts. Position q + i hands its whole message to position i
/// before, and is given the result after: two steps and n bytes more, where p is no power of two.
///
/// At level j = 1..lg q a position keeps the parts that share its first j bits, and sends the other half of what it had to
/// the partner whose j-th bit differs.
#[must_use]
pub fn butterfly(elems: u64, elem_bytes: u64, p: u32) -> Traffic {
    let bytes = elems * elem_bytes;
    let mut traffic = Traffic::none(p as usize);
    if p < 2 {
        return traffic;
    }
    let levels = floor_log2(p);
    let core = 1u32 << levels;
    let folded = p - core;
    let parts = |from: u32, to: u32| {
        let start = |index: u32| part_start(elems, u64::from(core), u64::from(index));
        (start(to) - start(from)) * elem_bytes
    };
    let mut summed_max = 0;
    for position in 0..core {
        let kept: u64 = (1..=levels)
            .map(|level| {
                let width = core >> level;
                let first = position / width * width;
                parts(first, first + width)
            })
            .sum();
        let given_away = bytes - parts(position, position + 1);
        let fold = if position < folded { bytes } else { 0 };
        // Halving sends what is given away and receives as much as is kept; doubling is its mirror image.
        traffic.sent[position as usize] = given_away + kept + fold;
        traffic.received[position as usize] = given_away + kept + fold;
        summed_max = summed_max.max(kept + fold);
    }
    for position in core..p {
        (traffic.sent[position as usize], traffic.received[position as usize]) = (bytes, bytes);
    }
    let longest_halves: u64 = (1..=levels).map(|level| parts(0, core >> level)).sum();
    let fold = if folded > 0 { bytes } else { 0 };
    traffic.steps = 2 * levels + if folded > 0 { 2 } else { 0 };
    traffic.path_bytes = 2 * (longest_halves + fold);
    traffic.path_summed_bytes = longest_halves + fold;
    traffic.summed_bytes = summed_max;
    traffic
}

#[cfg(test)]
mod tests {
    use super::super::paper;
    use super::*;
    use proptest::prelude::*;

    const RATES: Rates = Rates {
        bytes_per_s: 1e6,
        inside_bytes_per_s: 1e300,
        latency_s: 1e-3,
        summed_bytes_per_s: 1e300,
        product_flops_per_s: 1.0,
        gather_s: 0.0,
    };

    fn close(one: f64, other: f64) {
        assert!((one - other).abs() <= 1e-9 * other.abs(), "{one} is not {other}");
    }

    #[test]
    fn for_powers_of_two_it_is_the_studys_table_1() {
        for p in [2u32, 4, 8, 16] {
            let (elems, n, ranks) = (4800, 19200.0, f64::from(p));
            let seconds = |traffic: &Traffic| RATES.seconds(traffic);
            close(seconds(&ring(elems, 4, p)), paper::ring_s(n, ranks, 1e6, 1e-3));
            close(seconds(&butterfly(elems, 4, p)), paper::butterfly_s(n, ranks, 1e6, 1e-3));
            close(seconds(&tree(elems, 4, p)), paper::binomial_tree_s(n, ranks, 1e6, 1e-3));
            // The study's server is no worker and waits for one message after the other; ours has its own data already.
            let server = paper::parameter_server_s(n, ranks - 1.0, 1e6, 1e-3) - 2.0 * (ranks - 2.0) * 1e-3;
            close(seconds(&rooted(elems, 4, p)), server);
            close(seconds(&store(elems, 4, p, p)), 2.0 * (ranks - 1.0) / ranks * n / 1e6 + 2e-3);
        }
    }

    #[test]
    fn five_ranks_worked_out_by_hand() {
        // Parts of 7 elements over 5: 2 2 1 1 1; over 4: 2 2 2 1. One byte each.
        let found = ring(7, 1, 5);
        assert_eq!(found.sent, [10, 11, 12, 12, 11]); // 14 - own - next
        assert_eq!(found.received, [11, 10, 11, 12, 12]); // 14 - previous - own
        assert_eq!((found.steps, found.path_bytes), (8, 16));
        let found = butterfly(7, 1, 5);
        // Position 0 gives 5 away, keeps 4 then 2, and has position 4's 7; 1 and 2 likewise without; 3 gives 6, keeps 3, 1.
        assert_eq!(found.sent, [18, 11, 10, 10, 7]);
        assert_eq!(found.received, found.sent);
        assert_eq!((found.steps, found.path_bytes), (6, 2 * (7 + 4 + 2)));
        let found = tree(7, 1, 5);
        assert_eq!(found.sent, [21, 7, 14, 7, 7]); // 0 has children 1, 2, 4; 2 has child 3
        assert_eq!((found.steps, found.path_bytes), (4, 42));
        assert_eq!(rooted(7, 1, 5).received, [28, 7, 7, 7, 7]);
        // Shards of 2 2 1 1 1: 7 - own + 4 own.
        assert_eq!(store(7, 1, 5, 5).sent, [13, 13, 10, 10, 10]);
        assert_eq!(store(7, 1, 5, 2).sent, [19, 16, 7, 7, 7]); // shards of 4 and 3
        assert_eq!(store_dedicated(7, 1, 5, 2).sent, [7, 7, 7, 7, 7, 20, 15]);
        assert_eq!(store_dedicated(7, 1, 5, 2).path_bytes, 40);
    }

    #[test]
    fn poseidons_store_in_numbers() {
        // Table 1: a node that is worker and server sends and receives 2 MN (P1 + P2 - 2) / P2 numbers.
        let found = store(4096 * 4096, 1, 8, 8);
        let fc = paper::FullyConnected {
            width: 4096,
            height: 4096,
            rows: 32,
            workers: 8,
            clients: 8,
            servers: 8,
            apart: false,
        };
        assert_eq!(found.busiest_node_bytes() as f64, fc.store_both());
        let fewer = store(4096 * 4096, 1, 8, 2);
        assert_eq!(
            fewer.busiest_node_bytes() as f64,
            paper::FullyConnected { servers: 2, ..fc }.store_both()
        );
        let dedicated = store_dedicated(4096 * 4096, 1, 8, 2);
        assert_eq!((dedicated.sent[0] + dedicated.received[0]) as f64, fc.store_worker());
        assert_eq!(
            (dedicated.sent[8] + dedicated.received[8]) as f64,
            paper::FullyConnected { servers: 2, ..fc }.store_server()
        );
    }

    #[test]
    fn in_slices_the_owners_share_the_load() {
        let (elems, p) = (1 << 20, 4);
        let bytes = f64::from(4 << 20);
        let seconds = |algorithm: Algorithm, slices| algorithm.message(elems, 4, p, slices, &RATES).1;
        close(seconds(Algorithm::Store, 1), 6.0 * bytes / 1e6 + 2e-3);
        close(seconds(Algorithm::Store, 4), 1.5 * bytes / 1e6 + 2e-3);
        close(seconds(Algorithm::Store, 64), 1.5 * bytes / 1e6 + 2e-3);
        close(seconds(Algorithm::Tree, 1), 4.0 * bytes / 1e6 + 4e-3);
        close(seconds(Algorithm::Tree, 64), 1.5 * bytes / 1e6 + 4e-3);
        close(seconds(Algorithm::Ring, 64), 1.5 * bytes / 1e6 + 6e-3);
        close(seconds(Algorithm::Butterfly, 64), 1.5 * bytes / 1e6 + 4e-3);
        // Pushes of later slices pass answers of earlier ones: but for the last answer all is one direction.
        close(seconds(Algorithm::Central, 64), 3.0 * bytes * 65.0 / 64.0 / 1e6 + 2e-3);
    }

    #[test]
    fn sums_show_where_they_are_slower_than_the_wire() {
        let slow = Rates { summed_bytes_per_s: 1e5, ..RATES };
        let (_, seconds) = Algorithm::Store.message(4000, 1, 4, 4, &slow);
        // Each owner adds 3 x 1000 bytes once, and nothing hides that; the wire carries 6000 bytes.
        close(seconds, 2e-3 + 0.03 + 0.006);
        let (_, seconds) = Algorithm::Store.message(16000, 1, 4, 16, &slow);
        close(seconds, 2e-3 + 0.03 + 0.09); // of 12 x 1000 bytes per owner the first 3 are not hidden
    }

    proptest! {
        #[test]
        fn what_is_sent_is_received_and_one_rank_is_silent(
            elems in 0u64..5000, elem_bytes in 1u64..9, p in 1u32..40, servers in 1u32..40, slices in 1u64..50,
        ) {
            let messages = Algorithm::ALL.map(|a| a.message(elems, elem_bytes, p, slices, &RATES).0);
            let singles = Algorithm::ALL.map(|a| a.slice(elems, elem_bytes, p));
            let stores = [store(elems, elem_bytes, p, servers), store_dedicated(elems, elem_bytes, p, servers)];
            for traffic in messages.iter().chain(&singles).chain(&stores) {
                prop_assert_eq!(traffic.sent.iter().sum::<u64>(), traffic.received.iter().sum::<u64>());
            }
            for traffic in messages.iter().chain(&singles) {
                // No allreduce moves less: p - 1 contributions to somewhere, p - 1 results back.
                prop_assert!(traffic.total_bytes() >= 2 * u64::from(p - 1) * elems * elem_bytes);
                prop_assert!(p > 1 || *traffic == Traffic::none(1));
            }
        }

        #[test]
        fn a_message_is_the_join_of_its_slices(elems in 1u64..3000, p in 1u32..18, slices in 1u64..60) {
            for algorithm in Algorithm::ALL {
                let (message, _) = algorithm.message(elems, 4, p, slices, &RATES);
                let count = slices.min(elems);
                let mut joined = Traffic::none(p as usize);
                for index in 0..count {
                    let length = part_start(elems, count, index + 1) - part_start(elems, count, index);
                    let root = if algorithm == Algorithm::Central { 0 } else { index % u64::from(p) };
                    joined.join(&algorithm.slice(length, 4, p), root as usize);
                }
                prop_assert_eq!(&message.sent, &joined.sent);
                prop_assert_eq!(&message.received, &joined.received);
            }
        }
    }
}

//! Schemes that send what a gradient is made of instead of the gradient: exact, and smaller only while rows are few.

use super::{Hosts, Traffic};

/// Sufficient factors or (index, row) pairs: every rank sends its rows to every other (Poseidon, section 3.2, figure 2b).
///
/// * `rows`: of each rank: K of a linear layer, or the merged rows of an embedding.
/// * `row_bytes`: (M + N) e of an M x N linear layer with elements of e bytes, its bias included; index and row of a pair.
/// * `hosts`: where these ranks are. Each row goes to every rank of another host.
#[must_use]
pub fn broadcast(rows: &[u64], row_bytes: u64, hosts: &Hosts) -> Traffic {
    let (ranks, all_rows) = (rows.len() as u64, rows.iter().sum::<u64>());
    let rows_on = hosts.sums(rows);
    let mut traffic = Traffic::none(hosts.count());
    for (host, rows_here) in rows_on.iter().enumerate() {
        let here = hosts.ranks_of(host);
        traffic.sent[host] = (ranks - here) * rows_here * row_bytes;
        traffic.received[host] = here * (all_rows - rows_here) * row_bytes;
    }
    for (rank, own_rows) in rows.iter().enumerate() {
        let host = hosts.of(rank);
        let (sent, received) = ((hosts.ranks_of(host) - 1) * own_rows, rows_on[host] - own_rows);
        traffic.inside_bytes = traffic.inside_bytes.max(sent.max(received) * row_bytes);
    }
    traffic.steps = u32::from(ranks > 1);
    traffic.path_bytes = traffic.busiest_direction_bytes();
    traffic.inside_path_bytes = traffic.inside_bytes;
    traffic
}

/// The same where workers sum in groups (`exchange/relay.rs`): members send their rows to their heads, each head those of its group to
/// each other head, and all others' to its members. So a row goes to each other group once.
///
/// * `rows`, `row_bytes`, `hosts`: as in [`broadcast`].
/// * `groups`: ranks, each in one; the first is the head.
#[must_use]
pub fn relayed(rows: &[u64], row_bytes: u64, groups: &[Vec<u32>], hosts: &Hosts) -> Traffic {
    let all_rows = rows.iter().sum::<u64>();
    let mut traffic = Traffic::none(hosts.count());
    let mut inside = vec![(0, 0); rows.len()];
    let mut send = |from: u32, to: u32, rows: u64| {
        let (from, to, bytes) = (from as usize, to as usize, rows * row_bytes);
        if hosts.of(from) == hosts.of(to) {
            inside[from].0 += bytes;
            inside[to].1 += bytes;
        } else {
            traffic.sent[hosts.of(from)] += bytes;
            traffic.received[hosts.of(to)] += bytes;
        }
    };
    for group in groups {
        let head = group[0];
        for member in &group[1..] {
            let own = rows[*member as usize];
            send(*member, head, own);
            send(head, *member, all_rows - own);
        }
        let of_group = group.iter().map(|rank| rows[*rank as usize]).sum();
        for other in groups.iter().map(|group| group[0]).filter(|other| *other != head) {
            send(head, other, of_group);
        }
    }
    traffic.inside_bytes = inside.iter().map(|(sent, received)| *sent.max(received)).max().unwrap_or(0);
    // A head has all before it gives any.
    traffic.inside_path_bytes = inside.iter().map(|(sent, received)| sent + received).max().unwrap_or(0);
    traffic.path_bytes = traffic.busiest_direction_bytes();
    let members = groups.iter().any(|group| group.len() > 1);
    traffic.steps = 2 * u32::from(members) + u32::from(groups.len() > 1);
    traffic
}

/// Project Adam's scheme: factors up to the layer's owner, at position 0, and the full matrix down to all (Poseidon,
/// Table 1, row 3). The owner is where the load is.
///
/// * `rows`, `row_bytes`, `hosts`: as in [`broadcast`].
/// * `dense_bytes`: the matrix, and its bias.
#[must_use]
pub fn adam(rows: &[u64], row_bytes: u64, dense_bytes: u64, hosts: &Hosts) -> Traffic {
    let mut traffic = Traffic::none(hosts.count());
    let mut inside = (0, 0);
    for (rank, own_rows) in rows.iter().enumerate().skip(1) {
        let host = hosts.of(rank);
        if host == hosts.of(0) {
            inside = (inside.0 + dense_bytes, inside.1 + own_rows * row_bytes);
            continue;
        }
        traffic.sent[host] += own_rows * row_bytes;
        traffic.received[host] += dense_bytes;
        traffic.sent[0] += dense_bytes;
        traffic.received[0] += own_rows * row_bytes;
    }
    traffic.steps = if rows.len() > 1 { 2 } else { 0 };
    traffic.path_bytes = traffic.sent.first().map_or(0, |sent| sent + traffic.received[0]);
    traffic.inside_bytes = inside.0.max(inside.1);
    traffic.inside_path_bytes = inside.0 + inside.1;
    traffic
}

/// Floating point operations of one rank to rebuild an M x N gradient, beyond those that the dense path computes anyway:
/// the rows of the others, 2 MN for each.
#[must_use]
pub fn rebuild_flops(rows: &[u64], width: u64, height: u64) -> f64 {
    // The own product is computed once in either way. The rank with the fewest rows rebuilds the most of others.
    let other_rows = rows.iter().sum::<u64>() - rows.iter().min().copied().unwrap_or(0);
    2.0 * other_rows as f64 * width as f64 * height as f64
}

#[cfg(test)]
mod tests {
    use super::super::paper::FullyConnected;
    use super::*;

    #[test]
    fn with_equal_rows_it_is_what_poseidon_counts() {
        let traffic = broadcast(&[32; 8], (4096 + 4096) * 4, &Hosts::apart(8));
        let fc = FullyConnected {
            width: 4096,
            height: 4096,
            rows: 32,
            workers: 8,
            clients: 8,
            servers: 8,
            apart: false,
        };
        assert_eq!(traffic.busiest_node_bytes() as f64, 4.0 * fc.factors_worker());
        assert_eq!(traffic.busiest_direction_bytes(), 7 * 32 * 8192 * 4);
        assert_eq!(traffic.steps, 1);
        let owner = adam(&[32; 8], 8192 * 4, 4096 * 4096 * 4, &Hosts::apart(8));
        assert_eq!(owner.busiest_node_bytes() as f64, 4.0 * fc.adam_both());
        assert_eq!((owner.sent[3] + owner.received[3]) as f64, 4.0 * fc.adam_worker());
    }

    #[test]
    fn uneven_rows_count_for_those_who_have_them() {
        let traffic = broadcast(&[1, 0, 5], 10, &Hosts::apart(3));
        assert_eq!(traffic.sent, [20, 0, 100]);
        assert_eq!(traffic.received, [50, 60, 10]);
        assert_eq!(rebuild_flops(&[1, 0, 5], 3, 7), 2.0 * 6.0 * 21.0);
        let to_owner = adam(&[1, 0, 5], 10, 1000, &Hosts::apart(3));
        assert_eq!(to_owner.sent, [2000, 0, 50]);
        assert_eq!(to_owner.received, [50, 1000, 1000]);
        assert_eq!(to_owner.path_bytes, 2050);
    }

    #[test]
    fn heads_send_each_row_once_to_each_other_group() {
        let (groups, hosts) = (vec![vec![0, 1, 2], vec![3, 4, 5]], Hosts::numbered(&[0, 0, 0, 1, 1, 1]));
        let rows = [1, 2, 3, 10, 20, 30];
        let relayed_here = relayed(&rows, 4, &groups, &hosts);
        assert_eq!((&relayed_here.sent[..], &relayed_here.received[..]), (&[24, 240][..], &[240, 24][..]));
        // The head of the first group gives 64 and 63 rows, the other's 46 and 36.
        assert_eq!((relayed_here.inside_bytes, relayed_here.steps), (4 * 127, 3));
        let without = broadcast(&rows, 4, &hosts);
        assert_eq!(without.sent, [3 * 24, 3 * 240], "to every rank of the other host");
        let alone: Vec<Vec<u32>> = (0..6).map(|rank| vec![rank]).collect();
        let apart = Hosts::apart(6);
        assert_eq!(relayed(&rows, 4, &alone, &apart), broadcast(&rows, 4, &apart));
    }

    #[test]
    fn one_rank_sends_nothing() {
        assert_eq!(broadcast(&[32], 100, &Hosts::apart(1)), Traffic::none(1));
        assert_eq!(adam(&[32], 100, 100, &Hosts::apart(1)), Traffic::none(1));
        assert_eq!(rebuild_flops(&[32], 10, 10), 0.0);
        assert_eq!(broadcast(&[], 100, &Hosts::apart(0)), Traffic::none(0));
    }
}

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
    let mut sends = Sends::new(rows.len(), hosts);
    for group in groups {
        let head = group[0];
        for member in &group[1..] {
            let own = rows[*member as usize];
            sends.add(*member, head, own * row_bytes);
            sends.add(head, *member, (all_rows - own) * row_bytes);
        }
        for other in heads(groups).filter(|other| *other != head) {
            sends.add(head, other, of_group(rows, group) * row_bytes);
        }
    }
    Traffic { steps: 2 * u32::from(has_members(groups)) + u32::from(groups.len() > 1), ..sends.traffic() }
}

/// Project Adam's scheme: factors up to the layer's owner, and the full matrix down to all (Poseidon, Table 1, row 3). The
/// owner is where the load is. It has all factors before it answers. Between groups go, up, the factors of one's members to
/// the owner, and down one matrix.
///
/// * `rows`, `row_bytes`, `hosts`: as in [`broadcast`].
/// * `dense_bytes`: the matrix, and its bias.
/// * `groups`: as in [`relayed`]; of ranks that do not sum in groups each is one. The head of the first is the owner.
#[must_use]
pub fn adam(rows: &[u64], row_bytes: u64, dense_bytes: u64, groups: &[Vec<u32>], hosts: &Hosts) -> Traffic {
    let mut sends = Sends::new(rows.len(), hosts);
    let owner = groups[0][0];
    for group in groups {
        let head = group[0];
        for member in &group[1..] {
            sends.add(*member, head, rows[*member as usize] * row_bytes);
            sends.add(head, *member, dense_bytes);
        }
        if head != owner {
            sends.add(head, owner, of_group(rows, group) * row_bytes);
            sends.add(owner, head, dense_bytes);
        }
    }
    let traffic = sends.traffic();
    let host = hosts.of(owner as usize);
    Traffic {
        steps: 2 * u32::from(has_members(groups)) + 2 * u32::from(groups.len() > 1),
        path_bytes: traffic.sent[host] + traffic.received[host],
        ..traffic
    }
}

/// What goes from rank to rank.
struct Sends<'a> {
    hosts: &'a Hosts,
    /// Between hosts.
    traffic: Traffic,
    /// Inside its host, by rank: sent and received bytes.
    inside: Vec<(u64, u64)>,
}

impl<'a> Sends<'a> {
    fn new(ranks: usize, hosts: &'a Hosts) -> Self {
        Self { hosts, traffic: Traffic::none(hosts.count()), inside: vec![(0, 0); ranks] }
    }

    fn add(&mut self, from: u32, to: u32, bytes: u64) {
        let (from, to) = (from as usize, to as usize);
        if self.hosts.of(from) == self.hosts.of(to) {
            self.inside[from].0 += bytes;
            self.inside[to].1 += bytes;
        } else {
            self.traffic.sent[self.hosts.of(from)] += bytes;
            self.traffic.received[self.hosts.of(to)] += bytes;
        }
    }

    /// All of it, without steps. Inside a host a rank has all that it gets before it gives any.
    fn traffic(self) -> Traffic {
        let most = |of: fn(&(u64, u64)) -> u64| self.inside.iter().map(of).max().unwrap_or(0);
        Traffic {
            inside_bytes: most(|(sent, received)| *sent.max(received)),
            inside_path_bytes: most(|(sent, received)| sent + received),
            path_bytes: self.traffic.busiest_direction_bytes(),
            ..self.traffic
        }
    }
}

fn heads(groups: &[Vec<u32>]) -> impl Iterator<Item = u32> {
    groups.iter().map(|group| group[0])
}

fn has_members(groups: &[Vec<u32>]) -> bool {
    groups.iter().any(|group| group.len() > 1)
}

fn of_group(rows: &[u64], group: &[u32]) -> u64 {
    group.iter().map(|rank| rows[*rank as usize]).sum()
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

    fn each(ranks: u32) -> Vec<Vec<u32>> {
        (0..ranks).map(|rank| vec![rank]).collect()
    }

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
        let owner = adam(&[32; 8], 8192 * 4, 4096 * 4096 * 4, &each(8), &Hosts::apart(8));
        assert_eq!(owner.busiest_node_bytes() as f64, 4.0 * fc.adam_both());
        assert_eq!((owner.sent[3] + owner.received[3]) as f64, 4.0 * fc.adam_worker());
    }

    #[test]
    fn uneven_rows_count_for_those_who_have_them() {
        let traffic = broadcast(&[1, 0, 5], 10, &Hosts::apart(3));
        assert_eq!(traffic.sent, [20, 0, 100]);
        assert_eq!(traffic.received, [50, 60, 10]);
        assert_eq!(rebuild_flops(&[1, 0, 5], 3, 7), 2.0 * 6.0 * 21.0);
        let to_owner = adam(&[1, 0, 5], 10, 1000, &each(3), &Hosts::apart(3));
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
        let apart = Hosts::apart(6);
        assert_eq!(relayed(&rows, 4, &each(6), &apart), broadcast(&rows, 4, &apart));
    }

    #[test]
    fn in_groups_the_owner_gets_each_row_once_and_gives_each_other_group_one_matrix() {
        let (groups, hosts) = (vec![vec![0, 1, 2], vec![3, 4, 5]], Hosts::numbered(&[0, 0, 0, 1, 1, 1]));
        let rows = [1, 2, 3, 10, 20, 30];
        let traffic = adam(&rows, 4, 1000, &groups, &hosts);
        assert_eq!((&traffic.sent[..], &traffic.received[..]), (&[1000, 240][..], &[240, 1000][..]));
        assert_eq!((traffic.path_bytes, traffic.inside_bytes, traffic.steps), (1240, 2000, 4));
        assert_eq!(
            adam(&rows, 4, 1000, &each(6), &hosts).sent,
            [3000, 240],
            "to every rank of the other host"
        );
    }

    #[test]
    fn one_rank_sends_nothing() {
        assert_eq!(broadcast(&[32], 100, &Hosts::apart(1)), Traffic::none(1));
        assert_eq!(adam(&[32], 100, 100, &each(1), &Hosts::apart(1)), Traffic::none(1));
        assert_eq!(rebuild_flops(&[32], 10, 10), 0.0);
        assert_eq!(broadcast(&[], 100, &Hosts::apart(0)), Traffic::none(0));
    }
}

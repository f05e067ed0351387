//! The store's clients and owners, and what it moves between them: with workers that sum in groups first, owners apart from
//! them, and ranks that share hosts.

use super::{Hosts, Traffic};
use crate::parts::part_start;

/// Who contributes for whom, who owns, and where they are: a group is one client (MXNET-MPI, section 3). Ranks are workers first, then servers apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clients {
    /// By worker: the head of its group; itself where it contributes by itself.
    heads: Vec<usize>,
    /// Those who own slices, in turn. Of workers in groups these are heads.
    owners: Vec<usize>,
    hosts: Hosts,
}

impl Clients {
    /// Workers of which the first `owners` own: at least 1, at most all.
    #[must_use]
    pub fn workers(workers: u32, owners: u32) -> Self {
        let owners = owners.clamp(1, workers.max(1));
        Self {
            heads: (0..workers as usize).collect(),
            owners: (0..owners as usize).collect(),
            hosts: Hosts::apart(workers.max(1)),
        }
    }

    /// Workers, and servers that own and do not contribute; at least one.
    #[must_use]
    pub fn with_servers(workers: u32, servers: u32) -> Self {
        let servers = servers.max(1);
        Self {
            heads: (0..workers as usize).collect(),
            owners: (workers as usize..(workers + servers) as usize).collect(),
            hosts: Hosts::apart(workers + servers),
        }
    }

    /// The same with workers in groups, each of which has every worker once. Their first ranks own, unless servers do.
    #[must_use]
    pub fn in_groups(mut self, groups: &[Vec<u32>]) -> Self {
        if groups.is_empty() {
            return self;
        }
        let head = |group: &Vec<u32>| group.iter().min().map_or(0, |rank| *rank as usize);
        for group in groups {
            for rank in group {
                self.heads[*rank as usize] = head(group);
            }
        }
        if self.owners.first().is_none_or(|owner| *owner < self.heads.len()) {
            self.owners = groups.iter().map(head).collect();
            self.owners.sort_unstable();
        }
        self
    }

    /// The same on these hosts, which have all ranks.
    #[must_use]
    pub fn on(self, hosts: Hosts) -> Self {
        Self { hosts, ..self }
    }

    /// How many own slices.
    #[must_use]
    pub fn owners(&self) -> u32 {
        self.owners.len() as u32
    }

    /// A message in one near-equal part for each of the first `owners` owners (Poseidon, Table 1, by direction, with P1 the
    /// groups and P2 the owners; MXNET-MPI, sections 3 and 4). Positions are hosts.
    ///
    /// For n bytes, C groups and S owners: a member moves n each way to and from its head, which moves n for each of them. What a
    /// head moves between groups is what a worker does in a store of C workers: with servers n, and a server C n / S.
    #[must_use]
    pub fn store(&self, elems: u64, elem_bytes: u64, owners: u32) -> Traffic {
        let Self { heads, hosts, .. } = self;
        let bytes = elems * elem_bytes;
        let shared = &self.owners[..self.owners.len().min(owners.max(1) as usize)];
        let start = |index: usize| part_start(elems, shared.len() as u64, index as u64) * elem_bytes;
        let ranks = heads.len().max(self.owners.iter().max().map_or(0, |owner| owner + 1));
        let mut owned = vec![0; ranks];
        for (index, owner) in shared.iter().enumerate() {
            owned[*owner] = start(index + 1) - start(index);
        }
        let members = |rank: usize| heads.get(rank).is_some_and(|head| *head != rank);
        let leads: Vec<u64> =
            (0..ranks).map(|rank| u64::from(heads.get(rank).is_some_and(|head| *head == rank))).collect();
        let (leads_on, owned_on) = (hosts.sums(&leads), hosts.sums(&owned));
        let all_lead: u64 = leads.iter().sum();

        let mut traffic = Traffic::none(hosts.count());
        let mut inside = vec![0; ranks];
        // Members and heads, one way.
        let (mut up_out, mut up_in) = (vec![0; hosts.count()], vec![0; hosts.count()]);
        let (mut up_inside, mut group_of) = (vec![0; ranks], vec![1; ranks]);
        for (rank, head) in heads.iter().enumerate().filter(|(rank, _)| members(*rank)) {
            group_of[*head] += 1;
            if hosts.of(rank) == hosts.of(*head) {
                up_inside[*head] += bytes;
                inside[rank] += bytes;
            } else {
                up_out[hosts.of(rank)] += bytes;
                up_in[hosts.of(*head)] += bytes;
            }
        }
        let (mut push_path, mut push_inside) = (0, 0);
        for host in 0..hosts.count() {
            // Pushes to owners elsewhere, and pushes of others, which are answered: both ways the same.
            let pushed = leads_on[host] * (bytes - owned_on[host]);
            let taken = owned_on[host] * (all_lead - leads_on[host]);
            traffic.sent[host] = pushed + taken + up_out[host] + up_in[host];
            push_path = push_path.max(pushed).max(taken);
        }
        traffic.received.clone_from(&traffic.sent);
        for rank in 0..ranks {
            let host = hosts.of(rank);
            let pushed = leads[rank] * (owned_on[host] - owned[rank]);
            let taken = owned[rank] * (leads_on[host] - leads[rank]);
            inside[rank] += pushed + taken + up_inside[rank];
            push_inside = push_inside.max(pushed).max(taken);
        }
        let most = |counts: &[u64]| counts.iter().copied().max().unwrap_or(0);
        traffic.inside_bytes = most(&inside);
        traffic.path_bytes = 2 * (most(&up_out).max(most(&up_in)) + push_path);
        traffic.inside_path_bytes = 2 * (most(&up_inside) + push_inside);
        traffic.steps = self.steps(&owned, &group_of);
        // So many contributions make one sum: a group's at its head, and those of all groups at the owner.
        let summed_inside = |rank: usize| leads[rank] * (group_of[rank] - 1) * bytes;
        let summed_at = |rank: usize| all_lead.saturating_sub(1) * owned[rank];
        let of_ranks = |summed: &dyn Fn(usize) -> u64| (0..ranks).map(summed).max().unwrap_or(0);
        traffic.path_summed_bytes = of_ranks(&summed_inside) + of_ranks(&summed_at);
        traffic.summed_bytes = of_ranks(&|rank| summed_inside(rank) + summed_at(rank));
        traffic
    }

    /// The longest chain: to a head, to an owner that is another, and back.
    fn steps(&self, owned: &[u64], group_of: &[u64]) -> u32 {
        let own: Vec<usize> = self.owners.iter().copied().filter(|owner| owned[*owner] > 0).collect();
        if own.is_empty() {
            return 0;
        }
        let steps_of = |head: usize| {
            let (to_head, to_owner) = (group_of[head] > 1, own.iter().any(|owner| *owner != head));
            2 * (u32::from(to_head) + u32::from(to_owner))
        };
        self.heads.iter().map(|head| steps_of(*head)).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::paper::FullyConnected;
    use super::*;

    #[test]
    fn groups_move_what_the_documents_promise() {
        let (n, groups) = (1200, [vec![0, 1, 2], vec![3, 4, 5]]);
        // Heads move (m-1) n inside, and 2 (C-1)/C n as two workers.
        let alike = Clients::workers(6, 6).in_groups(&groups).store(n, 1, 6);
        assert_eq!(alike.sent, [2 * n + n, n, n, 2 * n + n, n, n]);
        assert_eq!((alike.steps, alike.path_bytes), (4, 2 * (2 * n + n / 2)));
        assert_eq!((alike.summed_bytes, alike.path_summed_bytes), (2 * n + n / 2, 2 * n + n / 2));
        // With servers n, and a server C n / S.
        let apart = Clients::with_servers(6, 4).in_groups(&groups).store(n, 1, 4);
        assert_eq!(apart.sent, [3 * n, n, n, 3 * n, n, n, n / 2, n / 2, n / 2, n / 2]);
        // On two hosts only what is between groups leaves them.
        let hosts = Hosts::numbered(&[0, 0, 0, 1, 1, 1]);
        let on_hosts = Clients::workers(6, 6).in_groups(&groups).on(hosts.clone()).store(n, 1, 6);
        assert_eq!((on_hosts.sent.as_slice(), on_hosts.inside_bytes), ([n, n].as_slice(), 2 * n));
        assert_eq!((on_hosts.path_bytes, on_hosts.inside_path_bytes), (n, 4 * n));
        // Without groups m times as much: 2 m (C-1)/C n. Inside a rank meets two others, a sixth of all with each.
        let without = Clients::workers(6, 6).on(hosts).store(n, 1, 6);
        assert_eq!((without.sent.as_slice(), without.inside_bytes), ([3 * n, 3 * n].as_slice(), 2 * n / 3));
        // Groups across hosts do not help.
        let across = Clients::workers(6, 6).in_groups(&[vec![0, 3], vec![1, 4], vec![2, 5]]);
        let across = across.on(Hosts::numbered(&[0, 0, 0, 1, 1, 1])).store(n, 1, 6);
        assert_eq!(across.sent, [3 * n, 3 * n]);
    }

    #[test]
    fn one_group_of_all_has_no_store_and_groups_of_one_are_none() {
        let one = Clients::workers(4, 4).in_groups(&[vec![0, 1, 2, 3]]).store(10, 4, 4);
        assert_eq!((one.sent.as_slice(), one.steps), ([120, 40, 40, 40].as_slice(), 2));
        let alone: Vec<Vec<u32>> = (0..4).map(|rank| vec![rank]).collect();
        let plain = Clients::workers(4, 4);
        assert_eq!(plain.clone().in_groups(&alone), plain);
        assert_eq!(plain.clone().in_groups(&[]), plain);
        assert_eq!(Clients::workers(4, 4).store(0, 4, 4), Traffic::none(4));
    }

    #[test]
    fn poseidons_table_1_with_groups_as_its_workers() {
        let elems = 4096 * 4096;
        let groups: Vec<Vec<u32>> = (0..4).map(|group| vec![2 * group, 2 * group + 1]).collect();
        let hosts = |servers: u32| {
            Hosts::numbered(&[&[0, 0, 1, 1, 2, 2, 3, 3], &[4, 5][..servers as usize]].concat())
        };
        let fc = FullyConnected {
            width: 4096,
            height: 4096,
            rows: 32,
            workers: 8,
            clients: 4,
            servers: 4,
            apart: false,
        };
        let both = Clients::workers(8, 8).in_groups(&groups).on(hosts(0)).store(elems, 1, 8);
        assert_eq!(both.busiest_node_bytes() as f64, fc.store_both());
        let apart = Clients::with_servers(8, 2).in_groups(&groups).on(hosts(2)).store(elems, 1, 2);
        let fc = FullyConnected { servers: 2, apart: true, ..fc };
        assert_eq!((apart.sent[0] + apart.received[0]) as f64, fc.store_worker());
        assert_eq!((apart.sent[4] + apart.received[4]) as f64, fc.store_server());
        assert_eq!(apart.busiest_node_bytes() as f64, fc.store());
    }
}

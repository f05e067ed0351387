//! Which workers shall sum among themselves before the store does, and why: the choice behind `groups="auto"`.
//!
//! Each worker by itself, those of a host together, or those of a host in parts: one head has a host's line to itself, and
//! moves (m-1) n inside, each way; two heads move half of that each, and twice as much through the line. Seconds decide.
//!
//! Omitted: groups across hosts, which spare no interface anything, and parts of different sizes on hosts that are alike.

use super::MARGIN;
use super::cluster::Cluster;
use super::reason::Seconds;
use crate::cost::Rates;
use crate::parts::part_start;
use std::fmt;

/// Of gradients: by what groupings are compared, before there is a model. More take longer by the same factor.
pub const GROUPS_BYTES: u64 = 16 << 20;

/// Groups that were chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Grouping {
    /// Workers by group, ascending, in the order of their first ones; none where each worker is alone.
    pub groups: Vec<Vec<u32>>,
    /// Why.
    pub reason: GroupsReason,
}

/// Why workers sum among themselves, or do not. `Display` says it to the user.
#[derive(Debug, Clone, PartialEq)]
pub enum GroupsReason {
    /// None: there is no line that they would spare.
    OneHost,
    /// None: no worker has another one on its host.
    NoneShared,
    /// As these seconds say.
    Compared {
        /// Whether there are groups.
        grouped: bool,
        /// Groups on a host, in the best grouping.
        on_a_host: u32,
        /// Seconds of the store with it.
        seconds: f64,
        /// And without groups.
        without_s: f64,
        /// By these.
        rates: Rates,
    },
}

impl GroupsReason {
    /// In one word, for programs and tests.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::OneHost => "one-host",
            Self::NoneShared => "none-shared",
            Self::Compared { grouped: true, .. } => "faster",
            Self::Compared { .. } => "not-faster",
        }
    }
}

impl fmt::Display for GroupsReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (grouped, on_a_host, seconds, without_s, rates) = match self {
            Self::OneHost => {
                return f.write_str("none: all ranks are on one host, and there is no line to spare");
            }
            Self::NoneShared => return f.write_str("none: no two workers share a host"),
            Self::Compared { grouped, on_a_host, seconds, without_s, rates } => {
                (*grouped, *on_a_host, Seconds(*seconds), Seconds(*without_s), rates)
            }
        };
        let by = if on_a_host == 1 { "by host".into() } else { format!("by host in {on_a_host} parts") };
        let megabytes = GROUPS_BYTES as f64 / 1e6;
        if grouped {
            write!(f, "{by}: {megabytes:.1} MB through the store take {seconds} instead of {without_s}")?;
        } else {
            let gain = MARGIN * 100.0;
            write!(
                f,
                "none: {megabytes:.1} MB through the store would take {seconds} {by} instead of {without_s}"
            )?;
            write!(f, ", and groups must gain {gain} %")?;
        }
        let mbit = |bytes_per_s: f64| bytes_per_s * 8e-6;
        let (line, inside) = (mbit(rates.bytes_per_s), mbit(rates.inside_bytes_per_s));
        write!(f, ", at {line:.0} Mbit/s between hosts and {inside:.0} inside")
    }
}

/// Chooses groups: those with which the store is fastest, if they save [`MARGIN`] of what it takes without. Of groupings the
/// coarser one stays, which spares the line more, unless the finer saves as much again.
///
/// * `cluster`: its own groups are left aside.
#[must_use]
pub fn best_groups(cluster: &Cluster) -> Grouping {
    let none = |reason| Grouping { groups: Vec::new(), reason };
    if cluster.hosts.is_empty() {
        return none(GroupsReason::NoneShared);
    }
    if cluster.hosts.iter().all(|host| *host == cluster.hosts[0]) {
        return none(GroupsReason::OneHost);
    }
    let on_hosts = by_host(&cluster.hosts[..cluster.workers as usize]);
    let most = on_hosts.iter().map(Vec::len).max().unwrap_or(0);
    let in_parts = (0..u32::BITS).map(|power| 1 << power).take_while(|count| (*count as usize) < most);
    let candidates = in_parts.map(|count| (count, parted(&on_hosts, count)));
    let better = |seconds: f64, than_s: f64| seconds <= than_s * (1.0 - MARGIN);
    let mut best: Option<(u32, Vec<Vec<u32>>, f64)> = None;
    for (count, groups) in candidates {
        let seconds = store_s(cluster, &groups);
        if best.as_ref().is_none_or(|(_, _, best_s)| better(seconds, *best_s)) {
            best = Some((count, groups, seconds));
        }
    }
    let Some((on_a_host, groups, seconds)) = best else { return none(GroupsReason::NoneShared) };
    let without_s = store_s(cluster, &[]);
    let grouped = better(seconds, without_s);
    let reason = GroupsReason::Compared { grouped, on_a_host, seconds, without_s, rates: cluster.rates };
    if grouped { Grouping { groups, reason } } else { none(reason) }
}

/// Seconds of [`GROUPS_BYTES`] of fp32 through the store, in these groups.
fn store_s(cluster: &Cluster, groups: &[Vec<u32>]) -> f64 {
    cluster.in_groups(groups).through_the_store(GROUPS_BYTES / 4, 4, 4).0
}

/// Workers by host, in the order of their first ones.
fn by_host(hosts: &[u32]) -> Vec<Vec<u32>> {
    let mut found: Vec<(u32, Vec<u32>)> = Vec::new();
    for (rank, host) in (0..).zip(hosts) {
        match found.iter_mut().find(|(number, _)| number == host) {
            Some((_, ranks)) => ranks.push(rank),
            None => found.push((*host, vec![rank])),
        }
    }
    found.into_iter().map(|(_, ranks)| ranks).collect()
}

/// Each host's workers in so many near-equal groups of neighbours, or in as many as they are.
fn parted(on_hosts: &[Vec<u32>], count: u32) -> Vec<Vec<u32>> {
    let mut groups = Vec::new();
    for ranks in on_hosts {
        let ranks_here = ranks.len() as u64;
        let count = u64::from(count).min(ranks_here);
        let start = |index: u64| part_start(ranks_here, count, index) as usize;
        groups.extend((0..count).map(|index| ranks[start(index)..start(index + 1)].to_vec()));
    }
    groups.sort_unstable_by_key(|group| group[0]);
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cluster(hosts: &[u32], rates: Rates) -> Cluster {
        let workers = hosts.len() as u32;
        Cluster {
            workers,
            servers: workers,
            servers_apart: false,
            groups: Vec::new(),
            hosts: hosts.to_vec(),
            slice_bytes: 512 << 10,
            collective_slice_bytes: 512 << 10,
            rates,
        }
    }

    fn rates(bytes_per_s: f64, inside_bytes_per_s: f64) -> Rates {
        Rates { bytes_per_s, inside_bytes_per_s, ..Rates::default() }
    }

    const TWO_HOSTS: [u32; 8] = [0, 0, 0, 0, 1, 1, 1, 1];

    #[test]
    fn groups_are_those_of_hosts_where_the_line_is_slow_and_none_where_it_is_fast() {
        let slow = best_groups(&cluster(&TWO_HOSTS, rates(125e6, 2e9)));
        assert_eq!(slow.groups, [[0, 1, 2, 3], [4, 5, 6, 7]]);
        let said = slow.reason.to_string();
        assert!(said.starts_with("by host: 16.8 MB through the store take 1"), "{said}");
        assert!(said.ends_with(", at 1000 Mbit/s between hosts and 16000 inside"), "{said}");
        let fast = best_groups(&cluster(&TWO_HOSTS, rates(12.5e9, 2e9)));
        assert_eq!((fast.groups.len(), fast.reason.code()), (0, "not-faster"));
        let said = fast.reason.to_string();
        assert!(said.starts_with("none: 16.8 MB") && said.contains("groups must gain 10 %"), "{said}");
    }

    /// Of n bytes a line carries 4 n without groups, n by host, 2 n in halves; a head moves 3 n inside, or n.
    #[test]
    fn on_uniform_links_two_heads_on_each_host_are_faster_than_one() {
        let uniform = Rates { summed_bytes_per_s: 1e12, latency_s: 1e-6, ..rates(125e6, 125e6) };
        let found = best_groups(&cluster(&TWO_HOSTS, uniform));
        assert_eq!(found.groups, [[0, 1], [2, 3], [4, 5], [6, 7]]);
        assert!(found.reason.to_string().starts_with("by host in 2 parts: "), "{}", found.reason);
    }

    #[test]
    fn where_no_line_is_shared_there_are_no_groups() {
        let reason = |hosts: &[u32]| {
            let found = best_groups(&cluster(hosts, Rates::default()));
            assert!(found.groups.is_empty());
            found.reason.code()
        };
        assert_eq!([&[3; 8][..], &[0, 1, 2], &[]].map(reason), ["one-host", "none-shared", "none-shared"]);
    }

    #[test]
    fn the_busiest_interface_decides() {
        // That of host 0 moves 3 n without groups, and as much as the others with them: 12/7 n.
        let found = best_groups(&cluster(&[0, 0, 1, 2, 3, 4, 5, 6], Rates::default()));
        assert_eq!(found.groups.len(), 7);
        // The one server's moves 15 n, and still 14 n.
        let hosts: Vec<u32> = [0].into_iter().chain(0..15).collect();
        let server =
            Cluster { workers: 15, servers: 1, servers_apart: true, ..cluster(&hosts, Rates::default()) };
        let found = best_groups(&server);
        assert_eq!((found.groups.len(), found.reason.code()), (0, "not-faster"));
    }

    #[test]
    fn servers_apart_stay_owners_and_are_in_no_group() {
        let hosts = [0, 0, 0, 0, 1, 1, 1, 1, 2, 3];
        let apart =
            Cluster { workers: 8, servers: 2, servers_apart: true, ..cluster(&hosts, rates(125e6, 2e9)) };
        assert_eq!(best_groups(&apart).groups, [[0, 1, 2, 3], [4, 5, 6, 7]]);
    }

    #[test]
    fn hosts_are_parted_evenly_and_groups_are_in_the_order_of_their_first_ranks() {
        let on_hosts = by_host(&[7, 5, 7, 5, 7, 1]);
        assert_eq!(on_hosts, [vec![0, 2, 4], vec![1, 3], vec![5]]);
        assert_eq!(parted(&on_hosts, 1), on_hosts);
        assert_eq!(parted(&on_hosts, 2), [vec![0, 2], vec![1], vec![3], vec![4], vec![5]]);
    }

    fn seconds_of(found: &Grouping) -> Option<(f64, f64)> {
        let GroupsReason::Compared { seconds, without_s, .. } = found.reason else { return None };
        Some((seconds, without_s))
    }

    proptest! {
        #[test]
        fn what_is_chosen_can_be_and_gains_what_it_must(
            hosts in proptest::collection::vec(0u32..5, 2..17), servers in 0u32..4,
            mbit in 1f64..1e5, inside_mbit in 1f64..1e5,
        ) {
            let workers = hosts.len() as u32;
            let mut places = hosts.clone();
            places.extend(100..100 + servers);
            let base = cluster(&places, rates(mbit * 125e3, inside_mbit * 125e3));
            let owners = if servers == 0 { workers } else { servers };
            let given = Cluster { workers, servers: owners, servers_apart: servers > 0, ..base };
            prop_assert_eq!(given.check(), Ok(()));
            let found = best_groups(&given);
            prop_assert_eq!(given.in_groups(&found.groups).check(), Ok(()));
            for group in &found.groups {
                prop_assert!(group.iter().all(|rank| hosts[*rank as usize] == hosts[group[0] as usize]));
            }
            prop_assert_eq!(found.reason.code() == "faster", !found.groups.is_empty());
            if let Some((seconds, without_s)) = seconds_of(&found) {
                prop_assert_eq!(seconds <= 0.9 * without_s, !found.groups.is_empty());
            }
        }

        #[test]
        fn faster_links_make_no_grouping_slower(
            hosts in proptest::collection::vec(0u32..4, 2..13), count in 1u32..4,
            mbit in 1f64..1e5, inside_mbit in 1f64..1e5, factor in 1f64..100.0,
        ) {
            let slow = rates(mbit * 125e3, inside_mbit * 125e3);
            let groups = parted(&by_host(&hosts), count);
            for of in [&groups[..], &[]] {
                let taken_s = store_s(&cluster(&hosts, slow), of);
                let line = Rates { bytes_per_s: slow.bytes_per_s * factor, ..slow };
                let inside = Rates { inside_bytes_per_s: slow.inside_bytes_per_s * factor, ..slow };
                for faster in [line, inside] {
                    prop_assert!(store_s(&cluster(&hosts, faster), of) <= taken_s * (1.0 + 1e-12));
                }
            }
        }

        #[test]
        fn groups_of_one_cost_what_no_groups_do(hosts in proptest::collection::vec(0u32..4, 2..13)) {
            let alone: Vec<Vec<u32>> = (0..hosts.len() as u32).map(|rank| vec![rank]).collect();
            let all = cluster(&hosts, Rates::default());
            prop_assert_eq!(store_s(&all, &alone), store_s(&all, &[]));
        }
    }
}

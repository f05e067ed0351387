//! What a job runs on, and what a message of any layer costs there.

use crate::cost::{Clients, Hosts, Rates, Traffic, sparse};
use crate::error::Error;
use crate::way::Algorithm;
use crate::{layout, limits};

/// What is the same for all layers, and on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// P1.
    pub workers: u32,
    /// P2: so many hold a shard each: the first workers, or servers apart.
    pub servers: u32,
    /// Whether they are no workers.
    pub servers_apart: bool,
    /// Workers by group, each in one; none where each contributes by itself. Without servers apart the first of each has a shard.
    pub groups: Vec<Vec<u32>>,
    /// By rank, workers first, then servers apart: a number that ranks of one host have in common. Empty: each counts as a host
    /// of its own.
    pub hosts: Vec<u32>,
    /// Largest slice of the store.
    pub slice_bytes: usize,
    /// Largest slice of a collective.
    pub collective_slice_bytes: usize,
    /// The slowest node's.
    pub rates: Rates,
}

impl Cluster {
    /// Checks everything that comes from outside against the bounds of [`limits`]. Groups have each worker once, and as many
    /// heads as there are shards; hosts have every rank.
    ///
    /// # Errors
    /// [`Error::Config`], naming what is out of bounds.
    pub fn check(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Config(what));
        let Self { workers, servers, servers_apart, ref groups, ref hosts, .. } = *self;
        let possible = 1..=limits::RANKS_MAX;
        if !possible.contains(&workers) || !possible.contains(&servers) {
            let max = limits::RANKS_MAX;
            return fail(format!("{workers} workers and {servers} servers; 1 to {max} of each are possible"));
        }
        let ranks = workers + if servers_apart { servers } else { 0 };
        if !hosts.is_empty() && hosts.len() != ranks as usize {
            return fail(format!("hosts of {} ranks are given, but there are {ranks}", hosts.len()));
        }
        let mut grouped: Vec<u32> = groups.iter().flatten().copied().collect();
        grouped.sort_unstable();
        let each_once = grouped.iter().copied().eq(0..workers) && !groups.iter().any(Vec::is_empty);
        if !groups.is_empty() && !each_once {
            return fail(format!(
                "groups have the ranks {grouped:?}; each of {workers} workers must be in one"
            ));
        }
        if !groups.is_empty() && !servers_apart && groups.len() != servers as usize {
            let groups = groups.len();
            return fail(format!("{groups} groups, whose heads hold the shards, and {servers} shards"));
        }
        for (name, bytes) in
            [("slice_bytes", self.slice_bytes), ("collective_slice_bytes", self.collective_slice_bytes)]
        {
            if !(limits::SLICE_BYTES_MIN..=limits::SLICE_BYTES_MAX).contains(&bytes) {
                return fail(format!("{name} is {bytes}"));
            }
        }
        self.rates.wrong().map_or(Ok(()), |name| fail(format!("{name} must be a positive number")))
    }

    /// The same with other groups, or none. Without servers apart their heads hold the shards.
    #[must_use]
    pub(super) fn in_groups(&self, groups: &[Vec<u32>]) -> Self {
        let servers = match groups.len() {
            _ if self.servers_apart => self.servers,
            0 => self.workers,
            heads => heads as u32,
        };
        Self { groups: groups.to_vec(), servers, ..self.clone() }
    }

    /// Where the workers are.
    pub(super) fn hosts_of_workers(&self) -> Hosts {
        let hosts = self.hosts.get(..self.workers as usize);
        hosts.map_or_else(|| Hosts::apart(self.workers), Hosts::numbered)
    }

    fn clients(&self) -> Clients {
        let of = if self.servers_apart { Clients::with_servers } else { Clients::workers };
        let clients = of(self.workers, self.servers).in_groups(&self.groups);
        if self.hosts.is_empty() { clients } else { clients.on(Hosts::numbered(&self.hosts)) }
    }

    /// Seconds of so many numbers through the store, and what moves.
    ///
    /// * `elem_bytes`: of a number in memory, which says where slices are cut.
    /// * `wire_bytes`: of a number on the wire.
    pub(super) fn through_the_store(&self, elems: u64, elem_bytes: u64, wire_bytes: u64) -> (f64, Traffic) {
        let clients = self.clients();
        // The book evens out over the model what each owner has, whatever a layer's own slices are.
        let traffic = clients.store(elems, wire_bytes, self.servers);
        let (places_matter, owners) = (!self.groups.is_empty() || !self.hosts.is_empty(), clients.owners());
        let seconds = if self.servers_apart || places_matter {
            let slices = slices(elems * elem_bytes, self.slice_bytes, owners).max(1);
            let (slice, round) = (elems.div_ceil(slices), slices.min(u64::from(owners)));
            let of_round = clients.store(slice * round, wire_bytes, round as u32);
            let all = clients.store(elems, wire_bytes, owners);
            self.rates.pipelined_s(&clients.store(slice, wire_bytes, 1), &of_round, &all)
        } else if self.servers == self.workers {
            let slices = slices(elems * elem_bytes, self.slice_bytes, self.workers);
            Algorithm::Store.message(elems, wire_bytes, self.workers, slices, &self.rates).1
        } else {
            self.rates.seconds(&clients.store(elems, wire_bytes, owners))
        };
        (seconds, traffic)
    }

    /// What moves when every worker's rows go to all others.
    pub(super) fn gathered(&self, rows: &[u64], row_bytes: u64) -> Traffic {
        let hosts = self.hosts_of_workers();
        if self.groups.is_empty() {
            sparse::broadcast(rows, row_bytes, &hosts)
        } else {
            sparse::relayed(rows, row_bytes, &self.groups, &hosts)
        }
    }

    /// What moves when they go to one of the workers, which answers with the whole.
    pub(super) fn by_an_owner(&self, rows: &[u64], row_bytes: u64, dense_bytes: u64) -> Traffic {
        let each = || (0..rows.len() as u32).map(|rank| vec![rank]).collect();
        let groups = if self.groups.is_empty() { &each() } else { &self.groups };
        sparse::adam(rows, row_bytes, dense_bytes, groups, &self.hosts_of_workers())
    }

    /// Seconds of so many numbers by a collective of all workers, and what moves.
    ///
    /// Ranks that share an interface have an equal part of it: what moves inside a host counts as if it went over the line.
    pub(super) fn by_collective(&self, algorithm: Algorithm, elems: u64, elem_bytes: u64) -> (f64, Traffic) {
        let hosts = self.hosts_of_workers();
        let slices = slices(elems * elem_bytes, self.collective_slice_bytes, self.workers);
        let on_one_host = hosts.count() == 1;
        let sharing = hosts.most_ranks().max(1) as f64;
        let bytes_per_s =
            if on_one_host { self.rates.inside_bytes_per_s } else { self.rates.bytes_per_s / sharing };
        let rates = Rates { bytes_per_s, ..self.rates };
        let (mut traffic, seconds) = algorithm.message(elems, elem_bytes, self.workers, slices, &rates);
        if on_one_host {
            traffic.inside_bytes = traffic.busiest_direction_bytes();
            traffic.inside_path_bytes = std::mem::take(&mut traffic.path_bytes);
            (traffic.sent, traffic.received) = (vec![0], vec![0]);
        } else {
            (traffic.sent, traffic.received) = (hosts.sums(&traffic.sent), hosts.sums(&traffic.received));
        }
        (seconds, traffic)
    }
}

/// Into how many slices a message is cut that so many owners share.
fn slices(bytes: u64, slice_bytes: usize, owners: u32) -> u64 {
    let pieces = layout::pieces(bytes, slice_bytes, owners);
    // What is left over of whole turns of owners is made up for by other layers.
    let owners = u64::from(owners);
    if pieces < owners { pieces } else { pieces.next_multiple_of(owners) }
}

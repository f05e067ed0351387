//! What a choice depends on, and what each way costs by it.

use crate::cost::paper::FullyConnected;
use crate::cost::{Clients, Hosts, Rates, Traffic, sparse};
use crate::error::Error;
use crate::way::{Algorithm, Payload, Route, Way};
use crate::{layout, limits};

/// Bytes of a row's index in an (index, row) pair; as many as an element's where those are more.
pub const INDEX_BYTES: u64 = 4;

/// Bytes of a number in fp32, and in its wire types.
const FP32_BYTES: u64 = 4;
const HALF_BYTES: u64 = 2;

/// What a layer's gradient is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// dY^T X of a linear layer.
    Linear {
        /// M: its outputs.
        outputs: u64,
        /// N: its inputs.
        inputs: u64,
    },
    /// Rows of an embedding's matrix that this step looked up.
    Embedding {
        /// Numbers per row.
        width: u64,
    },
    /// Anything else: indecomposable.
    Other,
}

impl LayerKind {
    /// Its word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear { .. } => "linear",
            Self::Embedding { .. } => "embedding",
            Self::Other => "other",
        }
    }
}

/// What a choice depends on. The same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts<'a> {
    /// What the layer is.
    pub kind: LayerKind,
    /// Numbers in all of its tensors.
    pub elems: u64,
    /// Bytes of a number.
    pub elem_bytes: u64,
    /// K of each worker: rows of activation of a linear layer, merged rows of an embedding. Empty: not known yet.
    pub rows: &'a [u64],
    /// What a rank sends to each other where its gradient is shortened, in bytes; 0 where nothing shortens it.
    pub short_bytes: u64,
    /// P1.
    pub workers: u32,
    /// P2: so many hold a shard each: the first workers, or servers apart.
    pub servers: u32,
    /// Whether they are no workers.
    pub servers_apart: bool,
    /// Workers by group, each in one; none where each contributes by itself. Without servers apart the first of each has a shard.
    pub groups: &'a [Vec<u32>],
    /// By rank, workers first, then servers apart: a number that ranks of one host have in common. Empty: each counts as a host.
    pub hosts: &'a [u32],
    /// Largest slice of the store.
    pub slice_bytes: usize,
    /// Largest slice of a collective.
    pub collective_slice_bytes: usize,
    /// The slowest node's.
    pub rates: Rates,
}

impl Facts<'_> {
    /// Checks everything that comes from outside against the bounds of [`limits`].
    ///
    /// # Errors
    /// [`Error::Config`], naming what is out of bounds.
    pub fn check(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Config(what));
        let ranks = 1..=limits::RANKS_MAX;
        if !ranks.contains(&self.workers) || !ranks.contains(&self.servers) {
            let (workers, servers, max) = (self.workers, self.servers, limits::RANKS_MAX);
            return fail(format!("{workers} workers and {servers} servers; 1 to {max} of each are possible"));
        }
        if !self.rows.is_empty() && self.rows.len() != self.workers as usize {
            return fail(format!(
                "rows of {} workers are given, but there are {}",
                self.rows.len(),
                self.workers
            ));
        }
        if !(1..=16).contains(&self.elem_bytes) || self.elems > limits::COST_ELEMS_MAX {
            let max = limits::COST_ELEMS_MAX;
            return fail(format!(
                "{} elements of {} bytes; up to {max} of 1 to 16 are possible",
                self.elems, self.elem_bytes
            ));
        }
        self.check_places()?;
        // What all ranks send together must fit its type, with room for the sums of both directions.
        let row_numbers = match self.kind {
            LayerKind::Linear { outputs, inputs } => u128::from(outputs) + u128::from(inputs),
            LayerKind::Embedding { width } => u128::from(width) + u128::from(INDEX_BYTES),
            LayerKind::Other => 0,
        };
        let rows: u128 = self.rows.iter().copied().map(u128::from).sum();
        let numbers = rows * row_numbers;
        let short_bytes = u128::from(self.short_bytes) * u128::from(self.workers) * u128::from(self.workers);
        if row_numbers.max(rows) > u128::from(limits::COST_ELEMS_MAX)
            || numbers * u128::from(self.elem_bytes) * u128::from(self.workers) + short_bytes
                > limits::COST_BYTES_MAX
        {
            return fail(format!(
                "{rows} rows of {row_numbers} numbers on {} workers are too many",
                self.workers
            ));
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

    /// Groups have each worker once and as many heads as there are shards; hosts have every rank.
    fn check_places(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Config(what));
        let ranks = self.workers + if self.servers_apart { self.servers } else { 0 };
        if !self.hosts.is_empty() && self.hosts.len() != ranks as usize {
            return fail(format!("hosts of {} ranks are given, but there are {ranks}", self.hosts.len()));
        }
        if self.groups.is_empty() {
            return Ok(());
        }
        let mut grouped: Vec<u32> = self.groups.iter().flatten().copied().collect();
        grouped.sort_unstable();
        if !grouped.iter().copied().eq(0..self.workers) || self.groups.iter().any(Vec::is_empty) {
            return fail(format!(
                "groups have the ranks {grouped:?}; each of {} workers must be in one",
                self.workers
            ));
        }
        if !self.servers_apart && self.groups.len() != self.servers as usize {
            let (groups, servers) = (self.groups.len(), self.servers);
            return fail(format!("{groups} groups, whose heads hold the shards, and {servers} shards"));
        }
        Ok(())
    }

    /// Where the workers are.
    fn hosts_of_workers(&self) -> Hosts {
        self.hosts.get(..self.workers as usize).map_or_else(|| Hosts::apart(self.workers), Hosts::numbered)
    }

    fn clients(&self) -> Clients {
        let of = if self.servers_apart { Clients::with_servers } else { Clients::workers };
        let clients = of(self.workers, self.servers).in_groups(self.groups);
        if self.hosts.is_empty() { clients } else { clients.on(Hosts::numbered(self.hosts)) }
    }

    fn row_bytes(&self) -> u64 {
        match self.kind {
            LayerKind::Linear { outputs, inputs } => (outputs + inputs) * self.elem_bytes,
            LayerKind::Embedding { width } => INDEX_BYTES.max(self.elem_bytes) + width * self.elem_bytes,
            LayerKind::Other => 0,
        }
    }

    /// Whether the layer has what this way sends.
    pub(super) fn fit(&self, way: Way) -> bool {
        match way.payload {
            // Of wire types there are those of fp32.
            Payload::Whole => way.wire.is_none() || self.elem_bytes == FP32_BYTES,
            Payload::Factors | Payload::Pairs => way.payload.kind() == Some(self.kind.name()),
            Payload::OneBit | Payload::Dgc => self.short_bytes > 0,
        }
    }

    /// What a way would cost; none if it does not fit the layer, or needs rows that are not known.
    #[must_use]
    pub fn estimate(&self, way: Way) -> Option<Estimate> {
        if !self.fit(way) || way.sends_rows() && self.rows.is_empty() {
            return None;
        }
        let alone = |traffic: Traffic| (self.rates.seconds(&traffic), traffic);
        let hosts = self.hosts_of_workers();
        let (wire_s, traffic) = match (way.payload, way.route) {
            (Payload::Whole, Route::Sum(Algorithm::Store)) => {
                // Rounding is left out: one core rounds 9 GB of fp32 per second or more, which a wire of 36 Gbit/s carries.
                let wire_bytes = if way.wire.is_some() { HALF_BYTES } else { self.elem_bytes };
                // The book evens out over the model what each owner has, whatever a layer's own slices are.
                (self.store_s(wire_bytes), self.clients().store(self.elems, wire_bytes, self.servers))
            }
            (Payload::Whole, Route::Sum(algorithm)) => {
                let (traffic, seconds) = self.in_slices(algorithm, self.elem_bytes, &hosts);
                (seconds, traffic)
            }
            (_, Route::Owner) => {
                alone(sparse::adam(self.rows, self.row_bytes(), self.elems * self.elem_bytes, &hosts))
            }
            // What packing and summing take is not estimated.
            (Payload::OneBit | Payload::Dgc, _) => {
                alone(sparse::broadcast(&vec![1; self.workers as usize], self.short_bytes, &hosts))
            }
            _ => alone(sparse::broadcast(self.rows, self.row_bytes(), &hosts)),
        };
        Some(Estimate {
            way,
            steps: traffic.steps,
            direction_bytes: traffic.busiest_direction_bytes(),
            node_bytes: traffic.busiest_node_bytes(),
            total_bytes: traffic.total_bytes(),
            inside_bytes: traffic.inside_bytes,
            busy_s: self.rates.busy_s(&traffic),
            wire_s,
            rebuild_s: if way.sends_rows() { self.rebuild_s() } else { 0.0 },
        })
    }

    fn store_s(&self, wire_bytes: u64) -> f64 {
        let clients = self.clients();
        let (places_matter, owners) = (!self.groups.is_empty() || !self.hosts.is_empty(), clients.owners());
        let all = || clients.store(self.elems, wire_bytes, owners);
        if self.servers_apart || places_matter {
            let slices = self.slices(self.slice_bytes, owners).max(1);
            let (slice, round) = (self.elems.div_ceil(slices), slices.min(u64::from(owners)));
            let of_round = clients.store(slice * round, wire_bytes, round as u32);
            self.rates.pipelined_s(&clients.store(slice, wire_bytes, 1), &of_round, &all())
        } else if self.servers == self.workers {
            self.in_slices(Algorithm::Store, wire_bytes, &Hosts::apart(self.workers)).1
        } else {
            self.rates.seconds(&all())
        }
    }

    /// Into how many slices a message is cut that so many owners share.
    fn slices(&self, slice_bytes: usize, owners: u32) -> u64 {
        let pieces = layout::pieces(self.elems * self.elem_bytes, slice_bytes, owners);
        // What is left over of whole turns of owners is made up for by other layers.
        let owners = u64::from(owners);
        if pieces < owners { pieces } else { pieces.next_multiple_of(owners) }
    }

    /// Ranks that share an interface have an equal part of it: what a collective moves inside a host counts as if it
    /// went over the line.
    ///
    /// * `wire_bytes`: of a number on the wire. Where slices are cut depends on its bytes in memory.
    /// * `hosts`: where the workers are.
    fn in_slices(&self, algorithm: Algorithm, wire_bytes: u64, hosts: &Hosts) -> (Traffic, f64) {
        let slice_bytes =
            if algorithm == Algorithm::Store { self.slice_bytes } else { self.collective_slice_bytes };
        let slices = self.slices(slice_bytes, self.workers);
        let on_one_host = hosts.count() == 1;
        let sharing = hosts.most_ranks().max(1) as f64;
        let bytes_per_s =
            if on_one_host { self.rates.inside_bytes_per_s } else { self.rates.bytes_per_s / sharing };
        let rates = Rates { bytes_per_s, ..self.rates };
        let (mut traffic, seconds) = algorithm.message(self.elems, wire_bytes, self.workers, slices, &rates);
        if on_one_host {
            traffic.inside_bytes = traffic.busiest_direction_bytes();
            traffic.inside_path_bytes = std::mem::take(&mut traffic.path_bytes);
            (traffic.sent, traffic.received) = (vec![0], vec![0]);
        } else {
            (traffic.sent, traffic.received) = (hosts.sums(&traffic.sent), hosts.sums(&traffic.received));
        }
        (traffic, seconds)
    }

    fn rebuild_s(&self) -> f64 {
        let product_s = match self.kind {
            LayerKind::Linear { outputs, inputs } => {
                sparse::rebuild_flops(self.rows, outputs, inputs) / self.rates.product_flops_per_s
            }
            LayerKind::Embedding { width } => {
                let rows: u64 = self.rows.iter().sum();
                (rows * width * self.elem_bytes) as f64 / self.rates.summed_bytes_per_s
            }
            LayerKind::Other => 0.0,
        };
        self.rates.gather_s + product_s
    }

    pub(super) fn fully_connected(&self) -> Option<FullyConnected> {
        let LayerKind::Linear { outputs, inputs } = self.kind else { return None };
        let rows = self.rows.iter().max().copied()?;
        let (workers, servers) = (u64::from(self.workers), u64::from(self.servers));
        let clients = if self.groups.is_empty() { workers } else { self.groups.len() as u64 };
        let apart = self.servers_apart;
        Some(FullyConnected { width: outputs, height: inputs, rows, workers, clients, servers, apart })
    }
}

/// What one way costs for one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The way.
    pub way: Way,
    /// Messages that wait for each other.
    pub steps: u32,
    /// Bytes on the busiest direction of an interface, which all ranks of a host share.
    pub direction_bytes: u64,
    /// Bytes sent and received through the busiest interface.
    pub node_bytes: u64,
    /// Bytes sent by all nodes.
    pub total_bytes: u64,
    /// Bytes of one direction between ranks of one host, of the rank that has most: no interface carries them.
    pub inside_bytes: u64,
    /// Seconds for which the busiest interface is busy, or that rank if it is for longer.
    pub busy_s: f64,
    /// Seconds on the wire, sums included.
    pub wire_s: f64,
    /// Seconds to put rows together and to rebuild the gradient from what came, beyond what the dense path computes.
    pub rebuild_s: f64,
}

impl Estimate {
    /// Wire and rebuilding.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.wire_s + self.rebuild_s
    }
}

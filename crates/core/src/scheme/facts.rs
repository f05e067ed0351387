//! What the choice for a layer depends on, and what each way costs by it.

use super::cluster::Cluster;
use crate::cost::paper::FullyConnected;
use crate::cost::{Traffic, sparse};
use crate::error::Error;
use crate::limits;
use crate::way::{Algorithm, LayerKind, Payload, Route, Way};

/// Bytes of a row's index in an (index, row) pair; as many as an element's where those are more.
pub const INDEX_BYTES: u64 = 4;

/// Bytes of a number in fp32, and in its wire types.
const FP32_BYTES: u64 = 4;
const HALF_BYTES: u64 = 2;

/// What a layer's gradient is made of, and how large that is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerShape {
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
    /// Anything else.
    Other,
}

impl LayerShape {
    /// Of a layer with a weight of so many rows and columns, which do not matter for other kinds than the first two.
    #[must_use]
    pub fn of(kind: LayerKind, (height, width): (u64, u64)) -> Self {
        match kind {
            LayerKind::Linear => Self::Linear { outputs: height, inputs: width },
            LayerKind::Embedding => Self::Embedding { width },
            LayerKind::Other => Self::Other,
        }
    }

    fn kind(self) -> LayerKind {
        match self {
            Self::Linear { .. } => LayerKind::Linear,
            Self::Embedding { .. } => LayerKind::Embedding,
            Self::Other => LayerKind::Other,
        }
    }
}

/// What the choice for a layer depends on. The same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts<'a> {
    /// What the layer is.
    pub shape: LayerShape,
    /// Numbers in all of its tensors.
    pub elems: u64,
    /// Bytes of a number.
    pub elem_bytes: u64,
    /// K of each worker: rows of activation of a linear layer, merged rows of an embedding. Empty: not known yet.
    pub rows: &'a [u64],
    /// What a rank sends to each other where its gradient is shortened, in bytes; 0 where nothing shortens it.
    pub short_bytes: u64,
    /// What the job runs on.
    pub cluster: Cluster,
}

impl Facts<'_> {
    /// Checks everything that comes from outside against the bounds of [`limits`].
    ///
    /// # Errors
    /// [`Error::Config`], naming what is out of bounds.
    pub fn check(&self) -> Result<(), Error> {
        let fail = |what: String| Err(Error::Config(what));
        self.cluster.check()?;
        let workers = self.cluster.workers;
        if !self.rows.is_empty() && self.rows.len() != workers as usize {
            let given = self.rows.len();
            return fail(format!("rows of {given} workers are given, but there are {workers}"));
        }
        if !(1..=16).contains(&self.elem_bytes) || self.elems > limits::COST_ELEMS_MAX {
            let max = limits::COST_ELEMS_MAX;
            return fail(format!(
                "{} elements of {} bytes; up to {max} of 1 to 16 are possible",
                self.elems, self.elem_bytes
            ));
        }
        // What all ranks send together must fit its type, with room for the sums of both directions.
        let row_numbers = match self.shape {
            LayerShape::Linear { outputs, inputs } => u128::from(outputs) + u128::from(inputs),
            LayerShape::Embedding { width } => u128::from(width) + u128::from(INDEX_BYTES),
            LayerShape::Other => 0,
        };
        let rows: u128 = self.rows.iter().copied().map(u128::from).sum();
        let numbers = rows * row_numbers;
        let short_bytes = u128::from(self.short_bytes) * u128::from(workers) * u128::from(workers);
        if row_numbers.max(rows) > u128::from(limits::COST_ELEMS_MAX)
            || numbers * u128::from(self.elem_bytes) * u128::from(workers) + short_bytes
                > limits::COST_BYTES_MAX
        {
            return fail(format!("{rows} rows of {row_numbers} numbers on {workers} workers are too many"));
        }
        Ok(())
    }

    fn row_bytes(&self) -> u64 {
        match self.shape {
            LayerShape::Linear { outputs, inputs } => (outputs + inputs) * self.elem_bytes,
            LayerShape::Embedding { width } => INDEX_BYTES.max(self.elem_bytes) + width * self.elem_bytes,
            LayerShape::Other => 0,
        }
    }

    /// Whether the layer has what this way sends.
    pub(super) fn fit(&self, way: Way) -> bool {
        match way.payload {
            // Of wire types there are those of fp32.
            Payload::Whole => way.wire.is_none() || self.elem_bytes == FP32_BYTES,
            Payload::Factors | Payload::Pairs => way.payload.kind() == Some(self.shape.kind()),
            Payload::OneBit | Payload::Dgc => self.short_bytes > 0,
        }
    }

    /// What a way would cost; none if it does not fit the layer, or needs rows that are not known.
    #[must_use]
    pub fn estimate(&self, way: Way) -> Option<Estimate> {
        if !self.fit(way) || way.sends_rows() && self.rows.is_empty() {
            return None;
        }
        let cluster = &self.cluster;
        let alone = |traffic: Traffic| (cluster.rates.seconds(&traffic), traffic);
        let (wire_s, traffic) = match (way.payload, way.route) {
            (Payload::Whole, Route::Sum(Algorithm::Store)) => {
                // Rounding is left out: one core rounds 9 GB of fp32 per second or more, which a wire of 36 Gbit/s carries.
                let wire_bytes = if way.wire.is_some() { HALF_BYTES } else { self.elem_bytes };
                cluster.through_the_store(self.elems, self.elem_bytes, wire_bytes)
            }
            (Payload::Whole, Route::Sum(algorithm)) => {
                cluster.by_collective(algorithm, self.elems, self.elem_bytes)
            }
            (_, Route::Owner) => {
                alone(cluster.by_an_owner(self.rows, self.row_bytes(), self.elems * self.elem_bytes))
            }
            // What packing and summing take is not estimated.
            (Payload::OneBit | Payload::Dgc, _) => {
                alone(cluster.gathered(&vec![1; cluster.workers as usize], self.short_bytes))
            }
            _ => alone(cluster.gathered(self.rows, self.row_bytes())),
        };
        Some(Estimate {
            way,
            steps: traffic.steps,
            direction_bytes: traffic.busiest_direction_bytes(),
            node_bytes: traffic.busiest_node_bytes(),
            total_bytes: traffic.total_bytes(),
            inside_bytes: traffic.inside_bytes,
            busy_s: cluster.rates.busy_s(&traffic),
            wire_s,
            rebuild_s: if way.sends_rows() { self.rebuild_s() } else { 0.0 },
        })
    }

    fn rebuild_s(&self) -> f64 {
        let product_s = match self.shape {
            LayerShape::Linear { outputs, inputs } => {
                sparse::rebuild_flops(self.rows, outputs, inputs) / self.cluster.rates.product_flops_per_s
            }
            LayerShape::Embedding { width } => {
                let rows: u64 = self.rows.iter().sum();
                (rows * width * self.elem_bytes) as f64 / self.cluster.rates.summed_bytes_per_s
            }
            LayerShape::Other => 0.0,
        };
        self.cluster.rates.gather_s + product_s
    }

    pub(super) fn fully_connected(&self) -> Option<FullyConnected> {
        let LayerShape::Linear { outputs, inputs } = self.shape else { return None };
        let rows = self.rows.iter().max().copied()?;
        let Cluster { workers, servers, servers_apart: apart, ref groups, .. } = self.cluster;
        let (workers, servers) = (u64::from(workers), u64::from(servers));
        let clients = if groups.is_empty() { workers } else { groups.len() as u64 };
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

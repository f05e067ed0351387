//! What each way to synchronise costs: messages that wait for each other, bytes per node, seconds. Pure arithmetic.
//!
//! [`Traffic`] is exact: an exchange that sends other bytes or takes other steps than its function says is in error, and a
//! test says so. `crates/sim/tests/collectives/costs.rs` compares every function that gives a [`Traffic`] with what simulated
//! nodes send, receive and wait for, for 1 to 17 ranks. Ring and butterfly send no empty parts, so that a slice of fewer
//! elements than ranks may take fewer steps than they say.
//!
//! [`Rates::seconds`] turns traffic into time, by the measurement study's model (FireCaffe, equations 1 to 4): bytes over
//! bandwidth, plus messages in a row times latency, plus sums.
//!
//! | for p ranks and n bytes | steps | busiest direction of an interface | alone, one after the other |
//! |---|---|---|---|
//! | [`dense::rooted`]: one slice of the store, or the central server | 2 | (p-1) n | 2 (p-1) n |
//! | [`dense::store`]: evenly over the p shards | 2 | 2 (p-1)/p n | 2 (p-1)/p n |
//! | [`dense::tree`] | 2 floor(lg p) | ceil(lg p) n | 2 ceil(lg p) n |
//! | [`dense::ring`] | 2 (p-1) | 2 (p-1)/p n | 2 (p-1)/p n |
//! | [`dense::butterfly`], p a power of two | 2 lg p | 2 (p-1)/p n | 2 (p-1)/p n |
//! | [`Clients::store`]: C groups of m | 4 | (m-1) n + 2 (C-1)/C n at a head | 2 (m-1) n + 2 (C-1)/C n |
//! | [`sparse::broadcast`]: factors of M x N with K rows; (index, row) pairs | 1 | (p-1) K (M+N) | the same |
//! | [`sparse::adam`]: factors up, the matrix down | 2 | (p-1) MN at the owner | (p-1) (MN + K(M+N)) |
//!
//! Ranks that share a host ([`Hosts`]) share its interface, and what they send each other does not touch it: of groups on a host
//! each 2 (C-1)/C n is left, and without groups m times that.
//!
//! Omitted: frame headers (bounded by one per slice and peer), the time to apply updates, and that other traffic shares
//! the wire; [`overlap`] says what of the time can hide under computation, and [`local`] where ranks meet only now and then.

mod clients;
pub mod dense;
mod hosts;
pub mod local;
pub mod overlap;
pub mod paper;
pub mod sparse;

pub use clients::Clients;
pub use hosts::Hosts;

/// What one synchronisation moves, by position.
///
/// A position is a rank counted from the exchange's root: `(rank - root) mod p`. Exchanges without a root count from
/// rank 0. Where ranks share hosts a position is a host. Only payload counts, no header.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Messages on the longest chain of those that can leave only when the former has come: latencies, one after the
    /// other.
    pub steps: u32,
    /// Bytes that each position sends.
    pub sent: Vec<u64>,
    /// Bytes that each position receives.
    pub received: Vec<u64>,
    /// Bytes that pass one after the other if this travels alone: the bandwidth term of the study's equations.
    pub path_bytes: u64,
    /// Bytes of one direction between ranks of one host, of the rank that has most: no interface carries them.
    pub inside_bytes: u64,
    /// Those of them that pass one after the other if this travels alone.
    pub inside_path_bytes: u64,
    /// Bytes of partial sums that are added to another on that path.
    pub path_summed_bytes: u64,
    /// Bytes of partial sums that the busiest position adds.
    pub summed_bytes: u64,
}

impl Traffic {
    /// Nothing, between this many positions.
    #[must_use]
    pub fn none(positions: usize) -> Self {
        Self { sent: vec![0; positions], received: vec![0; positions], ..Self::default() }
    }

    /// Bytes on the busiest direction of an interface.
    #[must_use]
    pub fn busiest_direction_bytes(&self) -> u64 {
        self.sent.iter().chain(&self.received).copied().max().unwrap_or(0)
    }

    /// Bytes sent and received by the node that has most of both: what Poseidon's Table 1 counts.
    #[must_use]
    pub fn busiest_node_bytes(&self) -> u64 {
        self.sent.iter().zip(&self.received).map(|(sent, received)| sent + received).max().unwrap_or(0)
    }

    /// Bytes sent by all.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.sent.iter().sum()
    }

    /// Adds another exchange's bytes, whose root is the rank `root`, to this one's, whose positions are ranks.
    ///
    /// Steps and path become those of the longer one: the two travel at the same time.
    pub fn join(&mut self, other: &Self, root: usize) {
        let positions = self.sent.len().max(1);
        for position in 0..other.sent.len() {
            let rank = (position + root) % positions;
            self.sent[rank] += other.sent[position];
            self.received[rank] += other.received[position];
        }
        self.steps = self.steps.max(other.steps);
        self.path_bytes = self.path_bytes.max(other.path_bytes);
        self.inside_bytes += other.inside_bytes;
        self.inside_path_bytes = self.inside_path_bytes.max(other.inside_path_bytes);
        self.path_summed_bytes = self.path_summed_bytes.max(other.path_summed_bytes);
        self.summed_bytes += other.summed_bytes;
    }
}

/// What the wire and the processors of the slowest node do, as measured or as told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// One direction of a host's interface, in bytes per second, whoever of its ranks uses it.
    pub bytes_per_s: f64,
    /// What a rank sends to others of its host, or gets from them, in bytes per second.
    pub inside_bytes_per_s: f64,
    /// One message of one byte from one rank to another, in seconds.
    pub latency_s: f64,
    /// Bytes of input added to a sum per second.
    pub summed_bytes_per_s: f64,
    /// Floating point operations of a matrix product per second; a multiplication and an addition are two.
    pub product_flops_per_s: f64,
    /// A rank's work for one exchange of rows, whatever its size, in seconds: rows are captured, put together, taken apart.
    pub gather_s: f64,
}

impl Default for Rates {
    /// One gigabit per second at 100 microseconds, and one core of a small machine, which also moves what is inside it.
    fn default() -> Self {
        Self {
            bytes_per_s: 125e6,
            inside_bytes_per_s: 2e9,
            latency_s: 100e-6,
            summed_bytes_per_s: 4e9,
            product_flops_per_s: 50e9,
            gather_s: 200e-6,
        }
    }
}

impl Rates {
    /// The name of the first that is not positive and finite (`latency_s` and `gather_s` may be zero), if any.
    #[must_use]
    pub fn wrong(&self) -> Option<&'static str> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        [
            ("bytes_per_s", positive(self.bytes_per_s)),
            ("inside_bytes_per_s", positive(self.inside_bytes_per_s)),
            ("latency_s", self.latency_s.is_finite() && self.latency_s >= 0.0),
            ("summed_bytes_per_s", positive(self.summed_bytes_per_s)),
            ("product_flops_per_s", positive(self.product_flops_per_s)),
            ("gather_s", self.gather_s.is_finite() && self.gather_s >= 0.0),
        ]
        .into_iter()
        .find_map(|(name, right)| (!right).then_some(name))
    }

    /// Seconds of one exchange that travels alone (FireCaffe, equations 1 to 4, with MXNET-MPI's term for sums,
    /// section 6.2).
    #[must_use]
    pub fn seconds(&self, alone: &Traffic) -> f64 {
        self.pipelined_s(alone, alone, alone)
    }

    /// Seconds for which the busiest interface is busy, or the busiest rank inside its host if it is for longer: what of an
    /// exchange others cannot use.
    #[must_use]
    pub fn busy_s(&self, all: &Traffic) -> f64 {
        let line_s = all.busiest_direction_bytes() as f64 / self.bytes_per_s;
        line_s.max(all.inside_bytes as f64 / self.inside_bytes_per_s)
    }

    /// Seconds of a message in slices that travel at the same time.
    ///
    /// The first round, one slice for each root, takes its path or its bytes, whichever is longer; the rest follows at
    /// line rate, for while one direction carries answers the other carries contributions. Sums hide under the wire,
    /// but for the first slice's. Inside hosts it is the same, at the rate there: what takes longer is seen whole, and of the
    /// other the first slice's path.
    ///
    /// * `slice`: one slice.
    /// * `round`: a slice for each root, all as long as the longest.
    /// * `all`: all slices.
    #[must_use]
    pub fn pipelined_s(&self, slice: &Traffic, round: &Traffic, all: &Traffic) -> f64 {
        let passing = |path_bytes: u64, round_bytes: u64, all_bytes: u64| {
            path_bytes.max(round_bytes.min(all_bytes)) + all_bytes.saturating_sub(round_bytes)
        };
        let busiest = Traffic::busiest_direction_bytes;
        let line_s = |bytes: u64| bytes as f64 / self.bytes_per_s;
        let inside_s = |bytes: u64| bytes as f64 / self.inside_bytes_per_s;
        let on_line_s = line_s(passing(slice.path_bytes, busiest(round), busiest(all)));
        let in_hosts_s = inside_s(passing(slice.inside_path_bytes, round.inside_bytes, all.inside_bytes));
        let moved_s =
            (on_line_s + inside_s(slice.inside_path_bytes)).max(in_hosts_s + line_s(slice.path_bytes));
        let first_sum_s = slice.path_summed_bytes as f64 / self.summed_bytes_per_s;
        let other_sums = all.summed_bytes.saturating_sub(slice.path_summed_bytes);
        let other_sums_s = other_sums as f64 / self.summed_bytes_per_s;
        f64::from(slice.steps) * self.latency_s + first_sum_s + moved_s.max(other_sums_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joining_counts_from_the_root() {
        let mut all = Traffic::none(4);
        let slice = dense::rooted(10, 4, 4);
        all.join(&slice, 3);
        assert_eq!((all.sent, all.received), (vec![40, 40, 40, 120], vec![40, 40, 40, 120]));
    }

    #[test]
    fn a_rate_that_makes_no_sense_is_named() {
        assert_eq!(Rates::default().wrong(), None);
        assert_eq!(Rates { latency_s: 0.0, ..Rates::default() }.wrong(), None);
        assert_eq!(Rates { bytes_per_s: 0.0, ..Rates::default() }.wrong(), Some("bytes_per_s"));
        assert_eq!(Rates { latency_s: f64::NAN, ..Rates::default() }.wrong(), Some("latency_s"));
        assert_eq!(
            Rates { product_flops_per_s: f64::INFINITY, ..Rates::default() }.wrong(),
            Some("product_flops_per_s")
        );
    }
}

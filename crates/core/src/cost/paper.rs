//! The papers' own formulas, as printed: for the policy that follows them and for tests that compare ours with them.
//!
//! Poseidon's Table 1 counts numbers, sent and received together, on the node of each kind that has most. The measurement
//! study's Table 1 and equations count seconds of one message.

/// Poseidon (ATC 2017), Table 1: an M x N fully connected layer, `rows` K per worker, P1 workers and P2 servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullyConnected {
    /// M, the layer's width.
    pub width: u64,
    /// N, its height.
    pub height: u64,
    /// K, the batch size: rows of activation per worker.
    pub rows: u64,
    /// P1 where all send to all.
    pub workers: u64,
    /// P1 of the store: the workers, or the groups in which they have summed before, each of which is one client.
    pub clients: u64,
    /// P2, at least 1.
    pub servers: u64,
    /// Whether no node is both: the paper's first two columns, and not its third.
    pub apart: bool,
}

impl FullyConnected {
    fn matrix(&self) -> u128 {
        u128::from(self.width) * u128::from(self.height)
    }

    /// K (M + N): one worker's factors.
    fn factors(&self) -> u128 {
        u128::from(self.rows) * (u128::from(self.width) + u128::from(self.height))
    }

    /// PS, a worker: 2 MN.
    #[must_use]
    pub fn store_worker(&self) -> f64 {
        2.0 * self.matrix() as f64
    }

    /// PS, a server: 2 P1 MN / P2.
    #[must_use]
    pub fn store_server(&self) -> f64 {
        2.0 * self.clients as f64 * self.matrix() as f64 / self.servers as f64
    }

    /// PS, a node that is both: 2 MN (P1 + P2 - 2) / P2.
    #[must_use]
    pub fn store_both(&self) -> f64 {
        self.store_both_times_servers() as f64 / self.servers as f64
    }

    /// PS, the node that has most: one that is both, or where servers are apart a worker or a server.
    #[must_use]
    pub fn store(&self) -> f64 {
        self.store_times_servers() as f64 / self.servers as f64
    }

    fn store_times_servers(&self) -> u128 {
        let most = u128::from(self.clients.max(self.servers));
        if self.apart { 2 * self.matrix() * most } else { self.store_both_times_servers() }
    }

    fn store_both_times_servers(&self) -> u128 {
        2 * self.matrix() * (u128::from(self.clients) + u128::from(self.servers)).saturating_sub(2)
    }

    /// SFB, a worker: 2 K (P1 - 1) (M + N).
    #[must_use]
    pub fn factors_worker(&self) -> f64 {
        self.factors_worker_exact() as f64
    }

    fn factors_worker_exact(&self) -> u128 {
        2 * self.factors() * u128::from(self.workers).saturating_sub(1)
    }

    /// Adam, the server that owns the layer: P1 MN + P1 K (M + N).
    #[must_use]
    pub fn adam_server(&self) -> f64 {
        (u128::from(self.workers) * (self.matrix() + self.factors())) as f64
    }

    /// Adam, a worker: K (M + N) + MN.
    #[must_use]
    pub fn adam_worker(&self) -> f64 {
        (self.factors() + self.matrix()) as f64
    }

    /// Adam, a worker that owns the layer: (P1 - 1) (MN + KM + KN).
    #[must_use]
    pub fn adam_both(&self) -> f64 {
        (u128::from(self.workers).saturating_sub(1) * (self.matrix() + self.factors())) as f64
    }

    /// Algorithm 1, line 7: whether sufficient factors are no more than the store, 2K(P1-1)(M+N) <= 2MN(P1+P2-2)/P2,
    /// in whole numbers, so that the boundary is exact. Where servers are apart the right side is 2MN max(P1, P2)/P2.
    #[must_use]
    pub fn factors_are_best(&self) -> bool {
        self.factors_worker_exact() * u128::from(self.servers) <= self.store_times_servers()
    }
}

/// The measurement study's equation 1: a central parameter server that is no worker, its `p` workers one after the other.
/// 2p n / BW + 2p latency.
#[must_use]
pub fn parameter_server_s(n_bytes: f64, p: f64, bytes_per_s: f64, latency_s: f64) -> f64 {
    2.0 * p * n_bytes / bytes_per_s + 2.0 * p * latency_s
}

/// Equation 2, a binomial tree: 2 lg(p) n / BW + 2 lg(p) latency.
#[must_use]
pub fn binomial_tree_s(n_bytes: f64, p: f64, bytes_per_s: f64, latency_s: f64) -> f64 {
    2.0 * p.log2() * n_bytes / bytes_per_s + 2.0 * p.log2() * latency_s
}

/// Equation 3, a ring: 2 (p-1)/p n / BW + 2 (p-1) latency.
#[must_use]
pub fn ring_s(n_bytes: f64, p: f64, bytes_per_s: f64, latency_s: f64) -> f64 {
    2.0 * (p - 1.0) * n_bytes / (p * bytes_per_s) + 2.0 * (p - 1.0) * latency_s
}

/// Equation 4, a butterfly of a power of two: 2 (p-1)/p n / BW + 2 lg(p) latency.
#[must_use]
pub fn butterfly_s(n_bytes: f64, p: f64, bytes_per_s: f64, latency_s: f64) -> f64 {
    2.0 * (p - 1.0) * n_bytes / (p * bytes_per_s) + 2.0 * p.log2() * latency_s
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(width: u64, height: u64, rows: u64, nodes: u64) -> FullyConnected {
        FullyConnected { width, height, rows, workers: nodes, clients: nodes, servers: nodes, apart: false }
    }

    /// Section 3.2: "4096 x 4096, batch size 32, P1 = P2 = 8: about 34, 34, 58.7 and 3.7 million".
    #[test]
    fn table_1_of_poseidon() {
        let fc = layer(4096, 4096, 32, 8);
        let millions = |count: f64| (count / 1e5).round() / 10.0;
        assert_eq!(millions(fc.store_worker()), 33.6);
        assert_eq!(millions(fc.store_server()), 33.6);
        assert_eq!(millions(fc.store_both()), 58.7);
        assert_eq!(millions(fc.factors_worker()), 3.7);
        assert_eq!(millions(fc.adam_server()), 136.3); // 8 (4096^2 + 32 x 8192)
        assert_eq!(millions(fc.adam_worker()), 17.0);
        assert_eq!(millions(fc.adam_both()), 119.3); // 7 (4096^2 + 32 x 8192)
        assert!(fc.factors_are_best());
    }

    #[test]
    fn table_1_with_fewer_servers_than_workers() {
        let fc = FullyConnected { servers: 2, ..layer(1000, 10, 3, 5) };
        assert_eq!(fc.store_worker(), 20_000.0);
        assert_eq!(fc.store_server(), 50_000.0);
        assert_eq!(fc.store_both(), 50_000.0); // 2 x 10,000 x 5 / 2
        assert_eq!(fc.factors_worker(), 24_240.0); // 2 x 3 x 4 x 1010
        // One node more decides which column counts where servers are apart.
        let apart = |clients, servers| FullyConnected { clients, servers, apart: true, ..fc };
        assert_eq!(
            [apart(5, 2), apart(2, 2), apart(2, 5)].map(|fc| fc.store()),
            [50_000.0, 20_000.0, 20_000.0]
        );
        assert!(apart(5, 2).factors_are_best(), "24,240 are less than 50,000");
        assert!(!apart(5, 5).factors_are_best(), "and more than 20,000");
        assert!(layer(1000, 10, 3, 5).factors_are_best(), "but less than the 32,000 of nodes that are both");
    }

    #[test]
    fn the_boundary_is_exact_and_goes_to_the_factors() {
        // M = N and P1 = P2 = P: equal where K P = M.
        assert!(layer(256, 256, 32, 8).factors_are_best());
        assert!(!layer(256, 256, 33, 8).factors_are_best());
        assert!(!layer(255, 256, 32, 8).factors_are_best());
        assert_eq!(layer(256, 256, 32, 8).factors_worker(), layer(256, 256, 32, 8).store_both());
        // Beyond what doubles can tell apart: P = 2 and K = 1 are equal where M + N = MN, at 2 x 2; scaled by 2^40 and
        // with K = 2^40, one row more or less still decides.
        let side = 1 << 41;
        assert!(layer(side, side, side / 2, 2).factors_are_best());
        assert!(!layer(side, side, side / 2 + 1, 2).factors_are_best());
    }

    #[test]
    fn the_papers_networks() {
        for nodes in [8, 16, 32] {
            for (width, height) in [(4096, 25088), (4096, 4096), (1000, 4096)] {
                assert!(
                    layer(width, height, 32, nodes).factors_are_best(),
                    "VGG19 {width} x {height}, {nodes} nodes"
                );
            }
        }
        assert!(!layer(1000, 1024, 128, 16).factors_are_best(), "GoogLeNet (section 5.2)");
    }

    #[test]
    fn equations_of_the_study() {
        // 53 MB, 4 servers, 6 GB/s, 2.5 us: sections 6.1 and 6.2.
        let (n, p, rate, latency) = (53e6, 4.0, 6e9, 2.5e-6);
        assert!((parameter_server_s(n, p, rate, latency) - (8.0 * n / rate + 20e-6)).abs() < 1e-12);
        assert!((binomial_tree_s(n, p, rate, latency) - (4.0 * n / rate + 10e-6)).abs() < 1e-12);
        assert!((ring_s(n, p, rate, latency) - (1.5 * n / rate + 15e-6)).abs() < 1e-12);
        assert!((butterfly_s(n, p, rate, latency) - (1.5 * n / rate + 10e-6)).abs() < 1e-12);
    }
}

//! What local updates move, and how long their steps take: ranks compute by themselves, and now and then a fragment of the
//! model is exchanged.
//!
//! A fragment that travels as it is moves once through the store. An encoded one goes to owners that are the workers, and back,
//! in so many bytes; or from every worker to all others.
//!
//! Each fragment travels once in H steps, c_f seconds on the busiest direction of an interface, and has the d steps from when
//! its contribution is taken to when its result lands. A step of t seconds computing then takes, in the mean of H steps and at
//! most,
//!
//! ```text
//! t + 1/H sum over f of max(0, c_f - d t)        t + max over f of max(0, c_f - d t)
//! ```
//!
//! Omitted: latency, headers, and what ranks and owners compute for a round.

/// How outer gradients are shortened. What makes bytes of them, and so knows how many there are, is no part of the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoded {
    /// Of all parts of the fragment, once.
    pub bytes: u64,
    /// Whether every worker sends them to all others, and not to owners.
    pub to_all: bool,
}

/// A round of a fragment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FragmentRound {
    /// What the store would move for it on the busiest direction of an interface; if it is encoded, with the workers as owners.
    pub store_bytes: u64,
    /// How long that would be busy.
    pub store_s: f64,
    /// The fragment as it is.
    pub whole_bytes: u64,
    /// How it is shortened, if it is.
    pub encoded: Option<Encoded>,
}

impl FragmentRound {
    /// What it moves on the busiest direction of an interface.
    #[must_use]
    pub fn bytes(&self, workers: u32) -> u64 {
        (self.store_bytes as f64 * self.share(workers)).round_ties_even() as u64
    }

    /// How long that is busy.
    #[must_use]
    pub fn wire_s(&self, workers: u32) -> f64 {
        self.store_s * self.share(workers)
    }

    /// Of what the store moves. To all others go p - 1 times the bytes; to the owners of all parts and back 2 (p - 1) / p times.
    fn share(&self, workers: u32) -> f64 {
        self.encoded.map_or(1.0, |Encoded { bytes, to_all }| {
            let ways = if to_all { f64::from(workers) / 2.0 } else { 1.0 };
            bytes as f64 / self.whole_bytes as f64 * ways
        })
    }
}

/// Seconds per step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalTimes {
    /// In the mean.
    pub mean_s: f64,
    /// Of the step that waits longest.
    pub longest_s: f64,
}

/// The times of steps that each compute for `compute_s`.
///
/// * `wire_s`: of each fragment.
/// * `sync_every`: H, at least 1.
/// * `delay`: d.
#[must_use]
pub fn local_times(compute_s: f64, wire_s: &[f64], sync_every: u32, delay: u32) -> LocalTimes {
    let waits = wire_s.iter().map(|wire_s| (wire_s - f64::from(delay) * compute_s).max(0.0));
    LocalTimes {
        mean_s: compute_s + waits.clone().sum::<f64>() / f64::from(sync_every.max(1)),
        longest_s: compute_s + waits.fold(0.0, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::dense;

    #[test]
    fn a_round_moves_its_bytes_to_the_owners_and_back_or_to_all() {
        for p in [2, 3, 4, 8] {
            let (of, bytes) = (24_000 * u64::from(p), 6_000 * u64::from(p));
            let store = dense::store(of / 4, 4, p, p);
            let store_bytes = store.busiest_direction_bytes();
            let whole = FragmentRound { store_bytes, store_s: 3.0, whole_bytes: of, encoded: None };
            let encoded = |to_all| FragmentRound { encoded: Some(Encoded { bytes, to_all }), ..whole };
            assert_eq!((whole.bytes(p), whole.wire_s(p)), (store_bytes, 3.0));
            let (to_owners, back) =
                (bytes / u64::from(p) * u64::from(p - 1), bytes / u64::from(p) * u64::from(p - 1));
            assert_eq!(encoded(false).bytes(p), to_owners + back);
            assert_eq!(encoded(false).wire_s(p), 0.75);
            assert_eq!(encoded(true).bytes(p), bytes * u64::from(p - 1));
        }
    }

    #[test]
    fn a_round_is_waited_for_but_for_what_its_delay_hides() {
        assert_eq!(local_times(1.0, &[30.0], 10, 0), LocalTimes { mean_s: 4.0, longest_s: 31.0 });
        assert_eq!(local_times(1.0, &[10.0, 12.0, 8.0], 30, 0), LocalTimes { mean_s: 2.0, longest_s: 13.0 });
        assert_eq!(
            local_times(1.0, &[10.0, 12.0, 8.0], 30, 9),
            LocalTimes { mean_s: 1.0 + 4.0 / 30.0, longest_s: 4.0 }
        );
        assert_eq!(local_times(1.0, &[10.0, 12.0, 8.0], 30, 12), LocalTimes { mean_s: 1.0, longest_s: 1.0 });
        assert_eq!(local_times(2.0, &[], 1, 0), LocalTimes { mean_s: 2.0, longest_s: 2.0 });
    }
}

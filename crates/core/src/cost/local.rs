//! How long steps of local updates take: ranks compute by themselves, and now and then a fragment of the model is exchanged.
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

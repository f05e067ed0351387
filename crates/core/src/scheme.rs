//! Which scheme is best for a layer, and why. Pure, so that all ranks that hold the same facts decide alike.
//!
//! Two policies. [`Policy::Paper`] is Poseidon's Algorithm 1: the formulas of its Table 1, in numbers sent and received,
//! and nothing else. [`Policy::Measured`] compares seconds: bytes over the measured line rate, latencies, sums, and the
//! product that rebuilds a gradient from its factors; a change of scheme must gain [`MARGIN`], so that facts that waver
//! do not make it waver. Neither ever chooses a scheme that its own model says is slower than the store.

mod facts;
mod reason;

use crate::cost::Rates;
use crate::error::Error;
use crate::way::Algorithm;
pub use facts::{Estimate, Facts, INDEX_BYTES, Kind};
pub use reason::Reason;
use std::fmt;
use std::str::FromStr;

/// The part of the present scheme's time that another must save before it takes over.
pub const MARGIN: f64 = 0.1;

/// How a layer is synchronised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// The gradient itself, by an allreduce.
    Dense(Algorithm),
    /// Sufficient factors of a linear layer, from every rank to every other.
    Factors,
    /// (index, row) pairs of an embedding, from every rank to every other.
    Pairs,
    /// Project Adam's: factors to the layer's owner, the full matrix back. For comparison; chosen only if asked for.
    Adam,
    /// The store with fp32 gradients rounded to bf16 on the wire. Lossy, and so never chosen.
    Bf16,
    /// The same with IEEE half precision.
    Fp16,
}

impl Scheme {
    /// The sharded store.
    pub const STORE: Self = Self::Dense(Algorithm::Store);
    /// All, in the order in which ties are decided.
    pub const ALL: [Self; 10] = [
        Self::STORE,
        Self::Dense(Algorithm::Central),
        Self::Dense(Algorithm::Tree),
        Self::Dense(Algorithm::Ring),
        Self::Dense(Algorithm::Butterfly),
        Self::Factors,
        Self::Pairs,
        Self::Adam,
        Self::Bf16,
        Self::Fp16,
    ];

    /// Its word in the glossary.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense(algorithm) => algorithm.name(),
            Self::Factors => "factors",
            Self::Pairs => "pairs",
            Self::Adam => "adam",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
        }
    }

    /// Whether results differ from the exact ones by more than the rounding of fp32 sums. Such a scheme is for users to ask for.
    #[must_use]
    pub fn is_lossy(self) -> bool {
        matches!(self, Self::Bf16 | Self::Fp16)
    }

    fn fits(self, kind: Kind) -> bool {
        match self {
            Self::Dense(_) | Self::Bf16 | Self::Fp16 => true,
            Self::Factors | Self::Adam => matches!(kind, Kind::Linear { .. }),
            Self::Pairs => matches!(kind, Kind::Embedding { .. }),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|scheme| scheme.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("unknown scheme {name:?}: expected one of {names}"))
        })
    }
}

/// How schemes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Poseidon's Algorithm 1.
    Paper,
    /// By seconds.
    Measured,
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        match name {
            "paper" => Ok(Self::Paper),
            "measured" => Ok(Self::Measured),
            _ => Err(Error::Config(format!("unknown policy {name:?}: expected paper or measured"))),
        }
    }
}

/// A choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// What to do.
    pub scheme: Scheme,
    /// Why.
    pub reason: Reason,
}

/// The best scheme for a layer.
///
/// * `allowed`: schemes that may be chosen besides the store; those that do not fit the layer, or are lossy, are passed over.
/// * `current`: the scheme in use, if the layer has been synchronised before.
#[must_use]
pub fn best_scheme(
    policy: Policy,
    facts: &Facts<'_>,
    allowed: &[Scheme],
    current: Option<Scheme>,
) -> Decision {
    match policy {
        Policy::Paper => paper(facts, allowed),
        Policy::Measured => measured(facts, allowed, current),
    }
}

/// Poseidon's Algorithm 1, BESTSCHEME.
fn paper(facts: &Facts<'_>, allowed: &[Scheme]) -> Decision {
    let store = |reason| Decision { scheme: Scheme::STORE, reason };
    if !matches!(facts.kind, Kind::Linear { .. }) || !allowed.contains(&Scheme::Factors) {
        return store(Reason::Dense);
    }
    let Some(layer) = facts.fully_connected() else { return store(Reason::RowsUnknown) };
    let (factors, both) = (layer.factors_worker(), layer.store_both());
    if layer.factors_are_best() {
        Decision { scheme: Scheme::Factors, reason: Reason::FewerNumbers { factors, store: both } }
    } else {
        store(Reason::MoreNumbers { factors, store: both })
    }
}

fn measured(facts: &Facts<'_>, allowed: &[Scheme], current: Option<Scheme>) -> Decision {
    let decide = |scheme, reason| Decision { scheme, reason };
    if facts.workers < 2 {
        return decide(Scheme::STORE, Reason::OneWorker);
    }
    let candidates: Vec<Estimate> = Scheme::ALL
        .into_iter()
        .filter(|scheme| *scheme != Scheme::STORE && !scheme.is_lossy() && allowed.contains(scheme))
        .filter_map(|scheme| facts.estimate(scheme))
        .collect();
    let store_s = facts.estimate(Scheme::STORE).map_or(0.0, |store| store.seconds());
    let mut best: Option<&Estimate> = None;
    for candidate in &candidates {
        if best.is_none_or(|best| candidate.seconds() < best.seconds()) {
            best = Some(candidate);
        }
    }
    let Some(best) = best else {
        let sends_rows = |scheme: &Scheme| !scheme.is_lossy() && !matches!(scheme, Scheme::Dense(_));
        let gathers = allowed.iter().any(|scheme| sends_rows(scheme) && scheme.fits(facts.kind));
        return decide(Scheme::STORE, if gathers { Reason::RowsUnknown } else { Reason::Dense });
    };
    let best_s = best.seconds();
    let (winner, winner_s) = if best_s < store_s { (best.scheme, best_s) } else { (Scheme::STORE, store_s) };
    // A scheme that has become slower than the store is no incumbent: it goes at once.
    let seconds_of = |scheme: Scheme| match scheme {
        Scheme::STORE => Some(store_s),
        _ => candidates.iter().find(|candidate| candidate.scheme == scheme).map(Estimate::seconds),
    };
    match current.and_then(|scheme| Some((scheme, seconds_of(scheme)?))) {
        Some((scheme, seconds))
            if scheme != winner && seconds <= store_s && winner_s > seconds * (1.0 - MARGIN) =>
        {
            decide(scheme, Reason::Kept { other: winner, other_s: winner_s, seconds })
        }
        _ if winner == Scheme::STORE => {
            decide(winner, Reason::StoreFastest { other: best.scheme, other_s: best_s, store_s })
        }
        _ => decide(winner, Reason::Faster { seconds: winner_s, store_s }),
    }
}

/// The fastest of `allowed` for one message in `slices` slices; the first of equals, the store if none is allowed.
#[must_use]
pub fn best_algorithm(
    elems: u64,
    elem_bytes: u64,
    workers: u32,
    slices: u64,
    rates: &Rates,
    allowed: &[Algorithm],
) -> (Algorithm, f64) {
    let mut best = None;
    for &algorithm in allowed {
        let (_, seconds) = algorithm.message(elems, elem_bytes, workers, slices, rates);
        if best.is_none_or(|(_, best_s)| seconds < best_s) {
            best = Some((algorithm, seconds));
        }
    }
    best.unwrap_or((Algorithm::Store, 0.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout;
    use proptest::prelude::*;

    /// No latency, no sums, a product that costs nothing: bytes alone decide.
    const BYTES_ALONE: Rates = Rates {
        bytes_per_s: 1e9,
        latency_s: 0.0,
        summed_bytes_per_s: 1e30,
        product_flops_per_s: 1e30,
        gather_s: 0.0,
    };
    const EVERYTHING: [Scheme; 7] = [
        Scheme::STORE,
        Scheme::Dense(Algorithm::Central),
        Scheme::Dense(Algorithm::Tree),
        Scheme::Dense(Algorithm::Ring),
        Scheme::Dense(Algorithm::Butterfly),
        Scheme::Factors,
        Scheme::Pairs,
    ];
    const GATHERS: [Scheme; 3] = [Scheme::STORE, Scheme::Factors, Scheme::Pairs];

    fn linear(outputs: u64, inputs: u64, rows: &[u64], rates: Rates) -> Facts<'_> {
        let workers = rows.len() as u32;
        Facts {
            kind: Kind::Linear { outputs, inputs },
            elems: outputs * inputs,
            elem_bytes: 4,
            rows,
            workers,
            servers: workers,
            slice_bytes: 512 << 10,
            collective_slice_bytes: 512 << 10,
            rates,
        }
    }

    fn embedding(vocabulary: u64, width: u64, rows: &[u64], rates: Rates) -> Facts<'_> {
        Facts { kind: Kind::Embedding { width }, elems: vocabulary * width, ..linear(1, 1, rows, rates) }
    }

    fn choice(policy: Policy, facts: &Facts<'_>) -> Scheme {
        best_scheme(policy, facts, &GATHERS, None).scheme
    }

    #[test]
    fn both_policies_choose_factors_for_vgg19_and_the_store_for_googlenet() {
        for policy in [Policy::Paper, Policy::Measured] {
            for nodes in [8, 16, 32] {
                let rows = vec![32; nodes];
                for (outputs, inputs) in [(4096, 25088), (4096, 4096), (1000, 4096)] {
                    let facts = linear(outputs, inputs, &rows, BYTES_ALONE);
                    assert_eq!(
                        choice(policy, &facts),
                        Scheme::Factors,
                        "{outputs} x {inputs}, {nodes} nodes"
                    );
                }
            }
            assert_eq!(choice(policy, &linear(1000, 1024, &[128; 16], BYTES_ALONE)), Scheme::STORE);
        }
    }

    #[test]
    fn the_paper_says_why_in_numbers() {
        let decision = best_scheme(Policy::Paper, &linear(4096, 4096, &[32; 8], BYTES_ALONE), &GATHERS, None);
        assert_eq!(decision.reason, Reason::FewerNumbers { factors: 3_670_016.0, store: 58_720_256.0 });
        assert_eq!(decision.reason.to_string(), "3.7 M numbers instead of 58.7 M through the store");
        let decision =
            best_scheme(Policy::Paper, &linear(1000, 1024, &[128; 16], BYTES_ALONE), &GATHERS, None);
        assert_eq!(decision.reason.code(), "more-numbers");
        assert_eq!(decision.reason.to_string(), "3.8 M numbers; factors would be 7.8 M");
    }

    #[test]
    fn the_boundary_is_exact_for_both() {
        // At n K = 2MN/(M+N) = 256 both send as much: the paper takes the factors, we stay with the store.
        let (at, above, below) = ([32; 8], [33; 8], [31; 8]);
        let facts = |rows| linear(256, 256, rows, BYTES_ALONE);
        assert_eq!(
            [&below, &at, &above].map(|r| choice(Policy::Paper, &facts(r))),
            [Scheme::Factors, Scheme::Factors, Scheme::STORE]
        );
        assert_eq!(
            [&below, &at, &above].map(|r| choice(Policy::Measured, &facts(r))),
            [Scheme::Factors, Scheme::STORE, Scheme::STORE]
        );
    }

    #[test]
    fn rebuilding_counts() {
        // Factors are 1/16 of the bytes; a product slow enough makes them slower all the same.
        let rows = [32; 8];
        let rates = |flops| Rates { product_flops_per_s: flops, ..BYTES_ALONE };
        let facts = linear(4096, 4096, &rows, rates(1e12));
        let factors = facts.estimate(Scheme::Factors).unwrap();
        assert_eq!(factors.rebuild_s, 2.0 * 224.0 * 4096.0 * 4096.0 / 1e12);
        assert_eq!(factors.direction_bytes, 7 * 32 * 8192 * 4);
        assert_eq!(choice(Policy::Measured, &facts), Scheme::Factors);
        let slow = linear(4096, 4096, &rows, rates(1e10));
        let decision = best_scheme(Policy::Measured, &slow, &GATHERS, None);
        assert!(
            matches!(decision.reason, Reason::StoreFastest { other: Scheme::Factors, .. }),
            "{decision:?}"
        );
        assert_eq!(choice(Policy::Paper, &slow), Scheme::Factors, "the paper does not count it");
    }

    #[test]
    fn pairs_win_while_few_rows_are_looked_up() {
        // n U (1 + index / row) < 2V.
        let (few, many) = ([400; 4], [6000; 4]);
        assert_eq!(choice(Policy::Measured, &embedding(10_000, 512, &few, BYTES_ALONE)), Scheme::Pairs);
        assert_eq!(choice(Policy::Measured, &embedding(10_000, 512, &many, BYTES_ALONE)), Scheme::STORE);
        assert_eq!(choice(Policy::Paper, &embedding(10_000, 512, &few, BYTES_ALONE)), Scheme::STORE);
        let pairs = embedding(10_000, 512, &few, BYTES_ALONE).estimate(Scheme::Pairs).unwrap();
        assert_eq!(pairs.direction_bytes, 3 * 400 * (4 + 2048));
    }

    #[test]
    fn what_cannot_be_or_is_not_known_stays_with_the_store() {
        let other = Facts { kind: Kind::Other, ..linear(100, 100, &[1; 4], BYTES_ALONE) };
        for policy in [Policy::Paper, Policy::Measured] {
            let decision = best_scheme(policy, &other, &GATHERS, None);
            assert_eq!(decision, Decision { scheme: Scheme::STORE, reason: Reason::Dense });
            let forbidden =
                best_scheme(policy, &linear(4096, 4096, &[1; 4], BYTES_ALONE), &[Scheme::STORE], None);
            assert_eq!(forbidden, Decision { scheme: Scheme::STORE, reason: Reason::Dense });
            let unknown = Facts { rows: &[], ..linear(4096, 4096, &[1; 4], BYTES_ALONE) };
            let decision = best_scheme(policy, &unknown, &GATHERS, None);
            assert_eq!(decision, Decision { scheme: Scheme::STORE, reason: Reason::RowsUnknown });
        }
        let alone = best_scheme(Policy::Measured, &linear(4096, 4096, &[1], BYTES_ALONE), &EVERYTHING, None);
        assert_eq!(alone, Decision { scheme: Scheme::STORE, reason: Reason::OneWorker });
    }

    #[test]
    fn a_change_must_gain_a_tenth() {
        let decide = |rows: u64, current| {
            best_scheme(
                Policy::Measured,
                &linear(2560, 2560, &[rows; 8], BYTES_ALONE),
                &GATHERS,
                Some(current),
            )
        };
        // Equal at 320 rows. At 300 factors gain 6 %, at 288 exactly a tenth, at 280 more.
        assert_eq!(decide(300, Scheme::STORE).scheme, Scheme::STORE);
        assert_eq!(decide(300, Scheme::STORE).reason.code(), "kept");
        assert_eq!(decide(280, Scheme::STORE).scheme, Scheme::Factors);
        assert_eq!(decide(280, Scheme::STORE).reason.code(), "faster");
        // Factors in use stay until they are slower than the store, and then go at once.
        assert_eq!(decide(319, Scheme::Factors).scheme, Scheme::Factors);
        assert_eq!(decide(321, Scheme::Factors).scheme, Scheme::STORE);
        assert_eq!(decide(321, Scheme::Factors).reason.code(), "store-fastest");
    }

    #[test]
    fn small_messages_want_few_steps_and_long_ones_few_bytes() {
        // A gigabit and 100 us; sums are free.
        let rates = Rates { summed_bytes_per_s: 1e30, ..Rates::default() };
        let best = |elems, p| {
            let slices = layout::pieces(elems * 4, 512 << 10, p);
            best_algorithm(elems, 4, p, slices, &rates, &Algorithm::ALL).0
        };
        assert_eq!(best(1, 4), Algorithm::Store, "two latencies");
        assert_eq!(best(1, 64), Algorithm::Store, "63 messages of 4 bytes cost less than a latency");
        assert_eq!(
            best(1 << 12, 16),
            Algorithm::Butterfly,
            "16 KiB are one slice: its owner would take 30 times that"
        );
        assert_eq!(best(112 << 17, 16), Algorithm::Store, "as few bytes as any, and two latencies");
        assert_eq!(best(1000, 1), Algorithm::Store);
    }

    #[test]
    fn each_kind_of_slice_has_its_own_size() {
        let rows = [32; 4];
        let both = linear(4096, 4096, &rows, Rates::default());
        let seconds = |facts: &Facts<'_>, scheme| facts.estimate(scheme).unwrap().wire_s;
        let store = Facts { slice_bytes: 64 << 10, ..both.clone() };
        let collective = Facts { collective_slice_bytes: 64 << 10, ..both.clone() };
        let tree = Scheme::Dense(Algorithm::Tree);
        assert!(seconds(&store, Scheme::STORE) < seconds(&both, Scheme::STORE));
        assert_eq!(seconds(&store, tree), seconds(&both, tree));
        assert!(seconds(&collective, tree) < seconds(&both, tree));
        assert_eq!(seconds(&collective, Scheme::STORE), seconds(&both, Scheme::STORE));
    }

    #[test]
    fn halves_on_the_wire_are_half_the_bytes_and_never_chosen() {
        let rows = [600; 4];
        let facts = linear(1024, 512, &rows, BYTES_ALONE);
        let store = facts.estimate(Scheme::STORE).unwrap();
        for scheme in [Scheme::Bf16, Scheme::Fp16] {
            let rounded = facts.estimate(scheme).unwrap();
            assert_eq!(2 * rounded.direction_bytes, store.direction_bytes);
            assert_eq!((2.0 * rounded.wire_s, rounded.steps), (store.wire_s, store.steps));
            for policy in [Policy::Paper, Policy::Measured] {
                let decision = best_scheme(policy, &facts, &[scheme], None);
                assert_eq!(decision, Decision { scheme: Scheme::STORE, reason: Reason::Dense });
            }
            assert!(Facts { elem_bytes: 8, ..facts.clone() }.estimate(scheme).is_none(), "fp32 alone");
        }
    }

    #[test]
    fn names_are_read_back() {
        for scheme in Scheme::ALL {
            assert_eq!(scheme.name().parse::<Scheme>(), Ok(scheme));
        }
        assert!("fastest".parse::<Scheme>().unwrap_err().to_string().contains("butterfly"));
        assert!("poseidon".parse::<Policy>().unwrap_err().to_string().contains("measured"));
    }

    #[test]
    fn facts_out_of_bounds_are_named() {
        let good = linear(4096, 4096, &[32; 8], Rates::default());
        assert_eq!(good.check(), Ok(()));
        let wrong = [
            (Facts { workers: 0, ..good.clone() }, "workers"),
            (Facts { servers: 5000, ..good.clone() }, "servers"),
            (Facts { rows: &[1, 2], ..good.clone() }, "rows of 2"),
            (Facts { rows: &[u64::MAX; 8], ..good.clone() }, "rows"),
            (Facts { elems: u64::MAX, ..good.clone() }, "elements"),
            (Facts { elem_bytes: 0, ..good.clone() }, "elements"),
            (Facts { slice_bytes: 0, ..good.clone() }, "slice_bytes"),
            (Facts { collective_slice_bytes: 0, ..good.clone() }, "collective_slice_bytes"),
            (Facts { kind: Kind::Linear { outputs: u64::MAX, inputs: u64::MAX }, ..good.clone() }, "numbers"),
            (Facts { rates: Rates { latency_s: -1.0, ..good.rates }, ..good.clone() }, "latency_s"),
        ];
        for (facts, word) in wrong {
            let message = facts.check().unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    proptest! {
        #[test]
        fn nothing_slower_than_the_store_is_chosen(
            outputs in 1u64..5000, inputs in 1u64..5000, is_embedding: bool,
            rows in proptest::collection::vec(0u64..600, 1..12), servers in 1u32..12,
            gigabits in 0.01f64..100.0, latency_us in 0.0f64..10_000.0, gigaflops in 0.1f64..10_000.0,
            allowed in 0usize..128, current in 0usize..10,
        ) {
            let rates = Rates {
                bytes_per_s: gigabits * 125e6,
                latency_s: latency_us * 1e-6,
                product_flops_per_s: gigaflops * 1e9,
                ..Rates::default()
            };
            let base = if is_embedding {
                embedding(outputs, inputs, &rows, rates)
            } else {
                linear(outputs, inputs, &rows, rates)
            };
            let facts = Facts { servers: servers.min(base.workers), ..base };
            prop_assert_eq!(facts.check(), Ok(()));
            let allowed: Vec<Scheme> =
                EVERYTHING.into_iter().enumerate().filter(|(i, _)| allowed >> i & 1 == 1).map(|(_, s)| s).collect();
            let decision = best_scheme(Policy::Measured, &facts, &allowed, Some(Scheme::ALL[current]));
            let store_s = facts.estimate(Scheme::STORE).unwrap().seconds();
            let seconds = facts.estimate(decision.scheme).unwrap().seconds();
            prop_assert!(seconds <= store_s, "{:?}: {} > {}", decision, seconds, store_s);
            prop_assert!(decision.scheme == Scheme::STORE || allowed.contains(&decision.scheme));
            // The choice stands: the same facts do not change it again.
            let again = best_scheme(Policy::Measured, &facts, &allowed, Some(decision.scheme));
            prop_assert_eq!(again.scheme, decision.scheme);
        }
    }
}

//! Which scheme is best for a layer, and why. Pure, so that all ranks that hold the same facts decide alike.
//!
//! Two policies. [`Policy::Paper`] is Poseidon's Algorithm 1: the formulas of its Table 1, in numbers sent and received,
//! and nothing else. [`Policy::Measured`] compares seconds: bytes over the measured line rate, latencies, sums, and the
//! product that rebuilds a gradient from its factors; a change of scheme must gain [`MARGIN`], so that facts that waver
//! do not make it waver, unless the one in use has become slower than the store. Neither ever chooses a scheme that its
//! own model says is slower than the store.

mod cluster;
mod facts;
mod grouping;
mod reason;

use crate::cost::Rates;
use crate::types::Unknown;
use crate::way::{Algorithm, Way};
pub use cluster::Cluster;
pub use facts::{Estimate, Facts, INDEX_BYTES, LayerShape};
pub use grouping::{GROUPS_BYTES, Grouping, GroupsReason, best_groups};
pub use reason::{MARGIN, Reason};
use std::str::FromStr;

/// How schemes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Poseidon's Algorithm 1.
    Paper,
    /// By seconds.
    Measured,
}

impl FromStr for Policy {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        let name_of = |policy| if policy == Self::Paper { "paper" } else { "measured" };
        Unknown::unless_among("policy", name, [Self::Paper, Self::Measured], name_of)
    }
}

/// What may be decided for a layer, and what is decided already.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a> {
    /// Ways that may be chosen besides the store; those that do not fit the layer, or are lossy, are passed over.
    pub allowed: &'a [Way],
    /// The way in use, if the layer has been synchronised before.
    pub current: Option<Way>,
    /// Whether the way in use stays for now in any case: it is that of ranks that went on while this one was away.
    pub adopted: bool,
    /// What is not chosen, if anything is: asked for by the user, the default, or the only one possible.
    pub given: Option<Given<'a>>,
    /// The collective that takes the store's place in the book, if one does; chosen before training.
    pub collective: Option<Algorithm>,
    /// Whether its gradients are sparse and can be sent so. What is chosen leaves them sparse, as optimizers for such gradients
    /// take no others: the store's averages are dense.
    pub sparse: bool,
    /// Whether its owners update it, from the whole gradient.
    pub owners_update: bool,
    /// Why the layer's gradient must travel whole, if it must for another reason.
    pub why_whole: Option<&'a str>,
    /// The rank that would send its gradient whole at present, if one would.
    pub whole_on: Option<u32>,
}

impl Default for Terms<'_> {
    /// Nothing is decided, and what may be chosen while training may be.
    fn default() -> Self {
        Self {
            allowed: &Way::WHILE_TRAINING,
            current: None,
            adopted: false,
            given: None,
            collective: None,
            sparse: false,
            owners_update: false,
            why_whole: None,
            whole_on: None,
        }
    }
}

impl<'a> Terms<'a> {
    /// What is not chosen, if anything is: as given, or by what the layer is. Owners that update take whole gradients alone, or
    /// factors that are for them: who wants others is to be refused.
    #[must_use]
    pub fn given(&self) -> Option<Given<'a>> {
        let pairs = Given { way: Way::PAIRS, what: "its gradients are sparse" };
        match self.given {
            None if self.sparse && self.why_whole.is_none() => Some(pairs),
            Some(Given { way: Way::PAIRS, .. }) if self.sparse => Some(pairs),
            given => given,
        }
    }

    /// Why the gradient must travel whole, if it must.
    #[must_use]
    pub fn why_whole(&self) -> Option<&'a str> {
        if self.owners_update {
            Some("its owners update it, from the whole gradient")
        } else {
            self.why_whole
        }
    }

    /// Whether a collective may be chosen in the store's place before training.
    #[must_use]
    pub fn may_choose_collective(&self) -> bool {
        self.given().is_none() && !self.owners_update
    }

    /// By which the whole gradient travels, whenever it does: the book is opened so.
    #[must_use]
    pub fn whole(&self) -> Way {
        match self.given() {
            Some(Given { way, .. }) if way.is_whole() => way,
            _ => self.collective.map_or(Way::STORE, Way::sum),
        }
    }

    /// The ways that the layer can change between while training, that of the whole gradient first. One alone stays.
    fn ways(&self, facts: &Facts<'_>) -> Vec<Way> {
        match self.given().map(|given| given.way) {
            // What the book has for whole gradients is fixed, and who shortens them keeps what is not sent yet.
            Some(way) if way != Way::STORE && !way.sends_rows() => vec![way],
            Some(way) if way.sends_rows() => vec![self.whole(), way],
            _ => {
                let fits = |way: &Way| self.why_whole().is_none() && way.sends_rows() && facts.fit(*way);
                let rows = self.allowed.iter().copied().find(fits);
                [self.whole()].into_iter().chain(rows).collect()
            }
        }
    }
}

/// A way that is given and not chosen.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// The way.
    pub way: Way,
    /// In words, what it leaves out if it shortens gradients; else why it is given, unless the user has asked for it.
    pub what: &'a str,
}

/// How a layer is synchronised, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// What to do.
    pub way: Way,
    /// Why.
    pub reason: Reason,
    /// Whether it is not chosen: as [`Terms::given()`].
    pub given: bool,
    /// Whether a later measurement may change it.
    pub may_change: bool,
    /// What it can change between while training, if all ranks are told to.
    pub ways: Vec<Way>,
}

/// The best of some ways.
#[derive(Debug, Clone, PartialEq)]
pub struct Best {
    /// What it is.
    pub way: Way,
    /// Why.
    pub reason: Reason,
}

/// How a layer is synchronised: the best way by the policy, unless one of these overrides it, the first that applies.
///
/// 1. *Given*: what was asked for (lossy or not), the default, or the only one possible, as for gradients that shall stay sparse. A
///    layer that could have nothing but the store has it in any case; for such a layer the rules below give the reason.
/// 2. *Adopted*: what the ranks use that went on while this one was away.
/// 3. *Kept*, of a collective: it is in the store's place, which the book does not have for the layer.
/// 4. *Store only*: the gradient must travel whole, as to owners that update; or would from some rank at present.
/// 5. *Kept*, of the way in use: no other gains [`MARGIN`], and the store is not faster.
#[must_use]
pub fn decide(policy: Policy, facts: &Facts<'_>, terms: &Terms<'_>) -> Decision {
    let ways = terms.ways(facts);
    let open = ways.len() > 1;
    if let Some(Given { way, what }) = terms.given()
        // The store of a layer that could have nothing else: why it could not is said below.
        && (way != Way::STORE || open || terms.collective.is_some())
    {
        let reason = match (way.shortens(), way.wire) {
            (true, _) => Reason::Shortened(what.into()),
            (false, Some(wire)) => Reason::Rounded(wire),
            (false, None) => Reason::Given(what.into()),
        };
        return Decision { way, reason, given: true, may_change: false, ways };
    }
    let Best { way, reason } = chosen(policy, facts, terms);
    let given = terms.given().is_some();
    let may_change = open && !given;
    let (way, reason) = match terms.current {
        Some(current) if terms.adopted && current != way => (current, Reason::Adopted),
        _ => (way, reason),
    };
    Decision { way, reason, given, may_change, ways }
}

/// The best way for a layer under its terms, whatever is given.
fn chosen(policy: Policy, facts: &Facts<'_>, terms: &Terms<'_>) -> Best {
    let must_be_whole = terms.why_whole().is_some() || terms.whole_on.is_some();
    let mut allowed = if must_be_whole { Vec::new() } else { terms.allowed.to_vec() };
    allowed.extend(terms.collective.map(Way::sum));
    let best = best_way(policy, facts, &allowed, terms.current);
    let reason = match (terms.collective, terms.why_whole(), terms.whole_on) {
        // The book does not have the store for this layer.
        (Some(_), ..) if best.way == Way::STORE => {
            return Best { way: terms.whole(), reason: Reason::KeptCollective(Box::new(best.reason)) };
        }
        (_, Some(why), _) if best.reason == Reason::Dense => Reason::StoreOnly(why.into()),
        (_, None, Some(rank)) if best.reason == Reason::Dense => Reason::WholeOn(rank),
        _ => best.reason,
    };
    Best { reason, ..best }
}

/// The best way for a layer, of the store and those that are allowed; `current` is the one in use, if there is one.
#[must_use]
pub fn best_way(policy: Policy, facts: &Facts<'_>, allowed: &[Way], current: Option<Way>) -> Best {
    match policy {
        Policy::Paper => paper(facts, allowed),
        Policy::Measured => measured(facts, allowed, current),
    }
}

/// Poseidon's Algorithm 1, BESTSCHEME.
fn paper(facts: &Facts<'_>, allowed: &[Way]) -> Best {
    let store = |reason| Best { way: Way::STORE, reason };
    if !matches!(facts.shape, LayerShape::Linear { .. }) || !allowed.contains(&Way::FACTORS) {
        let pairs = allowed.contains(&Way::PAIRS) && facts.fit(Way::PAIRS);
        return store(if pairs { Reason::NotWeighed } else { Reason::Dense });
    }
    let Some(layer) = facts.fully_connected() else { return store(Reason::RowsUnknown) };
    let (factors, whole) = (layer.factors_worker(), layer.store());
    if layer.factors_are_best() {
        Best { way: Way::FACTORS, reason: Reason::FewerNumbers { factors, store: whole } }
    } else {
        store(Reason::MoreNumbers { factors, store: whole })
    }
}

fn measured(facts: &Facts<'_>, allowed: &[Way], current: Option<Way>) -> Best {
    let found = |way, reason| Best { way, reason };
    if facts.cluster.workers < 2 {
        return found(Way::STORE, Reason::OneWorker);
    }
    let candidates: Vec<Estimate> = Way::ALL
        .into_iter()
        .filter(|way| *way != Way::STORE && !way.is_lossy() && allowed.contains(way))
        .filter_map(|way| facts.estimate(way))
        .collect();
    let store_s = facts.estimate(Way::STORE).map_or(0.0, |store| store.seconds());
    let mut best: Option<&Estimate> = None;
    for candidate in &candidates {
        if best.is_none_or(|best| candidate.seconds() < best.seconds()) {
            best = Some(candidate);
        }
    }
    let Some(best) = best else {
        let gathers = allowed.iter().any(|way| way.sends_rows() && facts.fit(*way));
        return found(Way::STORE, if gathers { Reason::RowsUnknown } else { Reason::Dense });
    };
    let best_s = best.seconds();
    let (winner, winner_s) = if best_s < store_s { (best.way, best_s) } else { (Way::STORE, store_s) };
    // A scheme that has become slower than the store is no incumbent: it goes at once.
    let seconds_of = |way: Way| match way {
        Way::STORE => Some(store_s),
        _ => candidates.iter().find(|candidate| candidate.way == way).map(Estimate::seconds),
    };
    match current.and_then(|way| Some((way, seconds_of(way)?))) {
        Some((way, seconds))
            if way != winner && seconds <= store_s && winner_s > seconds * (1.0 - MARGIN) =>
        {
            found(way, Reason::Kept { other: winner, other_s: winner_s, seconds })
        }
        _ if winner == Way::STORE => {
            found(winner, Reason::StoreFastest { other: best.way, other_s: best_s, store_s })
        }
        _ => found(winner, Reason::Faster { seconds: winner_s, store_s }),
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
        inside_bytes_per_s: 1e30,
        latency_s: 0.0,
        summed_bytes_per_s: 1e30,
        product_flops_per_s: 1e30,
        gather_s: 0.0,
    };
    const EVERYTHING: [Way; 7] = [
        Way::STORE,
        Way::sum(Algorithm::Central),
        Way::sum(Algorithm::Tree),
        Way::sum(Algorithm::Ring),
        Way::sum(Algorithm::Butterfly),
        Way::FACTORS,
        Way::PAIRS,
    ];
    const GATHERS: [Way; 3] = [Way::STORE, Way::FACTORS, Way::PAIRS];

    fn linear(outputs: u64, inputs: u64, rows: &[u64], rates: Rates) -> Facts<'_> {
        let workers = rows.len() as u32;
        Facts {
            shape: LayerShape::Linear { outputs, inputs },
            elems: outputs * inputs,
            elem_bytes: 4,
            rows,
            short_bytes: 0,
            cluster: Cluster {
                workers,
                servers: workers,
                servers_apart: false,
                groups: Vec::new(),
                hosts: Vec::new(),
                slice_bytes: 512 << 10,
                collective_slice_bytes: 512 << 10,
                rates,
            },
        }
    }

    /// The same layer on another cluster.
    fn on<'a>(facts: &Facts<'a>, change: impl FnOnce(&mut Cluster)) -> Facts<'a> {
        let mut facts = facts.clone();
        change(&mut facts.cluster);
        facts
    }

    fn embedding(vocabulary: u64, width: u64, rows: &[u64], rates: Rates) -> Facts<'_> {
        Facts {
            shape: LayerShape::Embedding { width },
            elems: vocabulary * width,
            ..linear(1, 1, rows, rates)
        }
    }

    fn choice(policy: Policy, facts: &Facts<'_>) -> Way {
        best_way(policy, facts, &GATHERS, None).way
    }

    #[test]
    fn both_policies_choose_factors_for_vgg19_and_the_store_for_googlenet() {
        for policy in [Policy::Paper, Policy::Measured] {
            for nodes in [8, 16, 32] {
                let rows = vec![32; nodes];
                for (outputs, inputs) in [(4096, 25088), (4096, 4096), (1000, 4096)] {
                    let facts = linear(outputs, inputs, &rows, BYTES_ALONE);
                    assert_eq!(choice(policy, &facts), Way::FACTORS, "{outputs} x {inputs}, {nodes} nodes");
                }
            }
            assert_eq!(choice(policy, &linear(1000, 1024, &[128; 16], BYTES_ALONE)), Way::STORE);
        }
    }

    #[test]
    fn the_paper_says_why_in_numbers() {
        let decision = best_way(Policy::Paper, &linear(4096, 4096, &[32; 8], BYTES_ALONE), &GATHERS, None);
        assert_eq!(decision.reason, Reason::FewerNumbers { factors: 3_670_016.0, store: 58_720_256.0 });
        assert_eq!(decision.reason.to_string(), "3.7 M numbers instead of 58.7 M through the store");
        let decision = best_way(Policy::Paper, &linear(1000, 1024, &[128; 16], BYTES_ALONE), &GATHERS, None);
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
            [Way::FACTORS, Way::FACTORS, Way::STORE]
        );
        assert_eq!(
            [&below, &at, &above].map(|r| choice(Policy::Measured, &facts(r))),
            [Way::FACTORS, Way::STORE, Way::STORE]
        );
    }

    #[test]
    fn rebuilding_counts() {
        // Factors are 1/16 of the bytes; a product slow enough makes them slower all the same.
        let rows = [32; 8];
        let rates = |flops| Rates { product_flops_per_s: flops, ..BYTES_ALONE };
        let facts = linear(4096, 4096, &rows, rates(1e12));
        let factors = facts.estimate(Way::FACTORS).unwrap();
        assert_eq!(factors.rebuild_s, 2.0 * 224.0 * 4096.0 * 4096.0 / 1e12);
        assert_eq!(factors.direction_bytes, 7 * 32 * 8192 * 4);
        assert_eq!(choice(Policy::Measured, &facts), Way::FACTORS);
        let slow = linear(4096, 4096, &rows, rates(1e10));
        let decision = best_way(Policy::Measured, &slow, &GATHERS, None);
        assert!(matches!(decision.reason, Reason::StoreFastest { other: Way::FACTORS, .. }), "{decision:?}");
        assert_eq!(choice(Policy::Paper, &slow), Way::FACTORS, "the paper does not count it");
    }

    #[test]
    fn pairs_win_while_few_rows_are_looked_up() {
        // n U (1 + index / row) < 2V.
        let (few, many) = ([400; 4], [6000; 4]);
        assert_eq!(choice(Policy::Measured, &embedding(10_000, 512, &few, BYTES_ALONE)), Way::PAIRS);
        assert_eq!(choice(Policy::Measured, &embedding(10_000, 512, &many, BYTES_ALONE)), Way::STORE);
        let by_paper = best_way(Policy::Paper, &embedding(10_000, 512, &few, BYTES_ALONE), &GATHERS, None);
        assert_eq!(by_paper, Best { way: Way::STORE, reason: Reason::NotWeighed });
        let pairs = embedding(10_000, 512, &few, BYTES_ALONE).estimate(Way::PAIRS).unwrap();
        assert_eq!(pairs.direction_bytes, 3 * 400 * (4 + 2048));
    }

    #[test]
    fn what_cannot_be_or_is_not_known_stays_with_the_store() {
        let other = Facts { shape: LayerShape::Other, ..linear(100, 100, &[1; 4], BYTES_ALONE) };
        for policy in [Policy::Paper, Policy::Measured] {
            let decision = best_way(policy, &other, &GATHERS, None);
            assert_eq!(decision, Best { way: Way::STORE, reason: Reason::Dense });
            let forbidden = best_way(policy, &linear(4096, 4096, &[1; 4], BYTES_ALONE), &[Way::STORE], None);
            assert_eq!(forbidden, Best { way: Way::STORE, reason: Reason::Dense });
            let unknown = Facts { rows: &[], ..linear(4096, 4096, &[1; 4], BYTES_ALONE) };
            let decision = best_way(policy, &unknown, &GATHERS, None);
            assert_eq!(decision, Best { way: Way::STORE, reason: Reason::RowsUnknown });
        }
        let alone = best_way(Policy::Measured, &linear(4096, 4096, &[1], BYTES_ALONE), &EVERYTHING, None);
        assert_eq!(alone, Best { way: Way::STORE, reason: Reason::OneWorker });
    }

    #[test]
    fn a_change_must_gain_a_tenth() {
        let best = |rows: u64, current| {
            best_way(Policy::Measured, &linear(2560, 2560, &[rows; 8], BYTES_ALONE), &GATHERS, Some(current))
        };
        // Equal at 320 rows. At 300 factors gain 6 %, at 288 exactly a tenth, at 280 more.
        assert_eq!(best(300, Way::STORE).way, Way::STORE);
        assert_eq!(best(300, Way::STORE).reason.code(), "kept");
        assert_eq!(best(280, Way::STORE).way, Way::FACTORS);
        assert_eq!(best(280, Way::STORE).reason.code(), "faster");
        // Factors in use stay until they are slower than the store, and then go at once.
        assert_eq!(best(319, Way::FACTORS).way, Way::FACTORS);
        assert_eq!(best(321, Way::FACTORS).way, Way::STORE);
        assert_eq!(best(321, Way::FACTORS).reason.code(), "store-fastest");
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
        let seconds = |facts: &Facts<'_>, way| facts.estimate(way).unwrap().wire_s;
        let store = on(&both, |cluster| cluster.slice_bytes = 64 << 10);
        let collective = on(&both, |cluster| cluster.collective_slice_bytes = 64 << 10);
        let tree = Way::sum(Algorithm::Tree);
        assert!(seconds(&store, Way::STORE) < seconds(&both, Way::STORE));
        assert_eq!(seconds(&store, tree), seconds(&both, tree));
        assert!(seconds(&collective, tree) < seconds(&both, tree));
        assert_eq!(seconds(&collective, Way::STORE), seconds(&both, Way::STORE));
    }

    #[test]
    fn servers_apart_take_the_place_of_shards() {
        // A worker sends all of it, and a server gets its part of it from every worker: Poseidon's table 1, by direction.
        let rows = [600; 4];
        let bytes = 4096 * 4096 * 4;
        for (servers, busiest) in [(1, 4 * bytes), (2, 2 * bytes), (4, bytes), (8, bytes)] {
            let facts = on(&linear(4096, 4096, &rows, BYTES_ALONE), |cluster| {
                (cluster.servers, cluster.servers_apart) = (servers, true);
            });
            let store = facts.estimate(Way::STORE).unwrap();
            assert_eq!((store.direction_bytes, store.total_bytes, store.steps), (busiest, 8 * bytes, 2));
            // While answers leave, contributions come: all but the first slice's way back is hidden.
            let line_s = busiest as f64 / BYTES_ALONE.bytes_per_s;
            assert!(
                (line_s..1.1 * line_s).contains(&store.wire_s),
                "{servers}: {} and {line_s}",
                store.wire_s
            );
        }
    }

    /// Eight workers on two hosts, `groups` or none, and servers on hosts of their own.
    fn on_two_hosts<'a>(rows: &'a [u64], groups: &[Vec<u32>], rates: Rates) -> Facts<'a> {
        on(&linear(4096, 4096, rows, rates), |cluster| {
            cluster.hosts = vec![0, 0, 0, 0, 1, 1, 1, 1];
            *cluster = cluster.in_groups(groups);
        })
    }

    fn by_host() -> Vec<Vec<u32>> {
        vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]
    }

    #[test]
    fn groups_of_a_host_leave_its_interface_an_mth_of_the_stores_bytes() {
        let (rows, groups, bytes) = ([32; 8], by_host(), 4096 * 4096 * 4);
        let with = on_two_hosts(&rows, &groups, BYTES_ALONE).estimate(Way::STORE).unwrap();
        let without = on_two_hosts(&rows, &[], BYTES_ALONE).estimate(Way::STORE).unwrap();
        assert_eq!((with.direction_bytes, with.inside_bytes, with.steps), (bytes, 3 * bytes, 4));
        assert_eq!((without.direction_bytes, without.inside_bytes), (4 * bytes, 3 * bytes / 4));
        assert_eq!((with.busy_s, without.busy_s), (bytes as f64 / 1e9, 4.0 * bytes as f64 / 1e9));
        assert!(with.wire_s < 0.3 * without.wire_s, "{} and {}", with.wire_s, without.wire_s);
        // Where it is slow inside that is what counts: (m-1) n at a head.
        let slow = Rates { inside_bytes_per_s: 1e9, ..BYTES_ALONE };
        let with = on_two_hosts(&rows, &groups, slow).estimate(Way::STORE).unwrap();
        assert_eq!(with.busy_s, 3.0 * bytes as f64 / 1e9);
        assert!(with.wire_s > 3.0 * bytes as f64 / 1e9);
    }

    #[test]
    fn other_ways_are_compared_with_the_store_of_groups() {
        // Of factors 4 x K x 8192 numbers leave a host in groups and four times that without, to the store 4096^2 and four times that:
        // the same at 512 rows.
        let (groups, slow) = (by_host(), Rates { inside_bytes_per_s: 1e9, ..BYTES_ALONE });
        let chosen = |rows: u64, groups: &[Vec<u32>], rates| {
            choice(Policy::Measured, &on_two_hosts(&[rows; 8], groups, rates))
        };
        for (rows, way) in [(400, Way::FACTORS), (600, Way::STORE)] {
            assert_eq!(chosen(rows, &groups, BYTES_ALONE), way, "{rows}");
            assert_eq!(chosen(rows, &[], BYTES_ALONE), way, "{rows}");
        }
        // Where it is slow inside heads count: 24 x K x 8192 numbers come and go there, or 3 x 4096^2.
        assert_eq!([100, 400].map(|rows| chosen(rows, &groups, slow)), [Way::FACTORS, Way::STORE]);
    }

    #[test]
    fn algorithm_1_takes_groups_for_the_stores_clients() {
        // 2 x 300 x 7 x 8192 numbers are more than the 2 x 4096^2 of two clients, and less than the 3.5 x 4096^2 of eight.
        let (rows, groups) = ([300; 8], by_host());
        assert_eq!(choice(Policy::Paper, &on_two_hosts(&rows, &groups, BYTES_ALONE)), Way::STORE);
        assert_eq!(choice(Policy::Paper, &on_two_hosts(&rows, &[], BYTES_ALONE)), Way::FACTORS);
    }

    #[test]
    fn collectives_share_their_hosts_interface() {
        let rows = [32; 8];
        let ring = Way::sum(Algorithm::Ring);
        let apart = linear(4096, 4096, &rows, BYTES_ALONE).estimate(ring).unwrap();
        let shared = on_two_hosts(&rows, &[], BYTES_ALONE).estimate(ring).unwrap();
        assert_eq!(
            (shared.direction_bytes, shared.total_bytes),
            (4 * apart.direction_bytes, apart.total_bytes)
        );
        assert!((shared.wire_s / apart.wire_s - 4.0).abs() < 1e-9);
        let rates = Rates { inside_bytes_per_s: 10.0 * BYTES_ALONE.bytes_per_s, ..BYTES_ALONE };
        let one_host = on(&linear(4096, 4096, &rows, rates), |cluster| cluster.hosts = vec![0; 8]);
        let one_host = one_host.estimate(ring).unwrap();
        assert_eq!((one_host.direction_bytes, one_host.inside_bytes), (0, apart.direction_bytes));
        assert!((10.0 * one_host.wire_s / apart.wire_s - 1.0).abs() < 1e-9);
    }

    #[test]
    fn halves_on_the_wire_are_half_the_bytes_and_never_chosen() {
        let rows = [600; 4];
        let facts = linear(1024, 512, &rows, BYTES_ALONE);
        let store = facts.estimate(Way::STORE).unwrap();
        for way in [Way::BF16, Way::FP16] {
            let rounded = facts.estimate(way).unwrap();
            assert_eq!(2 * rounded.direction_bytes, store.direction_bytes);
            assert_eq!((2.0 * rounded.wire_s, rounded.steps), (store.wire_s, store.steps));
            for policy in [Policy::Paper, Policy::Measured] {
                let decision = best_way(policy, &facts, &[way], None);
                assert_eq!(decision, Best { way: Way::STORE, reason: Reason::Dense });
            }
            assert!(Facts { elem_bytes: 8, ..facts.clone() }.estimate(way).is_none(), "fp32 alone");
        }
    }

    #[test]
    fn what_is_given_or_fixed_is_not_chosen() {
        let rows = [32; 8];
        let facts = Facts { short_bytes: 1000, ..linear(4096, 4096, &rows, BYTES_ALONE) };
        let said = |terms: Terms<'_>| {
            let Decision { way, reason, .. } = decide(Policy::Measured, &facts, &terms);
            (way.name(), reason.code(), reason.to_string())
        };
        let free = Terms { allowed: &GATHERS, ..Terms::default() };
        assert_eq!(said(free).1, "faster");
        let given = |way, what| Terms { given: Some(Given { way, what }), ..free };
        assert_eq!(said(given(Way::STORE, "")), ("store", "given", "as given".into()));
        let sparse = ("pairs", "given", "not chosen: its gradients are sparse".into());
        assert_eq!(said(given(Way::PAIRS, "its gradients are sparse")), sparse);
        let rounded = "LOSSY, as given: rounded to fp16 on the wire, summed in fp32";
        assert_eq!(said(given(Way::FP16, "")), ("fp16", "given", rounded.into()));
        let shortened = ("1bit", "lossy", "LOSSY, as given: signs alone".to_string());
        assert_eq!(said(given(Way::ONE_BIT, "signs alone")), shortened);
        let whole = Terms { why_whole: Some("its weight is tied"), ..free };
        assert_eq!(said(whole), ("store", "store-only", "its weight is tied".into()));
        let ring = Terms { collective: Some(Algorithm::Ring), ..whole };
        let (way, code, reason) = said(ring);
        assert_eq!((way, code), ("ring", "kept"), "the book does not have the store for it");
        assert!(reason.starts_with("as chosen before training; now through the store "), "{reason}");
        assert_eq!(said(Terms { why_whole: None, ..ring }).0, "factors", "rows may still take its place");
        let at_present = said(Terms { whole_on: Some(3), ..free });
        assert_eq!(at_present, ("store", "store-only", "rank 3 would send its gradient whole".into()));
        let adopted = Terms { current: Some(Way::STORE), adopted: true, ..free };
        assert_eq!(said(adopted), ("store", "adopted", "as on the ranks that went on".into()));
        assert_eq!(said(Terms { current: Some(Way::FACTORS), ..adopted }).1, "faster");
    }

    #[test]
    fn the_book_has_what_is_given_of_whole_gradients_else_the_collective_else_the_store() {
        let rows = [32; 8];
        let facts = linear(4096, 4096, &rows, BYTES_ALONE);
        let ring = Way::sum(Algorithm::Ring);
        for (given, collective, whole) in [
            (None, None, Way::STORE),
            (None, Some(Algorithm::Ring), ring),
            (Some(Way::STORE), Some(Algorithm::Ring), Way::STORE),
            (Some(Way::BF16), Some(Algorithm::Ring), Way::BF16),
            (Some(Way::FACTORS), None, Way::STORE),
            (Some(Way::ONE_BIT), Some(Algorithm::Ring), ring),
        ] {
            let given = given.map(|way| Given { way, what: "" });
            let terms = Terms { given, collective, whole_on: Some(0), ..Terms::default() };
            assert_eq!(terms.whole(), whole, "{terms:?}");
            let way = decide(Policy::Measured, &facts, &terms).way;
            assert!(!way.is_whole() || way == whole, "no layer sends its gradient whole by another: {way}");
        }
    }

    #[test]
    fn a_decision_says_whether_it_was_given_and_may_change() {
        let rows = [32; 8];
        let facts = linear(4096, 4096, &rows, BYTES_ALONE);
        let other = Facts { shape: LayerShape::Other, ..facts.clone() };
        let free = Terms::default();
        let store = Terms { given: Some(Given { way: Way::STORE, what: "" }), ..free };
        let said = |facts: &Facts<'_>, terms: &Terms<'_>| {
            let decision = decide(Policy::Measured, facts, terms);
            (decision.reason.code(), decision.given, decision.may_change)
        };
        assert_eq!(said(&facts, &free), ("faster", false, true));
        assert_eq!(said(&facts, &store), ("given", true, false));
        assert_eq!(said(&other, &free), ("dense", false, false));
        assert_eq!(said(&other, &store), ("dense", true, false), "there was no choice");
        assert_eq!(said(&facts, &Terms { why_whole: Some("tied"), ..store }), ("store-only", true, false));
        assert_eq!(said(&facts, &Terms { whole_on: Some(0), ..free }), ("store-only", false, true));
    }

    #[test]
    fn sparse_gradients_stay_sparse_unless_something_else_is_given_or_they_cannot() {
        let rows = [3000; 4];
        let facts = embedding(100, 10, &rows, BYTES_ALONE);
        let said = |terms: Terms<'_>| {
            let Decision { way, reason, given, .. } = decide(Policy::Measured, &facts, &terms);
            (way, reason.to_string(), given)
        };
        let (free, sparse) = (Terms::default(), Terms { sparse: true, ..Terms::default() });
        assert_eq!(said(free).0, Way::STORE, "so many rows that the store is faster");
        let pairs = (Way::PAIRS, "not chosen: its gradients are sparse".into(), true);
        assert_eq!(said(sparse), pairs);
        assert!(!sparse.may_choose_collective());
        let asked = |way, what| Terms { given: Some(Given { way, what }), ..sparse };
        assert_eq!(said(asked(Way::PAIRS, "")), pairs, "there is no other");
        assert_eq!(said(asked(Way::STORE, "the store is the default")).0, Way::STORE);
        assert_eq!(said(Terms { owners_update: true, ..sparse }), pairs, "for the caller to refuse");
        let cannot = Terms { why_whole: Some("its weight is tied"), ..sparse };
        assert_eq!(said(cannot), (Way::STORE, "its weight is tied".into(), false));
    }

    #[test]
    fn what_owners_update_travels_whole_and_to_them() {
        let rows = [1; 8];
        for facts in [linear(4096, 4096, &rows, BYTES_ALONE), embedding(4096, 4096, &rows, BYTES_ALONE)] {
            let terms =
                Terms { owners_update: true, why_whole: Some("its weight is tied"), ..Terms::default() };
            let decision = decide(Policy::Measured, &facts, &terms);
            assert_eq!(
                (decision.way, &decision.ways[..], decision.given),
                (Way::STORE, &[Way::STORE][..], false)
            );
            assert_eq!(decision.reason.code(), "store-only");
            assert_eq!(decision.reason.to_string(), "its owners update it, from the whole gradient");
            assert!(!decision.may_change && !terms.may_choose_collective());
            assert!(Terms { owners_update: false, ..terms }.may_choose_collective());
            // The default says no more than that, and half the bytes are whole gradients, too.
            let given = |way| Terms { given: Some(Given { way, what: "as asked" }), ..terms };
            let said = decide(Policy::Measured, &facts, &given(Way::STORE));
            assert_eq!((said.reason, said.given), (decision.reason, true));
            assert_eq!(decide(Policy::Measured, &facts, &given(Way::BF16)).way, Way::BF16);
        }
    }

    #[test]
    fn a_layer_changes_between_its_whole_gradient_and_its_rows_unless_the_book_or_a_residual_forbids() {
        let rows = [32; 8];
        let linear = Facts { short_bytes: 1000, ..linear(4096, 4096, &rows, BYTES_ALONE) };
        let other = Facts { shape: LayerShape::Other, ..linear.clone() };
        let ways = |facts: &Facts<'_>, terms: &Terms<'_>| {
            let Decision { way, ways, .. } = decide(Policy::Measured, facts, terms);
            assert!(ways.contains(&way), "{way} is not among {ways:?}");
            ways.into_iter().map(Way::name).collect::<Vec<_>>().join(" ")
        };
        let free = Terms::default();
        let given = |way| Terms { given: Some(Given { way, what: "" }), ..free };
        assert_eq!(ways(&linear, &free), "store factors");
        assert_eq!(ways(&embedding(100, 10, &rows, BYTES_ALONE), &free), "store pairs");
        assert_eq!(ways(&other, &free), "store");
        assert_eq!(ways(&linear, &Terms { why_whole: Some("tied"), ..free }), "store");
        assert_eq!(ways(&linear, &Terms { collective: Some(Algorithm::Ring), ..free }), "ring factors");
        for (way, between) in [
            (Way::STORE, "store factors"),
            (Way::FACTORS, "store factors"),
            (Way::ADAM, "store adam"),
            (Way::sum(Algorithm::Ring), "ring"),
            (Way::BF16, "bf16"),
            (Way::ONE_BIT, "1bit"),
        ] {
            assert_eq!(ways(&linear, &given(way)), between);
        }
    }

    #[test]
    fn what_shortens_a_gradient_costs_what_it_sends() {
        let rows = [32; 8];
        let facts = linear(100, 100, &rows, BYTES_ALONE);
        assert_eq!(facts.estimate(Way::DGC), None, "its bytes are not known");
        let short = Facts { short_bytes: 1000, ..facts }.estimate(Way::DGC).unwrap();
        assert_eq!((short.steps, short.direction_bytes, short.node_bytes), (1, 7000, 14_000));
        assert_eq!((short.total_bytes, short.wire_s, short.rebuild_s), (56_000, 7e-6, 0.0));
        assert!(Facts { short_bytes: 1 << 60, ..linear(1, 1, &rows, BYTES_ALONE) }.check().is_err());
    }

    #[test]
    fn names_are_read_back() {
        assert!("fastest".parse::<Way>().unwrap_err().to_string().contains("butterfly"));
        assert!("poseidon".parse::<Policy>().unwrap_err().to_string().contains("measured"));
    }

    #[test]
    fn facts_out_of_bounds_are_named() {
        let good = linear(4096, 4096, &[32; 8], Rates::default());
        assert_eq!(good.check(), Ok(()));
        let (two, lacking) = (by_host(), [vec![0, 1, 2, 3], vec![4, 5, 6, 6]]);
        assert_eq!(on(&good, |cluster| *cluster = cluster.in_groups(&two)).check(), Ok(()));
        let wrong = [
            (on(&good, |cluster| cluster.workers = 0), "workers"),
            (on(&good, |cluster| cluster.servers = 5000), "servers"),
            (Facts { rows: &[1, 2], ..good.clone() }, "rows of 2"),
            (Facts { rows: &[u64::MAX; 8], ..good.clone() }, "rows"),
            (Facts { elems: u64::MAX, ..good.clone() }, "elements"),
            (Facts { elem_bytes: 0, ..good.clone() }, "elements"),
            (on(&good, |cluster| cluster.hosts = vec![1, 1]), "hosts of 2 ranks"),
            (on(&good, |cluster| *cluster = cluster.in_groups(&lacking)), "each of 8 workers must be in one"),
            (
                on(&good, |cluster| cluster.groups = two),
                "2 groups, whose heads hold the shards, and 8 shards",
            ),
            (on(&good, |cluster| cluster.slice_bytes = 0), "slice_bytes"),
            (on(&good, |cluster| cluster.collective_slice_bytes = 0), "collective_slice_bytes"),
            (
                Facts { shape: LayerShape::Linear { outputs: u64::MAX, inputs: u64::MAX }, ..good.clone() },
                "numbers",
            ),
            (on(&good, |cluster| cluster.rates.latency_s = -1.0), "latency_s"),
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
            let facts = on(&base, |cluster| cluster.servers = servers.min(cluster.workers));
            prop_assert_eq!(facts.check(), Ok(()));
            let allowed: Vec<Way> =
                EVERYTHING.into_iter().enumerate().filter(|(i, _)| allowed >> i & 1 == 1).map(|(_, s)| s).collect();
            let decision = best_way(Policy::Measured, &facts, &allowed, Some(Way::ALL[current]));
            let store_s = facts.estimate(Way::STORE).unwrap().seconds();
            let seconds = facts.estimate(decision.way).unwrap().seconds();
            prop_assert!(seconds <= store_s, "{:?}: {} > {}", decision, seconds, store_s);
            prop_assert!(decision.way == Way::STORE || allowed.contains(&decision.way));
            // The choice stands: the same facts do not change it again.
            let again = best_way(Policy::Measured, &facts, &allowed, Some(decision.way));
            prop_assert_eq!(again.way, decision.way);
        }
    }
}

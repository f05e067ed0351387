//! Cost and choice of schemes, for the coordinator and `penstock explain`: see `_native.pyi`. Pure but for
//! `summing_rate`, which measures; nothing here waits.

use crate::errors::{bad_argument, named};
use penstock_core::cost::Rates;
use penstock_core::cost::local::{self, Encoded, FragmentRound};
use penstock_core::cost::overlap::{LayerTime, step_times as limits_of};
use penstock_core::scheme::{self, Cluster, Estimate, Facts, Given, LayerShape, Policy, Terms};
use penstock_core::way::{Algorithm, Way};
use penstock_core::{Error, limits};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// `penstock.coordinator.Rates`, by its attributes.
#[derive(Clone, Copy, FromPyObject)]
pub(crate) struct RatesObject {
    bytes_per_s: f64,
    inside_bytes_per_s: f64,
    latency_s: f64,
    summed_bytes_per_s: f64,
    product_flops_per_s: f64,
    gather_s: f64,
}

/// `penstock.coordinator.Cluster`, by its attributes.
#[derive(FromPyObject)]
pub(crate) struct ClusterObject {
    n_worker: u32,
    n_server: u32,
    slice_bytes: usize,
    collective_slice_bytes: usize,
    servers_apart: bool,
    hosts: Vec<u32>,
    groups: Vec<Vec<u32>>,
}

impl ClusterObject {
    fn with(self, rates: Rates) -> Cluster {
        Cluster {
            workers: self.n_worker,
            servers: self.n_server,
            servers_apart: self.servers_apart,
            groups: self.groups,
            hosts: self.hosts,
            slice_bytes: self.slice_bytes,
            collective_slice_bytes: self.collective_slice_bytes,
            rates,
        }
    }
}

#[allow(clippy::needless_pass_by_value)] // For `map_err(config)`.
fn config(error: Error) -> PyErr {
    bad_argument(error.to_string())
}

pub(crate) fn rates_of(given: RatesObject) -> PyResult<Rates> {
    let rates = Rates {
        bytes_per_s: given.bytes_per_s,
        inside_bytes_per_s: given.inside_bytes_per_s,
        latency_s: given.latency_s,
        summed_bytes_per_s: given.summed_bytes_per_s,
        product_flops_per_s: given.product_flops_per_s,
        gather_s: given.gather_s,
    };
    match rates.wrong() {
        Some(name) => Err(bad_argument(format!("{name} must be a positive number"))),
        None => Ok(rates),
    }
}

/// A message within the bounds that cost functions count in.
fn check_message(elems: u64, elem_bytes: u64, workers: u32, slices: u64) -> PyResult<()> {
    let fits = elems <= limits::COST_ELEMS_MAX
        && (1..=16).contains(&elem_bytes)
        && (1..=limits::RANKS_MAX).contains(&workers)
        && (1..=limits::SLICES_MAX).contains(&slices);
    if fits {
        return Ok(());
    }
    Err(bad_argument(format!(
        "{elems} elements of {elem_bytes} bytes in {slices} slices on {workers} workers is out of bounds"
    )))
}

#[pyfunction]
#[pyo3(signature = (policy, cluster, rates, *, kind, shape, elems, elem_bytes, rows, allowed=None, current=None,
                    adopted=false, given=None, what="", short_bytes=0, collective=None, sparse=false,
                    owners_update=false, why_whole=None, whole_on=None))]
#[allow(clippy::too_many_arguments, clippy::needless_pass_by_value)] // Keywords in Python.
pub(crate) fn best_scheme<'py>(
    py: Python<'py>,
    policy: &str,
    cluster: ClusterObject,
    rates: RatesObject,
    kind: &str,
    shape: (u64, u64),
    elems: u64,
    elem_bytes: u64,
    rows: Vec<u64>,
    allowed: Option<Vec<String>>,
    current: Option<String>,
    adopted: bool,
    given: Option<String>,
    what: &str,
    short_bytes: u64,
    collective: Option<String>,
    sparse: bool,
    owners_update: bool,
    why_whole: Option<String>,
    whole_on: Option<u32>,
) -> PyResult<Bound<'py, PyDict>> {
    let facts = Facts {
        shape: LayerShape::of(named(kind)?, shape),
        elems,
        elem_bytes,
        rows: &rows,
        short_bytes,
        cluster: cluster.with(rates_of(rates)?),
    };
    facts.check().map_err(config)?;
    let policy = named::<Policy>(policy)?;
    let allowed: Option<Vec<Way>> =
        allowed.map(|names| names.iter().map(|name| named(name)).collect()).transpose()?;
    let given = given.as_deref().map(named).transpose()?.map(|way| Given { way, what });
    let terms = Terms {
        allowed: allowed.as_deref().unwrap_or(Terms::default().allowed),
        current: current.as_deref().map(named).transpose()?,
        adopted,
        given,
        collective: collective.as_deref().map(named).transpose()?,
        sparse,
        owners_update,
        why_whole: why_whole.as_deref(),
        whole_on,
    };
    let decision = scheme::decide(policy, &facts, &terms);
    // Of ways that shorten a gradient the one that is given, whose bytes are known.
    let known = |way: &Way| !way.shortens() || given.is_some_and(|given| given.way == *way);
    let estimates = Way::ALL.into_iter().filter(known).filter_map(|way| facts.estimate(way));
    let estimates = estimates.map(|e| estimate_to_python(py, &e)).collect::<PyResult<Vec<_>>>()?;
    let dict = PyDict::new(py);
    dict.set_item("scheme", decision.way.name())?;
    dict.set_item("code", decision.reason.code())?;
    dict.set_item("reason", decision.reason.to_string())?;
    dict.set_item("given", decision.given)?;
    dict.set_item("may_change", decision.may_change)?;
    dict.set_item("schemes", PyTuple::new(py, decision.ways.into_iter().map(Way::name))?)?;
    dict.set_item("lossy", decision.way.is_lossy())?;
    dict.set_item("estimates", PyList::new(py, estimates)?)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (given, collective, sparse, owners_update))]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn fixed_terms(
    py: Python<'_>,
    given: Option<String>,
    collective: Option<String>,
    sparse: bool,
    owners_update: bool,
) -> PyResult<Bound<'_, PyDict>> {
    let given = given.as_deref().map(named).transpose()?.map(|way| Given { way, what: "" });
    let collective = collective.as_deref().map(named).transpose()?;
    let terms = Terms { given, collective, sparse, owners_update, ..Terms::default() };
    let dict = PyDict::new(py);
    dict.set_item("scheme", terms.given().map(|given| given.way.name()))?;
    dict.set_item("whole", terms.whole().name())?;
    dict.set_item("why_whole", terms.why_whole())?;
    dict.set_item("may_choose_collective", terms.may_choose_collective())?;
    Ok(dict)
}

fn estimate_to_python<'py>(py: Python<'py>, estimate: &Estimate) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("scheme", estimate.way.name())?;
    dict.set_item("steps", estimate.steps)?;
    dict.set_item("direction_bytes", estimate.direction_bytes)?;
    dict.set_item("node_bytes", estimate.node_bytes)?;
    dict.set_item("total_bytes", estimate.total_bytes)?;
    dict.set_item("inside_bytes", estimate.inside_bytes)?;
    dict.set_item("busy_s", estimate.busy_s)?;
    dict.set_item("wire_s", estimate.wire_s)?;
    dict.set_item("rebuild_s", estimate.rebuild_s)?;
    Ok(dict)
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn best_groups(cluster: ClusterObject, rates: RatesObject) -> PyResult<(Vec<Vec<u32>>, String)> {
    let cluster = cluster.with(rates_of(rates)?);
    cluster.check().map_err(config)?;
    let found = scheme::best_groups(&cluster);
    Ok((found.groups, found.reason.to_string()))
}

#[pyfunction]
pub(crate) fn allreduce_cost<'py>(
    py: Python<'py>,
    algorithm: &str,
    elems: u64,
    elem_bytes: u64,
    workers: u32,
    slices: u64,
    rates: RatesObject,
) -> PyResult<Bound<'py, PyDict>> {
    check_message(elems, elem_bytes, workers, slices)?;
    let (traffic, seconds) =
        named::<Algorithm>(algorithm)?.message(elems, elem_bytes, workers, slices, &rates_of(rates)?);
    let dict = PyDict::new(py);
    dict.set_item("steps", traffic.steps)?;
    dict.set_item("sent", traffic.sent)?;
    dict.set_item("received", traffic.received)?;
    dict.set_item("seconds", seconds)?;
    Ok(dict)
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn best_algorithm(
    elems: u64,
    elem_bytes: u64,
    workers: u32,
    slices: u64,
    rates: RatesObject,
    allowed: Vec<String>,
) -> PyResult<(&'static str, f64)> {
    check_message(elems, elem_bytes, workers, slices)?;
    let allowed = allowed.iter().map(|name| named(name)).collect::<PyResult<Vec<_>>>()?;
    let (algorithm, seconds) =
        scheme::best_algorithm(elems, elem_bytes, workers, slices, &rates_of(rates)?, &allowed);
    Ok((algorithm.name(), seconds))
}

#[pyfunction]
pub(crate) fn summing_rate(py: Python<'_>) -> f64 {
    py.detach(penstock_net::summing_rate)
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn step_times<'py>(py: Python<'py>, layers: Vec<(f64, f64, f64)>) -> PyResult<Bound<'py, PyDict>> {
    let times: Vec<LayerTime> = layers
        .iter()
        .map(|&(forward_s, backward_s, wire_s)| LayerTime { forward_s, backward_s, wire_s })
        .collect();
    let right = |value: f64| value.is_finite() && value >= 0.0;
    if !times.iter().all(|t| right(t.forward_s) && right(t.backward_s) && right(t.wire_s)) {
        return Err(bad_argument("a layer's times must not be negative"));
    }
    let found = limits_of(&times);
    let dict = PyDict::new(py);
    dict.set_item("ideal_s", found.ideal_s)?;
    dict.set_item("wfbp_s", found.wfbp_s)?;
    dict.set_item("serial_s", found.serial_s)?;
    dict.set_item("compute_s", found.compute_s)?;
    Ok(dict)
}

/// A fragment as Python has it: bytes and seconds by the store, its own bytes, and those of its encoding if there is one, with
/// whether all are sent it.
type FragmentOf = (u64, f64, u64, Option<(u64, bool)>);

#[pyfunction]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn local_rounds(workers: u32, fragments: Vec<FragmentOf>) -> PyResult<Vec<(u64, f64)>> {
    let round = |(store_bytes, store_s, whole_bytes, encoded): FragmentOf| {
        let encoded = encoded.map(|(bytes, to_all)| Encoded { bytes, to_all });
        let round = FragmentRound { store_bytes, store_s, whole_bytes, encoded };
        (round.bytes(workers), round.wire_s(workers))
    };
    if fragments.iter().any(|&(.., whole_bytes, encoded)| encoded.is_some() && whole_bytes == 0) {
        return Err(bad_argument("what is encoded must have bytes"));
    }
    Ok(fragments.into_iter().map(round).collect())
}

#[pyfunction]
#[allow(clippy::needless_pass_by_value)]
pub(crate) fn local_times(
    compute_s: f64,
    wire_s: Vec<f64>,
    sync_every: u32,
    delay: u32,
) -> PyResult<(f64, f64)> {
    let right = |value: &f64| value.is_finite() && *value >= 0.0;
    if !wire_s.iter().chain([&compute_s]).all(right) {
        return Err(bad_argument("times must not be negative"));
    }
    let found = local::local_times(compute_s, &wire_s, sync_every, delay);
    Ok((found.mean_s, found.longest_s))
}

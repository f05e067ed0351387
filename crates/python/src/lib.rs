//! `penstock._native`: converts, releases the GIL, calls, maps the error. Nothing else.

mod call;
mod cost;
mod digest;
mod engine;
mod errors;
mod moments;
mod optimizer;
mod report;
mod roles;
mod way;

/// The engine behind the Python package, and what synchronisation costs. Private: its users are `penstock.job`,
/// `penstock.coordinator` and `penstock.torch`.
#[pyo3::pymodule]
mod _native {
    use penstock_core::calls::VECTORS_MAX;
    use penstock_core::observe::Point;
    use penstock_core::way::{Algorithm, LayerKind};
    use penstock_net::Record;
    use pyo3::prelude::*;
    use pyo3::types::{PyList, PyTuple};

    /// The names of algorithms, of ways, and of kinds of layers have one list each, which is the core's.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let names = |of: &[Algorithm]| PyTuple::new(module.py(), of.iter().map(|one| one.name()));
        module.add("ALGORITHMS", names(&Algorithm::ALL)?)?;
        module.add("COLLECTIVES", names(&Algorithm::COLLECTIVES)?)?;
        module.add("LAYER_KINDS", PyTuple::new(module.py(), LayerKind::ALL.map(LayerKind::name))?)?;
        module.add("POINTS", PyTuple::new(module.py(), Point::ALL.map(Point::name))?)?;
        module.add("RECORD", PyList::new(module.py(), Record::FIELDS)?)?;
        module.add("VECTORS_MAX", VECTORS_MAX)?;
        module.add("WAYS", super::way::all(module.py())?)
    }

    #[pymodule_export]
    use super::call::Call;
    #[pymodule_export]
    use super::cost::{
        allreduce_cost, best_algorithm, best_groups, best_scheme, fixed_terms, local_rounds, local_times,
        step_times, summing_rate,
    };
    #[pymodule_export]
    use super::digest::{checksum, digests};
    #[pymodule_export]
    use super::engine::Engine;
    #[pymodule_export]
    use super::moments::MomentsKept;
    #[pymodule_export]
    use super::optimizer::Twin;
    #[pymodule_export]
    use super::roles::BookRoles;
    #[pymodule_export]
    use super::way::NamedWay;
}

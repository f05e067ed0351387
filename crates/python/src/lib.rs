//! `penstock._native`: converts, releases the GIL, calls, maps the error. Nothing else.

mod call;
mod cost;
mod engine;
mod errors;
mod report;

/// The engine behind the Python package, and what synchronisation costs. Private: its users are `penstock.job`,
/// `penstock.coordinator` and `penstock.torch`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::call::Call;
    #[pymodule_export]
    use super::cost::{allreduce_cost, best_algorithm, best_scheme, step_times, summing_rate};
    #[pymodule_export]
    use super::engine::Engine;
}

//! `penstock._native`: converts, releases the GIL, calls, maps the error. Nothing else.

mod call;
mod engine;
mod errors;
mod report;

/// The engine behind the Python package. Private: its users are `penstock.job` and `penstock.torch`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use super::call::Call;
    #[pymodule_export]
    use super::engine::Engine;
}

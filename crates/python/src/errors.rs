//! Failures of the engine become the classes of `penstock.errors`, so that Python code catches one hierarchy.

use penstock_core::types::Unknown;
use penstock_core::{Error, Rank};
use penstock_net::{Failure, Stop};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyType};

fn class_name(error: &Error) -> &'static str {
    match error {
        Error::Config(_) => "ConfigError",
        Error::PeerLost { .. } | Error::MembersChanged(_) => "PeerLost",
        Error::Timeout(_) => "Timeout",
        Error::Protocol { .. } => "ProtocolError",
        Error::Mismatch { .. } => "ModelMismatch",
        Error::Authentication(_) => "AuthenticationError",
    }
}

fn build<'py>(py: Python<'py>, failure: &Failure) -> PyResult<Bound<'py, PyAny>> {
    let class = py.import("penstock.errors")?.getattr(class_name(&failure.error))?.cast_into::<PyType>()?;
    let attributes = [
        ("rank", failure.rank.map(|Rank(rank)| rank).into_pyobject(py)?),
        ("layer", failure.layer.as_ref().into_pyobject(py)?),
        ("step", failure.step.into_pyobject(py)?),
        ("peer", failure.peer.as_ref().into_pyobject(py)?),
    ];
    class.call((failure.error.to_string(),), Some(&attributes.into_py_dict(py)?))
}

/// The exception for a failure; or what went wrong when making it.
#[allow(clippy::needless_pass_by_value)] // For `map_err(raise)`.
pub(crate) fn raise(failure: Failure) -> PyErr {
    Python::attach(|py| match build(py, &failure) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    })
}

/// The exception for a call that stopped. `interrupt` is what the program's signal handler raised.
pub(crate) fn raise_stop(stop: Stop, interrupt: Option<PyErr>) -> PyErr {
    match stop {
        Stop::Failed(failure) => raise(*failure),
        Stop::Interrupted => interrupt.unwrap_or_else(|| pyo3::exceptions::PyKeyboardInterrupt::new_err(())),
    }
}

/// A `ConfigError` about an argument.
pub(crate) fn bad_argument(text: impl Into<String>) -> PyErr {
    raise(Failure::from(Error::Config(text.into())))
}

/// What a name stands for.
pub(crate) fn named<T: std::str::FromStr<Err = Unknown>>(name: &str) -> PyResult<T> {
    name.parse().map_err(|unknown: Unknown| bad_argument(unknown.to_string()))
}

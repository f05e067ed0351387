//! How a layer can travel, for those who ask by its name.

use penstock_core::way::{LayerKind, Way};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A way; see `_native.pyi`.
#[pyclass(frozen, name = "Way", module = "penstock._native")]
pub(crate) struct NamedWay(Way);

#[pymethods]
impl NamedWay {
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }

    #[getter]
    fn kind(&self) -> Option<&'static str> {
        self.0.payload.kind().map(LayerKind::name)
    }

    #[getter]
    fn route(&self) -> &'static str {
        self.0.route.name()
    }

    #[getter]
    fn wire(&self) -> Option<&'static str> {
        self.0.wire.map(|wire| wire.name())
    }

    #[getter]
    fn is_whole(&self) -> bool {
        self.0.is_whole()
    }

    #[getter]
    fn sends_rows(&self) -> bool {
        self.0.sends_rows()
    }

    #[getter]
    fn shortens(&self) -> bool {
        self.0.shortens()
    }

    #[getter]
    fn is_lossy(&self) -> bool {
        self.0.is_lossy()
    }

    #[getter]
    fn may_be_chosen(&self) -> bool {
        Way::WHILE_TRAINING.contains(&self.0)
    }
}

/// All ways by name, in the order in which ties are decided.
pub(crate) fn all(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let ways = PyDict::new(py);
    for way in Way::ALL {
        ways.set_item(way.name(), NamedWay(way))?;
    }
    Ok(ways)
}

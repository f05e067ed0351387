//! What the program comes to, noted in a tenth of a microsecond.

use penstock_net::MomentBuffer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Moments of one program, until a trace or a judge takes them.
#[pyclass(frozen, module = "penstock._native")]
pub(crate) struct MomentsKept(MomentBuffer);

#[pymethods]
impl MomentsKept {
    #[new]
    fn new() -> Self {
        Self(MomentBuffer::default())
    }

    // The interpreter stays locked: it would take longer to let go of it.
    #[pyo3(signature = (what, /))]
    fn note(&self, what: i64) {
        self.0.note(what.cast_unsigned());
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let (taken, dropped) = self.0.take();
        let bytes = PyBytes::new_with(py, taken.len() * MomentBuffer::BYTES, |bytes| {
            MomentBuffer::encode(&taken, bytes);
            Ok(())
        })?;
        Ok((bytes, dropped))
    }
}

//! Optimizers of the core, on memory that Python holds.

use crate::errors::{bad_argument, named};
use penstock_core::Dtype;
use penstock_core::optimizer::{Optimizer, Rule, Update};
use pyo3::prelude::*;
use std::ptr::NonNull;

/// An optimizer as the owners of values apply it.
#[pyclass(frozen, name = "Optimizer", module = "penstock._native")]
pub(crate) struct Twin(pub(crate) Optimizer);

#[pymethods]
impl Twin {
    #[staticmethod]
    #[pyo3(signature = (*, lr, weight_decay, maximize, momentum, dampening, nesterov))]
    fn sgd(
        lr: f64,
        weight_decay: f64,
        maximize: bool,
        momentum: f64,
        dampening: f64,
        nesterov: bool,
    ) -> Self {
        Self(Optimizer { lr, weight_decay, maximize, rule: Rule::Sgd { momentum, dampening, nesterov } })
    }

    #[staticmethod]
    #[pyo3(signature = (*, lr, weight_decay, maximize, betas, eps, amsgrad, decoupled))]
    fn adam(
        lr: f64,
        weight_decay: f64,
        maximize: bool,
        betas: [f64; 2],
        eps: f64,
        amsgrad: bool,
        decoupled: bool,
    ) -> Self {
        Self(Optimizer { lr, weight_decay, maximize, rule: Rule::Adam { betas, eps, amsgrad, decoupled } })
    }

    #[staticmethod]
    #[pyo3(signature = (*, lr, weight_decay, maximize, lr_decay, eps, initial))]
    fn adagrad(lr: f64, weight_decay: f64, maximize: bool, lr_decay: f64, eps: f64, initial: f64) -> Self {
        Self(Optimizer { lr, weight_decay, maximize, rule: Rule::Adagrad { lr_decay, eps, initial } })
    }

    #[staticmethod]
    #[pyo3(signature = (*, lr, weight_decay, maximize, alpha, eps, momentum, centered))]
    fn rmsprop(
        lr: f64,
        weight_decay: f64,
        maximize: bool,
        alpha: f64,
        eps: f64,
        momentum: f64,
        centered: bool,
    ) -> Self {
        Self(Optimizer { lr, weight_decay, maximize, rule: Rule::RmsProp { alpha, eps, momentum, centered } })
    }

    #[staticmethod]
    #[pyo3(signature = (*, alpha))]
    fn elastic(alpha: f64) -> Self {
        Self(Optimizer { lr: alpha, weight_decay: 0.0, maximize: false, rule: Rule::Elastic })
    }

    #[getter]
    fn states(&self) -> Vec<&'static str> {
        self.0.states().to_vec()
    }

    #[getter]
    fn initial(&self) -> f64 {
        self.0.initial()
    }

    #[allow(clippy::needless_pass_by_value)] // Extracted from Python objects.
    fn update(
        &self,
        py: Python<'_>,
        dtype: &str,
        step: u64,
        value: usize,
        gradient: usize,
        states: Vec<usize>,
        nbytes: usize,
    ) -> PyResult<()> {
        let dtype: Dtype = named(dtype)?;
        if step == 0 {
            return Err(bad_argument("updates count from 1"));
        }
        let aligned = |ptr: usize| ptr != 0 && ptr.is_multiple_of(dtype.size_bytes());
        let whole = nbytes.is_multiple_of(dtype.size_bytes());
        if !whole || ![value, gradient].iter().chain(&states).all(|ptr| aligned(*ptr)) {
            return Err(bad_argument("memory is not that of whole elements"));
        }
        let slice = |ptr: usize| {
            let start = NonNull::new(ptr as *mut u8).unwrap_or(NonNull::dangling());
            // SAFETY: the caller holds distinct tensors of so many bytes, which nobody else touches during the call.
            unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), nbytes) }
        };
        py.detach(|| {
            let mut states: Vec<&mut [u8]> = states.iter().map(|ptr| slice(*ptr)).collect();
            let update = Update { optimizer: self.0, factor: 1.0 };
            update.apply(dtype, step, slice(value), slice(gradient), &mut states)
        })
        .map_err(|misfit| bad_argument(misfit.to_string()))
    }
}

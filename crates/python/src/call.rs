//! The class `Call`, and how calls are begun: see `_native.pyi`.

use crate::engine::{Engine, parse_op, waiting};
use crate::errors::{bad_argument, named, raise};
use penstock_core::calls::{CallKind, Request};
use penstock_core::types::GroupId;
use penstock_core::way::Algorithm;
use penstock_net::{AddressRange, CallPart, Handle};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// A message or collective under way.
#[pyclass(module = "penstock._native", frozen)]
pub(crate) struct Call {
    engine: Py<Engine>,
    handle: Arc<Handle>,
}

fn parse_request(name: &str, rank: u32, tag: u32) -> PyResult<Request> {
    let root = rank;
    Ok(Request::Collective(match name {
        "send" => return Ok(Request::Send { to: rank, tag }),
        "recv" => return Ok(Request::Receive { from: rank, tag }),
        "recv_any" => return Ok(Request::ReceiveAny { tag }),
        "barrier" => CallKind::Barrier,
        "broadcast" => CallKind::Broadcast { root },
        "reduce" => CallKind::Reduce { root },
        "gather" => CallKind::Gather { root },
        "scatter" => CallKind::Scatter { root },
        "all_gather" => CallKind::AllGather,
        "reduce_scatter" => CallKind::ReduceScatter,
        "all_to_all" => CallKind::AllToAll,
        _ => return Err(bad_argument(format!("unknown call {name:?}"))),
    }))
}

#[pymethods]
impl Call {
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<()> {
        if self.handle.is_done() {
            return Ok(());
        }
        let timeout = timeout_s.map(Duration::try_from_secs_f64).transpose();
        let timeout = timeout.map_err(|error| bad_argument(format!("timeout_s: {error}")))?;
        let engine = self.engine.get();
        waiting(py, |interrupted| engine.engine.wait_call(&self.handle, timeout, interrupted))
    }

    #[getter]
    fn id(&self) -> u64 {
        self.handle.id()
    }

    #[getter]
    fn source(&self) -> Option<u32> {
        self.handle.source()
    }

    fn watch(&self) {
        self.handle.watch();
    }

    fn done(&self) -> PyResult<bool> {
        self.engine.get().engine.poll_call(&self.handle).map_err(raise)
    }
}

/// Begins a call; the arguments are those of `Engine.call`.
pub(crate) fn begin(
    engine: &Bound<'_, Engine>,
    (group, epoch): (GroupId, Option<u32>),
    (request, rank, tag): (&str, u32, u32),
    algorithm: Option<Algorithm>,
    (op, dtype): (&str, &str),
    (inputs, outputs): (Vec<AddressRange>, Vec<AddressRange>),
    keep: Py<PyAny>,
) -> PyResult<Call> {
    let dtype = named(dtype)?;
    let native = &engine.get().engine;
    let request = match request {
        "allreduce" => {
            let len_bytes = inputs.first().map_or(0, |(_, len)| *len as u64);
            let chosen = algorithm.map_or_else(|| native.choose(group, len_bytes, dtype), Ok);
            Request::Collective(CallKind::Allreduce { algorithm: chosen.map_err(raise)? })
        }
        _ => parse_request(request, rank, tag)?,
    };
    let (op, keep) = (parse_op(op)?, Box::new(keep));
    let part = CallPart { group, epoch, request, op, dtype, inputs, outputs, keep };
    let wrapper = engine.get();
    // SAFETY: `keep` keeps the memory alive, and `penstock.collectives` says who may touch it meanwhile.
    let handle = wrapper.may_wait(engine.py(), || unsafe { native.call(part) })?;
    Ok(Call { engine: engine.clone().unbind(), handle })
}

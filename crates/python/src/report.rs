//! `Engine.report()` as plain dictionaries.

use penstock_core::way::Way;
use penstock_net::{BookReport, LayerReport, PeerReport, Report};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

pub(crate) fn to_python<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counts = [
        ("rank", u64::from(report.rank)),
        ("size", u64::from(report.size)),
        ("lanes", u64::from(report.lanes)),
        ("slices", report.slices),
        ("preemptions", report.preemptions),
        ("frames_sent", report.frames_sent),
        ("frames_received", report.frames_received),
        ("bytes_sent", report.bytes_sent),
        ("bytes_received", report.bytes_received),
        ("call_bytes_sent", report.call_bytes_sent),
        ("call_bytes_received", report.call_bytes_received),
        ("tensors_in_flight", report.tensors_in_flight),
    ];
    for (name, count) in counts {
        dict.set_item(name, count)?;
    }
    let seconds = [
        ("busy_backward_s", report.busy.backward),
        ("busy_forward_s", report.busy.forward),
        ("busy_stalled_s", report.busy.stalled),
        ("busy_other_s", report.busy.other),
        ("stall_s", report.stall),
    ];
    for (name, duration) in seconds {
        dict.set_item(name, duration.as_secs_f64())?;
    }
    dict.set_item("pool_bytes", report.pool_bytes)?;
    dict.set_item("line_bytes_per_s", report.line_bytes_per_s)?;
    dict.set_item("through_memory", &report.through_memory)?;
    dict.set_item("owned_bytes", &report.owned_bytes)?;
    let peers = report.peers.iter().map(|peer| of_peer(py, peer)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("peers", PyList::new(py, peers)?)?;
    let books = report.books.iter().map(|book| of_book(py, book)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("books", PyList::new(py, books)?)?;
    Ok(dict)
}

fn of_peer<'py>(py: Python<'py>, peer: &PeerReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counts = [
        ("rank", u64::from(peer.rank)),
        ("bytes_sent", peer.bytes_sent),
        ("bytes_received", peer.bytes_received),
        ("queued_frames", peer.queued_frames),
        ("queued_bytes", peer.queued_bytes),
        ("retransmitted_segments", peer.retransmitted_segments),
    ];
    for (name, count) in counts {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}

fn of_book<'py>(py: Python<'py>, book: &BookReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", &book.name)?;
    let layers = book.layers.iter().map(|layer| of_layer(py, layer)).collect::<PyResult<Vec<_>>>()?;
    dict.set_item("layers", PyList::new(py, layers)?)?;
    Ok(dict)
}

fn of_layer<'py>(py: Python<'py>, layer: &LayerReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("name", &layer.name)?;
    // By the name of the scheme.
    let lossy = layer.rounded_to.map(|wire| Way::STORE.rounded_to(wire).name());
    dict.set_item("lossy", lossy)?;
    dict.set_item("bytes_sent", layer.bytes_sent)?;
    dict.set_item("bytes_received", layer.bytes_received)?;
    dict.set_item("stall_s", layer.stall.as_secs_f64())?;
    Ok(dict)
}

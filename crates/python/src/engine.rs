//! The class `Engine`. Calls that may block run without the GIL; while they wait, signals are looked at.

use crate::call::{self, Call};
use crate::cost::{RatesObject, rates_of};
use crate::errors::{bad_argument, named, raise, raise_stop};
use crate::optimizer::Twin;
use crate::report;
use crate::roles::BookRoles;
use penstock_core::exchange::Field;
use penstock_core::layout::Tensor;
use penstock_core::membership::{JobState, RoundsOver};
use penstock_core::types::GroupId;
use penstock_core::{Book, BookId, Gives, Op, Rank, Route, Seq, Slicing, Step, Submission, TensorId};
use penstock_net::{AddressRange, EngineConfig, Failure, Landed, Lent, Observations, Phase, Stop, Until};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::ptr::NonNull;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

/// One process's end of a job: see `_native.pyi`.
#[pyclass(module = "penstock._native", frozen)]
pub(crate) struct Engine {
    pub(crate) engine: penstock_net::Engine,
    /// Then a submission may have to wait for the next epoch.
    elastic: bool,
}

/// By tensor, its slices: offset, bytes, owner, lane.
type Placement = Vec<Vec<(u64, u32, u32, u32)>>;

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    let duration = Duration::try_from_secs_f64(value).ok().filter(|duration| !duration.is_zero());
    duration.ok_or_else(|| bad_argument(format!("{name} is {value}; it must be above 0 seconds")))
}

pub(crate) fn parse_op(name: &str) -> PyResult<Op> {
    match name {
        "average" => Ok(Op::Average),
        "sum" => Ok(Op::Sum),
        "copy" => Ok(Op::Copy),
        "min" => Ok(Op::Min),
        "max" => Ok(Op::Max),
        _ => Err(bad_argument(format!("unknown op {name:?}: expected average, sum, min, max or copy"))),
    }
}

/// One tensor of a book: name, layer, dtype, elements, and perhaps a route, a wire type and an owner.
#[derive(FromPyObject)]
enum TensorEntry {
    InTheStore(String, u32, String, u64),
    WithRoute(String, u32, String, u64, String),
    WithWire(String, u32, String, u64, String, String),
    WithOwner(String, u32, String, u64, String, Option<String>, u32),
}

fn parse_tensor(entry: TensorEntry) -> PyResult<Tensor> {
    let (name, layer, dtype, elems, route_name, wire, owner) = match entry {
        TensorEntry::InTheStore(name, layer, dtype, elems) => (name, layer, dtype, elems, None, None, None),
        TensorEntry::WithRoute(name, layer, dtype, elems, route_name) => {
            (name, layer, dtype, elems, Some(route_name), None, None)
        }
        TensorEntry::WithWire(name, layer, dtype, elems, route_name, wire) => {
            (name, layer, dtype, elems, Some(route_name), Some(wire), None)
        }
        TensorEntry::WithOwner(name, layer, dtype, elems, route_name, wire, owner) => {
            (name, layer, dtype, elems, Some(route_name), wire, Some(Rank(owner)))
        }
    };
    let route = route_name.map_or(Ok(Route::STORE), |route_name| named(&route_name))?;
    let dtype = named(&dtype)?;
    let wire = wire.map_or(Ok(dtype), |wire| named(&wire))?;
    Ok(Tensor { owner, ..Tensor::new(name, layer, dtype, elems).with_route(route).with_wire(wire) })
}

/// Memory of the program, for one call.
///
/// # Safety
/// `penstock.torch` gives memory of its own of this length, which nobody else touches during the call.
unsafe fn memory_at<'a>(ptr: usize, nbytes: usize) -> PyResult<&'a mut [u8]> {
    if ptr == 0 && nbytes > 0 {
        return Err(bad_argument("ptr is null"));
    }
    let start = NonNull::new(ptr as *mut u8).unwrap_or(NonNull::dangling());
    // SAFETY: as the caller vouches.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), nbytes) })
}

/// Runs a call that waits, without the GIL. Its argument tells it whether a signal handler has raised.
pub(crate) fn waiting<T: Send>(
    py: Python<'_>,
    call: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<T, Stop> + Send,
) -> PyResult<T> {
    py.detach(|| {
        let mut interrupt = None;
        let mut interrupted = || {
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_some()
        };
        call(&mut interrupted).map_err(|stop| (stop, interrupt))
    })
    .map_err(|(stop, interrupt)| raise_stop(stop, interrupt))
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (*, rank, size, bind_host, port, secret, job_id, slice_bytes, lanes, window_bytes, priority,
                        operation_timeout_s, peer_timeout_s, handshake_timeout_s, congestion_control="auto".into(), shared_memory=true, all_lanes=true, observations=0, servers=0, elastic=false, encrypt=false))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python; a struct from here on.
    fn new(
        rank: u32,
        size: u32,
        bind_host: String,
        port: u16,
        secret: Vec<u8>,
        job_id: &[u8],
        slice_bytes: usize,
        lanes: u32,
        window_bytes: u64,
        priority: bool,
        operation_timeout_s: f64,
        peer_timeout_s: f64,
        handshake_timeout_s: f64,
        congestion_control: String,
        shared_memory: bool,
        all_lanes: bool,
        observations: usize,
        servers: u32,
        elastic: bool,
        encrypt: bool,
    ) -> PyResult<Self> {
        let wrong = |_| bad_argument(format!("job_id has {} bytes; it must have 16", job_id.len()));
        let config = EngineConfig {
            rank,
            size,
            servers,
            bind_host,
            port,
            secret,
            encrypt,
            job_id: job_id.try_into().map_err(wrong)?,
            slice_bytes,
            lanes,
            all_lanes,
            window_bytes,
            priority,
            operation_timeout: seconds("operation_timeout_s", operation_timeout_s)?,
            peer_timeout: seconds("peer_timeout_s", peer_timeout_s)?,
            congestion_control,
            shared_memory,
            handshake_timeout: seconds("handshake_timeout_s", handshake_timeout_s)?,
            elastic,
            observations,
        };
        Ok(Self { engine: penstock_net::Engine::bind(config).map_err(raise)?, elastic })
    }

    #[getter]
    fn port(&self) -> u16 {
        self.engine.port()
    }

    #[pyo3(signature = (book=None))]
    fn slicing(&self, book: Option<BookId>) -> PyResult<(usize, usize, u32)> {
        let slicing = match book {
            None => self.engine.slicing(),
            Some(book) => self.engine.layout(book).map_err(raise)?.slicing,
        };
        let Slicing { store_bytes, collective_bytes, lanes } = slicing;
        Ok((store_bytes, collective_bytes, lanes))
    }

    fn placement(&self, book: BookId) -> PyResult<Placement> {
        let layout = self.engine.layout(book).map_err(raise)?;
        let mut placement = vec![Vec::new(); layout.tensors.len()];
        for slice in &layout.slices {
            let entry = (slice.offset_bytes, slice.len_bytes, slice.owner.0, slice.lane);
            placement[slice.tensor as usize].push(entry);
        }
        Ok(placement)
    }

    #[allow(clippy::needless_pass_by_value)] // Extracted from Python objects, here and below.
    fn connect(&self, py: Python<'_>, addresses: Vec<(String, u16)>) -> PyResult<()> {
        py.detach(|| self.engine.connect(&addresses)).map_err(raise)
    }

    #[getter]
    fn council_port(&self) -> Option<u16> {
        self.engine.council_port()
    }

    #[pyo3(signature = (addresses, enough=None, most=None))]
    #[allow(clippy::needless_pass_by_value)]
    fn go_on_after_losses(
        &self,
        addresses: Vec<(String, u16)>,
        enough: Option<u32>,
        most: Option<u32>,
    ) -> PyResult<()> {
        self.engine.go_on_after_losses(&addresses, enough, most).map_err(raise)
    }

    #[getter]
    fn epoch(&self) -> u32 {
        self.engine.epoch()
    }

    fn members(&self) -> Vec<u32> {
        self.engine.members()
    }

    #[allow(clippy::type_complexity)] // Of each epoch, as the stub says.
    fn membership_log(&self) -> Vec<(Vec<u32>, u64, Vec<(BookId, u32)>)> {
        let log = self.engine.membership_log().into_iter();
        log.map(|entry| (entry.members.iter().map(|rank| rank.0).collect(), entry.step, entry.whole()))
            .collect()
    }

    fn epochs(&self) -> Vec<(Vec<u32>, RoundsOver)> {
        let log = self.engine.membership_log().into_iter();
        log.map(|entry| (entry.among.iter().map(|rank| rank.0).collect(), entry.rounds)).collect()
    }

    fn cut_as(&self, store_bytes: usize, collective_bytes: usize, lanes: u32) -> PyResult<()> {
        self.engine.cut_as(Slicing { store_bytes, collective_bytes, lanes }).map_err(raise)
    }

    #[allow(clippy::needless_pass_by_value)]
    fn withhold(&self, rounds: RoundsOver) -> PyResult<()> {
        self.engine.withhold(&rounds).map_err(raise)
    }

    #[allow(clippy::needless_pass_by_value)]
    fn has_come_to(&self, py: Python<'_>, rounds: RoundsOver) -> PyResult<bool> {
        py.detach(|| self.engine.has_come_to(&rounds)).map_err(raise)
    }

    fn begin_step(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        py.detach(|| self.engine.begin_step(step)).map_err(raise)
    }

    fn knock(&self, number: u64) -> PyResult<()> {
        self.engine.knock(number).map_err(raise)
    }

    fn announced(&self) -> Vec<(u64, u32, Option<u64>)> {
        self.engine.announced().into_iter().map(|one| (one.knock, one.rank.0, one.step)).collect()
    }

    fn job_state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let state = py.detach(|| self.engine.job_state()).map_err(raise)?;
        Ok(PyBytes::new(py, &state.encode()))
    }

    #[pyo3(signature = (state, host, enough, limit_s))]
    fn come(
        &self,
        py: Python<'_>,
        state: &[u8],
        host: &str,
        enough: Option<u32>,
        limit_s: f64,
    ) -> PyResult<bool> {
        let state = JobState::decode(state).map_err(bad_argument)?;
        let limit = seconds("limit_s", limit_s)?;
        waiting(py, |interrupted| self.engine.come(state, host, enough, limit, interrupted))
    }

    fn await_newcomers(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        waiting(py, |interrupted| self.engine.await_newcomers(step, interrupted))
    }

    fn all_gather<'py>(
        &self,
        py: Python<'py>,
        what: &str,
        blob: &[u8],
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let blobs = waiting(py, |interrupted| self.engine.all_gather(what, blob, interrupted))?;
        Ok(blobs.iter().map(|blob| PyBytes::new(py, blob)).collect())
    }

    #[pyo3(signature = (name, layers, tensors, roles=None))]
    fn open_book(
        &self,
        py: Python<'_>,
        name: &str,
        layers: Vec<String>,
        tensors: Vec<TensorEntry>,
        roles: Option<&BookRoles>,
    ) -> PyResult<BookId> {
        let tensors = tensors.into_iter().map(parse_tensor).collect::<PyResult<_>>()?;
        let roles = roles.map(|roles| roles.0.clone());
        self.may_wait(py, || self.engine.open_book(name, layers, tensors, roles))
    }

    #[getter]
    fn books(&self) -> usize {
        self.engine.books()
    }

    fn fingerprint(&self, book: BookId) -> PyResult<u64> {
        let layout = self.engine.layout(book).map_err(raise)?;
        // All that slices and owners follow from. How much a rank may gather, it knows for itself: batches differ.
        let Book { name, roles, layers, tensors, slicing, .. } = &*layout;
        let alike = |tensor: &Tensor| {
            let gathered = tensor.route == Route::Gather;
            if gathered { Tensor { elems: 0, ..tensor.clone() } } else { tensor.clone() }
        };
        let tensors: Vec<Tensor> = tensors.iter().map(alike).collect();
        Ok(xxh3_64(format!("{:?}", (name, roles, layers, tensors, slicing)).as_bytes()))
    }

    #[allow(clippy::needless_pass_by_value)]
    fn set_priorities(&self, book: BookId, places: Vec<u32>) -> PyResult<()> {
        self.engine.set_priorities(book, &places).map_err(raise)
    }

    #[pyo3(signature = (book, tensor, ptr, nbytes, op, step, more=false))]
    #[allow(clippy::too_many_arguments)]
    fn submit(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        ptr: usize,
        nbytes: usize,
        op: &str,
        step: Step,
        more: bool,
    ) -> PyResult<u64> {
        self.give(py, (book, tensor, step), (ptr, nbytes), Gives::Whole(parse_op(op)?), more)
    }

    #[allow(clippy::needless_pass_by_value)]
    fn submit_together(
        &self,
        py: Python<'_>,
        book: BookId,
        tensors: Vec<(TensorId, usize, usize)>,
        op: &str,
        step: Step,
    ) -> PyResult<Vec<u64>> {
        let gives = Gives::Whole(parse_op(op)?);
        let submissions: Vec<_> = tensors
            .into_iter()
            .map(|(tensor, address, len_bytes)| Submission {
                book,
                tensor,
                seq: 0,
                step,
                memory: Lent { address, len_bytes },
                gives,
            })
            .collect();
        // SAFETY: as in `give`.
        self.may_wait(py, || unsafe { self.engine.submit_together(&submissions) })
    }

    #[pyo3(signature = (book, tensor, ptr, nbytes, op, step, more=false))]
    #[allow(clippy::too_many_arguments)]
    fn submit_absent(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        ptr: usize,
        nbytes: usize,
        op: &str,
        step: Step,
        more: bool,
    ) -> PyResult<u64> {
        self.give(py, (book, tensor, step), (ptr, nbytes), Gives::Nothing(parse_op(op)?), more)
    }

    #[pyo3(signature = (book, tensor, ptr, nbytes, step, more=false))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    fn submit_gather(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        ptr: usize,
        nbytes: usize,
        step: Step,
        more: bool,
    ) -> PyResult<u64> {
        let len_bytes =
            u32::try_from(nbytes).map_err(|_| bad_argument(format!("{nbytes} bytes are too many")))?;
        self.give(py, (book, tensor, step), (ptr, nbytes), Gives::Gathered(len_bytes), more)
    }

    fn gathered(&self, book: BookId, tensor: TensorId) -> PyResult<Vec<Option<u64>>> {
        self.engine.gathered(book, tensor).map_err(raise)
    }

    #[allow(clippy::too_many_arguments)]
    fn read_gathered(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        rank: u32,
        offset: usize,
        ptr: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        // SAFETY: as in `memory_at`.
        let target = unsafe { memory_at(ptr, nbytes) }?;
        py.detach(|| self.engine.read_gathered(book, tensor, Rank(rank), offset, target)).map_err(raise)
    }

    fn drop_gathered(&self, book: BookId, tensor: TensorId) -> PyResult<()> {
        self.engine.drop_gathered(book, tensor).map_err(raise)
    }

    #[pyo3(signature = (book, tensors, released=false))]
    #[allow(clippy::needless_pass_by_value)]
    fn wait(&self, py: Python<'_>, book: BookId, tensors: Vec<TensorId>, released: bool) -> PyResult<()> {
        waiting(py, |interrupted| self.engine.wait(book, &tensors, released, interrupted))
    }

    #[pyo3(signature = (book, tensors, least=None, patience_s=0.0, needed=false))]
    #[allow(clippy::needless_pass_by_value)]
    fn landed(
        &self,
        py: Python<'_>,
        book: BookId,
        tensors: Vec<TensorId>,
        least: Option<Vec<u64>>,
        patience_s: f64,
        needed: bool,
    ) -> PyResult<(Vec<TensorId>, Vec<u64>, Vec<u64>)> {
        let Landed { complete, bytes, released } = if let Some(least_bytes) = &least {
            let patience =
                Duration::try_from_secs_f64(patience_s).map_err(|error| bad_argument(error.to_string()))?;
            let until = Some(Until { least_bytes, patience });
            waiting(py, |interrupted| self.engine.landed(book, &tensors, until, needed, interrupted))?
        } else {
            let looked = self.engine.landed(book, &tensors, None, needed, &mut || false);
            looked.map_err(|stop| raise_stop(stop, None))?
        };
        Ok((complete, bytes, released))
    }

    #[allow(clippy::needless_pass_by_value)]
    fn proceed(
        &self,
        py: Python<'_>,
        book: BookId,
        step: Step,
        optimizers: Vec<PyRef<'_, Twin>>,
        groups: Vec<u32>,
        factor: f64,
        in_advance: bool,
    ) -> PyResult<()> {
        let optimizers: Vec<_> = optimizers.iter().map(|optimizer| optimizer.0).collect();
        self.may_wait(py, || self.engine.proceed(book, step, (&optimizers, &groups), factor, in_advance))
    }

    #[allow(clippy::needless_pass_by_value)]
    fn order(
        &self,
        py: Python<'_>,
        book: BookId,
        optimizers: Vec<PyRef<'_, Twin>>,
        groups: Vec<u32>,
        factor: f64,
    ) -> PyResult<()> {
        let optimizers: Vec<_> = optimizers.iter().map(|optimizer| optimizer.0).collect();
        py.detach(|| self.engine.order(book, (&optimizers, &groups), factor)).map_err(raise)
    }

    fn versions(&self, book: BookId, tensor: TensorId) -> PyResult<Vec<u32>> {
        self.engine.versions(book, tensor).map_err(raise)
    }

    fn late(&self, book: BookId) -> PyResult<Vec<(u32, u64)>> {
        let late = self.engine.late(book).map_err(raise)?;
        Ok(late.into_iter().map(|(rank, count)| (rank.0, count)).collect())
    }

    fn discard(&self, py: Python<'_>, book: BookId, step: Step) -> PyResult<()> {
        self.may_wait(py, || self.engine.discard(book, step))
    }

    fn squares(&self, py: Python<'_>, book: BookId, step: Step) -> PyResult<f64> {
        waiting(py, |interrupted| self.engine.squares(book, step, interrupted))
    }

    #[allow(clippy::too_many_arguments)]
    fn load(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        state: Option<u8>,
        updates: u64,
        ptr: usize,
        nbytes: usize,
    ) -> PyResult<()> {
        let field = state.map_or(Field::Value, Field::State);
        // SAFETY: as in `memory_at`.
        let whole = unsafe { memory_at(ptr, nbytes) }?;
        py.detach(|| self.engine.load(book, tensor, (field, updates), whole)).map_err(raise)
    }

    fn lend(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        updates: Option<u64>,
        ptr: usize,
        nbytes: usize,
    ) -> PyResult<bool> {
        let memory = Lent { address: ptr, len_bytes: nbytes };
        // SAFETY: who lends keeps the memory during updates (`penstock.lending`), and tells the engine where it has gone before the
        // next one.
        py.detach(|| unsafe { self.engine.lend(book, tensor, updates, memory) }).map_err(raise)
    }

    fn save(
        &self,
        py: Python<'_>,
        book: BookId,
        tensor: TensorId,
        state: Option<u8>,
        ptr: usize,
        nbytes: usize,
    ) -> PyResult<Option<u64>> {
        let field = state.map_or(Field::Value, Field::State);
        // SAFETY: as in `memory_at`.
        let whole = unsafe { memory_at(ptr, nbytes) }?;
        py.detach(|| self.engine.save(book, tensor, field, whole)).map_err(raise)
    }

    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, |interrupted| self.engine.leave(interrupted))
    }

    fn sequence(&self, book: BookId) -> PyResult<Vec<Seq>> {
        self.engine.sequence(book).map_err(raise)
    }

    #[allow(clippy::needless_pass_by_value)]
    fn set_sequence(&self, book: BookId, seqs: Vec<Seq>) -> PyResult<()> {
        self.engine.set_sequence(book, &seqs).map_err(raise)
    }

    fn phase(&self, name: &str) -> PyResult<()> {
        self.engine.phase(name.parse::<Phase>().map_err(bad_argument)?).map_err(raise)
    }

    #[getter]
    fn observed(&self) -> bool {
        self.engine.is_observed()
    }

    #[allow(clippy::needless_pass_by_value)]
    fn applied(&self, book: BookId, tensors: Vec<TensorId>) -> PyResult<()> {
        self.engine.applied(book, &tensors).map_err(raise)
    }

    fn observe(&self, py: Python<'_>, records: usize) -> PyResult<u64> {
        py.detach(|| self.engine.observe(records)).map_err(raise)
    }

    #[pyo3(signature = (*, in_order=true))]
    fn observations<'py>(&self, py: Python<'py>, in_order: bool) -> PyResult<(Bound<'py, PyBytes>, u64)> {
        let take = || {
            let found = self.engine.observations()?;
            Ok(if in_order { found.in_order() } else { found })
        };
        let found: Observations = py.detach(take).map_err(raise)?;
        let bytes = PyBytes::new_with(py, found.encoded_bytes(), |bytes| {
            found.encode(bytes);
            Ok(())
        })?;
        Ok((bytes, found.lost))
    }

    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = py.detach(|| self.engine.report()).map_err(raise)?;
        report::to_python(py, &report)
    }

    #[pyo3(signature = (reason, culprit=None))]
    fn abort(&self, py: Python<'_>, reason: &str, culprit: Option<u32>) -> PyResult<()> {
        py.detach(|| match culprit {
            None => self.engine.abort(reason),
            Some(rank) => self.engine.abort_for(Rank(rank), reason),
        })
        .map_err(raise)
    }

    fn check(&self) -> PyResult<()> {
        self.engine.check().map_err(raise)
    }

    fn quiet(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.engine.quiet()).map_err(raise)
    }

    #[getter]
    fn has_failed(&self) -> bool {
        self.engine.has_failed()
    }

    #[pyo3(signature = (reason, lent=None))]
    fn shutdown_by_status(&self, reason: String, lent: Option<Py<PyAny>>) -> PyResult<()> {
        // When the status is known there is no interpreter any more.
        std::mem::forget(lent);
        self.engine.shutdown_by_status(reason).map_err(raise)
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        waiting(py, |interrupted| self.engine.shutdown(interrupted))
    }

    #[allow(clippy::needless_pass_by_value)]
    fn form_group(&self, group: GroupId, members: Vec<u32>) -> PyResult<()> {
        self.engine.form_group(group, &members).map_err(raise)
    }

    fn set_rates(&self, rates: RatesObject) -> PyResult<()> {
        self.engine.set_rates(rates_of(rates)?).map_err(raise)
    }

    #[pyo3(signature = (elems, dtype, ranks, algorithm=None, vectors=1))]
    fn allreduce_plan(
        &self,
        elems: u64,
        dtype: &str,
        ranks: u32,
        algorithm: Option<&str>,
        vectors: usize,
    ) -> PyResult<(&'static str, u32, bool)> {
        let dtype = named(dtype)?;
        let algorithm = algorithm.map(named).transpose()?;
        let (algorithm, slices, any_cut) =
            self.engine.allreduce_plan(elems, dtype, ranks, algorithm, vectors).map_err(raise)?;
        Ok((algorithm.name(), slices, any_cut))
    }

    #[pyo3(signature = (group, request, rank, tag, op, dtype, inputs, outputs, keep, algorithm=None, epoch=None))]
    #[allow(clippy::too_many_arguments)]
    fn call(
        slf: &Bound<'_, Self>,
        group: GroupId,
        request: &str,
        rank: u32,
        tag: u32,
        op: &str,
        dtype: &str,
        inputs: Vec<AddressRange>,
        outputs: Vec<AddressRange>,
        keep: Py<PyAny>,
        algorithm: Option<&str>,
        epoch: Option<u32>,
    ) -> PyResult<Call> {
        let algorithm = algorithm.map(named).transpose()?;
        call::begin(
            slf,
            (group, epoch),
            (request, rank, tag),
            algorithm,
            (op, dtype),
            (inputs, outputs),
            keep,
        )
    }

    fn take_done(&self, py: Python<'_>, patience_s: f64) -> PyResult<Vec<u64>> {
        let patience = seconds("patience_s", patience_s)?;
        py.detach(|| self.engine.take_done(patience)).map_err(raise)
    }

    fn after_fork_in_child(&self) {
        self.engine.after_fork_in_child();
    }
}

impl Engine {
    /// What does not wait, and is called for each gradient, keeps the GIL, unless members may be lost.
    pub(crate) fn may_wait<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        if self.elastic { py.detach(call) } else { call() }.map_err(raise)
    }

    fn give(
        &self,
        py: Python<'_>,
        (book, tensor, step): (BookId, TensorId, Step),
        (address, len_bytes): (usize, usize),
        gives: Gives,
        more: bool,
    ) -> PyResult<u64> {
        let submission =
            Submission { book, tensor, seq: 0, step, memory: Lent { address, len_bytes }, gives };
        // SAFETY: `penstock.torch` keeps the tensor alive and leaves it alone until the token comes back, as
        // `_native.pyi` asks.
        self.may_wait(py, || unsafe { self.engine.submit(submission, more) })
    }
}

"""A device that has no silicon: it runs late, in an order of its own between streams, and shows whoever does not wait.

Its type is ``late``. Tensors are torch's own, with memory of the host behind another device type (PrivateUse1, by the
exchange format DLPack), so parameters, views, autograd, hooks and optimizers are the usual ones. Every operation comes
to one dispatch fallback, which does not run it but puts it at the end of the current stream. It is run, on host
tensors of the same memory, when the device gets to it:

- each stream runs in order, streams among each other in random order (`LateDevice.seed`), some of them hardly at all
  for a while, and as late as anybody allows: when somebody waits, or looks, and now and then by chance;
- memory reads as NaN until whatever writes it has run: on the device from its allocation on, which the device's own
  allocator may have taken from somebody else (so it is overwritten once more when the allocating stream gets to it),
  on the host from the call of the copy on;
- memory that is let go of is somebody else's once the stream that allocated it has come to that: whoever still uses it
  then has failed;
- whatever makes the host wait for the device is counted (`LateDevice.waits`).

So a missing wait is a wrong number, or an error. `installed` puts it in place of the streams and events of
`torch.accelerator`; the tensors stay. What it is not: fast, several devices, or able to run every operation (those
whose result's shape depends on values run at once, which is counted as a wait). Autograd's own thread for the device
has the default stream, and an exception of a hook there ends the process.

torch takes in what devices there are with the first backward of a process, and `penstock.torch` makes one when it is
imported: import this first, in a process of its own.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["LateDevice", "LateEvent", "LateStream", "installed"]

NAME = "late"
RUN_BY_CHANCE = 0.1
"""How probable it is, with each call, that the device gets on by one piece of work that nobody waits for."""
LOOKED_AT_MAX = 20
"""By how many pieces of work it gets on at most while somebody looks whether it has passed an event."""
SLOW = 0.4
"""Of the streams, for a while: so many calls."""
WHILE = 150
SLOW_RUNS = 0.03
"""How probable it is, with each call, that a slow stream gets on by one piece of work all the same."""
AS_LATE_AS_POSSIBLE = 0.5
"""How probable it is, while somebody waits, that the device runs what that needs, and not anything else."""

_storage_users: Callable[[int], int] = torch._C._storage_Use_Count


@dataclass(eq=False)
class Mark:
    """A place in a stream: what an event stands for from one `record` on."""

    stream: LateStream
    passed: bool = False


@dataclass(eq=False)
class Block:
    """Memory of the device: as the host sees it, and the stream that has allocated it."""

    host: Tensor
    stream: LateStream
    let_go: bool = False

    def view(self, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> Tensor:
        """A tensor of the host in this memory."""
        if self.let_go:
            raise RuntimeError("memory is used that was let go of")
        return torch.empty(0, dtype=dtype).set_(self.host.untyped_storage(), offset, size, stride)


@dataclass(eq=False)
class Operand:
    """A tensor of the device, as an operation that has not run yet knows it. Its memory may be let go of meanwhile."""

    block: Block
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def on_host(self) -> Tensor:
        """The same memory, as a tensor of the host."""
        return self.block.view(self.dtype, self.offset, self.size, self.stride)


@dataclass(eq=False)
class LateDevice:
    """What the streams share.

    Attributes:
        seed: Of the order in which streams run.
        waits: How often the host waited for the device, by what made it wait and the name of the thread.
    """

    seed: int = 0
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.RLock)
    streams: list[LateStream] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # by address
    failure: BaseException | None = None
    _local: Any = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.slow: list[LateStream] = []
        self.calls = 0
        self.default = LateStream(late=self)

    def current(self) -> LateStream:
        """This thread's stream."""
        return getattr(self._local, "stream", self.default)

    def select(self, stream: LateStream) -> None:
        """From now on it is this thread's."""
        self._local.stream = stream

    def enqueue(self, work: Callable[[], None] | Mark, stream: LateStream | None = None) -> None:
        """Put something at the end of a stream."""
        with self.lock:
            (stream or self.current()).queue.append(work)
            self.advance_by_chance()

    def advance_by_chance(self, probability: float = RUN_BY_CHANCE) -> None:
        """Perhaps the device gets on by something."""
        if self.calls % WHILE == 0:
            self.slow = [one for one in self.streams if self.chance.random() < SLOW]
        self.calls += 1
        slow = self.chance.random() < SLOW_RUNS
        if self.chance.random() < probability and (able := self._able(slow=slow)):
            self.chance.choice(able).run_one()

    def _able(self, *, slow: bool) -> list[LateStream]:
        """Streams that can run something."""
        return [one for one in self.streams if one.can_run() and (slow or one not in self.slow)]

    def run_until(self, mark: Mark) -> None:
        """Run what the device likes until it has passed this mark."""
        with self.lock:
            while not mark.passed:
                needed = mark.stream.blocked_by()
                able = [needed]
                if self.chance.random() > AS_LATE_AS_POSSIBLE:
                    able += self._able(slow=False)
                self.chance.choice(able).run_one()
        if self.failure is not None:
            raise RuntimeError(f"the device failed (seed {self.seed})") from self.failure

    def wait_for(self, mark: Mark, what: str) -> None:
        """The host waits."""
        self.waits[what, threading.current_thread().name] += 1
        self.run_until(mark)

    def synchronize(self, what: str = "device") -> None:
        """The host waits for everything that has been put into any stream."""
        marks = [stream.mark() for stream in self.streams]
        self.waits[what, threading.current_thread().name] += 1
        for mark in marks:
            self.run_until(mark)

    # Memory

    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """A tensor whose elements are NaN, and become so once more when the stream gets to it."""
        elems = 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True)) if 0 not in size else 1
        host = torch.empty(elems, dtype=dtype)
        _ruin(host)
        with self.lock:
            self._sweep()
            block = Block(host, self.current())
            made = _as_device_tensor(host)
            self.blocks[host.data_ptr()] = block
            block.stream.queue.append(lambda: _ruin(block.host))
        return _strided(made, size, stride, 0)

    def _sweep(self) -> None:
        """What nobody refers to any more is given to somebody else, as soon as its stream gets to it."""
        for address, block in list(self.blocks.items()):
            if _storage_users(block.host.untyped_storage()._cdata) <= _ALONE:
                del self.blocks[address]
                block.stream.queue.append(partial(setattr, block, "let_go", True))

    def operand(self, tensor: Tensor) -> Operand:
        """What an operation keeps of a tensor of the device."""
        block = self.blocks[tensor.untyped_storage().data_ptr()]
        return Operand(block, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())


class LateStream:
    """As `torch.Stream`."""

    def __init__(self, device: Any = None, *, priority: int = 0, late: LateDevice | None = None) -> None:
        self._late = late or DEVICE.now
        self.queue: deque[Any] = deque()
        self.device = torch.device(NAME, 0)
        self._outer: list[LateStream] = []
        self._late.streams.append(self)

    def can_run(self) -> bool:
        """Whether there is something to run that waits for no other stream."""
        return bool(self.queue) and not (isinstance(self.queue[0], Waiting) and not self.queue[0].mark.passed)

    def blocked_by(self) -> LateStream:
        """Itself, or the stream that has to get on first."""
        head = self.queue[0]
        return head.mark.stream.blocked_by() if isinstance(head, Waiting) and not head.mark.passed else self

    def run_one(self) -> None:
        """Run what is next."""
        work = self.queue.popleft()
        if isinstance(work, Mark):
            work.passed = True
        elif not isinstance(work, Waiting):
            try:
                # Whatever the thread that lets the device get on has switched on: ``with torch.device`` is a mode.
                with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                    work()
            except BaseException as error:  # noqa: BLE001  raised where the host waits, as on a real one
                self._late.failure = self._late.failure or error

    def mark(self) -> Mark:
        """The place at the end."""
        mark = Mark(self)
        self._late.enqueue(mark, self)
        return mark

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        """As `torch.Stream.record_event`."""
        event = event or LateEvent()
        event.record(self)
        return event

    def wait_event(self, event: LateEvent) -> None:
        """As `torch.Stream.wait_event`: what follows in this stream runs after what the event stands for by now."""
        if event.mark is not None and not event.mark.passed:
            self._late.enqueue(Waiting(event.mark), self)

    def wait_stream(self, other: LateStream) -> None:
        """As `torch.Stream.wait_stream`."""
        self.wait_event(other.record_event())

    def is_capturing(self) -> bool:
        """As `torch.Stream.is_capturing`."""
        return False

    def query(self) -> bool:
        """As `torch.Stream.query`."""
        return not self.queue

    def synchronize(self) -> None:
        """As `torch.Stream.synchronize`."""
        self._late.wait_for(self.mark(), "stream")

    def __enter__(self) -> LateStream:
        self._outer.append(self._late.current())
        self._late.select(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._late.select(self._outer.pop())


@dataclass(eq=False)
class Waiting:
    """In a stream: nothing behind it runs before another stream has passed this."""

    mark: Mark


class LateEvent:
    """As `torch.Event`."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.mark: Mark | None = None

    def record(self, stream: LateStream | None = None) -> None:
        """As `torch.Event.record`."""
        self.mark = (stream or DEVICE.now.current()).mark()

    def wait(self, stream: LateStream | None = None) -> None:
        """As `torch.Event.wait`: the stream waits, not the host."""
        (stream or DEVICE.now.current()).wait_event(self)

    def elapsed_time(self, end: LateEvent) -> float:
        """As `torch.Event.elapsed_time`, of a device that takes a millisecond for everything."""
        assert self.mark is not None and end.mark is not None and self.mark.passed and end.mark.passed
        return 1.0

    def query(self) -> bool:
        """As `torch.Event.query`."""
        late = DEVICE.now
        with late.lock:
            for _ in range(late.chance.randrange(LOOKED_AT_MAX)):
                late.advance_by_chance(1.0)
            return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        """As `torch.Event.synchronize`: this thread waits for what the event stands for, and for nothing else."""
        if self.mark is not None:
            DEVICE.now.wait_for(self.mark, "event")


# Tensors


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Exchanged(ctypes.Structure):
    """The beginning of DLPack's description of a tensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


EXTENSION_DEVICE = 12  # kDLExtDev of DLPack, which is PrivateUse1 in torch

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _as_device_tensor(host: Tensor) -> Tensor:
    capsule = torch.utils.dlpack.to_dlpack(host.detach())  # another tensor, which the new one alone keeps
    described = ctypes.cast(_pointer_of(capsule, b"dltensor"), ctypes.POINTER(_Exchanged)).contents
    described.device.type = EXTENSION_DEVICE
    return torch._C._from_dlpack(capsule)


def _ruin(host: Tensor) -> None:
    """NaN of every floating type; of others a number that is none of a test's."""
    memory = torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())
    memory.fill_(1 if host.dtype is torch.bool else 0xFF)


def _count_alone() -> int:
    host = torch.empty(1)
    return _storage_users(host.untyped_storage()._cdata)


_ALONE = _count_alone()
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten


def _strided(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """The kernel makes another tensor of the same memory, whatever that is."""
    return _aten.as_strided.default.redispatch(_CPU_KERNEL, tensor, size, stride, offset)


def _is_late(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def _mapped(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """Arguments of an operation, with something else for each tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(one, tensor) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(one, tensor) for key, one in value.items()}
    return tensor(value) if isinstance(value, Tensor) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _kept(late: LateDevice, tensor: Tensor) -> Any:
    """What an operation that runs later keeps: numbers of the host are those of now."""
    return late.operand(tensor) if _is_late(tensor) else tensor.clone()


def _given(value: Any) -> Any:
    """What it is called with when it runs."""
    if isinstance(value, Operand):
        return value.on_host()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_given, value))
    return {key: _given(one) for key, one in value.items()} if isinstance(value, dict) else value


def _run_op(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The fallback: every operation on a tensor of the device."""
    own = _OWN.get(op)
    if own is not None:
        return own(*args, **kwargs)
    returned = op._schema.returns
    if returned and all(one.alias_info is not None and not one.alias_info.is_write for one in returned):
        return op.redispatch(_CPU_KERNEL, *args, **kwargs)  # a view: of any memory
    return _run_later(op, *args, **kwargs)


def _run_later(op: Any, *args: Any, **kwargs: Any) -> Any:
    late = DEVICE.now
    if all(one.alias_info is not None for one in op._schema.returns):
        kept_args, kept_kwargs = (_mapped(values, lambda one: _kept(late, one)) for values in (args, kwargs))
        late.enqueue(lambda: op(*_given(kept_args), **_given(kept_kwargs)))
        written = [
            value
            for number, argument in enumerate(op._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[number] if number < len(args) else kwargs.get(argument.name)]
        ]
        return written[0] if len(op._schema.returns) == 1 else tuple(written) if op._schema.returns else None
    try:
        with torch.no_grad():
            described = op(*_mapped_to_meta(args), **_mapped_to_meta(kwargs))
    except (NotImplementedError, RuntimeError):
        return _run_now(op, *args, **kwargs)
    kept_args, kept_kwargs = (_mapped(values, lambda one: _kept(late, one)) for values in (args, kwargs))
    results = _mapped(described, lambda one: late.allocate(one.size(), one.stride(), one.dtype))
    places = _mapped(results, late.operand)

    def run() -> None:
        _put(_given(places), op(*_given(kept_args), **_given(kept_kwargs)))

    late.enqueue(run)
    return results


def _mapped_to_meta(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_mapped_to_meta, value))
    return {key: _on_meta(one) for key, one in value.items()} if isinstance(value, dict) else _on_meta(value)


def _put(places: Any, values: Any) -> None:
    if isinstance(places, Tensor):
        if values.numel():  # or the host's kernel leaves out what was described, as eval's batch norm does statistics
            places.copy_(values)
    elif isinstance(places, (list, tuple)):
        for place, value in zip(places, values, strict=True):
            _put(place, value)


def _run_now(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What depends on values: the host waits for the stream, as for ``nonzero`` on any device."""
    late = DEVICE.now
    late.wait_for(late.current().mark(), op.name())
    with torch.no_grad():
        host = [_mapped(values, lambda one: _given(_kept(late, one))) for values in (args, kwargs)]
        result = op(*host[0], **host[1])
    return _mapped(result, _moved)


def _moved(host: Tensor) -> Tensor:
    late = DEVICE.now
    made = late.allocate(host.size(), host.stride(), host.dtype)
    place = late.operand(made)
    late.enqueue(lambda: place.on_host().copy_(host))
    return made


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return DEVICE.now.allocate(like.size(), like.stride(), dtype)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return DEVICE.now.allocate(size, stride, dtype or torch.get_default_dtype())


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    late = DEVICE.now
    given, place = (late.operand(one) if _is_late(one) else one for one in (source, target))
    if not _is_late(target):
        _ruin_elements(target)  # nothing to be seen there until the copy has run
    late.enqueue(lambda: _given(place).copy_(_given(given)))
    if not non_blocking and not (_is_late(source) and _is_late(target)):
        late.wait_for(late.current().mark(), "copy")
    return target


def _ruin_elements(target: Tensor) -> None:
    target.fill_(float("nan") if target.dtype.is_floating_point or target.dtype.is_complex else 77)


def _item(tensor: Tensor) -> Any:
    late = DEVICE.now
    late.wait_for(late.current().mark(), "item")
    return late.operand(tensor).on_host().item()


def _convolution(*args: Any) -> Any:
    return _run_later(_aten.convolution.default, *args)


def _convolution_backward(grad: Tensor, given: Tensor, weight: Tensor, *rest: Any) -> Any:
    *how, transposed, output_padding, groups, wanted = rest
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    return _run_later(
        _aten.convolution_backward.default,
        grad,
        given,
        weight,
        [outputs] if wanted[2] else None,
        *how,
        transposed,
        output_padding,
        groups,
        wanted,
    )


def _lstm_cell(
    given: Tensor, hidden: Tensor, cell: Tensor, given_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = given + hidden
    for bias in (given_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    into, keep, new, out = gates.chunk(4, 1)
    into, keep, new, out = into.sigmoid(), keep.sigmoid(), new.tanh(), out.sigmoid()
    after = keep * cell + into * new
    return out * after.tanh(), after, torch.cat([into, keep, new, out], 1)


def _lstm_cell_backward(
    grad: Tensor | None, grad_cell: Tensor | None, cell: Tensor, after: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    into, keep, new, out = gates.chunk(4, 1)
    seen = after.tanh()
    grad = torch.zeros_like(seen) if grad is None else grad
    through = grad * out * (1 - seen * seen)
    through = through if grad_cell is None else through + grad_cell
    parts = [
        through * new * into * (1 - into),
        through * cell * keep * (1 - keep),
        through * into * (1 - new * new),
        grad * seen * out * (1 - out),
    ]
    grad_gates = torch.cat(parts, 1)
    return grad_gates, through * keep, grad_gates.sum(0) if has_bias else None


def _equal(one: Tensor, other: Tensor) -> bool:
    late = DEVICE.now
    late.wait_for(late.current().mark(), "equal")
    return torch.equal(late.operand(one).on_host(), late.operand(other).on_host())


_OWN: dict[Any, Callable[..., Any]] = {
    _aten.empty.memory_format: _empty,
    _aten.empty_strided.default: _empty_strided,
    _aten._copy_from.default: _copy_from,
    _aten._local_scalar_dense.default: _item,
    _aten.equal.default: _equal,
}

DEVICE = SimpleNamespace(now=None)
"""`now` is the device of the test that runs."""


class _Module(_DummyBackendModule):
    """As `torch.cuda` is for its device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        return [torch.bfloat16, torch.float16]


_CAST = ("linear", "conv2d", "mm", "addmm", "matmul", "bmm")
"""What autocast computes in a half type; the rest stays as it is."""
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _in_half(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        half = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            cast = _mapped(args, lambda one: one.to(half) if one.is_floating_point() else one)
            return op(*cast, **kwargs)

    return run


torch.set_num_threads(1)  # kernels may round by their number, and whoever lets the device get on runs them
_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
_libraries = [torch.library.Library(name, "IMPL") for name in ("_", "aten")]  # what is registered lives as long
_libraries[0].fallback(_run_op, "PrivateUse1")
_libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in _CAST:
    _libraries[1].impl(_name, _in_half(getattr(_aten, _name)), "AutocastPrivateUse1")
# These have kernels for every device that only raise, so the fallback is not asked.
_libraries[1].impl("convolution_overrideable", _convolution, "PrivateUse1")
_libraries[1].impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
# The host has none for these.
_libraries[1].impl("_thnn_fused_lstm_cell", _lstm_cell, "PrivateUse1")
_libraries[1].impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, "PrivateUse1")


@contextmanager
def installed(seed: int) -> Iterator[LateDevice]:
    """Within, torch's streams and events are those of a new device."""
    late = DEVICE.now = LateDevice(seed)
    print(f"the device's seed: {seed}")  # shown when the test fails
    ours = {
        (torch, "Stream"): LateStream,
        (torch, "Event"): LateEvent,
        (torch.accelerator, "current_stream"): lambda device=None: DEVICE.now.current(),
        (torch.accelerator, "synchronize"): lambda device=None: DEVICE.now.synchronize(),
    }
    before = {place: getattr(*place) for place in ours}
    try:
        for (where, name), value in ours.items():
            setattr(where, name, value)
        yield late
        late.synchronize("end")
    finally:
        for (where, name), value in before.items():
            setattr(where, name, value)

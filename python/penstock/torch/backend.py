"""A backend of torch.distributed: existing programs run on Penstock's transport.

Importing this module registers the backend ``penstock`` for tensors in main memory:

    import penstock.torch.backend
    torch.distributed.init_process_group("penstock")

The ranks meet in the store that `init_process_group` provides, and trust it as torch's own backends do. The job that
starts is that of `penstock.init`: if it runs already, it is used, and `penstock.distribute` works beside the backend.
It goes on after `destroy_process_group`, until `penstock.shutdown` or the end of the program.
Sums are in rank order with the same bits on every rank; half types are summed in single precision.

Whoever waits for a `Work` waits for the engine's call; a thread completes the future of one that was asked for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as C10dBackend

from penstock import job
from penstock.boards import TorchBoard
from penstock.buffers import DTYPES, Buffer, view
from penstock.errors import ConfigError
from penstock.torch.works import Completer, Work

if TYPE_CHECKING:
    from penstock._native import Call, Engine

__all__ = ["ProcessGroup", "create"]

GROUPS_FIRST = 1 << 15
"""Numbers below are those of `penstock.new_group`."""
GROUPS_END = 1 << 16
_OPS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
]
_FLOATS = {"f32", "f64", "f16", "bf16"}
"""What the engine averages. What it does not compute is gathered, and computed by torch in rank order."""


def _local_reduction(op: Any, dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """How two ranks' tensors are combined, for what the engine does not compute."""
    if dtype == torch.bool and op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BOR):
        return torch.logical_or
    if dtype == torch.bool and op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.BAND):
        return torch.logical_and
    known: list[tuple[Any, Callable[[Tensor, Tensor], Tensor]]] = [
        (dist.ReduceOp.SUM, torch.add),
        (dist.ReduceOp.AVG, torch.add),
        (dist.ReduceOp.PRODUCT, torch.mul),
        (dist.ReduceOp.MIN, torch.minimum),
        (dist.ReduceOp.MAX, torch.maximum),
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ]
    for candidate, combine in known:
        if op == candidate:
            return combine
    raise ConfigError(f"the backend penstock does not know the operation {op} of {dtype}")


def _reduce_locally(op: Any, rows: Sequence[Tensor]) -> Tensor:
    """The rows in rank order under an operation of torch."""
    combine = _local_reduction(op, rows[0].dtype)
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    if op == dist.ReduceOp.AVG:
        integral = not (total.is_floating_point() or total.is_complex())
        total = torch.div(total, len(rows), rounding_mode="floor" if integral else None)
    return total


class _Engines:
    """What belongs to the engine of the running job."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.completer: Completer | None = None
        self.next_group = GROUPS_FIRST

    def of(self, engine: Engine) -> Completer:
        """The completer of this engine; what belonged to an older one is forgotten."""
        if self.engine is not engine or self.completer is None:
            self.engine, self.completer, self.next_group = engine, Completer(engine), GROUPS_FIRST
        return self.completer


_engines = _Engines()


def _staged(tensor: Tensor, copies: list[tuple[Tensor, Tensor]], written: bool) -> Tensor:
    """The tensor itself, or contiguous memory that is copied back if it is written."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_sparse:
        return tensor
    copy = tensor.contiguous()
    if written:
        copies.append((tensor, copy))
    return copy


class ProcessGroup(dist.ProcessGroup):
    """One process group of torch.distributed.

    Args:
        engine: The engine of the running job.
        number: The group's number among the engine's groups.
        rank: This rank's index in the group.
        size: The number of members.
        timeout: How long a call may take.
    """

    def __init__(self, engine: Engine, number: int, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._engine = engine
        self._number = number
        self._index = rank
        self._size = size
        self._timeout = timeout
        self._completer = _engines.of(engine)
        self._count = 0
        self.device_backend: _DeviceBackend | None = None

    # What torch asks about a backend. The names are torch's.

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which it is registered."""
        return "penstock"

    def _set_sequence_number_for_group(self) -> None:
        self._count = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """How long calls may take from now on."""
        self._timeout = timeout

    # The machinery.

    def _begin(
        self,
        request: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        rank: int = 0,
        tag: int = 0,
        op: str = "copy",
    ) -> Call:
        # Detached tensors are kept: they share memory with the program's and hold no graph.
        given = [view(tensor, request, written=False) for tensor in inputs]
        wanted = [view(tensor, request, written=True) for tensor in outputs]
        dtype = "bytes" if op == "copy" else (given + wanted)[0].dtype
        address: Callable[[Buffer], tuple[int, int]] = lambda memory: (memory.address, memory.nbytes)  # noqa: E731
        return self._engine.call(
            self._number,
            request,
            rank,
            tag,
            op,
            dtype,
            [address(memory) for memory in given],
            [address(memory) for memory in wanted],
            [*inputs, *outputs],
        )

    def _work(
        self,
        opts: Any,
        calls: list[Call],
        result: Any,
        finish: Callable[[], None] | None = None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Work:
        """What torch waits for."""
        self._count += 1
        limit = getattr(opts, "timeout", None)
        if limit is None or limit <= timedelta(0):
            limit = self._timeout

        def finish_all() -> None:
            with torch.no_grad():
                if finish is not None:
                    finish()
                for tensor, copy in copies:
                    tensor.copy_(copy)

        return Work(self._completer, calls, result, finish_all, min(limit, self._timeout).total_seconds())

    def _sum_name(self, op: Any, tensor: Tensor) -> str | None:
        """The engine's name for the operation, or None if torch has to compute it."""
        name = next((name for known, name in _OPS if op == known), None)
        dtype = view(tensor, "allreduce", written=False).dtype
        return name if dtype in _FLOATS or (dtype in DTYPES and name != "average") else None

    # Sums.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """In place on every rank."""
        opts = dist.AllreduceOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        staged = [_staged(tensor, copies, written=True) for tensor in tensors]
        gathered: list[tuple[Tensor, list[Tensor]]] = []

        calls = []
        for tensor in staged:
            op = self._sum_name(opts.reduceOp, tensor)
            if op is not None:
                calls.append(self._begin("allreduce", [tensor], [tensor], op=op))
                continue
            rows = [torch.empty_like(tensor) for _ in range(self._size)]
            gathered.append((tensor, rows))
            calls.append(self._begin("all_gather", [tensor], rows))

        def finish() -> None:
            for tensor, rows in gathered:
                tensor.copy_(_reduce_locally(opts.reduceOp, rows))

        return self._work(opts, calls, list(tensors), finish, copies)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """To the root's tensor; the others' stay as they are."""
        (tensor,) = tensors
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        staged = _staged(tensor, copies, written=is_root)
        op = self._sum_name(opts.reduceOp, staged)
        rows = [torch.empty_like(staged) for _ in range(self._size)] if op is None and is_root else []

        if op is None:
            call = self._begin("gather", [staged], rows, rank=opts.rootRank)
        else:
            call = self._begin("reduce", [staged], [staged] if is_root else [], rank=opts.rootRank, op=op)

        def finish() -> None:
            if rows:
                staged.copy_(_reduce_locally(opts.reduceOp, rows))

        return self._work(opts, [call], list(tensors), finish, copies)

    def _reduce_scatter(self, pairs: list[tuple[Tensor, list[Tensor]]], opts: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        local: list[tuple[Tensor, list[Tensor]]] = []
        staged = [
            (_staged(output, copies, written=True), [_staged(block, copies, written=False) for block in blocks])
            for output, blocks in pairs
        ]

        calls = []
        for output, blocks in staged:
            op = self._sum_name(opts.reduceOp, output)
            if op is not None:
                calls.append(self._begin("reduce_scatter", blocks, [output], op=op))
                continue
            rows = [torch.empty_like(output) for _ in range(self._size)]
            local.append((output, rows))
            calls.append(self._begin("all_to_all", blocks, rows))

        def finish() -> None:
            for output, rows in local:
                output.copy_(_reduce_locally(opts.reduceOp, rows))

        return self._work(opts, calls, [output for output, _ in pairs], finish, copies)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Block r of the sum, to rank r."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._reduce_scatter(list(zip(outputs, inputs, strict=True)), opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Likewise, of one tensor cut into equal blocks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        pairs = [(output, self._cut(tensor)) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._reduce_scatter(pairs, opts)

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel() % self._size:
            raise ConfigError(f"a tensor of {flat.numel()} elements cannot be cut into {self._size} equal blocks")
        return list(flat.view(self._size, -1).unbind(0))

    # Moves.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """The root's tensors, on every rank."""
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        staged = [_staged(tensor, copies, written=not is_root) for tensor in tensors]

        calls = [self._begin("broadcast", [], [one], rank=opts.rootRank) for one in staged]
        return self._work(opts, calls, list(tensors), None, copies)

    def _all_gather(self, pairs: list[tuple[list[Tensor], Tensor]], result: Any, opts: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        staged = [
            ([_staged(output, copies, written=True) for output in outputs], _staged(tensor, copies, written=False))
            for outputs, tensor in pairs
        ]

        calls = [self._begin("all_gather", [tensor], outputs) for outputs, tensor in staged]
        return self._work(opts, calls, result, None, copies)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor, on all."""
        opts = dist.AllgatherOptions() if opts is None else opts
        return self._all_gather(list(zip(outputs, inputs, strict=True)), outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several at once; the outer list is by rank."""
        opts = dist.AllgatherOptions() if opts is None else opts
        pairs = [([row[at] for row in outputs], tensor) for at, tensor in enumerate(inputs)]
        return self._all_gather(pairs, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Likewise, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        opts = dist.AllgatherOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            pairs.append((self._cut(_staged(output, copies, written=True)), _staged(tensor, copies, written=False)))

        calls = [self._begin("all_gather", [tensor], blocks) for blocks, tensor in pairs]
        return self._work(opts, calls, list(outputs), None, copies)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Every rank's tensor, on the root."""
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        blocks = [_staged(output, copies, written=True) for output in outputs[0]] if is_root else []
        tensor = _staged(inputs[0], copies, written=False)

        calls = [self._begin("gather", [tensor], blocks, rank=opts.rootRank)]
        return self._work(opts, calls, outputs, None, copies)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """The root's blocks, one to each."""
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        blocks = [_staged(block, copies, written=False) for block in inputs[0]] if is_root else []
        output = _staged(outputs[0], copies, written=True)

        calls = [self._begin("scatter", blocks, [output], rank=opts.rootRank)]
        return self._work(opts, calls, list(outputs), None, copies)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """From everybody to everybody a tensor of their own."""
        opts = dist.AllToAllOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        given = [_staged(tensor, copies, written=False) for tensor in inputs]
        wanted = [_staged(tensor, copies, written=True) for tensor in outputs]

        calls = [self._begin("all_to_all", given, wanted)]
        return self._work(opts, calls, list(outputs), None, copies)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """Likewise, of one tensor cut along its first dimension; without splits into equal parts."""
        opts = dist.AllToAllOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        given = self._split(_staged(tensor, copies, written=False), input_splits)
        wanted = self._split(_staged(output, copies, written=True), output_splits)

        calls = [self._begin("all_to_all", given, wanted)]
        return self._work(opts, calls, [output], None, copies)

    def _split(self, tensor: Tensor, splits: list[int]) -> list[Tensor]:
        if not splits:
            if tensor.dim() == 0 or tensor.size(0) % self._size:
                raise ConfigError(f"the first dimension of {tuple(tensor.shape)} cannot be cut into {self._size} parts")
            splits = [tensor.size(0) // self._size] * self._size
        if len(splits) != self._size or sum(splits) != tensor.size(0):
            raise ConfigError(f"splits {splits} do not cut {tensor.size(0)} rows into {self._size} parts")
        return list(tensor.split(splits))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """A message."""
        copies: list[tuple[Tensor, Tensor]] = []
        (tensor,) = (_staged(one, copies, written=False) for one in tensors)

        calls = [self._begin("send", [tensor], [], rank=to, tag=tag)]
        return self._work(None, calls, list(tensors))

    def recv(self, tensors: list[Tensor], from_: int, tag: int) -> Any:
        """The next message of this sender and tag."""
        copies: list[tuple[Tensor, Tensor]] = []
        (tensor,) = (_staged(one, copies, written=True) for one in tensors)

        calls = [self._begin("recv", [], [tensor], rank=from_, tag=tag)]
        return self._work(None, calls, list(tensors), None, copies)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """The next message of anybody with this tag; the work knows its source."""
        copies: list[tuple[Tensor, Tensor]] = []
        (tensor,) = (_staged(one, copies, written=True) for one in tensors)

        calls = [self._begin("recv_any", [], [tensor], tag=tag)]
        return self._work(None, calls, list(tensors), None, copies)

    def barrier(self, opts: Any = None) -> Any:
        """Returns when all have come."""
        opts = dist.BarrierOptions() if opts is None else opts
        return self._work(opts, [self._begin("barrier", [], [])], [])

    # Names of other versions of torch for the same calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _DeviceBackend(C10dBackend):
    """The same group as torch's dispatcher sees it, which asks for a backend by device."""

    # Their defaults ask the Python object, which asks its defaults.
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group._index, group._size)
        self._group = weakref.ref(group)


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: _DeviceBackend, *arguments: Any, **options: Any) -> Any:
        return getattr(self._group(), name)(*arguments, **options)

    return forward


for _name, _value in list(vars(ProcessGroup).items()):
    if callable(_value) and (not _name.startswith("_") or _name in ("_allgather_base", "_reduce_scatter_base")):
        setattr(_DeviceBackend, _name, _forwarded(_name))


def _agree_on_number(store: Any, rank: int, size: int) -> int:
    """A number that no member has used for another group: the largest of what each would take next."""
    mine = _engines.next_group
    store.set(f"penstock/next/{rank}", str(mine))
    if rank == 0:
        most = max(int(store.get(f"penstock/next/{member}")) for member in range(size))
        store.set("penstock/group", str(most))
    number = int(store.get("penstock/group"))
    if number >= GROUPS_END:
        raise ConfigError(f"no more than {GROUPS_END - GROUPS_FIRST} process groups are possible in one job")
    _engines.next_group = number + 1
    return number


def create(options: Any, _: object = None) -> ProcessGroup:
    """Make the backend of a process group; torch.distributed calls it.

    Args:
        options: torch's ``DistributedBackendOptions``: store, rank and size in the group, timeout, members.

    Raises:
        ConfigError: The job runs already with another rank or size.
        PenstockError: The job could not be started, as `penstock.init`.
    """
    members = list(options.global_ranks_in_group)
    rank, size = options.group_rank, options.group_size
    if not dist.is_initialized():  # the default group, of all ranks
        board = TorchBoard(dist.PrefixStore("penstock/job", options.store), "the program's store", False)
        running = job.init_at_store(board, rank, size)
        members = list(range(size))
    else:
        running = job.current("new_group")
    _engines.of(running.engine)
    number = _agree_on_number(options.store, rank, size)
    running.engine.form_group(number, members or list(range(size)))
    group = ProcessGroup(running.engine, number, rank, size, options.timeout)
    group.device_backend = _DeviceBackend(group)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, group.device_backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


with contextlib.suppress(AttributeError):  # older versions keep no table of default devices
    dist.Backend.default_device_backend_map.setdefault("cpu", "gloo")
dist.Backend.register_backend("penstock", create, extended_api=True, devices=["cpu"])

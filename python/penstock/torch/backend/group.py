"""A process group of torch.distributed, and each of its operations as a call of the engine.

Whoever waits for a `Work` waits for the engine's call; threads complete the futures of those that were asked for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions  # not in torch.distributed, which has the others
from torch._C._distributed_c10d import Backend as C10dBackend

from penstock import job
from penstock.buffers import Buffer, view
from penstock.calling import Caller, device_calls
from penstock.collectives import GROUPS_OWN
from penstock.errors import ConfigError
from penstock.torch.backend.debug import Comparison, compared, monitored_barrier
from penstock.torch.backend.reductions import engine_name, local_reduction, reduce_locally
from penstock.torch.backend.sparse import SPARSE_TAGS, SparseSum, dense
from penstock.torch.backend.works import Completer, OnDevices, Work, methods_outside_of_dynamo
from penstock.torch.calls.passing import Combined, DeviceCall, scratch

if TYPE_CHECKING:
    from penstock._native import Call, Engine
    from penstock.config import Options

__all__ = ["ProcessGroup"]

GROUPS_FIRST = 1 << 15
"""Numbers below are those of `penstock.new_group`."""
GROUPS_END = GROUPS_OWN


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


def _options() -> Options:
    return job.current("a call").options


def _check_same_dtype(caller: str, tensors: Sequence[Tensor]) -> None:
    """Blocks that are moved as bytes would be read as other numbers."""
    names = sorted({str(tensor.dtype) for tensor in tensors})
    if len(names) > 1:
        raise ConfigError(f"{caller}: tensors of {' and '.join(names)}; give one dtype")


def _staged(tensor: Tensor, copies: list[tuple[Tensor, Tensor]], written: bool) -> Tensor:
    """The tensor itself, or contiguous memory that is copied back if it is written."""
    tensor = dense(tensor).detach()
    if tensor.is_contiguous():
        return tensor
    copy = tensor.contiguous()
    if written:
        copies.append((tensor, copy))
    return copy


def _one(tensors: Any) -> Any:
    """The only one of a list: torch lists tensors by device, of which there is one."""
    if isinstance(tensors, Tensor) or len(tensors) != 1:
        raise ConfigError(
            "the methods of a process group take a list of one tensor, and then torch's options; for several use "
            "all_reduce_coalesced and so on"
        )
    return tensors[0]


def _check_tag(tag: int) -> None:
    if not 0 <= tag < SPARSE_TAGS:
        raise ConfigError(f"the tag of a message is {tag}; give one from 0 to {SPARSE_TAGS - 1}")


@methods_outside_of_dynamo
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
        self._timeout = timeout
        self._take(engine, number, rank, size)
        self.device_backend: _DeviceBackend | None = None

    def _take(self, engine: Engine, number: int, rank: int, size: int) -> None:
        """From now on calls are those of this group of this engine."""
        self._engine = engine
        self._number = number
        self._index = rank
        self._size = size
        self._completer = _engines.of(engine)
        self._caller = Caller(engine, number, rank, size, _options)
        self._count = 0
        self._sparse_count = 0
        detail = dist.get_debug_level() == dist.DebugLevel.DETAIL
        self.comparison = Comparison(self._begin, size, self._timeout.total_seconds()) if detail else None

    # What torch asks about a backend. The names are torch's.

    def getBackendName(self) -> str:  # noqa: N802
        """The name under which it is registered."""
        return "penstock"

    supports_reconfigure = False

    def _members(self) -> Sequence[int]:
        """The ranks of the group, for messages."""
        return dist.get_process_group_ranks(self)

    def _meeting_store(self, members: Sequence[int], given: Any) -> Any:
        """Where these members of the default group meet to make another group: in the store that torch has given."""
        del members
        return given

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
        outputs: Sequence[Tensor | Buffer],
        *,
        rank: int = 0,
        tag: int = 0,
        op: str = "copy",
        **more: Any,
    ) -> Call | DeviceCall:
        if not 0 <= rank < self._size:
            raise ConfigError(f"{request}: rank {rank} is not in the group of {self._size}; give one from 0 on")
        # Detached tensors are kept: they share memory with the program's and hold no graph.
        given = [view(tensor, request, written=False, on_device=True) for tensor in inputs]
        wanted = [view(tensor, request, written=True, on_device=True) for tensor in outputs]
        dtype = "bytes" if op == "copy" else (given + wanted)[0].dtype
        keep = [*inputs, *outputs]
        return self._caller.begin(request, given, wanted, keep, rank=rank, tag=tag, op=op, dtype=dtype, **more)

    def _begin_locally(
        self, request: str, inputs: Sequence[Tensor], into: Tensor, op: Any, **more: Any
    ) -> Call | DeviceCall:
        """On an accelerator, a sum that torch has to compute: on the host, of each piece, before it is copied back."""
        memory = view(into, request, written=True, on_device=True)
        combined = Combined(memory, local_reduction(op, into.dtype))
        rows = [scratch(memory.nbytes) for _ in range(self._size)]
        return self._begin(request, inputs, rows, combined=combined, **more)

    def _work(
        self,
        opts: Any,
        calls: list[Call | DeviceCall],
        result: Any,
        finish: Callable[[], None] | None = None,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
        follow: Callable[[], list[Call | DeviceCall]] | None = None,
        devices: Sequence[torch.device] = (),
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

        limit_s = limit.total_seconds()
        passing = [call.devices() for call in calls if isinstance(call, DeviceCall)]
        places = list(set(devices).union(*passing))
        there = OnDevices(device_calls(self._engine, _options), places) if places else None
        return Work(self._completer, calls, result, finish_all, limit_s, follow, there)

    # Sums.

    @compared(0)
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """In place on every rank."""
        opts = dist.AllreduceOptions() if opts is None else opts
        tensor = _one(tensors)
        if tensor.layout is torch.sparse_coo:
            return self._allreduce_sparse(tensor, opts)
        return self._allreduce([tensor], opts)

    @compared(0)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        return self._allreduce(tensors, dist.AllreduceOptions() if opts is None else opts)

    def _allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        distinct = {id(tensor): tensor for tensor in tensors}.values()  # one that is given twice is summed once
        staged = [_staged(tensor, copies, written=True) for tensor in distinct]
        gathered: list[tuple[Tensor, list[Tensor]]] = []

        calls = []
        for tensor in staged:
            op = engine_name(opts.reduceOp, tensor)
            if op is not None:
                calls.append(self._begin("allreduce", [tensor], [tensor], op=op))
                continue
            if tensor.device.type != "cpu":
                calls.append(self._begin_locally("all_gather", [tensor], tensor, opts.reduceOp))
                continue
            rows = [torch.empty_like(tensor) for _ in range(self._size)]
            gathered.append((tensor, rows))
            calls.append(self._begin("all_gather", [tensor], rows))

        def finish() -> None:
            for tensor, rows in gathered:
                tensor.copy_(reduce_locally(opts.reduceOp, rows))

        return self._work(opts, calls, list(tensors), finish, copies)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> Any:
        total = SparseSum(tensor, opts.reduceOp, self._index, self._size, self._sparse_count)
        self._sparse_count += 1
        calls = [self._begin("all_gather", [total.header], total.headers)]
        devices = [] if tensor.device.type == "cpu" else [tensor.device]
        return self._work(
            opts, calls, [tensor], total.finish, follow=lambda: total.exchange(self._begin), devices=devices
        )

    @compared(0)
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """To the root's tensor; the others' stay as they are."""
        opts = dist.ReduceOptions() if opts is None else opts
        tensor = _one(tensors)
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        staged = _staged(tensor, copies, written=is_root)
        op = engine_name(opts.reduceOp, staged)
        locally = op is None and is_root
        on_host = staged.device.type == "cpu"
        rows = [torch.empty_like(staged) for _ in range(self._size)] if locally and on_host else []

        if locally and not on_host:
            call = self._begin_locally("gather", [staged], staged, opts.reduceOp, rank=opts.rootRank)
        elif op is None:
            call = self._begin("gather", [staged], rows, rank=opts.rootRank)
        else:
            call = self._begin("reduce", [staged], [staged] if is_root else [], rank=opts.rootRank, op=op)

        def finish() -> None:
            if rows:
                staged.copy_(reduce_locally(opts.reduceOp, rows))

        return self._work(opts, [call], list(tensors), finish, copies)

    def _reduce_scatter(self, pairs: list[tuple[Tensor, list[Tensor]]], opts: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        local: list[tuple[Tensor, list[Tensor]]] = []
        staged = [
            (_staged(output, copies, written=True), [_staged(block, copies, written=False) for block in blocks])
            for output, blocks in pairs
        ]

        for output, blocks in staged:
            _check_same_dtype("reduce_scatter", [output, *blocks])
            if len(blocks) != self._size or blocks[self._index].numel() != output.numel():
                raise ConfigError(
                    f"reduce_scatter: blocks of {[block.numel() for block in blocks]} elements; expected {self._size}, "
                    f"of which rank {self._index} of the group gets one of {output.numel()}"
                )
        calls = []
        for output, blocks in staged:
            op = engine_name(opts.reduceOp, output)
            if op is not None and len({block.numel() for block in blocks}) == 1:
                calls.append(self._begin("reduce_scatter", blocks, [output], op=op))
                continue
            if op is not None:
                for rank, block in enumerate(blocks):
                    calls.append(
                        self._begin("reduce", [block], [output] if rank == self._index else [], rank=rank, op=op)
                    )
                continue
            if output.device.type != "cpu":
                longest = max(block.nbytes for block in blocks)
                calls.append(self._begin_locally("all_to_all", blocks, output, opts.reduceOp, longest=longest))
                continue
            rows = [torch.empty_like(output) for _ in range(self._size)]
            local.append((output, rows))
            calls.append(self._begin("all_to_all", blocks, rows))

        def finish() -> None:
            for output, rows in local:
                output.copy_(reduce_locally(opts.reduceOp, rows))

        return self._work(opts, calls, [output for output, _ in pairs], finish, copies)

    @compared(1)
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Block r of the sum, to rank r; blocks may have different lengths."""
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._reduce_scatter([(_one(outputs), _one(inputs))], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Likewise, of one tensor cut into equal blocks."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    @compared(0)
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

    @compared(0)
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """The root's tensor, on every rank."""
        opts = dist.BroadcastOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        staged = _staged(_one(tensors), copies, written=opts.rootRank != self._index)

        calls = [self._begin("broadcast", [], [staged], rank=opts.rootRank)]
        return self._work(opts, calls, list(tensors), None, copies)

    def _all_gather(self, pairs: list[tuple[list[Tensor], Tensor]], result: Any, opts: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        staged = [
            ([_staged(output, copies, written=True) for output in outputs], _staged(tensor, copies, written=False))
            for outputs, tensor in pairs
        ]

        calls = [self._begin("all_gather", [tensor], outputs) for outputs, tensor in staged]
        return self._work(opts, calls, result, None, copies)

    @compared(1)
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor, on all."""
        opts = AllgatherOptions() if opts is None else opts
        return self._all_gather([(_one(outputs), _one(inputs))], outputs, opts)

    @compared(1)
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several at once; the outer list is by rank."""
        opts = AllgatherOptions() if opts is None else opts
        pairs = [([row[at] for row in outputs], tensor) for at, tensor in enumerate(inputs)]
        return self._all_gather(pairs, outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Likewise, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @compared(1)
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Several at once."""
        opts = AllgatherOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_same_dtype("all_gather", [output, tensor])
            pairs.append((self._cut(_staged(output, copies, written=True)), _staged(tensor, copies, written=False)))

        calls = [self._begin("all_gather", [tensor], blocks) for blocks, tensor in pairs]
        return self._work(opts, calls, list(outputs), None, copies)

    @compared(1)
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Every rank's tensor, on the root."""
        opts = dist.GatherOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        rows = _one(outputs) if is_root else []
        blocks = [_staged(output, copies, written=True) for output in rows]
        tensor = _staged(_one(inputs), copies, written=False)

        calls = [self._begin("gather", [tensor], blocks, rank=opts.rootRank)]
        return self._work(opts, calls, rows, None, copies)

    @compared(0)
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """The root's blocks, one to each."""
        opts = dist.ScatterOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        is_root = opts.rootRank == self._index
        blocks = [_staged(block, copies, written=False) for block in _one(inputs)] if is_root else []
        output = _staged(_one(outputs), copies, written=True)

        calls = [self._begin("scatter", blocks, [output], rank=opts.rootRank)]
        return self._work(opts, calls, list(outputs), None, copies)

    @compared(1, shapes=False)
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """From everybody to everybody a tensor of their own."""
        opts = dist.AllToAllOptions() if opts is None else opts
        copies: list[tuple[Tensor, Tensor]] = []
        given = [_staged(tensor, copies, written=False) for tensor in inputs]
        wanted = [_staged(tensor, copies, written=True) for tensor in outputs]

        calls = [self._begin("all_to_all", given, wanted)]
        return self._work(opts, calls, list(outputs), None, copies)

    @compared(1, shapes=False)
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
        if tensor.dim() == 0 or len(splits) != self._size or min(splits) < 0 or sum(splits) != tensor.size(0):
            raise ConfigError(f"splits {splits} do not cut a tensor of {tuple(tensor.shape)} into {self._size} parts")
        return list(tensor.split(splits))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """A message."""
        _check_tag(tag)
        copies: list[tuple[Tensor, Tensor]] = []
        tensor = _staged(_one(tensors), copies, written=False)

        calls = [self._begin("send", [tensor], [], rank=to, tag=tag)]
        return self._work(None, calls, list(tensors))

    def recv(self, tensors: list[Tensor], from_: int, tag: int) -> Any:
        """The next message of this sender and tag."""
        _check_tag(tag)
        copies: list[tuple[Tensor, Tensor]] = []
        tensor = _staged(_one(tensors), copies, written=True)

        calls = [self._begin("recv", [], [tensor], rank=from_, tag=tag)]
        return self._work(None, calls, list(tensors), None, copies)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """The next message of anybody with this tag; the work knows its source."""
        _check_tag(tag)
        copies: list[tuple[Tensor, Tensor]] = []
        tensor = _staged(_one(tensors), copies, written=True)

        calls = [self._begin("recv_any", [], [tensor], tag=tag)]
        return self._work(None, calls, list(tensors), None, copies)

    @compared()
    def barrier(self, opts: Any = None) -> Any:
        """Returns when all have come."""
        opts = dist.BarrierOptions() if opts is None else opts
        return self._work(opts, [self._begin("barrier", [], [])], [])

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """Returns when all have come, or names on every rank all that have not; then the job goes on."""
        del wait_all_ranks  # torch's option for naming more than the first
        limited = timeout is not None and timeout > timedelta(0)
        limit = timeout if timeout is not None and limited else self._timeout
        monitored_barrier(self._begin, self._members(), self._index, limit.total_seconds())

    # Names of other versions of torch for the same calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _DeviceBackend(C10dBackend):
    """The same group as torch's dispatcher sees it, which asks for a backend by device."""

    # Their defaults ask the Python object, which asks its defaults.
    _supports_time_estimate = False
    supports_coalescing = False
    supports_splitting = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group._index, group._size)
        self._group = weakref.ref(group)

    @property
    def options(self) -> Any:
        """What every backend has: its name, and how long calls may take."""
        return C10dBackend.Options("penstock", self._group()._timeout)  # type: ignore[union-attr]


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: _DeviceBackend, *arguments: Any, **options: Any) -> Any:
        return getattr(self._group(), name)(*arguments, **options)

    return forward


_FORWARDED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_set_default_timeout",
)
"""Beside the public ones."""
for _name, _value in list(vars(ProcessGroup).items()):
    if callable(_value) and (not _name.startswith("_") or _name in _FORWARDED):
        setattr(_DeviceBackend, _name, _forwarded(_name))
methods_outside_of_dynamo(_DeviceBackend)


class _ReconfigurableDeviceBackend(_DeviceBackend):
    """Of a group whose members can be changed (`penstock.torch.backend.reconfiguring`)."""

    # Not of all groups: torch's own answer asks the backend, which would ask the group again, for ever.
    supports_reconfigure = True


for _name in ("get_reconfigure_handle", "reconfigure", "abort", "get_error", "getRank", "getSize", "rank", "size"):
    setattr(_ReconfigurableDeviceBackend, _name, _forwarded(_name))
methods_outside_of_dynamo(_ReconfigurableDeviceBackend)


def _agree_on_number(store: Any, rank: int, size: int) -> int:
    """A number that no member has used for another group: the largest of what each would take next."""
    # A group that is made anew finds in the program's store what was said for the one before.
    turn = store.add(f"penstock/turns/{rank}", 1)
    store.set(f"penstock/next/{turn}/{rank}", str(_engines.next_group))
    if rank == 0:
        most = max(int(store.get(f"penstock/next/{turn}/{member}")) for member in range(size))
        store.set(f"penstock/group/{turn}", str(most))
    number = int(store.get(f"penstock/group/{turn}"))
    if number >= GROUPS_END:
        raise ConfigError(f"no more than {GROUPS_END - GROUPS_FIRST} process groups are possible in one job")
    _engines.next_group = number + 1
    return number


def _check_torch() -> None:
    """Older versions call a group of Python's from native code, as DDP does, but forget its works: their waits hang."""
    try:
        C10dBackend(0, 1)
    except TypeError as error:
        raise ConfigError(
            f"torch {torch.__version__} is too old for the backend penstock, as it lets no program make a backend in "
            "Python. Take a newer one; penstock.init and penstock.distribute work with this one"
        ) from error

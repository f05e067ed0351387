"""Messages and collectives on tensors: by all ranks, or by groups of them.

Every call is made by all ranks of its group, in the same order, with the same lengths, dtype and operation; what
differs is an error on all ranks that names two that disagree. Calls of different groups may be in any order. A call
returns when its results are in memory and the memory is the caller's again; with ``async_=True`` it returns a `Future`
at once, and until that is done the tensors must be left alone. Ranks are those of the job, as `penstock.rank` gives.

Sums have the same bits on all ranks and in every run. `allreduce` adds in the order of its algorithm
(``docs/summation.md``), the others in that of the group's ranks; half types are summed in single precision.

Example:
    >>> ps.init()
    >>> gradient = torch.ones(1000)
    >>> ps.allreduce(gradient, op="average")
    >>> future = ps.all_gather(gradient, torch.empty(1000 * ps.world_size()), async_=True)
    >>> future.wait()
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock import job
from penstock.buffers import DTYPES, Buffer, view
from penstock.calling import Caller
from penstock.errors import ConfigError
from penstock.forming import Forming, agree

if TYPE_CHECKING:
    from penstock._native import Call, Engine
    from penstock._native import _Algorithm as Algorithm
    from penstock.config import Options
    from penstock.elastic_calls import ElasticCall, ElasticCalls
    from penstock.inside import InsideSums, Operation
    from penstock.torch.calls.passing import DeviceCall

__all__ = [
    "Future",
    "Group",
    "all_gather",
    "all_to_all",
    "allreduce",
    "barrier",
    "broadcast",
    "gather",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

TAG_MAX = 2**32 - 1
OPS = ("sum", "average", "min", "max")


class Future:
    """A call under way. The tensors that were given must be left alone until it is done."""

    __slots__ = ("_call", "_ranks")

    def __init__(self, call: Call | Operation | ElasticCall | DeviceCall, ranks: Sequence[int]) -> None:
        self._call = call
        self._ranks = ranks

    @property
    def source(self) -> int | None:
        """Of a `recv` that names no sender, once it is done: the rank that has sent the message."""
        index = self._call.source
        return None if index is None else self._ranks[index]

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the results are in memory.

        On an accelerator they are there for what this thread's stream is given from now on. It waits until the copies
        to the device have been given to it, not until they have been made.

        Args:
            timeout_s: The longest wait, in seconds; ``operation_timeout_s`` if it is not given.

        Raises:
            PeerLost: A rank was lost.
            Timeout: It took too long; the message names the ranks that are waited for. The job ends.
            ConfigError: The ranks' calls do not fit each other.
        """
        self._call.wait(timeout_s)

    def done(self) -> bool:
        """Whether the results are in memory; does not wait.

        Raises:
            PenstockError: The job has failed, and this call will never be done.
        """
        return self._call.done()


class Group:
    """Ranks that make calls together. `new_group` makes one; ``penstock.allreduce`` and the others take one."""

    _inside: InsideSums | None = None  # where MPI has a part in its sums
    _elastic: tuple[ElasticCalls, tuple[int, ...]] | None = None  # where members may be lost: who they are

    def __init__(self, engine: Engine, number: int, ranks: Sequence[int], rank: int) -> None:
        self._engine = engine
        self._number = number
        self.ranks = tuple(ranks)
        """The members, as ranks of the job, in the group's order."""
        self._index = {member: index for index, member in enumerate(self.ranks)}
        self._rank = rank

    def __repr__(self) -> str:
        return f"Group({list(self.ranks)})"

    @property
    def rank(self) -> int | None:
        """This rank's place among the members, or None if it is no member."""
        return self._index.get(self._rank)

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    # Each method is the function of the same name, on this group.

    def allreduce(
        self, tensor: Any, op: str = "sum", *, algorithm: Algorithm | None = None, async_: bool = False
    ) -> Future | None:
        """See `penstock.allreduce`."""
        if algorithm is not None:
            from penstock._native import ALGORITHMS

            if algorithm not in ALGORITHMS:
                names = ", ".join(ALGORITHMS)
                raise ConfigError(f"penstock.allreduce: unknown algorithm {algorithm!r}; the algorithms are {names}")
        vectors = self._vectors("allreduce", tensor, written=True)
        if self._inside is not None:
            memory = self._only("allreduce", vectors)
            self._summed("allreduce", op, vectors)
            return self._future(self._inside.allreduce(memory, op, algorithm), async_)
        return self._call("allreduce", 0, vectors, vectors, op=op, algorithm=algorithm, async_=async_)

    def reduce(self, tensor: Any, root: int = 0, op: str = "sum", *, async_: bool = False) -> Future | None:
        """See `penstock.reduce`."""
        at_root = root == self._rank
        memory = view(tensor, "reduce", written=at_root, on_device=True)
        index = self._member("reduce", root)
        if self._inside is not None:
            _in_main_memory("reduce", [memory])
            self._summed("reduce", op, [memory])
            return self._future(self._inside.reduce(memory, root, op), async_)
        return self._call("reduce", index, [memory], [memory] if at_root else [], op=op, async_=async_)

    def broadcast(self, tensor: Any, root: int = 0, *, async_: bool = False) -> Future | None:
        """See `penstock.broadcast`."""
        is_list = isinstance(tensor, (list, tuple))
        vectors = self._vectors("broadcast", tensor, written=is_list or root != self._rank)
        index = self._member("broadcast", root)
        if self._inside is not None:
            return self._future(self._inside.broadcast(self._only("broadcast", vectors), root), async_)
        return self._call("broadcast", index, [], vectors, async_=async_)

    def reduce_scatter(self, tensors: Any, output: Any, op: str = "sum", *, async_: bool = False) -> Future | None:
        """See `penstock.reduce_scatter`."""
        into = view(output, "reduce_scatter", written=True, on_device=True)
        blocks = self._blocks("reduce_scatter", tensors, written=False)
        self._same_length("reduce_scatter", [into, *blocks])
        return self._call("reduce_scatter", 0, blocks, [into], op=op, async_=async_)

    def all_gather(self, tensor: Any, outputs: Any, *, async_: bool = False) -> Future | None:
        """See `penstock.all_gather`."""
        memory = view(tensor, "all_gather", written=False, on_device=True)
        blocks = self._blocks("all_gather", outputs, written=True)
        self._same_length("all_gather", [memory, *blocks])
        return self._call("all_gather", 0, [memory], blocks, async_=async_)

    def gather(self, tensor: Any, outputs: Any = None, root: int = 0, *, async_: bool = False) -> Future | None:
        """See `penstock.gather`."""
        memory = view(tensor, "gather", written=False, on_device=True)
        blocks = self._root_blocks("gather", outputs, root, written=True)
        self._same_length("gather", [memory, *blocks])
        return self._call("gather", self._member("gather", root), [memory], blocks, async_=async_)

    def scatter(self, output: Any, tensors: Any = None, root: int = 0, *, async_: bool = False) -> Future | None:
        """See `penstock.scatter`."""
        memory = view(output, "scatter", written=True, on_device=True)
        blocks = self._root_blocks("scatter", tensors, root, written=False)
        self._same_length("scatter", [memory, *blocks])
        return self._call("scatter", self._member("scatter", root), blocks, [memory], async_=async_)

    def all_to_all(self, tensors: Any, outputs: Any, *, async_: bool = False) -> Future | None:
        """See `penstock.all_to_all`."""
        given = self._blocks("all_to_all", tensors, written=False)
        wanted = self._blocks("all_to_all", outputs, written=True)
        return self._call("all_to_all", 0, given, wanted, async_=async_)

    def send(self, tensor: Any, to: int, tag: int = 0, *, async_: bool = False) -> Future | None:
        """See `penstock.send`."""
        memory = view(tensor, "send", written=False, on_device=True)
        return self._call("send", self._other("send", to), [memory], [], tag=tag, async_=async_)

    def recv(self, tensor: Any, from_: int | None = None, tag: int = 0, *, async_: bool = False) -> Future | int | None:
        """See `penstock.recv`."""
        memory = view(tensor, "recv", written=True, on_device=True)
        if from_ is not None:
            return self._call("recv", self._other("recv", from_), [], [memory], tag=tag, async_=async_)
        if self.size == 1:
            raise ConfigError(f"penstock.recv: nobody but rank {self._rank} is in {self}; a message comes from another")
        future = self._call("recv", 0, [], [memory], tag=tag, native="recv_any", async_=True)
        if async_ or future is None:
            return future
        future.wait()
        return future.source

    def barrier(self, *, async_: bool = False) -> Future | None:
        """See `penstock.barrier`."""
        return self._call("barrier", 0, [], [], async_=async_)

    def _call(
        self,
        caller: str,
        rank: int,
        inputs: list[Buffer],
        outputs: list[Buffer],
        *,
        op: str | None = None,
        tag: int = 0,
        algorithm: Algorithm | None = None,
        native: str | None = None,
        async_: bool = False,
    ) -> Future | None:
        if self._rank not in self._index:
            raise ConfigError(f"penstock.{caller}: rank {self._rank} is no member of {self}", rank=self._rank)
        dtype = "bytes" if op is None else self._summed(caller, op, inputs + outputs)
        if not 0 <= tag <= TAG_MAX:
            raise ConfigError(f"penstock.{caller}: the tag is {tag}; it must be from 0 to {TAG_MAX}")
        if self._elastic is not None:
            calls, members = self._elastic
            if algorithm not in (None, "store"):
                raise ConfigError(f"penstock.{caller}: in an elastic job sums are the store's; leave out {algorithm!r}")
            return self._future(calls.begin(caller, members, rank, inputs, outputs, op or "copy", dtype), async_)
        keep = [memory.keep for memory in inputs + outputs]
        call = Caller(self._engine, self._number, self._index[self._rank], self.size, _options).begin(
            *(native or caller, inputs, outputs, keep),
            rank=rank,
            tag=tag,
            op=op or "copy",
            dtype=dtype,
            algorithm=algorithm,
        )
        if async_:
            return Future(call, self.ranks)
        call.wait()
        return None

    def _future(self, begun: Operation | ElasticCall, async_: bool) -> Future | None:
        if async_:
            return Future(begun, self.ranks)
        begun.wait()
        return None

    def _only(self, caller: str, vectors: list[Buffer]) -> Buffer:
        _in_main_memory(caller, vectors)
        if len(vectors) > 1:
            raise ConfigError(
                f"penstock.{caller}: a list of {len(vectors)} tensors, and {self} has MPI inside, which sums one of "
                "each rank; sum them first, or give each a rank of its own"
            )
        return vectors[0]

    def _summed(self, caller: str, op: str, buffers: list[Buffer]) -> str:
        if op not in OPS:
            raise ConfigError(f"penstock.{caller}: unknown op {op!r}; the operations are {', '.join(OPS)}")
        names = {memory.name for memory in buffers}
        dtype = buffers[0].dtype
        if dtype not in DTYPES:
            raise ConfigError(f"penstock.{caller}: {buffers[0].name} cannot be summed; only {', '.join(DTYPES)} can")
        if len(names) > 1:
            raise ConfigError(f"penstock.{caller}: the tensors have different dtypes: {', '.join(sorted(names))}")
        return dtype

    def _member(self, caller: str, rank: int) -> int:
        if rank not in self._index:
            raise ConfigError(f"penstock.{caller}: rank {rank} is no member of {self}")
        return self._index[rank]

    def _other(self, caller: str, rank: int) -> int:
        if rank == self._rank:
            raise ConfigError(f"penstock.{caller}: rank {rank} is this rank; a message goes to another")
        return self._member(caller, rank)

    def _vectors(self, caller: str, value: Any, *, written: bool) -> list[Buffer]:
        """One buffer for each vector of this rank: of a list, or one tensor."""
        if not isinstance(value, (list, tuple)):
            return [view(value, caller, written=written, on_device=True)]
        from penstock._native import VECTORS_MAX

        if not 1 <= len(value) <= VECTORS_MAX:
            raise ConfigError(f"penstock.{caller}: a list of {len(value)} tensors; 1 to {VECTORS_MAX} are possible")
        vectors = [view(item, caller, written=written, on_device=True) for item in value]
        self._same_length(caller, vectors)
        order = sorted((_device(vector), vector.address, vector.nbytes) for vector in vectors)
        if any(one[0] == other[0] and one[1] + one[2] > other[1] for one, other in itertools.pairwise(order)):
            raise ConfigError(f"penstock.{caller}: tensors of the list share memory; give each its own")
        return vectors

    def _blocks(self, caller: str, value: Any, *, written: bool) -> list[Buffer]:
        """One buffer for each member: of a list, or equal parts of one tensor."""
        if isinstance(value, (list, tuple)):
            if len(value) != self.size:
                raise ConfigError(f"penstock.{caller}: {len(value)} tensors for {self.size} ranks; give one for each")
            return [view(item, caller, written=written, on_device=True) for item in value]
        whole = view(value, caller, written=written, on_device=True)
        size = DTYPES.get(whole.dtype, 1)
        each, rest = divmod(whole.nbytes, self.size)
        if rest or each % size:
            raise ConfigError(
                f"penstock.{caller}: a tensor of {whole.nbytes // size} elements cannot be cut into {self.size} equal "
                "blocks"
            )
        return [whole.part(each * index, each) for index in range(self.size)]

    def _root_blocks(self, caller: str, value: Any, root: int, *, written: bool) -> list[Buffer]:
        if root == self._rank:
            if value is None:
                raise ConfigError(f"penstock.{caller}: the root, rank {root}, must give a tensor for each rank")
            return self._blocks(caller, value, written=written)
        if value is not None:
            raise ConfigError(f"penstock.{caller}: only the root, rank {root}, gives a tensor for each rank")
        return []

    @staticmethod
    def _same_length(caller: str, buffers: list[Buffer]) -> None:
        lengths = sorted({memory.nbytes for memory in buffers})
        if len(lengths) > 1:
            raise ConfigError(
                f"penstock.{caller}: tensors of {lengths[0]} and {lengths[-1]} bytes; give tensors of one length, the "
                "same on every rank"
            )


def _options() -> Options:
    return job.current("a call").options


def _device(memory: Buffer) -> str:
    return "" if memory.on_device is None else str(memory.on_device.device)


def _in_main_memory(caller: str, buffers: list[Buffer]) -> None:
    there = next((memory for memory in buffers if memory.on_device is not None), None)
    if there is not None:
        raise ConfigError(
            f"penstock.{caller}: the tensor is on {there.on_device.device}, and the group has MPI inside, which sums "
            "main memory; call .cpu(), or form the group without inside="
        )


class _JobGroups:
    """The groups of the running job."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: Engine | None = None
        self.world: Group | None = None
        self.members: tuple[int, ...] = ()
        self.formed = 0

    def of_all(self, caller: str) -> Group:
        """The group of all ranks."""
        running = job.current(caller)
        running.check_that_it_takes_part(caller)
        members = running.members
        if self.engine is not running.engine or self.members != members:
            with self.lock:
                world = Group(running.engine, 0, range(job.world_size()), job.rank())
                if running.calls is not None:
                    world._elastic = (running.calls, members)
                self.world, self.formed = world, 0
                self.engine, self.members = running.engine, members  # last: others look at these first
        assert self.world is not None
        return self.world


_groups = _JobGroups()
GROUPS_MAX = 1 << 15
GROUPS_OWN = (1 << 16) - 2
"""From here on groups that no program forms: of all ranks, servers included, and of worker 0 and the servers."""


def _group(group: Group | None, caller: str) -> Group:
    return _groups.of_all(caller) if group is None else group


def new_group(ranks: Sequence[int] | Sequence[Group], *, inside: Any = None) -> Group:
    """Form a group. All ranks of the job call it, members or not, in the same order with the same list.

    With ``inside`` the sums inside the group are MPI's: `allreduce`, `reduce` and `broadcast` with this group go by
    that library, and all other calls by Penstock. A larger group is made of such groups, by giving those instead of
    ranks: its sums go inside each group by MPI, across by Penstock between the groups' first ranks (their *heads*),
    and back inside by MPI (MXNET-MPI, section 4).

    Args:
        ranks: The members, distinct ranks of the job; their order is that of blocks and sums. Or groups that share no
            rank, each of them with MPI inside or of a single rank; the members are theirs, one group after the other.
        inside: On members, a communicator of mpi4py over exactly these ranks in this order, made from
            ``MPI.COMM_WORLD``; it is copied, and may be used otherwise. Ranks that are no members give None.

    Returns:
        The group; a rank that is no member can pass it on but make no call with it.

    Raises:
        ConfigError: The list is empty, names a rank twice or one that does not exist, or differs between ranks. A
            communicator does not fit the ranks, or mpi4py is missing.
        PeerLost: A rank was lost.
        Timeout: A rank did not come.

    Example:
        >>> odd = ps.new_group([1, 3])
        >>> if ps.rank() in odd.ranks:
        ...     ps.allreduce(loss, group=odd)
        >>> # Hosts of 4 ranks each, started by mpiexec: sums inside a host by MPI, across by Penstock.
        >>> here = MPI.COMM_WORLD.Split(ps.rank() // 4)
        >>> hosts = [list(range(first, first + 4)) for first in range(0, ps.world_size(), 4)]
        >>> groups = [ps.new_group(host, inside=here if ps.rank() in host else None) for host in hosts]
        >>> ps.allreduce(loss, group=ps.new_group(groups))
    """
    running = job.current("new_group")
    job.refuse_elastic(running, "new_group")
    _groups.of_all("new_group")
    parts = [list(item.ranks) for item in ranks if isinstance(item, Group)]
    if parts and len(parts) < len(ranks):
        raise ConfigError("penstock.new_group: some groups and some ranks; a group is made of one or of the other")
    members = [int(rank) for part in parts for rank in part] or [int(rank) for rank in ranks]  # type: ignore[arg-type]
    size = running.world_size
    if not members or len(set(members)) < len(members) or not all(0 <= rank < size for rank in members):
        raise ConfigError(f"penstock.new_group: {members} is no list of distinct ranks from 0 to {size - 1}")
    joined = [item._inside is not None for item in ranks if isinstance(item, Group) and running.rank in item.ranks]
    by_mpi = agree(running.engine, Forming(members, parts, joined), inside)
    heads = [part[0] for part in parts]
    group = _form(running, members)
    if not by_mpi:
        return group
    across = _form(running, heads) if len(heads) > 1 else None
    if running.rank in members:
        from penstock.inside import InsideSums, communicator

        if parts:
            own = next(item for item in ranks if isinstance(item, Group) and running.rank in item.ranks)
            inside = None if own._inside is None else own._inside.comm
        limit_s = running.options.operation_timeout_s
        comm = None if inside is None else communicator(inside, running, limit_s)
        plain = Group(running.engine, group._number, members, running.rank)
        at_head = running.rank in heads
        group._inside = InsideSums(running, limit_s, plain, comm, parts or [members], across if at_head else None)
    return group


def _form(running: job.Job, members: Sequence[int]) -> Group:
    """The next group."""
    with _groups.lock:
        _groups.formed += 1
        number = _groups.formed
    if number >= GROUPS_MAX:
        raise ConfigError(f"penstock.new_group: no more than {GROUPS_MAX - 1} groups; keep those that are used again")
    if running.rank in members:
        running.engine.form_group(number, list(members))
    return Group(running.engine, number, members, running.rank)


def allreduce(
    tensor: Any,
    op: str = "sum",
    *,
    algorithm: Algorithm | None = None,
    group: Group | None = None,
    async_: bool = False,
) -> Future | None:
    """The sum (average, minimum, maximum) over all ranks, in place on all of them, with the same bits.

    Args:
        tensor: Contiguous memory of fp32, fp64, fp16, bf16 or integers, of the same length on every rank. Or a list of
            some, as many on every rank: the vectors of its devices, which take part as one member (MXNET-MPI, section
            6). All are summed, all get the result, and an average is over all of them.
        op: ``sum``, ``average``, ``min`` or ``max``.
        algorithm: ``store`` (each slice is summed by its owner, owners take turns), ``central`` (by the group's first
            rank), ``tree``, ``ring`` or ``butterfly``; the same on every rank. Without it the one that is fastest by
            the cost model for this length, group and line rate. It decides the order of additions, which is in
            ``docs/summation.md``; name one where a program shall have the same bits on other machines.
        group: The ranks that take part; all if it is not given.
        async_: Return a `Future` at once.

    Raises:
        ConfigError: The tensor cannot be used, or ranks make calls that do not fit each other.
        PeerLost: A rank was lost.
        Timeout: A rank did not come; the message names it.

    Example:
        >>> loss = torch.tensor(0.5)
        >>> ps.allreduce(loss, op="average")
        >>> ps.allreduce([gradient_of_one_device, gradient_of_another])
    """
    return _group(group, "allreduce").allreduce(tensor, op, algorithm=algorithm, async_=async_)


def reduce(
    tensor: Any, root: int = 0, op: str = "sum", *, group: Group | None = None, async_: bool = False
) -> Future | None:
    """As `allreduce`, but only ``root`` gets the result; the others' tensors stay as they are."""
    return _group(group, "reduce").reduce(tensor, root, op, async_=async_)


def broadcast(tensor: Any, root: int = 0, *, group: Group | None = None, async_: bool = False) -> Future | None:
    """The root's tensor, byte for byte, in every rank's ``tensor``. Any dtype. Errors as `allreduce`.

    Of a list all tensors receive it; at the root the first one is sent, and copied to the others.
    """
    return _group(group, "broadcast").broadcast(tensor, root, async_=async_)


def reduce_scatter(
    tensors: Any, output: Any, op: str = "sum", *, group: Group | None = None, async_: bool = False
) -> Future | None:
    """The sum over all ranks of block r of ``tensors``, in ``output`` of the group's r-th rank.

    Args:
        tensors: A list with a tensor for each rank, or one tensor that is cut into as many equal blocks.
        output: Of a block's length; it must not overlap ``tensors``, except for this rank's own block.
        op: As for `allreduce`, and so are the rest and the errors.
        group: The ranks that take part; all if it is not given.
        async_: Return a `Future` at once.
    """
    return _group(group, "reduce_scatter").reduce_scatter(tensors, output, op, async_=async_)


def all_gather(tensor: Any, outputs: Any, *, group: Group | None = None, async_: bool = False) -> Future | None:
    """Every rank's ``tensor``, in the group's order, in ``outputs`` of all.

    Args:
        tensor: Any dtype, of the same length on every rank.
        outputs: A list with a tensor for each rank, or one tensor for all of them; this rank's own block may be
            ``tensor`` itself, the others must not overlap it.
        group: The ranks that take part; all if it is not given.
        async_: Return a `Future` at once.

    Errors as `allreduce`.
    """
    return _group(group, "all_gather").all_gather(tensor, outputs, async_=async_)


def gather(
    tensor: Any, outputs: Any = None, root: int = 0, *, group: Group | None = None, async_: bool = False
) -> Future | None:
    """As `all_gather`, but only ``root`` gets the blocks and gives ``outputs``."""
    return _group(group, "gather").gather(tensor, outputs, root, async_=async_)


def scatter(
    output: Any, tensors: Any = None, root: int = 0, *, group: Group | None = None, async_: bool = False
) -> Future | None:
    """The root's block r of ``tensors``, in ``output`` of the group's r-th rank. Only ``root`` gives ``tensors``."""
    return _group(group, "scatter").scatter(output, tensors, root, async_=async_)


def all_to_all(tensors: Any, outputs: Any, *, group: Group | None = None, async_: bool = False) -> Future | None:
    """Block s of rank r's ``tensors`` becomes block r of rank s's ``outputs``.

    Args:
        tensors: A list with a tensor for each rank, whose lengths may differ, or one for equal blocks.
        outputs: Likewise, of the lengths that the others send; they must not overlap ``tensors``.
        group: The ranks that take part; all if it is not given.
        async_: Return a `Future` at once.

    Errors as `allreduce`.
    """
    return _group(group, "all_to_all").all_to_all(tensors, outputs, async_=async_)


def send(tensor: Any, to: int, tag: int = 0, *, group: Group | None = None, async_: bool = False) -> Future | None:
    """A message to rank ``to``; messages of the same sender, receiver, group and tag arrive in order.

    It returns when the tensor may be changed: a short message is on its way then, a long one was asked for.

    Raises:
        ConfigError: The tensor cannot be used, or the receiver expects another length.
        PeerLost: The receiver was lost.
        Timeout: The receiver did not come.
    """
    return _group(group, "send").send(tensor, to, tag, async_=async_)


def recv(
    tensor: Any, from_: int | None = None, tag: int = 0, *, group: Group | None = None, async_: bool = False
) -> Future | int | None:
    """The next message of rank ``from_`` with this tag, of exactly the tensor's length.

    Args:
        tensor: Where it goes.
        from_: The sender. Without it, whoever of the group sends a message with this tag that no other receive takes.
        tag: What the sender has given.
        group: Among whom; all ranks if it is not given.
        async_: Return a `Future` at once; its ``source`` is the sender when it is done.

    Returns:
        The sender's rank if ``from_`` is not given.

    Errors as `send`.
    """
    return _group(group, "recv").recv(tensor, from_, tag, async_=async_)


def barrier(*, group: Group | None = None, async_: bool = False) -> Future | None:
    """Returns when every rank of the group has called it. Errors as `allreduce`."""
    return _group(group, "barrier").barrier(async_=async_)

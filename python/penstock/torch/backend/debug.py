"""What torch.distributed offers for finding the rank that does something else.

Comparisons before each collective, and a barrier that says who is missing. Neither ends the job.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.boards import polls
from penstock.errors import ConfigError, Timeout

if TYPE_CHECKING:
    from penstock._native import Call
    from penstock.torch.calls.passing import DeviceCall

__all__ = ["Comparison", "compared", "monitored_barrier"]

BARRIER_TAG = 3 << 30
"""Of the messages of `monitored_barrier`; above all tags of sparse sums."""
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def compared(alike: int | None = None, *, shapes: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A collective of a process group that is compared between the ranks before it begins, if the group does that.

    Args:
        alike: Which argument holds tensors that are alike on all ranks, counted from 0.
        shapes: Whether their shapes are, too, and not their dtypes alone.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if self.comparison is not None:
                bound = signature.bind(self, *arguments, **options).arguments
                tensors = [] if alike is None else _flat(list(bound.values())[1 + alike])
                self.comparison.check(_described(method.__name__, bound.get("opts"), tensors, shapes))
            return method(self, *arguments, **options)

        return call

    return decorate


def _flat(tensors: Any) -> Iterator[Tensor]:
    for one in [tensors] if isinstance(tensors, Tensor) else tensors:
        yield from [one] if isinstance(one, Tensor) else _flat(one)


def _described(name: str, opts: Any, tensors: Iterable[Tensor], shapes: bool) -> str:
    words = [name.removesuffix("_coalesced")]
    op, root = getattr(opts, "reduceOp", None), getattr(opts, "rootRank", None)
    # An operation's own text has its address, which differs from rank to rank.
    words += [known for known in _OPS if op is not None and op == getattr(dist.ReduceOp, known)]
    words += [] if root is None else [f"root {root}"]
    for tensor in tensors:
        layout = "" if tensor.layout is torch.strided else f" {str(tensor.layout).removeprefix('torch.')}"
        shape = f" {list(tensor.shape)}" if shapes else ""
        words.append(f"{str(tensor.dtype).removeprefix('torch.')}{layout}{shape}")
    return ", ".join(words)


class Comparison:
    """Compares what the ranks of a group are about to do, as ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` asks for.

    Args:
        begin: `begin("all_gather", [tensor], tensors)` begins a call of the group.
        size: The number of members.
        limit_s: How long to wait for the others.
    """

    def __init__(self, begin: Callable[..., Call | DeviceCall], size: int, limit_s: float) -> None:
        self._begin = begin
        self._size = size
        self._limit_s = limit_s

    def _gather(self, mine: bytes) -> list[bytes]:
        """As many bytes from every rank, in rank order."""
        tensor = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = [torch.empty_like(tensor) for _ in range(self._size)]
        self._begin("all_gather", [tensor], rows).wait(self._limit_s)
        return [bytes(row.tolist()) for row in rows]

    def check(self, mine: str) -> None:
        """Wait until all ranks say what they are about to do.

        Args:
            mine: What this rank is about to do, the same text on all ranks.

        Raises:
            ConfigError: Some are about to do something else; it says who and what. Nobody has begun.
        """
        text = mine.encode()
        facts = hashlib.sha256(text).digest() + len(text).to_bytes(8, "little")
        gathered = self._gather(facts)
        if all(one == facts for one in gathered):
            return
        longest = max(int.from_bytes(one[-8:], "little") for one in gathered)
        ranks: dict[str, list[str]] = {}
        for rank, row in enumerate(self._gather(text.ljust(longest))):
            ranks.setdefault(row.decode().rstrip(), []).append(str(rank))
        listed = "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {what}" for what, who in ranks.items())
        raise ConfigError(
            f"the ranks of the group are about to make calls that do not fit each other ({listed}). Nothing was sent. "
            "All must make the same calls in the same order, on tensors of the same shapes and dtypes"
        )


def monitored_barrier(
    begin: Callable[..., Call | DeviceCall], members: Sequence[int], rank: int, limit_s: float
) -> None:
    """Wait until all ranks of a group have come, and learn who has not.

    Rank 0 of the group greets the others, waits for their messages, and tells all who is missing. Whoever comes later
    reads the same from a message that waits for it, so ranks and barriers stay in step.

    Args:
        begin: `begin(request, inputs, outputs, rank=..., tag=...)` begins a call of the group.
        members: The ranks of the group.
        rank: This rank's index in the group.
        limit_s: How long to wait, in seconds: rank 0 for the others, the others for rank 0, and then for its answer.

    Raises:
        Timeout: Ranks are missing; all that have come name all that have not.
        PenstockError: The job's failure.
    """
    here = torch.zeros(1, dtype=torch.uint8, device="cpu")
    # Rank 0's limit, and 1 for each who is missing.
    answer = torch.zeros(1 + len(members), dtype=torch.float64, device="cpu")
    if rank != 0:
        begin("send", [here], [], rank=0, tag=BARRIER_TAG)
        greeting = begin("recv", [], [torch.empty_like(here)], rank=0, tag=BARRIER_TAG)
        told = begin("recv", [], [answer], rank=0, tag=BARRIER_TAG)
        if _late([greeting], limit_s):
            _raise_missing([0], members, limit_s)
        # It has waited since its greeting, for as long at most; the same again for what delays the answer.
        if _late([told], 2 * limit_s):
            _raise_missing([0], members, 2 * limit_s)
    else:
        others = range(1, len(members))
        for other in others:
            begin("send", [here], [], rank=other, tag=BARRIER_TAG)
        calls = [begin("recv", [], [torch.empty_like(here)], rank=other, tag=BARRIER_TAG) for other in others]
        answer[0] = limit_s
        for at in _late(calls, limit_s):
            answer[1 + others[at]] = 1
        for other in others:
            begin("send", [answer], [], rank=other, tag=BARRIER_TAG)
    missing = answer[1:].nonzero().flatten().tolist()
    if missing:
        _raise_missing(missing, members, answer[0].item())


def _late(calls: Sequence[Call | DeviceCall], limit_s: float) -> list[int]:
    """Which calls are not done within the limit. Looked at rather than waited for: a wait that ends ends the job."""
    late = list(range(len(calls)))
    for _ in polls(monotonic() + limit_s):
        late = [at for at in late if not calls[at].done()]
        if not late:
            break
    return late


def _raise_missing(missing: Sequence[int], members: Sequence[int], limit_s: float) -> None:
    ranks = [members[index] for index in missing]
    listed = ", ".join(str(rank) for rank in ranks)
    raise Timeout(
        f"monitored_barrier: rank{'s' * (len(ranks) > 1)} {listed} did not come within {limit_s:g} s. See what they do "
        "instead; `timeout` sets the limit",
        rank=ranks[0],
    )

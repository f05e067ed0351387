"""Schemes chosen while training: facts measured by every rank, gathered at the same steps, and the choice they lead to.

In the first step, the tenth and every hundredth the layers that could send rows are watched for how many they have.
Each rank writes what it saw, and its rates, into its own part of one small tensor; the sum over all ranks is then
everybody's facts, bit for bit, and travels like any gradient. One step later, when as a rule it has come, it is waited
for, and the coordinator (`penstock.coordinator`) decides on every rank alike. Ranks that have left (`join`) count as
zeros.

A layer that sends its gradient whole, however few its rows, belongs to the store. Some of that is seen in the forward
pass, the rest while the layer uses rows, and remembered. A rank says so by a negative number, -1 less the rows.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.coordinator import Coordinator, Rates
from penstock.description import Network
from penstock.lending import lent_to
from penstock.torch.choice.network import layers_of
from penstock.torch.runtime import accelerator
from penstock.torch.updates.separable import as_if_in_step

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.torch.schemes.rows import Rows

__all__ = ["Choice", "is_due", "measured_rates", "network_of"]

FIRST_STEPS = (1, 10)
STEPS_BETWEEN = 100
COMMON_FACTS = 5
"""Samples, bytes per second, latency, floating point operations per second, work of an exchange of rows."""

PRODUCT_ROWS, PRODUCT_SIDE = 128, 1024
DEVICE_PRODUCT_ROWS, DEVICE_PRODUCT_SIDE = 128, 2048  # some 20 us of a large device, more than it takes to begin
TRIES = 3

WHOLE_SHARE = 0.5
"""A layer that sends more of its contributions whole than this goes to the store; of fewer, their bytes are counted."""


def is_due(step: int) -> bool:
    """Whether rows are counted in this step, from 1."""
    return step in FIRST_STEPS or step % STEPS_BETWEEN == 0


def network_of(model: nn.Module, why_whole: Mapping[str, str], name: str) -> Network:
    """A distributed model's layers; no arithmetic, for no forward has been seen.

    Args:
        model: The model.
        why_whole: By layer, why it cannot send rows.
        name: For the reader.
    """
    return Network(name, tuple(layers_of(model, {}, why_whole=why_whole)))


def measured_rates(rates: Rates, device: torch.device | None = None, *, products: bool) -> Rates:
    """What is known of wire and processor, or accelerator.

    Args:
        rates: The job's.
        device: The accelerator that the model is on, if it is on one.
        products: Whether it must be known how fast matrix products are.
    """
    if not products:
        return rates
    return replace(rates, product_flops_per_s=_product_rate() if device is None else _product_rate_on(device))


def _product_rate() -> float:
    """Floating point operations per second of dY^T X, measured once by a process for its number of threads."""
    return _measured_product_rate(torch.get_num_threads())


@functools.cache
@torch.no_grad()
def _measured_product_rate(threads: int) -> float:
    """Takes some 60 ms on a slow core, as it is used: `threads` says for what the rate is kept."""
    shape = PRODUCT_ROWS, PRODUCT_SIDE
    upstream, given = (torch.ones(shape, dtype=torch.float32, device="cpu") for _ in range(2))
    result = upstream.T @ given  # once to warm up
    fastest = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        torch.mm(upstream.T, given, out=result)
        fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * PRODUCT_ROWS * PRODUCT_SIDE**2 / fastest


@functools.cache
@torch.no_grad()
def _product_rate_on(device: torch.device) -> float:
    """As `_product_rate`, of an accelerator: a millisecond or so, and 18 MiB of its memory for so long."""
    with as_if_in_step(device.type):
        shape = DEVICE_PRODUCT_ROWS, DEVICE_PRODUCT_SIDE
        upstream, given = (torch.ones(shape, dtype=torch.float32, device=device) for _ in range(2))
        result = torch.empty(DEVICE_PRODUCT_SIDE, DEVICE_PRODUCT_SIDE, dtype=torch.float32, device=device)
        took_s = accelerator.fastest(device, lambda: torch.mm(upstream.t(), given, out=result), TRIES)
    return 2.0 * DEVICE_PRODUCT_ROWS * DEVICE_PRODUCT_SIDE**2 / took_s


class Choice:
    """One model's choice of schemes.

    Args:
        engine: The engine.
        rank: This rank.
        name: The name of its book.
        model: The model.
        coordinator: Knows the layers and decides.
        gathers: By layer, those that can send rows.
        local: What this rank has measured.
        apply: Called with the layers that change and their schemes, on all ranks after the same step.

    Attributes:
        why_whole: By layer, why it counted in the last measurement as one that sends its gradient whole on this rank.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        name: str,
        model: nn.Module,
        coordinator: Coordinator,
        gathers: Mapping[str, Rows],
        local: Rates,
        apply: Callable[[Mapping[str, str]], None],
    ) -> None:
        self.coordinator = coordinator
        self._engine = engine
        self._rank = rank
        self._ranks = coordinator.cluster.n_worker
        self._local = local
        self._apply = apply
        self._gathers = gathers
        self._names = list(gathers)
        self.why_whole: dict[str, str] = {}
        self._width = COMMON_FACTS + len(self._names)
        self._forget()
        self._sent: Tensor | None = None  # facts on their way
        self._step = 0
        self._rests = False  # for good
        self.id = engine.open_book(name, [name], [("facts", 0, "f64", self._ranks * self._width)])
        self._hooks: list[tuple[nn.Module, Any]] = []
        if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks: its samples stay unknown
            self._hooks.append((model, self._count_samples))
        self._hooks += [(gather.module, self._make_count(layer, gather)) for layer, gather in gathers.items()]
        self._handles: list[RemovableHandle] = []  # while rows are counted: else every forward would pay for it
        self._count(is_due(1))

    def _count(self, wanted: bool) -> None:
        """Whether rows are counted from now on."""
        self._counting = wanted
        for handle in self._handles:
            handle.remove()
        hooks = self._hooks if wanted else ()
        self._handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]

    def _forget(self) -> None:
        """Begin a measurement."""
        self._samples = 0
        self._rows = dict.fromkeys(self._names, 0)
        self._seen_whole: dict[str, str] = {}

    # Counting. What torch.compile traces counts nothing: those layers have no rows to send either.

    def _count_samples(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        given = _first_tensor((*args, *kwargs.values()))
        if given is not None and given.dim() > 0 and torch.is_grad_enabled():
            self._samples += given.shape[0]

    def _make_count(self, layer: str, gather: Rows) -> Any:
        inputs = None if isinstance(gather.module, nn.Embedding) else gather.weight.param.shape[1]

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            given = _first_tensor((*args, *kwargs.values()))
            # A copy of the module has its hooks, too, and a functional call other parameters.
            if given is None or not torch.is_grad_enabled() or module.weight is not gather.weight.param:
                return
            # How many different ones an accelerator looks up, nobody knows before it has: there all count.
            each_once = given.unique() if inputs is None and given.is_cpu else given
            self._rows[layer] += each_once.numel() // (inputs or 1)
            why = gather.why_whole()
            if why:
                self._seen_whole[layer] = why

        return count

    def _expected_rows(self, layer: str, gather: Rows) -> int:
        """Rows of a contribution, on average; as a negative number where most are no rows."""
        rows, share = self._rows[layer], gather.whole_share()
        if any(slot.reads.elsewhere for slot in gather.slots):
            self._seen_whole[layer] = "another forward than its module's reads its parameters"
        if layer in self._seen_whole or share > WHOLE_SHARE:
            return -1 - rows
        return math.ceil((1.0 - share) * rows + share * gather.whole_rows)

    # Steps

    def after_step(self, step: int) -> None:
        """Take in the facts sent a step ago, and send this step's if it is due.

        Args:
            step: Steps taken so far, this one included; the same on all ranks.
        """
        if step <= self._step:
            return  # one of several optimizers of one step
        self._step = step
        if self._sent is not None:
            self._update_from(self._arrived())
        if self._counting:
            self._send(step)
        self._count(is_due(step + 1))

    def _send(self, step: int) -> None:
        rates = self._local
        facts = torch.zeros(self._ranks, self._width, dtype=torch.float64, device="cpu")
        common = [self._samples, rates.bytes_per_s, rates.latency_s, rates.product_flops_per_s, rates.gather_s]
        rows = [self._expected_rows(layer, gather) for layer, gather in self._gathers.items()]
        facts[self._rank] = torch.tensor([*common, *rows], dtype=torch.float64, device="cpu")
        nbytes = facts.numel() * facts.element_size()
        # As gradients do: errors count steps from 0.
        token = self._engine.submit(self.id, 0, facts.data_ptr(), nbytes, "sum", step - 1)
        lent_to(self._engine).tensors[token] = self._sent = facts
        self.why_whole = self._seen_whole
        self._forget()

    def _arrived(self) -> list[list[float]]:
        """By rank; a rank that had left has zeros."""
        facts, self._sent = self._sent, None
        self._engine.wait(self.id, [0])
        assert facts is not None
        by_rank: list[list[float]] = facts.tolist()
        return by_rank

    def _update_from(self, by_rank: Sequence[Sequence[float]]) -> None:
        """Give the coordinator the facts of all ranks, and apply what it decides anew."""
        there = [facts for facts in by_rank if facts[1] > 0.0]
        if not there:
            return
        rates = replace(
            self.coordinator.rates,
            bytes_per_s=min(facts[1] for facts in there),
            latency_s=max(facts[2] for facts in there),
            product_flops_per_s=min(facts[3] for facts in there),
            gather_s=max(facts[4] for facts in there),
            source=self._local.source,
        )
        rows = {
            name: column
            for place, name in enumerate(self._names, COMMON_FACTS)
            if any(column := [int(facts[place]) for facts in by_rank])
        }
        samples = int(max(facts[0] for facts in by_rank))
        whole = {
            name: next(rank for rank, fact in enumerate(column) if fact < 0)
            for name, column in rows.items()
            if min(column) < 0
        }
        rows = {name: [fact if fact >= 0 else -1 - fact for fact in column] for name, column in rows.items()}
        changes = self.coordinator.update(rows=rows, whole=whole, rates=rates, batchsize=samples or None)
        if changes:
            self._apply(changes)

    # Join

    @property
    def schemes(self) -> dict[str, str]:
        """What the layers that can send rows use now."""
        return {name: self.coordinator.best_scheme(name) for name in self._names}

    def rest(self) -> None:
        """Nothing is measured, and nothing chosen: ranks are at different steps."""
        self._rests = True
        self._step = sys.maxsize
        self._count(False)

    def settle(self) -> None:
        """Wait for facts on their way, before this rank leaves; what the others decide of them it adopts later."""
        if self._sent is not None:
            self._arrived()

    def adopt(self, measured: Mapping[str, Any], step: int) -> None:
        """Go on from where the rank that went furthest is; on all ranks, when all have left.

        Args:
            measured: `Coordinator.measured` there. All of it: a layer that is not seen for a while keeps its rows, and
                ranks that remember different ones would choose differently.
            step: Steps taken there.
        """
        self._forget()
        self._step = step
        self._count(is_due(step + 1))
        schemes = self.coordinator.adopt(measured)
        self._apply({name: schemes[name] for name in self._names})
        if self._rests:
            self.rest()


def _first_tensor(values: Sequence[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)

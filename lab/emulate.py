"""A torch model that takes the time of a network, and has its tensors, without doing its arithmetic.

Each layer is a module of its own, whose forward and backward wait until the layer's share of the step's compute time is
over. What others see of it is real: ordinary parameters, ordinary autograd, and when a layer's backward ends its
gradient is in memory that was allocated for it in this step. So the same model runs alone, under
DistributedDataParallel, under Horovod and under Penstock.

    model = build(NETWORKS["resnet50"](), 1.2, seed=1)
    model(data(rank, step)).backward()

Gradients depend on the data, that is on rank and step, and `Emulated.expected_average` says what their average must be:
all values are small integers times a power of two, so that the average of up to 16 ranks, or of more whose number is a
power of two, is exact in every order of summation.

Linear layers whose factors could be sent (`has_factors`) get their true inputs and output gradients, and their gradient
is the true matrix product, unless a system takes the factors themselves (`_Part.send_rows_to`); embeddings get true
indices. Omitted is what nobody can tell from outside, for it would take the machine's few cores from all the hosts that
it stands for: the other products of these layers (output, and gradient of the input, are there in shape alone), and all
arithmetic of all other layers, whose gradients are written in one pass over the memory.

Use one compute thread per process (``torch.set_num_threads(1)``): writes of many emulated hosts share the cores.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lab.ahead import Planner, Slot
from lab.pace import Pace
from lab.trace import Layer, LayerTime, Trace

__all__ = ["Emulated", "build", "data", "has_factors"]

PATTERN_ELEMS = 16381
"""A prime, so that no slice boundary falls on the same place of the pattern twice."""
UNIT_ELEMS = 1 << 19
"""Of work that is done ahead: so little that a unit fits into most layers' time, even where cores are shared."""
SCALES = 61
GRADIENT_UNIT = 2.0**-30
FACTOR_UNIT = 2.0**-12
PARAMETER_UNIT = 2.0**-20
OFFSETS = 65521
"""How many different inputs a linear layer or an embedding sees, depending on rank and step."""


def data(rank: int, step: int) -> Tensor:
    """One step's input of one rank."""
    return torch.tensor([rank, step])


def has_factors(layer: Layer, batch: int) -> bool:
    """Whether a linear layer's gradient could ever be sent as its factors.

    Two matrices of K rows are smaller than the M x N product, averaged by two workers or more, iff K (M + N) < M N.
    """
    if layer.kind != "linear":
        return False
    outputs, inputs = layer.tensors[0].shape
    return batch * layer.rows * (inputs + outputs) < inputs * outputs


class _Values:
    """All numbers of a model: what parameters begin with, inputs, gradients. The same on all ranks for one seed."""

    def __init__(self, seed: int, factor_elems: int) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.pattern = (torch.randperm(PATTERN_ELEMS, generator=generator) + 1).float()
        small = torch.randint(-2, 3, (factor_elems + OFFSETS,), generator=generator)
        self.inputs = small.float()
        self.output_gradients = small.flip(0).float() * FACTOR_UNIT
        self.generator = generator

    def write(self, shape: Sequence[int], scale: float) -> Tensor:
        """New memory with the pattern times `scale`, written in one pass."""
        out = torch.empty(shape)
        for _ in self.writing(out, scale):
            pass
        return out

    def writing(self, out: Tensor, scale: float) -> Iterator[None]:
        """Write the pattern times `scale`, unit by unit."""
        for flat in out.view(-1).split(PATTERN_ELEMS * max(1, UNIT_ELEMS // PATTERN_ELEMS)):
            repeats, rest = divmod(flat.numel(), PATTERN_ELEMS)
            if repeats:
                body = flat[: flat.numel() - rest].view(repeats, PATTERN_ELEMS)
                torch.mul(self.pattern.expand_as(body), scale, out=body)
            if rest:
                torch.mul(self.pattern[:rest], scale, out=flat[-rest:])
            yield

    def gradient_scale(self, tensor: int, rank: int, step: int) -> float:
        """What the pattern is multiplied with: differs between ranks, neighbouring steps and neighbouring tensors."""
        return GRADIENT_UNIT * (1 + (self.seed + 5 * rank + 3 * step + 7 * tensor) % SCALES)

    def offset(self, layer: int, rank: int, step: int) -> int:
        """Where in the pools this layer's input begins."""
        return (self.seed + 7919 * rank + 104729 * step + 1299709 * layer) % OFFSETS

    def read(self, pool: Tensor, offset: int, rows: int, columns: int) -> Tensor:
        """A part of a pool, without a copy, and to autograd a tensor of its own."""
        return torch.empty(0).set_(pool.untyped_storage(), offset, (rows, columns), (columns, 1))


@dataclass(frozen=True)
class _Now:
    rank: int
    step: int


class _Part(nn.Module, ABC):
    """What all emulated layers share; beside it each has its parameters.

    Not registered as modules: the model's clock and values, which are everybody's.
    """

    layer: Layer
    index: int
    first_tensor: int
    batch: int
    now: _Now
    time: LayerTime
    course: _Course
    values: _Values
    rows_to: Any = None
    """Where a layer that consists of rows leaves them, if somebody takes them: what `penstock` calls its rows."""

    def place(self, layer: Layer, index: int, first_tensor: int, batch: int) -> None:
        """Tell it which layer it is."""
        self.layer, self.index, self.first_tensor, self.batch = layer, index, first_tensor, batch

    def attach(self, time: LayerTime, course: _Course, values: _Values) -> None:
        """Give it its time, and what it shares with the others."""
        self.time, self.course, self.values = time, course, values

    @property
    def rows(self) -> int:
        """Rows of the activation of a whole batch."""
        return self.batch * self.layer.rows

    @abstractmethod
    def run(self, token: Tensor, now: _Now) -> Tensor:
        """Forward of this layer, as the model calls it."""

    @abstractmethod
    def writing(self, number: int, now: _Now, out: Tensor) -> Iterator[None]:
        """Write this layer's gradient of its parameter `number`, unit by unit."""

    def gradient(self, number: int, now: _Now) -> Tensor:
        """This layer's gradient of its parameter `number`, in new memory."""
        out = torch.empty(self.layer.tensors[number].shape)
        for _ in self.writing(number, now, out):
            pass
        return out

    def forward_time(self) -> AbstractContextManager[None]:
        """The duration of this layer's forward."""
        return self.course.layer(self.index, self.time.forward_s, backward=False)

    def backward(self, now: _Now) -> list[Tensor]:
        """Take the time of this layer's backward, and return its gradients, to which nothing else refers."""
        with self.course.layer(self.index, self.time.backward_s, backward=True):
            work = self.course.take(self.index, now) or _Work(self, now)
            while not work.is_done:
                work.go_on()
            self.course.note(self.index, work)
        return work.gradients

    def send_rows_to(self, rows: Any) -> None:
        """From now on leave there what the gradients are made of, when asked for it."""
        self.rows_to = rows

    def leave_rows(self, context: Any, place: int, given: Tensor, upstream: Tensor) -> bool:
        """Take the time of this layer's backward, without the product, if somebody takes the rows that it is made of.

        Args:
            context: Of the autograd function.
            place: Of the weight among the function's tensors.
            given: Inputs or indices, one per row.
            upstream: The gradient of the output.
        """
        if self.rows_to is None or not self.rows_to.takes(context, place):
            return False
        self.course.drop(self.index)
        with self.course.layer(self.index, self.time.backward_s, backward=True):
            self.rows_to.record(given, upstream)
        return True

    @property
    def leaves_rows(self) -> bool:
        """Whether its backward will do no work of its own, for somebody takes the rows."""
        return self.rows_to is not None and bool(self.rows_to.engaged)


class _Work:
    """The real work of one layer's backward, done unit by unit.

    Attributes:
        now: The step that it is for.
        gradients: Being written.
        is_done: Whether they are.
        units: Done so far.
        spent_s: How long they took.
    """

    def __init__(self, part: _Part, now: _Now) -> None:
        self.now = now
        self.gradients = [torch.empty(tensor.shape) for tensor in part.layer.tensors]
        self._units = chain.from_iterable(part.writing(n, now, out) for n, out in enumerate(self.gradients))
        self.is_done = False
        self.units = 0
        self.spent_s = 0.0

    def go_on(self) -> None:
        """The next unit."""
        began_s = time.perf_counter()
        self.is_done = next(self._units, self) is self
        self.units += not self.is_done
        self.spent_s += time.perf_counter() - began_s


class _Course:
    """The course of a step: the device's clock, and what is done ahead where."""

    def __init__(self, times: Sequence[LayerTime], pace: Pace) -> None:
        self.pace = pace
        self._planner = Planner(times)
        self._work_s = [0.0] * len(times)
        self._unit_s = [0.0] * len(times)
        self._parts: Sequence[_Part] = ()
        self._now: _Now
        self._plan: dict[Slot, list[int]] = {}
        self._begun: dict[int, _Work] = {}  # by layer

    def begin_step(self, parts: Sequence[_Part], now: _Now, *, trains: bool) -> None:
        """A step begins; `trains` if it will have a backward."""
        self._parts, self._now = parts, now
        for part in parts:
            if part.leaves_rows:
                self._work_s[part.index] = 0.0
        self._plan = self._planner.plan(self._work_s) if trains else {}
        self._begun.clear()
        self.pace.begin_step()

    def layer(self, index: int, seconds: float, *, backward: bool) -> AbstractContextManager[None]:
        """The duration of one layer."""
        begin = self._plan.pop((backward, index), ())
        ahead = partial(self._work_ahead, begin) if begin or self._begun else None
        return self.pace.layer(index, seconds, backward=backward, ahead=ahead)

    def _work_ahead(self, begin: Sequence[int], until_s: float) -> None:
        """Do what is needed first of the work begun, as long as another unit is expected to be over by then.

        Args:
            begin: Layers to begin with now. One that is needed later may have begun earlier, if it takes longer.
            until_s: When this layer ends.
        """
        self._begun.update((index, _Work(self._parts[index], self._now)) for index in begin)
        for index in sorted(self._begun, reverse=True):
            work = self._begun[index]
            while not work.is_done:
                if time.perf_counter() + self._unit_s[index] > until_s:
                    return
                work.go_on()

    def take(self, index: int, now: _Now) -> _Work | None:
        """What has been begun of a layer's work for this step. Nothing else refers to it then."""
        work = self._begun.get(index)
        return self._begun.pop(index) if work is not None and work.now == now else None

    def drop(self, index: int) -> None:
        """A layer's work is not wanted."""
        self._begun.pop(index, None)

    def note(self, index: int, work: _Work) -> None:
        """What a layer's backward work took; a shorter time is believed only gradually."""
        self._work_s[index] = max(work.spent_s, 0.8 * self._work_s[index])
        self._unit_s[index] = work.spent_s / max(1, work.units)


def _hollow(shape: Sequence[int]) -> Tensor:
    """A tensor of this shape with memory for one number."""
    return torch.zeros(()).expand(tuple(shape))


class _Wait(Function):
    """A layer whose gradients are written and whose activation is not there."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: Written, now: _Now, *params: Tensor) -> Tensor:
        with part.forward_time():
            ctx.part, ctx.now = part, now
            return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return (torch.zeros(()), None, None, *ctx.part.backward(ctx.now))


class _Product(Function):
    """A linear layer: its true input, the true gradient of its output, and their product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Linear, now: _Now, weight: Tensor, bias: Tensor | None) -> Tensor:
        with part.forward_time():
            ctx.part, ctx.now, ctx.shape, ctx.biased = part, now, x.shape, bias is not None
            return _hollow((x.shape[0], part.out_features))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        part, now = ctx.part, ctx.now
        if part.leave_rows(ctx, 1, part.input(now), part.output_gradient(now)):
            return _hollow(ctx.shape), None, None, None, None
        return (_hollow(ctx.shape), None, None, *part.backward(now), *([] if ctx.biased else [None]))


class _LookUp(Function):
    """An embedding: true indices, the true gradient of its output, and a dense gradient with those rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, part: Embedding, now: _Now, indices: Tensor) -> Tensor:
        with part.forward_time():
            ctx.part, ctx.now = part, now
            return _hollow((len(indices), part.embedding_dim))

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        part, now = ctx.part, ctx.now
        if part.leave_rows(ctx, 0, part.indices(now).view(-1, 1), part.output_gradient(now)):
            return None, None, None, None
        return (*part.backward(now), None, None, None)


class _Enter(Function):
    """From the token that goes from layer to layer to a linear layer's input."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, part: Linear, now: _Now) -> Tensor:
        return part.input(now)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return torch.zeros(()), None, None


class _Leave(Function):
    """From a layer's output back to the token; backward, the gradient of that output."""

    @staticmethod
    def forward(ctx: Any, token: Tensor | None, y: Tensor, part: Linear | Embedding, now: _Now) -> Tensor:
        ctx.part, ctx.now = part, now
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        token = torch.zeros(()) if ctx.needs_input_grad[0] else None
        return token, ctx.part.output_gradient(ctx.now), None, None


class Written(_Part):
    """Any layer whose gradients are written without being computed.

    Its parameters are its own, or those of a list beside it: a module that is never called, so that nothing but the
    custom function's being given them shows who reads them.
    """

    def __init__(self, layer: Layer, values: _Values, *, lists: bool) -> None:
        super().__init__()
        made = {tensor.name.rpartition(".")[2]: values.write(tensor.shape, PARAMETER_UNIT) for tensor in layer.tensors}
        if lists and made:
            self.list = nn.ParameterList(made.values())
        else:
            for name, value in made.items():
                self.register_parameter(name, nn.Parameter(value))
        self._held = partial(self.list.parameters if lists and made else self.parameters, recurse=False)

    def forward(self, token: Tensor, now: _Now) -> Tensor:
        """Wait, then pass on."""
        out: Tensor = _Wait.apply(token, self, now, *self._held())
        return out

    def run(self, token: Tensor, now: _Now) -> Tensor:
        """Forward of this layer, as the model calls it."""
        out: Tensor = self(token, now)
        return out

    def writing(self, number: int, now: _Now, out: Tensor) -> Iterator[None]:
        """The pattern, times what belongs to this tensor, rank and step."""
        yield from self.values.writing(out, self.values.gradient_scale(self.first_tensor + number, now.rank, now.step))


class Linear(_Part, nn.Linear):
    """A linear layer whose factors exist: a module that takes its true input, as `torch.nn.Linear` does."""

    def __init__(self, layer: Layer, values: _Values) -> None:
        outputs, inputs = layer.tensors[0].shape
        super().__init__(inputs, outputs, bias=len(layer.tensors) == 2, device="meta")
        _materialise(self, values)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """An output that has the shape alone."""
        out: Tensor = _Product.apply(input, self, self.now, self.weight, self.bias)
        return out

    def run(self, token: Tensor, now: _Now) -> Tensor:
        """Forward of this layer, as the model calls it."""
        self.now = now
        out: Tensor = _Leave.apply(None, self(_Enter.apply(token, self, now)), self, now)
        return out

    def input(self, now: _Now) -> Tensor:
        """X: rows x inputs."""
        offset = self.values.offset(self.index, now.rank, now.step)
        return self.values.read(self.values.inputs, offset, self.rows, self.in_features)

    def output_gradient(self, now: _Now) -> Tensor:
        """dY: rows x outputs."""
        offset = self.values.offset(self.index, now.rank, now.step)
        return self.values.read(self.values.output_gradients, offset, self.rows, self.out_features)

    def writing(self, number: int, now: _Now, out: Tensor) -> Iterator[None]:
        """The product of the factors, some of its rows at a time."""
        dy = self.output_gradient(now)
        if number == 1:
            torch.sum(dy, 0, out=out)
            yield
            return
        x, rows = self.input(now), max(1, UNIT_ELEMS // self.in_features)
        for some, of_dy in zip(out.split(rows), dy.t().split(rows), strict=True):
            torch.mm(of_dy, x, out=some)
            yield


class Embedding(_Part, nn.Embedding):
    """An embedding whose indices exist; few words are frequent and most are rare, as in texts (Zipf's law)."""

    def __init__(self, layer: Layer, values: _Values, lookups: int) -> None:
        vocabulary, features = layer.tensors[0].shape
        super().__init__(vocabulary, features, device="meta")
        _materialise(self, values)
        share = torch.cumsum(1.0 / torch.arange(1, vocabulary + 1), 0)
        drawn = torch.rand(lookups + OFFSETS, generator=values.generator) * share[-1]
        self.words = torch.searchsorted(share, drawn).clamp_(max=vocabulary - 1)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """An output that has the shape alone."""
        out: Tensor = _LookUp.apply(self.weight, self, self.now, input)
        return out

    def run(self, token: Tensor, now: _Now) -> Tensor:
        """Forward of this layer, as the model calls it."""
        self.now = now
        out: Tensor = _Leave.apply(token, self(self.indices(now)), self, now)
        return out

    def indices(self, now: _Now) -> Tensor:
        """One word for each row."""
        offset = self.values.offset(self.index, now.rank, now.step)
        return self.words[offset : offset + self.rows]

    def output_gradient(self, now: _Now) -> Tensor:
        """dY: rows x features."""
        offset = self.values.offset(self.index, now.rank, now.step)
        return self.values.read(self.values.output_gradients, offset, self.rows, self.embedding_dim)

    def writing(self, number: int, now: _Now, out: Tensor) -> Iterator[None]:
        """The dense gradient: for each word the sum of its rows."""
        for some in out.view(-1).split(UNIT_ELEMS):
            some.zero_()
            yield
        rows = max(1, UNIT_ELEMS // self.embedding_dim)
        for words, of_dy in zip(self.indices(now).split(rows), self.output_gradient(now).split(rows), strict=True):
            out.index_add_(0, words, of_dy)
            yield


def _materialise(module: nn.Module, values: _Values) -> None:
    """Parameters without the framework's own, slow initialisation."""
    for name, param in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(values.write(param.shape, PARAMETER_UNIT)))


class Emulated(nn.Module):
    """A network that takes its time. Made by `build`."""

    def __init__(self, trace: Trace, compute_s: float, *, seed: int, lists: bool = False) -> None:
        super().__init__()
        self.trace = trace
        self.compute_s = compute_s
        times = trace.compute(compute_s)
        self.pace = Pace(len(times))
        self._course = _Course(times, self.pace)
        real = [layer for layer in trace.layers if _is_real(layer, trace.batch)]
        longest = max((trace.batch * layer.rows * max(layer.tensors[0].shape) for layer in real), default=0)
        self._values = _Values(seed, longest)
        self._parts: list[_Part] = []
        tensors = 0
        for index, (layer, layer_time) in enumerate(zip(trace.layers, times, strict=True)):
            part = _make_part(layer, trace.batch, self._values, lists=lists)
            part.place(layer, index, tensors, trace.batch)
            part.attach(layer_time, self._course, self._values)
            self.add_module(layer.name, part)
            self._parts.append(part)
            tensors += len(layer.tensors)

    def forward(self, x: Tensor) -> Tensor:
        """One step of the rank and step in `x`, made by `data`; a scalar to call backward on."""
        rank, step = x.tolist()
        now = _Now(int(rank), int(step))
        self._course.begin_step(self._parts, now, trains=torch.is_grad_enabled())
        token = torch.zeros((), requires_grad=True)  # so that layers without parameters have a backward, too
        for part in self._parts:
            token = part.run(token, now)
        return token

    def overrun_s(self) -> float:
        """Seconds, summed over all layers and steps so far, that real work took beyond its layer's time.

        Work that was done ahead is in ``pace.ahead_s``; what became of the overrun is in ``pace.late_s``.
        """
        return self.pace.overrun_s

    def gradient(self, name: str, *, rank: int, step: int) -> Tensor:
        """The gradient that one rank's backward gives to this parameter."""
        for part in self._parts:
            for number, tensor in enumerate(part.layer.tensors):
                if tensor.name == name:
                    return part.gradient(number, _Now(rank, step))
        raise KeyError(f"{self.trace.name} has no parameter {name}")

    def expected_average(self, name: str, *, size: int, step: int) -> Tensor:
        """The average of all `size` ranks' gradients of this parameter."""
        total = self.gradient(name, rank=0, step=step)
        for rank in range(1, size):
            total += self.gradient(name, rank=rank, step=step)
        return total.div_(size)


def _is_real(layer: Layer, batch: int) -> bool:
    return layer.kind == "embedding" or has_factors(layer, batch)


def _make_part(layer: Layer, batch: int, values: _Values, *, lists: bool) -> _Part:
    if layer.kind == "embedding":
        return Embedding(layer, values, batch * layer.rows)
    if has_factors(layer, batch):
        return Linear(layer, values)
    return Written(layer, values, lists=lists)


def build(trace: Trace, compute_s: float, *, seed: int, lists: bool = False) -> Emulated:
    """Build a model that takes `compute_s` per step: a third of it forward, two thirds backward, by layer.

    Args:
        trace: The network.
        compute_s: Seconds of forward and backward together, without the optimizer.
        seed: Of all values; the same on all ranks.
        lists: Whether layers that have no factors hold their parameters in a `torch.nn.ParameterList` beside them, as
            a custom kernel's wrapper may.

    Returns:
        A model that is called with `data`; parameters have the names of the trace's tensors, but for those in lists.

    Raises:
        ValueError: The time is negative.
    """
    return Emulated(trace, compute_s, seed=seed, lists=lists)

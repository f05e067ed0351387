"""What the systems on torch share: the emulated model, its optimizer, and the step as users write it.

Works with torch 2.0.1 as with the project's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lab import emulate
from lab.systems.worker import MOMENTUM, Worker, pace_stats

__all__ = ["TorchWorker"]


class TorchWorker(Worker):
    """A data-parallel loop. A system overrides what it does differently: `join`, `adopt`, and perhaps the rest.

    Attributes:
        plain: The emulated model.
        model: What the loop calls: the same, or a wrapper.
        optimizer: Its optimizer.
    """

    plain: emulate.Emulated
    model: nn.Module
    optimizer: Optimizer

    def open(self) -> None:
        """Join, build, adopt."""
        torch.set_num_threads(int(self.options["threads"]))
        self.join()
        lists = bool(self.options["lists"])
        self.plain = emulate.build(self.job.trace(), self.compute_s, seed=self.job.seed, lists=lists)
        self.model = self.plain
        self.optimizer = SGD(self.plain.parameters(), lr=float(self.options["lr"]), momentum=MOMENTUM)
        self.adopt()
        self._steps = 0

    def join(self) -> None:
        """Meet the other hosts."""

    def adopt(self) -> None:
        """Make `model` and `optimizer` distributed."""

    def backward_context(self) -> AbstractContextManager[Any]:
        """What surrounds backward."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """The loop that every user writes."""
        self.optimizer.zero_grad()
        loss = self.model(emulate.data(self.job.rank, self._steps))
        with self.backward_context():
            loss.backward()
        self.optimizer.step()
        self._steps += 1

    def settle(self) -> None:
        """Nothing is under way after a step, unless a system says so."""

    def stats(self) -> dict[str, Any]:
        """What the emulation has counted."""
        return pace_stats(self.plain.pace)

    def tensors(self) -> Iterator[tuple[str, bytes, float, float]]:
        """The plain model's parameters."""
        for name, param in self.plain.named_parameters():
            values = param.detach().contiguous()
            wide = values.double()
            yield name, values.numpy().tobytes(), float(wide.sum()), float(wide.abs().sum())

"""Penstock, as users run it, and four modes that show what each of its ideas is worth.

| mode | gradients leave | slices | order | the next forward begins |
|---|---|---|---|---|
| full | as backward makes them | the default | most urgent first | at once, layer by layer |
| fifo | as backward makes them | the default | first come, first served | at once, layer by layer |
| slicing | as backward makes them | the default | first come, first served | when all is in |
| wait-free | as backward makes them | whole tensors | first come, first served | when all is in |
| vanilla | when backward has ended | whole tensors | first come, first served | when all is in |

Each differs from the one above it in one thing. Full beside fifo shows what priority is worth, as P3's figures do with
slicing alone; fifo beside slicing, that the forward need not wait for all; slicing beside wait-free, what slices are.

A "whole tensor" is cut from `WHOLE_BYTES` on, as key-value stores do: MXNet's shares out over its servers what has a
million elements or more. Below that it is one slice per rank, or a single one if it is tiny. Without the cuts one rank
would own a network's heaviest layer alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import penstock as ps
from lab.systems.penstock_server import place
from lab.systems.training import TorchWorker
from lab.systems.worker import BadSpec, main
from penstock import job as running_job

WHOLE_BYTES = 4_000_000
# Of the modes, those whose next forward begins layer by layer.
WITHOUT_BARRIER = ("full", "fifo")
# Of the engine's report, what grows.
COUNTS = ("slices", "preemptions", "frames_sent", "frames_received", "bytes_sent", "bytes_received", "stall_s")
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "fifo": {"priority": False},
    "slicing": {"priority": False},
    "wait-free": {"priority": False, "slice_bytes": WHOLE_BYTES},
    "vanilla": {"priority": False, "slice_bytes": WHOLE_BYTES},
}


class Penstock(TorchWorker):
    """The sharded store, in the workers or in servers apart.

    ``init`` is given to `penstock.init` on top of the mode; ``schemes`` and ``update`` to `penstock.distribute`: by
    default the store for every layer, for that is what the modes are compared in, and updates at the workers. With
    ``async`` no worker waits for another.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "mode": "full",
        "init": {},
        "schemes": None,
        "update": "workers",
        "async": False,
    }

    def join(self) -> None:
        """Join the job."""
        self.mode = str(self.options["mode"])
        if self.mode not in MODES:
            raise BadSpec(f"no mode {self.mode!r}; there are {', '.join(MODES)}")
        options = {**MODES[self.mode], **self.options["init"]}
        ps.init(**place(self.job), operation_timeout_s=self.step_timeout_s, **options)

    def adopt(self) -> None:
        """The two objects come back, with hooks."""
        given = {name: self.options[name] for name in ("schemes", "update")}
        given["mode"] = "async" if self.options["async"] else "sync"
        self.model, self.optimizer = ps.distribute(self.model, self.optimizer, **given)

    def barrier(self) -> None:
        """One round of small messages."""
        running_job.current("barrier").engine.all_gather("barrier of the lab", b"")

    def backward_context(self) -> AbstractContextManager[Any]:
        """A vanilla store hears nothing from backward."""
        return ps.no_sync(self.model) if self.mode == "vanilla" else contextlib.nullcontext()

    def step(self) -> None:
        """As all others; in modes with a barrier nothing is left to the next step."""
        super().step()
        if self.mode not in WITHOUT_BARRIER:
            self.settle()

    def settle(self) -> None:
        """Wait, and apply. In asynchronous training that would get what others have changed meanwhile, too."""
        if self.options.get("async"):
            for param in self.plain.parameters():
                param.sum()  # who reads it waits for the answer
        else:
            ps.synchronize(self.optimizer)

    def stats(self) -> dict[str, Any]:
        """What the engine's report counts, by layer too."""
        report = ps.report()
        counted = {name: value for name, value in report.items() if name in COUNTS or name.startswith("busy_")}
        gradients = next((book for book in report["books"] if book["name"].endswith(".gradients")), None)
        if gradients is not None:
            layers = gradients["layers"]
            counted["layers"] = {
                layer["name"]: {name: value for name, value in layer.items() if name not in ("name", "lossy")}
                for layer in layers
            }
        return {**super().stats(), **counted}

    def facts(self) -> dict[str, Any]:
        """Each layer's scheme, and what it moves on the busiest direction of an interface: by the information book."""
        book = ps.coordinator_of(self.plain)
        return {
            "schemes": {plan.name: plan.scheme for plan in book.plans},
            "wire_bytes": {plan.name: plan.scheme_bytes[plan.scheme] for plan in book.plans},
        }

    def close(self) -> None:
        """Say goodbye."""
        ps.shutdown()


if __name__ == "__main__":
    main(Penstock)

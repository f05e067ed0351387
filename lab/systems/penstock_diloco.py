"""Penstock's DiLoCo: every worker trains by itself, and fragments of the model meet by their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

import penstock as ps
from lab.systems.penstock import Penstock
from lab.systems.worker import main

OUTER: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""Of the outer optimizer, SGD: as arXiv 2311.08105 has it."""


class DiLoCo(Penstock):
    """The same loop. All options but ``init`` are given to `penstock.DiLoCo`, whose inner optimizer is the loop's."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "init": {},
        "mode": "full",
        "sync_every": 30,
        "fragments": 1,
        "fragment_sync_delay": 0,
        "fragment_update_alpha": 0.0,
        "wire": "fp32",
    }

    def adopt(self) -> None:
        """The optimizer is wrapped."""
        given = {name: self.options[name] for name in self.defaults if name not in ("init", "mode")}
        outer = torch.optim.SGD(self.plain.parameters(), **OUTER)
        self.optimizer: Any = ps.DiLoCo(self.plain, self.optimizer, outer, **given)

    def settle(self) -> None:
        """What is under way arrives; it lands by the schedule."""
        self.optimizer.finish()

    def facts(self) -> dict[str, Any]:
        """No scheme is chosen."""
        return {}


if __name__ == "__main__":
    main(DiLoCo)

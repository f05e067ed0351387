"""Updates at the owners within `ps.join`: ranks that have no batch left go along with those that have.

Owners hear from every worker, or from worker 0, what is to be done with a step, and a worker may be an owner. So nobody
can leave. Instead whoever trains tells all others, before anything that takes everybody, what it is about to do; who is
done does the same, without a gradient and with the options that it is told.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.optimizers import Described
from penstock.torch.updates.owners import Agree, OwnerUpdates

if TYPE_CHECKING:
    from penstock._native import Engine

__all__ = ["GoingAlong"]

_NAME = "penstock.join"


class GoingAlong:
    """The ranks of a job, of which some train and some are done.

    Args:
        engine: Of the job.
        updates: Those of all its models, in order.
    """

    def __init__(self, engine: Engine, updates: Sequence[OwnerUpdates]) -> None:
        self._engine = engine
        self._updates = updates
        self._told: tuple[list[Described], float] | None = None  # what this rank, which is done, carries out

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Within, updates tell others what they are about to do."""
        before = [update.agree for update in self._updates]
        for number, update in enumerate(self._updates):
            update.agree = self._agreeing(number)
        try:
            yield
        finally:
            for update, agree in zip(self._updates, before, strict=True):
                update.agree = agree

    def until_all_are_done(self) -> None:
        """Do what those do that still train.

        Raises:
            ConfigError: They do different things.
            PeerLost: A rank was lost.
            Timeout: Nobody came.
        """
        while True:
            told = self._gather({})
            training = [one for one in told if one]
            if not training:
                return
            doing = training[0]
            options = [(kind, options) for kind, options in doing["options"]]
            self._told = options, doing["factor"] * len(told) / len(training)
            self._updates[doing["model"]].go_along(doing["what"])
            self._told = None

    def _agreeing(self, model: int) -> Agree:
        def agree(what: str, options: Sequence[Described], factor: float) -> tuple[Sequence[Described], float]:
            if self._told is not None:
                return self._told
            step = self._updates[model].step_number
            mine = {"what": what, "model": model, "step": step, "options": options, "factor": factor}
            told = self._gather(mine)
            training = [one for one in told if one]
            # An average is over all ranks, those that are done among them.
            return options, factor * len(told) / len(training)

        return agree

    def _gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = [
            json.loads(one) for one in self._engine.all_gather(_NAME, json.dumps(mine).encode())
        ]
        said = {rank: (one["what"], one["model"], one["step"]) for rank, one in enumerate(told) if one}
        first = next(iter(said), None)
        for rank, one in said.items():
            if first is not None and one != said[first]:
                raise ConfigError(
                    f"{_NAME}: rank {first} is about to {said[first][0]} in step {said[first][2]} of model "
                    f"{said[first][1]}, and rank {rank} to {one[0]} in step {one[2]} of model {one[1]}. Ranks that "
                    "train must make the same calls",
                    rank=rank,
                )
        return told

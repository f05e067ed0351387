"""What the job asks of all its distributed models when it ends. `penstock.torch.front_end` attaches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.attached import Attached
from penstock.torch.access import asynchronous_here, copies_here, costs_in, finish_all, lossy_here
from penstock.torch.agreement.drift import parameters_digest
from penstock.torch.distributed import models_of
from penstock.torch.release.failure import after_failure, let_go

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.errors import PenstockError

__all__ = ["Models"]


class Models(Attached):
    """The models and optimizers of the job."""

    def finish(self, limit_s: float) -> None:
        """Every wait in it has the engine's own limit."""
        finish_all()

    def explain(self, engine: Engine, error: PenstockError) -> None:
        """Which layers are whole."""
        after_failure(engine, error)

    def digests(self, engine: Engine) -> list[int]:
        """As ranks compare them, too."""
        return [parameters_digest(distributed.model) for distributed in models_of(engine)]

    def let_go(self, engine: Engine) -> None:
        """They are the program's own again."""
        let_go(engine)

    def report(self) -> dict[str, Any]:
        """The lossy layers, and their schemes; asynchronous models, and how stale gradients were; a device's copies."""
        return {"lossy": lossy_here(), "asynchronous": asynchronous_here(), **copies_here()}

    def costs(self, engine: Engine) -> dict[str, Callable[[], dict[str, Any]]]:
        """Of each model's gradients."""
        return costs_in(engine)

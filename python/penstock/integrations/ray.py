"""Ray Train: its workers meet in a process group on Penstock, and share a secret that Ray brings them.

In the training function `penstock.distribute` works at once: the job is that of the process group.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from penstock import config, job
from penstock.errors import ConfigError

try:
    from ray.train.torch import TorchConfig
except ImportError as error:
    raise ImportError(f"penstock.integrations.ray needs Ray Train ({error}): `pip install penstock[ray]`") from error

__all__ = ["PenstockBackend", "PenstockConfig"]

_OF_TORCH: Any = TorchConfig(backend="gloo").backend_cls
"""What Ray starts the process groups of torch with; its name is private."""


class PenstockBackend(_OF_TORCH):
    """What Ray calls before and after the training function, as for any process group of torch."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Give all workers one secret, then form the process group.

        The secret travels as everything else that Ray sends: who could read it there could run code there, too. Workers
        that have one already, by a ``runtime_env`` with ``PENSTOCK_SECRET``, keep it.

        Args:
            worker_group: Ray's.
            backend_config: A `PenstockConfig`.

        Raises:
            PenstockError: As `penstock.init`.
        """
        worker_group.execute(_prepare, secrets.token_hex(32))
        super().on_start(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """End the job on all workers before Ray ends them; a worker's end would be a loss to the others.

        Args:
            worker_group: Ray's.
            backend_config: A `PenstockConfig`.
        """
        try:
            worker_group.execute(_end_job)
        finally:
            super().on_shutdown(worker_group, backend_config)


@dataclass
class PenstockConfig(TorchConfig):
    """A ``torch_config`` of Ray's ``TorchTrainer`` whose workers meet on Penstock.

    The training function calls `penstock.distribute`. A model that ``ray.train.torch.prepare_model`` wraps is torch's
    DDP on Penstock's backend, which hides no more than DDP does.

    Args:
        backend: The backend of torch.distributed.
        init_method: As in Ray's ``TorchConfig``.
        timeout_s: As in Ray's ``TorchConfig``; seconds.

    Example::

        TorchTrainer(train, torch_config=PenstockConfig(), scaling_config=ScalingConfig(num_workers=4)).fit()
    """

    backend: str | None = "penstock"

    @property
    def backend_cls(self) -> type[PenstockBackend]:
        """What Ray starts."""
        return PenstockBackend


def _prepare(secret: str) -> None:
    """On a worker, before it forms the process group."""
    import penstock.torch.backend  # noqa: F401 - registers it

    config.keep_secret(secret)


def _end_job() -> None:
    """On a worker, after the training function."""
    try:
        running = job.current()
    except ConfigError:
        return  # the program has ended it
    if not running.engine.has_failed:
        job.shutdown()

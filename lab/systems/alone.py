"""One worker without communication: what the emulated compute takes on this machine."""

from __future__ import annotations

from lab.systems.training import TorchWorker
from lab.systems.worker import main


class Alone(TorchWorker):
    """Takes part in nothing, however many hosts there are."""

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """There is nothing to leave."""


if __name__ == "__main__":
    main(Alone)

"""The systems that are compared: the project's own modes and its peers, one worker program each.

`SYSTEMS` is the table of those that train synchronously, `LOCAL_SYSTEMS` of the others. A system is a module, run as
``python -m MODULE SPEC.json`` by the Python of its environment (`lab.peers`), and options that go into the spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["LOCAL_SYSTEMS", "SYSTEMS", "System"]

Environment = Literal["project", "horovod", "mxnet", "torchft"]


@dataclass(frozen=True)
class System:
    """One row of a comparison.

    Attributes:
        name: As written in scenario files.
        title: As written in tables and plots.
        exact: Whether every worker gets the average in full precision.
        environment: Which Python runs it: the project's own or a peer's.
        module: The worker program.
        options: Its options, which a spec's own options override.
        restless: Whether its processes work and send while they have nothing to do: they are not kept through the
            turns of others, whose links and cores they would use.
        server: The program of a server apart from the workers, if the system can have such.
    """

    name: str
    title: str
    exact: bool
    environment: Environment
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    restless: bool = False
    server: str | None = None

    def spec(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The spec for this system: the scenario's, with this system's options beneath its own."""
        return {**spec, "options": {**self.options, **spec.get("options", {})}}

    def command(self, python: str, spec: Path) -> list[str]:
        """The worker program, to be started in the repository's root by the Python of its environment."""
        return [python, "-m", self.module, str(spec)]

    def server_command(self, python: str, spec: Path) -> list[str]:
        """The program of a server apart, likewise.

        Raises:
            ValueError: The system has none.
        """
        if self.server is None:
            raise ValueError(f"{self.name} has no servers")
        return [python, "-m", self.server, str(spec)]


def _penstock(name: str, title: str, options: Mapping[str, Any], exact: bool = True) -> System:
    return System(name, title, exact, "project", "lab.systems.penstock", options, server="lab.systems.penstock_server")


def _mxnet(name: str, title: str, options: Mapping[str, Any]) -> System:
    return System(name, title, True, "mxnet", "lab.systems.mxnet", options, server="lab.systems.mxnet")


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("alone", "one worker, no communication", True, "project", "lab.systems.alone"),
        _penstock("penstock", "Penstock", {"mode": "full"}),
        _penstock("penstock-vanilla", "Penstock, synchronising after backward", {"mode": "vanilla"}),
        _penstock("penstock-wait-free", "Penstock, wait-free backward only", {"mode": "wait-free"}),
        _penstock("penstock-slicing", "Penstock, slices and a barrier", {"mode": "slicing"}),
        _penstock("penstock-fifo", "Penstock, slices without priority", {"mode": "fifo"}),
        # On request only: gradients are rounded on the wire.
        _penstock("penstock-bf16", "Penstock, bf16", {"schemes": {"*": "bf16"}}, exact=False),
        # Beside "penstock" where a scenario gives that schemes to choose from, or groups.
        _penstock("penstock-store", "Penstock, the store alone", {"mode": "full"}),
        # What it costs that members may be lost, or that others may not read what is sent.
        _penstock("penstock-elastic", "Penstock, elastic", {"mode": "full", "init": {"elastic": True}}),
        _penstock("penstock-encrypted", "Penstock, encrypted", {"mode": "full", "init": {"encrypt": True}}),
        # As MXNet's dist_sync can, beside it: its servers, too, update when the last gradient of a parameter is there.
        _penstock(
            "penstock-update",
            "Penstock, optimizer on servers",
            {"mode": "full", "update": "servers-in-backward"},
        ),
        # Poseidon's section 5.1 says of TensorFlow: each tensor whole on one server, parameters fetched before forward.
        _penstock(
            "penstock-whole-tensors",
            "Penstock, whole tensors updated at the servers",
            {"mode": "wait-free", "update": "servers"},
        ),
        # Fully connected layers only. The workers update, and gradients come back; or their owners do, as in the paper.
        _penstock("penstock-adam", "Penstock, Project Adam's scheme", {"mode": "full", "schemes": {"*": "adam"}}),
        _penstock(
            "penstock-adam-update",
            "Penstock, Project Adam as published",
            {"mode": "full", "schemes": {"*": "adam"}, "update": "servers"},
        ),
        System("ddp", "DDP (gloo)", True, "project", "lab.systems.ddp"),
        System("ddp-bf16", "DDP (gloo), bf16 hook", False, "project", "lab.systems.ddp", {"hook": "bf16"}),
        # One bucket for all: the hook sums three times for each bucket, each time when the sum before has ended, and
        # where there are several that is in another order on each rank. Gloo matches sums by their order.
        System(
            "ddp-powersgd",
            "DDP (gloo), PowerSGD hook, one bucket",
            False,
            "project",
            "lab.systems.ddp",
            {"hook": "powersgd", "bucket_mb": 4096},
        ),
        System("horovod", "Horovod 0.28.1 (gloo)", True, "horovod", "lab.systems.horovod", restless=True),
        _mxnet("mxnet-sync", "MXNet 1.9.1, dist_sync", {"store": "sync"}),
        _mxnet(
            "mxnet-sync-update",
            "MXNet 1.9.1, dist_sync, optimizer on servers",
            {"store": "sync", "update": "servers"},
        ),
        _mxnet("mxnet-p3", "MXNet 1.9.1, P3", {"store": "p3"}),
    )
}

LOCAL_SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System("penstock-diloco", "Penstock, DiLoCo", False, "project", "lab.systems.penstock_diloco"),
        _penstock("penstock-async", "Penstock, asynchronous", {"mode": "full", "async": True}, exact=False),
        System(
            "torchft-diloco",
            "torchft 0.2.0, DiLoCo (gloo)",
            False,
            "torchft",
            "lab.systems.torchft_diloco",
            restless=True,
        ),
        System(
            "mxnet-async",
            "MXNet 1.9.1, dist_async",
            False,
            "mxnet",
            "lab.systems.mxnet",
            {"store": "async", "update": "servers"},
        ),
    )
}
"""Whose workers wait for each other less than once a step: no scenario compares them, `benchmarks.local_speed` does."""

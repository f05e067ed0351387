"""MXNet 1.9.1's KVStore: ``dist_sync``, ``dist_async``, and the store of P3 (slices with priority).

The environment has no torch, so this worker emulates the compute itself: layer by layer it sleeps for the trace's
times, gradients are written by MXNet's own operators, and no real products are made, which can only help MXNet.
The rest is what MXNet's trainer does when the worker updates: each tensor is pushed and pulled with the priority of its
layer, its update is queued behind the pull by MXNet's engine, and a layer's forward waits for its own weights only.

Every host runs one server beside its worker, or servers are on hosts of their own; the first host runs the scheduler.
With its optimizer on servers they update, and workers pull parameters; ``dist_async`` knows no other way.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from lab.pace import Pace
from lab.systems.worker import MOMENTUM, BadSpec, Job, Worker, main, main_of_server, pace_stats

STORES = ("sync", "async", "p3")
UPDATES = ("workers", "servers")
END_S = 20.0


class Mxnet(Worker):
    """The loop. ``update``: where the optimizer is. ``env``: more of MXNet's variables, for all processes of a host."""

    defaults: ClassVar[Mapping[str, Any]] = {"store": "sync", "update": "workers", "env": {}}

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if self.options["store"] not in STORES:
            raise BadSpec(f"no store {self.options['store']!r}; there are {', '.join(STORES)}")
        pair = (self.options["store"], self.options["update"])
        if pair[1] not in UPDATES or pair in (("p3", "servers"), ("async", "workers")):
            raise BadSpec(f"no update {pair[1]!r} with {pair[0]!r}: P3 has none on servers, and async no other")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._steps = 0

    def open(self) -> None:
        """Start this host's servers, and make the parameters."""
        environ = self.environment()
        beside = () if self.job.servers else ("server",)
        for role in ("scheduler", *beside) if self.job.rank == 0 else beside:
            # Importing MXNet in one of these roles serves until the workers are done, and ends the process. No
            # preexec_fn: the deadline's thread runs already.
            tied = f"from lab.systems.worker import end_with_parent; end_with_parent({os.getpid()}); import mxnet"
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", tied], env={**environ, "DMLC_ROLE": role}, stdin=subprocess.DEVNULL
                )
            )
        os.environ.update({**environ, "DMLC_ROLE": "worker"})
        self._mx: Any = importlib.import_module("mxnet")
        self._store: Any = self._mx.kv.create("dist_async" if self.options["store"] == "async" else "dist_sync")
        self._make_parameters()

    def environment(self) -> dict[str, str]:
        """MXNet's variables for this host."""
        job = self.job
        values = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "PS_"))},
            "DMLC_PS_ROOT_URI": job.root,
            "DMLC_PS_ROOT_PORT": str(job.port),
            "DMLC_NUM_WORKER": str(job.size),
            "DMLC_NUM_SERVER": str(job.servers or job.size),
            "DMLC_NODE_HOST": job.host,
            "OMP_NUM_THREADS": str(int(self.options["threads"])),
        }
        if self.options["store"] == "p3":
            values["DMLC_PS_VAN_TYPE"] = "p3"
        return {**values, **{str(name): str(value) for name, value in self.options["env"].items()}}

    def _make_parameters(self) -> None:
        """One key per tensor. Keys are numbers in forward order, as the trainer's are."""
        mx, trace = self._mx, self.job.trace()
        self._times = trace.compute(self.compute_s)
        self._pace = Pace(len(trace.layers))
        self._names: list[str] = []
        self._layers: list[list[int]] = []
        self._weights: list[Any] = []
        self._grads: list[Any] = []
        mx.random.seed(self.job.seed)
        for layer in trace.layers:
            self._layers.append(list(range(len(self._names), len(self._names) + len(layer.tensors))))
            for tensor in layer.tensors:
                self._names.append(tensor.name)
                self._weights.append(mx.nd.random.uniform(-0.05, 0.05, shape=tensor.shape))
                self._grads.append(mx.nd.zeros(tensor.shape))
        rescale = 1.0 / self.job.size  # the store sums, or takes each gradient as a step of its own
        optimizer = mx.optimizer.SGD(
            learning_rate=float(self.options["lr"]), momentum=MOMENTUM, wd=0.0, rescale_grad=rescale
        )
        self._on_servers = self.options["update"] == "servers"
        if self._on_servers:
            self._store.set_optimizer(optimizer)
        for key, weight in enumerate(self._weights):
            self._store.init(key, weight)
            self._store.pull(key, out=weight)  # the first worker's
        self._update = mx.optimizer.get_updater(optimizer)

    def barrier(self) -> None:
        """The store's own."""
        self._store._barrier()

    def step(self) -> None:
        """Forward and backward, layer by layer; what is queued in the engine belongs to the next step."""
        pace, store = self._pace, self._store
        pace.begin_step()
        for index, keys in enumerate(self._layers):
            for key in keys:
                self._weights[key].wait_to_read()
            with pace.layer(index, self._times[index].forward_s, backward=False):
                pass
        for index, keys in reversed(list(enumerate(self._layers))):
            with pace.layer(index, self._times[index].backward_s, backward=True):
                for key in keys:
                    self._grads[key][:] = gradient(self.job.rank, self._steps, key)
                for key in keys:
                    self._grads[key].wait_to_read()
            for key in keys:
                if self._on_servers:
                    store.push(key, self._grads[key], priority=-index)
                    store.pull(key, out=self._weights[key], priority=-index)
                else:
                    store.pushpull(key, self._grads[key], priority=-index)
                    self._update(key, self._grads[key], self._weights[key])
        self._steps += 1

    def settle(self) -> None:
        """Wait for the engine."""
        self._mx.nd.waitall()

    def stats(self) -> dict[str, Any]:
        """What the pace has counted."""
        return pace_stats(self._pace)

    def children(self) -> Sequence[int]:
        """The server, and on the first host the scheduler."""
        return [process.pid for process in self._processes]

    def tensors(self) -> Iterator[tuple[str, bytes, float, float]]:
        """The weights."""
        for name, weight in zip(self._names, self._weights, strict=True):
            values = weight.asnumpy()
            wide = values.astype("float64")
            yield name, values.tobytes(), float(wide.sum()), float(abs(wide).sum())

    def close(self) -> None:
        """Tell the servers, and wait for them."""
        self.settle()
        self._store._barrier()
        # Let go of the store: it tells the servers, and the scheduler, that this worker is done.
        del self._store
        until = time.monotonic() + END_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        late = [process.pid for process in self._processes if process.poll() is None]
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        if late:
            raise TimeoutError(f"{len(late)} of MXNet's processes did not end within {END_S:.0f} s and were killed")


def gradient(rank: int, step: int, key: int) -> float:
    """The value that a worker writes into one gradient: different for every rank, step and tensor, exact in fp32."""
    return ((rank + 1) * 8 + step % 8 + key % 8) / 1024


def be_server(job: Job) -> None:
    """A server on a host of its own, until the workers are done."""
    os.environ.update({**Mxnet(job).environment(), "DMLC_ROLE": "server"})
    importlib.import_module("mxnet")  # serves


if __name__ == "__main__":
    if int(os.environ["LAB_RANK"]) < int(os.environ["LAB_SIZE"]):
        main(Mxnet)
    main_of_server(be_server)

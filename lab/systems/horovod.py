"""Horovod 0.28.1 on its gloo. Rank 0 runs the rendezvous that Horovod's launcher would."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from lab.systems.training import TorchWorker
from lab.systems.worker import START_S, interface_of, main, wait_for_port


class Horovod(TorchWorker):
    """Horovod with its defaults: tensor fusion, one cycle per millisecond, negotiated each step."""

    def join(self) -> None:
        """Run the rendezvous, then meet there."""
        self._set_environment()
        self._hvd: Any = importlib.import_module("horovod.torch")
        if self.job.rank == 0:
            self._serve_rendezvous()
        wait_for_port(self.job.root, self.job.port, START_S)
        self._hvd.init()

    def _set_environment(self) -> None:
        """What ``horovodrun`` sets for one process on each of several hosts; Horovod reads it in its library."""
        job = self.job
        values = {
            "HOROVOD_RANK": job.rank,
            "HOROVOD_SIZE": job.size,
            "HOROVOD_LOCAL_RANK": 0,
            "HOROVOD_LOCAL_SIZE": 1,
            "HOROVOD_CROSS_RANK": job.rank,
            "HOROVOD_CROSS_SIZE": job.size,
            "HOROVOD_HOSTNAME": f"host{job.rank}",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": interface_of(job.host),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": job.root,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": job.port,
            "HOROVOD_GLOO_TIMEOUT_SECONDS": int(self.step_timeout_s),
            "HOROVOD_STALL_CHECK_TIME_SECONDS": int(self.step_timeout_s),
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": int(self.step_timeout_s) + 1,
        }
        os.environ.update({name: str(value) for name, value in values.items()})

    def _serve_rendezvous(self) -> None:
        server = importlib.import_module("horovod.runner.http.http_server")
        # As Horovod's RendezvousServer, but at the port that all hosts know.
        store = server.RendezvousHTTPServer((self.job.root, self.job.port), server.RendezvousHandler, 0)
        threading.Thread(target=store.serve_forever, daemon=True).start()

    def adopt(self) -> None:
        """Copy rank 0's parameters, and wrap the optimizer."""
        self._hvd.broadcast_parameters(self.plain.state_dict(), root_rank=0)
        self.optimizer = self._hvd.DistributedOptimizer(self.optimizer, named_parameters=self.plain.named_parameters())

    def barrier(self) -> None:
        """Horovod's own."""
        self._hvd.barrier()

    def close(self) -> None:
        """End Horovod's thread."""
        self._hvd.shutdown()


if __name__ == "__main__":
    main(Horovod)

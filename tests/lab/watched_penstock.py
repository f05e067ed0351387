"""Penstock's worker in several modes, one after the other, watched: what rank 0 sends before its backward has ended.

The other rank's backward begins afterwards. It cannot answer meanwhile, so what rank 0 sends fills its window and the
rest waits in order, however fast the network is. In modes without a barrier it begins when rank 0's step has ended,
which leaves all to the next one; only the very first waits, for that is when the readers of parameters are decided on.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import penstock as ps
from lab.systems.penstock import WITHOUT_BARRIER, Penstock
from lab.systems.worker import Job, _run_steps, end_with_parent
from penstock.torch.reads.safety import DeferredParameter

PATIENCE_S = 10.0


class Watched(Penstock):
    sent_bytes = 0
    outstanding = 0

    def step(self):
        leaves_all = self.mode in WITHOUT_BARRIER and self._steps > 0
        self.let_go_after_backward = not leaves_all
        super().step()
        if self.job.rank == 0:
            self.outstanding = sum(type(param) is DeferredParameter for param in self.plain.parameters())
            if leaves_all:
                self.barrier()

    @contextlib.contextmanager
    def backward_context(self):
        self.barrier()  # the other has all of the last step, so none of that is sent any more
        if self.job.rank != 0:
            self.barrier()
        before = self.gradient_bytes()
        with super().backward_context():
            yield
        if self.job.rank == 0:
            until = time.monotonic() + (0 if self.mode == "vanilla" else PATIENCE_S)  # the engine sends when it can
            while self.gradient_bytes() == before and time.monotonic() < until:
                time.sleep(0.001)
            self.sent_bytes += self.gradient_bytes() - before
            if self.let_go_after_backward:
                self.barrier()

    @staticmethod
    def gradient_bytes():
        gradients = next(book for book in ps.report()["books"] if book["name"].endswith(".gradients"))
        return sum(layer["bytes_sent"] for layer in gradients["layers"])

    def stats(self):
        return {**super().stats(), "sent_in_backward_bytes": self.sent_bytes, "outstanding": self.outstanding}


def main():
    """The first argument is a file of [spec, port] for each turn; tells what each one's two steps counted."""
    end_with_parent()
    for spec, port in json.loads(Path(sys.argv[1]).read_text()):
        worker = Watched(Job.read(spec, {**os.environ, "LAB_PORT": str(port)}))
        worker.open()
        worker.step()  # the broadcast of the parameters is over when it ends, and is not counted
        worker.settle()
        print(json.dumps({"event": "steps", **_run_steps(worker, count=1, lead_in=1)}), flush=True)
        worker.close()


if __name__ == "__main__":
    main()

"""A system without a framework, to test what all worker programs share. ``stuck``: its steps never end."""

import os
import subprocess
import sys
import time
from functools import partial
from typing import ClassVar

from lab.systems.worker import Worker, end_with_parent, main

BUSY = "import time\nwhile True: sum(range(10000))"


class Idle(Worker):
    defaults: ClassVar = {"stuck": False, "busy_child": False, "step_s": 0.0}

    def open(self):
        self.done = 0
        self.processes = []
        if self.options["busy_child"]:
            ends = partial(end_with_parent, os.getpid())  # also if this process is gone before it can ask for that
            self.processes.append(subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=ends))
        print("libraries print things")

    def barrier(self):
        pass

    def step(self):
        time.sleep(1000 if self.options["stuck"] else self.options["step_s"])
        self.done += 1

    def settle(self):
        pass

    def stats(self):
        return {"done": self.done, "nested": {"twice": [2 * self.done]}}

    def children(self):
        return [process.pid for process in self.processes]

    def tensors(self):
        yield "weight", b"bytes", 1.0, 2.0

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(Idle)

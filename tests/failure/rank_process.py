"""One rank of a job under test, without a framework: it trains nothing, but moves what a training would move.

    python rank_process.py '{"rank": 0, "size": 3, "directory": "/tmp/x", ...}'

Every step it contributes numbers that the other ranks can predict and checks the averages bit by bit. It tells what
happens in JSON lines on standard output. SIGUSR1 makes it raise, wherever it is, and SIGUSR2 makes it hang there. When
another rank is lost it may meet those that are left again, in the same process, and go on with them.
"""

from __future__ import annotations

import array
import itertools
import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slow_link import slow_down

import penstock as ps
from penstock import job

LAYERS = ["stem", "block1", "block2", "block3", "head"]
ELEMS = 128 * 1024
SLICE_BYTES = 64 * 1024
PAUSE_S = 0.002  # computing one layer
STEPS_AGAIN = 3  # with those that are left
POLL_S = 0.01


@dataclass
class Plan:
    """What this process is to do.

    Attributes:
        rank: Its rank.
        size: The number of ranks.
        directory: Where the ranks meet, and where the files `go` and `stop` appear.
        options: Of `penstock.init`.
        waits_for_go: Whether it listens, but does nothing else, until there is a file `go`.
        scheme: How the gradients are synchronised.
        open_files: How many files this process may have open; 0: as many as ever.
        opens: How many files the program opens once there is a file `go`, by rank; -1: all it can.
        slow: Two ranks with a slow link between them.
        again: How long, in seconds, it waits for those that are left when a rank is lost; 0: it ends then.
    """

    rank: int
    size: int
    directory: str
    options: dict[str, Any] = field(default_factory=dict)
    waits_for_go: bool = False
    scheme: str = "store"
    open_files: int = 0
    opens: list[int] = field(default_factory=list)
    slow: tuple[int, int] | None = None
    again: float = 0.0

    @staticmethod
    def parse(text: str) -> Plan:
        """From one JSON object."""
        return Plan(**json.loads(text))


def tell(event: str, **facts: Any) -> None:
    """One line for whoever started this process; `at` is on the clock that all processes of a machine share."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def tell_error(error: ps.PenstockError) -> None:
    """All that an error says."""
    facts = {"rank": error.rank, "layer": error.layer, "step": error.step, "peer": error.peer}
    tell("error", kind=type(error).__name__, message=str(error), **facts)


class BadBatch(Exception):
    """Of a kind that no library catches."""


def fail_on_signal(number: int, frame: Any) -> None:
    """A bug in the user's program, at whatever moment. It tells nothing: it may be in the middle of telling."""
    raise BadBatch("a bad batch")


def hang_on_signal(number: int, frame: Any) -> None:
    """A deadlock in the user's program; its process lives, and all threads beside this one."""
    while True:
        time.sleep(3600)


def join_the_job(plan: Plan) -> None:
    """Meet the others and tell where this rank listens."""
    if plan.slow is not None and plan.rank in plan.slow:
        slow_down(sum(plan.slow) - plan.rank)
    tell("alive")
    if plan.open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan.open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ps.init(rank=plan.rank, world_size=plan.size, rendezvous=f"file://{plan.directory}/meet", **plan.options)
    running = job.current()
    tell("listening", port=running.engine.port, job_id=running.job_id.hex())
    while plan.waits_for_go and not (Path(plan.directory) / "go").exists():
        time.sleep(POLL_S)


def open_files(plan: Plan) -> list[int]:
    """What a program does with its descriptors."""
    opened: list[int] = []
    wanted = plan.opens[plan.rank] if plan.opens else 0
    while len(opened) != wanted:
        try:
            opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            if wanted < 0:
                break
            raise
    # Nobody dials before all have opened theirs. A directory, and a look at it, take no descriptor.
    marks = [Path(plan.directory) / f"opened{rank}" for rank in range(len(plan.opens))]
    if marks:
        marks[plan.rank].mkdir()
    while not all(mark.exists() for mark in marks):
        time.sleep(POLL_S)
    return opened


def meet_again(plan: Plan, error: ps.PenstockError) -> Plan:
    """Leave the job that has lost a rank and meet those that are left; what this process is to do among them."""
    ps.shutdown()
    left = [rank for rank in range(plan.size) if rank != error.rank]
    directory = Path(plan.directory) / "again"
    directory.mkdir(exist_ok=True)
    options = {**plan.options, "rendezvous_timeout_s": plan.again}
    again = replace(plan, rank=left.index(plan.rank), size=len(left), directory=str(directory), options=options)
    again = replace(again, waits_for_go=False, slow=None, opens=[])
    join_the_job(again)
    return again


def stop_asked(plan: Plan) -> bool:
    """Rank 0 decides when the job ends, and tells the others by a number that is summed like all others."""
    return plan.rank == 0 and (Path(plan.directory) / "stop").exists()


class Exchange:
    """A book like a small model's, and its memory."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = job.current().engine
        self.gathers = plan.scheme == "gather"
        kind = ("bytes", 4 * ELEMS) if self.gathers else ("f32", ELEMS)
        tensors = [(f"{name}.weight", layer, *kind, plan.scheme) for layer, name in enumerate(LAYERS)]
        stop = (f"{LAYERS[-1]}.stop", len(LAYERS) - 1, "f32", 1, "store" if self.gathers else plan.scheme)
        self.book = self.engine.open_book("failure.gradients", LAYERS, [*tensors, stop])
        self.memory = [array.array("f", bytes(4 * elems)) for elems in [*[ELEMS] * len(LAYERS), 1]]

    def contribution(self, rank: int, layer: int, step: int) -> float:
        """Small whole numbers and halves: their averages are exact."""
        return float((rank + 1) * (step % 7 + 1) + layer)

    def submit(self, tensor: int, value: float, op: str, step: int) -> None:
        """Contribute `value` everywhere."""
        memory = self.memory[tensor]
        memory[:] = array.array("f", [value]) * len(memory)
        address, elems = memory.buffer_info()
        if self.gathers and tensor < len(LAYERS):
            self.engine.submit_gather(self.book, tensor, address, 4 * elems, step)
        else:
            self.engine.submit(self.book, tensor, address, 4 * elems, op, step)

    def step(self, step: int) -> bool:
        """Backward, forward, and a check; returns whether there is another step."""
        stop, last = len(LAYERS), float(stop_asked(self.plan))
        self.submit(stop, last, "sum", step)
        for layer in reversed(range(len(LAYERS))):
            time.sleep(PAUSE_S)
            self.submit(layer, self.contribution(self.plan.rank, layer, step), "average", step)
        for layer in range(len(LAYERS)):
            self.engine.wait(self.book, [layer], True)
            time.sleep(PAUSE_S)
        self.engine.wait(self.book, [stop], True)
        if self.gathers:
            self.check_gathered(step)
            return self.memory[stop][0] == 0.0
        for layer in range(len(LAYERS)):
            parts = [self.contribution(rank, layer, step) for rank in range(self.plan.size)]
            expected = array.array("f", [sum(parts) / self.plan.size]) * ELEMS
            assert self.memory[layer].tobytes() == expected.tobytes(), f"step {step}: layer {layer} is wrong"
        return self.memory[stop][0] == 0.0

    def check_gathered(self, step: int) -> None:
        """What every other rank has contributed is here, byte for byte."""
        got = array.array("f", bytes(4 * ELEMS))
        address, _ = got.buffer_info()
        for layer in range(len(LAYERS)):
            assert self.engine.gathered(self.book, layer) == [4 * ELEMS] * self.plan.size
            for rank in set(range(self.plan.size)) - {self.plan.rank}:
                self.engine.read_gathered(self.book, layer, rank, 0, address, 4 * ELEMS)
                expected = array.array("f", [self.contribution(rank, layer, step)]) * ELEMS
                assert got.tobytes() == expected.tobytes(), f"step {step}: layer {layer} of rank {rank} is wrong"
            self.engine.drop_gathered(self.book, layer)


def main() -> None:
    """Run until told to stop, or until something fails."""
    plan = Plan.parse(sys.argv[1])
    signal.signal(signal.SIGUSR1, fail_on_signal)
    signal.signal(signal.SIGUSR2, hang_on_signal)
    try:
        join_the_job(plan)
        files = open_files(plan)
        tell("opened", count=len(files))
        exchange = Exchange(plan)
        tell("training")
        for step in itertools.count():
            more = exchange.step(step)
            tell("step", step=step)
            if not more:
                break
        ps.shutdown()
        tell("done")
    except ps.PenstockError as error:
        tell_error(error)
        if plan.again:
            exchange = Exchange(meet_again(plan, error))
            for step in range(STEPS_AGAIN):
                exchange.step(step)  # which checks every bit
            ps.shutdown()
            tell("again")
        raise  # the way out is part of the test: excepthook, atexit, an abort that finds the job already over


if __name__ == "__main__":
    main()

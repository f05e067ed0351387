"""One end of a wire under measurement: a process with native engines and nothing else, told what to do line by line.

It is started by `EngineProcess`, on an emulated host or not, reads one JSON object per line from standard input and
answers each with one on standard output. It ends with its input, so it never outlives the benchmark.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock._native import Engine

JOB_ID = b"a benchmark's id"
SECRET = bytes(32)
PATTERN_BYTES = 1 << 20
REPLY_S = 300.0
ROOT = Path(__file__).resolve().parents[1]


class Memory:
    """Page-aligned memory of one tensor, resident from the start."""

    def __init__(self, len_bytes: int) -> None:
        self.len_bytes = len_bytes
        self.map = mmap.mmap(-1, max(1, len_bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.fill(bytes(PATTERN_BYTES))

    def fill(self, pattern: bytes) -> None:
        """Write the pattern again and again."""
        for start in range(0, self.len_bytes, len(pattern)):
            count = min(len(pattern), self.len_bytes - start)
            self.map[start : start + count] = pattern[:count]

    def digest(self) -> str:
        """For comparing both ends."""
        return hashlib.blake2b(self.map, digest_size=16).hexdigest()


@dataclass
class Wire:
    """One engine, its book and its memory."""

    engine: Engine
    book: int = -1
    tensors: list[Memory] = field(default_factory=list)


class Server:
    """Carries out what is asked, by name of the wire."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}
        self.rank, self.size = 0, 1
        self.steps = 0

    def listen(self, wire: str, rank: int, size: int, host: str, **options: Any) -> dict[str, Any]:
        """Bind an engine."""
        from penstock._native import Engine

        settings: dict[str, Any] = {
            "slice_bytes": 512 << 10,
            "lanes": 1,
            "window_bytes": 0,
            "priority": True,
            "operation_timeout_s": 120.0,
            "peer_timeout_s": 30.0,
            "handshake_timeout_s": 10.0,
            **options,
        }
        engine = Engine(rank=rank, size=size, bind_host=host, port=0, secret=SECRET, job_id=JOB_ID, **settings)
        self.wires[wire] = Wire(engine)
        return {"port": engine.port}

    def connect(self, wire: str, addresses: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Start it."""
        self.wires[wire].engine.connect([(str(host), int(port)) for host, port in addresses])
        return {}

    def book(
        self, wire: str, layers: Sequence[int], places: Sequence[int], dtype: str, seed: int | None
    ) -> dict[str, Any]:
        """Open a book with one tensor of so many bytes per layer; with a seed, fill them with a random pattern."""
        here = self.wires[wire]
        elem_bytes = 4 if dtype == "f32" else 1
        names = [f"layer{number}" for number in range(len(layers))]
        tensors = [(f"{names[at]}.weight", at, dtype, count // elem_bytes) for at, count in enumerate(layers)]
        here.book = here.engine.open_book("benchmark", names, tensors)
        here.engine.set_priorities(here.book, list(places))
        here.tensors = [Memory(count) for count in layers]
        if seed is not None:
            pattern = random.Random(seed).randbytes(PATTERN_BYTES)
            for memory in here.tensors:
                memory.fill(pattern)
        return {}

    def stream(self, wire: str, source: bool, warm: int, rounds: int) -> dict[str, Any]:
        """Copy the whole book from the source to the other rank, again and again, all tensors but one in flight.

        The clock starts and stops with a completion, so that the pipe is full at both ends of the measured time.
        """
        here = self.wires[wire]
        submit = here.engine.submit if source else here.engine.submit_absent
        began = 0.0
        for number in range(warm + rounds):
            for tensor, memory in enumerate(here.tensors):
                if number:
                    here.engine.wait(here.book, [tensor], True)
                submit(here.book, tensor, memory.address, memory.len_bytes, "copy", number)
            if number == warm - 1:
                began = -1.0  # the round that ends the warm-up is in flight
            elif began < 0.0:
                began = time.monotonic()  # its last tensor has just come in
        here.engine.wait(here.book, list(range(len(here.tensors))), True)
        moved = rounds * sum(memory.len_bytes for memory in here.tensors)
        return {"bytes": moved, "seconds": time.monotonic() - began}

    def join_gloo(self, rank: int, size: int, interface: str, root: str, port: int) -> dict[str, Any]:
        """Join a process group of torch's on gloo, which sums beside the engine."""
        import os

        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = interface
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{root}:{port}", rank=rank, world_size=size)
        self.rank, self.size = rank, size
        return {}

    def measure(self, wire: str) -> dict[str, Any]:
        """Measure the links and tell the engine, as every job does at its start."""
        from penstock.collectives import Group
        from penstock.measure.quick import group_rates

        engine = self.wires[wire].engine
        rates = group_rates(Group(engine, 0, range(self.size), self.rank))
        engine.set_rates(rates)
        slice_bytes, _, lanes = engine.slicing()
        return {"line_bytes_per_s": rates.bytes_per_s, "slice_bytes": slice_bytes, "lanes": lanes}

    def time_sums(self, wire: str, arm: str, repeats: int) -> dict[str, Any]:
        """So many sums of the engine's only tensor over all ranks, one after the other, between two barriers.

        ``arm`` is ``gloo``, ``book`` (the store's exchange), ``call`` (the algorithm is chosen) or a call's algorithm.
        Seconds and processor seconds are of all of them; the result of the first is checked.
        """
        import torch
        import torch.distributed as dist

        here = self.wires[wire]
        memory = here.tensors[0]
        tensor = torch.frombuffer(memory.map, dtype=torch.float32)
        place = [(memory.address, memory.len_bytes)]

        def book() -> None:
            self.steps += 1
            here.engine.submit(here.book, 0, memory.address, memory.len_bytes, "sum", self.steps)
            here.engine.wait(here.book, [0], True)

        algorithm = None if arm == "call" else arm

        def call() -> None:
            here.engine.call(0, "allreduce", 0, 0, "sum", "f32", place, place, None, algorithm).wait()

        one = {"gloo": lambda: dist.all_reduce(tensor), "book": book}.get(arm, call)
        if repeats > 1:
            # Once for the check; zeros stay zeros however often they are summed.
            tensor.fill_(float(self.rank + 1))
            one()
            wrong = bool((tensor != self.size * (self.size + 1) / 2).any())
            tensor.zero_()
        else:
            tensor.fill_(float(self.rank + 1))
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            one()
        seconds = time.perf_counter() - began
        dist.barrier()  # until the others need nothing more of this process
        cpu_s = time.process_time() - cpu
        if repeats > 1:
            wrong |= bool(tensor.any())
        else:
            wrong = bool((tensor != self.size * (self.size + 1) / 2).any())
        return {"seconds": seconds, "cpu_s": cpu_s, "wrong": wrong}

    def digest(self, wire: str) -> dict[str, Any]:
        """What is in memory."""
        joined = "".join(memory.digest() for memory in self.wires[wire].tensors)
        return {"digest": hashlib.blake2b(joined.encode(), digest_size=16).hexdigest()}

    def backlog(self, wire: str, step: int, urgent: int) -> dict[str, Any]:
        """Submit every layer but the urgent one for an average; returns while they are under way."""
        here = self.wires[wire]
        for tensor, memory in enumerate(here.tensors):
            if tensor != urgent:
                here.engine.submit(here.book, tensor, memory.address, memory.len_bytes, "average", step)
        return {}

    def probe(self, wire: str, step: int, urgent: int, at: float) -> dict[str, Any]:
        """At this time submit the urgent layer, and say when its answer was in and what was then still under way."""
        here = self.wires[wire]
        memory = here.tensors[urgent]
        time.sleep(max(0.0, at - time.monotonic()))
        began = time.monotonic()
        here.engine.submit(here.book, urgent, memory.address, memory.len_bytes, "average", step)
        here.engine.wait(here.book, [urgent])
        ended = time.monotonic()
        everything = list(range(len(here.tensors)))
        left = set(everything) - set(here.engine.landed(here.book, everything)[0])
        return {
            "seconds": ended - began,
            "late_s": began - at,
            "backlog_bytes": sum(here.tensors[t].len_bytes for t in left),
        }

    def finish(self, wire: str) -> dict[str, Any]:
        """Wait for everything that is under way."""
        here = self.wires[wire]
        here.engine.wait(here.book, list(range(len(here.tensors))), True)
        return {}

    def report(self, wire: str) -> dict[str, Any]:
        """The engine's own counts."""
        return dict(self.wires[wire].engine.report())

    def shutdown(self, wire: str) -> dict[str, Any]:
        """Leave in order."""
        self.wires.pop(wire).engine.shutdown()
        return {}


class Conversation:
    """The other side: requests to a `Server`, and its replies."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self._requests, self._replies = requests, replies

    def ask(self, call: str, **arguments: Any) -> None:
        """Send a request; its reply is fetched later."""
        self._requests.write(json.dumps({"call": call, **arguments}) + "\n")
        self._requests.flush()

    def reply(self) -> dict[str, Any]:
        """The reply to the oldest request that has none."""
        line = self._replies.readline()
        if not line:
            raise RuntimeError(f"a benchmark process {self._ended()}; see its output above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> str:
        """What has become of the process."""
        return "has ended"

    def close(self) -> None:
        """Let it end by itself."""
        self._requests.close()


class EngineProcess(Conversation):
    """A `Server` in a process of its own.

    Args:
        start: As `subprocess.Popen`.
        module: The program that serves.
    """

    def __init__(self, start: Callable[..., subprocess.Popen[str]], module: str = "benchmarks.engine_process") -> None:
        command = [sys.executable, "-m", module]
        self.process = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdin is not None and self.process.stdout is not None
        super().__init__(self.process.stdin, self.process.stdout)

    def _ended(self) -> str:
        return f"ended with status {self.process.wait(REPLY_S)}"

    def close(self) -> None:
        """Let it end by itself, and wait for that."""
        super().close()
        self.process.wait(REPLY_S)


def together(
    ends: Sequence[Conversation], call: str, each: Sequence[dict[str, Any]] | None = None, **shared: Any
) -> list[dict[str, Any]]:
    """Ask all ends at once, then collect the replies."""
    for number, end in enumerate(ends):
        end.ask(call, **shared, **(each[number] if each else {}))
    return [end.reply() for end in ends]


def wire_up(ends: Sequence[EngineProcess], hosts: Sequence[str], wire: str, **options: Any) -> None:
    """Connect an engine on every end."""
    size = len(ends)
    each: list[dict[str, Any]] = [{"rank": rank, "host": hosts[rank]} for rank in range(size)]
    ports = [reply["port"] for reply in together(ends, "listen", each, wire=wire, size=size, **options)]
    together(ends, "connect", wire=wire, addresses=list(zip(hosts, ports, strict=True)))


def serve(server: object, requests: IO[str], replies: IO[str]) -> None:
    """Call the server's methods as requests name them, until the input ends."""
    for line in requests:
        request = json.loads(line)
        answer = getattr(server, request.pop("call"))(**request)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(Server(), sys.stdin, sys.stdout)

"""One rank that trains under a trace; RANK and WORLD_SIZE are torchrun's.

python traced_worker.py DIRECTORY MODE
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import penstock as ps
from penstock.job import current

STEPS = 5
LATE_S = 0.04
ENOUGH_BYTES = 10_000


def of_a_store():
    """Without a model, and without steps; the program ends by an exit status."""
    ps.init(trace=Path(sys.argv[1]) / "traces", line_rate_mbit="off", slice_bytes=4096)
    store = ps.KVStore()
    store.init("key", torch.zeros(5000))
    for _ in range(STEPS):
        store.push("key", torch.ones(5000))
        store.pull("key", torch.empty(5000)).wait()  # an exit leaves what is under way out of the trace
    ps.barrier()
    sys.exit(0)


def steps_of(model, optimizer, count):
    for _ in range(count):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "store":
        of_a_store()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    always = {"line_rate_mbit": "off", "slice_bytes": 4096}
    said = {}
    if mode in ("whole", "profiled"):  # from the first to the last, by the option
        ps.init(trace=directory / "traces", trace_steps=1000, **always)
    else:
        ps.init(**always)
    rank = ps.rank()
    ways = {"ways": {"schemes": {"0": "ring", "2": "factors"}}, "owners": {"update": "servers"}}
    options = {"async": {"mode": "async"}, **ways}
    ps.distribute(model, optimizer, **options.get(mode, {}))
    if mode in ways:
        with ps.trace(directory / "traces"):
            steps_of(model, optimizer, STEPS)
            ps.synchronize()
            ps.barrier()
    elif mode == "whole":
        steps_of(model, optimizer, STEPS)
    elif mode == "profiled":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            steps_of(model, optimizer, STEPS)
        profile.export_chrome_trace(str(directory / "traces" / f"profile-{rank}.json"))
    elif mode == "some":  # a range, and then again with a `with` statement
        trace = ps.trace(directory / "traces", steps=range(2, 4))
        try:
            ps.trace(directory / "traces")
        except ps.ConfigError as error:
            said["while one is written"] = str(error)
        if os.fork() == 0:
            os._exit(0 if trace.has_ended else 1)  # the file is the parent's
        said["a fork"] = os.wait()[1]
        steps_of(model, optimizer, STEPS)
        trace.stop()
        said["observed after"] = current().engine.observed
        with ps.trace(directory / "more") as more:
            said["observed within"] = current().engine.observed
            steps_of(model, optimizer, 2)
        said["ended"] = [trace.has_ended, more.has_ended]
    elif mode in ("late", "async"):  # rank 1 takes longer from the middle of its backward on

        def slow(module, grad_input, grad_output):
            time.sleep(LATE_S if rank == 1 else 0.0)

        model[2].register_full_backward_hook(slow)  # layer 2 has its gradients by then
        with ps.trace(directory / "traces"):
            steps_of(model, optimizer, 2 * STEPS)
    elif mode == "killed":
        trace = ps.trace(directory / "traces", steps=1000)
        for _ in range(3):  # so that slices are in blocks before the last, too
            size = trace.path.stat().st_size
            steps_of(model, optimizer, STEPS)
            while trace.path.stat().st_size < size + ENOUGH_BYTES:  # the thread that writes comes to it by itself
                time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    engine = current().engine
    ps.shutdown()
    report = engine.report()
    said |= {name: report[name] for name in ("slices", "bytes_sent", "bytes_received")}
    said["books"] = {book["name"]: book["layers"] for book in report["books"]}
    (directory / f"said-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()

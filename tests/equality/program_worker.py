"""A process that runs programs: with DDP or a plain average, with Penstock, and with Penstock in a second job.

    python program_worker.py DIRECTORY RANK

Reads ``plan.json``, a list of cases, and leaves ``CASE.RANK.json`` for each that is complete.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import programs_loops
import programs_models
import programs_optimizers
import programs_practice
import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed
from program_world import DDP, PROGRAMS, Average, Case, Distributed
from torch import nn

import penstock as ps

# A program takes a second or so. One that hangs prints every thread's stack and ends the process.
CASE_LIMIT_S = 120
# The second job cuts and carries slices in another way, which must not change a bit of the result. With three ranks,
# which `make long` has; second jobs of all sizes are in test_equality_with_ddp.py.
TWICE_FROM = 3
FIRST_JOB = {"slice_bytes": 4096}
SECOND_JOB = {"slice_bytes": 16384, "lanes": 2, "priority": False}


def tensors_in(result):
    """What a program has trained, as tensors: models, and lists of numbers that it has seen on the way."""
    if isinstance(result, nn.Module):
        return [param.detach().clone() for param in result.parameters()]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in tensors_in(item)]
    return [torch.as_tensor(result).detach().clone()]


def digest(tensors):
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(
            tensor.resolve_conj().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else str(tensor).encode()
        )
    return whole.hexdigest()


def distance(tensors, others):
    """The largest relative L2 norm of a difference."""
    worst = 0.0
    assert len(tensors) == len(others)
    for one, other in zip(tensors, others, strict=True):
        scale = float(other.abs().square().sum()) ** 0.5
        worst = max(worst, float((one - other).abs().square().sum()) ** 0.5 / max(scale, 1e-12))
    return worst


def reference(case, rank):
    program = PROGRAMS[case.program]
    world = DDP(rank, case.size, program.ddp) if program.beside == "ddp" else Average(rank, case.size)
    return tensors_in(program.run(world))


def ours(case, rank):
    """The tensors, or the text of a refusal."""
    try:
        return tensors_in(PROGRAMS[case.program].run(Distributed(rank, case.size)))
    except ps.ConfigError as error:
        return str(error)


def announce(directory, rank, case):
    (directory / f"now.{rank}").write_text(str(case))
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    gc.collect()  # the model before this one, which its hooks hold in a cycle


def run_all(directory, rank, size, cases):
    place = directory / f"size-{size}"
    place.mkdir(exist_ok=True)
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place / 'gloo'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=CASE_LIMIT_S),
    )
    common = {"rank": rank, "world_size": size, "operation_timeout_s": CASE_LIMIT_S}
    outcomes = {case: {} for case in cases}
    jobs = [("first", FIRST_JOB), ("second", SECOND_JOB)]
    for job, options in jobs if size >= TWICE_FROM else jobs[:1]:
        ps.init(**common, **options, rendezvous=f"file://{place / job}")
        for case in cases:
            announce(directory, rank, case)
            refused = PROGRAMS[case.program].refused
            if job == "second" and "refused" in outcomes[case]:
                continue
            result = ours(case, rank)
            if isinstance(result, str):
                outcomes[case]["refused"] = result
                continue
            if job == "first":
                expected = result if refused else reference(case, rank)
                outcomes[case]["difference"] = distance(result, expected)
            outcomes[case][job] = digest(result)
        ps.shutdown()
    for case, outcome in outcomes.items():
        aside = directory / f"aside.{rank}"
        aside.write_text(json.dumps(outcome))
        aside.rename(directory / f"{case}.{rank}.json")
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def main():
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    assert programs_loops and programs_models and programs_optimizers and programs_practice  # imported to fill PROGRAMS
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    plan = [Case.parse(text) for text in json.loads((directory / "plan.json").read_text())]
    gc.collect()
    gc.freeze()  # so that collecting the models takes no time
    for size in sorted({case.size for case in plan if case.size > rank}, reverse=True):
        run_all(directory, rank, size, [case for case in plan if case.size == size])


if __name__ == "__main__":
    main()

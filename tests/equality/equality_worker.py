"""A process that trains cases three times: with DDP, with Penstock, and with Penstock in a second job.

    python equality_worker.py DIRECTORY RANK

Reads ``plan.json``, a list of cases, and takes part in those that have that many workers, the largest first: a process
that is not needed any more ends. Leaves ``CASE.RANK.json`` for each case that is complete. Before each case it writes
its name to ``now.RANK``, so that a crash can be laid at its door.
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

import torch
import torch._dynamo  # the first optimizer imports it
import torch.distributed
from equality_cases import NETWORKS, Case
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.torch.access import distributed_for

# A case takes about a second. One that hangs prints every thread's stack and ends the process.
CASE_LIMIT_S = 180

# The second job cuts, orders and carries slices in another way, which must not change a bit of the result.
FIRST_JOB = {}
SECOND_JOB = {"slice_bytes": 4096, "lanes": 2, "priority": False}


def values(model):
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def digest(tensors):
    """Of the bits."""
    whole = hashlib.sha256()
    for name, tensor in tensors.items():
        whole.update(name.encode())
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def distance(tensors, others):
    """Relative L2 norm of the difference, over all of them, measured in double precision."""
    squares = sum(float((tensors[name].double() - others[name].double()).square().sum()) for name in others)
    return (squares / sum(float(other.double().square().sum()) for other in others.values())) ** 0.5


def train_with_ddp(case, rank):
    model = DistributedDataParallel(
        case.model(),
        broadcast_buffers=False,  # Penstock's buffers are local, too
        find_unused_parameters=NETWORKS[case.network].unused,
    )
    case.train(model, case.make_optimizer(model.module), rank)
    return values(model.module)


def train_with_penstock(case, rank):
    """The parameters, and of each layer that was told to send rows: how many in each step, and how often dense."""
    model = case.model()
    if rank != 0:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)  # rank 0's values are what counts
    model, optimizer = ps.distribute(model, case.make_optimizer(model), schemes=case.schemes(model))
    owner = distributed_for(model)
    gathers = {} if owner is None else owner.schemes.gathers
    sent = {name: {"scheme": gather.scheme, "rows": []} for name, gather in gathers.items()}

    def count_rows():
        for name, gather in gathers.items():
            sent[name]["rows"].append(gather.rows)

    case.train(model, optimizer, rank, count_rows)
    ps.synchronize(optimizer)  # the last updates: `values` reads the parameters, which would wait by itself
    for name, gather in gathers.items():
        sent[name]["dense_sent"] = gather.dense_sent
    return values(model), sent


def announce(directory, rank, case):
    (directory / f"now.{rank}").write_text(str(case))
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    gc.collect()  # the model before this one, which its hooks hold in a cycle


def train_all(directory, rank, size, cases):
    """Train the cases of this many workers, in one group of DDP's and two jobs of Penstock's."""
    place = directory / f"size-{size}"
    place.mkdir(exist_ok=True)
    faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{place / 'ddp'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=CASE_LIMIT_S),
    )
    common = {"rank": rank, "world_size": size, "operation_timeout_s": CASE_LIMIT_S}
    ps.init(**common, **FIRST_JOB, rendezvous=f"file://{place / 'first'}")
    outcomes = {}
    for case in cases:
        announce(directory, rank, case)
        start = values(case.model())
        reference = train_with_ddp(case, rank)
        ours, sent = train_with_penstock(case, rank)
        outcomes[case] = {
            "difference": distance(ours, reference),
            "moved": distance(ours, start),
            "ddp_moved": distance(reference, start),
            "by_tensor": {name: distance({name: ours[name]}, {name: reference[name]}) for name in ours},
            "first": digest(ours),
            "sent": sent,
        }
    ps.shutdown()

    ps.init(**common, **SECOND_JOB, rendezvous=f"file://{place / 'second'}")
    for case in cases:
        announce(directory, rank, case)
        ours, _ = train_with_penstock(case, rank)
        outcomes[case]["second"] = digest(ours)
        aside = directory / f"aside.{rank}"
        aside.write_text(json.dumps(outcomes[case]))
        aside.rename(directory / f"{case}.{rank}.json")
    ps.shutdown()
    torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def main():
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    faulthandler.enable()
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")  # its successor is not in torch 2.4
    torch.set_num_threads(1)
    plan = [Case.parse(text) for text in json.loads((directory / "plan.json").read_text())]
    gc.collect()
    gc.freeze()  # so that collecting the models takes no time
    for size in sorted({case.size for case in plan if case.size > rank}, reverse=True):
        train_all(directory, rank, size, [case for case in plan if case.size == size])


if __name__ == "__main__":
    main()

"""Trains cases with updates at the owners, and beside them at the workers; one process of several, for several jobs.

    python updates_worker.py DIRECTORY PROCESS

Reads ``plan.json``: the topologies, for each of which there is a job, and how many steps. A process is a worker, a
server or nothing in each. Leaves ``WORKERS+SERVERS.RANK.json`` for each job: what came of each case and each scenario.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from updates_scenarios import SCENARIOS

import penstock as ps
from penstock.server import serve

LIMIT_S = 60  # of one case
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=2e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01, lr_decay=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.9, eps=1e-4),
}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
WORDS = 29


class Quick(nn.Module):
    """The layers of CIFAR-10 quick, with fewer channels.

    In fp32 without corners: where rounding alone decides on which side of one a number is, trainings go different ways,
    with updates at the workers, too (after 100 steps 3e-3 for a change of 6e-8 in the parameters).
    """

    def __init__(self, dtype):
        super().__init__()
        sharp = dtype == torch.float64
        rectify, pool = (nn.ReLU, nn.MaxPool2d) if sharp else (nn.GELU, nn.AvgPool2d)
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 5, padding=2), pool(3, 2), rectify()),
            *(nn.Conv2d(8, 8, 5, padding=2), rectify(), nn.AvgPool2d(3, 2)),
            *(nn.Conv2d(8, 16, 5, padding=2), rectify(), nn.AvgPool2d(3, 2)),
        )
        self.classifier = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))

    def loss(self, generator, dtype):
        x = torch.randn(4, 3, 16, 16, generator=generator, dtype=dtype)
        out = self.classifier(self.features(x).flatten(1))
        return F.cross_entropy(out, torch.randint(10, (4,), generator=generator))


class Gpt(nn.Module):
    """Two blocks of attention, and one table of words for both ends.

    Without biases: that of the keys has the gradient zero, and Adam makes steps of what rounding leaves of it.
    """

    def __init__(self, dtype, width=16):
        super().__init__()
        rectify = "relu" if dtype == torch.float64 else "gelu"
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, rectify, batch_first=True, norm_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def loss(self, generator, dtype):
        tokens = torch.randint(WORDS, (2, 9), generator=generator)
        x = self.words(tokens[:, :-1]) + self.places.weight
        mask = torch.full((8, 8), float("-inf"), dtype=dtype).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


NETWORKS = {"quick": Quick, "gpt": Gpt}
WAITS_S = 3600.0
"""Who is needed only in a larger job waits for it through all before; the test has a limit for all of them."""
CASES = [f"{network}-{name}-{dtype}" for network in NETWORKS for name in OPTIMIZERS for dtype in DTYPES]


def train(case, update, steps):
    """The parameters and the optimizer's state after this many steps, as one vector each."""
    network, name, dtype = case.split("-")
    torch.manual_seed(5)
    model = NETWORKS[network](DTYPES[dtype]).to(DTYPES[dtype])
    vectors = [param for param in model.parameters() if param.dim() == 1]
    others = [param for param in model.parameters() if param.dim() > 1]
    optimizer = OPTIMIZERS[name]([{"params": others}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}])
    model, optimizer = ps.distribute(model, optimizer, update=update)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // 3), gamma=0.5)
    generator = torch.Generator().manual_seed(ps.rank())
    for _ in range(steps):
        model.loss(generator, DTYPES[dtype]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    values = torch.cat([param.detach().flatten() for param in model.parameters()])
    kept = [state[place][key].flatten().to(values.dtype) for place in sorted(state) for key in sorted(state[place])]
    return values, torch.cat(kept), (model, optimizer)


def bits(*tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def outcome(case, steps, compare):
    """The bits of updates at the owners, and how far they are from updates at the workers."""
    found, kept, two = train(case, "servers", steps)
    if not compare:
        return {"bits": bits(found, kept)}
    expected, states, one = train(case, "workers", steps)
    torch.manual_seed(5)
    begun = NETWORKS[case.split("-")[0]](expected.dtype).to(expected.dtype)
    moved = expected - torch.cat([param.detach().flatten() for param in begun.parameters()])
    told = {
        "moved": float(moved.norm() / expected.norm()),
        "difference": float((found - expected).norm() / expected.norm()),
        "of_states": float((kept - states).norm() / states.norm()),
        "bits": bits(found, kept),
    }
    del one, two
    return told


def work(directory, rank, workers, servers, plan, compare):
    told = {}
    for case in plan["cases"]:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        told[case] = outcome(case, plan["steps"], compare)
    for name in plan["scenarios"]:
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            SCENARIOS[name]()
            told[name] = "ok"
        except Exception:
            told[name] = traceback.format_exc()
            (directory / f"{workers}+{servers}.{rank}.json").write_text(json.dumps(told))
            raise
    (directory / f"{workers}+{servers}.{rank}.json").write_text(json.dumps(told))


def main(directory, process):
    directory, process = Path(directory), int(process)
    faulthandler.enable()
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()  # a name of a model says how many there are, and not how many have been collected
    plan = json.loads((directory / "plan.json").read_text())
    for number, (workers, servers, options) in enumerate(plan["jobs"]):
        place = directory / f"job-{number}"
        place.mkdir(mode=0o700, exist_ok=True)
        common = {"world_size": workers, "servers": servers, "rendezvous": f"file://{place}", **options}
        common["rendezvous_timeout_s"] = WAITS_S
        folder = directory / f"told-{number}"
        folder.mkdir(exist_ok=True)
        if process < workers:
            ps.init(rank=process, operation_timeout_s=60, **common)
            work(folder, process, workers, servers, plan, compare=options.keys() <= {"groups"})
            ps.shutdown()
        elif process < workers + servers:
            faulthandler.cancel_dump_traceback_later()  # the workers watch over all
            serve(rank=process - workers, operation_timeout_s=60, **common)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A rank of a job whose models are on a real accelerator, which all ranks share. Run by test_gpu.py.

    python gpu_ranks.py SCENE RANK SIZE DIRECTORY DEVICE [SEED]

Prints one JSON object at the end. DDP over gloo, which is compared with, meets in the same processes.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "equality"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from equality_cases import NETWORKS, OPTIMIZERS, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps
from penstock.errors import PenstockError

STEPS = 8
MANY_STEPS = 40
WARM_STEPS = 4
LOST_STEPS = 200
SECRET = "several ranks of one device"


def values(model):
    return torch.cat([param.detach().reshape(-1).double() for param in model.parameters()]).cpu()


def apart(one, other):
    """Relative L2 norm of the difference."""
    return float((one - other).norm() / other.norm())


def digest(model):
    whole = hashlib.sha256()
    for param in model.parameters():
        whole.update(param.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest()


def compared(first, train_ddp, train_ours, train_on_host=None):
    """What a test looks at: both trained models beside the one that they have begun with, and beside ours on the host.

    Args:
        first: The model.
        train_ddp: Trains a copy with DDP.
        train_ours: Trains a copy with Penstock.
        train_on_host: Trains a copy in main memory with Penstock.
    """
    reference, ours = train_ddp(copy.deepcopy(first)), train_ours(copy.deepcopy(first))
    found = {
        "apart": apart(values(ours), values(reference)),
        "moved": apart(values(ours), values(first)),
        "digest": digest(ours),
    }
    if train_on_host is not None:
        found["from_host"] = apart(values(ours), values(train_on_host(copy.deepcopy(first).cpu())))
    return found


# Equality


def equality(rank, size, device, seed):
    """The cases of tests/equality."""
    found = {}
    for network, optimizer, dtype in ((n, o, d) for n in NETWORKS for o in OPTIMIZERS for d in ("fp32", "fp64")):
        if dtype == "fp64" and optimizer != "adamw":
            continue
        case = Case(size, network, optimizer, dtype)

        def with_ddp(model, case=case):
            unused = NETWORKS[case.network].unused
            wrapped = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=unused)
            case.train(wrapped, case.make_optimizer(model), rank)
            return model

        def with_ours(model, case=case):
            if rank:
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1)  # rank 0's values are what counts
            model, trained = ps.distribute(model, case.make_optimizer(model))
            case.train(model, trained, rank)
            ps.synchronize(trained)
            return model

        found[str(case)] = compared(case.model().to(device), with_ddp, with_ours)
    return found


# Practice: what programs do


class Convolutions(nn.Module):
    """With batch norms, and several pieces of gradients: 9 million numbers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(64, 512, 3, 2, 1), nn.SiLU(), nn.Conv2d(512, 512, 3, 2, 1), nn.SiLU())
        self.wide, self.head = nn.Linear(512 * 4, 3072), nn.Linear(3072, 10)

    def forward(self, x):
        x = self.middle(self.stem(x))
        return self.head(F.silu(self.wide(F.adaptive_avg_pool2d(x, 2).flatten(1))))


def batch(rank, step, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    y = torch.randint(10, (16,), generator=generator)
    x = torch.randn(16, 3, 16, 16, generator=generator) + 0.1 * y.view(-1, 1, 1, 1)
    return x.to(device), y.to(device)


def loop(model, optimizer, rank, device, *, autocast=None, scaler=None, clip=None, accumulate=1):
    """Training as torch's documents show it."""
    for step in range(STEPS):
        for part in range(accumulate):
            last = part == accumulate - 1
            x, y = batch(rank, step * accumulate + part, device)
            with model.no_sync() if not last else _nothing():
                with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                    loss = F.cross_entropy(model(x), y)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


class _nothing:  # noqa: N801
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def sgd(params):
    return torch.optim.SGD(params, 0.01, momentum=0.9)


PRACTICE = {
    "one call": (lambda params: torch.optim.AdamW(params, 1e-4, eps=1e-5, foreach=True), {}),
    "fused": (lambda params: torch.optim.AdamW(params, 1e-4, eps=1e-5, fused=True), {}),
    "capturable": (lambda params: torch.optim.Adam(params, 1e-4, eps=1e-5, capturable=True), {}),
    "clips": (sgd, {"clip": 0.1}),
    "accumulates": (sgd, {"accumulate": 3}),
    "autocast to bf16": (sgd, {"autocast": torch.bfloat16}),
    "autocast to fp16, scaled": (sgd, {"autocast": torch.float16, "scaler": True}),
    "scaled and clipped": (sgd, {"autocast": torch.float16, "scaler": True, "clip": 0.1}),
}


def practice(rank, size, device, seed):
    """Programs that use torch as people do; the last one is compiled."""
    torch.manual_seed(seed)
    first = Convolutions().to(device)
    found = {}
    for name, (make, program) in PRACTICE.items():
        if name == "capturable" and device.type == "cpu":
            continue

        def run(model, wrap, make=make, program=program):
            options = dict(program)
            if options.pop("scaler", False):
                options["scaler"] = torch.amp.GradScaler(device.type, init_scale=2.0**22)  # the first steps are skipped
            wrapped, trained = wrap(model, make(model.parameters()))
            loop(wrapped, trained, rank, device, **options)
            return model

        found[name] = compared(
            first,
            lambda model, run=run: run(model, lambda one, other: (DistributedDataParallel(one), other)),
            lambda model, run=run: run(model, ps.distribute),
        )

    def compiled(model, wrap):
        wrapped, trained = wrap(model, sgd(model.parameters()))
        loop(wrapped, trained, rank, device)
        return model

    def distribute_compiled(one, other):
        one, other = ps.distribute(one, other)
        made = torch.compile(one)
        made.no_sync = one.no_sync
        return made, other

    plain = functools.partial(compiled, wrap=lambda one, other: (DistributedDataParallel(one), other))
    found["compiled"] = compared(first, plain, functools.partial(compiled, wrap=distribute_compiled))
    return found


# Bits


def bits(rank, size, device, seed):
    """Many steps beside a DDP that sums in the order of ranks, as the store does.

    A piece that is copied too early, or to where another one is, shows in the bits. For sizes by which dividing rounds
    nothing.
    """
    torch.manual_seed(seed)
    first = Words().to(device)

    def run(model, wrap):
        wrapped, trained = wrap(model, torch.optim.SGD(model.parameters(), 0.5))
        for step in range(MANY_STEPS):
            x, y = words(rank, step, device)
            F.cross_entropy(wrapped(x), y).backward()
            trained.step()
            trained.zero_grad()
        return model

    def with_ddp(model, trained):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(size, sums_in_rank_order)
        return wrapped, trained

    reference, ours = run(copy.deepcopy(first), with_ddp), run(copy.deepcopy(first), ps.distribute)
    return {"ddp": digest(reference), "penstock": digest(ours), "moved": apart(values(ours), values(first))}


def sums_in_rank_order(size, bucket):
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    dist.all_gather(parts, bucket.buffer())
    total = parts[0]
    for part in parts[1:]:
        total += part
    done = torch.futures.Future()
    done.set_result(total / size)
    return done


# Other ways of ps.distribute

WAYS = {
    "servers": {"update": "servers"},
    "servers in backward": {"update": "servers-in-backward"},
    "bf16 on the wire": {"schemes": {"*": "bf16"}},
    "ring": {"schemes": {"*": "ring"}},
    "buffers of rank 0": {"broadcast_buffers": True},
}


def ways(rank, size, device, seed):
    """Beside DDP; batch norm over all ranks, which torch has for some devices only, beside the same in main memory."""
    torch.manual_seed(seed)
    first = Convolutions().to(device)

    def run(model, wrap, where=device):
        wrapped, trained = wrap(model, sgd(model.parameters()))
        loop(wrapped, trained, rank, where)
        return model

    def with_ddp(model):
        return run(model, lambda one, other: (DistributedDataParallel(one), other))

    found = {}
    for name, how in WAYS.items():
        found[name] = compared(
            first, with_ddp, lambda model, how=how: run(model, functools.partial(ps.distribute, **how))
        )
    found["batch norm over ranks"] = compared(
        nn.SyncBatchNorm.convert_sync_batchnorm(first),
        lambda model: run(model.cpu(), ps.distribute, torch.device("cpu")),
        lambda model: run(model, ps.distribute),
    )
    return found


# Schemes


class Words(nn.Module):
    """A table, and linear layers whose few rows are shorter than their gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4000, 512)
        self.first, self.second, self.out = nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)

    def forward(self, x):
        return self.out(F.silu(self.second(F.silu(self.first(self.table(x).mean(1))))))


def words(rank, step, device):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randint(4000, (16, 8), generator=generator), torch.randint(10, (16,), generator=generator)
    return x.to(device), y.to(device)


SCHEMES = {
    "ring": {"*": "ring"},
    "bf16": {"*": "bf16"},
    "rows": {"table": "pairs", "*": "factors"},
    "rows, in another stream": {"table": "pairs", "*": "factors"},
    "auto": "auto",
    "adam": {"first": "adam", "second": "adam"},
    "1bit": {"second": "1bit"},
    "dgc": {"second": ps.DGC(density=0.05, momentum=0.0)},
}
LOSSY = ("1bit", "dgc")


def schemes(rank, size, device, seed):
    """Each way that gradients can travel; what is lossy, which DDP has not, beside the same in main memory, too."""
    torch.manual_seed(seed)
    first = Words().to(device)
    found = {}
    for name, chosen in SCHEMES.items():
        there = torch.Stream(device) if "stream" in name and device.type != "cpu" else _nothing()

        def run(model, wrap, where=device, there=there):
            wrapped, trained = wrap(model, torch.optim.SGD(model.parameters(), 0.5))
            for step in range(STEPS):
                x, y = words(rank, step, where)
                if not isinstance(there, _nothing):
                    there.wait_stream(torch.accelerator.current_stream())
                with there:
                    F.cross_entropy(wrapped(x), y).backward()
                if not isinstance(there, _nothing):
                    torch.accelerator.current_stream().wait_stream(there)
                trained.step()
                trained.zero_grad()
            return model

        def ours(model, where=device, run=run, chosen=chosen):
            return run(model, functools.partial(ps.distribute, schemes=chosen), where)

        found[name] = compared(
            first,
            lambda model, run=run: run(model, lambda one, other: (DistributedDataParallel(one), other)),
            ours,
            functools.partial(ours, where=torch.device("cpu")) if name in LOSSY else None,
        )
    return found


# Waits, memory


def waits(rank, size, device, seed):
    """Steps in which torch raises where a call waits for the device."""
    done = waits_of(Convolutions(), batch, None, rank, device)
    for chosen in SCHEMES.values():
        done += waits_of(Words(), words, chosen, rank, device)
    return {"steps": done}


def waits_of(model, batch_of, chosen, rank, device):
    model.to(device)
    plain = isinstance(chosen, dict) and "second" in chosen
    params = model.parameters()
    optimizer = torch.optim.SGD(params, 0.1) if plain else torch.optim.AdamW(params, 1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = ps.distribute(model, optimizer, schemes=chosen)
    batches = [batch_of(rank, step, device) for step in range(STEPS)]
    done = 0
    for step, (x, y) in enumerate(batches):
        if step == WARM_STEPS:
            torch.cuda.set_sync_debug_mode("error")
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        done += step >= WARM_STEPS
    torch.cuda.set_sync_debug_mode("default")
    return done


def memory(rank, size, device, seed):
    """The most memory of the device, and pinned memory, that DDP and that Penstock need beyond the same model."""
    found = {}
    for kind in ("ddp", "penstock"):
        torch.manual_seed(seed)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(10))).to(device)
        optimizer = sgd(model.parameters())
        if kind == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            wrapped, optimizer = ps.distribute(model, optimizer)
        for _ in range(STEPS):
            wrapped(torch.ones(8, 2048, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        found[kind] = torch.cuda.max_memory_allocated() - before
        found[f"{kind} pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) - pinned
        del wrapped, model, optimizer
    found["limit"] = 64 << 20
    return found


# A lost rank


def lost(rank, size, device, seed):
    """The last rank kills itself at a random moment; what the others are told, and how late."""
    model = Convolutions().to(device)
    model, optimizer = ps.distribute(model, sgd(model.parameters()))
    chance = random.Random(seed)
    begin, after_s = chance.randrange(2, LOST_STEPS // 4), chance.random() * 0.05
    died = Path(sys.argv[4]) / "died"
    x, y = batch(rank, 0, device)
    try:
        for step in range(LOST_STEPS):
            if rank == size - 1 and step == begin:
                threading.Timer(after_s, _die, [died]).start()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except PenstockError as error:
        late_s = time.time() - float(died.read_text())
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        finite = all(bool(param.isfinite().all()) for param in model.parameters())
        return {"error": type(error).__name__, "rank": error.rank, "late_s": late_s, "finite": finite}
    return {"error": None}


def _die(path):
    path.with_suffix(".new").write_text(str(time.time()))
    path.with_suffix(".new").rename(path)
    os.kill(os.getpid(), signal.SIGKILL)


SCENES = {scene.__name__: scene for scene in (equality, bits, practice, ways, schemes, waits, memory, lost)}


def main():
    scene, rank, size, directory, name, seed = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6], int(sys.argv[6])
    device = torch.device(name) if name == "cpu" else torch.device(name, 0)
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/gloo", rank=rank, world_size=size)
    ps.init(rank=rank, world_size=size, rendezvous=f"file://{directory}/meet", secret=SECRET)
    found = SCENES[scene](rank, size, device, seed)
    if scene != "lost":
        ps.shutdown()
        dist.destroy_process_group()
    print(json.dumps(found), flush=True)
    if scene == "lost":
        os._exit(0)  # gloo waits for the lost rank


if __name__ == "__main__":
    main()

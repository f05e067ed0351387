"""One rank that trains an emulated network under real systems; leaves in files what became of the parameters.

    torchrun --nproc-per-node N emulated_worker.py SYSTEMS NETWORK WIDTH COMPUTE_S STEPS DIRECTORY

SYSTEMS are ``ddp`` (on gloo) and ``penstock``, whose layers send rows where they can, separated by commas, one after
the other in the same processes.
"""

import os
import sys
import time

import torch

import penstock as ps
from lab.emulate import Embedding, Linear, build, data
from lab.networks import NETWORKS

LEARNING_RATE = 2.0**-3
SEED = 5


def train(system, network, width, compute_s, steps):
    model = plain = build(NETWORKS[network]().widened(width), compute_s, seed=SEED)
    begin = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if system == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        ps.init()
        schemes = {name: "factors" for name, part in plain.named_children() if isinstance(part, Linear)}
        schemes |= {name: "pairs" for name, part in plain.named_children() if isinstance(part, Embedding)}
        model, optimizer = ps.distribute(model, optimizer, schemes=schemes or None)
        took = {name: ps.coordinator_of(model).best_scheme(name) for name in schemes}
        assert took == schemes, took
    step_s = []
    for step in range(steps):
        began_s = time.perf_counter()
        model(data(int(os.environ["RANK"]), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step_s.append(time.perf_counter() - began_s)
    if system == "ddp":
        torch.distributed.destroy_process_group()
    else:
        ps.shutdown()
    end = {name: param.detach().clone() for name, param in plain.named_parameters()}
    return {"begin": begin, "end": end, "step_s": step_s}


def main():
    systems, network, width, compute_s, steps, directory = sys.argv[1:]
    torch.set_num_threads(1)
    for system in systems.split(","):
        found = train(system, network, float(width), float(compute_s), int(steps))
        torch.save(found, f"{directory}/{system}{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()

"""A worker's program: goes on until a rank is lost, says which, and ends well.

    until_lost.py {workers|servers|store}

Updates at the workers, at the servers, or a key-value store whose optimizer is theirs. There is a checkpoint of the
first step.
"""

import itertools
import sys

import numpy as np
import torch

import penstock as ps


def train(update):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(100, 300), torch.nn.Linear(300, 20))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = ps.distribute(model, optimizer, update=update)
    ps.resume("checkpoints", model, optimizer)
    for number in itertools.count():
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            ps.checkpoint("checkpoints", wait=True)
        yield


def exchange():
    kv = ps.KVStore("sync")
    kv.init(["w", "v"], [np.zeros(30_000), np.zeros(500)])
    kv.set_optimizer("Adam")
    out = [np.empty(30_000), np.empty(500)]
    for number in itertools.count():
        kv.pushpull(["w", "v"], [np.ones(30_000), np.ones(500)], out=out).wait()
        if number == 0:
            kv.checkpoint("checkpoints")
            kv.finish_checkpoint()
        yield


def main(kind):
    ps.init(peer_timeout_s=60, operation_timeout_s=60)
    try:
        for number, _ in enumerate(exchange() if kind == "store" else train(kind)):
            if number == 1:
                print("steps", flush=True)
    except ps.PeerLost as lost:
        print("lost", lost, flush=True)
        ps.shutdown()


main(*sys.argv[1:])

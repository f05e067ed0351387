"""A worker's program: local updates, whose common values and outer optimizer servers have, and asynchronous training.

    local_updates.py DIRECTORY

It writes ``DIRECTORY/result-RANK``.
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import penstock as ps


def network():
    torch.manual_seed(ps.rank())
    return nn.Sequential(nn.Linear(20, 100), nn.BatchNorm1d(100), nn.Linear(100, 60), nn.Linear(60, 5))


def learn(optimizer, first, last):
    for step in range(first, last):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + ps.rank()))
        optimizer.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def streaming(**options):
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return ps.DiLoCo(model, inner, outer, 6, fragments=3, fragment_sync_delay=1, fragment_update_alpha=0.25, **options)


def in_turn(learn_once):
    """For the same bits in every run."""
    for step in range(4):
        for rank in range(ps.world_size()):
            if rank == ps.rank():
                learn_once(step)
            ps.barrier()


def asynchronous():
    """Parameters that owners have updated by one gradient after the other."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ps.distribute(model, optimizer, mode="async", staleness=3)

    def learn_once(step):
        x = torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + ps.rank()))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ps.synchronize(model)

    in_turn(learn_once)
    assert all(int(state["step"]) == 4 * ps.world_size() for state in optimizer.state_dict()["state"].values())
    return [param.detach().numpy().tobytes() for param in model.parameters()]


def main(directory):
    ps.init(slice_bytes=8192, operation_timeout_s=60)
    torch.set_num_threads(1)
    optimizer = streaming()
    learn(optimizer, 0, 15)
    again = streaming()
    again.load_state_dict(optimizer.state_dict())
    learn(again, 15, 21)
    again.synchronize()
    skipping = streaming(not_finite="skip")
    learn(skipping, 0, 3)
    if ps.rank() == 1:
        with torch.no_grad():
            skipping.model[0].weight.fill_(float("nan"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learn(skipping, 3, 9)
    assert any("leaves rank 1 out of the round" in str(one.message) for one in caught)
    skipping.synchronize()
    model = network()
    averaged = ps.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    learn(averaged, 0, 4)
    model = network()
    drawn = ps.ElasticAveraging(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    in_turn(lambda step: learn(drawn, step, step + 1))
    drawn.synchronize()
    every = [list(one.model.state_dict().values()) for one in (again, skipping, averaged, drawn)]
    values = [value.numpy().tobytes() for one in every for value in one]
    assert all(value.isfinite().all() for one in every for value in one)
    copied = 5 * sum(value.nbytes for value in model.state_dict().values())  # rank 0's, to begin with
    owned = ps.report()["owned_bytes"]
    values += asynchronous()
    told = {"copied": copied, "bits": hashlib.sha256(b"".join(values)).hexdigest(), "owned": owned}
    (Path(directory) / f"result-{ps.rank()}").write_text(json.dumps(told))
    ps.shutdown()


main(*sys.argv[1:])

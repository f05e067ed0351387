"""One process of test_backend.py: members change as PyTorch's fault-tolerance tests change them.

reconfigure_rank.py RANK SIZE DIRECTORY. Of SIZE - 1 processes rank 1 dies, and the last of SIZE joins later.
"""

import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import penstock as ps
import penstock.torch.backend

LIMIT = timedelta(seconds=120)
process, size, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
first = list(range(size - 1))
store = dist.FileStore(f"{directory}/store", -1)
store.set_timeout(LIMIT)


def meet(name, members):
    """The handles of these processes, when all have come."""
    store.set(f"{name}/{process}", dist._get_reconfigure_handle())
    return [store.get(f"{name}/{member}").decode() for member in members]


def reconfigure(uuid, handles):
    begin = time.monotonic()
    assert dist._reconfigure(uuid, handles, timeout=LIMIT).wait()
    assert time.monotonic() - begin < 2 * LIMIT.total_seconds()


def check(members):
    """Rank, size, and collectives over these processes."""
    assert (dist.get_rank(), dist.get_world_size()) == (members.index(process), len(members))
    value = torch.full((5,), process + 1.0)
    dist.all_reduce(value)
    assert value.tolist() == [sum(member + 1.0 for member in members)] * 5
    value = torch.full((3,), float(process))
    dist.broadcast(value, group_src=len(members) - 1)
    assert value.tolist() == [float(members[-1])] * 3
    if len(members) > 1:
        here, rank = torch.zeros(4), dist.get_rank()
        backend = dist.get_backend_impl(None, torch.device("cpu"))
        sent = backend.send([torch.full((4,), float(rank))], (rank + 1) % len(members), 0)
        backend.recv([here], (rank - 1) % len(members), 0).wait()
        sent.wait()
        assert here.tolist() == [float((rank - 1) % len(members))] * 4


def train(members):
    """A wrapped model takes the mean over these processes: its native code has to know how many they are."""
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):  # only then has it the buckets that it keeps
        model.zero_grad()
        wrapped(torch.full((1, 1), process + 1.0)).sum().backward()
    mean = sum(member + 1.0 for member in members) / len(members)
    assert abs(model.weight.grad.item() - mean) < 1e-5, (model.weight.grad, mean)
    return wrapped


def refused(kind, words, call):
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised that says {words!r}")


if process == size - 1:
    store.get("lost")  # it comes when the others have gone on without one
rank = min(process, size - 2)
options = {"rank": rank, "world_size": size - 1, "store": store, "timeout": LIMIT, "enable_reconfigure": True}
dist.init_process_group("penstock", **options)
assert dist._supports_reconfigure()
own = dist._get_reconfigure_handle()
refused(ps.ConfigError, "no members before its first reconfigure", lambda: dist.all_reduce(torch.ones(1)))

if process < size - 1:
    reconfigure(100 + process, [own])  # each alone
    check([process])
    refused(RuntimeError, "already used", lambda: dist._reconfigure(100 + process, [own]))
    check([process])
    handles = meet("all", first)
    reconfigure(200, handles)
    check(first)
    refused(ps.ConfigError, "is left out", lambda: dist._reconfigure(201, [h for h in handles if h != own]))
    refused(ps.ConfigError, "has not made", lambda: dist._reconfigure(202, ["gloo", own]))
    check(first)  # what is refused changes nothing
    meet("checked", first)

    dist.distributed_c10d._get_default_group().abort()
    refused(ps.ConfigError, "after its abort", lambda: dist.all_reduce(torch.ones(1)))
    reconfigure(300, set(meet("aborted", first)))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == len(first)
    reconfigure(301, meet("in order", first))
    check(first)
    wrapped = train(first)
    part = dist.new_group([0, 2])
    if process != 1:
        dist.all_reduce(torch.ones(1), group=part)
    meet("before the loss", first)

    # What is under way cannot end, as process 1 has no part in it; it fails, for a thread that waits for it, too, and
    # when it is waited for afterwards.
    works = [] if process == 1 else [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(4)]
    failures = []

    def wait(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - what it is gets judged below
            failures.append(error)

    # A backward gives the error on as a RuntimeError that has its text.
    backward = wrapped(torch.ones(1, 1)).sum().backward
    waits = [works[0].wait, works[1].get_future().wait, backward] if works else []
    threads = [threading.Thread(target=wait, args=[call], daemon=True) for call in waits]
    for thread in threads:
        thread.start()
    meet("under way", first)
    if process == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    survivors = [member for member in first if member != 1]
    reconfigure(400, meet("survivors", survivors))
    for thread in threads:
        thread.join(LIMIT.total_seconds())
    assert len(failures) == len(threads) and isinstance(failures[0], RuntimeError | ps.PenstockError), failures
    for work in works:
        refused(ps.PenstockError, "", work.wait)
    # Of the group itself, as torch looks for the new rank among the old members where it describes the error.
    refused(ps.PenstockError, "", lambda: part.allreduce([torch.ones(1)]).wait())
    check(survivors)
    train(survivors)
    store.set("lost", "1")
else:
    survivors = [member for member in first if member != 1]

members = [*survivors, size - 1]
reconfigure(500, meet("joined", members))
check(members)
train(members)
pair = dist.new_group([0, 2])  # process 3 has not made those of before
if dist.get_rank() != 1:
    value = torch.full((2,), float(process))
    dist.all_reduce(value, group=pair)
    assert value.tolist() == [float(members[0] + members[2])] * 2

# Who is not in the next job is told so by the error of the last one, and nobody waits for it.
handles = meet("leaving", members)
if process == size - 1:
    refused(ps.PenstockError, "reconfigured", lambda: [dist.all_reduce(torch.ones(10)) for _ in range(10**6)])
    soon = timedelta(seconds=2)
    refused(ps.Timeout, "the timeout of reconfigure", lambda: dist._reconfigure(600, handles, timeout=soon))
    refused(ps.ConfigError, "failed", lambda: dist.all_reduce(torch.ones(1)))
else:
    reconfigure(601, handles[:-1])
    check(survivors)
meet("end", members)
dist.destroy_process_group()

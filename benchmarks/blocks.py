"""What an option costs a training: blocks of steps with it and without it in turn, compared by pairs."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.cases import measured
from benchmarks.overhead import Piece, cifar10_quick, resnet50_sized
from lab.records import result_arguments

WAYS = ("with", "without")

CASES: dict[str, Callable[[], Any]] = {
    "CIFAR-10 quick, batch 100": cifar10_quick,
    "ResNet-50-sized, 161 tensors": lambda: (resnet50_sized(), torch.zeros(1), None),
    "400 tensors of 1 K": lambda: (nn.Sequential(*(Piece((1000,)) for _ in range(400))), torch.zeros(1), None),
}
"""By name a model with a batch for it. Models of `Piece` compute next to nothing."""


def trainer(case: str) -> Callable[[int], None]:
    """Distributes a model of `CASES` in the job that runs; returns what makes so many steps of it, updates included."""
    model, x, y = CASES[case]()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))

    def train(count: int) -> None:
        for _ in range(count):
            out = model(x)
            (out.sum() if y is None else nn.functional.cross_entropy(out, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ps.synchronize()

    return train


def in_turn(pairs: int, seed: int) -> Iterator[str]:
    """The ways of so many pairs of blocks. Which of a pair is first is drawn from the seed, the same on all ranks."""
    chance = random.Random(seed)
    return itertools.chain.from_iterable(chance.sample(WAYS, len(WAYS)) for _ in range(pairs))


def differences(found: Mapping[str, Sequence[float]], of: str = "") -> list[float]:
    """By how much each block with it took longer than its neighbour without: of ``found["with" + of]``."""
    return [one - other for one, other in zip(found["with" + of], found["without" + of], strict=True)]


def main(
    benchmark: str,
    description: str | None,
    work: Callable[[str, int, int, str, int, int], None],
    measure: Callable[[str, int, int, int], dict[str, Any]],
    *,
    pairs: int,
    of: str,
    cases: Mapping[str, Any] = CASES,
    workers: Sequence[int] = (2,),
) -> int:
    """The command line of such a benchmark.

    Args:
        benchmark: Its name in the records.
        description: Its help text.
        work: What one rank does: given case, rank, size, directory, pairs and seed.
        measure: Gives the record of one case: given case, size, pairs and seed.
        pairs: How many, by default.
        of: What a pair is of, as the help says it.
        cases: What can be measured, by name.
        workers: The sizes of jobs, by default.

    Returns:
        0 if the target is met everywhere, 2 if this machine cannot run a case.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=pairs, help=f"of {of} (default: {pairs})")
    parser.add_argument("--workers", type=int, nargs="*", default=list(workers))
    parser.add_argument("--models", nargs="*", choices=cases, default=list(cases), metavar="NAME")
    parser.add_argument("--seed", type=int, default=1)
    result_arguments(parser)
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        case, rank, size, directory, count, seed = arguments.worker
        work(case, int(rank), int(size), directory, int(count), int(seed))
        return 0
    met = True
    for case, size in itertools.product(arguments.models, arguments.workers):
        one = partial(measure, case, size, arguments.pairs, arguments.seed)
        record = measured(arguments, benchmark, one, scenario=("model", "workers"), seed=arguments.seed)
        if record is None:
            return 2
        met &= record["met"]
        if not arguments.json:
            print(record, flush=True)
    return 0 if met else 1

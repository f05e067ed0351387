"""`make test-failures`: many seeded runs of every kind of fault, and a table of what became of each.

In every run those that are left meet again in the same processes and go on: with a model from a checkpoint, to the bits
of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time

from faults import Fault, Verdict, run
from scene import GRACE_S, PEER_TIMEOUT_S

KINDS = ("kill", "stop", "raise", "hang")
TORCH_EVERY = 8
TORCH_SCHEMES = ("store", "factors", "adam", "1bit")
START_EVERY = 10
SLOW_EVERY = 3
COLUMNS = "{:>4}  {:<6} {:<22} {:>6} {:>8}  {:<28} {:>9} {:>8}  {}"
HEADINGS = ("run", "fault", "ranks, torch scheme", "victim", "after s", "the others raised", "noticed s", "ended s", "")


def plan(runs: int, seed: int) -> list[Fault]:
    """Every kind of fault in turn; who is hit, when, and among how many is drawn."""
    generator = random.Random(seed)
    faults = []
    for number in range(runs):
        size = generator.choice((2, 3, 3, 4))
        torch = number % TORCH_EVERY == TORCH_EVERY - 1
        at_start = number % START_EVERY == START_EVERY - 1 and not torch
        # Divided, or every run with PyTorch, and every one while meeting, would be of one kind.
        turn = number // TORCH_EVERY if torch else number // START_EVERY if at_start else number
        kinds = KINDS[:-1] if at_start else KINDS  # a rank that hangs while it starts is a late one
        kind = kinds[turn % len(kinds)]
        slow = number % SLOW_EVERY == SLOW_EVERY - 1
        scheme = TORCH_SCHEMES[number // TORCH_EVERY % len(TORCH_SCHEMES)] if torch else "store"
        fault_seed = generator.randrange(2**32)
        faults.append(
            Fault.draw(
                fault_seed, kind, size=size, torch=torch, at_start=at_start, scheme=scheme, slow=slow, again=True
            )
        )
    return faults


def described(verdict: Verdict) -> str:
    """One row of the table."""
    fault = verdict.fault
    circumstances = {fault.scheme: fault.torch, "at start": fault.at_start, "slow": fault.slow is not None}
    ranks = ", ".join([str(fault.size), *(name for name, holds in circumstances.items() if holds)])
    places = sorted({f"{error['kind']} {error['layer']}/{error['step']}" for error in verdict.errors.values()})
    kinds = ", ".join(sorted({error["kind"] for error in verdict.errors.values()})) or "nothing"
    where = places[0].partition(" ")[2] if places and not fault.at_start else "-"
    noticed, ended = f"{verdict.noticed_s:.2f}", f"{verdict.ended_s:.2f}"
    row = (fault.kind, ranks, fault.victim, f"{fault.delay_s:.3f}", f"{kinds} at {where}", noticed, ended)
    return COLUMNS.format("", *row, "FAILED" if verdict.complaints else "ok")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args()


def main() -> int:
    """Run them one after the other."""
    arguments = parse()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**32)
    began = time.monotonic()
    verdicts = []
    if not arguments.json:
        limit_s = PEER_TIMEOUT_S + GRACE_S
        print(f"seed {seed}; peer_timeout_s {PEER_TIMEOUT_S:g}, so all others must have ended within {limit_s:g} s")
        print(COLUMNS.format(*HEADINGS))
    for number, fault in enumerate(plan(arguments.runs, seed), 1):
        verdict = run(fault)
        verdicts.append(verdict)
        if not arguments.json:
            print(f"{number:>4}{described(verdict)[4:]}", flush=True)
            for complaint in verdict.complaints:
                print(f"      {fault}\n      {complaint}", flush=True)
    good = sum(not verdict.complaints for verdict in verdicts)
    if arguments.json:
        rows = [
            {**vars(one.fault), "noticed_s": one.noticed_s, "ended_s": one.ended_s, "ok": not one.complaints}
            for one in verdicts
        ]
        print(json.dumps({"seed": seed, "good": good, "runs": rows}))
    else:
        slowest = max(verdict.ended_s for verdict in verdicts)
        took_s = time.monotonic() - began
        print(f"{good} out of {len(verdicts)} runs; slowest end {slowest:.2f} s; {took_s:.0f} s in all")
    return 0 if good == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

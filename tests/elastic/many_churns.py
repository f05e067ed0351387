"""`make test-churn`: many seeded jobs on emulated hosts whose ranks are lost at random moments, and newcomers come.

It needs root, for network namespaces. A table says what became of each.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from churn import Outcome, draw, run

COLUMNS = "{:>4}  {:>10} {:>6} {:>6} {:>6} {:>6} {:>6} {:>7} {:>8}  {}"
HEADINGS = ("run", "seed", "hosts", "waves", "lost", "came", "epochs", "steps", "took s", "")


def described(outcome: Outcome) -> str:
    """One row of the table, but for its number."""
    plan = outcome.plan
    counts = (len(plan.waves), outcome.lost, outcome.came, outcome.epochs, outcome.steps)
    verdict = "FAILED" if outcome.complaints else "ok"
    return COLUMNS.format("", plan.seed, plan.size, *counts, f"{outcome.took_s:.1f}", verdict)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None, help="of the first run; default: drawn, and printed")
    return parser.parse_args()


def main() -> int:
    """Run them one after the other."""
    arguments = parse()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(2**31)
    began, good = time.monotonic(), 0
    print(f"seed {seed}")
    print(COLUMNS.format(*HEADINGS))
    for number in range(arguments.runs):
        outcome = run(draw(seed + number))
        good += not outcome.complaints
        print(f"{number + 1:>4}{described(outcome)[4:]}", flush=True)
        for complaint in outcome.complaints:
            print(f"      {outcome.plan}\n      {complaint}", flush=True)
    print(f"{good} out of {arguments.runs} runs; {time.monotonic() - began:.0f} s in all")
    return 0 if good == arguments.runs else 1


if __name__ == "__main__":
    sys.exit(main())

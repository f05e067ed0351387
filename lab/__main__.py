"""``python -m lab``: emulated clusters, real peers, the distance to the limit.

python -m lab list                  the scenarios
python -m lab run SCENARIO ...      measure, and append JSON lines to docs/benchmarks/lab/ (needs root)
python -m lab report                tables and plots from them
python -m lab.peers install         the peers' environments (`make lab-peers`)
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """The command line."""
    command, *rest = sys.argv[1:] or ["--help"]
    if command == "run":
        from lab.run import main as run

        return run(rest)
    if command == "report":
        from lab.report import main as report

        return report(rest)
    if command == "list" and rest in ([], ["--json"]):
        from lab.scenario import all_names, load

        titles = {name: load(name)[0].title for name in all_names()}
        if rest:
            print(json.dumps(titles))
        else:
            width = max(map(len, titles))
            print("\n".join(f"{name:<{width}}  {title}" for name, title in titles.items()))
        return 0
    print(__doc__, file=sys.stdout if command in ("-h", "--help") else sys.stderr)
    return 0 if command in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())

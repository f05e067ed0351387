"""Tables and pictures of what the lab measured, into `docs/benchmarks/`.

    python -m lab report                       every docs/benchmarks/lab/*.jsonl into README.md, lab/README.md, and
                                               a page and pictures for each scenario in lab/ there
    python -m lab report --json FILES...       the verdicts as one JSON object, and nothing written

README.md has the verdicts, lab/README.md an index of the scenarios. Everything between the two marker lines of each is
made here, and the rest is left as it is; a scenario's page is made here as a whole. The same lines give the same text
and the same pictures.

Omitted: words about why something is slow. They belong outside of the markers, written by who looked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.results import BrokenLine, Result, Scenario, read
from lab.scenario import all_names, load
from lab.systems import SYSTEMS
from lab.tables import bars, index, scenario_page
from lab.verdicts import Judgement, judge, missing_exact_peers, tally

__all__ = ["main", "planned", "read", "write"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- lab: begin -->", "<!-- lab: end -->"


def write(folder: Path = FOLDER, scenarios: Sequence[Scenario] | None = None) -> list[Path]:
    """Draw all pictures into `folder`/lab and put the tables into README.md here and there, between the markers.

    Args:
        folder: The pages are made if they are missing.
        scenarios: Default: the last run of each in `folder`/lab/*.jsonl.

    Returns:
        The files that were written.

    Raises:
        BrokenLine: As `read`; or a page has one marker without the other.
        OSError: A file cannot be read or written.
    """
    from lab import plots  # --json and the tables need no matplotlib

    scenarios = read(sorted((folder / "lab").glob("*.jsonl")), planned()) if scenarios is None else scenarios
    first, second = folder / "README.md", folder / "lab" / "README.md"
    # A page that is torn is complained of before anything is drawn or written.
    around = {page: _split(page.read_bytes().decode() if page.exists() else "", page) for page in (first, second)}
    written = plots.draw(scenarios, folder / "lab")
    pictures = {picture.name for picture in written}
    for scenario in scenarios:
        page = folder / "lab" / f"{scenario.name}.md"
        page.write_text(scenario_page(scenario, pictures), encoding="utf-8", newline="\n")
        written.append(page)
    texts = {first: bars(scenarios, pictures, all_names()), second: index(scenarios)}
    for page, (before, after) in around.items():
        page.write_bytes(f"{before}{BEGIN}\n\n{texts[page]}\n{END}\n{after}".encode())
    return [*written, first, second]


def planned() -> dict[str, list[Result]]:
    """By scenario of the lab the systems that its file names, for `read`."""
    why = "in the scenario's file, but not in this run"
    return {
        name: [Result(one, SYSTEMS[one].title, SYSTEMS[one].exact, why, None) for one in load(name)[0].systems]
        for name in all_names()
    }


def _split(page: str, path: Path) -> tuple[str, str]:
    """What stands before the markers and what after them."""
    lines = page.splitlines(keepends=True)
    begins, ends = ([i for i, line in enumerate(lines) if line.strip() == marker] for marker in (BEGIN, END))
    if not begins and not ends:
        gap = "" if not page else "\n" if page.endswith("\n") else "\n\n"
        return page + gap, ""
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise BrokenLine(
            f"{path}: one line {BEGIN} and after it one line {END} are needed; remove them or complete them"
        )
    return "".join(lines[: begins[0]]), "".join(lines[ends[0] + 1 :])


def _record(judgement: Judgement) -> dict[str, Any]:
    point, against = judgement.point, judgement.against
    return {
        "scenario": point.scenario,
        "title": point.title,
        "sweep": dict([point.swept]) if point.swept else None,
        "bar": judgement.bar,
        "system": judgement.system,
        "limit": judgement.limit,
        "ratio": judgement.ratio,
        "low": judgement.low,
        "high": judgement.high,
        "against": against.system if against else None,
        "peers_missing": [peer.system for peer in missing_exact_peers(point)] if judgement.bar == "peer" else [],
        "verdict": judgement.verdict,
        "reason": judgement.reason or None,
    }


def _as_json(scenarios: Sequence[Scenario]) -> dict[str, Any]:
    judgements = judge(scenarios)
    runs = [{"scenario": found.name, "commits": list(found.commits), "run": found.run} for found in scenarios]
    return {"runs": runs, "count": tally(judgements), "verdicts": [_record(judgement) for judgement in judgements]}


def main(arguments: list[str]) -> int:
    """The command line without the program's name; returns its status: 1 if there is nothing to report.

    A missed bar is a result and no error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lab report", description="Tables and pictures of what was measured"
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: docs/benchmarks/lab/*.jsonl")
    parser.add_argument("--json", action="store_true", help="print the verdicts as one JSON object; write nothing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where README.md and lab/ are")
    args = parser.parse_args(arguments)
    files = args.files or sorted((args.folder / "lab").glob("*.jsonl"))
    if not files:
        return _complain(f"no measurements in {args.folder / 'lab'}; `python -m lab run SCENARIO` makes some")
    try:
        scenarios = read(files, planned())
        if not scenarios:
            return _complain(
                f"no measurements in {', '.join(map(str, files))}; `python -m lab run SCENARIO` makes some"
            )
        if args.json:
            sys.stdout.write(json.dumps(_as_json(scenarios), indent=2) + "\n")
            return 0
        written = write(args.folder, scenarios)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return _complain("pictures need matplotlib: install the extra `lab`, as in pip install 'penstock[lab]'")
    except (BrokenLine, OSError, ValueError) as error:
        return _complain(str(error))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally(judge(scenarios)).items())
    sys.stderr.write("".join(f"written: {path}\n" for path in written) + f"bars: {counts}\n")
    return 0


def _complain(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

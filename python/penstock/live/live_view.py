"""What the status files of a job's ranks say together: how fast each is, what it waits for, and which layers cost most.

Pure but for reading the files. Rates are over the time between the two samples that each file holds, some 10 s. Who is
late is nothing that follows from them: ranks have found that out together, and say it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.live.live_status import EVERY_S, FORMAT, SUFFIX
from penstock.tracing.late import sentence

__all__ = ["SILENT_AFTER_S", "RankStatus", "read_all", "view_of"]

SILENT_AFTER_S = 5 * EVERY_S
"""A file that is older is of a rank that was killed or stopped, or whose disk or host is away."""
BUSY = ("busy_backward_s", "busy_forward_s", "busy_other_s", "busy_stalled_s")
COUNTS = ("bytes_sent", "bytes_received", "call_bytes_sent", "call_bytes_received", "stall_s", *BUSY)


@dataclass(frozen=True)
class RankStatus:
    """What is in one rank's file.

    Attributes:
        rank: Among all that meet: workers first, then servers.
        name: As users know it.
        job: Which, in hexadecimal digits.
        size: How many ranks the job has begun with.
        host: Where it runs.
        ended: Why, if it has.
        before: How it stood some time ago; see `penstock.live.live_status.standing_of`.
        now: How it stands.
    """

    rank: int
    name: str
    job: str
    size: int
    host: str
    ended: str | None
    before: Mapping[str, Any]
    now: Mapping[str, Any]

    def since(self, count: str) -> float:
        """By how much a count has grown between the two samples."""
        return float(self.now[count]) - float(self.before[count])

    @property
    def seconds(self) -> float:
        """Between the two samples; 0 if there is only one yet."""
        return max(0.0, self.since("clock_s"))


def read_all(directory: Path, job: str | None = None) -> tuple[list[RankStatus], list[str]]:
    """The ranks of one job, by number, and what could not be read.

    Args:
        directory: Where the files are.
        job: How its number begins; by default the one that was written to last.

    Raises:
        ConfigError: There is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory; ranks write there with PENSTOCK_STATUS={directory}")
    by_job: dict[str, dict[int, RankStatus]] = defaultdict(dict)
    unread = []
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        try:
            found = _read(path)
        except FileNotFoundError:
            continue  # somebody tidies up
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            unread.append(f"{path.name} cannot be read: {error}")
            continue
        if job is None or found.job.startswith(job):
            by_job[found.job][found.rank] = found
    if not by_job:
        return [], unread
    latest = max(by_job, key=lambda one: max(status.now["time_s"] for status in by_job[one].values()))
    return [by_job[latest][rank] for rank in sorted(by_job[latest])], unread


def _read(path: Path) -> RankStatus:
    said = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(said, dict) or said.get("penstock_status") != FORMAT:
        raise ValueError("it is of another version of Penstock, or no status")
    for sample in (said["before"], said["now"]):
        numbers = [sample[name] for name in (*COUNTS, "steps", "time_s", "clock_s")]
        layers = [layer for book in sample["books"] for layer in book["layers"]]
        numbers += [layer[name] for layer in layers for name in ("stall_s", "bytes_sent")]
        if not all(math.isfinite(float(number)) for number in numbers):
            raise ValueError("it says a number that cannot be")
    _check_late(said["now"]["late"])
    ended = None if said["ended"] is None else str(said["ended"])
    return RankStatus(
        int(said["rank"]),
        str(said["name"]),
        str(said["job"]),
        int(said["size"]),
        str(said["host"]),
        ended,
        said["before"],
        said["now"],
    )


def _check_late(late: Mapping[str, Any]) -> None:
    """Refuse what nobody could show."""
    judged, until, _ = late["judged_steps"], late["until_step"], late["why"]
    if not isinstance(late["ranks"], list) or not isinstance(judged, int) or (judged and not isinstance(until, int)):
        raise ValueError("what it says of who is late cannot be")
    for one in late["ranks"]:
        numbers = (one["rank"], one["late_ms"], one["step_ms"], *dict(one["causes_ms"]).values())
        if not all(math.isfinite(float(number)) for number in numbers):
            raise ValueError("it says a number that cannot be")
        sentence(one, "")


def view_of(ranks: Sequence[RankStatus], time_s: float) -> dict[str, Any]:
    """What is shown of them.

    Args:
        ranks: Of one job, at least one.
        time_s: The time of day.

    Returns:
        ``job``, ``size``, ``missing`` ranks; ``ranks``: of each steps, milliseconds of a step, Mbit/s, the share of the
        time that its program waited, the share of the time with something in flight that was hidden, by how many
        milliseconds it is late if it stands out, and for how long nothing was heard of it; ``late`` as
        `penstock.report` has it; ``layers``, those first that were waited for longest: shares of the time and Mbit/s,
        means of the ranks. What is not known yet is None.
    """
    late = _latest(ranks, time_s)
    late_ms = {one["rank"]: one["late_ms"] for one in late["ranks"]}
    shown = [{**_of_rank(one, time_s), "late_ms": late_ms.get(one.rank)} for one in ranks]
    size = max(one.size for one in ranks)
    here = {one.rank for one in ranks}
    return {
        "job": ranks[0].job[:8],
        "size": size,
        "missing": [rank for rank in range(size) if rank not in here],
        "ended": all(one.ended is not None for one in ranks),
        "ranks": shown,
        "late": late,
        "layers": _layers(ranks),
    }


def _of_rank(one: RankStatus, time_s: float) -> dict[str, Any]:
    seconds, steps = one.seconds, one.since("steps")
    busy_s = sum(one.since(name) for name in BUSY)
    age_s = max(0.0, time_s - float(one.now["time_s"]))
    return {
        "rank": one.rank,
        "name": one.name,
        "host": one.host,
        "steps": int(one.now["steps"]),
        "step_ms": 1e3 * seconds / steps if steps > 0 else None,
        "sent_mbit": _mbit(one, "sent"),
        "received_mbit": _mbit(one, "received"),
        "waited_share": one.since("stall_s") / seconds if seconds > 0 else None,
        "hidden_share": 1.0 - one.since("busy_stalled_s") / busy_s if busy_s > 0 else None,
        "age_s": age_s,
        "silent": _is_silent(one, time_s),
        "ended": one.ended,
    }


def _is_silent(one: RankStatus, time_s: float) -> bool:
    return one.ended is None and time_s - float(one.now["time_s"]) > SILENT_AFTER_S


def _latest(ranks: Sequence[RankStatus], time_s: float) -> Mapping[str, Any]:
    """Who is late, as was found last: all ranks find the same, but do not write at the same moment.

    Who has ended, or is silent, does not know it any more, unless all are so.
    """
    heard = [one for one in ranks if one.ended is None and not _is_silent(one, time_s)] or ranks
    said: list[Mapping[str, Any]] = [one.now["late"] for one in heard]
    return max(said, key=lambda late: int(late["until_step"]) if late["judged_steps"] else -1)


def _mbit(one: RankStatus, way: str) -> float | None:
    """Layers, messages and collectives."""
    nbytes = one.since(f"bytes_{way}") + one.since(f"call_bytes_{way}")
    return nbytes * 8 / 1e6 / one.seconds if one.seconds > 0 else None


def _layers(ranks: Sequence[RankStatus]) -> list[dict[str, Any]]:
    waited: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    timed = [one for one in ranks if one.seconds > 0]
    for one in timed:
        before = _by_layer(one.before)
        for key, layer in _by_layer(one.now).items():
            was = before.get(key, {"stall_s": 0.0, "bytes_sent": 0})
            waited[key][one.rank] = (float(layer["stall_s"]) - float(was["stall_s"])) / one.seconds
            sent[key] += (float(layer["bytes_sent"]) - float(was["bytes_sent"])) * 8 / 1e6 / one.seconds
    layers = [
        {
            "book": book,
            "layer": layer,
            "waited_share": sum(by_rank.values()) / len(timed),
            "waits_most": max(by_rank, key=lambda rank: (by_rank[rank], -rank)) if any(by_rank.values()) else None,
            "sent_mbit": sent[book, layer] / len(timed),
        }
        for (book, layer), by_rank in waited.items()
    ]
    return sorted(layers, key=lambda one: (-round(one["waited_share"], 3), -one["sent_mbit"]))


def _by_layer(sample: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(str(book["name"]), str(layer["name"])): layer for book in sample["books"] for layer in book["layers"]}

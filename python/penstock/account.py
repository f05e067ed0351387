"""What was communicated, as numbers and as text: of one rank (`penstock.report`), or of all (`summary`)."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.grouping import NONE_ASKED_FOR
from penstock.tracing.late import sentence

__all__ = [
    "Report",
    "communication_lines",
    "duration",
    "lateness_lines",
    "plural",
    "printable",
    "shortened",
    "size",
    "summary",
]

BUSY = ("backward", "forward", "stalled", "other")
NAME_WIDTH = 38
COLUMNS = 80


class Report(dict[str, Any]):
    """A rank's counts since `penstock.init`: a dictionary, with `render` for people.

    Example:
        >>> report = ps.report()
        >>> print(report["bytes_sent"])
        >>> print(report.render())
    """

    def render(self) -> str:
        """What this rank sent, received and waited for by layer, and what of it was hidden, for 80 columns."""
        heading = f"communication of rank {self['rank']} of {self['size']}"
        lines = communication_lines(summary([self]), 1, heading)
        rate = self["line_bytes_per_s"]
        line = "not measured" if rate is None else f"{rate * 8 / 1e6:,.0f} Mbit/s"
        if self["size"] > 1:
            lines.append(f"  line rate {line} ({self['line_rate_source']})")
        if near := self["through_memory"]:
            lines.append(f"  through shared memory: {plural(len(near), 'other rank')} of this host")
        if copies := self.get("copies"):
            moved = f"{size(copies['bytes'])} in {duration(copies['seconds'])}"
            lines.append(f"  copied between device and host: {moved}, {copies['hidden_share']:.0%} of it hidden")
        if groups := self.get("groups"):  # a server has none to tell
            groups = (", ".join(map(str, group)) for group in groups)
            lines.append(f"  ranks that sum among themselves: {'; '.join(groups)} ({self['groups_reason']})")
        elif self.get("groups_reason", NONE_ASKED_FOR) != NONE_ASKED_FOR:
            lines.append(f"  no ranks sum among themselves ({self['groups_reason']})")
        if self["lossy"]:
            lines.append("  LOSSY: " + ", ".join(f"{name} {scheme}" for name, scheme in self["lossy"].items()))
        if late := self.get("late"):
            for said in lateness_lines(late):
                lines += textwrap.wrap(said, COLUMNS, initial_indent="  ", subsequent_indent="    ")
        lines += [f"  NOT SYNCHRONOUS: {one}" for one in self.get("local_updates", [])]
        lines += [f"  NOT SYNCHRONOUS: {name} {_staleness(one)}" for name, one in self.get("asynchronous", {}).items()]
        return "\n".join([*lines, ""])


def _staleness(model: Mapping[str, Any]) -> str:
    """Of a model that is trained asynchronously, over all layers: how stale gradients were."""
    counts: Counter[int] = Counter()
    for histogram in model["staleness"].values():
        counts.update(histogram)
    if not counts:
        return "is trained asynchronously; no gradient has been answered yet"
    mean = sum(updates * times for updates, times in counts.items()) / counts.total()
    return f"is trained asynchronously; gradients were {mean:.1f} updates late on average, {max(counts)} at most"


def lateness_lines(late: Mapping[str, Any]) -> list[str]:
    """Who is late in a running job, for people: a line for each rank that others wait for, or one if there is none.

    Args:
        late: As a report has it. If nothing is known there is no line, and ``why`` says why.
    """
    if late["judged_steps"] and not late["ranks"]:
        return [f"nobody waits for one rank (steps until {late['until_step']:,} were looked at)"]
    return [sentence(one, f"rank {one['rank']}") for one in late["ranks"]]


def summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One account of a job from the reports of all its ranks, in rank order.

    Bytes are payload, summed over the workers. ``hidden`` holds shares of the time in which a worker had something in
    flight, by what its program did meanwhile.
    """
    busy_s = {name: sum(report[f"busy_{name}_s"] for report in reports) for name in BUSY}
    busy_total_s = sum(busy_s.values())
    owned = reports[0]["owned_bytes"]
    owned_mean = sum(owned) / len(owned) if owned else 0
    return {
        "bytes_sent": sum(report["bytes_sent"] for report in reports),
        "bytes_received": sum(report["bytes_received"] for report in reports),
        "layers": _layers(reports),
        "busy_s": busy_total_s / len(reports),
        "hidden": {name: busy_s[name] / busy_total_s if busy_total_s else 0.0 for name in BUSY},
        "stall_s": sum(report["stall_s"] for report in reports) / len(reports),
        "slices": sum(report["slices"] for report in reports),
        "preemptions": sum(report["preemptions"] for report in reports),
        "frames_sent": sum(report["frames_sent"] for report in reports),
        "lanes": reports[0]["lanes"],
        "pool_bytes_max": max(report["pool_bytes"] for report in reports),
        "servers": [{"rank": rank, "owned_bytes": count} for rank, count in enumerate(owned)],
        "servers_imbalance": max(owned) / owned_mean if owned_mean else 1.0,
    }


def _layers(reports: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    layers: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for book in report["books"]:
            for layer in book["layers"]:
                total = layers.setdefault(
                    (book["name"], layer["name"]),
                    {
                        "book": book["name"],
                        "name": layer["name"],
                        "bytes_sent": 0,
                        "bytes_received": 0,
                        "stall_s": 0.0,
                    },
                )
                total["bytes_sent"] += layer["bytes_sent"]
                total["bytes_received"] += layer["bytes_received"]
                total["stall_s"] += layer["stall_s"] / len(reports)
    return list(layers.values())


def communication_lines(communication: Mapping[str, Any], workers: int, heading: str) -> list[str]:
    """The text of a `summary`.

    Args:
        communication: The summary.
        workers: The ranks that it is of: bytes are shown per worker.
        heading: What stands over it.
    """
    lines = [f"{heading:<42}{'sent':>12}{'received':>12}{'waited for':>12}"]
    for book in dict.fromkeys(layer["book"] for layer in communication["layers"]):
        layers = [layer for layer in communication["layers"] if layer["book"] == book]
        lines.append(f"  {book}")
        lines += [
            f"    {shortened(layer['name']):<38}{size(layer['bytes_sent'] / workers):>12}"
            f"{size(layer['bytes_received'] / workers):>12}{duration(layer['stall_s']):>12}"
            for layer in layers
        ]
    lines.append(
        f"  {'all':<40}{size(communication['bytes_sent'] / workers):>12}"
        f"{size(communication['bytes_received'] / workers):>12}{duration(communication['stall_s']):>12}"
    )
    hidden = communication["hidden"]
    lines += [
        "",
        f"  something was in flight for {duration(communication['busy_s'])} per worker; of this",
        f"    {hidden['backward']:>6.1%}  was hidden under backward",
        f"    {hidden['forward']:>6.1%}  was hidden under forward",
        f"    {hidden['other']:>6.1%}  was hidden under other work of the program",
        f"    {hidden['stalled']:>6.1%}  was waited for",
        "",
        f"  {plural(communication['slices'], 'slice')}, {plural(communication['preemptions'], 'preemption')}, "
        f"{plural(communication['lanes'], 'lane')}; "
        f"buffers of {size(communication['pool_bytes_max'])} per worker at most",
        f"  servers hold {', '.join(size(server['owned_bytes']) for server in communication['servers'])} "
        f"(largest / mean {communication['servers_imbalance']:.3f})",
    ]
    return lines


def size(count_bytes: float | None) -> str:
    """Bytes in their unit: ``12 B``, ``1.5 MB``; ``-`` for none."""
    if count_bytes is None:
        return "-"
    for unit in ("B", "KB", "MB"):
        if count_bytes < 999.95:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} GB"


def duration(seconds: float) -> str:
    """Seconds in their unit: ``1.20 s``, ``3.5 ms``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 step``, ``1,000 steps``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortened(name: str, width: int = NAME_WIDTH) -> str:
    """A name in so many characters: its middle goes, since a model's names begin and end telling."""
    if len(name) <= width:
        return name
    head = (width - 3) // 2
    return f"{name[:head]}...{name[head + 3 - width :]}"


def printable(text: object) -> str:
    """Text of users without what cannot be shown, as control characters and halves of characters."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in str(text))

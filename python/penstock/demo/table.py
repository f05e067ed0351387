"""A demo's result as text for a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

CHECK_TITLES = {
    "accuracy": "held-out accuracy",
    "accuracy_difference": "accuracy, difference from one process",
    "distance_first": "parameters, distance after {first_steps} steps",
    "different_ranks": "ranks whose parameters differ in any bit",
}


def render(result: dict[str, Any]) -> str:
    """All of the result, in three parts: the job, the checks, the communication."""
    return "\n".join(["", *_job(result), "", *_checks(result), "", *_communication(result), ""])


def _job(result: dict[str, Any]) -> list[str]:
    rows = [
        ("data", f"{result['data']}, {result['train_images']:,} images, {result['held_out_images']:,} held out"),
        ("network", f"{result['parameters']:,} parameters"),
        (
            "training",
            f"{result['epochs']} epochs, {result['steps']:,} steps of {result['global_batch']} images, "
            f"seed {result['seed']}",
        ),
        (
            "time",
            f"{result['train_s']:.1f} s with {_plural(result['workers'], 'worker')} on this machine, "
            f"{result['train_one_process_s']:.1f} s in one process, {result['total_s']:.1f} s in all",
        ),
    ]
    return [f"{name:<10}{text}" for name, text in rows]


def _checks(result: dict[str, Any]) -> list[str]:
    lines = [f"{'compared with one process':<42}{'measured':>12}{'bound':>12}"]
    for check in result["checks"]:
        title = CHECK_TITLES[check["name"]].format(**result)
        low, high = check["at_least"], check["at_most"]
        bound = f"<= {_number(high)}" if low is None else f">= {_number(low)}"
        verdict = "ok" if check["ok"] else "FAILED"
        lines.append(f"  {title:<40}{_number(check['value']):>12}{bound:>12}  {verdict}")
    if all(check["name"] != "accuracy" for check in result["checks"]):
        lines.append(f"  {CHECK_TITLES['accuracy']:<40}{_number(result['accuracy']):>12}")
    lines.append(f"  {'accuracy of one process':<40}{_number(result['accuracy_one_process']):>12}")
    lines.append(f"  {'parameters, distance at the end':<40}{_number(result['distance_end']):>12}")
    return lines


def _communication(result: dict[str, Any]) -> list[str]:
    communication, workers = result["communication"], result["workers"]
    heading = f"communication, {_plural(communication['steps'], 'step')}, per worker"
    lines = [f"{heading:<42}{'sent':>12}{'received':>12}{'waited for':>12}"]
    for book in dict.fromkeys(layer["book"] for layer in communication["layers"]):
        layers = [layer for layer in communication["layers"] if layer["book"] == book]
        lines.append(f"  {book}")
        lines += [
            f"    {_cut(layer['name']):<38}{_size(layer['bytes_sent'] / workers):>12}"
            f"{_size(layer['bytes_received'] / workers):>12}{_time(layer['stall_s']):>12}"
            for layer in layers
        ]
    lines.append(
        f"  {'all':<40}{_size(communication['bytes_sent'] / workers):>12}"
        f"{_size(communication['bytes_received'] / workers):>12}{_time(communication['stall_s']):>12}"
    )
    hidden = communication["hidden"]
    lines += [
        "",
        f"  something was in flight for {_time(communication['busy_s'])} per worker; of this",
        f"    {hidden['backward']:>6.1%}  was hidden under backward",
        f"    {hidden['forward']:>6.1%}  was hidden under forward",
        f"    {hidden['other']:>6.1%}  was hidden under other work of the program",
        f"    {hidden['stalled']:>6.1%}  was waited for",
        "",
        f"  {_plural(communication['slices'], 'slice')}, {_plural(communication['preemptions'], 'preemption')}, "
        f"{_plural(communication['lanes'], 'lane')}; "
        f"buffers of {_size(communication['pool_bytes_max'])} per worker at most",
        f"  servers hold {', '.join(_size(server['owned_bytes']) for server in communication['servers'])} "
        f"(largest / mean {communication['servers_imbalance']:.3f})",
    ]
    return lines


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.1e}"


def _size(count_bytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} B" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} GB"


def _time(duration_s: float) -> str:
    return f"{duration_s:.2f} s" if duration_s >= 1 else f"{duration_s * 1e3:.1f} ms"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _cut(name: str, width: int = 38) -> str:
    return name if len(name) <= width else "..." + name[3 - width :]

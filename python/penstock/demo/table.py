"""A demo's result as text for a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from penstock.account import communication_lines, plural

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
            f"{result['train_s']:.1f} s with {plural(result['workers'], 'worker')} on this machine, "
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
    heading = f"communication, {plural(result['steps'], 'step')}, per worker"
    return communication_lines(result["communication"], result["workers"], heading)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if value == 0 or value >= 1e-3 else f"{value:.1e}"

"""All workers' reports as one: what was sent for which layer, and what of it was hidden under computing."""

from __future__ import annotations

from typing import Any

BUSY = ("backward", "forward", "stalled", "other")


def summary(reports: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """One account of a job from the reports of all its ranks, in rank order.

    Bytes are payload, summed over the workers. ``hidden`` holds shares of the time in which a worker had something in
    flight, by what its program did meanwhile.
    """
    busy_s = {name: sum(report[f"busy_{name}_s"] for report in reports) for name in BUSY}
    busy_total_s = sum(busy_s.values())
    owned = reports[0]["owned_bytes"]
    owned_mean = sum(owned) / len(owned) if owned else 0
    return {
        "steps": steps,
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


def _layers(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
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

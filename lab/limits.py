"""How fast a step can be, whoever schedules it: the limits that measurements are compared with.

The formulas of T*, T_wfbp and T_serial are the package's, in crates/core/src/cost/overlap.rs: ``penstock explain``
predicts by them, too.

Omitted: latency, headers, the time to sum and to update, and that a store's answer cannot leave before the last
contribution is in. They are what a measured ratio to T* shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.trace import LayerTime, Trace
from penstock._native import step_times

__all__ = ["Limits", "chosen_wire_s", "limits", "store_wire_s"]


@dataclass(frozen=True)
class Limits:
    """Seconds per step.

    Attributes:
        ideal_s: T*, with transfers under backward and forward.
        wfbp_s: T_wfbp, with transfers under backward alone.
        serial_s: T_serial, with no overlap.
        compute_s: Forward and backward of one worker alone.
    """

    ideal_s: float
    wfbp_s: float
    serial_s: float
    compute_s: float


def limits(times: Sequence[LayerTime], wire_s: Sequence[float]) -> Limits:
    """The limits of one step.

    Args:
        times: Forward and backward of each layer, in forward order.
        wire_s: Seconds that each layer needs on the busiest direction of a network interface.

    Raises:
        ValueError: There are no layers, not as many wire times as layers, or a time is negative.
    """
    if not times or len(times) != len(wire_s):
        raise ValueError(f"one wire time for each layer is needed, not {len(wire_s)} for {len(times)} layers")
    if min(wire_s) < 0 or min(min(time.forward_s, time.backward_s) for time in times) < 0:
        raise ValueError("times must not be negative")
    found = step_times(
        [(time.forward_s, time.backward_s, layer_s) for time, layer_s in zip(times, wire_s, strict=True)]
    )
    return Limits(**found)


def store_wire_s(trace: Trace, hosts: int, bytes_per_second: float, servers: int = 0) -> list[float]:
    """Seconds of each layer per direction with an evenly sharded store.

    With the shards in the workers a host pushes all but its own shard's part, and its shard answers all other hosts:
    2 (n - 1) / n times the layer's bytes. The same holds for rings. What the workers of one host sum among themselves
    counts once: no system need send more. With servers apart a host pushes the whole layer and receives all of it, and
    a server n / s times as much (Poseidon, table 1, with P1 = n and P2 = s): the more of the two counts.

    Args:
        trace: The network.
        hosts: How many hosts with workers, each with one interface.
        bytes_per_second: What an interface carries in one direction, measured rather than nominal.
        servers: How many servers apart from them, each with an interface of its own.

    Returns:
        One per layer, in forward order.

    Raises:
        ValueError: `hosts` or `bytes_per_second` is not positive.
    """
    if hosts < 1 or not bytes_per_second > 0:
        raise ValueError(f"hosts and bytes per second must be positive, not {hosts} and {bytes_per_second}")
    share = max(1.0, hosts / servers) if servers else 2.0 * (hosts - 1) / hosts
    return [share * layer.nbytes / bytes_per_second for layer in trace.layers]


def chosen_wire_s(
    trace: Trace,
    hosts: int,
    bytes_per_second: float,
    schemes: Mapping[str, str],
    wire_bytes: Mapping[str, int],
    servers: int = 0,
) -> list[float]:
    """As `store_wire_s`, where some layers send what their gradients are made of.

    Args:
        trace: The network.
        hosts: How many workers.
        bytes_per_second: What an interface carries in one direction.
        schemes: By layer; those that are missing use the store.
        wire_bytes: By layer what its scheme moves on the busiest direction of an interface.
        servers: How many servers apart from the workers.

    Returns:
        One per layer, in forward order.

    Raises:
        ValueError: As `store_wire_s`.
    """
    wire_s = store_wire_s(trace, hosts, bytes_per_second, servers)
    for place, layer in enumerate(trace.layers):
        if schemes.get(layer.name, "store") != "store":
            wire_s[place] = wire_bytes[layer.name] / bytes_per_second
    return wire_s

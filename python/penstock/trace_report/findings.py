"""What a page tells of the traces of a job, as plain numbers: all that is computed, and nothing of how it looks.

Pure. What is in the files, who is late and on which clocks is `penstock.tracing`'s to say; here spans of time are laid
over each other, and medians taken. Times of one rank are compared on its own clock, and put on the common one for what
several ranks do together.

A result has parts that may be missing: of a job without steps there are none, of one rank nobody is late, and older
traces do not say how they were started.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from penstock.prediction import ModelCost
from penstock.tracing.activities import Activities, TracedStep
from penstock.tracing.journeys import OUT, TracedFrame, journeys_of, wires_of
from penstock.tracing.merging import Merged, merge

__all__ = ["BINS", "HIDDEN", "PARTS", "TimeSpan", "both", "find", "length_ns", "union", "without"]

BINS = 400
"""Parts of the time that network use is counted in."""
PARTS = ("input", "forward", "backward", "update", "wait", "other")
"""What a step is made of; they add up to it. Waits and updates are no part of the phase that they lie in."""
HIDDEN = ("backward", "forward", "other", "waited")
"""What a program does while something of its is in flight."""
LAUNCHERS = {"torchrun": "torchrun, or penstock run"}
"""Those that start workers with the same variables cannot be told apart."""
PHASES = ("input", "forward", "backward", "between", "step")

TimeSpan = tuple[int, int]
"""From when until when, in nanoseconds. A list of them is in order, and none overlaps another."""

LayerKey = tuple[int, int]
"""Book and layer."""


def find(merged: Merged) -> dict[str, Any]:
    """All that a page tells.

    Args:
        merged: The ranks' traces.

    Returns:
        What `penstock.tracing.merging.merge` says, and:

        - ``job``, ``seconds`` from the first moment of all to the last, ``lost`` records and moments;
        - ``steps``: by rank how many, and how long its usual steps and their `PARTS` take, in milliseconds;
        - ``network``: by rank bytes sent and received in each of so many seconds, and the line rate;
        - ``hidden``: by rank, of the time with something in flight the shares of `HIDDEN`;
        - ``layers``: those whose gradients or parameters travelled, the ones first that were waited for longest;
        - ``prediction``: step times at best from measured times of computing, beside the measured step, or why none;
        - ``start``: how the ranks were started.
    """
    found = merge(merged, None, ())
    ranks: list[dict[str, Any]] = [{"rank": rank, "name": name} for rank, name in merged.names.items()]
    steps = {rank: _steps_of(activities) for rank, activities in merged.activities.items()}
    traffic, rounds, costs = _LayerBytes(merged), _Rounds(merged), _costs(merged)
    first = next(iter(merged.traces.values()))
    return {
        **{name: found[name] for name in ("ranks", "missing", "frames", "frame_ends_alone", "late", "asynchronous")},
        "job": f"{first.header['job'][:8]}-{first.header['number']}",
        "seconds": (_last_ns(merged) - merged.zero_ns()) / 1e9,
        "lost": sum(trace.lost + trace.dropped for trace in merged.traces.values()),
        "steps": [one | _usual_step(steps[one["rank"]]) for one in ranks if steps[one["rank"]]],
        "network": _network(merged),
        "hidden": [one | hidden for one in ranks if (hidden := _hidden(merged, one["rank"])) is not None],
        "layers": _layers(merged, traffic, rounds, costs),
        "prediction": _prediction(merged, steps, traffic, rounds, costs),
        "start": _start(merged),
    }


def _last_ns(merged: Merged) -> int:
    """The last moment of all, on the one clock."""
    lasts = [merged.clocks[rank](records[-1].time_ns) for rank, records in merged.records.items() if records]
    for rank, activities in merged.activities.items():
        lasts += [merged.clocks[rank](span.end_ns) for span in activities.program[-1:]]
    return max(lasts, default=0)


# Spans of time


def union(spans: Iterable[TimeSpan]) -> list[TimeSpan]:
    """All that is in any of these, which may overlap and come in any order."""
    found: list[TimeSpan] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > begin:
            found.append((begin, end))
    return found


def both(some: Sequence[TimeSpan], others: Sequence[TimeSpan]) -> list[TimeSpan]:
    """What is in both of two lists."""
    found: list[TimeSpan] = []
    i = j = 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if begin < end:
            found.append((begin, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length_ns(spans: Iterable[TimeSpan]) -> int:
    """How long they are together."""
    return sum(end - begin for begin, end in spans)


def without(spans: Sequence[TimeSpan], others: Sequence[TimeSpan]) -> list[TimeSpan]:
    """What is in the first list and not in the second."""
    found: list[TimeSpan] = []
    first = 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        at, place = begin, first
        while place < len(others) and others[place][0] < end:
            if others[place][0] > at:
                found.append((at, others[place][0]))
            at = max(at, others[place][1])
            place += 1
        if at < end:
            found.append((at, end))
    return found


def _within(spans: Sequence[TimeSpan], begin_ns: int, end_ns: int) -> int:
    """How much of these lies between two moments."""
    found = 0
    place = max(0, bisect.bisect(spans, (begin_ns, end_ns)) - 1)
    while place < len(spans) and spans[place][0] < end_ns:
        found += max(0, min(spans[place][1], end_ns) - max(spans[place][0], begin_ns))
        place += 1
    return found


# Steps


def _by_kind(activities: Activities) -> dict[str, list[TimeSpan]]:
    """When the program was in which phase, waited or updated; waits count before updates, and both before phases."""
    spans: dict[str, list[TimeSpan]] = {kind: [] for kind in (*PHASES, "wait", "update")}
    for one in activities.program:
        if one.layer is None or one.kind in ("wait", "update"):
            spans[one.kind].append((one.begin_ns, one.end_ns))
    waits = union(spans["wait"])
    updates = without(union(spans["update"]), waits)
    apart = union([*waits, *updates])
    phases = {kind: without(union(spans[kind]), apart) for kind in PHASES}
    return {**phases, "wait": waits, "update": updates}


def _steps_of(activities: Activities) -> list[tuple[TracedStep, dict[str, int]]]:
    """Each step, and how long each of its `PARTS` was, in nanoseconds."""
    kinds = _by_kind(activities)
    found = []
    for step in activities.steps:
        took = {part: _within(kinds[part], step.begin_ns, step.end_ns) for part in PARTS if part != "other"}
        took["other"] = step.end_ns - step.begin_ns - sum(took.values())
        found.append((step, took))
    return found


def _usual_step(steps: Sequence[tuple[TracedStep, Mapping[str, int]]]) -> dict[str, Any]:
    """Means of the usual steps: without the quarter that is shortest and the one that is longest.

    Medians of the parts would not add up to that of the step.
    """
    by_length = sorted(steps, key=lambda one: one[0].end_ns - one[0].begin_ns)
    outside = len(steps) // 4
    usual = by_length[outside : len(steps) - outside]
    return {
        "steps": len(steps),
        "step_ms": statistics.fmean(step.end_ns - step.begin_ns for step, _ in usual) / 1e6,
        "parts_ms": {part: statistics.fmean(took[part] for _, took in usual) / 1e6 for part in PARTS},
    }


# The network


def _network(merged: Merged) -> dict[str, Any]:
    """Bytes by rank in each part of the time. Of several hosts what goes between them; else all."""
    hosts = {rank: str(trace.header["host"]) for rank, trace in merged.traces.items()}
    between = len(set(hosts.values())) > 1
    zero_ns = merged.zero_ns()
    bin_ns = max(1, -(-(_last_ns(merged) - zero_ns) // BINS))  # rounded up: all is within
    sent = {rank: [0.0] * BINS for rank in merged.traces}
    received = {rank: [0.0] * BINS for rank in merged.traces}
    ways: dict[tuple[int, int], list[TracedFrame]] = defaultdict(list)
    for frame in merged.frames:
        if not between or hosts[frame.source] != hosts[frame.target]:
            ways[frame.source, frame.target].append(frame)
    for (source, target), frames in ways.items():
        on_one = (frame.on(merged.clocks[source], merged.clocks[target]) for frame in frames)
        for frame, begin_ns in wires_of(on_one):
            window = begin_ns - zero_ns, frame.arrived_ns - zero_ns
            for place, share in _shares(window, bin_ns):
                sent[source][place] += share * frame.record.payload_bytes
                received[target][place] += share * frame.record.payload_bytes
    given = (trace.header.get("start") for trace in merged.traces.values())
    rates = [start["line_bytes_per_s"] for start in given if isinstance(start, dict) and "line_bytes_per_s" in start]
    return {
        "between_hosts": between,
        "bin_s": bin_ns / 1e9,
        "sent_bytes": sent,
        "received_bytes": received,
        "line_bytes_per_s": rates[0] if rates and isinstance(rates[0], (int, float)) else None,
    }


def _shares(window: TimeSpan, bin_ns: int) -> Iterator[tuple[int, float]]:
    """In which parts of the time this window is, and with how much of itself."""
    begin, end = window
    first, last = (min(max(0, at // bin_ns), BINS - 1) for at in window)
    if first == last:
        yield first, 1.0
        return
    for place in range(first, last + 1):
        inside = min(end, (place + 1) * bin_ns) - max(begin, place * bin_ns)
        yield place, inside / (end - begin)


# What was hidden


def _hidden(merged: Merged, rank: int) -> dict[str, Any] | None:
    """What the program did while something of it was in flight; None if nothing was."""
    in_flight = union((journey.begin_ns, journey.landed_ns) for journey in journeys_of(merged.records[rank]))
    total = length_ns(in_flight)
    if total == 0:
        return None
    kinds = _by_kind(merged.activities[rank])
    took = {kind: length_ns(both(in_flight, kinds[kind])) for kind in ("backward", "forward", "wait")}
    shares = {"backward": took["backward"] / total, "forward": took["forward"] / total, "waited": took["wait"] / total}
    return {
        "in_flight_s": total / 1e9,
        "shares": {name: shares.get(name, max(0.0, 1.0 - sum(shares.values()))) for name in HIDDEN},
    }


# Layers


def _costs(merged: Merged) -> dict[int, ModelCost]:
    """By book of gradients what the cost model says of its layers, as far as traces have it."""
    found: dict[int, ModelCost] = {}
    for trace in merged.traces.values():
        for number, book in enumerate(trace.books):
            if number not in found and isinstance(book.get("cost"), dict):
                with contextlib.suppress(ValueError):
                    found[number] = ModelCost.read(book["cost"])
    return found


class _LayerBytes:
    """Bytes of layers, by sender, and by host and direction as an interface sees them.

    Ranks of a job on one host have no interface between them: each counts as a host of its own, as in the cost model.
    """

    def __init__(self, merged: Merged) -> None:
        hosts = {rank: str(trace.header["host"]) for rank, trace in merged.traces.items()}
        if len(set(hosts.values())) == 1:
            hosts = {rank: str(rank) for rank in hosts}
        self.sent: dict[LayerKey, int] = defaultdict(int)
        self._by_way: dict[LayerKey, dict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        for rank, records in merged.records.items():
            for record in records:
                if record.point != OUT:
                    continue
                key, nbytes = (record.book, record.layer), record.payload_bytes
                self.sent[key] += nbytes
                here, there = hosts[rank], hosts.get(record.peer)
                if here != there:
                    self._by_way[key][here, "out"] += nbytes
                    if there is not None:
                        self._by_way[key][there, "in"] += nbytes

    def busiest(self, rounds: Mapping[LayerKey, int]) -> float:
        """Of these layers, which have made so many rounds, bytes of one on the busiest direction of an interface."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for key, count in rounds.items():
            for way, nbytes in self._by_way[key].items():
                total[way] += nbytes / count
        return max(total.values(), default=0.0)


class _Rounds:
    """Of each layer how many rounds there were, and how long each was in flight on each rank, in nanoseconds."""

    def __init__(self, merged: Merged) -> None:
        seqs: dict[LayerKey, set[int]] = defaultdict(set)
        self.flights: dict[LayerKey, list[int]] = defaultdict(list)
        for records in merged.records.values():
            windows: dict[tuple[int, int, int], TimeSpan] = {}
            for journey in journeys_of(records):
                name = journey.record.book, journey.record.layer, journey.record.seq
                begin, end = windows.get(name, (journey.begin_ns, journey.landed_ns))
                windows[name] = min(begin, journey.begin_ns), max(end, journey.landed_ns)
            for (book, layer, seq), (begin, end) in windows.items():
                seqs[book, layer].add(seq)
                self.flights[book, layer].append(end - begin)
        self.count = {key: len(of_layer) for key, of_layer in sorted(seqs.items())}


def _layers(
    merged: Merged, traffic: _LayerBytes, rounds: _Rounds, costs: Mapping[int, ModelCost]
) -> list[dict[str, Any]]:
    """Of each layer bytes, waits and time in flight, in one round."""
    waits: dict[LayerKey, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for rank, activities in merged.activities.items():
        for one in activities.program:
            if one.kind == "wait" and one.layer is not None:
                waits[one.layer][rank] += one.end_ns - one.begin_ns
    by_name = {book: {layer.name: layer for layer in cost.layers} for book, cost in costs.items()}
    found = []
    for key, count in rounds.count.items():
        name, waited = merged.called.layer(*key), waits[key]
        cost = by_name.get(key[0], {}).get(name)
        found.append(
            {
                "book": merged.called.book(key[0]),
                "layer": name,
                "rounds": count,
                "sent_bytes": traffic.sent[key] / len(merged.traces) / count,
                "wait_ms": sum(waited.values()) / len(merged.traces) / count / 1e6,
                "waits_most": max(waited, key=lambda rank: (waited[rank], -rank)) if waited else None,
                "in_flight_ms": statistics.median(rounds.flights[key]) / 1e6,
                "direction_bytes": traffic.busiest({key: count}),
                "scheme": None if cost is None else cost.scheme,
                "predicted_bytes": None if cost is None else cost.direction_bytes,
            }
        )
    return sorted(found, key=lambda one: (-one["wait_ms"], -one["in_flight_ms"]))


# Predicted beside measured


def _prediction(
    merged: Merged,
    steps: Mapping[int, Sequence[tuple[TracedStep, Mapping[str, int]]]],
    traffic: _LayerBytes,
    rounds: _Rounds,
    costs: Mapping[int, ModelCost],
) -> dict[str, Any]:
    """Step times at best from what the slowest rank computed, beside the measured step; or why there is none."""
    of_ranks = {rank: of_rank for rank, of_rank in steps.items() if any(step.gradients for step, _ in of_rank)}
    books = {book for of_rank in of_ranks.values() for step, _ in of_rank for book, _ in step.gradients}
    if not books:
        return {"why_not": "there are no steps with gradients in these traces"}
    if len(books) > 1:
        return {"why_not": "several models are trained in one step, and the cost model knows the step of one"}
    (book,) = books
    if book in merged.asynchronous:
        return {"why_not": "training is asynchronous: no step waits for the others' gradients"}
    if book not in costs:
        return {"why_not": "these traces do not say what the cost model knows of the layers"}
    cost = _of_what_travels(merged, book, costs[book], traffic)
    computed = {rank: _computed(merged, rank, of_rank, book, cost) for rank, of_rank in of_ranks.items()}
    slowest = max(computed, key=lambda rank: (sum(f + b for _, f, b in computed[rank]), -rank))
    if not any(backward_s > 0.0 for _, _, backward_s in computed[slowest]):
        return {"why_not": "no backward of a layer is in these traces"}
    counted = {key: count for key, count in rounds.count.items() if key[0] == book}
    medians = [statistics.median(step.end_ns - step.begin_ns for step, _ in of_rank) for of_rank in of_ranks.values()]
    return {
        "why_not": None,
        "book": merged.called.book(book),
        "slowest": slowest,
        "times": asdict(cost.step_times(computed[slowest])),
        "measured_s": statistics.median(medians) / 1e9,
        "predicted_bytes": sum(layer.direction_bytes for layer in cost.layers),
        "direction_bytes": traffic.busiest(counted),
    }


def _of_what_travels(merged: Merged, book: int, cost: ModelCost, traffic: _LayerBytes) -> ModelCost:
    """Without layers of which nothing was sent in these steps, as frozen ones: the cost model has all of the model."""
    sent = {merged.called.layer(*key) for key, nbytes in traffic.sent.items() if key[0] == book and nbytes}
    return replace(cost, layers=tuple(layer for layer in cost.layers if layer.name in sent)) if sent else cost


def _computed(
    merged: Merged,
    rank: int,
    steps: Sequence[tuple[TracedStep, Mapping[str, int]]],
    book: int,
    cost: ModelCost,
) -> list[tuple[str, float, float]]:
    """Of each layer in forward order its name, and how long its forward and backward took in the median of steps.

    All together are the phases of those names without waits and updates: what belongs to no layer is spread over them,
    and so is a forward in which single layers are not seen, as in a compiled model.
    """
    took = {kind: defaultdict[LayerKey, dict[int, int]](dict) for kind in ("forward", "backward")}
    begun: dict[LayerKey, int] = {}
    ends = [step.end_ns for step, _ in steps]
    for one in merged.activities[rank].program:
        if one.kind not in took or one.layer is None or one.layer[0] != book:
            continue
        place = bisect.bisect(ends, one.begin_ns)
        if place < len(ends):
            of_step = took[one.kind][one.layer]
            if one.kind == "forward" and place not in of_step:  # the last step counts: the first may have begun before
                begun[one.layer] = one.begin_ns - steps[place][0].begin_ns
            of_step[place] = of_step.get(place, 0) + one.end_ns - one.begin_ns
    seen = [layer for step, _ in steps for layer in step.gradients if layer[0] == book]
    # In the order of their first forwards; else in that of gradients, which come the other way round.
    backwards = {layer: -place for place, layer in enumerate(dict.fromkeys(seen))}
    layers = sorted({*begun, *backwards}, key=lambda layer: (begun.get(layer, 0), backwards.get(layer, 1)))

    def median_s(kind: str, layer: LayerKey) -> float:
        of_step = took[kind][layer]
        return statistics.median(of_step.get(place, 0) for place in range(len(steps))) / 1e9

    times = {kind: [median_s(kind, layer) for layer in layers] for kind in took}
    if not any(times["forward"]):
        times["forward"] = times["backward"]
    for kind, of_layers in times.items():
        phase_s, all_s = statistics.median(parts[kind] for _, parts in steps) / 1e9, sum(of_layers)
        times[kind] = [one * phase_s / all_s if all_s else 0.0 for one in of_layers]
    names = [merged.called.layer(*layer) for layer in layers]
    unseen = [(layer.name, 0.0, 0.0) for layer in cost.layers if layer.name not in set(names)]
    return [*zip(names, times["forward"], times["backward"], strict=True), *unseen]


# How it was started


def _start(merged: Merged) -> list[dict[str, Any]]:
    """What each rank says of how it was started: for each subject the different values, and which ranks have them."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank, trace in merged.traces.items():
        for what, value in _started(trace.header).items():
            found.setdefault(what, {}).setdefault(value, []).append(rank)
    return [
        {"what": what, "values": [{"value": value, "ranks": ranks} for value, ranks in values.items()]}
        for what, values in found.items()
    ]


def _started(header: Mapping[str, Any]) -> dict[str, str]:
    """Of one rank, as text. What each has for itself (its number, its address) is left out."""
    start = header.get("start")
    said = {"host": str(header["host"]), "Penstock": str(header.get("penstock", "unknown"))}
    if not isinstance(start, dict):
        return said
    met = start.get("met_at")
    said |= {
        "program": str(start.get("program")),
        "launcher": LAUNCHERS.get(str(start.get("launcher")), str(start.get("launcher"))),
        "met at": f"{met[0]} ({met[1]})" if isinstance(met, list) and len(met) == 2 else "no place",
        "Python": str(start.get("python")),
        "PyTorch": str(start.get("torch")),
        "processors": str(start.get("cores")),
        "groups": str(start.get("groups_reason")),
    }
    rate = start.get("line_bytes_per_s")
    if isinstance(rate, (int, float)):
        said["line rate"] = f"{rate * 8 / 1e6:,.0f} Mbit/s ({start.get('rates_source')})"
    options = start.get("options")
    for name, given in options.items() if isinstance(options, dict) else ():
        if name != "rank" and isinstance(given, list) and len(given) == 2:
            said[f"option {name}"] = f"{given[0]} ({given[1]})"
    return said

"""Traces of a job that never ran: every time in them is chosen, so that what is found in them can be said beforehand.

A step of any rank, in milliseconds: input, then a wait for layer 0, an update, the layers' forwards, their backwards, a
moment, and `step`. Each layer is one slice in the store, owned by rank `layer % ranks`. Gradients leave at once and are
back after `FLIGHT_NS`; but those of layer 0 come just when the next step's wait ends.
"""

import struct

from penstock._native import RECORD
from penstock.tracing import journeys
from penstock.tracing import moments as m
from penstock.tracing.trace_file import SUFFIX, TraceFile

MS, US = 1_000_000, 1_000
INPUT, WAIT, UPDATE, FORWARD, BACKWARD, BETWEEN, STEP = 5 * MS, 4 * MS, 1 * MS, 1 * MS, 2 * MS, 1 * MS, 1 * MS
WIRE, QUEUE, SUM, LANDING = 200 * US, 10 * US, 50 * US, 10 * US
TO_OWNER = 2 * QUEUE + WIRE
OWN_FLIGHT = TO_OWNER + SUM + LANDING
FLIGHT = TO_OWNER + SUM + QUEUE + WIRE + LANDING
NBYTES = 10_000
"""Of each layer's gradient."""
PUSH, ANSWER = 1, 3
BOOK = "model0.gradients"
START = {
    "launcher": "torchrun",
    "met_at": ["tcp://10.0.0.1:29500", "torchrun's MASTER_ADDR"],
    "options": {"lanes": ["2", "environment variable PENSTOCK_LANES"]},
    "address": "10.0.0.1:1234",
    "program": "train.py",
    "python": "3.11.2",
    "torch": "2.15.0",
    "cores": 2,
    "line_bytes_per_s": 125e6,
    "latency_s": 1e-4,
    "rates_source": "measured",
    "groups_reason": "none asked for",
}


def step_ns(layers, late_ms=0):
    return INPUT + WAIT + UPDATE + layers * (FORWARD + BACKWARD) + BETWEEN + STEP + late_ms * MS


def cost_of(names, ranks):
    """What a coordinator would say, at 1 Gbit/s."""
    nbytes = round(2 * NBYTES * (ranks - 1) / ranks)
    wire_s = nbytes / 125e6
    return {
        "n_worker": ranks,
        "ring_bytes_per_s": 125e6,
        "layers": [
            {
                "name": name,
                "scheme": "store",
                "gradient_bytes": NBYTES,
                "direction_bytes": nbytes,
                "store_wire_s": wire_s,
                "wire_s": wire_s,
                "rebuild_s": 0.0,
            }
            for name in names
        ],
    }


class Made:
    """Records and moments of all ranks, as they are written.

    Args:
        ranks: How many.
        layers: How many.
        steps: How many.
        late: The rank whose input takes longer, while the others wait for longer; and by how many milliseconds.
    """

    def __init__(self, ranks, layers, steps, late=None):
        self.ranks, self.layers, self.steps = ranks, layers, steps
        self.late_rank, self.late_ms = late or (None, 0)
        self.step = step_ns(layers, self.late_ms)
        self.records = {rank: [] for rank in range(ranks)}
        self.moments = {rank: [] for rank in range(ranks)}
        for number in range(steps):
            for rank in range(ranks):
                self._program(rank, number * self.step)
            for layer in range(layers):
                self._round(layer, number)

    def _shift(self, rank):
        return self.late_ms * MS if rank == self.late_rank else 0

    def _waited_until(self, rank, base):
        return base + INPUT + WAIT + self._shift(rank)

    def _gradient(self, rank, layer, base):
        """When it is ready."""
        forward = self._waited_until(rank, base) + UPDATE + self.layers * FORWARD
        return forward + (self.layers - layer) * BACKWARD

    def _program(self, rank, base):
        def note(at, moment, layer=m.NO_LAYER):
            self.moments[rank].append((base_of_all + at, m.coded(moment, 0, layer)))

        # Who is not late has ended its last step earlier, and waits for longer.
        waits_from = base + INPUT + (self._shift(rank) or -self.late_ms * MS)
        at = self._waited_until(rank, base)
        note(waits_from, m.WAIT_BEGINS, 0)
        note(at, m.WAIT_ENDS, 0)
        note(at, m.UPDATE_BEGINS, 0)
        at += UPDATE
        note(at, m.UPDATE_ENDS, 0)
        for layer in range(self.layers):
            note(at + layer * FORWARD, m.FORWARD, layer)
        at += self.layers * FORWARD
        note(at, m.BACKWARD_BEGINS)
        for layer in reversed(range(self.layers)):
            note(self._gradient(rank, layer, base), m.GRADIENT, layer)
        at += self.layers * BACKWARD
        note(at, m.BACKWARD_ENDS)
        note(at + BETWEEN, m.STEP_BEGINS)
        note(at + BETWEEN + STEP, m.STEP_ENDS)

    def _round(self, layer, number):
        owner, seq = layer % self.ranks, number + 1
        ready = {rank: self._gradient(rank, layer, number * self.step) for rank in range(self.ranks)}
        last = max(ready.values())

        def record(rank, at, point, peer=-1, kind=0, nbytes=NBYTES):
            packed = (base_of_all + at, seq, layer, layer, nbytes, peer, 0, point, kind)
            self.records[rank].append(packed)

        others = [rank for rank in range(self.ranks) if rank != owner]
        for rank in range(self.ranks):
            record(rank, ready[rank], journeys.SUBMITTED)
        for rank in others:
            record(rank, ready[rank] + QUEUE, journeys.QUEUED, owner, PUSH)
            record(rank, ready[rank] + 2 * QUEUE, journeys.OUT, owner, PUSH)
            record(owner, ready[rank] + TO_OWNER, journeys.ARRIVED, rank, PUSH)
        summed = last + TO_OWNER + SUM
        record(owner, summed, journeys.SUMMED)
        record(owner, summed + LANDING, journeys.LANDED)
        for rank in others:
            back = summed + QUEUE + WIRE
            if layer == 0:  # it comes just when the program has waited for it
                back = max(back, (number + 1) * self.step + INPUT + WAIT - LANDING)
            record(owner, summed, journeys.ANSWERED, rank, ANSWER)
            record(owner, summed + QUEUE, journeys.OUT, rank, ANSWER)
            record(rank, back, journeys.ARRIVED, owner, ANSWER)
            record(rank, back + LANDING, journeys.LANDED)

    def write(self, directory, names=None, *, hosts=1, start=START, cost=True, job="ab" * 16, rank_names=None):
        """A file for each rank.

        Args:
            directory: Where.
            names: Of the layers.
            hosts: Ranks are dealt to so many in turn.
            start: What each says of how it was started, or nothing.
            cost: Whether the cost model has said something.
            job: Which.
            rank_names: As users know them.
        """
        directory.mkdir(parents=True, exist_ok=True)
        names = [f"layer{number}" for number in range(self.layers)] if names is None else names
        book = {"name": BOOK, "layers": names, "asynchronous": False}
        if cost:
            book["cost"] = cost_of(names, self.ranks)
        for rank in range(self.ranks):
            header = {
                "job": job,
                "number": 1,
                "rank": rank,
                "name": f"rank {rank}" if rank_names is None else rank_names[rank],
                "size": self.ranks,
                "workers": self.ranks,
                "lanes": 1,
                "pid": 100 + rank,
                "host": f"node{rank % hosts}",
                "boot": "one machine",
                "steps": [0, self.steps],
                "penstock": "1.2.3",
                "record": RECORD,
                **({} if start is None else {"start": start}),
            }
            file = TraceFile(directory / f"rank-{rank}.{job[:8]}-1{SUFFIX}", header)
            file.books([book])
            pack = struct.Struct("<QIIIIiHBB").pack
            file.block("records", b"".join(pack(*one) for one in self.records[rank]), 0)
            file.block("moments", b"".join(struct.pack("<qq", *one) for one in self.moments[rank]), 0)
            file.end(slices=self.layers * self.steps, why=f"{self.steps} steps")
        return directory


base_of_all = 1_000_000 * MS
"""No clock begins at 0."""

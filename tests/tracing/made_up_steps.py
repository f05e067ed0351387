"""Steps of some ranks that are made up: what each program did, and the frames between them."""

import random
import struct
from array import array

from penstock.tracing import moments as m
from penstock.tracing.activities import Activities, Activity, TracedStep
from penstock.tracing.journeys import ANSWERED, ARRIVED, OUT, QUEUED, SUBMITTED, Record, TracedFrame

MS = 1_000_000
BOOK, LAYERS = 1, 4
PUSH, ANSWER = 1, 3
EVEN = {"input": 3, "answers": 10, "update": 2, "forward": 20, "layer": 8, "between": 1, "step": 1, "push": 3}
"""Milliseconds of each part of a step; backward has a part for each layer, from the last to the first."""


class MadeUp:
    """Steps of some ranks, of which each one has what `slow` says beyond the even.

    Nobody goes on before the last one's contributions are there; who comes early waits for longer.

    Args:
        slow: By rank and part of `EVEN`, or ("layer", which), or "link", milliseconds more. Of a link: what answers to
            this rank and from it take more; of "link out" and "link in" those in one direction.
        steps: How many.
        ranks: How many.
        skew_ms: By how much the clock of each rank is ahead of that of the one before.
        jitter: The parts of all ranks differ by up to so much of themselves.
        seed: Of that.
    """

    def __init__(self, slow, steps=6, ranks=3, skew_ms=1000, jitter=0.01, seed=1):
        self.rng = random.Random(seed)
        self.slow, self.ranks, self.skew_ms, self.jitter = slow, ranks, skew_ms, jitter
        self.activities = {rank: Activities() for rank in range(ranks)}
        self.frames = []
        start = 0.0  # when all have contributed to the step before
        for number in range(steps):
            ends = [self.step(rank, number, start) for rank in range(ranks)]
            start = max(ends)

    def local(self, rank, at_ms):
        return round((at_ms + rank * self.skew_ms) * MS)

    @property
    def clocks(self):
        return {rank: (lambda at, rank=rank: at - rank * self.skew_ms * MS) for rank in range(self.ranks)}

    def took(self, rank, part):
        even = EVEN[part if isinstance(part, str) else part[0]]
        return even * (1 + self.jitter * self.rng.random()) + self.slow.get(rank, {}).get(part, 0)

    def delay(self, source, target):
        """Of an answer."""
        out = [self.slow.get(source, {}).get(link, 0) for link in ("link", "link out")]
        into = [self.slow.get(target, {}).get(link, 0) for link in ("link", "link in")]
        return EVEN["answers"] * (1 + self.jitter * self.rng.random()) + sum(out) + sum(into)

    def step(self, rank, number, start):
        """One rank's; returns when its contributions are at their owners."""
        of_rank = self.activities[rank]
        program, local = of_rank.program, lambda at: self.local(rank, at)
        begin = of_rank.steps[-1].end_ns if number else local(start)
        at = begin / MS - rank * self.skew_ms
        program.append(Activity("input", None, begin, local(at := at + self.took(rank, "input"))))
        forward = Activity("forward", None, local(at), 0)
        program.append(forward)
        # Answers leave when all contributions are there.
        answers = [self.delay(source, rank) for source in range(self.ranks) if source != rank]
        for source, took in zip((other for other in range(self.ranks) if other != rank), answers, strict=True):
            self.frame(source, rank, number, ANSWER, start, start + took)
        came = max(at, start + max(answers, default=0))
        program.append(Activity("wait", (BOOK, 0), local(at), local(came)))
        program.append(Activity("update", (BOOK, 0), local(came), local(at := came + self.took(rank, "update"))))
        forward.end_ns = local(at := at + self.took(rank, "forward"))
        backward, gradients = Activity("backward", None, local(at), 0), {}
        program.append(backward)
        for layer in reversed(range(LAYERS)):
            at += self.took(rank, "layer") + self.slow.get(rank, {}).get(("layer", layer), 0)
            gradients[BOOK, layer] = local(at)
        there = at + self.took(rank, "push")
        for other in range(self.ranks):
            if other != rank:
                self.frame(rank, other, number, PUSH, at, there)
        backward.end_ns = local(at)
        for phase in ("between", "step"):
            program.append(Activity(phase, None, local(at), local(at := at + self.took(rank, phase))))
        of_rank.steps.append(TracedStep(number, begin, local(at), gradients))
        return there

    def frame(self, source, target, number, kind, queued_ms, there_ms):
        queued, there = self.local(source, queued_ms), self.local(target, there_ms)
        record = Record(queued, number, 0, 0, 100, target, BOOK, OUT, kind)
        self.frames.append(TracedFrame(source, target, record, kind == ANSWER, queued, queued, there))


# As they are kept on a rank

RECORD = struct.Struct("<QIIIIiHBB")
PROBE_BOOK = BOOK + 6
FIRST_SEQ, FIRST_PROBE = 11, 4


def noted(*those):
    """Packed, as `Moments.take` gives them: times, moments, layers."""
    numbers = array("q")
    for at, what, layer in those:
        numbers.extend((at, m.coded(what, BOOK, layer)))
    return numbers.tobytes()


def kept(rank, peer, steps, *, unit=1, start=0, late=0, is_late=False, probe_book=PROBE_BOOK, first_probe=FIRST_PROBE):
    """Moments and records of some steps of 1000 units, with a slice of each of two ranks, and a probe in each.

    If one of the ranks is late, in its input, both take so much longer for a step; the other waits.
    """
    input_late, wait_late = (late, 0) if is_late else (0, late)
    moments, records = [(start - wait_late, m.STEP_ENDS, m.NO_LAYER)], []
    for step in range(steps):
        base, seq = start + step * (1000 + late), step + FIRST_SEQ
        begin = base + input_late
        moments += [
            (begin - wait_late + 100, m.FORWARD, 0),
            (begin - wait_late + 110, m.WAIT_BEGINS, 0),
            (begin + 150, m.WAIT_ENDS, 0),
            (begin + 400, m.BACKWARD_BEGINS, m.NO_LAYER),
            (begin + 500, m.GRADIENT, 1),
            (begin + 600, m.GRADIENT, 0),
            (begin + 610, m.BACKWARD_ENDS, m.NO_LAYER),
            (begin + 700, m.STEP_BEGINS, m.NO_LAYER),
            (begin + 1000, m.STEP_ENDS, m.NO_LAYER),
        ]

        def record(at, of_slice, point, kind, book=BOOK, peer=peer, begin=begin, seq=seq):
            time_ns = unit * (begin + at)
            records.append((time_ns, RECORD.pack(time_ns, seq, 0, of_slice, 8, peer, book, point, kind)))

        own, other = rank, peer
        record(390, own, ARRIVED, PUSH)  # before the slice is submitted here
        record(600, own, SUBMITTED, 0, peer=-1)
        record(600, other, SUBMITTED, 0, peer=-1)
        record(605, other, QUEUED, PUSH)
        record(608, other, OUT, PUSH)
        record(650, own, ANSWERED, ANSWER)
        record(655, own, OUT, ANSWER)
        record(690, other, ARRIVED, ANSWER)
        # Rank 0 sends its probe when it is there; rank 1 answers when both are.
        out = 410 + (late if is_late == (rank == 0) else 0)
        mine = ((out, OUT), (450 + late, ARRIVED)) if rank == 0 else ((out + 10, ARRIVED), (440 + late, OUT))
        for at, point in mine:
            record(at - input_late, 0, point, PUSH, book=probe_book, seq=step + first_probe)
        record(300, 1, OUT, PUSH, book=probe_book)  # another slice of that book
        record(301, own, SUBMITTED, 0, book=BOOK + 1, peer=-1)  # and another book
    packed = b"".join(of_one for _, of_one in sorted(records, key=lambda one: one[0]))
    return noted(*((unit * at, what, layer) for at, what, layer in moments)), packed

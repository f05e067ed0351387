"""One run: a job, a fault in one rank at a random moment, and what became of the others."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from scene import GRACE_S, PEER_TIMEOUT_S, Rank, Ranks, processes_of_session

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1, "hang": signal.SIGUSR2}
HANG_LIMIT_S = 10.0
"""operation_timeout_s where a rank hangs: longer than a busy machine needs for a step."""
MOMENT_S_MAX = 0.8
MOMENT_AT_START_S_MAX = 0.12
START_LIMIT_S = 6.0
"""rendezvous_timeout_s where the fault comes while the ranks are still meeting."""


@dataclass(frozen=True)
class Fault:
    """What happens to whom, and when.

    Attributes:
        kind: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (an exception that nobody catches) or
            ``hang`` (its program stands still, its process lives).
        size: The number of ranks.
        victim: Who is hit.
        delay_s: This long after every rank has begun to train, or, `at_start`, after all have been started.
        torch: Whether the ranks train a model; otherwise they only exchange what a model would.
        at_start: Whether it hits while the ranks are still meeting.
        seed: What it was drawn from.
        scheme: How the gradients of a model, or what stands for them, are synchronised.
        slow: Two ranks with a slow link between them.
        again: Whether the others meet again in the same processes afterwards, and go on from a checkpoint.
    """

    kind: str
    size: int
    victim: int
    delay_s: float
    torch: bool = False
    at_start: bool = False
    seed: int = 0
    scheme: str = "store"
    slow: tuple[int, int] | None = None
    again: bool = False

    @staticmethod
    def draw(
        seed: int,
        kind: str,
        *,
        size: int = 3,
        torch: bool = False,
        at_start: bool = False,
        scheme: str = "store",
        slow: bool = False,
        again: bool = False,
    ) -> Fault:
        """A random victim at a random moment."""
        generator = random.Random(seed)
        latest_s = MOMENT_AT_START_S_MAX if at_start else MOMENT_S_MAX
        victim, delay_s = generator.randrange(size), generator.uniform(0, latest_s)
        one, other = generator.sample(range(size), 2)
        return Fault(kind, size, victim, delay_s, torch, at_start, seed, scheme, (one, other) if slow else None, again)


@dataclass
class Verdict:
    """What became of a run.

    Attributes:
        fault: The fault.
        errors: What the others raised, by rank.
        noticed_s: From the fault until the last of them raised.
        ended_s: From the fault until the last of them had ended.
        complaints: What is wrong with it; empty if all is well.
    """

    fault: Fault
    errors: dict[int, dict[str, Any]] = field(default_factory=dict)
    noticed_s: float = 0.0
    ended_s: float = 0.0
    complaints: list[str] = field(default_factory=list)


def run(fault: Fault) -> Verdict:
    """Run it. Never raises for what the ranks do: that is in the verdict."""
    verdict = Verdict(fault)
    limit_s = START_LIMIT_S if fault.at_start else PEER_TIMEOUT_S
    options = {"rendezvous_timeout_s": START_LIMIT_S} if fault.at_start else {}
    if fault.kind == "hang":
        limit_s = options["operation_timeout_s"] = HANG_LIMIT_S
    program = "torch_process.py" if fault.torch else "rank_process.py"
    with Ranks(fault.size, program, scheme=fault.scheme, slow=fault.slow, again=fault.again, **options) as ranks:
        ranks.all_told("alive" if fault.at_start else "training")
        time.sleep(fault.delay_s)
        victim = ranks.ranks[fault.victim]
        victim.send(SIGNALS[fault.kind])
        hit_at = time.monotonic()
        others = [rank for rank in ranks.ranks if rank is not victim]
        for rank in others:
            if not rank.end_by(hit_at + limit_s + GRACE_S):
                verdict.complaints.append(f"rank {rank.number} hangs; {rank.last_words()}")
                rank.process.kill()
                rank.process.wait()
        verdict.ended_s = time.monotonic() - hit_at
        for rank in others:
            _judge(rank, fault, hit_at, verdict)
        if fault.again:
            _judge_what_follows(ranks, others, fault, verdict)
        _judge_victim(victim, fault, hit_at + limit_s + GRACE_S, verdict)
    for rank in ranks.ranks:
        if left := _left_behind(rank):
            verdict.complaints.append(f"rank {rank.number} has left processes behind: {left}")
    return verdict


def _left_behind(rank: Rank) -> list[int]:
    """Processes that outlive theirs. A start looks up libraries in a short process of its own, which may be ending."""
    deadline = time.monotonic() + GRACE_S
    while (left := processes_of_session(rank.process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _judge(rank: Rank, fault: Fault, hit_at: float, verdict: Verdict) -> None:
    """The error of one of the others: the right kind, the right names, a status that says so."""
    error = rank.told("error")
    if error is None:
        verdict.complaints.append(f"rank {rank.number} raised nothing; {rank.last_words()}")
        return
    verdict.errors[rank.number] = error
    verdict.noticed_s = max(verdict.noticed_s, error["at"] - hit_at)

    def check(holds: bool, what: str) -> None:
        if not holds:
            verdict.complaints.append(f"rank {rank.number}: {what}: {error}")

    check(rank.process.returncode == 1, f"status {rank.process.returncode}")
    check(error["kind"] in ("PeerLost", "Timeout"), "another kind of error")
    check(fault.kind != "hang" or error["kind"] == "Timeout", "another kind of error")
    check(error["rank"] == fault.victim, "names another rank")
    check(re.search(rf"\branks? {fault.victim}\b", error["message"]) is not None, "the message does not name the rank")
    if rank.told("training") is None:
        return  # lost while meeting: there is no layer and no step yet
    last = max((told["step"] for told in rank.all_events() if told["event"] == "step"), default=-1)
    check(error["layer"] is not None and error["layer"] in error["message"], "does not name the layer")
    check(error["step"] in (last, last + 1), f"does not name the step, which is {last + 1}")
    check(f"step {error['step']}" in error["message"], "the message does not name the step")


def _judge_what_follows(ranks: Ranks, others: list[Rank], fault: Fault, verdict: Verdict) -> None:
    """The others have gone on together; those with a model to the bits of processes that nobody was lost to."""
    told = [rank.told("again") for rank in others]
    for rank, again in zip(others, told, strict=True):
        if again is None:
            verdict.complaints.append(f"rank {rank.number} did not go on with the others; {rank.last_words()}")
    if not fault.torch or None in told:
        return
    digests = [again["digest"] for again in told if again is not None]
    with Ranks(len(others), "torch_process.py", scheme=fault.scheme, starts=False) as undisturbed:
        shutil.copy(ranks.directory / f"checkpoint{others[0].number}", undisturbed.directory / "checkpoint")
        undisturbed.start()
        expected = [rank.wait_for("again")["digest"] for rank in undisturbed.ranks]
    if digests != expected or len(set(expected)) != 1:
        verdict.complaints.append(f"the survivors end with {digests}, an undisturbed run with {expected}")


def _judge_victim(victim: Rank, fault: Fault, deadline: float, verdict: Verdict) -> None:
    """A rank that raises ends by itself, with its own error; one that stands still is ended here, by its id."""
    if fault.kind == "raise":
        if not victim.end_by(deadline):
            verdict.complaints.append("the rank that raised hangs")
        elif victim.process.returncode != 1 or "a bad batch" not in victim.log.read_text():
            verdict.complaints.append(f"the rank that raised ended oddly; {victim.last_words()}")
    elif fault.kind in ("stop", "hang"):
        if victim.process.poll() is not None:
            verdict.complaints.append(f"the rank that was to {fault.kind} has ended")
        victim.process.kill()
    if victim.process.poll() is None and not victim.end_by(deadline + GRACE_S):
        verdict.complaints.append("the victim cannot be ended")

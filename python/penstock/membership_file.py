"""The membership log of a run as a file: what a replay needs to know of it, as lines of JSON that people can read.

The first line says how many lines there are, and what ran and how: the program and its arguments, options that decide
about bits, how tensors were cut. Then comes a line for each call of `penstock.resume`: which checkpoint the program
went on from. A line for each epoch follows, with whom the program counts from which step on, over whom the rounds of
the engine are, and how many rounds of each slice were over before: a step in which a rank was lost is averaged over all
of them for some slices and over those that are left for others. Collectives have no steps: where one is the first that
was made among the members of a later epoch, a line says so. The last line says that the program has come to its end.

The file is small, and is written anew whenever there is a new line: it is never torn, unless somebody cuts it. One that
was cut behind a line would be that of a run which did not come to its end, but for the number of lines. It omits who
writes when, which is `penstock.log_keeping`, and what a replay makes of it, `penstock.replaying`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock import whole_files
from penstock.config import RANKS_MAX
from penstock.errors import ConfigError
from penstock.whole_files import CheckpointKey

__all__ = [
    "CallPlace",
    "LoggedCall",
    "LoggedEnd",
    "LoggedEpoch",
    "LoggedRun",
    "MemberChange",
    "RoundsBefore",
    "RunHeader",
    "read_log",
    "write_log",
]

KIND = "penstock membership log"
FORMAT = 2
SLICES_MAX = 1 << 24
"""Of a book, as in crates/core/src/limits.rs."""

RoundsBefore = list[tuple[int, list[tuple[int, int]]]]
"""By book in runs of slices: how many slices, and how many rounds of each were over, as `Engine.epochs` has them."""


class CallPlace(NamedTuple):
    """Which of the program's collectives one is: how often newcomers had come before, and its number since, from 1."""

    admissions: int
    number: int


@dataclass(frozen=True)
class RunHeader:
    """What ran, and how.

    Attributes:
        job: The id of the job, in hexadecimal digits.
        ranks: How many workers began.
        rank: Who has written this, as it began.
        command: Of the program behind the interpreter: ``["train.py", "--epochs", "3"]``.
        directory: In which it was started.
        options: Of those that all ranks have alike, each that decides about bits.
        slicing: How tensors were cut, as `Engine.slicing` has it.
        lanes: Of each rank.
        threads: That torch computed with, on the writer; None where torch was not imported when the job began.
        seed: Of torch on the writer when the job began, likewise.
        versions: Of penstock, python, and likewise torch and what it uses of the processor.
    """

    job: str
    ranks: int
    rank: int
    command: tuple[str, ...]
    directory: str
    options: dict[str, Any]
    slicing: tuple[int, int, int]
    lanes: int
    threads: int | None
    seed: int | None
    versions: dict[str, str]


@dataclass(frozen=True)
class LoggedEpoch:
    """One epoch.

    Attributes:
        members: Whom the program counts, by the ranks that they began with, ascending.
        step: The first step that counts with them.
        whole_steps: As `MembershipEpoch` has it.
        among: Over whom the epoch's rounds are: without newcomers that have not come yet.
        rounds: How many rounds of each slice were over before it. Those of collectives are left out.
    """

    members: tuple[int, ...]
    step: int
    whole_steps: int
    among: tuple[int, ...]
    rounds: RoundsBefore


class LoggedCall(NamedTuple):
    """A collective that is the first whose bytes were moved in a later epoch than those of the one before.

    Attributes:
        call: Which.
        epoch: In which its bytes were moved.
        before: The last one before it; none if it is the first.
    """

    call: CallPlace
    epoch: int
    before: CallPlace | None


class LoggedEnd(NamedTuple):
    """That the program has come to its end.

    Attributes:
        steps: That it has made.
        call: The last collective.
        digests: Of each model that was distributed, in that order, 64 bits of all its parameters.
    """

    steps: int
    call: CallPlace | None
    digests: tuple[int, ...]


class MemberChange(NamedTuple):
    """That others take part in rounds than before.

    Attributes:
        epoch: The first in which they do.
        step: The first of the program's steps that counts with them.
        among: Who does from then on.
        lost: Who does not any more.
        came: Who has come.
        rounds: These were over before, and made anew by nobody: those who are lost are in these and no others.
        call: The last collective that those who are lost were in. None: it is not known, or there was none.
        call_is_known: Whether it is known that there was none, or which it was.
    """

    epoch: int
    step: int
    among: frozenset[int]
    lost: tuple[int, ...]
    came: tuple[int, ...]
    rounds: RoundsBefore
    call: CallPlace | None
    call_is_known: bool


@dataclass(frozen=True)
class LoggedRun:
    """All that a file says.

    Attributes:
        header: What ran, and how.
        epochs: All, from the first on.
        calls: Collectives that were the first of an epoch.
        end: None: the run has not come to its end.
        resumed: Which checkpoints the program went on from, in the order of its calls; None: there was none.
    """

    header: RunHeader
    epochs: tuple[LoggedEpoch, ...]
    calls: tuple[LoggedCall, ...] = ()
    end: LoggedEnd | None = None
    resumed: tuple[CheckpointKey | None, ...] = ()

    def changes(self) -> list[MemberChange]:
        """Where those change who take part in rounds, in order."""
        found = []
        # What was over, and only one that was lost later had, is not: the least that this epoch or a later one says.
        least: dict[int, list[int]] = {}
        for number in reversed(range(1, len(self.epochs))):
            epoch = self.epochs[number]
            for book, runs in epoch.rounds:
                here = _of_slices(runs)
                later = least.get(book, here)
                least[book] = [*map(min, here, later)] if len(here) == len(later) else here
            before, among = frozenset(self.epochs[number - 1].among), frozenset(epoch.among)
            if before == among:
                continue
            known, call = self._last_call_before(number)
            rounds = [(book, _in_runs(least[book])) for book, _ in epoch.rounds]
            lost, came = tuple(sorted(before - among)), tuple(sorted(among - before))
            found.append(MemberChange(number, epoch.step, among, lost, came, rounds, call, known))
        return found[::-1]

    def newcomers(self) -> set[int]:
        """Ranks of those who have come, and have taken part."""
        return {rank for change in self.changes() for rank in change.came}

    def first_step(self, rank: int) -> int:
        """The first step that counts with a rank."""
        return next(epoch.step for epoch in self.epochs if rank in epoch.members)

    def _last_call_before(self, epoch: int) -> tuple[bool, CallPlace | None]:
        """Which collective was the last whose bytes were moved before an epoch; and whether that is known at all."""
        later = next((one for one in self.calls if one.epoch >= epoch), None)
        if later is not None:
            return True, later.before
        return (False, None) if self.end is None else (True, self.end.call)


def _of_slices(runs: Iterable[tuple[int, int]]) -> list[int]:
    return [number for slices, number in runs for _ in range(slices)]


def _in_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0] + 1, number)
        else:
            runs.append((1, number))
    return runs


def write_log(path: Path, run: LoggedRun) -> None:
    """Let a file have this and nothing else, once it is on the disk.

    Raises:
        OSError: It cannot be written.
    """
    header = run.header
    lines: list[dict[str, Any]] = [{"log": KIND, "format": FORMAT, "lines": 0, **vars(header)}]
    lines.extend({"resumed": key} for key in run.resumed)
    calls = [*run.calls]
    for number, epoch in enumerate(run.epochs):
        while calls and calls[0].epoch < number:
            lines.append(calls.pop(0)._asdict())
        lines.append({"epoch": number, **vars(epoch)})
    lines.extend(call._asdict() for call in calls)
    if run.end is not None:
        lines.append({"end": run.end.steps, "call": run.end.call, "digests": run.end.digests})
    lines[0]["lines"] = len(lines)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    whole_files.put(path, lambda to: Path(to).write_text(text, encoding="utf-8"))


def read_log(path: Path) -> LoggedRun:
    """What a file says.

    Raises:
        ConfigError: There is none, it is another file, of another version, torn, or says what cannot be. The message
            has the line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"membership log {path}: {error.strerror}") from error
    lines = data.split(b"\n")
    header, count = _header(path, lines[0], is_whole=len(lines) > 1)
    epochs: list[LoggedEpoch] = []
    calls: list[LoggedCall] = []
    resumed: list[CheckpointKey | None] = []
    end: LoggedEnd | None = None
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            said = json.loads(line)
            if end is not None:
                raise ValueError("there are lines behind that of the end")
            if "end" in said:
                end = LoggedEnd(_natural(said["end"]), _call(said["call"]), tuple(map(int, said["digests"])))
            elif "resumed" in said:
                resumed.append(_checkpoint(said["resumed"]))
            elif "before" in said:
                call = _call(said["call"])
                if call is None:
                    raise ValueError("a collective without a number")
                calls.append(LoggedCall(call, _natural(said["epoch"]), _call(said["before"])))
            else:
                epochs.append(_epoch(said, epochs))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"membership log {path}, line {number}: {_why(error)}; is the file damaged?") from None
    if lines[-1]:
        raise ConfigError(
            f"membership log {path}, line {len(lines)}: it breaks off, so the file is torn: copy it anew from where it "
            "was written"
        )
    if len(lines) - 1 != count:
        raise ConfigError(
            f"membership log {path}: it has {len(lines) - 1} lines, and says that there are {count}, so the file is "
            "torn: copy it anew from where it was written"
        )
    if not epochs or epochs[0].among != tuple(range(header.ranks)):
        raise ConfigError(f"membership log {path}: it does not say who took part at first; is the file damaged?")
    if any(call.epoch >= len(epochs) for call in calls):
        raise ConfigError(f"membership log {path}: a collective is of an epoch that is not there; is the file damaged?")
    return LoggedRun(header, tuple(epochs), tuple(calls), end, tuple(resumed))


def _header(path: Path, line: bytes, *, is_whole: bool) -> tuple[RunHeader, int]:
    """What the first line says: what ran, and how many lines there are."""
    try:
        said = json.loads(line)
        is_one = said["log"] == KIND
    except (ValueError, KeyError, TypeError, RecursionError):
        is_one = False
    if not is_one:
        torn = f'{{"log": "{KIND}"'.encode().startswith(line[:20]) or line.startswith(f'{{"log": "{KIND}"'.encode())
        if torn and not is_whole:
            raise ConfigError(f"membership log {path}, line 1: it breaks off, so the file is torn")
        raise ConfigError(f"{path} is no membership log, as option membership_log (PENSTOCK_MEMBERSHIP_LOG) writes one")
    if said.get("format") != FORMAT:
        versions = said.get("versions")
        writer = versions.get("penstock", "another one") if isinstance(versions, dict) else "another one"
        raise ConfigError(
            f"membership log {path} has format {said.get('format')}, and this version of Penstock reads {FORMAT}: use "
            f"the one that has written it, {writer}"
        )
    try:
        header = RunHeader(
            job=str(said["job"]),
            ranks=_natural(said["ranks"], 1, RANKS_MAX),
            rank=_natural(said["rank"]),
            command=tuple(map(str, said["command"])),
            directory=str(said["directory"]),
            options=dict(said["options"]),
            slicing=(_natural(said["slicing"][0]), _natural(said["slicing"][1]), _natural(said["slicing"][2])),
            lanes=_natural(said["lanes"], 1),
            threads=None if said["threads"] is None else _natural(said["threads"], 1),
            seed=None if said["seed"] is None else int(said["seed"]),
            versions={str(name): str(version) for name, version in said["versions"].items()},
        )
        return header, _natural(said["lines"], 1)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"membership log {path}, line 1: {_why(error)}; is the file damaged?") from None


def _epoch(said: dict[str, Any], before: Sequence[LoggedEpoch]) -> LoggedEpoch:
    if _natural(said["epoch"]) != len(before):
        raise ValueError(f"epoch {said['epoch']}, and {len(before)} is next")
    step = _natural(said["step"], before[-1].step if before else 1)
    rounds = [(_natural(book), [(_natural(n), _natural(done)) for n, done in runs]) for book, runs in said["rounds"]]
    if any(sum(slices for slices, _ in runs) > SLICES_MAX for _, runs in rounds):
        raise ValueError("more slices than there can be")
    members, among = _ranks(said["members"]), _ranks(said["among"])
    if not {*among} <= {*members}:
        raise ValueError("rounds over ranks that are no members")
    return LoggedEpoch(members, step, _natural(said["whole_steps"]), among, rounds)


def _ranks(said: Any) -> tuple[int, ...]:
    ranks = tuple(_natural(rank, 0, RANKS_MAX - 1) for rank in said)
    if not ranks or list(ranks) != sorted({*ranks}):
        raise ValueError("ranks that do not ascend")
    return ranks


def _call(said: Any) -> CallPlace | None:
    if said is None:
        return None
    admissions, number = said
    return CallPlace(_natural(admissions), _natural(number, 1))


def _checkpoint(said: Any) -> CheckpointKey | None:
    if said is None:
        return None
    number, lead, writing = said
    return CheckpointKey(_natural(number), _natural(lead, 0, RANKS_MAX - 1), str(writing))


def _natural(said: Any, least: int = 0, most: int = 1 << 62) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or not least <= said <= most:
        raise ValueError(f"{said!r} where a whole number from {least} on should be")
    return said


def _why(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it does not say {error.args[0]!r}"
    if isinstance(error, json.JSONDecodeError):
        return "it is no JSON"
    return str(error)

"""How a checkpoint is found and read, by any number of ranks: each part by one rank that sees it, for all.

All ranks say what they see, and so choose the same checkpoint. Those who read its parts look through them first, since
a checkpoint is none if one is torn; then one part after the other is brought to all, and no rank has more than one of
them in memory beside what is put together. Omits what the state is of, which is `checkpoint_content`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock import collectives
from penstock.errors import ConfigError, PeerLost
from penstock.tensor_file import read_tensor_file, read_tensor_header
from penstock.torch.checkpoint_shares import Assembly
from penstock.torch.state_tree import joined
from penstock.warning import warn
from penstock.whole_files import (
    CheckpointKey,
    CheckpointPart,
    DiskCheckpoint,
    Manifest,
    checkpoints_in,
    grouped,
    held,
    why_torn,
)

if TYPE_CHECKING:
    from penstock.job import Job

__all__ = ["FORMAT", "FoundCheckpoint", "read_newest", "shown"]

BLOCK_BYTES = 64 << 20
"""Of a part, so much at a time is brought to all."""
FORMAT = "penstock training 1"
"""Of what a part says."""


class FoundCheckpoint(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        shown: Its name.
        key: Which it is: its number is that of the steps before it.
        known: The keys of all that are whole, the newest last.
        trees: What it has, by name.
        tensors: Its tensors, by their names in the trees.
        updates: Of each part, by tensor how often its parameter was updated where the owner has said it.
        own: What is this rank's alone, or shared out to it; None: nothing is.
    """

    shown: str
    key: CheckpointKey
    known: list[CheckpointKey]
    trees: dict[str, Any]
    tensors: dict[str, Tensor]
    updates: list[dict[str, int]]
    own: Any


def read_newest(
    caller: str, running: Job, directory: Path, only: CheckpointKey | None = None
) -> FoundCheckpoint | None:
    """Read the newest whole checkpoint; None if none has ever been whole, as far as anybody knows. Collective.

    Args:
        caller: For messages.
        running: The job.
        directory: Where this rank looks.
        only: It must be this one, which the run that is replayed went on from.

    Raises:
        ConfigError: There are some, and none is whole; or the one that it must be is not. On all ranks.
        PeerLost: A rank was lost, and the job with it.
        Timeout: A rank did not come.
    """
    given_up: dict[CheckpointKey, str] = {}
    while True:
        try:
            reading = _Reading(caller, running, directory, given_up, only)
            if reading.chosen is None:
                reading.warn_of_the_first()
                return None
            found = reading.read(reading.chosen)
        except PeerLost:
            if running.engine.has_failed:
                raise
            continue  # an elastic job goes on, and so do those who are left
        if found is not None:
            return found


class _Reading:
    """One attempt; see `read_newest`. Collective.

    Args:
        caller: For messages.
        running: The job.
        directory: Where this rank looks.
        given_up: Checkpoints that have turned out to be torn, and why; one more if this one does.
        only: As `read_newest`.
    """

    def __init__(
        self,
        caller: str,
        running: Job,
        directory: Path,
        given_up: dict[CheckpointKey, str],
        only: CheckpointKey | None,
    ) -> None:
        self._caller, self._running, self._directory, self._given_up = caller, running, directory, given_up
        self._search = _Search(caller, directory, self._gather(_seen_in(directory)), running.rank)
        self.chosen = self._search.choose(given_up) if only is None else self._search.pick(given_up, only)

    def warn_of_the_first(self) -> None:
        """Say so if there is something, which makes no difference."""
        if self._search.said and self._search.place == 0:
            warn(f"{self._caller}: {'; '.join(self._search.said)}; it was to be the first, so training begins anew")

    def read(self, chosen: DiskCheckpoint) -> FoundCheckpoint | None:
        """Read what was chosen; None if it has turned out to be torn, or who was to read some of it was lost."""
        search = self._search
        with ExitStack() as locks:
            rows = self._gather(self._heads(chosen, locks))
            torn = next((row["torn"] for row in rows.values() if "torn" in row), None)
            heads = {int(place): head for row in rows.values() for place, head in row.get("heads", {}).items()}
            if torn is None and heads.keys() != chosen.parts.keys():
                return None
            if torn is None:
                tensors, own, torn = self._bring(chosen, heads)
        if torn is not None:
            self._given_up[chosen.key] = torn
            return None
        if search.said and search.place == 0:
            warn(f"{self._caller}: {'; '.join(search.said)}; {shown(chosen)} is used, the newest that is whole")
        whole = [one.key for one in search.checkpoints if one.lacks is None and one.key not in self._given_up]
        return FoundCheckpoint(
            str(self._directory / shown(chosen)),
            chosen.key,
            whole[::-1],
            heads[0]["tree"],
            tensors,
            [head["updates"] for head in heads.values()],
            own,
        )

    def _gather(self, said: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """What all ranks say, by the ranks that they began with."""
        blobs = self._running.gathering.all_gather(self._caller, json.dumps(said).encode())
        return {rank: json.loads(blob) for rank, blob in enumerate(blobs) if blob}

    def _heads(self, chosen: DiskCheckpoint, locks: ExitStack) -> dict[str, Any]:
        """Look through the parts that this rank reads: what they say, or why one is torn."""
        heads = {}
        mine = self._search.mine(chosen)
        try:
            locks.enter_context(held([one.file for one in mine]))
            for one in mine:
                why = why_torn(one)
                if why is not None:
                    return {"torn": f"checkpoint {one.file.name} is torn ({why})"}
                metadata, places = read_tensor_header(one.file)
                said = json.loads(metadata)
                if not isinstance(said, dict) or said.get("format") != FORMAT:
                    raise ValueError(f"{one.file.name} is no part of a training")
                heads[str(one.part.place)] = {**said, "places": places}
        except (OSError, ValueError) as error:
            return {"torn": f"checkpoint {shown(chosen)} cannot be read ({error})"}
        return {"heads": heads}

    def _bring(
        self, chosen: DiskCheckpoint, heads: Mapping[int, dict[str, Any]]
    ) -> tuple[dict[str, Tensor], Any, str | None]:
        """All tensors, what is this rank's own, and why a part has turned out to be torn after all, the same on all."""
        search = self._search
        whole, own = Assembly(heads[0]["tensors"]), _OwnStates(len(search.ranks), search.place)
        problem = None
        for place, manifest in sorted(chosen.parts.items()):
            head, reader = heads[place], search.readers[chosen.key][place]
            nbytes = max((end for _, end in head["places"].values()), default=0)
            data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if reader == self._running.rank:
                try:
                    read = read_tensor_file(manifest.file)
                    if read.crc != manifest.crc:
                        raise ValueError("its bytes are not those that were written")
                    if nbytes:
                        data = torch.frombuffer(read.data, dtype=torch.uint8)
                except (OSError, ValueError) as error:
                    problem = f"checkpoint {manifest.file.name} is torn ({error})"
            for begin in range(0, nbytes if len(search.ranks) > 1 else 0, BLOCK_BYTES):
                block = data[begin : begin + BLOCK_BYTES]
                collectives.broadcast(block, root=self._running.members.index(reader))
            try:
                whole.take(head["pieces"], head["places"], data)
                own.take(head, data, place, heads[0]["workers"])
            except ValueError as error:
                problem = problem or f"checkpoint {manifest.file.name} is torn ({error})"
        tensors: dict[str, Tensor] = {}
        try:
            tensors = whole.tensors()
        except ValueError as error:
            problem = problem or f"checkpoint {shown(chosen)} is torn ({error})"
        problems = [row["problem"] for row in self._gather({"problem": problem}).values()]
        return tensors, own.state(), next(filter(None, problems), None)


class _Search:
    """What all ranks see of checkpoints, and who reads which part: the same on all of them.

    Args:
        caller: For messages.
        directory: Where this rank looks.
        rows: What each says, by the ranks that they began with.
        rank: This one.

    Attributes:
        ranks: All of them.
        checkpoints: All that somebody sees, the newest first.
        said: What is wrong with those that were passed over.
        readers: By checkpoint and part, who reads it.
    """

    def __init__(self, caller: str, directory: Path, rows: Mapping[int, dict[str, Any]], rank: int) -> None:
        self._caller, self._directory, self._rank = caller, directory, rank
        self.ranks = sorted(rows)
        manifests: dict[tuple[CheckpointKey, int], Manifest] = {}
        seen_by: dict[tuple[CheckpointKey, int], list[int]] = {}
        self._unreadable: list[str] = []
        for one, row in sorted(rows.items()):
            self._unreadable += [name for name in row["unreadable"] if name not in self._unreadable]
            for name, key, place, count, layout, *content in row["manifests"]:
                part = CheckpointPart(CheckpointKey(*key), place, count, layout)
                manifests.setdefault((part.key, place), Manifest(directory / name, part, *content))
                seen_by.setdefault((part.key, place), []).append(one)
        self.checkpoints = grouped([*manifests.values()])
        self.readers: dict[CheckpointKey, dict[int, int]] = {}
        for (key, place), several in seen_by.items():
            usual = self.ranks[place % len(self.ranks)]  # so that all have about as much to read
            self.readers.setdefault(key, {})[place] = usual if usual in several else several[place % len(several)]
        self.said: list[str] = []

    @property
    def place(self) -> int:
        """This rank's place among all."""
        return self.ranks.index(self._rank)

    def choose(self, given_up: Mapping[CheckpointKey, str]) -> DiskCheckpoint | None:
        """The newest that may be whole; None if there is none, but for a first one that was never finished.

        Args:
            given_up: Those that turned out not to be, and why.

        Raises:
            ConfigError: There are some, and none is whole.
        """
        self.said = [f"checkpoint {name} is torn (its manifest cannot be read)" for name in self._unreadable]
        for one in self.checkpoints:
            why = given_up.get(one.key)
            if why is None and one.lacks is None:
                return one
            self.said.append(why or f"checkpoint {shown(one)} is not whole ({one.lacks})")
        if all(one.is_first and one.key not in given_up for one in self.checkpoints) and not self._unreadable:
            return None  # who is killed while the first is written has nothing to go on from, and nothing is lost
        raise ConfigError(f"{self._caller}: no whole checkpoint in {self._directory}: {'; '.join(self.said)}")

    def pick(self, given_up: Mapping[CheckpointKey, str], only: CheckpointKey) -> DiskCheckpoint:
        """That one.

        Raises:
            ConfigError: It is not there, or not whole.
        """
        one = next((one for one in self.checkpoints if one.key == only), None)
        why = "it is not there" if one is None else given_up.get(only) or one.lacks
        if one is None or why is not None:
            raise ConfigError(
                f"{self._caller}: the run that is replayed went on from checkpoint {only.number} of {self._directory}, "
                f"written by {only.writing or 'one rank'}, and {why}: keep a copy of it there"
            )
        return one

    def mine(self, chosen: DiskCheckpoint) -> list[Manifest]:
        """The parts that this rank reads."""
        readers = self.readers[chosen.key]
        return [one for place, one in sorted(chosen.parts.items()) if readers[place] == self._rank]


class _OwnStates:
    """What is one rank's own, of as many parts as there are.

    Args:
        ranks: How many ranks there are now.
        place: This one's.
    """

    def __init__(self, ranks: int, place: int) -> None:
        self._ranks, self._place = ranks, place
        self._mine: Any = None
        self._sums: dict[str, Any] = {}  # of what lossy layers keep
        self._count = 0

    def take(self, head: Mapping[str, Any], data: Tensor, place: int, count: int) -> None:
        """What one part has of it, of so many that workers have written.

        Raises:
            ValueError: It is torn.
        """
        if head["own"] is None:
            return  # a server has written it
        mine = place == self._place
        adds_up = count != self._ranks
        if not mine and not adds_up:
            return
        own = Assembly(head["own_tensors"])
        own.take(head["pieces"], head["places"], data)
        state = joined(head["own"], own.tensors())
        if mine:
            self._mine = state
        if adds_up:
            self._count = count
            _add(self._sums, state["lossy"])

    def state(self) -> Any:
        """All of it; None: this rank was not there, and there is nothing to share."""
        if not self._count:
            return self._mine
        _divide(self._sums, self._count)
        return {**(self._mine or {}), "lossy": self._sums}


def _add(sums: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add tensors to those at the same places; what is no tensor is taken from whoever comes first."""
    for name, value in more.items():
        if isinstance(value, Mapping):
            _add(sums.setdefault(name, {}), value)
        elif isinstance(value, Tensor) and name in sums:
            sums[name] += value
        elif name not in sums:
            sums[name] = value.clone() if isinstance(value, Tensor) else value


def _divide(sums: dict[str, Any], count: int) -> None:
    for value in sums.values():
        if isinstance(value, dict):
            _divide(value, count)
        elif isinstance(value, Tensor):
            value /= count


def _seen_in(directory: Path) -> dict[str, Any]:
    """What this rank sees, fit for JSON."""
    found, unreadable = checkpoints_in(directory)
    manifests = [
        [one.file.name, list(one.part.key), one.part.place, one.part.total, one.part.layout, *one[2:]]
        for checkpoint in found
        for one in checkpoint.parts.values()
    ]
    return {"manifests": manifests, "unreadable": [one.name for one in unreadable]}


def shown(one: DiskCheckpoint) -> str:
    """What names of its files begin with."""
    return Path(one.name).name.rpartition("-")[0]

"""Several ranks in one process: `meet` runs each rank's exchange in its own thread and returns what became of each."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.launchers import discover
from penstock.rendezvous import Agreement, exchange

LIMIT_S = 60.0


@dataclass
class Outcome:
    """What one rank got: the agreement and the table, or the error; and when, by `time.monotonic`."""

    agreement: Agreement | None = None
    table: list[tuple[str, int]] | None = None
    error: BaseException | None = None
    ended_at: float = 0.0


def free_port() -> int:
    """A port that was free a moment ago, for stores whose port every rank must know before they start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SilentDoor:
    """A rank that only says where it would be, and keeps what it is told of the others."""

    def __init__(self, listen: Callable[[Agreement], tuple[str, int]]) -> None:
        self.listen = listen
        self.table: list[tuple[str, int]] | None = None

    def connect(self, table: list[tuple[str, int]]) -> None:
        self.table = table

    def check(self) -> None:
        """All is well."""


def listen_nowhere(rank: int) -> Callable[[Agreement], tuple[str, int]]:
    """A listener that only says where it would be."""
    return lambda agreement: ("127.0.0.1", 1000 + rank)


def meet(
    size: int,
    *,
    each: Mapping[int, Mapping[str, Any]] | None = None,
    versions: Mapping[int, str] | None = None,
    listens: Mapping[int, Callable[[Agreement], tuple[str, int]]] | None = None,
    doors: Mapping[int, SilentDoor] | None = None,
    ranks: list[int] | None = None,
    environ: Mapping[str, str] | None = None,
    **shared: Any,
) -> list[Outcome]:
    """Run the exchange of `ranks` (all by default); `each`, `versions`, `listens` and `doors` differ by rank."""
    running = list(range(size)) if ranks is None else ranks
    outcomes = [Outcome() for _ in running]

    def run(place: int, rank: int) -> None:
        arguments = {"rank": rank, "world_size": size, **shared, **(each or {}).get(rank, {})}
        if environ is not None:  # a launcher's variables give rank and size
            del arguments["rank"], arguments["world_size"]
        variables = {**environ, "RANK": str(rank), "WORLD_SIZE": str(size)} if environ is not None else {}
        try:
            launch = discover(variables, **arguments)
            listen = (listens or {}).get(rank, listen_nowhere(rank))
            version = (versions or {}).get(rank, "1.0")
            door = (doors or {}).get(rank, SilentDoor(listen))
            outcomes[place].agreement = exchange(launch, door, version=version, lanes=2)
            outcomes[place].table = door.table
        except BaseException as error:  # noqa: BLE001 - handed to the test, which asserts on it
            outcomes[place].error = error
        outcomes[place].ended_at = time.monotonic()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(running)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank hangs in the exchange"
    return outcomes


def assert_met(outcomes: list[Outcome]) -> Agreement:
    """Every rank holds the same agreement and the whole table."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.agreement == outcomes[0].agreement
        assert outcome.table == [("127.0.0.1", 1000 + rank) for rank in range(len(outcomes))]
    agreement = outcomes[0].agreement
    assert agreement is not None
    assert len(agreement.job_id) == 16 and len(agreement.secret) == 32
    return agreement

"""A job that runs: this process's part in it, and the orderly and the other ways out of it.

Omits which job is this process's, which is `penstock.job`, and how one begins, which is `penstock.starting`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from penstock import lending
from penstock.attached import attached
from penstock.coordinator import Rates
from penstock.ending import described
from penstock.errors import ConfigError, PenstockError
from penstock.gathering import AllRanks
from penstock.grouping import NONE_ASKED_FOR
from penstock.tracing.moments import forget_moments

if TYPE_CHECKING:
    from pathlib import Path

    from penstock._native import Engine
    from penstock.config import Options
    from penstock.control import Servers
    from penstock.doorway import Doorway, Entrance
    from penstock.elastic_calls import ElasticCalls
    from penstock.gathering import Gathering
    from penstock.grouping import Groups
    from penstock.launchers import Launch
    from penstock.live.live_status import StatusFile
    from penstock.log_keeping import LogKeeper
    from penstock.members import Membership
    from penstock.metrics.exporting import Exposition
    from penstock.rendezvous import Agreement
    from penstock.replaying import LoggedCourse
    from penstock.tracing.recording import Trace

__all__ = ["Job", "one_line"]

_log = logging.getLogger("penstock")

REASON_CHARACTERS_MAX = 500


@dataclass
class Job:
    """This process's part in a running job.

    Attributes:
        engine: The native engine.
        launch: How the process was started.
        job_id: 16 bytes, the same on every rank and different for every start.
        address: What this rank advertises, ``host:port``.
        single_host: Whether all ranks share this machine's loopback interface.
        groups: Of workers that sum among themselves.
        groups_reason: Why these, or none.
        hosts: By rank, as `penstock.coordinator.Cluster` has them: empty where no two ranks share one, or all do. Then
            they have no line to share, and the rate of their line is what was measured between any two.
        failed: Why this rank has told the others that it failed, or is about to.
        servers: Those that own what is summed, apart from the workers.
        rates: What wire and processors do, the same on every rank.
        threads: Threads other than the main one that have made calls.
        handled: The exception that the program was handling when it joined, the loss of an earlier job for instance.
        stores_made: Key-value stores, on this rank.
        trace: The last that this rank has begun to write.
        metrics: Where this rank's can be found, if they are asked for.
        status: The file in which it says how it stands, if it does.
        membership: Who is left, of an elastic job.
        calls: Its collectives; a newcomer has none until it takes part.
        agreement: What the ranks have agreed on when they met.
        log: Where the log of its members is kept, if it is.
        replay: What decides who its members are, if it repeats another run.
        door: Where newcomers come to this rank, if it has opened one.
        visit: Of a newcomer: the door at which it came.
        checkpoints: By directory, the training's that are written there (`penstock.torch.checkpoints`).
        checkpoints_begun: How many by all ranks, of whatever in this job.
        steps_counted: Steps that these have counted, those before included; None: nobody counts.
        forget: Called when the job is over: it is not this process's any more.
    """

    engine: Engine
    launch: Launch
    job_id: bytes
    address: str
    single_host: bool = False
    groups: Groups = ()
    groups_reason: str = NONE_ASKED_FOR
    hosts: tuple[int, ...] = ()
    failed: str | None = None
    rates: Rates = field(default_factory=Rates)
    threads: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)
    handled: BaseException | None = field(default_factory=lambda: sys.exc_info()[1])
    stores_made: int = 0
    trace: Trace | None = None
    metrics: Exposition | None = None
    status: StatusFile | None = None
    membership: Membership | None = None
    calls: ElasticCalls | None = None
    agreement: Agreement | None = field(default=None, repr=False)
    log: LogKeeper | None = None
    replay: LoggedCourse | None = None
    door: Doorway | None = None
    visit: Entrance | None = None
    checkpoints: dict[Path, object] = field(default_factory=dict, repr=False)
    checkpoints_begun: int = 0
    steps_counted: int | None = None
    forget: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def rank(self) -> int:
        """This process's number, from 0, among the workers, or among the servers, as the job began."""
        return self.launch.options.rank

    @property
    def world_size(self) -> int:
        """The number of workers, as the job began."""
        return self.launch.options.world_size

    @property
    def host(self) -> str:
        """Where others reach this rank."""
        return self.address.rpartition(":")[0]

    @cached_property
    def servers(self) -> Servers:
        """As a worker sees them, if there are some."""
        from penstock.control import Servers

        return Servers(self.engine, self.rank, self.world_size, self.options.servers, self.groups)

    @property
    def members(self) -> tuple[int, ...]:
        """Who takes part as of the last step, by the ranks that they began with."""
        return tuple(range(self.world_size)) if self.membership is None else self.membership.members

    @property
    def gathering(self) -> Gathering:
        """How everybody's bytes come to everybody, and who does what one rank does for all."""
        return AllRanks(self.engine) if self.calls is None else self.calls

    def check_that_it_takes_part(self, caller: str) -> None:
        """Refuse a call of a newcomer that the others do not make.

        Raises:
            ConfigError: This rank has not been told everything yet.
        """
        if self.membership is not None and self.membership.arriving:
            raise ConfigError(
                f"penstock.{caller}: rank {self.rank} is a newcomer, and takes part once it has called "
                "penstock.distribute and then penstock.Newcomers, as the others did: before that it cannot call this",
                rank=self.rank,
            )

    @property
    def options(self) -> Options:
        """The options that this rank was started with."""
        return self.launch.options

    def abort(self, reason: str) -> None:
        """Tell every other rank that this one failed and why; only the first reason is told."""
        if self.failed is None:
            self.failed = reason
        # Again if need be: a handler of a signal may have raised in the middle of the first time.
        with contextlib.suppress(PenstockError):  # the engine may have failed already, and then the others know
            self.engine.abort(one_line(self.failed))

    def end_what_is_seen(self, why: str) -> None:
        """No trace goes on after the job, no metrics and no status."""
        if self.trace is not None:
            self.trace.end(why)
        if self.status is not None:
            self.status.end(why)
        forget_moments(self.engine)
        if self.metrics is not None:
            self.metrics.end()

    def end(self, by_status: str | None) -> None:
        """The process ends: leave the job, without raising; see `penstock.ending`."""
        try:
            self.finish(by_status)
        except PenstockError:
            _log.exception("rank %d: the job did not end in order", self.rank)
        finally:
            # Not earlier: what is pending belongs to the current job.
            self.forget()
            self.end_failed(at_exit=True)

    def finish(self, by_status: str | None = None) -> None:
        """Bring in what is pending, unless this rank has failed, and close the engine in any case.

        Args:
            by_status: In order only if the exit status of the process will be 0; otherwise the reason that the others
                get.
        """
        try:
            for one in attached() if self.failed is None else ():
                one.finish(self.options.operation_timeout_s)
            if self.failed is None:
                self._note_end()
        except BaseException as error:
            self.abort(described(error))
            raise
        finally:
            try:
                if self.failed is not None:
                    self.abort(self.failed)
                    with contextlib.suppress(PenstockError):  # the reason is already on its way up or told
                        self.engine.shutdown()
                elif by_status is not None:
                    reason = one_line(by_status)
                    try:
                        self.servers.end()
                    finally:
                        self.end_what_is_seen("the program ends")  # later there is no interpreter
                        self.engine.shutdown_by_status(reason, lending.lent_to(self.engine))
                else:
                    try:
                        self.servers.end()
                    finally:
                        self.engine.shutdown()
            except PenstockError as error:
                for one in attached():
                    one.explain(self.engine, error)
                raise
            finally:
                self.end_what_is_seen("the job has ended" if self.failed is None else self.failed)
                if self.replay is not None:
                    self.replay.close()
                if by_status is None:
                    for one in attached():
                        one.let_go(self.engine)
                    lending.forget_lent(self.engine)

    def _note_end(self) -> None:
        """The program has come to its end, and nothing is under way: the log says so, or a replay compares."""
        if (self.log is None and self.replay is None) or self.membership is None:
            return
        digests = [digest for one in attached() for digest in one.digests(self.engine)]
        if self.log is not None:
            self.log.end(digests)
        if self.replay is not None:
            self.replay.judge(self.membership.steps, digests)

    def end_failed(self, *, at_exit: bool) -> None:
        """After the end of a job: where it has failed, nothing may keep the process."""
        for one in attached() if self.failed is not None or self.engine.has_failed else ():
            one.end_failed(self.options.peer_timeout_s, at_exit=at_exit)


def one_line(reason: str) -> str:
    """Of an error, for the other ranks."""
    return " ".join(reason.split())[:REASON_CHARACTERS_MAX]

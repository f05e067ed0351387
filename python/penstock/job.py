"""The process-wide job: from `init` to `shutdown`, and whatever ends the process in between.

One process takes part in one job at a time. This module has it, and the three ways out: an orderly shutdown, a failure
whose reason the other ranks should learn, and a fork, whose child must not touch the parent's connections. It omits how
a job begins (`penstock.starting`), what is done with one (`penstock.running`), everything about tensors, which is
`penstock.torch`, and how an end is recognised, which is `penstock.ending`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock import config, launcher_pipe, launchers
from penstock.account import Report
from penstock.attached import attached
from penstock.ending import Hooks, described
from penstock.errors import ConfigError
from penstock.members import MembersChange, MembershipEpoch
from penstock.running import Job
from penstock.starting import start
from penstock.tracing.moments import known_lateness

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock.boards import Board
    from penstock.config import OptionArguments
    from penstock.coordinator import Rates
    from penstock.launchers import Launch

__all__ = [
    "Job",
    "current",
    "init",
    "membership_log",
    "on_members_changed",
    "rank",
    "refuse_elastic",
    "report",
    "shutdown",
    "world_size",
]


class _ThisProcess:
    """What this process knows about its job. One instance, so that no function needs `global`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.job: Job | None = None
        self.was_shut_down = False
        self.forked_from: int | None = None  # the rank of the parent, in a child
        self.hooked_fork = False
        self.hooks: Hooks | None = None

    def live(self) -> Job | None:
        """The job, unless this is a forked child's copy of it."""
        return self.job if self.forked_from is None else None

    def forget(self) -> None:
        """The job is over."""
        self.job = None
        self.was_shut_down = True
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None


_process = _ThisProcess()


def init(**options: Unpack[OptionArguments]) -> None:
    """Join the job: find the other ranks, agree with them, listen. Call it once, before `penstock.distribute`.

    Under torchrun, mpirun or Slurm no argument is needed; without any of them the process is a job of its own and no
    other machine is contacted. Called again with the same arguments, or none, it does nothing.

    Args:
        **options: Fields of `penstock.Options`; each can also be set as an environment variable ``PENSTOCK_<NAME>``.

    Raises:
        ConfigError: An option is not accepted, ranks disagree, or the job runs already with other options.
        AuthenticationError: A rank holds another secret.
        ProtocolError: A rank runs another version of Penstock.
        Timeout: Ranks did not arrive within ``rendezvous_timeout_s``; the message names them.
        PeerLost: A rank failed meanwhile.

    Example:
        >>> import penstock as ps
        >>> ps.init()
        >>> print(f"rank {ps.rank()} of {ps.world_size()}")
        rank 0 of 1
    """
    _refuse_in_child("init")
    with _process.lock:
        if _process.job is not None:
            _check_same(_process.job, config.parse_arguments(**options))
            return
        launch = launchers.discover_here(**options)
        if launch.options.role == "server":
            raise ConfigError(
                f"penstock.init: this process is server {launch.options.rank} ({launch.sources['role']}), which trains "
                "nothing; start `penstock server` in its place",
                rank=launch.options.engine_rank,
            )
        _run(start(launch, _measured))


def init_at_store(
    board: Board,
    rank: int,
    world_size: int,
    *,
    operation_timeout_s: float | None = None,
    rendezvous_timeout_s: float | None = None,
) -> Job:
    """Join the job of a program that has a place where its ranks meet; if it runs already, take part in that.

    Args:
        board: The place, in a store that all ranks share.
        rank: This process.
        world_size: The number of processes.
        operation_timeout_s: Of a job that begins, if it is given.
        rendezvous_timeout_s: Likewise.

    Returns:
        The running job.

    Raises:
        ConfigError: Another job runs, whose rank or size differs.
        PenstockError: As `init`.
    """
    _refuse_in_child("init")
    with _process.lock:
        if _process.job is not None and _process.job.engine.has_failed:
            shutdown()  # of programs that know torch.distributed alone, which have destroyed their groups by now
        job = _process.job
        if job is None:
            limits = {"operation_timeout_s": operation_timeout_s, "rendezvous_timeout_s": rendezvous_timeout_s}
            launch = launchers.at_store(rank, world_size, **limits)
            for name, given in (("elastic", launch.options.elastic), ("join", launch.options.join is not None)):
                if given:
                    raise ConfigError(
                        f"option {name} is for programs that call penstock.init, and not for groups of "
                        f"torch.distributed; unset PENSTOCK_{name.upper()}",
                        rank=rank,
                    )
            return _run(start(launch, _measured, board))
        if (job.rank, job.world_size) != (rank, world_size):
            raise ConfigError(
                f"this process is rank {job.rank} of {job.world_size} in the running job, and shall be rank {rank} of "
                f"{world_size} now; call penstock.shutdown() first",
                rank=job.rank,
            )
        board.close()  # nobody meets there
        return job


def leave_for_another(own: Job | None, reason: str) -> None:
    """End the job at once, so that another may begin: what is under way fails on all of its ranks, for this reason.

    Args:
        own: The job that the caller has begun, if it has.
        reason: What the other ranks are told.

    Raises:
        ConfigError: The job that runs is not the caller's to end, or this is a forked child.
    """
    _refuse_in_child("reconfigure")
    with _process.lock:
        job = _process.job
        if job is None:
            return
        if job is not own:
            raise ConfigError(
                f"reconfigure: this process is rank {job.rank} of a job that the process group has not begun; call "
                "penstock.shutdown() first",
                rank=job.rank,
            )
        job.abort(reason)
        shutdown()


def start_server(launch: Launch) -> Job:
    """Join the job as a server, in a process that is nothing else: its end is the caller's.

    Args:
        launch: Of this process.

    Raises:
        PenstockError: As `init`.
    """
    return start(launch, _measured)


def _measured(job: Job) -> Rates:
    """What the links do, in a moment."""
    from penstock.measure.quick import quick_rates

    return quick_rates(job)


def _run(job: Job) -> Job:
    _process.job, job.forget = job, _process.forget
    _process.hooks = Hooks(_process.live)
    if not _process.hooked_fork:
        _process.hooked_fork = True
        os.register_at_fork(after_in_child=_after_fork_in_child)
    return job


def rank() -> int:
    """This process's number, from 0. In an elastic job its place among those that are left, as of the last step.

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.
    """
    running = current("rank")
    return running.rank if running.membership is None else running.membership.rank


def world_size() -> int:
    """The number of processes in the job. In an elastic job of those that are left, as of the last step.

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.
    """
    running = current("world_size")
    return running.world_size if running.membership is None else len(running.membership.members)


def on_members_changed(callback: Callable[[MembersChange], object]) -> None:
    """In an elastic job, call this whenever members were lost or have come, on all ranks at the end of the same step.

    That is the last one that counts with those who were lost, one or two after the one they were lost in. It is called
    on the program's thread, in ``optimizer.step``, or in `penstock.synchronize` where the program updates by itself,
    after those that were given before; `penstock.rank` and `penstock.world_size` have changed by then. Where newcomers
    come it is called in `penstock.Newcomers.let_in`, and not on them: they get what it has changed. In a job that is
    not elastic it is never called.

    Args:
        callback: Is given a `penstock.MembersChange`.

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.

    Example:
        >>> def rescale(change: ps.MembersChange) -> None:
        ...     before = len(change.members) + len(change.lost) - len(change.came)
        ...     for group in optimizer.param_groups:
        ...         group["lr"] *= len(change.members) / before
        >>> ps.on_members_changed(rescale)
    """
    membership = current("on_members_changed").membership
    if membership is not None:
        membership.call(callback)


def membership_log() -> list[MembershipEpoch]:
    """Who took part in an elastic job, from which step on: its epochs so far, the present one last.

    All ranks that are left have the same. An epoch whose ``step`` has not come is known already, and counts from then
    on. In a job that is not elastic there is one epoch.

    Returns:
        Of each epoch its members, by the ranks that they began with; the first step that counts with them, from 1; and
        how many steps were whole before, of the model that has made one first.

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.

    Example:
        >>> for epoch in ps.membership_log():
        ...     print(f"from step {epoch.step} on: {epoch.members}, after {epoch.whole_steps} whole steps")
    """
    running = current("membership_log")
    if running.membership is not None:
        return running.membership.log()
    return [MembershipEpoch(tuple(range(running.world_size)), 1, 0)]


def report() -> Report:
    """What was moved and when, as counted by the engine since `init`: bytes, seconds, slices, preemptions by layer.

    ``call_bytes_sent`` and ``call_bytes_received`` are those of messages and collectives, which belong to no layer.
    ``peers`` has by rank what went to it and came from it, layers and calls together, what waits to be sent to it now,
    and how many segments TCP has sent again; ``tensors_in_flight`` how many tensors are being synchronised now.
    ``lossy`` names the layers that use a lossy scheme, and which; ``local_updates`` what trains by local updates, whose
    results are not those of synchronous training; ``asynchronous``, by model, how stale gradients were with
    ``mode="async"``. ``line_bytes_per_s`` is the line rate as measured at the start, or the most that one connection
    has carried since if that is more; ``None`` with ``line_rate_mbit="off"``. ``line_rate_source`` says where it comes
    from, and whether it is in doubt. ``groups`` has the ranks of workers that sum among themselves (option ``groups``),
    by group, and ``groups_reason`` says why these, or why none. ``through_memory`` has the ranks of this host with
    which bytes have gone through shared memory so far. Where models are on an accelerator ``copies`` has the bytes of
    gradients copied between device and host, the seconds that it took for them, and the share of that time in which
    nothing waited for them. With the option ``metrics``, ``metrics`` is the URL or the file where this rank's are.

    ``late`` says which ranks the others wait for, as of the last steps that were looked at: ``ranks`` has those that
    stand out, the worst first, each by the number that it began with, with how late it is per step (``late_ms`` of
    ``step_ms``), from which layer on, and the cause (``compute``, ``input``, ``network``, ``processing``; none if it is
    not clear). ``until_step`` is the last of these steps, ``judged_steps`` how many they were; ``why`` says why nothing
    is known, if so (docs/lateness.md).

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.

    Example:
        >>> print(ps.report()["bytes_sent"])
        >>> print(ps.report().render())
    """
    found = Report(current("report").engine.report())
    found["line_rate_source"] = current("report").rates.source
    found["groups"] = [list(group) for group in current("report").groups]
    found["groups_reason"] = current("report").groups_reason
    if (metrics := current("report").metrics) is not None:
        found["metrics"] = metrics.place
    found["lossy"], found["local_updates"], found["asynchronous"] = {}, [], {}
    found.update(known_lateness(current("report").engine, current("report").options))
    for one in attached():
        found.update(one.report())
    return found


def shutdown() -> None:
    """Leave the job: finish pending updates, say goodbye, wait a bounded time for the others. Again: does nothing.

    It runs by itself when the program ends. Called while an exception is on its way (``finally: ps.shutdown()``) it
    tells the others that this rank failed, instead of waiting for them. An exception that the program was handling
    already when it joined the job does not count: in ``except ps.PeerLost:`` another job may begin and end.

    Raises:
        PeerLost: A rank was lost before the last updates were in.
        Timeout: The last updates did not come in time.
        ConfigError: In a forked child.
    """
    _refuse_in_child("shutdown")
    error = sys.exc_info()[1]
    with _process.lock:
        job = _process.job
        if job is None:
            return
        if error is not None and error is not job.handled:
            job.abort(described(error))
        elif job.membership is not None:
            launcher_pipe.tell(job.membership.own, over=True)  # before others may miss it
        try:
            job.finish()
        finally:
            _process.forget()
            job.end_failed(at_exit=False)


def current(caller: str = "this call") -> Job:
    """The running job.

    Args:
        caller: The name of the public function, for the message.

    Raises:
        ConfigError: There is none, or this is a forked child.
    """
    _refuse_in_child(caller)
    job = _process.job
    if job is None:
        when = "after penstock.shutdown()" if _process.was_shut_down else "before penstock.init()"
        raise ConfigError(f"penstock.{caller} was called {when}; call penstock.init() first")
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        job.threads.add(thread)
    return job


def refuse_elastic(running: Job, caller: str) -> None:
    """Refuse what an elastic job cannot do yet: what some ranks may have finished, and others not, when one is lost.

    Raises:
        ConfigError: Members of this job may be lost.
    """
    if running.membership is not None:
        raise ConfigError(
            f"penstock.{caller}: an elastic job, whose members may be lost, cannot have this yet: when one is lost, "
            "some ranks may have finished it and others not. Leave it out, or give ps.init(elastic=False)",
            rank=running.rank,
        )


def _refuse_in_child(caller: str) -> None:
    if _process.forked_from is not None:
        raise ConfigError(
            f"penstock.{caller} was called in a process forked from rank {_process.forked_from} (a DataLoader "
            "worker?), which is no rank of its own: read what it needs, such as penstock.rank(), before the fork",
            rank=_process.forked_from,
        )


def _check_same(job: Job, given: dict[str, object]) -> None:
    for name, value in given.items():
        running = getattr(job.options, name)
        if value != running:
            shown = "another" if name == "secret" else f"{name}={value!r}, not {running!r}"
            raise ConfigError(
                f"penstock.init: the job runs already with other options: option {name} is given {shown}; call "
                "penstock.shutdown() first",
                rank=job.rank,
            )


def _after_fork_in_child() -> None:
    """The child inherits descriptors and a lock, but no thread. It keeps the job so that nothing of it is torn down."""
    _process.lock = threading.RLock()
    job = _process.job
    if job is None:
        return
    _process.forked_from = job.rank
    job.engine.after_fork_in_child()
    for one in attached():
        one.after_fork_in_child()
    if job.trace is not None:
        job.trace.abandon()
    if job.metrics is not None:
        job.metrics.abandon()

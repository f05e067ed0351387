"""The process-wide job: from `init` to `shutdown`, and whatever ends the process in between.

One process takes part in one job at a time. This module owns the engine and the three ways out: an orderly shutdown, a
failure whose reason the other ranks should learn, and a fork, whose child must not touch the parent's connections.
It omits everything about tensors, which is `penstock.torch`, and how an end is recognised, which is `penstock.ending`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from penstock import addresses, config, launchers, lending, rendezvous
from penstock.account import Report
from penstock.attached import attached
from penstock.coordinator import Cluster, Rates
from penstock.ending import Hooks, described
from penstock.errors import ConfigError, PenstockError
from penstock.gathering import AllRanks
from penstock.grouping import AUTO, NONE_ASKED_FOR
from penstock.members import MembersChange, Membership, MembershipEpoch
from penstock.tracing.moments import forget_moments
from penstock.version import installed_version

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from penstock._native import Engine
    from penstock.boards import Board
    from penstock.collectives import Group
    from penstock.config import OptionArguments, Options
    from penstock.control import Servers
    from penstock.elastic_calls import ElasticCalls
    from penstock.gathering import Gathering
    from penstock.grouping import Groups
    from penstock.launchers import Launch
    from penstock.rendezvous import Agreement
    from penstock.tracing.recording import Trace

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

_log = logging.getLogger("penstock")

# From this many cores on, a second lane moves more than it takes from the computation.
CORES_PER_LANE = 8
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
        membership: Who is left, of an elastic job.
        calls: Its collectives.
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
    membership: Membership | None = None
    calls: ElasticCalls | None = None

    @property
    def rank(self) -> int:
        """This process's number, from 0, among the workers, or among the servers, as the job began."""
        return self.launch.options.rank

    @property
    def world_size(self) -> int:
        """The number of workers, as the job began."""
        return self.launch.options.world_size

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

    @cached_property
    def everybody(self) -> Group:
        """All workers and servers, in the order of the engine's ranks."""
        from penstock.collectives import GROUPS_OWN, Group

        number = GROUPS_OWN if self.options.servers else 0
        if number:
            self.engine.form_group(number, list(range(self.options.ranks)))
        return Group(self.engine, number, range(self.options.ranks), self.options.engine_rank)

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
            self.engine.abort(_one_line(self.failed))

    def end_trace(self, why: str) -> None:
        """No trace goes on after the job."""
        if self.trace is not None:
            self.trace.end(why)
        forget_moments(self.engine)

    def end(self, by_status: str | None) -> None:
        """The process ends: leave the job, without raising; see `penstock.ending`."""
        try:
            _finish(self, by_status)
        except PenstockError:
            _log.exception("rank %d: the job did not end in order", self.rank)
        finally:
            # Not earlier: what is pending belongs to the current job.
            _process.forget()
            _after(self, at_exit=True)


def _one_line(reason: str) -> str:
    return " ".join(reason.split())[:REASON_CHARACTERS_MAX]


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
        _run(_start(launch))


def init_at_store(board: Board, rank: int, world_size: int, *, operation_timeout_s: float | None = None) -> Job:
    """Join the job of a program that has a place where its ranks meet; if it runs already, take part in that.

    Args:
        board: The place, in a store that all ranks share.
        rank: This process.
        world_size: The number of processes.
        operation_timeout_s: Of a job that begins, if it is given.

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
            launch = launchers.at_store(rank, world_size, operation_timeout_s=operation_timeout_s)
            if launch.options.elastic:
                raise ConfigError(
                    "option elastic is for programs that call penstock.init, and not for groups of torch.distributed; "
                    "unset PENSTOCK_ELASTIC",
                    rank=rank,
                )
            return _run(_start(launch, board))
        if (job.rank, job.world_size) != (rank, world_size):
            raise ConfigError(
                f"this process is rank {job.rank} of {job.world_size} in the running job, and shall be rank {rank} of "
                f"{world_size} now; call penstock.shutdown() first",
                rank=job.rank,
            )
        board.close()  # nobody meets there
        return job


def start_server(launch: Launch) -> Job:
    """Join the job as a server, in a process that is nothing else: its end is the caller's.

    Args:
        launch: Of this process.

    Raises:
        PenstockError: As `init`.
    """
    return _start(launch)


def _run(job: Job) -> Job:
    _process.job = job
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
    """In an elastic job, call this whenever members were lost, on all ranks at the end of the same step.

    That is the last one that counts with those who were lost, one or two after the one they were lost in. It is called
    on the program's thread, in ``optimizer.step``, or in `penstock.synchronize` where the program updates by itself,
    after those that were given before; `penstock.rank` and `penstock.world_size` have changed by then. In a job that is
    not elastic it is never called.

    Args:
        callback: Is given a `penstock.MembersChange`.

    Raises:
        ConfigError: Before `init` or after `shutdown`, or in a forked child.

    Example:
        >>> def rescale(change: ps.MembersChange) -> None:
        ...     for group in optimizer.param_groups:
        ...         group["lr"] *= len(change.members) / (len(change.members) + len(change.lost))
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
        how many steps were whole before, of the model that was distributed first.

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
    ``lossy`` names the layers that use a lossy scheme, and which; ``local_updates`` what trains by local updates, whose
    results are not those of synchronous training; ``asynchronous``, by model, how stale gradients were with
    ``mode="async"``. ``line_bytes_per_s`` is the line rate as measured at the start, or the most that one connection
    has carried since if that is more; ``None`` with ``line_rate_mbit="off"``. ``line_rate_source`` says where it comes
    from, and whether it is in doubt. ``groups`` has the ranks of workers that sum among themselves (option ``groups``),
    by group, and ``groups_reason`` says why these, or why none. ``through_memory`` has the ranks of this host with
    which bytes have gone through shared memory so far. Where models are on an accelerator ``copies`` has the bytes of
    gradients copied between device and host, the seconds that it took for them, and the share of that time in which
    nothing waited for them.

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
    found["lossy"], found["local_updates"], found["asynchronous"] = {}, [], {}
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
        try:
            _finish(job)
        finally:
            _process.forget()
            _after(job, at_exit=False)


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


# Starting


def _start(launch: Launch, board: Board | None = None) -> Job:
    _check_elastic(launch.options)
    _check_encrypt(launch.options)
    lanes = launch.options.lanes or max(1, min(2, len(os.sched_getaffinity(0)) // CORES_PER_LANE))
    door = _EngineDoor(launch)
    try:
        if launch.meeting_point is None:
            secret = launch.options.secret or os.urandom(32)
            agreement = rendezvous.Agreement(os.urandom(16), secret, True, lanes, False, launch.options)
            door.connect([door.listen(agreement)])
        else:
            agreement = rendezvous.exchange(launch, door, version=installed_version(), lanes=lanes, board=board)
        return _joined(replace(launch, options=agreement.options), door, agreement)
    except BaseException as error:  # an interrupt, too: the others wait for this rank
        door.close(error)
        raise


class _EngineDoor:
    """The engine while the ranks meet; see `rendezvous.Door`."""

    def __init__(self, launch: Launch) -> None:
        self.point, self.interface = launch.meeting_point, launch.options.interface
        self.chosen: addresses.Chosen | None = None
        self.engine: Engine | None = None
        self.hosts: list[str] = []

    def listen(self, agreement: Agreement) -> tuple[str, int]:
        if self.point is None:
            self.chosen = addresses.Chosen("127.0.0.1", "lo", "alone")
        else:
            self.chosen = addresses.choose_here(self.interface, agreement.single_host, self.point.host)
        self.engine = _bind(agreement.options, agreement, self.chosen.host)
        return self.chosen.host, self.engine.port

    def connect(self, table: list[tuple[str, int]]) -> None:
        assert self.engine is not None  # it listens
        self.hosts = [host for host, _ in table]
        self.engine.connect(table)

    def check(self) -> None:
        assert self.engine is not None  # it is connected
        self.engine.check()

    def close(self, error: BaseException) -> None:
        """The start has failed. Others may have got further, and are told whose fault it is."""
        if self.engine is None:
            return
        with contextlib.suppress(PenstockError):  # what failed is on its way up
            self.engine.abort(_one_line(described(error)), error.rank if isinstance(error, PenstockError) else None)
        with contextlib.suppress(PenstockError):
            self.engine.shutdown()


def _joined(launch: Launch, door: _EngineDoor, agreement: Agreement) -> Job:
    """The job, once all know each other's addresses."""
    engine, chosen, hosts = door.engine, door.chosen, agreement.hosts
    assert engine is not None and chosen is not None  # it is connected
    _announce(launch, chosen, agreement, engine.port)
    address = f"{chosen.host}:{engine.port}"
    job = Job(engine, launch, agreement.job_id, address, agreement.single_host, agreement.groups)
    job.hosts = hosts if 1 < len(set(hosts)) < len(hosts) else ()
    job.rates = _rates(job)
    _choose_groups(job, hosts)
    if job.options.ranks > 1 and job.options.line_rate_mbit != 0.0:
        engine.set_rates(_of_each(job))
        if job.options.engine_rank == 0:
            slice_bytes, _, slicing_lanes = engine.slicing()
            _log.info("slices of up to %d KiB on %d of %d lanes", slice_bytes >> 10, slicing_lanes, agreement.lanes)
    if launch.options.role == "worker":
        _ = job.servers  # no later than the servers themselves
    if job.options.elastic and job.options.ranks > 1:
        _go_on_after_losses(job, door.hosts)
    if job.options.trace is not None:
        from penstock.tracing.recording import begin

        begin(job, job.options.trace, job.options.traced_steps())
    return job


def _choose_groups(job: Job, hosts: tuple[int, ...]) -> None:
    """With ``groups="auto"``: those that pay, if any. Each rank decides, from hosts and rates that all have alike."""
    options = job.options
    if options.groups != AUTO:
        job.groups_reason = NONE_ASKED_FOR if options.groups is None else f"as given: {options.groups}"
        return
    workers, servers = options.world_size, options.servers
    cluster = Cluster(workers, servers or workers, servers_apart=servers > 0, hosts=hosts)
    job.groups, job.groups_reason = cluster.best_groups(job.rates)
    if options.engine_rank == 0:
        _log.info("groups, as chosen: %s", job.groups_reason)


def _go_on_after_losses(job: Job, hosts: list[str]) -> None:
    """Let the others go on from now on when members are lost; all must be reachable for that by another port."""
    from penstock.elastic_calls import ElasticCalls

    port = job.engine.council_port
    assert port is not None  # it is elastic
    ports = job.engine.all_gather("penstock.init", port.to_bytes(2, "little"))
    councils = [(host, int.from_bytes(port, "little")) for host, port in zip(hosts, ports, strict=True)]
    job.calls = ElasticCalls(job.engine, job.rank, job.options.ranks)
    job.engine.go_on_after_losses(councils, job.options.ranks_min)
    job.membership = Membership(job.engine, job.rank)


def _check_elastic(options: Options) -> None:
    """Refuse what an elastic job cannot do.

    Raises:
        ConfigError: Naming the option.
    """
    if not options.elastic:
        if options.ranks_min is not None:
            raise ConfigError("option ranks_min is for elastic jobs: give elastic=True (PENSTOCK_ELASTIC), too")
        return
    found = {"servers": options.servers > 0, "groups": options.groups is not None}
    for name, given in found.items():
        if given:
            raise ConfigError(
                f"option elastic: a job whose members may be lost cannot have {name} yet; leave out one of the two"
            )
    if options.ranks_min is not None and options.ranks_min > options.world_size:
        raise ConfigError(
            f"option ranks_min: {options.ranks_min} workers cannot be left of {options.world_size} (world_size)"
        )


def _check_encrypt(options: Options) -> None:
    """Refuse encryption by a secret that is none.

    Raises:
        ConfigError: Naming the option.
    """
    if options.encrypt and options.insecure:
        raise ConfigError(
            "option encrypt: with insecure=True (PENSTOCK_INSECURE) whoever reaches the meeting point reads the "
            "secret, so nothing would be hidden from them; leave out insecure and give a secret"
        )


def _of_each(job: Job) -> Rates:
    """What a rank has of its host's line while others of the host use it, too; in groups that is the head alone."""
    members = {rank for group in job.groups for rank in group[1:]}
    using = Counter(host for rank, host in enumerate(job.hosts) if rank not in members)
    return replace(job.rates, bytes_per_s=job.rates.bytes_per_s / max(using.values(), default=1))


def _rates(job: Job) -> Rates:
    """What the option says, or what the links are measured to do."""
    given = job.options.line_rate_mbit
    if job.options.ranks == 1 or given == 0.0:
        return Rates()
    if given is not None:
        return Rates(bytes_per_s=given * 1e6 / 8, source="line rate as given")
    from penstock.measure.quick import quick_rates

    return quick_rates(job)


def _bind(options: Options, agreement: Agreement, host: str) -> Engine:
    """An engine that listens on the first free port of those allowed."""
    last: Exception | None = None
    for port in options.ports():
        try:
            return _engine_class()(
                rank=options.engine_rank,
                size=options.ranks,
                servers=options.servers,
                bind_host=host,
                port=port,
                secret=agreement.secret,
                job_id=agreement.job_id,
                slice_bytes=options.slice_bytes or 0,  # 0: the engine decides
                lanes=agreement.lanes,
                all_lanes=agreement.all_lanes,
                window_bytes=options.window_bytes or 0,
                priority=options.priority,
                operation_timeout_s=options.operation_timeout_s,
                peer_timeout_s=options.peer_timeout_s,
                handshake_timeout_s=options.handshake_timeout_s,
                congestion_control=options.congestion_control,
                shared_memory=options.shared_memory,
                encrypt=options.encrypt,
                observations=options.observations,
                elastic=options.elastic,
            )
        except (ConfigError, OSError) as error:
            last = error
    raise ConfigError(
        f"{options.name_of(options.engine_rank)} cannot listen on {host}, port {options.port}: {last}. Set port "
        "(PENSTOCK_PORT) to 0 for any free one or to another range",
        rank=options.engine_rank,
    ) from last


def _engine_class() -> type[Engine]:
    try:
        from penstock._native import Engine
    except ImportError as error:
        raise ConfigError(
            f"the native part of penstock does not load: {error}. Install the wheel, or run `make build` in "
            "a source tree"
        ) from error
    engine: type[Engine] = Engine
    return engine


def _announce(launch: Launch, chosen: addresses.Chosen, agreement: Agreement, port: int) -> None:
    """One line that answers what a user asks first when something is odd: who, where, and by whose decision."""
    options, sources, point = launch.options, launch.sources, launch.meeting_point
    secret = sources["secret"] if options.secret is not None else "made by rank 0, readable by this user alone"
    if options.secret is None and options.insecure:
        secret = "made by rank 0, readable by whoever reaches the meeting point (insecure)"
    _log.info(
        "%s of %d (%s)%s listens on %s:%d, interface %s (%s); met at %s (%s); lanes %d (%s), slice_bytes %s "
        "(%s), priority %s (%s), secret: %s",
        options.name_of(options.engine_rank),
        options.world_size if options.role == "worker" else options.servers,
        sources["rank"],
        f", with {options.servers} servers," if options.servers and options.role == "worker" else "",
        chosen.host,
        port,
        chosen.interface,
        chosen.reason,
        point or "no place",
        point.found_in if point is not None else "a single process",
        agreement.lanes,
        sources["lanes"],
        options.slice_bytes or "auto",
        sources["slice_bytes"],
        "on" if options.priority else "off",
        sources["priority"],
        secret,
    )


# Ending


def _finish(job: Job, by_status: str | None = None) -> None:
    """Bring in what is pending, unless this rank has failed, and close the engine in any case.

    Args:
        job: The job.
        by_status: In order only if the exit status of the process will be 0; otherwise the reason that the others get.
    """
    try:
        for one in attached() if job.failed is None else ():
            one.finish(job.options.operation_timeout_s)
    except BaseException as error:
        job.abort(described(error))
        raise
    finally:
        try:
            if job.failed is not None:
                job.abort(job.failed)
                with contextlib.suppress(PenstockError):  # the reason is already on its way up or told
                    job.engine.shutdown()
            elif by_status is not None:
                reason = _one_line(by_status)
                try:
                    job.servers.end()
                finally:
                    job.end_trace("the program ends")  # later there is no interpreter
                    job.engine.shutdown_by_status(reason, lending.lent_to(job.engine))
            else:
                try:
                    job.servers.end()
                finally:
                    job.engine.shutdown()
        except PenstockError as error:
            for one in attached():
                one.explain(job.engine, error)
            raise
        finally:
            job.end_trace("the job has ended" if job.failed is None else job.failed)
            if by_status is None:
                for one in attached():
                    one.let_go(job.engine)
                lending.forget_lent(job.engine)


def _after(job: Job, *, at_exit: bool) -> None:
    """After the end of a job: where it has failed, nothing may keep the process."""
    for one in attached() if job.failed is not None or job.engine.has_failed else ():
        one.end_failed(job.options.peer_timeout_s, at_exit=at_exit)


def _after_fork_in_child() -> None:
    """The child inherits descriptors and a lock, but no thread. It keeps the job so that nothing of it is torn down."""
    _process.lock = threading.RLock()
    job = _process.job
    if job is None:
        return
    _process.forked_from = job.rank
    job.engine.after_fork_in_child()
    if job.trace is not None:
        job.trace.abandon()

"""How a job begins in this process: options are checked, ranks meet or a newcomer comes, the engine listens.

Omits what ranks say when they meet (`penstock.rendezvous`) and what newcomers hear (`penstock.doorway`).
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import addresses, launcher_pipe, rendezvous, replaying
from penstock.coordinator import Cluster, Rates
from penstock.ending import described
from penstock.errors import ConfigError, PenstockError, Timeout
from penstock.grouping import AUTO, NONE_ASKED_FOR
from penstock.log_keeping import LogKeeper, header_of
from penstock.members import EngineCourse, Membership
from penstock.metrics.exporting import begin as begin_metrics
from penstock.metrics.exporting import check_library
from penstock.running import Job, one_line
from penstock.tracing.moments import moments_of
from penstock.version import installed_version

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.boards import Board
    from penstock.config import Options
    from penstock.launchers import Launch
    from penstock.membership_file import LoggedRun
    from penstock.rendezvous import Agreement

__all__ = ["arrive", "open_door", "start"]

_log = logging.getLogger("penstock")

# From this many cores on, a second lane moves more than it takes from the computation.
CORES_PER_LANE = 8


def start(launch: Launch, measure: Callable[[Job], Rates], board: Board | None = None) -> Job:
    """Join the job: meet the others, or come to those that are there.

    Args:
        launch: Of this process.
        measure: Measures what the links do, on all ranks.
        board: Where to meet, if the program has such a place.

    Raises:
        PenstockError: As `penstock.init`.
    """
    _check_encrypt(launch.options)
    run = replaying.asked_for()
    if run is not None:
        launch = replaying.as_it_was(launch, run)
    if launch.options.metrics is not None:
        check_library()
    if launch.options.join is not None:
        return _start_as_newcomer(launch, run)
    _check_elastic(launch.options)
    lanes = launch.options.lanes or max(1, min(2, len(os.sched_getaffinity(0)) // CORES_PER_LANE))
    door = _EngineDoor(launch)
    try:
        if launch.meeting_point is None:
            secret = launch.options.secret or os.urandom(32)
            agreement = rendezvous.Agreement(os.urandom(16), secret, True, lanes, False, launch.options)
            door.connect([door.listen(agreement)])
        else:
            agreement = rendezvous.exchange(launch, door, version=installed_version(), lanes=lanes, board=board)
        return _joined(replace(launch, options=agreement.options), door, agreement, measure, run)
    except BaseException as error:  # an interrupt, too: the others wait for this rank
        door.close(error)
        raise


def _start_as_newcomer(launch: Launch, run: LoggedRun | None) -> Job:
    """A part in a job that runs, which is taken when there is a model: until then nobody waits for this process."""
    from penstock.doorway import Entrance

    visit = Entrance(launch.options, launch.sources, installed_version())
    try:
        agreement, rates = visit.enter()
        if run is not None:
            replaying.take_number(run, agreement.options.rank)
        launch = replace(launch, options=agreement.options)
        # Ranks of one host may listen to others, too (option interface): then this one may be on another.
        is_here = agreement.single_host and addresses.is_loopback(visit.host)
        chosen = addresses.choose_here(launch.options.interface, is_here, visit.host)
        engine = _bind(launch.options, agreement, chosen.host)
    finally:
        visit.close()  # it is opened again when this process takes part
    address = f"{chosen.host}:{engine.port}"
    _log.info("rank %d comes to the job at %s, and is reached at %s", launch.options.rank, launch.options.join, address)
    job = Job(engine, launch, agreement.job_id, address, agreement.single_host, agreement=agreement, visit=visit)
    hosts = agreement.hosts
    job.hosts = hosts if 1 < len(set(hosts)) < len(hosts) else ()
    job.rates = rates
    if job.options.line_rate_mbit != 0.0:
        engine.set_rates(_of_each(job))  # slices are cut by them
    if run is not None:
        engine.cut_as(*run.header.slicing)
    _begin_membership(job, run, arriving=True)
    moments_of(engine).arriving = True
    _begin_what_is_seen(job, agreement)
    return job


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
            self.engine.abort(one_line(described(error)), error.rank if isinstance(error, PenstockError) else None)
        with contextlib.suppress(PenstockError):
            self.engine.shutdown()


def _joined(
    launch: Launch, door: _EngineDoor, agreement: Agreement, measure: Callable[[Job], Rates], run: LoggedRun | None
) -> Job:
    """The job, once all know each other's addresses."""
    engine, chosen, hosts = door.engine, door.chosen, agreement.hosts
    assert engine is not None and chosen is not None  # it is connected
    _announce(launch, chosen, agreement, engine.port)
    address = f"{chosen.host}:{engine.port}"
    job = Job(engine, launch, agreement.job_id, address, agreement.single_host, agreement.groups, agreement=agreement)
    job.hosts = hosts if 1 < len(set(hosts)) < len(hosts) else ()
    job.rates = _rates(job, measure)
    _choose_groups(job, hosts)
    if job.options.ranks > 1 and job.options.line_rate_mbit != 0.0:
        engine.set_rates(_of_each(job))
        if job.options.engine_rank == 0:
            slice_bytes, _, slicing_lanes = engine.slicing()
            _log.info("slices of up to %d KiB on %d of %d lanes", slice_bytes >> 10, slicing_lanes, agreement.lanes)
    if launch.options.role == "worker":
        _ = job.servers  # no later than the servers themselves
    if job.options.elastic and job.options.ranks > 1:
        if run is not None:
            engine.cut_as(*run.header.slicing)
        _go_on_after_losses(job, door.hosts, run)
    _begin_what_is_seen(job, agreement)
    return job


def _begin_what_is_seen(job: Job, agreement: Agreement) -> None:
    """The metrics, the trace and the status that options ask for."""
    try:
        if job.options.metrics is not None:
            job.metrics = begin_metrics(job.engine, job.options, job.job_id, agreement.hosts)
        if job.options.trace is not None:
            from penstock.tracing.recording import begin

            begin(job, job.options.trace, job.options.traced_steps())
        if job.options.status is not None:
            from penstock.live import live_status

            live_status.begin(job, job.options.status)
    except BaseException:
        job.end_what_is_seen("the job could not begin")
        raise


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


def _go_on_after_losses(job: Job, hosts: list[str], run: LoggedRun | None) -> None:
    """Let the others go on from now on when members are lost; all must be reachable for that by another port."""
    from penstock.elastic_calls import ElasticCalls

    port = job.engine.council_port
    assert port is not None  # it is elastic
    ports = job.engine.all_gather("penstock.init", port.to_bytes(2, "little"))
    councils = [(host, int.from_bytes(port, "little")) for host, port in zip(hosts, ports, strict=True)]
    ranks, limit_s = job.options.ranks, job.options.operation_timeout_s
    job.calls = ElasticCalls(job.engine, job.rank, ranks, range(ranks), limit_s)
    job.engine.go_on_after_losses(councils, job.options.ranks_min, job.options.ranks_max)
    _begin_membership(job, run)
    assert job.membership is not None  # since now
    job.membership.takes(job.calls)
    _keep_log(job)
    if run is not None and job.agreement is not None:
        replaying.check_program(header_of(job.engine, job.agreement), run)


def _begin_membership(job: Job, run: LoggedRun | None, *, arriving: bool = False) -> None:
    """From now on this rank knows who takes part; in a replay it hears that from the log of the run."""
    if run is not None:
        options = job.options
        limits = (options.operation_timeout_s, options.rendezvous_timeout_s)
        job.replay = replaying.LoggedCourse(job.engine, run, job.rank, *limits)
    job.membership = membership = Membership(job.replay or EngineCourse(job.engine), job.rank, arriving=arriving)
    # A launcher hears without whom this rank goes on: those may never end by themselves.
    membership.call(lambda change: launcher_pipe.tell(membership.own, lost=change.lost) if change.lost else None)


def _keep_log(job: Job) -> None:
    """Let the log of this job be kept, if it is to be, and let those know of its collectives who want to."""
    assert job.membership is not None and job.calls is not None  # it is elastic
    path = job.options.membership_log
    if path is not None:
        assert job.agreement is not None  # of several ranks
        header = header_of(job.engine, job.agreement)
        job.membership.unlogged.add(job.calls.book)  # the log has collectives of its own
        job.log = LogKeeper(Path(path), header, job.engine, job.membership)
        job.membership.note = job.log.look
    job.calls.order = job.replay or job.log


def _check_elastic(options: Options) -> None:
    """Refuse what an elastic job cannot do.

    Raises:
        ConfigError: Naming the option.
    """
    if not options.elastic:
        for name in ("ranks_min", "ranks_max"):
            if getattr(options, name) is not None:
                raise ConfigError(f"option {name} is for elastic jobs: give elastic=True (PENSTOCK_ELASTIC), too")
        if options.membership_log is not None:
            raise ConfigError(
                "option membership_log: members change in elastic jobs alone: give elastic=True (PENSTOCK_ELASTIC), "
                "too, or leave it out"
            )
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
    if options.ranks_max is not None and options.ranks_max < options.world_size:
        raise ConfigError(
            f"option ranks_max: the job begins with {options.world_size} workers (world_size), and may have no more "
            f"than {options.ranks_max}"
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


def _rates(job: Job, measure: Callable[[Job], Rates]) -> Rates:
    """What the option says, or what the links are measured to do."""
    given = job.options.line_rate_mbit
    if job.options.ranks == 1 or given == 0.0:
        return Rates()
    if given is not None:
        return Rates(bytes_per_s=given * 1e6 / 8, source="line rate as given")
    return measure(job)


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


def open_door(running: Job) -> str:
    """Let newcomers come to this rank from now on; once is enough.

    Args:
        running: An elastic job.

    Returns:
        ``host:port``, for their option ``join``.

    Raises:
        ConfigError: It cannot listen.
    """
    if running.door is None:
        from penstock.doorway import Doorway

        assert running.agreement is not None  # of several ranks
        running.door = Doorway(running.engine, running.host, running.agreement, running.rates, installed_version())
        _log.info("rank %d: newcomers come in at join=%s", running.rank, running.door.address)
        assert running.membership is not None
        launcher_pipe.tell(running.membership.own, door=running.door.address)
    return running.door.address


def arrive(running: Job) -> None:
    """A newcomer takes part from now on: wait until the others let it in. Later calls do nothing.

    Raises:
        Timeout: They do not within ``rendezvous_timeout_s``.
        PenstockError: The job has ended, or goes on without this process.
    """
    membership, visit, options = running.membership, running.visit, running.options
    if running.calls is not None or membership is None or visit is None:
        return
    from penstock.elastic_calls import ElasticCalls

    try:
        state = visit.state()
    finally:
        visit.close()
    limit_s = options.rendezvous_timeout_s
    if not running.engine.come(state, running.host, options.ranks_min, limit_s):
        late = f"rank {running.rank}, a newcomer, was not let in within {limit_s:g} s (rendezvous_timeout_s): "
        if options.ranks_max is not None and len(running.engine.members()) >= options.ranks_max:
            late += f"the job has {options.ranks_max} workers, and may have no more (ranks_max), until one is lost"
        else:
            late += (
                "members let newcomers in where their programs call `let_in` of penstock.Newcomers, once in each step"
            )
        running.abort(late)
        raise Timeout(late, rank=running.rank)
    membership.come()
    limit_s = options.operation_timeout_s
    running.calls = ElasticCalls(running.engine, running.rank, running.world_size, membership.members, limit_s)
    membership.takes(running.calls)
    _keep_log(running)

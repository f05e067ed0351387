"""How the ranks of a job find each other and agree before the first connection.

Every rank gets the same job id and secret, and the table of addresses by rank. Rank 0 decides; the others read. They
share a *board* (set, get, delete; nothing blocks), which is the launcher's or the program's store, one that rank 0
holds, or a private directory:

    rank 0                          board                               rank r
    job id, fresh and random  ->    job                                 where the secret comes from
                                    <job id>/arrival/r            <-    version, nonce, options
    all ranks checked         ->    <job id>/admission            ->    nonces, what was agreed
                                    <job id>/address/r            <-    host and port, now bound
    complete                  ->    <job id>/table                ->    addresses by rank
    cleans up                       <job id>/done/r               <-    read

That is 3n + 3 keys for n ranks and one connection per rank. Whoever has the table can be connected to from then on,
rank 0 first of all: one that stays only to clean up would look lost to those that go on. While it stays, it hears of a
lost rank as all others do. Nothing stale is ever believed: rank 0 reads only keys
under its own fresh job id, and the others accept only an admission that repeats their nonce. A rank that fails says why
under ``<job id>/trouble``, and rank 0 in place of its next message, so that every rank raises the same error at once,
not at its limit.

Every message proves that its sender holds the secret (`penstock.sharing` says where that comes from). Where strangers
can write, what is not proved is left alone, put right by whoever it is about, and named as the probable cause if that
rank never comes. What stays in doubt is who may be believed in a job that was given no secret: there a message that
says why it cannot prove anything ends the start.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock import errors, sharing
from penstock.addresses import host_identity
from penstock.boards import Board, first_line, open_board, polls
from penstock.errors import ConfigError, PenstockError, ProtocolError, Timeout
from penstock.grouping import Groups, members
from penstock.sealing import SealedMessage, peek, seal, unseal

if TYPE_CHECKING:
    from penstock.config import Options
    from penstock.launchers import Launch

__all__ = ["AGREED", "Agreement", "Door", "exchange"]

_log = logging.getLogger("penstock")

# How long rank 0 stays to tell late ranks why the job does not start, in seconds; in vain for one that has died.
ERROR_LINGER_S = 3.0
LEADERS_WORD_S = 2.0  # how much longer than rank 0 the others wait for it to say who is missing
INSISTENCE = 3
"""So often must a message of rank 0 that this rank cannot believe come back after it was removed. What a stranger, or a
job that died, has left does not come back; a rank 0 with another secret puts it right each time."""
READ_S = 2.0  # after which a rank that has something under ``done``, even if unproven, counts as having read the table


@dataclass(frozen=True)
class Agreement:
    """What all ranks hold in common once they have met.

    Attributes:
        job_id: 16 random bytes, fresh for every start.
        secret: 32 bytes that prove membership.
        single_host: Whether all ranks share this machine's loopback interface.
        lanes: Threads that move data, the same on every rank.
        all_lanes: Whether slices use all of them, because rank 0 was told their number.
        options: Those of this rank. A server, which runs no program that could say them, has rank 0's where it was
            told none.
        groups: Of workers that sum among themselves, as far as the option says it by itself.
        hosts: By rank, workers first: the number of its host, from 0 in the order of ranks.
    """

    job_id: bytes
    secret: bytes
    single_host: bool
    lanes: int
    all_lanes: bool
    options: Options = field(compare=False)
    groups: Groups = ()
    hosts: tuple[int, ...] = ()


class Door(Protocol):
    """What a rank brings along: the end of its connections to the others."""

    def listen(self, agreement: Agreement) -> tuple[str, int]:
        """The ranks agree: bind the listener; its host and port."""

    def connect(self, table: list[tuple[str, int]]) -> None:
        """Here is where each rank listens: take connections from now on, and make them."""

    def check(self) -> None:
        """Raise what has ended the job since."""


class _Told(Exception):
    """Carries an error that another rank published."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


def _told(failure: Mapping[str, Any]) -> _Told:
    name = str(failure["type"])
    kind = getattr(errors, name) if name in errors.__all__ else PenstockError
    return _Told(kind(str(failure["message"]), rank=failure["rank"]))


def _listed(what: str, numbers: Collection[int]) -> str:
    """``rank 3``, ``ranks 1, 2, 5 and 90 more``, or nothing."""
    if not numbers:
        return ""
    shown = sorted(numbers)[:16]
    more = f" and {len(numbers) - len(shown)} more" if len(numbers) > len(shown) else ""
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, shown))}{more}"


# Options that shape what is sent: every rank must have the same.
AGREED = (
    "world_size",
    "servers",
    "groups",
    "slice_bytes",
    "broadcast_buffers",
    "line_rate_mbit",
    "check_every",
    "lateness",
    "policy",
    "collective_schemes",
    "encrypt",
    "elastic",
    "ranks_min",
    "ranks_max",
)


_SIZES = ("world_size", "servers")


class _Meeting(ABC):
    """One rank's side of the exchange in the module's first comment: what both sides share."""

    def __init__(self, board: Board, launch: Launch, version: str, deadline: float) -> None:
        self.board = board
        self.options = launch.options
        self.sources = launch.sources
        assert launch.meeting_point is not None, "a single process meets nobody"
        self.point = launch.meeting_point
        self.rank = launch.options.engine_rank
        self.size = launch.options.ranks
        self.version = version
        self.deadline = deadline
        self.job = ""
        self.secret: bytes | None = None
        self.own: dict[str, bytes] = {}  # what this rank has put on the board and must stay there
        self.doubts: dict[int, PenstockError] = {}  # by sender: what came in its name, and why it is not believed

    @property
    def given(self) -> bool:
        """Whether this rank was given a secret."""
        return self.options.secret is not None

    def _key(self, stage: str, rank: int | None = None) -> str:
        return f"{self.job}/{stage}" + ("" if rank is None else f"/{rank}")

    def _put(self, stage: str, body: Mapping[str, object], *, rank: int | None = None, keep: bool = False) -> None:
        key = self._key(stage, rank)
        data = seal(self.version, self.secret, self.given, key, body)
        self.board.set(key, data)
        if keep:
            self.own[key] = data

    def _take(self, stage: str, *, rank: int | None = None) -> dict[str, Any] | None:
        """The body of a message that is there and proven; then a published failure is raised."""
        key = self._key(stage, rank)
        data = self.board.get(key)
        if data is None:
            return None
        message, sender = unseal(data, self.secret, key), rank or 0
        if message is None or not message.proven or message.version != self.version:
            error = self._objection(message, sender)
            known = message is not None and message.proven
            # Without a secret that was given nobody can prove that it belongs to the job, and lacks only that.
            if known or self.board.private or (message is not None and not self.given):
                raise error
            self._doubt(sender, error)
            return None
        if "error" in message.body:
            raise _told(message.body["error"])
        return message.body

    def _objection(self, message: SealedMessage | None, sender: int) -> PenstockError:
        """Why a message is not believed."""
        if message is None:
            return ProtocolError(
                f"rank {self.rank} cannot read what rank {sender} left at the meeting point; is another program using "
                "it?",
                rank=sender,
            )
        if message.version != self.version:
            return ProtocolError(
                f"rank {sender} runs penstock {message.version}, rank {self.rank} runs penstock {self.version}; "
                "install the same version on every rank",
                rank=sender,
            )
        if message.given != self.given:
            has, lacks = (sender, self.rank) if message.given else (self.rank, sender)
            return sharing.one_was_given_a_secret(has, lacks)
        if self.given:
            return sharing.secrets_differ(max(sender, self.rank))
        if message.body.get("host") in (None, host_identity()):
            return sharing.made_secret_not_taken(max(sender, self.rank))
        return sharing.needs_a_given_secret(sender, self.rank)

    def _doubt(self, sender: int, error: PenstockError) -> None:
        if sender not in self.doubts:
            _log.warning(
                "rank %d: a message in the name of rank %d is left alone, as it proves nothing: %s. It may be a "
                "stranger's; waiting for another",
                self.rank,
                sender,
                error,
            )
        self.doubts[sender] = error

    def _heed(self) -> None:
        """Raise what another rank says has gone wrong."""
        if not self.job:
            return
        key = self._key("trouble")
        data = self.board.get(key)
        message = None if data is None else unseal(data, self.secret, key)
        if message is not None and (message.proven or self.board.private) and "error" in message.body:
            raise _told(message.body["error"])

    def _keep(self) -> None:
        """Put right what somebody has changed of this rank's; if that is another process of this rank, say so."""
        for key, mine in self.own.items():
            found = self.board.get(key)
            if found == mine:
                continue
            if found is not None:
                self._refuse_double(key, found)
            self.board.set(key, mine)

    @abstractmethod
    def _refuse_double(self, key: str, found: bytes) -> None:
        """Raise if this key holds what another process that calls itself this rank has left."""

    def _doubled(self) -> ConfigError:
        one_job = "; one job at a time can meet there" if self.rank == 0 else "; ranks must differ"
        return ConfigError(
            f"two processes call themselves {self.options.name_of(self.rank)} at {self.point}{one_job}", rank=self.rank
        )

    def _late(self, missing: Collection[int], what: str) -> PenstockError:
        text = (
            f"{self._named(missing)} of {self.size} did not {what} within {self.options.rendezvous_timeout_s:g} s at "
            f"{self.point}. Check that every rank was started, with the same world size and meeting point, and see the "
            "log of those named; rendezvous_timeout_s sets the limit"
        )
        for rank in sorted(missing):
            doubt = self.doubts.get(rank)
            if doubt is not None:
                name = self.options.name_of(rank)
                return type(doubt)(f"{text}. Something came in the name of {name}: {doubt}", rank=rank)
        return Timeout(text, rank=min(missing))

    def _named(self, numbers: Collection[int]) -> str:
        """``rank 3`` or ``ranks 1, 2, 5 and server 0``."""
        workers = [number for number in numbers if number < self.options.world_size]
        servers = [number - self.options.world_size for number in numbers if number >= self.options.world_size]
        both = [_listed("rank", workers), _listed("server", servers)]
        return " and ".join(filter(None, both))

    def _failure(self, error: BaseException) -> dict[str, object]:
        """What the others are told of an error."""
        told = isinstance(error, PenstockError)
        what = str(error) if told else f"failed while the ranks were meeting: {_describe(error)}"
        return {
            "type": type(error).__name__ if told else "PeerLost",
            "message": f"{self.options.name_of(self.rank)}: {what}",
            "rank": error.rank if isinstance(error, PenstockError) and error.rank is not None else self.rank,
        }


class _Leader(_Meeting):
    """Rank 0's side."""

    def __init__(self, board: Board, launch: Launch, version: str, deadline: float, lanes: int) -> None:
        super().__init__(board, launch, version, deadline)
        self.lanes = lanes
        self.nonces: dict[int, str] = {}  # of the ranks that have arrived
        self.shared = sharing.SharedSecret(self.options, board.private)
        self.secret = self.shared.secret

    def meet(self) -> Agreement:
        """The first half: open the job, check everybody, admit them."""
        job_id = secrets.token_bytes(16)
        self.job = job_id.hex()
        self.board.guard(self.job, self._proven)
        opening = {"id": self.job, "scope": self.point.scope, "secret": self.shared.announcement}
        opening["options"] = {name: getattr(self.options, name) for name in AGREED}
        self.own["job"] = seal(self.version, self.secret, self.given, "job", opening)
        self.board.set("job", self.own["job"])
        hosts = {0: host_identity()}

        def arrived(rank: int, body: dict[str, Any]) -> None:
            self._admit(rank, body)
            hosts[rank] = str(body["host"])

        self._collect("arrival", "arrive", arrived)
        all_lanes = self.options.lanes is not None
        groups = members(self.options.groups, [hosts[rank] for rank in range(self.options.world_size)])
        known = list(dict.fromkeys(hosts[rank] for rank in range(self.size)))
        numbers = tuple(known.index(hosts[rank]) for rank in range(self.size))
        one_host = len(known) == 1
        secret, lanes = self.shared.secret, self.lanes
        agreement = Agreement(job_id, secret, one_host, lanes, all_lanes, self.options, groups, numbers)
        agreed = {"lanes": lanes, "all_lanes": all_lanes, "groups": groups, "hosts": numbers}
        self._put("admission", {"nonces": self.nonces_by_rank(), **agreed}, keep=True)
        return agreement

    def _proven(self, key: str, data: bytes) -> bool:
        message = unseal(data, self.secret, key)
        return message is not None and message.proven

    def _collect(
        self,
        stage: str,
        what: str,
        accept: Callable[[int, dict[str, Any]], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Take every other rank's message of a stage as it comes, as long as `check` raises nothing."""
        missing = set(range(1, self.size))
        doubted_at: dict[int, float] = {}
        for _ in polls(self.deadline):
            for rank in sorted(missing):
                body = self._take(stage, rank=rank)
                if body is None and stage == "done" and rank in self.doubts and not self.board.keeps_proven:
                    # It was there until a moment ago and may have gone on, so it cannot put this right any more.
                    since_s = time.monotonic() - doubted_at.setdefault(rank, time.monotonic())
                    body = {} if since_s > READ_S else None
                if body is not None:
                    accept(rank, body)
                    missing.discard(rank)
                    self.doubts.pop(rank, None)
            if not missing:
                return
            self._keep()
            self._heed()
            check()
        raise self._late(missing, what)

    def _refuse_double(self, key: str, found: bytes) -> None:
        if key != "job":
            return  # under this job's own id: nobody else who holds the secret writes there
        claimed = peek(found)
        if claimed is None:
            return
        try:
            secret = sharing.take(claimed.body["secret"], self.options, self.board.confidential)
            job = str(claimed.body["id"])
        except (PenstockError, ValueError, TypeError, KeyError, AttributeError):
            return
        message = unseal(found, secret, key)
        if message is None or not message.proven:
            return
        error = self._doubled()
        # The other job is told; nothing is published under this one, as its ranks are about to join the other.
        self.job, self.secret = job, secret
        self._put("trouble", {"error": self._failure(error)})
        self.job = ""
        raise error

    def _admit(self, rank: int, body: dict[str, Any]) -> None:
        """Check what a rank brings. It counts as arrived even if it is refused: it is there to be told."""
        self.nonces[rank] = str(body["nonce"])
        for name in AGREED:
            mine = getattr(self.options, name)
            if body[name] != mine:
                raise ConfigError(
                    f"option {name}: {self.options.name_of(rank)} has {body[name]}, rank 0 has {mine}; set the same on "
                    "every rank",
                    rank=rank,
                )
        if body["lanes"] not in (None, self.lanes):
            raise ConfigError(
                f"option lanes: rank {rank} has {body['lanes']}, rank 0 has {self.lanes}; set the same on every rank",
                rank=rank,
            )

    def nonces_by_rank(self) -> list[str | None]:
        """What tells each rank that rank 0 has read its own arrival and not an older one."""
        return [self.nonces.get(rank) for rank in range(self.size)]

    def table(self, host: str, port: int, door: Door) -> None:
        """The second half: get everybody's address, now bound, and publish all."""
        table = [(host, port)] * self.size

        def bound(rank: int, body: dict[str, Any]) -> None:
            table[rank] = (str(body["host"]), int(body["port"]))

        self._collect("address", "publish an address", bound)
        door.connect(table)
        self._put("table", {"addresses": table}, keep=True)
        self._collect("done", "read the addresses", lambda rank, body: None, door.check)
        self.clean()

    def clean(self) -> None:
        """Leave nothing behind."""
        for rank in range(1, self.size):
            for stage in ("arrival", "address", "done"):
                self.board.delete(self._key(stage, rank))
        for key in (self._key("admission"), self._key("table"), self._key("trouble"), "job"):
            self.board.delete(key)

    def publish_failure(self, error: BaseException) -> None:
        """Tell the others why the job does not start, in place of the message that they wait for."""
        if not self.job or "job" not in self.own:
            return  # nobody knows of it yet: an interrupt may come between the two
        in_time = time.monotonic() < self.deadline
        waited_for = set(range(1, self.size)) if in_time else set(self.nonces)
        if isinstance(error, PenstockError) and error.rank is not None and error.rank not in self.nonces:
            waited_for.discard(error.rank)  # it has found out by itself
        for _ in polls(time.monotonic() + ERROR_LINGER_S):
            for rank in sorted(waited_for - self.nonces.keys()):
                # Whoever comes late is there all the same and waits for the reason.
                key = self._key("arrival", rank)
                message = unseal(self.board.get(key) or b"", self.secret, key)
                if message is not None and message.proven:
                    self.nonces[rank] = str(message.body.get("nonce"))
                elif message is not None and self.board.private:
                    waited_for.discard(rank)  # it has found out by itself that it cannot take part
            self.board.set("job", self.own["job"])  # who does not believe it removes it, to see whether it comes back
            refusal = {"error": self._failure(error), "nonces": self.nonces_by_rank()}
            self._put("admission", refusal)
            self._put("table", refusal)
            waited_for = {rank for rank in waited_for if self.board.get(self._key("done", rank)) is None}
            if not waited_for:
                break
        self.clean()

    def pass_on(self, error: PenstockError) -> None:
        """Tell the others what one of them has told."""
        self.publish_failure(error)

    def close(self) -> None:
        """Remove the secret that was left for ranks on this host."""
        self.shared.close()


class _Follower(_Meeting):
    """The side of every other rank."""

    def __init__(self, board: Board, launch: Launch, version: str, deadline: float) -> None:
        super().__init__(board, launch, version, deadline)
        self.nonce = secrets.token_hex(16)
        self.displaced = False  # another process, or an older one, was admitted as this rank
        self.opening = b""  # the message under "job" that was believed
        self.insisted = 0

    def meet(self) -> Agreement:
        """The first half: arrive, again if rank 0 opens a newer job, until rank 0 admits or refuses."""
        # If another rank is missing, rank 0 knows which, and says so when its own time is up, which is about now.
        for left in polls(self.deadline + LEADERS_WORD_S):
            job = self._find_job()
            if not self.job and left < LEADERS_WORD_S:
                break
            if not job and self.displaced:
                self.job = ""  # nothing of this failure is published: the job has started with the other process
                raise self._doubled()
            if not job:
                continue
            admission = self._take("admission") if self._answered() else None
            if admission is None:
                if not self.displaced:
                    self._keep()
                self._heed()
                continue
            assert self.secret is not None
            lanes, all_lanes = int(admission["lanes"]), bool(admission["all_lanes"])
            groups = tuple(tuple(map(int, group)) for group in admission["groups"])
            hosts = tuple(map(int, admission["hosts"]))
            one_host, job_id = len(set(hosts)) == 1, bytes.fromhex(job)
            return Agreement(job_id, self.secret, one_host, lanes, all_lanes, self.options, groups, hosts)
        if not self.job:
            raise self._late({0}, "arrive")
        keys = {rank: self._key("arrival", rank) for rank in range(1, self.size)}
        arrivals = {rank: unseal(self.board.get(key) or b"", self.secret, key) for rank, key in keys.items()}
        missing = {rank for rank, message in arrivals.items() if message is None or not message.proven}
        raise self._late(missing or {0}, "arrive")

    def _find_job(self) -> str:
        """The id of the job that rank 0 has opened, or nothing; arrives there the first time."""
        data = self.board.get("job")
        if data is None:
            return ""
        if data == self.opening:
            return self.job
        message = peek(data)
        try:
            if message is None:
                raise self._objection(None, 0)
            secret = sharing.take(message.body["secret"], self.options, self.board.confidential)
            proven = unseal(data, secret, "job")
            if proven is None or not proven.proven or proven.version != self.version:
                raise self._objection(proven, 0)
            job, scope = str(message.body["id"]), message.body["scope"]
            there = {name: message.body["options"][name] for name in AGREED}
        except PenstockError as error:  # first, as one of them is a ValueError
            return self._disbelieve(message, error)
        except (ValueError, TypeError, KeyError, AttributeError):
            return self._disbelieve(message, self._objection(None, 0))
        if scope != self.point.scope:
            raise ConfigError(
                f"another job meets at {self.point}: {scope}, and rank {self.rank} belongs to {self.point.scope}; "
                "choose another meeting point for one of them",
                rank=self.rank,
            )
        if self.rank >= sum(there[name] for name in _SIZES):
            # Rank 0 would never look for what this process leaves, but hears of trouble.
            here = {name: getattr(self.options, name) for name in _SIZES}
            name = next(name for name in _SIZES if here[name] != there[name])
            wrong = ConfigError(
                f"option {name}: {self.options.name_of(self.rank)} has {here[name]}, rank 0 has {there[name]}; set the "
                "same on every rank",
                rank=self.rank,
            )
            self.job, self.secret = job, secret
            self._put("trouble", {"error": self._failure(wrong)})
            self.job = ""
            raise wrong
        if self.options.role == "server":
            untold = [name for name in AGREED if self.sources[name] == "default"]
            self.options = replace(self.options, **{name: there[name] for name in untold})
        if self.job:
            self.board.delete(self._key("arrival", self.rank))  # came too late for rank 0 to clean it up
        self.own.clear()
        self.opening, self.job, self.secret, self.displaced = data, job, secret, False
        self._arrive(keep=True)
        return job

    def _arrive(self, keep: bool) -> None:
        agreed = {name: getattr(self.options, name) for name in AGREED}
        brought = {"nonce": self.nonce, "host": host_identity(), "lanes": self.options.lanes, **agreed}
        self._put("arrival", brought, rank=self.rank, keep=keep)

    def _disbelieve(self, message: SealedMessage | None, error: PenstockError) -> str:
        """What to do about an opening that proves nothing: see whether it comes back."""
        self.insisted += 1
        if self.insisted < INSISTENCE:
            if not self.board.private:
                self._doubt(0, error)
            self.board.delete("job")
            return ""
        job = "" if message is None else str(message.body.get("id"))
        if re.fullmatch(r"[0-9a-f]{32}", job):
            self.job, self.secret = job, self.options.secret
            self._arrive(keep=False)  # so that rank 0 sees what is wrong, too
        self.job = ""
        raise error

    def _answered(self) -> bool:
        """Whether the admission is an answer to this very process and not left over from an older job."""
        key = self._key("admission")
        message = unseal(self.board.get(key) or b"", self.secret, key)
        if message is None or not (message.proven or self.board.private):
            return False
        nonces = message.body.get("nonces")
        admitted = nonces[self.rank] if isinstance(nonces, list) and len(nonces) > self.rank else None
        self.displaced = admitted not in (None, self.nonce)
        return admitted == self.nonce

    def _refuse_double(self, key: str, found: bytes) -> None:
        message = unseal(found, self.secret, key)
        if message is not None and message.proven and message.body.get("nonce", self.nonce) != self.nonce:
            raise self._doubled()

    def table(self, host: str, port: int, door: Door) -> None:
        """The second half: publish this rank's address, now bound, and get everybody's."""
        self.own.clear()
        self._put("address", {"host": host, "port": port}, rank=self.rank, keep=True)
        for _ in polls(self.deadline + LEADERS_WORD_S):  # as in `meet`
            body = self._take("table")
            if body is not None:
                door.connect([(str(host), int(port)) for host, port in body["addresses"]])
                with _quietly():  # if rank 0 has been lost by now, that is the engine's to say, as on every other rank
                    self._put("done", {}, rank=self.rank)
                return
            self._keep()
        raise self._late({0}, "publish the addresses")

    def publish_failure(self, error: BaseException) -> None:
        """Tell rank 0, which tells the others."""
        if self.job:
            self._put("trouble", {"error": self._failure(error)})
            self._put("done", {}, rank=self.rank)  # nobody need wait for this rank to hear of it

    def pass_on(self, error: PenstockError) -> None:
        """Say that this rank has read what went wrong."""
        self._put("done", {}, rank=self.rank)

    def close(self) -> None:
        """Nothing is left."""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def exchange(
    launch: Launch,
    door: Door,
    *,
    version: str,
    lanes: int,
    board: Board | None = None,
) -> Agreement:
    """Meet the other ranks.

    Args:
        launch: Rank, size and meeting point of this process.
        door: This rank's. When this returns it is connected, and may be even if this raises.
        version: Of this installation; all ranks must have the same.
        lanes: What rank 0 chooses if nobody set it.
        board: Where to meet, if the program has such a place already; that of the launch's meeting point otherwise.

    Returns:
        What all have agreed on.

    Raises:
        AuthenticationError: A rank holds another secret; ``rank`` says which.
        ProtocolError: A rank runs another version.
        ConfigError: Options differ between ranks, two processes call themselves one rank, ranks on several hosts have
            no secret, or the meeting point cannot be used.
        Timeout: Ranks did not arrive within ``rendezvous_timeout_s``; the message names them.
        PeerLost: A rank failed while the ranks were meeting.
    """
    point = launch.meeting_point
    assert point is not None, "a single process meets nobody"
    limit_s = launch.options.rendezvous_timeout_s
    deadline = time.monotonic() + limit_s
    if board is None:
        board = open_board(point, launch.options.engine_rank, launch.options.ranks, deadline, limit_s)
    board.deadline = deadline
    try:
        if launch.options.engine_rank == 0:
            meeting: _Leader | _Follower = _Leader(board, launch, version, deadline, lanes)
        else:
            meeting = _Follower(board, launch, version, deadline)
        try:
            agreement = meeting.meet()
            meeting.table(*door.listen(agreement), door)
            return agreement
        except _Told as told:
            with _quietly():
                meeting.pass_on(told.error)
            raise told.error from None
        except BaseException as error:
            with _quietly():
                meeting.publish_failure(error)
            raise
        finally:
            meeting.close()
    finally:
        board.close()


def _quietly() -> contextlib.suppress:
    """Around what helps the others: no failure of it may hide the error that is on its way."""
    return contextlib.suppress(PenstockError, OSError, RuntimeError)

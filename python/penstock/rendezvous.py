"""How the ranks of a job find each other and agree before the first connection.

Every rank gets the same job id and secret, and the table of addresses by rank. Rank 0 decides; the others read. They
share a *board* (set, get, delete; nothing blocks), which is the launcher's own store, a store that rank 0 runs, or a
private directory:

    rank 0                          board                               rank r
    job id, fresh and random  ->    job
                                    <job id>/arrival/r            <-    version, nonce, options; proof of the secret
    all ranks checked         ->    <job id>/admission            ->    nonces, secret if shared, what was agreed
                                    <job id>/address/r            <-    host and port, now bound
    complete                  ->    <job id>/table                ->    addresses by rank
    cleans up                       <job id>/done/r               <-    read

That is 3n + 3 keys for n ranks and one connection per rank. Nothing stale is ever believed: rank 0 reads only keys
under its own fresh job id, and the others accept only an admission that repeats their nonce. A failure anywhere is
published in place of the expected message, so that every rank raises the same error at once, not at its limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock import errors
from penstock.addresses import host_identity
from penstock.boards import Board, first_line, open_board, polls
from penstock.errors import AuthenticationError, ConfigError, PenstockError, ProtocolError, Timeout

if TYPE_CHECKING:
    from penstock.config import Launch

__all__ = ["Agreement", "exchange"]

# How long rank 0 stays to tell late ranks why the job does not start, in seconds; in vain for one that has died.
LEADERS_WORD_S = 2.0  # how much longer than rank 0 the others wait for it to say who is missing
ERROR_LINGER_S = 3.0


@dataclass(frozen=True)
class Agreement:
    """What all ranks hold in common once they have met.

    Attributes:
        job_id: 16 random bytes, fresh for every start.
        secret: 32 bytes that prove membership.
        single_host: Whether all ranks share this machine's loopback interface.
        lanes: Threads that move data, the same on every rank.
        all_lanes: Whether slices use all of them, because rank 0 was told their number.
    """

    job_id: bytes
    secret: bytes
    single_host: bool
    lanes: int
    all_lanes: bool


def _seal(version: str, secret: bytes | None, label: str, body: Mapping[str, object]) -> bytes:
    """A message: the version, readable whatever it is; the body; and proof that the sender has the secret."""
    text = json.dumps(body)
    proof = hmac.new(secret, f"{label}\0{text}".encode(), hashlib.sha256).hexdigest() if secret is not None else None
    return json.dumps({"penstock": version, "body": text, "proof": proof}).encode()


def _unseal(data: bytes, version: str, secret: bytes | None, label: str, sender: int, reader: int) -> dict[str, Any]:
    """The body of a message, after its version and its proof were checked; then a published failure is raised."""
    try:
        envelope = json.loads(data)
        their_version, text, proof = str(envelope["penstock"]), str(envelope["body"]), envelope["proof"]
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(
            f"rank {reader} cannot read what rank {sender} left at the meeting point; is another program using it?",
            rank=sender,
        ) from error
    if their_version != version:
        raise ProtocolError(
            f"rank {sender} runs penstock {their_version}, rank {reader} runs penstock {version}; install the same "
            "version on every rank",
            rank=sender,
        )
    failure = json.loads(text).get("error")
    if failure is not None:
        name = str(failure["type"])
        kind = getattr(errors, name) if name in errors.__all__ else PenstockError
        raise _Told(kind(str(failure["message"]), rank=failure["rank"]))
    advice = "set the same PENSTOCK_SECRET on every rank"
    if (proof is None) != (secret is None):
        has, lacks = (reader, sender) if proof is None else (sender, reader)
        raise AuthenticationError(f"rank {has} was given a secret, rank {lacks} was not; {advice}", rank=sender)
    if secret is not None:
        expected = hmac.new(secret, f"{label}\0{text}".encode(), hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, str(proof)):
            raise AuthenticationError(
                f"the secret of rank {sender} differs from that of rank {reader}; {advice}", rank=sender
            )
    body: dict[str, Any] = json.loads(text)
    return body


class _Told(Exception):
    """Carries an error that another rank published."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


def _ranks(numbers: Collection[int]) -> str:
    """``rank 3`` or ``ranks 1, 2, 5 and 90 more``."""
    shown = sorted(numbers)[:16]
    more = f" and {len(numbers) - len(shown)} more" if len(numbers) > len(shown) else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, shown))}{more}"


# Options that shape what is sent: every rank must have the same.
_AGREED = ("world_size", "slice_bytes", "broadcast_buffers", "line_rate_mbit", "policy", "collective_schemes")


class _Meeting:
    """One rank's side of the exchange in the module's first comment."""

    def __init__(self, board: Board, launch: Launch, version: str, deadline: float, lanes: int) -> None:
        self.board = board
        self.options = launch.options
        self.point = launch.meeting_point
        self.rank = launch.options.rank
        self.size = launch.options.world_size
        self.version = version
        self.deadline = deadline
        self.lanes = lanes
        self.nonce = secrets.token_hex(16)
        self.job = ""
        self.proof_key = (
            launch.options.secret
        )  # what messages are proved with: only a secret that was given proves anything
        self.displaced = False  # another process, or an older one, was admitted as this rank
        self.nonces: dict[int, str] = {}  # of the ranks that have arrived; rank 0 only

    def _put(self, stage: str, body: Mapping[str, object], *, rank: int | None = None) -> None:
        key = f"{self.job}/{stage}" + ("" if rank is None else f"/{rank}")
        self.board.set(key, _seal(self.version, self.proof_key, key, body))

    def _take(self, stage: str, *, rank: int | None = None) -> dict[str, Any] | None:
        key = f"{self.job}/{stage}" + ("" if rank is None else f"/{rank}")
        data = self.board.get(key)
        return None if data is None else _unseal(data, self.version, self.proof_key, key, rank or 0, self.rank)

    def _late(self, missing: Collection[int], what: str) -> Timeout:
        return Timeout(
            f"{_ranks(missing)} of {self.size} did not {what} within {self.options.rendezvous_timeout_s:g} s at "
            f"{self.point}. Check that every rank was started, with the same world size and meeting point, and see the "
            "log of those named; rendezvous_timeout_s sets the limit",
            rank=min(missing),
        )

    def _collect(self, stage: str, what: str, accept: Callable[[int, dict[str, Any]], None]) -> None:
        """Rank 0: take every other rank's message of a stage as it comes."""
        missing = set(range(1, self.size))
        for _ in polls(self.deadline):
            for rank in sorted(missing):
                body = self._take(stage, rank=rank)
                if body is not None:
                    accept(rank, body)
                    missing.discard(rank)
            if not missing:
                return
            if self._job_on_board() != self.job:
                self.job = ""  # nothing of this failure is published over the other's job
                raise ConfigError(
                    f"another process calls itself rank 0 at {self.point}; one job at a time can meet there", rank=0
                )
        raise self._late(missing, what)

    def _job_on_board(self) -> str:
        data = self.board.get("job")
        return data.decode() if data is not None and re.fullmatch(rb"[0-9a-f]{32}", data) else ""

    def _admit(self, rank: int, body: dict[str, Any]) -> None:
        """Rank 0: check what a rank brings. It counts as arrived even if it is refused: it is there to be told."""
        self.nonces[rank] = str(body["nonce"])
        for name in _AGREED:
            mine = getattr(self.options, name)
            if body[name] != mine:
                raise ConfigError(
                    f"option {name}: rank {rank} has {body[name]}, rank 0 has {mine}; set the same on every rank",
                    rank=rank,
                )
        if body["lanes"] not in (None, self.lanes):
            raise ConfigError(
                f"option lanes: rank {rank} has {body['lanes']}, rank 0 has {self.lanes}; set the same on every rank",
                rank=rank,
            )

    def lead(self) -> Agreement:
        """Rank 0's first half: open the job, check everybody, admit them."""
        job_id = secrets.token_bytes(16)
        self.job = job_id.hex()
        self.board.set("job", self.job.encode())
        hosts = {host_identity()}

        def arrived(rank: int, body: dict[str, Any]) -> None:
            self._admit(rank, body)
            hosts.add(str(body["host"]))

        self._collect("arrival", "arrive", arrived)
        secret, all_lanes = self.proof_key or secrets.token_bytes(32), self.options.lanes is not None
        agreement = Agreement(job_id, secret, len(hosts) == 1, self.lanes, all_lanes)
        self._put(
            "admission",
            {
                "nonces": self.nonces_by_rank(),
                "secret": None if self.proof_key is not None else agreement.secret.hex(),
                "single_host": agreement.single_host,
                "lanes": agreement.lanes,
                "all_lanes": agreement.all_lanes,
            },
        )
        return agreement

    def nonces_by_rank(self) -> list[str | None]:
        """What tells each rank that rank 0 has read its own arrival and not an older one."""
        return [self.nonces.get(rank) for rank in range(self.size)]

    def follow(self) -> Agreement:
        """Another rank's first half: arrive, again if rank 0 opens a newer job, until rank 0 admits or refuses."""
        for _ in polls(self.deadline):
            job = self._job_on_board()
            if job and job != self.job:
                if self.job:
                    self.board.delete(f"{self.job}/arrival/{self.rank}")  # came too late for rank 0 to clean it up
                self.job, self.displaced = job, False
                agreed = {name: getattr(self.options, name) for name in _AGREED}
                brought = {"nonce": self.nonce, "host": host_identity(), "lanes": self.options.lanes, **agreed}
                self._put("arrival", brought, rank=self.rank)
            if not job and self.displaced:
                raise self._doubled()  # the job started, and cleaned up, with another process in this one's place
            if not job or not self._answered():
                continue
            body = self._take("admission")
            if body is None:
                continue
            secret = self.proof_key if self.proof_key is not None else bytes.fromhex(str(body["secret"]))
            lanes, all_lanes = int(body["lanes"]), bool(body["all_lanes"])
            return Agreement(bytes.fromhex(self.job), secret, bool(body["single_host"]), lanes, all_lanes)
        if not self.job:
            raise self._late({0}, "arrive")
        arrivals = {rank: self.board.get(f"{self.job}/arrival/{rank}") for rank in range(1, self.size)}
        raise self._late({rank for rank, data in arrivals.items() if data is None} or {0}, "arrive")

    def _answered(self) -> bool:
        """Whether the admission is an answer to this very process and not left over from an older job."""
        data = self.board.get(f"{self.job}/admission")
        if data is None:
            return False
        # Read without proof: a rank with the wrong secret or version has to learn that it was refused.
        nonces = _nonces(data)
        admitted = nonces[self.rank] if len(nonces) > self.rank else None
        if admitted == self.nonce:
            return True
        own = self.board.get(f"{self.job}/arrival/{self.rank}")
        if own is not None and self.nonce.encode() not in own:
            raise self._doubled()
        self.displaced = admitted is not None
        return False

    def _doubled(self) -> ConfigError:
        self.job = ""  # nothing of this failure is published: the job may well go on with the other process
        return ConfigError(
            f"two processes call themselves rank {self.rank} at {self.point}; ranks must differ", rank=self.rank
        )

    def table(self, host: str, port: int) -> list[tuple[str, int]]:
        """The second half: publish this rank's address, now bound, and get everybody's."""
        if self.rank != 0:
            self._put("address", {"host": host, "port": port}, rank=self.rank)
            # If another rank is missing, rank 0 knows which, and says so when its own time is up, which is about now.
            for _ in polls(self.deadline + LEADERS_WORD_S):
                body = self._take("table")
                if body is not None:
                    self._put("done", {}, rank=self.rank)
                    return [(str(host), int(port)) for host, port in body["addresses"]]
            raise self._late({0}, "publish the addresses")
        table = [(host, port)] * self.size

        def bound(rank: int, body: dict[str, Any]) -> None:
            table[rank] = (str(body["host"]), int(body["port"]))

        self._collect("address", "publish an address", bound)
        self._put("table", {"addresses": table})
        self._collect("done", "read the addresses", lambda rank, body: None)
        self.clean()
        return table

    def clean(self) -> None:
        """Rank 0: leave nothing behind, least of all the secret."""
        for rank in range(1, self.size):
            for stage in ("arrival", "address", "done"):
                self.board.delete(f"{self.job}/{stage}/{rank}")
        for key in (f"{self.job}/admission", f"{self.job}/table", "job"):
            self.board.delete(key)

    def publish_failure(self, error: BaseException) -> None:
        """Tell the others why this rank gives up, in place of the message that they wait for."""
        if not self.job:
            return
        told = isinstance(error, PenstockError)
        what = str(error) if told else f"failed while the ranks were meeting: {_describe(error)}"
        failure = {
            "type": type(error).__name__ if told else "PeerLost",
            "message": f"rank {self.rank}: {what}",
            "rank": error.rank if isinstance(error, PenstockError) and error.rank is not None else self.rank,
        }
        if self.rank != 0:
            for stage in ("address", "done"):  # whichever rank 0 reads next
                self._put(stage, {"error": failure}, rank=self.rank)
            return
        waited_for = set(range(1, self.size)) if not isinstance(error, Timeout) else set(self.nonces)
        for _ in polls(time.monotonic() + ERROR_LINGER_S):
            for rank in sorted(waited_for - self.nonces.keys()):
                # Whoever comes late, or cannot be believed, is there all the same and waits for the reason.
                data = self.board.get(f"{self.job}/arrival/{rank}")
                nonce = None if data is None else _nonce(data)
                if nonce is not None:
                    self.nonces[rank] = nonce
            refusal = {"error": failure, "nonces": self.nonces_by_rank()}
            self._put("admission", refusal)
            self._put("table", refusal)
            waited_for = {rank for rank in waited_for if self.board.get(f"{self.job}/done/{rank}") is None}
            if not waited_for:
                break
        self.clean()

    def pass_on(self, error: PenstockError) -> None:
        """Rank 0 tells the others what one rank told it; another rank only says that it has read it."""
        if self.rank == 0:
            self.publish_failure(error)
        else:
            self._put("done", {}, rank=self.rank)


def _nonces(data: bytes) -> list[object]:
    try:
        return list(json.loads(json.loads(data)["body"])["nonces"])
    except (ValueError, TypeError, KeyError):
        return []


def _nonce(data: bytes) -> str | None:
    try:
        return str(json.loads(json.loads(data)["body"])["nonce"])
    except (ValueError, TypeError, KeyError):
        return None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def exchange(
    launch: Launch,
    listen: Callable[[Agreement], tuple[str, int]],
    *,
    version: str,
    lanes: int,
    board: Board | None = None,
) -> tuple[Agreement, list[tuple[str, int]]]:
    """Meet the other ranks.

    Args:
        launch: Rank, size and meeting point of this process.
        listen: Called once the ranks agree; binds this rank's listener and returns its host and port.
        version: Of this installation; all ranks must have the same.
        lanes: What rank 0 chooses if nobody set it.
        board: Where to meet, if the program has such a place already; that of the launch's meeting point otherwise.

    Returns:
        The agreement and the addresses by rank.

    Raises:
        AuthenticationError: A rank holds another secret; ``rank`` says which.
        ProtocolError: A rank runs another version.
        ConfigError: Options differ between ranks, or the meeting point cannot be used.
        Timeout: Ranks did not arrive within ``rendezvous_timeout_s``; the message names them.
        PeerLost: A rank failed while the ranks were meeting.
    """
    point = launch.meeting_point
    assert point is not None, "a single process meets nobody"
    limit_s = launch.options.rendezvous_timeout_s
    deadline = time.monotonic() + limit_s
    if board is None:
        board = open_board(point, launch.options.rank, deadline, limit_s)
    meeting = _Meeting(board, launch, version, deadline, lanes)
    try:
        agreement = meeting.lead() if meeting.rank == 0 else meeting.follow()
        return agreement, meeting.table(*listen(agreement))
    except _Told as told:
        with _quietly():
            meeting.pass_on(told.error)
        raise told.error from None
    except BaseException as error:
        with _quietly():
            meeting.publish_failure(error)
        raise
    finally:
        board.close()


def _quietly() -> contextlib.suppress:
    """Around what helps the others: no failure of it may hide the error that is on its way."""
    return contextlib.suppress(PenstockError, OSError, RuntimeError)

"""Where newcomers find an elastic job that runs: a door that a member opens, and what is said there.

    newcomer                            door of a member
    GET door                      ->    how to come by the secret; what the job's ranks have agreed on      proved
    SET <door>/knock/<number>     ->    a number that the newcomer has drawn                                proved
    GET <door>/answer/<number>    ->    nothing yet; then its rank, and how the job stands now              proved

Messages are sealed as those of a meeting are (`penstock.sealing`), for their keys: each door has a random name, so that
no knock can be played back at another door, and a newcomer believes no answer to a number of somebody else. Which rank
a newcomer gets the members agree on (docs/decisions/0022-an-epoch-is-a-new-engine.md).
"""

from __future__ import annotations

import base64
import logging
import re
import secrets
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock import errors, sharing
from penstock.attached import Attached, attach
from penstock.boards import first_line, polls
from penstock.coordinator import Rates
from penstock.errors import AuthenticationError, ConfigError, PenstockError, ProtocolError, Timeout
from penstock.key_server import GET, SET, KeyClient, KeyServer
from penstock.rendezvous import AGREED, Agreement
from penstock.sealing import peek, seal, unseal

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.config import Options

__all__ = ["Doorway", "Entrance"]

_log = logging.getLogger("penstock")

NEWCOMERS_AT_ONCE = 16
NUMBER_BYTES = 8  # of what a newcomer draws
ANSWER_S = 5.0  # after which a door counts as not answering, and is asked again
_STAGE = re.compile(r"(knock|answer)/([1-9][0-9]{0,19})")


class Doorway:
    """A member's door. A thread of its own answers.

    Args:
        engine: Of the job.
        host: Where it listens, at any port.
        agreement: What the job's ranks have agreed on.
        rates: Likewise.
        version: Of this installation; newcomers must have the same.

    Attributes:
        address: ``host:port``, for the option ``join`` of newcomers.

    Raises:
        ConfigError: It cannot listen there.
    """

    def __init__(self, engine: Engine, host: str, agreement: Agreement, rates: Rates, version: str) -> None:
        self._engine, self._version = engine, version
        self._secret, self._given = agreement.secret, agreement.options.secret is not None
        self._name = secrets.token_hex(16)
        self._numbers: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._refused: dict[int, PenstockError] = {}
        try:
            listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"no door for newcomers can be opened at {host}: {error}") from error
        self._shared = sharing.SharedSecret(agreement.options, False, agreement.secret)
        said = {
            "door": self._name,
            "secret": self._shared.announcement,
            "options": {name: getattr(agreement.options, name) for name in AGREED},
            "job_id": agreement.job_id.hex(),
            "single_host": agreement.single_host,
            "lanes": agreement.lanes,
            "all_lanes": agreement.all_lanes,
            "hosts": agreement.hosts,
            "rates": asdict(rates),
        }
        self._opening = self._sealed("door", said)
        self._server = KeyServer(listener, NEWCOMERS_AT_ONCE, self._get, self._put, "penstock-door")
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.port}"
        _doors.setdefault(id(engine), weakref.WeakSet()).add(self)

    def close(self) -> None:
        """Nobody comes in any more."""
        self._server.close()
        self._shared.close()

    def after_fork_in_child(self) -> None:
        """In a forked child, such as a loader's worker: the door is the parent's alone."""
        self._server.after_fork_in_child()
        self._shared.after_fork_in_child()

    def _sealed(self, key: str, body: Mapping[str, object]) -> bytes:
        return seal(self._version, self._secret, self._given, key, body)

    def _number(self, key: str, stage: str) -> int | None:
        door, _, rest = key.partition("/")
        found = _STAGE.fullmatch(rest)
        return int(found[2]) if door == self._name and found is not None and found[1] == stage else None

    def _put(self, key: str, value: bytes) -> None:
        """A newcomer asks. Only who holds the secret is heard, so that there are no more numbers than newcomers."""
        number = self._number(key, "knock")
        message = unseal(value, self._secret, key)
        if number is None or number >> 64 or message is None or not message.proven or message.version != self._version:
            return
        if number not in self._numbers:
            self._numbers.add(number)
            try:
                self._engine.knock(number)
            except PenstockError as error:
                self._refused[number] = error

    def _get(self, key: str) -> bytes | None:
        if key == "door":
            return self._opening
        number = self._number(key, "answer")
        if number is None or number not in self._numbers:
            return None
        try:
            if number in self._refused:
                raise self._refused[number]
            self._ranks.update({one: rank for one, rank, _ in self._engine.announced() if one in self._numbers})
            if number not in self._ranks:
                return None
            state = base64.b64encode(self._engine.job_state()).decode()
            members = len(self._engine.members())
            return self._sealed(key, {"rank": self._ranks[number], "state": state, "members": members})
        except PenstockError as error:
            return self._sealed(key, {"error": {"type": type(error).__name__, "message": str(error)}})


class Entrance:
    """A newcomer at a door.

    Args:
        options: Of this process, which say at which.
        sources: Where each of them comes from.
        version: Of this installation.

    Attributes:
        host: Of the door.
    """

    def __init__(self, options: Options, sources: Mapping[str, str], version: str) -> None:
        assert options.join is not None, "a newcomer knows where to come"
        parts = urlsplit(f"//{options.join}")
        assert parts.hostname is not None and parts.port is not None  # parse_option saw to it
        self.host = parts.hostname
        self._door, self._options, self._sources, self._version = options.join, options, sources, version
        self._client = KeyClient(parts.hostname, parts.port)
        self._number = 1 + secrets.randbelow((1 << 8 * NUMBER_BYTES) - 1)
        self._secret: bytes | None = None
        self._name = ""

    def enter(self) -> tuple[Agreement, Rates]:
        """Ask to take part.

        Returns:
            What the job's ranks have agreed on, with this process's options and its rank among them, and their rates.

        Raises:
            AuthenticationError: This process has another secret.
            ProtocolError: It runs another version, or what answers there is no door.
            ConfigError: An option is not the job's.
            Timeout: Nobody answers within ``rendezvous_timeout_s``.
        """
        deadline = time.monotonic() + self._options.rendezvous_timeout_s
        said = self._read_opening(self._ask(GET, "door", b"", deadline))
        options = self._take_over(said["options"])
        key = f"{self._name}/knock/{self._number}"
        given = options.secret is not None
        self._ask(SET, key, seal(self._version, self._secret, given, key, {"number": self._number}), deadline)
        answer = self._answer(deadline)
        rank, members = int(answer["rank"]), int(answer["members"])
        if options.ranks_max is not None and members >= options.ranks_max:
            _log.warning(
                "penstock: the job at %s has %d workers, and may have no more (ranks_max): this one waits until one is "
                "lost, for %g s (rendezvous_timeout_s)",
                self._door,
                members,
                options.rendezvous_timeout_s,
            )
        assert self._secret is not None  # the opening said how to come by it
        hosts = tuple(map(int, said["hosts"]))
        agreement = Agreement(
            bytes.fromhex(said["job_id"]),
            self._secret,
            bool(said["single_host"]),
            int(said["lanes"]),
            bool(said["all_lanes"]),
            replace(options, rank=rank),
            hosts=hosts,
        )
        return agreement, Rates(**said["rates"])

    def state(self) -> bytes:
        """How the job stands now, for `Engine.come`.

        Raises:
            PenstockError: As `enter`; or the job has failed meanwhile.
        """
        answer = self._answer(time.monotonic() + self._options.rendezvous_timeout_s)
        return base64.b64decode(answer["state"])

    def close(self) -> None:
        """Leave the door."""
        self._client.close()

    def _answer(self, deadline: float) -> dict[str, Any]:
        key = f"{self._name}/answer/{self._number}"
        for _ in polls(deadline):
            data = self._ask(GET, key, b"", deadline)
            message = None if data is None else unseal(data, self._secret, key)
            if message is None or not message.proven:
                continue
            if "error" in message.body:
                told = message.body["error"]
                kind = getattr(errors, told["type"]) if told["type"] in errors.__all__ else PenstockError
                raise kind(f"the job at {self._door}: {told['message']}")
            return message.body
        raise Timeout(
            f"the job at {self._door} gave this process no rank within {self._options.rendezvous_timeout_s:g} s "
            "(rendezvous_timeout_s). Its members agree on it: see the log of the one whose door that is",
            peer=self._door,
        )

    def _read_opening(self, data: bytes | None) -> dict[str, Any]:
        message = None if data is None else peek(data)
        if message is None:
            raise ProtocolError(f"what listens at {self._door} is no door of a job (option join)", peer=self._door)
        if message.version != self._version:
            raise ProtocolError(
                f"the job at {self._door} runs penstock {message.version}, this process runs penstock {self._version}; "
                "install the same version",
                peer=self._door,
            )
        try:
            self._secret = sharing.take_at_door(message.body["secret"], self._options, self._door)
        except PenstockError:  # first, as one of them is a ValueError
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ProtocolError(f"what listens at {self._door} is no door of a job", peer=self._door) from None
        assert data is not None
        proven = unseal(data, self._secret, "door")
        if proven is None or not proven.proven:
            raise AuthenticationError(
                f"the secret of this process differs from that of the job at {self._door}; "
                "set the same PENSTOCK_SECRET",
                peer=self._door,
            )
        self._name = str(proven.body["door"])
        return proven.body

    def _take_over(self, agreed: Mapping[str, object]) -> Options:
        """This process's options, with those that ranks must have alike as the job has them."""
        for name in AGREED:
            here, there = getattr(self._options, name), agreed[name]
            if self._sources[name] != "default" and here != there:
                raise ConfigError(
                    f"option {name}: this process has {here} ({self._sources[name]}), the job at {self._door} has "
                    f"{there}; leave it out, or set the same"
                )
        return replace(self._options, **{name: agreed[name] for name in AGREED})  # type: ignore[arg-type]

    def _ask(self, request: int, key: str, value: bytes, deadline: float) -> bytes | None:
        last: OSError | None = None
        for left in polls(deadline):
            try:
                return self._client.ask(request, key, value, time.monotonic() + min(max(left, 0.01), ANSWER_S))
            except OSError as error:
                if last is None:
                    _log.info("no answer at %s yet (%s)", self._door, first_line(error))
                last = error
        raise Timeout(
            f"no member answered at {self._door} (option join, {self._sources['join']}) within "
            f"{self._options.rendezvous_timeout_s:g} s ({first_line(last) if last else 'no attempt'}). Give the door "
            "of a member that is left: each logs its own, and `Newcomers.door` has it; rendezvous_timeout_s sets the "
            "limit",
            peer=self._door,
        )


_doors: dict[int, weakref.WeakSet[Doorway]] = {}


class _AllDoors(Attached):
    """Those of the job. A process that ends by its status lets go of nothing, and has finished, or failed."""

    def finish(self, limit_s: float) -> None:
        """The job ends."""
        for engine in [*_doors]:
            _close(engine)

    def end_failed(self, limit_s: float, *, at_exit: bool) -> None:
        """It has ended."""
        self.finish(limit_s)

    def let_go(self, engine: Engine) -> None:
        """It is over."""
        _close(id(engine))

    def after_fork_in_child(self) -> None:
        """A child may outlive its parent, and nobody is to come to a door where nobody answers."""
        for doors in _doors.values():
            for door in doors:
                door.after_fork_in_child()


def _close(engine: int) -> None:
    for door in _doors.pop(engine, ()):
        door.close()


attach(_AllDoors())

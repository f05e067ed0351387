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
from penstock.errors import AuthenticationError, ConfigError, PeerLost, PenstockError, ProtocolError, Timeout
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
            self._engine.check()  # others may be left, whose doors are better
            self._ranks.update({one: rank for one, rank, _ in self._engine.announced() if one in self._numbers})
            if number not in self._ranks:
                return None
            state = base64.b64encode(self._engine.job_state()).decode()
            members = len(self._engine.members())
            return self._sealed(key, {"rank": self._ranks[number], "state": state, "members": members})
        except PenstockError as error:
            return self._sealed(key, {"error": {"type": type(error).__name__, "message": str(error)}})


class _AskedDoor:
    """A door as a newcomer sees it. It is opened, and knocked at, once, and anew where it has not answered.

    Args:
        address: Where.
        options: Of the newcomer's process.
        sources: Where each of them comes from.
        version: Of its installation.

    Attributes:
        said: What the job's ranks have agreed on, once it is opened.
        secret: The job's, likewise.
        options: Likewise this process's, with those that ranks must have alike as the job has them.
    """

    def __init__(self, address: str, options: Options, sources: Mapping[str, str], version: str) -> None:
        parts = urlsplit(f"//{address}")
        assert parts.hostname is not None and parts.port is not None  # parse_option saw to it
        self.address, self.host = address, parts.hostname
        self.said: dict[str, Any] = {}
        self.secret: bytes | None = None
        self.options = options
        self._sources, self._version = sources, version
        self._client = KeyClient(parts.hostname, parts.port)
        self._knocked = False

    def answer(self, number: int, job: str | None, until: float) -> dict[str, Any] | None:
        """What is answered to this number; None: nothing yet.

        Args:
            number: That the newcomer has drawn.
            job: The id of the job that it has asked before at another door, if it has.
            until: The longest wait for any answer, by `time.monotonic`.

        Raises:
            AuthenticationError: This process has another secret.
            ProtocolError: It runs another version, what answers there is no door, or it is a door of another job.
            ConfigError: An option is not the job's.
            PenstockError: What has ended the job there.
            OSError: There is no answer.
        """
        try:
            if not self._knocked:
                self._open(job, until)
                key = f"{self.said['door']}/knock/{number}"
                given = self.options.secret is not None
                self._client.ask(SET, key, seal(self._version, self.secret, given, key, {"number": number}), until)
                self._knocked = True
            key = f"{self.said['door']}/answer/{number}"
            data = self._client.ask(GET, key, b"", until)
        except OSError:
            self._knocked = False
            raise
        message = None if data is None else unseal(data, self.secret, key)
        if message is None or not message.proven:
            return None
        if "error" in message.body:
            told = message.body["error"]
            kind = getattr(errors, told["type"]) if told["type"] in errors.__all__ else PenstockError
            raise kind(f"the job at {self.address}: {told['message']}")
        return message.body

    def close(self) -> None:
        """Leave it."""
        self._client.close()

    def _open(self, job: str | None, until: float) -> None:
        """Read what is said to all, and refuse what does not fit."""
        data = self._client.ask(GET, "door", b"", until)
        message = None if data is None else peek(data)
        if message is None:
            raise ProtocolError(f"what listens at {self.address} is no door of a job (option join)", peer=self.address)
        if message.version != self._version:
            raise ProtocolError(
                f"the job at {self.address} runs penstock {message.version}, this process runs penstock "
                f"{self._version}; install the same version",
                peer=self.address,
            )
        try:
            self.secret = sharing.take_at_door(message.body["secret"], self.options, self.address)
        except PenstockError:  # first, as one of them is a ValueError
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ProtocolError(f"what listens at {self.address} is no door of a job", peer=self.address) from None
        assert data is not None
        proven = unseal(data, self.secret, "door")
        if proven is None or not proven.proven:
            raise AuthenticationError(
                f"the secret of this process differs from that of the job at {self.address}; "
                "set the same PENSTOCK_SECRET",
                peer=self.address,
            )
        if job is not None and proven.body["job_id"] != job:
            raise ProtocolError(f"at {self.address} is a door of another job (option join)", peer=self.address)
        self.said = proven.body
        self._take_over(self.said["options"])

    def _take_over(self, agreed: Mapping[str, object]) -> None:
        for name in AGREED:
            here, there = getattr(self.options, name), agreed[name]
            if self._sources[name] != "default" and here != there:
                raise ConfigError(
                    f"option {name}: this process has {here} ({self._sources[name]}), the job at {self.address} has "
                    f"{there}; leave it out, or set the same"
                )
        self.options = replace(self.options, **{name: agreed[name] for name in AGREED})  # type: ignore[arg-type]


class Entrance:
    """A newcomer at the doors of a job: at one of them, until that gives no answer any more, and then at the next.

    It asks everywhere by one number, so that members give it one rank, whoever is lost meanwhile.

    Args:
        options: Of this process, which say at which.
        sources: Where each of them comes from.
        version: Of this installation.
    """

    def __init__(self, options: Options, sources: Mapping[str, str], version: str) -> None:
        assert options.join is not None, "a newcomer knows where to come"
        self._doors = [_AskedDoor(address, options, sources, version) for address in options.join.split(",")]
        self._options, self._sources = options, sources
        self._number = 1 + secrets.randbelow((1 << 8 * NUMBER_BYTES) - 1)
        self._agreement: Agreement | None = None

    @property
    def host(self) -> str:
        """Of the door that it is at."""
        return self._doors[0].host

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
        answer = self._ask()
        door = self._doors[0]
        said, options, rank, members = door.said, door.options, int(answer["rank"]), int(answer["members"])
        if options.ranks_max is not None and members >= options.ranks_max:
            _log.warning(
                "penstock: the job at %s has %d workers, and may have no more (ranks_max): this one waits until one is "
                "lost, for %g s (rendezvous_timeout_s)",
                door.address,
                members,
                options.rendezvous_timeout_s,
            )
        assert door.secret is not None  # the opening said how to come by it
        self._agreement = Agreement(
            bytes.fromhex(said["job_id"]),
            door.secret,
            bool(said["single_host"]),
            int(said["lanes"]),
            bool(said["all_lanes"]),
            replace(options, rank=rank),
            hosts=tuple(map(int, said["hosts"])),
        )
        return self._agreement, Rates(**said["rates"])

    def state(self) -> bytes:
        """How the job stands now, for `Engine.come`.

        Raises:
            PeerLost: The job has given its rank up.
            PenstockError: As `enter`; or the job has failed meanwhile.
        """
        answer = self._ask()
        assert self._agreement is not None  # it has entered
        had, has = self._agreement.options.rank, int(answer["rank"])
        if had != has:
            raise PeerLost(
                f"the job at {self._doors[0].address} goes on without rank {had}, a newcomer, and would count it anew "
                f"as rank {has}: start this process once more",
                rank=had,
            )
        return base64.b64decode(answer["state"])

    def close(self) -> None:
        """Leave the doors."""
        for door in self._doors:
            door.close()

    def _ask(self) -> dict[str, Any]:
        """An answer, at the door where this is, or else the next one, which is the first of all from then on."""
        deadline = time.monotonic() + self._options.rendezvous_timeout_s
        job = None if self._agreement is None else self._agreement.job_id.hex()
        silent: dict[str, str] = {}  # by address what became of the last attempt
        for _ in polls(deadline):
            refused: dict[str, PenstockError] = {}
            for _ in range(len(self._doors)):
                door = self._doors[0]
                try:
                    until = min(max(deadline, time.monotonic() + 0.01), time.monotonic() + ANSWER_S)
                    answer = door.answer(self._number, job, until)
                except PenstockError as error:
                    refused[door.address] = error
                except OSError as error:
                    if door.address not in silent:
                        _log.info("no answer at %s yet (%s)", door.address, first_line(error))
                    silent[door.address] = first_line(error)
                else:
                    silent.pop(door.address, None)
                    if answer is not None:
                        return answer
                    break  # members agree on its rank
                self._doors.append(self._doors.pop(0))
            else:
                if refused:  # all doors have had their time
                    raise _of_all(refused, silent)
        raise self._late(silent)

    def _late(self, silent: Mapping[str, str]) -> Timeout:
        limit_s = self._options.rendezvous_timeout_s
        if len(silent) < len(self._doors):
            address = self._doors[0].address
            return Timeout(
                f"the job at {address} gave this process no rank within {limit_s:g} s (rendezvous_timeout_s). Its "
                "members agree on it: see the log of the one whose door that is",
                peer=address,
            )
        each = ", ".join(f"{address} ({why})" for address, why in silent.items())
        return Timeout(
            f"no member answered at {each}: option join, {self._sources['join']}, within {limit_s:g} s. Give doors of "
            "members that are left: each logs its own, and `Newcomers.door` has it; rendezvous_timeout_s sets the "
            "limit",
            peer=self._doors[0].address,
        )


def _of_all(refused: Mapping[str, PenstockError], silent: Mapping[str, str]) -> PenstockError:
    """What to raise where some doors refuse a newcomer, and the others do not answer."""
    first, *others = refused.values()
    if not others and not silent:
        return first
    why = [str(error) for error in refused.values()]
    why += [f"no member answered at {address} ({reason})" for address, reason in silent.items()]
    return type(first)("; ".join(why), peer=first.peer)


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

"""Where a job's secret comes from: one rule, however the ranks meet.

- A secret that was given (``PENSTOCK_SECRET``) is used on every rank and never leaves a process.
- Without one, a job on one host shares a secret by itself, which only this user of this host can read: rank 0 makes it
  and leaves it in a private directory, whose random name the others learn at the meeting point.
- A meeting point that is itself a private directory holds the secret: whoever may enter it is this user.
- Ranks on several hosts need a secret that was given, unless all were started with ``insecure``: then the secret that
  rank 0 makes lies at the meeting point for everybody to read.

Rank 0 says in its first message which of these it is (the *announcement*); the others act on it. The door of a running
job announces it to newcomers in the same words.

A private directory is removed by whoever has made it. A process that is killed cannot do that. So the directory is
locked as long as its maker lives, and whoever makes the next one removes those of this user that nobody has locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.addresses import host_identity
from penstock.boards import FileBoard
from penstock.config import MAKE_A_SECRET, Options
from penstock.errors import AuthenticationError, ConfigError

__all__ = [
    "SharedSecret",
    "made_secret_not_taken",
    "needs_a_given_secret",
    "one_was_given_a_secret",
    "secrets_differ",
    "take",
    "take_at_door",
]

SECRET_BYTES = 32
DIRECTORY_PREFIX = "penstock-secret-"
_KEY = "secret"
_SAME = "set the same PENSTOCK_SECRET on every rank"


class SharedSecret:
    """Rank 0's secret and how the others come by it.

    Args:
        options: Of rank 0.
        confidential: Whether only this user can read what is left at the meeting point.
        made: The secret that rank 0 has made, if it has.

    Attributes:
        secret: What proves membership.
        announcement: What rank 0 tells everybody about it.
    """

    def __init__(self, options: Options, confidential: bool, made: bytes | None = None) -> None:
        self._directory: str | None = None
        self._lock = -1
        self.announcement: dict[str, object]
        if options.secret is not None:
            self.secret, self.announcement = options.secret, {"given": True}
            return
        self.secret = secrets.token_bytes(SECRET_BYTES) if made is None else made
        if confidential or options.insecure:
            self.announcement = {"open": self.secret.hex()}
            return
        _remove_what_was_left()
        self._directory, self._lock = _make_directory()
        self.announcement = {"directory": self._directory, "host": host_identity()}
        board = FileBoard(self._directory, clean=False)
        try:
            board.set(_KEY, self.secret.hex().encode())
        finally:
            board.close()

    def close(self) -> None:
        """Remove what was left for the others, who have read it by now."""
        if self._directory is None:
            return
        with contextlib.suppress(ConfigError, OSError):
            board = FileBoard(self._directory, clean=False)
            board.delete(_KEY)
            board.close()
            os.rmdir(self._directory)  # noqa: PTH106 - no file of anybody else is removed
        self._directory = None
        self._unlock()

    def after_fork_in_child(self) -> None:
        """In a forked child: what was left is the parent's to remove, and nobody has it locked when that has ended."""
        self._directory = None
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _make_directory() -> tuple[str, int]:
    """A private directory, and the descriptor that has it locked, or -1 where a file system has no locks."""
    while True:
        path = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
        lock = -1
        # Until it is locked somebody else may take it for one that was left. Then there is another one.
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                os.close(lock)
                return path, -1  # nor does anybody else get a lock there, to remove it
            if os.path.samestat(os.fstat(lock), Path(path).stat()):
                return path, lock
        if lock >= 0:
            os.close(lock)


def _remove_what_was_left() -> None:
    """Directories of this user's processes that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{DIRECTORY_PREFIX}*"):
        with contextlib.suppress(OSError):
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(directory)
                if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not if its maker lives
                    for name in os.listdir(directory):  # noqa: PTH208 - by descriptor: nobody can swap the directory
                        os.unlink(name, dir_fd=directory)
                    path.rmdir()
            finally:
                os.close(directory)


def take(announcement: Mapping[str, Any], options: Options, confidential: bool) -> bytes:
    """Another rank's side: the secret that rank 0 announces. Whether rank 0 holds it, too, its messages must prove.

    Args:
        announcement: What rank 0 says, unproven: anybody may have written it.
        options: Of this rank.
        confidential: As for `SharedSecret`.

    Raises:
        AuthenticationError: Only one of the two ranks was given a secret.
        ConfigError: The ranks are on several hosts without one, or what rank 0 left cannot be read.
        ValueError, TypeError: It is no announcement.
    """
    given = announcement.get("given") is True
    if given != (options.secret is not None):
        raise one_was_given_a_secret(*((0, options.rank) if given else (options.rank, 0)))
    if options.secret is not None:
        return options.secret
    if "open" in announcement:
        if not confidential and not options.insecure:
            raise ConfigError(
                f"rank 0 was started with insecure=True, rank {options.rank} was not; set the same on every rank",
                rank=options.rank,
            )
        return _parsed(str(announcement["open"]))
    directory, host = str(announcement["directory"]), str(announcement["host"])
    if host != host_identity():
        raise needs_a_given_secret(options.rank, 0)
    try:
        return _read(directory)
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(
            f"rank {options.rank} cannot read the secret that rank 0 left in {directory} for processes of its user on "
            f"this host ({type(error).__name__}: {error}). Ranks of several users, or in containers with directories "
            f"of their own, need one that is given. {_how()}",
            rank=options.rank,
        ) from error


def take_at_door(announcement: Mapping[str, Any], options: Options, door: str) -> bytes:
    """A newcomer's side: the secret of a running job. Whether a member is at that door, its messages must prove.

    Args:
        announcement: What is said there, unproven.
        options: Of the newcomer.
        door: Where, for messages.

    Raises:
        AuthenticationError: Only one of the two was given a secret.
        ConfigError: The job made its secret by itself, and this process cannot read it.
        ValueError, TypeError, KeyError: It is no announcement.
    """
    given = announcement.get("given") is True
    if given != (options.secret is not None):
        job, process = ("was", "was not") if given else ("was not", "was")
        raise AuthenticationError(f"the job at {door} {job} given a secret, and this process {process}; {_SAME}")
    if options.secret is not None:
        return options.secret
    if "open" in announcement:
        if not options.insecure:
            raise ConfigError(f"the job at {door} was started with insecure=True; set the same for this process")
        return _parsed(str(announcement["open"]))
    directory, host = str(announcement["directory"]), str(announcement["host"])
    try:
        if host != host_identity():
            raise ConfigError("it is another host")
        return _read(directory)
    except (ConfigError, OSError, ValueError) as error:
        raise ConfigError(
            f"the job at {door} made its secret by itself, for processes of its user on its host, and this process "
            f"cannot read it ({error}). Start the job and this process with one that is given. {_how()}"
        ) from error


def _parsed(text: str) -> bytes:
    secret = bytes.fromhex(text)
    if len(secret) != SECRET_BYTES:
        raise ValueError
    return secret


def _read(directory: str) -> bytes:
    # By descriptor, and only where nobody but this user may write: the name may be a stranger's.
    board = FileBoard(directory, clean=False, make=False)
    try:
        return _parsed((board.get(_KEY) or b"").decode())
    finally:
        board.close()


def _how() -> str:
    return (
        f"Make one and pass it to every rank:\n    {MAKE_A_SECRET}\n(with OpenMPI's mpirun add -x PENSTOCK_SECRET). "
        "On a network where everybody is trusted, insecure=True (PENSTOCK_INSECURE=1) starts without one"
    )


def needs_a_given_secret(one: int, other: int) -> ConfigError:
    """Two ranks are on different hosts, and there is nothing to prove membership with."""
    return ConfigError(
        f"ranks {min(one, other)} and {max(one, other)} are on different hosts (or network namespaces), and this job "
        f"has no secret: only a job on one host can share one by itself. {_how()}",
        rank=max(one, other),
    )


def one_was_given_a_secret(has: int, lacks: int) -> AuthenticationError:
    """Only one of two ranks has a given secret; rank 0 decides, so the other one is named."""
    return AuthenticationError(f"rank {has} was given a secret, rank {lacks} was not; {_SAME}", rank=max(has, lacks))


def secrets_differ(rank: int) -> AuthenticationError:
    """A rank proves with another secret than rank 0."""
    return AuthenticationError(f"the secret of rank {rank} differs from that of rank 0; {_SAME}", rank=rank)


def made_secret_not_taken(rank: int) -> ConfigError:
    """A rank on rank 0's own host proves nothing in a job whose secret rank 0 made."""
    return ConfigError(f"rank {rank} does not hold the secret that rank 0 made; its own error says why", rank=rank)

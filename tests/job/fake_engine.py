"""The smallest engine with the native one's life cycle: it binds a real listener and remembers what was asked of it.

It moves no data. Processes under test may set `calls_path` to a file that each call is appended to, so that what
happens while the interpreter ends can be read afterwards.
"""

from __future__ import annotations

import json
import socket
import sys
import types
from pathlib import Path
from typing import Any


class FakeMoments:
    """Stands where `penstock._native.MomentsKept` does, and keeps none."""

    def note(self, what: int) -> None:
        """See `penstock._native`."""

    def take(self) -> tuple[bytes, int]:
        """See `penstock._native`."""
        return b"", 0


class FakeEngine:
    """Stands where `penstock._native.Engine` does."""

    calls_path: Path | None = None

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.calls: list[list[str]] = []
        family = socket.AF_INET6 if ":" in arguments["bind_host"] else socket.AF_INET
        self.listener = socket.socket(family)
        self.listener.bind((arguments["bind_host"], arguments["port"]))
        self.listener.listen()
        self.port: int = self.listener.getsockname()[1]
        self.table: list[tuple[str, int]] = []

    def _called(self, *call: str) -> None:
        self.calls.append(list(call))
        if self.calls_path is not None:
            with self.calls_path.open("a") as file:
                file.write(json.dumps(call) + "\n")

    def connect(self, addresses: list[tuple[str, int]]) -> None:
        self.table = addresses
        self._called("connect")

    def set_rates(self, rates: object) -> None:
        self._called("set_rates")

    def report(self) -> dict[str, Any]:
        return {"rank": self.arguments["rank"], "size": self.arguments["size"]}

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self._called("abort", reason)

    def check(self) -> None:
        pass

    has_failed = False

    def shutdown_by_status(self, reason: str, lent: object = None) -> None:
        self.listener.close()
        self._called("shutdown_by_status", reason)

    def shutdown(self) -> None:
        self.listener.close()
        self._called("shutdown")

    def after_fork_in_child(self) -> None:
        self.listener.close()
        self._called("after_fork_in_child")


def install(calls_path: Path | None = None) -> type[FakeEngine]:
    """Stand in for penstock._native in this process."""
    FakeEngine.calls_path = calls_path
    native = types.ModuleType("penstock._native")
    native.Engine = FakeEngine  # type: ignore[attr-defined]
    native.MomentsKept = FakeMoments  # type: ignore[attr-defined]
    sys.modules["penstock._native"] = native
    return FakeEngine

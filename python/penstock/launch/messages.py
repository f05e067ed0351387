"""What a launcher and its agents tell each other: a JSON object per line on the agent's standard input and output.

An agent is a child of the launcher, or of the command that reaches its host, and nobody else holds the other ends. What
comes on its output before `HELLO`, such as a login's greeting, is not from the agent.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["HELLO", "LINE_MAX", "decode", "encode"]

HELLO = "penstock-agent-1"
LINE_MAX = 1 << 22
"""Bytes of one message: orders name the environment of every worker of a host."""


def encode(message: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The message of a line, or None if it is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None

"""Messages that ranks leave for each other while they meet: readable by all, proved by whoever holds the secret.

Pure: bytes in, bytes out. What a message without a proof means is decided where it is read (`penstock.rendezvous`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SealedMessage", "peek", "seal", "unseal"]


@dataclass(frozen=True)
class SealedMessage:
    """What was left under a key.

    Attributes:
        version: Of the sender's installation.
        given: Whether the sender was given a secret by its user.
        body: The content. Anybody's word unless `proven`.
        proven: Whether the sender holds the secret and meant this key.
    """

    version: str
    given: bool
    body: dict[str, Any]
    proven: bool


def _proof(secret: bytes, key: str, version: str, given: bool, text: str) -> str:
    said = "\0".join((key, version, str(given), text))
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()


def seal(version: str, secret: bytes | None, given: bool, key: str, body: Mapping[str, object]) -> bytes:
    """The message for `key`; without a secret it proves nothing."""
    text = json.dumps(body)
    proof = None if secret is None else _proof(secret, key, version, given, text)
    return json.dumps({"penstock": version, "given": given, "body": text, "proof": proof}).encode()


def unseal(data: bytes, secret: bytes | None, key: str) -> SealedMessage | None:
    """The message that was left for `key`, or None if this is none. Without a secret nothing counts as proven."""
    try:
        envelope = json.loads(data)
        version, given, text = str(envelope["penstock"]), bool(envelope["given"]), str(envelope["body"])
        body = json.loads(text)
        proof = str(envelope["proof"])
        f"{version}{text}{proof}".encode()  # JSON can spell half a character, of which there can be no proof
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    # As bytes, because text beyond ASCII cannot be compared in constant time.
    expected = None if secret is None else _proof(secret, key, version, given, text)
    proven = expected is not None and hmac.compare_digest(expected.encode(), proof.encode())
    return SealedMessage(version, given, body, proven)


def peek(data: bytes) -> SealedMessage | None:
    """What a message says, unproven."""
    return unseal(data, None, "")

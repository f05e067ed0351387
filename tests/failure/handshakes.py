"""The dialer's side of the handshake in Python, written from docs/protocol.md's companion, crates/net/src/handshake.rs.

A second implementation of the bytes, for tests that must say something wrong.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass, replace

MAGIC = b"PNSTOCK1"
VERSION = 7
NO_KEYS = bytes(48)  # nothing is encrypted
ANSWERED = slice(1, 1 + 32 + len(NO_KEYS))
CHALLENGE_BYTES = ANSWERED.stop + 32
REFUSAL_BYTES = 3
HEADER = struct.Struct("<BBHIIIII")
PUSH = 1

OK, WRONG_MAGIC, WRONG_VERSION, WRONG_JOB, UNKNOWN_RANK_OR_LANE, AUTHENTICATION_FAILED, SUPERSEDED, BUSY = range(8)


@dataclass(frozen=True)
class Hello:
    """The first message."""

    job_id: bytes
    sender: int
    receiver: int
    lane: int = 0
    version: int = VERSION
    nonce: bytes = b"\x07" * 32

    def encode(self) -> bytes:
        """The bytes on the wire."""
        fields = struct.pack("<H16sIIH", self.version, self.job_id, self.sender, self.receiver, self.lane)
        return MAGIC + fields + self.nonce + NO_KEYS

    def fresh(self) -> Hello:
        """The same with a nonce of its own."""
        return replace(self, nonce=os.urandom(32))


def key_of(secret: str) -> bytes:
    """What the engine is given for this secret."""
    return hashlib.sha256(secret.encode()).digest()


def proof(key: bytes, label: bytes, hello: bytes, answered: bytes) -> bytes:
    """The mac of one side; the engine hashes its key first."""
    return hmac.new(hashlib.sha256(key).digest(), label + hello + answered, hashlib.sha256).digest()


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly so many bytes, or fewer if the other end closes."""
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except ConnectionError:
            break
        if not more:
            break
        data += more
    return data


def challenge(connection: socket.socket, hello: Hello) -> bytes:
    """Say hello; returns the challenge or the refusal."""
    connection.sendall(hello.encode())
    status = receive(connection, 1)
    return status + receive(connection, (CHALLENGE_BYTES if status == b"\0" else REFUSAL_BYTES) - 1)


def prove(connection: socket.socket, hello: Hello, key: bytes) -> bytes:
    """The whole handshake with this key; returns the listener's last word."""
    answer = challenge(connection, hello)
    assert answer[0] == OK, answer
    answered, listeners_proof = answer[ANSWERED], answer[ANSWERED.stop :]
    genuine = hmac.compare_digest(listeners_proof, proof(key, b"listener", hello.encode(), answered))
    connection.sendall(proof(key, b"dialer", hello.encode(), answered))
    status = receive(connection, 1)
    assert genuine or status != b"\0", "a listener without the secret has accepted"
    return status + (receive(connection, REFUSAL_BYTES - 1) if status != b"\0" else b"")

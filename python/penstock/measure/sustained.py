"""The line rate, as exactly as a few seconds allow: what a stream carries while it flows.

A burst (`penstock.measure.quick`) is timed from its beginning to the answer that all is there, so that starting and
ending count as well: over a line of 956 Mbit/s one of a tenth of a second reads 840 to 930. Here the receiver
notes when each message of a stream is there, and the rate is that of a part in the middle.

Whatever else hosts do only slows a stream down, so the fastest part counts that is `WINDOW_SECONDS` long, and the
slowest link is measured again while all others are still. What would read more than the line carries is left out: the
beginning, which a token bucket may have saved for, and messages that had waited for the receiver.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import cast

from penstock.collectives import Future, Group
from penstock.measure.links import rounds
from penstock.measure.quick import told_by_all

__all__ = ["fastest_part", "sustained_rate"]

WINDOW_SECONDS, WINDOW_SECONDS_MAX = 0.6, 2.0
"""Of the part that counts."""
WINDOW_BYTES = 12 << 20
"""It has so many bytes if that does not take too long: of 128 KB, which a token bucket lets pass at once, 1 % again."""
STREAM_WINDOWS = 2.4
"""A stream is so many times as long."""
TRIES = 40
"""Parts that are looked at."""
ROUNDS = 4
SKIPPED = 0.1
"""Of a stream, at its beginning."""
MESSAGE_SECONDS = 0.002
MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX = 4 << 10, 4 << 20
MESSAGES_MIN = 20
DEPTH = 16
"""Messages under way."""
AGAIN_MAX = 4
"""How often the slowest link is measured again."""
SAME = 0.01
"""Two rates are alike if they differ by no more than this part."""
# The engine's tags of this measurement's messages.
PLAN, DATA = 1, 2
_PLAN = struct.Struct("<QQ")


def fastest_part(moments: Sequence[float], nbytes: int, window_s: float) -> float:
    """Bytes per second of the fastest part of a stream.

    Args:
        moments: When each message was there, in seconds.
        nbytes: Of a message.
        window_s: How long the part is at least, if the stream is long enough.
    """
    moments = moments[int(SKIPPED * len(moments)) :]
    window_s = min(window_s, 0.8 * (moments[-1] - moments[0]))
    fastest_s, last = math.inf, 0
    for first in range(0, len(moments), max(1, len(moments) // TRIES)):
        while last < len(moments) - 1 and moments[last] - moments[first] < window_s:
            last += 1
        if moments[last] - moments[first] >= window_s:
            fastest_s = min(fastest_s, _between(moments[first : last + 1]))
    return nbytes / fastest_s


def _between(moments: Sequence[float]) -> float:
    """Seconds from one message to the next, from one at the beginning to one at the end that are least late."""
    count, end = len(moments), max(1, len(moments) // 4)
    between_s = (moments[-1] - moments[0]) / (count - 1)

    def late_s(number: int) -> float:
        return moments[number] - number * between_s

    for _ in range(ROUNDS):  # how late a message is depends on what is sought
        first, last = min(range(end), key=late_s), min(range(count - end, count), key=late_s)
        between_s = (moments[last] - moments[first]) / (last - first)
    return between_s


def _window_s(bytes_per_s: float) -> float:
    return min(max(WINDOW_SECONDS, WINDOW_BYTES / bytes_per_s), WINDOW_SECONDS_MAX)


def _send(group: Group, peer: int, bytes_per_s: float) -> None:
    nbytes = int(min(max(bytes_per_s * MESSAGE_SECONDS, MESSAGE_BYTES_MIN), MESSAGE_BYTES_MAX))
    count = max(MESSAGES_MIN, int(bytes_per_s * STREAM_WINDOWS * _window_s(bytes_per_s) / nbytes))
    group.send(_PLAN.pack(nbytes, count), peer, PLAN)
    memory = bytes(nbytes)
    under_way: list[Future] = []
    for number in range(count):
        if number >= DEPTH:
            under_way[number - DEPTH].wait()
        under_way.append(cast("Future", group.send(memory, peer, DATA, async_=True)))
    for future in under_way[-DEPTH:]:
        future.wait()


def _receive(group: Group, peer: int, window_s: float) -> float:
    """Bytes per second."""
    plan = bytearray(_PLAN.size)
    group.recv(plan, peer, PLAN)
    nbytes, count = _PLAN.unpack(plan)
    memories = [bytearray(nbytes) for _ in range(2 * DEPTH)]  # a message that nobody asks for yet may not be sent

    def ask(number: int) -> Future:
        return cast("Future", group.recv(memories[number % len(memories)], peer, DATA, async_=True))

    asked = [ask(number) for number in range(min(count, len(memories)))]
    moments = []
    for number in range(count):
        asked[number].wait()
        moments.append(time.perf_counter())
        if len(asked) < count:
            asked.append(ask(len(asked)))
    return fastest_part(moments, nbytes, window_s)


def sustained_rate(group: Group, bytes_per_s: float) -> float:
    """The slowest rate, in bytes per second, of links of which each rank has one in each direction. All call it.

    Args:
        group: The ranks, two at least.
        bytes_per_s: The rate, roughly, as a start had it: streams are that long.

    Returns:
        The same on every rank.

    Raises:
        PeerLost: A rank was lost meanwhile.
        Timeout: A rank did not come.

    Example:
        >>> sustained_rate(group, 100e6)
        119400000.0
    """
    me, size = group.rank, group.size
    assert me is not None and size > 1, f"measured by a member of {group}, with others"
    found: dict[tuple[int, int], float] = {}

    def measure(links: Sequence[tuple[int, int]]) -> None:
        """These links, at the same time."""
        rate, roughly = 0.0, max(bytes_per_s, *found.values(), 0.0)
        for source, target in links:
            if me == source:
                _send(group, target, roughly)
            elif me == target:
                rate = _receive(group, source, _window_s(roughly))
        (rates,) = told_by_all(group, rate)
        for link in links:
            found[link] = max(rates[link[1]], found.get(link, 0.0))

    for matches in rounds(size, (size + 1) // 2):
        measure(matches)
        measure([(high, low) for low, high in matches])
    for _ in range(AGAIN_MAX):
        slowest = min(found, key=lambda link: (found[link], link))
        before = found[slowest]
        if before > max(found.values()) * (1 - SAME):
            break
        measure([slowest])
        if found[slowest] < before * (1 + SAME):
            break
    return min(found.values())

"""A rank fails when some have the addresses of all and others do not: everybody names that one, and the rest go on."""

import time

import pytest
from scene import GRACE_S, PEER_TIMEOUT_S, Ranks

SIZE = 4


@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_who_has_read_the_addresses_and_who_has_not_name_the_same_rank(kind):
    victim = SIZE - 1 if kind == "kill" else 0
    with Ranks(SIZE, "start_process.py", starts=False, again=True, peer_timeout_s=PEER_TIMEOUT_S / 2) as ranks:
        if kind == "raise":
            (ranks.directory / "raise").touch()
        ranks.start()
        others = [rank for rank in ranks.ranks if rank.number != victim]
        begin = time.monotonic()
        for rank in others:
            assert rank.end_by(begin + PEER_TIMEOUT_S + GRACE_S), f"rank {rank.number} hangs; {rank.last_words()}"
            error = rank.told("error")
            assert error is not None, rank.last_words()
            assert (error["kind"], error["rank"]) == ("PeerLost", victim), error
            assert kind == "kill" or "a bad batch" in error["message"], error
            assert rank.told("again"), rank.last_words()

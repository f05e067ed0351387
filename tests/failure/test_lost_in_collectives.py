"""The schemes beside the store, gathers too, with real processes: known values, a killed rank, and what is refused."""

import array
import signal
import time

import pytest
from scene import GRACE_S, PATIENCE_S, PEER_TIMEOUT_S, Ranks

SCHEMES = ["central", "tree", "ring", "butterfly"]


OFTEN = {("ring", 3), ("butterfly", 4)}  # 4 go in pairs, with nobody left over
KILLED_OFTEN = ["tree", "gather"]


@pytest.mark.parametrize(
    ("scheme", "size"),
    [
        pytest.param(scheme, size, marks=() if (scheme, size) in OFTEN else pytest.mark.long)
        for scheme in SCHEMES
        for size in (2, 3, 4)
    ],
)
def test_every_rank_gets_the_exact_average(scheme, size):
    with Ranks(size, scheme=scheme) as ranks:
        ranks.all_told("training")
        ranks.steps_from_now(10)  # each rank compares every element with what it must be
        ranks.stop()


@pytest.mark.parametrize(
    "scheme",
    [
        *KILLED_OFTEN,
        *(pytest.param(scheme, marks=pytest.mark.long) for scheme in SCHEMES if scheme not in KILLED_OFTEN),
    ],
)
def test_a_killed_rank_is_named_by_all_others(scheme):
    with Ranks(4, scheme=scheme) as ranks:
        ranks.all_told("training")
        ranks.steps_from_now(3)
        victim = ranks.ranks[2]
        victim.send(signal.SIGKILL)
        deadline = time.monotonic() + PEER_TIMEOUT_S + GRACE_S
        for rank in ranks.ranks:
            assert rank.end_by(deadline), f"rank {rank.number} does not end; {rank.last_words()}"
        for rank in ranks.ranks:
            if rank is not victim:
                told = rank.told("error")
                assert told is not None, rank.last_words()
                assert (told["kind"], told["rank"]) == ("PeerLost", 2), told
                assert told["layer"] and told["step"] is not None, told


def test_what_a_scheme_cannot_do_is_refused_where_it_is_asked_for(connected_pair):
    import penstock as ps

    engines, book, memory = connected_pair
    address, elems = memory.buffer_info()
    for op, why in [("average", "integers"), ("median", "unknown op")]:
        with pytest.raises(ps.ConfigError, match=why):
            engines[0].submit(book, 0, address, 4 * elems, op, 1)
    with pytest.raises(ps.ConfigError, match=r"counts.weight of test is synchronised by ring.*store"):
        engines[0].leave()
    with pytest.raises(ps.ConfigError, match='unknown route "star": expected one of store'):
        engines[0].open_book("wrong", ["only"], [("w", 0, "f32", 1, "star")])


@pytest.fixture
def connected_pair():
    """Two engines of one process, a book with integers in a ring, and memory for one rank."""
    from concurrent.futures import ThreadPoolExecutor

    from penstock._native import Engine

    settings = {
        "bind_host": "127.0.0.1",
        "port": 0,
        "secret": bytes(32),
        "job_id": bytes(16),
        "slice_bytes": 4096,
        "lanes": 1,
        "window_bytes": 0,
        "priority": True,
        "operation_timeout_s": PATIENCE_S,
        "peer_timeout_s": PATIENCE_S,
        "handshake_timeout_s": PATIENCE_S,
    }
    engines = [Engine(rank=rank, size=2, **settings) for rank in range(2)]
    books = []
    for engine in engines:
        engine.connect([("127.0.0.1", other.port) for other in engines])
        books.append(engine.open_book("test", ["only"], [("counts.weight", 0, "i32", 5000, "ring")]))
    memories = [array.array("i", [rank + 2**30] * 5000) for rank in range(2)]

    def exchange(rank, op, step):
        address, elems = memories[rank].buffer_info()
        engines[rank].submit(books[rank], 0, address, 4 * elems, op, step)
        engines[rank].wait(books[rank], [0], True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: exchange(rank, "max", 0), range(2)))
        assert all(list(memory) == [2**30 + 1] * 5000 for memory in memories)
        list(pool.map(lambda rank: exchange(rank, "sum", 1), range(2)))
        assert all(list(memory) == [-(2**31) + 2] * 5000 for memory in memories), "sums wrap"
        yield engines, books[0], memories[0]
        list(pool.map(lambda engine: engine.shutdown(), engines))

"""Strangers on the port of a running job: each gets the right answer, and the job goes on with the right results."""

import random
import resource
import socket
import struct

import pytest
from handshakes import (
    ANSWERED,
    AUTHENTICATION_FAILED,
    BUSY,
    HEADER,
    PUSH,
    UNKNOWN_RANK_OR_LANE,
    VERSION,
    WRONG_JOB,
    WRONG_MAGIC,
    WRONG_VERSION,
    Hello,
    challenge,
    key_of,
    proof,
    prove,
    receive,
)
from scene import OPTIONS, PATIENCE_S, Ranks

import penstock as ps

CONNECTIONS = 1000
STEPS = 5
UNHURRIED = {"handshake_timeout_s": PATIENCE_S, "peer_timeout_s": PATIENCE_S}
"""Of those for whom no time shall be up: a stranger that a busy machine keeps waiting is no slower one."""
KEY = key_of(OPTIONS["secret"])


def knock(port):
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def shout(port, data):
    """Send as much as the listener takes, and return what it says."""
    with knock(port) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has closed already, which is its right
        return receive(connection, 1 << 10)


def refusal(status):
    return bytes([status]) + struct.pack("<H", VERSION)


@pytest.fixture(scope="module")
def job():
    """A job of two ranks that runs through all tests of this file and must end well after them."""
    with Ranks(2, **UNHURRIED) as ranks:
        ranks.steps_from_now(STEPS)
        yield ranks
        ranks.steps_from_now(STEPS)
        ranks.stop()


@pytest.fixture(params=[0, 1])
def at(request, job):
    """Each rank's port in turn: one of them has dialled the connection that is in use, the other has answered it."""
    listening = job.ranks[request.param].wait_for("listening")
    hello = Hello(bytes.fromhex(listening["job_id"]), 1 - request.param, request.param)
    yield listening["port"], hello.fresh()
    job.steps_from_now(STEPS)


def test_a_megabyte_of_random_bytes(at):
    seed = random.SystemRandom().randrange(2**32)
    answer = shout(at[0], random.Random(seed).randbytes(1 << 20))
    assert answer in (refusal(WRONG_MAGIC), b""), f"seed {seed}: {answer!r}"  # lost if the reset overtakes it


def test_half_a_header_is_closed_after_the_handshakes_time():
    with Ranks(2, **{**UNHURRIED, "handshake_timeout_s": 1.0}) as ranks:
        ranks.steps_from_now(STEPS)
        listening = [rank.wait_for("listening") for rank in ranks.ranks]
        with knock(listening[0]["port"]) as first, knock(listening[1]["port"]) as second:
            for rank, connection in enumerate((first, second)):
                hello = Hello(bytes.fromhex(listening[rank]["job_id"]), 1 - rank, rank)
                connection.sendall(hello.encode()[:37])
            for connection in (first, second):
                assert receive(connection, 1) == b""  # which waits for PATIENCE_S
        ranks.steps_from_now(STEPS)
        ranks.stop()


def test_a_frame_of_the_largest_length_from_a_stranger(at):
    frame = HEADER.pack(PUSH, 0, 0, 0, 1, 0, 0, 2**32 - 1)
    assert shout(at[0], frame) == refusal(WRONG_MAGIC)


def test_a_thousand_connections_at_once(at, job):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + 200
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    crowd = []
    try:
        for _ in range(CONNECTIONS):
            crowd.append(knock(at[0]))
        job.steps_from_now(STEPS)
    finally:
        for connection in crowd:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_version_is_told_ours(at):
    port, hello = at
    newer = Hello(hello.job_id, hello.sender, hello.receiver, version=VERSION + 1)
    assert shout(port, newer.encode()) == refusal(WRONG_VERSION)
    assert shout(port, newer.encode()[:10]) == refusal(WRONG_VERSION)  # however short its message is


def test_a_wrong_secret_is_told_so(at):
    port, hello = at
    with knock(port) as connection:
        assert prove(connection, hello, key_of("another secret of good length")) == refusal(AUTHENTICATION_FAILED)


def test_a_proof_is_good_for_one_connection_only(at):
    port, hello = at
    with knock(port) as first, knock(port) as second:
        answered = challenge(first, hello)[ANSWERED]
        assert challenge(second, hello)[ANSWERED] != answered
        second.sendall(proof(KEY, b"dialer", hello.encode(), answered))
        assert receive(second, 3) == refusal(AUTHENTICATION_FAILED)


def test_a_second_process_of_a_rank_is_told_that_there_is_one(at):
    port, hello = at
    with knock(port) as connection:
        assert prove(connection, hello, KEY) == refusal(BUSY)


def test_another_job_and_ranks_that_do_not_exist(at):
    port, hello = at
    assert shout(port, Hello(bytes(16), hello.sender, hello.receiver).encode()) == refusal(WRONG_JOB)
    for stranger in (Hello(hello.job_id, 2, hello.receiver), Hello(hello.job_id, hello.sender, 7)):
        assert shout(port, stranger.encode()) == refusal(UNKNOWN_RANK_OR_LANE)


def test_an_engine_with_a_wrong_secret_gets_the_error_and_the_job_none(at):
    from penstock._native import Engine

    port, hello = at
    engine = Engine(
        rank=hello.sender,
        size=2,
        bind_host="127.0.0.1",
        port=0,
        secret=key_of("another secret of good length"),
        job_id=hello.job_id,
        slice_bytes=OPTIONS["slice_bytes"],
        lanes=1,
        window_bytes=0,
        priority=True,
        operation_timeout_s=PATIENCE_S,
        **UNHURRIED,
    )
    table = [("127.0.0.1", port), ("127.0.0.1", port)]
    table[hello.sender] = ("127.0.0.1", engine.port)
    engine.connect(table)
    with pytest.raises(ps.AuthenticationError, match="secret"):
        engine.all_gather("a test", b"anybody?")
    engine.shutdown()


def test_a_crowd_that_is_there_first_only_delays_the_job():
    """Connections come about lazily: here the strangers have all places before the first rank dials another."""
    with Ranks(2, waits_for_go=True, peer_timeout_s=PATIENCE_S) as ranks:
        ports = [rank.wait_for("listening")["port"] for rank in ranks.ranks]
        crowd = [knock(port) for port in ports for _ in range(CONNECTIONS // 4)]
        try:
            ranks.go()
            ranks.steps_from_now(STEPS)
        finally:
            for connection in crowd:
                connection.close()
        ranks.stop()


def test_a_crowd_leaves_descriptors_for_the_program():
    """Each rank may have 256, and opens 150 files of its own while all strangers are there that it has places for."""
    with Ranks(2, waits_for_go=True, open_files=256, opens=[150, 150], **UNHURRIED) as ranks:
        ports = [rank.wait_for("listening")["port"] for rank in ranks.ranks]
        crowd = [knock(port) for port in ports for _ in range(256)]
        try:
            # Accepted in order: when the last one has had its answer, all before it have had their places.
            shout(ports[0], b"GET / HTTP/1.1")
            shout(ports[1], b"GET / HTTP/1.1")
            ranks.go()
            ranks.all_told("opened")
            ranks.steps_from_now(STEPS)
        finally:
            for connection in crowd:
                connection.close()
        ranks.stop()


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_without_descriptors_is_its_own_fault(poor):
    """It has opened all that it may before its first connection. The other can only see that it does not answer."""
    opens = [-1 if rank == poor else 0 for rank in range(2)]
    options = {"peer_timeout_s": 3.0, "line_rate_mbit": "off"}  # measuring would connect them before
    with Ranks(2, waits_for_go=True, open_files=256, opens=opens, **options) as ranks:
        for rank in ranks.ranks:
            rank.wait_for("listening")
        ranks.go()
        told = [rank.wait_for("error") for rank in ranks.ranks]
        assert [error["rank"] for error in told] == [poor, poor], told
        assert told[poor]["kind"] == "ConfigError" and "ulimit -n" in told[poor]["message"]
        assert f"rank {poor} has no file descriptor left" in told[poor]["message"]

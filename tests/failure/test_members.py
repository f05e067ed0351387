"""Processes that hold the secret and are wrong all the same: different models, a frame that breaks the protocol."""

import array
import struct

import pytest
from handshakes import HEADER, PUSH, Hello, key_of, prove
from scene import PATIENCE_S, Ranks

import penstock as ps

SECRET = "correct horse battery staple"


def test_different_models_are_named_and_the_same_job_then_trains_the_right_one():
    with Ranks(2, "torch_process.py") as ranks:
        for rank in ranks.ranks:
            told = rank.wait_for("mismatch")
            assert told["unchanged"]
            for part in ("1.weight", "[8, 8]", "[16, 8]", "rank 0", "rank 1"):
                assert part in told["message"], told
        ranks.steps_from_now(3)
        ranks.stop()


@pytest.mark.parametrize("length", [2**32 - 1, 12])
def test_a_member_that_claims_a_wrong_length_ends_the_job_with_a_protocol_error_that_names_it(length):
    """Rank 1 is this test: the right secret, then one frame that lies about its length."""
    import socket

    from penstock._native import Engine

    job_id = b"a job for a test"
    engine = Engine(
        rank=0,
        size=2,
        bind_host="127.0.0.1",
        port=0,
        secret=key_of(SECRET),
        job_id=job_id,
        slice_bytes=4096,
        lanes=1,
        window_bytes=0,
        priority=True,
        operation_timeout_s=PATIENCE_S,
        peer_timeout_s=PATIENCE_S,
        handshake_timeout_s=PATIENCE_S,
    )
    with socket.create_server(("127.0.0.1", 0)) as own:
        engine.connect([("127.0.0.1", engine.port), own.getsockname()])
        book = engine.open_book("test", ["only"], [("only.weight", 0, "f32", 2)])
        memory = array.array("f", [1.0, 2.0])
        with socket.create_connection(("127.0.0.1", engine.port)) as connection:
            assert prove(connection, Hello(job_id, 1, 0).fresh(), key_of(SECRET)) == b"\0"
            connection.sendall(HEADER.pack(PUSH, 0, book, 0, 1, 3, 0, length) + struct.pack("<2f", 3.0, 4.0))
            with pytest.raises(ps.ProtocolError, match=str(length)) as caught:
                engine.submit(book, 0, memory.buffer_info()[0], 8, "average", 3)
                engine.wait(book, [0])
            assert caught.value.rank == 1
        engine.shutdown()

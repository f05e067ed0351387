"""`penstock.KVStore` with servers apart: programs are the same, and keys live on the servers."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from test_dedicated import LIMIT_S, start, trained_by

KEYS = Path(__file__).with_name("keys.py")
KEPT = Path(__file__).with_name("kept.py")


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.long)])
def test_a_program_has_the_bits_of_a_plain_model_and_keys_live_on_servers(tmp_path, workers, servers):
    """Compared call by call in keys.py."""
    results, moved = trained_by(KEYS, tmp_path / "apart", workers, servers, *map(str, range(3)))
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert not any(result["owned"][:workers]), "workers own nothing that is summed"
        assert all(result["owned"][workers:])
    assert all(received > 0 and sent > 0 for received, sent in moved)


@pytest.mark.long
def test_optimizers_on_servers_go_on_from_checkpoints_with_other_numbers(tmp_path):
    """Twelve steps of one run, by 2 workers with 2 servers, 3 with 1 and 2 without any."""
    for turn, (workers, servers) in enumerate([(2, 2), (3, 1), (2, 0)]):
        results, _ = trained_by(KEPT, tmp_path / str(turn), workers, servers)
        assert results == [results[0]] * workers, "all workers have the same"
        assert results[0]["updates"] == [4 * (turn + 1)] * 2
        if servers:
            assert not any(results[0]["owned"][:workers])
    value, average, squares = 1.0, 0.0, 0.0  # AdamW by hand
    for number in range(12):
        average = 0.9 * average + 0.1 * number
        squares = 0.999 * squares + 0.001 * number**2
        value *= 1 - 0.01 * 0.01
        step = number + 1
        value -= 0.01 / (1 - 0.9**step) * average / (squares**0.5 / (1 - 0.999**step) ** 0.5 + 1e-8)
    np.testing.assert_allclose(results[0]["first"], value, rtol=1e-10)
    np.testing.assert_allclose(results[0]["momenta"], average, rtol=1e-10)


def test_a_server_that_is_lost_is_named_with_the_last_checkpoint(tmp_path):
    process = start(tmp_path / "job", 2, 2, "forever", program=KEPT)
    try:
        head = process.stderr.readline() + process.stderr.readline()
        pids = [int(pid) for pid in re.search(r"\(pid ([\d, ]+)\)", head)[1].split(", ")]
        while "step" not in process.stdout.readline():
            pass
        os.kill(pids[3], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    last = re.escape(str(tmp_path / "checkpoints" / "kvstore-0000000004.safetensors"))
    assert re.search(rf"PeerLost: server 1 .* is lost.* The last checkpoint is {last}: load it", err), err

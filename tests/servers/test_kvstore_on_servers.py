"""`penstock.KVStore` with servers apart: programs are the same, and keys live on the servers."""

from pathlib import Path

import pytest
from test_dedicated import trained_by

KEYS = Path(__file__).with_name("keys.py")


@pytest.mark.parametrize(("workers", "servers"), [(3, 2), (2, 1)])
def test_a_program_has_the_bits_of_a_plain_model_and_keys_live_on_servers(tmp_path, workers, servers):
    """Compared call by call in keys.py."""
    results, moved = trained_by(KEYS, tmp_path / "apart", workers, servers, *map(str, range(3)))
    assert len({result["bits"] for result in results}) == 1
    for result in results:
        assert not any(result["owned"][:workers]), "workers own nothing that is summed"
        assert all(result["owned"][workers:])
    assert all(received > 0 and sent > 0 for received, sent in moved)

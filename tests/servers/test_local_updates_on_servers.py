"""Local updates and asynchronous training with servers apart: programs are the same, and so are the bits."""

from pathlib import Path

from test_dedicated import trained_by

PROGRAM = Path(__file__).with_name("local_updates.py")


def test_outer_updates_are_made_by_servers(tmp_path):
    apart, moved = trained_by(PROGRAM, tmp_path / "apart", 2, 1)
    alike, _ = trained_by(PROGRAM, tmp_path / "alike", 2, 0)
    assert len({result["bits"] for result in apart + alike}) == 1
    for result in apart:
        *workers, server = result["owned"]
        assert sum(workers) == result["copied"], "nothing that is summed"
        assert server > 0
    assert all(received > 0 and sent > 0 for received, sent in moved)

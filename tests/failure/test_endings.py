"""However a program ends, the others are told what happened: never `ps.join()` where a rank has crashed."""

import re
import time

import pytest
from scene import PATIENCE_S, Ranks

TOLD = {  # how the last rank ends: its status, and what the other is told
    "exception": (1, "rank 1 failed: ValueError: bad batch"),
    "excepthook": (1, "rank 1 failed: ValueError: bad batch"),
    "SystemExit with a text": (
        1,
        r"rank 1 failed: the program ended without penstock.shutdown\(\) in .*\(exit status 1\)",
    ),
    "SystemExit with a status": (7, r"rank 1 failed: the program ended without .*, line \d+ \(exit status 7\)"),
    "SystemExit in order": (0, r"rank 1 has left the job by shutdown\(\) \(or the end of its program\)"),
    "sys.exit": (7, r"rank 1 failed: sys.exit in .*ending_process.py, line \d+ \(exit status 7\)"),
    "sys.exit with a text": (1, r"rank 1 failed: no more data \(exit status 1\)"),
    "sys.exit in a handler": (11, r"rank 1 failed: ValueError: bad batch \(exit status 11\)"),
    "Ctrl-C": (-2, "rank 1 failed: KeyboardInterrupt"),
    "os._exit": (0, "rank 1 is lost: its connection"),
    "thread": (0, r"rank 1 failed: ValueError: bad batch \(in thread trainer\)"),
    # Which of them depends on whether the loader was reading from the worker when that was killed.
    "loader": (1, "rank 1 failed: (RuntimeError: DataLoader worker|ConnectionResetError|EOFError)"),
    "return": (0, r"rank 1 has left the job by shutdown\(\) \(or the end of its program\)"),
}


@pytest.mark.parametrize("ending", TOLD)
def test_the_other_rank_is_told_why(ending):
    status, told = TOLD[ending]
    with Ranks(2, "ending_process.py", scheme=ending) as ranks:
        first, last = ranks.ranks
        for rank in (last, first):
            assert rank.end_by(time.monotonic() + PATIENCE_S), rank.last_words()
        assert last.process.returncode == status, last.last_words()
        error = first.told("error")
        assert error is not None, first.last_words()
        assert re.search(told, error["message"]) and error["rank"] == 1, error
        assert ("ps.join()" in error["message"]) == (ending in ("return", "SystemExit in order")), error

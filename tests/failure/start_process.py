"""A rank of `rank_process`, where one fails at a moment of the start that chance rarely hits.

    python start_process.py '{"rank": 0, "size": 4, "directory": "/tmp/x", ...}'

The last rank has given its address and does not read those of the others until rank 1 has gone on with them. Then the
last is killed, or rank 0 raises where there is a file `raise`.
"""

import os
import signal
import sys
from pathlib import Path

import rank_process
from rank_process import BadBatch, Plan

from penstock import rendezvous
from penstock.sealing import peek


def gone_on(meeting: rendezvous._Meeting) -> bool:
    """Whether rank 1 has the addresses of all."""
    return meeting.board.get(meeting._key("done", 1)) is not None


def fail_between(plan: Plan) -> None:
    """Patch this rank's side of the first meeting."""
    raises = (Path(plan.directory) / "raise").exists()
    take, collect = rendezvous._Follower._take, rendezvous._Leader._collect

    def take_late(self, stage, **of):
        if stage == "table":
            if not raises and gone_on(self):
                os.kill(os.getpid(), signal.SIGKILL)
            message = peek(self.board.get(self._key(stage)) or b"")
            if message is None or "error" not in message.body:
                return None  # it reads nothing else
            rendezvous._Follower._take = take
        return take(self, stage, **of)

    def collect_and_raise(self, stage, what, accept, *check):
        def fail():
            if gone_on(self):
                rendezvous._Leader._collect = collect
                raise BadBatch("a bad batch")

        collect(self, stage, what, accept, *([fail] if stage == "done" else check))

    if plan.rank == plan.size - 1:
        rendezvous._Follower._take = take_late
    elif plan.rank == 0 and raises:
        rendezvous._Leader._collect = collect_and_raise


if __name__ == "__main__":
    fail_between(Plan.parse(sys.argv[1]))
    rank_process.main()

"""A head, a member or a server is lost in a job with groups and servers: every other process ends, with its name.

Workers name the last checkpoint, too.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import programs
import pytest

LIMIT_S = 150
GONE_S = 10
UNTIL_LOST = Path(__file__).with_name("until_lost.py")
RUN = ["-m", "penstock", "run", "--grace-s", "30", "--workers", "4", "--clients", "2", "--servers", "2"]
NAMES = [*(f"rank {rank}" for rank in range(4)), *(f"server {number}" for number in range(2))]
HEAD_OF_ALL, HEAD, MEMBER, SERVER = "rank 0", "rank 2", "rank 3", "server 1"


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        (HEAD, "servers"),
        (MEMBER, "workers"),
        (SERVER, "store"),
        *(
            pytest.param(victim, kind, marks=pytest.mark.long)
            for victim, kind in [
                *((HEAD_OF_ALL, kind) for kind in ("workers", "servers", "store")),
                *((HEAD, kind) for kind in ("workers", "store")),
                *((MEMBER, kind) for kind in ("servers", "store")),
                *((SERVER, kind) for kind in ("workers", "servers")),
            ]
        ),
    ],
)
def test_all_others_end_with_the_name_of_who_is_killed(tmp_path, victim, kind):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = programs.start(*RUN, UNTIL_LOST, kind, cwd=tmp_path, **pipes)
    try:
        head = process.stderr.readline() + process.stderr.readline()
        pids = [int(pid) for pid in re.search(r"\(pid ([\d, ]+)\)", head)[1].split(", ")]
        begun = set()
        while len(begun) < 4:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            begun.add(re.fullmatch(r"\[(rank \d)\] steps\n", line)[1])
        began_s = time.monotonic()
        os.kill(pids[NAMES.index(victim)], signal.SIGKILL)
        out, err = process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began_s < GONE_S, "by themselves: the launcher would wait for longer"
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    assert f"{victim} on localhost was killed by SIGKILL; all others have ended" in err
    told = dict(re.findall(r"^\[(rank \d)\] lost (.*)", out, re.MULTILINE))
    told |= dict(re.findall(r"^\[(server \d)\] penstock server: PeerLost: (.*)", err, re.MULTILINE))
    assert sorted(told) == [name for name in NAMES if name != victim], f"{out}{err}"
    for name, said in told.items():
        assert re.search(rf"\b{victim} (\(127\.0\.0\.1:\d+\) )?is lost", said), f"{name}: {said}"
        file = r"kvstore-0{9}1\.safetensors" if kind == "store" else r"model-0{9}1-\w+\.1"
        named = re.search(rf"The last checkpoint is \S*checkpoints/{file}: load it when all ranks", said)
        assert bool(named) == name.startswith("rank"), f"{name}: {said}"

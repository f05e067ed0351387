"""`penstock run` as a user starts it: real processes, by themselves and behind a command that reaches hosts."""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

import programs
import pytest

LIMIT_S = 60
GONE_S = 10
COMMAND = ["-m", "penstock", "run", "--grace-s", "0.6"]
SHELL = "env TEST_HOST={host} sh -c {command}"
"""Reaches a "host" that is this machine."""

WAITS = "import os, time; print('here', os.environ['RANK'], flush=True)\nwhile True: time.sleep(0.1)"
"""Not `signal.pause`: Python notes a signal that comes just before it, and waits all the same."""
TELLS = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TEST_HOST", "GIVEN")
told = {name: os.environ.get(name) for name in names}
print(json.dumps(told | {"arguments": sys.argv[1:], "secret": os.environ.get("PENSTOCK_SECRET")}))
"""
LATE_CONSEQUENCE = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.exit("penstock.errors.PeerLost: rank 1 ended the job")
time.sleep(0.2)
raise ValueError("the cause")
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path, monkeypatch):
    """Every process of a test has its directory as working directory; none may be left."""
    monkeypatch.chdir(tmp_path)
    yield
    deadline_s = time.monotonic() + GONE_S
    while (left := processes(tmp_path)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def processes(place):
    """Processes that work in a directory, this one aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink() == place and (entry / "stat").read_text().split(") ")[1][0] != "Z":
                    found.append(int(entry.name))
    return found


def write(program):
    Path("train.py").write_text(program, encoding="utf-8")


def start(*arguments, **more):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.start_afresh(*COMMAND, *arguments, start_new_session=True, **pipes, **more)


def run(*arguments, **more):
    process = start(*arguments, **more)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def until_here(process, workers):
    """Read what a job of `WAITS` prints until all workers have begun."""
    ranks = {re.search(r"here (\d+)", process.stdout.readline())[1] for _ in range(workers)}
    assert ranks == {str(rank) for rank in range(workers)}


def pids(err):
    return [int(pid) for group in re.findall(r"\(pid ([\d, ]+)\)", err) for pid in group.split(", ")]


def agents(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def test_workers_find_their_place_and_their_output_is_told_apart():
    write(TELLS)
    status, out, err = run("--nproc-per-node", "3", "--env", "GIVEN=x y", "train.py", "--epochs", "3", "-m")
    assert status == 0, err
    told = dict(re.fullmatch(r"\[rank (\d)\] (.*)", line).groups() for line in out.splitlines())
    assert sorted(told) == ["0", "1", "2"]
    for rank, text in told.items():
        facts = json.loads(text)
        assert (facts["RANK"], facts["LOCAL_RANK"], facts["WORLD_SIZE"]) == (rank, rank, "3")
        assert (facts["arguments"], facts["GIVEN"]) == (["--epochs", "3", "-m"], "x y")
        assert facts["secret"] is None
    assert "3 workers, which meet at 127.0.0.1:" in err
    assert re.search(r"localhost: ranks 0-2 \(pid \d+, \d+, \d+\)", err)


def test_hosts_are_reached_by_the_command_that_is_given(tmp_path):
    write(TELLS)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=2\n")
    status, out, err = run("--hosts", "hosts", "--connect", SHELL, "train.py")
    assert status == 0, err
    facts = [json.loads(line.split("] ", 1)[1]) for line in out.splitlines()]
    facts.sort(key=lambda fact: fact["RANK"])
    assert [(fact["RANK"], fact["LOCAL_RANK"], fact["GROUP_RANK"], fact["TEST_HOST"]) for fact in facts] == [
        ("0", "0", "0", "one"),
        ("1", "0", "1", "two"),
        ("2", "1", "1", "two"),
    ]
    secrets = {fact["secret"] for fact in facts}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64
    assert "which meet at one:" in err


@pytest.mark.long
def test_servers_run_on_the_hosts_that_the_file_gives_them(tmp_path):
    write(
        "import json, os, numpy, penstock as ps\n"
        "ps.init(groups='host')\n"
        "kv = ps.KVStore()\n"
        "kv.init('w', numpy.zeros(70_000, numpy.float32))\n"
        "here = numpy.full(70_000, ps.rank() + 1.0, numpy.float32)\n"
        "kv.pushpull('w', here).wait()\n"
        "owned = ps.report()['owned_bytes']\n"
        "print(json.dumps([ps.rank(), os.environ['TEST_HOST'], float(here[-1]), owned]), flush=True)\n"
        "ps.shutdown()\n"
    )
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=1\nstore slots=0 servers=2\n")
    meet = ["--master-addr", "127.0.0.1"]  # these hosts are none that a name leads to
    status, out, err = run("--hosts", "hosts", "--servers", "2", "--connect", SHELL, *meet, "train.py")
    assert status == 0, err
    assert "3 workers and 2 servers, which meet at 127.0.0.1:" in err
    assert re.search(r"store: servers 0-1 \(pid \d+, \d+\)", err)
    told = sorted(json.loads(text) for text in re.findall(r"^\[rank \d\] (.*)", out, re.MULTILINE))
    assert [fact[:3] for fact in told] == [[0, "one", 6.0], [1, "one", 6.0], [2, "two", 6.0]]
    for *_, owned in told:
        assert not any(owned[:3]) and sum(owned[3:]) == 4 * 70_000 and all(owned[3:])
    assert sorted(re.findall(r"^\[(server \d)\] ended in order: [1-9]", out, re.MULTILINE)) == ["server 0", "server 1"]


def test_the_secret_of_a_job_on_hosts_is_in_no_command_line(tmp_path):
    write("import os, signal; print(os.environ['PENSTOCK_SECRET'], flush=True); signal.pause()")
    (tmp_path / "hosts").write_text("one\ntwo\n")
    process = start("--hosts", "hosts", "--connect", SHELL, "train.py")
    (secret,) = {process.stdout.readline().split("] ")[1].strip() for _ in range(2)}
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_bytes())
    process.terminate()
    process.communicate(timeout=LIMIT_S)
    assert any(b"penstock.launch.agent" in line for line in lines)
    assert not any(secret.encode() in line for line in lines)


def test_a_launcher_on_each_host():
    write(TELLS)
    common = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "4321"]
    nodes = [start(*common, "--node-rank", str(node), "train.py") for node in range(2)]
    out = "".join(node.communicate(timeout=LIMIT_S)[0] for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0]
    facts = sorted((json.loads(line.split("] ", 1)[1]) for line in out.splitlines()), key=lambda fact: fact["RANK"])
    assert [(fact["RANK"], fact["LOCAL_RANK"], fact["GROUP_RANK"]) for fact in facts] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {fact["WORLD_SIZE"] for fact in facts} == {"4"}


def test_a_module_a_program_and_lines_without_an_end(tmp_path):
    (tmp_path / "inside.py").write_text("import sys; sys.stdout.write('1%\\r2%\\r\\nno end')")
    status, out, err = run("-m", "inside", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (status, out) == (0, "[rank 0] 1%\n[rank 0] 2%\n[rank 0] no end\n"), err
    status, out, _ = run("--no-python", "--log-dir", "logs", "sh", "-c", "echo $RANK; echo oops >&2")
    assert (status, out) == (0, "[rank 0] 0\n")
    assert (tmp_path / "logs" / "rank-0.out").read_text() == "0\n"
    assert (tmp_path / "logs" / "rank-0.err").read_text() == "oops\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_that_is_killed_is_named_and_all_others_end(number):
    write(WAITS)
    process = start("--workers", "3", "train.py")
    until_here(process, 3)
    header = process.stderr.readline() + process.stderr.readline()
    began_s = time.monotonic()
    os.kill(pids(header)[1], number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began_s < GONE_S
    assert process.returncode == 128 + number
    assert f"rank 1 on localhost was killed by {number.name}; all others have ended" in err


ENDS_BY_TURNS = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
print(os.environ["PENSTOCK_ELASTIC"], os.environ["PENSTOCK_RANKS_MIN"], flush=True)
for turn in range(rank):
    while not pathlib.Path(f"ended-{turn}").exists():
        time.sleep(0.01)
dies = rank < int(sys.argv[1])
pathlib.Path(f"ended-{rank}").touch()
if dies:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_others_go_on_without_workers_that_are_lost():
    write(ENDS_BY_TURNS)
    status, out, err = run("--nproc-per-node", "4", "--min", "2", "train.py", "2")
    assert status == 0, err
    assert out.count("] 1 2\n") == 4, out
    for left in (3, 2):
        assert re.search(rf"rank [01] on localhost was killed by SIGKILL; {left} workers are left, and go on", err), err


STOPS = """
import os, signal, sys
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
    print("goes on", flush=True)
"""


def state(pid):
    """As the kernel has it, T of one that is stopped; Z also of one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split(") ")[1][0]
    except OSError:
        return "Z"


def test_a_worker_that_is_stopped_is_not_waited_for_when_the_others_have_ended():
    write(STOPS)
    status, out, err = run("--nproc-per-node", "3", "--min", "2", "train.py")
    assert (status, out) == (0, ""), err
    assert "rank 1 on localhost is stopped by a signal, and the others have ended: it is ended, too" in err


def test_a_worker_that_goes_on_in_time_is_waited_for():
    write(STOPS)
    process = start("--grace-s", "50", "--nproc-per-node", "3", "--min", "2", "train.py")
    first, second, third = pids(process.stderr.readline() + process.stderr.readline())
    while (state(first), state(second), state(third)) != ("Z", "T", "Z"):
        time.sleep(0.01)
    os.kill(second, signal.SIGCONT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "[rank 1] goes on\n"), err
    assert "is ended" not in err


GOES_ON_WITHOUT = """
import os, pathlib, time
from penstock import launcher_pipe
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(600)
launcher_pipe.tell(rank, lost=[1])
while not pathlib.Path("over").exists():
    time.sleep(0.01)
"""


def test_a_worker_that_hangs_and_was_given_up_is_ended_while_the_others_go_on():
    write(GOES_ON_WITHOUT)
    process = start("--grace-s", "0.2", "--nproc-per-node", "3", "--min", "2", "train.py")
    said = read_until(process, "2 workers are left, and go on")
    assert "the others go on without rank 1 on localhost, and it has not ended: it is ended" in said
    assert "rank 1 on localhost was killed by SIGKILL" in said
    Path("over").touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err


def test_too_few_that_are_left_are_ended():
    write(ENDS_BY_TURNS + "time.sleep(60)")
    status, _, err = run("--nproc-per-node", "3", "--min", "2", "train.py", "2")
    assert status == 128 + signal.SIGKILL, err
    assert "2 workers are left, and go on" in err
    assert "1 worker is left, and --min is 2" in err
    assert err.count("left, and") == 2, "of those that are ended then nothing is said"
    assert re.search(r"rank [01] on localhost was killed by SIGKILL; all others have ended", err), err


def test_who_was_lost_first_is_named_where_the_others_cannot_go_on():
    write(
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['RANK']\n"
        "if rank == '2':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while rank == '0' and not pathlib.Path('said').exists():\n    time.sleep(0.01)\n"
        "if rank == '0':\n    sys.exit('penstock.errors.PeerLost: rank 2 was lost')\n"
        "time.sleep(60)"
    )
    process = start("--nproc-per-node", "4", "--min", "3", "train.py")
    while "3 workers are left" not in process.stderr.readline():
        pass
    Path("said").touch()
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert "rank 2 on localhost was killed by SIGKILL; all others have ended" in err


COMES = """
import os, pathlib, signal, sys, time
from penstock import config, launcher_pipe

def said(name):
    pathlib.Path(name).touch()

def until(*names):
    while not all(pathlib.Path(name).exists() for name in names):
        time.sleep(0.01)

def opens(door):
    launcher_pipe.tell(int(os.environ["RANK"]), door=door)
    said(f"opened-{door}")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

rank, came_to = os.environ["RANK"], os.environ.get("PENSTOCK_JOIN")
if came_to is not None:
    print("came to", came_to, "as", rank, os.environ["LOCAL_RANK"], os.environ.get("TEST_HOST"), flush=True)
"""
"""The beginning of workers in whose place others may come: they open doors, of which no more is there than the name."""


def read_until(process, words):
    """What it has said on standard error, when it has said these words."""
    lines = []
    while words not in "".join(lines):
        lines.append(process.stderr.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


def test_a_newcomer_is_started_in_the_place_of_a_worker_that_is_lost(tmp_path):
    write(
        COMES + "pipe = int(os.environ['PENSTOCK_LAUNCHER_PIPE'].split(':')[0])\n"
        "os.write(pipe, b'\\xff\\n{}\\n' + b'[' * 5000 + b'\\n{\"door\": 1}\\n')  # which nobody takes for a door\n"
        "if came_to is None:\n"
        "    opens('door-' + rank)\n"
        "    until('opened-door-0', 'opened-door-2')\n"
        "    if rank == '1':\n        dies()\n"
        "    until('opened-newcomers')\n"
        "else:\n    opens('newcomers')\n"
    )
    status, out, err = run("--min", "2", "--max", "3", "--log-dir", "logs", "train.py")
    assert status == 0, err
    assert re.fullmatch(r"\[newcomer 1\] came to (door-0,door-2|door-[02]) as 1 1 None\n", out), out
    assert f"[newcomer 1] {(tmp_path / 'logs' / 'newcomer-1.out').read_text()}" == out
    assert "rank 1 on localhost was killed by SIGKILL; 2 workers are left, and go on" in err
    assert re.search(r"newcomer 1 is started in the place of rank 1, on localhost \(pid \d+\)", err), err
    assert "newcomer 1 takes part, one of " in err  # the others may have ended when this is heard


def test_a_newcomer_is_not_told_where_the_others_have_met():
    """It would refuse that; and on this machine it has the launcher's own environment beside what it is told."""
    write(
        COMES + "print('meets at', os.environ.get('PENSTOCK_RENDEZVOUS'), flush=True)\n"
        "if came_to is None:\n"
        "    opens('door-' + rank)\n"
        "    until('opened-door-0', 'opened-door-1')\n"
        "    if rank == '1':\n        dies()\n"
        "    until('opened-newcomers')\n"
        "else:\n    opens('newcomers')\n"
    )
    place = {"PENSTOCK_RENDEZVOUS": "tcp://127.0.0.1:5000"}
    status, out, err = run("--min", "1", "--max", "2", "train.py", env={**os.environ, **place})
    assert status == 0, err
    assert sorted(line for line in out.splitlines() if "meets" in line) == [
        "[newcomer 1] meets at None",
        "[rank 0] meets at tcp://127.0.0.1:5000",
        "[rank 1] meets at tcp://127.0.0.1:5000",
    ]


def test_a_newcomer_that_takes_part_is_followed_by_another_one_as_any_worker():
    write(
        COMES + "if came_to is None:\n"
        "    if rank == '0':\n        opens('first')\n        until('opened-second', 'over')\n"
        "    else:\n        until('opened-first')\n        dies()\n"
        "else:\n    opens('second')\n    dies()\n"
    )
    process = start("--nproc-per-node", "2", "--min", "1", "--max", "5", "--max-restarts", "2", "train.py")
    err = read_until(process, "no more newcomers are started: --max-restarts is 2")
    Path("over").touch()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert err.count("takes part, one of 2") == 2
    assert "newcomer 2 is started in the place of rank 1" in err
    assert "newcomer 2 on localhost was killed by SIGKILL; 1 worker is left, and goes on" in err


def test_newcomers_that_have_ended_leave_nothing_in_the_launcher():
    write(
        COMES + "if came_to is None:\n"
        "    if rank == '0':\n        opens('first')\n        until('over')\n"
        "    else:\n        until('opened-first')\n        dies()\n"
        "else:\n    opens('another')\n    dies()\n"
    )

    def files():
        return len([*Path(f"/proc/{process.pid}/fd").iterdir()])

    process = start("--nproc-per-node", "2", "--min", "1", "--max", "5", "--max-restarts", "3", "train.py")
    read_until(process, "2 workers, which meet at")
    before = files()
    read_until(process, "no more newcomers are started: --max-restarts is 3")
    deadline_s = time.monotonic() + GONE_S
    while (len(agents(process)), files()) != (1, before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    left = len(agents(process)), files()
    Path("over").touch()
    process.communicate(timeout=LIMIT_S)
    assert left == (1, before) and process.returncode == 0


def test_after_three_newcomers_that_end_before_they_take_part_nobody_comes():
    write(
        COMES + "if came_to is not None:\n    sys.exit('no way')\n"
        "if rank == '0':\n    opens('door')\n    until('over')\n"
        "else:\n    until('opened-door')\n    dies()\n"
    )
    process = start("--min", "1", "--max", "2", "train.py")
    err = read_until(process, "3 newcomers in a row have ended before they took part: no more are started")
    Path("over").touch()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    for number in (1, 2, 3):
        assert f"newcomer {number} on localhost ended with status 1, before it took part" in err


def test_who_cannot_come_without_a_door_is_said_once():
    write(
        COMES + "if came_to is None and rank < '2':\n    dies()\n"
        "until('lost')\n"  # both are, as the launcher has said
        "if rank == '2':\n    opens('late')\n"
        "until('opened-0', 'opened-1') if came_to is None else opens(rank)\n"
    )
    process = start("--min", "2", "--max", "4", "train.py")
    err = read_until(process, "2 workers are left, and go on")
    Path("lost").touch()
    out, rest = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err + rest
    assert (err + rest).count("nobody can come in the place of a lost worker") == 1
    assert sorted(re.findall(r"came to late as (\d)", out)) == ["0", "1"]


def test_a_newcomer_that_has_not_come_when_all_have_ended_is_ended():
    write(
        COMES + "if came_to is not None:\n    said('there')\n    time.sleep(60)\n"
        "if rank == '0':\n    opens('door')\n    until('there')\n"
        "else:\n    until('opened-door')\n    dies()\n"
    )
    status, _, err = run("--min", "1", "--max", "2", "train.py")
    assert status == 0, err
    assert "all workers have ended, so newcomer 1 cannot come any more" in err


def test_a_newcomer_comes_on_another_host_where_the_first_is_not_reached(tmp_path):
    write(
        COMES + "if came_to is None:\n    opens(rank)\n    until('opened-newcomers')\nelse:\n    opens('newcomers')\n"
    )
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=1\n")
    unless_gone = """sh -c 'test ! -e gone-{host} && exec env TEST_HOST={host} sh -c "$0"' {command}"""
    process = start("--hosts", "hosts", "--connect", unless_gone, "--min", "2", "--max", "3", "train.py")
    for rank in range(3):
        while not Path(f"opened-{rank}").exists():
            assert process.poll() is None
            time.sleep(0.01)
    Path("gone-two").touch()
    os.kill(agents(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert re.search(r"the agent on two \(pid \d+ here\) was killed by SIGKILL, and rank 2 with it; 2 workers", err)
    assert "two was not reached: " in err
    assert "newcomer 1 is started in the place of rank 2, on one" in err
    assert re.fullmatch(r"\[newcomer 1\] came to (0,1|[01]) as 2 2 one\n", out), out


def test_who_does_not_end_is_named_where_all_others_failed_of_somebody():
    write(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] != '1':\n    sys.exit('penstock.errors.PeerLost: rank 1 was silent')\n"
        "while True:\n    time.sleep(0.1)"
    )
    status, _, err = run("--workers", "3", "train.py")
    assert status == 1
    assert re.search(r"rank [02] on localhost ended with status 1, and rank 1 did not end: look there first", err), err


def test_a_terminal_that_is_gone_takes_no_time_from_workers_that_save():
    write(
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    for part in range(10):\n        print('saving', part, flush=True)\n        time.sleep(0.1)\n"
        "    pathlib.Path('saved-' + os.environ['RANK']).touch()\n    sys.exit()\n"
        "signal.signal(signal.SIGHUP, save)\n" + WAITS
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = start("--grace-s", "20", "--workers", "2", "train.py")
    finally:
        signal.signal(signal.SIGHUP, before)
    until_here(process, 2)
    process.stdout.close()  # as of a terminal, whose end it hears of, too
    process.send_signal(signal.SIGHUP)
    process.stderr.read()
    assert process.wait(LIMIT_S) == 128 + signal.SIGHUP
    assert all(Path(f"saved-{rank}").exists() for rank in range(2))


def test_a_launcher_whose_output_nobody_reads_ends_all_the_same():
    write("import time\nwhile True:\n    print('x' * 1000, flush=True)\n    time.sleep(0.0001)")
    process = start("--workers", "2", "train.py")
    while select.select([process.stdout], [], [], 0)[0] == []:
        time.sleep(0.01)
    size = -1
    while (there := unread(process.stdout)) != size:  # until no more fits
        size = there
        time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    process.communicate()


def unread(pipe):
    """Bytes in a pipe."""
    count = ctypes.c_int()
    fcntl.ioctl(pipe.fileno(), termios.FIONREAD, count)
    return count.value


def test_logs_are_those_of_this_run_and_errors_of_theirs_are_said(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.err").write_text("of an earlier run")
    status, _, err = run("--no-python", "--log-dir", "logs", "sh", "-c", "echo here")
    assert (status, (logs / "rank-0.out").read_text(), (logs / "rank-0.err").exists()) == (0, "here\n", False), err
    (tmp_path / "file").touch()
    status, _, err = run("--no-python", "--log-dir", "file", "sh", "-c", "echo here")
    assert status == 2 and "--log-dir file: there can be no such directory" in err
    (logs / "rank-0.out").unlink()
    lost = "rmdir logs; echo here; sleep 60"
    status, _, err = run("--no-python", "--log-dir", "logs", "sh", "-c", lost)
    assert status == 1 and "a line of rank 0 cannot be kept in logs" in err


def test_workers_that_a_signal_ends_are_not_said_to_go_on():
    write(WAITS)
    process = start("--nproc-per-node", "3", "--min", "1", "train.py")
    until_here(process, 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "left, and" not in err


def test_workers_that_do_not_want_to_end_are_ended():
    write("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS)
    process = start("--workers", "3", "train.py")
    until_here(process, 3)
    header = process.stderr.readline() + process.stderr.readline()
    began_s = time.monotonic()
    os.kill(pids(header)[2], signal.SIGSTOP)
    os.kill(pids(header)[0], signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began_s < GONE_S
    assert process.returncode == 137


def test_an_agent_that_is_killed_takes_its_workers_with_it_and_is_named(tmp_path):
    write(WAITS)
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=1\n")
    process = start("--hosts", "hosts", "--connect", SHELL, "train.py")
    until_here(process, 3)
    os.kill(agents(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert re.search(r"the agent on one \(pid \d+ here\) was killed by SIGKILL, and ranks 0-1 with it", err)


def test_nothing_is_left_of_a_launcher_that_is_killed():
    write(WAITS)
    process = start("--workers", "2", "train.py")
    until_here(process, 2)
    process.kill()
    process.communicate(timeout=LIMIT_S)  # ends when the last worker has let go of its output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_workers_who_may_end_by_themselves(number):
    write(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('noted', flush=True))\n"
        f"signal.signal(signal.{number.name}, lambda *_: sys.exit(print('saved', flush=True)))\n"
        "import time\nprint('here', os.environ['RANK'], flush=True)\nwhile True: time.sleep(0.1)"
    )
    before = signal.signal(number, signal.SIG_DFL)  # nohup's SIGHUP stays ignored
    try:
        process = start("--workers", "2", "train.py")
    finally:
        signal.signal(number, before)
    until_here(process, 2)
    process.send_signal(signal.SIGUSR1)
    assert {process.stdout.readline()[9:] for _ in range(2)} == {"noted\n"}
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    assert out.count("saved") == 2
    assert process.returncode == 128 + number
    assert f"ended by {number.name}; all workers have ended" in err


def test_a_signal_that_the_main_thread_sleeps_through_is_heard():
    write(WAITS)
    process = start("--workers", "2", "train.py")
    until_here(process, 2)
    # Handled by Python's main thread, which it does not wake: as one that comes just before a wait, or beside another.
    threads = sorted(int(entry.name) for entry in Path(f"/proc/{process.pid}/task").iterdir())
    to_thread(process.pid, threads[-1], signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def to_thread(pid, thread, number):
    """Send a signal to one thread of a process."""
    assert thread != pid, "the main thread"
    assert ctypes.CDLL(None, use_errno=True).tgkill(pid, thread, number) == 0


def test_ctrl_c():
    write(WAITS)
    process = start("--workers", "2", "train.py")
    until_here(process, 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert err.count("KeyboardInterrupt") == 2


def test_a_reader_that_leaves_ends_the_job():
    write("while True: print('y' * 100)")
    process = start("--workers", "2", "train.py")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE
    process.stderr.close()


def test_who_failed_of_another_one_is_not_the_culprit():
    write(LATE_CONSEQUENCE)
    status, _, err = run("--workers", "2", "train.py")
    assert status == 1
    assert "rank 1 on localhost ended with status 1" in err


def test_what_a_worker_leaves_behind_ends_with_it():
    write("import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])")
    status, _, err = run("train.py")
    assert status == 0, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "there is no file missing.py in"),
        (["--no-python", "no-such-program"], "there is no program no-such-program"),
        (["--hosts", "missing", "train.py"], "--hosts missing: "),
        (["--hosts", "hosts", "--connect", "sh -c {command}", "train.py"], "{host} must be in it"),
        (
            ["--hosts", "hosts", "--connect", "no-such-ssh {host} {command}", "train.py"],
            "there is no program no-such-ssh",
        ),
        (["--hosts", "hosts", "--nnodes", "2", "train.py"], "leave out --nnodes"),
        (["--nnodes", "2", "train.py"], "with --node-rank"),
        (["--node-rank", "1", "train.py"], "--node-rank 1 is not below --nnodes 1"),
        (["--env", "NOT_SET_ANYWHERE", "train.py"], "--env NOT_SET_ANYWHERE: it is not set here"),
        (["-m", "--no-python", "train"], "give one of them"),
        (["--nproc-per-node", "2", "--min", "3", "train.py"], "--min 3 is more than the 2 workers"),
        (["--nproc-per-node", "2", "--servers", "1", "--min", "1", "train.py"], "leave out --servers"),
        (["--nproc-per-node", "2", "--clients", "1", "--min", "1", "train.py"], "leave out --clients"),
        (["--nproc-per-node", "2", "--max", "2", "train.py"], "give --min, too"),
        (["--nproc-per-node", "2", "--min", "1", "--max", "1", "train.py"], "--max 1 is less than the 2 workers"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path, arguments, said):
    write("")
    (tmp_path / "hosts").write_text("one\n")
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("penstock run: ")
    assert err.count("\n") == 1


def test_a_host_that_is_not_reached(tmp_path):
    write("")
    (tmp_path / "hosts").write_text("one\ntwo\n")
    status, _, err = run("--hosts", "hosts", "--connect", "sh -c 'exec false' {host} {command}", "train.py")
    assert status == 1
    assert re.search(r"(one|two) was not reached: `sh -c .*` ended with status 1", err)


def test_a_command_that_reaches_a_host_and_does_not_end_is_ended_and_named(tmp_path):
    write("")
    (tmp_path / "hosts").write_text("one\n")
    (tmp_path / "odd-ssh").write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec >/dev/null sleep 600\n")
    (tmp_path / "odd-ssh").chmod(0o755)
    status, _, err = run("--hosts", "hosts", "--connect", f"{tmp_path}/odd-ssh {{host}} {{command}}", "train.py")
    assert status == 1
    assert re.search(r"one was not reached: `.*odd-ssh one .*` closed its output, did not end within 3 s, and was", err)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_a_task_of_another_launcher_becomes_the_program():
    write("import os; print(os.environ['SLURM_PROCID'], os.environ['RANK'])")
    meet = {"PENSTOCK_RENDEZVOUS": "tcp://127.0.0.1:1"}
    task = {**os.environ, **meet, "PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "3"}
    assert run("train.py", env=task)[:2] == (0, "3 1\n")
    task = {**os.environ, **meet, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    assert run("train.py", env=task)[:2] == (0, "3 3\n")
    status, _, err = run("--workers", "2", "train.py", env=task)
    assert status == 2
    assert "--workers: this process is one task of another launcher (SLURM_STEP_ID is set)" in err

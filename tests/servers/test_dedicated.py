"""Jobs with servers of their own, of real processes, as `penstock run --servers` starts them."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import programs
import pytest

from penstock.control import (
    ANSWER_BYTES,
    CountLate,
    EndServing,
    Keep,
    OrderUpdates,
    PartWritten,
    Proceed,
    Saved,
    SeesDirectory,
    ServeBook,
    Servers,
    SetPriorities,
    Squares,
    WritePart,
    decode,
    encode,
)
from penstock.errors import ConfigError, ProtocolError

LIMIT_S = 150
GONE_S = 10
STEPS = 6  # as in training.py
TRAINING = Path(__file__).with_name("training.py")
RUN = ["-m", "penstock", "run", "--grace-s", "2"]


def start(directory, workers, servers, *options, program=TRAINING, **more):
    directory.mkdir(exist_ok=True)
    command = [*RUN, "--workers", str(workers), "--servers", str(servers), str(program), str(directory), *options]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return programs.start(*command, cwd=directory, **pipes, **more)


def run(*arguments, program=TRAINING, **more):
    process = start(*arguments, program=program, **more)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def trained(directory, workers, servers, *options):
    """As `trained_by`, of training.py."""
    return trained_by(TRAINING, directory, workers, servers, *options)


def trained_by(program, directory, workers, servers, *options):
    """What each worker has left, and by server what it says it has received and sent."""
    status, out, err = run(directory, workers, servers, *options, program=program)
    assert status == 0, err
    told = re.findall(r"\[server (\d)\] ended in order: (\d+) bytes received, (\d+) sent", out)
    assert [int(server) for server, *_ in sorted(told)] == list(range(servers)), out
    results = [json.loads((directory / f"result-{rank}").read_text()) for rank in range(workers)]
    return results, [(int(received), int(sent)) for _, received, sent in sorted(told)]


@pytest.mark.parametrize(
    ("workers", "servers"), [(3, 2), *(pytest.param(*which, marks=pytest.mark.long) for which in [(4, 2), (2, 1)])]
)
def test_training_has_the_bits_of_a_job_without_servers_and_moves_what_table_1_says(tmp_path, workers, servers):
    apart, moved_by_servers = trained(tmp_path / "apart", workers, servers)
    alike, _ = trained(tmp_path / "alike", workers, 0)
    assert {result["bits"] for result in apart + alike} == {alike[0]["bits"]}
    nbytes = 4 * apart[0]["parameters"]
    for rank, result in enumerate(apart):
        # Numbers of ranks are those of workers; so are sums.
        assert (result["rank"], result["world_size"]) == (rank, workers)
        assert result["ranks"] == sum(range(workers))
        # P1: a worker sends and receives all of it; what the ranks compare goes among the workers.
        assert result["moved"]["model0.gradients"] == {"bytes_sent": STEPS * nbytes, "bytes_received": STEPS * nbytes}
        assert len(result["owned"]) == workers + servers
    # P2: a server owns its even share, and moves it to and from every worker.
    owned = apart[0]["owned"][workers:]
    assert sum(owned) == nbytes
    assert max(owned) - min(owned) <= 8192, "no more than a slice"
    assert moved_by_servers == [(STEPS * workers * share, STEPS * workers * share) for share in owned]


def test_servers_that_are_started_by_hand_serve_workers_that_something_else_starts(tmp_path):
    """Over TCP, as docs/running.md has it; what is the same on all ranks only the workers' program says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    place = tmp_path / "by hand"
    place.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    clean["PENSTOCK_SECRET"] = "correct horse battery staple"
    told = {**clean, "PENSTOCK_RENDEZVOUS": meet, "PENSTOCK_SERVERS": "2", "WORLD_SIZE": "4"}
    given = ["--world-size", "4", "--servers", "2", "--rendezvous", meet]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def server(number):
        return programs.start_afresh("-m", "penstock", "server", "--rank", number, *given, env=clean, **pipes)

    def worker(rank):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4"}
        return programs.start(TRAINING, place, env={**told, **here}, **pipes)

    started = [server(1), *map(worker, range(4)), server(0)]  # in any order
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * 6, said
    assert all(re.fullmatch(r"ended in order: [1-9]\d* bytes .*\n", out) for out, _ in (said[0], said[-1])), said
    by_hand = [json.loads((place / f"result-{rank}").read_text()) for rank in range(4)]
    by_launcher, _ = trained(tmp_path / "run", 4, 2)
    assert {result["bits"] for result in by_hand} == {by_launcher[0]["bits"]}
    assert by_hand[0]["owned"] == by_launcher[0]["owned"]


@pytest.mark.long
def test_what_servers_make_no_sense_for_goes_among_the_workers(tmp_path):
    apart, moved = trained(tmp_path / "apart", 3, 1, "schemes")
    alike, _ = trained(tmp_path / "alike", 3, 0, "schemes")
    assert {result["bits"] for result in apart + alike} == {alike[0]["bits"]}
    first_layer = 4 * (300 * 40 + 300)
    assert 0 < moved[0][0] <= STEPS * 3 * (first_layer + 4 * 200), "factors and a ring pass the server by"


@pytest.mark.long
def test_workers_with_different_numbers_of_batches_join(tmp_path):
    apart, _ = trained(tmp_path / "apart", 3, 2, "join")
    alike, _ = trained(tmp_path / "alike", 3, 0, "join")
    assert {result["bits"] for result in apart + alike} == {alike[0]["bits"]}


ENDS_EARLY = """
import sys, torch
import penstock as ps

ps.init()
model = torch.nn.Linear(3, 3)
model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), **eval(sys.argv[2]))
for _ in range(2 if ps.rank() == 1 else 9):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
ps.synchronize(model)
ps.shutdown()
"""


@pytest.mark.parametrize("how", ["{}", pytest.param("{'mode': 'async', 'staleness': 1}", marks=pytest.mark.long)])
def test_a_worker_that_ends_early_is_named_at_once(tmp_path, how):
    """The server knows: it waits for that worker's part, and no program of its own ever does."""
    (program := tmp_path / "ends_early.py").write_text(ENDS_EARLY)
    begun = time.monotonic()
    status, out, err = run(tmp_path, 2, 1, how, program=program)
    assert status == 1 and time.monotonic() - begun < 60, (out, err)  # a call may take 300 s
    said = out + err
    assert "PeerLost: rank 1 has left the job by shutdown()" in said and "ps.join()" in said, said


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("victim", "update"), [("server 1", "workers"), ("server 1", "servers"), ("rank 1", "workers")]
)
def test_whoever_is_killed_ends_all_and_is_named(tmp_path, victim, update):
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import sys, torch, penstock as ps\n"
        "ps.init(peer_timeout_s=60)\n"
        "print('here', flush=True)\n"
        "numbers = torch.zeros(1)\n"
        "model = torch.nn.Linear(100, 100)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"model, optimizer = ps.distribute(model, optimizer, update={update!r})\n"
        "while True:\n"
        "    model(torch.ones(1, 100)).sum().backward()\n"
        "    optimizer.step()\n"
        "    print('step', flush=True)\n"
    )
    process = start(tmp_path / "job", 2, 2, program=waits)
    try:
        while "step" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        head = process.stderr.readline() + process.stderr.readline()
        assert "2 workers and 2 servers, which meet at" in head
        assert "localhost: ranks 0-1, servers 0-1 (pid" in head
        pids = [int(pid) for pid in re.search(r"\(pid ([\d, ]+)\)", head)[1].split(", ")]
        names = ["rank 0", "rank 1", "server 0", "server 1"]
        began_s = time.monotonic()
        os.kill(pids[names.index(victim)], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began_s < GONE_S
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGKILL
    assert f"{victim} on localhost was killed by SIGKILL; all others have ended" in err
    assert not [pid for pid in pids if alive(pid)]
    if victim == "server 1":
        assert re.search(r"\[rank 0\] penstock.errors.PeerLost: server 1 \(127.0.0.1:\d+\) is lost", err), err
    else:
        assert re.search(r"\[server 0\] penstock server: PeerLost: rank 1 is lost", err), err


def test_a_server_loads_no_framework(tmp_path):
    """Asserted in the server itself, at its end."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "if sys.argv[-1:] == ['server'] or 'server' in sys.orig_argv:\n"
        "    names = ('torch', 'numpy')\n"
        "    atexit.register(lambda: print('loaded:', [name for name in names if name in sys.modules], flush=True))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = start(tmp_path / "job", 2, 1, env=env)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert "[server 0] loaded: []" in out


def test_servers_end_where_the_program_never_joins(tmp_path):
    program = tmp_path / "plain.py"
    program.write_text("print('done')")
    process = start(tmp_path / "job", 2, 1, program=program)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "all workers have ended, but server 0 did not (does the program call penstock.init?)" in err


def test_more_servers_than_there_is_to_own(tmp_path):
    program = tmp_path / "small.py"
    program.write_text(
        "import torch, penstock as ps\n"
        "ps.init()\n"
        "model = torch.nn.Linear(3, 1, bias=False)\n"
        "ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    status, _, err = run_program(tmp_path / "job", 2, 2, program)
    assert status != 0
    assert "model0.gradients has slices for 1 of 2 servers, and server 1 would own nothing; start fewer" in err


def run_program(directory, workers, servers, program):
    process = start(directory, workers, servers, program=program)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def server_alone(*arguments, **variables):
    command = [sys.executable, "-m", "penstock", "server", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **variables})
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--rank", "0", "--world-size", "2"], {}, "the job has none: give the number of servers"),
        (["--rank", "2", "--world-size", "2", "--servers", "2"], {}, "server 2 (argument rank) is not below"),
        (["--servers", "1"], {}, "does not know where to meet the others"),
        ([], {"PENSTOCK_SERVERS": "many"}, "option servers: got 'many'"),
    ],
)
def test_a_server_that_cannot_be_one(arguments, variables, said):
    status, err = server_alone(*arguments, **variables)
    assert status == 2
    assert said in err
    assert err.startswith("penstock server: ConfigError: ")
    assert err.count("\n") == 1


def test_a_worker_and_a_server_that_were_told_different_numbers(tmp_path):
    """The worker knows of one server; the second one is told so at once, and nobody waits until time is up."""
    meet = tmp_path / "meet"
    meet.mkdir(mode=0o700)
    given = f"rank=0, world_size=1, servers=1, rendezvous='file://{meet}', rendezvous_timeout_s=60"
    program = f"import penstock as ps; ps.init({given})"
    worker = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    began_s = time.monotonic()
    status, err = server_alone("--rank", "1", "--world-size", "1", "--servers", "2", "--rendezvous", f"file://{meet}")
    said = worker.communicate(timeout=LIMIT_S)[1]
    assert (status, worker.returncode) == (2, 1)
    for text in (err, said):
        assert "option servers: server 1 has 2, rank 0 has 1; set the same on every rank" in text
    assert time.monotonic() - began_s < 40


def test_a_program_that_trains_is_no_server():
    program = "import penstock as ps; ps.init()"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "PENSTOCK_ROLE": "server", "PENSTOCK_SERVERS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **variables},
    )
    assert done.returncode == 1
    assert "this process is server 0" in done.stderr
    assert "start `penstock server` in its place" in done.stderr


class Counted:
    """The engine of a server that has counted late contributions; it keeps what is to be summed."""

    def __init__(self, late):
        self._late = late

    def late(self, book):
        return self._late

    def call(self, group, kind, root, number, op, dtype, inputs, outputs, keep):
        assert (kind, op, outputs) == ("reduce", "sum", [])
        ((address, nbytes),) = inputs
        self.summed = dtype, np.frombuffer(ctypes.string_at(address, nbytes), "<i8")
        return self

    def wait(self):
        pass


def test_who_is_late_is_told_however_many_they_are():
    engine = Counted([(rank, rank << 40) for rank in range(1, 1000, 2)])
    answer = CountLate(2, 1000).carry_out(engine)
    assert len(json.dumps({"value": answer})) <= ANSWER_BYTES
    dtype, counts = engine.summed
    assert (dtype, counts.tolist()) == ("i64", [(rank << 40) * (rank % 2) for rank in range(1000)])


ENDS_TWICE = """
import pathlib
import signal
import sys
import time

import penstock as ps
from penstock.job import current

ps.init()
begun, ended = (pathlib.Path(sys.argv[1]) / name for name in ("begun", "ended"))
engine = current().engine


def again(*_):
    begun.touch()
    ps.shutdown()
    try:
        engine.check()
    except ps.ConfigError as error:
        ended.write_text(str(error))


if ps.rank() == 0:
    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
else:
    while not begun.exists():
        time.sleep(0.01)
ps.shutdown()
"""


def test_a_job_that_a_handler_of_a_signal_ends_while_it_ends_has_ended_when_the_handler_goes_on(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDS_TWICE)
    # Workers that have measured their lines together wait for each other when they end.
    measures = {**os.environ, "PENSTOCK_LINE_RATE_MBIT": "auto"}
    status, out, err = run(tmp_path / "job", 2, 1, program=program, env=measures)
    assert status == 0, err
    assert "[server 0] ended in order" in out
    assert (tmp_path / "job" / "ended").read_text() == "the engine was shut down"


class Interrupted:
    """A channel, and an engine, of a worker that a signal comes to in the middle of its first word."""

    has_failed = False

    def __init__(self, handler):
        self.handler, self.told, self.aborted = handler, [], None

    def form_group(self, group, members):
        pass

    def abort(self, reason):
        self.aborted = reason

    def tell(self, message, meanwhile):
        self.told.append(type(message))
        if len(self.told) == 1:
            self.handler(self.servers)
        return []


@pytest.mark.parametrize("ends", [False, True])
def test_a_handler_of_a_signal_is_not_held_up_by_a_word_that_it_comes_in_the_middle_of(ends):
    errors = []

    def handler(servers):
        if ends:
            servers.end()
            return
        with pytest.raises(ConfigError, match="CountLate cannot be told to the servers by a handler of a signal"):
            servers.late(0)
        errors.append("refused")

    def program():
        there = Interrupted(handler)
        there.servers = servers = Servers(there, 0, 2, 1)
        servers._channel = there
        servers.tell(SetPriorities(1, [0]))
        servers.end()  # if the handler has not
        found.append((there.told, there.aborted))

    found = []
    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    thread.join(GONE_S)
    assert not thread.is_alive(), "it waits for itself"
    if ends:
        [(told, aborted)] = found
        assert told == [SetPriorities] and "a handler of a signal ended the job" in aborted
    else:
        assert errors == ["refused"] and found == [([SetPriorities, EndServing], None)]


def test_messages_are_typed_and_nothing_else_is_taken():
    book = ServeBook(2, "model", ["fc"], [["w", 0, "f32", 3]], [0, 1, 2], [2], [0, 1])
    word = Proceed(2, 7, [["sgd", {"lr": 0.1}]], [0], 0.5)
    for message in (
        book,
        SetPriorities(1, [2, 0, 1]),
        word,
        Squares(2, 7),
        OrderUpdates(2, ["sgd", {"lr": 0.1}], 0.5, 3),
        Keep(2, 0, 12, True, None, 3),
        CountLate(2, 4),
        SeesDirectory("/somewhere", "4be1"),
        WritePart(
            "/somewhere/model", [7, 0, "4be1.2"], 2, 3, 99, 2, [[6, 0, "4be1.1"]], [[2, 0, 12, 0, "m"]], {"own": None}
        ),
        PartWritten(1.5),
        EndServing(),
    ):
        assert decode(encode(message)) == message
    assert decode(encode(Saved(2, 0, 12, None))) == Saved(2, 0, 12, None)
    with pytest.raises(ConfigError, match="an optimizer 'lars'; the core has sgd, adam"):
        Proceed(2, 7, [["lars", {}]], [0]).carry_out(None)
    wrong = [
        b"",
        b"\x80\x04K\x01.",  # a pickle
        b"[]",
        b'{"version": 2, "type": "EndServing", "fields": {}}',
        b'{"version": 1, "type": "System", "fields": {}}',
        b'{"version": 1, "type": "EndServing", "fields": {"command": "x"}}',
    ]
    for data in wrong:
        with pytest.raises(ProtocolError):
            decode(data)

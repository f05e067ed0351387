"""Strangers at the meeting point, and a meeting point that falls silent: nobody waits longer than the limit says."""

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import programs
import pytest
from meeting import assert_met, free_port, meet

from penstock import boards, key_server, tcp_board
from penstock.boards import polls
from penstock.errors import ConfigError
from penstock.launchers import MeetingPoint
from penstock.sealing import unseal

PROGRAM = Path(__file__).with_name("meeting_process.py")
PATIENCE_S = 120.0
LIMIT_S = 4.0
MORE_S = 1.0
SECRET = "correct horse battery staple"


@contextmanager
def started(*arguments, program=(str(PROGRAM),), start=programs.start_afresh):
    """A process that tells what happens on its standard output; ended by its id whatever it does."""
    paths = os.pathsep.join(path for path in sys.path if path)
    process = start(
        *program,
        *arguments,
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # A test that waits for a line is bounded by the end of the process.
    doom = threading.Timer(PATIENCE_S, process.kill)
    doom.start()
    try:
        yield process
    finally:
        doom.cancel()
        process.kill()
        process.communicate()


def heard(process, event):
    """The next line of the process, which must be of this kind."""
    line = process.stdout.readline()
    assert line, process.stderr.read()
    told = json.loads(line)
    assert told.get("event") == event, told
    return told


def wait_for_a_connection(port):
    """Until somebody is connected to this local port."""
    for left in polls(time.monotonic() + PATIENCE_S):
        tables = [Path(name).read_text().splitlines()[1:] for name in ("/proc/net/tcp", "/proc/net/tcp6")]
        lines = [line.split() for table in tables for line in table]
        if any(line[1].endswith(f":{port:04X}") and line[3] == "01" for line in lines):
            return
        assert left > 0, f"nobody is connected to {port}"


def wait_for_arrival(port, rank):
    """Until rank 0 has a word of this rank, and has answered it: it may never take up a connection."""
    board = tcp_board.RemoteBoard(MeetingPoint("tcp", "127.0.0.1", port), 2, PATIENCE_S)
    board.deadline = time.monotonic() + PATIENCE_S
    with closing(board):
        for left in polls(board.deadline):
            opening = unseal(board.get("job") or b"", None, "job")
            if opening is not None and board.get(f"{opening.body['id']}/arrival/{rank}") is not None:
                return
            assert left > 0, f"rank {rank} does not arrive"


def rank_at(point, rank, size=2, **options):
    facts = {"rank": rank, "world_size": size, "rendezvous": point, "rendezvous_timeout_s": LIMIT_S, **options}
    return started(json.dumps(facts))


def knock(port):
    """A connection to a port that is about to be listened at."""
    for _ in polls(time.monotonic() + PATIENCE_S):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        except ConnectionRefusedError:
            pass
    raise AssertionError(f"nobody listens at {port}")


def meet_beside(size, act, **shared):
    """Let ranks meet at a port; `act(port)` is done when rank 0 listens there and before another rank comes."""
    port = free_port()
    point = f"tcp://127.0.0.1:{port}"
    outcomes = []
    first = threading.Thread(target=lambda: outcomes.extend(meet(size, rendezvous=point, ranks=[0], **shared)))
    first.start()
    with ExitStack() as left_open:
        act(port, left_open)
        outcomes.extend(meet(size, rendezvous=point, ranks=list(range(1, size)), **shared))
        first.join()
    return sorted(outcomes, key=lambda outcome: outcome.agreement is None)


SENTENCES = {
    "nothing": b"",
    "one byte": b"\x01",
    "half a request": key_server.REQUEST.pack(key_server.MAGIC, key_server.SET, 5, 1000) + b"job" + b"x" * 10,
    "a length of 4 GB": key_server.REQUEST.pack(key_server.MAGIC, key_server.SET, 3, 2**32 - 1) + b"job",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "the id of a job": key_server.REQUEST.pack(key_server.MAGIC, key_server.SET, 3, 32) + b"job" + b"0" * 32,
    "a key that is no text": key_server.REQUEST.pack(key_server.MAGIC, key_server.GET, 3, 0) + b"\xff\xfe\xfd",
}


@pytest.mark.parametrize("sentence", SENTENCES)
@pytest.mark.parametrize("secret", [SECRET, None])
def test_a_stranger_at_rank_0s_port_delays_nobody(sentence, secret):
    def act(port, left_open):
        for _ in range(3):
            left_open.enter_context(knock(port)).sendall(SENTENCES[sentence])

    begin = time.monotonic()
    assert_met(sorted(meet_beside(3, act, secret=secret), key=lambda outcome: outcome.error is not None))
    assert time.monotonic() - begin < 20


def test_a_crowd_that_never_ends_delays_nobody_for_long():
    """More than there are places, some of them refilled all the time, each with random bytes or none."""
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    done = threading.Event()

    def keep_coming(port):
        while not done.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                    stranger.sendall(draw.randbytes(draw.randrange(64)))
            except OSError:
                return  # the ranks have met

    def act(port, left_open):
        for _ in range(2 * key_server.STRANGERS_MAX):
            left_open.enter_context(knock(port))
        coming = threading.Thread(target=keep_coming, args=(port,))
        coming.start()
        left_open.callback(coming.join)
        left_open.callback(done.set)

    begin = time.monotonic()
    try:
        assert_met(meet_beside(4, act, secret=SECRET))
    except BaseException as error:
        raise AssertionError(f"seed {seed}") from error
    finally:
        done.set()
    assert time.monotonic() - begin < 30, f"seed {seed}"


HELPERS = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
CROWDED = """
import json, resource, sys, threading
from meeting import SilentDoor
from penstock.launchers import discover
from penstock.rendezvous import exchange

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
def meet():
    exchange(discover({}, **json.loads(sys.argv[1])), SilentDoor(lambda _: ("127.0.0.1", 1000)), version="1.0", lanes=2)
    print(json.dumps({"event": "met"}), flush=True)
meeting = threading.Thread(target=meet)
meeting.start()
sys.stdin.readline()
files = [open("/dev/null") for _ in range(60)]
print(json.dumps({"event": "opened"}), flush=True)
meeting.join()
"""


def test_strangers_leave_descriptors_for_the_program():
    """Rank 0 may have 100, and its program opens 60 files while 90 strangers are there."""
    port = free_port()
    facts = {"rank": 0, "world_size": 2, "rendezvous": f"tcp://127.0.0.1:{port}", "secret": SECRET}
    with started(json.dumps(facts), program=["-c", HELPERS + CROWDED]) as process, ExitStack() as left_open:
        for _ in range(90):
            left_open.enter_context(knock(port))
        process.stdin.write("\n")
        process.stdin.flush()
        heard(process, "opened")
        (outcome,) = meet(2, ranks=[1], rendezvous=facts["rendezvous"], secret=SECRET)
        assert not isinstance(outcome.error, Exception), outcome
        heard(process, "met")


def assert_documented(told, rank=0):
    assert told["kind"] == "Timeout" and told["rank"] == rank, told
    assert "rendezvous_timeout_s sets the limit" in told["text"] or "rendezvous_timeout_s was over" in told["text"]
    assert told["after_s"] < LIMIT_S + MORE_S, told


@pytest.mark.parametrize("there", ["before", "after"])
def test_rank_0_that_is_stopped_once_it_listens_is_named_within_the_limit(there):
    """Before another rank comes, or when it has arrived."""
    port = free_port()
    point = f"tcp://127.0.0.1:{port}"
    with rank_at(point, 0, size=3, rendezvous_timeout_s=PATIENCE_S) as first, ExitStack() as others:
        heard(first, "begin")
        knock(port).close()
        if there == "before":
            first.send_signal(signal.SIGSTOP)
        waiting = [others.enter_context(rank_at(point, rank, size=3)) for rank in (1, 2)[: 1 + (there == "before")]]
        for process in waiting:
            heard(process, "begin")
        if there == "after":
            first.send_signal(signal.SIGSTOP)  # at some moment of its asking
        for process in waiting:
            assert_documented(heard(process, "error"))


def test_a_network_that_is_cut_once_rank_0_listens_is_named_within_the_limit():
    """What is between them takes connections and bytes, and passes nothing on."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        point = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with rank_at(point, 1) as process:
            heard(process, "begin")
            assert_documented(heard(process, "error"))


def test_rank_0_that_is_killed_is_lost_at_once():
    port = free_port()
    point = f"tcp://127.0.0.1:{port}"
    patient = {"size": 3, "rendezvous_timeout_s": PATIENCE_S}
    with rank_at(point, 0, **patient) as first, rank_at(point, 1, **patient) as process:
        heard(process, "begin")
        wait_for_arrival(port, 1)
        first.kill()
        told = heard(process, "error")
    assert told["kind"] == "PeerLost" and told["rank"] == 0 and "ended while the ranks were meeting" in told["text"]
    assert told["after_s"] < PATIENCE_S / 2


@pytest.fixture(params=["libuv", "plain"])
def launcher(request):
    """A process that runs a store as torchrun's agent does; the variables of its workers."""
    with started("store", *["libuv"] * (request.param == "libuv"), start=programs.start) as process:
        port = json.loads(process.stdout.readline())["port"]
        environ = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "run",
        }
        yield process, environ


def worker(environ, rank, limit_s=LIMIT_S):
    options = {"rendezvous_timeout_s": limit_s}
    return started(json.dumps(options), json.dumps({**environ, "RANK": str(rank)}), start=programs.start)


@pytest.mark.parametrize("when", ["before", "while meeting"])
def test_a_launcher_that_is_stopped_is_named_within_the_limit(launcher, when):
    process, environ = launcher
    if when == "before":
        process.send_signal(signal.SIGSTOP)
    with worker(environ, 0) as rank:
        heard(rank, "begin")
        if when != "before":
            process.send_signal(signal.SIGSTOP)
        assert_documented(heard(rank, "error"), rank=None)


def interrupt(process):
    """Ctrl-C; returns how long the process took to end, in seconds."""
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert heard(process, "error")["kind"] == "KeyboardInterrupt"
    process.communicate(timeout=PATIENCE_S)
    return time.monotonic() - begin


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_a_rank_that_waits_at_a_port(rank):
    port = free_port()
    point = f"tcp://127.0.0.1:{port}"
    with rank_at(point, 0, rendezvous_timeout_s=PATIENCE_S) as process, ExitStack() as others:
        heard(process, "begin")
        knock(port).close()
        if rank == 1:
            process.send_signal(signal.SIGSTOP)
            process = others.enter_context(rank_at(point, 1, rendezvous_timeout_s=PATIENCE_S))
            heard(process, "begin")
            wait_for_a_connection(port)
        # Rank 0 stays a moment for those who may come, as after any failure.
        assert interrupt(process) < 15


def test_ctrl_c_ends_a_rank_that_waits_for_a_stopped_launcher(launcher):
    process, environ = launcher
    process.send_signal(signal.SIGSTOP)
    with worker(environ, 1, PATIENCE_S) as rank:
        heard(rank, "begin")
        wait_for_a_connection(int(environ["MASTER_PORT"]))
        assert interrupt(rank) < 15


def test_a_wait_for_a_store_looks_for_signals_all_the_time(monkeypatch):
    """Python may miss one that comes just before it waits, until that wait ends."""
    waits = []

    class Waits(queue.SimpleQueue):
        def get(self, block=True, timeout=None):
            if timeout is not None:
                waits.append(timeout)
            if timeout is not None and len(waits) < 3:
                raise queue.Empty
            return super().get(block, timeout)

    monkeypatch.setattr(boards.queue, "SimpleQueue", Waits)
    helper = boards._Helper()
    with closing(helper):
        assert helper.call(lambda: "an answer", time.monotonic() + PATIENCE_S) == "an answer"
    assert len(waits) == 3 and max(waits) <= boards.WAIT_S


def test_a_meeting_at_a_port_needs_no_framework():
    point = f"tcp://127.0.0.1:{free_port()}"
    patient = {"rendezvous_timeout_s": PATIENCE_S}
    with rank_at(point, 0, **patient) as first, rank_at(point, 1, **patient) as second:
        told = [heard(process, "begin") and heard(process, "met") for process in (first, second)]
    assert told[0] == told[1] and not told[0]["torch"]


BOTH_AT_ONE_PORT = """
import json, sys
from meeting import SilentDoor
import torch.distributed as dist
from penstock.launchers import discover
from penstock.rendezvous import exchange

rank, port, order = int(sys.argv[1]), sys.argv[2], sys.argv[3]
def theirs():
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
def ours():
    environ = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    door = SilentDoor(lambda _: ("127.0.0.1", rank))
    return exchange(discover(environ), door, version="1.0", lanes=1), door.table
if order == "theirs first":
    theirs(); found = ours()
else:
    found = ours(); theirs()
dist.barrier()
print(json.dumps([found[0].job_id.hex(), found[1]]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_torch_distributed_may_use_the_same_address(order):
    port = free_port()
    ranks = [
        programs.start(
            "-c", HELPERS + BOTH_AT_ONE_PORT, rank, port, order, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[0][0] == ends[1][0]


def test_a_stranger_makes_up_no_keys():
    board = tcp_board.HostedBoard(MeetingPoint("tcp", "127.0.0.1", 0, found_in="this test"), 12)
    try:
        board.guard("job", lambda key, value: False)
        port = board.port
        stranger = tcp_board.RemoteBoard(MeetingPoint("tcp", "127.0.0.1", port, found_in="this test"), 1, 5.0)
        stranger.deadline = time.monotonic() + 5.0
        made_up = ["arrival/01", "arrival/0011", "arrival/\u0661", "done/1\n", "address/12", "arrival/-1", "job", ""]
        for stage in [*made_up, "arrival/1", "address/11", "trouble"]:
            stranger.set(f"job/{stage}", b"something")
        stranger.close()
        assert {stage for stage in made_up if board.get(f"job/{stage}") is not None} == set()
        assert all(board.get(f"job/{stage}") for stage in ("arrival/1", "address/11", "trouble"))
    finally:
        board.close()


def test_rank_0_waits_for_its_own_name(monkeypatch):
    """That of a pod is not known at once; one that never is, is named when the limit is over."""
    known, asked = socket.getaddrinfo, []

    def late(host, *arguments, **options):
        asked.append(host)
        if host == "pod-0.job" and len(asked) > 3:
            return known("127.0.0.1", *arguments, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", late)
    point = MeetingPoint("tcp", "pod-0.job", 0, found_in="this test")
    tcp_board.HostedBoard(point, 2, time.monotonic() + PATIENCE_S).close()
    assert asked == ["pod-0.job"] * 4
    nowhere = MeetingPoint("tcp", "nowhere.job", 0, found_in="this test")
    for limit_s in (-1.0, 0.1):
        with pytest.raises(ConfigError, match=r"cannot resolve 'nowhere.job' of tcp://nowhere.job:0 \(this test\)"):
            tcp_board.HostedBoard(nowhere, 2, time.monotonic() + limit_s)

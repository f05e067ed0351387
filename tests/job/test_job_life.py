"""The job from init to every way a process can end, each in a real process with a stand-in for the native engine."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import fake_engine
import programs
import pytest
from meeting import free_port

import penstock as ps
from penstock import attached, config, job

HERE = Path(__file__).parent
PREAMBLE = "import sys, pathlib, fake_engine, penstock as ps; fake_engine.install(pathlib.Path(sys.argv[1]))\n"
LIMIT_S = 120


@pytest.fixture
def engine(monkeypatch):
    """The stand-in in this process, no launcher's variables, and no job left behind."""
    monkeypatch.setattr(config, "current_environment", dict)
    monkeypatch.setitem(sys.modules, "penstock._native", None)
    monkeypatch.setattr(job._process, "was_shut_down", False)  # by a test of another file
    yield fake_engine.install()
    ps.shutdown()


def start(program, calls, *, environ=None, file=None):
    """Run a program; each call of its engine is appended to `calls`."""
    if file is not None:
        file.write_text(PREAMBLE + program)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PENSTOCK_", "SLURM_", "PMI"))}
    paths = os.pathsep.join([str(HERE), *(path for path in sys.path if path)])
    return subprocess.Popen(
        [sys.executable, str(file), str(calls)]
        if file is not None
        else [sys.executable, "-c", PREAMBLE + program, str(calls)],
        env={**clean, "PYTHONPATH": paths, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process):
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, out, err


def calls_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_before_init_and_after_shutdown_say_what_to_do(engine):
    for call in (ps.rank, ps.world_size, ps.report):
        with pytest.raises(ps.ConfigError, match=f"{call.__name__} was called before"):
            call()
    ps.shutdown()  # nothing to shut down is nothing wrong
    ps.init()
    assert (ps.rank(), ps.world_size()) == (0, 1)
    late = {
        "ranks": [],
        "judged_steps": 0,
        "until_step": None,
        "why": "a job of one process, in which nobody waits for others",
    }
    chosen = {"groups": [], "groups_reason": "none asked for", "line_rate_source": "assumed", "late": late}
    assert ps.report() == {"rank": 0, "size": 1, "lossy": {}, "asynchronous": {}, "local_updates": [], **chosen}
    ps.shutdown()
    ps.shutdown()
    with pytest.raises(ps.ConfigError, match=r"after penstock\.shutdown"):
        ps.rank()
    ps.init()
    assert ps.rank() == 0


def test_a_job_that_begins_and_ends_while_an_earlier_loss_is_handled_ends_in_order(engine):
    try:
        raise ps.PeerLost("rank 1 is lost", rank=1)
    except ps.PeerLost:
        ps.init()
        running = job.current()
        ps.shutdown()
    assert running.engine.calls == [["connect"], ["shutdown"]]


def test_an_exception_of_the_job_that_is_handled_at_its_end_counts(engine):
    try:
        raise ps.PeerLost("rank 1 is lost", rank=1)
    except ps.PeerLost:
        ps.init()
        running = job.current()
        try:
            raise ValueError("bad batch")
        except ValueError:
            ps.shutdown()
    assert ["abort", "ValueError: bad batch"] in running.engine.calls


@pytest.mark.parametrize(("name", "value"), [("ELASTIC", "1"), ("JOIN", "127.0.0.1:5")])
def test_what_groups_of_torch_cannot_be_is_refused(engine, monkeypatch, name, value):
    given = {f"PENSTOCK_{name}": value, "PENSTOCK_RENDEZVOUS_TIMEOUT_S": "0.3"}
    monkeypatch.setattr(config, "current_environment", lambda: given)
    with pytest.raises(ps.ConfigError, match=f"option {name.lower()} is for programs that call penstock.init"):
        job.init_at_store(None, 1, 2)


def test_a_single_process_uses_no_network(engine):
    ps.init()
    running = job.current()
    assert running.engine.arguments["bind_host"] == "127.0.0.1"
    assert running.engine.table == [("127.0.0.1", running.engine.port)]
    assert len(running.job_id) == 16 and len(running.engine.arguments["secret"]) == 32


def test_init_again_is_nothing_with_the_same_and_an_error_with_other_options(engine):
    ps.init(slice_bytes=4096, secret="correct horse battery staple")
    first = job.current()
    ps.init()
    ps.init(slice_bytes=4096, secret="correct horse battery staple")
    assert job.current() is first
    with pytest.raises(ps.ConfigError, match="slice_bytes=8192, not 4096"):
        ps.init(slice_bytes=8192)
    with pytest.raises(ps.ConfigError) as caught:
        ps.init(secret="another secret of good length")
    assert "option secret" in str(caught.value) and "good length" not in str(caught.value)
    with pytest.raises(ps.ConfigError, match="did you mean"):
        ps.init(slice_byte=1)


def test_the_log_line_says_who_where_and_by_whose_decision(engine, caplog):
    with caplog.at_level(logging.INFO, logger="penstock"):
        ps.init(lanes=3, port=0)
    (record,) = caplog.records
    text = record.getMessage()
    assert "rank 0 of 1 (default)" in text and "127.0.0.1:" in text and "lanes 3 (argument lanes)" in text
    assert "slice_bytes auto (default)" in text


def test_a_fixed_range_of_ports_takes_the_next_free_one(engine):
    first = free_port()
    ps.init(port=f"{first}-{min(first + 40, 65535)}")
    import socket

    taken = job.current().engine.port
    assert first <= taken <= first + 40
    ps.shutdown()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        busy = other.getsockname()[1]
        with pytest.raises(ps.ConfigError, match=f"cannot listen on 127.0.0.1, port {busy}"):
            ps.init(port=busy)


def test_hooks_are_removed_by_shutdown(engine):
    before = (sys.excepthook, sys.exit)
    ps.init()
    assert (sys.excepthook, sys.exit) != before
    ps.shutdown()
    assert (sys.excepthook, sys.exit) == before


def attach_only(monkeypatch, finish_all):
    front_end = attached.Attached()
    front_end.finish = lambda limit_s: finish_all()
    monkeypatch.setattr(attached, "_attached", [front_end])
    return front_end


def test_shutdown_finishes_pending_updates_first(engine, monkeypatch):
    order = []
    front_end = attach_only(monkeypatch, finish_all=lambda: order.append("finish_all"))
    front_end.let_go = lambda engine: order.append(engine.calls[-1][0])
    ps.init()
    running = job.current().engine
    ps.shutdown()
    assert (
        order == ["finish_all", "shutdown"]
        and ["shutdown"] in running.calls
        and ["abort"] not in [c[:1] for c in running.calls]
    )


def test_shutdown_on_the_way_of_an_exception_is_an_abort(engine):
    ps.init()
    running = job.current().engine
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError("in step 3")
        finally:
            ps.shutdown()
    assert running.calls[-2:] == [["abort", "ZeroDivisionError: in step 3"], ["shutdown"]]


def test_a_failed_update_at_shutdown_is_raised_and_told(engine, monkeypatch):
    def finish_all():
        raise ps.PeerLost("rank 1 was lost", rank=1)

    attach_only(monkeypatch, finish_all=finish_all)
    ps.init()
    running = job.current().engine
    with pytest.raises(ps.PeerLost):
        ps.shutdown()
    assert running.calls[-2:] == [["abort", "PeerLost: rank 1 was lost"], ["shutdown"]]
    monkeypatch.setattr(attached, "_attached", [])
    ps.init()  # the job is over, and the next one may begin
    assert job.current().engine is not running


def test_init_from_two_threads_makes_one_job(engine):
    threads = [threading.Thread(target=ps.init) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert job.current().engine.calls == [["connect"]]


ENDINGS = {  # the program's last lines, its status, and its last word to the engine
    "the last line": ("", 0, ["shutdown"]),
    "shutdown and the last line": ("ps.shutdown()", 0, ["shutdown"]),
    "an uncaught exception": ("raise ValueError('bad\\nbatch')", 1, ["abort", "ValueError: bad batch"]),
    "sys.exit with a code": ("sys.exit(3)", 3, ["shutdown_by_status", "sys.exit in HERE"]),
    "sys.exit with a text": ("sys.exit('no data')", 1, ["shutdown_by_status", "no data"]),
    "sys.exit in a handler": (
        "try:\n    raise ValueError('bad batch')\nexcept ValueError:\n    sys.exit(11)",
        11,
        ["shutdown_by_status", "ValueError: bad batch"],
    ),
    "sys.exit in a function": (
        "def f():\n    with open('/dev/null'):\n        sys.exit(4)\nf()",
        4,
        ["shutdown_by_status", "sys.exit in HERE"],
    ),
    "SystemExit raised": (
        "raise SystemExit('no data')",
        1,
        ["shutdown_by_status", "the program ended without penstock.shutdown() in HERE"],
    ),
    "SystemExit raised in order": (
        "def main(): return 0\nraise SystemExit(main())",
        0,
        ["shutdown_by_status", "the program ended without penstock.shutdown() in HERE"],
    ),
    "sys.exit(0)": ("sys.exit(0)", 0, ["shutdown_by_status", "sys.exit in HERE"]),
    "Ctrl-C": ("raise KeyboardInterrupt", None, ["abort", "KeyboardInterrupt"]),
    "a caught sys.exit and the last line": (
        "try:\n    sys.exit(2)\nexcept SystemExit:\n    pass\nprint('on')",
        0,
        ["shutdown"],
    ),
    "a caught exception and the last line": ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", 0, ["shutdown"]),
    "an exit code from a thread": (
        "import threading\nt = threading.Thread(target=sys.exit, args=(5,))\nt.start()\nt.join()",
        0,
        ["shutdown"],
    ),
    "an exception in a thread of the program's own": (
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        0,
        ["shutdown"],
    ),
    "an exception in a thread that takes part": (
        "import threading\ndef f():\n    ps.rank()\n    raise ValueError('bad batch')\n"
        "t = threading.Thread(target=f, name='trainer')\nt.start()\nt.join()",
        0,
        ["abort", "ValueError: bad batch (in thread trainer)"],
    ),
    "an excepthook of the program's own": (
        "sys.excepthook = lambda *a: print('mine')\nraise ValueError('bad batch')",
        1,
        ["abort", "ValueError: bad batch"],
    ),
    "an excepthook that exits": (
        "sys.excepthook = lambda *a: sys.exit(0)\nraise ValueError('bad batch')",
        0,
        ["abort", "ValueError: bad batch"],
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("way", ["file", pytest.param("-c", marks=pytest.mark.long)])
def test_goodbye_is_said_only_where_the_program_is_known_to_have_ended_well(ending, way, tmp_path):
    program, code, last = ENDINGS[ending]
    calls = tmp_path / "calls"
    file = tmp_path / "train.py" if way == "file" else None
    returned, _, err = end(start("ps.init()\n" + program + "\n", calls, file=file))
    called = calls_of(calls)
    assert called[0] == ["connect"], err
    assert returned == code if code is not None else returned != 0
    if last[0] == "abort":
        assert called[1:] in ([last, ["shutdown"]], [last, last, ["shutdown"]], [last, last, last, ["shutdown"]]), err
        return
    (word, *reason) = called[-1]
    assert len(called) == 2 and word == last[0], err
    if reason and "HERE" in last[1]:
        expected = last[1].replace("HERE", str(file) if file is not None else "<string>")
        assert reason[0].startswith(f"{expected}, line "), reason
    else:
        assert reason == last[1:]


def test_an_abort_that_a_signal_handler_interrupts_is_made_whole_at_the_end(tmp_path):
    """As where DataLoader's handler raises once for every worker that was killed."""
    program = """
def abort(self, reason, first=[]):
    if not first:
        first.append(1)
        raise RuntimeError("DataLoader worker is killed by signal")
    self._called("abort", reason)
fake_engine.FakeEngine.abort = abort
ps.init()
raise ValueError("bad batch")
"""
    returned, _, err = end(start(program, tmp_path / "calls"))
    assert returned == 1 and "in sys.excepthook" in err
    assert ["abort", "ValueError: bad batch"] in calls_of(tmp_path / "calls")


def test_an_earlier_excepthook_still_runs(tmp_path):
    program = "sys.excepthook = lambda *a: print('mine')\nps.init()\nraise ValueError('x')\n"
    _, out, _ = end(start(program, tmp_path / "calls"))
    assert "mine" in out and ["abort", "ValueError: x"] in calls_of(tmp_path / "calls")


WORKERS = {  # a worker's last line, its status, and what it says before the end; HERE is the file
    "its last line": ("pass", 0, None),
    "an error": ("raise ValueError('in a worker')", 1, "ValueError: in a worker"),
    "sys.exit with a code": ("sys.exit(81)", 81, r"sys.exit in HERE, line \d+ \(exit status 81\)"),
}


@pytest.mark.parametrize("ending", WORKERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing_end_in_order_too(method, ending, tmp_path):
    """Their processes skip atexit (fork) or the exception hook (both)."""
    last, code, reason = WORKERS[ending]
    file = tmp_path / "train.py"
    program = f"""
import multiprocessing
def work(path):
    fake_engine.install(pathlib.Path(path))
    ps.init()
    {last}
if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=work, args=(sys.argv[1],))
    process.start()
    process.join(60)
    print(process.exitcode)
"""
    _, out, err = end(start(program, tmp_path / "calls", file=file))
    called = calls_of(tmp_path / "calls")
    assert out.strip() == str(code), err
    assert called[0] == ["connect"] and called[-1] == ["shutdown"]
    said = called[1:-1]
    assert bool(said) == (reason is not None), called
    for word, given in said:
        assert word == "abort" and re.fullmatch(reason.replace("HERE", re.escape(str(file))), given), called


FORK = """
import os
ps.init()
child = os.fork()
if child == 0:
    for call in (ps.init, ps.rank, ps.world_size, ps.report, ps.shutdown):
        try:
            call()
        except ps.ConfigError as error:
            assert "forked from rank 0" in str(error), error
        else:
            os._exit(9)
    {ending}
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ps.rank())
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(7)", 7), ("os._exit(0)", 0), ("raise ValueError('child')", 1)])
def test_a_forked_child_gets_a_clear_error_and_never_ends_the_parents_job(ending, code, tmp_path):
    returned, out, err = end(start(FORK.format(ending=ending), tmp_path / "calls"))
    assert returned == 0 and out.split() == [str(code), "0"], err
    # The child lets go of its descriptors; the one shutdown is the parent's.
    assert calls_of(tmp_path / "calls") == [["connect"], ["after_fork_in_child"], ["shutdown"]]


def test_a_fork_without_a_job_may_start_its_own(tmp_path):
    program = """
import os
ps.init(); ps.shutdown()
child = os.fork()
if child == 0:
    ps.init()
    os._exit(ps.rank() + 5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    _, out, err = end(start(program, tmp_path / "calls"))
    assert out.strip() == "5", err


MEET = """
ps.init(line_rate_mbit="off")  # this engine moves no data
from penstock import job
import json
line = json.dumps([ps.rank(), ps.world_size(), job.current().job_id.hex(), job.current().engine.table])
sys.stdout.write(line + "\\n")  # at once: torchrun's workers share a pipe and have no buffers
"""


@pytest.mark.parametrize("kind", ["file", "tcp", "torchrun"])
def test_real_processes_meet_and_every_listener_is_in_the_table(kind, tmp_path):
    size = 3
    port = free_port()
    shared = {
        "file": {"PENSTOCK_RENDEZVOUS": f"file://{tmp_path / 'meet'}"},
        "tcp": {"PENSTOCK_RENDEZVOUS": f"tcp://127.0.0.1:{port}"},
        "torchrun": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "r"},
    }[kind]
    names = ("RANK", "WORLD_SIZE") if kind == "torchrun" else ("PENSTOCK_RANK", "PENSTOCK_WORLD_SIZE")
    processes = [
        start(MEET, tmp_path / f"calls{rank}", environ={**shared, names[0]: str(rank), names[1]: str(size)})
        for rank in range(size)
    ]
    results = []
    for process in processes:
        code, out, err = end(process)
        assert code == 0, err
        results.append(json.loads(out))
    assert [result[:2] for result in results] == [[rank, size] for rank in range(size)]
    assert len({json.dumps(result[2:]) for result in results}) == 1
    table = results[0][3]
    assert all(host == "127.0.0.1" for host, _ in table) and len({port for _, port in table}) == size


def test_torchrun_itself(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.path[:0] = [{str(HERE)!r}]\n" + PREAMBLE + MEET)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = programs.run(
        *launcher,
        "--rdzv-endpoint",
        "127.0.0.1:0",
        script,
        tmp_path / "calls",
        env={**clean, "PYTHONPATH": paths},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    results = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert [result[:2] for result in results] == [[0, 2], [1, 2]]
    assert results[0][2:] == results[1][2:]

"""What `programs.start` runs is as the process that an interpreter of its own would be."""

import os
import select
import signal
import subprocess
from pathlib import Path

import programs
import pytest

HERE = Path(__file__).parent
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

SAYS = "import os, sys; print(sys.argv, __name__, os.getcwd(), os.environ.get('OURS'), os.getsid(0) == os.getpid())\n"


@pytest.fixture(params=["file", "-c", "-m"])
def arguments(request, tmp_path):
    (tmp_path / "beside.py").write_text("word = 'found'\n")
    text = SAYS + "import beside; print(beside.word, sys.stdin.read(), file=sys.stderr)\n"
    (tmp_path / "says.py").write_text(text)
    return {"file": [tmp_path / "says.py"], "-c": ["-c", text], "-m": ["-m", "says"]}[request.param]


@pytest.mark.parametrize("session", [False, True])
def test_arguments_streams_directory_environment_and_session_are_its_own(arguments, session, tmp_path):
    said = []
    for start in (programs.start_afresh, programs.start):
        program = start(
            *arguments,
            "more",
            env={**os.environ, "OURS": "yes"},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=session,
        )
        program.stdin.write("typed")
        said.append((*program.communicate(timeout=programs.START_LIMIT_S), program.wait()))
    fresh, ours = said
    assert ours[1:] == fresh[1:] == ("found typed\n", 0)
    # A module's first argument is where it was found.
    assert ours[0].replace("says.py", "says").endswith(f"'more'] __main__ {tmp_path} yes {session}\n"), said
    assert ours[0].split("'more'")[1] == fresh[0].split("'more'")[1]


@pytest.mark.parametrize(
    ("ending", "status", "last"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt"),
        ("sys.excepthook = lambda *_: print('mine', file=sys.stderr); 1 / 0", 1, "mine"),
    ],
)
def test_it_ends_as_a_process_does(ending, status, last):
    text = f"import atexit, os, sys\natexit.register(lambda: print('at exit'))\n{ending}"
    ended = programs.run("-c", text, timeout=programs.START_LIMIT_S)
    assert ended.returncode == status
    assert ended.stdout == ("at exit\n" if status != -9 else "")
    assert [*ended.stderr.splitlines(), ""][-2 if last else 0] == last, ended.stderr


def test_its_streams_are_those_that_it_was_given():
    """Not the server's, which may be files: a pipe cannot tell where in it one is."""
    text = "import sys\nfor stream in (sys.stdout, sys.stderr): stream.reconfigure(errors='backslashreplace')\n"
    ended = programs.run("-u", "-c", text + "print(sys.stdout.write_through)", timeout=programs.START_LIMIT_S)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


@pytest.mark.parametrize("ending", ["sys.exit(7)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 11)", "1 / 0"])
def test_what_launchers_start_in_it_ends_as_a_process_does(ending, tmp_path):
    (tmp_path / "worker.py").write_text(f"import os, sys\nprint('torch' in sys.modules, flush=True)\n{ending}")
    launcher = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    ended = programs.run("-c", launcher, tmp_path / "worker.py", timeout=programs.START_LIMIT_S)
    alone = programs.start_afresh(tmp_path / "worker.py", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert (ended.stdout, alone.communicate()[0]) == ("True\n", "False\n")
    assert ended.returncode == alone.returncode % 256


def test_what_a_launcher_lets_it_inherit_has_its_number(tmp_path):
    worker = "import os, sys\nfor number in map(int, sys.argv[1:]): os.write(number, b'%d' % number)\n"
    (tmp_path / "worker.py").write_text(worker + "print('torch' in sys.modules)")
    launcher = (
        "import fcntl, os, subprocess, sys\npipes = [os.pipe() for _ in range(2)]\n"
        "given = [fcntl.fcntl(writes, fcntl.F_DUPFD, least) for (_, writes), least in zip(pipes, (3, 60))]\n"
        "subprocess.run([sys.executable, sys.argv[1], *map(str, given)], pass_fds=given)\n"
        "print([os.read(reads, 9).decode() == str(number) for (reads, _), number in zip(pipes, given)])\n"
    )
    ended = programs.run("-c", launcher, tmp_path / "worker.py", timeout=programs.START_LIMIT_S)
    assert ended.stdout == "True\n[True, True]\n", ended.stderr


def test_a_signal_to_what_a_launcher_starts_reaches_the_worker(tmp_path):
    worker = (
        "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(3))\n"
        "print('here', flush=True)\nwhile True: time.sleep(0.1)"
    )
    (tmp_path / "worker.py").write_text(worker)
    launcher = (
        "import subprocess, sys\nworker = subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\nworker.terminate()\nsys.exit(worker.wait())"
    )
    ended = programs.run("-c", launcher, tmp_path / "worker.py", timeout=programs.START_LIMIT_S)
    assert ended.returncode == 3, ended.stderr


def test_signals_reach_it_and_nobody_once_it_has_ended():
    program = programs.start("-c", "print('here', flush=True); input()", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline() == "here\n" and program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.01)
    program.send_signal(signal.SIGTERM)
    assert program.wait(programs.START_LIMIT_S) == program.poll() == -signal.SIGTERM
    program.kill()
    program.communicate()


ASKS_TOO = """
import programs, subprocess
says = "import os; print(os.getppid(), os.getpid(), flush=True); input()"
started = programs.start("-c", says, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(started.stdout.readline(), end="", flush=True)
input()
"""


def test_others_ask_the_same_server_which_ends_what_they_leave_behind():
    mine = programs.start("-c", "import os; print(os.getppid(), flush=True); input()", **PIPES)
    other = programs.start_afresh("-c", ASKS_TOO, env={**os.environ, "PYTHONPATH": str(HERE)}, **PIPES)
    try:
        server, left_behind = other.stdout.readline().split()
        assert mine.stdout.readline().strip() == server
        ended = os.pidfd_open(int(left_behind))
        other.kill()
        assert select.select([ended], [], [], programs.START_LIMIT_S)[0] and mine.poll() is None
        os.close(ended)
        mine.stdin.write("\n")
        mine.communicate()
        assert mine.wait(programs.START_LIMIT_S) == 0
    finally:
        for program in (mine, other):
            program.kill()
            program.communicate()


def test_each_finds_pytorch_imported_in_one_thread_and_leaves_nothing_to_the_next():
    text = "import os, sys\nprint('torch' in sys.modules, len(os.listdir('/proc/self/task')), hasattr(os, 'mark'))\n"
    for _ in range(2):
        ended = programs.run("-c", text + "os.mark = 1", timeout=programs.START_LIMIT_S)
        assert ended.stdout == "True 1 False\n", ended

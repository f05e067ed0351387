"""The environments of the peers that need a Python of their own, under ``.lab/NAME/``.

    python -m lab.peers install [NAME ...]     install what is not there yet (`make lab-peers` does)
    python -m lab.peers list [--json]          what is there, and what is missing and why

Every package is pinned in ``lab/requirements/NAME.lock``; none is resolved. A peer that cannot be installed is recorded
as missing with its reason, the others are installed all the same, and the status is 1. What is installed with this
recipe already is left alone.

    .lab/NAME/venv/          the environment
    .lab/NAME/installed      the recipe that it was made with
    .lab/NAME/missing.txt    or why it is missing
    .lab/NAME/install.log    what the installers said, all of it

``MAX_JOBS`` is the number of compilers at once; without it half as many as there are cores.

It omits torch's own DDP, which runs in the project's environment.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["PEERS", "Missing", "Peer", "State", "install", "python_of", "state"]

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
# Where environments are kept, unless a caller says otherwise.
HOME = ROOT / ".lab"
# Downloading torch and building Horovod on one slow core take most of it.
STEP_S_MAX = 3600.0
# How often a line says that a step still runs, where no terminal shows it live.
NOTE_S = 20.0
END_S = 5.0
PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """A peer is not there; the text says why and what to do."""


@dataclass(frozen=True)
class Peer:
    """An environment.

    Attributes:
        name: As in `lab.systems.System.environment`.
        title: What it is.
        requirements: The file of pinned packages.
        check: A Python program that ends well if the peer works.
        from_source: Packages that are built here, after the others, which they need for it.
        programs: What the build needs besides, and where it comes from.
        environ: Variables of the build.
        pythons: Versions of Python that the pinned packages have, the preferred one first.
        on_project: Whether it has the project's own packages, too: its Python and torch are the project's then.
    """

    name: str
    title: str
    requirements: Path
    check: str
    from_source: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    pythons: tuple[str, ...] = ("3.11", "3.10")
    on_project: bool = False

    def recipe(self) -> str:
        """What an environment was made with, as a digest."""
        parts: tuple[Any, ...] = (
            *(self.requirements.read_text(encoding="utf-8"), self.check, self.from_source, self.environ),
            *([sys.prefix] if self.on_project else []),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="horovod",
            title="Horovod 0.28.1 on gloo, torch 2.0.1",
            requirements=REQUIREMENTS / "horovod.lock",
            check="import horovod.torch as hvd; assert hvd.gloo_built(), 'built without gloo'",
            from_source=("horovod",),
            programs=(("c++", "install a C++ compiler (apt-get install g++)"), ("make", "apt-get install make")),
            environ=(
                ("HOROVOD_WITH_GLOO", "1"),
                ("HOROVOD_WITHOUT_MPI", "1"),
                ("HOROVOD_WITH_PYTORCH", "1"),
                ("HOROVOD_WITHOUT_TENSORFLOW", "1"),
                ("HOROVOD_WITHOUT_MXNET", "1"),
            ),
        ),
        Peer(
            name="mxnet",
            title="MXNet 1.9.1, KVStore dist_sync and P3",
            requirements=REQUIREMENTS / "mxnet.lock",
            check="import mxnet; assert mxnet.runtime.Features().is_enabled('DIST_KVSTORE'), 'no distributed store'",
        ),
        Peer(
            name="mpich",
            title="MPICH 5.0.2 by mpi4py 4.1.2, on UCX",
            requirements=REQUIREMENTS / "mpich.lock",
            check="import numpy; from mpi4py import MPI; assert 'MPICH' in MPI.Get_library_version(), 'another MPI'",
        ),
        Peer(
            name="torchft",
            title="torchft 0.2.0, DiLoCo on gloo, the project's torch",
            requirements=REQUIREMENTS / "torchft.lock",
            check="from torchft.local_sgd import DiLoCo; from torchft import Manager, ProcessGroupGloo",
            pythons=(f"{sys.version_info[0]}.{sys.version_info[1]}",),
            on_project=True,
        ),
    )
}


@dataclass(frozen=True)
class State:
    """What is there of a peer.

    Attributes:
        state: ``installed``, ``missing`` (an attempt failed) or ``absent`` (never tried, or with another recipe).
        reason: Why, unless it is installed.
        python: Its interpreter if it is installed.
    """

    state: str
    reason: str = ""
    python: str = ""


def state(peer: Peer, home: Path = HOME) -> State:
    """What is there of a peer, by what the last attempt left; nothing is run."""
    folder = home / peer.name
    python = folder / "venv" / "bin" / "python"
    stamp, missing = folder / "installed", folder / "missing.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8").strip() == peer.recipe() and python.exists():
        return State("installed", python=str(python))
    if missing.exists():
        return State("missing", missing.read_text(encoding="utf-8").strip())
    outdated = "its pinned requirements have changed" if stamp.exists() else "not installed yet"
    return State("absent", f"{outdated}: run `make lab-peers`")


def python_of(environment: str, home: Path = HOME) -> str:
    """The interpreter that runs the systems of an environment, ``project`` included.

    Raises:
        Missing: The peer is not installed; with the reason.
    """
    if environment == "project":
        return sys.executable
    found = state(PEERS[environment], home)
    if found.state != "installed":
        raise Missing(f"{PEERS[environment].title}: {found.reason}")
    return found.python


# Installing


def find_python(versions: Iterable[str]) -> str:
    """An interpreter of the first of these versions that this machine has and that can make environments.

    Raises:
        Missing: There is none.
    """
    wanted = tuple(versions)
    for version in wanted:
        places = [sys.executable, shutil.which(f"python{version}"), f"/usr/bin/python{version}"]
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        places += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
        for place in places:
            if place is not None and _is_python(place, version):
                return place
    raise Missing(f"needs Python {' or '.join(wanted)} with venv, and none was found on the path or under pyenv")


def _is_python(path: str, version: str) -> bool:
    program = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


@dataclass
class _Installation:
    """One attempt."""

    peer: Peer
    folder: Path
    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def run(self) -> None:
        """Make the environment anew.

        Raises:
            Missing: It could not be made.
        """
        peer = self.peer
        for program, advice in peer.programs:
            if shutil.which(program) is None:
                raise Missing(f"the program {program!r} is missing: {advice}")
        base = find_python(peer.pythons)
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        pins = [line.strip() for line in peer.requirements.read_text(encoding="utf-8").splitlines()]
        pins = [pin for pin in pins if pin and not pin.startswith("#")]
        options = [] if pins else ["--without-pip"]  # nothing to install
        self.step("make the environment", [base, "-m", "venv", *options, str(self.folder / "venv")])
        if peer.on_project:
            self.add_project()
        built = [pin for pin in pins if pin.split("==")[0] in peer.from_source]
        ready = [pin for pin in pins if pin not in built]
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-input"]
        if ready:
            self.step("install the pinned packages", [*pip, *ready])
        for pin in built:
            self.step(f"build {pin}", [*pip, "--verbose", "--no-build-isolation", "--no-binary", ":all:", pin])
        self.step("check that it works", [str(self.python), "-c", peer.check])

    def add_project(self) -> None:
        """Let the environment see the packages of this one, behind its own."""
        for folder in (self.folder / "venv" / "lib").glob("python*/site-packages"):
            lines = (f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
            (folder / "project.pth").write_text("".join(lines), encoding="utf-8")

    def step(self, what: str, command: Sequence[str]) -> None:
        """Run an installer, with everything that it says in the log, showing that it goes on."""
        log = self.folder / "install.log"
        # Tools that an environment brings, as cmake, are found before the machine's.
        path = os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")])
        # Compilers need up to a gigabyte each, and others a part of the machine.
        jobs = os.environ.get("MAX_JOBS", str(max(1, len(os.sched_getaffinity(0)) // 2)))
        own = {"MAKEFLAGS": f"-j{jobs}", "PATH": path, "PYTHONNOUSERSITE": "1"}
        environ = {**os.environ, **dict(self.peer.environ), **own}
        environ.pop("PYTHONPATH", None)
        with log.open("ab") as output:
            output.write(f"== {what}: {' '.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                preexec_fn=_lead_a_group,
            )
            try:
                self._watch(process, what, log)
            finally:
                _end_group(process)
        if process.returncode != 0:
            raise Missing(f"could not {what}: {_last_words(log)} (all of it: {_shown(log)})")

    def _watch(self, process: subprocess.Popen[bytes], what: str, log: Path) -> None:
        began, noted, live = time.monotonic(), time.monotonic(), sys.stderr.isatty()
        self.tell(f"{self.peer.name}: {what} ...")
        while process.poll() is None:
            now = time.monotonic()
            if now - began > STEP_S_MAX:
                raise Missing(f"could not {what}: not done after {STEP_S_MAX:.0f} s")
            if live:
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"\r\033[K{f'  {now - began:4.0f} s  {_last_words(log)}'[:width]}\r")
                sys.stderr.flush()
            elif now - noted > NOTE_S:
                noted = now
                self.tell(f"{self.peer.name}: {what}, {now - began:.0f} s so far: {_last_words(log)[:100]}")
            time.sleep(0.2)
        if live:
            sys.stderr.write("\033[K")


def _lead_a_group() -> None:
    """In a new process: a group of its own, to end it with all that it started; the kernel ends it with its parent."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_words(log: Path) -> str:
    """The last line that says something; an installer's error if there is one near the end."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").replace("\r", "\n").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines[-40:] if line.lower().startswith(("error", "fatal", "assertionerror"))]
    return (errors or lines or [""])[-1]


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def install(peer: Peer, home: Path = HOME, tell: Callable[[str], None] | None = None) -> State:
    """Make a peer's environment unless it is there, and record what became of it.

    Args:
        peer: Which.
        home: The folder of all environments.
        tell: Is given a line per step.

    Returns:
        ``installed``, or ``missing`` with the reason. It raises for nothing that may happen on another machine.
    """
    told = tell or _note
    before = state(peer, home)
    if before.state == "installed":
        told(f"{peer.name}: installed already")
        return before
    folder = home / peer.name
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("installed", "missing.txt", "install.log"):
        (folder / name).unlink(missing_ok=True)
    attempt = _Installation(peer, folder, told)
    try:
        attempt.run()
    except (Missing, OSError) as error:
        (folder / "missing.txt").write_text(f"{error}\n", encoding="utf-8")
        told(f"{peer.name}: MISSING: {error}")
    else:
        (folder / "installed").write_text(f"{peer.recipe()}\n", encoding="utf-8")
        told(f"{peer.name}: installed in {time.monotonic() - attempt.began:.0f} s")
    return state(peer, home)


# The command line


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _listing(home: Path) -> list[dict[str, Any]]:
    from lab.systems import LOCAL_SYSTEMS, SYSTEMS

    rows = []
    for peer in PEERS.values():
        found = state(peer, home)
        systems = [name for name, one in {**SYSTEMS, **LOCAL_SYSTEMS}.items() if one.environment == peer.name]
        rows.append({"name": peer.name, "title": peer.title, "systems": systems, **vars(found)})
    return rows


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # so that an installer is ended with all that it started


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its status."""
    parser = argparse.ArgumentParser(prog="python -m lab.peers", description="Environments of the peers")
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="install what is not there yet")
    installing.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; default: all")
    listing = commands.add_parser("list", help="what is there, and what is missing and why")
    listing.add_argument("--json", action="store_true", help="as one JSON object per line")
    args = parser.parse_args(arguments)
    if args.command == "list":
        for row in _listing(HOME):
            text = f"{row['name']:8}  {row['state']:9}  {row['title']}" + (row["reason"] and f"\n    {row['reason']}")
            sys.stdout.write((json.dumps(row) if args.json else text) + "\n")
        return 0
    unknown = sorted(set(args.names) - set(PEERS))
    if unknown:
        parser.error(f"no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    states = {name: install(PEERS[name]) for name in args.names or PEERS}
    missing = [name for name, found in states.items() if found.state != "installed"]
    _note(f"{len(states) - len(missing)} of {len(states)} peers installed")
    if missing:
        _note(f"missing: {', '.join(missing)}. The lab runs without them and says so; `list` shows the reasons")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

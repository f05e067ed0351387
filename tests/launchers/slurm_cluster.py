"""A Slurm cluster of emulated hosts: its controller and a node daemon per host, in the foreground, of one folder.

Everything that Slurm and MUNGE keep is in that folder, also what is in /etc and /var elsewhere: nothing of the
machine's own installation is read or written, and its services need not run. Daemons listen on Slurm's own ports, in
networks where there is nobody else. All of them end with the hosts, whatever becomes of the test.

It omits accounting, limits and control groups: tasks are followed by their parents' ids.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import real

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
}
READY_S = 90.0
POLL_S = 0.1
DISABLED_SINCE = (23, 2)
"""The first release that can do without control groups altogether. Earlier ones take version 1, and then use none."""

CONFIGURATION = """\
ClusterName=emulated
SlurmctldHost={first.name}({first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""


class SlurmCluster:
    """A cluster whose nodes are all idle.

    Attributes:
        hosts: Its nodes; commands are given on the first.
    """

    def __init__(self, hosts, folder, programs):
        self.hosts = hosts
        self._folder = folder
        self._programs = programs
        self._daemons = []

    def start(self, processors):
        """Start all daemons and wait until the nodes can be used."""
        self._configure(processors)
        self._start_munged()
        slurm = ["-D", "-f", self._folder / "slurm.conf"]
        self._daemon(self.hosts[0], "slurmctld", *slurm)
        for host in self.hosts:
            self._daemon(host, "slurmd", *slurm)
        self._await("all nodes are idle", lambda: self._states() == {host.name: "idle" for host in self.hosts})

    def told(self):
        """What the environment of Slurm's commands has besides."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def run(self, command, folder, **more):
        """Give a command on the first node, as ``["srun", "-N2", ...]``, and return what it has said."""
        command = [self._programs.get(command[0], command[0]), *command[1:]]
        return real.run_on([self.hosts[0]], [command], folder, **self.told(), **more)[0]

    def _configure(self, processors):
        nodes = (f"NodeName={host.name} NodeAddr={host.address} CPUs={processors}" for host in self.hosts)
        text = CONFIGURATION.format(folder=self._folder, first=self.hosts[0], nodes="\n".join(nodes))
        (self._folder / "slurm.conf").write_text(text, encoding="utf-8")
        version = subprocess.run([self._programs["slurmd"], "-V"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"(\d+)\.(\d+)", version)
        assert found, f"slurmd -V says {version!r}"
        without = (int(found[1]), int(found[2])) >= DISABLED_SINCE
        lines = ["CgroupPlugin=disabled"] if without else ["CgroupPlugin=cgroup/v1", f"CgroupMountpoint={self._folder}"]
        (self._folder / "cgroup.conf").write_text("\n".join([*lines, ""]), encoding="utf-8")
        (self._folder / "state").mkdir()
        for host in self.hosts:
            (self._folder / f"spool-{host.name}").mkdir()

    def _start_munged(self):
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={self._folder}/munge.{end}" for name, end in files.items()]
        # By its socket all hosts reach it. It would refuse a folder that it finds too open, as it does where /tmp is
        # unusual: this is one test's.
        self._daemon(self.hosts[0], "munged", "--foreground", "--force", *options)
        self._await("munged listens", (self._folder / "munge.socket").exists)

    def _daemon(self, host, program, *options):
        """Start it in the foreground; it ends with its host."""
        with (self._folder / f"{program}-{host.name}.said").open("wb") as said:
            process = host.start(
                [self._programs[program], *map(str, options)],
                env=real.environment(**self.told()),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        self._daemons.append((f"{program} on {host.name}", process))

    def _states(self):
        """By node its state, as far as the controller answers."""
        process = self.hosts[0].start(
            [self._programs["sinfo"], "--noheader", "--Node", "--format=%N %t"],
            env=real.environment(**self.told()),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            said = process.communicate(timeout=READY_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return {}
        return dict(line.split() for line in said.splitlines() if len(line.split()) == 2)

    def _await(self, what, true):
        deadline = time.monotonic() + READY_S
        while not true():
            gone = [name for name, process in self._daemons if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                why = f"{', '.join(gone)} ended" if gone else f"not within {READY_S:g} s"
                pytest.fail(f"Slurm: no point at which {what}: {why}\n{self._logs()}", pytrace=False)
            time.sleep(POLL_S)

    def _logs(self):
        """The last lines of all that daemons have written."""
        files = sorted([*self._folder.glob("*.said"), *self._folder.glob("*.log")])
        last = (file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:] for file in files)
        return "\n".join(f"== {file.name}\n" + "\n".join(lines) for file, lines in zip(files, last, strict=True))


@contextlib.contextmanager
def slurm(hosts=2, processors=4):
    """A running cluster; the test is skipped where a package is missing, or there can be no emulated hosts."""
    programs = {name: real.need(name, package) for name, package in PACKAGES.items()}
    with real.cluster(hosts) as cluster:
        # Short, for the path of a socket is; and one that all users may enter, as MUNGE wants it.
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        folder.chmod(0o755)
        made = SlurmCluster(cluster.hosts, folder, programs)
        try:
            made.start(processors)
            yield made
        finally:
            cluster.close()  # before the folder goes, in which daemons write
            shutil.rmtree(folder, ignore_errors=True)

"""Emulated clusters: hosts as network namespaces, links with rates, processes in them. Nothing outlives the program.

    with Cluster(4, 1000) as cluster:
        process = cluster.hosts[0].start(["iperf3", "-c", cluster.hosts[1].address])
        cluster.set_rate(3, 250)
        cluster.cut([3])

Hosts hang on a bridge that sits in a namespace of its own; those of several sites on one for each, and the bridges of
sites on that of the first. Two hosts are joined directly: measured without limits, that
moves 4% more, takes 9% less processor time per byte and answers 3 us sooner. Each direction of each link is a token
bucket. A process started on a host sees that host's network, its host name, and a hosts file with everybody's.

Not emulated: latency, a switch's backplane (the bridge is as fast as the machine), and processors, which all hosts
share. Congestion control and buffer sizes are the machine's. The machine's own network is never touched: no interface,
address, route or setting of it changes.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

INTERFACE = "eth0"
BRIDGE = "bridge"  # and the number of its site
APART = "apart"  # the bridge of hosts that are cut off
HOSTS_MAX = 250  # the addresses of one /24
NAMESPACES = Path("/run/netns")
# `ip netns exec` shows each file of /etc/netns/NAMESPACE/ to the process as the file of that name in /etc.
FILES = Path("/etc/netns")
END_S = 5.0
READY_S = 30.0  # a busy machine takes seconds
POLL_S = 0.01

# What a bucket holds, and so what passes at line speed after a pause: 1 ms of the rate, for timers that fire late on a
# busy machine, and always more than the 64 KB that the kernel hands down in one piece (a piece that waits when the rate
# falls must still fit, or it would wait forever). Measured on two busy cores: one TCP stream moves 0.95 of the rate
# from 50 to 1000 Mbit/s, where 1448/1514 = 0.956 is possible; what had passed above the rate was at no time more than
# 125 KB at 50 and 1000 Mbit/s, 700 KB at 5 Gbit/s.
BURST_BYTES_MIN = 128 << 10
BURST_S = 0.001
# What waits before it is dropped, as in a port of a switch. A single sender does not come near it, for TCP bounds what
# it leaves in its own host's bucket: a round trip over a full link takes 1 to 2 ms at 1 Gbit/s, 6 (bbr) to 22 ms
# (cubic) at 50 Mbit/s. Many senders to one do. 4 and 8 hosts, all to all at 100 and 250 Mbit/s for about 1.5 s, used
# 0.89 to 0.95 of the links with bbr and 0.72 to 0.89 with cubic. With 128 KB or 5 ms it is 0.59 to 0.72 (so much is
# sent again) and 0.92 to 0.95 (no acknowledgement waits behind a long queue); the values between please neither.
QUEUE_BYTES_MIN = 512 << 10
QUEUE_S = 0.050

GET_IPROUTE2 = "install iproute2 (apt-get install iproute2, dnf install iproute iproute-tc)"
GET_UTIL_LINUX = "install util-linux (apt-get install util-linux, dnf install util-linux)"
PROGRAMS = {"ip": GET_IPROUTE2, "tc": GET_IPROUTE2, "unshare": GET_UTIL_LINUX, "setpriv": GET_UTIL_LINUX}
ADVICE = {
    "Operation not permitted": "root alone does not suffice here: network namespaces need CAP_SYS_ADMIN and "
    "CAP_NET_ADMIN (in a container: run it with --privileged)",
    "qdisc kind is unknown": "the kernel lacks token buckets (CONFIG_NET_SCH_TBF): try `modprobe sch_tbf`",
    "Unknown device type": "the kernel lacks veth or bridges (CONFIG_VETH, CONFIG_BRIDGE): try `modprobe veth bridge`",
    "Operation not supported": "the kernel lacks namespaces, veth or bridges (CONFIG_NET_NS, CONFIG_VETH, "
    "CONFIG_BRIDGE): try `modprobe veth bridge`",
    "unshare failed": "the kernel lacks namespaces (CONFIG_NET_NS, CONFIG_UTS_NS)",
}


class Unavailable(Exception):
    """This machine, or this user, cannot have emulated clusters; the text says what is missing and what to do."""


def need(program: str, how: str) -> str:
    """The path of a program.

    Raises:
        Unavailable: It is missing; `how` says how to get it.
    """
    # Daemons and `su` leave /usr/sbin out, where ip and tc are.
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        raise Unavailable(f"the program {program!r} is missing: {how}")
    return found


def check() -> None:
    """Whether this user may try at all.

    Raises:
        Unavailable: Not Linux, not root, or a program is missing.
    """
    if sys.platform != "linux":
        raise Unavailable("emulated clusters are made of Linux network namespaces: run this on Linux")
    for program, how in PROGRAMS.items():
        need(program, how)
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run this with sudo")


def _run(command: Sequence[str], lines: Iterable[str] = ()) -> str:
    """Run iproute2 or the like; `lines` are for its `-batch -`.

    Raises:
        Unavailable: It failed.
    """
    given = list(lines)
    done = subprocess.run(command, input="\n".join(given), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout
    said = done.stderr.strip() or done.stdout.strip()
    failed = re.search(r"Command failed -:(\d+)", said)
    what = " ".join(command) + (f" <<< {given[int(failed[1]) - 1]!r}" if failed else "")
    advice = next((text for sign, text in ADVICE.items() if sign in said), "")
    raise Unavailable(f"`{what}` failed: {said}" + (f"; {advice}" if advice else ""))


def _ip(namespace: str, lines: Sequence[str]) -> None:
    _run([need("ip", GET_IPROUTE2), "-n", namespace, "-batch", "-"], lines)


class Host:
    """One host of a cluster: a network of its own, a host name, and a link to the others."""

    interface = INTERFACE

    def __init__(self, index: int, namespace: str) -> None:
        self.index = index
        self.name = f"host{index}"
        self.address = f"10.77.0.{index + 1}"
        self.namespace = namespace
        self._processes: list[subprocess.Popen[Any]] = []

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host; it is ended with the cluster at the latest.

        The process id is the command's own. A command that does not exist ends with status 127. The kernel sends
        SIGTERM to the process when the *thread* that started it has ended, so that none outlives a killed program:
        start processes from a thread that lives as long as they.

        Args:
            command: Program and arguments.
            env: Environment; this process's if None.
            options: Further arguments of subprocess.Popen.
        """
        process = subprocess.Popen([*self._entry(), *command], env=env, **options)
        self._processes = [kept for kept in self._processes if kept.poll() is None]
        self._processes.append(process)
        return process

    def _entry(self) -> list[str]:
        """What stands before a command: each program becomes the next by exec, the last one the command.

        No preexec_fn: between fork and exec no Python may run where there are threads.
        """
        orphan = [need("setpriv", GET_UTIL_LINUX), "--pdeathsig", "TERM"]
        network = [need("ip", GET_IPROUTE2), "netns", "exec", self.namespace]
        naming = [need("unshare", GET_UTIL_LINUX), "--uts", "sh", "-c"]
        return [*orphan, *network, *naming, 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"', self.name]


class Cluster:
    """Hosts joined by limited links. A context; on the way out processes, namespaces, links and files are gone.

    Args:
        hosts: How many.
        rates_mbit: Megabits (10^6) per second of every link in each direction, or one per host; None: no limit.
        sites: How many hosts each site has, in their order; none: all are in one.
        between_mbit: Likewise, of the link that joins a site to the first one; all of its hosts share it.

    Raises:
        Unavailable: Not here; the text says why.
    """

    def __init__(
        self,
        hosts: int,
        rates_mbit: float | Sequence[float | None] | None = None,
        *,
        sites: Sequence[int] = (),
        between_mbit: float | None = None,
    ) -> None:
        if not 1 <= hosts <= HOSTS_MAX:
            raise ValueError(f"{hosts} hosts: a cluster has 1 to {HOSTS_MAX}")
        rates = list(rates_mbit) if isinstance(rates_mbit, Sequence) else [rates_mbit] * hosts
        if len(rates) != hosts:
            raise ValueError(f"{len(rates)} rates for {hosts} hosts: give one for each, or one number for all")
        if sites and (sum(sites) != hosts or min(sites) < 1):
            raise ValueError(f"sites of {', '.join(map(str, sites))} hosts: give each one at least, {hosts} together")
        self._rates_mbit: list[float | None] = [_checked(rate) for rate in rates]
        self._between_mbit = _checked(between_mbit)
        # By host the number of its site.
        self._site = [number for number, count in enumerate(sites or [hosts]) for _ in range(count)]
        check()
        self._owner = os.getpid()
        self._stem = f"{_stem(self._owner)}-{secrets.token_hex(3)}"
        self._switch = f"{self._stem}-switch"
        self.hosts = [Host(index, f"{self._stem}-host{index}") for index in range(hosts)]
        self._open = True
        atexit.register(self.close)
        _exit_on_signals()
        try:
            _remove_leftovers()
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rates_mbit(self) -> list[float | None]:
        """The rates as they are now, by host."""
        return list(self._rates_mbit)

    def set_rate(self, index: int, mbit: float | None) -> None:
        """Change the rate of one host's link, in both directions, while traffic runs; None: no limit."""
        if not self._open:
            raise ValueError("the cluster is closed")
        self._rates_mbit[index] = _checked(mbit)
        self._limit([self.hosts[index]] if self._bridged else self.hosts)

    def cut(self, hosts: Collection[int]) -> None:
        """Cut the network in two: these hosts reach each other, and all others each other. None: it is whole again.

        As a switch that fails does it: links stay up, and nobody is told.
        """
        if not self._open:
            raise ValueError("the cluster is closed")
        if not self._bridged:
            raise ValueError("two hosts of one site have no switch between them: give the cluster a third one")
        ports = [
            f"link set {_port(host)} master {APART if host.index in hosts else f'{BRIDGE}{site}'}"
            for host, site in zip(self.hosts, self._site, strict=True)
        ]
        _ip(self._switch, ports)

    def close(self) -> None:
        """Undo everything. Again: does nothing."""
        if not self._open or os.getpid() != self._owner:  # a fork owns nothing
            return
        _end([process for host in self.hosts for process in host._processes], self._namespaces)
        _delete(self._namespaces)  # and with them the links, and the token buckets on them
        atexit.unregister(self.close)
        self._open = False

    @property
    def _bridged(self) -> bool:
        return len(self.hosts) != 2 or self._site[-1] > 0

    @property
    def _between(self) -> list[tuple[str, str]]:
        """The ends of each link between sites: at the first one, and at the other."""
        return [(f"to{site}", f"from{site}") for site in range(1, self._site[-1] + 1)]

    @property
    def _namespaces(self) -> list[str]:
        return [*(host.namespace for host in self.hosts), *([self._switch] if self._bridged else [])]

    def _build(self) -> None:
        _run([need("ip", GET_IPROUTE2), "-batch", "-"], [f"netns add {name}" for name in self._namespaces])
        names = "".join(f"{host.address}\t{host.name}\n" for host in self.hosts)
        for host in self.hosts:
            folder = FILES / host.namespace
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{names}", encoding="ascii")
        # Both ends are made inside the namespaces: the machine's own network never sees them. Without automatic
        # addresses no host speaks IPv6 by itself, so that the counters count only what programs send.
        if self._bridged:
            wiring = []
            for bridge in (*(f"{BRIDGE}{site}" for site in range(self._site[-1] + 1)), APART):
                wiring += [
                    f"link add {bridge} type bridge stp_state 0 mcast_snooping 0",
                    f"link set {bridge} addrgenmode none",
                    f"link set {bridge} up",
                ]
            for site, (near, far) in enumerate(self._between, 1):
                wiring += [
                    f"link add {near} type veth peer name {far}",
                    f"link set {near} addrgenmode none master {BRIDGE}0 up",
                    f"link set {far} addrgenmode none master {BRIDGE}{site} up",
                ]
            for host, site in zip(self.hosts, self._site, strict=True):
                wiring += [
                    f"link add {_port(host)} type veth peer name {INTERFACE} netns {host.namespace}",
                    f"link set {_port(host)} addrgenmode none master {BRIDGE}{site} up",
                ]
            _ip(self._switch, wiring)
            for end in chain.from_iterable(self._between):
                _set_bucket(self._switch, end, self._between_mbit)
        else:
            one, other = (host.namespace for host in self.hosts)
            _ip(one, [f"link add {INTERFACE} type veth peer name {INTERFACE} netns {other}"])
        for host in self.hosts:
            up = [f"link set {INTERFACE} addrgenmode none up", f"address add {host.address}/24 dev {INTERFACE}"]
            _ip(host.namespace, ["link set lo up", *up])
        self._limit(self.hosts)
        self._await_links()
        _run([*self.hosts[0]._entry(), "true"])

    def _limit(self, hosts: Sequence[Host]) -> None:
        """Set the buckets of these hosts."""
        for host in hosts:
            rate_mbit = self._rates_mbit[host.index]
            if self._bridged:
                _set_bucket(host.namespace, INTERFACE, rate_mbit)
                _set_bucket(self._switch, _port(host), rate_mbit)
            else:  # what the one may send and the other receive is one bucket, the narrower
                limits = [rate for rate in self._rates_mbit if rate is not None]
                _set_bucket(host.namespace, INTERFACE, min(limits, default=None))

    def _await_links(self) -> None:
        """Until the bridge forwards: a packet before that is lost, and TCP repeats its first one after a second."""
        ip, deadline = [need("ip", GET_IPROUTE2), "-json"], time.monotonic() + READY_S
        ends = [[*ip, "-n", name, "link", "show", "type", "veth"] for name in self._namespaces]
        while any(link["operstate"] != "UP" for end in ends for link in json.loads(_run(end))):
            if time.monotonic() > deadline:
                raise Unavailable(f"the links are not up after {READY_S:g} s")
            time.sleep(POLL_S)


def _checked(rate_mbit: float | None) -> float | None:
    if rate_mbit is not None and not (math.isfinite(rate_mbit) and rate_mbit > 0):
        raise ValueError(f"a rate of {rate_mbit} Mbit/s: give a positive number, or None for no limit")
    return rate_mbit


def _port(host: Host) -> str:
    """The bridge's end of a host's link."""
    return f"port{host.index}"


def _set_bucket(namespace: str, interface: str, rate_mbit: float | None) -> None:
    tc = [need("tc", GET_IPROUTE2), "-n", namespace, "qdisc"]
    if rate_mbit is None:
        if "tbf" in _run([*tc, "show", "dev", interface]):
            _run([*tc, "delete", "dev", interface, "root"])
        return
    bytes_per_s = rate_mbit * 1e6 / 8
    burst = max(BURST_BYTES_MIN, round(bytes_per_s * BURST_S))
    queue = max(QUEUE_BYTES_MIN, round(bytes_per_s * QUEUE_S))
    # "replace" changes a bucket that is there in place: what waits in it stays.
    bucket = ["rate", f"{round(rate_mbit * 1e6)}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
    _run([*tc, "replace", "dev", interface, "root", "tbf", *bucket])


def _stem(owner: int) -> str:
    """How names of a process's namespaces begin: with its id and when it began, for ids come back."""
    return f"penstock-{owner}-{_began(owner)}"


def _began(pid: int) -> int | None:
    """When a process began, in the kernel's ticks; None if there is none, or nothing but its exit status."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _remove_leftovers() -> None:
    """What a program left that was killed outright: the names say by which process, and it is gone."""
    found = {path.name for folder in (NAMESPACES, FILES) if folder.is_dir() for path in folder.iterdir()}
    dead = []
    for name in sorted(found):
        match = re.fullmatch(r"penstock-(\d+)-(\d+)-[0-9a-f]{6}-(?:host\d+|switch)", name)
        if match and _began(int(match[1])) != int(match[2]):
            dead.append(name)
    if dead:
        _end([], dead)
        _delete(dead)


def _inside(namespaces: Sequence[str]) -> set[int]:
    """The processes whose network is one of these."""

    def network(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:  # gone meanwhile
            return None
        return status.st_dev, status.st_ino

    wanted = {network(NAMESPACES / name) for name in namespaces} - {None}
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    return {pid for pid in pids if network(Path(f"/proc/{pid}/ns/net")) in wanted}


def _end(processes: Sequence[subprocess.Popen[Any]], namespaces: Sequence[str]) -> None:
    """End these processes and, with what they have started, all that runs in the namespaces."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = {process.pid for process in processes if process.poll() is None}
        for pid in running | _inside(namespaces):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + END_S
        while any(process.poll() is None for process in processes) or _inside(namespaces):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        else:
            return


def _delete(namespaces: Sequence[str]) -> None:
    """Remove namespaces and their files, as far as they exist."""
    lines = "\n".join(f"netns delete {name}" for name in namespaces if (NAMESPACES / name).exists())
    if lines:
        batch = [need("ip", GET_IPROUTE2), "-force", "-batch", "-"]
        subprocess.run(batch, input=lines, capture_output=True, text=True, check=False)
    for name in namespaces:
        shutil.rmtree(FILES / name, ignore_errors=True)


def _exit_on_signals() -> None:
    """Let signals that end this process do so by an exception, so that everything is torn down."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may say what a signal does
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)

"""Metrics of real jobs: what a scrape or a file says beside the report, in training, at its end and after a loss."""

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
from pathlib import Path

import programs
import pytest
import torch
from job_processes import CONTEXT, PATIENCE_S, run, run_well
from scraped import DIRECT, LIMIT_S, Scraped, scrape
from torch import nn

import penstock as ps
from lab.cluster import Cluster, Unavailable, check, need
from penstock.job import current

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "examples" / "grafana-dashboard.json"
STEPS = 6
OPTIONS = {"line_rate_mbit": 1000.0, "slice_bytes": 4096}
WINDOW_S = 10


def network():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.Linear(100, 3))
    return ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))


def make_step(model, optimizer):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(rank, size):
    """Where its metrics were, and what it has counted to the end."""
    model, optimizer = network()
    for _ in range(STEPS):
        make_step(model, optimizer)
    ps.allreduce(torch.ones(1000))
    engine, place = current().engine, ps.report()["metrics"]
    ps.shutdown()
    return place, engine.report()


def test_the_file_says_at_the_end_what_the_report_says(tmp_path):
    metrics = tmp_path / "penstock.prom"
    ranks = run_well(2, trained, tmp_path, metrics=str(metrics), shared_memory=False, **OPTIONS)
    found = []
    for rank, (place, report) in enumerate(ranks):
        assert place == str(tmp_path / f"penstock-rank-{rank}.prom")
        found.append(Scraped(Path(place).read_text()))
        other = str(1 - rank)
        assert report["call_bytes_sent"] > 0 and report["bytes_sent"] > STEPS * 1000
        for way in ("sent", "received"):
            whole = report[f"bytes_{way}"] + report[f"call_bytes_{way}"]
            assert found[rank].by("peer", f"penstock_{way}_bytes_total") == {other: whole}
            assert found[rank].value(f"penstock_{way}_frames_total") == report[f"frames_{way}"]
        for name in ("penstock_queued_frames", "penstock_queued_bytes"):
            assert found[rank].by("peer", name) == {other: 0}
        assert found[rank].value("penstock_retransmitted_segments_total") >= 0
        assert found[rank].value("penstock_tensors_in_flight") == 0
        assert found[rank].value("penstock_slices_total") == report["slices"] > STEPS
        assert found[rank].value("penstock_preemptions_total") == report["preemptions"]
        assert found[rank].value("penstock_stall_seconds_total") == pytest.approx(report["stall_s"])
        during = found[rank].by("during", "penstock_in_flight_seconds_total")
        assert during == pytest.approx({name: report[f"busy_{name}_s"] for name in during}) and during["backward"] > 0
        assert found[rank].value("penstock_owned_bytes") == report["owned_bytes"][rank] > 0
        assert found[rank].value("penstock_line_bytes_per_second") == report["line_bytes_per_s"]
        assert found[rank].value("penstock_steps_total", rank=str(rank)) == STEPS
        assert found[rank].value("penstock_step_seconds_count") == STEPS - 1
        assert found[rank].value("penstock_step_seconds_sum") > 0
    assert found[0].sum("penstock_sent_bytes_total") == found[1].sum("penstock_received_bytes_total")
    assert found[1].sum("penstock_sent_bytes_total") == found[0].sum("penstock_received_bytes_total")
    assert len({sample.labels["run"] for one in found for sample in one.samples}) == 1


def alone(rank, size):
    make_step(*network())
    found = scrape(ps.report()["metrics"])
    return found.value("penstock_steps_total"), found.value("penstock_members"), found.sum("penstock_sent_bytes_total")


def test_a_job_of_one_process_has_metrics_but_no_steps_for_nothing_of_it_is_patched(tmp_path):
    assert run_well(1, alone, tmp_path, metrics=0) == [(0, 1, 0)]


def until_told(rank, size, told, stop):
    """Trains, and says where its metrics are."""
    model, optimizer = network()
    told.put((rank, ps.report()["metrics"]))
    end_s = time.monotonic() + PATIENCE_S
    while True:
        make_step(model, optimizer)
        ends = torch.tensor([float(stop.is_set() or time.monotonic() > end_s)])
        ps.allreduce(ends)
        if ends > 0:
            return


@contextlib.contextmanager
def training(size, place, **options):
    """The URLs of ranks that train within."""
    told, stop = CONTEXT.Queue(), CONTEXT.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        job = beside.submit(run_well, size, until_told, place, told, stop, **{**OPTIONS, **options})
        try:
            urls = dict(told.get(timeout=PATIENCE_S) for _ in range(size))
            yield [urls[rank] for rank in range(size)]
        finally:
            stop.set()
            job.result(PATIENCE_S)


def test_scrapes_follow_a_training_and_its_end_closes_the_ports(tmp_path):
    with training(2, tmp_path, metrics=0) as urls:
        for rank, url in enumerate(urls):
            before = after = scrape(url)
            end_s = time.monotonic() + LIMIT_S
            while after.value("penstock_steps_total") < before.value("penstock_steps_total") + 3:
                assert time.monotonic() < end_s
                after = scrape(url)
            for name in ("penstock_sent_bytes_total", "penstock_received_bytes_total", "penstock_slices_total"):
                assert after.sum(name) > before.sum(name)
            assert after.value("penstock_members", rank=str(rank)) == 2
            assert after.value("penstock_queued_frames") >= 0
            # A step may end while they are read.
            assert abs(after.value("penstock_step_seconds_count") - after.value("penstock_steps_total") + 1) <= 1
    for url in urls:
        with pytest.raises(urllib.error.URLError):
            scrape(url)


def loses_one(rank, size):
    """The last rank dies; the others' metrics once they have gone on."""
    model, optimizer = network()
    for step in range(STEPS):
        if (rank, step) == (size - 1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        make_step(model, optimizer)
    ps.synchronize()
    found = scrape(ps.report()["metrics"])
    ps.barrier()  # nobody leaves before
    return found


def test_a_lost_member_is_counted_by_those_who_go_on(tmp_path):
    outcomes = run(3, loses_one, tmp_path, elastic=True, metrics=0, **{**OPTIONS, "peer_timeout_s": 4.0})
    assert outcomes[2].exit_code == -signal.SIGKILL
    for outcome in outcomes[:2]:
        assert outcome.error is None, outcome.error
        found = outcome.value
        assert (found.value("penstock_members"), found.value("penstock_lost_members_total")) == (2, 1)
        assert found.value("penstock_epoch") >= 1 and found.value("penstock_new_members_total") == 0
        assert found.value("penstock_steps_total") == STEPS


FORKS = """
import os, signal, sys
import penstock as ps
ps.init(rank=0, world_size=1, metrics=0)
url = ps.report()["metrics"]
if os.fork() == 0:
    print(url, flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


def test_a_forked_child_keeps_no_port(tmp_path):
    """The parent is killed: had it shut down, the port would be free whatever the child has."""
    parent = programs.start_afresh("-c", FORKS, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        port = int(re.search(r":(\d+)/", parent.stdout.readline())[1])
        parent.kill()
        parent.wait(PATIENCE_S)
        with socket.socket() as next_one:
            next_one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            next_one.bind(("127.0.0.1", port))
            next_one.listen()
        parent.stdin.close()
        assert not parent.stdout.read()  # the child has lived until now, and ends


def meet(rank, size):
    ps.barrier()


def test_a_rank_whose_port_is_taken_says_so_and_the_others_do_not_wait(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcomes = run(2, meet, tmp_path, metrics=port)
    first, other = (outcome.error for outcome in outcomes)
    assert isinstance(first, ps.ConfigError) and f"127.0.0.1, port {port}: " in str(first)
    assert isinstance(other, ps.PenstockError)


SERVED = """
import urllib.request
import penstock as ps
ps.init()
ps.barrier()
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
text = direct.open(ps.report()["metrics"], timeout=20).read().decode()
assert f'penstock_members{{rank="{ps.rank()}",' in text, text
print("served")
"""


def test_the_page_s_commands(tmp_path):
    """Of docs/metrics.md: under `penstock run` each rank has a port, or a file."""
    program = tmp_path / "train.py"
    for metrics, text in (("0", SERVED), (str(tmp_path / "penstock.prom"), None)):
        program.write_text(text or (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8"), encoding="utf-8")
        started = programs.start(
            *("-m", "penstock", "run", "--workers", "2", program),
            env={**os.environ, "PENSTOCK_METRICS": metrics},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 0, said
        assert text is None or said[0].count("served") == 2
    files = sorted(tmp_path.glob("*.prom"))
    assert [file.name for file in files] == ["penstock-rank-0.prom", "penstock-rank-1.prom"]
    assert all(Scraped(file.read_text()).value("penstock_steps_total") > 0 for file in files)


def test_servers_have_metrics_of_their_own(tmp_path):
    started = programs.start(
        *("-m", "penstock", "run", "--workers", "2", "--servers", "1", ROOT / "examples" / "minimal.py"),
        env={**os.environ, "PENSTOCK_METRICS": str(tmp_path / "penstock.prom")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    said = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, said
    server = Scraped((tmp_path / "penstock-server-0.prom").read_text())
    assert server.value("penstock_info", rank="server 0", role="server") == 1
    assert server.value("penstock_owned_bytes") > 0
    assert set(server.by("peer", "penstock_sent_bytes_total")) >= {"0", "1"}
    worker = Scraped((tmp_path / "penstock-rank-1.prom").read_text())
    assert worker.by("peer", "penstock_sent_bytes_total")["server 0"] > 0


NEVER_BEGINS = """
import pathlib, threading
import penstock as ps
def serving():
    return [thread.name for thread in threading.enumerate() if thread.name == "penstock-metrics"]
pathlib.Path("file").write_text("")
try:
    ps.init(rank=0, world_size=1, metrics=0, trace="file/inner")
except ps.ConfigError as error:
    print(error)
assert not serving()
ps.init(rank=0, world_size=1, metrics=0)
assert len(serving()) == 1
ps.shutdown()
assert not serving()
"""


def test_a_job_that_does_not_begin_leaves_no_server(tmp_path):
    done = programs.run("-c", NEVER_BEGINS, cwd=tmp_path, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "cannot write to file/inner" in done.stdout


LOSSY = """
import sys
import torch
import penstock as ps
rank, address = int(sys.argv[1]), sys.argv[2]
meet = {"rank": rank, "world_size": 2, "rendezvous": f"tcp://{address}:23456", "interface": "10.77.0.0/24"}
ps.init(**meet, secret="the secret of a test", line_rate_mbit=100.0, metrics=sys.argv[3])
def sent_again_by_kernel():
    names, values = (line.split()[1:] for line in open("/proc/net/snmp") if line.startswith("Tcp:"))
    return int(dict(zip(names, values))["RetransSegs"])
ps.barrier()
for _ in range(200):
    before = ps.report()["peers"]
    ps.allreduce(torch.ones(200_000))
    again = torch.tensor([sum(peer["retransmitted_segments"] for peer in before)])
    ps.allreduce(again, op="sum")
    if again > 0:
        break
ps.shutdown()
print(sent_again_by_kernel())
"""


@pytest.fixture
def lossy_hosts():
    """Two, whose links drop what does not fit into a queue of a few frames."""
    try:
        check()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with Cluster(2, 100.0) as cluster:
        for host in cluster.hosts:
            bucket = ["tbf", "rate", "100mbit", "burst", "4kb", "limit", "8kb"]
            tc = [need("tc", "install iproute2"), "-n", host.namespace, "qdisc", "replace", "dev", host.interface]
            subprocess.run([*tc, "root", *bucket], check=True)
        yield cluster.hosts


@pytest.mark.long
def test_what_tcp_sends_again_is_what_the_kernel_counts(tmp_path, lossy_hosts):
    metrics = str(tmp_path / "penstock.prom")
    started = [
        host.start(
            [sys.executable, "-c", LOSSY, str(host.index), lossy_hosts[0].address, metrics],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in lossy_hosts
    ]
    sent_again = 0
    for rank, process in enumerate(started):
        said, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        found = Scraped((tmp_path / f"penstock-rank-{rank}.prom").read_text())
        of_rank = found.value("penstock_retransmitted_segments_total", peer=str(1 - rank))
        assert of_rank <= int(said)  # which counts those of the meeting, too
        sent_again += of_rank
    assert sent_again > 0


# A real Prometheus


@contextlib.contextmanager
def prometheus(folder, urls):
    """One that scrapes these; asks it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    targets = [urllib.parse.urlsplit(url).netloc for url in urls]
    jobs = [{"job_name": "penstock", "static_configs": [{"targets": targets}]}]
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def query(expression):
        """The series of an answer."""
        asked = urllib.parse.urlencode({"query": expression})
        with DIRECT.open(f"http://{address}/api/v1/query?{asked}", timeout=LIMIT_S) as answer:
            return json.load(answer)["data"]["result"]

    try:
        yield query
    finally:
        process.kill()
        process.wait()


def wait_for(query, expression, series, folder):
    """Until an answer has so many series."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(urllib.error.URLError):  # it is not ready yet
            found = query(expression)
            if len(found) == series:
                return found
        assert time.monotonic() < end_s, f"{expression}\n{(folder / 'prometheus.log').read_text()}"
        time.sleep(0.05)


@pytest.mark.long
def test_a_real_prometheus_scrapes_all_and_answers_the_dashboard(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus: Debian has it as a package of that name")
    with training(2, tmp_path, metrics=0) as urls, prometheus(tmp_path, urls) as query:
        # Two scrapes of each.
        wait_for(query, f"rate(penstock_steps_total[{WINDOW_S}s]) > 0", 2, tmp_path)
        assert {series["metric"]["rank"] for series in query("up * on (instance) group_left (rank) penstock_info")} == {
            "0",
            "1",
        }
        assert all(float(series["value"][1]) == 1 for series in query("up"))
        sent = query("sum by (rank) (penstock_sent_bytes_total)")
        assert len(sent) == 2 and all(float(series["value"][1]) > 0 for series in sent)
        dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
        expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
        assert len(expressions) > 10
        for expression in expressions:
            for variable, value in (("$__rate_interval", f"{WINDOW_S}s"), ("$run", ".*"), ("$rank", ".*")):
                expression = expression.replace(variable, value)
            try:
                assert query(expression), f"{expression}: no series"
            except urllib.error.HTTPError as error:
                pytest.fail(f"{expression}: {error.read().decode()}")

"""``python -m lab run`` on a small scenario: two real hosts, real systems; missing and failing ones are reported."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.cluster import Cluster, Unavailable, need
from lab.peers import Missing

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900  # a minute where nothing else runs
SCENARIO = """
title = "small"
network = "cifar10-quick"
hosts = 2
compute_s = 0.03
rate_mbit = 200
repetitions = 2
steps = 3
systems = ["penstock", "ddp", "ddp-bf16"]
seed = 7
[targets]
ideal_ratio = 1.5
[options]
ddp-bf16 = { hook = "none such" }
"""


@pytest.fixture(autouse=True)
def needs_clusters():
    try:
        need("iperf3", "install iperf3")
        Cluster(2).close()
    except Unavailable as error:
        pytest.skip(str(error))


def run(tmp_path, text):
    file = tmp_path / "small.toml"
    file.write_text(text)
    command = [sys.executable, "-m", "lab", "run", str(file), "--output", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done, {line["system"]: line for line in lines}


def test_what_a_run_writes_also_of_a_system_that_fails(tmp_path):
    done, found = run(tmp_path, SCENARIO)
    assert done.returncode == 0, done.stderr
    assert list(found) == ["alone", "penstock", "ddp", "ddp-bf16"]
    kept = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert kept == list(found.values())
    assert "none such" in found.pop("ddp-bf16")["missing"]
    nbytes = 145_578 * 4
    for system, line in found.items():
        assert line["missing"] is None
        assert (line["benchmark"], line["seed"], line["scenario"]) == ("lab", 7, "small")
        assert line["commit"]
        assert line["host"]["cores"] >= 1
        assert line["step_s"]["count"] == 2
        assert line["step_s"]["median"] >= 0.029
        assert line["targets"] == {"ideal_ratio": 1.5}
        sent, received = line["bytes_per_step"]["sent"], line["bytes_per_step"]["received"]
        if system == "alone":
            assert max(sent + received) < nbytes / 10
        else:  # two hosts: each pushes half and answers half, or passes as much round a ring
            assert all(0.95 * nbytes < count < 1.2 * nbytes for count in sent + received), line["bytes_per_step"]
            alone_s, step_s = (found[name]["step_s"]["median"] for name in ("alone", system))
            assert line["speedup"] == pytest.approx(2 * alone_s / step_s, rel=2e-3)
    assert 10 < found["ddp"]["line_rate_mbit"] < 200  # of a busy machine less than the links' rate
    limits = found["ddp"]["limits"]
    assert limits["compute_s"] <= limits["ideal_s"] <= limits["wfbp_s"] <= limits["serial_s"]
    assert found["penstock"]["ratio_ideal"] == pytest.approx(
        found["penstock"]["step_s"]["median"] / limits["ideal_s"], rel=2e-3
    )
    assert found["penstock"]["preemptions_per_step"] is not None
    use = found["penstock"]["network_use"]
    assert len(use["sent_mbit"]) == len(use["received_mbit"]) >= 1


def test_what_a_run_does_without_is_reported_as_missing():
    from lab.limits import Limits
    from lab.run import Run, _overridden
    from lab.scenario import Scenario

    full = Scenario("s", "s", "cifar10-quick", ("alone", "penstock", "ddp", "horovod"))
    point = _overridden(full, argparse.Namespace(repetitions=None, systems=["ddp", "penstock-slicing"]))
    assert point.systems == ("alone", "ddp", "penstock-slicing")
    run = Run(point, progress=None)
    run.limits = Limits(1.0, 1.0, 1.0, 1.0)
    run.missing.update(dict.fromkeys(point.systems, "not run in this test"))
    reasons = {record["system"]: record["missing"] for record in run.records()}
    assert list(reasons) == ["alone", "ddp", "penstock-slicing", "penstock", "horovod"]
    assert {system for system, reason in reasons.items() if "left out of this run" in reason} == {"penstock", "horovod"}


def test_a_peer_that_is_not_installed_is_reported(monkeypatch):
    from lab import peers
    from lab.run import Run
    from lab.scenario import Scenario

    def python_of(environment):
        raise Missing(f"{environment} is not here")

    monkeypatch.setattr(peers, "python_of", python_of)
    run = Run(Scenario("s", "s", "cifar10-quick", ("alone", "horovod")), progress=None)
    assert list(run._pythons()) == ["alone"]
    assert run.missing == {"horovod": "horovod is not here"}

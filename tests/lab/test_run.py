"""``python -m lab run`` on a small scenario: two real hosts, real systems; missing and failing ones are reported."""

import argparse
import contextlib
import itertools
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

import lab.run
import lab.session
from benchmarks import allreduce
from lab import peers
from lab.cluster import Cluster, Unavailable, need
from lab.limits import Limits, limits, store_wire_s
from lab.networks import NETWORKS
from lab.peers import Missing
from lab.run import Run, _overridden
from lab.scenario import Scenario
from lab.session import Session, SystemFailed, Turn

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900  # a minute where nothing else runs
SCENARIO = """
title = "small"
network = "cifar10-quick"
hosts = 2
compute_s = 0.03
rate_mbit = 40
repetitions = 2
steps = 3
systems = ["penstock", "ddp", "ddp-bf16"]
seed = 7
[targets]
ideal_ratio = 1.5
[options]
ddp-bf16 = { hook = "none such" }
"""


class Progress:
    """Counts turns."""

    turns = 0

    def set_postfix_str(self, text):
        pass

    def update(self, turns=1):
        self.turns += turns


@pytest.fixture
def clusters():
    try:
        need("iperf3", "install iperf3")
        Cluster(2).close()
    except Unavailable as error:
        pytest.skip(str(error))


def run(tmp_path, text):
    file = tmp_path / "small.toml"
    file.write_text(text)
    done = programs.run("-m", "lab", "run", file, "--output", tmp_path, "--json", cwd=ROOT, timeout=LIMIT_S)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done, {line["system"]: line for line in lines}


@pytest.mark.long
@pytest.mark.usefixtures("clusters")
def test_what_a_run_writes_also_of_a_system_that_fails(tmp_path):
    alike = {"benchmark": "lab", "scenario": "small", "sweep": None, "servers": 0, "run": "before"}
    before = [{**alike, "system": "penstock"}, {**alike, "system": "ddp-bf16"}]
    (tmp_path / "small.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in before))
    done, found = run(tmp_path, SCENARIO)
    assert done.returncode == 0, done.stderr
    assert list(found) == ["alone", "penstock", "ddp", "ddp-bf16"]
    kept = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert kept == [before[1], *found.values()], "what was measured again goes"
    assert "none such" in found.pop("ddp-bf16")["missing"]
    nbytes = 145_578 * 4
    for system, line in found.items():
        assert line["missing"] is None
        assert (line["benchmark"], line["seed"], line["scenario"]) == ("lab", 7, "small")
        assert line["commit"]
        assert line["host"]["cores"] >= 1
        assert line["step_s"]["count"] == line["stolen_cores"]["count"] == 2
        assert line["step_s"]["median"] >= 0.029
        assert line["targets"] == {"ideal_ratio": 1.5}
        sent, received = line["bytes_per_step"]["sent"], line["bytes_per_step"]["received"]
        if system == "alone":
            assert max(sent + received) < nbytes / 10
        else:  # two hosts: each pushes half and answers half, or passes as much round a ring
            assert all(0.95 * nbytes < count < 1.2 * nbytes for count in sent + received), line["bytes_per_step"]
            alone_s, step_s = (found[name]["step_s"]["median"] for name in ("alone", system))
            assert line["speedup"] == pytest.approx(2 * alone_s / step_s, rel=2e-3)
    line_rates_mbit = found["ddp"]["line_rates_mbit"]
    assert len(line_rates_mbit) == 4
    assert 10 < max(line_rates_mbit) == found["ddp"]["line_rate_mbit"] < 40, "a busy machine carries less"
    bounds = found["ddp"]["limits"]
    assert bounds["compute_s"] <= bounds["ideal_s"] <= bounds["wfbp_s"] <= bounds["serial_s"]
    assert found["penstock"]["ratio_ideal"] == pytest.approx(
        found["penstock"]["step_s"]["median"] / bounds["ideal_s"], rel=2e-3
    )
    assert found["penstock"]["preemptions_per_step"] is not None
    # The links need 0.11 s for what is computed in 0.03 s.
    stalls = {system: sum(found[system]["stall_by_layer_s"].values()) for system in ("alone", "penstock")}
    assert stalls["penstock"] > 0.02
    assert stalls["alone"] < stalls["penstock"] / 10, "one worker alone waits for nothing but a busy machine"
    use = found["penstock"]["network_use"]
    assert len(use["sent_mbit"]) == len(use["received_mbit"]) >= 1


@pytest.mark.long
@pytest.mark.usefixtures("clusters")
def test_a_run_with_a_server_apart_and_two_workers_on_each_host(tmp_path):
    servers = "servers = 1\nworkers_per_host = 2\n"
    text = servers + SCENARIO.replace(', "ddp", "ddp-bf16"', "").replace('ddp-bf16 = { hook = "none such" }', "")
    done, found = run(tmp_path, text.replace("repetitions = 2", "repetitions = 1"))
    assert done.returncode == 0, done.stderr
    ours, nbytes = found["penstock"], 145_578 * 4
    assert ours["missing"] is None
    assert (ours["servers"], ours["workers_per_host"], len(ours["rates_mbit"])) == (1, 2, 3)
    for direction in ("sent", "received"):  # two workers of a host each push all and get all; the server has four
        *hosts, server = ours["bytes_per_step"][direction]
        assert all(0.98 * 2 * nbytes < count < 1.15 * 2 * nbytes for count in hosts), ours["bytes_per_step"]
        assert 0.98 * 4 * nbytes < server < 1.15 * 4 * nbytes, ours["bytes_per_step"]
    alone_s, step_s = (found[name]["step_s"]["median"] for name in ("alone", "penstock"))
    assert ours["speedup"] == pytest.approx(4 * alone_s / step_s, rel=2e-3)


def test_what_a_run_does_without_is_reported_as_missing():
    full = Scenario("s", "s", "cifar10-quick", ("alone", "penstock", "ddp", "horovod"))
    point = _overridden(full, argparse.Namespace(repetitions=None, systems=["ddp", "penstock-slicing"]))
    assert point.systems == ("alone", "ddp", "penstock-slicing")
    run = Run(point, progress=None)
    run.limits = Limits(1.0, 1.0, 1.0, 1.0)
    run.missing.update(dict.fromkeys(point.systems, "not run in this test"))
    reasons = {record["system"]: record["missing"] for record in run.records()}
    assert list(reasons) == ["alone", "ddp", "penstock-slicing", "penstock", "horovod"]
    assert {system for system, reason in reasons.items() if "left out of this run" in reason} == {"penstock", "horovod"}


def turn(layers, *, step_s=1.0, stalls=None, facts=None):
    """Made up: four steps and one before them, in which a layer stalled so long altogether, forward and backward."""
    by_layer = [(stalls or {}).get(layer.name, (0.0, 0.0)) for layer in layers]
    stats = {"lead_in": 1, "overrun_s": 0.0, "preemptions": 10}
    stats |= {"stall_forward_s": [forward for forward, _ in by_layer]}
    stats |= {"stall_backward_s": [backward for _, backward in by_layer]}
    taken = {"step_s": step_s, "seconds": [[step_s]], "cpu_s": 0.1, "sent": [1.0], "received": [1.0]}
    return Turn(**taken, stolen_cores=0.0, stats=stats, facts=facts or {})


def test_stalls_are_by_layer_and_step_of_the_turn_in_the_middle():
    run = Run(Scenario("s", "s", "cifar10-quick", ("penstock",), steps=4), progress=None)
    run.limits = Limits(1.0, 1.0, 1.0, 1.0)
    layers = run._trace.layers
    names = [layer.name for layer in layers if layer.tensors]
    middle = {names[0]: (0.2, 0.05), names[1]: (0.0, 0.002), names[-1]: (0.0, 0.5)}  # the second: 0.4 ms per step
    slow = {names[2]: (5.0, 5.0)}
    run.turns["penstock"] = [
        turn(layers, step_s=9.0, stalls=slow),
        turn(layers, step_s=2.0, stalls=middle),
        turn(layers),
    ]
    measured = run._measured("penstock")
    assert measured["stall_by_layer_s"] == {names[0]: 0.05, names[-1]: 0.1}
    assert measured["preemptions_per_step"] == 2


@pytest.fixture
def no_cluster(monkeypatch):
    for name in ("Cluster", "Counters"):
        monkeypatch.setattr(lab.run, name, lambda *_: contextlib.nullcontext())


@pytest.mark.usefixtures("no_cluster")
def test_turns_are_kept_if_the_line_rate_cannot_be_measured_after_them(monkeypatch, capsys):
    rates_mbit = iter([574.0, 551.0])

    def line_rate_mbit(cluster, host):
        for rate_mbit in rates_mbit:
            return rate_mbit
        raise Unavailable("iperf3 between two hosts: unable to connect")

    monkeypatch.setattr(lab.run, "line_rate_mbit", line_rate_mbit)
    monkeypatch.setattr(Run, "_take_turns", lambda run, *_: run.turns.update(ddp=[turn(run._trace.layers)]))
    run = Run(Scenario("s", "s", "cifar10-quick", ("ddp",)), Progress())
    run.measure()
    (record,) = run.records()
    assert (record["line_rate_mbit"], record["line_rates_mbit"]) == (574.0, [574.0, 551.0])
    assert record["step_s"]["count"] == 1
    assert "s: the line rate is that of before the turns: iperf3 between two hosts" in capsys.readouterr().err


def test_an_iperf3_that_does_not_end_is_ended_and_one_without_a_result_said_to_be(monkeypatch):
    monkeypatch.setattr(lab.run, "LINE_RATE_TIMEOUT_S", 0.1)
    endless, failing = (
        subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        for script in ("exec sleep 600", "exit 3")
    )
    with pytest.raises(Unavailable, match="took longer than"):
        lab.run._answer(endless)
    assert endless.poll() is not None
    monkeypatch.setattr(lab.run, "LINE_RATE_TIMEOUT_S", 60.0)
    assert lab.run._answer(failing) == {"error": "it ended with status 3 and no result"}


@pytest.mark.usefixtures("no_cluster")
def test_the_limit_is_that_of_what_the_layers_chose_to_send_by_the_end(monkeypatch):
    def measured(*penstock_facts):
        def take_turns(self, *_):
            layers = self._trace.layers
            self.turns = {"ddp": [turn(layers)], "penstock": [turn(layers, facts=facts) for facts in penstock_facts]}

        monkeypatch.setattr(Run, "_take_turns", take_turns)
        run = Run(Scenario("s", "s", "vgg19", ("penstock", "ddp"), hosts=4, compute_s=2.0), Progress())
        run.measure()
        return run

    rates_mbit = itertools.cycle([700.0, 955.0, 960.0, 883.0])  # all but one disturbed
    monkeypatch.setattr(lab.run, "line_rate_mbit", lambda *_: next(rates_mbit))
    trace = NETWORKS["vgg19"]()
    store_s = store_wire_s(trace, 4, 120e6)
    sent = {layer.name: 1_000_000 for layer in trace.layers if layer.tensors}
    early, late = (
        {"schemes": schemes, "wire_bytes": sent}
        for schemes in ({"fc6": "store", "fc7": "factors"}, {"fc6": "factors", "fc7": "store"})
    )
    full = measured()
    assert full.line_rates_mbit == [700.0, 955.0, 960.0, 883.0]
    assert (full.schemes, full.limits) == ({}, limits(trace.compute(2.0), store_s))
    chosen = measured(early, late)
    assert chosen.schemes == {"fc6": "factors"}
    wire_s = [
        1 / 120 if layer.name == "fc6" else of_store for layer, of_store in zip(trace.layers, store_s, strict=True)
    ]
    assert chosen.limits == limits(trace.compute(2.0), wire_s)
    assert chosen.limits.serial_s < full.limits.serial_s - 5  # one and a half times 411 MB
    record = next(record for record in chosen.records() if record["system"] == "ddp")
    assert record["schemes"] == {"fc6": "factors"}
    assert record["limits"]["serial_s"] == pytest.approx(chosen.limits.serial_s, abs=1e-5)


def test_dilation_is_noted_and_changes_nothing_else():
    def records(dilation):
        run = Run(
            Scenario("s", "s", "cifar10-quick", ("alone", "ddp"), rate_mbit=100, dilation=dilation), progress=None
        )
        run.limits = Limits(1.0, 1.0, 1.0, 1.0)
        run.missing["ddp"] = "not run in this test"
        run.turns["alone"] = [turn(run._trace.layers)]
        return list(run.records())

    plain, dilated = records(1.0), records(4.0)
    assert [record["dilation"] for record in dilated] == [4.0, 4.0]
    assert [{**record, "dilation": 1.0} for record in dilated] == plain


def test_a_peer_that_is_not_installed_is_reported(monkeypatch):
    def python_of(environment):
        raise Missing(f"{environment} is not here")

    monkeypatch.setattr(peers, "python_of", python_of)
    run = Run(Scenario("s", "s", "cifar10-quick", ("alone", "horovod")), progress=None)
    assert list(run._pythons()) == ["alone"]
    assert run.missing == {"horovod": "horovod is not here"}


def test_a_turn_says_how_many_cores_the_hypervisor_withheld_meanwhile(monkeypatch):
    class Answered(Session):
        def __init__(self):
            self._size, self._step_s, self._servers = 1, 1.0, []

        def _tell(self, text):
            pass

        def _answers(self, seconds):
            stats = {"lead_in": 1, "all_steps": [100.0, 103.0]}
            return [{"stats": stats, "wall": [101.0, 103.0], "seconds": [0.9, 1.1], "cpu_s": 0.2, "facts": {}}]

    counters = SimpleNamespace(samples=[[(100.0, 0, 0), (103.0, 300, 600)]], wait_past=lambda moment: None)
    monkeypatch.setattr(lab.session, "time", SimpleNamespace(monotonic=iter([99.0, 103.0]).__next__))
    monkeypatch.setattr(lab.session, "stolen_seconds", iter([50.0, 50.6]).__next__)
    taken = Answered().turn(2, counters)
    assert taken.stolen_cores == pytest.approx(0.6 / 4)
    assert (taken.step_s, taken.received, taken.sent) == (1.0, [100.0], [200.0])
    assert taken.seconds == [[0.9, 1.1]]


class FakeSession:
    """Notes what becomes of a system's processes."""

    def __init__(self, log, system):
        self.log, self.system = log, system
        log.append(f"+{system}")

    def ready(self):
        pass

    def turn(self, steps, counters):
        self.log.append(self.system)

    def end(self):
        self.log.append(f"-{self.system}")


@pytest.mark.parametrize("room_for", [1, 2, 4])
def test_turns_are_interleaved_and_systems_live_on_if_they_are_quiet_and_leave_room(room_for, monkeypatch, tmp_path):
    log, alive = [], set()
    systems = ("alone", "ddp", "horovod", "mxnet-p3")
    run = lab.run.Run(Scenario("s", "s", "cifar10-quick", systems, repetitions=3), Progress())
    each = run._scenario.hosts * (lab.run.PROCESS_BYTES + lab.run.COPIES_OF_MODEL * run._trace.nbytes)

    class Living(FakeSession):
        def __init__(self, system):
            super().__init__(log, system)
            alive.add(system)
            assert len(alive) <= room_for

        def end(self):
            super().end()
            alive.remove(self.system)

    monkeypatch.setattr(lab.run, "Session", lambda cluster, scenario, system, *rest: Living(system.name))
    monkeypatch.setattr(lab.run, "free_bytes", lambda: 1.3 * each * (room_for - len(alive)))
    run._take_turns(None, None, dict.fromkeys(systems, "python"), tmp_path)
    assert [entry for entry in log if entry in systems] == list(systems) * 3
    assert not alive
    starts = [log.count(f"+{system}") for system in systems]
    assert starts == {1: [3, 3, 3, 3], 2: [1, 3, 3, 3], 4: [1, 1, 3, 1]}[room_for], "Horovod's are restless"


def test_turns_of_a_system_that_failed_count_as_done(monkeypatch, tmp_path):
    class Failing(FakeSession):
        def turn(self, steps, counters):
            if self.system == "ddp":
                raise SystemFailed("ddp: it has ended")

    monkeypatch.setattr(lab.run, "Session", lambda cluster, scenario, system, *rest: Failing([], system.name))
    systems, progress = ("alone", "ddp"), Progress()
    run = lab.run.Run(Scenario("s", "s", "cifar10-quick", systems, repetitions=3), progress)
    run._take_turns(None, None, dict.fromkeys(systems, "python"), tmp_path)
    assert (run.missing, progress.turns) == ({"ddp": "ddp: it has ended"}, 6)


def test_the_bars_of_allreduce_are_for_calls_and_for_gradients():
    def record(target, **arms):
        medians = {name: {"ratio": {"median": a}, "of_limit": {"median": b}} for name, (a, b) in arms.items()}
        return {"target_ratio": target, "arms": medians}

    assert allreduce.missed(record(0.9, call=(0.9, 2.0), book=(0.89, 2.0), ring=(1.5, 1.0))) == []
    assert allreduce.missed(record(0.9, call=(0.91, 1.0), book=(0.92, 1.0))) == ["call", "book"]
    assert allreduce.missed(record(1.05, call=(2.0, 1.05), book=(2.0, 1.06))) == ["book"]

"""What all worker programs share: the conversation, the clocks, errors in one line, an end on every path."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker_scene import ROOT, Scene, environ, free_port

from lab.systems.worker import BadSpec, Job, interface_of

IDLE = Path(__file__).with_name("idle_system.py")
SPEC = {"network": "any", "compute_s": 0.0, "warmup": 1}
ENVIRON = {"LAB_RANK": "1", "LAB_SIZE": "2", "LAB_HOST": "127.0.0.1", "LAB_ROOT": "127.0.0.1", "LAB_PORT": "1"}
GONE_S = 60.0


def idle(folder, **options):
    spec = folder / "spec.json"
    spec.write_text(json.dumps({**SPEC, "options": options}))
    return [sys.executable, str(IDLE), str(spec)]


def wait_until_gone(pid):
    until = time.monotonic() + GONE_S
    while time.monotonic() < until:
        try:
            state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # its new parent may take its time to reap it
            return True
        time.sleep(0.05)
    return False


def test_steps_are_timed_between_their_ends_after_a_lead_in(tmp_path):
    with Scene(idle(tmp_path, step_s=0.05), 1, tmp_path) as scene:
        scene.replies("ready")
        scene.ask({"steps": 3})
        [told] = scene.replies("steps")
        scene.ask({"steps": 2, "lead_in": 0})
        [plain] = scene.replies("steps")
        assert scene.quit() == [0]
    assert len(told["seconds"]) == 3 and all(0.045 < seconds < GONE_S for seconds in told["seconds"])
    assert sum(told["seconds"]) == pytest.approx(told["wall"][1] - told["wall"][0])
    assert told["stats"]["lead_in"] == 1
    assert told["stats"]["done"] == 4 and told["stats"]["nested"] == {"twice": [8]}  # of these steps alone
    began, ended = told["stats"]["all_steps"]
    assert began <= told["wall"][0] - 0.045 and told["wall"][1] <= ended
    assert plain["stats"]["done"] == 2 and len(plain["seconds"]) == 2


def test_processor_time_includes_the_hosts_other_processes(tmp_path):
    with Scene(idle(tmp_path, step_s=0.5, busy_child=True), 1, tmp_path) as scene:
        scene.replies("ready")
        scene.ask({"steps": 1})
        assert scene.replies("steps")[0]["cpu_s"] > 0.01  # its own is a tenth of that, and its child never rests
        scene.ask({"digest": True})
        assert scene.replies("digest")[0]["tensors"] == {"weight": [1.0, 2.0]}
        assert scene.quit() == [0]


def test_a_step_that_does_not_end_is_ended(tmp_path):
    command = idle(tmp_path, step_s=0.0)
    with Scene(command, 1, tmp_path) as scene:
        scene.replies("ready")
        assert scene.quit() == [0]
    program = f"import sys; from lab.systems import worker; worker.START_S = 1.0\nsys.argv = {command[1:]!r}\n"
    program += f"import runpy; runpy.run_path({command[1]!r}, run_name='__main__')"
    idle(tmp_path, stuck=True, step_timeout_s=0.5)
    with Scene([sys.executable, "-c", program], 1, tmp_path) as scene:
        assert scene.processes[0].wait(GONE_S) == 124
        assert "rank 0: the start took longer than 2 s" in scene.log(0)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({**SPEC, "options": {"stuk": True}}, "unknown option 'stuk'"),
        ({"network": "any"}, "'compute_s' is missing"),
    ],
)
def test_an_error_is_one_line_with_the_rank(tmp_path, spec, complaint):
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, str(IDLE), str(path)],
        env=environ(1, 2, free_port()),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GONE_S,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "rank 1: BadSpec" in line and complaint in line


def test_it_ends_when_its_input_ends(tmp_path):
    with Scene(idle(tmp_path), 1, tmp_path) as scene:
        scene.replies("ready")
        scene.processes[0].stdin.close()
        assert scene.processes[0].wait(GONE_S) == 0


def test_nobody_outlives_a_killed_parent(tmp_path):
    command = idle(tmp_path, stuck=True, busy_child=True)
    program = (
        "import subprocess, sys, time\n"
        f"process = subprocess.Popen({command!r}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environ(0, 1, 1), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            worker = int(parent.stdout.readline())
            children = Path(f"/proc/{worker}/task/{worker}/children")
            until = time.monotonic() + GONE_S
            while not (found := children.read_text().split()) and time.monotonic() < until:
                time.sleep(0.05)
            assert found, "the worker has not started its child"
        finally:
            parent.kill()
    assert wait_until_gone(worker)
    assert all(wait_until_gone(int(pid)) for pid in found)


def test_a_whole_trace_can_be_given():
    layer = {"name": "one", "kind": "linear", "tensors": [["one.weight", [3, 4]]], "flops": 24.0}
    job = Job.read({**SPEC, "network": {"name": "tiny", "batch": 8, "layers": [layer]}, "batch": 2}, ENVIRON)
    trace = job.trace()
    assert trace.elems == 12 and trace.batch == 2 and trace.layers[0].rows == 1


def test_an_unknown_network_names_the_known_ones():
    with pytest.raises(BadSpec, match=r"no network 'any'; there are .*resnet50"):
        Job.read(SPEC, ENVIRON).trace()


def test_interfaces_are_found_by_address():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(BadSpec, match="no interface"):
        interface_of("192.0.2.1")


def test_the_table_of_systems_is_complete():
    from lab.systems import LOCAL_SYSTEMS, SYSTEMS

    modes = {
        "penstock",
        "penstock-store",
        "penstock-elastic",
        "penstock-encrypted",
        "penstock-update",
        "penstock-whole-tensors",
        "penstock-adam",
        "penstock-adam-update",
        "penstock-bf16",
        "penstock-vanilla",
        "penstock-wait-free",
        "penstock-fifo",
        "penstock-slicing",
    }
    peers = {"ddp", "ddp-bf16", "ddp-powersgd", "horovod", "mxnet-sync", "mxnet-sync-update", "mxnet-p3"}
    assert set(SYSTEMS) == {"alone", *modes, *peers}
    assert set(LOCAL_SYSTEMS) == {"penstock-diloco", "penstock-async", "torchft-diloco", "mxnet-async"}
    for name, system in (*SYSTEMS.items(), *LOCAL_SYSTEMS.items()):
        assert system.name == name
        assert (ROOT / (system.module.replace(".", os.sep) + ".py")).is_file()
    spec = SYSTEMS["mxnet-p3"].spec({"steps": 1, "options": {"lr": 0.1}})
    assert spec == {"steps": 1, "options": {"store": "p3", "lr": 0.1}}

"""Traces of real jobs: each rank a process, its file merged with the others' and opened."""

import itertools
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from statistics import median

import programs
import pytest
from opened import opened

from penstock._native import RECORD, checksum
from penstock.cli import main
from penstock.tracing import merging
from penstock.tracing.moments import NO_LAYER, STEP_ENDS, decoded

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("traced_worker.py")
STEPS = 5  # of the worker
LIMIT_S = 120


def run(directory, mode, size=2):
    programs.run_ranks(size, WORKER, directory, mode, timeout=LIMIT_S)
    return [json.loads((directory / f"said-{rank}.json").read_text()) for rank in range(size)]


def merged(directory, capsys, *options):
    """The summary, and the trace that was written."""
    output = directory / "merged.json.gz"
    assert main(["trace", "merge", str(directory), "-o", str(output), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out), opened(output)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four ranks, from the first slice to the last; the test that is first pays for it."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory, "whole", size=4)


def test_slices_are_as_many_as_the_report_says_and_the_trace_is_whole(whole, capsys):
    directory, said = whole
    summary, trace = merged(directory / "traces", capsys)
    assert (summary["missing"], summary["frame_ends_alone"], summary["kineto"]) == ([], 0, [])
    for rank, one in enumerate(summary["ranks"]):
        slices = said[rank]["slices"]
        assert slices > STEPS * 10
        assert (one["slices"], one["slices_reported"]) == (slices, slices)
        assert len(trace.of(f"rank {rank}, slices", kind="slice")) == slices
        assert (one["records_lost"], one["moments_dropped"], one["torn"]) == (0, 0, None)
        assert one["clock_by"] == ("reference" if rank == 0 else "same machine")
        for name in ("frames queued", "slices in flight"):
            values = [value for _, value in trace.counters[f"rank {rank}", name]]
            assert max(values) > 0 and values[-1] == 0
    assert trace.about["ranks"] == summary["ranks"]


def test_the_program_s_row_has_steps_and_what_they_are_made_of(whole, capsys):
    directory, _ = whole
    _, trace = merged(directory / "traces", capsys)
    for rank in range(4):
        row = trace.of(f"rank {rank}", "program")
        steps = [span for span in row if span["cat"] == "step" and span["name"].startswith("step ")]
        assert [span["name"] for span in steps] == [f"step {number}" for number in range(STEPS)]
        for step in steps:
            inside = [s for s in row if step["ts"] <= s["ts"] < step["ts"] + step["dur"] and s is not step]
            phases = [s["name"] for s in inside if s["name"] in ("input", "forward", "backward", "optimizer.step")]
            assert [name for name in phases if name != "input"] == ["forward", "backward", "optimizer.step"]
            forward = [s["name"] for s in inside if s["cat"] == "forward" and s["name"] != "forward"]
            backward = [s["name"] for s in inside if s["cat"] == "backward" and s["name"] != "backward"]
            assert forward == ["0", "2", "3"]
            assert set(backward) <= {"3", "2", "0"} and backward[-1] == "0"
        assert any(s["cat"] == "update" for s in row)


def test_pushes_come_before_sums_and_sums_before_answers_on_one_clock(whole, capsys):
    directory, _ = whole
    _, trace = merged(directory / "traces", capsys)
    kinds = {"push": 0, "answer": 0}
    for name, source, target in trace.arrows:
        kinds[name] += 1
        assert (source["cat"], target["cat"]) == (("push", "sum") if name == "push" else ("sum", "answer"))
        assert source["args"] == {**source["args"], **{key: target["args"][key] for key in ("book", "slice", "round")}}
        assert source["ts"] <= target["ts"] + 0.001
    sums = sum(len(trace.of(f"rank {rank}", "sums")) for rank in range(4))
    assert 0 < kinds["push"] <= sums and kinds["answer"] == 3 * sums
    for rank in range(4):
        for _, spans in itertools.groupby(trace.of(f"rank {rank}, slices"), key=lambda span: span["cat"] == "slice"):
            stages = [span["cat"] for span in spans]
            order = ["lane", "queue", "wire", "others:", "lane", "sum", "queue", "wire", "landing", "landed:"]
            assert stages == ["slice"] * len(stages) or is_subsequence(stages, order), stages


def is_subsequence(few, many):
    rest = iter(many)
    return all(one in rest for one in few)


def moved(path, by_ns):
    """The file of a rank as it would be if its clock were ahead by so much, on a machine of its own."""
    data = path.read_bytes()
    found, at = [], 0
    while at < len(data):
        end = data.index(b"\n", at) + 1
        said = json.loads(data[at:end])
        payload = data[end : end + said.get("nbytes", 0)]
        at = end + len(payload)
        if "penstock_trace" in said:
            said["boot"] = f"that of {path.name}"
        if "clock" in said:
            said["clock"][0] += by_ns
        if said.get("block") == "records":
            payload = b"".join(
                struct.pack("<Q", time + by_ns) + rest for time, rest in struct.iter_unpack("<Q24s", payload)
            )
        elif said.get("block") == "moments":
            payload = b"".join(
                struct.pack("<qq", time + by_ns, what) for time, what in struct.iter_unpack("<qq", payload)
            )
        if payload:
            said["xxh3"] = checksum(payload)
        found.append(json.dumps(said).encode() + b"\n" + payload)
    path.write_bytes(b"".join(found))


def test_skews_of_a_real_job_are_found_and_the_order_of_causes_is_kept(whole, tmp_path, capsys):
    directory, said = whole
    skews = [0, 3_600 * 10**9, -17_000_001, 12_345]
    for path in (directory / "traces").glob("*.trace"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for rank, skew in enumerate(skews):
        moved(next(tmp_path.glob(f"rank-{rank}.*")), skew)
    summary, trace = merged(tmp_path, capsys)
    for one, skew in zip(summary["ranks"], skews, strict=True):
        error = abs(one["clock_offset_ns"] - skew)
        assert error <= one["clock_error_ns"] < 5_000_000, f"rank {one['rank']}: off by {error}: {one}"
        assert one["clock_by"] == ("frames" if one["rank"] else "reference")
    assert sum(len(trace.of(f"rank {rank}, slices", kind="slice")) for rank in range(4)) == sum(
        one["slices"] for one in said
    )
    bound_us = max(one["clock_error_ns"] for one in summary["ranks"]) / 1e3
    for _, source, target in trace.arrows:
        assert source["ts"] <= target["ts"] + 2 * bound_us


def test_a_range_of_steps_a_with_statement_and_what_is_refused_meanwhile(tmp_path, capsys):
    said = run(tmp_path, "some")
    for one in said:
        assert "a trace is being written to" in one["while one is written"]
        assert one["a fork"] == 0
        assert (one["observed after"], one["observed within"], one["ended"]) == (False, True, [True, True])
    summary, trace = merged(tmp_path / "traces", capsys)
    for rank, one in enumerate(summary["ranks"]):
        assert (one["why_ended"], one["steps"], one["slices"]) == ("2 steps", 2, one["slices_reported"])
        steps = [s["name"] for s in trace.of(f"rank {rank}", "program", "step") if s["name"].startswith("step ")]
        assert steps == ["step 2", "step 3"]
        # What step 3 has left outstanding is in it, too: all of its slices are made use of.
        last = [s for s in trace.of(f"rank {rank}, slices", kind="slice") if s["args"]["round"] == 4]
        assert last and all(s["args"]["book"] == "model0.gradients" for s in last)
    summary, _ = merged(tmp_path / "more", capsys)
    assert [(one["why_ended"], one["steps"]) for one in summary["ranks"]] == [("stopped", 2)] * 2


def test_a_rank_that_is_killed_leaves_what_is_whole(tmp_path, capsys):
    with pytest.raises(AssertionError, match="status -9"):
        run(tmp_path, "killed")
    traces = tmp_path / "traces"
    for path in traces.glob("*.trace"):  # killed in the middle of a write
        path.write_bytes(path.read_bytes()[:-7])
    assert main(["trace", "merge", str(traces), "-o", str(tmp_path / "never.json")]) == 2
    error = capsys.readouterr().err
    assert re.search(r"rank-0\.\w+-1\.trace is torn: it ends in the middle of block \d+", error) and "--torn" in error
    assert not (tmp_path / "never.json").exists()
    summary, trace = merged(traces, capsys, "--torn")
    for rank, one in enumerate(summary["ranks"]):
        assert "in the middle" in one["torn"] and one["slices"] > 0
        assert len(trace.of(f"rank {rank}, slices", kind="slice")) == one["slices"]
    assert main(["trace", "merge", str(traces), "--torn"]) == 0
    assert "torn: it ends in the middle" in capsys.readouterr().out


def test_pytorch_s_own_trace_of_the_same_steps_is_beside_ours_on_the_same_clock(tmp_path, capsys):
    run(tmp_path, "profiled")
    summary, trace = merged(tmp_path / "traces", capsys)
    assert [(one["rank"], one["file"]) for one in summary["kineto"]] == [(0, "profile-0.json"), (1, "profile-1.json")]
    for rank in range(2):
        (process,) = (name for name in trace.processes.values() if name.startswith(f"rank {rank}, PyTorch: python"))
        theirs = [s for s in trace.of(process) if s["name"].startswith("Optimizer.step#SGD")]
        ours = [s for s in trace.of(f"rank {rank}", "program") if s["name"] == "optimizer.step"]
        assert len(ours) == STEPS and theirs
        # Both times of day and Kineto's own clock have their errors, and a thread may lose its processor between them.
        off = [min(max(one["ts"] - s["ts"], s["ts"] - one["ts"] - one["dur"]) for one in ours) for s in theirs]
        assert median(off) < 2_000, (off, theirs, ours)


@pytest.mark.parametrize("mode", ["ways", "owners", "store"])
def test_other_ways_than_averages_by_the_store_are_traced_too(mode, tmp_path, capsys):
    programs.run_ranks(3, WORKER, tmp_path, mode, timeout=LIMIT_S)
    summary, trace = merged(tmp_path / "traces", capsys)
    for rank, one in enumerate(summary["ranks"]):
        assert one["slices"] == one["slices_reported"] == len(trace.of(f"rank {rank}, slices", kind="slice")) > 0
        assert one["steps"] == (0 if mode == "store" else STEPS)
        assert trace.of(f"rank {rank}, layers", kind="layer")
        wires = [s for other in {0, 1, 2} - {rank} for s in trace.of(f"rank {rank}", f"wire to rank {other}")]
        assert wires and all(s["args"]["nbytes"] > 0 for s in wires if s["cat"] == "push")


def test_a_rank_that_others_wait_for_is_named_with_the_layer_and_the_cause(tmp_path, capsys):
    run(tmp_path, "late")
    assert main(["trace", "merge", str(tmp_path / "traces")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^rank 1 is late by \d+\.\d ms of [\d.]+ per step from 0 on, in compute \(\+", said, re.M), said
    summary, _ = merged(tmp_path / "traces", capsys)
    other, late = summary["late"]
    assert (other["stands_out"], late["stands_out"], late["cause"]) == (False, True, "compute")
    assert 20 < late["late_ms"] < late["step_ms"]


def test_of_asynchronous_training_nobody_is_called_late(tmp_path, capsys):
    run(tmp_path, "async")
    assert main(["trace", "merge", str(tmp_path / "traces")]) == 0
    said = capsys.readouterr().out
    assert "model0.gradients is asynchronous: no rank waits for another, so none is late\n" in said
    assert not re.search(r"is late by|no rank is late by", said), said
    summary, _ = merged(tmp_path / "traces", capsys)
    assert (summary["late"], summary["asynchronous"]) == ([], ["model0.gradients"])
    assert [one["steps"] for one in summary["ranks"]] == [2 * STEPS] * 2


# Files and options, without jobs


def copied(whole, tmp_path):
    for path in (whole[0] / "traces").glob("*.trace"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return sorted(tmp_path.glob("*.trace"))


def fails(capsys, *arguments):
    assert main(["trace", "merge", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_merged_is_said_by_name(whole, tmp_path, capsys):
    assert "has no file *.trace" in fails(capsys, tmp_path)
    assert "is no directory" in fails(capsys, tmp_path / "nowhere")
    first, second, *_ = copied(whole, tmp_path)
    again = tmp_path / "rank-0.again.trace"
    again.write_bytes(first.read_bytes())
    assert "are both of rank 0" in fails(capsys, tmp_path)
    job = json.loads(first.read_bytes().split(b"\n", 1)[0])["job"]
    again.write_bytes(first.read_bytes().replace(job.encode(), b"ef" * 16))
    error = fails(capsys, tmp_path)
    assert f"{job[:8]}-1" in error and "efefefef-1" in error and "--job" in error
    assert main(["trace", "merge", str(tmp_path), "--job", f"{job[:8]}-1"]) == 0
    capsys.readouterr()
    assert "has no trace of job nothing" in fails(capsys, tmp_path, "--job", "nothing")
    again.write_bytes(b"something else\n")
    assert f"{again} is no trace of Penstock" in fails(capsys, tmp_path)
    again.unlink()
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "is no trace of PyTorch's profiler" in fails(capsys, tmp_path, "--kineto", f"1={other}")
    second.unlink()
    assert main(["trace", "merge", str(tmp_path)]) == 0
    assert "no file of rank 1" in capsys.readouterr().out


def test_a_profile_that_says_no_rank_is_left_out_or_given_one(whole, tmp_path, capsys):
    copied(whole, tmp_path)
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "baseTimeNanoseconds": 10**18,
                "traceEvents": [{"ph": "M", "name": "process_name", "pid": -5, "tid": 0, "args": {"name": "python"}}],
            }
        )
    )
    assert main(["trace", "merge", str(tmp_path)]) == 0
    assert f"{profile} is left out" in capsys.readouterr().err
    summary, trace = merged(tmp_path, capsys, "--kineto", f"3={profile}")
    assert summary["kineto"] == [{"rank": 3, "file": "profile.json"}]
    assert "rank 3, PyTorch: python" in trace.processes.values()
    assert "rank 9 has no trace" in fails(capsys, tmp_path, "--kineto", f"9={profile}")
    with pytest.raises(SystemExit):
        main(["trace", "merge", str(tmp_path), "--kineto", "profile.json"])
    assert "is not RANK=FILE" in capsys.readouterr().err


def test_moments_are_those_of_the_steps(whole):
    directory, _ = whole
    found = merging.read_all(directory / "traces", RECORD)
    for trace in found.traces.values():
        noted = list(decoded(bytes(trace.moments)))
        assert sum(moment == STEP_ENDS for _, moment, _, _ in noted) == STEPS
        layers = {layer for _, _, _, layer in noted} - {NO_LAYER}
        assert layers == {0, 1, 2}


BAD = """
import os, sys, pathlib
import penstock as ps
def refused(*arguments, **named):
    try:
        ps.trace(*arguments, **named)
    except ps.ConfigError as error:
        return str(error)
print(refused("here"))
ps.init(rank=0, world_size=1)
for steps in (0, -1, True, 1.5, "3", range(5, 5), range(0, 9, 2), range(9, 0, -1)):
    message = refused("here", steps=steps)
    assert message is not None and "step" in message, (steps, message)
pathlib.Path("file").write_text("")
for directory in ("file", "file/inner", "/proc/none", 7, None):
    message = refused(directory)
    assert message is not None and str(directory) in message, (directory, message)
trace = ps.trace("alone", steps=3)
assert trace.has_ended and trace.path.exists()
with ps.trace("alone", steps=range(7, 9)) as again:
    assert again.path != trace.path
ps.shutdown()
try:
    ps.init(rank=0, world_size=1, trace="file")
except ps.ConfigError as error:
    print(error)
"""


def test_bad_arguments_are_refused_at_the_call_and_one_process_has_a_trace_too(tmp_path, capsys):
    done = subprocess.run([sys.executable, "-c", BAD], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    before, option = done.stdout.splitlines()
    assert "before penstock.init" in before and "cannot write to file" in option
    assert "has traces of several jobs, or several of one" in fails(capsys, tmp_path / "alone")
    job = next((tmp_path / "alone").glob("*-2.trace")).name.split(".")[1]
    assert main(["trace", "merge", str(tmp_path / "alone"), "-o", str(tmp_path / "one.json"), "--job", job]) == 0
    opened(tmp_path / "one.json")

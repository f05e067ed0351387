"""The page of traces that real jobs have written; and how a browser shows it, where there is one."""

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import programs
import pytest
from made_traces import Made
from reading_pages import read

from penstock._native import RECORD
from penstock.cli import main
from penstock.trace_report.findings import HIDDEN, PARTS, find
from penstock.trace_report.page import render
from penstock.tracing.merging import read_all

pytestmark = pytest.mark.slow
WORKER = Path(__file__).resolve().parents[1] / "tracing" / "traced_worker.py"
ROOT = Path(__file__).resolve().parents[2]
STEPS = 5  # of the worker
LIMIT_S = 120
SECRET = "a secret of no other page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def run(directory, mode, size=2):
    environ = {**os.environ, "PENSTOCK_SECRET": SECRET}
    programs.run_ranks(size, WORKER, directory, mode, timeout=LIMIT_S, env=environ)
    return [json.loads((directory / f"said-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Of two ranks from the first slice to the last: what they say, and what is found."""
    directory = tmp_path_factory.mktemp("whole")
    said = run(directory, "whole")
    return directory, said, find(read_all(directory / "traces", RECORD))


def test_bytes_are_those_of_the_report(whole):
    _, said, found = whole
    assert (found["frame_ends_alone"], found["missing"], found["lost"]) == (0, [], 0)
    for rank, one in enumerate(said):
        assert sum(found["network"]["sent_bytes"][rank]) == pytest.approx(one["bytes_sent"], rel=1e-6)
        assert sum(found["network"]["received_bytes"][rank]) == pytest.approx(one["bytes_received"], rel=1e-6)
    layers = [one for one in found["layers"] if one["book"] == "model0.gradients"]
    assert {one["layer"] for one in layers} == {"0", "2", "3"}
    of_ranks = Counter()
    for one in said:
        of_ranks.update({layer["name"]: layer["bytes_sent"] for layer in one["books"]["model0.gradients"]})
    for one in layers:
        assert one["sent_bytes"] * one["rounds"] * 2 == pytest.approx(of_ranks[one["layer"]])


def test_steps_and_shares_add_up(whole):
    _, _, found = whole
    assert [one["steps"] for one in found["steps"]] == [STEPS, STEPS]
    for one in found["steps"]:
        assert set(one["parts_ms"]) == set(PARTS) and all(took >= 0.0 for took in one["parts_ms"].values())
        assert one["parts_ms"]["forward"] > 0.0 and one["parts_ms"]["backward"] > 0.0
    for one in found["hidden"]:
        assert set(one["shares"]) == set(HIDDEN) and sum(one["shares"].values()) == pytest.approx(1.0)


def test_the_cost_model_and_the_start_are_in_the_traces(whole):
    directory, _, found = whole
    prediction = found["prediction"]
    assert prediction["why_not"] is None and prediction["measured_s"] > 0.0
    times = prediction["times"]
    assert 0.0 < times["compute_s"] <= times["chosen_s"] <= times["ddp_s"]
    # Of two ranks each sends half of the gradients and half of the averages, give or take a slice.
    assert prediction["direction_bytes"] == pytest.approx(prediction["predicted_bytes"], rel=0.25)
    said = {one["what"]: [value["value"] for value in one["values"]] for one in found["start"]}
    assert said["launcher"] == ["torchrun, or penstock run"] and said["program"] == ["traced_worker.py"]
    assert said["option trace_steps"] == ["1000 (argument trace_steps)"]
    assert said["option secret"] == ["given (environment variable PENSTOCK_SECRET)"]
    text = render(found)
    read(text)
    assert SECRET not in text and not any(
        SECRET.encode() in path.read_bytes() for path in (directory / "traces").glob("*.trace")
    )


@pytest.mark.parametrize(
    "mode", ["ways", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("owners", "store", "async", "late"))]
)
def test_other_ways_of_training_have_a_page_too(mode, tmp_path):
    size = 2 if mode in ("async", "late") else 3
    programs.run_ranks(size, WORKER, tmp_path, mode, timeout=LIMIT_S)
    assert main(["report", str(tmp_path / "traces"), "-o", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = read(text)
    if mode == "store":
        assert "There are no steps" in page.text
    elif mode == "async":
        assert "no rank waits for another" in page.text and "training is asynchronous" in page.text
    elif mode == "late":
        assert "rank 1 is late by" in page.text
    else:
        assert "Nothing is predicted" not in page.text


def test_the_page_s_commands(tmp_path, monkeypatch, capsys):
    """Of docs/traces.md, with a program of the examples."""
    program = tmp_path / "train.py"
    program.write_bytes((ROOT / "examples" / "minimal.py").read_bytes())
    environ = {**os.environ, "PENSTOCK_TRACE": str(tmp_path / "traces")}
    started = programs.start(
        "-m", "penstock", "run", "--workers", "2", program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said = started.communicate(timeout=LIMIT_S)
    assert started.returncode == 0, said
    monkeypatch.chdir(tmp_path)
    assert main(["report", "traces", "-o", "report.html"]) == 0
    page = read((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "train.py" in page.text and "Nothing is predicted" not in page.text
    capsys.readouterr()
    assert main(["report", "traces", "--json"]) == 0
    assert [one["steps"] for one in json.loads(capsys.readouterr().out)["steps"]] == [20, 20]
    assert main(["trace", "merge", "traces", "-o", "merged.json.gz", "--json"]) == 0
    assert [one["steps"] for one in json.loads(capsys.readouterr().out)["ranks"]] == [20, 20]
    assert main(["trace", "merge", "traces"]) == 0
    table = capsys.readouterr().out
    assert "same machine" in table and "ui.perfetto.dev" not in table


def browser():
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here: install the package chromium to see how a browser shows the page")
    return found


def ask(command, directory):
    """What a browser prints, in a process group of its own, of which nothing is left."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    options += [f"--user-data-dir={directory / 'profile'}", "--enable-logging=stderr"]
    process = subprocess.Popen(
        [browser(), *options, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, said
    return said


@pytest.mark.long
def test_a_browser_shows_the_page_without_a_complaint(tmp_path):
    images = pytest.importorskip("PIL.Image")
    found = find(read_all(Made(4, 40, 5, late=(2, 20)).write(tmp_path / "traces", hosts=2), RECORD))
    page = tmp_path / "report.html"
    page.write_text(render(found), encoding="utf-8")
    dom, complaints = ask(["--dump-dom", page.as_uri()], tmp_path)
    assert "CONSOLE" not in complaints, complaints  # what is refused, as by the policy, and what is wrong
    shown = read(dom[dom.index("<html") :])
    assert "rank 2 is late by" in shown.text and shown.tags.count("svg") == 4
    assert [row[0] for row in shown.tables["t-layers"][1:4]] == [one["layer"] for one in found["layers"][:3]]
    ask([f"--screenshot={tmp_path / 'page.png'}", "--window-size=1200,4000", page.as_uri()], tmp_path)
    with images.open(tmp_path / "page.png") as picture:
        assert picture.size == (1200, 4000)
        colours = picture.convert("RGB").getcolors(1 << 24)
    drawn = {tuple(bytes.fromhex(colour)) for colour in ("e45756", "4c78a8", "72b7b2", "f58518")}
    assert drawn <= {colour for count, colour in colours if count > 50}  # bars and areas of pictures are there

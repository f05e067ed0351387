"""The table of running ranks as text, by what Rich has for that; and the command, beside real jobs."""

import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import programs
import pytest

from penstock.cli import main
from penstock.live import live_table, top_command

rich_console = pytest.importorskip("rich.console", reason="penstock top takes Rich: pip install 'penstock[top]'")
LIMIT_S = 120


def rank(number, **more):
    usual = {"rank": number, "name": f"rank {number}", "host": "node1", "steps": 40, "step_ms": 123.45, "ended": None}
    usual |= {"sent_mbit": 940.06, "received_mbit": 12.0, "waited_share": 0.5, "hidden_share": 0.75}
    return {**usual, "age_s": 0.3, "silent": False, "late_ms": None, **more}


def layer(name, **more):
    usual = {"book": "model0.gradients", "layer": name, "waited_share": 0.25, "waits_most": 0, "sent_mbit": 5.0}
    return {**usual, **more}


UNKNOWN = {"ranks": [], "judged_steps": 0, "until_step": None, "why": "the option lateness is off"}


def judged(*late):
    """What a report says of who is late."""
    return {"ranks": list(late), "judged_steps": 4, "until_step": 1234, "why": None}


def late_rank(number, layer="conv1", cause="compute"):
    causes = {"compute": 29.5, "input": 0.3, "network": 0.2, "processing": 0.0}
    usual = {"rank": number, "late_ms": 30.0, "step_ms": 120.0, "from_layer": layer, "stands_out": True}
    return {**usual, "cause": cause, "causes_ms": causes}


def view(ranks, layers=(), **more):
    usual = {"job": "00010203", "size": len(ranks), "missing": [], "ended": False, "late": UNKNOWN}
    return {**usual, "ranks": ranks, "layers": layers, **more}


def text(*arguments, width=140):
    console = rich_console.Console(width=width, file=io.StringIO(), record=True)
    console.print(live_table.tables(*arguments, width))
    return console.export_text()


def line_of(shown, name):
    (line,) = [line for line in shown.splitlines() if line.startswith(name)]
    return line.split()


def test_a_rank_s_line_has_all_that_is_known_of_it():
    shown = text(view([rank(0), rank(1, step_ms=None, sent_mbit=None, waited_share=None, hidden_share=None)]), [], 40)
    assert line_of(shown, "rank 0") == ["rank", "0", "40", "123.5", "ms", "940.1", "12.0", "50.0%", "75.0%"]
    assert line_of(shown, "rank 1") == ["rank", "1", "40", "-", "-", "12.0", "-", "-"]
    assert "job 00010203: 2 of 2 ranks running on node1, step 40" in shown


def test_of_several_hosts_each_line_says_which():
    shown = text(view([rank(0), rank(1, host="node2")]), [], 40)
    assert line_of(shown, "rank 1")[:4] == ["rank", "1", "node2", "40"]
    assert "2 of 2 ranks running, step 40" in shown


@pytest.mark.parametrize("hosts", [1, 2])
def test_eighty_columns_are_enough(hosts):
    """For numbers, for who is late and by how much, and for a line each, whatever names are like."""
    names = [f"compute-node-{number}.cluster.example" for number in range(hosts)]
    ranks = [rank(number, host=names[number % hosts], steps=1_234_567, step_ms=1234.5) for number in range(12)]
    ranks[11] |= {"late_ms": 123.4, "sent_mbit": 12345.6, "received_mbit": 12345.6}
    ranks[10] |= {"ended": "PeerLost: rank 3 was lost, and nobody knows where it has gone to"}
    layers = [layer("stages.3.blocks.11.attention.query_key_value", book="discriminator.gradients", waits_most=11)]
    lines = text(view(ranks, layers), [], 24, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    (late,) = [line for line in lines if line.startswith("rank 11 ")]
    for number in ("1,234,567", "1,234.5 ms", "12,345.6", "50.0%", "75.0%", "late by 123.4 ms"):
        assert number in late, lines
    (ended,) = [line for line in lines if line.startswith("rank 10 ")]
    assert "ended: Peer" in ended
    (of_layer,) = [line for line in lines if line.startswith("stages.")]
    assert "25.0%" in of_layer and "rank 11" in of_layer and " 5.0 " in of_layer


def test_layers_of_which_nothing_would_be_seen_are_left_out():
    still = layer("parameters", waited_share=0.0, sent_mbit=0.0)
    shown = text(view([rank(0)], [layer("conv1"), layer("conv2", waited_share=0.0), still]), [], 40)
    assert "conv1" in shown and "conv2" in shown and "parameters" not in shown and "more layers" not in shown


def test_who_is_silent_or_has_ended_says_so():
    ranks = [rank(0, silent=True, age_s=12.4), rank(1, ended="PeerLost: rank 0 was lost"), rank(2)]
    shown = text(view(ranks, missing=[3], size=4), ["x.status cannot be read: no"], 40)
    assert "silent for 12 s" in shown and "ended: PeerLost: rank 0 was lost" in shown
    assert "2 of 4 ranks running" in shown and "1 have not written here" in shown
    assert "x.status cannot be read: no" in shown


def test_who_is_late_is_said_as_a_report_says_it():
    shown = text(view([rank(0), rank(1, late_ms=30.0)], late=judged(late_rank(1))), [], 40, width=200)
    why = "in compute (+29.5 ms; input +0.3, network +0.2, processing +0.0)"
    assert f"rank 1 is late by 30.0 ms of 120.0 per step from conv1 on, {why}" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("rank 1 ") and "75.0%" in line]
    assert line.rstrip().endswith("late by 30.0 ms")
    assert "nobody waits for one rank (steps until 1,234 were looked at)" in text(
        view([rank(0)], late=judged()), [], 40
    )
    assert "nothing is known of who is late: the option lateness is off" in text(view([rank(0)]), [], 40)
    many = text(view([rank(0)], late=judged(*map(late_rank, range(5)))), [], 40, width=200)
    assert many.count("is late by") == live_table.LATE_MAX and "and 3 more" in many


@pytest.mark.parametrize(("ranks", "layers", "height"), [(64, 300, 24), (64, 300, 10), (2, 300, 50), (64, 1, 40)])
def test_what_is_shown_fits_the_screen_and_the_rest_is_counted(ranks, layers, height):
    many = [rank(number, waited_share=0.9 if number != 50 else 0.1) for number in range(ranks)]
    if ranks > 50:
        many[60] |= {"silent": True, "age_s": 99.0}
        many[61] |= {"late_ms": 30.0, "host": "node2"}
    late = judged(late_rank(61)) if ranks > 50 else judged()
    shown = text(view(many, [layer(f"layer{number}") for number in range(layers)], late=late), [], height)
    lines = shown.splitlines()
    assert len(lines) <= max(height, live_table.AROUND + live_table.RANKS_MIN + live_table.LAYERS_MIN)
    listed = [line for line in lines if line.startswith("rank ") and "75.0%" in line]
    if len(listed) < ranks:
        assert f"and {ranks - len(listed)} more ranks" in shown
        for number in (50, 60, 61):  # who waits least, is silent, is late
            assert any(line.startswith(f"rank {number} ") for line in listed), number
    of_layers = sum(line.startswith("layer") and "waited" not in line for line in lines)
    assert of_layers >= min(layers, live_table.LAYERS_MIN)
    if of_layers < layers:
        assert f"and {layers - of_layers} more layers" in shown


def test_names_are_shown_as_they_are_and_are_no_markup():
    hostile = ["[red]x[/red]", "[/]", "a\x1b[31mb\x07", "[link=file:///]y", ":smile:"]
    late = judged(late_rank(0, "[blue]\x1bl[/blue]"))
    shown = text(
        view([rank(0, host="[bold]h"), rank(1)], [layer(name) for name in hostile], late=late), ["[blink]z"], 40
    )
    assert "[blue]\N{REPLACEMENT CHARACTER}l[/blue]" in shown
    for name in ("[red]x[/red]", "[/]", "a\N{REPLACEMENT CHARACTER}[31mb", "[link=file:///]y", ":smile:", "[bold]h"):
        assert name in shown, name
    assert "[blink]z" in shown and "\x1b" not in shown and "\x07" not in shown


def test_before_a_rank_has_written_it_says_how():
    console = rich_console.Console(width=120, file=io.StringIO(), record=True)
    console.print(live_table.waiting("here", ["a.status cannot be read: why"]))
    shown = console.export_text()
    assert "no rank has written to here yet" in shown and "PENSTOCK_STATUS=here" in shown and "cannot be read" in shown


# The command


PROGRAM = """
import torch
import penstock as ps

ps.init()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ps.distribute(model, optimizer)
for _ in range(30):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
ps.shutdown()
"""


@pytest.mark.slow
def test_a_job_that_was_told_where_is_shown(tmp_path, capsys):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "PENSTOCK_STATUS": str(tmp_path / "status")}
    programs.run_ranks(2, program, timeout=LIMIT_S, env=environ)
    assert main(["top", str(tmp_path / "status"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ended"] and found["missing"] == [] and [one["steps"] for one in found["ranks"]] == [30, 30]
    assert all(one["ended"] == "the job has ended" and not one["silent"] for one in found["ranks"])
    assert {"0", "1"} <= {one["layer"] for one in found["layers"]}
    # 30 steps are enough for the ranks to have looked at some of them.
    assert found["late"]["why"] is None and found["late"]["until_step"] >= 20
    assert main(["top", str(tmp_path / "status"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"0 of 2 ranks running on \S+, step 30", shown) and "rank 1" in shown and "\x1b" not in shown


@pytest.mark.slow
def test_where_there_is_no_terminal_it_looks_once(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    environ = {**os.environ, "PENSTOCK_STATUS": str(tmp_path / "status"), "RANK": "0", "WORLD_SIZE": "1"}
    done = programs.run(program, timeout=LIMIT_S, env=environ)
    assert done.returncode == 0, done.stderr
    top = subprocess.run(
        [sys.executable, "-m", "penstock", "top", str(tmp_path / "status")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert top.returncode == 0 and "of 1 ranks running" in top.stdout, top.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_it_goes_on_until_the_job_has_ended_and_leaves_a_table(tmp_path, monkeypatch):
    looks = iter(
        [
            (None, []),
            (view([rank(0, ended="of before")], ended=True), []),  # of a job before: it waits for the next one
            (view([rank(0), rank(1)]), []),
            (view([rank(0, ended="the job has ended"), rank(1, ended="the job has ended")], ended=True), []),
        ]
    )
    pauses = []
    monkeypatch.setattr(top_command, "_look", lambda options: next(looks))
    monkeypatch.setattr(top_command, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["top", str(tmp_path), "--every", "0.25"]) == 0
    shown = sys.stdout.getvalue()
    assert pauses == [0.25] * 3 and next(looks, None) is None
    assert "no rank has written" in shown and "2 of 2 ranks running" in shown
    *_, last = shown.split("\x1b[?1049l")  # what is left when the screen is given back
    assert "0 of 2 ranks running" in last


def test_ctrl_c_ends_it_well(tmp_path, monkeypatch):
    def pressed(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(top_command, "time", SimpleNamespace(sleep=pressed))
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["top", str(tmp_path)]) == 0
    assert "no rank has written" in sys.stdout.getvalue()


def test_what_is_not_there_is_an_error_of_one_line(tmp_path, capsys):
    for arguments, words in (
        ([str(tmp_path / "nowhere"), "--once"], "is no directory"),
        ([str(tmp_path), "--once"], "has no status: ranks write one with PENSTOCK_STATUS"),
        ([str(tmp_path), "--json", "--job", "abc"], "has no status of job abc"),
    ):
        assert main(["top", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_without_rich_it_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "penstock[top]" in capsys.readouterr().err

"""`penstock explain --mode`: local updates beside the synchronous choices.

That as many bytes are counted in a job tests/local/test_shortened_updates.py shows.
"""

import json
import signal
from pathlib import Path

import pytest

from penstock import cli
from penstock._native import local_rounds, local_times
from penstock.local_explanation import GAIN

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def explain(monkeypatch, capsys):
    """`penstock explain lab:vgg19` with these options, in this process."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of this process they stay

    def run(*arguments):
        try:
            status = cli.main(["explain", "lab:vgg19", *arguments])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def explained(explain):
    def run(*arguments):
        status, out, error = explain(*arguments, "--json")
        assert status == 0, error
        return json.loads(out)

    return run


DILOCO = ("--workers", "4", "--bandwidth-mbit", "50", "--mode", "diloco")


def test_a_round_moves_the_model_once_in_so_many_steps(explained):
    found = explained(*DILOCO, "--sync-every", "30")
    local, nbytes = found["local"], sum(layer["gradient_bytes"] for layer in found["layers"])
    assert local["fragment_bytes"] == [pytest.approx(2 * 3 / 4 * nbytes, rel=1e-3)]
    assert local["step_bytes"] == local["fragment_bytes"][0] / 30
    wire_s = local["fragment_bytes"][0] * 8 / 50e6
    times, compute_s = local["times"], found["times"]["compute_s"]
    assert times["mean_s"] == pytest.approx(compute_s + wire_s / 30, rel=1e-3)
    assert times["longest_s"] == pytest.approx(compute_s + wire_s, rel=1e-3)
    assert times["share"] == pytest.approx(times["mean_s"] / found["times"]["chosen_s"])
    averages = explained(*DILOCO[:-1], "local-sgd", "--sync-every", "30")["local"]
    assert {**averages, "mode": "diloco"} == local
    assert explained("--workers", "4")["local"] is None


def test_wire_types_shorten_a_round_and_need_no_servers(explained):
    whole = explained(*DILOCO)["local"]
    for wire, share in (("bf16", 1 / 2), ("int8", 1 / 4 + 1 / 128), ("int4", 1 / 8 + 1 / 128)):
        short = explained(*DILOCO, "--wire", wire)["local"]
        assert short["fragment_bytes"][0] == pytest.approx(share * whole["fragment_bytes"][0], rel=1e-5)
        apart = explained(*DILOCO, "--wire", wire, "--servers", "1", "--groups", "2")["local"]
        assert apart["fragment_bytes"] == short["fragment_bytes"], "workers own, each for itself"
    for wire, share in (("top-k", 4 / 2 * 64 * 6 / 4096 / 4), ("top-k:0.25", 4 / 2 * 1024 * 6 / 4096 / 4)):
        sparse = explained(*DILOCO, "--wire", wire)["local"]
        assert sparse["fragment_bytes"][0] == pytest.approx(share * whole["fragment_bytes"][0], rel=1e-4), "to all"
    one = explained(*DILOCO, "--servers", "1")["local"]["fragment_bytes"][0]
    assert one == pytest.approx(4 / 1.5 * whole["fragment_bytes"][0], rel=1e-3), "through one server"
    hosts = explained(*DILOCO, "--wire", "int8", "--per-host", "2")["local"]["fragment_bytes"][0]
    int8 = explained(*DILOCO, "--wire", "int8")["local"]["fragment_bytes"][0]
    assert hosts == pytest.approx(4 / 3 * int8, rel=1e-3), "two ranks share an interface, and have two others across it"


def test_a_delay_hides_what_travels_meanwhile(explained):
    options = ("--compute-s", "10", "--sync-every", "60", "--fragments", "3")
    plain = explained(*DILOCO, *options)
    hidden = explained(*DILOCO, *options, "--fragment-sync-delay", "4")
    assert len(plain["local"]["fragment_bytes"]) == 3
    assert plain["local"]["fragment_bytes"] == hidden["local"]["fragment_bytes"]
    waits = [nbytes * 8 / 50e6 for nbytes in plain["local"]["fragment_bytes"]]
    assert plain["local"]["times"]["longest_s"] == pytest.approx(10 + max(waits), rel=1e-3)
    left = [max(0, wait - 40) for wait in waits]
    assert 0 < sum(left) < sum(waits)
    assert hidden["local"]["times"]["mean_s"] == pytest.approx(10 + sum(left) / 60, rel=1e-3)
    assert hidden["local"]["times"]["longest_s"] == pytest.approx(10 + max(left), rel=1e-3)


@pytest.mark.parametrize("options", [(), ("--wire", "int4"), ("--fragments", "5", "--fragment-sync-delay", "3")])
def test_it_says_from_which_bandwidth_down_they_pay(explained, options):
    limit_mbit = explained(*DILOCO, *options)["local"]["times"]["pays_below_bytes_per_s"] * 8 / 1e6
    for factor, pays in ((0.5, True), (0.99, True), (1.01, False), (2, False)):
        there = explained("--workers", "4", "--bandwidth-mbit", str(factor * limit_mbit), *DILOCO[4:], *options)
        assert (there["local"]["times"]["share"] <= GAIN) == pays, (factor, limit_mbit)
    assert explained(*DILOCO, "--sync-every", "1")["local"]["times"]["pays_below_bytes_per_s"] is None


def test_the_text_says_what_they_are(explain):
    status, out, _ = explain(
        *DILOCO, "--sync-every", "40", "--fragments", "2", "--fragment-sync-delay", "1", "--wire", "int8"
    )
    assert status == 0
    told = " ".join(out.split())
    assert "DiLoCo instead, each 40 steps in 2 fragments as int8, hidden under 1 step: NOT the result" in told
    assert "it pays from " in told and " Mbit/s down" in told
    assert max(map(len, out.splitlines())) <= 120
    assert "DiLoCo" not in explain("--workers", "4")[1]
    assert "at no bandwidth" in explain(*DILOCO, "--sync-every", "1")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sync-every", "3"), "--sync-every is nothing of --mode sync"),
        (("--mode", "local-sgd", "--wire", "int8"), "--wire is nothing of --mode local-sgd"),
        (
            ("--mode", "diloco", "--wire", "int3"),
            "unknown wire type 'int3'; there is 'fp32', 'bf16', 'int8', 'int4', ",
        ),
        (("--mode", "diloco", "--wire", "top-k:2"), "--wire top-k:2: penstock.TopK: density=2.0"),
        (("--mode", "diloco", "--wire", "top-k:some"), "--wire top-k:some: could not convert"),
        (("--mode", "diloco", "--sync-every", "4", "--fragments", "3"), "sync_every=4 is no multiple of fragments=3"),
        (("--mode", "diloco", "--fragment-sync-delay", "30"), "fragment_sync_delay=30"),
        (("--mode", "diloco", "--fragments", "30"), "30 fragments of 19 layers"),
        (("--mode", "diloco", "--sync-every", "0"), "0 is not between 1 and"),
    ],
)
def test_what_cannot_be_is_refused(explain, options, message):
    status, _, error = explain(*options)
    assert status == 2
    assert message in error


def test_times_are_no_less_than_nothing():
    with pytest.raises(ValueError, match="times must not be negative"):
        local_times(-1.0, [], 1, 0)


def test_rounds_are_shares_of_what_the_store_moves():
    as_it_is, encoded = (600, 6.0, 400, None), (600, 6.0, 400, (100, False))
    assert local_rounds(4, [as_it_is, encoded]) == [(600, 6.0), (150, 1.5)]
    assert local_rounds(4, [(600, 6.0, 400, (100, True))]) == [(300, 3.0)], "to three others"
    with pytest.raises(ValueError, match="what is encoded must have bytes"):
        local_rounds(4, [(0, 0.0, 0, (0, False))])

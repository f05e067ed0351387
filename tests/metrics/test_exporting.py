"""Where metrics are found: ports by rank, files that are whole, errors that say what to do, and ends."""

import contextlib
import logging
import socket
import sys
import urllib.error
from pathlib import Path

import pytest
from counting_engine import CountingEngine, counts
from scraped import LIMIT_S, Scraped, scrape

import penstock as ps
from penstock import config
from penstock.metrics import exporting, exposition
from penstock.metrics.exporting import ports_of
from penstock.tracing.moments import forget_moments, moments_of

JOB = bytes.fromhex("0123abcd" + 12 * "00")
TRIES = 50


@pytest.fixture
def begin():
    """Begins metrics of a rank, and ends them with the test."""
    begun = []

    def of(metrics, rank=0, hosts=(), engine=None):
        engine = engine or CountingEngine()
        options = ps.Options(rank=rank, world_size=2, metrics=config.parse_option("metrics", metrics, "a test"))
        begun.append((engine, exporting.begin(engine, options, JOB, hosts)))
        return begun[-1][1]

    yield of
    for engine, shown in begun:
        shown.end()
        forget_moments(engine)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("rank", "hosts", "ports"),
    [
        (0, [], range(9400, 9401)),
        (0, [0, 0, 1, 1], range(9400, 9401)),
        (1, [0, 0, 1, 1], range(9401, 9402)),
        (2, [0, 0, 1, 1], range(9400, 9401)),
        (3, [0, 0, 1, 1], range(9401, 9402)),
        (3, [0, 1, 0, 0], range(9402, 9403)),  # dealt in turn, and a server behind the workers
        (4, [0, 0, 0, 1], range(9400, 9403)),  # a newcomer, on whichever host
    ],
)
def test_each_rank_of_a_host_has_its_own_port(rank, hosts, ports):
    assert ports_of(9400, rank, hosts) == ports
    assert ports_of(0, rank, hosts) == range(1)  # any


def test_a_scrape_finds_the_counts_as_they_are_then_and_none_after_the_end(begin, caplog):
    engine = CountingEngine()
    with caplog.at_level(logging.INFO, logger="penstock"):
        shown = begin(0, engine=engine)
    assert shown.place.startswith("http://127.0.0.1:") and shown.place.endswith("/metrics")
    assert f"rank 0: metrics at {shown.place}" in caplog.text
    moments = moments_of(engine)
    moments.step_ends(0)
    first = scrape(shown.place)
    moments.step_ends(0)
    engine.counts = counts(slices=71)
    second = scrape(shown.place)
    assert (first.value("penstock_slices_total"), second.value("penstock_slices_total")) == (70, 71)
    assert (first.value("penstock_steps_total"), second.value("penstock_steps_total")) == (1, 2)
    assert second.value("penstock_step_seconds_count", run="0123abcd", rank="0") == 1
    shown.end()
    shown.end()  # does nothing
    assert shown._server.socket.fileno() == -1
    with pytest.raises(urllib.error.URLError):
        scrape(shown.place)


def test_the_port_is_on_the_loopback_interface_unless_it_is_said(begin):
    assert begin(0)._server.server_address[0] == "127.0.0.1"
    other = begin("0.0.0.0:0")
    assert other._server.server_address[0] == "0.0.0.0"
    assert scrape(other.place.replace("0.0.0.0", "127.0.0.1")).value("penstock_members") == 2


def test_an_address_of_ip_6_is_served(begin):
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    shown = begin("[::1]:0")
    assert shown.place.startswith("http://[::1]:")
    assert scrape(shown.place).value("penstock_members") == 2


def test_ranks_of_a_host_are_found_one_behind_the_other(begin):
    for _ in range(TRIES):
        first = free_port()
        with contextlib.suppress(ps.ConfigError):  # somebody else has one of them
            shown = [begin(first, rank, (0, 0)) for rank in range(2)]
            break
    else:
        pytest.fail("no two free ports in succession")
    assert [one.place for one in shown] == [f"http://127.0.0.1:{first + rank}/metrics" for rank in range(2)]
    assert [scrape(one.place).by("rank", "penstock_members") for one in shown] == [{"0": 2}, {"1": 2}]


def test_a_port_that_is_taken_is_said_and_not_shared(begin):
    first = begin(0)
    port = int(first.place.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ps.ConfigError) as caught:
        begin(port)
    text = str(caught.value)
    assert f"rank 0 cannot serve metrics at 127.0.0.1, port {port}: " in text and "0 for any that is free" in text
    first.end()
    assert begin(port).place == first.place  # it is free at once


def test_a_newcomer_takes_the_port_that_a_lost_rank_has_left(begin):
    for _ in range(TRIES):
        port = free_port()
        with contextlib.suppress(ps.ConfigError):
            there, lost = (begin(port, rank, (0, 0)) for rank in range(2))
            break
    else:
        pytest.fail("no two free ports in succession")
    lost.end()
    assert begin(port, 2, (0, 0)).place == lost.place
    with pytest.raises(ps.ConfigError, match=f"rank 3 cannot serve metrics at 127.0.0.1, ports {port} to {port + 1}: "):
        begin(port, 3, (0, 0))
    assert scrape(there.place).value("penstock_members", rank="0") == 2


def test_ports_that_end_and_hosts_that_are_none_are_said(begin):
    with pytest.raises(ps.ConfigError, match=r"rank 1 cannot serve metrics at .*, port 65536: ports end at 65535"):
        begin(65535, 1, (0, 0))
    with pytest.raises(ps.ConfigError, match=r"cannot serve metrics at no\.such\.host\.invalid, port 9400: "):
        begin("no.such.host.invalid:9400")


def test_who_says_nothing_holds_up_nobody_and_neither_does_a_report_that_fails(begin, capfd):
    engine = CountingEngine()
    shown = begin(0, engine=engine)
    host, port = shown._server.server_address
    with socket.create_connection((host, port), LIMIT_S):
        assert scrape(shown.place).value("penstock_slices_total") == 70
        engine.fails_with = ps.ConfigError("in a forked child")
        with pytest.raises(OSError):
            scrape(shown.place)
        engine.fails_with = None
        assert scrape(shown.place).value("penstock_slices_total") == 70
        shown.end()
    assert capfd.readouterr() == ("", "")  # the output is the training's


def test_the_file_is_there_at_once_follows_and_is_written_at_the_end(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(exposition, "EVERY_S", 0.01)
    engine = CountingEngine()
    shown = begin(tmp_path / "penstock.prom", rank=1, engine=engine)
    path = tmp_path / "penstock-rank-1.prom"
    assert shown.place == str(path)
    assert Scraped(path.read_text()).value("penstock_slices_total", rank="1") == 70
    engine.counts = counts(slices=75)
    while engine.asked.acquire(blocking=False):
        pass
    for _ in range(3):  # the file of the first of these is there when the third begins
        assert engine.asked.acquire(timeout=LIMIT_S)
    assert Scraped(path.read_text()).value("penstock_slices_total") == 75
    monkeypatch.setattr(exposition, "EVERY_S", 3600.0)
    engine.counts = counts(slices=76)
    shown.end()
    assert Scraped(path.read_text()).value("penstock_slices_total") == 76
    engine.counts = counts(slices=77)
    shown.end()  # does nothing
    assert Scraped(path.read_text()).value("penstock_slices_total") == 76
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_an_error_at_first_and_a_warning_later(begin, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(exposition, "EVERY_S", 3600.0)
    with pytest.raises(ps.ConfigError, match=r"cannot write .*none/penstock-rank-0\.prom: No such file") as caught:
        begin(tmp_path / "none" / "penstock.prom")
    assert "rank 0 cannot" in str(caught.value) and "Make its directory" in str(caught.value)
    folder = tmp_path / "metrics"
    folder.mkdir()
    shown = begin(folder / "penstock.prom")
    folder.rename(tmp_path / "away")
    shown._write()
    shown._write()
    (tmp_path / "away").rename(folder)
    shown._write()
    folder.rename(tmp_path / "away")
    shown._write()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and all(f"cannot be written to {shown.place}" in warning for warning in warnings)


def test_without_the_library_nobody_is_met(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "current_environment", dict)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    meet = {"rank": 0, "world_size": 2, "rendezvous": f"file://{tmp_path / 'nobody'}"}
    with pytest.raises(ps.ConfigError, match=r"prometheus-client, which is missing; install penstock\[metrics\]"):
        ps.init(metrics=0, **meet)
    assert not (tmp_path / "nobody").exists()


def test_what_is_private_here_is_what_the_page_says():
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    assert f"every {exposition.EVERY_S:.0f} seconds" in page.read_text(encoding="utf-8")

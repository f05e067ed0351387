"""Which metrics there are, from an engine whose counts are known: values, labels and their bounds, in both formats."""

import re
from pathlib import Path

import pytest
from counting_engine import CountingEngine, counts, peer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from scraped import Scraped

import penstock as ps
from penstock.metrics.families import ALL_PEERS, PEERS_MAX, RankCollector
from penstock.metrics.step_histogram import BOUNDS_S, StepHistogram
from penstock.tracing.moments import forget_moments, moments_of
from penstock.version import installed_version

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
OWN = {"run": "0123abcd", "rank": "0"}


@pytest.fixture
def engine():
    one = CountingEngine()
    yield one
    forget_moments(one)


def registry_of(engine, steps=None, **options):
    options = ps.Options(**{"world_size": 2, **options})
    registry = CollectorRegistry()
    registry.register(RankCollector(engine, options, OWN["run"], steps or StepHistogram()))
    return registry


def scraped(registry):
    return Scraped(generate_latest(registry).decode())


def test_what_the_report_says_is_what_a_scrape_finds(engine):
    moments_of(engine).steps = 9
    found = scraped(registry_of(engine))
    assert found.by("peer", "penstock_sent_bytes_total") == {"1": 1010}
    assert found.by("peer", "penstock_received_bytes_total") == {"1": 2020}
    assert found.by("peer", "penstock_retransmitted_segments_total") == {"1": 7}
    assert found.by("peer", "penstock_queued_frames") == {"1": 5}
    assert found.by("peer", "penstock_queued_bytes") == {"1": 640}
    during = {"backward": 1.5, "forward": 0.25, "stalled": 0.125, "other": 2.0}
    assert found.by("during", "penstock_in_flight_seconds_total") == during
    for name, value in {
        "penstock_steps_total": 9,
        "penstock_stall_seconds_total": 0.125,
        "penstock_slices_total": 70,
        "penstock_preemptions_total": 3,
        "penstock_sent_frames_total": 30,
        "penstock_received_frames_total": 31,
        "penstock_owned_bytes": 600,
        "penstock_tensors_in_flight": 4,
        "penstock_buffer_bytes": 4096,
        "penstock_line_bytes_per_second": 125e6,
        "penstock_members": 2,
        "penstock_epoch": 0,
        "penstock_lost_members_total": 0,
        "penstock_new_members_total": 0,
    }.items():
        assert found.value(name) == value, name
    assert found.value("penstock_info", version=installed_version(), role="worker") == 1
    assert all(OWN.items() <= sample.labels.items() for sample in found.samples)


def test_what_is_not_known_is_not_said_and_a_newcomer_owns_nothing_yet(engine):
    engine.counts = counts(line_bytes_per_s=None, peers=[], size=2)
    found = scraped(registry_of(engine, rank=1))
    assert not found.by("rank", "penstock_line_bytes_per_second")
    assert not found.by("peer", "penstock_sent_bytes_total")
    assert found.value("penstock_owned_bytes") == 500
    assert scraped(registry_of(engine, rank=7)).value("penstock_owned_bytes", rank="7") == 0


def test_a_server_is_called_as_its_errors_call_it(engine):
    engine.counts = counts(size=4, peers=[peer(1, 5, 5), peer(2, 6, 6)], owned_bytes=[0, 0, 40, 60])
    found = scraped(registry_of(engine, rank=1, servers=2, role="server"))
    assert {sample.labels["rank"] for sample in found.samples} == {"server 1"}
    assert found.by("peer", "penstock_sent_bytes_total") == {"1": 5, "server 0": 6}
    assert (found.value("penstock_owned_bytes"), found.value("penstock_members")) == (60, 2)
    assert found.value("penstock_info", role="server") == 1


def test_labels_are_bounded_whatever_the_size_of_the_job(engine):
    peers = [peer(rank, rank, 2 * rank, 1, 10, 3) for rank in range(1, PEERS_MAX + 1)]
    engine.counts = counts(size=PEERS_MAX + 1, peers=peers)
    most = scraped(registry_of(engine, world_size=PEERS_MAX + 1))
    assert len(most.by("peer", "penstock_sent_bytes_total")) == PEERS_MAX
    peers.append(peer(PEERS_MAX + 1, PEERS_MAX + 1, 0))
    engine.counts = counts(size=PEERS_MAX + 2, peers=peers)
    summed = scraped(registry_of(engine, world_size=PEERS_MAX + 2))
    sent = sum(range(PEERS_MAX + 2))
    assert summed.by("peer", "penstock_sent_bytes_total") == {ALL_PEERS: sent}
    assert summed.by("peer", "penstock_received_bytes_total") == {ALL_PEERS: 2 * (sent - PEERS_MAX - 1)}
    assert summed.by("peer", "penstock_queued_frames") == {ALL_PEERS: PEERS_MAX}
    assert summed.by("peer", "penstock_retransmitted_segments_total") == {ALL_PEERS: 3 * PEERS_MAX}
    assert len(summed.samples) < len(BOUNDS_S) + 35


def test_counters_never_go_down_and_gauges_do(engine):
    registry = registry_of(engine)
    before = scraped(registry)
    # A lane that ends while it is asked is missing.
    engine.counts = counts(slices=60, frames_sent=40, tensors_in_flight=0, peers=[peer(1, 900, 3000)])
    after = scraped(registry)
    assert before.value("penstock_slices_total") == after.value("penstock_slices_total") == 70
    assert after.value("penstock_sent_frames_total") == 40
    assert after.by("peer", "penstock_sent_bytes_total") == {"1": 1010}
    assert after.by("peer", "penstock_received_bytes_total") == {"1": 3000}
    assert after.by("peer", "penstock_retransmitted_segments_total") == {"1": 7}
    assert (after.value("penstock_tensors_in_flight"), after.value("penstock_queued_frames")) == (0, 0)


def test_members_that_were_lost_and_came_are_counted_over_all_epochs(engine):
    engine.log = [([0, 1, 2], 1, []), ([0, 1], 4, []), ([0, 1], 6, []), ([0, 1, 3], 9, []), ([0, 3], 12, [])]
    engine.epoch = 4
    found = scraped(registry_of(engine, world_size=3, elastic=True))
    assert (found.value("penstock_members"), found.value("penstock_epoch")) == (2, 4)
    assert (found.value("penstock_lost_members_total"), found.value("penstock_new_members_total")) == (2, 1)


def test_steps_are_in_the_buckets_of_the_times_that_they_took(engine):
    steps = StepHistogram()
    for end_s in (100.0, 100.05, 100.11, 100.1105, 101.1105, 401.1105):  # the first has no beginning
        steps.step_over(round(end_s * 1e9))
    found = scraped(registry_of(engine, steps))
    assert found.kinds["penstock_step_seconds"] == "histogram"
    buckets = {float(bound): count for bound, count in found.by("le", "penstock_step_seconds_bucket").items()}
    assert len(buckets) == len(BOUNDS_S) + 1
    assert buckets[0.001] == 1  # 0.5 ms
    assert (buckets[0.03], buckets[0.05], buckets[0.07]) == (1, 2, 3)  # at most: 50 ms belong to the bucket of 50 ms
    assert (buckets[0.7], buckets[1.0], buckets[100.0], buckets[float("inf")]) == (3, 4, 4, 5)
    assert found.value("penstock_step_seconds_count") == 5
    assert found.value("penstock_step_seconds_sum") == pytest.approx(301.1105)
    assert list(buckets.values()) == sorted(buckets.values())


def test_a_step_that_is_over_is_counted_whoever_writes_a_trace(engine):
    steps, moments, told = StepHistogram(), moments_of(engine), []
    moments.step_over, moments.at_step = steps.step_over, told.append
    for _ in range(3):
        moments.step_ends(5)
        moments.step_ends(6)  # of another model
    found = scraped(registry_of(engine, steps))
    assert (found.value("penstock_steps_total"), told) == (3, [1, 2, 3])
    assert found.value("penstock_step_seconds_count") == 2


def test_the_other_format_is_read_by_its_parser_too(engine):
    """It is strict: on names, suffixes, the order of buckets, and the end."""
    text = openmetrics.generate_latest(registry_of(engine)).decode()
    families = {family.name: family for family in openmetrics_parser.text_string_to_metric_families(text)}
    assert families["penstock_sent_bytes"].type == "counter"
    assert families["penstock"].type == "info"
    assert families["penstock_step_seconds"].type == "histogram"


def test_the_page_names_every_metric_and_no_other(engine):
    found = scraped(registry_of(engine))
    suffixes = ("_bucket", "_count", "_sum")
    given = {re.sub("|".join(f"{suffix}$" for suffix in suffixes), "", sample.name) for sample in found.samples}
    rows = re.findall(r"^\| `(penstock_\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(given)

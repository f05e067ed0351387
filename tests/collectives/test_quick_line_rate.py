"""The quick measurement when a job starts: what it tells and sends, what turns it off, and a rank lost in it."""

import logging
import os
import time

import pytest
from job_processes import CONTEXT, OPTIONS, PATIENCE_S, run_well

import penstock as ps
from penstock import collectives, job
from penstock.coordinator import Rates
from penstock.measure import quick

LOST_EXIT_CODE = 3


def rates_of_the_start(rank, size):
    """What `init` found, and what this rank sends, sums and logs in another measurement."""
    sent, sums, logged = [], [], []

    class Counted(collectives.Group):
        def send(self, tensor, *arguments, **options):
            sent.append(memoryview(tensor).nbytes)
            return super().send(tensor, *arguments, **options)

        def allreduce(self, tensor, *arguments, **options):
            sums.append(memoryview(tensor).nbytes)
            return super().allreduce(tensor, *arguments, **options)

    class Kept(logging.Handler):
        def emit(self, record):
            logged.append(record.getMessage())

    quick.Group = Counted  # in this process, which ends with the test
    log = logging.getLogger("penstock")
    log.addHandler(Kept())
    log.setLevel(logging.INFO)
    quick.quick_rates(job.current())
    return job.current().rates, sent, sums, logged


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_short_and_the_same_on_every_rank(size, tmp_path):
    """Seconds are the machine's load; what is sent has bounds."""
    results = run_well(size, rates_of_the_start, tmp_path, line_rate_mbit="auto")
    first = results[0][0]
    assert first.source == quick.ONE_HOST
    # Wide enough for any load, and too narrow for a wrong unit.
    assert 0 < first.latency_s < 10 and first.bytes_per_s > 1e4 and first.summed_bytes_per_s > 1e6
    # Pings, and as many answers to the other's; bursts that grow and those that count, each with its plan.
    partners = 1 if size == 2 else 2
    bursts = quick.GROW_TRIES * len(quick.SIZES) + quick.BURSTS_MAX
    most_bytes = partners * bursts * (quick.SIZES[-1] + 64)
    most = partners * (bursts * (quick.SIZES[-1] // quick.MESSAGE_BYTES + 2) + 4 * quick.PINGS)
    for rates, sent, sums, _ in results:
        assert rates == first
        assert 0 < len(sent) <= most and sum(sent) <= most_bytes, sent
        assert max(sent) <= quick.MESSAGE_BYTES, "no message has to be asked for"
        assert set(sums) == {4 * size} and len(sums) <= 2 * (quick.CALLS + 1)
    (line,) = (line for *_, logged in results for line in logged)
    assert results[0][-1] == [line], "rank 0 says it for all"
    assert line.startswith("line rate: ") and "interface lo " in line and "there is no line" in line


def burst(rate, waited=0.0, size=1_000_000):
    seconds = size / rate
    return quick._Burst(size, seconds, waited * seconds, 0.001)


def test_it_was_the_line_if_no_thread_waited_or_if_two_alike_waited_little():
    assert not quick._sure([])
    assert quick._sure([burst(1e8)])
    assert not quick._sure([burst(1e8, waited=0.15)])
    assert quick._sure([burst(2e7, waited=3.0), burst(1e8, waited=0.15), burst(0.95e8, waited=0.19)]), "two are alike"
    assert not quick._sure([burst(1e8, waited=0.15), burst(0.5e8, waited=0.15)])
    assert quick._sure([burst(2e7, waited=3.0), burst(0.5e8), burst(1e8, waited=3.0)]), (
        "the line is as fast as in the last"
    )
    # Read at a line of 1 Gbit/s beside loops that keep all processors busy: alike by chance, and far too slow.
    by_chance = [burst(4.85e7, waited=0.36), burst(4.58e7, waited=0.19)]
    assert not quick._sure(by_chance) and not quick._sure(by_chance[::-1])
    assert not quick._sure([burst(1e7, waited=2.0)] * quick.BURSTS_MAX), "alike because processors were as busy in all"


def test_the_fastest_burst_counts_and_is_in_doubt_if_it_may_not_have_been_the_line():
    calm, busy = burst(1e8, waited=0.1), burst(1.2e7, waited=2.0)
    assert quick._line_rate([busy, calm, busy], one_host=False) == (pytest.approx(1e8), False)
    assert quick._line_rate([busy], one_host=False) == (pytest.approx(1.2e7), True)
    # On one host a burst counts by its processor time, and nothing is slower than a burst was.
    assert quick._line_rate([busy], one_host=True) == (pytest.approx(1e9), False)
    assert quick._line_rate([burst(2e9, waited=2.0)], one_host=True) == (pytest.approx(2e9), False)


def test_inside_a_host_what_is_slower_than_its_processors_counts():
    assert quick._inside_rate([burst(1.2e7, waited=2.0)]) == pytest.approx(1e9), "it only waited for processors"
    slow = burst(1.2e7, waited=0.0)
    assert quick._inside_rate([slow, slow]) == pytest.approx(1.2e7), "they were free"
    assert quick._inside_rate([slow, burst(2e9, waited=2.0)]) == pytest.approx(2e9)


def test_a_burst_is_longer_than_what_a_token_bucket_lets_pass():
    for mbit, least in ((1000, 1_000_000), (100, 500_000), (10, 50_000)):
        rate = mbit * 1e6 / 8
        size = quick._burst_bytes(rate, quick.BURST_SECONDS)
        assert size >= least and size / rate <= 0.05, mbit
    assert quick._burst_bytes(1e11, quick.BURST_SECONDS) == quick.SIZES[-1]
    assert quick._burst_bytes(1.0, quick.BURST_SECONDS) == quick.SIZES[0]


def given_report(rank, size):
    return ps.report()["line_rate_source"], job.current().rates.source


def test_the_report_says_where_the_rate_comes_from(tmp_path):
    assert run_well(2, given_report, tmp_path, line_rate_mbit="auto") == [(quick.ONE_HOST, quick.ONE_HOST)] * 2


@pytest.mark.parametrize(
    ("size", "trip_s", "calls"),
    [(2, 50e-6, 12), (8, 50e-6, 12), (32, 1e-3, 2), (8, 1e-3, 7), (8, 20e-3, 2), (2, 20e-3, 2), (2, 5e-3, 10)],
)
def test_far_links_get_fewer_tiny_sums(size, trip_s, calls):
    assert quick._affordable(quick.CALLS, size, trip_s) == calls
    assert quick._affordable(10 * quick.CALLS, size, trip_s) >= calls, "who asks for more gets more"
    assert quick._affordable(1, size, trip_s) == 1


@pytest.mark.parametrize("size", [2, 3, 8])
def test_latency_and_call_are_told_apart_by_their_steps(size):
    latency_s, call_s = 30e-6, 150e-6
    taken = {"store": call_s + 2 * latency_s, "ring": call_s + 2 * (size - 1) * latency_s}
    # A trip is a call and one step; of two ranks nothing else tells them apart.
    found = quick._step_and_call(taken, size, call_s + latency_s)
    assert found == pytest.approx((latency_s, call_s))
    # A ring that was faster than the store, or slower than trips allow, makes no sense: bounds hold.
    assert quick._step_and_call({"store": 2e-4, "ring": 1e-4}, 3, 1e-4)[0] == quick.LATENCY_MIN_S
    assert quick._step_and_call({"store": 1e-4, "ring": 1.0}, 3, 1e-4) == (1e-4, 0.0)


def given_rates(rank, size):
    return job.current().rates


@pytest.mark.parametrize(("given", "bytes_per_s"), [(80, 1e7), ("off", Rates().bytes_per_s)])
def test_nothing_is_measured_if_the_rate_is_given_or_it_is_turned_off(given, bytes_per_s, tmp_path):
    for rates in run_well(2, given_rates, tmp_path, line_rate_mbit=given):
        assert rates.bytes_per_s == bytes_per_s and "measured" not in rates.source


def test_one_rank_alone_has_nobody_to_measure_with(tmp_path):
    assert run_well(1, given_rates, tmp_path, line_rate_mbit="auto") == [Rates()]


def start_and_lose_one(pipe, rank, place):
    """A rank whose process ends without a word in the middle of the measurement, and another that starts with it."""
    if rank == 1:
        quick._Pair._receive = lambda *_: os._exit(LOST_EXIT_CODE)
    began = time.monotonic()
    try:
        ps.init(rank=rank, world_size=2, rendezvous=f"file://{place}", line_rate_mbit="auto", **OPTIONS)
    except ps.PeerLost as error:
        pipe.send((error.rank, time.monotonic() - began))


def test_a_rank_lost_meanwhile_is_named_in_time(tmp_path):
    here, there = CONTEXT.Pipe(duplex=False)
    place = str(tmp_path / "meet")
    ranks = [CONTEXT.Process(target=start_and_lose_one, args=(there, rank, place)) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        assert here.poll(PATIENCE_S), "the survivor neither failed nor ended"
        lost, seconds = here.recv()
        assert lost == 1 and seconds < OPTIONS["operation_timeout_s"]
        for process in ranks:
            process.join(PATIENCE_S)
        assert ranks[1].exitcode == LOST_EXIT_CODE
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


@pytest.mark.parametrize(
    ("hosts", "between", "inside"),
    [
        ([0, 0, 1, 1], [[(0, 2)]], [(0, 1), (2, 3)]),
        ([0, 1, 0, 2, 1], [[(0, 1)], [(0, 3)]], [(0, 2), (1, 4)]),  # three heads: in two rounds all have a partner
    ],
)
def test_one_rank_of_each_host_measures_its_line(hosts, between, inside):
    *lines, last = quick._matches(len(hosts), hosts)
    assert last == (inside, True)
    assert {rank for pairs, _ in lines for pair in pairs for rank in pair} == {hosts.index(host) for host in hosts}
    assert not any(in_hosts for _, in_hosts in lines) and len(lines) == len(between)


@pytest.mark.parametrize("hosts", [[], [0, 0, 0], [0, 1, 2]])
def test_where_no_line_is_shared_all_ranks_measure_theirs(hosts):
    found = quick._matches(3, hosts)
    assert len(found) == 2 and not any(in_hosts for _, in_hosts in found)
    assert {rank for pairs, _ in found for pair in pairs for rank in pair} == {0, 1, 2}

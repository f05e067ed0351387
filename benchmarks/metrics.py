"""What metrics cost: time of a step, and processor time of a scrape.

    .venv/bin/python -m benchmarks.metrics [--json-lines docs/benchmarks/metrics.jsonl]

Ranks on this machine train one job after the other, with and without metrics in turn, in an order drawn from the seed,
the same on all ranks. Each rank of a job with metrics is scraped by another process once per second, 15 times as often
as the page's Prometheus does. Jobs of one pair are compared on rank 0: the median of the differences of their steps, as
a share of the step. Beside it is what can be accounted for at a scrape every 15 seconds: its processor time, and what a
step is counted with.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from typing import Any

import torch

import penstock as ps
from benchmarks.blocks import differences, in_turn, main, trainer
from benchmarks.workers import run_workers
from lab.records import ROOT, spread
from penstock.job import current
from penstock.metrics.step_histogram import StepHistogram

WARM_STEPS = 5
BLOCK_S = 2.5
SCRAPE_S = 1.0
USUAL_SCRAPE_S = 15.0
SHARE_TARGET = 0.01
TRIES = 50
COUNTS = 20_000
SCRAPER = "--scraper"  # the process that scrapes: this one alone on its command line, and the URL


@contextlib.contextmanager
def scraped(url: str | None) -> Any:
    """By another process, from now on and every `SCRAPE_S`; nobody of a job without metrics."""
    if url is None:
        yield
        return
    command = [sys.executable, "-m", __spec__.name, SCRAPER, url]
    scraper = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert scraper.stdout is not None and scraper.stdout.readline(), "the first scrape failed"
        yield
    finally:
        scraper.kill()
        scraper.wait()


def scrape(url: str) -> None:
    """Until somebody ends this process; says so when it has begun."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with direct.open(url) as answer:
            assert b"penstock_steps_total" in answer.read()
        print("scraped", flush=True)
        time.sleep(SCRAPE_S)


def scrape_ms() -> float:
    """The processor time of one, without the bytes on their way."""
    from prometheus_client import CollectorRegistry, generate_latest

    from penstock.metrics.families import RankCollector

    job, registry, found = current(), CollectorRegistry(), []
    registry.register(RankCollector(job.engine, job.options, "", StepHistogram()))
    for _ in range(TRIES):
        began = time.thread_time()
        generate_latest(registry)
        found.append(1e3 * (time.thread_time() - began))
    return statistics.median(found)


def count_ms() -> float:
    """What a step is counted with, the loop around it included."""
    steps = StepHistogram()
    began = time.perf_counter()
    for _ in range(COUNTS):
        steps.step_over()
    return 1e3 * (time.perf_counter() - began) / COUNTS


def train_job(case: str, meet: dict[str, Any], metrics: int | None) -> tuple[float, float]:
    """The milliseconds of a step, and those of a scrape if there are metrics."""
    ps.init(**meet, metrics=metrics)
    train = trainer(case)

    def timed(count: int) -> float:
        ps.barrier()
        began = time.perf_counter()
        train(count)
        return time.perf_counter() - began

    train(WARM_STEPS)
    step_s = torch.tensor([timed(WARM_STEPS) / WARM_STEPS])
    ps.allreduce(step_s)  # all train as long
    count = max(1, round(BLOCK_S / step_s.item()))
    with scraped(ps.report().get("metrics")):
        took_ms = 1e3 * timed(count) / count
        ps.barrier()
    of_scrape_ms = 0.0 if metrics is None else scrape_ms()
    ps.shutdown()
    return took_ms, of_scrape_ms


def work(case: str, rank: int, size: int, directory: str, pairs: int, seed: int) -> None:
    """One rank: prints one JSON object."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"with": [], "without": [], "scrape": []}
    for number, way in enumerate(in_turn(pairs, seed)):
        meet = {"rank": rank, "world_size": size, "rendezvous": f"file://{directory}/meet-{number}"}
        took_ms, of_scrape_ms = train_job(case, meet, 0 if way == "with" else None)
        found[way].append(took_ms)
        if way == "with":
            found["scrape"].append(of_scrape_ms)
    print(json.dumps({**found, "count_ms": count_ms()}))


def measure(case: str, size: int, pairs: int, seed: int) -> dict[str, Any]:
    """All ranks of all jobs."""
    found = run_workers(__spec__.name, case, size, pairs, seed)[0]
    extra = differences(found)
    step_ms, of_scrape_ms = statistics.median(found["without"]), statistics.median(found["scrape"])
    share = statistics.median(extra) / step_ms
    return {
        "model": case,
        "workers": size,
        "without_ms": spread(found["without"]),
        "with_ms": spread(found["with"]),
        "extra_ms": spread(extra),
        "scrape_ms": round(of_scrape_ms, 3),
        "count_ms": round(found["count_ms"], 5),
        "accounted_share": round(found["count_ms"] / step_ms + of_scrape_ms / 1e3 / USUAL_SCRAPE_S, 6),
        "share": round(share, 5),
        "target_share": SHARE_TARGET,
        "met": share <= SHARE_TARGET,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [SCRAPER]:
        scrape(sys.argv[2])
    sys.exit(main("metrics", __doc__, work, measure, pairs=10, of="jobs, with and without metrics"))

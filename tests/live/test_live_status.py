"""What a rank writes of itself, when, and what becomes of the file; and what is read of several."""

import json
import threading
import time
from types import SimpleNamespace

import pytest

from penstock import config
from penstock.errors import ConfigError, ProtocolError
from penstock.live import live_status
from penstock.live.live_status import KEPT, STEPS_WANTED, WINDOW_S, StatusFile, begin
from penstock.live.live_view import SILENT_AFTER_S, read_all, view_of
from penstock.tracing.moments import forget_moments, known_lateness, moments_of

JOB = bytes(range(16))


def layer(name, sent=0, received=0, stall_s=0.0):
    return {"name": name, "lossy": None, "bytes_sent": sent, "bytes_received": received, "stall_s": stall_s}


class Judge:
    """Stands for who says who is late: by so many milliseconds rank 1."""

    def __init__(self, until_step, late_ms=30.0):
        causes = {"compute": late_ms, "input": 0.0, "network": 0.0, "processing": 0.0}
        one = {"rank": 1, "late_ms": late_ms, "step_ms": 500.0, "cause": "compute", "causes_ms": causes}
        ranks = [{**one, "from_layer": "fc", "stands_out": True}]
        self.found = {"ranks": ranks, "judged_steps": 4, "until_step": until_step, "why": None}

    def said(self):
        return {"late": self.found}


class Counting:
    """Stands for an engine; what it counts is set by tests."""

    def __init__(self, rank=0, size=2, layers=("conv1", "fc")):
        self.counts = {
            "rank": rank,
            "size": size,
            "lanes": 1,
            "slices": 0,
            "preemptions": 0,
            "pool_bytes": 0,
            **dict.fromkeys(("bytes_sent", "bytes_received", "call_bytes_sent", "call_bytes_received"), 0),
            **{f"busy_{what}_s": 0.0 for what in ("backward", "forward", "stalled", "other")},
            "stall_s": 0.0,
            "books": [{"name": "model0.gradients", "layers": [layer(name) for name in layers]}],
        }
        self.failure = None

    def report(self):
        if self.failure is not None:
            raise self.failure
        return json.loads(json.dumps(self.counts))


def job(rank=0, size=2, **more):
    options = config.Options(rank=rank, world_size=size)
    return SimpleNamespace(engine=Counting(rank, size, **more), job_id=JOB, status=None, options=options)


@pytest.fixture
def clock(monkeypatch):
    """Time stands still until a test says otherwise, and no thread writes by itself."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(live_status, "EVERY_S", 3600.0)
    clocks = SimpleNamespace(monotonic=lambda: now.s, time=lambda: 1_700_000_000 + now.s)
    monkeypatch.setattr(live_status, "time", clocks)
    return now


@pytest.fixture
def started():
    """Begins jobs' files, and ends them."""
    jobs = []

    def start(running, directory):
        jobs.append(running)
        return begin(running, str(directory))

    yield start
    for running in jobs:
        if running.status is not None:
            running.status.end("the test is over")
        forget_moments(running.engine)


def said(path):
    return json.loads(path.read_text())


def test_a_file_says_whose_it_is_and_what_is_counted(tmp_path, started, clock):
    running = job(1, 4)
    status = started(running, tmp_path / "a" / "status")
    assert status.path == tmp_path / "a" / "status" / "rank-1.00010203.status"
    first = said(status.path)
    assert {name: first[name] for name in ("penstock_status", "job", "rank", "name", "size", "ended")} == {
        "penstock_status": 1,
        "job": JOB.hex(),
        "rank": 1,
        "name": "rank 1",
        "size": 4,
        "ended": None,
    }
    assert first["before"] == first["now"] and first["now"]["steps"] == 0
    running.engine.counts["bytes_sent"] = 5
    moments_of(running.engine).step_ends(0)
    clock.s += 1
    status._write(None)
    then = said(status.path)
    assert (then["now"]["bytes_sent"], then["now"]["steps"], then["before"]) == (5, 1, first["now"])
    assert list(status.path.parent.iterdir()) == [status.path]  # nothing is left under way


def test_before_is_long_enough_ago_and_enough_steps(tmp_path, started, clock):
    running = job()
    status = started(running, tmp_path)
    moments, begun = moments_of(running.engine), clock.s
    for _ in range(30):  # a step in two seconds
        clock.s += 2
        moments.step_ends(0)
        status._write(None)
    found = said(status.path)
    assert found["now"]["clock_s"] - found["before"]["clock_s"] == 2 * STEPS_WANTED > WINDOW_S
    for _ in range(30):  # ten in one
        clock.s += 1
        for _ in range(10):
            moments.step_ends(0)
        status._write(None)
    found = said(status.path)
    assert found["now"]["clock_s"] - found["before"]["clock_s"] == WINDOW_S
    for _ in range(3 * KEPT):  # none
        clock.s += 1
        status._write(None)
    found = said(status.path)
    assert found["now"]["clock_s"] - found["before"]["clock_s"] == KEPT < clock.s - begun


def test_it_is_written_by_itself_and_says_once_why_it_has_ended(tmp_path, started, monkeypatch):
    monkeypatch.setattr(live_status, "EVERY_S", 0.005)
    running = job()
    written, write = threading.Event(), StatusFile._write

    def noted(self, ended):
        write(self, ended)
        if self.path.exists() and running.status is not None:
            written.set()

    monkeypatch.setattr(StatusFile, "_write", noted)
    status = started(running, tmp_path)
    assert written.wait(10)
    assert said(status.path)["ended"] is None
    status.end("the job has ended")
    assert said(status.path)["ended"] == "the job has ended" and not status._thread.is_alive()
    status.end("something else")
    assert said(status.path)["ended"] == "the job has ended"


def test_what_cannot_be_written_is_said_at_the_call_or_once_later(tmp_path, started, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"option status: cannot write to .*file"):
        started(job(), tmp_path / "file")
    monkeypatch.setattr(live_status, "EVERY_S", 0.005)
    running = job()
    tries, write = threading.Semaphore(0), StatusFile._write

    def counted(self, ended):
        try:
            write(self, ended)
        finally:
            tries.release()

    monkeypatch.setattr(StatusFile, "_write", counted)
    status = started(running, tmp_path)
    running.engine.failure = ProtocolError("nothing is counted any more")
    for _ in range(5):
        assert tries.acquire(timeout=10)
    status.end("the test is over")
    complaints = [record for record in caplog.records if "cannot be written" in record.getMessage()]
    assert len(complaints) == 1 and "nothing is counted" in complaints[0].getMessage()


def test_rates_and_shares_are_those_between_two_samples(tmp_path, started, clock):
    ranks = [job(rank) for rank in range(2)]
    files = [started(running, tmp_path) for running in ranks]
    clock.s += 20
    for rank, running in enumerate(ranks):
        counts = running.engine.counts
        counts |= {"bytes_sent": 25_000_000, "call_bytes_sent": 0 if rank else 25_000_000, "bytes_received": 5_000_000}
        counts |= {"busy_backward_s": 6.0, "busy_stalled_s": 2.0 * rank, "stall_s": 4.0 * rank}
        counts["books"][0]["layers"] = [layer("conv1", 10_000_000, 0, 4.0 * rank), layer("fc", 15_000_000)]
        for _ in range(40):
            moments_of(running.engine).step_ends(0)
        files[rank]._write(None)
    found, unread = read_all(tmp_path)
    view = view_of(found, 1_700_000_000 + clock.s + 1)
    assert (unread, view["size"], view["missing"], view["ended"], view["job"]) == ([], 2, [], False, JOB.hex()[:8])
    first, second = view["ranks"]
    assert (first["steps"], first["step_ms"], first["age_s"], first["silent"]) == (40, 500.0, 1.0, False)
    assert (first["sent_mbit"], second["sent_mbit"], first["received_mbit"]) == (20.0, 10.0, 2.0)
    assert (first["waited_share"], second["waited_share"]) == (0.0, 0.2)
    assert (first["hidden_share"], second["hidden_share"]) == (1.0, 0.75)
    assert [one["layer"] for one in view["layers"]] == ["conv1", "fc"]
    conv1, fc = view["layers"]
    assert (conv1["waited_share"], conv1["waits_most"], conv1["sent_mbit"]) == (pytest.approx(0.1), 1, 4.0)
    assert (fc["waited_share"], fc["waits_most"], fc["sent_mbit"]) == (0.0, None, 6.0)
    json.dumps(view)


def test_who_is_late_is_what_ranks_that_run_have_found_last(tmp_path, started, clock):
    ranks = [job(rank, 3) for rank in range(3)]
    files = [started(running, tmp_path) for running in ranks]
    time_s = 1_700_000_000 + clock.s
    view = view_of(read_all(tmp_path)[0], time_s)
    assert view["late"]["why"].startswith("no model in main memory")
    assert {one["late_ms"] for one in view["ranks"]} == {None}
    for running, judge in zip(ranks, (Judge(24), Judge(60, 45.0), Judge(99)), strict=True):
        moments_of(running.engine).judge = judge
    for status in files[:2]:
        status._write(None)
    files[2].end("killed by a test")
    view = view_of(read_all(tmp_path)[0], time_s)
    assert view["late"] == Judge(60, 45.0).found
    assert [one["late_ms"] for one in view["ranks"]] == [None, 45.0, None]
    files[0].end("the job has ended")
    files[1].end("the job has ended")
    assert view_of(read_all(tmp_path)[0], time_s)["late"] == Judge(99).found  # nobody runs who would know better
    json.dumps(view)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": None},
        {"ranks": [{}]},
        {"ranks": [1]},
        {"ranks": [{**Judge(9).found["ranks"][0], "causes_ms": []}]},
        {"ranks": [{**Judge(9).found["ranks"][0], "late_ms": float("inf")}]},
        {"ranks": [{**Judge(9).found["ranks"][0], "cause": "weather"}]},
        {"until_step": None},
        {"until_step": "soon"},
        {"judged_steps": "some"},
    ],
)
def test_what_cannot_be_said_of_who_is_late_is_not_taken(change, tmp_path, started, clock):
    running = job(0)
    moments_of(running.engine).judge = Judge(9)
    path = started(running, tmp_path).path
    assert len(read_all(tmp_path)[0]) == 1
    found = said(path)
    found["now"]["late"] |= change
    path.write_text(json.dumps(found))
    assert read_all(tmp_path)[0] == [] and "cannot be read" in read_all(tmp_path)[1][0]


def test_why_nothing_is_known_is_said_of_each_kind_of_rank():
    for options, why in (
        (config.Options(), "a job of one process"),
        (config.Options(world_size=2, lateness=False), "the option lateness is off"),
        (config.Options(world_size=2, servers=1, role="server"), "a server trains nothing"),
    ):
        engine = Counting()
        late = known_lateness(engine, options)["late"]
        forget_moments(engine)
        assert late["why"].startswith(why) and (late["ranks"], late["judged_steps"]) == ([], 0)


def test_of_one_sample_nothing_is_known_yet(tmp_path, started, clock):
    started(job(0, 3), tmp_path)
    view = view_of(read_all(tmp_path)[0], time.time())
    (only,) = view["ranks"]
    assert {only[name] for name in ("step_ms", "sent_mbit", "waited_share", "hidden_share")} == {None}
    assert (view["missing"], view["layers"]) == ([1, 2], [])


def test_who_is_not_heard_of_is_silent_and_who_has_ended_is_not(tmp_path, started, clock):
    alive, ended = job(0), job(1)
    for running in (alive, ended):
        started(running, tmp_path)
    ended.status.end("killed by a test")
    view = view_of(read_all(tmp_path)[0], 1_700_000_000 + clock.s + SILENT_AFTER_S + 7)
    assert [one["silent"] for one in view["ranks"]] == [True, False]
    assert [one["ended"] for one in view["ranks"]] == [None, "killed by a test"]
    assert view["ranks"][0]["age_s"] == pytest.approx(SILENT_AFTER_S + 7)


def test_of_several_jobs_the_last_is_read_and_others_by_name(tmp_path, started, clock):
    started(job(0), tmp_path)
    clock.s += 10
    other = job(0)
    other.job_id = bytes(16)
    started(other, tmp_path)
    assert [one.job for one in read_all(tmp_path)[0]] == [bytes(16).hex()]
    assert [one.job for one in read_all(tmp_path, "00010203")[0]] == [JOB.hex()]
    assert read_all(tmp_path, "ff") == ([], [])


@pytest.mark.parametrize(
    "change",
    [
        {"penstock_status": 2},
        {"now": None},
        {"now": {}},
        {"rank": None},
        {"before": {"books": 3}},
    ],
)
def test_what_is_no_status_is_named_and_left_out(change, tmp_path, started, clock):
    whole = started(job(0), tmp_path).path
    other = tmp_path / "rank-1.other.status"
    other.write_text(json.dumps(said(whole) | {"rank": 1} | change))
    found, unread = read_all(tmp_path)
    assert [one.rank for one in found] == [0]
    assert len(unread) == 1 and unread[0].startswith("rank-1.other.status cannot be read: ")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null"])
def test_a_file_of_anything_is_no_end(content, tmp_path):
    (tmp_path / "x.status").write_bytes(content)
    found, unread = read_all(tmp_path)
    assert found == [] and len(unread) == 1


def test_no_number_that_cannot_be_is_taken(tmp_path, started, clock):
    path = started(job(0), tmp_path).path
    found = said(path)
    found["now"]["stall_s"] = float("nan")
    path.write_text(json.dumps(found))
    assert "a number that cannot be" in read_all(tmp_path)[1][0]


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no directory; ranks write there with PENSTOCK_STATUS"):
        read_all(tmp_path / "nowhere")

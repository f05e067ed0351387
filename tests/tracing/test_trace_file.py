"""A rank's file: whole, torn at any byte, damaged at any byte, and what is none at all."""

import json
import os
import threading
import time

import pytest

from penstock._native import POINTS, RECORD
from penstock.tracing import journeys
from penstock.tracing.moments import MOMENTS, NO_LAYER, Moments, coded, decoded
from penstock.tracing.trace_file import BadTrace, TraceFile, read

HEADER = {
    "job": "ab" * 16,
    "number": 1,
    "rank": 2,
    "size": 4,
    "lanes": 1,
    "steps": [0, 20],
    "name": "rank 2",
    "pid": 7,
    "host": "here",
    "record": RECORD,
}
RECORDS, NOTED = bytes(range(64)), bytes(range(32))


@pytest.fixture
def whole(tmp_path):
    file = TraceFile(tmp_path / "rank-2.trace", HEADER)
    file.books([{"name": "model0.gradients", "layers": ["a", "b"]}])
    file.block("records", RECORDS, 0)
    file.block("moments", NOTED, 3)
    file.block("records", RECORDS, 5)
    file.block("records", b"", 0)  # leaves no line
    file.end(slices=4, why="20 steps")
    return file.path


def test_what_was_written_is_read(whole):
    found = read(whole, RECORD)
    assert (found.rank, found.name, found.torn) == (2, "rank 2", None)
    assert (found.records, found.moments) == (RECORDS + RECORDS, NOTED)
    assert (found.lost, found.dropped) == (5, 3)
    assert (found.end["slices"], found.end["why"]) == (4, "20 steps")
    assert found.books[0]["layers"] == ["a", "b"] and len(found.clocks) == 4


def test_a_disk_that_takes_some_bytes_at_a_time_gets_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: os.write(descriptor, b"".join(parts)[:7]))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data)[:11]))
    file = TraceFile(tmp_path / "rank-2.trace", HEADER)
    file.block("records", RECORDS, 0)
    file.end(slices=2)
    found = read(file.path, RECORD)
    assert (found.records, found.torn, file.nbytes) == (RECORDS, None, file.path.stat().st_size)


def test_what_the_program_notes_is_taken_once_from_all_threads_in_the_order_of_time():
    moments = Moments(None)
    what = [coded(0, 3, layer) for layer in range(2000)]
    before = time.monotonic_ns()
    threads = [threading.Thread(target=lambda: [moments.note(one) for one in what]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    packed, dropped = moments.take()
    after = time.monotonic_ns()
    noted = list(decoded(packed))
    times = [at for at, *_ in noted]
    assert times == sorted(times) and before <= times[0] <= times[-1] <= after and dropped == 0
    assert sorted(rest for _, *rest in noted) == sorted([0, 3, layer] for layer in [*range(2000)] * 2)
    moments.note(coded(13, 65535, NO_LAYER))
    ((_, *last),) = decoded(moments.take()[0])
    assert last == [13, 65535, NO_LAYER] and moments.take() == (b"", 0)


def test_a_file_that_is_there_is_not_written_over(whole):
    with pytest.raises(FileExistsError):
        TraceFile(whole, HEADER)


def test_a_file_that_was_cut_anywhere_is_torn_and_gives_what_is_whole(whole):
    data = whole.read_bytes()
    first = data.index(b"\n") + 1
    seen = set()
    for length in range(first, len(data)):
        whole.write_bytes(data[:length])
        found = read(whole, RECORD)
        assert found.torn is not None and found.end is None, length
        assert found.records in (b"", RECORDS, RECORDS + RECORDS) and found.moments in (b"", NOTED), length
        seen.add(len(found.records))
    assert seen == {0, 64, 128}
    for length in (0, 1, first - 1):
        whole.write_bytes(data[:length])
        with pytest.raises(BadTrace, match="is no trace of Penstock"):
            read(whole, RECORD)


def test_a_byte_that_has_changed_is_noticed_in_records_and_lengths(whole):
    data = whole.read_bytes()
    begins = data.index(RECORDS)
    for at in (begins, begins + 40, data.index(NOTED, begins + 64)):
        whole.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(BadTrace, match=r"rank-2.trace: block \d has not the checksum"):
            read(whole, RECORD)
    for old, new in (
        (b'"nbytes": 64', b'"nbytes": -4'),
        (b'"records", "nb', b'"reconds", "nb'),
        (b'{"block": "mo', b'["block": "mo'),
    ):
        assert old in data
        whole.write_bytes(data.replace(old, new, 1))
        with pytest.raises(BadTrace, match="damaged"):
            read(whole, RECORD)
    whole.write_bytes(data + b"more")
    with pytest.raises(BadTrace, match="goes on after its end"):
        read(whole, RECORD)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"penstock_trace": 1}, "has format 1, and this version of Penstock reads 2: merge it by the version that"),
        ({"penstock_trace": 9}, "has format 9"),
        ({"rank": "2"}, "does not say rank"),
        ({"job": None}, "does not say job"),
        ({"record": [["time_ns", "<u4"]]}, "another version"),
        ({"moments": ["forward"]}, "another version"),
    ],
)
def test_files_of_other_versions_are_refused_by_name(whole, change, said):
    first, rest = whole.read_bytes().split(b"\n", 1)
    whole.write_bytes(json.dumps({**json.loads(first), **change}).encode() + b"\n" + rest)
    with pytest.raises(BadTrace, match=said) as failed:
        read(whole, RECORD)
    assert str(whole) in str(failed.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"hello\n", b"[1]\n", b'{"traceEvents": []}\n', bytes(range(256)) * 9])
def test_what_is_no_trace_is_said_to_be_none(tmp_path, content):
    path = tmp_path / "other.trace"
    path.write_bytes(content)
    with pytest.raises(BadTrace, match="is no trace of Penstock"):
        read(path, RECORD)


def test_points_and_records_are_those_of_the_engine():
    assert journeys.POINTS == POINTS
    assert journeys.Record._fields == tuple(name for name, _ in RECORD)
    codes = {"<u8": "Q", "<u4": "I", "<i4": "i", "<u2": "H", "u1": "B"}
    assert journeys._PACKED.format == "<" + "".join(codes[kind] for _, kind in RECORD)
    assert len(MOMENTS) < 1 << 8

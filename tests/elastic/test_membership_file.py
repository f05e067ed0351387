"""The file of a membership log: what is written is read, what is torn is named, and who ends and comes in a replay."""

import json
from dataclasses import replace

import pytest
from logged_runs import HEADER, LEFT, epochs, run

import penstock as ps
from penstock.launch.placement import Host, place
from penstock.launch.script import Script
from penstock.membership_file import (
    FORMAT,
    KIND,
    CallPlace,
    LoggedCall,
    LoggedEpoch,
    LoggedRun,
    read_log,
    write_log,
)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "run.jsonl"
    write_log(file, run())
    return file


def test_what_is_written_is_read(path):
    assert read_log(path) == run()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines[0]["log"] == KIND and lines[0]["format"] == FORMAT and lines[0]["lines"] == len(lines)
    assert ["end" in line for line in lines] == [False] * (len(lines) - 1) + [True]
    without_end = replace(run(), end=None, calls=())
    write_log(path, without_end)
    assert read_log(path) == without_end


def test_a_run_in_which_nothing_happened_is_one(tmp_path):
    alone = LoggedRun(HEADER, epochs()[:1])
    write_log(tmp_path / "log", alone)
    assert read_log(tmp_path / "log") == alone and alone.changes() == []


def test_a_file_that_is_cut_anywhere_is_named_as_torn(path):
    data = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with pytest.raises(ps.ConfigError) as caught:
            read_log(path)
        text = str(caught.value)
        assert str(path) in text and "torn" in text, (cut, text)
        if cut in ends:
            assert f"it has {ends.index(cut) + 1} lines, and says that there are {len(ends)}" in text, (cut, text)
        else:
            assert f"line {1 + data[:cut].count(ord(chr(10)))}" in text, (cut, text)


def change_line(path, number, change):
    lines = path.read_text(encoding="utf-8").splitlines()
    said = json.loads(lines[number])
    change(said)
    lines[number] = json.dumps(said)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


BAD = [
    (0, lambda said: said.update(format=FORMAT + 1), r"format 3, and this version of Penstock reads 2.*1\.2\.3"),
    (0, lambda said: said.update(ranks=0), "line 1: 0 where a whole number from 1 on should be"),
    (0, lambda said: said.pop("lines"), "line 1: it does not say 'lines'"),
    (0, lambda said: said.pop("slicing"), "line 1: it does not say 'slicing'"),
    (1, lambda said: said.update(resumed=[10, -1, ""]), "line 2: -1 where a whole number"),
    (3, lambda said: said.update(members=[1, 0]), "line 4: ranks that do not ascend"),
    (4, lambda said: said.update(epoch=4), "line 5: epoch 4, and 1 is next"),
    (4, lambda said: said.update(rounds=[[2, [[1 << 30, 3]]]]), "line 5: more slices than there can be"),
    (5, lambda said: said.update(among=[0, 2, 9]), "line 6: rounds over ranks that are no members"),
    (5, lambda said: said.update(step="6"), "line 6: '6' where a whole number"),
    (6, lambda said: said.update(epoch=77), "of an epoch that is not there"),
    (3, lambda said: said.update(among=[0, 1]), "who took part at first"),
]


@pytest.mark.parametrize(("line", "change", "says"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_is_named_with_its_line(line, change, says, path):
    change_line(path, line, change)
    with pytest.raises(ps.ConfigError, match=says):
        read_log(path)


def test_lines_behind_the_end_are_refused(path):
    path.write_text(path.read_text(encoding="utf-8") + '{"epoch": 5}\n', encoding="utf-8")
    with pytest.raises(ps.ConfigError, match="behind that of the end"):
        read_log(path)


@pytest.mark.parametrize("text", ["", "hello\n", '{"log": "something else"}\n', "[1, 2]\n", "\x00\n"])
def test_another_file_is_no_log(text, tmp_path):
    (tmp_path / "file").write_text(text, encoding="utf-8")
    with pytest.raises(ps.ConfigError, match="torn" if not text else "is no membership log"):
        read_log(tmp_path / "file")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ps.ConfigError, match="No such file"):
        read_log(tmp_path / "nothing")


# What it says


def test_changes_of_those_who_take_part_have_the_rounds_that_were_over():
    lost, came = run().changes()
    assert (lost.epoch, lost.step, lost.lost, lost.came, lost.among) == (2, 6, (1,), (), {0, 2})
    assert lost.rounds == [(2, [(2, 5), (3, 4)]), (4, [(1, 1)])]
    assert (lost.call_is_known, lost.call) == (True, CallPlace(0, 3))
    assert (came.epoch, came.step, came.lost, came.came) == (4, 9, (), (3,))
    assert run().newcomers() == {3} and run().first_step(3) == 9 and run().first_step(2) == 1


def test_a_result_that_only_one_had_who_was_lost_later_was_not_over():
    *first, last = epochs()
    lost_later = LoggedEpoch((0,), 10, 3, (0,), [(2, [(1, 4), (4, 5)]), (4, [(1, 1)])])
    lost, _, later = LoggedRun(HEADER, (*first, last, lost_later)).changes()
    assert lost.rounds[0] == (2, [(1, 4), (1, 5), (3, 4)])
    assert later.rounds[0] == (2, [(1, 4), (4, 5)])


def test_which_collective_was_the_last_is_known_from_a_later_one_or_from_the_end():
    known = replace(run(), calls=())
    assert [(change.call_is_known, change.call) for change in known.changes()] == [(True, CallPlace(1, 9))] * 2
    assert not any(change.call_is_known for change in replace(known, end=None).changes())
    first = replace(run(), calls=(LoggedCall(CallPlace(0, 1), 3, None),))
    assert (first.changes()[0].call_is_known, first.changes()[0].call) == (True, None)


# What the launcher does with it

SEATS = place([Host("localhost")], 3, None)[0]


def script(**more):
    found = Script(replace(run(), **more), SEATS[0])
    for seat in SEATS:
        assert not found.opened(seat.key, f"127.0.0.1:500{seat.rank}")
    return found


def test_those_who_were_lost_are_ended_once_all_others_are_ready():
    found = script()
    assert found.to_end() == []
    found.told(0, {"ready": "0"})
    assert found.to_end() == []
    found.told(2, {"ready": "0"})
    assert found.to_end() == [1]
    assert found.to_end() == [], "once"


def test_what_a_worker_says_that_is_none_of_it_changes_nothing():
    found = script()
    for facts in ({}, {"ready": "x"}, {"awaits": "-3"}, {"ready": "7"}, {"numbered": "3"}):
        found.told(0, facts)
    assert found.to_end() == [] and found.next({0, 2}) is None


def test_a_newcomer_is_started_when_it_is_waited_for_and_gets_its_rank():
    found = script()
    found.lost(SEATS[1])
    assert found.next({0, 2}) is None
    found.told(2, {"awaits": "3"})
    seat, doors = found.next({0, 2})
    assert (seat.key, seat.rank, seat.name, doors) == (3, 1, "newcomer 1", "127.0.0.1:5000,127.0.0.1:5002")
    assert found.next({0, 2}) is None
    found.told(3, {"numbered": "3"})
    assert found.opened(3, "127.0.0.1:5003") and found.next({0, 2, 3}) is None


def test_numbers_of_newcomers_that_never_took_part_are_asked_for_first():
    """Rank 3 had a number in the run, and rank 4 is the one that came."""
    *before, heard, came = epochs()
    members = (0, 2, 4)
    found = script(epochs=(*before, replace(heard, members=members), replace(came, members=members, among=members)))
    found.told(0, {"awaits": "4"})
    seat, _ = found.next({0, 2})
    assert seat.key == 3
    found.told(3, {"numbered": "3"})
    assert found.failed(3), "nobody misses it"
    seat, _ = found.next({0, 2})
    assert (seat.key, seat.name) == (4, "newcomer 2")
    assert not found.failed(4), "without it there is no replay"


def test_a_newcomer_asks_first_at_the_door_of_whoever_stays_longest():
    found = script()
    found.told(0, {"awaits": "3"})
    _, doors = found.next({1, 2})
    assert doors == "127.0.0.1:5002,127.0.0.1:5001"


def test_a_newcomer_that_was_lost_before_it_took_part_may_be_lost_again():
    gone = LoggedEpoch(LEFT, 10, 8, LEFT, [(2, [(5, 8)]), (4, [(1, 1)])])
    found = script(epochs=(*epochs(), gone))
    for key in (0, 2):
        found.told(key, {"ready": "0"})
    assert found.to_end() == [1]
    found.told(0, {"awaits": "3"})
    found.next({0, 2})
    found.told(3, {"numbered": "3"})
    for key in (0, 2):
        found.told(key, {"ready": "2"})
    assert found.to_end() == [3]
    assert found.failed(3)

"""Whether somebody comes in the place of a lost worker, and by which door; what a worker can tell the launcher."""

import os
import subprocess
import sys

import pytest

from penstock import config, launcher_pipe
from penstock.launch.messages import decode
from penstock.launch.placement import Host, place
from penstock.launch.vacancies import IN_VAIN_MAX, Vacancies

SEATS = place([Host("a")], 3, None)[0]
DOOR = "127.0.0.1:5000"


def opened(newcomers_max=None):
    vacancies = Vacancies(newcomers_max)
    for seat in SEATS:
        assert not vacancies.opened(seat.key, f"127.0.0.1:500{seat.rank}")
    return vacancies


def test_a_newcomer_comes_to_a_worker_that_runs_in_the_place_of_one_that_is_lost():
    vacancies = opened()
    assert vacancies.next({0, 1, 2}) is None
    vacancies.lost(SEATS[0])
    seat, doors = vacancies.next({1, 2})
    assert (seat.name, seat.key, seat.rank, doors) == ("newcomer 1", 3, 0, "127.0.0.1:5001,127.0.0.1:5002")
    assert vacancies.next({1, 2}) is None
    assert list(vacancies.coming) == [3]
    assert vacancies.opened(3, "127.0.0.1:5003")
    assert not vacancies.coming
    for lost in (SEATS[1], SEATS[2], seat):
        vacancies.lost(lost)
    found = [vacancies.next({3}) for _ in range(3)]
    assert [(other.name, other.key, other.rank) for other, _ in found] == [
        ("newcomer 2", 4, 1),
        ("newcomer 3", 5, 2),
        ("newcomer 4", 6, 0),
    ]
    assert {doors for _, doors in found} == {"127.0.0.1:5003"}


def test_after_some_that_ended_before_they_took_part_nobody_comes():
    vacancies = opened()
    vacancies.lost(SEATS[2])
    for attempt in range(IN_VAIN_MAX - 1):
        seat, _ = vacancies.next({0, 1})
        assert (seat.newcomer, seat.rank) == (attempt + 1, 2)
        vacancies.failed(seat.key)
        assert vacancies.why_nobody({0, 1}) is None
    seat, _ = vacancies.next({0, 1})
    vacancies.opened(seat.key, DOOR)  # not in a row
    vacancies.lost(seat)
    for _ in range(IN_VAIN_MAX):
        seat, _ = vacancies.next({0, 1})
        vacancies.failed(seat.key)
    assert vacancies.next({0, 1}) is None
    assert "3 newcomers in a row have ended before they took part" in vacancies.why_nobody({0, 1})
    assert vacancies.why_nobody({0, 1}) is None, "said once"


def test_who_has_come_to_a_door_in_vain_is_followed_by_one_that_comes_to_another_first():
    """The worker there may be left out by the others, and take its time to end."""
    vacancies = opened()
    vacancies.lost(SEATS[2])
    found = []
    for _ in range(IN_VAIN_MAX):
        seat, doors = vacancies.next({0, 1})
        found.append(doors)
        vacancies.failed(seat.key)
    one, other = "127.0.0.1:5000", "127.0.0.1:5001"
    assert found == [f"{one},{other}", f"{other},{one}", f"{one},{other}"]
    vacancies = opened()
    for lost in (SEATS[2], SEATS[2]):
        vacancies.lost(lost)
    first, _ = vacancies.next({0, 1})
    vacancies.failed(first.key)
    second, doors = vacancies.next({0, 1})
    assert doors == f"{other},{one}"
    assert vacancies.opened(second.key, DOOR)
    assert vacancies.next({0, 1, second.key})[1] == f"{other},{DOOR},{one}"
    assert vacancies.next({0}) is None, "that is the last place"


def test_as_many_come_as_are_allowed():
    vacancies = opened(1)
    vacancies.lost(SEATS[2])
    assert vacancies.next({0, 1}) is not None
    assert vacancies.why_nobody({0, 1}) is None
    vacancies.lost(SEATS[1])
    assert vacancies.next({0}) is None
    assert "--max-restarts is 1" in vacancies.why_nobody({0})


def test_nobody_comes_without_a_door_until_there_is_one():
    vacancies = Vacancies()
    vacancies.lost(SEATS[0])
    assert vacancies.next({1, 2}) is None
    assert "none of those that are left has opened a door so far" in vacancies.why_nobody({1, 2})
    assert vacancies.why_nobody({1, 2}) is None
    vacancies.opened(2, DOOR)
    assert vacancies.next({1, 2})[1] == DOOR


def test_nobody_comes_to_a_job_that_ends():
    vacancies = opened()
    vacancies.lost(SEATS[0])
    vacancies.close()
    assert vacancies.next({1, 2}) is None and vacancies.why_nobody({1, 2}) is None


# The pipe.

TELLS = "import os, penstock.launcher_pipe as pipe; pipe.tell(3, door='a:1'); "


def heard(program, *, inherits=True, **environment):
    pipe, inherited, variable = launcher_pipe.offer()
    with pipe:
        try:
            command = [sys.executable, "-c", program]
            environment = {**os.environ, **variable, **environment}
            subprocess.run(command, check=True, env=environment, pass_fds=(inherited,) if inherits else ())
        finally:
            os.close(inherited)
        return [launcher_pipe.understood(line) for line in pipe]


def test_the_launcher_hears_what_a_worker_tells():
    told = heard(f"{TELLS} pipe.tell(3, lost=(1, 2)); pipe.tell(3, lost=range(600)); pipe.tell(0, over=True)")
    assert told[:2] == [{"member": 3, "door": "a:1"}, {"member": 3, "lost": [1, 2]}]
    assert [rank for one in told[2:-1] for rank in one["lost"]] == [*range(600)]
    assert told[-1] == {"member": 0, "over": True}


def test_who_has_not_inherited_the_pipe_tells_nobody():
    again = f"{TELLS} import subprocess, sys; subprocess.run([sys.executable, '-c', {TELLS!r}], check=True)"
    assert heard(again) == [{"member": 3, "door": "a:1"}]
    assert heard(TELLS, inherits=False) == []


def test_nothing_is_written_to_another_file_at_its_number(tmp_path):
    pipe, inherited, variable = launcher_pipe.offer()
    with pipe, (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), inherited)
    try:
        subprocess.run([sys.executable, "-c", TELLS], check=True, env={**os.environ, **variable}, pass_fds=(inherited,))
    finally:
        os.close(inherited)
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize("value", ["", "x", "x:y", "1", ":", "-1:0", f"{10**30}:0", f"0:{10**30}"])
def test_a_variable_that_says_nothing_of_use_is_left_alone(value):
    assert heard(TELLS, **{config.LAUNCHER_PIPE: value}) == []


def test_a_pipe_that_nobody_reads_any_more_is_no_error():
    pipe, inherited, variable = launcher_pipe.offer()
    pipe.close()
    try:
        subprocess.run([sys.executable, "-c", TELLS], check=True, env={**os.environ, **variable}, pass_fds=(inherited,))
    finally:
        os.close(inherited)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"x", b"1", b"[]", b"[" * 4000, b"\xff", b'{"door": "a"', b'{"door": "a"}', b'{"member": 1}'),
        *(b'{"member": "1", "door": "a"}', b'{"member": true, "door": "a"}', b'{"member": 1, "door": 2}'),
        *(b'{"member": 1, "lost": 2}', b'{"member": 1, "lost": [2, "3"]}', b'{"member": 1, "lost": [true]}'),
        *(b'{"member": 1, "over": false}', b'{"member": 1, "over": 1}'),
    ],
)
def test_lines_that_tell_nothing_are_not_taken_for_something(line):
    assert launcher_pipe.understood(line) == {}


def test_lines_that_are_no_messages_are_none():
    for line in (b"", b"x", b"1", b"[]", b"[" * 4000, b"\xff", b'{"door": "a"'):
        assert decode(line) is None

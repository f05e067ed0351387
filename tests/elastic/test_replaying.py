"""A rank's part in a replay, on an engine that does what the test says: who waits for what, and what is told when."""

import queue
from dataclasses import replace

import pytest
from logged_runs import ALL, HEADER, LEFT, WITH, epochs, run

import penstock as ps
from penstock import launchers
from penstock.membership_file import CallPlace, LoggedEpoch
from penstock.replaying import LoggedCourse, as_it_was
from penstock.whole_files import CheckpointKey

PATIENCE_S = 60.0
SOON_S = 0.05
"""For what never comes."""


class PlayedEngine:
    """As much of an engine as a course asks."""

    def __init__(self, *amongs):
        self.amongs = [ALL, *amongs]
        self.begun, self.awaited = [], []
        self.withheld = self.aborted = None
        self.heard = {}
        self.all_here = False
        self.differs = None

    @property
    def epoch(self):
        return len(self.amongs) - 1

    def epochs(self):
        return [([*among], []) for among in self.amongs]

    def members(self):
        return [*self.amongs[-1]]

    def announced(self):
        return [(1, rank, step) for rank, step in self.heard.items()]

    def await_newcomers(self, step):
        self.awaited.append(step)
        self.amongs.append(tuple(sorted({*self.amongs[-1], *self.heard})))
        self.heard = {}

    def withhold(self, rounds):
        assert self.withheld is None
        self.withheld = rounds

    def has_come_to(self, rounds):
        if self.differs is not None:
            raise ps.ConfigError(self.differs)
        return self.all_here

    def begin_step(self, step):
        self.begun.append(step)

    def check(self):
        if self.aborted is not None:
            raise ps.PenstockError(self.aborted)

    def abort(self, why):
        self.aborted = why


@pytest.fixture
def begin():
    """Makes a course, and ends it after the test; what it tells the launcher is in its queue `told`."""
    courses = []

    def make(engine, rank, of=None, limit_s=PATIENCE_S):
        told = queue.Queue()
        course = LoggedCourse(
            engine, run() if of is None else of, rank, limit_s, limit_s, lambda **facts: told.put(facts)
        )
        course.told = told
        courses.append(course)
        return course

    yield make
    for course in courses:
        course.close()


def shown(course):
    return [(epoch.members, epoch.step, epoch.whole_steps) for epoch in course.log(None)]


def test_programs_see_the_epochs_of_the_log_each_at_its_step(begin):
    engine = PlayedEngine()
    course = begin(engine, 0)
    before = [(ALL, 1, 0), (ALL, 1, 3)]
    assert shown(course) == before and course.latest() == 1
    course.begin_step(5)
    assert shown(course) == before and engine.begun == [5]
    engine.amongs += [ALL, LEFT]  # the engine may have more epochs
    course.begin_step(6)
    assert shown(course) == [*before, (LEFT, 6, 4)]
    course.begin_step(9)
    assert shown(course)[-1] == (WITH, 9, 8) and course.expected() == {3}
    assert (course.awaited(8), course.awaited(9)) == (set(), {3})


def test_nobody_begins_the_step_before_the_loss(begin):
    engine = PlayedEngine()
    course = begin(engine, 0, limit_s=SOON_S)
    with pytest.raises(ps.Timeout, match=r"change 1 of 2 of its members \(ranks 1\) does not come about"):
        course.begin_step(6)
    assert engine.begun == [] and "change 1 of 2" in engine.aborted


def test_who_is_to_be_lost_waits_for_nobody_and_stays_out_of_later_rounds(begin):
    engine = PlayedEngine()
    course = begin(engine, 1, limit_s=SOON_S)
    assert engine.withheld == [(2, [(2, 5), (3, 4)]), (4, [(1, 1)])]
    course.begin_step(7)
    assert engine.begun == [7]
    assert begin(other := PlayedEngine(), 2) and other.withheld is None


def test_who_is_to_be_lost_makes_no_later_collective(begin):
    course = begin(PlayedEngine(), 1, limit_s=SOON_S)
    for _ in range(3):
        course.before_call()
        course.after_call(0)
    with pytest.raises(ps.Timeout, match="was lost before this collective"):
        course.before_call()


def test_the_launcher_is_told_once_all_is_here_that_was_over(begin):
    engine = PlayedEngine()
    engine.all_here = True
    course = begin(engine, 0)
    for _ in range(3):
        assert not course._is_ready(0)  # a collective is not over
        course.before_call()
        course.after_call(0)
    assert course._is_ready(0)
    assert course.told.get(timeout=PATIENCE_S) == {"ready": "0"}
    engine.amongs.append(LEFT)
    course.begin_step(6)
    assert course.told.empty(), "once"


def test_a_newcomer_is_asked_for_where_it_came_and_calls_are_counted_anew(begin):
    engine = PlayedEngine(LEFT)
    engine.heard = {3: 40}
    course = begin(engine, 0)
    course.after_call(1)
    assert course._next_call() == CallPlace(0, 2)
    course.begin_step(9)
    course.await_newcomers(9)
    assert course.told.get(timeout=PATIENCE_S) == {"awaits": "3"}
    assert engine.awaited == [40] and course.expected() == set()
    assert course._next_call() == CallPlace(1, 1)
    assert shown(course)[-1] == (WITH, 9, 8) and course.latest() == 4


def test_a_newcomer_knows_its_step(begin):
    course = begin(PlayedEngine(LEFT, LEFT, WITH), 3)
    assert shown(course)[-1] == (WITH, 9, 8)
    assert course.expected() == set()


def test_a_newcomer_that_nobody_starts_is_named(begin):
    course = begin(PlayedEngine(LEFT), 0, limit_s=SOON_S)
    course.begin_step(9)
    with pytest.raises(ps.Timeout, match="rank 3, a newcomer, does not come"):
        course.await_newcomers(9)


@pytest.mark.parametrize(
    ("amongs", "says"),
    [([(0, 1)], "rank 2 was lost"), ([LEFT, (0, 2, 5)], "rank 5 has come"), ([LEFT, (0,)], "rank 2")],
)
def test_a_replay_that_leaves_its_log_says_so(amongs, says, begin):
    engine = PlayedEngine(*amongs)
    course = begin(engine, 0)  # whose thread may see it first
    for _ in range(2):
        with pytest.raises(ps.ConfigError, match=f"the replay has left its log: {says}"):
            course.latest()
    assert says in engine.aborted


def test_a_model_of_other_slices_ends_the_replay_at_once(begin):
    engine = PlayedEngine()
    engine.differs = "it had 5 slices"
    course = begin(engine, 0)
    course._called = CallPlace(0, 3)
    with pytest.raises(ps.ConfigError, match="the replay has left its log: it had 5 slices"):
        course.begin_step(6)
    assert "it had 5 slices" in engine.aborted


def test_of_two_that_were_lost_at_once_one_may_be_lost_first(begin):
    both = LoggedEpoch((0,), 6, 4, (0,), [])
    course = begin(PlayedEngine((0, 2), (0,)), 0, of=replace(run(), epochs=(*epochs()[:2], both), calls=(), end=None))
    course.begin_step(6)
    assert shown(course)[-1] == ((0,), 6, 4)


def test_a_program_goes_on_from_the_checkpoints_of_the_run(begin):
    engine = PlayedEngine()
    course = begin(engine, 0)
    assert [course.next_checkpoint(), course.next_checkpoint()] == [CheckpointKey(10, 0, "5aff5d30.2"), None]
    with pytest.raises(ps.ConfigError, match=r"its program calls penstock\.resume, and that of the run did not"):
        course.next_checkpoint()
    assert "penstock.resume" in engine.aborted


def verdict(course, steps, digests):
    course.judge(steps, digests)
    return course.told.get(timeout=PATIENCE_S)


def test_the_bits_are_compared_at_the_end(begin):
    def course(**more):
        return begin(PlayedEngine(LEFT, WITH), 0, of=replace(run(), **more))

    assert verdict(course(), 20, [-5, 1 << 62])["bits"] == "same"
    assert verdict(course(), 20, [-5, 1])["bits"] == "other"
    short = verdict(course(), 19, [-5, 1 << 62])
    assert short["bits"] == "other" and "ended after 19 steps, and the run after 20" in short["why"]
    assert verdict(course(), 20, [])["bits"] == "unknown"
    assert verdict(course(end=None, calls=()), 20, [-5])["bits"] == "unknown"
    early = begin(PlayedEngine(LEFT), 0)
    assert "after 1 of 2 changes" in verdict(early, 20, [-5, 1 << 62])["why"]


def test_options_that_decide_about_bits_are_those_of_the_run():
    place = {"rendezvous": "file:///tmp/meet", "membership_log": "run.jsonl", "elastic": True}
    launch = launchers.discover({}, rank=0, world_size=3, check_every=7, lanes=4, **place)
    options = as_it_was(launch, run()).options
    assert (options.check_every, options.lanes, options.elastic, options.membership_log) == (500, 1, True, None)
    few = launchers.discover({}, rank=0, world_size=2, **place)
    with pytest.raises(ps.ConfigError, match="3 workers began the run that is replayed, and there are 2 now"):
        as_it_was(few, run())
    assert HEADER.options["check_every"] == 500

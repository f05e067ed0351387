"""When ranks keep steps, what they send for it, and what a report and the log say; on an engine of this process."""

import ctypes
import itertools
import logging
from types import SimpleNamespace

import pytest
from made_up_steps import BOOK, FIRST_PROBE, kept

from penstock import lending
from penstock.tracing import late_watch
from penstock.tracing.late_rows import PROBES, ROUNDS, rows_numbers
from penstock.tracing.late_watch import BETWEEN, FIRST_ROUND, HEARD_AFTER, LateWatch
from penstock.tracing.moments import Moments

LATE_BOOK = 6
UNIT_NS, LATE_UNITS = 100_000, 1800
"""A step takes 0.1 s, or with a late rank 0.28 s."""
CYCLE = ROUNDS + HEARD_AFTER
made = []
"""Engines."""


class Hub:
    """Rounds of all ranks, which call one after the other."""

    def __init__(self, size):
        self.size = size
        self.rounds = {}
        self.waits = []


class OneEngine:
    """As much of the engine as is asked for what ranks tell. Whoever waits for another rank is found out."""

    def __init__(self, hub, rank):
        self.hub, self.rank = hub, rank
        made.append(self)
        self.books, self.seqs = [f"book {number}" for number in range(LATE_BOOK)], {}
        self.observed, self.epoch, self.packed, self.lost = False, 0, b"", 0
        self.kept_for = []
        self.token = 0

    def open_book(self, name, layers, tensors):
        self.books.append(name)
        self.tensors = tensors
        return len(self.books) - 1

    def sequence(self, book):
        assert book == LATE_BOOK
        return [FIRST_PROBE - 1 if self.seqs.get(0) is None else self.seqs[0], self.seqs.get(1, 0)]

    def placement(self, book):
        return [[(0, 8, 1, 0)], []]

    def observe(self, records):
        self.observed = records > 0
        self.kept_for.append(records)
        return 0

    def observations(self):
        return self.packed, self.lost

    def submit(self, book, tensor, ptr, nbytes, op, step):
        assert (book, op) == (LATE_BOOK, "sum") and nbytes == 8 * self.tensors[tensor][3]
        seq = self.seqs[tensor] = self.sequence(book)[tensor] + 1
        memories = self.hub.rounds.setdefault((tensor, seq), {})
        assert self.rank not in memories
        memories[self.rank] = (ctypes.c_int64 * (nbytes // 8)).from_address(ptr)
        if len(memories) == self.hub.size:
            total = [sum(column) for column in zip(*memories.values(), strict=True)]
            for memory in memories.values():
                memory[:] = total
        self.token += 1
        return self.token

    def wait(self, book, tensors):
        for tensor in tensors:
            seq = self.sequence(book)[tensor]
            if len(self.hub.rounds.get((tensor, seq), range(self.hub.size))) < self.hub.size:
                self.hub.waits.append((self.rank, tensor, seq))


class Ranks:
    """Two ranks that train the same steps, one of which may be late."""

    def __init__(self, late=None, size=2, **options):
        self.hub = Hub(size)
        self.engines = [OneEngine(self.hub, rank) for rank in range(size)]
        self.moments = [Moments(engine) for engine in self.engines]
        self.late = late
        self.closed = 0
        self.watches = [
            LateWatch(engine, moments, "model0", BOOK, ["first", "second"], rank, size, **options)
            for rank, (engine, moments) in enumerate(zip(self.engines, self.moments, strict=True))
        ]

    def round(self, backward=(True, True)):
        """One step of all ranks; a rank may have no backward."""
        self.closed += 1
        for watch, has_one in zip(self.watches, backward, strict=True):
            if has_one:
                watch.backward_begins(BOOK)
                watch.backward_begins(BOOK + 1)  # of another model
        for rank, watch in enumerate(self.watches):
            self.see(rank, watch)
            watch.after_round(self.closed)
            watch.after_round(self.closed)  # a second optimizer's step

    def see(self, rank, watch):
        """What a rank has noted by the end of the steps that it keeps."""
        if self.moments[rank].keeper is watch and watch._round + 1 - watch._begins == ROUNDS:
            late = 0 if self.late is None else LATE_UNITS
            begun = {"unit": UNIT_NS, "start": 10_000, "late": late, "is_late": rank == self.late}
            probes = {"probe_book": LATE_BOOK, "first_probe": watch._probes_before + 1}
            moments, self.engines[rank].packed = kept(rank, 1 - rank, ROUNDS - 1, **begun, **probes)
            self.moments[rank].take = lambda: (moments, 0)

    def until(self, rounds):
        while self.closed < rounds:
            self.round()

    @property
    def found(self):
        first, second = (watch.said()["late"] for watch in self.watches)
        assert first == second
        return first


@pytest.fixture(autouse=True)
def no_engine_is_left():
    yield
    for engine in made:
        lending.forget_lent(engine)
    made.clear()


@pytest.mark.parametrize("late", [0, 1])
def test_who_is_late_is_found_by_all_and_said_by_the_first(late, caplog):
    ranks = Ranks(late)
    with caplog.at_level(logging.WARNING, "penstock"):
        ranks.until(FIRST_ROUND + CYCLE - 1)
        assert "the first steps that are looked at are those after step 20" in ranks.found["why"]
        ranks.round()
    (one,) = ranks.found["ranks"]
    assert (one["rank"], one["cause"], one["from_layer"]) == (late, "input", "second")
    assert one["late_ms"] == pytest.approx(180) and one["step_ms"] == pytest.approx(280)
    assert (ranks.found["why"], ranks.found["until_step"]) == (None, FIRST_ROUND + ROUNDS)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(
        f"penstock: the others wait: rank {late} is late by 180.0 ms of 280.0 per step from second on"
    )
    assert ranks.hub.waits == [], "nobody waits for another"


def test_who_is_late_by_little_is_logged_when_it_is_found_again(monkeypatch, caplog):
    monkeypatch.setattr(late_watch, "COST_RATIO", 0)
    monkeypatch.setattr(late_watch, "AT_ONCE_SHARE", 0.9)
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND + CYCLE)
    assert [one["rank"] for one in ranks.found["ranks"]] == [1] and caplog.records == []
    begun_at(ranks, 1)
    ranks.until(ranks.closed + CYCLE)
    assert len(caplog.records) == 1


def test_of_even_ranks_nobody_is_named(caplog):
    ranks = Ranks()
    ranks.until(FIRST_ROUND + CYCLE)
    assert (ranks.found["ranks"], ranks.found["why"], ranks.found["judged_steps"]) == ([], None, ROUNDS - 2)
    assert caplog.records == []


def test_before_the_first_time_nothing_is_opened_or_kept():
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND - 1)
    assert all(len(engine.books) == LATE_BOOK and engine.kept_for == [] for engine in ranks.engines)
    ranks.round()
    assert all(engine.books[LATE_BOOK] == "model0.lateness" and engine.observed for engine in ranks.engines)
    assert all(moments.on for moments in ranks.moments)
    ranks.until(FIRST_ROUND + ROUNDS)
    assert not any(engine.observed for engine in ranks.engines) and not any(moments.on for moments in ranks.moments)
    assert [engine.tensors[1][3] for engine in ranks.engines] == [rows_numbers(2)] * 2


def begun_at(ranks, times):
    """The rounds in which steps began to be kept."""
    found = []
    while len(found) < times:
        kept_before = len(ranks.engines[0].kept_for)
        ranks.round()
        if len(ranks.engines[0].kept_for) > kept_before and ranks.engines[0].observed:
            found.append(ranks.closed)
        assert ranks.watches[0]._begins == ranks.watches[1]._begins
    return found


def test_the_next_time_is_after_ten_seconds_then_more_at_last_a_minute(monkeypatch):
    monkeypatch.setattr(late_watch, "COST_RATIO", 0)
    found = begun_at(Ranks(), 6)  # a step takes 0.1 s
    assert found[0] == FIRST_ROUND
    between = [later - earlier - CYCLE for earlier, later in itertools.pairwise(found)]
    assert between == [100, 200, 400, 600, 600]


def test_what_costs_much_is_done_less_often(monkeypatch):
    monkeypatch.setattr(late_watch, "COST_RATIO", 10**9)
    ranks = Ranks()
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.watches[0]._begins == ranks.watches[1]._begins > ranks.closed + 1000


def test_a_rank_without_a_backward_takes_part_all_the_same():
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND + 1)
    ranks.round(backward=(True, False))
    ranks.until(FIRST_ROUND + CYCLE)
    assert [one["rank"] for one in ranks.found["ranks"]] == [1]
    probes = [seq for tensor, seq in ranks.hub.rounds if tensor == 0]
    assert len(probes) == PROBES and all(len(memories) == 2 for memories in ranks.hub.rounds.values())


def test_while_a_trace_is_written_nobody_is_judged_and_its_records_are_left_alone():
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND - 1)
    ranks.moments[1].keeper = trace = object()
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.engines[1].kept_for == [] and ranks.moments[1].keeper is trace
    assert ranks.found["ranks"] == [] and "rank 1 told nothing" in ranks.found["why"]


def test_where_nobody_knows_how_long_steps_take_the_next_time_is_after_some_hundreds():
    ranks = Ranks(1)
    for moments in ranks.moments:
        moments.keeper = object()
    ranks.until(FIRST_ROUND + CYCLE)
    assert "ranks 0, 1 told nothing" in ranks.found["why"]
    assert {watch._begins for watch in ranks.watches} == {ranks.closed + 2 * BETWEEN}


def test_a_trace_that_begins_meanwhile_takes_over():
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND + 2)
    ranks.moments[0].keeper = trace = object()
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.engines[0].kept_for == [late_watch.RECORDS] and ranks.moments[0].keeper is trace
    assert "rank 0 told nothing" in ranks.found["why"]


def test_observations_that_the_program_has_asked_for_are_left_alone():
    ranks = Ranks(1)
    ranks.engines[0].observed = True
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.engines[0].observed and "rank 0 told nothing" in ranks.found["why"]


def test_where_records_were_lost_more_are_kept_the_next_time(monkeypatch):
    monkeypatch.setattr(late_watch, "COST_RATIO", 0)
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND)
    ranks.engines[1].lost = 5
    ranks.until(FIRST_ROUND + CYCLE)
    assert "rank 1 told nothing" in ranks.found["why"]
    ranks.engines[1].lost = 0
    begun_at(ranks, 1)
    assert ranks.engines[1].kept_for[-1] == 2 * late_watch.RECORDS
    ranks.until(ranks.closed + CYCLE)
    assert [one["rank"] for one in ranks.found["ranks"]] == [1]


@pytest.mark.parametrize("broken", ["row_of", "encode_row", "decode_rows", "conclude"])
def test_no_step_fails_of_what_cannot_be_told_or_judged(broken, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(late_watch, broken, fail)
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.found["ranks"] == [] and ranks.found["why"]
    assert {watch._begins for watch in ranks.watches} != {FIRST_ROUND}


@pytest.mark.parametrize("at", range(FIRST_ROUND - 1, FIRST_ROUND + CYCLE + 2))
def test_ranks_that_rest_have_nothing_under_way_and_begin_again_alike(at):
    ranks = Ranks(1)
    ranks.until(at)
    for watch in ranks.watches:
        watch.rest()
    assert not any(engine.observed for engine in ranks.engines)
    assert all(len(memories) == 2 for memories in ranks.hub.rounds.values())
    rounds = len(ranks.hub.rounds)
    for closed in range(1000, 1050):  # of different numbers of steps
        ranks.watches[0].after_round(closed)
        ranks.watches[1].after_round(7)
        ranks.watches[0].backward_begins(BOOK)
    assert len(ranks.hub.rounds) == rounds
    for watch in ranks.watches:
        watch.resume()
    assert len({(watch._round, watch._begins) for watch in ranks.watches}) == 1
    ranks.closed = 2000
    while not ranks.found["ranks"]:
        ranks.round()
        assert ranks.closed < 2400
    assert ranks.found["ranks"][0]["rank"] == 1 and ranks.hub.waits == []


def test_a_model_that_is_distributed_no_more_is_looked_at_no_more():
    ranks = Ranks(1)
    ranks.until(FIRST_ROUND + 3)
    for watch, moments in zip(ranks.watches, ranks.moments, strict=True):
        assert moments.judge is watch
        watch.stop()
        assert moments.judge is None and not moments.on
        watch.rest()  # of a join, which goes on with what it has found
        watch.resume()
    rounds = len(ranks.hub.rounds)
    ranks.until(FIRST_ROUND + 1000)
    assert len(ranks.hub.rounds) == rounds


def members(*present):
    return SimpleNamespace(members=present, unlogged=set())


def test_where_members_change_meanwhile_nobody_is_judged_by_half():
    membership = members(0, 1)
    ranks = Ranks(1, membership=membership)
    assert all(engine.books[LATE_BOOK:] == ["model0.lateness"] for engine in ranks.engines), "newcomers open it, too"
    ranks.until(FIRST_ROUND + 3)
    membership.members = (0, 1, 2)
    ranks.until(FIRST_ROUND + CYCLE)
    assert ranks.found["ranks"] == [] and "told nothing" in ranks.found["why"]


def test_an_epoch_that_ends_meanwhile_counts_as_a_change():
    ranks = Ranks(1, membership=members(0, 1))
    ranks.until(FIRST_ROUND + 3)
    ranks.engines[0].epoch = 1
    ranks.until(FIRST_ROUND + CYCLE)
    assert "rank 0 told nothing" in ranks.found["why"]


def test_a_newcomer_goes_on_from_where_the_others_are(monkeypatch):
    monkeypatch.setattr(late_watch, "COST_RATIO", 0)
    ranks = Ranks(1, membership=members(0, 1))
    ranks.until(FIRST_ROUND + 3)
    for watch in ranks.watches:
        watch.break_off()  # as `rest` of an elastic part
    # In the place of rank 1 there is another process, with an engine whose rounds go on where they are.
    engine = OneEngine(ranks.hub, 1)
    engine.seqs = dict(ranks.engines[1].seqs)
    ranks.engines[1], ranks.moments[1] = engine, Moments(engine)
    newcomer = LateWatch(engine, ranks.moments[1], "model0", BOOK, ["first", "second"], 1, 2, membership=members(0, 1))
    newcomer.go_on_from(ranks.watches[0].state)
    ranks.watches[1] = newcomer
    assert newcomer.state == ranks.watches[0].state
    ranks.until(ranks.closed + ROUNDS + CYCLE)
    (one,) = ranks.watches[0].said()["late"]["ranks"]
    assert one["rank"] == 1 and ranks.found["ranks"] == [one]


def test_the_same_is_not_said_again_within_a_minute(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(late_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ranks = Ranks(0)
    watch = ranks.watches[0]
    facts = {"late_ms": 180.0, "step_ms": 280.0, "from_layer": None, "causes_ms": {"compute": 180.0, "input": 0.0}}
    one, other = {**facts, "rank": 1, "cause": "compute"}, {**facts, "rank": 1, "cause": "input"}
    for after_s, what, lines in ((0, one, 1), (30, one, 1), (31, other, 2), (32, one, 3), (80, one, 3), (92, one, 4)):
        now[0] = 1000.0 + after_s
        watch._say([what])
        assert len(caplog.records) == lines, after_s

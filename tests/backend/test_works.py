"""Works and the threads that complete their futures, over an engine that does what a test says, when it says so."""

import itertools
import queue
import threading

import pytest

from penstock.errors import PenstockError
from penstock.torch.backend.works import Completer, Work

LIMIT_S = 60


class Engine:
    """Reports as done what is put into `done`, and ends with an error of the job."""

    def __init__(self):
        self.done = queue.SimpleQueue()
        self.asked = threading.Semaphore(0)

    def take_done(self, _):
        self.asked.release()
        done = self.done.get(timeout=LIMIT_S)
        if done is None:
            raise PenstockError("the end of the test")
        return done


class Call:
    """Is done when the test says so."""

    def __init__(self, number):
        self.id = number

    def watch(self):
        pass


class CallDoneAtOnce:
    """Is done before the thread that asks to watch it goes on, and all that follows from it is, too."""

    id = 1

    def __init__(self, engine, dealt_with):
        self.engine = engine
        self.dealt_with = dealt_with

    def watch(self):
        assert self.engine.asked.acquire(timeout=LIMIT_S)  # it waits for calls
        self.engine.done.put([self.id])
        assert self.dealt_with.wait(LIMIT_S)


def test_a_future_is_completed_once_where_nothing_follows_the_first_calls():
    engine = Engine()
    completer = Completer(engine)
    finished, dealt_with = [], threading.Event()

    def finish():
        finished.append(1)
        dealt_with.set()

    try:
        work = Work(completer, [CallDoneAtOnce(engine, dealt_with)], ["result"], finish, LIMIT_S, follow=list)
        assert work.get_future().wait() == ["result"]
        assert finished == [1]
    finally:
        engine.done.put(None)


@pytest.mark.parametrize("together", [True, False])
def test_callbacks_may_wait_for_other_futures(together):
    """Each for the next one, and all are begun before the last is done: also where one look finds all of them done."""
    engine = Engine()
    completer = Completer(engine)
    works = [Work(completer, [Call(number)], number, lambda: None, LIMIT_S) for number in range(5)]
    futures = [work.get_future() for work in works]
    ended = threading.Event()
    try:
        chained = [one.then(lambda _, other=other: other.wait()) for one, other in itertools.pairwise(futures)]
        chained[0].add_done_callback(lambda _: ended.set())
        for numbers in [[0, 1, 2, 3, 4]] if together else [[0], [1], [2], [3], [4]]:
            engine.done.put(numbers)
        assert ended.wait(LIMIT_S), "a callback waits for a future that is completed after it"
        assert [one.wait() for one in chained] == [1, 2, 3, 4]
    finally:
        engine.done.put(None)


def test_what_the_end_of_a_job_calls_may_wait_for_what_it_ends():
    engine = Engine()
    completer = Completer(engine)
    first, second = (Work(completer, [Call(number)], number, lambda: None, LIMIT_S).get_future() for number in (1, 2))
    ended = threading.Event()
    chained = first.then(lambda _: second.wait())
    chained.add_done_callback(lambda _: ended.set())
    engine.done.put(None)
    assert ended.wait(LIMIT_S), "a callback waits for a future that is ended after it"
    with pytest.raises(RuntimeError, match="the end of the test"):
        chained.wait()

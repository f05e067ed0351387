"""Works and the thread that completes their futures, over an engine that does what a test says, when it says so."""

import queue
import threading

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
    """Is done before the thread that asks to watch it goes on, and all that follows from it is, too."""

    id = 1

    def __init__(self, engine):
        self.engine = engine

    def watch(self):
        assert self.engine.asked.acquire(timeout=LIMIT_S)  # it waits for calls
        self.engine.done.put([self.id])
        assert self.engine.asked.acquire(timeout=LIMIT_S)  # it has dealt with this one


def test_a_future_is_completed_once_where_nothing_follows_the_first_calls():
    engine = Engine()
    completer = Completer(engine)
    finished = []
    try:
        work = Work(completer, [Call(engine)], ["result"], lambda: finished.append(1), LIMIT_S, follow=list)
        assert work.get_future().wait() == ["result"]
        assert finished == [1]
    finally:
        engine.done.put(None)

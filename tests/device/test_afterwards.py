"""Calls after events: in the order given, none before its event, and who waits hears what one of them has raised."""

from __future__ import annotations

import threading

import pytest

from penstock.torch.runtime.afterwards import Afterwards

WAIT_S = 30.0


class Event:
    """As torch's, passed when the test says so."""

    def __init__(self):
        self.passed = threading.Event()

    def query(self):
        return self.passed.is_set()


def test_calls_wait_for_their_events_and_for_those_before():
    afterwards, made, first, second = Afterwards(), [], Event(), Event()
    afterwards.call(first, lambda: made.append("first"))
    afterwards.call(second, lambda: made.append("second"))
    second.passed.set()
    assert not afterwards.wait(0.05) and made == []
    first.passed.set()
    assert afterwards.wait(WAIT_S) and made == ["first", "second"]
    afterwards.call(second, lambda: made.append("third"))  # the thread has come to an end meanwhile, or not
    assert afterwards.wait(WAIT_S) and made == ["first", "second", "third"]


def test_what_a_call_raises_is_raised_once_where_somebody_waits_and_ends_the_rest():
    afterwards, made, event = Afterwards(), [], Event()

    def fails():
        raise ValueError("not sent")

    afterwards.call(event, fails)
    afterwards.call(event, lambda: made.append("after"))
    event.passed.set()
    with pytest.raises(ValueError, match="not sent"):
        afterwards.wait(WAIT_S)
    assert afterwards.wait(WAIT_S) and made == []


def test_abandoned_calls_are_not_made():
    afterwards, made, event = Afterwards(), [], Event()
    afterwards.call(event, lambda: made.append("abandoned"))
    afterwards.abandon()
    event.passed.set()
    afterwards.call(event, lambda: made.append("next"))
    assert afterwards.wait(WAIT_S) and made == ["next"]


def test_a_device_that_fails_is_heard_of_where_somebody_waits():
    afterwards, made, good = Afterwards(), [], Event()

    class Failed:
        asked = 0

        def query(self):
            Failed.asked += 1
            if Failed.asked > 3:
                raise RuntimeError("illegal access")
            return False

    afterwards.call(Failed(), lambda: made.append("never"))
    with pytest.raises(RuntimeError, match="illegal access"):
        afterwards.wait(WAIT_S)
    good.passed.set()
    afterwards.call(good, lambda: made.append("the thread is there still"))
    assert afterwards.wait(WAIT_S) and made == ["the thread is there still"]

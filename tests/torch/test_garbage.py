"""Garbage that is due is collected when `collect_if_due` is called; and no other."""

import gc
import weakref

import pytest

from penstock.torch.runtime.garbage import collect_if_due


class Ring:
    def __init__(self):
        self.itself = self


@pytest.fixture
def old_garbage():
    """A ring that nobody refers to, which only a full collection frees."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 100_000, 1)
    ring = Ring()
    gc.collect()
    found = weakref.ref(ring)
    del ring
    yield found
    gc.enable()
    gc.set_threshold(*thresholds)


def test_what_is_due_is_collected(old_garbage):
    collect_if_due()
    assert old_garbage() is not None, "nothing is due after a full collection"
    for _ in range(2):
        gc.collect(1)
    collect_if_due()
    assert old_garbage() is None


def test_a_program_may_have_turned_it_off(old_garbage):
    for _ in range(2):
        gc.collect(1)
    gc.disable()
    collect_if_due()
    assert old_garbage() is not None
    gc.enable()
    gc.set_threshold(100_000, 100_000, 0)
    collect_if_due()
    assert old_garbage() is not None

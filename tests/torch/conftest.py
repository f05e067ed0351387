"""Every test runs on the fake engine and on the native one; those that look into the fake one only there.

Of each file `make test` runs a third on the native engine, and `make test-long` the rest: the combinations are those
of the front end, which the fake engine, of the worse temper, tries all of. In a fourth of all tests odd ranks run
under another default device, which slows every operation down.
"""

import collections
import importlib.util
import zlib

import pytest
import ranks
import torch._dynamo  # noqa: F401 - the first optimizer imports it: not from several rank threads at once

from penstock.torch.updates import optimizer, partial

NATIVE_EVERY = 3  # of the combinations of the tests of one file
OTHER_DEFAULT_EVERY = 4


def pytest_configure(config):
    config.addinivalue_line("markers", "fake_only: looks into the fake engine, or needs it to be as late as it may")


def pytest_generate_tests(metafunc):
    marks = metafunc.definition.iter_markers("parametrize")
    if "arm" in metafunc.fixturenames and not any("arm" in mark.args[0] for mark in marks):  # none of its own
        native = importlib.util.find_spec("penstock._native") is not None
        fake_only = metafunc.definition.get_closest_marker("fake_only") is not None
        # The fake engine, of the worse temper, is that of `make check`.
        of_native = [pytest.param("native", marks=pytest.mark.slow)] if native and not fake_only else []
        metafunc.parametrize("arm", ["threads", *of_native], indirect=True)


seen = collections.Counter()


def pytest_itemcollected(item):
    if hasattr(item, "callspec") and item.callspec.params.get("arm") == "native":
        if seen[item.path] % NATIVE_EVERY:
            item.add_marker(pytest.mark.long)
        seen[item.path] += 1


@pytest.fixture(autouse=True)
def arm(request, monkeypatch):
    """Which engine `ranks.run` uses: threads or native."""
    monkeypatch.setattr(ranks, "arm", request.param)
    chosen = zlib.crc32(request.node.nodeid.encode()) % OTHER_DEFAULT_EVERY == 0
    monkeypatch.setattr(ranks, "other_default", chosen and "compile" not in request.node.nodeid)
    if request.param == "threads":
        # Models under test are tiny: here everything is updated in pieces and waited for by itself, with the native
        # engine nothing.
        monkeypatch.setattr(optimizer, "WAIT_BYTES", 1)
        monkeypatch.setattr(partial, "PIECE_ELEMS", 5)
        monkeypatch.setattr(partial, "CUT_MIN_BYTES", 1)
    return request.param

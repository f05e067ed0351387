"""The error classes: their family, their attributes, and that they survive a trip between processes."""

import pickle
import subprocess
import sys

import pytest

import penstock as ps
from penstock import errors

KINDS = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_with_all_attributes(kind):
    error = kind("what, where, what to do", rank=3, layer="fc1", step=7, peer="10.0.0.1:5000")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == "what, where, what to do"
    assert (copy.rank, copy.layer, copy.step, copy.peer) == (3, "fc1", 7, "10.0.0.1:5000")


@pytest.mark.parametrize("kind", KINDS)
def test_is_caught_as_penstock_error_and_attributes_default_to_none(kind):
    with pytest.raises(ps.PenstockError) as caught:
        raise kind("message")
    assert (caught.value.rank, caught.value.layer, caught.value.step, caught.value.peer) == (None, None, None, None)


def test_standard_families():
    assert issubclass(ps.ConfigError, ValueError)
    assert issubclass(ps.Timeout, TimeoutError)


def test_import_loads_no_framework_and_names_resolve_lazily():
    program = (
        "import sys, penstock as ps\n"
        "assert not {'torch', 'numpy', 'penstock.job', 'penstock.config'} & set(sys.modules), sorted(sys.modules)\n"
        "ps.init, ps.rank, ps.Options, ps.PeerLost, ps.__version__\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert set(ps.__all__) <= set(dir(ps))\n"
        "assert not hasattr(ps, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

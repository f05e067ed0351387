"""A real MPI inside groups: real processes, started by MPICH's own launcher from its wheel."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps
from benchmarks import mpi_process
from lab import peers

RANK = Path(__file__).with_name("inside_rank.py")
LIMIT_S = 120
RANKS = 4
# Above each process: MPI's launcher, which kills all when it sees one die, does not see it before the others do.
UNSEEN = ("sh", "-c", '"$@" || sleep 5', "sh")


@pytest.fixture(scope="module")
def mpi(tmp_path_factory):
    """MPI's launcher and the environment of its processes: mpi4py of this environment, or that of the lab's peer."""
    if importlib.util.find_spec("mpi4py") is not None:
        launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        if launcher is not None:
            return launcher, dict(os.environ)
    found = peers.state(peers.PEERS["mpich"])
    if found.state != "installed":
        pytest.skip(f"no MPI here: `pip install mpi4py mpich`, or `python -m lab.peers install mpich` ({found.reason})")
    try:
        lent = mpi_process.lent(found.python, tmp_path_factory.mktemp("mpi4py"))
    except RuntimeError as error:
        pytest.skip(str(error))
    return str(Path(found.python).with_name("mpiexec")), {**os.environ, **lent}


@pytest.fixture
def case(mpi, tmp_path):
    """What ranks found in a case, by rank; of those that came to its end. All processes end in time, or it fails."""

    def run(name, *above, may_be_silent=False):
        launcher, environment = mpi
        program = [sys.executable, str(RANK), name, str(tmp_path / "meet")]
        command = [launcher, "-n", str(RANKS), *above, *program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=tmp_path
        )
        found = {}
        for line in done.stdout.replace("}{", "}\n{").splitlines():
            if line.startswith("{"):
                told = json.loads(line)
                found[told["rank"]] = told["found"]
        assert found or may_be_silent, f"no rank came to the end of {name}: {done.stdout}{done.stderr}"
        return found

    return run


@pytest.mark.slow
def test_sums_inside_and_across_are_those_of_one_process(case):
    assert case("values") == dict.fromkeys(range(RANKS), "well")


@pytest.mark.slow
def test_what_does_not_fit_is_refused_on_all_ranks_and_the_job_goes_on(case):
    found = case("misfits")
    assert len(found) == RANKS and all(theirs == found[0] for theirs in found.values())
    said = {name: [text] for name, text in found[0].items()}
    for name, words in {
        "order": "group of ranks [0, 1, 2, 3], and the communicator that rank 0 gives inside is of ranks [3, 2, 1, 0]",
        "too few": "group of ranks [0, 1, 2, 3], and the communicator that rank 0 gives inside is of ranks [0, 1]",
        "one gives none": "rank 1 gives inside a communicator, and rank 0 of [0, 1, 2, 3] none",
        "a stranger gives one": "rank 2 gives inside a communicator, and it is no member of [0, 1]",
        "no communicator": "inside is 'MPI_COMM_WORLD'; give a communicator of mpi4py",
        "plain parts": "Group([0, 1]) has no MPI inside",
        "both": "some groups and some ranks",
        "half": "float16 cannot be summed by MPI",
        "list": "a list of 2 tensors",
        "average": "no average of int32",
    }.items():
        assert words in said.pop(name)[0]
    assert not said


@pytest.mark.slow
def test_ranks_whose_calls_differ_are_named_before_mpi_sums(case):
    for kind, text, rank, _ in case("other_call").values():
        if kind == "ConfigError":
            assert "rank 1 calls allreduce of 20 bytes of f32" in text and "rank 0 allreduce of 28 bytes" in text
        else:
            assert kind == "PeerLost"
        assert rank is not None


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_bounded_time(case):
    found = case("late")
    found.pop(1, None)
    for kind, text, rank, seconds in found.values():
        assert (kind, rank) == ("Timeout", 1) and "it waits for rank 1" in text
        assert 2.5 < seconds < 6.0


@pytest.mark.slow
def test_a_rank_that_fails_while_mpi_sums_is_named(case):
    for kind, text, rank, _ in case("lost").values():
        assert (kind, rank) == ("PeerLost", 1) and "the disk is full" in text


@pytest.mark.slow
def test_a_rank_that_is_killed_inside_is_named_and_the_others_end(case):
    found = case("killed", *UNSEEN)
    assert sorted(found) == [0, 2, 3]
    for kind, text, rank, seconds in found.values():
        assert (kind, rank) == ("PeerLost", 1) and "its process has ended" in text
        assert seconds < 10.0


@pytest.mark.slow
def test_no_process_outlives_one_that_is_killed_while_it_sums(case):
    # MPI's own error may end them first.
    for _, text, rank, seconds in case("killed_while_it_sums", *UNSEEN, may_be_silent=True).values():
        assert rank is not None and seconds < 10.0, text


@pytest.mark.slow
def test_a_rank_that_stops_inside_is_named_and_all_processes_end(case):
    found = case("frozen")
    assert sorted(found) == [0, 2, 3]
    for kind, text, rank, seconds in found.values():
        assert (kind, rank) == ("PeerLost", 1) and "no sign of life" in text
        assert seconds < 10.0


@pytest.mark.slow
def test_an_mpi_that_never_ends_is_given_up_in_bounded_time(case):
    found = case("stuck")
    for kind, text, _, seconds in found.values():
        assert kind in ("Timeout", "PeerLost") and "has waited 3 s" in text and "Iallreduce of MPI" in text
        assert 2.5 < seconds < 10.0


@pytest.mark.slow
def test_what_mpi_reports_says_on_which_rank(case):
    for kind, text, rank, _ in case("broken").values():
        assert kind in ("PenstockError", "PeerLost") and rank == 1
        assert "rank 1 in the group of [0, 1, 2, 3]: MPI failed" in text


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    ps.init(rank=0, world_size=1)
    try:
        with pytest.raises(ps.ConfigError, match="pip install mpi4py mpich"):
            ps.new_group([0], inside=object())
    finally:
        ps.shutdown()

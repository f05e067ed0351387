"""Programs written for `DistributedDataParallel`, without a word of Penstock: `penstock run` gives them what gloo does.

Each is run twice, and saves what each rank has at the end. Programs whose parts are left to torch say so in a warning.
"""

import re
import shutil
from pathlib import Path

import programs
import pytest
import torch

HERE = Path(__file__).parent
LIMIT_S = 120
TOLERANCE = 1e-5

QUICK = ("char_gpt", "dcgan", "uneven_inputs")
LONG = (
    "resnet_classifier",
    "accumulation",
    "mixed_precision",
    "resuming",
    "several_losses",
    "sparse_embeddings",
    "optimizers",
    "left_to_torch",
    "corners",
)
REPLACED = "DistributedDataParallel is Penstock's here"


TORCH_FAILS = ("terminate called without an active exception", "Gloo connectFullMesh failed")
"""What torch's own process groups have been seen to end with now and then, or not to begin with, on a busy machine."""


def under_penstock(program, out, *options, workers=2):
    """Run it as a user does; its lines, sorted, and what went to standard error."""
    out.mkdir()
    command = ["-m", "penstock", "run", "--nproc-per-node", workers, *options, HERE / f"{program}.py", out]
    ended = programs.run(*command, timeout=LIMIT_S)
    if ended.returncode and "--keep-ddp" in options and any(words in ended.stderr for words in TORCH_FAILS):
        shutil.rmtree(out)
        out.mkdir()
        ended = programs.run(*command, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines()), ended.stderr


def saved(out):
    return [torch.load(path, weights_only=True) for path in sorted(out.glob("[0-9].pt"))]


def check_same(program, tmp_path, workers=2, ranks=2):
    theirs, plain = under_penstock(program, tmp_path / "theirs", "--keep-ddp", workers=workers)
    ours, errors = under_penstock(program, tmp_path / "ours", workers=workers)
    assert REPLACED in errors
    assert REPLACED not in plain and "left to torch" not in plain
    if ranks == 2:  # whose sums have one order
        assert ours == theirs
    states = list(zip(saved(tmp_path / "ours"), saved(tmp_path / "theirs"), strict=True))
    assert len(states) == ranks
    for rank, (mine, other) in enumerate(states):
        assert list(mine) == list(other)
        for name, value in mine.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=TOLERANCE, msg=f"rank {rank}: {name}")
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("program", QUICK)
def test_a_program_ends_with_the_parameters_that_it_has_under_gloo(program, tmp_path):
    assert "Warning" not in check_same(program, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("program", LONG)
def test_more_programs_do(program, tmp_path):
    errors = check_same(program, tmp_path)
    left = re.findall(r"left to torch's DistributedDataParallel, on gloo: (.*)", errors)
    if program == "left_to_torch":
        assert [text.split(",")[0] for text in left] == [
            "its process_group has ranks [0]",
            "parameters of it are to be ignored",
            "it has the communication hook powerSGD_hook",
            "it has the communication hook allreduce_hook",
            "it is a list of parameters",
        ]
    else:
        assert not left, errors


@pytest.mark.long
@pytest.mark.parametrize("program", ["resnet_classifier", "several_losses", "uneven_inputs", "accumulation"])
def test_three_ranks_differ_by_rounding_only(program, tmp_path):
    check_same(program, tmp_path, workers=3, ranks=3)


@pytest.mark.long
def test_so_does_one_that_spawns_its_ranks(tmp_path):
    check_same("spawned", tmp_path, workers=1)


@pytest.mark.slow
def test_what_becomes_of_models_optimizers_and_the_job(tmp_path):
    said, errors = under_penstock("looked_into", tmp_path / "out")
    assert said == ["[rank 0] seen", "[rank 1] seen"], errors


@pytest.mark.long
def test_with_servers_and_from_torchruns_command_line(tmp_path):
    theirs, _ = under_penstock("dcgan", tmp_path / "theirs", "--keep-ddp")
    words = ["--standalone", "--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--servers=1"]
    ours, errors = under_penstock("dcgan", tmp_path / "ours", *words)
    assert REPLACED in errors
    lines = [re.sub(r"\[rank +", "[rank ", line) for line in ours if not line.startswith("[server")]
    assert sorted(lines) == theirs

"""Every example runs plainly and by two ranks, and learns the same either way.

Under torchrun itself tests/test_listings.py runs one, as README says.
"""

import ast
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import programs
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LIMIT_S = 180


def run_plainly(name, *arguments):
    done = programs.run(EXAMPLES / name, *arguments, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_by_two(name, *arguments):
    return programs.run_ranks(2, EXAMPLES / name, *arguments, timeout=LIMIT_S)


def run_by_torchrun(name, *arguments):
    done = programs.run(*TORCHRUN, EXAMPLES / name, *arguments, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Small Parquet files like CIFAR-10's, of noise that can be told apart by its brightness."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq
    from PIL import Image

    path = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for split, count in (("train", 64), ("test", 40)):
        rows, labels = [], [index % 10 for index in range(count)]
        for label in labels:
            pixels = random.integers(20 * label, 20 * label + 60, (32, 32, 3)).astype(np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "png")
            rows.append({"bytes": buffer.getvalue(), "path": "x.png"})
        pq.write_table(pa.table({"img": rows, "label": labels}), path / f"{split}-00000-of-00001.parquet")
    return path


@pytest.mark.parametrize(
    ("run", "workers"), [(run_plainly, 1), (run_by_two, 2), pytest.param(run_by_torchrun, 2, marks=pytest.mark.long)]
)
def test_minimal(run, workers, tmp_path):
    said = run("minimal.py", tmp_path / "model.pt").splitlines()
    assert len(said) == 4
    assert said[-1].endswith(f"on {workers} worker(s)")
    shares = [float(line.split("%")[0].split()[-1]) for line in said]
    assert 50 < shares[0] < shares[-1] < 100  # it learns, and its metric is a share of all samples
    torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).load_state_dict(
        torch.load(tmp_path / "model.pt")
    )


def test_cifar10_has_the_network_of_the_paper():
    assert sum(p.numel() for p in load("cifar10.py").Quick().parameters()) == 145_578


@pytest.mark.long
def test_cifar10_gives_the_same_curve_with_two_workers(pictures, tmp_path):
    common = ["--data", pictures, "--epochs", 2, "--threads", 1, "--json-lines"]
    run_plainly("cifar10.py", *common, tmp_path / "one.jsonl", "--batch", 16)
    run_by_two("cifar10.py", *common, tmp_path / "two.jsonl", "--batch", 8)
    one, two = lines(tmp_path / "one.jsonl"), lines(tmp_path / "two.jsonl")
    assert [line["step"] for line in one] == [line["step"] for line in two] == [4, 8]
    assert [line["workers"] for line in one + two] == [1, 1, 2, 2]
    for alone, together in zip(one, two, strict=True):
        assert alone["test_loss"] == pytest.approx(together["test_loss"], rel=1e-4)


def test_cifar10_says_where_it_looked_for_data(tmp_path):
    done = programs.run(EXAMPLES / "cifar10.py", "--data", tmp_path, timeout=LIMIT_S)
    assert done.returncode == 1
    assert done.stderr == f"cifar10: no train-*.parquet in {tmp_path}; give the directory with --data\n"


@pytest.mark.long
def test_char_lm_gives_the_same_curve_with_two_workers(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    common = ["--data", text, "--steps", 4, "--every", 4, "--json-lines"]
    run_plainly("char_lm.py", *common, tmp_path / "one.jsonl", "--batch", 4)
    run_by_two("char_lm.py", *common, tmp_path / "two.jsonl", "--batch", 2)
    one, two = lines(tmp_path / "one.jsonl"), lines(tmp_path / "two.jsonl")
    assert [line["step"] for line in one] == [line["step"] for line in two] == [4]
    for alone, together in zip(one, two, strict=True):
        assert alone["held_out_loss"] == pytest.approx(together["held_out_loss"], rel=1e-4)


def test_kvstore_ends_alike_with_any_number_of_workers():
    one, two = run_plainly("kvstore.py"), run_by_two("kvstore.py")
    losses = [[float(line.split("loss ")[1].split()[0]) for line in said.splitlines()] for said in (one, two)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert "on 1 worker(s)" in one and "on 2 worker(s)" in two


@pytest.mark.parametrize(("run", "workers"), [(run_plainly, 1), (run_by_two, 2)])
def test_local_updates_learn_and_go_on(run, workers, tmp_path):
    said = run("local_updates.py", tmp_path).splitlines()
    shares = [float(line.split("%")[0].split()[-1]) for line in said]
    assert len(shares) == 4 and 50 < shares[0] < shares[-1] < 100
    assert said[-1].endswith(f"on {workers} worker(s)")
    for rank in range(workers):
        saved = torch.load(tmp_path / f"worker-{rank}.pt")
        assert saved["steps"] == 256
        torch.save({**saved, "epochs": 3}, tmp_path / f"worker-{rank}.pt")
    assert run("local_updates.py", tmp_path).startswith("epoch 4: ")


def percent(line):
    return float(re.search(r"([\d.]+)%", line).group(1))


@pytest.mark.parametrize(("run", "workers"), [(run_plainly, 1), (run_by_two, 2)])
def test_asynchronous_says_how_late_gradients_were(run, workers):
    said = run("asynchronous.py").splitlines()
    assert len(said) == 5 * workers + 1
    for rank in range(workers):
        *epochs, late = (line for line in said if line.startswith(f"worker {rank}"))
        losses = [float(re.search(r"loss ([\d.]+)", line).group(1)) for line in epochs]
        assert len(losses) == 4 and losses[-1] < 0.6 * losses[0]
        counts = ast.literal_eval(late.split("so often: ")[1])
        # Of two layers in each of 4 * 64 steps; alone there are no others.
        assert sum(counts.values()) == (2 * 256 if workers == 2 else 0), counts
        assert max(counts, default=0) <= 2 * (4 + 1), counts
    (end,) = (line for line in said if line.startswith("at the end"))
    assert end.endswith(f"on {workers} worker(s)") and percent(end) > 85


@pytest.mark.parametrize(("run", "workers"), [pytest.param(run_plainly, 1, marks=pytest.mark.long), (run_by_two, 2)])
def test_elastic_averaging_ends_at_its_centre(run, workers):
    said = run("elastic_averaging.py").splitlines()
    assert [sum(f"worker {rank}, epoch" in line for line in said) for rank in range(workers)] == [8, 6][:workers]
    (centre,) = (line for line in said if line.startswith("the centre"))
    assert centre.endswith(f"of {workers} worker(s)") and percent(centre) > 85
    assert sum("by its own parameters" in line for line in said) == workers

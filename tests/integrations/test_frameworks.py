"""Frameworks that users train with, the real ones: examples/with_*.py as they stand, beside the same programs on gloo.

What a framework does with torch's DDP, or FSDP's own HSDP, on gloo is what it must do with Penstock, to the last digits
that a sum of two in another order can change; and gradients must have gone through Penstock's engine. `make
test-integrations` has the frameworks; elsewhere a test skips where one is missing.
"""

import ast
import functools
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import programs
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300
ENDS_S = 20
"""How long what a program has started may take to end after it."""
TOLERANCE = 1e-6
LINES_MAX = 60
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
PENSTOCK_RUN = ("-m", "penstock", "run", "--nproc-per-node")

PARAMETERS_BYTES = 4 * (16 * 64 + 64 + 64 * 4 + 4)
"""Of the model that all examples train, in fp32."""

REPORT = """
import json as _json, os as _os, pathlib as _pathlib
import penstock as _ps
_sent = max(_ps.report()["bytes_sent"], _ps.report()["call_bytes_sent"])
_pathlib.Path(f"sent-{_os.environ['RANK']}.json").write_text(_json.dumps(_sent))
"""
REPLACED = "DistributedDataParallel is Penstock's here"
WAITS = "waits for all averages"
LEFT = "left to torch's"


def needs(*frameworks):
    for name in frameworks:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: `make test-integrations` has it")


def changed(name, *changes):
    """The text of an example with parts of it replaced, each of which it must have."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    return text


def run(text, directory, *launcher):
    """Run a program by a launcher, or plainly, in a directory of its own; what it has said. It leaves no process."""
    directory.mkdir(exist_ok=True)
    (directory / "program.py").write_text(text, encoding="utf-8")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TORCHELASTIC_"))}
    mine |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    mine |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32), "CUDA_VISIBLE_DEVICES": ""}
    mark = f"TEST_OF_FRAMEWORKS={secrets.token_hex(16)}"
    mine |= [mark.split("=")]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray") as mine["RAY_TMPDIR"]:
        # Afresh: launchers and Ray start their workers by the interpreter that runs them.
        process = subprocess.Popen(
            [sys.executable, *map(str, launcher), "program.py", "parameters.pt", str(directory)],
            cwd=directory,
            env=mine,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
            deadline = time.monotonic() + (ENDS_S if process.returncode == 0 else 0)
            while (left := running(mark)) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            for pid in running(mark):
                os.kill(pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{out}\n{errors}"
    assert not left, f"still there after {ENDS_S} s: {left}\n{out}\n{errors}"
    return out, errors


def running(mark):
    """Processes, by their ids, with this in the environment that they began with: the command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (PermissionError, ProcessLookupError, FileNotFoundError):
                pass  # another's, or at its end
    return found


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory):
    """Where a program without Penstock has left its parameters; each runs once, for all tests that ask for it."""

    @functools.cache
    def trained(text, ranks=2):
        directory = tmp_path_factory.mktemp("gloo")
        run(text, directory, *TORCHRUN, ranks)
        return directory

    return trained


def parameters(directory):
    """What rank 0 has saved, without the prefix that wrappers give to names."""
    saved = torch.load(directory / "parameters.pt", weights_only=True)
    return {name.removeprefix("module."): value for name, value in saved.items()}


def check_same(ours, gloo):
    mine, theirs = parameters(ours), parameters(gloo)
    assert list(mine) == list(theirs) and len(mine) == 4
    for name, value in mine.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=0, atol=TOLERANCE, msg=lambda said, name=name: f"{name}: {said}"
        )


def check_sent(directory, ranks, steps, each_bytes=PARAMETERS_BYTES):
    """Of two that average a gradient each sends as much as it has, whatever the algorithm; less a margin."""
    sent = [json.loads(path.read_text()) for path in sorted(directory.glob("sent-*.json"))]
    assert len(sent) == ranks
    assert sum(sent) >= 0.9 * ranks * steps * each_bytes, sent


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("with_*.py")), ids=lambda path: path.stem)
def test_an_example_fits_on_a_page_and_is_run_here(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX
    assert f'"{path.name}"' in Path(__file__).read_text(encoding="utf-8")


# Lightning

LIGHTNING = "with_lightning.py"
STRATEGY = (
    ("from penstock.integrations.lightning import PenstockStrategy\n", ""),
    ("import lightning as L\n", "import lightning as L\nfrom lightning.pytorch.strategies import DDPStrategy\n"),
)
NO_REPORT = ("ps.report()['bytes_sent']", "0")


def lightning_on(backend):
    return (*STRATEGY, ("PenstockStrategy()", f'DDPStrategy(process_group_backend="{backend}")'), NO_REPORT)


MANUALLY = (
    ("super().__init__()\n", "super().__init__()\n        self.automatic_optimization = False\n"),
    ("    gradient_clip_val=1.0,\n", ""),
    (
        "        return loss\n",
        "        optimizer = self.optimizers()\n"
        "        optimizer.zero_grad()\n"
        "        self.manual_backward(loss)\n"
        "        self.manual_backward(F.mse_loss(self.net(x), torch.zeros(len(x), 4)))\n"
        "        optimizer.step()\n",
    ),
)


ACCUMULATED = (
    (
        "    gradient_clip_val=1.0,\n",
        '    accumulate_grad_batches=2,\n    precision="bf16-mixed",\n    limit_train_batches=7,\n',
    ),
)
RESUMED = (
    ("    max_epochs=2,\n", "    max_epochs=1,\n"),
    (
        "trainer.fit(model, loader)  # each worker has its share of the samples\n",
        "trainer.fit(model, loader)\n"
        'trainer.save_checkpoint("first.ckpt")\n'
        "model = Classifier()\n"
        "trainer = L.Trainer(\n"
        '    accelerator="cpu", devices=2, strategy=PenstockStrategy(), max_epochs=2, gradient_clip_val=1.0,\n'
        "    logger=False, enable_checkpointing=False, enable_progress_bar=False,\n"
        ")\n"
        'trainer.fit(model, loader, ckpt_path="first.ckpt")\n',
    ),
)
VARIANTS = {
    "automatically": (16, ()),
    "with two backwards by hand": (16, MANUALLY),
    "accumulating, with mixed precision": (8, ACCUMULATED),
    "from a checkpoint": (16, RESUMED),
}
"""How many averages of all gradients there are, and what else than in the example."""


@pytest.mark.parametrize(("averages", "more"), VARIANTS.values(), ids=VARIANTS)
def test_lightning_trains_with_our_strategy_as_with_ddp_on_gloo(averages, more, on_gloo, tmp_path):
    needs("lightning")
    _, errors = run(changed("with_lightning.py", *more) + REPORT, tmp_path / "ours", *TORCHRUN, 2)
    assert REPLACED in errors and WAITS not in errors and LEFT not in errors, errors
    check_same(tmp_path / "ours", on_gloo(changed(LIGHTNING, *more, *lightning_on("gloo"))))
    check_sent(tmp_path / "ours", ranks=2, steps=averages)


def test_lightning_trains_on_the_backend_by_its_name(on_gloo, tmp_path):
    needs("lightning")
    run(changed(LIGHTNING, *lightning_on("penstock")) + REPORT, tmp_path / "ours", *TORCHRUN, 2)
    check_same(tmp_path / "ours", on_gloo(changed(LIGHTNING, *lightning_on("gloo"))))
    check_sent(tmp_path / "ours", ranks=2, steps=16)


def test_lightning_starts_the_other_worker_itself(tmp_path):
    needs("lightning")
    said, _ = run(changed(LIGHTNING), tmp_path / "ours")
    sent = int(re.search(r"(\d+) bytes sent", said).group(1))
    assert sent >= 0.9 * 16 * PARAMETERS_BYTES
    assert len(parameters(tmp_path / "ours")) == 4


# Hugging Face

DESTROY = "dist.destroy_process_group()\n"  # with which the job ends
BEFORE_THE_END = (DESTROY, f"{REPORT}{DESTROY}")
BY_NAME = ('dist.init_process_group("gloo")', 'dist.init_process_group("penstock")')
HUGGING_FACE = [
    pytest.param("with_accelerate.py", ("accelerate",), 16, id="accelerate"),
    pytest.param("with_trainer.py", ("accelerate", "transformers"), 32, id="trainer"),
]


@pytest.mark.parametrize(("example", "frameworks", "steps"), HUGGING_FACE)
def test_hugging_face_trains_under_penstock_run_as_on_gloo(example, frameworks, steps, on_gloo, tmp_path):
    needs(*frameworks)
    _, errors = run(changed(example, BEFORE_THE_END), tmp_path / "ours", *PENSTOCK_RUN, 2)
    assert REPLACED in errors and WAITS not in errors and LEFT not in errors, errors
    check_same(tmp_path / "ours", on_gloo(changed(example)))
    check_sent(tmp_path / "ours", ranks=2, steps=steps)


@pytest.mark.parametrize(("example", "frameworks", "steps"), HUGGING_FACE)
def test_hugging_face_trains_on_the_backend_by_its_name(example, frameworks, steps, on_gloo, tmp_path):
    needs(*frameworks)
    run(changed(example, BY_NAME, BEFORE_THE_END), tmp_path / "ours", *TORCHRUN, 2)
    check_same(tmp_path / "ours", on_gloo(changed(example)))
    check_sent(tmp_path / "ours", ranks=2, steps=steps)


# Ray Train

ON_TWO_NODES = """
import runpy
import sys

import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address)
try:
    for name in ("ours", "named", "gloo"):
        sys.argv[1] = f"{name}/parameters.pt"
        runpy.run_path(f"{name}.py", run_name="__main__")
finally:
    ray.shutdown()
    cluster.shutdown()
"""
STRICTLY = ('"SPREAD"', '"STRICT_SPREAD"')  # a worker on each node, or an error
PREPARED = (
    ("model, optimizer = ps.distribute(model, optimizer)", "model = ray.train.torch.prepare_model(model)"),
    ("    ps.synchronize()\n", ""),
    ('ps.report()["bytes_sent"]', 'ps.report()["call_bytes_sent"]'),
)
RAY_ON_GLOO = (
    ("from penstock.integrations.ray import PenstockConfig\n", "from ray.train.torch import TorchConfig\n"),
    ("PenstockConfig()", 'TorchConfig(backend="gloo")'),
    *PREPARED,
    ('ps.report()["call_bytes_sent"]', "0"),
)


def test_ray_trains_on_two_nodes_as_on_gloo(tmp_path):
    needs("ray")
    for name, changes in (("ours", ()), ("named", PREPARED), ("gloo", RAY_ON_GLOO)):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.py").write_text(changed("with_ray.py", STRICTLY, *changes), encoding="utf-8")
    said, _ = run(ON_TWO_NODES, tmp_path)
    for name in ("ours", "named"):
        check_same(tmp_path / name, tmp_path / "gloo")
    sent = [ast.literal_eval(line)["bytes_sent"] for line in said.splitlines() if line.startswith("{")]  # by rank 0
    assert len(sent) == 3 and min(sent[:2]) >= 0.9 * 16 * PARAMETERS_BYTES, sent


# FSDP2

NATIVE_HSDP = (
    ('mesh=mesh["shard"]', "mesh=mesh"),
    ('average_replicas(model, mesh["replicate"])\n', ""),
    ("ps.report()['call_bytes_sent']", "0"),
    ("ps.shutdown()\n", ""),
)


@pytest.mark.long
def test_fsdp_averages_replicas_as_its_own_hsdp_on_gloo(on_gloo, tmp_path):
    """Half of the parameters is each rank's shard."""
    run(changed("with_fsdp.py", ("ps.shutdown()\n", f"{REPORT}ps.shutdown()\n")), tmp_path / "ours", *TORCHRUN, 4)
    check_same(tmp_path / "ours", on_gloo(changed("with_fsdp.py", *NATIVE_HSDP), ranks=4))
    check_sent(tmp_path / "ours", ranks=4, steps=16, each_bytes=PARAMETERS_BYTES // 2)


@pytest.mark.long
def test_fsdp_s_own_hsdp_trains_on_the_backend_by_its_name(on_gloo, tmp_path):
    text = changed("with_fsdp.py", *NATIVE_HSDP, BY_NAME, (DESTROY, f"{REPORT}{DESTROY}"))
    run(text, tmp_path / "ours", *TORCHRUN, 4)
    check_same(tmp_path / "ours", on_gloo(changed("with_fsdp.py", *NATIVE_HSDP), ranks=4))
    check_sent(tmp_path / "ours", ranks=4, steps=16, each_bytes=PARAMETERS_BYTES // 2)


def test_what_is_not_sharded_is_refused():
    from penstock.errors import ConfigError
    from penstock.integrations.fsdp import average_replicas

    with pytest.raises(ConfigError, match="call fully_shard"):
        average_replicas(torch.nn.Linear(2, 2), mesh=None)


@pytest.mark.parametrize(("module", "framework"), [("lightning", "lightning"), ("ray", "ray")])
def test_a_missing_framework_is_named_with_what_to_install(module, framework):
    program = (
        f"import sys\nsys.modules[{framework!r}] = None\n"
        f"try:\n    import penstock.integrations.{module}\nexcept ImportError as error:\n    print(error)\n"
    )
    done = programs.run("-c", program, timeout=LIMIT_S)
    assert f"`pip install penstock[{framework}]`" in done.stdout

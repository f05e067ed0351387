"""The listings of README's integration and of several pages of docs run as they stand.

One and two ranks run them. Each is preceded by what it takes for granted, such as a model, and followed by checks.
"""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240

GIVEN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 6)
dataset = TensorDataset(x, x[:, :4].argmax(dim=1))
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_of = F.cross_entropy
epochs = 2
before = [param.detach().clone() for param in model.parameters()]
"""
SAME_EVERYWHERE = """
values = torch.cat([param.detach().flatten() for param in model.parameters()])
assert not torch.equal(values, torch.cat([param.flatten() for param in before]))
everyone = torch.empty(ps.world_size(), len(values))
ps.all_gather(values, everyone)
assert all(torch.equal(values, one) for one in everyone)
"""


def listings(document, title, language="python"):
    """The code blocks of a section, which goes on to the next title of its level."""
    text = (ROOT / document).read_text(encoding="utf-8")
    level = title.split()[0]
    section = f"\n{text}".split(f"\n{title}\n", 1)[1]
    section = re.split(rf"^#{{1,{len(level)}}} ", section, maxsplit=1, flags=re.M)[0]
    found = re.findall(rf"^```{language}\n(.*?)^```$", section, flags=re.S | re.M)
    assert found, f"{document}, {title}: no listing"
    return found


def environment(**more):
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TORCHELASTIC_"))}
    return {**mine, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{mine.get('PATH', '')}", **more}


def run(size, directory, *parts):
    """With torchrun's variables if there are several ranks; tests/test_examples.py and others run torchrun."""
    program = directory / "program.py"
    program.write_text("\n".join(parts), encoding="utf-8")
    options = {"cwd": directory, "env": environment(), "timeout": LIMIT_S}
    if size > 1:
        return programs.run_ranks(size, program, **options)
    done = programs.run(program, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(params=[1, 2], ids=["alone", "two ranks"])
def size(request):
    return request.param


def test_readme_s_integration(size, tmp_path):
    training, metric, saving = listings("README.md", "# Penstock")[:3]
    checks = """
restored = torch.load("checkpoint.pt") if ps.rank() == 0 else {"model": model.state_dict()}
assert all(torch.equal(value, model.state_dict()[name]) for name, value in restored["model"].items())
seen_by_all = torch.tensor([seen])
ps.allreduce(seen_by_all)
assert seen_by_all == 64 and 0.0 < accuracy < 1.0 and right[1] == 64
"""
    counted = "seen = len(sampler)\ncorrect = int((model(x).argmax(dim=1) == y).sum())\n"
    run(size, tmp_path, GIVEN, training, counted, metric, saving, SAME_EVERYWHERE, checks)


def test_updates_at_the_owners(size, tmp_path):
    start = "import penstock as ps\nps.init()\nbatches = [(x[i::4], dataset.tensors[1][i::4]) for i in range(4)]\n"
    checks = 'assert len(state["state"]) == 6 and float(state["state"][0]["step"]) == 4\n'
    (training,) = listings("docs/servers.md", '# Updates at the owners: `update="servers"`')
    run(size, tmp_path, GIVEN, start, training, checks, SAME_EVERYWHERE)


def test_checkpoints(size, tmp_path):
    given = "y, steps = dataset.tensors[1], 100\nscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)\n"
    training, samples = listings("docs/checkpoints.md", "# Checkpoints: `ps.checkpoint`, `ps.resume`")
    written = """
import pathlib
ps.checkpoint("checkpoints", every=1000, wait=True)
assert first == 0 and {one.name.split("-")[1] for one in pathlib.Path("checkpoints").glob("model-*")} == {
    "0000000050", "0000000100"
}
assert ps.resume("checkpoints", model, optimizer, scheduler=scheduler, progress=progress) == 100
"""
    samples = samples.replace("...", STEP).replace("range(sampler.epoch, 10)", "range(sampler.epoch, 2)")
    run(size, tmp_path, GIVEN, given, training, written, samples, SAME_EVERYWHERE)


def test_asynchronous_training(size, tmp_path):
    start = "import penstock as ps\nps.init()\nbatches = [(x[i::8], dataset.tensors[1][i::8]) for i in range(8)] * 5\n"
    (listing,) = listings("docs/asynchronous.md", '# Asynchronous training: `mode="async"`')
    checks = 'assert ps.world_size() == 1 or ps.report()["asynchronous"]["model0"]["bound"] == 4\n'
    run(size, tmp_path, GIVEN, start, listing, checks, "ps.barrier()", SAME_EVERYWHERE)


STEP = "optimizer.zero_grad(); loss_of(model(x), y).backward(); optimizer.step()"


def test_elastic_jobs(size, tmp_path):
    start, told, comes, deal, owned, calls = listings("docs/elastic.md", "# Losing workers and going on")
    comes = comes.split("optimizer)\n", 1)[1].replace("...", STEP)  # the model is distributed already
    calls = f"loss, table = torch.tensor(1.0), torch.ones(3)\n{calls}assert loss == 1.0\n"
    schedule = "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)\n"
    step = "loss_of(model(x), dataset[:][1]).backward()\noptimizer.step()\n"
    deal += f"        {STEP}\n"
    sums = "str([param.sum().item() for param in model.parameters()])"
    keep = f"import pathlib\nps.synchronize()\npathlib.Path(f'{{ps.rank()}}.txt').write_text({sums})\n"
    run(size, tmp_path, GIVEN, "import penstock as ps\n", start, told, step, schedule, comes, deal, calls, keep)
    assert len({file.read_text() for file in tmp_path.glob("[01].txt")}) == 1
    run(size, tmp_path, GIVEN, "import penstock as ps\n", owned, step * 3, keep)
    assert len({file.read_text() for file in tmp_path.glob("[01].txt")}) == 1


def test_traces(size, tmp_path):
    start = "import penstock as ps\nps.init()\nps.distribute(model, optimizer)\n"
    batches = "batches = [(x[i::8], dataset.tensors[1][i::8]) for i in range(8)]\n"
    (listing,) = listings("docs/traces.md", "## Which steps")
    run(size, tmp_path, GIVEN, start, batches, listing, "ps.shutdown()\n")
    assert [len(list((tmp_path / name).glob("*.trace"))) for name in ("traces", "more-traces")] == [size, size]


def test_who_is_late(size, tmp_path):
    start = "import penstock as ps\nps.init()\nps.distribute(model, optimizer)\n"
    steps = "for _ in range(30):\n    loss_of(model(x), dataset.tensors[1]).backward()\n    optimizer.step()\n"
    (listing,) = listings("docs/lateness.md", "# Who is late, and why")
    checks = 'assert (report["late"]["why"] is None) == (ps.world_size() > 1), report["late"]\n'
    run(size, tmp_path, GIVEN, start, steps, listing, checks, "ps.shutdown()\n")


def test_metrics(size, tmp_path):
    (listing,) = listings("docs/metrics.md", "# Metrics: a training in Prometheus and Grafana")
    said = run(size, tmp_path, "import penstock as ps\n", listing, "ps.shutdown()\n")
    assert len(re.findall(r"^http://127\.0\.0\.1:\d+/metrics$", said, re.M)) == size


TITLE_OF_LOCAL_UPDATES = "# Local updates: `ps.LocalSGD`, `ps.DiLoCo`, `ps.ElasticAveraging`"


def test_local_updates(size, tmp_path):
    start = "import penstock as ps\nps.init()\nloader = [(x[i::8], dataset.tensors[1][i::8]) for i in range(8)] * 5\n"
    training, _, saving = listings("docs/local-updates.md", TITLE_OF_LOCAL_UPDATES)
    checks = 'assert "DiLoCo every 30 steps, after 40" in ps.report()["local_updates"][0]\n'
    run(size, tmp_path, GIVEN, start, training, saving, checks, SAME_EVERYWHERE)


def test_local_updates_between_sites(tmp_path):
    start = "import penstock as ps\nloader = [(x[i::8], dataset.tensors[1][i::8]) for i in range(8)] * 5\n"
    training, sites, _ = listings("docs/local-updates.md", TITLE_OF_LOCAL_UPDATES)
    optimizers, loop = re.split(r"^optimizer = .*\n", training, flags=re.MULTILINE)
    checks = 'assert "DiLoCo every 30 steps between 2 groups, after 40" in ps.report()["local_updates"][0]\n'
    run(4, tmp_path, GIVEN, start, optimizers, sites, loop, checks, SAME_EVERYWHERE)


def test_readme_s_schemes(tmp_path):
    model = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.classifier = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 4))

    def forward(self, x):
        return self.classifier(self.embedding(x.abs().long()).mean(dim=1))

import penstock as ps

ps.init()
model = Words()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
"""
    step = "before = [p.detach().clone() for p in model.parameters()]\nloss_of(model(x), dataset[:][1]).backward()\n"
    (schemes,) = listings("README.md", "### Large layers, few rows")
    run(2, tmp_path, GIVEN, model, schemes, step, "optimizer.step()", SAME_EVERYWHERE)


def test_ddp_s_program_changed(size, tmp_path):
    (program,) = listings("docs/from-ddp.md", "## A program, changed")
    training, shutdown = program.split("ps.shutdown()")
    said = run(size, tmp_path, GIVEN, training, SAME_EVERYWHERE, "ps.shutdown()" + shutdown)
    assert [line.split(":")[0] for line in said.splitlines()] == ["epoch 0", "epoch 1"]
    assert (tmp_path / "model.pt").exists()


def test_ddp_s_checkpoints_accumulation_norms_and_join(tmp_path):
    """In one program, in the order in which a program would do them."""
    wrapped = """
import os
import penstock as ps

of_ddp = {"module." + name: value + 1 for name, value in model.state_dict().items()}
torch.save(of_ddp, f"{os.getpid()}.tmp")
os.replace(f"{os.getpid()}.tmp", "ddp.pt")  # whole at any time: every rank writes it
"""
    loaded = """
assert all(torch.equal(param, old + 1) for param, old in zip(model.parameters(), before))
ps.init()
"""
    made = """
assert isinstance(model[1], nn.SyncBatchNorm)
loader = DataLoader(dataset, batch_size=8, sampler=ps.sampler(dataset))
batches_of_this_rank = list(loader)[ps.rank():]
"""
    page = "docs/from-ddp.md"
    (checkpoints,), (accumulation,), (norms,), (join,) = (
        listings(page, f"## {title}")
        for title in ("Checkpoints", "Accumulation", "SyncBatchNorm", "Uneven numbers of batches")
    )
    done = "assert int(model[1].num_batches_tracked) == 1 + 2 * len(loader)  # one is in the checkpoint\n"
    parts = [GIVEN, wrapped, checkpoints, loaded, norms, made, accumulation, join, SAME_EVERYWHERE, done]
    run(2, tmp_path, *parts)


@pytest.mark.long
def test_readme_s_commands_for_several_hosts(tmp_path):
    """Both launchers on this machine; each asks for the workers of its host."""
    secret, launch = listings("README.md", "## The whole integration", "sh")
    (tmp_path / "train.py").write_text((ROOT / "examples" / "minimal.py").read_text(encoding="utf-8"))
    shell = ["bash", "-euo", "pipefail", "-c"]
    subprocess.run([*shell, secret], cwd=tmp_path, env=environment(), timeout=LIMIT_S, check=True)
    assert len((tmp_path / "secret").read_text().strip()) == 64
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = {"HOST0": "127.0.0.1", "29500": port, "--nproc-per-node 4": "--nproc-per-node 1"}
    assert all(launch.count(word) == 1 for word in here)
    for word, mine in here.items():
        launch = launch.replace(word, mine)
    launchers = [
        subprocess.Popen(
            [*shell, launch.replace("--node-rank 0", f"--node-rank {host}")],
            cwd=tmp_path,
            env=environment(PYTHON_EXEC=programs.interpreter()),  # torchrun's name for what its workers run by
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(2)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in launchers]
    finally:
        for process in launchers:
            process.kill()
            process.wait()
    assert [process.returncode for process in launchers] == [0, 0], said
    assert said[0][0].splitlines()[-1].endswith("on 2 worker(s)")


@pytest.mark.long
def test_what_the_coordinator_answers(tmp_path):
    """The program prints what stands below it; how its slices lie follows from the line rate."""
    (program,) = listings("docs/algorithms.md", "## Choice")
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    printed = page.split(program, 1)[1].split("```\n")[2].splitlines()
    said = run(4, tmp_path, program).splitlines()
    assert len(printed) == len(said) == 4
    owners = "[Placed(offset_bytes=0, len_bytes="
    assert printed[1].startswith(owners) and said[1].startswith(owners)
    assert [said[0], *said[2:]] == [printed[0], *printed[2:]]


STORE_GIVEN = """
import numpy as np

epochs, lr, samples_per_step = 2, 0.5, 8
draw = np.random.default_rng(0)
x, noise = draw.standard_normal((64, 3)), draw.standard_normal(64)
y = x @ [1.0, 2.0, 3.0]
weights = [np.zeros(3), np.zeros(1)]

def batches(rank, num_workers):
    share = samples_per_step // num_workers
    for start in range(rank * share, 64, samples_per_step):
        yield x[start : start + share], y[start : start + share]

def forward_backward(weights, batch):
    error = batch[0] @ weights[0] + weights[1] - batch[1]
    return [batch[0].T @ error, error.sum(keepdims=True)]
"""
STORE_CHECKS = """
alone = [np.zeros(3), np.zeros(1)]
for _ in range(epochs):
    for batch in batches(0, 1):
        for weight, gradient in zip(alone, forward_backward(alone, batch)):
            weight -= lr / samples_per_step * gradient
assert np.abs(weights[0] - [1.0, 2.0, 3.0]).max() < 0.5
for weight, expected in zip(weights, alone):
    np.testing.assert_allclose(weight, expected, rtol=1e-12, atol=1e-12)
"""
STORE_NAMES = {
    "mxnet as mx": "penstock as ps",
    'mx.kv.create("dist_sync")': 'ps.KVStore("sync")',
    "mx.nd.waitall": "kv.wait",
}


def test_a_program_of_mxnet_becomes_ours_by_its_names(size, tmp_path):
    theirs, ours = listings("docs/kvstore.md", "## From MXNet")
    for name, other in STORE_NAMES.items():
        assert name in theirs
        theirs = theirs.replace(name, other)
    assert theirs == ours.replace("ps.init()\n", "")
    run(size, tmp_path, STORE_GIVEN, ours, STORE_CHECKS)


def test_the_listing_on_rows(size, tmp_path):
    before = """
import numpy as np
import penstock as ps

ps.init()
kv = ps.KVStore("sync")
table, some_rows = np.zeros((9, 2)), np.empty((2, 2))
indices, gradient_rows, wanted = np.array([ps.rank(), 8]), np.ones((2, 2)), np.array([8, 0])
"""
    after = "kv.wait()\nassert some_rows.tolist() == [[ps.world_size()] * 2, [1, 1]]"
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Rows"), after)


def test_the_listing_on_elastic_averages(size, tmp_path):
    before = """
import torch
import penstock as ps

ps.init()
clients, weight, centre = ps.world_size(), torch.full((3,), 1.0), torch.empty(3)
"""
    after = """
weight += ps.rank()
ps.barrier()
kv.pushpull("w", weight, out=centre).wait()
weight -= alpha * (weight - centre)
ps.barrier()
kv.pull("w", centre).wait()
ps.allreduce(weight)
assert torch.allclose(weight + centre, torch.tensor(1.0 + sum(range(1, 1 + ps.world_size())))), (weight, centre)
assert ps.world_size() == 1 or centre[0] > 1
"""
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Elastic averages"), after)


def test_the_listing_on_two_bytes(size, tmp_path):
    before = """
import numpy as np
import penstock as ps

ps.init()
kv = ps.KVStore("sync")
weight, bias = np.zeros(3, np.float32), np.zeros(1, np.float32)
"""
    after = """
gradient = np.full(3, 1 + 2**-9, np.float32)
kv.pushpull("w", gradient).wait()
assert (gradient == (1 + 2**-9 if ps.world_size() == 1 else 2)).all()
"""
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Two bytes for four"), after)


PAPER_GIVEN = """
import os

import numpy as np
import penstock as ps

world = int(os.environ.get("WORLD_SIZE", "1"))
num_epochs, mini_batch_size, train_data = 3, 4 * world, [1.0, 2.0]
keys, interval, alpha = [0, 1], 2, 0.4
params, grads, centers = ([np.zeros((5, 3)), np.zeros(2)] for _ in range(3))


def forward_backward(params, grads, batch):
    for grad in grads:
        grad[...] = 4 * batch * (ps.rank() + 1)  # of 4 samples, whatever the parameters are


def update(params, grads, rescale):
    for param, grad in zip(params, grads):
        param -= 0.001 * rescale * grad


def validate(params):
    pass
"""
PAPER_CHECKS = """
ps.barrier()
ranks = sum(range(1, ps.world_size() + 1))
values = list(kv.state_dict()["values"].values())
if kv.kind == "sync":
    values = params
assert all(np.allclose(value, -0.001 * 3 * (1 + 2) * ranks / ps.world_size()) for value in values), values
"""
ELASTIC_CHECKS = """
ps.barrier()
# What workers gave up the center has: together they are where their gradients have led them.
total = [value + 0 for value in kv.state_dict()["values"].values()]
assert all((value < 0).all() for value in total), total
for value, param in zip(total, params):
    moved = param.copy()
    ps.allreduce(moved)
    ranks = sum(range(1, ps.world_size() + 1))
    assert np.allclose(value + moved, -0.001 * 3 * (1 + 2) * ranks / ps.world_size()), (value, moved)
"""
PAPER_NAMES = {
    **STORE_NAMES,
    'mx.kv.create("dist_async")': 'ps.KVStore("async")',
    "mx.optimizer.SGD(learning_rate=0.001, rescale_grad=1 / mini_batch_size)": (
        '"SGD", lr=0.001, rescale=1 / mini_batch_size'
    ),
}


@pytest.mark.parametrize("loop", ["Synchronous SGD", "Asynchronous SGD"])
def test_the_paper_s_loops_differ_in_names_and_run(loop, size, tmp_path):
    theirs, ours = listings("docs/from-mxnet.md", f"## {loop}")
    for name, other in PAPER_NAMES.items():
        theirs = theirs.replace(name, other)
    assert theirs == ours.replace("ps.init()\n", "")
    run(size, tmp_path, PAPER_GIVEN, ours, PAPER_CHECKS)


def test_the_paper_s_elastic_averaging(size, tmp_path):
    _, ours = listings("docs/from-mxnet.md", "## Elastic averaging")
    run(size, tmp_path, PAPER_GIVEN, ours, ELASTIC_CHECKS)


def test_the_listings_on_owners(size, tmp_path):
    before = """
import torch
import penstock as ps

ps.init()
key, samples_per_step, weight, gradient = "w", 2, torch.zeros(3), torch.ones(3)
kv = ps.KVStore("sync")
kv.init(key, weight)
"""
    after = """
kv.wait()
assert torch.equal(weight, torch.full((3,), -0.05 * ps.world_size()))
"""
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Optimizers at the owners"), after)
    disk = listings("docs/kvstore.md", "## On disk")[0].replace("every=100", "every=1")
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Optimizers at the owners"), disk, after)
    after = """
assert -0.1 * ps.world_size() - 1e-6 <= weight[0] <= -0.1 + 1e-6
assert kv.state_dict()["updates"] == {"w": ps.world_size()}
"""
    run(size, tmp_path, before, *listings("docs/kvstore.md", "## Asynchronous stores"), after)


def test_a_model_on_an_accelerator(size, tmp_path):
    """On the processor in its place; tests/device has models on a device."""
    given = "import os\nimport penstock as ps\nos.environ.setdefault('LOCAL_RANK', '0')\nNet = lambda: model\n"
    given += "y = dataset.tensors[1]\n"
    (listing,) = listings("docs/accelerators.md", "# Models and tensors on accelerators")
    listing = listing.replace('"cuda", int(os.environ.get("LOCAL_RANK", "0"))', '"cpu"')
    assert "cuda" not in listing
    run(size, tmp_path, GIVEN, given, listing, STEP, "ps.synchronize()", SAME_EVERYWHERE)


def test_lossy_schemes(tmp_path):
    """The page distributes a model in two ways: a program does it in one of them."""
    start = (
        "import penstock as ps\nps.init()\nmodel = nn.Sequential()\nmodel.classifier = nn.Sequential(nn.Linear(6, 4))\n"
    )
    start += "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
    start += "before = [param.detach().clone() for param in model.parameters()]\ny = dataset.tensors[1]\n"
    choice, saving = listings("docs/lossy.md", "# The lossy schemes")
    one_bit, dgc = choice.split("\n\n")
    saved = "state = torch.load(f'checkpoint-{ps.rank()}.pt')['optimizer']\n"
    kept = "assert state['penstock']\n"
    for number, ways in enumerate((one_bit, dgc)):
        folder = tmp_path / str(number)
        folder.mkdir()
        run(2, folder, GIVEN, start, ways, STEP, "ps.synchronize()", saving, saved, kept, SAME_EVERYWHERE)


def test_a_store_that_does_not_wait_for_everybody(tmp_path):
    start = "import torch\nimport penstock as ps\nps.init()\n"
    (listing,) = listings("docs/kvstore.md", "## Rounds that do not wait for everybody")
    used = """
value = torch.zeros(3)
kv.init("w", value)
kv.push("w", torch.ones(3)).wait()
kv.pull("w", value).wait()
assert value.tolist() == [1.0] * 3 and set(kv.dropped()) <= {0, 1, 2, 3}
ps.barrier()
"""
    run(4, tmp_path, start, listing, used)


def test_training_goes_on_after_a_loss(tmp_path):
    """Of one rank that hears of a loss; tests/torch/test_again.py has jobs that lose one."""
    given = f"""
import penstock as ps

y, new_rank, new_size, path = dataset.tensors[1], 0, 1, "checkpoint.pt"
ps.init()
ps.distribute(model, optimizer)


def train(model, optimizer):
    {STEP}
    error = ps.PeerLost("gone", rank=1, step=3)
    error.whole_step = 2
    raise error


"""
    (listing,) = listings("docs/errors.md", "## After a loss")
    listing = listing.replace("/another/private/directory", str(tmp_path / "another"))
    (tmp_path / "another").mkdir(mode=0o700)
    checks = f"{STEP}\nassert torch.load(path)['step'] == 3\n"
    run(1, tmp_path, GIVEN, given, listing, checks, SAME_EVERYWHERE)


RUN_ELSEWHERE = {
    ("docs/integrations.md", "## FSDP2 and HSDP"): "integrations/test_frameworks.py",
    ("docs/collectives.md", "### MPI inside"): "collectives/test_inside.py",
}
"""Sections whose listings take what is not here; a test there does the same without it."""


def sections_run():
    """Pages with titles of theirs, each named by one test of this file."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    named = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    for test in tree.body:
        if isinstance(test, ast.FunctionDef):
            words = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
            words |= {named.get(node.id) for node in ast.walk(test) if isinstance(node, ast.Name)}
            words = {word for word in words if isinstance(word, str)}
            yield from ((page, word) for page in words if page.endswith(".md") for word in words)


def listings_with_their_titles(text):
    """The titles that each listing of Python stands under."""
    titles, within = [], False
    for line in text.splitlines():
        title = re.match(r"(#+) ", line)
        if line.startswith("```"):
            if not within and line == "```python":
                yield list(titles)
            within = not within
        elif title and not within:
            titles = [one for one in titles if len(one.split()[0]) < len(title[1])] + [line]


def test_titles_of_a_listing_are_found():
    text = "# A\n## B\n```sh\n# no title\n```\n```python\n# none\n```\n## C\n### D\n```python\n```\n"
    assert list(listings_with_their_titles(text)) == [["# A", "## B"], ["# A", "## C", "### D"]]


def test_every_listing_of_a_page_is_run():
    known = {*sections_run(), *RUN_ELSEWHERE}
    assert all((ROOT / "tests" / there).exists() for there in RUN_ELSEWHERE.values())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page = path.relative_to(ROOT).as_posix()
        for titles in listings_with_their_titles(path.read_text(encoding="utf-8")):
            assert any({(page, title), (page, title.lstrip("# "))} & known for title in titles), (page, titles)

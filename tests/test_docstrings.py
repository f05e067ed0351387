"""The examples in docstrings run as they stand, and print what they show; the package's own is README's.

An example runs after the program `START`, by one rank, unless `TABLE` says what else it takes for granted. Those that
show no output are checked by what is run after them.
"""

import ast
import doctest
import json
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "penstock"
PROGRAM = Path(__file__).with_name("docstring_example.py")
LIMIT_S = 240

GIVEN = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

torch.manual_seed(0)
inputs = torch.randn(64, 6)
targets = inputs[:, :4].argmax(dim=1)
dataset = TensorDataset(inputs, targets)
loader = [(inputs[first::8], targets[first::8]) for first in range(8)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.classifier(self.features(x))


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_of = F.cross_entropy
epochs, steps = 2, 100


def train(x, y):
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def values():
    return torch.cat([param.detach().flatten() for param in model.parameters()])


values_at_first = values()
"""
START = f"{GIVEN}\nps.init()\n"
DISTRIBUTED = f"{START}model, optimizer = ps.distribute(model, optimizer)\n"
LOSS = "loss = loss_of(model(inputs), targets)\n"
STORE = f'{START}kv = ps.KVStore("sync")\nweights = torch.zeros(3)\n'
VALUE = f'{STORE}kv.init("w", weights)\n'

TRAINED = """
ps.synchronize()
assert not torch.equal(values(), values_at_first)
ps.barrier()
"""
SAME = """
everyone = torch.empty(ps.world_size(), len(values()))
ps.all_gather(values(), everyone)
assert all(torch.equal(everyone[0], one) for one in everyone)
"""
TRAINS = f"train(inputs, targets)\n{TRAINED}"
ALIKE = f"{TRAINED}{SAME}"


@dataclass(frozen=True)
class Run:
    """How an example is run."""

    before: str = START
    after: str = ""
    ranks: int = 1
    each: bool = False  # its statements are alternatives: each is run by itself
    first: int | None = None  # only so many statements are run here; `rest` runs what the others show
    rest: str = ""
    measured: bool = False  # its numbers are another machine's
    long: bool = False


@dataclass(frozen=True)
class By:
    """What an example shows another test runs."""

    test: str


TABLE = {
    "collectives": Run(GIVEN, "assert gradient.tolist() == [1.0] * 1000", ranks=2),
    "collectives.new_group": Run(
        f"{START}loss = torch.ones(3)\n",
        "assert loss.tolist() == [2.0 if ps.rank() in (1, 3) else 1.0] * 3",
        ranks=4,
        first=2,
        rest="tests/collectives/test_inside.py::test_sums_inside_and_across_are_those_of_one_process",
    ),
    "collectives.allreduce": Run(
        f"{START}gradient_of_one_device, gradient_of_another = torch.ones(5), torch.full((5,), 2.0)\n",
        "assert gradient_of_one_device.tolist() == gradient_of_another.tolist() == [6.0] * 5",
        ranks=2,
    ),
    "config.Options": Run(GIVEN),
    "coordinator.Coordinator": Run(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from penstock import models\nnetwork = models.load('lab:vgg19')\n"
    ),
    "errors": Run(
        "said = []\nsave_checkpoint = said.append\n\ndef train():\n    raise PeerLost('gone', rank=1, step=3)\n",
        "assert said == ['rank 1 was lost at step 3']",
    ),
    "job.init": Run(GIVEN),
    "job.on_members_changed": Run(
        after="rescale(ps.MembersChange(epoch=1, members=(0, 1, 2), lost=(3,), step=5, whole_steps=4))\n"
        "assert optimizer.param_groups[0]['lr'] == 0.05 * 3 / 4"
    ),
    "kvstore.store.KVStore": Run(
        f"{START}weights, gradient = torch.full((3,), ps.rank() + 1.0), torch.ones(3)\n",
        "assert weights.tolist() == [1.0] * 3 and gradient.tolist() == [2.0] * 3",
        ranks=2,
    ),
    "kvstore.store.KVStore.init": Run(STORE, ranks=2),
    "kvstore.store.KVStore.set_optimizer": Run(f"{VALUE}samples_per_step = 4\n", ranks=2),
    "kvstore.store.KVStore.set_hyperparameters": Run(f"{VALUE}kv.set_optimizer(torch.optim.SGD, lr=0.1)\n", ranks=2),
    "kvstore.store.KVStore.checkpoint": Run(VALUE, ranks=2),
    "lossy.OneBit": Run(after=TRAINS + SAME, ranks=2),
    "lossy.DGC": Run(after=TRAINS + SAME, ranks=2),
    "measure.quick.quick_rates": Run(ranks=2, measured=True),
    "measure.sustained.sustained_rate": Run(
        f"{START}group = ps.new_group([0, 1])\n", ranks=2, measured=True, long=True
    ),
    "server.serve": By(
        "tests/servers/test_dedicated.py::test_servers_that_are_started_by_hand_serve_workers_that_something_else_starts"
    ),
    "torch.access.no_sync": Run(
        f"{DISTRIBUTED}loss = torch.linalg.norm\nfirst_half, second_half = inputs[:32], inputs[32:]\n", ALIKE, ranks=2
    ),
    "torch.access.synchronize": Run(
        f"{DISTRIBUTED}loss_of(model(inputs), targets).backward()\noptimizer.step()\n"
        "optimizer.zero_grad(set_to_none=False)\n"
        f"gradients_kept_elsewhere = [param.grad for param in model.parameters()]\n{LOSS}",
        ALIKE,
        ranks=2,
    ),
    "torch.agreement.hyperparameters.hyperparameters": Run(f"{START}weight = nn.Parameter(torch.zeros(3))\n"),
    "torch.checkpoints.checkpoint": Run(
        f"{DISTRIBUTED}ps.resume('checkpoints', model, optimizer)\n",
        "names = [ps.checkpoint('checkpoints', every=50, keep=3) for _ in range(49)]\n"
        "assert [bool(name) for name in names] == [False] * 48 + [True]",
        ranks=2,
    ),
    "torch.checkpoints.resume": Run(
        f"{START}batches = [loader[step % 8] for step in range(steps)]\n"
        "loss_of = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])\n"
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50)\n",
        f"assert ps.resume('checkpoints', model, optimizer, scheduler=scheduler) == steps\n{ALIKE}",
        ranks=2,
    ),
    "torch.clipping.GradScaler": Run(DISTRIBUTED + LOSS, ALIKE, ranks=2),
    "torch.clipping.clip_grad_norm_": Run(DISTRIBUTED + LOSS, ALIKE, ranks=2),
    "torch.distribute.distribute": Run(after=TRAINS, ranks=2, each=True),
    "torch.elastic_sampling.ElasticSampler": Run(DISTRIBUTED, ALIKE, ranks=2),
    "torch.facts.coordinator_of": Run(
        f"{GIVEN}\nps.init(policy='paper')\n"
        "model.features = nn.Linear(6, 1024)\n"
        "model.classifier = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
        "model, optimizer = ps.distribute(model, optimizer, schemes='auto')\n"
        "for _ in range(3):\n    train(inputs[:32], targets[:32])\n",
        ranks=4,
        long=True,
    ),
    "torch.join.join": Run(f"{DISTRIBUTED}batches_of_this_rank = loader[ps.rank() :]\n", ALIKE, ranks=2),
    "torch.local.diloco.DiLoCo": Run(after=ALIKE, ranks=2),
    "torch.local.elastic.ElasticAveraging": Run(after=TRAINED, ranks=2),
    "torch.local.local_sgd.LocalSGD": Run(after=ALIKE, ranks=2),
    "torch.newcomers.Newcomers": Run(
        f"{START}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)\n", ALIKE, ranks=2
    ),
    "torch.sampling.sampler": Run(DISTRIBUTED, ALIKE, ranks=2),
    "tracing.tracing_call.trace": Run(
        f"{DISTRIBUTED}\ndef train_one_epoch():\n    for x, y in loader:\n        train(x, y)\n",
        "ps.shutdown()\nfrom pathlib import Path\nassert list(Path('traces').glob('*.trace'))\n",
        ranks=2,
        each=True,
    ),
    "wire_types.TopK": Run(
        f"{START}inner = torch.optim.AdamW(model.parameters(), lr=4e-4)\n",
        "assert isinstance(optimizer, ps.DiLoCo)",
        ranks=2,
    ),
}


def statements(docstring):
    return doctest.DocTestParser().get_examples(docstring)


def examples_of(node, name):
    """The docstrings with examples, by name: of this, and of what is in it."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text and statements(text):
            yield name, text
        for inner in node.body:
            yield from examples_of(inner, ".".join(filter(None, (name, getattr(inner, "name", "")))))


def examples():
    """By name, without the package's: the module, and the docstring."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if ">>>" in source:  # parsing all files takes a second of whoever collects tests
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            docstrings = examples_of(ast.parse(source), module)
            found |= {name: (f"penstock.{module}".rstrip("."), text) for name, text in docstrings}
    return found


EXAMPLES = examples()
RUNS = [
    pytest.param(*EXAMPLES[name], how, id=name, marks=[pytest.mark.long] if how.long else [])
    for name, how in ((name, TABLE.get(name, Run())) for name in EXAMPLES)
    if isinstance(how, Run)
]


def test_every_entry_of_the_table_is_of_an_example():
    assert not TABLE.keys() - EXAMPLES.keys()


@pytest.mark.parametrize(
    "test", sorted({getattr(how, "rest", "") or getattr(how, "test", "") for how in TABLE.values()} - {""})
)
def test_what_runs_the_others_exists(test):
    path, name = test.split("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


def test_an_example_is_noticed():
    source = "'Of a module.\\n>>> one'\nclass A:\n    def f(self):\n        'Of a method.\\n>>> two'\n"
    assert [name for name, _ in examples_of(ast.parse(source), "m")] == ["m", "m.A.f"]


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "TORCHELASTIC_"))}


def run(folder, ranks, **told):
    """In a folder of its own; what it has printed."""
    folder.mkdir()
    (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")
    options = {"cwd": folder, "env": environment(), "timeout": LIMIT_S}
    if ranks > 1:
        return programs.run_ranks(ranks, PROGRAM, folder / "told.json", **options)
    done = programs.run(PROGRAM, folder / "told.json", **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("module", "docstring", "how"), RUNS)
def test_an_example_runs_and_prints_what_it_shows(module, docstring, how, tmp_path):
    all_of_it = range(len(statements(docstring)))[: how.first]
    told = {"module": module, "docstring": docstring, "before": how.before, "measured": how.measured}
    for turn, chosen in enumerate([[one] for one in all_of_it] if how.each else [list(all_of_it)]):
        run(tmp_path / str(turn), how.ranks, statements=chosen, after=how.after, **told)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("docstring", "measured", "word"),
    [
        (">>> 1 + 1\n3\n", False, "Expected"),
        (">>> 'one 1'\n'two 2'\n", True, "Expected"),
        (">>> unknown\n", False, "NameError"),
    ],
)
def test_an_example_that_is_wrong_is_found(docstring, measured, word, tmp_path):
    told = {"module": "penstock.errors", "statements": [0], "before": "", "after": ""}
    with pytest.raises(AssertionError, match=word):
        run(tmp_path / "wrong", 1, docstring=docstring, measured=measured, **told)


def test_the_package_s_program_is_readme_s():
    """That one runs: tests/test_listings.py."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\nimport penstock as ps\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)[1]
    shown = ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8")))
    assert textwrap.indent(f"import penstock as ps\n{program}", "    ").rstrip() in shown

"""`penstock explain`, from the command line as a user calls it, and what it reads of models."""

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest
import torch
from torch import nn

from lab.limits import limits, store_wire_s
from lab.networks import NETWORKS
from penstock import cli, description, explanation
from penstock.coordinator import Cluster, Coordinator
from penstock.description import Network
from penstock.errors import ConfigError
from penstock.explain_command import AUTO_NOTE
from penstock.local_explanation import LocalExplanation
from penstock.lossy import of_layers
from penstock.plan import Terms
from penstock.torch.choice.network import describe, layers_of

ROOT = Path(__file__).resolve().parents[2]


def explain(*arguments, folder=ROOT, path=()):
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), str(ROOT / "python")])
    return programs.run("-m", "penstock.cli", "explain", *arguments, timeout=120, cwd=folder, env=environment)


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def explain_here(folder, monkeypatch, capsys):
    """The same in this process, which has imported PyTorch already, in `folder`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # of this process they stay
    monkeypatch.delitem(sys.modules, "nets", raising=False)

    def run(*arguments):
        try:
            status = cli.main(["explain", *arguments])
        except SystemExit as end:
            status = end.code
        finally:
            sys.modules.pop("nets", None)
        return Ended(status, *capsys.readouterr())

    return run


def explained(*arguments, **more):
    done = explain(*arguments, "--json", **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def choices(found):
    return {layer["name"]: layer["scheme"] for layer in found["layers"]}


@pytest.mark.parametrize("policy", ["paper", "measured"])
@pytest.mark.parametrize("nodes", ["8", "16", "32"])
def test_vgg19s_linear_layers_choose_factors(policy, nodes):
    found = explained("lab:vgg19", "--workers", nodes, "--batch", "32", "--policy", policy)
    assert {name for name, scheme in choices(found).items() if scheme == "factors"} == {"fc6", "fc7", "fc8"}
    assert found["chosen_bytes"] < found["store_bytes"]


@pytest.mark.parametrize("policy", ["paper", "measured"])
def test_googlenet_stays_with_the_store(policy):
    found = explained("lab:googlenet", "--workers", "16", "--batch", "128", "--policy", policy)
    assert set(choices(found).values()) == {"store"}
    assert found["chosen_bytes"] == found["store_bytes"]


def test_servers_apart_have_their_own_columns_of_table_1():
    """fc7 of VGG19 is 4096 x 4096 and 4096: a worker sends all of it, a server its part to and from every worker."""
    for servers, busiest in [(1, 8), (2, 4), (8, 1), (16, 1)]:
        arguments = ("lab:vgg19", "--workers", "8", "--servers", str(servers), "--batch", "32")
        found = explained(*arguments)
        assert (found["n_worker"], found["n_server"], found["servers_apart"]) == (8, servers, True)
        fc7 = next(layer for layer in found["layers"] if layer["name"] == "fc7")
        nbytes = 4096 * 4097 * 4
        assert fc7["gradient_bytes"] == nbytes
        part = -(-nbytes // (4 * servers)) * 4
        assert fc7["scheme_bytes"]["store"] == (8 * part if busiest > 1 else nbytes if servers > 8 else 8 * part)
        # Algorithm 1 counts both directions of the node that has most.
        numbers = explained(*arguments, "--policy", "paper")
        reason = next(layer["reason"] for layer in numbers["layers"] if layer["name"] == "fc7")
        assert reason == f"3.7 M numbers instead of {2 * 4096 * 4096 * busiest / 1e6:.1f} M through the store"
    text = explain("lab:vgg19", "--workers", "8", "--servers", "2").stdout
    assert "the store is sharded over 2 servers apart from them" in text


def test_collectives_are_chosen_on_request_for_small_layers():
    arguments = ("lab:googlenet", "--workers", "16", "--batch", "128")
    found = explained(*arguments, "--collective-schemes")
    by_name = {layer["name"]: layer for layer in found["layers"]}
    small = by_name["conv2_reduce"]  # one slice
    assert small["scheme"] == "butterfly" and "through the store" in small["reason"]
    assert small["scheme_s"]["butterfly"] < small["scheme_s"]["store"] / 3
    assert by_name["inception3b_3x3"]["scheme"] == "store"  # of as many slices as there are owners
    assert set(choices(explained(*arguments, "--collective-schemes", "--policy", "paper")).values()) == {"store"}


def test_the_table_says_what_why_and_how_long():
    done = explain("lab:vgg19", "--workers", "8", "--batch", "32")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("fc7"))
    for part in ("4096x4096", " 32 ", "67.1 MB", "117.5 MB", "7.3 MB", "469.9 MB", "factors"):
        assert part in line
    number = line.rpartition("[")[2]
    (why,) = (told for told in done.stdout.splitlines() if told.startswith(f"[{number}"))
    assert "through the store" in why
    assert "its gradient has no smaller form" in done.stdout
    assert "plain DDP" in done.stdout
    assert "times as fast as DDP" in done.stdout


def test_it_begins_with_the_summary_folds_equal_layers_and_fits_the_terminal():
    done = explain("lab:resnet50", "--workers", "8")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120
    table = next(at for at, line in enumerate(lines) if line.startswith("layer "))
    assert any("with these choices" in line for line in lines[:table])
    assert any("times as fast as DDP" in line for line in lines[:table])
    (row,) = (line for line in lines if line.startswith("layer3_*_conv3: 6 equal layers "))
    assert "1024x256x1x1" in row and "1.0 MB" in row
    assert len(lines) < 80, "107 layers"
    long = Network("net", tuple(layers_of(nn.ModuleDict({"very_" * 30 + "long": nn.Linear(8, 8)}), {})))
    text = Coordinator(long, Cluster(4, 4)).explain().render()
    assert max(map(len, text.splitlines())) <= 120 and "very_" in text and "long " in text


def test_predictions_are_the_labs_limits():
    found = explained("lab:resnet50-x1", "--workers", "4", "--compute-s", "1.2", "--bandwidth-mbit", "600")
    trace = NETWORKS["resnet50"]()
    limit = limits(trace.compute(1.2), store_wire_s(trace, 4, 600e6 / 8))
    assert found["times"]["compute_s"] == pytest.approx(1.2)
    assert found["times"]["store_s"] == pytest.approx(limit.ideal_s, rel=1e-3)
    assert found["times"]["ddp_s"] == pytest.approx(limit.wfbp_s, rel=1e-6)


def test_without_a_compute_time_it_follows_from_the_arithmetic():
    slow, fast = (explained("lab:resnet50", "--workers", "4", "--gflops", gflops) for gflops in ("500", "2000"))
    assert slow["times"]["compute_s"] == pytest.approx(4 * fast["times"]["compute_s"])
    flops = 3 * 32 * NETWORKS["resnet50"]().flops
    assert fast["times"]["compute_s"] == pytest.approx(flops / 2000e9)
    assert "4,000 Gflop/s (products: assumed; compute: as the products imply)" in " ".join(
        explain("lab:resnet50").stdout.split()
    )


def test_arithmetic_that_is_known_in_part_predicts_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16))  # whose attention is not looked into
    assert not describe(model, torch.zeros(4, 3, 8), name="net").arithmetic_is_known
    assert describe(model[0], torch.zeros(4, 8), name="net").arithmetic_is_known
    assert describe(nn.Embedding(9, 8), torch.zeros(4, dtype=torch.int64), name="net").arithmetic_is_known


class TokenNet(nn.Module):
    """Takes its input by name and gives it to its layers by name, as the models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.c_fc = Conv1D(64, 16)
        self.head = nn.Linear(64, 50)

    def forward(self, *, input_ids, attention_mask=None):
        hidden = self.c_fc(self.embed(input=input_ids)) * attention_mask["mask"][0].unsqueeze(-1)
        return self.head(input=hidden)


class Conv1D(nn.Module):
    """That of Hugging Face, by what it holds: a linear layer whose weight is (inputs, outputs)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def test_an_example_by_names_and_a_transposed_linear_layer():
    example = {"input_ids": torch.zeros(3, 7, dtype=torch.int64), "attention_mask": {"mask": (torch.ones(3, 7),)}}
    network = describe(TokenNet(), example, name="net")
    embed, conv, head = network.layers
    assert (embed.kind, conv.kind, head.kind) == ("embedding", "other", "linear")
    assert (embed.rows, head.rows) == (7, 7), "tokens per sample"
    assert conv.flops == 2 * 7 * 16 * 64 and head.flops == 2 * 7 * 64 * 50
    choice = Coordinator(network, Cluster(4, 4), batchsize=8).decision("c_fc")
    assert choice.scheme == "store" and "stored (inputs, outputs)" in choice.reason


def test_without_arithmetic_nothing_is_predicted(folder, explain_here):
    assert json.loads(explain_here("nets:plain", "--json").stdout)["times"] is None
    assert "--compute-s" in explain_here("nets:plain").stdout


def test_columns_add_up_to_the_scheme_where_it_fits():
    found = explained("lab:vgg19", "--workers", "8", "--batch", "32")
    done = explain("lab:vgg19", "--workers", "8", "--batch", "32")
    (sums,) = (line.split() for line in done.stdout.splitlines() if line.startswith("all "))
    bytes_of = [layer["scheme_bytes"] for layer in found["layers"]]
    for column, scheme in ((3, "store"), (5, "factors"), (8, "bf16")):
        total = sum(sizes.get(scheme, sizes["store"]) for sizes in bytes_of)
        assert " ".join(sums[column : column + 2]) == explanation.size(total), scheme


NETS = """
import torch
from torch import nn

def plain():
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 10))

def with_example():
    return plain(), torch.zeros(5, 3, 32, 32)

def broken():
    raise RuntimeError("no such checkpoint")

def wrong_example():
    return plain(), torch.zeros(5, 3, 30, 32)

def number():
    return 7

class Names:
    model = nn.Linear(4096, 4096)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nets.py").write_text(NETS, encoding="utf-8")
    return tmp_path


def test_a_function_of_ones_own(folder, explain_here):
    found = explained("nets:with_example", "--workers", "4", "--batch", "8", "--gflops", "1000", folder=folder)
    assert choices(found) == {"1": "factors", "3": "store"}
    assert {layer["name"]: layer["rows"] for layer in found["layers"]} == {"1": 8, "3": 8}
    assert found["notes"] == [AUTO_NOTE]
    found = json.loads(explain_here("nets:plain", "--json").stdout)
    assert "one row per sample" in found["notes"][0]
    assert list(choices(json.loads(explain_here("nets:Names.model", "--json").stdout))) == ["(root)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing:here"], "no module named 'nothing'"),
        (["nets:nobody"], "nobody"),
        (["nets:broken"], "RuntimeError: no such checkpoint"),
        (["nets:number"], "gives a int, which is neither a torch module"),
        (["nets:wrong_example"], "its forward fails with the given example"),
        (["nets:plain", "--workers", "4000", "--servers", "300"], "a job has at most 4096 of both"),
        (["nets:plain", "--bandwidth-mbit", "0"], "0 is not above zero"),
        (["nets:plain", "--policy", "best"], "invalid choice: 'best'"),
        ([], "MODEL"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(arguments, message, explain_here):
    done = explain_here(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


def test_an_unknown_network_of_the_lab_is_told_those_it_has():
    done = explain("lab:vgg99")
    assert done.returncode == 2
    assert "vgg19-22k" in done.stderr
    assert "no width" in explain("lab:vgg19-xwide").stderr


def test_a_network_of_the_lab_at_half_its_width():
    found = explained("lab:vgg19-x0.5")
    assert {layer["name"]: layer["shape"] for layer in found["layers"]}["fc7"] == [2048, 2048]


def test_the_help_names_every_kind_of_model():
    words = " ".join(explain("--help").stdout.split())
    for kind in ("a name of torchvision's, if that is installed", "module:function", "lab such as lab:vgg19"):
        assert kind in words


def test_a_torchvision_name_without_torchvision(tmp_path):
    (tmp_path / "torchvision.py").write_text("raise ImportError('not here')", encoding="utf-8")
    done = explain("vgg19", path=[tmp_path])
    assert done.returncode == 2
    assert "torchvision does not import: not here. `pip install torchvision`; or give" in done.stderr
    assert "such as lab:vgg19" in done.stderr


TORCHVISION = """
from torch import nn

def list_models(module=None):
    return ["tiny"]

def get_model(name, weights):
    assert weights is None
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1000))
    assert model[0].weight.is_meta, "nothing is allocated for shapes"
    return model
"""


def test_a_torchvision_name(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import models", encoding="utf-8")
    (package / "models.py").write_text(TORCHVISION, encoding="utf-8")
    found = explained("tiny", path=[tmp_path])
    assert found["network"] == "torchvision tiny"
    assert {layer["name"]: layer["rows"] for layer in found["layers"]} == {"0": None, "3": 32}
    done = explain("tinny", path=[tmp_path])
    assert done.returncode == 2
    assert "there are tiny" in done.stderr


# What is read of a torch model


class Odd(nn.Module):
    """Registered in another order than it is called, a layer called twice, one never, tied weights, tokens."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 100, bias=False)
        self.embed = nn.Embedding(100, 16)
        self.block = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.block(self.embed(tokens))))


def test_rows_arithmetic_and_order_of_a_torch_model():
    model = Odd()
    network = describe(model, torch.zeros(4, 7, dtype=torch.int64), name="odd")
    by_name = {layer.name: layer for layer in network.layers}
    assert [layer.name for layer in network.layers] == ["head", "block", "unused"], "tied: where it is registered first"
    assert [layer.name for layer in network.forward_order][:2] == ["block", "head"]
    assert by_name["head"].why_whole == "its weight is also that of embed"
    assert by_name["block"].why_whole is None
    assert by_name["block"].rows == 14
    assert by_name["block"].flops == 2 * 2 * 7 * 16 * 16
    assert by_name["block"].elems == 16 * 16 + 16
    assert by_name["head"].rows == 7
    assert by_name["unused"].flops == 0
    assert not any(param.is_meta for param in model.parameters()), "the model is left as it is"
    times = network.compute(3.0)
    assert sum(forward + backward for forward, backward in times) == pytest.approx(3.0)


def test_a_layer_whose_weight_is_counted_elsewhere_is_no_matrix():
    model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))
    model[1].weight = model[0].weight
    embedding, head = describe(model, torch.zeros(4, 7, dtype=torch.int64), name="tied").layers
    assert (embedding.kind, embedding.shape) == ("embedding", (100, 16))
    assert (head.kind, head.shape, head.elems) == ("other", (100,), 100)
    assert Coordinator(Network("tied", (embedding, head)), Cluster(4, 4), batchsize=4).best_scheme("1") == "store"


def test_what_is_frozen_does_not_travel_and_is_computed_all_the_same():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    network = describe(model, torch.zeros(5, 8), name="net")
    frozen, half, head = network.layers
    assert (frozen.tensors, frozen.flops, half.flops) == ((), 2 * 8 * 16, 2 * 16 * 16)
    assert (half.kind, half.shape, half.elems) == ("other", (16,), 16)
    assert (head.kind, head.elems) == ("linear", 4 * 16 + 4)
    assert network.notes == ("frozen (requires_grad=False), of which nothing travels: 3 parameters",)
    coordinator = Coordinator(network, Cluster(4, 4), batchsize=5)
    nbytes = [2 * 3 / 4 * 4 * elems for elems in (16, 4 * 16 + 4)]
    for plan, layer, moved in zip(coordinator.explain().layers, ("1", "2"), nbytes, strict=True):
        assert (plan.name, plan.scheme_bytes["store"]) == (layer, moved)
    for fragments, moved in ((1, [sum(nbytes)]), (2, nbytes)):
        local = LocalExplanation.of(coordinator, None, mode="diloco", sync_every=2, fragments=fragments)
        assert [*local.fragment_bytes] == moved
    with pytest.raises(ConfigError, match=r"^net: no parameter of the model is trained"):
        describe(model.requires_grad_(False), name="net")


def test_convolutions_count_as_the_labs_traces_do():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), nn.ConvTranspose2d(8, 4, 2, stride=2))
    down, up = describe(model, torch.zeros(2, 3, 8, 8), name="net").layers
    assert down.flops == 2 * 8 * 3 * 9 * 16
    assert up.flops == 2 * 8 * 4 * 4 * 16  # each of 8 x 16 inputs is spread over 4 channels of 2 x 2
    assert (down.kind, down.shape) == ("other", (8, 3, 3, 3))


def test_only_what_describes_a_network_is_read():
    trace = NETWORKS["googlenet"]()
    network = description.read(trace, "lab:googlenet")
    assert sum(layer.elems for layer in network.layers) == trace.elems
    assert (network.batch, network.samples_per_s) == (128, 257.0)
    assert network.layers[-1].kind == "linear"
    with pytest.raises(ConfigError, match=r"penstock\.description\.read"):
        description.read(object(), "it")


def test_lossy_schemes_are_shown_as_what_they_are():
    arguments = ("lab:vgg19", "--workers", "8", "--lossy", "fc8=dgc:0.01", "--lossy", "fc*=1bit", "--lossy", "*5*=bf16")
    done = explain(*arguments)
    assert done.returncode == 0, done.stderr
    assert "LOSSY, as given: 1 bit per weight" in done.stdout and "7 layers of 19 LOSSY" in done.stdout
    assert "LOSSY, as given: rounded to bf16" in done.stdout and "is in no prediction" in done.stdout
    network = NETWORKS["vgg19"]()
    read = description.read(network, "vgg19")
    lossy = of_layers(["fc8=dgc:0.01", "fc*=1bit"], read.layers)
    coordinator = Coordinator(read, Cluster(8, 8), terms={name: Terms(one) for name, one in lossy.items()})
    plans = {plan.name: plan for plan in coordinator.explain().layers}
    assert {name for name, plan in plans.items() if plan.code == "lossy"} == {"fc6", "fc7", "fc8"}
    # Signs, two means per column, the bias, a header; to seven others.
    assert plans["fc7"].scheme_bytes["1bit"] == 7 * (4096 * 4096 // 8 + 2 * 4096 * 4 + 4096 * 4 + 64)
    assert plans["fc8"].scheme_bytes["dgc"] == 7 * (40960 * 8 + 1000 * 4 + 64)
    coordinator.update(rows={}, rates=coordinator.rates)
    assert coordinator.best_scheme("fc7") == "1bit"


def test_in_an_elastic_job_there_is_the_store_alone():
    found = explained("lab:vgg19", "--workers", "8", "--elastic", "--collective-schemes", "--lossy", "fc8=bf16")
    assert {name: scheme for name, scheme in choices(found).items() if scheme != "store"} == {"fc8": "bf16"}
    reasons = {layer["name"]: layer["reason"] for layer in found["layers"]}
    assert reasons["fc6"] == "in an elastic job all gradients travel whole, by the store"


@pytest.mark.parametrize("option", ["--servers=2", "--groups=2", "--mode=diloco", "--lossy=fc8=1bit"])
def test_what_an_elastic_job_cannot_have_is_refused(option, explain_here):
    done = explain_here("lab:vgg19", "--workers", "8", "--elastic", option)
    assert done.returncode == 2, done.stdout
    assert f"a job whose members may be lost cannot have {option.partition('=')[0]}" in done.stderr


def test_step_times_at_run_time():
    """Where no forward has been seen, and so no arithmetic."""
    layers = layers_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {}, why_whole={})
    coordinator = Coordinator(Network("net", tuple(layers)), Cluster(4, 4))
    assert "penstock.explain(model, compute_s)" in coordinator.explain().render()
    found = coordinator.explain(0.5)
    assert found.times.compute_s == 0.5 and 0.5 <= found.times.store_s <= found.times.ddp_s
    assert any("the arithmetic of the layers is not known" in note for note in found.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1bit", "expected PATTERN=SCHEME with one of .*, 1bit, dgc, or dgc:DENSITY"),
        ("fc6=2bit", "expected PATTERN=SCHEME"),
        ("fc6=dgc:many", "could not convert"),
        ("fc6=dgc:2", "density=2.0: expected"),
        ("nothing=dgc", "no layer of this network matches nothing"),
        ("nothing=bf16", "no layer of this network matches nothing"),
        ("conv*=1bit", "no linear layer of this network matches"),
    ],
)
def test_lossy_schemes_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        of_layers([given], description.read(NETWORKS["vgg19"](), "vgg19").layers)


ON_HOSTS = ("lab:vgg19", "--workers", "8", "--per-host", "4", "--batch", "32", "--compute-s", "1")


def test_workers_of_a_host_share_its_interface_and_groups_spare_it():
    """2 hosts of 4: the store moves 2 m (C-1)/C n = 4 n through each interface, in groups n."""
    without, grouped = explained(*ON_HOSTS), explained(*ON_HOSTS, "--groups", "host")
    nbytes = sum(layer["gradient_bytes"] for layer in without["layers"])
    assert without["store_bytes"] == pytest.approx(4 * nbytes, rel=1e-4)
    assert grouped["store_bytes"] == pytest.approx(nbytes, rel=1e-4)
    assert (without["groups"], grouped["groups"]) == ([], [[0, 1, 2, 3], [4, 5, 6, 7]])
    # Each has the other to compare with.
    for found, other in ((without, grouped), (grouped, without)):
        assert found["other_groups"]["groups"] == other["groups"]
        for name in ("store_bytes", "chosen_bytes", "times"):
            assert found["other_groups"][name] == other[name]
    # DDP's ring passes each interface once, in groups or not.
    assert grouped["times"]["ddp_s"] == without["times"]["ddp_s"]
    assert grouped["times"]["store_s"] < 0.5 * without["times"]["store_s"]


def test_on_one_host_ddp_too_goes_by_the_rate_inside():
    common = ("lab:vgg19", "--workers", "4", "--batch", "32", "--compute-s", "1")
    inside = explained(*common, "--per-host", "4", "--inside-mbit", "8000", "--bandwidth-mbit", "100")
    apart = explained(*common, "--bandwidth-mbit", "8000")
    assert inside["times"]["ddp_s"] == apart["times"]["ddp_s"]
    assert inside["store_bytes"] == 0, "no interface carries any"


def test_groups_are_shown_beside_what_would_be_without_them(explain_here, folder):
    (folder / "nets.py").write_text("from torch import nn\ndef net():\n    return nn.Conv2d(64, 640, 9)\n")
    arguments = ("nets:net", "--workers", "4", "--per-host", "2", "--compute-s", "0.01")
    text = explain_here(*arguments, "--groups", "host").stdout
    assert "on 4 workers on 2 hosts" in text and "the store is sharded over the 2 heads of their groups" in text
    assert "workers that sum among themselves first: 0-1; 2-3" in text
    assert "without groups it would be 26.5 MB, with the store alone 26.5 MB" in text
    assert "choices without groups" in text
    text = explain_here(*arguments).stdout
    assert 'in groups by host (groups="host") it would be 13.3 MB' in text
    assert 'choices in groups by host (groups="host")' in text
    auto = explain_here(*arguments, "--groups", "auto").stdout
    assert "groups, as chosen: by host: 16.8 MB through the store take " in auto
    fast = explain_here(*arguments, "--groups", "auto", "--bandwidth-mbit", "100000").stdout
    assert "groups, as chosen: none: 16.8 MB" in fast
    slow_inside = explain_here(*arguments, "--groups", "auto", "--inside-mbit", "100").stdout
    assert "groups, as chosen: none: 16.8 MB" in slow_inside
    apart = explain_here(*arguments, "--servers", "2", "--groups", "2", "--json")
    found = json.loads(apart.stdout)
    nbytes = found["layers"][0]["gradient_bytes"]
    assert found["store_bytes"] == nbytes, "a host sends that of one worker, and a server gets C n / S"
    assert found["other_groups"]["store_bytes"] == 2 * nbytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--per-host", "3"), "--per-host 3: 8 workers do not fill hosts of 3; give a number that divides --workers"),
        (("--groups", "3"), "option groups: 3 (--groups): 8 workers do not make 3 groups of equal size"),
        (("--groups", "hosts"), '--groups hosts: accepted are "host", "auto", a number of groups'),
        (("--groups", "[[0, 1], [2, 3]]"), "each of the ranks 0 to 7 must be in one of the lists"),
    ],
)
def test_groups_and_hosts_that_cannot_be(explain_here, folder, options, said):
    (folder / "nets.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(8, 8)\n")
    done = explain_here("nets:net", "--workers", "8", *options)
    assert done.returncode == 2
    assert said in done.stderr

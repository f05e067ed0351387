"""Networks against published counts, and what a trace promises."""

import importlib.util
import sys
from pathlib import Path

import pytest

from lab.networks import NETWORKS
from lab.networks.sockeye import translation
from lab.trace import Layer, Tensor, Trace

ROOT = Path(__file__).resolve().parents[2]

# Parameters and tensors: Caffe's and torchvision's models, timm's ViT, OpenAI's GPT-2; VGG19-22K is VGG19 with 20,841
# more classes of 4,097 numbers each. No count of P3's Sockeye is published: see the test of its layout. The lab's own
# GPT has 12 F^2 + 13 F in each block of F features, and its embeddings and last normalisation.
PUBLISHED = {
    "cifar10-quick": (145_578, 10),
    "googlenet": (6_998_552, 116),
    "inception-v3": (27_161_264, 292),
    "vgg19": (143_667_240, 38),
    "vgg19-22k": (143_667_240 + 20_841 * 4_097, 38),
    "resnet50": (25_557_032, 161),
    "resnet152": (60_192_808, 467),
    "sockeye": (27_733_021, 37),
    "gpt-25m": (8 * (12 * 512**2 + 13 * 512) + (256 + 1024 + 2) * 512, 100),
    "gpt-small": (124_439_808, 148),
    "vit-s": (22_050_664, 152),
}

# Multiply-additions of one image forward. GoogLeNet's authors say 1.5 billion, counting their own network; that with
# batch normalisation and smaller kernels, which others publish, is another.
PUBLISHED_GMACS = {
    "googlenet": (1.58, 0.01),
    "inception-v3": (5.73, 0.02),
    "vgg19": (19.63, 0.01),
    "resnet50": (4.10, 0.01),
    "resnet152": (11.53, 0.01),
    "vit-s": (4.61, 0.02),
}

# Table 3 of Poseidon, and section 5.1 for the throughput of one worker.
POSEIDON = {
    "cifar10-quick": (145.6e3, 100, None),
    "inception-v3": (27e6, 32, 43.2),
    "vgg19": (143e6, 32, 35.5),
    "vgg19-22k": (229e6, 32, 34.6),
    "resnet152": (60.2e6, 32, None),
}


def layer_named(trace, name):
    return next(layer for layer in trace.layers if layer.name == name)


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_as_published(name):
    trace = NETWORKS[name]()
    assert trace.name == name
    assert (trace.elems, len(trace.tensors)) == PUBLISHED[name]
    assert trace.nbytes == 4 * trace.elems


@pytest.mark.parametrize("name", PUBLISHED_GMACS)
def test_arithmetic_is_as_published(name):
    gmacs, tolerance = PUBLISHED_GMACS[name]
    layers = [layer for layer in NETWORKS[name]().layers if not layer.name.startswith("aux")]
    assert sum(layer.flops for layer in layers) / 2e9 == pytest.approx(gmacs, rel=tolerance)


@pytest.mark.parametrize("name", POSEIDON)
def test_batch_and_throughput_are_poseidons(name):
    trace, (elems, batch, throughput) = NETWORKS[name](), POSEIDON[name]
    assert trace.elems == pytest.approx(elems, rel=0.01)
    assert (trace.batch, trace.throughput) == (batch, throughput)
    assert trace.compute_s == (None if throughput is None else pytest.approx(batch / throughput))


def test_googlenet_is_the_network_of_the_throughput():
    trace = NETWORKS["googlenet"]()
    assert (trace.batch, trace.throughput) == (128, 257.0)
    assert [layer.tensors[0].shape for layer in trace.layers if layer.kind == "linear"] == [(1000, 1024)]


def test_the_quick_network_is_the_example():
    spec = importlib.util.spec_from_file_location("cifar10_example", ROOT / "examples" / "cifar10.py")
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example
    spec.loader.exec_module(example)
    shapes = [(name, tuple(param.shape)) for name, param in example.Quick().named_parameters()]
    assert [(tensor.name, tensor.shape) for tensor in NETWORKS["cifar10-quick"]().tensors] == shapes


def test_sockeyes_layout_gives_a_published_count():
    """A published listing of a Sockeye model: the same options but attention by scalar product, larger vocabularies."""
    assert translation(1.0, 49_410, 42_767, attention_hidden=0).elems == 79_638_799


def test_sockeyes_first_layer_is_the_heaviest():
    trace = NETWORKS["sockeye"]()
    assert max(trace.layers, key=lambda layer: layer.elems) is trace.layers[0]
    assert trace.layers[0].kind == "embedding"
    assert trace.layers[0].elems == 17_191 * 512


def test_shapes_of_the_linear_layers_that_papers_name():
    vgg = NETWORKS["vgg19"]()
    assert layer_named(vgg, "fc6").tensors[0].shape == (4096, 25088)
    assert layer_named(vgg, "fc6").elems / vgg.elems == pytest.approx(0.715, abs=0.001)  # P3, section 3
    assert layer_named(NETWORKS["vgg19-22k"](), "fc8").tensors[0].shape == (21841, 4096)
    assert layer_named(NETWORKS["resnet50"](), "fc").tensors[0].shape == (1000, 2048)


def test_inceptions_long_kernels_alternate():
    trace = NETWORKS["inception-v3"]()
    names = ("mixed6b_7x7_2", "mixed6b_7x7_3", "mixed6e_7x7dbl_4", "mixed6e_7x7dbl_5", "mixed7c_3x3_1x3")
    shapes = [layer_named(trace, name).tensors[0].shape for name in names]
    assert shapes == [(128, 128, 1, 7), (192, 128, 7, 1), (192, 192, 7, 1), (192, 192, 1, 7), (384, 384, 1, 3)]


def test_tied_matrices_count_once_and_are_no_rows():
    gpt = NETWORKS["gpt-small"]()
    assert layer_named(gpt, "lm_head").tensors == ()
    assert layer_named(gpt, "lm_head").flops > layer_named(gpt, "wte").flops
    assert not [layer for layer in gpt.layers if layer.kind == "embedding"]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("seconds", [1.2, 0.0])
def test_compute_time_is_divided_without_rest(name, seconds):
    trace = NETWORKS[name]()
    times = trace.compute(seconds)
    assert len(times) == len(trace.layers)
    assert sum(time.forward_s for time in times) == pytest.approx(seconds / 3)
    assert sum(time.backward_s for time in times) == pytest.approx(seconds * 2 / 3)


def test_compute_time_follows_the_arithmetic():
    trace = Trace("two", (Layer("a", "conv", (), 1.0), Layer("b", "linear", (), 3.0)), 1, "made up")
    (a, b) = trace.compute(12.0)
    assert (a.forward_s, a.backward_s, b.forward_s, b.backward_s) == (1.0, 2.0, 3.0, 6.0)


@pytest.mark.parametrize("name", NETWORKS)
def test_half_width_keeps_inputs_and_classes(name):
    trace = NETWORKS[name]()
    half = trace.widened(0.5)
    assert [tensor.name for tensor in half.tensors] == [tensor.name for tensor in trace.tensors]
    for wide, narrow in zip(trace.tensors, half.tensors, strict=True):
        ratios = {n / w for w, n in zip(wide.shape, narrow.shape, strict=True)}
        assert all(0.45 <= ratio <= 0.55 or ratio == 1 for ratio in ratios), (wide, narrow)
    assert 0.2 < half.elems / trace.elems < 0.45
    assert 0.2 < half.flops / trace.flops < 0.4
    assert (half.batch, half.throughput, half.width) == (trace.batch, None, 0.5)
    assert half.widened(2.0) == trace


def test_half_width_exactly():
    assert NETWORKS["vgg19"]().widened(0.5).elems == 36_945_416
    assert NETWORKS["vgg19-22k"]().widened(0.5).elems == 79_648_625
    assert NETWORKS["resnet50"]().widened(0.5).elems == 6_917_640
    assert layer_named(NETWORKS["vgg19"]().widened(0.5), "fc6").tensors[0].shape == (2048, 12544)
    assert layer_named(NETWORKS["vgg19"]().widened(0.5), "fc8").tensors[0].shape == (1000, 2048)


def test_what_is_no_trace_is_refused():
    layer = Layer("a", "conv", (Tensor("a.weight", (2, 3)),), 1.0)
    with pytest.raises(ValueError, match="a"):
        Trace("twice", (layer, layer), 1, "made up")
    with pytest.raises(ValueError, match="at least one layer"):
        Trace("empty", (), 1, "made up")
    with pytest.raises(ValueError, match="no kind"):
        Layer("a", "pooling", (), 1.0)
    with pytest.raises(ValueError, match="dots"):
        Layer("a.b", "conv", (), 1.0)
    with pytest.raises(ValueError, match="dimension"):
        Tensor("a", (0, 3))
    with pytest.raises(ValueError, match="no other width"):
        Trace("fixed", (layer,), 1, "made up").widened(0.5)
    for factor in (0.0, -1.0):
        with pytest.raises(ValueError, match="positive"):
            NETWORKS["vgg19"]().widened(factor)
    with pytest.raises(ValueError, match="negative"):
        NETWORKS["vgg19"]().compute(-1.0)

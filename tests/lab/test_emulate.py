"""The emulated model: its time line on a clock of the test's own, its gradients, and real systems on it."""

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lab.ahead
import lab.emulate
import lab.pace
from lab.ahead import MARGIN, WORTH_S, Planner
from lab.emulate import PATTERN_ELEMS, Embedding, Linear, Written, build, data, has_factors
from lab.networks import NETWORKS
from lab.pace import HIDDEN_MAX_S, SLEEP_MIN_S, Pace
from lab.trace import Layer, LayerTime, Tensor, Trace

WORKER = Path(__file__).with_name("emulated_worker.py")
LIMIT_S = 120
SMALL = (
    ("resnet50", 0.125),
    pytest.param("sockeye", 0.125, marks=pytest.mark.long),
    ("vgg19", 0.0625),
    ("gpt-small", 0.0625),
)


class Clock:
    """Stands in for the module `time` in a module of the lab: only what the test says takes time."""

    def __init__(self):
        self.now_s = 100.0
        self.busy_s = 0.0
        self.late_s = 0.0  # of each return from a sleep
        self.sleeps = []

    def perf_counter(self):
        return self.now_s

    def thread_time(self):
        return self.busy_s

    def sleep(self, seconds):
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now_s += seconds + self.late_s

    def work(self, seconds):
        self.now_s += seconds
        self.busy_s += seconds

    def block(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lab.pace, "time", clock)
    return clock


@pytest.fixture
def all_ahead(clock, monkeypatch):
    """Every layer's work is done ahead in small units, on a clock that only they move. Returns what became of each."""
    monkeypatch.setattr(lab.emulate, "time", clock)
    monkeypatch.setattr(lab.ahead, "WORTH_S", -1e9)
    monkeypatch.setattr(lab.emulate, "UNIT_ELEMS", 1 << 12)
    begin, taken = lab.emulate._Work.__init__, lab.emulate._Course.take
    found = []  # units done ahead, and whether they were all, of each layer's work

    def slowly(units):
        for unit in units:
            clock.work(1e-6)
            yield unit

    def slow(work, *arguments):
        begin(work, *arguments)
        work._units = slowly(work._units)

    def noting(*arguments):
        work = taken(*arguments)
        found.append((0, False) if work is None else (work.units, work.is_done))
        return work

    monkeypatch.setattr(lab.emulate._Work, "__init__", slow)
    monkeypatch.setattr(lab.emulate._Course, "take", noting)
    return found


def run_step(pace, clock, seconds, *, between=lambda backward, index: None, work_s=0.0):
    """One step whose layers all take `seconds` per pass; returns its length."""
    layers = len(pace.stall_forward_s)
    began_s = clock.now_s
    pace.begin_step()
    for backward in (False, True):
        for index in reversed(range(layers)) if backward else range(layers):
            between(backward, index)
            with pace.layer(index, seconds, backward=backward):
                clock.work(work_s)
    return clock.now_s - began_s


# The time line


def test_late_returns_from_sleep_do_not_add_up(clock):
    pace = Pace(50)
    clock.late_s = 0.0008
    assert run_step(pace, clock, 0.002) == pytest.approx(0.2 + 0.0008)
    assert pace.late_s == pytest.approx(0.0008)
    assert sum(pace.stall_forward_s + pace.stall_backward_s) == pytest.approx(0)


def test_real_work_counts_towards_the_layers_time(clock):
    pace = Pace(10)
    assert run_step(pace, clock, 0.01, work_s=0.004) == pytest.approx(0.2)
    assert clock.sleeps[0] == pytest.approx(0.006)
    assert pace.overrun_s == 0


def test_short_sleeps_are_owed_and_paid_by_the_end_of_the_step(clock):
    pace = Pace(30)
    seconds = SLEEP_MIN_S / 4
    assert run_step(pace, clock, seconds) == pytest.approx(60 * seconds)
    assert all(slept > SLEEP_MIN_S for slept in clock.sleeps[:-1])
    assert len(clock.sleeps) <= 60 / 4
    assert run_step(Pace(1), clock, SLEEP_MIN_S / 10) == pytest.approx(2 * SLEEP_MIN_S / 10)


def test_overrun_is_reported_and_made_up_for_by_later_layers(clock):
    pace = Pace(4)

    def slow_once(backward, index):
        if (backward, index) == (False, 1):
            with pace.layer(1, 0.01, backward=False):
                clock.work(0.025)

    assert run_step(pace, clock, 0.01, between=slow_once) == pytest.approx(0.09)
    assert pace.overrun_s == pytest.approx(0.015)
    assert pace.late_s == pytest.approx(0)


def test_overrun_that_nothing_makes_up_for_makes_the_step_late(clock):
    pace = Pace(3)
    assert run_step(pace, clock, 0.01, work_s=0.012) == pytest.approx(0.072)
    assert pace.overrun_s == pytest.approx(6 * 0.002)
    assert pace.late_s == pytest.approx(0.012)


def test_waiting_for_the_network_is_a_stall_of_that_layer(clock):
    pace = Pace(3)
    clock.late_s = 0.0005

    def stall(backward, index):
        if index == 1:
            clock.block(0.2 if backward else 0.05)

    # The program began to wait late, but what it waited for came when it came: that is not made up for.
    assert run_step(pace, clock, 0.01, between=stall) == pytest.approx(0.06 + 0.25 + 3 * 0.0005)
    assert pace.stall_forward_s == pytest.approx([0, 0.0505, 0])
    assert pace.stall_backward_s == pytest.approx([0, 0.2005, 0])


def test_overrun_before_a_stall_does_not_shorten_it(clock):
    pace = Pace(2)
    pace.begin_step()
    with pace.layer(0, 0.01, backward=False):
        clock.work(0.11)
    clock.block(0.3)
    began_s = clock.now_s
    with pace.layer(1, 0.01, backward=False):
        pass
    assert clock.now_s - began_s == pytest.approx(0.01)
    assert pace.stall_forward_s[1] == pytest.approx(0.4)
    assert pace.overrun_s == pytest.approx(0.1)


def test_a_stall_while_the_device_is_still_busy_is_none(clock):
    pace = Pace(2)
    seconds = SLEEP_MIN_S / 2

    def stall(backward, index):
        if index == 1 and not backward:
            clock.block(seconds / 2)

    assert run_step(pace, clock, seconds, between=stall) == pytest.approx(4 * seconds)


def test_a_stall_before_the_first_layer_counts_from_the_steps_begin(clock):
    pace = Pace(2)

    def stall(backward, index):
        if index == 0 and not backward:
            clock.block(0.3)

    assert run_step(pace, clock, 0.01, between=stall) == pytest.approx(0.34)
    assert pace.stall_forward_s == pytest.approx([0.3, 0])


def test_machinery_between_layers_is_hidden_up_to_its_bound(clock):
    pace = Pace(10)
    assert run_step(pace, clock, 0.01, between=lambda *_: clock.work(HIDDEN_MAX_S / 2)) == pytest.approx(
        0.2 + HIDDEN_MAX_S / 2  # before the first layer nothing is queued
    )
    assert pace.hidden_s == pytest.approx(19 * HIDDEN_MAX_S / 2)
    busy = Pace(10)
    assert run_step(busy, clock, 0.01, between=lambda *_: clock.work(0.003)) == pytest.approx(
        0.2 + 0.003 + 19 * (0.003 - HIDDEN_MAX_S)
    )


def test_steps_are_independent(clock):
    pace = Pace(3)
    run_step(pace, clock, 0.01, work_s=0.02)
    clock.block(5.0)
    before_s = sum(pace.stall_forward_s)
    assert run_step(pace, clock, 0.01) == pytest.approx(0.06)
    assert sum(pace.stall_forward_s) == before_s


# Work done ahead


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.2)), min_size=1, max_size=12))
def test_work_ahead_is_planned_once_and_before_it_is_needed(layers):
    times = [LayerTime(seconds / 3, seconds * 2 / 3) for seconds, _ in layers]
    plan = Planner(times).plan([work for _, work in layers])
    planned = [(slot, layer) for slot, ahead in plan.items() for layer in ahead]
    heavy = [i for i, (_, work) in enumerate(layers) if work - times[i].backward_s > WORTH_S]
    assert sorted(layer for _, layer in planned) == heavy
    for (backward, index), layer in planned:
        assert not backward or index > layer


def test_work_ahead_is_begun_as_late_as_is_safe():
    times = [LayerTime(0.1, 0.2)] * 9 + [LayerTime(0.0, 0.0)]
    work_s = 0.25 / MARGIN
    assert Planner(times).plan([0.0] * 9 + [work_s]) == {(False, 6): [9]}  # forward of layers 7 and 8: 0.2 s
    assert Planner(times).plan([work_s] + [0.0] * 9) == {}
    assert Planner(times).plan([0.3] + [0.0] * 9) == {(True, 3): [0]}


def test_work_ahead_is_given_the_moment_when_its_layer_ends(clock):
    pace, asked = Pace(3), []

    def ahead(until_s):
        asked.append(until_s)
        while clock.now_s + 0.004 <= until_s:
            clock.work(0.004)

    pace.begin_step()
    began_s = clock.now_s
    for index in range(3):
        with pace.layer(index, 0.01, backward=False, ahead=ahead):
            clock.work(0.003)
    assert asked == pytest.approx([began_s + 0.01 * number for number in (1, 2, 3)])
    assert clock.now_s - began_s == pytest.approx(0.03)
    assert pace.ahead_s == pytest.approx(3 * 0.004)
    assert sum(pace.stall_forward_s) == pace.overrun_s == 0


@pytest.mark.parametrize("units", [10, 20])
def test_work_ahead_that_is_heavier_than_expected_delays_no_layer(clock, monkeypatch, units):
    # When it was done in one go, its overrun looked as if the layers behind it had waited for the network.
    monkeypatch.setattr(lab.emulate, "time", clock)
    monkeypatch.setattr(lab.emulate, "UNIT_ELEMS", 1)
    sizes = [8, 8, 8, units * PATTERN_ELEMS]
    layers = tuple(Layer(f"l{i}", "conv", (Tensor(f"l{i}.weight", (n,)),), 1.0) for i, n in enumerate(sizes))
    model = build(Trace("four", layers, 1, "made up"), 0.12, seed=0)  # 0.01 s forward, 0.02 s backward, each
    heavy = model.l3
    writing, unit_s = heavy.writing, 0.004

    def slow(*arguments):
        for _ in writing(*arguments):
            clock.work(unit_s)
            yield

    monkeypatch.setattr(heavy, "writing", slow)
    begins_s = []
    for part in model.children():
        part.register_forward_pre_hook(lambda *_: begins_s.append(clock.now_s))
    for step in range(3):
        unit_s = 0.004 if step == 0 else 0.0045  # longer than in the step by which it was planned
        began_s, overrun_s = clock.now_s, model.pace.overrun_s
        begins_s.clear()
        loss = model(data(0, step))
        assert [at_s - began_s for at_s in begins_s] == pytest.approx([0.0, 0.01, 0.02, 0.03])
        ahead_s = model.pace.ahead_s
        loss.backward()
        took_s = clock.now_s - began_s
        assert torch.equal(heavy.weight.grad, model.gradient("l3.weight", rank=0, step=step))
        if step:
            # Two units fit into a forward, what is left is done in the backward.
            assert ahead_s == pytest.approx(step * 8 * 0.0045)
            assert took_s == pytest.approx(0.12)
            assert model.pace.overrun_s - overrun_s == pytest.approx(max(0.0, (units - 8) * 0.0045 - 0.02))
        model.zero_grad()
    assert sum(model.pace.stall_forward_s + model.pace.stall_backward_s) == 0


def test_what_is_needed_first_is_done_first_whatever_began_first(all_ahead, clock, monkeypatch):
    # The work of l2 is the longest and begins first; that of l3 is needed before it.
    monkeypatch.setattr(lab.emulate, "UNIT_ELEMS", 1)
    sizes = [8, 8, 60 * PATTERN_ELEMS, 10 * PATTERN_ELEMS]
    layers = tuple(Layer(f"l{i}", "conv", (Tensor(f"l{i}.weight", (n,)),), 1.0) for i, n in enumerate(sizes))
    model = build(Trace("four", layers, 1, "made up"), 120e-6, seed=0)  # 10 us forward, 20 us backward, each
    order = []
    for part in model.children():
        writing = part.writing

        def noting(*arguments, writing=writing, name=part.layer.name):
            for _ in writing(*arguments):
                order.append(name)
                yield

        monkeypatch.setattr(part, "writing", noting)
    model(data(0, 0)).backward()
    order.clear()
    model(data(0, 1))
    assert order.index("l2") < order.index("l3")
    assert order[order.index("l3") :][:10] == ["l3"] * 10


# Gradients


def small(name="resnet50", width=0.25, compute_s=0.0, seed=3):
    return build(NETWORKS[name]().widened(width), compute_s, seed=seed)


def gradients_of(model, rank, step):
    model.zero_grad(set_to_none=True)
    model(data(rank, step)).backward()
    return {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize(("name", "width"), SMALL)
def test_parameters_are_those_of_the_trace(name, width):
    model = small(name, width)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [
        (t.name, t.shape) for t in model.trace.tensors
    ]
    assert all(type(param) is nn.Parameter and param.is_leaf for param in model.parameters())


def test_parameters_in_lists_have_the_same_values_and_gradients():
    plain, model = small(), build(NETWORKS["resnet50"]().widened(0.25), 0.0, seed=3, lists=True)
    names = [name for name, _ in model.named_parameters()]
    assert names[:4] == ["conv1.list.0", "bn1.list.0", "bn1.list.1", "layer1_0_conv1.list.0"]
    assert names[-2:] == ["fc.weight", "fc.bias"], "it has factors"
    assert all(torch.equal(*both) for both in zip(plain.parameters(), model.parameters(), strict=True))
    ours = gradients_of(model, 1, 5)
    assert all(torch.equal(*both) for both in zip(gradients_of(plain, 1, 5).values(), ours.values(), strict=True))


@pytest.mark.parametrize("compute_s", [1.0, 1e-3])  # all work is done ahead, or a part of some layers'
@pytest.mark.parametrize(("name", "width"), SMALL)
def test_gradients_come_in_backward_order_and_are_stolen(name, width, compute_s, monkeypatch, all_ahead):
    model = small(name, width, compute_s)
    for step in range(2):
        gradients_of(model, 0, step)
    all_ahead.clear()
    made, order, entered = {}, [], []
    for layer, part in zip(model.trace.layers, model.children(), strict=True):
        backward = part.backward

        def noting(now, layer=layer, backward=backward):
            gradients = backward(now)
            for tensor, gradient in zip(layer.tensors, gradients, strict=True):
                made[tensor.name] = gradient.data_ptr()
            return gradients

        monkeypatch.setattr(part, "backward", noting)
        part.register_forward_pre_hook(lambda module, args, layer=layer: entered.append(layer.name))
    for tensor_name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, tensor_name=tensor_name: order.append(tensor_name))
    found = gradients_of(model, 0, 2)
    assert any(units > 0 for units, _ in all_ahead)
    assert compute_s < 1 or all(done for _, done in all_ahead)
    assert {n: grad.data_ptr() for n, grad in found.items()} == made, "autograd has copied"
    for n, grad in found.items():
        assert torch.equal(grad, model.gradient(n, rank=0, step=2))
    assert entered == [layer.name for layer in model.trace.layers]
    layers = [n.rpartition(".")[0] for n in order]
    expected = [layer.name for layer in reversed(model.trace.layers) if layer.tensors]
    assert [layer for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer] == expected


@pytest.mark.parametrize(("name", "width"), SMALL)
def test_each_step_has_new_memory(name, width, all_ahead):
    model = small(name, width, 1.0)
    kept = [gradients_of(model, 0, step) for step in range(4)]
    assert all(done for _, done in all_ahead[-len(model.trace.layers) :])
    before = [{n: grad.clone() for n, grad in found.items()} for found in kept]
    gradients_of(model, 0, 4)
    for found, copies in zip(kept, before, strict=True):
        assert all(torch.equal(found[n], copies[n]) for n in found)
    pointers = [grad.untyped_storage().data_ptr() for found in kept for grad in found.values()]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize(("name", "width"), SMALL)
def test_work_done_ahead_for_another_step_is_not_used(name, width, all_ahead):
    model = small(name, width, 1.0)
    gradients_of(model, 0, 0)
    model(data(0, 1))  # work is done ahead for a backward that never comes
    loss, other = model(data(0, 2)), model(data(1, 2))
    assert any(done for _, done in all_ahead)
    for rank, backward in ((0, loss), (1, other)):
        model.zero_grad(set_to_none=True)
        backward.backward()
        for n, param in model.named_parameters():
            assert torch.equal(param.grad, model.gradient(n, rank=rank, step=2))


@pytest.mark.parametrize(("name", "width"), SMALL)
def test_the_average_is_exact_in_every_order(name, width):
    model, ranks = small(name, width), 4
    found = [gradients_of(model, rank, 7) for rank in range(ranks)]
    for n in found[0]:
        grads = [f[n] for f in found]
        expected = model.expected_average(n, size=ranks, step=7)
        assert torch.equal(sum(grads[1:], grads[0]) / ranks, expected)
        assert torch.equal(sum(grad / ranks for grad in reversed(grads)), expected)
        assert expected.any()
        assert not torch.equal(grads[0], grads[1]), "ranks have the same gradient"
    later = gradients_of(model, 0, 8)
    assert not any(torch.equal(found[0][n], later[n]) for n in later), "steps have the same gradient"


def test_gradients_differ_from_place_to_place():
    """So that a slice which lands in the wrong place is seen."""
    model = small(width=0.5)
    for name, same in (("layer4_0_conv2.weight", 0.001), ("fc.weight", 0.05)):  # products of a few small integers
        flat = model.gradient(name, rank=0, step=0).view(-1)
        for shift in (1, 4096, 50_000, 65_536, flat.numel() // 2):
            assert (flat[shift:] == flat[:-shift]).float().mean() < same


def test_seeds_differ_and_repeat():
    [a, b, c] = [small(seed=seed) for seed in (1, 1, 2)]
    name = a.trace.tensors[0].name
    assert torch.equal(a.gradient(name, rank=0, step=0), b.gradient(name, rank=0, step=0))
    ratios = a.gradient(name, rank=0, step=0) / c.gradient(name, rank=0, step=0)
    assert ratios.std() > 0.1, "the pattern is the same"
    assert torch.equal(next(a.parameters()), next(b.parameters()))
    with pytest.raises(KeyError, match="no parameter"):
        a.gradient("fc.wieght", rank=0, step=0)


def test_which_layers_are_real():
    def kinds(name):
        trace = NETWORKS[name]()
        return {layer.name for layer in trace.layers if has_factors(layer, trace.batch)}

    assert kinds("vgg19") == {"fc6", "fc7", "fc8"}
    assert kinds("resnet50") == {"fc"}
    assert kinds("googlenet") == {"classifier"}
    assert kinds("gpt-small") == set()  # 12 x 1,024 rows: the factors are larger than the matrix
    assert has_factors(Layer("a", "linear", (Tensor("a.weight", (100, 100)),), 1.0), 49)
    assert not has_factors(Layer("a", "linear", (Tensor("a.weight", (100, 100)),), 1.0), 50)
    types = {type(part) for part in small("sockeye").children()}
    assert types == {Embedding, Written}


def test_a_linear_layers_factors_exist():
    model = small("vgg19", 0.125)
    fc6, seen = model.fc6, {}
    assert isinstance(fc6, Linear)
    assert isinstance(fc6, nn.Linear)
    fc6.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    fc6.register_full_backward_hook(lambda module, grad_in, grad_out: seen.update(dy=grad_out[0]))
    found = gradients_of(model, 1, 2)
    assert seen["x"].shape == (32, fc6.in_features)
    assert seen["dy"].shape == (32, fc6.out_features)
    assert torch.equal(seen["dy"].t() @ seen["x"], found["fc6.weight"])
    assert torch.equal(seen["dy"].sum(0), found["fc6.bias"])


def test_an_embeddings_rows_exist():
    model = small("sockeye")
    embed, seen = model.source_embed, {}
    assert isinstance(embed, nn.Embedding)
    embed.register_forward_pre_hook(lambda module, args: seen.update(indices=args[0]))
    embed.register_forward_hook(lambda module, args, y: y.register_hook(lambda dy: seen.update(dy=dy)) and None)
    found = gradients_of(model, 0, 0)["source_embed.weight"]
    assert seen["dy"].shape == (32 * 25, embed.embedding_dim)
    expected = torch.zeros_like(found).index_add_(0, seen["indices"], seen["dy"])
    assert torch.equal(found, expected)
    assert set(found.any(dim=1).nonzero().view(-1).tolist()) <= set(seen["indices"].tolist())
    counts = torch.bincount(seen["indices"], minlength=embed.num_embeddings)
    assert counts.max() > 20, "no word is frequent"
    assert (counts == 1).sum() > 100, "no words are rare"


# Time


def test_a_step_takes_its_time_and_accounts_for_the_rest():
    model = small(compute_s=0.25)
    for step in range(3):
        stalled_s = sum(model.pace.stall_forward_s + model.pace.stall_backward_s)
        late_s = model.pace.late_s
        began_s = time.perf_counter()
        model(data(0, step)).backward()
        took_s = time.perf_counter() - began_s
        known_s = 0.25 + sum(model.pace.stall_forward_s + model.pace.stall_backward_s) - stalled_s
        assert took_s >= 0.25
        assert took_s >= known_s + model.pace.late_s - late_s - 1e-6
    assert model.pace.steps == 3


def test_gradients_are_not_handed_over_early():
    layers = tuple(Layer(f"l{i}", "conv", (Tensor(f"l{i}.weight", (8,)),), 1.0) for i in range(4))
    model = build(Trace("four", layers, 1, "made up"), 0.24, seed=0)
    arrived_s = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: arrived_s.append(time.perf_counter()))
    began_s = time.perf_counter()
    model(data(0, 0)).backward()
    for number, at_s in enumerate(arrived_s, 1):
        assert at_s - began_s >= 0.08 + number * 0.04 - SLEEP_MIN_S
    assert all(later > earlier for earlier, later in pairwise(arrived_s))


def test_work_beyond_the_time_is_reported():
    model = small("vgg19", 0.25, compute_s=0.001)  # wide enough to exceed its time on a fast machine, too
    for step in range(3):
        model(data(0, step)).backward()
    assert model.overrun_s() > 0
    assert model.pace.ahead_s > 0
    assert model.pace.late_s > 0


def test_forward_alone_does_no_backward_work():
    model = small("vgg19", 0.125)
    model(data(0, 0)).backward()
    ahead_s = model.pace.ahead_s
    with torch.no_grad():
        assert model(data(0, 1)).shape == ()
    assert model.pace.ahead_s == ahead_s


# Real systems


@pytest.mark.long
def test_ddp_and_penstock_train_it_to_the_same_bits(tmp_path):
    """Two real processes, five steps of plain SGD: parameters are where the expected averages lead."""
    network, width, systems = "sockeye", 0.125, ("penstock", "ddp")
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *sys.path])
    environ = {**os.environ, "PYTHONPATH": paths}
    programs.run_ranks(2, WORKER, ",".join(systems), network, width, 0.05, 5, tmp_path, timeout=LIMIT_S, env=environ)
    model = small(network, width, seed=5)
    for system in systems:
        ranks = [torch.load(tmp_path / f"{system}{rank}.pt") for rank in range(2)]
        for name, begin in ranks[0]["begin"].items():
            expected = begin.clone()
            for step in range(5):
                expected.sub_(model.expected_average(name, size=2, step=step), alpha=0.125)
            assert not torch.equal(expected, begin), name
            for rank in ranks:
                assert torch.equal(rank["end"][name], expected), (system, name)
        assert min(ranks[0]["step_s"]) >= 0.05

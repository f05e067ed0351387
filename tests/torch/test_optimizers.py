"""Layer by layer or at once: the bits are the same, and what cannot be split is found out."""

import warnings
from dataclasses import replace

import pytest
import ranks
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train, values
from torch import nn
from torch.nn import functional as F

from penstock import distribute, job
from penstock.torch.updates.optimizer import LAYERS_PER_LOOK, separable

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD maximize": lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.01),
    "Adam amsgrad tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), amsgrad=True, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.05)


def make():
    return seeded(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)))


def loss_of(model, rank, step):
    x, y = examples(rank, step)
    return F.mse_loss(model(x), y)


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


@pytest.mark.parametrize("foreach", [None, True], ids=["default", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_equal_those_of_whole_steps(name, foreach):
    """The other rank always agrees, so the averages are this rank's own gradients, exactly."""
    if foreach and ("fused" in name or "tensor lr" in name):
        pytest.skip("not with foreach")

    def make_optimizer(model):
        decay, plain = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
        optimizer = OPTIMIZERS[name]([{"params": decay}, {"params": plain, "lr": 0.02}])
        if foreach:
            for group in optimizer.param_groups:
                group["foreach"] = True
        return optimizer

    settings = {"make": make, "make_optimizer": make_optimizer, "loss_of": loss_of, "steps": 6, "scheduler": step_lr}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="penstock.*")
        ours = train(**settings, size=1, engine_options={"world_size": 2})[0]
    plain = reference(**settings, size=1)
    assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs a newer torch")
def test_muon_beside_adamw():
    settings = {"make": make, "loss_of": loss_of, "steps": 6}
    matrices = {
        "make_optimizer": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05)
    }
    ours = train(**settings, **matrices, size=1, engine_options={"world_size": 2}, scheduler=step_lr)[0]
    plain = reference(**settings, **matrices, size=1, scheduler=step_lr)
    assert all(torch.equal(one, two) for one, two in zip(ours, plain, strict=True))


class Preconditioned(torch.optim.Optimizer):
    """Multiplies matrices, which autocast would do in bfloat16."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    matrix = param.grad.reshape(len(param), -1)
                    param -= 0.1 * (matrix @ matrix.t() @ matrix).view_as(param)


class WritesGradients(torch.optim.SGD):
    """Scales the gradients in place, as some do for weight decay."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return super().step(closure)


def test_autocast_around_the_forward_does_not_reach_a_deferred_update():
    def loss_in_autocast(model, rank, step):
        x, y = examples(rank, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.mse_loss(model(x.float()).double(), y)

    settings = {
        "make": lambda: make().float(),
        "make_optimizer": lambda model: Preconditioned(model.parameters()),
        "loss_of": loss_in_autocast,
        "steps": 4,
    }
    ours = train(**settings, size=1, engine_options={"world_size": 2})[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, reference(**settings, size=1), strict=True))


def test_inference_mode_around_a_forward_does_not_reach_a_deferred_update():
    def loss_of_validated(model, rank, step):
        with torch.inference_mode():
            model(examples(rank, step)[0])
        return loss_of(model, rank, step)

    settings = {
        "make": make,
        "make_optimizer": lambda m: torch.optim.Adam(m.parameters()),
        "loss_of": loss_of_validated,
    }
    results = train(**settings)
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) < 1e-12


@pytest.mark.parametrize("how", ["averages made here", "gradients read", "gradients kept", "whole steps"])
def test_what_comes_in_in_inference_mode_is_used_outside_of_it(how):
    """Its tensors cannot be: they have no versions, and must not be written."""

    def trained(model, optimizer, ranks_of):
        for step in range(5):
            (sum(loss_of(model, rank, step) for rank in ranks_of) / len(ranks_of)).backward()
            if how == "gradients read":
                with torch.inference_mode():
                    assert all(float(param.grad.norm()) > 0 for param in model.parameters())
            optimizer.step()
            if step in (1, 2):
                with torch.inference_mode():
                    model(examples(0, step)[0])
            optimizer.zero_grad(set_to_none=how != "gradients kept")
        return values(model)

    def optimizer_of(model):
        if how == "whole steps":
            return Preconditioned(model.parameters())  # each parameter as a whole
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def main(rank, engine):
        running = job.current()
        running.options = replace(running.options, whole_steps=how == "whole steps")
        model = make()
        scheme = "factors" if how in ("averages made here", "gradients read") else "store"
        return trained(*distribute(model, optimizer_of(model), schemes={"*": scheme}), [rank])

    results = run(main, 2)
    assert same_everywhere(results)
    model = make()
    assert distance(results[0], trained(model, optimizer_of(model), [0, 1])) < 1e-12


def test_an_optimizer_that_writes_gradients_does_not_write_what_is_being_sent():
    settings = {
        "make": make,
        "make_optimizer": lambda m: WritesGradients(m.parameters(), lr=0.1),
        "loss_of": loss_of,
    }
    results = train(**settings)
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) < 1e-12


@pytest.mark.parametrize("lazy", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_agree_and_equal_one_process(size, lazy):
    settings = {
        "make": make,
        "make_optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
        "loss_of": loss_of,
    }
    results = train(**settings, size=size, engine_options={"lazy": lazy})
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings, size=size)) < 1e-12


@pytest.mark.fake_only
def test_a_late_network_costs_no_more_than_one_call_per_layer_and_an_early_one_a_single_call(monkeypatch):
    monkeypatch.setattr("penstock.torch.updates.partial.CUT_MIN_BYTES", 1 << 30)
    calls = []
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first of a class gives it hooks
    plain = torch.optim.SGD.step.__wrapped__

    def counted(optimizer):
        calls.append(sum(param.numel() for param in optimizer.param_groups[0]["params"]))
        return plain(optimizer)

    counted.hooked = True
    counted.__wrapped__ = counted
    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    settings = {"make": make, "make_optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "loss_of": loss_of}
    train(**settings, size=1, steps=3, engine_options={"world_size": 2, "lazy": False})
    assert calls[-3:] == [130, 130, 130]
    calls.clear()
    train(**settings, size=1, steps=3, engine_options={"world_size": 2, "lazy": True})
    assert calls[-6:] == [40, 72, 18] * 2
    calls.clear()
    monkeypatch.setattr("penstock.torch.updates.optimizer.WAIT_BYTES", 64 << 10)
    train(**settings, size=1, steps=3, engine_options={"world_size": 2, "lazy": True})
    assert calls[-2:] == [130, 130], "small neighbours are waited for together"


class CallCounting(torch.optim.SGD):
    """Keeps a counter per call of step, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        return super().step(closure)


class NormScaling(torch.optim.SGD):
    """Its step depends on all gradients at once."""

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = (
            torch.nn.utils.get_total_norm(grads)
            if hasattr(torch.nn.utils, "get_total_norm")
            else sum(map(torch.sum, grads))
        )
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


@pytest.mark.parametrize("kind", [CallCounting, NormScaling])
def test_an_optimizer_that_needs_all_gradients_gets_them_with_one_warning(kind):
    settings = {"make": make, "make_optimizer": lambda m: kind(m.parameters(), lr=0.05), "loss_of": loss_of, "steps": 4}
    with pytest.warns(UserWarning, match="waits for all averages") as caught:
        ours = train(**settings, size=1, engine_options={"world_size": 2})[0]
    assert sum("waits for all averages" in str(warning.message) for warning in caught) == 1
    assert all(torch.equal(a, b) for a, b in zip(ours, reference(**settings, size=1), strict=True))


def test_separable_says_why_not():
    parameters = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))]
    assert separable(torch.optim.AdamW(parameters)) is None
    assert "state per call" in separable(CallCounting(parameters, lr=0.1))
    assert "depends on the others" in separable(NormScaling(parameters, lr=0.1))
    assert separable(torch.optim.LBFGS(parameters)) is not None
    before = torch.random.get_rng_state()
    separable(torch.optim.AdamW(parameters))
    assert torch.equal(before, torch.random.get_rng_state())


def test_lbfgs_with_a_closure():
    def main(rank, engine):
        model = make()
        model, optimizer = distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 0, 0)  # the same loss everywhere: its value steers the iteration
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return values(model), losses

    with pytest.warns(UserWarning, match="waits for all averages"):
        (first, losses), (second, _) = run(main, 2)
    assert same_everywhere([first, second])
    model = make()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    assert losses == pytest.approx([optimizer.step(closure).item() for _ in range(3)])
    assert distance(first, values(model)) < 1e-10


@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_step_hooks_run_once_and_the_scheduler_does_not_warn(scheduled):
    def main(rank, engine):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if scheduled == "before":
            scheduler = step_lr(optimizer)
        model, optimizer = distribute(model, optimizer)
        if scheduled == "after":
            scheduler = step_lr(optimizer)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))
        for step in range(3):
            loss_of(model, rank, step).backward()
            assert optimizer.step() is None
            scheduler.step()
            optimizer.zero_grad()
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(main, 2)[0] == ["pre", "post"] * 3


def test_updates_that_are_in_are_applied_instead_of_waiting():
    """While the first layer is late, the last one, whose average came early, is not left for later."""
    if ranks.arm != "threads":
        pytest.skip("only the fake engine can be told what comes early")

    def main(rank, engine):
        model = seeded(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3 * LAYERS_PER_LOOK))))
        model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = examples(rank, 0)[0]
        for _ in range(2):  # the first step finds out who reads what, and waits for all
            model(x).sum().backward()
            optimizer.step()
        engine.early = {name for name, _ in model[-1].named_parameters(prefix=str(len(model) - 1))}
        done_at_first_wait = []
        wait = engine.wait

        def observed(*args, **kwargs):
            done_at_first_wait.append(type(model[-1].weight) is nn.Parameter)
            wait(*args, **kwargs)

        engine.wait = observed
        engine.all_gather("all have contributed", b"")  # or even the last layer is late
        model[0](x)
        return done_at_first_wait, type(model[-2].weight) is nn.Parameter

    for done_at_first_wait, other_done in run(main, 2):
        assert done_at_first_wait == [True], "the last layer's update is applied before the only wait"
        assert not other_done, "what is not in is not waited for"


def test_a_parameter_of_two_optimizers_is_updated_by_both_in_turn():
    """Whether averages have come by the second step or not."""

    def make_both():
        model = make()
        body, both, head = model[0], model[2], model[4]
        first = torch.optim.SGD([*body.parameters(), *both.parameters()], lr=0.1, momentum=0.9)
        second = torch.optim.Adam([{"params": head.parameters(), "lr": 0.02}, {"params": both.parameters()}], lr=0.05)
        return model, first, second

    def train_both(model, first, second, rank):
        for step in range(4):
            first.zero_grad()
            second.zero_grad()
            loss_of(model, rank, step).backward()
            first.step()
            second.step()
        return values(model)

    def as_rank(rank, engine):
        model, *optimizers = make_both()
        model, optimizers = distribute(model, optimizers)
        return train_both(model, *optimizers, 0)

    expected = train_both(*make_both(), 0)
    for lazy in (True, False):
        for found in run(as_rank, lazy=lazy):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

"""Layers that send rows: the results of the dense path, whatever the loop does."""

import warnings
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from ranks import distance, examples, reference, run, same_everywhere, seeded, train, values
from scenarios import sgd
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import penstock as ps
from penstock import distribute
from penstock.errors import ConfigError

FACTORS = {"*": "factors"}
PAIRS = {"embedding": "pairs"}
TOLERANCE = 1e-12


def make_wide():
    """Wide enough for a few rows to be shorter than the gradient."""
    return seeded(
        nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40, bias=False), nn.Tanh(), nn.Linear(40, 20))
    )


def rows_of(rank, step):
    """K differs between ranks and steps."""
    return 1 + (rank + 2 * step) % 4


def wide_loss(model, rank, step):
    x, y = examples(rank, step, rows=rows_of(rank, step), inputs=24, outputs=20)
    return F.mse_loss(model(x), y)


def check(loss_of=wide_loss, make=make_wide, make_optimizer=sgd, schemes=FACTORS, *, size=2, steps=5, dense=0):
    """Training equals training in one process, with the same bits on all ranks; so many contributions were dense."""

    def after(model):
        owner = distributed_of(model)
        assert sum(gather.dense_sent for gather in owner.schemes.gathers.values()) == dense
        return values(model)

    settings = {"make": make, "make_optimizer": make_optimizer, "loss_of": loss_of, "size": size, "steps": steps}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="penstock.*")
        results = train(**settings, schemes=schemes, after=after)
    assert same_everywhere(results)
    assert distance(results[0], reference(**settings)) <= TOLERANCE
    return results[0]


def distributed_of(model):
    from penstock.torch.reads import safety

    return safety.distributed_of(next(model.parameters()))


def engaged(model):
    return {name: gather.engaged for name, gather in distributed_of(model).schemes.gathers.items()}


def both_paths(loop, make=make_wide, schemes=FACTORS, size=2, whole=0):
    """``loop(model, optimizer, rank)`` with and without rows: the same to rounding, and the same bits on all ranks.

    With rows, so many contributions of each rank are whole gradients, as the test means them to be.
    """

    def main(chosen):
        def as_rank(rank, engine):
            model = make()
            model, optimizer = distribute(model, sgd(model), schemes=chosen)
            result = loop(model, optimizer, rank)
            if chosen is not None:
                gathers = distributed_of(model).schemes.gathers.values()
                assert sum(gather.dense_sent for gather in gathers) == whole
                assert sum(gather.seq for gather in gathers) >= max(whole, 1)
            return result

        return as_rank

    ours, theirs = run(main(schemes), size), run(main(None), size)
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= TOLERANCE
    return ours[0]


# Equality


@pytest.mark.parametrize("size", [2, 3, 4])
def test_training_equals_one_process_with_uneven_rows(size):
    check(size=size)


def test_adam_and_leading_dimensions():
    def loss_of(model, rank, step):
        x, y = examples(rank, step, rows=4, inputs=24, outputs=20)
        return F.mse_loss(model(x.view(2, 1, 2, 24)).view(4, 20), y) + model(x[0]).sum()

    check(loss_of, make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


def test_several_calls_in_one_step():
    def loss_of(model, rank, step):
        x, y = examples(rank, step, rows=2, inputs=24, outputs=20)
        return F.mse_loss(model(x), y) + 0.3 * model(torch.tanh(x[:1])).square().sum()

    check(loss_of)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(24, 16), nn.Linear(24, 16), nn.Linear(24, 16)

    def forward(self, x, which):
        return {"left": self.left, "right": self.right}[which](x)


def test_layers_that_some_or_all_ranks_do_not_use():
    def make():
        return seeded(Branches())

    def loss_of(model, rank, step):
        which = "left" if (rank + step) % 3 == 0 or step == 2 else "right"
        return model(examples(rank, step, inputs=24)[0][:2], which).square().sum()

    def loop(model, optimizer, rank):
        for step in range(5):
            loss_of(model, rank, step).backward()
            assert model.never.weight.grad is None and model.never.bias.grad is None
            assert (model.right.weight.grad is None) == (step == 2)
            optimizer.step()
            optimizer.zero_grad()
        assert model.never.weight.grad is None
        return values(model)

    check(loss_of, make, size=2)
    both_paths(loop, make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types(dtype):
    def loop(model, optimizer, rank):
        for step in range(3):
            x, y = (value.to(dtype) for value in examples(rank, step, rows=3, inputs=24, outputs=20))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    def main(chosen):
        def as_rank(rank, engine):
            model = make_wide().to(dtype)
            return loop(*distribute(model, sgd(model), schemes=chosen), rank)

        return as_rank

    ours, theirs = run(main(FACTORS)), run(main(None))
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]


class Products(TorchDispatchMode):
    """Counts the matrix products of this thread, in which autograd runs a backward on the CPU, too."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("leading", [(3,), (1, 3)], ids=["rows", "leading dimensions"])
@pytest.mark.parametrize("accumulating", [False, True])
def test_backward_does_not_compute_the_local_gradient_of_a_weight(accumulating, leading):
    widths = (24, 40, 20)
    weights, inputs = [(40, 24), (20, 40)], [(3, 40)]  # the gradient of the model's own input is nobody's

    def main(chosen):
        def as_rank(rank, engine):
            model = seeded(nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths))))
            model, optimizer = distribute(model, sgd(model), schemes=chosen)
            with ps.no_sync(model) if accumulating else nullcontext():
                loss = model(examples(rank, 0, rows=3, inputs=24)[0].view(*leading, 24)).square().sum()
                with Products() as products:
                    loss.backward()
            if accumulating:
                model(examples(rank, 1, rows=3, inputs=24)[0]).sum().backward()
            optimizer.step()
            return sorted(products.shapes)

        return as_rank

    assert run(main(None)) == [sorted(weights + inputs)] * 2
    assert run(main(FACTORS)) == [inputs] * 2


# What else a loop does


def test_accumulation_under_no_sync_concatenates_rows():
    def loop(model, optimizer, rank):
        for step in range(3):
            with ps.no_sync(model):
                wide_loss(model, rank, 10 * step).backward()
                wide_loss(model, rank, 10 * step + 1).backward()
            wide_loss(model, rank, 10 * step + 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop)


def test_gradients_read_or_cleared_under_no_sync():
    def loop(model, optimizer, rank):
        seen = []
        with ps.no_sync(model):
            wide_loss(model, 0, 1).backward()
            seen.append(model[0].weight.grad.clone())
            seen.append(model[0].bias.grad.clone())
            wide_loss(model, 0, 2).backward()
            optimizer.zero_grad()
            assert model[4].weight.grad is None
            wide_loss(model, rank, 3).backward()
            model[2].weight.grad = None
        wide_loss(model, rank, 4).backward()
        optimizer.step()
        return [*seen, *values(model)]

    both_paths(loop)


def test_held_rows_are_copies():
    def loop(model, optimizer, rank):
        staging = torch.empty(2, 24, dtype=torch.float64)
        for step in range(3):
            staging.copy_(examples(rank, step, inputs=24)[0][:2])
            with ps.no_sync(model):
                model(staging).sum().backward()
        staging.copy_(examples(rank, 3, inputs=24)[0][:2])
        model(staging).sum().backward()
        optimizer.step()
        return values(model)

    both_paths(loop)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_several_backwards_and_rare_zero_grad(set_to_none):
    def loop(model, optimizer, rank):
        for step in range(6):
            wide_loss(model, rank, step).backward()
            if step % 3 == 1:
                wide_loss(model, rank, 100 + step).backward()
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none)
        return [*values(model), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]

    both_paths(loop)


def test_zero_grad_between_backward_and_step():
    def loop(model, optimizer, rank):
        wide_loss(model, rank, 0).backward()
        optimizer.zero_grad(set_to_none=False)
        assert not model[0].weight.grad.any()
        optimizer.step()
        wide_loss(model, rank, 1).backward()
        optimizer.zero_grad()
        optimizer.step()
        return values(model)

    both_paths(loop)


def test_clipping_and_editing_gradients():
    def loop(model, optimizer, rank):
        for step in range(3):
            wide_loss(model, rank, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            model[0].bias.grad.mul_(2)
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop)


def test_gradients_set_by_hand_are_averaged_with_what_follows():
    def loop(model, optimizer, rank):
        for param in model.parameters():
            param.grad = torch.full_like(param, 1.0 + rank)
        wide_loss(model, rank, 0).backward()
        optimizer.step()
        return values(model)

    both_paths(loop, whole=3)


def test_state_dict_and_a_forward_before_step():
    def loop(model, optimizer, rank):
        wide_loss(model, rank, 0).backward()
        model.eval()
        with torch.no_grad():
            model(examples(rank, 0, inputs=24)[0])
        model.train()
        optimizer.step()
        return [value.clone() for value in model.state_dict().values()]

    both_paths(loop)


def test_a_parameter_frozen_for_some_steps():
    def loop(model, optimizer, rank):
        for step in range(4):
            model[0].weight.requires_grad_(step != 1)
            model[4].bias.requires_grad_(step != 2)
            wide_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop, whole=1)


def test_join_with_uneven_numbers_of_batches():
    def loop(model, optimizer, rank):
        for epoch in range(2):
            with ps.join():
                for step in range(2 + rank):
                    wide_loss(model, rank, 10 * epoch + step).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return values(model)

    both_paths(loop, size=3)


def test_checkpointed_layers():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):

        def loop(model, optimizer, rank, reentrant=reentrant):
            for step in range(3):
                x, y = examples(rank, step, rows=3, inputs=24, outputs=20)
                hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
                F.mse_loss(model[2:](hidden), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            return values(model)

        both_paths(loop)


def test_a_failed_backward_leaves_nothing_behind():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        gather = distributed_of(model).schemes.gathers["0"]
        x, _ = examples(rank, 0, rows=2, inputs=24)
        hidden = model[0](x)
        with pytest.raises(RuntimeError, match="on purpose"), ps.no_sync(model):
            # The layer's rows are recorded; its weight has another use, which fails before autograd comes to its end.
            (hidden.sum() + Failing.apply(model[0].weight * 1).sum()).backward()
        wide_loss(model, rank, 1).backward()
        optimizer.step()
        assert gather.rows == rows_of(rank, 1)
        return values(model)

    assert same_everywhere(run(main))


# What cannot be sent as rows is sent as it is


def check_told(model, times, why):
    """Where the first layer sends rows: that it did not so often, and why, last; and that `explain` says so."""
    gather = distributed_of(model).schemes.gathers.get("0")
    if gather is None or not gather.engaged:
        return  # the dense path, which there is to compare with; `both_paths` counts on the other
    assert (gather.dense_sent, gather.dense_reason) == (times, why)
    plan = next(plan for plan in ps.explain(model).layers if plan.name == "0")
    assert plan.reason.endswith(f"as given; sent whole {times} time{'s' * (times != 1)} on this rank: {why}")


def test_weights_that_are_read_elsewhere_too():
    def loss_of(model, rank, step):
        penalty = model[0].weight.square().sum() if step % 2 else 0
        return wide_loss(model, rank, step) + 0.1 * penalty

    def after_loop(model, optimizer, rank):
        for step in range(4):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        check_told(model, 2, "the parameter was used in another way than by its module's forward")
        return values(model)

    both_paths(after_loop, whole=2)


def test_double_backward_and_gradients_asked_for():
    def loop(model, optimizer, rank):
        for step in range(2):
            x, y = examples(rank, step, rows=2, inputs=24, outputs=20)
            x.requires_grad_()
            loss = F.mse_loss(model(x), y)
            asked = torch.autograd.grad(loss, [model[0].weight, model[4].bias], retain_graph=True)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum() + 0 * asked[0].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        wide_loss(model, rank, 7).backward(create_graph=True)
        optimizer.step()
        check_told(model, 3, "backward was called with create_graph=True")
        return [*values(model), *asked]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.. with create_graph")

        def first_part(model, optimizer, rank):
            return loop(model, optimizer, rank)[:-2]  # what was asked for is the rank's own

        both_paths(first_part, whole=9)


def test_a_hook_registered_later_sees_the_local_gradient():
    def loop(model, optimizer, rank):
        seen = []
        wide_loss(model, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
        wide_loss(model, 0, 1).backward()
        handle.remove()
        optimizer.step()
        check_told(model, 1, "a hook on a parameter wants to see the local gradient")
        return [*seen, *values(model)]

    assert len(both_paths(loop, whole=1)) == 6


def test_autocast():
    def loop(model, optimizer, rank):
        for step in range(2):
            x, y = (value.float() for value in examples(rank, step, rows=3, inputs=24, outputs=20))
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    def make():
        return make_wide().float()

    def main(chosen):
        return lambda rank, engine: loop(*distribute(model := make(), sgd(model), schemes=chosen), rank)

    ours, theirs = run(main(FACTORS)), run(main(None))
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= 1e-6


def test_disagreeing_averages_are_an_error_and_not_a_wrong_number():
    def main(rank, engine):
        model = make_wide()
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        wide_loss(model, rank, 0).backward()
        optimizer.step()
        if rank == 0:
            optimizer.zero_grad()
        wide_loss(model, rank, 1).backward()
        with pytest.raises(ConfigError, match="zero_grad on all ranks alike"):
            ps.synchronize(optimizer)

    run(main)


# Memory


def test_memory_is_used_again_unless_somebody_keeps_the_gradient():
    def main(rank, engine):
        model = seeded(nn.Sequential(nn.Linear(24, 40)))
        model, optimizer = distribute(model, sgd(model), schemes=FACTORS)
        addresses, kept, copies = [], [], []
        for step in range(6):
            model(examples(rank, step, rows=2, inputs=24)[0]).sum().backward()
            optimizer.step()
            distributed_of(model).finish()
            grad = model[0].weight.grad
            addresses.append(grad.data_ptr())
            if step in (2, 4):
                kept.append(grad.numpy() if step == 2 else grad[1:3])
                copies.append(torch.as_tensor(kept[-1]).clone())
            del grad
            optimizer.zero_grad()
        assert all(torch.equal(torch.as_tensor(one), two) for one, two in zip(kept, copies, strict=True))
        assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
        assert addresses[3] == addresses[4] != addresses[5]

    run(main)

"""Programs in the manner of published training code: schedules, hooks, copies that train, edited state."""

import copy
from collections import defaultdict

import torch
import torch.nn.functional as F
from program_world import LR, SEED, STEPS, Distributed, adamw, by_average, mlp, plain_loop, program, sgd, square
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim import lr_scheduler, swa_utils

# Optimizers: schedules, hooks, state


def scheduled(make, before=False):
    """A schedule is made before or after the model is distributed; it steps once per step."""

    def run(world):
        model = mlp()
        optimizer = sgd(model)
        schedule = make(optimizer) if before else None
        model, optimizer = world.wrap(model, optimizer)
        schedule = schedule or make(optimizer)
        for step in range(STEPS):
            world.backward(square(model, world, step))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return model, [group["lr"] for group in optimizer.param_groups]

    return run


for _name, _make, _before in (
    ("cyclic_with_momentum", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=True), False),
    (
        "sequence_of_two",
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], milestones=[2]
        ),
        True,
    ),
    (
        "chained",
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.PolynomialLR(o, 8)]),
        True,
    ),
    ("warm_restarts", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2), True),
    ("swa_rate", lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3), False),
):
    _run = scheduled(_make, _before)
    _run.__name__ = f"schedule_{_name}"
    program()(_run)


def with_rate_in_a_tensor(make):
    def run(world):
        model = mlp()
        rate = torch.tensor(LR)
        model, optimizer = world.wrap(model, make(model.parameters(), rate))
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(STEPS):
            world.backward(square(model, world, step))
            optimizer.step()
            schedule.step()  # fills the very tensor that the step used
            optimizer.zero_grad()
        return model

    return run


for _name, _make in {
    "sgd": lambda p, rate: torch.optim.SGD(p, lr=rate, momentum=0.9),
    "adamw_fused": lambda p, rate: torch.optim.AdamW(p, lr=rate, eps=1e-3, fused=True),
}.items():
    _run = with_rate_in_a_tensor(_make)
    _run.__name__ = f"rate_in_a_tensor_{_name}"
    program()(_run)


@program()
def step_hooks_edit_gradients_and_weights(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))

    def centralised(optimizer, args, kwargs):
        for param in optimizer.param_groups[0]["params"]:
            if param.dim() > 1:
                param.grad.sub_(param.grad.mean(1, keepdim=True))

    def clamped(optimizer, args, kwargs):
        with torch.no_grad():
            for param in optimizer.param_groups[0]["params"]:
                param.clamp_(-0.3, 0.3)

    optimizer.register_step_pre_hook(centralised)
    optimizer.register_step_post_hook(clamped)
    return plain_loop(world, model, optimizer)


@program()
def state_read_and_edited_between_steps(world):
    model = mlp(width=200)  # large enough that a matrix is updated in pieces
    model, optimizer = world.wrap(model, sgd(model))
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        for state in optimizer.state.values():
            seen.append(state["momentum_buffer"].abs().sum().clone())
            if step % 2:
                state["momentum_buffer"].mul_(0.5)
        optimizer.zero_grad()
    return model, seen


@program()
def state_dropped_between_steps(world):
    """Of one parameter, of all, and all of it by another mapping."""
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    params, seen = list(model.parameters()), []
    for step in range(8):
        world.backward(square(model, world, step))
        optimizer.step()
        if step == 2:
            seen.append(optimizer.state.pop(params[0])["exp_avg"].sum().clone())
        if step == 4:
            optimizer.state.clear()
        if step == 6:
            optimizer.state = defaultdict(dict)
        optimizer.zero_grad()
    return model, seen, optimizer.state[params[2]]["exp_avg_sq"]


@program()
def optimizer_copied_while_training(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        seen += [state["momentum_buffer"].sum() for state in copy.deepcopy(optimizer).state.values()]
        seen += [state["momentum_buffer"].sum() for state in copy.copy(optimizer.state).values()]
        optimizer.zero_grad()
    return model, seen


class OfAllNorms(torch.optim.Optimizer):
    """Its step for one parameter depends on the others, and on how often it was called."""

    def __init__(self, params):
        super().__init__(params, {"lr": LR})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            param.sub_(param.grad / (1 + norm), alpha=LR / self.calls**0.5)


@program()
def own_optimizer_of_all_norms(world):
    model = mlp()
    model, optimizer = world.wrap(model, OfAllNorms(model.parameters()))
    return plain_loop(world, model, optimizer)


class SharpnessAware(torch.optim.Optimizer):
    """As its well known implementation: an optimizer around another, with two steps of its own."""

    def __init__(self, params, base, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for param in params:
            self.state[param]["old"] = param.detach().clone()
            param.add_(param.grad * 0.05 / norm)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.copy_(self.state[param]["old"])
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError  # its program calls both by itself


@by_average
def sharpness_aware_optimizer(world):
    model = mlp()
    model, optimizer = world.wrap(model, SharpnessAware(model.parameters(), torch.optim.SGD, lr=LR, momentum=0.9))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.first_step()
        world.backward(square(model, world, step))
        optimizer.second_step()
    return model


@program()
def lbfgs_with_line_search(world):
    model = mlp()
    model, optimizer = world.wrap(
        model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    )
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = square(model, world, step)
            world.backward(loss)
            return world.mean(loss.detach())

        optimizer.step(closure)
    return model


@program()
def muon_for_matrices(world):
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    model, optimizers = world.wrap(
        model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, eps=1e-4)]
    )
    for step in range(STEPS):
        world.backward(square(model, world, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


# Weights: averaged, swapped, tied, derived


@program()
def swa_then_batch_norm_again(world):
    model = mlp(norm=True)
    model, optimizer = world.wrap(model, sgd(model))
    averaged = swa_utils.AveragedModel(world.plain(model), use_buffers=False)
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        if step >= 3:
            averaged.update_parameters(world.plain(model))
    swa_utils.update_bn([world.same(step, 5, 8) for step in range(4)], averaged)
    averaged.eval()
    return model, averaged(world.same(9, 5, 8)).sum()


@program()
def swaps_in_the_average_to_evaluate(world):
    """As torch_ema does: store, copy to, restore; with `.data`, and by exchanging what `.data` is."""
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    params, seen = list(model.parameters()), []
    average = [param.detach().clone() for param in params]
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        for kept, param in zip(average, params, strict=True):
            kept.sub_(0.1 * (kept - param.detach()))
        stored = [param.data.clone() for param in params]
        for kept, param in zip(average, params, strict=True):
            param.data.copy_(kept)
        with torch.no_grad():
            seen.append(world.plain(model)(world.same(step, 5, 8)).sum())
        for kept, param in zip(stored, params, strict=True):
            param.data.copy_(kept)
    return model, average, seen


@program()
def all_weights_at_once_by_foreach(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    average = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        world.backward(square(model, world, step))
        params = list(model.parameters())
        torch._foreach_mul_([param.grad for param in params], 0.5)
        optimizer.step()
        torch._foreach_lerp_(average, [param.detach() for param in params], 0.3)
        with torch.no_grad():
            torch._foreach_mul_(params, 0.99)
        optimizer.zero_grad()
    return model, average


@program()
def low_rank_as_a_parametrization(world):
    class LowRank(nn.Module):
        def __init__(self, rows, columns):
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(2, columns) * 0.1), nn.Parameter(torch.zeros(rows, 2))

        def forward(self, weight):
            return weight + self.up @ self.down

    model = mlp()
    model.requires_grad_(False)
    for layer in (model[0], model[2]):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = world.wrap(model, torch.optim.AdamW(trained, lr=0.02, eps=1e-4))
    return plain_loop(world, model, optimizer)


@program()
def weight_norm_of_old(world):
    """Its forward hook computes the weight, which is no parameter."""
    model = mlp()
    torch.nn.utils.weight_norm(model[0])
    torch.nn.utils.weight_norm(model[2], dim=None)
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def pruned(world):
    model = mlp()
    for layer in (model[0], model[2]):
        prune.l1_unstructured(layer, "weight", amount=0.4)
    model, optimizer = world.wrap(model, sgd(model))
    plain_loop(world, model, optimizer)
    masked = world.plain(model)[0].weight  # of the last forward: older than the parameter it comes from
    return model, world.plain(model)[0](world.same(0, 5, 8)).sum(), masked.count_nonzero()


@by_average
def tied_after_distribute(world):
    torch.manual_seed(SEED)
    model = nn.ModuleDict({"embedding": nn.Embedding(20, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 20)})
    model, optimizer = world.wrap(model, sgd(model))
    model["head"].weight = model["embedding"].weight
    for step in range(STEPS):
        out = model["head"](torch.tanh(model["body"](model["embedding"](world.words(step, 7)))))
        world.backward(F.cross_entropy(out, world.words(step + 1, 7)))
        optimizer.step()
        optimizer.zero_grad()
    return [param for name, param in model.named_parameters() if name != "head.weight"]


@program()
def weights_read_through_what_was_made_once(world):
    """By tensors and arrays that have the parameters' memory, after each step and outside of all forwards."""
    model = mlp(width=200)
    model, optimizer = world.wrap(model, sgd(model))
    detached = [param.detach() for param in model.parameters()]
    arrays = [param.detach().numpy() for param in model.parameters()]
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        seen += [tensor.abs().sum() for tensor in detached]
        seen += [torch.as_tensor(array.sum()) for array in arrays]
        optimizer.zero_grad()
    return model, seen


@program()
def weights_of_one_memory(world):
    """Every parameter is a part of one vector, which the program reads."""
    model = mlp()
    params = list(model.parameters())
    flat = torch.cat([param.detach().flatten() for param in params])
    for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
        param.data = part.view_as(param)
    model, optimizer = world.wrap(model, sgd(model))
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(flat.norm())
    return model, seen


@by_average  # DDP's hooks run after these
def steps_within_backward(world):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = mlp()
    each = {param: torch.optim.SGD([param], lr=LR) for param in model.parameters()}
    optimizers = world.wrap(model, list(each.values()))[1]

    def steps(param):
        each[param].step()
        each[param].zero_grad()

    if isinstance(world, Distributed):
        for param in each:
            param.register_post_accumulate_grad_hook(steps)
    for step in range(STEPS):
        world.backward(square(model, world, step))
        if not isinstance(world, Distributed):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return model


# Copies and second passes


@by_average
def reptile(world):
    """A copy of the model trains by itself, on this rank's data; what it has moved is a gradient made by hand."""
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), lr=LR)
        for salt in range(3):
            learner(world.batch(step, salt=salt)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        for param, moved in zip(model.parameters(), learner.parameters(), strict=True):
            param.grad = world.mean(param.detach() - moved.detach())
        optimizer.step()
        optimizer.zero_grad()
    return model


@by_average
def critic_with_gradient_penalty(world):
    """Two optimizers, three steps of the critic for one of the generator."""
    generator, critic = mlp(), nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    generator, generate = world.wrap(generator, adamw(generator))
    critic, criticise = world.wrap(critic, adamw(critic))
    for step in range(STEPS):
        for salt in range(3):
            real = world.batch(step, 5, 4, salt=salt)
            fake = generator(world.batch(step, 5, 8, salt=salt)).detach()
            between = real.lerp(fake, 0.3).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            criticise.zero_grad()
            world.backward(critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean())
            criticise.step()
        generate.zero_grad()
        world.backward(-critic(generator(world.batch(step, 5, 8, salt=3))).mean())
        generate.step()
    return generator, critic


@by_average
def per_sample_gradients(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain = world.plain(model)

    def loss_of(params, x):
        return torch.func.functional_call(plain, params, (x.unsqueeze(0),)).square().mean()

    for step in range(STEPS):
        params = {name: param.detach() for name, param in plain.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, world.batch(step))
        for name, param in plain.named_parameters():
            sample = grads[name]
            scale = (0.1 / sample.flatten(1).norm(dim=1)).clamp(max=1.0).view(-1, *[1] * (sample.dim() - 1))
            param.grad = world.mean((sample * scale).mean(0))
        optimizer.step()
        optimizer.zero_grad()
    return model


@by_average
def actor_and_critic_with_a_common_body(world):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return F.log_softmax(self.actor(x), 1), self.critic(x)

    torch.manual_seed(SEED)
    model = Both()
    model, optimizer = world.wrap(model, adamw(model))
    target = copy.deepcopy(model).requires_grad_(False)
    for step in range(STEPS):
        with torch.no_grad():
            aim = 0.9 * target(world.batch(step, salt=1))[1] + 1
        chance, value = model(world.batch(step))
        world.backward((aim - value).square().mean() - (chance[:, 0] * (aim - value).detach().squeeze()).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step % 3 == 2:
            target.load_state_dict(model.state_dict())
    return model, target


@program()
def autocast_to_half(world):
    model = mlp().float()
    model, optimizer = world.wrap(model, sgd(model))

    def loss(model, world, step):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(world.batch(step).float())
        return out.double().square().mean()

    return plain_loop(world, model, optimizer, loss)


@program()
def batch_norm_by_turns(world):
    model = mlp(norm=True)
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        model.train(step % 2 == 0)
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model

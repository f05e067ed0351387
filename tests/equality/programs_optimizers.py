"""Programs of many optimizers, groups, schedules and wrappers."""

import torch
from program_world import LR, STEPS, mlp, plain_loop, program, sgd, square


def trained_by(make):
    def run(world):
        model = mlp()
        model, optimizer = world.wrap(model, make(model.parameters()))
        return plain_loop(world, model, optimizer)

    return run


for _name, _make in {
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, amsgrad=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-4),
    "adadelta": lambda p: torch.optim.Adadelta(p, eps=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-4),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "sgd_nesterov_maximize": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}.items():
    _run = trained_by(_make)
    _run.__name__ = f"optimizer_{_name}"
    program()(_run)


@program()
def groups_of_their_own_rates(world):
    model = mlp()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], lr=0.01, eps=1e-4
    )
    model, optimizer = world.wrap(model, optimizer)
    return plain_loop(world, model, optimizer)


@program()
def one_cycle_schedule(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


@program()
def schedule_on_plateau(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for step in range(STEPS):
        loss = square(model, world, step)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(world.mean(loss.detach()))
    return model


@program()
def rate_set_by_hand(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 100.0  # the update is that of the rate at step()
        optimizer.zero_grad()
    return model


@program()
def two_optimizers_of_one_model(world):
    model = mlp()
    body, head = (
        torch.optim.SGD(model[0].parameters(), lr=LR),
        torch.optim.AdamW(model[2:].parameters(), lr=0.01, eps=1e-4),
    )
    model, optimizers = world.wrap(model, [body, head])
    for step in range(STEPS):
        world.backward(square(model, world, step))
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model


@program()
def lookahead_by_hand(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    slow = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                for param, kept in zip(model.parameters(), slow, strict=True):
                    kept.lerp_(param, 0.5)
                    param.copy_(kept)
    return model


class Lookahead:
    """A wrapper in the manner of those that people use: not an Optimizer, sharing the inner one's groups."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.calls = 0

    def step(self):
        self.optimizer.step()
        self.calls += 1
        if self.calls % 2 == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            with torch.no_grad():
                for param, kept in zip(params, self.slow, strict=True):
                    kept.lerp_(param, 0.5)
                    param.copy_(kept)

    def zero_grad(self):
        self.optimizer.zero_grad()


@program()
def wrapper_made_after(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, Lookahead(optimizer))

"""Programs of unusual losses and loops, and such as see, edit or make gradients."""

import math

import torch
import torch.nn.functional as F
from program_world import SEED, STEPS, adamw, by_average, mlp, plain_loop, program, sgd, square
from torch import nn

# Losses


@program()
def cross_entropy_with_weights(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))

    def loss(model, world, step):
        targets = world.words(step, 5) % 4
        return F.cross_entropy(model(world.batch(step)), targets, weight=torch.tensor([1.0, 2.0, 0.5, 1.5]))

    return plain_loop(world, model, optimizer, loss)


@program()
def sum_of_two_losses(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: square(m, w, s) + m(w.batch(s, salt=1)).abs().mean())


@by_average  # DDP allows one forward per backward where parameters are reused
def siamese(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: (m(w.batch(s)) - m(w.batch(s, salt=1))).square().mean())


@program(find_unused_parameters=True)
def auxiliary_head_in_some_steps(world):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.auxiliary = mlp(), nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x, both):
            x = self.body(x)
            return self.head(x).square().mean() + (self.auxiliary(x).square().mean() if both else 0.0)

    model = Two()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: m(w.batch(s), s % 2 == 0))


@by_average
def gradient_penalty(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))

    def loss(model, world, step):
        x = world.batch(step).requires_grad_()
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out.square() * 0.01 + slope.square().mean()

    return plain_loop(world, model, optimizer, loss)


@program()
def contrastive(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))

    def loss(model, world, step):
        x = F.normalize(model(world.batch(step)), dim=1)
        return F.cross_entropy(x @ x.T / 0.5, torch.arange(5))

    return plain_loop(world, model, optimizer, loss)


@by_average
def two_losses_in_one_backward_call(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward_of_all([square(model, world, step), square(model, world, step, 1)])
        optimizer.step()
        optimizer.zero_grad()
    return model


@by_average
def same_graph_twice(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        loss = square(model, world, step)
        world.backward(loss, retain_graph=True)
        world.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


# Loops


@program()
def accumulates_under_no_sync(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        with world.no_sync(model):
            world.backward(square(model, world, step) / 3)
            world.backward(square(model, world, step, 1) / 3)
        world.backward(square(model, world, step, 2) / 3)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def accumulates_without_no_sync(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    for step in range(STEPS):
        for salt in range(3):
            world.backward(square(model, world, step, salt))
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def two_steps_per_backward(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def zeroes_before_backward(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        world.backward(square(model, world, step))
        optimizer.step()
    return model


@program()
def zeroes_without_none(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


@program()
def zeroes_by_model(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        model.zero_grad()
        world.backward(square(model, world, step))
        optimizer.step()
    return model


@program()
def never_zeroes(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
    return model


@program()
def drops_gradients_by_hand(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        for param in model.parameters():
            param.grad = None
    return model


@program()
def skips_some_steps(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        if step % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def evaluates_between_steps(world):
    model = mlp(norm=True)
    model, optimizer = world.wrap(model, sgd(model))
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            seen.append(world.plain(model)[0](world.same(step, 5, 8)).sum())  # before the norm, whose buffers are local
        model.train()
    return model, seen


@program()
def lbfgs_with_closure(world):
    model = mlp()
    model, optimizer = world.wrap(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = square(model, world, step)
            world.backward(loss)
            return world.mean(loss.detach())  # or the ranks would stop after different numbers of calls

        optimizer.step(closure)
    return model


@program()
def sgd_with_closure(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = square(model, world, step)
            world.backward(loss)
            return loss

        optimizer.step(closure)
    return model


@by_average  # DDP averages a backward's gradients once, and knows of no second forward
def sharpness_aware(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    params = list(model.parameters())
    for step in range(STEPS):
        world.backward(square(model, world, step))
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in params))
        offsets = [0.05 * p.grad / norm for p in params]
        with torch.no_grad():
            for param, offset in zip(params, offsets, strict=True):
                param.add_(offset)
        optimizer.zero_grad()
        world.backward(square(model, world, step))
        with torch.no_grad():
            for param, offset in zip(params, offsets, strict=True):
                param.sub_(offset)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def truncated_backpropagation(world):
    torch.manual_seed(SEED)
    model = nn.LSTM(8, 6)
    model, optimizer = world.wrap(model, sgd(model))
    state = None
    for step in range(STEPS):
        out, state = model(world.batch(step, 4, 3, 8), state)
        world.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        state = tuple(part.detach() for part in state)
    return model


# Gradients seen, edited, made by hand


@program()
def clips_by_norm(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    norms = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


@program()
def clips_by_value(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        nn.utils.clip_grad_value_(model.parameters(), 0.002)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def scales_the_loss(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        loss = square(model, world, step)
        world.backward(scaler.scale(loss * (math.inf if step == 2 else 1.0)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, [torch.tensor(scaler.get_scale())]


@program()
def logs_gradient_norms(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    norms = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        norms += [param.grad.norm().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


@program()
def adds_noise_to_gradients(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        for param in model.parameters():
            param.grad.add_(world.same(step, *param.shape), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def replaces_gradients(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        for param in model.parameters():
            param.grad = param.grad.sign() * 0.01
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def hand_made_gradients(world):
    torch.manual_seed(SEED)
    model = nn.Linear(1, 1)
    model, optimizer = world.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for i in range(1, STEPS):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(i))
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def functional_gradients(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    for step in range(STEPS):
        params = list(model.parameters())
        loss = world.plain(model)(world.same(step, 5, 8)).square().mean()
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        optimizer.step()
    return model


@program()
def gradients_averaged_by_the_program(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        params = list(model.parameters())
        loss = world.plain(model)(world.batch(step)).square().mean()
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = world.mean(grad)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def evolution_strategy(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain = world.plain(model)
    with torch.no_grad():
        for step in range(STEPS):
            for number, param in enumerate(model.parameters()):
                noise = world.same(100 * step + number, *param.shape)
                param.add_(noise, alpha=0.1)
                up = plain(world.same(step, 5, 8)).square().mean()
                param.sub_(noise, alpha=0.2)
                down = plain(world.same(step, 5, 8)).square().mean()
                param.add_(noise, alpha=0.1)
                param.grad = noise * (up - down) / 0.2
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model


@program()
def hand_made_beside_backward(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        if step % 2:
            for param in model.parameters():
                param.grad = world.same(step, *param.shape) * 0.1
        else:
            world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
    return model


@by_average  # DDP wants every parameter's hook
def backward_of_some_inputs(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        chosen = list(model.parameters())[(step % 3) * 2 :][:2]
        world.backward(square(model, world, step), inputs=chosen)
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def hooks_on_parameters(world):
    model = mlp()
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)

"""Programs whose models are unusual, or change, or are read, saved and copied while they are trained."""

import copy
import io

import torch
import torch.nn.functional as F
from program_world import LR, SEED, STEPS, adamw, by_average, mlp, plain_loop, program, refused_at_the_call, sgd, square
from torch import nn
from torch.utils.checkpoint import checkpoint

# Frozen, adapted, grown


@by_average  # DDP looks at requires_grad when it is made
def thaws_layer_by_layer(world):
    model = mlp()
    for param in model[:2].parameters():
        param.requires_grad_(False)
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        if step == 2:
            for param in model.parameters():
                param.requires_grad_(True)
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
    return model


@by_average
def freezes_layer_by_layer(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        if step == 3:
            for param in model[0].parameters():
                param.requires_grad_(False)
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
    return model


@program()
def low_rank_adapters(world):
    class Adapted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.down, self.up = (
                nn.Linear(inner.in_features, 2, bias=False),
                nn.Linear(2, inner.out_features, bias=False),
            )

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    model = mlp()
    for param in model.parameters():
        param.requires_grad_(False)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    trained = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = world.wrap(model, torch.optim.AdamW(trained, lr=0.01, eps=1e-4))
    return plain_loop(world, model, optimizer)


@by_average
def group_added_while_training(world):
    model = mlp()
    model, optimizer = world.wrap(model, torch.optim.SGD(model[2:].parameters(), lr=LR))
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(world.plain(model)[0].parameters()), "lr": 0.01})
        world.backward(square(model, world, step))
        optimizer.step()
        for param in model.parameters():
            param.grad = None
    return model


@by_average
def another_optimizer_half_way(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    model = plain_loop(world, model, optimizer, steps=3)
    return plain_loop(world, model, adamw(model), steps=3)


@refused_at_the_call("is distributed already")
def parameter_added_later(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain_loop(world, model, optimizer, steps=2)
    model.scale = nn.Parameter(torch.ones(4))
    optimizer.add_param_group({"params": [model.scale]})
    return plain_loop(world, model, optimizer, lambda m, w, s: (m(w.batch(s)) * m.scale).square().mean())


@refused_at_the_call("is distributed already")
def module_replaced_later(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain_loop(world, model, optimizer, steps=2)
    model[4] = nn.Linear(16, 3)
    return plain_loop(world, model, sgd(model))


@refused_at_the_call("is distributed already")
def weight_norm_applied_later(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain_loop(world, model, optimizer, steps=2)
    nn.utils.parametrizations.weight_norm(model[0])
    return plain_loop(world, model, sgd(model))


# Shared and derived weights


@program()
def tied_weights(world):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body = nn.Embedding(20, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, words):
            return F.linear(self.body(self.embedding(words)), self.embedding.weight)

    torch.manual_seed(SEED)
    model = Tied()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: F.cross_entropy(m(w.words(s, 7)), w.words(s, 7)))


@program()
def one_layer_called_in_a_loop(world):
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.again, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = torch.tanh(self.again(x))
            return self.last(x)

    torch.manual_seed(SEED)
    model = Again()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def weight_norm(world):
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def spectral_norm(world):
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[2])
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(0)


@program()
def parameters_of_a_list_in_a_function(world):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.scales = nn.ParameterList([nn.Parameter(torch.full((4,), 0.5 + i)) for i in range(3)])

        def forward(self, x):
            x = self.body(x)
            for scale in self.scales:
                x = Scaled.apply(x, scale)
            return x

    model = Scales()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@by_average  # DDP has hooks on forward only
def functional_call_with_an_inner_step(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    plain = world.plain(model)

    def loss(model, world, step):
        names, params = zip(*model.named_parameters(), strict=True)
        inner = model(world.batch(step)).square().mean()
        grads = torch.autograd.grad(inner, params, create_graph=True)
        moved = {name: p - 0.1 * g for name, p, g in zip(names, params, grads, strict=True)}
        return torch.func.functional_call(model, moved, (world.batch(step, salt=1),)).square().mean()

    return plain_loop(world, plain, optimizer, loss)


# Layers of all sorts


@program()
def batch_norm_with_local_statistics(world):
    model = mlp(norm=True)
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def batch_norm_frozen(world):
    model = mlp(norm=True)
    model, optimizer = world.wrap(model, sgd(model))
    model.eval()
    return plain_loop(world, model, optimizer)


@program()
def dropout(world):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = world.wrap(model, sgd(model))

    def loss(model, world, step):
        torch.manual_seed(100 * step + world.rank)
        return model(world.batch(step)).square().mean()

    return plain_loop(world, model, optimizer, loss)


@program()
def convolutions_channels_last(world):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 2, 3))
    model = model.to(memory_format=torch.channels_last)
    model, optimizer = world.wrap(model, adamw(model))

    def loss(model, world, step):
        x = world.batch(step, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        return model(x).square().mean()

    return plain_loop(world, model, optimizer, loss)


@program()
def attention(world):
    torch.manual_seed(SEED)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: m(w.batch(s, 2, 5, 8)).square().mean())


@by_average  # gloo's DDP has no sparse tensors here
def sparse_embedding(world):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 4))
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: m(w.words(s, 5, 3)).square().mean())


@program()
def large_layer_of_many_slices(world):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 500), nn.Tanh(), nn.Linear(500, 500), nn.Tanh(), nn.Linear(500, 4))
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@by_average
def complex_parameters(world):
    torch.manual_seed(SEED)

    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex128))
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))

    model = Spectral()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def types_mixed(world):
    torch.manual_seed(SEED)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4).float()

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)).float()).double()

    model = Mixed()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program(find_unused_parameters=True)
def module_list_by_turns(world):
    """Which layers run depends on the step, alike on all ranks."""

    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x, step):
            return torch.tanh(self.layers[step % 3](x))

    torch.manual_seed(SEED)
    model = Turns()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer, lambda m, w, s: m(w.batch(s), s).square().mean())


@program()
def checkpointed(world):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rest, self.first = mlp(), nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.rest, self.first(x), use_reentrant=False)

    model = Checkpointed()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@program()
def checkpointed_reentrant(world):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rest, self.first = mlp(), nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(self.rest, self.first(x), use_reentrant=True)

    model = Checkpointed()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


@by_average  # DDP would be told of a scripted module by its own means
def scripted(world):
    model = torch.jit.script(mlp())
    for _ in range(3):  # TorchScript computes a type's first calls by another graph: on some processors with other bits
        square(model, world, 0).backward()
    model.zero_grad()
    model, optimizer = world.wrap(model, sgd(model))
    return plain_loop(world, model, optimizer)


# Several models


def adversaries(world, generator, critic, generate, criticise):
    for step in range(STEPS):
        fake = generator(world.batch(step, 5, 8))
        world.backward(critic(fake.detach()).square().mean() - critic(world.batch(step, 5, 4, salt=1)).mean())
        criticise.step()
        criticise.zero_grad()
        for param in critic.parameters():
            param.requires_grad_(False)
        world.backward(-critic(generator(world.batch(step, 5, 8, salt=2))).mean())
        for param in critic.parameters():
            param.requires_grad_(True)
        generate.step()
        generate.zero_grad()
    return generator, critic


@by_average  # DDP of the critic runs twice forward
def generator_and_critic(world):
    generator = mlp()
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    generator, generate = world.wrap(generator, sgd(generator))
    critic, criticise = world.wrap(critic, adamw(critic))
    return adversaries(world, generator, critic, generate, criticise)


@by_average
def teacher_follows_student(world):
    student = mlp()
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, optimizer = world.wrap(student, sgd(student))
    for step in range(STEPS):
        world.backward((student(world.batch(step)) - teacher(world.batch(step, salt=1))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, param in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.lerp_(param, 0.1)
    return student, teacher


@by_average
def two_models_one_optimizer_each_one_loss(world):
    first, second = mlp(), nn.Linear(4, 2)
    first, one = world.wrap(first, sgd(first))
    second, two = world.wrap(second, adamw(second))
    for step in range(STEPS):
        world.backward(second(first(world.batch(step))).square().mean())
        two.step()
        one.step()
        one.zero_grad()
        two.zero_grad()
    return first, second


# Read, averaged, saved, copied


@program()
def averaged_weights(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    averaged = torch.optim.swa_utils.AveragedModel(world.plain(model), multi_avg_fn=None)
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(world.plain(model))
    return model, averaged


@program()
def exponential_average_by_hand(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    average = [param.detach().clone() for param in model.parameters()]
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        for kept, param in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(param.data, alpha=0.1)
        optimizer.zero_grad()
    return model, average


@program()
def copies_while_training(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    copies = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        copies.append(copy.deepcopy(world.plain(model))(world.same(step, 5, 8)).sum().detach())
    return model, copies


@program()
def saves_and_loads(world):
    model = mlp()
    model, optimizer = world.wrap(model, adamw(model))
    plain_loop(world, model, optimizer, steps=2)
    file = io.BytesIO()
    torch.save({"model": world.plain(model).state_dict(), "optimizer": optimizer.state_dict()}, file)
    plain_loop(world, model, optimizer, lambda m, w, s: square(m, w, s, 1), steps=2)
    file.seek(0)
    saved = torch.load(file)
    world.plain(model).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return plain_loop(world, model, optimizer, lambda m, w, s: square(m, w, s, 2), steps=2)


@program()
def starts_a_layer_anew(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                layer = world.plain(model)[2]
                layer.weight.copy_(world.same(step, *layer.weight.shape) * 0.1)
                layer.bias.zero_()
    return model


@program()
def decays_weights_by_hand(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
    return model


@program()
def penalty_of_all_weights(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))

    def loss(model, world, step):
        return square(model, world, step) + 0.01 * sum(param.square().sum() for param in model.parameters())

    return plain_loop(world, model, optimizer, loss)


@program()
def vector_of_parameters(world):
    model = mlp()
    model, optimizer = world.wrap(model, sgd(model))
    seen = []
    for step in range(STEPS):
        world.backward(square(model, world, step))
        optimizer.step()
        optimizer.zero_grad()
        flat = nn.utils.parameters_to_vector(model.parameters()).detach()
        seen.append(flat.norm())
        nn.utils.vector_to_parameters(flat * 0.99, model.parameters())
    return model, seen

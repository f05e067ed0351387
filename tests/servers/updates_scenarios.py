"""What a program may do with ``update="servers"``, each a function that every worker runs; they share one job."""

import math
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

import penstock as ps
from penstock import job
from penstock.errors import ConfigError
from penstock.torch.access import distributed_for

STEPS = 4
LONGER_THAN_A_READ_S = 0.3  # of what does not wait


def network(dtype=torch.float64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 7)).to(dtype)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def started(update, make=adamw, dtype=torch.float64, **options):
    model = network(dtype)
    return ps.distribute(model, make(model), update=update, **options)


def inputs(seed=0, rank=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * seed + (ps.rank() if rank is None else rank))
    while True:
        yield torch.randn(9, 40, generator=generator, dtype=dtype)


def values(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def close(one, other, most=1e-12):
    difference = float((one - other).norm() / other.norm())
    assert difference < most, difference


def both(train, *, schemes=None, update="servers", **options):
    """The parameters by both ways of updating; at the owners with these schemes."""
    by_workers = train(*started("workers", **options))
    close(train(*started(update, schemes=schemes, **options)), by_workers)


def steps(model, optimizer, count=STEPS, seed=0):
    for x, _ in zip(inputs(seed), range(count), strict=False):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)


def a_run_changes_between_workers_and_servers():
    for make in (adamw, rmsprop, lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)):
        expected = started("workers", make)
        for seed in range(3):
            steps(*expected, seed=seed)
        way = [started(update, make) for update in ("workers", "servers", "workers")]
        for seed, (model, optimizer) in enumerate(way):
            if seed:
                before, optimizer_before = way[seed - 1]
                saved = optimizer_before.state_dict()
                assert not getattr(optimizer_before, "state", {}) or seed == 1, "nothing stays on the worker"
                model.load_state_dict(before.state_dict())
                optimizer.load_state_dict(saved)
            steps(model, optimizer, seed=seed)
        close(values(way[-1][0]), values(expected[0]))
        kept, others = (optimizer.state_dict()["state"] for optimizer in (way[1][1], way[0][1]))
        assert {name: {*entry} for name, entry in kept.items()} == {name: {*entry} for name, entry in others.items()}


def a_pickled_optimizer_has_its_state():
    model, optimizer = started("servers")
    steps(model, optimizer)
    copy = pickle.loads(pickle.dumps(optimizer))
    states = optimizer.state_dict()["state"]
    assert len(copy.state) == len(states) == 6
    for place, (_, state) in enumerate(copy.state.items()):
        assert torch.equal(state["exp_avg"], states[place]["exp_avg"])


def clipped(model, optimizer):
    norms = []
    for x, _ in zip(inputs(), range(STEPS), strict=False):
        model(x).square().mean().backward()
        norms.append(float(ps.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    assert max(norms) > 0.1
    return torch.cat([values(model), torch.tensor(norms, dtype=torch.float64)])


def gradients_are_clipped_by_their_global_norm():
    both(clipped)
    both(clipped, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model, _ = started("servers")
    model(next(inputs())).sum().backward()
    with pytest.raises(ConfigError, match=r"0\.bias is not among those given"):
        ps.clip_grad_norm_([model[0].weight], 1.0)
    with pytest.raises(ConfigError, match="norm_type 2, not inf"):
        ps.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)


def scaled(model, optimizer):
    scaler = ps.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number, (x, _) in enumerate(zip(inputs(), range(STEPS), strict=False)):
        loss = model(x).square().mean()
        if number == 1 and ps.rank() == 0:
            loss = loss * math.inf  # on one rank
        scaler.scale(loss).backward()
        if number == 2:
            scaler.unscale_(optimizer)
            ps.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1024.0
    return values(model)


def a_scaler_leaves_steps_out():
    both(scaled)
    both(scaled, make=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def some_left_out(model, optimizer):
    for number, (x, _) in enumerate(zip(inputs(), range(2 * STEPS), strict=False)):
        model(x).square().mean().backward()
        if number % 3 == 1:
            optimizer.zero_grad(set_to_none=number == 1)
            if number == 1:
                optimizer.step()  # of nothing
            continue
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def steps_may_be_left_out():
    both(some_left_out)


def accumulated(model, optimizer):
    for x, y, _ in zip(inputs(1), inputs(2), range(STEPS), strict=False):
        with ps.no_sync(model):
            model(x).square().mean().backward()
            assert model[0].weight.grad is not None, "this rank's"
        model(y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def gradients_are_accumulated():
    both(accumulated)


def partly_used(model, optimizer):
    model[2].bias.requires_grad_(False)
    for number, (x, _) in enumerate(zip(inputs(), range(STEPS), strict=False)):
        hidden = model[1](model[0](x))
        if number % 2 and ps.rank() == 0:
            hidden.square().mean().backward()  # this rank does not come to the other layers
        elif number == 2:
            hidden.square().mean().backward()  # nor does any
        else:
            model[4](torch.tanh(model[2](hidden))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def what_has_no_gradient_is_not_updated():
    both(partly_used)
    both(partly_used, make=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))


def rounded_answers():
    """Owners keep what they have in fp32; all workers get it in 16 bits."""
    for scheme in ("bf16", "fp16"):
        model, optimizer = started("servers", dtype=torch.float32, schemes={"*": scheme})
        generator = torch.Generator().manual_seed(ps.rank())
        for _ in range(STEPS):
            model(torch.randn(9, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = values(model)
        half = torch.bfloat16 if scheme == "bf16" else torch.float16
        assert torch.equal(found, found.to(half).float())
        every = torch.zeros(ps.world_size(), len(found))
        ps.all_gather(found, list(every))
        assert all(torch.equal(one, found) for one in every)


def changed(model, optimizer):
    for number, (x, _) in enumerate(zip(inputs(), range(STEPS), strict=False)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            with torch.no_grad():
                model[2].weight.clamp_(-0.05, 0.05)
        if number == 2:
            model[0].weight.data = 0.5 * model[0].weight.data
    return values(model)


def changed_through_data(model, optimizer):
    """After a step whose updates are outstanding, or applied; by what is there no more, or kept."""
    kept = []
    for number, (x, _) in enumerate(zip(inputs(), range(6), strict=False)):
        model(x).square().mean().backward()
        float(model[2].bias.data.sum())  # a look is no change
        optimizer.step()
        optimizer.zero_grad()
        if number in (1, 2):
            model[2].weight.data.clamp_(-0.05, 0.05)
        if number == 3:
            model.eval()  # which applies what is outstanding
            torch._foreach_mul_([model[0].weight.data, model[4].bias.data], 0.5)
            model[0].bias.data = model[0].bias.data.clone()
            kept = [param.data for param in (model[0].bias, model[4].weight)]
        for alias in kept:
            ps.synchronize(optimizer)
            alias.mul_(0.9)
    return values(model)


def what_the_program_writes_reaches_the_owners():
    both(changed)
    both(changed_through_data)


def what_else_holds_a_parameter_has_the_update_after_step():
    for update in ("servers", "servers-in-backward"):
        model, optimizer = started(update)
        held = model[2].weight.detach()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="penstock: something else holds the memory of 2.weight")
            steps(model, optimizer, 1)
        for x, _ in zip(inputs(1), range(2), strict=False):
            model(x).square().mean().backward()
            optimizer.step()
            found = held.clone()
            assert torch.equal(found, model[2].weight)


def what_another_thread_reads_is_in_place():
    for update in ("servers", "servers-in-backward"):
        model, optimizer = started(update)
        steps(model, optimizer, 1)
        (updates,) = distributed_for(model).updates
        put, seen = updates._put, []
        reader = threading.Thread(target=lambda model=model, seen=seen: seen.append(model[0].weight.detach().clone()))

        def put_late(slots, updated, put=put, reader=reader):
            reader.start()
            reader.join(LONGER_THAN_A_READ_S)
            put(slots, updated)

        model(next(inputs())).square().mean().backward()
        optimizer.step()
        updates._put = put_late
        model[0].weight.detach()
        updates._put = put
        reader.join()
        assert torch.equal(seen[0], model[0].weight)


def owners_that_are_workers_read_values_in_the_model():
    here = not job.current().options.servers
    for schemes, read in (({}, here), ({"*": "bf16"}, False)):
        model, _ = started("servers", dtype=torch.float32, schemes=schemes)
        assert len(distributed_for(model).updates[0]._lent) == (6 if read else 0)


def gradients_that_are_not_finite_are_applied():
    model, optimizer = started("servers")
    model(next(inputs())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert bool(values(model).isfinite().all())
    (model(next(inputs())).square().mean() * (math.nan if ps.rank() == 0 else 1.0)).backward()
    optimizer.step()
    assert bool(values(model).isnan().all())


def groups_and_rates_may_change():
    def train(model, optimizer):
        steps(model, optimizer, 2)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3
            group["betas"] = (0.8, 0.99)
        return steps(model, optimizer, 2, seed=1)

    both(train)


def a_parameter_may_move_to_another_group():
    def in_groups(model):
        slow, fast = ([layer.weight for layer in (model[0], model[2], model[4])], [model[0].bias, model[2].bias])
        return torch.optim.AdamW([{"params": slow, "lr": 1e-3}, {"params": [*fast, model[4].bias], "lr": 0.1}])

    def train(model, optimizer):
        steps(model, optimizer, 2)
        slow, fast = optimizer.param_groups
        fast["params"].append(slow["params"].pop())
        slow["params"].append(fast["params"].pop(0))
        return steps(model, optimizer, 2, seed=1)

    expected = train(*started("workers", in_groups))
    for update in ("servers", "servers-in-backward"):
        close(train(*started(update, in_groups)), expected)


class Normed(nn.Module):
    """With statistics of its batches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 7)
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def uneven_alone(counts, *, clip, buffers):
    """What ranks with these numbers of batches come to, computed by one."""
    model = Normed() if buffers else network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    furthest = counts.index(max(counts))

    def step(batches, says):
        """One step of the ranks that have a batch, and the buffers of one of them."""
        optimizer.zero_grad()
        kept = {}
        for rank, x in batches.items():
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            (model(x).square().mean() / len(batches)).backward()
            kept[rank] = {name: buffer.clone() for name, buffer in model.named_buffers()}
            model.load_state_dict(before, strict=False)
        model.load_state_dict(kept[says], strict=False)

    for turn in range(2):
        streams = [inputs(turn, rank) for rank in range(len(counts))]
        for number in range(max(counts)):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
            step({rank: next(streams[rank]) for rank, count in enumerate(counts) if number < count}, furthest)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 1e-2
    step({rank: next(inputs(3, rank)) for rank in range(len(counts))}, 0)
    optimizer.step()
    kept = optimizer.state_dict()["state"]
    states = [kept[place]["exp_avg_sq"].flatten() for place in sorted(kept)]
    return torch.cat([*(one.double().flatten() for one in model.state_dict().values()), *states])


def uneven(update, counts, *, clip, buffers, schemes=None):
    """What ranks with these numbers of batches come to."""
    model = Normed() if buffers else network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ps.distribute(model, optimizer, update=update, broadcast_buffers=buffers, schemes=schemes)
    opened = []
    for turn in range(2):  # and all begin anew
        with ps.join():
            for number, x in zip(range(counts[ps.rank()]), inputs(turn), strict=False):
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)  # of those who train
                model(x).square().mean().backward()
                if clip:
                    ps.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 1e-2
        opened.append(job.current().engine.books)
    assert opened[0] == opened[1]
    model(next(inputs(3))).square().mean().backward()
    optimizer.step()
    found = torch.cat([one.double().flatten() for one in model.state_dict().values()])
    every = torch.zeros(ps.world_size(), len(found), dtype=torch.float64)
    ps.all_gather(found, list(every))
    assert all(torch.equal(one, found) for one in every)
    kept = optimizer.state_dict()["state"]
    return torch.cat([found, *(kept[place]["exp_avg_sq"].flatten() for place in sorted(kept))])


def ranks_have_different_numbers_of_batches():
    ranks = ps.world_size()
    up, down = list(range(ranks)), list(range(ranks, 0, -1))  # rank 0 has none, or most
    for update, counts, clip, buffers in (
        ("servers", up, True, False),
        ("servers", down, False, True),
        ("servers-in-backward", up, False, True),
        ("servers-in-backward", down, False, False),
    ):
        expected = uneven_alone(counts, clip=clip, buffers=buffers)
        close(uneven(update, counts, clip=clip, buffers=buffers), expected, most=1e-10)


def a_last_step_may_be_left_out_where_ranks_have_different_numbers_of_batches():
    model, optimizer = started("servers", make=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2))
    first, scaler = values(model), ps.GradScaler("cpu", init_scale=1024.0)
    with ps.join():
        for number, x in zip(range(1 if ps.rank() else 3), inputs(0), strict=False):
            loss = model(x).square().mean()
            scaler.scale(loss if number else loss * math.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if number == 0:
                assert torch.equal(values(model), first)
    found = values(model)
    assert found.isfinite().all() and not torch.equal(found, first)
    every = torch.zeros(ps.world_size(), len(found), dtype=torch.float64)
    ps.all_gather(found, list(every))
    assert all(torch.equal(one, found) for one in every)


def what_needs_all_ranks_is_refused_where_some_have_no_batch_left():
    model, optimizer = started("servers")
    steps(model, optimizer, 1)
    state = optimizer.state_dict()
    with pytest.raises(ConfigError, match=r"a state of the optimizer is loaded within ps\.join"), ps.join():
        optimizer.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"0\.weight was written to within ps\.join"), ps.join():
        with torch.no_grad():
            model[0].weight.clamp_(-0.05, 0.05)
        steps(model, optimizer, 1)
    optimizer.step()
    model, optimizer = started("servers")
    with (
        pytest.raises(ConfigError, match=r"penstock\.join: the last backward of this rank is followed by no"),
        ps.join(),
    ):
        model(next(inputs())).square().mean().backward()
    optimizer.step()
    model, optimizer = started("servers")
    steps(model, optimizer, 1)
    with (
        pytest.raises(ConfigError, match=r"penstock\.join: the last backward of this rank is followed by no"),
        ps.join(),
        ps.no_sync(model),
    ):
        model(next(inputs())).square().mean().backward()
    optimizer.step()
    other, other_optimizer = started("workers")
    other(next(inputs())).square().mean().backward()
    with pytest.raises(ConfigError, match=r"model\d+ is updated by the workers, and another model"), ps.join():
        other_optimizer.step()
    other_optimizer.step()


def mistakes_are_refused_at_the_call():
    def refused(said, make, prepare=lambda model: model, **options):
        model = prepare(network(torch.float32))
        with pytest.raises(ConfigError, match=said):
            ps.distribute(model, make(model), update="servers", **options)

    def with_lbfgs(model):
        return torch.optim.LBFGS(model.parameters())

    def overlapping(model):
        memory = torch.randn(5000)
        for layer, numbers in ((model[0], memory[:2400]), (model[2], memory[2000:])):
            layer.weight.data = numbers.view_as(layer.weight)
        return model

    refused("LBFGS cannot update at the servers: only Adagrad, Adam", with_lbfgs)
    refused("takes one optimizer, and was given 0", lambda _: None)
    refused("takes one optimizer, and was given 2", lambda model: [adamw(model), adamw(model)])
    refused("the owners, by store, bf16, fp16, or factors, by adam; 0 is given f", adamw, schemes={"0": "factors"})
    refused("adam; 2 is given 1bit", adamw, schemes={"2": "1bit"})
    refused("adam; 4 is given ring", adamw, schemes={"4": "ring"})
    refused("and 0.weight and 2.weight share memory|and 2.weight and 0.weight share memory", adamw, overlapping)
    refused("updates float32 and float64, and 0.weight is torch.bfloat16", adamw, lambda model: model.bfloat16())
    with pytest.raises(ConfigError, match='expected one of "workers", "servers", "servers-in-backward"'):
        started("elsewhere")


def what_is_in_no_group_is_refused_until_it_is_frozen():
    def some(model):
        return torch.optim.AdamW([*model[0].parameters(), *model[2].parameters(), model[4].weight], lr=1e-2)

    def train(model, optimizer):
        model[4].bias.requires_grad_(False)
        return steps(model, optimizer)

    model, optimizer = started("servers", some)
    before = values(model).clone()
    model(next(inputs())).square().mean().backward()
    with pytest.raises(ConfigError, match=r"4\.bias .*is in no group of the optimizer\. Freeze it: requires_grad_"):
        optimizer.step()
    model.zero_grad()  # not the optimizer's, which does not know of that one
    assert torch.equal(values(model), before)
    expected = train(*started("workers", some))
    close(train(model, optimizer), expected)


def gradients_cannot_be_read_after_backward():
    model, optimizer = started("servers")
    model(next(inputs())).square().mean().backward()
    with pytest.raises(ConfigError, match=r"\.grad of 0\.weight cannot be read. Clip by penstock\.clip_grad_norm_"):
        _ = model[0].weight.grad
    with pytest.raises(ConfigError, match="step takes no closure"):
        optimizer.step(lambda: None)
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    model(next(inputs())).square().mean().backward()
    with pytest.raises(ConfigError, match=r"a second backward would be added to\. Accumulate under no_sync"):
        model(next(inputs())).square().mean().backward()


def updates_in_backward_have_the_same_bits():
    def followed(model, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for x, _ in zip(inputs(), range(STEPS), strict=False):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        kept = optimizer.state_dict()["state"]
        return torch.cat([values(model), *(kept[place]["exp_avg_sq"].flatten() for place in sorted(kept))])

    for train in (followed, accumulated, partly_used, changed, without_a_backward_now_and_then):
        found, expected = (train(*started(update)) for update in ("servers-in-backward", "servers"))
        assert torch.equal(found, expected), train.__name__
    model, optimizer = started("servers-in-backward", dtype=torch.float32, schemes={"*": "bf16"})
    found = [
        values(model) for x, _ in zip(inputs(dtype=torch.float32), range(2), strict=False) if one(model, optimizer, x)
    ]
    assert torch.equal(found[-1], found[-1].bfloat16().float())


def one(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    return True


def updates_in_backward_are_under_way_before_step():
    model, optimizer = started("servers-in-backward")
    model(next(inputs())).square().mean().backward()
    slots = distributed_for(model).gradients.slots
    distributed_for(model).gradients.wait(slots)  # for nothing, without an update in backward
    optimizer.step()


def what_updates_in_backward_cannot_take_back_is_refused():
    def begun():
        model, optimizer = started("servers-in-backward")
        steps(model, optimizer, 1)
        model(next(inputs())).square().mean().backward()
        return model, optimizer

    model, optimizer = begun()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ConfigError, match=r"since it began lr of parameter group 0 has been changed\. Do that"):
        optimizer.step()
    model, optimizer = begun()
    with torch.no_grad():
        model[2].weight.clamp_(-0.05, 0.05)
    with pytest.raises(ConfigError, match=r"2\.weight has been written to"):
        optimizer.step()
    model, optimizer = begun()
    model[4].bias.data.clamp_(-0.05, 0.05)
    with pytest.raises(ConfigError, match=r"4\.bias has been written to"):
        optimizer.step()
    model, _ = begun()
    with pytest.raises(ConfigError, match="no step was made"):
        model(next(inputs())).square().mean().backward()
    model, optimizer = begun()
    optimizer.zero_grad()
    with pytest.raises(ConfigError, match="gradients have been reset"):
        optimizer.step()
    model, _ = begun()
    with pytest.raises(ConfigError, match=r'the norm of all gradients .* or use update="servers"'):
        ps.clip_grad_norm_(model.parameters(), 1.0)
    model, optimizer = begun()
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    with pytest.raises(ConfigError, match="since it began parameters have been put into other groups"):
        optimizer.step()
    model, optimizer = begun()
    with pytest.raises(ConfigError, match="since it began the optimizer's state has been read"):
        optimizer.state_dict()
    optimizer.step()  # all is as it was
    before = optimizer.state_dict()
    model(next(inputs())).square().mean().backward()
    with pytest.raises(ConfigError, match="since it began another state of the optimizer has been loaded"):
        optimizer.load_state_dict(before)
    optimizer.step()
    optimizer.load_state_dict(before)
    model, _ = started("servers-in-backward", lambda model: torch.optim.AdamW(model[0].parameters()))
    with pytest.raises(ConfigError, match=r"is in no group of the optimizer"):
        model(next(inputs())).square().mean().backward()


def without_a_backward_now_and_then(model, optimizer):
    for number, (x, _) in enumerate(zip(inputs(), range(STEPS), strict=False)):
        if number % 2 == 0 or ps.rank():
            model(x).square().mean().backward()
        optimizer.step()  # with the average of those that had a backward
        optimizer.zero_grad()
    return values(model)


def factors_go_to_the_one_owner_of_their_layer():
    """Who rebuilds the gradient and updates, as in Project Adam: parameters come back. One layer is by the store."""
    schemes = {"[02]": "adam"}
    if job.current().options.servers:
        with pytest.raises(ConfigError, match=r"servers apart do not rebuild them from factors; 0 is given adam"):
            started("servers", schemes=schemes)
        return
    model, optimizer = started("servers", schemes=schemes)
    steps(model, optimizer)
    heads = [group[0] for group in job.current().servers.groups] or range(ps.world_size())
    kept = [state for state in distributed_for(model).updates[0].kept_here() if state.slot.layer.name != "4"]
    for number, layer in enumerate(("0", "2")):
        mine = heads[number % len(heads)] == ps.rank()
        for state in (state for state in kept if state.slot.layer.name == layer):
            assert sum(end - begin for begin, end in state.ranges) == (state.slot.elems if mine else 0)
    steps_alone = (accumulated, partly_used, changed, without_a_backward_now_and_then)
    for train in (clipped, scaled, some_left_out, changed_through_data, *steps_alone):
        both(train, schemes=schemes)
    for train in steps_alone:
        both(train, schemes=schemes, update="servers-in-backward")
    counts = list(range(ps.world_size()))  # rank 0 has no batch
    for update, clip in (("servers", True), ("servers-in-backward", False)):
        found = uneven(update, counts, clip=clip, buffers=False, schemes=schemes)
        close(found, uneven_alone(counts, clip=clip, buffers=False), most=1e-10)
    way = [started("workers"), started("servers", schemes=schemes), started("servers")]
    expected = started("workers")
    for seed, (model, optimizer) in enumerate(way):
        if seed:
            model.load_state_dict(way[seed - 1][0].state_dict())
            optimizer.load_state_dict(way[seed - 1][1].state_dict())
        steps(model, optimizer, seed=seed)
        steps(*expected, seed=seed)
    close(values(way[-1][0]), values(expected[0]))
    with pytest.raises(ConfigError, match=r'mode="async" needs .*: each rank.s gradient is an update of its own'):
        started("workers", mode="async", schemes=schemes)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        what_else_holds_a_parameter_has_the_update_after_step,  # first: it collects what others leave unfinished
        a_run_changes_between_workers_and_servers,
        a_pickled_optimizer_has_its_state,
        gradients_are_clipped_by_their_global_norm,
        a_scaler_leaves_steps_out,
        steps_may_be_left_out,
        gradients_are_accumulated,
        what_has_no_gradient_is_not_updated,
        rounded_answers,
        what_the_program_writes_reaches_the_owners,
        what_another_thread_reads_is_in_place,
        owners_that_are_workers_read_values_in_the_model,
        gradients_that_are_not_finite_are_applied,
        groups_and_rates_may_change,
        a_parameter_may_move_to_another_group,
        factors_go_to_the_one_owner_of_their_layer,
        ranks_have_different_numbers_of_batches,
        a_last_step_may_be_left_out_where_ranks_have_different_numbers_of_batches,
        what_needs_all_ranks_is_refused_where_some_have_no_batch_left,
        mistakes_are_refused_at_the_call,
        what_is_in_no_group_is_refused_until_it_is_frozen,
        updates_in_backward_have_the_same_bits,
        updates_in_backward_are_under_way_before_step,
        what_updates_in_backward_cannot_take_back_is_refused,
        gradients_cannot_be_read_after_backward,
    )
}

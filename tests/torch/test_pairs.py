"""Embeddings that send pairs: the results of the dense path, and which of the two forms is sent."""

import warnings

import pytest
import torch
from ranks import distance, reference, run, same_everywhere, seeded, train, values
from scenarios import sgd
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock import distribute

PAIRS = {"embedding": "pairs"}
TOLERANCE = 1e-12
WORDS = 50


class Reader(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6, **options)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)))


def make(**options):
    def build():
        return seeded(Reader(**options))

    return build


def tokens_of(rank, step, rows=None):
    """Few of many words, some more than once; another number on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 12, (1 + (rank + step) % 3, rows or 5), generator=generator)


def loss_of(model, rank, step):
    tokens = tokens_of(rank, step)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 3)


def gather_of(model):
    from penstock.torch.reads import safety

    return safety.distributed_of(model.embedding.weight).schemes.gathers["embedding"]


def both_paths(loop, build, size=2, schemes=PAIRS, whole=0):
    """``loop(model, optimizer, rank)`` with and without pairs; with them so many, or `whole(rank)`, are sent whole."""

    def main(chosen):
        def as_rank(rank, engine):
            model = build()
            model, optimizer = distribute(model, sgd(model), schemes=chosen)
            result = loop(model, optimizer, rank)
            if chosen is not None:
                gather = gather_of(model)
                expected = whole(rank) if callable(whole) else whole
                assert gather.engaged and gather.seq > 0
                assert gather.dense_sent == expected
            return result

        return as_rank

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="penstock sends sparse")
        ours, theirs = run(main(schemes), size), run(main(None), size)
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= TOLERANCE
    return ours[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"padding_idx": -47}, {"sparse": True}], ids=str)
def test_training_equals_one_process(size, options):
    dense = dict(options, sparse=False)

    def after(model):
        assert gather_of(model).dense_sent == 0
        return values(model)

    settings = {"make_optimizer": sgd, "loss_of": loss_of, "size": size}
    results = train(make=make(**options), **settings, schemes=PAIRS, after=after)
    assert same_everywhere(results)
    assert distance(results[0], reference(make=make(**dense), **settings)) <= TOLERANCE


def test_duplicates_are_merged_before_they_are_sent():
    sent = {}

    def main(rank, engine):
        model = make(padding_idx=0)()
        model, optimizer = distribute(model, sgd(model), schemes=PAIRS)
        model(torch.tensor([[4, 4, 0, 7, 4], [7, 7, 0, 0, 4]])).sum().backward()
        optimizer.step()
        sent[rank] = gather_of(model).rows, gather_of(model).cost_bytes(2)

    run(main)
    assert sent[0] == sent[1] == (2, 48 + 2 * (8 + 6 * 8))


def test_many_rows_are_sent_as_a_dense_gradient():
    def loop(model, optimizer, rank):
        for _ in range(3):
            # On rank 1 there are more different words than the table has room for in fewer bytes.
            tokens = torch.arange(WORDS if rank else 5).view(1, -1)
            model(tokens).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop, make(), whole=lambda rank: 3 * rank)


def test_sparse_modules_get_sparse_averages():
    def main(rank, engine):
        model = make(sparse=True)()
        model, optimizer = distribute(model, sgd(model), schemes=PAIRS)
        if rank == 0:
            loss_of(model, 0, 0).backward()
        else:
            model(torch.arange(WORDS).view(1, -1)).sum().backward()  # dense on the wire
        grad = model.embedding.weight.grad
        assert grad.is_sparse and grad.is_coalesced()
        before = grad.to_dense()
        loss_of(model, rank, 1).backward()
        after = model.embedding.weight.grad
        assert after.is_sparse
        optimizer.step()
        return [before, after.to_dense(), *values(model)]

    results = run(main)
    assert same_everywhere(results)
    assert results[0][0].any(1).all() and (results[0][0] - results[0][1]).any()


@pytest.mark.parametrize("schemes", [{"*": "pairs"}, "auto"], ids=str)
def test_sparse_adam(schemes):
    def make_optimizer(model):
        return torch.optim.SparseAdam(model.parameters(), lr=0.05)

    def build():
        return seeded(nn.Sequential(nn.Embedding(WORDS, 4, sparse=True)))

    def words_loss(model, rank, step):
        return model(tokens_of(rank, step)).square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="penstock: every step of SparseAdam")
        ours = train(build, make_optimizer, words_loss, schemes=schemes)
    assert same_everywhere(ours)
    assert distance(ours[0], reference(build, make_optimizer, words_loss)) <= TOLERANCE


def test_a_sparse_module_stays_with_pairs_whatever_its_rows():
    def main(rank, engine):
        model = make(sparse=True)()
        model, optimizer = distribute(model, sgd(model), schemes="auto")
        used = []
        for _ in range(12):
            model(torch.arange(WORDS).view(1, -1)).sum().backward()
            assert model.embedding.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
            used.append(ps.coordinator_of(model).best_scheme("embedding"))
        plan = next(plan for plan in ps.explain(model).layers if plan.name == "embedding")
        return used, gather_of(model).dense_sent, plan.reason

    for used, whole, why in run(main, 3):
        assert (used, whole) == (["pairs"] * 12, 12)
        assert why.startswith("not chosen: its gradients are sparse; sent whole 12 times")


def test_accumulation_and_several_calls():
    def loop(model, optimizer, rank):
        for step in range(3):
            with ps.no_sync(model):
                loss_of(model, rank, 10 * step).backward()
                if step == 1:
                    assert model.embedding.weight.grad is not None
            (loss_of(model, rank, 10 * step + 1) + loss_of(model, rank, 10 * step + 2)).backward()
            loss_of(model, rank, 10 * step + 3).backward()
            optimizer.step()
            optimizer.zero_grad(step % 2 == 0)
        return values(model)

    both_paths(loop, make(padding_idx=2), whole=1)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings_that_some_or_all_ranks_do_not_use(sparse):
    def loop(model, optimizer, rank):
        for step in range(4):
            if step == 2:
                model.head(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
                assert model.embedding.weight.grad is None
            elif rank == step % 2:
                loss_of(model, rank, step).backward()
            else:
                model.head(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop, make(sparse=sparse))


def test_a_functional_tie_and_double_backward_are_sent_as_they_are():
    def loop(model, optimizer, rank):
        for step in range(3):
            hidden = model.embedding(tokens_of(rank, step)).sum(1)
            loss = F.linear(hidden, model.embedding.weight).square().mean()
            if step == 2:
                (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
                loss = loss + slope.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    both_paths(loop, make(), whole=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype):
    def main(chosen):
        def as_rank(rank, engine):
            model = make()().to(dtype)
            model, optimizer = distribute(model, sgd(model), schemes=chosen)
            for step in range(3):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            return values(model)

        return as_rank

    ours, theirs = run(main(PAIRS)), run(main(None))
    assert same_everywhere(ours)
    assert distance(ours[0], theirs[0]) <= {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]

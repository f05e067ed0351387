"""The information book: asked, agreed on, updated; and the choices that follow from it."""

import json
import threading
from dataclasses import replace

import pytest

from penstock.coordinator import Cluster, Coordinator, Placed, Rates, best_collectives
from penstock.description import Layer, Network, Tensor
from penstock.errors import ConfigError
from penstock.plan import Terms

FAST_PRODUCTS = Rates(product_flops_per_s=1e15, gather_s=0.0)


def linear(name, outputs, inputs, **more):
    return Layer(name, "linear", (outputs, inputs), (Tensor(f"{name}.weight", "f32", outputs * inputs),), **more)


def network():
    conv = Layer("conv", "other", (64, 3, 3, 3), (Tensor("conv.weight", "f32", 1728),))
    embedding = Layer("embed", "embedding", (10_000, 512), (Tensor("embed.weight", "f32", 5_120_000),), rows=25)
    tied = linear("head", 4096, 4096, why_whole="its weight is also that of embed")
    return Network("net", (conv, linear("fc", 4096, 4096), embedding, tied))


def coordinator(workers=8, batchsize=32, **more):
    return Coordinator(network(), Cluster(workers, workers), batchsize=batchsize, rates=FAST_PRODUCTS, **more)


def test_query_answers_as_poseidons_does():
    book = coordinator()
    assert book.query("n_worker", "n_server", "batchsize") == (8, 8, 32)
    assert book.query("policy") == "measured"
    assert book.query("fc").kind == "linear"
    assert book.query("fc").shape == (4096, 4096)
    assert book.query("layers") == ["conv", "fc", "embed", "head"]


def test_a_tensor_lives_where_the_engine_says_and_before_there_is_one_nowhere():
    with pytest.raises(ConfigError, match=r"fc\.weight lives nowhere: .* penstock\.distribute"):
        coordinator().query("fc.weight")
    there = [Placed(0, 4096 * 4096 * 4, 3, 1)]
    book = coordinator(placements=lambda: {"fc.weight": there})
    assert book.query("fc.weight", "n_server") == (there, 8)
    with pytest.raises(ConfigError, match=r"did you mean fc\.weight"):
        book.query("fc.weigh")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean n_worker"):
        coordinator().query("n_workers")
    with pytest.raises(ConfigError, match=r"no layer 'fc8'; did you mean fc"):
        coordinator().best_scheme("fc8")
    with pytest.raises(ConfigError, match="query what"):
        coordinator().query()


def test_choices_and_reasons():
    book = coordinator()
    assert {name: book.best_scheme(name) for name in book.query("layers")} == {
        "conv": "store",
        "fc": "factors",
        "embed": "pairs",
        "head": "store",
    }
    assert {name: book.decision(name).code for name in book.query("layers")} == {
        "conv": "dense",
        "fc": "faster",
        "embed": "faster",
        "head": "store-only",
    }
    assert book.decision("head").reason == "its weight is also that of embed"
    paper = coordinator(policy="paper")
    assert (paper.best_scheme("fc"), paper.best_scheme("embed")) == ("factors", "store")


def test_nothing_is_chosen_before_rows_are_known():
    book = coordinator(batchsize=None)
    assert book.rows("fc") is None
    assert (book.best_scheme("fc"), book.decision("fc").code) == ("store", "rows-unknown")
    changed = book.update(rows={"fc": [32] * 8, "embed": [100_000] * 8}, rates=FAST_PRODUCTS, batchsize=32)
    assert changed == {"fc": "factors"}
    assert book.query("batchsize") == 32
    assert book.rows("fc") == [32] * 8


def test_a_change_must_gain_a_tenth_and_what_is_slower_than_the_store_goes_at_once():
    """Both schemes are as many bytes at 512 rows of each of 8 workers."""
    book = coordinator(batchsize=None)
    update = lambda rows: book.update(rows={"fc": [rows] * 8}, rates=FAST_PRODUCTS)  # noqa: E731
    assert update(500) == {}
    assert book.decision("fc").code == "kept"
    assert update(400) == {"fc": "factors"}
    assert update(511) == {}
    assert update(520) == {"fc": "store"}
    assert update(500) == {}


def test_a_slow_rank_counts_for_all():
    book = coordinator(batchsize=None)
    assert book.update(rows={"fc": [0, 0, 0, 0, 0, 0, 0, 900]}, rates=FAST_PRODUCTS) == {}
    assert book.update(rows={"fc": [0, 0, 0, 0, 0, 0, 0, 300]}, rates=FAST_PRODUCTS) == {"fc": "factors"}


def test_adopting_what_others_use():
    went_on, away = coordinator(batchsize=None), coordinator(batchsize=None)
    went_on.update(rows={"fc": [400] * 8}, rates=FAST_PRODUCTS, batchsize=7)
    away.update(rows={"fc": [900] * 8}, rates=Rates())
    assert away.adopt(json.loads(json.dumps(went_on.measured)))["fc"] == "factors"
    assert (away.best_scheme("fc"), away.decision("fc").code) == ("factors", "faster")
    assert (away.measured, away.query("batchsize")) == (went_on.measured, 7)
    # Nothing is said of this layer's rows any more: both remember the same.
    for book in (went_on, away):
        assert book.update(rows={}, rates=FAST_PRODUCTS) == {}


def test_a_scheme_is_adopted_whatever_this_rank_would_choose():
    book = coordinator(batchsize=None)
    book.adopt({**book.measured, "schemes": {"fc": "factors"}})
    assert (book.best_scheme("fc"), book.decision("fc").code) == ("factors", "adopted")
    assert "as on the ranks that went on" in book.explain().render()


class Gathering:
    """An all-gather among threads."""

    def __init__(self, size):
        self.blobs = [b""] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def of(self, rank):
        def gather(what, blob):
            self.blobs[rank] = blob
            self.barrier.wait()
            return list(self.blobs)

        return gather


def agree(books):
    gathering, errors = Gathering(len(books)), [None] * len(books)

    def rank_main(rank):
        try:
            books[rank].agree(gathering.of(rank), rank=rank)
        except ConfigError as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(books))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_equal_books_agree():
    assert agree([coordinator() for _ in range(3)]) == [None] * 3


def test_a_fact_that_differs_is_named_with_both_ranks():
    errors = agree([coordinator(), coordinator(), coordinator(policy="paper")])
    assert all("rank 0 and rank 2 differ in policy: measured on rank 0, paper on rank 2" in str(e) for e in errors)
    other = Coordinator(Network("net", (linear("fc", 10, 20),)), Cluster(2, 2))
    same = Coordinator(Network("net", (linear("fc", 10, 21),)), Cluster(2, 2))
    errors = agree([other, same])
    assert all("['fc', 'linear', [10, 20], 200] on rank 0" in str(error) for error in errors)


def test_a_policy_that_does_not_exist():
    with pytest.raises(ConfigError, match="measured, paper"):
        coordinator(policy="fast")


ONE_SLICE = Network("net", (linear("small", 64, 64, why_whole="it is shared"), linear("large", 4096, 4096)))


@pytest.mark.parametrize(
    ("workers", "policy", "latency_s", "best"),
    [
        (16, "measured", 100e-6, {"small": "butterfly"}),  # 16 KiB in one slice: its owner would carry 15 times that
        (16, "measured", 10e-3, {}),  # the store waits for two messages, a butterfly of 16 for eight
        (3, "measured", 100e-6, {"small": "ring"}),
        (1, "measured", 100e-6, {}),
        (16, "paper", 100e-6, {}),
    ],
)
def test_a_collective_takes_the_stores_place_for_small_layers_of_many_ranks(workers, policy, latency_s, best):
    cluster, rates = Cluster(workers, workers), Rates(latency_s=latency_s)
    assert best_collectives(ONE_SLICE, cluster, policy=policy, rates=rates) == best


def test_a_collective_that_was_chosen_stays_until_rows_are_better():
    cluster, rates = Cluster(16, 16), replace(FAST_PRODUCTS, latency_s=100e-6)
    network = Network("net", (linear("shared", 64, 64, why_whole="it is shared"), linear("free", 64, 64)))
    book = Coordinator(network, cluster, rates=rates)
    assert [book.best_scheme(name) for name in ("shared", "free")] == ["store", "store"]
    chosen = best_collectives(network, cluster, policy="measured", rates=rates)
    terms = {name: Terms(collective=algorithm) for name, algorithm in chosen.items()}
    book = Coordinator(network, cluster, rates=rates, terms=terms)
    for name in ("shared", "free"):
        assert (book.best_scheme(name), book.decision(name).code) == ("butterfly", "faster")
    assert book.update(rows={"free": [1] * 16}, rates=rates) == {"free": "factors"}
    assert book.update(rows={"free": [500] * 16}, rates=rates) == {"free": "butterfly"}
    # The engine's book cannot be changed, so a layer does not go to the store, whatever is measured now.
    assert book.update(rows={}, rates=replace(rates, latency_s=10e-3)) == {}
    assert book.decision("shared").code == "kept"
    assert "through the store" in book.decision("shared").reason


def test_ranks_with_different_collectives_are_told():
    with pytest.raises(ConfigError, match=r"differ in collectives"):
        network = Network("net", (linear("fc", 64, 64),))
        books = [Coordinator(network, Cluster(2, 2), terms=given) for given in ({}, {"fc": Terms(collective="ring")})]
        blobs = []
        books[1].agree(lambda _, blob: blobs.append(blob) or [blob, blob], rank=1)
        books[0].agree(lambda _, blob: [blob, *blobs], rank=0)


TWO_HOSTS = (0, 0, 0, 0, 1, 1, 1, 1)
BY_HOST = ((0, 1, 2, 3), (4, 5, 6, 7))


def test_groups_are_those_of_the_workers_of_a_host():
    assert Cluster(8, 8, hosts=TWO_HOSTS).by_host == BY_HOST
    assert Cluster(8, 2, servers_apart=True, hosts=(*TWO_HOSTS, 0, 1)).by_host == BY_HOST, "servers are in none"
    assert Cluster(8, 8).by_host == Cluster(3, 3, hosts=(0, 1, 2)).by_host == ()
    grouped = Cluster(8, 8, hosts=TWO_HOSTS).in_groups(BY_HOST)
    assert grouped.n_server == 2, "their heads own"
    assert grouped.in_groups(()).n_server == 8
    apart = Cluster(8, 3, servers_apart=True, hosts=(*TWO_HOSTS, 2, 3, 4))
    assert apart.in_groups(BY_HOST).n_server == apart.in_groups(BY_HOST).in_groups(()).n_server == 3


@pytest.mark.parametrize(
    ("mbit", "hosts", "groups", "why"),
    [
        ((1000, 16_000), TWO_HOSTS, BY_HOST, "by host: 16.8 MB through the store take "),
        ((1000, 1000), TWO_HOSTS, ((0, 1), (2, 3), (4, 5), (6, 7)), "by host in 2 parts: 16.8 MB "),
        ((100_000, 16_000), TWO_HOSTS, (), "none: 16.8 MB through the store would take "),
        ((1000, 16_000), (0,) * 8, (), "none: all ranks are on one host"),
        ((1000, 16_000), tuple(range(8)), (), "none: no two workers share a host"),
        ((1000, 16_000), (), (), "none: no two workers share a host"),
    ],
)
def test_groups_are_those_with_which_the_store_is_fastest(mbit, hosts, groups, why):
    line, inside = (one * 125e3 for one in mbit)
    rates = Rates(bytes_per_s=line, inside_bytes_per_s=inside, summed_bytes_per_s=1e12, latency_s=1e-6)
    found, reason = Cluster(8, 8, hosts=hosts).best_groups(rates)
    assert found == groups and reason.startswith(why), reason


def test_hosts_that_are_not_of_all_ranks_are_refused():
    with pytest.raises(ConfigError, match="hosts of 3 ranks are given, but there are 4"):
        Cluster(4, 4, hosts=(0, 0, 1)).best_groups(Rates())


def test_ways_are_compared_with_the_jobs_groups():
    """200 rows of 8192: in groups 4 x 200 x 8192 numbers leave a host, through the store 4096^2; else fourfold."""
    net = Network("net", (linear("fc", 4096, 4096),))
    without = Coordinator(net, Cluster(8, 8, hosts=TWO_HOSTS), rates=FAST_PRODUCTS, batchsize=200)
    book = without.in_groups(BY_HOST)
    for scheme, numbers in (("factors", 4 * 200 * 8192), ("store", 4096**2)):
        assert book.decision("fc").scheme_bytes[scheme] == 4 * numbers
        assert without.decision("fc").scheme_bytes[scheme] == 4 * 4 * numbers
    assert (book.best_scheme("fc"), without.best_scheme("fc")) == ("factors", "factors")
    assert book.query("groups", "hosts", "n_server") == (BY_HOST, TWO_HOSTS, 2)
    assert book.update(rows={"fc": [600] * 8}, rates=FAST_PRODUCTS) == {"fc": "store"}
    assert without.in_groups(()).decision("fc") == without.decision("fc")


def test_ranks_with_other_hosts_or_groups_are_told():
    one = Cluster(4, 4, hosts=(0, 0, 1, 1))
    net = Network("net", (linear("fc", 10, 20),))
    errors = agree([Coordinator(net, cluster) for cluster in (one, replace(one, hosts=(0, 1, 0, 1)))])
    assert all("differ in hosts: [0, 0, 1, 1] on rank 0, [0, 1, 0, 1] on rank 1" in str(error) for error in errors)
    errors = agree([Coordinator(net, cluster) for cluster in (one, one.in_groups(one.by_host))])
    assert all("differ in n_server" in str(error) for error in errors)

"""Which links stand out, from made-up measurements."""

import itertools

import pytest

from penstock.measure.links import Link, judge, rounds

NAMES = [f"10.0.0.{rank}:5000" for rank in range(5)]


def links(ranks, rate, latency=lambda source, target: 50e-6):
    size = 1 << 20
    return [
        Link(source, target, latency(source, target), {1: 60e-6, size: size / rate(source, target)})
        for source, target in itertools.permutations(range(ranks), 2)
    ]


@pytest.mark.parametrize("ranks", range(1, 12))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(ranks):
    found = rounds(ranks)
    met = [pair for matches in found for pair in matches]
    assert sorted(met) == list(itertools.combinations(range(ranks), 2))
    for matches in found:
        members = [rank for pair in matches for rank in pair]
        assert len(set(members)) == len(members)
    assert len(rounds(ranks, 1)) == min(1, len(found))


def test_alike_links_give_no_verdict():
    assert judge(links(5, lambda source, target: 1e8 * (1 + 0.01 * source)), NAMES) == []
    assert judge([], NAMES) == []


def test_a_slow_link_is_named_with_both_ends():
    (verdict, other) = judge(links(4, lambda *ends: 1e7 if ends == (2, 1) else 1e8), NAMES[:4])
    assert (verdict.kind, verdict.ranks) == ("slow link", (2, 1))
    assert "from rank 2 (10.0.0.2:5000) to rank 1" in verdict.text and "80 Mbit/s" in verdict.text
    assert other.kind == "asymmetric pair" and other.ranks == (2, 1)


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_a_rank_whose_links_are_all_slow_is_named_once_per_direction(ranks):
    verdicts = judge(links(ranks, lambda *ends: 1e7 if 2 in ends else 1e8), NAMES[:ranks])
    assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [("slow rank", (2,))] * 2
    assert "sends" in verdicts[0].text and "receives" in verdicts[1].text


def test_two_ranks_blame_the_link_and_not_a_rank():
    verdicts = judge(links(2, lambda *ends: 1e7 if ends == (0, 1) else 1e8), NAMES[:2])
    assert {verdict.kind for verdict in verdicts} == {"slow link", "asymmetric pair"}


def test_a_late_link_is_named():
    (verdict,) = judge(links(3, lambda *_: 1e8, lambda *ends: 5e-3 if ends == (0, 2) else 5e-5), NAMES[:3])
    assert (verdict.kind, verdict.ranks) == ("late link", (0, 2)) and "5,000 us" in verdict.text

"""``groups="auto"`` in real jobs: chosen by the rates, the same on all ranks, and training is as without groups."""

import torch
from job_processes import run_well

import penstock as ps
from penstock import addresses, job, rendezvous
from penstock.coordinator import Rates

HOSTS = ["this one", "another", "this one", "another"]


def chosen(rank, count, options):
    """What this rank makes of ``groups="auto"`` where it hears of two hosts, and what it has trained."""
    ps.shutdown()
    rendezvous.host_identity = lambda: HOSTS[rank]  # in this process, which ends with the test
    addresses.choose_here = lambda *_: addresses.Chosen("127.0.0.1", "lo", "for this test")
    ps.init(rank=rank, world_size=count, secret="correct horse battery staple", groups="auto", **options)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
    model, optimizer = ps.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        model(torch.randn(5, 30, generator=generator).double()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    book = ps.coordinator_of(model)
    assert book.query("groups", "hosts") == (job.current().groups, (0, 1, 0, 1))
    assert book.query("n_server") == (2 if job.current().groups else 4)
    report = ps.report()
    found = (report["groups"], report["groups_reason"], job.current().rates)
    return found, report.render(), [one.detach().tolist() for one in model.parameters()]


def run(place, **options):
    """Of all ranks, which have made the same of it and have the same bits."""
    place.mkdir()
    results = run_well(4, chosen, place, {"rendezvous": f"file://{place / 'again'}", **options})
    assert all((found, trained) == (results[0][0], results[0][2]) for found, _, trained in results)
    return results[0]


def test_all_ranks_choose_the_same_groups_and_train_as_without(tmp_path):
    (groups, reason, _), text, grouped = run(tmp_path / "slow", line_rate_mbit=1000)
    assert groups == [[0, 2], [1, 3]]
    assert reason.startswith("by host: 16.8 MB through the store take ")
    assert f"ranks that sum among themselves: 0, 2; 1, 3 ({reason})" in text
    (groups, reason, _), text, plain = run(tmp_path / "fast", line_rate_mbit=100_000)
    assert groups == [] and reason.startswith("none: 16.8 MB through the store would take ")
    assert f"no ranks sum among themselves ({reason})" in text
    for one, other in zip(grouped, plain, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-10, atol=1e-10)


def test_what_was_measured_decides_on_all_ranks_alike(tmp_path):
    (groups, reason, rates), *_ = run(tmp_path / "measured", line_rate_mbit="auto")
    assert "16.8 MB through the store " in reason
    assert reason.startswith("by host: " if groups else "none: ")
    assert rates.inside_bytes_per_s not in (Rates().inside_bytes_per_s, rates.bytes_per_s), "measured by itself"


def reported(rank, count):
    report = ps.report()
    return report["groups"], report["groups_reason"]


def test_on_one_host_there_is_no_line_to_spare(tmp_path):
    why = "none: all ranks are on one host, and there is no line to spare"
    assert run_well(2, reported, tmp_path, groups="auto") == [([], why)] * 2

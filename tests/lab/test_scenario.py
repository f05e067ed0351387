"""Scenario files: every one of the lab's can be read; mistakes are named."""

from dataclasses import replace

import pytest

from lab.limits import store_wire_s
from lab.scenario import BadScenario, all_names, load
from lab.systems import SYSTEMS
from lab.verdicts import DDP_RATIO_MAX, REPETITIONS_MIN

SMALL = """
title = "small"
network = "cifar10-quick"
systems = ["penstock", "ddp"]
"""


def written(tmp_path, text):
    file = tmp_path / "given.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", all_names())
def test_every_scenario_can_be_run(name):
    for point in load(name):
        assert point.name == name
        assert point.systems[0] == "alone"
        assert point.trace().elems > 0
        assert len(point.rates_mbit()) == point.hosts + point.servers
        for system in point.systems:
            assert point.spec(SYSTEMS[system])["network"] == point.network


def test_a_sweep_gives_one_point_per_value(tmp_path):
    points = load(written(tmp_path, SMALL + "[sweep]\nhosts = [2, 5]\n"))
    assert [(point.hosts, dict(point.swept)) for point in points] == [(2, {"hosts": 2}), (5, {"hosts": 5})]


def test_a_slice_size_reaches_our_own_system_alone(tmp_path):
    (point,) = load(written(tmp_path, SMALL + "[sweep]\nslice_kb = [64]\n"))
    assert point.spec(SYSTEMS["penstock"])["options"]["init"] == {"slice_bytes": 65536}
    assert "init" not in point.spec(SYSTEMS["ddp"])["options"]


def test_bars_between_two_systems_are_kept_as_written(tmp_path):
    bar = {"system": "penstock", "against": "ddp", "at_most": 1.02}
    text = SMALL + "[targets]\nbetween = [{ system = 'penstock', against = 'ddp', at_most = 1.02 }]"
    (point,) = load(written(tmp_path, text))
    assert point.targets == {"between": [bar]}


# What has a bar, as the issues on the lab and on hybrid communication put it: network, width, compute in seconds and
# Mbit/s before dilation, hosts, ours / T* at most, the fastest exact peer / ours at least. Where they give a ratio of
# transfer to compute, `test_transfer_beside_compute` has that, and here is the size at which it is run.
BARS = {
    "resnet50-1000": ("resnet50", 1.0, 1.2, 1000, 4, 1.06, 1.25),
    "resnet50-600": ("resnet50", 1.0, 1.2, 600, 4, 1.06, 1.15),
    "resnet50-600-8-hosts": ("resnet50", 1.0, 1.2, 600, 8, 1.08, 1.10),
    "vgg19-half-1000": ("vgg19", 0.5, 2.0, 1000, 4, 1.08, 1.12),
    "sockeye": ("sockeye", 1.0, 1.4, 1000, 4, 1.08, 1.15),
    "cifar10-quick-ample": ("cifar10-quick", 1.0, 0.1, 1000, 4, 1.03, 0.99),
    "googlenet-ample": ("googlenet", 1.0, 1.0, 2000, 4, 1.03, 0.99),
    "resnet50-one-slow-host": ("resnet50", 1.0, 1.2, 1000, 4, 1.10, 1.0),
    "vgg19-half-1000-auto": ("vgg19", 0.5, 2.0, 1000, 4, 1.08, 1.15),
    "vgg19-half-250-auto": ("vgg19", 0.5, 2.0, 250, 4, 1.12, 3.3),
    "vgg19-22k-half-1000-auto": ("vgg19-22k", 0.5, 2.0, 1000, 4, 1.12, 1.9),
    "sockeye-2x-auto": ("sockeye", 1.0, 1.4, 500, 4, 1.10, 1.5),
    "resnet50-600-auto": ("resnet50", 1.0, 1.2, 600, 4, None, None),
    "resnet50-600-bf16": ("resnet50", 1.0, 1.2, 600, 4, None, None),
    "resnet50-custom-functions": ("resnet50", 1.0, 1.2, 800, 3, 1.06, None),
    "resnet50-1000-guarded": ("resnet50", 1.0, 1.2, 1000, 4, 1.06, None),
    "resnet50-servers": ("resnet50", 1.0, 1.2, 1000, 4, 1.06, None),
    "vgg19-half-servers": ("vgg19", 0.5, 2.0, 1000, 4, 1.06, None),
    "resnet50-2x2-groups": ("resnet50", 1.0, 1.2, 300, 2, 1.06, None),
    "vgg19-half-2x2-groups": ("vgg19", 0.5, 2.0, 250, 2, 1.06, None),
}
SERVERS = {"resnet50-servers": [1, 2, 4], "vgg19-half-servers": [1, 2, 4]}
# System, against, time of the one / that of the other at most. "No worse" than the store has DDP's allowance for noise.
BETWEEN = {
    "resnet50-600-auto": [("penstock", "penstock-store", 1.02)],
    "resnet50-600-bf16": [("penstock-bf16", "ddp-bf16", 1.0)],
    "resnet50-1000-guarded": [("penstock-elastic", "penstock", 1.005), ("penstock-encrypted", "penstock", 1.03)],
    "resnet50-servers": [("penstock-update", "mxnet-sync-update", 0.8)],
    # 1.7 times as fast.
    "resnet50-2x2-groups": [("penstock", "penstock-store", 0.588)],
    "vgg19-half-2x2-groups": [("penstock", "penstock-store", 0.588)],
}
# Of systems, where a scenario has any.
OPTIONS = {
    "resnet50-custom-functions": {system: {"lists": True} for system in ("alone", "penstock", "ddp")},
    "resnet50-2x2-groups": {"penstock": {"init": {"groups": "host"}}},
    "vgg19-half-2x2-groups": {"penstock": {"init": {"groups": "host"}}},
}
# The fastest of these is what the last bar is against.
PEERS = {"ddp", "horovod", "mxnet-sync", "mxnet-p3"}


def test_whatever_has_a_bar_is_in_the_table():
    assert {name for name in all_names() if any(point.targets for point in load(name))} == set(BARS)
    assert (DDP_RATIO_MAX, REPETITIONS_MIN) == (1.02, 5)


@pytest.mark.parametrize("name", BARS)
def test_nobody_loosens_a_bar_or_what_it_is_for(name):
    points = load(name)
    assert [point.servers for point in points] == SERVERS.get(name, [0])
    point = replace(points[0], servers=0, swept={})
    assert all(replace(other, servers=0, swept={}) == point for other in points)
    *cluster, ideal_ratio, peer_ratio = BARS[name]
    undilated = point.compute_s / point.dilation, point.rate_mbit * point.dilation
    assert [point.network, point.width, *undilated, point.hosts] == cluster
    assert point.targets.get("ideal_ratio") == ideal_ratio and point.targets.get("peer_ratio") == peer_ratio
    between = [tuple(bar[key] for key in ("system", "against", "at_most")) for bar in point.targets.get("between", [])]
    assert between == BETWEEN.get(name, [])
    assert point.slow == ({"host": 3, "rate_mbit": 250} if name == "resnet50-one-slow-host" else {})
    chosen = {"penstock": {"schemes": "auto"}} if name.endswith("-auto") else {}
    assert point.options == OPTIONS.get(name, chosen)
    assert point.workers_per_host == (2 if "2x2" in name else 1)
    assert point.batch is None and point.repetitions >= REPETITIONS_MIN
    peers = PEERS if peer_ratio else {"mxnet-sync-update"} if name in SERVERS else {"ddp"}
    assert {"penstock", *peers} <= set(point.systems)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("sockeye", 0.9, 1.1),  # C is about F+B
        ("sockeye-2x-auto", 1.8, 2.2),  # about 2(F+B)
        ("cifar10-quick-ample", 0.0, 0.2),
        ("googlenet-ample", 0.0, 0.2),
    ],
)
def test_transfer_beside_compute(name, least, most):
    (point,) = load(name)
    transfer_s = sum(store_wire_s(point.trace(), point.hosts, point.rate_mbit * 1e6 / 8))
    assert least <= transfer_s / point.compute_s <= most


def test_dilation_is_in_the_title_and_changes_nothing_that_is_run(tmp_path):
    text = SMALL + "rate_mbit = 100\n"
    (plain,) = load(written(tmp_path, text))
    (dilated,) = load(written(tmp_path, text + "dilation = 4\n"))
    assert dilated == replace(plain, dilation=4, title="small, run at 4 times the time")
    assert dilated.rates_mbit() == plain.rates_mbit()
    assert [dilated.spec(SYSTEMS[name]) for name in dilated.systems] == [
        plain.spec(SYSTEMS[name]) for name in plain.systems
    ]


def test_servers_have_hosts_of_their_own_and_workers_may_share_some(tmp_path):
    (point,) = load(written(tmp_path, SMALL + "rate_mbit = 100\nservers = 2\nworkers_per_host = 3\n"))
    assert point.rates_mbit() == [100] * (point.hosts + 2)
    assert point.workers == 3 * point.hosts


def test_one_slow_link(tmp_path):
    (point,) = load(written(tmp_path, SMALL + "rate_mbit = 100\nslow = { host = 2, rate_mbit = 25 }\n"))
    assert point.rates_mbit() == [100, 100, 25, 100]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("title = ", "given.toml"),
        ('title = "x"', "'network' is missing"),
        (SMALL + "hots = 3", "'hots'"),
        (SMALL.replace("ddp", "dpd"), "'dpd'"),
        (SMALL.replace("cifar10-quick", "cifar"), "'cifar'"),
        (SMALL + "hosts = 1", "1 hosts"),
        (SMALL + "compute_s = 0.0", "positive"),
        (SMALL + "repetitions = 0", "repetitions"),
        (SMALL + "slow = { host = 4, rate_mbit = 1 }", "slow"),
        (SMALL + "servers = -1", "-1 servers"),
        (SMALL + "workers_per_host = 0", "0 workers per host"),
        (SMALL + "[sweep]\nseed = [1]", "sweep is over"),
        (SMALL + "[targets]\nratio = 1", "targets"),
        (SMALL + "[targets]\npeer_ratio = '1'", "positive numbers"),
        (SMALL + "[targets]\nbetween = { system = 'penstock' }", "a list of tables"),
        (SMALL + "[targets]\nbetween = [{ system = 'penstock', against = 'ddp' }]", "between has"),
        (SMALL + "[targets]\nbetween = [{ system = 'penstock', against = 'ddp', at_most = 0 }]", "between has"),
        (SMALL + "[targets]\nbetween = [{ system = 'ddp', against = 'ddp', at_most = 1 }]", "two systems"),
        (SMALL + "[targets]\nbetween = [{ system = 'ddp', against = 'horovod', at_most = 1 }]", "ddp and horovod"),
        (SMALL + "[options]\nddq = {}", "'ddq'"),
    ],
)
def test_mistakes_are_named(tmp_path, text, named):
    with pytest.raises(BadScenario, match=named):
        load(written(tmp_path, text))


def test_an_unknown_scenario_lists_the_known():
    with pytest.raises(BadScenario, match="resnet50-1000"):
        load("resnet51")

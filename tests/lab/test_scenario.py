"""Scenario files: every one of the lab's can be read; mistakes are named."""

import pytest

from lab.scenario import BadScenario, all_names, load

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
        assert len(point.rates_mbit()) == point.hosts
        for system in point.systems:
            assert point.spec(system)["network"] == point.network


def test_a_sweep_gives_one_point_per_value(tmp_path):
    points = load(written(tmp_path, SMALL + "[sweep]\nhosts = [2, 5]\n"))
    assert [(point.hosts, dict(point.swept)) for point in points] == [(2, {"hosts": 2}), (5, {"hosts": 5})]


def test_a_slice_size_reaches_our_own_system_alone(tmp_path):
    (point,) = load(written(tmp_path, SMALL + "[sweep]\nslice_kb = [64]\n"))
    assert point.spec("penstock")["options"]["init"] == {"slice_bytes": 65536}
    assert "init" not in point.spec("ddp")["options"]


def test_bars_between_two_systems_are_kept_as_written(tmp_path):
    bar = {"system": "penstock", "against": "ddp", "at_most": 1.02}
    text = SMALL + "[targets]\nbetween = [{ system = 'penstock', against = 'ddp', at_most = 1.02 }]"
    (point,) = load(written(tmp_path, text))
    assert point.targets == {"between": [bar]}


def test_choosing_schemes_and_bf16_have_bars_of_their_own():
    (auto,), (bf16,) = load("resnet50-600-auto"), load("resnet50-600-bf16")
    assert auto.targets["between"] == [{"system": "penstock", "against": "penstock-store", "at_most": 1.02}]
    assert auto.options == {"penstock": {"schemes": "auto"}}
    assert bf16.targets["between"] == [{"system": "penstock-bf16", "against": "ddp-bf16", "at_most": 1.0}]


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

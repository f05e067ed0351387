"""The report on synthetic lines: which run counts, when a bar is met, what is missing, what of the page is touched."""

import copy
import json
import re

import pytest

from lab.report import BEGIN, END, main, planned, write
from lab.results import BrokenLine, Result, read
from lab.systems import SYSTEMS
from lab.tables import bars, index, scenario_page
from lab.verdicts import REPETITIONS_MIN, fastest_exact_peer, judge

TITLES = {
    "alone": "one worker",
    "penstock": "Penstock",
    "penstock-slicing": "Penstock, slices alone",
    "penstock-store": "Penstock, the store alone",
    "penstock-bf16": "Penstock, bf16",
    "ddp": "DDP (gloo)",
    "ddp-bf16": "DDP (gloo), bf16 hook",
    "horovod": "Horovod",
    "mxnet-p3": "MXNet, P3",
}
BARS = {"ideal_ratio": 1.06, "peer_ratio": 1.25}
HOST = {"cpu": "a cpu", "cores": 2, "memory_gb": 8, "kernel": "6.1", "congestion_control": "cubic", "python": "3.11.2"}


def line(system, step_s=None, *, ideal_s=1.2, **fields):
    """What a run writes of one system; without a time it is missing."""
    made = {"benchmark": "lab", "commit": "c0ffee", "seed": 1, "host": HOST, "run": "2026-01-02T03:04:05"}
    made |= {"scenario": "small", "title": "A small network", "sweep": None, "network": "small", "width": 1.0}
    made |= {"hosts": 4, "rates_mbit": [1000.0] * 4, "compute_s": 1.0, "batch": 32, "repetitions": 5, "steps": 4}
    made |= {"system": system, "system_title": TITLES[system], "exact": not system.endswith("bf16"), "targets": BARS}
    made |= {"missing": "it does not start" if step_s is None else None, "line_rate_mbit": 956.1}
    if step_s is not None:
        made["limits"] = {"ideal_s": ideal_s, "wfbp_s": 1.5, "serial_s": 2.0, "compute_s": 1.0}
        spread = {"median": 1, "low": 0.99, "quarter": 0.995, "three_quarters": 1.005, "high": 1.02}
        made["step_s"] = {name: step_s * factor for name, factor in spread.items()} | {"count": 20}
        made |= {"ratio_ideal": step_s / ideal_s, "throughput": 128 / step_s, "speedup": 4 / step_s}
        made |= {"stall_s": max(step_s - 1, 0), "cpu_s_per_step": 0.5, "cpu_s_per_gb": 3.25}
        made |= {"bytes_per_step": {"sent": [50e6, 60e6, 50e6, 50e6], "received": [50e6] * 4}}
        made |= {"preemptions_per_step": None, "stall_by_layer_s": None, "network_use": None}
    return made | fields


@pytest.fixture
def results(tmp_path):
    """Reads lines as if a run had written them."""

    def reads(*lines, name="lines.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return read([path])

    return reads


def verdicts(scenarios):
    return {judgement.bar: judgement.verdict for judgement in judge(scenarios)}


def all_pages(scenarios):
    return "".join(map(scenario_page, scenarios))


def row(text, start):
    found = [one for one in text.splitlines() if one.replace("[", "", 1).startswith(f"| {start}")]
    assert len(found) == 1, found
    return [cell.strip() for cell in found[0].strip("| ").split(" | ")]


class TestRuns:
    def test_the_run_of_the_last_line_counts_and_all_of_it(self, results):
        old = {"commit": "01d", "run": "1"}
        (found,) = results(
            *(line("penstock", 9.0, **old), line("ddp", 9.0, **old), line("horovod", 9.0, **old)),
            *(line("penstock", 2.0), line("ddp", 3.0)),
        )
        assert (found.commits, list(found.points[0].results)) == (("c0ffee",), ["penstock", "ddp"])
        assert found.points[0].measured("penstock").step_s.median == 2.0

    def test_a_new_run_of_the_same_commit_is_another_run(self, results):
        (found,) = results(line("penstock", 9.0, run="1"), line("ddp", 9.0, run="1"), line("penstock", 2.0, run="2"))
        assert list(found.points[0].results) == ["penstock"]

    def test_each_scenario_has_its_own_last_run(self, results):
        other = {"scenario": "other"}
        found = results(line("penstock", 1.0, run="1", **other), line("penstock", 1.0, run="2"))
        assert [(scenario.name, scenario.run) for scenario in found] == [("other", "1"), ("small", "2")]

    def test_points_of_a_sweep_rise(self, results):
        (found,) = results(*(line("penstock", 1.0, sweep={"rate_mbit": rate}) for rate in (500, 1000, 250)))
        assert [point.swept for point in found.points] == [("rate_mbit", rate) for rate in (250, 500, 1000)]

    def test_a_commit_during_a_run_leaves_it_one_run(self, results):
        (found,) = results(line("alone", 1.0, commit="01d"), line("penstock", 1.2), line("ddp", 1.5))
        assert found.commits == ("01d", "c0ffee")
        assert list(found.points[0].results) == ["alone", "penstock", "ddp"]
        assert "commit `01d`, then `c0ffee`" in all_pages([found])

    @pytest.mark.parametrize("fields", [{"hosts": 8}, {"targets": {}}, {"repetitions": 3}])
    def test_lines_of_a_point_agree_on_what_it_is(self, results, fields):
        with pytest.raises(BrokenLine, match=rf"lines\.jsonl:2: {next(iter(fields))} differs"):
            results(line("penstock", 1.0), line("ddp", 1.0, **fields))

    def test_a_system_is_measured_once_in_a_run(self, results):
        with pytest.raises(BrokenLine, match=r"lines\.jsonl:2: ddp a second time"):
            results(line("ddp", 1.0), line("ddp", 2.0))


class TestVerdicts:
    @pytest.mark.parametrize(("ours_s", "verdict"), [(1.06 * 1.2, "met"), (1.0601 * 1.2, "missed"), (1.1, "met")])
    def test_the_limit(self, results, ours_s, verdict):
        assert verdicts(results(line("penstock", ours_s)))["ideal"] == verdict

    @pytest.mark.parametrize("ideal_s", [0.1, 0.7, 1.1, 1.3])
    def test_the_exact_bar_is_met_whatever_the_rounding(self, results, ideal_s):
        assert verdicts(results(line("penstock", ideal_s * 1.06, ideal_s=ideal_s)))["ideal"] == "met"

    @pytest.mark.parametrize(("peer_s", "verdict"), [(1.25 * 1.3, "met"), (1.2499 * 1.3, "missed"), (1.2, "missed")])
    def test_the_peer(self, results, peer_s, verdict):
        assert verdicts(results(line("penstock", 1.3), line("horovod", peer_s)))["peer"] == verdict

    def test_the_peer_is_the_fastest_exact_one(self, results):
        (found,) = results(
            *(line("alone", 0.5), line("penstock", 1.0), line("penstock-slicing", 0.8), line("ddp-bf16", 0.9)),
            *(line("ddp", 1.9), line("horovod", 1.4)),
        )
        assert fastest_exact_peer(found.points[0]).system == "horovod"
        (peer,) = (judgement for judgement in judge([found]) if judgement.bar == "peer")
        assert (peer.ratio, peer.verdict) == (1.4, "met")

    def test_a_peer_that_was_never_measured_leaves_the_bar_open(self, results):
        found = results(line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3"))
        assert verdicts(found) == {"ideal": "met", "peer": "peers missing", "ddp": "met"}

    @pytest.mark.parametrize(("earlier_s", "verdict"), [(1.51, "met"), (1.5, "peers missing"), (1.2, "peers missing")])
    def test_a_missing_peer_must_have_been_slower_than_the_fastest_one_is(self, results, earlier_s, verdict):
        before = [line("penstock", 1.0, run="1"), line("mxnet-p3", earlier_s, run="1"), line("ddp", 9.0, run="1")]
        found = results(*before, line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3"))
        assert verdicts(found)["peer"] == verdict

    def test_the_last_run_that_measured_a_missing_peer_counts(self, results):
        before = [line("mxnet-p3", step_s, run=run) for run, step_s in (("1", 9.0), ("2", 1.2), ("3", None))]
        found = results(*before, line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3"))
        assert found[0].points[0].results["mxnet-p3"].earlier.run == "2"
        assert verdicts(found)["peer"] == "peers missing"

    def test_each_missing_peer_must_have_been_slower(self, results):
        before = [line("horovod", 1.9, run="1")]
        found = results(*before, line("penstock", 1.0), line("ddp", 1.5), line("horovod"), line("mxnet-p3"))
        assert verdicts(found)["peer"] == "peers missing"

    def test_earlier_runs_are_compared_as_multiples_of_their_own_limit(self, results):
        before = [line("mxnet-p3", 1.4, ideal_s=1.0, run="1")]
        found = results(*before, line("penstock", 1.2), line("ddp", 1.6), line("mxnet-p3"))
        assert verdicts(found)["peer"] == "met"

    @pytest.mark.parametrize(
        "fields",
        [
            {"hosts": 8},
            {"width": 0.5},
            {"network": "big"},
            {"rates_mbit": [500.0] * 4},
            {"compute_s": 0.5},
            {"batch": 64},
            {"schemes": {"fc6": "factors"}},
            {"host": HOST | {"cores": 4}},
            {"sweep": {"hosts": 4}},
            {"busy_cores": 0.06},
            {"commit": "c0ffee+changes"},
        ],
    )
    def test_only_runs_under_the_same_conditions_tell_of_a_missing_peer(self, results, fields):
        found = results(
            line("mxnet-p3", 9.0, run="1", **fields), line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3")
        )
        assert verdicts(found)["peer"] == "peers missing"

    def test_a_quiet_run_of_a_committed_tree_tells_of_a_missing_peer(self, results):
        before = line("mxnet-p3", 9.0, run="1", busy_cores=0.05, commit="01d")
        found = results(before, line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3"))
        assert verdicts(found)["peer"] == "met"

    def test_what_a_run_leaves_out_of_its_scenario_is_missing(self, tmp_path):
        path = tmp_path / "lines.jsonl"
        before = [line("horovod", 9.0, run="1"), line("penstock", 1.0, run="1")]
        path.write_text("".join(json.dumps(one) + "\n" for one in [*before, line("penstock", 1.0), line("ddp", 1.5)]))
        names = ["penstock", "horovod", "mxnet-p3"]
        (found,) = read([path], {"small": [Result(name, TITLES[name], True, "left out", None) for name in names]})
        left_out = {name: result.missing for name, result in found.points[0].results.items() if result.missing}
        assert left_out == {"horovod": "left out", "mxnet-p3": "left out"}
        assert found.points[0].results["horovod"].earlier.run == "1"
        assert verdicts([found])["peer"] == "peers missing", "of P3 nothing is known"

    def test_scenarios_of_the_lab_plan_what_their_files_name(self):
        systems = {result.system: result for result in planned()["resnet50-600-bf16"]}
        assert list(systems) == ["alone", "penstock-bf16", "ddp-bf16", "penstock", "ddp"]
        assert systems["ddp"].missing and systems["ddp"].is_exact_peer and not systems["ddp-bf16"].exact

    def test_an_earlier_run_of_few_repetitions_tells_nothing(self, results):
        few = line("mxnet-p3", 9.0, run="1")
        few["step_s"]["count"] = REPETITIONS_MIN - 1
        found = results(few, line("penstock", 1.0), line("ddp", 1.5), line("mxnet-p3"))
        assert verdicts(found)["peer"] == "peers missing"

    def test_what_is_missing_excuses_no_miss_and_only_exact_peers_count(self, results):
        slow = results(line("penstock", 1.4), line("ddp", 1.5), line("mxnet-p3"))
        assert verdicts(slow)["peer"] == "missed"
        others = [line("ddp-bf16"), line("penstock-store"), line("alone")]
        assert verdicts(results(line("penstock", 1.0), line("ddp", 1.5), *others))["peer"] == "met"

    @pytest.mark.parametrize(("ours_s", "verdict"), [(1.02 * 1.3, "met"), (1.0201 * 1.3, "missed")])
    def test_never_slower_than_ddp(self, results, ours_s, verdict):
        found = results(line("penstock", ours_s, targets={}), line("ddp", 1.3, targets={}))
        assert verdicts(found) == {"ddp": verdict}

    def test_without_ddp_there_is_nothing_to_be_slower_than(self, results):
        assert verdicts(results(line("penstock", 1.0, targets={}), line("horovod", 0.5, targets={}))) == {}

    @pytest.mark.parametrize(
        ("system", "against", "at_most"), [("penstock", "penstock-store", 1.02), ("penstock-bf16", "ddp-bf16", 1.0)]
    )
    @pytest.mark.parametrize(("factor", "verdict"), [(0.9, "met"), (1.0, "met"), (1.0001, "missed")])
    def test_one_system_against_another(self, results, system, against, at_most, factor, verdict):
        bar = {"targets": {"between": [{"system": system, "against": against, "at_most": at_most}]}}
        (found,) = judge(results(line(system, 1.7 * at_most * factor, **bar), line(against, 1.7, **bar)))
        assert (found.bar, found.system, found.against.system, found.verdict) == ("between", system, against, verdict)
        assert found.ratio == pytest.approx(at_most * factor)

    @pytest.mark.parametrize("absent", [False, True])
    @pytest.mark.parametrize("missing", ["penstock-bf16", "ddp-bf16"])
    def test_without_one_of_the_two_systems_it_meets_no_bar(self, results, missing, absent):
        bar = {"targets": {"between": [{"system": "penstock-bf16", "against": "ddp-bf16", "at_most": 1.0}]}}
        there = [line(system, None if system == missing else 1.0, **bar) for system in ("penstock-bf16", "ddp-bf16")]
        scenarios = results(*(one for one in there if not (absent and one["system"] == missing)))
        (found,) = judge(scenarios)
        reason = f"{missing} was not in the run" if absent else f"{TITLES[missing]}: it does not start"
        assert (found.verdict, found.reason) == ("not measured", reason)
        assert row(bars(scenarios), "A small network")[5:] == [reason, "<= 1", "**not measured**"]

    @pytest.mark.parametrize("missing", ["penstock", "ddp"])
    def test_what_is_missing_meets_no_bar(self, results, missing):
        lines = [line(system, None if system == missing else 1.0) for system in ("penstock", "ddp")]
        found = judge(results(*lines))
        of_peers = {judgement.verdict for judgement in found if judgement.bar != "ideal"}
        assert of_peers == {"not measured"}
        reasons = {judgement.bar: judgement.reason for judgement in found}
        assert reasons["ddp"] == f"{TITLES[missing]}: it does not start"
        assert reasons["peer"] == (reasons["ddp"] if missing == "penstock" else "no exact peer was measured")

    def test_few_repetitions_meet_no_bar_but_miss_one(self, results):
        few = {"repetitions": REPETITIONS_MIN - 1}
        found = verdicts(results(line("penstock", 1.0, **few), line("ddp", 1.1, **few)))
        assert found == {"ideal": "too few repetitions", "peer": "missed", "ddp": "too few repetitions"}

    def test_the_recorded_ratio_is_not_believed(self, results):
        assert verdicts(results(line("penstock", 2.0, ratio_ideal=1.0)))["ideal"] == "missed"


class TestTables:
    def test_a_bar_shows_its_ratio_and_spread(self, results):
        text = bars(results(line("penstock", 1.26), line("ddp", 1.5)))
        cells = row(text.split("### Never")[0], "A small network")
        assert cells[1:4] == ["1.050 (1.040 to 1.071)", "<= 1.06", "met"]
        assert cells[4:] == ["DDP (gloo): 1.500 s", "1.190", ">= 1.25", "**missed**"]

    def test_peers_that_were_not_in_the_run_are_named_below_their_bar(self, results):
        before = [line("horovod", 1.8, run="01d run")]
        text = bars(results(*before, line("penstock", 1.0), line("ddp", 1.5), line("horovod"), line("mxnet-p3")))
        cells = row(text.split("### Never")[0], "A small network")
        assert cells[4:] == ["DDP (gloo): 1.500 s <sup>1</sup>", "1.500", ">= 1.25", "**peers missing**"]
        known = "Horovod: 1.500 of T* in the run of 01d run; MXNet, P3: never measured under these conditions"
        assert f"- <sup>1</sup> Not in that run: {known}.\n" in text
        assert "1 peers missing" in text
        assert "<sup>" not in bars(results(line("penstock", 1.0), line("ddp", 1.5)))

    def test_one_system_against_another_shows_both_steps_and_their_ratio(self, results):
        bar = {"targets": {"between": [{"system": "penstock-bf16", "against": "ddp-bf16", "at_most": 1.0}]}}
        text = bars(results(line("penstock-bf16", 1.21, **bar), line("ddp-bf16", 1.1, **bar)))
        cells = row(text, "A small network")
        assert cells[1:5] == ["Penstock, bf16 (not exact)", "1.210", "DDP (gloo), bf16 hook (not exact)", "1.100"]
        assert cells[5:] == ["1.100", "<= 1", "**missed**"]

    def test_a_sweep_shows_steps_beside_all_limits(self, results):
        lines = []
        for hosts, ours_s in {2: 1.2, 8: 1.32}.items():
            fields = {"sweep": {"hosts": hosts}, "hosts": hosts, "targets": {}}
            lines += [line("alone", 1.0, **fields), line("penstock", ours_s, **fields)]
        text = all_pages(results(*lines)).split("<details>")[0]
        assert row(text, "step, s")[1:] == ["2 hosts", "8 hosts"]
        assert row(text, "one worker")[1:] == ["1.000", "1.000"]
        assert row(text, "Penstock")[1:] == ["1.200 (1.00)", "1.320 (1.10)"]
        assert row(text, "T* ")[1:] == ["1.200", "1.200"]
        assert row(text, "T_wfbp")[1:] == ["1.500", "1.500"]
        assert row(text, "T_serial")[1:] == ["2.000", "2.000"]

    def test_schemes_other_than_the_store_are_named(self, results):
        chosen = {"schemes": {"fc6": "factors", "embed": "pairs", "fc7": "factors"}}
        text = all_pages(results(line("penstock", 1.2, **chosen)))
        assert "Schemes other than the store: factors for `fc6`, `fc7`; pairs for `embed`." in text
        assert "Schemes other" not in all_pages(results(line("penstock", 1.2)))

    def test_what_ours_waits_for_is_named_longest_first(self, results):
        stalls = {"layer1": 0.002, "fc": 0.0131, "conv1": 0.0405, "layer2": 0.001, "layer3": 0.0}
        waits = {"preemptions_per_step": 12.5, "stall_by_layer_s": stalls}
        others = {"stall_by_layer_s": {"last": 9.0}}
        text = all_pages(results(line("penstock", 1.3, **waits), line("ddp", 1.4, **others)))
        longest = "`conv1` 40 ms, `fc` 13 ms, `layer1` 2 ms"
        assert f"Ours: 12.5 preemptions a step, waits longest for {longest}." in text
        assert "waits longest" not in all_pages(results(line("penstock", 1.3)))
        sweep = [line("penstock", 1.3, sweep={"hosts": hosts}, hosts=hosts, **waits) for hosts in (2, 8)]
        assert f"- 8 hosts: 12.5 preemptions a step, waits longest for {longest}" in all_pages(results(*sweep))

    def test_the_networks_are_listed_with_their_exact_size(self, results):
        text = index(results(line("penstock", 1.2)))
        assert row(text, "`googlenet`")[1:5] == ["6,998,552", "116", "128", "257.0"]
        assert row(text, "`vgg19-22k`")[1] == "229,052,817"

    def test_never_slower_shows_the_worst_point(self, results):
        lines = []
        for rate, ours_s in {250: 1.0, 500: 1.4, 1000: 1.2}.items():
            fields = {"sweep": {"rate_mbit": rate}, "targets": {}}
            lines += [line("penstock", ours_s, **fields), line("ddp", 1.3, **fields)]
        text = bars(results(*lines))
        cells = row(text, "A small network, 500 Mbit/s")
        assert cells[1:] == ["3 of 3", "1.400", "1.300", "1.077", "**missed at 1**"]

    def test_never_slower_is_open_while_a_point_is_missing(self, results):
        lines = []
        for hosts, ddp_s in {2: 1.5, 4: None}.items():
            fields = {"sweep": {"hosts": hosts}, "hosts": hosts, "targets": {}}
            lines += [line("penstock", 1.0, **fields), line("ddp", ddp_s, **fields)]
        cells = row(bars(results(*lines)), "A small network, 2 hosts")
        assert cells[1] == "1 of 2"
        assert cells[-1] == "**not measured**: DDP (gloo): it does not start"

    def test_what_is_faster_is_listed_and_bold(self, results):
        found = results(line("penstock", 1.26), line("ddp-bf16", 1.1), line("horovod", 1.2), line("ddp", 1.3))
        text = all_pages(found)
        (listed,) = (one for one in bars(found).splitlines() if one.startswith("- A small network"))
        assert "ours 1.260 s, DDP (gloo), bf16 hook (not exact) 1.100 s, **Horovod 1.200 s**" in listed
        assert row(text, "Horovod")[1].startswith("**1.200")
        assert row(text, "DDP (gloo) |")[1].startswith("1.300")

    def test_a_system_shows_all_that_was_measured(self, results):
        text = all_pages(results(line("alone", 1.0), line("penstock", 1.25, ideal_s=1.0)))
        assert row(text, "Penstock")[1:][:5] == ["1.250 (1.238 to 1.275)", "1.250", "3.20", "102.4", "0.250"]
        assert row(text, "Penstock")[6:] == ["3.25", "60.0, 50.0"]
        assert "Limits: T*: 1.000 s; T_wfbp, a barrier before forward: 1.500 s; T_serial, no overlap: 2.000 s" in text
        assert row(text, "one worker")[2] == "-"

    def test_a_missing_peer_is_named_with_its_reason_and_points(self, results):
        text = all_pages(results(line("penstock", 1.0), line("mxnet-p3", missing="no | compiler")))
        assert "- **missing**: MXNet, P3: no \\| compiler" in text
        sweep = [line("mxnet-p3", time, sweep={"hosts": n}, hosts=n) for n, time in ((2, 1.0), (8, None))]
        assert "- **missing** at 8 hosts: MXNet, P3: it does not start" in all_pages(results(*sweep))

    def test_scenarios_without_a_measurement_are_listed(self, results):
        found = results(line("penstock", 1.0))
        assert "**Not measured yet**: `big`, `other`." in bars(found, names=["small", "other", "big"])
        assert "Not measured yet" not in bars(found, names=["small"])

    def test_several_machines_are_told_apart(self, results):
        other = {"scenario": "other", "host": HOST | {"cpu": "another cpu"}}
        text = all_pages(results(line("penstock", 1.0), line("penstock", 1.0, **other)))
        assert "on a cpu, 2 cores" in text
        assert "on another cpu, 2 cores" in text

    def test_what_the_hypervisor_withheld_is_that_of_the_worst_repetition(self, results):
        taken = [{"median": 0.01, "high": high} for high in (0.02, 0.31, 0.0)]
        systems = zip(("alone", "penstock", "ddp"), taken, strict=True)
        text = all_pages(results(*(line(system, 1.0, stolen_cores=cores) for system, cores in systems)))
        assert "; its hypervisor withheld at most 0.31 cores in a repetition." in text
        assert "hypervisor" not in all_pages(results(line("penstock", 1.0)))


def without(name):
    return lambda made: made.pop(name)


def setting(*path):
    *parents, name, value = path

    def sets(made):
        for parent in parents:
            made = made[parent]
        made[name] = value

    return sets


class TestBrokenLines:
    @pytest.mark.parametrize(
        ("breaks", "named"),
        [
            (without("run"), "missing required field `run`"),
            (without("step_s"), "missing required field `step_s`"),
            (without("speedup"), "missing required field `speedup`"),
            (setting("step_s", "median", "1.2"), "Expected `float`, got `str` - at `step_s.median`"),
            (setting("step_s", "median", 0), "Expected `float` > 0.0 - at `step_s.median`"),
            (setting("step_s", "low", 2.0), "low is 2, above quarter with 0.995 - at `step_s`"),
            (setting("limits", "ideal_s", float("nan")), "JSON is malformed"),
            (setting("limits", "ideal_s", -1), "Expected `float` >= 0.0 - at `limits.ideal_s`"),
            (setting("bytes_per_step", "sent", [1, "2"]), "got `str` - at `bytes_per_step.sent[1]`"),
            (setting("exact", "yes"), "Expected `bool`, got `str` - at `exact`"),
            (setting("hosts", 2.5), "Expected `int`, got `float` - at `hosts`"),
            (setting("benchmark", "overhead"), "'overhead' - at `benchmark`"),
            (setting("scenario", "../up"), "- at `scenario`"),
            (setting("targets", {"ideal": 1.06}), "unknown field `ideal` - at `targets`"),
            (setting("targets", {"between": [1]}), "Expected `object`, got `int` - at `targets.between[0]`"),
            (
                setting("targets", {"between": [{"system": "a", "against": "b"}]}),
                "missing required field `at_most` - at `targets.between[0]`",
            ),
            (setting("schemes", {"fc6": 1}), "Expected `str`, got `int` - at `schemes[...]`"),
            (setting("sweep", {"hosts": 2, "rate_mbit": 1}), "length <= 1 - at `sweep`"),
            (
                setting("network_use", {"bin_s": 1, "sent_mbit": [1], "received_mbit": []}),
                "received_mbit has 0 bins, sent_mbit 1 - at `network_use`",
            ),
        ],
    )
    def test_the_message_names_file_line_and_field(self, results, breaks, named):
        broken = copy.deepcopy(line("ddp", 1.0))
        breaks(broken)
        with pytest.raises(BrokenLine, match=rf"lines\.jsonl:2: .*{re.escape(named)}"):
            results(line("penstock", 1.0), broken)

    @pytest.mark.parametrize("text", ["{", "[]", "lab"])
    def test_what_is_no_object_is_named_too(self, tmp_path, text, capsys):
        path = tmp_path / "torn.jsonl"
        path.write_text(f"{json.dumps(line('penstock', 1.0))}\n\n{text}\n")
        assert main(["--json", str(path)]) == 1
        assert f"{path}:3: " in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    """A folder like docs/benchmarks with one sweep and one scenario."""
    use = {"bin_s": 0.05, "sent_mbit": [900.0, 0.0], "received_mbit": [10.0, 950.0], "step_s": 1.0}
    lines = [line("alone", 1.0), line("penstock", 1.25, network_use=use), line("ddp", 1.9), line("mxnet-p3")]
    for rate in (250, 1000):
        fields = {"scenario": "sweep", "sweep": {"rate_mbit": rate}, "targets": {}}
        lines += [line("penstock", 1.1, **fields), line("ddp", 2.0, **fields)]
    lines += [line("penstock", 1.1, scenario="sizes", sweep={"slice_kb": size}) for size in (64, 512)]
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return tmp_path


class TestWrite:
    def test_every_system_has_a_look_of_its_own(self):
        from lab.plots import STYLES

        assert set(STYLES) == set(SYSTEMS)
        assert len({style.color for style in STYLES.values()}) == len(STYLES)
        assert len({style.marker for style in STYLES.values()}) == len(STYLES)

    @pytest.mark.long
    def test_pictures_and_tables_are_written_and_the_same_again(self, folder):
        page = folder / "README.md"
        page.write_bytes(f"# Before\r\n{BEGIN}\r\nold\n{END}\n\nafter\r\n".encode())
        written = write(folder)
        drawn = {path.stem for path in written if path.suffix == ".png"}
        kinds = {"stall-small", "network-small", "speed-up-sweep", "stall-sweep", "slices-sizes", "stall-sizes"}
        assert drawn == kinds
        pages = {path.name: path.read_text() for path in written if path.parent.name == "lab" and path.suffix == ".md"}
        assert list(pages) == ["small.md", "sweep.md", "sizes.md", "README.md"] and written[-2] == page
        pictures = [path for path in written if path.suffix == ".png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 150_000 for path in pictures)
        text = page.read_bytes().decode()
        assert text.startswith(f"# Before\r\n{BEGIN}\n")
        assert text.endswith(f"\n{END}\n\nafter\r\n")
        assert "old" not in text
        assert {name for name in kinds if f"(lab/{name}.png)" in text} == {"speed-up-sweep", "slices-sizes"}
        assert all(f"({name}.png)" in pages[name.split("-")[-1] + ".md"] for name in kinds)
        assert "(lab/small.md)" in text
        assert pages["small.md"].startswith("# small\n\n**A small network**: ours 1.250 s, 1.042 of T*.\n")
        assert row(pages["README.md"], "small](small.md)")[1:] == ["A small network", "1.250", "1.042"]
        first = {path: path.read_bytes() for path in written}
        assert write(folder) == written
        assert {path: path.read_bytes() for path in written} == first

    @pytest.mark.parametrize("before", ["", "# Page", "# Page\n"])
    def test_missing_markers_are_added_at_the_end_once(self, folder, before, no_pictures):
        page = folder / "README.md"
        page.write_text(before)
        write(folder)
        first = page.read_text()
        assert first.startswith(before)
        assert first.rstrip().endswith(END)
        write(folder)
        assert page.read_text() == first
        assert first.count(BEGIN) == 1

    @pytest.mark.parametrize("marks", [BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"])
    def test_torn_markers_change_nothing(self, folder, marks, no_pictures, capsys):
        page = folder / "README.md"
        page.write_text(f"# Page\n{marks}\nmine\n")
        assert main(["--folder", str(folder)]) == 1
        assert str(page) in capsys.readouterr().err
        assert page.read_text() == f"# Page\n{marks}\nmine\n"

    @pytest.fixture
    def no_pictures(self, monkeypatch):
        from lab import plots

        monkeypatch.setattr(plots, "draw", lambda scenarios, folder: [])


class TestCommand:
    def test_json_prints_the_verdicts_and_writes_nothing(self, folder, capsys):
        before = sorted(folder.rglob("*"))
        assert main(["--json", "--folder", str(folder)]) == 0
        printed = json.loads(capsys.readouterr().out)
        found = {(one["scenario"], str(one["sweep"]), one["bar"]): one for one in printed["verdicts"]}
        assert found["small", "None", "peer"]["against"] == "ddp"
        assert found["small", "None", "peer"]["ratio"] == pytest.approx(1.52)
        assert found["sweep", "{'rate_mbit': 250.0}", "ddp"]["verdict"] == "met"
        assert found["sizes", "{'slice_kb': 64.0}", "peer"]["verdict"] == "not measured"
        assert found["small", "None", "peer"]["peers_missing"] == ["mxnet-p3"]
        counts = {"met": 6, "missed": 0, "peers missing": 1, "too few repetitions": 0, "not measured": 2}
        assert printed["count"] == counts
        assert sorted(folder.rglob("*")) == before

    def test_nothing_to_report_is_an_error_that_says_so(self, tmp_path, capsys):
        assert main(["--folder", str(tmp_path)]) == 1
        assert "no measurements" in capsys.readouterr().err

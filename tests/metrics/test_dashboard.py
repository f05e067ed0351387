"""The Grafana dashboard: what it asks for there is, with the labels by which it asks.

A real Prometheus answers it in test_metered_jobs.py.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from counting_engine import CountingEngine
from prometheus_client import CollectorRegistry

import penstock as ps
from penstock.metrics.families import RankCollector
from penstock.metrics.step_histogram import StepHistogram
from penstock.tracing.moments import forget_moments

DASHBOARD = json.loads(
    (Path(__file__).resolve().parents[2] / "examples" / "grafana-dashboard.json").read_text(encoding="utf-8")
)
PANELS = DASHBOARD["panels"]
VARIABLES = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
OF_GRAFANA = {"__rate_interval"}
WIDTH = 24


@pytest.fixture(scope="module")
def labels():
    """By name of a sample, its labels."""
    engine = CountingEngine()
    registry = CollectorRegistry()
    registry.register(RankCollector(engine, ps.Options(world_size=2), "0123abcd", StepHistogram()))
    found = {sample.name: set(sample.labels) for family in registry.collect() for sample in family.samples}
    forget_moments(engine)
    return found


def asked(expression):
    """Each selector of an expression: a metric, and the labels in its braces."""
    for name, braces in re.findall(r"\b(penstock_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", braces))


def expressions():
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def test_selectors_are_found():
    expression = 'sum by (rank) (rate(penstock_a_total{run=~"$run", rank!="3"}[5m])) / penstock_b'
    assert list(asked(expression)) == [("penstock_a_total", {"run", "rank"}), ("penstock_b", set())]


def test_the_dashboard_asks_for_metrics_that_there_are_by_labels_that_they_have(labels):
    names = set()
    for title, expression, _ in expressions():
        selectors = list(asked(expression))
        assert selectors, (title, expression)
        for name, by in selectors:
            assert name in labels, f"{title}: there is no metric {name}"
            assert by <= labels[name], f"{title}: {name} has no label {by - labels[name]}"
            names.add(name)
        for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
            for label in re.split(r",\s*", grouped):
                assert all(label in labels[name] for name, _ in selectors), (title, label)
    of_steps = {name for name in labels if name.startswith("penstock_step_seconds")}
    shown_otherwise = {"penstock_info", "penstock_sent_frames_total", "penstock_received_frames_total"}
    assert names == set(labels) - shown_otherwise and of_steps <= names


def test_legends_name_labels_that_are_left(labels):
    for title, expression, legend in expressions():
        grouped = re.search(r"\bby \(([^)]*)\)", expression)
        left = set(re.split(r",\s*", grouped[1])) - {"le"} if grouped else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == left, (title, legend)


def test_variables_are_defined_and_ask_for_labels_that_there_are(labels):
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?(\w+)", text))
    assert used == {*VARIABLES} | OF_GRAFANA
    for name in ("run", "rank"):
        definition = VARIABLES[name]["definition"]
        metric, label = re.fullmatch(r"label_values\((penstock_\w+)(?:\{.*\})?, (\w+)\)", definition).groups()
        assert label == name and label in labels[metric]
        assert VARIABLES[name]["query"]["query"] == definition


def test_panels_have_numbers_texts_and_places_of_their_own():
    assert Counter(panel["id"] for panel in PANELS).most_common(1)[0][1] == 1
    taken = set()
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert Counter(target["refId"] for target in panel["targets"]).most_common(1)[0][1] == 1
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < WIDTH, panel["title"]
        taken |= cells

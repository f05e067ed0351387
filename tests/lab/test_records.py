"""What a benchmark knows of the machine that it runs on."""

import json
import os

import pytest

from lab import records


def test_what_the_hypervisor_took_is_apart_from_idle_time_and_work(tmp_path, monkeypatch):
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text("cpu  10 20 30 4000 500 60 70 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n", encoding="ascii")
    monkeypatch.setattr(records, "PROCESSORS", tmp_path / "stat")
    assert records.stolen_seconds() == 8 * tick_s


class TestPublish:
    @pytest.fixture
    def publish(self, tmp_path):
        """Publish a record; returns what the file then has of each record's fields that are named."""
        lines = tmp_path / "new" / "lines.jsonl"

        def add(record, **options):
            records.publish(record, **{"benchmark": "sums", "seed": 1, "as_json": False, "lines": lines, **options})
            return [
                {name: one[name] for name in ("hosts", "mb", "ms") if name in one}
                for one in map(json.loads, lines.read_text(encoding="utf-8").splitlines())
            ]

        return add

    def test_the_newest_record_of_a_scenario_stays_alone(self, publish):
        scenario = {"scenario": ("hosts", "mb")}
        publish({"hosts": 2, "mb": None, "ms": 1}, **scenario)
        publish({"hosts": 4, "mb": 8, "ms": 2}, **scenario)
        assert publish({"hosts": 2, "ms": 3}, **scenario) == [{"hosts": 4, "mb": 8, "ms": 2}, {"hosts": 2, "ms": 3}]

    def test_another_benchmark_in_the_file_is_left_alone(self, publish):
        publish({"hosts": 2, "ms": 1}, benchmark="others", scenario=("hosts",))
        assert len(publish({"hosts": 2, "ms": 2}, scenario=("hosts",))) == 2

    def test_without_a_scenario_all_stay(self, publish):
        publish({"hosts": 2, "ms": 1})
        assert [one["ms"] for one in publish({"hosts": 2, "ms": 2})] == [1, 2]


def test_of_several_records_the_last_counts(tmp_path):
    (tmp_path / "lines.jsonl").write_text('{"kind": "a", "ms": 1}\n{"kind": "b", "ms": 2}\n{"kind": "a", "ms": 3}\n')
    found = records.recorded(tmp_path / "lines.jsonl", "kind")
    assert {kind: record["ms"] for kind, record in found.items()} == {"a": 3, "b": 2}

"""What a benchmark knows of the machine that it runs on."""

import os

from lab import records


def test_what_the_hypervisor_took_is_apart_from_idle_time_and_work(tmp_path, monkeypatch):
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text("cpu  10 20 30 4000 500 60 70 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n", encoding="ascii")
    monkeypatch.setattr(records, "PROCESSORS", tmp_path / "stat")
    assert records.stolen_seconds() == 8 * tick_s

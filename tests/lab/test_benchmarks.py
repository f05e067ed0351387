"""What benchmarks judge by, on numbers made up: how even bytes are."""

import json

import pytest

from benchmarks import load_balance

EVEN = [100.0] * 4


class TestLoadBalance:
    @pytest.mark.parametrize("odd", [94.0, 107.0])
    @pytest.mark.parametrize("direction", ["sent", "received"])
    def test_a_host_below_the_mean_counts_as_one_above_and_each_direction_for_itself(self, odd, direction):
        ways = {"sent": EVEN, "received": EVEN} | {direction: [100.0, 100.0, 100.0, odd]}
        mean = (300 + odd) / 4
        assert load_balance.uneven(**ways) == pytest.approx(abs(odd / mean - 1))

    def test_directions_do_not_even_each_other_out(self):
        assert load_balance.uneven([110.0, 90.0], [90.0, 110.0]) == pytest.approx(0.1)

    def test_even_is_zero(self):
        assert load_balance.uneven(EVEN, [5.0, 5.0]) == 0

    def test_every_recorded_line_is_drawn_also_one_without_the_new_field(self, tmp_path):
        lines = tmp_path / "lines.jsonl"
        old = [line for line in load_balance.LINES.read_text(encoding="utf-8").splitlines() if line]
        assert any("furthest_from_mean" not in json.loads(line) for line in old)
        lines.write_text("\n".join(old), encoding="utf-8")
        load_balance.draw(lines, lines.with_suffix(".png"))
        assert lines.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    def test_computed_bytes_are_those_of_the_store_by_hand(self):
        parameters, hosts = 143_667_240, 8
        store_mb = 2 * (hosts - 1) / hosts * parameters * 4 / 1e6
        assert load_balance.computed(hosts).startswith(f"store {store_mb:.1f} MB, hybrid ")

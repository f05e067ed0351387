"""What benchmarks judge by, on numbers made up: how even bytes are, whether the exact run equals one process."""

import argparse
import json
import math

import pytest

from benchmarks import collectives, convergence, load_balance, local_quality, local_speed, tensor_collectives
from lab.session import Turn

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

    def test_what_is_recorded_is_drawn(self, tmp_path):
        picture = tmp_path / "bytes.png"
        load_balance.draw(load_balance.LINES, picture)
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_computed_bytes_are_those_of_the_store_by_hand(self):
        parameters, hosts = 143_667_240, 8
        store_mb = 2 * (hosts - 1) / hosts * parameters * 4 / 1e6
        assert load_balance.computed(hosts).startswith(f"store {store_mb:.1f} MB, hybrid ")


def points(last_error):
    return [{"step": 1, "test_error": 0.9}, {"step": 500, "test_error": last_error}]


class TestConvergence:
    def test_what_was_recorded_equals_one_process(self):
        found = {}
        for line in convergence.LINES.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["kind"]] = record
        distance = found["one process"]["parameters_differ_from_exact"]
        assert convergence.judge(distance, found["exact"]["points"], found["one process"]["points"]) == []

    def test_rounding_passes_and_what_training_makes_of_it(self):
        assert convergence.judge({"1": 1e-7, "500": 0.5}, points(0.34), points(0.349)) == []

    @pytest.mark.parametrize("distance", [1.1e-7, math.nan])
    def test_the_first_step_must_agree(self, distance):
        (complaint,) = convergence.judge({"1": distance, "500": 0.0}, points(0.34), points(0.34))
        assert "after step 1, at most 1e-07" in complaint

    @pytest.mark.parametrize("error", [0.329, 0.351, math.nan])
    def test_the_last_error_must_agree(self, error):
        (complaint,) = convergence.judge({"1": 0.0, "500": 0.0}, points(error), points(0.34))
        assert complaint == f"last test errors are {error:.4f} and 0.3400, at most 0.01 apart"

    @pytest.mark.parametrize(("kinds", "distance", "status"), [((), 1e-9, 0), ((), 1e-6, 1), (("exact",), 1e-6, 0)])
    def test_the_status_tells_what_was_judged(self, tmp_path, monkeypatch, capsys, kinds, distance, status):
        words = ["--kinds", *(kinds or ("exact", "one process"))]
        monkeypatch.setattr("sys.argv", ["convergence", *words, "--lines", str(tmp_path / "lines.jsonl")])
        monkeypatch.setattr(convergence, "decode", lambda source, target: None)
        monkeypatch.setattr(convergence, "launch", lambda kind, place, args: points(0.34))
        monkeypatch.setattr(convergence, "distances", lambda one, two, steps: {"1": distance, "500": 0.04})
        monkeypatch.setattr(convergence, "draw", lambda lines, picture: None)
        assert convergence.main() == status
        assert ("the exact run does not equal one process" in capsys.readouterr().err) is (status == 1)
        assert (tmp_path / "lines.jsonl").read_text().count("\n") == len(words) - 1


class TestLocalQuality:
    """Losses made up: of a seed, and of what its arm loses by."""

    @pytest.fixture
    def lines(self, tmp_path, monkeypatch):
        def run(task, arm, data, seed, arguments):
            held_out = (2.0 + seed) * (1.0 if arm.kind == "synchronous" else 1.01 + 0.02 * seed)
            ends = [{"step": step, "seconds": 1.0 * step, "held_out": held_out} for step in (5, 10)]
            facts = {"task": task, "arm": arm.name, "mbit": 0.0, "steps": 10, "workers": 4}
            return {**facts, "bytes_per_step": 1000, "seconds": 10.0, "points": ends}

        monkeypatch.setattr(local_quality, "run", run)
        return tmp_path / "lines.jsonl"

    def status(self, monkeypatch, lines, *words):
        text = lines.parent / "text"
        text.touch()
        words = ("characters", "--data", str(text), "--steps", "10", "--json-lines", str(lines), *words)
        monkeypatch.setattr("sys.argv", ["local_quality", *words])
        return local_quality.main()

    @pytest.mark.parametrize(("seeds", "status"), [("0", 0), ("0 1", 0), ("0 1 2", 1), ("1", 1)])
    def test_quality_of_local_updates_is_judged_by_seed(self, monkeypatch, capsys, lines, seeds, status):
        assert self.status(monkeypatch, lines, "--seeds", *seeds.split()) == status
        assert len(lines.read_text().splitlines()) == len(seeds.split()) * len(local_quality.ARMS["characters"])
        table = capsys.readouterr().out
        assert f"Seeds {', '.join(seeds.split())}." in table
        assert table.count("| diloco, every") == 16
        monkeypatch.setattr("sys.argv", ["local_quality", "--draw", str(lines)])
        assert local_quality.main() == 0
        assert lines.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    def test_what_is_recorded_is_not_measured_again_unless_asked(self, monkeypatch, lines):
        arms = ("--arms", "synchronous", "diloco, every 30")
        self.status(monkeypatch, lines, "--seeds", "0", *arms)
        first = lines.read_text()
        monkeypatch.setattr(local_quality, "run", lambda *_: pytest.fail("it is in the file"))
        assert self.status(monkeypatch, lines, "--seeds", "0", *arms) == 0
        assert lines.read_text() == first
        with pytest.raises(pytest.fail.Exception):
            self.status(monkeypatch, lines, "--seeds", "0", "--again", *arms)

    def test_an_arm_that_is_none_is_named(self, monkeypatch, capsys, lines):
        with pytest.raises(SystemExit):
            self.status(monkeypatch, lines, "--arms", "diloco, every 31")
        assert "--arms diloco, every 31: expected some of synchronous, diloco, every 1," in capsys.readouterr().err


def turn_of(*ranks):
    """A turn whose steps took so long, by rank."""
    return Turn(step_s=1.0, seconds=list(ranks), cpu_s=0.5, sent=[1e6, 3e6], received=[], stolen_cores=0.0, stats={})


class TestLocalSpeed:
    CHOSEN = argparse.Namespace(
        mbit=50.0,
        step_ms=1000.0,
        async_mbit=1000.0,
        async_step_ms=3000.0,
        sync_every=30,
        fragments=6,
        delay=2,
        wire="int8",
    )
    QUICK = ([1.0, 1.0, 1.0],) * 4

    def arm(self, name):
        return next(arm for arm in local_speed.arms(self.CHOSEN) if arm.name == name)

    def test_the_slowest_host_counts_and_the_longest_step(self):
        arm = self.arm(local_speed.STREAMING)
        found = local_speed.compared(arm, turn_of(*self.QUICK[1:], [1.0, 1.5, 1.25]), turn_of(*self.QUICK))
        assert found.ratio == pytest.approx(1 / 1.25)
        assert found.stall == pytest.approx(0.5)
        assert (found.usual_s, found.longest_s, found.megabytes) == (1.0, 1.5, 3.0)
        assert found.tokens_per_s == pytest.approx(12 * 1024 * (3 + 1 / 1.25))

    def test_stalls_are_beyond_a_usual_step_alone_whatever_is_usual_with_others(self):
        arm = self.arm(local_speed.STREAMING)
        found = local_speed.compared(arm, turn_of(*[[1.2] * 3] * 4), turn_of(*self.QUICK))
        assert found.stall == pytest.approx(0.2)

    def test_of_a_slow_host_only_the_others_count(self):
        turn = turn_of(*self.QUICK[1:], [4.0] * 3)
        assert local_speed.compared(self.arm("async, one slow"), turn, turn_of(*self.QUICK)).ratio == 1.0
        assert local_speed.compared(self.arm("async"), turn, turn_of(*self.QUICK)).ratio == 0.25

    @pytest.mark.parametrize(
        ("ratio", "stall", "slow", "missed"),
        [
            (0.95, 0.1, 0.95, []),
            (0.94, 0.1, 0.95, ["speed of DiLoCo"]),
            (0.95, 0.11, 0.95, ["stalls of DiLoCo"]),
            (0.95, 0.1, 0.94, ["speed beside a slow host"]),
        ],
    )
    def test_status_table_and_record_say_what_is_missed(
        self, tmp_path, monkeypatch, capsys, ratio, stall, slow, missed
    ):
        wanted = {
            "DiLoCo, streaming (50 Mbit/s, 1 s)": (ratio, stall),
            "async, one slow (1000 Mbit/s, 3 s)": (slow, 3.0),
        }

        def measure(run):
            for arm in run.arms:
                name = arm.title
                part, longest = wanted.get(name, (0.5, 2.0))
                # The median counts of speeds, and the highest of stalls.
                two = [(part - 0.01, -0.01), (part + 0.01, longest)]
                run.turns[name] = [local_speed.Measured(100.0, r, 1.0, 1.0 + s, s, 1.5, 0.5) for r, s in two]
            run.turns.pop("torchft DiLoCo (50 Mbit/s, 1 s)")
            run.missing["torchft DiLoCo (50 Mbit/s, 1 s)"] = "not installed"

        monkeypatch.setattr(local_speed.Run, "measure", measure)
        lines = tmp_path / "lines.jsonl"
        monkeypatch.setattr("sys.argv", ["local_speed", "--json-lines", str(lines)])
        assert local_speed.main() == (1 if missed else 0)
        (record,) = map(json.loads, lines.read_text().splitlines())
        assert [name for name, met in record["verdicts"].items() if not met] == missed
        assert len(record["verdicts"]) == 3
        assert {"commit", "seed", "host", "step_ms"} <= record.keys()
        said = capsys.readouterr().out
        assert said.count("MISSED") == len(missed)
        assert f"| DiLoCo, streaming (50 Mbit/s, 1 s) | 100 | {ratio:.3f} (" in said
        assert "| torchft DiLoCo (50 Mbit/s, 1 s) | missing: not installed |" in said

    def test_what_is_not_measured_is_not_judged(self):
        assert local_speed.verdicts({"DiLoCo (50 Mbit/s, 1 s)": {}}, *local_speed.places(self.CHOSEN)) == {}

    def test_a_turn_of_local_updates_has_whole_rounds(self):
        for arm in local_speed.arms(self.CHOSEN):
            assert arm.steps % arm.options.get("sync_every", arm.steps) == 0

    def test_each_place_has_an_arm_alone_to_begin_with_and_none_is_measured_for_nothing(self):
        for chosen, count in ((None, 2), (["async"], 2), (["DiLoCo"], 1)):
            there = local_speed.Run(argparse.Namespace(**vars(self.CHOSEN), arms=chosen)).arms
            assert [arm.name for arm in there].count("alone") == count
            places = [arm.place for arm in there]
            assert all(there[places.index(place)].name == "alone" for place in places)

    def test_an_arm_that_is_none_is_named(self, monkeypatch, capsys):
        monkeypatch.setattr("sys.argv", ["local_speed", "--arms", "DiLoCo, slow"])
        with pytest.raises(SystemExit):
            local_speed.main()
        assert "--arms DiLoCo, slow: expected some of alone, synchronous, bf16, DiLoCo," in capsys.readouterr().err


class TestCollectives:
    def test_pages_are_what_the_records_give(self, tmp_path, monkeypatch):
        for source in collectives.FOLDER.iterdir():
            if source.suffix in (".jsonl", ".md"):
                (tmp_path / source.name).write_bytes(source.read_bytes())
        monkeypatch.setattr("sys.argv", ["collectives", "report", "--folder", str(tmp_path)])
        assert collectives.main() == 0
        pages = sorted(page.name for page in collectives.FOLDER.glob("*.md"))
        assert len(pages) == 4
        for page in pages:
            assert (tmp_path / page).read_text(encoding="utf-8") == (collectives.FOLDER / page).read_text("utf-8"), page
        assert (tmp_path / "predicted.png").exists()


def tensors(megabytes, **medians):
    """What a run of `benchmarks.tensor_collectives` records of one point, in as much as is shown."""
    names = {"rings": "two rings", "inside": "mpich inside"}
    arms = {
        names.get(arm, arm): {"ms": {"median": ms, "quarter": 0.9 * ms, "three_quarters": 1.1 * ms}}
        for arm, ms in medians.items()
    }
    return {"hosts": 2, "vectors": 4, "megabytes": megabytes, "rate_mbit": None, "arms": arms}


class TestTensorCollectives:
    def test_the_bar_is_on_the_best_of_ours(self):
        assert tensor_collectives.is_met(tensors(4.0, rings=3.0, call=2.0, gloo=2.5, mpich=2.1))
        assert not tensor_collectives.is_met(tensors(4.0, rings=3.0, call=2.0, gloo=2.5, mpich=1.9))
        assert tensor_collectives.is_met(tensors(4.0, call=2.0, gloo=2.5))

    def test_page_and_picture_are_what_the_records_give(self, tmp_path, monkeypatch):
        records = [
            tensors(4.0, rings=3.0, call=2.0, inside=2.2, gloo=2.5),
            tensors(64.0, rings=30.0, call=20.0, gloo=16.0),
        ]
        (tmp_path / "tensors.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "README.md").write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
        monkeypatch.setattr("sys.argv", ["tensor_collectives", "report", "--folder", str(tmp_path)])
        assert tensor_collectives.main() == 0
        page = (tmp_path / "README.md").read_text()
        assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
        assert "| hosts | vectors | MB of each | two rings | call | mpich inside | gloo | best" in page
        assert "| 2 | 4 | 4 | 3.0 | **2.0** | 2.2 | 2.5 | 0.80 |" in page
        assert "| 2 | 4 | 64 | 30.0 | 20.0 | missing | **16.0** | 1.25 |" in page
        assert (tmp_path / "tensors.png").read_bytes().startswith(b"\x89PNG")

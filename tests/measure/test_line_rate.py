"""`penstock measure line-rate` with processes of this machine, as a user starts it."""

import json
import re
import subprocess
import sys

import pytest

LIMIT_S = 120


def measure(*arguments, code=0):
    command = [sys.executable, "-m", "penstock.cli", "measure", "line-rate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_all_pairs_are_measured_in_both_directions(tmp_path):
    picture = tmp_path / "rates.png"
    done = measure("--local", "3", "--largest", "262144", "--json", "--plot", str(picture))
    result = json.loads(done.stdout)
    assert len(result["ranks"]) == 3 and result["interface"] == "lo"
    assert result["sizes"] == [4**exponent for exponent in range(10)]
    ends = {(link["source"], link["target"]) for link in result["links"]}
    assert len(ends) == len(result["links"]) == 6
    for link in result["links"]:
        assert 0 < link["latency_s"] < 1 and link["bytes_per_s"] > 1e5
        assert [int(size) for size in link["seconds"]] == result["sizes"]
        assert all(0 < seconds < 10 for seconds in link["seconds"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_links_and_sizes():
    text = measure("--local", "2", "--largest", "1024").stdout
    assert "2 ranks, interface of rank 0: lo" in text and "rank 1: 127.0.0.1:" in text and "1,024" in text


def test_a_sample_of_the_pairs_meets_every_rank_and_the_table_leaves_out_the_rest():
    text = measure("--local", "4", "--pairs", "2", "--largest", "1024").stdout
    assert "4 ranks, interface of rank 0: lo" in text
    # Each cell is a dash, or a rate and a latency in parentheses.
    rows = [re.findall(r"-|[\d,]+ \([\d,]+\)", line[8:]) for line in re.findall(r"^rank \d  .*", text, re.MULTILINE)]
    measured = [[target for target, cell in enumerate(row) if cell != "-"] for row in rows]
    assert [len(row) for row in rows] == [4] * 4 and measured == [[3], [2], [1], [0]]
    [longest] = re.findall(r"^ +1,024 +([\d.,]+) +([\d.,]+) +([\d.,]+)$", text, re.MULTILINE)
    slowest, median, fastest = (float(rate.replace(",", "")) for rate in longest)
    assert 0 < slowest <= median <= fastest
    assert "rank 3: 127.0.0.1:" in text
    assert "\nno link stands out\n" in text or "\n! the " in text or "\n! rank " in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--local", "2", "--rank", "0"], "--local starts all ranks itself"),
        (["--rank", "0", "--world-size", "1"], "at least 2 ranks"),
        (["--local", "1"], "not between 2 and"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_change(arguments, words):
    done = measure(*arguments, code=2)
    assert words in done.stderr and done.stderr.count("\n") == 1

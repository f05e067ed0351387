"""The page: well-formed, complete, and of what users have named only text; its numbers are those that were found."""

import json
import re
import sys

import pytest
from made_traces import BOOK, START, Made
from reading_pages import read

from penstock._native import RECORD
from penstock.account import size
from penstock.cli import main
from penstock.trace_report import figures
from penstock.trace_report.findings import HIDDEN, PARTS, find
from penstock.trace_report.page import LAYERS_SHOWN, RANKS_SHOWN, milliseconds, ranks_text, render, signed
from penstock.tracing.merging import read_all
from penstock.tracing.trace_command import late_lines

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src="x" onerror="alert(1)">',
    "$\\frac{$ & </td></table>",
    "a\x00b\x1b[31m\u202e\ud800",
    "{{ 7 * 7 }}{% raw %}",
    'url(https://nowhere.example/x.css) id="x" href="#y"',
]
ALL_PICTURES = {"network", "steps", "hidden", "prediction"}


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """Three ranks, of which one is late: what is found, and the page."""
    found = find(read_all(Made(3, 30, 5, late=(1, 30)).write(tmp_path_factory.mktemp("late")), RECORD))
    return found, read(render(found))


def of_table(page, name):
    """The rows below the headings, of as many cells as these."""
    heading, *rows = page.tables[name]
    assert {len(row) for row in rows} <= {len(heading)}, name
    return rows


def test_the_numbers_of_the_page_are_those_that_were_found(late):
    found, page = late
    names = {one["rank"]: one["name"] for one in found["ranks"]}
    assert of_table(page, "t-steps") == [
        [names[one["rank"]], str(one["steps"]), milliseconds(one["step_ms"])]
        + [milliseconds(one["parts_ms"][part]) for part in PARTS]
        for one in found["steps"]
    ]
    assert of_table(page, "t-hidden") == [
        [names[one["rank"]], f"{one['in_flight_s']:.3f}", *(f"{100 * one['shares'][name]:.1f}%" for name in HIDDEN)]
        for one in found["hidden"]
    ]
    assert of_table(page, "t-late") == [
        [names[one["rank"]], signed(one["late_ms"]), milliseconds(one["step_ms"])]
        + [signed(took) for took in one["causes_ms"].values()]
        + [one["from_layer"] or ""]
        for one in found["late"]
    ]
    network = found["network"]
    assert [row[:4] for row in of_table(page, "t-network")] == [
        [one["name"], one["host"], *(size(sum(network[way][one["rank"]])) for way in ("sent_bytes", "received_bytes"))]
        for one in found["ranks"]
    ]
    times = found["prediction"]["times"]
    rows = {row[0]: row[1:] for row in of_table(page, "t-prediction")}
    measured = milliseconds(1e3 * found["prediction"]["measured_s"])
    assert rows["a step, milliseconds"] == [milliseconds(1e3 * times["chosen_s"]), measured]
    assert rows["with plain DDP"] == [milliseconds(1e3 * times["ddp_s"]), "-"]
    assert rows["one worker alone"] == ["-", milliseconds(1e3 * times["compute_s"])]
    files = [[row[2], row[3], row[4]] for row in of_table(page, "t-files")]
    assert files == [[str(one["steps"]), str(one["slices"]), str(one["records"])] for one in found["ranks"]]


def test_all_layers_are_there_the_slowest_first_and_the_rest_on_request(late):
    found, page = late
    rows = [*of_table(page, "t-layers"), *of_table(page, "t-more-layers")]
    assert len(of_table(page, "t-layers")) == LAYERS_SHOWN < len(rows) == len(found["layers"]) == 30
    assert [row[0] for row in rows] == [one["layer"] for one in found["layers"]]
    assert rows[0] == [
        "layer0",
        BOOK,
        milliseconds(found["layers"][0]["wait_ms"]),
        "",
        f"rank {found['layers'][0]['waits_most']}",
        milliseconds(found["layers"][0]["in_flight_ms"]),
        size(found["layers"][0]["sent_bytes"]),
        "store",
        size(found["layers"][0]["predicted_bytes"]),
        size(found["layers"][0]["direction_bytes"]),
    ]


def test_the_page_says_who_is_late_in_the_words_of_the_command(late):
    found, page = late
    (line,) = late_lines(found["late"], {one["rank"]: one["name"] for one in found["ranks"]})
    assert line.startswith("rank 1 is late by 30") and line in page.text


def test_pictures_are_there_and_nothing_is_fetched(late):
    found, page = late
    pictures = figures.draw(found)
    assert set(pictures) == ALL_PICTURES
    assert page.tags.count("svg") == len(ALL_PICTURES)
    text = render(found)
    assert "http:" not in text and "https:" not in text
    assert "default-src 'none'" in text
    assert text == render(found)  # the same numbers, the same page
    for name, picture in pictures.items():
        assert picture.startswith("<svg") and picture.endswith("</svg>")
        assert all(one.startswith(f"{name}-") for one in re.findall(r'\bid="([^"]*)"', picture))
        refers = re.findall(r'(?:url\(|href=")#([\w-]+)', picture)
        assert set(refers) <= set(re.findall(r'\bid="([^"]*)"', picture))


def test_what_users_have_named_is_text(tmp_path):
    start = START | {
        "program": HOSTILE[0],
        "rates_source": HOSTILE[1],
        "options": {HOSTILE[1]: [HOSTILE[0], HOSTILE[2]]},
        "met_at": [HOSTILE[3], HOSTILE[4]],
    }
    made = Made(3, len(HOSTILE), 5, late=(1, 30))
    made.write(tmp_path, HOSTILE, start=start, rank_names=HOSTILE[:3])
    found = find(read_all(tmp_path, RECORD))
    text = render(found)
    page = read(text)
    assert "img" not in page.tags and "script" not in page.tags
    assert "\x00" not in text and "\x1b" not in text and "\u202e" not in text
    text.encode()  # no half of a character is left
    shown = [row[0] for row in of_table(page, "t-layers")]
    assert sorted(shown) == sorted(page_of(name) for name in HOSTILE)
    assert any(page_of(HOSTILE[0]) in cell for row in page.tables["t-start"] for cell in row)
    assert "{{ 7 * 7 }}" in page.text
    pictures = "".join(figures.draw(found).values())  # which name ranks by their numbers
    assert not any(name in pictures for name in HOSTILE)


def page_of(name):
    """As it stands in a cell: what cannot be shown is replaced."""
    return "".join(one if one.isprintable() else "\ufffd" for one in name).strip()


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [(1, 1), *(pytest.param(*size, marks=pytest.mark.long) for size in [(2, 300), (9, 3), (64, 12)])],
)
def test_any_number_of_ranks_and_layers_makes_a_page(ranks, layers, tmp_path):
    found = find(read_all(Made(ranks, layers, 4).write(tmp_path), RECORD))
    text = render(found)
    page = read(text)
    assert len(of_table(page, "t-steps")) == len(of_table(page, "t-network")) == ranks
    more = of_table(page, "t-more-layers") if layers > LAYERS_SHOWN else []
    assert len(of_table(page, "t-layers")) + len(more) == layers
    assert len(text) < 4_000_000
    assert (f"all {ranks} ranks" in page.text) == (ranks > RANKS_SHOWN)
    if ranks > figures.ROWS_MAX:  # a map, and not a path for each rank and moment
        assert "data:image/png;base64," in text


def test_a_map_names_its_ranks_also_where_a_trace_is_missing(tmp_path):
    Made(12, 3, 5).write(tmp_path)
    (tmp_path / "rank-0.abababab-1.trace").unlink()
    picture = figures.draw(find(read_all(tmp_path, RECORD)))["network"]
    assert "rank 1<" in picture and "rank 11<" in picture and "rank 0<" not in picture


def test_a_line_rate_is_drawn_where_what_is_sent_comes_near_it(tmp_path):
    found = find(read_all(Made(2, 3, 5).write(tmp_path, hosts=2), RECORD))
    network = found["network"]
    most = max(max(of_rank) for of_rank in network["sent_bytes"].values()) / network["bin_s"]

    def dashed(line):
        picture = figures.draw({**found, "network": {**network, "line_bytes_per_s": line}})["network"]
        return picture.count("stroke-dasharray")

    assert dashed(1.1 * most) == 4  # both ways of two ranks
    assert dashed(100 * most) == dashed(None) == 0


def test_of_a_job_without_steps_or_frames_there_is_a_page_that_says_so(tmp_path):
    found = find(read_all(Made(2, 2, 0).write(tmp_path), RECORD))
    page = read(render(found))
    assert page.tags.count("svg") == 1  # of the network, which carried nothing
    for words in ("There are no steps", "Nothing is predicted", "Nothing was in flight", "No layer's result"):
        assert words in page.text


def test_of_even_ranks_none_is_late_and_of_one_nothing_is_said(tmp_path):
    assert "no rank is late" in read(render(find(read_all(Made(2, 3, 5).write(tmp_path / "a"), RECORD)))).text
    assert "Nothing is said of it" in read(render(find(read_all(Made(1, 3, 5).write(tmp_path / "b"), RECORD)))).text


# The command


def test_the_command_writes_a_page_and_says_what_is_in_the_traces(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Made(2, 3, 5).write(tmp_path / "traces")
    assert main(["report", "traces", "-o", "mine.html"]) == 0
    said = capsys.readouterr().out
    assert "rank 1" in said and "mine.html: open it in a browser" in said and "ui.perfetto.dev" not in said
    read((tmp_path / "mine.html").read_text(encoding="utf-8"))
    assert main(["report", "traces"]) == 0
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "mine.html").read_bytes()


def test_for_programs_the_numbers_alone_are_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Made(2, 3, 5).write(tmp_path / "traces")
    assert main(["report", "traces", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["output"] is None and not (tmp_path / "report.html").exists()
    assert said == {**json.loads(json.dumps(find(read_all(tmp_path / "traces", RECORD)))), "output": None}


def test_torn_traces_are_refused_unless_asked_for_and_then_said_to_be_torn(tmp_path, capsys):
    Made(2, 3, 5).write(tmp_path)
    torn = sorted(tmp_path.glob("*.trace"))[1]
    torn.write_bytes(torn.read_bytes()[:-20])
    output = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "-o", str(output)]) == 2
    assert "is torn" in capsys.readouterr().err and not output.exists()
    assert main(["report", str(tmp_path), "-o", str(output), "--torn"]) == 0
    page = read(output.read_text(encoding="utf-8"))
    assert "The trace of rank 1 is torn: it ends in the middle of block" in page.text
    assert len(of_table(page, "t-steps")) == 2


@pytest.mark.long
def test_a_torn_file_of_any_length_makes_a_page_or_is_refused(tmp_path):
    """Cut between blocks, where ranks have records and no moments, or neither."""
    Made(2, 3, 5).write(tmp_path)
    torn = sorted(tmp_path.glob("*.trace"))[1]
    whole = torn.read_bytes()
    blocks = [found.start() for found in re.finditer(rb'\{"block": ', whole)]  # nothing stands between two of them
    assert len(blocks) == 4  # books, records, moments, end
    for at in blocks:
        torn.write_bytes(whole[:at])
        read(render(find(read_all(tmp_path, RECORD, torn=True))))


def test_a_rank_whose_trace_is_missing_is_named(tmp_path):
    Made(3, 3, 5).write(tmp_path)
    sorted(tmp_path.glob("*.trace"))[2].unlink()
    page = read(render(find(read_all(tmp_path, RECORD))))
    assert "There is no trace of rank 2: frames to and from there are left out." in page.text


def test_what_cannot_be_written_or_read_is_an_error_of_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    Made(2, 2, 3).write(tmp_path / "traces")
    assert main(["report", str(tmp_path / "traces"), "-o", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock report: ") and error.count("\n") == 1


@pytest.mark.parametrize(("module", "named"), [("matplotlib", "Matplotlib"), ("jinja2", "Jinja")])
def test_a_missing_library_is_named_with_the_way_to_get_it(module, named, tmp_path, capsys, monkeypatch):
    Made(2, 2, 3).write(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert named in error and "penstock[report]" in error


def test_numbers_are_written_as_they_are_read():
    assert [milliseconds(value) for value in (0.0, 0.01234, 1.234, 12.34, 1234.5)] == [
        *("0", "0.012", "1.23", "12.3", "1234.5")
    ]
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert ranks_text([4]) == "rank 4"

"""Pages for readers: links that lead somewhere, benchmark pages of a length that is read, pictures that are shown."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
LINES_MAX = 150

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://")


def named(page):
    return page.relative_to(ROOT).as_posix()


def text(page):
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page):
    """As sites that show Markdown make them of headings: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page):
    for link in LINK.findall(text(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if link.startswith(ELSEWHERE):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    assert not list(dead_links(page))


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# `lr` and Rank 0's\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](#one) [b](other.md#lr-and-rank-0s) [c](#two) [d](other.md#lr) [e](no.md)\n", "utf-8")
    assert list(dead_links(page)) == ["#two", "other.md#lr", "no.md"]


@pytest.mark.parametrize("page", sorted((DOCS / "benchmarks").rglob("*.md")), ids=named)
def test_a_benchmark_page_is_read_at_one_sitting(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LINES_MAX


def test_every_picture_is_shown_by_a_page():
    shown = {(page.parent / link).resolve() for page in PAGES for link in PICTURE.findall(text(page))}
    assert set(DOCS.rglob("*.png")) == shown


def test_readme_s_first_screen_says_what_for_whom_and_how_to_begin():
    """As much as a window shows: a picture, who it is for, how to install it, a program without a change, two lines."""
    screen = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:26])
    parts = (
        r"!\[[^\]]+\]\(docs/",
        r"It is for you\b",
        r"^pip install penstock\b",
        r"^penstock run .*train_ddp\.py",
        r"^ps\.init\(\)",
    )
    places = [re.search(part, screen, re.MULTILINE) for part in parts]
    assert all(places), places
    assert [place.start() for place in places] == sorted(place.start() for place in places)

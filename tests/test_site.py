"""The documentation site: which pages it has, what becomes of links, lists and docstrings, and that it can be built."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILD_LIMIT_S = 1200


def load(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pages = load("pages")


@pytest.fixture(scope="module")
def docstrings():
    """Griffe itself is in the site's own environment: `make docs` uses the extension in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
        return load("docstrings")


@pytest.mark.parametrize(
    ("path", "link", "here"),
    [
        ("README.md", "docs/running.md#hosts", "running.md#hosts"),
        ("README.md", "docs/benchmarks/lab/stall-resnet50-1000.png", "benchmarks/lab/stall-resnet50-1000.png"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "examples/minimal.py", "examples/minimal.md"),
        ("docs/elastic.md", "../ARCHITECTURE.md#a-lost-peer", "architecture.md#a-lost-peer"),
        ("docs/decisions/0024-encryption.md", "../meeting.md#encryption", "../meeting.md#encryption"),
        ("docs/benchmarks/tensors/README.md", "../../../README.md", "../../index.md"),
        ("docs/running.md", "#groups", "#groups"),
        ("docs/running.md", "https://example.com/a", "https://example.com/a"),
        ("docs/decisions/index.md", "0024-encryption.md", "0024-encryption.md"),
        ("examples/index.md", "minimal.py", "minimal.md"),
        ("docs/benchmarks/README.md", "../../lab/limits.py", None),
        ("README.md", "LICENSE", None),
    ],
)
def test_links_lead_to_the_same_from_a_page_of_the_site(path, link, here):
    text = f"see [of `two`\nlines]({link}), and so on"
    expected = text.replace(link, here) if here else "see of `two`\nlines, and so on"
    assert pages.relinked(text, path) == expected


def test_every_page_knows_its_file():
    places = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    for place in [*places, *pages.ROOT_PAGES.values(), "examples/minimal.md"]:
        assert pages.place_of(pages.path_of(place)) == place
        assert (ROOT / pages.path_of(place)).exists()


def test_lists_are_indented_and_code_is_left_alone():
    code = "```sh\n- a\n  b  # [c](d.md)\n```"
    after = f"four\n  five\n\n{code}\n\n"
    text = f"- one\n  goes on\n\n  as well\n\n1. two\n\n   ```sh\n   three\n   ```\n\n{after}<details><summary>"
    expected = (
        "- one\n    goes on\n\n    as well\n\n1. two\n\n    ```sh\n    three\n    ```\n\n"
        f'{after}<details markdown="1"><summary>'
    )
    assert pages.as_in_the_site(text, "docs/running.md") == expected


def test_examples_and_decisions_are_listed_each_with_its_page():
    made = pages.made_pages(ROOT)
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {f"examples/{name}.md" for name in examples} < set(made)
    source = (ROOT / "examples" / "minimal.py").read_text(encoding="utf-8")
    assert source in made["examples/minimal.md"]
    for page in ("examples/index.md", "decisions/index.md"):
        targets = re.findall(r"^- \[[^\]]+\]\((\S+)\)$", made[page], re.MULTILINE)
        folder = (ROOT / pages.path_of(page)).parent
        assert targets and all((folder / target).exists() for target in targets)


def configuration():
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation():
    """What has many pages of a kind, such as decisions, is there with a list of them."""
    named = set(re.findall(r"^ +- (?:[^:\n]+: )?([\w./-]+\.md)$", configuration(), re.MULTILINE))
    pages_of_docs = {path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md")]}
    assert pages_of_docs | set(pages.ROOT_PAGES.values()) <= named
    assert {place for place in named if not (ROOT / pages.path_of(place)).exists()} <= set(pages.LISTS)


def test_every_public_name_is_on_one_api_page(docstrings):
    shown = [
        name
        for page in DOCS.glob("api/*.md")
        for name in re.findall(r"^::: penstock\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(docstrings.public_names())


def test_public_names_are_the_package_s(docstrings):
    import penstock

    assert docstrings.public_names() == {*penstock.__all__} - {"__version__"}


def test_a_docstring_becomes_a_page_s(docstrings):
    names = frozenset({"init", "Options"})
    text = "Text of `init`, `step`, ``init`` and `penstock.Options`, see docs/elastic.md::\n\nExample:\n    >>> init()"
    assert docstrings.as_markdown(text, names) == (
        "Text of [`init`][penstock.init], `step`, ``init`` and [`penstock.Options`][penstock.Options], "
        "see [docs/elastic.md](../elastic.md):\n\nExamples:\n    >>> init()"
    )
    once = docstrings.as_markdown(text, names)
    assert docstrings.as_markdown(once, names).count("][penstock.init]") == once.count("][penstock.init]")


def test_pages_that_docstrings_name_exist():
    for path in (ROOT / "python" / "penstock").rglob("*.py"):
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / page).exists(), f"{path}: {page}"


class Page(HTMLParser):
    """What it leads to or loads, and the anchors that it has."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append((tag, value))


def links_that_fail(site):
    """Those that lead nowhere, and what a page would load from elsewhere."""
    pages = {
        path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"
    }  # which knows the site's address
    for path, page in pages.items():
        for tag, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if tag != "a":
                    yield path, link
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (there in pages and unquote(parts.fragment) not in pages[there].anchors):
                yield path, link


def test_links_that_fail_are_found(tmp_path):
    inside = '<a href="b.html#x"></a><a href="b.html#y"></a><a href="c.html"></a><a href="https://example.com/a"></a>'
    (tmp_path / "a.html").write_text(f'{inside}<script src="https://example.com/b.js"></script>', encoding="utf-8")
    (tmp_path / "b.html").write_text('<h1 id="x"><a href="#x"></a></h1>', encoding="utf-8")
    found = [link for _, link in links_that_fail(tmp_path)]
    assert found == ["b.html#y", "c.html", "https://example.com/b.js"]


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_has_every_name(docstrings):
    """It installs the site's requirements, once."""
    done = subprocess.run(
        ["make", "--no-print-directory", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build" / "site"
    api = "".join(page.read_text(encoding="utf-8") for page in site.glob("api/*.html"))
    assert {name for name in docstrings.public_names() if f'id="penstock.{name}"' not in api} == set()
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="running.html#programs-written-for-ddp"' in home
    examples_of_distribute = api.partition('id="penstock.distribute"')[2].partition("<h2")[0]
    assert "&gt;&gt;&gt;" in examples_of_distribute and "<blockquote>" not in api  # `>>>` is Markdown's quotation, too
    assert not [path for path in site.rglob("*") if path.suffix in (".py", ".pyc")]
    assert not list(links_that_fail(site))

"""Hooks of mkdocs, for what it does not do by itself: pages outside of docs/, and Markdown as the repository has it.

Nothing is copied. Pages keep the links that work in the repository; here each is made one to the page's place in the
site. What the site does not have, such as a source file, is named without a link. Lists may be indented by as much as
their text, and what is within ``<details>`` is Markdown.

It omits whether links lead somewhere, which `mkdocs build --strict` and tests/test_pages.py check.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""By their path in the repository, their place in the site."""
LISTS = {"decisions/index.md": "docs/decisions/index.md", "examples/index.md": "examples/index.md"}
"""Pages that are made here, and where their links start from."""

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ITEM = re.compile(r"(\d+\. +|[-*] +)\S")
ITEM_COLUMNS = 4
"""By so much Python's Markdown wants to see what belongs to an item of a list indented."""


def place_of(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if re.fullmatch(r"examples/\w+\.py", path):
        return path.removesuffix(".py") + ".md"
    return None


def path_of(place: str) -> str:
    """Which file of the repository is at a place of the site."""
    by_place = {there: path for path, there in ROOT_PAGES.items()} | LISTS
    if place in by_place:
        return by_place[place]
    return place.removesuffix(".md") + ".py" if place.startswith("examples/") else f"docs/{place}"


def relinked(text: str, path: str) -> str:
    """Markdown of a file of the repository with its links as they are from its place in the site."""
    place = place_of(path)
    here = posixpath.dirname(path.removeprefix("docs/") if place is None else place)

    def one(match: re.Match[str]) -> str:
        picture, label, link = match.groups()
        target, mark, anchor = link.partition("#")
        if not target or ":" in target:  # to this page, or elsewhere
            return match[0]
        there = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        if there is None:
            return label
        return f"{picture}[{label}]({posixpath.relpath(there, here or '.')}{mark}{anchor})"

    return LINK.sub(one, text)


def indented(text: str) -> str:
    """Markdown whose lists are indented as Python's Markdown wants it."""
    columns, lines = 0, []
    for line in text.split("\n"):
        item = ITEM.match(line)
        if item:
            columns = len(item[1])
        elif line and not line.startswith(" "):
            columns = 0
        elif columns and line.startswith(" " * columns):
            line = " " * ITEM_COLUMNS + line[columns:]
        lines.append(line)
    return "\n".join(lines)


def as_in_the_site(text: str, path: str) -> str:
    """Markdown of a file of the repository, for its page; what is in code blocks stays as it is."""
    parts = FENCED.split(text)
    for number in range(0, len(parts), 2):
        part = indented(relinked(parts[number], path))
        parts[number] = part.replace("<details>", '<details markdown="1">')
    return "".join(parts)


def page_of_example(source: str, name: str) -> str:
    """An example as a page."""
    return f"# {name}\n\n```python\n{source.strip()}\n```\n"


def list_of(title: str, entries: Iterable[tuple[str, str]]) -> str:
    """A page that lists others: their labels and links."""
    return f"# {title}\n\n" + "".join(f"- [{label}]({link})\n" for label, link in entries)


def summary(source: str) -> str:
    """The first line of what a Python file says of itself, without the full stop."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")


def made_pages(root: Path) -> dict[str, str]:
    """By their place the pages that no file has: an example each, and the lists."""
    examples = {path.stem: path.read_text(encoding="utf-8") for path in sorted((root / "examples").glob("*.py"))}
    pages = {f"examples/{name}.md": page_of_example(text, f"examples/{name}.py") for name, text in examples.items()}
    pages["examples/index.md"] = list_of(
        "Examples", ((f"{name}.py: {summary(text)}", f"{name}.py") for name, text in examples.items())
    )
    decisions = sorted((root / "docs" / "decisions").glob("0*.md"))
    pages["decisions/index.md"] = list_of(
        "Decisions",
        ((path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# "), path.name) for path in decisions),
    )
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Add to what mkdocs has found in docs/ what is not there."""
    from mkdocs.structure.files import File

    for path, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for place, text in made_pages(ROOT).items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite a page that mkdocs has read."""
    return as_in_the_site(markdown, path_of(page.file.src_uri))

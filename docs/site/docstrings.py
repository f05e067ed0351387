"""Docstrings as Markdown with sections, for the API pages: an extension of griffe, which reads the package's sources.

A docstring is plain text for those who read sources. For a page its ``Example:`` becomes a section that griffe knows,
the colons before a block become one, and what it names, of the package and of docs/, becomes a link to that.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import griffe

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "penstock" / "__init__.py"


def public_names() -> frozenset[str]:
    """What programs find in the package, which is what API pages have; read, not imported."""
    tree = ast.parse(PACKAGE.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            return frozenset(ast.literal_eval(node.value)) - {"__version__"}
    raise ValueError(f"{PACKAGE} has no __all__")


def as_markdown(text: str, names: frozenset[str]) -> str:
    """A docstring for a page.

    Args:
        text: As it stands in the source, without its indentation.
        names: Of these, in single backquotes and with or without the package's name before them, links are made.
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    # From a page of the API, which are all in one folder.
    text = re.sub(r"(?<![`/\w])docs/([\w/-]+)\.md", r"[docs/\1.md](../\1.md)", text)

    def linked(match: re.Match[str]) -> str:
        name = match[2]
        return f"[{match[0]}][penstock.{name}]" if name in names else match[0]

    return re.sub(r"(?<![`\[])`(penstock\.)?(\w+)`(?!`)", linked, text)


class PageDocstrings(griffe.Extension):
    """Each docstring is rewritten when griffe has read the package."""

    def __init__(self) -> None:
        super().__init__()
        self._names = public_names()

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite that of a module, class, function or attribute."""
        if obj.docstring is None:
            return
        around = obj if obj.is_class else obj.parent
        # In a class with a method `init` that one is meant.
        own = around.members if around is not None and around.is_class else {}
        obj.docstring.value = as_markdown(obj.docstring.value, self._names - own.keys())

"""The page: findings and pictures put into the template, by a library that escapes whatever users have named.

It is one file that needs nothing else: no script, no font, and no address; browsers are told to fetch nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.account import printable, size
from penstock.errors import ConfigError
from penstock.trace_report import figures
from penstock.trace_report.findings import HIDDEN, PARTS
from penstock.tracing.late import CAUSES
from penstock.tracing.trace_command import clock_text, late_lines
from penstock.version import installed_version

__all__ = ["LAYERS_SHOWN", "render"]

GET_JINJA = "the page is made by Jinja, which is missing: pip install 'penstock[report]'"
TEMPLATE = "page.html"
LAYERS_SHOWN = 20
"""More are there on request."""
RANKS_SHOWN = 16
"""A table of more ranks is there on request; pictures have them all."""
SECTIONS = (
    ("late", "who is late"),
    ("steps", "steps"),
    ("prediction", "predicted and measured"),
    ("network", "network"),
    ("hidden", "hidden"),
    ("layers", "layers"),
    ("start", "start"),
    ("files", "files"),
)


def render(found: Mapping[str, Any]) -> str:
    """The page.

    Args:
        found: What `penstock.trace_report.findings.find` gave.

    Raises:
        ConfigError: A library is missing that makes it; the message says how to get it.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ConfigError(GET_JINJA) from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        shown=printable, ms=milliseconds, signed=signed, bytes=size, ranks=ranks_text, clock=clock_text
    )
    names = {one["rank"]: one["name"] for one in found["ranks"]}
    pictures = {name: Markup(picture) for name, picture in figures.draw(found).items()}
    return environment.get_template(TEMPLATE).render(
        found=found,
        names=names,
        pictures=pictures,
        late=late_lines(found["late"], names),
        warnings=list(_warnings(found, names)),
        causes=CAUSES,
        parts=PARTS,
        hidden_names=HIDDEN,
        shown_layers=LAYERS_SHOWN,
        shown_ranks=RANKS_SHOWN,
        sections=SECTIONS,
        version=installed_version(),
    )


def milliseconds(value: float) -> str:
    """To a tenth; what is shorter to a hundredth, or a thousandth. Nothing at all is 0."""
    return "0" if value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def signed(value: float) -> str:
    """Milliseconds more, or fewer."""
    return f"{value:+.1f}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {listed}"


def _warnings(found: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[str]:
    """What is missing, before anything is read from the page."""
    for one in found["ranks"]:
        if one["torn"]:
            yield f"The trace of {names[one['rank']]} is torn: {one['torn']}. What is whole was taken."
    if found["missing"]:
        yield f"There is no trace of {ranks_text(found['missing'])}: frames to and from there are left out."
    if found["lost"]:
        yield f"{found['lost']:,} records were lost: there was more than could be written. What is here is right."
    if found["frame_ends_alone"]:
        yield f"{found['frame_ends_alone']:,} ends of frames have no other end in these traces, and are left out."
    for book in found["asynchronous"]:
        yield f"{book} is asynchronous: no rank waits for another, so none is late."

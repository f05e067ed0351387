"""A case of a benchmark: measured once other programs are quiet, and published."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from lab.cluster import Unavailable
from lab.records import note, publish, wait_for_quiet


def measured(
    arguments: argparse.Namespace,
    benchmark: str,
    measure: Callable[[], dict[str, Any]],
    *,
    scenario: Sequence[str],
    seed: int = 0,
) -> dict[str, Any] | None:
    """Measure one case, and publish it.

    Args:
        arguments: Those of `result_arguments`.
        benchmark: Its name.
        measure: What gives the record.
        scenario: Fields that say together what was measured, as of `publish`.
        seed: Of all that was drawn at random.

    Returns:
        The record; none if this machine cannot run the case, which has been said.
    """
    try:
        record = {"busy_cores": wait_for_quiet(arguments.wait_quiet), **measure()}
    except Unavailable as error:
        note(f"{benchmark}: {error}")
        return None
    publish(
        record,
        benchmark=benchmark,
        seed=seed,
        as_json=arguments.json,
        lines=arguments.json_lines,
        scenario=scenario,
    )
    return record

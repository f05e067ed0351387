"""When Python looks through all objects for garbage: after the first step, if it is due, and not in the midst of one.

Importing torch and this package leaves hundreds of thousands of objects, and mostly a full collection that is due. It
takes a tenth of a second and more, and comes whenever some hundred objects more have been made: on each rank in another
step, in which all others wait. After the first step, which is slow on every rank, everything is imported.
"""

from __future__ import annotations

import gc

__all__ = ["collect_if_due"]


def collect_if_due() -> None:
    """Collect garbage of all generations, if Python would do so next; not if the program has turned that off."""
    # A threshold of 0 is that of versions which have no such generation.
    at_most = gc.get_threshold()[2]
    if gc.isenabled() and 0 < at_most < gc.get_count()[2]:
        gc.collect()

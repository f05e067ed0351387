"""The lab: emulated clusters, the papers' networks, real peers, and the distance to the limit.

Its networks are attributes of the package, so that ``lab:vgg19`` names one wherever ``module:function`` does, as in
``penstock explain lab:vgg19``; ``lab:vgg19-x0.5`` is the same at half width.
"""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[[], object]:
    if name.startswith("__"):
        raise AttributeError(name)
    from lab.networks import NETWORKS

    base, _, width = name.rpartition("-x")
    if base in NETWORKS:
        try:
            factor = float(width)
        except ValueError:
            raise AttributeError(f"{width!r} is no width; lab:{base}-x0.5 is {base} at half width") from None
        return lambda: NETWORKS[base]().widened(factor)
    if name in NETWORKS:
        return NETWORKS[name]
    raise AttributeError(f"the lab has no network {name!r}; there are {', '.join(NETWORKS)}")

"""How one layer travels: what is settled of it beforehand (`Terms`), and what came of that (`LayerPlan`).

The vocabulary is the core's (crates/core/src/way.rs); a scheme is the name of a way. So is the decision, with all that
overrides a choice (crates/core/src/scheme.rs): here it is only kept and shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.description import Layer
from penstock.lossy import LossyScheme

if TYPE_CHECKING:
    from penstock._native import Decision, FixedTerms

__all__ = ["ADAM", "ELASTIC", "HALF", "STORE", "LayerPlan", "Terms", "rows_scheme"]

STORE = "store"
"""Every layer's scheme unless something else is given or chosen."""
ADAM = "adam"
ELASTIC = "in an elastic job all gradients travel whole, by the store"
"""Why no layer sends rows, and none travels by a collective, where members may be lost."""
HALF = "bf16"  # sends as many bytes as the other half type


def rows_scheme(kind: str) -> str | None:
    """The scheme by which layers of a kind send rows if that is chosen, such as ``factors`` for ``linear``."""
    from penstock._native import WAYS

    return next((way.name for way in WAYS.values() if way.may_be_chosen and way.kind == kind), None)


@dataclass(frozen=True)
class Terms:
    """What is fixed of a layer's scheme before training.

    Attributes:
        given: What is not chosen: a scheme's name, or an object if it has options. The user has asked for it, or it is
            the default. None: it is chosen.
        collective: What takes the store's place for the whole gradient, chosen before training.
        what: Why that is given which the user has not asked for, for the reader; else empty.
        sparse: Whether its gradients are sparse, and can be sent so.
        owners_update: Whether its owners update it.
    """

    given: str | LossyScheme | None = None
    collective: str | None = None
    what: str = ""
    sparse: bool = False
    owners_update: bool = False

    @property
    def options(self) -> LossyScheme | None:
        """Of a given scheme that has some."""
        return None if isinstance(self.given, str) else self.given

    @property
    def scheme(self) -> str | None:
        """The name of what is given, or the only one possible, if anything is."""
        return self._fixed["scheme"]

    @property
    def whole(self) -> str:
        """By which the whole gradient travels, whenever it does: that is fixed with the engine's book."""
        return self._fixed["whole"]

    @property
    def why_whole(self) -> str | None:
        """Why that must always be, whatever the layer is."""
        return self._fixed["why_whole"]

    @property
    def may_choose_collective(self) -> bool:
        """Whether one may be chosen in the store's place."""
        return self._fixed["may_choose_collective"]

    @property
    def given_name(self) -> str | None:
        """The name of what is given, if anything is."""
        return self.given if self.given is None or isinstance(self.given, str) else self.given.name

    @property
    def _fixed(self) -> FixedTerms:
        from penstock._native import fixed_terms

        return fixed_terms(self.given_name, self.collective, self.sparse, self.owners_update)


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is synchronised now, why, and what else would cost: a row of the table of ``penstock explain``.

    Attributes:
        name: The layer.
        kind: ``linear``, ``embedding`` or ``other``.
        shape: Of its weight.
        rows: Most rows of any worker, or `None` while unknown.
        gradient_bytes: Its gradient.
        scheme_bytes: By scheme that fits the layer, bytes on the busiest direction of an interface in one step. All
            ranks of a host share one.
        scheme_wire_s: By scheme, seconds for which that is busy, or the busiest rank inside its host if that takes
            longer.
        scheme_s: By scheme, predicted seconds if the layer has the wire for itself, rebuilding included.
        scheme: How it is synchronised.
        given: Whether that is not chosen: asked for, the default, or the only one possible.
        may_change: Whether a later measurement may lead to another.
        schemes: What it can change between while training, if all ranks are told to; that of the whole gradient first.
        code: The reason in one word.
        reason: The reason.
        wire_s: Of `scheme_wire_s` that of the scheme.
        rebuild_s: Seconds to rebuild the gradient from its factors, beyond what is computed anyway.
        lossy: Whether the scheme loses something.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    rows: int | None
    gradient_bytes: int
    scheme_bytes: dict[str, int]
    scheme_wire_s: dict[str, float]
    scheme_s: dict[str, float]
    scheme: str
    given: bool
    may_change: bool
    schemes: tuple[str, ...]
    code: str
    reason: str
    wire_s: float
    rebuild_s: float
    lossy: bool

    @classmethod
    def of(cls, layer: Layer, choice: Decision, rows: list[int]) -> LayerPlan:
        """What the native module has decided.

        Args:
            layer: The layer.
            choice: The decision.
            rows: Of each rank, or none while they are not known.
        """
        estimates = {estimate["scheme"]: estimate for estimate in choice["estimates"]}
        # A scheme that was given or adopted may need rows that are not known here: then the store's bytes stand for
        # its.
        chosen = estimates.get(choice["scheme"], estimates[STORE])
        return cls(
            name=layer.name,
            kind=layer.kind,
            shape=layer.shape,
            rows=max(rows) if rows and layer.kind != "other" else None,
            gradient_bytes=layer.nbytes,
            scheme_bytes={scheme: estimate["direction_bytes"] for scheme, estimate in estimates.items()},
            scheme_wire_s={scheme: estimate["busy_s"] for scheme, estimate in estimates.items()},
            scheme_s={scheme: estimate["wire_s"] + estimate["rebuild_s"] for scheme, estimate in estimates.items()},
            scheme=choice["scheme"],
            given=choice["given"],
            may_change=choice["may_change"],
            schemes=choice["schemes"],
            code=choice["code"],
            reason=choice["reason"],
            wire_s=chosen["busy_s"],
            rebuild_s=chosen["rebuild_s"],
            lossy=choice["lossy"],
        )

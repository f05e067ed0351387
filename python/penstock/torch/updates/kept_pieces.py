"""What owners keep of a model on an accelerator: each parameter is one tensor of the book or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.kept_book import KeptBook
from penstock.optimizers import Described

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock.control import Servers
    from penstock.elastic_calls import ElasticCalls
    from penstock.torch.gradients.device_landing import GradientPiece
    from penstock.torch.gradients.hooks import Gradients

__all__ = ["KeptPieces", "kept_book"]


def kept_book(gradients: Gradients, servers: Servers, calls: ElasticCalls | None) -> KeptBook:
    """What owners keep of this model, by parameter."""
    where = gradients.engine, servers, gradients.rank, gradients.id
    if gradients.device is None:
        return KeptBook(*where, others=len(gradients.gathers), calls=calls)
    return KeptPieces(*where, gradients.pieces)


class KeptPieces(KeptBook):
    """As `KeptBook`, by parameters. Memory is bytes in main memory; nothing is lent.

    Args:
        engine: Of the job.
        servers: Of the job, perhaps none.
        rank: This worker.
        number: The book's.
        pieces: By parameter.
    """

    def __init__(
        self, engine: Engine, servers: Servers, rank: int, number: int, pieces: Sequence[Sequence[GradientPiece]]
    ) -> None:
        super().__init__(engine, servers, rank, number)
        self._pieces = pieces

    def tensors_of(self, tensor: int, nbytes: int) -> list[tuple[int, int, int]]:
        """As `KeptBook.tensors_of`."""
        return [(piece.number, piece.begin, piece.nbytes) for piece in self._pieces[tensor]]

    def proceed(
        self,
        step: int,
        optimizers: Sequence[Described],
        groups: Sequence[int],
        factor: float,
        *,
        in_advance: bool = False,
    ) -> None:
        """As `KeptBook.proceed`; in advance in any case, as the device may not have made all gradients yet."""
        super().proceed(step, optimizers, self._by_piece(groups), factor, in_advance=True)

    def order(self, optimizers: Sequence[Described], groups: Sequence[int], factor: float) -> None:
        """As `KeptBook.order`."""
        super().order(optimizers, self._by_piece(groups), factor)

    def keep(
        self,
        tensor: int,
        nbytes: int,
        value: Any = None,
        states: Sequence[Any] | None = None,
        updates: int | None = None,
        *,
        lent: bool = False,
    ) -> bool:
        """As `KeptBook.keep`."""
        for piece in self._pieces[tensor]:
            part = slice(piece.begin, piece.begin + piece.nbytes)
            fields = None if states is None else [state[part] for state in states]
            super().keep(piece.number, piece.nbytes, None if value is None else value[part], fields, updates)
        return False

    def saved_here(self, tensor: int, state: int | None, into: Any) -> int | None:
        """As `KeptBook.saved_here`."""
        counts = [
            super(KeptPieces, self).saved_here(piece.number, state, into[piece.begin : piece.begin + piece.nbytes])
            for piece in self._pieces[tensor]
        ]
        return next((count for count in counts if count is not None), None)

    def saved(self, tensor: int, state: int | None, into: Any) -> int | None:
        """As `KeptBook.saved`."""
        counts = [
            super(KeptPieces, self).saved(piece.number, state, into[piece.begin : piece.begin + piece.nbytes])
            for piece in self._pieces[tensor]
        ]
        return counts[0]

    def _by_piece(self, groups: Sequence[int]) -> list[int]:
        return [group for group, own in zip(groups, self._pieces, strict=True) for _ in own]

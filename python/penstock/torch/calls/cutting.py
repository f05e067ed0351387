"""Into which pieces a call is cut whose memory passes through bounded host memory.

All ranks cut alike, for each piece is a call of the engine: by what they know alike, which is the kind of the call, the
size of the group, and lengths that are the same everywhere. And no cut shows in a result's bits: whatever is summed in
rank order may be cut anywhere; where the place in the tensor decides who sums (``docs/summation.md``), pieces begin
where the slices of the group's ranks begin anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.buffers import DTYPES
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock._native import Engine
    from penstock._native import _Algorithm as Algorithm

__all__ = ["PIECE_BYTES", "blocks_of_a_piece", "cut_evenly", "cut_sum"]

PIECE_BYTES = 4 << 20
"""Host memory of a piece: of all its blocks. To copy it takes 0.1 ms, 10 Gbit/s 3 ms to send it."""
PART_BYTES_MIN = 64 << 10
"""Of a block, in a piece, however many blocks there are: messages shall not be short."""
ALIGNMENT_BYTES = 64


def blocks_of_a_piece(request: str, ranks: int) -> int:
    """How many blocks a rank holds of a piece, at most: the same number for every rank."""
    if request in ("all_gather", "gather", "scatter", "reduce_scatter"):
        return ranks + 1
    return 2 * ranks if request == "all_to_all" else 1


def cut_evenly(longest: int, blocks: int) -> Sequence[int]:
    """Where the pieces begin, in bytes of each block; of nothing there is one piece.

    Args:
        longest: Bytes of the longest block, on any rank.
        blocks: In a piece.
    """
    each = max(PIECE_BYTES // blocks, min(PART_BYTES_MIN, PIECE_BYTES))
    return range(0, max(longest, 1), max(each // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES)


def cut_sum(
    engine: Engine, nbytes: int, dtype: str, ranks: int, algorithm: Algorithm | None, vectors: int
) -> tuple[Algorithm, Sequence[int]]:
    """By which algorithm an allreduce goes, and where its pieces begin.

    Args:
        engine: The engine.
        nbytes: Of each vector.
        dtype: Of its elements.
        ranks: Of the group.
        algorithm: What the program has named; none: the fastest for the whole tensor.
        vectors: How many tensors each rank gives.

    Raises:
        ConfigError: A tensor for this algorithm that no cut leaves its bits.
    """
    size = DTYPES[dtype]
    elems = nbytes // size
    chosen, slices, any_cut = engine.allreduce_plan(elems, dtype, ranks, algorithm, vectors)
    if nbytes * vectors <= PIECE_BYTES:
        return chosen, range(1)
    if any_cut:
        return chosen, cut_evenly(nbytes, vectors)
    each, longer = divmod(elems, slices)
    starts = [turn * each + min(turn, longer) for turn in range(0, slices, ranks)]
    most = max(PIECE_BYTES // (vectors * size * ranks * (each + 1)), 1)
    starts = starts[::most]
    for begin, end in itertools.pairwise(starts):
        if engine.allreduce_plan(end - begin, dtype, ranks, chosen)[1] != most * ranks:
            raise ConfigError(
                f"penstock.allreduce: {nbytes} bytes on an accelerator are too many for {chosen} on {ranks} ranks; "
                'name another algorithm, such as algorithm="store", or give the tensor in parts'
            )
    return chosen, [start * size for start in starts]

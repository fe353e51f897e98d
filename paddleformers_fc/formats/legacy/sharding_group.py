"""A tensor of a sharding group from the pieces of its ranks: whole in one, or ranges that follow each other.

Version 1 of sharding stage 1 and stage 2 store a state whole, on one rank. Version 2 and stage 3 store a range of
elements on each of several; the last ones are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paddleformers_fc.formats.legacy.rank_files import FileArray
from paddleformers_fc.mapping import Shape
from paddleformers_fc.storage.dtypes import dtype_size

_MAX_PADDING_BYTES = 4096
"""Bound on the padding of a rank's part of a flattened state. Devices align to 256 bytes or more."""

Placed = list[tuple[FileArray, tuple[int, int] | None]]
"""Pieces with the range of elements that each contains; None for the whole tensor."""


def arrange(shape: Shape, pieces: Sequence[FileArray]) -> Placed | str:
    """Arrange the pieces of a tensor, in the order of the sharding group.

    Args:
        shape: of the tensor.
        pieces: one or more.
    Returns:
        the pieces that contain elements of it, or as text why they do not make up such a tensor.
    """
    first, volume, at = pieces[0], math.prod(shape), 0
    if first.shape == shape:
        return [(first, None)]
    if any(len(piece.shape) != 1 for piece in pieces):
        return f"{', '.join(f'{list(one.shape)} in {one.file}' for one in pieces)}, and its parameter is {list(shape)}"
    if first.shape[0] >= volume:
        pieces = pieces[:1]
    placed: Placed = []
    for piece in pieces:
        end = min(at + piece.shape[0], volume)
        if end > at:
            placed.append((piece, (at, end)))
        at += piece.shape[0]
    padding = len(pieces) * _MAX_PADDING_BYTES // dtype_size(first.dtype)
    if not volume <= at < volume + padding:
        return f"{at} elements are stored, and its parameter has {volume}"
    return placed

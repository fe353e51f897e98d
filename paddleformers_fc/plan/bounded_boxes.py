"""Parts of whole tensors that fit into bounded memory.

A piece is a range of the tensor's elements in row-major order, so its bytes are successive bytes of the tensor. Pieces
can therefore be hashed, or written into a file, one after the other. A piece is planned as any flattened shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from paddleformers_fc.layout.shards import Shard, shard_bytes
from paddleformers_fc.storage.dtypes import dtype_size


def row_major_pieces(tensor: Shard, most_bytes: int) -> Iterator[Shard]:
    """Yield a tensor, or a box of one, in ranges of at most ``most_bytes`` bytes, or of one element, row-major.

    A range has a whole number of the longest rows, planes and so on that fit, so that few boxes make it up.

    Args:
        tensor: without a range; it is the only piece if it fits.
        most_bytes: bound on the bytes of a piece.
    """
    if shard_bytes(tensor) <= most_bytes:
        yield tensor
        return
    most = max(1, most_bytes // dtype_size(tensor.dtype))
    shape = tensor.box.shape
    row = max(size for axis in range(len(shape) + 1) if (size := math.prod(shape[axis:])) <= most)
    step = most // row * row
    for begin in range(0, tensor.size, step):
        yield msgspec.structs.replace(tensor, flat=(begin, min(begin + step, tensor.size)))

"""Tensors of Paddle, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import ShardedWeight

from benchmarks.performance.pieces import Array, Piece, Values


def begin(rank: int, ranks: int) -> None:
    """Join the other ranks."""
    if ranks > 1:
        dist.init_parallel_env()


def wait_for_all(ranks: int) -> None:
    """Wait until all ranks have come here."""
    if ranks > 1:
        dist.all_reduce(paddle.zeros([1]))


def hold(pieces: Sequence[Piece], values: Values, ranks: int) -> tuple[list[Any], list[Array]]:
    """Make the tensors of a rank; with the memory of each, flat."""
    tensors = [_weight(piece, values(piece)) for piece in pieces]
    return tensors, [_memory(piece, one.local_tensor) for piece, one in zip(pieces, tensors, strict=True)]


def _weight(piece: Piece, values: Array) -> Any:
    tensor = paddle.to_tensor(values.reshape(piece.held_shape), place="cpu")
    if piece.dtype == "bfloat16":
        tensor = tensor.view("bfloat16")
    flattened = () if piece.flat is None else (True, slice(*piece.flat))
    return ShardedWeight(piece.name, tensor, piece.local_shape, piece.shape, piece.lo, *flattened)


def _memory(piece: Piece, tensor: Any) -> Array:
    buffer = (ctypes.c_uint8 * piece.nbytes).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(buffer).view(piece.element)

"""Tensors of PyTorch: DTensors over one axis of ranks, or plain ones on a single rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.performance.pieces import Array, Piece, Values


def begin(rank: int, ranks: int) -> None:
    """Join the other ranks."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://{os.environ['PADDLE_MASTER']}", rank=rank, world_size=ranks)


def wait_for_all(ranks: int) -> None:
    """Wait until all ranks have come here."""
    if ranks > 1:
        dist.barrier()


def hold(pieces: Sequence[Piece], values: Values, ranks: int) -> tuple[list[Any], list[Array]]:
    """Make the tensors of a rank; with the memory of each, flat."""
    memory = [values(piece) for piece in pieces]
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    return [_tensor(piece, array, mesh) for piece, array in zip(pieces, memory, strict=True)], memory


def _tensor(piece: Piece, array: Array, mesh: Any) -> Any:
    local = torch.from_numpy(array.reshape(piece.local_shape))
    if mesh is None:
        return local
    cut = [axis for axis, (own, total) in enumerate(zip(piece.local_shape, piece.shape, strict=True)) if own != total]
    return DTensor.from_local(local, mesh, [Shard(cut[0]) if cut else Replicate()], run_check=False)

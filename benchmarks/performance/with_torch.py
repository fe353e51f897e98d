"""A rank with PyTorch: ``python -m benchmarks.performance.with_torch``, placed by the same environment as Paddle's.

The shards are those of the case, as DTensors over one axis of ranks, saved and loaded by PyTorch Distributed Checkpoint
(``torch.distributed.checkpoint``) with its own readers and writers of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard as TorchShard

from benchmarks.performance.models import Array
from benchmarks.performance.serving import Roles, serve
from paddleformers_fc.layout.shards import Shard


class TorchRank:
    """Tensors are DTensors, or plain ones on a single rank."""

    def __init__(self, ranks: int) -> None:
        self._mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
        self._state: dict[str, Any] = {}
        self._local: dict[tuple[str, str], Any] = {}

    def build(self, model: str, shards: Roles, values: Callable[[Shard], Array]) -> None:
        """Hold these shards, with these values."""
        self._state, self._local = {}, {}
        for role, names in shards.items():
            for name, shard in names.items():
                tensor = torch.from_numpy(values(shard).reshape(shard.box.shape))
                self._local[role, name] = tensor
                self._state[name] = tensor if self._mesh is None else self._distributed(shard, tensor)

    def memory(self) -> Mapping[tuple[str, str], Array]:
        """The memory of every tensor."""
        return {key: tensor.numpy().reshape(-1) for key, tensor in self._local.items()}

    def work(self, verb: str, contender: str, places: list[Path]) -> int:
        """Save or load."""
        alone = self._mesh is None
        if verb == "save":
            dcp.save(self._state, storage_writer=dcp.FileSystemWriter(str(places[0])), no_dist=alone)
        else:
            dcp.load(self._state, storage_reader=dcp.FileSystemReader(str(places[0])), no_dist=alone)
        return -1

    def _distributed(self, shard: Shard, tensor: Any) -> Any:
        pairs = zip(shard.box.shape, shard.global_shape, strict=True)
        cut = [axis for axis, (own, total) in enumerate(pairs) if own != total]
        placement = TorchShard(cut[0]) if cut else Replicate()
        return DTensor.from_local(tensor, self._mesh, [placement], run_check=False)


def main() -> None:
    """Join the other ranks and serve."""
    rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://{os.environ['PADDLE_MASTER']}", rank=rank, world_size=ranks)
    serve(TorchRank(ranks), rank, ranks)


if __name__ == "__main__":
    main()

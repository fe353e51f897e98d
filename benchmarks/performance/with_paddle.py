"""A rank with Paddle: ``python -m benchmarks.performance.with_paddle``, placed by its environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

from benchmarks.performance.cases import CHECKS
from benchmarks.performance.contenders import CHECKERS, CONTENDERS, Held
from benchmarks.performance.models import Array
from benchmarks.performance.serving import Roles, serve
from paddleformers_fc import cpu_runtime
from paddleformers_fc.distributed.channel import job_channel
from paddleformers_fc.execute.memory import host_view
from paddleformers_fc.layout.shards import Shard


class PaddleRank:
    """Tensors are Paddle's, on the CPU."""

    def __init__(self) -> None:
        self._held: Held | None = None

    def build(self, model: str, shards: Roles, values: Callable[[Shard], Array]) -> None:
        """Hold these shards, with these values."""
        self._held = None
        weights = {
            role: {name: _weight(shard, values(shard)) for name, shard in names.items()}
            for role, names in shards.items()
        }
        self._held = Held(model, shards, weights, job_channel())

    def memory(self) -> Mapping[tuple[str, str], Array]:
        """The memory of every tensor."""
        found: dict[tuple[str, str], Array] = {}
        for role, names in self._now.weights.items():
            for name, weight in names.items():
                view = host_view(weight.local_tensor)
                if view is None:
                    raise RuntimeError(f"{name} is not in main memory")
                found[role, name] = view
        return found

    def work(self, verb: str, contender: str, places: list[Path]) -> int:
        """Save, load, start, export or check."""
        if verb in CHECKS:
            CHECKERS[contender].check(verb, places[0])
            return -1
        chosen = CONTENDERS[contender]
        if verb == "save":
            chosen.save(places[0], self._now)
            return -1
        if verb == "export":
            chosen.export(places[0], places[1], self._now)
            return -1
        return chosen.load(places[0], self._now) if verb == "load" else chosen.start(places[0], self._now)

    @property
    def _now(self) -> Held:
        if self._held is None:
            raise RuntimeError("nothing was built")
        return self._held


def _weight(shard: Shard, values: Array) -> Any:
    shape = shard.box.shape if shard.flat is None else values.shape
    if shard.dtype == "bfloat16":
        tensor = paddle.to_tensor(values.view("uint16").reshape(shape), place="cpu").view("bfloat16")
    else:
        tensor = paddle.to_tensor(values.reshape(shape), place="cpu")
    if shard.flat is None:
        return ShardedWeight(shard.name, tensor, shape, shard.global_shape, shard.box.lo)
    return ShardedWeight(
        shard.name, tensor, shard.box.shape, shard.global_shape, shard.box.lo, True, slice(*shard.flat)
    )


def main() -> None:
    """Join the other ranks and serve."""
    cpu_runtime.activate()
    ranks = int(os.environ["PADDLE_TRAINERS_NUM"])
    if ranks > 1:
        dist.init_parallel_env()
    serve(PaddleRank(), int(os.environ["PADDLE_TRAINER_ID"]), ranks)


if __name__ == "__main__":
    main()

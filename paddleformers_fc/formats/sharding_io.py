"""Checkpoints of PaddleFormers' ``sharding_io`` and of its zero-cost saves (FlashCheckpoint).

Every rank of a sharding group stores its own part of the weights, and ``model_meta.json`` describes the parameters of
all ranks. Weights with master weights are not stored; they are read from these (:mod:`.rank_shards`). Moving averages
are in ``ema.*.pdopt``.
"""

from __future__ import annotations

from paddleformers_fc.formats.legacy_hybrid import LegacyHybridFormat


class ShardingIoFormat(LegacyHybridFormat):
    """One pickle per rank, with a description of all parameters."""

    name = "sharding_io"
    title = "checkpoint of sharding_io or FlashCheckpoint (one file per rank and model_meta.json)"
    predicate = "was written rank by rank by sharding_io or FlashCheckpoint"
    described = True


SHARDING_IO = ShardingIoFormat()

"""An assumption of PaddleNLP's training arguments that does not hold for a float32 run on a CPU.

They accept sharding stage 1 version 2 (``split_param``) only together with ``amp_master_grad``, which needs bfloat16 or
float16, although the optimizer works in float32.
"""

from __future__ import annotations

import functools
from typing import Any

from paddle.distributed import fleet
from paddlenlp.trainer import TrainingArguments

_SPLIT = "split_param"


def split_parameters_in_float32() -> None:
    """Let ``TrainingArguments`` accept ``split_param`` without mixed precision.

    They are checked without it; it is switched on in the strategy that the checks have produced and that the optimizer
    reads later.
    """
    original = TrainingArguments.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        splits = _SPLIT in self.sharding_parallel_config and not (self.bf16 or self.fp16)
        if not splits:
            original(self)
            return
        given = self.sharding_parallel_config
        self.sharding_parallel_config = given.replace(_SPLIT, "").strip()
        original(self)
        self.sharding_parallel_config = given
        if self.sharding_parallel_degree > 1:
            fleet.fleet._user_defined_strategy.hybrid_configs["sharding_configs"].split_param = True

    TrainingArguments.__post_init__ = __post_init__

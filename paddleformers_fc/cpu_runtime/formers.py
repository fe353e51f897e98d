"""Patches for assumptions of a library's Trainer that do not hold on a CPU.

With gradient clipping, PaddleFormers' Trainer logs the global gradient norm through ``optimizer._inner_opt``, which
exists only with mixed precision. The patch skips this, so float32 runs log no ``global_norm``; clipping is unaffected.
The training arguments accept sharding stage 1 version 2 (``split_param``) only with ``amp_master_grad``, which needs
bfloat16 or float16, although the optimizer supports float32. Evaluating adapters needs a class that only exists with
PaddleFleet.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from paddle.distributed import fleet

from ..upstream import LIBRARY

_trainer: Any = import_module(f"{LIBRARY}.trainer.trainer")
_SPLIT = "split_param"


def clipping_in_float32() -> None:
    """Let ``Trainer._wrap_distributed_optimizer`` accept an optimizer without ``_inner_opt``."""
    original = _trainer.Trainer._wrap_distributed_optimizer

    @functools.wraps(original)
    def _wrap_distributed_optimizer(self: Any, optimizer: Any) -> Any:
        if hasattr(optimizer, "_inner_opt"):
            return original(self, optimizer)
        # Here the setting only enables logging the norm; the optimizer already clips.
        max_grad_norm, self.args.max_grad_norm = self.args.max_grad_norm, 0.0
        try:
            return original(self, optimizer)
        finally:
            self.args.max_grad_norm = max_grad_norm

    _trainer.Trainer._wrap_distributed_optimizer = _wrap_distributed_optimizer


def split_parameters_in_float32() -> None:
    """Let ``TrainingArguments`` accept ``split_param`` without mixed precision.

    Run the checks without ``split_param``, then set it in the resulting strategy, which the optimizer reads later. In
    PaddleNLP it is a word in ``sharding_parallel_config``.
    """
    arguments = _trainer.TrainingArguments
    original = arguments.__post_init__
    key = _SPLIT if hasattr(arguments, _SPLIT) else "sharding_parallel_config"
    size = "sharding_parallel_size" if key == _SPLIT else "sharding_parallel_degree"

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        given = getattr(self, key)
        splits = given is True or _SPLIT in str(given)
        if not splits or self.bf16 or self.fp16:
            original(self)
            return
        setattr(self, key, False if given is True else given.replace(_SPLIT, "").strip())
        original(self)
        if getattr(self, size) > 1 and _trainer.ShardingOption.SHARD_OP in self.sharding:
            setattr(self, key, given)
            fleet.fleet._user_defined_strategy.hybrid_configs["sharding_configs"].split_param = True

    arguments.__post_init__ = __post_init__


def evaluation_of_adapters() -> None:
    """Define PaddleFleet's class for an ``isinstance`` test, if it is missing; it has no instances."""

    class AbsentModel:
        pass

    if not hasattr(_trainer, "GPTModel"):
        _trainer.GPTModel = AbsentModel

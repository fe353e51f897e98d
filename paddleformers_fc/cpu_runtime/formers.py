"""Assumptions of a library's Trainer that do not hold for a run on a CPU.

With gradient clipping, PaddleFormers' Trainer records the global gradient norm through ``optimizer._inner_opt``, which
exists only if the optimizer was wrapped for mixed precision. The training arguments accept sharding stage 1 version 2
(``split_param``) only together with ``amp_master_grad``, which needs bfloat16 or float16, although the optimizer works
in float32. The patches omit the first step and run what the second guards.

An evaluation of adapters needs a class that is imported with PaddleFleet only. The patch defines one without
instances.

The Trainer's log has no ``global_norm`` in float32 runs; clipping itself is unaffected.
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
    """Let ``Trainer._wrap_distributed_optimizer`` accept a plain optimizer, which has none inside it."""
    original = _trainer.Trainer._wrap_distributed_optimizer

    @functools.wraps(original)
    def _wrap_distributed_optimizer(self: Any, optimizer: Any) -> Any:
        if hasattr(optimizer, "_inner_opt"):
            return original(self, optimizer)
        # The setting is read here for the record of the norm only; the optimizer already has the clip.
        max_grad_norm, self.args.max_grad_norm = self.args.max_grad_norm, 0.0
        try:
            return original(self, optimizer)
        finally:
            self.args.max_grad_norm = max_grad_norm

    _trainer.Trainer._wrap_distributed_optimizer = _wrap_distributed_optimizer


def split_parameters_in_float32() -> None:
    """Let ``TrainingArguments`` accept ``split_param`` without mixed precision.

    They are checked with ``split_param`` off; it is switched on in the strategy that the checks have produced and that
    the optimizer reads later. PaddleNLP has it as a word of ``sharding_parallel_config``.
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
    """Put a class without instances in the ``isinstance`` test for the class of PaddleFleet."""

    class AbsentModel:
        pass

    if not hasattr(_trainer, "GPTModel"):
        _trainer.GPTModel = AbsentModel

"""Refuse unsupported optimizers before a step runs and before anything is loaded.

A checkpoint contains the states of Paddle's AdamW, by parameter. Another optimizer has states of other names or shapes,
or none that it describes. One whose parameters sharding has fused has states of the fused buffers, not of the
parameters. The first would fail at the first save. The second would also resume without an error, with loaded states
that it does not use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)
from paddle.optimizer import AdamW
from paddleformers.utils.optimizer import AdamWCustom, AdamWMini

from paddleformers_fc.errors import OptionError

_WRAPPED = ("_inner_opt", "_optim")
"""Where Paddle's wrappers keep what they wrap."""


def refuse_unsupported(optimizer: Any) -> None:
    """Refuse an optimizer whose states cannot be saved and loaded by parameter.

    Args:
        optimizer: the optimizer with whatever wrappers the Trainer has put around it; None if there is none yet.

    Raises:
        OptionError: it is not Paddle's AdamW, or its parameters are fused.
    """
    if optimizer is None:
        return
    wrappers = list(_unwrapped(optimizer))
    _refuse_other_than_adamw(wrappers[-1])
    for wrapper in wrappers:
        if isinstance(wrapper, DygraphShardingOptimizer):
            _refuse_fused(wrapper)


def _unwrapped(optimizer: Any) -> Iterator[Any]:
    """The optimizer, what it wraps, and so on; the last one is the optimizer itself.

    Wrappers delegate missing attributes, so only their own are read; and an optimizer of stage 3 names itself as the
    wrapped one.
    """
    yield optimizer
    own = vars(optimizer)
    wrapped = next((own[name] for name in _WRAPPED if own.get(name) is not None), optimizer)
    if wrapped is not optimizer:
        yield from _unwrapped(wrapped)


def _refuse_other_than_adamw(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, AdamW) and not isinstance(optimizer, AdamWMini | AdamWCustom):
        if not optimizer._amsgrad:
            return
        kind += "(amsgrad=True)"
    raise OptionError(
        f"flex_checkpoint: true does not support the optimizer {kind}, only paddle.optimizer.AdamW without amsgrad.",
        where="optimizer of the Trainer",
        next_step="Train with AdamW; or set ignore_save_lr_and_optim: true to save weights alone; or remove "
        "flex_checkpoint.",
    )


def _refuse_fused(optimizer: Any) -> None:
    """States of fused buffers, which sharding stage 1 can make in its first version, are in no checkpoint."""
    # Where only communication is fused, Paddle steps with the parameters themselves.
    if not (optimizer.tensor_fusion and optimizer.fuse_optimizer):
        return
    raise OptionError(
        "flex_checkpoint: true contradicts another option.",
        where="training arguments",
        evidence=[
            "flex_checkpoint: true and stage1_tensor_fusion: true: the optimizer then works with states of fused "
            "parameters, which are not supported yet"
        ],
        next_step="Remove one of the two keys.",
    )

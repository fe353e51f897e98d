"""Refuse unsupported optimizers before a step runs and before anything is loaded.

A checkpoint contains the states of :data:`~paddleformers_fc.layout.roles.OPTIMIZERS` by parameter. Another optimizer
has states of other names or shapes, and would fail at the first save. An optimizer whose parameters sharding has fused
has states of the fused buffers. It would also resume without an error, with loaded states that it does not use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizer,
)

from paddleformers_fc.errors import OptionError
from paddleformers_fc.layout.roles import OPTIMIZERS, OptimizerDescriptor

_WRAPPED = ("_inner_opt", "_optim")
"""Where Paddle's wrappers keep what they wrap."""


def refuse_unsupported(optimizer: Any) -> None:
    """Refuse an optimizer whose states cannot be saved and loaded by parameter.

    Args:
        optimizer: the optimizer with whatever wrappers the Trainer has put around it; None if there is none yet.

    Raises:
        OptionError: its class or an argument of it is not supported, or its parameters are fused.
    """
    if optimizer is None:
        return
    wrappers = list(_unwrapped(optimizer))
    _refuse_unknown_states(wrappers[-1])
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


def _refuse_unknown_states(optimizer: Any) -> None:
    kind, names = type(optimizer).__name__, {one.__name__ for one in type(optimizer).__mro__}
    rows = [one for one in OPTIMIZERS if isinstance(optimizer, getattr(paddle.optimizer, one.name))]
    if rows and names.isdisjoint(rows[0].variants):
        set_flags = [flag for flag in rows[0].flags if getattr(optimizer, f"_{flag}")]
        if not set_flags:
            return
        kind += f"({', '.join(f'{flag}=True' for flag in set_flags)})"
    raise OptionError(
        f"flex_checkpoint: true does not support the optimizer {kind}, only {' or '.join(map(_text, OPTIMIZERS))}.",
        where="optimizer of the Trainer",
        next_step=f"Train with {' or '.join(one.name for one in OPTIMIZERS)}; or set ignore_save_lr_and_optim: true to "
        "save weights alone; or remove flex_checkpoint.",
    )


def _text(optimizer: OptimizerDescriptor) -> str:
    return f"paddle.optimizer.{optimizer.name}" + "".join(f" without {flag}" for flag in optimizer.flags)


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

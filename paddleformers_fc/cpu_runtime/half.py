"""bfloat16 weights on a CPU: bfloat16 storage, float32 arithmetic.

Training in bfloat16 with float32 master weights (O2) needs four kernels that Paddle's CPU build lacks. Bfloat16
operands of ``linear``, ``matmul`` and ``c_embedding`` are cast to float32, and results stay float32: activations are
wider than on an accelerator, but parameters, their gradients before accumulation, and all saved tensors have the same
dtypes. ``adamw_`` updates the master weight in float32, as on an accelerator, and rounds it into the parameter. Without
a master weight, it computes in float32 and rounds the parameter and its states.

Time: a float32 copy of each operand per call. Memory: that copy, until the backward has used it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import _C_ops

_WIDENED = ("linear", "matmul", "c_embedding")
# Positions of arguments of adamw_ after parameter and gradient.
_STATES, _MASTER_WEIGHT, _MULTI_PRECISION = slice(1, 6), 6, 16


def widen(value: Any) -> Any:
    """Cast a bfloat16 tensor to float32, and return everything else unchanged. Its gradient is bfloat16."""
    is_half = isinstance(value, paddle.Tensor) and value.dtype == paddle.bfloat16
    return value.astype("float32") if is_half else value


def widened(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator so that it casts bfloat16 operands to float32."""

    def compute(*arguments: Any, **named: Any) -> Any:
        return operator(*map(widen, arguments), **{name: widen(value) for name, value in named.items()})

    return compute


def _master_weight_update(adamw_: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``adamw_`` so that it also accepts a bfloat16 parameter."""

    def update(param: Any, grad: Any, *others: Any) -> Any:
        master_weight = others[_MASTER_WEIGHT]
        if param.dtype != paddle.bfloat16:
            return adamw_(param, grad, *others)
        if master_weight is None:
            wide = [widen(one) for one in (param, *others)]
            result = adamw_(wide[0], widen(grad), *wide[1:])
            for own, updated in zip((param, *others[_STATES]), (wide[0], *wide[1:][_STATES]), strict=True):
                if own is not None and own is not updated:
                    paddle.assign(updated.astype(own.dtype), own)
            return result
        # Pass the master weight to the kernel as an ordinary float32 parameter.
        changed = list(others)
        changed[_MASTER_WEIGHT], changed[_MULTI_PRECISION] = None, False
        result = adamw_(master_weight, widen(grad), *changed)
        paddle.assign(master_weight.astype(param.dtype), param)
        return result

    return update


def apply() -> None:
    """Replace the four operators in ``paddle._C_ops``."""
    for name in _WIDENED:
        setattr(_C_ops, name, widened(getattr(_C_ops, name)))
    _C_ops.adamw_ = _master_weight_update(_C_ops.adamw_)

"""bfloat16 weights on a CPU: bfloat16 storage, float32 arithmetic.

Training in bfloat16 with float32 master weights (O2) is what real checkpoints come from, and Paddle's CPU build
lacks four kernels of it: ``linear``, ``matmul``, ``c_embedding`` and ``adamw_``. The first three get their bfloat16
operands widened to float32, and what they return stays float32, so that activations are wider than on an
accelerator; parameters, their gradients before accumulation, and everything that is saved have the dtypes they have
there. ``adamw_`` updates the master weight, in float32 as on an accelerator, and rounds it into the parameter.

Time: one widened copy of each operand per call. Memory: that copy, until the backward has used it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle import _C_ops

_WIDENED = ("linear", "matmul", "c_embedding")


def widen(value: Any) -> Any:
    """A bfloat16 tensor as float32; everything else as it is. Gradients flow back in bfloat16."""
    is_half = isinstance(value, paddle.Tensor) and value.dtype == paddle.bfloat16
    return value.astype("float32") if is_half else value


def widened(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, computing in float32 what it is given in bfloat16."""

    def compute(*arguments: Any, **named: Any) -> Any:
        return operator(*map(widen, arguments), **{name: widen(value) for name, value in named.items()})

    return compute


def _master_weight_update(adamw_: Callable[..., Any]) -> Callable[..., Any]:
    """``adamw_`` that also takes a bfloat16 parameter, if it comes with a master weight."""

    def update(
        param: Any,
        grad: Any,
        learning_rate: Any,
        moment1: Any,
        moment2: Any,
        moment2_max: Any,
        beta1_pow: Any,
        beta2_pow: Any,
        master_weight: Any,
        skip_update: Any,
        beta1: float,
        beta2: float,
        epsilon: float,
        lr_ratio: float,
        coeff: float,
        with_decay: bool,
        lazy_mode: bool,
        min_row_size_to_use_multithread: int,
        multi_precision: bool,
        use_global_beta_pow: bool,
        amsgrad: bool,
    ) -> Any:
        states = (learning_rate, moment1, moment2, moment2_max, beta1_pow, beta2_pow)
        factors = (beta1, beta2, epsilon, lr_ratio, coeff, with_decay, lazy_mode, min_row_size_to_use_multithread)
        if param.dtype != paddle.bfloat16 or master_weight is None:
            flags = (multi_precision, use_global_beta_pow, amsgrad)
            return adamw_(param, grad, *states, master_weight, skip_update, *factors, *flags)
        # To the kernel the master weight is an ordinary float32 parameter.
        flags = (False, use_global_beta_pow, amsgrad)
        result = adamw_(master_weight, widen(grad), *states, None, skip_update, *factors, *flags)
        paddle.assign(master_weight.astype(param.dtype), param)
        return result

    return update


def apply() -> None:
    """Replace the four operators where Paddle looks them up."""
    for name in _WIDENED:
        setattr(_C_ops, name, widened(getattr(_C_ops, name)))
    _C_ops.adamw_ = _master_weight_update(_C_ops.adamw_)

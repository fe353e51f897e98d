"""The four roles of a checkpoint, and how an optimizer state's name tells its parameter.

Paddle names the states of a parameter ``p`` as ``p.w_0`` (master weight), ``p.moment1_0``, ``p.moment2_0`` and
``p.beta1_pow_acc_0``, ``p.beta2_pow_acc_0`` (``paddle/optimizer/adamw.py``, ``sharded_state_dict``). Master weights and
moments have the shape of their parameter and follow its mapping; the powers are one number per parameter.
"""

from __future__ import annotations

import msgspec

MODEL_STATE = "model_state"
MASTER_WEIGHT = "master_weight"
OPTIMIZER_STATE = "optimizer_state"
EMA_STATE = "ema_state"
ROLES = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE, EMA_STATE)

MASTER_SUFFIX = ".w_0"
MOMENT_SUFFIXES = (".moment1_0", ".moment2_0", ".moment2_max_0", ".velocity_0")
SCALAR_SUFFIXES = (".beta1_pow_acc_0", ".beta2_pow_acc_0")
STATE_SUFFIXES = (MASTER_SUFFIX, *MOMENT_SUFFIXES, *SCALAR_SUFFIXES)

_STATE_ROLES = frozenset({MASTER_WEIGHT, OPTIMIZER_STATE})
_SCALAR = {suffix: suffix in SCALAR_SUFFIXES for suffix in STATE_SUFFIXES}


class StateName(msgspec.Struct, frozen=True, gc=False):
    """A state's name taken apart.

    Args:
        parameter: the parameter that the state belongs to.
        suffix: what follows the parameter's name; empty for the parameter itself.
        scalar: whether the state is one number instead of a tensor of the parameter's shape.
    """

    parameter: str
    suffix: str
    scalar: bool


def parameter_of(role: str, name: str) -> str:
    """The parameter that a tensor belongs to: itself, or the one whose state it is.

    Args:
        role: one of :data:`ROLES`.
        name: the full name.
    """
    return split_state_name(role, name).parameter if role in _STATE_ROLES else name


def split_state_name(role: str, name: str) -> StateName:
    """The parameter and suffix of a state's name.

    Args:
        role: one of :data:`ROLES`; names of ``model_state`` have no suffix.
        name: the full name.
    """
    if role in _STATE_ROLES:
        parameter, dot, last = name.rpartition(".")
        scalar = _SCALAR.get(dot + last)
        if scalar is not None:
            return StateName(parameter, dot + last, scalar)
    return StateName(name, "", False)

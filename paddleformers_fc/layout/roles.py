"""The roles of a checkpoint and the supported optimizers with their states: one table that every other module reads.

Paddle names the states of a parameter ``p`` as ``p.w_0`` (master weight), ``p.moment1_0``, ``p.moment2_0`` and
``p.beta1_pow_acc_0``, ``p.beta2_pow_acc_0`` (``paddle/optimizer/adamw.py``, ``sharded_state_dict``). A state with the
shape of its parameter follows the mapping of the parameter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

MODEL_STATE = "model_state"
MASTER_WEIGHT = "master_weight"
OPTIMIZER_STATE = "optimizer_state"
EMA_STATE = "ema_state"


class StateShape(enum.Enum):
    """The shape of a state in relation to its parameter."""

    PARAMETER = "as the parameter"
    NUMBER = "one number"


@dataclass(frozen=True)
class StateDescriptor:
    """A kind of tensor that exists per parameter.

    Args:
        role: the directory of a checkpoint that contains it.
        suffix: follows the name of the parameter; empty for a role whose tensors are named as the parameters are.
        shape: relation to the shape of the parameter.
        dtype: numpy name of the element type; empty for that of the parameter.
        half_only: whether it exists only for parameters with elements of two bytes.
    """

    role: str
    suffix: str = ""
    shape: StateShape = StateShape.PARAMETER
    dtype: str = ""
    half_only: bool = False


@dataclass(frozen=True)
class OptimizerDescriptor:
    """An optimizer whose states a checkpoint can contain.

    Args:
        name: its class in ``paddle.optimizer``; subclasses have the same states.
        states: the states of a parameter.
        option: the value of PaddleFormers' ``optim`` that selects it; empty if only a script can.
        variants: names of subclasses with other states.
        flags: arguments of the class under which it has other states.
    """

    name: str
    states: tuple[StateDescriptor, ...]
    option: str = ""
    variants: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


MASTER = StateDescriptor(MASTER_WEIGHT, ".w_0", dtype="float32", half_only=True)

OPTIMIZERS = (
    OptimizerDescriptor(
        "AdamW",
        (
            StateDescriptor(OPTIMIZER_STATE, ".moment1_0", dtype="float32"),
            StateDescriptor(OPTIMIZER_STATE, ".moment2_0", dtype="float32"),
            StateDescriptor(OPTIMIZER_STATE, ".beta1_pow_acc_0", StateShape.NUMBER, "float32"),
            StateDescriptor(OPTIMIZER_STATE, ".beta2_pow_acc_0", StateShape.NUMBER, "float32"),
            MASTER,
        ),
        option="adamw",
        variants=("AdamWMini", "AdamWCustom"),
        flags=("amsgrad",),
    ),
)
"""The supported optimizers; the first one is assumed if a checkpoint has no optimizer states."""

STATES = (
    StateDescriptor(MODEL_STATE),
    MASTER,
    *(state for optimizer in OPTIMIZERS for state in optimizer.states),
    # Checkpoints of other writers contain these.
    StateDescriptor(OPTIMIZER_STATE, ".moment2_max_0", dtype="float32"),
    StateDescriptor(OPTIMIZER_STATE, ".velocity_0", dtype="float32"),
    StateDescriptor(EMA_STATE),
)
"""Every state that a checkpoint may contain."""

ROLES = tuple(dict.fromkeys(state.role for state in STATES))

_BY_SUFFIX = {state.suffix: state for state in STATES if state.suffix}
STATE_SUFFIXES = tuple(_BY_SUFFIX)
_STATE_ROLES = frozenset(state.role for state in _BY_SUFFIX.values())
_SCALAR = {suffix: state.shape is StateShape.NUMBER for suffix, state in _BY_SUFFIX.items()}


class StateName(msgspec.Struct, frozen=True, gc=False):
    """The parts of a state's name.

    Args:
        parameter: the parameter that the state belongs to.
        suffix: follows the parameter's name; empty for the parameter itself.
        scalar: whether the state is one number instead of a tensor of the parameter's shape.
    """

    parameter: str
    suffix: str
    scalar: bool


def parameter_of(role: str, name: str) -> str:
    """Return the parameter that a tensor belongs to: itself, or the parameter whose state it is.

    Args:
        role: one of :data:`ROLES`.
        name: the full name.
    """
    return split_state_name(role, name).parameter if role in _STATE_ROLES else name


def split_state_name(role: str, name: str) -> StateName:
    """Split the name of a state into parameter and suffix.

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


def optimizer_of(states: Iterable[str]) -> OptimizerDescriptor:
    """Return the optimizer that has most of the kinds of states in a checkpoint.

    Args:
        states: full names of stored optimizer states.
    """
    suffixes = {name[name.rfind(".") :] for name in states}
    return max(OPTIMIZERS, key=lambda one: sum(state.suffix in suffixes for state in one.states))

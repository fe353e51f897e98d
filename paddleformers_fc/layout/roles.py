"""The roles of a checkpoint and the supported optimizers with their states: one table that every other module reads.

The states of a parameter ``p`` are named ``p.w_0`` (master weight), ``p.moment1_0``, ``p.beta1_pow_acc_0``: the name of
Paddle's accumulator and ``_0``, as in Paddle's FlexCheckpoint (``paddle/optimizer/adamw.py``, ``sharded_state_dict``).
A state with the shape of its parameter follows the mapping of the parameter.

:func:`register_optimizer` adds an optimizer in this process. Readers of its checkpoints need no registration: a state
whose suffix is not in the table is one number if its shape is ``(1,)``, otherwise it has the shape of its parameter.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import structs

from paddleformers_fc.api_arguments import NAMES, instance_of, require
from paddleformers_fc.errors import OptionError

MODEL_STATE = "model_state"
MASTER_WEIGHT = "master_weight"
OPTIMIZER_STATE = "optimizer_state"
EMA_STATE = "ema_state"

NUMBER_SHAPE = (1,)
"""Shape of a state that is one number per parameter."""


class StateShape(enum.Enum):
    """The shape of a state in relation to its parameter."""

    PARAMETER = "as the parameter"
    NUMBER = "one number"
    SHARD_NUMBER = "one number per shard"
    """A tensor with one element per box that the parameter is cut into, cut as the parameter."""


class StateDescriptor(msgspec.Struct, frozen=True):
    """A kind of tensor that exists per parameter.

    Args:
        role: the directory of a checkpoint that contains it.
        suffix: follows the name of the parameter; empty for a role whose tensors are named as the parameters are.
        shape: relation to the shape of the parameter.
        dtype: numpy name of the element type; empty for that of the parameter.
        half_only: whether it exists only for parameters with elements of two bytes.
        accumulator: Paddle's name of it, if that differs from the suffix without ``_0``.
        sometimes: whether it exists only under an argument of the optimizer, or for some parameters.
    """

    role: str
    suffix: str = ""
    shape: StateShape = StateShape.PARAMETER
    dtype: str = ""
    half_only: bool = False
    accumulator: str = ""
    sometimes: bool = False

    @property
    def paddle_name(self) -> str:
        """Paddle's name of the accumulator."""
        return self.accumulator or self.suffix.removeprefix(".").removesuffix("_0")


class OptimizerDescriptor(msgspec.Struct, frozen=True):
    """An optimizer whose states a checkpoint can contain.

    Args:
        name: module and name of its class.
        states: the states of a parameter.
        option: the value of PaddleFormers' ``optim`` that selects it; empty if only a script can.
        unavailable: why a run cannot use it, as the end of a sentence; empty if it can.
    """

    name: str
    states: tuple[StateDescriptor, ...]
    option: str = ""
    unavailable: str = ""

    @property
    def short_name(self) -> str:
        """The name of its class."""
        return self.name.rpartition(".")[2]


MASTER = StateDescriptor(MASTER_WEIGHT, ".w_0", dtype="float32", half_only=True)
_MOMENT1 = StateDescriptor(OPTIMIZER_STATE, ".moment1_0", dtype="float32")
_MOMENT2 = StateDescriptor(OPTIMIZER_STATE, ".moment2_0", dtype="float32")
_MOMENT2_MAX = StateDescriptor(OPTIMIZER_STATE, ".moment2_max_0", dtype="float32", sometimes=True)
_SHARD_MOMENT2 = StateDescriptor(
    OPTIMIZER_STATE, ".moment2_of_shard_0", StateShape.SHARD_NUMBER, "float32", accumulator="moment2"
)
_POWERS = tuple(
    StateDescriptor(OPTIMIZER_STATE, f".beta{index}_pow_acc_0", StateShape.NUMBER, "float32") for index in (1, 2)
)

OPTIMIZERS = (
    OptimizerDescriptor(
        "paddle.optimizer.adamw.AdamW", (_MOMENT1, _MOMENT2, _MOMENT2_MAX, *_POWERS, MASTER), option="adamw"
    ),
    OptimizerDescriptor(
        "paddleformers.utils.optimizer.AdamWCustom", (_MOMENT1, _MOMENT2, *_POWERS, MASTER), option="adamw_custom"
    ),
    OptimizerDescriptor(
        "paddleformers.utils.optimizer.AdamWMini", (_MOMENT1, _SHARD_MOMENT2, *_POWERS, MASTER), option="adamw_mini"
    ),
    # As Paddle's development branch defines it: matrices have moment1 alone, other parameters the states of AdamW.
    OptimizerDescriptor(
        "paddle.optimizer.muon.Muon",
        (_MOMENT1, *(structs.replace(state, sometimes=True) for state in (_MOMENT2, *_POWERS)), MASTER),
        option="muon",
        unavailable="Paddle 3.3.1 has no Muon",
    ),
)
"""The optimizers that this package declares; the first one is assumed if a checkpoint has no optimizer states."""

STATES = (
    StateDescriptor(MODEL_STATE),
    MASTER,
    *dict.fromkeys(structs.replace(state, sometimes=False) for optimizer in OPTIMIZERS for state in optimizer.states),
    # Checkpoints of other writers contain it.
    StateDescriptor(OPTIMIZER_STATE, ".velocity_0", dtype="float32"),
    StateDescriptor(EMA_STATE),
)
"""Every state that this package declares."""

ROLES = tuple(dict.fromkeys(state.role for state in STATES))

_BY_SUFFIX = {state.suffix: state for state in STATES if state.suffix}
STATE_SUFFIXES = tuple(_BY_SUFFIX)
SHARD_NUMBER_SUFFIXES = tuple(one.suffix for one in STATES if one.shape is StateShape.SHARD_NUMBER)
_STATE_ROLES = frozenset(state.role for state in _BY_SUFFIX.values())
_SHAPES = {suffix: state.shape for suffix, state in _BY_SUFFIX.items()}
_registered: dict[str, OptimizerDescriptor] = {}
_ACCUMULATOR = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class StateName(msgspec.Struct, frozen=True, gc=False):
    """The parts of a state's name.

    Args:
        parameter: the parameter that the state belongs to.
        suffix: follows the parameter's name; empty for the parameter itself.
        shape: relation of its shape to that of the parameter.
    """

    parameter: str
    suffix: str
    shape: StateShape = StateShape.PARAMETER

    @property
    def scalar(self) -> bool:
        """Return whether the state is one number instead of a tensor of the parameter's shape."""
        return self.shape is StateShape.NUMBER


def parameter_of(role: str, name: str) -> str:
    """Return the parameter that a tensor belongs to: itself, or the parameter whose state it is.

    Args:
        role: one of :data:`ROLES`.
        name: the full name.
    """
    return split_state_name(role, name).parameter if role in _STATE_ROLES else name


def split_state_name(role: str, name: str, shape: Iterable[int] = ()) -> StateName:
    """Split the name of a state into parameter and suffix.

    Args:
        role: one of :data:`ROLES`; names of ``model_state`` have no suffix.
        name: the full name.
        shape: of the whole tensor; it decides what a state of an undeclared suffix is.
    """
    if role in _STATE_ROLES:
        parameter, dot, last = name.rpartition(".")
        known = _SHAPES.get(dot + last)
        if known is not None:
            return StateName(parameter, dot + last, known)
        if dot and role == OPTIMIZER_STATE:
            number = tuple(shape) == NUMBER_SHAPE
            return StateName(parameter, dot + last, StateShape.NUMBER if number else StateShape.PARAMETER)
    return StateName(name, "")


def register_optimizer(optimizer: type, like_parameter: Iterable[str] = (), numbers: Iterable[str] = ()) -> None:
    """Declare an optimizer, so that checkpoints contain its states. Every process of a job must call it.

    Master weights need no declaration.

    Example:
        >>> register_optimizer(paddle.optimizer.Momentum, like_parameter=["velocity"])  # doctest: +SKIP

    Args:
        optimizer: its class; a subclass with states of its own needs a declaration of its own.
        like_parameter: names of the accumulators that have the shape of their parameter, as in ``_add_accumulator``.
        numbers: names of the accumulators that are one number per parameter, equal for all parts of the parameter.

    Raises:
        OptionError: an argument has another type; or a name is invalid, is declared twice, or means another state in
            this package.
    """
    like_parameter, numbers = (list(one) if isinstance(one, Iterator) else one for one in (like_parameter, numbers))
    require(instance_of(type, "the class of an optimizer"), optimizer=optimizer)
    require(NAMES, like_parameter=like_parameter, numbers=numbers)
    shapes = [(one, StateShape.PARAMETER) for one in like_parameter] + [(one, StateShape.NUMBER) for one in numbers]
    states = tuple(StateDescriptor(OPTIMIZER_STATE, f".{name}_0", shape) for name, shape in shapes)
    faults = [f"{name}: invalid name of an accumulator" for name, _ in shapes if not _ACCUMULATOR.fullmatch(name)]
    names = [name for name, _ in shapes]
    faults += [f"{name}: declared twice" for name in sorted(set(names)) if names.count(name) > 1]
    faults += [
        f"{state.paddle_name}: names master weights in this package"
        for state in states
        if state.suffix == MASTER.suffix
    ]
    faults += [
        f"{state.paddle_name}: declared '{state.shape.value}', and in this package '{_SHAPES[state.suffix].value}'"
        for state in states
        if _SHAPES.get(state.suffix, state.shape) is not state.shape
    ]
    name = qualified_name(optimizer)
    if faults:
        raise OptionError(
            f"Invalid declaration of the optimizer {name}.",
            where="register_optimizer",
            evidence=faults,
            next_step="Name each accumulator once, as _create_accumulators of the class does.",
        )
    _registered[name] = OptimizerDescriptor(name, (*states, MASTER))


def qualified_name(kind: type) -> str:
    """Return module and name of a class; one of PaddleFleet that was PaddleFormers' keeps its first name."""
    package, dot, module = kind.__module__.partition(".")
    return f"{'paddleformers' if package == 'paddlefleet' else package}{dot}{module}.{kind.__qualname__}"


def declared_optimizer(kind: type) -> OptimizerDescriptor | None:
    """Return the declaration of a class, without those of its bases; None if there is none."""
    name = qualified_name(kind)
    return _registered.get(name) or next((one for one in OPTIMIZERS if one.name == name), None)


def stored_optimizer(states: Mapping[str, tuple[str, tuple[int, ...]]]) -> OptimizerDescriptor:
    """Return the kinds of states that a checkpoint contains as an optimizer.

    Args:
        states: dtype and shape of the stored optimizer states by full name; without any, the first optimizer's.
    """
    if not states:
        return OPTIMIZERS[0]
    found: dict[str, tuple[StateShape, set[str]]] = {}
    for name, (dtype, shape) in states.items():
        state = split_state_name(OPTIMIZER_STATE, name, shape)
        found.setdefault(state.suffix, (state.shape, set()))[1].add(dtype)
    kinds = (
        # States of several types have those of their parameters.
        StateDescriptor(OPTIMIZER_STATE, suffix, shape, next(iter(dtypes)) if len(dtypes) == 1 else "")
        for suffix, (shape, dtypes) in found.items()
    )
    return OptimizerDescriptor("stored", (*kinds, MASTER))

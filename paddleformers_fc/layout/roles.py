"""The roles of a checkpoint, and the supported optimizers with their states: the one table for all other modules.

The states of a parameter ``p`` are named ``p.w_0`` (master weight), ``p.moment1_0``, ``p.beta1_pow_acc_0``: the name of
Paddle's accumulator and ``_0``, as in Paddle's FlexCheckpoint (``paddle/optimizer/adamw.py``, ``sharded_state_dict``).
A state with the shape of its parameter follows the parameter's mapping.

:func:`register_optimizer` adds an optimizer in this process. Readers of its checkpoints need no registration: a state
with an unknown suffix is one number if its shape is ``(1,)``; otherwise it has the shape of its parameter.
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
"""Shape of a state with one number per parameter."""


class StateShape(enum.Enum):
    """The shape of a state in relation to its parameter."""

    PARAMETER = "as the parameter"
    NUMBER = "one number"
    SHARD_NUMBER = "one number per shard"
    """A tensor with one element per shard of the parameter, sharded like the parameter."""


class StateDescriptor(msgspec.Struct, frozen=True):
    """A kind of tensor that exists per parameter.

    Args:
        role: its role, which is also its directory in a checkpoint.
        suffix: follows the parameter's name; empty if the tensors have the names of the parameters.
        shape: relation to the shape of the parameter.
        dtype: numpy name of the dtype; empty if it is the parameter's.
        half_only: whether it exists only for parameters with two-byte elements.
        accumulator: the name of Paddle's accumulator, if it is not the suffix without ``_0``.
        sometimes: whether it exists only with some optimizer arguments, or for some parameters.
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
        """The name of Paddle's accumulator."""
        return self.accumulator or self.suffix.removeprefix(".").removesuffix("_0")


class OptimizerDescriptor(msgspec.Struct, frozen=True):
    """An optimizer whose states a checkpoint can contain.

    Args:
        name: qualified name of its class.
        states: the states of a parameter.
        option: the value of PaddleFormers' ``optim`` that selects it; empty if only a script can select it.
        unavailable: why a run cannot use it, as the end of a sentence; empty if it can.
    """

    name: str
    states: tuple[StateDescriptor, ...]
    option: str = ""
    unavailable: str = ""

    @property
    def short_name(self) -> str:
        """The name of its class, without the module."""
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
    # As in Paddle's development branch: matrices have only moment1, other parameters have the states of AdamW.
    OptimizerDescriptor(
        "paddle.optimizer.muon.Muon",
        (_MOMENT1, *(structs.replace(state, sometimes=True) for state in (_MOMENT2, *_POWERS)), MASTER),
        option="muon",
        unavailable="Paddle 3.3.1 has no Muon",
    ),
)
"""The declared optimizers. The first is the default for checkpoints without optimizer states."""

STATES = (
    StateDescriptor(MODEL_STATE),
    MASTER,
    *dict.fromkeys(structs.replace(state, sometimes=False) for optimizer in OPTIMIZERS for state in optimizer.states),
    # Occurs in checkpoints of other writers.
    StateDescriptor(OPTIMIZER_STATE, ".velocity_0", dtype="float32"),
    StateDescriptor(EMA_STATE),
)
"""All declared states."""

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
        shape: relation to the shape of the parameter.
    """

    parameter: str
    suffix: str
    shape: StateShape = StateShape.PARAMETER

    @property
    def scalar(self) -> bool:
        """Whether the state is one number instead of a tensor of the parameter's shape."""
        return self.shape is StateShape.NUMBER


def parameter_of(role: str, name: str) -> str:
    """Return the name of the parameter that a tensor belongs to: its own name if it is a parameter.

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
        shape: the global shape, which classifies states with an undeclared suffix.
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
        optimizer: its class. A subclass with additional states must be declared separately.
        like_parameter: names of the accumulators with the shape of their parameter, as in ``_add_accumulator``.
        numbers: names of the accumulators with one number per parameter, equal for all shards of the parameter.

    Raises:
        OptionError: an argument has the wrong type; or a name is invalid, declared twice, or already used for a
            different state.
    """
    like_parameter, numbers = (list(one) if isinstance(one, Iterator) else one for one in (like_parameter, numbers))
    require(instance_of(type, "the class of an optimizer"), optimizer=optimizer)
    require(NAMES, like_parameter=like_parameter, numbers=numbers)
    shapes = [(one, StateShape.PARAMETER) for one in like_parameter] + [(one, StateShape.NUMBER) for one in numbers]
    states = tuple(StateDescriptor(OPTIMIZER_STATE, f".{name}_0", shape) for name, shape in shapes)
    faults = [f"{name}: invalid name of an accumulator" for name, _ in shapes if not _ACCUMULATOR.fullmatch(name)]
    names = [name for name, _ in shapes]
    faults += [f"{name}: declared twice" for name in sorted(set(names)) if names.count(name) > 1]
    faults += [f"{state.paddle_name}: reserved for master weights" for state in states if state.suffix == MASTER.suffix]
    faults += [
        f"{state.paddle_name}: declared '{state.shape.value}', but this package uses '{_SHAPES[state.suffix].value}'"
        for state in states
        if _SHAPES.get(state.suffix, state.shape) is not state.shape
    ]
    name = qualified_name(optimizer)
    if faults:
        raise OptionError(
            f"Invalid declaration of the optimizer {name}.",
            where="register_optimizer",
            evidence=faults,
            next_step="Name each accumulator once, as in _create_accumulators of the class.",
        )
    _registered[name] = OptimizerDescriptor(name, (*states, MASTER))


def qualified_name(kind: type) -> str:
    """Return the qualified name of a class; classes of PaddleFleet keep their name in PaddleFormers."""
    package, dot, module = kind.__module__.partition(".")
    return f"{'paddleformers' if package == 'paddlefleet' else package}{dot}{module}.{kind.__qualname__}"


def declared_optimizer(kind: type) -> OptimizerDescriptor | None:
    """Return the declaration of exactly this class, not of its bases; None if there is none."""
    name = qualified_name(kind)
    return _registered.get(name) or next((one for one in OPTIMIZERS if one.name == name), None)


def stored_optimizer(states: Mapping[str, tuple[str, tuple[int, ...]]]) -> OptimizerDescriptor:
    """Return a descriptor with the kinds of states that a checkpoint contains.

    Args:
        states: dtype and shape of the stored optimizer states by full name; if empty, the default optimizer is
            returned.
    """
    if not states:
        return OPTIMIZERS[0]
    found: dict[str, tuple[StateShape, set[str]]] = {}
    for name, (dtype, shape) in states.items():
        state = split_state_name(OPTIMIZER_STATE, name, shape)
        found.setdefault(state.suffix, (state.shape, set()))[1].add(dtype)
    kinds = (
        # States with several dtypes have the dtypes of their parameters.
        StateDescriptor(OPTIMIZER_STATE, suffix, shape, next(iter(dtypes)) if len(dtypes) == 1 else "")
        for suffix, (shape, dtypes) in found.items()
    )
    return OptimizerDescriptor("stored", (*kinds, MASTER))

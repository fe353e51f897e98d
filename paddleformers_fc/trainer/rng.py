"""The state of every random generator of a process, to and from JSON.

Python's, numpy's, Paddle's for this device and for the CPU, and those of the hybrid-parallel tracker for dropout under
tensor parallelism. Paddle's generator state is a device number, a seed, an offset and the engine's state as text. Its
pickle contains these four, and this module reads them without the pickle.

States are restored in the number of ranks that saved them, and otherwise not at all, with a warning.

About 30 kB per process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import paddle
from paddle.base import core
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddleformers_fc.errors import FormatError
from paddleformers_fc.storage.state_json import decode_object, encode
from paddleformers_fc.trainer.library import logger

_TENSOR_PARALLEL_GENERATOR = "model_parallel_rng"


_Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Taken(msgspec.Struct, forbid_unknown_fields=True):
    """One generator of Paddle: its engine's state are numbers in decimal, which Paddle parses without a check."""

    device: _Word
    seed: int
    offset: int
    engine: Annotated[str, msgspec.Meta(max_length=65536, pattern="^[0-9 ]*$")]


class _Generators(msgspec.Struct, forbid_unknown_fields=True):
    """The document of one process; Python and numpy validate the fields of type Any."""

    world_size: int
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: _Taken
    device: list[_Taken]
    hybrid_parallel: dict[str, list[_Taken]]


def capture(world_size: int, hybrid: bool) -> Callable[[], bytes]:
    """Capture the state of this process's generators, and return a function that encodes it as a JSON document.

    Args:
        world_size: number of processes; a state is only meaningful for the same number.
        hybrid: whether the hybrid-parallel tracker is in use.
    """
    tracked = get_rng_state_tracker().get_states_tracker() if hybrid else {}
    captured = {
        "world_size": world_size,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": _taken(core.default_cpu_generator().get_state()),
        "device": [_taken(state) for state in paddle.get_rng_state()],
        "hybrid_parallel": {name: [_taken(state) for state in states] for name, states in tracked.items()},
    }
    return partial(encode, captured, "random generators")


def restore(raw: bytes, where: str, world_size: int, hybrid: bool, tensor_parallel: bool) -> bool:
    """Set this process's generators to a captured state.

    Args:
        raw: the document of :func:`capture`.
        where: the file it was read from.
        world_size: number of processes now.
        hybrid: whether the hybrid-parallel tracker is in use.
        tensor_parallel: whether the tensor-parallel degree is above one; its generator is left alone otherwise.

    Returns:
        False if the number of processes has changed, in which case nothing is set.

    Raises:
        FormatError: the document is damaged.
    """
    try:
        state = msgspec.convert(decode_object(raw, where), type=_Generators)
        if state.world_size != world_size:
            return False
        # Both on generators of no account first: one that cannot be set would otherwise leave the others set.
        random.Random().setstate(state.python)
        np.random.RandomState().set_state(state.numpy)
        random.setstate(state.python)
        np.random.set_state(state.numpy)
        _set_device(state.device)
        core.default_cpu_generator().set_state(_made(state.cpu))
        if hybrid:
            _set_tracker(state.hybrid_parallel, tensor_parallel)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise FormatError(
            "The state of the random generators cannot be read.",
            where=where,
            evidence=[f"{type(error).__name__}: {error}"],
            next_step="The file was changed after it was written; resume from another checkpoint.",
        ) from error
    return True


def _set_device(states: list[_Taken]) -> None:
    current = paddle.get_rng_state()
    if len(states) != len(current):
        logger.warning(
            f"The random state of {len(states)} devices was saved and this process has {len(current)}: not restored."
        )
        return
    paddle.set_rng_state([_made(state) for state in states])


def _set_tracker(states: dict[str, list[_Taken]], tensor_parallel: bool) -> None:
    tracker = get_rng_state_tracker()
    known = set(tracker.get_states_tracker())
    wanted = {
        name: [_made(state) for state in saved]
        for name, saved in states.items()
        if tensor_parallel or name != _TENSOR_PARALLEL_GENERATOR
    }
    unknown = sorted(set(wanted) - known)
    if unknown:
        logger.warning(f"These generators do not exist under this parallel layout and stay unset: {unknown}.")
    tracker.set_states_tracker({name: saved for name, saved in wanted.items() if name in known})


def _taken(state: Any) -> dict[str, Any]:
    device, seed, offset, engine = state.__getstate__()
    return {"device": int(device), "seed": int(seed), "offset": int(offset), "engine": bytes(engine).decode("latin-1")}


def _made(taken: _Taken) -> Any:
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((taken.device, taken.seed, taken.offset, list(taken.engine.encode("latin-1"))))
    return state

"""Save and restore the random generators of a process as JSON.

Python, numpy and Paddle (device and CPU) each have a generator, and the hybrid-parallel tracker has those that drive
dropout under tensor parallelism. A Paddle generator is stored as its device number, seed, offset and engine state,
without pickle. States are restored only if the number of ranks is unchanged.

Size: about 30 kB per process.
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
from paddleformers_fc.formats.checkpoint import (
    AVERAGE as AVERAGE,
    DATA as DATA,
    STATE as STATE,
)
from paddleformers_fc.storage import state_json
from paddleformers_fc.trainer.library import (
    logger,
)

_TENSOR_PARALLEL_GENERATOR = "model_parallel_rng"


_Word = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _GeneratorRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A generator of Paddle, stored without pickle.

    The engine's state is a text of decimal numbers, which Paddle parses without checks.
    """

    device: _Word
    seed: int
    offset: int
    engine: Annotated[str, msgspec.Meta(max_length=65536, pattern="^[0-9 ]*$")]


class _Generators(msgspec.Struct, forbid_unknown_fields=True):
    """The generators of one process. Python and numpy validate the fields of type Any."""

    world_size: int
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: _GeneratorRecord
    device: list[_GeneratorRecord]
    hybrid_parallel: dict[str, list[_GeneratorRecord]]


def capture_generators(world_size: int, hybrid: bool) -> Callable[[], bytes]:
    """Capture the state of this process's generators, and return a function that encodes it as JSON, of about 30 kB.

    Args:
        world_size: number of processes, which must be the same at the restore.
        hybrid: whether the hybrid-parallel tracker is in use.
    """
    tracked = get_rng_state_tracker().get_states_tracker() if hybrid else {}
    captured = {
        "world_size": world_size,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": _to_record(core.default_cpu_generator().get_state()),
        "device": [_to_record(state) for state in paddle.get_rng_state()],
        "hybrid_parallel": {name: [_to_record(state) for state in states] for name, states in tracked.items()},
    }
    return partial(state_json.encode, captured, "random generators")


def restore_generators(raw: bytes, where: str, world_size: int, hybrid: bool, tensor_parallel: bool) -> bool:
    """Restore this process's generators.

    Args:
        raw: the JSON that the function of :func:`capture_generators` returns.
        where: the file that contains it, for errors.
        world_size: current number of processes.
        hybrid: whether the hybrid-parallel tracker is in use.
        tensor_parallel: whether the tensor-parallel degree is above one; its generator is unchanged otherwise.

    Returns:
        False if the number of processes has changed; nothing is restored then.

    Raises:
        FormatError: the file is damaged.
    """
    try:
        state = msgspec.convert(state_json.decode_object(raw, where), type=_Generators)
        if state.world_size != world_size:
            return False
        # Validate on throwaway generators: an invalid state must not leave only some generators restored.
        random.Random().setstate(state.python)
        np.random.RandomState().set_state(state.numpy)
        random.setstate(state.python)
        np.random.set_state(state.numpy)
        _set_device(state.device)
        core.default_cpu_generator().set_state(_to_state(state.cpu))
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


def _set_device(states: list[_GeneratorRecord]) -> None:
    current = paddle.get_rng_state()
    if len(states) != len(current):
        logger.warning(
            f"Random states of devices are not restored: {len(states)} were saved, and this process has {len(current)}."
        )
        return
    paddle.set_rng_state([_to_state(state) for state in states])


def _set_tracker(records: dict[str, list[_GeneratorRecord]], tensor_parallel: bool) -> None:
    tracker = get_rng_state_tracker()
    known = set(tracker.get_states_tracker())
    states = {
        name: [_to_state(record) for record in saved]
        for name, saved in records.items()
        if tensor_parallel or name != _TENSOR_PARALLEL_GENERATOR
    }
    unknown = sorted(set(states) - known)
    if unknown:
        logger.warning(f"These random generators do not exist under this layout and are not restored: {unknown}.")
    tracker.set_states_tracker({name: saved for name, saved in states.items() if name in known})


def _to_record(state: Any) -> dict[str, Any]:
    device, seed, offset, engine = state.__getstate__()
    return {"device": int(device), "seed": int(seed), "offset": int(offset), "engine": bytes(engine).decode("latin-1")}


def _to_state(record: _GeneratorRecord) -> Any:
    state = core.GeneratorState.__new__(core.GeneratorState)
    state.__setstate__((record.device, record.seed, record.offset, list(record.engine.encode("latin-1"))))
    return state

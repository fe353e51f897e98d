"""What this package does with the same faults: small checkpoints, and loads whose targets are compared afterwards.

The model is the simulated ERNIE 4.5 of :mod:`tests.execute.simulated`, whose fused layouts are made by hand. Every load
goes through the executor that the Trainer uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paddle

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.load import load_checkpoint, prepare_weights
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.families import ModelDescription
from tests.execute.simulated import MODEL, Arrays, Roles, attempt_save, canonical, live

ARRAYS = canonical()
OTHER = canonical(seed=1)
Bits = dict[tuple[str, str], tuple[str, bytes]]


@dataclass(frozen=True)
class Load:
    """How one rank's load ended.

    Args:
        before: dtype and bytes of every target, by role and name.
        after: the same, afterwards.
        error: what was raised.
    """

    before: Bits
    after: Bits
    error: FlexError | None


def save(
    directory: Path,
    arrays: Arrays = ARRAYS,
    tp: int = 1,
    sharded: int = 1,
    described: ModelDescription = MODEL,
    held: Callable[[int], Roles] | None = None,
) -> Path:
    """Save a job's weights and AdamW states, or what ``held`` gives for a rank, every rank a thread; the directory."""

    def layout(rank: int) -> Roles:
        return live(arrays, tp, rank, sharded=sharded)

    attempt_save(directory, held or layout, tp * sharded, described=described, parallel={"tp": tp}).results()
    return directory


def load(
    directory: Path,
    roles: Roles,
    verify: str = "size",
    aoa: Mapping[str, object] | None = None,
    described: ModelDescription = MODEL,
) -> Load:
    """Load a flex checkpoint into live weights."""

    def work() -> None:
        load_checkpoint(open_on_all_ranks(directory, ALONE, verify), roles, described, ALONE, aoa_config=aoa)

    return _watched(roles, work)


def load_open_weights(directory: Path, roles: Roles) -> Load:
    """Load open weights into a live model."""
    model = {"model_state": roles["model_state"]}
    return _watched(model, lambda: prepare_weights(directory, model, MODEL, ALONE).fill())


def _watched(roles: Roles, work: Callable[[], object]) -> Load:
    before, error = _bits(roles), None
    try:
        work()
    except FlexError as raised:
        error = raised
    return Load(before, _bits(roles), error)


def _bits(roles: Roles) -> Bits:
    held = {(role, name): weight.local_tensor for role, names in roles.items() for name, weight in names.items()}
    return {key: (str(tensor.dtype), tensor.numpy().tobytes()) for key, tensor in held.items()}


def refusal(found: Load) -> FlexError:
    """The error of a load that must have been refused with every target as it was."""
    assert found.error is not None, "the load was not refused"
    assert found.after == found.before
    return found.error


def right(found: Load, expected: Roles) -> bool:
    """Whether a load has put exactly these bits into every target."""
    if found.error is not None:
        raise found.error
    return found.after == _bits(expected)


def empty(arrays: Arrays = ARRAYS) -> Roles:
    """Live weights of a model that is about to be loaded."""
    return live(arrays, 1, 0, empty=True)


def model_of(arrays: Arrays) -> Roles:
    """What the live model holds after a load of these weights, without optimizer states."""
    return {"model_state": live(arrays, 1, 0)["model_state"]}


def cast(roles: Roles, dtype: str, *names: str) -> Roles:
    """The same live weights, those of the model, or some of them, in another dtype."""
    for name, weight in roles["model_state"].items():
        if not names or name in names:
            weight.local_tensor = weight.local_tensor.astype(dtype)
    return roles


def with_masters(roles: Roles) -> Roles:
    """The same live weights with master weights of their own memory."""
    masters: dict[str, Any] = {}
    for name, weight in roles["model_state"].items():
        fields = {**vars(weight), "key": f"{name}.w_0", "local_tensor": paddle.clone(weight.local_tensor)}
        masters[f"{name}.w_0"] = type(weight)(**fields)
    return {**roles, "master_weight": masters}

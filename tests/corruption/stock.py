"""What Paddle's own flex checkpoint does: a short script of saves and loads, played by ranks of their own.

A script is a list of steps; each is played in order, in one process per rank, and says what it left behind: the values
and dtypes of the tensors that it filled, or the error that it raised. Nothing of this runs in the process of the tests,
because the faults are about what stays behind in a process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness.on_ranks import run_on_ranks
from verification.forkserver import ForkServer

Tensor = dict[str, Any]
Step = dict[str, Any]


def tensor(values: Any, dtype: str = "float32", **where: Any) -> Tensor:
    """A tensor of a script.

    Args:
        values: nested numbers.
        dtype: by its numpy name.
        where: ``shape`` and ``offset`` of a part of a larger tensor; ``plain`` for a tensor that does not say.
    """
    return {"values": np.asarray(values).tolist(), "dtype": dtype, **where}


def unset(*shape: int, dtype: str = "float32", **where: Any) -> Tensor:
    """A tensor to be filled: -1 everywhere."""
    return tensor(np.full(shape, -1.0), dtype, **where)


def save(directory: Path, *by_rank: dict[str, Tensor], **options: Any) -> Step:
    """The step that saves; tensors by rank, or once for all ranks."""
    return {"do": "save", "directory": str(directory), "by_rank": list(by_rank), "options": options}


def load(directory: Path, wanted: dict[str, Tensor], **options: Any) -> Step:
    """The step that loads."""
    return {"do": "load", "directory": str(directory), "by_rank": [wanted], "options": options}


def outcomes(server: ForkServer, *steps: Step, nproc: int = 1) -> list[dict[str, Any]]:
    """What the first rank found after every step: ``{name: {"values", "dtype"}}``, or ``{"error": text}``."""
    return list(run_on_ranks(server, nproc, play, steps=steps)[0])


def loaded(
    server: ForkServer, directory: Path, saved: dict[str, Tensor], wanted: dict[str, Tensor], **options: Any
) -> dict[str, Any]:
    """What a load finds in the process that has saved."""
    both = {name: value for name, value in options.items() if name == "safetensors"}
    return outcomes(server, save(directory, saved, **both), load(directory, wanted, **options))[1]


# ---- The ranks' side.


def play(steps: list[Step]) -> list[dict[str, Any]]:
    """Play the steps on this rank."""
    import paddle
    from paddle.distributed import load_state_dict, save_state_dict

    rank = int(os.environ["PADDLE_TRAINER_ID"])
    if int(os.environ["PADDLE_TRAINERS_NUM"]) > 1:
        paddle.distributed.init_parallel_env()
    call = {"save": save_state_dict, "load": load_state_dict}
    found: list[dict[str, Any]] = []
    for step in steps:
        paddle.set_flags(step["options"].pop("flags", {}))
        tensors = {name: _made(name, one) for name, one in step["by_rank"][min(rank, len(step["by_rank"]) - 1)].items()}
        try:
            call[step["do"]](tensors, step["directory"], **step["options"])
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
        else:
            found.append({name: _said(one) for name, one in tensors.items()})
    return found


def _made(name: str, given: Tensor) -> Any:
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    made = paddle.to_tensor(np.array(given["values"], np.float32), place="cpu").astype(given["dtype"])
    if given.get("plain"):
        return made
    shape = tuple(made.shape)
    offset = tuple(given.get("offset", (0,) * made.ndim))
    return ShardedWeight(name, made, shape, tuple(given.get("shape", shape)), offset)


def _said(weight: Any) -> dict[str, Any]:
    held = getattr(weight, "local_tensor", weight)
    return {"values": held.astype("float32").numpy().tolist(), "dtype": str(held.dtype).rsplit(".", maxsplit=1)[-1]}

"""Set weights and states by hand, in an experiment that separates a fault of a load from rounding.

A checkpoint's files are read with the public safetensors package, and its shards are assembled with numpy slices. Every
live tensor of the run is overwritten with its part. The fused gate and up projections are interleaved again for the
target's number of cuts; everything else is the same tensor in both models. No mapping, plan or executor of this package
is used. If the run continues exactly as after a load, the load does not cause the difference.

Time and memory: all of the checkpoint, in every rank; for tiny models.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.errors import MismatchError

Whole = dict[tuple[str, str], tuple[np.ndarray[Any, Any], int]]
"""Role and name -> the whole tensor as the source's model has it, and into how many parts its last axis was cut."""


def fill(trainer: Any, checkpoint: Path) -> None:
    """Overwrite every weight and every state of a run.

    Args:
        trainer: a Trainer that has resumed this checkpoint, so that everything is there to be overwritten.
        checkpoint: a flex checkpoint of float32 tensors.
    Raises:
        MismatchError: the run holds a tensor that the checkpoint lacks.
    """
    import paddle

    from paddleformers_fc.trainer.live_roles import LiveModel

    source = assemble(checkpoint)
    for role, weights in LiveModel(trainer.model, trainer.optimizer).roles().items():
        for name, weight in weights.items():
            if (role, name) not in source:
                raise MismatchError(f"{name} is not in the checkpoint.", where=str(checkpoint))
            whole, cuts = source[role, name]
            value = part(_dealt(name, whole, cuts, _cuts(weight.global_shape, weight.local_shape)), weight)
            with paddle.no_grad():
                live = weight.local_tensor
                paddle.assign(paddle.full_like(live, float("nan")), live)
                paddle.assign(paddle.to_tensor(value.reshape(live.shape)), live)


def assemble(checkpoint: Path) -> Whole:
    """Return every tensor of a checkpoint in one piece, by the index."""
    from safetensors import safe_open
    from safetensors.numpy import load_file

    index = load_file(checkpoint / "flex_index.safetensors")
    stems, endings = (index[one].tobytes().decode().split("\0") for one in ("stems", "endings"))
    names = [stems[one] + endings[other] for one, other in zip(index["name_stem"], index["name_ending"], strict=True)]
    numbers, places = index["places"].tolist(), []
    while numbers:
        end = 4 + 3 * numbers[1]
        places.append((numbers[2:4], np.reshape(numbers[4:end], (3, -1)).tolist()))
        numbers = numbers[end:]
    shards = zip(index["shard_name"].tolist(), index["shard_place"].tolist(), strict=True)
    found: Whole = {}
    for path, count in zip(sorted(checkpoint.glob("*/*.safetensors")), index["file_shards"].tolist(), strict=True):
        with safe_open(str(path), framework="numpy") as file:
            for number, kind in islice(shards, count):
                name, (span, (shape, offset, local)) = names[number], places[kind]
                place = (path.parent.name, name)
                if place not in found:
                    found[place] = (np.full(shape, np.nan, "float32"), _cuts(shape, local))
                box = tuple(slice(a, a + n) for a, n in zip(offset, local, strict=True))
                flat = np.ascontiguousarray(found[place][0][box]).reshape(-1)
                begin, end = span if span[0] >= 0 else (0, flat.size)
                flat[begin:end] = file.get_tensor(name).reshape(-1)
                found[place][0][box] = flat.reshape(local)
    return found


def part(whole: np.ndarray[Any, Any], weight: Any) -> np.ndarray[Any, Any]:
    """Return the part of a whole tensor in one live ``ShardedWeight``, flat."""
    box = tuple(slice(a, a + n) for a, n in zip(weight.global_offset, weight.local_shape, strict=True))
    flat = np.ascontiguousarray(whole[box]).reshape(-1)
    return flat[weight.flattened_range] if weight.is_flattened else flat


def _cuts(shape: Any, local: Any) -> int:
    return int(shape[-1]) // int(local[-1])


def _dealt(name: str, whole: np.ndarray[Any, Any], before: int, after: int) -> np.ndarray[Any, Any]:
    """Return ``[gate | up]`` per cut of the source as ``[gate | up]`` per cut of the target."""
    is_number = whole.shape == (1,)
    if ".up_gate_proj." not in name or is_number or before == after:
        return whole
    pieces = np.split(whole, 2 * before, axis=-1)
    gate, up = np.concatenate(pieces[0::2], axis=-1), np.concatenate(pieces[1::2], axis=-1)
    pairs = zip(np.split(gate, after, axis=-1), np.split(up, after, axis=-1), strict=True)
    return np.concatenate([piece for pair in pairs for piece in pair], axis=-1)

"""Paddle's own FlexCheckpoint, in its first format; :mod:`.stock_safetensors` is the other one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed import all_gather_object, load_state_dict, save_state_dict
from paddle.distributed.flex_checkpoint.dcp.full_param import full_param

from benchmarks.performance.held import Done, Held
from benchmarks.performance.pieces import is_transposed
from benchmarks.performance.streamed import taken


def save(directory: Path, held: Held, **options: Any) -> Done:
    """``save_state_dict``."""
    with _quiet():
        save_state_dict(_flat(held), str(directory), **options)
    return Done()


def load(directory: Path, held: Held, **options: Any) -> Done:
    """``load_state_dict``."""
    with _quiet():
        load_state_dict(_flat(held), str(directory), **options)
    return Done()


def start(directory: Path, held: Held) -> Done:
    """``load_state_dict`` of open weights, with a statement for every transpose."""
    return load(directory, held, safetensors=True, aoa_config=_statements(piece.name for piece in held.pieces))


def stream(directory: Path, held: Held, is_checked: bool = False) -> Done:
    """What ``Layer.full`` calls, with a statement for every transpose; its copies to a device are left out."""
    paddle.Tensor.cuda = lambda tensor: tensor
    everyone: list[list[str]] = []
    all_gather_object(everyone, [piece.name for piece in held.pieces])
    with _quiet():
        names = sorted({name for theirs in everyone for name in theirs})
        return taken(full_param(_flat(held), _statements(names)), is_checked)


def _statements(names: Iterable[str]) -> dict[str, list[str]]:
    transposed = [f"{name}^T -> {name}" if is_transposed(name) else f"{name} -> {name}" for name in names]
    return {"aoa_statements": transposed}


def _flat(held: Held) -> dict[str, Any]:
    return {piece.name: tensor for piece, tensor in zip(held.pieces, held.tensors, strict=True)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Stock logs a line per key."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)

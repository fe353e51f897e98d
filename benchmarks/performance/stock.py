"""Paddle's own FlexCheckpoint, in its first format; :mod:`.stock_safetensors` is the other one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddle.distributed import load_state_dict, save_state_dict

from benchmarks.performance.held import Done, Held
from benchmarks.performance.pieces import is_transposed


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
    names = (piece.name for piece in held.pieces)
    statements = [f"{name}^T -> {name}" if is_transposed(name) else f"{name} -> {name}" for name in names]
    return load(directory, held, safetensors=True, aoa_config={"aoa_statements": statements})


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

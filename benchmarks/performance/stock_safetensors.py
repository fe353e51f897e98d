"""Paddle's own FlexCheckpoint, in its format of safetensors files."""

from __future__ import annotations

from pathlib import Path

from benchmarks.performance import stock
from benchmarks.performance.held import Done, Held


def save(directory: Path, held: Held) -> Done:
    """``save_state_dict(..., safetensors=True)``."""
    return stock.save(directory, held, safetensors=True)


def load(directory: Path, held: Held) -> Done:
    """``load_state_dict(..., safetensors=True)``."""
    return stock.load(directory, held, safetensors=True)

"""PyTorch Distributed Checkpoint, with its own readers and writers of files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from benchmarks.performance.held import Done, Held


def save(directory: Path, held: Held) -> Done:
    """``save`` of DTensors, or of plain tensors of a single rank."""
    dcp.save(_state(held), storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=held.ranks == 1)
    return Done()


def load(directory: Path, held: Held) -> Done:
    """``load`` into the tensors that exist."""
    reader = _TimedReader(str(directory))
    started = time.monotonic()
    dcp.load(_state(held), storage_reader=reader, no_dist=held.ranks == 1)
    seconds = time.monotonic() - started
    planning = seconds - reader.opening - reader.reading
    return Done(phases={"open": reader.opening, "plan": planning, "read": reader.reading})


class _TimedReader(dcp.FileSystemReader):
    """A reader that measures how long the metadata and the tensors take."""

    opening = reading = 0.0

    def read_metadata(self, *arguments: Any, **options: Any) -> Any:
        """Read the metadata."""
        started = time.monotonic()
        found = super().read_metadata(*arguments, **options)
        self.opening += time.monotonic() - started
        return found

    def read_data(self, *arguments: Any) -> Any:
        """Read the tensors."""
        started = time.monotonic()
        found = super().read_data(*arguments)
        found.wait()
        self.reading += time.monotonic() - started
        return found


def _state(held: Held) -> dict[str, Any]:
    return {piece.name: tensor for piece, tensor in zip(held.pieces, held.tensors, strict=True)}

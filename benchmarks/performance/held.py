"""What one rank holds or wants, for every contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.performance.pieces import Array, Piece


@dataclass(frozen=True)
class Held:
    """The tensors of one rank.

    Args:
        config: of the model, as in ``config.json``.
        rank: its number.
        ranks: how many there are.
        pieces: what it holds.
        tensors: of the framework, in the order of the pieces: ``ShardedWeight`` of Paddle, tensors of PyTorch.
        memory: of every piece, flat.
    """

    config: Mapping[str, Any]
    rank: int
    ranks: int
    pieces: Sequence[Piece]
    tensors: Sequence[Any]
    memory: Sequence[Array]

    @property
    def arrays(self) -> dict[str, Array]:
        """The memory by role and name."""
        pairs = zip(self.pieces, self.memory, strict=True)
        return {f"{piece.role}/{piece.name}": array for piece, array in pairs}

    @property
    def roles(self) -> dict[str, dict[str, Any]]:
        """The tensors by role and name."""
        found: dict[str, dict[str, Any]] = {}
        for piece, tensor in zip(self.pieces, self.tensors, strict=True):
            found.setdefault(piece.role, {})[piece.name] = tensor
        return found


@dataclass(frozen=True)
class Done:
    """What a contender reports of a call.

    Args:
        read: bytes that this rank read; -1 if they are not counted.
        phases: seconds of ``open``, ``plan`` and ``read``, as far as they are known.
    """

    read: int = -1
    phases: Mapping[str, float] = field(default_factory=dict)

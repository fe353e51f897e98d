"""The errors of damaged and malformed files that readers of all formats raise."""

from __future__ import annotations

from collections.abc import Iterable

from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.text import fold

_MOST_LINES = 10_000
"""A user may need every name of a missing file; errors bound their characters."""

COPY_AGAIN_STEP = "Use another checkpoint, or copy the files again: all of one save."


def damaged(where: AnyPath, what: str, evidence: Iterable[str], next_step: str = COPY_AGAIN_STEP) -> Corrupt:
    """Return the error for a checkpoint that cannot be used, for its files or their content; evidence is folded."""
    return Corrupt(what, where=str(where), evidence=fold(evidence, _MOST_LINES), next_step=next_step)


def malformed(where: AnyPath, what: str, evidence: Iterable[str], next_step: str) -> FormatError:
    """Return the error for files that are malformed or not supported; lines of evidence are folded."""
    return FormatError(what, where=str(where), evidence=fold(evidence, _MOST_LINES), next_step=next_step)

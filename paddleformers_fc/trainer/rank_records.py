"""Records that ranks leave for the process that started them: progress, process ids, and errors that ended a rank.

The starter sets the environment variable :data:`RECORDS` to a directory, and reads figures and errors there instead of
log lines. :mod:`.progress_recorder` writes the progress. This module does not import Paddle.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from paddleformers_fc.errors import FlexError, PeerError, from_wire
from paddleformers_fc.storage.json_io import read_document

RECORDS = "PADDLEFORMERS_FC_RECORDS"
"""The environment variable that names the directory of the records."""

_MAX_ERROR_BYTES = 256 * 1024 * 1024


class Progress(msgspec.Struct, frozen=True):
    """The progress of a training.

    Attributes:
        resumed: the step that was resumed; None in a run from the beginning.
        step: the last step that was logged or saved; None before the first.
        loss: the last logged loss as text, because JSON has no NaN; None before the first.
        checkpoint: path of the last saved checkpoint; None before the first.
    """

    resumed: int | None = None
    step: int | None = None
    loss: str | None = None
    checkpoint: str | None = None


def record_path(directory: Path, kind: str) -> Path:
    """Return the path of this rank's record, ``error``, ``progress`` or ``process``."""
    return directory / f"rank-{int(os.environ.get('PADDLE_TRAINER_ID', '0')):05d}.{kind}.json"


def record_error_at_exit() -> None:
    """Write the error of this package with which this rank ends, if a starter reads records."""
    if RECORDS not in os.environ:
        return
    path, previous = record_path(Path(os.environ[RECORDS]), "error"), sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found: BaseException | None = error
        while found is not None and not isinstance(found, FlexError):
            found = found.__cause__ or found.__context__  # PaddleFormers wraps some errors.
        if found is not None:
            path.write_text(found.to_wire(), encoding="utf-8")
        previous(kind, error, trace)

    sys.excepthook = record


@contextlib.contextmanager
def process_recorded() -> Iterator[None]:
    """Return a block in which the starter of this rank can send it signals, if it reads records."""
    if RECORDS not in os.environ:
        yield
        return
    path = record_path(Path(os.environ[RECORDS]), "process")
    with contextlib.suppress(OSError):  # A full disk must not end the training.
        path.write_text(str(os.getpid()), encoding="utf-8")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read_processes(directory: Path) -> list[int]:
    """Return the process ids of the ranks of this node that take signals now."""
    found = (read_document(path) for path in sorted(directory.glob("rank-*.process.json")))
    return [msgspec.json.decode(raw, type=int) for raw in found]


def read_error(directory: Path) -> FlexError | None:
    """Return the error of the ranks. All leave the same one, unless some only noticed that another rank was gone."""
    found = (read_document(path, _MAX_ERROR_BYTES) for path in sorted(directory.glob("rank-*.error.json")))
    errors = [from_wire(raw.decode("utf-8", "replace")) for raw in found]
    return min(errors, key=lambda error: isinstance(error, PeerError), default=None)


def read_progress(directory: Path) -> Progress:
    """Return the record of the first rank of this node that has one; an empty one if there is none."""
    for path in sorted(directory.glob("rank-*.progress.json")):
        return msgspec.json.decode(read_document(path), type=Progress)
    return Progress()

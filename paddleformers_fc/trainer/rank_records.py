"""Status files: each rank writes its progress, process id and error for the process that started it.

That process sets the environment variable :data:`RECORDS` to a directory, and reads these files instead of parsing
logs. :class:`.session.ProgressRecorder` writes the progress. This module does not import Paddle.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paddleformers_fc.errors import FlexError, PeerError, from_wire
from paddleformers_fc.storage.json_io import read_document

RECORDS = "PADDLEFORMERS_FC_RECORDS"
"""The environment variable that names the directory of the records."""

_MAX_BYTES = 256 * 1024 * 1024
_written: dict[Path, RankRecord] = {}
"""The records of this process, which stay complete if a write fails."""


class RankRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one rank.

    Attributes:
        resumed: the step that was resumed; None in a run from the beginning.
        step: the last step that was logged or saved; None before the first.
        loss: the last logged loss as text, because JSON has no NaN; None before the first.
        checkpoint: path of the last saved checkpoint; None before the first.
        process: the process id.
        listens: whether the rank handles the signal of ``flex_save_on_signal``.
        error: the error that ended the rank, as encoded by :meth:`.FlexError.to_wire`; else None.
    """

    resumed: int | None = None
    step: int | None = None
    loss: str | None = None
    checkpoint: str | None = None
    process: int | None = None
    listens: bool = False
    error: str | None = None


def update_record(**changes: Any) -> None:
    """Change fields of this rank's record; do nothing without :data:`RECORDS`."""
    if RECORDS not in os.environ:
        return
    path = Path(os.environ[RECORDS], f"rank-{int(os.environ.get('PADDLE_TRAINER_ID', '0')):05d}.json")
    partial = path.with_suffix(".tmp")
    with contextlib.suppress(OSError, FlexError):  # A full disk must not end the training.
        record = _written.get(path) or (_read(path) if path.exists() else RankRecord())
        _written[path] = msgspec.structs.replace(record, **changes)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(_written[path]))
        partial.replace(path)


def begin_record() -> None:
    """Record the process id, and install a hook that records an error of this package that ends the process."""
    update_record(process=os.getpid())
    previous = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found: BaseException | None = error
        while found is not None and not isinstance(found, FlexError):
            found = found.__cause__ or found.__context__  # PaddleFormers wraps some errors.
        if found is not None:
            update_record(error=found.to_wire())
        previous(kind, error, trace)

    sys.excepthook = record


def read_records(directory: Path) -> list[RankRecord]:
    """Return the records of the ranks of this node, by rank."""
    return [_read(path) for path in sorted(directory.glob("rank-*.json"))]


def read_error(directory: Path) -> FlexError | None:
    """Return the error of the ranks: all record the same one, except ranks that only noticed that another was gone."""
    errors = [from_wire(record.error) for record in read_records(directory) if record.error is not None]
    return min(errors, key=lambda error: isinstance(error, PeerError), default=None)


def _read(path: Path) -> RankRecord:
    try:
        return msgspec.json.decode(read_document(path, _MAX_BYTES), type=RankRecord)
    except msgspec.MsgspecError:  # The disk was full, or another program has written the file.
        return RankRecord()

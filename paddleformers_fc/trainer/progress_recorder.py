"""Record the progress of a training in a small file, for the process that started the ranks.

Each rank that writes log lines replaces its record at every logged loss, save and load, with or without flex
checkpoints.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.trainer.callback import CheckpointReport, FlexCheckpointCallback
from paddleformers_fc.trainer.rank_records import RECORDS, Progress, record_path


def record_progress(trainer: Any) -> None:
    """Let a Trainer record its progress if the starter of its rank reads it."""
    if RECORDS in os.environ and trainer.args.should_log:
        trainer.add_callback(ProgressRecorder(record_path(Path(os.environ[RECORDS]), "progress")))


class ProgressRecorder(FlexCheckpointCallback):
    """Replaces the record of this rank after every event.

    Args:
        path: the record.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._progress = Progress()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the step and its loss."""
        if isinstance(logs, dict) and "loss" in logs:
            self._record(step=state.global_step, loss=str(logs["loss"]))

    def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
        """Record the checkpoint."""
        self._record(step=report.step, checkpoint=str(report.directory))

    def on_checkpoint_loaded(self, args: Any, report: CheckpointReport) -> None:
        """Record the step that is resumed."""
        self._record(resumed=report.step)

    def _record(self, **figures: Any) -> None:
        self._progress = msgspec.structs.replace(self._progress, **figures)
        beside = self._path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # A full disk must not end the training.
            beside.write_bytes(msgspec.json.encode(self._progress))
            beside.replace(self._path)

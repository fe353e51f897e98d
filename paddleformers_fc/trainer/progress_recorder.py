"""Record the progress of a training for the process that started the ranks.

Each rank that writes log lines changes its record at every logged loss, save and load, with or without flex
checkpoints.
"""

from __future__ import annotations

import os
from typing import Any

from paddleformers_fc.trainer.callback import CheckpointReport, FlexCheckpointCallback
from paddleformers_fc.trainer.rank_records import RECORDS, update_record


def record_progress(trainer: Any) -> None:
    """Let a Trainer record its progress if the starter of its rank reads it."""
    if RECORDS in os.environ and trainer.args.should_log:
        trainer.add_callback(ProgressRecorder())


class ProgressRecorder(FlexCheckpointCallback):
    """Changes the record of this rank after every event."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record the step and its loss."""
        if isinstance(logs, dict) and "loss" in logs:
            update_record(step=state.global_step, loss=str(logs["loss"]))

    def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
        """Record the checkpoint."""
        update_record(step=report.step, checkpoint=str(report.directory))

    def on_checkpoint_loaded(self, args: Any, report: CheckpointReport) -> None:
        """Record the step that is resumed."""
        update_record(resumed=report.step)

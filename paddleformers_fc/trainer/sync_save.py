"""Saves during which training waits."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from paddleformers_fc.execute.save import snapshot, views, write_and_commit
from paddleformers_fc.execute.staging_pool import measured_transfers
from paddleformers_fc.progress_display import bar_on_terminal
from paddleformers_fc.trainer.job_state import channel_of
from paddleformers_fc.trainer.save_job import capture_files, prepare, report_save, upload


class SyncSaves:
    """Snapshot, write and commit in a row, on the training thread."""

    def save(self, trainer: Any, metrics: dict[str, float] | None) -> None:
        """Save the present step, as :class:`.job_state.Saver`."""
        args, channel = trainer.args, channel_of(trainer.args)
        trainer.runtime_timer.start("checkpoint saving time")
        prepared = prepare(trainer, metrics)
        part = prepared.encoded(capture_files(trainer))
        with measured_transfers() as transfers:
            taken = snapshot(part, views, channel, prepared.consistency)
            with bar_on_terminal(f"saving {prepared.directory.name}", args.should_log):
                report = write_and_commit(taken, prepared.directory, channel)
        trainer.runtime_timer.stop()
        upload(trainer, prepared, report)
        report_save(trainer, prepared, report, transfers, time.monotonic() - prepared.started)
        trainer._rotate_checkpoints(output_dir=args.output_dir)

    def followed(self, trainer: Any) -> AbstractContextManager[None]:
        """Return a block in which the training loop runs; nothing is left to be done at its end."""
        return nullcontext()

"""Figures of saves and loads for PaddleFormers' reporters: VisualDL, TensorBoard, Weights & Biases and the others.

Reporters are the callbacks of ``paddleformers.trainer.integrations``. They receive the figures as they receive losses,
by ``on_log``, at the step that was saved or loaded. The Trainer's own log and its history are not changed, so that a
resumed run equals an uninterrupted one.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from paddleformers_fc.trainer.callback import CheckpointReport, FlexCheckpointCallback

_REPORTERS = "trainer.integrations"
_GIB = 1 << 30


class ReportFigures(FlexCheckpointCallback):
    """Sends bytes, seconds and rate of every save and load to the reporters of a Trainer.

    Args:
        trainer: the Trainer, whose reporters and state are read at every event.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: CheckpointReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing: the callback that logs checks the Trainer."""

    def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
        """Send the figures of a save. One beside training is reported some steps later."""
        self._send(report.step, {**_figures("save", report), "checkpoint_save_blocked_seconds": report.blocked})

    def on_checkpoint_loaded(self, args: Any, report: CheckpointReport) -> None:
        """Keep the figures of a load: reporters open their logs when training begins."""
        self._loaded = report

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send the figures of the load, once."""
        report, self._loaded = self._loaded, None
        if report is not None:
            self._send(report.step, _figures("load", report))

    def _send(self, step: int, figures: dict[str, float]) -> None:
        trainer = self._trainer
        state = copy(trainer.state)
        state.global_step = step
        for one in trainer.callback_handler.callbacks:
            if any(kind.__module__.endswith(_REPORTERS) for kind in type(one).__mro__):
                one.on_log(trainer.args, state, trainer.control, model=trainer.model, logs=dict(figures))


def _figures(operation: str, report: CheckpointReport) -> dict[str, float]:
    rate = report.bytes / max(report.seconds, 1e-9) / _GIB
    figures = {"bytes": report.bytes, "seconds": report.seconds, "gib_per_second": rate}
    return {f"checkpoint_{operation}_{name}": value for name, value in figures.items()}

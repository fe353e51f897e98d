"""Figures of saves and loads reach the reporters that PaddleFormers offers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.trainer.callback import CheckpointReport
from paddleformers_fc.trainer.figures import ReportFigures

REPORT = CheckpointReport(7, Path("out/checkpoint-7"), 2.0, 1 << 30, blocked=0.5)


@pytest.fixture
def trainer() -> Any:
    """A Trainer's parts that are read, with VisualDL's own callback and one that logs to a terminal."""
    from paddleformers.trainer.integrations import VisualDLCallback
    from paddleformers.trainer.trainer_callback import PrinterCallback

    written: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar), flush=lambda: None)
    reporter = VisualDLCallback(writer)
    handler = SimpleNamespace(callbacks=[PrinterCallback(), reporter])
    state = SimpleNamespace(global_step=7, is_world_process_zero=True)
    return SimpleNamespace(
        args=None, state=state, control=None, model=None, callback_handler=handler, written=written, reporter=reporter
    )


def test_a_save_is_a_point_of_every_curve(trainer: Any) -> None:
    ReportFigures(trainer).on_checkpoint_saved(None, REPORT)
    assert {name: (value, step) for name, value, step in trainer.written} == {
        "train/checkpoint_save_bytes": (1 << 30, 7),
        "train/checkpoint_save_seconds": (2.0, 7),
        "train/checkpoint_save_gib_per_second": (0.5, 7),
        "train/checkpoint_save_blocked_seconds": (0.5, 7),
    }


def test_a_load_is_reported_once_training_has_begun(trainer: Any) -> None:
    figures = ReportFigures(trainer)
    figures.on_checkpoint_loaded(None, REPORT)
    assert trainer.written == []
    for _ in range(2):
        figures.on_step_end(None, None, None)
    assert [name for name, _, _ in trainer.written] == [
        f"train/checkpoint_load_{what}" for what in ("bytes", "seconds", "gib_per_second")
    ]


def test_other_callbacks_get_no_figures(trainer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    trainer.callback_handler.callbacks[0].on_log = fail
    ReportFigures(trainer).on_checkpoint_saved(None, REPORT)
    assert trainer.written

"""Figures of saves and loads reach the reporters that PaddleFormers offers."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.execute.phases import Phases, Slowest
from paddleformers_fc.trainer import session
from paddleformers_fc.trainer.session import CheckpointReport, FlexCheckpointCallback, ReportFigures
from tests.harness.on_ranks import on_ranks
from tests.harness.patching import precede
from tests.harness.tiny import DP2
from tests.trainer.jobs import train_and_resume

REPORT = CheckpointReport(
    7,
    Path("out/checkpoint-7"),
    2.0,
    10**9,
    blocked=0.5,
    phases=Phases({"plan": 0.25, "agree": 1.75}, Slowest("write", 37, 1.5)),
)

Scalars = dict[str, list[tuple[int, float]]]
"""The points of every curve: steps and values."""


def scalars(directory: Path) -> Scalars:
    """The curves that VisualDL has written."""
    from visualdl import LogReader

    found: Scalars = {}
    for file in directory.glob("vdlrecords.*"):
        reader = LogReader(file_path=str(file))
        for tag in reader.get_tags().get("scalar", ()):
            found[tag] = [(one.id, one.value) for one in reader.get_data("scalar", tag)]
    return found


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A Trainer's parts that are read, two steps later, with VisualDL's own callback and one for a terminal."""
    from paddleformers.trainer.integrations import VisualDLCallback
    from paddleformers.trainer.trainer_callback import PrinterCallback
    from visualdl import LogWriter

    handler = SimpleNamespace(callbacks=[PrinterCallback(), VisualDLCallback(LogWriter(logdir=str(tmp_path)))])
    state = SimpleNamespace(global_step=9, is_world_process_zero=True)
    return SimpleNamespace(args=None, state=state, control=None, model=None, callback_handler=handler)


def points(kind: str, **more: float) -> Scalars:
    """The figures of the report."""
    shared = {"bytes": 10**9, "seconds": 2.0, "gb_per_second": 0.5, "slowest_write_seconds": 1.5}
    figures = {**shared, "plan_seconds": 0.25, "agree_seconds": 1.75, **more}
    return {f"train/checkpoint_{kind}_{name}": [(7, value)] for name, value in figures.items()}


def test_a_save_is_a_point_of_every_curve_and_other_callbacks_get_no_figures(trainer: Any, tmp_path: Path) -> None:
    trainer.callback_handler.callbacks[0].on_log = lambda *_, **__: pytest.fail("called")
    ReportFigures(trainer).saved(REPORT)
    assert scalars(tmp_path) == points("save", blocked_seconds=0.5)
    assert trainer.state.global_step == 9


def test_a_load_is_reported_once_training_has_begun(trainer: Any, tmp_path: Path) -> None:
    figures = ReportFigures(trainer)
    figures.loaded(REPORT)
    assert scalars(tmp_path) == {}
    for _ in range(2):
        figures.send_loaded()
    assert scalars(tmp_path) == points("load")


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (replace(REPORT, layouts=("dp=2", "tp=2")), "Resumed step 7 (saved as dp=2, now tp=2) from out/checkpoint-7: "),
        (replace(REPORT, layouts=("", "tp=2")), "Resumed step 7 (now tp=2) from out/checkpoint-7: "),
        (replace(REPORT, layouts=None), "Resumed step 7 from out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s, training"),
        (
            replace(REPORT, blocked=REPORT.seconds),
            "Resumed step 7 from out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s; plan",
        ),
    ],
)
def test_the_line_of_a_report_has_the_layouts_that_are_recorded_and_for_how_long_a_save_blocked(
    monkeypatch: pytest.MonkeyPatch, report: CheckpointReport, text: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(session, "logger", SimpleNamespace(info=lines.append))
    FlexCheckpointCallback().on_checkpoint_loaded(SimpleNamespace(should_log=True), report)
    FlexCheckpointCallback().on_checkpoint_saved(SimpleNamespace(should_log=True), report)
    resumed, saved = lines
    assert resumed.startswith(text)
    assert saved == resumed.replace("Resumed", "Saved").replace(" from ", " to ")


class Terminal(io.StringIO):
    """Text that a terminal has shown."""

    def isatty(self) -> bool:
        return True


@on_ranks(2)
def test_saves_and_loads_show_their_bytes_on_a_terminal(tmp_path: Path) -> None:
    from paddleformers_fc import progress_display

    meters: list[Any] = []
    precede(progress_display.Meter, "__init__", meters.append)
    os.environ["TERM"] = "xterm"
    before, sys.stderr = sys.stderr, (screen := Terminal())
    try:
        train_and_resume(tmp_path, [2], layout=DP2, arguments={"max_steps": 2, "save_steps": 2})
    finally:
        sys.stderr = before
    if os.environ["PADDLE_TRAINER_ID"] == "1":
        assert (meters, "checkpoint-2 \u2026" in screen.getvalue()) == ([], False)
        return
    assert all(line in screen.getvalue() for line in ("saving checkpoint-2", "loading checkpoint-2"))
    stored = sum(path.stat().st_size for path in (tmp_path / "whole/checkpoint-2").glob("*/*.safetensors"))
    writing, reading = meters
    assert 0 < writing.expected == writing.done < stored
    assert 0 < reading.expected <= reading.done

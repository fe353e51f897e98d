"""Figures of saves and loads reach the reporters that PaddleFormers offers."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.execute.phases import Phases, Slowest
from paddleformers_fc.trainer import session
from paddleformers_fc.trainer.session import CheckpointReport, FlexCheckpointCallback, ReportFigures
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import DP2
from tests.trainer.jobs import train_and_resume
from verification.forkserver import ForkServer

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


def test_a_save_is_a_point_of_every_curve_at_its_step(trainer: Any, tmp_path: Path) -> None:
    ReportFigures(trainer).saved(REPORT)
    assert scalars(tmp_path) == {
        "train/checkpoint_save_bytes": [(7, 10**9)],
        "train/checkpoint_save_seconds": [(7, 2.0)],
        "train/checkpoint_save_gb_per_second": [(7, 0.5)],
        "train/checkpoint_save_blocked_seconds": [(7, 0.5)],
        "train/checkpoint_save_plan_seconds": [(7, 0.25)],
        "train/checkpoint_save_agree_seconds": [(7, 1.75)],
        "train/checkpoint_save_slowest_write_seconds": [(7, 1.5)],
    }
    assert trainer.state.global_step == 9


def test_a_load_is_reported_once_training_has_begun(trainer: Any, tmp_path: Path) -> None:
    figures = ReportFigures(trainer)
    figures.loaded(REPORT)
    assert scalars(tmp_path) == {}
    for _ in range(2):
        figures.send_loaded()
    assert scalars(tmp_path) == {
        "train/checkpoint_load_bytes": [(7, 10**9)],
        "train/checkpoint_load_seconds": [(7, 2.0)],
        "train/checkpoint_load_gb_per_second": [(7, 0.5)],
        "train/checkpoint_load_plan_seconds": [(7, 0.25)],
        "train/checkpoint_load_agree_seconds": [(7, 1.75)],
        "train/checkpoint_load_slowest_write_seconds": [(7, 1.5)],
    }


@pytest.mark.parametrize(
    ("saved", "text"), [("dp=2", "(saved as dp=2, now tp=2)"), ("", "(now tp=2)"), (None, "step 7 from")]
)
def test_the_line_of_a_load_has_the_layouts_that_are_recorded(
    monkeypatch: pytest.MonkeyPatch, saved: str | None, text: str
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(session, "logger", SimpleNamespace(info=lines.append))
    layouts = None if saved is None else (saved, "tp=2")
    report = replace(REPORT, layouts=layouts)
    session.FlexCheckpointCallback().on_checkpoint_loaded(SimpleNamespace(should_log=True), report)
    (line,) = lines
    assert text in line


def test_other_callbacks_get_no_figures(trainer: Any, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    trainer.callback_handler.callbacks[0].on_log = fail
    ReportFigures(trainer).saved(REPORT)
    assert scalars(tmp_path)


def show_on_a_terminal(output_dir: Path) -> list[Any]:
    """Train, save, and resume with a terminal as the error stream.

    Returns:
        What the terminal got, and the expected and done bytes of every operation that it displayed.
    """
    import pty

    from paddleformers_fc import progress_display

    meters: list[Any] = []

    class Kept(progress_display.Meter):
        def __init__(self) -> None:
            super().__init__()
            meters.append(self)

    keyboard, screen = pty.openpty()
    got: list[bytes] = []

    def read() -> None:
        while chunk := os.read(keyboard, 1 << 16):
            got.append(chunk)
            if chunk.endswith(b"\x04"):
                return

    reader = threading.Thread(target=read)
    reader.start()
    before, made = sys.stderr, progress_display.Meter
    os.environ["TERM"] = "xterm"
    sys.stderr, progress_display.Meter = os.fdopen(screen, "w"), Kept  # type: ignore[misc]
    arguments = {"max_steps": 2, "save_steps": 2}
    try:
        train_and_resume(str(output_dir), [2], layout=DP2.to_json(), arguments=arguments)
    finally:
        sys.stderr.write("\x04")
        sys.stderr.flush()
        sys.stderr, progress_display.Meter = before, made  # type: ignore[misc]
        reader.join()
    return [b"".join(got).decode(), [(one.expected, one.done) for one in meters]]


def test_saves_and_loads_show_their_bytes_on_a_terminal(ranks: ForkServer, tmp_path: Path) -> None:
    (first, meters), (second, others) = run_on_ranks(ranks, 2, show_on_a_terminal, output_dir=tmp_path)
    stored = sum(path.stat().st_size for path in (tmp_path / "whole/checkpoint-2").glob("*/*.safetensors"))
    assert [line in first for line in ("saving checkpoint-2", "loading checkpoint-2")] == [True, True]
    (to_write, written), (to_read, read) = meters
    assert 0 < to_write == written < stored
    assert 0 < to_read <= read
    assert (others, "checkpoint-2 \u2026" in second) == ([], False)


def test_a_save_beside_training_says_for_how_long_it_blocked() -> None:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.logger, "info", lines.append)
        for report in (REPORT, replace(REPORT, blocked=REPORT.seconds)):
            FlexCheckpointCallback().on_checkpoint_saved(SimpleNamespace(should_log=True), report)
    beside, waited = lines
    assert beside.startswith(
        "Saved step 7 to out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s, training blocked for 0.50 s; plan"
    )
    assert "blocked" not in waited

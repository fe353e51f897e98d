"""Figures of saves and loads reach the reporters that PaddleFormers offers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.execute.phases import Phases, Slowest
from paddleformers_fc.trainer import callback
from paddleformers_fc.trainer.callback import CheckpointReport, FlexCheckpointCallback, ReportFigures
from tests.harness.tiny import DP2
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
    monkeypatch.setattr(callback, "logger", SimpleNamespace(info=lines.append))
    layouts = None if saved is None else (saved, "tp=2")
    report = replace(REPORT, layouts=layouts)
    callback.FlexCheckpointCallback().on_checkpoint_loaded(SimpleNamespace(should_log=True), report)
    (line,) = lines
    assert text in line


def test_other_callbacks_get_no_figures(trainer: Any, tmp_path: Path) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("called")

    trainer.callback_handler.callbacks[0].on_log = fail
    ReportFigures(trainer).saved(REPORT)
    assert scalars(tmp_path)


def test_saves_and_loads_show_their_bytes_on_a_terminal(ranks: ForkServer, tmp_path: Path) -> None:
    job = {"layout": DP2.to_json(), "arguments": {"max_steps": 2, "save_steps": 2}}
    job |= {"output_dir": str(tmp_path / "run"), "resume": str(tmp_path / "run/checkpoint-2")}
    first, second = ranks.run("tests.trainer.jobs:on_terminal", 2, job).values
    stored = sum(path.stat().st_size for path in (tmp_path / "run/checkpoint-2").glob("*/*.safetensors"))
    assert [line in first["text"] for line in ("saving checkpoint-2", "loading checkpoint-2")] == [True, True]
    (to_write, written), (to_read, read) = first["bytes"]
    assert 0 < to_write == written < stored
    assert 0 < to_read <= read
    assert (second["bytes"], "checkpoint-2 \u2026" in second["text"]) == ([], False)


def test_a_save_beside_training_says_for_how_long_it_blocked() -> None:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback.logger, "info", lines.append)
        for report in (REPORT, replace(REPORT, blocked=REPORT.seconds)):
            FlexCheckpointCallback().on_checkpoint_saved(SimpleNamespace(should_log=True), report)
    beside, waited = lines
    assert beside.startswith(
        "Saved step 7 to out/checkpoint-7: 1 GB in 2.00 s, 500 MB/s, training blocked for 0.50 s; plan"
    )
    assert "blocked" not in waited

"""What the demo calls right and wrong, and what it shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paddleformers_fc.errors import OptionError
from verification.demo import demo
from verification.demo.report import LossComparison, LossLine, draw, table

MD5 = "0" * 32
REFERENCE = LossLine("dp2", {step: 7.0 - step / 8 for step in range(1, 7)}, (), MD5)
RESUMED = LossLine("tp2", {step: 7.0 - step / 8 for step in (4, 5, 6)}, (4, 5, 6), MD5)
RIGHT = LossComparison("Llama", 3, REFERENCE, (RESUMED,), reloaded=6.5)


def _with(line: LossLine) -> LossComparison:
    return replace(RIGHT, lines=(line,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, ""),
        ({"losses": {4: 6.5, 5: 6.375, 6: 6.25001}}, "1.0e-05"),
        ({"losses": {4: 6.5, 5: 6.375, 6: float("nan")}}, "inf"),
        ({"losses": {4: 6.5, 5: 6.375}}, "inf"),
        ({"losses": {4: 6.5, 5: 1.0}, "compared": (4,)}, ""),
        ({"unequal_tensors": ("optimizer_state lm_head.weight.moment1_0",)}, "lm_head.weight.moment1_0"),
        ({"export_md5": "1" * 32}, "md5"),
        ({"losses": {}, "export_md5": None, "stock": True}, ""),
    ],
)
def test_what_differs_from_the_uninterrupted_run_is_a_fault(changes: dict[str, Any], message: str) -> None:
    faults = _with(replace(RESUMED, **changes)).faults()
    assert len(faults) == bool(message)
    assert all("tp2" in fault and message in fault for fault in faults)


def test_an_export_that_trains_otherwise_is_a_fault() -> None:
    (fault,) = replace(RIGHT, reloaded=6.4).faults()
    assert "reloaded export" in fault


def test_the_summary_is_json_even_when_losses_are_no_numbers() -> None:
    broken = replace(_with(replace(RESUMED, losses={4: float("nan")})), reloaded=float("nan"))
    text = json.dumps(broken.to_json(), allow_nan=False)
    assert json.loads(text)["runs"][1]["largest_difference"] is None


def test_the_table_has_a_row_per_run_with_losses_difference_and_md5() -> None:
    console = Console(width=200, record=True)
    console.print(table(RIGHT))
    text = console.export_text()
    for expected in ("dp2", "tp2", "6.50000000", "6.25000000", "0.0e+00", MD5):
        assert expected in text


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw([RIGHT, _with(replace(RESUMED, stock=True))], tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_directory_that_holds_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.tex"
    kept.touch()
    with pytest.raises(OptionError, match="contains other files"):
        demo(tmp_path)
    assert kept.exists()

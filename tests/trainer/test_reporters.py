"""Figures of saves and loads in what VisualDL, TensorBoard and Weights & Biases have written of a training.

PaddleFormers uses whichever is installed, and Weights & Biases asks for an account unless it is offline. So they
are in an environment of their own, beside Paddle and all others of this environment.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_packaging import ROOT, call, environment
from tests.trainer.test_metrics import Scalars, scalars

REQUIREMENTS = ("tensorboardX==2.6.5", "tensorboard==2.21.0", "wandb==0.31.0")
SCRIPT = Path(__file__).with_name("reporter_script.py")
READERS = Path(__file__).with_name("reporter_readers.py")
FIGURES = {
    "save": ("bytes", "seconds", "gb_per_second", "blocked_seconds", "write_seconds", "slowest_write_seconds"),
    "load": ("bytes", "seconds", "gb_per_second", "read_seconds", "slowest_read_seconds"),
}


@pytest.mark.slow
def test_every_reporter_has_the_figures_of_saves_and_of_a_load(tmp_path: Path) -> None:
    programs = environment(tmp_path / "reporters")
    call([programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", *REQUIREMENTS], tmp_path)
    (library,) = (tmp_path / "reporters").glob("lib/python*/site-packages")
    (library / "paddle.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    variables = {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    runs = {"first": "", "resumed": str(tmp_path / "first/checkpoint-2")}
    for name, resume in runs.items():
        call([programs / "python", SCRIPT, tmp_path / name, resume], tmp_path, **variables)
        read = json.loads(call([programs / "python", READERS, tmp_path / name / "runs"], tmp_path, **variables))
        found = {"visualdl": scalars(tmp_path / name / "runs"), **read}
        assert set(found) == {"visualdl", "tensorboard", "wandb"}
        for reporter, curves in found.items():
            assert_has_figures(reporter, curves, {"save": [4] if resume else [2, 4], "load": [2] if resume else []})


def assert_has_figures(reporter: str, curves: Scalars, steps: dict[str, list[int]]) -> None:
    """Assert that saves and loads are points at their steps, and nothing else is."""
    for operation, names in FIGURES.items():
        for name in names:
            points = curves.get(f"train/checkpoint_{operation}_{name}", [])
            assert [step for step, _ in points] == steps[operation], (reporter, operation, name)
            assert all(value > 0 for _, value in points), (reporter, operation, name)

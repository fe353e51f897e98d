"""``~`` in a configuration is the user's home, for PaddleFormers and for us: a run saves and resumes in one place."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddleformers_fc.cli.start_checks import checkpoint_to_resume
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.trainer import loading
from paddleformers_fc.trainer.resume import Search
from tests.trainer.test_rotation import make_checkpoint


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with two checkpoints of a run, and another directory to work in."""
    for name in ("home/run", "work"):
        (tmp_path / name).mkdir(parents=True)
    for step in (3, 6):
        make_checkpoint(tmp_path / "home/run", step)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def chosen(args: Any, asked: bool | str) -> Any:
    """The path of the checkpoint that is resumed."""
    choice = loading._choose(args, asked, Search(Path(args.output_dir), ALONE, pytest.fail))
    assert choice is not None
    return choice.path


def test_a_run_in_the_home_directory_is_resumed_from_there_by_scripts_and_the_command(home: Path) -> None:
    from paddleformers_fc import FlexTrainingArguments

    args = FlexTrainingArguments(output_dir="~/run", flex_checkpoint=True, device="cpu", amp_master_grad=False)
    assert args.output_dir == str(home / "run")
    third = "~/run/checkpoint-3"
    assert (chosen(args, True), chosen(args, third)) == (home / "run/checkpoint-6", home / "run/checkpoint-3")
    assert os.listdir() == []
    given = {"flex_checkpoint": True, "resume_from_checkpoint": third}
    assert checkpoint_to_resume(given, 1) == home / "run/checkpoint-3"
    assert chosen(SimpleNamespace(output_dir="out", flex_verify="size"), third) == home / "run/checkpoint-3"

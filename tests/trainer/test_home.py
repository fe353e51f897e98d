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


def arguments(**options: Any) -> Any:
    """What a script makes."""
    from paddleformers_fc import FlexTrainingArguments

    return FlexTrainingArguments(flex_checkpoint=True, device="cpu", amp_master_grad=False, **options)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with two checkpoints of a run, and another directory to work in."""
    home = tmp_path / "home"
    (home / "run").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    make_checkpoint(home / "run", 3)
    make_checkpoint(home / "run", 6)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path / "work")
    return home


def chosen(args: Any, asked: bool | str) -> Any:
    """The path of the checkpoint that is resumed."""
    choice = loading._choose(args, asked, Search(Path(args.output_dir), ALONE, pytest.fail))
    assert choice is not None
    return choice.path


@pytest.mark.parametrize(("asked", "step"), [(True, 6), ("~/run/checkpoint-3", 3)])
def test_a_run_in_the_home_directory_is_resumed_from_there(home: Path, asked: bool | str, step: int) -> None:
    args = arguments(output_dir="~/run")
    assert args.output_dir == str(home / "run")
    assert chosen(args, asked) == home / "run" / f"checkpoint-{step}"
    assert os.listdir() == []


def test_what_the_command_lets_pass_is_what_the_ranks_resume(home: Path) -> None:
    named = {"flex_checkpoint": True, "resume_from_checkpoint": "~/run/checkpoint-3"}
    assert checkpoint_to_resume(named, 1) == home / "run" / "checkpoint-3"
    args = SimpleNamespace(output_dir="out", flex_verify="size")
    assert chosen(args, named["resume_from_checkpoint"]) == home / "run" / "checkpoint-3"

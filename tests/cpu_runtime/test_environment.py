"""The environment of a rank while other threads read it without a lock."""

from __future__ import annotations

from pathlib import Path

from verification.forkserver import ForkServer

JOBS = "tests.cpu_runtime.jobs_environment"


def test_no_name_is_added_to_the_environment_once_batches_are_made(ranks: ForkServer, tmp_path: Path) -> None:
    assert ranks.run(f"{JOBS}:added_by_flex", 1, {"output_dir": str(tmp_path)}).values == ([],)


def test_paddle_and_paddleformers_still_add_names_once_batches_are_made(bare_ranks: ForkServer, tmp_path: Path) -> None:
    (added,) = bare_ranks.run(f"{JOBS}:added_by_stock", 1, {"output_dir": str(tmp_path)}).values
    assert [name.rstrip("0123456789") for name in added] == ["TRAINER_GLOBAL_STEP", "__KMP_REGISTERED_LIB_"]

"""Real ranks over gloo, of which some are killed during a save: the job ends, and the previous step resumes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paddleformers_fc.storage.manifest import newest_checkpoint, read_manifest, verify_files
from paddleformers_fc.storage.paths import parse_hidden
from tests.crash.jobs import run_and_die
from tests.harness.on_ranks import job_on_ranks, run_on_ranks
from tests.harness.tiny import DP2, SD2V2, SINGLE, MatrixLayout
from tests.trainer.jobs import run
from tests.trainer.test_trainer import SIX_STEPS, Saved, settings, train_six
from verification.forkserver import ForkServer


@pytest.fixture(scope="module")
def saved(patient_ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run that nothing has happened to."""
    return train_six(patient_ranks, tmp_path_factory.mktemp("dp2"), DP2)


@pytest.mark.parametrize(
    ("layout", "victims", "kind", "part", "beside"),
    [(SD2V2, [1], "write", "optimizer_state", True), (DP2, [0], "rename", "/checkpoint-6", False)],
    ids=["one writes beside steps", "the name is next"],
)
def test_ranks_killed_in_a_save_end_the_job_and_the_previous_step_resumes_on_as_many_ranks_and_on_fewer(
    patient_ranks: ForkServer,
    saved: Saved,
    tmp_path: Path,
    layout: MatrixLayout,
    victims: list[int],
    kind: str,
    part: str,
    beside: bool,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(saved.third, out / "checkpoint-3")
    given = settings(layout, out, True, **SIX_STEPS, flex_async_save=beside)
    job = {"victims": victims, "kind": kind, "part": part, **given}
    result = job_on_ranks(patient_ranks.attempt, layout.nproc, run_and_die, **job)
    assert [result.returncodes[rank] for rank in victims] == [-9] * len(victims)
    assert 0 not in result.returncodes
    assert not result.timed_out
    verify_files(out / "checkpoint-3", read_manifest(out / "checkpoint-3"), "full")
    assert newest_checkpoint(out) == (out / "checkpoint-3", [])
    fewer = shutil.copytree(out, tmp_path / "fewer")
    for again, there in ((layout, out), (SINGLE, fewer)):
        found = run_on_ranks(patient_ranks, again.nproc, run, **settings(again, there, True, **SIX_STEPS))
        assert found[0]["losses"] == pytest.approx(saved.losses[3:], abs=1e-5)
        names = [name for name in os.listdir(there) if "checkpoint" in name]
        assert sorted(names) == ["checkpoint-3", "checkpoint-6"]
        assert not [name for name in names if parse_hidden(there / name)]

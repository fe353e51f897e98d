"""Real ranks over gloo that are not alike, or of which one is killed: everybody else raises one report and ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.distributed.communicator import EXIT_CODE
from paddleformers_fc.storage.manifest import newest_checkpoint
from tests.harness.tiny import DP2, TP2PP2, MatrixLayout
from tests.trainer.test_trainer import Saved, train_six
from verification.forkserver import ForkServer, JobResult

LOST = "tests.trainer.lost_jobs"
FOUR = TP2PP2


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run whose checkpoints are resumed here."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2)


def killed(
    ranks: ForkServer, output_dir: Path, moment: str, layout: MatrixLayout, victim: int, resume: Any
) -> JobResult:
    """A job one of whose ranks has killed itself; nothing of it hangs, and no rank ends as if all were well."""
    output_dir.mkdir(exist_ok=True)
    given = {"moment": moment, "victim": victim, "output_dir": str(output_dir), "layout": layout.to_json()}
    given |= {"resume": None if resume is None else str(resume)}
    result = ranks.attempt(f"{LOST}:die", layout.nproc, given)
    assert result.returncodes[victim] == -9
    assert 0 not in result.returncodes
    return result


def endings(output_dir: Path) -> list[dict[str, Any]]:
    """How the ranks that raised have ended."""
    return [json.loads(path.read_text()) for path in sorted(output_dir.glob("ended-*.json"))]


# The rank that keeps the store, and another one.
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_while_it_reads_is_named_by_all_others_and_nothing_is_trained_or_saved(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path, victim: int
) -> None:
    out = tmp_path / "out"
    killed(patient_ranks, out, "reading", FOUR, victim, saved.third)
    ended = endings(out)
    assert len(ended) == FOUR.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert {one["error"] for one in ended} == {"PeerError"}
    assert f"rank {victim}" in ended[0]["text"]
    assert victim == 0 or f"rank {victim} did not arrive" in ended[0]["text"]
    assert {one["step"] for one in ended} == {0}
    # The others had read their part: these half-loaded weights must not be trained.
    assert all(one["half"] for one in ended)
    assert not list(out.glob("*checkpoint*"))


# In make test: tests/crash/test_real_ranks.py.
@pytest.mark.slow
def test_a_rank_killed_while_it_writes_is_named_by_all_others_and_the_step_before_is_resumed(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", 3
    shutil.copytree(saved.third, out / "checkpoint-3")
    killed(patient_ranks, out, "writing", FOUR, victim, out / "checkpoint-3")
    ended = endings(out)
    assert len(ended) == FOUR.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert f"rank {victim} did not arrive" in ended[0]["text"]
    assert sorted(path.name for path in out.glob("*checkpoint*")) == ["checkpoint-3"]
    assert newest_checkpoint(out)[0] == out / "checkpoint-3"


def test_a_rank_killed_in_the_exchange_itself_is_named_and_no_rank_stays_in_it(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = killed(patient_ranks, out, "exchanging", FOUR, 2, saved.third)
    raised = {one["text"] for one in endings(out)}
    assert len(raised) <= 1
    for rank in (0, 1, 3):
        assert result.returncodes[rank] in (1, EXIT_CODE)
        assert "rank 2 did not arrive" in result.logs[rank].read_text()
    assert not list(out.glob("*checkpoint*"))


@pytest.mark.parametrize(
    ("kind", "message", "late"),
    [
        pytest.param("config", "config.rms_norm_eps: ", True, marks=pytest.mark.chosen),
        pytest.param("save_steps", "save_steps: 1 on rank 0; 2 on rank 1", False, marks=pytest.mark.chosen),
        ("statements", "aoa_config.aoa_statements: ", True),
        ("version", "versions.paddleformers_fc: ", False),
        ("paddle", "versions.paddle: ", False),
        ("config", "config.rms_norm_eps: ", False),
        ("option", "flex_verify: ", False),
        ("learning_rate", "learning_rate: ", False),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank_before_a_weight_changes_and_the_first_step(
    ranks: ForkServer, saved: Saved, tmp_path: Path, kind: str, message: str, late: bool
) -> None:
    """Also one that differs only when the checkpoint is loaded, after the checks at the start."""
    given = {"kind": kind, "late": late, "layout": DP2.to_json(), "output_dir": str(tmp_path)}
    given["resume"] = str(saved.third) if late else None
    found = ranks.run(f"{LOST}:differ", 2, given).values
    assert found[0] == found[1]
    assert (found[0]["error"], found[0]["changed"]) == ("PeerError", False)
    assert found[0]["steps"] == 0
    (line,) = [line for line in found[0]["text"].splitlines() if message in line]
    assert "on rank 1" in line

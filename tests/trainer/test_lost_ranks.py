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
from tests.trainer.test_trainer import JOBS, SIX_STEPS, Saved, settings, train_six
from verification.forkserver import ForkServer, JobResult

LOST = "tests.trainer.lost_jobs"
FOUR = TP2PP2


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A run whose checkpoints are resumed here."""
    return train_six(ranks, tmp_path_factory.mktemp("dp2"), DP2)


@pytest.mark.parametrize(
    ("kind", "layout", "odd", "message"),
    [
        ("config", FOUR, 2, "config.rms_norm_eps: "),
        ("statements", DP2, 1, "aoa_config.aoa_statements: "),
    ],
)
def test_one_rank_that_differs_is_named_on_every_rank_before_a_weight_changes(
    ranks: ForkServer, saved: Saved, tmp_path: Path, kind: str, layout: MatrixLayout, odd: int, message: str
) -> None:
    shutil.copytree(saved.third, tmp_path / "usual" / "checkpoint-3")
    found = resumed_with_one_odd(ranks, tmp_path, kind, layout, odd)
    assert (found["error"], found["changed"]) == ("PeerError", False)
    (line,) = [line for line in found["text"].splitlines() if message in line]
    assert f"on rank {odd}" in line


def resumed_with_one_odd(
    ranks: ForkServer, directory: Path, kind: str, layout: MatrixLayout, odd: int
) -> dict[str, Any]:
    """How every rank of a job alike has ended, which resumed from ``usual/checkpoint-3`` while one rank was odd."""
    given = {"kind": kind, "odd": odd, "resume": "checkpoint-3", "layout": layout.to_json()}
    given |= {"directory": str(directory / "usual"), "output_dir": str(directory / "out")}
    found: tuple[dict[str, Any], ...] = ranks.run(f"{LOST}:differ_in_directory", layout.nproc, given).values
    assert all(one == found[0] for one in found)
    return found[0]


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


def test_a_rank_killed_while_it_reads_is_named_by_all_others_and_nothing_is_trained_or_saved(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    out, layout, victim = tmp_path / "out", FOUR, 2
    killed(patient_ranks, out, "reading", layout, victim, saved.third)
    ended = endings(out)
    assert len(ended) == layout.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert {one["error"] for one in ended} == {"PeerError"}
    assert f"rank {victim} did not arrive" in ended[0]["text"]
    assert {one["step"] for one in ended} == {0}
    # The others had read their part: these half-loaded weights must not be trained.
    assert all(one["half"] for one in ended)
    assert not list(out.glob("*checkpoint*"))
    again = patient_ranks.run(f"{JOBS}:run", 2, settings(DP2, tmp_path / "again", saved.third, **SIX_STEPS))
    assert again.values[0]["losses"] == saved.losses[3:]


def test_a_rank_killed_while_it_writes_is_named_by_all_others_and_the_step_before_is_resumed(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    out, layout, victim = tmp_path / "out", FOUR, 3
    shutil.copytree(saved.third, out / "checkpoint-3")
    killed(patient_ranks, out, "writing", layout, victim, out / "checkpoint-3")
    ended = endings(out)
    assert len(ended) == layout.nproc - 1
    assert len({one["text"] for one in ended}) == 1
    assert f"rank {victim} did not arrive" in ended[0]["text"]
    assert sorted(path.name for path in out.glob("*checkpoint*")) == ["checkpoint-3"]
    assert newest_checkpoint(out)[0] == out / "checkpoint-3"


def test_the_rank_that_keeps_the_store_is_named_when_it_is_killed(
    patient_ranks: ForkServer, saved: Saved, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed(patient_ranks, out, "reading", FOUR, 0, saved.third)
    ended = endings(out)
    assert len(ended) == 3
    assert len({one["text"] for one in ended}) == 1
    assert "rank 0" in ended[0]["text"]


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
    ("kind", "message"),
    [
        ("version", "versions.paddleformers_fc: "),
        ("paddle", "versions.paddle: "),
        ("config", "config.rms_norm_eps: "),
        ("option", "flex_verify: "),
        ("save_steps", "save_steps: 1 on rank 0; 2 on rank 1"),
        ("learning_rate", "learning_rate: "),
    ],
)
def test_a_rank_that_differs_is_found_before_the_first_step(
    ranks: ForkServer, tmp_path: Path, kind: str, message: str
) -> None:
    given = {
        "kind": kind,
        "odd": 1,
        "resume": None,
        "layout": DP2.to_json(),
        "output_dir": str(tmp_path),
        "late": False,
    }
    found = ranks.run(f"{LOST}:differ", 2, given).values
    assert found[0] == found[1]
    assert (found[0]["error"], found[0]["steps"]) == ("PeerError", 0)
    (line,) = [line for line in found[0]["text"].splitlines() if line.strip().startswith("- ")]
    assert message in line
    assert "on rank 1" in line

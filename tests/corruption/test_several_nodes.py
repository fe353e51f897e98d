"""Several nodes with a disk each: no rank is left alone in a decision, and no disk decides for all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.corruption.guarantees import Observed, fault
from tests.harness.tiny import DP2
from verification.forkserver import ForkServer

JOBS = "tests.trainer.disk_jobs"


@pytest.mark.slow
@fault("G100", "one of two nodes comes back with a fresh disk, and the command line resumes automatically")
def test_g100_the_rank_of_a_fresh_disk_joins_the_decision(ranks: ForkServer, tmp_path: Path) -> Observed:
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    given = {"layout": DP2.to_json(), "output_dir": "out", "places": list(map(str, places))}
    ranks.run(f"{JOBS}:run", 2, {**given, "arguments": {"max_steps": 2, "save_steps": 2}})
    shutil.copytree(places[1] / "out", places[0] / "out", dirs_exist_ok=True)
    shutil.rmtree(places[1] / "out")
    found = ranks.run(f"{JOBS}:resume_by_itself", 2, {**given, "arguments": {"max_steps": 3}}).values
    assert [(one["step"], len(one["losses"])) for one in found] == [(3, 1)] * 2
    return Observed("—", "both ranks resume at step 2")


@fault("G101", "under `save_total_limit: 1` one of two disks fails to sync a file of the newest checkpoint")
def test_g101_a_failed_sync_on_one_disk_keeps_the_older_checkpoint_on_all(
    ranks: ForkServer, tmp_path: Path
) -> Observed:
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    arguments = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1}
    given = {"layout": DP2.to_json(), "output_dir": "out", "places": list(map(str, places)), "arguments": arguments}
    found = ranks.run(f"{JOBS}:train_and_fail_a_sync", 2, {**given, "victim": 1, "part": ".checkpoint-3.unf"}).values
    assert [one["error"] for one in found] == ["StorageError"] * 2
    assert all("EIO" in one["text"] for one in found)
    assert [one["left"] for one in found] == [["checkpoint-2"]] * 2
    return Observed(
        "—",
        "the save fails on both ranks: `StorageError`, EIO; checkpoint-2 stays on each disk, and nothing else is left",
    )

"""A run whose output directory lies on disks of single hosts: saving, resuming anywhere, and what a lost disk means."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.storage.manifest import read_manifest
from tests.cli.support import alter
from tests.harness.tiny import DP2, SD2V2, TP2, TP2SD2V2, MatrixLayout
from tests.trainer.test_trainer import SIX_STEPS
from verification.forkserver import ForkServer, JobResult

JOBS = "tests.trainer.disk_jobs"


def run(
    ranks: ForkServer,
    job: str,
    layout: MatrixLayout,
    places: list[Path],
    resume: str | bool | None = None,
    output_dir: str | Path = "out",
    **given: Any,
) -> JobResult:
    """A job on ranks that each start in a place; its result."""
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    settings = {"layout": layout.to_json(), "output_dir": str(output_dir), "places": list(map(str, places))}
    resumed = {} if resume is None else {"resume": resume}
    return ranks.run(f"{JOBS}:{job}", layout.nproc, {**settings, **resumed, "arguments": given})


def disks(directory: Path, *numbers: int) -> list[Path]:
    """The place of every rank."""
    return [directory / f"disk-{number}" for number in numbers]


@pytest.fixture(scope="module")
def saved(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run on two ranks, each with a disk of its own, that saved at 3 and 6, and the losses of the same run on one."""
    directory = tmp_path_factory.mktemp("disks")
    result = run(ranks, "run", DP2, disks(directory, 0, 1), **SIX_STEPS)
    shared = run(ranks, "run", DP2, disks(tmp_path_factory.mktemp("shared"), 0, 0), **SIX_STEPS)
    assert result.values[0]["losses"] == shared.values[0]["losses"]
    (line,) = [line for line in result.logs[0].read_text().splitlines() if "is on 2 disks" in line]
    assert "rank 0; rank 1" in line
    assert "disks" not in shared.logs[0].read_text()
    return directory, result.values[0]["losses"]


@pytest.fixture
def copied(saved: tuple[Path, list[float]], tmp_path: Path) -> Path:
    """The directory of a test, with the disks of the run."""
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("layout", "numbers", "way"),
    [
        (SD2V2, (1, 0), "once"),
        (TP2, (0, 1), "each"),
        (TP2SD2V2, (2, 1, 0, 3), "each"),
        (TP2SD2V2, (2, 1, 0, 3), "once"),
    ],
    ids=["swapped", "tp2", "with new hosts", "with new hosts, once"],
)
def test_a_run_resumes_wherever_all_disks_are_seen(
    ranks: ForkServer,
    saved: tuple[Path, list[float]],
    copied: Path,
    layout: MatrixLayout,
    numbers: tuple[int, ...],
    way: str,
) -> None:
    places = disks(copied, *numbers)
    result = run(ranks, "run", layout, places, "out/checkpoint-3", **SIX_STEPS, flex_read=way)
    assert result.values[0]["losses"] == pytest.approx(saved[1][3:], abs=1e-6)
    manifests = [read_manifest(place / "out/checkpoint-6") for place in places]
    assert manifests == [manifests[0]] * len(places)
    assert manifests[0].world_size == layout.nproc


def test_random_generators_find_their_process_on_another_disk_unless_damaged(ranks: ForkServer, copied: Path) -> None:
    whole = run(ranks, "draw_after_resume", DP2, disks(copied / "whole", 0, 1), max_steps=4).values
    for numbers in ((0, 1), (1, 0)):
        result = run(ranks, "draw_after_resume", DP2, disks(copied, *numbers), "out/checkpoint-3", max_steps=4)
        assert result.values == whole
        assert not any("Random generators are not restored" in log.read_text() for log in result.logs)
    alter(copied / "disk-1/out/checkpoint-3/trainer/rng-00001.json")
    damaged = run(ranks, "refused", DP2, disks(copied, 1, 0), "out/checkpoint-3", **SIX_STEPS, flex_verify="off")
    for found in damaged.values:
        assert (found["error"], found["changed"]) == ("Corrupt", False)
        assert "trainer/rng-00001.json does not match its checksum" in found["text"]


def test_a_disk_that_cannot_be_written_stops_every_node_before_the_first_step(
    ranks: ForkServer, tmp_path: Path
) -> None:
    places = disks(tmp_path, 0, 1)
    places[1].mkdir()
    (places[1] / "out").symlink_to("/proc")  # A directory in which not even root makes one.
    for found in run(ranks, "refused", DP2, places, False, **SIX_STEPS).values:
        assert (found["error"], found["changed"]) == ("StorageError", False)
        assert "on rank 1" in found["text"]

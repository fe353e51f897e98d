"""Checkpoints whose files lie on several disks: each rank has a directory of its own, with a part of the files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.errors import Corrupt, FlexError
from paddleformers_fc.execute.load import LoadReport, load_checkpoint
from paddleformers_fc.execute.opening import open_newest, open_on_all_ranks
from paddleformers_fc.storage.executor import ReadOptions
from tests.execute import simulated
from tests.execute.simulated import MODEL, canonical, job, live, save, succeed

ARRAYS = canonical()
STEP = "checkpoint-3"


def distributed(source: Path, disks: list[Path], holders: Callable[[str], list[int]]) -> None:
    """Copy a checkpoint onto disks: the small files onto all, every other to the disks of ``holders``."""
    for path in source.rglob("*"):
        name = path.relative_to(source).as_posix()
        if path.is_file():
            for number, disk in enumerate(disks):
                if "rank-" not in name or path.suffix != ".safetensors" or number in holders(name):
                    (disk / STEP / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, disk / STEP / name)


def by_writer(name: str) -> list[int]:
    """The disk of the rank that wrote a file, where every rank has its own."""
    return [int(name.split("rank-")[1][:5])]


def disks(tmp_path: Path, stored: tuple[int, int]) -> list[Path]:
    """A checkpoint of so many ranks, each of which wrote onto a disk of its own."""
    save(tmp_path / "shared" / STEP, ARRAYS, *stored)
    found = [tmp_path / f"disk-{number}" for number in range(stored[0] * stored[1])]
    distributed(tmp_path / "shared" / STEP, found, by_writer)
    return found


def load(places: list[Path], tp: int, sharded: int = 1, verify: str = "size", once: bool = False) -> list[LoadReport]:
    """Load on ranks that see one place each."""
    options = ReadOptions(replicas="once" if once else "each")
    steps = [one / STEP for one in places]
    return simulated.load(steps, ARRAYS, tp, sharded, verify=verify, options=options, ranks=len(places))


@pytest.mark.sampled
@pytest.mark.parametrize("stored", [(2, 1), (1, 2)])
@pytest.mark.parametrize(("tp", "sharded"), [(2, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("once", [False, True])
def test_files_on_two_disks_are_read_by_those_that_see_them(
    tmp_path: Path, stored: tuple[int, int], tp: int, sharded: int, verify: str, once: bool
) -> None:
    reports = load(disks(tmp_path, stored), tp, sharded, verify, once)
    assert all(report.bytes_received for report in reports)


def test_ranks_of_other_hosts_that_saw_nothing_of_the_save_are_served(tmp_path: Path) -> None:
    first, second = disks(tmp_path, (2, 1))
    load([second, first, tmp_path / "empty", tmp_path / "empty"], 2, 2)


def test_ranks_that_share_disks_take_what_they_see_and_get_the_rest(tmp_path: Path) -> None:
    one, two, three, four = disks(tmp_path, (2, 2))
    for source, target in ((two, one), (four, three)):
        shutil.copytree(source, target, dirs_exist_ok=True)
    reports = load([one, one, three, three], 2, 2)
    shared = load([tmp_path / "shared"] * 4, 2, 2)
    assert sum(report.bytes_received for report in shared) == 0
    assert 0 < sum(report.bytes_received for report in reports) < sum(report.bytes_read for report in shared)


@pytest.mark.parametrize("opening", [open_on_all_ranks, open_newest])
def test_ranks_that_see_the_same_agree_twice(tmp_path: Path, opening: Callable[..., Any]) -> None:
    save(tmp_path / STEP, ARRAYS, 1, 2)

    def work(channel: Any) -> tuple[int, int]:
        opening(tmp_path / STEP, channel)
        return channel.exchanges, channel.largest

    assert succeed(2, work) == [(2, 0)] * 2


def test_a_document_that_is_damaged_on_one_disk_is_reported_by_all(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("usual", "odd")]
    save(places[0] / STEP, ARRAYS, 1, 2)
    # Two saves record the second in which they ended.
    shutil.copytree(places[0], places[1])
    (places[1] / STEP / "mapping.json").write_bytes(b"{")
    error = refused(places)
    assert isinstance(error, Corrupt)
    assert "mapping.json is truncated" in str(error)
    assert "rank 1" in str(error)


def refused(places: list[Path], verify: str = "size") -> FlexError:
    """The error of every rank."""
    outcomes = job(len(places), lambda channel: open_on_all_ranks(places[channel.rank] / STEP, channel, verify))
    assert all(isinstance(outcome, FlexError) for outcome in outcomes)
    assert len({_without_places(str(outcome), places) for outcome in outcomes}) == 1
    return outcomes[0]


def _without_places(text: str, places: list[Path]) -> str:
    for place in places:
        text = text.replace(str(place), "PLACE")
    return text


def test_a_disk_that_is_lost_is_named_by_its_files_and_ranks(tmp_path: Path) -> None:
    first, _, third = disks(tmp_path, (1, 3))
    error = refused([first, tmp_path / "new", third])
    assert isinstance(error, Corrupt)
    assert "model_state/rank-00001.safetensors is visible to no rank" in str(error)
    assert "optimizer_state/rank-00001.safetensors is visible to no rank" in str(error)
    assert "rank-00000" not in str(error)
    assert "rank 1: no checkpoint of this name is there" in str(error)


def test_disks_with_different_saves_of_one_step_are_refused_by_their_ranks(tmp_path: Path) -> None:
    first, second = disks(tmp_path, (2, 1))
    save(tmp_path / "other" / STEP, canonical(seed=1), 2, 1)
    shutil.rmtree(second)
    distributed(tmp_path / "other" / STEP, [tmp_path / "nowhere", second], by_writer)
    error = refused([first, second, second])
    assert isinstance(error, Corrupt)
    assert "rank 0: step 3, 2 ranks" in str(error)
    assert "ranks 1-2: step 3, 2 ranks" in str(error)


@pytest.mark.parametrize("level", ["size", "full"])
def test_a_damaged_file_is_found_by_the_rank_that_sees_it(tmp_path: Path, level: str) -> None:
    places = disks(tmp_path, (2, 1))
    victim = places[1] / STEP / "model_state/rank-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data[:-8] if level == "size" else data)

    def work(channel: Any) -> None:
        checkpoint = open_on_all_ranks(places[channel.rank] / STEP, channel, level)
        load_checkpoint(checkpoint, live(ARRAYS, 2, channel.rank, empty=True), MODEL, channel)

    error, _ = job(2, work)
    assert isinstance(error, Corrupt)
    assert "model_state/rank-00001.safetensors" in str(error)
    assert "rank 1" in str(error)

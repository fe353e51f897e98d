"""Several disks, between threads: each rank has a directory of its own, with a part of the files."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import all_gather_checked, broadcast
from paddleformers_fc.errors import Corrupt, MismatchError
from paddleformers_fc.execute import commit_coordinator, export, live_export, stream
from paddleformers_fc.execute.commit_coordinator import DiskLeaders, StagingMaker
from paddleformers_fc.execute.load import LoadReport, load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.storage.executor import ReadOptions
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.safetensors import read_header
from tests.execute import simulated, test_ties
from tests.execute.simulated import (
    ARRAYS,
    MODEL,
    canonical,
    flip,
    job,
    live,
    save,
    succeed,
)
from tests.execute.test_ties import EMBEDDING, LM_HEAD
from verification import simulate_ranks
from verification.digests import canonical_digests

STEP = "checkpoint-3"


def disks(tmp_path: Path, stored: tuple[int, int], seed: int = 0) -> list[Path]:
    """A checkpoint of so many ranks, each of which wrote onto a disk of its own."""
    found = [tmp_path / f"disk-{number}" for number in range(stored[0] * stored[1])]
    save([disk / STEP for disk in found], canonical(seed=seed), *stored)
    return found


def load(places: list[Path], tp: int, sharded: int = 1, verify: str = "size", once: bool = False) -> list[LoadReport]:
    """Load on ranks that see one place each."""
    options = ReadOptions(replicas="once" if once else "each")
    return simulated.load(
        [place / STEP for place in places], tp, sharded, ranks=len(places), verify=verify, options=options
    )


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
    assert {report.bytes_hashed > 0 for report in reports} == {verify == "full"}


def refused(places: list[Path]) -> str:
    """The error of every rank, without the places."""
    outcomes = job(len(places), lambda channel: open_on_all_ranks(places[channel.rank] / STEP, channel))
    assert all(isinstance(outcome, Corrupt) for outcome in outcomes)
    anywhere = re.compile("|".join(map(str, places)))
    (text,) = {anywhere.sub("PLACE", str(outcome)) for outcome in outcomes}
    return text


def test_a_document_that_is_damaged_on_one_disk_is_reported_by_all(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("usual", "odd")]
    save(places[0] / STEP, ARRAYS, 1, 2)
    # Two saves record the second in which they ended.
    shutil.copytree(places[0], places[1])
    (places[1] / STEP / "mapping.json").write_bytes(b"{")
    text = refused(places)
    assert "mapping.json is truncated" in text
    assert "rank 1" in text


def test_a_disk_that_is_lost_is_named_by_its_files_and_ranks(tmp_path: Path) -> None:
    first, _, third = disks(tmp_path, (1, 3))
    text = refused([first, tmp_path / "new", third])
    assert "model_state/rank-00001.safetensors is visible to no rank" in text
    assert "optimizer_state/rank-00001.safetensors is visible to no rank" in text
    assert "rank-00000" not in text
    assert "rank 1: no checkpoint of this name is there" in text


def test_disks_with_different_saves_of_one_step_are_refused_by_their_ranks(tmp_path: Path) -> None:
    first, _ = disks(tmp_path, (2, 1))
    _, second = disks(tmp_path / "other", (2, 1), seed=1)
    text = refused([first, second, second])
    assert "rank 0: step 3, 2 ranks" in text
    assert "ranks 1-2: step 3, 2 ranks" in text


def test_a_truncated_file_is_found_by_the_rank_that_sees_it(tmp_path: Path) -> None:
    places = disks(tmp_path, (2, 1))
    os.truncate(places[1] / STEP / "model_state/rank-00001.safetensors", 100)
    text = refused(places)
    assert "model_state/rank-00001.safetensors is truncated" in text
    assert "rank 1" in text


# ---- Saving onto several disks: which ranks share one, and what lies on each.


def files_in(place: Path) -> set[str]:
    return {path.relative_to(place / STEP).as_posix() for path in (place / STEP).rglob("*") if path.is_file()}


def leaders(channel: Any, disk: Path) -> tuple[DiskLeaders, list[str]]:
    """The leaders of the disks, and the staging directories on the disk of this rank."""
    with closing(StagingMaker(disk / STEP, channel)) as maker:
        maker.find(broadcast(channel, "beginning", maker.create, str))
        present = all_gather_checked(channel, "listing", lambda: os.listdir(disk), list[str])
        return maker.staged.disks, present[channel.rank]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
@settings(max_examples=30)
def test_the_lead_of_a_disk_is_the_lowest_rank_that_sees_it(
    tmp_path_factory: pytest.TempPathFactory, disks: list[int]
) -> None:
    place = tmp_path_factory.mktemp("disks")
    found = succeed(len(disks), lambda channel: leaders(channel, place / str(disks[channel.rank])))
    leads = tuple(disks.index(disk) for disk in disks)
    assert [one.leads for one, _ in found] == [leads] * len(disks)
    assert [present for _, present in found] == [[one.token] for one, _ in found], "each disk has one"
    assert found[0][0].sharing() == {
        disks.index(disk): [rank for rank, other in enumerate(disks) if other == disk] for disk in dict.fromkeys(disks)
    }


def test_a_rank_that_does_not_even_see_its_own_is_a_disk_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_coordinator, "is_directory", lambda path: False)
    found = succeed(3, lambda channel: leaders(channel, tmp_path / str(channel.rank)))
    assert [one.leads for one, _ in found] == [(0, 1, 2)] * 3
    assert [len(present) for _, present in found] == [1, 1, 1], "a rank creates one"


@pytest.mark.parametrize(
    ("leads", "tp", "sharded"),
    [((0, 1), 2, 1), ((0, 1), 1, 2), ((0, 0, 2, 2), 2, 2), ((0, 1, 0, 1), 2, 2), ((0, 1, 2, 3), 2, 2)],
)
def test_every_disk_gets_the_files_of_its_ranks_and_all_that_is_small(
    tmp_path: Path, leads: tuple[int, ...], tp: int, sharded: int
) -> None:
    places = [tmp_path / f"disk-{lead}" for lead in leads]

    def files(rank: int) -> dict[str, bytes]:
        of_all = {"trainer/state.json": b"{}", "tokenizer/a.txt": b"hello"} if rank == 0 else {}
        return {**of_all, f"trainer/rng-{rank:05d}.json": b"%d" % rank}

    reports = save([place / STEP for place in places], ARRAYS, tp, sharded, files=files)
    assert {report.disks.leads for report in reports} == {leads}
    manifests = [read_manifest(place / STEP) for place in places]
    assert manifests == [manifests[0]] * len(places)
    assert (reports[0].files, reports[0].size) == (
        len(manifests[0].files),
        sum(one.size for one in manifests[0].files),
    )
    listed = {checksum.path for checksum in manifests[0].files}
    small = {"config.json", "mapping.json", "flex_index.safetensors", "tokenizer/a.txt"}
    small |= {"trainer/state.json", "trainer/rng-00000.json"}
    assert set().union(*map(files_in, places)) == listed | {"flex_checkpoint.json"}
    for place in set(places):
        own = [rank for rank, other in enumerate(places) if other == place]
        theirs = {name for name in listed - small if int(name.split("-")[-1][:5]) in own}
        assert files_in(place) == theirs | small | {"flex_checkpoint.json"}
        assert [path.name for path in place.iterdir()] == [STEP]
    load(places, tp, sharded)
    load(places[::-1], 1, 1, "full")


@pytest.mark.parametrize("leads", [(0, 1), (0, 1, 0, 3)])
def test_an_export_is_complete_on_the_first_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: tuple[int, ...]
) -> None:
    monkeypatch.setattr(stream, "ROUND_BYTES", 3000)  # In more and smaller batches.
    places = [tmp_path / f"disk-{lead}" for lead in leads]

    def work(channel: Any) -> None:
        weights, target = live(ARRAYS, 2, channel.rank)["model_state"], places[channel.rank] / "hf"
        live_export.save_weights(weights, MODEL, {}, target, 4000, channel)

    succeed(len(places), work)
    assert [path.name for place in set(places) for path in place.iterdir()] == ["hf"]
    found = {
        name: array for path in (places[0] / "hf").glob("*.safetensors") for name, array in load_file(path).items()
    }
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[key], ARRAYS[key]) for key in ARRAYS)


def load_tied(places: list[Path], grid: str, aoa_config: Any = None) -> list[Any]:
    """Load a tied model over a grid, each rank from its place, and compare; what every rank received or raised."""
    model = test_ties.model_of(grid)

    def work(channel: Any) -> int:
        expected = simulate_ranks.filled(model.roles(channel.rank), test_ties.tied_value)
        zeros = simulate_ranks.filled(model.roles(channel.rank), test_ties.nothing)
        checkpoint = open_on_all_ranks(places[channel.rank] / STEP, channel)
        report = load_checkpoint(checkpoint, zeros, test_ties.TIED, channel, aoa_config=aoa_config)
        assert test_ties.differing(zeros, expected) == []
        return report.bytes_received

    return job(len(places), work)


def save_tied(places: list[Path], grid: str) -> None:
    """Save a tied model over a grid, each rank to its place."""
    test_ties.save([place / STEP for place in places], grid).results()


def part(places: list[Path], at: int = 0) -> None:
    """Change a byte of the file in which a tied weight lies under its second name."""
    files = [path for place in places for path in (place / STEP / "model_state").iterdir()]
    ((path, entry),) = [
        (path, header.tensors[LM_HEAD]) for path in files if LM_HEAD in (header := read_header(path)).tensors
    ]
    flip(path, range(entry.begin, entry.end)[at])


@pytest.mark.parametrize(("stages", "disks"), [(3, 1), (4, 2)])
def test_a_pipeline_whose_middle_stages_hold_nothing_tied_loads_and_compares_what_is_tied(
    tmp_path: Path, stages: int, disks: int
) -> None:
    places = [tmp_path / f"disk-{rank % disks}" for rank in range(stages)]
    save_tied(places, f"pp={stages}")
    load_tied(places, f"pp={stages}").results()
    part(list(dict.fromkeys(places)))
    error = load_tied(places, f"pp={stages}").error(MismatchError)
    assert f"{LM_HEAD} = {EMBEDDING}: model_state/rank-00000" in str(error)


def test_exports_and_digests_take_tied_weights_that_are_equal_and_refuse_those_that_differ(tmp_path: Path) -> None:
    save_tied([tmp_path, tmp_path], "pp=2")
    assert export.export_checkpoint(tmp_path / STEP, tmp_path / "export").tensors
    assert list(canonical_digests(tmp_path / STEP))
    before = (tmp_path / "export/model.safetensors").read_bytes()
    part([tmp_path], -1)
    with pytest.raises(MismatchError, match=f"{LM_HEAD} = {EMBEDDING}: model_state/rank-00000"):
        export.export_checkpoint(tmp_path / STEP, tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").read_bytes() == before
    with pytest.raises(MismatchError, match="model_state/rank-00000"):
        list(canonical_digests(tmp_path / STEP))


SAME, ONTO_ALIAS, ALIAS_NEW = f"{EMBEDDING} -> {EMBEDDING}", f"{EMBEDDING} -> {LM_HEAD}", f"_ -> {LM_HEAD}"


@pytest.mark.parametrize(
    ("statement", "reverse"), [(SAME, False), (ONTO_ALIAS, False), (ALIAS_NEW, False), (SAME, True)]
)
def test_a_users_statements_go_with_weights_that_are_tied_across_a_pipeline(
    tmp_path: Path, statement: str, reverse: bool
) -> None:
    save_tied([tmp_path, tmp_path], "pp=2")
    stated = {"aoa_statements": [statement], "aoa_config_reverse": reverse}
    assert load_tied([tmp_path, tmp_path], "pp=2", stated) == [0, 0]

"""Which ranks share a disk, and saving onto several: between threads, each with a directory that is its disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

from paddleformers_fc.distributed.channel import broadcast
from paddleformers_fc.errors import MismatchError, StorageError
from paddleformers_fc.execute import export, live_export, stream
from paddleformers_fc.execute.commit_coordinator import DiskLeaders, find_disk_leaders
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.storage.safetensors import read_header
from tests.execute import test_ties
from tests.execute.simulated import CONFIG, MODEL, canonical, job, live, save, succeed
from tests.execute.test_opening import load
from tests.execute.test_ties import EMBEDDING, LM_HEAD
from verification import simulate_ranks
from verification.digests import canonical_digests

ARRAYS = canonical()
STEP = "checkpoint-3"


def files_in(place: Path) -> set[str]:
    return {path.relative_to(place / STEP).as_posix() for path in (place / STEP).rglob("*") if path.is_file()}


def leaders(channel: Any, put: Callable[[], str], is_visible: Callable[[str], bool]) -> DiskLeaders:
    token = broadcast(channel, "beginning", put, str)
    return find_disk_leaders(channel, "looking", token, put, is_visible)[0]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
@settings(max_examples=30)
def test_the_lead_of_a_disk_is_the_lowest_rank_that_sees_it(disks: list[int]) -> None:
    put: dict[int, set[str]] = {disk: set() for disk in disks}

    def work(channel: Any) -> DiskLeaders:
        disk = put[disks[channel.rank]]

        def put_down() -> str:
            disk.add(f"token-{channel.rank}")
            return f"token-{channel.rank}"

        return leaders(channel, put_down, lambda name: name in disk)

    found = succeed(len(disks), work)
    leads = tuple(disks.index(disk) for disk in disks)
    assert [one.leads for one in found] == [leads] * len(disks)
    assert [one.token for one in found] == [f"token-{lead}" for lead in leads]
    assert found[0].sharing() == {
        disks.index(disk): [rank for rank, other in enumerate(disks) if other == disk] for disk in dict.fromkeys(disks)
    }


def test_a_rank_that_does_not_even_see_its_own_is_a_disk_of_its_own() -> None:
    asked: list[str] = []

    def put() -> str:
        asked.append("token")
        assert len(asked) <= 3, "a rank is asked once"
        return asked[-1]

    found = succeed(3, lambda channel: leaders(channel, put, lambda name: False))
    assert [one.leads for one in found] == [(0, 1, 2)] * 3


def test_a_shared_disk_takes_one_exchange_which_carries_messages_to_the_first_rank() -> None:
    def work(channel: Any) -> tuple[int, list[bytes]]:
        _, messages = find_disk_leaders(
            channel, "looking", "token", lambda: "other", lambda name: name == "token", lambda: b"%d" % channel.rank
        )
        return channel.exchanges, messages

    assert succeed(3, work) == [(1, [b"0", b"1", b"2"]), (1, []), (1, [])]


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
    small = {
        "config.json",
        "mapping.json",
        "flex_index.safetensors",
        "trainer/state.json",
        "tokenizer/a.txt",
        "trainer/rng-00000.json",
    }
    assert set().union(*map(files_in, places)) == listed | {"flex_checkpoint.json"}
    for place in set(places):
        own = [rank for rank, other in enumerate(places) if other == place]
        theirs = {name for name in listed - small if int(name.split("-")[-1][:5]) in own}
        assert files_in(place) == theirs | small | {"flex_checkpoint.json"}
        assert [path.name for path in place.iterdir()] == [STEP]
    load(places, tp, sharded)
    load(places[::-1], 1, 1, "full")


@pytest.mark.parametrize("leads", [(0, 0), (0, 1), (0, 1, 0, 3), (0, 1, 1, 1)])
@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_an_export_lies_whole_on_the_first_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: tuple[int, ...], max_shard_bytes: int
) -> None:
    monkeypatch.setattr(stream, "ROUND_BYTES", 3000)  # In more and smaller batches.
    places = [tmp_path / f"disk-{lead}" for lead in leads]

    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        weights = live(ARRAYS, 2, channel.rank)["model_state"]
        live_export.save_weights(weights, MODEL, files, places[channel.rank] / "hf", max_shard_bytes, channel)

    succeed(len(places), work)
    assert [path.name for place in set(places) for path in place.iterdir()] == ["hf"]
    loaded = {
        name: array for path in (places[0] / "hf").glob("*.safetensors") for name, array in load_file(path).items()
    }
    assert loaded.keys() == ARRAYS.keys()
    assert all(np.array_equal(loaded[key], ARRAYS[key]) for key in ARRAYS)


def test_a_disk_that_fails_leaves_no_disk_with_a_checkpoint(tmp_path: Path) -> None:
    places = [tmp_path / "disk-0", tmp_path / "disk-1"]
    places[1].parent.mkdir(exist_ok=True)
    places[1].write_text("no directory")

    def work(channel: Any) -> None:
        files = {"config.json": config_bytes(CONFIG)} if channel.rank == 0 else {}
        weights = live(ARRAYS, 2, channel.rank)
        save_checkpoint(places[channel.rank] / STEP, weights, MODEL, files, JobRecord(3, 24, {}), channel)

    first, second = job(2, work)
    assert isinstance(first, StorageError)
    assert str(first) == str(second)
    assert list(places[0].iterdir()) == []


def test_saving_a_step_again_replaces_it_on_every_disk(tmp_path: Path) -> None:
    places = [tmp_path / "disk-0", tmp_path / "disk-1"]
    save([place / STEP for place in places], canonical(seed=1), 2)
    save([place / STEP for place in places], ARRAYS, 1, 2)
    load(places, 1, 2)
    assert [[path.name for path in place.iterdir()] for place in places] == [[STEP]] * 2


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
    test_ties.reports(test_ties.save([place / STEP for place in places], grid))


def alias_file(places: list[Path]) -> Path:
    """The file in which a tied weight lies under its second name."""
    (found,) = [
        path
        for place in places
        for path in (place / STEP / "model_state").iterdir()
        if LM_HEAD in read_header(path).tensors
    ]
    return found


@pytest.mark.parametrize(("stages", "disks"), [(3, 1), (4, 1), (4, 2), (4, 4)])
def test_a_pipeline_whose_middle_stages_hold_nothing_tied_loads_and_compares_what_is_tied(
    tmp_path: Path, stages: int, disks: int
) -> None:
    places = [tmp_path / f"disk-{rank % disks}" for rank in range(stages)]
    grid = f"pp={stages}"
    save_tied(places, grid)
    assert all(isinstance(outcome, int) for outcome in load_tied(places, grid))
    part(list(dict.fromkeys(places)))
    errors = load_tied(places, grid)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert f"{LM_HEAD} = {EMBEDDING}: model_state/rank-00000" in str(errors[0])


def part(places: list[Path], at: int = 0) -> None:
    """Change a byte of a tied weight under its second name."""
    victim = alias_file(places)
    entry = read_header(victim).tensors[LM_HEAD]
    data = bytearray(victim.read_bytes())
    data[range(entry.begin, entry.end)[at]] ^= 1
    victim.write_bytes(data)


def test_an_export_of_tied_weights_takes_what_is_equal_and_refuses_what_differs(tmp_path: Path) -> None:
    save_tied([tmp_path, tmp_path], "pp=2")
    assert export.export_checkpoint(tmp_path / STEP, tmp_path / "export").tensors
    before = (tmp_path / "export/model.safetensors").read_bytes()
    part([tmp_path])
    with pytest.raises(MismatchError, match=f"{LM_HEAD} = {EMBEDDING}: model_state/rank-00000"):
        export.export_checkpoint(tmp_path / STEP, tmp_path / "export")
    assert (tmp_path / "export/model.safetensors").read_bytes() == before


def test_tied_weights_that_differ_have_no_digests(tmp_path: Path) -> None:
    save_tied([tmp_path, tmp_path], "pp=2")
    assert list(canonical_digests(tmp_path / STEP))
    part([tmp_path], -1)
    with pytest.raises(MismatchError, match="model_state/rank-00000"):
        list(canonical_digests(tmp_path / STEP))


SAME, ONTO_ALIAS, ALIAS_NEW = f"{EMBEDDING} -> {EMBEDDING}", f"{EMBEDDING} -> {LM_HEAD}", f"_ -> {LM_HEAD}"


@pytest.mark.parametrize(
    ("statement", "reverse"), [(SAME, False), (ONTO_ALIAS, False), (ALIAS_NEW, False), (SAME, True)]
)
def test_a_users_statements_go_with_weights_that_are_tied_across_a_pipeline(
    tmp_path: Path, statement: str, reverse: bool
) -> None:
    places = [tmp_path, tmp_path]
    save_tied(places, "pp=2")
    stated = {"aoa_statements": [statement], "aoa_config_reverse": reverse}
    assert load_tied(places, "pp=2", stated) == [0, 0]

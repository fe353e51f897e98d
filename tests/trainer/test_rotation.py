"""What ``save_total_limit`` deletes, and what it never does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.stated import encode_mapping, rules_by_name
from paddleformers_fc.formats.index import encode_index, shard_columns
from paddleformers_fc.storage.checksum import INDEX_NAME, records_of
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import DivergedTie, Manifest, read_manifest, write_manifest
from paddleformers_fc.trainer.tiers import Retention, delete_over_limit, numbered, over_limit

WEIGHTS = "model_state/rank-00000.safetensors"


def make_checkpoint(output_dir: Path, step: int) -> Path:
    """A finished checkpoint of a model without tensors, and a file that nothing opens."""
    directory = output_dir / f"checkpoint-{step}"
    directory.mkdir()
    contents = {
        "config.json": b"{}",
        "mapping.json": encode_mapping(ModelDescription({}), rules_by_name(())),
        WEIGHTS: b"{}",
    }
    written = [write_file(directory / name, raw, root=directory) for name, raw in contents.items()]
    index = encode_index(shard_columns([(WEIGHTS, [])]), written)
    files = records_of([*written, write_file(directory / INDEX_NAME, index, root=directory)])
    manifest = Manifest(
        written_by="test", step=step, consumed_samples=0, world_size=1, parallel={}, family="", files=files
    )
    write_manifest(directory, manifest)
    return directory


def left(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.iterdir())


def quiet(_: str) -> None:
    """Say nothing."""


def test_directories_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", "hf_checkpoint-3", "checkpoint-8.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in numbered(tmp_path, "checkpoint")] == ["checkpoint-9", "checkpoint-10"]


def test_the_oldest_beyond_the_limit_go(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        make_checkpoint(tmp_path, step)
    lines: list[str] = []
    delete_over_limit(tmp_path, Retention(2), None, (), lines.append)
    assert left(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    (line,) = lines
    assert "checkpoint-2" in line
    assert "save_total_limit: 2" in line


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_every_nth_step_stays_beyond_the_limit(tmp_path: Path, limit: int) -> None:
    for step in range(1, 12):
        saved = make_checkpoint(tmp_path, step)
        delete_over_limit(tmp_path, Retention(limit, 4), saved, (), quiet)
        stay = {one for one in range(1, step + 1) if one % 4 == 0 or one > step - limit}
        assert left(tmp_path) == sorted(f"checkpoint-{one}" for one in stay)


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    delete_over_limit(tmp_path, Retention(None), None, (), quiet)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_the_newest_whole_one_stays_when_a_newer_one_is_damaged(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    make_checkpoint(tmp_path, 4)
    (make_checkpoint(tmp_path, 6) / "config.json").write_bytes(b"longer than it was")
    delete_over_limit(tmp_path, Retention(1), None, (), quiet)
    assert "checkpoint-4" in left(tmp_path)


def test_where_none_is_whole_none_is_deleted(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (make_checkpoint(tmp_path, step) / "config.json").write_bytes(b"longer than it was")
    lines: list[str] = []
    delete_over_limit(tmp_path, Retention(1), None, (), lines.append)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert "checkpoint-6 is not complete, so no complete checkpoint is deleted" in lines[0]


def part_copies(checkpoint: Path) -> None:
    """Record that copies of a tied tensor differ."""
    ties = [DivergedTie(["embedding", "head"], ["model_state head on rank 1, embedding on rank 0"])]
    write_manifest(checkpoint, replace(read_manifest(checkpoint), ties=ties))


@pytest.mark.parametrize(
    ("limit", "steps", "stay"),
    [
        (1, "w d", "w d"),
        (1, "w d d", "w d"),
        (2, "w w d", "w w d"),
        (2, "w w d d", "w w d"),
        (2, "w d d d", "w d"),
        (3, "w d d", "w d d"),
        (2, "w w d w", "w w"),
        (2, "w d w w", "w w"),
        (2, "d d d", "d d"),
    ],
)
def test_checkpoints_with_diverged_ties_cost_no_whole_one(tmp_path: Path, limit: int, steps: str, stay: str) -> None:
    """Each is saved and rotated in its turn."""
    for step, kind in enumerate(steps.split(), 1):
        saved = make_checkpoint(tmp_path, step)
        if kind == "d":
            part_copies(saved)
        delete_over_limit(tmp_path, Retention(limit), saved, (), quiet)
    kinds = ["d" if read_manifest(tmp_path / name).ties else "w" for name in left(tmp_path)]
    assert kinds == stay.split()
    assert f"checkpoint-{len(steps.split())}" in left(tmp_path)


def test_a_checkpoint_with_diverged_ties_goes_although_it_is_of_an_nth_step(tmp_path: Path) -> None:
    for step in (2, 4, 5, 6):
        make_checkpoint(tmp_path, step)
    part_copies(tmp_path / "checkpoint-4")
    delete_over_limit(tmp_path, Retention(1, 2), tmp_path / "checkpoint-6", (), quiet)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-6"]


def test_the_newest_whole_one_stays_beside_the_best_and_a_newer_one_with_diverged_ties(tmp_path: Path) -> None:
    best, _, saved = [make_checkpoint(tmp_path, step) for step in (2, 4, 6)]
    part_copies(saved)
    delete_over_limit(tmp_path, Retention(1), saved, [best], quiet)
    assert left(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_checkpoint_under_another_name_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-4").rename(tmp_path / "checkpoint-10")
    delete_over_limit(tmp_path, Retention(1), tmp_path / "checkpoint-6", (), quiet)
    assert left(tmp_path) == ["checkpoint-10", "checkpoint-6"]


def test_directories_of_others_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1" / "model_state").mkdir(parents=True)
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    delete_over_limit(tmp_path, Retention(2), None, (), quiet)
    assert left(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4"]


def test_what_was_just_saved_is_whole_by_its_record_and_a_newer_one_by_its_files(tmp_path: Path) -> None:
    saved, newer = (make_checkpoint(tmp_path, step) for step in (4, 6))
    make_checkpoint(tmp_path, 2)
    (saved / WEIGHTS).unlink()  # Nothing looks at it: the save has recorded that it is there.
    (newer / WEIGHTS).unlink()
    lines: list[str] = []
    delete_over_limit(tmp_path, Retention(1), saved, (), lines.append)
    assert left(tmp_path) == ["checkpoint-4"]
    assert f"checkpoint-6 is not complete, so {saved} stays under every limit" in lines[0]


@pytest.mark.parametrize("limit", [1, 2, 3])
@given(kept=st.sets(st.integers(0, 4), max_size=2), count=st.integers(1, 5))
def test_as_many_stay_as_the_limit_allows_and_those_that_are_kept(limit: int, kept: set[int], count: int) -> None:
    paths = [Path(f"checkpoint-{index}") for index in range(count)]
    safe = frozenset(paths[index] for index in kept if index < count)
    gone = over_limit(paths, limit, safe)
    stay = [path for path in paths if path not in gone]
    assert safe <= set(stay)
    assert len(stay) == min(count, max(limit, len(safe)))
    assert gone == sorted(gone)

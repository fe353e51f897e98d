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
from paddleformers_fc.trainer.tiers import LOCAL_RETENTION, Retention, delete_over_limit, numbered, over_limit

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


def make(output_dir: Path, kind: str) -> Path:
    """The checkpoint of a step, and behind it a letter for what has happened to it."""
    step = int(kind.rstrip("dlmro"))
    if kind.endswith("o"):  # A directory of another program.
        (output_dir / f"checkpoint-{step}" / "model_state").mkdir(parents=True)
        return output_dir / f"checkpoint-{step}"
    path = make_checkpoint(output_dir, step)
    if kind.endswith("d"):  # Copies of a tied tensor have diverged.
        ties = [DivergedTie(["embedding", "head"], ["model_state head on rank 1, embedding on rank 0"])]
        write_manifest(path, replace(read_manifest(path), ties=ties))
    elif kind.endswith("l"):  # A file is longer than it was.
        (path / "config.json").write_bytes(b"longer than it was")
    elif kind.endswith("m"):  # A file is missing.
        (path / WEIGHTS).unlink()
    elif kind.endswith("r"):  # It was renamed.
        path.rename(output_dir / "checkpoint-10")
    return path


def test_directories_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", "hf_checkpoint-3", "checkpoint-8.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert [path.name for path in numbered(tmp_path, "checkpoint")] == ["checkpoint-9", "checkpoint-10"]


@pytest.mark.parametrize(
    ("retention", "before", "saved", "best", "after", "said"),
    [
        pytest.param(Retention(2), "2 4 10", 0, 0, "10 4", "checkpoint-2, which is over save_total_limit: 2", id="old"),
        pytest.param(
            *(LOCAL_RETENTION, "2 4 5", 0, 0, "4 5"),
            "checkpoint-2, which is over the limit of flex_local_dir: 2",
            id="two stay in a local tier",
        ),
        pytest.param(Retention(None), "2 4", 0, 0, "2 4", "", id="without a limit nothing goes"),
        pytest.param(Retention(1), "2 4 6l", 0, 0, "4", "", id="the newest complete one stays, and no damaged one"),
        pytest.param(
            *(Retention(1), "2l 4l 6l", 0, 0, "2 4 6"),
            "checkpoint-6 is not complete, so no complete checkpoint is deleted",
            id="where none is complete none is deleted",
        ),
        pytest.param(Retention(1, 2), "2 4d 5 6", 6, 0, "2 6", "", id="one with diverged ties goes at an nth step too"),
        pytest.param(Retention(1), "2 4 6d", 6, 2, "2 4 6", "", id="beside the best one a complete one stays"),
        pytest.param(Retention(1), "2 4r 6", 6, 0, "10 6", "", id="one under another name is not counted"),
        pytest.param(Retention(2), "1o 2 4", 0, 0, "1 2 4", "", id="directories of others are not counted"),
        pytest.param(
            *(Retention(1), "2 4m 6m", 4, 0, "4"),  # Files of 4 are not checked: its save recorded them.
            "checkpoint-4 stays under every limit",
            id="what was just saved is complete by its record",
        ),
    ],
)
def test_some_checkpoints_over_the_limit_go(
    tmp_path: Path, retention: Retention, before: str, saved: int, best: int, after: str, said: str
) -> None:
    paths = {path.name: path for path in (make(tmp_path, kind) for kind in before.split())}
    lines: list[str] = []
    needed = [paths[f"checkpoint-{best}"]] if best else []
    delete_over_limit(tmp_path, retention, paths.get(f"checkpoint-{saved}"), needed, lines.append)
    assert left(tmp_path) == [f"checkpoint-{step}" for step in after.split()]
    assert said in "\n".join(lines)


@pytest.mark.parametrize(
    ("retention", "steps", "stay"),
    [
        (Retention(1, 4), "1 2 3 4 5 6 7 8 9 10 11", "11 4 8"),
        (Retention(2, 4), "1 2 3 4 5 6 7 8 9 10 11", "10 11 4 8"),
        (Retention(3, 4), "1 2 3 4 5 6 7 8 9 10", "10 4 8 9"),
        (Retention(1), "1 2d", "1 2"),
        (Retention(1), "1 2d 3d", "1 3"),
        (Retention(2), "1 2 3d", "1 2 3"),
        (Retention(2), "1 2 3d 4d", "1 2 4"),
        (Retention(2), "1 2d 3d 4d", "1 4"),
        (Retention(3), "1 2d 3d", "1 2 3"),
        (Retention(2), "1 2 3d 4", "2 4"),
        (Retention(2), "1 2d 3 4", "3 4"),
        (Retention(2), "1d 2d 3d", "2 3"),
    ],
)
def test_diverged_ties_cost_no_complete_checkpoint(tmp_path: Path, retention: Retention, steps: str, stay: str) -> None:
    """Each is saved and rotated in its turn."""
    for kind in steps.split():
        delete_over_limit(tmp_path, retention, make(tmp_path, kind), (), lambda _: None)
    assert left(tmp_path) == [f"checkpoint-{step}" for step in stay.split()]


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

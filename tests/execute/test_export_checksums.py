"""Exports: the same bytes for every layout and writer, and what a load makes of their ``flex_checksums.json``."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, FlexError, FormatError, OptionError, PeerError, StorageError
from paddleformers_fc.execute import export_files
from paddleformers_fc.execute.digest import PieceBatch
from paddleformers_fc.execute.export import export_checkpoint, export_opened
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.save import config_bytes
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, read_checksums
from tests.cli.support import alter
from tests.execute import simulated
from tests.execute.simulated import (
    ARRAYS,
    CONFIG,
    MODEL,
    Arrays,
    attempt,
    attempt_save,
    flip,
    live,
    open_weights,
    succeed,
)
from tests.harness.limits import LIMIT
from verification.digests import stored_md5

INDEX = "model.safetensors.index.json"
TOKENIZER = {"tokenizer.json": b'{"added_tokens": [1, 2]}', "templates/chat.jinja": b"{{ messages[0] }}"}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]


def files_of(rank: int) -> dict[str, bytes]:
    """A tokenizer, and a file of the Trainer's state."""
    return {**TOKENIZER, "trainer/state.json": b"{}"} if rank == 0 else {}


def save(directory: Path, tp: int = 1, sharded: int = 1, arrays: Arrays = ARRAYS) -> Path:
    simulated.save(directory, arrays, tp, sharded, files=files_of)
    return directory


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export in several files."""
    place = tmp_path_factory.mktemp("exported")
    export_checkpoint(save(place / "checkpoint-3"), place / "hf", 4000)
    return place / "hf"


@pytest.fixture
def weights(exported: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(exported, tmp_path / "hf"))


def load(directory: Any, ranks: int = 2, verify: str = "full", expected: Arrays = ARRAYS) -> list[Any]:
    """How a load ended on every rank."""
    return attempt(directory, ranks, only="model_state", loader=open_weights(verify), expected=expected)


def refusal(directory: Path, verify: str = "full") -> FlexError:
    """The error of every rank; it names the file to delete."""
    error = load(directory, verify=verify).error(Corrupt)
    assert f"delete {directory / CHECKSUMS_NAME}" in error.next_step
    return error


def largest(directory: Path) -> Path:
    """The largest weight file."""
    return max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)


# ---- What is written.


@pytest.mark.parametrize("bound", [4000, 10**9], ids=["many", "single"])
def test_an_export_is_byte_equal_for_every_layout_and_writer_and_holds_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    swapped = tmp_path / "checkpoint-swapped"
    attempt_save(swapped, lambda rank: live(ARRAYS, 2, 1 - rank), files=files_of).results()
    sources = [swapped, *(save(tmp_path / f"checkpoint-{tp}{sharded}", tp, sharded) for tp, sharded in LAYOUTS)]
    for number, source in enumerate(sources):
        export_checkpoint(source, tmp_path / f"hf-{number}", bound)
        monkeypatch.setattr(export_files, "_CACHE_BYTES", 512)  # The others in more and smaller batches.

    def work(channel: Any) -> None:
        # As a Trainer does it, with arguments that differ between layouts.
        files = {"config.json": config_bytes(CONFIG), **TOKENIZER, "training_args.json": b'{"tp": 2}'}
        held = live(ARRAYS, 2, channel.rank)["model_state"]
        save_weights(held, MODEL, files if channel.rank == 0 else {}, tmp_path / "hf-live", bound, channel)

    succeed(2, work)
    assert (tmp_path / "hf-live/training_args.json").exists()
    assert len({(place / CHECKSUMS_NAME).read_bytes() for place in tmp_path.glob("hf-*")}) == 1
    target = tmp_path / "hf-1"
    stored = {name: path for path in target.glob("*.safetensors") for name in load_file(path)}
    assert stored.keys() == ARRAYS.keys()
    assert all(np.array_equal(load_file(path)[name], ARRAYS[name]) for name, path in stored.items())
    assert json.loads((target / "config.json").read_text()) == CONFIG
    assert (target / INDEX).exists() == (bound == 4000)
    if bound == 4000:
        index = json.loads((target / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in ARRAYS.values())
        assert index["weight_map"] == {name: path.name for name, path in stored.items()}
        assert len(set(stored.values())) > 3


@pytest.mark.parametrize(("bound", "rows"), [(4000, 0), (10**9, 0), (10**9, 200_000)], ids=["many", "single", "large"])
def test_every_exported_file_is_recorded_as_it_is_on_disk(tmp_path: Path, bound: int, rows: int) -> None:
    head = np.random.default_rng(0).standard_normal((rows, 16), dtype=np.float32)
    source = save(tmp_path / "checkpoint-3", 2, 1, {**ARRAYS, **({"lm_head.weight": head} if rows else {})})
    export_checkpoint(source, tmp_path / "hf", bound)
    checksums = read_checksums(tmp_path / "hf")
    assert checksums is not None
    found = {path.relative_to(tmp_path / "hf").as_posix() for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert found == {*checksums, CHECKSUMS_NAME}
    assert {"config.json", *TOKENIZER} < found
    assert not any(name.startswith("trainer/") for name in found)
    for name, checksum in checksums.items():
        hasher = BlockHasher()
        hasher.update((tmp_path / "hf" / name).read_bytes())
        assert checksum == hasher.file_checksum(name)
    assert (max(checksum.count for checksum in checksums.values()) > 3) == bool(rows)


@pytest.mark.parametrize("batch", [512, 4 << 20], ids=["tensors in pieces", "tensors together"])
def test_the_md5_of_an_export_is_computed_from_its_tensors_however_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(export_files, "_CACHE_BYTES", batch)
    monkeypatch.setattr(export_files, "_TRANSPOSED_BYTES", batch)
    report = paddleformers_fc.open(save(tmp_path / "checkpoint-3", 2, 1)).export(tmp_path / "hf", md5=True)
    lines = [f"{name} {hashlib.md5(ARRAYS[name].tobytes()).hexdigest()}\n" for name in sorted(ARRAYS)]
    assert report.md5 == hashlib.md5("".join(lines).encode()).hexdigest() == stored_md5(tmp_path / "hf")


def test_an_export_ends_if_a_piece_that_a_later_one_is_hashed_after_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_files, "_CACHE_BYTES", 512)
    source, read, begun = save(tmp_path / "checkpoint-3"), PieceBatch.read, threading.Event()
    threads = set(threading.enumerate())

    def fail_first(self: PieceBatch, *given: Any) -> Any:
        if self.pieces[0].is_last or self.pieces[0].begin:
            begun.set()
            return read(self, *given)
        assert begun.wait(LIMIT)  # Another thread has the next piece.
        raise StorageError("The disk is gone.")

    monkeypatch.setattr(PieceBatch, "read", fail_first)
    with pytest.raises(StorageError, match="The disk is gone"):
        paddleformers_fc.open(source).export(tmp_path / "hf", md5=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert set(threading.enumerate()) <= threads


def test_a_checkpoint_is_no_target_of_an_export_and_a_complete_model_has_no_base(tmp_path: Path) -> None:
    checkpoint, target = save(tmp_path / "checkpoint-3"), tmp_path / "hf"
    export_checkpoint(checkpoint, target)
    for place, options, what in (
        (checkpoint, {}, "The target of the export is a finished checkpoint"),
        (target, {"base": open_huggingface(target)}, "a complete model, not adapters to merge into a base"),
    ):
        with pytest.raises(OptionError, match=what):
            export_opened(open_checkpoint(checkpoint), place, **options)


# ---- What a load refuses.


@pytest.mark.parametrize(("ranks", "level"), [(1, "full"), (2, "full"), (1, "off"), (2, "size")])
def test_an_unchanged_export_loads_and_the_job_hashes_each_block_once_under_full_alone(
    exported: Path, ranks: int, level: str
) -> None:
    sizes = [path.stat().st_size for path in exported.glob("*.safetensors")]
    reports = load(exported, ranks, level).results()
    assert sum(report.bytes_hashed for report in reports) == (sum(sizes) if level == "full" else 0)


def alter_several(directory: Path) -> None:
    path = largest(directory)
    path.write_bytes(path.read_bytes()[:-1])
    for name in ("config.json", "tokenizer.json"):
        alter(directory / name)


def swap_names(directory: Path) -> None:
    """Exchange the names of two tensors of one shape."""
    query, output, other = (f"model.layers.0.self_attn.{letter}_".encode() for letter in "qo?")
    for path in directory.glob("*.safetensors"):
        raw = path.read_bytes().replace(query, other).replace(output, query)
        path.write_bytes(raw.replace(other, output))


DIFFERS = "does not match its checksum"
TENSOR, NAMES = "a bit of a tensor", "the names of two tensors"
SMALL = ("config.json", "tokenizer.json", "templates/chat.jinja", INDEX)
ALTERED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    TENSOR: (lambda place: flip(largest(place)), [f".safetensors {DIFFERS} in 1 of 1 blocks"]),
    NAMES: (swap_names, [f".safetensors {DIFFERS}"]),
    **{name: (lambda place, name=name: alter(place / name), [f"{name} {DIFFERS}"]) for name in SMALL},
    "several files": (alter_several, [".safetensors", f"config.json {DIFFERS}", f"tokenizer.json {DIFFERS}"]),
    "no configuration": (lambda place: (place / "config.json").unlink(), ["config.json is missing"]),
    "the checksums": (
        lambda place: alter(place / CHECKSUMS_NAME),
        [f"{CHECKSUMS_NAME} does not match its own"],
    ),
}


@pytest.mark.parametrize("altered", ALTERED)
def test_an_altered_file_is_rejected_by_name_on_every_rank_before_a_weight_changes(weights: Path, altered: str) -> None:
    change, lines = ALTERED[altered]
    change(weights)
    for level in ["full"] if altered in (TENSOR, NAMES) else ["full", "size"]:
        text = str(refusal(weights, level))
        assert all(line in text for line in lines), text


def test_a_file_that_is_not_needed_may_be_missing(weights: Path) -> None:
    (weights / "tokenizer.json").unlink()
    load(weights).results()


def write_files_of_other_names(directory: Path) -> None:
    """Write what a tool leaves that names its files otherwise and keeps the older ones."""
    index = json.loads((directory / INDEX).read_text())
    for path in list(directory.glob("*.safetensors")):
        save_file({name: array + 1 for name, array in load_file(path).items()}, directory / f"new-{path.name}")
    index["weight_map"] = {name: f"new-{file}" for name, file in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))


def test_weights_that_another_tool_wrote_next_to_an_export_are_refused_until_the_checksums_are_deleted(
    weights: Path,
) -> None:
    write_files_of_other_names(weights)
    refusal(weights)
    (weights / CHECKSUMS_NAME).unlink()
    load(weights, expected={name: array + 1 for name, array in ARRAYS.items()}).results()


# ---- The checksum file itself.


def test_checksums_of_version_1_are_compared_by_their_blocks(weights: Path) -> None:
    written = read_checksums(weights)
    document = json.loads((weights / CHECKSUMS_NAME).read_bytes())
    for one in document["files"]:
        one["digest"] = xxhash.xxh3_128_hexdigest((weights / one["path"]).read_bytes())
    document |= {"version": 1, "seal": xxhash.xxh3_128_hexdigest(msgspec.json.encode(document["files"]))}
    (weights / CHECKSUMS_NAME).write_text(json.dumps(document), encoding="utf-8")
    assert read_checksums(weights) == written
    load(weights).results()
    flip(largest(weights))
    assert DIFFERS in str(refusal(weights))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"format": "flex_checksums", "version": 3, "files": [], "seal": ""}', b'{"files": []}'],
)
def test_a_file_that_is_no_record_of_checksums_is_refused(weights: Path, raw: bytes) -> None:
    (weights / CHECKSUMS_NAME).write_bytes(raw)
    assert "Delete this file" in load(weights).error(FormatError).next_step


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"path": "../config.json"}, "is not a plain relative path"),
        ({"size": -1, "blocks": []}, "has the size -1"),
        ({"digest": "0" * 31}, "has a malformed checksum"),
        ({"block_bytes": 0}, "has 1 block checksums for"),
        ({"blocks": []}, "has 0 block checksums for"),
        ({"blocks": ["0" * 17]}, "has a malformed block checksum"),
    ],
)
def test_an_entry_that_no_file_has_is_refused(weights: Path, changes: dict[str, Any], fault: str) -> None:
    document = json.loads((weights / CHECKSUMS_NAME).read_bytes())
    document["files"][0] |= changes
    document["seal"] = xxhash.xxh3_128_hexdigest(msgspec.json.encode(document["files"]))
    (weights / CHECKSUMS_NAME).write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(FormatError, match=fault):
        read_checksums(weights)


def test_ranks_that_see_different_checksums_are_refused(exported: Path, tmp_path: Path) -> None:
    places = [Path(shutil.copytree(exported, tmp_path / str(rank) / "hf")) for rank in range(2)]
    (places[1] / CHECKSUMS_NAME).unlink()
    outcomes = load(places)
    assert all(isinstance(outcome, PeerError) for outcome in outcomes)
    assert "checksums" in str(outcomes[0])

"""``flex_checksums.json`` of an export: what it records, and what a load of open weights makes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import Corrupt, FlexError, FormatError, PeerError
from paddleformers_fc.execute import export_files
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.live_export import save_weights
from paddleformers_fc.execute.load import LoadReport, prepare_weights
from paddleformers_fc.execute.save import config_bytes
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.storage.checksum import BlockHasher
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME, read_checksums
from tests.cli.support import alter, flip
from tests.execute import simulated
from tests.execute.simulated import CONFIG, MODEL, Arrays, canonical, job, live, same_values, succeed

ARRAYS = canonical()
INDEX = "model.safetensors.index.json"
TOKENIZER = {"tokenizer.json": b'{"added_tokens": [1, 2]}', "templates/chat.jinja": b"{{ messages[0] }}"}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def save(directory: Path, tp: int = 1, sharded: int = 1, arrays: Arrays = ARRAYS) -> Path:
    """Save a checkpoint with a tokenizer and a file of the Trainer's state."""
    files = {**TOKENIZER, "trainer/state.json": b"{}"}
    simulated.save(directory, arrays, tp, sharded, files=lambda rank: files if rank == 0 else {})
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


def load(directory: Path, ranks: int = 1, verify: str = "full") -> list[Any]:
    """How a load ended on every rank; what it was to fill is untouched where it was refused."""

    def work(channel: Any) -> LoadReport:
        roles = {"model_state": live(ARRAYS, ranks, channel.rank, empty=True)["model_state"]}
        before = {"model_state": live(ARRAYS, ranks, channel.rank, empty=True)["model_state"]}
        try:
            report = prepare_weights(directory, roles, MODEL, channel, verify=verify).fill()
        except FlexError:
            assert same_values(roles, before)
            raise
        assert same_values(roles, {"model_state": live(ARRAYS, ranks, channel.rank)["model_state"]})
        return report

    return job(ranks, work)


def refusal(outcomes: list[Any], directory: Path) -> FlexError:
    """The error that every rank raised alike; it names the file to delete."""
    assert all(isinstance(outcome, FlexError) for outcome in outcomes), outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert f"delete {directory / CHECKSUMS_NAME}" in outcomes[0].next_step
    return outcomes[0]


def largest(directory: Path) -> Path:
    """The largest weight file."""
    return max(directory.glob("*.safetensors"), key=lambda path: path.stat().st_size)


# ---- What is written.


@pytest.mark.parametrize("bound", [4000, 10**9], ids=["many", "single"])
def test_every_exported_file_is_recorded_as_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    monkeypatch.setattr(export_files, "_CACHE_BYTES", 512)  # In more and smaller batches.
    source = save(tmp_path / "checkpoint-3", 2, 2)
    export_checkpoint(source, tmp_path / "hf", bound)
    checksums = read_checksums(tmp_path / "hf")
    assert checksums is not None
    found = {path.relative_to(tmp_path / "hf").as_posix() for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert found == {*checksums, CHECKSUMS_NAME}
    assert {"config.json", *TOKENIZER} < found
    assert (INDEX in found) == (bound == 4000)
    for name, checksum in checksums.items():
        hasher = BlockHasher()
        hasher.update((tmp_path / "hf" / name).read_bytes())
        assert checksum == hasher.file_checksum(name)


def test_blocks_of_large_files_are_recorded_in_order_for_every_writer(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((200_000, 16), dtype=np.float32)
    source = save(tmp_path / "checkpoint-3", 2, 1, {**ARRAYS, "lm_head.weight": rows})
    export_checkpoint(source, tmp_path / "hf")
    (checksum,) = [one for one in (read_checksums(tmp_path / "hf") or {}).values() if one.path == "model.safetensors"]
    hasher = BlockHasher()
    hasher.update((tmp_path / "hf/model.safetensors").read_bytes())
    assert checksum == hasher.file_checksum("model.safetensors")
    assert len(checksum.blocks) > 3


@pytest.mark.parametrize("bound", [4000, 10**9], ids=["many", "single"])
def test_checksums_are_byte_equal_across_layouts_and_writers(tmp_path: Path, bound: int) -> None:
    made = set()
    for tp, sharded in LAYOUTS:
        source = save(tmp_path / f"checkpoint-{tp}{sharded}", tp, sharded)
        target = tmp_path / f"hf-{tp}{sharded}"
        export_checkpoint(source, target, bound)
        made.add((target / CHECKSUMS_NAME).read_bytes())

    def work(channel: Any) -> None:
        # As a Trainer does it, with arguments that differ between layouts.
        files = {"config.json": config_bytes(CONFIG), **TOKENIZER, "training_args.json": b'{"tp": 2}'}
        held = live(ARRAYS, 2, channel.rank)["model_state"]
        save_weights(held, MODEL, files if channel.rank == 0 else {}, tmp_path / "live", bound, channel)

    succeed(2, work)
    assert (tmp_path / "live/training_args.json").exists()
    made.add((tmp_path / "live" / CHECKSUMS_NAME).read_bytes())
    assert len(made) == 1


@pytest.mark.parametrize("in_place", [True, False], ids=["exchanged", "file by file"])
def test_an_export_over_an_older_one_replaces_its_checksums(tmp_path: Path, in_place: bool) -> None:
    target = tmp_path / "hf"
    export_checkpoint(save(tmp_path / "checkpoint-3"), target, 4000)
    if not in_place:
        (target / "checkpoint-3").mkdir()
    export_checkpoint(save(tmp_path / "checkpoint-4", arrays=canonical(seed=1)), target)
    assert {*(read_checksums(target) or {})} == {"config.json", "model.safetensors", *TOKENIZER}
    open_huggingface(target, "full")


# ---- What a load refuses.


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_unchanged_export_loads_and_the_job_hashes_each_block_once(exported: Path, ranks: int) -> None:
    reports = load(exported, ranks)
    assert all(isinstance(report, LoadReport) for report in reports)
    sizes = [path.stat().st_size for path in exported.glob("*.safetensors")]
    assert sum(report.bytes_hashed for report in reports) == sum(sizes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flipped_bit_of_a_tensor_is_refused_before_a_weight_changes(weights: Path, ranks: int) -> None:
    path = largest(weights)
    flip(path, path.stat().st_size - 1)
    error = refusal(load(weights, ranks), weights)
    assert isinstance(error, Corrupt)
    assert [f"{path.name} does not match its checksum in 1 of 1 blocks" in line for line in error.evidence] == [True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_one_shape_that_swap_their_names_are_refused(tmp_path: Path, ranks: int) -> None:
    weights = tmp_path / "hf"
    export_checkpoint(save(tmp_path / "checkpoint-3"), weights)
    path = weights / "model.safetensors"
    swapped = (
        path.read_bytes().replace(b"0.self_attn.k_", b"0.self_attn.?_").replace(b"0.self_attn.v_", b"0.self_attn.k_")
    )
    path.write_bytes(swapped.replace(b"0.self_attn.?_", b"0.self_attn.v_"))
    keys = load_file(path)["model.layers.0.self_attn.k_proj.weight"]
    assert np.array_equal(keys, ARRAYS["model.layers.0.self_attn.v_proj.weight"])
    assert "model.safetensors does not match its checksum" in str(refusal(load(weights, ranks), weights))


@pytest.mark.parametrize("level", ["size", "full"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "templates/chat.jinja", INDEX])
def test_an_altered_small_file_is_refused_at_every_level(weights: Path, name: str, level: str) -> None:
    alter(weights / name)
    error = refusal(load(weights, 2, level), weights)
    assert isinstance(error, Corrupt)
    assert f"{name} does not match its checksum" in str(error)


def test_all_altered_files_come_in_one_error(weights: Path) -> None:
    path = largest(weights)
    path.write_bytes(path.read_bytes()[:-1])
    names = ["config.json", "tokenizer.json"]
    for name in names:
        alter(weights / name)
    error = refusal(load(weights, 2), weights)
    assert [any(line.startswith(name) for line in error.evidence) for name in (path.name, *names)] == [True] * 3


def test_a_file_that_is_not_needed_may_be_missing(weights: Path) -> None:
    (weights / "tokenizer.json").unlink()
    assert all(isinstance(outcome, LoadReport) for outcome in load(weights, 2))


def test_a_missing_configuration_is_refused_because_heads_cannot_be_compared(weights: Path) -> None:
    (weights / "config.json").unlink()
    error = refusal(load(weights, 2), weights)
    assert "config.json is missing" in error.evidence


def by_one_file(directory: Path) -> None:
    """What a tool leaves that writes one file and removes the others."""
    tensors = {name: array + 1 for path in directory.glob("*.safetensors") for name, array in load_file(path).items()}
    for path in (*directory.glob("*.safetensors"), directory / INDEX):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")


def by_files_of_other_names(directory: Path) -> None:
    """What a tool leaves that writes files of its own beside the older ones."""
    index = json.loads((directory / INDEX).read_text())
    for path in list(directory.glob("*.safetensors")):
        save_file({name: array + 1 for name, array in load_file(path).items()}, directory / f"new-{path.name}")
    index["weight_map"] = {name: f"new-{file}" for name, file in index["weight_map"].items()}
    (directory / INDEX).write_text(json.dumps(index))


def by_the_same_names(directory: Path) -> None:
    """What a tool leaves that trained on and kept the layout of the files."""
    for path in directory.glob("*.safetensors"):
        save_file({name: array + 1 for name, array in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.parametrize("written", [by_one_file, by_files_of_other_names, by_the_same_names])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_another_tool_wrote_over_an_export_are_refused_until_the_checksums_are_deleted(
    weights: Path, ranks: int, written: Callable[[Path], None]
) -> None:
    written(weights)
    refusal(load(weights, ranks), weights)
    (weights / CHECKSUMS_NAME).unlink()
    changed = {name: array + 1 for name, array in ARRAYS.items()}

    def work(channel: Any) -> bool:
        roles = {"model_state": live(ARRAYS, ranks, channel.rank, empty=True)["model_state"]}
        prepare_weights(weights, roles, MODEL, channel).fill()
        return same_values(roles, {"model_state": live(changed, ranks, channel.rank)["model_state"]})

    assert succeed(ranks, work) == [True] * ranks


@pytest.mark.parametrize("level", ["off", "size"])
def test_below_full_no_tensor_is_compared(weights: Path, level: str) -> None:
    (report,) = load(weights, 1, level)
    assert report.bytes_hashed == 0


# ---- The checksum file itself.


def test_altered_checksums_are_distinguished_from_altered_files(weights: Path) -> None:
    alter(weights / CHECKSUMS_NAME)
    error = refusal(load(weights, 2), weights)
    assert f"{CHECKSUMS_NAME} does not match its own checksum" in error.what


def test_checksums_of_version_1_are_compared_by_their_blocks(weights: Path) -> None:
    written = read_checksums(weights)
    document = json.loads((weights / CHECKSUMS_NAME).read_bytes())
    for one in document["files"]:
        one["digest"] = xxhash.xxh3_128_hexdigest((weights / one["path"]).read_bytes())
    document |= {"version": 1, "seal": xxhash.xxh3_128_hexdigest(msgspec.json.encode(document["files"]))}
    (weights / CHECKSUMS_NAME).write_text(json.dumps(document), encoding="utf-8")
    assert read_checksums(weights) == written
    assert all(isinstance(outcome, LoadReport) for outcome in load(weights, 2))
    flip(largest(weights), -1)
    assert "does not match its checksum" in str(refusal(load(weights, 2), weights))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"format": "flex_checksums", "version": 3, "files": [], "seal": ""}', b'{"files": []}'],
)
def test_a_file_that_is_no_record_of_checksums_is_refused(weights: Path, raw: bytes) -> None:
    (weights / CHECKSUMS_NAME).write_bytes(raw)
    outcomes = load(weights, 2)
    assert all(isinstance(outcome, FormatError) for outcome in outcomes)
    assert "Delete this file" in outcomes[0].next_step


def test_ranks_that_see_different_checksums_are_refused(exported: Path, tmp_path: Path) -> None:
    places = [Path(shutil.copytree(exported, tmp_path / str(rank) / "hf")) for rank in range(2)]
    (places[1] / CHECKSUMS_NAME).unlink()

    def work(channel: Any) -> LoadReport:
        roles = {"model_state": live(ARRAYS, 2, channel.rank, empty=True)["model_state"]}
        return prepare_weights(places[channel.rank], roles, MODEL, channel).fill()

    outcomes = job(2, work)
    assert all(isinstance(outcome, PeerError) for outcome in outcomes)
    assert "checksums" in str(outcomes[0])

"""A manifest is read strictly, and checking the files finds every fault in one go."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from paddleformers_fc.errors import Corrupt, FormatError, NotACheckpoint, OptionError, StorageError
from paddleformers_fc.storage import block_checksums as blocks_module, executor, manifest as manifest_module
from paddleformers_fc.storage.checksum import BlockHasher, FileChecksum, FileRecord, records_of
from paddleformers_fc.storage.files import write_file
from paddleformers_fc.storage.manifest import (
    MANIFEST_NAME,
    Manifest,
    newest_checkpoint,
    read_listed,
    read_manifest,
    verify_files,
    write_manifest,
)
from paddleformers_fc.storage.paths import REMOVED, UNFINISHED
from tests.storage.support import STATE, WEIGHTS, flip, leave, manifest_of, names_in, save, value_of

OPTIONAL = {"differing_replicas", "diverged_ties", "origin", "run"}
BLOCK = 64
RECEIPT = FileRecord("model_state/x", 5, "0" * 32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoint-500", 7)
    return tmp_path / "checkpoint-500"


def rewrite(directory: Path, **changed: object) -> None:
    """Rewrite a manifest as another writer does: with other fields, sealed as the page on the format describes."""
    document = json.loads((directory / MANIFEST_NAME).read_bytes()) | changed
    del document["seal"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    document["seal"] = xxhash.xxh3_128_hexdigest(text.encode())
    (directory / MANIFEST_NAME).write_text(json.dumps(document) + "\n")


def test_a_written_manifest_is_read_even_after_an_interrupted_attempt(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest_of([RECEIPT], step=1))
    (tmp_path / manifest_module._PARTIAL_NAME).write_text("half")
    written = manifest_of([RECEIPT])
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert names_in(tmp_path) == [MANIFEST_NAME]
    lines = (tmp_path / MANIFEST_NAME).read_text().splitlines()
    assert {' "step": 500,', '   "path": "model_state/x",'} < {*lines}, "a person can read it"


@pytest.mark.parametrize("make", ["nothing", "empty", "file"])
def test_no_manifest_is_no_checkpoint(tmp_path: Path, make: str) -> None:
    directory = tmp_path / "checkpoint-1"
    if make == "empty":
        directory.mkdir()
    if make == "file":
        directory.write_text("not a directory")
    with pytest.raises(NotACheckpoint, match=r"checkpoint-1 is not a finished checkpoint"):
        read_manifest(directory)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_an_unreadable_manifest_is_not_treated_as_missing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(path: Path, flags: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=errno.errorcode[number]):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "other", "'other' version 2, which is not supported"),
        ("version", 1, r"(?s)version 1, which is not supported.*written by a test.*supported: .*version 2"),
        ("version", 3, r"(?s)version 3, which is not supported.*written by a test"),
        ("step", "5", r"at `\$.step`"),
        ("step", True, r"at `\$.step`"),
        ("step", -1, "step is -1"),
        ("parallel", {"tensor": "2"}, r"at `\$.parallel"),
        ("aoa", {}, "unknown field `aoa`"),
        ("surprise", 1, "unknown field `surprise`"),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_refused(
    checkpoint: Path, field: str, value: object, message: str
) -> None:
    rewrite(checkpoint, **{field: value})
    with pytest.raises(FormatError, match=message):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    ("added", "written", "damaged"),
    [
        ({"ema": {"must_understand": False, "decay": 0.999, "größe": [1, {"a": None}]}}, "0.999", "0.998"),
        ({"differing_replicas": [], "diverged_ties": []}, 'replicas": []', 'replicas": ["w"]'),
    ],
    ids=["that a newer writer declares ignorable", "that another writer leaves empty"],
)
def test_an_unknown_or_an_empty_field_is_ignored_and_sealed_as_it_is_written(
    checkpoint: Path, added: dict[str, Any], written: str, damaged: str
) -> None:
    known = read_manifest(checkpoint)
    assert known.differences == []
    rewrite(checkpoint, **added)
    assert read_manifest(checkpoint) == known
    path = checkpoint / MANIFEST_NAME
    path.write_text(path.read_text().replace(written, damaged))
    with pytest.raises(Corrupt, match="does not match its own checksum"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("value", [{"must_understand": True}, {}, {"must_understand": 0}, [], None, "text"])
def test_a_field_that_a_newer_writer_does_not_declare_ignorable_is_refused(checkpoint: Path, value: object) -> None:
    rewrite(checkpoint, ema=value, note={"must_understand": False})
    with pytest.raises(FormatError, match=r"(?s)unknown fields.*unknown field `ema`") as caught:
        read_manifest(checkpoint)
    assert len(caught.value.evidence) == 1


def test_fields_of_nested_objects_are_fixed(checkpoint: Path) -> None:
    files = json.loads((checkpoint / MANIFEST_NAME).read_bytes())["files"]
    rewrite(checkpoint, files=[{**files[0], "extra": {"must_understand": False}}, *files[1:]])
    with pytest.raises(FormatError, match=r"unknown field `extra` - at `\$.files"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("field", [*(one for one in Manifest.__struct_encode_fields__ if one not in OPTIONAL), "seal"])
def test_a_field_that_is_missing_is_refused(checkpoint: Path, field: str) -> None:
    document = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    del document[field]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(document))
    with pytest.raises(FormatError, match=f"missing required field `{field}`"):
        read_manifest(checkpoint)


NO_PATHS = ("/etc/passwd", "../other/x", "a/../../x", "./x", "a//x", "a/", "", "a\\x", "a\0x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"path": path}, "not a plain relative path") for path in NO_PATHS),
        ({"path": MANIFEST_NAME}, "is a reserved name"),
        ({"size": -1}, "the size -1"),
        ({"digest": "0" * 31}, "malformed checksum"),
        ({"digest": "A" * 32}, "malformed checksum"),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_writer_and_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    bad = manifest_of([RECEIPT, msgspec.structs.replace(RECEIPT, **{"path": "model_state/y", **change})])
    with pytest.raises(FormatError, match=message):
        write_manifest(tmp_path, bad)
    assert names_in(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(manifest_module, "_faults", lambda manifest: [])
        write_manifest(tmp_path, bad)
    with pytest.raises(FormatError, match=message):
        read_manifest(tmp_path)


def test_a_file_listed_twice_and_text_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="'model_state/x' is listed twice"):
        write_manifest(tmp_path, manifest_of([RECEIPT, RECEIPT]))
    with pytest.raises(FormatError, match="cannot be written"):
        write_manifest(tmp_path, manifest_of([], family="\ud800"))


@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_link_into_a_sibling_whose_name_begins_alike_is_refused(checkpoint: Path, what: str) -> None:
    sibling = checkpoint.with_name(f"{checkpoint.name}0")
    shutil.copytree(checkpoint, sibling)
    inside = WEIGHTS if what == "file" else "model_state"
    manifest = read_manifest(checkpoint)
    (checkpoint / inside).rename(checkpoint.parent / "aside")
    (checkpoint / inside).symlink_to(sibling / inside)
    with pytest.raises(FormatError, match=r"rank-00000\.safetensors is behind a link that leaves"):
        read_listed(checkpoint, manifest, WEIGHTS)
    with pytest.raises(Corrupt, match=r"rank-00000\.safetensors is behind a link that leaves"):
        verify_files(checkpoint, manifest, "size")


def test_a_link_that_stays_inside_and_a_link_to_the_checkpoint_are_fine(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / WEIGHTS).rename(checkpoint / "real")
    (checkpoint / WEIGHTS).symlink_to(checkpoint / "real")
    (tmp_path / "latest").symlink_to(checkpoint)
    assert value_of(tmp_path / "latest") == 7


def test_a_manifest_without_its_last_byte_is_corrupt(checkpoint: Path) -> None:
    os.truncate(checkpoint / MANIFEST_NAME, (checkpoint / MANIFEST_NAME).stat().st_size - 1)
    with pytest.raises(Corrupt, match="its last byte is missing"):
        read_manifest(checkpoint)


# Damage of a checkpoint, the lowest level that finds it, and the message.
OTHER, EMA = "model_state/rank-00001.safetensors", "ema_state/rank-00000.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing file": (lambda d: (d / WEIGHTS).unlink(), "size", f"{WEIGHTS} is missing"),
    "missing directory": (lambda d: shutil.rmtree(d / "model_state"), "size", f"{WEIGHTS} is missing"),
    "file in place of a directory": (lambda d: replace(d / "model_state", ""), "size", f"{WEIGHTS} is missing"),
    "directory in place of a file": (lambda d: replace(d / STATE, None), "size", f"{STATE} is not a regular file"),
    "dangling link": (lambda d: replace(d / STATE, d / "gone"), "size", f"{STATE} is missing"),
    "truncated": (lambda d: os.truncate(d / STATE, 5), "size", f"{STATE} is truncated: 5 of 12 bytes"),
    "longer": (lambda d: replace(d / STATE, '{"value": 7} '), "size", f"{STATE} is too long: 13 bytes instead of 12"),
    "file of another save": (lambda d: replace(d / OTHER, "x"), "size", f"{OTHER} does not belong to this checkpoint"),
    "role of another save": (lambda d: replace(d / EMA, "x"), "size", f"{EMA} does not belong to this checkpoint"),
    "flipped bit": (lambda d: flip(d / WEIGHTS, 131, 0x10), "full", f"{WEIGHTS} does not match its checksum"),
    "other content of the same size": (lambda d: replace(d / STATE, '{"value": 8}'), "size", STATE),
}


def replace(path: Path, content: str | Path | None) -> None:
    """Put a file, a link or a directory in the place of what is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    elif content is None:
        path.mkdir()
    else:
        path.symlink_to(content)


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_at_its_level_and_not_below(checkpoint: Path, case: str) -> None:
    damage, found_by, message = DAMAGE[case]
    manifest = read_manifest(checkpoint)
    damage(checkpoint)
    levels = manifest_module.LEVELS
    for level in levels[levels.index(found_by) :]:
        with pytest.raises(Corrupt, match=message) as caught:
            verify_files(checkpoint, manifest, level)
        assert len(caught.value.evidence) == 1
        assert str(checkpoint) in caught.value.what
    for level in levels[: levels.index(found_by)]:
        verify_files(checkpoint, manifest, level)


def test_all_faults_come_in_one_error(checkpoint: Path) -> None:
    records = records_of([write_file(checkpoint / f"trainer/{n}", bytes(300), root=checkpoint) for n in range(3)])
    manifest = read_manifest(checkpoint)
    manifest = msgspec.structs.replace(manifest, files=[*manifest.files, *records])
    verify_files(checkpoint, manifest, "full")
    (checkpoint / "trainer/0").unlink()
    os.truncate(checkpoint / "trainer/1", 1)
    flip(checkpoint / "trainer/2", 70, 1)
    flip(checkpoint / STATE, 0, 1)
    (checkpoint / "model_state/stray.safetensors").write_bytes(b"")
    with pytest.raises(Corrupt, match="5 faults found") as caught:
        verify_files(checkpoint, manifest, "full")
    text = "\n".join(caught.value.evidence)
    for name in ("trainer/0", "trainer/1", "trainer/2", STATE, "stray.safetensors"):
        assert name in text


def refusing(suffix: str) -> Callable[..., int]:
    """An ``os.preadv`` that fails for files whose names end so."""
    original = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(suffix):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset)

    return preadv


@pytest.mark.parametrize("suffix", ["", WEIGHTS, STATE])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_full_check_that_may_not_read_does_not_pass(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, threads: int
) -> None:
    manifest = read_manifest(checkpoint)
    monkeypatch.setattr(os, "preadv", refusing(suffix))
    with pytest.raises(StorageError, match=r"(?s)Input/output error.*EIO") as caught:
        verify_files(checkpoint, manifest, "full", threads=threads)
    refused = [one.path for one in manifest.files if one.path.endswith(suffix)]
    assert all(path in str(caught.value) for path in refused)


def test_damage_counts_before_a_file_that_may_not_be_read_and_both_are_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(checkpoint / STATE, 0, 1)
    monkeypatch.setattr(os, "preadv", refusing(WEIGHTS))
    with pytest.raises(Corrupt) as caught:
        verify_files(checkpoint, read_manifest(checkpoint), "full")
    damaged, unread = caught.value.evidence
    assert damaged.startswith(f"{STATE} does not match its checksum")
    assert unread.startswith(f"{WEIGHTS} cannot be read to the end: ")


def recorded(checkpoint: Path) -> dict[str, FileChecksum]:
    """The checksums of small blocks of the file with tensors."""
    hasher = BlockHasher(BLOCK)
    hasher.update((checkpoint / WEIGHTS).read_bytes())
    return {WEIGHTS: hasher.file_checksum(WEIGHTS)}


def test_many_bad_blocks_of_a_file_are_folded(checkpoint: Path) -> None:
    blocks = recorded(checkpoint)
    for block in range(6):
        flip(checkpoint / WEIGHTS, block * BLOCK, 1)
    with pytest.raises(Corrupt, match=r"in 6 of \d+ blocks: block 0 .*block 3 \(from byte 192\), 2 more"):
        verify_files(checkpoint, read_manifest(checkpoint), "full", recorded=blocks)


def test_blocks_and_spans_larger_than_a_read_are_checked_completely(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks_module, "_READ_BYTES", 7)
    monkeypatch.setattr(executor, "IMAGE_BYTES", BLOCK // 3)
    manifest, blocks = read_manifest(checkpoint), recorded(checkpoint)
    for threads in (1, 5):
        verify_files(checkpoint, manifest, "full", threads=threads, recorded=blocks)
        for position in (0, BLOCK - 1, 4 * BLOCK, (checkpoint / WEIGHTS).stat().st_size - 1):
            flip(checkpoint / WEIGHTS, position)
            with pytest.raises(Corrupt, match=rf"block {position // BLOCK} "):
                verify_files(checkpoint, manifest, "full", threads=threads, recorded=blocks)
            flip(checkpoint / WEIGHTS, position)


def test_a_file_that_cannot_be_read_is_one_of_the_faults(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(*_: Any) -> dict[str, str]:
        os.truncate(checkpoint / WEIGHTS, 100)
        return {}

    blocks = recorded(checkpoint)
    monkeypatch.setattr(manifest_module.Surroundings, "faults", shrink)
    with pytest.raises(Corrupt, match=r"cannot be read to the end: .*ends too early"):
        verify_files(checkpoint, read_manifest(checkpoint), "full", recorded=blocks)


def test_an_unknown_level_is_refused(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match=r"(?s)level 'fast'.*off, size, full"):
        verify_files(checkpoint, read_manifest(checkpoint), "fast")


# ---- The newest checkpoint is the newest that can be resumed from.


def test_the_highest_step_wins_by_number_not_by_text(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "gone") == (None, [])
    (tmp_path / "checkpoint-1").mkdir()  # An older checkpoint is not checked.
    assert newest_checkpoint(tmp_path)[0] is None
    for step in (9, 10, 100, 11):
        save(tmp_path / f"checkpoint-{step}", step)
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-100", [])


def test_damaged_and_empty_checkpoints_are_skipped_with_the_reason(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-2" / WEIGHTS).unlink()
    os.truncate(tmp_path / "checkpoint-3" / STATE, 2)
    (tmp_path / "checkpoint-4" / MANIFEST_NAME).write_text("{}")
    (tmp_path / "checkpoint-5").mkdir()
    leave(tmp_path / "checkpoint-6", 6)
    found, skipped = newest_checkpoint(tmp_path)
    assert found == tmp_path / "checkpoint-1"
    assert [path.name for path, _ in skipped] == ["checkpoint-5", "checkpoint-4", "checkpoint-3", "checkpoint-2"]
    expected = ["has no flex_checkpoint.json", "flex_checkpoint.json is not valid", "2 of 12 bytes"]
    assert all(reason in why for (_, why), reason in zip(skipped[:3], expected, strict=True))
    assert skipped[-1][1] == f"checkpoint-2 is damaged: 1 fault found: {WEIGHTS} is missing", "without its whole path"


def test_a_checkpoint_whose_name_contradicts_its_step_is_skipped(tmp_path: Path) -> None:
    for step in (3, 4):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-3").rename(tmp_path / "checkpoint-10")
    found, ((skipped, why),) = newest_checkpoint(tmp_path)
    assert (found, skipped) == (tmp_path / "checkpoint-4", tmp_path / "checkpoint-10")
    assert why == "checkpoint-10 contains step 3: rename it to checkpoint-3 if that name is free."


@pytest.mark.parametrize(
    "name", ["checkpoint-", "checkpoint-x", "checkpoint-5.bak", "xcheckpoint-5", "checkpoint-\u0665"]
)
def test_other_names_are_not_checkpoints(tmp_path: Path, name: str) -> None:
    save(tmp_path / "checkpoint-5", 5)
    (tmp_path / "checkpoint-5").rename(tmp_path / name)
    (tmp_path / "checkpoint-9").write_text("a file")
    assert newest_checkpoint(tmp_path) == (None, [])


@pytest.mark.parametrize("state", [UNFINISHED, REMOVED])
def test_an_unfinished_or_removed_directory_never_counts_even_if_it_is_complete(tmp_path: Path, state: str) -> None:
    leave(tmp_path / "checkpoint-5", 5, state)
    assert newest_checkpoint(tmp_path) == (None, [])


def test_a_link_to_a_missing_disk_is_not_skipped_silently(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", 1)
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "unmounted" / "checkpoint-2")
    found, skipped = newest_checkpoint(tmp_path)
    assert (found, [path.name for path, _ in skipped]) == (tmp_path / "checkpoint-1", ["checkpoint-2"])


def test_a_file_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    newer = tmp_path / "checkpoint-2"
    save(newer, 2)
    manifest = read_manifest(newer)
    longer = msgspec.structs.replace(manifest.files[0], path="x" * 10_000)
    write_manifest(newer, msgspec.structs.replace(manifest, files=[*manifest.files[1:], longer]))
    found, ((_, why),) = newest_checkpoint(tmp_path)
    assert found is None
    assert "is missing" in why


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", [f"checkpoint-2/{WEIGHTS}", "private"])
def test_an_inaccessible_checkpoint_stops_the_search_and_an_inaccessible_other_file_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "private").mkdir()
    look = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if path == tmp_path / name:
            raise OSError(number, os.strerror(number), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    if name == "private":
        assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-2", [])
        return
    with pytest.raises(StorageError, match=WEIGHTS):
        newest_checkpoint(tmp_path)

"""Documents that were changed or made up: an error of ours, or their content, in bounded memory and time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import Corrupt, FormatError, MappingError
from paddleformers_fc.execute.opening import open_newest
from paddleformers_fc.formats.flex import open_flex
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.plan.sources import stored_mapping
from paddleformers_fc.storage.json_io import MAX_DEPTH, MAX_DIGITS, MAX_DOCUMENT_BYTES, parse_json
from paddleformers_fc.storage.manifest import MANIFEST_NAME, read_manifest
from paddleformers_fc.storage.pickles import MAX_PROGRAM_BYTES, read_pickle
from tests.corruption import hostile, mutations
from tests.corruption.guarantees import observe
from tests.harness.sealing import sealed
from tests.storage.test_pickles import hostile as hostile_pickles, written

SEED = int(os.environ.get("FLEX_HOSTILE_SEED", "1"))
USUAL = 150
COUNT = int(os.environ.get("FLEX_HOSTILE", USUAL))
"""Number of documents of every kind; ``make soak`` sets more."""

MOST = 320_000_000
"""Bytes that no document here may make a reader hold; the largest of them is a header of 100 MB."""


LENGTHS = {
    "a header of a million empty lists": 3_000_000,
    "a configuration of two million empty lists": 6_000_000,
    "a configuration with one key 500,000 times": 3_000_000,
}
"""Bytes of those whose text is least for what it becomes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, in a directory of its own."""
    directory = tmp_path_factory.mktemp("hostile") / "checkpoint-3"
    mutations.checkpoint(directory, 0)
    return directory


@pytest.mark.sampled
@pytest.mark.parametrize("kind", hostile.KINDS)
def test_a_document_with_changed_nodes_is_refused_or_read_and_nothing_else(kind: str, place: Path) -> None:
    seen = hostile.fuzz(kind, place, SEED, COUNT)
    assert seen.tried == COUNT
    assert seen.strange == []
    assert seen.refused > COUNT // 3
    assert seen.slowest < 10
    if COUNT == USUAL:
        kinds, spare = ", ".join(sorted(hostile.KINDS)), hostile.SPARE_BYTES >> 30
        total = USUAL * len(hostile.KINDS)
        observe("hostile", total=total, seed=SEED, each=USUAL, kinds=kinds, spare=spare)


@pytest.mark.parametrize("left_out", [hostile.DEAR, pytest.param((), marks=pytest.mark.slow)], ids=["most", "all"])
def test_a_document_that_requests_much_memory_is_refused_in_bounded_memory_and_time(
    tmp_path: Path, left_out: tuple[str, ...]
) -> None:
    seen = hostile.blasts(tmp_path, left_out)
    assert seen.keys() == hostile.BOMBS.keys() - set(left_out)
    assert {name: one.strange for name, one in seen.items() if not one.refused} == {}
    assert {name: one.peak for name, one in seen.items() if one.peak > MOST} == {}
    assert {name: one.slowest for name, one in seen.items() if one.slowest > 60} == {}
    lengths = {name: size for name, size in LENGTHS.items() if name in seen}
    assert {name: seen[name].peak / size for name, size in lengths.items() if seen[name].peak > 30 * size} == {}
    observe("bombs", most=MOST // 10**6, names="; ".join(hostile.BOMBS))


def test_pickles_are_refused_and_run_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    made = hostile_pickles(canary)
    for name, raw in made.items():
        print(name)
        with pytest.raises((FormatError, Corrupt), match=str(tmp_path / "x")):
            read_pickle(written(tmp_path / "x", raw))
        assert not canary.exists()
    observe("pickles", program=MAX_PROGRAM_BYTES >> 20, names=", ".join(made))


def test_json_is_read_within_the_documented_bounds() -> None:
    observe("json", document=MAX_DOCUMENT_BYTES >> 20, depth=MAX_DEPTH, digits=MAX_DIGITS)
    for depth in (MAX_DEPTH - 1, MAX_DEPTH):
        assert parse_json(b"[" * depth + b"]" * depth) is not None
    assert parse_json(b"9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    deep, long = b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), b"9" * (MAX_DIGITS + 1)
    twice, wide = b'{"a": 1, "b": {"c": 2, "c": 2}}', "{}".encode("utf-16")
    for raw in (deep, long, twice, wide, b"\xef\xbb\xbf{}", b'"\xff"', b"{} {}", b""):
        with pytest.raises(ValueError):
            parse_json(raw)


# ---- Paths.


@pytest.mark.parametrize("name", ["../secret.json", "/etc/passwd", "a/../../secret.json", "", "\0"])
def test_an_index_cannot_name_a_file_outside_its_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="outside its directory"):
        open_huggingface(tmp_path)


@pytest.mark.parametrize("name", ["mapping.json", "config.json"])
def test_a_file_that_the_manifest_does_not_list_is_not_read(name: str, place: Path) -> None:
    manifest, original = read_manifest(place), (place / MANIFEST_NAME).read_bytes()
    files = [one for one in manifest.files if one.path != name]
    (place / MANIFEST_NAME).write_bytes(sealed(msgspec.structs.replace(manifest, files=files)))
    try:
        with pytest.raises(Corrupt, match=f"without {name}"):
            open_flex(place)
        with pytest.raises(Corrupt, match=f"without {name}"):
            open_newest(place, ALONE)
    finally:
        (place / MANIFEST_NAME).write_bytes(original)


@pytest.mark.parametrize(("field", "value"), [("shape", [1 << 60]), ("dtype", "float16")])
def test_rules_that_declare_a_tensor_differently_from_its_file_are_refused(place: Path, field: str, value: Any) -> None:
    document = json.loads((place / "mapping.json").read_bytes())
    document["rules"]["targets"]["model.norm.weight"][field] = value
    with hostile.forged(place, "mapping.json", json.dumps(document).encode()):
        with pytest.raises(Corrupt, match=r"model\.norm\.weight: stored as float32 \[16\], declared by the rules as"):
            open_flex(place, "off")


def test_rules_that_take_a_key_for_a_value_are_refused_though_they_can_be_proved(place: Path) -> None:
    document = json.loads((place / "mapping.json").read_bytes())
    (rule, *_) = [one for one in document["rules"]["rules"] if len(one["sources"]) == 3]
    query, key, value = rule["sources"]
    rule["sources"] = [query, value, key]
    with hostile.forged(place, "mapping.json", json.dumps(document).encode()):
        with pytest.raises(MappingError, match="differs from the declaration of its family"):
            stored_mapping(open_flex(place, "off"))

"""Digests of canonical tensors: the same for every version and layout, read in pieces of any size."""

from __future__ import annotations

import hashlib
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from paddleformers_fc.execute import diff_checkpoints, export_files
from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.execute.digest import PIECE_BYTES, digest_tensors
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.families import family_for
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from verification.digests import canonical_digests
from verification.simulate_ranks import QWEN3_MOE, filled, save


def model(grid: str) -> SimulatedModel:
    return declared_model(family_for(QWEN3_MOE.config), QWEN3_MOE, parse_grid(grid), "bfloat16")


def numbers(role: str, shard: Shard) -> np.ndarray[Any, Any]:
    """Integers that depend on the name and the position; powers of beta are equal for all parameters."""
    state = split_state_name(role, shard.name, shard.global_shape)
    seed = zlib.crc32((state.suffix if state.scalar else shard.name).encode())
    found = (np.arange(math.prod(shard.global_shape), dtype=np.int64) * 31 + seed) % 251
    return found.reshape(shard.global_shape).astype(to_numpy(to_safetensors(shard.dtype)))


def saved(directory: Path, grid: str) -> Path:
    laid = model(grid)
    save(directory, [filled(laid.roles(rank), numbers) for rank in range(laid.grid.world_size)], laid)
    return directory


LAYOUTS = ("dp=1", "tp=2", "sharding=2,split=true", "tp=2,pp=2")
# Written by the version that assembled every tensor as a whole.
DIGESTS = {1: "163fc6f0a254d61d52fdd98aff552230", 2: "b0109261249fcd202a5b8311177b3834"}
EXPORTS = {1: "c9f6c259fa7ed00efd1ef68dce793ac2", 2: "bb54dfd6a13431b0ad59028e0d5f99f1"}


def degree(grid: str) -> int:
    """What decides the numbers of fused tensors: their tensor-parallel degree."""
    return 2 if "tp=2" in grid else 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {grid: saved(tmp_path_factory.mktemp("saved") / "c", grid) for grid in LAYOUTS}


def summary(directory: Path, piece_bytes: int) -> str:
    """One md5 of all digests."""
    source = canonical_source(open_checkpoint(directory))
    found = digest_tensors(source, canonical_layout(source), piece_bytes)
    lines = [f"{one.role} {one.name} {one.dtype} {one.shape} {one.md5}" for one in found]
    return hashlib.md5("\n".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("grid", LAYOUTS)
@pytest.mark.parametrize("piece_bytes", [1500, 32 << 20])
def test_digests_are_those_of_earlier_versions_whatever_the_size_of_pieces(
    grid: str, piece_bytes: int, checkpoints: dict[str, Path]
) -> None:
    assert summary(checkpoints[grid], piece_bytes) == DIGESTS[degree(grid)]


@pytest.mark.parametrize("grid", LAYOUTS)
@pytest.mark.parametrize("piece_bytes", [700, None])
def test_exported_files_are_those_of_earlier_versions_whatever_the_size_of_pieces(
    grid: str, piece_bytes: int | None, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if piece_bytes:
        monkeypatch.setattr(export_files, "_CACHE_BYTES", piece_bytes)
        monkeypatch.setattr(export_files, "_TRANSPOSED_BYTES", piece_bytes)
    names = export_checkpoint(checkpoints[grid], tmp_path / "hf", 3000).files
    files = {name: xxhash.xxh3_128_hexdigest((tmp_path / "hf" / name).read_bytes()) for name in names}
    assert hashlib.md5(repr(sorted(files.items())).encode()).hexdigest() == EXPORTS[degree(grid)]


def compared(one: Path, other: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Names of the weights that differ, compared in pieces of one size."""
    monkeypatch.setattr(diff_checkpoints, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(diff_checkpoints, "COMPARE_BYTES", piece_bytes)
    found = compare_checkpoints(open_checkpoint(one, "off"), open_checkpoint(other, "off"), "model_state")
    return {("model_state", one.name) for one in found.roles["model_state"].different}


@pytest.mark.parametrize("piece_bytes", [1000, PIECE_BYTES])
def test_equal_numbers_are_equal_in_pieces_of_any_size_under_every_layout(
    piece_bytes: int, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_checkpoint(checkpoints["tp=2"], tmp_path / "hf")
    pairs = [("dp=1", "dp=1"), ("dp=1", "sharding=2,split=true"), ("tp=2", "tp=2"), ("tp=2", "tp=2,pp=2")]
    for one, other in pairs:
        assert compared(checkpoints[one], checkpoints[other], piece_bytes, monkeypatch) == set()
    assert compared(checkpoints["tp=2,pp=2"], tmp_path / "hf", piece_bytes, monkeypatch) == set()
    assert compared(tmp_path / "hf", checkpoints["tp=2,pp=2"], piece_bytes, monkeypatch) == set()


@pytest.mark.sampled
@pytest.mark.parametrize("piece_bytes", [1000, PIECE_BYTES])
@pytest.mark.parametrize("other", ["tp=2", "tp=2,pp=2", "hf"])
def test_a_flipped_bit_at_any_place_is_found_in_the_tensor_whose_md5_it_changes(
    piece_bytes: int, other: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other == "hf":
        export_checkpoint(checkpoints["tp=2"], tmp_path / "hf")
    second = tmp_path / "hf" if other == "hf" else checkpoints[other]
    before = {one.name: one for one in canonical_digests(checkpoints["tp=2"], "off", ["model_state"])}
    shutil.copytree(checkpoints["tp=2"], tmp_path / "flipped")
    path = sorted((tmp_path / "flipped" / "model_state").glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    generator = np.random.default_rng(piece_bytes)
    for place in (begin, len(content) - 1, *generator.integers(begin, len(content), 3).tolist()):
        content[place] ^= 4
        path.write_bytes(content)
        after = canonical_digests(tmp_path / "flipped", "off", ["model_state"])
        changed = {(one.role, one.name) for one in after if one != before[one.name]}
        assert len(changed) == 1
        assert compared(tmp_path / "flipped", second, piece_bytes, monkeypatch) == changed
        content[place] ^= 4

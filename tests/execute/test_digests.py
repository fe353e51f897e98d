"""Digests and differences of canonical tensors: the same for every version and layout, read in pieces of any size."""

from __future__ import annotations

import hashlib
import math
import shutil
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
import xxhash

import paddleformers_fc
from paddleformers_fc.errors import Corrupt
from paddleformers_fc.execute import diff_checkpoints, digest, export_files
from paddleformers_fc.execute.diff_checkpoints import Deviation, DeviationSum, Tolerance, compare_checkpoints
from paddleformers_fc.execute.digest import PIECE_BYTES, digest_tensors
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.roles import split_state_name
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.sources import canonical_layout, canonical_source
from paddleformers_fc.storage.dtypes import to_numpy, to_safetensors
from tests.cli.support import seal
from tests.execute.simulated import flip
from verification.digests import canonical_digests
from verification.simulate_ranks import QWEN3_MOE, laid_out, save_model


def numbers(role: str, shard: Shard) -> np.ndarray[Any, Any]:
    """Integers that depend on the name and the position; powers of beta are equal for all parameters."""
    state = split_state_name(role, shard.name, shard.global_shape)
    seed = zlib.crc32((state.suffix if state.scalar else shard.name).encode())
    found = (np.arange(math.prod(shard.global_shape), dtype=np.int64) * 31 + seed) % 251
    return found.reshape(shard.global_shape).astype(to_numpy(to_safetensors(shard.dtype)))


LAYOUTS = ("dp=1", "tp=2", "sharding=2,split=true", "tp=2,pp=2")
# Written by a version that assembled every tensor in memory.
DIGESTS = {1: "163fc6f0a254d61d52fdd98aff552230", 2: "b0109261249fcd202a5b8311177b3834"}
EXPORTS = {1: "c9f6c259fa7ed00efd1ef68dce793ac2", 2: "bb54dfd6a13431b0ad59028e0d5f99f1"}


def degree(grid: str) -> int:
    """What decides the numbers of fused tensors: their tensor-parallel degree."""
    return 2 if "tp=2" in grid else 1


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("saved")
    return {grid: save_model(place / grid, laid_out(QWEN3_MOE, grid), numbers) for grid in LAYOUTS}


@pytest.mark.parametrize("grid", LAYOUTS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_digests_and_exports_are_those_of_earlier_versions_whatever_the_size_of_pieces(
    grid: str, is_cut: bool, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = canonical_source(open_checkpoint(checkpoints[grid]))
    found = digest_tensors(source, canonical_layout(source), 1500 if is_cut else 32 << 20)
    lines = [f"{one.role} {one.name} {one.dtype} {one.shape} {one.md5}" for one in found]
    assert hashlib.md5("\n".join(lines).encode()).hexdigest() == DIGESTS[degree(grid)]
    if is_cut:
        monkeypatch.setattr(export_files, "_CACHE_BYTES", 700)
        monkeypatch.setattr(export_files, "_TRANSPOSED_BYTES", 700)
    names = export_checkpoint(checkpoints[grid], tmp_path / "hf", 3000).files
    files = {name: xxhash.xxh3_128_hexdigest((tmp_path / "hf" / name).read_bytes()) for name in names}
    assert hashlib.md5(repr(sorted(files.items())).encode()).hexdigest() == EXPORTS[degree(grid)]


def compared(one: Path, other: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Names of the weights that differ, compared in pieces of one size."""
    monkeypatch.setattr(diff_checkpoints, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(diff_checkpoints, "COMPARE_BYTES", piece_bytes)
    found = compare_checkpoints(open_checkpoint(one, "off"), open_checkpoint(other, "off"), "model_state")
    return {("model_state", one.name) for one in found.roles["model_state"].different}


@pytest.mark.sampled
@pytest.mark.parametrize("piece_bytes", [1000, PIECE_BYTES])
@pytest.mark.parametrize(
    ("one", "other"), [("dp=1", "sharding=2,split=true"), ("tp=2", "tp=2"), ("tp=2", "tp=2,pp=2"), ("tp=2", "hf")]
)
def test_equal_checkpoints_have_no_difference_and_a_flipped_bit_at_any_place_is_one_of_its_tensor(
    piece_bytes: int,
    one: str,
    other: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if other == "hf":
        export_checkpoint(checkpoints[one], tmp_path / "hf")
    second = tmp_path / "hf" if other == "hf" else checkpoints[other]
    first = Path(shutil.copytree(checkpoints[one], tmp_path / "flipped"))
    assert compared(first, second, piece_bytes, monkeypatch) == set()
    assert compared(second, first, piece_bytes, monkeypatch) == set()
    before = {one.name: one for one in canonical_digests(first, "off", ["model_state"])}
    path = sorted((first / "model_state").glob("*.safetensors"))[0]
    size, generator = path.stat().st_size, np.random.default_rng(piece_bytes)
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for place in (begin, size - 1, *generator.integers(begin, size, 3).tolist()):
        flip(path, place)
        after = canonical_digests(first, "off", ["model_state"])
        changed = {(one.role, one.name) for one in after if one != before[one.name]}
        assert len(changed) == 1
        assert compared(first, second, piece_bytes, monkeypatch) == changed
        flip(path, place)


# ---- Figures of a difference: absolute, in representable numbers, and where it begins.


FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def deviation(one: object, other: object, pieces: int = 1) -> Deviation:
    """The figures of two arrays, added in pieces."""
    left, right = np.asarray(one), np.asarray(other)
    comparison = DeviationSum(left.shape)
    for a, b in zip(np.array_split(left.ravel(), pieces), np.array_split(right.ravel(), pieces), strict=True):
        comparison.add(a, b)
    return comparison.result()


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: np.dtype(kind).name)
def test_neighbours_are_one_ulp_apart_over_the_whole_range(kind: type) -> None:
    width = np.dtype(kind).itemsize
    bits = np.unique(np.random.default_rng(3).integers(0, 1 << (8 * width - 1), 2000, f"u{width}"))
    pairs = np.stack([bits[:-1], bits[:-1] + bits.dtype.type(1)])
    one, other = pairs.view(np.dtype(kind))
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(one.astype(np.float64)) & np.isfinite(other.astype(np.float64))
    for sign in (1, -1):
        found = deviation(one[finite] * sign, other[finite] * sign)
        assert (found.ulp, found.elements) == (1, int(finite.sum()))


def test_ulps_are_counted_across_zero() -> None:
    tiny = np.float32(1e-45)
    assert deviation(np.array([tiny]), np.array([-tiny])).ulp == 3
    assert deviation(np.array([np.float32(0)]), np.array([-np.float32(0)])).ulp == 1


def test_the_largest_of_all_pieces_and_the_first_index_of_all_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_checkpoints, "_CHUNK", 7)
    one = np.arange(60, dtype=np.float32).reshape(5, 12)
    other = one.copy()
    other[1, 3] += 0.5
    other[4, 2] -= 3
    for pieces in (1, 2, 9):
        found = deviation(one, other, pieces)
        assert (found.elements, found.absolute, found.first) == (2, 3.0, (1, 3))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        *(([1.0, 2.0], [1.5, number], (2, None, (0,))) for number in (np.nan, np.inf, -np.inf)),
        pytest.param([np.nan, 1.0], [np.nan, 2.0], (1, 1.0, (1,)), id="equal NaNs"),
        pytest.param(np.int64(7), np.int64(3), (1, 4.0, ()), id="integers and scalars"),
    ],
)
def test_a_difference_has_an_absolute_value_where_numbers_are_finite(one: Any, other: Any, expected: Any) -> None:
    found = deviation(one, other)
    assert (found.elements, found.absolute, found.first) == expected
    assert found.ulp is None or not isinstance(one, np.int64)


# ---- Tolerances.


def edge_values(kind: type, count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two arrays of a dtype: every pair of edge values, and pairs of random bits and close numbers."""
    limits = ml_dtypes.finfo(kind)
    ends = [0.0, 1.0, limits.max, limits.tiny, limits.smallest_subnormal, limits.tiny / 2, np.inf]
    edges = np.array([*ends, *(-one for one in map(float, ends)), np.nan], np.float64).astype(kind)
    random = np.random.default_rng(11)
    width = np.dtype(kind).itemsize
    bits = random.integers(0, 1 << (8 * width), count, f"u{width}", endpoint=False).view(kind)
    close = random.standard_normal(count)
    one = np.concatenate([np.repeat(edges, edges.size), bits, close.astype(kind)])
    moved = close * (1 + random.uniform(-0.02, 0.02, count)) + random.uniform(-0.02, 0.02, count)
    other = np.concatenate([np.tile(edges, edges.size), np.roll(bits, 1), moved.astype(kind)])
    return one, other


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda kind: np.dtype(kind).name)
@pytest.mark.parametrize(("atol", "rtol"), [(0.01, 0), (0, 0.01), (0.01, 0.01), (1e-40, 0), (3, 1), (1e38, 0), (0, 2)])
def test_numbers_are_within_a_tolerance_where_numpy_finds_them_close(kind: type, atol: float, rtol: float) -> None:
    one, other = edge_values(kind, 3000)
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = one.astype(np.float64), other.astype(np.float64)
        expected = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    assert 0 < expected.sum() < expected.size
    assert np.array_equal(Tolerance(atol, rtol).accepts(one, other), expected)
    summed = DeviationSum(one.shape, Tolerance(atol, rtol))
    summed.add(one, other)
    assert summed.result().elements == (~expected).sum()
    assert summed.result().first == (int(np.flatnonzero(~expected)[0]),)


def test_the_values_of_another_nan_and_of_a_negative_zero_are_equal_under_a_tolerance_and_not_without() -> None:
    one = np.array([0x7FC00000, 0, 5], np.uint32).view(np.float32)
    other = np.array([0xFFC00001, 1 << 31, 5], np.uint32).view(np.float32)
    for tolerance, elements in ((Tolerance(), 2), (Tolerance(1e-300), 0), (Tolerance(0, 1e-300), 0)):
        summed = DeviationSum(one.shape, tolerance)
        summed.add(one, other)
        assert (summed.elements, summed.is_bitwise_equal) == (elements, False)


INTEGERS = [np.int8, np.uint8, np.int32, np.int64, np.uint64, np.bool_]


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: np.dtype(kind).name)
@pytest.mark.parametrize(("atol", "rtol"), [(1, 0), (0, 0.1), (0.5, 0.25), (2.0**53, 0), (1, 1 - 2.0**-53), (0, 1e308)])
def test_integers_are_compared_with_a_tolerance_in_exact_arithmetic(kind: type, atol: float, rtol: float) -> None:
    most = 1 if kind is np.bool_ else int(np.iinfo(kind).max)
    least = 0 if kind is np.bool_ else int(np.iinfo(kind).min)
    near = [*(1 << 53, (1 << 53) + 1, (1 << 53) + 2, (1 << 54) + 3), *range(-40, 41, 5), 1, 2, 3]
    values = sorted(one for one in {least, least + 1, most, most - 1, *near} if least <= one <= most)
    one, other = (np.array(found, kind) for found in zip(*((a, b) for a in values for b in values), strict=True))
    expected = [
        abs(a - b) <= Fraction(atol) + Fraction(rtol) * abs(b)
        for a, b in zip(map(int, one.tolist()), map(int, other.tolist()), strict=True)
    ]
    assert Tolerance(atol, rtol).accepts(one, other).tolist() == expected


# ---- Weights of 16 bits and their master weights.


NUMBERS = np.random.RandomState(0).randn(96, 8).astype(np.float32)
NUMBERS[0] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 1e30, 1 + 2**-8]
NUMBERS[90, 3] = 12345.0
"""Among them numbers that float16 cannot hold, and a tie."""


def saved_rounded(directory: Path, dtype: str) -> Path:
    masters = {"one.weight": NUMBERS, "two.weight": -NUMBERS[:8]}
    weights = {name: paddle.to_tensor(values).astype(dtype) for name, values in masters.items()}
    states = {f"{name}.w_0": paddle.to_tensor(values) for name, values in masters.items()}
    paddleformers_fc.save(directory, {**weights, **states, "three.weight": paddle.zeros([2])})
    return directory


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_a_weight_that_is_not_its_rounded_master_weight_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", piece_bytes)
    checkpoint = saved_rounded(tmp_path / "checkpoint-1", dtype)
    detail = paddleformers_fc.open(checkpoint).verify().checks[-1].detail
    assert detail == "2 weights compared with master weights"
    (file,) = (checkpoint / "model_state").iterdir()
    raw, element = file.read_bytes(), paddle.to_tensor(NUMBERS[90, 3]).astype(dtype).numpy().tobytes()
    assert raw.count(element) == 1
    flip(file, raw.index(element))
    seal(checkpoint)
    with pytest.raises(Corrupt, match="is not the rounded master weight") as raised:
        paddleformers_fc.open(checkpoint).verify()
    assert raised.value.evidence == ("one.weight",)
    assert paddleformers_fc.open(checkpoint).verify("size").passed

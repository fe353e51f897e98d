"""FP8 open weights with block scales: the products of Transformers, whatever range of them is read."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.execute.digest import weights_md5
from paddleformers_fc.execute.load import prepare_weights
from paddleformers_fc.execute.output_directory import inspect_directory
from paddleformers_fc.execute.reading import read_parts
from paddleformers_fc.formats.fp8_weights import in_float32
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.mapping.boxes import Box, whole
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.dtypes import ScaledFile
from paddleformers_fc.storage.executor import ReadPool
from paddleformers_fc.storage.identities import identities_of, stored_identities
from paddleformers_fc.storage.safetensors import read_header
from tests.families.spaces import BY_NAME, model_of, settings, spaces

BLOCK = (16, 8)
DECLARED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantized(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return numbers of 8 bits and a scale per block, as DeepSeek's own script computes them."""
    high, wide = BLOCK
    rows, columns = array.shape
    scales = np.empty((-(-rows // high), -(-columns // wide)), np.float32)
    found = np.empty(array.shape, ml_dtypes.float8_e4m3fn)
    for row, column in np.ndindex(*scales.shape):
        part = np.s_[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        scales[row, column] = np.abs(array[part]).max() / 448
        found[part] = (array[part] / scales[row, column]).astype(ml_dtypes.float8_e4m3fn)
    return found, scales


def expected(numbers: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the products in float32; the same expression as in Transformers where blocks are whole."""
    rows, columns = numbers.shape
    every = np.repeat(np.repeat(scales, BLOCK[0], 0)[:rows], BLOCK[1], 1)[:, :columns]
    return numbers.astype(np.float32) * every


def canonical() -> dict[str, np.ndarray[Any, Any]]:
    """Return random open weights of a small DeepSeek V3 whose last blocks are partly empty."""
    family = BY_NAME["deepseek_v3"]
    _, stored, _ = spaces(family, settings(family))
    random = np.random.default_rng(7)
    return {name: random.standard_normal(one.shape).astype(np.float32) for name, one in stored.items()}


def is_quantized(name: str) -> bool:
    return name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))


def write(directory: Path, declared: dict[str, Any] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Write two files, scales in the other one than their weights, and return the weights as float32."""
    family, files, wanted = BY_NAME["deepseek_v3"], [{}, {}], {}  # type: ignore[var-annotated]
    for number, (name, array) in enumerate(canonical().items()):
        if is_quantized(name):
            numbers, scales = quantized(array)
            files[number % 2][name], files[1 - number % 2][f"{name}_scale_inv"] = numbers, scales
            wanted[name] = expected(numbers, scales)
        else:
            files[number % 2][name] = array.astype(ml_dtypes.bfloat16)
            wanted[name] = files[number % 2][name].astype(np.float32)
    index = {}
    for number, tensors in enumerate(files, 1):
        path = directory / f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, path)
        index |= dict.fromkeys(tensors, path.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {**settings(family), "model_type": "deepseek_v3", "torch_dtype": "bfloat16"}
    config["quantization_config"] = DECLARED if declared is None else declared
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return wanted


def load(directory: Path, dtype: str, part: tuple[int, int] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Load into a live model of a dtype, or into one half of its matrices along an axis, and return its tensors."""
    family = BY_NAME["deepseek_v3"]
    config = settings(family)
    rules, _, _ = spaces(family, config)
    weights = {key: live(key, spec.shape, dtype, part) for key, spec in rules.targets.items()}
    prepare_weights(directory, {"model_state": weights}, model_of(config), LocalChannel()).fill()
    return {key: one.local_tensor.astype("float32").numpy() for key, one in weights.items()}


def live(key: str, shape: tuple[int, ...], dtype: str, part: tuple[int, int] | None) -> SimpleNamespace:
    axis, half = part or (0, 0)
    divided = part is not None and len(shape) == 2
    local = tuple(length // 2 if divided and number == axis else length for number, length in enumerate(shape))
    return SimpleNamespace(
        key=key,
        local_tensor=paddle.zeros(local, dtype),
        local_shape=local,
        global_shape=shape,
        global_offset=tuple(half * one if one != length else 0 for one, length in zip(local, shape, strict=True)),
        is_flattened=False,
        flattened_range=None,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_equals_the_load_of_the_products_in_float32(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "fp8").mkdir()
    (tmp_path / "plain").mkdir()
    save_file(write(tmp_path / "fp8"), tmp_path / "plain" / "model.safetensors")
    found, wanted = load(tmp_path / "fp8", dtype), load(tmp_path / "plain", dtype)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_and_columns_of_two_tensor_parallel_ranks_are_halves_of_the_whole(tmp_path: Path, axis: int) -> None:
    write(tmp_path)
    whole, halves = load(tmp_path, "bfloat16"), [load(tmp_path, "bfloat16", (axis, half)) for half in (0, 1)]
    for name, wanted in whole.items():
        found = halves[0][name] if wanted.ndim != 2 else np.concatenate([one[name] for one in halves], axis)
        assert found.tobytes() == wanted.tobytes(), name


def test_the_catalog_has_products_in_the_declared_dtype_and_no_scales(tmp_path: Path) -> None:
    wanted = write(tmp_path)
    opened = open_huggingface(tmp_path)
    tensors = opened.catalog.roles["model_state"]
    assert tensors.keys() == wanted.keys()
    assert {one.dtype for one in tensors.values()} == {"bfloat16"}
    assert "quantization_config" not in opened.config
    assert opened.files == {f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)}
    assert identities_of(tmp_path / name for name in opened.files) == stored_identities(opened.catalog.identities)


def test_scales_that_are_replaced_after_opening_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    opened = open_huggingface(tmp_path)
    tensor = next(one for name, one in opened.catalog.roles["model_state"].items() if is_quantized(name))
    ((file, begin),) = tensor.offsets
    produced = opened.catalog.identities[tmp_path / file]
    assert isinstance(produced, ScaledFile)
    scales = produced.matrices[0].scales_file
    copy = scales.with_name("copy")
    copy.write_bytes(scales.read_bytes())
    copy.rename(scales)
    part = StoredPart(file, begin, tensor.shape, whole(tensor.shape), tensor.dtype)
    with ReadPool(identities=opened.catalog.identities) as pool, pytest.raises(Corrupt, match=scales.name):
        read_parts(pool, tmp_path, [part])


def test_a_conversion_and_the_md5_have_the_products_and_no_declaration(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    wanted = {name: one.astype(ml_dtypes.bfloat16) for name, one in write(tmp_path / "fp8").items()}
    paddleformers_fc.open(tmp_path / "fp8").convert(tmp_path / "flex")
    paddleformers_fc.open(tmp_path / "flex").export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    digest = hashlib.md5()
    for name in sorted(wanted):
        digest.update(name.encode() + wanted[name].tobytes())
    assert weights_md5(tmp_path / "fp8") == digest.hexdigest()


@pytest.mark.parametrize(
    ("dtype", "md5"),
    [("float32", "bc8f5573341a7b831b1a8e73a6f4a934"), ("bfloat16", "582393250c2c574a99ba1d3519dac9bf")],
)
def test_the_products_are_those_of_transformers(tmp_path: Path, dtype: str, md5: str) -> None:
    """The sums are those of ``Fp8Dequantize.convert`` of Transformers 5.3 on torch, and of its cast to bfloat16."""
    random = np.random.default_rng(11)
    bits = random.integers(0, 0x7F, (64, 40), np.uint8) | (random.integers(0, 2, (64, 40), np.uint8) << 7)
    scales = random.random((4, 5), np.float32)
    tensors = {"a.weight": bits.view(ml_dtypes.float8_e4m3fn), "a.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": dtype, "quantization_config": DECLARED}))
    (array,) = (one for _, one in open_and_read(tmp_path))
    assert hashlib.md5(array).hexdigest() == md5


def open_and_read(directory: Path) -> list[tuple[str, bytes]]:
    """Return the bytes of all tensors as the catalog lists them."""
    opened = open_huggingface(directory)
    found = []
    with ReadPool(identities=opened.catalog.identities) as pool:
        for name, tensor in opened.catalog.roles["model_state"].items():
            ((file, begin),) = tensor.offsets
            part = StoredPart(file, begin, tensor.shape, whole(tensor.shape), tensor.dtype)
            (array,), _ = read_parts(pool, directory, [part])
            found.append((name, array.tobytes()))
    return found


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_every_box_has_the_bytes_of_the_whole(tmp_path: Path, kind: str) -> None:
    wanted = write(tmp_path)
    opened = open_huggingface(tmp_path)
    catalog = in_float32(opened.catalog) if kind == "float32" else opened.catalog
    dtype = np.dtype(np.float32 if kind == "float32" else ml_dtypes.bfloat16)
    names = sorted(filter(is_quantized, catalog.roles["model_state"]))
    random = np.random.default_rng(3)
    with ReadPool(identities=catalog.identities) as pool:
        for _ in range(200):
            tensor = catalog.roles["model_state"][names[random.integers(len(names))]]
            ((file, begin),) = tensor.offsets
            lows, highs = zip(*(sorted(random.integers(0, size + 1, 2).tolist()) for size in tensor.shape), strict=True)
            (array,), _ = read_parts(pool, tmp_path, [StoredPart(file, begin, tensor.shape, Box(lows, highs), kind)])
            part = wanted[tensor.name].astype(dtype)[tuple(map(slice, lows, highs))]
            assert array.tobytes() == part.tobytes()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method: 'gptq'"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme: 'static'"),
        ({"weight_block_size": None}, "weight_block_size: None"),
        ({"weight_block_size": [128, 128]}, r"scale_inv: stored float32 \[\d+, \d+\], wanted float32 \[1, 1\]"),
    ],
)
def test_other_quantizations_and_scales_of_a_wrong_shape_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    write(tmp_path, {**DECLARED, **changed})
    with pytest.raises(FormatError) as refused:
        open_huggingface(tmp_path)
    assert any(re.search(named, line) for line in refused.value.evidence)


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_inspect_lists_numbers_and_scales_of_any_quantization_as_stored(tmp_path: Path, method: str) -> None:
    write(tmp_path, {**DECLARED, "quant_method": method})
    found = inspect_directory(tmp_path, "*.0.mlp.down_proj.*")
    assert [(one.name.rsplit(".", 1)[1], one.dtype) for one in found.tensors or ()] == [
        ("weight", "float8_e4m3fn"),
        ("weight_scale_inv", "float32"),
    ]
    assert found.roles["model_state"].files == found.files == 2


def test_a_changed_scale_is_a_difference_of_its_weights(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    path = next(one for one in (tmp_path / "other").glob("*.safetensors") if scale in read_header(one).tensors)
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors[scale].begin + 2] ^= 0x40
    path.write_bytes(data)
    opened = [paddleformers_fc.open(tmp_path / name) for name in ("one", "other")]
    different = opened[0].diff(opened[1]).roles["model_state"].different
    assert [one.name for one in different] == [scale.removesuffix("_scale_inv")]


def test_missing_scales_are_refused_by_name(tmp_path: Path) -> None:
    numbers, _ = quantized(np.ones((16, 8), np.float32))
    save_file({"model.a.weight": numbers}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": DECLARED}))
    with pytest.raises(FormatError) as refused:
        open_huggingface(tmp_path)
    assert refused.value.evidence == ("model.a.weight: model.a.weight_scale_inv is missing",)

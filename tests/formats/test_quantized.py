"""Open weights of 8 and 4 bits with scales: the products of Transformers, whatever range of them is read."""

from __future__ import annotations

import hashlib
import json
import math
import re
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.distributed.channel import LocalChannel
from paddleformers_fc.errors import Corrupt, FormatError
from paddleformers_fc.execute.load import prepare_weights
from paddleformers_fc.execute.output_directory import inspect_directory
from paddleformers_fc.execute.reading import read_parts
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.mapping.boxes import whole
from paddleformers_fc.plan.items import StoredPart
from paddleformers_fc.storage.dtypes import ScaledFile
from paddleformers_fc.storage.executor import ReadPool
from paddleformers_fc.storage.safetensors import read_header
from tests.families.spaces import BY_NAME, live_weights, model_of, settings, spaces
from tests.mapping.numbers import moved
from verification.digests import stored_md5

BLOCK = (16, 8)
FP8 = ml_dtypes.float8_e4m3fn
POWER = ml_dtypes.float8_e8m0fnu
FOUR_BITS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ORACLE = np.load(Path(__file__).with_name("quantized.npz"))
"""Made by ``tools/quantized_fixtures.py``."""
DECLARED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


HEADERS: dict[str, Any] = json.loads(Path(__file__).with_name("published_weights.json").read_text())
"""The configuration, and the dtypes and shapes of tensors, of published weights by their name on the hub."""
EXCLUDED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@dataclass(frozen=True)
class Published:
    """How weights are published.

    Args:
        family: of the model.
        config: what ``config.json`` says beside it.
        scales: ending of the names of scales, in place of ``weight``, and their type.
        experts: type of the experts' numbers.
    """

    family: str
    config: dict[str, Any]
    scales: tuple[str, type] = ("weight_scale_inv", np.float32)
    experts: str = "fp8"


_POWERS = {"quantization_config": {**DECLARED, "scale_fmt": "ue8m0"}}
PUBLISHED = {
    "deepseek_v3": Published("deepseek_v3", {"quantization_config": DECLARED}),
    "deepseek_v32": Published("deepseek_v32", _POWERS),
    "deepseek_v4": Published("deepseek_v4", {"expert_dtype": "fp4", **_POWERS}, ("scale", POWER), "fp4"),
    "deepseek_v4_base": Published("deepseek_v4", {"expert_dtype": "fp8", **_POWERS}, ("scale", np.float32)),
    "gpt_oss": Published(
        "gpt_oss", {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": EXCLUDED}}
    ),
}


def quantized(array: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return numbers of 8 bits and a scale per block, as DeepSeek's own script computes them."""
    high, wide = BLOCK
    rows, columns = array.shape
    scales = np.empty((-(-rows // high), -(-columns // wide)), np.float32)
    found = np.empty(array.shape, FP8)
    for row, column in np.ndindex(*scales.shape):
        part = np.s_[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
        scales[row, column] = np.abs(array[part]).max() / 448
        found[part] = (array[part] / scales[row, column]).astype(FP8)
    return found, scales


def expected(numbers: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the products in float32; the same expression as in Transformers where blocks are whole."""
    rows, columns = numbers.shape
    every = np.repeat(np.repeat(scales, BLOCK[0], 0)[:rows], BLOCK[1], 1)[:, :columns]
    return numbers.astype(np.float32) * every.astype(np.float32)


def four_bits(shape: tuple[int, ...], random: np.random.Generator) -> tuple[np.ndarray[Any, Any], ...]:
    """Return bytes of two numbers, powers of two for 32 columns of a row, and the products."""
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    scales = random.integers(117, 137, (*shape[:-1], -(-shape[-1] // 32)), np.uint8)
    numbers = FOUR_BITS[np.stack([data & 15, data >> 4], -1)].reshape(shape)
    return data, scales, numbers * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, -1)[..., : shape[-1]]


def canonical(family: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return random open weights of a small model whose last blocks are partly empty."""
    _, stored, _ = spaces(BY_NAME[family], settings(BY_NAME[family]))
    random = np.random.default_rng(7)
    return {name: random.standard_normal(one.shape).astype(np.float32) for name, one in stored.items()}


QUANTIZED = {
    "deepseek": r"(?<!eh)(?<!weights)(_proj|mqa|indexer\.w[qk](_b)?|attn\.w[^.]*|experts.*\.w\d)\.weight$",
    "gpt_oss": r"experts\.\w*_proj$",
}


def is_quantized(name: str, family: str = "deepseek") -> bool:
    return re.search(QUANTIZED.get(family, QUANTIZED["deepseek"]), name) is not None


def stored_as(
    how: Published, name: str, array: np.ndarray[Any, Any], random: np.random.Generator
) -> tuple[dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return the tensors that files have for a weight, its scales last, and the weight in float32."""
    if not is_quantized(name, how.family):
        stored = array.astype(np.int64 if name.endswith("tid2eid") else ml_dtypes.bfloat16)
        return {name: stored}, stored.astype(np.float32)
    if how.family == "gpt_oss":
        experts, columns, rows = array.shape
        data, scales, products = four_bits((experts, rows, columns), random)
        groups = data.reshape(experts, rows, columns // 32, 16)
        return {f"{name}_blocks": groups, f"{name}_scales": scales}, products.transpose(0, 2, 1)
    scales_name = name.removesuffix("weight") + how.scales[0]
    if how.experts == "fp4" and ".experts." in name:
        data, scales, products = four_bits(array.shape, random)
        return {name: data.view(np.int8), scales_name: scales.view(POWER)}, products
    numbers, scales = quantized(array)
    scales = scales.astype(how.scales[1])
    return {name: numbers, scales_name: scales}, expected(numbers, scales)


def write(directory: Path, published: str = "deepseek_v3", **declared: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Write two files, scales in the other one than their weights, and return the weights as float32."""
    how, files, wanted = PUBLISHED[published], [{}, {}], {}  # type: ignore[var-annotated]
    random = np.random.default_rng(5)
    directory.mkdir(exist_ok=True)
    for number, (name, array) in enumerate(canonical(how.family).items()):
        stored, wanted[name] = stored_as(how, name, array, random)
        for other, (key, value) in enumerate(stored.items()):
            files[(number + other) % 2][key] = value
    index = {}
    for number, tensors in enumerate(files, 1):
        path = directory / f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, path)
        index |= dict.fromkeys(tensors, path.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {**settings(BY_NAME[how.family]), "model_type": how.family, "torch_dtype": "bfloat16", **how.config}
    config["quantization_config"] = {**config["quantization_config"], **declared}
    (directory / "config.json").write_text(json.dumps(config, default=str))
    return wanted


def load(directory: Path, dtype: str, family: str) -> dict[str, np.ndarray[Any, Any]]:
    """Load into a live model of a dtype, and return its tensors."""
    config = settings(BY_NAME[family])
    rules, _, _ = spaces(BY_NAME[family], config)
    weights = live_weights(rules, dtype=dtype, integers=("tid2eid",))
    prepare_weights(directory, {"model_state": weights}, model_of(config), LocalChannel()).fill()
    return {key: one.local_tensor.astype("float32").numpy() for key, one in weights.items()}


@pytest.mark.parametrize("published", PUBLISHED)
def test_a_load_fills_a_model_with_the_products_in_float32(tmp_path: Path, published: str) -> None:
    weights, family = write(tmp_path, published), PUBLISHED[published].family
    rules, _, _ = spaces(BY_NAME[family], settings(BY_NAME[family]))
    products = {name: one.astype(np.float32) for name, one in moved(rules.mapping(), weights).items()}
    for dtype in ("float32", "bfloat16"):
        found = load(tmp_path, dtype, family)
        assert found.keys() == products.keys()
        for name, one in products.items():
            wanted = one if name.endswith("tid2eid") else one.astype(dtype).astype(np.float32)
            assert found[name].tobytes() == wanted.tobytes(), name


def test_scales_that_are_replaced_after_opening_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    opened = open_huggingface(tmp_path)
    tensor = next(one for name, one in opened.catalog.roles["model_state"].items() if is_quantized(name))
    ((file, begin),) = tensor.offsets
    produced = opened.catalog.identities[tmp_path / file]
    assert isinstance(produced, ScaledFile)
    scales = produced.tensors[0].scales_file
    copy = scales.with_name("copy")
    copy.write_bytes(scales.read_bytes())
    copy.rename(scales)
    part = StoredPart(file, begin, tensor.shape, whole(tensor.shape), tensor.dtype)
    with ReadPool(identities=opened.catalog.identities) as pool, pytest.raises(Corrupt, match=scales.name):
        read_parts(pool, tmp_path, [part])


def test_a_conversion_and_the_md5_have_the_products_and_no_declaration(tmp_path: Path) -> None:
    wanted = {name: one.astype(ml_dtypes.bfloat16) for name, one in write(tmp_path / "fp8").items()}
    paddleformers_fc.open(tmp_path / "fp8").convert(tmp_path / "flex")
    paddleformers_fc.open(tmp_path / "flex").export(tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    lines = [f"{name} {hashlib.md5(wanted[name].tobytes()).hexdigest()}\n" for name in sorted(wanted)]
    assert stored_md5(tmp_path / "fp8") == hashlib.md5("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("case", "declared"),
    [
        ("fp8", {"quantization_config": DECLARED}),
        ("fp8_powers", _POWERS),
        ("fp4", {"expert_dtype": "fp4", **_POWERS}),
        ("mxfp4", PUBLISHED["gpt_oss"].config),
    ],
)
def test_the_products_are_those_of_transformers(
    tmp_path: Path, case: str, declared: dict[str, Any], dtype: str
) -> None:
    numbers, scales = (ORACLE[f"{case}/{one}"] for one in ("numbers", "scales"))
    tensors = {
        "fp8": {"a.weight": numbers.view(FP8), "a.weight_scale_inv": scales},
        "fp8_powers": {"a.weight": numbers.view(FP8), "a.weight_scale_inv": scales.view(POWER)},
        "fp4": {"a.weight": numbers.view(np.int8), "a.scale": scales.view(POWER)},
        "mxfp4": {"a_blocks": numbers, "a_scales": scales},
    }
    save_file(tensors[case], tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": dtype, **declared}))
    ((_, found),) = open_and_read(tmp_path)
    wanted = ORACLE[f"{case}/{dtype}"]
    assert len(np.unique(wanted)) > 100
    assert found == wanted.tobytes()


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


@pytest.mark.parametrize(
    ("published", "changed", "named"),
    [
        ("deepseek_v3", {"quant_method": "gptq"}, "quant_method: 'gptq'"),
        ("deepseek_v3", {"fmt": "e5m2"}, "fmt: 'e5m2'"),
        ("deepseek_v3", {"activation_scheme": "static"}, "activation_scheme: 'static'"),
        ("deepseek_v3", {"weight_block_size": None}, "weight_block_size: None"),
        ("deepseek_v3", {"scale_fmt": "e4m3"}, "scale_fmt: 'e4m3'"),
        ("deepseek_v3", {"weight_block_size": [128, 128]}, r"scale_inv has shape \[\d+, \d+\], expected \[1, 1\]"),
        ("deepseek_v3", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: 'lm_head' is not a list"),
        (
            "deepseek_v3",
            {"modules_to_not_convert": ["model.layers.0.self_attn"]},
            "model.layers.0.self_attn.o_proj.weight: quantized, although modules_to_not_convert contains",
        ),
        ("deepseek_v3", {"modules_to_not_convert": ["a*"] * 65}, "modules_to_not_convert: more than 64 names with"),
        ("deepseek_v3", {"quant_method": "mxfp4"}, "_scale_inv: scales without uint8"),
        ("deepseek_v4", {"expert_dtype": "nvfp4"}, "expert_dtype: 'nvfp4'"),
        ("deepseek_v4", {"expert_dtype": "fp8"}, r"w1.scale: scales without float8_e4m3fn weights"),
        ("deepseek_v4", {"scale_fmt": "float"}, r"w1.scale is stored in float8_e8m0fnu, expected float32"),
        ("gpt_oss", {"modules_to_not_convert": ["model.layers.*.mlp"]}, "contains model.layers.1.mlp"),
        ("gpt_oss", {"quant_method": "fp8", "weight_block_size": [1, 32]}, "_scales: scales without float8"),
    ],
)
def test_other_declarations_and_scales_of_a_wrong_shape_are_refused_by_name(
    tmp_path: Path, published: str, changed: dict[str, Any], named: str
) -> None:
    write(tmp_path, published, **changed)
    with pytest.raises(FormatError) as refused:
        open_huggingface(tmp_path)
    assert any(re.search(named, line) for line in refused.value.evidence), refused.value.evidence


BLOCKS = np.zeros((2, 8, 6, 16), np.uint8)
SCALES = BLOCKS[..., 0]


@pytest.mark.parametrize(
    ("published", "stored", "fault"),
    [
        ("deepseek_v3", {"a.weight": np.ones((16, 8), FP8)}, "a.weight: a.weight_scale_inv is missing"),
        ("gpt_oss", {"a_blocks": BLOCKS}, "a_blocks: a_scales is missing"),
        ("gpt_oss", {"a_scales": SCALES}, "a_scales: scales without uint8 weights"),
        ("gpt_oss", {"a_blocks": BLOCKS, "a_scales": SCALES[..., :4]}, r"a_blocks: a_scales has shape \[2, 8, 4\]"),
        ("gpt_oss", {"a_blocks": BLOCKS[..., :8], "a_scales": SCALES}, r"a_blocks: shape \[2, 8, 6, 8\] is not"),
    ],
)
def test_blocks_that_do_not_fit_their_scales_are_refused(
    tmp_path: Path, published: str, stored: dict[str, np.ndarray[Any, Any]], fault: str
) -> None:
    save_file({name: np.ascontiguousarray(one) for name, one in stored.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[published].config))
    with pytest.raises(FormatError) as refused:
        open_huggingface(tmp_path)
    (found,) = refused.value.evidence
    assert re.match(fault, found), found


@pytest.mark.parametrize(
    ("published", "pattern", "wanted"),
    [
        ("deepseek_v3", "*.0.mlp.down_proj.*", {"weight": "float8_e4m3fn", "weight_scale_inv": "float32"}),
        ("deepseek_v4", "*.0.ffn.experts.0.w1.*", {"weight": "int8", "scale": "float8_e8m0fnu"}),
        ("gpt_oss", "*.0.mlp.experts.down_proj_[bs][lc]*", {"down_proj_blocks": "uint8", "down_proj_scales": "uint8"}),
    ],
)
def test_inspect_lists_numbers_and_scales_of_any_quantization_as_stored(
    tmp_path: Path, published: str, pattern: str, wanted: dict[str, str]
) -> None:
    for changed in ({}, {"quant_method": "gptq"}):
        write(tmp_path, published, **changed)
        found = inspect_directory(tmp_path, pattern)
        assert dict(sorted((one.name.rsplit(".", 1)[1], one.dtype) for one in found.tensors or ())) == wanted
        assert found.roles["model_state"].files == found.files == 2


def test_a_changed_scale_is_a_difference_of_its_weights(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write(tmp_path / name)
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    path = next(one for one in (tmp_path / "other").glob("*.safetensors") if scale in read_header(one).tensors)
    data = bytearray(path.read_bytes())
    data[read_header(path).tensors[scale].begin + 2] ^= 0x40
    path.write_bytes(data)
    opened = [paddleformers_fc.open(tmp_path / name) for name in ("one", "other")]
    different = opened[0].diff(opened[1]).roles["model_state"].different
    assert [one.name for one in different] == [scale.removesuffix("_scale_inv")]


def test_blocks_that_are_wider_than_their_matrix_take_the_memory_of_the_matrix(tmp_path: Path) -> None:
    numbers, scales = np.ones((4, 4), FP8), np.full((4, 1), 3, np.float32)
    save_file({"a.weight": numbers, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    declared = {**DECLARED, "weight_block_size": [1, 1 << 24]}
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32", "quantization_config": declared}))
    tracemalloc.start()
    try:
        assert open_and_read(tmp_path) == [("a.weight", np.full((4, 4), 3, np.float32).tobytes())]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 24


def expanded(name: str) -> list[str]:
    """Return the names that a pattern such as ``layers.{2-42/2,0-0}.norm`` stands for."""
    found = re.search(r"\{([^}]*)\}", name)
    if found is None:
        return [name]
    ranges = [re.fullmatch(r"(\d+)-(\d+)(?:/(\d+))?", part) for part in found[1].split(",")]
    numbers = [one for part in ranges if part for one in range(int(part[1]), int(part[2]) + 1, int(part[3] or 1))]
    return [one for number in numbers for one in expanded(name.replace(found[0], str(number), 1))]


def write_headers(directory: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write published weights of four layers; their numbers are holes."""
    config, layers, kept = {**config}, config["num_hidden_layers"], 4
    for key in ("compress_ratios", "layer_types"):
        if key in config:
            config[key] = [*config[key][:kept], *config[key][layers:]]
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": kept}))
    header, end = {}, 0
    for pattern, (dtype, shape) in tensors.items():
        for name in expanded(pattern):
            layer = int((re.search(r"\blayers\.(\d+)\.", name) or [0, 0])[1])
            if layer < kept or layer >= layers:
                size = math.prod(shape) * {"BF16": 2, "F32": 4, "I64": 8}.get(dtype, 1)
                name = name.replace(f"layers.{layer}.", f"layers.{layer - layers + kept}.") if layer >= layers else name
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
    raw = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


@pytest.mark.parametrize("name", HEADERS)
def test_published_headers_are_those_that_the_family_declares(tmp_path: Path, name: str) -> None:
    write_headers(tmp_path, **HEADERS[name])
    opened = open_huggingface(tmp_path)
    stored = opened.catalog.roles["model_state"]
    rules = opened.built.rules
    # Copies of the embeddings and of the output in DeepSeek's prediction layer, which the model has once.
    shared = {one for one in stored if one.endswith(("layers.4.embed_tokens.weight", "shared_head.head.weight"))}
    assert {source for rule in rules.rules for source in rule.sources} == stored.keys() - shared
    assert {one.dtype for one in stored.values()} <= {"bfloat16", "float32", "int64"}

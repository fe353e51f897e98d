"""Families against files that Transformers wrote: its names for sizes, its tensors, its shapes.

``transformers.json`` is made by ``tools/transformers_fixtures.py``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import OptionalNames, bind, enumerate_tensors, family_for, register
from paddleformers_fc.mapping import prove
from tests.families.spaces import model_of
from tests.mapping.numbers import moved, numbered

CASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("transformers.json").read_text())
CLASSES = (True, False)
PREFIXES = ("model.vision_model.", "vision_model.")
"""The tower of ERNIE 4.5 VL in Transformers and in published files. Transformers reads both."""

TURNED = {"qwen3_vl_moe": ".mlp.experts."}
"""Names of stacked experts that Transformers 5.3 writes as it holds them. It reads published files, and turns them."""


ONE_BY_ONE = re.compile(r"(?P<scope>.*\.experts)\.[0-9]+\.(?P<part>gate|up|down)_proj\.weight")
STACKED = ("qwen3_5_moe",)
"""Families whose experts Transformers 5.3 writes one by one. Published files stack them; it reads both."""


def canonical(config: dict[str, Any]) -> dict[str, list[int]]:
    """The canonical tensors that a family gives for a configuration."""
    family = family_for(config)
    rules = bind(family, model_of(config), [tensor.under() for tensor in enumerate_tensors(family, model_of(config))])
    return {name: list(spec.shape) for name, spec in rules.mapping().sources.items()}


def stored(case: str) -> dict[str, list[int]]:
    """The tensors of a case as open weights have them."""
    turned = TURNED.get(case.split(",")[0], "\0")
    shapes = CASES[case]["tensors"]
    published = {name.replace(*PREFIXES): one for name, one in shapes.items()}
    if case.split(",")[0] in STACKED:
        published = joined(published, CASES[case]["config"]["text_config"]["num_experts"])
    return {name: [one[0], *one[:0:-1]] if turned in name else one for name, one in published.items()}


def joined(shapes: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """The tensors of a file with the experts of every layer in two stacks."""
    found = dict[str, list[int]]()
    for name, shape in shapes.items():
        expert = ONE_BY_ONE.fullmatch(name)
        if expert is None:
            found[name] = shape
        elif expert["part"] == "down":
            found[f"{expert['scope']}.down_proj"] = [count, *shape]
        else:
            found[f"{expert['scope']}.gate_up_proj"] = [count, 2 * shape[0], shape[1]]
    return found


def settings(case: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a case, with changes."""
    config: dict[str, Any] = {**CASES[case]["config"], **changes}
    return ernie_vl(config) if config["model_type"] == "ernie4_5_moe_vl" else config


def ernie_vl(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of ERNIE 4.5 VL as published: not nested, and with a value for every modality."""
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    ends = {"moe_layer_start_index": [1, 1], "moe_layer_end_index": [1, 1], "moe_num_experts": [4, 4]}
    return {**text, **{key: value for key, value in config.items() if key != "text_config"}, **ends}


def test_every_family_has_a_case() -> None:
    assert {config["model_type"] for config in (case["config"] for case in CASES.values())} == {
        *("llama", "ernie4_5", "ernie4_5_moe", "phi3", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
        *("glm4_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "minimax_m2", "kimi_k2"),
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_next", "glm4v_moe", "glm_ocr", "paddleocr_vl"),
        *("glm_moe_dsa", "ernie4_5_moe_vl", "qwen3_5", "qwen3_5_moe"),
    }


@pytest.mark.parametrize("is_fleet", CLASSES)
@pytest.mark.parametrize("case", CASES)
def test_the_tensors_of_a_family_are_those_that_transformers_writes(case: str, is_fleet: bool) -> None:
    config, written = settings(case, is_fleet=is_fleet), stored(case)
    optional = OptionalNames(family_for(config), model_of(config))
    found = canonical(config)
    assert {name: shape for name, shape in found.items() if name in written or name not in optional} == written


def renamed(case: str, old: str, new: str) -> dict[str, Any]:
    """A configuration that calls a key otherwise."""
    config = settings(case, is_fleet=True)
    config[new] = config.pop(old)
    return config


@pytest.mark.parametrize(
    ("case", "written", "also"),
    [
        ("qwen3_moe", "num_local_experts", "num_experts"),
        ("qwen3_moe", "num_local_experts", "n_routed_experts"),
        ("gpt_oss", "num_local_experts", "num_experts"),
        ("minimax_m2", "num_local_experts", "n_routed_experts"),
        ("minimax_m2", "num_local_experts", "num_experts"),
        ("minimax_m2", "intermediate_size", "moe_intermediate_size"),
        ("glm4_moe", "n_routed_experts", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("kimi_k2", "n_routed_experts", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts", "num_experts"),
    ],
)
def test_a_size_is_read_under_each_of_its_names(case: str, written: str, also: str) -> None:
    assert canonical(renamed(case, written, also)) == canonical(settings(case, is_fleet=True))


def test_two_names_of_one_size_that_differ_are_refused() -> None:
    config = settings("qwen3_moe", is_fleet=True, num_experts=8)
    with pytest.raises(MappingError) as caught:
        canonical(config)
    assert "num_experts and num_local_experts are names of one key" in caught.value.what
    assert list(caught.value.evidence) == ["num_experts: 8", "num_local_experts: 4"]
    config["num_experts"] = 4
    assert canonical({**config, "n_routed_experts": None}) == canonical(config)


FUSED = ["qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "kimi_k2"]


@pytest.mark.parametrize("backend", ["moe_expert_fusion", "using_sonic_moe"])
@pytest.mark.parametrize("case", FUSED)
def test_fused_experts_of_paddlefleet_are_the_tensors_that_transformers_writes(case: str, backend: str) -> None:
    config, written = settings(case, is_fleet=True, **{backend: True}), stored(case)
    names = [tensor.name for tensor in enumerate_tensors(family_for(config), model_of(config))]
    assert any(name.endswith("grouped_gemm_experts.weight1") for name in names)
    assert not any(".experts." in name for name in names)
    optional = OptionalNames(family_for(config), model_of(config))
    assert {name: shape for name, shape in canonical(config).items() if name not in optional} == written


def test_stacked_experts_that_are_fewer_than_the_configuration_gives_are_refused() -> None:
    # Eight experts of 16 columns are as long as four of 32.
    config = settings("qwen3_moe", is_fleet=False, fd_fallback=True)
    family = family_for(config)
    tensors = [tensor.under() for tensor in enumerate_tensors(family, model_of(config))]
    with pytest.raises(MappingError) as caught:
        bind(family, model_of({**config, "num_local_experts": 8}), [one for one in tensors if ".experts." in one.name])
    assert any("gate_up_proj: shape [128, 32] does not contain 8 experts" in line for line in caught.value.evidence)


@pytest.mark.parametrize("backend", ["moe_expert_fusion", "using_sonic_moe"])
@pytest.mark.parametrize("case", FUSED)
def test_experts_that_a_newer_paddle_saves_on_an_axis_of_their_own_are_the_same_numbers(
    case: str, backend: str
) -> None:
    config = settings(case, is_fleet=True, **{backend: True})
    family, experts = family_for(config), "grouped_gemm_experts"
    flat = [one.under() for one in enumerate_tensors(family, model_of(config)) if experts in one.name]
    newer = [structs.replace(one, shape=(4, one.shape[0] // 4, one.shape[1]), cuts=(1, 1, 1)) for one in flat]
    before, after = (bind(family, model_of(config), tensors).mapping() for tensors in (flat, newer))
    prove(after)
    assert before.sources == after.sources
    arrays = numbered(before)
    ours, theirs = moved(after, arrays), moved(before, arrays)
    assert ours.keys() == theirs.keys()
    for name, made in ours.items():
        assert (made == theirs[name].reshape(made.shape)).all(), name
    with pytest.raises(MappingError, match=r"weight1: .*shape \[2, "):
        bind(family, model_of(config), [structs.replace(one, shape=(2, *one.shape[1:])) for one in newer])


def test_a_declaration_is_compared_with_the_header_of_open_weights() -> None:
    config, header = settings("qwen3_vl, tied", is_fleet=False), stored("qwen3_vl, tied")
    family, model = family_for(config), model_of(config)
    register(family, model, {**header, "lm_head.weight": [64, 32]})
    norm, layer = "model.language_model.norm.weight", "model.language_model.layers.0.input_layernorm.weight"
    other = {**{name: shape for name, shape in header.items() if name != norm}, layer: [16], "strange.weight": [1]}
    with pytest.raises(MappingError) as caught:
        register(family, model, other)
    assert list(caught.value.evidence) == [
        f"{norm}: declared, not in the weights",
        "strange.weight: in the weights, not declared",
        f"{layer}: declared with shape [32], [16] in the weights",
    ]

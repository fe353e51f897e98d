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

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import OptionalNames, bind, enumerate_tensors, family_for, language, register
from paddleformers_fc.mapping import prove
from tests.families.spaces import model_of
from tests.mapping.numbers import moved, numbered
from tests.parity.evidence import NOT_COMPARED

CASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("transformers.json").read_text())
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
    shapes: dict[str, list[int]] = CASES[case]["tensors"]
    if case.split(",")[0] not in STACKED:
        return shapes
    return joined(shapes, CASES[case]["config"]["text_config"]["num_experts"])


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
    return {**CASES[case]["config"], **changes}


WITHOUT_LOGITS = [case for case in CASES if CASES[case]["config"]["model_type"] in NOT_COMPARED]
"""Cases of the families that are not compared by logits: those load and export such files."""


@pytest.mark.parametrize("case", WITHOUT_LOGITS)
def test_the_tensors_of_a_family_are_those_that_transformers_writes(case: str) -> None:
    config, written = settings(case, is_fleet=True), stored(case)
    optional = OptionalNames(family_for(config), model_of(config))
    found = canonical(config)
    assert {name: shape for name, shape in found.items() if name in written or name not in optional} == written


def test_every_family_without_logits_that_transformers_knows_has_a_case() -> None:
    unknown = {"deepseek_v32", "deepseek_v4"}
    assert {CASES[case]["config"]["model_type"] for case in WITHOUT_LOGITS} == NOT_COMPARED.keys() - unknown


def renamed(case: str, old: str, new: str) -> dict[str, Any]:
    """A configuration that calls a key otherwise."""
    config = settings(case, is_fleet=True)
    config[new] = config.pop(old)
    return config


@pytest.mark.parametrize(
    ("case", "written", "also"),
    [
        *((name, "num_local_experts", "num_experts") for name in ("qwen3_moe", "gpt_oss", "minimax_m2")),
        *((name, "num_local_experts", "n_routed_experts") for name in ("qwen3_moe", "minimax_m2")),
        *((name, "n_routed_experts", "num_local_experts") for name in ("glm4_moe", "deepseek_v3", "kimi_k2")),
        ("minimax_m2", "intermediate_size", "moe_intermediate_size"),
        ("ernie4_5_moe", "moe_num_experts", "num_experts"),
    ],
)
def test_a_size_is_read_under_each_of_its_names(case: str, written: str, also: str) -> None:
    assert canonical(renamed(case, written, also)) == canonical(settings(case, is_fleet=True))


FUSED = ["qwen2_moe", "qwen3_moe", "glm4_moe", "minimax_m2", "kimi_k2"]


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
    family = family_for(config)
    register(family, config, {**header, "lm_head.weight": [64, 32]})
    norm, layer = "model.language_model.norm.weight", "model.language_model.layers.0.input_layernorm.weight"
    other = {**{name: shape for name, shape in header.items() if name != norm}, layer: [16], "strange.weight": [1]}
    with pytest.raises(MappingError) as caught:
        register(family, config, other)
    assert list(caught.value.evidence) == [
        f"{norm}: declared, not in the weights",
        "strange.weight: in the weights, not declared",
        f"{layer}: declared with shape [32], [16] in the weights",
    ]
    with pytest.raises(OptionError, match="one of them is missing"):
        register(family, header=header)


@pytest.mark.parametrize("only", [language.FLEET, language.FORMERS])
def test_every_class_of_a_family_is_compared_with_open_weights(only: language.ModelClass) -> None:
    norm, config = language.same("model.norm.weight"), {"hidden_size": 8}
    other = language.of_class(only, language.same("model.other.weight"))
    classes = (language.FLEET, language.FORMERS)
    family = language.family("of two classes", norm, other, classes=classes, tiny={"hidden_size": 8})
    with pytest.raises(MappingError, match=r"model\.other\.weight: in the weights, not declared"):
        register(family, config, {"model.norm.weight": [8], "model.other.weight": [8]})

"""What declarations refuse with the numbers, how they choose by configuration and class, and their sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import Family, ModelTensor, bind, enumerate_tensors, language as lang
from paddleformers_fc.families.names import Names
from paddleformers_fc.families.sizes import OneOf, Size, Sizes
from paddleformers_fc.mapping import prove
from tests.families.spaces import BY_NAME, model_of, settings, tensors
from tests.harness.work import calls


@pytest.mark.parametrize(
    ("declare", "what"),
    [
        (lambda: lang.layer("model", lang.ends("embed_tokens", "norm", "lm_head")), "TiedName is no statement"),
        (lambda: lang.layer("model", [lang.same("norm.weight")]), "list is no statement"),
        (lambda: lang.same("norm.weight", shape="head"), "shape 'head' is not a tuple"),
        (lambda: lang.same("a.weight", "b.weight", fleet="c.weight"), "a.weight, b.weight cannot share one other name"),
        (lambda: lang.experts("mlp.experts", lang.gated("a", "b", "c", "d")), "need {expert} in their scope"),
        (lambda: lang.experts("mlp.{expert}", lang.mlp("a", "b", "c")), "gate and up fused and then down"),
        (
            lambda: lang.experts("mlp.{expert}", lang.row("c"), lang.gate_up("ab", "a", "b")),
            "gate and up fused and then down",
        ),
        (lambda: lang.vision(lang.same("norm.weight")), "A tuple is not a scope"),
    ],
)
def test_a_misused_verb_is_an_error_with_a_next_step(declare: Callable[[], object], what: str) -> None:
    with pytest.raises(OptionError, match=re.escape(what)) as caught:
        declare()
    assert caught.value.next_step


def test_a_stack_with_other_axes_than_are_declared_is_refused() -> None:
    probe = Family("probe", lang.stack_of_files("model.weight1", shape=("hidden", "ffn")))
    stack = ModelTensor("model.weight1", (3, 4), "float32", (1, 1))
    with pytest.raises(MappingError, match="3 axes are declared, this tensor has 2"):
        bind(probe, model_of({"num_experts": 3}), [stack])


LAYER = "model.layers.0"
FUSED, NORM = f"{LAYER}.self_attn.qkv_proj.weight", "model.layers.2.input_layernorm.weight"
GATE, EMPTY = "model.layers.1.mlp.gate.weight", "num_empty_layers_add_in_head"


@pytest.mark.parametrize(
    ("name", "changes", "tensor", "shape", "message"),
    [
        ("ernie4_5", {}, FUSED, (32, 33), "length 33 does not divide into 8 query and 2 x 4"),
        ("ernie4_5", {}, FUSED, (32, 64, 1), "a fused layer has one or two axes, this tensor has 3"),
        ("ernie4_5", {}, f"{LAYER}.self_attn.o_proj.weight", (32,), "a linear weight has two axes, this tensor has 1"),
        ("ernie4_5", {}, f"{LAYER}.mlp.up_gate_proj.weight", (32, 65), "65 does not divide into gate and up for 1"),
        ("ernie4_5", {"num_key_value_heads": 3}, FUSED, (32, 64), "=8 and num_key_value_heads=3 do not group"),
        ("ernie4_5", {"num_attention_heads": 0}, FUSED, (32, 64), "=0 and num_key_value_heads=4 do not group"),
        # Gates, and values of another length: the layer is longer than its heads, and divisible.
        ("minimax_m2", {"use_gated_attn": True, "v_head_dim": 8}, FUSED, (32, 192), "length 192 is not the 128 that 8"),
        ("minimax_m2", {"v_head_dim": 16}, FUSED, (32, 160), "length 160 is not the 128 that 8 query and 2 x 4"),
        # Two layers and one prediction layer: with other empty layers, every number would mean another layer.
        ("glm4_moe", {EMPTY: 3}, NORM, (32,), "its number 2 is smaller than the shift 3"),
        ("glm4_moe", {EMPTY: 0}, NORM, (32,), r"is the canonical [0-9], and the configuration has"),
        ("glm4_moe", {EMPTY: 2}, "model.layers.5.enorm.weight", (32,), r"canonical [0-9], and the configuration has"),
        ("qwen3_moe", {"is_fleet": True}, GATE, (32, 4), r"32, 4\] is declared for `stepped\(.* and not is_fleet`,"),
        ("qwen3_moe", {"is_fleet": None, "num_experts": 32}, GATE, (32, 32), "2 statements declare it, and shape"),
        ("qwen3_moe", {"is_fleet": True}, GATE, (8, 8), r"shape \[8, 8\] does not distinguish them"),
        ("qwen2_5_vl", {}, "model.visual.merger.mlp.1.weight", (16,), "no statement of family qwen2_5_vl declares"),
        ("qwen2_5_vl", {}, "model.visual.blocks.2.norm1.weight", (16,), "its block 2 is the canonical 2, and the"),
    ],
)
def test_a_tensor_that_the_configuration_does_not_have_is_refused_with_the_numbers(
    name: str, changes: dict[str, Any], tensor: str, shape: tuple[int, ...], message: str
) -> None:
    family = BY_NAME[name]
    with pytest.raises(MappingError, match=message):
        bind(family, model_of(settings(family, **changes)), [ModelTensor(tensor, shape, "float32", (1,) * len(shape))])


def test_more_tensors_or_experts_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = BY_NAME["qwen3_moe"]
    config = settings(family, num_hidden_layers=2, num_experts=4, is_fleet=True, moe_expert_fusion=True)
    stacks = [one for one in tensors(family, config) if "grouped_gemm_experts" in one.name]
    modules = {name: import_module(f"paddleformers_fc.families.{name}") for name in ("enumerate", "bind")}
    monkeypatch.setattr(modules["enumerate"], "MAX_TENSORS", 2)
    monkeypatch.setattr(modules["bind"], "MAX_EXPERTS", 4)
    assert stacks[0] in tensors(family, config)
    bind(family, model_of(config), stacks)
    monkeypatch.setattr(modules["enumerate"], "MAX_TENSORS", 1)
    with pytest.raises(MappingError, match="2 tensors of one kind exceed the maximum of 1"):
        tensors(family, config)
    monkeypatch.setattr(modules["bind"], "MAX_EXPERTS", 3)
    with pytest.raises(MappingError, match="does not contain 4 experts"):
        bind(family, model_of(config), stacks)


def test_heads_that_ranks_cannot_share_are_refused_with_the_numbers() -> None:
    family = BY_NAME["phi3"]
    config = settings(family, num_key_value_heads=2)
    with pytest.raises(MappingError, match="2 key and value heads are not divisible among 4 tensor-parallel ranks"):
        bind(family, model_of(config), tensors(family, config, 4))


def test_statements_for_one_name_are_distinguished_by_the_class_and_the_configuration() -> None:
    family = BY_NAME["qwen3_moe"]

    def axes(shape: tuple[int, int], **changes: Any) -> tuple[int, ...]:
        gate = ModelTensor(GATE, shape, "float32", (1, 1))
        return bind(family, model_of(settings(family, **changes)), [gate]).rules[0].axes

    assert axes((4, 32), is_fleet=True) == (0, 1)
    assert axes((32, 4), is_fleet=False) == (1, 0)
    # As many experts as hidden units: no shape decides.
    assert axes((32, 32), is_fleet=True, num_experts=32) == (0, 1)
    assert axes((32, 32), is_fleet=False, num_experts=32) == (1, 0)
    assert axes((32, 4), is_fleet=None) == (1, 0)


def test_conditions_get_the_canonical_number_of_a_layer_behind_empty_ones() -> None:
    family = BY_NAME["deepseek_v4"]
    known = Names(family, model_of(settings(family, **{EMPTY: 2})))
    assert [numbers for _, numbers in known.declared("model.layers.3.input_layernorm.weight")] == [{"layer": 1}]


def test_the_router_is_cast_when_the_file_is_not_in_its_dtype_and_the_rest_is_not() -> None:
    family = BY_NAME["glm4_moe"]
    config = settings(family)
    model = [one.under() for one in enumerate_tensors(family, model_of(config), "bfloat16")]
    rules = bind(family, model_of(config), model)
    stored = dict.fromkeys(rules.mapping().sources, "bfloat16")
    casting = rules.casting(stored)
    prove(casting.mapping(stored))
    cast = {rule.targets[0].rsplit(".", 2)[-2] for rule in casting.rules if rule.cast}
    assert cast == {"gate"}
    assert {rule.cast for rule in casting.rules} == {None, "float32"}


SPARSE = [(1, -1, 1), (0, -1, 1), (2, 3, 1), (0, 2, 2), (1, -1, 3)]


@pytest.mark.parametrize(("start", "end", "interval"), SPARSE)
def test_layers_of_ernie_have_experts_by_start_end_and_interval_and_prediction_blocks_by_their_own_number(
    start: int, end: int, interval: int
) -> None:
    family = BY_NAME["ernie4_5_moe"]
    chosen = {"moe_layer_start_index": start, "moe_layer_end_index": end, "moe_layer_interval": interval}
    config = settings(family, num_hidden_layers=4, **chosen)
    names = [one.name for one in enumerate_tensors(family, model_of(config)) if ".experts.0." in one.name]
    sparse = [n for n in range(4) if (n + 1) % interval == 0 and start <= n <= (3 if end < 0 else end)]
    assert {name.split(".")[2] for name in names if ".layers." in name} == {str(n) for n in sparse}
    assert {name.split(".")[2] for name in names if ".mtp_block." in name} == {str(n) for n in sparse if n < 2}


def test_binding_visits_every_tensor_once() -> None:
    family = BY_NAME["ernie4_5_moe"]

    def calls_per_tensor(layers: int) -> float:
        config = settings(family, num_hidden_layers=layers, moe_num_experts=100, num_nextn_predict_layers=0)
        model = tensors(family, config, 2)
        bound = []
        counted = calls(lambda: bound.append(bind(family, model_of(config), model)))
        assert len(bound[0].rules) == len(model) - 1 > 189 * layers
        return counted / len(model)

    assert calls_per_tensor(40) < 1.1 * calls_per_tensor(10) < 25


KINDS = {"a": 1, "text": "four", "kinds": ["x", "y"]}
LONG = 1 << 60


@pytest.mark.parametrize(
    ("size", "named"),
    [
        (lambda a, b: a + b, "`(a, b)` requires b, which the configuration does not contain"),
        (("a", "b"), "`a + b` requires b, which the configuration does not contain"),
        ("b", "`b` is not in the configuration"),
        ("text.b", "is not in the configuration"),
        (lambda a: a - 9, "is -8 and not a length"),
        (lambda a: a // 0, "zero"),
        (lambda a: a < 9, "is True and not a length"),
        (lambda a: a / 2, "is 0.5 and not a length"),
        (lambda kinds: kinds[2], "needs entry 2 of a list of 2"),
        (lambda kinds: kinds[-1], "needs entry -1 of a list of 2"),
        (lambda a: len(a), "has no len"),
        (lambda b: b[0], "requires b, which the configuration does not contain"),
    ],
)
def test_a_size_that_gives_no_length_is_refused_with_the_reason(size: Size, named: str) -> None:
    with pytest.raises(MappingError) as caught:
        Sizes({}, KINDS).length(size)
    assert named in caught.value.what


@pytest.mark.parametrize(("key", "ours"), [("text", lambda one: one * LONG), ("kinds", lambda one: LONG * one)])
def test_a_text_or_a_list_of_a_configuration_is_not_multiplied(key: str, ours: Size) -> None:
    sizes = Sizes({"one": key, "ours": ours}, KINDS)
    with pytest.raises(MappingError, match="unsupported operand"):
        sizes.length("ours")


def test_a_function_returns_what_the_configuration_has_and_its_own_name_inside_its_definition() -> None:
    declared: dict[str, Size] = {"head": lambda head, hidden: head or hidden // 2, "wide": ("head", "head")}
    assert Sizes(declared, {"hidden": 8}).length("wide") == 8
    assert Sizes(declared, {"hidden": 8, "head": 3}).length("wide") == 6
    sizes = Sizes({"kind": lambda text: text, "all": lambda kinds: kinds, "first": lambda kinds: kinds[0]}, KINDS)
    assert [sizes.value(name) for name in ("kind", "all", "first")] == ["four", ["x", "y"], "x"]
    assert Sizes({"kind": lambda text, a: text or a}, {"text": "", "a": 1}).value("kind") == 1


def test_names_of_one_key_have_one_value() -> None:
    both = OneOf(("wide", "width"))
    assert Sizes({}, {"width": 3}, {"wide": 5}).length(both) == 3
    assert Sizes({}, {}, {"wide": 5}).length(both) == 5
    with pytest.raises(MappingError, match="wide and width are names of one key, and their values differ"):
        Sizes({}, {"width": 3, "wide": 4}).length(both)

"""Derivation of a model's mapping that no family declares: evidence, hints, answers, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddleformers_fc.aoa import normal, render
from paddleformers_fc.cpu_runtime.forkserver import ForkServer
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelTensor, bind, enumerate_tensors
from paddleformers_fc.families.aoa_text import with_ties
from paddleformers_fc.mapping import TensorSpec
from paddleformers_fc.verification.derivation.derive import Derivation, derive_rules
from paddleformers_fc.verification.derivation.layer_kinds import LayeredTensor, LayerKind, kind_of_classes
from paddleformers_fc.verification.derivation.native_hints import pieces_of
from tests.families.derivation import (
    DEGREES,
    MOST_QUESTIONS,
    OPEN,
    OTHER,
    SAME,
    Case,
    cases,
    derived,
    measured,
    page,
    verdict,
)
from tests.families.spaces import BY_NAME, model_of, settings
from tests.families.test_real_models import MODELS
from tests.parity import fixtures

DOCUMENT = Path(__file__).parents[2] / "docs" / "derivation.md"
ALL = [pytest.param(case, id=f"{case.name} TP {tp}") for tp in DEGREES for case in cases(tp)]
INVALID_HINTS = ("qwen3_5", "qwen3_5_moe")
"""Families whose statements upstream writes with ``tp_probe_key``, which its own language does not have."""
MANY_QUESTIONS = ("deepseek_v4", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
WITHOUT_CANDIDATES = ("deepseek_v4",)
"""Families with one tensor of files for several of the model, of which a derivation makes no rule."""
ATTENTION = "model.layers.{}.self_attn"
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def live(name: str, *shape: int, kind: str = "linear", cuts: tuple[int, ...] | None = None) -> LayeredTensor:
    return LayeredTensor(ModelTensor(name, shape, "float32", cuts or (1,) * len(shape)), LayerKind(kind))


def stored(**shapes: tuple[int, ...]) -> dict[str, TensorSpec]:
    return specs(shapes)


def specs(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(shape, "float32") for name, shape in shapes.items()}


def attention(tp: int = 1, layers: int = 1) -> tuple[list[LayeredTensor], dict[str, TensorSpec]]:
    """Layers of 4 query and 2 kv heads of length 4, fused in the model."""
    model: list[LayeredTensor] = []
    files: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        prefix = ATTENTION.format(layer)
        model.append(live(f"{prefix}.qkv_proj.weight", 12, 32, cuts=(1, tp)))
        model.append(live(f"{prefix}.qkv_proj.bias", 32, cuts=(tp,)))
        for part, length in (("q", 16), ("k", 8), ("v", 8)):
            files[f"{prefix}.{part}_proj.weight"] = (length, 12)
            files[f"{prefix}.{part}_proj.bias"] = (length,)
    return model, specs(files)


def determined(*given: Any, **settling: Sequence[str]) -> Derivation:
    """A derivation that leaves nothing open."""
    found = derive_rules(*given, **settling)
    found.refuse_questions()
    return found


# The families, as what they would have been without a declaration.


@pytest.mark.slow
def test_the_document_is_what_is_measured() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "run: make derive-table"


@pytest.mark.sampled
@pytest.mark.parametrize("case", ALL)
def test_a_written_family_is_derived_with_a_hint_and_with_answers_and_never_as_something_else(case: Case) -> None:
    found = measured(case)
    assert found.hinted == (OPEN if case.family.name in (*INVALID_HINTS, *WITHOUT_CANDIDATES) else SAME)
    assert found.answered == (SAME if len(found.questions) <= MOST_QUESTIONS else OPEN)
    assert found.alone in (SAME, OPEN)


@pytest.mark.sampled
@pytest.mark.parametrize("case", ALL)
def test_without_kinds_of_layers_more_questions_are_open_and_nothing_is_wrong(case: Case) -> None:
    blind = [LayeredTensor(one.tensor, LayerKind.OTHER) for one in case.layered()]
    config = {**case.config, "tie_word_embeddings": False}
    aliases = {tie.alias for tie in case.rules.ties}
    found = derive_rules([one for one in blind if one.tensor.name not in aliases], case.canonical, config)
    wanted = normal(case.rules.mapping())
    made = pieces_of(found.rules.rules, {name: spec.shape for name, spec in found.rules.targets.items()})
    assert {item for items in made.values() for item in items} <= wanted
    assert found.questions or len(made) == len(found.rules.targets)


@pytest.mark.parametrize("case", [one for one in cases(1) if one.family.name in ("ernie4_5_moe", "qwen3_moe")])
def test_a_hint_that_exchanges_gate_and_up_is_proved_and_still_not_taken(case: Case) -> None:
    exchanged = {".gate_proj": ".up_proj", ".up_proj": ".gate_proj"}
    wrong = [re.sub(r"\.(gate|up)_proj", lambda part: exchanged[part.group()], line) for line in case.hint]
    assert wrong != case.hint
    found = derived(case, hint=wrong)
    assert found.questions
    assert all("the hint contradicts" in one.why for one in found.questions)


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_is_derived_from_its_layers_and_its_native_statements(ranks: ForkServer, name: str) -> None:
    configs = [settings(BY_NAME[name], **changes) for changes in MODELS[name][:1]]
    result = ranks.run("tests.families.derivation_jobs:layers", 1, {"models": configs})
    assert result.ok, result.logs[0].read_text()
    (one,) = result.values[0]
    family = replace(BY_NAME[name], tiny={**BY_NAME[name].tiny, **MODELS[name][0]})
    case = Case(family, None, 1)
    assert one["kinds"] == {**one["kinds"], **{each.tensor.name: each.kind.value for each in case.layered()}}
    model = [live(key, *shape, kind=one["kinds"][key]) for key, shape in one["shapes"].items()]
    assert verdict(case, derive_rules(model, case.canonical, case.config, hint=one["hint"])) == SAME


FROM_WEIGHTS = ["deepseek_v3", "ernie4_5", "gpt_oss", "llama", "phi3", "qwen3_next"]
FROM_WEIGHTS += ["ernie4_5_moe_vl", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_5_vl"]


def test_open_weights_of_transformers_are_derived_as_they_are_declared(ranks: ForkServer, tmp_path: Path) -> None:
    kwargs = {"names": FROM_WEIGHTS, "output_dir": str(tmp_path)}
    found = ranks.run("tests.families.derivation_jobs:from_weights", 1, kwargs).values[0]
    for name, statements in found.items():
        family, model = BY_NAME[name], model_of(fixtures.read(name).config)
        rules = bind(family, model, [one.under() for one in enumerate_tensors(family, model)])
        assert set(statements) == set(render(with_ties(rules))), name


# Evidence.


def test_equal_names_are_turned_where_the_layer_is_linear_and_kept_where_it_is_an_embedding() -> None:
    model = [live("a.weight", 8, 8), live("b.weight", 8, 8, kind="embedding"), live("c.weight", 8, kind="norm")]
    found = determined(model, stored(**{"a.weight": (8, 8), "b.weight": (8, 8), "c.weight": (8,)}), {})
    assert {rule.targets[0]: rule.axes for rule in found.rules.rules} == {
        "a.weight": (1, 0),
        "b.weight": (0, 1),
        "c.weight": (0,),
    }


def test_a_square_matrix_of_no_known_layer_is_an_open_question_and_one_line_settles_it_for_all_layers() -> None:
    model = [live(f"model.layers.{n}.mix", 8, 8, kind="other") for n in range(3)]
    files = specs({f"model.layers.{n}.mix": (8, 8) for n in range(3)})
    with pytest.raises(MappingError) as caught:
        determined(model, files, {})
    assert list(caught.value.evidence) == [
        "model.layers.{0...2}.mix: may lie as stored, or turned",
        "  1) model.layers.$LAYER_ID.mix -> model.layers.$LAYER_ID.mix",
        "  2) model.layers.$LAYER_ID.mix^T -> model.layers.$LAYER_ID.mix",
    ]
    for answer, axes in (("", (0, 1)), ("^T", (1, 0))):
        line = f"model.layers.$LAYER_ID.mix{answer} -> model.layers.$LAYER_ID.mix"
        assert {rule.axes for rule in determined(model, files, {}, settled=[line]).rules.rules} == {axes}
        one = f"model.layers.1.mix{answer} -> model.layers.1.mix"
        assert {rule.axes for rule in determined(model, files, {}, settled=[one]).rules.rules} == {axes}


def test_square_linear_layers_are_open_questions_where_another_linear_layer_is_not_turned() -> None:
    model = [live("model.layers.0.c_fc.weight", 8, 32), live("model.layers.0.c_proj.weight", 8, 8)]
    found = derive_rules(
        model, specs({"model.layers.0.c_fc.weight": (8, 32), "model.layers.0.c_proj.weight": (8, 8)}), {}
    )
    assert [one.names for one in found.questions] == [("model.layers.0.c_proj.weight",)]


@pytest.mark.parametrize("word", ["fused_qkv", "fused_qkv_old"])
def test_one_line_settles_query_key_and_value_of_all_layers_and_their_biases(word: str) -> None:
    model, files = attention(layers=2)
    (question,) = derive_rules(model, files, CONFIG).questions
    assert len(question.names) == 4
    assert [len(answer) for answer in question.answers] == [1, 1]
    (line,) = next(answer for answer in question.answers if f"{word}," in answer[0])
    found = determined(model, files, CONFIG, settled=[line])
    assert {rule.target_blocks for rule in found.rules.rules} == {2 if word == "fused_qkv" else 1}


def test_kv_heads_decide_where_only_one_layout_is_possible() -> None:
    for tp, config in ((2, CONFIG), (1, {"num_attention_heads": 4, "num_key_value_heads": 1})):
        model, files = attention(tp)
        if tp == 1:
            files = {name: TensorSpec(_single_head(spec.shape), spec.dtype) for name, spec in files.items()}
            model = [
                replace(one, tensor=structs.replace(one.tensor, shape=(*one.tensor.shape[:-1], 24))) for one in model
            ]
        found = determined(model, files, config)
        assert {rule.target_blocks for rule in found.rules.rules} == {config["num_key_value_heads"]}


def _single_head(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (4 if shape[0] == 8 else shape[0], *shape[1:])


def test_head_counts_that_are_not_in_the_configuration_leave_a_fused_layer_open() -> None:
    model, files = attention()
    found = derive_rules(model, files, {})
    assert "model.layers.0.self_attn.qkv_proj.weight" in found.questions[0].names


def test_a_file_that_is_fused_is_carved_into_the_layers_of_a_model_that_is_not() -> None:
    model = [live(f"layers.0.mlp.{name}_proj.weight", 12, 16) for name in ("gate", "up")]
    found = determined(model, specs({"layers.0.mlp.gate_up_proj.weight": (32, 12)}), {})
    (rule,) = found.rules.rules
    assert (rule.targets, rule.axes, rule.parts) == (tuple(one.tensor.name for one in model), (1, 0), (16, 16))


@pytest.mark.parametrize(
    "lengths", [(16, 8, 8), (32, 8, 8), (16, 8, 4)], ids=["one size", "gated queries", "short values"]
)
def test_a_fused_layer_of_query_key_and_value_in_the_file_is_an_open_question_until_settled(
    lengths: tuple[int, ...],
) -> None:
    prefix = ATTENTION.format(0)
    model = [live(f"{prefix}.{name}_proj.weight", 12, length) for name, length in zip("qkv", lengths, strict=True)]
    files = specs({f"{prefix}.qkv_proj.weight": (sum(lengths), 12)})
    (question,) = derive_rules(model, files, CONFIG).questions
    blocks = [
        determined(model, files, CONFIG, settled=answer).rules.mapping().by_target[f"{prefix}.q_proj.weight"]
        for answer in question.answers
    ]
    assert [len(items) for items in blocks] == [1, 2]


@pytest.mark.parametrize("tp", [1, 2])
def test_the_line_of_each_layout_of_queries_with_gates_is_accepted_and_gives_that_layout(tp: int) -> None:
    prefix = ATTENTION.format(0)
    config = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = [live(f"{prefix}.qkv_proj.weight", 12, 96, cuts=(1, tp))]
    files = specs({f"{prefix}.{name}_proj.weight": (length, 12) for name, length in (("q", 64), ("k", 16), ("v", 16))})
    (question,) = derive_rules(model, files, config).questions
    rules = [determined(model, files, config, settled=answer).rules.rules[0] for answer in question.answers]
    assert [(rule.parts, rule.target_blocks) for rule in rules] == [((64, 16, 16), 4), ((64, 16, 16), tp)]


def test_names_that_differ_in_spelling_and_in_nesting_are_found() -> None:
    model = [
        live("model.embedding.embed_tokens.weight", 10, 4, kind="embedding"),
        live("model.layers.0.self_attn.q_layernorm.weight", 4, kind="norm"),
        live("model.layers.0.mlp.shared_experts.gate_weight", 4, 1, kind="other"),
        live("model.layers.0.transformer_layer.out.weight", 4, 6),
    ]
    files = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.self_attn.q_norm.weight": (4,),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 4),
        "model.layers.0.out.weight": (6, 4),
    }
    found = determined(model, specs(files), {})
    assert [rule.sources[0] for rule in found.rules.rules] == list(files)
    assert found.reasons["model.layers.0.self_attn.q_layernorm.weight"] == "spelled names"
    assert found.reasons["model.layers.0.transformer_layer.out.weight"] == "nested names"


def test_a_canonical_tensor_that_two_tensors_are_named_for_alike_is_neithers() -> None:
    model = [live("a.model.norm.weight", 4, kind="norm"), live("b.model.norm.weight", 4, kind="norm")]
    found = derive_rules(model, stored(**{"model.norm.weight": (4,)}), {})
    assert {name for one in found.questions for name in one.names} >= {one.tensor.name for one in model}


def test_layers_that_are_counted_from_another_number_are_shifted() -> None:
    model = [live(f"model.layers.{n}.norm.weight", 4, kind="norm") for n in (2, 3)]
    found = determined(model, specs({f"model.layers.{n}.norm.weight": (4,) for n in (0, 1)}), {})
    assert [rule.sources[0] for rule in found.rules.rules] == [
        "model.layers.0.norm.weight",
        "model.layers.1.norm.weight",
    ]


def test_a_run_of_layers_that_does_not_fill_the_other_side_is_not_shifted() -> None:
    model = [live(f"model.layers.{n}.norm.weight", 4, kind="norm") for n in (1, 2)]
    found = derive_rules(model, specs({f"model.layers.{n}.norm.weight": (4,) for n in (0, 1, 2)}), {})
    assert [one.names for one in found.questions] == [("model.layers.0.norm.weight",)]


@pytest.mark.parametrize("new", [True, False])
def test_experts_that_are_stacked_are_found_by_their_shapes(new: bool) -> None:
    prefix = "model.layers.0.mlp.experts"
    shape = (3, 4, 20) if new else (12, 20)
    model = [live(f"{prefix}.gate_up_proj", *shape, kind="other")]
    files = specs({f"{prefix}.{e}.{part}_proj.weight": (10, 4) for e in range(3) for part in ("gate", "up")})
    found = determined(model, files, {}).rules.mapping()
    assert len(found.correspondences) == 6
    assert {item.source for item in found.correspondences} == set(files)


def test_a_head_is_tied_only_where_the_configuration_ties_it() -> None:
    model = [live("model.embed_tokens.weight", 10, 4, kind="embedding"), live("lm_head.weight", 10, 4, kind="other")]
    files = stored(**{"model.embed_tokens.weight": (10, 4)})
    (tie,) = determined(model, files, {"tie_word_embeddings": True}).rules.ties
    assert (tie.owner, tie.alias) == ("model.embed_tokens.weight", "lm_head.weight")
    assert [one.names for one in derive_rules(model, files, {}).questions] == [("lm_head.weight",)]


def test_the_copy_of_a_tied_tensor_in_a_file_is_dropped() -> None:
    model = [live("model.embed_tokens.weight", 10, 4, kind="embedding"), live("lm_head.weight", 10, 4, kind="other")]
    files = stored(**{"model.embed_tokens.weight": (10, 4), "lm_head.weight": (10, 4)})
    assert determined(model, files, {"tie_word_embeddings": True}).rules.dropped == ("lm_head.weight",)


# What is left over, and what is refused.


def test_what_one_side_lacks_is_named_with_lines_that_settle_it() -> None:
    model = [live(f"model.layers.{n}.extra.weight", 4, 6) for n in range(2)]
    files = specs({f"model.layers.{n}.other.weight": (6, 4) for n in range(2)} | {"stray": (3,)})
    with pytest.raises(MappingError) as caught:
        determined(model, files, {})
    text = "\n".join(caught.value.evidence)
    assert "model.layers.{0...1}.extra.weight: shape [4, 6]; no canonical tensor has a matching name" in text
    assert "1) model.layers.$LAYER_ID.other.weight^T -> model.layers.$LAYER_ID.extra.weight" in text
    assert "_ -> model.layers.1.extra.weight" in text
    assert "stray -> _" in text
    line = "model.layers.0.other.weight^T -> model.layers.0.extra.weight"
    found = determined(model, files, {}, settled=[line, "stray -> _"])
    assert found.rules.dropped == ("stray",)
    assert [rule.axes for rule in found.rules.rules] == [(1, 0), (1, 0)]


def test_a_tensor_that_keeps_its_initial_values_is_settled_as_fresh() -> None:
    found = determined([live("rotary.inv_freq", 4, kind="other")], {}, {}, settled=["_ -> rotary.inv_freq"])
    assert found.rules.fresh == ("rotary.inv_freq",)


def test_names_that_agree_and_shapes_that_do_not_are_reported() -> None:
    found = derive_rules([live("a.weight", 4, 6)], stored(**{"a.weight": (5, 4)}), {})
    assert found.questions[0].lines()[0].startswith("a.weight: shape [4, 6] does not fit a.weight [5, 4]")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a.weight -> b.weight", "not a tensor of the right side"),
        ("nothing.weight^T -> a.weight", "nothing.weight"),
        ("a.weight^T -> a.weight, fused_qkv", "fused_qkv"),
        ("a.weight -> a.weight", "its value has shape"),
    ],
)
def test_a_settling_line_that_means_nothing_is_refused(line: str, why: str) -> None:
    with pytest.raises(MappingError, match=why):
        determined([live("a.weight", 4, 6)], stored(**{"a.weight": (6, 4)}), {}, settled=[line])


def test_a_hint_that_cannot_be_proved_is_reported_and_not_used() -> None:
    model, files = attention()
    prefix = ATTENTION.format(0)
    hint = [
        f"{prefix}.q_proj.weight^T, {prefix}.k_proj.weight^T, {prefix}.k_proj.weight^T -> {prefix}.qkv_proj.weight, "
        "fused_qkv, num_heads=4, num_key_value_groups=2"
    ]
    found = derive_rules(model, files, CONFIG, hint=hint)
    assert found.questions
    assert found.notes[0].startswith("the hint: not used")


@pytest.mark.parametrize("line", ["b.$LAYER_ID.weight^T -> b.$LAYER_ID.weight", "_ -> rotary.inv_freq"])
def test_a_statement_of_a_hint_that_matches_nothing_is_skipped_and_reported(line: str) -> None:
    model = [live("a.weight", 6, 6, kind="other")]
    hint = [line, "a.weight^T -> a.weight, dtype='float32'"]
    found = determined(model, stored(**{"a.weight": (6, 6)}), {}, hint=hint)
    assert len(found.notes) == 1
    assert f"skipped: `{line}`" in found.notes[0]
    assert found.reasons == {"a.weight": "the proved hint"}


def test_dtypes_of_files_are_no_obstacle_and_no_evidence() -> None:
    files = {"a.weight": TensorSpec((6, 4), "bfloat16")}
    rules = determined([live("a.weight", 4, 6)], files, {}).rules
    (item,) = rules.casting({"a.weight": "bfloat16"}).mapping({"a.weight": "bfloat16"}).correspondences
    assert item.cast == "float32"


# Every answer that is shown is what it says.


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one, id=f"{one.name} TP {one.tp}", marks=[pytest.mark.slow] * (one.family.name in MANY_QUESTIONS))
        for tp in (1, 2)
        for one in cases(tp)
        if one.fleet is not False
    ],
)
def test_every_answer_settles_its_question(case: Case) -> None:
    found = derived(case)
    for question in found.questions:
        for answer in question.answers:
            after = derived(case, settled=answer)
            assert question.names not in [one.names for one in after.questions], answer


def test_kinds_of_layers_follow_from_the_names_of_their_classes() -> None:
    names = {
        "ColumnParallelLinear": LayerKind.LINEAR,
        "Linear": LayerKind.LINEAR,
        "VocabParallelEmbedding": LayerKind.EMBEDDING,
        "Conv3D": LayerKind.CONVOLUTION,
        "Qwen3RMSNorm": LayerKind.NORM,
        "TopKGate": LayerKind.OTHER,
    }
    assert {name: kind_of_classes([name, "Layer", "object"]) for name in names} == names


def test_what_is_measured_can_be_something_else() -> None:
    case = cases(1)[0]
    found: Any = derived(case)
    rules = tuple(structs.replace(rule, sources=tuple(reversed(rule.sources))) for rule in found.rules.rules[1:])
    assert verdict(case, replace(found, rules=replace(found.rules, rules=rules))) == OTHER

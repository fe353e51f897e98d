"""Every family: it is proved, its text is what Paddle's own engine reads, and its mapping stays the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from paddleformers_fc.aoa import parse, with_ties
from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import Family, ModelDescription, ModelTensor, bind, enumerate_tensors, prove_family
from paddleformers_fc.families.description import ALTERNATES, IS_NLP
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.formats.aoa_statements import aoa_statements, aoa_text
from paddleformers_fc.mapping import Shape, TensorMapping, prove
from tests.aoa import stock
from tests.aoa.spaces import normal, side_of
from tests.families.spaces import BY_NAME
from tests.mapping.numbers import moved, numbered

DEGREES = (1, 2, 4)
LLAMA = BY_NAME["llama"]


class Model:
    """A family's tiny model under a tensor-parallel degree."""

    def __init__(self, name: str, degree: int = 1, **changes: Any) -> None:
        self.family = BY_NAME[name]
        described = tiny_models(self.family)[0]
        self.described = structs.replace(described, config={**described.config, **changes})
        self.tensors = [tensor.under(tp=degree) for tensor in enumerate_tensors(self.family, self.described)]
        self.rules = bind(self.family, self.described, self.tensors)
        self.mapping = with_ties(self.rules)
        self.cuts: dict[str, Shape] = {tensor.name: tensor.cuts for tensor in self.tensors}

    def text(self, reverse: bool = False) -> list[str]:
        return aoa_text(self.family, self.described, self.tensors, reverse=reverse)

    def sides(self, reverse: bool = False) -> tuple[stock.Tensors, stock.Tensors]:
        """The left and the right side of its text."""
        files, live = side_of(self.mapping.sources), side_of(self.mapping.targets, self.cuts)
        return (live, files) if reverse else (files, live)


def agree(statements: list[str], mapping: TensorMapping, left: stock.Tensors, right: stock.Tensors) -> None:
    """Paddle's slices, our reading of the text, and the mapping are one; and they move the same numbers."""
    entries = stock.plan(statements, left, right)
    assert stock.correspondences(entries) == normal(mapping)
    assert normal(parse(statements, left, right)) == normal(mapping)
    arrays = numbered(mapping)
    ours, theirs = moved(mapping, arrays), stock.moved(entries, arrays, right)
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert all((ours[name] >= 0).all() for name in ours if name not in mapping.fresh)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_family_is_proved_and_paddle_reads_its_text_as_the_family_means_it(name: str) -> None:
    assert prove_family(BY_NAME[name]) > 10
    for degree in DEGREES:
        one = Model(name, degree)
        prove(one.mapping)
        agree(one.text(), one.mapping, *one.sides())
        agree(one.text(reverse=True), one.mapping.reversed(), *one.sides(reverse=True))


PER_RANK = "qwen3_5"
"""Each rank holds several parts of one file side by side, which AOA cannot state without their number."""


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "qwen3_5_moe"])
def test_printed_text_holds_on_any_number_of_ranks_or_needs_their_number(name: str, reverse: bool) -> None:
    texts = {degree: Model(name, degree).text(reverse) for degree in (1, 2)}
    for degree in texts:
        assert aoa_statements(name, reverse=reverse, toy=True, tp=degree).aoa_statements == texts[degree]
    if name != PER_RANK:
        assert texts[1] == texts[2] == aoa_statements(name, reverse=reverse, toy=True).aoa_statements
        return
    with pytest.raises(OptionError, match="depend on the degree of tensor parallelism") as caught:
        aoa_statements(name, reverse=reverse, toy=True)
    assert "--tp 2" in caught.value.next_step
    # Paddle reads the text of one rank as another mapping of two.
    two = Model(name, 2)
    wanted = two.mapping.reversed() if reverse else two.mapping
    assert stock.correspondences(stock.plan(texts[1], *two.sides(reverse))) != normal(wanted)


def test_the_text_of_llama_is_what_a_person_writes_for_any_number_of_layers() -> None:
    layer = "model.layers.$LAYER_ID"
    linear = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    expected = {f"{layer}.{name}_proj.weight^T -> {layer}.{name}_proj.weight" for name in linear}
    for reverse in (False, True):
        assert set(aoa_statements("llama", reverse=reverse, toy=True).aoa_statements) == expected
        assert set(Model("llama", num_hidden_layers=9).text(reverse)) == expected


def test_a_tied_head_is_written_to_keep_its_owners_memory_and_no_tensor_is_left_out() -> None:
    model = ModelDescription({**LLAMA.tiny, "tie_word_embeddings": True})
    tensors = [tensor.under() for tensor in enumerate_tensors(LLAMA, model)]
    if not any(tensor.name == "lm_head.weight" for tensor in tensors):
        tensors.append(structs.replace(next(one for one in tensors if "embed" in one.name), name="lm_head.weight"))
    assert "_ -> lm_head.weight" in aoa_text(LLAMA, model, tensors)
    assert "lm_head.weight -> _" in aoa_text(LLAMA, model, tensors, reverse=True)
    strange = [ModelTensor(f"model.layers.{layer}.strange", (2, 2), "float32", (1, 1)) for layer in range(3)]
    with pytest.raises(MappingError) as caught:
        aoa_text(LLAMA, model, [*tensors, *strange])
    (line,) = caught.value.evidence
    assert line.startswith("model.layers.{0...2}.strange: no statement of family llama declares")


# ---- Checkpoints and open weights of earlier versions keep their meaning.

CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tie_word_embeddings": True},
    {"fd_fallback": True},
    {"moe_expert_fusion": True, "num_hidden_layers": 4},
    {"num_nextn_predict_layers": 1, "n_shared_experts": 1, "mlp_only_layers": [0], "q_lora_rank": 0},
    {"attention_bias": True, "use_bias": True, "mlp_bias": True, "lm_head_bias": True, "moe_expert_fusion": False},
    {"using_sonic_moe": True, "num_nextn_predict_layers": 1},
    {"using_sonic_moe": True, "num_nextn_predict_layers": 1, ALTERNATES: True},
    {"fuse_attention_qkv": True, "fuse_attention_ffn": True, "attention_bias": True, "mlp_bias": True},
)
DIGESTS: dict[str, str] = json.loads(Path(__file__).with_name("digests.json").read_text())


def digest(family: Family, tiny_ones: list[ModelDescription]) -> str:
    """A digest of optional names and of tensors and rules of tiny models, under 1, 2 and 4 tensor-parallel ranks."""
    lines = [*family.optional]
    for tiny in tiny_ones:
        for change in CHANGES:
            model = ModelDescription({**tiny.config, **change}, tiny.is_fleet)
            declared = sorted(enumerate_tensors(family, model), key=lambda one: one.name)
            lines += [f"{one.name} {one.shape} {one.dtype} {one.cut} {one.expert_axis}" for one in declared]
            for tp in DEGREES:
                rules = bind(family, model, [one.under(tp) for one in declared])
                lines += [repr(one) for one in (*sorted(rules.rules, key=repr), rules.ties, sorted(rules.fresh))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", BY_NAME)
def test_the_mapping_of_a_family_does_not_change(name: str) -> None:
    family, models = BY_NAME[name], tiny_models(BY_NAME[name])
    assert digest(family, [one for one in models if IS_NLP not in one.config]) == DIGESTS[name]
    for model in models:
        if IS_NLP in model.config:
            assert digest(family, [model]) == DIGESTS[f"{name}, PaddleNLP"]

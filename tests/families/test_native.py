"""PaddleFormers' own statements, carried out by Paddle's engine: equal, or a fault of theirs that is named.

The two share nothing: theirs are hand-written lists, forward and inverse apart, and Paddle's engine turns them into
slices; ours follow from one declaration. Real numbers go through both.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.families.description import ALTERNATES, STACK_OF_FFN
from tests.aoa import stock
from tests.aoa.spaces import side_of
from tests.families import native
from tests.families.spaces import BY_NAME, differing, settings, spaces, tensors
from tests.mapping.numbers import Arrays, moved
from verification.forkserver import ForkServer

logging.getLogger("paddle.distributed.flex_checkpoint.aoa.aoa_engine").setLevel(logging.CRITICAL)

DEGREES = (1, 2, 4)

FLEET, PLAIN = {"is_fleet": True}, {"is_fleet": False}
NO_MTP = {"num_nextn_predict_layers": 0}
TIED = {"tie_word_embeddings": True}
ALL_SPARSE = {"mlp_only_layers": []}

AGREE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5_moe", {**NO_MTP, "moe_use_aux_free": False}),
    ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
    ("gpt_oss", {}),
    ("qwen2", PLAIN),
    ("qwen2", {**FLEET, "tie_word_embeddings": True}),
    ("qwen3", FLEET),
    ("qwen3", PLAIN),
    ("qwen2_moe", FLEET),
    ("qwen2_moe", {**PLAIN, "fd_fallback": True}),
    ("qwen3_moe", {**PLAIN, **ALL_SPARSE}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "moe_expert_fusion": True}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "using_sonic_moe": True}),
    ("glm4_moe", FLEET),
    ("glm4_moe", {**FLEET, "moe_expert_fusion": True, "tie_word_embeddings": True}),
    # Their statements count empty layers in both classes, and only that of PaddleFleet has any.
    ("glm4_moe", {**PLAIN, **NO_MTP, "num_empty_layers_add_in_head": 0}),
    ("deepseek_v3", {**NO_MTP, "attention_bias": True}),
    ("deepseek_v4", {}),
    ("deepseek_v4", {"moe_expert_fusion": True, "num_empty_layers_add_in_head": 2, "n_shared_experts": 0}),
    ("deepseek_v4", {"tie_word_embeddings": True, **NO_MTP}),
    ("deepseek_v4", {"moe_n_hash_layers": 3, "csa_compress_ratios": [8, 0, 4, 0]}),
    ("minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True, "n_shared_experts": 1}),
    ("minimax_m2", {"v_head_dim": 8, "use_dense_mtp": True, "num_empty_layers_add_in_head": 2}),
]

FULL_FIRST = ["full_attention", "linear_attention"]
# Stock cuts the channels of a delta net into heads of one size. Of a dense model it leaves out the prediction layers.
EQUAL_HEADS = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "layer_types": FULL_FIRST[::-1]}
NO_PREDICTION = {**EQUAL_HEADS, "mtp_num_hidden_layers": 0}
TEXT_MOE = {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8, "mlp_only_layers": []}
LOADED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", TIED),
    ("qwen3_vl", FLEET),
    ("qwen3_vl", PLAIN),
    ("qwen3_vl_moe", {**FLEET, "text_config": TEXT_MOE, "moe_expert_fusion": True}),
    ("qwen3_vl_moe", {**PLAIN, "text_config": TEXT_MOE, "moe_expert_fusion": True}),
    ("qwen3_next", {}),
    ("glm4v_moe", {}),
    ("glm_ocr", {}),
    ("paddleocr_vl", {}),
    ("qwen3_5", {"text_config": NO_PREDICTION}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "attn_output_gate": False}, **TIED}),
    ("qwen3_5", {"text_config": {**NO_PREDICTION, "linear_num_key_heads": 8, "num_key_value_heads": 8}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": EQUAL_HEADS}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "attn_output_gate": False}}),
    ("qwen3_5_moe", {"moe_expert_fusion": True, "text_config": {**EQUAL_HEADS, "layer_types": FULL_FIRST}, **TIED}),
]
"""Models of which the load alone is compared."""


def config_of(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny configuration with changes; that of a text is completed."""
    tiny = settings(BY_NAME[name])
    nested = {"text_config": {**tiny["text_config"], **changes["text_config"]}} if "text_config" in changes else {}
    return {**tiny, **changes, **nested}


class Theirs:
    """What PaddleFormers' statements make of the spaces of one model, beside what ours do."""

    def __init__(self, name: str, changes: dict[str, Any], tp: int) -> None:
        self._name, self._config = name, config_of(name, changes)
        rules, self.canonical, self.model = spaces(BY_NAME[name], self._config, tp)
        assert differing(self.canonical, moved(rules.mapping().reversed(), self.model)) == []
        cuts = {tensor.name: tensor.cuts for tensor in tensors(BY_NAME[name], self._config, tp)}
        self._files, self._live = side_of(rules.mapping().sources), side_of(rules.targets, cuts)

    @property
    def loaded(self) -> Arrays:
        """The model by their statements."""
        return stock.made(self._statements(inverse=False), self.canonical, self._files, self._live)

    @property
    def exported(self) -> Arrays:
        """The canonical tensors by their statements."""
        return stock.made(self._statements(inverse=True), self.model, self._live)

    def _statements(self, inverse: bool) -> list[str]:
        fleet = bool(self._config.get("is_fleet", self._name in ("kimi_k2", "minimax_m2")))
        return native.statements(self._name, self._config, inverse=inverse, fleet=fleet)


@pytest.mark.parametrize(("name", "changes"), [*AGREE, *LOADED], ids=str)
def test_load_and_export_are_those_of_stock_where_stock_is_right(name: str, changes: dict[str, Any]) -> None:
    both = (name, changes) in AGREE
    for tp in DEGREES if both else (1, 2):
        theirs = Theirs(name, changes, tp)
        assert differing(theirs.model, theirs.loaded) == []
        assert not both or differing(theirs.canonical, theirs.exported) == []


LATENT = {"multi_latent_attention": True, "use_qk_norm": True, **NO_MTP}
FEW_EXPERTS = {**LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 2}
SONIC = {"v_head_dim": 8, "moe_expert_fusion": True, "using_sonic_moe": True}
NO_EMPTY = {**NO_MTP, "num_empty_layers_add_in_head": 0}
WRONG: list[tuple[str, dict[str, Any], tuple[int, ...], str, str]] = [
    # The statements of experts have a pattern for their number, which does not match the halves that one of them makes.
    *(
        (name, changes, DEGREES, "", r"\.mlp\.experts\.")
        for name in ("glm_moe_dsa", "deepseek_v32")
        for changes in (LATENT, {**LATENT, "moe_expert_fusion": False}, FEW_EXPERTS)
    ),
    # The inverse statements of the feed-forward name layer 0 and no other.
    ("gemma3_text", {}, DEGREES, "", r"layers\.1\.mlp\.(gate|up)_proj"),
    # The embedding is copied onto the head, and the head dropped at export, without a look at tie_word_embeddings.
    ("gemma3_text", {"tie_word_embeddings": False}, (1,), r"^lm_head", r"^lm_head|layers\.1\.mlp"),
    # A transpose in front of fused_ffn: the engine forgets that the source is sharded.
    ("phi3", {}, (1,), "", ""),
    ("phi3", {}, (2, 4), "", r"mlp\.gate_up_proj"),
    # Fused per rank at load, split in two halves at export.
    ("kimi_k2", {}, (1,), "", ""),
    ("kimi_k2", {}, (2, 4), "", r"(0\.mlp|1\.mlp\.shared_experts)\.(gate|up)_proj"),
    # No statement names eh_proj, so that [2h, h] and [h, 2h] are taken for one another.
    ("deepseek_v3", {}, (1,), r"layers\.2\.eh_proj", r"layers\.2\.eh_proj"),
    # The load goes by mtp_num_layers, the export by num_nextn_predict_layers.
    ("glm4_moe", {"mtp_num_layers": 1, **NO_EMPTY}, (1,), "", r"layers\.2\."),
    # Without the transpose, nothing renames the split experts: from the model's layer, and of MiniMax to w2.
    ("glm4_moe", {"using_sonic_moe": True}, (1,), "", r"\.mlp\.experts\."),
    ("minimax_m2", SONIC, (1,), "", r"\.experts\."),
]
"""Models, degrees, and the names of all tensors that stock loads and exports with other numbers than ours."""


@pytest.mark.parametrize(("name", "changes", "degrees", "load", "export"), WRONG, ids=str)
def test_load_and_export_differ_from_stock_where_stock_is_wrong(
    name: str, changes: dict[str, Any], degrees: tuple[int, ...], load: str, export: str
) -> None:
    for tp in degrees:
        theirs = Theirs(name, changes, tp)
        loaded, exported = differing(theirs.model, theirs.loaded), differing(theirs.canonical, theirs.exported)
        for differ, pattern in ((loaded, load), (exported, export)):
            assert bool(differ) is bool(pattern)
            assert [one for one in differ if not re.search(pattern, one)] == []


ALTERNATING = [
    ("qwen3_moe", ALL_SPARSE),
    ("glm4_moe", {}),
    ("minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True}),
]


@pytest.mark.parametrize(("name", "changes"), ALTERNATING, ids=str)
def test_alternating_rows_of_experts_are_those_of_stock_statements_and_callback(
    ranks: ForkServer, name: str, changes: dict[str, Any]
) -> None:
    changes = {**FLEET, **changes, "using_sonic_moe": True}
    theirs = Theirs(name, changes, 1)
    config = settings(BY_NAME[name], **changes, **{ALTERNATES: True})
    rules, canonical, model = spaces(BY_NAME[name], config)
    assert differing(theirs.canonical, canonical) == []
    assert differing(canonical, moved(rules.mapping().reversed(), model)) == []
    loaded = theirs.loaded
    stacks = {one: array for one, array in loaded.items() if one.endswith(STACK_OF_FFN)}
    width = config["moe_intermediate_size"]
    kwargs = {"stacks": {one: array.tolist() for one, array in stacks.items()}, "width": width}
    (made,) = ranks.run("tests.trainer.alternating_jobs:upstream_rows", 1, kwargs).values
    alternating = {one: np.array(made[one][0]).reshape(model[one].shape) for one in stacks}
    assert stacks
    assert differing({**loaded, **alternating}, model) == []
    # PaddleFormers' export undoes it, before its statements apply.
    assert differing(stacks, {one: np.array(made[one][1]) for one in stacks}) == []

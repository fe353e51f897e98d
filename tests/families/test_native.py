"""PaddleFormers' own statements, carried out by stock FlexCheckpoint: equal, or a fault of theirs that is named.

The two share nothing: theirs are hand-written lists, forward and inverse apart, and Paddle's engine turns them into
slices; ours follow from one declaration. Real numbers go through both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from paddleformers_fc.families.declarations import Geometry
from paddleformers_fc.families.description import ALTERNATES, STACK_OF_FFN
from tests.families import native
from tests.families.spaces import BY_NAME, described, differing, gathered, model_of, settings, spaces, tensors
from tests.mapping.numbers import Arrays, moved
from tests.parity.judging import HEADERS, PROOF, Space
from tests.parity.mutations import Mutant, mutants
from verification.forkserver import ForkServer

DEGREES = (1, 2, 4)

FLEET, PLAIN = {"is_fleet": True}, {"is_fleet": False}
NO_MTP = {"num_nextn_predict_layers": 0}
ALL_SPARSE = {"mlp_only_layers": []}

LATENT = {"multi_latent_attention": True, "use_qk_norm": True}
DSA: list[dict[str, Any]] = [{}, {"moe_expert_fusion": False}, {"num_hidden_layers": 3, "first_k_dense_replace": 2}]

AGREE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("ernie4_5", {}),
    ("ernie4_5", {"tie_word_embeddings": False}),
    ("ernie4_5_moe", NO_MTP),
    ("ernie4_5_moe", {**NO_MTP, "moe_use_aux_free": False}),
    ("ernie4_5_moe", {"num_nextn_predict_layers": 1}),
    ("gpt_oss", {}),
    ("qwen2", FLEET),
    ("qwen2", PLAIN),
    ("qwen2", {**FLEET, "tie_word_embeddings": True}),
    ("qwen3", FLEET),
    ("qwen3", PLAIN),
    ("qwen2_moe", FLEET),
    ("qwen2_moe", PLAIN),
    ("qwen2_moe", {**PLAIN, "fd_fallback": True}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE}),
    ("qwen3_moe", {**PLAIN, **ALL_SPARSE}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "moe_expert_fusion": True}),
    ("qwen3_moe", {**FLEET, **ALL_SPARSE, "using_sonic_moe": True}),
    ("qwen3_moe", {**PLAIN, **ALL_SPARSE, "fd_fallback": True}),
    ("glm4_moe", FLEET),
    ("glm4_moe", {**FLEET, "moe_expert_fusion": True, "tie_word_embeddings": True}),
    # Their statements count empty layers in both classes, and only that of PaddleFleet has any.
    ("glm4_moe", {**PLAIN, **NO_MTP, "num_empty_layers_add_in_head": 0}),
    ("glm4_moe", {**PLAIN, **NO_MTP, "num_empty_layers_add_in_head": 0, "fd_fallback": True}),
    ("deepseek_v3", NO_MTP),
    ("deepseek_v3", {**NO_MTP, "attention_bias": True}),
    ("deepseek_v4", {}),
    ("deepseek_v4", {"moe_expert_fusion": True, "num_empty_layers_add_in_head": 2, "n_shared_experts": 0}),
    ("deepseek_v4", {"tie_word_embeddings": True, **NO_MTP}),
    ("deepseek_v4", {"moe_n_hash_layers": 3, "csa_compress_ratios": [8, 0, 4, 0]}),
    ("minimax_m2", {"v_head_dim": 8}),
    ("minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True, "n_shared_experts": 1}),
    ("minimax_m2", {"v_head_dim": 8, "use_dense_mtp": True, "num_empty_layers_add_in_head": 2}),
]


class Theirs:
    """What PaddleFormers' statements make of the spaces of one model, beside what ours do."""

    def __init__(self, ranks: ForkServer, name: str, changes: dict[str, Any], tp: int) -> None:
        (self.load, self.export), self.canonical, self.model = _carried_out(ranks, name, changes, (tp,))[0]

    @property
    def loaded(self) -> Arrays:
        """The model by their statements."""
        return gathered(self.load["outputs"], self.canonical)

    @property
    def exported(self) -> Arrays:
        """The canonical tensors by their statements."""
        return gathered(self.export["outputs"], self.model)


Outcome = tuple[tuple[dict[str, Any], dict[str, Any]], Arrays, Arrays]


def _carried_out(ranks: ForkServer, name: str, changes: dict[str, Any], degrees: tuple[int, ...]) -> list[Outcome]:
    """Their load and their export under every degree, with our canonical and model tensors."""
    family = BY_NAME[name]
    config = settings(family, **changes)
    fleet = bool(config.get("is_fleet", name in ("kimi_k2", "minimax_m2")))
    # DeepSeek V3.2 adds dtypes to the statements of norms.
    attributes = {"_inject_norm_dtype": lambda *_: None}
    forward, inverse = (
        native.statements(name, config, inverse=way, fleet=fleet, **attributes) for way in (False, True)
    )
    arrays, runs = [], []
    for tp in degrees:
        rules, canonical, model = spaces(family, config, tp)
        assert differing(canonical, moved(rules.mapping().reversed(), model)) == []
        live = described(rules.targets, {tensor.name: tensor.cuts for tensor in tensors(family, config, tp)})
        runs.append({"statements": forward, "sources": described(rules.mapping().sources), "targets": live})
        runs.append({"statements": inverse, "sources": live})
        arrays.append((canonical, model))
    (values,) = ranks.run("tests.families.jobs:stock_runs", 1, {"runs": runs}).values
    return [((values[2 * i], values[2 * i + 1]), *arrays[i]) for i in range(len(degrees))]


@pytest.mark.parametrize(("name", "changes"), AGREE, ids=str)
def test_load_and_export_are_those_of_stock_where_stock_is_right(
    ranks: ForkServer, name: str, changes: dict[str, Any]
) -> None:
    for (load, export), canonical, model in _carried_out(ranks, name, changes, DEGREES):
        assert differing(model, gathered(load["outputs"], canonical)) == []
        assert differing(canonical, gathered(export["outputs"], model)) == []


@pytest.mark.parametrize("changes", DSA, ids=str)
@pytest.mark.parametrize("name", ["glm_moe_dsa", "deepseek_v32"])
def test_glm_5_and_deepseek_v32_export_their_experts_where_stock_does_not_transpose_them(
    ranks: ForkServer, name: str, changes: dict[str, Any]
) -> None:
    # The statements of experts have a pattern for their number, which does not match the halves that one of them makes.
    for (load, export), canonical, model in _carried_out(ranks, name, {**LATENT, **NO_MTP, **changes}, DEGREES):
        assert differing(model, gathered(load["outputs"], canonical)) == []
        exported = gathered(export["outputs"], model)
        differ = differing(canonical, exported)
        assert differ
        assert all(".mlp.experts." in one for one in differ)
        if "moe_expert_fusion" in changes:
            assert all(np.array_equal(exported[one], canonical[one].T) for one in differ)


@pytest.mark.parametrize(
    "siblings", [("alpha_post", "alpha_pre", "alpha_res"), ("alpha_pre", "alpha_res", "alpha_post")]
)
def test_factors_of_deepseek_v4_in_another_order_are_noticed(ranks: ForkServer, siblings: tuple[str, ...]) -> None:
    theirs, family = Theirs(ranks, "deepseek_v4", {}, 1), BY_NAME["deepseek_v4"]
    wrong = tuple(structs.replace(one, siblings=siblings) if one.siblings else one for one in family.statements)
    _, canonical, model = spaces(structs.replace(family, statements=wrong), settings(family))
    assert differing(canonical, theirs.canonical) == []
    changed = {one.rpartition(".")[2] for one in differing(model, theirs.loaded)}
    assert changed == {
        one for one, other in zip(siblings, ("alpha_pre", "alpha_post", "alpha_res"), strict=True) if one != other
    }


@pytest.mark.parametrize("tp", DEGREES)
def test_gemma3_exports_its_later_layers_where_stock_leaves_them_fused(ranks: ForkServer, tp: int) -> None:
    # The inverse statements of the feed-forward name layer 0 and no other.
    theirs = Theirs(ranks, "gemma3_text", {}, tp)
    assert differing(theirs.model, theirs.loaded) == []
    exported = theirs.exported
    ffn = "model.layers.1.mlp"
    assert differing(theirs.canonical, exported) == [f"{ffn}.gate_proj.weight", f"{ffn}.up_proj.weight"]
    assert exported[f"{ffn}.up_gate_proj.weight"].shape == theirs.model[f"{ffn}.up_gate_proj.weight"].shape


def test_an_untied_gemma3_keeps_its_head_where_stock_overwrites_it(ranks: ForkServer) -> None:
    # The embedding is copied onto the head, and the head dropped at export, without a look at tie_word_embeddings.
    theirs = Theirs(ranks, "gemma3_text", {"tie_word_embeddings": False}, 1)
    assert differing(theirs.model, theirs.loaded) == ["lm_head.weight"]
    assert "lm_head.weight" not in theirs.exported


@pytest.mark.parametrize("tp", [2, 4])
def test_phi3_under_tensor_parallelism_exports_gate_and_up_where_stock_mixes_them(ranks: ForkServer, tp: int) -> None:
    # A transpose in front of fused_ffn: the engine forgets that the source is sharded.
    assert differing(*_export(Theirs(ranks, "phi3", {}, 1))) == []
    theirs = Theirs(ranks, "phi3", {}, tp)
    assert differing(theirs.model, theirs.loaded) == []
    layers = [f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in range(2)]
    assert differing(*_export(theirs)) == layers


def _export(theirs: Theirs) -> tuple[Arrays, Arrays]:
    return theirs.canonical, theirs.exported


@pytest.mark.parametrize("tp", [2, 4])
def test_kimi_k2_under_tensor_parallelism_exports_gate_and_up_where_stock_mixes_them(
    ranks: ForkServer, tp: int
) -> None:
    # Fused per rank at load, split in two halves at export.
    assert differing(*_export(Theirs(ranks, "kimi_k2", {}, 1))) == []
    theirs = Theirs(ranks, "kimi_k2", {}, tp)
    assert differing(theirs.model, theirs.loaded) == []
    parts = ["0.mlp.gate_proj", "0.mlp.up_proj", "1.mlp.shared_experts.gate_proj", "1.mlp.shared_experts.up_proj"]
    assert differing(*_export(theirs)) == [f"model.layers.{part}.weight" for part in parts]


def test_deepseek_v3_turns_the_projection_of_its_prediction_layer_which_stock_does_not(ranks: ForkServer) -> None:
    # No statement names eh_proj, so that [2h, h] and [h, 2h] are taken for one another.
    theirs = Theirs(ranks, "deepseek_v3", {}, 1)
    assert differing(theirs.model, theirs.loaded) == ["model.layers.2.eh_proj.weight"]
    assert differing(*_export(theirs)) == ["model.layers.2.eh_proj.weight"]


def test_glm4_moe_exports_its_prediction_layer_where_stock_looks_at_another_setting(ranks: ForkServer) -> None:
    # The load goes by mtp_num_layers, the export by num_nextn_predict_layers.
    theirs = Theirs(ranks, "glm4_moe", {"mtp_num_layers": 1, **NO_MTP, "num_empty_layers_add_in_head": 0}, 1)
    assert differing(theirs.model, theirs.loaded) == []
    assert "model.layers.2.shared_head.norm.weight" in differing(*_export(theirs))


def test_glm4_moe_exports_experts_kept_as_stored_where_stock_keeps_the_models_layer_number(ranks: ForkServer) -> None:
    # Without the transpose, nothing renames the split experts from the model's layer number to the canonical one.
    theirs = Theirs(ranks, "glm4_moe", {"using_sonic_moe": True}, 1)
    assert differing(theirs.model, theirs.loaded) == []
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in differing(*_export(theirs))


def test_minimax_m2_exports_experts_kept_as_stored_where_stock_forgets_their_names(ranks: ForkServer) -> None:
    # Without the transpose, nothing renames the experts' second layer to w2.
    theirs = Theirs(ranks, "minimax_m2", {"v_head_dim": 8, "moe_expert_fusion": True, "using_sonic_moe": True}, 1)
    assert differing(theirs.model, theirs.loaded) == []
    assert "model.layers.0.block_sparse_moe.experts.0.w2.weight" in differing(*_export(theirs))


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
    theirs = Theirs(ranks, name, changes, 1)
    config = settings(BY_NAME[name], **changes, **{ALTERNATES: True})
    rules, canonical, model = spaces(BY_NAME[name], config)
    assert differing(theirs.canonical, canonical) == []
    assert differing(canonical, moved(rules.mapping().reversed(), model)) == []
    stacks = {one: array for one, array in theirs.loaded.items() if one.endswith(STACK_OF_FFN)}
    width = config["moe_intermediate_size"]
    kwargs = {"stacks": {one: array.tolist() for one, array in stacks.items()}, "width": width}
    (made,) = ranks.run("tests.trainer.alternating_jobs:upstream_rows", 1, kwargs).values
    alternating = {one: np.array(made[one][0]).reshape(model[one].shape) for one in stacks}
    assert stacks
    assert differing({**theirs.loaded, **alternating}, model) == []
    # PaddleFormers' export undoes it, before its statements apply.
    assert differing(stacks, {one: np.array(made[one][1]) for one in stacks}) == []
    # A declaration of another order is noticed: up before gate, gate above up as PaddleFormers loads them.
    wrong = [one for one in mutants(BY_NAME[name]) if _of_alternating(one)]
    space = Space(BY_NAME[name], model_of(config), 1, canonical)
    verdicts = {one.kind: space.refusal(one) for one in wrong}
    assert verdicts.keys() >= {"order of parts", "layout", "stack", "uninitialised"}
    assert all(
        found in (PROOF, HEADERS) if isinstance(found, str) else differing(found, model) for found in verdicts.values()
    )


def _of_alternating(mutant: Mutant) -> bool:
    """Whether the declaration of alternating rows, and no other one, is wrong. They are never transposed."""
    pairs = zip(BY_NAME[mutant.family.name].statements, mutant.family.statements, strict=True)
    changed = [one.geometry for one, other in pairs if one != other]
    return mutant.kind != "transpose" and changed == [Geometry.ALTERNATING_FFN]


RAISES: list[tuple[str, dict[str, Any], str, str]] = [
    ("ernie4_5_moe", {**NO_MTP, "moe_num_shared_experts": 0}, "export", "shared_experts"),
    ("ernie4_5_moe", {**NO_MTP, "moe_layer_end_index": 1}, "export", "layers.2.mlp"),
    ("ernie4_5_moe", {**NO_MTP, "moe_layer_interval": 2}, "export", "layers.2.mlp"),
    ("ernie4_5_moe", {"moe_layer_start_index": 0}, "load", "mtp_block.0.mlp"),
    ("ernie4_5_moe", {"moe_layer_start_index": 0}, "export", "mtp_block.0.mlp"),
    ("ernie4_5", {"mlp_bias": True}, "load", "up_gate_proj.bias"),
    ("qwen3_moe", {}, "load", "layers.0.mlp.up_gate_proj"),
    ("qwen3_moe", {}, "export", "layers.0.mlp.experts.0"),
    ("qwen3_moe", PLAIN, "export", "layers.0.mlp.experts.0"),
    ("qwen3_moe", {**ALL_SPARSE, "tie_word_embeddings": True}, "load", "lm_head"),
    ("qwen2_moe", {"mlp_only_layers": [0]}, "export", "layers.0.mlp"),
    ("qwen2_moe", {"moe_expert_fusion": True}, "load", "grouped_gemm_experts"),
    ("phi3", {"tie_word_embeddings": True}, "load", "lm_head"),
    ("deepseek_v3", {**NO_MTP, "tie_word_embeddings": True}, "load", "lm_head"),
    ("deepseek_v3", {**NO_MTP, "fd_fallback": True}, "load", "experts.gate_up_proj"),
    ("deepseek_v3", {**NO_MTP, "q_lora_rank": None}, "load", "q_a_layernorm"),
    ("kimi_k2", {"num_hidden_layers": 3, "first_k_dense_replace": 2}, "load", "layers.1"),
    ("kimi_k2", {"num_nextn_predict_layers": 1}, "load", "transformer_layer"),
]


@pytest.mark.parametrize(("name", "changes", "way", "named"), RAISES, ids=str)
def test_what_stock_refuses_goes_both_ways(
    ranks: ForkServer, name: str, changes: dict[str, Any], way: str, named: str
) -> None:
    # Our way there and back is a part of this, under every degree.
    for (load, export), _, _ in _carried_out(ranks, name, changes, DEGREES):
        found = load if way == "load" else export
        assert named in found.get("error", "nothing")


def test_stock_refuses_files_of_ernie_without_the_prediction_blocks_of_the_model(ranks: ForkServer) -> None:
    # One block is what the configuration class says by default, and none what Hugging Face's library writes. Ours keeps
    # the initial values of the blocks: see the tests of optional names.
    family = BY_NAME["ernie4_5_moe"]
    file, config = (settings(family, tie_word_embeddings=False, num_nextn_predict_layers=depth) for depth in (0, 1))
    run = {
        "statements": native.statements("ernie4_5_moe", config, inverse=False),
        "sources": described(spaces(family, file)[0].mapping().sources),
        "targets": described(spaces(family, config)[0].targets),
    }
    (found,) = ranks.run("tests.families.jobs:stock_outputs", 1, run).values
    assert "model.mtp_" in found["error"]

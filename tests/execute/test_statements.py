"""A user's statements between models that were declared, over simulated ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddleformers_fc.distributed.channel import Channel
from paddleformers_fc.errors import MappingError, MismatchError
from paddleformers_fc.execute.load import load_checkpoint
from paddleformers_fc.execute.opening import open_on_all_ranks
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.plan.simulate import SimulatedModel
from tests.execute.simulated import succeed
from tests.families.spaces import model_of
from verification import simulate_ranks
from verification.simulate_ranks import save_model

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 32,
    "tie_word_embeddings": False,
}
LLAMA = {**TINY, "model_type": "llama"}
FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}
GLM = {
    **TINY,
    "model_type": "glm4_moe",
    "is_fleet": True,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 0,
}
NORM = "model.norm.weight"


def laid_out(grid: str, config: Mapping[str, Any]) -> SimulatedModel:
    """A tiny model in bfloat16 over a grid."""
    return simulate_ranks.laid_out(model_of(config), grid)


def load_with(
    directory: Path, model: SimulatedModel, statements: Sequence[str], reverse: bool = False, **options: Any
) -> list[simulate_ranks.Roles]:
    """What every rank holds after a load with statements; what is not loaded stays 7."""

    def sevens(role: str, shard: Shard) -> simulate_ranks.Array:
        return np.full_like(simulate_ranks.value_of(role, shard), 7)

    def work(channel: Channel) -> simulate_ranks.Roles:
        held = simulate_ranks.filled(model.roles(channel.rank), sevens)
        stated = {"aoa_statements": list(statements), "aoa_config_reverse": reverse}
        opened = open_on_all_ranks(directory, channel)
        load_checkpoint(opened, held, model.model, channel, aoa_config=stated, **options)
        return held

    return succeed(model.grid.world_size, work)


def bits(held: Sequence[simulate_ranks.Roles]) -> list[tuple[str, str, bytes]]:
    """The bits of every weight and state, rank by rank."""
    ranks = [(role, names) for roles in held for role, names in roles.items()]
    return [(role, name, one.local_tensor.array.tobytes()) for role, names in ranks for name, one in names.items()]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        pytest.param({**LLAMA, **FUSED}, LLAMA, id="fused layers for single ones"),
        pytest.param(LLAMA, {**LLAMA, **FUSED}, id="single layers for fused ones"),
        pytest.param(GLM, {**GLM, "num_empty_layers_add_in_head": 1}, id="layers counted from another one"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [("tp=2", "pp=2"), ("sharding=2,stage=3", "tp=2")])
def test_mappings_without_a_statement_are_derived_if_the_models_names_differ(
    tmp_path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], before: str, after: str
) -> None:
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out(before, stored)),
        laid_out(after, wanted),
    )
    found = load_with(checkpoint, model, [f"{NORM} -> {NORM}"])
    assert bits(found) == bits(simulate_ranks.load(checkpoint, model))


def test_a_tensor_that_a_statement_removes_is_not_derived(tmp_path: Path) -> None:
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out("tp=2", {**LLAMA, **FUSED})),
        laid_out("tp=2", LLAMA),
    )
    with pytest.raises(MappingError, match=r"model.layers.0.mlp.gate_proj.weight: \[0:16, 0:32\] is not written"):
        load_with(checkpoint, model, ["model.layers.0.mlp.gate_up_fused_proj.weight -> _"])


@pytest.mark.parametrize(
    ("attribute", "is_right"),
    [
        ("fused_qkv, num_heads=8, num_key_value_groups=4", True),
        # Query heads per kv head, which the attribute's name says.
        ("fused_qkv, num_heads=8, num_key_value_groups=2", False),
        ("fused_qkv, num_heads=16, num_key_value_groups=8", False),
        ("axis=1", False),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_heads_that_would_mix_queries_with_keys_are_refused(
    tmp_path: Path, attribute: str, is_right: bool, reverse: bool
) -> None:
    fused, single = {**LLAMA, **FUSED}, LLAMA
    stored, wanted = (fused, single) if reverse else (single, fused)
    checkpoint, model = (
        save_model(tmp_path / "checkpoint-1", laid_out("tp=2", stored)),
        laid_out("pp=2", wanted),
    )
    layer = "model.layers.$LAYER_ID.self_attn."
    statement = (
        f"{layer}q_proj.weight, {layer}k_proj.weight, {layer}v_proj.weight -> {layer}qkv_proj.weight, {attribute}"
    )
    if is_right:
        found = load_with(checkpoint, model, [statement], reverse)
        assert bits(found) == bits(simulate_ranks.load(checkpoint, model))
        return
    with pytest.raises(MappingError, match="mix the parts of fused tensors") as refusal:
        load_with(checkpoint, model, [statement], reverse)
    assert refusal.value.evidence[0].startswith(
        "model.layers.{0...1}.self_attn.q_proj.weight: would contain parts of k_proj"
    )


def test_a_model_of_other_heads_is_refused_unless_statements_leave_all_attention_out(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path / "checkpoint-1", laid_out("tp=2", LLAMA))
    other = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = laid_out("tp=2", {**LLAMA, **other})
    with pytest.raises(MismatchError, match="num_attention_heads: stored 8, expected 4"):
        load_with(checkpoint, model, [f"{NORM} -> {NORM}"])
    attention = [name for name in (tensor.name for tensor in model.tensors) if "self_attn" in name]
    assert len(attention) == 8
    left_out = [statement for name in attention for statement in (f"{name} -> _", f"_ -> {name}")]
    with pytest.raises(MismatchError, match="num_key_value_heads: stored 4, expected 2"):
        load_with(checkpoint, model, left_out[2:])
    with pytest.raises(MismatchError, match="attention is computed differently"):
        load_with(checkpoint, model, left_out)
    weights = load_with(checkpoint, model, left_out, may_change=list(other))[1]["model_state"]
    untouched = {name for name, weight in weights.items() if np.all(weight.local_tensor.array == 7)}
    assert untouched == set(attention)

"""Optimizer states of a checkpoint whose parameters have other names in the live model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import trained

HALF = replace(SINGLE, name="single-bf16", bf16=True)
MORE_LAYERS = [
    statement
    for name in (
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{part}_proj" for part in "qkvo"),
    )
    for statement in (
        f"model.layers.1.{name}.weight -> model.layers.2.{name}.weight",
        f"_ -> model.layers.1.{name}.weight",
    )
]
"""A new layer before the second of two."""


def all_bits(model: Any, optimizer: Any) -> dict[str, str]:
    """The bytes of every tensor and state, as hex."""
    from paddleformers_fc.trainer import live_roles

    roles = live_roles.model_roles(model) if optimizer is None else live_roles.LiveModel(model, optimizer).roles()
    tensors = [(name, one.local_tensor) for weights in roles.values() for name, one in weights.items()]
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in tensors}


@pytest.mark.parametrize("layout", [TP2, HALF], ids=["tp2", "bfloat16"])
@on_ranks()
def test_states_follow_their_parameters_through_statements_that_rename_them(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    """From a model of two layers into one of three."""
    steps = {"max_steps": 2, "save_steps": 2}
    saved = trained(layout, tmp_path / "few", steps, model={"num_hidden_layers": 2})
    resumed = {"model": {"num_hidden_layers": 3}, "resume": tmp_path / "few/checkpoint-2"}
    more = trained(layout, tmp_path / "more", {**steps, "aoa_config": {"aoa_statements": MORE_LAYERS}}, **resumed)
    held, found = (all_bits(one.model, one.optimizer) for one in (saved, more))
    stored = {name: name.replace("layers.2.", "layers.1.") for name in found if "layers.1." not in name}
    assert [new for new, name in stored.items() if found[new] != held[name]] == []
    assert sorted({*held} - {*stored.values()}) == []
    assert [name for name in found if "layers.1." in name and not name.endswith(".weight")] == []


@on_ranks(layout=SINGLE)
def test_master_weights_are_read_from_renamed_weights_without_stored_states(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import paddle

    import paddleformers_fc

    args = tiny.training_arguments(layout, str(tmp_path / "out"))
    few = tiny.build("llama", layout, args, num_hidden_layers=2)
    paddleformers_fc.save(tmp_path / "checkpoint-1", few, step=1)
    more = tiny.build("llama", HALF, args, num_hidden_layers=3)
    optimizer = paddle.optimizer.AdamW(parameters=more.parameters(), multi_precision=True)
    given = {"aoa_config": {"aoa_statements": MORE_LAYERS}, "allow_casts": True}
    paddleformers_fc.load(tmp_path / "checkpoint-1", more, optimizer, **given)
    held, found = all_bits(few, None), all_bits(more, optimizer)
    names = {name: name.replace("layers.2.", "layers.1.") for name in more.sharded_state_dict() if ".1." not in name}
    assert [name for name, stored in names.items() if found.get(f"{name}.w_0") != held[stored]] == []

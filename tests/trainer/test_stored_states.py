"""Optimizer states of a checkpoint whose parameters have other names in the live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import flex_trainer
from verification.forkserver import ForkServer

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


def loaded(checkpoint: Path, model: Any, statements: Mapping[str, Any], **options: Any) -> Any:
    """The optimizer of a model that has loaded a checkpoint."""
    import paddle

    import paddleformers_fc

    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    paddleformers_fc.load(checkpoint, model, optimizer, aoa_config=statements, **options)
    return optimizer


def all_bits(model: Any, optimizer: Any) -> dict[str, str]:
    """The bytes of every tensor and state, as hex."""
    from paddleformers_fc.trainer import live_roles

    roles = live_roles.model_roles(model) if optimizer is None else live_roles.run_roles(model, optimizer)
    tensors = [(name, one.local_tensor) for weights in roles.values() for name, one in weights.items()]
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in tensors}


def load_into_more_layers(layout: MatrixLayout, output_dir: Path, by_trainer: bool) -> None:
    """Train a model of two layers for two steps, and load it with statements into a model of three."""
    statements, steps = {"aoa_statements": MORE_LAYERS}, {"max_steps": 2, "save_steps": 2}
    saved = flex_trainer(layout.to_json(), str(output_dir / "few"), steps, model={"num_hidden_layers": 2})
    saved.train()
    held = all_bits(saved.model, saved.optimizer)
    arguments = {**steps, "aoa_config": statements}
    more = flex_trainer(layout.to_json(), str(output_dir / "more"), arguments, model={"num_hidden_layers": 3})
    checkpoint = output_dir / "few" / "checkpoint-2"
    if by_trainer:
        more.train(resume_from_checkpoint=str(checkpoint))
        found = all_bits(more.model, more.optimizer)
    else:
        found = all_bits(more.model, loaded(checkpoint, more.model, statements))
    stored = {name: name.replace("layers.2.", "layers.1.") for name in found if "layers.1." not in name}
    assert [new for new, name in stored.items() if found[new] != held[name]] == []
    assert sorted({*held} - {*stored.values()}) == []
    assert [name for name in found if "layers.1." in name and not name.endswith(".weight")] == []


@pytest.mark.parametrize(
    ("layout", "by_trainer"), [(TP2, True), (HALF, True), (HALF, False)], ids=["tp2", "bfloat16", "load"]
)
def test_states_follow_their_parameters_through_statements_that_rename_them(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout, by_trainer: bool
) -> None:
    given = {"layout": layout, "output_dir": tmp_path, "by_trainer": by_trainer}
    run_on_ranks(ranks, layout.nproc, load_into_more_layers, **given)


@on_ranks(layout=SINGLE)
def test_master_weights_are_read_from_renamed_weights_without_stored_states(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    import paddleformers_fc

    args = tiny.training_arguments(layout, str(tmp_path / "out"))
    few = tiny.build("llama", layout, args, num_hidden_layers=2)
    paddleformers_fc.save(tmp_path / "checkpoint-1", few, step=1)
    more = tiny.build("llama", HALF, args, num_hidden_layers=3)
    optimizer = loaded(tmp_path / "checkpoint-1", more, {"aoa_statements": MORE_LAYERS}, allow_casts=True)
    held, found = all_bits(few, None), all_bits(more, optimizer)
    names = {name: name.replace("layers.2.", "layers.1.") for name in more.sharded_state_dict() if ".1." not in name}
    assert [name for name, stored in names.items() if found.get(f"{name}.w_0") != held[stored]] == []

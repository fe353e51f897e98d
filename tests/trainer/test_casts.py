"""Resuming in another precision or under other names: what every tensor is read from, and how it rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import paddle
import pytest

import paddleformers_fc
from paddleformers_fc.errors import MismatchError
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks
from tests.harness.tiny import SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import trained
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.jobs"
HALF = replace(SINGLE, name="single-bf16", bf16=True)


def given(layout: MatrixLayout, output_dir: Path, resume: Path | None = None, **arguments: Any) -> dict[str, Any]:
    settings = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": {"max_steps": 2, **arguments}}
    return settings if resume is None else {**settings, "resume": str(resume)}


@pytest.fixture(scope="module")
def full(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint."""
    directory = tmp_path_factory.mktemp("full")
    ranks.run(f"{JOBS}:run", 1, given(SINGLE, directory, save_steps=2))
    return directory / "checkpoint-2"


def tensors(checkpoint: Path) -> dict[tuple[str, str], np.ndarray[Any, Any]]:
    opened = paddleformers_fc.open(checkpoint)
    return {(one.role, one.name): opened.read(one.name, role=one.role) for one in opened.tensors()}


def same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_a_bfloat16_run_fills_master_weights_and_rounds_as_paddle(
    ranks: ForkServer, full: Path, tmp_path: Path
) -> None:
    layout = replace(SD2V2, name="sd2v2-bf16", bf16=True)
    for found in ranks.run(f"{JOBS}:refused", 2, given(layout, tmp_path / "refused", full)).values:
        assert (found["error"], found["changed"]) == ("MismatchError", False)
        assert "set flex_allow_casts: true" in found["text"]
    result = ranks.run(
        f"{JOBS}:resume_and_save_again", 2, given(layout, tmp_path / "half", full, flex_allow_casts=True)
    )
    before, after = tensors(full), tensors(tmp_path / "half" / "checkpoint-2")
    weights = {name: one for (role, name), one in before.items() if role == "model_state"}
    for name, weight in weights.items():
        rounded = after["model_state", name]
        assert same(rounded, weight.astype(ml_dtypes.bfloat16))
        assert same(rounded, paddle.to_tensor(weight).astype("bfloat16").numpy().view(ml_dtypes.bfloat16))
        assert same(after["master_weight", f"{name}.w_0"], weight)
    states = {key: one for key, one in before.items() if key[0] == "optimizer_state"}
    assert all(same(after[key], one) for key, one in states.items())
    assert len(after) == 2 * len(weights) + len(states)
    log = result.logs[0].read_text(errors="replace")
    assert "precision changed on this rank: master_weight from model_state float32 to float32: " in log
    assert "model_state float32 to bfloat16: " in log
    # Back again without loss, because weights are read from master weights.
    back = given(TP2, tmp_path / "back", tmp_path / "half" / "checkpoint-2", flex_allow_casts=True)
    result = ranks.run(f"{JOBS}:resume_and_save_again", 2, back)
    assert list(canonical_digests(tmp_path / "back" / "checkpoint-2")) == list(canonical_digests(full))
    assert "model_state from master_weight float32 to float32: " in result.logs[0].read_text(errors="replace")


def test_a_master_weight_without_stored_states_is_read_from_its_weight(ranks: ForkServer, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    ranks.run(f"{JOBS}:run_with_frozen", 1, {**given(SINGLE, tmp_path / "full", save_steps=2), "frozen": [name]})
    checkpoint = tmp_path / "full" / "checkpoint-2"
    before = tensors(checkpoint)
    assert ("optimizer_state", f"{name}.moment1_0") not in before
    result = ranks.run(
        f"{JOBS}:resume_and_save_again", 1, given(HALF, tmp_path / "half", checkpoint, flex_allow_casts=True)
    )
    after = tensors(tmp_path / "half" / "checkpoint-2")
    assert same(after["master_weight", f"{name}.w_0"], before["model_state", name])
    assert not after["optimizer_state", f"{name}.moment1_0"].any()
    assert "1 trained parameter has no optimizer states" in result.logs[0].read_text()


@on_ranks(layout=SINGLE)
def test_a_script_loads_in_another_precision_on_request(layout: MatrixLayout, tmp_path: Path) -> None:
    args = tiny.training_arguments(layout, str(tmp_path / "out"))

    def made(layout: MatrixLayout) -> tuple[Any, Any]:
        model = tiny.build("llama", layout, args)
        return model, paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=layout.bf16)

    def masters(model: Any, optimizer: Any) -> dict[str, bytes]:
        held = {name: one.local_tensor.name for name, one in model.sharded_state_dict().items()}
        return {name: optimizer._master_weights[own].numpy().tobytes() for name, own in held.items()}

    half, optimizer = made(HALF)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, half.parameters())
    for master in optimizer._master_weights.values():
        master.set_value(master + 1e-4)  # Precision beyond bfloat16.
    first, second = tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"
    paddleformers_fc.save(first, half, optimizer, step=1)
    expected = masters(half, optimizer)
    full, other = made(layout)
    with pytest.raises(MismatchError) as refused:
        paddleformers_fc.load(first, full, other)
    assert "DTYPE: stored and target dtypes differ" in refused.value.render()
    report = paddleformers_fc.load(first, full, other, allow_casts=True)
    weights = {name: one.local_tensor.numpy().tobytes() for name, one in full.sharded_state_dict().items()}
    assert weights == expected
    assert list(report.casts) == [f"model_state from master_weight float32 to float32: {len(weights)} tensors"]
    # A bfloat16 model gets the full precision of its master weights from weights alone.
    paddleformers_fc.save(second, full, step=2)
    third, last = made(HALF)
    paddleformers_fc.load(second, third, last, allow_casts=True)
    assert masters(third, last) == expected


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

"""Models that no family declares: trained, resumed, verified and exported by the AOA statements of their class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.errors import FlexError
from tests.cli.support import run as run_command
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import PP2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import logged, weights_of
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

# ---- Bodies that run on ranks.


def forward_alone(config: Any) -> dict[str, Any]:
    """Statements of a Qwen 3 in one direction: files have other names, and the parts of both fused layers."""
    layer, file = "model.layers.$LAYER_ID", "blocks.$LAYER_ID"
    heads = f"num_heads={config.num_attention_heads}, num_key_value_groups={config.num_key_value_heads}"
    return {
        "aoa_statements": [
            f"{file}.q^T, {file}.k^T, {file}.v^T -> {layer}.self_attn.qkv_proj.weight, fused_qkv, {heads}",
            f"{file}.gate^T, {file}.up^T -> {layer}.mlp.up_gate_proj.weight, fused_ffn",
            f"{file}.out^T -> {layer}.self_attn.o_proj.weight",
            f"{file}.down^T -> {layer}.mlp.down_proj.weight",
        ]
    }


def failing(config: Any) -> dict[str, Any]:
    raise KeyError("hidden_sizes")


NONE: Mapping[str, Any] = {"_gen_aoa_config": None, "_gen_inv_aoa_config": None}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "of the class": {},
    "forward alone": {**NONE, "_gen_aoa_config": staticmethod(forward_alone)},
    "generated": {**NONE, "gen_aoa_statements": lambda self, config: forward_alone(config)},
    "none": NONE,
    "not inverse": {"_gen_aoa_config": staticmethod(forward_alone)},
    "failing": {"_gen_aoa_config": staticmethod(failing)},
}
"""Methods that a copy of a class has in place of its own."""


def copied(kind: Any, methods: str = "of the class") -> Any:
    """A copy of a class under a name that no family declares."""
    config = type("AbacusConfig", (kind.config_class,), {"model_type": "abacus"})
    return type("Abacus", (kind,), {"config_class": config, **METHODS[methods]})


def build(layout: MatrixLayout, args: Any, methods: str) -> Any:
    """A tiny Qwen 3 of the declared class, or of a copy of it."""
    model = tiny.build("qwen3", layout, args)
    if methods != "declared":
        model.__class__ = copied(type(model), methods)
        model.config.__class__ = type(model).config_class
    return model


def flex_arguments(layout: MatrixLayout, output_dir: Path, **arguments: Any) -> Any:
    from paddleformers_fc import FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **arguments}
    return tiny.training_arguments(layout, str(output_dir), **settings)


def training(layout: MatrixLayout, output_dir: Path, methods: str, resume: Path | None) -> list[float]:
    from paddleformers_fc import FlexTrainer

    # PaddleFormers sums the gradients of norms of heads over tensor-parallel ranks only where sequences are parallel.
    args = flex_arguments(layout, output_dir, max_steps=4, save_steps=2, sequence_parallel=True)
    trainer = tiny.trainer(build(layout, args, methods), args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses: list[float] = trainer.losses
    return losses


def start_from(source: Path, output_dir: Path) -> dict[str, str]:
    kind = copied(type(tiny.build("qwen3", SINGLE, flex_arguments(SINGLE, output_dir))))
    config = kind.config_class.from_pretrained(str(source))
    config.fuse_rms_norm, config._attn_implementation = False, "sdpa"
    return weights_of(kind.from_pretrained(str(source), config=config))


# ---- Tests.


def train(
    ranks: ForkServer, methods: str, layout: MatrixLayout, output_dir: Path, resume: Path | None = None
) -> list[float]:
    given = {"output_dir": output_dir, "methods": methods, "resume": resume}
    return list(run_on_ranks(ranks, layout.nproc, training, layout=layout, **given)[0])


def test_a_copy_of_a_declared_class_is_saved_resumed_verified_and_exported_as_that(
    ranks: ForkServer, tmp_path: Path
) -> None:
    losses = train(ranks, "of the class", TP2, tmp_path / "own")
    assert train(ranks, "declared", TP2, tmp_path / "declared") == losses
    own, declared = (tmp_path / name / "checkpoint-2" for name in ("own", "declared"))
    assert list(canonical_digests(own)) == list(canonical_digests(declared))
    resumed = train(ranks, "of the class", PP2, tmp_path / "pp2", own)
    assert resumed == pytest.approx(losses[2:], abs=2e-6)
    # Without its class.
    assert run_command("verify", own).code == 0
    for checkpoint in (own, declared):
        assert run_command("export", checkpoint, checkpoint.parent / "hf").code == 0
    one, other = (checkpoint.parent / "hf/model.safetensors" for checkpoint in (own, declared))
    assert one.read_bytes() == other.read_bytes()
    (started,) = run_on_ranks(ranks, 1, start_from, source=one.parent, output_dir=tmp_path / "start")
    exported, down = load_file(one), "model.layers.3.mlp.down_proj.weight"
    assert started["model.norm.weight"] == exported["model.norm.weight"].tobytes().hex()
    assert started[down] == exported[down].T.tobytes().hex()


@on_ranks(layout=SINGLE)
def test_statements_are_logged_or_rejected_before_training(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers_fc import FlexTrainer

    args = flex_arguments(layout, tmp_path)
    for methods, lora, reason in (
        ("none", False, "No family declares model_type 'abacus'."),
        ("failing", False, "KeyError: 'hidden_sizes'"),
        ("not inverse", False, "`blocks.$LAYER_ID.q` matches no tensor of the left side"),
        ("of the class", True, "No family declares model_type 'abacus'."),
    ):
        model = build(layout, args, methods)
        model = tiny.adapted(model) if lora else model
        with pytest.raises(FlexError) as refused:
            tiny.trainer(model, args, cls=FlexTrainer)
        assert reason in refused.value.render()
    for methods, ways in (("of the class", "in both directions"), ("generated", "and their inversion")):
        with logged() as lines:
            tiny.trainer(build(layout, args, methods), args, cls=FlexTrainer)
        (line,) = [line for line in lines if "No family declares" in line]
        assert f"'abacus'. The AOA statements of Abacus are used {ways}: 35 tensors, 35 rules, proved." in line


def test_a_loop_without_a_trainer_uses_statements_of_a_class_that_is_none_of_paddleformers(tmp_path: Path) -> None:
    from types import SimpleNamespace

    import paddle

    class Turned(paddle.nn.Linear):
        config = SimpleNamespace(model_type="unheard_of", to_dict=dict)

        @classmethod
        def _gen_aoa_config(cls, config: Any) -> dict[str, list[str]]:
            return {"aoa_statements": ["canonical^T -> weight"]}

    model, other = Turned(2, 3, bias_attr=False), Turned(2, 3, bias_attr=False)
    paddleformers_fc.save(tmp_path / "checkpoint-1", model)
    paddleformers_fc.open(tmp_path / "checkpoint-1").export(tmp_path / "exported")
    (tensor,) = paddleformers_fc.open(tmp_path / "exported").tensors()
    assert (tensor.name, tuple(tensor.shape)) == ("canonical", (3, 2))
    paddleformers_fc.load(tmp_path / "checkpoint-1", other)
    assert (other.weight.numpy() == model.weight.numpy()).all()

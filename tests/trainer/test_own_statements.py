"""Models that no family declares: trained, resumed, verified and exported by the AOA statements of their class."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.errors import FlexError
from paddleformers_fc.execute.digest import TensorDigest
from tests.cli.support import run as run_command
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import PP2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import logged, weights_of
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

# PaddleFormers sums the gradients of norms of heads over tensor-parallel ranks only where sequences are parallel.
SIX_STEPS = {"max_steps": 6, "save_steps": 3, "sequence_parallel": True}


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


def build(layout: MatrixLayout, args: Any, methods: str, model_type: str = "qwen3") -> Any:
    """A tiny model of a declared class, or of a copy of it."""
    model = tiny.build(model_type, layout, args)
    if methods != "declared":
        model.__class__ = copied(type(model), methods)
        model.config.__class__ = type(model).config_class
    return model


def flex_arguments(layout: MatrixLayout, output_dir: Path, **arguments: Any) -> Any:
    from paddleformers_fc import FlexTrainingArguments

    return tiny.training_arguments(
        layout, str(output_dir), cls=FlexTrainingArguments, flex_checkpoint=True, **arguments
    )


def training(
    layout: MatrixLayout,
    output_dir: Path,
    methods: str,
    resume: Path | None,
    arguments: Mapping[str, Any],
    model_type: str,
) -> list[float]:
    from paddleformers_fc import FlexTrainer

    args = flex_arguments(layout, output_dir, **arguments)
    trainer = tiny.trainer(build(layout, args, methods, model_type), args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    losses: list[float] = trainer.losses
    return losses


def start_from(source: Path, output_dir: Path) -> dict[str, str]:
    kind = copied(type(tiny.build("qwen3", SINGLE, flex_arguments(SINGLE, output_dir))))
    config = kind.config_class.from_pretrained(str(source))
    config.fuse_rms_norm, config._attn_implementation = False, "sdpa"
    return weights_of(kind.from_pretrained(str(source), config=config))


def save_by_hand(layout: MatrixLayout, output_dir: Path, target: Path) -> dict[str, str]:
    model = build(layout, tiny.training_arguments(layout, str(output_dir)), "of the class")
    paddleformers_fc.save(target, model)
    return weights_of(model)


def load_by_hand(layout: MatrixLayout, output_dir: Path, source: Path) -> dict[str, str]:
    model = build(layout, tiny.training_arguments(layout, str(output_dir)), "of the class")
    for parameter in model.parameters():
        parameter.set_value(0 * parameter)
    paddleformers_fc.load(source, model)
    return weights_of(model)


# ---- Tests.


def train(
    ranks: ForkServer,
    methods: str,
    layout: MatrixLayout,
    output_dir: Path,
    resume: Path | None = None,
    model_type: str = "qwen3",
    **arguments: Any,
) -> list[float]:
    given = {"output_dir": output_dir, "methods": methods, "resume": resume, "model_type": model_type}
    (losses, *_) = run_on_ranks(ranks, layout.nproc, training, layout=layout, arguments=arguments, **given)
    return list(losses)


def digests(checkpoint: Path) -> list[TensorDigest]:
    return list(canonical_digests(checkpoint))


class Pair:
    """The same run of a declared class and of a copy of it."""

    def __init__(self, ranks: ForkServer, root: Path) -> None:
        self.losses = train(ranks, "of the class", TP2, root / "own", **SIX_STEPS)
        assert train(ranks, "declared", TP2, root / "declared", **SIX_STEPS) == self.losses
        self.declared, self.own = root / "declared/checkpoint-3", root / "own/checkpoint-3"


@pytest.fixture(scope="module")
def pair(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(ranks, tmp_path_factory.mktemp("pair"))


def test_a_checkpoint_has_the_canonical_tensors_of_the_declared_class(pair: Pair) -> None:
    assert digests(pair.own) == digests(pair.declared)
    assert {one.role for one in digests(pair.own)} == {"model_state", "optimizer_state"}


def test_a_run_resumes_under_another_layout(ranks: ForkServer, pair: Pair, tmp_path: Path) -> None:
    resumed = train(ranks, "of the class", PP2, tmp_path, pair.own, max_steps=6)
    assert resumed == pytest.approx(pair.losses[3:], abs=2e-6)


def test_a_checkpoint_is_verified_and_exported_without_its_class(ranks: ForkServer, pair: Pair, tmp_path: Path) -> None:
    assert run_command("verify", pair.own).code == 0
    for checkpoint, name in ((pair.declared, "declared"), (pair.own, "own")):
        assert run_command("export", checkpoint, tmp_path / name).code == 0
    one, other = (tmp_path / name / "model.safetensors" for name in ("declared", "own"))
    assert one.read_bytes() == other.read_bytes()
    (started,) = run_on_ranks(ranks, 1, start_from, source=tmp_path / "own", output_dir=tmp_path / "start")
    exported, down = load_file(other), "model.layers.3.mlp.down_proj.weight"
    assert started["model.norm.weight"] == exported["model.norm.weight"].tobytes().hex()
    assert started[down] == exported[down].T.tobytes().hex()


# In make test: test_a_checkpoint_has_the_canonical_tensors_of_the_declared_class.
@pytest.mark.slow
def test_experts_and_fused_layers_of_another_class_agree_with_its_family(ranks: ForkServer, tmp_path: Path) -> None:
    for methods in ("declared", "of the class"):
        train(ranks, methods, TP2, tmp_path / methods, model_type="ernie4_5_moe", max_steps=1, save_steps=1)
    assert digests(tmp_path / "of the class/checkpoint-1") == digests(tmp_path / "declared/checkpoint-1")


def test_statements_of_one_direction_are_inverted(ranks: ForkServer, tmp_path: Path) -> None:
    losses = train(ranks, "forward alone", TP2, tmp_path / "saved", **SIX_STEPS)
    checkpoint = tmp_path / "saved/checkpoint-3"
    shapes = {one.name: one.shape for one in digests(checkpoint) if one.role == "model_state"}
    assert (shapes["blocks.3.gate"], shapes["blocks.3.k"]) == ((128, 64), (32, 64))
    resumed = train(ranks, "forward alone", SINGLE, tmp_path / "resumed", checkpoint, max_steps=6)
    assert resumed == pytest.approx(losses[3:], abs=2e-6)


@on_ranks(layout=SINGLE)
def test_statements_are_stated_in_the_log_or_refused_before_training(layout: MatrixLayout, tmp_path: Path) -> None:
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


def test_a_loop_without_a_trainer_uses_them_as_well(ranks: ForkServer, tmp_path: Path) -> None:
    checkpoint, alone = {"target": tmp_path / "checkpoint-1"}, {"layout": SINGLE, "output_dir": tmp_path}
    run_on_ranks(ranks, 2, save_by_hand, layout=TP2, output_dir=tmp_path, **checkpoint)
    (built,) = run_on_ranks(ranks, 1, save_by_hand, **alone, target=tmp_path / "checkpoint-2")
    (loaded,) = run_on_ranks(ranks, 1, load_by_hand, **alone, source=checkpoint["target"])
    assert loaded == built


def test_statements_of_a_layer_whose_configuration_is_no_class_of_paddleformers_are_used(tmp_path: Path) -> None:
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

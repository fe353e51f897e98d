"""Adapters: what a checkpoint contains of them, resumed under every layout, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddleformers_fc
from paddleformers_fc.errors import MismatchError, OptionError
from tests.cli.support import flip
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.export_jobs import weights_of
from tests.trainer.jobs import few_samples, flex_trainer, weights_of as tensors_of
from tests.trainer.lora_jobs import fingerprint, from_files, trainer_of
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.lora_jobs"
SIX_STEPS = {"max_steps": 6, "save_steps": 3}
ERNIE = {"model_type": "ernie4_5_moe", "model": {"moe_use_aux_free": True}}
ATTENTION = {"target_modules": [".*qkv_proj", ".*(q|k|v|o)_proj"]}
BIASES = {
    "model": {"attention_bias": True},
    "adapters": {**ATTENTION, "trainable_bias": "all", "trainable_modules": [".*embed_tokens.*", ".*norm.*"]},
}
RUNS: dict[str, tuple[MatrixLayout, dict[str, Any]]] = {
    "llama": (SINGLE, {}),
    "experts": (TP2, ERNIE),
    "biases": (SINGLE, BIASES),
}
"""Layouts and models of runs. Outputs of fused layers lie in groups that depend on the degree of tensor parallelism."""


class Trained:
    """An uninterrupted run of six steps that saved at 3 and 6."""

    def __init__(self, ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **settings: Any) -> None:
        job = {"layout": layout.to_json(), "output_dir": str(output_dir), "arguments": SIX_STEPS, **settings}
        self.losses = ranks.run(f"{JOBS}:run", layout.nproc, job).values[0]["losses"]
        self.third = output_dir / "checkpoint-3"
        described = json.loads((self.third / "mapping.json").read_text())
        self.description = described["model"]["adapters"]
        self.names = {one.name for one in canonical_digests(self.third) if one.role == "model_state"}


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A function that returns a run of a name; each is made once."""

    @functools.cache
    def make(kind: str) -> Trained:
        layout, settings = RUNS[kind]
        return Trained(ranks, layout, tmp_path_factory.mktemp(kind), **settings)

    return make


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("llama", layout) for layout in (TP2, SD2V1, SD2V2, SD2S3, PP2)),
        *(("experts", layout) for layout in (SINGLE, PP2)),
        *(pytest.param("biases", layout, marks=pytest.mark.slow) for layout in (TP2, PP2)),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_adapters_resume_under_any_layout(
    ranks: ForkServer, train: Callable[[str], Trained], tmp_path: Path, kind: str, layout: MatrixLayout
) -> None:
    """Every bit is loaded, and the losses are those of the uninterrupted run."""
    run, (_, settings) = train(kind), RUNS[kind]
    job = {"layout": layout.to_json(), "output_dir": str(tmp_path), "arguments": SIX_STEPS, "resume": str(run.third)}
    losses = ranks.run(f"{JOBS}:run_saving_what_was_loaded", layout.nproc, {**job, **settings}).values[0]
    assert list(canonical_digests(tmp_path / "checkpoint-3")) == list(canonical_digests(run.third))
    assert losses == pytest.approx(run.losses[3:], abs=1e-6)
    layer = {name.removeprefix("model.layers.0.") for name in run.names}
    if kind == "biases":
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= run.names
        assert {"self_attn.q_proj.bias", "self_attn.q_proj.lora_A.weight", "input_layernorm.weight"} <= layer
        assert not {"self_attn.q_proj.weight", "mlp.up_proj.lora_A.weight"} & layer
    elif kind == "llama":
        assert all(".lora_A." in name or ".lora_B." in name for name in run.names)


def test_adapters_are_described_and_a_resume_is_planned_from_the_files_alone(train: Callable[[str], Trained]) -> None:
    stored = train("llama").description
    assert (stored["r"], stored["alpha"], stored["rslora"], len(stored["base"]["tensors"])) == (4, 8.0, False, 32)
    found = paddleformers_fc.open(train("llama").third).plan("tp=2,pp=2")
    assert found.world_size == 4
    # Tensor parallelism replicates one of the two sides of each adapter.
    held = sum(path.stat().st_size for path in train("llama").third.glob("*/*.safetensors"))
    assert held / 2 < found.bytes < 2 * held
    assert (found.fresh, found.dropped) == ([], [])


@on_ranks(layout=SINGLE)
def test_other_adapters_and_other_bases_are_refused_with_the_difference(tmp_path: Path) -> None:
    one = {"max_steps": 1, "save_steps": 1}
    for build in (trainer_of, flex_trainer):
        build(SINGLE, tmp_path / build.__name__, one).train()

    def refusal(saved: Any, build: Any = trainer_of, **given: Any) -> str:
        trainer = build(SINGLE, tmp_path / "out", one, **given)
        with pytest.raises(MismatchError) as caught:
            trainer.train(resume_from_checkpoint=str(tmp_path / saved.__name__ / "checkpoint-1"))
        return caught.value.render()

    for given, row in (
        ({"adapters": {"r": 8}}, "lora.r  4      8"),
        ({"adapters": {"lora_alpha": 16}}, "lora.alpha  8.0    16.0"),
        ({"adapters": ATTENTION}, "lora.target_modules"),
        ({"model": {"num_hidden_layers": 5}}, "lora.base.tensors"),
    ):
        text = refusal(trainer_of, **given)
        assert text.startswith("The model's configuration gives the stored weights")
        assert row in text
        # Naming the keys helps only where the tensors fit.
        assert ("flex_allow_config_changes" in text) == ("lora.alpha" in row)
    without, adapters = refusal(trainer_of, flex_trainer), refusal(flex_trainer)
    assert without.startswith("The checkpoint contains adapters (LoRA), and this run trains a complete model.")
    assert f"paddleformers-fc export {tmp_path}/trainer_of/checkpoint-1 DIRECTORY --base " in without
    assert adapters.startswith("The checkpoint contains a complete model, and this run trains adapters (LoRA).")
    assert f"paddleformers-fc export {tmp_path}/flex_trainer/checkpoint-1 DIRECTORY, set" in adapters


@on_ranks(layout=SINGLE)
def test_adapters_are_evaluated_though_paddlefleet_is_not_installed(tmp_path: Path) -> None:
    trainer = trainer_of(SINGLE, tmp_path)
    losses = [trainer.evaluate(few_samples())["eval_loss"]]
    trainer.train()
    losses.append(trainer.evaluate(few_samples())["eval_loss"])
    assert losses[0] > losses[1] > 0


def test_other_patterns_that_select_the_same_layers_are_no_other_adapters(
    ranks: ForkServer, train: Callable[[str], Trained], tmp_path: Path
) -> None:
    """Layers of pipelines have other names, so that patterns with whole names must differ."""
    job = {"output_dir": str(tmp_path), "resume": str(train("llama").third), "arguments": SIX_STEPS}
    given = {**job, "layout": SINGLE.to_json(), "adapters": {"target_modules": ".*_proj"}}
    result = ranks.run(f"{JOBS}:run", 1, given)
    assert result.values[0]["losses"] == train("llama").losses[3:]
    assert '  lora.target_modules  [".*qkv_proj", ".*(q|k|v' in result.logs[0].read_text()


def identify_bases(layout: MatrixLayout, bases: dict[str, str], recorded: dict[str, str], output_dir: Path) -> None:
    """Read bases from files, and change the tensors of one or its files before its adapters are trained."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    def element(model: Any) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        values = weight.numpy()
        values[3, 5] += 1
        weight.set_value(values)

    def replaced(model: Any) -> None:
        if os.environ["PADDLE_TRAINER_ID"] == "0":
            file = Path(bases["replaced"], "model.safetensors")
            os.replace(shutil.copy(file, file.with_name("other")), file)

    def found(name: str, change: Callable[[Any], object] = id) -> Any:
        args = tiny.training_arguments(layout, str(output_dir), cls=FlexTrainingArguments, flex_checkpoint=True)
        model = from_files(bases[name], layout, args)
        change(model)
        return fingerprint(tiny.trainer(tiny.adapted(model), args, cls=FlexTrainer).model)

    whole, hashed, other = (found(name) for name in ("recorded", "hashed", "other"))
    assert (whole.location, whole.files, whole.tensors) == (bases["recorded"], recorded, "")
    assert hashed.files == recorded != other.files
    changed, copied = found("element", element), found("replaced", replaced)
    assert changed.files == copied.files == {}
    assert changed.tensors != copied.tensors != ""


def test_the_files_of_a_base_identify_it_unless_they_do_not_contain_it(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    files = json.loads((base / "flex_checksums.json").read_text())["files"]
    recorded = {one["path"]: one["digest"] for one in files if one["path"].endswith(".safetensors")}
    copies = {name: Path(shutil.copytree(base, tmp_path / name)) for name in ("hashed", "other", "element", "replaced")}
    for copy in copies.values():
        (copy / "flex_checksums.json").unlink()
    flip(copies["other"] / "model.safetensors", -1)
    bases = {name: str(path) for name, path in {**copies, "recorded": base}.items()}
    given = {"layout": TP2, "bases": bases, "recorded": recorded, "output_dir": tmp_path / "out"}
    run_on_ranks(ranks, 2, identify_bases, **given)


@on_ranks(layout=SINGLE)
def test_adapters_that_upstream_cannot_describe_are_refused_by_name(tmp_path: Path) -> None:
    import paddle
    from paddleformers.peft import LoRAModel
    from paddleformers.peft.lora.lora_layers import LoRAConv2D, LoRAMoeExperts

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    args = tiny.training_arguments(SINGLE, str(tmp_path), cls=FlexTrainingArguments, flex_checkpoint=True)

    def refused(model: Any) -> str:
        with pytest.raises(OptionError) as caught:
            tiny.trainer(model, args, cls=FlexTrainer)
        return caught.value.render()

    changes: list[tuple[dict[str, Any], Callable[[Any], object], str]] = [
        ({"loraga": True}, id, "loraga: PaddleFormers changes the base"),
        ({"do_qat": True}, id, "do_qat: the quantization scales"),
        ({}, LoRAModel.merge, "is merged into its base; call unmerge()"),
        ({}, lambda model: setattr(model, "quantized", True), "a quantized base"),
        ({"target_modules": None}, id, "no tensor of the model is trained"),
    ]
    for given, change, text in changes:
        model = tiny.adapted(tiny.build("llama", SINGLE, args), **given)
        change(model)
        assert text in refused(model)

    class UnknownAdapter(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = self.create_parameter([4, 2])

    for layer, kind in ((paddle.nn.Conv2D(2, 2, 3), LoRAConv2D), (paddle.nn.Linear(4, 4), UnknownAdapter)):
        model = tiny.build("llama", SINGLE, args)
        model.added = layer
        adapted = tiny.adapted(model, target_modules=["added"])
        if kind is UnknownAdapter:
            adapted.model.added = UnknownAdapter()
        assert f"{kind.__name__} (added): " in refused(adapted)
    # If PaddleFormers describes the shards of others, declare them in a family and remove the refusal.
    unsupported = (LoRAConv2D, LoRAMoeExperts)
    assert all(kind.sharded_state_dict is paddle.nn.Layer.sharded_state_dict for kind in unsupported)


@on_ranks(layout=EP2)
def test_adapters_of_experts_are_refused_where_upstream_would_average_them(tmp_path: Path) -> None:
    """Expert parallelism: PaddleFormers marks the weights of experts as those of a rank, and not their adapters."""
    with pytest.raises(OptionError, match="expert parallelism: PaddleFormers does not mark adapters of experts"):
        trainer_of(EP2, tmp_path, {"max_steps": 1}, **ERNIE).train()
    trainer_of(EP2, tmp_path, {"max_steps": 1}, **ERNIE, adapters=ATTENTION).train()


@on_ranks(layout=PP2)
def test_a_tied_tensor_is_trained_under_both_names_in_a_pipeline(tmp_path: Path) -> None:
    """The stages have copies of it, and one that is frozen would differ after a step."""

    def train(*patterns: str) -> None:
        adapters = {**ATTENTION, "trainable_modules": [*patterns]}
        given = {"model": {"tie_word_embeddings": True}, "adapters": adapters}
        trainer_of(PP2, tmp_path, {"max_steps": 1, "save_steps": 1}, **given).train()

    owner, alias = ".*embed_tokens.*", "lm_head.*"
    with pytest.raises(OptionError, match=r"trainable_modules: model\.embed_tokens\.weight is trained"):
        train(owner)
    with pytest.raises(OptionError, match=r"trainable_modules: lm_head\.weight is trained"):
        train(alias)
    train(owner, alias)


@on_ranks(layout=PP2)
def test_a_stage_without_trained_tensors_is_accepted_if_another_has_some(tmp_path: Path) -> None:
    trainer_of(PP2, tmp_path, adapters={"target_modules": None, "trainable_modules": [".*model.norm.*"]})


@on_ranks(layout=SINGLE)
def test_a_script_saves_and_loads_adapters_that_are_not_merged(tmp_path: Path) -> None:
    first, second = (trainer_of(SINGLE, tmp_path / name, {"max_steps": 1}) for name in ("a", "b"))
    first.train()
    checkpoint = tmp_path / "checkpoint-1"
    paddleformers_fc.save(checkpoint, first.model, first.optimizer, step=1)
    expected = tensors_of(first.model)
    assert tensors_of(second.model) != expected
    second.train()
    paddleformers_fc.load(checkpoint, second.model, second.optimizer)
    assert tensors_of(second.model) == expected
    paddleformers_fc.open(checkpoint).export(tmp_path / "files")
    second.model.merge()
    for use in (
        lambda: paddleformers_fc.save(tmp_path / "checkpoint-2", second.model),
        lambda: paddleformers_fc.load(checkpoint, second.model),
        lambda: paddleformers_fc.load_open_weights(second.model, tmp_path / "files"),
    ):
        with pytest.raises(OptionError) as refused:
            use()
        assert "is merged into its base; call unmerge()" in refused.value.render()

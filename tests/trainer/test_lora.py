"""Adapters: saved, resumed under every layout, refused; exported for PEFT, merged, and for PaddleFormers."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import FlexError, MismatchError, OptionError, PeerError
from tests.cli.support import flip, run
from tests.harness import tiny
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.tiny import EP2, PP2, SD2S3, SD2V1, SD2V2, SINGLE, TP2, MatrixLayout
from tests.trainer.jobs import callback, few_samples, flex_trainer, logged, outcome, weights_of as tensors_of
from tests.trainer.test_open_weights import configured, weights_of
from tests.trainer.test_trainer import SIX_STEPS, settings
from tools.peft_fixtures import inputs
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

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


def trainer_of(
    layout: MatrixLayout,
    output_dir: Path,
    arguments: dict[str, Any] | None = None,
    model_type: str = "llama",
    model: dict[str, Any] | None = None,
    adapters: dict[str, Any] | None = None,
    base: Path | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over a tiny model with adapters; ``base`` is a directory of open weights."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, output_dir, **settings)
    plain = tiny.build(model_type, layout, args, **(model or {})) if base is None else from_files(base, layout, args)
    return tiny.trainer(tiny.adapted(plain, **(adapters or {})), args, **{"cls": FlexTrainer, **trainer})


def from_files(base: Path, layout: MatrixLayout, args: Any) -> Any:
    """A model of open weights, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoModelForCausalLM, AutoModelForCausalLMPipe

    kind = AutoModelForCausalLMPipe if layout.pp > 1 else AutoModelForCausalLM
    return kind.from_pretrained(str(base), config=configured(layout, args, base), dtype="float32")


def train_adapters(resume: str | bool | None = None, **settings: Any) -> dict[str, Any]:
    """Train adapters and save; the losses, and the Trainer's state afterwards."""
    trainer = trainer_of(**settings)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def run_saving_what_was_loaded(resume: Path, **settings: Any) -> list[float]:
    """Resume, save the loaded state before the first step, and train on; the losses."""
    save = callback(on_train_begin=lambda *_, **__: trainer._save_checkpoint(trainer.model))
    trainer = trainer_of(**settings, callbacks=[save])
    trainer.train(resume_from_checkpoint=str(resume))
    return list(trainer.losses)


class Trained:
    """An uninterrupted run of six steps that saved at 3 and 6."""

    def __init__(self, ranks: ForkServer, layout: MatrixLayout, output_dir: Path, **given: Any) -> None:
        job = {**settings(layout, output_dir, **SIX_STEPS), **given}
        self.losses = run_on_ranks(ranks, layout.nproc, train_adapters, **job)[0]["losses"]
        self.third = output_dir / "checkpoint-3"
        described = json.loads((self.third / "mapping.json").read_text())
        self.description = described["model"]["adapters"]
        self.names = {one.name for one in canonical_digests(self.third) if one.role == "model_state"}


@pytest.fixture(scope="module")
def train(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """A function that returns a run of a name; each is made once."""

    @functools.cache
    def make(kind: str) -> Trained:
        layout, given = RUNS[kind]
        return Trained(ranks, layout, tmp_path_factory.mktemp(kind), **given)

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
    whole, (_, given) = train(kind), RUNS[kind]
    job = settings(layout, tmp_path, whole.third, **SIX_STEPS)
    losses = run_on_ranks(ranks, layout.nproc, run_saving_what_was_loaded, **job, **given)[0]
    assert list(canonical_digests(tmp_path / "checkpoint-3")) == list(canonical_digests(whole.third))
    assert losses == pytest.approx(whole.losses[3:], abs=1e-6)
    layer = {name.removeprefix("model.layers.0.") for name in whole.names}
    if kind == "biases":
        assert {"model.embed_tokens.weight", "model.norm.weight"} <= whole.names
        assert {"self_attn.q_proj.bias", "self_attn.q_proj.lora_A.weight", "input_layernorm.weight"} <= layer
        assert not {"self_attn.q_proj.weight", "mlp.up_proj.lora_A.weight"} & layer
    elif kind == "llama":
        assert all(".lora_A." in name or ".lora_B." in name for name in whole.names)


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
    job = settings(SINGLE, tmp_path, train("llama").third, **SIX_STEPS)
    result = job_on_ranks(ranks.run, 1, train_adapters, **job, adapters={"target_modules": ".*_proj"})
    assert result.values[0]["losses"] == train("llama").losses[3:]
    assert '  lora.target_modules  [".*qkv_proj", ".*(q|k|v' in result.logs[0].read_text()


def identify_bases(layout: MatrixLayout, bases: dict[str, Path], recorded: dict[str, str], output_dir: Path) -> None:
    """Read bases from files, and change the tensors of one or its files before its adapters are trained."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer.description import describe_adapters

    def element(model: Any) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        values = weight.numpy()
        values[3, 5] += 1
        weight.set_value(values)

    def replaced(model: Any) -> None:
        if os.environ["PADDLE_TRAINER_ID"] == "0":
            file = bases["replaced"] / "model.safetensors"
            os.replace(shutil.copy(file, file.with_name("other")), file)

    def found(name: str, change: Callable[[Any], object] = id, later: Callable[[Any], object] | None = None) -> Any:
        args = tiny.training_arguments(layout, str(output_dir), cls=FlexTrainingArguments, flex_checkpoint=True)
        model = from_files(bases[name], layout, args)
        change(model)
        trainer = tiny.trainer(tiny.adapted(model), args, cls=FlexTrainer)
        if later is not None:
            later(model)
            trainer = tiny.trainer(trainer.model, args, cls=FlexTrainer)
        return describe_adapters(trainer.model).base

    whole, hashed, other = (found(name) for name in ("recorded", "hashed", "other"))
    assert (whole.location, whole.files, whole.tensors) == (str(bases["recorded"]), recorded, "")
    assert hashed.files == recorded != other.files
    with logged() as lines:
        changed, copied = found("element", element), found("replaced", replaced)
    warned = [line.rpartition(", and ")[2] for line in lines if "The base of the adapters was read from" in line]
    told = ["its tensors have changed since.", "its files were replaced since."]
    assert warned == (told if os.environ["PADDLE_TRAINER_ID"] == "0" else [])
    assert changed.files == copied.files == {}
    assert found("recorded", later=element).tensors == changed.tensors
    assert changed.tensors != copied.tensors != ""


def test_the_files_of_a_base_identify_it_unless_they_do_not_contain_it(ranks: ForkServer, tmp_path: Path) -> None:
    base = weights_of(ranks, tmp_path / "base", "llama", {})
    files = json.loads((base / "flex_checksums.json").read_text())["files"]
    recorded = {one["path"]: one["digest"] for one in files if one["path"].endswith(".safetensors")}
    copies = {name: Path(shutil.copytree(base, tmp_path / name)) for name in ("hashed", "other", "element", "replaced")}
    for copy in copies.values():
        (copy / "flex_checksums.json").unlink()
    flip(copies["other"] / "model.safetensors", -1)
    given = {"layout": TP2, "bases": {**copies, "recorded": base}, "output_dir": tmp_path / "out"}
    run_on_ranks(ranks, 2, identify_bases, **given, recorded=recorded)


@pytest.mark.parametrize("layout", [TP2, SD2S3], ids=str)
def test_a_save_is_refused_once_a_rank_has_changed_the_base(
    ranks: ForkServer, tmp_path: Path, layout: MatrixLayout
) -> None:
    run_on_ranks(ranks, 2, change_the_base, layout=layout, output_dir=tmp_path)


def change_the_base(layout: MatrixLayout, output_dir: Path) -> None:
    """The base is changed by rank 1 after the first save, as merged adapters would change it."""
    import paddle

    def change(_: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 1 and paddle.distributed.get_rank() == 1:
            weight = trainer.model.model.model.layers[1].mlp.down_proj.weight
            sliced = getattr(weight, "fw_storage", None)
            stored = weight if sliced is None else sliced
            stored.set_value(stored + 1)

    arguments = {"max_steps": 3, "save_steps": 1}
    trainer = trainer_of(layout, output_dir, arguments, callbacks=[callback(on_step_begin=change)])
    with pytest.raises(MismatchError, match="The base of the adapters has changed: 1 tensor") as refused:
        trainer.train()
    assert "model.layers.1.mlp.down_proj.weight" in refused.value.render()
    assert [path.name for path in output_dir.glob("checkpoint-*")] == ["checkpoint-1"]
    with pytest.raises(MismatchError, match="The base of the adapters has changed"):
        paddleformers_fc.save(output_dir / "checkpoint-9", trainer.model)


@on_ranks(layout=SINGLE)
def test_adapters_that_upstream_cannot_describe_are_refused_by_name(tmp_path: Path) -> None:
    import paddle
    from paddleformers.peft.lora.lora_layers import LoRAConv2D, LoRAMoeExperts

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    args = tiny.training_arguments(SINGLE, str(tmp_path), cls=FlexTrainingArguments, flex_checkpoint=True)

    def refused(model: Any) -> str:
        with pytest.raises(OptionError) as caught:
            tiny.trainer(model, args, cls=FlexTrainer)
        return caught.value.render()

    class UnknownAdapter(paddle.nn.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = self.create_parameter([4, 2])

    model = tiny.build("llama", SINGLE, args)
    model.convolution, model.other = paddle.nn.Conv2D(2, 2, 3), paddle.nn.Linear(4, 4)
    adapted = tiny.adapted(model, target_modules=[".*down_proj", "convolution", "other"])
    adapted.model.other = UnknownAdapter()
    adapted.model.model.layers[1].mlp.down_proj.merge()
    adapted.model.model.layers[0].mlp.down_proj.scaling = 5.0
    adapted.quantized = adapted.lora_config.loraga = adapted.lora_config.do_qat = True
    text = refused(adapted)
    for fault in (
        "loraga: PaddleFormers changes the base",
        "do_qat: the quantization scales",
        "a quantized base",
        "model.layers.1.mlp.down_proj is merged into its base; call unmerge()",
        "model.layers.0.mlp.down_proj: its scaling is 5.0, but lora_alpha and r give 2.0",
        "LoRAConv2D (convolution): ",
        "UnknownAdapter (other): unknown class of adapters",
    ):
        assert fault in text
    untrained = tiny.adapted(tiny.build("llama", SINGLE, args), target_modules=None)
    assert "no tensor of the model is trained" in refused(untrained)
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


# ---- Exports, and what starts from them.

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def train_and_export(layout: MatrixLayout, directory: Path, base: Path) -> None:
    trainer = trainer_of(layout, directory / "run", {"max_steps": 2, "save_steps": 2}, base=base)
    trainer.train()
    trainer.save_model(str(directory / "adapter"))


class Exported:
    """Adapters that were trained on a base of files, and exported by the Trainer."""

    def __init__(self, ranks: ForkServer, directory: Path, layout: MatrixLayout, kind: str) -> None:
        self.base = weights_of(ranks, directory / "base", kind, {})
        run_on_ranks(ranks, layout.nproc, train_and_export, layout=layout, directory=directory, base=self.base)
        self.adapter = directory / "adapter"
        self.checkpoint = directory / "run/checkpoint-2"
        self.opened = paddleformers_fc.open(self.checkpoint)


@pytest.fixture(scope="module")
def llama(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(ranks, tmp_path_factory.mktemp("llama"), SINGLE, "llama")


@pytest.fixture(scope="module")
def ernie(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(ranks, tmp_path_factory.mktemp("ernie"), TP2, "ernie4_5_moe")


@pytest.fixture(scope="module")
def trained(llama: Exported, ernie: Exported) -> dict[str, Exported]:
    return {"llama": llama, "ernie": ernie}


@pytest.mark.parametrize(("kind", "max_shard_bytes"), [("llama", 10**9), ("ernie", 3000)])
def test_a_merged_export_is_the_base_with_the_product_of_its_adapters(
    trained: dict[str, Exported], tmp_path: Path, kind: str, max_shard_bytes: int
) -> None:
    one, found = trained[kind], {}
    for file in one.opened.export(tmp_path / "merged", base=one.base, max_shard_bytes=max_shard_bytes).files:
        found |= load_file(tmp_path / "merged" / file)
    base, adapters = load_file(one.base / "model.safetensors"), load_file(one.adapter / WEIGHTS)
    assert found.keys() == base.keys()
    changed = 0
    for name, values in found.items():
        layer = f"{PREFIX}{name.removesuffix('.weight')}"
        if f"{layer}.lora_B.weight" not in adapters:
            assert values.tobytes() == base[name].tobytes()
            continue
        changed += 1
        product = adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
        np.testing.assert_allclose(values, base[name] + 2 * product, atol=1e-6)
        assert np.abs(values - base[name]).max() > 1e-3
    assert changed == len(adapters) // 2


@pytest.mark.parametrize("is_flex", [True, False], ids=["flex", "paddleformers-lora"])
def test_a_conversion_of_adapters_names_the_commands_that_export_them(
    llama: Exported, tmp_path: Path, is_flex: bool
) -> None:
    theirs = llama.opened.export(tmp_path / "theirs", format="paddleformers-lora").directory
    refused = run("convert", llama.checkpoint if is_flex else theirs, tmp_path / "model", "--format", "hf")
    assert refused.code == 2
    commands = re.findall(r"paddleformers-fc (.+?)(?:\. Or|$)", refused.err, re.MULTILINE)
    assert len(commands) == 2
    for number, command in enumerate(commands):
        target = str(tmp_path / str(number))
        words = (target if word == "OUT" else word for word in shlex.split(command))
        outcome = run(*words, *(() if is_flex else ("--accept-base",)))
        assert outcome.code == 0, outcome.err
    assert not is_flex or (tmp_path / "0" / WEIGHTS).read_bytes() == (llama.adapter / WEIGHTS).read_bytes()
    merged = llama.opened.export(tmp_path / "merged", base=llama.base)
    assert (tmp_path / "1/model.safetensors").read_bytes() == (merged.directory / "model.safetensors").read_bytes()


def test_adapters_of_peft_are_merged_from_a_flex_checkpoint_alone(llama: Exported, tmp_path: Path) -> None:
    flex, merged = (tmp_path / name for name in ("flex/checkpoint-0", "merged"))
    assert run("convert", llama.adapter, flex).code == 0
    assert run("export", flex, merged, "--base", llama.base, "--accept-base").code == 0
    expected = llama.opened.export(tmp_path / "expected", base=llama.base).directory / "model.safetensors"
    assert (merged / "model.safetensors").read_bytes() == expected.read_bytes()
    to = [("convert", "--format", name) for name in ("hf", "distcp")]
    to += [("export",), ("export", "--format", "paddleformers-lora"), ("export", "--base", str(llama.base))]
    for number, (command, *options) in enumerate(to):
        refused = run(command, llama.adapter, tmp_path / str(number), *options)
        assert refused.code == 2, refused.out
        assert "contains adapters in PEFT's format" in refused.err
        assert f"the base: {llama.base}" in refused.err
        assert f"`lora_path: {llama.adapter}`" in refused.err
        assert f"paddleformers-fc convert {llama.adapter} FLEX" in refused.err
        assert not (tmp_path / str(number)).exists()


def resume_converted(flex: Path, base: Path, output_dir: Path) -> None:
    def resume(**arguments: Any) -> None:
        given = {"base": base, "arguments": {"max_steps": 1, **arguments}}
        run_saving_what_was_loaded(flex, layout=SINGLE, output_dir=output_dir, **given)

    accepted = {"flex_allow_config_changes": ["lora.base"]}
    with pytest.raises(FlexError, match=r"flex_allow_config_changes: \[lora\.base\.model\.safetensors\]"):
        resume(ignore_load_lr_and_optim=True)
    with pytest.raises(FlexError, match="ignore_load_lr_and_optim: true"):
        resume(**accepted)
    resume(**accepted, ignore_load_lr_and_optim=True)


def test_a_run_resumes_converted_adapters_if_it_accepts_their_base(
    ranks: ForkServer, llama: Exported, tmp_path: Path
) -> None:
    flex = tmp_path / "flex/checkpoint-0"
    assert run("convert", llama.adapter, flex, "--config", llama.base).code == 0
    run_on_ranks(ranks, 1, resume_converted, flex=flex, base=llama.base, output_dir=tmp_path / "out")
    assert paddleformers_fc.open(tmp_path / "out/checkpoint-0").diff(llama.opened, role="model_state").equal


def test_adapters_are_merged_into_their_own_base_only(llama: Exported, tmp_path: Path) -> None:
    other = llama.opened.export(tmp_path / "other", base=llama.base).directory
    with pytest.raises(MismatchError, match="trained on another base") as refused:
        llama.opened.export(tmp_path / "merged", base=other)
    assert "model.safetensors" in refused.value.render()
    llama.opened.export(tmp_path / "merged", base=other, accept_base=True)
    with pytest.raises(OptionError, match="adapters without their base"):
        llama.opened.export(tmp_path / "model", format="huggingface")


def read_by_paddleformers(base: Path, adapters: Path, resume: Path, output_dir: Path) -> None:
    from paddleformers.peft import LoRAModel

    from paddleformers_fc import FlexTrainingArguments

    trainer = trainer_of(SINGLE, output_dir, {"max_steps": 2}, base=base)
    initial = tensors_of(trainer.model)
    trainer.train(resume_from_checkpoint=str(resume))
    args = tiny.training_arguments(SINGLE, str(output_dir), cls=FlexTrainingArguments, flex_checkpoint=False)
    read = LoRAModel.from_pretrained(from_files(base, SINGLE, args), str(adapters))
    assert tensors_of(read) == tensors_of(trainer.model) != initial


@pytest.mark.parametrize("kind", ["llama", "ernie"])
def test_an_export_for_paddleformers_is_read_by_paddleformers(
    ranks: ForkServer, trained: dict[str, Exported], tmp_path: Path, kind: str
) -> None:
    one, adapters = trained[kind], tmp_path / "adapters"
    one.opened.export(adapters, format="paddleformers-lora")
    assert paddleformers_fc.open(adapters).diff(one.opened, role="model_state").equal
    given = {"base": one.base, "adapters": adapters, "resume": one.checkpoint, "output_dir": tmp_path / "out"}
    run_on_ranks(ranks, 1, read_by_paddleformers, **given)


def export_for_peft(directory: Path) -> None:
    """Save adapters on the base, export them by the Trainer, and write the model's logits beside the export."""
    import paddle

    trainer = trainer_of(SINGLE, directory / "run", {"max_steps": 1}, base=directory / "base")
    paddleformers_fc.save(directory / "checkpoint-1", trainer.model, step=1)
    trainer.save_model(str(directory / "adapter"))
    trainer.model.eval()
    logits = trainer.model(paddle.to_tensor(np.arange(1, tiny.SEQUENCE + 1)[None]))
    logits = logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)
    np.save(directory / "adapter.npy", logits.numpy())


def write_for_peft(ranks: ForkServer, directory: Path) -> None:
    """Write ``base``, ``adapter`` and ``merged``, and the logits of PaddleFormers as ``adapter.npy``."""
    weights_of(ranks, directory, "llama", {}).rename(directory / "base")
    run_on_ranks(ranks, 1, export_for_peft, directory=directory)
    paddleformers_fc.open(directory / "checkpoint-1").export(directory / "merged", base=directory / "base")


def test_peft_computes_the_logits_of_paddleformers(ranks: ForkServer, tmp_path: Path) -> None:
    """The logits are those of PEFT on PyTorch, which ``tools/peft_fixtures.py`` has written for these exports."""
    write_for_peft(ranks, tmp_path)
    expected, found = np.load(tmp_path / "adapter.npy"), np.load(Path(__file__).with_name("peft.npz"))
    assert inputs(tmp_path) == json.loads(str(found["inputs"]))
    assert np.abs(found["base"] - expected).max() > 0.1
    assert np.abs(found["adapter"] - expected).max() <= 1e-5
    assert np.abs(found["merged"] - expected).max() <= 1e-5


# ---- Starting from adapters.


def start_from_lora_path(layout: MatrixLayout, base: Path, directories: list[str], output_dir: Path) -> list[str]:
    """Make a model with adapters of files as the command line does, and save it; what is logged about each."""
    from paddleformers.peft import LoRAModel

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 1}
    args = tiny.training_arguments(layout, str(output_dir), **settings)
    logs = []
    for directory in directories:
        plain = from_files(base, layout, args)
        with logged() as lines:
            model = LoRAModel.from_pretrained(plain, directory, load_checkpoint_format="flex_checkpoint")
            paddleformers_fc.save(output_dir / "checkpoint-1", model)
            tiny.trainer(model, args, cls=FlexTrainer).train()
        assert (model.lora_config.r, model.lora_config.scaling) == (4, 2.0)
        logs.append("\n".join(lines))
    return logs


@pytest.mark.parametrize(
    ("kind", "layout", "format"),
    [("ernie", PP2, "peft"), ("ernie", TP2, "paddleformers-lora"), ("llama", TP2, "peft"), ("ernie", SINGLE, "peft")],
    ids=["pp2", "tp2-paddleformers", "tp2-llama", "single"],
)
def test_adapters_start_from_files_by_lora_path_under_any_layout(
    ranks: ForkServer, trained: dict[str, Exported], tmp_path: Path, kind: str, layout: MatrixLayout, format: str
) -> None:
    one = trained[kind]
    one.opened.export(tmp_path / "adapters", format=format)
    (tmp_path / "adapters/flex_checksums.json").unlink()  # Other programs write none.
    given = {"layout": layout, "base": one.base, "directories": [str(tmp_path / "adapters")]}
    run_on_ranks(ranks, layout.nproc, start_from_lora_path, output_dir=tmp_path / "out", **given)
    assert paddleformers_fc.open(tmp_path / "out/checkpoint-1").diff(one.opened, role="model_state").equal


def test_adapters_of_some_layers_that_no_pattern_selects_are_refused(
    ranks: ForkServer, llama: Exported, tmp_path: Path
) -> None:
    def keep_the_first_layer(tensors: dict[str, Any]) -> None:
        for name in [one for one in tensors if ".layers.1." in one]:
            del tensors[name]

    directory = altered(llama.adapter, tmp_path / "adapters", keep_the_first_layer)
    given = {"layout": SINGLE, "base": llama.base, "directories": [directory], "output_dir": tmp_path / "out"}
    with pytest.raises(PeerError, match="k_proj: some layers of this name have adapters"):
        run_on_ranks(ranks, 1, start_from_lora_path, **given)


def refuse_adapters(base: Path, messages: dict[str, str], output_dir: Path) -> None:
    model = trainer_of(SINGLE, output_dir, base=base).model
    for directory, text in messages.items():
        with pytest.raises(FlexError, match=re.escape(text)):
            paddleformers_fc.load_open_weights(model, directory)


def altered(source: Path, target: Path, change: Callable[[dict[str, Any]], object] = len, **config: Any) -> str:
    """A copy of adapters with other tensors and other keys of their configuration."""
    target.mkdir()
    tensors = load_file(source / WEIGHTS)
    change(tensors)
    save_file(tensors, target / WEIGHTS)
    (target / CONFIG).write_text(json.dumps({**json.loads((source / CONFIG).read_text()), **config}))
    return str(target)


def test_adapters_that_do_not_fit_are_refused_by_reason(ranks: ForkServer, ernie: Exported, tmp_path: Path) -> None:
    key = f"{PREFIX}model.layers.1.self_attn.k_proj.lora_A.weight"
    made: list[tuple[dict[str, Any], str]] = [
        ({"r": 8}, "r: stored 8, expected 4"),
        ({"lora_alpha": 32}, "scaling: stored 8.0, expected 2.0"),
        ({"use_dora": True}, "use_dora: True"),
        ({"peft_type": "VERA"}, "peft_type: VERA"),
        ({"change": lambda tensors: tensors.update({key: tensors[key] + 1})}, "k_proj.lora_A.weight"),
    ]
    messages = {altered(ernie.adapter, tmp_path / str(at), **one): text for at, (one, text) in enumerate(made)}
    messages[str(ernie.base)] = "contains no adapters"
    run_on_ranks(ranks, 1, refuse_adapters, base=ernie.base, messages=messages, output_dir=tmp_path / "out")


def test_a_base_tensor_stored_with_adapters_is_named_in_the_log(
    ranks: ForkServer, llama: Exported, tmp_path: Path
) -> None:
    name = "model.embed_tokens.weight"
    added = {f"{PREFIX}{name}": load_file(llama.base / "model.safetensors")[name]}
    directories = [
        altered(llama.adapter, tmp_path / str(listed), lambda tensors: tensors.update(added), modules_to_save=listed)
        for listed in (None, ["embed_tokens"])
    ]
    given = {"layout": SINGLE, "base": llama.base, "directories": directories, "output_dir": tmp_path / "out"}
    (logs,) = run_on_ranks(ranks, 1, start_from_lora_path, **given)
    assert [f"This run reads and trains them: {name}." in log for log in logs] == [True, False]

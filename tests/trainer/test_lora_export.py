"""Exports of adapters: for PEFT, merged into their base, and for PaddleFormers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import FlexError, MismatchError, OptionError
from tests.cli.support import run
from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import PP2, SINGLE, TP2, MatrixLayout
from tests.trainer import peft_files
from tests.trainer.jobs import logged
from tests.trainer.lora_jobs import from_files, trainer_of
from tests.trainer.test_pretrained import weights_of
from tools.peft_fixtures import inputs
from verification.forkserver import ForkServer

JOBS = "tests.trainer.lora_jobs"
PREFIX = "base_model.model."


class Exported:
    """Adapters that were trained on a base of files, and exported by the Trainer."""

    def __init__(self, ranks: ForkServer, directory: Path, layout: MatrixLayout, kind: str, **settings: Any) -> None:
        self.base = weights_of(ranks, directory / "base", kind, {})
        self.directory = directory
        self.adapter = directory / "adapter"
        self.checkpoint = directory / "run/checkpoint-2"
        job = {
            "layout": layout.to_json(),
            "output_dir": str(directory / "run"),
            "base": str(self.base),
            "target": str(self.adapter),
            "arguments": {"max_steps": 2, "save_steps": 2},
        }
        ranks.run(f"{JOBS}:train_and_export", layout.nproc, {**job, **settings})


@pytest.fixture(scope="module")
def llama(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(ranks, tmp_path_factory.mktemp("llama"), SINGLE, "llama")


@pytest.fixture(scope="module")
def ernie(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(ranks, tmp_path_factory.mktemp("ernie"), TP2, "ernie4_5_moe")


def test_the_trainer_exports_adapters_as_peft_names_and_turns_them(llama: Exported, tmp_path: Path) -> None:
    config = json.loads((llama.adapter / "adapter_config.json").read_text())
    assert {key: config[key] for key in ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "fan_in_fan_out")} == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    assert config["base_model_name_or_path"] == str(llama.base)
    assert config["target_modules"] == [f"{name}_proj" for name in ("down", "gate", "k", "o", "q", "up", "v")]
    tensors = load_file(llama.adapter / "adapter_model.safetensors")
    layer = f"{PREFIX}model.layers.3.self_attn.k_proj"
    assert len(tensors) == 4 * 7 * 2
    assert (tensors[f"{layer}.lora_A.weight"].shape, tensors[f"{layer}.lora_B.weight"].shape) == ((4, 64), (32, 4))
    report = paddleformers_fc.open(llama.checkpoint).export(tmp_path / "again")
    (digest,) = report.digests().values()
    again = json.loads((llama.adapter / "flex_checksums.json").read_text())["files"]
    assert digest in [one["digest"] for one in again]


def test_adapters_of_fused_layers_are_exported_per_part_under_any_layout(
    ranks: ForkServer, ernie: Exported, tmp_path: Path
) -> None:
    tensors = load_file(ernie.adapter / "adapter_model.safetensors")
    scope = f"{PREFIX}model.layers.1.self_attn."
    shared = [tensors[f"{scope}{part}_proj.lora_A.weight"].tobytes() for part in "qkv"]
    assert len(set(shared)) == 1
    assert not any("qkv_proj" in name or "up_gate_proj" in name for name in tensors)
    job = {"layout": SINGLE.to_json(), "output_dir": str(tmp_path), "model_type": "ernie4_5_moe"}
    settings = {**job, "base": str(ernie.base), "arguments": {"max_steps": 2}, "resume": str(ernie.checkpoint)}
    ranks.run(f"{JOBS}:run_saving_what_was_loaded", 1, settings)
    paddleformers_fc.open(tmp_path / "checkpoint-2").export(tmp_path / "adapter")
    name = "adapter_model.safetensors"
    assert (tmp_path / "adapter" / name).read_bytes() == (ernie.adapter / name).read_bytes()


@pytest.mark.parametrize(("kind", "max_shard_bytes"), [("llama", 10**9), ("ernie", 3000)])
def test_a_merged_export_is_the_base_with_the_product_of_its_adapters(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, max_shard_bytes: int
) -> None:
    trained: Exported = request.getfixturevalue(kind)
    checkpoint = paddleformers_fc.open(trained.checkpoint)
    report = checkpoint.export(tmp_path / "merged", base=trained.base, max_shard_bytes=max_shard_bytes)
    found: dict[str, Any] = {}
    for file in report.files:
        found |= load_file(tmp_path / "merged" / file)
    base = load_file(trained.base / "model.safetensors")
    adapters = load_file(trained.adapter / "adapter_model.safetensors")
    assert found.keys() == base.keys()
    changed = 0
    for name, values in found.items():
        product = adapters.get(f"{PREFIX}{name.removesuffix('weight')}lora_B.weight")
        if product is None:
            assert values.tobytes() == base[name].tobytes()
            continue
        changed += 1
        inputs = adapters[f"{PREFIX}{name.removesuffix('weight')}lora_A.weight"]
        np.testing.assert_allclose(values, base[name] + 2 * product @ inputs, atol=1e-6)
        assert np.abs(values - base[name]).max() > 1e-3
    assert changed == len(adapters) // 2


def test_a_conversion_of_adapters_to_a_model_names_the_commands_that_export_them(
    llama: Exported, tmp_path: Path
) -> None:
    refused = run("convert", llama.checkpoint, tmp_path / "model", "--format", "hf")
    assert refused.code == 2
    commands = re.findall(r"paddleformers-fc (.+?)(?:\. Or|$)", refused.err, re.MULTILINE)
    assert [one.split(" OUT ")[1] for one in commands] == ["--format peft", f"--base {llama.base}"]
    for number, command in enumerate(commands):
        target = str(tmp_path / str(number))
        outcome = run(*(target if word == "OUT" else word for word in shlex.split(command)))
        assert outcome.code == 0, outcome.err
    assert (tmp_path / "0/adapter_model.safetensors").read_bytes() == (
        llama.adapter / "adapter_model.safetensors"
    ).read_bytes()
    assert (tmp_path / "1/model.safetensors").exists()


def test_adapters_of_peft_are_converted_to_flex_alone_and_merged_from_there(llama: Exported, tmp_path: Path) -> None:
    flex, back, merged = (tmp_path / name for name in ("flex/checkpoint-0", "back", "merged"))
    assert run("convert", llama.adapter, flex).code == 0
    checkpoint = paddleformers_fc.open(llama.checkpoint)
    assert checkpoint.diff(paddleformers_fc.open(flex), role="model_state").equal
    assert run("export", flex, back).code == 0
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (back / name).read_bytes() == (llama.adapter / name).read_bytes()
    assert run("export", flex, merged, "--base", llama.base, "--accept-base").code == 0
    expected = checkpoint.export(tmp_path / "expected", base=llama.base).directory / "model.safetensors"
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


def test_a_run_resumes_converted_adapters_of_peft_if_it_accepts_their_base(
    ranks: ForkServer, llama: Exported, tmp_path: Path
) -> None:
    flex = tmp_path / "flex/checkpoint-0"
    assert run("convert", llama.adapter, flex, "--config", llama.base).code == 0
    arguments = {"max_steps": 1, "ignore_load_lr_and_optim": True}
    accepted = {**arguments, "flex_allow_config_changes": ["lora.base"]}
    given = {"base": str(llama.base), "resume": str(flex)}
    made = {
        "refused": {**given, "arguments": arguments},
        "states": {**given, "arguments": {**accepted, "ignore_load_lr_and_optim": False}},
    }
    (found,) = ranks.run(f"{JOBS}:attempts", 1, {"output_dir": str(tmp_path), "made": made}).values
    assert "flex_allow_config_changes: [lora.base.model.safetensors]" in found["refused"], found
    assert "ignore_load_lr_and_optim: true" in found["states"], found
    job = {**given, "layout": SINGLE.to_json(), "output_dir": str(tmp_path / "out"), "arguments": accepted}
    ranks.run(f"{JOBS}:run_saving_what_was_loaded", 1, job)
    loaded = paddleformers_fc.open(tmp_path / "out/checkpoint-0")
    assert loaded.diff(paddleformers_fc.open(llama.checkpoint), role="model_state").equal


def test_adapters_of_paddleformers_are_converted_there_and_back_and_merged(llama: Exported, tmp_path: Path) -> None:
    theirs, flex, back = (tmp_path / name for name in ("theirs", "flex/checkpoint-2", "back"))
    checkpoint = paddleformers_fc.open(llama.checkpoint)
    checkpoint.export(theirs, format="paddleformers-lora")
    assert run("convert", theirs, flex).code == 0
    found = checkpoint.diff(paddleformers_fc.open(flex), role="model_state")
    assert found.equal
    assert found.roles["model_state"].equal == 56
    assert run("export", flex, back, "--format", "paddleformers-lora").code == 0
    name = "peft_model-00001-of-00001.safetensors"
    assert (back / name).read_bytes() == (theirs / name).read_bytes()
    refused = run("convert", theirs, tmp_path / "model", "--format", "hf")
    commands = re.findall(r"paddleformers-fc (.+?)(?:\. Or|$)", refused.err, re.MULTILINE)
    assert len(commands) == 2
    for number, command in enumerate(commands):
        target = str(tmp_path / str(number))
        outcome = run(*(target if word == "OUT" else word for word in shlex.split(command)), "--accept-base")
        assert outcome.code == 0, outcome.err
    merged = checkpoint.export(tmp_path / "merged", base=llama.base)
    assert (tmp_path / "1/model.safetensors").read_bytes() == (merged.directory / "model.safetensors").read_bytes()


def test_adapters_are_merged_into_their_own_base_only(llama: Exported, tmp_path: Path) -> None:
    checkpoint = paddleformers_fc.open(llama.checkpoint)
    other = tmp_path / "other"
    paddleformers_fc.open(llama.checkpoint).export(other, base=llama.base)
    with pytest.raises(MismatchError, match="trained on another base") as refused:
        checkpoint.export(tmp_path / "merged", base=other)
    assert "model.safetensors" in refused.value.render()
    checkpoint.export(tmp_path / "merged", base=other, accept_base=True)
    with pytest.raises(OptionError, match="adapters without their base"):
        checkpoint.export(tmp_path / "model", format="huggingface")
    with pytest.raises(OptionError, match="Unknown format"):
        checkpoint.export(tmp_path / "model", format="onnx")


@pytest.mark.parametrize("kind", ["llama", "ernie"])
def test_an_export_for_paddleformers_is_read_by_paddleformers(
    ranks: ForkServer, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    trained: Exported = request.getfixturevalue(kind)
    checkpoint = paddleformers_fc.open(trained.checkpoint)
    checkpoint.export(tmp_path / "adapters", format="paddleformers-lora")
    assert paddleformers_fc.open(tmp_path / "adapters").diff(checkpoint, role="model_state").equal
    job = {"output_dir": str(tmp_path / "out"), "base": str(trained.base), "adapters": str(tmp_path / "adapters")}
    given = {**job, "resume": str(trained.checkpoint)}
    (found,) = ranks.run(f"{JOBS}:read_by_paddleformers", 1, given).values
    assert found == {"equal": True, "initially": False}


def test_peft_computes_the_logits_of_paddleformers(ranks: ForkServer, tmp_path: Path) -> None:
    """The logits are those of PEFT on PyTorch, which ``tools/peft_fixtures.py`` has written for these exports."""
    peft_files.write(ranks, tmp_path)
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
        plain = from_files(str(base), layout.to_json(), args)
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
    ranks: ForkServer, request: pytest.FixtureRequest, tmp_path: Path, kind: str, layout: MatrixLayout, format: str
) -> None:
    trained: Exported = request.getfixturevalue(kind)
    checkpoint = paddleformers_fc.open(trained.checkpoint)
    checkpoint.export(tmp_path / "adapters", format=format)
    (tmp_path / "adapters/flex_checksums.json").unlink()  # Other programs write none.
    given = {"layout": layout, "base": trained.base, "directories": [str(tmp_path / "adapters")]}
    run_on_ranks(ranks, layout.nproc, start_from_lora_path, output_dir=tmp_path / "out", **given)
    assert paddleformers_fc.open(tmp_path / "out/checkpoint-1").diff(checkpoint, role="model_state").equal


def refuse_adapters(base: Path, messages: dict[str, str], output_dir: Path) -> None:
    model = trainer_of(SINGLE.to_json(), str(output_dir), base=str(base)).model
    for directory, text in messages.items():
        with pytest.raises(FlexError) as refused:
            paddleformers_fc.load_open_weights(model, directory)
        assert text in refused.value.render(), directory


def test_adapters_that_do_not_fit_are_refused_with_the_reason(
    ranks: ForkServer, ernie: Exported, tmp_path: Path
) -> None:
    name = "adapter_model.safetensors"

    def changed(key: str, value: object) -> str:
        directory = tmp_path / key
        directory.mkdir()
        config = json.loads((ernie.adapter / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        (directory / name).write_bytes((ernie.adapter / name).read_bytes())
        return str(directory)

    apart = changed("lora_dropout", 0.0)
    tensors = load_file(f"{apart}/{name}")
    key = f"{PREFIX}model.layers.1.self_attn.k_proj.lora_A.weight"
    save_file({**tensors, key: tensors[key] + 1}, f"{apart}/{name}")
    messages = {
        changed("r", 8): "r: stored 8, expected 4",
        changed("lora_alpha", 32): "scaling: stored 8.0, expected 2.0",
        changed("use_dora", True): "use_dora: True",
        changed("peft_type", "VERA"): "peft_type: VERA",
        apart: "k_proj.lora_A.weight",
        str(ernie.base): "contains no adapters",
    }
    run_on_ranks(ranks, 1, refuse_adapters, base=ernie.base, messages=messages, output_dir=tmp_path / "out")


def test_a_tensor_of_the_base_that_peft_has_saved_beside_adapters_is_named_in_the_log(
    ranks: ForkServer, llama: Exported, tmp_path: Path
) -> None:
    name, file = "model.embed_tokens.weight", "adapter_model.safetensors"
    config = json.loads((llama.adapter / "adapter_config.json").read_text())
    tensors = {**load_file(llama.adapter / file), f"{PREFIX}{name}": load_file(llama.base / "model.safetensors")[name]}
    directories = [tmp_path / "unlisted", tmp_path / "listed"]
    for directory, listed in zip(directories, (None, ["embed_tokens"]), strict=True):
        directory.mkdir()
        save_file(tensors, directory / file)
        (directory / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": listed}))
    given = {"layout": SINGLE, "base": llama.base, "directories": [*map(str, directories)]}
    (logs,) = run_on_ranks(ranks, 1, start_from_lora_path, output_dir=tmp_path / "out", **given)
    assert [f"This run reads and trains them: {name}." in log for log in logs] == [True, False]

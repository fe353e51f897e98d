"""Exports of adapters: for PEFT, merged into their base, and for PaddleFormers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
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
from tests.trainer.export_jobs import weights_of
from tests.trainer.jobs import logged, weights_of as tensors_of
from tests.trainer.lora_jobs import from_files, run_saving_what_was_loaded, trainer_of
from tools.peft_fixtures import inputs
from verification.forkserver import ForkServer

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def train_and_export(layout: MatrixLayout, directory: Path, base: Path) -> None:
    trainer = trainer_of(layout, directory / "run", {"max_steps": 2, "save_steps": 2}, base=str(base))
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
        given = {"base": str(base), "arguments": {"max_steps": 1, **arguments}}
        run_saving_what_was_loaded(str(flex), layout=SINGLE, output_dir=output_dir, **given)

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

    trainer = trainer_of(SINGLE, output_dir, {"max_steps": 2}, base=str(base))
    initial = tensors_of(trainer.model)
    trainer.train(resume_from_checkpoint=str(resume))
    args = tiny.training_arguments(SINGLE, str(output_dir), cls=FlexTrainingArguments, flex_checkpoint=False)
    read = LoRAModel.from_pretrained(from_files(str(base), SINGLE, args), str(adapters))
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
        plain = from_files(str(base), layout, args)
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


def refuse_adapters(base: Path, messages: dict[str, str], output_dir: Path) -> None:
    model = trainer_of(SINGLE, output_dir, base=str(base)).model
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

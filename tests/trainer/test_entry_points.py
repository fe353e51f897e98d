"""The ways in: a script, the stock Trainer, the stock command line and its workflows; and what none of them changes."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.errors import OptionError
from paddleformers_fc.storage.manifest import read_manifest
from paddleformers_fc.trainer.register import PATH
from tests.cli.support import run
from tests.harness import tiny
from tests.harness.limits import LIMIT
from tests.harness.on_ranks import job_on_ranks, on_ranks, run_on_ranks
from tests.harness.patching import without
from tests.harness.tiny import SINGLE, MatrixLayout
from tests.trainer.jobs import outcome, train_and_resume, trained
from verification.demo.assets import Assets, prepare
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = re.compile(r"^from paddleformers_fc import (.+)$", re.MULTILINE)

REPLACED = [
    "LoRAModel.from_pretrained",
    "PdArgumentParser.__init__",
    "PdArgumentParser.parse_dict",
    "PretrainedModel.from_pretrained",
    "Trainer.__init__",
    "Trainer._inner_training_loop",
    "Trainer._load_flex_checkpoint",
    "Trainer._maybe_log_save_evaluate",
    "Trainer._rotate_checkpoints",
    "Trainer._save",
    "Trainer._save_checkpoint",
    "Trainer._sorted_checkpoints",
    "Trainer.evaluate",
    "Trainer.save_model",
    "Trainer.train",
]


@on_ranks(1, server="bare_ranks")
def test_every_name_in_the_readme_and_the_training_page_can_be_imported() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "docs/training.md").read_text()
    imported = [f"paddleformers_fc.{name}" for line in IMPORTS.findall(text) for name in line.split(", ")]
    names = sorted({*imported, *re.findall(r"paddleformers_fc(?:\.[A-Za-z_]+)+", text)})
    assert {"paddleformers_fc.FlexTrainerMixin", "paddleformers_fc.cpu_runtime"} <= set(names)
    # Forget the submodules that this file has imported, which would make names of the package available.
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "paddleformers_fc"]:
        del sys.modules[loaded]
    package = {"paddleformers_fc": importlib.import_module("paddleformers_fc")}
    for name in names:
        eval(name, package)
    with pytest.raises(AttributeError, match="module 'paddleformers_fc' has no attribute 'FlexTrainers'"):
        eval("paddleformers_fc.FlexTrainers", package)


def run_script(output_dir: Path, options: list[str]) -> None:
    """Run the script of the recipes as an interpreter does, in a process that has imported Paddle."""
    sys.argv = [str(ROOT / "recipes/script.py"), "--output", str(output_dir), *options]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_the_script_of_the_recipes_trains_on_two_ranks_and_resumes_on_one(ranks: ForkServer, tmp_path: Path) -> None:
    def run(nproc: int, *options: str) -> str:
        done = job_on_ranks(ranks.run, nproc, run_script, output_dir=tmp_path / "out", options=options)
        return done.logs[0].read_text()

    first = run(2, "--steps", "3")
    resumed = run(1, "--steps", "4", "--resume", "newest")
    assert "Resumed step 3" in resumed
    assert losses(first)[0] > losses(resumed)[0]


def methods() -> dict[str, int]:
    from paddle.nn import Layer
    from paddleformers.peft import LoRAModel
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
    from paddleformers.transformers import PretrainedModel

    owners = (Trainer, PdArgumentParser, TrainingArguments, PretrainedModel, LoRAModel, Layer)
    return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}


@on_ranks(1, server="bare_ranks")
def test_importing_the_entry_changes_nothing_and_detaching_restores_all() -> None:
    assert "paddleformers_fc.trainer.entry" not in sys.modules
    before = methods()

    def changed() -> list[str]:
        return sorted(name for name, value in methods().items() if before.get(name) != value)

    from paddleformers_fc.trainer import entry

    assert changed() == []
    entry.install()
    entry.install()
    assert changed() == REPLACED
    entry.detach()
    assert changed() == []


def run_native(way: str, output_dir: Path) -> list[Any]:
    """Train without ``flex_checkpoint``: with the stock Trainer alone, through our subclass, or installed."""
    from paddleformers.trainer import Trainer, TrainingArguments

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, install

    if way == "installed":
        install()
    kind = TrainingArguments if way == "stock" else FlexTrainingArguments
    cls = FlexTrainer if way == "subclass" else Trainer
    given = {"max_steps": 4, "save_steps": 1, "save_total_limit": 2}
    args = tiny.training_arguments(SINGLE, str(output_dir), cls=kind, **given)
    trainer = tiny.trainer(tiny.build("llama", SINGLE, args), args, cls=cls)
    trainer.train()
    trainer.save_model(str(output_dir / "final"))
    files = sorted(path.relative_to(output_dir).as_posix() for path in output_dir.rglob("*") if path.is_file())
    return [trainer.losses, [name for name in files if not name.startswith("runs/")]]


def test_without_flex_checkpoint_every_way_in_is_paddleformers_own(ranks: ForkServer, tmp_path: Path) -> None:
    stock, *others = (
        run_on_ranks(ranks, 1, run_native, way=way, output_dir=tmp_path / way)[0]
        for way in ("stock", "subclass", "installed")
    )
    assert "checkpoint-4/model_state/0.metadata" in stock[1]
    assert others == [stock, stock]


@on_ranks(layout=SINGLE)
def test_the_stock_trainer_saves_and_resumes_with_the_arguments_alone(layout: MatrixLayout, tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer

    given: dict[str, Any] = {"layout": layout, "arguments": {"max_steps": 4, "save_steps": 2}}
    whole, resumed = train_and_resume(tmp_path, [2], cls=Trainer, **given)
    second = tmp_path / "whole" / "checkpoint-2"
    assert read_manifest(second).step == 2
    assert resumed == {**whole, "losses": whole["losses"][2:]}
    assert outcome(trained(output_dir=tmp_path / "subclass", resume=second, **given)) == resumed


def test_the_path_of_the_registration_file_is_printed() -> None:
    command = [sys.executable, "-m", "paddleformers_fc.trainer.register"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True).stdout
    assert printed == f"{PATH}\n"
    assert PATH.is_file()


# By YAML: test_the_stock_command_line_trains_two_ranks_and_another_layout_resumes.
@on_ranks(1)
def test_the_stock_parser_accepts_our_keys_as_arguments_once_the_file_has_run(tmp_path: Path) -> None:
    from paddleformers.cli.hparams import FinetuningArguments
    from paddleformers.trainer import PdArgumentParser

    runpy.run_path(str(PATH))
    values = {"output_dir": tmp_path, "device": "cpu", "compute_type": "float32", "amp_master_grad": "false"}
    given = {**values, "flex_checkpoint": "true", "flex_threads": 3}
    argv = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
    (parsed, *_) = PdArgumentParser([FinetuningArguments]).parse_args_into_dataclasses(argv)
    assert isinstance(parsed, FinetuningArguments)
    assert (parsed.flex_checkpoint, parsed.flex_threads) == (True, 3)


# ---- The stock command line.


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny model, its tokenizer and a real text."""
    return prepare(tmp_path_factory.mktemp("assets"))


def write_recipe(name: str, assets: Assets, output_dir: Path, **keys: Any) -> Path:
    """A recipe with the registration file, its data where it is here, and with other keys."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text().replace("./demo_out/assets", str(assets.corpus.parent))
    values = {**yaml.safe_load(text), "custom_register_path": str(PATH), "output_dir": str(output_dir)}
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**values, **keys}))
    return path


FOUR_STEPS = {"max_steps": 4, "save_steps": 2}


def losses(log: str) -> list[float]:
    """The losses that a Trainer logged."""
    return [float(found) for found in re.findall(r"\bloss: ([0-9.]+), learning_rate", log)]


def run_command_line(yaml: Path) -> None:
    """What ``paddleformers-cli train`` runs in each of its workers."""
    from paddleformers.cli import launcher

    sys.argv = ["launcher.py", "train", str(yaml)]
    launcher.launch()


def train_by_workers(ranks: ForkServer, assets: Assets, output_dir: Path, nproc: int = 1, **keys: Any) -> str:
    """Train the recipe of the Llama as the command line's workers do, for four steps; the log of the first."""
    path = write_recipe("llama_pt", assets, output_dir, **FOUR_STEPS, **keys)
    return job_on_ranks(ranks.run, nproc, run_command_line, yaml=path).logs[0].read_text()


def train_by_command(path: Path, directory: Path) -> str:
    """Train on two ranks by PaddleFormers' command, in a working directory; the log of the first rank."""
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PADDLE_DISTRI_BACKEND": "gloo",
        # The command line sizes a job by this list, on a machine without an accelerator too.
        "CUDA_VISIBLE_DEVICES": "0,1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "paddleformers.cli.cli", "train", str(path)]
    trained = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    return (directory / "paddleformers_dist_log" / "workerlog.0").read_text()


# The command itself starts below and in tests/nodes/test_two_nodes.py.
def test_the_stock_command_line_trains_two_ranks_and_another_layout_resumes(
    ranks: ForkServer, assets: Assets, tmp_path: Path
) -> None:
    out, tp2 = tmp_path / "out", {"tensor_model_parallel_size": 2}
    (out / "checkpoint-2").mkdir(parents=True)  # Unfinished: it does not mislead a run that begins.
    log = train_by_workers(ranks, assets, out, 2, **tp2)
    assert "checkpoint-2 cannot be resumed and is skipped" in log
    assert read_manifest(out / "checkpoint-2").parallel["tp"] == 2
    alone = train_by_workers(ranks, assets, tmp_path / "alone", resume_from_checkpoint=str(out / "checkpoint-2"))
    assert len(losses(log)) == 4
    assert losses(alone) == pytest.approx(losses(log)[2:], abs=1e-6)
    last = canonical_digests(out / "checkpoint-4")
    assert list(canonical_digests(out)) == [one for one in last if one.role == "model_state"]
    assert (tmp_path / "alone" / "tokenizer.json").exists()


def test_the_command_line_reports_another_corpus_and_tokenizer_at_a_resume_and_nothing_of_the_same_run(
    ranks: ForkServer, assets: Assets, tmp_path: Path
) -> None:
    differs = "This run differs from the run that saved step 2"
    train_by_workers(ranks, assets, tmp_path / "out")
    moved = shutil.copytree(assets.models["llama"], tmp_path / "model")
    again = {"resume_from_checkpoint": str(tmp_path / "out/checkpoint-2"), "model_name_or_path": str(moved)}
    assert differs not in train_by_workers(ranks, assets, tmp_path / "same", **again)
    settings = json.loads((moved / "tokenizer_config.json").read_text())
    (moved / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77}))
    text = assets.corpus.read_text()
    (tmp_path / "other.jsonl").write_text(text + text.splitlines()[0] + "\n")
    log = train_by_workers(ranks, assets, tmp_path / "other", **again, train_dataset_path=str(tmp_path / "other.jsonl"))
    table = log.partition(differs)[2]
    for key in ("train_dataset_path ", "train_dataset_sizes ", "tokenizer_config.json "):
        assert f"\n  {key}" in table


@on_ranks(2)
def test_keys_that_cannot_be_meant_are_refused_before_a_process_group() -> None:
    from paddle.distributed import parallel
    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import PdArgumentParser

    from paddleformers_fc.errors import OptionError
    from paddleformers_fc.trainer.entry import install

    install()
    for text, refused in (
        ("flex_verfy: 1", "flex_verfy: did you mean flex_verify?"),
        ("save_stps: 1", "save_stps: did you mean save_steps?"),
        ("learning_rate: 5e-3", "learning_rate: '5e-3' is not a number"),
        (
            "save_checkpoint_format: unified_checkpoint",
            "flex_checkpoint: true and save_checkpoint_format: unified_checkpoint",
        ),
    ):
        keys = {"flex_checkpoint": True, "output_dir": "out", **yaml.safe_load(text)}
        with pytest.raises(OptionError) as caught:
            PdArgumentParser(parser._TRAIN_ARGS).parse_dict(keys, return_unknown_ars=True)
        assert refused in caught.value.render()
    assert not parallel.parallel_helper._is_parallel_ctx_initialized()


def run_command_line_without_a_method(yaml: Path) -> None:
    from paddleformers.trainer import Trainer

    with without(Trainer, "_save_checkpoint"):
        run_command_line(yaml)


def test_a_worker_trains_without_flex_checkpoint_although_a_method_is_renamed(
    ranks: ForkServer, assets: Assets, tmp_path: Path
) -> None:
    path = write_recipe("llama_pt", assets, tmp_path / "stock", max_steps=2, save_steps=9, flex_checkpoint=False)
    log = job_on_ranks(ranks.run, 1, run_command_line_without_a_method, yaml=path).logs[0].read_text()
    assert "This environment does not support flex_checkpoint: true" in log
    assert len(losses(log)) == 2


def run_command_line_without_the_parser_of_keys(yaml: Path) -> None:
    from paddleformers.trainer import Trainer

    from paddleformers_fc.trainer import entry

    with without(Trainer, "_save_checkpoint"), without(entry, "install_options"):
        run_command_line(yaml)


@pytest.mark.slow
def test_a_worker_names_the_keys_that_it_cannot_add_to_the_parser(
    ranks: ForkServer, assets: Assets, tmp_path: Path
) -> None:
    path = write_recipe("llama_pt", assets, tmp_path / "stock", max_steps=2, save_steps=9, flex_checkpoint=False)
    failed = job_on_ranks(ranks.attempt, 1, run_command_line_without_the_parser_of_keys, yaml=path)
    log = failed.logs[0].read_text()
    assert not failed.ok
    assert "The keys of paddleformers_fc are unknown to this parser" in log
    assert re.search("ValueError: .*flex_checkpoint", log)


# ---- Workflows by the recipes: stopped and resumed under another layout, each trains what it would have.

DP2 = {"gradient_accumulation_steps": 2}
TP2 = {"gradient_accumulation_steps": 4, "tensor_model_parallel_size": 2}
PP2 = {"gradient_accumulation_steps": 4, "pipeline_model_parallel_size": 2}
SD2 = {"gradient_accumulation_steps": 2, "sharding": "stage1", "sharding_parallel_size": 2, "split_param": True}


def train_watched(config: Path) -> dict[str, Any]:
    """Run a YAML as each worker of ``paddleformers-cli train`` does.

    Returns:
        ``losses`` by step, and ``samples``: per step the digests of the sequences that this rank trained.
    """
    from paddleformers.cli import launcher
    from paddleformers.cli.train.dpo import workflow as dpo
    from paddleformers.cli.train.sft import workflow as sft
    from paddleformers.trainer import TrainerCallback, trainer as of_trainer

    known: dict[bytes, list[str]] = {}
    losses: dict[int, float] = {}
    samples: dict[int, list[str]] = {}

    class Watch(TrainerCallback):
        def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **_: Any) -> None:
            if state.global_step < state.max_steps:
                rows = [hashlib.md5(repr(row).encode()).hexdigest()[:8] for row in inputs["input_ids"].tolist()]
                samples.setdefault(state.global_step + 1, []).extend(known.get(_key(inputs), rows))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses[state.global_step] = float(logs["loss"])

    sft.collate_fn = _remembering(sft.collate_fn, known)
    dpo.dpo_collate_fn = _remembering(dpo.dpo_collate_fn, known)
    of_trainer.DEFAULT_CALLBACKS.append(Watch)
    sys.argv = ["launcher.py", "train", str(config)]
    launcher.launch()
    return {"losses": list(losses.items()), "samples": list(samples.items())}


def _remembering(collate: Callable[..., Mapping[str, Any]], known: dict[bytes, list[str]]) -> Callable[..., Any]:
    """A collator that notes which sequences a batch is made of, by the tokens of the batch."""

    def remembering(batch: Any, *args: Any, **kwargs: Any) -> Any:
        digests = [hashlib.md5(repr(one.token_ids).encode()).hexdigest()[:8] for row in batch for one in row]
        made = collate(batch, *args, **kwargs)
        known[_key(made)] = digests
        return made

    return remembering


def _key(batch: Mapping[str, Any]) -> bytes:
    tokens = batch["input_ids"]
    return np.asarray(tokens.numpy() if hasattr(tokens, "numpy") else tokens, "int64").tobytes()


@dataclass(frozen=True)
class Watched:
    """Losses and sorted digests of the trained samples, both by step."""

    losses: dict[int, float]
    samples: dict[int, list[str]]

    @property
    def all_samples(self) -> list[str]:
        return [one for samples in self.samples.values() for one in samples]


class Workflows:
    """Trains recipes on ranks that have imported the command line."""

    def __init__(self, server: ForkServer, assets: Assets) -> None:
        self.server, self.assets = server, assets

    def train(self, recipe: str, output_dir: Path, **keys: Any) -> Watched:
        """Train a recipe on two ranks; samples that both see count once."""
        path = write_recipe(recipe, self.assets, output_dir, **keys)
        values = run_on_ranks(self.server, 2, train_watched, config=path)
        model_parallel = {"tensor_model_parallel_size", "pipeline_model_parallel_size"} & keys.keys()
        samples: dict[int, list[str]] = {}
        for one in values[:1] if model_parallel else values:
            for step, digests in one["samples"]:
                samples[step] = sorted([*samples.get(step, []), *digests])
        return Watched(dict(map(tuple, values[0]["losses"])), samples)

    def refused(self, recipe: str, output_dir: Path, **keys: Any) -> str:
        """Train a recipe, which must fail on both ranks; the log of the first one."""
        path = write_recipe(recipe, self.assets, output_dir, **keys)
        result = job_on_ranks(self.server.attempt, 2, train_watched, config=path)
        assert not result.ok
        return result.logs[0].read_text()


@pytest.fixture(scope="module")
def workflows(ranks: ForkServer, assets: Assets) -> Workflows:
    return Workflows(ranks, assets)


def resume_and_compare(workflows: Workflows, recipe: str, directory: Path, layout: dict[str, Any], **keys: Any) -> None:
    """Train six steps with data parallelism; resume at the third under a layout; compare losses and samples.

    The run resumes in its own directory from an older checkpoint than the newest, by name.
    """
    whole = workflows.train(recipe, directory / "whole", **{**DP2, **keys})
    resume = {"resume_from_checkpoint": str(directory / "whole/checkpoint-3")}
    resumed = workflows.train(recipe, directory / "whole", **{**keys, **layout, **resume})
    assert sorted(whole.losses) == [1, 2, 3, 4, 5, 6]
    assert resumed.losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, abs=2e-6)
    assert resumed.samples == {step: whole.samples[step] for step in (4, 5, 6)}
    assert len(set(whole.all_samples)) == len(whole.all_samples) >= 24


def test_fine_tuning_on_packed_dialogues_resumes_with_tensor_parallelism(workflows: Workflows, tmp_path: Path) -> None:
    resume_and_compare(workflows, "llama_sft", tmp_path, TP2)
    resume = {**DP2, "resume_from_checkpoint": str(tmp_path / "whole/checkpoint-3"), "max_seq_len": 128}
    log = workflows.refused("llama_sft", tmp_path / "shorter", **resume)
    assert "max_seq_len was 192 and is 128, so that samples are packed differently" in log
    again = workflows.train("llama_sft", tmp_path / "again", **resume, ignore_data_skip=True, max_steps=4)
    assert sorted(again.losses) == [4]


def test_preference_training_resumes_with_tensor_parallelism_and_not_with_another_reference_model(
    workflows: Workflows, tmp_path: Path
) -> None:
    resume_and_compare(workflows, "llama_dpo", tmp_path, TP2)
    saved = tmp_path / "whole/checkpoint-3"
    assert {one.role for one in canonical_digests(saved)} == {"model_state", "optimizer_state"}
    first, last = (saved.parent / f"checkpoint-{step}/trainer/reference.json" for step in (3, 6))
    assert json.loads(first.read_text()) == json.loads(last.read_text()), "the reference model stays the base"
    base = shutil.copytree(workflows.assets.models["llama"], tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = np.nextafter(weights["model.norm.weight"], 2, dtype="float32")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    resume = {**DP2, "max_steps": 4, "resume_from_checkpoint": str(saved)}
    log = workflows.refused("llama_dpo", tmp_path / "other", **resume, model_name_or_path=str(base))
    assert "The reference model does not match the checkpoint." in log
    assert "model.norm.weight: saved float32 64 " in log
    assert "model.layers" not in log.partition("The reference model does not match")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout", "keys"),
    [
        ("llama_pt", PP2, {}),
        ("llama_pt", TP2, {"packing": True}),
        ("llama_ema", TP2, {}),
        ("llama_async", TP2, {}),
        ("ernie_moe_pt", TP2, {}),
        ("llama_sft", PP2, {}),
        ("llama_sft", SD2, {"greedy_intokens": False}),
        ("llama_sft", TP2, {"packing": False, "dataset_type": "map"}),
        ("llama_sft", TP2, {"binpacking": True, "packing_interval": 16, "dataset_type": "map"}),
        ("llama_dpo", PP2, {"clear_every_step_cache": True, "packing": True, "max_seq_len": 192}),
        ("llama_lora", PP2, {}),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_a_workflow_trains_on_as_if_it_had_not_been_interrupted(
    workflows: Workflows, tmp_path: Path, recipe: str, layout: dict[str, Any], keys: dict[str, Any]
) -> None:
    resume_and_compare(workflows, recipe, tmp_path, layout, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["llama_sft", "llama_dpo"])
def test_the_stock_command_line_trains_resumes_and_exports_adapters(
    workflows: Workflows, tmp_path: Path, recipe: str
) -> None:
    def train(name: str, **keys: Any) -> list[float]:
        (tmp_path / f"{name}-log").mkdir()
        path = write_recipe(recipe, workflows.assets, tmp_path / name, fine_tuning="LoRA", lora_rank=4, **keys)
        return losses(train_by_command(path, tmp_path / f"{name}-log"))

    whole = train("whole", **DP2)
    resumed = train("again", **TP2, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert resumed == pytest.approx(whole[3:], abs=2e-6)
    last, base = tmp_path / "whole/checkpoint-6", workflows.assets.models["llama"]
    assert run("export", last, tmp_path / "adapter").code == 0
    assert run("export", last, tmp_path / "merged", "--base", base).code == 0
    adapter = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    assert adapter == (tmp_path / "whole/adapter_model.safetensors").read_bytes()
    assert load_file(tmp_path / "merged/model.safetensors").keys() == load_file(base / "model.safetensors").keys()


def write_indexed(prefix: Path, model: Path, corpus: Path) -> None:
    """Write a corpus of JSON lines as the indexed files that ``dataset_type: pretrain`` reads."""
    from paddleformers.data.indexed_dataset import MMapIndexedDatasetBuilder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    for line in corpus.read_text().splitlines():
        builder.add_item(tokenizer.encode(json.loads(line)["text"][0]).ids)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def indexed(workflows: Workflows, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of pre-training on an indexed corpus."""
    prefix = tmp_path_factory.mktemp("indexed") / "corpus"
    assets = workflows.assets
    names = {"prefix": prefix, "model": assets.models["llama"], "corpus": assets.corpus}
    run_on_ranks(workflows.server, 1, write_indexed, **names)
    return {
        "dataset_type": "pretrain",
        "input_dir": f"1.0 {prefix}",
        "split": "1,0,0",
        "eval_iters": 1,
        "eval_steps": 99,
    }


# In make test: test_position.py.
@pytest.mark.slow
def test_more_steps_of_an_indexed_corpus_repeat_no_sample_and_leave_none_out(
    workflows: Workflows, indexed: dict[str, Any], tmp_path: Path
) -> None:
    first = workflows.train("llama_pt", tmp_path / "out", **indexed, **DP2, max_steps=3)
    resume = {"resume_from_checkpoint": str(tmp_path / "out/checkpoint-3")}
    longer = workflows.train("llama_pt", tmp_path / "longer", **indexed, **TP2, **resume, max_steps=6)
    whole = workflows.train("llama_pt", tmp_path / "whole", **indexed, **DP2, max_steps=6)
    assert sorted([*first.all_samples, *longer.all_samples]) == sorted(whole.all_samples)
    assert len(set(whole.all_samples)) == 24


def test_updates_of_the_reference_model_are_refused_by_name_also_in_a_script() -> None:
    from paddleformers_fc.trainer import reference

    with pytest.raises(OptionError) as refused:
        reference.check_no_reference_updates(SimpleNamespace(dpo_config=SimpleNamespace(ref_model_update_steps=2)))
    text = refused.value.render()
    assert "flex_checkpoint: true and ref_model_update_steps: 2: the reference model is the base" in text
    reference.check_no_reference_updates(SimpleNamespace(dpo_config=SimpleNamespace(ref_model_update_steps=-1)))
    reference.check_no_reference_updates(SimpleNamespace())

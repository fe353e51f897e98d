"""PaddleFormers' workflows by the recipes: stopped and resumed under another layout, each trains what it would have."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import OptionError
from tests.cli.support import run
from tests.trainer.test_entry_points import losses, train_by_command, write_recipe
from verification.demo.assets import Assets, prepare
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

JOBS = "tests.trainer.workflow_jobs"

DP2 = {"gradient_accumulation_steps": 2}
TP2 = {"gradient_accumulation_steps": 4, "tensor_model_parallel_size": 2}
PP2 = {"gradient_accumulation_steps": 4, "pipeline_model_parallel_size": 2}
SD2 = {"gradient_accumulation_steps": 2, "sharding": "stage1", "sharding_parallel_size": 2, "split_param": True}


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
        values = self.server.run(f"{JOBS}:train", 2, {"config": str(path)}).values
        model_parallel = {"tensor_model_parallel_size", "pipeline_model_parallel_size"} & keys.keys()
        samples: dict[int, list[str]] = {}
        for one in values[:1] if model_parallel else values:
            for step, digests in one["samples"]:
                samples[step] = sorted([*samples.get(step, []), *digests])
        return Watched(dict(map(tuple, values[0]["losses"])), samples)

    def refused(self, recipe: str, output_dir: Path, **keys: Any) -> str:
        """Train a recipe, which must fail on both ranks; the log of the first one."""
        path = write_recipe(recipe, self.assets, output_dir, **keys)
        result = self.server.attempt(f"{JOBS}:train", 2, {"config": str(path)})
        assert not result.ok
        return result.logs[0].read_text()


@pytest.fixture(scope="module")
def workflows(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Workflows:
    return Workflows(ranks, prepare(tmp_path_factory.mktemp("assets")))


def resume_and_compare(workflows: Workflows, recipe: str, directory: Path, layout: dict[str, Any], **keys: Any) -> None:
    """Train six steps with data parallelism; resume at the third under a layout; compare losses and samples.

    It is resumed in its own directory, where the last checkpoint is newer than the one that is named.
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


@pytest.fixture(scope="module")
def indexed(workflows: Workflows, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of pre-training on an indexed corpus."""
    prefix = tmp_path_factory.mktemp("indexed") / "corpus"
    assets = workflows.assets
    names = {"prefix": str(prefix), "model": str(assets.models["llama"]), "corpus": str(assets.corpus)}
    workflows.server.run(f"{JOBS}:write_indexed", 1, names)
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

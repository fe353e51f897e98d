"""The settings of the demo's trainings: one set that every run shares, and the keys of each parallel layout.

They are the keys of a PaddleFormers YAML, those of ``recipes/llama_pt.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "llama_pt.yaml"

STEPS = 6
RESUME_AT = 3
GLOBAL_BATCH = 4
"""Samples per step, under every layout: one per micro-batch, so that every sample weighs the same in the loss."""


@dataclass(frozen=True)
class DemoLayout:
    """The layout of a training on two ranks.

    Args:
        name: for the table and the files.
        options: the keys that select it.
        replicas: ranks with different samples.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the training."""
        degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        ranks = self.replicas
        for degree in degrees:
            ranks *= self.options.get(degree, 1)
        return ranks


LORA: Mapping[str, Any] = {"fine_tuning": "LoRA", "lora_rank": 8}
"""Keys of a training of adapters."""

SINGLE = DemoLayout("single")
DP2 = DemoLayout("dp2", replicas=2)
TP2 = DemoLayout("tp2", {"tensor_model_parallel_size": 2})
PP2 = DemoLayout("pp2", {"pipeline_model_parallel_size": 2})
SHARDING2V2 = DemoLayout(
    "sharding2-v2", {"sharding": "stage1", "sharding_parallel_size": 2, "split_param": True}, replicas=2
)


def settings(model: str, corpus: str, output: str, layout: DemoLayout) -> dict[str, Any]:
    """Return the content of a run's YAML, without ``flex_checkpoint`` and its companion keys.

    Args:
        model: a Hugging Face directory.
        corpus: a JSONL file. PaddleFormers takes commas and spaces in it for separators.
        output: the Trainer's output directory.
        layout: how the ranks share the training.
    """
    content = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    del content["flex_checkpoint"]
    content |= {"model_name_or_path": model, "train_dataset_path": corpus, "eval_dataset_path": corpus}
    content |= {"output_dir": output, "gradient_accumulation_steps": GLOBAL_BATCH // layout.replicas, **layout.options}
    return dict(content)

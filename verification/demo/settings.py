"""The settings of the demo's trainings: one set that every run shares, and the keys of each parallel layout.

They are the keys of a PaddleFormers YAML. The files in ``recipes`` are the same settings with a
comment on each; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verification.demo.assets import SEQUENCE_LENGTH

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
    return {
        "stage": "PT",
        "fine_tuning": "full",
        "model_name_or_path": model,
        "train_dataset_type": "erniekit",
        "train_dataset_path": corpus,
        "train_dataset_prob": "1.0",
        "eval_dataset_type": "erniekit",
        "eval_dataset_path": corpus,
        "eval_dataset_prob": "1.0",
        "max_seq_len": SEQUENCE_LENGTH,
        "packing": False,
        "mix_strategy": "concat",
        "random_shuffle": False,
        "_attn_implementation": "sdpa",
        "seed": 23,
        "do_train": True,
        "do_eval": False,
        "device": "cpu",
        "compute_type": "float32",
        "amp_master_grad": False,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": GLOBAL_BATCH // layout.replicas,
        "max_steps": STEPS,
        "save_steps": RESUME_AT,
        "logging_steps": 1,
        "learning_rate": 0.005,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "sharding": "",
        "output_dir": output,
        "report_to": "none",
        "disable_tqdm": True,
        **layout.options,
    }

"""Jobs that run inside rank processes: what real models of PaddleFormers hold, and what its own statements do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

CLASSES = {
    "llama": ("Llama", "LlamaForCausalLM"),
    "ernie4_5": ("Ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_Moe", "Ernie4_5_MoeForCausalLM"),
    "phi3": ("Phi3", "Phi3ForCausalLM"),
    "gpt_oss": ("GptOss", "GptOssForCausalLM"),
    "gemma3_text": ("Gemma3Text", "Gemma3ForCausalLM"),
}


def _model(model_type: str, config: Mapping[str, Any], tp: int) -> Any:
    stem, kind = CLASSES[model_type]
    package = f"paddleformers.transformers.{model_type}"
    settings = {
        "fuse_rms_norm": False,
        "sequence_parallel": False,
        "tensor_model_parallel_size": tp,
        "use_flash_attention": False,
        **({"moe_group": "dummy"} if model_type == "ernie4_5_moe" else {}),
        **config,
    }
    settings.pop("model_type", None)
    made = getattr(importlib.import_module(f"{package}.configuration"), f"{stem}Config")(**settings)
    return getattr(importlib.import_module(f"{package}.modeling"), kind)(made)


def describe(model_type: str, config: Mapping[str, Any], tp: int = 1) -> dict[str, Any]:
    """Every tensor of a real model on this rank: name -> [global shape, local shape, dtype]."""
    if tp > 1:
        from paddle.distributed import fleet

        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": tp, "pp_degree": 1, "sharding_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
    shards = _model(model_type, config, tp).sharded_state_dict()
    return {
        name: [list(shard.global_shape), list(shard.local_shape), str(shard.local_tensor.dtype).split(".")[-1]]
        for name, shard in shards.items()
    }

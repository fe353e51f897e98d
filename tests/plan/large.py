"""Plan a model of 300 billion parameters for every rank of a grid, in a process of its own; what it took, as JSON."""

from __future__ import annotations

import json
import math
import resource
import sys
import time

from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.forecast import PlannedLoad
from paddleformers_fc.plan.simulate import SimulatedModel, declared_model
from paddleformers_fc.plan.sources import resume_source
from tests.plan.stored import checkpoint_of

CONFIG = {
    "model_type": "ernie4_5_moe",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 103424,
    "moe_num_experts": 64,
    "moe_intermediate_size": 3584,
    "moe_layer_start_index": 3,
    "moe_num_shared_experts": 0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "num_empty_layers_add_in_tail": 2,
}
STORED = "tp=4,pp=4,sharding=16,ep=64,split=true"


def laid_out(grid: str) -> SimulatedModel:
    """The model in bfloat16, over a grid."""
    return declared_model(family_for(CONFIG), ModelDescription(CONFIG), parse_grid(grid), "bfloat16")


def main(grid: str) -> None:
    """Plan a load of what :data:`STORED` saved for every rank of ``grid``."""
    stored = checkpoint_of(laid_out(STORED))
    started = time.process_time()
    model = laid_out(grid)
    source, report = resume_source(stored, model.rules)
    found = PlannedLoad(source, model, report).plan()
    facts = {
        "ranks": len(found.ranks),
        "parameters": sum(math.prod(tensor.shape) for tensor in model.tensors),
        "cpu_seconds": time.process_time() - started,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "items": sum(rank.items for rank in found.ranks),
        "largest": max(rank.bytes for rank in found.ranks),
        "amplification": found.amplification,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1])

"""How much memory a save and an export take beside the weights: the system's own account, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MEBI = 2**20

CHILD = """
import gc, json, shutil, sys
from pathlib import Path
from verification import simulate_ranks
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.simulate import declared_model
import numpy as np

def now():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak()

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def weights(layers):
    config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": layers,
              "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 2048,
              "tie_word_embeddings": True}
    model = declared_model(family_for(config), ModelDescription(config), ParallelGrid(), "float32")
    roles = {"model_state": model.roles(0)["model_state"]}
    held = simulate_ranks.filled(roles, lambda role, shard: np.ones(shard.global_shape, np.float32))
    return model.model, held

def save(path, model, held):
    save_checkpoint(path, held, model, {"config.json": config_bytes(model.config)}, JobRecord(1, 1, {}), ALONE)

root, found = Path(sys.argv[1]), {}
config, held = weights(1)
save(root / "warm", config, held)
export_checkpoint(root / "warm", root / "warm-hf")
for layers in (4, 16):
    config, held = weights(layers)
    size = sum(one.local_tensor.array.nbytes for one in held["model_state"].values())
    before = now()
    save(root / "c", config, held)
    saving = peak() - before
    del held
    before = now()
    export_checkpoint(root / "c", root / "hf", int(sys.argv[2]))
    found[layers] = {"bytes": size, "save": saving, "export": peak() - before}
    shutil.rmtree(root / "c")
    shutil.rmtree(root / "hf")
assert "paddle" not in sys.modules
print(json.dumps(found))
"""


# One arena, and freed buffers go back to the system: the peak is what the code holds, not what the allocator keeps.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measured(directory: Path, max_shard_bytes: int) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-c", CHILD, str(directory), str(max_shard_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | ALLOCATOR)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_save_takes_five_percent_of_its_shard_and_an_export_two_tensors_whatever_the_size(tmp_path: Path) -> None:
    largest, bound = 8 * MEBI, 24 * MEBI
    found = measured(tmp_path, bound)
    small, large = found["4"], found["16"]
    assert large["bytes"] > 3.5 * small["bytes"] > 3.5 * 100 * MEBI
    for one in (small, large):
        assert one["save"] <= 0.05 * one["bytes"]
        assert one["export"] <= bound + 2 * largest
    # How the threads meet decides whether one or two tensors more are held at once, in either of the two exports.
    assert large["export"] <= small["export"] + 2 * largest < small["export"] + (large["bytes"] - small["bytes"]) / 20
    assert large["save"] <= small["save"] + largest

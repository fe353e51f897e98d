"""How much memory a conversion takes: pieces of tensors, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MEBI = 2**20

CHILD = """
import gc, json, sys
from pathlib import Path
import numpy as np
import paddleformers_fc
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.simulate import declared_model
from verification import simulate_ranks

def now():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak()

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

def save(path, layers):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024,
              "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 16,
              "num_key_value_heads": 16, "head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": True}
    model = declared_model(family_for(config), ModelDescription(config, True), ParallelGrid(), "float32")
    held = simulate_ranks.filled({"model_state": model.roles(0)["model_state"]},
                                 lambda role, shard: np.ones(shard.global_shape, np.float32))
    files = {"config.json": config_bytes(config)}
    save_checkpoint(path, held, model.model, files, JobRecord(1, 1, {}), ALONE)
    return sum(one.local_tensor.array.nbytes for one in held["model_state"].values())

root, found = Path(sys.argv[1]), {}
save(root / "warm", 1)
paddleformers_fc.open(root / "warm").convert(root / "warm-hf", format="hf")
found["bytes"] = save(root / "c", int(sys.argv[2]))
PAIRS = ("c", "flex"), ("c", "hf"), ("c", "distcp"), ("hf", "flex"), ("distcp", "flex")
for number, (source, target) in enumerate(PAIRS):
    checkpoint = paddleformers_fc.open(root / source)
    place = root / (target if number in (1, 2) else f"{source}-{target}")
    before = now()
    checkpoint.convert(place, format=target)
    found[f"{source} to {target}"] = peak() - before
assert "paddle" not in sys.modules
print(json.dumps(found))
"""


@pytest.mark.parametrize("layers", [4, pytest.param(76, marks=pytest.mark.slow)])
def test_a_conversion_holds_pieces_of_tensors_whatever_the_size(tmp_path: Path, layers: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(layers)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    size = found.pop("bytes")
    assert layers < 76 or size > 2048 * MEBI
    assert len(found) == 5
    # Two batches of transposed tensors of 32 MiB at most, and scratch memory of the threads.
    assert max(found.values()) < 100 * MEBI, found

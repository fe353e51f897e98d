"""Memory of ``diff`` and of an export where one tensor is larger than it may take; reads of very many small tensors."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.formats.registry import open_checkpoint

MEBI = 2**20
SHAPE = (4096, 32768)
"""256 MiB of float16."""

CHILD = """
import gc, json, sys
from pathlib import Path
import paddleformers_fc
from paddleformers_fc.execute import diff_checkpoints, export

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def risen(work):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = work()
    return result, status("VmHWM") - before

one, other, target = map(Path, sys.argv[1:4])
found, memory = risen(lambda: paddleformers_fc.open(one).diff(paddleformers_fc.open(other)))
different = [[each.a.md5, each.b.md5] for role in found.roles.values() for each in role.different]
print(json.dumps({"different": different, "diff": memory}))
"""

EXPORT = (
    CHILD[: CHILD.index("one, other")]
    + """
import numpy as np
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.simulate import declared_model
from verification import simulate_ranks

root, config = Path(sys.argv[1]), {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True,
    "vocab_size": int(sys.argv[2]), "intermediate_size": int(sys.argv[3])}
model = declared_model(family_for(config), ModelDescription(config), ParallelGrid(), "float32")
held = simulate_ranks.filled({"model_state": model.roles(0)["model_state"]},
    lambda role, shard: np.zeros(shard.global_shape, np.float32))
largest = max(weight.local_tensor.array.nbytes for weight in held["model_state"].values())
simulate_ranks.save(root / "c", [held], model)
del held
(_, problem), verified = risen(lambda: verify_checkpoint(root / "c", "full"))
assert problem is None
_, memory = risen(lambda: export.export_checkpoint(root / "c", root / "hf"))
print(json.dumps({"export": memory, "verify": verified, "largest": largest}))
"""
)


def child(text: str, *places: Path | str) -> dict[str, Any]:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", text, *map(str, places)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_zeros(directory: Path, name: str, shape: tuple[int, ...], last: int = 0) -> None:
    """Write one tensor of zeros as a sparse file, with another last byte."""
    directory.mkdir(parents=True, exist_ok=True)
    size = int(np.prod(shape)) * 2
    header = json.dumps({name: {"dtype": "F16", "shape": list(shape), "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size - 1)
        file.seek(0, 2)
        file.write(bytes([last]))


def test_a_diff_of_one_tensor_of_256_mib_takes_at_most_128_mib(tmp_path: Path) -> None:
    write_zeros(tmp_path / "a", "w", SHAPE)
    write_zeros(tmp_path / "b", "w", SHAPE, last=1)
    found = child(CHILD, tmp_path / "a", tmp_path / "b", tmp_path)
    assert found["diff"] <= 128 * MEBI
    hashes = [hashlib.md5(bytes(255 * MEBI))]
    hashes.append(hashes[0].copy())
    hashes[0].update(bytes(MEBI))
    hashes[1].update(bytes(MEBI - 1) + bytes([1]))
    assert found["different"] == [[one.hexdigest() for one in hashes]]


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "intermediate"), [(400 * 1024, 256), (256, 200 * 1024)])
def test_verify_and_an_export_of_tensors_of_200_mib_and_more_take_at_most_128_mib(
    vocabulary: int, intermediate: int, tmp_path: Path
) -> None:
    """The embeddings are stored as in the export, the weights of the feed-forward transposed."""
    found = child(EXPORT, tmp_path, str(vocabulary), str(intermediate))
    assert found["largest"] >= 200 * MEBI
    assert found["verify"] <= 128 * MEBI
    assert found["export"] <= 128 * MEBI


def read_calls() -> int:
    """System calls that have read, of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


def test_20000_small_tensors_are_compared_in_a_hundred_reads(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        numbers = {f"layers.{index}.w": np.full(16, index, np.float32) for index in range(20_000)}
        save_file(numbers, tmp_path / name / "model.safetensors")
    sides = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    before = read_calls()
    assert compare_checkpoints(*sides).equal
    assert read_calls() - before <= 100


def test_a_diff_of_20000_small_tensors_takes_at_most_128_mib(tmp_path: Path) -> None:
    for name, last in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        numbers = {f"layers.{index}.w": np.full(1024, index, np.float32) for index in range(20_000)}
        numbers["layers.19999.w"][-1] += last
        save_file(numbers, tmp_path / name / "model.safetensors")
    found = child(CHILD, tmp_path / "a", tmp_path / "b", tmp_path)
    assert len(found["different"]) == 1
    assert found["diff"] <= 128 * MEBI

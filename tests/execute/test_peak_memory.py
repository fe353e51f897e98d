"""How much memory saves, exports, conversions and comparisons take: the system's own account, in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.formats.registry import open_checkpoint
from tests.cli.test_main import python

MEBI = 2**20

COMMON = """
import gc, json, shutil, sys
from pathlib import Path
import numpy as np
import paddleformers_fc
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.layout.grid import ParallelGrid
from paddleformers_fc.plan.simulate import declared_model
from verification import simulate_ranks

root, found = Path(sys.argv[1]), {}

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def risen(work):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before

def built(layers, is_fleet=False, **sizes):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "vocab_size": 2048,
              "intermediate_size": 1024, "num_hidden_layers": layers, "num_attention_heads": 16,
              "num_key_value_heads": 16, "head_dim": 64, "tie_word_embeddings": True, **sizes}
    model = declared_model(family_for(config), ModelDescription(config, is_fleet), ParallelGrid(), "float32")
    held = simulate_ranks.filled({"model_state": model.roles(0)["model_state"]},
                                 lambda role, shard: np.ones(shard.global_shape, np.float32))
    return model, held, [one.local_tensor.array.nbytes for one in held["model_state"].values()]

def save(path, model, held):
    simulate_ranks.save(path, [held], model)
"""
END = """
assert "paddle" not in sys.modules
print(json.dumps(found))
"""
SAVE_AND_EXPORT = """
model, held, _ = built(1)
save(root / "warm", model, held)
export_checkpoint(root / "warm", root / "warm-hf")
for layers in (4, 16):
    model, held, sizes = built(layers)
    found[layers] = {"bytes": sum(sizes), "save": risen(lambda: save(root / "c", model, held))}
    del held
    found[layers]["export"] = risen(lambda: export_checkpoint(root / "c", root / "hf", int(sys.argv[2])))
    shutil.rmtree(root / "c")
    shutil.rmtree(root / "hf")
"""
LARGE = """
model, held, sizes = built(1, hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128,
                           vocab_size=200 * 1024, intermediate_size=200 * 1024)
save(root / "c", model, held)
del held
def verify():
    assert verify_checkpoint(root / "c", "full")[1] is None
found |= {"largest": max(sizes), "verify": risen(verify)}
found["export"] = risen(lambda: export_checkpoint(root / "c", root / "hf"))
"""
CONVERT = """
model, held, _ = built(1, True)
save(root / "warm", model, held)
paddleformers_fc.open(root / "warm").convert(root / "warm-hf", format="hf")
model, held, sizes = built(int(sys.argv[2]), True)
save(root / "c", model, held)
del held
found["bytes"] = sum(sizes)
for source, target in (("c", "flex"), ("c", "hf"), ("c", "distcp"), ("hf", "flex"), ("distcp", "flex")):
    checkpoint = paddleformers_fc.open(root / source)
    place = root / (target if (source, target) in (("c", "hf"), ("c", "distcp")) else f"{source}-{target}")
    found[f"{source} to {target}"] = risen(lambda: checkpoint.convert(place, format=target))
"""
DIFF = """
def diff():
    done = paddleformers_fc.open(root / "a").diff(paddleformers_fc.open(root / "b"), TOLERANCE)
    roles = done.roles.values()
    found["within"] = sum(role.within_tolerance for role in roles)
    found["different"] = sum(len(role.different) for role in roles)
found["diff"] = risen(diff)
"""
# One arena, and freed buffers go back to the system: the peak is what the code holds, not what the allocator keeps.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measured(code: str, *arguments: object) -> dict[str, Any]:
    """What a process of its own has found."""
    found: dict[str, Any] = json.loads(python("-c", COMMON + code + END, *arguments, **ALLOCATOR).stdout)
    return found


def test_a_save_takes_five_percent_of_its_shard_and_an_export_two_tensors_whatever_the_size(tmp_path: Path) -> None:
    largest, bound = 8 * MEBI, 24 * MEBI
    found = measured(SAVE_AND_EXPORT, tmp_path, bound)
    small, large = found["4"], found["16"]
    assert large["bytes"] > 3.5 * small["bytes"] > 3.5 * 100 * MEBI
    for one in (small, large):
        assert one["save"] <= 0.05 * one["bytes"]
        assert one["export"] <= bound + 2 * largest
    # How the threads meet decides whether one or two tensors more are held at once, in either of the two exports.
    assert large["export"] <= small["export"] + 2 * largest < small["export"] + (large["bytes"] - small["bytes"]) / 20
    assert large["save"] <= small["save"] + largest


@pytest.mark.slow
def test_verify_and_an_export_of_tensors_of_200_mib_take_at_most_128_mib(tmp_path: Path) -> None:
    """The embeddings are stored as in the export, the weights of the feed-forward transposed."""
    found = measured(LARGE, tmp_path)
    assert found["largest"] >= 200 * MEBI
    assert found["verify"] <= 128 * MEBI
    assert found["export"] <= 128 * MEBI


def test_a_conversion_holds_pieces_of_tensors(tmp_path: Path) -> None:
    found = measured(CONVERT, tmp_path, 6)
    assert found.pop("bytes") > 150 * MEBI
    assert len(found) == 5
    # Two batches of transposed tensors of 32 MiB at most, and scratch memory of the threads.
    assert max(found.values()) < 100 * MEBI, found


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(np.float32, "", marks=pytest.mark.slow, id="bits"),
        pytest.param(np.int32, "atol=1.0, rtol=0.5", id="within a tolerance"),
    ],
)
def test_a_diff_of_a_tensor_of_256_mib_takes_at_most_128_mib(tmp_path: Path, dtype: type, tolerance: str) -> None:
    """Every element differs, and every integer lies exactly at the bound."""
    for name in "ab":
        (tmp_path / name).mkdir()
        numbers = np.full((4096, 65536 // np.dtype(dtype).itemsize), 2 * (name == "b"), dtype)
        save_file({"w": numbers}, tmp_path / name / "model.safetensors")
    found = measured(DIFF.replace("TOLERANCE", tolerance), tmp_path)
    assert (found["within"], found["different"]) == ((1, 0) if tolerance else (0, 1))
    assert found["diff"] <= 128 * MEBI


def write_small(directory: Path, elements: int, last: int = 0) -> None:
    """Write 20,000 tensors, the last of them with another last number."""
    directory.mkdir()
    numbers = {f"layers.{index}.w": np.full(elements, index, np.float32) for index in range(20_000)}
    numbers["layers.19999.w"][-1] += last
    save_file(numbers, directory / "model.safetensors")


def read_calls() -> int:
    """System calls that have read, of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


def test_20000_small_tensors_are_compared_in_a_hundred_reads(tmp_path: Path) -> None:
    for name in "ab":
        write_small(tmp_path / name, 16)
    sides = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    before = read_calls()
    assert compare_checkpoints(*sides).equal
    assert read_calls() - before <= 100


@pytest.mark.slow
def test_a_diff_of_20000_small_tensors_takes_at_most_128_mib(tmp_path: Path) -> None:
    write_small(tmp_path / "a", 1024)
    write_small(tmp_path / "b", 1024, last=1)
    found = measured(DIFF.replace("TOLERANCE", ""), tmp_path)
    assert found["different"] == 1
    assert found["diff"] <= 128 * MEBI

"""Checkpoints of several layouts, read by a reader that was written from ``docs/format.md`` alone."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paddleformers_fc.families import ModelDescription
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.layout.shards import Shard
from tests.families.spaces import BY_NAME
from tests.formats import page_reader
from tests.harness.on_ranks import run_on_ranks
from tests.harness.tiny import SD2V2
from tests.trainer.jobs import run
from verification import simulate_ranks
from verification.digests import canonical_digests
from verification.forkserver import ForkServer

Digests = dict[tuple[str, str], tuple[str, tuple[int, ...], str]]


def by_the_page(directory: Path) -> Digests:
    """dtype, shape and md5 of every canonical tensor, by the reader of the page."""
    return {
        key: (str(array.dtype), array.shape, hashlib.md5(np.ascontiguousarray(array).tobytes()).hexdigest())
        for key, array in page_reader.read_canonical(directory).items()
    }


def by_the_package(directory: Path) -> Digests:
    """The same by the package."""
    return {(one.role, one.name): (one.dtype, one.shape, one.md5) for one in canonical_digests(directory, "full")}


def save_simulated(directory: Path, grid: str, described: ModelDescription = simulate_ranks.QWEN3_MOE) -> Path:
    """Save a tiny model under a grid."""
    return simulate_ranks.save_model(directory, simulate_ranks.laid_out(described, grid), value_of)


def value_of(role: str, shard: Shard) -> np.ndarray[Any, Any]:
    """Numbers by name, equal for both names of a tied embedding."""
    name = shard.name.replace("lm_head", "model.embed_tokens")
    return simulate_ranks.value_of(role, msgspec.structs.replace(shard, name=name))


def test_the_reader_of_the_page_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(page_reader.__file__).read_text())
    named = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    named |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names == {"ml_dtypes", "numpy", "xxhash"}


@pytest.mark.parametrize("grid", ["tp=2,pp=2", "sharding=2,split=true,ep=2"])
def test_the_page_gives_every_tensor_of_a_simulated_layout(tmp_path: Path, grid: str) -> None:
    directory = save_simulated(tmp_path / "checkpoint-1", grid)
    found = by_the_page(directory)
    assert len(found) == 77 + 74 + 4 * 77
    assert found == by_the_package(directory)


# Among them the families have every kind of rule.
@pytest.mark.parametrize("name", ["deepseek_v4", "ernie4_5_moe_vl", "gpt_oss", "phi3", "qwen3_5_moe", "qwen3_next"])
def test_the_page_gives_every_tensor_of_a_family(tmp_path: Path, name: str) -> None:
    directory = save_simulated(tmp_path / "checkpoint-1", "tp=2,pp=2", tiny_models(BY_NAME[name])[0])
    assert by_the_page(directory) == by_the_package(directory)


def test_the_page_gives_every_tensor_that_a_trainer_has_saved(ranks: ForkServer, tmp_path: Path) -> None:
    run_on_ranks(ranks, 2, run, layout=SD2V2, output_dir=tmp_path, arguments={"max_steps": 2, "save_steps": 2})
    directory = tmp_path / "checkpoint-2"
    assert by_the_page(directory) == by_the_package(directory)

"""What a fresh process imports for its first call: the modules that cost most are not among it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.support import save
from tests.execute.simulated import canonical
from tests.harness.limits import LIMIT

EXPENSIVE = ("datasets", "fsspec", "jinja2", "paddleformers", "pandas", "transformers", "typer", "yaml")
"""Each takes longer than a tenth of the imports of an ordinary load, and PaddleFormers longer than Paddle."""
TRAINER = ("datasets", "fsspec", "pandas", "paddleformers.trainer.trainer", "paddleformers_fc.trainer.session")

PADDLE_ALONE = """
import sys
import paddle
before = set(sys.modules)
import paddleformers_fc
model = paddle.nn.Linear(2, 3)
directory = sys.argv[1] + "/checkpoint-1"
paddleformers_fc.save(directory, model)
paddleformers_fc.load(directory, model)
print(*sorted(set(sys.modules) - before))
"""

MODEL_OF_PADDLEFORMERS = """
import sys
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM
import paddleformers_fc
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))
directory = sys.argv[1] + "/checkpoint-1"
paddleformers_fc.save(directory, model)
paddleformers_fc.load(directory, model)
print(*sorted(sys.modules))
"""

READ = """
import sys
import paddleformers_fc
assert not {'numpy', 'paddle', 'msgspec'} & sys.modules.keys()
paddleformers_fc.open(sys.argv[1] + "/checkpoint-1").read("model.norm.weight")
print(*sorted(sys.modules))
"""


def _imported(code: str, directory: Path) -> set[str]:
    command = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)
    return set(done.stdout.split())


def _families(modules: set[str]) -> list[str]:
    inside = "paddleformers_fc.families.models."
    return sorted(name.removeprefix(inside) for name in modules if name.startswith(inside))


def _unwanted(modules: set[str], expensive: Sequence[str]) -> list[str]:
    return [name for name in expensive if name in modules]


def test_a_load_into_layers_of_paddle_imports_neither_paddleformers_nor_a_family(tmp_path: Path) -> None:
    modules = _imported(PADDLE_ALONE, tmp_path)
    assert "paddleformers_fc.execute.load" in modules
    assert _unwanted(modules, EXPENSIVE) == []
    assert _families(modules) == []


@pytest.mark.slow
def test_a_load_into_a_model_of_paddleformers_imports_no_trainer_and_one_family(tmp_path: Path) -> None:
    modules = _imported(MODEL_OF_PADDLEFORMERS, tmp_path)
    assert "paddleformers_fc.execute.load" in modules
    assert _unwanted(modules, TRAINER) == []
    assert _families(modules) == ["llama"]


def test_a_read_imports_neither_paddle_nor_a_store_and_one_family(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", canonical())
    modules = _imported(READ, tmp_path)
    assert _unwanted(modules, (*EXPENSIVE, "paddle", "torch", "rich")) == []
    assert _families(modules) == ["ernie4_5"]

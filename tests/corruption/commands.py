"""Trainings from open weights, started by the commands that users type."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.errors import FlexError
from paddleformers_fc.trainer.rank_records import RECORDS, read_error
from paddleformers_fc.trainer.register import PATH
from tests.corruption.jobs import train_as_a_worker
from tests.harness.on_ranks import job_on_ranks
from verification.forkserver import ForkServer

ROOT = Path(__file__).resolve().parents[2]
BINARIES = Path(sys.executable).parent

SCRIPT = """
import sys
from paddleformers_fc import cpu_runtime
cpu_runtime.activate()
from paddleformers.transformers import AutoModelForCausalLM
from paddleformers_fc import FlexTrainer, FlexTrainingArguments
arguments = FlexTrainingArguments(output_dir=sys.argv[2], flex_checkpoint=True, device="cpu", amp_master_grad=False)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
FlexTrainer(model=model, args=arguments, train_dataset=[0])
print("a Trainer was made")
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: its exit code.
        printed: all that it printed.
        error: the error of this package by which its first rank ended, if it left one.
        output: the directory that it trains in.
    """

    code: int
    printed: str
    error: FlexError | None
    output: Path


def train(model: Path, output: Path) -> Ended:
    """``paddleformers-fc train`` with the recipe of the Llama, for two steps."""
    return _ended([str(BINARIES / "paddleformers-fc"), "train", str(_recipe(model, output))], output)


def worker(ranks: ForkServer, model: Path, output: Path, **keys: Any) -> Ended:
    """What the worker of either command does, in a process that has imported Paddle."""
    recipe, errors = _recipe(model, output, custom_register_path=str(PATH), **keys), output.with_suffix(".errors")
    errors.mkdir()
    result = job_on_ranks(ranks.attempt, 1, train_as_a_worker, yaml=recipe, records=errors)
    return Ended(result.returncodes[0], result.logs[0].read_text(errors="replace"), read_error(errors), output)


def stock_command(model: Path, output: Path, **keys: Any) -> Ended:
    """``paddleformers-cli train`` with a YAML that names the registration file, on one process."""
    recipe, errors = _recipe(model, output, custom_register_path=str(PATH), **keys), output.with_suffix(".errors")
    errors.mkdir()
    environment = {
        "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "CUDA_VISIBLE_DEVICES": "0",  # The command sizes a job by this list, on a machine without an accelerator too.
        "MASTER_PORT": str(free_ports(1)[0]),
        RECORDS: str(errors),
    }
    ended = _ended([str(BINARIES / "paddleformers-cli"), "train", str(recipe)], output, environment)
    return Ended(ended.code, ended.printed, read_error(errors), output)


def script(model: Path, output: Path) -> Ended:
    """A script that creates training arguments, loads a model, and makes a ``FlexTrainer``."""
    path = output.with_suffix(".py")
    path.write_text(SCRIPT)
    return _ended([sys.executable, str(path), str(model), str(output)], output)


def _recipe(model: Path, output: Path, **keys: Any) -> Path:
    data = str(model.parent / "corpus.jsonl")
    values = yaml.safe_load((ROOT / "recipes" / "llama_pt.yaml").read_text())
    values |= {"model_name_or_path": str(model), "output_dir": str(output), "max_steps": 2}
    values |= {"train_dataset_path": data, "eval_dataset_path": data, **keys}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    return path


def _ended(command: Sequence[str], output: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Ended:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    done = subprocess.run(command, cwd=output.parent, env=environment, check=False, **both)
    return Ended(done.returncode, done.stdout, None, output)

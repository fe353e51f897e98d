"""Trainings from open weights, started by the commands that users type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from paddleformers_fc.cpu_runtime.ranks import free_ports
from paddleformers_fc.errors import FlexError
from paddleformers_fc.trainer.rank_records import RECORDS, read_error
from paddleformers_fc.trainer.register import PATH
from verification.demo.assets import prepare
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


def assets(directory: Path) -> Path:
    """A corpus, and the weights of a tiny Llama in a directory below it; that directory."""
    return prepare(directory).models["llama"]


def edit_config(directory: Path, **keys: Any) -> Path:
    """Change keys of a ``config.json``; its directory."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return directory


def train(model: Path, output: Path, *overrides: str, corpus: Path | None = None) -> Ended:
    """``paddleformers-fc train`` with the recipe of the Llama, for two steps by default.

    Args:
        model: ``model_name_or_path``.
        output: ``output_dir``.
        overrides: further arguments of the command, such as ``max_steps=1``.
        corpus: the training data, by default beside the directory of the model.
    """
    recipe = _recipe(model, output, corpus)
    command = [str(BINARIES / "paddleformers-fc"), "train", str(recipe), *overrides]
    return _ended(command, output, output / "log", {})


def worker(ranks: ForkServer, model: Path, output: Path, **keys: Any) -> Ended:
    """What the worker of either command does, in a process that has imported Paddle."""
    recipe = recipe_of(model, output, **keys)
    errors = output.with_suffix(".errors")
    errors.mkdir()
    result = ranks.attempt("tests.corruption.jobs:train_as_a_worker", 1, {"yaml": str(recipe), "records": str(errors)})
    return Ended(result.returncodes[0], result.logs[0].read_text(errors="replace"), read_error(errors), output)


def stock_command(model: Path, output: Path, corpus: Path | None = None, **keys: Any) -> Ended:
    """``paddleformers-cli train`` with a YAML that names the registration file, on one process."""
    recipe = _recipe(model, output, corpus, custom_register_path=str(PATH), **keys)
    errors = output.with_suffix(".errors")
    errors.mkdir()
    (port,) = free_ports(1)
    environment = {
        "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "CUDA_VISIBLE_DEVICES": "0",  # The command sizes a job by this list, on a machine without an accelerator too.
        "MASTER_PORT": str(port),
        RECORDS: str(errors),
    }
    return _ended([str(BINARIES / "paddleformers-cli"), "train", str(recipe)], output, errors, environment)


def script(model: Path, output: Path) -> Ended:
    """A script that creates training arguments, loads a model, and makes a ``FlexTrainer``."""
    path = output.with_suffix(".py")
    path.write_text(SCRIPT)
    return _ended([sys.executable, str(path), str(model), str(output)], output, output / "none", {})


def recipe_of(model: Path, output: Path, **keys: Any) -> Path:
    """A YAML for a worker of the stock command, with the registration file."""
    return _recipe(model, output, None, custom_register_path=str(PATH), **keys)


def as_vision_language(directory: Path) -> Path:
    """Make the configuration that of a tiny vision-language model of another family."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    text = json.loads((directory / "config.json").read_text())
    return edit_config(
        directory,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        text_config={**text, "model_type": "qwen2_5_vl_text"},
        vision_config={**vision, "model_type": "qwen2_5_vl"},
    )


def _recipe(model: Path, output: Path, corpus: Path | None, **keys: Any) -> Path:
    data = str(corpus or model.parent / "corpus.jsonl")
    values = yaml.safe_load((ROOT / "recipes" / "llama_pt.yaml").read_text())
    values |= {"model_name_or_path": str(model), "output_dir": str(output), "max_steps": 2, **keys}
    values |= {"train_dataset_path": data, "eval_dataset_path": data}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(values))
    return path


def _ended(command: list[str], output: Path, errors: Path, environment: dict[str, str]) -> Ended:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command,
        cwd=output.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    return Ended(done.returncode, done.stdout, read_error(errors), output)

"""The stock Trainer, scripts and the stock command line: jobs of the fork server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def methods() -> dict[str, int]:
    from paddle.nn import Layer
    from paddleformers.peft import LoRAModel
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
    from paddleformers.transformers import PretrainedModel

    owners = (Trainer, PdArgumentParser, TrainingArguments, PretrainedModel, LoRAModel, Layer)
    return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}


def replaced_methods() -> dict[str, list[str]]:
    """Which methods of PaddleFormers are others after importing, installing and detaching."""
    before = methods()

    def changed() -> list[str]:
        return sorted(name for name, value in methods().items() if before.get(name) != value)

    from paddleformers_fc.trainer import entry

    found = {"imported": changed()}
    entry.install()
    entry.install()
    found["installed"] = changed()
    entry.detach()
    found["detached"] = changed()
    return found


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as an interpreter does, in a process that has imported Paddle."""
    import runpy
    import sys

    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def missing_names(names: Sequence[str]) -> dict[str, str]:
    """Evaluate dotted names after ``import paddleformers_fc`` alone; the errors."""
    import paddleformers_fc

    errors = {}
    for name in names:
        try:
            eval(name, {"paddleformers_fc": paddleformers_fc})
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def run_command_line(yaml: str) -> None:
    """What ``paddleformers-cli train`` runs in each of its workers."""
    import sys

    from paddleformers.cli import launcher

    sys.argv = ["launcher.py", "train", yaml]
    launcher.launch()


def registered_after_another(also: str) -> dict[str, Any]:
    """Run the registration file as the stock command line does, with another file that runs first."""
    import os

    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import Trainer

    from paddleformers_fc.trainer import register

    os.environ[register.ALSO_RUN] = also
    native = Trainer.__init__
    parser._load_custom_template(str(register.PATH))
    name, seen = Trainer.own_registration()
    return {"name": name, "theirs": seen is native, "ours": Trainer.__init__ is not native}


def stock_names() -> list[str]:
    """Every key of PaddleFormers' command line, of its argument classes."""
    import dataclasses

    from paddleformers.cli.hparams import parser

    return [field.name for kind in parser._TRAIN_ARGS for field in dataclasses.fields(kind)]


def stock_enumerations(output_dir: str) -> dict[str, list[str]]:
    """The keys whose values PaddleFormers converts to members of enumerations, with all values of each."""
    from enum import Enum

    from paddleformers.trainer import TrainingArguments
    from paddleformers.trainer.trainer_utils import ShardingOption

    arguments = TrainingArguments(output_dir=output_dir, device="cpu", amp_master_grad=False)
    kinds = {key: type(value) for key, value in vars(arguments).items() if isinstance(value, Enum)}
    # One process has no sharding.
    return {key: [one.value for one in kind] for key, kind in {**kinds, "sharding": ShardingOption}.items()}

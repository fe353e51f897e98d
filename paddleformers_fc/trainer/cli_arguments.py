"""The argument class of ``paddleformers-cli`` with the options of this package.

It is a module of its own because importing it imports the whole command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from paddleformers_fc.trainer.entry import ActiveFields
from paddleformers_fc.upstream import LIBRARY

FinetuningArguments: Any = import_module(f"{LIBRARY}.cli.hparams").FinetuningArguments


@dataclass
class FlexFinetuningArguments(ActiveFields, FinetuningArguments):
    """``FinetuningArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`."""

    looks_for_last_checkpoint: ClassVar[bool] = True
    """The command line names the newest directory of ``output_dir`` even if ``resume_from_checkpoint`` is not set."""

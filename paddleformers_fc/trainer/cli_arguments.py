"""The argument class of ``paddleformers-cli`` with the options of this package.

It is a separate module because importing it imports the complete command line.
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
    """The command line requests the newest directory of ``output_dir`` even without ``resume_from_checkpoint``."""

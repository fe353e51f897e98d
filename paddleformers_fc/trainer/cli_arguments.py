"""The argument class of ``paddleformers-cli`` with the options of this package.

It is a module of its own because importing it imports the whole command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paddleformers.cli.hparams import FinetuningArguments

from paddleformers_fc.trainer import reader
from paddleformers_fc.trainer.arguments import attach
from paddleformers_fc.trainer.options import FlexFields


@dataclass
class FlexFinetuningArguments(FlexFields, FinetuningArguments):
    """``FinetuningArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`.

    Raises:
        OptionError: an option is out of range, or contradicts ``flex_checkpoint: true``.
        EnvironmentMismatch: ``flex_checkpoint`` is true, and Paddle or PaddleFormers is not as this package knows it.
    """

    looks_for_last_checkpoint: ClassVar[bool] = True
    """The command line names the newest directory of ``output_dir`` even if ``resume_from_checkpoint`` is not set."""

    def __post_init__(self) -> None:
        attach(self)
        super().__post_init__()
        reader.follow(self)

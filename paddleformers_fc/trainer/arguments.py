"""PaddleFormers' argument classes with the options of this package.

``FlexTrainingArguments`` is for scripts. The command line parses into a class of its own (:mod:`.cli_arguments`). Both
are declared, not generated, so that they can be pickled and read like any other.

``flex_checkpoint: true`` first appears in the arguments, before a process group exists. Constructing them therefore
checks the installed packages and attaches this package to the stock Trainer (:class:`ActiveFields`). They also choose
the reader of open weights (:mod:`.options`).
"""

from __future__ import annotations

from dataclasses import dataclass

from paddleformers_fc import upstream
from paddleformers_fc.trainer import options
from paddleformers_fc.trainer.attach import attach
from paddleformers_fc.trainer.library import HOOKS, TrainingArguments, logger
from paddleformers_fc.trainer.options import FlexFields


@dataclass
class ActiveFields(FlexFields):
    """The options with their effect on this process: they attach this package and choose the reader of open weights.

    Raises:
        OptionError: an option is out of range, or contradicts ``flex_checkpoint: true``.
        EnvironmentMismatch: ``flex_checkpoint`` is true, and Paddle or PaddleFormers differs from the tested versions.
    """

    def __post_init__(self) -> None:
        if self.flex_checkpoint:
            _attach(self)
        super().__post_init__()
        options.follow(self)


@dataclass
class FlexTrainingArguments(ActiveFields, TrainingArguments):
    """``TrainingArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`."""


def _attach(arguments: FlexFields) -> None:
    """Check the installed packages and attach this package to the stock Trainer, which would save natively.

    Raises:
        EnvironmentMismatch: a hook is missing or different, or an untested version is not allowed.
    """
    upstream.require(HOOKS)
    for line in upstream.require_versions(arguments.flex_unknown_versions):
        logger.warning(f"flex_unknown_versions: warn: {line}. This package is not tested with it.")
    attach()

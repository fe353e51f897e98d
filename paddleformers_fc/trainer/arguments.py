"""PaddleFormers' argument classes with the options of this package.

``FlexTrainingArguments`` is for scripts. The command line parses into a class of its own; :func:`with_flex_fields`
returns, for a class of PaddleFormers, the one with our options. Both are declared, not generated, so that they can be
pickled and read like any other.

``flex_checkpoint: true`` first appears in the arguments, before a process group exists. Constructing them therefore
checks the installed packages and attaches this package to the stock Trainer (:func:`attach`). They also choose the
reader of open weights (:mod:`.reader`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddleformers.trainer import TrainingArguments
from paddleformers.utils.log import logger

from paddleformers_fc import upstream
from paddleformers_fc.trainer import reader
from paddleformers_fc.trainer.options import FlexFields


@dataclass
class FlexTrainingArguments(FlexFields, TrainingArguments):
    """``TrainingArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`.

    Raises:
        OptionError: an option is out of range, or contradicts ``flex_checkpoint: true``.
        EnvironmentMismatch: ``flex_checkpoint`` is true, and Paddle or PaddleFormers is not as this package knows it.
    """

    def __post_init__(self) -> None:
        attach(self)
        super().__post_init__()
        reader.follow(self)


def attach(arguments: FlexFields) -> None:
    """Where arguments ask for flex checkpoints, check the installed packages and let the stock Trainer heed the option.

    A Trainer that does not know ``flex_checkpoint`` would save in PaddleFormers' own format without a word.

    Args:
        arguments: training arguments that are being made.

    Raises:
        EnvironmentMismatch: a hook is missing or different, or a version is unknown and not to be tried.
    """
    if not arguments.flex_checkpoint:
        return
    from paddleformers_fc.trainer.install import install

    upstream.require(upstream.TRAINER)
    for line in upstream.require_versions(arguments.flex_unknown_versions):
        logger.warning(f"flex_unknown_versions: warn: {line}. This package is not tested with it.")
    install()


def with_flex_fields(kind: type[Any]) -> type[Any]:
    """The class with our options that takes the place of an argument class of PaddleFormers.

    Args:
        kind: any dataclass that PaddleFormers' parser fills.

    Returns:
        ``FlexTrainingArguments`` for ``TrainingArguments``, ``FlexFinetuningArguments`` for the command line's own
        ``FinetuningArguments``, and every other class unchanged.
    """
    if kind is TrainingArguments:
        return FlexTrainingArguments
    if kind.__module__ == "paddleformers.cli.hparams.finetuning_args" and kind.__name__ == "FinetuningArguments":
        from paddleformers_fc.trainer.cli_arguments import FlexFinetuningArguments

        return FlexFinetuningArguments
    return kind

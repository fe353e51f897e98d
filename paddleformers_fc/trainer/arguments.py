"""PaddleFormers' argument classes with our options laid over them.

``FlexTrainingArguments`` is for scripts. The command line parses into a class of its own; :func:`with_flex_fields`
gives, for a class of PaddleFormers, the one that also has our options. Both are declared, not generated, so that they
can be pickled and read like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddleformers.trainer import TrainingArguments

from paddleformers_fc.trainer.options import FlexFields


@dataclass
class FlexTrainingArguments(FlexFields, TrainingArguments):
    """``TrainingArguments`` with the options of :class:`~paddleformers_fc.trainer.options.FlexFields`.

    Raises:
        OptionError: an option is out of range, or contradicts ``flex_checkpoint: true``.
    """


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

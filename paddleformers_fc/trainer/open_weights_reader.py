"""The choice of the reader of open weights in this process: this package or PaddleFormers.

``from_pretrained`` runs before a Trainer exists, so the process stores the last choice: training arguments with
``flex_checkpoint: true`` choose this package, arguments with ``false`` choose PaddleFormers. Until a script has created
arguments, :func:`.install.install` has chosen this package. :mod:`.loader_patches` reads the choice.

This module does not import Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass

from paddleformers_fc.trainer.options import FlexFields


@dataclass
class _Decision:
    """The settings in force.

    Args:
        options: how this package reads; None while PaddleFormers does.
        by_arguments: whether training arguments have decided it.
    """

    options: FlexFields | None = None
    by_arguments: bool = False


_decision = _Decision()


def options() -> FlexFields | None:
    """Return how this package reads open weights; None while PaddleFormers reads them."""
    return _decision.options


def follow(arguments: FlexFields) -> None:
    """Let the training arguments that were created last decide."""
    _decision.options = arguments if arguments.flex_checkpoint else None
    _decision.by_arguments = True


def read_by_default() -> None:
    """Choose this package until training arguments decide."""
    if not _decision.by_arguments:
        _decision.options = FlexFields(flex_checkpoint=True)


def read_natively_by_default() -> None:
    """Undo :func:`read_by_default`."""
    if not _decision.by_arguments:
        _decision.options = None

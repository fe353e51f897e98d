"""Flex checkpoints for PaddleNLP's Trainer: the names of :mod:`paddleformers_fc`, for PaddleNLP's classes.

Each name is imported on first use. An environment has PaddleNLP or PaddleFormers, not both.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from paddleformers_fc import upstream
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.upstream.hooks import PADDLEFORMERS, PADDLENLP, TRAINERS

_HOME = {
    "FlexCheckpointCallback": "paddleformers_fc.trainer.session",
    "FlexTrainer": "paddleformers_fc.trainer.entry",
    "FlexTrainerMixin": "paddleformers_fc.trainer.entry",
    "FlexTrainingArguments": "paddleformers_fc.trainer.nlp_arguments",
    "install": "paddleformers_fc.trainer.entry",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_not_both()
    upstream.require(TRAINERS[PADDLENLP])
    return getattr(importlib.import_module(home), name)


def _check_not_both() -> None:
    if upstream.is_installed(PADDLEFORMERS):
        raise EnvironmentMismatch(
            "paddleformers_fc.nlp is for environments without PaddleFormers, and this one has it.",
            where=f"Python environment {sys.prefix}",
            evidence=["PaddleFormers and PaddleNLP need different versions of aistudio-sdk and tokenizers"],
            next_step="Install PaddleNLP in a separate environment, as docs/paddlenlp.md describes; or use "
            "paddleformers_fc.FlexTrainer with PaddleFormers' Trainer.",
        )

"""The library whose Trainer this process uses: PaddleFormers, or PaddleNLP in an environment that has it alone.

The two need different versions of the same packages, so an environment has one of them. This module and
:mod:`.library_models` are the only ones of the Trainer's package that import either of them for the others. This module
has the names that are needed before the table of :mod:`paddleformers_fc.upstream` has been checked. It also has the
table of the library (``HOOKS``) and the method of its Trainer that is replaced to load a checkpoint (``LOAD_METHOD``).
"""

from __future__ import annotations

from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import PADDLENLP, TRAINERS

if LIBRARY == PADDLENLP:
    from paddlenlp.trainer import PdArgumentParser, Trainer, TrainerCallback, TrainingArguments
    from paddlenlp.utils.log import logger

    NAME, LOAD_METHOD = "PaddleNLP", "_load_optimizer_and_scheduler"
else:
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainerCallback, TrainingArguments
    from paddleformers.utils.log import logger

    NAME, LOAD_METHOD = "PaddleFormers", "_load_flex_checkpoint"

HOOKS = TRAINERS[LIBRARY]

__all__ = [
    "HOOKS",
    "LOAD_METHOD",
    "NAME",
    "PdArgumentParser",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "logger",
]

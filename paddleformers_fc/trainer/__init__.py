"""The seam to PaddleFormers' Trainer: the only place that changes what it does when it saves or resumes.

Without ``flex_checkpoint: true`` everything here hands over to PaddleFormers. With it, saving, resuming, rotation and
``save_pretrained`` go through :mod:`paddleformers_fc.execute`; the training loop itself stays PaddleFormers' own.

Three ways in, one implementation (:mod:`.seam`): :class:`FlexTrainer` in a script, :func:`install` for the stock
``Trainer`` class, and the file ``register.py``, which a YAML names as its ``custom_register_path``.

Importing this package imports neither Paddle nor PaddleFormers; its names do when they are first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "FlexCheckpointCallback": "callback",
    "FlexTrainer": "mixin",
    "FlexTrainerMixin": "mixin",
    "FlexTrainingArguments": "arguments",
    "install": "install",
    "uninstall": "install",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

"""Flex checkpoints for PaddleFormers' Trainer: save once, resume under any parallel layout, export anywhere.

This module has the names that training scripts need. Each is imported on first use, so that ``import paddleformers_fc``
is fast and works without Paddle.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Type checkers do not see what __getattr__ imports.
    from paddleformers.trainer import Trainer as FlexTrainer

    from paddleformers_fc.api import Checkpoint, open
    from paddleformers_fc.layout.roles import register_optimizer
    from paddleformers_fc.trainer.ema_weights import averaged_weights, save_ema
    from paddleformers_fc.trainer.entry import FlexTrainerMixin, FlexTrainingArguments, install
    from paddleformers_fc.trainer.loop import load, save
    from paddleformers_fc.trainer.pretrained import load_open_weights
    from paddleformers_fc.trainer.session import FlexCheckpointCallback
    from paddleformers_fc.trainer.streaming import stream

__version__ = "0.1.0"

_LOOP = "paddleformers_fc.trainer.loop"
_STREAMING = "paddleformers_fc.trainer.streaming"
_HOME = {
    "Checkpoint": "paddleformers_fc.api",
    "averaged_weights": "paddleformers_fc.trainer.ema_weights",
    "load": _LOOP,
    "open": "paddleformers_fc.api",
    "save": _LOOP,
    "FlexCheckpointCallback": "paddleformers_fc.trainer.session",
    "FlexTrainer": "paddleformers_fc.trainer.entry",
    "FlexTrainerMixin": "paddleformers_fc.trainer.entry",
    "FlexTrainingArguments": "paddleformers_fc.trainer.entry",
    "install": "paddleformers_fc.trainer.entry",
    "load_open_weights": "paddleformers_fc.trainer.pretrained",
    "register_optimizer": "paddleformers_fc.layout.roles",
    "save_ema": "paddleformers_fc.trainer.ema_weights",
    "stream": _STREAMING,
}

_PACKAGES = ("cpu_runtime", "trainer")
"""Packages that are available after ``import paddleformers_fc`` alone."""

__all__ = [
    "Checkpoint",
    "FlexCheckpointCallback",
    "FlexTrainer",
    "FlexTrainerMixin",
    "FlexTrainingArguments",
    "averaged_weights",
    "install",
    "load",
    "load_open_weights",
    "open",
    "register_optimizer",
    "save",
    "save_ema",
    "stream",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home.startswith(f"{__name__}.trainer"):
        from paddleformers_fc import upstream
        from paddleformers_fc.upstream.hooks import LOOP, TRAINERS

        # This comes first, so that one error lists every missing name; a module's own imports would stop at one.
        upstream.require(LOOP if home in (_LOOP, _STREAMING) else TRAINERS[upstream.FORMERS])
    return getattr(importlib.import_module(home), name)

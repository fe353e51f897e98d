"""Jobs for ranks: the names in the environment of a process, as its libraries see them."""

from __future__ import annotations

import ctypes
from typing import Any

from paddleformers.trainer import Trainer, TrainerCallback

from tests.harness import tiny


def names() -> set[str]:
    """The names in the C library's table; ``os.environ`` does not have those that libraries add."""
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: set[str] = set()
    while (entry := table[len(found)]) is not None:
        found.add(entry.decode().partition("=")[0])
    return found


class _AtEpoch(TrainerCallback):  # type: ignore[misc]  # PaddleFormers has no types.
    """Reads the names before the first batch is asked for."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seen = names()


def added_by_stock(output_dir: str) -> list[str]:
    """The names that the stock Trainer adds after it has begun to make batches."""
    return _added(tiny.training_arguments(tiny.SINGLE, output_dir, max_steps=2), Trainer)


def added_by_flex(output_dir: str) -> list[str]:
    """The names that our Trainer adds after it has begun to make batches."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 2}
    return _added(tiny.training_arguments(tiny.SINGLE, output_dir, **settings), FlexTrainer)


def _added(args: Any, cls: type[Any]) -> list[str]:
    callback = _AtEpoch()
    tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args, cls=cls, callbacks=[callback]).train()
    return sorted(names() - callback.seen)

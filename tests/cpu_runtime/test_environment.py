"""The environment of a rank while other threads read it without a lock."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.harness.on_ranks import on_ranks


def names() -> set[str]:
    """The names in the C library's table; ``os.environ`` does not have those that libraries add."""
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: set[str] = set()
    while (entry := table[len(found)]) is not None:
        found.add(entry.decode().partition("=")[0])
    return found


def added(args: Any, cls: type[Any]) -> list[str]:
    """The names that a Trainer adds after it has begun to make batches."""
    from paddleformers.trainer import TrainerCallback

    seen: set[str] = set()

    class AtEpoch(TrainerCallback):  # type: ignore[misc]  # PaddleFormers has no types.
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            seen.update(names())

    tiny.trainer(tiny.build("llama", tiny.SINGLE, args), args, cls=cls, callbacks=[AtEpoch()]).train()
    return sorted(names() - seen)


@on_ranks(1)
def test_no_name_is_added_to_the_environment_once_batches_are_made(tmp_path: Path) -> None:
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": 2}
    assert added(tiny.training_arguments(tiny.SINGLE, str(tmp_path), **settings), FlexTrainer) == []


@on_ranks(1, server="bare_ranks")
def test_paddle_and_paddleformers_still_add_names_once_batches_are_made(tmp_path: Path) -> None:
    from paddleformers.trainer import Trainer

    found = added(tiny.training_arguments(tiny.SINGLE, str(tmp_path), max_steps=2), Trainer)
    assert [name.rstrip("0123456789") for name in found] == ["TRAINER_GLOBAL_STEP", "__KMP_REGISTERED_LIB_"]

"""The best checkpoint so far, hidden from PaddleFormers' training loop.

At the end of a training with ``load_best_model_at_end`` that loop unpickles ``model_state.pdparams`` in the directory
that the Trainer's state names as the best. A flex checkpoint has no such file, and this package loads its weights; but
a file put there would be executed. The name is therefore absent from the state while the loop runs, and present for
callbacks and saves.

A resumed run takes over the name, which is a path of the run that saved: :func:`locate_best`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.storage.files import exists
from paddleformers_fc.storage.manifest import MANIFEST_NAME
from paddleformers_fc.storage.paths import AnyPath


def locate_best(named: str, resumed: AnyPath, channel: Channel) -> str | None:
    """Return the path of the best checkpoint of a resumed run: its old path, or beside the resumed checkpoint.

    An output directory may have been moved since, and a relative one begins where a run is started.

    Args:
        named: its path in the run that saved it.
        resumed: the checkpoint that is resumed from.
        channel: all ranks of the job; every rank must call.

    Returns:
        a path of this rank, visible to any rank; None if no rank finds it.

    Raises:
        StorageError: the operating system refused to look.
    """
    paths = [Path(named), *([resumed.with_name(Path(named).name)] if isinstance(resumed, Path) else [])]

    def look() -> int:
        return next((place for place, path in enumerate(paths, 1) if exists(path / MANIFEST_NAME)), 0)

    seen = all_gather_checked(channel, "looking for the best checkpoint", look, int)
    chosen = seen[channel.rank] or max(seen)
    return str(paths[chosen - 1]) if chosen else None


class BestCheckpoint:
    """Keeps the name while it must be hidden from the loop."""

    def __init__(self) -> None:
        self._hiding = False
        self._name: str | None = None

    @contextlib.contextmanager
    def kept_from(self, trainer: Any) -> Iterator[None]:
        """Return a block in which PaddleFormers' loop runs; the name is visible to callbacks."""
        handler = trainer.callback_handler
        original = handler.call_event

        def call_event(*args: Any, **kwargs: Any) -> Any:
            with self.shown_in(trainer):
                return original(*args, **kwargs)

        handler.call_event = call_event
        self._hide(trainer)
        try:
            yield
        finally:
            self._show(trainer)
            handler.call_event = original

    @contextlib.contextmanager
    def shown_in(self, trainer: Any) -> Iterator[None]:
        """Return a block to which the name is visible, and which may set another one."""
        if not self._hiding:
            yield
            return
        self._show(trainer)
        try:
            yield
        finally:
            self._hide(trainer)

    def _hide(self, trainer: Any) -> None:
        self._hiding, self._name = True, trainer.state.best_model_checkpoint
        trainer.state.best_model_checkpoint = None

    def _show(self, trainer: Any) -> None:
        self._hiding, trainer.state.best_model_checkpoint = False, self._name

"""Use the averaged weights of a run: temporarily in the model, in evaluations, and in an export.

Ranks exchange the averages in memory (:mod:`~paddleformers_fc.execute.exchange`) and round them to the dtypes of the
weights. The weights are copied to host memory and restored bit by bit. Restoring looks them up again, because a forward
pass moves the slices of sharding stage 3. Master weights and optimizer states do not change.

Memory: a host copy of this rank's replaced weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paddleformers_fc.api_arguments import DIRECTORY, Kind, require
from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.execute.exchange import LocalPart, gather_parts
from paddleformers_fc.execute.memory import host_pieces, slot_of
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import EMA_STATE, MODEL_STATE
from paddleformers_fc.layout.shards import Shard
from paddleformers_fc.storage.dtypes import copy_cast
from paddleformers_fc.trainer import live_roles, save
from paddleformers_fc.trainer.ema import MovingAverage
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.session import Native, session_of

_MEMORY = Path("host memory")
_TRAINER = Kind("a Trainer", lambda value: hasattr(value, "args") and hasattr(value, "model"))


@contextmanager
def averaged_weights(trainer: Any) -> Iterator[None]:
    """Context manager in which a Trainer's model has its averaged weights. Every rank must enter it.

    Parameters without an average keep their values. Do not train or save inside.

    Example:
        >>> with averaged_weights(trainer):  # doctest: +SKIP
        ...     metrics = trainer.evaluate()

    Args:
        trainer: a Trainer with ``flex_ema_decay``.
    Raises:
        OptionError: the Trainer does not keep an average, has not updated it yet, or does not use this package.
        FlexError: an update of the average has failed; the same on every rank.
    """
    require(_TRAINER, trainer=trainer)
    session, average = session_of(trainer), require_average(trainer)
    session.barrier.finish()

    def prepare() -> tuple[dict[str, LocalPart], dict[str, Any], dict[str, Shard]]:
        average.wait_for_update()
        weights = _weights(trainer)
        return _local_parts(average), weights, describe_roles({MODEL_STATE: weights})[MODEL_STATE]

    averages, weights, shards = run_on_all(session.channel, "preparing the averaged weights", prepare)
    originals: dict[str, np.ndarray[Any, Any]] = {}
    average.in_model = True
    try:
        for name, values in gather_parts(averages, shards, session.channel):
            tensor = weights[name].local_tensor
            originals[name] = _copy(tensor)
            _fill(tensor, values)
        yield
    finally:
        weights = _weights(trainer)
        # In reverse order, because a tied tensor may have been filled under two names.
        for name in reversed(originals):
            _fill(weights[name].local_tensor, originals[name])
        average.in_model = False


def save_ema(trainer: Any, directory: str, max_shard_size: str | int | None = None) -> None:
    """Export the averaged weights of a Trainer's model in Hugging Face format. Every rank must call.

    Example:
        >>> save_ema(trainer, "out/averaged")  # doctest: +SKIP

    Args:
        trainer: a Trainer with ``flex_ema_decay``.
        directory: the directory to write.
        max_shard_size: maximum size of a file in bytes, such as ``"5GB"`` or a number. Default:
            ``flex_max_shard_size``.
    Raises:
        OptionError: the Trainer does not keep an average, has not updated it yet, or does not use this package.
        FlexError: the same on every rank; an older export in the directory stays unchanged.
    """
    require(_TRAINER, trainer=trainer)
    require(DIRECTORY, directory=directory)
    average = require_average(trainer)
    size = trainer.args.flex_max_shard_size if max_shard_size is None else max_shard_size
    save.export_live(trainer, directory, size, lambda: average.roles().get(EMA_STATE, {}))


def evaluate(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> Any:
    """``Trainer.evaluate``: with the averaged weights under ``flex_ema_evaluate``.

    Raises:
        FlexError: see :func:`averaged_weights`.
    """
    session = session_of(trainer)
    average = session.average
    if not trainer.args.flex_ema_evaluate or (average is not None and average.in_model):
        return native(*args, **kwargs)
    if average is None or not average.has_begun:
        why = "flex_ema_decay is 0" if average is None else "the moving average has not been updated yet"
        session.warn_once(f"flex_ema_evaluate: {why}, so the weights themselves are evaluated.")
        return native(*args, **kwargs)
    with averaged_weights(trainer):
        if trainer.args.should_log:
            step = "an unknown step" if average.step is None else f"step {average.step}"
            logger.info(f"Evaluating the moving average of {step}.")
        return native(*args, **kwargs)


def require_average(trainer: Any) -> MovingAverage:
    """Return the average of a Trainer.

    Raises:
        OptionError: the Trainer does not keep an average, or has not updated it yet.
    """
    average = session_of(trainer).average
    if average is None or not average.has_begun:
        raise OptionError(
            "The Trainer has no moving average of its weights.",
            where="flex_ema_decay",
            evidence=["flex_ema_decay: 0" if average is None else "the average has not been updated yet"],
            next_step="Set flex_ema_decay, and train at least one step.",
        )
    return average


def _local_parts(average: MovingAverage) -> dict[str, LocalPart]:
    shards = describe_roles({EMA_STATE: average.tensors})[EMA_STATE]
    return {
        name: LocalPart(shard, slot_of(average.tensors[name].local_tensor).open().array())
        for name, shard in shards.items()
    }


def _weights(trainer: Any) -> dict[str, Any]:
    """Return the weights of this rank in their current memory."""
    session_of(trainer).settle_weights()
    return live_roles.model_roles(trainer.model)[MODEL_STATE]


def _copy(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the elements of a live tensor in new host memory."""
    elements = int(np.prod(tensor.shape))
    # A piece is valid only until the next piece is requested.
    return np.concatenate([piece.copy() for piece in host_pieces(tensor, 0, elements)])


def _fill(tensor: Any, values: np.ndarray[Any, Any]) -> None:
    slot = slot_of(tensor)
    copy_cast(slot.open().array(), values, _MEMORY)
    slot.close()
    slot.finish_copy()

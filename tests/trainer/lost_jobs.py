"""Jobs whose ranks are not alike, or of which one dies: what every other rank then does."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.harness.clocks import ProcessClock
from tests.trainer.jobs import flex_trainer, weights_of


def differ(kind: str, resume: str | None, output_dir: str, layout: Mapping[str, Any], late: bool) -> dict[str, Any]:
    """Resume, or save where ``resume`` is None, as a job whose second rank is not like the others.

    Args:
        kind: what is different, a key of :data:`DIFFERENT` or of :data:`_OF_ARGUMENTS`.
        resume: a checkpoint of three steps.
        output_dir: of the Trainer.
        layout: a ``tiny.Layout`` as JSON.
        late: it differs only when the checkpoint is loaded, after the checks at the start.
    """
    from paddleformers_fc.errors import FlexError

    # The process group must not know: it begins with the Trainer's arguments.
    arguments = {"max_steps": 3 if resume else 1, "save_steps": 1}
    is_odd = os.environ["PADDLE_TRAINER_ID"] == "1"
    if is_odd and not late:
        arguments |= _OF_ARGUMENTS.get(kind, {})
    trainer = flex_trainer(layout, output_dir, arguments)
    if is_odd and late:
        trainer._load_flex_checkpoint = _after(kind, trainer, trainer._load_flex_checkpoint)
    elif is_odd and kind in DIFFERENT:
        DIFFERENT[kind](trainer)
    held = weights_of(trainer.model)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        found = {"error": type(error).__name__, "text": error.render(), "steps": trainer.state.global_step}
        return {**found, "changed": weights_of(trainer.model) != held}
    return {"error": None}


def _after(kind: str, trainer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that first makes this rank different."""

    def different(*args: Any, **kwargs: Any) -> Any:
        for key, value in _OF_ARGUMENTS.get(kind, {}).items():
            setattr(trainer.args, key, value)
        if kind in DIFFERENT:
            DIFFERENT[kind](trainer)
        return method(*args, **kwargs)

    return different


def _version(trainer: Any) -> None:
    from paddleformers_fc.distributed import consistency

    consistency.__version__ = "9.9.9"  # This process ends with the job.


def _paddle(trainer: Any) -> None:
    import paddle

    paddle.__version__ = "9.9.9"


def _config(trainer: Any) -> None:
    trainer.model.config.rms_norm_eps = 0.125


DIFFERENT: dict[str, Callable[[Any], None]] = {"version": _version, "paddle": _paddle, "config": _config}
_OF_ARGUMENTS: dict[str, dict[str, Any]] = {
    "option": {"flex_verify": "size"},
    "statements": {"aoa_config": {"aoa_statements": ["model.norm.weight -> model.norm.weight"]}},
    "save_steps": {"save_steps": 2},
    "learning_rate": {"learning_rate": 0.5},
}


def keep_time(directory: Path, ranks: int | None = None) -> None:
    """Let the time in which ranks wait for each other pass only while all that live wait, or the first ``ranks``."""
    from paddleformers_fc.distributed import store_client

    rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), ranks or int(os.environ["PADDLE_TRAINERS_NUM"])
    clock, is_readable = ProcessClock(directory / "clock", rank, ranks), store_client._is_readable

    def in_time(connection: socket.socket, seconds: float) -> bool:
        end = clock.monotonic() + seconds
        while not is_readable(connection, 0):
            if clock.monotonic() >= end:
                return False
            clock.sleep(end - clock.monotonic())
        return True

    store_client._is_readable = in_time  # This process ends with the job.


def die(moment: str, victim: int, output_dir: str, layout: Mapping[str, Any], resume: str | None = None) -> None:
    """Train, save and resume as a job of which one rank kills itself; every other rank writes down how it ended.

    Args:
        moment: ``reading`` or ``writing`` a checkpoint, or ``exchanging``: after all have come to an exchange.
        victim: the rank.
        output_dir: of the Trainer; gets ``ended-<rank>.json`` of every rank that raises.
        layout: a ``tiny.Layout`` as JSON.
        resume: a checkpoint of three steps; None to train from the beginning and save.
    """
    rank = int(os.environ["PADDLE_TRAINER_ID"])
    keep_time(Path(output_dir))
    trainer = flex_trainer(layout, output_dir, {"max_steps": 6, "save_steps": 2})
    if rank == victim:
        _die_when(moment)
    before = weights_of(trainer.model)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except BaseException as error:
        ended = {
            "error": type(error).__name__,
            "text": str(error),
            "step": trainer.state.global_step,
            "half": weights_of(trainer.model) != before,
        }
        Path(output_dir, f"ended-{rank}.json").write_text(json.dumps(ended))
        raise


def _die_when(moment: str) -> None:
    """Make this process kill itself at a moment, half way through."""
    from paddleformers_fc.distributed import channel
    from paddleformers_fc.execute import exchange, save

    def kill(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "reading":
        exchange.execute_reads = kill
    elif moment == "writing":
        save._write_tensors = kill
    else:
        channel.PaddleChannel.gather = kill

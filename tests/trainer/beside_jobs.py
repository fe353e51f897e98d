"""Trainings that save beside their steps, held or broken at a moment of a save; each job returns JSON."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

from tests.trainer.jobs import flex_trainer

LONG = 60.0
_A_WHILE = 0.3


def with_late_copies(job: str, **settings: Any) -> Any:
    """Run a job whose snapshots are copied when the next update wants to begin, and after it if it does not wait.

    What a moving average reads is copied then too, or when someone waits for the average before that.

    Args:
        job: module and function.
        settings: its arguments.
    """
    from paddleformers_fc.execute.async_snapshot import SnapshotCopy
    from paddleformers_fc.trainer import save
    from paddleformers_fc.trainer.ema import MovingAverage, UpdateBarrier
    from paddleformers_fc.trainer.session import LoopEvents

    wanted, average_wanted, updated = threading.Event(), threading.Event(), threading.Event()
    prepare, finish, copy = save.prepare, UpdateBarrier.finish, SnapshotCopy.finish
    settled, call = MovingAverage.wait_for_update, LoopEvents.call_event

    def prepare_again(*args: Any) -> Any:
        for one in (wanted, average_wanted, updated):
            one.clear()
        return prepare(*args)

    def finish_wanted(self: Any) -> None:
        wanted.set()
        average_wanted.set()
        finish(self)

    def settled_wanted(self: Any) -> None:
        average_wanted.set()
        settled(self)

    def copy_late(self: Any) -> Any:
        is_average = threading.current_thread().name.startswith("flex-ema")
        assert (average_wanted if is_average else wanted).wait(LONG), "no update has followed"
        updated.wait(_A_WHILE)
        return copy(self)

    def called(self: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        if event == "on_optimizer_end":
            updated.set()
        return call(self, event, *args, **kwargs)

    save.prepare = prepare_again
    UpdateBarrier.finish = finish_wanted
    LoopEvents.call_event = called
    SnapshotCopy.finish = copy_late
    MovingAverage.wait_for_update = settled_wanted
    module, _, name = job.partition(":")
    return getattr(importlib.import_module(module), name)(**settings)


def break_off(at: int, victims: list[int], kind: str, **settings: Any) -> dict[str, Any]:
    """Train; some ranks raise an error of their own in the pass after a step, while its save has not begun to write.

    Ranks that raise alone do not wait for the others for long.

    Args:
        at: the step.
        victims: the ranks.
        kind: of the error, a built-in exception.
    """
    import builtins

    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc.distributed import step_agreement
    from paddleformers_fc.execute import save

    alone = len(victims) < int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    step_agreement.ENDING_SECONDS = _A_WHILE if alone else LONG
    raised, write = threading.Event(), save._write_files
    is_victim = int(os.environ.get("PADDLE_TRAINER_ID", "0")) in victims

    def write_late(planned: Any, *args: Any) -> Any:
        if is_victim and planned.part.job.step == at:
            assert raised.wait(LONG)
        return write(planned, *args)

    class BreakOff(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_victim and state.global_step == at:
                raised.set()
                raise getattr(builtins, kind)("broken off")

    save._write_files = write_late
    trainer = flex_trainer(**settings, callbacks=[BreakOff()])
    try:
        trainer.train()
    except BaseException as error:
        if alone:
            raise
        newest = Path(settings["output_dir"]) / f"checkpoint-{at}"
        return {"error": type(error).__name__, "committed": (newest / "flex_checkpoint.json").is_file()}
    return {"error": None}

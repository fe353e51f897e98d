"""Trainings that get a signal; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from tests.harness.waiting import pause
from tests.trainer.jobs import few_samples, flex_trainer


def run_signalled(
    signalled: Sequence[int],
    event: str = "on_step_end",
    at: int = 2,
    name: str = "SIGTERM",
    group: bool = False,
    resume: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train until a signal ends the training; how it ended.

    Args:
        signalled: the ranks that get the signal.
        event: the callback in which they get it.
        at: the step after which they get it.
        name: the signal.
        group: whether the workers of data loaders get it too.
    """
    from paddle.distributed import get_rank
    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc.distributed import step_agreement

    step_agreement.IDLE_SECONDS = 0.5
    saves: list[int] = []
    evaluated: list[int] = []

    class Sender(TrainerCallback):
        sent = False

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves.append(state.global_step)

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluated.append(state.global_step)

    def send(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= at:
            pause()  # Fewer steps until the ranks have agreed.
        if state.global_step >= at and not self.sent and get_rank() in signalled:
            self.sent = True
            # Paddle's workers end well on a signal of their parent, so another process sends it to the group.
            target = -os.getpid() if group else os.getpid()
            subprocess.run(
                ["kill", "-s", name.removeprefix("SIG"), "--", str(target)], check=True, start_new_session=True
            )

    setattr(Sender, event, send)
    before = signal.getsignal(signal.Signals[name])
    if group:
        settings["data_collator"] = in_numpy
    trainer = flex_trainer(**settings, eval_dataset=few_samples())
    trainer.add_callback(Sender())
    code = None
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as end:
        code = end.code
    return {
        "code": code,
        "step": trainer.state.global_step,
        "losses": trainer.losses,
        "saves": saves,
        "evaluated": evaluated,
        "restored": signal.getsignal(signal.Signals[name]) == before,
    }


def run_signalled_while_saving(**settings: Any) -> dict[str, Any]:
    """Train until two signals, which come while the first save is written; how it ended."""
    import threading

    from paddleformers.trainer import TrainerCallback

    from paddleformers_fc.execute import save
    from tests.harness.limits import LIMIT

    sent, write, saves = threading.Event(), save._write_files, []

    def write_late(planned: Any, *args: Any) -> Any:
        assert sent.wait(LIMIT)
        return write(planned, *args)

    class Sender(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:
                pause()  # Fewer steps until the ranks have agreed.
                if not sent.is_set():
                    for _ in range(2):
                        os.kill(os.getpid(), signal.SIGTERM)
                sent.set()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saves.append(state.global_step)

    save._write_files = write_late
    trainer = flex_trainer(**settings, callbacks=[Sender()])
    try:
        trainer.train()
    except SystemExit as end:
        return {"code": end.code, "step": trainer.state.global_step, "saves": saves}
    return {"code": None}


def in_numpy(rows: Sequence[Any]) -> dict[str, Any]:
    """A batch that a forked worker can make, which must not touch Paddle's tensors."""
    import numpy as np

    return {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}

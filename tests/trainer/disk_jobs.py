"""What ranks do whose output directory lies on several disks: each starts in a directory of its own."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from typing import Any

from tests.crash.net import Net, Operation, cast
from tests.trainer import jobs


def go_to(places: list[str]) -> None:
    """Make this rank's place its working directory."""
    os.chdir(places[int(os.environ["PADDLE_TRAINER_ID"])])


def run(places: list[str], **settings: Any) -> dict[str, Any]:
    """As ``jobs.run``."""
    go_to(places)
    return jobs.run(**settings)


def refused(places: list[str], **settings: Any) -> dict[str, Any]:
    """As ``jobs.refused``."""
    go_to(places)
    return jobs.refused(**settings)


def resume_by_itself(places: list[str], **settings: Any) -> dict[str, Any]:
    """Train as the command line does: each rank names the newest directory that it sees, and a fresh disk has none."""
    from paddleformers.trainer import get_last_checkpoint

    from paddleformers_fc.errors import FlexError

    go_to(places)
    trainer = jobs.flex_trainer(**settings)
    trainer.args.looks_for_last_checkpoint = True
    try:
        trainer.train(resume_from_checkpoint=get_last_checkpoint("out") if os.path.isdir("out") else None)
    except FlexError as error:
        return {"error": type(error).__name__, "text": error.render(), "steps": len(trainer.losses)}
    return jobs.outcome(trainer)


@dataclass(frozen=True)
class RefuseSync:
    """A broken device: files whose paths contain ``part`` cannot be synced."""

    part: str

    def before(self, operation: Operation) -> None:
        """Refuse if it is one of these."""
        if operation.kind == "sync" and self.part in operation.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)

    def after(self, operation: Operation) -> None:
        """Nothing."""


def train_and_fail_a_sync(places: list[str], victim: int, part: str, **settings: Any) -> dict[str, Any]:
    """Train, on one rank with a broken device; the error, and the checkpoints that are left on this rank's disk."""
    from paddleformers_fc.errors import FlexError

    go_to(places)
    error: FlexError | None = None
    is_victim = int(os.environ["PADDLE_TRAINER_ID"]) == victim
    with cast(Net(RefuseSync(part))) if is_victim else contextlib.nullcontext():
        try:
            jobs.flex_trainer(**settings).train()
        except FlexError as raised:
            error = raised
    left = sorted(name for name in os.listdir("out") if "checkpoint" in name)
    return {"error": type(error).__name__, "text": "" if error is None else error.render(), "left": left}


def draw_after_resume(places: list[str], resume: str | None = None, **settings: Any) -> list[float]:
    """Train; two random numbers afterwards, which depend on where the generators began."""
    import paddle

    go_to(places)
    trainer = jobs.flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    drawn: list[float] = paddle.rand([2]).tolist()
    return drawn


def run_and_lose_a_disk(places: list[str], **settings: Any) -> dict[str, Any]:
    """Train; the second rank's local tier is removed after the fourth step."""
    import shutil

    from paddleformers.trainer import TrainerCallback

    class Lose(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4 and os.environ["PADDLE_TRAINER_ID"] == "1":
                shutil.rmtree("local")

    go_to(places)
    trainer = jobs.flex_trainer(**settings, callbacks=[Lose()])
    trainer.train()
    return jobs.outcome(trainer)

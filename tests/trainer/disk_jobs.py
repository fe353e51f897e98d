"""What ranks do whose output directory lies on several disks: each starts in a directory of its own."""

from __future__ import annotations

import contextlib
import errno
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.crash.net import Gate, Net, Operation, cast
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
class Refuse(Gate):
    """A file system that refuses an operation on files whose paths contain ``part``."""

    kind: str
    part: str
    number: int

    def before(self, operation: Operation) -> None:
        """Refuse if it is one of these."""
        if operation.kind == self.kind and self.part in operation.path:
            raise OSError(self.number, os.strerror(self.number), operation.path)


def refusing(kind: str, part: str, number: int) -> AbstractContextManager[Net]:
    """Context manager in which the system refuses an operation of a kind with an error number."""
    return cast(Net(Refuse(kind, part, number)))


def train_and_fail_a_sync(places: list[str], victim: int, part: str, **settings: Any) -> dict[str, Any]:
    """Train, on one rank with a broken device; the error, and the checkpoints that are left on this rank's disk."""
    from paddleformers_fc.errors import FlexError

    go_to(places)
    is_victim = int(os.environ["PADDLE_TRAINER_ID"]) == victim
    with refusing("sync", part, errno.EIO) if is_victim else contextlib.nullcontext():
        with pytest.raises(FlexError) as caught:
            jobs.trained(**settings)
    left = sorted(name for name in os.listdir("out") if "checkpoint" in name)
    return {"error": caught.type.__name__, "text": caught.value.render(), "left": left}


def draw_after_resume(places: list[str], resume: str | None = None, **settings: Any) -> list[float]:
    """Train; two random numbers afterwards, which depend on where the generators began."""
    import paddle

    go_to(places)
    jobs.trained(resume=resume, **settings)
    drawn: list[float] = paddle.rand([2]).tolist()
    return drawn

"""A job for real ranks: the Trainer saves, and a rank is killed at an operation on files."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.crash.net import Gate, Net, Operation, cast
from tests.harness.clocks import keep_time
from tests.trainer.jobs import run


@dataclass(frozen=True)
class KillOn(Gate):
    """The end of a process before an operation is carried out; a write is torn.

    Args:
        kind: of the operation.
        part: of its path.
    """

    kind: str
    part: str

    def before(self, operation: Operation) -> None:
        """Die if it is the one."""
        if operation.kind == self.kind and self.part in operation.path:
            operation.tear()
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(victims: Sequence[int], kind: str, part: str, **settings: Any) -> Mapping[str, Any]:
    """As :func:`tests.trainer.jobs.run`, of which some ranks are killed.

    Args:
        victims: the ranks.
        kind: of the operation they are killed at, as :class:`tests.crash.net.Operation` has it.
        part: of the path of that operation.
    """
    keep_time(settings["output_dir"])
    if int(os.environ["PADDLE_TRAINER_ID"]) not in victims:
        return run(**settings)
    with cast(Net(KillOn(kind, part))):
        return run(**settings)

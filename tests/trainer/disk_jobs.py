"""What ranks do whose output directory lies on several disks: each starts in a directory of its own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

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


def lose_what_was_saved(places: list[str], lost: str, **settings: Any) -> list[str]:
    """Train, and change a file of a checkpoint after it was saved and before older ones are deleted.

    Args:
        lost: the file in ``output_dir``; it is changed on the disks that have it.
    Returns:
        the names of checkpoints that are left on this rank's disk.
    """
    from paddleformers_fc.trainer.callback import CheckpointReport, FlexCheckpointCallback

    class Lose(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: CheckpointReport) -> None:
            path = Path(args.output_dir, lost)
            if report.step == args.max_steps and path.exists():
                with contextlib.suppress(FileExistsError):  # Another rank that sees this disk has changed it.
                    Path("lost").touch(exist_ok=False)
                    data = path.read_bytes()
                    path.write_bytes(data[:8])

    go_to(places)
    jobs.flex_trainer(**settings, callbacks=[Lose()]).train()
    return sorted(name for name in os.listdir("out") if "checkpoint" in name)


def draw_after_resume(places: list[str], resume: str | None = None, **settings: Any) -> list[float]:
    """Train; two random numbers afterwards, which depend on where the generators began."""
    import paddle

    go_to(places)
    trainer = jobs.flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    drawn: list[float] = paddle.rand([2]).tolist()
    return drawn

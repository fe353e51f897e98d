"""What ranks do whose output directory lies on several disks: each starts in a directory of its own."""

from __future__ import annotations

import os
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


def resume_and_save_again(places: list[str], **settings: Any) -> None:
    """As ``jobs.resume_and_save_again``."""
    go_to(places)
    jobs.resume_and_save_again(**settings)


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


def export(places: list[str], resume: str, **settings: Any) -> list[str]:
    """Export after a resume; the files that this rank then sees."""
    go_to(places)
    trainer = jobs.flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("exported")
    return sorted(os.listdir("exported")) if os.path.isdir("exported") else []


def draw_after_resume(places: list[str], resume: str | None = None, **settings: Any) -> list[float]:
    """Train; two random numbers afterwards, which depend on where the generators began."""
    import paddle

    go_to(places)
    trainer = jobs.flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    drawn: list[float] = paddle.rand([2]).tolist()
    return drawn

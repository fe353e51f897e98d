"""Stop a run whose training loop bypasses this package.

Two changes can bypass the replaced methods of a Trainer: a subclass that overrides one without ``super()``, or a
PaddleFormers that calls another method. The run would then save in PaddleFormers' own format, or continue without the
weights of the checkpoint that it resumes. Each replaced method therefore records its call
(:attr:`.job_state.JobState.ran`, :attr:`.job_state.JobState.saved`). The records are checked at the start of training,
in every save and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.trainer.job_state import channel_of, job_state_of
from paddleformers_fc.trainer.library import LOAD_METHOD, TrainerCallback
from paddleformers_fc.trainer.library_models import PREFIX_CHECKPOINT_DIR


def refuse_other_loop(trainer: Any) -> None:
    """Refuse to train or save if the loop or the requested load is not the replaced method.

    Args:
        trainer: a Trainer that trains, or that saves without having trained.

    Raises:
        EnvironmentMismatch: with the methods that did not run.
    """
    job_state = job_state_of(trainer)
    expected = ("train", LOAD_METHOD, "_inner_training_loop")
    skipped = [name for name in expected if name not in job_state.ran]
    if job_state.chosen is None and LOAD_METHOD in skipped:
        skipped.remove(LOAD_METHOD)
    _refuse(trainer, "the start of training", skipped)


class BypassCheck(TrainerCallback):
    """Compares what the training loop has reached with the replaced methods that ran.

    Args:
        trainer: the Trainer whose callback it is.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop before the first step if the loop or the load was not ours.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        run_on_all(channel_of(args), "starting to train", lambda: refuse_other_loop(self._trainer))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the first save that was not ours.

        Raises:
            EnvironmentMismatch: the same on every rank.
        """
        if state is not self._trainer.state:
            return  # After a save beside training the event has the state of its step, also on a rank that ends alone.
        directory = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        skipped = [] if job_state_of(self._trainer).saved == directory else ["_save_checkpoint"]
        run_on_all(
            channel_of(args), f"looking at {directory.name}", lambda: _refuse(self._trainer, str(directory), skipped)
        )


def _refuse(trainer: Any, where: str, skipped: Sequence[str]) -> None:
    if not skipped:
        return
    raise EnvironmentMismatch(
        "flex_checkpoint is true, and the training loop did not go through this package.",
        where=where,
        evidence=[
            f"{name} of paddleformers_fc did not run; the Trainer's own is {_definition(trainer, name)}"
            for name in skipped
        ],
        next_step="Let the methods that a Trainer class overrides call super(). Delete checkpoints that such a run has "
        "written: they are in another format.",
    )


def _definition(trainer: Any, name: str) -> str:
    """Return the class that defines a method of the Trainer."""
    owner = next((one for one in type(trainer).__mro__ if name in vars(one)), type(trainer))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"

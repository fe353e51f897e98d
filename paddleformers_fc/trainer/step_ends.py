"""The end of every step of a Trainer, at which its loop does what background threads have agreed on."""

from __future__ import annotations

from typing import Any

from paddleformers_fc.distributed.step_gate import StepGate
from paddleformers_fc.trainer.library import TrainerCallback


class StepEnds(TrainerCallback):
    """Reports the steps of a loop to a gate.

    Args:
        gate: shared with the background threads of the Trainer.
    """

    def __init__(self, gate: StepGate) -> None:
        self.gate = gate

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin at the step of the checkpoint that is resumed."""
        self.gate.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Run what is agreed for this step."""
        self.gate.step_ended(state.global_step)

"""The batch sizes of a run, and settings that keep its samples per step on another number of data-parallel ranks.

A resumed run trains as before only if its steps have the same number of samples. They are the product of the batch
size per device, the number of accumulated passes and the number of data-parallel ranks, which a layout changes.

Time: linear in the saved batch size per device. Memory: constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

MICRO_BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
"""PaddleFormers' training arguments."""

_MOST_TRIED = 1 << 16
"""Largest batch per device that is looked for."""

_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run.

    Args:
        micro_batch: samples per rank and forward pass.
        accumulation: forward passes per optimizer step.
        ranks: number of data-parallel ranks, which read different samples.
    """

    micro_batch: _Size
    accumulation: _Size
    ranks: _Size

    @property
    def per_pass(self) -> int:
        """Samples of one forward pass on all ranks."""
        return self.micro_batch * self.ranks

    @property
    def per_step(self) -> int:
        """Samples of one optimizer step: the global batch."""
        return self.per_pass * self.accumulation


class StepSamples(msgspec.Struct, frozen=True):
    """The samples of an optimizer step under two layouts.

    Attributes:
        saved: samples per step of the run that saved.
        planned: samples per step under the new layout, with the saved training arguments.
        keep: the training arguments that keep the saved number; empty if it is kept, or no arguments keep it.
    """

    saved: int
    planned: int
    keep: dict[str, int]


def step_samples(saved: BatchSizes, ranks: int) -> StepSamples:
    """Compare the samples per step of a run with those on another number of data-parallel ranks.

    Args:
        saved: the batch sizes of the run.
        ranks: the new number of data-parallel ranks.
    """
    planned = saved.micro_batch * saved.accumulation * ranks
    if planned == saved.per_step or saved.per_step % ranks:
        return StepSamples(saved.per_step, planned, {})
    own = saved.per_step // ranks
    # A larger batch per device might not fit into memory.
    largest = min(saved.micro_batch, own, _MOST_TRIED)
    micro_batch = next(size for size in range(largest, 0, -1) if own % size == 0)
    if own // micro_batch >= 1 << 31:  # No run accumulates so many passes.
        return StepSamples(saved.per_step, planned, {})
    keep = {MICRO_BATCH: micro_batch, ACCUMULATION: own // micro_batch}
    return StepSamples(saved.per_step, planned, keep)

"""Which samples are trained: jobs of the fork server."""

from __future__ import annotations

from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer


def known_samples() -> dict[tuple[int, ...], int]:
    """The tokens of every sample, and its index; of samples that are equal, the last one's."""
    samples = tiny.Samples()
    return {tuple(samples[index]["input_ids"].tolist()): index for index in range(len(samples))}


def every_sample(count: int = tiny.SAMPLES) -> list[int]:
    """What an epoch over the first samples trains, sorted."""
    known, samples = known_samples(), tiny.Samples()
    return sorted(known[tuple(samples[index]["input_ids"].tolist())] for index in range(count))


def watch_samples(trained: list[int]) -> Any:
    """Return a callback that appends the index of every sample that this rank trains."""
    from paddleformers.trainer import TrainerCallback

    known = known_samples()

    class WatchSamples(TrainerCallback):
        def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **_: Any) -> None:
            if state.global_step < state.max_steps:
                trained.extend(known[tuple(row)] for row in inputs["input_ids"].tolist())

    return WatchSamples()


def run_and_watch_samples(resume: str | None = None, count: int = tiny.SAMPLES, **settings: Any) -> list[int]:
    """Train; the indices of the samples that this rank trained, in order.

    Args:
        count: only so many samples are the data.
    """
    trained: list[int] = []

    class Fewer(tiny.Samples):
        def __len__(self) -> int:
            return count

    trainer = flex_trainer(**settings, callbacks=[watch_samples(trained)], train_dataset=Fewer())
    if not trainer.args.should_load_dataset:
        trainer.train_dataset = None
    trainer.train(resume_from_checkpoint=resume)
    return trained

"""Which samples are trained: jobs of the fork server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer


def run_with_one_reader(
    layout: Mapping[str, Any], output_dir: str, arguments: Mapping[str, Any], resume: str | None = None
) -> list[float]:
    """Train on data that one rank reads and hands to those that see the same samples; the losses."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "distributed_dataloader": True, **arguments}
    args = tiny.training_arguments(layout, output_dir, **settings)
    data = tiny.Samples() if args.should_load_dataset else None
    trainer = tiny.trainer(tiny.build("llama", layout, args), args, cls=FlexTrainer, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.losses)


def known_samples() -> dict[tuple[int, ...], int]:
    """The tokens of every sample, and its index; of samples that are equal, the last one's."""
    samples = tiny.Samples()
    return {tuple(samples[index]["input_ids"].tolist()): index for index in range(len(samples))}


def every_sample(count: int = tiny.SAMPLES) -> list[int]:
    """What an epoch over the first samples trains, sorted."""
    known, samples = known_samples(), tiny.Samples()
    return sorted(known[tuple(samples[index]["input_ids"].tolist())] for index in range(count))


def run_and_watch_samples(resume: str | None = None, count: int = tiny.SAMPLES, **settings: Any) -> list[int]:
    """Train; the indices of the samples that this rank trained, in order.

    Args:
        count: only so many samples are the data.
    """
    from paddleformers.trainer import TrainerCallback

    known = known_samples()
    trained: list[int] = []

    class WatchSamples(TrainerCallback):
        def on_load_data_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **_: Any) -> None:
            if state.global_step < state.max_steps:
                trained.extend(known[tuple(row)] for row in inputs["input_ids"].tolist())

    class Fewer(tiny.Samples):
        def __len__(self) -> int:
            return count

    trainer = flex_trainer(**settings, callbacks=[WatchSamples()], train_dataset=Fewer())
    if not trainer.args.should_load_dataset:
        trainer.train_dataset = None
    trainer.train(resume_from_checkpoint=resume)
    return trained

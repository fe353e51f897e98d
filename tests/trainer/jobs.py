"""What ranks do in the tests of several files of this room."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness import tiny


def flex_trainer(
    layout: tiny.MatrixLayout | Mapping[str, Any],
    output_dir: str | Path,
    arguments: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    model: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over the tiny model and data; ``arguments`` and ``trainer`` override what is set here."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, str(output_dir), **settings)
    return tiny.trainer(tiny.build(model_type, layout, args, **(model or {})), args, **{"cls": FlexTrainer, **trainer})


def trained(*settings: Any, resume: Any = None, **others: Any) -> Any:
    """A :func:`flex_trainer` that has trained, from the checkpoint ``resume`` or from the beginning."""
    trainer = flex_trainer(*settings, **others)
    trainer.train(resume_from_checkpoint=resume if resume is None or isinstance(resume, bool) else str(resume))
    return trainer


def callback(**events: Callable[..., object]) -> Any:
    """A ``FlexCheckpointCallback`` that calls a function at each of these events, with the event's arguments."""
    from paddleformers_fc import FlexCheckpointCallback

    def method(act: Callable[..., object]) -> Callable[..., None]:
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            act(*args, **kwargs)

        return call

    return type("Calls", (FlexCheckpointCallback,), {name: method(act) for name, act in events.items()})()


def run(resume: str | bool | None = None, segment: int | None = None, **settings: Any) -> dict[str, Any]:
    """Train and save; the losses, and the Trainer's state afterwards.

    Args:
        segment: stage 3 slices parameters of more elements; by default ``tiny.SEGMENT``.
    """
    trainer = flex_trainer(**settings)
    if segment is not None:
        from paddleformers_fc.cpu_runtime import sharding

        sharding.slice_above(segment)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def train_and_resume(output_dir: Path | str, steps: Sequence[int], **settings: Any) -> list[dict[str, Any]]:
    """Train in ``whole``, and in this process again from its checkpoint of each step; the outcomes of all trainings."""
    resumed = {f"from-{step}": f"{output_dir}/whole/checkpoint-{step}" for step in steps}
    places: dict[str, str | None] = {"whole": None, **resumed}
    return [
        outcome(trained(output_dir=f"{output_dir}/{name}", resume=source, **settings))
        for name, source in places.items()
    ]


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Context manager that yields a list of the lines which this rank logs in it."""
    from paddleformers_fc.trainer.library import logger

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, target = Lines(), getattr(logger, "logger", logger)
    target.addHandler(handler)
    try:
        yield lines
    finally:
        target.removeHandler(handler)


def outcome(trainer: Any) -> dict[str, Any]:
    """Return the facts about a finished training that tests compare."""
    state = trainer.state
    return {
        "losses": trainer.losses,
        "step": state.global_step,
        "epoch": state.epoch,
        "consumed": state.consumed_samples,
        "epochs": state.num_train_epochs,
        "scheduler": {key: value for key, value in trainer.lr_scheduler.state_dict().items() if key != "verbose"},
    }


def run_with_scaler(initial: float, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, with a loss scaler, which doubles its scale after every second step; its state afterwards.

    Float16 is not trained on a CPU, where Paddle also switches scalers off; the scaling is the same for float32.
    """
    from unittest import mock

    import paddle

    trainer = flex_trainer(**settings)
    with mock.patch("paddle.amp.grad_scaler.in_dynamic_mode", return_value=False):
        trainer.scaler = paddle.amp.GradScaler(init_loss_scaling=initial, incr_every_n_steps=2)
    trainer.do_grad_scaling = True
    trainer.train(resume_from_checkpoint=resume)
    state = {name: float(value) for name, value in trainer.scaler.state_dict().items()}
    return {"losses": trainer.losses, "scaler": state}


def frozen_trainer(frozen: Sequence[str], **settings: Any) -> Any:
    """As :func:`flex_trainer`, with parameters that are not trained, by name."""
    trainer = flex_trainer(**settings)
    held = {one.local_tensor.name for name, one in trainer.model.sharded_state_dict().items() if name in frozen}
    for parameter in trainer.model.parameters():
        parameter.stop_gradient = parameter.name in held
    return trainer


def run_with_frozen(frozen: list[str], resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, with parameters that are not trained, by name."""
    trainer = frozen_trainer(frozen, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def run_past_a_layer(resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, with a layer whose outcome is not used, so that its parameters have no gradient."""
    trainer = flex_trainer(**settings)
    layer = trainer.model.model.layers[2]
    forward = layer.forward

    def pass_by(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = forward(hidden, *args, **kwargs)
        return (hidden, *outcome[1:]) if isinstance(outcome, tuple) else hidden

    layer.forward = pass_by
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def resume_and_save_again(resume: str, **settings: Any) -> None:
    """Load a checkpoint and, without a step of training, save it under this layout."""
    trainer = trained(resume=resume, **settings)
    trainer._save_checkpoint(trainer.model)


@contextlib.contextmanager
def failing(layer: Any, at: Callable[[], bool] = lambda: True, backward: bool = False) -> Iterator[None]:
    """Let a layer of a live model fail in its forward pass, or in the backward pass, when it is time."""
    forward = layer.forward

    def fail(*_: Any) -> None:
        if at():
            raise ZeroDivisionError

    def forward_and_fail(*args: Any, **kwargs: Any) -> Any:
        if not backward:
            fail()
        outcome = forward(*args, **kwargs)
        if backward:
            outcome.register_hook(fail)
        return outcome

    layer.forward = forward_and_fail
    try:
        yield
    finally:
        layer.forward = forward


def refused(resume: str | bool, **settings: Any) -> dict[str, Any]:
    """Try to resume; the error, and whether a weight has changed."""
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(**settings)
    before = weights_of(trainer.model)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        return {"error": type(error).__name__, "text": error.render(), "changed": weights_of(trainer.model) != before}
    return {"error": None}


def weights_of(model: Any) -> dict[str, str]:
    """The bytes of every tensor of a model, as hex."""
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in model.state_dict().items()}


def few_samples() -> list[dict[str, Any]]:
    """The first samples, for evaluations of one batch."""
    return [tiny.Samples()[index] for index in range(tiny.GLOBAL_BATCH)]


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


TO_BEST = {
    "save_steps": 1,
    "save_total_limit": 1,
    "evaluation_strategy": "steps",
    "eval_steps": 1,
    "do_eval": True,
    "load_best_model_at_end": True,
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
}
"""A learning rate that makes the model worse, so that its first checkpoint is the best."""

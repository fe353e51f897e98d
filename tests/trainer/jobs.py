"""What ranks do in the tests of this room; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny


def flex_trainer(
    layout: Mapping[str, Any],
    output_dir: str,
    arguments: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    model: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over the tiny model and data; ``arguments`` and ``trainer`` override what is set here."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, output_dir, **settings)
    return tiny.trainer(tiny.build(model_type, layout, args, **(model or {})), args, **{"cls": FlexTrainer, **trainer})


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


def refused_training(**settings: Any) -> dict[str, Any]:
    """Train; the error, and the step at which it was raised."""
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(**settings)
    try:
        trainer.train()
    except FlexError as error:
        return {"error": error.render(), "step": trainer.state.global_step}
    return {"error": "", "step": trainer.state.global_step}


def run_at_home(home: str, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, by a user with this home directory."""
    import os

    os.environ["HOME"] = home  # This process ends with the job.
    return run(**settings)


def run_and_count_states(resume: str | None = None, **settings: Any) -> int:
    """Train or only load; how many elements of optimizer states this rank then has."""
    trainer = flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    tensors = [
        one for key, one in trainer.optimizer.state_dict().items() if key not in ("LR_Scheduler", "master_weights")
    ]
    return int(sum(tensor.numel().item() for tensor in tensors))


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


def run_with_frozen(frozen: list[str], resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, with parameters that are not trained, by name; an error instead if there is one."""
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(**settings)
    held = {one.local_tensor.name for name, one in trainer.model.sharded_state_dict().items() if name in frozen}
    for parameter in trainer.model.parameters():
        parameter.stop_gradient = parameter.name in held
    try:
        trainer.train(resume_from_checkpoint=resume)
    except FlexError as error:
        return {"error": error.render()}
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


def run_without_strided_kernels(resume: str | None = None, **settings: Any) -> dict[str, float]:
    """Train or only load while a slice of a tensor is a copy; the sum of each state that the optimizer then holds."""
    import paddle

    paddle.set_flags({"FLAGS_use_stride_kernel": 0})
    trainer = flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    held = trainer.optimizer.state_dict()
    masters = held.pop("master_weights", {})
    return {
        name: float(one.astype("float64").sum()) for name, one in {**held, **masters}.items() if name != "LR_Scheduler"
    }


def resume_and_save_again(resume: str, **settings: Any) -> None:
    """Load a checkpoint and, without a step of training, save it under this layout."""
    trainer = flex_trainer(**settings)
    trainer.train(resume_from_checkpoint=resume)
    trainer._save_checkpoint(trainer.model)


def break_off_and_resume(at: int, **settings: Any) -> dict[str, Any]:
    """Train, break off within the step after ``at``, and resume in the same Trainer; what :func:`run` returns."""
    from paddleformers.trainer import TrainerCallback

    class BreakOff(TrainerCallback):
        broken = False

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == at and not self.broken:
                self.broken = True
                raise KeyError("broken off")

    trainer = flex_trainer(**settings, callbacks=[BreakOff()])
    with contextlib.suppress(KeyError):
        trainer.train()
    trainer.losses.clear()
    trainer.train(resume_from_checkpoint=True)
    return outcome(trainer)


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


def undefined_until_loaded(output_dir: str, damaged: str, whole: str) -> dict[str, Any]:
    """Resume a checkpoint whose damage is found while tensors are filled, then try to train and to save; the errors.

    Afterwards a whole checkpoint is resumed by the same Trainer.
    """
    import paddleformers_fc
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, {"max_steps": 3, "save_steps": 100})
    attempts = {
        "resumed": lambda: trainer.train(resume_from_checkpoint=damaged),
        "trained": trainer.train,
        "saved": lambda: paddleformers_fc.save(f"{output_dir}/saved", trainer.model),
        "saved by the Trainer": lambda: trainer._save_checkpoint(trainer.model),
    }
    errors = {}
    for what, attempt in attempts.items():
        try:
            attempt()
        except FlexError as error:
            errors[what] = f"{type(error).__name__}: {error.what}"
    before = len(trainer.losses)
    trainer.train(resume_from_checkpoint=whole)
    return {"errors": errors, "trained before": before, "losses": trainer.losses[before:]}


def weights_of(model: Any) -> dict[str, str]:
    """The bytes of every tensor of a model, as hex."""
    return {name: tensor.astype("float32").numpy().tobytes().hex() for name, tensor in model.state_dict().items()}


def refused_arguments(output_dir: str, arguments: Mapping[str, Any]) -> str:
    """Make training arguments; the error."""
    from paddleformers_fc.errors import OptionError

    try:
        flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments)
    except OptionError as error:
        return error.render()
    return ""


def rotate(output_dir: str) -> list[str]:
    """Let a Trainer rotate the checkpoints that it finds; the names that are left."""
    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, {"save_total_limit": 1})
    trainer._rotate_checkpoints(output_dir=output_dir)
    return sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))


def refused_optimizer(output_dir: str, kind: str, options: Mapping[str, Any], made: str) -> dict[str, Any]:
    """Train with one of Paddle's optimizers; the error, and whether a step was made.

    Args:
        made: by the ``script``, before its Trainer, or by the ``trainer``, once it trains.
    """
    import paddle
    from paddleformers.utils import optimizer as of_paddleformers

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.errors import FlexError

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            self.optimizer = optimizer_of(self.model)

    def optimizer_of(model: Any) -> Any:
        chosen = getattr(paddle.optimizer, kind, None) or getattr(of_paddleformers, kind)
        return chosen(parameters=model.parameters(), learning_rate=0.01, **options)

    given = {"flex_checkpoint": True, "max_steps": 2, "save_steps": 2}
    losses: list[float] = []
    try:
        if made == "trainer":
            trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, given, cls=Trainer)
            losses = trainer.losses
            trainer.train()
        else:
            from paddleformers_fc import FlexTrainingArguments

            args = tiny.training_arguments(tiny.SINGLE, output_dir, cls=FlexTrainingArguments, **given)
            model = tiny.build("llama", tiny.SINGLE, args)
            trainer = tiny.trainer(model, args, cls=FlexTrainer, optimizers=(optimizer_of(model), None))
    except FlexError as error:
        return {"error": type(error).__name__, "text": error.render(), "steps": len(losses)}
    return {"error": None}


def train_weights_alone_by_sgd(output_dir: str) -> None:
    """Train and save with an optimizer whose states cannot be saved, and none of which is asked for."""
    import paddle

    from paddleformers_fc import FlexTrainer

    class Trainer(FlexTrainer):
        def create_optimizer(self, lr_scheduler: Any = None) -> Any:
            self.optimizer = paddle.optimizer.SGD(parameters=self.model.parameters(), learning_rate=0.01)

    given = {"max_steps": 2, "save_steps": 2, "ignore_save_lr_and_optim": True}
    flex_trainer(tiny.SINGLE.to_json(), output_dir, given, cls=Trainer).train()


def field_names() -> list[list[str]]:
    """Every option of a script's arguments, and of the command line's."""
    import dataclasses

    from paddleformers_fc import FlexTrainingArguments
    from paddleformers_fc.trainer.cli_arguments import FlexFinetuningArguments

    return [
        sorted(one.name for one in dataclasses.fields(kind))
        for kind in (FlexTrainingArguments, FlexFinetuningArguments)
    ]


# ---- No pickle.


@contextlib.contextmanager
def without_pickle() -> Iterator[None]:
    """Make every use of pickle fail."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("pickle was used")

    names = ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")
    saved = {name: getattr(pickle, name) for name in names}
    for name in names:
        setattr(pickle, name, fail)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(pickle, name, value)


def run_without_pickle(resume: str | None = None, **settings: Any) -> int:
    """Train, save, resume and export while pickle cannot be used."""
    trainer = flex_trainer(**settings)
    with without_pickle():
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(Path(settings["output_dir"]) / "exported"))
    return int(trainer.state.global_step)


# ---- Callback, best model.


def reports(output_dir: str, resume: str, **arguments: Any) -> list[list[Any]]:
    """Resume, save once, and return the reports that a callback got, with their phases."""
    from paddleformers_fc import FlexCheckpointCallback

    reported: list[list[Any]] = []

    class Remember(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            reported.append(["saved", report.step, report.directory.name, report.bytes > 0, *phases(report)])

        def on_checkpoint_loaded(self, args: Any, report: Any) -> None:
            reported.append(["loaded", report.step, report.directory.name, report.bytes > 0, *phases(report)])

    def phases(report: Any) -> list[Any]:
        seconds = report.phases.seconds
        assert min(seconds.values()) >= 0
        assert sum(seconds.values()) <= report.seconds
        return [*seconds]

    arguments = {"max_steps": 4, "save_steps": 4, **arguments}
    flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, callbacks=[Remember()]).train(resume)
    return reported


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


def go_on_to_best(output_dir: str, steps: int, resume: str | None = None, undefined: int = 0) -> dict[str, Any]:
    """Train beyond the best checkpoint, up to a step; what is best, and what the model is at the end.

    Args:
        undefined: the step at which the metric is NaN.
    """
    from paddleformers_fc import FlexTrainer

    class Trainer(FlexTrainer):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            metrics = super().evaluate(*args, **kwargs)
            return {**metrics, "eval_loss": math.nan} if self.state.global_step == undefined else metrics

    arguments = {**TO_BEST, "max_steps": steps}
    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, cls=Trainer, eval_dataset=tiny.Samples())
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    return {
        "best": state.best_metric,
        "checkpoint": state.best_model_checkpoint,
        "at_end": trainer.evaluate()["eval_loss"],
    }


def refused_metric(output_dir: str, metric: str) -> str:
    """Train with a metric that chooses the best checkpoint; the error."""
    from paddleformers_fc.errors import OptionError

    arguments = {
        "max_steps": 1,
        "save_steps": 1,
        "evaluation_strategy": "steps",
        "eval_steps": 1,
        "do_eval": True,
        "metric_for_best_model": metric,
    }
    try:
        flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, eval_dataset=tiny.Samples()).train()
    except OptionError as error:
        return error.render()
    return ""


# ---- Random generators, waiting.


def random_states() -> dict[str, Any]:
    """Draw, capture, draw, restore, draw again."""
    import random

    import numpy as np
    import paddle
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    from paddleformers_fc.errors import FormatError
    from paddleformers_fc.trainer import rng

    get_rng_state_tracker().add("model_parallel_rng", 11)

    def draw() -> list[Any]:
        with get_rng_state_tracker().rng_state("model_parallel_rng"):
            tracked = paddle.rand([2]).tolist()
        plain = [random.random(), random.gauss(0, 1), np.random.randn(2).tolist(), paddle.rand([2]).tolist()]
        return [*plain, paddle.randperm(9).tolist(), tracked]

    draw()
    captured = rng.capture(world_size=2, hybrid=True)()
    first, second = draw(), draw()
    restored = rng.restore(captured, "rng", world_size=2, hybrid=True, tensor_parallel=True)
    again = draw()
    elsewhere = rng.restore(captured, "rng", world_size=1, hybrid=True, tensor_parallel=True)
    try:
        rng.restore(b'{"world_size": 2}', "trainer/rng-00000.json", 2, hybrid=True, tensor_parallel=True)
        damaged = ""
    except FormatError as error:
        damaged = error.where
    return {
        "damaged": damaged,
        "same": first == again,
        "moved": first != second,
        "restored": restored,
        "elsewhere": elsewhere,
        "untouched": draw() == second,
    }


def left_alone(output_dir: str) -> str:
    """Rank 0 wants to exchange something and rank 1 does not; returns the error of rank 0."""
    from paddleformers_fc.errors import PeerError
    from paddleformers_fc.trainer.session import channel_of
    from tests.trainer.lost_jobs import keep_time

    trainer = flex_trainer(tiny.DP2.to_json(), output_dir, {"flex_timeout": 100})
    channel = channel_of(trainer.args)
    if channel.rank:
        return ""
    keep_time(Path(output_dir), ranks=1)  # The other one lives until this one ends, and never waits.
    try:
        return str(channel.gather("a test", b""))
    except PeerError as error:
        return str(error)


def on_terminal(output_dir: str, resume: str, **settings: Any) -> dict[str, Any]:
    """Train, save, and resume with a terminal as the error stream.

    Returns:
        What the terminal got, and the expected and done bytes of every operation that it displayed.
    """
    import os
    import pty
    import threading

    from paddleformers_fc import progress_display

    meters: list[Any] = []

    class Kept(progress_display.Meter):
        def __init__(self) -> None:
            super().__init__()
            meters.append(self)

    keyboard, screen = pty.openpty()
    got: list[bytes] = []

    def read() -> None:
        while chunk := os.read(keyboard, 1 << 16):
            got.append(chunk)
            if chunk.endswith(b"\x04"):
                return

    reader = threading.Thread(target=read)
    reader.start()
    before, made = sys.stderr, progress_display.Meter
    os.environ["TERM"] = "xterm"
    sys.stderr, progress_display.Meter = os.fdopen(screen, "w"), Kept  # type: ignore[misc]
    try:
        run(output_dir=output_dir, **settings)
        run(output_dir=f"{output_dir}-2", resume=resume, **settings)
    finally:
        sys.stderr.write("\x04")
        sys.stderr.flush()
        sys.stderr, progress_display.Meter = before, made  # type: ignore[misc]
        reader.join()
    return {"text": b"".join(got).decode(), "bytes": [(one.expected, one.done) for one in meters]}


def list_exchanges(resume: str | bool | None = None, **settings: Any) -> list[str]:
    """Resume, and return what the ranks exchange from the beginning of the training to the end of the load."""
    from paddleformers_fc.distributed.communicator import Communicator
    from paddleformers_fc.trainer.callback import FlexCheckpointCallback

    doing: list[str] = []
    loaded: list[list[str]] = []
    gather = Communicator.gather

    def noting(self: Any, what: str, *args: Any, **kwargs: Any) -> Any:
        doing.append(what)
        return gather(self, what, *args, **kwargs)

    class NoteLoaded(FlexCheckpointCallback):
        def on_checkpoint_loaded(self, *_: Any) -> None:
            loaded.append([*doing])

    trainer = flex_trainer(**settings, callbacks=[NoteLoaded()])
    Communicator.gather = noting  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume)
    return loaded[0]

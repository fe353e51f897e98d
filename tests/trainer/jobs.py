"""What ranks do in the tests of this room; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
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
    """Train and save; the losses, and what the Trainer's state says afterwards.

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
    """What a test asks of a finished training."""
    state = trainer.state
    return {
        "losses": trainer.losses,
        "step": state.global_step,
        "epoch": state.epoch,
        "consumed": state.consumed_samples,
        "epochs": state.num_train_epochs,
        "scheduler": {key: value for key, value in trainer.lr_scheduler.state_dict().items() if key != "verbose"},
    }


def run_with_reference(every: int, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, with a reference model that PaddleFormers' preference training updates.

    Args:
        every: forward passes between two updates.

    Returns:
        the passes that PaddleFormers has counted, and the tensors of both models at the end.
    """
    from types import SimpleNamespace

    from paddleformers.cli.train.dpo.dpo_trainer import DPOTrainer
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexTrainer

    class WithReference(FlexTrainer):
        train_step_count = 0
        dpo_config = SimpleNamespace(ref_model_update_steps=every, reference_free=False)
        ref_model = ref_model_wrapped = None

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            return DPOTrainer.compute_loss(self, model, inputs)

        def get_batch_metrics(self, ref_model: Any, model: Any, batch: Any, train_eval: str = "train") -> Any:
            return Trainer.compute_loss(self, model, batch)

    trainer = flex_trainer(**settings, cls=WithReference)
    trainer.ref_model = tiny.build("llama", settings["layout"], trainer.args)
    trainer.ref_model.set_state_dict(trainer.model.state_dict())
    trainer.train(resume_from_checkpoint=resume)
    found = {"passes": trainer.train_step_count, "reference": weights_of(trainer.ref_model)}
    return {**found, "trained": weights_of(trainer.model)}


def refused_training(**settings: Any) -> dict[str, Any]:
    """Train; the error, and the step at which it was raised."""
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(**settings)
    try:
        trainer.train()
    except FlexError as error:
        return {"error": error.render(), "step": trainer.state.global_step}
    return {"error": "", "step": trainer.state.global_step}


def snapshot_sizes(**settings: Any) -> dict[str, int]:
    """Train and save beside it; the memory of the snapshots, and its bound before training."""
    from paddleformers_fc.trainer.job_state import job_state_of
    from paddleformers_fc.trainer.optimizers import descriptor_of
    from paddleformers_fc.trainer.snapshot_size import least_snapshot_bytes

    trainer = flex_trainer(**settings)
    trainer.train()
    saver: Any = job_state_of(trainer).saver
    least = least_snapshot_bytes(trainer, descriptor_of(trainer.optimizer))
    return {"least": least, "kept": saver._slots[0].arena.capacity}


def run_at_home(home: str, **settings: Any) -> dict[str, Any]:
    """As :func:`run`, by a user with this home directory."""
    import os

    os.environ["HOME"] = home  # This process ends with the job.
    return run(**settings)


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


def run_on_stream(output_dir: str, arguments: Mapping[str, Any], resume: str | None = None) -> dict[str, Any]:
    """Train on the samples as a stream, which has no indices and no length; what :func:`run` returns."""
    from paddle.io import IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            samples = tiny.Samples()
            return (samples[index] for index in range(len(samples)))

    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, train_dataset=Stream())
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


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


def refused_model(output_dir: str, model_type: str) -> str:
    """Make a Trainer for a model that calls itself something else; the error."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.errors import FlexError

    args = tiny.training_arguments(tiny.SINGLE, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True)
    model = tiny.build("llama", tiny.SINGLE, args)
    type(model.config).model_type = model_type  # This process ends with the job.
    try:
        tiny.trainer(model, args, cls=FlexTrainer)
    except FlexError as error:
        return error.render()
    return ""


def rotate(output_dir: str, level: str) -> list[str]:
    """Let a Trainer rotate the checkpoints that it finds; the names that are left."""
    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, {"flex_verify": level, "save_total_limit": 1})
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


# ---- Which samples are trained.


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


def run_and_draw(resume: str | None = None, **settings: Any) -> list[list[float]]:
    """Train, with a random number drawn in every pass, as dropout would; the numbers by epoch."""
    import random

    from paddleformers.trainer import TrainerCallback

    drawn: list[list[float]] = []

    class Draw(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            drawn.append([])

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            drawn[-1].append(random.random())

    flex_trainer(**settings, callbacks=[Draw()]).train(resume_from_checkpoint=resume)
    return drawn


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


# ---- The stock Trainer.


def _methods() -> dict[str, int]:
    from paddle.nn import Layer
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
    from paddleformers.transformers import PretrainedModel

    owners = (Trainer, PdArgumentParser, TrainingArguments, PretrainedModel, Layer)
    return {f"{owner.__name__}.{name}": id(value) for owner in owners for name, value in vars(owner).items()}


def replaced_methods() -> dict[str, list[str]]:
    """Which methods of PaddleFormers are others after importing, installing and uninstalling."""
    before = _methods()

    def changed() -> list[str]:
        return sorted(name for name, value in _methods().items() if before.get(name) != value)

    from paddleformers_fc.trainer import install

    found = {"imported": changed()}
    install.install()
    install.install()
    found["installed"] = changed()
    install.uninstall()
    found["uninstalled"] = changed()
    return found


def run_native(way: str, output_dir: str, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Train without ``flex_checkpoint``: with the stock Trainer alone, through our subclass, or installed."""
    from paddleformers.trainer import Trainer, TrainingArguments

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, install

    if way == "installed":
        install()
    classes = {
        "stock": (TrainingArguments, Trainer),
        "installed": (FlexTrainingArguments, Trainer),
        "subclass": (FlexTrainingArguments, FlexTrainer),
    }
    arguments, cls = classes[way]
    args = tiny.training_arguments(layout, output_dir, cls=arguments, max_steps=4, save_steps=1, save_total_limit=2)
    trainer = tiny.trainer(tiny.build("llama", layout, args), args, cls=cls)
    trainer.train()
    trainer.save_model(str(Path(output_dir) / "final"))
    files = sorted(path.relative_to(output_dir).as_posix() for path in Path(output_dir).rglob("*") if path.is_file())
    return {"losses": trainer.losses, "files": [name for name in files if not name.startswith("runs/")]}


def run_installed(resume: str | bool | None = None, **settings: Any) -> dict[str, Any]:
    """Train with the stock Trainer class after ``install()``."""
    from paddleformers.trainer import Trainer

    from paddleformers_fc import install

    install()
    return run(resume, **settings, cls=Trainer)


def parse_after_registration(path: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parse as the command line does: the parser is made, the registration file is run by its path, then the YAML."""
    from paddleformers.cli.hparams import FinetuningArguments
    from paddleformers.trainer import PdArgumentParser

    parser = PdArgumentParser([FinetuningArguments])
    spec = importlib.util.spec_from_file_location("custom_template", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    parsed, unknown = parser.parse_dict(dict(values), return_unknown_ars=True)
    from_argv, *_ = PdArgumentParser([FinetuningArguments]).parse_args_into_dataclasses(
        ["--output_dir", values["output_dir"], "--compute_type", "float32", "--amp_master_grad", "false"]
        + ["--device", "cpu", "--flex_checkpoint", "true", "--flex_threads", "3"]
    )
    return {
        "unknown": sorted(unknown),
        "is_finetuning": isinstance(parsed, FinetuningArguments),
        "flex_checkpoint": parsed.flex_checkpoint,
        "flex_threads": parsed.flex_threads,
        "from_argv": [from_argv.flex_checkpoint, from_argv.flex_threads],
    }


# ---- Callback, export, best model.


def reports(output_dir: str, resume: str) -> list[list[Any]]:
    """Resume, save once, and return the reports that a callback got."""
    from paddleformers_fc import FlexCheckpointCallback

    reported: list[list[Any]] = []

    class Remember(FlexCheckpointCallback):
        def on_checkpoint_saved(self, args: Any, report: Any) -> None:
            reported.append(["saved", report.step, report.directory.name, report.bytes > 0, report.seconds > 0])

        def on_checkpoint_loaded(self, args: Any, report: Any) -> None:
            reported.append(["loaded", report.step, report.directory.name, report.bytes > 0, report.seconds > 0])

    arguments = {"max_steps": 4, "save_steps": 4}
    flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, callbacks=[Remember()]).train(resume)
    return reported


def stock_trainer_with_our_callback(output_dir: str) -> str:
    """Make a Trainer that does not know ``flex_checkpoint`` although its arguments ask for it; the error."""
    from paddleformers.trainer import Trainer

    from paddleformers_fc import FlexCheckpointCallback, FlexTrainingArguments
    from paddleformers_fc.errors import EnvironmentMismatch
    from paddleformers_fc.trainer.install import uninstall

    args = tiny.training_arguments(tiny.SINGLE, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True)
    uninstall()
    model = tiny.build("llama", tiny.SINGLE, args)
    try:
        tiny.trainer(model, args, cls=Trainer, callbacks=[FlexCheckpointCallback()])
    except EnvironmentMismatch as error:
        return str(error)
    return ""


def export(output_dir: str, layout: Mapping[str, Any], resume: str) -> dict[str, Any]:
    """Export in the three ways that a Trainer has; whether what is reloaded equals the model."""
    from paddleformers.transformers import AutoModelForCausalLM

    trainer = flex_trainer(layout, output_dir, {"max_steps": 3})
    trainer.train(resume_from_checkpoint=resume)
    targets = {name: str(Path(output_dir) / name) for name in ("save_model", "save_pretrained", "in_many_files")}
    trainer.save_model(targets["save_model"], last_fc_to_hf=True)
    trainer.model.save_pretrained(targets["save_pretrained"])
    trainer.model.save_pretrained(targets["in_many_files"], max_shard_size="300kB")
    found: dict[str, Any] = {}
    for name, target in targets.items():
        found[name] = sorted(path.name for path in Path(target).iterdir())
    if layout["nproc"] == 1:
        reloaded = AutoModelForCausalLM.from_pretrained(targets["in_many_files"], convert_from_hf=True)
        found["same"] = weights_of(reloaded) == weights_of(trainer.model)
    return found


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


def go_on_to_best(output_dir: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train beyond the best checkpoint, up to a step; what is best, and what the model is at the end."""
    arguments = {**TO_BEST, "max_steps": steps}
    trainer = flex_trainer(tiny.SINGLE.to_json(), output_dir, arguments, eval_dataset=tiny.Samples())
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
    captured = rng.capture(world_size=2, hybrid=True)
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
    from paddleformers_fc.trainer.job_state import channel_of
    from tests.trainer.lost_jobs import keep_time

    trainer = flex_trainer(tiny.DP2.to_json(), output_dir, {"flex_timeout": 100})
    channel = channel_of(trainer.args)
    if channel.rank:
        return ""
    keep_time(Path(output_dir), ranks=1)  # The other one lives until this one ends, and never waits.
    try:
        return str(channel.all_gather(b""))
    except PeerError as error:
        return str(error)


# ---- The stock command line.


def write_corpus(directory: str, text: str) -> None:
    """A tokenizer trained on a text, a tiny Llama for it, and the text's paragraphs as training data."""
    from paddleformers.transformers import LlamaForCausalLM
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    root = Path(directory)
    passage = Path(text).read_text()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(passage.splitlines(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    wrapped.save_pretrained(str(root / "model"))
    config = tiny.config("llama", vocab_size=384, max_position_embeddings=128, pad_token_id=2)
    LlamaForCausalLM(config).save_pretrained(str(root / "model"))
    paragraphs = [" ".join(part.split()) for part in passage.split("\n\n") if len(part) > 80]
    (root / "train.jsonl").write_text("".join(json.dumps({"text": [part]}) + "\n" for part in paragraphs))


def run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as an interpreter does, in a process that has imported Paddle."""
    import runpy
    import sys

    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def missing_names(names: Sequence[str]) -> dict[str, str]:
    """Evaluate dotted names after ``import paddleformers_fc`` alone; the errors."""
    import paddleformers_fc

    errors = {}
    for name in names:
        try:
            eval(name, {"paddleformers_fc": paddleformers_fc})
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def run_command_line(yaml: str) -> None:
    """What ``paddleformers-cli train`` runs in each of its workers."""
    import sys

    from paddleformers.cli import launcher

    sys.argv = ["launcher.py", "train", yaml]
    launcher.launch()


def refused_key(**keys: Any) -> dict[str, Any]:
    """Parse keys as the stock command line does; the error, and whether a process group was begun before it."""
    from paddle.distributed import parallel
    from paddleformers.cli.hparams import parser
    from paddleformers.trainer import PdArgumentParser

    from paddleformers_fc.errors import OptionError
    from paddleformers_fc.trainer.install import install

    install()
    try:
        PdArgumentParser(parser._TRAIN_ARGS).parse_dict(keys, return_unknown_ars=True)
    except OptionError as error:
        return {"text": error.render(), "begun": parallel.parallel_helper._is_parallel_ctx_initialized()}
    return {}


def start_from_open_weights(
    model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, source: str, target: str
) -> dict[str, list[str]]:
    """Fill a zeroed model from open weights, export it again; what kept its values and what was left over."""
    import paddle

    from paddleformers_fc import load_open_weights
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.export import save_weights
    from paddleformers_fc.trainer import documents, state
    from paddleformers_fc.trainer.description import describe

    args = tiny.training_arguments(layout, output_dir)
    built = tiny.build(model_type, layout, args, **model)
    with paddle.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
    report = load_open_weights(built, source)
    channel = job_channel()
    files = {"config.json": documents.config_text(built).encode()} if channel.rank == 0 else {}
    weights = state.model_roles(built)["model_state"]
    save_weights(weights, describe(built), files, Path(target), 10**9, channel)
    return {"fresh": list(report.fresh), "dropped": list(report.dropped)}


def export_initial(
    model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, target: str
) -> None:
    """Export a tiny model with the weights it begins with."""
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.export import save_weights
    from paddleformers_fc.trainer import documents, state
    from paddleformers_fc.trainer.description import describe

    args = tiny.training_arguments(layout, output_dir)
    built = tiny.build(model_type, layout, args, **model)
    files = {"config.json": documents.config_text(built).encode()}
    weights = state.model_roles(built)["model_state"]
    save_weights(weights, describe(built), files, Path(target), 10**9, job_channel())


# ---- Tied weights.


def run_and_part_copies(
    after: int, layout: Mapping[str, Any], resume: str | bool | None = None, ours: bool = True, **settings: Any
) -> dict[str, Any]:
    """Train a tied Llama over a pipeline; from a step on, the copy of the last stage is another one.

    Args:
        after: the first step behind which the copies differ.
        ours: with this package, or the stock Trainer.

    Returns:
        the losses, the steps that were trained, and this rank's copy as hex; or the error.
    """
    from paddleformers.trainer import TrainerCallback

    tied = {"tie_word_embeddings": True}

    class PartCopies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            import paddle

            head = copies(model).get("lm_head.weight")
            if state.global_step >= after and head is not None:
                with paddle.no_grad():
                    head.set_value(head * 1.5)

    callbacks = [PartCopies()]
    if ours:
        trainer = flex_trainer(layout, model=tied, callbacks=callbacks, **settings)
    else:
        args = tiny.training_arguments(layout, settings["output_dir"], **settings["arguments"])
        trainer = tiny.trainer(tiny.build("llama", layout, args, **tied), args, callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    bits = {name: one.numpy().tobytes().hex() for name, one in copies(trainer.model).items()}
    return {"step": trainer.state.global_step, "losses": trainer.losses, "copies": bits}


def copies(model: Any) -> dict[str, Any]:
    """This rank's copies of a tied embedding."""
    from paddleformers.transformers.model_utils import unwrap_model

    held = unwrap_model(model).state_dict()
    return {name: held[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in held}


def export_of_parted_copies(layout: Mapping[str, Any], output_dir: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Export a live tied model whose copies differ with ``save_model``; the error, if there is one."""
    from paddleformers_fc.errors import FlexError

    trainer = flex_trainer(layout, output_dir, arguments, model={"tie_word_embeddings": True})
    for name, copy in copies(trainer.model).items():
        if name == "lm_head.weight":
            copy.set_value(copy * 1.5)
    try:
        trainer.save_model(f"{output_dir}/export")
    except FlexError as error:
        return {"error": type(error).__name__, "text": error.render()}
    bits = {name: one.numpy().tobytes().hex() for name, one in copies(trainer.model).items()}
    return {"error": None, "copies": bits}


def run_and_export(
    layout: Mapping[str, Any],
    output_dir: str,
    exports: str,
    model_type: str,
    model: Mapping[str, Any],
    steps: int,
    source: str | None = None,
    resume: bool = False,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Train and export in both ways of a live model.

    Args:
        exports: the directory for ``save_model`` and ``save_pretrained``.
        steps: how many; the last one is saved.
        source: open weights to start from.
        resume: whether to resume the newest checkpoint.
        generation: generation settings that a user gives the model before training.
    """
    from paddleformers.generation import GenerationConfig

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, load_open_weights

    settings = {"max_steps": steps, "save_steps": steps, "flex_checkpoint": True, "cls": FlexTrainingArguments}
    micro_batch = 1 if model.get("num_nextn_predict_layers") else None
    args = tiny.training_arguments(layout, output_dir, micro_batch, **settings)
    built = tiny.build(model_type, layout, args, **model)
    if source is not None:
        load_open_weights(built, source)
    if generation is not None:
        built.generation_config = GenerationConfig(**generation)
    trainer = tiny.trainer(built, args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{exports}/save_model")
    trainer.model.save_pretrained(f"{exports}/save_pretrained")


def generation_settings(text: str) -> dict[str, Any]:
    """Generation settings of a model that can generate: as built, from a file, and changed by a user afterwards.

    Returns:
        whether the model can generate, its temperature from the file, and the files of exports before and after.
    """
    from paddleformers.transformers.gpt_oss.configuration import GptOssConfig
    from paddleformers.transformers.gpt_oss.modeling import GptOssForCausalLM

    from paddleformers_fc.trainer import inherited

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, fuse_rms_norm=False))
    inherited.take_over(model, {}, text.encode())
    found: dict[str, Any] = {
        "generates": model.can_generate(),
        "temperature": model.generation_config.temperature,
        "kept": inherited.generation_file(model)[inherited.GENERATION].decode(),
    }
    model.generation_config.temperature = 0.25
    inherited.take_over(model, {}, text.encode())  # As of a checkpoint that is resumed.
    changed = inherited.generation_file(model)[inherited.GENERATION]
    return {**found, "changed": json.loads(changed)["temperature"]}


def square_router(output_dir: str, target: str) -> dict[str, Any]:
    """A Qwen2-MoE of PaddleFormers' own class with as many experts as hidden units: exported, read again, resumed."""
    import numpy as np
    import paddle
    from safetensors.numpy import load_file

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer.pretrained import load_open_weights
    from tests.harness import fleet_stub

    fleet_stub.install()
    from paddleformers.transformers.qwen2_moe.configuration import Qwen2MoeConfig
    from paddleformers.transformers.qwen2_moe.modeling import Qwen2MoeForCausalLMDeprecated

    def made() -> Any:
        settings = {"vocab_size": tiny.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "moe_group": "dummy"}
        config = Qwen2MoeConfig(**settings, **heads, **experts, shared_expert_intermediate_size=12, fuse_rms_norm=False)
        config._attn_implementation, config.use_flash_attention = "sdpa", False
        config.max_sequence_length = config.seq_length = tiny.SEQUENCE
        return Qwen2MoeForCausalLMDeprecated.from_config(config, dtype="float32")

    def logits(model: Any) -> Any:
        model.eval()
        tokens = paddle.to_tensor([[3, 5, 7, 9]])
        found = model(input_ids=tokens)
        return (found if paddle.is_tensor(found) else found[0]).numpy()

    def trainer(model: Any, steps: int) -> Any:
        settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": steps, "save_steps": 2}
        args = tiny.training_arguments(tiny.SINGLE, output_dir, **settings)
        return tiny.trainer(model, args, cls=FlexTrainer)

    first = made()
    saved = trainer(first, 4)
    saved.train()
    saved.save_model(target)
    again, resumed = made(), made()
    load_open_weights(again, target)
    follow = trainer(resumed, 4)
    follow.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-2"))
    name = "model.layers.1.mlp.gate.weight"
    held = dict(first.named_parameters())[name].numpy()
    return {
        "turned": bool(np.array_equal(load_file(f"{target}/model.safetensors")[name], held.T)),
        "difference": float(np.abs(logits(first) - logits(again)).max()),
        "losses": [list(map(float, saved.losses)), list(map(float, follow.losses))],
    }

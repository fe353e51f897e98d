"""Trainings of adapters on the tiny models; each public function is a job of the fork server and returns JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer, outcome, weights_of
from tests.trainer.open_weights_jobs import configured


def trainer_of(
    layout: Mapping[str, Any],
    output_dir: str,
    arguments: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    model: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Any] | None = None,
    base: str | None = None,
    **trainer: Any,
) -> Any:
    """A ``FlexTrainer`` over a tiny model with adapters; ``base`` is a directory of open weights."""
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **(arguments or {})}
    args = tiny.training_arguments(layout, output_dir, **settings)
    plain = tiny.build(model_type, layout, args, **(model or {})) if base is None else from_files(base, layout, args)
    return tiny.trainer(tiny.adapted(plain, **(adapters or {})), args, **{"cls": FlexTrainer, **trainer})


def from_files(base: str, layout: Mapping[str, Any], args: Any) -> Any:
    """A model of open weights, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoModelForCausalLM, AutoModelForCausalLMPipe

    kind = AutoModelForCausalLMPipe if tiny.layout_from(layout).pp > 1 else AutoModelForCausalLM
    return kind.from_pretrained(base, config=configured(layout, args, base), dtype="float32")


def run(resume: str | bool | None = None, **settings: Any) -> dict[str, Any]:
    """Train adapters and save; the losses, and the Trainer's state afterwards."""
    trainer = trainer_of(**settings)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


def run_saving_what_was_loaded(resume: str, **settings: Any) -> list[float]:
    """Resume, save the loaded state before the first step, and train on; the losses."""
    from paddleformers.trainer import TrainerCallback

    class SaveAtOnce(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer._save_checkpoint(trainer.model)

    trainer = trainer_of(**settings, callbacks=[SaveAtOnce()])
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.losses)


def attempts(output_dir: str, made: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Train and resume in several ways, one after the other in this process; the error of each, empty for none."""
    from paddleformers_fc.errors import FlexError

    found = {}
    for way, settings in made.items():
        given = {"layout": tiny.SINGLE.to_json(), "output_dir": f"{output_dir}/{way}", **settings}
        resume = given.pop("resume", None)
        try:
            (trainer_of if given.pop("adapted", True) else flex_trainer)(**given).train(resume_from_checkpoint=resume)
            found[way] = ""
        except FlexError as error:
            found[way] = f"{type(error).__name__}: {error.render()}"
    return found


def base_of(**settings: Any) -> str:
    """The fingerprint of the base of a model that was not read from files."""
    from paddleformers_fc.trainer.description import describe_adapters

    adapters = describe_adapters(trainer_of(**settings).model)
    assert adapters is not None
    return adapters.base.tensors


def changed_bases(output_dir: str, base: str) -> dict[str, dict[str, Any]]:
    """Read a base and change its tensors or its files before its adapters are trained; the fingerprints."""
    import os
    import shutil

    import paddle

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer.description import describe_adapters

    def element(model: Any, directory: str) -> None:
        weight = model.model.layers[1].mlp.down_proj.weight
        values = weight.numpy()
        values[3, 5] += 1
        weight.set_value(paddle.to_tensor(values))

    def replaced(model: Any, directory: str) -> None:
        shutil.copy(f"{directory}/model.safetensors", f"{directory}/other")
        os.replace(f"{directory}/other", f"{directory}/model.safetensors")

    found = {}
    for way, change in {"unchanged": lambda *_: None, "element": element, "replaced": replaced}.items():
        directory = shutil.copytree(base, f"{output_dir}/{way}")
        args = tiny.training_arguments(
            tiny.SINGLE, f"{output_dir}/out", cls=FlexTrainingArguments, flex_checkpoint=True
        )
        model = from_files(str(directory), tiny.SINGLE.to_json(), args)
        change(model, str(directory))
        adapters = describe_adapters(tiny.trainer(tiny.adapted(model), args, cls=FlexTrainer).model)
        assert adapters is not None
        found[way] = {"files": list(adapters.base.files), "tensors": adapters.base.tensors}
    return found


def train_and_export(output_dir: str, base: str, target: str, **settings: Any) -> None:
    """Train adapters on a base of files, and export them by the Trainer."""
    trainer = trainer_of(output_dir=output_dir, base=base, **settings)
    trainer.train()
    trainer.save_model(target)


def export_initial(layout: Mapping[str, Any], output_dir: str, base: str, target: str, checkpoint: str) -> None:
    """Save adapters on a base of files, export them by the Trainer, and write the model's logits beside the export."""
    import numpy as np
    import paddle

    import paddleformers_fc

    trainer = trainer_of(layout, output_dir, {"max_steps": 1}, base=base)
    paddleformers_fc.save(checkpoint, trainer.model, step=1)
    trainer.save_model(target)
    trainer.model.eval()
    logits = trainer.model(paddle.to_tensor(np.arange(1, tiny.SEQUENCE + 1)[None]))
    np.save(f"{target}.npy", (logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)).numpy())


def read_by_paddleformers(output_dir: str, base: str, adapters: str, resume: str) -> dict[str, bool]:
    """Whether PaddleFormers' own reader of adapters gives a model the weights of a checkpoint."""
    from paddleformers.peft import LoRAModel

    from paddleformers_fc import FlexTrainingArguments

    layout = tiny.SINGLE.to_json()
    trainer = trainer_of(layout, output_dir, {"max_steps": 2}, base=base)
    initial = weights_of(trainer.model)
    trainer.train(resume_from_checkpoint=resume)
    args = tiny.training_arguments(layout, output_dir, cls=FlexTrainingArguments, flex_checkpoint=False)
    read = LoRAModel.from_pretrained(from_files(base, layout, args), adapters)
    expected = weights_of(trainer.model)
    return {"equal": weights_of(read) == expected, "initially": initial == expected}

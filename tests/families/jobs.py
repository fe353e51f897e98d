"""What ranks do in the tests of families: configurations and real models of PaddleFormers' own classes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def config_class(model_type: str) -> Any:
    """PaddleFormers' configuration class of a family: the last one of its module, behind those of nested ones."""
    package = importlib.import_module(f"paddleformers.transformers.{model_type}.configuration")
    return [kind for kind in vars(package).values() if getattr(kind, "model_type", None) == model_type][-1]


def exported_configs(
    sources: Mapping[str, Mapping[str, Any]], kept: bool, changed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What an export's config.json has for models of PaddleFormers' configuration classes: a dict, or the error's text.

    Args:
        sources: a ``config.json`` by name.
        kept: whether the model keeps it, as one that was filled with the weights beside it does.
        changed: values that a run sets in the configuration.
    """
    return {name: _exported_config(source, kept, changed or {}) for name, source in sources.items()}


def _exported_config(source: Mapping[str, Any], kept: bool, changed: Mapping[str, Any]) -> dict[str, Any] | str:
    import json

    from paddleformers_fc.errors import FlexError
    from paddleformers_fc.trainer import documents

    try:
        return dict(json.loads(documents.config_text(_configured(source, kept, changed))))
    except FlexError as error:
        return str(error)


def _configured(source: Mapping[str, Any], kept: bool, changed: Mapping[str, Any] | None = None) -> Any:
    """A layer with the configuration of a model, as a Trainer has it."""
    import copy

    import paddle

    from paddleformers_fc.trainer import documents

    model_type = source["model_type"]
    model = paddle.nn.Linear(2, 2)  # The classes of half of the families cannot be imported here.
    model.config = config_class(model_type).from_dict(copy.deepcopy(dict(source)))
    model.is_fleet, model.can_generate = model_type in ("kimi_k2", "minimax_m2"), lambda: False
    if kept:
        documents.correct(model.config, source)
        documents.take_over(model, source, None)
    documents.keep_use_cache(model)
    model.config.use_cache = False  # Every Trainer sets it.
    for key, value in (changed or {}).items():
        setattr(model.config, key, value)
    return model


def plain_model(model_type: str, values: Mapping[str, Any]) -> Any:
    """A real model of PaddleFormers' own class, where PaddleFleet has one as well.

    Args:
        model_type: the family.
        values: arguments of the configuration class.
    """
    from tests.harness import fleet_stub, tiny

    fleet_stub.install()
    module = importlib.import_module(f"paddleformers.transformers.{model_type}.modeling")
    kind = config_class(model_type)
    stem, config = kind.__name__.removesuffix("Config").removesuffix("Text"), kind(**values)
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        if part is not None:
            part.fuse_rms_norm, part.use_flash_attention = False, False
            part.max_sequence_length = part.seq_length = tiny.SEQUENCE
            part._attn_implementation = "eager" if hasattr(config, "vision_config") else "sdpa"
    names = [f"{stem}For{task}{old}" for old in ("Deprecated", "") for task in ("CausalLM", "ConditionalGeneration")]
    made = next(getattr(module, name) for name in names if hasattr(module, name))
    return made.from_config(config, dtype="float32")


def train_plain(
    model_type: str,
    values: Mapping[str, Any],
    output_dir: Path,
    source: Mapping[str, Any] | None = None,
    resume: Path | None = None,
    tie: bool = False,
    ours: bool = True,
) -> dict[str, Any]:
    """Train a real model of PaddleFormers' own class for four steps, save every second, and export it.

    Args:
        model_type: the family.
        values: arguments of the configuration class.
        output_dir: for the checkpoints, and the export in ``hf``.
        source: the ``config.json`` of the weights that the model started from.
        resume: a checkpoint.
        tie: whether the script ties the word embeddings.
        ours: with this package, or the stock Trainer.
    Returns:
        the losses, and whether the word embeddings are equal at the end.
    """
    import numpy as np
    import paddle

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer import documents
    from tests.harness import tiny

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True} if ours else {}
    args = tiny.training_arguments(tiny.SINGLE, output_dir, max_steps=4, save_steps=2, **settings)
    model = plain_model(model_type, values)
    if source is not None:
        documents.take_over(model, source, None)
    if tie:
        model.tie_weights()
    extra = {"cls": FlexTrainer} if ours else {}

    # PaddleFormers' own loss asks for the outputs of prediction layers, which its class of GLM 4 MoE lacks.
    def criterion(outputs: Any, labels: Any) -> Any:
        return paddle.nn.functional.cross_entropy(outputs if paddle.is_tensor(outputs) else outputs[0], labels)

    trainer = tiny.trainer(model, args, train_dataset=tiny.Samples(), criterion=criterion, **extra)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    if ours:
        trainer.save_model(str(output_dir / "hf"))
    first, last = model.get_input_embeddings().weight.numpy(), model.get_output_embeddings().weight.numpy()
    return {"losses": list(map(float, trainer.losses)), "tied": np.array_equal(first, last)}

"""The methods that this package replaces differently in PaddleNLP's Trainer than in PaddleFormers'.

PaddleNLP's Trainer loads the model in one method, before it wraps it, and the optimizer in another. This package
loads both in the second method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paddleformers_fc.distributed.channel import run_on_all
from paddleformers_fc.errors import OptionError
from paddleformers_fc.families.bind import ModelTensor
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.families.names import family_keys
from paddleformers_fc.families.registry import family_for
from paddleformers_fc.families.stated import bind_model
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.trainer import live_roles, loading, startup
from paddleformers_fc.trainer.conflicts import contradiction
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import LoRAModel, PretrainedModel
from paddleformers_fc.trainer.nlp_models import resumable
from paddleformers_fc.trainer.options import is_active
from paddleformers_fc.trainer.session import Native, channel_of


def init_trainer(trainer: Any, native: Native, *args: Any, **kwargs: Any) -> None:
    """``Trainer.__init__``: as :func:`.startup.init_trainer`; also check that every tensor of the model is declared.

    Raises:
        OptionError: this package does not support the model in PaddleNLP.
        MappingError: the same on every rank: a tensor of the model is not declared for PaddleNLP's class.
    """
    trainer.processing_class = None
    given = (*args, *kwargs.values())
    if any(map(is_active, given)):
        _check_no_adapters(given)
    startup.init_trainer(trainer, native, *args, **kwargs)
    if is_active(trainer.args) and trainer.model is not None:
        run_on_all(channel_of(trainer.args), "checking the tensors of the model", lambda: _check_model(trainer.model))


def _check_no_adapters(given: Iterable[Any]) -> None:
    for one in given:
        if isinstance(one, LoRAModel):
            raise contradiction(
                ["flex_checkpoint: true and LoRA: adapters of PaddleNLP are not supported yet"],
                "Train adapters with PaddleFormers, or remove flex_checkpoint.",
            )


def _check_model(model: Any) -> None:
    if not isinstance(model, PretrainedModel):
        raise OptionError(
            f"flex_checkpoint: true does not support {type(model).__name__} of PaddleNLP.",
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            next_step="Train the model itself, without adapters, or remove flex_checkpoint.",
        )
    described = describe_model(model)
    if IS_NLP not in family_keys(family_for(described.config)):
        raise OptionError(
            f"flex_checkpoint: true does not support models of type {described.model_type} of PaddleNLP.",
            where=f"{type(model).__module__}.{type(model).__qualname__}",
            next_step="Train it with PaddleFormers, or declare PaddleNLP's class in its family (nlp=).",
        )
    shards = describe_roles(live_roles.model_roles(model))[MODEL_STATE]
    bind_model(described, [ModelTensor(one.name, one.global_shape, one.dtype, one.cuts) for one in shards.values()])


def get_train_sampler(trainer: Any, native: Native) -> Any:
    """``Trainer._get_train_sampler``: return a sampler that can begin in the middle of an epoch."""
    return resumable(native(), trainer.train_dataset)


def load_model(trainer: Any, native: Native, resume_from_checkpoint: Any = None) -> None:
    """``Trainer._load_from_checkpoint``: do nothing; :func:`load` fills the model together with its optimizer."""


def load(trainer: Any, native: Native, checkpoint: str | None) -> None:
    """``Trainer._load_optimizer_and_scheduler``: load model and optimizer, and restore the Trainer's state.

    Raises:
        FlexError: see :func:`.loading.load`.
    """
    if checkpoint is not None:
        loading.load(trainer, native, checkpoint)


def save_model(
    trainer: Any, native: Native, output_dir: str | None = None, merge_tensor_parallel: bool | None = False
) -> None:
    """``Trainer.save_model``: export on every rank. PaddleNLP skips ranks whose weights another rank writes.

    Raises:
        FlexError: the same on every rank; an older export in the directory is unchanged.
    """
    trainer._save(output_dir)


METHODS: Mapping[str, Callable[..., Any]] = {
    "_get_train_sampler": get_train_sampler,
    "_load_from_checkpoint": load_model,
    "_load_optimizer_and_scheduler": load,
    "save_model": save_model,
}
"""The replacements by method name; :mod:`.entry` has those that both Trainers share."""

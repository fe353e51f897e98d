"""Give a model adapters that are read from files, in place of ``LoRAModel.from_pretrained``.

PaddleFormers' ``lora_path`` names such a directory. The layers with adapters are those of ``lora_config.json``, or in
PEFT's format those of the stored tensors. PEFT names canonical layers, and PaddleFormers takes patterns of the layers
of a model. These layers are found by the rules of the model, and by the last part of a name, because pipelines number
layers differently.

The replaced ``from_pretrained`` of PaddleFormers' models and adapters.

If :mod:`.options` has chosen this package, it reads through :mod:`.pretrained`. Otherwise PaddleFormers'
loader reads, which is noted on the model (:mod:`.pretrained`).
"""

from __future__ import annotations

import functools
import re
from typing import Any

import paddle
from paddle.nn import Layer

from paddleformers_fc.distributed.channel import Channel, all_gather_checked
from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.save_plan import model_rules
from paddleformers_fc.families.description import Adapters, B, is_adapter, layer_patterns
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.registry import open_weights
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import RuleSet
from paddleformers_fc.storage.paths import AnyPath, RemotePath, parse_path
from paddleformers_fc.text import count_text, fold
from paddleformers_fc.trainer import live_roles, options, pretrained
from paddleformers_fc.trainer.description import describe_model
from paddleformers_fc.trainer.library import logger
from paddleformers_fc.trainer.library_models import LoRAConfig
from paddleformers_fc.trainer.options import FlexFields
from paddleformers_fc.trainer.session import channel_of

_WEIGHT = ".weight"


def read_adapters(cls: Any, model: Any, lora_path: Any, options: FlexFields, keywords: dict[str, Any]) -> Any:
    """Return a model with the adapters of a directory.

    Args:
        cls: ``LoRAModel``, or a subclass of it.
        model: the base.
        lora_path: the directory, of PEFT or of PaddleFormers.
        options: how it is read.
        keywords: of ``LoRAModel.from_pretrained``; ``lora_config`` replaces the configuration of the directory.
    Raises:
        FlexError: the same on every rank: the adapters cannot be read, or do not fit the model.
    """
    channel, directory = channel_of(options), parse_path(str(lora_path))
    config = keywords.get("lora_config") or _config(model, directory, channel)
    config.dtype = config.dtype or paddle.get_default_dtype()
    adapted = cls(model, config)
    pretrained.load_adapters(adapted, directory, channel, options)
    return adapted


def _config(model: Any, directory: AnyPath, channel: Channel) -> LoRAConfig:
    def look() -> tuple[dict[str, set[bool]], list[str], list[str]]:
        opened = open_weights(directory, "size", adapters=True)
        return _layers(opened, _rules(model)) if opened.format.canonical else ({}, [], [])

    everyone = all_gather_checked(
        channel, "looking for the layers of the adapters", look, tuple[dict[str, set[bool]], list[str], list[str]]
    )
    opened = open_weights(directory, "size", adapters=True)
    if not opened.format.canonical:
        if isinstance(directory, RemotePath):
            raise OptionError(
                "PaddleFormers reads lora_config.json from this machine only.",
                where=str(directory),
                next_step="Copy the adapters to a local directory, and name it in lora_path.",
            )
        return LoRAConfig.from_pretrained(str(directory))
    leaves: dict[str, set[bool]] = {}
    for found, _, _ in everyone:
        for leaf, states in found.items():
            leaves.setdefault(leaf, set()).update(states)
    mixed = [f"{leaf}: some layers of this name have adapters" for leaf, states in leaves.items() if len(states) > 1]
    faults = sorted({fault for _, _, theirs in everyone for fault in theirs}) + mixed
    if faults:
        raise MismatchError(
            "No patterns of PaddleFormers give exactly the layers of these adapters.",
            where=str(directory),
            evidence=fold(faults),
            next_step="Create LoRAModel(model, LoRAConfig(...)) in a script, and call load_open_weights.",
        )
    stored, trained = opened.known.adapters, sorted({name for _, names, _ in everyone for name in names})
    if stored is None:
        raise OptionError(
            "The directory contains no adapters.", where=str(directory), next_step="Name a directory of adapters."
        )
    unlisted = [name for name in trained if not _is_listed(name, stored)]
    if unlisted and channel.rank == 0:
        logger.warning(
            f"{directory} has tensors of the base beside its adapters that modules_to_save and bias do not list, such "
            f"as an embedding that PEFT has saved. They are read, and trained by this run: {'; '.join(fold(unlisted))}."
        )
    return LoRAConfig(
        r=stored.r,
        lora_alpha=stored.alpha,
        rslora=stored.rslora,
        lora_dropout=stored.dropout,
        target_modules=layer_patterns(leaf for leaf, states in leaves.items() if True in states),
        trainable_modules=[re.escape(name) for name in trained] or None,
        base_model_name_or_path=stored.base.location or None,
    )


def _is_listed(name: str, adapters: Adapters) -> bool:
    """Return whether the configuration of adapters lists a tensor of the base as trained."""
    module, _, last = name.rpartition(".")
    listed = any(f".{module}".endswith(f".{one}") for one in adapters.trainable_modules)
    return listed or (last == "bias" and adapters.trainable_bias is not None)


def _rules(model: Any) -> RuleSet:
    return model_rules(describe_model(model), describe_roles(live_roles.model_roles(model))[MODEL_STATE])


def _layers(opened: OpenedCheckpoint, rules: RuleSet) -> tuple[dict[str, set[bool]], list[str], list[str]]:
    """Return by the last part of a layer's name whether such layers have adapters, trained tensors, and faults."""
    stored = opened.catalog.roles[MODEL_STATE]
    adapted = {name.removesuffix(f".{B}{_WEIGHT}") for name in stored if name.endswith(f".{B}{_WEIGHT}")}
    trained = {name for name in stored if not is_adapter(name)}
    leaves: dict[str, set[bool]] = {}
    names: list[str] = []
    faults: list[str] = []
    for rule in rules.rules:
        (target, *_) = rule.targets
        if trained.intersection(rule.sources):
            names.append(target)
        parts = {source.removesuffix(_WEIGHT) in adapted for source in rule.sources}
        if target.endswith(_WEIGHT):
            layer = target.removesuffix(_WEIGHT)
            leaves.setdefault(layer.rpartition(".")[2], set()).update(parts)
            if len(parts) > 1:
                faults.append(f"{layer}: some of its parts have adapters, and the model fuses them")
    return leaves, names, faults


def from_pretrained(owner: Any) -> Any:
    """Return the replacement of ``PretrainedModel.from_pretrained``."""
    original = vars(owner)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        given = options.options()
        if given is not None:
            if args:
                raise OptionError(
                    "from_pretrained with flex_checkpoint: true does not support positional arguments of the model.",
                    where=f"{cls.__name__}.from_pretrained",
                    evidence=[f"{count_text(len(args), 'argument')} after the path"],
                    next_step="Pass them as keyword arguments.",
                )
            return pretrained.from_pretrained(cls, pretrained_model_name_or_path, given, kwargs)
        model = original(cls, pretrained_model_name_or_path, *args, **kwargs)
        if isinstance(model, Layer):
            pretrained.note_unverified(model, f"{cls.__name__}.from_pretrained({str(pretrained_model_name_or_path)!r})")
        return model

    return classmethod(from_pretrained)


def from_adapters(owner: Any) -> Any:
    """Return the replacement of ``LoRAModel.from_pretrained``."""
    original = vars(owner)["from_pretrained"].__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, model: Any, lora_path: Any, **kwargs: Any) -> Any:
        given = options.options()
        if given is None:
            return original(cls, model, lora_path, **kwargs)
        return read_adapters(cls, model, lora_path, given, kwargs)

    return classmethod(from_pretrained)  # type: ignore[arg-type]

"""The documents that a model keeps of the directory of its weights: ``config.json``, ``generation_config.json``.

PaddleFormers' loader for flex checkpoints does not read generation settings, and its pipeline models have none. Its
configuration classes drop keys, and its Trainer and its pipelines overwrite others. A run therefore keeps both
documents with its model, from its start or from the resumed checkpoint, and writes them into every checkpoint and
export.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paddleformers_fc.errors import FlexError, MismatchError
from paddleformers_fc.families.exported import OVERWRITTEN, with_older_keys, with_read_keys
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, parse_config
from paddleformers_fc.formats.huggingface import read_description
from paddleformers_fc.storage.json_io import parse_json
from paddleformers_fc.storage.paths import AnyPath
from paddleformers_fc.trainer.description import config_of, describe_config
from paddleformers_fc.trainer.library_models import GenerationConfig, LlmMetaConfig, PretrainedConfig
from paddleformers_fc.trainer.lora import base_model

GENERATION = "generation_config.json"

_INHERITED = "_flex_inherited"
_OF_A_RUN = frozenset({"_from_model_config", "paddleformers_version", "paddlenlp_version", "use_cache"})


@dataclass(frozen=True)
class Inherited:
    """The documents of the weights that a model started from.

    Args:
        config: the content of ``config.json``, with the keys of older ones; for new weights, the keys of the model's
            own that the Trainer overwrites.
        read: the description of a model that PaddleFormers builds from it; None for new weights. Live values that
            differ were changed.
        generation: the bytes of ``generation_config.json``; None if there is none, or if the user set others.
        settings: the generation settings of the live model as the file gave them. Other ones are the user's.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, Any] | None = None
    generation: bytes | None = None
    settings: Mapping[str, Any] | None = None


def of(model: Any) -> Inherited:
    """Return what a model has inherited."""
    found: Inherited = getattr(base_model(model), _INHERITED, Inherited())
    return found


def keep_use_cache(model: Any) -> None:
    """Keep ``use_cache`` of a model that has no source, before a Trainer switches it off for training."""
    if not of(model).config and hasattr(config_of(model), "use_cache"):
        _set(model, replace(of(model), config={**of(model).config, "use_cache": config_of(model).use_cache}))


def take_over(model: Any, config: Mapping[str, Any], generation: bytes | None) -> None:
    """Keep the documents of the directory that has filled a model.

    Args:
        model: the model, or a wrapper of it. Its generation settings become those of the file, unless a user set them.
        config: the content of ``config.json``; empty if there is none.
        generation: the bytes of ``generation_config.json``; None if there is none.
    """
    # PaddleFormers' own configurations may also contain keys of a run.
    of_a_run = LlmMetaConfig._get_unsavable_keys() - OVERWRITTEN
    kept = {key: value for key, value in with_older_keys(config).items() if key not in of_a_run}
    now = replace(of(model), config={**of(model).config, **kept})
    if kept:
        known = _read(type(config_of(model)), with_read_keys(now.config))
        # Without it, every live value counts as changed.
        now = replace(now, read={} if known is None else describe_config(known))
    if generation is not None and _settings(model) in (None, _initial_settings(model), now.settings):
        _adopt(base_model(model), generation)
        now = replace(now, generation=generation, settings=_settings(model))
    _set(model, now)


def read_documents(directory: AnyPath) -> tuple[dict[str, Any], bytes | None]:
    """Read what :func:`take_over` takes from a directory of open weights.

    Raises:
        Corrupt: a document does not match the checksum that the directory records of it.
        FormatError: ``config.json`` is not a JSON object.
        StorageError: a document cannot be read.
    """
    raw = read_description(directory, CONFIG_NAME)
    config = {} if raw is None else parse_config(raw, directory / CONFIG_NAME)
    return config, read_description(directory, GENERATION)


def generation_file(model: Any) -> dict[str, bytes]:
    """Return ``generation_config.json`` of a checkpoint or export of a model, by its name; nothing if it has none."""
    kept, live = of(model), getattr(base_model(model), "generation_config", None)
    if kept.generation is not None and _settings(model) == kept.settings:
        return {GENERATION: kept.generation}
    return {} if live is None else {GENERATION: live.to_json_string().encode()}


def correct(config: Any, source: Mapping[str, Any]) -> list[str]:
    """Give a configuration the values that PaddleFormers' class does not read where the file has them.

    Args:
        config: the configuration of a model that is built next. Values that were changed after reading are kept.
        source: ``config.json`` beside the weights.
    Returns:
        the keys that were given another value, with both values.
    """
    complete, given = with_read_keys(source), list[str]()
    if complete == source:
        return given
    right, wrong = (_read(type(config), one) for one in (complete, source))
    for name in ("", "text_config"):
        parts = [getattr(one, name, None) if name else one for one in (config, right, wrong)]
        if all(isinstance(part, PretrainedConfig) for part in parts):
            own, wanted, found = map(vars, parts)
            for key, value in wanted.items():
                if not isinstance(value, PretrainedConfig) and value != found.get(key) == own.get(key):
                    given.append(f"{key}: {value} in config.json, {own.get(key)} in the model")
                    setattr(parts[0], key, value)
    return given


def refuse_misread(model: Any, source: Mapping[str, Any]) -> None:
    """Refuse a model that PaddleFormers has built with other positions than ``config.json`` describes.

    Raises:
        MismatchError: the rotary embedding is that of a class that does not read the keys of the file.
    """
    misread = [line for line in correct(copy.deepcopy(config_of(model)), source) if line.startswith("rope_parameters")]
    if misread:
        raise MismatchError(
            f"{type(config_of(model)).__name__} of PaddleFormers does not read the rotary embedding of config.json.",
            where=CONFIG_NAME,
            evidence=misread,
            next_step="Set the value in the configuration before the model is built, or build the model with "
            "from_pretrained after paddleformers_fc.install().",
        )


def _read(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a ``config.json`` as an object of a class; None if that class does not read such files."""
    try:
        return kind.from_dict(copy.deepcopy(dict(config)))
    except Exception:  # Classes of PaddleFormers raise anything, such as AssertionError.
        return None


def _set(model: Any, inherited: Inherited) -> None:
    setattr(base_model(model), _INHERITED, inherited)


def _adopt(model: Any, generation: bytes) -> None:
    """Give a model the generation settings of a file, if PaddleFormers can hold them."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_dict(parse_json(generation))
    except (FlexError, TypeError, ValueError, AttributeError):
        return  # PaddleFormers has fewer settings than other libraries. The file is kept as it is.


def _settings(model: Any) -> dict[str, Any] | None:
    live = getattr(base_model(model), "generation_config", None)
    return None if live is None else _plain(live)


def _initial_settings(model: Any) -> dict[str, Any] | None:
    """Return the generation settings that PaddleFormers gives a model of this configuration when it is built."""
    if not base_model(model).can_generate():
        return None
    return _plain(GenerationConfig.from_model_config(config_of(model)))


def _plain(settings: Any) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in vars(settings).items() if key not in _OF_A_RUN}

"""The configuration of an export: PaddleFormers' configuration with dropped, renamed and contradicting keys corrected.

PaddleFormers' configuration classes drop keys on writing, have their own names for some sizes, and keep the rotary
embedding under several keys that may differ. Other libraries read such a file as another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddleformers_fc.families.bind import family_sizes
from paddleformers_fc.families.declarations import Family
from paddleformers_fc.families.description import ModelDescription

OVERWRITTEN = frozenset({"use_cache", "initializer_range", "router_aux_loss_coef"})
"""Keys that the Trainer, a pipeline and the command line overwrite in a live configuration. The use of the weights does
not depend on them."""

_OF_THE_FILE = frozenset(
    {
        *("_name_or_path", "dtype", "torch_dtype", "quantization_config"),
        *("paddleformers_version", "paddlenlp_version", "transformers_version"),
    }
)
"""Keys that describe the file and not the model: the source's values do not hold for an export."""

_QUANTIZATION = "quantization_config"

_CLASS = "architectures"
"""A key of a whole model. PaddleFormers' configurations with a nested one copy it there."""

_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
"""Keys that PaddleFormers' nested configurations lose: they are then None."""

KEPT_FROM_SOURCE = (*OVERWRITTEN, *_TOKENS)
"""Keys that an export may have from its source, with other values than those of the live configuration."""

_ROTARY, _THETA, _SCALING, _LOCAL_THETA = "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"
_FULL, _SLIDING = "full_attention", "sliding_attention"


def exported_config(
    family: Family | None, written: Mapping[str, Any], live: ModelDescription, source: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of an export's ``config.json``.

    Args:
        family: the model's family; None if no family declares it.
        written: the configuration as PaddleFormers writes it.
        live: the description of the live model.
        source: ``config.json`` beside the weights that the model started from; empty for new weights.

    Raises:
        MappingError: the live configuration contradicts itself.
    """
    towers = () if family is None else family.towers
    # PaddleFormers' classes read the text's keys in the nested configuration alone, and write outer ones as well.
    inner = {key for one in towers if one.flat for key in live.config.get(one.key) or ()} - {_CLASS, *KEPT_FROM_SOURCE}
    unread = {key: live.config[key] for key in inner & written.keys() & live.config.keys()}
    values = _completed({**written, **unread}, live.config, source)
    if (values.get(_QUANTIZATION) or {}).get("quant_method") is not None:
        # Keys of the files that the run started from: an export has no scales.
        del values[_QUANTIZATION]
    corrected = {} if family is None else exported_keys(family, live)
    for key in {tower.key for tower in towers}:
        if isinstance(written.get(key), Mapping):
            known = source.get(key) or {}
            nested = _completed(written[key], live.config.get(key) or {}, known)
            kept = {name: nested[name] for name in nested if name != _CLASS or name in known}
            values[key] = kept | {name: corrected[name] for name in corrected.keys() & kept.keys()}
    return values | corrected


def exported_keys(family: Family, model: ModelDescription) -> dict[str, Any]:
    """Return the keys that PaddleFormers does not write, or that have another meaning in its classes.

    The description of a file may lack keys that the model was built with. Their defaults are not exported.
    """
    sizes = family_sizes(family, model)
    known = {key: one for key, one in family.exported.items() if not model.partial or sizes.is_given(one)}
    found = {key: sizes.value(expression) for key, expression in known.items()}
    return {key: value for key, value in found.items() if value is not None}


def _completed(written: Mapping[str, Any], live: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, or a nested one, with the keys of the source that are not written or were overwritten."""
    values = dict(written)
    for key, value in source.items():
        if key in OVERWRITTEN or (key in _TOKENS and values.get(key) is None):
            values[key] = value
        elif key not in values and key not in _OF_THE_FILE:
            values[key] = live.get(key, value)
    if "dtype" in source and "torch_dtype" in values:
        values["dtype"] = values["torch_dtype"]
    return {**values, **_rotary_keys(values)}


def _rotary_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding under each of its keys, old and new, as ``rope_parameters`` describes it."""
    rotary = values.get(_ROTARY)
    if not isinstance(rotary, Mapping):
        return {}
    by_layer = {kind: one for kind, one in rotary.items() if isinstance(one, Mapping)}
    if not by_layer and _LOCAL_THETA in values:
        local = {"rope_type": "default", _THETA: values[_LOCAL_THETA]}
        by_layer = {_FULL: dict(rotary), _SLIDING: local}
    if by_layer:
        theta = {_THETA: by_layer.get(_FULL, {}).get(_THETA), _LOCAL_THETA: by_layer.get(_SLIDING, {}).get(_THETA)}
        return {_ROTARY: by_layer, **{key: value for key, value in theta.items() if value is not None}}
    keys = {} if rotary.get(_THETA) is None else {_THETA: rotary[_THETA]}
    if rotary.get("rope_type", "default") != "default":
        return {**keys, _SCALING: dict(rotary)}
    return {**keys, _SCALING: None} if _SCALING in values else keys

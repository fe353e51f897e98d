"""The ``config.json`` of an export: the keys of the weights that the run started from, with the live model's values.

PaddleFormers' configuration classes drop keys on writing, add their own keys and defaults, and keep the rotary
embedding under several keys that may differ. Other libraries would read such a file as a different model. An export
therefore has the keys of its source, the keys that the run changed, and the keys that the family declares. Newly
initialized weights have no source; their configuration has the keys that PaddleFormers writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from paddleformers_fc.families.declarations import Family
from paddleformers_fc.families.description import ModelDescription
from paddleformers_fc.families.names import family_sizes

OVERWRITTEN = frozenset({"use_cache", "initializer_range", "router_aux_loss_coef"})
"""Keys that the Trainer, a pipeline and the command line overwrite in a live configuration. They do not affect how the
weights are used."""

_DTYPE, _CLASS, _TYPE = "torch_dtype", "architectures", "model_type"
_OF_THE_FILE = frozenset(
    {
        *("_name_or_path", "dtype", _DTYPE, "quantization_config", _CLASS),
        *("paddleformers_version", "paddlefleet_version", "paddlenlp_version", "transformers_version"),
    }
)
"""Keys that describe the file, not the model: the source's values do not apply to an export."""

_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
"""Keys that become None in PaddleFormers' nested configurations."""

_TIE, _TEXT = "tie_word_embeddings", "text_config"
_ROTARY, _THETA, _SCALING, _LOCAL_THETA = "rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"
_ROTARY_KEYS = (_ROTARY, _THETA, _SCALING, _LOCAL_THETA)
_FULL, _SLIDING, _SECTIONS = "full_attention", "sliding_attention", "mrope_section"


def with_older_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys of Transformers 4 to a ``config.json`` of Transformers 5.

    Many of PaddleFormers' classes read only the older keys, and use defaults if these are missing.
    """
    found = {**_older_rotary(config), **config}
    if isinstance(text := config.get(_TEXT), Mapping) and _ROTARY in text:
        found[_TEXT] = {**_older_rotary(text), **text, **{key: config[key] for key in (_TIE,) if key in config}}
    return found


def with_read_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Add all older and newer keys that PaddleFormers' classes read to a ``config.json``.

    Classes of vision-language models read ``mrope_section`` from ``rope_parameters`` or ``rope_scaling``.
    """
    found = with_older_keys(config)
    if isinstance(text := found.get(_TEXT), Mapping):
        return {**found, _TEXT: with_read_keys(text)}
    scaling = _mapping(found.get(_SCALING))
    newer = {_ROTARY: {"rope_type": "default", **scaling, _THETA: found.get(_THETA)}} if _SECTIONS in scaling else {}
    return {**newer, **found}


def exported_config(
    family: Family | None,
    written: Mapping[str, Any],
    live: ModelDescription,
    source: Mapping[str, Any],
    read: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of an export's ``config.json``.

    Args:
        family: the model's family; None if no family declares it.
        written: the configuration as PaddleFormers writes it.
        live: the description of the live model.
        source: the ``config.json`` of the weights that the model started from, after :func:`with_older_keys`; for new
            weights the keys of :data:`OVERWRITTEN`.
        read: the configuration of a model that PaddleFormers builds from the source; None for new weights.

    Raises:
        MappingError: the live configuration contradicts itself.
    """
    sides, nested, is_new = _Sides(written, live.config, source, read or {}), dict[str, dict[str, Any]](), read is None
    own = {key: written[key] for key in written if key in _OF_THE_FILE and key != "quantization_config"}
    for tower in family.towers if family is not None else ():
        part, sides = sides.within(tower.key), sides.without(tower.key)
        if tower.flat and not is_new and tower.key not in source:
            sides = sides.flattened(part)
        elif found := part.values(is_new, own.get(_DTYPE)):
            nested[tower.key] = found
    corrected = {} if family is None else exported_keys(family, live)
    values = sides.values(is_new, own.get(_DTYPE)) | own | corrected
    for found in nested.values():
        found |= {key: corrected[key] for key in corrected if key in found}
    if _TIE in nested.get(_TEXT, {}) and _TIE in values:  # Some libraries read one key, some the other.
        nested[_TEXT][_TIE] = values[_TIE]
    return values | nested


def is_of_source(key: str, live: object) -> bool:
    """Return whether an export takes a dotted key from its source, not from the live model."""
    name = key.rpartition(".")[2]
    return name in OVERWRITTEN or (name in _TOKENS and live is None)


def exported_keys(family: Family, model: ModelDescription) -> dict[str, Any]:
    """Return the keys that PaddleFormers does not write, or that have a different meaning in its classes.

    A partial description may lack keys that the model was built with. Their defaults are not exported.
    """
    sizes = family_sizes(family, model)
    known = {key: one for key, one in family.exported.items() if not model.partial or sizes.is_given(one)}
    found = {key: sizes.value(expression) for key, expression in known.items()}
    return {key: value for key, value in found.items() if value is not None}


class _Sides(NamedTuple):
    """The configurations of :func:`exported_config`, or one nested configuration of each."""

    written: Mapping[str, Any]
    live: Mapping[str, Any]
    source: Mapping[str, Any]
    read: Mapping[str, Any]

    def within(self, key: str) -> _Sides:
        """Return the nested configurations of a key."""
        return _Sides(*(_mapping(side.get(key)) for side in self))

    def without(self, key: str) -> _Sides:
        """Return the sides without a key."""
        return _Sides(*({name: side[name] for name in side if name != key} for side in self))

    def flattened(self, inner: _Sides) -> _Sides:
        """Return the sides with the keys of a nested configuration added on the top level."""
        return _Sides(*({**one, **other} for one, other in zip(inner, self, strict=True)))

    def values(self, is_new: bool, dtype: str | None) -> dict[str, Any]:
        """Return the keys and values of an export.

        Args:
            is_new: whether the run started with newly initialized weights.
            dtype: dtype of the exported weights.
        """
        now, before = self.live, self.read
        changed = [key for key in self.written if now.get(key) != before.get(key) and key not in OVERWRITTEN]
        # Keep the order of the files, so that equal content gives equal bytes.
        keys = dict.fromkeys(self.written if is_new else (*self.source, *changed))
        kept = (key for key in keys if key not in _OF_THE_FILE)
        values = {key: now.get(key, self.source.get(key, self.written.get(key))) for key in kept}
        for key, value in self.source.items():
            if key in (*OVERWRITTEN, _TYPE, _CLASS) or (key in _TOKENS and values.get(key) is None):
                values[key] = value
            elif key in ("dtype", _DTYPE) and dtype is not None:
                values[key] = dtype
        if not is_new and all(now.get(key) == before.get(key) for key in _ROTARY_KEYS):
            return values | {key: self.source[key] for key in _ROTARY_KEYS if key in self.source}
        return _with_rotary({**values, **{key: now[key] for key in (_ROTARY,) if key in now}})


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _with_rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the rotary embedding from ``rope_parameters`` to all its older and newer keys."""
    rotary = values.get(_ROTARY)
    if not isinstance(rotary, Mapping):
        return dict(values)
    by_layer = {kind: one for kind, one in rotary.items() if isinstance(one, Mapping)}
    if not by_layer and _LOCAL_THETA in values:
        by_layer = {_FULL: dict(rotary), _SLIDING: {"rope_type": "default", _THETA: values[_LOCAL_THETA]}}
    unscaled = {_SCALING: None} if _SCALING in values else {}
    found = {**values, **unscaled, _ROTARY: by_layer or rotary}
    return {**found, **_older_rotary(found)}


def _older_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the older keys of the rotary embedding in ``rope_parameters``, which has one for all layers or per kind.

    ``rope_scaling`` contains all values except those that have a separate key in older configurations.
    """
    rotary = config.get(_ROTARY)
    if not isinstance(rotary, Mapping):
        return {}
    full = {key: value for key, value in rotary.get(_FULL, rotary).items() if value is not None}
    local = rotary.get(_SLIDING, {}).get(_THETA)
    keys = {key: full.pop(key) for key in (_THETA, "partial_rotary_factor") if key in full}
    keys |= {} if local is None else {_LOCAL_THETA: local}
    if full.get("rope_type") == "longrope":  # Transformers 4 accepts three keys.
        full = {"type": "longrope", **{key: full[key] for key in ("short_factor", "long_factor") if key in full}}
    return keys if full in ({}, {"rope_type": "default"}) else {**keys, _SCALING: full}

"""Select the tensors that an export in another dtype casts, and their sources.

The tensors of the model's own dtype change; others, such as a float32 router beside bfloat16 weights, stay, and so do
tensors that the family declares as float32. To float32 a weight is read from its master weight if one is stored, so no
digit of it is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from paddleformers_fc.errors import OptionError
from paddleformers_fc.families import family_for, is_known
from paddleformers_fc.families.enumerate import enumerate_tensors
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, OpenedCheckpoint, parse_config
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.layout.shards import ShardsByRole
from paddleformers_fc.plan.build import CAST, ReadSource
from paddleformers_fc.storage.dtypes import model_dtype

_KEYS = ("torch_dtype", "dtype")
"""The keys of a configuration that name the dtype of the weights."""


def refuse_dtype(dtype: str) -> None:
    """Refuse a dtype that an export cannot have.

    Raises:
        OptionError: it is neither empty nor one of those between which plans cast.
    """
    if dtype and dtype not in CAST:
        raise OptionError(
            f"An export cannot have the dtype {dtype!r}.",
            where="--dtype",
            evidence=[f"known: {', '.join(sorted(CAST))}"],
            next_step="Leave out --dtype (dtype=) for the stored dtype.",
        )


def recast(
    checkpoint: OpenedCheckpoint, source: ReadSource, layout: ShardsByRole, dtype: str
) -> tuple[ReadSource, ShardsByRole]:
    """Return the source and the wanted weights of an export in another dtype.

    Args:
        checkpoint: the checkpoint to export.
        source: from it to canonical tensors.
        layout: the canonical tensors.
        dtype: of the export.
    Raises:
        OptionError: the model's own dtype is not one that can change.
    """
    weights = layout[MODEL_STATE]
    stored = model_dtype({shard.dtype for shard in weights.values()})
    refuse_dtype(stored)
    kept = _kept(checkpoint) if stored == "float32" else frozenset()
    changed = {
        name: msgspec.structs.replace(shard, dtype=dtype) if shard.dtype == stored and name not in kept else shard
        for name, shard in weights.items()
    }
    return replace(source, may_cast=True), {**layout, MODEL_STATE: changed}


def recast_documents(documents: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Return the documents of an export with the dtype in ``config.json``."""
    if CONFIG_NAME not in documents:
        return dict(documents)
    config = _named(parse_config(documents[CONFIG_NAME], Path(CONFIG_NAME)), dtype)
    if not config.keys() & {*_KEYS}:
        config[_KEYS[0]] = dtype
    return {**documents, CONFIG_NAME: (json.dumps(config, indent=2) + "\n").encode()}


def _named(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with another dtype, also of nested ones."""
    return {
        key: dtype if key in _KEYS else _named(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }


def _kept(checkpoint: OpenedCheckpoint) -> frozenset[str]:
    """Return the canonical names of tensors that are float32 whatever the model's dtype is."""
    if not is_known(checkpoint.known.config):
        return frozenset()
    model = checkpoint.known
    declared = {
        one.name for one in enumerate_tensors(family_for(model.config), model, "bfloat16") if one.dtype == "float32"
    }
    return frozenset(
        name for rule in checkpoint.rules.rules if declared.intersection(rule.targets) for name in rule.sources
    )

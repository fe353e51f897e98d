"""Describe the model that PaddleFormers builds from open weights or adapters on one rank, without building it.

A conversion to a flex checkpoint writes the tensors of this model. Names and shapes come from the configuration and the
family, dtypes from the stored tensors, so that no value changes.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec
from msgspec import structs

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families import ModelTensor, OptionalNames, bind, described_by_file, enumerate_tensors, family_for
from paddleformers_fc.families.description import Adapters, B, is_adapter, layer_patterns, shared_copies, with_adapters
from paddleformers_fc.families.stated import canonical_ties
from paddleformers_fc.families.undescribed import completed
from paddleformers_fc.formats.checkpoint import CONFIG_NAME, NAME_CONFIG, OpenedCheckpoint, StoredModel
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.text import count_text, fold

_COMPARE = "Compare config.json with the weights; nothing was written."
_ONE_DTYPE = "Store these parts in one dtype, or set the option of config.json that fuses them to false."
"""For parts of one tensor with different dtypes: one of them would be rounded."""


def built_model(checkpoint: OpenedCheckpoint, adapters: Adapters | None = None) -> StoredModel:
    """Return the model of open weights, without optional layers that are not stored.

    Args:
        checkpoint: opened open weights, or adapters in canonical names.
        adapters: the adapters, if ``checkpoint`` contains them; the model then only has the stored tensors.
    Raises:
        OptionError: there is no configuration.
        MappingError: no family declares the model, tensors are missing or unexpected, or parts of one tensor have
            different dtypes.
    """
    root = checkpoint.catalog.root
    if not checkpoint.config:
        raise OptionError(
            f"{root} has no {CONFIG_NAME}, from which the tensors of its model follow.",
            where=str(root / CONFIG_NAME),
            next_step=NAME_CONFIG,
        )
    family = family_for(checkpoint.config)
    described = structs.replace(described_by_file(checkpoint.config), partial=True, adapters=adapters)
    tensors = [one.under(tp=1) for one in enumerate_tensors(with_adapters(family, adapters), described)]
    model, rules = completed(family, described, tensors)
    dtypes = {name: one.dtype for name, one in checkpoint.catalog.roles[MODEL_STATE].items()}
    stored = frozenset(dtypes)
    aliases = canonical_ties(model) | shared_copies(rules)
    for alias, owner in aliases.items():
        if alias in dtypes:
            dtypes.setdefault(owner, dtypes[alias])
    optional = OptionalNames(family, model)
    own, read = stored - aliases.keys(), {name for rule in rules.rules for name in rule.sources}
    unread = optional.missed(sorted(own - read), own)
    _raise_faults(checkpoint, unread, f"has {_count(unread)} that its model does not have", _COMPARE)
    sources_of: dict[str, list[str]] = {}
    for rule in rules.rules:
        for name in rule.targets:
            sources_of.setdefault(name, []).extend(rule.sources)
    owners = rules.aliases
    kept: list[ModelTensor] = []
    mixed: list[str] = []
    missing: dict[str, None] = {}
    for one in tensors:
        sources = sources_of.get(owners.get(one.name, one.name), [])
        kinds = {name: dtypes[name] for name in sources if name in dtypes}
        absent = {name: None for name in sources if name not in dtypes and name not in optional}
        if len(set(kinds.values())) > 1:
            mixed.append(f"{one.name}: {', '.join(f'{name} {dtype}' for name, dtype in kinds.items())}")
        if kinds:
            kept.append(msgspec.structs.replace(one, dtype=next(iter(kinds.values()))))
        elif adapters is None and (absent or not sources):
            kept.append(one)
        else:
            continue
        missing |= absent
    _raise_faults(checkpoint, mixed, f"has {_count(mixed)} of its model in several dtypes", _ONE_DTYPE)
    _raise_faults(checkpoint, missing, f"lacks {_count(missing)} of its model", _COMPARE)
    if adapters is not None:
        found = _with_patterns(adapters, [one.name for one in tensors], [one.name for one in kept])
        model = structs.replace(model, adapters=found)
    return StoredModel(bind(family, model, kept), model)


def _with_patterns(adapters: Adapters, names: Collection[str], kept: Collection[str]) -> Adapters:
    """Replace the patterns of adapters by PaddleFormers' patterns of the stored layers and tensors.

    Args:
        adapters: adapters with the patterns of another program.
        names: all tensors that the model can have.
        kept: the stored tensors.
    """
    ending = f".{B}"
    leaves: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(ending):
            leaves.setdefault(name.removesuffix(ending).rpartition(".")[2], []).append(name)
    stored = frozenset(kept)
    complete = [leaf for leaf, own in leaves.items() if stored.issuperset(own)]
    others = [name for leaf, own in leaves.items() if leaf not in complete for name in own if name in stored]
    return msgspec.structs.replace(
        adapters,
        target_modules=(*layer_patterns(complete), *(re.escape(name.removesuffix(ending)) for name in others)),
        trainable_modules=tuple(re.escape(name) for name in sorted(kept) if not is_adapter(name)),
    )


def _count(tensors: Collection[str]) -> str:
    return count_text(len(tensors), "tensor")


def _raise_faults(checkpoint: OpenedCheckpoint, tensors: Collection[str], problem: str, next_step: str) -> None:
    """Raise an error that lists tensors, if there are any."""
    if tensors:
        raise MappingError(
            f"{checkpoint.catalog.root} {problem}.",
            where=str(checkpoint.catalog.root),
            evidence=fold(tensors),
            next_step=next_step,
        )

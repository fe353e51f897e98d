"""The names in a live model of the optimizer states that a checkpoint of another class of models has.

Paddle creates optimizer states by the names of the live model. PaddleNLP's classes have other names than those of
PaddleFormers and fuse other parameters, so the names go through the canonical tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from paddleformers_fc.families.bind import ModelTensor
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.families.stated import bind_model
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.layout.live import describe_roles
from paddleformers_fc.layout.roles import MODEL_STATE
from paddleformers_fc.mapping import Rule
from paddleformers_fc.trainer import state
from paddleformers_fc.trainer.description import describe


def live_names(checkpoint: OpenedCheckpoint, model: Any, stored: Collection[str]) -> set[str]:
    """Return names of states in the names of a live model.

    Args:
        checkpoint: an opened checkpoint.
        model: the live model.
        stored: names of states in the checkpoint.
    Returns:
        the names themselves if neither model is one of PaddleNLP. A parameter of this rank has the states of all
        parameters that share a canonical tensor with it.
    """
    described = describe(model)
    if IS_NLP not in checkpoint.known.config and IS_NLP not in described.config:
        return set(stored)
    shards = describe_roles(state.model_roles(model))[MODEL_STATE].values()
    tensors = [ModelTensor(one.name, one.global_shape, one.dtype, one.cuts) for one in shards]
    sources = {name: rule.sources for rule in checkpoint.rules.rules for name in rule.targets}
    suffixes: dict[str, set[str]] = {}
    for name in stored:
        parameter, _, suffix = name.rpartition(".")
        for source in sources.get(parameter, ()):
            suffixes.setdefault(source, set()).add(suffix)
    return _named(bind_model(described, tensors).rules, suffixes)


def _named(rules: Iterable[Rule], suffixes: dict[str, set[str]]) -> set[str]:
    return {
        f"{name}.{suffix}"
        for rule in rules
        for name in rule.targets
        for source in rule.sources
        for suffix in suffixes.get(source, ())
    }

"""From a family's declaration and a model's *real* tensors to its rules.

The model's tensors are enumerated, never guessed from the configuration: every live name must match one statement,
and every number in it is carried over into the canonical names. The tensor-parallel degree of a fused layout is read
off the shards themselves. One dictionary lookup per tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paddleformers_fc.errors import MappingError
from paddleformers_fc.families.declarations import Family, Geometry, Statement
from paddleformers_fc.mapping import Rule, RuleSet, Shape, TensorSpec, Tie
from paddleformers_fc.mapping.folding import fold

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_PLACEHOLDER = re.compile(r"\{\w+\}")
_HOLE = "{}"


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a real model.

    Args:
        name: its structured name.
        shape: global shape.
        dtype: element type by its numpy name.
        cuts: into how many tensor-parallel shards each axis is cut.
    """

    name: str
    shape: Shape
    dtype: str
    cuts: Shape


def bind(family: Family, config: Mapping[str, Any], tensors: Iterable[ModelTensor]) -> RuleSet:
    """The rules of one model.

    Args:
        family: the model's family.
        config: the model's configuration: ``num_attention_heads``, ``num_key_value_heads``, ``tie_word_embeddings``.
        tensors: every tensor of the model, or of one rank's part of it.
    Raises:
        MappingError: for names that no statement declares and shapes that no rule fits; all of them.
    """
    known = {_PLACEHOLDER.sub(_HOLE, statement.target): statement for statement in family.statements}
    ties = {tied.alias: tied.owner for tied in family.tied} if config.get("tie_word_embeddings") else {}
    targets: dict[str, TensorSpec] = {}
    rules: list[Rule] = []
    used: dict[str, Statement] = {}
    faults: list[str] = []
    for tensor in _with_owners(list(tensors), ties):
        targets[tensor.name] = TensorSpec(tensor.shape, tensor.dtype)
        if tensor.name in ties:
            continue
        template = _NUMBER.sub(_HOLE, tensor.name)
        statement = known.get(template)
        if statement is None:
            faults.append(f"{tensor.name}: no statement of family {family.name} declares this tensor")
            continue
        used[template] = statement
        made = _rule(statement, tensor, config)
        if isinstance(made, str):
            faults.append(f"{tensor.name}: {made}")
        else:
            rules.append(made)
    if faults:
        raise MappingError(
            f"{len(faults)} tensors of the model cannot be mapped.",
            where=f"family {family.name}",
            evidence=fold(faults),
            next_step="Check model_type and the head counts in config.json, or declare the tensors in the family.",
        )
    return RuleSet(
        targets=targets,
        rules=tuple(rules),
        ties=tuple(Tie(owner, alias) for alias, owner in ties.items() if alias in targets),
        statements={"forward": [aoa_statement(statement, config) for statement in used.values()]},
    )


def _with_owners(tensors: list[ModelTensor], ties: Mapping[str, str]) -> list[ModelTensor]:
    """The tensors, and the owner of every alias that is alone, as on the last stage of a pipeline."""
    names = {tensor.name for tensor in tensors}
    absent = [
        replace(tensor, name=ties[tensor.name])
        for tensor in tensors
        if tensor.name in ties and ties[tensor.name] not in names
    ]
    return tensors + absent


def _rule(statement: Statement, tensor: ModelTensor, config: Mapping[str, Any]) -> Rule | str:
    """The rule for one tensor, or why there is none."""
    numbers = _NUMBER.findall(tensor.name)
    sources = tuple(_numbered(source, numbers) for source in statement.sources)
    rank = len(tensor.shape)
    axes = tuple(reversed(range(rank))) if statement.geometry is not Geometry.SAME else tuple(range(rank))
    axis = max(rank - 1, 0)
    length = tensor.shape[axis] if rank else 1
    if statement.geometry is Geometry.SAME:
        return Rule(sources, (tensor.name,), (length,), axis, axes)
    if statement.geometry is Geometry.LINEAR:
        if rank != 2:
            return f"a linear weight has two axes, this tensor has {rank}"
        return Rule(sources, (tensor.name,), (length,), axis, axes)
    if statement.geometry is Geometry.FUSED_FFN:
        if length % (2 * tensor.cuts[axis]):
            return f"length {length} does not hold gate and up for {tensor.cuts[axis]} tensor-parallel ranks"
        half = length // 2
        return Rule(sources, (tensor.name,), (half, half), axis, axes, target_blocks=tensor.cuts[axis])
    return _fused_qkv_rule(sources, tensor, axis, axes, config)


def _fused_qkv_rule(
    sources: tuple[str, ...], tensor: ModelTensor, axis: int, axes: tuple[int, ...], config: Mapping[str, Any]
) -> Rule | str:
    heads = config.get("num_attention_heads")
    groups = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(groups, int) or heads < 1 or groups < 1 or heads % groups:
        return f"num_attention_heads={heads} and num_key_value_heads={groups} do not group query heads"
    length = tensor.shape[axis]
    if length % (heads + 2 * groups):
        return f"length {length} does not hold {heads} query and 2 x {groups} key and value heads"
    head = length // (heads + 2 * groups)
    return Rule(sources, (tensor.name,), (heads * head, groups * head, groups * head), axis, axes, target_blocks=groups)


def _numbered(template: str, numbers: list[str]) -> str:
    remaining = iter(numbers)
    return _PLACEHOLDER.sub(lambda _: next(remaining), template)


def aoa_statement(statement: Statement, config: Mapping[str, Any]) -> str:
    """The statement in Paddle's AOA language, as a person would write it for stock FlexCheckpoint."""
    names = {"{layer}": "$LAYER_ID", "{index}": "$LAYER_ID", "{expert}": "$EXPERT_ID"}

    def spelled(name: str) -> str:
        return _PLACEHOLDER.sub(lambda found: names[found.group(0)], name)

    turned = "^T" if statement.geometry is not Geometry.SAME and not statement.target.endswith(".bias") else ""
    left = ", ".join(spelled(source) + turned for source in statement.sources)
    attributes = ""
    if statement.geometry is Geometry.FUSED_QKV:
        heads = config.get("num_attention_heads")
        attributes = (
            f", fused_qkv, num_heads={heads}, num_key_value_groups={config.get('num_key_value_heads') or heads}"
        )
    elif statement.geometry is Geometry.FUSED_FFN:
        attributes = ", fused_ffn"
    if attributes and statement.target.endswith(".bias"):
        attributes += ", axis=0"
    return f"{left} -> {spelled(statement.target)}{attributes}"

"""The data of a family declaration: one statement per kind of tensor, in the names of the model.

A statement contains the name of a model tensor with ``{layer}``, ``{expert}`` or another placeholder for each number,
the canonical (Hugging Face) tensors that it consists of, and its geometry. It also contains the shape, the axis that
tensor parallelism cuts, and the condition under which a model has the tensor. Sizes and conditions are expressions of
:mod:`paddleformers_fc.families.sizes`. Digits in a name are literal: ``mlp.0.weight``. Curly braces with commas expand
as in a shell: ``{q,k,v}_proj`` gives three statements.

Two results are derived from statements: the rules of a real model and their reverse
(:mod:`paddleformers_fc.families.bind`), and the list of tensors that a configuration gives
(:mod:`paddleformers_fc.families.enumerate`). Binding depends on the geometry alone: a tensor is bound whatever shape,
cut and condition are declared. :mod:`paddleformers_fc.families.language` composes statements into families.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from paddleformers_fc.mapping.rules import flat

PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""A placeholder in a declared name; its group is the placeholder itself."""

NUMBER = re.compile(r"(?<=\.)([0-9]{1,18})(?=\.|\Z)")
"""A number in a tensor name."""

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_ANY_NUMBER = re.compile(r"(?<=\{)\w+(?=\})|(?<=\.)[0-9]{1,18}(?=\.|\Z)")


class ModelClass(Enum):
    """The two kinds of model classes, which have different names and layouts for the same tensors."""

    FLEET = "PaddleFleet"
    FORMERS = "PaddleFormers"


FLEET, FORMERS = ModelClass.FLEET, ModelClass.FORMERS


class Geometry(Enum):
    """The content of a tensor's output axis; :mod:`paddleformers_fc.families.bind` derives rules from it."""

    SAME = "same"
    LINEAR = "linear"
    FUSED_QKV = "fused_qkv"
    FUSED_QKV_PER_RANK = "fused_qkv_old"
    FUSED_FFN = "fused_ffn"
    ALTERNATING_FFN = "alternating_ffn"


class Stage(Enum):
    """The place in a pipeline of a tensor outside of the model's layers."""

    FIRST = "beside the embedding"
    NORM = "behind the last layer"
    LAST = "beside the head"
    ABSENT = "in no pipeline"


@dataclass(frozen=True)
class Stack:
    """The layout of the experts of one layer in one tensor.

    Args:
        axis: the axis of the target along which the experts are placed in order.
        new: whether the experts are stacked on a new axis; otherwise they are concatenated along an existing one.
    """

    axis: int
    new: bool = False


@dataclass(frozen=True)
class Statement:
    """One kind of model tensor and the canonical tensors that it consists of.

    Args:
        target: the name in the model, with placeholders for numbers.
        sources: the canonical names, with the same placeholders: one that holds all parts, or one per part. Empty for
            a tensor that always keeps its initial values. For a stack, the names of one expert, with ``{expert}``, or
            the name of the canonical stack.
        geometry: the relation of the sources and the target.
        turned: whether canonical [out, in] is [in, out] in the model. Ignored for tensors of one axis.
        stack: the layout of the experts in a target that holds those of a whole layer.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts, if any.
        where: the condition under which a model has the tensor; empty for always.
        dtype: the dtype of the tensor where it differs from the model's; empty for the model's.
        model_class: the model class that has the tensor; None for both. ``family`` turns it into a condition.
        tower: the tower whose sizes the expressions refer to; empty for the family itself.
        parts: the lengths of the parts of a fused layer, such as query, key and value. Those of parts that lie in one
            of several sources are a tuple. Empty for heads of one size.
        groups: the number of groups in which such a source interleaves its parts; empty for one.
        siblings: the last parts of the names of all tensors that its source holds, in order and of one length, if it
            holds several. They lie in one scope of the model.
        stage: its place in a pipeline; None for that of its tower, or beside the head. Ignored for tensors of layers.
        trained: whether an optimizer updates it.
    """

    target: str
    sources: tuple[str, ...]
    geometry: Geometry
    turned: bool = True
    stack: Stack | None = None
    shape: tuple[str, ...] = ()
    cut: int | None = None
    where: str = ""
    dtype: str = ""
    model_class: ModelClass | None = None
    tower: str = ""
    parts: tuple[str | tuple[str, ...], ...] = ()
    groups: str = ""
    siblings: tuple[str, ...] = ()
    stage: Stage | None = None
    trained: bool = True

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the target in order: names of placeholders, and digits where the number is literal."""
        return tuple(_ANY_NUMBER.findall(self.target))

    @property
    def lengths(self) -> tuple[str, ...]:
        """The length of every part that is declared."""
        return flat(self.parts)


Statements = tuple[Statement, ...]


@dataclass(frozen=True)
class Numbers:
    """The range of numbers of a placeholder.

    Args:
        name: the placeholder, without braces.
        count: the length of the range.
        start: the first number in canonical names.
        shift: the difference between a number in the model and the canonical number.
    """

    name: str
    count: str
    start: str = "0"
    shift: str = "0"


@dataclass(frozen=True)
class TiedName:
    """An alias of the owner's tensor if the model's configuration ties its word embeddings and fulfils a condition."""

    alias: str
    owner: str
    where: str = ""


@dataclass(frozen=True)
class Tower:
    """A part of a model with sizes of its own, such as a vision tower.

    Args:
        name: its name; ``vision.hidden`` is the size ``hidden`` of tower ``vision``.
        key: the path of its nested configuration, such as ``vision_config``.
        statements: its statements, which the family's contain as well.
        numbers: the placeholder of its layers.
        sizes: its sizes, which precede :data:`SIZES`.
        defaults: the values of the model's class for keys that the nested configuration lacks.
        flat: whether a configuration without the nested one has its keys outside of it.
    """

    name: str
    key: str
    statements: Statements
    numbers: Numbers
    sizes: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False


SIZES: Mapping[str, str] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads or heads",
    "head": "head_dim or hidden // heads",
    "q": "heads * head",
    "kv": "kv_heads * head",
    "ffn": "intermediate_size",
    "expert_ffn": "moe_intermediate_size",
    "experts": "num_experts | num_local_experts | n_routed_experts",
    "mtp_layers": "num_nextn_predict_layers or 0",
}
"""Sizes that most families share; those of a family precede them."""

DIVIDED = {"vocab": "vocab_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""Sizes that the degree of tensor parallelism divides, and their keys."""

TEXT_EXPERTS = "text_experts"
"""The size of families with experts of two modalities: those of the first. Expert ranks share those of either."""

BUILT = ("embed", "layers", "norm")
"""The parts that every class builds first, in order, by the beginnings of names under ``model.``."""

NUMBERS: tuple[Numbers, ...] = (Numbers("layer", "layers"), Numbers("expert", "experts"))
"""Numbers that most families share; those of a family precede them."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the family's name.
        model_types: values of ``model_type`` in ``config.json``.
        statements: one per kind of tensor. Several statements of one name are distinguished by shape and condition.
        tied: aliases under ``tie_word_embeddings``.
        optional: prefixes of canonical names that a file may lack, with placeholders. A tensor that the file lacks
            keeps its initial values, and one that the model lacks is dropped. Both are reported. The names of one
            prefix and one number (of all numbers for ``{layer}``) are present or absent together. A tensor in a file
            beside one that the model reads, such as its bias, is never dropped. Earlier prefixes take precedence. Where
            a prefix also matches layers of the model, a group is optional only if it has a name that no such layer has.
        sizes: the family's sizes, which precede :data:`SIZES`.
        numbers: the family's numbers, which precede :data:`NUMBERS`.
        defaults: the values of the model's class for keys that a ``config.json`` lacks.
        tiny: a configuration of a few thousand elements, on which the family is proved when it is registered.
        exported: keys of an exported ``config.json`` beside those that PaddleFormers writes, and the expressions of
            their values: the names of other libraries for a size, and keys that PaddleFormers drops.
        towers: parts of the model with sizes of their own.
        built: the parts that the class builds after :data:`BUILT`, in order, by the beginnings of names.
        divided: sizes of :data:`DIVIDED` that the class itself compares with the degree of tensor parallelism.
    """

    name: str
    model_types: tuple[str, ...]
    statements: Statements
    tied: tuple[TiedName, ...] = ()
    optional: tuple[str, ...] = ()
    sizes: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[Numbers, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    exported: Mapping[str, str] = field(default_factory=dict)
    towers: tuple[Tower, ...] = ()
    built: tuple[str, ...] = ()
    divided: tuple[str, ...] = tuple(DIVIDED)


def same(
    name: str, source: str | None = None, shape: tuple[str, ...] = (), cut: int | None = None, dtype: str = ""
) -> Statements:
    """Declare a tensor that is equal in both spaces.

    Args:
        name: the model's name.
        source: its canonical name, where that differs.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts.
        dtype: its dtype, where that is not the model's.
    """
    return expanded(Statement(name, (source or name,), Geometry.SAME, shape=shape, cut=cut, dtype=dtype))


def held_together(name: str, source: str, shape: tuple[str, ...]) -> Statements:
    """Declare the tensors of alternatives such as ``alpha_{pre,post}``, which lie one after the other in ``source``."""
    found = same(name, source, shape)
    return tuple(replace(one, siblings=tuple(each.target.rpartition(".")[2] for each in found)) for one in found)


def linear(
    name: str, source: str | None = None, shape: tuple[str, ...] = (), cut: int | None = None, dtype: str = ""
) -> Statements:
    """Declare the weight of a linear layer: [out, in] in files, [in, out] in Paddle. Arguments as of :func:`same`."""
    return expanded(Statement(name, (source or name,), Geometry.LINEAR, shape=shape, cut=cut, dtype=dtype))


def fresh(name: str, shape: tuple[str, ...] = (), where: str = "") -> Statements:
    """Declare a tensor that canonical files never contain: it keeps its initial values and is not exported.

    Args:
        name: the model's name.
        shape: the size of every axis.
        where: the condition under which a model has the tensor.
    """
    return expanded(Statement(name, (), Geometry.SAME, shape=shape, where=where))


def fused(
    name: str, sources: Iterable[str], geometry: Geometry, shape: tuple[str, ...] = (), cut: int | None = None
) -> Statements:
    """Declare a tensor whose output axis holds several parts.

    Args:
        name: the model's name.
        sources: its canonical names: one per part, or one that holds all parts in order.
        geometry: the layout of the parts in the model.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts.
    """
    return expanded(Statement(name, tuple(sources), geometry, shape=shape, cut=cut))


def declared(*groups: Statements) -> Statements:
    """Return all statements of several groups, in order."""
    return tuple(itertools.chain.from_iterable(groups))


def only(where: str, *groups: Statements) -> Statements:
    """Add a condition to statements."""
    return tuple(
        replace(statement, where=f"({statement.where}) and ({where})" if statement.where else where)
        for statement in declared(*groups)
    )


def choice(condition: str, holds: Statements, otherwise: Statements) -> Statements:
    """Return statements for models that fulfil a condition, and others for those that do not."""
    return declared(only(condition, holds), only(f"not ({condition})", otherwise))


def of_class(model_class: ModelClass, *groups: Statements) -> Statements:
    """Restrict statements to one class of models."""
    return tuple(replace(one, model_class=model_class) for one in declared(*groups))


def within(scope: str, *groups: Statements, canonical: str | None = None) -> Statements:
    """Prefix the names of statements with a scope, such as ``model.layers.{layer}``.

    Args:
        scope: the prefix in the model.
        groups: statements with names relative to it.
        canonical: the prefix of canonical names, if that differs; empty for none.
    """
    other = scope if canonical is None else canonical
    prefix = f"{other}." if other else ""
    return tuple(
        replace(one, target=f"{scope}.{one.target}", sources=tuple(prefix + source for source in one.sources))
        for one in declared(*groups)
    )


def renumbered(number: str, *groups: Statements) -> Statements:
    """Replace ``layer`` in conditions and shapes by another number of the name, such as that of a prediction layer."""

    def moved(expression: str) -> str:
        return re.sub(r"\blayer\b", number, expression)

    return tuple(replace(one, where=moved(one.where), shape=tuple(map(moved, one.shape))) for one in declared(*groups))


def renamed(names: Mapping[str, str], *groups: Statements) -> Statements:
    """Replace every text in the canonical names of statements, in the order given."""

    def canonical(name: str) -> str:
        for text, other in names.items():
            name = name.replace(text, other)
        return name

    return tuple(replace(one, sources=tuple(map(canonical, one.sources))) for one in declared(*groups))


def stacked(name: str, axis: int, new: bool, group: Statements) -> Statements:
    """Place the experts of one layer in one tensor.

    Args:
        name: the name of the stack in the model.
        axis: the axis of the stack along which the experts are placed.
        new: whether the axis is new; otherwise the experts are concatenated along an axis of theirs.
        group: the one statement of a single expert.
    """
    (one,) = group
    shape = (
        ("experts", *one.shape)
        if new
        else tuple(f"experts * ({size})" if index == axis else size for index, size in enumerate(one.shape))
    )
    return (replace(one, target=name, stack=Stack(axis, new), shape=shape),)


def stack_of_files(
    name: str, source: str | None = None, shape: tuple[str, ...] = (), turned: bool = False
) -> Statements:
    """Declare a stack of experts on a new first axis, which canonical files stack as well.

    Args:
        name: the name of the stack in the model.
        source: its canonical name, where that differs.
        shape: the size of every axis of a single expert in the model.
        turned: whether a single expert is transposed, as the weight of a linear layer.
    """
    geometry = Geometry.LINEAR if turned else Geometry.SAME
    return (Statement(name, (source or name,), geometry, stack=Stack(0, True), shape=("experts", *shape)),)


def as_stored(group: Statements) -> Statements:
    """Keep weights [out, in] as in canonical files: the parts are placed along the first axis."""
    return tuple(
        replace(one, turned=False, shape=one.shape[::-1], cut=None if one.cut is None else len(one.shape) - 1 - one.cut)
        for one in group
    )


def uncut(group: Statements) -> Statements:
    """Exclude layers from tensor parallelism, as routed experts are."""
    return tuple(replace(one, cut=None) for one in group)


def untrained(group: Statements) -> Statements:
    """Exclude tensors from the optimizer."""
    return tuple(replace(one, trained=False) for one in group)


def at(stage: Stage, *groups: Statements) -> Statements:
    """Place tensors outside of layers in a pipeline."""
    return tuple(replace(one, stage=stage) for one in declared(*groups))


def expanded(statement: Statement) -> Statements:
    """Expand alternatives such as ``{q,k,v}`` in the names of a statement."""
    found = _ALTERNATIVES.search(statement.target)
    if found is None:
        return (statement,)
    return tuple(
        one
        for option in found.group(1).split(",")
        for one in expanded(
            replace(
                statement,
                target=statement.target.replace(found.group(0), option),
                sources=tuple(source.replace(found.group(0), option) for source in statement.sources),
            )
        )
    )

"""How a family is declared: one statement per kind of tensor, in the model's own names.

A statement names a model tensor with ``{layer}``, ``{expert}`` or another placeholder where a number stands, the
canonical (Hugging Face) tensors that it is made of, its geometry, and what it is in a model: its shape, the axis that
tensor parallelism cuts, and which configurations have it. Sizes and conditions are texts of
:mod:`paddleformers_fc.families.sizes`. Curly braces with commas expand, as in a shell: ``{q,k,v}_proj`` are three
statements.

From these lines follow the rules of a real model and their reverse (:mod:`paddleformers_fc.families.bind`), and the
list of tensors that a configuration gives (:mod:`paddleformers_fc.families.enumerate`). Binding goes by geometry alone:
it takes a tensor as it is, whatever shape, cut and condition were declared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""A placeholder in a declared name; its group is the placeholder's own."""

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


class Geometry(Enum):
    """What lies along a tensor's output axis; :mod:`paddleformers_fc.families.bind` turns it into rules."""

    SAME = "same"
    LINEAR = "linear"
    FUSED_QKV = "fused_qkv"
    FUSED_QKV_PER_RANK = "fused_qkv_old"
    FUSED_FFN = "fused_ffn"


@dataclass(frozen=True)
class Stack:
    """How the experts of one layer lie in one tensor.

    Args:
        axis: the axis of the target along which they lie, one behind the other.
        new: whether that axis is their own, of length one each; otherwise they are concatenated along it.
    """

    axis: int
    new: bool = False


@dataclass(frozen=True)
class Statement:
    """One kind of model tensor and the canonical tensors that it is made of.

    Args:
        target: the model's name, with placeholders for numbers.
        sources: the canonical names, with the same placeholders; one that holds all parts, or one per part; none where
            the tensor always keeps its initial values. Of a stack, the names of one expert, with ``{expert}``.
        geometry: how the sources become the target.
        turned: whether canonical [out, in] is [in, out] in the model. Says nothing about tensors of one axis.
        stack: how the experts lie in the target, where it holds those of a whole layer.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts, if any.
        where: the condition under which a model has the tensor; empty for always.
        dtype: the dtype that the tensor has whatever the model's is; empty for the model's.
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


Statements = tuple[Statement, ...]


@dataclass(frozen=True)
class Numbers:
    """The numbers that a placeholder stands for.

    Args:
        name: the placeholder, without braces.
        count: how many there are.
        start: the first one in canonical names.
        shift: what a model's number is larger by than the canonical one.
    """

    name: str
    count: str
    start: str = "0"
    shift: str = "0"


@dataclass(frozen=True)
class TiedName:
    """An alias that is the owner's tensor whenever the model's configuration ties its word embeddings."""

    alias: str
    owner: str


SIZES: Mapping[str, str] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads or num_attention_heads",
    "head": "head_dim or hidden_size // num_attention_heads",
    "q": "heads * head",
    "kv": "kv_heads * head",
    "ffn": "intermediate_size",
    "expert_ffn": "moe_intermediate_size",
    "experts": "num_experts | num_local_experts | n_routed_experts",
    "mtp_layers": "num_nextn_predict_layers or 0",
}
"""Sizes that most families share; a family's own come before them."""

NUMBERS: tuple[Numbers, ...] = (Numbers("layer", "layers"), Numbers("expert", "experts"))
"""Numbers that most families share; a family's own come before them."""


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the family's name.
        model_types: values of ``config.json``'s ``model_type`` that belong to it.
        statements: one per kind of tensor; several for one name where models of the family differ in its geometry,
            which are told apart by shape.
        tied: aliases under ``tie_word_embeddings``.
        optional: beginnings of canonical names that a file may hold or lack, with placeholders: what is absent keeps
            its initial values, what the model does not want is dropped; both are said. The names of one beginning and
            one number, or of all ``{layer}``, are all there or all absent, and what lies in a file beside a weight that
            the model reads, as its bias, it wants too. An earlier beginning wins. Where layers of the model itself are
            called alike, a group is one of these only by a name that no such layer has.
        sizes: the family's own sizes, beside and before :data:`SIZES`.
        numbers: the family's own numbers, beside and before :data:`NUMBERS`.
        defaults: what the model's class takes for configuration keys that a ``config.json`` does not hold.
        tiny: a configuration of a few thousand elements, on which the family is proved when it is registered.
        exported: keys that an exported ``config.json`` has beside those that PaddleFormers writes, and the expressions
            that give their values: what other libraries call a size, and what PaddleFormers drops.
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


def same(
    name: str, source: str | None = None, shape: tuple[str, ...] = (), cut: int | None = None, dtype: str = ""
) -> Statements:
    """A tensor that is equal in both spaces.

    Args:
        name: the model's name.
        source: its canonical name, where that differs.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts.
        dtype: its dtype, where that is not the model's.
    """
    return expanded(Statement(name, (source or name,), Geometry.SAME, shape=shape, cut=cut, dtype=dtype))


def linear(
    name: str, source: str | None = None, shape: tuple[str, ...] = (), cut: int | None = None, dtype: str = ""
) -> Statements:
    """A linear layer's weight: [out, in] in canonical files, [in, out] in Paddle. Arguments as of :func:`same`."""
    return expanded(Statement(name, (source or name,), Geometry.LINEAR, shape=shape, cut=cut, dtype=dtype))


def fresh(name: str, shape: tuple[str, ...] = (), where: str = "") -> Statements:
    """A tensor that canonical files never hold: it keeps its initial values, and no export has it.

    Args:
        name: the model's name.
        shape: the size of every axis.
        where: the condition under which a model has the tensor.
    """
    return expanded(Statement(name, (), Geometry.SAME, shape=shape, where=where))


def fused(
    name: str, sources: Iterable[str], geometry: Geometry, shape: tuple[str, ...] = (), cut: int | None = None
) -> Statements:
    """A tensor whose output axis holds several parts.

    Args:
        name: the model's name.
        sources: its canonical names: one per part, or one that holds all parts one behind the other.
        geometry: how the parts lie in the model.
        shape: the size of every axis.
        cut: the axis that tensor parallelism cuts.
    """
    return expanded(Statement(name, tuple(sources), geometry, shape=shape, cut=cut))


def declared(*groups: Statements) -> Statements:
    """All statements of several groups, in order."""
    return tuple(itertools.chain.from_iterable(groups))


def only(where: str, *groups: Statements) -> Statements:
    """The same statements, for models that fulfil a condition as well."""
    return tuple(
        replace(statement, where=f"({statement.where}) and ({where})" if statement.where else where)
        for statement in declared(*groups)
    )


def renamed(names: Mapping[str, str], *groups: Statements) -> Statements:
    """The same statements with other canonical names: every text is replaced where it occurs, in the order given."""

    def canonical(name: str) -> str:
        for text, other in names.items():
            name = name.replace(text, other)
        return name

    return _with_sources(canonical, groups)


def stacked(name: str, axis: int, new: bool, group: Statements) -> Statements:
    """The experts of one layer in one tensor.

    Args:
        name: the model's name of the stack.
        axis: its axis along which the experts lie.
        new: whether the experts do not have that axis themselves.
        group: the one statement of a single expert.
    """
    (one,) = group
    shape = (
        ("experts", *one.shape)
        if new
        else tuple(f"experts * ({size})" if index == axis else size for index, size in enumerate(one.shape))
    )
    return (replace(one, target=name, stack=Stack(axis, new), shape=shape),)


def as_stored(group: Statements) -> Statements:
    """The same weights kept [out, in] as in canonical files: the parts lie along the first axis."""
    return tuple(
        replace(one, turned=False, shape=one.shape[::-1], cut=None if one.cut is None else len(one.shape) - 1 - one.cut)
        for one in group
    )


def expanded(statement: Statement) -> Statements:
    """The statements that one with alternatives such as ``{q,k,v}`` stands for."""
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


def _with_sources(change: Callable[[str], str], groups: Iterable[Statements]) -> Statements:
    return tuple(
        replace(statement, sources=tuple(change(source) for source in statement.sources))
        for group in groups
        for statement in group
    )

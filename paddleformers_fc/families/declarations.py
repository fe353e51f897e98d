"""How a family is declared: one statement per kind of tensor, in the model's own names.

A statement names a model tensor with ``{layer}``, ``{expert}`` or ``{index}`` where a number stands, the canonical
(Hugging Face) tensors that it is made of, and its geometry. Curly braces with commas expand, as in a shell:
``{q,k,v}_proj`` are three statements. From these lines the rules of a real model follow, and their reverse.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from enum import Enum

_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


class Geometry(Enum):
    """The layouts a declaration can ask for; :mod:`paddleformers_fc.families.bind` turns them into rules."""

    SAME = "same"
    LINEAR = "linear"
    FUSED_QKV = "fused_qkv"
    FUSED_FFN = "fused_ffn"


@dataclass(frozen=True)
class Statement:
    """One kind of model tensor and the canonical tensors that it is made of.

    Args:
        target: the model's name, with ``{layer}``, ``{expert}``, ``{index}`` for numbers.
        sources: the canonical names, with the same placeholders.
        geometry: how the sources become the target.
    """

    target: str
    sources: tuple[str, ...]
    geometry: Geometry


@dataclass(frozen=True)
class TiedName:
    """An alias that is the owner's tensor whenever the model's configuration ties its word embeddings."""

    alias: str
    owner: str


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the family's name.
        model_types: values of ``config.json``'s ``model_type`` that belong to it.
        statements: one per kind of tensor.
        tied: aliases under ``tie_word_embeddings``.
        optional: prefixes of canonical names that a file may hold or lack: what is absent keeps its initial values,
            what the model does not want is dropped; both are said.
    """

    name: str
    model_types: tuple[str, ...]
    statements: tuple[Statement, ...]
    tied: tuple[TiedName, ...] = ()
    optional: tuple[str, ...] = ()


def same(name: str, source: str | None = None) -> tuple[Statement, ...]:
    """A tensor that is equal in both spaces; ``source`` where its canonical name differs."""
    return _statements(name, (source or name,), Geometry.SAME)


def linear(name: str, source: str | None = None) -> tuple[Statement, ...]:
    """A linear layer's weight: [out, in] in canonical files, [in, out] in Paddle."""
    return _statements(name, (source or name,), Geometry.LINEAR)


def fused_qkv(prefix: str, fused: str = "qkv_proj", leaf: str = "weight") -> tuple[Statement, ...]:
    """Query, key and value under ``prefix``, fused per kv head as [q..q k v] on the output axis."""
    return _statements(
        f"{prefix}.{fused}.{leaf}", tuple(f"{prefix}.{x}_proj.{leaf}" for x in "qkv"), Geometry.FUSED_QKV
    )


def fused_ffn(prefix: str, fused: str = "up_gate_proj", leaf: str = "weight") -> tuple[Statement, ...]:
    """Gate and up projection under ``prefix``, fused per tensor-parallel rank as [gate | up] on the output axis."""
    return _statements(
        f"{prefix}.{fused}.{leaf}", tuple(f"{prefix}.{x}_proj.{leaf}" for x in ("gate", "up")), Geometry.FUSED_FFN
    )


def declared(*groups: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """All statements of a family, in order."""
    return tuple(itertools.chain.from_iterable(groups))


def _statements(target: str, sources: tuple[str, ...], geometry: Geometry) -> tuple[Statement, ...]:
    found = _ALTERNATIVES.search(target)
    if found is None:
        return (Statement(target, sources, geometry),)
    options = found.group(1).split(",")
    return tuple(
        statement
        for option in options
        for statement in _statements(
            target.replace(found.group(0), option),
            tuple(source.replace(found.group(0), option) for source in sources),
            geometry,
        )
    )

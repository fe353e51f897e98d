"""The data of a family declaration: one statement per kind of tensor, in the names of the model.

A statement contains the name of a model tensor with ``{layer}``, ``{expert}`` or another placeholder for each number,
the canonical (Hugging Face) tensors that it consists of, and its geometry. It also contains the shape, the axis that
tensor parallelism cuts, and the conditions under which a model has the tensor. Digits in a name are literal:
``mlp.0.weight``. :mod:`paddleformers_fc.families.language` has the verbs that declare statements.

Two results are derived from statements: the rules of a real model and their reverse
(:mod:`paddleformers_fc.families.bind`), and the list of tensors that a configuration gives
(:mod:`paddleformers_fc.families.enumerate`). Binding depends on the geometry alone: a tensor is bound whatever shape,
cut and condition are declared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from paddleformers_fc.families.sizes import Conditions, OneOf, Size, names_of
from paddleformers_fc.mapping.rules import flat

PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""A placeholder in a declared name; its group is the placeholder itself."""

NUMBER = re.compile(r"(?<=\.)([0-9]{1,18})(?=\.|\Z)")
"""A number in a tensor name."""

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


class Stack(Enum):
    """How the experts of one layer lie in one tensor, in order along its first axis."""

    ROWS = "one below the other"
    NEW_AXIS = "on an axis of their own"


class Statement(msgspec.Struct, frozen=True):
    """One kind of model tensor and the canonical tensors that it consists of.

    Args:
        target: the name in the model, with placeholders for numbers.
        sources: the canonical names, with the same placeholders: one that holds all parts, or one per part. Empty for
            a tensor that always keeps its initial values. For a stack, the names of one expert, with ``{expert}``, or
            the name of the canonical stack.
        geometry: the relation of the sources and the target.
        turned: whether canonical [out, in] is [in, out] in the model. Ignored for tensors of one axis.
        stack: the layout of the experts in a target that holds those of a whole layer.
        shape: the size of every axis; of a stack, that of a single expert.
        cut: the axis that tensor parallelism cuts, if any.
        where: the conditions under which a model has the tensor; none for always.
        dtype: the dtype of the tensor where it differs from the model's; empty for the model's.
        model_class: the model class that has the tensor; None for both. ``family`` turns it into a condition.
        tower: the tower whose sizes the statement refers to; empty for the family itself.
        parts: the lengths of the parts of a fused layer, such as query, key and value. Those of parts that lie in one
            of several sources are a tuple. Empty for heads of one size.
        groups: the number of groups in which such a source interleaves its parts.
        siblings: the last parts of the names of all tensors that its source holds, in order and of one length, if it
            holds several. They lie in one scope of the model.
        stage: its place in a pipeline; None for that of its tower, or beside the head. Ignored for tensors of layers.
        trained: whether an optimizer updates it.
        layer: the number that functions of conditions and shapes get as ``layer``, of tensors without ``{layer}``.
    """

    target: str
    sources: tuple[str, ...]
    geometry: Geometry = Geometry.SAME
    turned: bool = True
    stack: Stack | None = None
    shape: tuple[Size, ...] = ()
    cut: int | None = None
    where: Conditions = ()
    dtype: str = ""
    model_class: ModelClass | None = None
    tower: str = ""
    parts: tuple[str | tuple[str, ...], ...] = ()
    groups: Size = 1
    siblings: tuple[str, ...] = ()
    stage: Stage | None = None
    trained: bool = True
    layer: Size = ""

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of the target in order: names of placeholders, and digits where the number is literal."""
        return tuple(_ANY_NUMBER.findall(self.target))

    @property
    def lengths(self) -> tuple[str, ...]:
        """The length of every part that is declared."""
        return flat(self.parts)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape) + (self.stack is Stack.NEW_AXIS)

    @property
    def names(self) -> frozenset[str]:
        """The names that its conditions, shape and parts use."""
        sizes = (*(one for one, _ in self.where), *self.shape, *self.parts, self.groups)
        own = frozenset(name for one in sizes for name in names_of(one))
        own |= frozenset(names_of(self.layer)) if "layer" in own and self.layer else frozenset()
        return own | {"experts"} if self.stack is not None else own


Statements = tuple[Statement, ...]


class Numbers(msgspec.Struct, frozen=True):
    """The range of numbers of a placeholder.

    Args:
        name: the placeholder, without braces.
        count: the length of the range.
        start: the first number in canonical names.
        shift: the difference between a number in the model and the canonical number.
    """

    name: str
    count: Size
    start: Size = 0
    shift: Size = 0


class TiedName(msgspec.Struct, frozen=True):
    """An alias of the owner's tensor if the model's configuration ties its word embeddings and fulfils conditions."""

    alias: str
    owner: str
    where: Conditions = ()


class OptionalName(msgspec.Struct, frozen=True):
    """The beginning of canonical names that a file may lack."""

    beginning: str


class Tower(msgspec.Struct, frozen=True):
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
    sizes: Mapping[str, Size] = msgspec.field(default_factory=dict)
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    flat: bool = False


Part = Statement | TiedName | OptionalName
Parts = tuple[Part, ...]
"""What a verb of a declaration gives."""


SIZES: Mapping[str, Size] = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": lambda num_key_value_heads, heads: num_key_value_heads or heads,
    "head": lambda head_dim, hidden, heads: head_dim or hidden // heads,
    "q": lambda heads, head: heads * head,
    "kv": lambda kv_heads, head: kv_heads * head,
    "ffn": "intermediate_size",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": lambda expert_ffn, n_shared_experts: expert_ffn * n_shared_experts,
    "experts": OneOf(("num_experts", "num_local_experts", "n_routed_experts")),
    "mtp_layers": lambda num_nextn_predict_layers: num_nextn_predict_layers or 0,
    "latent_query": lambda heads, qk_nope_head_dim, qk_rope_head_dim: heads * (qk_nope_head_dim + qk_rope_head_dim),
    "latent_kv": lambda heads, qk_nope_head_dim, v_head_dim: heads * (qk_nope_head_dim + v_head_dim),
    "latent_value": lambda heads, v_head_dim: heads * v_head_dim,
    "delta_keys": lambda linear_num_key_heads, linear_key_head_dim: linear_num_key_heads * linear_key_head_dim,
    "delta_values": lambda linear_num_value_heads, linear_value_head_dim: (
        linear_num_value_heads * linear_value_head_dim
    ),
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


class Family(msgspec.Struct, frozen=True):
    """One model family.

    Args:
        name: the ``model_type`` of its configurations.
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
        exported: keys of an exported ``config.json`` beside those that PaddleFormers writes, and their values: the
            names of other libraries for a size, and keys that PaddleFormers drops.
        towers: parts of the model with sizes of their own.
        built: the parts that the class builds after :data:`BUILT`, in order, by the beginnings of names.
        divided: sizes of :data:`DIVIDED` that the class itself compares with the degree of tensor parallelism.
    """

    name: str
    statements: Statements
    tied: tuple[TiedName, ...] = ()
    optional: tuple[str, ...] = ()
    sizes: Mapping[str, Size] = msgspec.field(default_factory=dict)
    numbers: tuple[Numbers, ...] = ()
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    tiny: Mapping[str, Any] = msgspec.field(default_factory=dict)
    exported: Mapping[str, Size] = msgspec.field(default_factory=dict)
    towers: tuple[Tower, ...] = ()
    built: tuple[str, ...] = ()
    divided: tuple[str, ...] = tuple(DIVIDED)

    @property
    def numbered(self) -> dict[str, Numbers]:
        """The numbers of every placeholder."""
        return {one.name: one for one in (*NUMBERS, *self.numbers)}

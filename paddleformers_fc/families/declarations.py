"""The data types of a family declaration: one statement per kind of tensor.

A statement contains the name of a model tensor, with a placeholder such as ``{layer}`` or ``{expert}`` for each number,
the canonical (Hugging Face) tensors that it consists of, and its geometry. It also has the shape, the axis that tensor
parallelism cuts, and the conditions under which a model has the tensor. Digits in a name are literal:
``mlp.0.weight``. :mod:`paddleformers_fc.families.language` has the functions that declare statements.

Statements give the rules of a real model and their reverse (:mod:`paddleformers_fc.families.bind`), and the tensors of
a configuration (:mod:`paddleformers_fc.families.enumerate`). Binding uses only the geometry, whatever shape, cut and
conditions are declared.
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
"""A placeholder in a declared name; its group is the name without braces."""

NUMBER = re.compile(r"(?<=\.)([0-9]{1,18})(?=\.|\Z)")
"""A number in a tensor name."""

_ANY_NUMBER = re.compile(r"(?<=\{)\w+(?=\})|(?<=\.)[0-9]{1,18}(?=\.|\Z)")


class ModelClass(Enum):
    """The two kinds of model classes. They have different names and layouts for the same tensors."""

    FLEET = "PaddleFleet"
    FORMERS = "PaddleFormers"


FLEET, FORMERS = ModelClass.FLEET, ModelClass.FORMERS


class Geometry(Enum):
    """How a tensor relates to its canonical tensors; :mod:`paddleformers_fc.families.bind` derives rules from it."""

    SAME = "same"
    LINEAR = "linear"
    FUSED_QKV = "fused_qkv"
    FUSED_QKV_PER_RANK = "fused_qkv_old"
    FUSED_FFN = "fused_ffn"
    ALTERNATING_FFN = "alternating_ffn"


class Stage(Enum):
    """The pipeline stage of a tensor outside of the model's layers."""

    FIRST = "with the embedding"
    NORM = "after the last layer"
    LAST = "with the head"
    ABSENT = "in no pipeline"


class Stack(Enum):
    """How the experts of a layer are stacked in one tensor, along its first axis."""

    ROWS = "concatenated"
    NEW_AXIS = "on a new axis"


class Statement(msgspec.Struct, frozen=True):
    """One kind of model tensor and the canonical tensors that it consists of.

    Args:
        target: the name in the model, with placeholders for numbers.
        sources: the canonical names, with the same placeholders: one with all parts, or one per part. Empty for a
            tensor that always keeps its initial values. For a stack, the names of one expert, with ``{expert}``, or
            the name of the canonical stack.
        geometry: how the target consists of the sources.
        transposed: whether canonical [out, in] is [in, out] in the model. Ignored for tensors of one axis.
        stack: how the target stacks the experts of a layer; None if it does not.
        shape: the size of every axis; for a stack, the shape of a single expert.
        cut: the axis that tensor parallelism cuts, if any.
        where: the conditions under which a model has the tensor; empty for always.
        dtype: the dtype if it differs from the model's; else empty.
        model_class: the model class that has the tensor; None for both. ``family`` converts it to a condition.
        tower: the tower whose sizes the statement uses; empty for the family's sizes.
        parts: the lengths of the parts of a fused layer, such as query, key and value. A tuple lists parts of one
            source, if there are several. Empty for heads of one size.
        groups: the number of groups in which such a source interleaves its parts.
        siblings: if the source contains several tensors of equal length in one scope of the model, the last parts of
            their names, in order.
        stage: the pipeline stage; None for the stage of its tower, or the last one. Ignored for tensors of layers.
        trained: whether an optimizer updates it.
        layer: the value that conditions and shapes get as ``layer``, for tensors without ``{layer}``.
    """

    target: str
    sources: tuple[str, ...]
    geometry: Geometry = Geometry.SAME
    transposed: bool = True
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
        """The numbers in the target's name, in order: names of placeholders, and literal digits."""
        return tuple(_ANY_NUMBER.findall(self.target))

    @property
    def lengths(self) -> tuple[str, ...]:
        """The length of every declared part."""
        return flat(self.parts)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape) + (self.stack is Stack.NEW_AXIS)

    @property
    def names(self) -> frozenset[str]:
        """The names of sizes that its conditions, shape and parts use."""
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
        shift: the number in the model minus the canonical number.
    """

    name: str
    count: Size
    start: Size = 0
    shift: Size = 0


class TiedName(msgspec.Struct, frozen=True):
    """An alias of the owner if the configuration ties word embeddings and meets the conditions."""

    alias: str
    owner: str
    where: Conditions = ()


class OptionalName(msgspec.Struct, frozen=True):
    """A prefix of canonical names that a file may lack."""

    beginning: str


class Tower(msgspec.Struct, frozen=True):
    """A part of a model with its own sizes, such as a vision tower.

    Args:
        name: its name; ``vision.hidden`` is the size ``hidden`` of tower ``vision``.
        key: the path of its nested configuration, such as ``vision_config``.
        statements: its statements; the family's statements include them.
        numbers: the placeholder of its layers.
        sizes: its sizes, which take precedence over :data:`SIZES`.
        defaults: the class's values for keys that the nested configuration lacks.
        flat: whether the keys are on the top level if there is no nested configuration.
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
"""The result of a function of :mod:`.language`."""


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
    "empty": lambda num_empty_layers_add_in_head: num_empty_layers_add_in_head or 0,
    "latent_query": lambda heads, qk_nope_head_dim, qk_rope_head_dim: heads * (qk_nope_head_dim + qk_rope_head_dim),
    "latent_kv": lambda heads, qk_nope_head_dim, v_head_dim: heads * (qk_nope_head_dim + v_head_dim),
    "latent_value": lambda heads, v_head_dim: heads * v_head_dim,
    "delta_keys": lambda linear_num_key_heads, linear_key_head_dim: linear_num_key_heads * linear_key_head_dim,
    "delta_values": lambda linear_num_value_heads, linear_value_head_dim: (
        linear_num_value_heads * linear_value_head_dim
    ),
}
"""Sizes that most families share; a family's own sizes take precedence."""

DIVIDED = {"vocab": "vocab_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
"""Sizes that the degree of tensor parallelism divides, and their keys."""

TEXT_EXPERTS = "text_experts"
"""The number of text experts, in families with experts of two modalities. Expert-parallel ranks share the experts of
each modality."""

BUILT = ("embed", "layers", "norm")
"""The parts that every class builds first, in order, by the prefixes of names under ``model.``."""

NUMBERS: tuple[Numbers, ...] = (Numbers("layer", "layers"), Numbers("expert", "experts"))
"""Numbers that most families share; a family's own numbers take precedence."""


class Family(msgspec.Struct, frozen=True):
    """One model family.

    Args:
        name: the ``model_type`` of its configurations.
        statements: one per kind of tensor. Shape and conditions distinguish statements of one name.
        tied: aliases under ``tie_word_embeddings``.
        optional: prefixes of canonical names that a file may lack, with placeholders. Tensors that the file lacks keep
            their initial values; tensors that the model lacks are dropped. Both are reported. All names with one prefix
            and number (all numbers for ``{layer}``) are present or absent together. Stored tensors of a layer that the
            model reads in part, such as a bias, are never dropped. Earlier prefixes take precedence. If a prefix also
            matches layers of the model, a group is optional only if it has a name that no such layer has.
        sizes: the family's sizes, which take precedence over :data:`SIZES`.
        numbers: the family's numbers, which take precedence over :data:`NUMBERS`.
        defaults: the class's values for keys that a ``config.json`` lacks.
        tiny: a configuration of a few thousand elements, on which the family is proved when it is registered.
        exported: additional keys of an exported ``config.json``, with their values: names of sizes in other libraries,
            and keys that PaddleFormers drops.
        towers: parts of the model with their own sizes.
        built: the parts that the class builds after :data:`BUILT`, in order, by the prefixes of their names.
        divided: sizes of :data:`DIVIDED` that the class itself checks against the degree of tensor parallelism.
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

"""The description of a model that determines its mapping: resolved configuration, class, and LoRA adapters.

A configuration file is not sufficient: PaddleFormers omits keys when it writes one, and no key contains the class of
the model. A live model is therefore described by its live configuration (:mod:`paddleformers_fc.trainer.description`),
and a checkpoint stores the description.

A linear layer with an adapter has two more tensors, ``lora_A`` [in, r] and ``lora_B`` [r, out], in the layout of its
inputs and outputs. Their statements are derived from the layer's statement. Canonical names and orientation follow
Hugging Face PEFT: ``q_proj.lora_A.weight`` [r, in] and ``q_proj.lora_B.weight`` [out, r]. A fused layer has one
canonical ``lora_A`` under its own name (``qkv_proj``), and one ``lora_B`` per part. Patterns of a description may come
from a file, and are never evaluated here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import structs

from paddleformers_fc.families.declarations import Family, Geometry, Statement, Statements
from paddleformers_fc.mapping import RuleSet

A, B = "lora_A", "lora_B"
"""The last part of the names of an adapter's tensors in a model."""

MAX_RANK = 1 << 20

_WEIGHT = ".weight"
_WITH_PARTS = (Geometry.FUSED_QKV, Geometry.FUSED_QKV_PER_RANK, Geometry.FUSED_FFN)


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The weights that adapters were trained on.

    Args:
        location: the directory that they were read from; empty if they were not read from files.
        files: the xxh3_128 of every weight file, by name.
        tensors: without files, a digest of the canonical tensors, independent of the layout.
    """

    location: str = ""
    files: dict[str, str] = {}
    tensors: str = ""

    @property
    def contents(self) -> dict[str, str]:
        """The properties that identify the base. The location is not one of them, because a base can be moved."""
        return {**self.files, **({"tensors": self.tensors} if self.tensors else {})}


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The adapters of a model.

    Args:
        r: the rank, which is the length of the axis that ``lora_A`` and ``lora_B`` share.
        alpha: the numerator of :attr:`scaling`.
        rslora: whether the denominator of :attr:`scaling` is the square root of the rank.
        target_modules: patterns of the layers with adapters; each must match the full name of a PaddleFormers layer.
        trainable_modules: patterns of other trained tensors.
        trainable_bias: which biases are trained: of layers with adapters (``lora``), ``all`` or none.
        dropout: dropout of the adapters' inputs in training.
        plus_scale: the learning-rate factor of ``lora_B``.
        base: the weights that the adapters were trained on.

    Raises:
        ValueError: alpha is not finite.
    """

    r: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    alpha: float
    rslora: bool = False
    target_modules: tuple[str, ...] = ()
    trainable_modules: tuple[str, ...] = ()
    trainable_bias: str | None = None
    dropout: float = 0.0
    plus_scale: float = 1.0
    base: Base = Base()

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha: {self.alpha}: it must be finite")

    @property
    def scaling(self) -> float:
        """The factor of ``lora_A @ lora_B``."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def settings(self) -> dict[str, object]:
        """All settings by key, for the comparison of two runs."""
        values = msgspec.structs.asdict(self)
        return {**values, "base": self.base.contents, "location": self.base.location}


def with_adapters(family: Family, adapters: Adapters | None) -> Family:
    """Return the family with the statements of the adapters; the family itself if there are none."""
    if adapters is None:
        return family
    derived = [one for statement in family.statements for one in _of_layer(statement, adapters.r)]
    return structs.replace(family, statements=(*family.statements, *derived))


def is_adapter(name: str) -> bool:
    """Return whether a tensor, by its canonical name or its name in a model, belongs to an adapter."""
    module = name.removesuffix(_WEIGHT)
    return module.endswith((f".{A}", f".{B}"))


def shared_inputs(rules: RuleSet) -> dict[str, tuple[str, ...]]:
    """Return the canonical ``lora_A`` of every fused layer, with its names for each part of the layer."""
    sources = {rule.targets[0]: rule.sources for rule in rules.rules}
    found: dict[str, tuple[str, ...]] = {}
    for target, parts in sources.items():
        inputs = sources.get(f"{target.removesuffix(B)}{A}") if target.endswith(f".{B}") and len(parts) > 1 else None
        if inputs is not None:
            found[inputs[0]] = tuple(f"{part.removesuffix(f'{B}{_WEIGHT}')}{A}{_WEIGHT}" for part in parts)
    return found


def shared_copies(rules: RuleSet) -> dict[str, str]:
    """Return the inverse of :func:`shared_inputs`: PEFT's files have one copy per part of a fused layer."""
    return {copy: name for name, copies in shared_inputs(rules).items() for copy in copies}


def layer_patterns(leaves: Iterable[str]) -> list[str]:
    """Return PaddleFormers' patterns for all layers whose names end with these parts."""
    return [rf".*\.{re.escape(leaf)}" for leaf in sorted(leaves)]


def _of_layer(layer: Statement, rank: int) -> Statements:
    """Return the statements of a layer's adapter; none if the layer is not linear."""
    fused = layer.geometry in _WITH_PARTS
    linear = (fused or layer.geometry is Geometry.LINEAR) and layer.target.endswith(_WEIGHT) and len(layer.shape) == 2
    if not linear or not layer.transposed or layer.stack is not None or not layer.sources:
        return ()
    module = layer.target.removesuffix(_WEIGHT)
    parts = [source.removesuffix(_WEIGHT) for source in layer.sources]
    # The parts of a fused layer share ``lora_A``, which is named after the fused layer in the scope of the parts.
    shared = parts[0] if len(parts) == 1 else f"{parts[0].rpartition('.')[0]}.{module.rpartition('.')[2]}"
    inputs, outputs = layer.shape
    return (
        structs.replace(
            layer,
            target=f"{module}.{A}",
            sources=(f"{shared}.{A}{_WEIGHT}",),
            geometry=Geometry.LINEAR,
            shape=(inputs, rank),
            cut=0 if layer.cut == 0 else None,
            parts=(),
        ),
        structs.replace(
            layer,
            target=f"{module}.{B}",
            sources=tuple(f"{part}.{B}{_WEIGHT}" for part in parts),
            shape=(rank, outputs),
            cut=1 if layer.cut == 1 else None,
        ),
    )


IS_FLEET = "is_fleet"
"""The name in declarations for "the model's class is from PaddleFleet". It is never a configuration key."""

IS_NLP = "is_nlp"
"""A key of descriptions, never of configuration files: the model's class is from PaddleNLP."""

ALTERNATES = "experts_alternate"
"""A key of descriptions, never of configuration files: rows of gate and up alternate in stacked experts, as in training
with ``using_sonic_moe``."""

STACK_OF_FFN = ".grouped_gemm_experts.weight1"
"""The ending of the names of such stacks."""

_PLAIN_SUFFIX = "Deprecated"
"""The ending of the name of PaddleFormers' class in families that also have a PaddleFleet class."""


class ModelDescription(msgspec.Struct, frozen=True):
    """What binding needs besides the tensors of a model.

    Args:
        config: the resolved configuration: every key, including nested keys, with the value that the model was built
            with.
        is_fleet: whether the model's class is from PaddleFleet; None if unknown, which is an error if a declaration
            depends on it.
        rules: the rules of the complete model if they are user-mapped; None if its family declares them.
        adapters: the model's adapters, if it has any. Only trained tensors are then mapped.
        is_global: whether fused tensors have the layout of one device however they are sharded, as in semi-automatic
            parallelism. This is not stored, because the stored rules then have cuts of 1.
        partial: whether ``config`` is from a file, which may lack keys that the model was built with.
    """

    config: Mapping[str, Any]
    is_fleet: bool | None = None
    rules: RuleSet | None = None
    adapters: Adapters | None = None
    is_global: bool = False
    partial: bool = False

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the configuration."""
        return str(self.config.get("model_type"))


def described_by_file(config: Mapping[str, Any]) -> ModelDescription:
    """Describe the model that PaddleFormers builds from a ``config.json``.

    Args:
        config: the content of the file.
    Returns:
        the description; its class is unknown if ``architectures`` does not name one.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[-1], str):
        return ModelDescription(config)
    return ModelDescription(config, not names[-1].endswith(_PLAIN_SUFFIX))

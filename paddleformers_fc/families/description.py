"""The description of a model on which its mapping depends: its resolved configuration, and its class.

A configuration file is not sufficient. PaddleFormers omits keys when it writes one (empty layers before the first
layer, fused experts), and no key contains the class of the model. A live model is therefore described by its live
configuration (:mod:`paddleformers_fc.trainer.description`), and a checkpoint stores the description.

Low-rank adapters (LoRA): a description of them, and statements derived from the linear layers of the family.

A linear layer with an adapter has two more tensors: ``lora_A`` [in, r] and ``lora_B`` [r, out]; its weight becomes
``weight + lora_A @ lora_B * scaling``. Their geometry follows from the weight:

* ``lora_A`` reads the inputs of the layer: one tensor, also for fused layers, cut where the weight is cut by rows.
* ``lora_B`` has the outputs of the layer: the parts and groups of a fused weight, cut where it is cut by columns.

Canonical names and orientation are those of Hugging Face PEFT: ``q_proj.lora_A.weight`` [r, in] and
``q_proj.lora_B.weight`` [out, r]. A fused layer has one canonical ``lora_A`` under its own name (``qkv_proj``), and one
``lora_B`` per part.

The statements that are derived are bound, enumerated and proved as those of the family. Patterns of a description are
never evaluated here: they may come from a file.
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
"""The last part of the name of an adapter's tensor in a model."""

MAX_RANK = 1 << 20

_WEIGHT = ".weight"
_WITH_PARTS = (Geometry.FUSED_QKV, Geometry.FUSED_QKV_PER_RANK, Geometry.FUSED_FFN)


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The weights that adapters were trained on.

    Args:
        location: the directory that they were read from; empty if they were not read from files.
        files: the xxh3_128 of every file of weights, by its name in that directory.
        tensors: without files, a digest of the canonical tensors, which does not depend on a layout.
    """

    location: str = ""
    files: dict[str, str] = {}
    tensors: str = ""

    @property
    def contents(self) -> dict[str, str]:
        """Return the properties that must be equal: the base may be moved."""
        return {**self.files, **({"tensors": self.tensors} if self.tensors else {})}


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The adapters of a model.

    Args:
        r: the rank: the length of the axis that ``lora_A`` and ``lora_B`` share.
        alpha: the numerator of :attr:`scaling`.
        rslora: whether the denominator of :attr:`scaling` is the square root of the rank.
        target_modules: patterns of the layers with adapters; each matches a whole name of a layer of PaddleFormers.
        trainable_modules: patterns of other tensors that are trained.
        trainable_bias: the biases that are trained: those of layers with adapters (``lora``), ``all`` or none.
        dropout: of the inputs of adapters, in training.
        plus_scale: the factor of the learning rate of ``lora_B``.
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
        """Return what two runs compare, by key."""
        values = msgspec.structs.asdict(self)
        return {**values, "base": self.base.contents, "location": self.base.location}


def with_adapters(family: Family, adapters: Adapters | None) -> Family:
    """Return a family with the statements of adapters of one rank; the family itself if a model has none."""
    if adapters is None:
        return family
    derived = [one for statement in family.statements for one in _of_layer(statement, adapters.r)]
    return structs.replace(family, statements=(*family.statements, *derived))


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a model or a canonical tensor is one of an adapter, by its name."""
    module = name.removesuffix(_WEIGHT)
    return module.endswith((f".{A}", f".{B}"))


def shared_inputs(rules: RuleSet) -> dict[str, tuple[str, ...]]:
    """Return the canonical ``lora_A`` of every fused layer, and the names that it would have in each of its parts."""
    sources = {rule.targets[0]: rule.sources for rule in rules.rules}
    found: dict[str, tuple[str, ...]] = {}
    for target, parts in sources.items():
        inputs = sources.get(f"{target.removesuffix(B)}{A}") if target.endswith(f".{B}") and len(parts) > 1 else None
        if inputs is not None:
            found[inputs[0]] = tuple(f"{part.removesuffix(f'{B}{_WEIGHT}')}{A}{_WEIGHT}" for part in parts)
    return found


def shared_copies(rules: RuleSet) -> dict[str, str]:
    """Return :func:`shared_inputs` by copy: in PEFT's files each part of a fused layer has one."""
    return {copy: name for name, copies in shared_inputs(rules).items() for copy in copies}


def layer_patterns(leaves: Iterable[str]) -> list[str]:
    """Return the patterns of PaddleFormers for all layers with some last parts of names."""
    return [rf".*\.{re.escape(leaf)}" for leaf in sorted(leaves)]


def _of_layer(layer: Statement, rank: int) -> Statements:
    """Return the statements of an adapter of one kind of layer; none if the layer is not a linear one."""
    fused = layer.geometry in _WITH_PARTS
    linear = (fused or layer.geometry is Geometry.LINEAR) and layer.target.endswith(_WEIGHT) and len(layer.shape) == 2
    if not linear or not layer.turned or layer.stack is not None or not layer.sources:
        return ()
    module = layer.target.removesuffix(_WEIGHT)
    parts = [source.removesuffix(_WEIGHT) for source in layer.sources]
    # The parts of a fused layer share their inputs, under the name of the layer beside them.
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
"""The name of the class of a model in declarations. It is never a key of a configuration."""

IS_NLP = "is_nlp"
"""The key of a description, never of a configuration file, that is true if the model's class is one of PaddleNLP."""

ALTERNATES = "experts_alternate"
"""The key of a description, never of a configuration file, that is true in training under ``using_sonic_moe``: rows of
gate and up alternate in a stack of experts."""

STACK_OF_FFN = ".grouped_gemm_experts.weight1"
"""The end of the name of such a stack."""

_PLAIN_SUFFIX = "Deprecated"
"""The end of the name of PaddleFormers' class in families that have a class of PaddleFleet as well."""


class ModelDescription(msgspec.Struct, frozen=True):
    """The input of binding beside the tensors of a model.

    Args:
        config: the resolved configuration: every key, also nested ones, with the value that the model was built with.
        is_fleet: whether the model's class is one of PaddleFleet; None if unknown, which is an error if a declaration
            depends on it.
        rules: the rules of the whole model, if a caller states them; None if its family declares them.
        adapters: the adapters of the model, if it has any. Its tensors are then those that are trained.
        is_global: whether fused tensors have the layout of one device, however ranks divide them, as those of
            semi-automatic parallelism do. It is not stored: the cuts of the stored rules are then 1.
        partial: whether ``config`` is that of a file, so that keys may be absent that the model was built with.
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
        a description without a class if ``architectures`` names none.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[-1], str):
        return ModelDescription(config)
    return ModelDescription(config, not names[-1].endswith(_PLAIN_SUFFIX))

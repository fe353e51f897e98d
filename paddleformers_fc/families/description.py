"""The description of a model on which its mapping depends: its resolved configuration, and its class.

A configuration file is not sufficient. PaddleFormers omits keys when it writes one (empty layers before the first
layer, fused experts), and no key contains the class of the model. A live model is therefore described by its live
configuration (:mod:`paddleformers_fc.trainer.description`), and a checkpoint stores the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddleformers_fc.families.adapters import Adapters
from paddleformers_fc.mapping import RuleSet

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


@dataclass(frozen=True)
class ModelDescription:
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

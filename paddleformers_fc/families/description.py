"""What a model is, as far as its mapping depends on it: the configuration it was built from, and its class.

A configuration file is not enough. PaddleFormers leaves keys out when it writes one (empty layers before the first
layer, fused experts), and no key of it names the class of the model. So a live model is described by its live
configuration (:mod:`paddleformers_fc.trainer.description`), and a checkpoint stores that description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IS_FLEET = "is_fleet"
"""The name by which declarations ask for the class of a model. It is never a key of a configuration."""

_PLAIN_SUFFIX = "Deprecated"
"""How PaddleFormers ends the name of its own class where a family has one of PaddleFleet as well."""


@dataclass(frozen=True)
class ModelDescription:
    """What binding needs to know about a model beside its tensors.

    Args:
        config: the resolved configuration: every key with the value that the model was built with, nested ones too.
        is_fleet: whether the model's class is one of PaddleFleet; None where this is not known, which is an error as
            soon as a declaration asks for it.
    """

    config: Mapping[str, Any]
    is_fleet: bool | None = None

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

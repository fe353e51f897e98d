"""Models and configurations of the library with the Trainer, recognised without importing it.

``save`` and ``load`` also serve models of Paddle alone, and importing PaddleFormers takes longer than importing Paddle.
An object of the library exists only where the library has been imported.
"""

from __future__ import annotations

import sys
from typing import Any

from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import PADDLENLP

if LIBRARY == PADDLENLP:
    from paddleformers_fc.trainer.nlp_models import described_values, sharded_state_dict
else:
    from paddleformers_fc.trainer.formers_models import described_values, sharded_state_dict

__all__ = ["described_values", "has_adapters", "is_config", "is_quantization", "sharded_state_dict", "unwrap_model"]


def unwrap_model(model: Any) -> Any:
    """Return a model without the parallel wrappers of Paddle."""
    while (inner := getattr(model, "_layers", None)) is not None or (
        inner := getattr(model, "_layer", None)
    ) is not None:
        model = inner
    return model


def has_adapters(model: Any) -> bool:
    """Return whether a model, without parallel wrappers, is a ``LoRAModel``."""
    return _is_a("LoRAModel", model)


def is_config(value: Any) -> bool:
    """Return whether a value is a ``PretrainedConfig``."""
    return _is_a("PretrainedConfig", value)


def is_quantization(value: Any) -> bool:
    """Return whether a value is a ``QuantizationConfig``."""
    return _is_a("QuantizationConfig", value)


def _is_a(name: str, value: Any) -> bool:
    if LIBRARY not in sys.modules:
        return False
    from paddleformers_fc.trainer import library_models

    return isinstance(value, getattr(library_models, name))

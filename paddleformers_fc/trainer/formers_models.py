"""What the models of PaddleFormers say of themselves, where those of PaddleNLP need :mod:`.nlp_models`."""

from __future__ import annotations

from typing import Any


def sharded_state_dict(model: Any) -> dict[str, Any]:
    """Return the shards of a model by name, as the model describes them."""
    found: dict[str, Any] = model.sharded_state_dict()
    return found


def described_values(config: Any) -> dict[str, Any]:
    """Return values that belong to the description of a model and are no keys of its configuration: none."""
    return {}

"""Jobs that run inside rank processes: what a derivation reads off real models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddleformers_fc.verification.derivation.layer_kinds import layer_kinds
from tests.families.jobs import _model


def layers(models: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per model the kind of every parameter's layer, the shape of every parameter, and the native statements.

    Args:
        models: their configurations, with ``model_type``.
    """
    found = []
    for config in models:
        model = _model(config, 1)
        found.append(
            {
                "kinds": {name: kind.value for name, kind in layer_kinds(model).items()},
                "shapes": {name: list(shard.global_shape) for name, shard in model.sharded_state_dict().items()},
                "hint": list(type(model)._gen_aoa_config(model.config)["aoa_statements"]),
            }
        )
    return found

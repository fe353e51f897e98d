"""Jobs that run inside rank processes: what a derivation reads off real models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
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


def from_weights(names: Sequence[str], output_dir: str) -> dict[str, list[str]]:
    """The statements that ``derive`` finds for fixtures of Transformers, by name, or the error.

    Args:
        names: of the fixtures.
        output_dir: a directory for them.
    """
    from paddleformers_fc.errors import FlexError
    from paddleformers_fc.verification.derivation.from_weights import derive_model
    from tests.harness import fleet_stub
    from tests.parity import fixtures

    fleet_stub.install()
    found: dict[str, list[str]] = {}
    for name in names:
        directory = fixtures.read(name).write(Path(output_dir))
        try:
            found[name] = derive_model(directory, (), True, None, ()).statements
        except FlexError as error:
            found[name] = ["refused", error.what, *error.evidence]
    return found

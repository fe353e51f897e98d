"""Jobs that run inside rank processes: how a real model and its optimizer describe their shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Described = dict[str, dict[str, list[Any]]]


def describe(model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str) -> dict[str, Any]:
    """Train one step under a layout; this rank's shards and the model's configuration, as JSON.

    Args:
        model_type: ``llama`` or ``ernie4_5_moe``.
        layout: a ``tiny.Layout`` as JSON.
        model: overrides of the model's configuration.
        output_dir: the Trainer's output directory.
    """
    from paddleformers_fc.layout.live import describe_roles
    from tests.harness import tiny

    # Multi-token prediction with its packing offsets takes one sample at a time.
    micro_batch = 1 if model.get("num_nextn_predict_layers") else None
    args = tiny.training_arguments(layout, output_dir, micro_batch, max_steps=1)
    built = tiny.build(model_type, layout, args, **model)
    trainer = tiny.trainer(built, args)
    trainer.train()
    weights = built.sharded_state_dict()
    if tiny.layout_from(layout).stage == 3:
        from paddleformers_fc.trainer import optimizers

        states = optimizers.sharded_states(trainer.optimizer, weights)
        roles: dict[str, dict[str, Any]] = {"model_state": optimizers.cut(weights)}
    else:
        states = trainer.optimizer.sharded_state_dict(weights)
        roles = {"model_state": weights}
    for name, state in states.items():
        roles.setdefault("master_weight" if name.endswith(".w_0") else "optimizer_state", {})[name] = state
    shards: Described = {
        role: {
            name: [shard.dtype, list(shard.global_shape), list(shard.box.lo), list(shard.box.shape), shard.flat]
            for name, shard in found.items()
        }
        for role, found in describe_roles(roles).items()
    }
    config = {
        key: value
        for key, value in built.config.to_dict().items()
        if isinstance(value, (str, int, float, bool, type(None)))
    }
    return {"shards": shards, "config": config}


def held(
    model_type: str, values: Mapping[str, Any], layout: Mapping[str, Any], output_dir: str
) -> dict[str, list[int]]:
    """The names and shapes of the weights that this rank holds of a model that is not trained.

    Args:
        model_type: the family.
        values: arguments of the configuration class.
        layout: a ``tiny.Layout`` as JSON.
        output_dir: the Trainer's output directory.
    """
    from tests.families import jobs
    from tests.harness import tiny

    tiny.training_arguments(layout, output_dir)  # It starts the groups of ranks.
    _, tensors = jobs.describe_plain(model_type, values)
    return {name: shape for name, (shape, _) in tensors.items()}

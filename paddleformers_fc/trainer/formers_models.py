"""The description of models of PaddleFormers; the counterpart of :mod:`.nlp_models`."""

from __future__ import annotations

from typing import Any

from paddle.distributed import ShardedWeight


def sharded_state_dict(model: Any) -> dict[str, Any]:
    """Return the shards of a model by name, as the model describes them.

    A head that is the parameter of a whole embedding is described as whole. Upstream's head describes its parameter as
    a part under tensor parallelism, also after ``tie_weights`` has replaced it.
    """
    found: dict[str, Any] = model.sharded_state_dict()
    weights = {name: weight for name, weight in found.items() if isinstance(weight, ShardedWeight)}
    whole = {weight.local_tensor.name for weight in weights.values() if not _is_part(weight)}
    replicated = {
        name: _whole(name, weight.local_tensor)
        for name, weight in weights.items()
        if _is_part(weight) and weight.local_tensor.name in whole and not weight.local_tensor.is_distributed
    }
    return found | replicated


def _is_part(weight: ShardedWeight) -> bool:
    return tuple(weight.local_shape) != tuple(weight.global_shape)


def described_values(config: Any) -> dict[str, Any]:
    """Return values that belong to the description of a model and are no keys of its configuration: none."""
    return {}


def _whole(name: str, tensor: Any) -> ShardedWeight:
    shape = tuple(tensor.shape)
    return ShardedWeight(name, tensor, shape, shape, (0,) * len(shape))

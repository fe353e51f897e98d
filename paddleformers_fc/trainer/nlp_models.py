"""Corrections for PaddleNLP: shards and configurations of its models, and samplers that can resume within an epoch.

PaddleNLP names tensors by their position in a pipeline stage, and describes tensor-parallel heads as unsharded although
their parameters have ``is_distributed`` and ``split_axis``. Parameters that are sharded without an axis are rejected.

On several processes PaddleNLP shuffles with Paddle's ``DistributedBatchSampler``, seeded by the epoch, which always
starts at the first sample. :class:`MappingDistributedBatchSampler` yields the same batches from any sample. A single
process uses this order too, because PaddleNLP's own order depends on a global generator and cannot be reproduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from paddle.distributed import ShardedWeight
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_tp_sharded_weight_for_checkpoint
from paddle.io import BatchSampler, DistributedBatchSampler, RandomSampler

from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.text import fold

_OTHER_MODELS = {
    "alibi": "attention biases encode positions",
    "use_long_sequence_strategies": "a long-sequence strategy encodes positions",
    "rope_scaling_type": "config.json cannot express this scaling of positions",
}
"""PaddleNLP's configuration keys that make exported weights another model in Transformers."""

_SCALINGS = {"llama": ("default", "llama3")}
"""The RoPE scalings that PaddleNLP's classes implement, by model type; other classes have only ``default``."""


def sharded_state_dict(model: Any) -> dict[str, Any]:
    """Return the shards of a model by the names that the model has on a single rank.

    Raises:
        MappingError: a parameter is sharded without an axis.
    """
    names = _single_names(model)
    found: dict[str, Any] = {}
    faults = []
    for key, weight in model.sharded_state_dict().items():
        name = names.get(key, key)
        if _is_misdescribed(weight):
            axis = getattr(weight.local_tensor, "split_axis", None)
            if axis is None:
                faults.append(f"{name}: shape {list(weight.local_shape)} on this rank")
                continue
            weight = make_tp_sharded_weight_for_checkpoint(name, weight.local_tensor, axis)
        weight.key = name
        found[name] = weight
    if faults:
        raise MappingError(
            f"{type(model).__name__} of PaddleNLP does not describe how tensor parallelism shards its tensors.",
            where=type(model).__module__,
            evidence=fold(faults),
            next_step="Train this model without tensor parallelism, or without flex_checkpoint.",
        )
    return found


def _single_names(model: Any) -> dict[str, str]:
    """Return the mapping from names in a pipeline stage to names on a single rank."""
    if not hasattr(model, "_set_pipeline_name_mapping"):
        return {}
    model._set_pipeline_name_mapping()
    names: dict[str, str] = model._pp_to_single_mapping
    return names


def _is_misdescribed(weight: Any) -> bool:
    """Return whether a tensor-parallel parameter is described as unsharded."""
    if not isinstance(weight, ShardedWeight) or not getattr(weight.local_tensor, "is_distributed", False):
        return False
    return tuple(weight.local_shape) == tuple(weight.global_shape)


def described_values(config: Any) -> dict[str, Any]:
    """Return the configuration values that PaddleFormers' models have and PaddleNLP's lack.

    Args:
        config: the configuration of a model.

    Raises:
        OptionError: a ``config.json`` cannot express the configuration.
    """
    faults = [
        f"{key}: {getattr(config, key)!r}: {why}" for key, why in _OTHER_MODELS.items() if getattr(config, key, None)
    ]
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", "default")
    if kind not in _SCALINGS.get(config.model_type, ("default",)):
        faults.append(f"rope_scaling: {kind}: PaddleNLP's class ignores it, but other libraries do not")
    if faults:
        raise OptionError(
            "flex_checkpoint: true does not support this PaddleNLP model configuration.",
            where=f"{type(config).__module__}.{type(config).__qualname__}",
            evidence=faults,
            next_step="Train without these keys, or without flex_checkpoint.",
        )
    rotary = {"rope_theta": getattr(config, "rope_theta", None), "rope_type": "default", **scaling}
    return {IS_NLP: True, "rope_parameters": rotary, "hidden_act": getattr(config, "hidden_act", "silu")}


class MappingBatchSampler:
    """A placeholder without instances for PaddleFormers' class of this name, which PaddleNLP lacks."""


class MappingDistributedBatchSampler(DistributedBatchSampler):
    """The batches of Paddle's ``DistributedBatchSampler``, without the samples that were consumed in this epoch."""

    base_seed = 0
    consumed_samples = 0

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Set the epoch, and the number of its samples that all ranks together have consumed."""
        self.epoch, self.consumed_samples = epoch, consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        order = np.resize(np.arange(len(self.dataset)), self.total_size).tolist()
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(order)
            self.epoch += 1
        left = order[self.consumed_samples :]
        step = self.batch_size * self.nranks
        for begin in range(0, len(left), step):
            batch = left[begin : begin + step]
            size = len(batch) // self.nranks
            if size < self.batch_size and self.drop_last:
                return
            if size:
                yield batch[self.local_rank * size : (self.local_rank + 1) * size]


def resumable(sampler: Any, dataset: Any) -> Any:
    """Return a sampler that can start in the middle of an epoch.

    Args:
        sampler: the result of ``Trainer._get_train_sampler``.
        dataset: the training data.
    Returns:
        a :class:`MappingDistributedBatchSampler` instead of Paddle's own shuffling samplers; any other sampler
        unchanged.
    """
    if type(sampler) is DistributedBatchSampler:
        ranks, rank, shuffle = sampler.nranks, sampler.local_rank, sampler.shuffle
    elif type(sampler) is BatchSampler and isinstance(sampler.sampler, RandomSampler):
        ranks, rank, shuffle = 1, 0, True
    else:
        return sampler
    return MappingDistributedBatchSampler(dataset, sampler.batch_size, ranks, rank, shuffle, sampler.drop_last)

"""Corrections of PaddleNLP's models: their shards, and the values of their classes.

PaddleNLP names the tensors of a pipeline stage by their place in it, and its heads do not describe that tensor
parallelism cuts them, although their parameters state it (``is_distributed``, ``split_axis``). Both are corrected here.
A parameter that is cut without a stated axis is refused.

Samplers of PaddleNLP's Trainer that can begin in the middle of an epoch.

On several processes PaddleNLP uses the order of Paddle's ``DistributedBatchSampler``. It is shuffled by the number of
the epoch and always begins with its first sample. :class:`MappingDistributedBatchSampler` has the same batches. On one
process PaddleNLP draws an order from a global generator, which a resumed run cannot repeat: it gets the order of
several processes as well.
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
    "alibi": "positions are encoded by biases of attention",
    "use_long_sequence_strategies": "positions are encoded by a strategy for long sequences",
    "rope_scaling_type": "positions are scaled in a way that config.json cannot express",
}
"""Keys of PaddleNLP under which Transformers would read the exported weights as another model."""

_SCALINGS = {"llama": ("default", "llama3")}
"""The scalings of positions that a class of PaddleNLP applies, beside none."""


def sharded_state_dict(model: Any) -> dict[str, Any]:
    """Return the shards of a model by the names of the model on a single rank.

    Raises:
        MappingError: a parameter is cut without a stated axis.
    """
    names = _single_names(model)
    found: dict[str, Any] = {}
    faults = []
    for key, weight in model.sharded_state_dict().items():
        name = names.get(key, key)
        if _is_cut_and_described_whole(weight):
            axis = getattr(weight.local_tensor, "split_axis", None)
            if axis is None:
                faults.append(f"{name}: shape {list(weight.local_shape)} on this rank")
                continue
            weight = make_tp_sharded_weight_for_checkpoint(name, weight.local_tensor, axis)
        weight.key = name
        found[name] = weight
    if faults:
        raise MappingError(
            f"{type(model).__name__} of PaddleNLP does not describe how tensor parallelism cuts its tensors.",
            where=type(model).__module__,
            evidence=fold(faults),
            next_step="Train this model without tensor parallelism, or without flex_checkpoint.",
        )
    return found


def _single_names(model: Any) -> dict[str, str]:
    """Return the names in a model on a single rank by those in a pipeline stage."""
    if not hasattr(model, "_set_pipeline_name_mapping"):
        return {}
    model._set_pipeline_name_mapping()
    names: dict[str, str] = model._pp_to_single_mapping
    return names


def _is_cut_and_described_whole(weight: Any) -> bool:
    if not isinstance(weight, ShardedWeight) or not getattr(weight.local_tensor, "is_distributed", False):
        return False
    return tuple(weight.local_shape) == tuple(weight.global_shape)


def described_values(config: Any) -> dict[str, Any]:
    """Return the class of a model, and the values that PaddleFormers' configurations have and PaddleNLP's lack.

    Args:
        config: the configuration of a model.

    Raises:
        OptionError: a file cannot express what the configuration requests.
    """
    faults = [
        f"{key}: {getattr(config, key)!r}: {why}" for key, why in _OTHER_MODELS.items() if getattr(config, key, None)
    ]
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", "default")
    if kind not in _SCALINGS.get(config.model_type, ("default",)):
        faults.append(f"rope_scaling: {kind}: PaddleNLP's class ignores it, and other libraries do not")
    if faults:
        raise OptionError(
            "flex_checkpoint: true does not support this configuration of a model of PaddleNLP.",
            where=f"{type(config).__module__}.{type(config).__qualname__}",
            evidence=faults,
            next_step="Train without these keys, or without flex_checkpoint.",
        )
    rotary = {"rope_theta": getattr(config, "rope_theta", None), "rope_type": "default", **scaling}
    return {IS_NLP: True, "rope_parameters": rotary, "hidden_act": getattr(config, "hidden_act", "silu")}


class MappingBatchSampler:
    """In the place of a class of PaddleFormers that PaddleNLP does not have; nothing is an instance of it."""


class MappingDistributedBatchSampler(DistributedBatchSampler):
    """The batches of Paddle's ``DistributedBatchSampler``, without the samples that were consumed in this epoch."""

    base_seed = 0
    consumed_samples = 0

    def set_epoch(self, epoch: int, consumed_samples: int = 0) -> None:
        """Set the epoch, and the samples of it that all ranks together have consumed."""
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
    """Return the sampler that a run with flex checkpoints reads its data by.

    Args:
        sampler: the result of ``Trainer._get_train_sampler``.
        dataset: the training data.
    Returns:
        a :class:`MappingDistributedBatchSampler` in the place of Paddle's own shuffling samplers; every other sampler
        itself.
    """
    if type(sampler) is DistributedBatchSampler:
        ranks, rank, shuffle = sampler.nranks, sampler.local_rank, sampler.shuffle
    elif type(sampler) is BatchSampler and isinstance(sampler.sampler, RandomSampler):
        ranks, rank, shuffle = 1, 0, True
    else:
        return sampler
    return MappingDistributedBatchSampler(dataset, sampler.batch_size, ranks, rank, shuffle, sampler.drop_last)

"""The library whose Trainer this process uses (``upstream.LIBRARY``): PaddleFormers or PaddleNLP.

All other modules import names of the library from here. The library is imported when a name is first used, because
``save`` and ``load`` also support plain Paddle models, and importing PaddleFormers takes longer than importing Paddle.
Names of models are available only after the hooks in :mod:`paddleformers_fc.upstream` have been checked.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paddle.distributed import ShardedWeight

from paddleformers_fc import upstream
from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import LIBRARIES, MODELS, PADDLENLP, TRAINERS

if TYPE_CHECKING:  # Type checkers do not see what __getattr__ imports.
    from paddleformers.generation import GenerationConfig as GenerationConfig
    from paddleformers.peft import LoRAConfig as LoRAConfig, LoRAModel as LoRAModel
    from paddleformers.quantization.quantization_config import QuantizationConfig as QuantizationConfig
    from paddleformers.trainer import (
        PdArgumentParser as PdArgumentParser,
        Trainer as Trainer,
        TrainerCallback as TrainerCallback,
        TrainerState as TrainerState,
        TrainingArguments as TrainingArguments,
    )
    from paddleformers.trainer.trainer import (
        PREFIX_CHECKPOINT_DIR as PREFIX_CHECKPOINT_DIR,
        ShardingOption as ShardingOption,
    )
    from paddleformers.trainer.utils.offload_optimizer import offload as offload
    from paddleformers.transformers import PretrainedConfig as PretrainedConfig, PretrainedModel as PretrainedModel
    from paddleformers.transformers.configuration_utils import LlmMetaConfig as LlmMetaConfig
    from paddleformers.transformers.model_utils import get_parameter_dtype as get_parameter_dtype
    from paddleformers.utils.batch_sampler import (
        DistributedBatchSampler as DistributedBatchSampler,
        MappingBatchSampler as MappingBatchSampler,
        MappingDistributedBatchSampler as MappingDistributedBatchSampler,
    )
    from paddleformers.utils.log import logger as logger

NAME, HOOKS = LIBRARIES[LIBRARY].name, TRAINERS[LIBRARY]
IS_PADDLENLP = LIBRARY == PADDLENLP
LOAD_METHOD = "_load_optimizer_and_scheduler" if IS_PADDLENLP else "_load_flex_checkpoint"
"""The method of the Trainer that is replaced to load a checkpoint."""

_UNCHECKED = {
    "trainer": ("PdArgumentParser", "Trainer", "TrainerCallback", "TrainerState", "TrainingArguments"),
    "trainer.trainer": ("PREFIX_CHECKPOINT_DIR", "ShardingOption"),
    "utils.log": ("logger",),
}
_MODELS = {
    "generation": ("GenerationConfig",),
    "peft": ("LoRAConfig", "LoRAModel"),
    "quantization.quantization_config": ("QuantizationConfig",),
    "trainer.utils.offload_optimizer": ("offload",),
    "transformers": ("PretrainedConfig", "PretrainedModel"),
    "transformers.configuration_utils": ("LlmMetaConfig",),
    "transformers.model_utils": ("get_parameter_dtype",),
    "utils.batch_sampler": ("DistributedBatchSampler", "MappingBatchSampler", "MappingDistributedBatchSampler"),
}
_HOME = {name: module for table in (_UNCHECKED, _MODELS) for module, names in table.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name of the library, or its replacement if PaddleNLP lacks the name."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in _MODELS:
        _check_models()
    if IS_PADDLENLP and name.startswith("Mapping"):
        from paddleformers_fc.trainer import nlp_models

        return getattr(nlp_models, name)
    return getattr(import_module(f"{LIBRARY}.{home}"), name)


@functools.cache
def _check_models() -> None:
    upstream.require(MODELS[LIBRARY])


def unwrap_model(model: Any) -> Any:
    """Return a model without the parallel wrappers of Paddle."""
    while (inner := getattr(model, "_layers", None)) is not None or (
        inner := getattr(model, "_layer", None)
    ) is not None:
        model = inner
    return model


def has_adapters(model: Any) -> bool:
    """Return whether a model, without parallel wrappers, is a ``LoRAModel``."""
    return is_a("LoRAModel", model)


def is_a(name: str, value: Any) -> bool:
    """Return whether a value is an instance of a class of the library; False if nothing has imported the library."""
    return LIBRARY in sys.modules and isinstance(value, __getattr__(name))


def sharded_state_dict(model: Any) -> dict[str, Any]:
    """Return the shards of a model by name, as the model describes them.

    A head tied to an unsharded embedding is described as unsharded. PaddleFormers describes it as tensor-parallel, even
    after ``tie_weights`` has replaced its parameter.

    Raises:
        MappingError: a PaddleNLP model shards a parameter without naming the axis.
    """
    if IS_PADDLENLP:
        from paddleformers_fc.trainer import nlp_models

        return nlp_models.sharded_state_dict(model)
    found: dict[str, Any] = model.sharded_state_dict()
    weights = {name: weight for name, weight in found.items() if isinstance(weight, ShardedWeight)}
    unsharded = {weight.local_tensor.name for weight in weights.values() if not _is_sharded(weight)}
    corrected = {
        name: _unsharded(name, weight.local_tensor)
        for name, weight in weights.items()
        if _is_sharded(weight) and weight.local_tensor.name in unsharded and not weight.local_tensor.is_distributed
    }
    return found | corrected


def _is_sharded(weight: ShardedWeight) -> bool:
    return tuple(weight.local_shape) != tuple(weight.global_shape)


def _unsharded(name: str, tensor: Any) -> Any:
    shape = tuple(tensor.shape)
    return ShardedWeight(name, tensor, shape, shape, (0,) * len(shape))

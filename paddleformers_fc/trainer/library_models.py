"""The names of the library with the Trainer that this package uses once its models have been checked.

Importing this module checks them: ``save`` and ``load`` need no Trainer, whose module takes longer to import than all
of these. Names that PaddleNLP lacks are in :mod:`.nlp_models`.
"""

from __future__ import annotations

from paddleformers_fc import upstream
from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import MODELS, PADDLENLP

upstream.require(MODELS[LIBRARY])

if LIBRARY == PADDLENLP:
    from paddlenlp.generation import GenerationConfig
    from paddlenlp.peft import LoRAConfig, LoRAModel
    from paddlenlp.quantization.quantization_config import QuantizationConfig
    from paddlenlp.trainer import TrainerState
    from paddlenlp.trainer.trainer_utils import PREFIX_CHECKPOINT_DIR, ShardingOption
    from paddlenlp.transformers import PretrainedConfig, PretrainedModel
    from paddlenlp.transformers.configuration_utils import LlmMetaConfig
    from paddlenlp.transformers.model_utils import get_parameter_dtype
    from paddlenlp.utils.batch_sampler import DistributedBatchSampler
    from paddlenlp.utils.log import logger

    from paddleformers_fc.trainer.nlp_models import (
        EpochSampler as MappingDistributedBatchSampler,
        NoSampler as MappingBatchSampler,
        clean_model_class_name,
        get_common_folder,
        offload,
    )
else:
    from paddleformers.generation import GenerationConfig
    from paddleformers.peft import LoRAConfig, LoRAModel
    from paddleformers.quantization.quantization_config import QuantizationConfig
    from paddleformers.trainer import TrainerState
    from paddleformers.trainer.trainer_utils import ShardingOption
    from paddleformers.trainer.utils.offload_optimizer import offload  # type: ignore[no-redef]
    from paddleformers.transformers import PretrainedConfig, PretrainedModel
    from paddleformers.transformers.configuration_utils import LlmMetaConfig
    from paddleformers.transformers.model_utils import (  # type: ignore[no-redef]
        clean_model_class_name,
        get_common_folder,
        get_parameter_dtype,
    )
    from paddleformers.utils.batch_sampler import (  # type: ignore[no-redef]
        DistributedBatchSampler,
        MappingBatchSampler,
        MappingDistributedBatchSampler,
    )
    from paddleformers.utils.env import PREFIX_CHECKPOINT_DIR
    from paddleformers.utils.log import logger

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "DistributedBatchSampler",
    "GenerationConfig",
    "LlmMetaConfig",
    "LoRAConfig",
    "LoRAModel",
    "MappingBatchSampler",
    "MappingDistributedBatchSampler",
    "PretrainedConfig",
    "PretrainedModel",
    "QuantizationConfig",
    "ShardingOption",
    "TrainerState",
    "clean_model_class_name",
    "get_common_folder",
    "get_parameter_dtype",
    "logger",
    "offload",
]

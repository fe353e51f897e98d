"""The names of the library with the Trainer that this package uses once the table of hooks has been checked.

Names that PaddleNLP lacks are in :mod:`.nlp_models`.
"""

from __future__ import annotations

from paddleformers_fc.upstream import LIBRARY
from paddleformers_fc.upstream.hooks import PADDLENLP

if LIBRARY == PADDLENLP:
    from paddlenlp.generation import GenerationConfig
    from paddlenlp.peft import LoRAConfig, LoRAModel
    from paddlenlp.peft.lora.lora_layers import LoRAConv2D
    from paddlenlp.quantization.quantization_config import QuantizationConfig
    from paddlenlp.trainer.trainer_utils import PREFIX_CHECKPOINT_DIR, ShardingOption
    from paddlenlp.transformers import PretrainedConfig, PretrainedModel
    from paddlenlp.transformers.configuration_utils import LlmMetaConfig
    from paddlenlp.transformers.model_utils import get_parameter_dtype, unwrap_model
    from paddlenlp.utils.batch_sampler import DistributedBatchSampler

    from paddleformers_fc.trainer.nlp_models import (
        EpochSampler as MappingDistributedBatchSampler,
        FleetLoRAMoeExperts,
        LoRAMoeExperts,
        NoSampler as MappingBatchSampler,
        QuantizationLoRABaseLinear,
        clean_model_class_name,
        described_values,
        get_common_folder,
        offload,
        sharded_state_dict,
    )
else:
    from paddleformers.generation import GenerationConfig
    from paddleformers.peft import LoRAConfig, LoRAModel
    from paddleformers.peft.lora import QuantizationLoRABaseLinear  # type: ignore[no-redef]
    from paddleformers.peft.lora.lora_layers import (  # type: ignore[no-redef]
        FleetLoRAMoeExperts,
        LoRAConv2D,
        LoRAMoeExperts,
    )
    from paddleformers.quantization.quantization_config import QuantizationConfig
    from paddleformers.trainer.trainer_utils import ShardingOption
    from paddleformers.trainer.utils.offload_optimizer import offload  # type: ignore[no-redef]
    from paddleformers.transformers import PretrainedConfig, PretrainedModel
    from paddleformers.transformers.configuration_utils import LlmMetaConfig
    from paddleformers.transformers.model_utils import (  # type: ignore[no-redef]
        clean_model_class_name,
        get_common_folder,
        get_parameter_dtype,
        unwrap_model,
    )
    from paddleformers.utils.batch_sampler import (  # type: ignore[no-redef]
        DistributedBatchSampler,
        MappingBatchSampler,
        MappingDistributedBatchSampler,
    )
    from paddleformers.utils.env import PREFIX_CHECKPOINT_DIR

    from paddleformers_fc.trainer.formers_models import described_values, sharded_state_dict

__all__ = [
    "PREFIX_CHECKPOINT_DIR",
    "DistributedBatchSampler",
    "FleetLoRAMoeExperts",
    "GenerationConfig",
    "LlmMetaConfig",
    "LoRAConfig",
    "LoRAConv2D",
    "LoRAModel",
    "LoRAMoeExperts",
    "MappingBatchSampler",
    "MappingDistributedBatchSampler",
    "PretrainedConfig",
    "PretrainedModel",
    "QuantizationConfig",
    "QuantizationLoRABaseLinear",
    "ShardingOption",
    "clean_model_class_name",
    "described_values",
    "get_common_folder",
    "get_parameter_dtype",
    "offload",
    "sharded_state_dict",
    "unwrap_model",
]

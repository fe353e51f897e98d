"""The table of upstream hooks, which this package replaces or reads in Paddle and PaddleFormers, and its check.

PaddleFormers has no interface for checkpoint plugins. This package therefore replaces methods and reads attributes that
upstream may rename in any release. A renamed hook must not turn into a run that saves in another format or resumes with
wrong numbers. So each hook is one row of :data:`TRAINER`, :data:`COMMAND_LINE` or :data:`CPU_RUNTIME`, and
:func:`require` compares the rows with the installed packages before anything is replaced.

A row is checked on the imported objects, not on source text: attributes by lookup, parameters by signature, and names
that exist only on instances by the bytecode of the functions that set or read them.

Importing this module imports neither Paddle nor PaddleFormers; the checks do. Time: 20 ms once both are imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from paddleformers_fc.errors import EnvironmentMismatch
from paddleformers_fc.text import install_command

VERSIONS = {"paddle": "3.3.1", "paddleformers": "1.2.0", "paddlenlp": "3.0.0b4"}
"""The known versions, by the module that has them as ``__version__``. Builds for accelerators have the same."""

INSTALL = (
    f"Run {install_command('cpu')}; for NVIDIA devices first install Paddle as its installation page says, then run "
    f"{install_command('formers')}."
)
"""The next step if Paddle or PaddleFormers is missing."""
_ABSENT = " is not installed"


@dataclass(frozen=True)
class Hook:
    """One place of upstream that this package depends on.

    Args:
        place: module and object, such as ``paddleformers.trainer.trainer:Trainer.train``.
        signature: its parameters without annotations; empty where they are not compared.
        names: for a class, the attributes and fields that it must have; for a function, the names and texts that its
            code must use.
    """

    place: str
    signature: str = ""
    names: tuple[str, ...] = ()


_TRAINER = "paddleformers.trainer.trainer:Trainer"
_CALLBACKS = "paddleformers.trainer.trainer_callback"
_ARGUMENTS = "paddleformers.trainer.training_args:TrainingArguments"
_SAMPLERS = "paddleformers.utils.batch_sampler"
_MODELS = "paddleformers.transformers.model_utils"
_CONFIG = "paddleformers.transformers.configuration_utils:PretrainedConfig"
_SHARDING = "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer"
_FUSION = "paddle.distributed.fleet.utils.tensor_fusion_helper"
_STAGE2 = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2:GroupShardedOptimizerStage2"
_STAGE2_MODEL = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2:GroupShardedStage2"
_FSDP = "paddle.distributed.auto_parallel.fully_shard_fusion"
_STAGE3 = "paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3:GroupShardedStage3"

TRAINER = (
    # The methods that install() and the mixin replace, and the attributes of a constructed Trainer.
    Hook(
        f"{_TRAINER}.__init__",
        "(self, model=None, criterion=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, "
        "tokenizer=None, compute_metrics=None, callbacks=None, optimizers=(None, None), "
        "preprocess_logits_for_metrics=None, processing_class=None, resume_from_custom_func=None)",
        ("args", "model", "optimizer", "lr_scheduler", "state", "do_grad_scaling", "callback_handler", "on_init_end")
        + ("runtime_timer", "tokenizer", "processing_class"),
    ),
    Hook(
        f"{_TRAINER}.train",
        "(self, resume_from_checkpoint=None, ignore_keys_for_eval=None)",
        ("_load_flex_checkpoint", "load_checkpoint_format", "flex_checkpoint", "_inner_training_loop"),
    ),
    Hook(
        f"{_TRAINER}._inner_training_loop",
        "(self, args, model, train_dataloader, len_dataloader, max_steps, num_train_epochs, "
        "num_update_steps_per_epoch, num_train_samples, resume_from_checkpoint, ignore_keys_for_eval)",
        ("callback_handler", "on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "set_epoch")
        + (
            "on_optimizer_begin",
            "on_train_end",
            "_load_rng_state",
            "_maybe_log_save_evaluate",
            "load_best_model_at_end",
            "best_model_checkpoint",
        ),
    ),
    Hook(f"{_TRAINER}._load_flex_checkpoint", "(self, resume_from_checkpoint)"),
    Hook(f"{_TRAINER}._load_rng_state", "(self, checkpoint)"),
    Hook(f"{_TRAINER}._save_checkpoint", "(self, model, metrics=None)"),
    Hook(
        f"{_TRAINER}.save_model",
        "(self, output_dir=None, merge_tensor_parallel=False, last_fc_to_hf=False)",
        ("_save",),
    ),
    Hook(
        f"{_TRAINER}._save",
        "(self, output_dir=None, state_dict=None, merge_tensor_parallel=False, last_fc_to_hf=False)",
    ),
    Hook(f"{_TRAINER}.evaluate", "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')"),
    Hook(f"{_TRAINER}._sorted_checkpoints", "(self, output_dir=None, checkpoint_prefix='checkpoint', use_mtime=False)"),
    Hook(f"{_TRAINER}._rotate_checkpoints", "(self, use_mtime=False, output_dir=None)"),
    Hook(
        "paddleformers.trainer.argparser:PdArgumentParser.__init__",
        "(self, dataclass_types, **kwargs)",
        ("dataclass_types",),
    ),
    Hook(
        "paddleformers.trainer.argparser:PdArgumentParser.parse_dict",
        "(self, args, return_unknown_ars=False)",
        ("dataclass_types",),
    ),
    # Other replacements, on single objects.
    Hook(
        f"{_MODELS}:PretrainedModel.save_pretrained",
        "(self, save_dir, is_main_process=True, state_dict=None, save_function=..., max_shard_size='10GB', "
        "safe_serialization=False, variant=None, *args, **kwargs)",
    ),
    Hook(f"{_CALLBACKS}:CallbackHandler.call_event", "(self, event, args, state, control, **kwargs)", ("callbacks",)),
    # Wrapped where updates of a moving average depend on the loss.
    Hook(f"{_TRAINER}.training_step", "(self, model, inputs, step_control=0)"),
    # Calls and attributes of the training loop through which the replaced methods and the callbacks are reached.
    Hook(
        f"{_TRAINER}._maybe_log_save_evaluate",
        names=("should_save", "_save_checkpoint", "on_save", "save_pretrained", "copy_custom_file_list"),
    ),
    Hook(f"{_TRAINER}.training_pipeline_step", names=("_pp_data_buffer",)),
    Hook(f"{_TRAINER}.add_callback", "(self, callback)"),
    Hook(f"{_TRAINER}.copy_custom_files", "(self, output_dir)"),
    Hook(f"{_CALLBACKS}:CallbackHandler.__init__", names=("callbacks",)),
    *(
        Hook(f"{_CALLBACKS}:CallbackHandler.{event}", "(self, args, state, control)", ("call_event", event))
        for event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_save")
    ),
    Hook(f"{_CALLBACKS}:InterleaveGateUpCallback.__init__", names=("resume_from_checkpoint",)),
    Hook(f"{_CALLBACKS}:InterleaveGateUpCallback.interleave_gate_up_proj", "(self, w)"),
    Hook(f"{_CALLBACKS}:InterleaveGateUpCallback.on_train_begin", names=("resume_from_checkpoint",)),
    Hook(f"{_CALLBACKS}:CallbackHandler.on_train_end", names=("call_event", "on_train_end")),
    Hook(f"{_CALLBACKS}:CallbackHandler.on_optimizer_begin", names=("call_event", "on_optimizer_begin")),
    Hook(f"{_CALLBACKS}:TrainerCallback.on_optimizer_begin", "(self, args, state, control, **kwargs)"),
    *(
        Hook(f"{_CALLBACKS}:TrainerCallback.{event}", "(self, args, state, control, **kwargs)")
        for event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_save")
    ),
    # The Trainer's state and arguments.
    Hook(
        f"{_CALLBACKS}:TrainerState",
        names=("epoch", "global_step", "consumed_samples", "max_steps", "num_train_epochs", "total_flos", "log_history")
        + ("best_metric", "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero", "trial_name")
        + ("trial_params",),
    ),
    Hook(f"{_CALLBACKS}:TrainerControl", names=("should_evaluate", "should_save")),
    Hook(
        _ARGUMENTS,
        names=(
            # Read by the Trainer's replaced methods.
            *("aoa_config", "dataset_world_size", "distributed_dataloader", "expert_model_parallel_size"),
            *("gradient_accumulation_steps", "greater_is_better", "ignore_data_skip", "ignore_load_lr_and_optim"),
            *("ignore_save_lr_and_optim", "load_best_model_at_end", "max_steps", "metric_for_best_model", "output_dir"),
            *("per_device_train_batch_size", "pipeline_model_parallel_size", "resume_from_checkpoint"),
            *("save_rng_states", "save_tokenizer", "save_total_limit", "sharding", "sharding_parallel_size"),
            *("should_log", "tensor_model_parallel_size", "to_dict", "world_size", "seed", "dataloader_num_workers"),
            *("sep_parallel_size", "context_parallel_size", "overwrite_output_dir", "dataloader_drop_last"),
            # Compared with the arguments of the run that saved a checkpoint.
            *("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm"),
            *("scale_loss", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "min_lr", "lr_end", "num_cycles"),
            *("power", "num_train_epochs"),
            # Compared with flex_checkpoint. A renamed option would no longer be refused.
            *("save_checkpoint_format", "load_checkpoint_format", "unified_checkpoint", "save_sharded_model"),
            *("load_sharded_model", "ckpt_quant_stage", "enable_zero_cost_checkpoint", "flash_device_save_steps"),
            *("use_async_save", "enable_auto_parallel", "online_merge_ema"),
            # Their values are moved to the keys of this package, or read. A renamed option would have no effect.
            *("zcc_save_ema_coef", "zcc_ema_interval", "zcc_ema_loss_threshold", "sharded_model_from_ema"),
            *("auto_parallel_resume_form_hybrid_parallel", "load_from_hf", "optim", "tensorwise_offload_optimizer"),
            *("using_sonic_moe", "replicate_saved_into_local", "pdc_download_ckpt"),
            *("save_on_each_node", "flex_ckpt_comm_method", "load_via_cpu", "ordered_save_group_size", "save_to_hf"),
            *("optim_shard_num", "save_hf_memory_growth_threshold"),
        ),
    ),
    Hook(f"{_ARGUMENTS}.__post_init__", names=("use_hybrid_parallel",)),
    Hook("paddleformers.trainer.trainer_utils:ShardingOption", names=("FULL_SHARD", "SHARD_OP")),
    # The fused parameters of the semi-automatic mode.
    Hook(f"{_FSDP}:get_fsdp_context", "()"),
    Hook(f"{_FSDP}:FullyShardFusion.__init__", names=("model", "mesh", "buffer_manager", "comm_manager")),
    Hook(f"{_FSDP}:TensorFusionBuffer.__init__", names=("data_buffer", "param_offsets", "process_ids")),
    Hook(f"{_FSDP}:FSDPBufferManager.__init__", names=("buffer_groups", "param_to_buffer_id", "_fsdp_group")),
    Hook(f"{_FSDP}:FSDPCommManager.reset_params_buffer_status", "(self)"),
    Hook("paddleformers.trainer.plugins.timer:RuntimeTimer.start", "(self, name)"),
    Hook("paddleformers.trainer.plugins.timer:RuntimeTimer.stop", "(self)"),
    Hook("paddleformers.utils.env:PREFIX_CHECKPOINT_DIR"),
    Hook("paddleformers.utils.log:logger"),
    # The data.
    Hook("paddle.io:BatchSampler.__init__", names=("sampler",)),
    Hook(f"{_SAMPLERS}:RandomSamplerWithSeed.__init__", names=("base_seed",)),
    Hook("paddle.io:Sampler.__init__", names=("data_source",)),
    Hook(f"{_SAMPLERS}:MappingDistributedBatchSampler.__init__", names=("base_seed", "total_size")),
    Hook("paddle.io:DistributedBatchSampler.__init__", names=("shuffle", "nranks", "drop_last")),
    Hook(f"{_SAMPLERS}:DistributedBatchSampler.__init__", names=("total_size",)),
    *(
        Hook(f"{_SAMPLERS}:{sampler}.set_epoch", "(self, epoch=0, consumed_samples=0)")
        for sampler in ("MappingBatchSampler", "MappingDistributedBatchSampler", "DistributedBatchSampler")
    ),
    Hook(
        "paddleformers.data.dist_dataloader:DistDataLoader.__init__",
        names=("_need_data", "_dataloader", "_lazy_dataloader_iter"),
    ),
    Hook("paddleformers.data.dist_dataloader:DistDataLoader.__next__", names=("_need_data",)),
    Hook("paddle.io.reader:DataLoader.__init__", names=("batch_sampler", "_persistent_workers")),
    Hook("paddle.io.reader:DataLoader.__iter__", names=("_persistent_workers",)),
    # The model and its configuration.
    Hook("paddleformers.peft.lora.lora_model:LoRAModel"),
    Hook("paddleformers.peft.lora.lora_model:LoRAModel.from_pretrained", "(model, lora_path, **kwargs)"),
    Hook("paddleformers.peft.lora.lora_model:LoRAModel.__init__", names=("lora_config", "model", "quantized")),
    Hook("paddleformers.peft.lora.lora_model:LoRAModel.sharded_state_dict", names=("model", "sharded_state_dict")),
    Hook(
        "paddleformers.peft.lora.lora_config:LoRAConfig",
        names=(
            *("r", "lora_alpha", "rslora", "target_modules", "trainable_modules", "trainable_bias", "lora_dropout"),
            *("lora_plus_scale", "loraga", "do_qat", "dtype", "base_model_name_or_path", "from_pretrained"),
        ),
    ),
    Hook("paddleformers.peft.lora.lora_layers:LoRAConv2D"),
    Hook("paddleformers.peft.lora.lora_layers:LoRAMoeExperts"),
    Hook("paddleformers.peft.lora.lora_layers:FleetLoRAMoeExperts"),
    Hook("paddleformers.peft.lora.lora_quantization_layers:QuantizationLoRABaseLinear"),
    Hook(f"{_MODELS}:PretrainedModel.can_generate"),
    Hook(f"{_MODELS}:PretrainedModel.sharded_state_dict"),
    Hook(f"{_MODELS}:unwrap_model", "(model, *args, **kwargs)"),
    Hook(f"{_MODELS}:clean_model_class_name", "(class_name, suffixes_to_strip='Pipe')"),
    Hook(f"{_MODELS}:get_parameter_dtype", "(parameter)"),
    # The name of the configuration that a model of several parts saves.
    Hook(
        f"{_MODELS}:PretrainedModel.save_pretrained",
        names=("config_to_save", "_gen_aoa_config", "_gen_inv_aoa_config"),
    ),
    Hook(f"{_CONFIG}.__init__", names=("architectures", "dtype", "_save_to_hf")),
    Hook(f"{_CONFIG}.to_json_string", "(self, use_diff=True, saving_file=False)"),
    Hook(f"{_CONFIG}.to_dict", names=("_save_to_hf",)),
    Hook("paddleformers.transformers.configuration_utils:LlmMetaConfig._get_unsavable_keys", "()"),
    Hook(
        "paddleformers.transformers.configuration_utils:LlmMetaConfig",
        names=("hybrid_parallel_attributes", "recompute_attributes"),
    ),
    Hook("paddleformers.quantization.quantization_config:QuantizationConfig.to_dict"),
    Hook("paddleformers.generation.configuration_utils:GenerationConfig.__init__", names=("_from_model_config",)),
    Hook("paddleformers.generation.configuration_utils:GenerationConfig.from_model_config", "(model_config)"),
    # Loaders of weights, and how PaddleFormers builds the model that they fill.
    Hook(
        f"{_MODELS}:PretrainedModel.from_pretrained",
        "(pretrained_model_name_or_path, *args, **kwargs)",
        ("config", "state_dict", "cache_dir", "ignore_mismatched_sizes", "dtype", "download_hub", "subfolder")
        + ("load_via_cpu", "load_checkpoint_format", "variant", "use_safetensors", "low_cpu_mem_usage")
        + ("convert_from_hf", "load_state_as_np", "key_mapping", "force_download", "from_hf_hub", "from_aistudio")
        + ("convert_from_torch", "is_weight_quantize", "_resolve_model_file_path", "get_common_folder"),
    ),
    Hook(f"{_MODELS}:PretrainedModel._from_config", "(config, **kwargs)", ("dtype", "dtype_guard")),
    Hook(
        f"{_MODELS}:PretrainedModel._resolve_model_file_path",
        "(pretrained_model_name_or_path, download_hub=None, cache_dir=None, subfolder='', config=None, "
        "convert_from_hf=True, use_safetensors=None, variant=None)",
    ),
    Hook(f"{_MODELS}:get_common_folder", "(file_list)"),
    Hook("paddle.nn:Layer", names=("named_sublayers", "named_parameters", "named_buffers")),
    # The optimizer and its wrappers.
    Hook("paddle.optimizer:AdamW.__init__", names=("_use_lowprecision_moment", "_param_groups", "_parameter_list")),
    Hook("paddle.optimizer:AdamW._create_accumulators", "(self, block, parameters)", ("_add_moments_pows",)),
    Hook(
        "paddle.optimizer:Optimizer.__init__",
        names=("_auxiliary_vars", "_default_dict", "_learning_rate", "_learning_rate_map", "_param_dict"),
    ),
    Hook("paddle.optimizer:Optimizer._create_master_grad", names=("_master_grads",)),
    Hook("paddle.optimizer:Adam.__init__", names=("_multi_precision",)),
    Hook("paddle.optimizer:Optimizer._add_accumulator", names=("_accumulators", "_accumulators_holder", "_name")),
    Hook("paddle.optimizer:Optimizer._create_master_weight", "(self, param)", ("_master_weights",)),
    Hook("paddleformers.trainer.utils.offload_optimizer:offload", "(tensor)", ("to_device",)),
    # The store through which gloo groups of background threads find each other.
    Hook("paddle.distributed.collective:_default_store"),
    Hook("paddle.optimizer:AdamW.clear_grad", "(self, set_to_zero=True)"),
    Hook("paddle.optimizer:Optimizer._gen_master_weight_var_name", "(self, param)", ("_fp32_master",)),
    Hook("paddleformers.utils.optimizer:AdamWCustom"),
    Hook("paddleformers.utils.optimizer:AdamWMini"),
    Hook(
        f"{_SHARDING}:DygraphShardingOptimizer.__init__",
        names=("_inner_opt", "_rank2fused", "_rank2params", "_sharding_rank", "tensor_fusion", "fuse_optimizer"),
    ),
    Hook(f"{_SHARDING}:DygraphShardingOptimizerV2.__init__", names=("_inner_opt", "_comm_buffer_list", "pp_overlap")),
    Hook(f"{_SHARDING}:DygraphShardingOptimizerV2._collect_comm_buffers", "(self)", ("comm_buffer_ref",)),
    Hook(
        "paddle.distributed.fleet.meta_parallel.pipeline_parallel:PipelineParallel.register_sharding_comm_overlap_hook",
        "(self, optimizer)",
        ("_chunk_2_comm_buffers",),
    ),
    Hook(
        f"{_FUSION}:ShardingGradView.__init__",
        names=("_param", "_param_buffer", "_index", "_param_begin", "_param_end"),
    ),
    Hook(f"{_FUSION}:FusedCommBuffer.__init__", names=("_sharding_param_grad_view",)),
    Hook(
        "paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer:"
        "HybridParallelOptimizer.__init__",
        names=("_inner_opt",),
    ),
    Hook("paddle:DataParallel.__init__", names=("_layers",)),
    Hook("paddle.distributed.fleet.meta_parallel.meta_parallel_base:MetaParallelBase.__init__", names=("_layers",)),
    Hook(f"{_STAGE2_MODEL}.__init__", names=("_layer",)),
    Hook(f"{_STAGE3}.__init__", names=("_layer", "_optim")),
    Hook(f"{_STAGE2}.__init__", names=("_optim", "_rank")),
    Hook(f"{_STAGE2}._segment_params", "(self)"),
    Hook(f"{_STAGE3}._param_storage", names=("fw_storage", "slice@")),
    Hook(f"{_STAGE3}._update_params", names=("bw_storage",)),
    Hook(f"{_STAGE3.partition(':')[0]}:TaskFlow.__init__", names=("full_param",)),
    Hook(f"{_STAGE3.partition(':')[0]}:_release_param", names=("full_param", "fw_storage", "status", "use_count")),
    Hook("paddle.distributed.fleet.utils.mix_precision_utils:MixPrecisionLayer.__init__", names=("main_grad",)),
    # Tensors and the description of their shards.
    Hook(
        "paddle.distributed:ShardedWeight.__init__",
        "(self, key, local_tensor, local_shape, global_shape, global_offset, is_flattened=False, flattened_range=None)",
        ("key", "local_tensor", "local_shape", "global_shape", "global_offset", "is_flattened", "flattened_range")
        + ("is_dist", "_local_value"),
    ),
    Hook("paddle.base.framework:EagerParamBase"),
    Hook("paddle.base.framework:default_main_program", "()"),
    Hook(
        "paddle:Tensor",
        names=("_slice", "_clear_data", "_is_initialized", "clear_gradient", "data_ptr", "is_contiguous", "pin_memory")
        + ("copy_", "_copy_to"),
    ),
    Hook("paddle.device:Stream", names=("wait_stream", "record_event")),
    Hook("paddle.device:synchronize"),
    Hook("paddle.device:current_stream"),
    Hook("paddle.device:stream_guard"),
    # Random generators.
    Hook("paddle.base.core:GeneratorState", names=("__getstate__", "__setstate__")),
    Hook("paddle.base.core:default_cpu_generator"),
    Hook("paddle:get_rng_state"),
    Hook("paddle:set_rng_state"),
    Hook("paddle.distributed.fleet.meta_parallel:get_rng_state_tracker", "()"),
    Hook("paddle.distributed.fleet.layers.mpu.random:RNGStatesTracker.get_states_tracker", "(self)"),
    Hook("paddle.distributed.fleet.layers.mpu.random:RNGStatesTracker.set_states_tracker", "(self, states)"),
    # Ranks and their messages.
    Hook("paddle.distributed:is_initialized"),
    Hook("paddle.distributed:get_rank"),
    Hook("paddle.distributed:get_world_size"),
    Hook("paddle.distributed:all_gather", "(tensor_list, tensor, group=None, sync_op=True)"),
    Hook(
        "paddle.distributed:alltoall_single",
        "(out_tensor, in_tensor, in_split_sizes=None, out_split_sizes=None, group=None, sync_op=True)",
    ),
    Hook("paddle.base.core:TCPStore", names=("add", "get", "set")),
    Hook("paddle.distributed.fleet:get_hybrid_communicate_group"),
    Hook("paddle.distributed.fleet.fleet:Fleet.init", names=("_hcg",)),
    Hook(
        "paddle.distributed.fleet.base.topology:HybridCommunicateGroup",
        names=(
            "get_data_parallel_world_size",
            "get_model_parallel_world_size",
            "get_pipe_parallel_world_size",
            "get_sep_parallel_world_size",
            "get_sharding_parallel_rank",
            "get_sharding_parallel_world_size",
        ),
    ),
    Hook(
        "paddle.distributed.fleet.base.topology:EPHybridCommunicateGroup",
        names=("get_context_parallel_world_size", "get_expert_parallel_world_size"),
    ),
)
"""The dependencies of a Trainer with ``flex_checkpoint: true``."""

_NLP = "paddlenlp.trainer.trainer:Trainer"
_NLP_CALLBACKS = "paddlenlp.trainer.trainer_callback"
_NLP_ARGUMENTS = "paddlenlp.trainer.training_args:TrainingArguments"
_NLP_MODELS = "paddlenlp.transformers.model_utils"
_NLP_CONFIG = "paddlenlp.transformers.configuration_utils"

NLP_TRAINER = (
    Hook(
        f"{_NLP}.__init__",
        "(self, model=None, criterion=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, "
        "tokenizer=None, compute_metrics=None, callbacks=None, optimizers=(None, None), "
        "preprocess_logits_for_metrics=None)",
        ("args", "model", "optimizer", "lr_scheduler", "state", "do_grad_scaling", "callback_handler", "on_init_end")
        + ("runtime_timer", "tokenizer", "train_dataset"),
    ),
    Hook(
        f"{_NLP}.train",
        "(self, resume_from_checkpoint=None, ignore_keys_for_eval=None)",
        ("_load_from_checkpoint", "_wrap_model", "_load_optimizer_and_scheduler", "_inner_training_loop")
        + ("create_optimizer_and_scheduler", "get_train_dataloader"),
    ),
    Hook(
        f"{_NLP}._inner_training_loop",
        "(self, args, model, train_dataloader, len_dataloader, max_steps, num_train_epochs, "
        "num_update_steps_per_epoch, num_train_samples, resume_from_checkpoint, ignore_keys_for_eval)",
        ("callback_handler", "on_train_begin", "on_epoch_begin", "on_step_end", "on_epoch_end", "set_epoch")
        + (
            "on_optimizer_begin",
            "on_train_end",
            "_load_rng_state",
            "_maybe_log_save_evaluate",
            "load_best_model_at_end",
            "best_model_checkpoint",
        ),
    ),
    Hook(f"{_NLP}._load_from_checkpoint", "(self, resume_from_checkpoint=None)"),
    Hook(f"{_NLP}._load_optimizer_and_scheduler", "(self, checkpoint)"),
    Hook(f"{_NLP}._get_train_sampler", "(self)", ("BatchSampler", "DistributedBatchSampler", "dataset_world_size")),
    Hook(f"{_NLP}.get_train_dataloader", "(self)", ("_get_train_sampler", "distributed_dataloader")),
    Hook(f"{_NLP}._load_rng_state", "(self, checkpoint)"),
    Hook(f"{_NLP}._save_checkpoint", "(self, model, metrics=None)"),
    Hook(f"{_NLP}.save_model", "(self, output_dir=None, merge_tensor_parallel=False)", ("_save",)),
    Hook(f"{_NLP}._save", "(self, output_dir=None, state_dict=None, merge_tensor_parallel=False)"),
    Hook(f"{_NLP}.evaluate", "(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')"),
    Hook(f"{_NLP}._sorted_checkpoints", "(self, output_dir=None, checkpoint_prefix='checkpoint', use_mtime=False)"),
    Hook(f"{_NLP}._rotate_checkpoints", "(self, use_mtime=False, output_dir=None)"),
    Hook(f"{_NLP}._maybe_log_save_evaluate", names=("should_save", "_save_checkpoint", "on_save")),
    Hook(f"{_NLP}.training_pipeline_step", names=("_pp_data_buffer",)),
    Hook(f"{_NLP}.add_callback", "(self, callback)"),
    Hook(
        f"{_NLP_CALLBACKS}:CallbackHandler.call_event", "(self, event, args, state, control, **kwargs)", ("callbacks",)
    ),
    *(
        Hook(f"{_NLP_CALLBACKS}:CallbackHandler.{event}", "(self, args, state, control)", ("call_event", event))
        for event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_save")
    ),
    Hook(f"{_NLP_CALLBACKS}:CallbackHandler.on_train_end", names=("call_event", "on_train_end")),
    Hook(f"{_NLP_CALLBACKS}:CallbackHandler.on_optimizer_begin", names=("call_event", "on_optimizer_begin")),
    Hook(f"{_NLP_CALLBACKS}:TrainerCallback.on_optimizer_begin", "(self, args, state, control, **kwargs)"),
    *(
        Hook(f"{_NLP_CALLBACKS}:TrainerCallback.{event}", "(self, args, state, control, **kwargs)")
        for event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_save")
    ),
    Hook(
        f"{_NLP_CALLBACKS}:TrainerState",
        names=("epoch", "global_step", "consumed_samples", "max_steps", "num_train_epochs", "total_flos", "log_history")
        + ("best_metric", "best_model_checkpoint", "is_local_process_zero", "is_world_process_zero", "trial_name")
        + ("trial_params",),
    ),
    Hook(f"{_NLP_CALLBACKS}:TrainerControl", names=("should_evaluate", "should_save")),
    Hook(
        _NLP_ARGUMENTS,
        names=(
            *("dataset_world_size", "distributed_dataloader", "gradient_accumulation_steps", "greater_is_better"),
            *("ignore_data_skip", "ignore_load_lr_and_optim", "ignore_save_lr_and_optim", "load_best_model_at_end"),
            *("max_steps", "metric_for_best_model", "output_dir", "per_device_train_batch_size", "should_log"),
            *("tensor_parallel_degree", "pipeline_parallel_degree", "sharding_parallel_degree", "to_dict", "seed"),
            *("resume_from_checkpoint", "save_total_limit", "sharding", "world_size", "overwrite_output_dir"),
            "dataloader_drop_last",
            # Compared with flex_checkpoint. A renamed option would no longer be refused.
            *("unified_checkpoint", "save_sharded_model", "load_sharded_model", "ckpt_quant_stage", "use_async_save"),
            *("enable_auto_parallel", "auto_parallel_resume_form_hybrid_parallel", "pdc_download_ckpt", "optim"),
            *("sep_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "use_expert_parallel"),
            *("sharding_parallel_config", "pipeline_parallel_config", "offload_optim", "force_reshard_pp", "to_static"),
        ),
    ),
    Hook(f"{_NLP_ARGUMENTS}.__post_init__", names=("use_hybrid_parallel",)),
    Hook("paddlenlp.trainer.trainer_utils:ShardingOption", names=("FULL_SHARD", "SHARD_OP")),
    Hook("paddlenlp.trainer.trainer_utils:PREFIX_CHECKPOINT_DIR"),
    Hook("paddlenlp.trainer.plugins.timer:RuntimeTimer.start", "(self, name)"),
    Hook("paddlenlp.trainer.plugins.timer:RuntimeTimer.stop", "(self)"),
    Hook("paddlenlp.utils.log:logger"),
    Hook("paddlenlp.utils.batch_sampler:DistributedBatchSampler.set_epoch", "(self, epoch=0, consumed_samples=0)"),
    Hook("paddlenlp.utils.batch_sampler:DistributedBatchSampler.__init__", names=("total_size",)),
    Hook("paddlenlp.data.dist_dataloader:DistDataLoader.__init__", names=("_need_data",)),
    Hook("paddlenlp.peft:LoRAModel"),
    Hook("paddlenlp.quantization.quantization_config:QuantizationConfig.to_dict"),
    Hook("paddlenlp.generation.configuration_utils:GenerationConfig.__init__", names=("_from_model_config",)),
    Hook("paddlenlp.generation.configuration_utils:GenerationConfig.from_model_config", "(model_config)"),
    Hook(f"{_NLP_MODELS}:PretrainedModel.can_generate"),
    Hook(f"{_NLP_MODELS}:PretrainedModel.sharded_state_dict"),
    Hook(f"{_NLP_MODELS}:PretrainedModel.from_pretrained", "(pretrained_model_name_or_path, *args, **kwargs)"),
    Hook(f"{_NLP_MODELS}:PretrainedModel._from_config", "(config, **kwargs)", ("dtype", "dtype_guard")),
    Hook(f"{_NLP_MODELS}:PipelinePretrainedModel._set_pipeline_name_mapping", names=("_pp_to_single_mapping",)),
    Hook(f"{_NLP_MODELS}:unwrap_model", "(model, *args, **kwargs)"),
    Hook(f"{_NLP_MODELS}:get_parameter_dtype", "(parameter)"),
    Hook("paddlenlp.transformers.llama.modeling:LlamaLMHead.__init__", names=("is_distributed", "split_axis")),
    Hook("paddlenlp.transformers.qwen2.modeling:Qwen2LMHead.__init__", names=("is_distributed", "split_axis")),
    Hook(f"{_NLP_CONFIG}:PretrainedConfig.to_json_string", "(self, use_diff=True, saving_file=False)"),
    Hook(f"{_NLP_CONFIG}:LlmMetaConfig._get_unsavable_keys", "()"),
    Hook(f"{_NLP_CONFIG}:LlmMetaConfig", names=("hybrid_parallel_attributes", "recompute_attributes")),
    Hook(
        "paddle.distributed.flex_checkpoint.dcp.sharded_weight:make_tp_sharded_weight_for_checkpoint",
        "(key, tensor, tensor_parallel_axis=0)",
    ),
    Hook("paddle.io:RandomSampler"),
    *(hook for hook in TRAINER if hook.place.startswith("paddle.") or hook.place.startswith("paddle:")),
)
"""The dependencies of a Trainer of PaddleNLP with ``flex_checkpoint: true``."""

COMMAND_LINE = (
    Hook("paddleformers.cli.hparams.finetuning_args:FinetuningArguments", names=("ref_model_update_steps",)),
    Hook(
        "paddleformers.cli.hparams.data_args:DataArguments",
        names=("dataset_type", "input_dir", "split", "train_dataset_type", "train_dataset_path", "train_dataset_prob")
        + ("mix_strategy", "random_shuffle", "num_samples_each_epoch", "max_seq_len", "packing", "padding_free"),
    ),
    Hook("paddleformers.cli.hparams.model_args:ModelArguments", names=("model_name_or_path", "stage")),
    Hook("paddleformers.cli.train.sft.workflow:run_sft", names=("from_pretrained", "model_name_or_path")),
    Hook("paddleformers.cli.train.dpo.workflow:run_dpo", names=("from_pretrained", "model_name_or_path")),
    Hook("paddleformers.cli.train.dpo.dpo_trainer:DPOTrainer.__init__", names=("ref_model",)),
    Hook("paddleformers.data.causal_dataset:GPTDataset.__getitem__", names=("shuffle_idx", "sample_idx", "doc_idx")),
    Hook(
        "paddleformers.data.blendable_dataset:BlendableDataset.__getitem__",
        names=("datasets", "dataset_index", "dataset_sample_index"),
    ),
    Hook(
        "paddleformers.cli.train.dpo.dpo_trainer:DPOTrainer.compute_loss",
        names=("dpo_config", "ref_model_update_steps", "ref_model"),
    ),
)
"""The additional dependencies of the stock command line."""

_CORE = "paddle.base.core"
_GROUPS = "paddle.distributed.collective"
_META = "paddle.distributed.fleet.meta_parallel.sharding"
_MPU = "paddle.distributed.fleet.layers.mpu.mp_ops"
_ERNIE = "paddleformers.transformers.ernie4_5_moe.modeling"
_COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "scatter", "scatter_tensor"),
    *("reduce_scatter_tensor", "reduce_scatter", "all_to_all", "all_to_all_single", "all_to_all_tensor"),
    *("send", "recv", "send_partial", "recv_partial", "all_gather_partial"),
)

CPU_RUNTIME = (
    Hook(f"{_CORE}:create_or_get_global_tcp_store"),
    Hook(f"{_CORE}:TCPStore", names=("add", "get", "set", "wait")),
    Hook(
        f"{_GROUPS}:_new_process_group_impl",
        "(backend, store, rank, world_size, group_name, pg_options, group_id=0, nccl_comm_init_option=0, "
        "nccl_config=None)",
    ),
    Hook(f"{_GROUPS}:_default_group_name"),
    Hook(f"{_GROUPS}:_get_group_map", "()"),
    Hook(f"{_GROUPS}:_global_env"),
    Hook("paddle.distributed.parallel:_global_parallel_env"),
    Hook(
        f"{_CORE}:ProcessGroupGloo",
        names=(*_COLLECTIVES, *(f"{name}_on_calc_stream" for name in _COLLECTIVES), "alltoall", "alltoall_single")
        + ("_start_coalescing", "_end_coalescing", "create", "rank", "size"),
    ),
    Hook(f"{_CORE}:ReduceOp", names=("SUM", "MAX")),
    Hook("paddle:_C_ops", names=("linear", "matmul", "c_embedding", "adamw_")),
    Hook(f"{_MPU}:_c_identity", names=("c_identity_eager", "c_identity")),
    Hook(f"{_MPU}:_c_concat", names=("c_concat",)),
    Hook(f"{_MPU}:_c_split", names=("c_split_eager",)),
    Hook(f"{_MPU}:_c_softmax_with_cross_entropy", names=("c_softmax_with_cross_entropy",)),
    Hook("paddle.optimizer:AdamW._append_optimize_op", names=("adamw_",)),
    Hook("paddle:Tensor", names=("cuda",)),
    Hook("paddle.device:synchronize"),
    Hook("paddle.device.cuda:synchronize"),
    Hook("paddle.distributed.parallel:ParallelEnv.device_id", names=("_device_id",)),
    Hook(f"{_FUSION}:alignment"),
    Hook(
        f"{_FUSION}:get_current_device_type",
        names=("__current_device_type__", "alignment"),
    ),
    Hook("paddle.distributed.fleet.utils.hybrid_parallel_util:broadcast_input_data", "(hcg, *inputs, **kwargs)"),
    Hook("paddle.distributed.fleet.utils.hybrid_parallel_util:_broadcast_nested_data", "(hcg, dev, place, data)"),
    Hook(
        f"{_SHARDING}:DygraphShardingOptimizerV2.clear_grad",
        "(self, set_to_zero=True)",
        ("sd_release_grads", "_parameter_list", "main_grad"),
    ),
    Hook(f"{_META}.group_sharded_optimizer_stage2:core"),
    Hook(f"{_META}.group_sharded_optimizer_stage2:paddle"),
    Hook(f"{_META}.group_sharded_stage3:core"),
    Hook(f"{_META}.group_sharded_stage3:paddle"),
    Hook(
        f"{_META}.group_sharded_storage:ParamStorage.add_rank_params",
        "(self, trainable_params, param2align, convert_gpu=True)",
    ),
    Hook(
        "paddle.distributed.sharding:group_sharded_parallel",
        "(model, optimizer, level, scaler=None, group=None, offload=False, sync_buffers=False, "
        "buffer_max_size=8388608, segment_size=1048576, sync_comm=False, dp_group=None, exclude_layer=None)",
        ("get_device", "get_all_custom_device_type"),
    ),
    Hook("paddle.distributed.sharding.group_sharded:paddle"),
    Hook("paddle.distributed.fleet.fleet:Fleet.init", names=("_user_defined_strategy", "_hcg")),
    Hook(
        "paddle.distributed.fleet.base.topology:EPHybridCommunicateGroup",
        names=("get_expert_parallel_world_size", "get_moe_sharding_parallel_group"),
    ),
    Hook("paddle.distributed.fleet.base.topology:HybridCommunicateGroup", names=("get_model_parallel_group",)),
    Hook(f"{_TRAINER}._wrap_distributed_optimizer", "(self, optimizer)", ("_inner_opt", "max_grad_norm")),
    Hook(f"{_ARGUMENTS}.__post_init__", "(self)", ("split_param", "sharding_parallel_size")),
    Hook(f"{_ERNIE}:Ernie4_5_MoeSparseMoeBlock.forward", "(self, input, token_type_ids=None, use_dense_expert=False)"),
    Hook(
        f"{_ERNIE}:Ernie4_5_MoeDecoderLayer.forward",
        "(self, hidden_states, attention_mask=None, attn_mask_startend_row_indices=None, position_ids=None, "
        "position_embeddings=None, output_attentions=False, past_key_values=None, use_cache=False, "
        "output_gate_logits=False)",
    ),
    Hook(
        f"{_ERNIE}:Ernie4_5_MoeForCausalLM.forward",
        "(self, input_ids, position_ids=None, attention_mask=None, attn_mask_startend_row_indices=None, "
        "inputs_embeds=None, labels=None, loss_mask=None, use_cache=False, past_key_values=None, "
        "output_attentions=None, output_hidden_states=None, return_dict=True, **kwargs)",
    ),
    Hook(
        "paddleformers.nn.moe.moe_alltoall_layer:MOEAlltoAllLayer.__init__",
        "(self, gate, experts, layer_idx, shared_experts=None, group=None, recompute=False, k=2, "
        "all_to_all_dropout=0, group_experts=False, moe_statics=None, moe_num_experts=None)",
        ("gate", "experts", "shared_experts", "k", "moe_statics"),
    ),
    Hook("paddleformers.nn.pp_model:_parse_moe_group", "(moe_group)"),
    Hook("paddleformers.utils.moe_hybrid_parallel_optimizer:MuonShardingOptimizer"),
)
"""The dependencies of the CPU runtime's patches; unused on an accelerator."""

NLP_CPU_RUNTIME = (
    Hook(f"{_NLP_ARGUMENTS}.__post_init__", "(self)", ("sharding_parallel_config", "split_param", "amp_master_grad")),
)
"""The same of PaddleNLP."""


@dataclass(frozen=True)
class KnownFault:
    """A fault of upstream that this package avoids.

    Args:
        id: its row in docs/results/guarantees.md.
        package: the module that has it.
        version: the version in which it was observed.
        what: trigger and effect in one line.
    """

    id: str
    package: str
    version: str
    what: str


KNOWN_FAULTS = tuple(
    KnownFault(id, package, VERSIONS[package], what)
    for package, faults in {
        "paddle": {
            "S1": "a resharding load from another dtype fills tensors with other numbers, without an error",
            "S3": "the second of two tied weights keeps its initial values, without an error",
            "S4": "a stored tensor of another shape is cut off or filled in part, without an error",
            "S5": "fused feed-forward weights of several tensor-parallel ranks are taken apart wrongly",
            "S6": "fused attention weights of several tensor-parallel ranks are taken apart wrongly",
            "S11": "a resharding load under FLAGS_use_stride_kernel=0 loads nothing, without an error",
            "S12": "a save over one of more ranks leaves tensors of the older save in place",
            "S13": "after a load that failed, the next one in the process uses the metadata of the first",
            "S18": "a flipped bit of a stored tensor is loaded: there are no checksums",
        },
        "paddleformers": {
            "T3": "an empty newest directory is chosen for a resume",
            "T5": "load_best_model_at_end keeps the weights of the last step",
            "T7": "samples are repeated and skipped if the data-parallel degree changes on resume",
            "T8": "training begins again at step 1 if the file of the Trainer's state is missing",
            "T18": "replicas with different numbers are saved without a warning",
            "T19": "a resume unpickles files of the checkpoint, which can run code",
        },
    }.items()
    for id, what in faults.items()
)
"""The faults that decide whether numbers are right, by package and version."""


def require(hooks: Iterable[Hook]) -> None:
    """Refuse an installed Paddle or PaddleFormers in which a hook is missing or different.

    A version alone is not refused here: see :func:`require_versions`.

    Args:
        hooks: rows of the table.

    Raises:
        EnvironmentMismatch: with every difference, that of versions included.
    """
    found = differences(hooks)
    if found:
        raise _mismatch([*unknown_versions(), *found], "")


def require_versions(unknown: str) -> list[str]:
    """Refuse versions of Paddle and PaddleFormers that this package is not tested with.

    Args:
        unknown: the reaction to them: ``refuse`` or ``warn``.

    Returns:
        one line per unknown version where they are not refused.

    Raises:
        EnvironmentMismatch: a version is unknown and ``unknown`` is not ``warn``.
    """
    found = unknown_versions()
    if found and unknown != "warn":
        raise _mismatch(found, "; or set flex_unknown_versions: warn to try the installed ones")
    return found


def differences(hooks: Iterable[Hook]) -> list[str]:
    """Return every difference between the rows and the installed packages, one line each."""
    hooks = tuple(hooks)
    absent = sorted(name for name in set(map(_package, hooks)) if importlib.util.find_spec(name) is None)
    if absent:
        return [f"{name}{_ABSENT}" for name in absent]
    return list(dict.fromkeys(line for hook in hooks for line in _differences(hook)))


def cpu_runtime_hooks() -> tuple[Hook, ...]:
    """Return the rows of :data:`CPU_RUNTIME` that apply here: none on an accelerator, and none of an absent package."""
    if importlib.import_module("paddle").device.get_device() != "cpu":
        return ()
    hooks = (*CPU_RUNTIME, *NLP_CPU_RUNTIME)
    return tuple(hook for hook in hooks if importlib.util.find_spec(_package(hook)) is not None)


def _package(hook: Hook) -> str:
    return hook.place.partition(":")[0].partition(".")[0]


def unknown_versions() -> list[str]:
    """Return a line for each of Paddle and PaddleFormers that is installed in another version than the tested one."""
    lines = []
    for name, known in VERSIONS.items():
        if importlib.util.find_spec(name) is None:
            continue
        found = sorted({without_build(version) for version in _installed_versions(name)} - {known})
        if found:
            lines.append(f"{name} {', '.join(found)} is installed; the known version is {name} {known}")
    return lines


def _installed_versions(name: str) -> Iterator[str]:
    """Yield the version of the imported module, and that of the distribution of its name, if there is one."""
    yield str(getattr(importlib.import_module(name), "__version__", "without a version"))
    with suppress(importlib.metadata.PackageNotFoundError):
        yield importlib.metadata.version(name)


def without_build(version: str) -> str:
    """Return the version without the suffix of a build for a device, such as ``.post126`` or ``+cu126``."""
    return re.sub(r"(\.post\d{1,3})?(\+.*)?$", "", version)


def _mismatch(evidence: list[str], alternative: str) -> EnvironmentMismatch:
    library = "paddleformers" if importlib.util.find_spec("paddlenlp") is None else "paddlenlp"
    if importlib.util.find_spec("paddleformers") is not None:
        library = "paddleformers"
    absent = [line for line in evidence if line.endswith(_ABSENT)]
    if absent:
        install = f"Run {install_command('nlp')}." if any("paddlenlp" in line for line in absent) else INSTALL
        return EnvironmentMismatch(
            "Paddle or the library with its Trainer is not installed.",
            where=f"Python environment {sys.prefix}",
            evidence=evidence,
            next_step=install,
        )
    versions = f"paddle {VERSIONS['paddle']} and {library} {VERSIONS[library]}"
    return EnvironmentMismatch(
        "The installed Paddle or PaddleFormers differs from what this package is written for.",
        where=f"Python environment {sys.prefix}",
        evidence=evidence,
        next_step=f"Install {versions}, or a version of paddleformers_fc for the installed ones{alternative}.",
    )


def _differences(hook: Hook) -> Iterator[str]:
    module, _, path = hook.place.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # A module may raise anything when it is imported.
        yield f"{module} cannot be imported: {type(error).__name__}: {error}"
        return
    for name in path.split("."):
        if not _has(found, name):
            yield f"{hook.place} is missing"
            return
        found = getattr(found, name)
    function = _function(found)
    if hook.signature:
        signature = _signature(found)
        if signature != hook.signature:
            yield f"{hook.place} has the parameters {signature}; the known ones are {hook.signature}"
    fields = getattr(found, "__dataclass_fields__", ())
    for name in hook.names:
        if function is None and not (_has(found, name) or name in fields):
            yield f"{hook.place} has no {name}"
        elif function is not None and name not in _used(function.__code__):
            yield f"{hook.place} does not use {name}"


def _function(found: Any) -> FunctionType | None:
    """Return the Python function that upstream wrote, below wrappers; None for everything else."""
    found = found.fget if isinstance(found, property) else found
    found = inspect.unwrap(getattr(found, "__func__", found))
    return found if isinstance(found, FunctionType) else None


def _has(found: Any, name: str) -> bool:
    """Return whether a class or module has an attribute that not every object has."""
    return hasattr(found, name) and not (hasattr(object, name) and getattr(found, name) is getattr(object, name))


@functools.cache
def _signature(found: Any) -> str:
    """Return the parameters of a callable without annotations; a default that is no plain value is ``...``.

    They are read once per callable, because a process checks the table several times; a replaced hook is another
    callable.
    """
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return "that cannot be read"
    parameters = [
        one.replace(annotation=one.empty, default=one.default if _is_plain(one.default) else ...)
        for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).replace("Ellipsis", "...")


def _is_plain(default: Any) -> bool:
    if isinstance(default, tuple):
        return all(map(_is_plain, default))
    return default is None or default is inspect.Parameter.empty or isinstance(default, bool | int | float | str)


@functools.cache
def _used(code: CodeType) -> frozenset[str]:
    """Return every name and text in a function's bytecode, also in the functions within it."""
    inner = (_used(one) for one in code.co_consts if isinstance(one, CodeType))
    texts = (one for one in code.co_consts if isinstance(one, str))
    return frozenset().union(code.co_names, texts, *inner)

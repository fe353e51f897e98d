"""The tables of upstream hooks: what this package replaces or reads in Paddle and in the library with the Trainer.

Each line is one hook, ``module:object(parameters): names``. Parameters, if the line has them, are compared without
annotations; a default that is a function is written ``...``. Names are attributes and fields that a class or module
must have, or names and texts that the code of a function must use; ``a|b`` means one of both, for versions that differ.
A line that ends with a colon or a dot is the prefix of the indented lines below it, and deeper lines continue a line.

The tables are templates: ``{library}`` is the package of the Trainer, ``{key}`` its key for weights in Hugging Face
format, and ``{own_key}`` the configuration's attribute for the same. PaddleFleet's Trainer is PaddleFormers' after a
move. No public index has it, so its rows were compared with its public source (docs/compatibility.md), and a run on it
needs ``flex_unknown_versions: warn``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PADDLEFORMERS, PADDLEFLEET, PADDLENLP = "paddleformers", "paddlefleet", "paddlenlp"


class Hook(NamedTuple):
    """One upstream object that this package depends on.

    Args:
        place: module and object, such as ``paddleformers.trainer.trainer:Trainer.train``, or a module alone.
        signature: its parameters without annotations; empty if they are not compared.
        names: for a class or a module, the attributes and fields that it must have; for a function, the names and texts
            that its code must use.
    """

    place: str
    signature: str
    names: tuple[str, ...]

    @property
    def package(self) -> str:
        """The package of the place."""
        return self.place.partition(":")[0].partition(".")[0]


_CALLBACKS = "".join(
    f"""
{{library}}.trainer.trainer_callback:
    CallbackHandler.{event}(self, args, state, control): call_event {event}
    TrainerCallback.{event}(self, args, state, control, **kwargs)"""
    for event in ("on_init_end", "on_train_begin", "on_epoch_begin", "on_epoch_end", "on_step_end", "on_save")
)

_TRAINER = """
{library}.trainer.trainer:Trainer.
    # The replaced methods, and the attributes of a constructed Trainer.
    __init__: args model optimizer lr_scheduler state do_grad_scaling callback_handler on_init_end runtime_timer
        tokenizer
    train(self, resume_from_checkpoint=None, ignore_keys_for_eval=None): _inner_training_loop
    _inner_training_loop(self, args, model, train_dataloader, len_dataloader, max_steps, num_train_epochs,
        num_update_steps_per_epoch, num_train_samples, resume_from_checkpoint, ignore_keys_for_eval): callback_handler
        on_train_begin on_epoch_begin on_step_end on_epoch_end set_epoch on_optimizer_begin on_train_end
        _load_rng_state _maybe_log_save_evaluate load_best_model_at_end best_model_checkpoint
    _load_rng_state(self, checkpoint)
    _save_checkpoint(self, model, metrics=None)
    evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix='eval')
    _sorted_checkpoints(self, output_dir=None, checkpoint_prefix='checkpoint', use_mtime=False)
    _rotate_checkpoints(self, use_mtime=False, output_dir=None)
    # How the training loop calls the replaced methods and the callbacks.
    _maybe_log_save_evaluate: should_save _save_checkpoint on_save
    training_pipeline_step: _pp_data_buffer
    add_callback(self, callback)
{library}.trainer.trainer_callback:
    CallbackHandler.call_event(self, event, args, state, control, **kwargs): callbacks
    CallbackHandler.on_train_end: call_event on_train_end
    CallbackHandler.on_optimizer_begin: call_event on_optimizer_begin
    TrainerCallback.on_optimizer_begin(self, args, state, control, **kwargs)
    TrainerState: epoch global_step consumed_samples max_steps num_train_epochs total_flos log_history best_metric
        best_model_checkpoint is_local_process_zero is_world_process_zero trial_name trial_params
    TrainerControl: should_evaluate should_save
{library}.trainer.training_args:
    # Read by the replaced methods.
    TrainingArguments: dataset_world_size distributed_dataloader gradient_accumulation_steps greater_is_better
        ignore_data_skip ignore_load_lr_and_optim ignore_save_lr_and_optim load_best_model_at_end max_steps
        metric_for_best_model optim output_dir overwrite_output_dir per_device_train_batch_size resume_from_checkpoint
        save_total_limit seed sharding should_log to_dict world_size dataloader_drop_last
    # Compared with flex_checkpoint. A renamed option would no longer be detected.
    TrainingArguments: unified_checkpoint save_sharded_model load_sharded_model ckpt_quant_stage use_async_save
        enable_auto_parallel auto_parallel_resume_form_hybrid_parallel pdc_download_ckpt
    TrainingArguments.__post_init__: use_hybrid_parallel
{library}.trainer.trainer: PREFIX_CHECKPOINT_DIR ShardingOption
{library}.trainer.trainer_utils:ShardingOption: FULL_SHARD SHARD_OP
{library}.trainer.plugins.timer:RuntimeTimer.start(self, name)
{library}.trainer.plugins.timer:RuntimeTimer.stop(self)
{library}.utils.log: logger
# The data.
{library}.utils.batch_sampler:DistributedBatchSampler.__init__: total_size
{library}.utils.batch_sampler:DistributedBatchSampler.set_epoch(self, epoch=0, consumed_samples=0)
{library}.data.dist_dataloader:DistDataLoader.__init__: _need_data
paddle.io:
    BatchSampler.__init__: sampler
    Sampler.__init__: data_source
    DistributedBatchSampler.__init__: shuffle nranks drop_last
paddle.io.reader:DataLoader.__init__: batch_sampler _persistent_workers
paddle.io.reader:DataLoader.__iter__: _persistent_workers
# The model and its configuration.
{library}.transformers.model_utils:
    PretrainedModel: can_generate sharded_state_dict
    PretrainedModel.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
    PretrainedModel._from_config(config, **kwargs): dtype dtype_guard
    get_parameter_dtype(parameter)
{library}.transformers.configuration_utils:
    PretrainedConfig.to_json_string(self, use_diff=True, saving_file=False)
    LlmMetaConfig: hybrid_parallel_attributes recompute_attributes
    LlmMetaConfig._get_unsavable_keys()
{library}.quantization.quantization_config:QuantizationConfig: to_dict
{library}.generation.configuration_utils:GenerationConfig.__init__: _from_model_config
{library}.generation.configuration_utils:GenerationConfig.from_model_config(model_config)
paddle.nn:Layer: named_sublayers named_parameters named_buffers
# The fused parameters of the semi-automatic mode.
paddle.distributed.auto_parallel.fully_shard_fusion:
    get_fsdp_context()
    FullyShardFusion.__init__: model mesh buffer_manager comm_manager
    TensorFusionBuffer.__init__: data_buffer param_offsets process_ids
    FSDPBufferManager.__init__: buffer_groups param_to_buffer_id _fsdp_group
    FSDPCommManager.reset_params_buffer_status(self)
# The optimizer and its wrappers.
paddle.optimizer:
    AdamW.__init__: _use_lowprecision_moment _param_groups _parameter_list
    AdamW._create_accumulators(self, block, parameters): _add_moments_pows
    AdamW.clear_grad(self, set_to_zero=True)
    Adam.__init__: _multi_precision
    Optimizer.__init__: _auxiliary_vars _default_dict _learning_rate _learning_rate_map _param_dict
    Optimizer._create_master_grad: _master_grads
    Optimizer._add_accumulator: _accumulators _accumulators_holder _name
    Optimizer._create_master_weight(self, param): _master_weights
    Optimizer._gen_master_weight_var_name(self, param): _fp32_master
paddle.optimizer.lr:CosineAnnealingWarmRestarts.__init__: T_0 T_mult T_cur T_i
paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer:
    DygraphShardingOptimizer.__init__: _inner_opt _rank2fused _rank2params _sharding_rank tensor_fusion fuse_optimizer
    DygraphShardingOptimizerV2.__init__: _inner_opt _comm_buffer_list pp_overlap
    DygraphShardingOptimizerV2._collect_comm_buffers(self): comm_buffer_ref
paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer:
    HybridParallelOptimizer.__init__: _inner_opt
paddle.distributed.fleet.utils.tensor_fusion_helper:
    ShardingGradView.__init__: _param _param_buffer _index _param_begin _param_end
    FusedCommBuffer.__init__: _sharding_param_grad_view
paddle.distributed.fleet.utils.mix_precision_utils:MixPrecisionLayer.__init__: main_grad
paddle.distributed.fleet.meta_parallel.meta_parallel_base:MetaParallelBase.__init__: _layers
paddle.distributed.fleet.meta_parallel.pipeline_parallel:PipelineParallel.
    register_sharding_comm_overlap_hook(self, optimizer): _chunk_2_comm_buffers
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2:GroupShardedOptimizerStage2.
    __init__: _optim _rank
    _segment_params(self)
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage2:GroupShardedStage2.__init__: _layer
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3:
    GroupShardedStage3.__init__: _layer _optim
    GroupShardedStage3._param_storage: fw_storage slice@
    GroupShardedStage3._update_params: bw_storage
    TaskFlow.__init__: full_param
    _release_param: full_param fw_storage status use_count
# Tensors, the description of their shards, and random generators.
paddle: get_rng_state set_rng_state
paddle:Tensor: _slice _clear_data _is_initialized clear_gradient data_ptr is_contiguous copy_ _copy_to
paddle:DataParallel.__init__: _layers
paddle.base.framework: EagerParamBase
paddle.base.framework:default_main_program()
paddle.base.core: default_cpu_generator
paddle.base.core:GeneratorState: __getstate__ __setstate__
paddle.device: get_device synchronize current_stream stream_guard
paddle.device:Stream: wait_stream record_event
paddle.distributed:ShardedWeight.
    __init__(self, key, local_tensor, local_shape, global_shape, global_offset, is_flattened=False,
        flattened_range=None): key local_tensor local_shape global_shape global_offset is_flattened flattened_range
        is_dist _local_value
paddle.distributed.fleet.meta_parallel:get_rng_state_tracker()
paddle.distributed.fleet.layers.mpu.random:RNGStatesTracker.get_states_tracker(self)
paddle.distributed.fleet.layers.mpu.random:RNGStatesTracker.set_states_tracker(self, states)
# Ranks and their messages.
paddle.distributed: is_initialized get_rank get_world_size
paddle.distributed:
    all_gather(tensor_list, tensor, group=None, sync_op=True)
    alltoall_single(out_tensor, in_tensor, in_split_sizes=None, out_split_sizes=None, group=None, sync_op=True)
# The job's store, and the one for the gloo groups of background threads.
paddle.base.core:TCPStore: add get set
paddle.distributed.collective: _default_store
paddle.distributed.fleet: get_hybrid_communicate_group
paddle.distributed.fleet.fleet:Fleet.init: _hcg
paddle.distributed.fleet.base.topology:
    HybridCommunicateGroup: get_data_parallel_world_size get_model_parallel_world_size get_pipe_parallel_world_size
        get_sep_parallel_world_size get_sharding_parallel_rank get_sharding_parallel_world_size
    EPHybridCommunicateGroup: get_context_parallel_world_size get_expert_parallel_world_size
"""

_FORMERS = """
{library}.trainer.trainer:Trainer.
    __init__: processing_class
    train: _load_flex_checkpoint load_checkpoint_format flex_checkpoint
        InterleaveGateUpCallback|SonicMoELayoutSwitchCallback
    _load_flex_checkpoint(self, resume_from_checkpoint)
    _inner_training_loop: _skip_global_steps
    save_model(self, output_dir=None, merge_tensor_parallel=False, last_fc_to_hf=False): _save
    _save(self, output_dir=None, state_dict=None, merge_tensor_parallel=False, last_fc_to_hf=False)
    _maybe_log_save_evaluate: save_pretrained copy_custom_file_list
    copy_custom_files(self, output_dir)
{library}.trainer.argparser:PdArgumentParser.__init__(self, dataclass_types, **kwargs): dataclass_types
{library}.trainer.argparser:PdArgumentParser.parse_dict(self, args, return_unknown_ars=False): dataclass_types
{library}.trainer.trainer_callback:CallbackHandler.__init__: callbacks
{library}.trainer.training_args:
    # Read by the replaced methods.
    TrainingArguments: aoa_config save_rng_states save_tokenizer dataloader_num_workers sharding_parallel_size
        tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size sep_parallel_size
        context_parallel_size
    # Compared with the arguments of the run that saved a checkpoint.
    TrainingArguments: learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm scale_loss
        lr_scheduler_type warmup_ratio warmup_steps min_lr lr_end num_cycles power num_train_epochs
    # Compared with flex_checkpoint. A renamed option would no longer be detected.
    TrainingArguments: save_checkpoint_format load_checkpoint_format enable_zero_cost_checkpoint
        flash_device_save_steps online_merge_ema
    # Moved to the keys of this package, or read. A renamed option would have no effect.
    TrainingArguments: zcc_save_ema_coef zcc_ema_interval zcc_ema_loss_threshold sharded_model_from_ema load_from_hf
        tensorwise_offload_optimizer using_sonic_moe replicate_saved_into_local save_on_each_node flex_ckpt_comm_method
        load_via_cpu ordered_save_group_size {key} optim_shard_num save_hf_memory_growth_threshold
{library}.trainer.utils.offload_optimizer:offload(tensor): to_device
{library}.utils.optimizer: AdamWCustom AdamWMini
# The data.
{library}.utils.batch_sampler:
    RandomSamplerWithSeed.__init__: base_seed
    MappingBatchSampler.set_epoch(self, epoch=0, consumed_samples=0)
    MappingDistributedBatchSampler.__init__: base_seed total_size
    MappingDistributedBatchSampler.set_epoch(self, epoch=0, consumed_samples=0)
{library}.data.dist_dataloader:DistDataLoader.__init__: _dataloader _lazy_dataloader_iter
{library}.data.dist_dataloader:DistDataLoader.__next__: _need_data
# The model and its configuration.
{library}.peft.lora.lora_model:LoRAModel.
    __init__: lora_config model quantized
    from_pretrained(model, lora_path, **kwargs)
    sharded_state_dict: model sharded_state_dict
{library}.peft.lora.lora_config:
    LoRAConfig: r lora_alpha rslora target_modules trainable_modules trainable_bias lora_dropout lora_plus_scale loraga
        do_qat dtype base_model_name_or_path from_pretrained
{library}.peft.lora.lora_layers: LoRAConv2D LoRAMoeExperts FleetLoRAMoeExperts
{library}.peft.lora.lora_quantization_layers: QuantizationLoRABaseLinear
{library}.transformers.model_utils:
    PretrainedModel.save_pretrained(self, save_dir, is_main_process=True, state_dict=None, save_function=...,
        max_shard_size='10GB', safe_serialization=False, variant=None, *args, **kwargs): config_to_save _gen_aoa_config
        _gen_inv_aoa_config
    PretrainedModel.from_pretrained: config state_dict cache_dir ignore_mismatched_sizes dtype download_hub subfolder
        load_via_cpu load_checkpoint_format variant use_safetensors low_cpu_mem_usage convert_from_hf load_state_as_np
        key_mapping force_download from_hf_hub from_aistudio convert_from_torch is_weight_quantize
        _resolve_model_file_path
    PretrainedModel._resolve_model_file_path(pretrained_model_name_or_path, download_hub=None, cache_dir=None,
        subfolder='', config=None, convert_from_hf=True, use_safetensors=None, variant=None)
{library}.transformers.configuration_utils:PretrainedConfig.__init__: architectures dtype {own_key}
{library}.transformers.configuration_utils:PretrainedConfig.to_dict: {own_key}
"""

_ALTERNATING = """
{library}.trainer.trainer_callback:InterleaveGateUpCallback.
    __init__: resume_from_checkpoint
    interleave_gate_up_proj(self, w)
    on_train_begin: resume_from_checkpoint
"""

_SWITCHING = """
{library}.trainer.trainer_callback:SonicMoELayoutSwitchCallback.
    on_step_begin: convert_weights_to_sonic_layout
    on_optimizer_begin: convert_weights_to_grouped_layout
"""

_NLP = """
{library}.trainer.trainer:Trainer.
    __init__: train_dataset
    train: _load_from_checkpoint _wrap_model _load_optimizer_and_scheduler create_optimizer_and_scheduler
        get_train_dataloader
    _load_from_checkpoint(self, resume_from_checkpoint=None)
    _load_optimizer_and_scheduler(self, checkpoint)
    _get_train_sampler(self): BatchSampler DistributedBatchSampler dataset_world_size
    get_train_dataloader(self): _get_train_sampler distributed_dataloader
    save_model(self, output_dir=None, merge_tensor_parallel=False): _save
    _save(self, output_dir=None, state_dict=None, merge_tensor_parallel=False)
{library}.trainer.training_args:
    TrainingArguments: tensor_parallel_degree pipeline_parallel_degree sharding_parallel_degree
    # Compared with flex_checkpoint. A renamed option would no longer be detected.
    TrainingArguments: sep_parallel_degree context_parallel_degree expert_parallel_degree use_expert_parallel
        sharding_parallel_config pipeline_parallel_config offload_optim force_reshard_pp to_static
{library}.peft: LoRAModel
{library}.transformers.model_utils:PipelinePretrainedModel._set_pipeline_name_mapping: _pp_to_single_mapping
{library}.transformers.llama.modeling:LlamaLMHead.__init__: is_distributed split_axis
{library}.transformers.qwen2.modeling:Qwen2LMHead.__init__: is_distributed split_axis
paddle.distributed.flex_checkpoint.dcp.sharded_weight:
    make_tp_sharded_weight_for_checkpoint(key, tensor, tensor_parallel_axis=0)
paddle.io: RandomSampler
"""

_COMMAND_LINE = """
{library}.cli.hparams.finetuning_args:FinetuningArguments: ref_model_update_steps
{library}.cli.hparams.data_args:
    DataArguments: dataset_type input_dir split train_dataset_type train_dataset_path train_dataset_prob mix_strategy
        random_shuffle num_samples_each_epoch max_seq_len packing padding_free
{library}.cli.hparams.model_args:ModelArguments: model_name_or_path stage
{library}.cli.train.sft.workflow:run_sft: from_pretrained model_name_or_path
{library}.cli.train.dpo.workflow:run_dpo: from_pretrained model_name_or_path
{library}.cli.train.dpo.dpo_trainer:DPOTrainer.
    __init__: ref_model
    compute_loss: dpo_config ref_model_update_steps ref_model
{library}.data.causal_dataset:GPTDataset.__getitem__: shuffle_idx sample_idx doc_idx
{library}.data.blendable_dataset:BlendableDataset.__getitem__: datasets dataset_index dataset_sample_index
"""

_CPU_RUNTIME = """
# Process groups and their collectives.
paddle.base.core: create_or_get_global_tcp_store
paddle.base.core:
    TCPStore: add get set wait
    ReduceOp: SUM MAX
    ProcessGroupGloo: all_reduce reduce broadcast all_gather all_gather_into_tensor scatter scatter_tensor
        reduce_scatter_tensor reduce_scatter all_to_all all_to_all_single all_to_all_tensor send recv send_partial
        recv_partial all_gather_partial alltoall alltoall_single _start_coalescing _end_coalescing create rank size
    ProcessGroupGloo: all_reduce_on_calc_stream reduce_on_calc_stream broadcast_on_calc_stream all_gather_on_calc_stream
        all_gather_into_tensor_on_calc_stream scatter_on_calc_stream scatter_tensor_on_calc_stream
        reduce_scatter_tensor_on_calc_stream reduce_scatter_on_calc_stream all_to_all_on_calc_stream
        all_to_all_single_on_calc_stream all_to_all_tensor_on_calc_stream send_on_calc_stream recv_on_calc_stream
        send_partial_on_calc_stream recv_partial_on_calc_stream all_gather_partial_on_calc_stream
paddle.distributed.collective: _default_group_name _global_env
paddle.distributed.collective:
    _new_process_group_impl(backend, store, rank, world_size, group_name, pg_options, group_id=0,
        nccl_comm_init_option=0, nccl_config=None)
    _get_group_map()
paddle.distributed.parallel: _global_parallel_env
paddle.distributed.fleet.base.topology:
    EPHybridCommunicateGroup: get_expert_parallel_world_size get_moe_sharding_parallel_group
    HybridCommunicateGroup: get_model_parallel_group
paddle.distributed.fleet.fleet:Fleet.init: _user_defined_strategy _hcg
# Operators and devices.
paddle:_C_ops: linear matmul c_embedding adamw_
paddle:Tensor: cuda
paddle.device: synchronize
paddle.device.cuda: synchronize
paddle.distributed.parallel:ParallelEnv.device_id: _device_id
paddle.distributed.fleet.layers.mpu.mp_ops:
    _c_identity: c_identity_eager c_identity
    _c_concat: c_concat
    _c_split: c_split_eager
    _c_softmax_with_cross_entropy: c_softmax_with_cross_entropy
paddle.distributed.fleet.utils.hybrid_parallel_util:
    broadcast_input_data(hcg, *inputs, **kwargs)
    _broadcast_nested_data(hcg, dev, place, data)
# Optimizers and sharding.
paddle.optimizer:AdamW._append_optimize_op: adamw_
paddle.distributed.sharding:
    group_sharded_parallel(model, optimizer, level, scaler=None, group=None, offload=False, sync_buffers=False,
        buffer_max_size=8388608, segment_size=1048576, sync_comm=False, dp_group=None, exclude_layer=None): get_device
        get_all_custom_device_type
paddle.distributed.sharding.group_sharded: paddle
paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer:DygraphShardingOptimizerV2.
    clear_grad(self, set_to_zero=True): sd_release_grads _parameter_list main_grad
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_optimizer_stage2: core paddle
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3: core paddle
paddle.distributed.fleet.meta_parallel.sharding.group_sharded_storage:ParamStorage.
    add_rank_params(self, trainable_params, param2align, convert_gpu=True)
paddle.distributed.fleet.utils.tensor_fusion_helper: alignment
paddle.distributed.fleet.utils.tensor_fusion_helper:get_current_device_type: __current_device_type__ alignment
"""

_CPU_RUNTIME_FORMERS = """
{library}.trainer.trainer:Trainer._wrap_distributed_optimizer(self, optimizer): _inner_opt max_grad_norm
{library}.trainer.training_args:TrainingArguments.__post_init__(self): split_param sharding_parallel_size
{library}.transformers.ernie4_5_moe.modeling:
    Ernie4_5_MoeSparseMoeBlock.forward(self, input, token_type_ids=None, use_dense_expert=False)
    Ernie4_5_MoeDecoderLayer.forward(self, hidden_states, attention_mask=None, attn_mask_startend_row_indices=None,
        position_ids=None, position_embeddings=None, output_attentions=False, past_key_values=None, use_cache=False,
        output_gate_logits=False)
    Ernie4_5_MoeForCausalLM.forward(self, input_ids, position_ids=None, attention_mask=None,
        attn_mask_startend_row_indices=None, inputs_embeds=None, labels=None, loss_mask=None, use_cache=False,
        past_key_values=None, output_attentions=None, output_hidden_states=None, return_dict=True, **kwargs)
{library}.nn.moe.moe_alltoall_layer:MOEAlltoAllLayer.
    __init__(self, gate, experts, layer_idx, shared_experts=None, group=None, recompute=False, k=2,
        all_to_all_dropout=0, group_experts=False, moe_statics=None, moe_num_experts=None): gate experts shared_experts
        k moe_statics
{library}.nn.pp_model:_parse_moe_group(moe_group)
{library}.utils.moe_hybrid_parallel_optimizer: MuonShardingOptimizer
"""

_CPU_RUNTIME_NLP = """
{library}.trainer.training_args:TrainingArguments.
    __post_init__(self): sharding_parallel_config split_param amp_master_grad
"""


class Library(NamedTuple):
    """A library with a Trainer.

    Args:
        name: its name in messages.
        version: the tested version; empty if there is none.
        keys: the names of the key for weights in Hugging Face format, over all versions.
        trainer: the rows of the Trainer and its models, in addition to the common ones.
        cpu_runtime: the rows of the CPU runtime, in addition to Paddle's.
    """

    name: str
    version: str
    keys: tuple[str, ...]
    trainer: str
    cpu_runtime: str


_KEY, _NEW_KEY = "save_to_hf", "save_safetensors"
LIBRARIES = {
    PADDLEFORMERS: Library("PaddleFormers", "1.2.0", (_KEY, _NEW_KEY), _FORMERS + _ALTERNATING, _CPU_RUNTIME_FORMERS),
    PADDLEFLEET: Library("PaddleFleet", "", (_NEW_KEY,), _FORMERS + _SWITCHING, _CPU_RUNTIME_FORMERS),
    PADDLENLP: Library("PaddleNLP", "3.0.0b4", (), _NLP, _CPU_RUNTIME_NLP),
}
"""The libraries by package. The first installed one is used."""


def _hooks(table: str, library: str) -> Iterator[Hook]:
    """Yield the hooks of a table for one library."""
    keys = LIBRARIES[library].keys
    above = ""
    filled = table.format(library=library, key="|".join(keys), own_key="|".join(f"_{key}" for key in keys))
    for line in filled.replace("\n        ", " ").splitlines():
        row = line.strip()
        if not row or row.startswith("#"):
            continue
        if row.endswith((":", ".")):
            above = row
            continue
        described, _, names = row.partition(": ")
        place, parenthesis, parameters = described.partition("(")
        yield Hook((above if line[0] == " " else "") + place, parenthesis + parameters, tuple(names.split()))


TRAINERS = {name: tuple(_hooks(_TRAINER + _CALLBACKS + one.trainer, name)) for name, one in LIBRARIES.items()}
"""The hooks of a Trainer with ``flex_checkpoint: true``, by library."""

LOOP = tuple(hook for hook in TRAINERS[PADDLEFORMERS] if hook.package == "paddle")
"""The hooks of ``save`` and ``load`` without a Trainer."""

_MODEL_PACKAGES = ("generation", "peft", "quantization", "transformers", "utils")
MODELS = {
    name: tuple(hook for hook in hooks if hook.place.startswith(tuple(f"{name}.{one}." for one in _MODEL_PACKAGES)))
    for name, hooks in TRAINERS.items()
}
"""The additional hooks of a library's models."""

COMMAND_LINES = {name: tuple(_hooks(_COMMAND_LINE, name)) for name in (PADDLEFORMERS, PADDLEFLEET)}
"""The additional hooks of a library's command line."""

CPU_RUNTIMES = {name: tuple(_hooks(_CPU_RUNTIME + one.cpu_runtime, name)) for name, one in LIBRARIES.items()}
"""The hooks of the CPU runtime's patches to Paddle and the library; unused on an accelerator."""

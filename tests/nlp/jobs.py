"""Jobs for ranks: train tiny models of PaddleNLP with flex checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verification.matrix import tiny
from verification.matrix.layouts import MatrixLayout, layout_from

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": tiny.VOCABULARY,
    "max_position_embeddings": 64,
    "seq_length": tiny.SEQUENCE,
    "tie_word_embeddings": False,
}


def arguments(layout: MatrixLayout, output_dir: str, **overrides: Any) -> Any:
    """The training arguments of PaddleNLP for a layout."""
    from paddleformers_fc.nlp import FlexTrainingArguments

    micro_batch = 2 if layout.pp > 1 else tiny.GLOBAL_BATCH // layout.data_parallel
    settings: dict[str, Any] = {
        "output_dir": output_dir,
        "device": "cpu",
        "max_steps": 3,
        "save_steps": 10**6,
        "logging_steps": 1,
        "seed": 42,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": tiny.GLOBAL_BATCH // layout.data_parallel // micro_batch,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "tensor_parallel_degree": layout.tp,
        "pipeline_parallel_degree": layout.pp,
        "sharding": f"stage{layout.stage}" if layout.sharding > 1 else "",
        "sharding_parallel_degree": layout.sharding if layout.sharding > 1 else -1,
        "sharding_parallel_config": "split_param" if layout.split_param else "",
        "bf16": layout.bf16,
        "fp16_opt_level": "O2",
        "amp_master_grad": layout.bf16,
        "disable_tqdm": True,
        "report_to": [],
        "skip_profile_timer": True,
        "flex_checkpoint": True,
    }
    settings |= overrides
    return FlexTrainingArguments(**settings)


def build(model_type: str, layout: MatrixLayout, args: Any, **overrides: Any) -> Any:
    """A tiny model with the weights of :func:`tiny.weight`, as the layout needs it."""
    from paddlenlp import transformers

    stem = {"llama": "Llama", "qwen2": "Qwen2"}[model_type]
    config = getattr(transformers, f"{stem}Config")(**CONFIG)
    for key, value in overrides.items():
        setattr(config, key, value)  # PaddleNLP's constructor drops some keys.
    config.tensor_parallel_degree = layout.tp
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config.pipeline_parallel_degree = layout.pp
    config.virtual_pp_degree = layout.vpp
    config.use_flash_attention = False
    kind = getattr(transformers, f"{stem}ForCausalLM{'Pipe' if layout.pp > 1 else ''}")
    model = kind.from_config(config, dtype="bfloat16" if layout.bf16 else "float32")
    initialise(model, layout.tp)
    return model


def initialise(model: Any, tp: int) -> None:
    """Give every weight of a model the value that it has in the tiny models of PaddleFormers."""
    import numpy as np
    import paddle

    from paddleformers_fc.layout.roles import MODEL_STATE
    from paddleformers_fc.trainer.live_roles import model_roles

    for key, shard in model_roles(model)[MODEL_STATE].items():
        is_split = list(shard.local_shape) != list(shard.global_shape)
        name = key.replace(f"{model.config.model_type}.", "model.", 1).replace("gate_up_fused_proj", "up_gate_proj")
        if name == "lm_head.weight" and not model.config.tie_word_embeddings:
            whole = np.ascontiguousarray(tiny.weight(name, shard.global_shape[::-1]).T)
        else:
            whole = tiny.model_weight(name, shard.global_shape, model.config, tp if is_split else 1)
        box = tuple(
            slice(begin, begin + size) for begin, size in zip(shard.global_offset, shard.local_shape, strict=True)
        )
        shard.local_tensor.set_value(
            paddle.to_tensor(np.ascontiguousarray(whole[box])).astype(shard.local_tensor.dtype)
        )


def _export_of_paddlenlp(model: Any, directory: str) -> None:
    """Save the model as PaddleNLP merges it: ``model_state.pdparams`` of the first rank."""
    vars(model).pop("save_pretrained", None)
    model.save_pretrained(directory, merge_tensor_parallel=True)


def train(
    model_type: str,
    layout: Mapping[str, Any],
    output_dir: str,
    resume: str | bool | None = None,
    settings: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    export: str | None = None,
    is_installed: bool = False,
) -> dict[str, Any]:
    """Train, and export at the end if asked to, also as PaddleNLP does.

    Args:
        is_installed: train with PaddleNLP's own Trainer after ``install``.

    Returns:
        the losses of the steps and of evaluations, and the names of the checkpoints.
    """
    from paddlenlp.trainer import Trainer, TrainerCallback

    from paddleformers_fc import nlp

    if is_installed:
        nlp.install()
    laid_out = layout_from(layout)
    losses: list[float] = []
    evaluated: list[float] = []

    class Remember(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if resume is not None:
                trainer._save_checkpoint(trainer.model)  # The loaded state, before the first step.

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            evaluated.append(float(metrics["eval_loss"]))

    args = arguments(laid_out, output_dir, **(settings or {}))
    built = build(model_type, laid_out, args, **(model or {}))
    given = {"train_dataset": tiny.Samples(), "eval_dataset": tiny.Samples(), "data_collator": tiny.collate}
    kind = Trainer if is_installed else nlp.FlexTrainer
    trainer = kind(model=built, args=args, callbacks=[Remember()], **given)
    trainer.train(resume_from_checkpoint=resume)
    if export is not None:
        trainer.save_model(export)
        _export_of_paddlenlp(built, f"{export}-paddlenlp")
    saved = sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
    return {"losses": losses, "evaluated": evaluated, "saved": saved}


def from_open_weights(directory: str, layout: Mapping[str, Any], output_dir: str) -> None:
    """Start from open weights under a layout, and export them again as ``export``."""
    from paddlenlp.transformers import AutoModelForCausalLM

    from paddleformers_fc.nlp import FlexTrainer

    args = arguments(layout_from(layout), output_dir)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        tensor_parallel_degree=args.tensor_parallel_degree,
        tensor_parallel_rank=args.tensor_parallel_rank,
    )
    FlexTrainer(model=model, args=args, train_dataset=tiny.Samples()).save_model(f"{output_dir}/export")


def refusals(output_dir: str) -> dict[str, str]:
    """What is not supported, and the errors of it."""
    from paddlenlp.peft import LoRAConfig, LoRAModel
    from paddlenlp.transformers import MistralConfig, MistralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

    from paddleformers_fc.nlp import FlexTrainer

    single = MatrixLayout("single")

    def trained(model: Any) -> None:
        FlexTrainer(model=model, args=arguments(single, output_dir), train_dataset=tiny.Samples())

    def llama(**overrides: Any) -> Any:
        return build("llama", single, arguments(single, output_dir), **overrides)

    def other_family() -> Any:
        return MistralForCausalLM(MistralConfig(**CONFIG))

    def experts() -> Any:
        small = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        return Qwen2MoeForCausalLM(Qwen2MoeConfig(**CONFIG, **small))

    def adapters() -> Any:
        return LoRAModel(llama(), LoRAConfig(target_modules=[".*q_proj.*"], r=2))

    options = {
        "unified_checkpoint": {"unified_checkpoint": True},
        "save_sharded_model": {"save_sharded_model": True},
        "stage2": {"sharding": "stage2"},
        "sep_parallel_degree": {"sep_parallel_degree": 2},
        "context_parallel_degree": {"context_parallel_degree": 2},
        "expert_parallel_degree": {"expert_parallel_degree": 2},
        "offload_optim": {"offload_optim": True},
        "adafactor": {"optim": "adafactor"},
    }
    return {
        **{name: _error(lambda one=one: arguments(single, output_dir, **one)) for name, one in options.items()},  # type: ignore[misc]
        "alibi": _error(lambda: trained(llama(alibi=True))),
        "linear": _error(lambda: trained(llama(rope_scaling_type="linear"))),
        "experts": _error(lambda: trained(experts())),
        "mistral": _error(lambda: trained(other_family())),
        "adapters": _error(lambda: trained(adapters())),
        "no Trainer": _error(lambda: type("Mine", (_mixin(),), {})),
    }


def _mixin() -> Any:
    from paddleformers_fc.nlp import FlexTrainerMixin

    return FlexTrainerMixin


def _error(work: Any) -> str:
    from paddleformers_fc.errors import FlexError

    try:
        work()
    except FlexError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hooks() -> list[str]:
    """What the table of hooks reports of this environment."""
    from paddleformers_fc import upstream
    from paddleformers_fc.upstream.hooks import TRAINERS

    hooks = (*TRAINERS[upstream.LIBRARY], *upstream.cpu_runtime_hooks())
    return [*upstream.differences(hooks), *upstream.unknown_versions()]

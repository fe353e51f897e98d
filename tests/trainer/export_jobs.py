"""Open weights of live models, written and read: jobs of the fork server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny
from tests.trainer.jobs import flex_trainer, weights_of


def export(output_dir: str, layout: Mapping[str, Any], resume: str) -> dict[str, Any]:
    """Export in the three ways that a Trainer has; whether what is reloaded equals the model."""
    from paddleformers.transformers import AutoModelForCausalLM

    trainer = flex_trainer(layout, output_dir, {"max_steps": 3})
    trainer.train(resume_from_checkpoint=resume)
    targets = {name: str(Path(output_dir) / name) for name in ("save_model", "save_pretrained", "in_many_files")}
    trainer.save_model(targets["save_model"], last_fc_to_hf=True)
    trainer.model.save_pretrained(targets["save_pretrained"])
    trainer.model.save_pretrained(targets["in_many_files"], max_shard_size="300kB")
    found: dict[str, Any] = {}
    for name, target in targets.items():
        found[name] = sorted(path.name for path in Path(target).iterdir())
    if layout["nproc"] == 1:
        reloaded = AutoModelForCausalLM.from_pretrained(targets["in_many_files"], convert_from_hf=True)
        found["same"] = weights_of(reloaded) == weights_of(trainer.model)
    return found


def start_from_open_weights(
    model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, source: str, target: str
) -> dict[str, list[str]]:
    """Fill a zeroed model from open weights, export it again; what kept its values and what was left over."""
    import paddle

    from paddleformers_fc import load_open_weights
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    args = tiny.training_arguments(layout, output_dir)
    built = tiny.build(model_type, layout, args, **model)
    with paddle.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
    report = load_open_weights(built, source)
    channel = job_channel()
    files = {"config.json": documents.config_text(built).encode()} if channel.rank == 0 else {}
    weights = live_roles.model_roles(built)["model_state"]
    save_weights(weights, describe_model(built), files, Path(target), 10**9, channel)
    return {"fresh": list(report.fresh), "dropped": list(report.dropped)}


def export_initial(
    model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, target: str
) -> None:
    """Export a tiny model with the weights it begins with."""
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    args = tiny.training_arguments(layout, output_dir)
    built = tiny.build(model_type, layout, args, **model)
    files = {"config.json": documents.config_text(built).encode()}
    weights = live_roles.model_roles(built)["model_state"]
    save_weights(weights, describe_model(built), files, Path(target), 10**9, job_channel())


def run_and_export(
    layout: Mapping[str, Any],
    output_dir: str,
    exports: str,
    model_type: str,
    model: Mapping[str, Any],
    steps: int,
    source: str | None = None,
    resume: bool = False,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Train and export in both ways of a live model.

    Args:
        exports: the directory for ``save_model`` and ``save_pretrained``.
        steps: how many; the last one is saved.
        source: open weights to start from.
        resume: whether to resume the newest checkpoint.
        generation: generation settings that a user gives the model before training.
    """
    from paddleformers.generation import GenerationConfig

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, load_open_weights

    settings = {"max_steps": steps, "save_steps": steps, "flex_checkpoint": True, "cls": FlexTrainingArguments}
    micro_batch = 1 if model.get("num_nextn_predict_layers") else None
    args = tiny.training_arguments(layout, output_dir, micro_batch, **settings)
    built = tiny.build(model_type, layout, args, **model)
    if source is not None:
        load_open_weights(built, source)
    if generation is not None:
        built.generation_config = GenerationConfig(**generation)
    trainer = tiny.trainer(built, args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(f"{exports}/save_model")
    trainer.model.save_pretrained(f"{exports}/save_pretrained")


def generation_settings(text: str) -> dict[str, Any]:
    """Generation settings of a model that can generate: as built, from a file, and changed by a user afterwards.

    Returns:
        whether the model can generate, its temperature from the file, and the files of exports before and after.
    """
    from paddleformers.transformers.gpt_oss.configuration import GptOssConfig
    from paddleformers.transformers.gpt_oss.modeling import GptOssForCausalLM

    from paddleformers_fc.trainer import documents

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, fuse_rms_norm=False))
    documents.take_over(model, {}, text.encode())
    found: dict[str, Any] = {
        "generates": model.can_generate(),
        "temperature": model.generation_config.temperature,
        "kept": documents.generation_file(model)[documents.GENERATION].decode(),
    }
    model.generation_config.temperature = 0.25
    documents.take_over(model, {}, text.encode())  # As of a checkpoint that is resumed.
    changed = documents.generation_file(model)[documents.GENERATION]
    return {**found, "changed": json.loads(changed)["temperature"]}


def square_router(output_dir: str, target: str) -> dict[str, Any]:
    """A Qwen2-MoE of PaddleFormers' own class with as many experts as hidden units: exported, read again, resumed."""
    import numpy as np
    import paddle
    from safetensors.numpy import load_file

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer.pretrained import load_open_weights
    from tests.harness import fleet_stub

    fleet_stub.install()
    from paddleformers.transformers.qwen2_moe.configuration import Qwen2MoeConfig
    from paddleformers.transformers.qwen2_moe.modeling import Qwen2MoeForCausalLMDeprecated

    def made() -> Any:
        settings = {"vocab_size": tiny.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "moe_group": "dummy"}
        config = Qwen2MoeConfig(**settings, **heads, **experts, shared_expert_intermediate_size=12, fuse_rms_norm=False)
        config._attn_implementation, config.use_flash_attention = "sdpa", False
        config.max_sequence_length = config.seq_length = tiny.SEQUENCE
        return Qwen2MoeForCausalLMDeprecated.from_config(config, dtype="float32")

    def logits(model: Any) -> Any:
        model.eval()
        tokens = paddle.to_tensor([[3, 5, 7, 9]])
        found = model(input_ids=tokens)
        return (found if paddle.is_tensor(found) else found[0]).numpy()

    def trainer(model: Any, steps: int) -> Any:
        settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, "max_steps": steps, "save_steps": 2}
        args = tiny.training_arguments(tiny.SINGLE, output_dir, **settings)
        return tiny.trainer(model, args, cls=FlexTrainer)

    first = made()
    saved = trainer(first, 4)
    saved.train()
    saved.save_model(target)
    again, resumed = made(), made()
    load_open_weights(again, target)
    follow = trainer(resumed, 4)
    follow.train(resume_from_checkpoint=str(Path(output_dir) / "checkpoint-2"))
    name = "model.layers.1.mlp.gate.weight"
    held = dict(first.named_parameters())[name].numpy()
    return {
        "turned": bool(np.array_equal(load_file(f"{target}/model.safetensors")[name], held.T)),
        "difference": float(np.abs(logits(first) - logits(again)).max()),
        "losses": [list(map(float, saved.losses)), list(map(float, follow.losses))],
    }

"""Jobs that run inside rank processes: what real models of PaddleFormers hold, and what its own statements do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

CLASSES = {
    "llama": ("Llama", "LlamaForCausalLM"),
    "ernie4_5": ("Ernie4_5", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_Moe", "Ernie4_5_MoeForCausalLM"),
    "phi3": ("Phi3", "Phi3ForCausalLM"),
    "gpt_oss": ("GptOss", "GptOssForCausalLM"),
    "gemma3_text": ("Gemma3Text", "Gemma3ForCausalLM"),
}


PLAIN = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_next": "Qwen3Next",
    "glm4v_moe": "Glm4vMoe",
    "glm_ocr": "GlmOcr",
    "paddleocr_vl": "PaddleOCRVL",
    "ernie4_5_moe_vl": "Ernie4_5_VLMoe",
}


def describe_model(models: list[Mapping[str, Any]], tp: int = 1, dtype: str = "float32") -> list[dict[str, Any]]:
    """Every tensor of real models on this rank: per model, name -> [global shape, local shape, dtype].

    Args:
        models: their configurations, with ``model_type``.
        tp: degree of tensor parallelism.
        dtype: the models' dtype.
    """
    import paddle
    from paddle.distributed import fleet

    if tp > 1:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": tp, "pp_degree": 1, "sharding_degree": 1}
        fleet.init(is_collective=True, strategy=strategy)
    paddle.set_default_dtype(dtype)
    return [
        {
            name: [list(shard.global_shape), list(shard.local_shape), str(shard.local_tensor.dtype).split(".")[-1]]
            for name, shard in _model(model, tp).sharded_state_dict().items()
        }
        for model in models
    ]


def _model(config: Mapping[str, Any], tp: int) -> Any:
    settings = {
        "fuse_rms_norm": False,
        "sequence_parallel": False,
        "tensor_model_parallel_size": tp,
        "use_flash_attention": False,
        **config,
    }
    model_type = settings.pop("model_type")
    if model_type == "ernie4_5_moe":
        settings["moe_group"] = "dummy"
    stem, kind = CLASSES[model_type]
    package = f"paddleformers.transformers.{model_type}"
    made = getattr(importlib.import_module(f"{package}.configuration"), f"{stem}Config")(**settings)
    return getattr(importlib.import_module(f"{package}.modeling"), kind)(made)


def stock_runs(runs: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """:func:`stock_outputs` of several runs."""
    return [stock_outputs(**run) for run in runs]


def stock_outputs(
    statements: list[str],
    sources: Mapping[str, Mapping[str, Any]],
    targets: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """What stock FlexCheckpoint makes of statements, as slices; ``error`` in place of ``outputs`` where it refuses.

    Args:
        statements: AOA text.
        sources: the source space: name -> ``shape``, ``cuts`` and ``dtype``.
        targets: the target space, where it is not what the statements make.
    """
    from paddle.distributed.flex_checkpoint.aoa.aoa_engine import AOAEngine

    if any("fused_in_proj" in statement for statement in statements):
        from tests.harness import fleet_stub

        fleet_stub.install()
        importlib.import_module("paddleformers.transformers.qwen3_5.modeling")  # It registers the attribute.
    try:
        engine = AOAEngine(
            {"aoa_statements": statements}, _shards(sources), None if targets is None else _shards(targets)
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return {
        "outputs": {
            name: {
                "shape": list(tensor.shape),
                "slices": [
                    [source, _bounds(source_slice), _bounds(target_slice), list(steps or [])]
                    for source, source_slice, target_slice, steps in tensor.slices
                ],
            }
            for name, tensor in engine.output_vars.items()
            if tensor is not None
        }
    }


def _shards(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    import itertools

    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    shards: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor["shape"])
        local = tuple(length // cut for length, cut in zip(shape, tensor["cuts"], strict=True))
        places = itertools.product(*(range(cut) for cut in tensor["cuts"]))
        shards[name] = [
            ShardedWeightDesc(
                name, local, shape, tuple(n * size for n, size in zip(place, local, strict=True)), tensor["dtype"]
            )
            for place in places
        ]
    return shards


def _bounds(slices: tuple[slice, ...]) -> list[list[int]]:
    return [[int(one.start), int(one.stop)] for one in slices]


CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen2_moe": "Qwen2MoeConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "deepseek_v3": "DeepseekV3Config",
    "kimi_k2": "KimiK2Config",
    "minimax_m2": "MiniMaxM2Config",
    "ernie4_5": "Ernie4_5Config",
    "ernie4_5_moe": "Ernie4_5_MoeConfig",
    "gpt_oss": "GptOssConfig",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen3_vl": "Qwen3VLConfig",
    "qwen3_vl_moe": "Qwen3VLMoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "glm4v_moe": "Glm4vMoeConfig",
    "glm_ocr": "GlmOcrConfig",
    "paddleocr_vl": "PaddleOCRVLConfig",
    "ernie4_5_moe_vl": "Ernie4_5_VLConfig",
    "glm_moe_dsa": "GlmMoeDsaConfig",
    "qwen3_5": "Qwen3_5Config",
    "qwen3_5_moe": "Qwen3_5MoEConfig",
}


def exported_configs(
    sources: Mapping[str, Mapping[str, Any]], kept: bool, changed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What an export's config.json has for models of PaddleFormers' configuration classes: a dict, or the error's text.

    Args:
        sources: a ``config.json`` by name.
        kept: whether the model keeps it, as one that was filled with the weights beside it does.
        changed: values that a run sets in the configuration.
    """
    return {name: _exported_config(source, kept, changed or {}) for name, source in sources.items()}


def contradicted_configs(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """What a reader finds contradicting in the config.json and the description that a save of each model writes."""
    import json

    from paddleformers_fc.families.changes import contradictions
    from paddleformers_fc.trainer import documents
    from paddleformers_fc.trainer.description import describe_model

    models = {name: _configured(source, kept=True) for name, source in sources.items()}
    return {
        name: contradictions(json.loads(documents.config_text(model)), describe_model(model))
        for name, model in models.items()
    }


def _exported_config(source: Mapping[str, Any], kept: bool, changed: Mapping[str, Any]) -> dict[str, Any] | str:
    import json

    from paddleformers_fc.errors import FlexError
    from paddleformers_fc.trainer import documents

    try:
        return dict(json.loads(documents.config_text(_configured(source, kept, changed))))
    except FlexError as error:
        return str(error)


def _configured(source: Mapping[str, Any], kept: bool, changed: Mapping[str, Any] | None = None) -> Any:
    """A layer with the configuration of a model, as a Trainer has it."""
    import copy

    import paddle

    from paddleformers_fc.trainer import documents

    model_type = source["model_type"]
    package = importlib.import_module(f"paddleformers.transformers.{model_type}.configuration")
    model = paddle.nn.Linear(2, 2)  # The classes of half of the families cannot be imported here.
    model.config = getattr(package, CONFIGS[model_type]).from_dict(copy.deepcopy(dict(source)))
    model.is_fleet, model.can_generate = model_type in ("kimi_k2", "minimax_m2"), lambda: False
    if kept:
        documents.correct(model.config, source)
        documents.take_over(model, source, None)
    documents.keep_use_cache(model)
    model.config.use_cache = False  # As every Trainer sets it.
    for key, value in (changed or {}).items():
        setattr(model.config, key, value)
    return model


def describe_plain(model_type: str, values: Mapping[str, Any]) -> list[Any]:
    """The description and the tensors of a real model of PaddleFormers' own class, where PaddleFleet has one as well.

    Args:
        model_type: the family.
        values: arguments of the configuration class.
    """
    from paddleformers_fc.layout.live import describe_roles
    from paddleformers_fc.trainer.description import describe_model

    model = plain_model(model_type, values)
    described = describe_model(model)
    shards = describe_roles({"model_state": model.sharded_state_dict()})["model_state"]
    tensors = {name: [list(shard.global_shape), shard.dtype] for name, shard in shards.items()}
    return [{"config": described.config, "is_fleet": described.is_fleet}, tensors]


def plain_model(model_type: str, values: Mapping[str, Any]) -> Any:
    """A real model of PaddleFormers' own class; the arguments are those of :func:`describe_plain`."""
    from tests.harness import fleet_stub, tiny

    fleet_stub.install()
    stem, kind = (PLAIN[model_type], "") if model_type in PLAIN else CLASSES[model_type]
    package = f"paddleformers.transformers.{model_type}"
    module = importlib.import_module(f"{package}.modeling")
    config = getattr(importlib.import_module(f"{package}.configuration"), CONFIGS.get(model_type, f"{stem}Config"))(
        **values
    )
    for part in (config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))):
        if part is not None:
            part.fuse_rms_norm, part.use_flash_attention = False, False
            part.max_sequence_length = part.seq_length = tiny.SEQUENCE
            part._attn_implementation = "eager" if hasattr(config, "vision_config") else "sdpa"
    names = [f"{stem}For{task}{old}" for old in ("Deprecated", "") for task in ("CausalLM", "ConditionalGeneration")]
    made = next(getattr(module, name) for name in (kind, *names) if hasattr(module, name))
    return made.from_config(config, dtype="float32")


def train_plain(
    model_type: str,
    values: Mapping[str, Any],
    output_dir: str,
    source: Mapping[str, Any] | None = None,
    resume: str | None = None,
    tie: bool = False,
    ours: bool = True,
) -> dict[str, Any]:
    """Train a real model of PaddleFormers' own class for four steps, save every second, and export it.

    Args:
        model_type: the family.
        values: arguments of the configuration class.
        output_dir: for the checkpoints, and the export in ``hf``.
        source: the ``config.json`` of the weights that the model started from.
        resume: a checkpoint.
        tie: whether the script ties the word embeddings.
        ours: with this package, or the stock Trainer.
    Returns:
        the losses, and whether the word embeddings are equal at the end.
    """
    import numpy as np
    import paddle

    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.trainer import documents
    from tests.harness import tiny

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True} if ours else {}
    args = tiny.training_arguments(tiny.SINGLE, output_dir, max_steps=4, save_steps=2, **settings)
    model = plain_model(model_type, values)
    if source is not None:
        documents.take_over(model, source, None)
    if tie:
        model.tie_weights()
    extra = {"cls": FlexTrainer} if ours else {}

    # PaddleFormers' own loss asks for the outputs of prediction layers, which its class of GLM 4 MoE lacks.
    def criterion(outputs: Any, labels: Any) -> Any:
        return paddle.nn.functional.cross_entropy(outputs if paddle.is_tensor(outputs) else outputs[0], labels)

    trainer = tiny.trainer(model, args, train_dataset=tiny.Samples(), criterion=criterion, **extra)
    trainer.train(resume_from_checkpoint=resume)
    if ours:
        trainer.save_model(f"{output_dir}/hf")
    first, last = model.get_input_embeddings().weight.numpy(), model.get_output_embeddings().weight.numpy()
    return {"losses": list(map(float, trainer.losses)), "tied": np.array_equal(first, last)}


def tied_models(models: Mapping[str, Mapping[str, Any]], output_dir: str) -> dict[str, list[str]]:
    """What a Trainer, and a save in a loop, say of tied models of PaddleFormers' own classes.

    Args:
        models: arguments of the configuration class by family.
        output_dir: for checkpoints.
    Returns:
        the errors of both, and of a Trainer after the script has tied the weights; empty for none.
    """
    import paddleformers_fc
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments
    from paddleformers_fc.errors import FlexError
    from tests.harness import tiny

    args = tiny.training_arguments(tiny.SINGLE, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True)
    found: dict[str, list[str]] = {}

    def attempt(work: Callable[[], Any]) -> str:
        try:
            work()
        except FlexError as error:
            return error.render()
        return ""

    for name, values in models.items():
        model = plain_model(name, values)
        build = partial(tiny.trainer, model, args, cls=FlexTrainer)
        found[name] = [attempt(build), attempt(partial(paddleformers_fc.save, f"{output_dir}/{name}", model))]
        model.tie_weights()
        found[name].append(attempt(build))
    return found

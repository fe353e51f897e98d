"""Models, data and trainings of a second, for the verification matrices and the tests.

Everything here is deterministic and the same under every layout, so that two layouts that train alike give equal losses
up to rounding. There is no token 0, because Paddle's ``padding_idx`` treats it differently under tensor parallelism.
Attention is ``sdpa``, because the eager one has no causal mask in a pipeline. There is no weight decay, because
parameters are excluded from it by name, and pipelines rename them. One global batch of :data:`GLOBAL_BATCH` samples is
cut the same way everywhere.

Importing this module imports no Paddle; its functions do, and run inside rank processes. Time and memory: a model has
about 100,000 parameters; building one and a step of it take a few hundredths of a second.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from paddleformers_fc.upstream import LIBRARY
from verification.matrix import fleet_stub
from verification.matrix.layouts import MatrixLayout, layout_from

VOCABULARY = 128
SEQUENCE = 16
GLOBAL_BATCH = 8
SAMPLES = 64
LINEAR = (".*qkv_proj", ".*(q|k|v|o)_proj", ".*(gate|up|down|up_gate|gate_up_fused)_proj")
"""The linear layers of the tiny models, as patterns of PaddleFormers."""
SEGMENT = 1000
"""Stage 3 slices parameters with more elements: every matrix of the tiny models, and no vector."""

STEMS = {
    "llama": "Llama",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen2_5_vl": "Qwen2_5_VL",
}
"""The models, and the beginnings of their classes' names."""

OWN = ("qwen3", "qwen3_moe")
"""Models that have a class of PaddleFleet as well. PaddleFormers' own class has another name."""

VISION = "qwen2_5_vl"
"""The model with images."""

IMAGE = (125, 127, 127, 127, 127, 124)
"""The tokens of an image of 4 x 4 patches: its begin, four places that are filled by the tower, its end."""

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "fuse_rms_norm": False,
}
_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "window_size": 8,
    "fuse_rms_norm": False,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 1,
        "moe_use_aux_free": False,
        # The balance loss is a square of a mean over the tokens of a rank, so it depends on the layout.
        "router_aux_loss_coef": 0.0,
        "moe_group": "dummy",
        "num_nextn_predict_layers": 0,
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
        # Expert parallel layers always do, others by this key.
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    },
}


def training_arguments(
    layout: MatrixLayout | Mapping[str, Any], output_dir: str | Path, micro_batch: int | None = None, **overrides: Any
) -> Any:
    """Return PaddleFormers' ``TrainingArguments`` for a layout.

    Args:
        layout: how the ranks of this job are used.
        output_dir: the Trainer's output directory.
        micro_batch: samples per forward; by default all of a rank's share, in a pipeline 2.
        overrides: any field of ``TrainingArguments``; takes precedence over the values here. ``cls`` is the class to
            make.
    """
    layout = layout_from(layout)
    if micro_batch is None:
        micro_batch = 2 if layout.pp > 1 else GLOBAL_BATCH // layout.data_parallel
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "device": "cpu",
        "do_train": True,
        "max_steps": 3,
        "save_steps": 10**6,
        "logging_steps": 1,
        "seed": 42,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": GLOBAL_BATCH // layout.data_parallel // micro_batch,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "sharding": f"stage{layout.stage}" if layout.sharding > 1 else "",
        "split_param": layout.split_param,
        "bf16": layout.bf16,
        "fp16_opt_level": "O2",
        "amp_master_grad": layout.bf16,
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_num_workers": 0,
        "save_checkpoint_format": "flex_checkpoint",
        "load_checkpoint_format": "flex_checkpoint",
    }
    if layout.sharding > 1:
        settings["sharding_parallel_size"] = layout.sharding
    if layout.ep > 1:
        settings |= {"use_expert_parallel": True, "expert_model_parallel_size": layout.ep}
    settings |= overrides
    if layout.tp == 1:
        settings["sequence_parallel"] = False  # Without tensor parallelism models fail with it.
    if layout.stage == 3:
        from paddleformers_fc.cpu_runtime import sharding

        sharding.slice_above(SEGMENT)
    return settings.pop("cls", import_module(f"{LIBRARY}.trainer").TrainingArguments)(**settings)


def keys(model_type: str, **overrides: Any) -> dict[str, Any]:
    """Return the ``config.json`` of a tiny model, without any parallelism.

    Args:
        model_type: a key of :data:`STEMS`.
        overrides: any field of the configuration, of a model with images of its text, e.g. ``num_hidden_layers`` or
            ``tie_word_embeddings``.
    """
    own = {"model_type": model_type, "tie_word_embeddings": False}
    if model_type != VISION:
        return {**own, **_TEXT, **_OF_TYPE[model_type], **overrides}
    begin, place, *_, end = IMAGE
    tokens = {
        "vision_start_token_id": begin,
        "image_token_id": place,
        "video_token_id": 126,
        "vision_end_token_id": end,
    }
    text = {**_TEXT, "rope_parameters": _SECTIONS, **overrides}
    return {**own, **tokens, "text_config": text, "vision_config": dict(_TOWER)}


def config(model_type: str, **overrides: Any) -> Any:
    """Return the configuration of a tiny model as PaddleFormers has it; the arguments are those of :func:`keys`."""
    package = import_module(f"{LIBRARY}.transformers.{model_type}.configuration")
    return getattr(package, f"{STEMS[model_type]}Config")(**keys(model_type, **overrides))


def model_class(model_type: str, pipeline: bool) -> Any:
    """PaddleFormers' own class of a model, or of its pipeline.

    Args:
        model_type: a key of :data:`STEMS`.
        pipeline: whether it is that of a pipeline.
    """
    with fleet_stub.installed() if model_type in OWN else nullcontext():
        package = import_module(f"{LIBRARY}.transformers.{model_type}.modeling")
    task = "ConditionalGeneration" if model_type == VISION else "CausalLM"
    name = f"{STEMS[model_type]}For{task}{'Pipe' if pipeline else ''}{'Deprecated' if model_type in OWN else ''}"
    return getattr(package, name)


def build(
    model_type: str,
    layout: MatrixLayout | Mapping[str, Any],
    args: Any,
    hold_predictions: bool = False,
    **overrides: Any,
) -> Any:
    """Return a freshly initialised tiny model as the layout needs it.

    Args:
        model_type: a key of :data:`STEMS`.
        layout: how the ranks of this job are used.
        args: the result of :func:`training_arguments`, which has initialised the parallel environment.
        hold_predictions: train without the multi-token prediction layers of ERNIE, which are held all the same.
        overrides: any field of the model's configuration.
    """
    from paddle.distributed import fleet

    layout = layout_from(layout)
    model_config = config(model_type, **overrides)
    for part in (model_config, getattr(model_config, "text_config", None)):
        if part is None:
            continue
        part.tensor_model_parallel_size = layout.tp
        part.tensor_parallel_rank = part.tensor_model_parallel_rank = args.tensor_parallel_rank
        part.pipeline_model_parallel_size = layout.pp
        part.virtual_pipeline_model_parallel_size = layout.vpp
        part.expert_model_parallel_size = layout.ep
        part.sequence_parallel = args.sequence_parallel
        part.use_flash_attention = False
        part.max_sequence_length = part.seq_length = SEQUENCE
        part._attn_implementation = "eager" if model_type == VISION else "sdpa"
    if model_type == VISION:
        model_config.vision_config._attn_implementation = "eager"
    if layout.ep > 1:
        model_config.moe_group = fleet.get_hybrid_communicate_group().get_expert_parallel_group()
        # The other one needs kernels of an accelerator. The configuration's class ignores it as an argument.
        model_config.moe_token_dispatcher_type = "alltoall"
    kind = model_class(model_type, layout.pp > 1)
    if hold_predictions:
        from verification.matrix import predictions

        kind = predictions.PipeThatHoldsPredictions if layout.pp > 1 else kind
    model = kind.from_config(model_config, dtype="bfloat16" if layout.bf16 else "float32")
    initialise(model, layout.tp)
    if hold_predictions:
        predictions.train_without(model)
    return model


def weight(name: str, shape: Sequence[int]) -> Any:
    """Return the initial value of a canonical weight: float32, a function of its name and shape alone.

    Args:
        name: as in the open weights, e.g. ``model.layers.0.self_attn.q_proj.weight``.
        shape: as Paddle stores it, ``[in, out]`` for a linear layer.
    """
    import numpy as np

    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape)).astype("float32") * 0.05
    return 1 + noise if len(shape) == 1 and not name.endswith(".bias") else noise


def model_weight(key: str, shape: Sequence[int], model_config: Any, tp: int = 1) -> Any:
    """Return the initial value of a model's weight, whole, made of the canonical weights that it fuses.

    Args:
        key: the weight's name in the model.
        shape: its global shape.
        model_config: heads, and whether the embeddings are tied.
        tp: number of tensor parallel ranks over which it is split, on which ``[gate | up]`` per rank depends.

    Returns:
        ``qkv_proj``: per key-value head its query heads, its key and its value. ``up_gate_proj``: per tensor parallel
        rank that rank's columns of gate, then of up. Everything else is canonical itself.
    """
    *rows, columns = shape
    if ".qkv_proj." in key:
        heads = {"q": model_config.num_attention_heads, "k": model_config.num_key_value_heads}
        heads["v"] = heads["k"]
        size = columns // sum(heads.values())
        parts = [weight(key.replace("qkv_proj", f"{part}_proj"), [*rows, size * n]) for part, n in heads.items()]
        return _interleaved(parts, heads["k"])
    if ".up_gate_proj." in key:
        parts = [weight(key.replace("up_gate_proj", f"{part}_proj"), [*rows, columns // 2]) for part in ("gate", "up")]
        return _interleaved(parts, tp)
    if key == "lm_head.weight" and model_config.tie_word_embeddings:
        return weight("model.embed_tokens.weight", shape)
    return weight(key, shape)


def _interleaved(parts: Sequence[Any], groups: int) -> Any:
    """Return every part cut into ``groups`` along the last axis; group by group, the parts of each."""
    import numpy as np

    cut = [np.split(part, groups, axis=-1) for part in parts]
    return np.concatenate([piece for group in zip(*cut, strict=True) for piece in group], axis=-1)


def initialise(model: Any, tp: int) -> None:
    """Give every weight of a model, or this rank's part of it, its value by :func:`weight`."""
    for key, shard in model.sharded_state_dict().items():
        _set(shard, model_weight(key, shard.global_shape, model.config, tp if _is_split(shard) else 1))


def _is_split(shard: Any) -> bool:
    return list(shard.local_shape) != list(shard.global_shape)


def _set(shard: Any, whole: Any) -> None:
    """Set a shard to its part of a tensor."""
    import paddle

    box = tuple(slice(begin, begin + size) for begin, size in zip(shard.global_offset, shard.local_shape, strict=True))
    shard.local_tensor.set_value(paddle.to_tensor(whole[box]).astype(shard.local_tensor.dtype))


def adapted(model: Any, **settings: Any) -> Any:
    """Return a model with adapters on all linear layers, whose values are the same under every layout.

    Args:
        settings: of PaddleFormers' ``LoRAConfig``.
    """
    peft = import_module(f"{LIBRARY}.peft")
    given = {"target_modules": list(LINEAR), "r": 4, "lora_alpha": 8, **settings}
    made = peft.LoRAModel(model, peft.LoRAConfig(**given))
    for name, shard in made.sharded_state_dict().items():
        if name.endswith(".lora_A"):  # The parts of a fused layer share their inputs.
            _set(shard, weight(name, shard.global_shape))
        elif name.endswith(".lora_B"):
            tp = model.config.tensor_model_parallel_size if _is_split(shard) else 1
            _set(shard, model_weight(name, shard.global_shape, model.config, tp))
    return made


class Samples:
    """:data:`SAMPLES` arithmetic sequences over the vocabulary without token 0; the same on every rank.

    Args:
        extra: tokens beyond :data:`SEQUENCE`, for multi-token prediction.
    """

    def __init__(self, extra: int = 0) -> None:
        self._extra = extra

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        random = np.random.RandomState(index)
        length = SEQUENCE + self._extra
        start, step = random.randint(0, VOCABULARY), random.randint(1, 4)
        tokens = ((start + step * np.arange(length + 1)) % (VOCABULARY - 1) + 1).astype("int64")
        sample = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        if self._extra:
            sample["nbatch_pack_offset"] = np.zeros(length, "int64")
        return sample


class ImageSamples(Samples):
    """As :class:`Samples`, beginning with an image of random pixels, and without its tokens in the text."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import numpy as np

        text = super().__getitem__(index)
        tokens = np.append(text["input_ids"], text["labels"][-1]) % (min(IMAGE) - 1) + 1
        tokens[: len(IMAGE)] = IMAGE
        size = (16, 3 * 2 * _TOWER["patch_size"] ** 2)
        pixels = np.random.RandomState(index).standard_normal(size).astype("float32")
        return {
            "input_ids": tokens[:-1],
            "labels": tokens[1:],
            "pixel_values": pixels,
            "image_grid_thw": np.array([1, 4, 4]),
        }


def samples(model_type: str, extra: int = 0) -> Samples:
    """Return the samples of a model.

    Args:
        model_type: a key of :data:`STEMS`.
        extra: tokens beyond :data:`SEQUENCE`, for multi-token prediction.
    """
    return ImageSamples() if model_type == VISION else Samples(extra)


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a batch: every field stacked along a new first axis, and patches of images in a row, as tensors."""
    import numpy as np
    import paddle

    joined = {name: np.concatenate if name == "pixel_values" else np.stack for name in samples[0]}
    return {name: paddle.to_tensor(join([sample[name] for sample in samples])) for name, join in joined.items()}


def trainer(model: Any, args: Any, **overrides: Any) -> Any:
    """Return a Trainer over :class:`Samples`, which records the loss of each step in ``trainer.losses``.

    Args:
        overrides: any argument of the Trainer; ``cls`` is the class to make.
    """
    library: Any = import_module(f"{LIBRARY}.trainer")
    losses: list[float] = []

    class RememberLosses(library.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))

    settings: dict[str, Any] = {
        "train_dataset": Samples(getattr(model.config, "num_nextn_predict_layers", 0)),
        "data_collator": collate,
        "callbacks": [],
    }
    settings |= overrides
    settings["callbacks"] = [*settings["callbacks"], RememberLosses()]
    made = settings.pop("cls", library.Trainer)(model=model, args=args, **settings)
    made.losses = losses
    return made


def train(
    model_type: str,
    layout: MatrixLayout | Mapping[str, Any],
    output_dir: str | Path,
    arguments: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> list[float]:
    """Train a tiny model from its initialisation as a job, and return the loss of every step, on every rank.

    Args:
        arguments: overrides of the training arguments.
        model: overrides of the model's configuration.
    """
    model = dict(model or {})
    # Multi-token prediction with its packing offsets takes one sample at a time.
    micro_batch = 1 if model.get("num_nextn_predict_layers") else None
    args = training_arguments(layout, output_dir, micro_batch, **(arguments or {}))
    run = trainer(build(model_type, layout, args, **model), args)
    run.train()
    return list(run.losses)

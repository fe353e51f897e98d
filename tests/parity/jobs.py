"""Jobs for ranks: load fixtures through the replaced ``from_pretrained``, compute logits, export."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.harness import fleet_stub, tiny
from tests.parity import fixtures
from tests.parity.fixtures import Arrays, Fixture

KEYS: Mapping[str, Mapping[str, Any]] = {
    "ernie4_5-biases": {"mlp_bias": True},
    "paddleocr_vl-biases": {"mlp_bias": True},
    "ernie4_5_moe": {"num_nextn_predict_layers": 0},
    "ernie4_5_moe-tied-every_second_layer": {"num_nextn_predict_layers": 0},
    "ernie4_5_moe-biases": {"num_nextn_predict_layers": 0, "mlp_bias": False, "lm_head_bias": True},
}
"""Keys that PaddleFormers reads and Transformers does not write."""

NESTED = ("text_config", "vision_config")
"""Nested configurations."""

TRAINING = ("gpt_oss",)
"""Model types whose forward pass is wrong unless the model is in training mode: it tiles tokens, not experts."""


def compare(names: Sequence[str], layout: tiny.MatrixLayout, output_dir: Path) -> dict[str, dict[str, Any]]:
    """For every fixture the difference of ``logits`` and what an ``export`` or a stream changes, or the ``error``.

    Args:
        names: of fixtures.
        layout: how the ranks of this job are used.
        output_dir: a directory for checkpoints.
    """
    args = arguments(layout, output_dir)
    return {name: _compared(fixtures.read(name), args, output_dir) for name in names}


def fill_built(name: str, output_dir: Path) -> str:
    """The error of filling a model of a fixture that PaddleFormers has built by its own reading of config.json."""
    from paddleformers_fc import load_open_weights

    arguments(tiny.SINGLE, output_dir)
    fixture = fixtures.read(name)
    source = str(fixture.write(output_dir / "given"))
    kind = _kind(fixture)
    model = kind.from_config(kind.config_class.from_pretrained(source), dtype="float32")
    return _error(lambda: load_open_weights(model, source))


def _kind(fixture: Fixture) -> Any:
    """PaddleFormers' own class of a fixture."""
    modeling = importlib.import_module(f"paddleformers.transformers.{fixture.config['model_type']}.modeling")
    (architecture,) = fixture.config["architectures"]
    return getattr(modeling, f"{architecture}Deprecated", None) or getattr(modeling, architecture)


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def arguments(layout: tiny.MatrixLayout, output_dir: Path) -> Any:
    """Training arguments that let this package read open weights, where every class can be imported."""
    from paddleformers_fc import FlexTrainingArguments

    fleet_stub.install()
    return tiny.training_arguments(layout, output_dir, cls=FlexTrainingArguments, flex_checkpoint=True)


def _compared(fixture: Fixture, args: Any, directory: Path) -> dict[str, Any]:
    try:
        model = load(fixture, args, directory / "given")
    except Exception as error:  # Refusals of ours and faults of upstream, which the tests name.
        return {"error": f"{type(error).__name__}: {error}"}
    changed = _changed(model, fixture, directory / "exported" / fixture.name)
    changed += [f"streamed {name}" for name in _streamed(model, fixture)]
    changed += [f"declared {name}" for name in _misdeclared(model, max(1, args.tensor_model_parallel_size))]
    try:
        difference = np.abs(logits(model, fixture) - _expected(fixture, args)).max()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "export": changed}
    return {"logits": float(difference), "export": changed}


def _expected(fixture: Fixture, args: Any) -> np.ndarray[Any, Any]:
    """The logits; upstream leaves out the bias of a head that tensor parallelism cuts."""
    if args.tensor_model_parallel_size <= 1 or "lm_head.bias" not in fixture.tensors:
        return fixture.logits
    return np.asarray(fixture.logits - fixture.tensors["lm_head.bias"])


def load(fixture: Fixture, args: Any, directory: Path) -> Any:
    """The model of a fixture, by the replaced ``from_pretrained`` of PaddleFormers' own class."""
    from paddleformers_fc.distributed.channel import job_channel, run_on_all

    channel = job_channel()
    run_on_all(channel, "writing a fixture", lambda: fixture.write(directory) if channel.rank == 0 else None)
    source = str(directory / fixture.name)
    kind = _kind(fixture)
    config = kind.config_class.from_pretrained(source)
    settings = {
        "max_sequence_length": fixture.inputs["input_ids"].shape[1],
        "fuse_rms_norm": False,
        # In layers of Qwen 3 Next the other one has no causal mask.
        "_attn_implementation": "sdpa" if config.model_type == "qwen3_next" else "eager",
        # Without it upstream reshapes the latent attention of a rank to the heads of all ranks.
        "sequence_parallel": config.model_type == "deepseek_v3" and args.tensor_model_parallel_size > 1,
        **KEYS.get(fixture.name, {}),
    }
    degree = {
        "tensor_model_parallel_size": max(1, args.tensor_model_parallel_size),
        "tensor_parallel_rank": args.tensor_parallel_rank,
        "tensor_model_parallel_rank": args.tensor_parallel_rank,
    }
    for name in (None, *NESTED):
        part = config if name is None else getattr(config, name, None)
        # PaddleFormers' training leaves towers whole on every rank.
        keys = settings if name == "vision_config" else {**settings, **degree}
        for key, value in keys.items() if part is not None else ():
            setattr(part, key, value)
    model = kind.from_pretrained(source, config=config, dtype="float32")
    return model.train() if config.model_type in TRAINING else model.eval()


def logits(model: Any, fixture: Fixture) -> np.ndarray[Any, Any]:
    """The logits of a model, of all ranks."""
    import paddle

    inputs = {name: paddle.to_tensor(array) for name, array in fixture.inputs.items()}
    with paddle.no_grad():
        if fixture.name.startswith("ernie4_5_moe_vl-"):
            part = _text_logits(model, **inputs)
        else:
            found = model(**inputs, return_dict=True)
            part = found[0] if isinstance(found, tuple) else found.logits
    parts = [part]
    if part.shape[-1] < fixture.logits.shape[-1]:
        parts = []
        paddle.distributed.all_gather(parts, part)
    return np.concatenate([one.numpy() for one in parts], axis=-1)


def _text_logits(model: Any, input_ids: Any, position_ids: Any) -> Any:
    """The logits of ERNIE 4.5 VL without experts, by its parts: the whole needs an accelerator."""
    places = position_ids.transpose([1, 2, 0])
    found = model.model(input_ids, position_ids=places, return_dict=True, use_cache=False)
    return model.lm_head(found.last_hidden_state, 0 * input_ids)[0]


def _changed(model: Any, fixture: Fixture, target: Path) -> list[str]:
    """The names of tensors whose bytes an export changes, adds or leaves out."""
    from safetensors.numpy import load_file

    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    channel = job_channel()
    files = {"config.json": documents.config_text(model).encode()} if channel.rank == 0 else {}
    save_weights(live_roles.model_roles(model)["model_state"], describe_model(model), files, target, 10**9, channel)
    found, given = (_digests(tensors) for tensors in (load_file(target / "model.safetensors"), fixture.tensors))
    return sorted(name for name in found.keys() | given.keys() if found.get(name) != given.get(name))


def _streamed(model: Any, fixture: Fixture) -> list[str]:
    """The names of tensors whose bytes a stream changes, adds or leaves out."""
    import paddleformers_fc

    found = _digests({name: tensor.numpy() for name, tensor in paddleformers_fc.stream(model)})
    given = _digests(fixture.tensors)
    return sorted(name for name in found.keys() | given.keys() if found.get(name) != given.get(name))


def _misdeclared(model: Any, tp: int) -> list[str]:
    """The names of tensors that the family declares with another shape, dtype or cut than the model describes."""
    from paddleformers_fc.families import enumerate_tensors, family_for
    from paddleformers_fc.layout.live import describe_roles
    from paddleformers_fc.trainer.description import describe_model

    described = describe_model(model)
    declared = {
        one.name: (one.shape, one.dtype, one.under(tp).cuts)
        for one in enumerate_tensors(family_for(described.config), described)
    }
    found = {}
    for name, shard in describe_roles({"model_state": model.sharded_state_dict()})["model_state"].items():
        cuts = tuple(whole // part for whole, part in zip(shard.global_shape, shard.box.shape, strict=True))
        found[name] = (shard.global_shape, shard.dtype, cuts)
    # Tensor-parallel ranks may have some of the experts.
    names = found.keys() if tp > 1 else declared.keys() | found.keys()
    if tp > 1 and described.config["model_type"] == "gemma3_text":
        names -= {"lm_head.weight"}  # Its memory is that of the whole embedding, and it says that it is half of one.
    return sorted(name for name in names if declared.get(name) != found.get(name))


def _digests(tensors: Arrays) -> dict[str, str]:
    return {
        name: f"{array.dtype} {array.shape} {hashlib.md5(np.ascontiguousarray(array)).hexdigest()}"
        for name, array in tensors.items()
    }

"""Open weights of tiny models, written and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import tiny
from verification.forkserver import ForkServer


def configured(layout: tiny.MatrixLayout | Mapping[str, Any], args: Any, source: Path | str, **changed: Any) -> Any:
    """The configuration of a directory for a layout, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoConfig

    layout, config = tiny.layout_from(layout), AutoConfig.from_pretrained(str(source), dtype="float32")
    values: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tp,
        "tensor_parallel_rank": args.tensor_parallel_rank,
        "tensor_model_parallel_rank": args.tensor_parallel_rank,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": 1,
        "fuse_rms_norm": False,
        "seq_length": tiny.SEQUENCE,
        "max_sequence_length": tiny.SEQUENCE,
        "_attn_implementation": "sdpa",
        **({"moe_group": "dummy", "moe_use_aux_free": False} if config.model_type == "ernie4_5_moe" else {}),
    }
    for name, value in {**values, **changed}.items():
        setattr(config, name, value)
    return config


def export_weights(model: Any, target: Path | str) -> None:
    """Export a live model, whose ranks all call this."""
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    channel = job_channel()
    files = {"config.json": documents.config_text(model).encode()} if channel.rank == 0 else {}
    weights = live_roles.model_roles(model)["model_state"]
    save_weights(weights, describe_model(model), files, Path(target), 10**9, channel)


def export_initial(
    model_type: str, layout: Mapping[str, Any], model: Mapping[str, Any], output_dir: str, target: str
) -> None:
    """Export a tiny model with the weights it begins with."""
    args = tiny.training_arguments(layout, output_dir)
    export_weights(tiny.build(model_type, layout, args, **model), target)


def weights_of(ranks: ForkServer, directory: Path, model_type: str, model: dict[str, Any]) -> Path:
    """The export of a tiny model with its initial weights."""
    run = {
        "layout": tiny.SINGLE.to_json(),
        "output_dir": str(directory / "run"),
        "model_type": model_type,
        "model": model,
    }
    ranks.run(f"{__name__}:export_initial", 1, {**run, "target": str(directory / "weights")})
    return directory / "weights"

"""What describes a model, from its open weights through training, resuming and every kind of export: real Trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddleformers_fc.execute.export import export_checkpoint
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.trainer.test_open_weights import weights_of
from verification.forkserver import ForkServer

# Greedy search with settings of sampling: PaddleFormers warns about it, and does not write such settings.
GENERATION = b'{"do_sample": false, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 3], "max_new_tokens": 77}'
ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SOURCES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": ROTARY, "use_cache": True, "initializer_range": 0.02, "pretraining_tp": 1},
    "ernie4_5_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "use_cache": True,
        "initializer_range": 0.02,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 0,
        "use_rmsnorm": True,
        "router_aux_loss_coef": 0.004,
    },
}


def source_of(ranks: ForkServer, directory: Path, model_type: str) -> tuple[Path, dict[str, Any]]:
    """Open weights as another library would write them, and the content of their config.json."""
    config = tiny_config(model_type) | SOURCES[model_type]
    source = weights_of(ranks, directory, model_type, live(config))
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float32", "transformers_version": "5.3.0"}))
    (source / "generation_config.json").write_bytes(GENERATION)
    (source / "flex_checksums.json").unlink()
    return source, config


def tiny_config(model_type: str) -> dict[str, Any]:
    from verification.matrix.tiny import keys

    # These keys belong to PaddleFormers, not to the model.
    return {key: value for key, value in keys(model_type).items() if key not in ("fuse_rms_norm", "moe_group")}


def live(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that PaddleFormers' configuration class is given."""
    return {key: value for key, value in config.items() if key != "model_type"}


def run_and_export(
    layout: tiny.MatrixLayout,
    directory: Path,
    steps: int,
    model_type: str,
    model: dict[str, Any],
    source: Path | None = None,
) -> None:
    """Train from open weights, or resume the newest checkpoint, and export in both ways of a live model.

    Args:
        steps: how many; the last one is saved.
        source: open weights to start from.
    """
    from paddleformers_fc import FlexTrainer, FlexTrainingArguments, load_open_weights

    settings = {"max_steps": steps, "save_steps": steps, "flex_checkpoint": True, "cls": FlexTrainingArguments}
    args = tiny.training_arguments(layout, str(directory / "run"), **settings)
    built = tiny.build(model_type, layout, args, **model)
    if source is not None and steps == 1:
        load_open_weights(built, source)
    trainer = tiny.trainer(built, args, cls=FlexTrainer)
    trainer.train(resume_from_checkpoint=True if steps > 1 else None)
    trainer.save_model(f"{directory}/step-{steps}/save_model")
    trainer.model.save_pretrained(f"{directory}/step-{steps}/save_pretrained")


def exports(ranks: ForkServer, directory: Path, layout: tiny.MatrixLayout, **job: Any) -> dict[str, Path]:
    """Every export of a run that starts from open weights, and of one that resumes it."""
    found: dict[str, Path] = {}
    for step in (1, 2):
        given = {"layout": layout, "directory": directory, "steps": step, **job}
        run_on_ranks(ranks, layout.nproc, run_and_export, **given)
        target = directory / f"step-{step}"
        export_checkpoint(directory / f"run/checkpoint-{step}", target / "command")
        found |= {f"{path.name} at step {step}": path for path in target.iterdir()}
    return found


@pytest.mark.parametrize(
    ("model_type", "layout"), [("llama", tiny.PP2), ("ernie4_5_moe", tiny.TP2)], ids=["llama", "ernie4_5_moe"]
)
def test_every_export_has_the_generation_settings_and_the_keys_of_its_source(
    ranks: ForkServer, tmp_path: Path, model_type: str, layout: tiny.MatrixLayout
) -> None:
    source, config = source_of(ranks, tmp_path, model_type)
    texts: dict[str, str] = {}
    job = {"model_type": model_type, "model": live(config), "source": source}
    for way, path in exports(ranks, tmp_path, layout, **job).items():
        assert (path / "generation_config.json").read_bytes() == GENERATION, way
        texts[way] = (path / "config.json").read_text()
    assert len(texts) == 6
    written = {way: json.loads(text) for way, text in texts.items()}
    for way, values in written.items():
        assert {key: values.get(key, "lost") for key in config} == config, way
        assert values["dtype"] == values["torch_dtype"] == "float32"
        assert values["rope_theta"] == 500000.0
        scaling = {key: value for key, value in ROTARY.items() if key != "rope_theta"}
        assert values.get("rope_scaling") == (scaling if model_type == "llama" else None)
    assert len(set(texts.values())) == 1


@on_ranks(1)
def test_a_model_that_can_generate_uses_the_settings_that_it_exports() -> None:
    from paddleformers.transformers.gpt_oss.configuration import GptOssConfig
    from paddleformers.transformers.gpt_oss.modeling import GptOssForCausalLM

    from paddleformers_fc.trainer import documents

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, fuse_rms_norm=False))
    documents.take_over(model, {}, GENERATION)
    assert model.can_generate()
    assert model.generation_config.temperature == 0.6
    assert documents.generation_file(model)[documents.GENERATION] == GENERATION
    model.generation_config.temperature = 0.25
    documents.take_over(model, {}, GENERATION)  # A resume calls it again.
    assert json.loads(documents.generation_file(model)[documents.GENERATION])["temperature"] == 0.25


def test_a_trainer_does_not_change_what_a_model_without_a_source_exports(ranks: ForkServer, tmp_path: Path) -> None:
    # Every Trainer sets use_cache: false in the configuration of its model.
    job = {"model_type": "llama", "model": {}, "source": None}
    for way, path in exports(ranks, tmp_path, tiny.SINGLE, **job).items():
        assert json.loads((path / "config.json").read_text())["use_cache"] is True, way

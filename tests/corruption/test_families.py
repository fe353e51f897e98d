"""Models of families whose classes in PaddleFormers do not do what their configurations say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import paddle
import pytest
from safetensors.numpy import load_file

import paddleformers_fc
from paddleformers_fc.distributed.channel import ALONE
from paddleformers_fc.errors import MappingError, OptionError
from paddleformers_fc.execute.save import JobRecord, config_bytes, save_checkpoint
from tests.corruption.guarantees import Seen, fault
from tests.execute.simulated import CONFIG, MODEL, canonical, live
from tests.families.jobs import train_plain
from tests.families.spaces import BY_NAME, settings
from tests.harness.on_ranks import job_on_ranks, run_on_ranks
from tests.harness.tiny import VOCABULARY
from tests.trainer.test_description import plain_values
from verification.forkserver import ForkServer

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


def values_of(name: str, **changes: Any) -> dict[str, Any]:
    """A tiny configuration over the vocabulary of the samples."""
    values = {**plain_values(name), "vocab_size": VOCABULARY, "num_experts_per_tok": 2, **changes}
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], "vocab_size": VOCABULARY, **changes}
    return values


def trained_and_resumed(ranks: ForkServer, output_dir: Path, job: dict[str, Any]) -> Path:
    """Train, and resume from step 2 with the same losses; the last checkpoint."""
    first, again = output_dir / "first", output_dir / "again"
    (trained,) = run_on_ranks(ranks, 1, train_plain, **job, output_dir=first)
    (resumed,) = run_on_ranks(ranks, 1, train_plain, **job, output_dir=again, resume=first / "checkpoint-2")
    assert resumed["losses"] == trained["losses"][2:]
    return first / "checkpoint-4"


@pytest.mark.slow
@fault("G113")
def test_g113_every_save_can_be_loaded(ranks: ForkServer, tmp_path: Path) -> Seen:
    glm_ocr = values_of("glm_ocr", **UNTIED)
    glm4_moe = values_of("glm4_moe", num_nextn_predict_layers=1)
    for name, values, exported in (
        ("glm_ocr", glm_ocr, UNTIED),
        ("glm4_moe", glm4_moe, {"num_nextn_predict_layers": 0}),
    ):
        source = {**values, "model_type": name}
        last = trained_and_resumed(ranks, tmp_path / name, {"model_type": name, "values": values, "source": source})
        checkpoint = paddleformers_fc.open(last)
        assert checkpoint.verify("full").passed
        checkpoint.export(tmp_path / "hf" / name)
        written = json.loads((tmp_path / "hf" / name / "config.json").read_text())
        assert {key: written[key] for key in exported} == exported
        assert written.get("text_config", {}).items() >= (UNTIED.items() if name == "glm_ocr" else {}.items())
    files = {"config.json": config_bytes({**CONFIG, **TIED})}
    with pytest.raises(MappingError) as raised:
        save_checkpoint(tmp_path / "refused", live(canonical(), 1, 0), MODEL, files, JobRecord(3, 24, {}), ALONE)
    assert not (tmp_path / "refused").exists()
    return {"error": raised.type.__name__}


def test_a_loop_refuses_a_model_that_does_not_tie_what_its_configuration_ties(tmp_path: Path) -> None:
    model = paddle.nn.Layer()
    model.model, model.lm_head = paddle.nn.Layer(), paddle.nn.Layer()
    model.model.embed_tokens = paddle.nn.Embedding(32, 16)
    model.lm_head.weight = model.lm_head.create_parameter([32, 16])
    given = {"family": "llama", "config": settings(BY_NAME["llama"], vocab_size=32, hidden_size=16, **TIED)}
    with pytest.raises(OptionError, match="the model trains the tied weights apart"):
        paddleformers_fc.save(tmp_path / "checkpoint-1", model, **given)
    assert not (tmp_path / "checkpoint-1").exists()
    model.lm_head.weight = model.model.embed_tokens.weight
    paddleformers_fc.save(tmp_path / "checkpoint-1", model, **given)


@pytest.mark.slow
@fault("G115")
def test_g115_a_model_that_does_not_tie_its_tied_weights_is_rejected(ranks: ForkServer, tmp_path: Path) -> None:
    job = {"model_type": "qwen2_moe", "values": values_of("qwen2_moe", **TIED)}
    (stock,) = run_on_ranks(ranks, 1, train_plain, **job, output_dir=tmp_path / "stock", ours=False)
    assert not stock["tied"]
    refused = job_on_ranks(ranks.attempt, 1, train_plain, **job, output_dir=tmp_path / "refused")
    assert "OptionError" in refused.logs[0].read_text()
    assert not list((tmp_path / "refused").glob("checkpoint-*"))
    trained_and_resumed(ranks, tmp_path, {**job, "tie": True})
    assert "lm_head.weight" not in load_file(tmp_path / "first/hf/model.safetensors")

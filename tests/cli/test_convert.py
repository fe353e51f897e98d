"""Conversions: there and back every tensor of every role is what it was, and nothing but the target is written."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paddleformers_fc
from paddleformers_fc.errors import MappingError
from paddleformers_fc.families import ModelDescription, bind, enumerate_tensors, own_families
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.formats.flex import open_flex
from tests.cli.support import SIZES, document_of, flip, open_weights, run, save
from tests.execute.simulated import Arrays, canonical

ARRAYS = canonical()
LLAMA = next(one for one in own_families() if one.name == "llama")


def weights_of(model: ModelDescription) -> Arrays:
    """Random open weights of a Llama, half of them in bfloat16."""
    tensors = [one.under(tp=1) for one in enumerate_tensors(LLAMA, model)]
    random = np.random.default_rng(7)
    found = {}
    for name, spec in bind(LLAMA, model, tensors).mapping().sources.items():
        found[name] = random.standard_normal(spec.shape).astype("float32" if "norm" in name else ml_dtypes.bfloat16)
    return found


def test_a_flex_checkpoint_converts_to_unsharded_tensors_in_files_of_bounded_size(four: Path, tmp_path: Path) -> None:
    found = run("convert", four, tmp_path / "new", "--max-shard-size", "8kB", "--json").document
    assert found["source_format"] == found["format"] == "flex_checkpoint"
    assert found["step"] == 3
    assert len(found["files"]) > len(found["roles"]) > 1
    one, other = paddleformers_fc.open(four), paddleformers_fc.open(tmp_path / "new")
    assert one.diff(other).equal
    assert other.metadata.roles.keys() == {"model_state", "optimizer_state"}
    assert other.verify().passed
    assert other.metadata.job == one.metadata.job
    again = open_flex(tmp_path / "new")
    assert again.rules == open_flex(four).rules
    assert all(len(tensor.form.boxes) == 1 for named in again.catalog.roles.values() for tensor in named.values())


def test_parts_of_several_dtypes_of_one_tensor_of_the_model_are_refused(tmp_path: Path) -> None:
    model = tiny_models(LLAMA)[0]
    weights = weights_of(model)
    name = "model.layers.0.self_attn.k_proj.weight"
    mixed = {**weights, name: weights[name].astype(np.float32) * np.float32(1.001)}
    config = {**model.config, "fuse_attention_qkv": True}
    source = open_weights(tmp_path / "hf", mixed, config)
    with pytest.raises(MappingError, match="in several dtypes") as caught:
        paddleformers_fc.open(source).convert(tmp_path / "flex")
    assert f"{name} float32" in caught.value.evidence[0]
    assert not (tmp_path / "flex").exists()
    apart = open_weights(tmp_path / "apart", mixed, {**config, "fuse_attention_qkv": False})
    paddleformers_fc.open(apart).convert(tmp_path / "flex")
    assert paddleformers_fc.open(apart).diff(paddleformers_fc.open(tmp_path / "flex")).equal


def test_documents_of_the_source_are_in_the_target(tmp_path: Path) -> None:
    model = tiny_models(LLAMA)[0]
    source = open_weights(tmp_path / "hf", weights_of(model), model.config)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "model.safetensors.index.json.bak").write_text("no")
    outcome = run("convert", source, tmp_path / "flex")
    assert outcome.code == 0, outcome.err
    files = {path.name for path in (tmp_path / "flex").iterdir()}
    expected = {"chat_template.jinja", "config.json", "mapping.json", "model_state", "tokenizer.json"}
    assert files == expected | {"flex_checkpoint.json", "flex_index.safetensors"}
    assert "converted: open weights (Hugging Face) to flex checkpoint, " in outcome.out


def test_a_flipped_bit_is_found_before_anything_is_written(copy: Path, tmp_path: Path) -> None:
    file = next(copy.glob("model_state/*.safetensors"))
    flip(file, file.stat().st_size - 5)
    assert run("convert", copy, tmp_path / "new").code == 1
    assert not (tmp_path / "new").exists()


def test_every_role_is_equal_byte_by_byte_after_paddles_format_and_back(tmp_path: Path) -> None:
    source = save(tmp_path / "checkpoint-3", ARRAYS, tp=2, sharded=2, config=SIZES)
    middle = tmp_path / "distcp/checkpoint-3"
    shown = document_of("convert", source, middle, "--format", "distcp", "--max-shard-size", "8kB")
    assert (shown["format"], len(shown["files"]) > 2) == ("paddle", True)
    assert run("verify", middle).code == 0
    assert run("diff", source, middle).code == 0
    assert run("convert", middle, tmp_path / "back").code == 0
    found = paddleformers_fc.open(source).diff(paddleformers_fc.open(tmp_path / "back"))
    assert found.equal
    assert set(found.roles) == {"model_state", "optimizer_state"}
    # Python itself reads the same arrays.
    stored: dict[str, Any] = {}
    for file in sorted((middle / "model_state").glob("*.distcp")):
        stored |= pickle.loads(file.read_bytes())
    opened = paddleformers_fc.open(middle)
    assert len(stored) == opened.metadata.roles["model_state"].tensors
    assert stored["model.norm.weight"].tobytes() == opened.read("model.norm.weight").tobytes()
    assert pickle.loads((middle / "master_weight/0_0.distcp").read_bytes()) == {}


def test_foreign_files_of_weights_are_read_as_they_are(tmp_path: Path) -> None:
    """Without an index, beside files of other programs, and with the configuration in another directory."""
    model = tiny_models(LLAMA)[0]
    arrays = weights_of(model)
    whole = paddleformers_fc.open(open_weights(tmp_path / "whole", arrays, model.config))
    parts = tmp_path / "parts"
    (parts / "original").mkdir(parents=True)
    for number in (0, 1):
        part = {name: arrays[name] for name in sorted(arrays)[number::2]}
        written = open_weights(tmp_path / f"part-{number}", part, model.config) / "model.safetensors"
        written.rename(parts / f"model-0000{number + 1}-of-00002.safetensors")
    (parts / "README.md").write_text("# A model")
    (parts / "pytorch_model.bin").write_bytes(b"not read")
    assert run("convert", parts, tmp_path / "flex", "--config", tmp_path / "whole").code == 0
    assert whole.diff(paddleformers_fc.open(tmp_path / "flex")).equal
    assert not (tmp_path / "flex/README.md").exists()
    (tmp_path / "whole/config.json").rename(parts / "config.json")
    assert whole.diff(paddleformers_fc.open(parts)).equal
    (parts / "model-00002-of-00002.safetensors").unlink()
    assert run("verify", parts).code == 1


def test_tied_weights_are_read_with_and_without_the_copy_of_the_embedding(tmp_path: Path) -> None:
    model = next(one for one in tiny_models(LLAMA) if not one.config.get("tie_word_embeddings"))
    tied = {**model.config, "tie_word_embeddings": True}
    arrays = weights_of(model)
    alone = {name: one for name, one in arrays.items() if name != "lm_head.weight"}
    copies = {**alone, "lm_head.weight": arrays["model.embed_tokens.weight"]}
    for kind, held in (("alone", alone), ("copies", copies)):
        source = open_weights(tmp_path / kind, held, tied)
        # Stock reads a weight under each of its names.
        for form, tensors in (("flex", alone), ("distcp", copies)):
            assert run("convert", source, tmp_path / f"{kind}-{form}", "--format", form).code == 0
            found = paddleformers_fc.open(tmp_path / f"{kind}-{form}")
            assert found.metadata.roles["model_state"].tensors == len(tensors)
            assert found.diff(paddleformers_fc.open(tmp_path / "alone")).equal
    different = open_weights(tmp_path / "different", arrays, tied)
    assert run("convert", different, tmp_path / "different-flex").code == 1
    assert not (tmp_path / "different-flex").exists()


@pytest.mark.parametrize("square", [True, False])
def test_squares_alone_in_the_format_of_paddleformers_are_refused(square: bool, tmp_path: Path) -> None:
    """Without the files of a Trainer another program may have written them; squares do not show the orientation."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "num_attention_heads": 4}
    config = {**tiny_models(LLAMA)[0].config, **sizes, "num_key_value_heads": 4 if square else 2}
    source = open_weights(tmp_path / "hf", weights_of(ModelDescription(config)), config, "np")
    done = run("convert", source, tmp_path / "flex")
    assert done.code == (1 if square else 0), done.err
    assert ("may have weights in the orientation of PaddleFormers" in done.err) is square


def test_a_configuration_with_another_number_of_heads_is_refused_though_fused_layers_fit(tmp_path: Path) -> None:
    stored = save(tmp_path / "checkpoint-3", canonical(), config=SIZES)
    assert run("convert", stored, tmp_path / "paddle", "--format", "distcp").code == 0
    (tmp_path / "paddle/config.json").unlink(missing_ok=True)
    # 6 heads and one key, or 4 heads and two keys: eight heads in the fused layer.
    heads = {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 4}
    for name, config, code in (("other", {**SIZES, **heads}, 2), ("same", SIZES, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        for command in (("convert", "--format", "hf"), ("export",)):
            target = tmp_path / f"{name}-{command[0]}"
            outcome = run(command[0], tmp_path / "paddle", target, *command[1:], "--config", tmp_path / name)
            assert (outcome.code, target.exists()) == (code, code == 0)
            assert code == 0 or "o_proj.weight: stored [16, 16], [24, 16] by the configuration" in outcome.err


def test_tensors_of_open_weights_that_the_model_lacks_are_dropped_and_listed(tmp_path: Path) -> None:
    model, name = tiny_models(LLAMA)[0], "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = open_weights(tmp_path / "hf", weights_of(model) | {name: np.ones(4, np.float32)}, model.config)
    assert document_of("convert", source, tmp_path / "flex")["dropped"] == [name]
    text = run("convert", source, tmp_path / "distcp", "--format", "distcp").out
    assert f"dropped, because the model does not have them: 1 tensor\n  {name}\n" in text
    assert document_of("convert", tmp_path / "flex", tmp_path / "back", "--format", "hf")["dropped"] == []


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16"])
def test_a_dtype_that_paddles_format_lacks_is_refused_before_anything_is_written(tmp_path: Path, dtype: str) -> None:
    model = tiny_models(LLAMA)[0]
    arrays = {name: array.astype(dtype) for name, array in weights_of(model).items()}
    source = open_weights(tmp_path / "hf", arrays, model.config)
    refused = document_of("convert", source, tmp_path / "distcp", "--format", "distcp", code=2)
    assert refused["what"] == f"Paddle's FlexCheckpoint does not support the dtype of {len(arrays)} tensors."
    assert f"model.norm.weight: {dtype}" in refused["evidence"]
    assert not (tmp_path / "distcp").exists()

"""Adapters that are merged into a base: both names of a tied tensor, and the dtypes of a base."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import MismatchError, OptionError
from paddleformers_fc.execute.export import export_opened
from paddleformers_fc.execute.merging import Delta, Merge
from paddleformers_fc.families import ModelDescription, family_for
from paddleformers_fc.families.description import IS_NLP, Adapters, is_adapter, with_adapters
from paddleformers_fc.families.registry import tiny_models
from paddleformers_fc.formats import OpenedCheckpoint
from paddleformers_fc.formats.huggingface import open_huggingface
from paddleformers_fc.formats.registry import open_checkpoint
from paddleformers_fc.layout.grid import parse_grid
from paddleformers_fc.plan.simulate import declared_model
from tests.cli.support import md5_of
from tests.storage.buckets import Bucket
from verification.simulate_ranks import filled, laid_out, save, save_model, value_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LLAMA = tiny_models(family_for({"model_type": "llama"}))[0]
TIED = structs.replace(LLAMA, config={**LLAMA.config, "tie_word_embeddings": True})


def saved(directory: Path, model: ModelDescription, trained: tuple[str, ...]) -> OpenedCheckpoint:
    """A checkpoint of adapters of all layers, and of some tensors of the base."""
    model = structs.replace(model, adapters=Adapters(r=4, alpha=8.0))
    family = with_adapters(family_for(model.config), model.adapters)
    adapted = declared_model(family, model, parse_grid("dp=1"), "float32")
    roles = filled(adapted.roles(0), value_of)
    held = {name: weight for name, weight in roles["model_state"].items() if is_adapter(name) or name.endswith(trained)}
    assert len(held) > 8
    save(directory, [{"model_state": held}], adapted)
    return open_checkpoint(directory)


def base_of(directory: Path) -> dict[str, Any]:
    """The tensors of a tied base, with other values, and a directory for its file."""
    source = save_model(directory / "checkpoint", laid_out(LLAMA, "dp=1", "float32"))
    export_opened(open_checkpoint(source), directory / "exported")
    found = load_file(directory / "exported/model.safetensors")
    (directory / "base").mkdir()
    return {name: values * 0 + 1 for name, values in found.items() if name != HEAD}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> OpenedCheckpoint:
    return saved(tmp_path_factory.mktemp("tied") / "c", TIED, ("embed_tokens.weight",))


@pytest.mark.parametrize("stored", [True, False])
def test_a_merge_replaces_both_names_of_a_tied_tensor_that_the_base_stores(
    tied: OpenedCheckpoint, tmp_path: Path, stored: bool
) -> None:
    base = base_of(tmp_path)
    save_file({**base, **({HEAD: base[EMBEDDING]} if stored else {})}, tmp_path / "base/model.safetensors")
    report = export_opened(tied, tmp_path / "merged", base=open_huggingface(tmp_path / "base"), md5=True)
    assert report.md5 == md5_of([(tmp_path / "merged/model.safetensors").read_bytes()])
    found = load_file(tmp_path / "merged/model.safetensors")
    assert found[EMBEDDING].tobytes() != base[EMBEDDING].tobytes()
    assert (HEAD in found) == stored
    assert found.get(HEAD, found[EMBEDDING]).tobytes() == found[EMBEDDING].tobytes()


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_a_head_are_not_merged_into_a_base_that_ties_it(tmp_path: Path, tied: bool) -> None:
    # PaddleNLP's class has a linear layer as head, which PaddleFormers' classes do not have.
    model = structs.replace(LLAMA, config={**LLAMA.config, IS_NLP: True})
    checkpoint, base = saved(tmp_path / "c", model, ()), base_of(tmp_path)
    save_file({**base, HEAD: base[EMBEDDING]}, tmp_path / "base/model.safetensors")
    config = {**LLAMA.config, "tie_word_embeddings": tied}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    if tied:
        with pytest.raises(MismatchError, match="tied tensor") as refused:
            export_opened(checkpoint, tmp_path / "merged", base=open_huggingface(tmp_path / "base"))
        assert f"{HEAD}: has adapters, and {HEAD} is a copy of {EMBEDDING}" in refused.value.render()
        return
    export_opened(checkpoint, tmp_path / "merged", base=open_huggingface(tmp_path / "base"))
    found = load_file(tmp_path / "merged/model.safetensors")
    assert found[HEAD].tobytes() != found[EMBEDDING].tobytes() == base[EMBEDDING].tobytes()


def test_a_merge_at_a_store_is_not_written_into_its_base(
    tied: OpenedCheckpoint, tmp_path: Path, bucket: Bucket
) -> None:
    save_file(base_of(tmp_path), tmp_path / "base/model.safetensors")
    url = bucket.upload(tmp_path / "base")
    before = bucket.files("base")
    with pytest.raises(OptionError, match="not written into its source"):
        export_opened(tied, url, base=open_huggingface(url))
    assert bucket.files("base") == before


def test_a_quantized_base_is_refused(tied: OpenedCheckpoint, tmp_path: Path) -> None:
    base, name = base_of(tmp_path), "model.layers.0.self_attn.q_proj.weight"
    save_file({**base, name: base[name].astype(ml_dtypes.float8_e4m3fn)}, tmp_path / "base/model.safetensors")
    with pytest.raises(MismatchError, match="quantized base") as refused:
        export_opened(tied, tmp_path / "merged", base=open_huggingface(tmp_path / "base"))
    assert f"{name}: float8_e4m3fn" in refused.value.render()


@pytest.mark.parametrize("name", ["adapted", "trained"])
def test_a_merge_makes_no_number_of_a_float16_base_infinite(name: str) -> None:
    one = np.ones((1, 4), np.float32)
    merge = Merge({"adapted": Delta(one, one.T * 1000)}, {"trained": np.full(16, 66000, np.float32)})
    with pytest.raises(MismatchError, match="too large for float16") as refused:
        merge.apply(name, 0, np.full(16, 65000, np.float16))
    assert refused.value.where == name


def test_a_merged_weight_is_the_same_whatever_pieces_it_is_computed_in() -> None:
    random = np.random.default_rng(7)
    inputs, outputs = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 100), (300, 8)))
    merge, whole, parts = Merge({"w": Delta(inputs, outputs)}, {}), *np.zeros((2, 30_000), np.float32)
    merge.apply("w", 0, whole)
    for begin, end in itertools.pairwise((0, 50, 700, 12_345, 29_900, 30_000)):
        merge.apply("w", begin, parts[begin:end])
    assert parts.tobytes() == whole.tobytes()
    assert np.allclose(whole.reshape(300, 100), outputs.astype(np.float64) @ inputs, atol=1e-5)


def test_a_base_with_other_tensors_than_that_of_the_training_is_refused(tied: OpenedCheckpoint, tmp_path: Path) -> None:
    base, name = base_of(tmp_path), "model.layers.0.self_attn.q_proj.weight"
    kept = {one: array for one, array in base.items() if one != EMBEDDING}
    save_file({**kept, name: base[name][:-1]}, tmp_path / "base/model.safetensors")
    with pytest.raises(MismatchError, match="The adapters do not match the base") as refused:
        export_opened(tied, tmp_path / "merged", base=open_huggingface(tmp_path / "base"))
    rows, columns = base[name].shape
    assert f"{name}: [{rows - 1}, {columns}], expected [{rows}, {columns}]" in refused.value.evidence
    assert f"{EMBEDDING}: missing, expected {list(base[EMBEDDING].shape)}" in refused.value.evidence

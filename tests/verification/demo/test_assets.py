"""The demo's corpus and models: the same everywhere, and such that layouts can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from paddleformers_fc.families import family_for
from verification.demo.assets import MODELS, SEQUENCE_LENGTH, SPECIAL_TOKENS, Assets, prepare
from verification.demo.settings import GLOBAL_BATCH, STEPS


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return prepare(tmp_path_factory.mktemp("assets"))


def _tokens(assets: Assets) -> Iterator[list[int]]:
    tokenizer = Tokenizer.from_file(str(assets.models["llama"] / "tokenizer.json"))
    for line in assets.corpus.read_text().splitlines():
        (text,) = json.loads(line)["text"]
        yield tokenizer.encode(text).ids


def _digests(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.md5(path.read_bytes()).hexdigest() for path in files}


def test_preparing_again_gives_the_same_bytes(assets: Assets, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert _digests(tmp_path) == _digests(assets.corpus.parent)


def test_samples_of_the_corpus_are_whole_without_special_tokens_and_never_seen_twice(assets: Assets) -> None:
    tokens = list(_tokens(assets))
    assert min(map(len, tokens)) > SEQUENCE_LENGTH
    assert min(map(min, tokens)) >= len(SPECIAL_TOKENS)
    assert len({tuple(ids[: SEQUENCE_LENGTH + 1]) for ids in tokens}) > STEPS * GLOBAL_BATCH


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_has_the_weights_of_the_table_and_can_be_halved(assets: Assets, name: str) -> None:
    with safe_open(assets.models[name] / "model.safetensors", "np") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert shapes == MODELS[name][1]
    config = json.loads((assets.models[name] / "config.json").read_text())
    assert config["model_type"] == family_for(config).name
    counts = ["num_attention_heads", "num_key_value_heads", "num_hidden_layers", "moe_num_experts"]
    assert not any(config.get(key, 0) % 2 for key in counts)

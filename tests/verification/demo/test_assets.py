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


def test_every_record_is_longer_than_a_sample(assets: Assets) -> None:
    assert min(len(ids) for ids in _tokens(assets)) > SEQUENCE_LENGTH


def test_no_record_holds_a_special_token(assets: Assets) -> None:
    assert min(min(ids) for ids in _tokens(assets)) >= len(SPECIAL_TOKENS)


def test_no_sample_is_seen_twice_in_the_demo(assets: Assets) -> None:
    samples = {tuple(ids[: SEQUENCE_LENGTH + 1]) for ids in _tokens(assets)}
    assert len(samples) > STEPS * GLOBAL_BATCH


def test_preparing_again_gives_the_same_bytes(assets: Assets, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert _digests(tmp_path) == _digests(assets.corpus.parent)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_weights_are_those_of_the_table(assets: Assets, name: str) -> None:
    with safe_open(assets.models[name] / "model.safetensors", "np") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert shapes == MODELS[name][1]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_family_declares_the_model(assets: Assets, name: str) -> None:
    config = json.loads((assets.models[name] / "config.json").read_text())
    assert config["model_type"] == family_for(config).name


@pytest.mark.parametrize("name", sorted(MODELS))
def test_heads_experts_and_layers_can_be_halved(name: str) -> None:
    config, _ = MODELS[name]
    counts = ["num_attention_heads", "num_key_value_heads", "num_hidden_layers"]
    counts += [key for key in ("moe_num_experts",) if key in config]
    assert [config[key] % 2 for key in counts] == [0] * len(counts)

"""The demo's assets: a real text, its tokenizer, a corpus, and two tiny models as Hugging Face directories.

The text is the beginning of Shakespeare's *Coriolanus* (public domain), shipped with the package, so that everything
derived from it is the same on every machine and needs no network. :func:`prepare` writes::

    assets/corpus.jsonl       one record per sample, {"text": ["..."]}, as PaddleFormers' stage PT reads it
    assets/dialogues.jsonl    one to three turns, {"src": ["..."], "tgt": ["..."]}, for the stage SFT
    assets/preferences.jsonl  a speech with a better and a worse answer, for the stage DPO
    assets/llama/             config.json, model.safetensors, tokenizer.json, ...
    assets/ernie_moe/         the same for a mixture of experts

Two parallel layouts can only be compared by their losses if they train the same tokens with the same weights. So

* every record of the corpus is longer than a sample: the loader cuts it, and none is padded or shorter than others;
* every dialogue and preference is shorter than :data:`DIALOGUE_LENGTH`, so that none is left out;
* neither token 0 nor the padding token occurs: Paddle embeds ``padding_idx`` as zero, but not in tensor parallel;
* two key-value heads and four layers: tensor parallel 2 and pipeline parallel 2, 4 both divide them.

The models are written straight from seeded random numbers, without building a network. This module does not import
Paddle; the libraries `tokenizers` and `safetensors`, which PaddleFormers brings along, are imported when
:func:`prepare` runs.

Time: below a second. Memory: below 20 MiB.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEQUENCE_LENGTH = 64
"""Tokens per sample. Every record of the corpus has at least one more."""

DIALOGUE_LENGTH = 128
"""``max_seq_len`` for dialogues and preferences. Their own tokens are at most :data:`_SPOKEN`; a template adds some."""

_SPOKEN = 88

VOCABULARY = 512
SPECIAL_TOKENS = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
HIDDEN = 64
LAYERS = 4
_SEED = 23
_INITIAL_DEVIATION = 0.02

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Assets:
    """The paths of the assets that :func:`prepare` writes.

    Args:
        corpus: the JSONL file for pre-training.
        dialogues: the JSONL file for fine-tuning.
        preferences: the JSONL file for preference training.
        models: by name (``llama``, ``ernie_moe``), a Hugging Face directory each.
    """

    corpus: Path
    dialogues: Path
    preferences: Path
    models: Mapping[str, Path]


def prepare(directory: Path) -> Assets:
    """Write the corpus and both models into a directory; existing files are written again, with the same bytes.

    Args:
        directory: created when missing.

    Returns:
        The paths of the written files.
    """
    text = (files(__package__) / "text" / "coriolanus.txt").read_text(encoding="utf-8")
    tokenizer = _tokenizer(text)
    directory.mkdir(parents=True, exist_ok=True)
    written = {"corpus": _records, "dialogues": _dialogues, "preferences": _preferences}
    data = {name: directory / f"{name}.jsonl" for name in written}
    for name, records in written.items():
        data[name].write_text("".join(records(text, tokenizer)), encoding="utf-8")
    models = {name: directory / name for name in MODELS}
    for name, (config, shapes) in MODELS.items():
        _write_model(models[name], config, shapes)
        _write_tokenizer(models[name], tokenizer)
    return Assets(**data, models=models)


def _tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE: any text can be written with it, and the unknown token never occurs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def _records(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield lines of JSON: lines of the text, as few as give more than a sample's tokens. A short rest is dropped."""
    record = ""
    for line in text.splitlines(keepends=True):
        record += line
        if len(tokenizer.encode(record).ids) > SEQUENCE_LENGTH:
            yield json.dumps({"text": [record]}) + "\n"
            record = ""


def _speeches(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the text of the characters, without their names, as far as two speeches fit into a dialogue."""
    spoken = (part.partition(":\n")[2].strip() for part in text.split("\n\n"))
    return [one for one in spoken if one and len(tokenizer.encode(one).ids) <= _SPOKEN // 2]


def _dialogues(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines of JSON: successive speeches as the turns of a user and an assistant; one, two and three turns by turns."""
    speeches = iter(_speeches(text, tokenizer))
    turns: list[tuple[str, str]] = []
    for number, pair in enumerate(zip(speeches, speeches, strict=False)):
        together = "".join(itertools.chain.from_iterable([*turns, pair]))
        if turns and len(tokenizer.encode(together).ids) > _SPOKEN:
            yield _dialogue(turns)
            turns = []
        turns.append(pair)
        if len(turns) > number % 3:
            yield _dialogue(turns)
            turns = []


def _dialogue(turns: Sequence[tuple[str, str]]) -> str:
    return json.dumps({"src": [prompt for prompt, _ in turns], "tgt": [answer for _, answer in turns]}) + "\n"


def _preferences(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Lines of JSON: a speech, the next one as the better answer, and the beginning of the first as the worse one."""
    speeches = iter(_speeches(text, tokenizer))
    for prompt, answer in zip(speeches, speeches, strict=False):
        worse = prompt[: len(prompt) // 2].strip() or prompt
        if len(tokenizer.encode(prompt + answer + worse).ids) <= _SPOKEN:
            record = {"src": [prompt], "tgt": [], "response": [[answer], [worse]], "sort": [1, 0]}
            yield json.dumps(record) + "\n"


def _common_config(architecture: str, model_type: str) -> dict[str, Any]:
    tokens = list(SPECIAL_TOKENS)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
        "hidden_act": "silu",
        "initializer_range": _INITIAL_DEVIATION,
        "max_position_embeddings": 2 * SEQUENCE_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "pad_token_id": tokens.index("pad_token"),
        "bos_token_id": tokens.index("bos_token"),
        "eos_token_id": tokens.index("eos_token"),
        # This is no Hugging Face key: PaddleFormers' fused kernel exists for GPUs only, and fusing is its default.
        "fuse_rms_norm": False,
    }


LLAMA_CONFIG = _common_config("LlamaForCausalLM", "llama")

ERNIE_MOE_CONFIG = _common_config("Ernie4_5_MoeForCausalLM", "ernie4_5_moe") | {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": HIDDEN // 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": LAYERS - 1,
    "moe_layer_interval": 1,
    "num_nextn_predict_layers": 0,
    "use_bias": False,
}


def _feed_forward_shapes(name: str, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, HIDDEN),
        f"{name}.up_proj.weight": (width, HIDDEN),
        f"{name}.down_proj.weight": (HIDDEN, width),
    }


def _attention_shapes(layer: str, config: Mapping[str, Any]) -> Shapes:
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (queries, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (keys, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (keys, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, queries),
    }


def _experts_shapes(layer: str, config: Mapping[str, Any]) -> Shapes:
    experts, width = config["moe_num_experts"], config["moe_intermediate_size"]
    shapes: Shapes = {
        f"{layer}.mlp.gate.weight": (experts, HIDDEN),
        f"{layer}.mlp.moe_statics.e_score_correction_bias": (1, experts),
    }
    for expert in range(experts):
        shapes |= _feed_forward_shapes(f"{layer}.mlp.experts.{expert}", width)
    return shapes | _feed_forward_shapes(f"{layer}.mlp.shared_experts", config["moe_num_shared_experts"] * width)


def _model_shapes(config: Mapping[str, Any]) -> Shapes:
    first_expert_layer = config.get("moe_layer_start_index", LAYERS)
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        shapes |= _attention_shapes(layer, config)
        if index < first_expert_layer:
            shapes |= _feed_forward_shapes(f"{layer}.mlp", config["intermediate_size"])
        else:
            shapes |= _experts_shapes(layer, config)
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


MODELS: Mapping[str, tuple[Mapping[str, Any], Shapes]] = {
    "llama": (LLAMA_CONFIG, _model_shapes(LLAMA_CONFIG)),
    "ernie_moe": (ERNIE_MOE_CONFIG, _model_shapes(ERNIE_MOE_CONFIG)),
}
"""By name: the content of config.json, and the shape of every tensor by its Hugging Face name."""


def _initial(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray[Any, Any]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("e_score_correction_bias"):
        return np.zeros(shape, np.float32)
    return (random.standard_normal(shape) * _INITIAL_DEVIATION).astype(np.float32)


def _write_model(directory: Path, config: Mapping[str, Any], shapes: Shapes) -> None:
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.Generator(np.random.PCG64(_SEED))
    weights = {name: _initial(name, shape, random) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    tokens = {f"{kind}_id": config[f"{kind}_id"] for kind in ("bos_token", "eos_token", "pad_token")}
    _write_json(directory / "generation_config.json", tokens)


def _write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2 * SEQUENCE_LENGTH, **SPECIAL_TOKENS},
    )
    _write_json(directory / "special_tokens_map.json", SPECIAL_TOKENS)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

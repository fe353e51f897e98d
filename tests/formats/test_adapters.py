"""Adapters in files of PEFT and of PaddleFormers: variants of another meaning are refused, others are converted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, FlexError, FormatError, MappingError, MismatchError, OptionError
from paddleformers_fc.families import ModelDescription, bind, enumerate_tensors, family_for
from paddleformers_fc.families.description import Adapters, is_adapter, shared_inputs, with_adapters
from paddleformers_fc.formats.adapters import PADDLEFORMERS_LORA, PEFT
from tests.cli.support import md5_of, run
from tests.formats.damage import assert_refused
from verification.matrix.tiny import keys

PEFT_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "peft_version": "0.21.0",
    "r": 4,
    "lora_alpha": 8,
    "init_lora_weights": True,
    "bias": "none",
    "target_modules": ["q_proj"],
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "an_option_of_tomorrow": None,
}
OURS = {"r": 4, "lora_alpha": 8, "scaling": 2.0, "enable_lora_list": None, "pissa": False, "loraga": False}
PROJECTION = "model.layers.0.self_attn.q_proj"
LAYER = f"base_model.model.{PROJECTION}"
TENSORS = {
    f"{LAYER}.lora_A.weight": np.zeros((4, 8), np.float32),
    f"{LAYER}.lora_B.weight": np.zeros((8, 4), np.float32),
}


def peft(directory: Path, **changes: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps({**PEFT_CONFIG, **changes}))
    save_file(TENSORS, directory / "adapter_model.safetensors")
    return directory


def paddleformers(directory: Path, arrays: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    name = "peft_model-00001-of-00001.safetensors"
    held = arrays or {f"{PROJECTION}.lora_A": np.zeros((8, 4), np.float32)}
    (directory / "lora_config.json").write_text(json.dumps({**OURS, **changes}))
    save_file(dict(held), directory / name)
    index = {"weight_map": dict.fromkeys(held, name)}
    (directory / "peft_model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        *({"init_lora_weights": kept} for kept in (True, False, "gaussian", "orthogonal")),
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"bias": None},
    ],
)
def test_initialisations_that_keep_the_base_are_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert PEFT.open(peft(tmp_path, **changes)).catalog.count == 2


INVALID, CONTRADICTS = "Invalid configuration of adapters", "r, lora_alpha and rslora give 2.0"


@pytest.mark.parametrize(
    ("write", "key", "value", "message"),
    [
        *((peft, "init_lora_weights", one, "") for one in ("pissa", "pissa_niter_16", "olora", "loftq", "corda")),
        *((peft, "init_lora_weights", one, "") for one in ("lora_ga", "tomorrow", ["pissa"])),
        (peft, "bias", "tomorrow", ""),
        (peft, "an_option_of_tomorrow", [1], ""),
        *((paddleformers, key, [True], "") for key in ("pissa", "use_mora", "lora_use_mixer", "enable_lora_list")),
        *((paddleformers, key, [True], "") for key in ("loraga", "do_qat")),
        *((paddleformers, "scaling", one, CONTRADICTS) for one in (4.0, 0, float("nan"), "2.0")),
        *((one, "lora_alpha", float("inf"), INVALID) for one in (peft, paddleformers)),
        *((one, "lora_alpha", float("nan"), INVALID) for one in (peft, paddleformers)),
    ],
)
def test_variants_that_change_the_base_and_values_that_contradict_each_other_are_refused_by_name(
    tmp_path: Path, write: Callable[..., Path], key: str, value: object, message: str
) -> None:
    kind = PEFT if write is peft else PADDLEFORMERS_LORA
    with pytest.raises(FormatError if message else OptionError) as refused:
        kind.open(write(tmp_path, **{key: value}))
    assert (message or f"{key}: {value!r}") in refused.value.render()


@pytest.mark.parametrize(("scaling", "rslora"), [(2.0, False), (4.0, True), (None, False)])
def test_a_scaling_of_the_rank_and_alpha_is_read(tmp_path: Path, scaling: float | None, rslora: bool) -> None:
    assert PADDLEFORMERS_LORA.open(paddleformers(tmp_path, scaling=scaling, rslora=rslora)).catalog.count == 1


# ---- Conversions.

Arrays = dict[str, np.ndarray[Any, Any]]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LLAMA = keys("llama")
ERNIE = keys("ernie4_5_moe")


def base_of(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def adapted(directory: Path, config: Mapping[str, Any], leaves: tuple[str, ...], **changes: Any) -> Path:
    """Write adapters of the canonical layers with some last parts of names, and such tensors of the base, as PEFT does.

    The parts of a layer that PaddleFormers fuses have equal ``lora_A``.
    """
    family = family_for(config)
    model = ModelDescription(config, is_fleet=False, adapters=Adapters(r=4, alpha=8.0))
    tensors = [one.under(tp=1) for one in enumerate_tensors(with_adapters(family, model.adapters), model)]
    rules = bind(family, model, tensors)
    shared = shared_inputs(rules)
    arrays: Arrays = {}
    for place, (name, spec) in enumerate(rules.mapping().sources.items()):
        values = np.arange(np.prod(spec.shape), dtype=np.float32).reshape(spec.shape) + place
        for copy in shared.get(name, (name,)):
            layer = copy.split(".lora_")[0] if is_adapter(copy) else copy.removesuffix(".weight")
            if layer.rpartition(".")[2] in leaves and is_adapter(copy) != layer.endswith(("embed_tokens", "lm_head")):
                arrays[f"base_model.model.{copy}"] = values
    assert arrays
    directory.mkdir(parents=True)
    save_file(arrays, directory / WEIGHTS, {"format": "pt"})
    (directory / CONFIG).write_text(json.dumps({**PEFT_CONFIG, "target_modules": list(leaves), **changes}))
    return directory


def changed(directory: Path, change: Callable[[Arrays], object]) -> None:
    arrays = load_file(directory / WEIGHTS)
    change(arrays)
    save_file(arrays, directory / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("named", "config", "leaves"),
    [
        (True, LLAMA, ("q_proj", "v_proj")),
        (False, LLAMA, ("down_proj", "embed_tokens")),
        (False, {**LLAMA, "tie_word_embeddings": True}, ("q_proj", "embed_tokens")),
        (True, ERNIE, ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")),
    ],
    ids=str,
)
def test_adapters_of_peft_are_equal_after_a_flex_checkpoint_and_back(
    named: bool, config: Mapping[str, Any], leaves: tuple[str, ...], tmp_path: Path
) -> None:
    base = base_of(tmp_path / "the base", {**config, "architectures": ["AForCausalLMDeprecated"]})
    source = adapted(
        tmp_path / "adapters", config, leaves, base_model_name_or_path=str(base) if named else "somebody/else"
    )
    (source / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    flex, back = tmp_path / "flex/checkpoint-0", tmp_path / "back"
    done = run("convert", source, flex, *(() if named else ("--config", base)))
    assert done.code == 0, done.err
    assert run("verify", flex).code == 0
    assert (flex / "tokenizer.json").exists()
    assert run("export", flex, back, "--json").document["md5"] == md5_of([(back / WEIGHTS).read_bytes()])
    one, other = load_file(source / WEIGHTS), load_file(back / WEIGHTS)
    tied = (
        {"base_model.model.lm_head.weight": one["base_model.model.model.embed_tokens.weight"]}
        if (config.get("tie_word_embeddings") and "embed_tokens" in leaves)
        else {}
    )
    assert other.keys() == one.keys() | tied.keys()
    for name, values in (one | tied).items():
        assert other[name].tobytes() == values.tobytes(), name
    written = json.loads((back / CONFIG).read_text())
    kept = [leaf for leaf in leaves if leaf.endswith("proj")]
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (4, 8, sorted(kept))
    stored = [name.removeprefix("base_model.model.").removesuffix(".weight") for name in other if "lora" not in name]
    assert (written.get("modules_to_save") or []) == sorted(stored)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


def test_patterns_of_converted_adapters_are_those_of_a_run_that_starts_from_them(tmp_path: Path) -> None:
    source = adapted(tmp_path / "adapters", LLAMA, ("q_proj", "embed_tokens"))
    changed(source, lambda arrays: [arrays.pop(name) for name in list(arrays) if "layers.3" in name])
    paddleformers_fc.open(source).convert(tmp_path / "flex", config=base_of(tmp_path / "base", LLAMA))
    found = paddleformers_fc.open(tmp_path / "flex")._opened.known.adapters
    assert found is not None
    assert found.target_modules == tuple(rf"model\.layers\.{layer}\.self_attn\.q_proj" for layer in range(3))
    assert found.trainable_modules == (r"model\.embed_tokens\.weight",)
    paddleformers_fc.open(adapted(tmp_path / "all", LLAMA, ("q_proj", "v_proj"))).convert(
        tmp_path / "of all", config=tmp_path / "base"
    )
    found = paddleformers_fc.open(tmp_path / "of all")._opened.known.adapters
    assert found is not None
    assert (found.target_modules, found.trainable_modules) == ((r".*\.q_proj", r".*\.v_proj"), ())


A, B = (f"{LAYER}.lora_{end}.weight" for end in "AB")
RANK_8 = np.zeros((8, 64), np.float32)


def stored_twice(arrays: Arrays) -> None:
    arrays |= dict.fromkeys((f"{LAYER}.bias", f"{LAYER}.base_layer.bias"), np.zeros(64, np.float32))


def of_an_unknown_layer(arrays: Arrays) -> None:
    arrays |= {name.replace("q_proj", "q_proj_of_another"): arrays[name] for name in (A, B)}


def without_a_part(arrays: Arrays) -> None:
    for name in [name for name in arrays if ".k_proj." in name]:
        del arrays[name]


@pytest.mark.parametrize(
    ("change", "config", "kind", "evidence"),
    [
        (lambda arrays: arrays.pop(B), LLAMA, Corrupt, "q_proj.lora_B.weight is missing"),
        (lambda arrays: arrays.clear(), LLAMA, Corrupt, "it contains no tensor"),
        (stored_twice, LLAMA, Corrupt, "is stored twice"),
        (lambda arrays: arrays.update({A: RANK_8}), LLAMA, MismatchError, "A.weight: stored [8, 64], expected [4, 64]"),
        (of_an_unknown_layer, LLAMA, MappingError, "q_proj_of_another"),
        (lambda arrays: arrays.update({A: arrays[A] + 1}), ERNIE, FlexError, "k_proj.lora_A.weight"),
        (without_a_part, ERNIE, MappingError, "k_proj.lora_B.weight"),
    ],
)
def test_adapters_that_are_not_those_of_their_base_are_refused(
    change: Callable[[Arrays], object], config: Mapping[str, Any], kind: type[FlexError], evidence: str, tmp_path: Path
) -> None:
    source = adapted(tmp_path / "adapters", config, ("q_proj", "k_proj", "v_proj"))
    base = base_of(tmp_path / "base", {**config, "architectures": ["AForCausalLMDeprecated"]})
    changed(source, change)
    with pytest.raises(kind) as refused:
        paddleformers_fc.open(source).convert(tmp_path / "flex", config=base)
    assert evidence in refused.value.render()
    assert not (tmp_path / "flex").exists()


@pytest.mark.parametrize(
    ("shapes", "changes", "evidence"),
    [
        ({"A": (64, 4)}, {}, "q_proj.lora_A: model.layers.0.self_attn.q_proj.lora_B is missing"),
        ({"A": (4, 64), "B": (4, 64)}, {}, "q_proj.lora_A: stored [4, 64], expected [64, 4]"),
        ({"A": (64, 4), "B": (4, 64)}, {"r": 8, "lora_alpha": 16}, "q_proj.lora_A: stored [64, 4], expected [64, 8]"),
    ],
)
def test_paddleformers_adapters_that_are_incomplete_or_of_another_rank_are_rejected(
    shapes: dict[str, tuple[int, ...]], changes: dict[str, int], evidence: str, tmp_path: Path
) -> None:
    source = base_of(tmp_path / "adapters", {**LLAMA, "architectures": ["AForCausalLMDeprecated"]})
    arrays = {f"{PROJECTION}.lora_{end}": np.ones(shape, np.float32) for end, shape in shapes.items()}
    paddleformers(source, arrays, **changes)
    opened = paddleformers_fc.open(source)
    assert_refused(lambda: opened.convert(tmp_path / "flex"), Corrupt, "complete adapters", evidence)


@pytest.mark.parametrize("location", [None, "meta-llama/Llama-2-7b-hf", "x" * 5000, "\0", "."])
def test_a_base_that_is_not_on_this_machine_is_refused_by_name(
    location: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = adapted(tmp_path / "adapters", LLAMA, ("q_proj",), base_model_name_or_path=location)
    refused = run("convert", source, tmp_path / "flex")
    assert (refused.code, "Traceback" in refused.err) == (2, False)
    assert f"the base: {(location or 'not named')[:30]}" in refused.err or location == "\0"
    assert f"paddleformers-fc convert {source} FLEX --config BASE" in refused.err
    assert not (tmp_path / "flex").exists()

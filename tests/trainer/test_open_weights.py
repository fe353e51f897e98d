"""Models that scripts come by in their ways, and what ``from_pretrained`` takes: filled by us, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddleformers_fc.errors import FlexError
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.formats.test_quantized import DECLARED, expected, quantized, write
from tests.harness import tiny
from tests.harness.on_ranks import run_on_ranks
from tests.trainer.open_weights_jobs import serve_as_hub, training_arguments
from tests.trainer.test_pretrained import weights_of
from verification.forkserver import ForkServer

JOBS = "tests.trainer.open_weights_jobs"


@pytest.fixture(scope="module")
def llama(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a tiny Llama."""
    return weights_of(ranks, tmp_path_factory.mktemp("llama"), "llama", {})


def come_by(ranks: ForkServer, way: str, source: Path, tmp_path: Path, **job: Any) -> dict[str, Any]:
    """How a training ends whose script comes by its model in a way."""
    kwargs = {"way": way, "source": str(source), "output_dir": str(tmp_path / "out"), **job}
    found: dict[str, Any] = ranks.run(f"{JOBS}:train_model_of", 1, kwargs).values[0]
    return found


@pytest.mark.parametrize(
    ("model_type", "model"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("ernie4_5_moe", {})]
)
def test_from_pretrained_fills_every_layout_with_the_bits_of_the_files(
    ranks: ForkServer, tmp_path: Path, model_type: str, model: dict[str, Any]
) -> None:
    source = weights_of(ranks, tmp_path, model_type, model)
    original = load_file(source / "model.safetensors")
    for layout in (tiny.TP2, tiny.PP2, tiny.SD2V2):
        target = tmp_path / f"again-{layout.name}"
        job = {"layout": layout.to_json(), "output_dir": str(tmp_path / "run"), "source": str(source)}
        warnings = ranks.run(f"{JOBS}:load_and_export", layout.nproc, {**job, "target": str(target)}).values
        assert warnings == ([],) * layout.nproc
        again = load_file(target / "model.safetensors")
        assert again.keys() == original.keys()
        assert all(array.tobytes() == original[name].tobytes() for name, array in again.items())


def test_fp8_weights_with_block_scales_fill_tensor_parallel_ranks_and_are_exported_plain(
    ranks: ForkServer, llama: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(llama, tmp_path / "fp8", ignore=shutil.ignore_patterns(CHECKSUMS_NAME))
    stored, wanted = {}, load_file(source / "model.safetensors")
    for name, array in wanted.items():
        if not name.endswith("_proj.weight"):
            stored[name] = array
            continue
        numbers, scales = quantized(array.astype(np.float32))
        stored |= {name: numbers, f"{name}_scale_inv": scales}
        wanted[name] = expected(numbers, scales).astype(array.dtype)
    save_file(stored, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": DECLARED}))
    job = {"layout": tiny.TP2.to_json(), "output_dir": str(tmp_path / "run"), "source": str(source)}
    assert ranks.run(f"{JOBS}:load_and_export", 2, {**job, "target": str(tmp_path / "again")}).values == ([], [])
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == wanted.keys()
    assert all(array.tobytes() == wanted[name].tobytes() for name, array in again.items())
    exported = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (exported.get("quantization_config") or {}).get("quant_method") is None


def test_mxfp4_weights_of_gpt_oss_fill_paddleformers_class_and_are_exported_plain(
    ranks: ForkServer, tmp_path: Path
) -> None:
    wanted = write(tmp_path / "mxfp4", "gpt_oss")
    job = {"layout": tiny.SINGLE.to_json(), "output_dir": str(tmp_path / "run"), "source": str(tmp_path / "mxfp4")}
    assert ranks.run(f"{JOBS}:load_and_export", 1, {**job, "target": str(tmp_path / "again")}).values == ([],)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == wanted.keys()
    assert all(np.array_equal(array, wanted[name]) for name, array in again.items())


def test_what_a_later_pipeline_stage_does_not_find_in_the_files_is_reported_too(
    ranks: ForkServer, tmp_path: Path
) -> None:
    source = weights_of(ranks, tmp_path, "ernie4_5_moe", {})
    job = {"layout": tiny.PP2.to_json(), "output_dir": str(tmp_path / "run"), "source": str(source)}
    job |= {"model": {"moe_use_aux_free": True}, "target": str(tmp_path / "again")}
    warnings = ranks.run(f"{JOBS}:load_and_export", 2, job).values
    bias = "model.layers.{1...3}.mlp.moe_statics.e_score_correction_bias"
    assert warnings == ([f"{bias} is not in {source} and keeps its initial values."], [])


def test_a_model_and_the_random_numbers_after_it_are_those_of_the_stock_loader(
    ranks: ForkServer, llama: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(llama, tmp_path / "weights")
    kwargs = {"output_dir": str(tmp_path / "out"), "source": str(source)}
    found = ranks.run(f"{JOBS}:load_beside_stock", 1, kwargs).values[0]
    assert found == {"equal": True, "initial": True}


@pytest.mark.parametrize(
    ("way", "trainer", "refused"),
    [
        pytest.param("after_arguments", "FlexTrainer", "", marks=pytest.mark.chosen),
        ("installed", "Trainer", ""),
        ("filled_again", "Trainer", ""),
        ("fresh_after_import", "FlexTrainer", ""),
        # Values that a script assigns are its own.
        pytest.param("fresh_with_values", "FlexTrainer", "", marks=pytest.mark.chosen),
        ("set_by_hand", "FlexTrainer", ""),
        pytest.param("imported", "FlexTrainer", "the model", marks=pytest.mark.chosen),
        ("copied", "Trainer", "the model"),
        ("part_of_another", "FlexTrainer", "wrapped"),
    ],
)
def test_a_model_is_trained_unless_paddleformers_loader_alone_has_filled_it(
    ranks: ForkServer, llama: Path, tmp_path: Path, way: str, trainer: str, refused: str
) -> None:
    source = shutil.copytree(llama, tmp_path / "weights")
    before = {path.name: path.stat().st_mtime_ns for path in (source, *source.iterdir())}
    found = come_by(ranks, way, source, tmp_path, trainer=trainer)
    if refused:
        assert found.get("error") == "OptionError", found
        assert f"\n  - {refused}: LlamaForCausalLM.from_pretrained('{source}')\n" in found["message"]
        assert "load_open_weights" in found["message"]
        return
    assert len(found.get("losses", ())) == 2, found
    after = {path.name: path.stat().st_mtime_ns for path in (source, *source.iterdir())}
    assert after == before or way == "filled_again"  # There PaddleFormers has loaded first.


def test_one_rank_that_was_filled_by_another_loader_stops_all(ranks: ForkServer, llama: Path, tmp_path: Path) -> None:
    kwargs = {"source": str(llama), "output_dir": str(tmp_path / "out")}
    outcomes = ranks.run(f"{JOBS}:train_where_one_rank_differs", 2, kwargs).values
    assert outcomes[0] == outcomes[1]
    assert "where: model (on rank 1)" in outcomes[0]


@pytest.mark.parametrize(
    ("change", "verified"), [(None, False), ("model.norm.weight", False), ("model.norm.weight", True)]
)
def test_a_reference_model_is_verified_or_the_model_or_refused(
    ranks: ForkServer, llama: Path, tmp_path: Path, change: str | None, verified: bool
) -> None:
    kwargs = {"source": str(llama), "output_dir": str(tmp_path / "out"), "change": change, "verified": verified}
    found = ranks.run(f"{JOBS}:train_beside_reference", 1, kwargs).values[0]
    if change is None or verified:
        assert found == {"step": 1}
    else:
        assert found["error"] == "MismatchError"
        assert f"\n  - {change}: not equal to the model's\n" in found["message"]


def refuse(llama: Path, ernie: Path, repository: Path, output_dir: Path) -> None:
    """Call ``from_pretrained`` with arguments and weights that do not fit, and with some that do.

    Args:
        llama: weights of a Llama.
        ernie: the same, beside the configuration of another family.
        repository: a directory that contains them in ``weights``.
        output_dir: of the training.
    """
    import paddleformers.transformers as transformers

    training_arguments(str(output_dir))

    def load(named: Path | str = llama, *more: Any, cls: str = "LlamaForCausalLM", **arguments: Any) -> str:
        if "config" in arguments:
            arguments["config"] = tiny.config("llama", **arguments["config"])
        try:
            made = getattr(transformers, cls).from_pretrained(str(named), *more, dtype="float32", **arguments)
        except FlexError as error:
            return f"{type(error).__name__}: {error}"
        return type(made).__name__

    other: dict[str, Any] = {"state_dict": {}, "ignore_mismatched_sizes": True, "variant": "fp16"}
    other |= {"key_mapping": {"a": "b"}, "use_safetensors": False, "load_checkpoint_format": ""}
    for name, value in other.items():
        line = load(**{name: value})
        assert line.startswith("OptionError: flex_checkpoint: true contradicts an argument of from_pretrained.")
        assert f"  - {name}" in line
    same = {"low_cpu_mem_usage": True, "convert_from_hf": False, "load_via_cpu": True, "use_safetensors": True}
    for given in (same, {"load_checkpoint_format": "flex_checkpoint", "ignore_mismatched_sizes": False}):
        assert load(**given) == "LlamaForCausalLM"
    assert load(repository, subfolder="weights") == "LlamaForCausalLM"
    heads = load(config={"num_attention_heads": 8, "num_key_value_heads": 4})
    assert heads.startswith("MismatchError: The open weights and the model do not fit: 2 differences.")
    assert "num_attention_heads: stored 4, expected 8" in heads
    assert "or correct the config.json next to them" in heads
    family = load(ernie, config={})
    assert family.startswith("MismatchError: The open weights and the model do not fit: 1 difference.")
    assert "model_type: stored ernie4_5, expected llama" in family
    positional = load(llama, 1)
    assert "does not support positional arguments of the model" in positional
    assert "- 1 argument after the path" in positional
    assert f"next: Name the directory, {llama}." in load(llama / "model.safetensors", config={})
    missing = load("no/model", config={})
    assert missing.startswith("NotACheckpoint: no/model is neither a directory nor a model on a hub")
    assert load(cls="LlamaModel").startswith("MappingError")
    for cls, model_type in (
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
    ):
        assert f"model_type: stored llama, expected {model_type}" in load(cls=cls)


def test_arguments_and_weights_that_do_not_fit_are_refused_with_the_reason(
    ranks: ForkServer, llama: Path, tmp_path: Path
) -> None:
    ernie = shutil.copytree(llama, tmp_path / "ernie")
    config = json.loads((ernie / "config.json").read_text())
    (ernie / "config.json").write_text(json.dumps({**config, "model_type": "ernie4_5"}))
    (ernie / CHECKSUMS_NAME).unlink()
    shutil.copytree(llama, tmp_path / "repository/weights")
    given = {"llama": llama, "ernie": ernie, "repository": tmp_path / "repository"}
    run_on_ranks(ranks, 1, refuse, output_dir=tmp_path / "out", **given)


def test_a_name_of_a_hub_is_found_where_paddleformers_finds_it(ranks: ForkServer, llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "weights")
    server = serve_as_hub(source)
    kwargs = {"source": str(source), "output_dir": str(tmp_path / "out"), "home": str(tmp_path / "home")}
    kwargs |= {"hub": f"http://127.0.0.1:{server.server_address[1]}", "cache": str(tmp_path / "cache")}
    found = ranks.run(f"{JOBS}:load_by_name", 1, kwargs).values[0]
    server.shutdown()
    assert found == {"home": True, "hub": True}


def test_the_options_of_the_run_decide_how_open_weights_are_read(
    ranks: ForkServer, llama: Path, tmp_path: Path
) -> None:
    size = (llama / "model.safetensors").stat().st_size
    kwargs = {"source": str(llama), "output_dir": str(tmp_path / "out"), "layout": tiny.DP2.to_json()}
    each, once = (sum(ranks.run(f"{JOBS}:bytes_read", 2, {**kwargs, "way": way}).values) for way in ("each", "once"))
    assert size * 0.8 < each - once < size * 1.2


def test_weights_in_paddleformers_own_format_are_converted_as_the_error_describes(
    ranks: ForkServer, llama: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(llama, tmp_path / "weights")
    kwargs = {"source": str(source), "directory": str(tmp_path / "own"), "converted": str(tmp_path / "converted")}
    found = ranks.run(f"{JOBS}:convert_from_pdparams", 1, {**kwargs, "output_dir": str(tmp_path / "out")}).values[0]
    assert "model_state.pdparams: PaddleFormers' own format" in found["message"]
    assert 'load_checkpoint_format="", convert_from_hf=False).save_pretrained(NEW_DIRECTORY)' in found["message"]
    assert found["equal"]

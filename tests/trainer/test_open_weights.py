"""Models that scripts come by in their ways, and what ``from_pretrained`` takes: filled by us, or refused."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddleformers_fc.errors import FlexError, MismatchError, OptionError
from paddleformers_fc.storage.export_checksums import CHECKSUMS_NAME
from tests.formats.test_quantized import write
from tests.harness import tiny
from tests.harness.on_ranks import on_ranks, run_on_ranks
from tests.harness.tiny import DP2, PP2, SD2V2, SINGLE, TP2, MatrixLayout
from tests.storage.serving import serving
from tests.trainer.jobs import weights_of as bits
from verification.forkserver import ForkServer


def export_initial(model_type: str, model: dict[str, Any], directory: Path) -> None:
    args = tiny.training_arguments(SINGLE, directory / "run")
    export_weights(tiny.build(model_type, SINGLE, args, **model), directory / "weights")


def weights_of(ranks: ForkServer, directory: Path, model_type: str, model: dict[str, Any]) -> Path:
    """The export of a tiny model with its initial weights."""
    run_on_ranks(ranks, 1, export_initial, model_type=model_type, model=model, directory=directory)
    return directory / "weights"


@pytest.fixture(scope="module")
def llama(ranks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a tiny Llama."""
    return weights_of(ranks, tmp_path_factory.mktemp("llama"), "llama", {})


# ---- Bodies that run on ranks.


def training_arguments(output_dir: Path, layout: MatrixLayout = SINGLE, **changed: Any) -> Any:
    from paddleformers_fc import FlexTrainingArguments

    settings = {"cls": FlexTrainingArguments, "flex_checkpoint": True, **changed}
    return tiny.training_arguments(layout, str(output_dir), **settings)


def configured(layout: MatrixLayout, args: Any, source: Path, **changed: Any) -> Any:
    """The configuration of a directory for a layout, as PaddleFormers' command line makes it."""
    from paddleformers.transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(source), dtype="float32")
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


def export_weights(model: Any, target: Path) -> None:
    """Export a live model, whose ranks all call this."""
    from paddleformers_fc.distributed.channel import job_channel
    from paddleformers_fc.execute.live_export import save_weights
    from paddleformers_fc.trainer import documents, live_roles
    from paddleformers_fc.trainer.description import describe_model

    channel = job_channel()
    files = {"config.json": documents.config_text(model).encode()} if channel.rank == 0 else {}
    weights = live_roles.model_roles(model)["model_state"]
    save_weights(weights, describe_model(model), files, target, 10**9, channel)


def load_and_export(
    layout: MatrixLayout, output_dir: Path, source: Path, model: dict[str, Any] | None = None
) -> list[str]:
    """``from_pretrained`` under a layout, and an export of what it made; what it logged as a warning on this rank."""
    from paddleformers.transformers import AutoModelForCausalLM, AutoModelForCausalLMPipe
    from paddleformers.utils.log import logger

    args = training_arguments(output_dir / "run", layout)
    kind = AutoModelForCausalLMPipe if layout.pp > 1 else AutoModelForCausalLM
    config = configured(layout, args, source, **(model or {}))
    with mock.patch.object(logger, "warning") as warning:
        built = kind.from_pretrained(str(source), config=config)
    export_weights(built, output_dir / f"again-{layout.name}")
    return [line for (line, *_), _ in warning.call_args_list if str(source) in line]


def fill_and_export(source: str, output_dir: Path, model: dict[str, Any]) -> None:
    import paddle

    from paddleformers_fc import load_open_weights

    args = tiny.training_arguments(TP2, str(output_dir / "run"))
    built = tiny.build("ernie4_5_moe", TP2, args, **model)
    with paddle.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
    report = load_open_weights(built, source)
    assert (list(report.fresh), list(report.dropped)) == ([], [])
    export_weights(built, output_dir / "again")


def from_pretrained(source: Path | str) -> Any:
    from paddleformers.transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(source), dtype="float32")


def fresh(source: Path) -> Any:
    from paddleformers.transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(source))
    config.fuse_rms_norm = False
    return AutoModelForCausalLM.from_config(config, dtype="float32")


# ---- Tests.


@pytest.mark.parametrize(
    ("model_type", "model"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("ernie4_5_moe", {})]
)
def test_from_pretrained_fills_every_layout_with_the_bits_of_the_files(
    ranks: ForkServer, tmp_path: Path, model_type: str, model: dict[str, Any]
) -> None:
    source = weights_of(ranks, tmp_path, model_type, model)
    original = load_file(source / "model.safetensors")
    for layout in (TP2, PP2, SD2V2):
        given: dict[str, Any] = {"layout": layout, "output_dir": tmp_path, "source": source}
        assert run_on_ranks(ranks, 2, load_and_export, **given) == ([], [])
        again = load_file(tmp_path / f"again-{layout.name}" / "model.safetensors")
        assert again.keys() == original.keys()
        assert all(array.tobytes() == original[name].tobytes() for name, array in again.items())
    if model_type == "ernie4_5_moe":  # What a later stage does not find in the files is reported too.
        found = run_on_ranks(ranks, 2, load_and_export, **{**given, "layout": PP2, "model": {"moe_use_aux_free": True}})
        bias = "model.layers.{1...3}.mlp.moe_statics.e_score_correction_bias"
        assert found == ([f"{bias} is not in {source} and keeps its initial values."], [])


def test_weights_behind_a_url_pass_through_a_model_unchanged_with_layers_that_predict_several_tokens(
    ranks: ForkServer, tmp_path: Path
) -> None:
    model = {"num_nextn_predict_layers": 1}
    source = weights_of(ranks, tmp_path, "ernie4_5_moe", model)
    with serving(tmp_path) as served:
        url = f"{served.url}/weights"
        run_on_ranks(ranks, 2, fill_and_export, source=url, output_dir=tmp_path, model=model)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


# Quantized weights: tests/formats/test_quantized.py.
@on_ranks(layout=SINGLE)
def test_mxfp4_weights_of_gpt_oss_fill_paddleformers_class_and_are_exported_plain(
    layout: MatrixLayout, tmp_path: Path
) -> None:
    wanted = write(tmp_path / "mxfp4", "gpt_oss")
    assert load_and_export(layout, tmp_path, tmp_path / "mxfp4") == []
    again = load_file(tmp_path / "again-single" / "model.safetensors")
    assert again.keys() == wanted.keys()
    assert all(np.array_equal(array, wanted[name]) for name, array in again.items())
    exported = json.loads((tmp_path / "again-single" / "config.json").read_text())
    assert (exported.get("quantization_config") or {}).get("quant_method") is None


@on_ranks(1)
def test_a_model_and_the_random_numbers_after_it_are_those_of_the_stock_loader(llama: Path, tmp_path: Path) -> None:
    import paddle

    source, found = shutil.copytree(llama, tmp_path / "weights"), []
    for is_ours in (False, True):
        if is_ours:
            training_arguments(tmp_path)
        paddle.seed(7)
        found.append((bits(from_pretrained(source)), paddle.rand([4]).tolist()))
    assert found[0] == found[1]
    assert bits(fresh(source)) != found[1][0]


def after_import(source: Path, output_dir: Path) -> Any:
    import paddleformers_fc

    _ = paddleformers_fc.FlexTrainer
    return from_pretrained(source)


def installed(source: Path, output_dir: Path) -> Any:
    from paddleformers_fc import install

    install()
    return from_pretrained(source)


def after_arguments(source: Path, output_dir: Path) -> Any:
    training_arguments(output_dir)
    return from_pretrained(source)


def filled_again(source: Path, output_dir: Path) -> Any:
    from paddleformers_fc import load_open_weights

    model = after_import(source, output_dir)
    load_open_weights(model, str(source))
    return model


def part_of_another(source: Path, output_dir: Path) -> Any:
    from paddleformers.transformers import LlamaForCausalLM

    inner = after_import(source, output_dir)

    class Wrapper(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.wrapped = inner

    return Wrapper(inner.config)


def fresh_with_values(source: Path, output_dir: Path) -> Any:
    """Values that a script assigns are its own."""
    import paddleformers_fc

    _ = paddleformers_fc.FlexTrainer
    model = fresh(source)
    for parameter in model.parameters():
        parameter.set_value(parameter * 0.5)
    return model


WAYS: dict[str, Callable[[Path, Path], Any]] = {
    "copied": lambda *places: copy.deepcopy(after_import(*places)),
    **{one.__name__: one for one in (after_import, installed, after_arguments)},
    **{one.__name__: one for one in (filled_again, part_of_another, fresh_with_values)},
}
"""How a script comes by its model."""


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        pytest.param("after_arguments", "", marks=pytest.mark.chosen),
        ("installed", ""),
        ("filled_again", ""),
        pytest.param("fresh_with_values", "", marks=pytest.mark.chosen),
        pytest.param("after_import", "the model", marks=pytest.mark.chosen),
        ("copied", "the model"),
        ("part_of_another", "wrapped"),
    ],
)
@on_ranks(1)
def test_a_model_is_trained_unless_paddleformers_loader_alone_has_filled_it(
    llama: Path, tmp_path: Path, way: str, refused: str
) -> None:
    from paddleformers_fc import FlexTrainer

    def times() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (source, *source.iterdir())}

    def train() -> list[float]:
        made = tiny.trainer(model, training_arguments(tmp_path / "out", max_steps=2), cls=FlexTrainer)
        made.train()
        return list(made.losses)

    source = shutil.copytree(llama, tmp_path / "weights")
    before = times()
    model = WAYS[way](source, tmp_path / "out")
    if refused:
        with pytest.raises(OptionError, match="load_open_weights") as caught:
            train()
        assert f"\n  - {refused}: LlamaForCausalLM.from_pretrained('{source}')\n" in str(caught.value)
        return
    assert len(train()) == 2
    assert times() == before or way == "filled_again"  # PaddleFormers loaded it first.


@on_ranks(layout=DP2)
def test_one_rank_that_was_filled_by_another_loader_stops_all(
    layout: MatrixLayout, llama: Path, tmp_path: Path
) -> None:
    import paddle.distributed as dist

    from paddleformers_fc import FlexTrainer
    from paddleformers_fc.trainer import weight_sources

    args = training_arguments(tmp_path, layout)
    model = fresh(llama)
    if dist.get_rank() == 1:
        weight_sources.note_unverified(model, "a loader")
    with pytest.raises(FlexError, match=r"where: model \(on rank 1\)"):
        tiny.trainer(model, args, cls=FlexTrainer)


@pytest.mark.parametrize(("is_changed", "is_read"), [(False, False), (True, False), (True, True)])
@on_ranks(1)
def test_a_reference_model_is_verified_or_the_model_or_refused(
    llama: Path, tmp_path: Path, is_changed: bool, is_read: bool
) -> None:
    from paddleformers_fc import FlexTrainer

    args = training_arguments(tmp_path, max_steps=1)
    model, reference = from_pretrained(llama), from_pretrained(llama) if is_read else fresh(llama)
    if not is_read:
        reference.set_state_dict(model.state_dict())
    if is_changed:
        norm = dict(reference.named_parameters())["model.norm.weight"]
        norm.set_value(norm + 1)
    trainer = tiny.trainer(model, args, cls=FlexTrainer)
    trainer.ref_model = reference
    if is_changed and not is_read:
        with pytest.raises(MismatchError, match=r"\n  - model\.norm\.weight: not equal to the model's\n"):
            trainer.train()
    else:
        trainer.train()
        assert trainer.state.global_step == 1


@on_ranks(1)
def test_arguments_and_weights_that_do_not_fit_are_refused_with_the_reason(llama: Path, tmp_path: Path) -> None:
    import paddleformers.transformers as transformers

    ernie = shutil.copytree(llama, tmp_path / "ernie")  # The same, beside the configuration of another family.
    config = json.loads((ernie / "config.json").read_text())
    (ernie / "config.json").write_text(json.dumps({**config, "model_type": "ernie4_5"}))
    (ernie / CHECKSUMS_NAME).unlink()
    shutil.copytree(llama, tmp_path / "repository/weights")
    training_arguments(tmp_path / "out")

    def load(named: Path | str = llama, *more: Any, cls: str = "LlamaForCausalLM", **arguments: Any) -> str:
        if "config" in arguments:
            arguments["config"] = tiny.config("llama", **arguments["config"])
        try:
            made = getattr(transformers, cls).from_pretrained(str(named), *more, dtype="float32", **arguments)
        except FlexError as error:
            return f"{type(error).__name__}: {error}"
        return type(made).__name__

    unsupported: dict[str, Any] = {"state_dict": {}, "ignore_mismatched_sizes": True, "variant": "fp16"}
    unsupported |= {"key_mapping": {"a": "b"}, "use_safetensors": False, "load_checkpoint_format": ""}
    line = load(**unsupported)
    assert line.startswith("OptionError: flex_checkpoint: true contradicts an argument of from_pretrained.")
    assert all(f"  - {name}" in line for name in unsupported)
    same = {"low_cpu_mem_usage": True, "convert_from_hf": False, "load_via_cpu": True, "use_safetensors": True}
    for given in (same, {"load_checkpoint_format": "flex_checkpoint", "ignore_mismatched_sizes": False}):
        assert load(**given) == "LlamaForCausalLM"
    assert load(tmp_path / "repository", subfolder="weights") == "LlamaForCausalLM"
    heads = load(config={"num_attention_heads": 8, "num_key_value_heads": 4})
    assert heads.startswith("MismatchError: The open weights and the model do not fit: 2 differences.")
    assert "or correct the config.json next to them" in heads
    for line, expected in (
        (heads, "num_attention_heads: stored 4, expected 8"),
        (load(ernie, config={}), "model_type: stored ernie4_5, expected llama"),
        (load(llama, 1), "does not support positional arguments of the model"),
        (load(llama, 1), "- 1 argument after the path"),
        (load(llama / "model.safetensors", config={}), f"next: Name the directory, {llama}."),
        (load("no/model", config={}), "NotACheckpoint: no/model is neither a directory nor a model on a hub"),
        (load(cls="LlamaModel"), "MappingError: "),
        (load(cls="Ernie4_5_MoeForCausalLM"), "model_type: stored llama, expected ernie4_5_moe"),
        (load(cls="Qwen2_5_VLForConditionalGeneration"), "model_type: stored llama, expected qwen2_5_vl"),
    ):
        assert expected in line


@on_ranks(1)
def test_a_name_is_found_where_paddleformers_finds_it(llama: Path, tmp_path: Path) -> None:
    """PaddleFormers looks in its home directory, and then on a hub."""
    expected = bits(from_pretrained(shutil.copytree(llama, tmp_path / "weights")))
    training_arguments(tmp_path / "out")
    (tmp_path / "home/owner").mkdir(parents=True)
    (tmp_path / "home/owner/model").symlink_to(tmp_path / "weights")
    os.environ["PF_HOME"] = str(tmp_path / "home")
    assert bits(from_pretrained("owner/model")) == expected


@on_ranks(1)
def test_the_options_of_the_run_decide_how_open_weights_are_read(llama: Path, tmp_path: Path) -> None:
    from paddleformers_fc.trainer import pretrained

    training_arguments(tmp_path / "out", flex_read="once", flex_threads=3, flex_verify="off")
    with mock.patch.object(pretrained, "prepare_weights", wraps=pretrained.prepare_weights) as prepared:
        from_pretrained(llama)
    *_, reading, level = prepared.call_args.args
    assert (reading.replicas, reading.threads, level) == ("once", 3, "off")


@on_ranks(1)
def test_weights_in_paddleformers_own_format_are_converted_as_the_error_describes(llama: Path, tmp_path: Path) -> None:
    import paddle
    from paddleformers.transformers import AutoModelForCausalLM

    model = from_pretrained(shutil.copytree(llama, tmp_path / "weights"))
    expected, own = bits(model), tmp_path / "own"
    own.mkdir()
    paddle.save(model.state_dict(), str(own / "model_state.pdparams"))
    model.config.save_pretrained(str(own))
    again = AutoModelForCausalLM.from_pretrained(str(own), load_checkpoint_format="", convert_from_hf=False)
    again.save_pretrained(str(tmp_path / "converted"))
    training_arguments(tmp_path / "out")
    with pytest.raises(FlexError) as refused:
        from_pretrained(own)
    text = str(refused.value)
    assert "model_state.pdparams: PaddleFormers' own format" in text
    assert 'load_checkpoint_format="", convert_from_hf=False).save_pretrained(NEW_DIRECTORY)' in text
    assert bits(from_pretrained(tmp_path / "converted")) == expected

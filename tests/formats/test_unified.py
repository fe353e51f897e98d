"""Unified checkpoints of the stock Trainer equal flex saves of the same run, and damaged ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, Diverged, FlexError, FormatError, MappingError
from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.families import ModelDescription, enumerate_tensors, family_for
from paddleformers_fc.formats.legacy.unified import UNIFIED
from paddleformers_fc.formats.registry import format_of, open_checkpoint
from paddleformers_fc.formats.stock_run import ARGUMENTS, removes_masters
from paddleformers_fc.layout.roles import MASTER, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from paddleformers_fc.storage.pickles import PickledObject, encode_pickle
from tests.formats.damage import Damage, assert_refused, edit_json, linked_outside, with_file, with_json, without
from tests.formats.runs import Runs
from tests.formats.test_rank_checkpoints import WAYS
from verification.matrix.tiny import keys

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What ``transpose_weight_keys`` of both tiny models contains, of the layers that they have."""

ERNIE = "ernie4_5_moe"

Arrays = dict[str, np.ndarray[Any, Any]]

WEIGHTS_AND_MASTERS = (("", MODEL_STATE), (MASTER.suffix, MASTER_WEIGHT))

POWERS = {"beta1_pow_acc_0": 0.729, "beta2_pow_acc_0": 0.997}


def write_kind(directory: Path, kind: str, files: list[Arrays], form: str) -> None:
    """Write the files of one kind, and the index that lists the last file of every name."""
    count = len(files)
    listed: dict[str, str] = {}
    for number, arrays in enumerate(files, 1):
        name = f"{kind}-{number:05d}-of-{count:05d}.safetensors"
        save_file({key: np.ascontiguousarray(one) for key, one in arrays.items()}, directory / name, {"format": form})
        listed |= dict.fromkeys(arrays, name)
    (directory / f"{kind}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def tensors_of(config: Mapping[str, Any]) -> Arrays:
    """The tensors of a model under its own names, each with numbers of its own."""
    declared = enumerate_tensors(family_for(config), ModelDescription(config, is_fleet=False))
    return {
        one.name: np.arange(np.prod(one.shape), dtype=np.float32).reshape(one.shape) + 1000 * place
        for place, one in enumerate(declared)
    }


def transposed(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.T if values.ndim == 2 and name.split(".")[-2] in LINEAR else values


def written(directory: Path, config: Mapping[str, Any], split: Callable[[str], list[tuple[int, str]]]) -> Arrays:
    """Write a checkpoint in bfloat16 on two ranks.

    PaddleFormers 1.2.0 raises NotImplementedError when tensor-parallel ranks save in this format, so their layout is
    written here. Expert-parallel ranks do save, with experts under their numbers in the model (see the tests of real
    runs); files of experts that each rank counts from 0 are written here alone.

    Args:
        directory: where.
        config: of the model.
        split: the ranks that have a tensor, and its name there.
    Returns:
        the tensors of the model.
    """
    tensors = tensors_of(config)
    weights: list[Arrays] = [{}, {}]
    states: list[Arrays] = [{}, {}]
    masters: list[Arrays] = [{}, {}]
    for name, values in tensors.items():
        for rank, own in split(name):
            weights[rank][own] = transposed(name, values).astype(ml_dtypes.bfloat16)
            masters[rank][own] = values
            states[rank][f"{own}/moment1_0"] = -values
            states[rank] |= {f"{own}/{power}": np.array([number], np.float32) for power, number in POWERS.items()}
    write_kind(directory, "model", weights, "pt")
    write_kind(directory, "optimizer", states, "np")
    write_kind(directory, "master_weights", masters, "np")
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return tensors


def changed(directory: Path, name: str, change: Callable[[Arrays], object]) -> None:
    """Change the arrays of a file."""
    arrays = load_file(directory / name)
    change(arrays)
    save_file(arrays, directory / name, {"format": "pt" if name.startswith("model") else "np"})


FIRST, SECOND = (f"optimizer-0000{number}-of-00002.safetensors" for number in (1, 2))


def of_tensor_parallel_ranks(name: str) -> list[tuple[int, str]]:
    """Merged tensors, each in the file of one of two tensor-parallel ranks."""
    return [(len(name) % 2, name)]


def of_expert_parallel_ranks(name: str) -> list[tuple[int, str]]:
    """Two experts on each of two ranks, which count them from 0; all else in the first file."""
    head, mark, rest = name.partition(".experts.")
    if not mark:
        return [(0, name)]
    number, _, tail = rest.partition(".")
    return [(int(number) // 2, f"{head}.experts.{int(number) % 2}.{tail}")]


@pytest.mark.parametrize(
    ("model_type", "more", "split"),
    [
        ("llama", {}, of_tensor_parallel_ranks),
        ("llama", {"fuse_attention_qkv": True, "fuse_attention_ffn": True}, of_tensor_parallel_ranks),
        (ERNIE, {"num_nextn_predict_layers": 1}, of_tensor_parallel_ranks),
        (ERNIE, {}, of_expert_parallel_ranks),
    ],
)
def test_merged_tensors_and_experts_counted_on_each_rank_are_read_in_every_role(
    model_type: str, more: Mapping[str, Any], split: Callable[[str], list[tuple[int, str]]], tmp_path: Path
) -> None:
    config = keys(model_type, **more)
    tensors = written(tmp_path, config, split)
    opened = open_checkpoint(tmp_path)
    assert opened.format is UNIFIED
    stored = opened.catalog.roles
    assert stored[MODEL_STATE].keys() == tensors.keys()
    assert stored[MASTER_WEIGHT].keys() == {f"{name}.w_0" for name in tensors}
    found = paddleformers_fc.open(tmp_path)
    sources = opened.rules.mapping().made
    for name, values in tensors.items():
        made = sources[name]
        if len(made.names) > 1:
            continue  # The parts of fused layers: the whole comparison is that of real runs.
        (canonical,) = made.names
        turned = values.T if made.template.links[0].axes == (1, 0) else values
        assert np.array_equal(found.read(canonical, role=MODEL_STATE), turned.astype(ml_dtypes.bfloat16)), name
        assert np.array_equal(found.read(f"{canonical}.w_0", role=MASTER_WEIGHT), turned), name
        assert np.array_equal(found.read(f"{canonical}.moment1_0", role=OPTIMIZER_STATE), -turned), name
    outcome, problem = verify_checkpoint(tmp_path, "full")
    assert outcome.passed, problem
    assert [one.name for one in outcome.checks] == list(UNIFIED.checks)


def test_a_check_that_fails_or_that_cannot_be_made_is_listed_once(tmp_path: Path) -> None:
    config = keys("llama")
    written(tmp_path, config, of_tensor_parallel_ranks)
    path = tmp_path / "config.json"
    edit_json(path, num_hidden_layers=config["num_hidden_layers"] + 1)
    incomplete, _ = verify_checkpoint(tmp_path, "size")
    assert [(one.name, one.passed) for one in incomplete.checks] == [("tensors", True), ("model", False)]
    path.unlink()
    unknown, _ = verify_checkpoint(tmp_path, "size")
    assert unknown.not_checked == ["model", "equal values"]
    assert [line.partition(":")[0] for line in unknown.cannot_be_checked] == ["changed bytes", "missing layers"]


def test_a_given_configuration_gives_the_number_of_experts_where_the_directory_has_none(tmp_path: Path) -> None:
    tensors = written(tmp_path, keys(ERNIE), of_expert_parallel_ranks)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    with pytest.raises(Corrupt, match="not contain all"):
        open_checkpoint(tmp_path)
    opened = open_checkpoint(tmp_path, config=config)
    assert opened.catalog.roles[MODEL_STATE].keys() == tensors.keys()
    assert opened.config == config
    assert opened.rules.targets.keys() == tensors.keys()


def test_a_configuration_that_a_conversion_gives_shows_master_weights_in_files_of_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "unified", tmp_path / "flex"
    source.mkdir()
    written(source, keys("llama"), of_tensor_parallel_ranks)
    with_masters_as_weights(source)
    (source / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(FormatError, match="contain master weights"):
        paddleformers_fc.open(source).convert(target, config=tmp_path, verify="off")
    assert not target.exists()


@pytest.mark.parametrize(("power", "number"), [("beta1_pow_acc_0", np.nan), ("beta2_pow_acc_0", 1.001)])
def test_a_number_that_is_no_power_of_a_beta_is_refused_by_name_with_the_states_and_not_with_the_weights(
    power: str, number: float, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    written(source, keys("llama"), of_tensor_parallel_ranks)
    changed(source, FIRST, lambda arrays: arrays.update({f"lm_head.weight/{power}": np.array([number], np.float32)}))
    opened = paddleformers_fc.open(source)
    outcome, problem = verify_checkpoint(source, "size")
    assert [one.name for one in outcome.checks if not one.passed] == ["tensors"]
    with pytest.raises(Corrupt) as converted:
        opened.convert(tmp_path / "flex")
    assert not (tmp_path / "flex").exists()
    for refused in (problem, converted.value):
        assert isinstance(refused, Corrupt)
        assert refused.what.endswith("powers of Adam's betas outside of 0 to 1: 1 number.")
        assert list(refused.evidence) == [f"lm_head.weight.{power}: {number:g}"]
        assert refused.next_step
    opened.export(tmp_path / "hf")


@pytest.mark.parametrize(
    ("model_type", "without", "power"), [(ERNIE, ".experts.1.", 0.9), ("llama", "lm_head.", 1.0), ("llama", "", 0.0)]
)
def test_parameters_may_have_made_fewer_steps_than_others_and_powers_may_underflow(
    model_type: str, without: str, power: float, tmp_path: Path
) -> None:
    """As those of an expert without a token in a step, or of a block that is not trained."""
    written(tmp_path, keys(model_type, num_nextn_predict_layers=1), of_tensor_parallel_ranks)
    names = {file: [name for name in load_file(tmp_path / file) if without in name] for file in (FIRST, SECOND)}
    for file, own in names.items():
        fewer = {name: np.array([power], np.float32) for name in own if name.rpartition("/")[2] in POWERS}
        changed(tmp_path, file, lambda arrays, fewer=fewer: arrays.update(fewer))
    assert any(names.values())
    outcome, problem = verify_checkpoint(tmp_path, "size")
    assert outcome.passed, problem


def test_a_square_layer_is_oriented_as_layers_of_its_name_or_refused(tmp_path: Path) -> None:
    config = keys("llama", fuse_attention_ffn=True, intermediate_size=32)
    written(tmp_path, config, of_tensor_parallel_ranks)
    for path in tmp_path.glob("master_weights*"):
        path.unlink()
    unknown = "gate_up_fused_proj.weight: nothing shows the orientation"
    assert_refused(lambda: open_checkpoint(tmp_path), FormatError, "orientation of 4 weights", unknown)


@pytest.mark.parametrize(
    ("leaf", "transposes", "split"),
    [("lm_head", False, False), ("lm_head", True, True), ("gate_up_fused_proj", True, False)],
)
def test_a_square_weight_has_the_orientation_of_its_master_weight(
    leaf: str, transposes: bool, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As writers of other families transpose it; also where the states are ranges of elements."""
    monkeypatch.setattr("tests.formats.test_unified.LINEAR", (*LINEAR, *([leaf] if transposes else [])))
    size = {"vocab_size": 64} if leaf == "lm_head" else {"fuse_attention_ffn": True, "intermediate_size": 32}
    tensors = written(tmp_path, keys("llama", **size), of_tensor_parallel_ranks)
    name = next(one for one in tensors if leaf in one)
    assert tensors[name].shape == (64, 64)
    if split:
        ranges = tensors[name].reshape(-1)[:1000], tensors[name].reshape(-1)[1000:]
        for number, part in enumerate(ranges, 1):
            file = f"master_weights-0000{number}-of-00002.safetensors"
            changed(tmp_path, file, lambda arrays, part=part: arrays.update({name: part}))
    opened = open_checkpoint(tmp_path)
    assert opened.catalog.roles[MODEL_STATE][name].form.turned is transposes
    stored = paddleformers_fc.open(tmp_path)
    if leaf == "lm_head":
        assert np.array_equal(stored.read(name, role=MODEL_STATE), tensors[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("tied", [True, False])
def test_a_square_head_in_float32_has_the_orientation_of_its_embedding_or_is_refused(
    tied: bool, tmp_path: Path
) -> None:
    config = keys("llama", vocab_size=64, tie_word_embeddings=tied)
    written(tmp_path, config, of_tensor_parallel_ranks)
    for path in tmp_path.glob("master_weights*"):
        path.unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = tensors_of(config)["model.embed_tokens.weight"]

    def of_float32(arrays: Arrays) -> None:
        arrays.update({name: one.astype(np.float32) for name, one in arrays.items()})
        arrays.update({name: embedding for name in arrays if name.endswith(("lm_head.weight", "embed_tokens.weight"))})

    for number in (1, 2):
        changed(tmp_path, f"model-0000{number}-of-00002.safetensors", of_float32)
    if tied:
        found = paddleformers_fc.open(tmp_path)
        assert np.array_equal(found.read("model.embed_tokens.weight", role=MODEL_STATE), embedding)
        return
    unknown = "lm_head.weight: nothing shows the orientation of the square"
    assert_refused(lambda: open_checkpoint(tmp_path), FormatError, "orientation of 1 weight", unknown)


def test_copies_of_a_tied_embedding_that_differ_are_found_by_verification(tmp_path: Path) -> None:
    written(tmp_path, keys("llama", tie_word_embeddings=True), of_tensor_parallel_ranks)
    outcome, problem = verify_checkpoint(tmp_path, "full")
    assert [one.name for one in outcome.checks if not one.passed] == ["equal values"]
    assert isinstance(problem, Diverged)
    assert any("lm_head.weight = model.embed_tokens.weight" in line for line in problem.evidence), problem.evidence
    assert verify_checkpoint(tmp_path, "size")[0].not_checked == ["equal values"]
    files = list(tmp_path.glob("*.safetensors"))
    arrays = {(path.name[:5], name): one for path in files for name, one in load_file(path).items()}
    for path in files:
        head = [name for name in load_file(path) if name.startswith("lm_head.")]
        copies = {name: arrays[path.name[:5], name.replace("lm_head", "model.embed_tokens")] for name in head}
        changed(tmp_path, path.name, lambda arrays, copies=copies: arrays.update(copies))
    outcome, problem = verify_checkpoint(tmp_path, "full")
    assert outcome.passed, problem
    assert outcome.checks[-1].detail == "5 pairs compared, 38 weights compared with master weights"


# ---- The Trainer's. Other runs are in the tests of files of ranks.

REMOVED = {**WAYS["unified"], "unified_checkpoint_config": "remove_master_weight"}


def test_master_weights_that_are_not_stored_are_those_of_the_weights(runs: Runs) -> None:
    stock = runs("sd2v1", REMOVED, True)
    found = compare_checkpoints(open_checkpoint(stock), open_checkpoint(runs("sd2v1", None, True)))
    assert found.roles[MODEL_STATE].equal
    assert found.roles[OPTIMIZER_STATE].equal
    read = paddleformers_fc.open(stock)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        weight, master = (read.read(f"{name}{suffix}", role=role) for suffix, role in WEIGHTS_AND_MASTERS)
        assert np.array_equal(master, weight.astype(np.float32))


# ---- What is refused.


def rewritten(name: str, change: Callable[[Arrays], object]) -> Damage:
    """Change the arrays of a file."""
    return lambda directory: changed(directory, name, change)


def older(arrays: Arrays) -> None:
    arrays.update({name: one / 0.9 for name, one in arrays.items() if name.endswith("pow_acc_0")})


def of_two_numberings(directory: Path) -> None:
    (directory / SECOND).rename(directory / "optimizer-00002-of-00003.safetensors")
    index = directory / "optimizer.safetensors.index.json"
    index.write_text(index.read_text().replace(SECOND, FIRST))


def with_masters_as_weights(directory: Path) -> None:
    for path in directory.glob("master_weights*"):
        path.unlink()
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        changed(directory, name, lambda arrays: arrays.update({k: v.astype(np.float32) for k, v in arrays.items()}))


def of_a_rank_without_experts(directory: Path) -> None:
    for kind in ("model", "optimizer", "master_weights"):
        (directory / f"{kind}-00002-of-00002.safetensors").unlink()
        index = directory / f"{kind}.safetensors.index.json"
        index.write_text(index.read_text().replace("00002-of", "00001-of"))


MOMENT, QUANTIZED = "lm_head.weight/moment1_0", np.zeros((128, 64), np.int8)
INDEX = "optimizer.safetensors.index.json"
UNMERGED, PICKLE = "optimizer.tp00_pp00.safetensors", "optimizer.tp00.pdopt"
LACKS = "lacks tensors of the model"
DAMAGES: dict[str, tuple[Damage, type[FlexError], str, str]] = {
    "without a file": (without(SECOND), Corrupt, "1 file of the index cannot be found", SECOND),
    "without an index": (without(INDEX), Corrupt, f"has no {INDEX}", FIRST),
    "without a tensor": (rewritten(FIRST, lambda one: one.pop(MOMENT)), Corrupt, "Files lack 1 tensor", MOMENT),
    "of two steps": (rewritten(SECOND, older), Corrupt, "files of different steps", "beta1_pow_acc_0 is 0.81"),
    "of two numberings": (of_two_numberings, FormatError, "files of two checkpoints", "optimizer-00002-of-00003"),
    "unmerged": (with_file(UNMERGED), FormatError, "unmerged files", UNMERGED),
    "with a pickle": (with_file(PICKLE), FormatError, "files of two checkpoints", PICKLE),
    "without layers": (with_json("config.json", num_hidden_layers=6), Corrupt, LACKS, "model.layers.{4...5}.input_lay"),
    "with a link outside": (linked_outside(SECOND), FormatError, "links that lead out of the checkpoint", SECOND),
    "quantized": (
        rewritten(FIRST, lambda one: one.update({MOMENT: QUANTIZED})),
        Corrupt,
        "not contain all",
        "quantised states cannot be read",
    ),
    "with masters as weights": (with_masters_as_weights, FormatError, "contain master weights", "bfloat16"),
    "without experts of a rank": (of_a_rank_without_experts, Corrupt, LACKS, "experts.{2...3}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_or_mixed_checkpoint_is_rejected_with_evidence_and_a_next_step(
    damage: str, tmp_path: Path
) -> None:
    change, kind, message, evidence = DAMAGES[damage]
    if change is of_a_rank_without_experts:
        written(tmp_path, keys(ERNIE), of_expert_parallel_ranks)
    else:
        written(tmp_path, keys("llama"), of_tensor_parallel_ranks)
    change(tmp_path)
    assert format_of(tmp_path) is UNIFIED
    assert_refused(lambda: open_checkpoint(tmp_path).rules, kind, message, evidence)


def test_a_prediction_block_of_which_one_ranks_part_remains_is_refused(tmp_path: Path) -> None:
    """As mappings without these blocks leave it: every rank stores its own part under one name, and one remains."""
    written(tmp_path, keys(ERNIE, num_nextn_predict_layers=1), of_tensor_parallel_ranks)
    name = "model.mtp_block.0.self_attn.o_proj.weight"

    def cut(arrays: Arrays) -> None:
        for key in [key for key in arrays if key.startswith(name) and arrays[key].ndim == 2]:
            half = arrays[key][:, :32] if arrays[key].dtype == ml_dtypes.bfloat16 else arrays[key][:32]
            arrays[key] = np.ascontiguousarray(half)

    for kind in ("model", "optimizer", "master_weights"):
        for number in (1, 2):
            changed(tmp_path, f"{kind}-0000{number}-of-00002.safetensors", cut)
    evidence = name, "ranks have shards that are not described as shards"
    assert_refused(lambda: open_checkpoint(tmp_path).rules, MappingError, "cannot be mapped", *evidence)


@pytest.mark.parametrize(
    ("stated", "expected"), [(["remove_master_weight"], True), ("remove_master_weight", True), ([], False), (5, False)]
)
def test_training_arguments_of_any_type_state_whether_master_weights_are_removed(
    stated: object, expected: bool, tmp_path: Path
) -> None:
    content = PickledObject("a_module", "TrainingArguments", {"unified_checkpoint_config": stated})
    (tmp_path / ARGUMENTS).write_bytes(encode_pickle(content))
    assert removes_masters(tmp_path) is expected

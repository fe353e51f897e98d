"""Checkpoints of files of ranks: every strategy of the stock Trainer equals a flex save of the same run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddleformers_fc
from paddleformers_fc.errors import Corrupt, Diverged, FlexError, FormatError, MappingError, NotACheckpoint
from paddleformers_fc.execute.diff_checkpoints import compare_checkpoints
from paddleformers_fc.execute.digest import TensorDigest
from paddleformers_fc.execute.export import export_checkpoint
from paddleformers_fc.execute.output_directory import inspect_directory
from paddleformers_fc.execute.verify import verify_checkpoint
from paddleformers_fc.families import ModelDescription, enumerate_tensors, family_for
from paddleformers_fc.families.description import IS_NLP
from paddleformers_fc.formats.legacy.rank_files import find_rank_files, read_rank_file
from paddleformers_fc.formats.legacy.unified import UNIFIED
from paddleformers_fc.formats.registry import format_of, open_checkpoint
from paddleformers_fc.layout.roles import EMA_STATE, MASTER_WEIGHT, MODEL_STATE, OPTIMIZER_STATE
from tests.cli.support import run
from tests.formats.damage import (
    Damage,
    assert_refused,
    contents,
    copied,
    edit_json,
    linked_outside,
    renamed,
    replaced,
    with_file,
    with_json,
    without,
)
from tests.formats.jobs import train_with_average
from tests.formats.runs import Runs
from tests.harness.on_ranks import run_on_ranks
from verification.digests import canonical_digests
from verification.forkserver import ForkServer
from verification.matrix.layouts import parse_layout
from verification.matrix.tiny import keys

ERNIE = {"model_type": "ernie4_5_moe"}
TIED = {"tie_word_embeddings": True}
STOCK = {"save_checkpoint_format": "", "load_checkpoint_format": "", "save_to_hf": False}
SHARDED = {**STOCK, "save_sharded_model": True}
UNIFIED_FORMAT = {"save_checkpoint_format": "unified_checkpoint", "load_checkpoint_format": "unified_checkpoint"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "stock": STOCK,
    "sharded": SHARDED,
    # Weights in the names and orientation of open weights, beside states of which nothing names the parameters.
    "canonical": {**STOCK, "save_to_hf": True},
    # Safetensors of all ranks, with an index of each kind.
    "unified": UNIFIED_FORMAT,
    "unified, own orientation": {**UNIFIED_FORMAT, "save_to_hf": False},
    # Paddle's own FlexCheckpoint.
    "paddle": {},
}
FORMATS = {"sharded": "sharding_io", "stock": "legacy_hybrid", "canonical": "legacy_hybrid", "paddle": "paddle"}


# Chosen: cuts of tensors, each role and each way. The fixture ``pair`` cuts along two axes.
@pytest.mark.parametrize(
    ("layout", "dtype", "way", "model"),
    [
        ("sd2+tp2+pp2", "bfloat16", "sharded", {}),
        ("dp2", "float32", "stock", {"use_bias": True, **ERNIE}),
        ("sd2s3", "float32", "canonical", {}),
        ("pp4vpp2+tp2", "float32", "stock", {"num_hidden_layers": 8}),
        ("tp2+pp2+sd2v2", "float32", "stock", {}),
        pytest.param("sd2s3", "bfloat16", "stock", {}, marks=pytest.mark.chosen),
        pytest.param("sd2(ep2)", "bfloat16", "sharded", ERNIE, marks=pytest.mark.chosen),
        ("pp2+sd2(ep2)", "float32", "stock", ERNIE),
        ("sd2+tp2(ep2)", "bfloat16", "sharded", ERNIE),
        ("pp2", "float32", "canonical", TIED),
        pytest.param("tp2", "float32", "stock", {"model_type": "qwen2_5_vl"}, marks=pytest.mark.chosen),
        ("dp2", "float32", "canonical", {"attention_bias": True}),
        ("tp2", "float32", "canonical", {"fuse_attention_qkv": True, "fuse_attention_ffn": True}),
        pytest.param("tp2", "bfloat16", "canonical", {}, marks=pytest.mark.chosen),
        pytest.param("sd2v2", "bfloat16", "unified", {}, marks=pytest.mark.chosen),
        ("pp2", "float32", "unified", TIED),
        ("dp2", "bfloat16", "unified, own orientation", {}),
        ("sd2(ep2)", "float32", "unified", ERNIE),
        ("dp2", "float32", "unified", {**ERNIE, "use_bias": True}),
        ("sd2(ep2)", "float32", "unified", {"model_type": "qwen3_moe"}),
        ("tp2", "float32", "paddle", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_every_strategy_holds_in_every_role_what_a_flex_save_of_the_same_run_holds(
    layout: str, dtype: str, way: str, model: Mapping[str, Any], runs: Runs
) -> None:
    bf16 = dtype == "bfloat16"
    stock = runs(layout, WAYS[way], bf16, model)
    before = contents(stock)
    theirs = open_checkpoint(stock)
    found = compare_checkpoints(theirs, open_checkpoint(runs(layout, None, bf16, model)))
    assert found.equal, found
    assert theirs.format.name == FORMATS.get(way, UNIFIED.name)
    assert theirs.format.loadable
    assert list(found.roles) == [MODEL_STATE, *([MASTER_WEIGHT] if bf16 else []), OPTIMIZER_STATE]
    assert contents(stock) == before


FROZEN = ("model.embed_tokens.", "model.layers.0.")
WITH_FROZEN = {**SHARDED, "save_sharding_stage1_model_include_freeze_params": True}


@pytest.mark.parametrize(("layout", "options", "bf16"), [("sd2v2", STOCK, True), ("sd2v1", WITH_FROZEN, False)])
def test_parameters_that_are_not_trained_need_no_states(
    layout: str, options: Mapping[str, Any], bf16: bool, runs: Runs
) -> None:
    stock = runs(layout, options, bf16, frozen=FROZEN)
    outcome, problem = verify_checkpoint(stock, "full")
    assert outcome.passed, problem
    ours = open_checkpoint(runs(layout, None, bf16, frozen=FROZEN))
    found = compare_checkpoints(open_checkpoint(stock), ours)
    assert found.equal, found
    assert not any(name.startswith(FROZEN) for name in ours.catalog.roles[OPTIMIZER_STATE])


def test_states_that_are_missing_without_evidence_that_all_files_are_there_are_refused(
    runs: Runs, tmp_path: Path
) -> None:
    legacy = copied(runs("sd2v2", STOCK, frozen=FROZEN), tmp_path / "checkpoint-2")
    (legacy / "training_args.bin").unlink()
    sharded = runs("sd2v2", SHARDED, frozen=FROZEN)
    name = "model.embed_tokens.weight"
    for directory, evidence in (
        (legacy, [f"{name}: no optimizer state is stored", "does not have sharding_parallel_size 2"]),
        (sharded, [f"{name}: neither the weight nor its master", "with save_sharding_stage1_model_include_freeze"]),
    ):
        all_tensors = "does not contain all tensors exactly once"
        assert_refused(lambda one=directory: open_checkpoint(one), Corrupt, all_tensors, *evidence)


@pytest.mark.parametrize(
    ("kind", "layout", "options", "model"),
    [
        ("sharding_io", "sd2v2", SHARDED, TIED),
        ("sharding_io", "tp2+sd2v1", SHARDED, {}),
        ("paddle", "tp2+sd2v2", {}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "tied" if "tie_word_embeddings" in value else "",
)
def test_upstreams_moving_averages_are_a_role(
    kind: str, layout: str, options: Mapping[str, Any], model: Mapping[str, Any], ranks: ForkServer, tmp_path: Path
) -> None:
    used = replace(parse_layout(layout), bf16=True)
    average = {"zcc_save_ema_coef": 0.5, "zcc_ema_interval": 1, "save_steps": 1, "max_steps": 2}
    given = {"layout": used, "output_dir": tmp_path, "arguments": {**options, **average}, "model": model}
    assert run_on_ranks(ranks, used.nproc, train_with_average, **given)[0]["step"] == 2
    config = json.dumps({**keys("llama"), **model}).encode()
    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}" / "config.json").write_bytes(config)  # Paddle's FlexCheckpoint has none.
    first, second = (paddleformers_fc.open(tmp_path / f"checkpoint-{step}") for step in (1, 2))
    names = [one.name for one in second.tensors() if one.role == EMA_STATE]
    opened = open_checkpoint(tmp_path / "checkpoint-2")
    assert opened.format.name == kind
    # The Trainer of an average adds an attribute to its state, which is not a field of it.
    assert "loss" not in json.loads(opened.document("trainer/state.json"))
    assert len(names) == 39 - len(model)
    for name in names:
        before, after = (one.read(f"{name}.w_0", role=MASTER_WEIGHT) for one in (first, second))
        assert np.array_equal(first.read(name, role=EMA_STATE), before)
        assert np.array_equal(second.read(name, role=EMA_STATE), np.float32(0.5) * before + np.float32(0.5) * after)
    document = {"step": 2, "decay": 0.5, "interval": 1}
    assert json.loads(opened.document("trainer/ema.json")) == document
    assert run("plan", tmp_path / "checkpoint-2", "--to", "tp=2").code == 0


def test_names_of_paddlenlps_classes_are_read(tmp_path: Path) -> None:
    # PaddleNLP does not run beside PaddleFormers: the test writes what paddle.save writes for one of its models.
    config = keys("llama", num_hidden_layers=2)
    model = ModelDescription({**config, IS_NLP: True})
    stored = {
        one.name: np.arange(np.prod(one.shape), dtype=np.float32).reshape(one.shape) + place
        for place, one in enumerate(enumerate_tensors(family_for(config), model))
    }
    table = {name: f"parameter_{place}.w_0" for place, name in enumerate(stored)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_state.pdparams").write_bytes(
        pickle.dumps({**stored, "StructuredToParameterName@@": table}, protocol=4)
    )
    states = {f"{table[name]}_moment1_0": (f"{table[name]}_moment1_0", -values) for name, values in stored.items()}
    (tmp_path / "optimizer.pdopt").write_bytes(pickle.dumps(states, protocol=4))
    opened = paddleformers_fc.open(tmp_path)
    for canonical, name in (
        ("model.layers.1.self_attn.k_proj.weight", "llama.layers.1.self_attn.k_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert np.array_equal(opened.read(canonical, role=MODEL_STATE), stored[name].T)
        assert np.array_equal(opened.read(f"{canonical}.moment1_0"), -stored[name].T)


# ---- What is made of one.


@pytest.fixture
def pair(runs: Runs) -> tuple[Path, Path]:
    """A run on two tensor-parallel ranks with two sharding ranks each: of sharding_io without weights, and of ours."""
    return runs("tp2+sd2v2", SHARDED, bf16=True), runs("tp2+sd2v2", None, bf16=True)


def test_weights_without_files_are_those_of_their_master_weights(pair: tuple[Path, Path], tmp_path: Path) -> None:
    theirs, ours = pair
    written = [export_checkpoint(source, tmp_path / source.parent.name, 10**9) for source in pair]
    assert written[0].digests() == written[1].digests()
    opened, other = paddleformers_fc.open(theirs), paddleformers_fc.open(ours)
    name = "model.layers.1.self_attn.q_proj.weight"
    box = (slice(3, 50), slice(10, 30))
    assert opened.read(name, box, MODEL_STATE).tobytes() == other.read(name, box, MODEL_STATE).tobytes()
    moment = f"{name}.moment1_0"
    assert opened.read(moment, box).tobytes() == other.read(moment, box).tobytes()
    seen = inspect_directory(theirs, "*q_proj*")
    assert (seen.kind, seen.roles[MODEL_STATE].files) == ("sharding_io", 4)
    assert run("verify", theirs).code == 0
    assert run("plan", theirs, "--to", "tp=2,pp=2").code == 0


def digests(directory: Path, roles: tuple[str, ...]) -> list[TensorDigest]:
    return list(canonical_digests(directory, roles=roles))


ALL_ROLES = (MODEL_STATE, MASTER_WEIGHT, OPTIMIZER_STATE)


@pytest.mark.parametrize(
    ("layout", "way", "bf16", "model"),
    [
        ("tp2+sd2v2", "sharded", True, {}),
        ("pp2", "canonical", False, {}),
        ("sd2+tp2(ep2)", "stock", True, ERNIE),
        pytest.param("sd2v2", "unified", True, {}, marks=pytest.mark.chosen),
        ("sd2(ep2)", "unified", True, ERNIE),
        ("tp2", "paddle", False, {}),
    ],
)
def test_conversions_there_and_back_keep_the_bytes_of_every_tensor(
    layout: str, way: str, bf16: bool, model: Mapping[str, Any], runs: Runs, tmp_path: Path
) -> None:
    source = runs(layout, WAYS[way], bf16, model)
    before = contents(source)
    for target, roles in (("flex", ALL_ROLES), ("distcp", ALL_ROLES), ("hf", (MODEL_STATE,))):
        there, back = (tmp_path / name / source.name for name in (target, f"{target}-back"))
        for one, other, format_ in ((source, there, target), (there, back, "flex")):
            outcome = run("convert", one, other, "--format", format_)
            assert outcome.code == 0, outcome.err
        expected = digests(source, roles)
        assert any(one.role == MODEL_STATE for one in expected)
        assert digests(there, roles) == digests(back, roles) == expected
    assert contents(source) == before


def test_a_copy_of_another_step_and_missing_layers_are_found_by_verification(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    directory = copied(pair[0], tmp_path / "checkpoint-2")
    edit_json(directory / "config.json", num_hidden_layers=6)
    name = "optimizer.tp01_shard00.pdopt"
    array = read_rank_file(directory, name).arrays["create_parameter_0.w_0_fp32_master_0_moment1_0"]
    data = bytearray((directory / name).read_bytes())
    data[array.begin] ^= 1
    (directory / name).unlink()
    (directory / name).write_bytes(data)
    outcome, problem = verify_checkpoint(directory, "full")
    assert {one.name: one.passed for one in outcome.checks} == {"tensors": True, "model": False, "replicas": False}
    assert problem is not None
    assert any("input_layernorm.weight.moment1_0: optimizer.tp00" in line for line in problem.evidence), (
        problem.evidence
    )
    assert any("model.layers.{4...5}" in line for line in problem.evidence)


def test_different_copies_are_refused_unless_one_is_chosen(runs: Runs, tmp_path: Path) -> None:
    """PaddleFormers trains the norms of Qwen 3 apart on tensor-parallel ranks."""
    stock = runs("tp2", STOCK, model={"model_type": "qwen3"})
    outcome, problem = verify_checkpoint(stock, "full")
    assert [one.name for one in outcome.checks if not one.passed] == ["replicas"]
    assert isinstance(problem, Diverged)
    assert any("q_norm.weight: model" in line for line in problem.evidence), problem.evidence
    for refused in (run("convert", stock, tmp_path / "flex/checkpoint-2"), run("export", stock, tmp_path / "hf")):
        assert refused.code == 1
        assert problem.what in refused.err
    assert not (tmp_path / "flex").exists()

    name = "model.layers.2.self_attn.q_norm.weight"
    for tied, rank in (("first", 0), ("last", 1)):
        target = tmp_path / tied / "checkpoint-2"
        assert run("convert", stock, target, "--tied", tied).code == 0
        file = f"model_state.tp0{rank}.pdparams"
        array = read_rank_file(stock, file).arrays[name]
        expected = np.frombuffer((stock / file).read_bytes(), np.float32, array.shape[0], array.begin)
        assert np.array_equal(paddleformers_fc.open(target).read(name), expected)


# ---- What is refused.


def test_safetensors_of_a_rank_with_another_copy_or_in_the_orientation_of_the_model_are_refused(
    runs: Runs, tmp_path: Path
) -> None:
    stock = shutil.copytree(runs("tp2", WAYS["canonical"]), tmp_path / "checkpoint-2")
    path = stock / "model.tp01.safetensors"
    arrays = load_file(path)
    arrays["model.norm.weight"][0] += 1
    save_file(arrays, path, {"format": "pt"})
    with pytest.raises(Diverged, match="1 array") as caught:
        paddleformers_fc.open(stock).export(tmp_path / "hf")
    assert caught.value.evidence == (f"model.norm.weight: model.tp00.safetensors and {path.name} differ",)
    save_file(load_file(path), path, {"format": "np"})
    with pytest.raises(FormatError, match="orientation of PaddleFormers"):
        open_checkpoint(stock)


def test_fused_layers_that_save_to_hf_stores_in_neither_form_are_named(runs: Runs) -> None:
    stock = runs("dp2", WAYS["canonical"], model=ERNIE)
    stored = "up_gate_proj.weight: save_to_hf stores them"
    assert_refused(lambda: open_checkpoint(stock), MappingError, "cannot be assigned to parameters", stored)


def test_experts_of_which_the_files_do_not_show_the_rank_are_refused(runs: Runs) -> None:
    stock = runs("sd2(ep2)", WAYS["canonical"], model=ERNIE)
    evidence = "model.moe_sharding00.safetensors: axis moe_sharding"
    assert_refused(lambda: open_checkpoint(stock), FormatError, "expert-parallel", evidence)


def test_files_of_expert_parallel_ranks_without_one_of_them_are_refused(runs: Runs, tmp_path: Path) -> None:
    stock = copied(runs("sd2(ep2)", WAYS["stock"], True, ERNIE), tmp_path / "checkpoint-2")
    for rank in range(2):
        (stock / f"saved_signal_{rank}").unlink()
    assert_refused(lambda: open_checkpoint(stock), FormatError, "expert-parallel", "0 files saved_signal_*")
    (stock / "model_state.moe_sharding00.pdparams").unlink()
    missing = "model: moe_sharding00"
    assert_refused(lambda: open_checkpoint(stock), Corrupt, "Files of some ranks are missing", missing)


def test_experts_that_two_tensor_parallel_ranks_have_are_refused(runs: Runs, tmp_path: Path) -> None:
    stock = copied(runs("tp2(ep2)", WAYS["stock"], model=ERNIE), tmp_path / "checkpoint-2")
    first, second = (stock / f"model_state.tp0{rank}_moe_sharding0{rank}.pdparams" for rank in range(2))
    second.rename(stock / "kept")
    shutil.copy(first, second)
    assert_refused(lambda: open_checkpoint(stock), FormatError, "expert-parallel", "is on several ranks")
    second.rename(stock / "model_state.tp01_moe_sharding00.pdparams")
    unexpected = "model: tp01_moe_sharding00 is unexpected: no rank has these experts"
    assert_refused(lambda: open_checkpoint(stock), Corrupt, "Files of some ranks are missing", unexpected)


LAST = "optimizer.tp01_shard01.pdopt"
STEP_2, STEP_3 = (b"last_epoch\x94K" + bytes([step]) for step in (2, 3))
DAMAGES: dict[str, tuple[Damage, type[FlexError], str, str]] = {
    "without a file": (without(LAST), Corrupt, "Files of some ranks are missing", "tp01_shard01"),
    "without a configuration": (without("config.json"), NotACheckpoint, "not describe the model", "config.json is not"),
    "without names": (without("model_meta.json"), Corrupt, "not contain all", "belongs to no stored parameter"),
    "of two steps": (replaced(LAST, STEP_2, STEP_3), Corrupt, "files of different steps", f"{LAST}: step 3"),
    "of two grids": (with_file("optimizer.tp00.pdopt"), FormatError, "of two checkpoints", "optimizer.tp00.pdopt"),
    "with open weights": (with_file("model.safetensors"), FormatError, "of two checkpoints", "model.safetensors"),
    "of fewer ranks": (
        replaced("model_meta.json", b'"sharding_degree": 2', b'"sharding_degree": 4'),
        Corrupt,
        "different numbers of ranks",
        "sharding=4",
    ),
    "of another size": (
        with_json("config.json", intermediate_size=96),
        Corrupt,
        "not contain all",
        "on each of 2 ranks, declared [",
    ),
    "with a link outside": (linked_outside(LAST), FormatError, "links that lead out of the checkpoint", LAST),
    "with a linked state": (linked_outside("trainer_state.bin"), FormatError, "links that lead out", "trainer_state"),
    "with experts": (renamed(LAST, "optimizer.tp01_shard01_moe01.pdopt"), FormatError, "expert-parallel", "moe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_or_mixed_checkpoint_is_rejected_with_evidence_and_a_next_step(
    damage: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    change, kind, message, evidence = DAMAGES[damage]
    directory = copied(pair[0], tmp_path / "checkpoint-2")
    change(directory)
    assert format_of(directory) is not None
    assert_refused(lambda: open_checkpoint(directory).rules, kind, message, evidence)


@pytest.mark.parametrize(("degree", "length"), [(2.0, 2), ("2", 2), (1, float("inf")), (1, 2.0)])
def test_numbers_of_a_description_that_are_not_integers_are_refused(
    degree: object, length: object, tmp_path: Path
) -> None:
    (tmp_path / "model_state.pdparams").write_bytes(pickle.dumps({"a": np.zeros(2, np.float32)}, protocol=4))
    degrees = {**dict.fromkeys(("mp_degree", "pp_degree", "sharding_degree"), 1), "ep_degree": degree}
    parameters = {"structure_name_mapping": {"a": "a.w_0"}, "param_meta": {"a": [[length], 10]}}
    meta = {"parallel_config": degrees, "sharding_metas": {"tp00_pp00": parameters}}
    (tmp_path / "model_meta.json").write_text(json.dumps(meta))
    with pytest.raises(FormatError, match=r"model_meta\.json is not a valid file of a Paddle checkpoint"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("other", ["model_state.tp0.pdparams", "model_state.tp01_tp00.pdparams"])
def test_two_files_of_one_rank_are_refused_by_name(other: str, tmp_path: Path) -> None:
    names = ["model_state.tp00.pdparams", "model_state.tp01.pdparams"]
    for name in names:
        (tmp_path / name).touch()
    find_rank_files(tmp_path)
    (tmp_path / other).touch()
    with pytest.raises(FormatError, match="files of two checkpoints") as caught:
        find_rank_files(tmp_path)
    assert set(caught.value.evidence[0].split(", ")) == {names[0], other}


@pytest.mark.parametrize("name", ["model_state.tp999999_pp999999.pdparams", "model_state.moe_sharding999999.pdparams"])
def test_names_of_a_million_ranks_are_refused_by_the_number_of_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(Corrupt, match="Files of some ranks are missing") as caught:
        find_rank_files(tmp_path)
    (line,) = caught.value.evidence
    assert line.startswith("model: 1 file, but the names are of 10")


# ---- Files of another run or under the name of another rank are found by the numbers in them.


RUNS: Mapping[str, tuple[str, Mapping[str, Any], bool, Mapping[str, str]]] = {
    "half": ("tp2", STOCK, True, {}),
    "canonical": ("tp2", WAYS["canonical"], True, {}),
    "slices": ("sd2s3", STOCK, False, {}),
    "experts": ("sd2(ep2)", STOCK, True, ERNIE),
}
"""Layout, arguments, whether weights are bfloat16, and the model."""


def swap(directory: Path, one: str, other: str) -> None:
    (directory / one).rename(directory / "swapped")
    (directory / other).rename(directory / one)
    (directory / "swapped").rename(directory / other)


def repeat(directory: Path, one: str, other: str) -> None:
    shutil.copy(directory / one, directory / other)


MODELS = ("model_state.tp00.pdparams", "model_state.tp01.pdparams")
STATES = ("optimizer.tp00.pdopt", "optimizer.tp01.pdopt")
EXPERTS = ("model_state.moe_sharding00.pdparams", "model_state.moe_sharding01.pdparams")
EXPERT_STATES = ("optimizer.shard00.pdopt", "optimizer.shard01.pdopt")


@pytest.mark.parametrize(
    ("run", "change", "names", "evidence"),
    [
        ("half", swap, STATES, "model_state.tp00.pdparams and optimizer.tp00.pdopt are not from one save"),
        ("half", repeat, MODELS, "model_state.tp01.pdparams contains the values of model_state.tp00.pdparams"),
        ("canonical", swap, STATES, "model.tp00.safetensors and optimizer.tp00.pdopt are not from one save"),
        ("slices", repeat, EXPERT_STATES, f"{EXPERT_STATES[1]} contains the values of {EXPERT_STATES[0]}"),
        ("experts", swap, EXPERT_STATES, f"{EXPERTS[1]} and {EXPERT_STATES[1]} are not from one save"),
    ],
    ids=lambda value: getattr(value, "__name__", value[0] if isinstance(value, tuple) else value),
)
def test_files_of_ranks_under_other_names_are_refused(
    run: str,
    change: Callable[[Path, str, str], None],
    names: tuple[str, str],
    evidence: str,
    runs: Runs,
    tmp_path: Path,
) -> None:
    copy = shutil.copytree(runs(*RUNS[run]), tmp_path / "checkpoint-2")
    assert open_checkpoint(copy).catalog.count
    change(copy, *names)
    several = "files of several saves, or under the names of other ranks"
    assert_refused(lambda: open_checkpoint(copy), Corrupt, several, evidence)


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        (lambda directory: (directory / "rng_state_1.pth").unlink(), "missing: rng_state_1.pth"),
        (lambda directory: swap(directory, "rng_state_0.pth", "rng_state_1.pth"), "the seed of local_seed is"),
    ],
    ids=["missing", "exchanged"],
)
def test_random_generators_of_another_rank_or_of_some_ranks_alone_are_refused(
    runs: Runs, tmp_path: Path, change: Callable[[Path], object], evidence: str
) -> None:
    directory = Path(shutil.copytree(runs(*RUNS["half"]), tmp_path / "checkpoint-2"))
    paddleformers_fc.open(directory).verify()
    change(directory)
    opened = paddleformers_fc.open(directory)
    for work in (opened.verify, lambda: opened.convert(tmp_path / "flex")):
        assert_refused(work, Corrupt, "random generators of", evidence)
